"""gymnax's MinAtar games against the minatar package, step by step.

gymnax plays, and every step is taken again in MinAtar's own code, which is handed what gymnax drew:
the actions that were executed, and the random numbers of resets and of Freeway's new cars.
"""

from types import SimpleNamespace
from typing import Any

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import minatar
import minatar.gym
import numpy as np
from gymnax.wrappers.purerl import StickyActionWrapper

STICKY = 0.1
if "MinAtar/Breakout-v0" not in gymnasium.registry:  # another test may have done it
    minatar.gym.register_envs()


def keep_the_ball(game, aim):
    """Towards the column where Breakout's ball comes down or, with aim 1, the one after that.

    Met in its old column the ball goes on to the same side, met in its new one it goes back:
    drawing the aim clears walls. Plain arithmetic, so that it plays the NumPy game too.
    """
    falls = game.ball_dir >= 2
    dx = 2 * ((game.ball_dir == 1) | (game.ball_dir == 2)) - 1
    column = (game.ball_x + dx * (1 + falls * (7 - game.ball_y + aim))) % 20
    column = column * (column < 10) + (19 - column) * (column > 9)  # mirrored at the sides
    return 1 * (column < game.pos) + 3 * (column > game.pos)


def hunt(game, aim):
    """Where the nearest alien of SpaceInvaders will be, to fire, and out of the way of bullets."""
    alien, bullet = game.alien_map.sum(0) > 0, game.e_bullet_map[5:9].sum(0) > 0
    nearest = jnp.argmin(jnp.where(alien, jnp.abs(jnp.arange(10) - game.pos), 99))
    nearest += game.alien_dir * (game.alien_move_timer < 5)
    column = jnp.clip(game.pos + jnp.array([0, -1, 1]), 0, 9)
    return jnp.array([5, 1, 3])[jnp.argmin(99 * bullet[column] + jnp.abs(column - nearest))]


def cross(game, aim):
    """Up, the only way in Freeway."""
    return 2


def play(env_id, policy, shares, num_steps):
    """gymnax's game with six actions, sticky ones and no time limit, in one environment per share.

    A share is how often an action is drawn blindly instead of the policy's. Returns what reset
    returned, and a record of arrays (environment, step).
    """
    env, params = gymnax.make(env_id, use_minimal_action_set=False)
    assert env.num_actions == 6
    params: Any = params
    params = params.replace(max_steps_in_episode=np.iinfo(np.int32).max)
    env = StickyActionWrapper(env, STICKY)

    def step(state, key, share):
        aim_key, blind_key, action_key, step_key = jax.random.split(key, 4)
        action = policy(state.env_state, jax.random.bernoulli(aim_key).astype(int))
        blind = jax.random.bernoulli(blind_key, share)
        action = jnp.where(blind, jax.random.randint(action_key, (), 0, 6), action)
        obs, state, reward, terminated, truncated, info = env.step(step_key, state, action, params)
        record = {"obs": obs, "final": info["final_observation"], "reward": reward}
        record |= {"action": action, "executed": state.last_action, "state": state.env_state}
        return state, record | {"terminated": terminated, "truncated": truncated}

    def run(key, share):
        reset_key, key = jax.random.split(key)
        obs, state = env.reset(reset_key, params)
        keys = jax.random.split(key, num_steps)
        _, record = jax.lax.scan(lambda state, key: step(state, key, share), state, keys)
        return {"obs": obs, "executed": state.last_action, "state": state.env_state}, record

    inputs = jax.random.split(jax.random.key(0), len(shares)), jnp.array(shares)
    options: Any = {"xla_backend_optimization_level": 0}  # halves what takes long here: compiling
    program = jax.jit(jax.vmap(run)).lower(*inputs).compile(options)
    start, record = jax.tree.map(np.asarray, program(*inputs))
    return SimpleNamespace(**start), SimpleNamespace(**record)


def replay(name, played, generator):
    """MinAtar's own game shows and says the same at every step of every environment.

    generator(state) stands in for MinAtar's random generator, with what led to gymnax's state.
    """
    start, record = played
    num_envs, num_steps = record.action.shape
    for i in range(num_envs):
        first, states = jax.tree.map(lambda x, i=i: x[i], (start.state, record.state))
        game = minatar.Environment(name, sticky_action_prob=0.0)
        game.env.random = generator(first)
        game.reset()
        np.testing.assert_array_equal(start.obs[i], game.state())
        for t in range(num_steps):
            place = f"environment {i}, step {t}"
            game.env.random = generator(jax.tree.map(lambda x, t=t: x[t], states))
            reward, terminated = game.act(record.executed[i, t])
            assert (record.reward[i, t], record.terminated[i, t]) == (reward, terminated), place
            np.testing.assert_array_equal(record.final[i, t], game.state(), place)
            if terminated:
                game.reset()
            np.testing.assert_array_equal(record.obs[i, t], game.state(), place)
    assert not record.truncated.any()


def test_breakout():
    """Also of its sticky actions: a tenth of the steps repeat what was executed before."""
    played = play("Breakout-MinAtar", keep_the_ball, [1, 0.5, 0.2, 0.05, 0, 0, 0, 0], 5000)
    replay("breakout", played, lambda s: SimpleNamespace(randint=lambda n: int(s.ball_x == 9)))
    start, record = played
    # What is rare is among the steps that were compared.
    assert set(start.state.ball_x) == {0, 9}
    assert record.terminated.sum() > 500
    assert record.state.time.max() > 1000  # gymnax's own time limit
    bricks = record.state.brick_map.sum((2, 3))
    new_walls = (bricks[:, 1:] > bricks[:, :-1]) & ~record.terminated[:, 1:]
    assert new_walls.sum() > 10
    action, executed = record.action[0], record.executed[0]
    previous = np.concatenate([[0], executed[:-1]])
    assert ((executed == action) | (executed == previous)).all()
    shows = action != previous  # steps at which a repetition can be told
    for steps in (shows[1:], shows[1:] & record.terminated[0, :-1]):  # also after an end
        share, n = (executed == previous)[1:][steps].mean(), steps.sum()
        assert n > 100 and abs(share - STICKY) < 5 * np.sqrt(STICKY * (1 - STICKY) / n)


def test_space_invaders():
    played = play("SpaceInvaders-MinAtar", hunt, [1, 0.5, 0.2, 0.1, 0, 0], 2000)
    replay("space_invaders", played, lambda state: None)  # nothing in it is random
    _, record = played
    assert record.terminated.sum() > 50
    assert (np.diff(record.state.ramp_index) > 0).sum() > 5  # waves cleared, the next is faster


def test_freeway():
    """Up to its end: MinAtar terminates it after 2,500 frames, which gymnax makes a time limit."""

    def cars(state):
        speed = state.cars[:, 3]
        return SimpleNamespace(randint=lambda *_: abs(speed), rand=lambda n: (speed > 0) * 1.0)

    played = play("Freeway-MinAtar", cross, [1, 0.5, 0.2, 0], 2000)
    replay("freeway", played, cars)
    assert played[1].reward.sum() > 20  # each time the cars get new speeds


def test_minatars_environment_for_gymnasium_has_the_same_settings():
    """Six actions, the same sticky ones, and no time limit."""
    env = gymnasium.make("MinAtar/Breakout-v0", disable_env_checker=True)
    assert isinstance(env.action_space, gymnasium.spaces.Discrete) and env.action_space.n == 6
    assert env.spec and env.spec.max_episode_steps is None
    assert env.unwrapped.game.sticky_action_prob == STICKY  # ty: ignore[missing-attribute]

"""gymnax's Breakout against the minatar package's, step by step.

gymnax plays, and every step is taken again in MinAtar's own code, which is handed what gymnax drew:
the actions that were executed, and on which side the ball starts.
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
import pytest
from gymnax.wrappers.purerl import StickyActionWrapper

STICKY = 0.1
NUM_STEPS = 5000
SHARES = (1, 0.5, 0.2, 0, 0, 0)  # of an environment's actions that are drawn blindly
if "MinAtar/Breakout-v0" not in gymnasium.registry:  # another test may have done it
    minatar.gym.register_envs()


def keep_the_ball(game, aim):
    """Towards the column where the ball comes down or, with aim 1, the one after that.

    Met in its old column the ball goes on to the same side, met in its new one it goes back:
    drawing the aim clears walls.
    """
    falls = game.ball_dir >= 2
    dx = 2 * ((game.ball_dir == 1) | (game.ball_dir == 2)) - 1
    column = (game.ball_x + dx * (1 + falls * (7 - game.ball_y + aim))) % 20
    column = jnp.where(column < 10, column, 19 - column)  # mirrored at the sides
    return 1 * (column < game.pos) + 3 * (column > game.pos)


@pytest.fixture(scope="module")
def played():
    """What reset returned, and a record of arrays (environment, step).

    With six actions, sticky ones and no time limit, as `python dqn_linen.py minatar` plays.
    """
    made: Any = gymnax.make("Breakout-MinAtar", use_minimal_action_set=False)
    env, params = StickyActionWrapper(made[0], STICKY), made[1]
    params = params.replace(max_steps_in_episode=np.iinfo(np.int32).max)

    def step(state, key, share):
        aim_key, blind_key, action_key, step_key = jax.random.split(key, 4)
        action = keep_the_ball(state.env_state, jax.random.bernoulli(aim_key).astype(int))
        blind = jax.random.bernoulli(blind_key, share)
        action = jnp.where(blind, jax.random.randint(action_key, (), 0, 6), action)
        obs, state, reward, terminated, truncated, info = env.step(step_key, state, action, params)
        record = {"obs": obs, "final": info["final_observation"], "reward": reward}
        record |= {"action": action, "executed": state.last_action, "state": state.env_state}
        return state, record | {"terminated": terminated, "truncated": truncated}

    def run(key, share):
        reset_key, key = jax.random.split(key)
        obs, state = env.reset(reset_key, params)
        keys = jax.random.split(key, NUM_STEPS)
        _, record = jax.lax.scan(lambda state, key: step(state, key, share), state, keys)
        return {"obs": obs, "state": state.env_state}, record

    inputs = jax.random.split(jax.random.key(0), len(SHARES)), jnp.array(SHARES)
    options: Any = {"xla_backend_optimization_level": 0}  # halves what takes long here: compiling
    program = jax.jit(jax.vmap(run)).lower(*inputs).compile(options)
    start, record = jax.tree.map(np.asarray, program(*inputs))
    return SimpleNamespace(**start), SimpleNamespace(**record)


def test_minatars_own_game_shows_and_pays_the_same_at_every_step(played):
    start, record = played
    for i in range(len(SHARES)):
        game = minatar.Environment("breakout", sticky_action_prob=0.0)
        game.env.random = SimpleNamespace(randint=lambda n, i=i: int(start.state.ball_x[i] == 9))
        game.reset()
        np.testing.assert_array_equal(start.obs[i], game.state())
        for t in range(NUM_STEPS):
            place = f"environment {i}, step {t}"
            reward, terminated = game.act(record.executed[i, t])
            assert (record.reward[i, t], record.terminated[i, t]) == (reward, terminated), place
            np.testing.assert_array_equal(record.final[i, t], game.state(), place)
            if terminated:
                right = int(record.state.ball_x[i, t] == 9)
                game.env.random = SimpleNamespace(randint=lambda n, right=right: right)
                game.reset()
            np.testing.assert_array_equal(record.obs[i, t], game.state(), place)
    assert not record.truncated.any()
    # What is rare is among the steps that were compared.
    assert set(start.state.ball_x) == {0, 9}
    assert record.terminated.sum() > 500
    assert record.state.time.max() > 1000  # gymnax's own time limit
    bricks = record.state.brick_map.sum((2, 3))
    new_walls = (bricks[:, 1:] > bricks[:, :-1]) & ~record.terminated[:, 1:]
    assert new_walls.sum() > 5


def test_a_tenth_of_the_steps_repeat_what_was_executed_before(played):
    """Also where an episode ended before; the package's environment has the same settings."""
    _, record = played
    action, executed = record.action[0], record.executed[0]
    previous = np.concatenate([[0], executed[:-1]])
    assert ((executed == action) | (executed == previous)).all()
    shows = action != previous  # steps at which a repetition can be told
    for steps in (shows[1:], shows[1:] & record.terminated[0, :-1]):
        share, n = (executed == previous)[1:][steps].mean(), steps.sum()
        assert n > 100 and abs(share - STICKY) < 5 * np.sqrt(STICKY * (1 - STICKY) / n)
    env: Any = gymnasium.make("MinAtar/Breakout-v0", disable_env_checker=True)
    assert (env.action_space, env.spec.max_episode_steps) == (gymnasium.spaces.Discrete(6), None)
    assert env.unwrapped.game.sticky_action_prob == STICKY

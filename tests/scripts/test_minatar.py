"""Breakout in gymnax and in the minatar package, compared step by step.

Each step in gymnax is repeated in minatar with the same random draws: the actions executed, and the
side on which the ball starts.
"""

import sys
from types import SimpleNamespace
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import minatar
import numpy as np
from gymnax.wrappers.purerl import StickyActionWrapper

import dqn_linen

NUM_STEPS = 5000
RANDOM = (1, 0.5, 0.2, 0, 0, 0)  # fraction of random actions in each environment


def keep_the_ball(game, aim):
    """Return the action that moves the paddle to where the ball lands, or one column further.

    If aim is 0, the ball lands on the paddle and keeps its horizontal direction. If aim is 1, the
    paddle goes one column further, and the ball returns. A random aim clears entire walls.
    """
    falls = game.ball_dir >= 2
    dx = 2 * ((game.ball_dir == 1) | (game.ball_dir == 2)) - 1
    column = (game.ball_x + dx * (1 + falls * (7 - game.ball_y + aim))) % 20
    column = jnp.where(column < 10, column, 19 - column)  # the sides reflect the ball
    return 1 * (column < game.pos) + 3 * (column > game.pos)


def play():
    """Return the result of reset, and a record whose arrays have the axes (environment, step, ...).

    There are six actions, sticky actions and no time limit, as in the minatar preset of dqn_linen.
    """
    made: Any = gymnax.make("Breakout-MinAtar", use_minimal_action_set=False)
    env, params = StickyActionWrapper(made[0], 0.1), made[1]
    params = params.replace(max_steps_in_episode=np.iinfo(np.int32).max)

    def step(state, key, fraction):
        aim_key, random_key, action_key, step_key = jax.random.split(key, 4)
        action = keep_the_ball(state.env_state, jax.random.bernoulli(aim_key).astype(int))
        is_random = jax.random.bernoulli(random_key, fraction)
        action = jnp.where(is_random, jax.random.randint(action_key, (), 0, 6), action)
        obs, state, reward, terminated, truncated, info = env.step(step_key, state, action, params)
        record = {"obs": obs, "final": info["final_observation"], "reward": reward}
        record |= {"executed": state.last_action, "state": state.env_state}
        return state, record | {"terminated": terminated, "truncated": truncated}

    def run(key, fraction):
        reset_key, key = jax.random.split(key)
        obs, state = env.reset(reset_key, params)
        keys = jax.random.split(key, NUM_STEPS)
        _, record = jax.lax.scan(lambda state, key: step(state, key, fraction), state, keys)
        return {"obs": obs, "state": state.env_state}, record

    inputs = jax.random.split(jax.random.key(0), len(RANDOM)), jnp.array(RANDOM)
    start, record = jax.tree.map(np.asarray, jax.jit(jax.vmap(run))(*inputs))
    return SimpleNamespace(**start), SimpleNamespace(**record)


def test_every_observation_reward_and_end_matches_minatar():
    start, record = play()
    for i in range(len(RANDOM)):
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
    # Check that rare events occurred.
    assert set(start.state.ball_x) == {0, 9}
    assert record.terminated.sum() > 500
    bricks = record.state.brick_map.sum((2, 3))
    new_walls = (bricks[:, 1:] > bricks[:, :-1]) & ~record.terminated[:, 1:]
    assert record.state.time.max() > 1000  # the default time limit of gymnax
    assert new_walls.sum() > 5


def test_the_preset_has_the_settings_of_minatar(monkeypatch):
    """Comments name the constants in the examples/dqn.py of MinAtar. Flags override the preset.

    test_dqn_structure.py compares the other scripts with this one.
    """
    monkeypatch.setattr(sys, "argv", ["dqn_linen.py", "minatar", "--seed", "3"])
    args = dqn_linen.parse_args()
    constants: dict[str, Any] = {
        "batch_size": 32,  # BATCH_SIZE
        "buffer_size": 100_000,  # REPLAY_BUFFER_SIZE
        "target_network_frequency": 1_000,  # TARGET_NETWORK_UPDATE_FREQ
        "train_frequency": 1,  # TRAINING_FREQ
        "total_timesteps": 5_000_000,  # NUM_FRAMES
        "exploration_steps": 100_000,  # FIRST_N_FRAMES
        "learning_starts": 5_000,  # REPLAY_START_SIZE
        "start_e": 1.0,  # EPSILON at first
        "end_e": 0.1,  # END_EPSILON
        "learning_rate": 0.00025,  # STEP_SIZE
        "rmsprop_decay": 0.95,  # GRAD_MOMENTUM, SQUARED_GRAD_MOMENTUM
        "optimizer_eps": 0.01,  # MIN_SQUARED_GRAD
        "gamma": 0.99,  # GAMMA
    }
    constants |= {"optimizer": "rmsprop", "loss": "huber", "anneal_lr": False, "double_q": False}
    constants |= {"num_envs": 1, "hidden_sizes": (128,), "sticky_actions": 0.1, "seed": 3}
    assert constants.items() <= vars(args).items()
    assert (args.env_id, args.full_actions) == ("Breakout-MinAtar", True)
    assert args.max_episode_steps == np.iinfo(np.int32).max

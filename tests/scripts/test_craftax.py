"""Compare envs/craftax_symbolic.py with the environment in the craftax package.

The game takes a long time to compile, so one scan steps all environments with the same keys, and
the tests read its results. Only Craftax-Classic is tested; Craftax uses the same class.
"""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs import check

NUM_ENVS, NUM_STEPS, LIMIT, NUM_WORLDS = 6, 12, 8, 3


@pytest.fixture(scope="module")
def transitions():
    """Step three environments with the same keys and actions: pooled, endless, and the package's.

    Return arrays (NUM_STEPS, NUM_ENVS, ...). At the start, the player in environment 0 is dying.
    """
    pytest.importorskip("craftax")
    from craftax.craftax_env import make_craftax_env_from_name

    from envs import craftax_symbolic

    pooled = craftax_symbolic.CraftaxClassicSymbolic(NUM_WORLDS)
    envs = {
        "pooled": pooled,
        "endless": craftax_symbolic.CraftaxClassicSymbolicEndless(),
        "theirs": make_craftax_env_from_name("Craftax-Classic-Symbolic-v1", auto_reset=True),
    }
    params = pooled.default_params.replace(max_timesteps=LIMIT)

    def play(key):
        _, start = jax.vmap(pooled.reset)(jax.random.split(key, NUM_ENVS))
        dying = jnp.arange(NUM_ENVS) == 0
        health = jnp.where(dying, 1, start.player_health).astype(start.player_health.dtype)
        recover = jnp.where(dying, -99, start.player_recover).astype(jnp.float32)
        start = start.replace(player_health=health, player_recover=recover)

        def step(states, key):
            *keys, action_key = jax.random.split(key, NUM_ENVS + 1)
            keys = jnp.stack(keys)
            action = jax.random.randint(action_key, (NUM_ENVS,), 0, pooled.num_actions)
            results = {}
            for name, env in envs.items():
                take = jax.vmap(env.step, (0, 0, 0, None))
                results[name] = take(keys, states[name], action, params)
            return {name: result[1] for name, result in results.items()}, results

        keys = jax.random.split(key, NUM_STEPS)
        _, results = jax.lax.scan(step, dict.fromkeys(envs, start), keys)
        return {"start": start} | results

    record = jax.jit(play)(jax.random.PRNGKey(1))
    return SimpleNamespace(env=pooled, **jax.tree.map(np.asarray, record))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_steps_match_the_package(transitions):
    """The endless environment always matches. The pooled one matches until its first restart."""
    obs, state, reward, terminated, truncated, _ = transitions.endless
    done = terminated | truncated
    assert_same(transitions.theirs[:4], (obs, state, reward, done))
    assert done.any(0).all()  # every environment restarts
    first = done.cumsum(0) == 0
    assert_same(*jax.tree.map(lambda x: x[first], (transitions.pooled, transitions.endless)))


def test_death_terminates_and_the_limit_truncates(transitions):
    _, _, reward, terminated, truncated, info = transitions.pooled
    ends = np.zeros((NUM_STEPS, NUM_ENVS), bool)
    ends[0, 0] = True  # the player of environment 0 dies in the first step
    np.testing.assert_array_equal(terminated, ends)
    ends[:] = False
    ends[LIMIT - 1, 1:] = ends[LIMIT, 0] = True
    np.testing.assert_array_equal(truncated, ends)
    np.testing.assert_array_equal(info["discount"], np.where(terminated, 0, 1))
    assert reward.dtype == np.float32


def test_a_restart_uses_one_of_the_worlds_that_the_package_generates(transitions):
    _, state, _, terminated, truncated, _ = transitions.pooled
    worlds = transitions.env.worlds
    done = terminated | truncated
    found = set()
    for world in (*transitions.start.map, *state.map[done]):
        [number] = np.flatnonzero((worlds.map == world).all(axis=(1, 2)))
        found.add(int(number))
    assert found == {0, 1, 2}  # all worlds appear in 13 draws
    assert not state.timestep[done].any() and (state.timestep[~done] > 0).all()
    key = jax.random.split(jax.random.PRNGKey(0), NUM_WORLDS)[1]
    _, theirs = jax.jit(transitions.env.game.reset_env)(key, transitions.env.default_params)
    ours = jax.tree.map(lambda x: x[1 % len(x)], worlds)
    # Separately compiled programs can differ by rounding.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), ours, theirs)


def test_check_accepts_craftax(transitions):
    check.check_gymnax(transitions.env)

"""Craftax beside the package's own environments, which restart by making every world anew.

A game takes long to compile, so one scan plays all environments with the same keys, and the tests
read its record. Craftax, which is the larger one, is played with a pool of worlds only. All takes
about 130 CPU seconds.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs import check

NUM_ENVS, NUM_STEPS, LIMIT, NUM_WORLDS = 6, 12, 8, 3
QUICK: Any = {"xla_backend_optimization_level": 0}  # to compile in two thirds of the time


@pytest.fixture(scope="module", params=["CraftaxClassicSymbolic", "CraftaxSymbolic"])
def played(request):
    """What an environment of three worlds and the package's did with the same keys.

    Of Classic also one of endless worlds and the package's that restarts. Arrays are (NUM_STEPS,
    NUM_ENVS, ...). The player of environment 0 is about to die.
    """
    pytest.importorskip("craftax")
    from craftax.craftax_env import make_craftax_env_from_name

    from envs import craftax_symbolic

    classic = request.param == "CraftaxClassicSymbolic"
    name = "Craftax-Classic-Symbolic-v1" if classic else "Craftax-Symbolic-v1"
    unending = make_craftax_env_from_name(name, auto_reset=False)
    pooled = getattr(craftax_symbolic, request.param)(NUM_WORLDS)
    envs = {"pooled": pooled}
    if classic:
        envs["theirs"] = make_craftax_env_from_name(name, auto_reset=True)
        envs["endless"] = craftax_symbolic.CraftaxClassicSymbolicEndless()
    params = pooled.default_params.replace(max_timesteps=LIMIT)

    def play(key):
        first_obs, start = jax.vmap(pooled.reset)(jax.random.split(key, NUM_ENVS))
        dying = jnp.arange(NUM_ENVS) == 0
        health = jnp.where(dying, 1, start.player_health).astype(start.player_health.dtype)
        recover = jnp.where(dying, -99, start.player_recover).astype(jnp.float32)
        start = start.replace(player_health=health, player_recover=recover)

        def step(states, key):
            *keys, action_key = jax.random.split(key, NUM_ENVS + 1)
            keys = jnp.stack(keys)
            action = jax.random.randint(action_key, (NUM_ENVS,), 0, pooled.num_actions)

            def take(env, keys, state):
                return jax.vmap(env.step, (0, 0, 0, None))(keys, state, action, params)

            results = {name: take(env, keys, states[name]) for name, env in envs.items()}
            first_keys = jax.vmap(jax.random.split)(keys)[:, 0]  # the others are for restarts
            going_on = take(unending, first_keys, states["pooled"])
            return {name: results[name][1] for name in envs}, (results, going_on)

        states = dict.fromkeys(envs, start)
        _, records = jax.lax.scan(step, states, jax.random.split(key, NUM_STEPS))
        return first_obs, start, *records

    key = jax.random.PRNGKey(1)
    compiled = jax.jit(play).lower(key).compile(compiler_options=QUICK)
    names = ["first_obs", "start", "results", "going_on"]
    record = dict(zip(names, jax.tree.map(np.asarray, compiled(key)), strict=True))
    return SimpleNamespace(env=pooled, classic=classic, **record)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b):
    """For what was compiled apart, and may differ in the last digit."""
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), a, b)


def test_all_is_the_packages_to_the_last_bit(played):
    """In the pool until an episode ends; with endless worlds always."""
    obs, state, reward, terminated, truncated, info = played.results["pooled"]
    done = terminated | truncated
    their_obs, their_state, their_reward, their_done, _ = played.going_on
    assert_same((info["final_observation"], reward, done), (their_obs, their_reward, their_done))
    assert_same(*jax.tree.map(lambda x: x[~done], ((obs, state), (their_obs, their_state))))
    if played.classic:
        obs, state, reward, terminated, truncated, _ = played.results["endless"]
        assert_same(played.results["theirs"][:4], (obs, state, reward, terminated | truncated))
        assert (terminated | truncated).any(0).all()  # so every environment was restarted


def test_death_terminates_and_the_limit_truncates(played):
    _, _, reward, terminated, truncated, info = played.results["pooled"]
    ends = np.zeros((NUM_STEPS, NUM_ENVS), bool)
    ends[0, 0] = True  # which died in its first step
    np.testing.assert_array_equal(terminated, ends)
    ends[:] = False
    ends[LIMIT - 1, 1:] = ends[LIMIT, 0] = True
    np.testing.assert_array_equal(truncated, ends)
    np.testing.assert_array_equal(info["discount"], np.where(terminated, 0, 1))
    assert reward.dtype == np.float32


def test_a_restart_begins_one_of_the_worlds_that_the_package_makes(played):
    obs, state, _, terminated, truncated, _ = played.results["pooled"]
    worlds = played.env.worlds.map.astype(np.int32)
    assert len(worlds) == NUM_WORLDS
    done = terminated | truncated
    begun = []
    for world in (*played.start.map, *state.map[done]):
        [number] = np.flatnonzero((worlds == world).all(axis=tuple(range(1, worlds.ndim))))
        begun.append(int(number))
    assert set(begun) == {0, 1, 2}  # of 13 draws
    assert not state.timestep[done].any() and (state.timestep[~done] > 0).all()
    seen = [*played.first_obs, *obs[done]]
    by_world = dict(zip(begun, seen, strict=True))
    for number, one in zip(begun, seen, strict=True):
        assert_close(one, by_world[number])
    if played.classic:  # of the other, another ten seconds to compile
        env = played.env
        key = jax.random.split(jax.random.PRNGKey(0), NUM_WORLDS)[1]
        _, theirs = jax.jit(env.game.reset_env)(key, env.default_params)
        assert_close(jax.tree.map(lambda x: x[1 % len(x)], env.worlds), theirs)


def test_it_is_as_the_scripts_need_it(played):
    check.check_gymnax(played.env)

"""Craftax beside the package's own environments, which restart by making every world anew.

A game takes long to compile, so one scan plays all environments with the same keys, and the tests
read its record. Craftax, which is the larger one, is played with a pool of worlds only. All takes
about 130 CPU seconds.
"""

import builtins
import importlib
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    name = f"Craftax-{'Classic-' * classic}Symbolic-v1"
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
            going_on = {name: take(unending, first_keys, states[name]) for name in envs}
            return {name: results[name][1] for name in envs}, (results, going_on)

        states = dict.fromkeys(envs, start)
        _, records = jax.lax.scan(step, states, jax.random.split(key, NUM_STEPS))
        return first_obs, start, *records

    key = jax.random.PRNGKey(1)
    compiled = jax.jit(play).lower(key).compile(compiler_options=QUICK)
    names = ["first_obs", "start", "results", "going_on"]
    record = dict(zip(names, jax.tree.map(np.asarray, compiled(key)), strict=True))
    return SimpleNamespace(envs=envs, params=params, **record)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b):
    """For what was compiled apart, and may differ in the last digit."""
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), a, b)


def test_endless_worlds_are_the_packages_to_the_last_bit(played):
    if "endless" not in played.envs:
        pytest.skip("played with a pool only")
    obs, state, reward, terminated, truncated, _ = played.results["endless"]
    assert_same(played.results["theirs"][:4], (obs, state, reward, terminated | truncated))
    assert (terminated | truncated).any(0).all()  # so every environment was restarted


def test_an_episode_in_the_pool_is_the_packages_to_the_last_bit(played):
    obs, state, reward, terminated, truncated, info = played.results["pooled"]
    done = terminated | truncated
    their_obs, their_state, their_reward, their_done, _ = played.going_on["pooled"]
    assert_same((info["final_observation"], reward, done), (their_obs, their_reward, their_done))
    on = jax.tree.map(lambda x: x[~done], ((obs, state), (their_obs, their_state)))
    assert_same(*on)


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


def test_a_restart_begins_one_of_the_worlds(played):
    obs, state, _, terminated, truncated, _ = played.results["pooled"]
    worlds = played.envs["pooled"].worlds.map.astype(np.int32)
    assert len(worlds) == NUM_WORLDS
    assert not (worlds[0] == worlds[1]).all() and not (worlds[1] == worlds[2]).all()
    done = terminated | truncated

    def number_of(world):
        (number,) = np.flatnonzero((worlds == world).all(axis=tuple(range(1, worlds.ndim))))
        return int(number)

    begun = [number_of(world) for world in (*played.start.map, *state.map[done])]
    assert set(begun) == {0, 1, 2}  # of 13 draws
    assert not state.timestep[done].any() and (state.timestep[~done] > 0).all()
    by_world = dict(zip(begun, (*played.first_obs, *obs[done]), strict=True))
    for number, seen in zip(begun, (*played.first_obs, *obs[done]), strict=True):
        assert_close(seen, by_world[number])


def test_worlds_are_as_the_package_makes_them_from_the_seed(played):
    if "theirs" not in played.envs:
        pytest.skip("another ten seconds to compile")
    env = played.envs["pooled"]
    key = jax.random.split(jax.random.PRNGKey(0), NUM_WORLDS)[1]
    _, theirs = jax.jit(env.game.reset_env)(key, env.default_params)
    ours = jax.tree.map(lambda x: x[1 % len(x)], env.worlds)
    assert_close(ours, theirs)


def test_shapes_and_types_stay_the_same(played):
    key = jax.random.PRNGKey(0)
    for name in {"pooled", "endless"} & set(played.envs):
        env = played.envs[name]
        obs, state = jax.eval_shape(env.reset, key)
        assert obs.shape == env.observation_space(played.params).shape
        assert obs.dtype == jnp.float32
        result = jax.eval_shape(env.step, key, state, jnp.int32(0))
        assert len(result) == 6
        kind = lambda x: (x.shape, x.dtype, x.weak_type)  # noqa: E731
        assert jax.tree.map(kind, (obs, state)) == jax.tree.map(kind, result[:2])
        scalars = [(x.shape, x.dtype) for x in result[2:5]]
        assert scalars == [((), jnp.float32), ((), jnp.bool), ((), jnp.bool)]
        assert kind(result[5]["final_observation"]) == kind(obs)


def test_one_environment_restarts_as_many_do(played):
    env, key = played.envs["pooled"], jax.random.PRNGKey(2)
    obs, state = jax.jit(env.reset)(key)
    other_key = jax.random.PRNGKey(3)
    for done in (False, True):
        given = (jnp.array(done), other_key, env.default_params, obs, state)
        one = jax.jit(env.restart)(*given)
        rows = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), given)
        assert_close(one, jax.tree.map(lambda x: x[1], jax.jit(jax.vmap(env.restart))(*rows)))
        assert_close(one, env.reset(other_key) if done else (obs, state))


def test_fewer_than_no_worlds_are_an_error():
    pytest.importorskip("craftax")
    from envs.craftax_symbolic import CraftaxSymbolic

    with pytest.raises(ValueError, match="num_worlds must be 0 or more, not -1"):
        CraftaxSymbolic(num_worlds=-1)


def test_without_the_package_a_sentence_says_how_to_install_it(monkeypatch):
    true_import = builtins.__import__

    def no_craftax(name, *args, **options):
        if name.split(".")[0] == "craftax":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return true_import(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", no_craftax)
    monkeypatch.delitem(sys.modules, "envs.craftax_symbolic", False)
    with pytest.raises(
        ImportError, match=r"^Craftax needs a package: pip install craftax==1\.6\.1"
    ):
        importlib.import_module("envs.craftax_symbolic")

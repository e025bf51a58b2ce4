"""Environments from brax and MuJoCo Playground: restarts, episode ends, and names."""

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from running import main, rows, train

from envs import check
from envs.pooled import Pooled

LIMIT, NUM_STARTS = 4, 3


@struct.dataclass
class SumState:
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    info: dict


class Sum:
    """The observation is a random number plus all actions. Episodes terminate above 100."""

    action_size = 1

    def reset(self, key):
        return SumState(jax.random.uniform(key, (1,)), jnp.zeros(()), jnp.zeros(()), {"rng": key})

    def step(self, state, action):
        obs = state.obs + action
        return state.replace(obs=obs, reward=1.0, done=jnp.where(obs[0] > 100, 1.0, 0.0))


class Fragile(Sum):
    """Action 13 makes the reward NaN; action 14 makes obs and reward NaN."""

    def step(self, state, action):
        state = super().step(state, action)
        obs = jnp.where(action == 14, jnp.nan, state.obs)
        return state.replace(obs=obs, reward=jnp.where(action[0] >= 13, jnp.nan, 1.0))


def make(env_id):
    """Create the environment env_id. Skip the test if its package is not installed."""
    module, _, name = env_id.partition(":")
    pytest.importorskip({"envs.brax": "brax", "envs.playground": "mujoco_playground"}[module])
    return getattr(importlib.import_module(module), name)()


@pytest.fixture(scope="module")
def env():
    return Pooled(Sum(), LIMIT, NUM_STARTS)


def play(env, actions, key=0):
    """Take the actions in one environment. Return the results of reset and of all steps."""
    key = jax.random.PRNGKey(key)
    obs, state = env.reset(key)
    start = obs, state
    steps = []
    for action in actions:
        key, step_key = jax.random.split(key)
        obs, state, *result = env.step(step_key, state, jnp.float32([action]))
        steps.append((obs, state, *result))
    return start, steps


def test_only_done_terminates_and_only_the_limit_truncates(env):
    _, steps = play(env, [0, 200, 1, 1, 1, 1, 1])
    ends = [(bool(terminated), bool(truncated)) for _, _, _, terminated, truncated, _ in steps]
    no, over, limit = (False, False), (True, False), (False, True)
    assert ends == [no, over, no, no, no, limit, no]


def test_a_restart_uses_one_of_the_initial_states_and_keeps_the_last_observation(env):
    starts = {
        float(env.env.reset(key).obs[0]) for key in jax.random.split(jax.random.PRNGKey(0), 3)
    }
    found, keys = set(), set()
    for number in range(20):
        (first, _), steps = play(env, [1, 1, 1, 1, 0], number)
        obs, state, *_, info = steps[3]
        assert float(info["final_observation"][0]) == pytest.approx(float(first[0]) + 4)
        assert float(steps[4][0][0]) == float(obs[0])  # action 0 does not change obs
        assert int(state.time) == 0
        found |= {float(first[0]), float(obs[0])}
        keys.add(tuple(np.asarray(state.inner.info["rng"]).tolist()))
    assert found == starts
    assert len(keys) == 20  # keys differ even if initial states do not


@pytest.mark.parametrize("action", [13, 14])
def test_nan_in_the_simulation_terminates_the_episode(action):
    (start, _), steps = play(Pooled(Fragile(), LIMIT, NUM_STARTS), [1, action, 1, 1])
    obs, state, reward, terminated, truncated, info = steps[1]
    assert (float(reward), bool(terminated), bool(truncated)) == (0, True, False)
    last = float(start[0]) + 1
    assert float(info["final_observation"][0]) == pytest.approx(last)
    assert 0 <= float(obs[0]) < 1 and int(state.time) == 0  # the next episode has started
    assert float(steps[3][0][0]) == pytest.approx(float(obs[0]) + 2)
    assert [float(x[2]) for x in steps] == [1, 0, 1, 1]


def test_check_accepts_rewards_that_are_python_numbers(env):
    check.check_gymnax(env)


@pytest.mark.parametrize(
    ("module", "package", "command"),
    [
        ("envs.brax", "brax", "brax==0.14.2"),
        ("envs.craftax_symbolic", "craftax", "craftax==1.6.1"),
        ("envs.playground", "mujoco_playground", "playground==0.2.0"),
    ],
)
def test_a_missing_package_is_named(module, package, command, monkeypatch, capsys):
    """envs/check.py prints the message; a script raises it as a ModuleNotFoundError."""
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # makes the import fail
    with pytest.raises(SystemExit) as stopped:
        check.main(f"{module}:Any")
    sentence = f"{module} needs a package: pip install {command}\n"
    assert (stopped.value.code, capsys.readouterr().err) == (2, sentence)


@pytest.mark.parametrize(
    ("package", "env_id"),
    [
        ("brax", "envs.brax:HalfCheeta"),
        ("brax", "envs.brax:Spring"),
        ("mujoco_playground", "envs.playground:CheetahRunn"),
    ],
)
def test_a_mistyped_name_is_an_attribute_error(package, env_id):
    pytest.importorskip(package)
    module, _, name = env_id.partition(":")
    with pytest.raises(AttributeError, match=f"^{module} has no {name}$"):
        main("ppo_continuous_linen", "--env-id", env_id)


@pytest.mark.parametrize("backend", ["Generalized", "Positional", "Spring", "MJX"])
def test_the_name_chooses_the_robot_and_its_physics(backend, monkeypatch):
    pytest.importorskip("brax")
    from envs import brax

    monkeypatch.setattr(brax, "Pooled", lambda env: env)
    env = getattr(brax, f"InvertedPendulum{backend}")()
    assert type(env).__name__ == "InvertedPendulum"
    assert env.backend == backend.lower()


def test_all_robots_of_brax_are_available():
    pytest.importorskip("brax")
    from envs import brax

    missing = set(brax.envs._envs) - set(brax.ROBOTS.values())
    assert missing == {"fast", "swimmer"}  # fast is not a robot, and swimmer cannot be reset


# Two small environments, which compile in seconds.
ENV_IDS = ["envs.brax:InvertedPendulumSpring", "envs.playground:CartpoleBalance"]


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_steps_match_the_package_until_an_episode_ends(env_id):
    env = make(env_id)
    actions = np.random.default_rng(0).uniform(-1, 1, 20)
    (_, state), steps = play(env, actions)
    theirs = state.inner
    step = jax.jit(env.env.step)
    for action, (_, _, reward, terminated, _, info) in zip(actions, steps, strict=True):
        theirs = step(theirs, jnp.float32([action]))
        # Separately compiled programs can differ by rounding.
        np.testing.assert_allclose(info["final_observation"], theirs.obs, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(reward, theirs.reward, rtol=1e-4)
        assert terminated == (theirs.done > 0)
        if terminated:
            break


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_check_accepts_the_environment(env_id):
    assert check.check_gymnax(make(env_id)).is_continuous


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_a_script_trains(env_id, tmp_path):
    make(env_id)
    folder = train("ppo_continuous_linen", tmp_path, "run", "--env-id", env_id, iterations=2)
    assert len(rows(folder)) == 2

"""Gymnasium environments: transitions, errors, and the worker processes of async."""

import importlib
import multiprocessing
import os
import signal
import sys

import gymnasium
import minatar.gym
import numpy as np
import probes
import psutil
import pytest
from conftest import ROOT, start_process, wait_for
from frameworks import make_env
from running import command, info, train
from scripted import ArmError, Sensor
from sections import CONTINUOUS_IN_GYMNASIUM, scripts, stand_ins

import ppo_linen_gymnasium as script


@pytest.fixture(scope="module", autouse=True)
def forkserver():
    """Import the script once in the fork server, because importing it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # lets the server find the script
        multiprocessing.set_forkserver_preload([script.__name__, "scripted"])
        multiprocessing.get_context("forkserver").Process().start()


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Restore the imported script in sys.modules, because other tests may have reloaded it."""
    monkeypatch.setitem(sys.modules, script.__name__, script)


def make(env_id, num_envs, vectorization, seed=1):
    env = script.VecEnv(env_id, num_envs, vectorization, seed)
    return env, env.reset()


# === Transitions ================================================================================
minatar.gym.register_envs()
KINDS = [("Scripted-v0", "sync"), ("Scripted-v0", "async"), ("MinAtar/Breakout-v0", "sync")]


@pytest.mark.parametrize(("env_id", "vectorization"), KINDS)
def test_transitions_match_single_environments(env_id, vectorization):
    """A restart does not use up a step, and next_obs is the last observation of the episode.

    Each environment has a different seed, and the global NumPy generator does not change.
    """
    before = np.random.get_state(legacy=False)["state"]["key"].copy()
    env, obs = make(env_id, 4, vectorization)
    envs = [gymnasium.make(env_id) for _ in obs]
    seeds = np.random.SeedSequence(1).generate_state(4) // 2
    starts = [alone.reset(seed=int(seed))[0] for alone, seed in zip(envs, seeds, strict=True)]
    np.testing.assert_array_equal(obs, np.reshape(starts, obs.shape))
    rng, total, length, handed_out = np.random.default_rng(1), np.zeros(4), np.zeros(4), []
    for _ in range(300):
        action = rng.integers(0, env.num_actions, 4, dtype=np.uint8)
        obs, result = env.step(action)
        handed_out += [(x, x.copy()) for x in (obs, result["next_obs"])]
        assert tuple(result) == script.Storage._fields[3:]
        for i, alone in enumerate(envs):
            next_obs, reward, terminated, truncated, _ = alone.step(int(action[i]))
            total[i] += reward
            length[i] += 1
            expected = reward, terminated, truncated, next_obs, total[i], length[i]
            for name, value in zip(result, expected, strict=True):
                np.testing.assert_array_equal(result[name][i], value, err_msg=name)
            if terminated or truncated:
                next_obs, _ = alone.reset()
                total[i] = length[i] = 0
            np.testing.assert_array_equal(obs[i], next_obs)
    for x, then in handed_out:  # later steps must not overwrite earlier results
        np.testing.assert_array_equal(x, then)
    np.testing.assert_array_equal(np.random.get_state(legacy=False)["state"]["key"], before)


def test_returns_are_summed_in_float64():
    """float32 cannot represent 2**24 + 1."""
    env, _ = make("Rich-v0", 2, "sync")
    for _ in range(4):
        _, result = env.step(np.zeros(2, int))
    assert result["episode_return"].tolist() == [4 * (2**24 + 1)] * 2


ALL = (*scripts("Gymnasium"), *CONTINUOUS_IN_GYMNASIUM)


def is_discrete(name):
    return name.startswith(("ppo_linen", "dqn"))


def zero_action(name):
    return np.zeros(4, int) if is_discrete(name) else np.zeros((4, 2), np.float32)


def make_by(name, env_id):
    """Create four environments in this process, with the VecEnv of the script `name`."""
    other = importlib.import_module(name)
    return make_env(other, other.Args(env_id=env_id, num_envs=4, vectorization="sync"))


@pytest.mark.parametrize("name", stand_ins("Environment", ALL))
def test_a_resumed_run_starts_new_episodes(name):
    """The seeds of the new episodes depend only on the iteration."""
    env = make_by(name, "CartPole-v1" if is_discrete(name) else "Pendulum-v1")
    first, again = env.reset(), env.reset(7)
    np.testing.assert_array_equal(env.reset(7), again)
    rows = np.concatenate([first, again, env.reset(8)])
    assert len(np.unique(rows, axis=0)) == 12


def test_an_environment_with_a_wrapper_that_has_a_lambda():
    """The wrapper, which doubles the rewards, cannot be part of the EnvSpec."""
    rewards = []
    for env_id in ("ProbeSignal-v0", "DoubledProbeSignal-v0"):
        env, _ = make(env_id, 4, "sync")
        rewards.append(env.step(np.zeros(4, int))[1]["reward"])
    np.testing.assert_allclose(rewards[1], 2 * rewards[0])
    assert rewards[0].any()


@pytest.mark.parametrize("name", stand_ins("Environment", CONTINUOUS_IN_GYMNASIUM))
def test_bounds_in_float64(name):
    env = make_by(name, "Doubles-v0")
    assert env.action_low.dtype == env.action_high.dtype == np.float64
    obs = env.reset()
    _, result = env.step(np.tile(np.array([0.1, -1], "f"), (4, 1)))
    expected = probes.nearness(obs[:, :1], np.array([1.2, 0]))
    np.testing.assert_allclose(result["reward"], expected, atol=1e-6)


# === Calls and values ===========================================================================
@pytest.mark.parametrize("name", stand_ins("Environment", ALL))
@pytest.mark.parametrize("kind", ["f8", "i8", "u8", "f4", "i4", "u1"])
def test_64_bit_observations_become_float32(name, kind, monkeypatch):
    """JAX would take integers modulo 2**32. Other types are kept."""
    largest = 200 if kind == "u1" else 2.0**24
    obs = (largest, largest, 2.0**40 if kind in ("f8", "i8", "u8") else 0)
    space = gymnasium.spaces.Box(0, np.array(obs), (3,), kind)
    monkeypatch.setattr(Sensor, "observation_space", space)
    monkeypatch.setattr(Sensor, "obs", obs)
    env = make_by(name, "Sensor-v0" if is_discrete(name) else "ContinuousSensor-v0")
    first = env.reset()
    for _ in range(4):  # the last step ends the episodes
        last, result = env.step(zero_action(name))
    for found in (first, last, result["next_obs"]):
        assert found.dtype == ("f4" if "8" in kind else kind)
        np.testing.assert_array_equal(found, [obs] * 4)


@pytest.mark.parametrize("name", stand_ins("Environment", ALL))
@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("obs", (1.0, np.nan, 3.0)),
        ("obs", (1.0, 2.0, -np.inf)),
        ("reward", np.nan),
        ("reward", 1e39),  # infinite in float32
    ],
)
def test_nan_and_infinity_are_errors_that_name_the_environment(name, attribute, value):
    env = make_by(name, "Sensor-v0" if is_discrete(name) else "ContinuousSensor-v0")
    env.reset()
    setattr(env.envs.envs[2].unwrapped, attribute, value)
    with pytest.raises(FloatingPointError, match="environment 2 "):
        env.step(zero_action(name))


@pytest.mark.parametrize("name", stand_ins("Environment", ALL))
def test_nan_in_the_first_observation_of_an_episode_is_an_error(name):
    env = make_by(name, "Sensor-v0" if is_discrete(name) else "ContinuousSensor-v0")
    sensor = env.envs.envs[3].unwrapped
    sensor.obs = (np.nan, 2.0, 3.0)
    with pytest.raises(FloatingPointError, match="environment 3 "):
        env.reset()
    sensor.obs = Sensor.obs
    env.reset()
    original = sensor.reset

    def reset(**options):
        sensor.obs = (np.nan, 2.0, 3.0)
        return original(**options)

    sensor.reset = reset
    for _ in range(3):
        env.step(zero_action(name))
    with pytest.raises(FloatingPointError, match="environment 3 "):
        env.step(zero_action(name))  # the last step of the episode


def test_options_are_none_in_every_reset():
    env, obs = make("NeedsNoOptions-v0", 2, "sync")
    assert (obs == 1).all()
    for _ in range(3):  # each step ends an episode
        obs, _ = env.step(np.zeros(2, int))
        assert (obs == 1).all()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(("env_id", "error"), [("FloatImages", TypeError), ("FlatObs", ValueError)])
def test_observations_are_not_cast_or_reshaped(env_id, error, vectorization):
    """Gymnasium's shared memory would do so silently."""
    with pytest.raises(error):
        make(f"{env_id}-v0", 2, vectorization)


def test_a_run_is_complete_even_if_its_environments_cannot_be_closed(tmp_path):
    with pytest.raises(ArmError):
        train("ppo_torch_gymnasium", tmp_path, "run", "--env-id", "FailsToClose-v0", iterations=1)
    assert info(tmp_path / "run")["status"] == "completed"


# === Processes ==================================================================================
def still_running(processes):
    _, left = psutil.wait_procs(processes, timeout=15)
    return [x for x in left if x.is_running() and x.status() != psutil.STATUS_ZOMBIE]


def start_training(env_id, tmp_path, iterations):
    """Train in async with an environment in scripted.py. Stderr of all processes is one pipe."""
    flags = ["--vectorization", "async", "--env-id", f"scripted:{env_id}-v0"]
    words = command("ppo_torch_gymnasium", "run", iterations, *flags)
    return start_process(words, tmp_path, os.environ | {"PYTHONPATH": str(ROOT / "tests/helpers")})


@pytest.mark.parametrize(
    ("number", "send", "status"),
    [
        (signal.SIGINT, os.killpg, 128 + signal.SIGINT),  # as Ctrl-C in a terminal
        (signal.SIGTERM, os.kill, 128 + signal.SIGTERM),
        (signal.SIGKILL, os.kill, -signal.SIGKILL),
    ],
)
def test_a_signal_ends_the_workers(number, send, status, tmp_path):
    process = start_training("Constant", tmp_path, 10**6)
    log = tmp_path / "runs/run/metrics.jsonl"
    wait_for(lambda: process.poll() is not None or (log.exists() and log.stat().st_size > 0))
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 4
    send(process.pid, number)
    process.communicate(timeout=120)  # returns when all processes have closed the pipes
    assert process.returncode == status
    assert not still_running(started)
    if number != signal.SIGKILL:
        assert info(tmp_path / "runs/run")["status"] == "stopped"


@pytest.mark.parametrize(
    ("env_id", "error"), [("Fails", "left arm has fallen off"), ("FailsInWorker", "is not there")]
)
def test_an_exception_in_a_worker_ends_the_run_and_the_workers(env_id, error, tmp_path):
    process = start_training(env_id, tmp_path, 2)
    _, errors = process.communicate(timeout=120)  # returns when all processes closed the pipes
    assert process.returncode == 1
    assert error in errors


# === Invalid input ==============================================================================
BAD = {
    "CartPole-v7": "`v7`",
    "Pendulum-v1": "more/ppo_continuous_linen_gymnasium.py",
    "FrozenLake-v1": "FlattenObservation",
    "scripted:Nothing-v0": "`Nothing`",
    "Needs-v0": "a package is not installed",
}


@pytest.mark.parametrize("env_id", BAD)
def test_an_unsupported_environment_is_a_one_line_error(env_id, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.VecEnv(env_id, 2, "sync", 1)
    errors = capsys.readouterr().err
    assert stopped.value.code == 2 and errors.count("\n") == 1
    assert errors.startswith("--env-id: ") and BAD[env_id] in errors

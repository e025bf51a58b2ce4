"""Gymnasium environments: transitions, errors, and the worker processes of async."""

import importlib
import multiprocessing
import os
import signal
import sys
from typing import Any

import gymnasium
import minatar.gym
import numpy as np
import probes
import psutil
import pytest
from conftest import ROOT, start_process, wait_for
from frameworks import make_env
from running import info
from scripted import OnlyObs, Sensor
from sections import CONTINUOUS_IN_GYMNASIUM, path_of, scripts, stand_ins

import ppo_linen_gymnasium as script
import ppo_torch_gymnasium


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
def test_a_resumed_run_starts_and_announces_new_episodes(name, capsys):
    """The seeds of the new episodes depend only on the iteration."""
    env = make_by(name, "CartPole-v1" if is_discrete(name) else "Pendulum-v1")
    first = env.reset()
    assert capsys.readouterr().out == ""
    again = env.reset(7)
    assert capsys.readouterr().out.startswith("Starting new episodes: ")
    np.testing.assert_array_equal(env.reset(7), again)
    rows = np.concatenate([first, again, env.reset(8)])
    assert len(np.unique(rows, axis=0)) == 12


@pytest.mark.parametrize("name", stand_ins("Environment", ALL))
def test_an_environment_with_a_wrapper_that_has_a_lambda(name):
    """The wrapper, which doubles the rewards, cannot be part of the EnvSpec."""
    rewards = []
    env_id = "ProbeSignal-v0" if is_discrete(name) else "Aim-v0"
    for kind in (env_id, f"Doubled{env_id}"):
        env = make_by(name, kind)
        env.reset()
        rewards.append(env.step(zero_action(name))[1]["reward"])
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
@pytest.mark.parametrize(
    ("attribute", "value", "what"),
    [
        ("obs", (1.0, np.nan, 3.0), "an observation"),
        ("obs", (1.0, 2.0, -np.inf), "an observation"),
        ("reward", np.nan, "a reward"),
        ("reward", np.inf, "a reward"),
        ("reward", 1e39, "a reward"),  # infinite in float32
    ],
)
def test_nan_and_infinity_are_errors_that_name_environment_and_step(name, attribute, value, what):
    env = make_by(name, "Sensor-v0" if is_discrete(name) else "ContinuousSensor-v0")
    env.reset()
    for _ in range(6):  # episodes have four steps
        env.step(zero_action(name))
    setattr(env.envs.envs[2].unwrapped, attribute, value)
    said = rf"environment 2 returned {what} with NaN or inf \(step 7 "
    with pytest.raises(FloatingPointError, match=said):
        env.step(zero_action(name))


@pytest.mark.parametrize("name", stand_ins("Environment", ALL))
def test_nan_in_the_first_observation_of_an_episode_is_an_error(name):
    env = make_by(name, "Sensor-v0" if is_discrete(name) else "ContinuousSensor-v0")
    sensor = env.envs.envs[3].unwrapped
    sensor.obs = (np.nan, 2.0, 3.0)
    with pytest.raises(FloatingPointError, match="environment 3 returned an observation"):
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
    with pytest.raises(FloatingPointError, match=r"environment 3 .* \(step 4 "):
        env.step(zero_action(name))  # the last step of the episode


@pytest.mark.parametrize("name", stand_ins("Environment", CONTINUOUS_IN_GYMNASIUM))
def test_nan_actions_are_not_blamed_on_the_environment(name):
    env = make_by(name, "ContinuousSensor-v0")
    env.reset()
    with pytest.raises(FloatingPointError, match="training has diverged"):
        env.step(np.full((4, 2), np.nan, np.float32))


@pytest.mark.parametrize("name", stand_ins("Environment", CONTINUOUS_IN_GYMNASIUM))
def test_the_widest_bounds(name):
    """The distance between the bounds is infinite in float32."""
    widest = np.finfo(np.float32).max
    bounds = np.array([-widest]), np.array([widest])
    found = importlib.import_module(name).to_bounds(np.array([[-1.0], [0.5], [1.0]], "f"), *bounds)
    np.testing.assert_array_equal(found, np.array([[-widest], [widest / 2], [widest]]))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_options_are_none_in_every_reset(vectorization):
    env, obs = make("NeedsNoOptions-v0", 2, vectorization)
    assert (obs == 1).all()
    for _ in range(3):  # each step ends an episode
        obs, _ = env.step(np.zeros(2, int))
        assert (obs == 1).all()


@pytest.mark.parametrize("name", stand_ins("Environment", ALL))
def test_the_old_api_is_rejected(name):
    """reset returns an array of two rows, which Python would unpack like (obs, info)."""
    reset = importlib.import_module(name).EnvWrapper(OnlyObs()).reset
    with pytest.raises(TypeError, match=r"reset must return \(obs, info\)"):
        reset(seed=1)


# === Processes ==================================================================================
def still_running(processes):
    _, left = psutil.wait_procs(processes, timeout=15)
    return [x for x in left if x.is_running() and x.status() != psutil.STATUS_ZOMBIE]


def test_workers_do_not_receive_the_signals_of_a_terminal():
    """A terminal sends signals to a process group, and each worker is in a separate group."""
    env, _ = make("Scripted-v0", 2, "async")
    assert [os.getpgid(x.pid) for x in env.envs.processes] == [x.pid for x in env.envs.processes]
    assert os.getpgid(0) != os.getpid() or os.getsid(0) != os.getpid()  # this process has not moved


def create_and_wait(pipe):
    """Create environments, send the ids of their processes, and wait."""
    env, _ = make("Scripted-v0", 2, "async")
    pipe.send([x.pid for x in env.envs.processes])
    signal.pause()


def test_a_killed_process_leaves_no_worker():
    ours, its = multiprocessing.Pipe()
    parent = multiprocessing.get_context("forkserver").Process(target=create_and_wait, args=(its,))
    parent.start()
    workers = [psutil.Process(pid) for pid in ours.recv()]
    parent.kill()
    assert not still_running(workers)


def start_training(env_id, vectorization, folder, total_timesteps):
    flags = f"--env-id {env_id} --vectorization {vectorization} --num-envs 2 --run-name run"
    flags += f" --num-steps 32 --num-minibatches 1 --total-timesteps {total_timesteps}"
    words = [sys.executable, path_of("ppo_torch_gymnasium"), *flags.split()]
    return start_process(words, folder, os.environ | {"PYTHONPATH": str(ROOT / "tests/helpers")})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_started_by_an_environment_end_with_the_run(number, tmp_path):
    process = start_training("scripted:Parent-v0", "async", tmp_path, 10**9)
    log = tmp_path / "runs/run/metrics.jsonl"
    wait_for(lambda: process.poll() is not None or (log.exists() and log.stat().st_size > 0))
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2 + 2  # two workers and two simulators
    os.killpg(process.pid, number)
    process.communicate(timeout=120)  # returns when all processes have closed the pipes
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert not still_running(started)


def test_workers_whose_environment_hangs_end_if_the_run_is_killed(tmp_path):
    process = start_training("scripted:Hangs-v0", "async", tmp_path, 640)
    while "hanging" not in process.stdout.readline():
        assert process.poll() is None
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2
    process.kill()
    process.communicate(timeout=60)  # returns when all processes have closed the pipes
    assert not still_running(started)


def failed(env_id, vectorization, tmp_path):
    """Start a training that fails. Return the last three lines of stderr."""
    process = start_training(env_id, vectorization, tmp_path, 640)
    _, errors = process.communicate(timeout=120)  # returns when all processes have closed the pipes
    assert process.returncode == 1
    assert not (tmp_path / "runs/run").exists()  # no iteration finished
    return errors.splitlines()[-3:]


FAILURES = [
    ("Fails", "sync", "RuntimeError: ArmError: the left arm has fallen off"),
    ("Fails", "async", "RuntimeError: ArmError: the left arm has fallen off"),
    ("Unpicklable", "async", "RuntimeError: LockedError: the left arm has fallen off"),
    ("Exits", "sync", "RuntimeError: SystemExit: "),
    ("Exits", "async", "RuntimeError: SystemExit: "),
    ("FailsAtStart", "sync", "scripted.ArmError: the left arm is not there"),
    ("FailsInWorker", "async", "scripted.ArmError: the left arm is not there"),
    ("BrokenSensor", "async", "FloatingPointError: environment 0 returned an observation with NaN"),
    ("ConnectionFails", "async", "ConnectionResetError: the simulator hung up"),
]


@pytest.mark.parametrize(("env_id", "vectorization", "said"), FAILURES)
def test_the_last_line_is_the_error_of_the_environment(env_id, vectorization, said, tmp_path):
    assert failed(f"scripted:{env_id}-v0", vectorization, tmp_path)[-1].startswith(said)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(("env_id", "error"), [("FloatImages", TypeError), ("FlatObs", ValueError)])
def test_observations_are_not_cast_or_reshaped(env_id, error, vectorization):
    """Gymnasium's shared memory would do so silently."""
    with pytest.raises(error):
        make(f"{env_id}-v0", 2, vectorization)


def test_a_resumed_run_that_fails_keeps_its_folder(tmp_path):
    flags: dict[str, Any] = {"num_envs": 2, "num_steps": 32, "num_minibatches": 1}
    flags |= {"total_timesteps": 640, "runs_dir": str(tmp_path), "run_name": "run"}
    args = ppo_torch_gymnasium.Args(env_id="scripted:Fails-v0", **flags)
    log = ppo_torch_gymnasium.RunLog(args, 0, [], obs_shape=(2, 2), num_actions=3)
    log.metrics.close()  # releases the lock
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests/helpers")}
    words = [sys.executable, path_of("ppo_torch_gymnasium"), "--resume", log.dir]
    process = start_process(words, tmp_path, env)
    assert "the left arm has fallen off" in process.communicate(timeout=120)[1]
    assert info(log.dir)["resumed"] == [0]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_threads_of_an_environment_end_with_the_run(vectorization, tmp_path):
    process = start_training("scripted:Threaded-v0", vectorization, tmp_path, 64)
    process.communicate(timeout=120)
    assert process.returncode == 0


def test_a_worker_that_dies_ends_the_run(tmp_path):
    assert "EOFError" in failed("scripted:Quits-v0", "async", tmp_path)


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

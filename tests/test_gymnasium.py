"""Environments on the CPU: what a transition means, whatever steps them, and what they leave."""

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
import scripted  # noqa: F401  (registers the environments)
from conftest import ROOT, start_process
from frameworks import make_env
from sections import CONTINUOUS_IN_GYMNASIUM, path_of, scripts, stand_ins

import ppo_linen_gymnasium as script


@pytest.fixture(scope="module", autouse=True)
def forkserver():
    """It has imported the script, so that each process of async need not, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # by which it finds the script
        multiprocessing.set_forkserver_preload([script.__name__, "scripted"])
        multiprocessing.get_context("forkserver").Process().start()


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """What other tests imported anew is as it was here."""
    monkeypatch.setitem(sys.modules, script.__name__, script)


def make(env_id, num_envs, vectorization, seed=1):
    env = script.VecEnv(env_id, num_envs, vectorization, seed)
    return env, env.reset()


# === Transitions ================================================================================
minatar.gym.register_envs()
KINDS = [("Scripted-v0", "sync"), ("Scripted-v0", "async"), ("MinAtar/Breakout-v0", "sync")]


@pytest.mark.parametrize(("env_id", "vectorization"), KINDS)
def test_every_transition_is_that_of_an_environment_alone(env_id, vectorization):
    """Where one ends, no step is spent on its restart, and next_obs is what it ended with.

    Each environment draws from a seed of its own, and NumPy's generator is left alone.
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
    for x, then in handed_out:  # no buffer of Gymnasium's, which it writes to at the next step
        np.testing.assert_array_equal(x, then)
    np.testing.assert_array_equal(np.random.get_state(legacy=False)["state"]["key"], before)


def test_returns_are_summed_in_float64():
    """Four times 2**24 + 1, where float32 has no odd numbers."""
    env, _ = make("Rich-v0", 2, "sync")
    for _ in range(4):
        _, result = env.step(np.zeros(2, int))
    assert result["episode_return"].tolist() == [4 * (2**24 + 1)] * 2


ALL = (*scripts("Gymnasium"), *CONTINUOUS_IN_GYMNASIUM)


def make_by(name, env_id):
    """The environments of another script, four and in this process."""
    other = importlib.import_module(name)
    return make_env(other, other.Args(env_id=env_id, num_envs=4, vectorization="sync"))


@pytest.mark.parametrize("name", stand_ins("Environment", ALL))
def test_a_run_that_goes_on_starts_other_episodes_and_says_so(name, capsys):
    """Other than those of its start, and the same each time."""
    env = make_by(name, "CartPole-v1" if name.startswith(("ppo_linen", "dqn")) else "Pendulum-v1")
    first = env.reset()
    assert capsys.readouterr().out == ""
    again = env.reset(7)
    assert capsys.readouterr().out.startswith("Starting new episodes: ")
    np.testing.assert_array_equal(env.reset(7), again)
    rows = np.concatenate([first, again, env.reset(8)])
    assert len(np.unique(rows, axis=0)) == 12


@pytest.mark.parametrize("name", stand_ins("Environment", ALL))
def test_an_environment_with_a_wrapper_that_has_a_lambda(name):
    """What doubles the rewards is no part of any spec."""
    is_discrete = name.startswith(("ppo_linen", "dqn"))
    rewards = []
    for env_id in ("ProbeSignal-v0", "Aim-v0"):
        if is_discrete == (env_id == "ProbeSignal-v0"):
            for kind in (env_id, f"Doubled{env_id}"):
                env = make_by(name, kind)
                env.reset()
                action = np.zeros(4, int) if is_discrete else np.zeros((4, 2), "f")
                rewards.append(env.step(action)[1]["reward"])
    np.testing.assert_allclose(rewards[1], 2 * rewards[0])
    assert rewards[0].any()


@pytest.mark.parametrize("name", stand_ins("Environment", CONTINUOUS_IN_GYMNASIUM))
def test_bounds_in_float64(name):
    env = make_by(name, "Doubles-v0")
    assert env.action_low.dtype == env.action_high.dtype == np.float32
    obs = env.reset()
    _, result = env.step(np.tile(np.array([0.1, -1], "f"), (4, 1)))
    expected = probes.nearness(obs[:, :1], np.array([1.2, 0]))
    np.testing.assert_allclose(result["reward"], expected, atol=1e-6)


# === Ends =======================================================================================
def alive(processes):
    _, left = psutil.wait_procs(processes, timeout=15)
    return [x for x in left if x.is_running() and x.status() != psutil.STATUS_ZOMBIE]


def test_a_terminal_and_a_time_limit_reach_the_training_alone():
    """Their signals go to a process group, and a worker of async has a group of its own."""
    env, _ = make("Scripted-v0", 2, "async")
    assert [os.getpgid(x.pid) for x in env.envs.processes] == [x.pid for x in env.envs.processes]
    assert os.getpgid(0) != os.getpid() or os.getsid(0) != os.getpid()  # ours is as it was


def hold(pipe):
    """Be the process of a training, waiting."""
    env, _ = make("Scripted-v0", 2, "async")
    pipe.send([x.pid for x in env.envs.processes])
    signal.pause()


def test_a_killed_process_leaves_no_worker():
    ours, its = multiprocessing.Pipe()
    parent = multiprocessing.get_context("forkserver").Process(target=hold, args=(its,))
    parent.start()
    workers = [psutil.Process(pid) for pid in ours.recv()]
    parent.kill()
    assert not alive(workers)


def last_lines(env_id, vectorization, tmp_path):
    """Of a training that goes wrong, which must end by itself with all that it started."""
    flags = f"--env-id {env_id} --vectorization {vectorization} --num-envs 2"
    flags += " --num-steps 32 --num-minibatches 1 --total-timesteps 640"
    words = [sys.executable, path_of("ppo_torch_gymnasium"), *flags.split()]
    process = start_process(words, tmp_path, os.environ | {"PYTHONPATH": str(ROOT / "tests")})
    _, errors = process.communicate(timeout=120)  # which waits for whoever has the pipes
    assert process.returncode == 1
    return errors.splitlines()[-3:]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_environments_own_error_is_the_last_line(vectorization, tmp_path):
    lines = last_lines("scripted:Fails-v0", vectorization, tmp_path)
    assert lines[-1] == "scripted.ArmError: the left arm has fallen off"


def test_a_worker_that_dies_ends_the_run(tmp_path):
    assert "EOFError" in last_lines("scripted:Quits-v0", "async", tmp_path)


# === Bad input ==================================================================================
BAD = {
    "CartPole-v7": "`v7`",
    "Pendulum-v1": "more/ppo_continuous_linen_gymnasium.py",
    "FrozenLake-v1": "FlattenObservation",
    "scripted:Nothing-v0": "`Nothing`",
    "Needs-v0": "a package is not installed",
}


@pytest.mark.parametrize("env_id", BAD)
def test_bad_values(env_id, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.VecEnv(env_id, 2, "sync", 1)
    errors = capsys.readouterr().err
    assert stopped.value.code == 2 and errors.count("\n") == 1
    assert errors.startswith("--env-id: ") and BAD[env_id] in errors

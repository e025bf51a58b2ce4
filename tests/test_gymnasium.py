"""Environments on the CPU: what a transition means, whatever steps them, and what they leave."""

import gc
import multiprocessing
import os
import signal
import sys
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import scripted  # noqa: F401  (registers the environments)

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
    """What async sets is as before afterwards; what other tests imported anew is as it was here."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setitem(sys.modules, script.__name__, script)


def make(env_id, num_envs, vectorization, seed=1):
    if vectorization == "envpool":
        pytest.importorskip("envpool")
    env = script.VecEnv(env_id, num_envs, vectorization, seed)
    return env, env.reset(num_steps=2000)


# === Transitions ================================================================================
KINDS = [("Scripted-v0", "sync"), ("Scripted-v0", "async"), ("MinAtar/Breakout-v0", "sync")]
KINDS += [("CartPole-v1", "vector"), ("CartPole-v1", "envpool")]


@pytest.mark.parametrize(("env_id", "vectorization"), KINDS)
def test_every_transition_is_that_of_an_environment_alone(env_id, vectorization):
    """Where one ends, no step is spent on its restart, and next_obs is what it ended with.

    Each environment draws from a seed of its own, and NumPy's generator is left alone. CartPole's
    own vectorizations draw their starts in another way; alone, it is put where it is. Half of them
    are balanced until the time is up.
    """
    before = np.random.get_state(legacy=False)["state"]["key"].copy()
    env, obs = make(env_id, 4, vectorization)
    cartpole = env_id == "CartPole-v1"
    envs: Any = [gymnasium.make(env_id) for _ in obs]
    seeds = np.random.SeedSequence(1).generate_state(4) // 2
    starts = [alone.reset(seed=int(seed))[0] for alone, seed in zip(envs, seeds, strict=True)]
    assert cartpole or (obs == np.reshape(starts, obs.shape)).all()
    rng, total, length = np.random.default_rng(1), np.zeros(4), np.zeros(4)
    for _ in range(700):
        action = rng.integers(0, env.num_actions, 4, dtype=np.uint8)
        if cartpole:
            action[:2] = obs[:2] @ np.array([0.1, 0.3, 3.0, 1.0]) > 0
        last_obs = obs
        obs, result = env.step(action)
        assert tuple(result) == script.Storage._fields[3:]
        for i, alone in enumerate(envs):
            if cartpole:
                alone.unwrapped.state = last_obs[i]
            next_obs, reward, terminated, truncated, _ = alone.step(int(action[i]))
            total[i] += reward
            length[i] += 1
            expected = reward, terminated, truncated, next_obs.ravel(), total[i], length[i]
            for name, value in zip(result, expected, strict=True):
                np.testing.assert_allclose(result[name][i], value, atol=1e-5, err_msg=name)
            now = next_obs
            if terminated or truncated:
                now, _ = alone.reset()
                total[i] = length[i] = 0
            if cartpole and length[i] == 0:
                assert (np.abs(obs[i]) <= 0.05).all() and (obs[i] != result["next_obs"][i]).all()
            else:
                np.testing.assert_allclose(obs[i], now.ravel(), atol=1e-5)
    np.testing.assert_array_equal(env.actions[699], action)
    np.testing.assert_array_equal(np.random.get_state(legacy=False)["state"]["key"], before)


@pytest.mark.parametrize("vectorization", ["sync", "vector", "envpool"])
def test_actions_taken_again_lead_on_to_the_same_steps(vectorization):
    """As far as a stopped run took them."""
    env, first = make("CartPole-v1", 4, vectorization)
    again, same = make("CartPole-v1", 4, vectorization)
    _, other = make("CartPole-v1", 4, vectorization, seed=2)
    np.testing.assert_array_equal(first, same)
    assert (first != other).all()
    actions = np.random.default_rng(1).integers(0, 2, (300, 4))
    seen = [env.step(action)[0] for action in actions]
    again.replay(env.actions[:200], seen[199])
    for t in range(200, 300):
        np.testing.assert_array_equal(again.step(actions[t])[0], seen[t])
    np.testing.assert_array_equal(again.actions, env.actions)


def test_an_environment_that_does_not_repeat_itself_cannot_be_resumed(capsys):
    env, _ = make("Noisy-v0", 2, "sync")
    obs, _ = env.step(np.zeros(2, int))
    with pytest.raises(SystemExit) as stopped:
        make("Noisy-v0", 2, "sync")[0].replay(env.actions[:1], obs)
    sentence = "--resume: Noisy-v0 does not repeat itself, so no run in it can go on\n"
    assert (stopped.value.code, capsys.readouterr().err) == (2, sentence)


# === Ends =======================================================================================
def alive(processes):
    _, left = psutil.wait_procs(processes, timeout=15)
    return [x for x in left if x.is_running() and x.status() != psutil.STATUS_ZOMBIE]


def test_a_worker_that_dies_ends_the_run_and_the_other_workers():
    """Ctrl-C and SIGTERM, which a terminal or a batch system sends to all, are the parent's."""
    env, _ = make("Scripted-v0", 2, "async")
    workers = [psutil.Process(x.pid) for x in env.envs.processes]
    for number in (signal.SIGINT, signal.SIGTERM):
        for worker in workers:
            worker.send_signal(number)
        env.step(np.zeros(2, int))
    workers[0].kill()
    with pytest.raises(RuntimeError, match="its process ended"):
        env.step(np.zeros(2, int))
    del env
    gc.collect()
    assert not alive(workers)


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


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_sys_exit_in_an_environment_is_an_error(vectorization):
    """Otherwise a training that it ends with status 0 would seem to be complete."""
    env, _ = make("Quits-v0", 2, vectorization)
    with pytest.raises(RuntimeError, match="Quits-v0 called sys"):
        env.step(np.zeros(2, int))


# === Bad input ==================================================================================
BAD = {
    ("CartPole-v7", "sync"): "--env-id: Environment version `v7` for environment `CartPole` ",
    ("Pendulum-v1", "sync"): "--env-id: actions must be discrete and begin with 0; Pendulum-v1 has",
    ("FrozenLake-v1", "sync"): "--env-id: observations must be arrays; FrozenLake-v1 has Discrete",
    ("Acrobot-v1", "vector"): "--vectorization vector has CartPole-v1 only, not Acrobot-v1",
    ("CartPole-v1", "envpool"): "--vectorization envpool needs a package: pip install envpool==1",
}


@pytest.mark.parametrize(("env_id", "vectorization"), BAD)
def test_bad_values(env_id, vectorization, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(SystemExit) as stopped:
        script.VecEnv(env_id, 2, vectorization, 1)
    errors = capsys.readouterr().err
    assert stopped.value.code == 2 and errors.count("\n") == 1
    assert errors.startswith(BAD[env_id, vectorization])


def test_a_name_with_a_slash_is_one_folder():
    name = script.Args(env_id="MinAtar/Breakout-v0").run_name
    assert name.startswith("MinAtar-Breakout-v0__ppo_linen_gymnasium__1__")

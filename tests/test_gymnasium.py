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
from running import rows, train

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
@pytest.mark.parametrize(
    ("env_id", "vectorization"),
    [("Scripted-v0", "sync"), ("Scripted-v0", "async"), ("MinAtar/Breakout-v0", "sync")],
)
def test_every_transition_is_that_of_gymnasium(env_id, vectorization):
    """Where one ends, no step is spent on its restart, and next_obs is what it ended with.

    Each environment draws from a seed of its own, and NumPy's generator is left alone.
    """
    before = np.random.get_state(legacy=False)["state"]["key"].copy()
    env, obs = make(env_id, 5, vectorization)
    mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    oracle = gymnasium.make_vec(env_id, 5, "sync", vector_kwargs=mode)
    seeds = np.random.SeedSequence(1).generate_state(5) // 2
    expected_obs, _ = oracle.reset(seed=seeds.tolist())
    rng, total, length, ends = np.random.default_rng(1), np.zeros(5), np.zeros(5), np.zeros(2)
    for _ in range(250):
        np.testing.assert_array_equal(obs, expected_obs.reshape(5, -1))
        action = rng.integers(0, env.num_actions, 5, dtype=np.uint8)
        obs, result = env.step(action)
        expected_obs, reward, terminated, truncated, info = oracle.step(action.astype(int))
        done = terminated | truncated
        total += reward
        length += 1
        next_obs = expected_obs.astype(np.float32)
        if done.any():
            next_obs[done] = np.stack(info["final_obs"][done])
        expected = reward, terminated, truncated, next_obs.reshape(5, -1), total, length
        assert tuple(result) == script.Storage._fields[3:]
        for name, values in zip(result, expected, strict=True):
            np.testing.assert_array_equal(result[name], values, err_msg=name)
            flag = name in ("terminated", "truncated")
            assert result[name].dtype == (np.bool_ if flag else np.float32)
        ends += terminated.sum(), truncated.sum()
        total[done] = 0
        length[done] = 0
    assert env_id != "Scripted-v0" or (ends > 100).all()
    np.testing.assert_array_equal(env.actions[249], action)
    np.testing.assert_array_equal(np.random.get_state(legacy=False)["state"]["key"], before)


@pytest.mark.parametrize("vectorization", ["sync", "async", "vector", "envpool"])
def test_cartpole(vectorization):
    """Step by step as one that is put where it is; half are balanced until the time is up.

    Its actions, taken again as far as a stopped run took them, lead on to the same steps.
    """
    env, obs = make("CartPole-v1", 4, vectorization)
    alone: Any = gymnasium.make("CartPole-v1").unwrapped
    rng, seen, starts, length = np.random.default_rng(1), [obs], [obs], np.zeros(4)
    for _ in range(700):
        balance = obs @ np.array([0.1, 0.3, 3.0, 1.0]) > 0
        action = np.where(np.arange(4) < 2, balance, rng.random(4) < 0.5).astype(np.int32)
        new_obs, result = env.step(action)
        for i in range(4):
            alone.reset()
            alone.state = obs[i]
            next_obs, reward, terminated, *_ = alone.step(action[i])
            np.testing.assert_allclose(result["next_obs"][i], next_obs, atol=1e-5)
            assert (result["reward"][i], result["terminated"][i]) == (reward, terminated)
        done = result["terminated"] | result["truncated"]
        length += 1
        np.testing.assert_array_equal(result["episode_length"], length)
        np.testing.assert_array_equal(result["truncated"], length == 500)
        np.testing.assert_array_equal(new_obs[~done], result["next_obs"][~done])
        assert (np.abs(new_obs[done]) <= 0.05).all()
        starts.append(new_obs[done])
        length[done] = 0
        obs = new_obs
        seen.append(obs)
    starts = np.concatenate(starts)
    assert len(np.unique(starts, axis=0)) == len(starts) > 50

    again, first = make("CartPole-v1", 4, vectorization)
    _, other = make("CartPole-v1", 4, vectorization, seed=2)
    np.testing.assert_array_equal(first, seen[0])
    assert (first != other).all()
    again.replay(env.actions[:600], seen[600])
    for t in range(600, 700):
        np.testing.assert_array_equal(again.step(env.actions[t])[0], seen[t + 1])
    np.testing.assert_array_equal(again.actions, env.actions)


@pytest.mark.parametrize("name", ["ppo_linen_gymnasium", "ppo_torch_gymnasium"])
def test_a_run_learns_cartpole(name, tmp_path):
    """40 iterations of 2048 steps: far above the 20 that random actions reach."""
    flags = "--num-envs 16 --num-steps 128 --num-minibatches 4 --update-epochs 8 --hidden-sizes 64 "
    flags += "64 --learning-rate 1e-3 --vectorization vector --total-timesteps 81920"
    logged = rows(train(name, tmp_path, "run", *flags.split()))
    assert logged[0]["charts/episodic_return"] < 40
    assert logged[-1]["charts/episodic_return"] > 150


def test_an_environment_that_does_not_repeat_itself_cannot_be_resumed(capsys):
    env, _ = make("Noisy-v0", 2, "sync")
    obs, _ = env.step(np.zeros(2, int))
    with pytest.raises(SystemExit) as stopped:
        make("Noisy-v0", 2, "sync")[0].replay(env.actions[:1], obs)
    sentence = "--resume: Noisy-v0 does not repeat itself, so no run in it can go on\n"
    assert (stopped.value.code, capsys.readouterr().err) == (2, sentence)
    env, obs = make("Blank-v0", 2, "sync")  # what is no number repeats itself
    env.replay(np.zeros((1, 2), np.uint8), obs)


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
    ("Nope/Nope-v0", "sync"): "--env-id: Namespace Nope not found",
    ("CartPole-v7", "sync"): "--env-id: Environment version `v7` for environment `CartPole` ",
    ("Pendulum-v1", "sync"): "--env-id: actions must be discrete and begin with 0; Pendulum-v1 has",
    ("FrozenLake-v1", "sync"): "--env-id: observations must be arrays; FrozenLake-v1 has Discrete",
    ("scripted:Scripted", "sync"): "--env-id: Scripted is a class; use its registered id, as ",
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

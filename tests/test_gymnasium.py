"""Environments on the CPU: what a transition means, whatever steps them, and what they leave."""

import gc
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from scripted import Scripted
from test_resume import command, start  # noqa: F401  (a fixture)

import ppo_linen_gymnasium as script

ANY = ["sync", "async"]
CARTPOLES = [*ANY, "vector", "envpool"]


@pytest.fixture(scope="module", autouse=True)
def forkserver():
    """It has imported the script, so that each process of async need not, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # by which it finds the script
        multiprocessing.set_forkserver_preload(["ppo_linen_gymnasium"])
        multiprocessing.get_context("forkserver").Process().start()


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """What async sets is as before afterwards; what other tests imported anew is as it was here."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setitem(sys.modules, script.__name__, script)


def make(env_id, num_envs, vectorization, seed=1, num_steps=2000):
    if vectorization == "envpool":
        pytest.importorskip("envpool")
    env = script.VecEnv(env_id, num_envs, vectorization, seed)
    return env, env.reset(num_steps)


def seeds_of(num_envs, seed=1):
    return [int(x) for x in np.random.SeedSequence(seed).generate_state(num_envs) // 2]


# === Transitions ================================================================================
class Alone:
    """The oracle: one environment, stepped alone, and reset after an end."""

    def __init__(self, env_id, seed):
        self.env = gymnasium.make(env_id)
        self.obs = self.flat(self.env.reset(seed=seed)[0])
        self.total, self.length = 0.0, 0

    def flat(self, obs):
        return np.asarray(obs, np.float32).ravel()

    def step(self, action):
        obs, reward, terminated, truncated, _ = self.env.step(int(action))
        self.total, self.length = self.total + float(reward), self.length + 1
        result = (reward, terminated, truncated, self.flat(obs), self.total, self.length)
        if terminated or truncated:
            obs, self.total, self.length = self.env.reset()[0], 0.0, 0
        self.obs = self.flat(obs)
        return result


@pytest.mark.parametrize(
    ("env_id", "vectorization"),
    [("Scripted-v0", "sync"), ("Scripted-v0", "async"), ("MinAtar/Breakout-v0", "sync")],
)
def test_every_transition_is_that_of_environments_stepped_alone(env_id, vectorization):
    """Where one ends, no step is spent on its restart: not by it, and not by the others."""
    env, obs = make(env_id, 5, vectorization)
    rng, ends = np.random.default_rng(1), np.zeros(2)
    oracles = [Alone(env_id, seed) for seed in seeds_of(5)]
    fields = script.Storage._fields[3:]
    for _ in range(250):
        np.testing.assert_array_equal(obs, [x.obs for x in oracles])
        action = rng.integers(0, env.num_actions, 5, dtype=np.uint8)
        obs, result = env.step(action)
        assert tuple(result) == fields and obs.dtype == np.float32
        expected = zip(*(x.step(a) for x, a in zip(oracles, action, strict=True)), strict=True)
        for name, values in zip(fields, expected, strict=True):
            np.testing.assert_array_equal(result[name], np.array(values), err_msg=name)
            flag = name in ("terminated", "truncated")
            assert result[name].dtype == (np.bool_ if flag else np.float32)
        ends += result["terminated"].sum(), result["truncated"].sum()
    if env_id == "Scripted-v0":
        assert (ends > 100).all()
    np.testing.assert_array_equal(env.actions[249], action)
    assert env.actions.dtype == np.uint8 and not env.actions[250:].any()


@pytest.mark.parametrize("vectorization", CARTPOLES)
def test_cartpole_is_gymnaxs_cartpole(vectorization):
    """Step by step, from the same states and actions; half are balanced until the time is up."""
    env, obs = make("CartPole-v1", 8, vectorization)
    rng, steps, length = np.random.default_rng(1), [], np.zeros(8)
    for _ in range(1200):
        balance = obs @ np.array([0.1, 0.3, 3.0, 1.0]) > 0
        action = np.where(np.arange(8) < 4, balance, rng.random(8) < 0.5).astype(np.int32)
        new_obs, result = env.step(action)
        done = result["terminated"] | result["truncated"]
        length += 1
        np.testing.assert_array_equal(result["episode_length"], length)
        np.testing.assert_array_equal(result["episode_return"], length)
        np.testing.assert_array_equal(result["reward"], 1)
        np.testing.assert_array_equal(result["truncated"], length == 500)
        np.testing.assert_array_equal(new_obs[~done], result["next_obs"][~done])
        assert (np.abs(new_obs[done]) <= 0.05).all()
        steps.append((obs, action, result["next_obs"], result["terminated"]))
        obs = new_obs
        length[done] = 0
    all_obs, action, next_obs, terminated = (np.stack(x) for x in zip(*steps, strict=True))
    assert terminated[:, 4:].sum() > 100 and not terminated[:, :4].any()

    cartpole, params = gymnax.make("CartPole-v1")
    x, x_dot, theta, theta_dot = np.moveaxis(all_obs, -1, 0)
    zeros: Any = jnp.zeros(x.shape, jnp.int32)  # gymnax says int
    state = gymnax.environments.classic_control.cartpole.EnvState(
        x=x, x_dot=x_dot, theta=theta, theta_dot=theta_dot, time=zeros
    )
    step = jax.vmap(jax.vmap(lambda s, a: cartpole.step_env(jax.random.key(0), s, a, params)))
    expected_obs, _, reward, expected_terminated, _ = step(state, action)
    np.testing.assert_allclose(next_obs, expected_obs, atol=1e-5)
    np.testing.assert_array_equal(terminated, expected_terminated)
    np.testing.assert_array_equal(reward, 1)


# === Seeds ======================================================================================
@pytest.mark.parametrize("vectorization", CARTPOLES)
def test_environments_differ_between_seeds_and_repeat_with_one(vectorization):
    """All starts of all episodes, and NumPy's own generator is left alone."""
    before, starts = np.random.get_state(legacy=False)["state"]["key"].copy(), []
    for seed in (1, 2, 1):
        env, obs = make("CartPole-v1", 8, vectorization, seed)
        rows = [obs]
        for t in range(100):
            obs, result = env.step(np.full(8, t % 2))
            rows.append(obs[result["terminated"]])
        starts.append(np.concatenate(rows))
    first, other, again = starts
    np.testing.assert_array_equal(first, again)
    every = np.concatenate([first, other])
    assert len(first) > 16 and len(np.unique(every, axis=0)) == len(every)
    np.testing.assert_array_equal(np.random.get_state(legacy=False)["state"]["key"], before)


def test_minatar_leaves_numpys_generator_alone():
    before = np.random.get_state(legacy=False)["state"]["key"].copy()
    env, _ = make("MinAtar/Breakout-v0", 3, "sync")
    draws = []
    for _ in range(300):
        obs, _ = env.step(np.zeros(3, int))
        draws.append(obs)
    assert len({x.tobytes() for x in np.stack(draws, 1)}) == 3
    np.testing.assert_array_equal(np.random.get_state(legacy=False)["state"]["key"], before)


# === Ends =======================================================================================
def alive(processes):
    _, left = psutil.wait_procs(processes, timeout=15)
    return [x for x in left if x.is_running() and x.status() != psutil.STATUS_ZOMBIE]


def test_environments_are_closed_with_their_object(monkeypatch):
    env, _ = make("Scripted-v0", 3, "sync")
    monkeypatch.setattr(Scripted, "closed", 0)
    del env
    gc.collect()
    assert Scripted.closed == 3
    env, _ = make("Scripted-v0", 3, "async")
    workers = [psutil.Process(x.pid) for x in multiprocessing.active_children()]
    assert len(workers) >= 3
    del env
    gc.collect()
    assert not alive(workers)


@pytest.mark.parametrize("ended", ["parent by KILL", "all by Ctrl-C", "first worker by KILL"])
def test_async_leaves_no_process(ended, start, tmp_path):  # noqa: F811
    """KILL ends one process alone; what a terminal or a batch system sends goes to all."""
    flags = ["--vectorization", "async", "--num-envs", 2]
    process = start(*command("ppo_linen_gymnasium", "a", 10**5, *flags))
    path = tmp_path / "runs/a/metrics.jsonl"
    while not (path.exists() and path.read_text().count("\n") > 2):
        assert process.poll() is None
        time.sleep(0.05)
    parent = psutil.Process(process.pid)
    children = parent.children(recursive=True)
    workers = set(children) - set(parent.children())
    assert len(workers) == 2
    if ended == "parent by KILL":
        parent.kill()
    elif ended == "all by Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        min(workers, key=psutil.Process.create_time).kill()
    output, errors = process.communicate(timeout=60)
    assert not alive(children)
    if ended == "parent by KILL":
        assert process.returncode == -signal.SIGKILL and "Traceback" not in errors
    elif ended == "all by Ctrl-C":
        assert (process.returncode, errors) == (128 + signal.SIGINT, "") and "To go on: " in output
    else:
        assert process.returncode == 1 and "Traceback" in errors


@pytest.mark.parametrize("vectorization", ANY)
def test_sys_exit_in_an_environment_is_an_error(vectorization):
    """Otherwise a training that it ends with status 0 would seem to be complete."""
    env, _ = make("Quits-v0", 2, vectorization)
    with pytest.raises(RuntimeError, match="Quits-v0 called sys"):
        env.step(np.zeros(2, int))


# === Resume =====================================================================================
@pytest.mark.parametrize("vectorization", CARTPOLES)
def test_replay_leads_to_where_a_run_was_stopped(vectorization):
    """And on from there: new episodes begin as they would have."""
    env, obs = make("CartPole-v1", 4, vectorization)
    actions = np.random.default_rng(1).integers(0, 2, (300, 4))
    for action in actions[:200]:
        obs, _ = env.step(action)
    again, first = make("CartPole-v1", 4, vectorization)
    again.replay(env.actions[:200], obs)
    assert not np.array_equal(first, obs)
    np.testing.assert_array_equal(again.actions, env.actions)
    for action in actions[200:]:
        np.testing.assert_array_equal(again.step(action)[0], env.step(action)[0])


def test_an_environment_that_does_not_repeat_itself_cannot_be_resumed(capsys):
    env, _ = make("Noisy-v0", 2, "sync")
    obs, _ = env.step(np.zeros(2, int))
    with pytest.raises(SystemExit) as stopped:
        make("Noisy-v0", 2, "sync")[0].replay(env.actions[:1], obs)
    sentence = "--resume: Noisy-v0 does not repeat itself, so no run in it can go on\n"
    assert (stopped.value.code, capsys.readouterr().err) == (2, sentence)


def test_what_is_no_number_repeats_itself():
    env, obs = make("Blank-v0", 2, "sync")
    env.replay(np.zeros((1, 2), np.uint8), obs)


# === Bad input ==================================================================================
BAD = [
    ("Nope/Nope-v0", "sync", "--env-id: Namespace Nope not found"),
    ("MinAtar/Pong-v0", "sync", "--env-id: Environment `Pong` doesn't exist in namespace MinAtar"),
    ("CartPole-v7", "sync", "--env-id: Environment version `v7` for environment `CartPole` "),
    ("Pendulum-v1", "sync", "--env-id: actions must be discrete and begin with 0; Pendulum-v1 has"),
    ("FrozenLake-v1", "sync", "--env-id: observations must be arrays; FrozenLake-v1 has Discrete"),
    ("scripted:Scripted", "sync", "--env-id: Scripted is a class; use its registered id, as "),
    ("Acrobot-v1", "vector", "--vectorization vector has CartPole-v1 only, not Acrobot-v1"),
    ("CartPole-v1", "envpool", "--vectorization envpool needs a package: pip install envpool==1"),
]


@pytest.mark.parametrize(("env_id", "vectorization", "sentence"), BAD)
def test_bad_values(env_id, vectorization, sentence, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(SystemExit) as stopped:
        script.VecEnv(env_id, 2, vectorization, 1)
    errors = capsys.readouterr().err
    assert stopped.value.code == 2 and errors.startswith(sentence) and errors.count("\n") == 1


def test_envpool_without_the_environment(capsys):
    with pytest.raises(SystemExit):
        make("MinAtar/Breakout-v0", 2, "envpool")
    sentence = "--vectorization envpool has no environment MinAtar/Breakout-v0\n"
    assert capsys.readouterr().err == sentence


def test_a_name_with_a_slash_is_one_folder():
    name = script.Args(env_id="MinAtar/Breakout-v0").run_name
    assert name.startswith("MinAtar-Breakout-v0__ppo_linen_gymnasium__1__")

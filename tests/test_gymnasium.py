"""Environments on the CPU: what a transition means, whatever steps them, and what they leave."""

import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
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
from frameworks import GYMNASIUM_SCRIPTS
from scripted import Scripted
from test_resume import command, content, main, metrics, start, train  # noqa: F401  (a fixture)

import ppo_linen_gymnasium as script

ANY = ["sync", "async"]
CARTPOLES = [*ANY, "vector", "envpool"]


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


@pytest.mark.parametrize("vectorization", ANY)
@pytest.mark.parametrize("env_id", ["Scripted-v0", "MinAtar/Breakout-v0", "MountainCar-v0"])
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_async_leaves_no_orphan(number, start, tmp_path):  # noqa: F811
    """KILL reaches the parent alone; what a terminal or a batch system sends reaches all."""
    process = start(*command("ppo_linen_gymnasium", "a", 10**6, "--vectorization", "async"))
    path, deadline = tmp_path / "runs/a/metrics.jsonl", time.monotonic() + 120
    while not (path.exists() and path.read_text().count("\n") > 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 4
    (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
    output, errors = process.communicate(timeout=60)
    assert not alive(children)
    assert "Traceback" not in errors
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number and "To go on: " in output and not errors


# === Resume =====================================================================================
@pytest.mark.parametrize("name", GYMNASIUM_SCRIPTS)
def test_a_checkpoint_holds_the_actions(name, tmp_path):
    folder = train(name, tmp_path, "stopped", stops=4)
    with np.load(folder / "checkpoint.npz") as file:
        actions = file["actions"]
    assert actions.shape == (6 * 32, 4) and actions.dtype == np.uint8
    assert set(actions[: 4 * 32].ravel()) == {0, 1} and not actions[4 * 32 :].any()
    whole = train(name, tmp_path, "whole")
    assert main(name, "--resume", folder) == 0
    assert metrics(folder) == metrics(whole)


@pytest.mark.parametrize("name", GYMNASIUM_SCRIPTS)
def test_an_environment_that_does_not_repeat_itself_cannot_be_resumed(name, tmp_path, capfd):
    folder = train(name, tmp_path, "stopped", "--env-id", "Noisy-v0", stops=4)
    assert main(name, "--resume", folder) == 2
    errors = capfd.readouterr().err
    assert "Noisy-v0 does not repeat itself" in errors and errors.count("\n") == 1


def test_actions_of_a_strangers_checkpoint_are_no_traceback(tmp_path, capfd):
    folder = train("ppo_linen_gymnasium", tmp_path, "stopped", stops=4)
    path = folder / "checkpoint.npz"
    with np.load(path) as file:
        arrays = dict(file)
    arrays["actions"] += 200
    np.savez(path, **arrays)
    assert main("ppo_linen_gymnasium", "--resume", folder) == 2
    errors = capfd.readouterr().err
    assert "does not repeat itself" in errors and errors.count("\n") == 1


# === Bad input ==================================================================================
BAD = [
    ({"env_id": "Nope/Nope-v0"}, "--env-id Nope/Nope-v0: .*Namespace Nope not found"),
    ({"env_id": "MinAtar/Pong-v0"}, "--env-id MinAtar/Pong-v0: .*doesn't exist"),
    ({"env_id": "FrozenLake-v1"}, "--env-id must have discrete actions from 0 on and see arrays"),
    ({"env_id": "Blackjack-v1"}, "--env-id must have discrete actions from 0 on and see arrays"),
    ({"vectorization": "vector", "env_id": "Acrobot-v1"}, "--vectorization vector has CartPole-v1"),
    ({"vectorization": "vector", "env_id": "phys2d/CartPole-v1"}, "--vectorization vector has"),
]


@pytest.mark.filterwarnings("ignore:.*already in registry")  # MinAtar, looked for again
@pytest.mark.parametrize("name", GYMNASIUM_SCRIPTS)
@pytest.mark.parametrize(("flags", "message"), BAD, ids=str)
def test_bad_values(name, flags, message):
    with pytest.raises(ValueError, match=message) as error:
        importlib.import_module(name).Args(**flags)
    assert "\n" not in str(error.value)


class Unmakeable(gymnasium.Env):
    def __init__(self):
        raise FileNotFoundError("no game's file")


class Blank(gymnasium.Env):
    """Sees what is no number."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full(2, np.nan, np.float32), {}

    def step(self, action):
        return np.full(2, np.nan, np.float32), 0.0, bool(self.np_random.random() < 0.1), False, {}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium's own checks
def test_an_environment_that_fails_or_sees_no_numbers(monkeypatch, tmp_path):
    """The first is one sentence; of the second, a fresh run has nothing to repeat."""
    registry = dict(gymnasium.registry)
    monkeypatch.setattr(gymnasium.envs.registration, "registry", registry)
    monkeypatch.setattr(gymnasium, "registry", registry)
    gymnasium.register("Unmakeable-v0", f"{__name__}:Unmakeable")
    gymnasium.register("Blank-v0", f"{__name__}:Blank")
    with pytest.raises(ValueError, match=r"^--env-id Unmakeable-v0: no game's file$"):
        script.Args(env_id="Unmakeable-v0")
    env = script.VecEnv("Blank-v0", 2, "sync", 1)
    obs = env.reset(8)
    env.replay(np.zeros((0, 2), np.uint8), obs)


def test_envpool_without_the_package_or_the_environment(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ValueError, match=r"--vectorization envpool .*install envpool==1\.2\.5$"):
        script.Args(vectorization="envpool")
    monkeypatch.undo()
    pytest.importorskip("envpool")
    with pytest.raises(ValueError, match="--vectorization envpool has no environment MinAtar/"):
        script.Args(vectorization="envpool", env_id="MinAtar/Breakout-v0")


def test_command_line(tmp_path):
    """One sentence, and a name with a slash is one folder."""
    path = script.__file__

    def run(*flags):
        command = [sys.executable, path, "--runs-dir", tmp_path / "runs", *flags]
        return subprocess.run(command, capture_output=True, text=True)

    for flags in (["--env-id", "Nope-v0"], ["--vectorization", "none"]):
        done = run(*flags)
        assert done.returncode == 2 and "Traceback" not in done.stderr + done.stdout
        assert flags[0] in done.stderr and not list(tmp_path.iterdir())
    small = "--num-envs 4 --num-steps 16 --total-timesteps 128 --hidden-sizes 8"
    done = run("--env-id", "MinAtar/Breakout-v0", *small.split())
    assert (done.returncode, done.stderr) == (0, "")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("MinAtar-Breakout-v0__ppo_linen_gymnasium__1__")

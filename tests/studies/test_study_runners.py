"""Programs that studies run: agents side by side, the evaluation in Doors, and other libraries."""

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict
from typing import Any

import dqn
import gymnasium
import numpy as np
import pandas as pd
import psutil
import pytest
from conftest import ROOT, start_process
from running import SMALL
from sections import path_of

import ppo_cnn_torch_gymnasium
import ppo_linen_vmap
import ppo_rnn_torch
import ppo_torch
from analysis.describe import NOT_SETTINGS
from analysis.runs import load
from studies.agents import one_scan, side_by_side
from studies.doors import run as doors_run
from studies.doors.study import gather

# === Processes side by side =====================================================================


def run_side_by_side(tmp_path, *words, **variables):
    words = [sys.executable, "-m", "studies.agents.side_by_side", *words, "--runs-dir", tmp_path]
    return start_process(words, ROOT, os.environ | {"RUN_INFO": '{"cores": 3}'} | variables)


def test_runs_side_by_side_are_distinct_from_single_runs(tmp_path, compiled):
    """The folder of the group also has a run.json, which marks the group as complete."""
    words = ["ppo_linen.py", *SMALL.split(), "--total-timesteps", "512"]
    words += ["--seed", "7", "--run-name", "both"]
    process = run_side_by_side(tmp_path, *words, **compiled)
    assert process.wait(300) == 0, process.communicate()
    cores = len(side_by_side.usable_cores())
    own = json.loads((tmp_path / "both/run.json").read_text())
    assert own["status"] == "completed"
    runs = load(tmp_path / "both").runs
    assert runs["seed"].tolist() == list(range(7, 7 + cores))
    assert runs["process"].max() <= own["seconds"]
    assert runs["peak_host_bytes"].sum() == own["peak_host_bytes"]
    assert set(runs["mode"]) == {f"ppo_linen, {cores} side by side"}
    assert set(runs["cores"]) == {3}  # from RUN_INFO


def test_a_group_with_a_failed_process_is_not_a_run(tmp_path):
    script = tmp_path / "ppo_bad.py"
    script.write_text("raise SystemExit(2)\n")
    failing = run_side_by_side(tmp_path, script, "--run-name", "bad")
    assert "seed1 ended with status 2" in failing.communicate(timeout=300)[1]
    assert failing.returncode == 1
    assert not (tmp_path / "bad/run.json").exists()


@pytest.mark.parametrize("call", [["stand_in.py"], ["-m", "stand_in"]], ids=" ".join)
def test_peak_memory_is_added_to_all_runs_of_a_program(call, tmp_path):
    script = """
        import sys
        from pathlib import Path

        assert __name__ == "__main__" and Path(sys.argv[0]).name == "stand_in.py"
        block = b"x" * 200_000_000
        for folder in (Path("runs/two"), Path("runs/two/seed1")):
            folder.mkdir(parents=True)
            (folder / "run.json").write_text('{"status": "completed"}')
    """
    (tmp_path / "stand_in.py").write_text(textwrap.dedent(script))
    words = [sys.executable, "-m", "studies.agents.peak", *call, "--seed", "7"]
    words += ["--runs-dir", "runs", "--run-name", "two"]
    subprocess.run(words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    for path in ("runs/two/run.json", "runs/two/seed1/run.json"):
        info = json.loads((tmp_path / path).read_text())
        assert info["status"] == "completed" and info["peak_host_bytes"] > 2e8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=str)
def test_killing_side_by_side_leaves_no_process(number, tmp_path):
    """The processes end even after SIGKILL, which side_by_side.py cannot catch."""
    script = tmp_path / "ppo_sleeper.py"
    script.write_text("import time\ntime.sleep(100)\n")
    process = run_side_by_side(tmp_path, str(script), "--run-name", "x")
    children = []
    while len(children) < len(side_by_side.usable_cores()):
        assert process.poll() is None
        found = psutil.Process(process.pid).children()
        # A new child runs setpriv and taskset before it becomes Python.
        words = [sys.executable, "-m", "studies.agents.peak"]
        children = [x for x in found if x.cmdline()[:3] == words]
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    _, left = psutil.wait_procs(children, timeout=15)
    assert all(x.status() == psutil.STATUS_ZOMBIE for x in left)


# === One scan ===================================================================================
def test_one_scan_computes_the_same_as_vmap(tmp_path):
    made: dict[str, Any] = {"num_agents": 2, "seed": 5, "runs_dir": str(tmp_path), "num_envs": 4}
    made |= {"num_steps": 32, "hidden_sizes": (8,), "num_minibatches": 2, "update_epochs": 2}
    logs = []
    for name, train in (("vmap", ppo_linen_vmap.train), ("scan", one_scan.train)):
        train(ppo_linen_vmap.Args(**made, total_timesteps=4 * 128, run_name=name))
        paths = [tmp_path / name, *sorted((tmp_path / name).glob("*/"))]
        logs.append([pd.read_json(x / "metrics.jsonl", lines=True) for x in paths])
    for one, other in zip(*logs, strict=True):
        same = [x for x in one if not x.startswith("time/") and x != "charts/SPS"]
        # Equal up to rounding, because one_scan sums in a different order.
        ours, theirs = (x[same].astype(float) for x in (one, other))
        np.testing.assert_allclose(theirs, ours, rtol=1e-3, atol=1e-4)
        seconds = other["time/iteration"].to_numpy()
        assert seconds[1:] == pytest.approx(seconds[1])
    runs = load(tmp_path).runs
    assert set(runs["mode"]) == {"one_scan", "ppo_linen_vmap"}
    assert runs["settings"].nunique() == 1


# === Doors ======================================================================================
def test_the_evaluation_counts_layouts_and_steps():
    """An agent that waits once and then only goes up solves 3 of the 225 layouts."""
    calls = []

    def policy(obs):
        calls.append(obs)
        return np.full(225, 0 if len(calls) == 1 else 4)

    assert doors_run.evaluate(policy) == {"solved": 3, "steps": 3 * 15, "optimal": 3 * 14}


@pytest.mark.parametrize("name", ["dqn_linen", "dqn_torch_gymnasium"])
def test_evaluation_during_training_uses_the_network_that_is_saved(name, tmp_path, monkeypatch):
    """The policy is evaluated every five iterations and at the end; durations exclude this time."""
    script = importlib.import_module(name)
    monkeypatch.setattr(script, "RunLog", script.RunLog)
    squares, seen = np.eye(45, dtype=np.float32), []

    def spy(policy):
        seen.append(policy(squares))
        time.sleep(1)
        return {"solved": 0, "steps": 0, "optimal": 0}

    monkeypatch.setattr(doors_run, "evaluate", spy)
    words = "--total-timesteps 1536 --num-envs 4 --num-steps 32 --learning-starts 128"
    words += " --hidden-sizes 8 --buffer-size 512 --batch-size 8 --run-name doors-4__it"
    words += f" --runs-dir {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["run", str(path_of(name)), "doors", *words.split()])
    begin = time.perf_counter()
    doors_run.main()
    lasted = time.perf_counter() - begin - len(seen)
    info = json.loads((tmp_path / "doors-4__it/run.json").read_text())
    assert info["ended"] - info["started"] < lasted
    settings = {"gamma": 0.95, "double_q": True, "train_frequency": 32, "hidden_sizes": [8]}
    assert settings.items() <= info["args"].items()  # from the doors preset and from a flag
    rows = gather(tmp_path)
    assert rows["iteration"].tolist() == [5, 10, 12]
    assert rows["global_step"].tolist() == [640, 1280, 1536]
    saved = dqn.q_values(dqn.parameters(dqn.layers_in(tmp_path / "doors-4__it")), squares, (45,))
    np.testing.assert_array_equal(saved.detach().argmax(-1), seen[2])


# === Other libraries ============================================================================
# A dummy library that calls the callbacks in the same order as Stable-Baselines3 and rlox, and that
# PuffeRL's loop can call.
LIBRARY = """
import json, os, sys
from types import ModuleType, SimpleNamespace


def record(settings):
    with open(os.environ["CALLED_WITH"], "w") as file:
        json.dump(settings, file)


class BaseCallback:
    num_timesteps, locals = 0, {}


class PPO:
    def __init__(self, policy, envs, **settings):
        for name in ("activation_fn", "features_extractor_class"):
            settings["policy_kwargs"].pop(name, None)
        self.batch_size = (envs or 0) * settings["n_steps"]
        record(settings)

    def learn(self, steps, callback=None, log_interval=100):
        if callback is None:
            return
        while callback.num_timesteps < steps:
            callback._on_rollout_start()
            callback.num_timesteps += self.batch_size
            ends = [{"episode": {"r": 10.0, "l": 5}}, {}, {"episode": {"r": 30.0, "l": 7}}]
            callback.locals = {"infos": ends}
            callback._on_step()
        callback._on_training_end()


class Trainer:
    def __init__(self, algorithm, env, seed, callbacks, config):
        record(config)
        self.callbacks = callbacks
        self.collector = SimpleNamespace(episode_rewards=[])

    def train(self, steps):
        for _ in range(steps // (32 * 256)):
            self.collector.episode_rewards += [10.0, 30.0]
            self.callbacks[0].on_step(algo=self, step=0)


class PuffeRL:
    def __init__(self, config, envs, policy):
        record(config)
        self.stats = {}
        self.utilization = SimpleNamespace(stop=lambda: None)

    def evaluate(self):
        self.stats["episode_return"] = [10.0, 30.0]
        return self.stats

    def train(self):
        self.stats["episode_return"] = 20.0


def make_puffer_envs(*args, **settings):
    spaces = SimpleNamespace(shape=(4,)), SimpleNamespace(n=2)
    return SimpleNamespace(single_observation_space=spaces[0], single_action_space=spaces[1],
                           close=lambda: None)


for name in ("sbx", "sb3_contrib", "stable_baselines3", *("stable_baselines3.common" + x for x in
             ("", ".utils", ".callbacks", ".env_util", ".torch_layers", ".vec_env")),
             "rlox", "rlox.callbacks", "pufferlib", *("pufferlib." + x for x in
             ("emulation", "vector", "pufferl", "pytorch"))):
    sys.modules[name] = module = ModuleType(name)
    module.PPO = module.RecurrentPPO = PPO
    module.BaseCallback, module.BaseFeaturesExtractor = BaseCallback, object
    module.make_vec_env = lambda env_id, num_envs, **flags: num_envs
    module.make_atari_env = lambda *args, **flags: None
    module.VecNormalize = lambda envs, gamma: envs
    module.VecFrameStack = lambda envs, n_stack: None
    module.LinearSchedule = lambda *args: args
    module.Trainer, module.Callback = Trainer, object
    module.PufferEnv, module.Serial, module.PuffeRL = object, None, PuffeRL
    module.make, module.layer_init = make_puffer_envs, lambda layer, std=1: layer
sys.modules["pufferlib"].vector = sys.modules["pufferlib.vector"]
"""


# Arguments of the scripts -> arguments of Stable-Baselines3, if the names differ.
NAMES = {"num_steps": "n_steps", "update_epochs": "n_epochs", "norm_adv": "normalize_advantage"}
NAMES["clip_coef"] = "clip_range"


def call_library(file, tmp_path, *words):
    """Run a file with the dummy library, and return the settings that it passes to the library."""
    (tmp_path / "library.py").write_text(LIBRARY)
    code = f"import library, runpy, sys; sys.path[0] = {str(file.parent)!r}\n"
    code += f"runpy.run_path({str(file)!r}, run_name='__main__')"
    own = {"PYTHONPATH": str(tmp_path), "CALLED_WITH": str(tmp_path / "called.json")}
    own["RUN_INFO"] = '{"os": "Linux-6", "cpu": "Fast", "cores": 3}'  # set by benchmark.sh
    subprocess.run([sys.executable, "-c", code, *words], env=os.environ | own, check=True)
    return json.loads((tmp_path / "called.json").read_text())


def run_peer(file, tmp_path, *flags):
    """Train with the dummy library. Return the loaded run and the settings the library received."""
    words = ["--runs-dir", str(tmp_path / "runs"), "--run-name", "one", "--seed", "7", *flags]
    words += ["--total-timesteps", str(3 * 8192 + 1), "--save-every", "1000000000"]
    called = call_library(file, tmp_path, *words)
    return load(tmp_path / "runs"), called


@pytest.mark.parametrize("name", ["peers/ppo_sb3", "peers/ppo_sbx", "recurrent/ppo_sb3_recurrent"])
def test_runs_of_other_libraries_use_and_record_the_same_settings(name, tmp_path):
    script = name.partition("ppo_")[2]
    args = asdict(ppo_torch.Args(run_name="usual"))
    flags = ["--hidden-sizes", "8"]
    if script == "sb3_recurrent":
        args = asdict(ppo_rnn_torch.Args(run_name="usual", gru_hidden_size=9))
        flags += ["--gru-hidden-size", "9"]
    found, called = run_peer(ROOT / f"studies/{name}.py", tmp_path, *flags)
    expected = {x: y for x, y in args.items() if x not in (*NOT_SETTINGS, "feed_back")}
    [run] = found.runs.to_dict("records")
    assert json.loads(run["settings"]) == expected
    assert (run["mode"], run["script"], run["framework"]) == (script, script, script)
    assert (run["repeat"], run["size"], run["platform"]) == (7, "8", "Linux, Fast, 3 cores")
    assert (run["num_iterations"], run["batch_size"], run["final_return"]) == (3, 8192, 20)
    assert list(found.iterations["charts/episodes"]) == [2, 2, 2]
    for ours in (*NAMES, "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm"):
        assert called[NAMES.get(ours, ours)] == expected[ours], ours
    assert called["batch_size"] * expected["num_minibatches"] == 8192
    assert called["learning_rate"] == [expected["learning_rate"], 0, 1]
    assert called.get("clip_range_vf") == (None if script == "sbx" else 0.2)
    policy = called["policy_kwargs"]
    assert policy["optimizer_kwargs"] == {"eps": expected["adam_eps"]}
    if script == "sb3_recurrent":
        assert policy["lstm_hidden_size"] == 9 and policy["features_extractor_kwargs"]["size"] == 8
    else:
        assert policy["net_arch"] == {"pi": [8], "vf": [8]}


# Arguments of the scripts -> arguments of rlox and of PuffeRL, if the names differ.
RLOX = {"num_envs": "n_envs", "num_steps": "n_steps", "update_epochs": "n_epochs"}
RLOX |= {"clip_coef": "clip_eps", "norm_adv": "normalize_advantages", "clip_vloss": "clip_vloss"}
PUFFERLIB = {"num_steps": "bptt_horizon", "clip_coef": "clip_coef", "adam_eps": "adam_eps"}
PUFFERLIB |= {"update_epochs": "update_epochs"}
SAME = ("learning_rate", "anneal_lr", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm")


@pytest.mark.parametrize("name, names", [("rlox", RLOX), ("pufferlib", PUFFERLIB)])
def test_runs_of_rlox_and_pufferlib_use_and_record_the_same_settings(name, names, tmp_path):
    found, called = run_peer(ROOT / f"studies/peers/ppo_{name}.py", tmp_path)
    args = ppo_torch.Args(run_name="usual", hidden_sizes=(64, 64))
    expected = {x: y for x, y in asdict(args).items() if x not in NOT_SETTINGS}
    [run] = found.runs.to_dict("records")
    assert json.loads(run["settings"]) == json.loads(json.dumps(expected))
    assert (run["mode"], run["num_iterations"], run["final_return"]) == (name, 3, 20)
    assert list(found.iterations["charts/episodes"]) == [2, 2, 2]
    for ours in (*names, *SAME):
        assert called[names.get(ours, ours)] == expected[ours], ours
    assert args.minibatch_size in (called["batch_size"], called.get("minibatch_size"))


def test_cartpole_in_c_is_the_one_in_gymnasium(tmp_path):
    """Each step equals a step of Gymnasium's CartPole from the same state."""
    library = tmp_path / "cartpole.so"
    source = ROOT / "studies/peers/cartpole.c"
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library, "-lm"], check=True)
    step = ctypes.CDLL(library).step
    n = 8
    envs, seed = np.zeros((n, 5)), np.array([1, 2, 3], np.uint16)
    envs[0, 4] = 499 - 60  # the steps so far; this episode is truncated if it does not end sooner
    actions, obs = np.zeros(n, np.int32), np.zeros((n, 4), np.float32)
    rewards, lengths = np.zeros(n, np.float32), np.zeros(n, np.int32)
    terminals, truncations = np.zeros(n, np.uint8), np.zeros(n, np.uint8)
    buffers = (envs, seed, actions, obs, rewards, terminals, truncations, lengths)
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in buffers]
    alone: Any = gymnasium.make("CartPole-v1").unwrapped
    rng, ends = np.random.default_rng(1), {"terminated": 0, "truncated": 0}
    for _ in range(300):
        before = envs.copy()
        actions[:] = rng.integers(0, 2, n)
        # Keep the pole of the first environment upright.
        actions[0] = before[0, 2] + before[0, 3] > 0
        ended = step(n, *pointers)
        assert ended == (terminals | truncations).sum()
        for i in range(n):
            alone.reset()
            alone.state = before[i, :4]
            expected, _, terminated, _, _ = alone.step(int(actions[i]))
            truncated = before[i, 4] == 499 and not terminated
            assert (terminals[i], truncations[i], rewards[i]) == (terminated, truncated, 1)
            ends["terminated"] += terminated
            ends["truncated"] += truncated
            if terminated or truncated:
                assert (abs(obs[i]) <= 0.05).all() and envs[i, 4] == 0
                assert before[i, 4] + 1 in lengths[:ended]
            else:
                np.testing.assert_allclose(obs[i], expected, atol=1e-6)
    assert ends["terminated"] > 20 and ends["truncated"] > 0


def test_the_library_in_the_returns_study_has_the_settings_of_cleanrl(tmp_path):
    """CleanRL's ppo_continuous_action.py at fe8d8a0: one environment and small minibatches."""
    found, called = run_peer(ROOT / "studies/returns/ppo_continuous_sb3.py", tmp_path)
    [run] = found.runs.to_dict("records")
    assert (run["num_iterations"], run["batch_size"]) == (12, 2048)
    assert list(found.iterations["global_step"])[-1] == 12 * 2048
    expected: dict[str, Any] = {"n_steps": 2048, "batch_size": 64, "n_epochs": 10, "gamma": 0.99}
    expected |= {"gae_lambda": 0.95, "clip_range": 0.2, "clip_range_vf": 0.2, "ent_coef": 0}
    expected |= {"vf_coef": 0.5, "max_grad_norm": 0.5, "learning_rate": [3e-4, 0, 1]}
    policy = {"net_arch": [64, 64], "optimizer_kwargs": {"eps": 1e-5}}
    assert called == expected | {"policy_kwargs": policy, "seed": 7, "device": "cpu"}


# A mock of a training script in CleanRL.
CLEANRL = """
import sys

assert sys.argv[sys.argv.index("--num-envs") + 1] == "32"
for iteration in range(int(sys.argv[sys.argv.index("--total-timesteps") + 1]) // 8192):
    for last in (10.0, 30.0 + iteration):
        print(f"global_step=7, episodic_return=[{last}]")
    print("SPS:", 7)
"""


def make_checkout(file, text, tmp_path):
    """Commit a file to a new repository, tmp_path/checkout, and return the commit hash."""
    path = tmp_path / "checkout" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    git = ["git", "-C", str(tmp_path / "checkout"), "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()


def test_a_script_of_another_project_must_be_unmodified(tmp_path, monkeypatch, capsys):
    commit = make_checkout("cleanrl/ppo.py", CLEANRL, tmp_path)
    monkeypatch.syspath_prepend(ROOT / "studies/peers")
    monkeypatch.chdir(tmp_path)  # pytest undoes the chdir in main()
    peer = importlib.import_module("ppo_cleanrl")
    words = ["--checkout", str(tmp_path / "checkout"), "--runs-dir", str(tmp_path / "runs")]
    words = ["peer", *words, "--total-timesteps", str(3 * 8192 + 1)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="2"):
        peer.main()
    assert "git clone https://github" in capsys.readouterr().err
    monkeypatch.setattr(peer, "COMMIT", commit)
    peer.main()
    found = load(tmp_path / "runs")
    assert found.runs["mode"].tolist() == ["cleanrl"]
    assert list(found.iterations["charts/episodes"]) == [2, 2, 2]
    assert list(found.iterations["charts/episodic_return"]) == [20, 20.5, 21]
    [path] = tmp_path.glob("runs/*/run.json")
    assert json.loads(path.read_text())["versions"]["vwxyzjn/cleanrl"] == commit
    (tmp_path / "checkout/cleanrl/ppo.py").write_text(CLEANRL + "# changed")
    monkeypatch.setattr(sys, "argv", [*words, "--run-name", "changed"])
    with pytest.raises(SystemExit, match="2"):
        peer.main()
    assert "not an unmodified checkout" in capsys.readouterr().err


# === Other libraries in a race ==================================================================
def test_become_replaces_the_process_with_a_script_of_another_project(tmp_path):
    text = "import os, sys\nprint(sys.argv[1:], os.environ['WANDB_MODE'])"
    commit = make_checkout("rl/file.py", text, tmp_path)
    code = """
        import sys, checkout
        from argparse import Namespace
        args = Namespace(checkout=sys.argv[1], num_envs=7)
        checkout.become(args, "a/b", sys.argv[2], "rl/file.py", ["--compile"])
    """
    words = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "checkout")]
    env = os.environ | {"PYTHONPATH": str(ROOT / "studies/control/peers")}
    done = subprocess.run([*words, commit], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "['--no-cuda', '--compile', '--num-envs', '7'] disabled\n"
    done = subprocess.run([*words, "0" * 40], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "not an unmodified checkout" in done.stderr


# Default hyperparameters for Atari.
ATARI = ppo_cnn_torch_gymnasium.Args()


@pytest.mark.parametrize("name", ["ppo_cleanrl", "ppo_cleanrl_envpool"])
def test_cleanrl_uses_the_same_batch_sizes_in_atari(name, tmp_path):
    file = f"cleanrl/{name.replace('cleanrl', 'atari')}.py"
    commit = make_checkout(file, "import sys\nprint(*sys.argv[1:])", tmp_path)
    code = f"import {name}\n{name}.COMMIT = {commit!r}\n{name}.main()"
    words = [sys.executable, "-c", code, "--checkout", str(tmp_path / "checkout")]
    env = os.environ | {"PYTHONPATH": str(ROOT / "studies/atari/peers")}
    flags = subprocess.check_output(words, env=env, text=True).split()
    for size in ("num_envs", "num_steps", "num_minibatches"):
        value = flags[flags.index(f"--{size.replace('_', '-')}") + 1]
        assert int(value) == getattr(ATARI, size), size


def test_stable_baselines3_uses_the_same_settings_in_atari(tmp_path):
    called = call_library(ROOT / "studies/atari/peers/ppo_sb3.py", tmp_path)
    for ours in ("num_steps", "update_epochs", "clip_coef", "ent_coef"):
        assert called[NAMES.get(ours, ours)] == getattr(ATARI, ours), ours
    assert called["batch_size"] == ATARI.minibatch_size
    assert called["clip_range_vf"] == ATARI.clip_coef
    assert called["learning_rate"] == [ATARI.learning_rate, 0, 1]
    assert called["policy_kwargs"] == {"optimizer_kwargs": {"eps": ATARI.adam_eps}}

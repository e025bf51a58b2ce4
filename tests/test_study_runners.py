"""The programs that studies have of their own: agents side by side, Doors' judge, the peers."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
from conftest import ROOT

from analysis.runs import NOT_SETTINGS, load
from envs import doors_gymnasium as rules
from studies.agents import side_by_side
from studies.doors import run as doors_run
from studies.doors.study import gather

# === Processes side by side =====================================================================
SMALL = "--total-timesteps 256 --num-envs 4 --num-steps 32 --hidden-sizes 8 --num-minibatches 2"
SMALL += " --update-epochs 2"
SLEEPER = """
import os, subprocess, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
subprocess.Popen(["sleep", "1000"])
open(flags["--runs-dir"] + "/" + flags["--run-name"] + ".pid", "w").close()
time.sleep(1000)
"""


def run_side_by_side(tmp_path, *words, wait=True):
    command = [sys.executable, "-m", "studies.agents.side_by_side", *words]
    process: Any = subprocess.Popen(
        [*command, "--runs-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"SIDE_BY_SIDE_TEST": str(tmp_path), "RUN_INFO": '{"cores": 3}'},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if wait:
        process.stdout, process.stderr = map(str, process.communicate(timeout=300))
    return process


def left_of(tmp_path):
    """The processes that a test's command started, at any remove, by their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            mine = process.environ().get("SIDE_BY_SIDE_TEST") == str(tmp_path)
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_processes_side_by_side_are_never_taken_for_runs_alone(tmp_path):
    """Their folder has a run.json, too, by which benchmark.sh knows that all are complete."""
    words = ["ppo_linen.py", *SMALL.split(), "--seed", "7", "--run-name", "both"]
    process = run_side_by_side(tmp_path, *words)
    assert process.returncode == 0, process.stderr
    cores, folder = len(side_by_side.usable_cores()), tmp_path / "both"
    own = json.loads((folder / "run.json").read_text())
    found = [json.loads(x.read_text()) for x in sorted(folder.glob("*/run.json"))]
    assert [x["args"]["seed"] for x in found] == list(range(7, 7 + cores))
    assert own["status"] == "completed"
    assert own["peak_host_bytes"] == sum(x["peak_host_bytes"] for x in found)
    lasted = [x["durations"]["imports"] + x["durations"]["total"] for x in found]
    assert max(lasted) <= own["seconds"]
    data = load(tmp_path)
    assert not data.left_out
    assert set(data.runs["mode"]) == {f"ppo_linen, {cores} side by side"}
    assert data.runs["run"].tolist() == [f"both/seed{7 + k}" for k in range(cores)]
    assert set(data.runs["cores"]) == {3}  # what benchmark.sh says of the machine is kept
    again = run_side_by_side(tmp_path, *words)
    assert again.returncode == 2
    assert "exists" in again.stderr
    failed = run_side_by_side(tmp_path, "ppo_linen.py", "--num-envs", "0", "--run-name", "bad")
    assert failed.returncode == 1
    assert "seed1 ended with status 2" in failed.stderr
    assert not (tmp_path / "bad/run.json").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=str)
def test_killed_it_leaves_no_process(number, tmp_path):
    """SIGKILL cannot be caught: the processes die with it, but not what they started."""
    script = tmp_path / "ppo_sleeper.py"
    killed = number == signal.SIGKILL
    script.write_text(SLEEPER.replace("subprocess.P", "#") if killed else SLEEPER)
    cores = len(side_by_side.usable_cores())
    process = run_side_by_side(tmp_path, str(script), "--run-name", "x", wait=False)
    try:
        wait_for(lambda: len([*(tmp_path / "x").glob("*.pid")]) == cores)
        assert len(left_of(tmp_path)) == 1 + (1 if killed else 2) * cores
        process.send_signal(number)
        assert process.wait(60) == (-number if killed else 128 + number)
        wait_for(lambda: not left_of(tmp_path))
        assert not (tmp_path / "x/run.json").exists()
    finally:
        for one in left_of(tmp_path):
            one.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["README.md"], "must be a script"),
        (["ppo_linen_vmap.py"], "trains several agents already"),
        (["ppo_linen.py", "--track"], "--track is for a process alone"),
        (["ppo_linen.py", "--resume=runs/x"], "--resume is for a process alone"),
    ],
)
def test_what_cannot_run_side_by_side_is_one_sentence(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", *words, "--runs-dir", str(tmp_path / "new")])
    with pytest.raises(SystemExit, match="2"):
        side_by_side.main()
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


# === One scan ===================================================================================
def test_one_scan_computes_what_vmap_does(tmp_path, capsys):
    import jax
    import tyro

    import ppo_linen_vmap
    from studies.agents import one_scan

    made: dict[str, Any] = {"num_agents": 2, "seed": 5, "runs_dir": str(tmp_path)}
    made |= {"num_envs": 4, "num_steps": 32, "hidden_sizes": (8,), "num_minibatches": 2}
    made |= {"update_epochs": 2, "total_timesteps": 4 * 128, "env_id": "CartPole-v1"}
    logs = []
    for name, train in (("vmap", ppo_linen_vmap.train), ("scan", one_scan.train)):
        train(ppo_linen_vmap.Args(**made, run_name=name))
        jax.clear_caches()
        paths = [tmp_path / name, *sorted((tmp_path / name).glob("*/"))]
        logs.append([pd.read_json(x / "metrics.jsonl", lines=True) for x in paths])
    for one, other in zip(*logs, strict=True):
        same = [x for x in one if not x.startswith("time/") and x != "charts/SPS"]
        assert len(same) == 16
        # equal but for rounding: a program compiled as a whole adds up in another order
        ours, theirs = (x[same].astype(float) for x in (one, other))
        np.testing.assert_allclose(theirs, ours, rtol=1e-3, atol=1e-4)
        seconds = other["time/iteration"].to_numpy()
        assert seconds[0] > 5 * seconds[1]
        assert seconds[1:] == pytest.approx(seconds[1])
    data = load(tmp_path)
    assert not data.left_out
    assert set(data.runs["mode"]) == {"one_scan", "ppo_linen_vmap"}
    assert set(data.runs["algorithm"]) == {"ppo"}
    assert data.runs["settings"].nunique() == 1
    capsys.readouterr()
    for flag in ("--no-jit", "--sync-for-timing", "--save-every=5", "--resume=x"):
        with pytest.raises(SystemExit, match="2"):
            one_scan.check(tyro.cli(one_scan.Args, args=[flag]))
        assert "has no such thing" in capsys.readouterr().err


# === Doors ======================================================================================
def best_values(obs):
    """1 for the action after which the fewest steps are left, by a search; obs (B, 45)."""
    left = {}

    def steps_left(row, column, goal):
        if goal not in left:
            found, edge = {(rules.GOAL_ROW, goal): 0}, [(rules.GOAL_ROW, goal)]
            for square in edge:
                for near in rules.NEXT[square].tolist():  # a move back is a move, too
                    if tuple(near) not in found:
                        found[tuple(near)] = found[square] + 1
                        edge.append(tuple(near))
            left[goal] = found
        return left[goal][row, column]

    places = obs.reshape(-1, 3, rules.SIZE).argmax(-1).tolist()
    after = [[steps_left(*x, goal) for x in rules.NEXT[i, j].tolist()] for i, j, goal in places]
    return -np.array(after, float)


def test_the_best_agent_is_perfect_and_steps_too_many_are_counted():
    fewest = int(rules.optimal_steps(*rules.all_layouts().T).sum())
    assert doors_run.judge(best_values) == {"solved": 225, "steps": fewest, "optimal": fewest}
    calls = []

    def after_a_rest(obs):
        values = best_values(obs)
        values[:, 0] += 1000 * (not calls)  # stay, once
        calls.append(1)
        return values

    assert doors_run.judge(after_a_rest)["steps"] == fewest + 225
    nothing = {"solved": 0, "steps": 0, "optimal": 0}
    assert doors_run.judge(lambda obs: np.eye(5)[np.zeros(len(obs), int)]) == nothing


@pytest.mark.parametrize("name", ["dqn_linen", "dqn_torch_gymnasium"])
def test_a_run_is_judged_as_it_learns_by_the_network_that_it_saves(name, tmp_path, monkeypatch):
    """Every five iterations and at the end, off the clock."""
    import evaluate

    script = importlib.import_module(name)
    monkeypatch.setattr(script, "RunLog", script.RunLog)
    seen, judge = [], doors_run.judge

    def spy(get_values):
        seen.append(get_values(np.eye(45, dtype=np.float32)))
        return judge(get_values)

    monkeypatch.setattr(doors_run, "judge", spy)
    words = "--total-timesteps 1536 --num-envs 4 --num-steps 32 --learning-starts 128"
    words += " --hidden-sizes 8 --buffer-size 512 --batch-size 8 --run-name doors-4__it"
    words += f" --runs-dir {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["run", f"{name}.py", "doors", *words.split()])
    doors_run.main()
    folder = tmp_path / "doors-4__it"
    info = json.loads((folder / "run.json").read_text())
    rows = list(gather(tmp_path))
    assert [x["iteration"] for x in rows] == [5, 10, 12]
    assert [x["global_step"] for x in rows] == [640, 1280, 1536]
    seconds = [0, *(x["seconds"] for x in rows)]
    assert np.all(np.diff(seconds) > 0)
    assert seconds[-1] - 1e-3 <= info["durations"]["imports"] + info["durations"]["total"]
    assert not np.array_equal(seen[0], seen[1])
    run = evaluate.load_run(str(folder), (info["args"]["env_id"],))
    np.testing.assert_allclose(run.get_logits(np.eye(45, dtype=np.float32)), seen[2], atol=1e-6)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["ppo_linen.py", "doors"],
        ["dqn_linen.py", "minatar"],
        ["dqn_linen.py", "doors", "--resume", "runs/x"],
        ["dqn_linen.py", "doors", "--env-id", "CartPole-v1"],
    ],
)
def test_what_is_not_of_doors_is_one_sentence(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run", *words])
    with pytest.raises(SystemExit, match="2"):
        doors_run.main()
    assert capsys.readouterr().err.count("\n") == 1


# === Peers ======================================================================================
# A library that does nothing, in the order that Stable-Baselines3 calls a callback.
LIBRARY = """
import json, os, sys
from types import ModuleType, SimpleNamespace as Namespace


class BaseCallback:
    num_timesteps, locals = 0, {}


class PPO:
    def __init__(self, policy, envs, **settings):
        self.envs = envs
        settings["policy_kwargs"].pop("activation_fn")
        settings["learning_rate"] = settings["learning_rate"].ends
        with open(os.environ["CALLED_WITH"], "w") as file:
            json.dump({"policy": policy, **settings}, file)

    def learn(self, steps, callback):
        n = 0
        while callback.num_timesteps < steps:
            callback._on_rollout_start()
            callback.num_timesteps += 32 * 256
            n += 1
            ends = [{"episode": {"r": 10.0 * n, "l": 5}}, {}, {"episode": {"r": 30.0 * n, "l": 7}}]
            callback.locals = {"infos": ends if n < 3 else [{}, {}, {}]}
            callback._on_step()
        callback._on_training_end()


def module(name, **names):
    sys.modules[name] = found = ModuleType(name)
    found.__dict__.update(names)


module("stable_baselines3", PPO=PPO)
module("stable_baselines3.common")
module("stable_baselines3.common.callbacks", BaseCallback=BaseCallback)
module("stable_baselines3.common.env_util", make_vec_env=lambda *args, **flags: Namespace())
schedule = lambda start, end, fraction: Namespace(ends=(start, end, fraction))
module("stable_baselines3.common.utils", LinearSchedule=schedule)
module("sbx", PPO=PPO)
"""


@pytest.mark.parametrize(("name", "flags"), [("sb3", ["--threads", "1"]), ("sbx", [])])
def test_a_peers_runs_are_compared_with_ours_and_it_does_what_they_say(name, flags, tmp_path):
    import ppo_torch

    (tmp_path / "library.py").write_text(LIBRARY)
    file = ROOT / f"studies/peers/ppo_{name}.py"
    code = f"import library, runpy, sys; sys.path[0] = {str(file.parent)!r}\n"
    code += f"runpy.run_path({str(file)!r}, run_name='__main__')"
    own = {"PYTHONPATH": str(tmp_path), "CALLED_WITH": str(tmp_path / "called.json")}
    own["RUN_INFO"] = '{"cpu": "Fast", "cores": 3}'  # as benchmark.sh does
    words = ["--runs-dir", str(tmp_path / "runs"), "--run-name", "one", "--seed", "7", *flags]
    words += ["--total-timesteps", str(3 * 8192 + 1), "--hidden-sizes", "8", "9"]
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    called = json.loads((tmp_path / "called.json").read_text())
    args = asdict(ppo_torch.Args(run_name="usual"))
    expected = {x: y for x, y in args.items() if x not in NOT_SETTINGS}
    found = load(tmp_path / "runs")
    [run] = found.runs.to_dict("records")
    assert json.loads(run["settings"]) == expected
    assert (run["mode"], run["script"], run["framework"]) == (" ".join([name, *flags]), name, name)
    assert (run["algorithm"], run["repeat"], run["size"]) == ("ppo", 7, "8x9")
    assert run["platform"] == "Linux, Fast, 3 cores"
    assert (run["num_iterations"], run["batch_size"], run["final_return"]) == (3, 8192, 40)
    assert list(found.iterations["charts/episodic_return_max"])[:2] == [30, 60]
    assert list(found.iterations["charts/episodes"]) == [2, 2, 0]
    names = {"num_steps": "n_steps", "update_epochs": "n_epochs", "norm_adv": "normalize_advantage"}
    names |= {"clip_coef": "clip_range"}
    same = ("gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm")
    for ours, theirs in (names | dict(zip(same, same, strict=True))).items():
        assert called[theirs] == expected[ours], ours
    assert called["batch_size"] * expected["num_minibatches"] == 8192
    assert called["learning_rate"] == [expected["learning_rate"], 0, 1]
    assert called["policy_kwargs"]["net_arch"] == {"pi": [8, 9], "vf": [8, 9]}
    assert called["policy_kwargs"]["optimizer_kwargs"] == {"eps": expected["adam_eps"]}
    assert called.get("clip_range_vf") == {"sb3": 0.2, "sbx": None}[name]


UV = """#!/bin/sh
echo "$*" >>"$UV_CALLS"
case "$*" in
*--help) test -e "$UV_CALLS.installed" ;;
*"--no-sources"*) touch "$UV_CALLS.installed" ;;
sync*) exit 1 ;;
esac
"""


def test_peers_are_installed_once_and_then_run_without_the_network(tmp_path):
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o755)
    own = {"PATH": f"{tmp_path}:/usr/bin:/bin", "UV_CALLS": str(tmp_path / "calls")}

    def run(*words, **changes):
        command = [sys.executable, "-m", "studies.peers.run", *words]
        env = os.environ | own | {"PIP_FIND_LINKS": "/wheels"} | changes
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        calls = tmp_path / "calls"
        found = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return done, found

    done, calls = run("install")
    assert done.returncode == 0, done.stderr
    file = "--script studies/peers/ppo_sb3.py"
    assert calls[:4] == [
        f"run --quiet --offline {file} --help",
        f"sync --quiet {file}",
        f"sync --quiet --no-sources --find-links=/wheels {file}",
        f"run --quiet --offline {file} --help",
    ]
    assert not any("sync" in x for x in run("install")[1])
    assert run("studies/peers/ppo_sb3.py", "--seed", "1")[1] == [
        f"run --quiet --offline {file} --seed 1"
    ]
    without, _ = run("install", PATH="/nothing")
    assert without.returncode == 1
    assert without.stderr.count("\n") == 1

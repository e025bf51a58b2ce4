"""Stable-Baselines3 and SBX beside our scripts: runs, the driver, the table and the targets."""

import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from made_up import grid, only_bench
from scipy.stats import norm
from test_driver import copy_driver

from analysis import others, pack
from analysis.runs import NOT_SETTINGS, Data, load

PEERS = ROOT / "studies/peers"
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
        n, size = 0, 32 * 256
        while callback.num_timesteps < steps:
            callback._on_rollout_start()
            callback.num_timesteps += size
            n += 1
            ends = [{"episode": {"r": 10.0 * n, "l": 5}}, {}, {"episode": {"r": 30.0 * n, "l": 7}}]
            callback.locals = {"infos": ends if n < 3 else [{}, {}, {}]}
            callback._on_step()
        callback._on_training_end()


def module(name, **names):
    sys.modules[name] = found = ModuleType(name)
    found.__dict__.update(names)


def make_vec_env(env_id, num_envs, seed):
    return Namespace(env_id=env_id, num_envs=num_envs, seed=seed)


def schedule(start, end, fraction):
    return Namespace(ends=(start, end, fraction))


module("stable_baselines3", PPO=PPO)
module("stable_baselines3.common")
module("stable_baselines3.common.callbacks", BaseCallback=BaseCallback)
module("stable_baselines3.common.env_util", make_vec_env=make_vec_env)
module("stable_baselines3.common.utils", LinearSchedule=schedule)
module("sbx", PPO=PPO)
"""


def usual_settings():
    """Of ppo_torch.py, as the analysis compares them."""
    import ppo_torch

    args = asdict(ppo_torch.Args(run_name="usual"))
    return {name: x for name, x in args.items() if name not in NOT_SETTINGS}


def stand_in(name, folder, *flags):
    """Run a peer on the library that does nothing; return what it asked of it."""
    (folder / "library.py").write_text(LIBRARY)
    code = f"import library, runpy, sys; sys.path[0] = {str(PEERS)!r}\n"
    code += f"runpy.run_path({str(PEERS / f'ppo_{name}.py')!r}, run_name='__main__')"
    own = {"PYTHONPATH": str(folder), "CALLED_WITH": str(folder / "called.json")}
    command = [sys.executable, "-c", code, "--runs-dir", str(folder / "runs"), *flags]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "called.json").read_text())


# === Runs =======================================================================================
@pytest.mark.parametrize(("name", "flags"), [("sb3", ["--threads", "1"]), ("sbx", [])])
def test_its_runs_are_compared_with_ours(name, flags, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_INFO", '{"cpu": "Fast", "cores": 3}')  # as benchmark.sh does
    steps = ["--total-timesteps", str(3 * 8192 + 1), "--seed", "7", "--hidden-sizes", "8", "9"]
    called = stand_in(name, tmp_path, "--run-name", "one", *steps, *flags)
    expected = usual_settings()
    found = load(tmp_path / "runs")
    [run] = found.runs.to_dict("records")
    assert json.loads(run["settings"]) == expected
    assert (run["mode"], run["script"], run["framework"]) == (" ".join([name, *flags]), name, name)
    assert (run["algorithm"], run["device"], run["repeat"]) == ("ppo", "cpu", 7)
    assert run["platform"] == "Linux, Fast, 3 cores"
    assert (run["hidden_sizes"], run["num_iterations"], run["batch_size"]) == ("8 9", 3, 8192)
    assert list(found.iterations["charts/episodic_return"])[:2] == [20, 40]
    assert list(found.iterations["charts/episodic_return_max"])[:2] == [30, 60]
    assert list(found.iterations["charts/episodes"]) == [2, 2, 0]
    assert run["final_return"] == 40
    # What it asks of the library is what its run.json says.
    names = {"num_steps": "n_steps", "update_epochs": "n_epochs", "norm_adv": "normalize_advantage"}
    names |= {"clip_coef": "clip_range"}
    same = ("gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm")
    for ours, theirs in (names | dict(zip(same, same, strict=True))).items():
        assert called[theirs] == expected[ours], ours
    assert called["batch_size"] * expected["num_minibatches"] == 8192
    assert called["learning_rate"] == [expected["learning_rate"], 0, 1]
    assert called["policy_kwargs"]["net_arch"] == {"pi": [8, 9], "vf": [8, 9]}
    assert called["policy_kwargs"]["optimizer_kwargs"] == {"eps": expected["adam_eps"]}
    assert (called["seed"], called["device"]) == (7, "cpu")
    assert called.get("clip_range_vf") == {"sb3": 0.2, "sbx": None}[name]


@pytest.mark.parametrize("name", ["sb3", "sbx"])
def test_the_library_itself_trains(name, tmp_path):
    """Where benchmark.sh has installed it: nothing is installed here."""
    command = ["uv", "run", "--quiet", "--offline", "--python", sys.executable, "--script"]
    command += [str(PEERS / f"ppo_{name}.py"), "--total-timesteps", "8192"]
    done = subprocess.run(
        [*command, "--runs-dir", str(tmp_path), "--run-name", "one"], capture_output=True, text=True
    )
    if done.returncode and "Traceback" not in done.stderr:
        pytest.skip("uv has no environment for it: ./benchmark.sh peers makes one")
    assert done.returncode == 0, done.stderr
    [run] = load(tmp_path).runs.to_dict("records")
    assert run["mode"] == name and 9 < run["final_return"] < 100  # hardly trained
    assert run["imports"] > 0.5 and 0.05 < run["first"] < run["startup"]


# === The driver ===============================================================================
UV = """#!/bin/sh
echo "$* " >>"$UV_CALLS"
case "$*" in
*--help) test -e "$UV_CALLS.installed" ;;
*"--no-sources"*) touch "$UV_CALLS.installed" ;;
sync*) exit 1 ;;
*) while test "$1" != --script; do shift; done; shift; exec python "$@" ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    """A copy of the driver with stand-ins for all scripts, in an environment that has no uv."""
    copy_driver(tmp_path)
    shutil.copy(PEERS / "run.py", tmp_path / "studies/peers/run.py")
    names = [f"studies/peers/ppo_{name}.py" for name in ("sb3", "sbx")]
    names += [path.name for path in ROOT.glob("ppo_*.py")]
    for name in names:
        shutil.copy(ROOT / "tests/stand_in.py", tmp_path / name)
    add_tool(tmp_path, "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    return tmp_path


def add_tool(project, name, text):
    path = project / "venv/bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def bench(project, *flags):
    others_of_path = os.environ["PATH"].split(":")
    path = ":".join(x for x in others_of_path if not Path(x, "uv").exists())
    own = {"VENV": str(project / "venv"), "TMPDIR": str(project), "PATH": path}
    own |= {"UV_CALLS": str(project / "calls"), "PIP_FIND_LINKS": "/wheels"}
    return subprocess.run(
        ["./benchmark.sh", "peers", "--only", "CartPole.*__sb(3|x)__", "--repeats", "2", *flags],
        cwd=project,
        env=os.environ | own | {"TRACE": str(project / "trace")},
        capture_output=True,
        text=True,
    )


def test_they_are_run_beside_ours(project):
    lines = bench(project, "--only", "seed1", "--track", "--list").stdout.splitlines()
    assert len(lines) == 2 * 9
    for line in lines:
        peer = next((x for x in ("sb3", "sbx") if f"__{x}" in line), None)
        module = f"-m studies.peers.run studies/peers/ppo_{peer}.py "
        assert (module in line) == (peer is not None)
        assert ("--track" in line) == (peer is None)  # they do not know W&B
        assert ("--threads 1" in line) == ("one-thread" in line)


def test_without_uv_nothing_runs(project):
    done = bench(project)
    sentence = "sb3 and sbx need uv, which makes an environment for each: pip install uv\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)
    assert not (project / "runs").exists()


def test_they_are_installed_before_anything_runs(project):
    add_tool(project, "uv", UV)
    done = bench(project, "--no-report")
    assert done.returncode == 0, done.stdout + done.stderr
    file = "--script studies/peers/ppo_sb3.py"
    calls = [x.strip() for x in (project / "calls").read_text().splitlines()]
    assert calls[:4] == [
        f"run --quiet --offline {file} --help",
        f"sync --quiet {file}",
        f"sync --quiet --no-sources --find-links=/wheels {file}",
        f"run --quiet --offline {file} --help",
    ]
    runs = [x for x in calls if "--seed" in x]
    assert len(runs) == 4 and runs == calls[-4:] and all("--offline" in x for x in runs)
    (project / "calls").unlink()
    shutil.rmtree(project / "runs")
    assert bench(project, "--no-report").returncode == 0
    assert "sync" not in (project / "calls").read_text()


# === The table and the targets ==================================================================
def test_ratios_of_medians_have_intervals_that_pair_repeats():
    pairs = pd.DataFrame({"baseline": [1.0, 2, 3, 4, 50], "candidate": [0.1, 0.2, 0.3, 0.4, 5]})
    assert others.ratio_of_medians(pairs) == pytest.approx((0.1, 0.1, 0.1))
    estimate, low, high = others.ratio_of_medians(pairs.assign(candidate=[3.0, 2, 4, 3, 3]))
    assert estimate == 1 and 0.06 <= low < 1 < high <= 3
    few = others.ratio_of_medians(pairs[:4])
    assert few.estimate == pytest.approx(0.1) and few.low != few.low


def normal(rng, repeats):
    """Noise of which runs of one repeat share a part, and the truth."""
    noise = rng.standard_normal((repeats, 2)) + rng.standard_normal((repeats, 1))
    return np.exp(0.06 * noise), 1


def both_disturbed(rng, repeats):
    """One process in ten takes 1.4 times as long."""
    slow = np.where(rng.random((repeats, 2)) < 0.1, 1.4, 1)
    return slow * np.exp(0.03 * rng.standard_normal((repeats, 2))), 1


def one_disturbed(rng, repeats):
    """The same of the candidate alone: its median is the quantile 5/9 of what is left."""
    slow = np.where(rng.random(repeats) < 0.1, 1.4, 1)
    values = np.exp(0.03 * rng.standard_normal((repeats, 2)))
    return values * np.stack([np.ones(repeats), slow], 1), np.exp(0.03 * norm.ppf(5 / 9))


@pytest.mark.parametrize(("repeats", "least"), [(5, 0.91), (10, 0.93)])
@pytest.mark.parametrize("noise", [normal, both_disturbed, one_disturbed])
def test_the_bootstrap_holds_the_ratio_about_95_times_in_100(noise, repeats, least, monkeypatch):
    monkeypatch.setattr(others, "RESAMPLES", 1000)
    rng, held = np.random.default_rng(2), []
    for _ in range(1000):
        values, truth = noise(rng, repeats)
        pairs = pd.DataFrame(values, columns=["baseline", "candidate"])
        _, low, high = others.ratio_of_medians(pairs)
        held.append(low <= truth <= high)
    assert least <= np.mean(held) <= 0.99


MODES = {"ppo_linen": (5.0, 0.06), "ppo_torch": (4.0, 0.3), "ppo_torch_compile": (20.0, 0.15)}
MODES |= {"sb3": (5.0, 0.35), "sb3 --threads 1": (5.0, 0.3), "sbx": (9.0, 0.2)}


def test_table_and_targets():
    bench = only_bench(grid(MODES, repeats=10, final_return=480.0))
    table = others.peer_table(bench)
    assert list(table.cells["script"]) == [
        *("ppo_linen", "ppo_torch_compile", "ppo_torch", "sbx", "sb3", "sb3 --threads 1")
    ]
    sbx = table.cells.set_index("script").loc["sbx"]
    assert sbx["iteration (ms)"] == "200" and sbx["as sb3"].startswith("0.571 [")
    assert "environment" not in table.cells and "pairs" not in table.cells.to_string()
    lines = others.target_lines(bench)
    ends = {(x.split()[1], x.split(" of ")[1].split("'s")[0]): x.split(" is ")[1] for x in lines}
    assert ends == {
        ("ppo_linen", "sb3"): "met.",
        ("ppo_linen", "sb3 --threads 1"): "met.",
        ("ppo_torch", "sb3"): "missed.",
        ("ppo_torch", "sb3 --threads 1"): "missed.",
        ("ppo_torch_compile", "sb3"): "met.",
        ("ppo_torch_compile", "sb3 --threads 1"): "met.",
    }
    assert others.target_lines(only_bench(grid({"sb3": (5.0, 1.0)}))) == []


def test_two_environments_have_rows_and_sentences_of_their_own():
    """The second's iterations take twice as long, and it has five repeats to the first's ten."""
    runs = grid(MODES, ["CartPole-v1", "Acrobot-v1"], repeats=10, final_return=480.0)
    bench = only_bench(runs[(runs["env_id"] == "CartPole-v1") | (runs["repeat"] <= 5)])
    cells = others.peer_table(bench).cells.set_index(["environment", "script"])
    assert list(dict.fromkeys(cells.index.get_level_values(0))) == ["CartPole-v1", "Acrobot-v1"]
    assert len(cells) == 12
    for env_id, *expected in (("CartPole-v1", "10", "350"), ("Acrobot-v1", "5", "700")):
        assert list(cells.loc[(env_id, "sb3"), ["runs", "iteration (ms)"]]) == expected
        assert cells.loc[(env_id, "sbx"), "as sb3"] == "0.571 [0.571, 0.571]"
    returns = cells["median final return"]
    assert set(returns["CartPole-v1"]) == {"480 [480, 480]"}
    assert set(returns["Acrobot-v1"]) == {"480"}  # five values have no interval of a median
    lines = others.target_lines(bench)
    assert len(lines) == 12
    assert lines[2] == (
        "CartPole-v1: ppo_torch takes 0.857 [0.857, 0.857] of sb3's iteration; "
        "the target, at most 0.800, is missed."
    )
    assert lines[8] == (
        "Acrobot-v1: ppo_torch takes 0.857 [0.857, 0.857] of sb3's iteration; "
        "CartPole-v1's target, at most 0.800, is missed."
    )


def test_two_networks_have_rows_and_sentences_of_their_own():
    small, large = (grid(MODES, ["CartPole-v1"], repeats=5) for _ in range(2))
    large = large.assign(size="large", steady=large["steady"] * 2)
    large["run"] += " large"
    bench = only_bench(pd.concat([small, large], ignore_index=True))
    cells = others.peer_table(bench).cells.set_index(["network", "script"])
    assert cells.loc[("small", "sb3"), "iteration (ms)"] == "350"
    assert cells.loc[("large", "sb3"), "iteration (ms)"] == "700"
    assert set(cells["runs"]) == {"5"}
    lines = others.target_lines(bench)
    assert len(lines) == 12
    assert sum(x.startswith("CartPole-v1, small: ") and "; the target" in x for x in lines) == 6
    assert sum("CartPole-v1, large: " in x and "CartPole-v1's target" in x for x in lines) == 6


def test_too_few_repeats_and_none_in_common_are_no_claims():
    runs = grid({"ppo_linen": (5.0, 0.1), "sb3": (5.0, 1.0)}, repeats=3)
    [line] = others.target_lines(only_bench(runs))
    assert line == (
        "CartPole-v1: ppo_linen takes 0.100 of sb3's iteration; "
        "the target, at most 0.200, is left open: too few repeats for a claim, 3 of 5."
    )
    apart = runs[(runs["mode"] == "sb3") == (runs["repeat"] == 3)]
    [line] = others.target_lines(only_bench(apart))
    assert line == (
        "CartPole-v1: ppo_linen and sb3 have no repeat in common; "
        "the target, at most 0.200, is not measured."
    )


def test_runs_without_a_pair_or_a_return_are_seen():
    runs = grid({"ppo_linen": (5.0, 0.1), "sb3": (5.0, 1.0)}, repeats=10)
    runs["final_return"] = runs["repeat"] * 10
    runs.loc[(runs["mode"] == "sb3") & (runs["repeat"] > 8), "final_return"] = np.nan
    bench = only_bench(runs[(runs["mode"] == "sb3") | (runs["repeat"] <= 7)])
    cells = others.peer_table(bench).cells.set_index("script")
    assert list(cells["runs"]) == ["7", "10"]
    assert cells.loc["ppo_linen", "as sb3"] == "0.100 [0.100, 0.100] (7 pairs)"
    assert cells.loc["sb3", "times as long as ppo_linen"] == "10.0 [10.0, 10.0] (7 pairs)"
    assert list(cells["median final return"]) == [
        "40.0 [10.0, 70.0]",
        "45.0 [10.0, 80.0] (8 of 10)",
    ]
    assert "takes 0.100 [0.100, 0.100] (7 pairs) of sb3's" in others.target_lines(bench)[0]
    none = others.peer_table(only_bench(runs.assign(final_return=np.nan))).cells
    assert set(none["median final return"]) == {"- (0 of 10)"}


def test_a_peer_lacks_packages_and_the_study_is_sound():
    versions = {"ppo_linen": ("0.10.2", "2.13.0"), "sb3": ("", "2.13.0")}
    runs = grid(dict.fromkeys(versions, (5.0, 0.1)), commit="a" * 40, cores=2.0)
    runs["jax"], runs["torch"] = zip(*runs["mode"].map(versions), strict=True)
    iterations = only_bench(runs).iterations
    assert pack.problems(Data(runs, iterations, {})) == []
    runs.loc[runs["mode"] == "sb3", "torch"] = "2.12.0"
    assert "different versions" in pack.problems(Data(runs, iterations, {}))[0]


@pytest.mark.parametrize(
    ("three", "expected"),
    [
        ((0.1, 0.05, 0.2), "met"),
        ((0.3, 0.21, 0.4), "missed"),
        ((0.1, 0.05, 0.21), "undecided: met by the medians, but not by the whole interval"),
        ((0.21, 0.15, 0.3), "undecided: missed by the medians, but not by the whole interval"),
        ((0.21, 0.2, 0.3), "undecided: missed by the medians, but not by the whole interval"),
        ((0.1, np.nan, np.nan), "left open: too few repeats for a claim, 4 of 5"),
        ((0.3, np.nan, np.nan), "left open: too few repeats for a claim, 4 of 5"),
        ((np.nan, np.nan, np.nan), "not measured"),
    ],
)
def test_a_target_is_met_or_missed_by_the_whole_interval(three, expected):
    assert others.verdict(others.Ratio(*three, 4, 5), 0.2) == expected

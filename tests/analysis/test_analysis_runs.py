"""Load runs from folders, studies and W&B into one table; report broken and duplicate runs."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pandas as pd
import pytest
import wandb
from conftest import ROOT
from made_up import (
    MODES,
    NEW_YEAR,
    metrics_rows,
    results,
    run_info,
    write_grid,
    write_plain,
    write_run,
)
from sections import ROWS

from analysis import schema
from analysis.runs import count_once, load, read, save
from analysis.schema import ITERATIONS, RUNS, SourceError

HOSTILE = "<script>\ud800\x1b[31m\r\n\0\u202e../../x|$^_`"


def test_the_wheel_contains_scripts_toml(tmp_path):
    """scripts.toml is outside the package, so pyproject.toml adds it to the wheel."""
    shutil.copytree(ROOT / "analysis", tmp_path / "analysis")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    for source, target in wheel["force-include"].items():
        shutil.copy(ROOT / source, tmp_path / target)
    code = "from analysis.measures import SCRIPTS; print(*SCRIPTS)"
    said = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
    assert said.split() == list(ROWS)


def test_the_catalog_imports_neither_numpy_nor_pandas():
    code = "import sys, analysis.catalog; print({'numpy', 'pandas'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "set()\n"


# === One run ====================================================================================
def test_a_run_becomes_a_row_with_the_columns_of_the_schema(tmp_path):
    info = run_info(sync=True, seed=3, python="3.11.7", unknown=1)
    rows = [row | {"unknown": 1} for row in metrics_rows(info)]
    rows[3]["losses/entropy"] = float("nan")  # written as NaN, which is not valid JSON
    write_run(tmp_path, info, rows)
    data = load(tmp_path)
    for table, columns in ((data.runs, RUNS), (data.iterations, ITERATIONS)):
        kinds = {x.name: schema.KINDS[x.kind].dtype for x in columns}
        assert {name: str(x) for name, x in table.dtypes.items()} == kinds
    [row] = data.runs.to_dict("records")
    assert (row["mode"], row["size"], row["repeat"], row["seed"]) == ("ppo_linen", "small", 3, 3)
    assert (row["sync"], row["resumed"], row["container"]) == (True, False, False)
    expected = {"setup": 1.0, "startup": 2.0 + 1.0 + 0.1, "first": 0.1, "early": 0.5}
    expected |= {"steady": 1.05, "update_steady": 0.25 * 1.05, "process": 2.0 + 1.0 + 7.8}
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert (row["num_iterations"], row["batch_size"], row["final_return"]) == (12, 8192, 110)
    assert (row["python"], row["torch"], row["jaxlib"]) == ("3.11.7", "2.13.0", "")
    assert np.isnan(data.iterations.loc[3, "losses/entropy"])
    assert data.iterations["iteration"].tolist() == list(range(12))


def test_names_of_modes_and_environments_include_the_flags_that_change_them(tmp_path):
    for mode in MODES:
        write_plain(tmp_path, mode=mode)
    write_plain(tmp_path / "two", side_by_side=2)
    write_plain(tmp_path / "shared", script="ppo_torch_ddp", devices=4)
    write_plain(tmp_path / "flags", args={"vectorization": "async"})
    write_plain(tmp_path / "copy", script="mine", args={"target_network_frequency": 1})
    write_plain(tmp_path / "sticky", args={"env_id": "Pong", "sticky_actions": 0.2})
    runs = load(tmp_path).runs
    assert set(runs["mode"]) == {
        *(
            "mine",
            "ppo_torch_ddp, 4 devices",
            "ppo_linen",
            "ppo_linen without jit",
            "ppo_linen --vectorization async",
        ),
        *("ppo_linen, 2 side by side", "ppo_nnx", "ppo_nnx without jit", "ppo_nnx_cached"),
        *("ppo_torch", "ppo_torch without jit", "ppo_torch_compile"),
    }
    assert set(runs["env_id"]) == {"CartPole-v1", "Pong, sticky_actions 0.2"}
    assert runs["algorithm"].value_counts().to_dict() == {"ppo": 12, "dqn": 1}


def test_framework_and_compile_mode_come_from_scripts_toml_or_the_packages(tmp_path):
    versions = {"torch": "2.13.0", "jax": "0.10.2"}
    write_plain(tmp_path / "1", mode="torch compile", jit_disabled=True)
    write_plain(tmp_path / "2", script="mine", versions=versions)
    write_plain(tmp_path / "3", script="mine", versions={"flax": "0.12.8"}, seed=2)
    write_plain(tmp_path / "4", script="sb3", framework="sb3", compile_mode="eager")
    runs = load(tmp_path).runs
    assert list(zip(runs["framework"], runs["compile_mode"], strict=True)) == [
        ("torch", "compile, env none"),
        ("torch", "unknown"),
        ("flax", "unknown"),
        ("sb3", "eager"),
    ]


def test_a_run_without_benchmark_sh_has_no_process_durations(tmp_path):
    info = run_info()
    del info["launched"]
    write_run(tmp_path, info)
    [row] = load(tmp_path).runs.to_dict("records")
    assert row["total"] == pytest.approx(1.0 + 7.8) and row["setup"] == 1.0
    assert np.isnan([row[x] for x in ("imports", "startup", "process")]).all()
    assert row["started"] == "2026-01-01T00:00:01+00:00"


def test_names_toml_gives_an_environment_the_same_name_in_two_libraries(tmp_path):
    rules = {"sticky_actions": 0.1, "full_actions": True, "max_episode_steps": 2**31 - 1}
    write_plain(tmp_path / "1", args={"env_id": "envs.doors:Doors"})
    write_plain(tmp_path / "2", seed=2, args={"env_id": "envs.doors_gymnasium:Doors-v0"})
    write_plain(tmp_path / "3", seed=3, args={"env_id": "Breakout-MinAtar"} | rules)
    found = {"Doors-v0", "MinAtar/Breakout-v0"}
    for study, missing in (("doors", "MinAtar/Breakout-v0"), ("minatar", "Doors-v0")):
        runs = load(tmp_path, names=[ROOT / "studies" / study / "names.toml"]).runs
        assert found - set(runs["env_id"]) == {missing}
        assert runs["env_id"].nunique() == (2 if study == "doors" else 3)
    (tmp_path / "names.toml").write_text("a = 1")
    with pytest.raises(SourceError, match="every name must be text"):
        load(tmp_path, names=[tmp_path / "names.toml"])


def test_a_resumed_run_has_returns_but_no_durations(tmp_path):
    write_plain(tmp_path, sync=True, resumed=[4, 9])
    data = load(tmp_path)
    assert data.runs["resumed"].all()
    assert data.runs["final_return"].tolist() == [110]
    durations = [x.name for x in RUNS if x.kind == "seconds"]
    assert data.runs[durations].isna().all(axis=None)
    assert data.iterations.filter(regex="time/|SPS").isna().all(axis=None)
    assert data.iterations["charts/episodic_return"].tolist() == [10.0 * i for i in range(12)]


def test_a_dqn_run_has_the_returns_of_its_evaluations(tmp_path):
    """With 30 episodes per iteration, the last 100 come from the last 3 1/3 iterations."""
    args = {"num_envs": 1, "num_steps": 500, "total_timesteps": 6000, "env_id": "Breakout-MinAtar"}
    info = run_info(script="dqn_linen", args=args)
    del info["args"]["sync_for_timing"]  # DQN scripts do not have this flag
    rows = [row | {"charts/episodes": 30} for row in metrics_rows(info)]
    path = write_run(tmp_path, info, rows)
    result = {"iteration": 12, "actions": "greedy", "episodes": 100, "max_steps": 10_000}
    for name, epsilon, mean in (("", 0, 9.5), ("-epsilon-0.05", 0.05, 8.5), ("-epsilon-1", 1, 0.5)):
        own = result | {"epsilon": epsilon, "return": {"mean": mean}}
        (path / f"evaluation{name}.json").write_text(json.dumps(own))
    [row] = load(tmp_path).runs.to_dict("records")
    assert (row["mode"], row["algorithm"], row["sync"]) == ("dqn_linen", "dqn", False)
    assert row["last_100_return"] == pytest.approx(0.3 * (110 + 100 + 90) + 0.1 * 80)
    # DQN runs of different lengths are not pooled.
    assert json.loads(row["settings"])["total_timesteps"] == 6000
    assert (row["greedy_return"], row["noisy_return"], row["random_return"]) == (9.5, 8.5, 0.5)
    # An evaluation of an earlier iteration or with other flags does not count.
    for change in ({"iteration": 11}, {"episodes": 1}, {"actions": "sampled"}):
        own = result | {"epsilon": 0, "return": {"mean": 9.5}} | change
        (path / "evaluation.json").write_text(json.dumps(own))
        assert load(tmp_path).runs["greedy_return"].isna().all()


def test_platforms_differ_by_gpu_driver_machine_and_wsl2(tmp_path):
    gpu: dict[str, Any] = {"device": "H200", "gpu": "H200"}
    write_plain(tmp_path / "1")
    write_plain(tmp_path / "2", **gpu, driver="1", machine="3fa9")
    write_plain(tmp_path / "3", **gpu, driver="2", os="Linux-6.6-Microsoft-standard-WSL2-x86_64")
    write_plain(tmp_path / "4", cpu=None, os="macOS-26-arm64", cores=None)
    write_plain(tmp_path / "5", **gpu, os=None)  # os is unknown without benchmark.sh
    write_plain(tmp_path / "6", os=None)
    assert load(tmp_path).runs["platform"].tolist() == [
        "Linux, Fast, 2 cores",
        "Linux, H200, driver 1, Fast, 2 cores, machine 3fa9",
        "WSL2, H200, driver 2, Fast, 2 cores",
        "macOS, unknown processor",
        "unknown, H200",
        "unknown",
    ]


# === Broken runs ================================================================================
@pytest.mark.parametrize(
    ("changes", "row", "reason"),
    [
        ({"status": "running"}, {}, "it was killed, or is still running"),
        ({"status": "stopped"}, {}, "it was stopped before its end"),
        ({"status": "diverged"}, {}, "diverged: NaN or infinite losses"),
        ({"args": {"num_envs": 0}}, {}, "not a run of this project: ZeroDivisionError"),
        ({"args": {"seed": 10**400}}, {}, "seed is "),
        ({"cores": "many"}, {}, "cores is 'many', not a number"),
        ({}, {"time/iteration": 0}, "iteration 9: time/iteration is 0, not a number above"),
        ({}, {"iteration": 2}, "the logged iterations are not 0 to 11"),
    ],
)
def test_a_damaged_run_is_left_out_with_a_reason(tmp_path, changes, row, reason):
    info = run_info(seed=2, **changes)
    rows = metrics_rows(info)
    rows[9] |= row
    damaged = write_run(tmp_path, info, rows).name
    write_plain(tmp_path)
    data = load(tmp_path)
    assert len(data.runs) == 1
    assert list(data.left_out) == [damaged]
    assert reason in data.left_out[damaged]


def test_unreadable_files_are_reported(tmp_path):
    names = [write_plain(tmp_path, seed=seed).name for seed in range(1, 5)]
    (tmp_path / names[0] / "run.json").unlink()
    (tmp_path / names[1] / "run.json").write_text('{"args": ')
    (tmp_path / names[2] / "metrics.jsonl").write_text("[")
    (tmp_path / names[3] / "evaluation.json").write_bytes(b'{"\xff": 1}')  # an optional file
    data = load(tmp_path)
    assert data.runs["run"].tolist() == names[3:]
    assert data.left_out == {
        names[0]: "run.json is missing",
        names[1]: "run.json is not JSON",
        names[2]: "metrics.jsonl is not JSON",
    }


def test_untrusted_text_is_sanitized_and_cannot_change_other_runs(tmp_path):
    names = ("script", "framework", "compile_mode", "device", "cpu", "os", "git_commit")
    args = {"env_id": HOSTILE, HOSTILE: HOSTILE, "run_name": "x"}
    info = run_info(versions={"jax": HOSTILE, HOSTILE: "1"}, args=args)
    info |= dict.fromkeys(names, HOSTILE)
    good = write_plain(tmp_path)
    rows = [row | {HOSTILE: HOSTILE, "run": good.name} for row in metrics_rows(info)]
    path = write_run(tmp_path, info, rows)
    os.rename(path, os.fsencode(tmp_path) + b"/<b>\xff\x1b[31m\n")
    data = load(tmp_path)
    text = data.runs.select_dtypes("str")
    assert text.map(str.isprintable).all(axis=None)
    assert data.iterations["run"].value_counts().to_dict() == dict.fromkeys(data.runs["run"], 12)


def test_failed_runs_are_reported_from_the_log_of_benchmark_sh(tmp_path):
    folder = write_plain(tmp_path / "grid")
    killed = write_plain(tmp_path / "grid", seed=2, status="running").name
    events = [{"run": killed, "completed": "no", "reason": "out of memory"}]
    events += [{"run": "early", "completed": "no", "reason": "no end after 9 s"}]
    events += [{"run": "fine", "completed": "yes"}]
    events += [{"run": folder.name, "completed": "no", "reason": "at first"}]  # completed later
    lines = [*map(json.dumps, events), '{"half a li']
    (tmp_path / "grid" / "benchmark.jsonl").write_text("\n".join(lines))
    reasons = {f"grid/{killed}": "out of memory", "grid/early": "no end after 9 s"}
    assert load(tmp_path).left_out == reasons


# === Duplicates =================================================================================
def test_the_latest_complete_run_among_duplicates_counts(tmp_path):
    """A repeated seed is not a second observation, even with a different commit or version."""
    late = NEW_YEAR + 3600.0
    new = write_plain(tmp_path / "a", started=late, git_commit="b" * 40, versions={"jax": "0.11"})
    old = write_plain(tmp_path / "b", started=late - 1800)
    stopped = write_plain(tmp_path / "c", started=late + 1800, resumed=[3])
    write_plain(tmp_path / "cores", cores=4)
    write_plain(tmp_path / "rate", args={"learning_rate": 1e-3})
    data = load(tmp_path)
    assert len(data.runs) == 3
    reason = f"repeated as a/{new.name}, which is used"
    assert data.left_out == {f"b/{old.name}": reason, f"c/{stopped.name}": reason}


def test_a_dated_run_is_preferred_to_one_without_a_date(tmp_path):
    for name in "abc":
        write_plain(tmp_path / name)
    data = read(tmp_path, None)
    runs = data.runs.assign(started=[None, "2026-01-01T00:00:00+00:00", None])
    [kept] = count_once(data._replace(runs=runs)).runs["run"]
    assert kept == runs["run"][1]


def write_program(folder, seed, started):
    """Write a run folder of a vmap script, which contains a run folder for each of its 3 agents."""
    info = run_info(seed=seed, started=started, args={"num_agents": 3})
    path = write_run(folder, info)
    for k in range(3):
        own = info["args"] | {"seed": seed + k, "run_name": f"agent{k}"}
        write_run(path, info | {"args": own, "agent": k})


def test_only_the_first_agent_has_durations_and_it_is_preferred_among_duplicates(tmp_path):
    write_plain(tmp_path / "alone")
    write_program(tmp_path / "a", 1, NEW_YEAR + 86400)
    write_program(tmp_path / "b", 2, NEW_YEAR)  # an earlier run, with seeds 2 to 4
    data = load(tmp_path)
    assert data.runs["settings"].nunique() == 2
    runs = data.runs[data.runs["num_agents"] == 3].set_index("seed")
    assert runs["run"].str[0].to_dict() == {1: "a", 2: "b", 3: "a", 4: "b"}
    assert runs["total"].notna().to_dict() == {1: True, 2: True, 3: False, 4: False}
    assert runs["final_return"].tolist() == [110] * 4
    timed = data.iterations.dropna(subset=["time/iteration"])["run"]
    assert timed.nunique() == 3


# === Several sources ============================================================================
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("foreign", r"no completed run .*1 left out, e.g. foreign"),
        ("missing", "missing is neither a folder of runs nor a table"),
        ("wandb:a/b/c", "wandb:entity/project, not wandb:a/b/c$"),
    ],
)
def test_a_source_without_runs_is_an_error(tmp_path, monkeypatch, source, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "run.json").write_text("[1, 2]")
    with pytest.raises(SourceError, match=reason):
        load(source)


def test_nested_and_separate_folders_and_studies_become_one_table(tmp_path):
    one = write_plain(tmp_path / "a", seed=8).name
    write_plain(tmp_path / "older", seed=8, started=NEW_YEAR - 86400)
    (tmp_path / "older" / "broken").mkdir()
    (tmp_path / "older" / "broken" / "metrics.jsonl").touch()
    save(load(tmp_path / "older"), tmp_path / "b" / "deep" / "study")
    write_grid(tmp_path / "b" / "runs")
    alone = load(tmp_path / "b")
    assert len(alone.runs) == 13
    assert alone.runs["run"].str.startswith("deep/study/CartPole").sum() == 1
    assert list(alone.left_out) == ["deep/study/broken"]
    data = load([f"{tmp_path}/a/", str(tmp_path / "b"), tmp_path / "a"])
    assert len(data.runs) == 13
    assert len(data.iterations) == 13 * 12
    assert f"{tmp_path}/a/{one}" in set(data.runs["run"])
    assert set(data.iterations["run"]) == set(data.runs["run"])
    [again] = [x for x in data.left_out.values() if "repeated" in x]
    assert again == f"repeated as {tmp_path}/a/{one}, which is used"


def test_saving_and_loading_a_study_is_exact(tmp_path):
    write_grid(tmp_path / "runs", sync=True)
    texts = ["None", "nan", "1e5", "007", "True", " ", "ä中😀", 'a,"b";c', "a\nb\rc", "=1", "'a"]
    for i, text in enumerate(texts):
        args = {"run_name": f"run {i}", "env_id": text}
        write_plain(tmp_path / "runs", seed=i, args=args, git_commit=text, os=text, resumed=[3])
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "metrics.jsonl").touch()
    data = load(tmp_path / "runs")
    save(data, tmp_path / "study")
    once = load(tmp_path / "study")
    pd.testing.assert_frame_equal(once.runs, data.runs, check_exact=True)
    pd.testing.assert_frame_equal(once.iterations, data.iterations, check_exact=True)
    assert once.left_out == data.left_out
    assert once.notes == data.notes


# === Weights & Biases ===========================================================================
def from_wandb(name, info, summary, rows, state="finished"):
    """Return an object like a run from the W&B client.

    Its rows are numbered, its summary omits null values, and its config contains the values that
    are known at the start of the run.
    """
    kept = {key: x for key, x in summary.items() if x is not None}
    history = [row | {"_step": i} for i, row in enumerate(rows)]
    return SimpleNamespace(
        id=name,
        name=name,
        url=f"https://wandb.ai/{name}",
        state=state,
        config=info | {"status": "running"},
        summary_metrics=kept,
        scan_history=lambda: iter(history),
    )


def test_runs_from_wandb_equal_those_from_folders(tmp_path, monkeypatch):
    """One run was killed and resumed, so some of its rows appear twice."""
    info = run_info(sync=True)
    rows = metrics_rows(info)
    write_run(tmp_path / "runs", info, rows)
    killed = [row | {"charts/episodic_return": -1.0} for row in rows[4:7]]
    found = [
        from_wandb("whole", info, results(info, rows), rows),
        from_wandb("resumed", run_info(seed=2), results(info, rows), rows[:4] + killed + rows[4:]),
        from_wandb("foreign", {}, results(info, rows), rows),
        from_wandb("stopped", info, results(info, rows) | {"status": "stopped"}, rows),
        from_wandb("crashed", {}, {}, [], state="crashed"),
    ]
    api = create_autospec(wandb.Api)  # a call must match the real signature
    api.return_value.runs.return_value = found
    monkeypatch.setattr(wandb, "Api", api)

    data = load("wandb:team/project", filters={"group": "mine"})
    assert api.return_value.runs.call_args.args == ("team/project", {"group": "mine"})
    assert data.left_out["crashed (crashed)"] == "no results; its state in W&B is crashed"
    assert "not a run of this project" in data.left_out["foreign"]
    assert data.left_out["stopped"] == "it was stopped before its end"
    resumed = data.iterations[data.iterations["run"] == "resumed"]
    assert resumed["charts/episodic_return"].tolist() == [10.0 * i for i in range(12)]
    ours = load(tmp_path / "runs")
    for own, theirs in ((ours.runs, data.runs), (ours.iterations, data.iterations)):
        whole = theirs[theirs["run"] == "whole"].reset_index(drop=True)
        names = [x for x in own if x not in ("run", "source")]
        pd.testing.assert_frame_equal(own[names], whole[names], check_exact=True)

"""Runs load into one table from folders, studies and W&B; what is broken or double is named."""

import copy
import csv
import json
import os
import pty
import shutil
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from fake_runs import MODES, metrics_rows, results, run_info, write_grid, write_run
from wandb_server import WandbServer

from analysis import schema
from analysis.runs import load, load_iterations, load_runs, save
from analysis.schema import ITERATIONS, RUNS, SourceError

HOSTILE = "<script>\ud800\x1b[31m\r\n\0\u202e../../x|$^_`" + "x" * 100_000


def plain_rows(info, iterations=12):
    return metrics_rows(info, np.arange(1, iterations + 1) / 10, np.arange(iterations) * 10.0)


def write_plain(folder, **changes: Any):
    """Write a run that differs from others only in its changes, and return its folder."""
    info = run_info(**changes)
    return write_run(folder, info, plain_rows(info))


def assert_same(data, other):
    """Assert that two loads gave the same to the last bit."""
    pd.testing.assert_frame_equal(data.runs, other.runs, check_exact=True)
    pd.testing.assert_frame_equal(data.iterations, other.iterations, check_exact=True)
    assert data.left_out == other.left_out
    assert data.notes == other.notes


# === Folders ====================================================================================
def test_a_run_becomes_a_row(tmp_path):
    write_plain(tmp_path, sync=True, seed=3, python="3.11.7")
    runs = load_runs(tmp_path)
    row = runs.iloc[0]
    assert len(runs) == 1
    assert (row["mode"], row["size"], row["repeat"], row["seed"]) == ("ppo_linen", "small", 3, 3)
    assert (row["script"], row["compile_mode"], row["hidden_sizes"]) == (
        "ppo_linen",
        "jit",
        "64 64",
    )
    assert row["platform"] == "Linux, Fast, 2 cores"
    assert (row["sync"], row["resumed"], row["container"]) == (True, False, False)
    assert row["startup"] == pytest.approx(2.0 + 1.0 + 0.1)
    assert row["first"] == pytest.approx(0.1)
    assert row["early"] == pytest.approx(0.5)  # the mean of 0.2 to 0.8
    assert row["steady"] == pytest.approx(1.05)  # the mean of 0.9 to 1.2
    assert row["rollout_early"] == pytest.approx(0.75 * 0.5)
    assert row["update_steady"] == pytest.approx(0.25 * 1.05)
    assert row["setup"] == pytest.approx(1.0)
    assert row["process"] == pytest.approx(2.0 + 1.0 + 7.8)
    assert (row["num_iterations"], row["batch_size"]) == (12, 8192)
    assert (row["final_return"], row["best_return"]) == (110, 110)
    assert row[["python", "torch", "jax", "flax"]].tolist() == [
        "3.11.7",
        "2.13.0",
        "0.10.2",
        "0.12.8",
    ]
    assert row[["jaxlib", "optax", "gymnax", "numpy"]].tolist() == [""] * 4  # not installed there


def test_a_mode_is_the_script_and_the_flag_that_it_ran_with(tmp_path):
    for mode in MODES:
        write_plain(tmp_path, mode=mode)
    assert sorted(load_runs(tmp_path)["mode"]) == [
        *("ppo_linen", "ppo_linen --no-jit", "ppo_nnx", "ppo_nnx --no-jit", "ppo_nnx_cached"),
        *("ppo_torch", "ppo_torch --no-jit-env", "ppo_torch_compile"),
    ]


def test_old_and_new_runs_are_the_same_row(tmp_path):
    info = run_info(sync=True)
    rows = metrics_rows(info, np.arange(1, 13) / 7, np.array([*range(10), 5.0, np.nan]))
    write_run(tmp_path / "old", info, rows, old=True)
    write_run(tmp_path / "new", info, rows)
    old, new = (load_runs(tmp_path / x).iloc[0] for x in ("old", "new"))
    pd.testing.assert_series_equal(old.drop("source"), new.drop("source"), check_exact=True)
    durations = json.loads((tmp_path / "old" / old["run"] / "run.json").read_text())["durations"]
    for window in ("first", "early", "steady"):
        assert old[window] == pytest.approx(durations[f"{window}_iteration"], rel=1e-12)
    assert (old["final_return"], old["best_return"]) == (5, 9)


def test_a_resumed_run_counts_for_learning_and_has_no_durations(tmp_path):
    write_plain(tmp_path / "a", sync=True, resumed=[4, 9])
    write_plain(tmp_path / "b", sync=True, seed=2)
    data = load(tmp_path)
    row, other = (row for _, row in data.runs.iterrows())
    assert (row["resumed"], row["final_return"]) == (True, 110)
    durations = [x.name for x in RUNS if x.kind == "seconds"]
    assert {"imports", "startup", "steady", "total", "process", "update_first"} <= set(durations)
    assert row[durations].isna().all()
    assert other[durations].notna().all()
    iterations = data.iterations[data.iterations["run"] == row["run"]]
    assert iterations.filter(regex="time/|SPS").isna().to_numpy().all()
    assert iterations["charts/episodic_return"].tolist() == [10.0 * i for i in range(12)]


def test_iterations_have_a_row_each_and_no_value_is_nan(tmp_path):
    info = run_info()
    rows = metrics_rows(info, np.ones(12), np.array([np.nan] * 6 + [1.0] * 6))
    rows[3] |= {"losses/entropy": float("nan"), "losses/value_loss": float("-inf")}  # not JSON
    write_run(tmp_path, info, rows)
    iterations = load_iterations(tmp_path)
    assert iterations.loc[3, ["losses/entropy", "losses/value_loss"]].isna().all()
    assert list(iterations["iteration"]) == list(range(12))
    assert iterations["charts/episodic_return"].isna().sum() == 6
    assert iterations["time/rollout"].isna().all()


def test_a_folder_of_folders_keeps_runs_of_one_name_apart(tmp_path):
    old = write_plain(tmp_path / "old")
    write_plain(tmp_path / "new", device="GPU", driver="1")
    assert set(load_runs(tmp_path)["run"]) == {f"{x}/{old.name}" for x in ("old", "new")}


def test_a_gpu_is_another_platform_and_so_are_wsl2_and_another_driver(tmp_path):
    gpu: dict[str, Any] = {"device": "H200", "gpu": "H200"}
    write_plain(tmp_path / "1")
    write_plain(tmp_path / "2", **gpu, driver="1")
    write_plain(tmp_path / "3", **gpu, driver="2")
    write_plain(tmp_path / "4", **gpu, driver="1", os="Linux-6.6-Microsoft-standard-WSL2-x86_64")
    assert load_runs(tmp_path)["platform"].tolist() == [
        "Linux, Fast, 2 cores",
        "Linux, H200, driver 1, Fast, 2 cores",
        "Linux, H200, driver 2, Fast, 2 cores",
        "WSL2, H200, driver 1, Fast, 2 cores",
    ]


def test_what_is_broken_partial_or_double_is_left_out_by_name(tmp_path):
    grid = write_grid(tmp_path, envs=("CartPole-v1",), repeats=5, modes=("linen jit",))
    names = [f"CartPole-v1__linen_jit__small__{seed}" for seed in range(1, 6)]
    (grid / names[0] / "run.json").unlink()  # killed
    (grid / names[1] / "run.json").write_text('{"args": ')  # torn
    (grid / names[2] / "run.json").write_text('{"hello": "world"}')  # foreign
    lines = (grid / names[3] / "metrics.jsonl").read_text().splitlines()
    (grid / names[3] / "metrics.jsonl").write_text("\n".join(lines[:-1]))  # one line short
    shutil.copytree(grid / names[4], grid / "copy")
    data = load(grid)
    assert len(data.runs) == 1
    assert set(data.iterations["run"]) == set(data.runs["run"])
    reasons = [data.left_out[name] for name in names[:4]]
    assert "killed" in reasons[0]
    assert "not JSON" in reasons[1]
    assert "not a run" in reasons[2]
    assert "11 iterations instead of 12" in reasons[3]
    assert len(data.left_out) == 5
    with pytest.warns(UserWarning, match=f"5 runs left out.*{names[1]}"):
        load_runs(grid)


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (("args", "num_envs"), 0, "args.num_envs is 0, not a whole number above 0"),
        (("args", "hidden_sizes"), "64", "is '64', not a list of whole numbers above 0"),
        (("args", "total_timesteps"), 8191, "not enough for an iteration"),
        (("args", "env_id"), "", "env_id is missing"),
        (("resumed",), 3, "resumed is 3, not a list of whole numbers"),
        (("script",), None, "script is missing"),
        (("status",), "running", "status is running"),
        (("cpu",), 5, "cpu is 5, not text"),
        (("durations", "process"), 0, "durations.process is 0, not a number above"),
        (("durations", "saving"), "x", "durations.saving is 'x', not a number"),
        (("durations", "total"), None, "durations.total is missing"),
        (("durations", "imports"), 1e300, "durations.imports is 1e+300, not a number"),
        (("durations", "imports"), 1e10, "durations.imports is 10000000000.0, not a number"),
        (("durations", "imports"), 1e-10, "durations.imports is 1e-10, not a number above 1e-9"),
        (("args", "num_steps"), 10**15, "args.num_steps is 1000000000000000, not a whole"),
        (("durations",), None, "not a run of this benchmark: it has no durations"),
        ((9, "time/iteration"), 0, "iteration 9: time/iteration is 0, not a number above"),
        ((0, "time/elapsed"), 0.1, "time/elapsed is not above time/iteration"),
        ((11, "charts/episodic_return"), "x", "episodic_return is 'x', not a number"),
        ((3, "time/iteration"), "0.4", "iteration 3: time/iteration is '0.4', not a number"),
        ((2, "time/update"), None, "iteration 2: time/update is missing"),
        ((1, "losses/entropy"), [], "iteration 1: losses/entropy is [], not a number"),
        ((0,), {}, "line 1 of its metrics is not iteration 0"),
        ((0,), [], "line 1 of its metrics is not iteration 0"),
    ],
)
def test_a_damaged_run_is_left_out_for_one_readable_reason(tmp_path, place, value, reason):
    rows = plain_rows(run_info(sync=True))
    info = run_info(sync=True) | results(rows)
    *parents, last = place
    target: Any = rows if isinstance(place[0], int) else info
    for parent in parents:
        target = target[parent]
    target[last] = value
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text(json.dumps(info))
    (tmp_path / "damaged" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_plain(tmp_path)
    data = load(tmp_path)
    assert len(data.runs) == 1
    assert list(data.left_out) == ["damaged"]
    assert reason in data.left_out["damaged"]


def test_what_may_be_unknown_may_be_null_or_absent(tmp_path):
    info = run_info(cpu=None, cores=None, load=None, git_commit=None, repeat=None)
    del info["gpu"], info["driver"], info["resumed"]
    write_run(tmp_path, info, plain_rows(info))
    row = load_runs(tmp_path).iloc[0]
    assert row[["cpu", "gpu", "driver", "commit"]].tolist() == [""] * 4
    assert np.isnan(row["load"])
    assert (row["platform"], row["repeat"]) == ("Linux, unknown processor", 1)


def test_a_run_made_by_hand_is_a_run(tmp_path):
    """It was not told what machine it is on; on macOS it does not know its memory, either."""
    info = run_info(cpu="arm", os="macOS-26-arm64")
    for name in ("cores", "load", "gpu", "driver", "container", "git_commit"):
        del info[name]
    path = write_run(tmp_path, info, plain_rows(info))
    done = json.loads((path / "run.json").read_text())
    del done["peak_host_bytes"]
    (path / "run.json").write_text(json.dumps(done))
    data = load(tmp_path)
    assert not data.left_out and not data.runs["container"][0]
    assert data.runs["platform"].tolist() == ["macOS, arm"]
    assert data.runs[["cores", "load", "saving", "peak_host_bytes"]].isna().all(axis=None)
    assert data.runs["process"].notna().all()


def test_a_copy_under_a_name_of_its_own_is_of_the_same_algorithm(tmp_path):
    for name, telling in (("a", "clip_coef"), ("b", "target_network_frequency"), ("c", "other")):
        info = run_info(script="mine")
        info["args"] |= {"exp_name": "mine", "run_name": name, telling: 1}
        if telling != "clip_coef":
            del info["args"]["sync_for_timing"]
        write_run(tmp_path, info | {"args": info["args"]}, plain_rows(run_info()))
    data = load(tmp_path)
    assert data.runs["algorithm"].tolist() == ["ppo", "dqn"] and set(data.runs["mode"]) == {"mine"}
    assert data.left_out == {"c": "args.sync_for_timing is missing"}


def test_of_two_runs_with_the_same_settings_the_newer_counts(tmp_path):
    """Also at another commit or version: a seed that was run again is no second observation."""
    new = write_plain(
        tmp_path / "a",
        started="2026-01-31T22:00:00-0200",  # half an hour after the other
        git_commit="b" * 40,
        versions={"jax": "0.11.0"},
    )
    old = write_plain(tmp_path / "b", started="2026-01-31T23:30:00+0000")
    data = load(tmp_path)
    assert data.runs["run"].tolist() == [f"a/{new.name}"]
    assert data.left_out == {f"b/{old.name}": f"same settings as a/{new.name}, which is newer"}


def test_a_copy_is_left_out_and_not_called_newer(tmp_path):
    run = write_plain(tmp_path)
    shutil.copytree(run, tmp_path / "A")
    data = load(tmp_path)
    assert data.runs["run"].tolist() == [run.name]
    assert data.left_out == {"A": f"same settings as {run.name}, which comes after it"}


def test_runs_that_differ_in_what_they_did_are_all_kept(tmp_path):
    args = run_info()["args"]
    write_plain(tmp_path / "plain")
    write_plain(tmp_path / "seed", seed=2)
    write_plain(tmp_path / "repeat", repeat=7)
    write_plain(tmp_path / "synced", sync=True)
    write_plain(tmp_path / "longer", iterations=12, args=args | {"total_timesteps": 12 * 8192 + 1})
    write_plain(tmp_path / "cores", cores=4)
    write_plain(tmp_path / "rate", args=args | {"learning_rate": 1e-3})
    data = load(tmp_path)
    assert len(data.runs) == 6  # the number of steps counts by the iterations that it makes
    assert len(data.left_out) == 1


def test_an_uninterrupted_run_counts_before_a_newer_resumed_one(tmp_path):
    for i, resumed in enumerate([[], [3], [5]]):
        write_plain(tmp_path / str(i), started=f"2026-01-0{i + 1}T00:00:00+0000", resumed=resumed)
    name = run_info()["args"]["run_name"]
    data = load(tmp_path)
    assert data.runs["run"].tolist() == [f"0/{name}"]
    reason = f"same settings as 0/{name}, which has durations"
    assert data.left_out == {f"1/{name}": reason, f"2/{name}": reason}
    (tmp_path / "0" / name / "run.json").unlink()
    assert load(tmp_path).left_out[f"1/{name}"] == f"same settings as 2/{name}, which is newer"


def write_program(folder, num_agents=3, seed=1, **changes):
    """What a ppo_*_vmap.py leaves: its own log, and in that folder a run for each agent."""
    info = run_info(seed=seed, **changes)
    name = info["args"]["run_name"]
    info["args"] |= {"num_agents": num_agents}
    rows = metrics_rows(info, np.full(12, 0.5), np.full(12, 20.0))
    path = write_run(folder, info, rows)
    for k in range(num_agents):
        own = info["args"] | {"seed": seed + k, "run_name": f"{name}-seed{seed + k}"}
        write_run(path, info | {"args": own, "agent": k}, rows)
    return path


def test_agents_of_one_program_are_runs_and_the_first_has_its_durations(tmp_path):
    path = write_program(tmp_path)
    data = load(tmp_path)
    assert data.runs["run"].tolist() == [f"{path.name}/{path.name}-seed{k}" for k in (1, 2, 3)]
    assert data.runs["agent"].tolist() == [0, 1, 2] and not data.left_out
    assert data.runs["num_agents"].tolist() == [3] * 3 and data.runs["seed"].tolist() == [1, 2, 3]
    for name in ("total", "startup", "steady"):
        assert data.runs[name].notna().tolist() == [True, False, False]
    assert data.runs["final_return"].tolist() == [20] * 3
    timed = data.iterations.dropna(subset=["time/iteration"])
    assert set(timed["run"]) == {data.runs["run"][0]} and len(data.iterations) == 36
    info = json.loads((path / f"{path.name}-seed2" / "run.json").read_text())
    for agent in (-1, 0.5, 7):  # a stranger's: never a second one with the program's durations
        (path / f"{path.name}-seed2" / "run.json").write_text(json.dumps(info | {"agent": agent}))
        assert load(tmp_path).runs["total"].notna().tolist() == [True, False, False]
    (path / "run.json").unlink()  # what the program has for itself is no run
    assert len(load(tmp_path).runs) == 3
    (path / f"{path.name}-seed2" / "run.json").unlink()
    assert list(load(tmp_path).left_out) == [path.name, f"{path.name}/{path.name}-seed2"]


def test_agents_are_never_mixed_with_runs_alone_or_of_programs_of_another_size(tmp_path):
    for num_agents in (1, 2):
        write_program(tmp_path / str(num_agents), num_agents)
    write_plain(tmp_path / "alone")
    data = load(tmp_path)
    assert len(data.runs) == 4 and data.runs["settings"].nunique() == 3 and not data.left_out


def test_of_agents_made_twice_the_one_with_durations_counts(tmp_path):
    """Seeds 1 to 3, and later 2 to 4: of seed 2, the second program's first agent has them."""
    for i, day in [(1, 2), (2, 1)]:  # the first program is the newer one
        write_program(tmp_path / str(i), seed=i, started=f"2026-01-0{day}T00:00:00+0000")
    runs = load(tmp_path).runs.set_index("seed")
    programs = runs["run"].str.partition("/")[0].to_dict()
    assert programs == {1: "1", 2: "2", 3: "1", 4: "2"}
    assert runs["total"].notna().to_dict() == {1: True, 2: True, 3: False, 4: False}


def test_runs_that_failed_are_named_from_the_drivers_log(tmp_path):
    folder = write_plain(tmp_path / "grid")
    events = [
        {"run": "killed", "completed": "no", "reason": "out of memory"},
        {"run": "unknown", "completed": "no"},
        {"run": folder.name, "completed": "no", "reason": "at first"},  # and then made again
        {"run": "fine", "completed": "yes"},
        *([], "text", {"completed": "no"}, {"run": {"a": 1}, "completed": "no"}),
    ]
    lines = [*map(json.dumps, events), '{"half a li', "[" * 5000]
    (tmp_path / "grid" / "benchmark.jsonl").write_text("\n".join(lines))
    (tmp_path / "benchmark.jsonl").mkdir()
    left_out = load(tmp_path).left_out
    assert left_out.pop("grid/{'a': 1}") == "it failed"
    assert left_out == {"grid/killed": "out of memory", "grid/unknown": "it failed"}


@pytest.mark.parametrize("content", ["nothing", "foreign", "missing", "several", "none"])
def test_a_source_without_runs_is_one_sentence(tmp_path, content):
    if content == "foreign":
        (tmp_path / "run.json").write_text("[1, 2]")
        (tmp_path / "metrics.jsonl").write_text("")
    sources = {"missing": tmp_path / "missing", "several": [tmp_path, tmp_path / "x"], "none": []}
    with pytest.raises(SourceError, match=r"no completed run|not a folder of runs") as error:
        load(sources.get(content, tmp_path))
    assert content == "none" or str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_the_tables_have_the_columns_of_the_schema_and_nothing_else(tmp_path):
    info = run_info(unknown=1)
    write_run(tmp_path, info, [row | {"unknown": 1} for row in plain_rows(info)])
    data = load(tmp_path)
    for table, columns in ((data.runs, RUNS), (data.iterations, ITERATIONS)):
        assert list(table) == [x.name for x in columns]
        assert len(set(table)) == len(columns)
        kinds = {x.name: schema.KINDS[x.kind].dtype for x in columns}
        assert {name: str(x) for name, x in table.dtypes.items()} == kinds


@pytest.mark.parametrize("columns", [RUNS, ITERATIONS])
def test_the_data_dictionary_is_a_table_in_markdown(columns):
    head, rule, *lines = schema.dictionary(columns).splitlines()
    assert (head.count("|"), rule) == (4, "|---|---|---|")
    assert len(lines) == len(columns)
    for line, column in zip(lines, columns, strict=True):
        empty, name, kind, meaning, end = line.split("|")
        assert (empty, end, kind) == ("", "", f" {column.kind} ")
        assert name.strip(" *") == f"`{column.name}`"
        assert ("**" in name) == (column.must == "table")
        assert len(meaning) > 5
        assert meaning.count("`") % 2 == 0


# === Several sources ============================================================================
def test_several_sources_are_one_table_with_unique_names(tmp_path):
    one, two = (write_plain(tmp_path / x, seed=i).name for i, x in enumerate("ab", 8))
    save(load(write_grid(tmp_path / "grid")), tmp_path / "study")
    sources = [f"{tmp_path}/a/", tmp_path / "b", str(tmp_path / "study")]
    data = load(sources)
    names = set(data.runs["run"])
    assert {f"{tmp_path}/a/{one}", f"{tmp_path}/b/{two}"} < names
    assert len(names) == len(data.runs) == 2 + 12
    assert set(data.iterations["run"]) == names
    assert_same(load([*sources, tmp_path / "a"]), data)  # which is there already


def test_a_source_within_another_counts_once(tmp_path):
    write_plain(tmp_path / "a")
    data = load([tmp_path, tmp_path / "a"])
    assert len(data.runs) == 1
    assert len(data.iterations) == 12
    assert list(data.left_out.values()) == ["its name is there twice: the first counts"]


def test_of_runs_made_twice_in_two_sources_the_newer_counts(tmp_path):
    write_plain(tmp_path / "b", started="2026-01-02T00:00:00Z")
    write_plain(tmp_path / "a", started="2026-01-01T00:00:00Z")
    save(load(tmp_path / "a"), tmp_path / "study")
    data = load([tmp_path / "b", tmp_path / "study"])
    assert data.runs["run"].str.startswith(f"{tmp_path}/b/").all()
    assert [x.rpartition(" ")[2] for x in data.left_out.values()] == ["newer"]


def test_a_folder_may_hold_runs_and_studies(tmp_path):
    write_grid(tmp_path / "runs", envs=("CartPole-v1",), repeats=1)
    (tmp_path / "other" / "broken").mkdir(parents=True)
    (tmp_path / "other" / "broken" / "metrics.jsonl").touch()
    write_plain(tmp_path / "other", seed=8)
    save(load(tmp_path / "other"), tmp_path / "deep" / "study")
    shutil.rmtree(tmp_path / "other")
    data = load(tmp_path)
    assert len(data.runs) == 4
    assert data.runs["run"].str.startswith("deep/study/CartPole").sum() == 1
    assert len(data.iterations) == 4 * 12
    assert list(data.left_out) == ["deep/study/broken"]


# === Whatever a file may hold ===================================================================
VALUES = [
    *("null", '""', "[]", "{}", "true", "-1", "0", "0.5", "1e-300", "1e308", "1e400", "NaN"),
    *("-Infinity", "1" + "0" * 400, "1" + "0" * 5000, '"x"', "[1]", "[[]]", '{"a": 1}'),
    *("[" * 900 + "]" * 900, "[" * 3000 + "]" * 3000, json.dumps(HOSTILE)),
]


def places(value, path=()):
    """Yield the path of every value within a value, itself included."""
    yield path
    pairs = {dict: lambda: value.items(), list: lambda: enumerate(value)}.get(type(value), list)()
    for name, part in pairs:
        yield from places(part, (*path, name))


def replaced(value, path):
    """Return a JSON text of value in which "%" stands for the value at path."""
    if not path:
        return "%"
    value = copy.deepcopy(value)
    target = value
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = "%"
    return json.dumps(value).replace('"%"', "%")


def test_whatever_a_value_of_a_run_is_it_is_a_row_or_a_reason(tmp_path):
    info = run_info(sync=True, repeat=1, python="3.11")
    rows = plain_rows(info)
    info |= results(rows)
    info["durations"]["process"] = 11.0
    texts = {f"run.json {path}": replaced(info, path) for path in places(info)}
    lines = {f"metrics {path}": replaced(rows[5], path) for path in places(rows[5])}
    written = 0
    for name, text in [*texts.items(), *lines.items()]:
        for i, value in enumerate(VALUES):
            folder = tmp_path / f"{name} {i}".replace("/", " ")
            folder.mkdir()
            written += 1
            metrics = [json.dumps(row) for row in rows]
            if name in lines:
                metrics[5] = text.replace("%", value)
            (folder / "metrics.jsonl").write_text("\n".join(metrics))
            good = text.replace("%", value) if name in texts else json.dumps(info)
            (folder / "run.json").write_text(good)
    data = load(tmp_path)
    assert len(data.runs) > 20
    assert len(data.runs) + len(data.left_out) == written
    assert all(0 < len(x) < 300 and x.isprintable() for x in data.left_out.values())
    save(data, tmp_path / "study")
    assert_same(load(tmp_path / "study"), data)


def test_text_from_strangers_is_clean_once_loaded(tmp_path):
    info: dict[str, Any] = run_info() | dict(
        **dict.fromkeys(("script", "framework", "compile_mode", "started"), HOSTILE),
        **dict.fromkeys(("device", "gpu", "driver", "cpu", "os", "python", "git_commit"), HOSTILE),
        versions={"jax": HOSTILE, HOSTILE: "1"},
    )
    info["args"] |= {"env_id": HOSTILE, "notes": HOSTILE, HOSTILE: HOSTILE, "run_name": "x"}
    folder = os.fsencode(tmp_path) + b"/<b>\xff\x1b[31m\n"
    rows = [row | {HOSTILE: HOSTILE} for row in plain_rows(info)]
    os.rename(write_run(tmp_path, info, rows), folder)
    os.mkdir(folder + b"broken")
    open(folder + b"broken/metrics.jsonl", "w").close()
    data = load(tmp_path)
    text = data.runs.select_dtypes("str")
    assert text.map(lambda x: x.isprintable() and len(x) <= schema.MOST_TEXT).all(axis=None)
    assert set(data.iterations["run"]) == set(data.runs["run"])
    assert all(x.isprintable() for pair in data.left_out.items() for x in pair)
    save(data, tmp_path / "study")
    assert_same(load(tmp_path / "study"), data)
    os.rename(tmp_path / "study", folder + b"study")
    names = load([os.fsdecode(folder), os.fsdecode(folder + b"study")]).runs["run"]
    assert [x.isprintable() for x in names] == [True]
    with pytest.raises(SourceError) as error:
        load(os.fsdecode(folder + b"broken"))
    assert str(error.value).isprintable()


def test_runs_whose_names_look_the_same_are_not_mixed_up(tmp_path):
    os.rename(write_plain(tmp_path, seed=1), tmp_path / "a\x01")
    os.rename(write_plain(tmp_path, seed=2), tmp_path / "a\x02")
    data = load(tmp_path)
    assert data.runs["seed"].tolist() == [1]
    assert len(data.iterations) == 12
    assert list(data.left_out.values()) == ["its name is there twice: the first counts"]


@pytest.mark.parametrize("file", ["run.json", "metrics.jsonl"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling", "bytes", "deep"])
def test_what_is_no_good_file_is_a_reason(tmp_path, file, kind):
    path = write_plain(tmp_path / "bad") / file
    path.unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)  # reading it would wait for ever
        case "dangling":
            path.symlink_to(tmp_path / "nowhere")
        case "bytes":
            path.write_bytes(b'{"\xff": 1}')
        case "deep":
            path.write_text("[" * 100_000)
    write_plain(tmp_path / "good")
    data = load(tmp_path)
    assert data.runs["run"].str.startswith("good/").all()
    [reason] = data.left_out.values()
    assert file in reason


# === Studies ====================================================================================
TEXTS = ["None", "NA", "nan", "null", "1e5", "007", "True", " ", "ä中😀", 'a,"b";c', "a\nb\rc", "#"]


def write_texts(folder):
    """Write a run for each text that a CSV file might take for something else."""
    for i, text in enumerate(TEXTS):
        info = run_info(seed=i, git_commit=text, cpu=text, os=text, device=text, python=text)
        info["args"] |= {"run_name": f"run {i}", "env_id": text}
        write_run(folder, info, plain_rows(info))


def test_a_study_is_the_same_tables_to_the_last_bit(tmp_path):
    write_grid(tmp_path / "runs", sync=True)
    write_plain(tmp_path / "runs" / "resumed", resumed=[3], seed=9)
    write_texts(tmp_path / "runs")
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "metrics.jsonl").touch()
    data = load(tmp_path / "runs")
    assert list(data.left_out) == ["broken"]
    cleaned = {x.replace("\n", "\ufffd").replace("\r", "\ufffd") for x in TEXTS}
    assert cleaned < set(data.runs["env_id"])
    save(data, tmp_path / "1")
    once = load(tmp_path / "1")
    assert_same(once, data)
    assert_same(load(tmp_path / "1" / "runs.csv"), data)
    save(once, tmp_path / "2")
    assert_same(load(tmp_path / "2"), data)
    names = ["about.json", "iterations.parquet", "runs.csv"]
    assert sorted(x.name for x in (tmp_path / "1").iterdir()) == names
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_a_study_is_a_line_a_run_in_the_order_of_their_names(tmp_path):
    data = load(write_grid(tmp_path / "runs"))
    save(data, tmp_path / "study")
    head, *lines = (tmp_path / "study" / "runs.csv").read_text().splitlines()
    assert head == ",".join(x.name for x in RUNS)
    assert [x.partition(",")[0] for x in lines] == sorted(data.runs["run"])
    assert b"\r" not in (tmp_path / "study" / "runs.csv").read_bytes()
    write_plain(tmp_path / "runs", mode="nnx none", seed=7)
    save(load(tmp_path / "runs"), tmp_path / "study")
    _, *more = (tmp_path / "study" / "runs.csv").read_text().splitlines()
    assert len(set(more) - set(lines)) == 1
    assert [x for x in more if x in lines] == lines


def test_a_study_that_is_written_again_keeps_nothing_of_the_old_one(tmp_path):
    data = load(write_grid(tmp_path / "runs"))
    save(data._replace(left_out={"x": "y"}, notes=("z",)), tmp_path / "study")
    again = load(tmp_path / "study")
    assert (again.left_out, again.notes) == ({"x": "y"}, ("z",))
    save(data, tmp_path / "study")
    assert_same(load(tmp_path / "study"), data)


ABOUTS = ["", "[]", "5", '{"left_out": {}}', '{"left_out": [], "notes": []}', "[" * 5000]


@pytest.mark.parametrize("about", [*ABOUTS, '{"left_out": {}, "notes": 5}'])
def test_a_study_whose_about_is_damaged_is_one_sentence(tmp_path, about):
    save(load(write_grid(tmp_path / "runs")), tmp_path / "study")
    (tmp_path / "study" / "about.json").write_text(about)
    with pytest.raises(SourceError, match=r"about.json is not JSON"):
        load(tmp_path / "study")


def test_a_cache_is_a_study_that_is_read_instead_of_the_source(tmp_path):
    data = load(write_grid(tmp_path / "runs"), cache=tmp_path / "cache")
    shutil.rmtree(tmp_path / "runs")
    assert_same(load(tmp_path / "runs", cache=tmp_path / "cache"), data)
    assert_same(load(tmp_path / "cache"), data)
    pd.testing.assert_frame_equal(load_runs(tmp_path, cache=str(tmp_path / "cache")), data.runs)
    assert set(load_iterations(tmp_path, cache=tmp_path / "cache")["run"]) == set(data.runs["run"])


def test_a_cache_that_was_not_written_whole_is_not_read(tmp_path, monkeypatch):
    source = write_grid(tmp_path / "runs")
    with monkeypatch.context() as patch:
        patch.setattr(pd.DataFrame, "to_csv", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            load(source, cache=tmp_path / "cache")
    assert_same(load(source, cache=tmp_path / "cache"), load(source))


# === Weights & Biases ===========================================================================
@pytest.fixture
def server(monkeypatch, tmp_path):
    """A W&B server to which the environment points, with a key."""
    server = WandbServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()


LOG_AND_RESUME = """
import wandb
info, results, *parts = json.load(open(sys.argv[1]))
for resumed, rows in parts:
    info["resumed"], folder = resumed, Path(sys.argv[2], str(len(rows)))
    folder.mkdir()
    names = {"entity": "team", "project": "project", "id": "run"}
    with wandb.init(**names, config=info, resume="allow", dir=folder) as run:
        for row in rows:
            run.log(row, step=row["iteration"])
        if rows[-1]["iteration"] == 11:
            run.summary.update(results)
"""


def in_new_process(code, *arguments):
    """Run code as a program: W&B's client keeps the first server that it meets."""
    code = f"import json, sys\nfrom pathlib import Path\nfrom analysis.runs import *\n{code}"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wandb_gives_pages_of_runs_and_their_histories(server, tmp_path):
    for seed in range(110):
        info = run_info(seed=seed, sync=seed == 0)
        rows = plain_rows(info)
        if seed == 1:  # no episode ended
            rows = metrics_rows(info, np.arange(1, 13) / 10, np.full(12, np.nan))
        server.add(f"run{seed}", info, results(rows), rows)
    server.runs["run5"] |= {"summary": "{}", "state": "crashed"}
    server.runs["run6"]["summary"] = '{"durations": 5}'
    server.runs["run7"]["config"] = "{}"
    server.runs["run8"]["history"] = [json.dumps({"iteration": [], "_step": i}) for i in range(12)]
    code = "data = load('wandb:team/project'); print(data.left_out); save(data, sys.argv[1])"
    out = in_new_process(code, tmp_path / "study")
    for words in ("(run5)': 'no results; W&B calls it crashed", "run6': 'not a run of this"):
        assert words in out
    for words in ("run7': 'not a run of this benchmark", "run8': '1 iterations instead of 12"):
        assert words in out
    runs = load(tmp_path / "study").runs.set_index("run")
    assert len(runs) == 106
    assert runs.loc["run0", "rollout_early"] == pytest.approx(0.75 * 0.5)
    assert runs["steady"].to_numpy() == pytest.approx(1.05)
    assert np.isnan(runs.loc["run1", "final_return"])
    assert server.queries.count("Runs") == 2


def test_of_what_a_resumed_wandb_run_logged_twice_the_later_counts(server, tmp_path):
    """Offline, W&B's client does not know what was logged before, so `wandb sync` sends it all."""
    info = run_info()
    rows = plain_rows(info)
    killed = [row | {"charts/episodic_return": -1.0} for row in rows[4:7]]
    parts = [([], rows[:4] + killed), ([4], rows[4:])]
    (tmp_path / "run.json").write_text(json.dumps([info, results(rows), *parts]))
    in_new_process(LOG_AND_RESUME, tmp_path / "run.json", tmp_path)
    for folder in sorted(tmp_path.glob("*/wandb/offline-run-*")):  # 7 and then 8 iterations
        sync = [sys.executable, "-m", "wandb", "sync", folder]
        subprocess.run(sync, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    assert len(server.run("run")["history"]) == 15
    in_new_process("save(load('wandb:team/project'), sys.argv[1])", tmp_path / "study")
    data = load(tmp_path / "study")
    assert data.runs["resumed"].all()
    assert data.iterations["iteration"].tolist() == list(range(12))
    assert data.iterations["charts/episodic_return"].tolist() == [10.0 * i for i in range(12)]


def test_a_real_offline_run_is_the_same_from_wandb_as_from_its_folder(server, tmp_path):
    command = [sys.executable, "ppo_linen.py", "--track", "--runs-dir", tmp_path / "runs"]
    command += ["--run-name", "real", "--env-id", "MountainCar-v0", "--sync-for-timing"]
    command += ["--num-envs", "4", "--num-steps", "8", "--total-timesteps", "320"]
    command += ["--num-minibatches", "1", "--update-epochs", "1"]
    offline = os.environ | {"WANDB_MODE": "offline"}
    subprocess.run(command, cwd=ROOT, env=offline, check=True, capture_output=True, timeout=120)
    [folder] = (tmp_path / "runs" / "real" / "wandb").glob("offline-run-*")
    sync = [sys.executable, "-m", "wandb", "sync", folder]
    subprocess.run(sync, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    in_new_process("load('wandb:team/project', cache=sys.argv[1])", tmp_path / "cache")
    ours, theirs = load(tmp_path / "runs"), load(tmp_path / "cache")
    runs, iterations = ours.runs.drop(columns=["run", "source"]), ours.iterations
    pd.testing.assert_frame_equal(runs, theirs.runs[list(runs)], check_exact=True)
    pd.testing.assert_frame_equal(
        iterations.drop(columns="run"), theirs.iterations.drop(columns="run"), check_exact=True
    )
    assert (ours.runs[["python", "jax", "flax", "optax", "gymnax", "numpy"]] != "").all(axis=None)


def test_wandb_without_key_project_or_good_name_is_one_sentence(server, tmp_path):
    def report(source, **changes):
        command = [sys.executable, "-m", "analysis.report", source, "--out", str(tmp_path)]
        env = {**os.environ, "HOME": str(tmp_path), **changes}
        env = {name: x for name, x in env.items() if x}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    assert "Could not find project nowhere" in report("wandb:team/nowhere")
    assert "API key" in report("wandb:team/project", WANDB_API_KEY="")
    for name in ("project", "a/b/c", "", "a/"):
        with pytest.raises(SourceError, match=f"wandb:entity/project, not wandb:{name}$"):
            load(f"wandb:{name}")


def test_wandb_never_asks_for_a_key_on_a_terminal(tmp_path):
    """Without a key its client would prompt there, and wait for ever."""
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "analysis.report", "wandb:team/project"]
    env = {**os.environ, "HOME": str(tmp_path), "TERM": "xterm"}
    env = {name: x for name, x in env.items() if not name.startswith("WANDB")}
    done = subprocess.run(command, cwd=ROOT, env=env, timeout=60, stdin=end, stdout=end, stderr=end)
    os.close(end)
    assert done.returncode == 2
    assert "No API key" in os.read(terminal, 10_000).decode()
    os.close(terminal)


# === What a hostile run may try =================================================================
@pytest.mark.parametrize("name", ["other", 5, [1], None])
def test_a_run_cannot_speak_for_another(tmp_path, name):
    info = run_info()
    rows = plain_rows(info)
    write_run(tmp_path / "other", info, rows)
    mine = run_info(seed=2)
    name = f"other/{info['args']['run_name']}" if name == "other" else name
    write_run(tmp_path / "a", mine, [row | {"run": name} for row in plain_rows(mine)])
    data = load(tmp_path)
    counts = data.iterations.groupby("run").size()
    assert sorted(counts.index) == sorted(data.runs["run"])
    assert set(counts) == {12}


def test_a_link_to_nowhere_is_one_sentence(tmp_path):
    (tmp_path / "runs.csv").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SourceError, match="it is not there, or not a file"):
        load(tmp_path)


def test_a_study_whose_disk_is_full_keeps_what_it_had(tmp_path, monkeypatch):
    data = load(write_grid(tmp_path / "runs", repeats=1))
    save(data, tmp_path / "study")

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_csv", full)
    with pytest.raises(OSError, match="No space"):
        save(data._replace(iterations=data.iterations.head(3)), tmp_path / "study")
    assert_same(load(tmp_path / "study"), data._replace(runs=data.runs))


def test_a_study_holds_no_formula_and_loses_no_text(tmp_path):
    for i, text in enumerate(("=1+1", "'=1", "@x", "-1", "+a", "a=b", "'a")):
        write_plain(tmp_path / "runs" / str(i), env_id=text)
    data = load(tmp_path / "runs")
    save(data, tmp_path / "study")
    with (tmp_path / "study" / "runs.csv").open(newline="") as file:
        cells = [row["env_id"] for row in csv.DictReader(file)]
    assert not [x for x in cells if x[0] in "=+@-"]
    assert_same(load(tmp_path / "study"), data)

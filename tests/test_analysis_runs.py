"""Runs load into one table from folders, studies and W&B; what is broken or double is named."""

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
from fake_runs import (
    MODES,
    metrics_rows,
    plain_rows,
    results,
    run_info,
    write_grid,
    write_plain,
    write_run,
)
from wandb_server import WandbServer

from analysis import schema
from analysis.runs import load, save
from analysis.schema import ITERATIONS, RUNS, SourceError

HOSTILE = "<script>\ud800\x1b[31m\r\n\0\u202e../../x|$^_`" + "x" * 100_000


def assert_same(data, other):
    """Assert that two loads gave the same to the last bit."""
    pd.testing.assert_frame_equal(data.runs, other.runs, check_exact=True)
    pd.testing.assert_frame_equal(data.iterations, other.iterations, check_exact=True)
    assert data.left_out == other.left_out
    assert data.notes == other.notes


# === One run ====================================================================================
def test_a_run_becomes_a_row_with_the_columns_of_the_schema(tmp_path):
    info = run_info(sync=True, seed=3, python="3.11.7", unknown=1)
    rows = [row | {"unknown": 1} for row in plain_rows(info)]
    rows[3]["losses/entropy"] = float("nan")  # not JSON
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


def test_a_mode_is_the_script_and_the_flag_that_it_ran_with(tmp_path):
    for mode in MODES:
        write_plain(tmp_path, mode=mode)
    write_plain(tmp_path / "two", side_by_side=2)
    flags = {"vectorization": "async", "compile": True, "threads": 0}
    write_plain(tmp_path / "flags", args=run_info()["args"] | flags)
    assert sorted(load(tmp_path).runs["mode"]) == [
        *("ppo_linen", "ppo_linen --no-jit", "ppo_linen --vectorization async --compile"),
        *("ppo_linen, 2 side by side", "ppo_nnx", "ppo_nnx --no-jit", "ppo_nnx_cached"),
        *("ppo_torch", "ppo_torch --no-jit-env", "ppo_torch_compile"),
    ]


def test_a_resumed_run_counts_for_learning_and_has_no_durations(tmp_path):
    write_plain(tmp_path / "a", sync=True, resumed=[4, 9])
    write_plain(tmp_path / "b", sync=True, seed=2)
    data = load(tmp_path)
    row, other = (row for _, row in data.runs.iterrows())
    assert (row["resumed"], row["final_return"]) == (True, 110)
    durations = [x.name for x in RUNS if x.kind == "seconds"]
    assert row[durations].isna().all()
    assert other[durations].notna().all()
    iterations = data.iterations[data.iterations["run"] == row["run"]]
    assert iterations.filter(regex="time/|SPS").isna().to_numpy().all()
    assert iterations["charts/episodic_return"].tolist() == [10.0 * i for i in range(12)]


def test_gpu_driver_machine_and_wsl2_are_platforms_of_their_own(tmp_path):
    gpu: dict[str, Any] = {"device": "H200", "gpu": "H200"}
    write_plain(tmp_path / "1")
    write_plain(tmp_path / "2", **gpu, driver="1", machine="3fa9")
    write_plain(tmp_path / "3", **gpu, driver="2")
    write_plain(tmp_path / "4", **gpu, driver="1", os="Linux-6.6-Microsoft-standard-WSL2-x86_64")
    write_plain(tmp_path / "5", cpu=None, os="macOS-26-arm64", cores=None)  # without benchmark.sh
    assert load(tmp_path).runs["platform"].tolist() == [
        "Linux, Fast, 2 cores",
        "Linux, H200, driver 1, Fast, 2 cores, machine 3fa9",
        "Linux, H200, driver 2, Fast, 2 cores",
        "WSL2, H200, driver 1, Fast, 2 cores",
        "macOS, unknown processor",
    ]


def test_a_copy_under_a_name_of_its_own_is_of_the_same_algorithm(tmp_path):
    for name, telling in (("a", "clip_coef"), ("b", "target_network_frequency"), ("c", "other")):
        args = run_info()["args"] | {"run_name": name, telling: 1}
        write_plain(tmp_path, script="mine", args=args)
    data = load(tmp_path)
    assert data.runs["algorithm"].tolist() == ["ppo", "dqn", ""]
    assert set(data.runs["mode"]) == {"mine"}


# === What is broken =============================================================================
def test_what_is_broken_or_partial_is_left_out_by_name(tmp_path):
    grid = write_grid(tmp_path, envs=("CartPole-v1",), repeats=5, modes=("linen jit",))
    names = [f"CartPole-v1__linen_jit__small__{seed}" for seed in range(1, 6)]
    (grid / names[0] / "run.json").unlink()  # killed
    (grid / names[1] / "run.json").write_text('{"args": ')  # torn
    (grid / names[2] / "run.json").write_text('{"hello": "world"}')  # foreign
    lines = (grid / names[3] / "metrics.jsonl").read_text().splitlines()
    (grid / names[3] / "metrics.jsonl").write_text("\n".join(lines[:-1]))  # one line short
    data = load(grid)
    assert set(data.runs["run"]) == set(data.iterations["run"]) == {names[4]}
    assert list(data.left_out) == names[:4]
    words = ("killed", "not JSON", "not a run", "11 iterations instead of 12")
    for name, part in zip(names, words, strict=False):
        assert part in data.left_out[name]


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (("status",), "running", "status is running"),
        (("args", "num_envs"), 0, "not a run of this benchmark: ZeroDivisionError"),
        (("args", "env_id"), "", "env_id is missing"),
        (("cores",), "many", "cores is 'many', not a number"),
        (("durations",), None, "not a run of this benchmark: "),
        ((9, "time/iteration"), 0, "iteration 9: time/iteration is 0, not a number above"),
        ((11, "losses/entropy"), "x", "iteration 11: losses/entropy is 'x', not a number"),
        ((3, "iteration"), 2, "12 iterations instead of 12, from 0 on"),
    ],
)
def test_a_damaged_run_is_left_out_for_one_readable_reason(tmp_path, place, value, reason):
    rows = plain_rows(run_info())
    info = run_info(seed=2) | results(rows)
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


@pytest.mark.parametrize("file", ["run.json", "metrics.jsonl", "evaluation.json"])
@pytest.mark.parametrize("kind", ["pipe", "endless", "bytes", "deep"])
def test_what_is_no_good_file_is_a_reason_and_never_hangs(tmp_path, file, kind):
    path = write_plain(tmp_path / "bad", seed=2) / file
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)  # reading it would wait for ever
        case "endless":
            path.symlink_to("/dev/zero")
        case "bytes":
            path.write_bytes(b'{"\xff": 1}')
        case "deep":
            path.write_text("[" * 100_000)
    write_plain(tmp_path / "good")
    data = load(tmp_path)
    if file == "evaluation.json":  # without which a run is one all the same
        assert data.runs["greedy_return"].isna().tolist() == [True, True]
    else:
        assert data.runs["seed"].tolist() == [1]
        [reason] = data.left_out.values()
        assert file in reason


def test_text_from_strangers_is_clean_once_loaded_and_speaks_for_nobody_else(tmp_path):
    info: dict[str, Any] = run_info() | dict(
        **dict.fromkeys(("script", "framework", "compile_mode", "started"), HOSTILE),
        **dict.fromkeys(("device", "gpu", "driver", "cpu", "os", "python", "git_commit"), HOSTILE),
        versions={"jax": HOSTILE, HOSTILE: "1"},
    )
    info["args"] |= {"env_id": HOSTILE, "notes": HOSTILE, HOSTILE: HOSTILE, "run_name": "x"}
    folder = os.fsencode(tmp_path) + b"/<b>\xff\x1b[31m\n"
    good = write_plain(tmp_path)
    rows = [row | {HOSTILE: HOSTILE, "run": good.name} for row in plain_rows(info)]
    os.rename(write_run(tmp_path, info, rows), folder)
    data = load(tmp_path)
    text = data.runs.select_dtypes("str")
    assert text.map(lambda x: x.isprintable() and len(x) <= schema.MOST_TEXT).all(axis=None)
    counts = data.iterations.groupby("run").size().to_dict()
    assert counts == dict.fromkeys(data.runs["run"], 12)


def test_runs_that_failed_are_named_from_the_drivers_log(tmp_path):
    folder = write_plain(tmp_path / "grid")
    events = [{"run": "killed", "completed": "no", "reason": "out of memory"}]
    events += [{"run": "fine", "completed": "yes"}]
    events += [{"run": folder.name, "completed": "no", "reason": "at first"}]  # and made again
    lines = [*map(json.dumps, events), '{"half a li']
    (tmp_path / "grid" / "benchmark.jsonl").write_text("\n".join(lines))
    os.mkfifo(tmp_path / "benchmark.jsonl")  # which nobody reads
    assert load(tmp_path).left_out == {"grid/killed": "out of memory"}


# === Made twice =================================================================================
def test_of_runs_made_twice_the_newest_whole_one_counts(tmp_path):
    """Also at another commit or version: a seed that was run again is no second observation."""
    late = "2026-01-31T22:00:00-0200"  # half an hour after the next
    new = write_plain(tmp_path / "a", started=late, git_commit="b" * 40, versions={"jax": "0.11"})
    old = write_plain(tmp_path / "b", started="2026-01-31T23:30:00+0000")
    stopped = write_plain(tmp_path / "c", started="2026-02-01T00:00:00+0000", resumed=[3])
    data = load(tmp_path)
    assert data.runs["run"].tolist() == [f"a/{new.name}"]
    reason = f"made again as a/{new.name}, which counts"
    assert data.left_out == {f"b/{old.name}": reason, f"c/{stopped.name}": reason}


def test_runs_that_differ_in_what_they_did_are_all_kept(tmp_path):
    args = run_info()["args"]
    write_plain(tmp_path / "plain")
    write_plain(tmp_path / "seed", seed=2)
    write_plain(tmp_path / "synced", sync=True)
    write_plain(tmp_path / "longer", args=args | {"total_timesteps": 12 * 8192 + 1})  # as long
    write_plain(tmp_path / "cores", cores=4)
    write_plain(tmp_path / "rate", args=args | {"learning_rate": 1e-3})
    data = load(tmp_path)
    assert len(data.runs) == 5
    assert len(data.left_out) == 1


# === Programs of many agents ====================================================================
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
    assert data.runs["agent"].tolist() == [0, 1, 2]
    assert not data.left_out
    for name in ("total", "startup", "steady"):
        assert data.runs[name].notna().tolist() == [True, False, False]
    assert data.runs["final_return"].tolist() == [20] * 3
    timed = data.iterations.dropna(subset=["time/iteration"])
    assert set(timed["run"]) == {data.runs["run"][0]}


def test_agents_are_never_mixed_with_runs_alone_and_of_two_programs_the_timed_one_counts(tmp_path):
    write_program(tmp_path / "1", num_agents=1)
    write_plain(tmp_path / "alone")
    for i, day in ((1, 2), (2, 1)):  # seeds 1 to 3, and made before, 2 to 4
        write_program(tmp_path / f"three{i}", seed=i, started=f"2026-01-0{day}T00:00:00+0000")
    data = load(tmp_path)
    assert data.runs["settings"].nunique() == 3
    runs = data.runs[data.runs["num_agents"] == 3].set_index("seed")
    assert runs["run"].str[5].to_dict() == {1: "1", 2: "2", 3: "1", 4: "2"}
    assert runs["total"].notna().to_dict() == {1: True, 2: True, 3: False, 4: False}


# === Several sources ============================================================================
@pytest.mark.parametrize("content", ["nothing", "foreign", "missing", "several"])
def test_a_source_without_runs_is_one_sentence(tmp_path, content):
    if content == "foreign":
        (tmp_path / "run.json").write_text("[1, 2]")
        (tmp_path / "metrics.jsonl").write_text("")
    sources = {"missing": tmp_path / "missing", "several": [tmp_path, tmp_path / "x"]}
    with pytest.raises(SourceError, match=r"no completed run|not a folder of runs") as error:
        load(sources.get(content, tmp_path))
    assert "\n" not in str(error.value)


def test_several_sources_are_one_table_in_which_each_run_counts_once(tmp_path):
    one, two = (write_plain(tmp_path / x, seed=i).name for i, x in enumerate("ab", 8))
    write_plain(tmp_path / "c", started="2025-01-01T00:00:00Z", seed=8)
    save(load(write_grid(tmp_path / "grid")), tmp_path / "study")
    save(load(tmp_path / "c"), tmp_path / "older")
    sources = [f"{tmp_path}/a/", tmp_path / "b", str(tmp_path / "study")]
    data = load(sources)
    names = set(data.runs["run"])
    assert {f"{tmp_path}/a/{one}", f"{tmp_path}/b/{two}"} < names
    assert len(names) == len(data.runs) == 2 + 12
    assert set(data.iterations["run"]) == names
    assert_same(load([*sources, tmp_path / "a"]), data)  # which is there already
    more = load([*sources, tmp_path / "older"])
    assert set(more.runs["run"]) == names
    assert list(more.left_out.values()) == [f"made again as {tmp_path}/a/{one}, which counts"]


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


def test_a_study_is_the_same_tables_to_the_last_bit(tmp_path):
    write_grid(tmp_path / "runs", sync=True)
    write_plain(tmp_path / "runs" / "resumed", resumed=[3], seed=9)
    texts = [
        "None",
        "NA",
        "nan",
        "1e5",
        "007",
        "True",
        " ",
        "ä中😀",
        'a,"b";c',
        "a\nb\rc",
        "=1",
        "'a",
    ]
    for i, text in enumerate(texts):
        info = run_info(seed=i, git_commit=text, cpu=text, os=text, device=text, python=text)
        info["args"] |= {"run_name": f"run {i}", "env_id": text}
        write_run(tmp_path / "runs", info, plain_rows(info))
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "metrics.jsonl").touch()
    data = load(tmp_path / "runs")
    assert set(data.runs["env_id"]) > {
        x.replace("\n", "\ufffd").replace("\r", "\ufffd") for x in texts
    }
    save(data, tmp_path / "1")
    once = load(tmp_path / "1")
    assert_same(once, data)
    save(once, tmp_path / "2")
    for name in ("about.json", "iterations.parquet", "runs.csv"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


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


def from_wandb(folder):
    """Load a project as a program, since W&B's client keeps the first server that it meets."""
    code = "import sys\nfrom analysis.runs import load, save\n"
    code += "save(load('wandb:team/project'), sys.argv[1])"
    command = [sys.executable, "-c", code, folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return load(folder)


def test_wandb_gives_pages_of_runs_and_their_histories(server, tmp_path):
    for seed in range(110):
        info = run_info(seed=seed, sync=seed == 0)
        rows = plain_rows(info)
        if seed == 1:  # no episode ended
            rows = metrics_rows(info, np.arange(1, 13) / 10, np.full(12, np.nan))
        server.add(f"run{seed}", info, results(rows), rows)
    lines = [json.loads(x) for x in server.runs["run4"]["history"]]
    killed = [row | {"charts/episodic_return": -1.0} for row in lines[4:7]]  # and made again
    lines = [row | {"_step": i} for i, row in enumerate(lines[:4] + killed + lines[4:])]
    server.runs["run4"]["history"] = [json.dumps(row) for row in lines]
    server.runs["run5"] |= {"summary": "{}", "state": "crashed"}
    server.runs["run7"]["config"] = "{}"
    data = from_wandb(tmp_path / "study")
    named = [f"{server.runs['run5']['name']} (run5)", "run7"]
    assert sorted(data.left_out) == named
    assert data.left_out[named[0]] == "no results; W&B calls it crashed"
    assert "not a run of this benchmark" in data.left_out["run7"]
    runs = data.runs.set_index("run")
    assert len(runs) == 108
    assert runs.loc["run0", "rollout_steady"] == pytest.approx(0.75 * 1.05)
    assert runs["steady"].to_numpy() == pytest.approx(1.05)
    assert np.isnan(runs.loc["run1", "final_return"])
    resumed = data.iterations[data.iterations["run"] == "run4"]
    assert resumed["charts/episodic_return"].tolist() == [10.0 * i for i in range(12)]
    assert server.queries.count("Runs") == 2


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
    ours, theirs = load(tmp_path / "runs"), from_wandb(tmp_path / "study")
    runs, iterations = ours.runs.drop(columns=["run", "source"]), ours.iterations
    pd.testing.assert_frame_equal(runs, theirs.runs[list(runs)], check_exact=True)
    pd.testing.assert_frame_equal(
        iterations.drop(columns="run"), theirs.iterations.drop(columns="run"), check_exact=True
    )
    assert (ours.runs[["python", "jax", "flax", "optax", "gymnax", "numpy"]] != "").all(axis=None)


def test_wandb_without_key_or_good_name_is_one_sentence(server, tmp_path):
    """On a terminal, too, where its client would ask for a key and wait for ever."""
    terminal, end = pty.openpty()
    env = os.environ | {"HOME": str(tmp_path), "TERM": "xterm"}
    del env["WANDB_API_KEY"]
    command = [sys.executable, "-m", "analysis", "report", "wandb:team/project"]
    done = subprocess.run(command, cwd=ROOT, env=env, stdin=end, stdout=end, stderr=end, timeout=60)
    assert done.returncode == 2
    text = os.read(terminal, 10_000).decode()
    assert text.count("\n") == 1 and "API key" in text, text
    os.close(end)
    os.close(terminal)
    for name in ("project", "a/b/c", "a/"):
        with pytest.raises(SourceError, match=f"wandb:entity/project, not wandb:{name}$"):
            load(f"wandb:{name}")

"""Runs load into one table from folders, saved tables and W&B; what is broken is named."""

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
from fake_runs import metrics_rows, results, run_info, write_grid, write_run
from wandb_server import WandbServer

from analysis.runs import SourceError, load, load_iterations, load_runs, save


def plain_rows(info, iterations=12):
    return metrics_rows(info, np.arange(1, iterations + 1) / 10, np.arange(iterations) * 10.0)


# === Folders ====================================================================================
def test_a_run_becomes_a_row(tmp_path):
    info = run_info(sync=True, seed=3)
    write_run(tmp_path, info, plain_rows(info))
    runs = load_runs(tmp_path)
    row = runs.iloc[0]
    assert len(runs) == 1
    assert (row["mode"], row["size"], row["repeat"], row["seed"]) == ("linen jit", "small", 3, 3)
    assert row["script"] == "ppo_linen"
    assert row["platform"] == "Linux, Fast, 2 cores"
    assert row["sync"]
    assert row["startup"] == pytest.approx(2.0 + 1.0 + 0.1)
    assert row["first"] == pytest.approx(0.1)
    assert row["early"] == pytest.approx(0.5)  # the mean of 0.2 to 0.8
    assert row["steady"] == pytest.approx(1.05)  # the mean of 0.9 to 1.2
    assert row["rollout_early"] == pytest.approx(0.75 * 0.5)
    assert row["update_steady"] == pytest.approx(0.25 * 1.05)
    assert row["sps"] == pytest.approx(8192 / 1.05)
    assert row["setup"] == pytest.approx(1.0)
    assert (row["final_return"], row["best_return"]) == (110, 110)
    assert not row["resumed"]
    assert row["jax"] == "0.10.2"


def test_old_and_new_runs_are_the_same_row(tmp_path):
    info = run_info(sync=True)
    rows = metrics_rows(info, np.arange(1, 13) / 7, np.array([*range(10), 5.0, np.nan]))
    write_run(tmp_path / "old", info, rows, old=True)
    write_run(tmp_path / "new", info, rows)
    old, new = (load_runs(tmp_path / x).iloc[0] for x in ("old", "new"))
    own = ["source", "saving"]
    pd.testing.assert_series_equal(old.drop(own), new.drop(own), check_exact=True)
    assert (np.isnan(old["saving"]), new["saving"]) == (True, 0.1)
    durations = json.loads((tmp_path / "old" / old["run"] / "run.json").read_text())["durations"]
    for window in ("first", "early", "steady"):
        assert old[window] == pytest.approx(durations[f"{window}_iteration"], rel=1e-12)
    assert (old["final_return"], old["best_return"]) == (5, 9)


def test_a_resumed_run_counts_for_learning_and_has_no_durations(tmp_path):
    info = run_info(sync=True, resumed=[4, 9])
    write_run(tmp_path, info, plain_rows(info))
    data = load(tmp_path)
    row = data.runs.iloc[0]
    assert row["resumed"]
    assert row["final_return"] == 110
    durations = ["imports", "setup", "startup", "first", "early", "steady", "saving", "total"]
    durations += ["process", "sps"]
    durations += [f"{x}_{y}" for x in ("rollout", "update") for y in ("first", "early", "steady")]
    assert row[durations].isna().all()
    assert data.iterations.filter(regex="time/|SPS").isna().to_numpy().all()
    assert data.iterations["charts/episodic_return"].tolist() == [10.0 * i for i in range(12)]


def test_iterations_have_a_row_each_and_no_value_is_nan(tmp_path):
    info = run_info()
    rows = metrics_rows(info, np.ones(12), np.array([np.nan] * 6 + [1.0] * 6))
    write_run(tmp_path, info, rows)
    iterations = load_iterations(tmp_path)
    assert list(iterations["iteration"]) == list(range(12))
    assert iterations["charts/episodic_return"].isna().sum() == 6
    assert iterations["time/rollout"].isna().all()


def test_a_folder_of_folders_keeps_runs_of_one_name_apart(tmp_path):
    info = run_info()
    write_run(tmp_path / "old", info, plain_rows(info))
    write_run(tmp_path / "new", info | {"device": "GPU", "driver": "1"}, plain_rows(info))
    assert set(load_runs(tmp_path)["run"]) == {
        f"{x}/{info['args']['run_name']}" for x in ("old", "new")
    }


def test_a_gpu_is_another_platform_and_so_are_wsl2_and_another_driver(tmp_path):
    gpu: dict[str, Any] = {"device": "H200", "gpu": "H200"}
    infos = [
        run_info(),
        run_info(**gpu, driver="1"),
        run_info(**gpu, driver="2"),
        run_info(**gpu, driver="1", os="Linux-6.6-Microsoft-standard-WSL2-x86_64"),
    ]
    for i, info in enumerate(infos):
        write_run(tmp_path / str(i), info, plain_rows(info))
    assert sorted(load_runs(tmp_path)["platform"]) == [
        "Linux, Fast, 2 cores",
        "Linux, H200, driver 1",
        "Linux, H200, driver 2",
        "WSL2, H200, driver 1",
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
        (("args", "hidden_sizes"), "64", 'is "64", not a list of whole numbers above 0'),
        (("args", "total_timesteps"), 8191, "not enough for an iteration"),
        (("resumed",), 3, "resumed is 3, not a list of whole numbers"),
        (("script",), None, "script is null, not text"),
        (("durations", "process"), 0, "durations.process is 0, not a number above 0"),
        (("durations", "saving"), "x", 'durations.saving is "x", not a number'),
        ((9, "time/iteration"), 0, "iteration 9: time/iteration is 0, not a number above 0"),
        ((0, "time/elapsed"), 0.1, "time/elapsed is not above time/iteration"),
        ((11, "charts/episodic_return"), "x", 'episodic_return is "x", not a number'),
        (("durations", "total"), None, "durations.total is null, not a number above 0"),
        (("durations",), None, "not a run of this benchmark: it has no durations"),
        ((3, "time/iteration"), "0.4", 'iteration 3: time/iteration is "0.4", not a number'),
        ((2, "time/update"), None, "iteration 2: time/update is null, not a number above 0"),
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
    write_run(tmp_path, run_info(), plain_rows(run_info()))
    data = load(tmp_path)
    assert len(data.runs) == 1
    assert list(data.left_out) == ["damaged"]
    assert reason in data.left_out["damaged"]


def test_what_may_be_unknown_may_be_null_or_absent(tmp_path):
    info = run_info(cpu=None, cores=None, load=None, git_commit=None)
    del info["gpu"], info["driver"]
    write_run(tmp_path, info, plain_rows(info))
    row = load_runs(tmp_path).iloc[0]
    assert row[["gpu", "driver", "commit"]].tolist() == ["", "", ""]
    assert np.isnan(row["load"])


def test_of_two_runs_with_the_same_settings_the_newer_counts(tmp_path):
    old = run_info(started="2026-01-31T23:30:00+0000")
    new = run_info(started="2026-01-31T22:00:00-0200")  # half an hour later
    write_run(tmp_path / "a", new, plain_rows(new))
    write_run(tmp_path / "b", old, plain_rows(old))
    data = load(tmp_path)
    assert data.runs["run"].tolist() == [f"a/{new['args']['run_name']}"]
    assert "newer" in data.left_out[f"b/{old['args']['run_name']}"]


def test_an_uninterrupted_run_counts_before_a_newer_resumed_one(tmp_path):
    for i, resumed in enumerate([[], [3], [5]]):
        info = run_info(started=f"2026-01-0{i + 1}T00:00:00+0000", resumed=resumed)
        write_run(tmp_path / str(i), info, plain_rows(info))
    name = run_info()["args"]["run_name"]
    data = load(tmp_path)
    assert data.runs["run"].tolist() == [f"0/{name}"]
    reason = f"same settings as 0/{name}, which is not a resumed one"
    assert data.left_out == {f"1/{name}": reason, f"2/{name}": reason}
    (tmp_path / "0" / name / "run.json").unlink()
    assert load(tmp_path).left_out[f"1/{name}"] == f"same settings as 2/{name}, which is newer"


@pytest.mark.parametrize("content", ["nothing", "foreign", "missing"])
def test_a_source_without_runs_is_one_sentence(tmp_path, content):
    if content == "foreign":
        (tmp_path / "run.json").write_text("[1, 2]")
        (tmp_path / "metrics.jsonl").write_text("")
    source = tmp_path / "missing" if content == "missing" else tmp_path
    with pytest.raises(SourceError, match=str(tmp_path)) as error:
        load(source)
    assert "\n" not in str(error.value)


def test_every_column_is_documented(tmp_path):
    info = run_info()
    write_run(tmp_path, info, plain_rows(info))
    text = (ROOT / "analysis" / "README.md").read_text()
    assert not [name for name in load_runs(tmp_path) if f"`{name}`" not in text]
    for name in load_iterations(tmp_path):
        assert f"`{name}`" in text or name.rpartition("_")[2] in ("min", "max"), name


# === Saved tables ===============================================================================
def test_a_saved_table_is_the_same_table(tmp_path):
    (write_grid(tmp_path / "runs", sync=True) / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "metrics.jsonl").touch()
    data = load(tmp_path / "runs")
    save(data, tmp_path / "table.parquet")
    again = load(tmp_path / "table.parquet")
    pd.testing.assert_frame_equal(again.runs, data.runs)
    pd.testing.assert_frame_equal(again.iterations, data.iterations)
    assert list(again.left_out) == list(data.left_out) == ["broken"]


def test_a_cache_is_read_instead_of_the_source(tmp_path):
    cache = tmp_path / "cache.parquet"
    runs = load_runs(write_grid(tmp_path / "runs"), cache=cache)
    shutil.rmtree(tmp_path / "runs")
    pd.testing.assert_frame_equal(load_runs(tmp_path / "runs", cache=cache), runs)
    assert set(load_iterations(tmp_path / "runs", cache=cache)["run"]) == set(runs["run"])


def test_a_foreign_table_needs_few_columns(tmp_path):
    table: dict[str, list] = {
        "framework": ["mine"],
        "compile_mode": ["x"],
        "env_id": ["CartPole-v1"],
    }
    table |= {"size": ["small"], "repeat": [1], "first": [2.0], "steady": [0.1]}
    pd.DataFrame(table).to_parquet(tmp_path / "table.parquet")
    row = load_runs(tmp_path / "table.parquet").iloc[0]
    assert row["mode"] == "mine x"
    assert np.isnan(row["final_return"])
    pd.DataFrame(table).drop(columns="steady").to_parquet(tmp_path / "table.parquet")
    with pytest.raises(SourceError, match="no column steady"):
        load(tmp_path / "table.parquet")
    pd.DataFrame(table | {"steady": ["fast"]}).to_parquet(tmp_path / "table.parquet")
    with pytest.raises(SourceError, match="is not a table of runs"):
        load(tmp_path / "table.parquet")
    (tmp_path / "table.parquet").write_text("hello")
    with pytest.raises(SourceError, match="not a table"):
        load(tmp_path / "table.parquet")


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
import sys, wandb
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
    command = [sys.executable, "-c", f"from analysis.runs import *\n{code}", *map(str, arguments)]
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
    server.runs["run5"]["summary"] = "{}"
    server.runs["run5"]["state"] = "crashed"
    code = "data = load('wandb:team/project'); print(data.left_out)\n"
    out = in_new_process(
        code + "save(data, sys.argv[1])".replace("sys", "__import__('sys')"), tmp_path / "t.parquet"
    )
    assert "crashed" in out
    assert "run5" in out
    runs = load(tmp_path / "t.parquet").runs.set_index("run")
    assert len(runs) == 109
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
    code = "save(load('wandb:team/project'), __import__('sys').argv[1])"
    in_new_process(code, tmp_path / "t.parquet")
    data = load(tmp_path / "t.parquet")
    assert data.runs["resumed"].all()
    assert data.iterations["iteration"].tolist() == list(range(12))
    assert data.iterations["charts/episodic_return"].tolist() == [10.0 * i for i in range(12)]


def test_a_real_offline_run_is_the_same_from_wandb_as_from_its_folder(server, tmp_path):
    command = [sys.executable, "ppo_linen.py", "--track", "--runs-dir", tmp_path / "runs"]
    command += [
        "--run-name",
        "real",
        "--env-id",
        "MountainCar-v0",
        "--sync-for-timing",
        "--num-envs",
        "4",
    ]
    command += [
        "--num-steps",
        "8",
        "--total-timesteps",
        "320",
        "--num-minibatches",
        "1",
        "--update-epochs",
        "1",
    ]
    offline = os.environ | {"WANDB_MODE": "offline"}
    subprocess.run(command, cwd=ROOT, env=offline, check=True, capture_output=True, timeout=120)
    [folder] = (tmp_path / "runs" / "real" / "wandb").glob("offline-run-*")
    sync = [sys.executable, "-m", "wandb", "sync", folder]
    subprocess.run(sync, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    in_new_process(
        "load('wandb:team/project', cache=__import__('sys').argv[1])", tmp_path / "t.parquet"
    )
    ours, theirs = load(tmp_path / "runs"), load(tmp_path / "t.parquet")
    own = ["run", "source"]
    pd.testing.assert_frame_equal(ours.runs.drop(columns=own), theirs.runs.drop(columns=own))
    pd.testing.assert_frame_equal(
        ours.iterations.drop(columns="run"), theirs.iterations.drop(columns="run")
    )


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
    assert "wandb:entity/project" in report("wandb:project")


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

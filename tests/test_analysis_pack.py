"""A folder of runs becomes a study that gives the same report; what is wrong with it is named."""

import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from fake_runs import metrics_rows, run_info, write_grid, write_run

from analysis.pack import problems
from analysis.runs import load


def pack(*arguments):
    command = [sys.executable, "-m", "analysis.pack", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_packed_study_is_the_same_runs_with_their_report(tmp_path):
    grid = write_grid(tmp_path / "runs", repeats=2)
    done = pack(grid, tmp_path / "study")
    assert done.returncode == 0, done.stderr
    assert "12 runs" in done.stdout
    files = {path.name for path in (tmp_path / "study").iterdir()}
    assert files == {"runs.csv", "iterations.parquet", "report"}
    ours, packed = load(grid), load(tmp_path / "study")
    own = ["source"]
    pd.testing.assert_frame_equal(ours.runs.drop(columns=own), packed.runs.drop(columns=own))
    pd.testing.assert_frame_equal(ours.iterations, packed.iterations)
    assert pack("--check", tmp_path / "study").returncode == 0


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "several commits": ({"git_commit": "b" * 40}, "2 commits"),
    "changed files": ({"git_commit": "a" * 40 + "-dirty"}, "not committed"),
    "another machine": ({"cores": 64}, "2 platforms"),
    "other versions": ({"versions": {"torch": "1", "jax": "2", "flax": "3"}}, "different versions"),
    "a busy machine": ({"load": 9.0}, "1 run made while others used the machine"),
    "a resumed run": ({"resumed": [3]}, "1 run stopped and resumed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_reader_would_hold_against_a_study_is_named(tmp_path, fault):
    changes, words = FAULTS[fault]
    write_grid(tmp_path, repeats=1, envs=("CartPole-v1",))
    assert problems(load(tmp_path)) == []
    for mode in ("linen jit", "nnx cached_partial", "torch compile"):
        info = run_info(mode, seed=2, **(changes if mode == "linen jit" else {}))
        write_run(tmp_path, info, metrics_rows(info, np.full(12, 0.1), np.arange(12.0)))
    found = problems(load(tmp_path))
    assert words in found[-1]
    assert len(found) == 1 + (fault == "changed files")  # which are another commit, too


def test_a_study_with_faults_is_packed_only_if_asked(tmp_path):
    grid = write_grid(tmp_path / "runs", repeats=1, envs=("CartPole-v1",))
    path = next(grid.glob("*linen*"))
    (path / "run.json").unlink()
    done = pack(grid, tmp_path / "study")
    assert done.returncode == 1
    assert "1 run left out" in done.stderr
    assert "ppo_linen" not in done.stdout
    assert not (tmp_path / "study").exists()
    assert pack(grid, tmp_path / "study", "--anyway").returncode == 0
    assert path.name in load(tmp_path / "study").left_out


def test_a_grid_with_holes_is_named(tmp_path):
    write_grid(tmp_path, repeats=2)
    for path in tmp_path.glob("Acrobot*linen*2"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    assert problems(load(tmp_path)) == ["ppo_linen lacks 1 run that others have"]


@pytest.mark.parametrize("arguments", [["runs"], ["--check", "runs", "out"]])
def test_bad_usage_is_one_sentence(arguments):
    done = pack(*arguments)
    assert done.returncode == 2
    assert "give a folder to write, or --check" in done.stderr


def test_a_run_is_never_overwritten(tmp_path):
    grid = write_grid(tmp_path / "runs", repeats=1, envs=("CartPole-v1",))
    done = pack(grid, next(grid.glob("*linen*")))
    assert done.returncode == 2
    assert "must be a folder for a study" in done.stderr


def test_runs_that_shared_their_cores_have_no_durations(tmp_path):
    grid = write_grid(tmp_path / "runs", repeats=2)
    whole = load(grid)
    name = whole.runs["run"].iloc[0]
    done = pack(grid, tmp_path / "study", "--learning-only", f"^{name}$")
    assert done.returncode == 0, done.stderr
    study = load(tmp_path / "study")
    chosen, times = study.runs["run"] == name, study.runs[["total", "steady", "startup"]]
    assert chosen.sum() == 1 and times[chosen].isna().all(None)
    assert times[~chosen].notna().all(None)
    assert study.runs["final_return"].tolist() == whole.runs["final_return"].tolist()
    shared = study.iterations["run"] == name
    assert study.iterations.loc[shared, "time/iteration"].isna().all()
    assert study.iterations.loc[~shared, "time/iteration"].notna().all()
    assert study.iterations.loc[shared, "charts/episodic_return"].notna().any()
    assert "1 run shared the cores" in (tmp_path / "study/report/report.md").read_text()

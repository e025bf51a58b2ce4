"""Load tables with the documented columns, reject invalid ones, and write reports."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from made_up import foreign_iterations, foreign_runs, run_command, write_study, write_table

from analysis import figures, measures, tables
from analysis.runs import load
from analysis.schema import RUNS, SourceError


# === Columns ====================================================================================
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_the_required_columns_are_sufficient(tmp_path, kind):
    required = [x.name for x in RUNS if x.must == "table"]
    assert required == ["framework", "compile_mode", "env_id", "size", "first", "steady"]
    path = write_table(tmp_path / f"t.{kind}", foreign_runs()[[*required, "repeat"]])
    data = load(path)
    assert set(data.runs["mode"]) == {"mine jit", "mine eager"}
    assert not data.runs[["sync", "resumed", "container"]].any(axis=None)
    assert data.runs[["process", "total", "final_return", "num_iterations"]].isna().all(axis=None)
    assert data.left_out == {}
    write_table(path, foreign_runs().drop(columns="size"))
    with pytest.raises(SourceError, match=f"{path} has no column size$"):
        load(path)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_parsing_of_text_flags_and_empty_cells(tmp_path, kind):
    texts = ["None", "NA", "1e5", "007", "nan", "null", "True", ""]
    flags = ["True", "true", "1", " TRUE ", "False", "false", "0", ""]
    load_ = ["", "nan", *map(str, range(6))]
    table = foreign_runs(commit=texts, sync=flags, load=load_, unknown=1)
    data = load(write_table(tmp_path / f"t.{kind}", table))
    assert data.runs["commit"].tolist() == texts
    assert data.runs["steady"].tolist() == table["steady"].tolist()
    assert data.runs["sync"].tolist() == [True] * 4 + [False] * 4
    assert data.runs["load"].isna().tolist() == [True, True] + [False] * 6
    assert f"Ignored columns of t.{kind}: unknown" in data.notes


def test_the_seed_replaces_a_missing_repeat_and_one_of_them_is_required(tmp_path):
    runs = foreign_runs(seed=[3, 1, None, 4] * 2).drop(columns="repeat")
    data = load(write_table(tmp_path / "1.csv", runs))
    assert data.runs["repeat"].tolist() == [3, 1, 4] * 2
    assert data.left_out == dict.fromkeys(("r2", "r6"), "it has neither repeat nor seed")
    data = load(write_table(tmp_path / "2.csv", foreign_runs(repeat=1)))
    # If several rows have the same repeat, the last one counts.
    assert data.runs["run"].tolist() == ["r3", "r7"]


# === Invalid input ==============================================================================
@pytest.mark.parametrize(
    ("kind", "name", "values", "reason"),
    [
        ("csv", "steady", [0, 1], "steady is '0', not a number above"),
        ("parquet", "steady", [0, 1], "steady is 0, not a number above"),
        ("csv", "sync", ["maybe", "True"], "sync is 'maybe', not true or false"),
        ("csv", "num_iterations", [1.5, 12], "num_iterations is '1.5', not a whole number"),
        ("csv", "num_iterations", [None, 12], "it has "),
        ("csv", "env_id", [None, "x"], "env_id is missing"),
    ],
)
def test_an_invalid_row_is_left_out_with_a_reason(tmp_path, kind, name, values, reason):
    runs = foreign_runs()
    runs[name] = values * 4
    data = load(write_table(tmp_path / f"t.{kind}", runs))
    assert list(data.left_out) == ["r0", "r2", "r4", "r6"]
    assert all(x.startswith(reason) for x in data.left_out.values())
    assert len(data.runs) == 4


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.csv", b"", "cannot be read as a table"),
        ("t.csv", b"a,b\n1,2,3\n1,2,3\n", "its rows are longer than its header"),
        ("t.csv", b"framework;size\n1;2\n", "has no column framework, compile_mode, env_id"),
        ("t.parquet", b"PAR1" + bytes(100) + b"PAR1", "cannot be read as a table"),
        ("t.xlsx", b"hello", "is neither a folder of runs"),
    ],
)
def test_an_invalid_file_is_a_one_line_error(tmp_path, name, content, reason):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SourceError, match=f"{path}.* {reason}") as error:
        load(path)
    assert "\n" not in str(error.value)


def test_duplicate_iterations_are_an_error(tmp_path):
    iterations = foreign_iterations(foreign_runs()).assign(iteration=3)
    with pytest.raises(SourceError, match=r"8 left out, e\.g\. r0: iteration 3: it appears twice"):
        load(write_study(tmp_path, foreign_runs(), iterations))


# === Iterations =================================================================================
def test_missing_returns_and_lengths_come_from_the_iterations(tmp_path):
    runs = foreign_runs()
    iterations = foreign_iterations(runs)
    iterations.loc[iterations["iteration"] > 9, "charts/episodic_return"] = np.nan
    bare = runs.drop(columns=["num_iterations", "final_return"])
    shuffled = iterations.sample(frac=1, random_state=0).replace({"run": {"r0": "R0"}})
    data = load(write_study(tmp_path / "bare", bare, shuffled))
    assert list(data.left_out) == ["r0"]  # no iterations, so its length is unknown
    assert "R0" not in set(data.iterations["run"])
    ends = iterations[iterations["iteration"] == 9].set_index("run")["charts/episodic_return"]
    assert data.runs["final_return"].tolist() == ends.tolist()[1:]
    assert data.runs["num_iterations"].tolist() == [12] * 7
    given = foreign_runs(num_iterations=20)
    data = load(write_study(tmp_path / "given", given, iterations))
    assert data.runs["num_iterations"].tolist() == [20] * 8


# === Report =====================================================================================
REPORTED: dict[str, dict[str, Any]] = {
    "two platforms": {"platform": ["A100", "H100"] * 4},
    "no durations": dict.fromkeys(("startup", "first", "steady", "total", "process")),
    "different environments": {"env_id": list("abcdefgh")},
    "different lengths": {"num_iterations": range(1, 9)},
    "all resumed": {"resumed": True},
    "extremes": {
        "steady": [2e-9, 9e8] * 4,
        "first": [9e8, 2e-9] * 4,
        "final_return": [-1e99, 1e99] * 4,
        "num_iterations": 1e14,
        "cores": 0,
    },
    "hostile text": {
        "env_id": ["<b>|$x$\x1b[31m\n# "] * 8,
        "mode": ["a$\\b{", "=1"] * 4,
        "started": ["x", "9999-99-99"] * 4,
        "settings": ["{", "[]"] * 4,
    },
}


@pytest.mark.parametrize("case", REPORTED)
def test_unusual_tables_give_a_report(tmp_path, monkeypatch, case):
    monkeypatch.setattr(figures, "png", lambda figure: b"")  # rendering is slow
    runs = foreign_runs()
    write_study(tmp_path / "in", runs.assign(**REPORTED[case]), foreign_iterations(runs))
    status, said, errors = run_command("report", tmp_path / "in", "--out", tmp_path / "out")
    assert status == 0, errors
    assert (said + errors).replace("\n", "").isprintable()


def test_without_process_times_the_report_compares_totals_without_imports(tmp_path):
    runs = foreign_runs(platform="here").drop(columns="process")
    runs["total"] *= [1.0, 1.1, 0.9, 1.2] * 2
    others = runs.assign(platform="elsewhere", total=3 * runs["total"], run="other " + runs["run"])
    write_table(tmp_path / "t.csv", pd.concat([runs, others[others["repeat"] < 4]]))
    experiment, _ = measures.experiments(load(tmp_path / "t.csv"))
    known = tables.make("answer", experiment).cells.set_index("script")
    means = np.exp(np.log(runs["total"]).groupby(runs["compile_mode"]).mean())
    seconds = known["12 iterations without imports (s)"].astype(float)
    assert seconds["mine jit"] == pytest.approx(means["jit"], rel=1e-2)
    ratio = known.loc["mine eager", "training time without imports / mine jit time"].split()[0]
    assert float(ratio.removesuffix("×")) == pytest.approx(means["eager"] / means["jit"], rel=1e-2)
    status, said, _ = run_command("report", tmp_path / "t.csv", "--out", tmp_path / "out")
    assert status == 0
    assert "12 iterations without imports took" in said
    found = pd.read_csv(tmp_path / "out/tables/platforms.csv").query("value == 'total'")
    assert found["estimate"].to_numpy() == pytest.approx([3] * 2)

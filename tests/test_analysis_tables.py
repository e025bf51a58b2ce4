"""Tables from elsewhere, made of the documented columns, load; what cannot be has a reason."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from fake_runs import foreign_iterations, foreign_runs, write_table

from analysis.runs import load, save
from analysis.schema import RUNS, SourceError


def small(**columns: Any) -> pd.DataFrame:
    """Return eight runs of two modes in one environment and size, in whole trainings."""
    runs = foreign_runs(("A100",), ("small",), ("Env0-v0",), repeats=4)
    runs["total"] = runs["first"] + 11 * runs["steady"]
    runs = runs.assign(run=[f"r{i}" for i in range(8)], num_iterations=12, final_return=range(8))
    return runs.assign(**columns)


def alternate(*values: Any) -> list[Any]:
    """Return a column of small() with the values by turns."""
    return [values[i % len(values)] for i in range(8)]


def write_study(folder, runs, iterations, kind="csv"):
    write_table(folder / f"runs.{kind}", runs)
    write_table(folder / f"iterations.{kind}", iterations)
    return folder


# === Columns ====================================================================================
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_the_columns_in_bold_are_enough(tmp_path, kind):
    required = [x.name for x in RUNS if x.must == "table"]
    assert required == ["framework", "compile_mode", "env_id", "size", "first", "steady"]
    path = write_table(tmp_path / f"t.{kind}", foreign_runs(("A100",))[required])
    data = load(path)
    assert set(data.runs["mode"]) == {"mine jit", "mine eager"}
    assert data.runs["startup"].tolist() == data.runs["first"].tolist()
    assert not data.runs[["sync", "resumed", "container"]].any(axis=None)
    assert data.runs[["process", "total", "final_return", "num_iterations"]].isna().all(axis=None)
    assert data.left_out == {}
    assert data.notes == (
        f"t.{kind} has no repeats, so its runs were numbered in the order of their rows",
        f"t.{kind} has no startup, so first stands for it",
    )
    for name in required:
        write_table(path, foreign_runs().drop(columns=name))
        with pytest.raises(SourceError, match=f"{path} has no column {name}$"):
            load(path)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_both_kinds_of_file_and_a_study_of_them_are_the_same_table(tmp_path, kind):
    iterations = foreign_iterations(small())
    write_study(tmp_path / "study", small(), iterations, kind)
    lone = load(write_table(tmp_path / f"t.{kind}", small()))
    data = load(tmp_path / "study")
    pd.testing.assert_frame_equal(data.runs, lone.runs, check_exact=True)
    for name in iterations:
        assert data.iterations[name].tolist() == iterations[name].tolist()
    assert (data.runs[["first", "steady"]] == small()[["first", "steady"]]).all(axis=None)
    save(data, tmp_path / "again")
    again = load(tmp_path / "again")
    pd.testing.assert_frame_equal(again.runs, data.runs, check_exact=True)
    pd.testing.assert_frame_equal(again.iterations, data.iterations, check_exact=True)
    assert again.notes == data.notes


def test_every_type_that_pandas_writes_is_read(tmp_path):
    runs = small(
        steady=np.arange(1, 9, dtype="float32"),
        seed=pd.array([1, None] * 4, dtype="Int64"),
        sync=pd.array([True, False, None, False] * 2, dtype="boolean"),
        gpu=pd.Categorical(["x", None] * 4),
        started=pd.date_range("2026-01-01", periods=8, tz="Asia/Tokyo"),
        platform=[7] * 8,
        unknown=[[1, 2]] * 8,
    ).set_index("run")  # an index is a column, too
    data = load(write_table(tmp_path / "t.parquet", runs))
    assert data.left_out == {}
    assert data.runs["run"].tolist() == [f"r{i}" for i in range(8)]
    assert data.runs["steady"].tolist() == list(range(1, 9))
    assert data.runs["seed"].isna().sum() == 4
    assert data.runs["sync"].tolist() == alternate(True, False, False, False)
    assert data.runs["gpu"].tolist() == alternate("x", "")
    assert data.runs["platform"].tolist() == ["7"] * 8
    assert data.runs["started"].iloc[0].startswith("2026-01-01 00:00:00+09:00")
    assert "t.parquet has columns that are not read: unknown" in data.notes


def test_text_stays_text_flags_are_read_as_people_write_them_and_empty_is_missing(tmp_path):
    texts = ["None", "NA", "1e5", "007", "nan", "null", "True", ""]
    flags = ["True", "true", "1", " TRUE ", "False", "false", "0", ""]
    load_ = ["", "nan", *map(str, range(6))]
    runs = load(write_table(tmp_path / "t.csv", small(commit=texts, sync=flags, load=load_))).runs
    assert runs["commit"].tolist() == texts
    assert runs["sync"].tolist() == [True] * 4 + [False] * 4
    assert runs["load"].isna().tolist() == [True, True] + [False] * 6


# === Repeats ====================================================================================
def test_repeats_are_kept_or_numbered_by_their_rows_and_said(tmp_path):
    """Rows that share one are one run, made again."""
    kept = load(write_table(tmp_path / "t.csv", small(repeat=[7, 8, 9, 10] * 2)))
    assert kept.runs["repeat"].tolist() == [7, 8, 9, 10] * 2
    assert not any("numbered" in x for x in kept.notes)
    data = load(write_table(tmp_path / "t.csv", small(repeat=1)))
    assert data.runs["run"].tolist() == ["r3", "r7"]  # the last of each mode
    assert data.left_out["r0"] == "made again as r3, which counts"


def test_repeats_of_several_tables_are_numbered_together_and_seeds_stand_for_them(tmp_path):
    one = write_table(tmp_path / "1.csv", small())
    two = write_table(tmp_path / "2.csv", small(repeat=[5, 6, 7, 8] * 2))
    data = load([two, one])
    assert data.left_out == {}
    assert data.runs.groupby("mode")["repeat"].apply(sorted).tolist() == [[*range(5, 13)]] * 2
    seeds = [3, 1, 2, 4] * 2
    assert load(write_table(tmp_path / "3.csv", small(seed=seeds))).runs["repeat"].tolist() == seeds


# === What is missing or cannot be ===============================================================
@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"steady": alternate(0, 1)}, "steady is "),
        ({"final_return": alternate("-inf", 1)}, "final_return is "),
        ({"sync": alternate("maybe", "True")}, "sync is 'maybe', not true or false"),
        ({"num_iterations": alternate(1.5, 12)}, "num_iterations is "),
        ({"num_iterations": alternate(None, 12)}, "it has "),
        ({"env_id": alternate(None, "x")}, "env_id is missing"),
        ({"run": ["a", "b\x01", "a", "c", "b\x02", "d", "b\x03", "e"]}, "another row has the same"),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_row_that_cannot_be_is_left_out_for_one_reason(tmp_path, kind, columns, reason):
    [(name, values)] = columns.items()
    if any(isinstance(x, str) for x in values):  # a parquet file has one type a column
        columns = {name: [None if x is None else str(x) for x in values]}
    data = load(write_table(tmp_path / f"t.{kind}", small(**columns)))
    bad = ["a", "b\ufffd"] if name == "run" else ["r0", "r2", "r4", "r6"]
    assert list(data.left_out) == bad
    assert all(x.startswith(reason) for x in data.left_out.values())
    assert len(data.runs) == (5 if name == "run" else 4)


@pytest.mark.parametrize("column", [[[1.0, 2.0]] * 8, [True] * 8])
def test_a_column_of_the_wrong_type_is_one_sentence(tmp_path, column):
    runs = small(steady=column)
    with pytest.raises(SourceError, match=r"8 left out, e.g. r0: steady is ") as error:
        load(write_table(tmp_path / "t.parquet", runs))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sums", "columns", "expected", "stands"),
    [
        ("startup", {"imports": 1.0, "setup": 2.0}, [6.0] * 8, ""),
        ("startup", {"imports": 1.0}, [4.0] * 8, "imports + first"),
        ("startup", {"imports": alternate(1.0, None), "setup": 2.0}, alternate(6.0, None), ""),
        ("startup", {"startup": alternate(9.0, None)}, alternate(9.0, None), ""),  # no mixture
        ("process", {}, [10.0] * 8, "total"),
        ("process", {"imports": 1.0}, [11.0] * 8, ""),
        ("process", {"imports": alternate(1.0, None)}, alternate(11.0, None), ""),
    ],
)
def test_a_sum_of_parts_means_one_thing_in_all_rows(tmp_path, sums, columns, expected, stands):
    data = load(write_table(tmp_path / "t.parquet", small(first=3.0, total=10.0, **columns)))
    np.testing.assert_array_equal(data.runs[sums], np.array(expected, float))
    notes = [x for x in data.notes if sums in x]
    assert notes == ([f"t.parquet has no {sums}, so {stands} stands for it"] if stands else [])


# === Files ======================================================================================
@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.csv", b"", "not a table that can be read"),
        ("t.csv", b"a,b\n1,2,3\n1,2,3\n", "its rows are longer than its header"),
        ("t.csv", b"framework;size\n1;2\n", "has no column framework, compile_mode, env_id"),
        ("folder.parquet", None, "it is not there, or not a file"),
        ("t.parquet", b"PAR1" + bytes(100) + b"PAR1", "not a table that can be read"),
        ("t.xlsx", b"hello", "is not a folder of runs"),
    ],
)
def test_a_file_that_is_no_table_is_one_sentence(tmp_path, name, content, reason):
    path = tmp_path / name
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(SourceError, match=reason) as error:
        load(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


# === Iterations =================================================================================
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"iteration": 3}, "iteration 3: it is there twice"),
        ({"time/iteration": -0.5}, "iteration 11: time/iteration is .*, not a number above"),
        ({"losses/entropy": "inf"}, "losses/entropy is .*inf.*, not a number"),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_iterations_that_cannot_be_are_one_sentence(tmp_path, kind, change, reason):
    iterations = foreign_iterations(small())
    [(name, value)] = change.items()
    iterations[name] = pd.Series([value] * len(iterations))
    write_study(tmp_path, small(), iterations, kind)
    with pytest.raises(SourceError, match=f"8 left out, e.g. r0: .*{reason}") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_what_a_table_lacks_of_returns_comes_from_its_iterations(tmp_path):
    iterations = foreign_iterations(small())
    iterations.loc[iterations["iteration"] > 9, "charts/episodic_return"] = np.nan
    shuffled = iterations.sample(frac=1, random_state=0)
    bare = small().drop(columns=["num_iterations", "final_return"])
    runs = load(write_study(tmp_path / "bare", bare, shuffled)).runs
    ends = iterations[iterations["iteration"] == 9].set_index("run")["charts/episodic_return"]
    assert runs.set_index("run")["final_return"].to_dict() == ends.to_dict()
    assert runs["num_iterations"].tolist() == [12] * 8  # so that `total` counts
    given = load(write_study(tmp_path / "given", small(num_iterations=20), iterations)).runs
    assert given["final_return"].tolist() == list(range(8))
    assert given["num_iterations"].tolist() == [20] * 8


def test_iterations_of_runs_that_are_not_there_do_not_count(tmp_path):
    iterations = foreign_iterations(small()).replace({"run": {"r0": "R0", "r1": "R1"}})
    data = load(write_study(tmp_path / "study", small(steady=[1] * 7 + [0]), iterations))
    assert set(data.iterations["run"]) == {f"r{i}" for i in range(2, 7)}

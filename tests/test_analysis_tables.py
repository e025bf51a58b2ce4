"""Tables from elsewhere, made of the documented columns, load and go through the report."""

import io
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_runs import ENVS, PLATFORMS, SIZES, foreign_iterations, foreign_runs, write_table

from analysis import figures, report
from analysis.runs import IDENTITY, load, save
from analysis.schema import ITERATIONS, RUNS, SourceError

HOSTILE = [
    "<script>alert(1)</script>",
    'x<img src="../../secret.png" onerror=alert(1)>',
    "../../secret",
    "a$\\undefined{$b_^",
    "|a|b|",
    "\x1b[31mred\x07\0",
    "two\nlines\r\n# title",
    "\u202eevil\u2066",
    "![x](../../secret.png) [y](javascript:alert(1)) `code`",
    "{{ 7 * 7 }}{% raw %}",
    "=cmd()",
    "\N{GRINNING FACE}%s{0}\\",
    "x" * 100_000,
    "[" * 3000,
]


class Tags(HTMLParser):
    """Keeps the tags of a page and their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: x or "" for name, x in attrs}))


class Done(NamedTuple):
    code: int
    stdout: str
    stderr: str
    out: Path


def small(**columns: Any) -> pd.DataFrame:
    """Return eight runs of two modes in one environment and size, in whole trainings."""
    runs = foreign_runs(PLATFORMS[:1], ("small",), ENVS[:1], repeats=4)
    runs["total"] = runs["first"] + 11 * runs["steady"]
    runs = runs.assign(run=[f"r{i}" for i in range(8)], num_iterations=12, final_return=range(8))
    return runs.assign(**columns)


def alternate(*values: Any) -> list[Any]:
    """Return a column of small() with the values by turns."""
    return [values[i % len(values)] for i in range(8)]


def write_study(folder: Path, runs: pd.DataFrame, iterations: pd.DataFrame, kind: str = "csv"):
    write_table(folder / f"runs.{kind}", runs)
    write_table(folder / f"iterations.{kind}", iterations)
    return folder


@pytest.fixture
def reported(tmp_path, monkeypatch):
    """Return a function that runs the command on a source, as a user would, and checks its end."""

    def run(source: Path, *options: str) -> Done:
        out = tmp_path / "a" / "b" / "out"
        monkeypatch.setattr(sys, "argv", ["report", str(source), "--out", str(out), *options])
        stdout, stderr, code = io.StringIO(), io.StringIO(), 0
        with redirect_stdout(stdout), redirect_stderr(stderr), warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                report.main()
            except SystemExit as end:
                code = int(end.code or 0)
        assert code in (0, 2)
        assert code == 0 or stderr.getvalue().count("\n") == 1
        assert (out / "report.html").exists() == (code == 0)
        return Done(code, stdout.getvalue(), stderr.getvalue(), out)

    return run


# === The documented columns are enough ==========================================================
def test_the_columns_in_bold_are_enough(tmp_path):
    required = [x.name for x in RUNS if x.must == "table"]
    assert required == ["framework", "compile_mode", "env_id", "size", "first", "steady"]
    for kind in ("csv", "parquet"):
        path = write_table(tmp_path / f"t.{kind}", foreign_runs(PLATFORMS[:1])[required])
        data = load(path)
        assert set(data.runs["mode"]) == {"jaxrl jit", "torchrl compile"}
        assert data.runs["startup"].tolist() == data.runs["first"].tolist()
        assert not data.runs[["sync", "resumed", "container"]].any(axis=None)
        assert (
            data.runs[["process", "total", "final_return", "num_iterations"]].isna().all(axis=None)
        )
        assert data.left_out == {}
        assert data.notes == (
            f"t.{kind} has no repeats, so its runs were numbered in the order of their rows",
            f"t.{kind} has no startup, so first stands for it",
        )
        for name in required:
            write_table(path, foreign_runs().drop(columns=name))
            with pytest.raises(SourceError, match=f"{path} has no column {name}$"):
                load(path)


def test_two_platforms_three_sizes_and_twelve_environments_go_through_the_report(
    tmp_path, reported
):
    runs = foreign_runs()
    assert (len(runs), len(PLATFORMS), len(SIZES), len(ENVS)) == (288, 2, 3, 12)
    runs["run"] = [f"r{i}" for i in range(len(runs))]
    study = write_study(tmp_path / "study", runs, foreign_iterations(runs), "parquet")
    data = load(study)
    assert sorted(data.runs["repeat"].unique()) == [1, 2]
    assert not data.runs.duplicated(["platform", "size", "env_id", "mode", "repeat"]).any()
    done = reported(study)
    for size in SIZES:
        assert size in done.stdout
    text = (done.out / "report.md").read_text()
    for word in (*PLATFORMS, *ENVS, "jaxrl jit", "torchrl compile", "first stands for it"):
        assert word in text


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_both_kinds_of_file_and_a_study_of_them_are_the_same_table(tmp_path, kind):
    iterations = foreign_iterations(small())
    write_study(tmp_path / "study", small(), iterations, kind)
    lone = load(write_table(tmp_path / f"t.{kind}", small()))
    data = load(tmp_path / "study")
    filled = ["best_return"]  # from the iterations
    one, other = (x.runs.drop(columns=filled) for x in (data, lone))
    pd.testing.assert_frame_equal(one, other, check_exact=True)
    for name in iterations:
        assert data.iterations[name].tolist() == iterations[name].tolist()
    assert data.runs[["first", "steady"]].to_numpy() == pytest.approx(
        small()[["first", "steady"]].to_numpy(), rel=0, abs=0
    )
    save(data, tmp_path / "again")
    again = load(tmp_path / "again")
    pd.testing.assert_frame_equal(again.runs, data.runs, check_exact=True)
    pd.testing.assert_frame_equal(again.iterations, data.iterations, check_exact=True)
    assert again.notes == data.notes


def test_many_rows_take_little_time(tmp_path):
    runs = foreign_runs(repeats=14)
    runs["run"] = [f"r{i}" for i in range(len(runs))]
    assert len(runs) > 2000
    data = load(write_study(tmp_path / "study", runs, foreign_iterations(runs)))
    assert len(data.runs) == len(runs)
    assert data.runs["repeat"].max() == 14
    assert len(data.iterations) == 12 * len(runs)


# === Repeats ====================================================================================
def test_repeats_that_are_not_unique_are_numbered_and_said(tmp_path):
    """Two rows that share one could both belong to it, and would be paired with both of another."""
    data = load(write_table(tmp_path / "t.csv", small(repeat=1)))
    for _, runs in data.runs.groupby("mode"):
        assert runs.sort_values("repeat")["repeat"].tolist() == [1, 2, 3, 4]
    assert data.notes[0].startswith("t.csv has repeats that are not unique, so its runs were")
    first = data.runs[data.runs["mode"] == "jaxrl jit"].sort_values("repeat")
    assert first["run"].tolist() == ["r0", "r1", "r2", "r3"]


def test_repeats_are_numbered_by_their_rows_and_not_by_their_names(tmp_path):
    runs = foreign_runs(PLATFORMS[:1], ("small",), ENVS[:1], (("a", "b"),), repeats=12)
    data = load(write_table(tmp_path / "t.csv", runs))
    assert data.runs.set_index("run")["repeat"].to_dict() == {f"row {i}": i for i in range(1, 13)}


def test_repeats_that_are_unique_are_kept(tmp_path):
    repeats = [7, 8, 9, 10] * 2
    data = load(write_table(tmp_path / "t.csv", small(repeat=repeats)))
    assert data.runs["repeat"].tolist() == repeats
    assert not any("numbered" in x for x in data.notes)


def test_repeats_of_several_tables_are_numbered_together(tmp_path):
    one = write_table(tmp_path / "1.csv", small())
    two = write_table(tmp_path / "2.csv", small())
    data = load([one, two])
    assert len(data.runs) == 16
    assert data.left_out == {}
    assert data.runs.groupby("mode")["repeat"].apply(sorted).tolist() == [[*range(1, 9)]] * 2
    modes = [table.assign(framework=name) for name, table in (("a", small()), ("b", small()))]
    other = [write_table(tmp_path / f"mode{i}.csv", x.head(4)) for i, x in enumerate(modes)]
    for _, runs in load(other).runs.groupby("mode"):
        assert sorted(runs["repeat"]) == [1, 2, 3, 4]  # so that the two can be paired
    known = write_table(tmp_path / "known.csv", small(repeat=[5, 6, 7, 8] * 2))
    data = load([known, one])
    assert data.left_out == {}
    assert data.runs.groupby("mode")["repeat"].apply(sorted).tolist() == [[*range(5, 13)]] * 2


# === What is missing or cannot be ===============================================================
@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"steady": alternate(0, 1)}, "steady is 0.0, not a number above 1e-9 and below 1e9"),
        ({"steady": alternate(-1, 1)}, "steady is -1.0, not a number above"),
        ({"steady": alternate("fast", 1)}, "steady is 'fast', not a number above"),
        ({"steady": alternate(np.inf, 1)}, "steady is inf, not a number above"),
        ({"first": alternate(1e300, 1)}, "first is 1e+300, not a number above"),
        ({"final_return": alternate("-inf", 1)}, "final_return is -inf, not a number"),
        ({"sync": alternate("maybe", "True")}, "sync is 'maybe', not true or false"),
        ({"num_iterations": alternate(1.5, 12)}, "num_iterations is 1.5, not a whole number"),
        ({"num_iterations": alternate(None, 12)}, "it has total but no num_iterations, on which"),
        ({"env_id": alternate(None, "x")}, "env_id is missing"),
        ({"framework": alternate("", "x")}, "framework is missing"),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_row_that_cannot_be_is_left_out_for_one_reason(tmp_path, kind, columns, reason):
    [(name, values)] = columns.items()
    if any(isinstance(x, str) for x in values):  # a parquet file has one type a column
        columns = {name: [None if x is None else str(x) for x in values]}
    runs = small(**columns)
    data = load(write_table(tmp_path / f"t.{kind}", runs))
    assert len(data.runs) == 4
    assert set(data.left_out) == {f"r{i} (row {i + 1})" for i in (0, 2, 4, 6)}
    assert all(x.startswith(reason) for x in data.left_out.values())


def test_flags_are_read_as_people_write_them(tmp_path):
    values = ["True", "true", "1", " TRUE ", "False", "false", "0", ""]
    for kind in ("csv", "parquet"):
        runs = load(write_table(tmp_path / f"t.{kind}", small(sync=values))).runs
        assert runs["sync"].tolist() == [True] * 4 + [False] * 4
    numbers = load(write_table(tmp_path / "t.parquet", small(sync=alternate(0, 1.0)))).runs
    assert numbers["sync"].tolist() == alternate(False, True)


def test_text_stays_text_and_an_empty_cell_is_missing(tmp_path):
    texts = ["None", "NA", "1e5", "007", "nan", "null", "True", ""]
    path = write_table(tmp_path / "t.csv", small(commit=texts, load=["", "nan", *range(6)]))
    data = load(path)
    assert data.runs["commit"].tolist() == texts
    assert data.runs["load"].isna().tolist() == [True, True] + [False] * 6


def test_rows_have_a_name_each(tmp_path):
    names = ["a", "a", "", None, "row 4", "b\x01", "b\x02", "c"]
    data = load(write_table(tmp_path / "t.parquet", small(run=names)))
    assert sorted(data.runs["run"]) == ["a", "b\ufffd", "c", "row 3", "row 4"]
    assert list(data.left_out) == ["a (row 2)", "row 4 (row 5)", "b\ufffd (row 7)"]
    assert set(data.left_out.values()) == {"another row has the same run"}
    data = load(write_table(tmp_path / "t.parquet", small().set_index("run")))
    assert sorted(data.runs["run"]) == [f"r{i}" for i in range(8)]  # an index is a column, too


def test_every_type_that_pandas_writes_is_read(tmp_path):
    runs = small(
        steady=np.arange(1, 9, dtype="float32"),
        num_iterations=pd.array([12] * 8, dtype="UInt16"),
        seed=pd.array([1, None] * 4, dtype="Int64"),
        sync=pd.array([True, False, None, False] * 2, dtype="boolean"),
        container=np.array(alternate(True, False)),
        cpu=pd.array(["a", None] * 4, dtype="string"),
        gpu=pd.Categorical(["x", None] * 4),
        size=pd.Categorical(["small"] * 8),
        cores=pd.array([2.0, None] * 4, dtype="Float32"),
        started=pd.date_range("2026-01-01", periods=8, tz="Asia/Tokyo"),
        commit=pd.Timestamp("2026-01-01"),
        platform=[7] * 8,
        load=np.arange(8, dtype="int8"),
        unknown=[[1, 2]] * 8,
        also={"a": 1},
    )
    data = load(write_table(tmp_path / "t.parquet", runs))
    assert data.left_out == {}
    assert data.runs["steady"].tolist() == list(range(1, 9))
    assert data.runs["seed"].isna().sum() == data.runs["cores"].isna().sum() == 4
    assert data.runs["sync"].tolist() == alternate(True, False, False, False)
    assert data.runs["gpu"].tolist() == alternate("x", "")
    assert data.runs["platform"].tolist() == ["7"] * 8
    assert data.runs["started"].iloc[0].startswith("2026-01-01 00:00:00+09:00")
    assert list(data.runs) == [x.name for x in RUNS]


WRONG = [[[1.0, 2.0]] * 8, [{"a": 1.0}] * 8, [True] * 8, pd.Timestamp("2026-01-01")]


@pytest.mark.parametrize("column", [*WRONG, pd.to_timedelta([1] * 8, "s")])
def test_a_column_of_the_wrong_type_is_one_sentence(tmp_path, column):
    path = write_table(tmp_path / "t.parquet", small(steady=column))
    with pytest.raises(SourceError, match=r"8 left out, e.g. r0 \(row 1\): steady is ") as error:
        load(path)
    assert "\n" not in str(error.value)


def test_startup_means_one_thing_in_all_rows(tmp_path):
    def startups(**columns):
        data = load(write_table(tmp_path / "t.parquet", small(first=3.0, **columns)))
        return data.runs["startup"].tolist(), [x for x in data.notes if "startup" in x]

    some, note = alternate(1.0, None), "t.parquet has no startup, so {} stands for it"
    assert startups(imports=1.0, setup=2.0) == ([6.0] * 8, [])
    assert startups(imports=1.0) == ([4.0] * 8, [note.format("imports + first")])
    assert startups(imports=some, setup=2.0) == ([5.0] * 8, [note.format("setup + first")])
    mixed, _ = startups(startup=alternate(9.0, None))
    assert mixed[::2] == [9.0] * 4
    assert np.isnan(mixed[1::2]).all()  # and not `first` alone beside whole startups
    full, _ = startups(startup=alternate(9.0, None), imports=1.0, setup=2.0)
    assert full == alternate(9.0, 6.0)
    compiled = write_table(tmp_path / "t.parquet", small(first=some, imports=1.0))
    assert load(compiled).runs["startup"].isna().tolist() == alternate(False, True)


def test_whole_trainings_mean_one_thing_in_all_rows(tmp_path):
    def process(**columns):
        data = load(write_table(tmp_path / "t.parquet", small(total=10.0, **columns)))
        return data.runs["process"].tolist(), [x for x in data.notes if "process" in x]

    some, note = alternate(1.0, None), ["t.parquet has no process, so total stands for it"]
    assert process() == ([10.0] * 8, note)
    assert process(imports=1.0) == ([11.0] * 8, [])
    assert process(imports=some) == ([10.0] * 8, note)
    mixed, _ = process(imports=some, process=alternate(12.0, None))
    assert mixed[::2] == [12.0] * 4
    assert np.isnan(mixed[1::2]).all()


# === Files ======================================================================================
@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.csv", b"", "not a table that can be read"),
        ("t.csv", b"\n", "not a table that can be read"),
        ("t.csv", b"framework,size\n\xff,1\n", "not a table that can be read"),
        ("t.csv", b'framework\n"', "not a table that can be read"),
        ("t.csv", b"a,b\n1,2,3\n1,2,3\n", "its rows are longer than its header"),
        ("t.csv", b"framework;size\n1;2\n", "has no column framework, compile_mode, env_id"),
        ("t.parquet", b"", "not a table that can be read"),
        ("t.parquet", b"PAR1" + bytes(100) + b"PAR1", "not a table that can be read"),
        ("missing.csv", None, "it is not there, or not a file"),
        ("folder.parquet", None, "it is not there, or not a file"),
        ("t.xlsx", b"hello", "is not a folder of runs"),
    ],
)
def test_a_file_that_is_no_table_is_one_sentence(tmp_path, name, content, reason):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    elif "folder" in name:
        path.mkdir()
    with pytest.raises(SourceError, match=reason) as error:
        load(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_damaged_parquet_file_is_a_table_or_one_sentence(tmp_path):
    rng = np.random.default_rng(0)
    whole = bytearray(write_table(tmp_path / "t.parquet", small()).read_bytes())
    failed = 0
    for _ in range(100):
        damaged = whole.copy()
        for i in rng.integers(len(whole), size=4):
            damaged[i] = rng.integers(256)
        (tmp_path / "t.parquet").write_bytes(damaged)
        try:
            load(tmp_path / "t.parquet")
        except SourceError as error:
            failed += 1
            assert "\n" not in str(error)
    assert failed > 20


def test_a_parquet_file_that_misleads_pandas_is_one_sentence(tmp_path):
    table = pa.Table.from_pandas(small()).replace_schema_metadata({"pandas": "{}"})
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(SourceError, match="is not a table that can be read: "):
        load(tmp_path / "t.parquet")


def test_an_empty_table_is_one_sentence(tmp_path):
    for kind in ("csv", "parquet"):
        path = write_table(tmp_path / f"t.{kind}", small().head(0))
        with pytest.raises(SourceError, match=f"no completed run in {path}$"):
            load(path)


# === Iterations =================================================================================
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"iteration": None}, "iteration is missing"),
        ({"iteration": "x"}, "iteration is 'x', not a number"),
        ({"iteration": 3}, "r0 has iteration 3 twice"),
        ({"time/iteration": 0}, "time/iteration is 0.0, not a number above"),
        ({"time/elapsed": np.inf}, "time/elapsed is inf, not a number above"),
        ({"time/elapsed": "soon"}, "time/elapsed is 'soon', not a number above"),
        ({"global_step": -1}, "global_step is -1.0, not a whole number above 0"),
        ({"charts/episodic_return": "inf"}, "charts/episodic_return is inf, not a number"),
        ({"time/iteration": pd.Timedelta(1, "s")}, "time/iteration is "),
        ({"losses/entropy": [1.0, 2.0]}, "losses/entropy is "),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_iterations_that_cannot_be_are_one_sentence(tmp_path, kind, change, reason):
    iterations = foreign_iterations(small())
    [(name, value)] = change.items()
    iterations[name] = pd.Series([value] * len(iterations))
    write_study(tmp_path, small(), iterations, kind)
    with pytest.raises(SourceError, match=f"iterations.{kind}: {reason}") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_iterations_may_have_gaps_and_need_no_more_than_the_columns_in_bold(tmp_path):
    assert [x.name for x in ITERATIONS if x.must == "table"] == ["run", "iteration"]
    for kind in ("csv", "parquet"):
        iterations = foreign_iterations(small())
        returns = iterations["charts/episodic_return"].where(iterations["iteration"] % 2 == 0)
        iterations["charts/episodic_return"] = (
            returns if kind == "parquet" else returns.fillna("nan")
        )
        data = load(write_study(tmp_path / kind, small(), iterations, kind))
        assert data.iterations["charts/episodic_return"].isna().sum() == 8 * 6
        assert list(data.iterations) == [x.name for x in ITERATIONS]
        write_study(tmp_path / kind, small(), iterations.drop(columns="iteration"), kind)
        with pytest.raises(SourceError, match=f"iterations.{kind} has no column iteration"):
            load(tmp_path / kind)


def test_what_a_table_lacks_of_returns_comes_from_its_iterations(tmp_path):
    iterations = foreign_iterations(small(), 12)
    late = iterations["iteration"] > 9
    iterations.loc[late, "charts/episodic_return"] = np.nan
    shuffled = iterations.sample(frac=1, random_state=0)
    bare = small().drop(columns=["num_iterations", "final_return"])
    runs = load(write_study(tmp_path / "bare", bare, shuffled)).runs
    ends = iterations[iterations["iteration"] == 9].set_index("run")["charts/episodic_return"]
    assert runs.set_index("run")["final_return"].to_dict() == ends.to_dict()
    assert (runs["best_return"] >= runs["final_return"]).all()
    assert runs["num_iterations"].tolist() == [12] * 8  # so that `total` counts
    given = small(best_return=alternate(99, None), num_iterations=20)
    runs = load(write_study(tmp_path / "given", given, iterations)).runs
    assert runs["final_return"].tolist() == list(range(8))
    assert runs["num_iterations"].tolist() == [20] * 8
    assert (runs["best_return"] == 99).tolist() == alternate(True, False)


def test_iterations_of_runs_that_are_not_there_are_said(tmp_path):
    iterations = foreign_iterations(small()).replace({"run": {"r0": "R0", "r1": "R1"}})
    data = load(write_study(tmp_path / "study", small(steady=[1] * 7 + [0]), iterations))
    assert set(data.iterations["run"]) == {f"r{i}" for i in range(2, 7)}
    assert data.notes[-1] == "runs.csv lacks 3 runs of which there are iterations"


# === Through the report =========================================================================
REPORTED: dict[str, dict[str, Any]] = {
    "final_return without iterations": {},
    "no final_return": {"final_return": None},
    "no whole trainings": {"total": None, "num_iterations": None, "final_return": None},
    "whole startups": {"startup": 9.0, "imports": 1.0, "setup": 2.0},
    "no steady state": {"steady": None},
    "no iteration 0": {"first": None},
    "no durations": {"first": None, "steady": None, "total": None},
    "some without a steady state": {"steady": alternate(1.0, None)},
    "each of its own environment": {"env_id": list("abcdefgh")},
    "platforms that share a mode": {"platform": alternate("a", "b", "c")},
    "each of its own length": {"num_iterations": range(1, 9)},
    "one mode": {"mode": "mine"},
    "one row": {"run": "the same"},
    "all resumed": {"resumed": True},
    "all synchronised, without phases": {"sync": True},
    "phases": {"sync": True, "rollout_steady": 0.05, "update_steady": alternate(0.1, 0.2)},
    "extremes": {
        "steady": alternate(2e-9, 9e8),
        "first": alternate(9e8, 2e-9),
        "final_return": alternate(-1e99, 1e99),
        "num_iterations": 1e14,
        "batch_size": 1,
        "cores": 0,
        "load": 1e99,
        "peak_host_bytes": -1e99,
    },
    "odd text": {"started": alternate("x", "9999-99-99", ""), "settings": alternate("{", "[]")},
}


@pytest.mark.parametrize("case", REPORTED)
def test_whatever_a_table_lacks_there_is_a_report(tmp_path, reported, monkeypatch, case):
    monkeypatch.setattr(figures, "saved", lambda *_, **__: b"")  # all is drawn, which is quicker
    done = reported(write_table(tmp_path / "t.parquet", small(**REPORTED[case])))
    assert done.code == 0
    text = (done.out / "report.md").read_text()
    assert "No episode ended" not in text  # which nobody can know from a table of runs
    assert "too short to compare" not in text or "steady" in REPORTED[case]
    assert "| times as long |" not in text or case != "no whole trainings"  # a column of dashes


def test_minimal_iterations_go_through_the_report(tmp_path, reported):
    runs = small().drop(columns=["total", "num_iterations", "final_return"])
    done = reported(write_study(tmp_path / "study", runs, foreign_iterations(runs)))
    assert done.code == 0
    assert "no returns" not in (done.out / "report.md").read_text()


def test_full_iterations_go_through_the_report(tmp_path, reported):
    runs = small(imports=2.0, setup=1.0)
    rows = foreign_iterations(runs)
    rows["global_step"] = 100 * (rows["iteration"] + 1)
    rows["time/iteration"] = 0.5
    rows["time/elapsed"] = 1 + 0.5 * rows["iteration"]
    done = reported(write_study(tmp_path / "study", runs, rows))
    assert done.code == 0


@pytest.mark.parametrize(
    "columns",
    [
        {"steady": 0},
        {"steady": "fast"},
        {"env_id": ""},
        {"num_iterations": None},
        {"sync": "maybe"},
    ],
)
def test_a_table_without_a_good_row_is_one_sentence_and_no_report(tmp_path, reported, columns):
    done = reported(write_table(tmp_path / "t.csv", small(**columns)))
    assert done.code == 2
    assert "(8 left out, e.g. r0 (row 1): " in done.stderr


def test_what_strangers_write_stays_data_in_the_report(tmp_path, reported):
    runs = foreign_runs(sizes=("small",), envs=ENVS[:7], repeats=1)
    assert len(runs) == 2 * len(HOSTILE)
    for name in ("env_id", "framework", "compile_mode", "cpu", "os", "started", "commit", "jax"):
        runs[name] = [HOSTILE[i // 2 % len(HOSTILE)] for i in range(len(runs))]
    runs["run"] = [f"{x}{i}" for i, x in enumerate(runs["env_id"])]
    runs["settings"] = [f'{{"a": "\\ud800\\u001b[31m{i // 2 % 2}"}}' for i in range(len(runs))]
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "secret.png").write_bytes(b"secret")
    source = write_table(tmp_path / "in" / "t.parquet", runs)
    before = {x: x.stat().st_mtime_ns for x in tmp_path.rglob("*")}
    done = reported(source)
    assert done.code == 0
    after = {
        x: x.stat().st_mtime_ns
        for x in tmp_path.rglob("*")
        if tmp_path / "a" not in (x, *x.parents)
    }
    assert after == before
    tags = Tags()
    tags.feed((done.out / "report.html").read_text())
    assert {"img", "table"} <= {tag for tag, _ in tags.found}
    assert not {"script", "iframe", "object", "link"} & {tag for tag, _ in tags.found}
    for _, attributes in tags.found:
        assert not [x for x in attributes if x.startswith("on") or x == "srcset"]
        assert attributes.get("src", "data:").startswith("data:")
        assert attributes.get("href", "#").startswith("#")
    assert done.stdout.replace("\n", "").isprintable()
    assert done.stderr.replace("\n", "").isprintable()
    assert all(len(x) < 5000 for x in done.stderr.splitlines())


def test_without_repeats_seeds_pair_runs_and_unknown_columns_are_named(tmp_path):
    table = foreign_runs().head(40).drop(columns="repeat", errors="ignore")
    table["seed"] = table.groupby([x for x in table if x in IDENTITY]).cumcount().to_numpy()
    table["final_retrun"] = 1.0
    table.to_csv(tmp_path / "mine.csv", index=False)
    data = load(tmp_path / "mine.csv")
    assert (data.runs["repeat"] == data.runs["seed"]).all()
    assert "mine.csv has columns that are not read: final_retrun" in data.notes

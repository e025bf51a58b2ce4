"""The report of every kind of result set: sections, files, sentences, and what users get wrong."""

import io
import re
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fake_runs import (
    MODES,
    WSL2,
    foreign_iterations,
    foreign_runs,
    write_grid,
    write_table,
)
from made_up import COMPILE, LINEN, NNX, TORCH, data_of, grid, only_bench

from analysis import __main__, checks, figures, learning, report, stats
from analysis.page import Table

ENVS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")
WHOLE = ["The answer", "Learning", "By environment", "Startup", "Rollout and update"]
WHOLE += ["Compile modes", "Memory", "The runs"]


def run_report(*arguments):
    """Run the command in this process, as a user would; return its status, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["analysis", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as end, warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", DeprecationWarning)
            __main__.main()
    return end.value.code, out.getvalue(), err.getvalue()


def report_of(*arguments):
    """Return report.md of a report that must succeed; --out comes last."""
    status, _, errors = run_report(*arguments)
    assert status == 0, errors
    folder = arguments[-1] if "--out" in arguments else arguments[0] / "report"
    text = (folder / "report.md").read_text()
    assert "nan" not in text.lower()
    return text


@pytest.fixture
def quick(monkeypatch):
    """All is drawn and not saved, which is quicker."""
    monkeypatch.setattr(figures, "png", lambda figure: b"")


def titles(text, level=2):
    return re.findall(rf"^{'#' * level} (.*)", text, flags=re.MULTILINE)


def section(text, title):
    return re.split(r"^##+ ", text.split(f"# {title}\n")[1], flags=re.MULTILINE)[0]


# === What a reader gets =========================================================================
def test_a_grid_gives_every_section_and_a_page_without_other_files(tmp_path):
    write_grid(tmp_path / "async", envs=ENVS[:2], sizes=("small", "medium"), repeats=3)
    write_grid(tmp_path / "sync", envs=ENVS[:2], modes=tuple(MODES), sync=True)
    status, said, _ = run_report(tmp_path, "--out", tmp_path / "out")
    assert status == 0
    text = (tmp_path / "out/report.md").read_text()
    assert titles(text) == WHOLE
    files = re.findall(r"\]\(([^)]*)\)", text)
    assert len(files) == len(set(files)) > 10
    assert all((tmp_path / "out" / file).stat().st_size > 20 for file in files)
    html = (tmp_path / "out/report.html").read_text()
    images = re.findall(r'src="data:image/png;base64,', html)
    assert len(images) == len(re.findall(r"^!\[", text, flags=re.MULTILINE)) == 3
    answer = section(text, "The answer")
    assert answer.startswith("\nOver 2 environments with the small network, 12 iterations took")
    assert "| network | script | runs | startup (s) | iteration (ms) |" in answer
    assert "times as long as ppo_linen" in said
    assert said.startswith(answer.strip().splitlines()[0].replace("\\", ""))


def test_the_headline_groups_scripts_that_cannot_be_told_apart():
    modes = {LINEN: (5.0, 0.1), NNX: (5.0, 0.1), COMPILE: (20.0, 0.2), TORCH: (5.0, 0.9)}
    runs = grid(modes, repeats=5, noise=0.02)
    assert re.fullmatch(
        r"On CartPole-v1, 100 iterations took ppo_(linen or ppo_nnx|nnx or ppo_linen) "
        r"1[45]\.\d( to 1[45]\.\d)? s, ppo_torch_compile (39|40)\.\d s and ppo_torch 9\d\.\d s\. "
        "Scripts joined by “or” cannot be told apart.",
        report.headline(only_bench(runs)),
    )
    large = grid({LINEN: (5.0, 3.0), TORCH: (5.0, 9.0)}, ENVS, repeats=5, size="large", noise=0.01)
    both = report.headline(only_bench(pd.concat([large, runs], ignore_index=True)))
    assert both.startswith("On CartPole-v1 with the small network, 100 iterations took")
    assert "Over 3 environments with the large network, 100 iterations took ppo_linen" in both
    alone = report.headline(only_bench(grid(modes)))
    assert alone.endswith("ran once: no difference in time can be claimed.")
    assert " or " not in alone
    assert "Each program ran once, so its times have no interval." in checks.odd(data_of(runs[:1]))
    short = report.headline(only_bench(runs.assign(process=np.nan)))
    assert short.startswith("On CartPole-v1, an iteration took ppo_")
    assert " ms" in short
    assert report.headline(only_bench(runs.assign(process=np.nan, steady=np.nan))) == ""


# === Platforms, baselines, older results ========================================================
@pytest.fixture(scope="module")
def two_platforms(tmp_path_factory):
    folder = tmp_path_factory.mktemp("platforms")
    modes = ("linen jit", "torch compile")
    write_grid(folder / "a", modes, ENVS[:1], repeats=3)
    write_grid(folder / "b", modes, ENVS[:1], repeats=3, os=WSL2, slowdown=3.0)
    return folder


def test_each_platform_has_a_chapter_and_they_are_compared(two_platforms, tmp_path, quick):
    text = report_of(two_platforms / "a", two_platforms / "b", "--out", tmp_path)
    assert titles(text)[:3] == ["Linux, Fast, 2 cores", "WSL2, Fast, 2 cores", "Platforms"]
    assert titles(text, 3).count("The answer") == 2
    steady = pd.read_csv(tmp_path / "tables/platforms.csv").query("value == 'steady'")
    assert list(steady["mode"]) == ["ppo_linen", "ppo_torch_compile"]
    assert steady["estimate"].to_numpy() == pytest.approx(3, rel=0.1)
    first, second = (pd.read_csv(tmp_path / f"tables/part{i}_answer.csv") for i in (1, 2))
    assert second["steady"].to_numpy() == pytest.approx(3 * first["steady"].to_numpy(), rel=0.1)
    names = ("--baseline", "ppo_torch_compile", "--baseline-platform", "WSL2")
    text = report_of(two_platforms, *names, "--out", tmp_path)
    assert "times as long as ppo_torch_compile" in text
    assert "times as long as ppo_linen" not in text
    steady = pd.read_csv(tmp_path / "tables/platforms.csv").query("value == 'steady'")
    assert steady["estimate"].to_numpy() == pytest.approx(1 / 3, rel=0.1)


def test_of_two_results_the_slower_one_is_found(tmp_path, quick):
    modes = ("linen jit",)
    write_grid(tmp_path / "old", modes, repeats=4)
    write_grid(tmp_path / "new", modes, repeats=4, slowdown=2.0, cores=64)  # on another machine
    out = tmp_path / "out"
    text = report_of(tmp_path / "new", "--against", tmp_path / "old", "--out", out)
    assert "slower" in section(text, "Against the other results")
    steady = pd.read_csv(out / "tables/against.csv").query("value == 'steady'")
    assert steady["estimate"].to_numpy() == pytest.approx(2, rel=0.1)
    cells = pd.read_csv(out / "tables/against_cells.csv")
    assert set(cells["env_id"]) == set(ENVS[:2])
    write_grid(tmp_path / "other", modes, envs=("CartPole-v0",))
    text = report_of(tmp_path / "new", "--against", tmp_path / "other", "--out", out)
    assert "No cell with the same settings is in both." in text


def test_other_results_are_compared_on_the_same_platform_if_there_are_several():
    """A faster GPU beside the processor is no progress on either."""
    modes = {LINEN: (6.0, 0.1), TORCH: (8.0, 2.0)}
    old, new = grid(modes, repeats=2), grid(modes, repeats=2, noise=0.001)
    faster = {mode: (startup / 9, steady / 9) for mode, (startup, steady) in modes.items()}
    both = pd.concat([new, grid(faster, repeats=2, platform="GPU")], ignore_index=True)
    for runs in (both, new.assign(platform="another name")):
        table = report.against_section(runs, old).blocks[0]
        assert isinstance(table, Table)
        assert table.frame["estimate"].tolist() == pytest.approx([1] * 6, rel=0.01)


def test_only_the_runs_that_were_asked_for_count(tmp_path, quick):
    runs = write_grid(tmp_path / "runs", envs=ENVS[:1])
    (runs / "CartPole-v1__linen_jit__small__1" / "run.json").unlink()
    names = [x.name for x in runs.iterdir() if "linen" in x.name or "nnx" in x.name]
    (tmp_path / "names").write_text("\n".join(names))
    text = report_of(runs, "--only-runs", tmp_path / "names", "--out", tmp_path / "out")
    assert "since the grid does not list them: 2 of the runs in" in text
    assert "1 run left out" in text
    assert "torch" not in section(text, "The answer")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--baseline", "ppo_x"], "--baseline must be one of ppo_linen or ppo_torch_compile"),
        (["--baseline-platform", "H100"], "--baseline-platform must be part of Linux, Fast"),
        (["--environments", "nothing.csv"], "is not a CSV file with the columns env_id"),
        (["--against", "nowhere"], "nowhere is not a folder of runs"),
        (["--only-runs", "nowhere"], "No such file"),
        (["--out", "/proc/report"], "/proc/report"),
    ],
)
def test_bad_usage_is_one_sentence(two_platforms, tmp_path, arguments, words):
    extra = [] if "--out" in arguments else ["--out", tmp_path]
    status, _, said = run_report(two_platforms / "a", *arguments, *extra)
    assert status == 2
    assert words in said
    assert said.count("\n") == 1


def test_a_report_goes_beside_a_table_and_else_here(tmp_path):
    (tmp_path / "mine.csv").touch()
    assert __main__.default_out([str(tmp_path)]) == tmp_path / "report"
    assert __main__.default_out([str(tmp_path / "mine.csv")]) == tmp_path / "mine-report"
    assert str(__main__.default_out(["wandb:a/b"])) == "report"
    assert str(__main__.default_out([str(tmp_path), str(tmp_path)])) == "report"


# === Tables of somebody else's ==================================================================
def test_a_foreign_table_gives_the_whole_report(tmp_path, quick):
    """Two machines, two networks, no seeds: documented columns alone."""
    envs = ("A", "B", "C")
    runs = foreign_runs(sizes=("small", "large"), envs=envs, num_iterations=50, final_return=10.0)
    runs["total"] = runs["first"] + 49 * runs["steady"]
    path = write_table(tmp_path / "mine.csv", runs)
    text = report_of(path, "--out", tmp_path / "out")
    assert titles(text)[:3] == ["A100", "H100", "Platforms"]
    assert "were numbered" in section(text, "The runs")
    table = pd.read_csv(tmp_path / "out/tables/part2_answer.csv")
    assert list(table["size"].unique()) == ["small", "large"]
    eager = table[table["mode"] == "mine eager"]
    assert eager["steady_estimate"].to_numpy() == pytest.approx(3, rel=0.1)
    assert (eager["steady_low"] > 2).all()
    assert (table["steady_environments"] == 3).all()
    even = pd.read_csv(tmp_path / "out/tables/part2_break_even.csv")
    assert set(even["sooner"]) == {"mine eager"}
    steady = pd.read_csv(tmp_path / "out/tables/platforms.csv").query("value == 'steady'")
    assert steady["estimate"].to_numpy() == pytest.approx(0.5, rel=0.1)


REPORTED: dict[str, dict[str, Any]] = {
    "no steady state": {"steady": None},
    "no durations": {"first": None, "steady": None, "total": None},
    "some without a steady state": {"steady": [1.0, None] * 4},
    "each of its own environment": {"env_id": list("abcdefgh")},
    "each of its own length": {"num_iterations": range(1, 9)},
    "all resumed": {"resumed": True},
    "all synchronised, without phases": {"sync": True},
    "phases": {"sync": True, "rollout_steady": 0.05, "update_steady": [0.1, 0.2] * 4},
    "extremes": {
        "steady": [2e-9, 9e8] * 4,
        "first": [9e8, 2e-9] * 4,
        "final_return": [-1e99, 1e99] * 4,
        "num_iterations": 1e14,
        "load": 1e99,
        "cores": 0,
        "peak_host_bytes": -1e99,
    },
    "odd text": {"started": ["x", "9999-99-99"] * 4, "settings": ["{", "[]"] * 4},
    "hostile text": {"env_id": ["<b>|$x$\x1b[31m\n# "] * 8, "mode": ["a$\\b{", "=1"] * 4},
}


@pytest.mark.parametrize("case", REPORTED)
def test_whatever_a_table_lacks_or_holds_there_is_a_report(tmp_path, quick, case):
    runs = foreign_runs(("A100",), ("small",), ENVS[:1], repeats=4, num_iterations=12)
    runs["total"] = runs["first"] + 11 * runs["steady"]
    runs = runs.assign(run=[f"r{i}" for i in range(8)], final_return=range(8))
    write_table(tmp_path / "in/runs.parquet", runs.assign(**REPORTED[case]))
    write_table(tmp_path / "in/iterations.parquet", foreign_iterations(runs))
    status, said, errors = run_report(tmp_path / "in", "--out", tmp_path / "out")
    assert status == 0, errors
    assert (said + errors).replace("\n", "").isprintable()


def test_a_report_of_many_runs_pairs_no_more_often_than_one_of_few(tmp_path, quick, monkeypatch):
    """To pair runs is what takes its time: so often for modes and sizes, and not for runs."""
    calls = []
    pair = stats.pair
    monkeypatch.setattr(stats, "pair", lambda *args: [calls.append(1), pair(*args)][1])
    modes = {f"mode {i}": (5.0, 0.1 * (i + 1)) for i in range(5)}
    counts = []
    for repeats in (2, 20):
        calls.clear()
        runs = grid(modes, ENVS[:2], repeats=repeats, noise=0.05)
        report.write_report(data_of(runs), tmp_path, report.Request(learning.load_environments()))
        counts.append(len(calls))
    assert counts[1] == counts[0]
    assert counts[0] < 100

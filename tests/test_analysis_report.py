"""The report, its sentences and its figures, for every kind of result set."""

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from fake_runs import MODES, metrics_rows, run_info, write_grid, write_run

from analysis import figures, readings, report, stats
from analysis.runs import load

mpl.use("agg")
ENVS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Two model sizes and three modes without forced sync, and eight modes with it."""
    folder = tmp_path_factory.mktemp("grid")
    write_grid(folder / "async", envs=ENVS, sizes=("small", "medium"), repeats=3)
    write_grid(folder / "sync", envs=ENVS, modes=tuple(MODES), sync=True)
    return folder


def run_report(*arguments):
    """Run the command in this process: importing matplotlib again takes seconds."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["report", *map(str, arguments)])
        try:
            report.main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def section(text, title):
    return re.split(r"^## ", text.split(f"## {title}\n")[1], flags=re.MULTILINE)[0]


# === Report =====================================================================================
def test_a_grid_gives_every_section_and_a_page_without_other_files(grid, tmp_path):
    command = [sys.executable, "-m", "analysis.report", grid, "--out", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "steady iteration (ms)" in done.stdout
    text, html = (tmp_path / "out" / f"report.{x}" for x in ("md", "html"))
    titles = re.findall("^## (.*)", text.read_text(), flags=re.MULTILINE)
    assert titles == [
        "Summary",
        "Hardware and versions",
        "Overall",
        "Startup and steady state",
        "Rollout and update",
        "Compile modes",
        "Learning",
        "Anomalies",
        "What these data cannot say",
    ]
    images = re.findall(r"!\[.*\]\((.*)\)", text.read_text())
    assert len(images) == len(set(images)) == 11
    assert all((tmp_path / "out" / image).stat().st_size > 5000 for image in images)
    assert html.read_text().count("data:image/png;base64") == 11
    assert not re.search(r'(src|href)="(?!data:)', html.read_text())
    assert "nan" not in text.read_text().lower()


def test_a_single_run_is_reported_without_claims(tmp_path):
    info = run_info()
    write_run(tmp_path, info, metrics_rows(info, np.full(12, 0.1), np.arange(12.0)))
    done = run_report(tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report" / "report.md").read_text()
    assert "No other mode was timed beside linen jit" in text
    assert "Each cell ran once" in section(text, "What these data cannot say")
    assert "nan" not in text.lower()


@pytest.mark.parametrize(("iterations", "sync"), [(1, True), (4, False)])
def test_runs_too_short_for_a_steady_state_are_reported(tmp_path, iterations, sync):
    modes = ("linen jit", "linen none", "torch compile", "torch none")
    write_grid(tmp_path, modes, iterations=iterations, repeats=1, sync=sync)
    done = run_report(tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report" / "report.md").read_text()
    assert "no steady state" in text
    assert "nan" not in text.lower()
    assert "No run is long enough to give the time of a steady iteration" in text
    assert "Whether a longer startup pays off cannot be said" in text
    limits = section(text, "What these data cannot say")
    assert ("too short for steady times of the phases" in limits) == sync
    assert ("No run has --sync-for-timing" in limits) != sync


def test_synchronised_runs_left_out_of_the_tables_are_counted(tmp_path):
    write_grid(tmp_path / "async", ("linen jit", "torch compile"), iterations=1, repeats=1)
    modes = ("linen jit", "linen none", "torch none")
    write_grid(tmp_path / "sync", modes, ("Acrobot-v1",), iterations=1, repeats=1, sync=True)
    assert run_report(tmp_path).returncode == 0
    text = (tmp_path / "report" / "report.md").read_text()
    count = "3 runs with --sync-for-timing are not in these tables but in 'Compile modes' and"
    assert count in section(text, "Summary")
    assert "## Compile modes" in text
    assert "a training of 1 iteration takes" in text
    assert "with 95% intervals" in section(text, "Overall")
    assert "No medium or large model" in text


def test_runs_in_which_no_episode_ended_are_reported(tmp_path):
    info = run_info(env_id="Freeway-MinAtar")
    write_run(tmp_path, info, metrics_rows(info, np.full(12, 0.1), np.full(12, np.nan)))
    done = run_report(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "No episode ended in Freeway-MinAtar" in (tmp_path / "report/report.md").read_text()


def write_resumed(folder, seed, mode="linen jit", **changes):
    """Write a resumed run whose durations, load and memory would stand out; return its name."""
    info = run_info(mode, seed=seed, load=99.0, resumed=[5], **changes)
    seconds = np.full(12, 0.06)
    seconds[[0, 5, 11]] = 50.0
    path = write_run(folder, info, metrics_rows(info, seconds, seed + 36.0 * np.arange(12)))
    run = json.loads((path / "run.json").read_text()) | {"peak_host_bytes": 10**15}
    (path / "run.json").write_text(json.dumps(run))
    return path.name


def test_resumed_runs_count_for_learning_and_not_for_durations(tmp_path):
    modes = ("linen jit", "linen none", "torch none")
    write_grid(tmp_path / "async", modes, ENVS[:1], repeats=4)
    write_grid(tmp_path / "sync", modes, ENVS[:1], repeats=2, sync=True)
    for seed in (1, 2):  # that differ, but are too few to say which of them is an outlier
        info = run_info("torch compile", seed=seed)
        write_run(tmp_path, info, metrics_rows(info, np.full(12, float(seed)), np.arange(12.0)))
    assert run_report(tmp_path, "--out", tmp_path / "report").returncode == 0
    before = (tmp_path / "report" / "report.md").read_text()
    names = [write_resumed(tmp_path / "async", 5), write_resumed(tmp_path / "async", 6, "nnx jit")]
    names.append(write_resumed(tmp_path / "sync", 3, sync=True))
    names.append(write_resumed(tmp_path, 3, "torch compile"))
    assert run_report(tmp_path, "--out", tmp_path / "report").returncode == 0
    after = (tmp_path / "report" / "report.md").read_text()
    for title in ("Overall", "Startup and steady state", "Rollout and update", "Compile modes"):
        assert section(after, title) == section(before, title)
    for text in (before, after):
        assert "; 6 runs with --sync-for-timing are" in section(text, "Summary")
    assert section(after, "Anomalies") == section(before, "Anomalies")
    assert "1,000,000,000" not in after
    assert (
        "4 runs were stopped and resumed, and count for learning but not for durations or memory: "
        f"{names[3]}, async/{names[0]}, async/{names[1]} and sync/{names[2]}."
        in section(after, "Summary")
    )
    _, parts, _ = report.sections(load(tmp_path), None, None)
    [overhead] = [x.figures["overhead"] for x in parts if "overhead" in x.figures]
    slots = [x.get_text() for x in overhead.axes[0].get_xticklabels()]
    assert slots == ["torch\nnone", "torch\ncompile", "linen\nnone", "linen\njit"]
    assert "| CartPole-v1 | small | linen jit | 5 |" in section(after, "Learning")
    assert "nan" not in after.lower()


@pytest.mark.parametrize("sync", [False, True])
def test_resumed_runs_alone_are_a_report_on_learning(tmp_path, sync):
    for mode in ("linen jit", "linen none"):
        for seed in range(6):
            write_resumed(tmp_path, seed, mode, sync=sync)
    done = run_report(tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report" / "report.md").read_text()
    titles = ["Summary", "Hardware and versions", "Learning", "Anomalies"]
    titles.append("What these data cannot say")
    assert re.findall("^## (.*)", text, flags=re.MULTILINE) == titles
    assert "12 runs were stopped and resumed" in text
    assert " and 2 more." in section(text, "Summary")
    assert "equivalent in 1 of 1 comparison" in text
    assert ("All runs with --sync-for-timing were resumed" in text) == sync
    for claim in ("too short", "long enough", "no steady state", "nan"):
        assert claim not in text.lower()


def test_a_report_of_a_folder_with_a_report_is_the_same(tmp_path):
    write_grid(tmp_path, repeats=1)
    first = run_report(tmp_path)
    assert run_report(tmp_path).stdout == first.stdout


@pytest.mark.parametrize("content", ["empty", "foreign", "missing"])
def test_bad_sources_are_one_sentence_and_status_2(tmp_path, content):
    if content == "foreign":
        (tmp_path / "run.json").write_text("{}")
    done = run_report(tmp_path / "missing" if content == "missing" else tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert str(tmp_path) in done.stderr


def test_a_foreign_file_of_timings_is_one_sentence(grid, tmp_path):
    (tmp_path / "timing.json").write_text("{}")
    done = run_report(grid, "--out", tmp_path, "--env-timing", tmp_path / "timing.json")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "is not what analysis.env_timing writes" in done.stderr


def test_a_folder_that_cannot_be_written_is_one_sentence(grid, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", "/proc/x"):
        done = run_report(grid, "--out", out)
        assert done.returncode == 2
        sentence = f"analysis.report: --out must be a folder to write to, not {out}\n"
        assert done.stderr == sentence


def test_rows_are_means_over_environments_and_agree_with_each_other(grid):
    runs = readings.unsynced(load(grid).runs)
    cartpole = runs["env_id"] == "CartPole-v1"
    runs["steady"] = np.where(cartpole, 0.4, 0.1)
    runs = runs[~cartpole | (runs["repeat"] == 1)]
    table = report.overview_table(runs, "linen jit").set_index(["model", "mode"])
    row = table.loc[("small", "nnx cached_partial")]
    assert row["environments"] == "3"
    assert row["steady iteration (ms)"] == f"{1000 * (0.4 * 0.1 * 0.1) ** (1 / 3):.1f}"
    assert row["steps/s"] == f"{8192 / (0.4 * 0.1 * 0.1) ** (1 / 3):,.0f}"


def test_memory_is_compared_over_environments_that_all_modes_and_sizes_have(grid):
    runs = readings.unsynced(load(grid).runs)
    medium = runs[(runs["size"] == "medium") & (runs["env_id"] == "Acrobot-v1")]
    table = report.memory_table(pd.concat([runs[runs["size"] == "small"], medium]))
    assert set(table["environments"]) == {"Acrobot-v1"}
    elsewhere = medium.assign(env_id="CartPole-v1")
    small = runs[(runs["size"] == "small") & (runs["env_id"] != "CartPole-v1")]
    table = report.memory_table(pd.concat([small, elsewhere])).set_index("model")["environments"]
    assert set(table["small"]) == {"2"}
    assert set(table["medium"]) == {"CartPole-v1"}


def test_limits_name_the_least_repeated_cells_and_lone_environments(grid):
    runs = readings.unsynced(load(grid).runs)
    lone = (runs["size"] == "medium") & (runs["env_id"] != "Acrobot-v1")
    once = (runs["env_id"] == "Acrobot-v1") & (runs["repeat"] > 1)
    text = report.limits_section(runs[~lone & ~once]).text
    assert "Some cells have 1 repeat only" in text
    assert "The medium model was run in Acrobot-v1 only." in text


def test_anomalies_are_named(tmp_path):
    write_grid(tmp_path, envs=("CartPole-v1",), modes=("linen jit", "nnx jit"), repeats=3)
    seconds = np.full(12, 0.06)
    seconds[0] = seconds[5] = 3.0
    info = run_info(seed=4, load=9.5)
    odd = write_run(tmp_path, info, metrics_rows(info, seconds, np.arange(12.0))).name
    info = run_info(seed=5, git_commit="b" * 40 + "-dirty")
    seconds = np.full(12, 0.12)
    seconds[0], seconds[11] = 3.0, 0.5
    slow = write_run(tmp_path, info, metrics_rows(info, seconds, np.arange(12.0))).name
    killed = write_grid(tmp_path / "x", envs=("CartPole-v1",), modes=("nnx none",), repeats=1)
    [path] = killed.iterdir()
    (path / "run.json").unlink()
    log = b'{"event": "end", "run": "crashed", "completed": "no", "reason": "exit status 1"}\n{"ev'
    log += b'\n{"completed": "no"}\n{"run": "x\xff"}\n'
    (tmp_path / "benchmark.jsonl").write_bytes(log)
    info = run_info(env_id="Acrobot-v1")
    rows = metrics_rows(info, np.full(12, 0.06), np.arange(12.0))
    for row in rows[7:]:
        row["losses/entropy"] = None
    diverged = write_run(tmp_path, info, rows).name
    data = load(tmp_path)
    found = report.anomalies(data, stats.speedup_table(data.runs, "steady", "linen jit"))
    again = f"{odd}: slow iteration 5 (3.00 s), perhaps compiling again"
    assert found["Slow iterations"] == [again]
    assert odd in found["Made under load"][0]
    assert found["Diverged"] == [f"{diverged}: no loss is a number from iteration 7 on"]
    assert slow in found["Outliers"][0]
    assert slow in found["Uneven runs"][0]
    assert len(found["Left out"]) == 2
    assert "crashed: exit status 1" in found["Left out"]
    assert len(found["Several versions: commits"]) == 2
    assert found["Uncommitted changes"]


def test_of_two_results_the_slower_one_is_found(tmp_path):
    modes = ("linen jit", "torch compile")
    old = write_grid(tmp_path / "old", modes=modes, repeats=3)
    new = write_grid(tmp_path / "new", modes=modes, repeats=3, slowdown=1.5)
    done = run_report(new, "--against", old, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    rows = [
        line
        for line in (tmp_path / "out" / "report.md").read_text().splitlines()
        if "| steady iteration |" in line
    ]
    assert len(rows) == 4 + 2  # per cell, and per mode over all
    assert all("| 1.50 [1.50, 1.50] | slower |" in row for row in rows)
    text = (tmp_path / "out" / "report.md").read_text()
    assert re.search(r"the verdict on the new one is: (\w[\w ]* in \d( and )?)+\.", text)


def test_two_platforms_are_compared(tmp_path):
    device: dict[str, Any] = {"device": "NVIDIA H200", "gpu": "NVIDIA H200", "driver": "580"}
    write_grid(tmp_path / "cpu", repeats=3)
    write_grid(tmp_path / "gpu", slowdown=0.5, **device)
    runs = load(tmp_path).runs
    cpu, gpu = runs["platform"].value_counts().index
    assert gpu == "Linux, NVIDIA H200, driver 580"
    sentence = readings.platforms(runs, cpu, gpu)
    assert "linen jit 2.00 [2.00, 2.00]" in sentence
    assert run_report(tmp_path, "--out", tmp_path / "out").returncode == 0
    assert "## Platforms" in (tmp_path / "out" / "report.md").read_text()


# === Sentences ==================================================================================
def test_sentences_follow_the_data(grid):
    runs = readings.unsynced(load(grid).runs)
    assert re.search(r"torch compile \(slower\)", readings.steady(runs, "linen jit"))
    assert re.search(r"linen jit \(faster\)", readings.steady(runs, "torch compile"))
    assert "compiling ends with iteration 0" in readings.late_compiling(runs)
    assert "still take longer" in readings.late_compiling(runs.assign(early=2 * runs["steady"]))
    assert "75% in linen jit" in readings.phases(readings.synced(load(grid).runs), "linen jit")


def test_each_environment_has_its_own_length_of_training(tmp_path):
    write_grid(tmp_path / "long", envs=("CartPole-v1",), iterations=30, repeats=3)
    write_grid(tmp_path / "short", envs=("Acrobot-v1",), iterations=12, repeats=2)
    write_grid(tmp_path / "odd", envs=("CartPole-v1",), iterations=12, repeats=2)
    runs = readings.one_length(load(tmp_path).runs)
    lengths = runs.groupby("env_id")["num_iterations"].unique().map(list)
    assert dict(lengths) == {"CartPole-v1": [30], "Acrobot-v1": [12]}
    sentence = readings.overall(runs, "linen jit")
    assert "a training of 12 iterations takes" in sentence
    assert "2 repeats, with 95% intervals. Relative to linen jit, a training of 30" in sentence
    drawn = report.overall_section(runs, "linen jit", None)
    names = ("total_12", "total_speedup_12", "total_30", "total_speedup_30")
    assert tuple(drawn.figures) == names
    assert "Training of 30 iterations" in drawn.figures["total_30"].axes[0].get_title("left")
    assert len(drawn.tables) == 2


def test_break_even_is_where_the_lines_cross(grid):
    runs = readings.unsynced(load(grid).runs)
    runs = runs[runs["mode"].isin(["linen jit", "torch compile"])].copy()
    linen = runs["mode"] == "linen jit"
    runs.loc[linen, ["startup", "steady"]] = 10.0, 1.0
    runs.loc[~linen, ["startup", "steady"]] = 4.0, 1.5
    assert "torch compile after 12 iterations" in readings.break_even(runs, "linen jit")
    assert "none starts sooner" in readings.break_even(runs, "torch compile")
    short = runs.assign(steady=runs["steady"].where(linen))
    assert "cannot be said" in readings.break_even(short, "linen jit")


def test_what_stands_behind_a_ratio_is_counted_from_its_pairs(grid):
    runs = readings.unsynced(load(grid).runs)
    torch = runs["mode"] == "torch compile"
    few = runs[~torch | ((runs["env_id"] == "Acrobot-v1") & (runs["size"] == "small"))]
    text = readings.steady(few, "linen jit")
    assert "over 1 to 3 environments, 1 to 2 model sizes and 3 repeats, with 95%" in text
    one = few[(few["repeat"] == 1) & (few["env_id"] == "Acrobot-v1") & (few["size"] == "small")]
    assert readings.steady(one, "linen jit").endswith("1 model size and 1 repeat.")
    apart = runs[torch == (runs["size"] == "small")]
    assert "has no ratio" in readings.steady(
        apart[apart["mode"] != "nnx cached_partial"], "linen jit"
    )


def test_startups_are_compared_where_all_modes_were_run(grid):
    runs = readings.unsynced(load(grid).runs)
    torch, small = runs["mode"] == "torch compile", runs["size"] == "small"
    runs.loc[~small, "startup"] = 100.0
    runs.loc[small, "startup"] = 5.0
    text = readings.startup(runs[~torch | small])
    assert "over 3 environments, 1 model size and 3 repeats" in text
    assert text.count("5.00 s") == 3
    text = readings.startup(runs[torch == small])
    assert "with the small model, in the median" in text
    assert "with the medium model, in the median" in text
    apart = torch == (runs["env_id"] == "Acrobot-v1")
    assert "cannot be compared" in readings.startup(runs[small & apart])


def test_equivalence_needs_a_baseline_and_uses_the_range_of_returns(grid):
    data = load(grid)
    runs = readings.unsynced(data.runs)
    ranges = readings.return_ranges(runs, data.iterations)
    assert ranges.loc["CartPole-v1", "high"] == pytest.approx(420, abs=30)
    assert ranges.loc["CartPole-v1", "low"] == pytest.approx(20, abs=30)
    tests = readings.equivalence_table(runs, ranges, "linen jit")
    assert len(tests) == 3 * 2 * 2
    assert tests["margin"].to_numpy() == pytest.approx(40, abs=3)
    assert set(tests["verdict"]) == {"equivalent"}
    scores = readings.score_table(runs, ranges)
    assert len(scores) == 2 * 3
    assert scores["estimate"].between(0.9, 1).all()
    assert (scores["low"] <= scores["estimate"]).all()
    alike = runs.assign(final_return=-200.0)
    tests = pd.concat([tests, readings.equivalence_table(alike, ranges, "linen jit").head(4)])
    sentence = readings.learning(tests, "linen jit")
    assert "equivalent in 12 of 12 comparisons" in sentence
    assert "In 4 comparisons more there was nothing to tell apart" in sentence
    flat = ranges.assign(low=ranges["high"])  # no environment gave two different returns
    assert readings.score_table(runs, flat).empty
    assert "The scores leave out Acrobot-v1, CartPole-v1 and" in readings.unscored(runs, flat)
    assert readings.unscored(runs, ranges) == ""
    assert readings.equivalence_table(runs, ranges, "absent").empty


# === Figures ====================================================================================
def axes_of(figure):
    return [axis for axis in figure.axes if axis.collections]


def test_durations_show_each_run_once_and_violins_where_there_are_enough(grid):
    runs = readings.unsynced(load(grid).runs)
    [axis] = axes_of(figures.durations(runs, "steady"))
    points = np.concatenate([x.get_offsets() for x in axis.collections if len(x.get_offsets()) > 1])
    assert sorted(points[:, 1]) == pytest.approx(sorted(runs["steady"]))
    assert axis.get_yscale() == "log"
    assert len(axis.collections) == 2 * 3 * 2  # points and a violin per mode and size


def test_environments_lie_by_complexity(grid, tmp_path):
    runs = readings.unsynced(load(grid).runs)
    times = {"Acrobot-v1": 1.0, "CartPole-v1": 10.0, "MountainCar-v0": 100.0}
    where = figures.place(runs, times)
    assert where.position == pytest.approx({x: i / 2 for i, x in enumerate(times)})
    assert [label for _, label in where.ticks] == ["1x", "100x"]
    rows = [{"env_id": env_id, "median": 2e-6 * x} for env_id, x in times.items()]
    (tmp_path / "timing.json").write_text(json.dumps({"environments": rows}))
    assert figures.load_complexity(tmp_path / "timing.json") == pytest.approx(times)
    assert figures.place(runs, None).ticks == []
    assert figures.place(runs, {"CartPole-v1": 1.0}).ticks == []


def test_shades_darken_with_size_and_hues_differ_by_framework():
    colours = [figures.shade("linen jit", size) for size in ("small", "medium", "large")]
    assert sorted(colours, key=sum, reverse=True) == colours
    assert len({figures.shade(x, "large") for x in ("torch none", "linen jit", "nnx jit")}) == 3


def test_numbers_in_front_of_a_speedup_are_those_of_the_table(grid):
    runs = readings.unsynced(load(grid).runs)
    table = stats.speedup_table(runs, "steady", "linen jit").groupby("candidate").last()
    figure = figures.speedups(runs, "linen jit", "steady")
    texts = {x.get_text() for axis in figure.axes for x in axis.texts}
    assert {figures.ratio_text(x) for x in table["paired"]} <= texts


def test_ratios_have_three_digits():
    assert [figures.ratio_text(x) for x in (1.0, 0.27, 0.0408)] == ["1.00x", "0.270x", "0.0408x"]


def test_a_mean_over_several_sizes_says_so(grid):
    runs = readings.unsynced(load(grid).runs)
    for part, label in [
        (runs, "geometric mean over all model sizes, 95% interval"),
        (runs[runs["size"] == "small"], "geometric mean, 95% interval"),
    ]:
        [legend] = figures.speedups(part, "linen jit", "steady").legends
        assert legend.get_texts()[-1].get_text() == label


def test_differences_are_on_a_linear_axis_with_the_mean_of_the_table(grid):
    runs = readings.unsynced(load(grid).runs)
    figure = figures.overhead_differences(runs, "linen jit")
    table = stats.difference_table(runs, "startup", "linen jit").groupby("candidate").last()
    axis = axes_of(figure)[0]
    assert axis.get_yscale() == "linear"
    assert len(axis.collections) == 2 * 2  # points per mode and size, and no violin
    assert axis.get_ylabel() == "more than linen jit (s)"
    assert {f"{readings.number(x)} s" for x in table["mean"]} <= {x.get_text() for x in axis.texts}


def test_short_runs_leave_no_blank_panel(tmp_path):
    runs = load(write_grid(tmp_path, ("linen jit", "linen none"), repeats=1, iterations=1)).runs
    for figure, panels in [(figures.overhead(runs), 2), (figures.compilation(runs), 1)]:
        assert len(axes_of(figure)) == len(figure.axes) == panels
        grid: Any = figure.axes[0].get_gridspec()
        assert grid.nrows * grid.ncols == panels


def test_curves_carry_the_last_return_on_and_begin_where_all_runs_have_one(tmp_path):
    for seed, returns in [(1, [1.0, np.nan, 3.0]), (2, [np.nan, 6.0, np.nan])]:
        for mode in ("nnx jit", "nnx cached_partial"):
            info = run_info(mode, seed=seed, iterations=3)
            write_run(tmp_path, info, metrics_rows(info, np.ones(3), np.array(returns)))
    data = load(tmp_path)
    [axis] = figures.learning_curves(data.runs, data.iterations).axes
    solid, dashed = axis.lines
    assert np.asarray(solid.get_xdata()).tolist() == [16384, 24576]
    assert (
        np.asarray(solid.get_ydata()).tolist()
        == np.asarray(dashed.get_ydata()).tolist()
        == [3.5, 4.5]
    )
    assert axis.get_title("left") == "CartPole-v1, 2 runs per mode"
    assert solid.get_linewidth() > dashed.get_linewidth()
    assert solid.get_zorder() < dashed.get_zorder()
    assert solid.get_color() != dashed.get_color()


@pytest.mark.parametrize(("repeats", "bars"), [(4, 0), (5, 1)])
def test_final_returns_have_the_interval_of_the_table_from_five_runs_on(tmp_path, repeats, bars):
    write_grid(tmp_path, ("linen jit",), ("CartPole-v1",), repeats=repeats)
    runs = load(tmp_path).runs
    [axis] = figures.final_returns(runs).axes
    estimate, low, high = stats.iqm_interval([runs["final_return"].to_numpy()])
    tick, bar = axis.lines
    assert np.asarray(tick.get_xdata()).tolist() == [estimate]
    assert np.asarray(bar.get_xdata()).tolist() == pytest.approx([low, high], nan_ok=True)
    assert np.isfinite(bar.get_xdata()).all() == bars
    text = report.return_table(runs)["final return, IQM, 95% interval"].item()
    assert text == readings.interval(estimate, low, high)


def test_every_figure_draws_inside_its_edges(grid):
    data = load(grid)
    free, synced = readings.unsynced(data.runs), readings.synced(data.runs)
    drawn = [
        figures.durations(free),
        figures.speedups(free, "linen jit"),
        figures.overhead(free),
        figures.overhead_differences(free, "linen jit"),
        figures.phases(synced, "linen jit"),
        figures.compilation(synced),
        figures.learning_curves(free, data.iterations),
        figures.final_returns(free),
    ]
    for figure in drawn:
        figure.draw_without_rendering()
        edge = figure.bbox.padded(1)
        for legend in figure.legends:
            box = legend.get_window_extent()
            assert edge.x0 <= box.x0
            assert box.x1 <= edge.x1
        for axis in figure.axes:
            assert axis.has_data()
    assert not plt.get_fignums()


def test_style_does_not_leak(grid):
    before = dict(mpl.rcParams)
    figures.durations(readings.unsynced(load(grid).runs))
    assert dict(mpl.rcParams) == before

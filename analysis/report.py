"""Turn runs into a report of tables and figures.

    python -m analysis.report RUNS [RUNS ...] [--out DIR] [--against OLD] [--baseline SCRIPT]

It prints a table and writes DIR/report.md, DIR/report.html, which needs no other file, DIR/figures
and DIR/tables. Any subset of the benchmark will do, from one run up; the report names what is
missing.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd

from analysis import anomalies, figures, learning, readings, render, study
from analysis.bench import Bench, benches, in_order, mode_order, size_order, timed
from analysis.figures import Look
from analysis.learning import Environment
from analysis.readings import counted, duration, interval, number
from analysis.render import Block, Bullets, Page, Plot, Section, Table, Text
from analysis.runs import PARTS, Data, load
from analysis.schema import SourceError
from analysis.stats import Interval

ANSWER = (
    "Startup: process start to the end of iteration 0, where everything compiles. Iteration: the "
    "mean from iteration 8 on. Brackets: 95% intervals. Return: mean over runs of the last one."
)
RETURNS = (
    "The median has its 95% interval from six runs on. Equivalent: the 90% interval of the "
    "difference of means lies within the margin."
)
MOST_CHAPTERS = 8  # benches that have one each
PART_NAMES = {"imports": "imports", "setup": "set-up", "first": "iteration 0", "rest": "later ones"}


class Request(NamedTuple):
    """What the reader asked for."""

    environments: dict[str, Environment]
    baseline: str | None = None
    baseline_platform: str | None = None  # a part of its name
    against: Data | None = None


# === Tables =====================================================================================
def table_of(
    name: str,
    caption: str,
    frame: pd.DataFrame,
    columns: dict[str, Callable[[pd.Series], str]],
    note: str = "",
) -> Table:
    """Return a table whose cells are made by a function of each row; empty columns are left out."""
    cells = {title: [cell(row) for _, row in frame.iterrows()] for title, cell in columns.items()}
    kept = {title: x for title, x in cells.items() if any(y not in ("", "-") for y in x)}
    return Table(name, caption, frame, pd.DataFrame(kept), note)


def span(prefix: str = "") -> Callable[[pd.Series], str]:
    """Return a function that writes a row's estimate, low and high, named with a prefix."""
    names = [f"{prefix}{x}" for x in ("estimate", "low", "high")]
    return lambda row: interval(*(float(row.get(name, np.nan)) for name in names))


def value(name: str, factor: float = 1) -> Callable[[pd.Series], str]:
    return lambda row: number(float(row[name]) * factor)


def text(name: str) -> Callable[[pd.Series], str]:
    return lambda row: str(row[name])


def model(frame: pd.DataFrame) -> dict[str, Callable[[pd.Series], str]]:
    """Return the column of the model size, if there are several."""
    return {"network": text("size")} if frame["size"].nunique() > 1 else {}


def answer_table(bench: Bench, environments: dict[str, Environment]) -> Table:
    frame = study.summary(bench, environments)
    lone = frame["length"].nunique() == 1
    whole = f"{counted(frame['length'], 'iteration')} (s)" if lone else "whole training (s)"
    columns = model(frame) | {
        "script": text("mode"),
        "startup (s)": value("startup"),
        "iteration (ms)": value("steady", 1000),
        f"times as long as {bench.baseline}": span("steady_"),
        "iterations": value("length") if not lone else lambda row: "",
        whole: value("process"),
        "training, times as long": span("process_"),
        "return": value("return"),
        "score": lambda row: number(row["score"]) if np.isnan(row["return"]) else "-",
    }
    envs = [str(x) for x in dict.fromkeys(bench.runs["env_id"])]
    where, note = envs[0], ANSWER
    if frame["process"].notna().any():
        note += " Whole trainings include the startup."
    if len(envs) > 1:
        where = "Geometric means over environments"
        note += " Score: 0 is an untrained agent's return, 1 the environment's reference."
        names = ["environments", "process_environments"]
        for size, counts in frame.groupby("size", sort=False)[names].max().iterrows():
            every, whole = counts
            note += f" With the {size} network: {counted([every], 'environment')}"
            note += f", whole trainings {whole}." if whole != every else "."
    return table_of("answer", f"{where}, {bench.title}", frame, columns, note)


def decision_table(bench: Bench) -> Table:
    frame = study.decisions(bench)
    rows = []
    for _, group in frame.groupby(["size", "environments"], sort=False):
        row = {"network": group["size"].iloc[0], "environments": group["environments"].iloc[0]}
        for _, case in group.iterrows():
            names = readings.join([case["mode"], *(case["ties"] or [])], "or")
            once = ", measured once" if case["ties"] is None else ""
            steps = f"{readings.compact(case['budget'])} steps"
            row[steps] = f"{names}: {duration(case['seconds'])}{once}"
        rows.append(row)
    caption = "Which script is done first, by network, environment and budget of steps, and when"
    note = (
        "From the start of the process. Of several scripts the first has the lowest mean time, and "
        "the others cannot be told from it at 95%."
    )
    for size in size_order(frame["size"]):
        lists = {x: y for x, y in study.cost_classes(bench, size).items() if "cheapest" in x}
        for name, envs in lists.items():
            note += f" By an iteration on this machine, {name} with the {size} network are "
            note += f"{readings.join(envs)}."
    flat = frame.assign(ties=frame["ties"].map(lambda x: "" if x is None else " ".join(x)))
    cells = pd.DataFrame(rows)
    if len(cells) == 1:
        cells = cells.drop(columns=["network", "environments"])
    return Table("decisions", caption, flat, cells, note)


def crossing_table(bench: Bench) -> Table:
    frame = study.crossings(bench)
    columns = model(frame) | {
        "starts sooner": text("sooner"),
        "overtaken by": text("later"),
        "after iterations": span(),
        "that is": lambda row: duration(row["seconds"]),
    }
    caption = "Break-even of every two scripts: one starts sooner, the other overtakes it"
    note = (
        "Brackets: from where on the 95% interval of their ratio does not rule out that "
        "it has happened, and from where on it says so. Pairs for which it never does are left out."
    )
    frame = frame.rename(columns={"iterations": "estimate"})
    frame = frame[np.isfinite(frame["high"].fillna(0))]
    return table_of("break_even", caption, frame, columns, note)


def return_table(bench: Bench, environments: dict[str, Environment]) -> Table:
    frame = learning.returns(bench, environments)
    columns = model(frame) | {
        "environment": text("env_id"),
        "script": text("mode"),
        "runs": text("runs"),
        "mean": value("mean"),
        "median": lambda row: interval(row["median"], row["low"], row["high"]),
        f"minus {bench.baseline}'s, 90% interval": lambda row: interval(
            row["difference"], row["difference_low"], row["difference_high"]
        ),
        "margin": value("margin"),
        "verdict": text("verdict"),
    }
    caption = f"Final returns, and their equivalence with {bench.baseline}'s"
    return table_of("returns", caption, frame, columns, RETURNS)


def target_table(bench: Bench, environments: dict[str, Environment]) -> Table:
    frame = learning.targets(bench, environments)
    columns = model(frame) | {
        "environment": text("env_id"),
        "target return": value("target"),
        "script": text("mode"),
        "runs that reached it": lambda row: f"{row['reached']} of {row['runs']}",
        "seconds": span(),
    }
    note = (
        "From the start of the process to the first iteration whose mean return reaches it: the "
        "median, and from six runs on its 95% interval. A run that never gets there counts as "
        "slower than all others."
    )
    return table_of("targets", "Time to a target return", frame, columns, note)


def last_return_table(bench: Bench, environments: dict[str, Environment]) -> Table:
    frame = learning.last_returns(bench)
    columns = model(frame) | {
        "environment": text("env_id"),
        "script": text("mode"),
        "runs": text("runs"),
        "last 100 training episodes": span("last_100_"),
        f"minus {bench.baseline}'s": span("minus_"),
        "evaluated": lambda row: str(row["evaluated"] or "-"),
        "greedy": span("greedy_"),
        "epsilon 0.05": span("noisy_"),
        "random agent": span("random_"),
    }
    note = (
        "Means over seeds with 95% intervals (Student's t; of differences, Welch's). The last 100 "
        "training episodes are worked out from the means of iterations, weighted by their "
        "episodes; they explore as training does. The others are of evaluate.py."
    )
    return table_of("last_returns", "What was learnt, by three measures", frame, columns, note)


def pace_table(bench: Bench, environments: dict[str, Environment]) -> Table:
    frame = study.pace(bench)
    columns = model(frame) | {
        "environment": text("env_id"),
        "script": text("mode"),
        "runs": text("runs"),
        "startup (s)": value("startup"),
        "a step (ms)": value("step", 1000),
        "steps per second": lambda row: number(1 / row["step"]),
        f"a step, times as long as {bench.baseline}'s": span(),
        "training": lambda row: f"{duration(row['whole'])} for {row['length']:,.0f} steps",
        f"{study.FULL:,} steps": lambda row: duration(row["full"]),
    }
    caption = "What a step of the environment costs, with all that is learnt from it"
    note = (
        "A step is of iterations from 8 on. Trainings are whole processes; of a shorter "
        f"one, {study.FULL:,} steps are it and so many more."
    )
    return table_of("pace", caption, frame, columns, note)


def score_table(bench: Bench, environments: dict[str, Environment]) -> Table:
    frame = learning.scores(bench, environments)
    columns = model(frame) | {
        "script": text("mode"),
        "environments": text("environments"),
        "score": value("score"),
        f"minus {bench.baseline}'s": span(),
    }
    note = (
        "0 is an untrained agent's return and 1 the environment's reference; the mean over "
        "environments, and its difference with a 95% interval."
    )
    return table_of("scores", "Score over environments", frame, columns, note)


def cell_table(bench: Bench, environments: dict[str, Environment]) -> Table:
    envs = list(dict.fromkeys(bench.runs["env_id"]))
    runs = {x: bench.runs[bench.runs["env_id"] == x] for x in envs}
    parts = [
        study.summary(bench._replace(runs=y), environments).assign(env_id=x)
        for x, y in runs.items()
    ]
    frame = in_order(pd.concat(parts, ignore_index=True))
    columns = model(frame) | {
        "environment": text("env_id"),
        "script": text("mode"),
        "runs": text("runs"),
        "startup (s)": value("startup"),
        "iteration (ms)": value("steady", 1000),
        f"times as long as {bench.baseline}": span("steady_"),
        "iterations": value("length"),
        "whole training (s)": value("process"),
        "training, times as long": span("process_"),
        "return": value("return"),
    }
    return table_of("cells", "Every environment, network and script", frame, columns)


def machine_table(runs: pd.DataFrame) -> Table:
    frame = study.machines(runs)
    columns = {x: text(x) for x in frame if x not in ("commit", "last")}
    columns["os"] = lambda row: row["os"].split("-with")[0]
    columns["first"] = lambda row: row["first"][:16].replace("T", " ")
    columns["container"] = lambda row: "yes" if row["container"] else ""
    columns["commit"] = lambda row: (
        row["commit"][:10] + ("-dirty" * row["commit"].endswith("-dirty"))
    )
    return table_of("machines", "Hardware and versions", frame, columns)


def memory_table(bench: Bench) -> Table:
    frame = study.memory(bench)
    columns = model(frame) | {
        "script": text("mode"),
        "host (MB)": value("peak_host_bytes", 1e-6),
        "device (MB)": value("peak_device_bytes", 1e-6),
    }
    return table_of(
        "memory", "Most memory used, in the environments that all scripts have", frame, columns
    )


def startup_table(bench: Bench) -> Table:
    frame = study.startups(bench).dropna(subset=["startup"])
    columns = model(frame) | {
        "script": text("mode"),
        **{f"{PART_NAMES[x]} (s)": value(x) for x in PARTS},
        "startup (s)": value("startup"),
        f"seconds more than {bench.baseline}": span(),
    }
    return table_of("startup", "Startup and its parts", frame, columns)


def phase_table(bench: Bench) -> Table:
    frame = study.phases(bench)
    columns = model(frame) | {
        "script": text("mode"),
        "rollout (ms)": value("rollout", 1000),
        "update (ms)": value("update", 1000),
        "share of the rollout": lambda row: f"{100 * row['share']:.0f}%",
        f"rollout, times as long as {bench.synced_baseline}": span("rollout_"),
        "update, times as long": span("update_"),
    }
    return table_of("phases", "A steady iteration of synchronised runs", frame, columns)


def compile_table(bench: Bench) -> Table:
    runs = study.most_modes(pd.concat([bench.runs, bench.synced]).drop_duplicates("run"))
    frame = study.compiling(runs)
    names = {"steady": "a steady iteration", "first": "iteration 0"}
    columns = model(frame) | {
        "script": text("mode"),
        "duration": lambda row: names[row["value"]],
        "times as long": span(),
        "as": text("compiled"),
    }
    caption = "What leaving compiling out, or doing it otherwise, costs in each framework"
    return table_of("compile_modes", caption, frame, columns)


# === Sections of a bench ========================================================================
def looks_of(runs: pd.DataFrame) -> dict[str, Look]:
    frameworks = runs.drop_duplicates("mode").set_index("mode")["framework"]
    modes = mode_order(runs["mode"])
    return figures.looks(pd.DataFrame({"mode": modes, "framework": [frameworks[x] for x in modes]}))


def panels(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table with the titles of a figure's panels, one for each size."""
    return frame.assign(panel=[f"{size} network" for size in frame["size"]])


def is_lone(bench: Bench) -> bool:
    """Return whether all runs are of one environment and size."""
    return len(bench.runs[["env_id", "size"]].drop_duplicates()) == 1


def is_dqn(bench: Bench) -> bool:
    return bool((bench.runs["algorithm"] == "dqn").all())


def answer_section(bench: Bench, environments: dict[str, Environment]) -> Section:
    """Give the table, the figure and the few sentences that a reader in a hurry takes away."""
    table, looks = answer_table(bench, environments), looks_of(bench.runs)
    first = readings.first_done(study.decisions(bench))
    blocks: list[Block] = [table, *([Text(first)] if first else [])]
    if is_lone(bench):
        blocks += training_bars(bench, looks) + curve_plots(bench, "seconds", looks)
    lines, crossings = study.lines(bench), study.clear(study.crossings(study.drawn(bench)))
    if len(lines):
        figure = figures.answer(lines, study.measured(bench), study.apart(crossings), looks)
        caption = (
            "Seconds from the start of the process against iterations: a line begins at the "
            "startup and rises by a steady iteration each."
        )
        blocks.append(Plot("answer", figure, caption))
    blocks.append(Bullets("", answer_lines(bench, environments)))
    return Section("The answer", blocks)


def answer_lines(bench: Bench, environments: dict[str, Environment]) -> list[str]:
    """Return what the first table says, in sentences."""
    frame = study.summary(bench, environments)
    found = []
    for name, words in (("steady", "a steady iteration"), ("process", "a whole training")):
        columns = tuple(f"{name}_{x}" for x in Interval._fields)
        if columns[1] in frame:
            found += readings.ratios(frame, bench.baseline, words, columns)
    found += [*readings.crossings(bench), readings.noise(bench), *readings.busy(bench)]
    return [x for x in found if x]


def training_bars(bench: Bench, looks: dict[str, Look]) -> list[Block]:
    """Return bars of whole trainings, each script's seconds stacked, if their parts are known."""
    frame = study.trainings(bench).dropna(subset=["process"])
    names = {x: y for x, y in PART_NAMES.items() if x in frame and frame[x].notna().all()}
    if frame.empty or "rest" not in names:
        return []
    runs = timed(bench.runs).dropna(subset=["process"]).rename(columns={"process": "seconds"})
    runs = runs[runs["num_iterations"] == frame["length"].iloc[0]]
    figure = figures.bars(frame, names, "s", looks, runs[["size", "mode", "seconds"]])
    length = counted(frame["length"], "iteration")
    return [Plot("trainings", figure, f"Where the seconds of {length} go; rings: each run's total")]


def decision_section(bench: Bench) -> Section | None:
    blocks: list[Block] = [
        x for x in (decision_table(bench), crossing_table(bench)) if len(x.frame)
    ]
    return Section("Which script is done first", blocks) if blocks else None


def environment_section(bench: Bench) -> Section | None:
    """Compare the scripts in each environment, the cheapest first."""
    if bench.runs["env_id"].nunique() < 2:
        return None
    blocks: list[Block] = []
    titles = {"steady": "A steady iteration", "process": "A whole training"}
    for name, words in titles.items():
        frame = study.by_environment(bench, name)
        several = frame.groupby("size")["env_id"].transform("nunique") > 1
        if several.any():
            rows = panels(frame[several]).rename(columns={"env_id": "row"})
            label = f"{words}: times as long as {bench.baseline}"
            figure = figures.forest(rows, looks_of(bench.runs), label)
            caption = f"{label}, with 95% intervals; environments by what an iteration costs here"
            blocks.append(Plot(f"environments_{name}", figure, caption))
    return Section("By environment", blocks) if blocks else None


def pace_section(bench: Bench, environments: dict[str, Environment]) -> Section | None:
    """Only of DQN, which learns at every step: of PPO, an iteration is what there is to time."""
    table = pace_table(bench, environments)
    return Section("A step", [table]) if is_dqn(bench) and len(table.frame) else None


def startup_section(bench: Bench) -> Section | None:
    table = startup_table(bench)
    if table.frame.empty:
        return None
    blocks: list[Block] = [Text(readings.startup(bench))]
    names = {x: PART_NAMES[x] for x in PARTS if table.frame[x].notna().all()}
    if names:
        figure = figures.bars(table.frame, names, "s", looks_of(bench.runs))
        caption = "From the start of the process to the end of iteration 0"
        blocks.append(Plot("startup", figure, caption))
    return Section("Startup", [*blocks, table])


def phase_section(bench: Bench) -> Section | None:
    if timed(bench.synced).empty:
        return None
    table = phase_table(bench)
    parts = table.frame.assign(**{x: 1000 * table.frame[x] for x in ("rollout", "update")})
    names = {"rollout": "rollout", "update": "update"}
    figure = figures.bars(parts, names, "ms", looks_of(bench.synced))
    plot = Plot("phases", figure, table.caption)
    return Section("Rollout and update", [Text(readings.phases(bench)), plot, table])


def compile_section(bench: Bench) -> Section | None:
    table = compile_table(bench)
    if table.frame.empty:
        return None
    names = {"steady": "a steady iteration", "first": "iteration 0"}
    sizes = list(table.frame["size"])
    values = [names[x] for x in table.frame["value"]]
    titles = [x + readings.of_size(y, sizes) for x, y in zip(values, sizes, strict=True)]
    rows = table.frame.assign(panel=titles, row=table.frame["mode"])
    rows = rows.sort_values("value", ascending=False, kind="stable")
    looks = looks_of(pd.concat([bench.runs, bench.synced]))
    figure = figures.forest(rows, looks, "times as long as the compiled script of the framework")
    return Section("Compile modes", [Plot("compile_modes", figure, table.caption), table])


def curve_plots(bench: Bench, axis: str, looks: dict[str, Look]) -> list[Block]:
    """Return the learning curves of each size against seconds or steps, if there are any."""
    labels = {"seconds": "seconds from the start of the process", "steps": "environment steps"}
    blocks: list[Block] = []
    for i, size in enumerate(size_order(bench.runs["size"])):
        points = learning.learning(bench, size).dropna(subset=[axis])
        if len(points):
            named = points.rename(columns={"env_id": "panel", axis: "x", "return": "y"})
            figure = figures.curves(named, looks, labels[axis], "mean episodic return")
            caption = f"Return against {axis}, {size} network; thin lines: runs, thick: their mean"
            blocks.append(Plot(f"learning_{axis}_{i + 1}", figure, caption))
    return blocks


def band_plots(bench: Bench, axis: str, looks: dict[str, Look]) -> list[Block]:
    """Return the mean over seeds of about the last 100 episodes against seconds or steps."""
    labels = {"seconds": "seconds from the start of the process", "steps": "environment steps"}
    blocks: list[Block] = []
    for i, size in enumerate(size_order(bench.runs["size"])):
        points = learning.recent(bench, size).dropna(subset=[axis])
        if len(points):
            named = points.rename(columns={"env_id": "panel", axis: "x"})
            words = "mean return of the last 100 episodes"
            figure = figures.bands(named, looks, labels[axis], words)
            of_size = readings.of_size(size, list(bench.runs["size"]))
            caption = f"About the last 100 training episodes against {axis}{of_size}: over seeds"
            blocks.append(Plot(f"recent_{axis}_{i + 1}", figure, caption))
    return blocks


def learning_section(bench: Bench, environments: dict[str, Environment]) -> Section:
    looks, table = looks_of(bench.runs), learning.returns(bench, environments)
    blocks: list[Block] = [Text(readings.learned(table, bench))]
    if is_dqn(bench):
        blocks += band_plots(bench, "steps", looks) + band_plots(bench, "seconds", looks)
        blocks.append(last_return_table(bench, environments))
    if not is_lone(bench):
        blocks += curve_plots(bench, "seconds", looks)
    blocks += curve_plots(bench, "steps", looks)
    rows = table.dropna(subset=["difference_low", "margin"])
    if len(rows):
        names = ("difference", "difference_low", "difference_high")
        scaled = {x: rows[y] / rows["margin"] for x, y in zip(Interval._fields, names, strict=True)}
        rows = panels(rows.assign(**scaled)).rename(columns={"env_id": "row"})
        label = f"Final return minus {bench.baseline}'s, in margins"
        figure = figures.forest(rows, looks, label, reference=0, log=False, band=(-1, 1))
        caption = f"{label}, with 90% intervals: within the band it is equivalent"
        blocks.append(Plot("equivalence", figure, caption))
    tables = [target_table(bench, environments)]
    if bench.runs["env_id"].nunique() > 1:
        tables.append(score_table(bench, environments))
    blocks += [x for x in tables if len(x.frame)]
    return Section("Learning", blocks)


def return_section(bench: Bench, environments: dict[str, Environment]) -> Section | None:
    table = return_table(bench, environments)
    return Section("Final returns", [table], folded=True) if len(table.frame) else None


def memory_section(bench: Bench) -> Section | None:
    table = memory_table(bench)
    return Section("Memory", [table], folded=True) if len(table.frame) else None


def cell_section(bench: Bench, environments: dict[str, Environment]) -> Section | None:
    if is_lone(bench):
        return None
    return Section("Every cell", [cell_table(bench, environments)], folded=True)


SECTIONS: dict[str, Callable[[Bench, dict[str, Environment]], Section | None]] = {
    "answer": answer_section,
    "decisions": lambda bench, _: decision_section(bench),
    "environments": lambda bench, _: environment_section(bench),
    "pace": lambda bench, known: pace_section(bench, known),
    "startup": lambda bench, _: startup_section(bench),
    "phases": lambda bench, _: phase_section(bench),
    "compile modes": lambda bench, _: compile_section(bench),
    "learning": learning_section,
    "returns": return_section,
    "memory": lambda bench, _: memory_section(bench),
    "cells": cell_section,
}


def chapter(bench: Bench, request: Request) -> list[Section]:
    """Return all sections on one bench."""
    found = [make(bench, request.environments) for make in SECTIONS.values()]
    return [x for x in found if x]


# === Sections on all runs =======================================================================
def platform_section(several: Sequence[Bench], request: Request) -> Section | None:
    """Compare the platforms, script by script."""
    runs = pd.concat([bench.runs for bench in several])
    platforms = [str(x) for x in runs["platform"].value_counts().index]
    if len(platforms) < 2:
        return None
    wanted = request.baseline_platform
    baseline = next((x for x in platforms if wanted and wanted in x), platforms[0])
    frame = study.contenders(runs, "platform", baseline)
    if frame.empty:
        return Section("Platforms", [Text(f"No run was made alike on {readings.join(platforms)}.")])
    label = f"A steady iteration: times as long as on {baseline}"
    rows = panels(frame[frame["value"] == "steady"])
    names = [f"{x}, {y}" if y else x for x, y in zip(rows["mode"], rows["settings"], strict=True)]
    rows = rows.assign(row=names, mode=rows["platform"])
    looks = figures.looks(pd.DataFrame({"mode": platforms, "framework": platforms}))
    blocks: list[Block] = []
    if len(rows):
        blocks.append(Plot("platforms", figures.forest(rows, looks, label), label))
    caption = f"Times as long as on {baseline}, with 95% intervals, in the blocks that both have"
    return Section("Platforms", [*blocks, contender_table("platforms", caption, frame, "platform")])


def contender_table(name: str, caption: str, frame: pd.DataFrame, contender: str) -> Table:
    names = {"startup": "startup", "steady": "steady iteration", "process": "whole training"}
    columns = {contender: text(contender)} if frame[contender].nunique() > 1 else {}
    columns |= {"hyperparameters": text("settings")} if frame["settings"].nunique() > 1 else {}
    columns |= model(frame) | ({"environment": text("env_id")} if "env_id" in frame else {})
    columns |= {
        "script": text("mode"),
        "duration": lambda row: names[row["value"]],
        "times as long": span(),
        "verdict": lambda row: readings.verdict(row["low"], row["high"]),
        "blocks": text("blocks"),
    }
    return table_of(name, caption, frame, columns)


def against_section(runs: pd.DataFrame, old: pd.DataFrame) -> Section:
    """Compare two sets of results, cell by cell: the time of `runs` over that of `old`."""
    both = pd.concat([runs.assign(set="new"), old.assign(set="old")], ignore_index=True)
    both = both[both["sync"] == both["sync"].all()]
    if runs["platform"].nunique() == old["platform"].nunique() == 1:
        both = both.assign(platform="")  # a machine and another, or the same by another name
    frame = study.contenders(both, "set", "old")
    if frame.empty:
        text = "No cell with the same settings is in both."
        return Section("Against the other results", [Text(text)])
    cells = study.contenders(both, "set", "old", ("size", "env_id", "mode"))
    caption = "New over old, with 95% intervals, in the blocks that both have"
    blocks: list[Block] = [
        Text(readings.verdicts(cells)),
        contender_table("against", caption, frame, "set"),
    ]
    blocks.append(contender_table("against_cells", f"{caption}, by environment", cells, "set"))
    return Section("Against the other results", blocks)


def end_sections(data: Data, several: Sequence[Bench]) -> list[Section]:
    """Return what a reader should know of the runs themselves."""
    runs = data.runs
    words = [readings.scope(runs), readings.resumed(runs), *(f"{x}." for x in data.notes)]
    made: list[Block] = [Text(" ".join(filter(None, words))), machine_table(runs)]
    odd: list[Block] = [
        Bullets(f"{kind} ({len(lines)})", [*lines[:10], *more(lines)])
        for kind, lines in anomalies.find(data).items()
    ]
    limits = [Bullets("", readings.limits(runs, several))]
    return [
        Section("The runs", made),
        Section("Anomalies", odd or [Text("None found.")]),
        Section("What these data cannot say", limits),
    ]


def more(lines: Sequence[str]) -> list[str]:
    return [f"and {len(lines) - 10} more"] if len(lines) > 10 else []


# === The page ===================================================================================
def page(data: Data, request: Request) -> Page:
    """Return the whole report."""
    several = benches(data, request.baseline)
    sections = [x for x in (platform_section(several, request),) if x]
    for i, bench in enumerate(several[:MOST_CHAPTERS]):
        parts = chapter(bench, request)
        if len(several) > 1:
            sections.append(Section(bench.title, [Text(readings.scope(bench.runs))]))
            parts = [nested(x, f"part{i + 1}_") for x in parts]
        sections += parts
    if len(several) > MOST_CHAPTERS:
        names = readings.some([x.title for x in several[MOST_CHAPTERS:]])
        text = f"These have fewer runs, and no chapter: {names}."
        sections.append(Section("More hyperparameters and platforms", [Text(text)]))
    if request.against is not None:
        sections.append(against_section(data.runs, request.against.runs))
    envs = [str(x) for x in dict.fromkeys(data.runs["env_id"])]
    where = envs[0] if len(envs) == 1 else f"{len(envs)} environments"
    sections += end_sections(data, several)
    return Page(f"Benchmark report: {where}", sections if len(several) > 1 else ordered(sections))


def ordered(sections: Sequence[Section]) -> list[Section]:
    """Return sections with those that are folded at the end."""
    return sorted(sections, key=lambda x: x.folded)


def nested(section: Section, prefix: str) -> Section:
    """Return a section one level deeper, whose files have names of their own."""
    blocks = [
        block._replace(name=prefix + block.name) if isinstance(block, Plot | Table) else block
        for block in section.blocks
    ]
    return section._replace(level=section.level + 1, blocks=blocks)


def write_report(data: Data, out: Path, request: Request) -> str:
    """Write the report into out; return the answers, tables and sentences, as plain text."""
    made = page(data, request)
    render.write(made, out)
    tables = [(x, block) for x in made.sections for block in x.blocks if isinstance(block, Table)]
    parts = []
    for section, table in [x for x in tables if re.fullmatch(r"(part\d+_)?answer", x[1].name)]:
        lines = [line for x in section.blocks if isinstance(x, Bullets) for line in x.items]
        parts += [render.clean(table.caption), render.plain(table)]
        parts.append("\n".join(f"- {render.clean(x)}" for x in lines))
    return "\n\n".join(parts)


def default_out(sources: Sequence[str]) -> Path:
    """Return where a report goes: into a folder of runs, beside a table, or else here."""
    path = Path(sources[0])
    if len(sources) == 1 and path.is_dir():
        return path / "report"
    if len(sources) == 1 and path.is_file():
        return path.with_name(f"{path.stem}-report")
    return Path("report")


def main() -> None:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m analysis.report", description=lines[0])
    parser.add_argument("runs", nargs="+", help="folder, table, or wandb:entity/project")
    parser.add_argument("--out", type=Path, help="folder to write to; default RUNS/report")
    parser.add_argument("--against", metavar="OLD", help="older results to compare with")
    words = "script, as the tables name it, that the others are compared with; default ppo_linen"
    parser.add_argument("--baseline", metavar="SCRIPT", help=words)
    words = "platform, or a part of its name, that the others are compared with"
    parser.add_argument("--baseline-platform", metavar="TEXT", help=words)
    words = "CSV file of returns, targets and margins; default analysis/environments.csv"
    parser.add_argument("--environments", metavar="FILE", default=learning.ENVIRONMENTS, help=words)
    words = "file of names, a line each: of the folder's runs only these count"
    parser.add_argument("--only-runs", metavar="FILE", type=Path, help=words)
    args = parser.parse_args()
    mpl.use("agg")
    render.forgive_terminals()
    try:
        only = args.only_runs.read_text().splitlines() if args.only_runs else None
        data = load(args.runs if len(args.runs) > 1 else args.runs[0], only=only)
        if only:
            print(*(f"{note}." for note in data.notes), sep="\n")
        check_names(args, data.runs)
        old = load(args.against) if args.against else None
        known = learning.load_environments(args.environments)
        out = args.out or default_out(args.runs)
        request = Request(known, args.baseline, args.baseline_platform, old)
        print(write_report(data, out, request))
    except (SourceError, OSError) as error:
        print(f"analysis.report: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    for name, reason in data.left_out.items():
        print(f"left out {name}: {reason}", file=sys.stderr)
    print(f"\nReport: {out / 'report.html'}")


def check_names(args: argparse.Namespace, runs: pd.DataFrame) -> None:
    """Raise SourceError for a baseline that was not run."""
    modes = mode_order(runs["mode"])
    if args.baseline and args.baseline not in modes:
        raise SourceError(f"--baseline must be one of {readings.join(modes, 'or')}")
    platforms = list(dict.fromkeys(runs["platform"]))
    if args.baseline_platform and not any(args.baseline_platform in x for x in platforms):
        raise SourceError(f"--baseline-platform must be part of {readings.join(platforms, 'or')}")


if __name__ == "__main__":
    main()

"""The tables of the report, as data: where the numbers come from, and the cells of each row."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import learning, measures, races
from analysis.formatting import NOT_TOLD_APART, WIDE, interval, number, pluralize, ratio
from analysis.measures import Experiment
from analysis.page import Table
from analysis.schema import SourceError
from analysis.stats import Interval

Cell = Callable[[pd.Series], str]
# The first columns of every table that has them.
KEYS = {"platform": "platform", "hyperparameters": "settings", "network": "size"}
KEYS |= {"environment": "env_id", "script": "mode"}
TIMES = {"startup": "startup", "steady": "steady iteration", "process": "whole training"}
TIMES |= {"total": "training without imports"}
PHASES = ("rollout_steady", "update_steady")
IF_SEVERAL = ("hyperparameters", "network", "iterations")  # need not say one thing in every row


def span(prefix: str = "") -> Cell:
    """Return a function that writes a row's estimate, low and high, named with a prefix."""
    names = [f"{prefix}{x}" for x in ("estimate", "low", "high")]
    return lambda row: interval(*(float(row[name]) for name in names))


def times(prefix: str) -> Cell:
    """Return a function that writes a ratio of durations, as span() does other numbers."""
    names = [f"{prefix}{x}" for x in ("estimate", "low", "high")]
    return lambda row: ratio(*(float(row[name]) for name in names))


def value(name: str, factor: float = 1) -> Cell:
    return lambda row: number(float(row[name]) * factor)


def text(name: str) -> Cell:
    return lambda row: str(row[name])


def table_of(
    name: str, caption: str, frame: pd.DataFrame, columns: dict[str, Cell], note: str = ""
) -> Table:
    """Return a table whose cells are made by a function of each row; empty columns are left out."""
    keys = {title: text(x) for title, x in KEYS.items() if x in frame}
    kept = {}
    for title, cell in (keys | columns).items():
        cells = [cell(row) for _, row in frame.iterrows()]
        if set(cells) - {"", "-"} and (title not in IF_SEVERAL or len(set(cells)) > 1):
            kept[title] = cells
    return Table(name, caption, frame, pd.DataFrame(kept), note)


def texts(frame: pd.DataFrame) -> pd.Series:
    """Return each row's estimate and interval as text."""
    return pd.Series([span()(row) for _, row in frame.iterrows()], frame.index, dtype="str")


def across(frame: pd.DataFrame, text: pd.Series, keys: list[str], column: str) -> pd.DataFrame:
    """Return a text per row of a frame, with a column for each value of one of its columns.

    keys are the columns that tell the rows. All come in the frame's order.
    """
    wide = frame.assign(text=text).pivot(index=keys, columns=column, values="text")
    wide = wide[list(frame[column].unique())].reset_index()
    return frame[keys].drop_duplicates().merge(wide, on=keys).fillna("-")


# === Of an experiment ===========================================================================
class Declared(NamedTuple):
    frame: Callable[[Experiment], pd.DataFrame]
    caption: str  # here and in titles of columns, {baseline} and the like are filled in
    columns: dict[str, Cell]
    note: str = ""


def make(name: str, experiment: Experiment) -> Table:
    """Return one of TABLES."""
    declared = TABLES[name]
    frame = declared.frame(experiment)
    envs = list(dict.fromkeys(experiment.runs["env_id"]))
    lengths = frame["length"].dropna().unique() if "length" in frame else []
    names = {
        "title": experiment.title,
        "baseline": experiment.baseline,
        "where": envs[0] if len(envs) == 1 else "Geometric means over environments",
        "training": pluralize(lengths, "iteration") if len(lengths) == 1 else "training",
    }
    titles = dict(declared.columns)
    for name_of_whole, of_whole in WHOLE.items():
        if name_of_whole in frame:
            titles |= of_whole
    columns = {title.format(**names): cell for title, cell in titles.items()}
    made = table_of(name, declared.caption.format(**names), frame, columns, declared.note)
    if made.cells.map(lambda x: x.endswith(NOT_TOLD_APART)).any(axis=None):
        return made._replace(note=f"{made.note} {WIDE_NOTE}".strip())
    return made


def cells(experiment: Experiment) -> pd.DataFrame:
    """Return the durations in each environment, if there are several."""
    runs = experiment.runs if experiment.runs["env_id"].nunique() > 1 else experiment.runs.head(0)
    return durations(runs, experiment.baseline, ("size", "env_id"))


def durations(runs: pd.DataFrame, baseline: str, by: tuple[str, ...] = ("size",)) -> pd.DataFrame:
    """Return measure() of startup, iteration and the whole, be that known with imports or not."""
    values = ("startup", "steady", measures.whole(runs) or "process")
    return measures.summarize(runs, values, baseline, by)


DURATIONS = {
    "runs": text("runs"),
    "startup (s)": value("startup"),
    "iteration (ms)": value("steady", 1000),
    "times as long as {baseline}": times("steady_"),
    "iterations": lambda row: f"{row['length']:,.0f}",
}
# Of whole trainings, by the column that a table of durations has of them.
WHOLE = {
    "process": {
        "{training} (s)": value("process"),
        "training, times as long": times("process_"),
    },
    "total": {
        "{training} without imports (s)": value("total"),
        "training without imports, times as long": times("total_"),
    },
}
WIDE_NOTE = (
    f"{NOT_TOLD_APART.capitalize()}: the interval holds 1, and its ends differ more than "
    f"{WIDE}-fold."
)
TABLES = {
    "answer": Declared(
        lambda experiment: durations(experiment.runs, experiment.baseline),
        "{where}, {title}",
        DURATIONS,
        "Startup: process start to the end of iteration 0, where everything compiles. Iteration: "
        "the mean from iteration 8 on. Training: the whole process. Brackets: 95% intervals.",
    ),
    "cells": Declared(
        cells,
        "Every environment, network and script",
        DURATIONS,
    ),
    "startup": Declared(
        measures.startups,
        "Startup and its parts",
        {
            "imports (s)": value("imports"),
            "set-up (s)": value("setup"),
            "iteration 0 (s)": value("first"),
            "startup (s)": value("startup"),
            "seconds more than {baseline}": span(),
            "iterations 1 to 7 (ms)": value("early", 1000),
        },
    ),
    "break_even": Declared(
        measures.crossings,
        "Break-even: one starts sooner, the other overtakes it",
        {
            "starts sooner": text("sooner"),
            "overtaken by": text("later"),
            "after iterations": span(),
            "that is (s)": value("seconds"),
        },
        "In the brackets the 95% interval of their ratio does not tell which is ahead.",
    ),
    "phases": Declared(
        lambda experiment: measures.summarize(experiment.synced, PHASES, experiment.baseline),
        "A steady iteration of synchronised runs",
        {
            "rollout (ms)": value("rollout_steady", 1000),
            "update (ms)": value("update_steady", 1000),
            "rollout, times as long as {baseline}": times("rollout_steady_"),
            "update, times as long": times("update_steady_"),
        },
    ),
    "compile_modes": Declared(
        measures.compiling,
        "What leaving compiling out, or doing it otherwise, costs in each framework",
        {
            "a steady iteration, times as long": times("steady_"),
            "iteration 0, times as long": times("first_"),
            "as": text("compiled"),
        },
    ),
    "returns": Declared(
        lambda experiment: learning.returns(experiment, learning.load_environments()),
        "Final returns, and their equivalence with {baseline}'s",
        {
            "runs": text("runs"),
            "mean": value("mean"),
            "median": span(),
            "mean minus {baseline}'s, 90% interval": span("minus_"),
            "margin": value("margin"),
            "verdict": text("verdict"),
        },
        "Equivalent: the 90% interval lies within the margin. Where most runs reach a cap and some "
        "miss it, that is claimed wrongly too often: with five runs of CartPole-v1 25 times in "
        "100, and not 5, and more often where a miss falls lower.",
    ),
    "last_returns": Declared(
        learning.last_returns,
        "What was learnt, by three measures",
        {
            "runs": text("runs"),
            "last 100 training episodes": span("last_100_"),
            "minus {baseline}'s": span("minus_"),
            "evaluated": lambda row: str(row["evaluated"] or "-"),
            "greedy": span("greedy_"),
            "epsilon 0.05": span("noisy_"),
            "random agent": span("random_"),
        },
        "Means over seeds. Training episodes explore; the others are of evaluate.py.",
    ),
    "targets": Declared(
        lambda experiment: learning.targets(experiment, learning.load_environments()),
        "Time to a target return",
        {
            "target return": value("target"),
            "runs that reached it": lambda row: f"{row['reached']} of {row['runs']}",
            "seconds": span(),
        },
        "Medians, to the first iteration whose mean return reaches it. A run that never gets there "
        "counts as slower than all others.",
    ),
    "memory": Declared(
        measures.memory,
        "Most memory used, in the environments that all scripts have",
        {
            "host (MB)": value("peak_host_bytes", 1e-6),
            "device (MB)": value("peak_device_bytes", 1e-6),
        },
    ),
}


# === Of races ===================================================================================
def race_table(path: Path, name: str, baseline: str | None = None) -> Table:
    """Return a row for each program of a race: its time, and how many times another's that is.

    The other is the race's first, unless it is named.
    """
    found = races.named(path)
    if name not in found:
        raise SourceError(f"{path} has no race {name}")
    times = found[name].times()
    first = baseline or found[name].first()
    if first not in times:
        raise SourceError(f"the race {name} of {path} has no program {first}")
    rows = [
        (program, 1000 * times[program].median(), *races.ratio_of(times[program], times[first]))
        for program in times
    ]
    frame = pd.DataFrame(rows, columns=["program", "ms", *Interval._fields])
    columns = {
        "program": text("program"),
        "an iteration (ms)": value("ms"),
        f"times as long as {first}": lambda row: "1.00" if row["program"] == first else span()(row),
    }
    return table_of("race", name, frame, columns)


# === Of all runs ================================================================================
def contender_table(name: str, caption: str, frame: pd.DataFrame) -> Table:
    """How long platforms, or new and old results, take over each other."""
    columns = {
        "duration": lambda row: TIMES[row["value"]],
        "times as long": times(""),
        "verdict": verdict,
        "blocks": text("blocks"),
    }
    return table_of(name, caption, frame, columns)


def verdict(row: pd.Series) -> str:
    if np.isnan(row["low"]):
        return "no interval, so no claim"
    if row["low"] > 1:
        return "slower"
    return "faster" if row["high"] < 1 else "no clear difference"


def machine_table(runs: pd.DataFrame) -> Table:
    """Return a row for each machine and its versions.

    A script records no version of what it does not import. It ran with the one that others record
    of this package on the same machine, if that is one.
    """
    machine = ["platform", "os", "container", "commit", "python"]
    packages = ["torch", "jax", "flax"]
    runs = runs.assign(**runs.groupby(machine)[packages].transform(only_version))
    groups = runs.groupby([*machine, *packages], sort=False, as_index=False)
    frame = groups.agg(runs=("run", "size"), first=("started", "min"), last=("started", "max"))
    columns = {x: text(x) for x in ("python", "torch", "jax", "flax", "runs")} | {
        "os": lambda row: row["os"].split("-with")[0],
        "first": lambda row: row["first"][:16].replace("T", " "),
        "container": lambda row: "yes" if row["container"] else "",
        "commit": lambda row: row["commit"][:10] + row["commit"][40:],  # -dirty
    }
    return table_of("machines", "Hardware and versions", frame, columns)


def only_version(versions: pd.Series) -> pd.Series:
    known = set(versions) - {""}
    return versions.replace("", known.pop()) if len(known) == 1 else versions


def scope(runs: pd.DataFrame) -> str:
    """Say what was run."""
    of = f"{pluralize([len(runs)], 'run')} of {pluralize([runs['mode'].nunique()], 'script')}"
    envs = pluralize([runs["env_id"].nunique()], "environment")
    sizes = pluralize([runs["size"].nunique()], "network size")
    cells = runs.groupby(["env_id", "size", "mode", "sync"])["repeat"].nunique()
    length = pluralize(runs["num_iterations"], "iteration")
    found = f"{of} in {envs}, {sizes}, {pluralize(cells, 'repeat')} each, of {length}."
    if runs["resumed"].any():
        resumed = pluralize([runs["resumed"].sum()], "run")
        found += f" {resumed} stopped and resumed: without durations."
    return found

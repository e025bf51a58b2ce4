"""Make the report tables: compute the numbers, and format the cells."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import learning, measures, races
from analysis.formatting import NOT_SIGNIFICANT, WIDE, interval, number, pluralize, ratio
from analysis.measures import Experiment
from analysis.page import Table
from analysis.schema import SourceError
from analysis.stats import Interval

Cell = Callable[[pd.Series], str]
# Key columns, title -> column. Every table starts with the key columns that its frame has.
KEYS = {"platform": "platform", "hyperparameters": "settings", "network": "size"}
KEYS |= {"environment": "env_id", "script": "mode"}
TIMES = {"startup": "startup", "steady": "steady iteration", "process": "entire training"}
TIMES |= {"total": "training without imports"}
PHASES = ("rollout_steady", "update_steady")
# Columns that are omitted if all rows have the same value.
IF_SEVERAL = ("hyperparameters", "network", "iterations")


def span(prefix: str = "") -> Cell:
    """Return a function that formats the estimate and interval in the columns with a prefix."""
    names = [f"{prefix}{x}" for x in ("estimate", "low", "high")]
    return lambda row: interval(*(float(row[name]) for name in names))


def multiple(prefix: str = "") -> Cell:
    """Return a function like span(), but for a ratio of durations."""
    names = [f"{prefix}{x}" for x in ("estimate", "low", "high")]
    return lambda row: ratio(*(float(row[name]) for name in names))


def value(name: str, factor: float = 1) -> Cell:
    return lambda row: number(float(row[name]) * factor)


def text(name: str) -> Cell:
    return lambda row: str(row[name])


def table_of(
    name: str, caption: str, frame: pd.DataFrame, columns: dict[str, Cell], note: str = ""
) -> Table:
    """Return a table; each column is a function of the row, and empty columns are omitted."""
    keys = {title: text(x) for title, x in KEYS.items() if x in frame}
    kept = {}
    for title, cell in (keys | columns).items():
        cells = [cell(row) for _, row in frame.iterrows()]
        if set(cells) - {"", "-"} and (title not in IF_SEVERAL or len(set(cells)) > 1):
            kept[title] = cells
    return Table(name, caption, frame, pd.DataFrame(kept), note)


def texts(frame: pd.DataFrame, cell: Cell | None = None) -> pd.Series:
    """Return the estimate and interval of each row as text, formatted by `cell` or span()."""
    write = cell or span()
    return pd.Series([write(row) for _, row in frame.iterrows()], frame.index, dtype="str")


def across(frame: pd.DataFrame, text: pd.Series, keys: list[str], column: str) -> pd.DataFrame:
    """Return a table with a row for each value of keys, and a column for each value of `column`.

    Rows and columns keep the order of the frame.
    """
    wide = frame.assign(text=text).pivot(index=keys, columns=column, values="text")
    wide = wide[list(frame[column].unique())].reset_index()
    return frame[keys].drop_duplicates().merge(wide, on=keys).fillna("-")


# === Experiments ================================================================================
class Declared(NamedTuple):
    frame: Callable[[Experiment], pd.DataFrame]
    caption: str  # may contain {baseline}, {where}, {title} and {training}, as may column titles
    columns: dict[str, Cell]
    note: str = ""


def make(name: str, experiment: Experiment) -> Table:
    """Return a table from TABLES."""
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
    for column, of_training in TRAININGS.items():
        if column in frame:
            titles |= of_training
    columns = {title.format(**names): cell for title, cell in titles.items()}
    made = table_of(name, declared.caption.format(**names), frame, columns, declared.note)
    if made.cells.map(lambda x: x.endswith(NOT_SIGNIFICANT)).any(axis=None):
        return made._replace(note=f"{made.note} {WIDE_NOTE}".strip())
    return made


def cells(experiment: Experiment) -> pd.DataFrame:
    """Return the durations in each environment, if there are several."""
    runs = experiment.runs if experiment.runs["env_id"].nunique() > 1 else experiment.runs.head(0)
    return durations(runs, experiment.baseline, ("size", "env_id"))


def durations(runs: pd.DataFrame, baseline: str, by: tuple[str, ...] = ("size",)) -> pd.DataFrame:
    """Summarize the durations of startup, iterations and training."""
    values = ("startup", "steady", measures.whole(runs) or "process")
    return measures.summarize(runs, values, baseline, by)


DURATIONS = {
    "runs": text("runs"),
    "startup (s)": value("startup"),
    "time per iteration (ms)": value("steady", 1000),
    "time / {baseline} time": multiple("steady_"),
    "iterations": lambda row: f"{row['length']:,.0f}",
}
# Column of training durations -> columns of the table.
TRAININGS = {
    "process": {
        "{training} (s)": value("process"),
        "training time / {baseline} time": multiple("process_"),
    },
    "total": {
        "{training} without imports (s)": value("total"),
        "training time without imports / {baseline} time": multiple("total_"),
    },
}
WIDE_NOTE = (
    f"{NOT_SIGNIFICANT.capitalize()}: the interval contains 1, and its ends differ by more than "
    f"{WIDE}x."
)
TABLES = {
    "answer": Declared(
        lambda experiment: durations(experiment.runs, experiment.baseline),
        "{where}, {title}",
        DURATIONS,
        "Startup: from the launch of the process to the end of iteration 0, which includes "
        "compiling. Time per iteration: mean over iterations 8 and later. Training: the entire "
        "process. Brackets: 95% intervals.",
    ),
    "cells": Declared(
        cells,
        "All environments, networks and scripts",
        DURATIONS,
    ),
    "startup": Declared(
        measures.startups,
        "Start-up and its parts",
        {
            "imports (s)": value("imports"),
            "set-up (s)": value("setup"),
            "iteration 0 (s)": value("first"),
            "startup (s)": value("startup"),
            "difference from {baseline} (s)": span(),
            "iterations 1 to 7 (ms)": value("early", 1000),
        },
    ),
    "break_even": Declared(
        measures.crossings,
        "Break-even: when compiled scripts, which start later, overtake the others",
        {
            "starts sooner": text("sooner"),
            "overtaken by": text("later"),
            "after iteration": span(),
            "after (s)": value("seconds"),
        },
        "Between the ends of the interval, the total times do not differ significantly.",
    ),
    "phases": Declared(
        lambda experiment: measures.summarize(experiment.synced, PHASES, experiment.baseline),
        "Rollout and update of a steady iteration, in runs with --sync-for-timing",
        {
            "rollout (ms)": value("rollout_steady", 1000),
            "update (ms)": value("update_steady", 1000),
            "rollout time / {baseline} time": multiple("rollout_steady_"),
            "update time / {baseline} time": multiple("update_steady_"),
        },
    ),
    "compile_modes": Declared(
        measures.compiling,
        "Effect of compilation in each framework",
        {
            "compared with": text("compiled"),
            "time / compiled time, steady iteration": multiple("steady_"),
            "time / compiled time, iteration 0": multiple("first_"),
        },
    ),
    "returns": Declared(
        lambda experiment: learning.returns(experiment, learning.load_environments()),
        "Final returns, and whether they are equivalent to those of {baseline}",
        {
            "runs": text("runs"),
            "mean": value("mean"),
            "median": span(),
            "mean - {baseline} mean, 90% interval": span("minus_"),
            "margin": value("margin"),
            "verdict": text("verdict"),
        },
        "Equivalent: the 90% interval is within the margin. If most runs reach a cap and some miss "
        "it, this test is too permissive: with five runs on CartPole-v1, it errs in 25% of the "
        "cases instead of 5%.",
    ),
    "last_returns": Declared(
        learning.last_returns,
        "Returns in training and in evaluation",
        {
            "runs": text("runs"),
            "last 100 training episodes": span("last_100_"),
            "difference from {baseline}": span("minus_"),
            "evaluated": lambda row: str(row["evaluated"] or "-"),
            "greedy": span("greedy_"),
            "epsilon 0.05": span("noisy_"),
            "random agent": span("random_"),
        },
        "Means over seeds. Agents explore in training episodes; evaluate.py measured the other "
        "returns.",
    ),
    "targets": Declared(
        lambda experiment: learning.targets(experiment, learning.load_environments()),
        "Time to a target return",
        {
            "target return": value("target"),
            "runs that reached it": lambda row: f"{row['reached']} of {row['runs']}",
            "seconds": span(),
        },
        "Median time to the first iteration whose mean return reaches the target. A run that does "
        "not reach it counts as slower than all others.",
    ),
    "memory": Declared(
        measures.memory,
        "Peak memory, in the environments that all scripts have in common",
        {
            "host (MB)": value("peak_host_bytes", 1e-6),
            "device (MB)": value("peak_device_bytes", 1e-6),
        },
    ),
}


# === Races ======================================================================================
def race_table(path: Path, name: str, baseline: str | None = None) -> Table:
    """Return a row per program in a race: its time, and the ratio to the baseline time.

    The default baseline is the first program of the race.
    """
    found = races.named(path)
    if name not in found:
        raise SourceError(f"{path} has no race '{name}'")
    times = found[name].times()
    first = baseline or found[name].first()
    if first not in times:
        raise SourceError(f"race '{name}' in {path} has no program '{first}'")
    rows = [
        (program, 1000 * times[program].median(), *races.ratio_of(times[program], times[first]))
        for program in times
    ]
    frame = pd.DataFrame(rows, columns=["program", "ms", *Interval._fields])
    columns = {
        "program": text("program"),
        "time per iteration (ms)": value("ms"),
        f"time / {first} time": lambda row: "1.00×" if row["program"] == first else multiple()(row),
    }
    return table_of("race", name, frame, columns)


# === All runs ===================================================================================
def contender_table(name: str, caption: str, frame: pd.DataFrame) -> Table:
    """Return a table of ratios between platforms, or between new and old results."""
    columns = {
        "duration": lambda row: TIMES[row["value"]],
        "ratio": multiple(""),
        "verdict": verdict,
        "blocks": text("blocks"),
    }
    return table_of(name, caption, frame, columns)


def verdict(row: pd.Series) -> str:
    if np.isnan(row["low"]):
        return "too few runs"
    if row["low"] > 1:
        return "slower"
    return "faster" if row["high"] < 1 else "no significant difference"


def machine_table(runs: pd.DataFrame) -> Table:
    """Return a row per machine and set of package versions.

    A script does not record the versions of packages that it does not import. If all other runs on
    the machine have the same version, use that version.
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
        "commit": lambda row: row["commit"][:10] + row["commit"][40:],  # keep "-dirty"
    }
    return table_of("machines", "Hardware and versions", frame, columns)


def only_version(versions: pd.Series) -> pd.Series:
    known = set(versions) - {""}
    return versions.replace("", known.pop()) if len(known) == 1 else versions


def threads(runs: pd.DataFrame) -> str:
    """Return a sentence with the number of PyTorch threads of each script."""
    found = runs.dropna(subset="num_threads").groupby("mode", sort=False)["num_threads"].unique()
    counts = [f"{mode} {', '.join(f'{x:g}' for x in sorted(each))}" for mode, each in found.items()]
    return f"PyTorch threads: {'; '.join(counts)}. JAX uses all cores." if counts else ""


def scope(runs: pd.DataFrame) -> str:
    """Return a sentence with the numbers of runs, scripts, environments and iterations."""
    count = pluralize([len(runs)], "run")
    scripts = pluralize([runs["mode"].nunique()], "script")
    envs = pluralize([runs["env_id"].nunique()], "environment")
    sizes = pluralize([runs["size"].nunique()], "network size")
    cells = runs.groupby(["env_id", "size", "mode", "sync"])["repeat"].nunique()
    length = pluralize(runs["num_iterations"], "iteration")
    repeats = pluralize(cells, "repeat")
    found = f"{count}: {scripts}, {envs}, {sizes}, {repeats}, {length} each."
    if runs["resumed"].any():
        found += f" Resumed runs, which have no durations: {runs['resumed'].sum()}."
    return found

"""What a reader should know before trusting the numbers, and what is held against a study."""

import json

import pandas as pd

from analysis.measures import as_object, mode_order, platforms, timed, under_load
from analysis.runs import Data
from analysis.schema import VERSIONS
from analysis.words import counted, number, some

CELL = ["platform", "settings", "sync", "mode", "env_id", "size"]
LOSSES = [f"losses/{x}" for x in ("policy_loss", "value_loss", "entropy", "td_loss", "q_value")]
ODD = 1.5  # times the median: less is noise
ONE = {"platform": "machines", "settings": "sets of hyperparameters", "commit": "commits"}


# === Of the runs ================================================================================
def odd(data: Data) -> list[str]:
    """Return what is odd about runs, a sentence for each kind."""
    runs = timed(data.runs)
    found = {
        "left out": [f"{name} ({reason})" for name, reason in data.left_out.items()],
        "diverged, with losses that are no numbers to the end": diverged(data),
        "compiling again, perhaps, with a slow iteration after the first": slow(runs, data),
        f"{ODD} times their cell's median or more in an iteration, or as much less": outliers(runs),
        "made while others used the machine too": list(under_load(runs)["run"]),
        "made with files changed since the commit": list(changed(data.runs)["run"]),
    }
    lines = [
        f"{counted([len(x)], 'run')} {words}: {some(x, 5)}." for words, x in found.items() if x
    ]
    once = runs.groupby(CELL)["repeat"].nunique()
    if len(once) and once.max() == 1:
        lines.append("Each program ran once, so its times have no interval.")
    return [*lines, *(f"{x}." for x in data.notes)]


def changed(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[runs["commit"].str.endswith("-dirty")]


def diverged(data: Data) -> list[str]:
    """Name the runs whose losses are no numbers from some iteration to the end.

    What logs no losses at all, as another library does, cannot be judged.
    """
    finite = data.iterations[data.iterations[LOSSES].notna().any(axis=1)]
    last_finite = finite.groupby("run")["iteration"].max()
    modes = data.runs.set_index("run")["mode"]
    judged = modes[modes.isin(set(modes[modes.index.isin(last_finite.index)]))]
    last = data.iterations.groupby("run")["iteration"].max()
    last = last[last.index.isin(judged.index)]
    since = last_finite.reindex(last.index, fill_value=-1) + 1
    return [f"{run} from iteration {since[run]:.0f} on" for run in last.index[since <= last]]


def slow(runs: pd.DataFrame, data: Data) -> list[str]:
    """Name the runs with an iteration after the first that took about as long as compiling."""
    rows = data.iterations.merge(runs[["run", "first"]], on="run")
    usual = rows.groupby("run")["time/iteration"].transform("median")
    extra = rows["time/iteration"] - usual
    late = rows[(rows["iteration"] > 0) & (extra > 0.25 * rows["first"]) & (extra > 3 * usual)]
    worst = late.loc[late.groupby("run")["time/iteration"].idxmax()]
    return [
        f"{x['run']} (iteration {x['iteration']:.0f}: {number(x['time/iteration'])} s)"
        for x in worst.to_dict("records")
    ]


def outliers(runs: pd.DataFrame) -> list[str]:
    """Name the runs that differ much from their cell's median, where a cell has three or more."""
    cells = runs.groupby(CELL)["steady"]
    off = (runs["steady"] / cells.transform("median"))[cells.transform("size") > 2]
    far = off[(off >= ODD) | (off <= 1 / ODD)]
    return [f"{runs.loc[i, 'run']} ({x:.2f})" for i, x in far.items()]


# === Of a study =================================================================================
def problems(data: Data) -> list[str]:
    """Return what a reader would hold against a study, in sentences; of a sound one, none."""
    settings = data.runs["settings"].map(without_length)
    runs = data.runs.assign(settings=settings, platform=platforms(data.runs))
    found = []
    if data.left_out:
        names = some(list(data.left_out), 3)
        found.append(f"{counted([len(data.left_out)], 'run')} left out: {names}")
    for name, words in ONE.items():
        if runs[name].nunique() > 1:
            found.append(f"{runs[name].nunique()} {words}, where a study has one")
    # A peer's environment lacks what it does not need.
    if any(runs.loc[runs[name] != "", name].nunique() > 1 for name in VERSIONS):
        found.append("different versions of Python or packages")
    if (runs["commit"] == "").any() or len(changed(runs)):
        found.append("runs of scripts that are not committed, so nobody can make them again")
    several = {
        "stopped and resumed": runs["resumed"].sum(),
        "made while others used the machine": len(under_load(runs)),
    }
    found += [f"{counted([count], 'run')} {words}" for words, count in several.items() if count]
    return found + missing(runs)


def without_length(settings: str) -> str:
    """Return hyperparameters without length and number of agents: a study may hold several."""
    rest = as_object(settings)
    rest.pop("total_timesteps", None)
    rest.pop("num_agents", None)
    return json.dumps(rest)


def missing(runs: pd.DataFrame) -> list[str]:
    """Name the modes that lack a run which another mode has in the same grid."""
    grid = ["sync", "env_id", "size", "num_iterations", "repeat", "num_agents"]
    # A program's agents, and processes side by side, have seeds that others need not have.
    runs = runs[~(runs["agent"] > 0) & ~runs["mode"].str.endswith(" side by side")]
    several = runs["num_agents"].notna()
    if several.any():  # then a repeat is a block of 1,000 seeds, and scripts alone have some of it
        runs = runs.assign(repeat=(runs["repeat"] - 1) // 1000)
    lines = []
    for part in (runs[~several], runs[several]):
        blocks = part[grid].drop_duplicates()
        for mode in mode_order(part["mode"]):
            lacking = len(blocks) - len(part.loc[part["mode"] == mode, grid].drop_duplicates())
            if lacking:
                lines.append(f"{mode} lacks {counted([lacking], 'run')} that others have")
    return lines

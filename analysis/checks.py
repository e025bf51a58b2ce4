"""Warn about runs that are hard to compare, and check a study before it is published."""

import json

import pandas as pd

from analysis.catalog import DIVERGED
from analysis.formatting import pluralize, some
from analysis.measures import Experiment, as_object, mode_order, timed, under_load
from analysis.runs import Data
from analysis.schema import VERSIONS

ONE = {"platform": "machines", "settings": "sets of hyperparameters", "commit": "commits"}


BY_HAND = (
    "These runs were not started by benchmark.sh, so their machine is unknown, and they are not "
    "compared with others. To make runs comparable, start them with benchmark.sh, or with "
    "RUN_INFO=$(python -m bench.machine SCRIPT) python SCRIPT."
)


# === Answer =====================================================================================
def answer_warnings(experiment: Experiment) -> list[str]:
    """Return warnings to show next to the answer."""
    found = []
    runs = timed(experiment.runs)
    loaded = len(under_load(runs))
    if loaded:
        which = f"{loaded} of {pluralize([len(runs)], 'run')}"
        found.append(
            f"Other processes used the machine when {which} started, so times may be too long. "
            "For the names of these runs, see the section \u201cThe runs\u201d."
        )
    if experiment.by_hand:
        found.append(BY_HAND)
    return found


# === Runs =======================================================================================
def run_warnings(data: Data) -> list[str]:
    """Return warnings about the runs."""
    runs = timed(data.runs)
    others = {name: reason for name, reason in data.left_out.items() if reason != DIVERGED}
    found = {
        "diverged (NaN or infinite losses or parameters) and left out": diverged(data),
        "left out": [f"{name} ({reason})" for name, reason in others.items()],
        "started while other processes used the machine": list(under_load(runs)["run"]),
        "started with uncommitted changes": list(changed(data.runs)["run"]),
    }
    lines = [
        f"{pluralize([len(x)], 'run')} {fault}: {some(x, 5)}." for fault, x in found.items() if x
    ]
    return [*lines, *(f"{x}." for x in data.notes)]


def diverged(data: Data) -> list[str]:
    return [name for name, reason in data.left_out.items() if reason == DIVERGED]


def changed(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[runs["commit"].str.endswith("-dirty")]


# === Studies ====================================================================================
def problems(data: Data) -> list[str]:
    """Return the problems found in a study, one sentence each."""
    settings = data.runs["settings"].map(without_length)
    runs = data.runs.assign(settings=settings)
    found = []
    if data.left_out:
        names = some(list(data.left_out), 3)
        found.append(f"{pluralize([len(data.left_out)], 'run')} left out: {names}")
    for name, things in ONE.items():
        if runs[name].nunique() > 1:
            found.append(f"{runs[name].nunique()} {things}, but a study must have one")
    # Programs from other libraries do not record the versions of packages that they do not use.
    if any(runs.loc[runs[name] != "", name].nunique() > 1 for name in VERSIONS):
        found.append("different versions of Python or packages")
    if (runs["commit"] == "").any() or len(changed(runs)):
        found.append("some runs used code that was not committed, so they cannot be reproduced")
    several = {
        "resumed": runs["resumed"].sum(),
        "started while other processes used the machine": len(under_load(runs)),
    }
    found += [f"{pluralize([count], 'run')} {fault}" for fault, count in several.items() if count]
    return found + missing(runs)


def without_length(settings: str) -> str:
    """Return the hyperparameters without the run length and the number of agents."""
    rest = as_object(settings)
    rest.pop("total_timesteps", None)
    rest.pop("num_agents", None)
    return json.dumps(rest)


def missing(runs: pd.DataFrame) -> list[str]:
    """Return a sentence for each script that lacks runs that another script has."""
    if runs["num_agents"].notna().any():
        return []  # variants with several agents or processes may have more seeds than others
    grid = ["sync", "env_id", "size", "num_iterations", "repeat"]
    blocks = runs[grid].drop_duplicates()
    lines = []
    for mode in mode_order(runs["mode"]):
        lacking = len(blocks) - len(runs.loc[runs["mode"] == mode, grid].drop_duplicates())
        if lacking:
            lines.append(f"{mode} lacks {pluralize([lacking], 'run')} that others have")
    return lines

"""What a reader should know before trusting the numbers, and what is held against a study."""

import json

import pandas as pd

from analysis.formatting import pluralize, some
from analysis.measures import Experiment, as_object, mode_order, platforms, timed, under_load
from analysis.runs import Data
from analysis.schema import VERSIONS

LOSSES = [f"losses/{x}" for x in ("policy_loss", "value_loss", "entropy", "td_loss", "q_value")]
ONE = {"platform": "machines", "settings": "sets of hyperparameters", "commit": "commits"}


BY_HAND = (
    "These runs were started by hand, so nothing says which machine made them, and they are kept "
    "apart from those of benchmark.sh, be it the same machine or not. To have runs compared with "
    "those, start them with benchmark.sh, or with RUN_INFO=$(python studies/machine.py SCRIPT) "
    "before python SCRIPT."
)


# === Of the answer ==============================================================================
def answer_warnings(experiment: Experiment) -> list[str]:
    """Return what a reader must know together with the answer, in sentences."""
    found = []
    runs = timed(experiment.runs)
    loaded = len(under_load(runs))
    if loaded:
        which = f"{loaded} of {pluralize([len(runs)], 'run')}"
        found.append(
            f"Others used the machine as {which} began, so these times may be too long. "
            "The report's section \u201cThe runs\u201d names some."
        )
    if experiment.by_hand:
        found.append(BY_HAND)
    return found


# === Of the runs ================================================================================
def run_warnings(data: Data) -> list[str]:
    """Return what a reader should know of the runs, a sentence for each kind."""
    runs = timed(data.runs)
    found = {
        "left out": [f"{name} ({reason})" for name, reason in data.left_out.items()],
        "diverged, with losses that are no numbers in the end": diverged(data),
        "made while others used the machine too": list(under_load(runs)["run"]),
        "made with files changed since the commit": list(changed(data.runs)["run"]),
    }
    lines = [
        f"{pluralize([len(x)], 'run')} {fault}: {some(x, 5)}." for fault, x in found.items() if x
    ]
    return [*lines, *(f"{x}." for x in data.notes)]


def changed(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[runs["commit"].str.endswith("-dirty")]


def diverged(data: Data) -> list[str]:
    """Name the runs that end with losses that are no numbers, where their mode logs losses."""
    rows = data.iterations.merge(data.runs[["run", "mode"]], on="run")
    finite = rows[LOSSES].notna().any(axis=1)
    is_logged = finite.groupby(rows["mode"]).transform("any")
    is_last = rows["iteration"] == rows.groupby("run")["iteration"].transform("max")
    return list(rows.loc[is_last & is_logged & ~finite, "run"])


# === Of a study =================================================================================
def problems(data: Data) -> list[str]:
    """Return what a reader would hold against a study, in sentences; of a sound one, none."""
    settings = data.runs["settings"].map(without_length)
    runs = data.runs.assign(settings=settings, platform=platforms(data.runs))
    found = []
    if data.left_out:
        names = some(list(data.left_out), 3)
        found.append(f"{pluralize([len(data.left_out)], 'run')} left out: {names}")
    for name, things in ONE.items():
        if runs[name].nunique() > 1:
            found.append(f"{runs[name].nunique()} {things}, where a study has one")
    # The environment of another library's program lacks what that does not need.
    if any(runs.loc[runs[name] != "", name].nunique() > 1 for name in VERSIONS):
        found.append("different versions of Python or packages")
    if (runs["commit"] == "").any() or len(changed(runs)):
        found.append("runs of scripts that are not committed, so nobody can make them again")
    several = {
        "stopped and resumed": runs["resumed"].sum(),
        "made while others used the machine": len(under_load(runs)),
    }
    found += [f"{pluralize([count], 'run')} {fault}" for fault, count in several.items() if count]
    return found + missing(runs)


def without_length(settings: str) -> str:
    """Return hyperparameters without length and number of agents: a study may hold several."""
    rest = as_object(settings)
    rest.pop("total_timesteps", None)
    rest.pop("num_agents", None)
    return json.dumps(rest)


def missing(runs: pd.DataFrame) -> list[str]:
    """Name the modes that lack a run which another mode has."""
    if runs["num_agents"].notna().any():
        return []  # agents, and processes beside each other, have seeds that others need not have
    grid = ["sync", "env_id", "size", "num_iterations", "repeat"]
    blocks = runs[grid].drop_duplicates()
    lines = []
    for mode in mode_order(runs["mode"]):
        lacking = len(blocks) - len(runs.loc[runs["mode"] == mode, grid].drop_duplicates())
        if lacking:
            lines.append(f"{mode} lacks {pluralize([lacking], 'run')} that others have")
    return lines

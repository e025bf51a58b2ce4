"""What a reader should know before trusting the numbers. README.md lists the rules."""

import pandas as pd

from analysis import readings
from analysis.bench import timed, under_load
from analysis.runs import Data

CELL = ["platform", "settings", "sync", "mode", "env_id", "size"]
LOSSES = ("policy_loss", "value_loss", "entropy", "td_loss", "q_value")
VERSIONS = {"commit": "commits", "torch": "torch", "jax": "jax", "flax": "flax"}


def find(data: Data) -> dict[str, list[str]]:
    """Return what is odd about the runs, by kind."""
    runs = timed(data.runs)
    found = {
        "Left out": [f"{name}: {reason}" for name, reason in data.left_out.items()],
        "Diverged": diverged(data.iterations),
        "Slow iterations": slow_iterations(runs, data.iterations),
        "Uneven runs": uneven(data.iterations),
        "Outliers": outliers(runs),
    }
    found["Made under load"] = [
        f"{x['run']}: {x['load']:.1f} processes wanted its {x['cores']:.0f} cores as it started"
        for _, x in under_load(runs).iterrows()
    ]
    for name, what in VERSIONS.items():
        several = sorted(data.runs[name].unique())
        if len(several) > 1:
            found[f"Several versions: {what}"] = [str(x) or "unknown" for x in several]
    changed = int(data.runs["commit"].str.endswith("-dirty").sum())
    if changed:
        what = readings.counted([changed], "run")
        found["Uncommitted changes"] = [f"{what} made with files changed since the commit"]
    return {kind: lines for kind, lines in found.items() if lines}


def diverged(iterations: pd.DataFrame) -> list[str]:
    """Name the runs whose losses are no numbers from some iteration to the end."""
    losses = [f"losses/{name}" for name in LOSSES]
    known = iterations[losses].notna().any(axis=1)
    if not known.any():  # a table from elsewhere need not have losses
        return []
    finite = iterations[known].groupby("run")["iteration"].max()
    last = iterations.groupby("run")["iteration"].max()
    since = finite.reindex(last.index, fill_value=-1) + 1
    return [
        f"{run}: no loss is a number from iteration {i:.0f} on"
        for run, i in since[since <= last].items()
    ]


def slow_iterations(runs: pd.DataFrame, iterations: pd.DataFrame) -> list[str]:
    """Name the iterations after the first that took about as long as compiling would."""
    rows = iterations.merge(runs[["run", "first"]], on="run")
    usual = rows.groupby("run")["time/iteration"].transform("median")
    extra = rows["time/iteration"] - usual
    odd = rows[(rows["iteration"] > 0) & (extra > 0.25 * rows["first"]) & (extra > 3 * usual)]
    lines = []
    for run, group in odd.groupby("run"):
        pairs = zip(group["iteration"], group["time/iteration"], strict=True)
        seconds = [f"{i:.0f} ({readings.number(x)} s)" for i, x in pairs]
        lines.append(f"{run}: slow iteration {readings.some(seconds, 5)}, perhaps compiling again")
    return lines


def uneven(iterations: pd.DataFrame) -> list[str]:
    """Name the runs whose steady iterations are longer in the mean than in the median."""
    late = iterations[iterations["iteration"] >= 8].groupby("run")["time/iteration"]
    ratio = late.mean() / late.median()
    return [
        f"{run}: the mean of the steady iterations is {x:.2f} times their median"
        for run, x in ratio[ratio > 1.1].items()
    ]


def outliers(runs: pd.DataFrame) -> list[str]:
    """Name the runs that differ from their cell's median, where a cell has three or more."""
    cells = runs.groupby(CELL)["steady"]
    off = (runs["steady"] / cells.transform("median"))[cells.transform("size") > 2]
    return [
        f"{runs.loc[i, 'run']}: its steady iteration takes {x:.2f} times its cell's median"
        for i, x in off[(off > 1.2) | (off < 1 / 1.2)].items()
    ]

"""What the agents learned: returns, their equivalence, and when they reached a target."""

import csv
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t as student

from analysis import stats
from analysis.measures import Bench, in_order, mode_order, timed
from analysis.runs import LAST_EPISODES
from analysis.schema import SourceError

ENVIRONMENTS = Path(__file__).with_name("environments.csv")


class Environment(NamedTuple):
    """What is known of an environment before any run: README.md says how it was fixed."""

    target: float  # the return that counts as learnt; NaN if none does
    margin: float  # returns that differ by less are equivalent


def load_environments(path: str | Path = ENVIRONMENTS) -> dict[str, Environment]:
    """Return what a CSV file says of each environment; raise SourceError if it cannot."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            known = {
                row["env_id"]: Environment(*(float(row[x] or "nan") for x in Environment._fields))
                for row in csv.DictReader(file)
            }
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        columns = ", ".join(("env_id", *Environment._fields))
        raise SourceError(f"{path} is not a CSV file with the columns {columns}") from None
    if any(abs(x.target) > 1e9 or not 1e-9 <= x.margin < 1e9 for x in known.values()):
        raise SourceError(f"{path} must have targets within 1e9, and margins above 0")
    return known


def learned(runs: pd.DataFrame) -> pd.DataFrame:
    """Return, of each environment and size, the runs of its commonest length that have a return."""
    runs = runs.dropna(subset=["final_return"])
    cells = [stats.of_length(cell) for _, cell in runs.groupby(["size", "env_id"], sort=False)]
    return pd.concat([runs.head(0), *cells])


# === Runs that computed the same ================================================================
def fingerprints(bench: Bench) -> pd.Series:
    """Return a hash of all that each run computed: its metrics without times.

    Without losses there is none: returns alone may be equal by a cap that all runs reach.
    """
    names = [x for x in bench.iterations if x.startswith(("charts/", "losses/"))]
    names = [x for x in names if x != "charts/SPS"]
    losses = [x for x in names if x.startswith("losses/")]
    known = bench.iterations.dropna(subset=losses, how="all")
    groups = known.sort_values("iteration").groupby("run")[["iteration", *names]]
    return pd.Series({run: hash(x.to_numpy().tobytes()) for run, x in groups}, dtype="object")


def identical(bench: Bench) -> dict[str, str]:
    """Return each mode and the first mode that computed the same in all the blocks they share.

    Two programs that give the same numbers are one observation of learning, and not two. The
    baseline comes before all others.
    """
    runs = bench.runs.assign(print=bench.runs["run"].map(fingerprints(bench)))
    keys = ["env_id", "size", "num_iterations", "repeat"]
    prints = runs.dropna(subset=["print"]).drop_duplicates([*keys, "mode"])
    table = prints.pivot(index=keys, columns="mode", values="print")
    first: dict[str, str] = {}
    order = mode_order(bench.runs["mode"])
    for mode in sorted(order, key=lambda x: x != bench.baseline):
        first[mode] = mode
        for other in [x for x in first if first[x] == x and x != mode and {x, mode} <= set(table)]:
            both = table[[other, mode]].dropna()
            if len(both) and (both[other] == both[mode]).all():
                first[mode] = other
                break
    return first


# === Final returns ==============================================================================
def returns(bench: Bench, environments: dict[str, Environment]) -> pd.DataFrame:
    """Return a row per environment, size and mode: its final returns and their test.

    Cells in which no mode has LEAST_RUNS are not there. Columns: env_id, size, mode, runs, mean,
    median with low and high, and against the baseline difference, difference_low, difference_high
    (90%), margin and verdict: "" for the baseline and without one, "as MODE" for a mode that
    computed the same as another, "no margin" if none was fixed, "all alike" if no run of any mode
    differs, or equivalence()'s.
    """
    rows = []
    same = identical(bench)
    for _, cell in learned(bench.runs).groupby(["size", "env_id"], sort=False):
        if cell["mode"].value_counts().max() < stats.LEAST_RUNS:
            continue
        known = environments.get(str(cell["env_id"].iloc[0]))
        margin = known.margin if known else np.nan
        base = cell.loc[cell["mode"] == bench.baseline, "final_return"].to_numpy()
        for mode in mode_order(cell["mode"]):
            values = cell.loc[cell["mode"] == mode, "final_return"].to_numpy()
            row = {"env_id": cell["env_id"].iloc[0], "size": cell["size"].iloc[0], "mode": mode}
            median, low, high = stats.median_interval(values)
            row |= {"runs": len(values), "mean": values.mean()}
            row |= {"median": median, "low": low, "high": high, "margin": margin, "verdict": ""}
            if same[mode] != mode and same[mode] in set(cell["mode"]):
                row["verdict"] = f"as {same[mode]}"
            elif mode != bench.baseline and len(base):
                test = stats.equivalence(base, values, margin)
                names = ("difference", "difference_low", "difference_high", "verdict")
                row |= dict(zip(names, test, strict=True))
                if cell["final_return"].nunique() == 1:
                    row["verdict"] = "all alike"
                elif np.isnan(margin):
                    row["verdict"] = "no margin"
            rows.append(row)
    columns = ["env_id", "size", "mode", "runs", "mean", "median", "low", "high", "difference"]
    columns += ["difference_low", "difference_high", "margin", "verdict"]
    return in_order(pd.DataFrame(rows, columns=columns))


def last_returns(bench: Bench) -> pd.DataFrame:
    """Return what DQN learned, with 95% intervals of the mean over seeds (Student's t).

    Columns: size, env_id, mode, num_iterations, runs, seeds evaluated, and of each measure
    (last_100, greedy, noisy, random) the estimate, low and high, named with it; of last_100 also
    the difference from the baseline's, named minus_, by Welch: seeds of two scripts are no pairs.
    """
    measures = ("last_100", "greedy", "noisy", "random")
    cell = ["size", "env_id", "num_iterations"]
    keys = [*cell, "mode"]
    rows = []
    for _, runs in bench.runs.groupby(keys, sort=False, dropna=False):
        row: dict[str, Any] = {x: runs[x].iloc[0] for x in keys} | {"runs": len(runs)}
        row["evaluated"] = int(runs["greedy_return"].notna().sum())
        for name in measures:
            values = runs[f"{name}_return"].dropna().to_numpy()
            found = stats.Interval(np.nan, np.nan, np.nan)
            if len(values):
                found = stats.mean_interval(values, ["one"] * len(values))
            if name == "random":  # all seeds' random agents play the same games
                found = found._replace(low=np.nan, high=np.nan)
            row |= {f"{name}_{x}": y for x, y in found._asdict().items()}
        others = bench.runs[(bench.runs[cell] == runs[cell].iloc[0]).all(axis=1)]
        others = others.loc[others["mode"] == bench.baseline, "last_100_return"].dropna()
        own = runs["last_100_return"].dropna()
        found = stats.Interval(np.nan, np.nan, np.nan)
        if row["mode"] != bench.baseline and min(len(own), len(others)) > 1:
            found = stats.welch(others.to_numpy(), own.to_numpy())
        row |= {f"minus_{x}": y for x, y in found._asdict().items()}
        rows.append(row)
    names = [f"{x}_{y}" for x in (*measures, "minus") for y in stats.Interval._fields]
    return in_order(pd.DataFrame(rows, columns=[*keys, "runs", "evaluated", *names]))


# === Along the way ==============================================================================
def curves(bench: Bench) -> pd.DataFrame:
    """Return the learning curves: size, env_id, mode, run, steps, seconds, return.

    seconds are from the start of the process. An iteration without the end of an episode has the
    return of the one before it.
    """
    columns = ["run", "size", "env_id", "mode", "imports"]
    rows = bench.iterations.merge(learned(bench.runs)[columns], on="run")
    rows = rows.sort_values(["run", "iteration"])
    rows["return"] = rows.groupby("run")["charts/episodic_return"].ffill()
    rows["steps"] = rows["global_step"]
    rows["seconds"] = rows["imports"] + rows["time/elapsed"]
    rows = rows.dropna(subset=["return"])
    return rows[["size", "env_id", "mode", "run", "steps", "seconds", "return"]]


def progress(bench: Bench) -> pd.DataFrame:
    """Return the mean return over seeds as training goes on, with Student's interval, at 95%.

    It is that of the iteration's episodes, and of DQN of about the last 100. Columns: size, env_id,
    mode, steps, runs, estimate, low, high. An iteration is there if all runs of the mode know it.
    """
    rows = bench.iterations.merge(bench.runs[["run", "size", "env_id", "mode"]], on="run")
    rows = rows.sort_values(["run", "iteration"])
    if (bench.runs["algorithm"] == "dqn").all():
        names = ["charts/episodic_return", "charts/episodes"]
        parts = [running_return(*x[names].to_numpy().T) for _, x in rows.groupby("run")]
        rows["return"] = np.concatenate([*parts, []])
    else:
        rows["return"] = rows.groupby("run")["charts/episodic_return"].ffill()
    cells = ["size", "env_id", "mode"]
    every = rows.groupby(cells)["run"].transform("nunique")
    points = rows.assign(every=every).groupby([*cells, "global_step", "every"], sort=False)
    table = points["return"].agg(estimate="mean", spread="std", runs="count").reset_index()
    table = table[table["runs"] == table["every"]].rename(columns={"global_step": "steps"})
    quantile = student.ppf((1 + stats.CONFIDENCE) / 2, table["runs"] - 1)
    half = quantile * table["spread"] / np.sqrt(table["runs"])
    table = table.assign(low=table["estimate"] - half, high=table["estimate"] + half)
    return table[[*cells, "steps", "runs", *stats.Interval._fields]]


def running_return(means: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return, after each iteration, the mean return of about the last LAST_EPISODES episodes.

    It is runs.last_return() at each: NaN until so many have ended.
    """
    counts = np.where(np.isnan(means), 0, np.nan_to_num(counts))
    ends = np.append(0, np.cumsum(counts))
    totals = np.append(0, np.cumsum(np.nan_to_num(means) * counts))
    known = np.append(True, np.diff(ends) > 0)  # np.interp wants episodes to rise
    before = np.interp(ends[1:] - LAST_EPISODES, ends[known], totals[known])
    return np.where(ends[1:] >= LAST_EPISODES, (totals[1:] - before) / LAST_EPISODES, np.nan)


def targets(bench: Bench, environments: dict[str, Environment]) -> pd.DataFrame:
    """Return when runs first had the environment's target as their mean return of an iteration.

    Columns: size, env_id, mode, target, runs, reached, and the median of the seconds from the start
    of the process: estimate, low, high. A run that never got there counts as one that takes longer
    than all others, so the median is infinite unless more than half did. Environments and sizes in
    which no run of any mode did are not there.
    """
    rows = []
    points = curves(bench._replace(runs=timed(bench.runs)))
    known = {x: y.target for x, y in environments.items()}
    points["target"] = points["env_id"].map(known).astype("float64")
    points = points.dropna(subset=["target", "seconds"])
    points["hit"] = points["seconds"].where(points["return"] >= points["target"], np.inf)
    first = points.groupby(["size", "env_id"])["hit"].transform("min")
    points = points[np.isfinite(first)]
    keys = ["size", "env_id", "mode", "target"]
    for key, group in points.groupby(keys, sort=False):
        seconds = group.groupby("run")["hit"].min().to_numpy()
        row = dict(zip(keys, key, strict=True))
        row |= {"runs": len(seconds), "reached": int(np.isfinite(seconds).sum())}
        rows.append(row | stats.median_interval(seconds)._asdict())
    return in_order(pd.DataFrame(rows, columns=[*keys, "runs", "reached", *stats.Interval._fields]))

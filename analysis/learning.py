"""What the agents learned: returns, scores, their equivalence, and when they reached a target."""

import csv
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import stats
from analysis.bench import Bench, in_order, mode_order, shared, size_order, timed
from analysis.runs import LAST_EPISODES
from analysis.schema import SourceError

ENVIRONMENTS = Path(__file__).parent / "environments.csv"


class Environment(NamedTuple):
    """What is known of an environment before any run: README.md says how it was fixed."""

    untrained: float  # mean return of an untrained agent, which scores 0
    reference: float  # the return that scores 1
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
    numbers = [x for environment in known.values() for x in environment if not np.isnan(x)]
    if any(abs(x) > 1e9 for x in numbers) or any(x.margin < 1e-9 for x in known.values()):
        raise SourceError(f"{path} must have numbers within 1e9, and margins above 0")
    return known


def score(value: float, environment: Environment | None) -> float:
    """Return where a return lies between the untrained agent's, 0, and the reference, 1."""
    if environment is None or environment.untrained == environment.reference:
        return np.nan
    return (value - environment.untrained) / (environment.reference - environment.untrained)


def learned(runs: pd.DataFrame) -> pd.DataFrame:
    """Return, of each environment and size, the runs of its commonest length that have a return."""
    runs = runs.dropna(subset=["final_return"])
    cells = [stats.of_length(cell) for _, cell in runs.groupby(["size", "env_id"], sort=False)]
    return pd.concat([runs.head(0), *cells])


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


def returns(bench: Bench, environments: dict[str, Environment]) -> pd.DataFrame:
    """Return a row per environment, size and mode: its final returns and their test.

    Columns: env_id, size, mode, runs, mean, median with low and high, lowest, highest, score, and
    against the baseline difference, with low and high of its 90% interval, margin and verdict: ""
    for the baseline and without one, "as MODE" for a mode that computed the same as another,
    "no margin" if none was fixed, "all alike" if no run of any mode differs, or equivalence()'s.
    """
    rows, same = [], identical(bench)
    for _, cell in learned(bench.runs).groupby(["size", "env_id"], sort=False):
        known = environments.get(str(cell["env_id"].iloc[0]))
        margin = known.margin if known else np.nan
        base = cell.loc[cell["mode"] == bench.baseline, "final_return"].to_numpy()
        for mode in mode_order(cell["mode"]):
            values = cell.loc[cell["mode"] == mode, "final_return"].to_numpy()
            row = {"env_id": cell["env_id"].iloc[0], "size": cell["size"].iloc[0], "mode": mode}
            row |= {
                "runs": len(values),
                "mean": values.mean(),
                "score": score(values.mean(), known),
            }
            median, low, high = stats.median_interval(values)
            row |= {"median": median, "low": low, "high": high}
            row |= {"lowest": values.min(), "highest": values.max()}
            row |= {"margin": margin, "verdict": ""}
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
    columns = ["env_id", "size", "mode", "runs", "mean", "median", "low", "high", "lowest"]
    columns += ["highest", "score", "difference", "difference_low", "difference_high", "margin"]
    return in_order(pd.DataFrame(rows, columns=[*columns, "verdict"]))


def scores(bench: Bench, environments: dict[str, Environment]) -> pd.DataFrame:
    """Return each mode's score over environments, and by how much it differs from the baseline's.

    Every environment has the same weight. Columns: size, mode, environments, score, and the
    difference: estimate, low, high. The score itself has no interval: one that tells of other
    environments is as wide as they differ, and one of these does not hold its level with few runs.
    """
    runs = learned(bench.runs)
    values = [
        score(value, environments.get(str(env_id)))
        for env_id, value in zip(runs["env_id"], runs["final_return"], strict=True)
    ]
    runs = runs.assign(score=values).dropna(subset=["score"])
    rows = []
    for size in size_order(runs["size"]):
        part = shared(runs[runs["size"] == size])
        table = stats.compare(part, "score", bench.baseline, contrast=stats.difference)
        table = table.set_index("mode")
        for mode in mode_order(part["mode"]):
            envs = part[part["mode"] == mode].groupby("env_id")["score"].mean()
            row = {"size": size, "mode": mode, "environments": len(envs), "score": envs.mean()}
            names = stats.Interval._fields if mode in table.index else ()
            rows.append(row | {x: table.loc[mode, x] for x in names})
    columns = ["size", "mode", "environments", "score", *stats.Interval._fields]
    return pd.DataFrame(rows, columns=columns)


def learning(bench: Bench, size: str) -> pd.DataFrame:
    """Return the learning curves of a size: env_id, mode, run, steps, seconds, return.

    seconds are from the start of the process. An iteration without the end of an episode has the
    return of the one before it.
    """
    runs = learned(bench.runs[bench.runs["size"] == size])
    columns = ["run", "env_id", "mode", "imports", "repeat"]
    rows = bench.iterations.merge(runs[columns], on="run").sort_values(["run", "iteration"])
    rows["return"] = rows.groupby("run")["charts/episodic_return"].ffill()
    rows["steps"], rows["seconds"] = rows["global_step"], rows["imports"] + rows["time/elapsed"]
    rows = rows.dropna(subset=["return"])
    return rows[["env_id", "mode", "run", "steps", "seconds", "return"]]


def last_returns(bench: Bench) -> pd.DataFrame:
    """Return what DQN learned, with 95% intervals of the mean over seeds (Student's t).

    Columns: size, env_id, mode, num_iterations, runs, seeds evaluated, and of each measure
    (last_100, greedy, noisy, random) the estimate, low and high, named with it; of last_100 also
    the difference from the baseline's, named minus_, by Welch: seeds of two scripts are no pairs.
    """
    measures = ("last_100", "greedy", "noisy", "random")
    keys, rows = ["size", "env_id", "mode", "num_iterations"], []
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
        cell = ["size", "env_id", "num_iterations"]
        others = bench.runs[(bench.runs[cell] == runs[cell].iloc[0]).all(axis=1)]
        others = others.loc[others["mode"] == bench.baseline, "last_100_return"].dropna()
        found = stats.Interval(np.nan, np.nan, np.nan)
        if row["mode"] != bench.baseline:
            own = runs["last_100_return"].dropna()
            found = stats.welch(others.to_numpy(), own.to_numpy())
        row |= {f"minus_{x}": y for x, y in found._asdict().items()}
        rows.append(row)
    names = [f"{x}_{y}" for x in (*measures, "minus") for y in stats.Interval._fields]
    return in_order(pd.DataFrame(rows, columns=[*keys, "runs", "evaluated", *names]))


def recent(bench: Bench, size: str) -> pd.DataFrame:
    """Return the mean return of about the last 100 episodes, over seeds, as training goes on.

    Columns: env_id, mode, steps, seconds (from the start of the process: the mean of the runs that
    were not resumed), runs, estimate, low, high. An iteration is there if all runs of the mode have
    so many episodes by then.
    """
    runs = bench.runs[bench.runs["size"] == size]
    rows = bench.iterations.merge(runs[["run", "env_id", "mode", "imports"]], on="run")
    rows = rows.sort_values(["run", "iteration"])
    rows["seconds"] = rows["imports"] + rows["time/elapsed"]
    names = ["charts/episodic_return", "charts/episodes"]
    values = [running_return(*x[names].to_numpy().T) for _, x in rows.groupby("run")]
    rows["return"] = np.concatenate([*values, []])
    points = []
    for _, group in rows.groupby(["env_id", "mode"], sort=False):
        for steps, part in group.groupby("global_step"):
            if part["return"].isna().any() or len(part) < group["run"].nunique():
                continue
            row = {x: part[x].iloc[0] for x in ("env_id", "mode")} | {"steps": steps}
            row |= {"seconds": part["seconds"].mean(), "runs": len(part)}
            found = stats.mean_interval(part["return"].to_numpy(), ["one"] * len(part))
            points.append(row | found._asdict())
    columns = ["env_id", "mode", "steps", "seconds", "runs", *stats.Interval._fields]
    return pd.DataFrame(points, columns=columns)


def running_return(means: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return, after each iteration, the mean return of about the last LAST_EPISODES episodes.

    It is runs.last_return() at each: NaN until so many have ended.
    """
    counts = np.where(np.isnan(means), 0, np.nan_to_num(counts))
    ends, totals = np.cumsum(counts), np.cumsum(np.nan_to_num(means) * counts)
    ends, totals = np.append(0, ends), np.append(0, totals)
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
    for size in size_order(bench.runs["size"]):
        points = learning(bench._replace(runs=timed(bench.runs)), size)
        known = {x: y.target for x, y in environments.items()}
        points["target"] = points["env_id"].map(known).astype("float64")
        points = points.dropna(subset=["target", "seconds"])
        points["hit"] = points["seconds"].where(points["return"] >= points["target"], np.inf)
        points = points[np.isfinite(points.groupby("env_id")["hit"].transform("min"))]
        for _, group in points.groupby(["env_id", "mode"], sort=False):
            seconds = group.groupby("run")["hit"].min().to_numpy()
            row = {x: group[x].iloc[0] for x in ("env_id", "mode", "target")} | {"size": size}
            row |= {"runs": len(seconds), "reached": int(np.isfinite(seconds).sum())}
            rows.append(row | stats.median_interval(seconds)._asdict())
    columns = ["size", "env_id", "mode", "target", "runs", "reached", *stats.Interval._fields]
    return in_order(pd.DataFrame(rows, columns=columns))

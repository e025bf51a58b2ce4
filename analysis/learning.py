"""What the agents learned: returns, their equivalence, and when they reached a target."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import stats
from analysis.measures import Bench, in_order, mode_order, timed
from analysis.runs import LAST_EPISODES
from analysis.schema import SourceError
from analysis.stats import Interval

ENVIRONMENTS = Path(__file__).with_name("environments.csv")
CELL = ["size", "env_id", "mode"]
MINUS = [f"minus_{x}" for x in Interval._fields]  # a difference from the baseline


class Environment(NamedTuple):
    """What is known of an environment before any run: README.md says how it was fixed."""

    target: float  # the return that counts as learnt; NaN if none does
    margin: float  # returns that differ by less are equivalent


def load_environments(path: str | Path = ENVIRONMENTS) -> dict[str, Environment]:
    """Return what a CSV file says of each environment; raise SourceError if it cannot."""
    columns = list(Environment._fields)
    try:
        table = pd.read_csv(path, encoding="utf-8-sig", dtype={"env_id": str})
        table = table.set_index("env_id")[columns].astype(float)
    except (OSError, ValueError, KeyError):
        names = ", ".join(("env_id", *columns))
        raise SourceError(f"{path} is not a CSV file with the columns {names}") from None
    if (table["target"].abs() > 1e9).any() or not table["margin"].between(1e-9, 1e9).all():
        raise SourceError(f"{path} must have targets within 1e9, and margins above 0")
    return {str(row.Index): Environment(row.target, row.margin) for row in table.itertuples()}


def learned(runs: pd.DataFrame) -> pd.DataFrame:
    """Return, of each environment and size, the runs of its commonest length that have a return."""
    runs = runs.dropna(subset=["final_return"])
    cells = [stats.of_length(cell) for _, cell in runs.groupby(["size", "env_id"], sort=False)]
    return pd.concat([runs.head(0), *cells])


def with_intervals(
    table: pd.DataFrame, runs: pd.DataFrame, value: str, function: Callable, prefix: str = ""
) -> pd.DataFrame:
    """Return a table by CELL with a function's interval of a value of the runs of each."""
    found = []
    for cell in table[CELL].itertuples(index=False):
        values = values_of(runs, value, *cell)
        found.append(function(values) if len(values) else stats.NOTHING)
    names = [f"{prefix}{x}" for x in Interval._fields]
    return table.join(pd.DataFrame(found, table.index, names))


def values_of(runs: pd.DataFrame, value: str, size: str, env: str, mode: str) -> np.ndarray:
    own = (runs["size"] == size) & (runs["env_id"] == env) & (runs["mode"] == mode)
    return runs.loc[own, value].dropna().to_numpy()


def identical(bench: Bench) -> dict[str, str]:
    """Return each mode and the first mode that computed the same in all the blocks they share.

    Two programs that give the same numbers are one observation of learning, and not two. The
    baseline comes first. Runs without losses are not compared: their returns may all be at a cap.
    """
    names = [x for x in bench.iterations if x.startswith(("charts/", "losses/"))]
    names.remove("charts/SPS")
    losses = [x for x in names if x.startswith("losses/")]
    known = bench.iterations.dropna(subset=losses, how="all").sort_values("iteration")
    groups = known.groupby("run")[["iteration", *names]]
    prints = {run: hash(x.to_numpy().tobytes()) for run, x in groups}
    runs = bench.runs.assign(print=bench.runs["run"].map(prints).astype(object))
    keys = ["env_id", "size", "num_iterations", "repeat"]
    runs = runs.dropna(subset=["print"]).drop_duplicates([*keys, "mode"])
    modes = sorted(mode_order(bench.runs["mode"]), key=lambda x: x != bench.baseline)
    table = runs.pivot(index=keys, columns="mode", values="print").reindex(columns=modes)
    first: dict[str, str] = {}
    for mode in modes:
        first[mode] = mode
        for other in [x for x in first if first[x] == x and x != mode]:
            both = table[[other, mode]].dropna()
            if len(both) and (both[other] == both[mode]).all():
                first[mode] = other
                break
    return first


# === In the end =================================================================================
def returns(bench: Bench, environments: dict[str, Environment]) -> pd.DataFrame:
    """Return a row per CELL: the mean and the median of final returns, and their test.

    verdict is "as MODE" for a mode that computed the same as another, "no margin" if none was
    fixed, "all alike" if no run of any mode differs, or equivalence()'s with the baseline. Where no
    mode has LEAST_RUNS there is no row.
    """
    rows = []
    same = identical(bench)
    for _, cell in learned(bench.runs).groupby(["size", "env_id"], sort=False):
        values = {str(mode): x.to_numpy() for mode, x in cell.groupby("mode")["final_return"]}
        if max(map(len, values.values())) < stats.LEAST_RUNS:
            continue
        key = {"size": cell["size"].iloc[0], "env_id": cell["env_id"].iloc[0]}
        margin = environments[key["env_id"]].margin if key["env_id"] in environments else np.nan
        for mode, own in values.items():
            row = key | {"mode": mode, "runs": len(own), "mean": own.mean(), "margin": margin}
            row |= stats.median_interval(own)._asdict() | {"verdict": ""}
            if same[mode] != mode and same[mode] in values:
                row["verdict"] = f"as {same[mode]}"
            elif mode != bench.baseline and bench.baseline in values:
                found, row["verdict"] = stats.equivalence(values[bench.baseline], own, margin)
                row |= dict(zip(MINUS, found, strict=True))
                if cell["final_return"].nunique() == 1:
                    row["verdict"] = "all alike"
                elif np.isnan(margin):
                    row["verdict"] = "no margin"
            rows.append(row)
    columns = [*CELL, "runs", "mean", *Interval._fields, *MINUS, "margin", "verdict"]
    return in_order(pd.DataFrame(rows, columns=columns))


def last_returns(bench: Bench) -> pd.DataFrame:
    """Return what DQN learned by each measure: Student's mean over seeds, as last_100_estimate.

    minus_ is last_100 minus the baseline's, by Welch: seeds of two scripts are no pairs.
    """
    runs = learned(bench.runs[bench.runs["algorithm"] == "dqn"])
    groups = runs.groupby(CELL, as_index=False)
    table = groups.agg(runs=("run", "size"), evaluated=("greedy_return", "count"))
    for name in ("last_100", "greedy", "noisy", "random"):
        table = with_intervals(table, runs, f"{name}_return", stats.mean, f"{name}_")
    table[["random_low", "random_high"]] = np.nan  # all seeds' random agents play the same games
    minus = []
    for size, env, mode in table[CELL].itertuples(index=False):
        base = values_of(runs, "last_100_return", size, env, bench.baseline)
        own = values_of(runs, "last_100_return", size, env, mode)
        is_pair = mode != bench.baseline and min(len(base), len(own)) > 1
        minus.append(stats.welch(base, own) if is_pair else stats.NOTHING)
    return in_order(table.join(pd.DataFrame(minus, table.index, MINUS)))


# === Along the way ==============================================================================
def curves(bench: Bench) -> pd.DataFrame:
    """Return the iterations with CELL, steps, seconds since the process's start, and return.

    An iteration without the end of an episode has the return of the one before it.
    """
    rows = bench.iterations.merge(learned(bench.runs)[[*CELL, "run", "imports"]], on="run")
    rows = rows.sort_values(["run", "iteration"], ignore_index=True)
    rows["steps"] = rows["global_step"]
    rows["seconds"] = rows["imports"] + rows["time/elapsed"]
    rows["return"] = rows.groupby("run")["charts/episodic_return"].ffill()
    return rows


def progress(bench: Bench) -> pd.DataFrame:
    """Return CELL, steps, runs and the mean return over seeds with Student's interval, at 95%.

    It is that of the iteration's episodes, and of DQN of about the last 100. An iteration is there
    if all runs of the mode know it.
    """
    rows = curves(bench)
    if (bench.runs["algorithm"] == "dqn").all():
        for _, run in rows.groupby("run"):
            means, counts = run[["charts/episodic_return", "charts/episodes"]].to_numpy().T
            rows.loc[run.index, "return"] = running_return(means, counts)
    parts = [pd.DataFrame(columns=[*CELL, "steps", "runs", *Interval._fields])]
    for _, cell in rows.groupby(CELL):
        values = cell.pivot_table("return", "run", "steps").dropna(axis=1)
        if not values.empty:
            part = pd.DataFrame(stats.mean(values.to_numpy())._asdict())
            part[CELL] = cell[CELL].iloc[0].tolist()
            parts.append(part.assign(steps=values.columns, runs=len(values)))
    return pd.concat(parts[1:] or parts, ignore_index=True)


def running_return(means: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return runs.last_return() after each iteration: NaN until LAST_EPISODES have ended."""
    counts = np.where(np.isnan(means), 0, np.nan_to_num(counts))
    ends = np.append(0, np.cumsum(counts))
    totals = np.append(0, np.cumsum(np.nan_to_num(means) * counts))
    known = np.append(True, np.diff(ends) > 0)  # np.interp wants episodes to rise
    before = np.interp(ends[1:] - LAST_EPISODES, ends[known], totals[known])
    return np.where(ends[1:] >= LAST_EPISODES, (totals[1:] - before) / LAST_EPISODES, np.nan)


def targets(bench: Bench, environments: dict[str, Environment]) -> pd.DataFrame:
    """Return the median of the seconds until runs had the environment's target as mean return.

    A run that never got there counts as one that takes longer than all others. Environments and
    sizes in which no run of any mode did are not there.
    """
    points = curves(bench._replace(runs=timed(bench.runs)))
    known = {x: y.target for x, y in environments.items()}
    points["target"] = points["env_id"].map(known).astype(float)  # of no rows, too
    points = points.dropna(subset=["target", "seconds", "return"])
    points["hit"] = points["seconds"].where(points["return"] >= points["target"], np.inf)
    runs = points.groupby([*CELL, "target", "run"], as_index=False)["hit"].min()
    runs = runs[np.isfinite(runs.groupby(["size", "env_id"])["hit"].transform("min"))]
    runs["there"] = np.isfinite(runs["hit"])
    groups = runs.groupby([*CELL, "target"], as_index=False)
    table = groups.agg(runs=("run", "size"), reached=("there", "sum"))
    return in_order(with_intervals(table, runs, "hit", stats.median_interval))

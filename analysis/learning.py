"""Summarize returns: final returns and their equivalence, learning curves, time to a target."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import stats
from analysis.catalog import ENVIRONMENTS
from analysis.describe import running_return
from analysis.measures import Experiment, in_order, timed
from analysis.stats import Interval

CELL = ["size", "env_id", "mode"]
# With these algorithms, few episodes end per iteration, so the last 100 are averaged.
OFF_POLICY = ("dqn", "sac")
MINUS = [f"minus_{x}" for x in Interval._fields]  # columns of the difference from the baseline


class Environment(NamedTuple):
    """Constants of an environment; README.md explains how they were chosen."""

    target: float  # the return that counts as solved; NaN if there is none
    margin: float  # mean returns that differ by less are equivalent


def load_environments() -> dict[str, Environment]:
    return {
        env_id: Environment(float(row["target"] or "nan"), float(row["margin"] or "nan"))
        for env_id, row in ENVIRONMENTS.items()
    }


def learned(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs with a final return and the most common length in their environment and size."""
    runs = runs.dropna(subset=["final_return"])
    cells = [stats.of_length(cell) for _, cell in runs.groupby(["size", "env_id"], sort=False)]
    return pd.concat([runs.head(0), *cells])


# === Final returns ==============================================================================
def returns(experiment: Experiment, environments: dict[str, Environment]) -> pd.DataFrame:
    """Return the mean and median final return, and the result of an equivalence test, by CELL.

    verdict is "as MODE" if the returns are identical to the returns of another variant, "no
    margin" if the environment has none, "all alike" if all runs are equal, and otherwise the
    result of equivalence() with the baseline. Cells in which no variant has LEAST_RUNS runs are
    omitted.
    """
    rows = []
    baseline = experiment.baseline
    for _, cell in learned(experiment.runs).groupby(["size", "env_id"], sort=False):
        values = {str(mode): x.to_numpy() for mode, x in cell.groupby("mode")["final_return"]}
        if max(map(len, values.values())) < stats.LEAST_RUNS:
            continue
        key = {"size": cell["size"].iloc[0], "env_id": cell["env_id"].iloc[0]}
        margin = environments[key["env_id"]].margin if key["env_id"] in environments else np.nan
        for mode, these in values.items():
            row = key | {"mode": mode, "runs": len(these), "mean": these.mean(), "margin": margin}
            row |= stats.median_interval(these)._asdict() | {"verdict": ""}
            known = sorted(values, key=lambda x: x != baseline)  # the baseline comes first
            twin = next(x for x in known if sorted(values[x]) == sorted(these))
            if np.ptp(these) and mode not in (twin, baseline):
                row["verdict"] = f"as {twin}"
            elif mode != baseline and baseline in values:
                found, row["verdict"] = stats.equivalence(values[baseline], these, margin)
                row |= dict(zip(MINUS, found, strict=True))
                if cell["final_return"].nunique() == 1:
                    row["verdict"] = "all alike"
                elif np.isnan(margin):
                    row["verdict"] = "no margin"
            rows.append(row)
    columns = [*CELL, "runs", "mean", *Interval._fields, *MINUS, "margin", "verdict"]
    return in_order(pd.DataFrame(rows, columns=columns))


def final_returns(experiment: Experiment) -> pd.DataFrame:
    """Return the number of runs and the mean, lowest and highest final return, by CELL.

    The final return is the mean of about the last 100 episodes with OFF_POLICY algorithms, and
    the mean of the last iteration in which an episode ended with others.
    """
    runs = learned(experiment.runs)
    is_off_policy = runs["algorithm"].isin(OFF_POLICY)
    final = runs["final_return"].where(~is_off_policy, runs["last_100_return"])
    groups = runs.assign(final=final).dropna(subset=["final"]).groupby(CELL, as_index=False)
    return in_order(
        groups.agg(
            runs=("final", "size"),
            mean=("final", "mean"),
            least=("final", "min"),
            most=("final", "max"),
        )
    )


def last_returns(experiment: Experiment) -> pd.DataFrame:
    """Return mean returns over the seeds of OFF_POLICY runs, with t intervals.

    The columns minus_* contain the difference in last_100_return from the baseline. They use
    Welch's interval because the seeds are not paired.
    """
    runs = learned(experiment.runs[experiment.runs["algorithm"].isin(OFF_POLICY)])
    groups = runs.groupby(CELL, as_index=False)
    table = groups.agg(runs=("run", "size"), evaluated=("greedy_return", "count"))
    for name in ("last_100", "greedy", "noisy", "random"):
        found = stats.of_groups(runs, CELL, f"{name}_return", stats.mean)
        titles = {x: f"{name}_{x}" for x in Interval._fields}
        table = table.merge(found.rename(columns=titles), "left", CELL)
    # Random agents play the same episodes for all seeds, so there is no interval.
    table[["random_low", "random_high"]] = np.nan
    values = {x: y.dropna().to_numpy() for x, y in runs.groupby(CELL)["last_100_return"]}
    minus = []
    for size, env, mode in table[CELL].itertuples(index=False):
        base = values.get((size, env, experiment.baseline), np.empty(0))
        these = values[size, env, mode]
        is_pair = mode != experiment.baseline and min(len(base), len(these)) > 1
        minus.append(stats.welch(base, these) if is_pair else stats.NOTHING)
    return in_order(table.join(pd.DataFrame(minus, table.index, MINUS)))


# === Learning curves ============================================================================
def curves(experiment: Experiment) -> pd.DataFrame:
    """Return a row per iteration: CELL, steps, seconds since process launch, and mean return."""
    runs = learned(experiment.runs)[[*CELL, "run", "imports"]]
    rows = experiment.iterations.merge(runs, on="run")
    rows = rows.sort_values(["run", "iteration"], ignore_index=True)
    rows["steps"] = rows["global_step"]
    rows["seconds"] = rows["imports"] + rows["time/elapsed"]
    # If no episode finished in an iteration, use the return of an earlier iteration.
    rows["return"] = rows.groupby("run")["charts/episodic_return"].ffill()
    return rows


def progress(experiment: Experiment) -> pd.DataFrame:
    """Return the mean return over seeds, by CELL, for the steps at which every run has a return.

    The return of a run is a mean over the episodes in one iteration, or over about the last 100
    episodes with OFF_POLICY algorithms. least and most are the minimum and maximum over the runs.
    """
    rows = curves(experiment)
    if experiment.runs["algorithm"].isin(OFF_POLICY).all():
        for _, run in rows.groupby("run"):
            means, counts = run[["charts/episodic_return", "charts/episodes"]].to_numpy().T
            rows.loc[run.index, "return"] = running_return(means, counts)
    parts = [pd.DataFrame(columns=[*CELL, "steps", "runs", *Interval._fields])]
    for _, cell in rows.groupby(CELL):
        values = cell.pivot_table("return", "run", "steps").dropna(axis=1)
        if not values.empty:
            part = pd.DataFrame(stats.mean(values.to_numpy())._asdict())
            part[CELL] = cell[CELL].iloc[0].tolist()
            part = part.assign(steps=values.columns, runs=len(values))
            parts.append(part.assign(least=values.min().to_numpy(), most=values.max().to_numpy()))
    return pd.concat(parts[1:] or parts, ignore_index=True)


def targets(experiment: Experiment, environments: dict[str, Environment]) -> pd.DataFrame:
    """Return the median time in seconds until the mean return reached the target, by CELL.

    A run that never reached the target counts as slower than all others. Environments and sizes
    in which no run reached the target are omitted.
    """
    points = curves(experiment._replace(runs=timed(experiment.runs)))
    known = {x: y.target for x, y in environments.items()}
    points["target"] = points["env_id"].map(known).astype(float)  # float even if there are no rows
    points = points.dropna(subset=["target", "seconds", "return"])
    points["hit"] = points["seconds"].where(points["return"] >= points["target"], np.inf)
    runs = points.groupby([*CELL, "target", "run"], as_index=False)["hit"].min()
    runs = runs[np.isfinite(runs.groupby(["size", "env_id"])["hit"].transform("min"))]
    runs["there"] = np.isfinite(runs["hit"])
    groups = runs.groupby([*CELL, "target"], as_index=False)
    table = groups.agg(runs=("run", "size"), reached=("there", "sum"))
    seconds = stats.of_groups(runs, CELL, "hit", stats.median_interval)
    return in_order(table.merge(seconds, on=CELL))

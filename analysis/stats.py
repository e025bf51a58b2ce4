"""Speedups, differences and returns, each with an interval.

A process is one observation: iterations within it are not independent. Runs are compared within a
block, which is one environment, model size and repeat; the repeat's seed is the same in all.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

BLOCK = ("mode", "platform", "settings", "sync", "env_id", "size", "repeat")
WHOLE_RUN = ("total", "process", "final_return", "best_return")  # depend on its iterations
SIZE_ORDER = ("small", "medium", "large")
CONFIDENCE = 0.95
RESAMPLES = 2000
LEAST_RETURNS = 5  # for an interval: percentiles of fewer mean little


class Interval(NamedTuple):
    """An estimate and its 95% interval; low and high are NaN if there is nothing to repeat over."""

    estimate: float
    low: float
    high: float


# === Durations ==================================================================================
def pair(
    runs: pd.DataFrame,
    value: str,
    baseline: str,
    candidate: str,
    contender: str = "mode",
    ignore: tuple[str, ...] = (),
) -> pd.DataFrame:
    """Return a row per pair of runs that differ in contender alone, with both values.

    contender is the column that holds baseline and candidate: "mode", "platform" or any other.
    Columns in ignore may differ too: with "repeat", every repeat is paired with every other.
    Runs of different lengths pair, unless the value is of the whole run. The values are in the
    columns baseline and candidate.
    """
    block = (*BLOCK, "num_iterations") if value in WHOLE_RUN else BLOCK
    keys = [name for name in block if name != contender and name not in ignore]
    runs = runs.dropna(subset=[value])
    sides = [
        runs.loc[runs[contender] == side, [*keys, value]].rename(columns={value: name})
        for side, name in ((baseline, "baseline"), (candidate, "candidate"))
    ]
    if not ignore:  # of a run made twice, as with other lengths, the mean counts once
        sides = [side.groupby(keys, as_index=False, sort=False).mean() for side in sides]
    return sides[0].merge(sides[1], on=keys)


def hierarchical_interval(cells: pd.DataFrame, seed: int = 0) -> Interval:
    """Return the mean of `value` over environments, and its interval by a two-level bootstrap.

    cells has the columns env_id, size and value; rows with equal env_id and size are repeats. The
    estimate is the mean over environments of the mean over sizes of the mean over repeats.
    Environments are drawn with replacement, then the processes within each. Drawing at two levels
    counts the noise between processes twice, so the environments' means are first shrunk and the
    residuals stretched until both variances are right (Davison and Hinkley 1997, section 3.8).
    The interval is t times the standard error of the resampled means: plain percentiles are too
    narrow for a dozen environments (Hesterberg 2015). With one environment it covers the noise
    between processes alone; with one run as well there is none.
    """
    groups = cells.groupby(["env_id", "size"])["value"]
    count = groups.transform("size")
    means = groups.mean().groupby("env_id").mean()
    estimate, num_envs = float(means.mean()), len(means)
    repeated = count > 1
    freedom = int(repeated.sum() - groups.ngroups + (groups.size() == 1).sum())
    residuals = (cells["value"] - groups.transform("mean"))[repeated]
    residuals = (residuals * np.sqrt(count / (count - 1))[repeated]).to_numpy()
    if num_envs == 1 and freedom == 0:
        return Interval(estimate, np.nan, np.nan)

    # What each process adds to the mean of its environment; rows are padded with weight 0.
    num_sizes = cells.groupby("env_id")["size"].transform("nunique")
    shares = (1 / (count * num_sizes)).groupby(cells["env_id"]).apply(list).loc[means.index]
    weights = np.zeros((num_envs, max(map(len, shares))))
    for row, share in zip(weights, shares, strict=True):
        row[: len(share)] = share

    noise_variance = (residuals**2).mean() if freedom else 0.0
    noise = noise_variance * (weights**2).sum(1).mean()
    spread = means.var() if num_envs > 1 else 0.0
    shrink = np.sqrt(max(0, spread - noise) / means.var(ddof=0)) if spread else 0.0
    effects = shrink * (means.to_numpy() - estimate)

    rng = np.random.default_rng(seed)
    picked = rng.integers(num_envs, size=(RESAMPLES, num_envs))
    shape = (RESAMPLES, *weights.shape)
    noises = rng.choice(residuals, shape) if freedom else np.zeros(shape)
    resampled = (effects[picked] + (noises * weights[picked]).sum(-1)).mean(1)
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, num_envs - 1 if num_envs > 1 else freedom)
    half_width = float(quantile * resampled.std(ddof=1))
    return Interval(estimate, estimate - half_width, estimate + half_width)


def candidates(runs: pd.DataFrame, baseline: str, contender: str = "mode") -> list[str]:
    return [name for name in runs[contender].unique() if name != baseline]


def sizes(runs: pd.DataFrame) -> list[str]:
    """Return the model sizes in runs, the known ones first and in order of size."""
    known = [size for size in SIZE_ORDER if size in set(runs["size"])]
    return known + sorted(set(runs["size"]) - set(known))


def by_size(pairs: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return the pairs of each size and, if there are several sizes, all of them."""
    parts = [(size, pairs[pairs["size"] == size]) for size in sizes(pairs)]
    return [*parts, ("all", pairs)] if len(parts) > 1 else parts


def speedup_table(
    runs: pd.DataFrame,
    value: str,
    baseline: str,
    contender: str = "mode",
    ignore: tuple[str, ...] = (),
) -> pd.DataFrame:
    """Return how many times faster each candidate is than baseline, by size and over all sizes.

    A speedup is the baseline's `value`, in seconds, over the candidate's. geometric_mean, median,
    minimum, maximum and pairs describe every pair of a baseline's and a candidate's repeat within
    (environment, size). paired is the geometric mean within blocks, and low and high its interval.
    """
    rows = []
    for candidate in candidates(runs, baseline, contender):
        paired = pair(runs, value, baseline, candidate, contender, ignore)
        every = pair(runs, value, baseline, candidate, contender, (*ignore, "repeat"))
        for size, pairs in by_size(every):
            speedups = pairs["baseline"] / pairs["candidate"]
            row: dict[str, Any] = {"candidate": candidate, "baseline": baseline, "size": size}
            row |= {
                "geometric_mean": float(np.exp(np.log(speedups).mean())),
                "median": speedups.median(),
                "minimum": speedups.min(),
                "maximum": speedups.max(),
                "pairs": len(pairs),
            }
            blocks = paired if size == "all" else paired[paired["size"] == size]
            row |= {"environments": blocks["env_id"].nunique(), "blocks": len(blocks)}
            if len(blocks):
                logs = np.log(blocks["baseline"] / blocks["candidate"])
                interval = hierarchical_interval(blocks.assign(value=logs))
                row |= dict(zip(("paired", "low", "high"), np.exp(interval), strict=True))
            rows.append(row)
    columns = ["candidate", "baseline", "size", "geometric_mean", "median", "minimum", "maximum"]
    columns += ["pairs", "paired", "low", "high", "environments", "blocks"]
    return pd.DataFrame(rows, columns=columns)


def difference_table(
    runs: pd.DataFrame,
    value: str,
    baseline: str,
    contender: str = "mode",
    ignore: tuple[str, ...] = (),
) -> pd.DataFrame:
    """Return candidate minus baseline within blocks, in seconds, by size and over all sizes."""
    rows = []
    for candidate in candidates(runs, baseline, contender):
        for size, pairs in by_size(pair(runs, value, baseline, candidate, contender, ignore)):
            values = pairs["candidate"] - pairs["baseline"]
            mean, low, high = hierarchical_interval(pairs.assign(value=values))
            row = {"candidate": candidate, "baseline": baseline, "size": size, "mean": mean}
            row |= {"low": low, "high": high, "median": values.median(), "minimum": values.min()}
            row |= {"maximum": values.max(), "blocks": len(pairs)}
            row |= {"environments": pairs["env_id"].nunique()}
            rows.append(row)
    columns = ["candidate", "baseline", "size", "mean", "low", "high", "median", "minimum"]
    return pd.DataFrame(rows, columns=[*columns, "maximum", "environments", "blocks"])


# === Returns ====================================================================================
def iqm(values: np.ndarray) -> float:
    """Return the mean of the middle half (Agarwal et al. 2021)."""
    return float(stats.trim_mean(values, 0.25, axis=None))


def iqm_interval(returns: list[np.ndarray], seed: int = 0) -> Interval:
    """Return the IQM over all of returns, an array of runs per environment, and its interval.

    The bootstrap is stratified: runs are drawn within each environment, and percentiles taken.
    Returns of several environments must be on one scale. A single run each, or fewer than
    LEAST_RETURNS in all, give no interval.
    """
    estimate = iqm(np.concatenate(returns))
    if max(map(len, returns)) < 2 or sum(map(len, returns)) < LEAST_RETURNS:
        return Interval(estimate, np.nan, np.nan)
    rng = np.random.default_rng(seed)
    resampled = np.concatenate([rng.choice(x, (RESAMPLES, len(x))) for x in returns], axis=1)
    iqms = stats.trim_mean(resampled, 0.25, axis=1)
    tail = (1 - CONFIDENCE) / 2
    return Interval(estimate, *(float(q) for q in np.quantile(iqms, [tail, 1 - tail])))


class Equivalence(NamedTuple):
    """A test of whether two means differ by less than a margin."""

    difference: float  # candidate minus baseline
    low: float  # of the 90% interval of the difference
    high: float
    margin: float
    p_value: float  # of the hypothesis that they differ by the margin or more
    verdict: Literal["equivalent", "different", "undecided", "too few runs", "all alike"]


def equivalence(baseline: np.ndarray, candidate: np.ndarray, margin: float) -> Equivalence:
    """Test two sets of returns for equivalence: two one-sided Welch tests at 5% each (TOST).

    "equivalent" means that the 90% interval of the difference lies within the margin, "different"
    that it lies outside on one side, and "undecided" that it does neither.
    """
    difference = float(np.mean(candidate) - np.mean(baseline))
    if min(len(baseline), len(candidate)) < 2:
        return Equivalence(difference, np.nan, np.nan, margin, np.nan, "too few runs")
    parts = [np.var(x, ddof=1) / len(x) for x in (baseline, candidate)]
    error = float(np.sqrt(sum(parts)))
    if error == 0:  # every run of a side ended alike
        inside = abs(difference) < margin or difference == 0
        verdict = "equivalent" if inside else "different"
        return Equivalence(difference, difference, difference, margin, 1.0 - inside, verdict)
    squares = sum(v**2 / (len(x) - 1) for v, x in zip(parts, (baseline, candidate), strict=True))
    freedom = sum(parts) ** 2 / squares
    half_width = float(stats.t.ppf(0.95, freedom)) * error
    low, high = difference - half_width, difference + half_width
    p_value = float(stats.t.sf((margin - abs(difference)) / error, freedom))
    verdict = "undecided"
    if -margin < low and high < margin:
        verdict = "equivalent"
    elif low > margin or high < -margin:
        verdict = "different"
    return Equivalence(difference, low, high, margin, p_value, verdict)

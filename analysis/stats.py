"""Compute means, ratios and differences with intervals, pair runs, and test equivalence.

A process is one observation, because its iterations are not independent. Runs are compared within
a block, which is one environment, network size and repeat; in a repeat, all scripts use the same
seed.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

BLOCK = ("mode", "platform", "settings", "sync", "env_id", "size", "repeat")
WHOLE_RUN = ("total", "process", "final_return")  # columns that depend on num_iterations
CONFIDENCE = 0.95
LEAST_RUNS = 5  # minimum number of runs per side; fewer would miss a rare failure


class Interval(NamedTuple):
    """An estimate and its interval; low and high are NaN if there are no repeats."""

    estimate: Any
    low: Any
    high: Any


NOTHING = Interval(np.nan, np.nan, np.nan)


def mean_interval(values: np.ndarray, envs: Sequence[str] | pd.Series | pd.Index) -> Interval:
    """Return the mean over environments of the mean over repeats, with Student's t interval.

    values has a row per run, and optionally a column per quantity; the results have one value per
    quantity. The means per environment vary because environments differ and because processes are
    noisy. With few environments, the means may by chance vary less than the noise alone would
    explain, so the larger of the two variances counts. This is the closed form of a two-level
    bootstrap with rescaled levels (Davison and Hinkley 1997, section 3.8).
    """
    rows = np.asarray(values, float).reshape(len(values), -1)
    names, place = np.unique(np.asarray(envs, str), return_inverse=True)
    counts = np.bincount(place)
    means = np.zeros((len(names), rows.shape[1]))
    np.add.at(means, place, rows)
    means /= counts[:, None]
    freedom = len(rows) - len(names)
    noise = 0.0
    between = 0.0
    if freedom:
        squares = ((rows - means[place]) ** 2).sum(axis=0)
        noise = squares / freedom * (1 / counts).mean()
    if len(names) > 1:
        between = means.var(axis=0, ddof=1)
        freedom = len(names) - 1
    estimate = means.mean(axis=0)
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, freedom)  # NaN with 0 degrees of freedom
    half_width = quantile * np.sqrt(np.maximum(between, noise) / len(names))
    fields = (estimate, estimate - half_width, estimate + half_width)
    return Interval(*(x if np.ndim(values) > 1 else float(x[0]) for x in fields))


def mean(values: np.ndarray) -> Interval:
    """Return the mean of one number per run, with Student's t interval."""
    return mean_interval(values, [""] * len(values))


def of_groups(
    runs: pd.DataFrame, keys: Sequence[str], value: str, function: Callable[..., Interval]
) -> pd.DataFrame:
    """Return a row per group, in order of appearance, with the interval from `function`."""
    rows = []
    for _, group in runs.dropna(subset=[value]).groupby(list(keys), sort=False):
        key = group[list(keys)].iloc[0]
        rows.append((*key, *function(group[value].to_numpy())))
    found = pd.DataFrame(rows, columns=[*keys, *Interval._fields])
    return found.astype(dict.fromkeys(Interval._fields, "float64"))  # even if there are no rows


def geometric_mean(values: np.ndarray) -> Interval:
    """Return the geometric mean of one number per run; the t interval is from the logarithms."""
    return Interval(*map(float, np.exp(mean(np.log(np.asarray(values, float))))))


def blocks(runs: pd.DataFrame, value: str, contender: str = "mode") -> pd.DataFrame:
    """Return a row per block and a column per contender.

    contender is the column that is compared, such as "mode"; blocks do not include this column.
    """
    length = ["num_iterations"] if value in WHOLE_RUN else []
    keys = [name for name in (*BLOCK, *length) if name != contender]
    runs = runs.dropna(subset=[value, *length])
    means = runs.groupby([*keys, contender], sort=False, dropna=False)[value].mean()
    return means.unstack(contender, sort=False)


def pair(table: pd.DataFrame, baseline: str, candidate: str) -> pd.DataFrame:
    """Return the blocks that two contenders share, with their values as baseline and candidate."""
    sides = table.reindex(columns=[baseline, candidate]).dropna()
    return sides.set_axis(["baseline", "candidate"], axis=1).reset_index()


def of_length(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs or pairs of the most common length.

    This is the length that occurs in most environments or, if tied, in most runs.
    """
    envs = runs.groupby("num_iterations")["env_id"]
    counts = pd.DataFrame({"environments": envs.nunique(), "runs": envs.size()})
    commonest = counts.sort_values(["environments", "runs"]).index[-1:]  # the longest if still tied
    return runs[runs["num_iterations"].isin(commonest)]


def ratio(pairs: pd.DataFrame) -> Interval:
    """Return candidate / baseline: the geometric mean over repeats, then over environments."""
    logs = np.log(pairs["candidate"] / pairs["baseline"])
    return Interval(*np.exp(mean_interval(logs.to_numpy(), pairs["env_id"])))


def more_seconds(pairs: pd.DataFrame) -> Interval:
    """Return the difference between geometric means in seconds, with a delta-method interval."""
    logs = np.log(pairs[["baseline", "candidate"]].to_numpy())
    baseline, candidate = np.exp(mean_interval(logs, pairs["env_id"]).estimate)
    interval = mean_interval(logs @ [-baseline, candidate], pairs["env_id"])
    return Interval(*(np.array(interval) - interval.estimate + candidate - baseline))


def compare(
    runs: pd.DataFrame,
    value: str,
    baseline: str,
    contender: str = "mode",
    by: Sequence[str] = ("size",),
    contrast: Callable[[pd.DataFrame], Interval] = ratio,
) -> pd.DataFrame:
    """Return the ratio of each candidate to the baseline, in each group of `by`.

    contender is the column that is compared, such as "mode" or "platform".
    """
    rows = []
    table = blocks(runs, value, contender)
    for candidate in [x for x in table if x != baseline]:
        pairs = pair(table, baseline, candidate)
        for _, group in pairs.groupby(list(by), sort=False, dropna=False):
            if value in WHOLE_RUN:
                group = of_length(group)
            key = group[list(by)].iloc[0]
            rows.append((candidate, *key, *contrast(group), len(group)))
    found = pd.DataFrame(rows, columns=[contender, *by, *Interval._fields, "blocks"])
    return found.astype(dict.fromkeys(Interval._fields, "float64"))  # even if there are no rows


def median_interval(values: np.ndarray) -> Interval:
    """Return the median and its 95% interval from order statistics.

    If most runs reach the maximum return and some do not, a Student's t interval is too narrow.
    With fewer than six values, the ends of the interval are NaN.
    """
    low, high = stats.quantile_test(values, q=0, p=0.5).confidence_interval(CONFIDENCE)
    return Interval(float(np.median(values)), float(low), float(high))


def welch(baseline: np.ndarray, candidate: np.ndarray, confidence: float = CONFIDENCE) -> Interval:
    """Return the difference between two means, candidate - baseline, with Welch's t interval."""
    difference = float(np.mean(candidate) - np.mean(baseline))
    if min(len(baseline), len(candidate)) < 2:
        return Interval(difference, np.nan, np.nan)
    if not (np.ptp(baseline) or np.ptp(candidate)):
        return Interval(difference, difference, difference)
    # SciPy warns if one side has zero variance.
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        test = stats.ttest_ind(candidate, baseline, equal_var=False)
    low, high = test.confidence_interval(confidence)
    return Interval(difference, float(low), float(high))


def equivalence(baseline: np.ndarray, candidate: np.ndarray, margin: float) -> tuple[Interval, str]:
    """Test two sets of returns for equivalence: two one-sided Welch tests at 5% each (TOST).

    Return the 90% interval of the difference between the means, and "equivalent", "different" or
    "undecided"; or "" with fewer than LEAST_RUNS per side, which would miss rare failures.
    """
    found = welch(baseline, candidate, 0.90)
    if min(len(baseline), len(candidate)) < LEAST_RUNS:
        return Interval(found.estimate, np.nan, np.nan), ""
    if -margin < found.low and found.high < margin:
        return found, "equivalent"
    if found.low > margin or found.high < -margin:
        return found, "different"
    return found, "undecided"

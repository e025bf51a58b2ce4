"""Group comparable runs into experiments, and summarize their durations.

An experiment contains all runs with the same platform, algorithm and hyperparameters. Durations
are geometric means over repeats and then over environments. A ratio is a time divided by the
baseline time.
"""

import json
from collections.abc import Sequence
from itertools import combinations
from math import comb
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import schema, stats
from analysis.catalog import SCRIPTS, SIZES
from analysis.describe import WITHOUT_JIT
from analysis.runs import IDENTITY, Data, is_untimed

BASELINES: dict[tuple, str] = {}  # (algorithm, setting) -> the first script
for name, row in SCRIPTS.items():
    BASELINES.setdefault((row["algorithm"], row["setting"]), name)
# Order of the variants in tables and figures; all others follow alphabetically.
MODES = (
    *dict.fromkeys(y for x in SCRIPTS for y in (f"{x}_compile", x)),  # compiled scripts first
    *(f"{x}{WITHOUT_JIT}" for x in SCRIPTS),
)
WHOLLY_COMPILED = ("jit", "compile", "cached_partial", "jit_partial")
# A framework is compared with its first compile mode in this list.
COMPILED = (*WHOLLY_COMPILED, "env.jit")
PARTS = ("imports", "setup", "first")  # parts of the startup time
FARTHEST = 10  # extrapolate to at most this multiple of the measured length


class Experiment(NamedTuple):
    """Runs with the same platform, algorithm and hyperparameters."""

    title: str
    runs: pd.DataFrame  # runs without --sync-for-timing, or all runs if every run has it
    synced: pd.DataFrame  # runs with --sync-for-timing and steady phases
    iterations: pd.DataFrame  # the iterations of `runs`
    baseline: str
    by_hand: bool = False  # whether the machine is unknown, although other experiments record it


# === Experiments ================================================================================
def experiments(data: Data, baseline: str | None = None) -> list[Experiment]:
    """Return the experiments, ordered by the number of runs."""
    groups = [x for _, x in data.runs.groupby(["platform", "algorithm", "settings"], sort=False)]
    groups.sort(key=len, reverse=True)
    found = []
    for title, group in zip(titles_of(groups), groups, strict=True):
        runs = group if group["sync"].all() else group[~group["sync"]]
        synced = group[group["sync"] & group["rollout_steady"].notna()]
        iterations = data.iterations[data.iterations["run"].isin(runs["run"])]
        modes = list(runs["mode"].value_counts().index)  # ordered by the number of runs
        base = [x for x in (baseline, *BASELINES.values()) if x in modes] or modes
        by_hand = is_by_hand(group) and bool((data.runs["machine"] != "").any())
        found.append(Experiment(title, runs, synced, iterations, str(base[0]), by_hand))
    return found


def without_platforms(data: Data) -> Data:
    """Return data as if all runs were from one platform, for returns, which do not depend on it.

    If platforms share a seed, only its first run counts.
    """
    keys = [name for name in IDENTITY if name != "platform"]
    runs = data.runs.drop_duplicates(keys, ignore_index=True)
    if runs["platform"].nunique() > 1:
        runs["platform"] = "all platforms"
    return data._replace(runs=runs)


def is_by_hand(runs: pd.DataFrame) -> bool:
    """Return whether the scripts were started without benchmark.sh, so the machine is unknown."""
    known = (runs["machine"] != "") | runs["load"].notna() | runs["cores"].notna()
    return not known.any() and bool((runs["script"] != "").all())


def titles_of(groups: Sequence[pd.DataFrame]) -> list[str]:
    """Return a title per group: the platform, plus the algorithm and settings if they differ."""
    heads = [group.iloc[0] for group in groups]
    several = len({x["algorithm"] for x in heads}) > 1
    titles = []
    for head in heads:
        alike = [x["settings"] for x in heads if x["algorithm"] == head["algorithm"]]
        algorithm = head["algorithm"].upper() if several else ""
        platform = head["platform"] or "platform not named"
        parts = [algorithm, platform, differences(alike)[head["settings"]]]
        titles.append(", ".join(x for x in parts if x))
    return titles


def differences(texts: Sequence[str]) -> dict[str, str]:
    """Map each JSON text to its values of the hyperparameters in which the texts differ."""
    settings = {text: as_object(text) for text in texts}
    names = sorted({name for x in settings.values() for name in x})
    several = [x for x in names if len({json.dumps(y.get(x)) for y in settings.values()}) > 1]
    return {
        text: schema.clean(", ".join(f"{x} {values[x]}" for x in several if x in values))
        for text, values in settings.items()
    }


def as_object(settings: str) -> dict[str, Any]:
    """Return the hyperparameters in a JSON object; any other text counts as one hyperparameter."""
    try:
        found = json.loads(settings)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    return {"settings": settings} if settings else {}


def mode_order(modes: Sequence[str] | pd.Series, first: Sequence[str] = MODES) -> list[str]:
    return [x for x in first if x in set(modes)] + sorted(set(modes) - set(first))


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table sorted by size, environment (in order of appearance) and variant."""
    keys = []
    for name, first in {"mode": MODES, "env_id": table.get("env_id"), "size": SIZES}.items():
        if name in table:
            order = mode_order(table[name], list(dict.fromkeys(first)))
            keys.append(table[name].map({x: i for i, x in enumerate(order)}))
    return table.iloc[np.lexsort(keys)].reset_index(drop=True)


def timed(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs with durations; resumed runs and all agents but the first have none."""
    return runs[~is_untimed(runs)]


def under_load(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that started under load.

    The load average still includes the previous run, which may have used all cores.
    """
    return runs[runs["load"] > runs["cores"] + 0.5]


def shared(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs in the environments that all variants have in common; there may be none.

    If a variant lacks environments, exclude either these environments or the variant, whichever
    leaves more pairs to compare.
    """
    envs = [set(x) for _, x in runs.groupby("mode")["env_id"]]
    if len(envs) < 2:
        return runs
    choices = [set.intersection(*envs), *(a & b for a, b in combinations(envs, 2))]
    best = max(choices, key=lambda choice: len(choice) * comb(sum(choice <= x for x in envs), 2))
    part = runs[runs["env_id"].isin(best)]
    return part[part.groupby("mode")["env_id"].transform("nunique") == len(best)]


def comparable(runs: pd.DataFrame, value: str, by: Sequence[str] = ("size",)) -> pd.DataFrame:
    """Return the runs that have a `value`, in the environments that the variants share."""
    parts = [runs.head(0)]
    for _, group in runs.groupby(list(by), sort=False):
        if value in stats.WHOLE_RUN:
            group = stats.of_length(group)
        group = group.dropna(subset=[value])
        common = shared(group)
        parts.append(common if len(common) else group)  # keep all runs if nothing is shared
    return pd.concat(parts)


# === Durations ==================================================================================
def whole(runs: pd.DataFrame) -> str | None:
    """Return the training-time column that most variants have, or None if there is none.

    The column is process, or total, which excludes the imports.
    """
    counts = {x: runs.dropna(subset=[x])["mode"].nunique() for x in ("process", "total")}
    most = max(counts, key=counts.__getitem__)
    return most if counts[most] else None


def summarize(
    runs: pd.DataFrame, values: Sequence[str], baseline: str, by: Sequence[str] = ("size",)
) -> pd.DataFrame:
    """Return the mean of each duration and its ratio to the baseline, by group and variant."""
    runs = in_order(timed(runs))
    keys = [*by, "mode"]
    cells = list(dict.fromkeys([*keys, "env_id"]))
    table = runs.groupby(keys, sort=False)["run"].count().to_frame("runs")
    for value in values:
        known = comparable(runs, value, by)
        logs = np.log(known[value]).groupby([known[x] for x in cells]).mean().groupby(keys)
        table[value] = np.exp(logs.mean()).reindex(table.index)
        table[f"{value}_environments"] = logs.size().reindex(table.index, fill_value=0)
        ratios = stats.compare(known, value, baseline, by=by).set_index(keys)
        for end in stats.Interval._fields:
            table[f"{value}_{end}"] = ratios[end].reindex(table.index)
        is_baseline = table.index.get_level_values("mode") == baseline
        table.loc[is_baseline & table[value].notna(), f"{value}_estimate"] = 1.0
        if value in stats.WHOLE_RUN:
            length = known.groupby(list(by))["num_iterations"].max().rename("length")
            table = table.join(length)
    return in_order(table.reset_index())


def startups(experiment: Experiment) -> pd.DataFrame:
    """Return the startup time, its parts, and the difference from the baseline in seconds."""
    known = comparable(timed(experiment.runs), "startup")
    keys = ["size", "mode"]
    table = summarize(known, ("startup", "early"), experiment.baseline)[[*keys, "startup", "early"]]
    more = stats.compare(known, "startup", experiment.baseline, contrast=stats.more_seconds)
    names = list(PARTS)
    shares = known[names].div(known["startup"], axis=0).join(known[[*keys, "env_id"]])
    means = shares.groupby([*keys, "env_id"])[names].mean(skipna=False).groupby(keys).mean()
    table = table.join(means, on=keys).merge(more, on=keys, how="left")
    table[names] = table[names].mul(table["startup"], axis=0)
    return table


def compiling(experiment: Experiment) -> pd.DataFrame:
    """Compare the compile modes of each framework that also ran without compilation."""
    parts = []
    every = max((experiment.runs, experiment.synced), key=lambda x: x["mode"].nunique())
    for _, group in timed(every).groupby("framework"):
        compiled = [x for x in COMPILED if x in set(group["compile_mode"])]
        if compiled and (group["compile_mode"] == "none").any():
            baseline = group.loc[group["compile_mode"] == compiled[0], "mode"].iloc[0]
            table = summarize(group, ("steady", "first"), baseline)
            parts.append(table[table["mode"] != baseline].assign(compiled=baseline))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def contenders(runs: pd.DataFrame, contender: str, baseline: str) -> pd.DataFrame:
    """Return the ratios of the times of each contender, such as a platform, to the baseline."""
    runs = timed(runs)
    keys = ("settings", "size", "mode")
    values = ["startup", "steady", whole(runs) or "process"]
    parts = [
        stats.compare(runs, value, baseline, contender, keys).assign(value=value)
        for value in values
    ]
    table = pd.concat([x for x in parts if len(x)] or parts[:1], ignore_index=True)
    names = differences(list(dict.fromkeys(runs["settings"])))
    return in_order(table.assign(settings=table["settings"].map(names)))


# === Break-even =================================================================================
def crossings(experiment: Experiment) -> pd.DataFrame:
    """Return the number of iterations after which compiled code overtakes eager code.

    At this number n, the means of startup + (n - 1) * steady are equal; `seconds` is their value.
    Compiled code is significantly slower before `low` and significantly faster after `high`,
    the ends of the Fieller interval.
    """
    rows = []
    runs = timed(experiment.runs).dropna(subset=["startup", "steady"])
    for size, part in in_order(runs).groupby("size", sort=False):
        grid = np.geomspace(1, FARTHEST * part["num_iterations"].max(), 601)
        cells = part.groupby(["mode", "env_id", "repeat"])[["startup", "steady"]].mean()
        modes = part.drop_duplicates("mode")
        compiled = modes["compile_mode"].isin(WHOLLY_COMPILED)
        pairs = modes[~compiled].merge(modes[compiled], on="framework", suffixes=("", "_later"))
        for sooner, later in zip(pairs["mode"], pairs["mode_later"], strict=True):
            both = cells.loc[sooner].join(cells.loc[later], how="inner", rsuffix="_later")
            envs = both.index.get_level_values("env_id")
            if both.empty:
                continue
            logs = [
                np.log(both[[f"startup{x}"]].to_numpy() + np.outer(both[f"steady{x}"], grid - 1))
                for x in ("", "_later")
            ]
            ratio = stats.mean_interval(logs[1] - logs[0], envs)
            if ratio.estimate[0] <= 0 or ratio.estimate[-1] >= 0:
                continue
            ends = [falls_to_zero(x, grid) for x in ratio]
            means = stats.mean_interval(logs[1], envs).estimate
            rows.append((size, sooner, later, *ends, np.exp(np.interp(ends[0], grid, means))))
    names = ["size", "sooner", "later", *stats.Interval._fields, "seconds"]
    return pd.DataFrame(rows, columns=names)


def falls_to_zero(values: np.ndarray, grid: np.ndarray) -> float:
    """Return the grid position after which no value exceeds 0.

    It is 1 if no value exceeds 0, and infinite if the last value does.
    """
    if np.isnan(values[0]):
        return np.nan
    above = np.flatnonzero(values > 0)
    if not len(above):
        return 1.0
    if above[-1] == len(grid) - 1:
        return np.inf
    part = slice(above[-1], above[-1] + 2)
    return float(np.exp(np.interp(0, -values[part], np.log(grid[part]))))


def memory(experiment: Experiment) -> pd.DataFrame:
    """Return the peak memory in bytes, by size and variant."""
    runs = timed(experiment.runs)
    parts = [shared(x) for _, x in runs.groupby("size")]
    groups = pd.concat([runs.head(0), *parts]).groupby(["size", "mode"])
    table = groups[["peak_host_bytes", "peak_device_bytes"]].max().dropna(how="all")
    return in_order(table.reset_index())

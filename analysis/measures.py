"""Which runs may be compared, and what they say of time, in tables of numbers.

A bench is all runs of one platform, one algorithm and one set of hyperparameters. Seconds over
several runs are geometric means over repeats and then over environments. Every ratio is a time over
the baseline's: 2 is twice as long.
"""

import json
from collections.abc import Sequence
from itertools import combinations, permutations
from math import comb
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import schema, stats
from analysis.runs import PARTS, Data, is_untimed

BASELINES = ("ppo_linen", "dqn_linen")
# The order of tables and figures; what is not here comes after it, by name.
MODES = (
    *("ppo_linen", "ppo_nnx", "ppo_nnx_cached", "ppo_nnx_tree", "ppo_equinox"),
    *("ppo_torch_compile", "ppo_torch"),
    *("ppo_linen_vmap", "ppo_nnx_vmap", "ppo_torch_vmap"),
    *("ppo_linen_gymnasium", "ppo_torch_gymnasium"),
    *("sbx", "sb3", "sb3 --threads 1"),
    *("dqn_linen", "dqn_torch --compile", "dqn_torch", "dqn_linen_gymnasium"),
    *("dqn_torch_gymnasium --compile", "dqn_torch_gymnasium"),
    *("ppo_linen --no-jit", "ppo_nnx --no-jit", "ppo_equinox --no-jit", "ppo_torch --no-jit-env"),
)
SIZES = ("small", "medium", "large")
# Of a framework's compile modes, the first that was run is what the others are compared with.
COMPILED = ("jit", "compile", "cached_partial", "jit_partial", "env.jit")
FARTHEST = 10  # times the measured length: beyond it nothing is extrapolated


class Bench(NamedTuple):
    """Runs that may be compared: of one platform, one algorithm and its hyperparameters."""

    title: str
    runs: pd.DataFrame  # not made to wait between phases, or all if there are none
    synced: pd.DataFrame  # those with --sync-for-timing and steady phases
    iterations: pd.DataFrame  # of runs
    baseline: str


# === What may be compared =======================================================================
def benches(data: Data, baseline: str | None = None) -> list[Bench]:
    """Return the benches of data, those with most runs first."""
    runs = data.runs.assign(platform=platforms(data.runs))
    keys = ["platform", "algorithm", "settings"]
    groups = [x for _, x in runs.groupby(keys, sort=False)]
    groups.sort(key=len, reverse=True)
    return [
        make_bench(title, group, data, baseline)
        for title, group in zip(describe_benches(groups), groups, strict=True)
    ]


def platforms(runs: pd.DataFrame) -> pd.Series:
    """Return each run's platform; two starts of a machine whose times differ are two of them.

    They differ if one script's steady iterations do in any environment and size, by Welch's test
    of their logarithms, at 5% shared out among all these cells (Bonferroni).
    """
    named = runs["platform"].copy()
    for platform, group in runs[runs["boot"] != ""].groupby("platform"):
        boots = list(dict.fromkeys(group.sort_values("started")["boot"]))
        kept = boots[:1]
        for boot in boots[1:]:
            if differ(timed(group[group["boot"].isin(kept)]), timed(group[group["boot"] == boot])):
                named[group.index[group["boot"] == boot]] = f"{platform}, boot {boot}"
            else:
                kept.append(boot)
    return named


def differ(runs: pd.DataFrame, others: pd.DataFrame) -> bool:
    """Return whether any script takes another time in two sets of runs."""
    cells = ["mode", "settings", "sync", "env_id", "size"]
    sides = [x.dropna(subset=["steady"]).groupby(cells)["steady"] for x in (runs, others)]
    both = [x for x in sides[0].groups if x in sides[1].groups]
    logs = [[np.log(side.get_group(x).to_numpy()) for side in sides] for x in both]
    logs = [x for x in logs if min(len(x[0]), len(x[1])) > 1]
    if not logs:
        return False
    found = [stats.welch(*x, 1 - (1 - stats.CONFIDENCE) / len(logs)) for x in logs]
    return any(x.low > 0 or x.high < 0 for x in found)


def describe_benches(groups: Sequence[pd.DataFrame]) -> list[str]:
    """Return each group's platform and, of its hyperparameters, those that the groups differ in."""
    titles = []
    several = len({x["algorithm"].iloc[0] for x in groups}) > 1
    for group in groups:
        platform, algorithm, text = group[["platform", "algorithm", "settings"]].iloc[0]
        # Those of another algorithm have other names: to list them all would tell nothing.
        alike = [x["settings"].iloc[0] for x in groups if x["algorithm"].iloc[0] == algorithm]
        parts = [algorithm.upper() if several else "", platform or "platform not named"]
        titles.append(", ".join(filter(None, [*parts, differences(alike)[text]])))
    return titles


def differences(texts: Sequence[str]) -> dict[str, str]:
    """Return each text of hyperparameters and, in words, those that the texts differ in."""
    settings = {text: as_object(text) for text in texts}
    names = sorted({name for x in settings.values() for name in x})
    several = [x for x in names if len({json.dumps(y.get(x)) for y in settings.values()}) > 1]
    return {
        text: schema.clean(", ".join(f"{x} {own[x]}" for x in several if x in own))
        for text, own in settings.items()
    }


def as_object(settings: str) -> dict[str, Any]:
    """Return hyperparameters by name; in a foreign table they may be any text, or none."""
    try:
        found = json.loads(settings)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"settings": settings} if settings else {}


def make_bench(title: str, runs: pd.DataFrame, data: Data, baseline: str | None) -> Bench:
    synced = runs[runs["sync"] & runs["rollout_steady"].notna()]
    runs = runs if runs["sync"].all() else runs[~runs["sync"]]
    iterations = data.iterations[data.iterations["run"].isin(runs["run"])]
    return Bench(title, runs, synced, iterations, choose_baseline(runs, baseline))


def choose_baseline(runs: pd.DataFrame, wanted: str | None = None) -> str:
    """Return the mode wanted if it was run, or else the JAX one, or the mode with most runs."""
    counts = runs["mode"].value_counts()
    found = [x for x in (wanted, *BASELINES, *counts.index) if x in counts.index]
    return str(found[0]) if found else ""


def mode_order(modes: Sequence[str] | pd.Series) -> list[str]:
    return [x for x in MODES if x in set(modes)] + sorted(set(modes) - set(MODES))


def size_order(sizes: Sequence[str] | pd.Series) -> list[str]:
    return [x for x in SIZES if x in set(sizes)] + sorted(set(sizes) - set(SIZES))


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table by size, environment (as they come) and mode."""
    orders = {"size": size_order, "env_id": pd.unique, "mode": mode_order}
    orders = {x: list(order(table[x])) for x, order in orders.items() if x in table}
    places = [table[x].map({y: i for i, y in enumerate(order)}) for x, order in orders.items()]
    return table.iloc[np.lexsort(places[::-1])].reset_index(drop=True)


def timed(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that count for durations: never resumed, and one of each program's agents."""
    return runs[~is_untimed(runs)]


def under_load(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs at whose start others wanted the cores; one may be the run before it."""
    return runs[runs["load"] > runs["cores"] + 1]


def shared(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of some modes in environments that have all of these, which may be none.

    Means over environments may be compared only if they are the same ones. Where a mode lacks some,
    they are left out or the mode is, whichever leaves more pairs of modes to compare.
    """
    envs = [set(x) for _, x in runs.groupby("mode")["env_id"]]
    if len(envs) < 2:
        return runs
    choices = [set.intersection(*envs), *(a & b for a, b in combinations(envs, 2))]

    def pairs(choice: set[str]) -> int:
        return len(choice) * comb(sum(choice <= x for x in envs), 2)

    best = max(choices, key=pairs)
    part = runs[runs["env_id"].isin(best)]
    return part[part.groupby("mode")["env_id"].transform("nunique") == len(best)]


# === Durations ==================================================================================
def mean_seconds(runs: pd.DataFrame, value: str) -> float:
    """Return the geometric mean over environments of that over repeats, or NaN."""
    logs = np.log(runs[value]).groupby(runs["env_id"]).mean().dropna()
    return float(np.exp(logs.mean())) if len(logs) else np.nan


def measure(
    runs: pd.DataFrame, values: Sequence[str], baseline: str, by: Sequence[str] = ("size",)
) -> pd.DataFrame:
    """Return a row per group and mode: each duration's mean, and how many times the baseline's.

    Columns: those of by, mode, runs, and of each value: VALUE in seconds, of environments that the
    modes share, VALUE_environments, and the ratio VALUE_estimate, VALUE_low, VALUE_high. What a
    whole run takes is of one length, the commonest, which the column length holds.
    """
    runs = in_order(timed(runs))
    groups = [group for _, group in runs.groupby(list(by), sort=False)]
    keys = [*by, "mode"]
    table = runs.groupby(keys, sort=False)["run"].count().to_frame("runs")
    for value in values:
        known = pd.concat([runs.head(0), *(known_of(group, value) for group in groups)])
        own = {key: part for key, part in known.groupby(keys, sort=False)}
        table[value] = pd.Series({x: mean_seconds(part, value) for x, part in own.items()})
        envs = pd.Series({x: part["env_id"].nunique() for x, part in own.items()})
        table[f"{value}_environments"] = envs.reindex(table.index, fill_value=0)
        ratios = stats.compare(known, value, baseline, by=by).set_index(keys)
        is_baseline = table.index.get_level_values("mode") == baseline
        one = pd.Series(1.0, table.index).where(is_baseline & table[value].notna())
        table[f"{value}_estimate"] = ratios["estimate"].reindex(table.index).fillna(one)
        for end in ("low", "high"):
            table[f"{value}_{end}"] = ratios[end].reindex(table.index)
        if value in stats.WHOLE_RUN:
            length = known.groupby(list(by))["num_iterations"].max().rename("length")
            table = table.join(length)
    return in_order(table.reset_index())


def known_of(runs: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return the runs with a duration, in environments shared() by modes, or else in all."""
    if value in stats.WHOLE_RUN:
        runs = stats.of_length(runs)
    runs = runs.dropna(subset=[value])
    common = shared(runs)
    return common if len(common) else runs


def startups(bench: Bench) -> pd.DataFrame:
    """Return size, mode, the startup and its parts in seconds, and seconds more than baseline.

    The parts add up to the startup: each is its mean share. One not known of every run is NaN.
    """
    rows = []
    for size in size_order(bench.runs["size"]):
        runs = known_of(timed(bench.runs[bench.runs["size"] == size]), "startup")
        more = stats.compare(runs, "startup", bench.baseline, contrast=stats.more_seconds)
        more = more.set_index("mode")
        for mode in mode_order(runs["mode"]):
            own = runs[runs["mode"] == mode]
            row: dict[str, Any] = {"size": size, "mode": mode}
            row["startup"] = mean_seconds(own, "startup")
            shares = own[list(PARTS)].div(own["startup"], axis=0)
            shares = shares.groupby(own["env_id"]).mean().mean().where(shares.notna().all())
            row |= {x: float(shares[x]) * row["startup"] for x in PARTS}
            if mode in more.index:
                row |= {x: more.loc[mode, x] for x in stats.Interval._fields}
            rows.append(row)
    columns = ["size", "mode", *PARTS, "startup", *stats.Interval._fields]
    return pd.DataFrame(rows, columns=columns)


def compiling(runs: pd.DataFrame) -> pd.DataFrame:
    """Return what each framework's modes cost beside its compiled one: steady and first.

    Columns: those of measure(), and compiled, the mode that they are compared with.
    """
    parts = []
    for _, group in timed(runs).groupby("framework"):
        compiled = [x for x in COMPILED if x in set(group["compile_mode"])]
        if not compiled or not (group["compile_mode"] == "none").any():
            continue
        baseline = group.loc[group["compile_mode"] == compiled[0], "mode"].iloc[0]
        table = measure(group, ("steady", "first"), baseline)
        parts.append(table[table["mode"] != baseline].assign(compiled=baseline))
    return in_order(pd.concat(parts)) if parts else pd.DataFrame(columns=["size", "mode"])


def contenders(
    runs: pd.DataFrame, contender: str, baseline: str, by: Sequence[str] = ("size", "mode")
) -> pd.DataFrame:
    """Return how long each platform, or other contender, takes over the baseline.

    Columns: contender, value (startup, steady or process), settings (what they differ in), those of
    by, and stats.compare()'s.
    """
    runs = timed(runs)
    parts = [
        stats.compare(runs, value, baseline, contender, ("settings", *by)).assign(value=value)
        for value in ("startup", "steady", "process")
    ]
    table = pd.concat([x for x in parts if len(x)] or parts[:1], ignore_index=True)
    words = differences(list(dict.fromkeys(runs["settings"])))
    return in_order(table.assign(settings=table["settings"].map(words)))


# === Break-even =================================================================================
def curves(runs: pd.DataFrame, iterations: np.ndarray) -> dict[str, pd.DataFrame]:
    """Return, by mode, the log of the seconds to the end of so many iterations of a size's runs.

    They are startup + (n - 1) steady iterations: a row per environment and repeat, a column per n.
    """
    cells = runs.groupby(["mode", "env_id", "repeat"])[["startup", "steady"]].mean()
    found = {}
    for mode in mode_order(runs["mode"]):
        part = cells.loc[mode]
        seconds = part["startup"].to_numpy()[:, None] + np.outer(part["steady"], iterations - 1)
        found[mode] = pd.DataFrame(np.log(seconds), index=part.index)
    return found


def crossings(bench: Bench) -> pd.DataFrame:
    """Return where a framework's mode that starts later has overtaken one that starts sooner.

    sooner and later are the modes; iterations is where their mean times are equal. From low on the
    95% interval of their ratio no longer says that later is behind, and from high on it says that
    it is ahead (Fieller's method): high is infinite if it does not to the end, both are NaN without
    an interval, and low is 1 if the startups cannot be told apart. seconds is the time by then.
    What lies beyond FARTHEST times the measured length is left out.
    """
    rows = []
    runs = timed(bench.runs).dropna(subset=["startup", "steady"])
    frameworks = runs.drop_duplicates("mode").set_index("mode")["framework"]
    for size in size_order(runs["size"]):
        part = runs[runs["size"] == size]
        grid = np.geomspace(1, FARTHEST * part["num_iterations"].max(), 601)
        found = curves(part, grid)
        for sooner, later in permutations(found, 2):
            ratios = (found[later] - found[sooner]).dropna()
            if frameworks[sooner] != frameworks[later] or ratios.empty:
                continue
            ratio = stats.mean_interval(ratios.to_numpy(), ratios.index.get_level_values("env_id"))
            if ratio.estimate[0] <= 0 or ratio.estimate[-1] >= 0:
                continue
            at = end_of(ratio.estimate > 0, ratio.estimate, grid)
            row = {"size": size, "sooner": sooner, "later": later, "iterations": at}
            if not np.isnan(ratio.low[0]):
                row["low"] = end_of(ratio.low > 0, ratio.low, grid)
                row["high"] = end_of(ratio.high >= 0, ratio.high, grid)
            seconds = found[later].loc[ratios.index].groupby("env_id").mean().mean()
            row["seconds"] = float(np.exp(np.interp(at, grid, seconds)))
            rows.append(row)
    numbers = ["iterations", "low", "high", "seconds"]
    table = pd.DataFrame(rows, columns=["size", "sooner", "later", *numbers])
    return table.astype(dict.fromkeys(numbers, "float64"))


def end_of(true: np.ndarray, values: np.ndarray, grid: np.ndarray) -> float:
    """Return where on the grid values are 0 after the last point at which something is true.

    It is 1 if that is so nowhere, and infinite if it is so to the end.
    """
    if not true.any():
        return 1.0
    last = int(np.flatnonzero(true)[-1])
    if last == len(grid) - 1:
        return np.inf
    part = slice(last, last + 2)
    return float(np.exp(np.interp(0, -values[part], np.log(grid[part]))))


# === Memory and machines ========================================================================
def memory(bench: Bench) -> pd.DataFrame:
    """Return the most memory, in bytes, that any run of a size and mode used."""
    runs = timed(bench.runs)
    parts = [shared(runs[runs["size"] == size]) for size in size_order(runs["size"])]
    groups = pd.concat([runs.head(0), *parts]).groupby(["size", "mode"])
    table = groups[["peak_host_bytes", "peak_device_bytes"]].max().dropna(how="all")
    return in_order(table.reset_index())


def machines(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per kind of machine and set of versions."""
    names = ["platform", "os", "container", "commit", "python", "torch", "jax", "flax"]
    groups = runs.groupby(names, sort=False, as_index=False)
    return groups.agg(runs=("run", "size"), first=("started", "min"), last=("started", "max"))

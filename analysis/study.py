"""What the runs say of time, in tables of numbers: report, notebooks and README show these.

Seconds over several runs are geometric means over repeats and then over environments; returns are
means. Every ratio is a time over the baseline's: 2 is twice as long.
"""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pandas as pd

from analysis import stats
from analysis.bench import Bench, differences, in_order, mode_order, shared, size_order, timed
from analysis.learning import Environment, learned, scores
from analysis.runs import PARTS

# Of a framework's compile modes, the first that was run is what the others are compared with.
COMPILED = ("jit", "compile", "cached_partial", "env.jit")
BUDGETS = (100_000, 1_000_000, 10_000_000, 100_000_000)  # environment steps
EVERY = "all environments"
FULL = 5_000_000  # steps of a whole training in MinAtar's paper
LONGEST = 1e6  # iterations: a crossing beyond that is none


# === The answer =================================================================================
def mean_seconds(runs: pd.DataFrame, value: str) -> float:
    """Return the geometric mean over environments of that over repeats, or NaN."""
    logs = np.log(runs[value]).groupby(runs["env_id"]).mean().dropna()
    return float(np.exp(logs.mean())) if len(logs) else np.nan


def summary(bench: Bench, environments: dict[str, Environment]) -> pd.DataFrame:
    """Return a row per model size and mode: durations in seconds, ratios, and the return.

    process is of whole trainings of `length` iterations. return is the mean final return if the
    size was run in one environment, and score that of learning.scores(). environments and
    process_environments count those behind steady, or else startup, and behind process.
    """
    known = scores(bench, environments).set_index(["size", "mode"])["score"]
    rows = []
    for size in size_order(bench.runs["size"]):
        runs = bench.runs[bench.runs["size"] == size]
        whole = stats.of_length(timed(runs))
        steady = ratio_of(runs, "steady", bench.baseline)
        process = ratio_of(whole, "process", bench.baseline)
        counted = "steady" if timed(runs)["steady"].notna().any() else "startup"
        for mode in mode_order(runs["mode"]):
            rows.append(
                {
                    "size": size,
                    "mode": mode,
                    "runs": int((runs["mode"] == mode).sum()),
                    "environments": cells_of(runs, mode, counted)["env_id"].nunique(),
                    "startup": seconds_of(runs, mode, "startup"),
                    "steady": seconds_of(runs, mode, "steady"),
                    **{f"steady_{x}": y for x, y in steady.get(mode, {}).items()},
                    "length": whole["num_iterations"].max(),
                    "process_environments": cells_of(whole, mode, "process")["env_id"].nunique(),
                    "process": seconds_of(whole, mode, "process"),
                    **{f"process_{x}": y for x, y in process.get(mode, {}).items()},
                    "return": return_of(runs, mode),
                    "score": float(known.get((size, mode), np.nan)),
                }
            )
    return pd.DataFrame(rows)


def return_of(runs: pd.DataFrame, mode: str) -> float:
    """Return the mean final return of a mode, if there is but one environment, or NaN."""
    runs = learned(runs)
    values = runs.loc[runs["mode"] == mode, "final_return"]
    return float(values.mean()) if runs["env_id"].nunique() == 1 else np.nan


def cells_of(runs: pd.DataFrame, mode: str, value: str) -> pd.DataFrame:
    """Return a mode's runs with a duration, in environments shared() by modes, or else in all."""
    known = timed(runs).dropna(subset=[value])
    common = shared(known)
    known = common if len(common) else known
    return known[known["mode"] == mode]


def seconds_of(runs: pd.DataFrame, mode: str, value: str) -> float:
    return mean_seconds(cells_of(runs, mode, value), value)


def ratio_of(runs: pd.DataFrame, value: str, baseline: str) -> dict[str, dict[str, float]]:
    """Return, by mode, the ratio of a size's runs to the baseline's with its interval."""
    table = stats.compare(timed(runs), value, baseline)
    ratios = {
        row["mode"]: {x: row[x] for x in stats.Interval._fields} for _, row in table.iterrows()
    }
    one = 1.0 if runs.loc[runs["mode"] == baseline, value].notna().any() else np.nan
    return {baseline: {"estimate": one, "low": np.nan, "high": np.nan}} | ratios


# === Time against iterations ====================================================================
def curves(runs: pd.DataFrame, iterations: np.ndarray) -> dict[str, pd.DataFrame]:
    """Return, by mode, the log of the seconds to the end of so many iterations of a size's runs.

    They are startup + (n - 1) steady iterations: a row per environment and repeat, a column per n.
    """
    runs = timed(runs).dropna(subset=["startup", "steady"])
    cells = runs.groupby(["mode", "env_id", "repeat"])[["startup", "steady"]].mean()
    found = {}
    for mode in mode_order(runs["mode"]):
        part = cells.loc[mode]
        seconds = part["startup"].to_numpy()[:, None] + np.outer(part["steady"], iterations - 1)
        found[mode] = pd.DataFrame(np.log(seconds), index=part.index)
    return found


def mean_curve(logs: pd.DataFrame, confidence: float = stats.CONFIDENCE) -> stats.Interval:
    envs = logs.index.get_level_values("env_id")
    return stats.mean_interval(logs.to_numpy(), envs, confidence)


def drawn(bench: Bench) -> Bench:
    """Return the bench with the runs behind its lines: in environments that its modes share."""
    runs = timed(bench.runs).dropna(subset=["startup", "steady"])
    sizes = [shared(runs[runs["size"] == size]) for size in size_order(runs["size"])]
    return bench._replace(runs=pd.concat([runs.head(0), *sizes]))


def lines(bench: Bench) -> pd.DataFrame:
    """Return seconds against iterations: size, mode, iterations, estimate, low, high."""
    parts, bench = [], drawn(bench)
    for size in size_order(bench.runs["size"]):
        runs = bench.runs[bench.runs["size"] == size]
        iterations = np.geomspace(1, max([1000, *3 * runs["num_iterations"].dropna()]), 60)
        for mode, logs in curves(runs, iterations).items():
            interval = stats.Interval(*np.exp(mean_curve(logs)))
            part = {"size": size, "mode": mode, "iterations": iterations}
            parts.append(pd.DataFrame(part | interval._asdict()))
    columns = ["size", "mode", "iterations", *stats.Interval._fields]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def measured(bench: Bench) -> pd.DataFrame:
    """Return what the lines' runs took to the length that all have, in seconds.

    Columns: size, mode, iterations, seconds.
    """
    rows, bench = [], drawn(bench)
    ends = bench.iterations.set_index(["run", "iteration"])["time/elapsed"].dropna()
    for size in size_order(bench.runs["size"]):
        runs = bench.runs[bench.runs["size"] == size]
        length = runs["num_iterations"].min()
        at = pd.MultiIndex.from_product([runs["run"], [length - 1]])
        seconds = runs["imports"] + ends.reindex(at).to_numpy()
        whole = runs["process"].where(runs["num_iterations"] == length)
        runs = runs.assign(seconds=seconds.fillna(whole)).dropna(subset=["seconds"])
        for mode in mode_order(runs["mode"]):
            row = {"size": size, "mode": mode, "iterations": length}
            rows.append(row | {"seconds": mean_seconds(runs[runs["mode"] == mode], "seconds")})
    return pd.DataFrame(rows, columns=["size", "mode", "iterations", "seconds"])


def crossings(bench: Bench) -> pd.DataFrame:
    """Return, of every two modes, where the one that starts later has overtaken the other.

    sooner and later are the modes; iterations is where their mean times are equal. From low on the
    95% interval of their ratio no longer says that later is behind, and from high on it says that
    it is ahead (Fieller's method): high is infinite if it does not to the end, both are NaN without
    an interval, and low is 1 if the startups cannot be told apart. seconds is the time by then.
    """
    grid = np.geomspace(1, LONGEST, 601)
    rows = []
    for size in size_order(bench.runs["size"]):
        found = curves(bench.runs[bench.runs["size"] == size], grid)
        for sooner, later in permutations(found, 2):
            ratios = (found[later] - found[sooner]).dropna()
            if ratios.empty:
                continue
            ratio = mean_curve(ratios)
            if ratio.estimate[0] <= 0 or ratio.estimate[-1] >= 0:
                continue
            at = end_of(ratio.estimate > 0, ratio.estimate, grid)
            row = {"size": size, "sooner": sooner, "later": later, "iterations": at}
            if not np.isnan(ratio.low[0]):
                row["low"] = end_of(ratio.low > 0, ratio.low, grid)
                row["high"] = end_of(ratio.high >= 0, ratio.high, grid)
            seconds = mean_curve(found[later].loc[ratios.index]).estimate
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


def clear(table: pd.DataFrame) -> pd.DataFrame:
    """Return the crossings of modes of which one clearly starts sooner, and the other ends so."""
    return table[(table["low"] > 1) & np.isfinite(table["high"])]


def apart(table: pd.DataFrame) -> pd.DataFrame:
    """Return the crossings that can be told apart in a figure: of those close by, the first."""
    kept: list[dict[str, Any]] = []
    for row in table.to_dict("records"):
        near = [
            x["size"] == row["size"]
            and max(abs(np.log(x[name] / row[name])) for name in ("iterations", "seconds")) < 0.4
            for x in kept
        ]
        kept += [] if any(near) else [row]
    return pd.DataFrame(kept, columns=table.columns)


# === A decision by case =========================================================================
def decisions(bench: Bench) -> pd.DataFrame:
    """Return which mode is done first, by model size, environments' cost and budget of steps.

    Columns: size, environments, budget (steps), iterations, mode, seconds, and ties: the modes that
    cannot be told from it. Without any interval, ties is None: it is no claim.
    """
    rows = []
    for size in size_order(bench.runs["size"]):
        runs = bench.runs[bench.runs["size"] == size]
        for name, envs in cost_classes(bench, size).items():
            part = runs[runs["env_id"].isin(envs)]
            batch = part["batch_size"].dropna().unique()
            for budget in BUDGETS if len(batch) == 1 else ():
                count = max(1.0, np.ceil(budget / batch[0]))
                known = timed(part).dropna(subset=["startup", "steady"])
                found = curves(shared(known), np.array([count]))
                if len(found) > 1:
                    row = {"size": size, "environments": name, "budget": budget}
                    rows.append(row | {"iterations": count, **first_done(found)})
    columns = ["size", "environments", "budget", "iterations", "mode", "seconds", "ties"]
    return pd.DataFrame(rows, columns=columns)


def first_done(found: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """Return the mode with the shortest mean time, that time, and the modes like it.

    The best of many is so by luck as well, and each of the others may be the one that it beat. With
    the 5% shared out among them (Bonferroni), mode and ties hold the truly first 95 times in 100.
    """
    means = {mode: float(mean_curve(logs).estimate[0]) for mode, logs in found.items()}
    best = min(means, key=lambda mode: means[mode])
    confidence = 1 - 2 * (1 - stats.CONFIDENCE) / max(2, len(found) - 1)
    lows = {}
    for mode in found.keys() - {best}:
        pairs = (found[mode] - found[best]).dropna()
        lows[mode] = mean_curve(pairs, confidence).low[0] if len(pairs) else np.nan
    ties = [x for x in found if x in lows and not lows[x] > 0]
    known = any(not np.isnan(x) for x in lows.values())
    return {"mode": best, "seconds": float(np.exp(means[best])), "ties": ties if known else None}


def env_costs(bench: Bench, size: str) -> pd.Series:
    """Return, by environment and ascending, the seconds of the baseline's steady iteration."""
    runs = timed(bench.runs).dropna(subset=["steady"])
    runs = runs[runs["size"] == size]
    if bench.baseline in set(runs["mode"]):
        runs = runs[runs["mode"] == bench.baseline]
    costs = np.exp(np.log(runs["steady"]).groupby(runs["env_id"]).mean())
    return costs.sort_values()


def cost_classes(bench: Bench, size: str) -> dict[str, list[str]]:
    """Return groups of environments: all and, of six or more, the cheaper and the dearer half."""
    envs = [str(x) for x in env_costs(bench, size).index]
    if len(envs) == 1:
        return {envs[0]: envs}
    half = len(envs) // 2
    groups = {EVERY: envs} if envs else {}
    if len(envs) >= 6:
        cheap, dear = envs[:half], envs[half:]
        groups |= {f"the {half} cheapest": cheap, f"the {len(dear)} costliest": dear}
    return groups


# === By environment, by phase, by compile mode, by platform =====================================
def by_environment(bench: Bench, value: str) -> pd.DataFrame:
    """Return ratios to the baseline by size and environment, cheapest first, then over all.

    Environments come in one order for all sizes. Whole trainings are those of a size's commonest
    length. Columns: size, env_id (EVERY for all), mode, estimate, low, high, environments, blocks.
    """
    runs = timed(bench.runs)
    if value in stats.WHOLE_RUN:
        sizes = [stats.of_length(group) for _, group in runs.groupby("size", sort=False)]
        runs = pd.concat([runs.head(0), *sizes])
    each = stats.compare(runs, value, bench.baseline, by=("size", "env_id"))
    every = stats.compare(runs, value, bench.baseline).assign(env_id=EVERY)
    several = every[every["environments"] > 1]
    order = [x for size in size_order(runs["size"]) for x in env_costs(bench, size).index]
    order = list(dict.fromkeys([*order, *each["env_id"]]))  # those too short for a cost come last
    each = each.sort_values("env_id", key=lambda x: x.map(order.index), kind="stable")
    table = in_order(pd.concat([each, several], ignore_index=True))
    return table[["size", "env_id", "mode", *stats.Interval._fields, "environments", "blocks"]]


def split(runs: pd.DataFrame, mode: str, total: str, parts: Sequence[str]) -> dict[str, float]:
    """Return a duration and its parts, which add up to it: each by its mean share.

    A part that is not known of every run is NaN.
    """
    cells = cells_of(runs, mode, total)
    seconds = mean_seconds(cells, total)
    shares = cells[list(parts)].div(cells[total], axis=0)
    shares = shares.groupby(cells["env_id"]).mean().mean().where(shares.notna().all())
    return {x: float(shares[x]) * seconds for x in parts} | {total: seconds}


def startups(bench: Bench) -> pd.DataFrame:
    """Return size, mode, the startup and its parts in seconds, and seconds more than baseline."""
    rows = []
    for size in size_order(bench.runs["size"]):
        runs = timed(bench.runs[bench.runs["size"] == size])
        more = stats.compare(runs, "startup", bench.baseline, contrast=stats.more_seconds)
        more = more.set_index("mode")
        for mode in mode_order(runs["mode"]):
            row: dict[str, Any] = {"size": size, "mode": mode}
            row |= split(runs, mode, "startup", PARTS)
            if mode in more.index:
                row |= {x: more.loc[mode, x] for x in stats.Interval._fields}
            rows.append(row)
    columns = ["size", "mode", *PARTS, "startup", *stats.Interval._fields]
    return pd.DataFrame(rows, columns=columns)


def trainings(bench: Bench) -> pd.DataFrame:
    """Return size, mode, length, and whole trainings with their parts in seconds; rest is after
    iteration 0."""
    rows = []
    for size in size_order(bench.runs["size"]):
        whole = stats.of_length(timed(bench.runs[bench.runs["size"] == size]))
        whole = whole.dropna(subset=["process"])
        for mode in mode_order(whole["mode"]):
            row = {"size": size, "mode": mode, "length": whole["num_iterations"].iloc[0]}
            parts = split(whole, mode, "startup", PARTS)
            seconds = seconds_of(whole, mode, "process")
            rows.append(row | parts | {"rest": seconds - parts["startup"], "process": seconds})
    return pd.DataFrame(rows, columns=["size", "mode", "length", *PARTS, "rest", "process"])


def pace(bench: Bench) -> pd.DataFrame:
    """Return what an environment step costs, in seconds, and its ratio to the baseline's.

    Columns: size, env_id, mode, runs, length (steps), startup, step, whole (a training of that
    length, measured where one was not resumed), full (one of FULL steps: beyond the length by
    steady steps), and the ratio: estimate, low, high.
    """
    runs = timed(bench.runs).dropna(subset=["steady", "batch_size"])
    runs = runs.assign(step=runs["steady"] / runs["batch_size"])
    rows = []
    for _, part in runs.groupby(["size", "env_id"], sort=False):
        ratios = ratio_of(part, "steady", bench.baseline)
        for mode in mode_order(part["mode"]):
            own = part[part["mode"] == mode]
            row = {x: own[x].iloc[0] for x in ("size", "env_id", "mode")} | {"runs": len(own)}
            batch, length = own["batch_size"].iloc[0], part["num_iterations"].max()
            row |= {x: mean_seconds(own, x) for x in ("startup", "step")}
            whole = mean_seconds(own[own["num_iterations"] == length], "process")
            if np.isnan(whole):
                whole = row["startup"] + row["step"] * (length - 1) * batch
            full = whole + row["step"] * (FULL - length * batch)
            row |= {"length": length * batch, "whole": whole, "full": full}
            rows.append(row | ratios.get(mode, {}))
    columns = ["size", "env_id", "mode", "runs", "length", "startup", "step", "whole", "full"]
    return in_order(pd.DataFrame(rows, columns=[*columns, *stats.Interval._fields]))


def phases(bench: Bench) -> pd.DataFrame:
    """Return size, mode, seconds of rollout and update of synchronised runs, and their ratios."""
    rows = []
    for size in size_order(bench.synced["size"]):
        runs = timed(bench.synced[bench.synced["size"] == size])
        names = ("rollout", "update")
        ratios = {x: ratio_of(runs, f"{x}_steady", bench.synced_baseline) for x in names}
        for mode in mode_order(runs["mode"]):
            row: dict[str, Any] = {"size": size, "mode": mode}
            for name in names:
                row[name] = seconds_of(runs, mode, f"{name}_steady")
                row |= {f"{name}_{x}": y for x, y in ratios[name].get(mode, {}).items()}
            rows.append(row | {"share": row["rollout"] / (row["rollout"] + row["update"])})
    return pd.DataFrame(rows)


def compiling(runs: pd.DataFrame) -> pd.DataFrame:
    """Return what running op by op costs in each framework that was run both ways.

    Columns: size, framework, compiled (a mode), mode, value (steady or first), estimate, low, high.
    """
    parts = []
    runs = timed(runs)
    for framework, group in runs.groupby("framework"):
        compiled = [x for x in COMPILED if x in set(group["compile_mode"])]
        if not compiled or not (group["compile_mode"] == "none").any():
            continue
        baseline = group.loc[group["compile_mode"] == compiled[0], "mode"].iloc[0]
        for value in ("steady", "first"):
            table = stats.compare(group, value, baseline)
            start = {"framework": framework, "compiled": baseline, "value": value}
            parts.append(table.assign(**start))
    columns = ["size", "framework", "compiled", "mode", "value", *stats.Interval._fields]
    columns += ["environments", "blocks"]
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)
    return in_order(table[columns])


def most_modes(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the synchronised or the other runs, whichever have more modes."""
    groups = [group for _, group in runs.groupby("sync")]
    return max(groups, key=lambda group: group["mode"].nunique(), default=runs)


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


# === Noise, memory, machines ====================================================================
def noise(bench: Bench, value: str) -> tuple[float, int]:
    """Return how many times as long a cell's slowest run takes as its fastest, in the worst cell.

    A cell is all runs of one mode, environment and size. The second value is how many cells have
    more than one run; without any, the first is NaN.
    """
    runs = timed(bench.runs).dropna(subset=[value])
    cells = runs.groupby(["mode", "env_id", "size"])[value].agg(["min", "max", "size"])
    cells = cells[cells["size"] > 1]
    if cells.empty:
        return np.nan, 0
    return float((cells["max"] / cells["min"]).max()), len(cells)


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

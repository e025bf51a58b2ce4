"""What the data say, in sentences computed from them, so that none can outlive its number."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from analysis import learning, stats, study
from analysis.bench import Bench, mode_order, shared, size_order, timed, under_load

LATE_COMPILING = 1.25  # iterations 1-7 that take this many times a steady one


# === Words ======================================================================================
def join(parts: Sequence[str], last: str = "and") -> str:
    """Return "a", "a and b" or "a, b and c"."""
    *most, end = parts
    return f"{', '.join(most)} {last} {end}" if most else end


def some(names: Sequence[str], most: int = 10) -> str:
    """Return the names joined, of which those beyond most are only counted."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return join([*names[:most], *more])


def counted(counts: Iterable[float], name: str) -> str:
    """Return "1 run", "3 runs" or "1 to 3 runs", from the lowest to the highest of counts."""
    known = [x for x in counts if not np.isnan(x)]
    if not known:
        return f"an unknown number of {name}s"
    low, high = min(known), max(known)
    span = f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
    return f"{span} {name}{'' if high == 1 else 's'}"


def number(value: float) -> str:
    """Return a number with three digits, or "-" if there is none."""
    if not np.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}".rstrip(".")


def bound(value: float) -> str:
    """Return an interval's end, with more digits where three would hide on what side of 1 it is."""
    text = "no end" if np.isinf(value) else number(value)
    return f"{value:.4f}" if text == "1.00" and abs(value - 1) > 5e-5 else text


def interval(estimate: float, low: float, high: float) -> str:
    """Return "estimate [low, high]", or the estimate alone where there is no interval."""
    if not np.isfinite(estimate) or np.isnan(low):
        return number(estimate)
    bottom = "<0.001" if 0 < low < 0.001 <= estimate else bound(low)
    top = ">1,000,000" if estimate <= 1e6 < high < np.inf else bound(high)
    return f"{number(estimate)} [{bottom}, {top}]"


def of_size(size: str, sizes: Sequence[str]) -> str:
    return f" with the {size} network" if len(set(sizes)) > 1 else ""


# === Durations ==================================================================================
def ratios(
    table: pd.DataFrame,
    baseline: str,
    what: str,
    columns: tuple[str, ...] = ("estimate", "low", "high"),
) -> list[str]:
    """Return how long each mode takes relative to the baseline, a sentence per size.

    table has the columns size, mode and those of an interval.
    """
    sizes, sentences = list(dict.fromkeys(table["size"])), []
    table = table[table["mode"] != baseline].dropna(subset=[columns[0]])
    for size, rows in table.groupby("size", sort=False):
        where = of_size(str(size), sizes)
        values = {row["mode"]: [row[x] for x in columns] for _, row in rows.iterrows()}
        if all(np.isnan(x[1]) for x in values.values()):
            continue  # what was measured once is in the table, and is no claim
        differ = [
            f"{interval(*x)} {'times as long ' * (i == 0)}in {mode}"
            for i, (mode, x) in enumerate(
                (mode, x) for mode, x in values.items() if x[1] > 1 or x[2] < 1
            )
        ]
        alike = [f"{mode} ({interval(*x)})" for mode, x in values.items() if x[1] <= 1 <= x[2]]
        parts = [f"Relative to {baseline}, {what}{where} takes {join(differ)}."] if differ else []
        if alike:
            than = "" if differ else f" from {baseline} in {what}{where}"
            parts.append(f"No difference{than} can be shown for {join(alike)}.")
        sentences.append(" ".join(parts))
    return sentences


def crossings(bench: Bench) -> list[str]:
    """Name the modes that start later and overtake, where both are clear."""
    table = study.clear(study.crossings(bench))
    sizes = size_order(bench.runs["size"])
    measured = study.drawn(bench).runs.groupby("size")["num_iterations"].min()
    sentences = [
        f"{row['later']} starts later than {row['sooner']} and has overtaken it after "
        f"{interval(row['iterations'], row['low'], row['high'])} iterations"
        f"{of_size(row['size'], sizes)}, {number(row['seconds'])} s"
        f"{', extrapolated' if row['iterations'] > measured.get(row['size'], 0) else ''}."
        for _, row in table.iterrows()
    ]
    return sentences[:4]


def noise(bench: Bench) -> str:
    """Say how far runs that do the same differ: repeats, or else modes that compute the same."""
    worst, cells = study.noise(bench, "steady")
    if cells:
        return (
            "Of runs of one script in one environment, the slowest took up to "
            f"{number(worst)} times as long in a steady iteration as the fastest."
        )
    runs = timed(bench.runs)
    if runs.groupby(["mode", "env_id", "size"]).size().max() != 1:
        return ""  # too short for a steady iteration, or resumed
    text = "Each script ran once, so there is no interval and no claim"
    if len(runs[["env_id", "size"]].drop_duplicates()) > 1:
        text = "Each script ran once in an environment and network: noise cannot be told apart"
    factors = {}
    for b, a in learning.identical(bench).items():
        pairs = stats.pair(runs, "steady", a, b) if a != b else runs.head(0)
        if len(pairs):
            logs = np.log(pairs["candidate"] / pairs["baseline"])
            factors[a, b] = float(np.exp(logs.abs().max()))
    if factors:
        a, b = max(factors, key=lambda x: factors[x])
        text += (
            f". {a} and {b} computed the same numbers, and yet a steady iteration of one took "
            f"{number(factors[a, b])} times as long as of the other"
        )
    return f"{text}. --repeats 3 gives intervals."


def busy(bench: Bench) -> list[str]:
    """Say how many runs were made while others wanted the machine, if any were."""
    runs = timed(bench.runs)
    count = len(under_load(runs))
    words = "was made" if count == 1 else "were made"
    text = f"{count} of {counted([len(runs)], 'run')} {words} while others used the machine too."
    return [text] if count else []


def first_done(table: pd.DataFrame) -> str:
    """Say, of a table of study.decisions(), which scripts are done first in a million steps."""
    sentences = []
    cases = table[(table["budget"] == 1_000_000) & ~table["environments"].str.startswith("the ")]
    for _, case in cases.iterrows():
        names = join([case["mode"], *(case["ties"] or [])], "or")
        told = ", which cannot be told apart" if case["ties"] else ""
        once = ", measured once" if case["ties"] is None else ""
        sentences.append(
            f"Done first with a million steps{of_size(case['size'], list(table['size']))}: "
            f"{names}{told}, after {duration(case['seconds'])}{once}."
        )
    return " ".join(sentences)


def startup(bench: Bench) -> str:
    """Compare the startups with the baseline's, size by size."""
    table, sentences = study.startups(bench), []
    sizes = size_order(table["size"])
    for size in sizes:
        rows = table[(table["size"] == size) & table["low"].notna()]
        later = rows[rows["low"] > 0]
        sooner = rows[rows["high"] < 0]
        parts = [
            f"{r['mode']} starts {interval(r['estimate'], r['low'], r['high'])} s later"
            for _, r in later.iterrows()
        ]
        parts += [
            f"{r['mode']} starts {interval(-r['estimate'], -r['high'], -r['low'])} s sooner"
            for _, r in sooner.iterrows()
        ]
        if parts:
            sentences.append(f"Relative to {bench.baseline}{of_size(size, sizes)}, {join(parts)}.")
    return " ".join(filter(None, [*sentences, late_compiling(timed(bench.runs))]))


def late_compiling(runs: pd.DataFrame) -> str:
    """Say whether iterations 1-7 are slower than later ones, as they are if something compiles."""
    ratio = (runs["early"] / runs["steady"]).groupby(runs["mode"]).median().dropna()
    if ratio.empty:
        short = runs["steady"].isna().all()  # and else `early` was not given
        return "The runs are too short to compare iterations 1-7 with later ones." if short else ""
    slow = ratio[ratio > LATE_COMPILING]
    if slow.empty:
        return (
            f"Iterations 1-7 take at most {number(ratio.max())} times a later one in the median "
            "of every script, so compiling ends with iteration 0."
        )
    parts = [f"{number(x)} times as long in {mode}" for mode, x in slow.items()]
    return f"Iterations 1-7 still take longer than later ones: {join(parts)}."


def phases(bench: Bench) -> str:
    """Give the rollout's share of an iteration, and compare both phases."""
    table, baseline = study.phases(bench), bench.synced_baseline
    sizes, sentences = size_order(table["size"]), []
    for size in sizes:
        rows = table[table["size"] == size].sort_values("share")
        parts = [f"{100 * row['share']:.0f}% in {row['mode']}" for _, row in rows.iterrows()]
        where = of_size(size, sizes)
        sentences.append(f"The rollout takes, of a steady iteration's time{where}, {join(parts)}.")
    for phase, what in (("rollout", "a rollout"), ("update", "an update")):
        columns = tuple(f"{phase}_{x}" for x in ("estimate", "low", "high"))
        sentences += ratios(table, baseline, what, columns)
    return " ".join(sentences)


# === Learning ===================================================================================
def learned(table: pd.DataFrame, bench: Bench) -> str:
    """Count the verdicts of the equivalence tests, and name what was not tested."""
    counts = table["verdict"].value_counts()
    found = {x: int(counts[x]) for x in ("equivalent", "undecided", "different") if x in counts}
    sentences = []
    if found:
        different = table[table["verdict"] == "different"]
        names = [f"{x['mode']} in {x['env_id']} ({x['size']})" for _, x in different.iterrows()]
        verdicts = [f"{verdict} in {count}" for verdict, count in found.items()]
        sentences.append(
            f"Against {bench.baseline}, final returns are {join(verdicts)} of "
            f"{counted([sum(found.values())], 'comparison')}, by two one-sided tests at 5% within "
            "the margin that was fixed for each environment."
        )
        sentences += [f"Different: {some(names)}."] if names else []
    few = int((table["verdict"] == "too few runs").sum())
    if few:
        what = counted([few], "comparison") if found else "Final returns"
        sentences.append(f"{what} could not be tested, for want of {stats.LEAST_RUNS} runs a side.")
    alike = int((table["verdict"] == "all alike").sum())
    if alike:
        what = counted([alike], "comparison")
        sentences.append(f"In {what} all runs returned the same: nothing to tell apart.")
    same = [x for x in learning.identical(bench).items() if x[0] != x[1]]
    if same:
        names = join([f"{mode} and {first}" for mode, first in same])
        sentences.append(
            f"From the same seed the same numbers come out of {names}: they count once."
        )
    unknown = list(dict.fromkeys(table.loc[table["margin"].isna(), "env_id"]))
    if unknown:
        sentences.append(f"No margin was fixed for {some(unknown)}, so nothing is tested there.")
    return " ".join([*sentences, *without_return(bench)])


def without_return(bench: Bench) -> list[str]:
    """Name the environments without a return, and say whether that is since no episode ended."""
    runs = bench.runs.set_index("run")["env_id"]
    returned = set(bench.runs.dropna(subset=["final_return"])["env_id"])
    missing = [str(x) for x in dict.fromkeys(runs) if x not in returned]
    episodes = bench.iterations.groupby(bench.iterations["run"].map(runs))["charts/episodes"].max()
    silent = [x for x in missing if episodes.get(x) == 0]
    rest = [x for x in missing if x not in silent]
    sentences = [f"No episode ended in {some(silent)}."] if silent else []
    if rest and len(rest) == runs.nunique():
        return ["These data have no returns."]
    return [*sentences, f"These data have no returns of {some(rest)}."] if rest else sentences


# === Runs =======================================================================================
def resumed(runs: pd.DataFrame) -> str:
    """Name the runs that do not count for durations, if there are any."""
    names = list(runs.loc[runs["resumed"], "run"])
    if not names:
        return ""
    are, count = ("was", "counts") if len(names) == 1 else ("were", "count")
    return (
        f"{counted([len(names)], 'run')} {are} stopped and resumed, and {count} for learning but "
        f"not for durations or memory: {some(names)}."
    )


def limits(runs: pd.DataFrame, several: Sequence[Bench]) -> list[str]:
    """Say what the data cannot."""
    lines = []
    repeats = timed(runs).groupby(["platform", "settings", "env_id", "size", "mode", "sync"])
    repeats = repeats["repeat"].nunique()
    if len(repeats) and repeats.max() == 1:
        lines.append("Each cell ran once, so there is no interval within an environment.")
    elif len(repeats) and repeats.min() < 3:
        few = counted(repeats[repeats == repeats.min()], "repeat")
        lines.append(f"Some cells have {few} only: their intervals are very wide, or missing.")
    envs = runs.groupby("size")["env_id"].unique()
    if runs["env_id"].nunique() == 1:
        lines.append(f"Only {runs['env_id'].iloc[0]} was run: other environments may differ.")
    else:
        lone = [size for size in size_order(runs["size"]) if len(envs[size]) == 1]
        lines += [f"The {size} network was run in {envs[size][0]} only." for size in lone]
    missing = [x for x in ("small", "medium", "large") if x not in set(runs["size"])]
    if 0 < len(missing) < 3:
        lines.append(f"No {join(missing, 'or')} network was run.")
    if not any(len(bench.synced) for bench in several) and (runs["algorithm"] != "dqn").any():
        lines.append(unphased(runs))
    if timed(runs)["steady"].isna().any():
        lines.append("Runs of 8 iterations or fewer have no steady state.")
    lines += apart(several)
    platforms = [str(x) for x in dict.fromkeys(runs["platform"])]
    if len(platforms) == 1:
        lines.append(f"All runs are from one platform: {platforms[0] or 'not named'}.")
    if runs["settings"].nunique() > 1:
        lines.append("Runs with different hyperparameters are never compared with each other.")
    # Of one length: a shorter training from the same seed may be the beginning of a longer one.
    cells = ["env_id", "size", "mode", "num_iterations"]
    counts = runs.dropna(subset=["final_return"]).groupby(cells)["repeat"].nunique()
    if len(counts):
        most = max(counts)
        unseen, many = 100 * (1 - 0.05 ** (1 / most)), counted([most], "run")
        lines.append(
            f"Even {many} without a failure to learn may hide that up to {unseen:.0f}% fail: a "
            "test of means does not see what did not happen."
        )
    lines.append("Beyond the longest run, times are its startup and steady iterations, extended.")
    lines.append(
        "Each interval is at 95% for itself: of twenty comparisons of equals, one on average looks "
        "like a difference."
    )
    lines.append("Intervals tell of environments and processes like these, not of other machines.")
    return lines


def apart(several: Sequence[Bench]) -> list[str]:
    """Say where the seconds of scripts are not of all environments, or not of all scripts."""
    lines = []
    for bench in several:
        runs, sizes = timed(bench.runs), size_order(bench.runs["size"])
        of = f" of {bench.title}" if len(several) > 1 else ""
        for size in sizes:
            part, where = runs[runs["size"] == size], f"{of_size(size, sizes)}{of}"
            same, every = shared(part), part["env_id"].nunique()
            lacking = mode_order(part.loc[~part["mode"].isin(same["mode"]), "mode"])
            if same.empty and len(part):
                lines.append(f"No environment has two scripts{where}: seconds do not compare.")
            elif same["env_id"].nunique() < every:
                envs = f"the {same['env_id'].nunique()} of {every} environments that scripts share"
                lines.append(f"Seconds and decisions{where} are over {envs}.")
            if len(same) and lacking:
                text = "was run in too few environments to be among the seconds and decisions"
                lines += [f"{x} {text}{where}." for x in lacking]
    return lines


def unphased(runs: pd.DataFrame) -> str:
    """Say why no run timed both phases."""
    if timed(runs)["sync"].any():
        return "The runs with --sync-for-timing are too short for steady times of the phases."
    if runs["sync"].any():
        return "All runs with --sync-for-timing were resumed, so rollout and update have no times."
    return "No run has --sync-for-timing, so rollout and update have no times."


def compact(steps: float) -> str:
    """Return "100k", "1M" or "819,200"."""
    for unit, name in ((1_000_000, "M"), (1000, "k")):
        if steps % unit == 0:
            return f"{steps / unit:,.0f}{name}"
    return f"{steps:,.0f}"


def verdict(low: float, high: float) -> str:
    if np.isnan(low):
        return "no interval, so no claim"
    return "slower" if low > 1 else "faster" if high < 1 else "no clear difference"


def verdicts(table: pd.DataFrame) -> str:
    """Count what was found of the cells that two results have in common."""
    found = [verdict(row["low"], row["high"]) for _, row in table.iterrows()]
    parts = [f"{x} in {found.count(x)}" for x in dict.fromkeys(found)]
    text = (
        f"Over {counted([len(found)], 'duration')} of cells that both results have, the verdict on "
        f"the new one is: {join(parts)}."
    )
    chance = " Of those with an interval, one in twenty would be slower or faster by chance."
    return text + chance if table["low"].notna().any() else text


def duration(seconds: float) -> str:
    """Return "8.8 s", "2.6 min" or "4.1 h"."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{number(seconds / unit)} {name}"
    return f"{number(seconds)} s"


def spent(runs: pd.DataFrame) -> str:
    """Say how long all runs took."""
    seconds = runs["process"].dropna()
    return f"{counted([len(seconds)], 'run')} took {duration(seconds.sum())} in all."


def scope(runs: pd.DataFrame) -> str:
    """Say what was run."""
    modes = mode_order(runs["mode"])
    repeats = runs.groupby(["env_id", "size", "mode", "sync"])["repeat"].nunique()
    parts = [
        counted([runs["env_id"].nunique()], "environment"),
        counted([runs["size"].nunique()], "network size"),
        f"{counted(repeats, 'repeat')} each",
        f"of {counted(runs['num_iterations'], 'iteration')}",
    ]
    of = f"{counted([len(runs)], 'run')} of {counted([len(modes)], 'script')}"
    words = f"{of} in {', '.join(parts)}."
    agents = runs["num_agents"].dropna()
    if len(agents):
        words += f" A program trained {counted(agents, 'agent')} at once, each a run: "
        words += "durations and memory are the program's."
    return words

"""What the data say, in sentences computed from them, so that none can outlive its number."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from analysis import stats

BASELINE = "linen jit"
MARGIN = 0.1  # of the range of returns seen in an environment
LATE_COMPILING = 1.25  # iterations 1-7 that take this many times a steady one


# === Choices ====================================================================================
def choose_baseline(runs: pd.DataFrame, value: str = "steady") -> str:
    """Return linen jit if it was run, or else the mode with most runs that have the value."""
    modes = runs.dropna(subset=[value])["mode"].value_counts()
    modes = runs["mode"].value_counts() if modes.empty else modes
    return BASELINE if BASELINE in modes else str(modes.index[0])


def unsynced(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that were not made to wait between the phases, or all if there are none."""
    return runs if runs["sync"].all() else runs[~runs["sync"]]


def synced(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that timed the phases."""
    return runs[runs["sync"] & runs["rollout_steady"].notna()]


def uninterrupted(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that count for durations: those that were never stopped and resumed."""
    return runs[~runs["resumed"]]


def resumed(runs: pd.DataFrame) -> str:
    """Name the runs that do not count for durations, if there are any."""
    names = list(runs.loc[runs["resumed"], "run"])
    if not names:
        return ""
    more = [f"{len(names) - 10} more"] if len(names) > 10 else []
    are, count = ("was", "counts") if len(names) == 1 else ("were", "count")
    return (
        f"{counted([len(names)], 'run')} {are} stopped and resumed, and {count} for learning but "
        f"not for durations or memory: {join([*names[:10], *more])}."
    )


def unphased(runs: pd.DataFrame) -> str:
    """Say why none of runs is in synced()."""
    if uninterrupted(runs)["sync"].any():
        return "The runs with --sync-for-timing are too short for steady times of the phases."
    if runs["sync"].any():
        return "All runs with --sync-for-timing were resumed, so rollout and update have no times."
    return "No run has --sync-for-timing, so rollout and update have no times."


def shared(runs: pd.DataFrame, where: list[str], what: list[str]) -> pd.DataFrame:
    """Return the runs of those values of the columns where that have every value of what."""
    kinds = runs.groupby(what).ngroup()
    here = kinds.groupby([runs[column] for column in where]).transform("nunique")
    return runs[here == kinds.nunique()]


def most_modes(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the synchronised or the other runs, whichever have more compile modes."""
    groups = [group for _, group in runs.groupby("sync")]
    return max(groups, key=lambda group: group["mode"].nunique(), default=runs)


def one_length(runs: pd.DataFrame) -> pd.DataFrame:
    """Return, of each environment and size, the runs with its commonest number of iterations.

    Returns and totals depend on it.
    """
    lengths = runs["num_iterations"].fillna(0)  # which a table from elsewhere need not have
    cells = lengths.groupby([runs["env_id"], runs["size"]])
    return runs[lengths == cells.transform(lambda x: x.mode().iloc[0])]


def by_length(runs: pd.DataFrame) -> list[tuple[int, pd.DataFrame]]:
    """Return each number of iterations and its runs, for what depends on it."""
    lengths = runs.dropna(subset=["total"]).groupby("num_iterations")
    return [(int(group["num_iterations"].iloc[0]), group) for _, group in lengths]


# === Sentences ==================================================================================
def join(parts: Sequence[str], last: str = "and") -> str:
    """Return "a", "a and b" or "a, b and c"."""
    *most, end = parts
    return f"{', '.join(most)} {last} {end}" if most else end


def counted(counts: Iterable[int], name: str) -> str:
    """Return "1 run", "3 runs" or "1 to 3 runs", from the lowest to the highest of counts."""
    low, high = min(counts), max(counts)
    span = f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
    return f"{span} {name}{'' if high == 1 else 's'}"


def number(value: float) -> str:
    """Return a number with three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def interval(estimate: float, low: float, high: float) -> str:
    """Return "estimate [low, high]", or the estimate alone where there is no interval."""
    if np.isnan(low):
        return number(estimate)
    bottom = "<0.001" if 0 < low < 0.001 else number(low)
    top = ">10,000" if high > 10_000 else number(high)
    return f"{number(estimate)} [{bottom}, {top}]"


def relative_times(runs: pd.DataFrame, value: str, baseline: str) -> pd.DataFrame:
    """Return each mode's time over the baseline's, over all sizes, the shortest first."""
    table = stats.speedup_table(runs, value, baseline)
    table = table[table["blocks"] > 0].groupby("candidate").last()
    table["ratio"] = 1 / table["paired"]
    table["low"], table["high"] = 1 / table["high"], 1 / table["low"]
    return table.sort_values(by="ratio")[["ratio", "low", "high"]]


def coverage(tables: Sequence[pd.DataFrame]) -> str:
    """Return how many environments, model sizes and repeats of each stand behind some numbers.

    There is a table of runs, or of pairs of runs, behind each number.
    """
    repeats = [n for x in tables for n in x.groupby(["env_id", "size"])["repeat"].nunique()]
    counts = [
        counted([x["env_id"].nunique() for x in tables], "environment"),
        counted([x["size"].nunique() for x in tables], "model size"),
        counted(repeats, "repeat"),
    ]
    return join(counts)


def verdict(low: float, high: float) -> str:
    if np.isnan(low):
        return "no interval, so no claim"
    return "slower" if low > 1 else "faster" if high < 1 else "no clear difference"


def compare(runs: pd.DataFrame, value: str, baseline: str, what: str) -> str:
    """Return how long every mode takes relative to the baseline."""
    table = relative_times(runs, value, baseline)
    if runs[value].isna().all():
        return f"No run is long enough to give the time of {what}."
    if table.empty:
        return (
            f"No other mode was timed beside {baseline} in the same environment, model size and "
            f"repeat, so the time of {what} has no ratio."
        )
    parts = [
        f"{interval(row['ratio'], row['low'], row['high'])} times as long in {mode} "
        f"({verdict(row['low'], row['high'])})"
        for mode, row in table.iterrows()
    ]
    pairs = [stats.pair(runs, value, baseline, str(mode)) for mode in table.index]
    return (
        f"Relative to {baseline}, {what} takes {join(parts)}: geometric means over "
        f"{coverage(pairs)}{', with 95% intervals' if table['low'].notna().any() else ''}."
    )


def overall(runs: pd.DataFrame, baseline: str) -> str:
    """Compare the time of whole trainings, those of each length on their own."""
    return " ".join(
        compare(group, "total", baseline, f"a training of {counted([length], 'iteration')}")
        for length, group in by_length(runs)
    )


def steady(runs: pd.DataFrame, baseline: str) -> str:
    """Compare steady iterations."""
    return compare(runs, "steady", baseline, "a steady iteration")


def startup(runs: pd.DataFrame) -> str:
    """Give the startup of every mode, in the median over what all modes were run on.

    Modes without an environment and model size in common are compared within each size, if at all.
    """
    runs = runs.dropna(subset=["startup"])
    groups = [("", runs)]
    if shared(runs, ["env_id", "size"], ["mode"]).empty:
        groups = [(f", with the {x} model", runs[runs["size"] == x]) for x in stats.sizes(runs)]
    sentences = []
    for where, group in groups:
        common = shared(group, ["env_id", "size"], ["mode"])
        medians = common.groupby(["mode", "env_id", "size"])["startup"].median()
        medians = pd.Series(medians.groupby("mode").median()).sort_values()
        parts = [f"{number(seconds)} s in {mode}" for mode, seconds in medians.items()]
        modes = join(sorted(group["mode"].unique()))
        sentences.append(
            f"From the start of the process to the end of iteration 0 it takes{where}, in the "
            f"median over {coverage([common])}, {join(parts)}."
            if parts
            else f"The startups of {modes} cannot be compared{where}: no environment has them all."
        )
    return " ".join(sentences)


def late_compiling(runs: pd.DataFrame) -> str:
    """Say whether iterations 1-7 are slower than later ones, as they are if something compiles."""
    ratio = (runs["early"] / runs["steady"]).groupby(runs["mode"]).median().dropna()
    if ratio.empty:
        return "The runs are too short to compare iterations 1-7 with later ones."
    slow = ratio[ratio > LATE_COMPILING]
    if slow.empty:
        return (
            f"Iterations 1-7 take at most {number(ratio.max())} times a later one in the median "
            "of every mode, so compiling ends with iteration 0."
        )
    parts = [f"{number(x)} times in {mode}" for mode, x in slow.items()]
    return f"Iterations 1-7 still take longer than later ones: {join(parts)}."


def break_even(runs: pd.DataFrame, baseline: str) -> str:
    """Say after how many iterations the baseline's longer startup has paid off, where it does."""
    runs = runs.dropna(subset=["startup", "steady"])
    medians = runs.groupby(["env_id", "size", "mode"])[["startup", "steady"]].median()
    startup, steady = (medians[name].unstack() for name in medians)
    lost = pd.Series(dtype=float)
    if baseline in startup:
        lost = startup.rsub(startup[baseline], axis=0).drop(columns=baseline).mean().dropna()
    if lost.empty:
        return (
            "Whether a longer startup pays off cannot be said: no other mode has a steady state "
            f"where {baseline} has one."
        )
    gained = steady.sub(steady[baseline], axis=0).mean()
    parts = [
        f"{mode} after {np.ceil(lost[mode] / gained[mode]):,.0f} iterations"
        for mode in lost.index
        if lost[mode] > 0 and gained[mode] > 0
    ]
    if not parts:
        return (
            f"Of {join(list(lost.index))}, none starts sooner than {baseline} and then runs slower."
        )
    return f"{baseline} starts later but has overtaken {join(parts)}."


def phases(runs: pd.DataFrame, baseline: str) -> str:
    """Give the rollout's share of an iteration, and compare both phases."""
    share = runs["rollout_steady"] / (runs["rollout_steady"] + runs["update_steady"])
    shares = share.groupby(runs["mode"]).median().sort_values()
    parts = [f"{100 * x:.0f}% in {mode}" for mode, x in shares.items()]
    return " ".join(
        [
            f"The rollout takes, of a steady iteration's time, {join(parts)}.",
            compare(runs, "rollout_steady", baseline, "a rollout"),
            compare(runs, "update_steady", baseline, "an update"),
        ]
    )


def compilation(runs: pd.DataFrame) -> str:
    """Give what each compile mode gains over its framework's uncompiled mode."""
    sentences = []
    for framework, group in runs.groupby("framework"):
        none = f"{framework} none"
        table = relative_times(group, "steady", none) if none in set(group["mode"]) else None
        if table is None or table.empty:
            sentences.append(f"There is no steady state of {none} to compare {framework} with.")
            continue
        parts = [
            f"{interval(1 / row['ratio'], 1 / row['high'], 1 / row['low'])} in {mode} "
            f"({verdict(row['low'], row['high'])})"
            for mode, row in table.iterrows()
        ]
        sentences.append(f"Of a steady iteration, the speedup over {none} is {join(parts)}.")
    return " ".join(sentences)


def platforms(runs: pd.DataFrame, baseline: str, candidate: str, value: str = "steady") -> str:
    """Compare two platforms, mode by mode."""
    parts, intervals = [], False
    for mode, group in runs.groupby("mode"):
        both = group[group["platform"].isin([baseline, candidate])]
        table = stats.speedup_table(both, value, baseline, "platform")
        if len(table) and table.iloc[-1]["blocks"]:
            row = table.iloc[-1]
            intervals |= bool(pd.notna(row["low"]))
            parts.append(f"{mode} {interval(row['paired'], row['low'], row['high'])}")
    if not parts:
        return f"No run was made alike on {baseline} and on {candidate}."
    return (
        f"The speedup of {candidate} over {baseline} in steady state is"
        f"{', with its 95% interval' if intervals else ''}: {join(parts)}."
    )


# === Learning ===================================================================================
def return_ranges(runs: pd.DataFrame, iterations: pd.DataFrame) -> pd.DataFrame:
    """Return, by environment, the lowest and highest mean return of any iteration: low and high."""
    rows = iterations.merge(runs[["run", "env_id"]], on="run")
    returns = rows.groupby("env_id")["charts/episodic_return"]
    return pd.DataFrame({"low": returns.min(), "high": returns.max()}).dropna()


def score_table(runs: pd.DataFrame, ranges: pd.DataFrame) -> pd.DataFrame:
    """Return the IQM of the final returns over environments, by model size and mode.

    A return counts from 0 to 1, the lowest and the highest that the environment gave.
    Environments whose return never changed are left out, and named by unscored().
    """
    runs = runs.dropna(subset=["final_return"])
    low, high = (runs["env_id"].map(ranges[name]).astype(float) for name in ("low", "high"))
    scores = runs.assign(score=(runs["final_return"] - low) / (high - low))[high > low]
    rows = []
    for _, group in scores.groupby(["size", "mode"]):
        by_env = [x.to_numpy() for _, x in group.groupby("env_id")["score"]]
        row = {"size": group["size"].iloc[0], "mode": group["mode"].iloc[0]}
        row |= stats.iqm_interval(by_env)._asdict()
        rows.append(row | {"environments": len(by_env), "runs": len(group)})
    columns = ["size", "mode", *stats.Interval._fields, "environments", "runs"]
    return pd.DataFrame(rows, columns=columns)


def unscored(runs: pd.DataFrame, ranges: pd.DataFrame) -> str:
    """Name the environments that have no return, or none that could be told from another."""
    ended = set(runs.dropna(subset=["final_return"])["env_id"])
    silent = sorted(set(runs["env_id"]) - ended)
    flat = sorted(ended.intersection(ranges.index[ranges["low"] == ranges["high"]]))
    text = f" No episode ended in {join(silent)}." if silent else ""
    if flat:
        text += f" The scores leave out {join(flat)}: every iteration gave the same return there."
    return text


def equivalence_table(runs: pd.DataFrame, ranges: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Test each mode's final returns against the baseline's, by environment and model size.

    The margin is MARGIN of the range of returns seen in the environment. Where all runs of all
    modes returned the same there is nothing to tell apart: the verdict is "all alike".
    """
    rows = []
    runs = runs.dropna(subset=["final_return"])
    runs = runs[runs["env_id"].isin(ranges.index)]
    for _, cell in runs.groupby(["env_id", "size"], sort=False):
        env_id, size = cell["env_id"].iloc[0], cell["size"].iloc[0]
        returns = {str(mode): x.to_numpy() for mode, x in cell.groupby("mode")["final_return"]}
        for mode in returns if baseline in returns else []:
            if mode != baseline:
                margin = MARGIN * float(ranges.loc[env_id, "high"] - ranges.loc[env_id, "low"])
                test = stats.equivalence(returns[baseline], returns[mode], margin)
                if cell["final_return"].nunique() == 1:
                    test = test._replace(p_value=np.nan, verdict="all alike")
                rows.append({"env_id": env_id, "size": size, "mode": mode, **test._asdict()})
    columns = ["env_id", "size", "mode", *stats.Equivalence._fields]
    return pd.DataFrame(rows, columns=columns)


def learning(tests: pd.DataFrame, baseline: str) -> str:
    """Count the verdicts of the equivalence tests."""
    if tests.empty:
        return "Nothing can be said of learning: no two modes finished an episode side by side."
    decided = tests[~tests["verdict"].isin(["too few runs", "all alike"])]
    counts = tests["verdict"].value_counts()
    few, alike = counts.get("too few runs", 0), counts.get("all alike", 0)
    different = decided[decided["verdict"] == "different"]
    names = [f"{row.mode} in {row.env_id} ({row.size})" for row in different.itertuples()]
    sentences = []
    if len(decided):
        sentences.append(
            f"Against {baseline}, final returns are equivalent in {counts.get('equivalent', 0)} "
            f"of {counted([len(decided)], 'comparison')} of a mode in an environment and model "
            f"size, undecided in {counts.get('undecided', 0)} and different in {len(different)}"
            f"{': ' + join(names) if names else ''} (two one-sided tests at 5%, margin "
            f"{100 * MARGIN:.0f}% of the range of returns seen)."
        )
    if few:
        sentences.append(
            f"{counted([few], 'comparison')} of final returns with {baseline} could not be tested, "
            "for want of a second run; the returns are in the table."
        )
    if alike:
        sentences.append(
            f"In {counted([alike], 'comparison')}{' more' if few or len(decided) else ''} there "
            "was nothing to tell apart, since all runs of all modes returned the same."
        )
    return " ".join(sentences)


def answer(runs: pd.DataFrame, tests: pd.DataFrame, baseline: str) -> str:
    """Give the few sentences that a reader in a hurry takes away."""
    timed = uninterrupted(runs)
    sentences = [steady(timed, baseline), startup(timed)] if len(timed) else []
    return " ".join(filter(None, [*sentences, learning(tests, baseline)]))

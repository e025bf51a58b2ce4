"""What the data say, in sentences computed from them, so that none can outlive its number."""

from collections.abc import Sequence

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


def most_modes(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the synchronised or the other runs, whichever have more compile modes."""
    groups = [group for _, group in runs.groupby("sync")]
    return max(groups, key=lambda group: group["mode"].nunique())


def one_length(runs: pd.DataFrame) -> pd.DataFrame:
    """Return, of each environment and size, the runs with its commonest number of iterations.

    Returns and totals depend on it.
    """
    lengths = runs.groupby(["env_id", "size"])["num_iterations"]
    return runs[runs["num_iterations"] == lengths.transform(lambda x: x.mode().iloc[0])]


# === Sentences ==================================================================================
def join(parts: Sequence[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


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


def coverage(runs: pd.DataFrame) -> str:
    """Return how many environments, model sizes and repeats of each stand behind a number."""
    repeats = runs.groupby(["env_id", "size"])["repeat"].nunique()
    low, high = repeats.min(), repeats.max()
    counts = [
        (str(runs["env_id"].nunique()), "environment"),
        (str(runs["size"].nunique()), "model size"),
        (str(high) if low == high else f"{low} to {high}", "repeat"),
    ]
    return join([f"{count} {name}{'' if count == '1' else 's'}" for count, name in counts])


def verdict(low: float, high: float) -> str:
    if np.isnan(low):
        return "no interval, so no claim"
    return "slower" if low > 1 else "faster" if high < 1 else "no clear difference"


def compare(runs: pd.DataFrame, value: str, baseline: str, what: str) -> str:
    """Return how long every mode takes relative to the baseline."""
    table = relative_times(runs, value, baseline)
    if table.empty:
        return f"No other mode was run beside {baseline}, so the time of {what} has no ratio."
    parts = [
        f"{interval(row['ratio'], row['low'], row['high'])} times as long in {mode} "
        f"({verdict(row['low'], row['high'])})"
        for mode, row in table.iterrows()
    ]
    return (
        f"Relative to {baseline}, {what} takes {join(parts)}: geometric means over "
        f"{coverage(runs.dropna(subset=[value]))}, with 95% intervals."
    )


def overall(runs: pd.DataFrame, baseline: str) -> str:
    """Compare the time of whole trainings."""
    lengths = [f"{x:,.0f}" for x in sorted(runs["num_iterations"].unique())]
    return compare(runs, "total", baseline, f"a training of {' or '.join(lengths)} iterations")


def steady(runs: pd.DataFrame, baseline: str) -> str:
    """Compare steady iterations."""
    return compare(runs, "steady", baseline, "a steady iteration")


def startup(runs: pd.DataFrame) -> str:
    """Give the startup of every mode."""
    medians = pd.Series(runs.groupby("mode")["startup"].median()).dropna().sort_values()
    parts = [f"{number(seconds)} s in {mode}" for mode, seconds in medians.items()]
    return (
        "From the start of the process to the end of iteration 0 it takes, in the median, "
        f"{join(parts)}."
    )


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
    medians = runs.groupby(["env_id", "size", "mode"])[["startup", "steady"]].median()
    medians = medians.groupby("mode").mean()
    parts = []
    for mode, row in medians.drop(index=baseline, errors="ignore").iterrows():
        lost = medians.loc[baseline, "startup"] - row["startup"]
        gained = row["steady"] - medians.loc[baseline, "steady"]
        if lost > 0 and gained > 0:
            parts.append(f"{mode} after {np.ceil(lost / gained):,.0f} iterations")
    if not parts:
        return f"No mode starts sooner than {baseline} and then runs slower."
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
        parts = []
        for mode, row in table.iterrows():
            inverse = (1 / row["ratio"], 1 / row["high"], 1 / row["low"])
            parts.append(f"{interval(*inverse)} times faster in {mode}")
        sentences.append(f"Compared with {none}, a steady iteration is {join(parts)}.")
    return " ".join(sentences)


def platforms(runs: pd.DataFrame, baseline: str, candidate: str, value: str = "steady") -> str:
    """Compare two platforms, mode by mode."""
    parts = []
    for mode, group in runs.groupby("mode"):
        both = group[group["platform"].isin([baseline, candidate])]
        table = stats.speedup_table(both, value, baseline, "platform")
        if len(table) and table.iloc[-1]["blocks"]:
            row = table.iloc[-1]
            parts.append(f"{mode} {interval(row['paired'], row['low'], row['high'])}")
    if not parts:
        return f"No run was made alike on {baseline} and on {candidate}."
    return (
        f"The speedup of {candidate} over {baseline} in steady state is, with its 95% interval: "
        f"{join(parts)}."
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


def equivalence_table(runs: pd.DataFrame, ranges: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Test each mode's final returns against the baseline's, by environment and model size.

    The margin is MARGIN of the range of returns seen in the environment.
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
                rows.append({"env_id": env_id, "size": size, "mode": mode, **test._asdict()})
    columns = ["env_id", "size", "mode", *stats.Equivalence._fields]
    return pd.DataFrame(rows, columns=columns)


def learning(tests: pd.DataFrame, baseline: str) -> str:
    """Count the verdicts of the equivalence tests."""
    if tests.empty:
        return "Nothing can be said of learning: no two modes finished an episode side by side."
    decided = tests[tests["verdict"] != "too few runs"]
    if decided.empty:
        return (
            "Whether the frameworks learn alike cannot be tested, since each cell has a single "
            "run; the final returns are in the table."
        )
    counts = decided["verdict"].value_counts()
    different = decided[decided["verdict"] == "different"]
    names = [f"{row.mode} in {row.env_id} ({row.size})" for row in different.itertuples()]
    sentence = (
        f"Against {baseline}, final returns are equivalent in {counts.get('equivalent', 0)} of "
        f"{len(decided)} cells, undecided in {counts.get('undecided', 0)} and different in "
        f"{counts.get('different', 0)}{': ' + join(names) if names else ''} (two one-sided tests "
        f"at 5%, margin {100 * MARGIN:.0f}% of the range of returns seen)."
    )
    return sentence


def answer(runs: pd.DataFrame, tests: pd.DataFrame, baseline: str) -> str:
    """Give the three sentences that a reader in a hurry takes away."""
    return " ".join([steady(runs, baseline), startup(runs), learning(tests, baseline)])

"""Our scripts against libraries that a user would pick instead: a table, and targets.

    python -m analysis.others results/peers

What is compared is the median over runs of a steady iteration, since the targets were fixed as
ratios of medians; the report has ratios of geometric means. The interval of a ratio of medians is a
bootstrap's over repeats, in which the runs of a repeat stay together.
"""

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import report, stats
from analysis.bench import Bench, benches, in_order, timed
from analysis.readings import counted, interval, number
from analysis.render import Table
from analysis.runs import load
from analysis.schema import SourceError

LINEN, LIBRARY, ONE_THREAD = "ppo_linen", "sb3", "sb3 --threads 1"
TARGETS = {"ppo_linen": 0.2, "ppo_torch": 0.8, "ppo_torch_compile": 0.5}  # of LIBRARY, at most
TARGETS_OF = (
    "CartPole-v1",
    "small",
)  # where they were fixed; elsewhere the lines say that it is not theirs
RESAMPLES = 10_000


def ratio_of_medians(pairs: pd.DataFrame) -> stats.Interval:
    """Return the median candidate over the median baseline, of what stats.pair() gives."""
    values = pairs[["baseline", "candidate"]].to_numpy(float)
    if not len(values):
        return stats.Interval(np.nan, np.nan, np.nan)
    baseline, candidate = np.median(values, axis=0)
    low = high = np.nan
    if len(values) >= stats.LEAST_RUNS:
        picks = np.random.default_rng(1).integers(len(values), size=(RESAMPLES, len(values)))
        medians = np.median(values[picks], axis=1)  # (RESAMPLES, 2)
        low, high = np.quantile(medians[:, 1] / medians[:, 0], [0.025, 0.975])
    return stats.Interval(float(candidate / baseline), float(low), float(high))


class Ratio(NamedTuple):
    """A ratio of medians with its interval, and of how many pairs and runs it is."""

    estimate: float
    low: float
    high: float
    pairs: int
    runs: int  # of the side that has more


def against(runs: pd.DataFrame, mode: str, baseline: str) -> Ratio:
    """Return how many times baseline's iteration a mode takes; 1 without interval for itself."""
    most = max(int((runs["mode"] == x).sum()) for x in (mode, baseline))
    if mode == baseline:
        return Ratio(1.0, np.nan, np.nan, most, most)
    pairs = stats.pair(runs, "steady", baseline, mode)
    return Ratio(*ratio_of_medians(pairs), len(pairs), most)


def ratio_text(ratio: Ratio) -> str:
    """Return a ratio with its interval, and how many pairs it is of where runs are without one."""
    some = f" ({counted([ratio.pairs], 'pair')})" if 0 < ratio.pairs < ratio.runs else ""
    return interval(ratio.estimate, ratio.low, ratio.high) + some


def ratio_cell(name: str) -> Callable[[pd.Series], str]:
    return lambda row: ratio_text(Ratio(*(row[f"{name}_{x}"] for x in Ratio._fields)))


def return_cell(row: pd.Series) -> str:
    """Return the median of the final returns, and of how many runs it is where some have none."""
    some = f" ({row['returns']} of {row['runs']})" if row["returns"] < row["runs"] else ""
    return report.span("return_")(row) + some


def peer_table(bench: Bench) -> Table:
    """A row per environment and mode: medians, with intervals those of ratios and final returns."""
    rows, runs = [], timed(bench.runs)
    for _, group in runs.groupby(["env_id", "size", "mode"], sort=False):
        env_id, size, mode = group[["env_id", "size", "mode"]].iloc[0]
        row = {"env_id": env_id, "size": size, "mode": mode, "runs": len(group)}
        row |= {name: group[name].median() for name in ("startup", "steady", "process")}
        here = runs[(runs["env_id"] == env_id) & (runs["size"] == size)]
        for name, baseline in (("linen", LINEN), ("library", LIBRARY), ("single", ONE_THREAD)):
            ratio = against(here, mode, baseline)
            row |= {f"{name}_{x}": y for x, y in ratio._asdict().items()}
        returns = group["final_return"].dropna().to_numpy()
        row["returns"] = len(returns)
        if len(returns):
            three = stats.median_interval(returns)
            row |= {f"return_{x}": y for x, y in three._asdict().items()}
        rows.append(row)
    frame = in_order(pd.DataFrame(rows))
    parts = {"environment": "env_id", "network": "size"}
    columns = {x: report.text(y) for x, y in parts.items() if frame[y].nunique() > 1}
    columns |= {
        "script": report.text("mode"),
        "runs": report.text("runs"),
        "startup (s)": report.value("startup"),
        "iteration (ms)": report.value("steady", 1000),
        f"times as long as {LINEN}": ratio_cell("linen"),
        f"as {LIBRARY}": ratio_cell("library"),
        f"as {ONE_THREAD}": ratio_cell("single"),
        "whole training (s)": report.value("process"),
        "median final return": return_cell,
    }
    return report.table_of("peers", "Libraries that a user would pick instead", frame, columns)


def target_lines(bench: Bench) -> list[str]:
    """Say of each target whether it is met, by environment; and the same against one thread."""
    lines, runs = [], timed(bench.runs)
    for _, here in runs.groupby(["env_id", "size"], sort=False):
        env_id, size = here[["env_id", "size"]].iloc[0]
        modes, where = set(here["mode"]), f"{env_id}{f', {size}' * (runs['size'].nunique() > 1)}"
        whose = "the" if (env_id, size) == TARGETS_OF else f"{TARGETS_OF[0]}'s"
        for mode, most in TARGETS.items():
            for baseline in (LIBRARY, ONE_THREAD):
                if not {mode, baseline} <= modes:
                    continue
                ratio = against(here, mode, baseline)
                words = f"takes {ratio_text(ratio)} of {baseline}'s iteration"
                if not ratio.pairs:
                    words = f"and {baseline} have no repeat in common"
                words += f"; {whose} target, at most {number(most)}, is {verdict(ratio, most)}."
                lines.append(f"{where}: {mode} {words}")
    return lines


def verdict(ratio: Ratio, most: float) -> str:
    """Return what a ratio says of a target: its whole interval decides, not its estimate."""
    if np.isnan(ratio.estimate):
        return "not measured"
    if np.isnan(ratio.high):
        return f"left open: too few repeats for a claim, {ratio.pairs} of {stats.LEAST_RUNS}"
    if ratio.high <= most:
        return "met"
    if ratio.low > most:
        return "missed"
    side = "met" if ratio.estimate <= most else "missed"
    return f"undecided: {side} by the medians, but not by the whole interval"


def main() -> None:
    name, lines = "python -m analysis.others", (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog=name, description=lines[0])
    parser.add_argument("source", nargs="+", help="folders of runs, or studies of them")
    try:
        for bench in benches(load(parser.parse_args().source)):
            print(f"{bench.title}\n\n{peer_table(bench).cells.to_string(index=False)}\n")
            print("\n".join(target_lines(bench)) or f"There is no {LIBRARY} to compare with.")
    except SourceError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

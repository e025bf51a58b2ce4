"""Our scripts against libraries that a user would pick instead: a table, and targets.

    python -m analysis.others results/peers

What is compared is the median over runs of a steady iteration. The interval of a ratio of medians
is a bootstrap's over repeats, in which the runs of a repeat stay together.
"""

import argparse
import sys

import numpy as np
import pandas as pd

from analysis import report, stats
from analysis.bench import Bench, benches, in_order, timed
from analysis.readings import interval, number
from analysis.render import Table
from analysis.runs import load
from analysis.schema import SourceError

LINEN, LIBRARY, ONE_THREAD = "ppo_linen", "sb3", "sb3 --threads 1"
TARGETS = {"ppo_linen": 0.2, "ppo_torch": 0.8, "ppo_torch_compile": 0.5}  # of LIBRARY, at most
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


def against(runs: pd.DataFrame, value: str, mode: str, baseline: str) -> stats.Interval:
    """Return how many times as long as baseline a mode takes; 1 without interval for itself."""
    if mode == baseline:
        return stats.Interval(1.0, np.nan, np.nan)
    return ratio_of_medians(stats.pair(runs, value, baseline, mode))


def peer_table(bench: Bench) -> Table:
    """A row per environment and mode: medians, their ratios, and the mean of the final returns."""
    rows, runs = [], timed(bench.runs)
    for _, group in runs.groupby(["env_id", "mode"], sort=False):
        env_id, mode = group[["env_id", "mode"]].iloc[0]
        row = {"env_id": env_id, "mode": mode, "runs": len(group)}
        row |= {name: group[name].median() for name in ("startup", "steady", "process")}
        here = runs[runs["env_id"] == env_id]
        for name, baseline in (("linen", LINEN), ("library", LIBRARY), ("single", ONE_THREAD)):
            three = against(here, "steady", mode, baseline)
            row |= {f"{name}_{x}": y for x, y in three._asdict().items()}
        three = stats.mean_interval(group["final_return"].to_numpy(), [""] * len(group))
        rows.append(row | {f"return_{x}": y for x, y in three._asdict().items()})
    frame = in_order(pd.DataFrame(rows))
    columns = {"environment": report.text("env_id")} if frame["env_id"].nunique() > 1 else {}
    columns |= {
        "script": report.text("mode"),
        "runs": report.text("runs"),
        "startup (s)": report.value("startup"),
        "iteration (ms)": report.value("steady", 1000),
        f"times as long as {LINEN}": report.span("linen_"),
        f"as {LIBRARY}": report.span("library_"),
        f"as {ONE_THREAD}": report.span("single_"),
        "whole training (s)": report.value("process"),
        "final return": report.span("return_"),
    }
    return report.table_of("peers", "Libraries that a user would pick instead", frame, columns)


def target_lines(bench: Bench) -> list[str]:
    """Say of each target whether it is met, by environment; and the same against one thread."""
    lines, runs = [], timed(bench.runs)
    for env_id, here in runs.groupby("env_id", sort=False):
        modes = set(here["mode"])
        for mode, most in TARGETS.items():
            for baseline in (LIBRARY, ONE_THREAD):
                if not {mode, baseline} <= modes:
                    continue
                three = against(here, "steady", mode, baseline)
                words = f"{env_id}: {mode} takes {interval(*three)} of {baseline}'s iteration; "
                words += f"the target, at most {number(most)}, is {verdict(three, most)}."
                lines.append(words)
    return lines


def verdict(ratio: stats.Interval, most: float) -> str:
    if not ratio.estimate <= most:
        return "missed"
    if np.isnan(ratio.high):
        return f"met, by fewer than {stats.LEAST_RUNS} runs, which is no claim"
    return "met" if ratio.high <= most else "met by the medians, but not by the whole interval"


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

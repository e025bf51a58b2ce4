"""Our scripts beside libraries that a user would pick instead: a table, and targets."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import stats, tables
from analysis.measures import Bench, benches, measure, timed
from analysis.page import Table
from analysis.runs import load
from analysis.words import interval, number

LINEN, LIBRARY = "ppo_linen", "sb3"
TARGETS = {"ppo_linen": 0.14, "ppo_torch": 0.56, "ppo_torch_compile": 0.34}  # of LIBRARY, at most


def peer_table(bench: Bench) -> Table:
    """A row per script: its times, and its iteration over ppo_linen's and over the library's."""
    values = ("startup", "steady", "process")
    frame = measure(bench.runs, values, LINEN)
    others = measure(bench.runs, ("steady",), LIBRARY).set_index("mode")
    for end in stats.Interval._fields:
        frame[f"library_{end}"] = frame["mode"].map(others[f"steady_{end}"])
    returns = timed(bench.runs).dropna(subset=["final_return"]).groupby("mode")["final_return"]
    medians = {mode: stats.median_interval(x.to_numpy()) for mode, x in returns}
    columns = {
        "script": tables.text("mode"),
        "runs": tables.text("runs"),
        "startup (s)": tables.value("startup"),
        "iteration (ms)": tables.value("steady", 1000),
        f"times as long as {LINEN}": tables.span("steady_"),
        f"as {LIBRARY}": tables.span("library_"),
        "whole training (s)": tables.value("process"),
        "median final return": lambda row: (
            interval(*medians[row["mode"]]) if row["mode"] in medians else "-"
        ),
    }
    return tables.table_of("peers", "Libraries that a user would pick instead", frame, columns)


def target_lines(bench: Bench) -> list[str]:
    """Say of each target whether it is met: its whole interval decides."""
    runs = timed(bench.runs).dropna(subset=["steady"])
    table = stats.compare(runs, "steady", LIBRARY).set_index("mode")
    lines = []
    for mode, most in TARGETS.items():
        if mode not in table.index:
            continue
        low, high = table.loc[mode, ["low", "high"]]
        verdict = "met" if high <= most else "missed" if low > most else "undecided"
        if np.isnan(low):
            verdict = "left open, with too few repeats for a claim"
        ratio = interval(table.loc[mode, "estimate"], low, high)
        words = f"{mode} takes {ratio} of {LIBRARY}'s iteration"
        lines.append(f"{words}; the target, at most {number(most, 2)}, is {verdict}.")
    return lines


def of_largest(make: Callable) -> Callable[[Path], pd.DataFrame]:
    return lambda folder: make(benches(load(folder))[0])


BLOCKS = {"peers": of_largest(peer_table), "peer_targets": of_largest(target_lines)}

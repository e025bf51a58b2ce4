"""Our scripts beside libraries that a user would pick instead: their times, and targets."""

from pathlib import Path

import numpy as np
import pandas as pd

from analysis import stats
from analysis.measures import Bench, benches, measure, timed
from analysis.page import Table
from analysis.runs import load
from analysis.tables import span, table_of, text, value
from analysis.words import number

LINEN, LIBRARY = "ppo_linen", "sb3"
TARGETS = {"ppo_linen": 0.14, "ppo_torch": 0.56, "ppo_torch_compile": 0.34}  # of sb3, at most


def peers(bench: Bench) -> pd.DataFrame:
    """Return a row per script: its times, its iteration over two others', and its final return."""
    frame = measure(bench.runs, ("startup", "steady", "process"), LINEN).set_index("mode")
    others = measure(bench.runs, ("steady",), LIBRARY).set_index("mode")
    returns = timed(bench.runs).dropna(subset=["final_return"]).groupby("mode")["final_return"]
    medians = {mode: stats.median_interval(x.to_numpy()) for mode, x in returns}
    for end in stats.Interval._fields:
        frame[f"library_{end}"] = others[f"steady_{end}"]
        frame[f"return_{end}"] = pd.Series({x: getattr(y, end) for x, y in medians.items()})
    return frame.reset_index()


def peer_table(bench: Bench) -> Table:
    columns = {
        "script": text("mode"),
        "runs": text("runs"),
        "startup (s)": value("startup"),
        "iteration (ms)": value("steady", 1000),
        f"times as long as {LINEN}": span("steady_"),
        f"as {LIBRARY}": span("library_"),
        "target": lambda row: number(TARGETS.get(row["mode"], np.nan), 2),
        "whole training (s)": value("process"),
        "median final return": span("return_"),
    }
    caption = "Libraries that a user would pick instead"
    return table_of("peers", caption, peers(bench), columns)


def peer_block(source: Path) -> Table:
    return peer_table(benches(load(source))[0])


BLOCKS = {"peers": peer_block}

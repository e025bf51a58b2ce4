"""Our scripts beside libraries that a user would pick instead."""

from pathlib import Path

import pandas as pd

from analysis import stats
from analysis.measures import Experiment, experiments, summarize, timed
from analysis.page import Table
from analysis.runs import load
from analysis.tables import span, table_of, text, value

LINEN, LIBRARY = "ppo_linen", "sb3"


def peers(experiment: Experiment) -> pd.DataFrame:
    """Return a row per script: its times, its iteration over two others', and its final return."""
    frame = summarize(experiment.runs, ("startup", "steady", "process"), LINEN).set_index("mode")
    others = summarize(experiment.runs, ("steady",), LIBRARY).set_index("mode")
    runs = timed(experiment.runs)
    returns = stats.of_groups(runs, ["mode"], "final_return", stats.median_interval)
    returns = returns.set_index("mode")
    for end in stats.Interval._fields:
        frame[f"library_{end}"] = others[f"steady_{end}"]
        frame[f"return_{end}"] = returns[end]
    return frame.reset_index()


def peer_table(source: Path) -> Table:
    columns = {
        "script": text("mode"),
        "runs": text("runs"),
        "startup (s)": value("startup"),
        "iteration (ms)": value("steady", 1000),
        f"times as long as {LINEN}": span("steady_"),
        f"as {LIBRARY}": span("library_"),
        "whole training (s)": value("process"),
        "median final return": span("return_"),
    }
    caption = "Libraries that a user would pick instead"
    return table_of("peers", caption, peers(experiments(load(source))[0]), columns)


BLOCKS = {"peers": peer_table}

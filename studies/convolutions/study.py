"""Table of training-step times with a CNN, from the results of measure.py."""

import json
from pathlib import Path

import pandas as pd

from analysis import stats
from analysis.page import Table
from analysis.tables import multiple, span, table_of, text, value

BASELINE = "PyTorch, channels_last"


def read(path: Path) -> pd.DataFrame:
    """Return one row per run, with the ratio of its time to the BASELINE time in the same round."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    runs = pd.DataFrame([line for line in lines if "way" in line])
    baseline = runs[runs["way"] == BASELINE].set_index("round")["seconds"]
    runs["ratio"] = runs["seconds"] / runs["round"].map(baseline)
    runs["milliseconds"] = 1000 * runs["seconds"]
    return runs


def steps(path: Path) -> Table:
    """Return the time per step and the compile time of each variant, slowest first."""
    runs = read(path)
    frame = stats.of_groups(runs, ["way"], "milliseconds", stats.geometric_mean)
    ratios = stats.of_groups(runs, ["way"], "ratio", stats.geometric_mean)
    frame = frame.merge(ratios, on="way", suffixes=("", "_ratio"))
    frame = frame.rename(columns={f"{x}_ratio": f"ratio_{x}" for x in stats.Interval._fields})
    compiling = runs.groupby("way")["compile_seconds"].mean()
    frame["compile_seconds"] = frame["way"].map(compiling)
    frame[["framework", "variant"]] = frame["way"].str.split(", ", n=1, expand=True).to_numpy()
    columns = {
        "framework": text("framework"),
        "variant": text("variant"),
        "time per step (ms)": span(),
        "time / PyTorch channels_last time": multiple("ratio_"),
        "compile time (s)": value("compile_seconds"),
    }
    frame = frame.sort_values("estimate", ascending=False)
    return table_of("convolutions_steps", "Time of a training step", frame, columns)


BLOCKS = {"convolutions_steps": steps}

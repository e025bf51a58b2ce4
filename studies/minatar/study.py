"""Time per frame of Breakout in JAX, in PyTorch with Gymnasium, and in MinAtar's example."""

import json
from pathlib import Path

import pandas as pd

from analysis import stats
from analysis.page import Table
from analysis.runs import load
from analysis.tables import multiple, span, table_of, text

JAX = "dqn_linen"
NAMES = {
    "dqn_torch_gymnasium --compile": "PyTorch with Gymnasium",  # name before commit 990f22a
    "dqn_torch_compile": "PyTorch",
    "example": "MinAtar's example",
    JAX: "JAX",
}


def milliseconds(source: Path) -> pd.DataFrame:
    """Return the milliseconds per frame during learning, by seed and implementation (columns)."""
    runs = load(source).runs
    runs["milliseconds"] = 1000 * runs["steady"] / runs["batch_size"]
    table = runs.pivot(index="seed", columns="mode", values="milliseconds")
    lines = (source / "example.jsonl").read_text(encoding="utf-8").splitlines()
    example = pd.DataFrame(map(json.loads, lines)).set_index("seed")
    return table.join(example["ms_per_learning_frame"].rename("example"))


def frames(source: Path) -> Table:
    """Return one row per implementation: time per frame, and JAX time / time, paired by seed."""
    table = milliseconds(source)
    rows = []
    for way in [x for x in NAMES if x in table]:
        frame = stats.geometric_mean(table[way].to_numpy())
        row = {"way": NAMES[way]}
        row |= dict(zip(("frame_estimate", "frame_low", "frame_high"), frame, strict=True))
        part = stats.geometric_mean((table[JAX] / table[way]).to_numpy())
        row |= dict(zip(stats.Interval._fields, part, strict=True))
        rows.append(row)
    columns = {"implementation": text("way"), "time per frame (ms)": span("frame_")}
    columns |= {"JAX time / time": multiple()}
    return table_of("minatar_frames", "Time per frame in Breakout", pd.DataFrame(rows), columns)


BLOCKS = {"minatar_frames": frames}

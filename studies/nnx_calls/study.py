"""Tables and a figure of what one call costs, from what measure.py measured."""

import json
from pathlib import Path

import pandas as pd

from analysis import figures, stats
from analysis.page import Table
from analysis.words import counted, interval

# Way -> hue of the figure: graph mode, tree mode, or JAX alone.
HUES = {
    "nnx.jit": "graph",
    "nnx.cached_partial": "graph",
    "nnx.jit, tree": "tree",
    "nnx.jit_partial, tree": "tree",
    "jax.jit, split and merge": "jax",
    "jax.jit, plain arrays": "jax",
}
MOST_CALLS = 80  # one for each minibatch: what the first table and the figure are about
PPO_ARRAYS = 12  # what the second table is about


def read(path: Path) -> pd.DataFrame:
    """Return a row per version of Flax, way and cell: a call's microseconds, with the interval."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    measured = pd.DataFrame([line for line in lines if "way" in line])
    names = ["flax", "way", "arrays", "calls"]
    cells = []
    for _, part in measured.groupby(names, sort=False):
        row = part.iloc[0][names].to_dict()
        microseconds = 1e6 * part["seconds"] / part["calls"]
        cells.append(row | stats.geometric_mean(microseconds.to_numpy())._asdict())
    return pd.DataFrame(cells)


def wide(frame: pd.DataFrame, name: str, unit: str) -> pd.DataFrame:
    """Return a row of text per version of Flax and way, with a column for each count of name."""
    column = f"{name}s"
    rows = []
    for flax in frame["flax"].unique():
        for way in HUES:
            here = frame[(frame["flax"] == flax) & (frame["way"] == way)]
            row = {"flax": flax, "way": way}
            for _, cell in here.sort_values(column).iterrows():
                text = interval(cell["estimate"], cell["low"], cell["high"])
                row[f"{counted([cell[column]], name)} ({unit})"] = text
            rows.append(row)
    return pd.DataFrame(rows)


def calls(path: Path) -> Table:
    """Return the microseconds of a call, by the number of parameter arrays."""
    frame = read(path)
    frame = frame[frame["calls"] == MOST_CALLS]
    return Table("calls", "Microseconds of one call", frame, wide(frame, "array", "us"))


def iterations(path: Path) -> Table:
    """Return the milliseconds of an iteration, by the number of calls that make it up."""
    frame = read(path)
    frame = frame[frame["arrays"] == PPO_ARRAYS]
    for name in ("estimate", "low", "high"):
        frame[name] *= frame["calls"] / 1000
    return Table("iterations", "Milliseconds of 80 steps", frame, wide(frame, "call", "ms"))


BLOCKS = {"calls": calls, "iterations": iterations}


def update(source: Path, out: Path) -> None:
    """Draw the study's figure."""
    frame = read(source / "measured.jsonl")
    frame = frame[frame["calls"] == MOST_CALLS].rename(columns={"way": "mode", "arrays": "x"})
    frame["panel"] = "flax " + frame["flax"]
    looks = figures.looks(pd.DataFrame(HUES.items(), columns=["mode", "framework"]))
    figure = figures.bands(frame, looks, "parameter arrays", "microseconds of one call")
    with figures.in_style():
        for axes in figure.axes:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(figures.PLAIN)
    (out / "calls.png").write_bytes(figures.png(figure))

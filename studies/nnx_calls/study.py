"""Table and figure of the cost of a call, from the results of measure.py."""

import json
from pathlib import Path

import pandas as pd

from analysis import figures, stats
from analysis.formatting import pluralize
from analysis.page import Table
from analysis.tables import across, texts

# Method -> hue in the figure: graph mode, tree mode, or JAX only.
HUES = {
    "nnx.jit": "graph",
    "nnx.cached_partial": "graph",
    "nnx.jit, tree": "tree",
    "nnx.jit_partial, tree": "tree",
    "jax.jit, split and merge": "jax",
    "jax.jit, plain arrays": "jax",
}
MOST_CALLS = 80  # one per minibatch; shown in the figure
PPO_ARRAYS = 12  # parameter arrays of PPO; shown in the table


def read(path: Path) -> pd.DataFrame:
    """Return the microseconds per call, with one row per Flax version, method and cell."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    measured = pd.DataFrame([line for line in lines if "way" in line])
    measured = measured.rename(columns={"way": "method"})
    measured["microseconds"] = 1e6 * measured["seconds"] / measured["calls"]
    names = ["flax", "method", "arrays", "calls"]
    frame = stats.of_groups(measured, names, "microseconds", stats.geometric_mean)
    order = [*frame["flax"].unique(), *HUES]
    frame = frame.sort_values(["arrays", "calls"])
    return frame.sort_values(["flax", "method"], key=lambda x: x.map(order.index), kind="stable")


def iterations(path: Path) -> Table:
    """Return the time per iteration, by number of calls, for the first Flax version measured."""
    frame = read(path)
    frame = frame[(frame["arrays"] == PPO_ARRAYS) & (frame["flax"] == frame["flax"].iloc[0])]
    for name in ("estimate", "low", "high"):
        frame[name] *= frame["calls"] / 1000
    frame["title"] = [f"{pluralize([x], 'call')} (ms)" for x in frame["calls"]]
    cells = across(frame, texts(frame), ["method"], "title")
    return Table("iterations", "Milliseconds of 80 steps", frame, cells)


BLOCKS = {"iterations": iterations}


def update(source: Path, out: Path) -> None:
    """Draw the figure of the study."""
    frame = read(source / "measured.jsonl")
    frame = frame[frame["calls"] == MOST_CALLS].rename(columns={"method": "mode", "arrays": "x"})
    frame["panel"] = "flax " + frame["flax"]
    styles = figures.styles(pd.DataFrame(HUES.items(), columns=["mode", "framework"]))
    label = "microseconds of one call"
    figure = figures.bands(frame, styles, "parameter arrays", label, log=True)
    (out / "calls.png").write_bytes(figures.png(figure))

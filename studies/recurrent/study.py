"""Cost and benefit of recurrent PPO: tables and the figure of ./benchmark.sh recurrent.

Recurrent scripts have more arguments, so the analysis would not compare them with other scripts.
Here the size of a run is the number of units in each layer, including the GRU.
"""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis import figures, learning, stats
from analysis.formatting import number
from analysis.measures import Experiment, in_order, summarize
from analysis.page import Table
from analysis.runs import load
from analysis.schema import SourceError
from analysis.tables import across, multiple, texts

BASELINE, LIBRARY = "ppo_rnn_linen", "sb3_recurrent"
MASKED_CARTPOLE = "envs.masked_cartpole:MaskedCartPole"
SIZES = {"small": "64", "256x256": "256"}  # network without a GRU -> units per layer
NAMES = {
    MASKED_CARTPOLE: "CartPole without velocities",
    "envs.memory_chain:MemoryChain30": "MemoryChain, 30 steps",
}
LAST = 10  # the return is averaged over the last 10 iterations


def read(source: Path) -> Experiment:
    """Return all runs as one experiment."""
    data = load(source)
    runs = data.runs.assign(settings="").replace({"size": SIZES})
    return Experiment("", runs, runs.head(0), data.iterations, BASELINE)


def cost_table(source: Path) -> Table:
    """Return one row per script: time per iteration and its ratio, for each number of units."""
    runs = read(source).runs
    frame = summarize(runs[runs["env_id"] == MASKED_CARTPOLE], ("steady",), BASELINE)
    shown = frame.rename(columns={"mode": "script"})
    parts = []
    for units in ("64", "256"):
        part = shown[shown["size"] == units].set_index("script")
        parts.append((part["steady"] * 1000).map(number).rename(f"{units} units (ms)"))
        ratios = texts(part.rename(columns=lambda x: x.removeprefix("steady_")), multiple())
        parts.append(ratios.rename(f"{units} units, time / {BASELINE} time"))
    cells = pd.concat(parts, axis=1).fillna("-").reset_index()
    return Table("recurrent_costs", "Time per iteration", frame, cells)


def learning_table(source: Path) -> Table:
    """Return the mean and minimum return over seeds, by script (rows) and environment (columns)."""
    experiment = read(source)
    rows = experiment.iterations.sort_values("iteration")
    last = rows.groupby("run").tail(LAST).groupby("run")["charts/episodic_return"].mean()
    runs = experiment.runs.assign(last=experiment.runs["run"].map(last))
    runs = in_order(runs[(runs["mode"] != LIBRARY) & (runs["size"] == "64")])
    runs = runs.sort_values("env_id", key=lambda x: x.map(list(NAMES).index), kind="stable")
    ends = runs.groupby(["env_id", "mode"], sort=False)["last"].agg(["mean", "min"])
    frame = (ends.round(2) + 0.0).reset_index()  # adding 0.0 turns -0.0 into 0.0
    shown = frame["mean"].map(number) + " (" + frame["min"].map(number) + ")"
    frame = frame.replace({"env_id": NAMES}).rename(columns={"mode": "script"})
    cells = across(frame, shown, ["script"], "env_id")
    return Table("recurrent_learning", "Returns", frame, cells)


def draw(experiment: Experiment) -> Figure:
    """Plot the return in CartPole without velocities against steps and against seconds."""
    runs = experiment.runs[
        (experiment.runs["env_id"] == MASKED_CARTPOLE) & (experiment.runs["size"] == "64")
    ]
    if runs.empty:
        raise SourceError(f"no run has {MASKED_CARTPOLE} and 64 units")
    rows = learning.curves(experiment._replace(runs=runs))
    points = []
    for _, part in rows.groupby(["mode", "steps"]):
        found = stats.mean(part["return"].to_numpy())._asdict() | {"mode": part["mode"].iloc[0]}
        points.append({"panel": "against steps", "x": part["steps"].iloc[0]} | found)
        points.append({"panel": "against seconds", "x": part["seconds"].mean()} | found)
    styles = figures.styles(in_order(runs).drop_duplicates("mode"))
    figure = figures.bands(pd.DataFrame(points), styles, "", "mean return in an iteration")
    for axes in figure.axes:
        axes.set_ylim(0, 510)  # returns are between 0 and 500
    return figure


BLOCKS = {"recurrent_costs": cost_table, "recurrent_learning": learning_table}


def update(source: Path, out: Path) -> None:
    """Draw the figure for a folder of runs or for the study."""
    (out / "recurrent.png").write_bytes(figures.png(draw(read(source))))

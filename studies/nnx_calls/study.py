"""Tables and figure of the cost of a call, from the results of measure.py and from a race."""

import json
from pathlib import Path

import pandas as pd

from analysis import figures, races, stats
from analysis.formatting import pluralize
from analysis.page import Table
from analysis.stats import Interval
from analysis.tables import across, multiple, table_of, text, texts, value

# Method -> hue in the figure: graph mode, tree mode, or JAX only.
HUES = {
    "nnx.jit": "graph",
    "nnx.cached_partial": "graph",
    "nnx.jit, tree": "tree",
    "nnx.jit_partial, tree": "tree",
    "jax.jit, split and merge": "jax",
    "jax.jit, plain arrays": "jax",
}
# Program in races.toml -> method.
POLICY_CALLS = {
    "nnx_gym_jit": "nnx.jit",
    "nnx_gym_cached": "nnx.cached_partial",
    "nnx_gym_split": "jax.jit, split and merge",
    "nnx_gym_tree": "nnx.jit_partial, tree",
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


def policy_calls(path: Path) -> Table:
    """Return the time per iteration with one policy call per environment step, from the last race.

    The first program of the race is ppo_linen_gymnasium.
    """
    times = races.read(path)[-1].times()
    linen, *others = times
    rows = [
        (POLICY_CALLS[program], 1000 * times[program].median(), *races.ratio_of(x, times[linen]))
        for program, x in times[others].items()
    ]
    frame = pd.DataFrame(rows, columns=["call", "ms", *Interval._fields])
    columns = {
        "policy call in ppo_nnx_gymnasium": text("call"),
        "time per iteration (ms)": value("ms"),
        f"time / {linen} time": multiple(),
    }
    return table_of("policy_calls", "One call per step", frame, columns)


BLOCKS = {"iterations": iterations, "policy_calls": policy_calls}


def update(source: Path, out: Path) -> None:
    """Draw the figure of the study."""
    frame = read(source / "measured.jsonl")
    frame = frame[frame["calls"] == MOST_CALLS].rename(columns={"method": "mode", "arrays": "x"})
    frame["panel"] = "flax " + frame["flax"]
    styles = figures.styles(pd.DataFrame(HUES.items(), columns=["mode", "framework"]))
    label = "microseconds of one call"
    figure = figures.bands(frame, styles, "parameter arrays", label, log=True)
    (out / "calls.png").write_bytes(figures.png(figure))

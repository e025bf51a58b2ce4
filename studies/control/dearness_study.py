"""What is left of the frameworks' difference as the environment gets dearer, by dearness.py's runs.

An iteration of n steps takes a + n t: t is what the environment takes for a step, and a is the
script's own time, which is measured where t is 0. So PyTorch's ratio to Linen's iteration is
(a_torch + n t) / (a_linen + n t): the rule, which the runs with dearer steps check.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from analysis import figures, stats
from analysis.formatting import number
from analysis.page import Table, Text
from analysis.tables import across, texts
from studies.control.dearness import IN_JAX

TRAINING = ["algorithm", "size"]
WHERE = [*TRAINING, "microseconds"]
SIZES = {"small": "2 x 64", "medium": "3 x 256", "256 256": "2 x 256"}
NAMES = {"torch": "PyTorch", "torch_compile": "compiled PyTorch", "linen": "Linen"}
LOOKS: dict[str, figures.Look] = {
    "torch": {"color": figures.FAMILIES["torch"], "linestyle": "-", "marker": "o"},
    "torch_compile": {"color": figures.FAMILIES["torch"], "linestyle": "--", "marker": "s"},
}
IN_JAX_AT, LINEAR = -12, 10  # microseconds: where the figure has it, and where its log axis ends
ASKED = 300  # microseconds: MuJoCo's robots take 60 to 400
LEFT = 1.1  # from when on hardly anything is left
COSTS = {30: "30 µs", 300: "300 µs", 1_000: "1 ms", 10_000: "10 ms"}  # of a step, for the README
SMALL = [("ppo", "small"), ("sac", "256 256")]  # the trainings there


def read(path: Path) -> pd.DataFrame:
    """Return a row per run: its seconds, those of Linen's in that round, and what the rule gives.

    A run whose round has no Linen there is left out; without a run of 0 microseconds there is no
    rule.
    """
    runs = pd.DataFrame(map(json.loads, path.read_text().splitlines()))
    parts = runs["script"].str.extract(r"(linen|torch_compile|torch)(?:_gymnasium)?$")
    runs["framework"] = parts[0]
    keys = ["round", *WHERE]
    linen = runs[runs["framework"] == "linen"].set_index(keys)
    runs = runs.join(linen["iteration"].rename("linen"), on=keys).dropna(subset=["linen"])
    own = owns(runs).stack().rename("own")
    is_linen = own.index.get_level_values("framework") == "linen"
    own_linen = own[is_linen].droplevel("framework").rename("own_linen")
    runs = runs.join(own, on=[*TRAINING, "framework"]).join(own_linen, on=TRAINING)
    cost = pd.to_numeric(runs["microseconds"], errors="coerce") * 1e-6
    runs["ratio"] = runs["iteration"] / runs["linen"]
    runs["rule"] = (runs["own"] + cost) / (runs["own_linen"] + cost)
    return runs


def ratios(runs: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return a row per training, framework and cost of a step, in order: the ratio or rule."""
    others = runs[runs["framework"] != "linen"]
    frame = stats.of_groups(others, [*WHERE, "framework"], value, stats.geometric_mean)
    frame["x"] = pd.to_numeric(frame["microseconds"], errors="coerce").fillna(IN_JAX_AT)
    ranks = {name: i for i, name in enumerate([*SIZES, *LOOKS])}
    keys = ["algorithm", "size", "framework", "x"]
    return frame.sort_values(keys, key=lambda x: x.replace(ranks) if x.name != "x" else x)


def training(row: pd.Series) -> str:
    return f"{row['algorithm'].upper()}, {SIZES[row['size']]}"


# === Tables =====================================================================================
def ratio_table(path: Path) -> Table:
    """A row per training and framework, measured and by the rule; a column per cost of a step."""
    runs = read(path)
    parts = []
    for value, title in {"ratio": "measured", "rule": "by the rule"}.items():
        frame = ratios(runs, value)
        if value == "rule":  # where it is no measurement
            frame = frame[frame["microseconds"] != 0]
        shown = texts(frame) if value == "ratio" else frame["estimate"].map(number)
        parts.append(frame.assign(how=title, shown=shown))
    frame = pd.concat(parts).sort_values(["x"], kind="stable")
    frame["training"] = frame.apply(training, axis=1)
    frame["script"] = frame["framework"].map(NAMES)
    frame["column"] = frame["microseconds"].map(lambda x: x if x == IN_JAX else f"{x:,} µs")
    keys = ["training", "script", "how"]
    cells = across(frame, frame["shown"], keys, "column").sort_values(keys, key=in_order)
    return Table("control_dearness", "Times Linen's iteration", frame, cells)


def in_order(column: pd.Series) -> pd.Series:
    """Sort names as they are declared above."""
    names = [f"{x}, {size}" for x in ("PPO", "SAC") for size in SIZES.values()]
    names += [*NAMES.values(), "measured", "by the rule"]
    return column.map(names.index)


def left_table(path: Path) -> Table:
    """A row per cost of a step, a column per algorithm and framework: what the README shows."""
    frame = ratios(read(path), "ratio")
    kept = pd.MultiIndex.from_frame(frame[TRAINING]).isin(SMALL)
    frame = frame[kept & frame["microseconds"].isin(COSTS)].reset_index(drop=True)
    frame["a step of the environment takes"] = frame["microseconds"].map(COSTS)
    frame["column"] = frame["algorithm"].str.upper() + ", " + frame["framework"].map(NAMES)
    cells = across(frame, texts(frame), ["a step of the environment takes"], "column")
    return Table("control_left", "Times Linen's iteration", frame, cells)


def own_table(path: Path) -> Table:
    """A row per training and framework: what a step takes where the environment's is free."""
    runs = read(path)
    runs = runs[runs["microseconds"] == 0].copy()
    for name in ("iteration", "rollout", "update"):
        runs[name] = runs[name].astype(float) / runs["steps"] * 1e6
    keys = [*TRAINING, "framework"]
    frame = runs.drop_duplicates(keys)[keys].reset_index(drop=True)
    for name in ("iteration", "rollout", "update"):
        found = stats.of_groups(runs, keys, name, stats.geometric_mean).set_index(keys)
        frame = frame.join(found["estimate"].rename(name), on=keys)
    cells = pd.DataFrame({"training": frame.apply(training, axis=1)})
    cells["script"] = frame["framework"].map(NAMES)
    titles = {"iteration": "own time of a step (µs)", "rollout": "of it, acting (µs)"}
    titles["update"] = "of it, the update (µs)"
    for name, title in titles.items():
        cells[title] = frame[name].map(number)
    cells = cells.sort_values(["training", "script"], key=in_order)
    return Table("control_own", "What the scripts take themselves", frame, cells)


# === The rule ===================================================================================
def owns(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per training: seconds of a step that are each framework's own."""
    free = runs[runs["microseconds"] == 0]
    free = free.assign(seconds=free["iteration"] / free["steps"])
    keys = [*TRAINING, "framework"]
    frame = stats.of_groups(free, keys, "seconds", stats.geometric_mean)
    return frame.set_index(keys)["estimate"].unstack()


def left_from(torch: pd.Series, linen: pd.Series, most: float) -> pd.Series:
    """Return from how many seconds on the ratio is at most so much, where each has its own."""
    return (torch - most * linen) / (most - 1)


def found_in_rounds(low: float, middle: float, high: float) -> str:
    """Return the rounds' median and range, and nothing where a round has none."""
    return f"{number(middle)} ({number(low)} to {number(high)})" if low > 0 else "-"


def rule_table(path: Path) -> Table:
    """A row per training and framework: the ratio where a step costs ASKED, and where LEFT is."""
    runs = read(path)
    frame = ratios(runs[runs["microseconds"] == ASKED], "ratio")
    free = runs[runs["microseconds"] == 0].copy()
    free["left_from"] = left_from(free["iteration"], free["linen"], LEFT) / free["steps"]
    keys = [*TRAINING, "framework"]
    by_round = free.groupby(keys)["left_from"].agg(["min", "median", "max"])
    frame = frame.join(by_round, on=keys)
    cells = pd.DataFrame({"training": frame.apply(training, axis=1)})
    cells["script"] = frame["framework"].map(NAMES)
    cells[f"times as long as Linen where a step takes {ASKED} µs"] = texts(frame)
    shown = [found_in_rounds(*row) for row in 1e3 * frame[["min", "median", "max"]].to_numpy()]
    cells[f"at most {LEFT} times from (ms), by the rule"] = shown
    return Table("control_rule", "Until when the framework counts", frame, cells)


def error_of_rule(path: Path) -> Text:
    """Say how far the rule's ratios are from those measured, of each algorithm."""
    both = read(path).dropna(subset=["rule"])
    both = both[(both["microseconds"] != 0) & (both["framework"] != "linen")]
    keys = [*WHERE, "framework"]
    by_rule = ratios(both, "rule").set_index(keys)["estimate"]
    measured = ratios(both, "ratio").set_index(keys)["estimate"]
    farthest = np.abs(by_rule / measured - 1).groupby("algorithm").max()
    words = [f"by at most {most:.1%} for {name.upper()}" for name, most in farthest.items()]
    return Text(f"The rule's ratios differ from those measured {', and '.join(words)}.")


# === The figure =================================================================================
@figures.styled
def draw(path: Path) -> Figure:
    """Plot the ratios against the cost of a step, a panel per training, and the rule as a line."""
    runs = read(path)
    found = ratios(runs, "ratio")
    costs = sorted(found["x"].unique())
    grid = np.concatenate([np.linspace(0, 10, 11), np.geomspace(11, max(costs[-1], 12), 100)])
    trainings = list(found.groupby(TRAINING, sort=False))
    titles = [training(group.iloc[0]) for _, group in trainings]
    figure, panels = figures.make_panels(titles, 3, 3.4, figures.WIDTH)
    own = owns(runs)
    for axes, (names, group) in zip(panels, trainings, strict=True):
        axes.axhline(1, color=figures.GREY, linewidth=1)
        for framework, points in group.groupby("framework", sort=False):
            look = LOOKS[str(framework)]
            x, y, low, high = points[["x", "estimate", "low", "high"]].to_numpy(float).T
            errors = np.nan_to_num([y - low, high - y])
            axes.errorbar(
                x,
                y,
                errors,
                color=look["color"],
                marker=look["marker"],
                linestyle="",
                markersize=4,
                capsize=2.5,
            )
            if names in own.index:
                torch, linen = own.loc[names, [framework, "linen"]]
                curve = (torch + grid * 1e-6) / (linen + grid * 1e-6)
                axes.plot(grid, curve, color=look["color"], linestyle=look["linestyle"])
        set_axes(axes, [x for x in costs if x >= 0 or x in set(group["x"])])
    figure.supxlabel("what a step of the environment takes (µs)", fontsize=9)
    figure.supylabel("times Linen's iteration", fontsize=9)
    entries: list[tuple[Any, str]] = []
    for framework, look in LOOKS.items():
        if framework in set(found["framework"]):
            line = Line2D([], [], markersize=4, **look)
            entries.append((line, f"{NAMES[framework]}: measured, 95% interval; line: the rule"))
    entries.append((Line2D([], [], color=figures.GREY, linewidth=1), "as long as Linen"))
    figures.add_legend(figure, entries)
    return figure


def set_axes(axes: Axes, costs: list[float]) -> None:
    """Costs on a logarithmic axis that has 0, and left of it what is in JAX; ratios on one, too."""
    axes.set_xscale("symlog", linthresh=LINEAR, linscale=0.5)
    labels = ["in JAX" if x < 0 else f"{x:,.0f}" for x in costs]
    axes.set_xticks(costs, labels)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(figures.PLAIN)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())


BLOCKS = {
    "control_dearness": ratio_table,
    "control_left": left_table,
    "control_own": own_table,
    "control_rule": rule_table,
    "control_rule_error": error_of_rule,
}

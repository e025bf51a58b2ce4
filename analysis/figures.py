"""The figures of the report and of the notebooks; each function returns a matplotlib figure.

Hue stands for the framework, shade and marker for the model size. The hues are Okabe and Ito's,
which colour-blind readers tell apart, and everything they say is also said by a label or a marker.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, cast

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib import cbook
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from scipy.stats import gaussian_kde

from analysis import readings, stats
from analysis.runs import SourceError

TIMINGS = Path(__file__).parent.parent / "results" / "env_timing.json"
MODES = (
    *("torch none", "torch env.jit", "torch compile", "linen none", "linen jit", "nnx none"),
    *("nnx jit", "nnx cached_partial"),
)
HUES = {"torch": "#D55E00", "linen": "#0072B2", "nnx": "#009E73"}
OTHER_HUE = "#555555"
WHITE_SHARE = {"small": 0.5, "medium": 0.2, "large": 0.0}
MARKERS = {"small": "o", "medium": "s", "large": "^"}
# Of two modes of a framework, one is a broad and light line, the other a thin and dark one on it.
BROAD: dict[str, Any] = {"linewidth": 2.6, "zorder": 2}
THIN: dict[str, Any] = {"linewidth": 1.1, "zorder": 3}
DASHES = {"none": ":", "cached_partial": "--", "compile": "--"}
TITLES = {
    "total": "Training of {length}, from its start to its end",
    "startup": "Startup: process start to the end of iteration 0",
    "first": "Iteration 0",
    "early": "Iterations 1-7, mean",
    "steady": "Iterations 8 and later, mean",
    "rollout_steady": "Rollout, iterations 8 and later",
    "update_steady": "Update, iterations 8 and later",
}
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
LEAST_FOR_VIOLIN = 6  # values
CLOUD = slice(0.06, 0.42)  # where the points of a slot lie; its violins lie left of it


class Complexity(NamedTuple):
    """Where each environment lies on the small axis that every slot of a figure has."""

    position: dict[str, float]  # environment -> 0 to 1
    ticks: list[tuple[float, str]]
    label: str


P = ParamSpec("P")


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Let a function draw in this module's style, and leave matplotlib as it was.

    The figure is closed, that is forgotten by pyplot: the caller alone shows, saves and frees it.
    """

    @wraps(draw)
    def draw_in_style(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with plt.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            plt.close(figure)
            return figure

    return draw_in_style


# === Axes =======================================================================================
def load_complexity(path: str | Path = TIMINGS) -> dict[str, float] | None:
    """Return each environment's step time in units of the fastest's, from env_timing's JSON.

    Without the default file it is None. Raise SourceError for a file that is not env_timing's.
    """
    if path == TIMINGS and not TIMINGS.exists():
        return None
    try:
        rows = json.loads(Path(path).read_text())["environments"]
        seconds = {str(row["env_id"]): float(row["median"]) for row in rows}
        return {env_id: x / min(seconds.values()) for env_id, x in seconds.items()}
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        raise SourceError(f"{path} is not what analysis.env_timing writes") from None


def place(runs: pd.DataFrame, complexity: Mapping[str, float] | None) -> Complexity:
    """Place the environments of runs by complexity, on a log scale, or else by name."""
    envs = sorted(runs["env_id"].unique())
    if len(envs) == 1:
        return Complexity({envs[0]: 0.5}, [], f"environment: {envs[0]}")
    if complexity is None or not set(envs) <= set(complexity):
        position = {env_id: i / (len(envs) - 1) for i, env_id in enumerate(envs)}
        return Complexity(position, [], "within a slot, left to right: environments by name")
    known = {env_id: complexity[env_id] for env_id in envs}
    low, high = min(known.values()), max(known.values())
    scale = math.log(high / low) or 1
    position = {env_id: math.log(x / low) / scale for env_id, x in known.items()}
    label = "small axes: time of an environment's step, relative to the fastest"
    return Complexity(position, [(0, f"{low:.0f}x"), (1, f"{high:.0f}x")], label)


def mode_order(modes: Sequence[str]) -> list[str]:
    """Return the modes once each: those of the benchmark in its order, then the others."""
    return [mode for mode in MODES if mode in set(modes)] + sorted(set(modes) - set(MODES))


def paired_modes(runs: pd.DataFrame, value: str, baseline: str) -> list[str]:
    """Return the other modes that share a block with the baseline."""
    others = [mode for mode in mode_order(runs["mode"]) if mode != baseline]
    return [mode for mode in others if len(stats.pair(runs, value, baseline, mode))]


def paired_sizes(runs: pd.DataFrame, value: str, baseline: str) -> list[str]:
    """Return the model sizes of the blocks that another mode shares with the baseline."""
    modes = stats.candidates(runs, baseline)
    return stats.sizes(pd.concat([stats.pair(runs, value, baseline, mode) for mode in modes]))


def shade(mode: str, size: str) -> tuple[float, float, float]:
    """Return the colour of a framework, lighter for smaller models."""
    share = WHITE_SHARE.get(size, 0.3)
    red, green, blue = to_rgb(HUES.get(mode.partition(" ")[0], OTHER_HUE))
    return (red + (1 - red) * share, green + (1 - green) * share, blue + (1 - blue) * share)


def plain_number(value: float, _: Any = None) -> str:
    """Return 0.001, 1.5 or 1,000 rather than powers of ten."""
    return f"{value:,g}"


def ratio_text(ratio: float) -> str:
    """Return a ratio with three digits."""
    return f"{readings.number(ratio)}x"


def set_log(axis: Axes, values: pd.Series, unit: str = "") -> None:
    """Make the y axis logarithmic, with room around values and plain numbers on it."""
    low, high = values.min(), values.max()
    margin = max(1.15, (high / low) ** 0.06)
    axis.set_yscale("log")
    axis.set_ylim(low / margin, high * margin)
    span = high / low * margin**2
    if span > 100:
        axis.yaxis.set_major_locator(LogLocator())
    elif span > 3:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if span > 10 else (1, 2, 3, 5, 7)))
    else:
        axis.yaxis.set_major_locator(MaxNLocator(6))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda x, _: plain_number(x) + unit))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(axis="y")


def set_slots(axis: Axes, slots: Sequence[str], where: Complexity) -> None:
    """Name the slots below the axis, and give each its small axis of environment complexity."""
    axis.set_xticks(range(len(slots)), [slot.replace(" ", "\n", 1) for slot in slots])
    axis.tick_params(axis="x", length=0, pad=16 if where.ticks else 4)
    axis.set_xlim(-0.5, len(slots) - 0.5)
    transform = axis.get_xaxis_transform()
    for i in range(len(slots)):
        if i:
            axis.axvline(i - 0.5, color="#E4E4E4", linewidth=0.7, zorder=0)
        for x, label in where.ticks:
            at = i + CLOUD.start + x * (CLOUD.stop - CLOUD.start)
            style: dict[str, Any] = {"transform": transform, "color": "#777777", "clip_on": False}
            axis.plot([at, at], [0, -0.015], linewidth=0.7, **style)
            style = {"transform": transform, "color": "#777777", "fontsize": 6}
            axis.text(at, -0.025, label, ha="center", va="top", **style)


def legend(figure: Figure, sizes: Sequence[str], where: Complexity, mean: str = "") -> None:
    """Explain the markers above the figure, and the small axes below it; mean names the bars."""
    handles = [
        Line2D([], [], marker=MARKERS.get(size, "D"), linestyle="", color=shade("", size))
        for size in sizes
    ]
    labels = [f"{size} model" for size in sizes]
    if mean:
        handles.append(Line2D([], [], color="black", linewidth=1.4, marker="_", markersize=9))
        over = " over all model sizes" if len(sizes) > 1 else ""
        labels.append(f"{mean}{over}, 95% interval")
    figure.legend(handles, labels, loc="outside upper center", ncols=len(handles), fontsize=8)
    figure.supxlabel(where.label, fontsize=8, color="#555555")


# === Clouds =====================================================================================
def draw_clouds(
    axis: Axes,
    table: pd.DataFrame,
    slots: Sequence[str],
    where: Complexity,
    group: str,
    violins: bool = True,
) -> None:
    """Draw each slot's rows: half a violin per model size, and a point per row beside it.

    table has the columns `group`, mode, size, env_id and value. The violins are estimated on the
    scale of the axis, which must be set before.
    """
    forward = axis.yaxis.get_transform()
    backward = forward.inverted()
    for _, rows in table.groupby([group, "mode", "size"], sort=False):
        slot, mode, size = (rows[name].iloc[0] for name in (group, "mode", "size"))
        i, values, colour = slots.index(slot), rows["value"].to_numpy(), shade(mode, size)
        offset = rows["env_id"].map(where.position).to_numpy(dtype=float)
        axis.scatter(
            i + CLOUD.start + offset * (CLOUD.stop - CLOUD.start),
            values,
            s=14,
            marker=MARKERS.get(size, "D"),
            color=colour,
            edgecolor="#333333",
            linewidth=0.3,
            zorder=3,
        )
        scaled = forward.transform(values)
        if not violins or len(values) < LEAST_FOR_VIOLIN or np.ptp(scaled) < 1e-9:
            continue
        shape = cbook.violin_stats(scaled, lambda x, at: gaussian_kde(x)(at))[0]
        names = ("coords", "mean", "median", "min", "max")
        shape |= {name: backward.transform(np.asarray(shape[name])) for name in names}
        parts = axis.violin(
            [shape], [i], widths=0.8, side="low", showmeans=False, showextrema=False
        )
        for body in cast(list[Any], parts["bodies"]):
            body.set(facecolor=colour, edgecolor=colour, alpha=0.6, linewidth=0.8)


def draw_means(
    axis: Axes, slots: Sequence[str], means: Mapping[str, tuple[float, float, float]], unit: str
) -> None:
    """Draw the mean of each slot and its interval, and write the mean above."""
    for i, slot in enumerate(slots):
        if slot not in means:
            continue
        mean, low, high = means[slot]
        if not np.isnan(low):
            axis.plot([i, i], [low, high], color="black", linewidth=1.4, zorder=4)
        axis.plot(i, mean, marker="_", markersize=9, color="black", zorder=4)
        style: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 8, "zorder": 5}
        style["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        above = ("data", "axes fraction")
        axis.annotate(f"{readings.number(mean)}{unit}", (i, 1), xycoords=above, **style)


def timed(runs: pd.DataFrame, *values: str) -> list[str]:
    """Return the durations that any run is long enough to have."""
    return [value for value in values if runs[value].notna().any()]


def durations_axis(
    axis: Axes, runs: pd.DataFrame, value: str, slots: Sequence[str], where: Complexity
) -> None:
    """Draw a duration in seconds by mode, on a log axis."""
    table = runs.assign(value=runs[value]).dropna(subset=["value"])
    set_log(axis, table["value"])
    draw_clouds(axis, table, slots, where, "mode")
    set_slots(axis, slots, where)
    axis.set(title=title(runs, value), ylabel="seconds")


def title(runs: pd.DataFrame, value: str) -> str:
    """Return what a duration is; of whole trainings, how long they are."""
    length = readings.counted(runs["num_iterations"], "iteration")
    return TITLES.get(value, value).format(length=length)


def speedups_axis(
    axis: Axes,
    runs: pd.DataFrame,
    value: str,
    baseline: str,
    slots: Sequence[str],
    where: Complexity,
    contender: str = "mode",
) -> None:
    """Draw how many times faster than baseline each slot is, block by block, and on average."""
    parts = []
    for slot in slots:
        pairs = stats.pair(runs, value, baseline, slot, contender)
        speedups = pairs["baseline"] / pairs["candidate"]
        parts.append(pairs.assign(value=speedups, **{contender: slot}))
    table = pd.concat(parts)
    means = stats.speedup_table(runs, value, baseline, contender)
    means = means[means["blocks"] > 0].groupby("candidate").last()  # over all sizes
    # An interval from two runs can span powers of ten: it may leave the axis, the points may not.
    low, high = table["value"].min() / 2, table["value"].max() * 2
    ends = [means["low"].clip(lower=low), means["high"].clip(upper=high), pd.Series([1.0])]
    set_log(axis, pd.concat([table["value"], *ends]), unit="x")
    axis.axhline(1, color="#333333", linewidth=0.8, zorder=1)
    draw_clouds(axis, table, slots, where, contender)
    set_slots(axis, slots, where)
    intervals = {slot: tuple(row) for slot, *row in means[["paired", "low", "high"]].itertuples()}
    draw_means(axis, slots, intervals, "x")
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * (high / low) ** 0.1)  # room for the numbers
    axis.set(title=title(runs, value), ylabel=f"speedup over {baseline}")


def width(slots: Sequence[str], panels: int = 1) -> float:
    """Return the inches that a figure of some slots needs."""
    return max(6.2, min(13, panels * (0.8 + 0.95 * len(slots))))


# === Durations ==================================================================================
@styled
def durations(
    runs: pd.DataFrame, value: str = "total", complexity: Mapping[str, float] | None = None
) -> Figure:
    """Plot a duration of every run by mode."""
    slots, where = mode_order(runs["mode"]), place(runs, complexity)
    figure, axis = plt.subplots(figsize=(width(slots), 4.2))
    durations_axis(axis, runs, value, slots, where)
    legend(figure, stats.sizes(runs), where)
    return figure


@styled
def speedups(
    runs: pd.DataFrame,
    baseline: str,
    value: str = "total",
    complexity: Mapping[str, float] | None = None,
) -> Figure:
    """Plot the speedup of every mode over baseline, within blocks."""
    slots, where = paired_modes(runs, value, baseline), place(runs, complexity)
    figure, axis = plt.subplots(figsize=(width(slots), 4.2))
    speedups_axis(axis, runs, value, baseline, slots, where)
    legend(figure, paired_sizes(runs, value, baseline), where, "geometric mean")
    return figure


@styled
def overhead(runs: pd.DataFrame, complexity: Mapping[str, float] | None = None) -> Figure:
    """Plot startup, iteration 0, iterations 1-7 and the steady state of every run by mode."""
    slots, where = mode_order(runs["mode"]), place(runs, complexity)
    values = timed(runs, "startup", "first", "early", "steady")
    rows = 2 if len(values) == 4 else 1
    columns = len(values) // rows
    size = (width(slots, columns), 3.4 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for axis, value in zip(axes.flat, values, strict=True):
        durations_axis(axis, runs, value, slots, where)
    legend(figure, stats.sizes(runs), where)
    return figure


@styled
def overhead_differences(
    runs: pd.DataFrame, baseline: str, complexity: Mapping[str, float] | None = None
) -> Figure:
    """Plot what every mode's startup and first iterations take beyond the baseline's."""
    slots, where = paired_modes(runs, "startup", baseline), place(runs, complexity)
    values = timed(runs, "startup", "first", "early")
    size = (width(slots, len(values)), 4.2)
    figure, axes = plt.subplots(1, len(values), figsize=size, squeeze=False)
    for axis, value in zip(axes.flat, values, strict=True):
        pairs = pd.concat([stats.pair(runs, value, baseline, x).assign(mode=x) for x in slots])
        table = pairs.assign(value=pairs["candidate"] - pairs["baseline"])
        means = stats.difference_table(runs, value, baseline).groupby("candidate").last()
        intervals = {slot: tuple(row) for slot, *row in means[["mean", "low", "high"]].itertuples()}
        draw_clouds(axis, table, slots, where, "mode", violins=False)
        low, high = table["value"].min(), table["value"].max()
        low, high = min(low, 0), max(high, 0)
        margin = 0.1 * (high - low) or 1
        # As with speedups, an interval may leave the axis, and the numbers need room.
        axis.set_ylim(low - margin, high + 2 * margin)
        axis.axhline(0, color="#333333", linewidth=0.8, zorder=1)
        axis.grid(axis="y")
        set_slots(axis, slots, where)
        draw_means(axis, slots, intervals, " s")
        axis.set(title=title(runs, value).split(":")[0], ylabel=f"more than {baseline} (s)")
    legend(figure, paired_sizes(runs, "startup", baseline), where, "mean")
    return figure


@styled
def phases(
    runs: pd.DataFrame, baseline: str, complexity: Mapping[str, float] | None = None
) -> Figure:
    """Plot rollout and update of synchronised runs: seconds above, speedups below."""
    slots, where = mode_order(runs["mode"]), place(runs, complexity)
    others = paired_modes(runs, "rollout_steady", baseline)
    rows, values = 2 if others else 1, timed(runs, "rollout_steady", "update_steady")
    size = (width(slots, len(values)), 3.6 * rows)
    figure, axes = plt.subplots(rows, len(values), figsize=size, squeeze=False)
    for column, value in zip(axes.T, values, strict=True):
        durations_axis(column[0], runs, value, slots, where)
        if others:
            speedups_axis(column[1], runs, value, baseline, others, where)
            column[1].set_title("")
    legend(figure, stats.sizes(runs), where, "geometric mean" if others else "")
    return figure


@styled
def compilation(runs: pd.DataFrame, complexity: Mapping[str, float] | None = None) -> Figure:
    """Plot iteration 0 and, where runs are long enough, the steady state of every compile mode."""
    slots, where = mode_order(runs["mode"]), place(runs, complexity)
    values = timed(runs, "first", "steady")
    size = (width(slots), 0.4 + 3.4 * len(values))
    figure, axes = plt.subplots(len(values), 1, figsize=size, squeeze=False)
    for axis, value in zip(axes.flat, values, strict=True):
        durations_axis(axis, runs, value, slots, where)
    legend(figure, stats.sizes(runs), where)
    return figure


@styled
def platforms(
    runs: pd.DataFrame,
    baseline: str,
    candidate: str,
    value: str = "steady",
    complexity: Mapping[str, float] | None = None,
) -> Figure:
    """Plot a duration on two platforms side by side, and the speedup of the second."""
    runs = runs[runs["platform"].isin([baseline, candidate])]
    slots, where = mode_order(runs["mode"]), place(runs, complexity)
    figure, axes = plt.subplots(1, 3, figsize=(width(slots, 3), 4.4))
    axes[1].sharey(axes[0])
    for axis, platform in zip(axes, (baseline, candidate), strict=False):
        durations_axis(axis, runs[runs["platform"] == platform], value, slots, where)
        axis.set_title(platform)
    axes[1].set_ylabel("")
    set_log(axes[0], runs[value])
    pairs = stats.pair(runs, value, baseline, candidate, "platform")
    table = pairs.assign(value=pairs["baseline"] / pairs["candidate"])
    set_log(axes[2], pd.concat([table["value"], pd.Series([1.0])]), unit="x")
    axes[2].axhline(1, color="#333333", linewidth=0.8, zorder=1)
    draw_clouds(axes[2], table, slots, where, "mode")
    set_slots(axes[2], slots, where)
    axes[2].set(title="Speedup of the second over the first", ylabel="")
    legend(figure, stats.sizes(runs), where)
    return figure


# === Learning ===================================================================================
def panels(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure of count panels, four in a row, and the panels."""
    columns = min(count, 4)
    rows = math.ceil(count / columns)
    # A lone panel is large enough for the legend above it and the labels beside it.
    size = max(7.0, 0.8 + 3 * columns), max(3.6, 0.8 + 2.2 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size)
    axes = list(np.atleast_1d(axes).flat)
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def panel_title(axis: Axes, runs: pd.DataFrame) -> None:
    """Name the environment of a panel, and say how many runs each of its modes has."""
    counts = runs.groupby("mode").size()
    axis.set_title(f"{runs['env_id'].iloc[0]}, {readings.counted(counts, 'run')} per mode")


def curve_style(mode: str) -> dict[str, Any]:
    """Return the line of a mode: its hue is the framework's, and its form the compile mode's."""
    dashes = DASHES.get(mode.split(maxsplit=1)[-1])
    style = THIN | {"linestyle": dashes} if dashes else BROAD
    return style | {"color": shade(mode, "large" if dashes else "small")}


@styled
def learning_curves(runs: pd.DataFrame, iterations: pd.DataFrame) -> Figure:
    """Plot the return of each environment: the mean over repeats, and a band around them all.

    An iteration without the end of an episode has the return of the one before it. A curve begins
    where all of its runs have a return, or its mean would jump as runs come and go. Runs of several
    model sizes or workloads must not be mixed: give those of one.
    """
    runs = runs.dropna(subset=["final_return"])
    envs, modes = list(dict.fromkeys(runs["env_id"])), mode_order(runs["mode"])
    figure, axes = panels(len(envs))
    rows = iterations.merge(runs[["run", "env_id", "mode"]], on="run")
    for axis, env_id in zip(axes, envs, strict=True):
        for mode in modes:
            part = rows[(rows["env_id"] == env_id) & (rows["mode"] == mode)]
            returns = part.pivot(
                index="global_step", columns="run", values="charts/episodic_return"
            )
            returns = returns.ffill().dropna()
            marker = "." if len(returns) < 3 else ""  # too few iterations for a line to show
            axis.plot(returns.index, returns.mean(axis=1), marker=marker, **curve_style(mode))
            low, high, colour = returns.min(axis=1), returns.max(axis=1), shade(mode, "large")
            axis.fill_between(returns.index, low, high, color=colour, alpha=0.12, linewidth=0)
        panel_title(axis, runs[runs["env_id"] == env_id])
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid()
    lines = "line: mean over runs, each with its last return; band: lowest to highest run"
    figure.supxlabel(f"environment steps ({lines})", fontsize=9)
    figure.supylabel("mean episodic return", fontsize=9)
    handles = [Line2D([], [], **curve_style(mode)) for mode in modes]
    figure.legend(handles, modes, loc="outside upper center", ncols=min(len(modes), 4), fontsize=8)
    return figure


@styled
def final_returns(runs: pd.DataFrame) -> Figure:
    """Plot each run's final return by environment and mode, with their IQM and its interval."""
    runs = runs.dropna(subset=["final_return"])
    envs, modes = list(dict.fromkeys(runs["env_id"])), mode_order(runs["mode"])
    figure, axes = panels(len(envs))
    style: dict[str, Any] = {"color": "black", "linewidth": 1, "marker": "|"}
    handles = [
        Line2D([], [], color=OTHER_HUE, marker="o", markersize=4, linestyle=""),
        Line2D([], [], **style),
    ]
    least = f"from {stats.LEAST_RETURNS} runs on with its 95% interval"
    labels = ["a run", f"interquartile mean (IQM), {least}"]
    figure.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=8)
    for panel, (axis, env_id) in enumerate(zip(axes, envs, strict=True)):
        for i, mode in enumerate(modes):
            rows = runs[(runs["env_id"] == env_id) & (runs["mode"] == mode)]
            values, y = rows["final_return"].to_numpy(), len(modes) - 1 - i
            if not len(values):
                continue
            jitter = np.linspace(-0.15, 0.15, len(values)) if len(values) > 1 else np.zeros(1)
            colours = [shade(mode, size) for size in rows["size"]]
            axis.scatter(values, y + jitter, s=14, color=colours)
            estimate, low, high = stats.iqm_interval([values])
            axis.plot(estimate, y, **style)
            axis.plot([low, high], [y, y], color="black", linewidth=1)
        panel_title(axis, runs[runs["env_id"] == env_id])
        axis.set_ylim(-0.6, len(modes) - 0.4)
        names = modes[::-1] if panel % 4 == 0 else [""] * len(modes)
        axis.set_yticks(range(len(modes)), names)
        axis.grid(axis="x")
    figure.supxlabel("return of the last iteration in which an episode ended", fontsize=9)
    return figure

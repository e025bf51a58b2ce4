"""Bars and bands in one style, and the parts that studies draw figures of their own with.

Hue stands for the framework, in Okabe and Ito's colours, which colour-blind readers tell apart, and
a line for the mode. Names are strangers' text: they are drawn to the letter, never as mathematics.
"""

import io
import math
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

from analysis import schema
from analysis.formatting import number
from analysis.stats import Interval

WIDTH, LONE = 11.0, 9.0  # inches, of several panels and of one: 9 points are 11 pixels in a page
BARS = 4.6  # so that 9 points can be read on a phone
DARK, GREY = "#333333", "#666666"
ORANGE, SKY, GREEN = "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
FAMILIES = {"torch": RED, "linen": BLUE, "nnx": GREEN, "equinox": PURPLE}  # framework -> hue
STRANGERS = (ORANGE, SKY, GREY)
LINES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.5, 1, 1.5)))
FARTHEST_WHISKER = 1.5  # times the longest bar
GOES_ON = "it goes on"
PLAIN = "{x:,.12g}"  # numbers on axes: no powers of ten, no noise of floats
STYLE: dict[Any, Any] = {"text.parse_math": False, "font.size": 9}
STYLE |= {"axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
STYLE |= {"axes.grid": True, "grid.color": "#E4E4E4"}
STYLE |= {"legend.frameon": False, "legend.handlelength": 2.8}

Look = dict[str, Any]  # how a mode is drawn: arguments of a line


@contextmanager
def in_style() -> Generator[None]:
    """Set this module's style on matplotlib's defaults, and leave matplotlib as it was."""
    with style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of a name that the font lacks: a box is drawn
        yield


styled = in_style()  # as a decorator: a function draws in the style


def png(figure: Figure) -> bytes:
    """Return a figure as PNG, without the metadata that would differ from day to day."""
    buffer = io.BytesIO()
    with in_style():
        figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def short(name: object, longest: int = 32) -> str:
    """Return a name in one line of so many characters, its middle cut out if it is long."""
    text = " ".join(schema.clean(name).split()) or "(no name)"
    tail = longest // 3
    return text if len(text) <= longest else f"{text[: longest - tail - 1]}…{text[-tail:]}"


def mix(colour: str, other: str, share: float) -> str:
    """Return a colour with a share of another."""
    red, green, blue = (1 - share) * np.array(to_rgb(colour)) + share * np.array(to_rgb(other))
    return to_hex((red, green, blue))


def looks(modes: pd.DataFrame, own: dict[str, str] | None = None) -> dict[str, Look]:
    """Return the look of every mode, in the order given. modes has the columns mode, framework.

    own are hues of a study's, by framework.
    """
    frameworks = dict(zip(modes["mode"], modes["framework"], strict=True))
    known = FAMILIES | (own or {})
    strangers = sorted(set(frameworks.values()) - set(known))
    hues = known | {x: STRANGERS[i % len(STRANGERS)] for i, x in enumerate(strangers)}
    result = {}
    for mode, framework in frameworks.items():
        siblings = sorted(x for x in frameworks if frameworks[x] == framework)
        line = LINES[siblings.index(mode) % len(LINES)]
        result[mode] = {"color": hues[framework], "linestyle": line}
    return result


def make_panels(
    titles: Iterable[object], columns: int, height: float, width: float, sharey: bool = True
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each title; height is that of a row, in inches."""
    titles = [short(title) for title in titles]
    rows = math.ceil(len(titles) / columns)
    figure = Figure(figsize=(width, rows * height + 0.6), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=sharey).flat)
    for panel in panels[len(titles) :]:
        panel.remove()
    for panel, title in zip(panels, titles, strict=False):
        panel.set_title(title)
        panel.xaxis.set_major_formatter(PLAIN)
        panel.yaxis.set_major_formatter(PLAIN)
    return figure, panels[: len(titles)]


def set_log(axes: Axes, ticks: list[float]) -> None:
    """Let both axes be logarithmic, with ticks on the x axis and round numbers on the other."""
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(ticks)
    low, high = axes.get_ylim()
    steps = (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 5, 7)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(PLAIN)


def add_legend(figure: Figure, entries: list[tuple[Any, str]]) -> None:
    """Explain lines, markers and shades above the figure."""
    handles, labels = zip(*entries, strict=True)
    figure.legend(handles, labels, loc="outside upper left", ncols=3)


@styled
def bars(rows: pd.DataFrame, looks: dict[str, Look], parts: dict[str, str], xlabel: str) -> Figure:
    """Plot durations: a bar per mode, as looks have them, stacked of its parts from the left.

    A size has a panel.

    rows: size, mode, a column per key of parts, and low and high, the whole bar's interval, or NaN.
    An interval that goes far beyond all bars of its panel is cut, and marked.
    parts: column -> what the legend calls it. The last has the mode's colour, the others paler.
    """
    sizes = list(rows["size"].unique())
    modes = [mode for mode in looks if mode in set(rows["mode"])]
    places = np.arange(len(modes))
    pales = dict(zip(reversed(parts), np.linspace(0, 0.7, len(parts)), strict=True))
    titles = [f"{size} network" for size in sizes]
    figure, panels = make_panels(titles, 1, 0.5 + 0.3 * len(modes), BARS)
    is_cut = False
    for axes, size in zip(panels, sizes, strict=True):
        own = rows[rows["size"] == size].set_index("mode").reindex(modes)
        left = np.zeros(len(modes))
        for part in parts:
            colours = [mix(looks[mode]["color"], "white", pales[part]) for mode in modes]
            axes.barh(places, own[part], 0.62, left, color=colours)
            left = left + own[part].to_numpy()
        low, high = own[["low", "high"]].to_numpy(float).T
        cut = FARTHEST_WHISKER * np.nanmax([0.0, *left])
        ends = np.minimum(high, cut)
        leaves = high > cut
        is_cut = is_cut or leaves.any()
        axes.plot([low, ends], [places, places], color=DARK, linewidth=1)
        axes.plot(low, places, "|", color=DARK)
        axes.plot(high[~leaves], places[~leaves], "|", color=DARK)
        axes.plot(ends[leaves], places[leaves], ">", color=DARK, markersize=4)
        for place, total, end in zip(places, left, ends, strict=True):
            at = (max(total, np.nan_to_num(end)), place)
            axes.annotate(number(total), at, (6, 0), textcoords="offset points", va="center")
        axes.set_yticks(places, [short(mode, 26) for mode in modes])
        axes.set_ylim(len(modes) - 0.38, -0.5)  # the first on top
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, axes.get_xlim()[1] * 1.15)  # room for the totals
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlabel(xlabel)
    if len(sizes) == 1:
        panels[0].set_title("")
    entries: list[tuple[Any, str]] = [
        (Patch(color=mix(GREY, "white", pales[part])), name) for part, name in parts.items()
    ]
    if rows["low"].notna().any():
        entries.append((Line2D([], [], color=DARK, marker="|"), "95% interval"))
    if is_cut:
        entries.append(
            (Line2D([], [], color=DARK, marker=">", linestyle="", markersize=4), GOES_ON)
        )
    add_legend(figure, entries)
    return figure


@styled
def bands(
    points: pd.DataFrame, looks: dict[str, Look], xlabel: str, ylabel: str, log: bool = False
) -> Figure:
    """Plot the mean of each mode's runs as a line, and its interval, if any, as a band around it.

    points: panel, mode, x, estimate, low, high; and perhaps least and most, the ends of what was
    seen. A panel shows these, and a band that leaves it is cut, and marked.
    """
    is_cut = False
    panels = list(points["panel"].unique())
    looks = {mode: look for mode, look in looks.items() if mode in set(points["mode"])}
    height, width = (4.4, LONE) if len(panels) == 1 else (3.0, WIDTH)
    figure, axs = make_panels(panels, min(len(panels), 3), height, width, False)
    for axes, panel in zip(axs, panels, strict=True):
        own = points[points["panel"] == panel]
        for mode, look in looks.items():
            line = own[own["mode"] == mode].sort_values("x")
            x, y, low, high = line[["x", "estimate", "low", "high"]].to_numpy(dtype=float).T
            axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
            axes.plot(x, y, **look)
        if "least" in own:
            is_cut = fit(axes, own, looks) or is_cut
        if log:
            set_log(axes, sorted(set(own["x"])))
        elif points["x"].abs().max() >= 10_000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.supxlabel(xlabel, fontsize=9)
    figure.supylabel(ylabel, fontsize=9)
    entries: list[tuple[Any, str]] = [
        (Line2D([], [], **look), short(mode)) for mode, look in looks.items()
    ]
    if points["low"].notna().any():
        entries.append((Patch(color=GREY, alpha=0.3), "95% interval"))
    if is_cut:
        entries.append(
            (Line2D([], [], color=GREY, marker="^", linestyle="", markersize=4), GOES_ON)
        )
    add_legend(figure, entries)
    return figure


def fit(axes: Axes, points: pd.DataFrame, looks: dict[str, Look]) -> bool:
    """Let the y axis show least to most; mark where bands leave it, and return whether one does."""
    least = points["least"].min()
    most = points["most"].max()
    margin = 0.05 * (most - least)
    if not margin > 0:
        return False
    bottom, top = least - margin, most + margin
    axes.set_ylim(bottom, top)
    is_cut = False
    for mode, line in points.sort_values("x").groupby("mode"):
        x = line["x"].to_numpy()
        above = middles((line["high"] > top).to_numpy())
        below = middles((line["low"] < bottom).to_numpy())
        for marker, edge, places in (("^", top, above), ("v", bottom, below)):
            if places:
                color = looks[str(mode)]["color"]
                axes.plot(
                    x[places],
                    [edge] * len(places),
                    marker,
                    color=color,
                    markersize=4,
                    clip_on=False,
                )
                is_cut = True
    return is_cut


def middles(flags: np.ndarray) -> list[int]:
    """Return the middle of each stretch of flags that are set."""
    stretches = np.split(np.arange(len(flags)), np.flatnonzero(np.diff(flags)) + 1)
    return [int(x[len(x) // 2]) for x in stretches if len(x) and flags[x[0]]]


@styled
def spread(values: pd.DataFrame, intervals: dict[str, Interval], xlabel: str) -> Figure:
    """Plot a row for each column of values: each value as a point, the interval over them as a bar.

    The x axis is logarithmic where values are more than ten times apart.
    """
    names = list(values.columns)
    figure, (axes,) = make_panels([""], 1, 0.9 + 0.45 * len(names), LONE)
    for place, name in enumerate(names):
        own = values[name].dropna().to_numpy()
        heights = place + np.linspace(-0.25, 0.25, len(own))  # in the order in which they were
        axes.plot(own, heights, ".", color=STRANGERS[1], markersize=4)
        estimate, low, high = intervals[name]
        axes.plot([low, high], [place, place], color=DARK, linewidth=2, solid_capstyle="butt")
        axes.plot(estimate, place, "|", color=DARK, markersize=12)
    axes.axvline(1, color=GREY, linewidth=1)
    axes.set_yticks(range(len(names)), [short(name, 40) for name in names])
    axes.set_title("")
    axes.set_ylim(len(names) - 0.4, -0.6)  # the first on top
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    if np.nanmax(values) > 10 * np.nanmin(values):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(PLAIN)
    axes.set_xlabel(xlabel)
    point = Line2D([], [], color=STRANGERS[1], marker=".", linestyle="")
    bar = Line2D([], [], color=DARK, linewidth=2)
    add_legend(figure, [(point, "a turn"), (bar, "95% interval of the median")])
    return figure


@styled
def ratios(panels: dict[str, pd.DataFrame], ours: Iterable[str], xlabel: str) -> Figure:
    """Plot a bar per program, from the shortest: ours in one colour, others' in another.

    A panel has the columns program, estimate, low and high.
    """
    ours = set(ours)
    rows = max(map(len, panels.values()))
    figure, all_axes = make_panels(panels, len(panels), 0.7 + 0.27 * rows, WIDTH, sharey=False)
    for axes, frame in zip(all_axes, panels.values(), strict=True):
        frame = frame.sort_values("estimate", ascending=False)
        places = range(len(frame))
        colours = [BLUE if x in ours else ORANGE for x in frame["program"]]
        axes.barh(places, frame["estimate"], 0.62, color=colours)
        low, high = frame[["low", "high"]].to_numpy(float).T
        axes.plot([low, high], [places, places], color=DARK, linewidth=1.5)
        for place, estimate, end in zip(places, frame["estimate"], high, strict=True):
            at = (np.fmax(estimate, end), place)
            axes.annotate(number(estimate), at, (5, 0), textcoords="offset points", va="center")
        axes.set_yticks(places, [short(x) for x in frame["program"]])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, 1.12 * np.fmax(frame["estimate"], high).max())
        axes.set_xlabel(xlabel)
    entries: list[tuple[Any, str]] = [(Patch(color=BLUE), "ours"), (Patch(color=ORANGE), "others")]
    add_legend(figure, [*entries, (Line2D([], [], color=DARK), "95% interval")])
    return figure

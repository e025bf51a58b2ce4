"""Draw bar charts and line charts in one style, for the report and the studies.

The hue shows the framework, in the color-blind-safe palette of Okabe and Ito, and the line style
shows the variant. Names may contain any text, so matplotlib must not parse them as math.
"""

import io
import math
import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import style as mpl_style
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

from analysis.formatting import number
from analysis.stats import Interval

# Widths in inches of figures with several panels, figures with one panel, and bar charts. On a web
# page, 9-point text in a figure of WIDTH is 11 pixels high. BARS is readable on a phone.
WIDTH, LONE = 11.0, 9.0
BARS = 4.6
DARK, GREY = "#333333", "#666666"
ORANGE, SKY, GREEN = "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
FAMILIES = {"torch": RED, "linen": BLUE, "nnx": GREEN, "equinox": PURPLE}  # framework -> hue
STRANGERS = (ORANGE, SKY, GREY)
LINES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.5, 1, 1.5)))
FARTHEST_WHISKER = 1.5  # whiskers are cut at this multiple of the longest bar
BEYOND = "extends beyond the figure"
PLAIN = "{x:,.12g}"  # numbers on axes, without powers of ten and rounding errors
STYLE: dict[Any, Any] = {"text.parse_math": False, "font.size": 9}
STYLE |= {"axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
STYLE |= {"axes.grid": True, "grid.color": "#E4E4E4"}
STYLE |= {"legend.frameon": False, "legend.handlelength": 2.8}

Style = dict[str, Any]  # Line2D arguments for a variant


@contextmanager
def in_style() -> Generator[None]:
    """Temporarily apply the style of this module on top of the matplotlib defaults."""
    with mpl_style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # draw a box for a character that the font lacks
        yield


styled = in_style()  # a decorator for functions that draw


def png(figure: Figure) -> bytes:
    """Return a figure as PNG without metadata, which would depend on the matplotlib version."""
    buffer = io.BytesIO()
    with in_style():
        figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def short(name: object, longest: int = 32) -> str:
    """Return a name on one line; if it is too long, its middle is replaced by an ellipsis."""
    text = " ".join(str(name).split()) or "(no name)"
    tail = longest // 3
    return text if len(text) <= longest else f"{text[: longest - tail - 1]}…{text[-tail:]}"


def mix(color: str, other: str, weight: float) -> str:
    """Return a mixture of two colors; weight is the fraction of the second color."""
    red, green, blue = (1 - weight) * np.array(to_rgb(color)) + weight * np.array(to_rgb(other))
    return to_hex((red, green, blue))


def styles(modes: pd.DataFrame, hues: dict[str, str] | None = None) -> dict[str, Style]:
    """Return the style of every variant, in the given order.

    modes has the columns mode and framework. hues maps frameworks to hues, which
    extend or override the defaults.
    """
    frameworks = dict(zip(modes["mode"], modes["framework"], strict=True))
    known = FAMILIES | (hues or {})
    strangers = sorted(set(frameworks.values()) - set(known))
    known |= {x: STRANGERS[i % len(STRANGERS)] for i, x in enumerate(strangers)}
    result = {}
    for mode, framework in frameworks.items():
        siblings = sorted(x for x in frameworks if frameworks[x] == framework)
        line = LINES[siblings.index(mode) % len(LINES)]
        result[mode] = {"color": known[framework], "linestyle": line}
    return result


def make_panels(
    titles: Iterable[object], columns: int, height: float, width: float, sharey: bool = True
) -> tuple[Figure, list[Axes]]:
    """Return a figure with one panel per title; height is the row height in inches."""
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
    """Make both axes logarithmic, with the given ticks on x and round numbers on y."""
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(ticks)
    low, high = axes.get_ylim()
    steps: Sequence[float] = (1, 1.5, 2, 3, 5, 7)
    if high > 10 * low:
        steps = (1, 2, 5)
    elif high < 2 * low:
        steps = (1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 7, 8)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(PLAIN)


def add_legend(figure: Figure, entries: list[tuple[Any, str]]) -> None:
    """Add a legend above the figure."""
    handles, labels = zip(*entries, strict=True)
    ncols = 2 if figure.get_figwidth() <= BARS and len(entries) > 3 else 3
    figure.legend(handles, labels, loc="outside upper left", ncols=ncols)


@styled
def bars(
    rows: pd.DataFrame, styles: dict[str, Style], parts: dict[str, str], xlabel: str
) -> Figure:
    """Plot durations: one panel per network size, and one stacked bar per variant.

    Variants are in the order of styles. rows has the columns size and mode, a column per key of
    parts, and the columns low and high, which contain the ends of the interval of the total, or
    NaN. An interval that extends far beyond all bars in its panel is truncated and marked. parts
    maps columns to names in the legend. The last part has the color of the variant; the other
    parts are paler.
    """
    sizes = list(rows["size"].unique())
    modes = [mode for mode in styles if mode in set(rows["mode"])]
    places = np.arange(len(modes))
    pales = dict(zip(reversed(parts), np.linspace(0, 0.7, len(parts)), strict=True))
    titles = [f"{size} network" for size in sizes]
    figure, panels = make_panels(titles, 1, 0.5 + 0.3 * len(modes), BARS)
    is_cut = False
    for axes, size in zip(panels, sizes, strict=True):
        here = rows[rows["size"] == size].set_index("mode").reindex(modes)
        left = np.zeros(len(modes))
        for part in parts:
            colors = [mix(styles[mode]["color"], "white", pales[part]) for mode in modes]
            axes.barh(places, here[part], 0.62, left, color=colors)
            left = left + here[part].to_numpy()
        low, high = here[["low", "high"]].to_numpy(float).T
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
        axes.set_ylim(len(modes) - 0.38, -0.5)  # first variant on top
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
        entries.append((Line2D([], [], color=DARK, marker=">", linestyle="", markersize=4), BEYOND))
    add_legend(figure, entries)
    return figure


@styled
def bands(
    points: pd.DataFrame, styles: dict[str, Style], xlabel: str, ylabel: str, log: bool = False
) -> Figure:
    """Plot the mean of each variant as a line, and its interval, if any, as a band.

    points has the columns panel, mode, x, estimate, low and high. The optional columns least and
    most limit the y axis; a band that extends beyond these limits is truncated and marked.
    """
    is_cut = False
    panels = list(points["panel"].unique())
    styles = {mode: style for mode, style in styles.items() if mode in set(points["mode"])}
    height, width = (4.4, LONE) if len(panels) == 1 else (3.0, WIDTH)
    figure, axs = make_panels(panels, min(len(panels), 3), height, width, False)
    for axes, panel in zip(axs, panels, strict=True):
        here = points[points["panel"] == panel]
        for mode, style in styles.items():
            line = here[here["mode"] == mode].sort_values("x")
            x, y, low, high = line[["x", "estimate", "low", "high"]].to_numpy(dtype=float).T
            axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
            axes.plot(x, y, **style)
        if "least" in here:
            is_cut = fit(axes, here, styles) or is_cut
        if log:
            set_log(axes, sorted(set(here["x"])))
        elif points["x"].abs().max() >= 10_000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.supxlabel(xlabel, fontsize=9)
    figure.supylabel(ylabel, fontsize=9)
    entries: list[tuple[Any, str]] = [
        (Line2D([], [], **style), short(mode)) for mode, style in styles.items()
    ]
    if points["low"].notna().any():
        entries.append((Patch(color=GREY, alpha=0.3), "95% interval"))
    if is_cut:
        entries.append((Line2D([], [], color=GREY, marker="^", linestyle="", markersize=4), BEYOND))
    add_legend(figure, entries)
    return figure


def fit(axes: Axes, points: pd.DataFrame, styles: dict[str, Style]) -> bool:
    """Limit the y axis to least and most, mark truncated bands, and return whether any exist."""
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
                color = styles[str(mode)]["color"]
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
    """Return the middle position of each sequence of consecutive True values."""
    stretches = np.split(np.arange(len(flags)), np.flatnonzero(np.diff(flags)) + 1)
    return [int(x[len(x) // 2]) for x in stretches if len(x) and flags[x[0]]]


@styled
def spread(values: pd.DataFrame, intervals: dict[str, Interval], xlabel: str) -> Figure:
    """Plot one row per column: every value as a point, and the interval as a bar.

    The x axis is logarithmic if the values span more than a factor of ten.
    """
    names = list(values.columns)
    figure, (axes,) = make_panels([""], 1, 0.9 + 0.45 * len(names), LONE)
    for place, name in enumerate(names):
        points = values[name].dropna().to_numpy()
        heights = place + np.linspace(-0.25, 0.25, len(points))  # in order of measurement
        axes.plot(points, heights, ".", color=STRANGERS[1], markersize=4)
        estimate, low, high = intervals[name]
        axes.plot([low, high], [place, place], color=DARK, linewidth=2, solid_capstyle="butt")
        axes.plot(estimate, place, "|", color=DARK, markersize=12)
    axes.axvline(1, color=GREY, linewidth=1)
    axes.set_yticks(range(len(names)), [short(name, 40) for name in names])
    axes.set_title("")
    axes.set_ylim(len(names) - 0.4, -0.6)  # first column on top
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
    add_legend(figure, [(point, "a round"), (bar, "95% interval of the median")])
    return figure


@styled
def ratios(panels: dict[str, pd.DataFrame], ours: Iterable[str], xlabel: str) -> Figure:
    """Plot one bar per program, the shortest first; programs in `ours` have a different color.

    panels maps titles to tables with the columns program, estimate, low and high.
    """
    ours = set(ours)
    rows = max(map(len, panels.values()))
    figure, all_axes = make_panels(panels, len(panels), 0.7 + 0.27 * rows, WIDTH, sharey=False)
    for axes, frame in zip(all_axes, panels.values(), strict=True):
        frame = frame.sort_values("estimate", ascending=False)
        places = range(len(frame))
        colors = [BLUE if x in ours else ORANGE for x in frame["program"]]
        axes.barh(places, frame["estimate"], 0.62, color=colors)
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

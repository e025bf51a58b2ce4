"""The figures of the report: bars, forest and bands. Each returns a Figure.

Hue stands for the framework, in Okabe and Ito's colours, which colour-blind readers tell apart;
shade, line and marker stand for the mode. Whatever they say, a label says too.
Modes, sizes, panels and rows are strangers' text: it is drawn to the letter, never as mathematics.
"""

import io
import math
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, ParamSpec

import numpy as np
import pandas as pd
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

P = ParamSpec("P")

ALL = "all environments"  # the row that a forest sets apart
WIDTH, LONE = 11.0, 9.0  # inches, of several panels and of one: 9 points are 11 pixels in a page
LONGEST = 32  # characters of a name
FAMILIES = {  # framework -> hue, and a marker for each of its modes
    "torch": ("#D55E00", "sXpD"),
    "linen": ("#0072B2", "o*Hd"),
    "nnx": ("#009E73", "^vP"),
    "equinox": ("#CC79A7", "<>h"),
    "sb3": ("#8C564B", "8d"),
    "sbx": ("#7F7F00", "p"),
}
STRANGERS = (("#E69F00", "h*p"), ("#56B4E9", "pX8"), ("#666666", "8Ph"))
LINES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.5, 1, 1.5)))
SHADES = (("black", 0), ("black", 0.4), ("white", 0.35), ("black", 0.65))
DARK, GREY, PALE, MARGIN = "#333333", "#666666", "#E4E4E4", "#FAF4BE"
PLAIN = "{x:,.12g}"  # numbers on axes: no powers of ten, no noise of floats
STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "font.size": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "lines.markeredgewidth": 0.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": PALE,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
}


class Look(NamedTuple):
    """How a mode is drawn."""

    colour: str
    line: Any
    marker: str


@contextmanager
def in_style() -> Generator[None]:
    """Set this module's style on matplotlib's defaults, and leave matplotlib as it was."""
    with style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of a name that the font lacks: a box is drawn
        yield


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Let a function draw in this module's style, to the last tick: late ones would lack it."""

    @wraps(draw)
    def draw_in_style(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with in_style():
            figure = draw(*args, **kwargs)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            for text in figure.texts:
                fit(text, 0.98 * figure.bbox.width)
            for axes in figure.axes:
                fit(axes.set_title(axes.get_title("left")), axes.bbox.width)
            return figure

    return draw_in_style


def png(figure: Figure) -> bytes:
    """Return a figure as PNG, without the metadata that would differ from day to day."""
    buffer = io.BytesIO()
    with in_style():
        figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


# === Names, numbers and looks ===================================================================
def clean(value: object) -> str:
    """Return a value as one line of text without control and format characters."""
    text = "".join(x if x.isprintable() else " " for x in str(value))
    return " ".join(text.split())


def short(name: object, longest: int = LONGEST) -> str:
    """Return a name in one line, its middle cut out if it is long."""
    text, tail = clean(name) or "(no name)", longest // 3
    return text if len(text) <= longest else f"{text[: longest - tail - 1]}…{text[-tail:]}"


def fit(text: Text, room: float) -> None:
    """Let a text be no wider than so many pixels, in smaller letters if it must."""
    while Text.get_window_extent(text).width > room and float(text.get_fontsize()) > 2:
        text.set_fontsize(0.95 * float(text.get_fontsize()))


def rounded(value: float) -> str:
    """Return 0.082, 6.4, 21.2 or 1,234."""
    if value < 1:
        return f"{value:#.2g}"
    return f"{value:,.1f}" if value < 99.95 else f"{value:,.0f}"


def mix(colour: str, other: str, share: float) -> str:
    """Return a colour with a share of another."""
    red, green, blue = (1 - share) * np.array(to_rgb(colour)) + share * np.array(to_rgb(other))
    return to_hex((red, green, blue))


def looks(modes: pd.DataFrame) -> dict[str, Look]:
    """Return the look of every mode, in the order given. modes has the columns mode, framework.

    Within a framework looks go by name, so that a mode looks the same in whatever order it comes.
    """
    framework = dict(zip(modes["mode"], modes["framework"], strict=True))
    strangers = sorted(set(framework.values()) - set(FAMILIES), key=str)
    families = FAMILIES | {x: STRANGERS[i % len(STRANGERS)] for i, x in enumerate(strangers)}
    result = {}
    for mode, family in framework.items():
        siblings = [x for x in framework if framework[x] == family]
        rank = sorted(siblings, key=lambda x: (" " in str(x), str(x))).index(mode)
        hue, markers = families[family]
        shade = mix(hue, *SHADES[rank % len(SHADES)])
        result[mode] = Look(shade, LINES[rank % len(LINES)], markers[rank % len(markers)])
    return result


# === Axes =======================================================================================
def present(looks: dict[str, Look], column: Iterable[Any]) -> dict[str, Look]:
    """Return the looks of the modes in a column, in the order of looks."""
    return {mode: looks[mode] for mode in sorted(set(column), key=list(looks).index)}


def make_panels(
    titles: Iterable[object], columns: int, height: float, sharey: bool = True
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each title; height is that of a row, in inches."""
    titles = [short(title) for title in titles]
    rows = math.ceil(len(titles) / columns)
    size = LONE if columns == 1 else WIDTH, rows * height + 0.6
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=sharey).flat)
    for panel in panels[len(titles) :]:
        panel.remove()
    for panel, title in zip(panels, titles, strict=False):
        panel.set_title(title)
        panel.xaxis.set_major_formatter(PLAIN)
        panel.yaxis.set_major_formatter(PLAIN)
    return figure, panels[: len(titles)]


def set_log(axes: Axes, letter: str, low: float, high: float, most: int) -> None:
    """Let the axis x or y be logarithmic, from low to high, with about so many round numbers."""
    axes.set(**{f"{letter}scale": "log", f"{letter}lim": (low, high)})
    axis, decades = axes.xaxis if letter == "x" else axes.yaxis, math.log10(high / low)
    steps = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3))
    fitting = next((x for x in steps if len(x) * decades <= most), (1,))
    few = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10])
    axis.set_major_locator(few if decades < 0.5 else LogLocator(subs=fitting, numticks=most))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(PLAIN)


def set_rows(axes: Axes, places: Iterable[float], names: Iterable[object]) -> None:
    """Write names beside an axis, the first on top."""
    places = list(places)
    axes.set_yticks(places, [short(name) for name in names])
    axes.set_ylim(places[-1] + 0.62, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)


def add_legend(figure: Figure, entries: list[tuple[Any, str]]) -> None:
    """Explain lines, markers and shades above the figure, in as few rows as fit."""
    handles, labels = zip(*entries, strict=True)
    for rows in range(1, len(entries) + 1):
        columns = math.ceil(len(entries) / rows)
        legend = figure.legend(handles, labels, loc="outside upper left", ncols=columns)
        if columns == 1 or legend.get_window_extent().width < figure.bbox.width:
            break
        legend.remove()


# === Bars =======================================================================================
@styled
def bars(rows: pd.DataFrame, looks: dict[str, Look], parts: dict[str, str], unit: str) -> Figure:
    """Plot durations: a bar per mode, a panel per size, stacked of its parts from the left.

    rows: size, mode, a column per key of parts, and low and high, the ends of the whole bar's
        interval, which may be NaN. A part that is NaN is left out, and its bar has no total.
    parts: column -> what the legend calls it.
    unit: "s" or "ms".
    """
    sizes = list(rows["size"].unique())
    modes = list(rows["mode"].unique())
    titles = [f"{size} network" for size in sizes]
    figure, panels = make_panels(titles, min(len(sizes), 3), 0.8 + 0.3 * len(modes))
    for axes, size in zip(panels, sizes, strict=True):
        for row in rows[rows["size"] == size].to_dict("records"):
            draw_bar(axes, modes.index(row["mode"]), row, looks[row["mode"]].colour, list(parts))
        set_rows(axes, range(len(modes)), modes)
        axes.set_xlim(0, axes.get_xlim()[1] * 1.15)  # room for the totals
        axes.set_xlabel({"s": "seconds", "ms": "milliseconds"}[unit])
    if len(sizes) == 1:
        panels[0].set_title("")
    shades = [mix(GREY, "white", pale(i, len(parts))) for i in range(len(parts))]
    entries: list[tuple[Any, str]] = [
        (Patch(color=shade), name) for shade, name in zip(shades, parts.values(), strict=True)
    ]
    if rows["low"].notna().any():
        entries.append((Line2D([], [], color=DARK, marker="|"), "95% interval"))
    if len(entries) > 1:
        add_legend(figure, entries)
    return figure


def pale(i: int, count: int) -> float:
    """Return how pale part i of count is: the first most, the last not at all."""
    return 0.7 * (count - 1 - i) / max(count - 1, 1)


def draw_bar(axes: Axes, y: int, row: dict[Any, Any], colour: str, parts: list[str]) -> None:
    """Draw a bar of parts, its interval, and its total if every part is known."""
    left = 0.0
    for i, part in enumerate(parts):
        width = np.nan_to_num(row[part])
        axes.barh(y, width, 0.62, left, color=mix(colour, "white", pale(i, len(parts))))
        left += width
    if not np.isnan(row["low"]):
        axes.plot([row["low"], row["high"]], [y, y], color=DARK, marker="|", linewidth=1)
    total = "" if any(np.isnan(row[x]) for x in parts) else rounded(left)
    end = max(left, np.nan_to_num(row["high"]))
    axes.annotate(total, (end, y), (6, 0), textcoords="offset points", va="center")


# === Forest =====================================================================================
def view(rows: pd.DataFrame, marks: list[float], log: bool) -> tuple[float, float]:
    """Return where the axis begins and ends: estimates and marks lie in it, intervals may leave.

    An interval from two runs can span powers of ten; it has half of the estimates' span to show.
    """
    change, back = (np.log, np.exp) if log else (np.asarray, np.asarray)
    points = change(np.array([*rows["estimate"], *marks], dtype=float))
    ends = rows[["low", "high"]].to_numpy(dtype=float).ravel()
    ends = change(np.maximum(ends, 1e-12 if log else -np.inf))
    spare = 0.5 * np.ptp(points) or 0.1
    shown = np.append(points, np.clip(ends, points.min() - spare, points.max() + spare))
    low, high = np.nanmin(shown), np.nanmax(shown)
    margin = 0.05 * (high - low) or 0.1
    return float(back(low - margin)), float(back(high + margin))


def draw_intervals(axes: Axes, y: np.ndarray, rows: pd.DataFrame, look: Look) -> None:
    """Draw estimates and intervals, with an arrow head where an interval leaves the axis."""
    estimate, low, high = rows[["estimate", "low", "high"]].to_numpy(dtype=float).T
    left, right = axes.get_xlim()
    axes.hlines(y, np.maximum(low, left), np.minimum(high, right), color=look.colour, linewidth=1.4)
    for outside, x, head in ((low < left, left, "<"), (high > right, right, ">")):
        if outside.any():
            at = np.full(outside.sum(), x)
            axes.plot(at, y[outside], head, color=look.colour, markersize=4, clip_on=False)
    faces = np.where(np.isnan(high - low), "white", look.colour)
    axes.scatter(
        estimate, y, s=25, marker=look.marker, color=look.colour, facecolor=faces, zorder=3
    )


def draw_rows(
    axes: Axes, rows: pd.DataFrame, places: dict[str, float], looks: dict[str, Look]
) -> None:
    """Draw the rows of a panel at their places, in each the modes one below the other."""
    set_rows(axes, places.values(), places)
    for i in range(0, len(places) - (ALL in places), 2):
        axes.axhspan(i - 0.5, i + 0.5, color="#F5F5F5", linewidth=0, zorder=0)
    if ALL in places and len(places) > 1:
        axes.axhline(places[ALL] - 0.65, color=DARK, linewidth=0.9)
    height = 0.84 if rows.duplicated("row").any() else 0  # of a row with several modes
    for i, (mode, look) in enumerate(looks.items()):
        part = rows[rows["mode"] == mode]
        offset = height * ((i + 0.5) / len(looks) - 0.5)
        draw_intervals(axes, part["row"].map(places).to_numpy() + offset, part, look)


@styled
def forest(
    rows: pd.DataFrame,
    looks: dict[str, Look],
    xlabel: str,
    reference: float = 1.0,
    log: bool = True,
    band: tuple[float, float] | None = None,
) -> Figure:
    """Plot estimates with their intervals: environments as rows, a dot per mode.

    rows: panel, row, mode, estimate, low, high. Panels and rows come in this order, modes in that
        of looks; the row ALL comes last, set apart. Without low and high (NaN) a dot is hollow;
        without an estimate there is none.
    xlabel: what is estimated, such as "times as long as ppo_linen".
    reference: where the line stands that estimates are compared with.
    band: from where to where differences count as none.
    """
    rows = rows.dropna(subset=["estimate"])
    panels, looks = list(rows["panel"].unique()), present(looks, rows["mode"])
    names = sorted(rows["row"].unique(), key=lambda name: name == ALL)
    places = {name: i + 0.3 * (name == ALL) for i, name in enumerate(names)}
    columns, height = min(len(panels), 3), 0.7 + len(names) * (0.13 + 0.088 * len(looks))
    figure, axs = make_panels(panels, columns, height)
    low, high = view(rows, [reference, *(band or ())], log)
    for axes, panel in zip(axs, panels, strict=True):
        axes.set_xlim(low, high)
        if log:
            set_log(axes, "x", low, high, most=10 if columns == 1 else 6)
        axes.axvline(reference, color=DARK, linewidth=0.9, zorder=1)
        if band:
            axes.axvspan(*band, color=MARGIN, linewidth=0, zorder=0.5)
        draw_rows(axes, rows[rows["panel"] == panel], places, looks)
    figure.supxlabel(short(xlabel, 110), fontsize=9)
    entries: list[tuple[Any, str]] = [
        (Line2D([], [], color=look.colour, marker=look.marker), short(mode, 60))
        for mode, look in looks.items()
    ]
    if rows[["low", "high"]].isna().any(axis=None):
        hollow = Line2D([], [], marker="o", ls="", markerfacecolor="white", color="black")
        entries.append((hollow, "hollow: no interval"))
    if band:
        entries.append((Patch(color=MARGIN), f"equivalent: {band[0]:g} to {band[1]:g}"))
    add_legend(figure, entries)
    return figure


# === Curves =====================================================================================
@styled
def bands(points: pd.DataFrame, looks: dict[str, Look], xlabel: str, ylabel: str) -> Figure:
    """Plot the mean of each mode's runs as a line, and its interval as a band around it.

    points: panel, mode, x, estimate, low, high. Panels come in this order, modes in that of looks;
        rows where x or the estimate is NaN are left out, and so is a band without low and high.
    """
    points = points.dropna(subset=["x", "estimate"])
    panels, looks = list(points["panel"].unique()), present(looks, points["mode"])
    columns, height = min(len(panels), 3), 4.4 if len(panels) == 1 else 3.0
    figure, axs = make_panels(panels, columns, height, sharey=False)
    for axes, panel in zip(axs, panels, strict=True):
        part = points[points["panel"] == panel].sort_values("x", kind="stable")
        for mode, look in present(looks, part["mode"]).items():
            line = part[part["mode"] == mode]
            x, y, low, high = line[["x", "estimate", "low", "high"]].to_numpy(dtype=float).T
            axes.fill_between(x, low, high, color=look.colour, alpha=0.18, linewidth=0)
            axes.plot(x, y, color=look.colour, linestyle=look.line)
        if part["x"].abs().max() >= 10_000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.supxlabel(xlabel, fontsize=9)
    figure.supylabel(ylabel, fontsize=9)
    entries: list[tuple[Any, str]] = [
        (Line2D([], [], color=look.colour, linestyle=look.line), short(mode))
        for mode, look in looks.items()
    ]
    if points["low"].notna().any():
        entries.append((Patch(color=GREY, alpha=0.3), "95% interval of the mean"))
    add_legend(figure, entries)
    return figure

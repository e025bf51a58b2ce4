"""The figures of the report: the answer, bars, forest, curves and bands. Each returns a Figure.

Hue stands for the framework, in Okabe and Ito's colours, which colour-blind readers tell apart;
shade, line and marker stand for the mode. Whatever they say, a label says too.
Modes, sizes, panels and rows are strangers' text: it is drawn to the letter, never as mathematics.
"""

import io
import math
import textwrap
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
from matplotlib.text import Annotation, Text
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import offset_copy
from scipy.optimize import isotonic_regression

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
HATCHES = ("", "////", "", "\\\\\\\\")
DARK, GREY, PALE, MARGIN = "#333333", "#666666", "#E4E4E4", "#FAF4BE"
PLAIN = "{x:,.12g}"  # numbers on axes: no powers of ten, no noise of floats
RING: dict[str, Any] = {"marker": "o", "ls": "", "mfc": "white", "mec": "black", "mew": 0.9}
CENTRED: dict[str, Any] = {"ha": "center", "va": "center_baseline"}
STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "svg.hashsalt": "figures",
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
    "hatch.linewidth": 0.6,
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


def saved(figure: Figure, kind: str, **metadata: None) -> bytes:
    """Return the file of a figure, without the metadata that would differ from day to day."""
    buffer = io.BytesIO()
    with in_style():
        figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()


def png(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    return saved(figure, "png", Software=None)


def svg(figure: Figure) -> bytes:
    """Return a figure as SVG, its text as shapes."""
    return saved(figure, "svg", Date=None, Creator=None)


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


# === The answer =================================================================================
def spread(wanted: Iterable[float], gap: float, low: float, high: float) -> np.ndarray:
    """Return the places nearest to those wanted that lie gap apart, between low and high."""
    places = np.array(list(wanted))
    order, steps = np.argsort(places, kind="stable"), gap * np.arange(len(places))
    free = isotonic_regression(places[order] - steps).x
    places[order] = np.clip(free, low, max(low, high - steps[-1])) + steps
    return places


def spread_labels(axes: Axes) -> None:
    """Move the labels at the lines' ends up and down until none lies on another."""
    labels = [text for text in axes.texts if isinstance(text, Annotation)]
    box = axes.get_window_extent()
    height = max(Text.get_window_extent(x).height for x in labels) / box.height
    wanted = (axes.transData.transform([x.xy for x in labels])[:, 1] - box.y0) / box.height
    places = spread(wanted, 1.12 * height, height / 2, 1 - height / 2)
    for label, place in zip(labels, places, strict=True):
        label.set_position((label.get_position()[0], place))


def draw_line(axes: Axes, line: pd.DataFrame, measured: float, look: Look) -> None:
    """Draw a mode's line with its band: to the measured length boldly, beyond it thin and pale."""
    x, y, *band = line[["iterations", "estimate", "low", "high"]].to_numpy(dtype=float).T
    bottom, top = axes.get_ylim()
    band = np.clip(band, bottom / 10, top * 10)  # a log axis has no place for 0 and infinity
    axes.fill_between(x, *band, color=look.colour, alpha=0.13, linewidth=0)
    for start, end, width, alpha in ((x[0], measured, 2, 1), (measured, x[-1], 1, 0.55)):
        at = np.geomspace(start, end, 60)
        seconds = np.exp(np.interp(np.log(at), np.log(x), np.log(y)))
        axes.plot(at, seconds, ls=look.line, color=look.colour, linewidth=width, alpha=alpha)


def draw_size(axes: Axes, lines: pd.DataFrame, dots: pd.DataFrame, looks: dict[str, Look]) -> None:
    """Draw the lines of one size, its measured trainings, and a label at the end of each line."""
    for mode, look in present(looks, lines["mode"]).items():
        line = lines[lines["mode"] == mode]
        x, y = dots.loc[dots["mode"] == mode, ["iterations", "seconds"]].to_numpy(dtype=float).T
        draw_line(axes, line, max([line["iterations"].iloc[0], *x]), look)
        edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5, "zorder": 4}
        axes.scatter(x, y, s=24, marker=look.marker, color=look.colour, **edge)
        end = line["iterations"].iloc[-1], line["estimate"].iloc[-1]
        leader = {"arrowstyle": "-", "color": look.colour, "linewidth": 0.7, "relpos": (0, 0.5)}
        form: dict[str, Any] = {"color": mix(look.colour, "black", 0.35), "va": "center"}
        form |= {"fontsize": 8.5, "textcoords": "axes fraction", "annotation_clip": False}
        axes.annotate(short(mode), end, (1.05, 0.5), arrowprops=leader, **form)


def draw_crossings(axes: Axes, crossings: pd.DataFrame, columns: int) -> None:
    """Ring the first three crossings, and say below the panel what they mean."""
    text = [""]  # where the middle of the line says what the axis is
    below = offset_copy(axes.transAxes, axes.get_figure(root=True), y=-19, units="points")
    axes.text(0.5, 0, "iterations", transform=below, ha="center", va="top", fontsize=9)
    for i, row in enumerate(crossings.head(3).to_dict("records")):
        at = row["iterations"], row["seconds"]
        axes.plot(*at, markersize=10, zorder=5, **RING)
        axes.text(*at, str(i + 1), fontsize=7, zorder=6, clip_on=True, **CENTRED)
        after = f"{at[0]:,.0f} [{row['low']:,.0f},\xa0{row['high']:,.0f}] iterations"
        said = f"{i + 1}  {short(row['later'])} overtakes {short(row['sooner'])} after {after}"
        text += textwrap.wrap(said, 120 // columns, subsequent_indent="    ")
    label = axes.set_xlabel("\n".join(text), loc="left", linespacing=1.35)
    fit(label, 100 * (WIDTH / columns - 0.9))


@styled
def answer(
    lines: pd.DataFrame, dots: pd.DataFrame, crossings: pd.DataFrame, looks: dict[str, Look]
) -> Figure:
    """Plot the seconds of a training against its iterations: a line per mode, a panel per size.

    lines: size, mode, iterations, estimate, low, high: a row per point of a line, two or more, in
        their order; seconds from the start of the process to the end of so many iterations. low
        and high may be NaN.
    dots: size, mode, iterations, seconds: a row per whole training that was measured. Beyond the
        longest of its mode and size a line is extrapolated, and pale.
    crossings: size, sooner, later, iterations, low, high, seconds: `later` overtakes `sooner`
        after so many iterations [low, high], at so many seconds. Of each size three are shown.
    Sizes come in the order of lines; modes in that of looks.
    """
    sizes, modes = list(lines["size"].unique()), lines["mode"].unique()
    columns = min(len(sizes), 3 if max(len(str(mode)) for mode in modes) < 25 else 1)
    height = max(4.4, 1.2 + 0.17 * len(modes))
    figure, panels = make_panels([f"{size} network" for size in sizes], columns, height)
    seconds = pd.concat([lines["estimate"], dots["seconds"]]).astype(float)
    for axes, size in zip(panels, sizes, strict=True):
        line, dot, crossing = (x[x["size"] == size] for x in (lines, dots, crossings))
        set_log(axes, "x", line["iterations"].min(), line["iterations"].max(), most=5)
        set_log(axes, "y", seconds.min() / 1.4, seconds.max() * 1.4, most=9)
        draw_size(axes, line, dot, looks)
        draw_crossings(axes, crossing, columns)
    for axes in panels[::columns]:
        axes.set_ylabel("seconds, from the start of the process")
    notes = ["marker: a whole training, measured"] * bool(len(dots))
    notes += ["band: 95% interval"] * bool(lines["low"].notna().any())
    notes += ["thin and pale: extrapolated, beyond the longest training measured"]
    figure.supxlabel("; ".join(notes), fontsize=8, color=GREY, x=0.01, ha="left")
    figure.draw_without_rendering()  # which gives panels and labels their sizes
    for axes in panels:
        spread_labels(axes)
    return figure


# === Bars =======================================================================================
def part_style(colour: str, i: int, count: int) -> dict[str, Any]:
    """Return the shade and hatch of part i of count: the first is the palest."""
    face = mix(colour, "white", 0.72 * (count - 1 - i) / max(count - 1, 1))
    hatch = {"hatch": HATCHES[i % len(HATCHES)], "hatchcolor": (1, 1, 1, 0.5)}
    return {"facecolor": face, "edgecolor": "white", "linewidth": 0.4} | hatch


def draw_bar(axes: Axes, y: int, values: np.ndarray, colour: str, unit: str) -> None:
    """Draw a bar of parts, and its total at its end if every part is known."""
    left = 0.0
    for i, value in enumerate(np.nan_to_num(values)):
        axes.barh(y, value, 0.62, left, **part_style(colour, i, len(values)))
        left += value
    total = "" if np.isnan(values).any() else f"{rounded(left)} {unit}"
    axes.annotate(total, (left, y), (5, 0), textcoords="offset points", va="center")


def write_parts(axes: Axes) -> None:
    """Make room for the totals, and write into each part its number where it fits."""
    space = axes.get_window_extent().width
    widest = max(text.get_window_extent().width for text in axes.texts) + 12
    high = (axes.dataLim.x1 or 1) / max(0.2, 1 - widest / space)
    axes.set_xlim(0, high)
    for bar in [bar for bars in axes.containers for bar in bars]:
        (x, y), width, face = bar.get_center(), bar.get_width(), bar.get_facecolor()
        ink = "white" if np.dot(face[:3], (0.3, 0.6, 0.1)) < 0.55 else "black"
        patch = {"facecolor": face, "edgecolor": "none", "pad": 1}
        text = axes.text(x, y, rounded(width), fontsize=8, color=ink, bbox=patch, **CENTRED)
        if text.get_window_extent().width + 6 > width / high * space:
            text.remove()


@styled
def bars(
    parts: pd.DataFrame,
    part_names: dict[str, str],
    unit: str,
    looks: dict[str, Look],
    totals: pd.DataFrame | None = None,
) -> Figure:
    """Plot what a time is made of: a stacked bar per mode, a panel per size.

    parts: size, mode, and a column per key of part_names, in the unit, stacked in their order. A
        part that is NaN is left out, and its bar has no total.
    part_names: column -> what the legend calls it.
    unit: "s" or "ms".
    totals: size, mode, seconds (in the unit as well): a ring per run, below its mode's bar.
    Sizes and modes come in the order of parts, the first mode on top.
    """
    sizes, modes = list(parts["size"].unique()), list(parts["mode"].unique())
    titles, columns = [f"{size} network" for size in sizes], min(len(sizes), 3)
    figure, panels = make_panels(titles, columns, 0.8 + 0.36 * len(modes))
    for axes, size in zip(panels, sizes, strict=True):
        part = parts[parts["size"] == size]
        values = part[list(part_names)].to_numpy(dtype=float)
        for mode, row in zip(part["mode"], values, strict=True):
            draw_bar(axes, modes.index(mode), row, looks[mode].colour, unit)
        if totals is not None:
            runs = totals[totals["size"] == size]
            places = [modes.index(mode) + 0.42 for mode in runs["mode"]]
            axes.plot(runs["seconds"], places, markersize=3.5, **RING)
        set_rows(axes, range(len(modes)), modes)
        axes.set_xlabel({"s": "seconds", "ms": "milliseconds"}[unit])
    shades = [part_style(GREY, i, len(part_names)) for i in range(len(part_names))]
    entries = [(Patch(**x), name) for x, name in zip(shades, part_names.values(), strict=True)]
    ring = Line2D([], [], markersize=3.5, **RING)
    add_legend(figure, entries + [(ring, "a run")] * (totals is not None))
    figure.draw_without_rendering()  # which gives panels and texts their sizes
    for axes in panels:
        write_parts(axes)
    return figure


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
        entries.append((Line2D([], [], **RING), "hollow: no interval"))
    if band:
        entries.append((Patch(color=MARGIN), f"equivalent: {band[0]:g} to {band[1]:g}"))
    add_legend(figure, entries)
    return figure


# === Curves =====================================================================================
def mean_curve(runs: list[pd.DataFrame]) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean over runs: point by point, of both x and y, if all have equally many.

    Otherwise it goes from where all have begun to the first end, as it would jump as runs come and
    go; between its points a run is taken to be straight.
    """
    if len({len(run) for run in runs}) == 1:
        x, y = (np.mean([run[name].to_numpy() for run in runs], axis=0) for name in ("x", "y"))
        return x, y
    start, end = max(run["x"].min() for run in runs), min(run["x"].max() for run in runs)
    grid = np.linspace(start, end, 200 if start <= end else 0)
    return grid, np.mean([np.interp(grid, run["x"], run["y"]) for run in runs], axis=0)


@styled
def curves(points: pd.DataFrame, looks: dict[str, Look], xlabel: str, ylabel: str) -> Figure:
    """Plot what runs come to: the mean of each mode's runs boldly, each run as a faint line.

    points: panel, mode, run, x, y. Panels come in this order, modes in that of looks; rows where x
        or y is NaN are left out. Runs of a mode may lie at different x, as where x is seconds.
    """
    points = points.dropna(subset=["x", "y"])
    panels, looks = list(points["panel"].unique()), present(looks, points["mode"])
    columns, height = min(len(panels), 4), 4.4 if len(panels) == 1 else 2.3
    figure, axs = make_panels(panels, columns, height, sharey=False)
    for axes, panel in zip(axs, panels, strict=True):
        part = points[points["panel"] == panel].sort_values("x", kind="stable")
        for k, (mode, look) in enumerate(present(looks, part["mode"]).items()):
            runs = [run for _, run in part[part["mode"] == mode].groupby("run", sort=False)]
            faint = min(0.35, 1.4 / len(runs))  # of many, a cloud behind the means
            for run in runs if len(runs) > 1 else []:
                axes.plot(run["x"], run["y"], color=look.colour, linewidth=0.7, alpha=faint)
            x, y = mean_curve(runs)
            every = max(1, len(x) // 4)
            form: dict[str, Any] = {"linestyle": look.line, "marker": look.marker, "mec": "white"}
            form["markevery"] = k * every // len(looks), every  # so that those of modes do not meet
            axes.plot(x, y, color=look.colour, **form)
        if part["x"].abs().max() >= 10_000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.supxlabel(xlabel, fontsize=9)
    figure.supylabel(ylabel, fontsize=9)
    entries = [
        (Line2D([], [], color=look.colour, linestyle=look.line, marker=look.marker), short(mode))
        for mode, look in looks.items()
    ]
    add_legend(figure, entries)
    return figure


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

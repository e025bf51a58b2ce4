"""The figures of the report: the answer, bars, forest and curves. Each returns a Figure.

Hue stands for the framework, in Okabe and Ito's colours, which colour-blind readers tell apart;
shade, line and marker stand for the mode. Whatever they say, a label says too.
Modes, sizes, panels and rows are strangers' text: it is drawn to the letter, never as mathematics.
Of the frame that a figure is about at least one row must have a number.
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
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from scipy.optimize import isotonic_regression

P = ParamSpec("P")

ALL = "all environments"  # the row that a forest sets apart
WIDTH, LONE = 11.0, 9.0  # inches, of several panels and of one: 9 points are 11 pixels in a page
LONGEST = 32  # characters of a name
FAMILIES = {  # framework -> hue, and a marker for each of its modes
    "torch": ("#D55E00", "sXp"),
    "linen": ("#0072B2", "o*H"),
    "nnx": ("#009E73", "^vP"),
    "equinox": ("#CC79A7", "Ph8"),
}
STRANGERS = (("#E69F00", "h*p"), ("#56B4E9", "pX8"), ("#666666", "8Ph"))
LINES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.5, 1, 1.5)))
SHADES = (("black", 0), ("black", 0.4), ("white", 0.35), ("black", 0.65))
HATCHES = ("", "////", "", "\\\\\\\\")
DARK, GREY, PALE, MARGIN = "#333333", "#666666", "#E4E4E4", "#FAF4BE"
RING: dict[str, Any] = {"facecolor": "white", "edgecolor": "black", "linewidth": 0.9}
CENTRED: dict[str, Any] = {"ha": "center", "va": "center_baseline"}
POINTS: dict[str, Any] = {"textcoords": "offset points"}
STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "svg.hashsalt": "figures",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": PALE,
    "grid.linewidth": 0.7,
    "xtick.color": DARK,
    "ytick.color": DARK,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "figure.constrained_layout.w_pad": 0.06,
    "figure.constrained_layout.h_pad": 0.06,
}


class Look(NamedTuple):
    """How a mode is drawn."""

    colour: str
    line: Any
    marker: str

    def key(self, line: Any = None) -> Any:
        """Return what stands for the mode in a legend."""
        form: dict[str, Any] = {"linestyle": line or self.line, "marker": self.marker}
        return Line2D([], [], color=self.colour, markersize=5, **form)


@contextmanager
def in_style() -> Generator[None]:
    """Set this module's style on matplotlib's defaults, and leave matplotlib as it was."""
    with style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of a name that the font lacks: a box is drawn
        yield


def fit(text: Text, room: float) -> None:
    """Let a text be no wider than so many pixels, in smaller letters if it must."""
    while text.get_window_extent().width > room and float(text.get_fontsize()) > 2:
        text.set_fontsize(0.95 * float(text.get_fontsize()))


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
def short(name: object, longest: int = LONGEST) -> str:
    """Return a name in one line of printable characters, its middle cut out if it is long."""
    text = "".join(x if x.isprintable() else " " for x in str(name))
    text, tail = " ".join(text.split()) or "(no name)", longest // 3
    return text if len(text) <= longest else f"{text[: longest - tail - 1]}…{text[-tail:]}"


def plain(value: float, _: Any = None) -> str:
    """Return 0.001, 1.5 or 1,000: neither powers of ten nor the noise of floats."""
    text = f"{value:,.10f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def rounded(value: float) -> str:
    """Return 0.082, 6.4, 21.2 or 1,234."""
    digits = 1 - math.floor(math.log10(value)) if 0 < value < 1 else int(value < 99.95)
    return f"{value:,.{min(digits, 9)}f}"


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
def present(looks: dict[str, Look], column: Iterable[Any]) -> list[str]:
    """Return the modes of a column once each, in the order of looks."""
    return sorted(set(column), key=list(looks).index)


def finite(frame: pd.DataFrame, *columns: str, above: float = -np.inf) -> pd.DataFrame:
    """Return the rows whose columns hold numbers, above a bound and below infinity."""
    kept = [frame[x].astype(float).between(above, np.inf, inclusive="neither") for x in columns]
    return frame[np.all(kept, axis=0)]


def round_numbers(low: float, high: float, log: bool, most: int) -> list[float]:
    """Return about so many round numbers from low to high, evenly spread on their scale."""
    if not log or high / low < 3:
        ticks = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        return [x for x in ticks if low <= x <= high]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = []
    for steps in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [x for i in decades for step in steps if low <= (x := step * 10.0**i) <= high]
        if len(ticks) <= most:
            break
    return ticks[:: math.ceil(len(ticks) / most)]


def set_scale(axes: Axes, letter: str, low: float, high: float, log: bool, most: int = 8) -> None:
    """Let the axis x or y reach from low to high, with plain numbers on it."""
    axes.set(**{f"{letter}scale": "log" if log else "linear", f"{letter}lim": (low, high)})
    axis = axes.xaxis if letter == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(round_numbers(low, high, log, most)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(plain))


def make_panels(
    titles: list[str], columns: int, row: float, extra: float = 0, sharey: bool = True
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels; row and extra are inches of height, per row and besides."""
    rows = math.ceil(len(titles) / columns)
    size = LONE if columns == 1 else WIDTH, rows * row + extra
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=sharey).flat)
    for panel in axes[len(titles) :]:
        panel.remove()
    for panel, title in zip(axes, titles, strict=False):
        panel.set_title(title)
    return figure, axes[: len(titles)]


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
    labels = [x for x in axes.texts if isinstance(x, Annotation) and x.arrow_patch]
    box = axes.get_window_extent()
    height = max(Text.get_window_extent(x).height for x in labels) / box.height
    wanted = (axes.transData.transform([x.xy for x in labels])[:, 1] - box.y0) / box.height
    places = spread(wanted, 1.12 * height, height / 2, 1 - height / 2)
    for label, place in zip(labels, places, strict=True):
        label.set_position((label.get_position()[0], place))


def inches(text: str) -> float:
    """Return how wide small text is drawn."""
    return Figure(dpi=100).text(0, 0, text, fontsize=8.5).get_window_extent().width / 100


def draw_line(axes: Axes, line: pd.DataFrame, measured: float, look: Look) -> None:
    """Draw a mode's line with its band: to the measured length boldly, beyond it thin and pale."""
    x, y, *band = line[["iterations", "estimate", "low", "high"]].to_numpy(dtype=float).T
    bottom, top = axes.get_ylim()
    band = np.clip(band, bottom / 10, top * 10)  # a log axis has no place for 0 and infinity
    axes.fill_between(x, *band, color=look.colour, alpha=0.13, linewidth=0, zorder=1)
    measured = float(np.clip(np.nan_to_num(measured), x[0], x[-1]))
    near, far = np.union1d(x[x < measured], measured), np.union1d(x[x > measured], measured)
    for at, width, alpha in ((near, 2, 1), (far, 1, 0.55)):
        seconds = np.exp(np.interp(np.log(at), np.log(x), np.log(y)))
        axes.plot(at, seconds, ls=look.line, color=look.colour, linewidth=width, alpha=alpha)
    if len(x) == 1:
        axes.plot(x, y, "_", color=look.colour, markersize=12)


def draw_size(axes: Axes, lines: pd.DataFrame, dots: pd.DataFrame, looks: dict[str, Look]) -> None:
    """Draw the lines of one size, its measured trainings, and a label at the end of each line."""
    for mode in present(looks, [*lines["mode"], *dots["mode"]]):
        line = lines[lines["mode"] == mode].sort_values("iterations")
        runs = dots[dots["mode"] == mode].sort_values("iterations")[["iterations", "seconds"]]
        look = looks[mode]
        if len(line):
            draw_line(axes, line, runs["iterations"].max(), look)
        edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5, "zorder": 4}
        axes.scatter(*runs.to_numpy().T, s=24, marker=look.marker, color=look.colour, **edge)
        end = tuple((line[["iterations", "estimate"]] if len(line) else runs).iloc[-1])
        place: dict[str, Any] = {"xytext": (1.05, 0.5), "textcoords": "axes fraction"}
        form: dict[str, Any] = {"color": mix(look.colour, "black", 0.35), "va": "center"}
        leader = {"arrowstyle": "-", "color": look.colour, "linewidth": 0.7, "relpos": (0, 0.5)}
        leader["linestyle"] = "-" if len(line) > 1 else ":"  # where it is not taken for a line
        form |= {"fontsize": 8.5, "annotation_clip": False, "arrowprops": leader}
        axes.annotate(short(mode), end, **place, **form)


def sentence(sooner: str, later: str, iterations: float, low: float, high: float) -> str:
    """Return "A overtakes B after 77 [52, 130] iterations", the interval as far as there is one."""
    count, interval = f"{iterations:,.0f}", ""
    if not (np.isnan(low) and np.isnan(high)):
        first = f"{max(low, 0):,.0f}" if np.isfinite(low) else "start"
        last = f"{high:,.0f}" if np.isfinite(high) else "no end"
        interval = f" [{first}, {last}]"
    unit = "iteration" if count == "1" and not interval else "iterations"
    return f"{short(later)} overtakes {short(sooner)} after {count}{interval} {unit}"


def draw_crossings(axes: Axes, crossings: pd.DataFrame, characters: int) -> None:
    """Ring the first three crossings, and say below the panel what they mean."""
    crossings = finite(crossings, "iterations").head(3)
    names, text = ["sooner", "later", "iterations", "low", "high", "seconds"], []
    for i, row in enumerate(crossings[names].itertuples(index=False, name=None)):
        at, said = (row[2], row[5]), f"{i + 1}  {sentence(*row[:5])}"
        axes.scatter(*at, s=95, zorder=5, **RING)
        axes.text(*at, str(i + 1), fontsize=7, zorder=6, clip_on=True, **CENTRED)
        said = said.replace(", ", ",\xa0")  # an interval stays in its line
        text += textwrap.wrap(said, characters, subsequent_indent="    ")
    below: dict[str, Any] = {"xycoords": "axes fraction", "va": "top", "linespacing": 1.35}
    axes.annotate("\n".join(text), (0, 0), (0, -34), **POINTS, **below)


def reach(values: pd.Series, share: float) -> tuple[float, float]:
    """Return limits around values on a log axis, with a share of their span at either side."""
    low, high = values.min(), values.max()
    margin = (high / low) ** share if high > low else 2
    return low / margin, high * margin


def answer_note(lines: pd.DataFrame, dots: pd.DataFrame) -> str:
    """Return what the marks of the answer mean, of those that it has."""
    ends, measured = (x.groupby(["size", "mode"])["iterations"].max() for x in (lines, dots))
    beyond = ends > 1.001 * measured.reindex(ends.index).astype(float).fillna(0)
    notes = {
        "marker: a whole training, measured": len(dots),
        "band: 95% interval": lines[["low", "high"]].notna().all(axis=1).any(),
        "thin and pale: extrapolated, beyond the longest training measured": beyond.any(),
    }
    return "; ".join(note for note, applies in notes.items() if applies)


@styled
def answer(
    lines: pd.DataFrame,
    dots: pd.DataFrame,
    crossings: pd.DataFrame,
    looks: dict[str, Look],
    title: str = "",
) -> Figure:
    """Plot the seconds of a training against its iterations: a line per mode, a panel per size.

    lines: size, mode, iterations, estimate, low, high: a row per point of a line; seconds from the
        start of the process to the end of so many iterations. low and high may be NaN.
    dots: size, mode, iterations, seconds: a row per whole training that was measured. Beyond the
        longest of its mode and size a line is pale, and the figure says that it is extrapolated.
    crossings: size, sooner, later, iterations, low, high, seconds: `later` overtakes `sooner`
        after so many iterations, at so many seconds. Of each size the first three are shown. A
        bound that is NaN or infinite is not known; where both are NaN there is no interval.
    Sizes come in the order of lines, then of dots; modes in that of looks. Lines and dots without
    a positive number are left out, and so are crossings without a finite one.
    """
    lines = finite(lines, "iterations", "estimate", above=0)
    dots = finite(dots, "iterations", "seconds", above=0)
    points = pd.concat([lines.rename(columns={"estimate": "seconds"}), dots])
    sizes, names = list(points["size"].unique()), [short(x) for x in points["mode"].unique()]
    limits = [reach(points.loc[points["size"] == size, "seconds"], 0.05) for size in sizes]
    whole = reach(points["seconds"], 0.05)
    # A scale for all lets sizes be compared, unless it presses the lines of each together.
    shared = np.ptp(np.log(whole)) < 2 * max(np.ptp(np.log(x)) for x in limits)
    widths = [inches(name) for name in names]
    columns = max(1, min(len(sizes), int(WIDTH / (2.1 + max(widths)))))
    character = max(0.066, *(width / len(name) for width, name in zip(widths, names, strict=True)))
    titles, row = [f"{short(size)} network" for size in sizes], max(4.4, 1.2 + 0.17 * len(names))
    figure, panels = make_panels(titles, columns, row, 0.6, sharey=shared)
    for i, (axes, size) in enumerate(zip(panels, sizes, strict=True)):
        parts = [frame[frame["size"] == size] for frame in (points, lines, dots, crossings)]
        set_scale(axes, "y", *(whole if shared else limits[i]), log=True)
        set_scale(axes, "x", *reach(parts[0]["iterations"], 0.006), log=True, most=6)
        draw_size(axes, parts[1], parts[2], looks)
        draw_crossings(axes, parts[3], int((figure.get_figwidth() / columns - 0.6) / character))
        axes.set_xlabel("iterations")
        if i % columns == 0:
            axes.set_ylabel("seconds, from the start of the process")
    figure.supxlabel(answer_note(lines, dots), fontsize=8, color=GREY, x=0.01, ha="left")
    figure.suptitle(short(title, 110) if title else "", x=0.01, ha="left", weight="bold")
    figure.draw_without_rendering()  # which gives panels and labels their sizes
    for axes in panels:
        spread_labels(axes)
    return figure


# === Bars =======================================================================================
def part_style(colour: str, i: int, count: int) -> dict[str, Any]:
    """Return the shade and hatch of part i of count: the first is the palest."""
    face = mix(colour, "white", 0.72 * (count - 1 - i) / max(count - 1, 1))
    hatch = {"hatch": HATCHES[i % len(HATCHES)], "hatchcolor": mix(face, "white", 0.5)}
    return {"facecolor": face, "edgecolor": "white", "linewidth": 0.4} | hatch


def draw_bar(axes: Axes, y: int, values: list[float], colour: str, unit: str) -> None:
    """Draw a bar of parts, and its total at its end if every part is known."""
    left = 0.0
    for i, value in enumerate(values):
        if value > 0:
            axes.barh(y, value, 0.62, left, **part_style(colour, i, len(values)))
            left += value
    total = "" if np.isnan(values).any() else f"{rounded(left)} {unit}"
    axes.annotate(total, (left, y), (5, 0), va="center", **POINTS)


def write_parts(axes: Axes, high: float) -> None:
    """Make room for bars, dots and totals, and write into each part its number where it fits."""
    space = axes.get_window_extent().width
    widest = max(text.get_window_extent().width for text in axes.texts) + 12
    high = (high or 1) / max(0.2, 1 - widest / space)
    set_scale(axes, "x", 0, high, log=False, most=max(2, min(8, int(space / 60))))
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
    unit: "s", "ms" or any other.
    totals: size, mode, seconds (in the unit as well): a ring per run, below its mode's bar.
    Sizes and modes come in the order of parts, the first mode on top.
    """
    parts = parts[parts[list(part_names)].notna().any(axis=1)]
    totals = finite(parts.assign(seconds=np.nan) if totals is None else totals, "seconds")
    sizes, modes = list(parts["size"].unique()), list(parts["mode"].unique())
    titles = [f"{short(size)} network" for size in sizes]
    figure, panels = make_panels(titles, min(len(sizes), 3), 0.8 + 0.36 * len(modes), 0.5)
    longest = []
    for axes, size in zip(panels, sizes, strict=True):
        part = parts[parts["size"] == size]
        values = part[list(part_names)].to_numpy(dtype=float)
        for mode, row in zip(part["mode"], values, strict=True):
            draw_bar(axes, modes.index(mode), row.tolist(), looks[mode].colour, unit)
        dots = totals[(totals["size"] == size) & totals["mode"].isin(part["mode"])]
        places = [modes.index(mode) + 0.42 for mode in dots["mode"]]
        axes.scatter(dots["seconds"], places, s=11, zorder=4, **RING)
        longest.append(max([*np.nansum(values, axis=1), *dots["seconds"]]))
        set_rows(axes, range(len(modes)), modes)
        axes.set_xlabel({"s": "seconds", "ms": "milliseconds"}.get(unit, unit))
    styles = [part_style(GREY, i, len(part_names)) for i in range(len(part_names))]
    entries = [(Patch(**x), name) for x, name in zip(styles, part_names.values(), strict=True)]
    ring = Line2D([], [], marker="o", markersize=3.5, linestyle="", color="black", mfc="white")
    add_legend(figure, entries + [(ring, "a run")] * bool(len(totals)))
    figure.draw_without_rendering()  # which gives panels and texts their sizes
    for axes, high in zip(panels, longest, strict=True):
        write_parts(axes, high)
    return figure


# === Forest =====================================================================================
def view(rows: pd.DataFrame, marks: list[float], log: bool) -> tuple[float, float]:
    """Return where the axis begins and ends: estimates and marks lie in it, intervals may leave.

    An interval from two runs can span powers of ten; it has half of the estimates' span to show.
    """
    change, back = (np.log, np.exp) if log else (np.asarray, np.asarray)
    points = change(np.array([*rows["estimate"], *marks], dtype=float))
    ends = np.concatenate([rows["low"].dropna(), rows["high"].dropna()])
    ends = change(np.maximum(ends, 1e-12 if log else -np.inf))
    spare = 0.5 * np.ptp(points) or 0.1
    shown = np.concatenate([points, np.clip(ends, points.min() - spare, points.max() + spare)])
    margin = 0.05 * np.ptp(shown) or 0.1
    low, high = back(np.array([shown.min() - margin, shown.max() + margin]))
    return float(low), float(high)


def draw_interval(
    axes: Axes, y: float, estimate: float, low: float, high: float, look: Look
) -> None:
    """Draw an estimate and its interval, with an arrow head where the interval leaves the axis."""
    left, right = axes.get_xlim()
    known = not (np.isnan(low) or np.isnan(high))
    if known:
        axes.plot([max(low, left), min(high, right)], [y, y], color=look.colour, linewidth=1.4)
        for outside, x, head in ((low < left, left, "<"), (high > right, right, ">")):
            if outside:
                axes.plot(x, y, head, color=look.colour, markersize=4, clip_on=False)
    size, face = 6 if look.marker == "D" else 5, look.colour if known else "white"
    axes.plot(estimate, y, look.marker, color=look.colour, mfc=face, markersize=size, zorder=3)


def draw_rows(
    axes: Axes, rows: pd.DataFrame, places: dict[str, float], looks: dict[str, Look]
) -> None:
    """Draw the rows of a panel at their places, in each the modes one below the other."""
    set_rows(axes, places.values(), places)
    for i in range(0, len(places) - (ALL in places), 2):
        axes.axhspan(i - 0.5, i + 0.5, color="#F5F5F5", linewidth=0, zorder=0)
    if ALL in places and len(places) > 1:
        axes.axhline(places[ALL] - 0.65, color=DARK, linewidth=0.9)
    columns = rows[["row", "mode", "estimate", "low", "high"]]
    height = 0.84 if rows.duplicated("row").any() else 0  # of a row with several modes
    for name, mode, *interval in columns.itertuples(index=False, name=None):
        y = places[name] + height * ((list(looks).index(mode) + 0.5) / len(looks) - 0.5)
        look = looks[mode]._replace(marker="D") if name == ALL else looks[mode]
        draw_interval(axes, y, *interval, look)


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
    rows = finite(rows, "estimate", above=0 if log else -np.inf)
    panels, modes = list(rows["panel"].unique()), present(looks, rows["mode"])
    names = sorted(rows["row"].unique(), key=lambda name: name == ALL)
    places = {name: i + 0.3 * (name == ALL) for i, name in enumerate(names)}
    columns, row = min(len(panels), 3), 0.7 + len(names) * (0.13 + 0.088 * len(modes))
    figure, axs = make_panels([short(panel) for panel in panels], columns, row, 0.6)
    low, high = view(rows, [reference, *(band or ())], log)
    for axes, panel in zip(axs, panels, strict=True):
        set_scale(axes, "x", low, high, log, most=10 if columns == 1 else 6)
        axes.axvline(reference, color=DARK, linewidth=0.9, zorder=1)
        if band:
            axes.axvspan(*band, color=MARGIN, linewidth=0, zorder=0.5)
        draw_rows(axes, rows[rows["panel"] == panel], places, {x: looks[x] for x in modes})
    figure.supxlabel(short(xlabel, 110), fontsize=9)
    entries = [(looks[mode].key(line="-"), short(mode, 60)) for mode in modes]
    if rows[["low", "high"]].isna().any(axis=None):
        hollow = Line2D([], [], color=GREY, linestyle="", marker="o", mfc="white", markersize=5)
        entries.append((hollow, "hollow: no interval"))
    if band:
        entries.append((Patch(color=MARGIN), f"equivalent: {plain(band[0])} to {plain(band[1])}"))
    add_legend(figure, entries)
    return figure


# === Curves =====================================================================================
def mean_curve(runs: list[pd.DataFrame]) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean over runs: point by point, of both x and y, if all have equally many.

    Otherwise it goes in at most 200 points from where all have begun to the first end: beyond, it
    would jump as runs come and go. Between its points a run is taken to be straight.
    """
    if len({len(run) for run in runs}) == 1:
        x, y = (np.mean([run[name].to_numpy() for run in runs], axis=0) for name in ("x", "y"))
        return x, y
    start, end = max(run["x"].min() for run in runs), min(run["x"].max() for run in runs)
    grid = np.unique(np.concatenate([run["x"] for run in runs]))
    grid = grid[(grid >= start) & (grid <= end)]
    grid = np.linspace(start, end, 200) if len(grid) > 200 else grid
    return grid, np.mean([np.interp(grid, run["x"], run["y"]) for run in runs], axis=0)


@styled
def curves(points: pd.DataFrame, looks: dict[str, Look], xlabel: str, ylabel: str) -> Figure:
    """Plot what runs come to: the mean of each mode's runs boldly, each run as a faint line.

    points: panel, mode, run, x, y. Panels come in this order, modes in that of looks; rows where x
        or y is NaN are left out. Runs of a mode may lie at different x, as where x is seconds.
    """
    points = finite(points, "x", "y")
    panels, modes = list(points["panel"].unique()), present(looks, points["mode"])
    columns, row = min(len(panels), 4), 4.4 if len(panels) == 1 else 2.3
    figure, axs = make_panels([short(x) for x in panels], columns, row, 0.8, sharey=False)
    marks = 5 if columns < 3 else 3
    for axes, panel in zip(axs, panels, strict=True):
        part = points[points["panel"] == panel].sort_values("x", kind="stable")
        for k, mode in enumerate(present(looks, part["mode"])):
            runs = [run for _, run in part[part["mode"] == mode].groupby("run", sort=False)]
            colour, line, marker = looks[mode]
            for run in runs if len(runs) > 1 else []:
                axes.plot(*mean_curve([run]), color=colour, linewidth=0.7, alpha=0.35)
            x, y = mean_curve(runs)
            every = max(1, len(x) // marks)
            form: dict[str, Any] = {"marker": marker, "markersize": 3 + marks / 2}
            form["markevery"] = k * every // len(modes), every  # so that those of modes do not meet
            axes.plot(x, y, color=colour, ls=line, lw=0.9 + marks / 5, mec="white", mew=0.4, **form)
        set_scale(axes, "x", *axes.get_xlim(), log=False, most=marks + 2)
        set_scale(axes, "y", *axes.get_ylim(), log=False, most=5)
        if part["x"].abs().max() >= 10_000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.supxlabel(short(xlabel, 110), fontsize=9)
    figure.supylabel(short(ylabel, 60), fontsize=9)
    add_legend(figure, [(looks[mode].key(), short(mode)) for mode in modes])
    return figure

"""What can be said of the figures without looking at them: texts, places, numbers and files."""

import itertools
import re
import xml.etree.ElementTree as ElementTree

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axis import Tick
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from analysis import figures

SECONDS = {  # mode -> framework, startup, a steady iteration
    "ppo_torch": ("torch", 7.5, 0.318),
    "ppo_torch_compile": ("torch", 21.2, 0.182),
    "ppo_linen": ("linen", 6.4, 0.082),
    "ppo_nnx": ("nnx", 6.8, 0.085),
    "ppo_nnx_cached": ("nnx", 6.8, 0.079),
    "ppo_torch --no-jit-env": ("torch", 7.1, 0.9),
    "ppo_linen --no-jit": ("linen", 5.5, 3.5),
    "ppo_nnx --no-jit": ("nnx", 5.6, 3.9),
}
EIGHT, FIVE = list(SECONDS), list(SECONDS)[:5]
SIZES = ["small", "medium", "large"]
ENVS = ["CartPole-v1", "MountainCarContinuous-v0", *(f"Environment{i}-v0" for i in range(10))]
PARTS = {"imports": "imports", "first": "iteration 0", "rest": "the other iterations"}
HOSTILE = [
    "a$\\undefined$b",
    "<script>alert(1)</script>",
    "W" * 300,
    "",
    "環境 naïve",
    "--><svg onload=1>\n]]>\x00\u202e&amp;",
    "$x^{$",
    "\\",
]


def looks(modes):
    rows = [(mode, SECONDS.get(mode, (mode,))[0]) for mode in modes]
    return figures.looks(pd.DataFrame(rows, columns=["mode", "framework"]))


def seconds(mode, iterations, factor=1.0):
    _, startup, steady = SECONDS.get(mode, ("", 5.0 + len(mode) / 10, 0.1))
    return startup + (iterations - 1) * steady * factor


def answer_frames(modes, sizes=("small",), last=1000, measured=61):
    lines, dots = [], []
    for size in sizes:
        for mode in modes:
            for x in np.geomspace(1, last, 20):
                y = seconds(mode, x)
                lines.append((size, mode, x, y, 0.9 * y, 1.1 * y))
            dots.append((size, mode, measured, seconds(mode, measured)))
    lines = pd.DataFrame(lines, columns=["size", "mode", "iterations", "estimate", "low", "high"])
    return lines, pd.DataFrame(dots, columns=["size", "mode", "iterations", "seconds"])


def crossing_frame(*rows):
    names = ["size", "sooner", "later", "iterations", "low", "high", "seconds"]
    return pd.DataFrame(list(rows), columns=names)


def draw_answer(modes=FIVE, sizes=("small",), crossings=()):
    lines, dots = answer_frames(modes, sizes)
    return figures.answer(lines, dots, crossing_frame(*crossings), looks(modes))


def draw_bars(modes=FIVE, sizes=("small",)):
    rows = [(x, mode, 2.0, seconds(mode, 1), seconds(mode, 60)) for x in sizes for mode in modes]
    parts = pd.DataFrame(rows, columns=["size", "mode", *PARTS])
    totals = parts.assign(seconds=parts[list(PARTS)].sum(axis=1) * 1.03)
    return figures.bars(parts, PARTS, "s", looks(modes), totals)


def forest_rows(modes, panels=("small",), rows=ENVS):
    table = [(p, r, mode, 1.0 + i, 0.9 + i, 1.2 + i) for p in panels for r in rows
             for i, mode in enumerate(modes)]  # fmt: skip
    return pd.DataFrame(table, columns=["panel", "row", "mode", "estimate", "low", "high"])


def draw_forest(modes=FIVE, sizes=("small",)):
    rows = forest_rows(modes, sizes, [*ENVS, figures.ALL])
    return figures.forest(rows, looks(modes), "times as long as ppo_linen")


def curve_points(modes, panels, runs=2):
    table = [(p, mode, f"{mode} {run}", 8192.0 * x, x + run) for p in panels for mode in modes
             for run in range(runs) for x in range(1, 30)]  # fmt: skip
    return pd.DataFrame(table, columns=["panel", "mode", "run", "x", "y"])


def draw_curves(modes=FIVE, panels=("small",)):
    return figures.curves(curve_points(modes, panels), looks(modes), "environment steps", "return")


DRAW = [draw_answer, draw_bars, draw_forest, draw_curves]


def is_drawn(tick):
    low, high = sorted(tick.get_view_interval())
    return low <= tick.get_loc() <= high


def texts(figure):
    """Texts that are drawn: an axis also has ticks beyond its ends."""
    beyond = [tick for tick in figure.findobj(Tick) if not is_drawn(tick)]
    hidden = {text for tick in beyond for text in tick.findobj(Text)}
    shown = [x for x in figure.findobj(Text) if x.get_visible() and x.get_text().strip()]
    return [x for x in shown if x not in hidden]


def words(figure):
    return [text.get_text().replace("\xa0", " ") for text in texts(figure)]


def extent(text):
    return Text.get_window_extent(text)  # of an annotation without its leader


def xs(line):
    return np.asarray(line.get_xdata(), dtype=float)


def ys(line):
    return np.asarray(line.get_ydata(), dtype=float)


def end_labels(axes):
    return [x for x in axes.texts if isinstance(x, Annotation) and x.arrow_patch]


def assert_within(figure):
    for text in texts(figure):
        box, page = extent(text), figure.bbox
        assert page.x0 <= box.x0 and box.x1 <= page.x1, text
        assert page.y0 <= box.y0 and box.y1 <= page.y1, text


def assert_apart(items):
    boxes = [extent(x) for x in items]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i]), items[i]


# === All four ===================================================================================
@pytest.mark.parametrize("draw", DRAW)
@pytest.mark.parametrize("modes", [EIGHT, FIVE[:1]])
def test_every_text_lies_within_the_figure(draw, modes):
    assert_within(draw(modes, SIZES))
    assert_within(draw(modes, SIZES[:1]))


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("draw", DRAW)
def test_hostile_names_are_drawn_to_the_letter(draw):
    figure = draw(HOSTILE, HOSTILE[:3])
    assert_within(figure)
    shown = words(figure)
    for name in ("a$\\undefined$b", "<script>alert(1)</script>", "(no name)", "$x^{$"):
        assert name in shown
    long = [x for x in shown if "WWW" in x and "overtakes" not in x]
    assert long and all("…" in x and len(x) <= 60 for x in long)
    # As a notebook would, outside of the style: no text becomes mathematics, and no number does.
    figure.set_size_inches(5, 20)
    figure.draw_without_rendering()


@pytest.mark.parametrize("draw", DRAW)
def test_an_svg_is_the_same_each_time_and_holds_no_markup_of_names(draw):
    data = figures.svg(draw(HOSTILE, HOSTILE[:3]))
    assert data == figures.svg(draw(HOSTILE, HOSTILE[:3]))
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    tags, comments, attributes = set(), [], set()
    for node in ElementTree.fromstring(data, parser).iter():
        if node.tag is ElementTree.Comment:
            comments.append(node.text)
        else:
            tags.add(str(node.tag).partition("}")[2])
            attributes |= set(node.attrib)
    assert not tags & {"script", "b", "foreignObject", "image", "a"} and "use" in tags
    assert not any(name.startswith("on") for name in attributes)
    assert any("alert(1)" in (text or "") for text in comments)
    assert b"<script" not in data and b"<svg onload" not in data
    assert b"dc:date" not in data


@pytest.mark.parametrize("draw", DRAW)
def test_matplotlib_is_left_as_it_was(draw):
    with matplotlib.rc_context({"font.size": 33, "text.parse_math": True, "axes.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        figure = draw()
        data = figures.png(figure)
        assert dict(matplotlib.rcParams) == before
    assert not plt.get_fignums()
    assert data.startswith(b"\x89PNG") and b"Software" not in data
    assert max(text.get_fontsize() for text in texts(figure)) < 20
    assert to_hex(figure.axes[0].get_facecolor()) == "#ffffff"


@pytest.mark.parametrize("draw", DRAW)
def test_axes_have_plain_numbers(draw):
    figure = draw(EIGHT, SIZES)
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            shown = [x.get_text() for x in axis.get_ticklabels() if re.search(r"\d$", x.get_text())]
            assert all(re.fullmatch(r"\N{MINUS SIGN}?[\d,]*\.?\d+|\S*-v\d+", x) for x in shown)
        assert any(x.get_text() for x in axes.get_xticklabels())
    assert "1,000" in words(draw_answer())


def test_numbers_as_they_are_written():
    values = [0.00123, 0.0821, 0.96, 6.4, 21.23, 99.97, 1234.4]
    shown = ["0.0012", "0.082", "0.96", "6.4", "21.2", "100", "1,234"]
    assert [figures.rounded(x) for x in values] == shown


@pytest.mark.parametrize(
    ("low", "high"), [(1, 1.01), (0.9, 2.2), (1.1, 4.9), (5, 400), (0.3, 3e6), (1e-4, 1e12)]
)
def test_a_log_axis_has_some_round_numbers_and_not_too_many(low, high):
    axes = Figure().subplots()
    figures.set_log(axes, "x", low, high, 7)
    assert 2 <= sum(low <= x <= high for x in axes.get_xticks()) <= 11


@pytest.mark.parametrize("draw", [draw_forest, draw_curves, draw_bars])
def test_a_title_does_not_reach_into_the_next_panel(draw):
    figure = draw(FIVE, ["NVIDIA GeForce RTX 4090 Laptop GPU", "AMD EPYC 9654 96-Core CPU", "x"])
    names = {axes.get_title("left") for axes in figure.axes}
    titles = [text for text in texts(figure) if text.get_text() in names]
    assert len(titles) == 3 and "NVIDIA" in "".join(names)
    assert_apart(titles)


def test_looks_tell_modes_apart_and_stay_with_their_names():
    eight = looks(EIGHT)
    assert len(set(eight.values())) == 8 and len({x.marker for x in eight.values()}) == 8
    assert {mode: looks(FIVE[::-1])[mode] for mode in FIVE} == {mode: eight[mode] for mode in FIVE}
    assert eight["ppo_linen"].colour == "#0072b2" and eight["ppo_nnx"].colour == "#009e73"
    assert list(looks(FIVE[::-1])) == FIVE[::-1]
    ours = pd.DataFrame({"mode": ["ppo_equinox", "ppo_equinox --no-jit"], "framework": "equinox"})
    both = figures.looks(ours).values()
    assert len({x.marker for x in [*eight.values(), *both]}) == 10
    assert len({x.colour for x in [*eight.values(), *both]}) == 10
    assert next(iter(both)).colour == "#cc79a7"  # the same whatever else is shown
    others = looks(["ppo_torch", "mine", "yours"])
    assert len({x.colour for x in others.values()}) == 3


def test_a_mode_without_a_look_is_an_error():
    with pytest.raises(ValueError, match="is not in list"):
        figures.curves(curve_points(FIVE, ["a"]), looks(["ppo_linen"]), "x", "y")


# === The answer =================================================================================
@pytest.mark.parametrize("spacing", [0, 1e-9, 0.02, 0.5])
def test_places_keep_their_order_and_their_distance(spacing):
    wanted = 0.5 + spacing * np.arange(6)[::-1]
    places = figures.spread(wanted, 0.1, 0.05, 0.95)
    assert np.diff(np.sort(places)).min() > 0.0999
    assert places.min() >= 0.05 - 1e-9 and places.max() <= 0.95 + 1e-9
    assert spacing == 0 or (np.argsort(places) == np.argsort(wanted)).all()


def test_places_that_are_free_are_taken():
    assert figures.spread([0.8, 0.2, 0.5], 0.1, 0, 1).tolist() == pytest.approx([0.8, 0.2, 0.5])


@pytest.mark.parametrize("sizes", [SIZES[:1], SIZES[:2], SIZES, [*SIZES, "128x128"]])
@pytest.mark.parametrize("same", [False, True])
def test_labels_at_the_ends_of_lines_do_not_overlap(sizes, same):
    lines, dots = answer_frames(EIGHT, sizes)
    lines["estimate"] = 5.0 if same else lines["estimate"]
    figure = figures.answer(lines, dots, crossing_frame(), looks(EIGHT))
    assert len(figure.axes) == len(sizes)
    for axes in figure.axes:
        labels = end_labels(axes)
        assert {x.get_text() for x in labels} == set(EIGHT)
        assert_apart([*labels, *(x for x in axes.get_xticklabels() if x.get_text())])
        assert min(extent(x).x0 for x in labels) > axes.bbox.x1


def test_crossings_are_ringed_and_said():
    rows = [
        ("small", "ppo_torch", "ppo_torch_compile", 77.2, 52, 130, 40.0),
        ("small", "ppo_linen", "ppo_nnx_cached", 1234, 2.4, 9000, 17.0),
        ("small", "ppo_nnx", "ppo_torch", 10, 5, 20, 8.0),
        ("small", "ppo_nnx", "ppo_linen", 5, 2, 7, 8.0),
        ("large", "ppo_nnx", "ppo_linen", 5, 2, 7, 8.0),
    ]
    figure = draw_answer(crossings=rows)
    said = " ".join(" ".join(words(figure)).split())
    assert "1 ppo_torch_compile overtakes ppo_torch after 77 [52, 130] iterations" in said
    assert "2 ppo_nnx_cached overtakes ppo_linen after 1,234 [2, 9,000] iterations" in said
    assert said.count("overtakes") == 3
    assert any("[52,\xa0130]" in text.get_text() for text in texts(figure))  # in one line
    rings = [(xs(x)[0], ys(x)[0]) for x in figure.axes[0].lines if x.get_marker() == "o"]
    assert rings == [(77.2, 40.0), (1234.0, 17.0), (10.0, 8.0)]
    assert "overtakes" not in " ".join(words(draw_answer()))
    assert_within(draw_answer(HOSTILE, crossings=[("small", *HOSTILE[2:4], 77, 52, 130, 40.0)]))


def test_what_was_not_measured_is_pale_and_said():
    lines, dots = answer_frames(["ppo_linen"], last=1000, measured=61)
    figure = figures.answer(lines, dots, crossing_frame(), looks(["ppo_linen"]))
    near, far = figure.axes[0].lines
    assert xs(near).max() == xs(far).min() == 61
    assert far.get_linewidth() < near.get_linewidth() and (far.get_alpha() or 1) < 1
    assert "extrapolated" in figure.get_supxlabel() and "95%" in figure.get_supxlabel()
    lines[["low", "high"]] = np.nan
    note = figures.answer(lines, dots[:0], crossing_frame(), looks(["ppo_linen"])).get_supxlabel()
    assert note == "thin and pale: extrapolated, beyond the longest training measured"


def test_a_band_without_end_fills_its_panel_rather_than_to_vanish():
    lines, dots = answer_frames(["ppo_linen"])
    lines[["low", "high"]] = -np.inf, np.inf
    figure = figures.answer(lines, dots, crossing_frame(), looks(["ppo_linen"]))
    assert_within(figure)
    (axes,) = figure.axes
    band = axes.collections[0].get_paths()[0].get_extents()
    assert band.y0 < axes.get_ylim()[0] and band.y1 > axes.get_ylim()[1]


# === Bars =======================================================================================
def test_bars_say_their_parts_and_totals():
    parts = pd.DataFrame(
        [
            ("small", "ppo_linen", 2.0, 4.4, 0.01),
            ("small", "ppo_torch", 1.9, 5.6, 1234.0),
            ("small", "ppo_nnx", 2.0, np.nan, 600.0),
        ],
        columns=["size", "mode", *PARTS],
    )
    totals = pd.DataFrame({"size": "small", "mode": "ppo_torch", "seconds": [1200.0, 1300.0]})
    figure = figures.bars(parts, PARTS, "s", looks(FIVE), totals)
    (axes,), shown = figure.axes, words(figure)
    assert "1,242 s" in shown and "6.4 s" in shown  # sums
    assert "1,234" in shown and "600" in shown and "0.010" not in shown  # a part too small for it
    assert len([x for x in shown if x.endswith(" s")]) == 2  # no total with a part unknown
    assert [x.get_text() for x in axes.get_yticklabels()] == ["ppo_linen", "ppo_torch", "ppo_nnx"]
    assert {*PARTS.values(), "a run", "seconds"} <= set(shown)
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first on top
    assert xs(axes.lines[0]).tolist() == [1200, 1300] and axes.get_xlim()[1] > 1300


def test_numbers_lie_within_their_parts():
    figure = draw_bars(EIGHT, SIZES)
    axes = figure.axes[0]
    bars = [bar.get_window_extent() for part in axes.containers for bar in part]
    inside = [x for x in axes.texts if not isinstance(x, Annotation)]
    assert inside
    for text in inside:
        box = extent(text)
        assert any(bar.x0 <= box.x0 and box.x1 <= bar.x1 and bar.overlaps(box) for bar in bars)


def test_parts_differ_without_hue():
    styles = [figures.part_style("#0072B2", i, 4) for i in range(4)]
    grey = [np.dot([int(x["facecolor"][i : i + 2], 16) for i in (1, 3, 5)], (0.3, 0.6, 0.1))
            for x in styles]  # fmt: skip
    assert (np.diff(grey) < -20).all()
    assert all(a["hatch"] != b["hatch"] for a, b in itertools.pairwise(styles))


def test_bars_of_nothing_but_zeros():
    parts = pd.DataFrame([("small", "ppo_linen", 0.0, 0.0, 0.0)], columns=["size", "mode", *PARTS])
    figure = figures.bars(parts, PARTS, "ms", looks(FIVE))
    assert "milliseconds" in words(figure) and "a run" not in words(figure)


# === Forest =====================================================================================
def marks(axes):
    """The place of each estimate, and whether it is hollow."""
    found = [x for x in axes.collections if isinstance(x, PathCollection)]
    hollow = [to_hex(face) == "#ffffff" for x in found for face in x.get_facecolors()]
    places = np.concatenate([x.get_offsets() for x in found])
    return places[:, 0], places[:, 1], hollow


def test_a_forest_has_a_mark_for_each_estimate_and_none_for_a_gap():
    rows = forest_rows(["ppo_torch", "ppo_nnx"], rows=["first", figures.ALL, "empty", "last"])
    rows.loc[rows["row"] == "empty", "estimate"] = np.nan
    rows.loc[0, "estimate"] = np.nan
    rows.loc[1, ["low", "high"]] = np.nan
    figure = figures.forest(rows, looks(FIVE), "times as long as ppo_linen")
    (axes,) = figure.axes
    assert [x.get_text() for x in axes.get_yticklabels()] == ["first", "last", figures.ALL]
    _, places, hollow = marks(axes)
    assert len(places) == 5 and sum(hollow) == 1
    (rule,) = (x for x in axes.lines if len({*ys(x)}) == 1 and xs(x).tolist() == [0, 1])
    assert (places > ys(rule)[0]).sum() == 2
    assert {"times as long as ppo_linen", "hollow: no interval"} <= set(words(figure))


@pytest.mark.parametrize("log", [True, False])
def test_intervals_may_leave_the_axis_and_estimates_may_not(log):
    rows = forest_rows(["ppo_torch", "ppo_nnx"], rows=["a", "b"])
    rows.loc[0, ["low", "high"]] = 1e-9 if log else -1e9, 1e9
    rows.loc[1, ["low", "high"]] = -np.inf, np.inf
    (axes,) = figures.forest(rows, looks(FIVE), "x", log=log).axes
    low, high = axes.get_xlim()
    assert 0 < high - low < 10
    assert all(low < x < high for x in marks(axes)[0])
    heads = [str(x.get_marker()) for x in axes.lines if x.get_marker() in ("<", ">")]
    assert sorted(heads) == ["<", "<", ">", ">"]
    drawn = [x.get_segments() for x in axes.collections if isinstance(x, LineCollection)]
    ends = np.concatenate(drawn)[:, :, 0]
    assert ends.size == 8 and low <= ends.min() and ends.max() <= high


def test_marks_of_a_row_do_not_touch_at_36_cells():
    rows = forest_rows(EIGHT, SIZES, [*ENVS, figures.ALL])
    rows[["estimate", "low", "high"]] = 1.0
    figure = figures.forest(rows, looks(EIGHT), "x")
    assert len(figure.axes) == 3 and figure.get_figheight() < 12.5
    places = sorted({*marks(figure.axes[0])[1]})
    assert len(places) == 13 * 8
    pixels = figure.axes[0].transData.transform([(1, y) for y in places])[:, 1]
    assert np.abs(np.diff(pixels)).min() > 5 * figure.dpi / 72  # a marker is 5 points high


def test_a_margin_is_shaded_and_said():
    rows = forest_rows(["ppo_nnx"], rows=["a", "b"])
    rows[["estimate", "low", "high"]] -= 1
    figure = figures.forest(rows, looks(FIVE), "x", reference=0, log=False, band=(-1.5, 2))
    (axes,) = figure.axes
    assert "equivalent: -1.5 to 2" in words(figure)
    assert axes.get_xlim()[0] < -1.5 and axes.get_xlim()[1] > 2 and axes.get_xscale() == "linear"
    spans = [patch.get_path().get_extents(patch.get_patch_transform()) for patch in axes.patches]
    assert (-1.5, 2) in [(box.x0, box.x1) for box in spans]


def test_a_forest_of_equal_values():
    rows = forest_rows(["ppo_nnx"]).assign(estimate=1.0, low=1.0, high=1.0)
    (axes,) = figures.forest(rows, looks(FIVE), "x").axes
    assert axes.get_xlim()[0] < 1 < axes.get_xlim()[1]


# === Curves =====================================================================================
def test_the_mean_runs_from_where_all_have_begun_to_where_the_first_ends():
    runs = [pd.DataFrame({"x": [0.0, 2, 4], "y": [0.0, 2, 4]}),
            pd.DataFrame({"x": [1.0, 3, 9], "y": [3.0, 5, 5]})]  # fmt: skip
    x, y = figures.mean_curve(runs)  # of as many points, both x and y are means
    assert x.tolist() == [0.5, 2.5, 6.5] and y.tolist() == [1.5, 3.5, 4.5]
    x, y = figures.mean_curve([runs[0], runs[1].head(2)])
    assert x.tolist() == np.linspace(1, 3, 200).tolist() and y.tolist() == pytest.approx(x + 1)
    x, y = figures.mean_curve([runs[0], runs[1].assign(x=[7, 8, 9]).head(2)])
    assert len(x) == len(y) == 0


def test_curves_draw_each_run_and_the_mean():
    points = curve_points(["ppo_linen"], ["CartPole-v1"], runs=3)
    points.loc[points["run"] == "ppo_linen 2", "y"] = np.nan
    figure = figures.curves(points, looks(FIVE), "environment steps", "mean return")
    (axes,) = figure.axes
    assert len(axes.lines) == 3 and ys(axes.lines[2])[0] == 1.5
    assert {"CartPole-v1", "ppo_linen", "environment steps", "mean return", "200k"} <= set(
        words(figure)
    )
    assert len(draw_curves(["ppo_linen"], ["a"]).axes[0].lines) == 3
    one = figures.curves(points[points["run"] == "ppo_linen 0"], looks(FIVE), "x", "y")
    assert len(one.axes[0].lines) == 1


def test_curves_have_four_columns_at_most_and_a_lone_panel_is_large():
    figure = draw_curves(EIGHT, ENVS)
    assert len({round(axes.bbox.x0) for axes in figure.axes}) == 4 and len(figure.axes) == 12
    assert_within(figure)
    lone = draw_curves(EIGHT, ENVS[:1]).axes[0].bbox
    assert lone.width > 600 and lone.height > 300


def test_a_single_iteration_is_a_marker():
    points = curve_points(FIVE, ["a"]).groupby("run").head(1)
    (axes,) = figures.curves(points, looks(FIVE), "x", "y").axes
    assert all(x.get_marker() != "None" for x in axes.lines if x.get_linewidth() > 1)
    assert len({x.get_marker() for x in axes.lines} - {"None"}) == 5
    assert all(x.get_markevery() == (0, 1) for x in axes.lines if x.get_marker() != "None")


def test_bands_hold_the_interval_and_lines_the_mean():
    """Without an interval there is a line alone, and rows without an x or a mean are left out."""
    x = np.arange(5.0)
    parts = [
        pd.DataFrame({"mode": mode, "x": x, "estimate": x + i, "low": x + i - 1, "high": x + i + 1})
        for i, mode in enumerate(["dqn_linen", "$a_b$"])
    ]
    parts[1][["low", "high"]] = np.nan
    parts[0].loc[4, "estimate"] = np.nan
    points = pd.concat(parts, ignore_index=True).assign(panel="Breakout")
    modes = pd.DataFrame({"mode": ["dqn_linen", "$a_b$"], "framework": ["linen", "torch"]})
    figure = figures.bands(points, figures.looks(modes), "steps", "return")
    [axes] = figure.axes
    lines = [np.array(line.get_xydata()) for line in axes.lines]
    np.testing.assert_array_equal(lines[0], np.stack([x[:4], x[:4]], axis=1))
    np.testing.assert_array_equal(lines[1], np.stack([x, x + 1], axis=1))
    corners = np.array(axes.collections[0].get_paths()[0].vertices)
    assert (corners[:, 1].min(), corners[:, 1].max()) == (-1, 4)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["dqn_linen", "$a_b$", "95% interval of the mean"]

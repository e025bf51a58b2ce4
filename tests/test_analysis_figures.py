"""What can be said of the figures without looking at them: texts, places and numbers."""

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text

from analysis import figures

FRAMEWORKS = {
    "ppo_linen": "linen",
    "ppo_nnx": "nnx",
    "ppo_torch": "torch",
    "ppo_nnx --no-jit": "nnx",
}
MODES = list(FRAMEWORKS)
HOSTILE = ["a$\\undefined$b", "<script>alert(1)</script>", "W" * 300, "", "$x^{$", "\\"]
PARTS = {"startup": "startup", "rest": "later iterations"}


def looks(modes):
    frame = pd.DataFrame({"mode": modes, "framework": [FRAMEWORKS.get(x, x) for x in modes]})
    return figures.looks(frame)


def draw_bars(modes, sizes=("small",)):
    rows = [(x, y, 2.0, 4.4, 5.0, 7.0) for x in sizes for y in modes]
    frame = pd.DataFrame(rows, columns=["size", "mode", *PARTS, "low", "high"])
    return figures.bars(frame, looks(modes), PARTS, "s")


def forest_rows(modes, panels=("small",), rows=("A", "B", figures.ALL)):
    table = [
        (panel, row, mode, 1.0 + i, 0.9 + i, 1.2 + i)
        for panel in panels
        for row in rows
        for i, mode in enumerate(modes)
    ]
    return pd.DataFrame(table, columns=["panel", "row", "mode", "estimate", "low", "high"])


def draw_forest(modes, sizes=("small",)):
    return figures.forest(forest_rows(modes, sizes), looks(modes), "times as long as ppo_linen")


def draw_bands(modes, sizes=("small",)):
    table = [(x, y, 8192.0 * i, i, i - 1, i + 1) for x in sizes for y in modes for i in range(9)]
    frame = pd.DataFrame(table, columns=["panel", "mode", "x", "estimate", "low", "high"])
    return figures.bands(frame, looks(modes), "environment steps", "return")


DRAW = [draw_bars, draw_forest, draw_bands]


def texts(figure):
    return [x for x in figure.findobj(Text) if x.get_visible() and x.get_text().strip()]


@pytest.mark.parametrize("draw", DRAW)
def test_hostile_names_are_drawn_to_the_letter_and_matplotlib_is_left_as_it_was(draw):
    with matplotlib.rc_context({"font.size": 33, "text.parse_math": True}):
        before = dict(matplotlib.rcParams)
        figure = draw(HOSTILE, HOSTILE[:3])
        data = figures.png(figure)
        assert dict(matplotlib.rcParams) == before
    assert not plt.get_fignums()
    assert data.startswith(b"\x89PNG")
    assert b"Software" not in data
    assert data == figures.png(figure)
    shown = [x.get_text() for x in texts(figure)]
    for name in ("a$\\undefined$b", "<script>alert(1)</script>", "(no name)", "$x^{$"):
        assert any(x.startswith(name) for x in shown)
    long = [x for x in shown if "WWW" in x]
    assert all("…" in x and len(x) <= 70 for x in long)
    assert max(x.get_fontsize() for x in texts(figure)) < 20
    figure.draw_without_rendering()  # as a notebook would, outside of the style


@pytest.mark.parametrize("draw", DRAW)
def test_every_name_and_number_lies_within_the_figure(draw):
    figure = draw(MODES, ["NVIDIA GeForce RTX 4090 Laptop GPU", "AMD EPYC 9654 96-Core CPU", "x"])
    names = {axes.get_title("left") for axes in figure.axes}
    for text in texts(figure):
        box = Text.get_window_extent(text)
        if text in figure.texts or text.get_text() in names:
            assert box.x0 >= figure.bbox.x0
            assert box.x1 <= figure.bbox.x1


def test_looks_tell_modes_apart_and_stay_with_their_names():
    found = looks(MODES)
    assert len(set(found.values())) == len({x.marker for x in found.values()}) == len(MODES)
    assert looks(MODES[::-1]) == found
    assert list(looks(MODES[::-1])) == MODES[::-1]
    assert found["ppo_linen"].colour == "#0072b2"
    assert len({x.colour for x in looks(["ppo_torch", "mine", "yours"]).values()}) == 3


def test_bars_have_a_total_where_every_part_is_known():
    frame = pd.DataFrame({"size": "small", "mode": MODES[:2], "startup": 2.0})
    frame = frame.assign(rest=[4.42, np.nan], low=[6, np.nan], high=[7, np.nan])
    (axes,) = figures.bars(frame, looks(MODES), PARTS, "s").axes
    assert [x.get_text() for x in axes.texts] == ["6.4", ""]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first on top
    assert list(np.asarray(axes.lines[0].get_xdata())) == [6, 7]


@pytest.mark.parametrize("log", [True, False])
def test_a_forest_shows_every_estimate_and_where_its_interval_leaves(log):
    rows = forest_rows(["ppo_torch", "ppo_nnx"])
    rows.loc[0, ["low", "high"]] = 1e-9 if log else -1e9, 1e9
    rows.loc[1, ["low", "high"]] = np.nan
    rows.loc[2, "estimate"] = np.nan
    (axes,) = figures.forest(rows, looks(MODES), "x", log=log).axes
    low, high = axes.get_xlim()
    found = [x for x in axes.collections if isinstance(x, PathCollection)]
    places = np.concatenate([x.get_offsets() for x in found])[:, 0]
    assert len(places) == 5
    assert places.min() > low
    assert places.max() < high
    assert (
        sum(to_hex(face) == "#ffffff" for x in found for face in np.asarray(x.get_facecolor())) == 1
    )
    heads = [str(x.get_marker()) for x in axes.lines if x.get_marker() in ("<", ">")]
    assert sorted(heads) == ["<", ">"]
    assert [x.get_text() for x in axes.get_yticklabels()][-1] == figures.ALL

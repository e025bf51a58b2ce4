"""What can be said of the figures without looking at them: texts, places and numbers."""

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from analysis import figures

FRAMEWORKS = {"ppo_linen": "linen", "ppo_nnx": "nnx", "ppo_nnx --no-jit": "nnx"}
MODES = list(FRAMEWORKS)
HOSTILE = ["a$\\undefined$b", "<script>alert(1)</script>", "W" * 300, "", "$x^{$", "\\"]
PARTS = {"startup": "startup", "rest": "later iterations"}


def looks(modes):
    frame = pd.DataFrame({"mode": modes, "framework": [FRAMEWORKS.get(x, x) for x in modes]})
    return figures.looks(frame)


def draw_bars(modes, sizes):
    rows = [(x, y, 2.0, 4.4, 5.0, 7.0) for x in sizes for y in modes]
    frame = pd.DataFrame(rows, columns=["size", "mode", *PARTS, "low", "high"])
    return figures.bars(frame, looks(modes), PARTS, "seconds")


def draw_bands(modes, panels):
    table = [(x, y, 8192.0 * i, i, i - 1, i + 1) for x in panels for y in modes for i in range(9)]
    frame = pd.DataFrame(table, columns=["panel", "mode", "x", "estimate", "low", "high"])
    return figures.bands(frame, looks(modes), "environment steps", "return")


@pytest.mark.parametrize("draw", [draw_bars, draw_bands])
def test_hostile_names_are_drawn_to_the_letter_and_matplotlib_is_left_as_it_was(draw):
    with matplotlib.rc_context({"font.size": 33, "text.parse_math": True}):
        before = dict(matplotlib.rcParams)
        figure = draw(HOSTILE, HOSTILE[:3])
        data = figures.png(figure)
        assert dict(matplotlib.rcParams) == before
    assert not plt.get_fignums()
    assert data.startswith(b"\x89PNG")
    assert b"Software" not in data
    assert data == figures.png(draw(HOSTILE, HOSTILE[:3]))
    texts = [x for x in figure.findobj(Text) if x.get_visible() and x.get_text().strip()]
    shown = [x.get_text() for x in texts]
    for name in ("a$\\undefined$b", "<script>alert(1)</script>", "(no name)", "$x^{$"):
        assert any(x.startswith(name) for x in shown)
    assert all("…" in x and len(x) <= 45 for x in shown if "WWW" in x)
    assert max(x.get_fontsize() for x in texts) < 20
    [legend] = figure.legends
    assert legend.get_window_extent().width < figure.bbox.width


def test_looks_tell_modes_apart_and_stay_with_their_names():
    found = looks(MODES)
    assert len({str(x) for x in found.values()}) == len(MODES)
    assert found["ppo_nnx"]["color"] == found["ppo_nnx --no-jit"]["color"]
    assert looks(MODES[::-1]) == found
    assert list(looks(MODES[::-1])) == MODES[::-1]
    strangers = looks(["ppo_torch", "mine", "yours"])
    assert len({x["color"] for x in strangers.values()}) == 3


def test_bars_are_as_long_as_their_parts_and_have_a_total_where_every_part_is_known():
    frame = pd.DataFrame({"size": "small", "mode": MODES[:2], "startup": 2.0})
    frame = frame.assign(rest=[4.42, np.nan], low=[6, np.nan], high=[7, np.nan])
    (axes,) = figures.bars(frame, looks(MODES), PARTS, "seconds").axes
    assert [x.get_text() for x in axes.texts] == ["6.42", "-"]
    ends = [(x.get_x(), x.get_width()) for x in axes.patches if isinstance(x, Rectangle)]
    assert ends[0] == (0, 2)
    assert ends[2] == pytest.approx((2, 4.42))
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first on top
    assert list(np.asarray(axes.lines[0].get_xdata())) == [6, 7]

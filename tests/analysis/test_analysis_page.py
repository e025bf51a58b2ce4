"""Escaping of text on the report page and in figures; layout of figures."""

import base64
import random
import re
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pandas as pd
import pytest
from markdown_it import MarkdownIt
from matplotlib import text
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis import figures, page
from analysis.page import Bullets, Plot, Section, Table, Text

WORDS = [f"word{i}x" for i in range(13)]
# Special characters in Markdown and HTML, alone and in sequences with a meaning.
PIECES = [
    *"\\`*_~|$#>-+=.)([]!^:<&;@'\"/ x1a0{}%,?é",
    *("    ", "\t", "\n", "\r\n", "\u00a0", "1. "),
    *("[x] ", "12) ", "- ", "+ ", "* ", "# ", " #", "> ", "---", "***", "___", "===", "```"),
    *("~~~", "**", "&lt;", "&#60;", "<b>", "</b>", "<!-- ", " -->", "<script>", "![a](b)"),
    *("[a](b)", "[a][b]", "[a]: b", "| - |", "|---|", "<http://a>", "https://a.bc", '" onload="'),
]
PNG = b"\x89PNG"
GITHUB = MarkdownIt("commonmark").enable(["table", "strikethrough"])  # does not escape HTML


def sections_of(words):
    """Return the sections of a page on which every text is one of the words."""
    first, text, one, two, plot, caption, note, *rest = words
    cells = pd.DataFrame([rest[2:4], [rest[4], "-"]], dtype=object)
    cells.columns = pd.Index(rest[:2], dtype=object)
    blocks = [Text(text), Bullets([one, two]), Plot("plot", Figure(), plot)]
    return [Section(first, [*blocks, Table("table", caption, cells, cells, note)])]


def written(words, out):
    """Write a page with fixed bytes as figures. Return the text of report.md and report.html."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "png", lambda figure: PNG)
        page.write(words[-1], sections_of(words), out)
    return (out / "report.md").read_text(), (out / "report.html").read_text()


class Page(HTMLParser):
    """Parser that collects the elements, attributes and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.parts = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        kept = [f"{k}={v}" for k, v in attrs if k not in ("style", "class")]
        self.parts.append(f"<{tag} {' '.join(kept)}")

    def handle_data(self, data):
        self.parts += [data.strip()] if data.strip() else []

    def handle_comment(self, data):
        self.parts.append(f"<!--{data}")


def parts_of(words, out):
    """Return the parsed parts of report.md, rendered as on GitHub, and of report.html."""
    text, html = written(words, out)
    return Page(GITHUB.render(text)).parts, Page(html).parts


def swapped(part, names):
    """Replace each word in a part of a parsed page with its value in names."""
    part = re.sub(r"word\d+x", lambda x: names[x[0]], part)
    return part.replace("[", "(").replace("]", ")") if part.startswith("<img") else part


def test_markdown_and_html_show_any_text_unchanged(tmp_path):
    harmless = parts_of(WORDS, tmp_path)
    # The caption of the figure is also its alt text.
    assert sum("word" in x for x in harmless[0]) == len(WORDS) + 1
    for seed in range(200):
        pick = random.Random(seed)
        nasty = ["".join(pick.choices(PIECES, k=pick.randint(1, 6))) for _ in WORDS]
        nasty = [x if x.split() else "x" for x in nasty]
        names = {x: " ".join(y.split()) for x, y in zip(WORDS, nasty, strict=True)}
        for found, expected in zip(parts_of(nasty, tmp_path), harmless, strict=True):
            assert found == [swapped(part, names) for part in expected], nasty


def test_the_html_page_is_self_contained_and_runs_no_scripts(tmp_path):
    text, html = written(WORDS, tmp_path / "new" / "out")
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links == ["figures/plot.png", "tables/table.csv"]
    assert (tmp_path / "new" / "out" / links[0]).read_bytes() == PNG
    assert (tmp_path / "new" / "out" / links[1]).read_text().startswith("word7x,word8x\n")
    source = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert re.findall(r'<img src="([^"]*)"', html) == [source]
    assert not re.search(r"<(script|link|iframe|object|base)|https?:|url\(|@import", html)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert f'Content-Security-Policy" content="{policy}' in html


# === Figures ====================================================================================
HOSTILE = ["a$\\undefined$b", "<script>alert(1)</script>", "W" * 300, "", "$x^{$", "\\"]
PARTS = {"startup": "startup", "rest": "later iterations"}


def styles(modes):
    return figures.styles(pd.DataFrame({"mode": modes, "framework": modes}))


def draw_bars(modes, sizes):
    rows = [(x, y, 2.0, 4.4, 5.0, 7.0) for x in sizes for y in modes]
    frame = pd.DataFrame(rows, columns=["size", "mode", *PARTS, "low", "high"])
    return figures.bars(frame, styles(modes), PARTS, "seconds")


def draw_bands(modes, panels):
    table = [(x, y, 8192.0 * i, i, i - 1, i + 1) for x in panels for y in modes for i in range(9)]
    frame = pd.DataFrame(table, columns=["panel", "mode", "x", "estimate", "low", "high"])
    return figures.bands(frame, styles(modes), "environment steps", "return")


@pytest.mark.parametrize("draw", [draw_bars, draw_bands])
def test_special_characters_are_drawn_verbatim_and_rcparams_do_not_change(draw):
    with matplotlib.rc_context({"font.size": 33, "text.parse_math": True}):
        before = dict(matplotlib.rcParams)
        figure = draw(HOSTILE, HOSTILE[:3])
        data = figures.png(figure)
        assert dict(matplotlib.rcParams) == before
    assert data.startswith(b"\x89PNG")
    assert data == figures.png(draw(HOSTILE, HOSTILE[:3]))
    shown = [x.get_text() for x in figure.findobj(text.Text) if x.get_visible()]
    for name in ("a$\\undefined$b", "<script>alert(1)</script>", "(no name)", "$x^{$"):
        assert any(x.startswith(name) for x in shown)
    [legend] = figure.legends
    assert legend.get_window_extent().width < figure.bbox.width


def test_bars_stack_their_parts_and_show_a_total_if_all_parts_are_known():
    frame = pd.DataFrame({"size": "small", "mode": ["ppo_linen", "ppo_nnx"], "startup": 2.0})
    frame = frame.assign(rest=[4.42, np.nan], low=[6, np.nan], high=[7, np.nan])
    (axes,) = figures.bars(frame, styles(frame["mode"]), PARTS, "seconds").axes
    assert [x.get_text() for x in axes.texts] == ["6.42", "-"]
    ends = [(x.get_x(), x.get_width()) for x in axes.patches if isinstance(x, Rectangle)]
    assert ends[0] == (0, 2)
    assert ends[2] == pytest.approx((2, 4.42))
    assert list(np.asarray(axes.lines[0].get_xdata())) == [6, 7]


def test_intervals_far_beyond_the_bars_are_clipped_and_marked():
    frame = pd.DataFrame({"size": "small", "mode": ["ppo_linen", "ppo_nnx", "ppo_torch"]})
    frame = frame.assign(startup=2.0, rest=[4.0, 5.0, 8.0], low=[np.nan, 0.1, 9.5])
    figure = figures.bars(
        frame.assign(high=[np.nan, 5571.9, 10.5]), styles(frame["mode"]), PARTS, "s"
    )
    (axes,) = figure.axes
    assert axes.get_xlim()[1] < 2 * 10
    marks = [x for x in axes.lines if x.get_marker() == ">"]
    assert [list(np.asarray(x.get_xydata()).ravel()) for x in marks] == [[15, 1]]
    assert figure.legends[0].get_texts()[-1].get_text() == figures.BEYOND
    calm = figures.bars(frame.assign(high=[np.nan, 8.0, 10.5]), styles(frame["mode"]), PARTS, "s")
    assert figures.BEYOND not in [x.get_text() for x in calm.legends[0].get_texts()]


def test_bands_beyond_the_observed_range_are_clipped_and_marked_once_per_stretch():
    high = [10.0, 50, 90, 90, 90, 10, 10, 90, 10]
    rows = pd.DataFrame({"panel": "CartPole-v1", "mode": "ppo_linen", "x": np.arange(9.0)})
    rows = rows.assign(estimate=5.0, low=1.0, high=high)
    (axes,) = figures.bands(rows, styles(["ppo_linen"]), "steps", "return").axes
    assert axes.get_ylim()[1] > 90
    seen = rows.assign(least=0.0, most=np.linspace(0, 60, 9))
    figure = figures.bands(seen, styles(["ppo_linen"]), "steps", "return")
    (axes,) = figure.axes
    assert axes.get_ylim() == (-3, 63)
    [marks] = [x for x in axes.lines if x.get_marker() == "^"]
    assert list(np.asarray(marks.get_xdata())) == [3, 7]
    assert figure.legends[0].get_texts()[-1].get_text() == figures.BEYOND

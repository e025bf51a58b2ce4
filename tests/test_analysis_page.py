"""Whatever text there is stays text on the page; numbers are written as a reader wants them."""

import base64
import random
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from analysis import figures, page, words
from analysis.page import Bullets, Plot, Section, Table, Text
from analysis.schema import clean

WORDS = [f"word{i}x" for i in range(13)]
# A sample of all that Markdown and HTML give a meaning to, alone and where it would have one.
PIECES = [
    *"\\`*_~|$#>-+=.)([]!^:<&;@'\"/ x1a0{}%,?é",
    *("    ", "\t", "\n", "\r\n", "\x1b", "\0", "\u202e", "\u2028", "\u00a0", "\ud800", "1. "),
    *("[x] ", "12) ", "- ", "+ ", "* ", "# ", " #", "> ", "---", "***", "___", "===", "```"),
    *("~~~", "**", "&lt;", "&#60;", "<b>", "</b>", "<!-- ", " -->", "<script>", "![a](b)"),
    *("[a](b)", "[a][b]", "[a]: b", "| - |", "|---|", "<http://a>", "https://a.bc", '" onload="'),
]
PNG = b"\x89PNG"
GITHUB = MarkdownIt("commonmark").enable(["table", "strikethrough"])  # which lets HTML through


@pytest.fixture(autouse=True)
def images(monkeypatch):
    """Known bytes in place of drawings."""
    monkeypatch.setattr(figures, "png", lambda figure: PNG)


def sections_of(words):
    """A page with one of the words in every place that holds text."""
    first, text, one, two, plot, caption, note, *rest = words
    cells = pd.DataFrame([rest[2:4], [rest[4], "-"]], dtype=object)
    cells.columns = pd.Index(rest[:2], dtype=object)
    blocks = [Text(text), Bullets([one, two]), Plot("plot", Figure(), plot)]
    return [Section(first, [*blocks, Table("table", caption, cells, cells, note)])]


def written(words, out):
    page.write(words[-1], sections_of(words), out)
    return (out / "report.md").read_text(), (out / "report.html").read_text()


class Page(HTMLParser):
    """The elements, attributes and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.parts = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        own = [f"{k}={v}" for k, v in attrs if k not in ("style", "class")]
        self.parts.append(f"<{tag} {' '.join(own)}")

    def handle_data(self, data):
        self.parts += [data.strip()] if data.strip() else []

    def handle_comment(self, data):
        self.parts.append(f"<!--{data}")


def parts_of(words, out):
    """The elements and the text of a page as GitHub shows report.md, and of report.html."""
    text, html = written(words, out)
    return Page(GITHUB.render(text)).parts, Page(html).parts


def swapped(part, names):
    """Return a part of the harmless page with other words in place of its own."""
    part = re.sub(r"word\d+x", lambda x: names[x[0]], part)
    return part.replace("[", "(").replace("]", ")") if part.startswith("<img") else part


def test_any_text_comes_back_from_markdown_and_html_as_it_went_in(tmp_path):
    harmless = parts_of(WORDS, tmp_path)
    assert sum("word" in x for x in harmless[0]) == len(WORDS) + 1  # one as a picture's, too
    for seed in range(200):
        pick = random.Random(seed)
        nasty = ["".join(pick.choices(PIECES, k=pick.randint(1, 6))) for _ in WORDS]
        nasty = [x if clean(x).split() else "x" for x in nasty]
        names = {x: " ".join(clean(y).split()) for x, y in zip(WORDS, nasty, strict=True)}
        for found, own in zip(parts_of(nasty, tmp_path), harmless, strict=True):
            assert found == [swapped(part, names) for part in own], nasty


def test_plain_text_stays_readable_in_markdown():
    for text in (
        "ppo_linen and ppo_torch_compile --no-jit, 1.03 [0.89, 1.20], and -0.5",
        "a & b, 12:30:45, #3 of 5 (once)! x = 2 - 1; a/b; 3 + 4. e.g. this",
    ):
        assert page.escape(text) == text


def test_a_page_needs_no_other_file_and_runs_nothing(tmp_path):
    text, html = written(WORDS, tmp_path / "new" / "out")
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links == ["figures/plot.png", "tables/table.csv"]
    assert (tmp_path / "new" / "out" / links[0]).read_bytes() == PNG
    assert (tmp_path / "new" / "out" / links[1]).read_text().startswith("word7x,word8x\n")
    source = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert re.findall(r'<img src="([^"]*)"', html) == [source]
    assert not re.search(r"<(script|link|iframe|object|base)|https?:|url\(|@import", html)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'")


def test_numbers_align_on_the_right_and_text_on_the_left():
    columns = {"1.2 [0.9, 1.5]": "---:", "3.6x": "---:", "1,024": "---:", "<0.001": "---:"}
    columns |= {"small": "---", "2026-01-01": "---", "-": "---"}
    cells = pd.DataFrame([[*columns], ["-"] * len(columns)], columns=list("abcdefg"))
    rule = page.markdown_table(cells).splitlines()[1]
    assert rule == f"| {' | '.join(columns.values())} |"


def test_csv_keeps_numbers_and_holds_no_formulas():
    texts = ["=cmd|' /C calc'!A0", "@sum(1)", "\t=1", "a,b"]
    frame = pd.DataFrame({"=1+1": texts, "number": [0.1 + 0.2, -1.5, float("nan"), 3]})
    assert page.csv_text(frame) == (
        "'=1+1,number\n'=cmd|' /C calc'!A0,0.30000000000000004\n'@sum(1),-1.5\n"
        '\ufffd=1,\n"a,b",3.0\n'
    )


def test_a_terminal_and_a_notebook_get_what_the_page_has(monkeypatch):
    cells = pd.DataFrame({"script": ["ppo_linen", "\x1b[31m\u202ex\n"], "s": ["1.5", "10.25"]})
    assert page.brief(Table("table", "\x1b", cells, cells)) == (
        "\ufffd\n\n   script     s\nppo_linen   1.5\n \ufffd[31m\ufffdx\ufffd 10.25"
    )
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    [section] = sections_of(["<b>$x$", "<script>alert(1)</script>", *WORDS[2:]])
    page.show(section)
    heading, text, _, image, table = shown
    assert "<h2>&lt;b&gt;$x$</h2>" in heading["text/html"]
    assert "<script" not in text["text/html"]
    assert text["text/html"].startswith('<div class="tex2jax_ignore">')
    assert base64.b64decode(image["image/png"]) == PNG
    assert "<td" in table["text/html"]


# === Words ======================================================================================
@pytest.mark.parametrize(
    ("three", "text"),
    [
        ((1.0042, 1.001, 1.0101), "1.004 [1.001, 1.010]"),
        ((1.004, 1.0036, 1.0101), "1.004 [1.004, 1.010]"),
        ((0.2903, 0.2671, 0.3163), "0.290 [0.267, 0.316]"),
        ((2.0, 1.0, 3.0), "2.00 [1.00, 3.00]"),
        ((0.9996, 0.9, 1.1), "1.000 [0.900, 1.100]"),
        ((1.0, 0.9996, 1.02), "1.000 [1.000, 1.020]"),
        ((38.063, 37.9, 39.25), "38.1 [37.9, 39.2]"),
        ((1234.5, 800.2, 1500.7), "1,234 [800, 1,501]"),
        ((99.97, 95.0, 104.0), "100 [95, 104]"),
        ((50_000, 20_000, np.inf), "50,000 [20,000, no end]"),
        ((2.0, np.nan, np.nan), "2.00"),
        ((np.inf, 1.0, np.inf), "-"),
        ((0.0, -0.5, 0.5), "0.000 [-0.500, 0.500]"),
        ((-9.96, -20.0, -0.02), "-9.96 [-20.00, -0.02]"),
    ],
)
def test_an_interval_has_the_same_decimals_in_all_three(three, text):
    assert words.interval(*three) == text


def test_numbers_counts_and_lists_are_readable():
    values = (0, 0.5, 1.2345, 99.96, 1234.5, -200, np.nan, np.inf)
    shown = ["0", "0.500", "1.23", "100", "1,234", "-200", "-", "-"]
    assert [words.number(x) for x in values] == shown
    seconds = [words.duration(x) for x in (8.8, 119, 156, 14_760)]
    assert seconds == ["8.80 s", "119 s", "2.60 min", "4.10 h"]
    counts = [words.counted(x, "run") for x in ([1], [3, 1], [0], [np.nan])]
    assert counts == ["1 run", "1 to 3 runs", "0 runs", "an unknown number of runs"]
    assert words.join(["a", "b", "c"], "or") == "a, b or c"
    assert words.some([str(i) for i in range(12)], 10).endswith("8, 9 and 2 more")

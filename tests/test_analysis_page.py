"""Whatever text there is stays text: on the page, in CSV and in a terminal."""

import base64
import random
import re
from html.parser import HTMLParser

import pandas as pd
import pytest
from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from analysis import figures, page
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


def test_a_page_needs_no_other_file_and_runs_nothing(tmp_path):
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


def test_csv_keeps_numbers_and_holds_no_formulas():
    texts = ["=cmd|' /C calc'!A0", "@sum(1)", "\t=1", "a,b"]
    frame = pd.DataFrame({"=1+1": texts, "number": [0.1 + 0.2, -1.5, float("nan"), 3]})
    assert page.csv_text(frame) == (
        "'=1+1,number\n'=cmd|' /C calc'!A0,0.30000000000000004\n'@sum(1),-1.5\n"
        '\ufffd=1,\n"a,b",3.0\n'
    )


def test_a_terminal_gets_no_control_characters():
    cells = pd.DataFrame({"script": ["ppo_linen", "\x1b[31m\u202ex\n"], "s": ["1.5", "10.25"]})
    assert page.brief(Table("table", "\x1b", cells, cells)) == (
        "\ufffd\n\n   script     s\nppo_linen   1.5\n \ufffd[31m\ufffdx\ufffd 10.25"
    )

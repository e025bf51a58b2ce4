"""The report's pages: other people's text stays text in all of them, and each stands alone."""

import base64
import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from analysis import figures, render
from analysis.render import Bullets, Page, Plot, Section, Table, Text
from analysis.runs import SourceError

PNG, SVG = b"\x89PNG image", b"<svg><script>alert(1)</script></svg>"
WORDS = [f"word{i}x" for i in range(15)]
# A sample of all that Markdown and HTML give a meaning to, alone and where it would have one.
PIECES = [
    *"\\`*_~|$#>-+=.)([]!^:<&;@'\"/ x1a0{}%,?é",
    *("    ", "\t", "\n", "\r\n", "\x1b", "\0", "\u202e", "\u200b", "\u2028", "\u00a0", "\ud800"),
    *("[^1]", "[^1]: ", "[x] ", "1. ", "12) ", "- ", "+ ", "* ", "# ", " #", "> ", "---", "***"),
    *("___", "===", "```", "~~~", "~~", "**", "&lt;", "&#60;", "&#x3c;", "<b>", "</b>", "<!-- "),
    *(" -->", "</details>", "<script>", "</style>", "![a](b)", "[a](b)", "[a][b]", "[a]: b"),
    *("[0.9, 1.2]", "| - |", "|---|", "<http://a>", "<a@b.cd>", '" onload="', "{{ 1 }}", "{% x"),
]


@pytest.fixture(autouse=True)
def images(monkeypatch):
    """Known bytes in place of drawings."""
    monkeypatch.setattr(figures, "png", lambda figure: PNG, raising=False)
    monkeypatch.setattr(figures, "svg", lambda figure: SVG, raising=False)


def page_of(words):
    """A page with one of the words in every place that holds text."""
    title, first, text, lead, one, two, plot, table, *rest = words
    head, cells, (last, hidden) = rest[:2], rest[2:5], rest[5:]
    frame = pd.DataFrame([[cells[0], cells[1]], [cells[2], "-"]], dtype=object)
    frame.columns = pd.Index(head, dtype=object)
    blocks = [Text(text), Bullets(lead, [one, two]), Plot("plot", Figure(), plot)]
    sections = [Section(first, [*blocks, Table("table", table, frame, frame)])]
    return Page(title, [*sections, Section(last, [Text(hidden)], level=3, folded=True)])


def written(page, out):
    render.write(page, out)
    return (out / "report.md").read_text(), (out / "report.html").read_text()


def table(**columns):
    frame = pd.DataFrame(columns)
    return Table("table", "A caption", frame, frame)


def nasty_words(seed):
    generator = random.Random(seed)
    words = ["".join(generator.choices(PIECES, k=generator.randint(1, 6))) for _ in WORDS]
    return [word if render.clean(word) else "x" for word in words]


def swapped(outline, words):
    """Return an outline of the harmless page with other words in place of its own."""
    names = dict(zip(WORDS, map(render.clean, words), strict=True))
    return [re.sub(r"word\d+x", lambda x: names[x[0]], part) for part in outline]


# === Markdown ===================================================================================
def markdown_outline(text):
    """Return the elements and the text of a document; spans without attributes are but text."""
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    outline = [""]
    for block in parser.parse(text):
        for token in block.children or [block]:
            if token.content in ("<span>", "</span>"):
                continue
            if token.type == "text" and outline[-1].startswith("text:"):
                outline[-1] += token.content
                continue
            attributes = {k: v for k, v in token.attrs.items() if k != "style"}
            content = token.content if token.type != "inline" else ""
            outline.append(f"{token.type}:{content}{attributes or ''}")
    return [x for x in outline if x not in ("", "inline:")]


def render_markdown(page):
    return render.MARKDOWN.get_template("report.md").render(page=page)


def test_any_text_comes_back_from_markdown_as_it_went_in():
    harmless = markdown_outline(render_markdown(page_of(WORDS)))
    assert sum("word" in x for x in harmless) == len(WORDS)
    for seed in range(400):
        words = nasty_words(seed)
        text = render_markdown(page_of(words))
        assert markdown_outline(text) == swapped(harmless, words), text


@pytest.mark.parametrize(
    "text",
    [
        "ppo_linen and ppo_torch_compile",
        "ppo_nnx --no-jit",
        "1.03 [0.89, 1.20], and -0.5",
        "a & b, 12:30:45, #3 of 5 (once)!",
        "x = 2 - 1; a/b; 3 + 4. e.g. this",
    ],
)
def test_plain_text_stays_readable_in_markdown(text):
    assert render.markdown_value(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("@someone", "<span>@</span>someone"),
        ("a@b.cd", "a<span>@</span>b.cd"),
        ("see www.a.bc", "see www<span>.</span>a.bc"),
        ("see WWW.a.bc", "see WWW<span>.</span>a.bc"),
        ("https://a.bc", "https<span>://</span>a.bc"),
        (":tada: :100:", "<span>:</span>tada: <span>:</span>100:"),
        (r"a$\undefined$b", r"a<span>\$</span>\\undefined<span>\$</span>b"),
        ("a [^1] b", r"a \[^1\] b"),
        ("![a] [b][c] ^[d]", r"!\[a\] \[b\]\[c\] ^\[d\]"),
        ("[x] done", r"\[x\] done"),
        (": b", r"\: b"),
        ("_a_ __b__ c_", r"\_a\_ \_\_b\_\_ c\_"),
    ],
)
def test_what_sites_read_in_text_is_split_or_escaped(text, expected):
    """Sites look for these in the text that Markdown leaves, where a backslash does nothing."""
    assert render.markdown_value(text) == expected


def test_markdown_links_to_files_that_are_there(tmp_path):
    text, _ = written(page_of(WORDS), tmp_path / "new" / "out")
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links == ["figures/plot.png", "figures/plot.svg", "tables/table.csv"]
    assert (tmp_path / "new" / "out" / links[0]).read_bytes() == PNG
    assert (tmp_path / "new" / "out" / links[1]).read_bytes() == SVG
    assert (tmp_path / "new" / "out" / links[2]).read_text().startswith("word8x,word9x\n")


def test_what_has_no_title_or_caption_shows_none():
    blocks = [Bullets("\n", ["one"]), table(x=["1"])._replace(caption=" ")]
    page = Page("Title", [Section("One", blocks)])
    assert render_markdown(page).startswith(
        "# Title\n\n## One\n\n- one\n\n([CSV](tables/table.csv))\n\n| x |\n"
    )
    html = render_html(page)
    assert '<p class="lead">' not in html and "<figcaption>" not in html


def test_markdown_is_laid_out_as_people_write_it(tmp_path):
    block = table(script=["ppo_linen", "ppo_torch"], seconds=["1.5 [1.2, 1.9]", "-"])
    page = Page("Title", [Section("One", [Text("Some text."), block], folded=True)])
    assert written(page, tmp_path)[0] == (
        "# Title\n\n## One\n\n<details>\n<summary>Show</summary>\n\nSome text.\n\n"
        "**A caption** ([CSV](tables/table.csv))\n\n"
        "| script | seconds |\n| --- | ---: |\n"
        "| ppo_linen | 1.5 [1.2, 1.9] |\n| ppo_torch | - |\n\n</details>\n"
    )


# === HTML =======================================================================================
class Outline(HTMLParser):
    """The elements, attributes and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.parts, self.tags = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        values = {k: v for k, v in attrs if k not in ("style", "class")}
        self.tags.append((tag, values))
        self.parts.append("<" + " ".join([tag, *(f"{k}={v}" for k, v in values.items())]))

    def handle_endtag(self, tag):
        self.parts.append(f"</{tag}>")

    def handle_data(self, data):
        if data.strip():
            self.parts.append(data)

    def handle_comment(self, data):
        self.parts.append(f"<!--{data}")


def render_html(page):
    template = render.HTML.get_template("report.html")
    return template.render(page=page, images={"plot": base64.b64encode(SVG).decode()})


def test_any_text_comes_back_from_html_as_it_went_in():
    harmless = Outline(render_html(page_of(WORDS))).parts
    assert sum("word" in x for x in harmless) == len(WORDS) + 3  # title, alt and a label too
    for seed in range(200):
        words = nasty_words(seed)
        got = Outline(render_html(page_of(words))).parts
        assert got == swapped(harmless, words)


def test_the_page_needs_no_other_file_and_runs_nothing(tmp_path):
    sections = [Section("<script>alert(1)</script>", [Text("x")]) for _ in range(5)]
    page = page_of(['x" onerror="alert(1)'] * len(WORDS))
    _, html = written(page._replace(sections=[*page.sections, *sections]), tmp_path)
    tags = Outline(html).tags
    assert not {"script", "link", "iframe", "object", "svg", "base"} & {tag for tag, _ in tags}
    assert not [v for _, values in tags for v in values if v.startswith("on")]
    image = next(values for tag, values in tags if tag == "img")
    assert image["alt"] == 'x" onerror="alert(1)'
    start, data = image["src"].split(",")
    assert start == "data:image/svg+xml;base64" and base64.b64decode(data) == SVG
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None and policy.start() < html.index("<style>")
    assert policy[1].startswith(
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'"
    )
    assert not re.search(r"https?:|url\(|@import", html)


def test_long_pages_have_contents_that_lead_to_their_sections(tmp_path):
    sections = [Section(f"T{i}", [Text("x")], level=3 if i == 1 else 2) for i in range(6)]
    tags = Outline(written(Page("x", sections), tmp_path)[1]).tags
    targets = [values["href"] for tag, values in tags if tag == "a"]
    assert targets == ["#s1", "#s3", "#s4", "#s5", "#s6"]
    ids = [values["id"] for _, values in tags if "id" in values]
    assert ids == [f"s{i}" for i in range(1, 7)]
    assert "<nav" not in written(Page("x", sections[:3]), tmp_path)[1]


def test_appendices_are_folded(tmp_path):
    page = Page("x", [Section("Open", []), Section("Shut", [Text("hidden")], folded=True)])
    parts = Outline(written(page, tmp_path)[1]).parts
    start, end = parts.index("<details"), parts.index("</details>")
    assert "Open" in parts[:start] and {"Shut", "hidden"} <= set(parts[start:end])


def test_numbers_align_on_the_right_and_text_on_the_left():
    cells = pd.DataFrame(
        {
            "size": ["small", "128x128"],
            "ratio": ["1.2 [0.9, 1.5]", "-"],
            "slower": ["3.6x", "\N{EN DASH}"],
            "count": ["1,024", "-3"],
            "p": ["<0.001", "5%"],
            "date": ["2026-01-01", "2026-01-02"],
            "nothing": ["-", "-"],
            "some": ["1", "undecided"],
        }
    )
    assert render.numeric(cells) == [False, True, True, True, True, False, False, False]
    block = Table("table", "", cells, cells)
    html = render.HTML.get_template("block.html").render(block=block)
    assert '<td style="text-align: left">small' in html and "<td>1,024" in html


def test_rows_that_share_their_first_cell_are_set_apart():
    def starts(*first):
        return render.grouped(pd.DataFrame({"first": first}))

    assert starts("a", "a", "b", "c") == [False, False, True, True]
    assert starts("a", "b", "c") == [False, False, False]
    assert starts("a", "a") == [False, False]
    block = table(first=["a", "a", "b"])
    html = render.HTML.get_template("block.html").render(block=block)
    assert html.count('<tr class="group">') == 1


def test_templates_trust_no_value():
    folder = Path(render.__file__).parent / "templates"
    texts = [path.read_text() for path in folder.iterdir()]
    assert texts and not [x for x in texts if re.search(r"\bsafe\b|autoescape|<script", x)]


# === Files ======================================================================================
def test_csv_keeps_numbers_and_holds_no_formulas():
    frame = pd.DataFrame(
        {
            "=1+1": ["=cmd|' /C calc'!A0", "@sum(1)", "+1 2", "\t=1", "a,\nb"],
            "text": ["-x", "-0.5", "+1e5", "", "\x1b[31m"],
            "number": [0.1 + 0.2, -1.5, 1e-300, float("nan"), 3],
            "flag": [True, False, True, True, False],
        }
    )
    assert render.csv_text(frame) == (
        "'=1+1,text,number,flag\n"
        "'=cmd|' /C calc'!A0,'-x,0.30000000000000004,True\n"
        "'@sum(1),-0.5,-1.5,False\n"
        "'+1 2,+1e5,1e-300,True\n"
        "'=1,,,True\n"
        '"a, b",[31m,3.0,False\n'
    )


@pytest.mark.parametrize("name", ["", "../x", "A", "a b", "a.b", "x\n"])
def test_file_names_are_ours(name, tmp_path):
    blocks = [Plot(name, Figure(), ""), table(x=[1])._replace(name=name)]
    for block in blocks:
        with pytest.raises(ValueError, match="a-z"):
            render.write(Page("x", [Section("x", [block])]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_tables_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="called table"):
        render.write(Page("x", [Section("x", [table(x=[1]), table(x=[2])])]), tmp_path)


@pytest.mark.parametrize("place", ["out", "out/figures", "out/tables"])
def test_a_folder_that_cannot_be_written_to_is_named(place, tmp_path):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("a file")
    out = tmp_path / "out"
    with pytest.raises(SourceError, match=f"^--out must be a folder to write to, not {out}$"):
        render.write(page_of(WORDS), out)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    render.write_whole(path, b"old")

    def half(self, data):
        with open(self, "wb") as file:
            file.write(data[:1])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="disk full"):
        render.write_whole(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["report.md"]


# === Terminal and notebook ======================================================================
def test_a_terminal_gets_aligned_columns_without_control_characters():
    block = table(script=["ppo_linen", "\x1b[31m\u202ex\n"], seconds=["1.5", "10.25"])
    assert render.plain(block) == ("script     seconds\nppo_linen      1.5\n[31m x       10.25")


def test_a_notebook_shows_what_the_page_does(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append((data, raw)))
    page = page_of(["<script>alert(1)</script>", *WORDS[1:]])
    section = page.sections[0]._replace(title="<b>$x$")
    render.show(section)
    assert all(raw for _, raw in shown)
    heading, text, bullets, image, caption, block = (data for data, _ in shown)
    assert base64.b64decode(image["image/png"]) == PNG and "text/html" not in image
    assert "<h2>&lt;b&gt;$x$</h2>" in heading["text/html"]
    assert heading["text/plain"] == "<b>$x$"
    assert text["text/plain"] == "word2x" and caption["text/plain"] == "word6x"
    assert bullets["text/plain"] == "word3x\n- word4x\n- word5x"
    assert block["text/plain"].startswith("word7x\n\nword8x   word9x\n")
    html = written(page, tmp_path)[1]
    for data in (text, bullets, block):
        start, *lines, end = data["text/html"].splitlines()
        assert start == '<div class="tex2jax_ignore mathjax_ignore">' and end == "</div>"
        assert "\n".join(lines).strip() in html
    shown.clear()
    render.show(section._replace(title="", blocks=[Text("x")]))
    assert len(shown) == 1

"""Write a page of text, figures and tables as Markdown, HTML, images and CSV, or show it.

Names of environments, machines and the like are other people's text, so any of it may look like
markup. The templates escape every value that they insert; nothing is escaped anywhere else.
"""

import base64
import io
import os
import re
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from analysis import figures
from analysis.figures import clean
from analysis.runs import SourceError

# A number, and what may follow it: an interval, a unit.
NUMBER = re.compile(r"[-+\N{MINUS SIGN}<>~]?\d[\d,.]*(e[-+]?\d+)?[%x]?(\s.*)?", re.IGNORECASE)
NOTHING = ("", "-", "\N{EN DASH}")  # cells that hold no value
# What GitHub-flavoured Markdown would read as more than text, in text without line breaks.
SPECIAL = re.compile(
    r"""
    (?<![]!^])\[ (?!\^|[ xX]\]) (?P<inside>[^][]+) \](?![](\[:])  # brackets that link nowhere
    | (?P<entity> [<>] | &(?=[#\w]) )
    # What sites look for in the text that is left, so that no escape helps: mathematics,
    # mentions, addresses and emoji (of two digits are none, but in times of day).
    | (?P<site> \$ | @ | (?i:(?<=www)\.) | :?// | :(?!\d\d?:)(?=[\w+-]+:) )
    | (?P<mark>
        [\\`*|~[\]]
        | (?<!\w)_+ | (?<!_)_++(?![^\W_])   # but not within a word
        | ^\# | (?<=\ )\#(?=\#*$)           # a heading, and its end
        | ^[-+:](?=[\s-]|$)                 # a list or a rule
      )
    | ^(?P<number>\d{1,9}) (?P<stop>[.)]) (?=\s|$)
    """,
    re.VERBOSE,
)


# === Structures =================================================================================
class Text(NamedTuple):
    text: str  # a paragraph of plain text


class Bullets(NamedTuple):
    title: str
    items: list[str]  # plain text


class Plot(NamedTuple):
    name: str  # of the file, without suffix: ours, never data
    figure: Figure
    caption: str


class Table(NamedTuple):
    name: str  # of the file, without suffix: ours, never data
    caption: str
    frame: pd.DataFrame  # raw numbers, for the CSV file
    cells: pd.DataFrame  # text, for reading
    note: str = ""  # shown below it


Block = Text | Bullets | Plot | Table


class Section(NamedTuple):
    title: str
    blocks: list[Block]
    level: int = 2
    folded: bool = False  # shown when a reader asks for it


class Page(NamedTuple):
    title: str
    sections: list[Section]


# === Text that is data ==========================================================================
def markdown_value(value: object) -> str:
    """Return text that GitHub-flavoured Markdown shows as it is, wherever a template puts it."""
    return SPECIAL.sub(escape_match, clean(value))


def escape_match(match: re.Match[str]) -> str:
    if match["inside"]:
        return f"[{SPECIAL.sub(escape_match, match['inside'])}]"
    if match["entity"]:
        return {"<": "&lt;", ">": "&gt;", "&": "&amp;"}[match["entity"]]
    if match["site"]:  # on its own in an element, it is not next to what it would act on
        return "<span>" + match["site"].replace("$", r"\$") + "</span>"
    if match["number"]:
        return match["number"] + "\\" + match["stop"]
    return "".join("\\" + x for x in match["mark"])


def csv_value(value: object) -> object:
    """Return text that no spreadsheet takes for a formula, and anything else as it is."""
    if not isinstance(value, str):
        return value
    text = clean(value)
    with suppress(ValueError):
        float(text)
        return text
    return f"'{text}" if text.startswith(tuple("=+-@")) else text


# === Tables as text =============================================================================
def numeric(cells: pd.DataFrame) -> list[bool]:
    """Return for each column whether its cells are numbers, which are aligned on the right."""
    columns = [[clean(x) for x in column] for _, column in cells.items()]
    filled = [[x for x in column if x not in NOTHING] for column in columns]
    return [bool(column) and all(map(NUMBER.fullmatch, column)) for column in filled]


def grouped(cells: pd.DataFrame) -> list[bool]:
    """Return for each row whether it starts a group: rows whose first cells are the same."""
    first = [clean(x) for x in cells.iloc[:, 0]]
    starts = [one != other for one, other in pairwise(first)]
    return [False, *(start and not all(starts) for start in starts)]


def plain(table: Table) -> str:
    """Return a table for a terminal, its columns aligned."""
    columns = []
    for right, (name, column) in zip(numeric(table.cells), table.cells.items(), strict=True):
        texts = [clean(name), *map(clean, column)]
        width = max(map(len, texts))
        columns.append([x.rjust(width) if right else x.ljust(width) for x in texts])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def markdown_table(cells: pd.DataFrame) -> str:
    """Return a table alone in Markdown."""
    return MARKDOWN.get_template("table.md").render(cells=cells).rstrip("\n")


def forgive_terminals() -> None:
    """Let a terminal that cannot show a character show a question mark, rather than fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def csv_text(frame: pd.DataFrame) -> str:
    safe = frame.map(csv_value).rename(columns=csv_value)
    return safe.to_csv(index=False, lineterminator="\n")


# === Templates ==================================================================================
def environment(**settings: Any) -> Environment:
    """Return Jinja as both templates need it: blocks are told apart by their type."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **settings,
    )
    for kind in (Text, Bullets, Plot, Table, Section):
        made.tests[kind.__name__.lower()] = lambda x, kind=kind: isinstance(x, kind)
    made.filters |= {"clean": clean, "grouped": grouped, "numeric": numeric}
    return made


HTML = environment(autoescape=True, finalize=clean)
MARKDOWN = environment(finalize=markdown_value)  # its values are escaped by finalize, for Markdown


# === Output =====================================================================================
def write(page: Page, out: Path) -> None:
    """Write page as report.md and report.html, and its figures and tables, into the folder out."""
    blocks = [block for section in page.sections for block in section.blocks]
    plots = [block for block in blocks if isinstance(block, Plot)]
    tables = [block for block in blocks if isinstance(block, Table)]
    for kind in (plots, tables):
        check_names([block.name for block in kind])
    make_folders(out)
    images = {}
    for plot in plots:
        vector = figures.svg(plot.figure)
        images[plot.name] = base64.b64encode(vector).decode()
        write_whole(out / "figures" / f"{plot.name}.svg", vector)
        write_whole(out / "figures" / f"{plot.name}.png", figures.png(plot.figure))
    for table in tables:
        write_whole(out / "tables" / f"{table.name}.csv", csv_text(table.frame).encode())
    text = MARKDOWN.get_template("report.md").render(page=page)
    write_whole(out / "report.md", text.encode())
    html = HTML.get_template("report.html").render(page=page, images=images)
    write_whole(out / "report.html", html.encode())


def check_names(names: list[str]) -> None:
    for name in names:
        if not re.fullmatch("[a-z0-9_]+", name):
            raise ValueError(f"a file's name is of a-z, 0-9 and _, not {name!r}")
        if names.count(name) > 1:
            raise ValueError(f"several figures or tables are called {name}")


def make_folders(out: Path) -> None:
    folders = [out, out / "figures", out / "tables"]
    with suppress(OSError):
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
    if not all(folder.is_dir() and os.access(folder, os.W_OK) for folder in folders):
        raise SourceError(f"--out must be a folder to write to, not {out}")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file such that a stop on the way leaves the one that was there."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def show(section: Section) -> None:
    """Show a section in a notebook as the page does, and where only text is shown, as text."""
    from IPython.display import display  # takes half a second, and only a notebook needs it

    template = HTML.get_template("output.html")
    for block in [section, *section.blocks] if section.title else section.blocks:
        if isinstance(block, Plot):
            image = base64.b64encode(figures.png(block.figure)).decode()
            display({"image/png": image, "text/plain": f"Figure: {block.name}"}, raw=True)
            block = Text(block.caption)
        display({"text/html": template.render(block=block), "text/plain": brief(block)}, raw=True)


def brief(block: Section | Text | Bullets | Table) -> str:
    """Return a block, or the title of a section, as plain text."""
    if isinstance(block, Table):
        return f"{clean(block.caption)}\n\n{plain(block)}"
    if isinstance(block, Bullets):
        return "\n".join([clean(block.title), *(f"- {clean(x)}" for x in block.items)])
    return clean(block.text if isinstance(block, Text) else block.title)

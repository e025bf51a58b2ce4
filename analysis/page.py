"""Write a page of text, figures and tables as Markdown, HTML and CSV, or show it in a notebook.

Names of environments, machines and the like are other people's text, so any of it may look like
markup. escape() is the one place that keeps it text: all else is written as Markdown, and HTML is
made from that by markdown-it, which lets no HTML through.
"""

import base64
import os
import re
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import pandas as pd
from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from analysis import figures
from analysis.schema import SourceError, clean

# A number, and what may follow it: an interval, a unit.
NUMBER = re.compile(r"[-+<>~]?\d[\d,.]*(e[-+]?\d+)?[%x]?(\s.*)?", re.IGNORECASE)
SPECIAL = re.compile(
    r"([\\`*<>|~]"  # what Markdown reads anywhere,
    r"|(?<![^\W_])_|_(?![^\W_])"  # not within a word,
    r"|\](?=[\[(:])|&(?=[#\w])|(?<=:)/(?=/)"  # as a link or an entity,
    r"|^[#+=-]|(?<=\s)#(?=#*$))"  # as a heading or a list
)
NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")  # a list, too
HTML = MarkdownIt("commonmark", {"html": False}).enable("table")


class Text(NamedTuple):
    text: str  # a paragraph of plain text


class Bullets(NamedTuple):
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


# === Markdown ===================================================================================
def escape(value: object) -> str:
    """Return text that Markdown shows as it is, in one line."""
    text = SPECIAL.sub(r"\\\1", " ".join(clean(value).split()))
    return NUMBERED.sub(r"\1\\\2", text)


def is_numeric(column: pd.Series) -> bool:
    filled = [x for x in map(clean, column) if x not in ("", "-")]
    return bool(filled) and all(NUMBER.fullmatch(x) for x in filled)


def markdown_table(cells: pd.DataFrame) -> str:
    """Return a table in Markdown, numbers on the right."""
    rules = ["---:" if is_numeric(cells[name]) else "---" for name in cells]
    rows = [map(escape, cells.columns), rules]
    for row in cells.itertuples(index=False, name=None):
        rows.append([x if x == "-" else escape(x) for x in row])  # nothing, and no list
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def markdown(block: Section | Block) -> str:
    """Return a block, or the title of a section, in Markdown."""
    match block:
        case Section():
            return f"{'#' * block.level} {escape(block.title)}"
        case Text():
            return escape(block.text)
        case Bullets():
            return "\n".join(f"- {escape(x)}" for x in block.items)
        case Plot():
            text = block.caption.replace("[", "(").replace("]", ")")  # or they might not pair
            return f"![{escape(text)}](figures/{block.name}.png)\n\n{escape(block.caption)}"
    parts = [f"**{escape(block.caption)}** ([CSV](tables/{block.name}.csv))"]
    parts += [markdown_table(block.cells), escape(block.note)]
    return "\n\n".join(filter(None, parts))


def plain(table: Table) -> str:
    """Return a table for a terminal, its columns aligned."""
    columns = []
    for name in table.cells:
        texts = [clean(name), *map(clean, table.cells[name])]
        width = max(map(len, texts))
        right = is_numeric(table.cells[name])
        columns.append([x.rjust(width) if right else x.ljust(width) for x in texts])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def csv_text(frame: pd.DataFrame) -> str:
    """Return a table as CSV, in which no text is a formula to a spreadsheet."""

    def safe(value: object) -> object:
        if not isinstance(value, str):
            return value
        with suppress(ValueError):
            float(value)
            return value
        return f"'{clean(value)}" if value.startswith(tuple("=+-@")) else clean(value)

    return frame.map(safe).rename(columns=safe).to_csv(index=False, lineterminator="\n")


# === Output =====================================================================================
def forgive_terminals() -> None:
    """Let a terminal that cannot show a character show a question mark, rather than fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def write(title: str, sections: list[Section], out: Path) -> None:
    """Write a page as report.md and report.html, and its figures and tables, into a folder."""
    blocks = [block for section in sections for block in section.blocks]
    make_folders(out)
    images = {}
    for block in blocks:
        if isinstance(block, Plot):
            images[f"figures/{block.name}.png"] = figures.png(block.figure)
        if isinstance(block, Table):
            text = csv_text(block.frame).encode()
            write_whole(out / "tables" / f"{block.name}.csv", text)
    for name, data in images.items():
        write_whole(out / name, data)
    parts = [markdown(x) for section in sections for x in (section, *section.blocks)]
    text = "\n\n".join([f"# {escape(title)}", *parts]) + "\n"
    write_whole(out / "report.md", text.encode())
    template = Template((Path(__file__).parent / "templates/report.html").read_text())
    body = html(text, images)
    page = template.substitute(title=HTML.renderInline(escape(title)), body=body)
    write_whole(out / "report.html", page.encode())


def html(text: str, images: dict[str, bytes]) -> str:
    """Return Markdown of this module as HTML, with the images in it."""
    tokens = HTML.parse(text)
    for token in [child for x in tokens for child in x.children or []]:
        source = str(token.attrs.get("src", ""))
        if source in images:
            data = base64.b64encode(images[source]).decode()
            token.attrs["src"] = f"data:image/png;base64,{data}"
    return HTML.renderer.render(tokens, HTML.options, {})


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

    for block in [section, *section.blocks] if section.title else section.blocks:
        shown: dict[str, Any] = {"text/plain": brief(block)}
        if isinstance(block, Plot):
            shown["image/png"] = base64.b64encode(figures.png(block.figure)).decode()
        else:
            shown["text/html"] = f'<div class="tex2jax_ignore">{html(markdown(block), {})}</div>'
        display(shown, raw=True)


def brief(block: Section | Block) -> str:
    """Return a block, or the title of a section, as plain text."""
    match block:
        case Table():
            return f"{clean(block.caption)}\n\n{plain(block)}"
        case Bullets():
            return "\n".join(f"- {clean(x)}" for x in block.items)
        case Plot():
            return clean(block.caption)
        case Section():
            return clean(block.title)
    return clean(block.text)

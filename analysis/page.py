"""Write a page of text, figures and tables as Markdown, HTML and CSV, or show it in a notebook.

The names of environments, machines and scripts may come from another person's runs, and may
contain markup. Jinja escapes it in HTML, and escape() in Markdown.
"""

import base64
import re
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from analysis import figures

# A number, optionally followed by an interval or a unit.
NUMBER = re.compile(r"[-+<>~]?\d[\d,.]*(e[-+]?\d+)?[%x×]?(\s.*)?", re.IGNORECASE)
SPECIAL = re.compile(
    r"([\\`*<>|~]"  # special everywhere in Markdown,
    r"|(?<![^\W_])_|_(?![^\W_])"  # special except within a word,
    r"|\](?=[\[(:])|&(?=[#\w])|(?<=:)/(?=/)"  # special in a link or an entity,
    r"|^[#+=-]|(?<=\s)#(?=#*$))"  # special in a heading or a list
)
NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")  # the start of a numbered list


class Text(NamedTuple):
    text: str  # a paragraph of plain text


class Bullets(NamedTuple):
    items: list[str]  # plain text


class Plot(NamedTuple):
    name: str  # file name without suffix; never untrusted text
    figure: Figure
    caption: str


class Table(NamedTuple):
    name: str  # file name without suffix; never untrusted text
    caption: str
    frame: pd.DataFrame  # raw numbers, for the CSV file
    cells: pd.DataFrame  # formatted text
    note: str = ""  # shown below the table


Block = Text | Bullets | Plot | Table


class Section(NamedTuple):
    title: str
    blocks: list[Block]
    level: int = 2


# === Text =======================================================================================
def one_line(value: object) -> str:
    return " ".join(str(value).split())


def alternative(plot: Plot) -> str:
    """Return the alt text of a figure; unbalanced square brackets would break the link."""
    return plot.caption.replace("[", "(").replace("]", ")")


def escape(value: object) -> str:
    """Escape text for Markdown, on one line."""
    text = SPECIAL.sub(r"\\\1", one_line(value))
    return NUMBERED.sub(r"\1\\\2", text)


def numeric_columns(cells: pd.DataFrame) -> list[bool]:
    """Return for each column whether it contains only numbers, which are right-aligned."""
    filled = [[x for x in column if x not in ("", "-")] for _, column in cells.items()]
    return [bool(column) and all(map(NUMBER.fullmatch, column)) for column in filled]


def markdown_table(cells: pd.DataFrame) -> str:
    """Return a table in Markdown, with numbers right-aligned."""
    rules = ["---:" if x else "---" for x in numeric_columns(cells)]
    rows = [map(escape, cells.columns), rules]
    for row in cells.itertuples(index=False, name=None):
        rows.append([x if x == "-" else escape(x) for x in row])  # leave "-" (empty cell) unescaped
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
            text = escape(alternative(block))
            return f"![{text}](figures/{block.name}.png)\n\n{escape(block.caption)}"
    caption = f"**{escape(block.caption)}** ([CSV](tables/{block.name}.csv))"
    return "\n\n".join([caption, markdown_table(block.cells), escape(block.note)]).rstrip()


def brief(block: Text | Table) -> str:
    """Return a block for a terminal."""
    if isinstance(block, Text):
        return block.text
    return f"{block.caption}\n\n{block.cells.to_string(index=False)}"


# === HTML =======================================================================================
def templates(folder: Path) -> Environment:
    """Return a Jinja environment for a template folder; it escapes everything except Markup."""
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


TEMPLATES = templates(Path(__file__).parent / "templates")
TEMPLATES.filters |= {"one_line": one_line, "alternative": alternative}


# === Output =====================================================================================
def write(title: str, sections: list[Section], out: Path) -> None:
    """Write a page as report.md and report.html, with its figures and tables, to a folder."""
    for folder in (out / "figures", out / "tables"):
        folder.mkdir(parents=True, exist_ok=True)
    parts = [f"# {escape(title)}"]
    body = []
    images = {}
    for section in sections:
        for block in (section, *section.blocks):
            parts.append(markdown(block))
            image = figures.png(block.figure) if isinstance(block, Plot) else b""
            body.append(html(block, image))
            if isinstance(block, Plot):
                images[f"figures/{block.name}.png"] = image
            if isinstance(block, Table):
                block.frame.to_csv(out / f"tables/{block.name}.csv", index=False)
    for name, image in images.items():
        (out / name).write_bytes(image)
    text = "\n\n".join(parts) + "\n"
    (out / "report.md").write_bytes(text.encode())
    content = TEMPLATES.get_template("report.html").render(title=title, body=Markup("".join(body)))
    (out / "report.html").write_bytes(content.encode())


def html(block: Section | Block, image: bytes = b"") -> str:
    """Return a block, or the title of a section, as HTML; image is the PNG data of a Plot."""
    template = TEMPLATES.get_template("block.html")
    kind = type(block).__name__
    numeric = numeric_columns(block.cells) if isinstance(block, Table) else []
    return template.render(kind=kind, block=block, numeric=numeric, image=base64_of(image))


def base64_of(image: bytes) -> str:
    return base64.b64encode(image).decode()


def show(section: Section) -> None:
    """Show a section in a notebook, as HTML and as Markdown."""
    from IPython.display import display  # slow to import, and only notebooks need it

    for block in [section, *section.blocks] if section.title else section.blocks:
        shown: dict[str, Any] = {"text/plain": markdown(block)}
        if isinstance(block, Plot):
            shown["image/png"] = base64_of(figures.png(block.figure))
        else:
            shown["text/html"] = f'<div class="tex2jax_ignore">{html(block)}</div>'
        display(shown, raw=True)

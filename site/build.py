"""Build the page that shows the scripts side by side, their idioms, and which one is done first.

    python site/build.py    # writes report/site.html, one file, which makes no network requests

It is page.html with page.css, page.js, the scripts that scripts.toml names, docs/notes.toml,
idioms.toml and the studies in it. A line that scripts share is held once. The page itself compares
scripts and counts seconds.
"""

import argparse
import ast
import base64
import hashlib
import html
import json
import os
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, NamedTuple
from urllib.parse import quote

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.append(str(ROOT))

try:
    import pandas as pd
    from pygments.lexers.python import PythonLexer
    from pygments.token import Token, _TokenType
    from scipy.stats import t as student

    from analysis import measures, page, runs, stats
except ModuleNotFoundError as error:
    print(f"site: {error}: ./setup.sh && source .venv/bin/activate installs it", file=sys.stderr)
    sys.exit(2)

FRAMEWORKS = {
    "torch": "PyTorch",
    "linen": "Flax Linen",
    "nnx": "Flax NNX",
    "equinox": "Equinox",
}
BANNER = re.compile(r"^# === ([\w ]+?) =+$", flags=re.MULTILINE)
HEAD = "Docstring and imports"  # what stands above the first banner
# A kind of token -> its letter in the page, which has a colour for it; all others are plain.
LETTERS = {
    Token.Comment: "c",
    Token.Literal.String: "s",
    Token.Literal.Number: "n",
    Token.Keyword: "k",
    Token.Operator.Word: "k",
    Token.Name.Function: "f",
    Token.Name.Class: "f",
    Token.Name.Decorator: "d",
}
PLAIN = "p"
BETWEEN = "¦"  # tokens of a line; no script has it
BREAK = re.compile(r"(?<=[(\[=])|(?=\.[a-z_])")  # after a bracket, and before a dot
Line = list[tuple[str, str]]  # letters and texts


class BuildError(Exception):
    """Says what the page would need and does not find."""


# === Scripts ====================================================================================
def letter_of(kind: _TokenType) -> str:
    return next((letter for group, letter in LETTERS.items() if kind in group), PLAIN)


@cache  # many scripts have the same section
def highlight(code: str) -> list[Line]:
    """Return code as lines of tokens; neighbours of one letter are one token."""
    lines: list[Line] = [[]]
    for kind, text in PythonLexer(stripnl=False).get_tokens(code):
        letter = letter_of(kind)
        for i, part in enumerate(text.split("\n")):
            if i:
                lines.append([])
            if part and lines[-1] and lines[-1][-1][0] == letter:
                part = lines[-1].pop()[1] + part
            if part:
                lines[-1].append((letter, part))
    return lines[: code.count("\n") + 1]


def split(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield each section's title, the number of its first line, and its code."""
    parts = BANNER.split(text)
    start = 1
    for title, code in zip([HEAD, *parts[1::2]], parts[::2], strict=True):
        blank = len(code) - len(code.lstrip("\n"))
        yield title, start + blank, code.strip("\n")
        start += code.count("\n")


def read_scripts(root: Path) -> tuple[dict[str, Any], list[str]]:
    """Return every script's sections as numbers of lines, and the lines that these number."""
    numbers: dict[str, int] = {}
    scripts = {}
    for name, row in tomllib.loads((root / "scripts.toml").read_text()).items():
        file = f"{name}.py" if (root / f"{name}.py").exists() else f"more/{name}.py"
        sections = []
        for title, start, code in split((root / file).read_text()):
            if BETWEEN in code:
                raise BuildError(f"{file} has {BETWEEN}, which stands between tokens")
            packed = [BETWEEN.join(letter + text for letter, text in x) for x in highlight(code)]
            lines = [numbers.setdefault(x, len(numbers)) for x in packed]
            sections.append({"title": title, "start": start, "lines": lines})
        group = row["algorithm"].upper()
        if row["family"] != "plain":
            group += f", {row['family']}"
        info = {"file": file, "group": group, "framework": row["framework"]}
        scripts[name] = info | {"sections": sections}
    return scripts, list(numbers)


def add_notes(root: Path, scripts: dict[str, Any]) -> None:
    """Give each section what its framework asks for, from docs/notes.toml.

    A note is for the scripts in whose names and frameworks are all words of its table's name; that
    with most words counts.
    """
    notes = tomllib.loads((root / "docs/notes.toml").read_text())
    unused = {(name, title) for name, own in notes.items() for title in own}
    for script, info in scripts.items():
        words = {*script.split("_"), info["framework"]}
        names = [x for x in notes if set(x.split("_")) <= words]
        names.sort(key=lambda x: x.count("_"), reverse=True)
        for section in info["sections"]:
            name = next((x for x in names if section["title"] in notes[x]), "")
            section["note"] = prose(notes[name][section["title"]]) if name else ""
            unused.discard((name, section["title"]))
    if unused:
        raise BuildError(f"docs/notes.toml: no script has a section for {sorted(unused)}")


def prose(text: str) -> str:
    """Return a sentence of this project's own as HTML, with its `code`."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


# === Idioms =====================================================================================
class Excerpt(NamedTuple):
    code: str
    start: int  # its first line in the file
    end: int


def excerpt(root: Path, source: dict[str, str]) -> Excerpt:
    """Return lines of a file: a function or class by name, or of it those from one text to another.

    source has the keys file and name (as "Agent.get_value"), and may have from and to.
    """
    code = (root / source["file"]).read_text()
    where = f"{source['file']}: {source['name']}"
    node: Any = ast.parse(code)
    for name in source["name"].split("."):
        walk: Iterator[Any] = ast.walk(node)
        inside = [x for x in walk if getattr(x, "name", None) == name and x is not node]
        if not inside:
            raise BuildError(f"{where} is not there")
        node = inside[0]
    start = min(x.lineno for x in [node, *node.decorator_list])
    end = node.end_lineno
    lines = code.splitlines()
    if "from" in source:
        start = find(lines, source["from"], range(start, end + 1), where)
        end = find(lines, source.get("to", source["from"]), range(start, end + 1), where)
    return Excerpt(textwrap.dedent("\n".join(lines[start - 1 : end])), start, end)


def find(lines: Sequence[str], text: str, within: range, where: str) -> int:
    """Return the number of the first line that has the text."""
    for i in within:
        if text in lines[i - 1]:
            return i
    raise BuildError(f"{where} has no line with {text!r}")


def read_idioms(root: Path) -> list[dict[str, Any]]:
    return tomllib.loads((root / "site/idioms.toml").read_text())["idiom"]


def idiom_cell(root: Path, sources: list[dict[str, str]], link: str) -> str:
    """Return the cell of a framework: excerpts, each with a link to its file."""
    parts = []
    for i, source in enumerate(sources):
        code, start, end = excerpt(root, source)
        parts.append(f"<pre>{''.join(map(line_html, highlight(code)))}</pre>")
        places = [(x["file"], x["name"]) for x in sources[i : i + 2]]
        if len(set(places)) == len(places):  # the next is not from the same place
            name = html.escape(", ".join(places[0]))
            lines = f"#L{start}-L{end}" if link.startswith("http") else ""  # GitHub's
            address = html.escape(f"{link}/{source['file']}{lines}")
            parts.append(f'<a href="{address}">{name}</a>')
    return "".join(parts)


def line_html(line: Line) -> str:
    """Return a line of an excerpt, with a class by which it is indented where it wraps."""
    text = "".join(text for _, text in line)
    indent = len(text) - len(text.lstrip())
    return f'<span class="line in{indent}">{"".join(map(token_html, line))}</span>'


def token_html(token: tuple[str, str]) -> str:
    """Return a token, with places to break a long line at: never within a name."""
    letter, text = token
    text = "<wbr>".join(map(html.escape, BREAK.split(text)))
    return text if letter == PLAIN else f'<span class="{letter}">{text}</span>'


def idioms_html(root: Path, link: str) -> str:
    """Return the idioms, each in every framework, to be folded."""
    shown = []
    for idiom in read_idioms(root):
        cells = "".join(
            f"<div><h4>{title}</h4>{idiom_cell(root, idiom[name], link)}</div>"
            for name, title in FRAMEWORKS.items()
        )
        head = f"<summary><h3>{html.escape(idiom['title'])}</h3></summary>"
        note = f"<p>{prose(idiom['note'])}</p>"
        shown.append(f'<details open>{head}{note}<div class="cells">{cells}</div></details>')
    return "".join(shown)


# === Studies ====================================================================================
class Cell(NamedTuple):
    """Runs that were measured in turn: of one study, machine, environment, network and length."""

    study: str  # its folder, from the project's root on
    runs: pd.DataFrame


def read_cells(root: Path) -> list[Cell]:
    """Return what the studies have measured of single trainings of PPO, the largest first."""
    cells = []
    for path in sorted((root / "studies").rglob("runs.*")):
        if path.name not in runs.TABLES:
            continue
        study = str(path.parent.relative_to(root))
        for bench in measures.benches(runs.load(path.parent)):
            every = measures.timed(bench.runs).dropna(subset=["steady", "process"])
            alone = every["num_agents"].isna() & ~every["mode"].str.contains("side by side")
            every = every[alone & ~every["sync"] & (every["algorithm"] == "ppo")]
            for _, part in every.groupby(["env_id", "size"]):
                part = stats.of_length(part)
                if part["mode"].nunique() > 1:
                    cells.append(Cell(study, measures.in_order(part)))
    cells.sort(key=lambda x: len(x.runs), reverse=True)
    return [x for i, x in enumerate(cells) if not any(is_part(x, y) for y in cells[:i])]


def is_part(cell: Cell, other: Cell) -> bool:
    """Return whether another study has all of the cell's runs, too."""
    keys = ["mode", "env_id", "size", "platform", "repeat", "process", "steady"]
    return len(cell.runs.merge(other.runs[keys], on=keys)) == len(cell.runs)


def text(value: object) -> str:
    """Return a study's text as HTML that shows it as it is; page.escape() sees to that."""
    return page.HTML.renderInline(page.escape(value))


def pack(cell: Cell, link: str) -> dict[str, Any]:
    """Return a cell for the page, its texts as HTML."""
    first = cell.runs.iloc[0]
    modes = []
    for mode, part in cell.runs.groupby("mode", sort=False):
        seconds = part[["repeat", "steady", "process"]]
        rows = [[float(f"{x:.5g}") for x in row] for row in seconds.to_numpy()]
        framework = part["framework"].iloc[0]
        known = framework if framework in FRAMEWORKS else "other"
        modes.append({"name": text(mode), "framework": known, "runs": rows})
    return {
        "device": text(first["platform"]),
        "on_gpu": bool(first["device"] != "cpu"),
        "size": text(first["size"]),
        "env": text(first["env_id"]),
        "study": text(cell.study),
        "link": f"{link}/{quote(cell.study)}",
        "commit": text(first["commit"][:7]),
        "iterations": int(first["num_iterations"]),
        "batch": int(first["batch_size"]),
        "modes": modes,
    }


# === The page ===================================================================================
def build(root: Path, link: str) -> str:
    """Return the page; link leads to the project's root, where files are."""
    scripts, lines = read_scripts(root)
    add_notes(root, scripts)
    cells = [pack(x, link) for x in read_cells(root)]
    most = max([len(mode["runs"]) for x in cells for mode in x["modes"]], default=2)
    data = {
        "link": link,
        "scripts": scripts,
        "lines": lines,
        "cells": cells,
        # Student's quantiles by degrees of freedom, from 1 on.
        "t": [round(float(student.ppf((1 + stats.CONFIDENCE) / 2, x)), 4) for x in range(1, most)],
        "farthest": measures.FARTHEST,
    }
    packed = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    css = (HERE / "page.css").read_text()
    js = (HERE / "page.js").read_text()
    return Template((HERE / "page.html").read_text()).substitute(
        css=css,
        js=js,
        css_hash=digest(css),
        js_hash=digest(js),
        data=packed.replace("<", "\\u003c"),
        idioms=idioms_html(root, link),
        link=html.escape(link),
    )


def digest(code: str) -> str:
    """Return what a Content-Security-Policy calls a style or a script by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("report/site.html"), help="file to write")
    parser.add_argument("--link", help="address of the project's files; by default, on this disk")
    args = parser.parse_args()
    link = args.link or os.path.relpath(ROOT, args.out.resolve().parent)
    try:
        content = build(ROOT, link)
    except BuildError as error:
        sys.exit(f"site: {error}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(content)
    print(f"{args.out}: {len(content.encode()) / 1000:,.0f} KB")


if __name__ == "__main__":
    main()

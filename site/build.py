"""Build the website: scripts side by side, idioms, and an estimate of training times.

    python site/build.py    # writes report/site.html, a single file without network requests

Jinja fills page.html with page.css, page.js, the scripts in scripts.toml, notes.toml, idioms.toml
and data from the studies, and escapes everything that is not Markup. Lines that scripts share are
stored once. JavaScript on the page compares the scripts and estimates times.
"""

import argparse
import base64
import hashlib
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.append(str(ROOT))

try:
    import pandas as pd
    from jinja2 import Environment
    from markupsafe import Markup, escape
    from pygments.lexers.python import PythonLexer
    from pygments.token import Token, _TokenType
    from scipy.stats import t as student

    from analysis import measures, page, runs, stats
    from analysis.catalog import FRAMEWORKS, SCRIPTS, file_of
    from analysis.schema import SourceError
    from tools.idioms import excerpt, read_idioms
    from tools.sections import BANNER
except ModuleNotFoundError as error:
    print(f"site: {error}. Run: ./setup.sh && source .venv/bin/activate", file=sys.stderr)
    sys.exit(2)

HEAD = "Docstring and imports"  # everything above the first banner
# Token type -> CSS class, which sets the color; all other tokens are plain.
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
BETWEEN = "¦"  # separates the tokens of a line; occurs in no script
BREAK = re.compile(r"(?<=[(\[=])|(?=\.[a-z_])")  # after ( [ or =, and before a dot
Line = list[tuple[str, str]]  # CSS class and text of each token


class BuildError(Exception):
    """Raised if the page cannot be built; the message names what is missing or invalid."""


# === Scripts ====================================================================================
def letter_of(kind: _TokenType) -> str:
    return next((letter for group, letter in LETTERS.items() if kind in group), PLAIN)


@cache  # many scripts have the same section
def highlight(code: str) -> list[Line]:
    """Return code as lines of tokens; adjacent tokens with the same class are merged."""
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
    """Yield the title, the first line number and the code of each section."""
    parts = BANNER.split(text)
    start = 1
    for title, code in zip([HEAD, *parts[1::2]], parts[::2], strict=True):
        blank = len(code) - len(code.lstrip("\n"))
        yield title, start + blank, code.strip("\n")
        start += code.count("\n")


def read_scripts(root: Path) -> tuple[dict[str, Any], list[str]]:
    """Return all scripts, with the lines of each section as ids, and a list of lines by id."""
    numbers: dict[str, int] = {}
    scripts = {}
    for name, row in SCRIPTS.items():
        file = file_of(name)
        sections = []
        for title, start, code in split((root / file).read_text(encoding="utf-8")):
            if BETWEEN in code:
                raise BuildError(f"{file} contains {BETWEEN}, which separates tokens")
            packed = [BETWEEN.join(letter + text for letter, text in x) for x in highlight(code)]
            lines = [numbers.setdefault(x, len(numbers)) for x in packed]
            sections.append({"title": title, "start": start, "lines": lines})
        group = row["algorithm"].upper()
        if row["setting"] != "plain":
            group += f", {row['setting']}"
        info = {"file": file, "group": group, "framework": row["framework"]}
        scripts[name] = info | {"sections": sections}
    return scripts, list(numbers)


def add_notes(root: Path, scripts: dict[str, Any]) -> None:
    """Add the notes in notes.toml to sections.

    The name of a table consists of words, such as dqn_torch. The table applies to the scripts that
    have all of these words in their name or as their framework. If several tables apply, the one
    with the most words wins.
    """
    notes = tomllib.loads((root / "site/notes.toml").read_text(encoding="utf-8"))
    unused = {(name, title) for name, titles in notes.items() for title in titles}
    for script, info in scripts.items():
        words = {*script.split("_"), info["framework"]}
        names = [x for x in notes if set(x.split("_")) <= words]
        names.sort(key=lambda x: x.count("_"), reverse=True)
        for section in info["sections"]:
            name = next((x for x in names if section["title"] in notes[x]), "")
            section["note"] = prose(notes[name][section["title"]]) if name else ""
            unused.discard((name, section["title"]))
    if unused:
        raise BuildError(f"site/notes.toml: no script has a section for {sorted(unused)}")


def prose(text: str) -> Markup:
    """Return text from a project file as HTML, with <code> elements instead of backticks."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


# === Idioms =====================================================================================
def read_excerpts(root: Path, sources: list[dict[str, str]], link: str) -> list[dict[str, Any]]:
    """Return the excerpts for one framework, for idioms.html, with links to their files.

    If successive excerpts come from the same function, only the last one has a link.
    """
    shown = []
    for i, source in enumerate(sources):
        code, start, end = excerpt(root, source)
        made: dict[str, Any] = {"lines": [line_of(x) for x in highlight(code)]}
        places = [(x["file"], x["name"]) for x in sources[i : i + 2]]
        if len(set(places)) == len(places):
            lines = f"#L{start}-L{end}" if link.startswith("http") else ""  # GitHub anchor
            made |= {"place": ", ".join(places[0]), "link": f"{link}/{source['file']}{lines}"}
        shown.append(made)
    return shown


def line_of(line: Line) -> dict[str, Any]:
    """Return a line with its indentation, and its tokens split where the line may wrap.

    Names are never split.
    """
    text = "".join(text for _, text in line)
    tokens = [(letter, BREAK.split(part)) for letter, part in line]
    return {"indent": len(text) - len(text.lstrip()), "tokens": tokens}


def idioms_of(root: Path, link: str) -> list[dict[str, Any]]:
    """Return all idioms, in all frameworks, for idioms.html."""
    shown = []
    for idiom in read_idioms(root):
        cells = {title: read_excerpts(root, idiom[x], link) for x, title in FRAMEWORKS.items()}
        shown.append({"title": idiom["title"], "note": prose(idiom["note"]), "cells": cells})
    return shown


# === Studies ====================================================================================
class Cell(NamedTuple):
    """Comparable runs: they share the study, machine, environment, network and length."""

    study: str  # study folder, relative to the project
    runs: pd.DataFrame


def read_cells(root: Path) -> list[Cell]:
    """Return the cells with PPO runs from all studies, largest first."""
    cells = []
    for path in sorted((root / "studies").rglob("runs.*")):
        if path.name not in runs.TABLES:
            continue
        study = str(path.parent.relative_to(root))
        for experiment in measures.experiments(runs.load(path.parent)):
            every = measures.timed(experiment.runs).dropna(subset=["steady", "process"])
            alone = every["num_agents"].isna() & ~every["mode"].str.contains("side by side")
            every = every[alone & ~every["sync"] & (every["algorithm"] == "ppo")]
            every = every[~every["env_id"].str.contains(":")]  # exclude custom environments
            every = every.drop(measures.under_load(every).index)  # exclude runs under load
            for _, part in every.groupby(["env_id", "size"]):
                part = stats.of_length(part)
                if part["mode"].nunique() > 1:
                    cells.append(Cell(study, measures.in_order(part)))
    cells.sort(key=lambda x: len(x.runs), reverse=True)
    return [x for i, x in enumerate(cells) if not any(is_part(x, y) for y in cells[:i])]


def is_part(cell: Cell, other: Cell) -> bool:
    """Return whether another cell contains all runs in the cell."""
    keys = ["mode", "env_id", "size", "platform", "repeat", "process", "steady"]
    return len(cell.runs.merge(other.runs[keys], on=keys)) == len(cell.runs)


def text(value: object) -> str:
    """Return a value from a study as escaped HTML, on one line."""
    return str(escape(page.one_line(value)))


def pack(cell: Cell, link: str) -> dict[str, Any]:
    """Return a cell as JSON data for the page, with its strings escaped for HTML."""
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


def read_outside(root: Path, link: str) -> list[dict[str, Any]]:
    """Return a cell per algorithm and network, measured with a very fast simulator outside JAX.

    The page adds the time per environment step that the reader enters. The list is empty if there
    is no simulators study.
    """
    study = "studies/simulators"
    if not (root / study / "runs.csv").exists():
        return []
    packed = []
    for experiment in measures.experiments(runs.load(root / study)):
        for size, part in experiment.runs.groupby("size", sort=False):
            cell = pack(Cell(study, measures.in_order(measures.timed(part))), link)
            algorithm = str(part["algorithm"].iloc[0]).upper()
            cell["title"] = text(f"{algorithm}, {size} network")
            cell["measured"] = cell["iterations"] * cell["batch"]
            packed.append(cell)
    return sorted(packed, key=lambda x: str(x["title"]))


# === The page ===================================================================================
def build(root: Path, link: str) -> str:
    """Return the page; `link` is the URL of the root folder of the project."""
    scripts, lines = read_scripts(root)
    add_notes(root, scripts)
    cells = [pack(x, link) for x in read_cells(root)]
    outside = read_outside(root, link)
    most = max([len(mode["runs"]) for x in cells + outside for mode in x["modes"]], default=2)
    data = {
        "link": link,
        "scripts": scripts,
        "lines": lines,
        "cells": cells,
        "outside": outside,
        # Quantiles of Student's t distribution for 1, 2, ... degrees of freedom.
        "t": [round(float(student.ppf((1 + stats.CONFIDENCE) / 2, x)), 4) for x in range(1, most)],
        "farthest": measures.FARTHEST,
    }
    css = Markup((HERE / "page.css").read_text(encoding="utf-8"))
    js = Markup((HERE / "page.js").read_text(encoding="utf-8"))
    return (
        templates()
        .get_template("page.html")
        .render(
            css=css,
            js=js,
            css_hash=digest(css),
            js_hash=digest(js),
            data=data,
            idioms=idioms_of(root, link),
            link=link,
        )
    )


def templates() -> Environment:
    """Return a Jinja environment for the templates in this folder."""
    found = page.templates(HERE)
    # Keep the order of scripts and lines, and write compact JSON.
    options = {"ensure_ascii": False, "separators": (",", ":"), "sort_keys": False}
    found.policies["json.dumps_kwargs"] = options
    return found


def digest(code: str) -> str:
    """Return the hash of a style sheet or script for the Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("report/site.html"), help="file to write")
    parser.add_argument("--link", help="URL of the project; default: the path to this checkout")
    args = parser.parse_args()
    link = args.link or os.path.relpath(ROOT, args.out.resolve().parent)
    try:
        content = build(ROOT, link)
    except (BuildError, SourceError) as error:
        sys.exit(f"site: {error}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(content)
    print(f"{args.out}: {len(content.encode()) / 1000:,.0f} KB")


if __name__ == "__main__":
    main()

"""Idioms from site/idioms.toml, with their code excerpts, for the website and docs/idioms.md."""

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from analysis.catalog import FRAMEWORKS
from analysis.schema import SourceError


class Excerpt(NamedTuple):
    code: str
    start: int  # line number in the file, from 1
    end: int


def read_idioms(root: Path) -> list[dict[str, Any]]:
    return tomllib.loads((root / "site/idioms.toml").read_text(encoding="utf-8"))["idiom"]


def excerpt(root: Path, source: dict[str, str]) -> Excerpt:
    """Return the code of a function or class, or only some of its lines.

    source has the keys file and name (such as "Agent.get_value"). The optional keys from and to
    select lines: they contain text from the first and from the last line. Raise SourceError if the
    code does not exist.
    """
    code = (root / source["file"]).read_text(encoding="utf-8")
    where = f"{source['file']}: {source['name']}"
    node: Any = ast.parse(code)
    for name in source["name"].split("."):
        walk: Iterator[Any] = ast.walk(node)
        inside = [x for x in walk if getattr(x, "name", None) == name and x is not node]
        if not inside:
            raise SourceError(f"{where} does not exist")
        node = inside[0]
    start = min(x.lineno for x in [node, *node.decorator_list])
    end = node.end_lineno
    lines = code.splitlines()
    if "from" in source:
        start = find(lines, source["from"], range(start, end + 1), where)
        end = find(lines, source.get("to", source["from"]), range(start, end + 1), where)
    return Excerpt(textwrap.dedent("\n".join(lines[start - 1 : end])), start, end)


def find(lines: Sequence[str], text: str, within: range, where: str) -> int:
    """Return the number of the first line that contains the text, counted from 1."""
    for i in within:
        if text in lines[i - 1]:
            return i
    raise SourceError(f"{where} has no line with {text!r}")


def markdown(root: Path) -> str:
    """Return all idioms in Markdown: a list of links, then one section per idiom."""
    idioms = read_idioms(root)
    parts = ["\n".join(f"- [{x['title']}](#{anchor(x['title'])})" for x in idioms)]
    for idiom in idioms:
        parts += [f"## {idiom['title']}", idiom["note"]]
        for framework, title in FRAMEWORKS.items():
            begin = f"**{title}**,"
            places = groupby(idiom[framework], key=lambda x: (x["file"], x["name"]))
            for (file, name), sources in places:
                code = "\n\n".join(excerpt(root, x).code for x in sources)
                parts += [f"{begin} `{name}` in [{file}](../{file}):", f"```python\n{code}\n```"]
                begin = "and"
    return "\n\n".join(parts)


def anchor(heading: str) -> str:
    """Return the anchor that GitHub generates for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")

"""Write the numbers of README.md, docs/ and studies/ from the studies, and what is of the scripts.

A block begins with a comment such as <!-- answer of studies/cpu in CartPole-v1 --> and ends with
<!-- end -->: what lies between comes from the data, and is not written by hand. A study may have
blocks of its own, in the dict BLOCKS of its study.py. Of the scripts are their table, by
scripts.toml, and diffs.
"""

import argparse
import ast
import difflib
import importlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from analysis import page, tables
from analysis.formatting import join
from analysis.measures import Experiment, experiments
from analysis.page import Table, Text
from analysis.runs import load
from analysis.schema import SCRIPTS, SourceError

ROOT = Path(__file__).parent.parent
FILES = ("README.md", "docs/*.md", "studies/*/README.md")
BLOCK = re.compile(
    r"(?P<start><!-- (?P<name>\w+) of (?P<source>\S+)(?: in (?P<where>.+?))?"
    r"(?: over (?P<baseline>\S+))? -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)


@cache
def experiment_of(source: str, where: str | None) -> Experiment:
    """Return the largest experiment of a source, where each word is an environment, size or length.

    A length is so many iterations, as 100it.
    """
    data = load(ROOT / source)
    for word in (where or "").split():
        here = (data.runs["env_id"] == word) | (data.runs["size"] == word)
        here |= data.runs["num_iterations"].map("{:g}it".format) == word
        data = data._replace(runs=data.runs[here])
    if data.runs.empty:
        raise SourceError(f"{source} has no run in {where}")
    return experiments(data)[0]


def block(name: str, source: str, where: str | None, baseline: str | None) -> str:
    """Return what belongs into a block, in Markdown."""
    if name == "diff" and where and baseline:
        return diff(ROOT / baseline, ROOT / source, where.split())
    if name == "table" and source == "scripts.toml":
        return scripts_table()
    if name in tables.TABLES:
        return page.markdown_table(tables.make(name, experiment_of(source, where)).cells)
    own = own_blocks(source)
    if name not in own:
        raise SourceError(f"no block is called {name}")
    found = own[name](ROOT / source)
    return page.markdown(found) if isinstance(found, Text) else page.markdown_table(found.cells)


def scripts_table() -> str:
    """Return a link to each script, what its actions and environments are, and what it teaches."""
    lines = ["| script | actions | environments | what it teaches |", "|---|---|---|---|"]
    for name, row in SCRIPTS.items():
        file = f"{name}.py" if (ROOT / f"{name}.py").exists() else f"more/{name}.py"
        continuous = row["algorithm"] == "sac" or row["family"].startswith("continuous")
        actions = "continuous" if continuous else "discrete"
        environments = "Gymnasium" if row["family"].endswith("Gymnasium") else "JAX"
        lines.append(f"| [{name}]({file}) | {actions} | {environments} | {row['teaches']} |")
    return "\n".join(lines)


def diff(old: Path, new: Path, functions: list[str]) -> str:
    """Return the lines of some functions that differ between two scripts, fenced."""
    lines = []
    for name in functions:
        changes = difflib.unified_diff(lines_of(old, name), lines_of(new, name), n=0, lineterm="")
        lines += [f"@@ {name} @@", *(x for x in changes if not x.startswith(("---", "+++", "@@")))]
    return "\n".join(["```diff", *lines, "```"])


def lines_of(script: Path, function: str) -> list[str]:
    """Return the lines of the function that has a name, at any depth."""
    text = script.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return text.splitlines()[node.lineno - 1 : node.end_lineno]
    raise SourceError(f"{script.name} has no function {function}")


def own_blocks(source: str) -> dict[str, Callable[[Path], Table | Text]]:
    """Return the blocks that the study of a source has of its own."""
    folder = Path(*Path(source).parts[:2])
    return study_of(folder).BLOCKS if (ROOT / folder / "study.py").exists() else {}


def study_of(folder: Path) -> Any:
    return importlib.import_module(f"studies.{folder.name}.study")


def renewed(text: str) -> str:
    """Return a document with its blocks as the data give them."""

    def renew(match: re.Match[str]) -> str:
        parts = [match[x] for x in ("name", "source", "where", "baseline")]
        return f"{match['start']}{block(*parts)}\n{match['end']}"

    return BLOCK.sub(renew, text)


def run(args: argparse.Namespace) -> int:
    stale = []
    for path in [path for pattern in FILES for path in sorted(ROOT.glob(pattern))]:
        text = path.read_text()
        new = renewed(text)
        if new == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not args.check:
            path.write_text(new)
    what = "not what the studies give" if args.check else "written"
    print(f"{join(stale)}: {what}" if stale else "All blocks are what the studies give.")
    return 1 if stale and args.check else 0

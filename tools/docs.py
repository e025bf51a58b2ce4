"""Generate the tables in README.md, docs/ and studies/ from data and scripts.

    python -m tools.docs            # update the pages
    python -m tools.docs --check    # only check; exit 1 if a page is out of date

A generated block starts with a comment such as <!-- answer of studies/cpu in CartPole-v1 --> and
ends with <!-- end -->. Do not edit the text between them. The block for a race in a study starts
with <!-- race of studies/x/races.jsonl in NAME -->. A study can define more blocks, in the dict
BLOCKS in its study.py. The remaining blocks come from scripts.toml (matrix, tables), from scripts
(diffs) and from site/idioms.toml.
"""

import argparse
import difflib
import importlib
import re
import sys
from collections.abc import Callable
from functools import cache
from itertools import takewhile
from pathlib import Path

from analysis import page, tables
from analysis.catalog import SCRIPTS, file_of
from analysis.formatting import join
from analysis.measures import Experiment, experiments
from analysis.page import Table, Text
from analysis.runs import load
from analysis.schema import SourceError
from tools import idioms
from tools.sections import changed_lines, function, read

ROOT = Path(__file__).parent.parent
FILES = ("README.md", "docs/*.md", "studies/*/README.md")
BLOCK = re.compile(
    r"(?P<start><!-- (?P<name>\w+) of (?P<source>\S+)(?: in (?P<where>.+?))?"
    r"(?: over (?P<baseline>\S+))? -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)
COLUMNS = ("linen", "nnx", "equinox", "torch", "torch_compile")  # columns of the script matrix


@cache
def experiment_of(source: str, where: str | None) -> Experiment:
    """Return the largest experiment in a source, restricted by the words in `where`.

    A word is an environment, a network size or a number of iterations, such as 100it.
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
    """Return the contents of a block, in Markdown."""
    if name == "diff" and where and baseline:
        return diff(Path(baseline).stem, Path(source).stem, where.split())
    if source == "scripts.toml" and name == "lines" and where and baseline:
        return lines_table(where.split(), baseline)
    if source == "scripts.toml" and name in ("table", "matrix"):
        return scripts_table() if name == "table" else scripts_matrix()
    if name == "idioms":
        return idioms.markdown(ROOT)
    if name == "race" and where:
        return page.markdown_table(tables.race_table(ROOT / source, where, baseline).cells)
    if name in tables.TABLES:
        return page.markdown_table(tables.make(name, experiment_of(source, where)).cells)
    defined = blocks_of_study(source)
    if name not in defined:
        raise SourceError(f"no block is called {name}")
    found = defined[name](ROOT / source)
    return page.markdown(found) if isinstance(found, Text) else page.markdown_table(found.cells)


def scripts_table() -> str:
    """Return a table of what each script teaches."""
    lines = ["| script | what it teaches |", "|---|---|"]
    lines += [f"| `{file_of(name)}` | {row['teaches']} |" for name, row in SCRIPTS.items()]
    return "\n".join(lines)


def lines_table(names: list[str], baseline: str) -> str:
    """Return a table of the lesson lengths and of the numbers of lines that differ from baseline.

    The lesson is the part of a script above its run log.
    """
    titles = ["script", "lines of the lesson", f"lines that differ from {baseline}"]
    lines = [f"| {' | '.join(titles)} |", "|---|---:|---:|"]
    for name in names:
        lesson = len(read(name).partition("# === Run log")[0].splitlines())
        lines.append(f"| {name} | {lesson} | {changed_lines(baseline, name)} |")
    return "\n".join(lines)


def scripts_matrix() -> str:
    """Return a table of links to scripts, with a row per setting and a column per framework."""
    titles = ["setting", "files", "Linen", "NNX", "Equinox", "PyTorch", "PyTorch, compiled"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    settings: dict[tuple[str, str], list[str]] = {}
    for name, row in SCRIPTS.items():
        settings.setdefault((row["algorithm"], row["setting"]), []).append(name)
    for (algorithm, kind), names in settings.items():
        setting = algorithm.upper()
        if kind != "plain":
            setting += f", {kind.replace('continuous', 'continuous actions')}"
        # Link texts omit the prefix and suffix that all names in the row share.
        words = [name.split("_") for name in names]
        begin = "".join(f"{x}_" for x in shared(words))
        end = "".join(f"_{x}" for x in reversed(shared([x[::-1] for x in words])))
        folder = file_of(names[0]).removesuffix(f"{names[0]}.py")
        cells: dict[str, list[str]] = {column: [] for column in COLUMNS}
        for name in names:
            is_compiled = SCRIPTS[name]["compile"] == "compile"  # by torch.compile
            column = SCRIPTS[name]["framework"] + ("_compile" if is_compiled else "")
            link = f"[{name.removeprefix(begin).removesuffix(end)}]({file_of(name)})"
            cells[column].append(link)
        texts = [setting, f"`{folder}{begin}*{end}.py`", *(", ".join(x) for x in cells.values())]
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def shared(lists: list[list[str]]) -> list[str]:
    """Return the common prefix of all lists."""
    return [x[0] for x in takewhile(lambda x: len(set(x)) == 1, zip(*lists, strict=False))]


def diff(old: str, new: str, functions: list[str]) -> str:
    """Return the lines of the functions that differ between two scripts, as a code block."""
    lines = []
    for name in functions:
        before, after = (function(script, name).splitlines() for script in (old, new))
        changes = difflib.unified_diff(before, after, n=0, lineterm="")
        lines += [f"@@ {name} @@", *(x for x in changes if not x.startswith(("---", "+++", "@@")))]
    return "\n".join(["```diff", *lines, "```"])


def blocks_of_study(source: str) -> dict[str, Callable[[Path], Table | Text]]:
    """Return the functions that compute the blocks of a study, by block name."""
    folder = Path(*Path(source).parts[:2])
    if not (ROOT / folder / "study.py").exists():
        return {}
    return importlib.import_module(f"studies.{folder.name}.study").BLOCKS


def renewed(text: str) -> str:
    """Return the document with its generated blocks updated."""

    def renew(match: re.Match[str]) -> str:
        parts = [match[x] for x in ("name", "source", "where", "baseline")]
        return f"{match['start']}{block(*parts)}\n{match['end']}"

    return BLOCK.sub(renew, text)


def write(check: bool) -> int:
    """Update all documents, or only check them; return the exit status."""
    texts = {}
    for path in [path for pattern in FILES for path in sorted(ROOT.glob(pattern))]:
        text = path.read_text(encoding="utf-8")
        try:
            new = renewed(text)
        except SourceError as error:
            raise SourceError(f"{path.relative_to(ROOT)}: {error}") from error
        if new != text:
            texts[path] = new
    stale = [str(path.relative_to(ROOT)) for path in texts]
    if not check:  # write nothing unless all blocks could be generated
        for path, new in texts.items():
            path.write_text(new)
    what = "out of date; run python -m tools.docs" if check else "written"
    print(f"{join(stale)}: {what}" if stale else "All blocks are up to date.")
    return 1 if stale and check else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.docs", description=__doc__.partition("\n")[0]
    )
    check = "write nothing; exit with status 1 if a page is out of date"
    parser.add_argument("--check", action="store_true", help=check)
    try:
        sys.exit(write(parser.parse_args().check))
    except (SourceError, OSError) as error:
        print(f"docs: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

"""Run the notebooks of this folder and keep their outputs: they show sections of the report."""

import argparse
import re
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from analysis import learning, page, report, tables
from analysis.measures import benches
from analysis.page import Section, Text
from analysis.runs import load
from analysis.schema import SourceError

NOTEBOOKS = ("overall", "overhead", "phases", "compilation", "platforms", "learning")
FOLDER = Path(__file__).parent


def show(source: Any, *names: str, baseline: str | None = None) -> None:
    """Show sections of the report, by their names in report.SECTIONS or "platforms".

    source is what runs.load() takes: one, or several.
    """
    data = load(source)
    several = benches(data, baseline)
    request = report.Request(learning.load_environments(), baseline)
    lines = [tables.scope(data.runs)]
    lines += [f"Left out: {name}: {reason}." for name, reason in list(data.left_out.items())[:10]]
    page.show(Section("", [Text(" ".join(lines))]))
    if "platforms" in names:
        section = report.platform_section(several, request)
        page.show(section or Section("", [Text("All runs are from one platform.")]))
    names = tuple(x for x in names if x != "platforms")
    for bench in several if names else ():
        if len(several) > 1:
            page.show(Section(bench.title, []))
        for name in names:
            absent = Section("", [Text(f"These runs have nothing on {name}.")])
            page.show(report.section(name, bench, request) or absent)


def execute(name: str, source: str | None = None) -> nbformat.NotebookNode:
    """Return a notebook with its outputs; raise CellExecutionError if a cell fails.

    source replaces the one that the notebook names, in its cell too.
    """
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    if source:
        local = not source.startswith("wandb:")
        text = f"SOURCE = {(str(Path(source).resolve()) if local else source)!r}"
        cell = next(cell for cell in notebook.cells if "SOURCE = " in cell.source)
        cell.source = re.sub("SOURCE = .*", lambda _: text, cell.source, flags=re.DOTALL)
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=600, record_timing=False, resources=resources).execute()
    return notebook


def run(args: argparse.Namespace) -> int:
    if (args.source is None) != (args.out is None):
        words = "the notebooks here keep their own source"
        raise SourceError(f"--source and --out go together: {words}")
    out = args.out or FOLDER
    out.mkdir(parents=True, exist_ok=True)
    if args.source:
        load(args.source)  # or each notebook would say in a traceback that it cannot
    for name in NOTEBOOKS:
        try:
            notebook = execute(name, args.source)
        except CellExecutionError as error:
            raise SourceError(f"{name}.ipynb: {error.ename}: {error.evalue}") from error
        nbformat.write(notebook, out / f"{name}.ipynb")
        print(out / f"{name}.ipynb")
    return 0

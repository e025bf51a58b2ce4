"""Run the notebooks of this folder and keep their outputs.

    python -m analysis.notebooks                                # on the source that each names
    python -m analysis.notebooks --source runs --out my-notebooks    # copies, on another one

They show sections of the report: what is in it and what they say is the same.
"""

import argparse
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from analysis import learning, readings, render, report
from analysis.bench import benches
from analysis.render import Section, Text
from analysis.runs import load
from analysis.schema import SourceError

NOTEBOOKS = ("overall", "overhead", "phases", "compilation", "platforms", "learning")
FOLDER = Path(__file__).parent
ABSENT = {
    "environments": "There is one environment only.",
    "startup": "No run has a startup: all were resumed.",
    "compile modes": "No run was made without compiling, so there is nothing to compare with.",
    "platforms": "All runs are from one platform.",
}


def show(source: str | Path, *names: str, baseline: str | None = None) -> None:
    """Show sections of the report on source, by their names in report.SECTIONS or "platforms"."""
    data = load(source)
    several = benches(data, baseline)
    request = report.Request(learning.load_environments(), baseline)
    words = [readings.scope(data.runs), readings.resumed(data.runs)]
    words += [f"Left out: {name}: {reason}." for name, reason in list(data.left_out.items())[:10]]
    render.show(Section("", [Text(" ".join(filter(None, words)))]))
    if "platforms" in names:
        show_section(report.platform_section(several, request), ABSENT["platforms"])
    for bench in several:
        if len(several) > 1:
            render.show(Section(bench.title, [], level=2))
        for name in [x for x in names if x != "platforms"]:
            section = report.SECTIONS[name](bench, request.environments)
            why = readings.unphased(bench.runs) if name == "phases" else ABSENT.get(name, "")
            show_section(section, why or f"These runs give no {name}.")


def show_section(section: Section | None, why: str) -> None:
    render.show(section._replace(level=3) if section else Section("", [Text(why)]))


def execute(name: str, source: str | None = None) -> nbformat.NotebookNode:
    """Return a notebook with its outputs; raise CellExecutionError if a cell fails.

    source replaces the one that the notebook names, in its cell too.
    """
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    if source:
        local = not source.startswith("wandb:")
        text = f"SOURCE = {(str(Path(source).resolve()) if local else source)!r}"
        cell = next(cell for cell in notebook.cells if "SOURCE = " in cell.source)
        cell.source = re.sub("SOURCE = .*", lambda _: text, cell.source)
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=600, record_timing=False, resources=resources).execute()
    return notebook


def main() -> None:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m analysis.notebooks", description=lines[0])
    parser.add_argument("--source", help="folder, table, or wandb:entity/project")
    parser.add_argument("--out", type=Path, help="folder for the copies; needed with --source")
    args = parser.parse_args()
    if (args.source is None) != (args.out is None):
        parser.error("--source and --out go together: the notebooks here keep their own source")
    out = args.out or FOLDER
    try:
        out.mkdir(parents=True, exist_ok=True)
        if args.source:
            load(args.source)  # or each notebook would say in a traceback that it cannot
        for name in NOTEBOOKS:
            nbformat.write(execute(name, args.source), out / f"{name}.ipynb")
            print(out / f"{name}.ipynb")
    except (SourceError, OSError) as error:
        print(f"analysis.notebooks: {error}", file=sys.stderr)
        sys.exit(2)
    except CellExecutionError as error:
        print(f"analysis.notebooks: {error.ename}: {error.evalue}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()

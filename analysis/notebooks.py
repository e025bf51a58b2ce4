"""Run the notebooks of this folder and keep their outputs.

    python -m analysis.notebooks [--source SOURCE]

Without a source, each runs on the one that it names itself.
"""

import argparse
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = ("overall", "overhead", "phases", "compilation", "platforms", "learning")
FOLDER = Path(__file__).parent


def execute(name: str, source: str | None = None) -> nbformat.NotebookNode:
    """Return a notebook with its outputs; raise nbclient's CellExecutionError if a cell fails."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    cell = next(cell for cell in notebook.cells if "SOURCE = " in cell.source)
    own = cell.source
    if source:
        cell.source = re.sub('SOURCE = ".*?"', f'SOURCE = "{source}"', own)
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=600, record_timing=False, resources=resources).execute()
    cell.source = own
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m analysis.notebooks")
    parser.add_argument("--source", help="folder of runs, .parquet table, or wandb:entity/project")
    source = parser.parse_args().source
    for name in NOTEBOOKS:
        nbformat.write(execute(name, source), FOLDER / f"{name}.ipynb")
        print(f"{name}.ipynb")


if __name__ == "__main__":
    main()

"""Run the notebooks in analysis/ and save their outputs: python -m tools.notebooks

Execution times and the Python version are not saved, so a file changes only if the runs or the
code change.
"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "analysis"


def run(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    folder = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=600, resources=folder).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    del notebook.metadata["language_info"]["version"]
    nbformat.write(notebook, path)


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        print(path)
        run(path)


if __name__ == "__main__":
    main()

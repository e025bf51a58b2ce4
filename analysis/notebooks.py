"""What the notebooks of this folder show: sections of the report.

python -m analysis.notebooks    # run them all
"""

from pathlib import Path
from typing import Any

from analysis import page, report, tables
from analysis.measures import experiments
from analysis.page import Section, Text
from analysis.runs import load

HERE = Path(__file__).parent


def show(source: Any, *names: str, baseline: str | None = None) -> None:
    """Show sections of the report, by their names in report.SECTIONS or "platforms".

    source is what runs.load() takes: one, or several.
    """
    data = load(source)
    several = experiments(data, baseline)
    lines = [tables.scope(data.runs)]
    lines += [f"Left out: {name}: {reason}." for name, reason in list(data.left_out.items())[:10]]
    page.show(Section("", [Text(" ".join(lines))]))
    if "platforms" in names:
        section = report.platform_section(several)
        page.show(section or Section("", [Text("All runs are from one platform.")]))
        return
    for experiment in several:
        if len(several) > 1:
            page.show(Section(experiment.title, []))
        for name in names:
            absent = Section("", [Text(f"These runs have nothing on {name}.")])
            page.show(report.section(name, experiment) or absent)


def run(path: Path) -> None:
    """Run a notebook in this folder, and keep what it shows: not when it ran, and by which Python.

    So a file changes only where its runs or its code have changed.
    """
    import nbformat  # a notebook that imports this file needs neither
    from nbclient import NotebookClient

    notebook = nbformat.read(path, 4)
    folder = {"metadata": {"path": str(HERE)}}
    NotebookClient(notebook, timeout=600, resources=folder).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    del notebook.metadata["language_info"]["version"]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in sorted(HERE.glob("*.ipynb")):
        print(path)
        run(path)

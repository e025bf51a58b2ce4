"""Every notebook shows the report's own sections, of another source, too."""

import re

import nbformat
import numpy as np
import pytest
from conftest import ROOT
from fake_runs import WSL2, metrics_rows, run_info, write_grid, write_run
from nbclient import NotebookClient

from analysis.report import SECTIONS

FILES = sorted((ROOT / "analysis").glob("*.ipynb"))


def code_of(notebook):
    return [x for x in notebook.cells if x.cell_type == "code"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_notebook_asks_for_sections_that_there_are(path):
    source = "\n".join(x.source for x in code_of(nbformat.read(path, 4)))
    names = re.findall(r'show\(SOURCE, "(.*)"\)', source)
    assert names and set(names) <= {*SECTIONS, "platforms"}


def test_notebooks_show_any_source(tmp_path):
    assert len(FILES) == 6
    grid = write_grid(tmp_path / "here", repeats=2)
    info = run_info(seed=3, resumed=[5])
    write_run(grid, info, metrics_rows(info, np.full(12, 50.0), np.arange(12.0)))
    write_grid(tmp_path / "wsl2", repeats=2, envs=("CartPole-v1",), os=WSL2)
    words = {"platforms": [">Platforms</h", "1 run stopped and resumed"]}
    words["phases"] = [">WSL2, Fast, 2 cores</h", "These runs have nothing on phases."]
    for name, parts in words.items():
        notebook = nbformat.read(ROOT / f"analysis/{name}.ipynb", 4)
        first = code_of(notebook)[0]
        first.source = first.source.partition("SOURCE =")[0] + f"SOURCE = {str(tmp_path)!r}"
        folder = {"metadata": {"path": str(ROOT / "analysis")}}
        NotebookClient(notebook, timeout=600, resources=folder).execute()
        outputs = [x for cell in code_of(notebook) for x in cell.outputs]
        html = "".join(x.get("data", {}).get("text/html", "") for x in outputs)
        assert [x for x in parts if x not in html] == []

"""Every notebook runs from top to bottom, from a folder and from W&B."""

import threading

import nbformat
import numpy as np
import pytest
from fake_runs import MODES, metrics_rows, results, run_info, write_grid, write_run
from wandb_server import WandbServer

from analysis.notebooks import FOLDER, NOTEBOOKS, execute
from analysis.runs import read_folder

LEAST_FIGURES = {"overall": 2, "overhead": 3, "platforms": 0, "learning": 2}


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    write_grid(folder / "async", repeats=2)
    info = run_info(seed=3, resumed=[5])
    write_run(folder / "async", info, metrics_rows(info, np.full(12, 50.0), np.arange(12.0)))
    return write_grid(folder / "sync", modes=tuple(MODES), repeats=2, sync=True).parent


def outputs(notebook, kind):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [x.data[kind] for cell in cells for x in cell.outputs if kind in x.get("data", {})]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_shows_figures_and_sentences(grid, name):
    notebook = execute(name, str(grid))
    assert len(outputs(notebook, "image/png")) >= LEAST_FIGURES.get(name, 1)
    assert outputs(notebook, "text/markdown")
    printed = "".join(x.get("text", "") for cell in notebook.cells for x in cell.get("outputs", []))
    assert "1 run was stopped and resumed" in printed
    sources = [cell.source for cell in nbformat.read(FOLDER / f"{name}.ipynb", 4).cells]
    assert [cell.source for cell in notebook.cells] == sources


def test_no_notebook_is_forgotten():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NOTEBOOKS)


def test_platforms_are_shown_side_by_side(tmp_path):
    write_grid(tmp_path / "a", repeats=1)
    write_grid(tmp_path / "b", repeats=1, os="Linux-6.6-microsoft-standard-WSL2-x86_64")
    assert len(outputs(execute("platforms", str(tmp_path)), "image/png")) == 1


def test_without_an_uncompiled_run_compile_modes_are_not_compared(grid):
    notebook = execute("compilation", str(grid / "async"))
    assert outputs(notebook, "image/png") == []
    assert "No run was made without compiling" in outputs(notebook, "text/markdown")[0]


def test_a_notebook_runs_from_wandb(grid, monkeypatch, tmp_path):
    server = WandbServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path))
    for i, record in enumerate(read_folder(grid / "async")[0]):
        rows = record.metrics or []
        server.add(f"run{i}", record.info, results(rows), rows)
    local, remote = (execute("learning", x) for x in (str(grid / "async"), "wandb:team/project"))
    server.shutdown()
    server.server_close()
    assert outputs(remote, "text/markdown") == outputs(local, "text/markdown")
    assert outputs(remote, "text/html") != []

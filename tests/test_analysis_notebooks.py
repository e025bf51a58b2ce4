"""Every notebook shows the report's own sections, from a folder, a table and from W&B."""

import subprocess
import sys
import threading

import nbformat
import numpy as np
import pytest
from conftest import ROOT
from fake_runs import MODES, metrics_rows, results, run_info, write_grid, write_run
from wandb_server import WandbServer

from analysis.notebooks import FOLDER, NOTEBOOKS, execute
from analysis.runs import read_run

TITLES = {
    "overall": ["The answer", "Which script is done first", "By environment"],
    "overhead": ["Startup"],
    "phases": ["Rollout and update"],
    "compilation": ["Compile modes"],
    "platforms": ["The answer"],
    "learning": ["Learning", "Final returns"],
}


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
def test_a_notebook_shows_sections_of_the_report(grid, name):
    notebook = execute(name, str(grid))
    html = "".join(outputs(notebook, "text/html"))
    assert [x for x in TITLES[name] if f">{x}</h3>" not in html] == []
    assert "1 run was stopped and resumed" in html
    assert len(outputs(notebook, "image/png")) >= 1
    if name == "platforms":
        assert "All runs are from one platform." in html
    assert "<script" not in html


def test_no_notebook_is_forgotten():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NOTEBOOKS)


def test_a_notebook_names_the_source_that_it_shows(grid, tmp_path, monkeypatch):
    monkeypatch.chdir(grid)  # a relative path is the user's, not the notebook's
    notebook = execute("phases", "sync")
    assert f"SOURCE = {str(grid / 'sync')!r}" in notebook.cells[1].source
    assert "Rollout and update" in "".join(outputs(notebook, "text/html"))


def test_platforms_are_shown_side_by_side_and_never_pooled(tmp_path):
    write_grid(tmp_path / "a", repeats=2, envs=("CartPole-v1",))
    wsl2 = "Linux-6.6-microsoft-standard-WSL2-x86_64"
    write_grid(tmp_path / "b", repeats=2, envs=("CartPole-v1",), slowdown=2.0, os=wsl2)
    html = "".join(outputs(execute("platforms", str(tmp_path)), "text/html"))
    for title in ("Platforms", "Linux, Fast, 2 cores", "WSL2, Fast, 2 cores"):
        assert f">{title}</h" in html
    assert html.count(">The answer</h3>") == 2


def test_what_is_missing_is_said(grid, tmp_path):
    html = "".join(outputs(execute("compilation", str(grid / "async")), "text/html"))
    assert "No run was made without compiling" in html
    html = "".join(outputs(execute("phases", str(grid / "async")), "text/html"))
    assert "No run has --sync-for-timing" in html


def test_a_notebook_shows_wandb_as_it_shows_the_folder(grid, monkeypatch, tmp_path):
    server = WandbServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path))
    for path in sorted((grid / "async").iterdir()):
        info, rows = read_run(path)
        server.add(path.name, info, results(rows), rows)
    local, remote = (execute("overhead", x) for x in (str(grid / "async"), "wandb:team/project"))
    server.shutdown()
    server.server_close()
    ours, theirs = (outputs(x, "text/html")[1:] for x in (local, remote))  # names of runs differ
    assert theirs == ours != []


def test_copies_of_another_source_leave_the_notebooks_alone(grid, tmp_path):
    before = {path: path.read_bytes() for path in FOLDER.glob("*.ipynb")}
    command = [sys.executable, "-m", "analysis.notebooks", "--source"]

    def run(*arguments):
        return subprocess.run(
            [*command, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=300
        )

    done = run(tmp_path / "nothing", "--out", tmp_path / "copies")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert run(grid).returncode == 2  # --out is missing
    done = run(grid / "sync", "--out", tmp_path / "copies")
    assert done.returncode == 0, done.stderr
    assert {x.stem for x in (tmp_path / "copies").iterdir()} == set(NOTEBOOKS)
    assert (
        str(grid / "sync") in nbformat.read(tmp_path / "copies" / "phases.ipynb", 4).cells[1].source
    )
    assert {path: path.read_bytes() for path in FOLDER.glob("*.ipynb")} == before

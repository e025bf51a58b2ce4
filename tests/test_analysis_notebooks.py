"""Every notebook shows the report's own sections, of another source, too."""

import re
import sys

import nbformat
import numpy as np
import pytest
from fake_runs import WSL2, metrics_rows, run_info, write_grid, write_run

from analysis import __main__, notebooks
from analysis.notebooks import FOLDER, NOTEBOOKS
from analysis.report import SECTIONS

FILES = sorted(FOLDER.glob("*.ipynb"))


def code_of(path):
    return [x for x in nbformat.read(path, 4).cells if x.cell_type == "code"]


def test_no_notebook_is_forgotten_and_each_asks_for_sections_that_there_are():
    assert {path.stem for path in FILES} == set(NOTEBOOKS)
    for path in FILES:
        source = "\n".join(x.source for x in code_of(path))
        names = [
            x for call in re.findall(r"show\(SOURCE(.*)\)", source) for x in call.split('"')[1::2]
        ]
        assert names, path
        assert set(names) <= {*SECTIONS, "platforms"}, path


def test_copies_show_another_source_and_leave_the_notebooks_alone(tmp_path, monkeypatch, capsys):
    before = {path: path.read_bytes() for path in FILES}
    grid = write_grid(tmp_path / "runs" / "here", repeats=2)
    info = run_info(seed=3, resumed=[5])
    write_run(grid, info, metrics_rows(info, np.full(12, 50.0), np.arange(12.0)))
    write_grid(tmp_path / "runs" / "wsl2", repeats=2, envs=("CartPole-v1",), os=WSL2)
    monkeypatch.chdir(tmp_path)  # a relative path is the user's, not the notebook's
    monkeypatch.setattr(notebooks, "NOTEBOOKS", ("platforms", "phases"))  # six take a minute

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["analysis", "notebooks", "--source", *arguments])
        with pytest.raises(SystemExit) as end:
            __main__.main()
        return end.value.code

    assert run("nothing", "--out", "copies") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert run("runs") == 2  # --out is missing
    assert run("runs", "--out", "copies") == 0
    words = {"platforms": [">Platforms</h", "1 run stopped and resumed"]}
    words["phases"] = [">WSL2, Fast, 2 cores</h", "These runs have nothing on phases."]
    for name, parts in words.items():
        cells = code_of(tmp_path / "copies" / f"{name}.ipynb")
        assert any(f"SOURCE = {str(tmp_path / 'runs')!r}" in x.source for x in cells)
        html = "".join(x.get("data", {}).get("text/html", "") for y in cells for x in y.outputs)
        assert [x for x in parts if x not in html] == []
    assert {path: path.read_bytes() for path in FILES} == before

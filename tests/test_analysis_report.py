"""The report of every kind of result set; what users get wrong; notebooks that show its parts."""

import re

import nbformat
import pandas as pd
import pytest
from conftest import ROOT
from made_up import ENVS, LINEN, NNX, TORCH, grid, only_bench, run_command, write_grid, write_plain

from analysis import figures, notebooks, report

WHOLE = ["The answer", "Learning", "By environment", "Startup", "Rollout and update"]
WHOLE += ["Compile modes", "Memory", "The runs"]


def report_of(*arguments):
    """Return report.md of a report that must succeed; --out comes last."""
    status, _, errors = run_command("report", *arguments)
    assert status == 0, errors
    text = (arguments[-1] / "report.md").read_text()
    assert "nan" not in text.lower()
    return text


@pytest.fixture
def quick(monkeypatch):
    """All is drawn and not saved, which is quicker."""
    monkeypatch.setattr(figures, "png", lambda figure: b"")


def titles(text, level=2):
    return re.findall(rf"^{'#' * level} (.*)", text, flags=re.MULTILINE)


def section(text, title):
    return re.split(r"^##+ ", text.split(f"# {title}\n")[1], flags=re.MULTILINE)[0]


def steady_of(path):
    """Return the estimates of iterations in a table of platforms or of two results."""
    return pd.read_csv(path).query("value == 'steady'")["estimate"].to_numpy()


# === What a reader gets =========================================================================
def test_a_grid_gives_every_section_and_files_of_its_own(tmp_path):
    write_grid(tmp_path / "async", sizes=("small", "medium"), repeats=3)
    modes = ("linen jit", "linen none", "nnx jit", "nnx none")
    write_grid(tmp_path / "sync", modes, sync=True)
    status, said, _ = run_command("report", tmp_path)
    assert status == 0
    text = (tmp_path / "report/report.md").read_text()
    assert titles(text) == WHOLE
    files = re.findall(r"\]\(([^)]*)\)", text)
    assert len(files) == len(set(files)) > 10
    assert all((tmp_path / "report" / file).stat().st_size > 20 for file in files)
    answer = section(text, "The answer")
    assert answer.startswith("\nOver 2 environments with the small network, 12 iterations took")
    assert "| network | script | runs | startup (s) | iteration (ms) |" in answer
    assert "times as long as ppo_linen" in said
    place, _, sentence, *_ = said.splitlines()
    assert place == f"Report: {tmp_path}/report/report.html"
    assert sentence == answer.strip().splitlines()[0].replace("\\", "")


def test_the_headline_groups_scripts_that_cannot_be_told_apart():
    modes = {LINEN: (5.0, 0.1), NNX: (5.0, 0.1), TORCH: (5.0, 0.9)}
    runs = grid(modes, repeats=5, noise=0.02)
    assert re.fullmatch(
        r"On CartPole-v1, 100 iterations took ppo_(linen or ppo_nnx|nnx or ppo_linen) "
        r"1[45]\.\d( to 1[45]\.\d)? s and ppo_torch 9\d\.\d s\. "
        "Scripts joined by “or” cannot be told from the first of them; the next one can.",
        report.headline(only_bench(runs)),
    )
    alone = report.headline(only_bench(grid(modes)))
    assert alone.endswith("ran once: no difference in time can be claimed.")
    assert " or " not in alone
    short = report.headline(only_bench(runs.assign(process=float("nan"))))
    assert short.startswith("On CartPole-v1, an iteration took ppo_")


# === Platforms, baselines, older results ========================================================
@pytest.fixture(scope="module")
def two_platforms(tmp_path_factory):
    folder = tmp_path_factory.mktemp("platforms")
    modes, wsl2 = ("linen jit", "torch compile"), "Linux-6.6-microsoft-standard-WSL2"
    write_grid(folder / "a", modes, ENVS[:1], repeats=3)
    write_grid(folder / "b", modes, ENVS[:1], repeats=3, slowdown=3.0, os=wsl2)
    return folder


def test_each_platform_has_a_chapter_and_they_are_compared(two_platforms, tmp_path, quick):
    text = report_of(two_platforms / "a", two_platforms / "b", "--out", tmp_path)
    assert titles(text)[:3] == ["Linux, Fast, 2 cores", "WSL2, Fast, 2 cores", "Platforms"]
    assert titles(text, 3).count("The answer") == 2
    assert steady_of(tmp_path / "tables/platforms.csv") == pytest.approx([3, 3], rel=0.1)
    text = report_of(two_platforms, "--baseline", "ppo_torch_compile", "--out", tmp_path)
    assert "times as long as ppo_torch_compile" in text
    assert "times as long as ppo_linen" not in text


def test_of_two_results_the_slower_one_is_found(tmp_path, quick):
    modes = ("linen jit",)
    write_grid(tmp_path / "old", modes, repeats=4)
    write_grid(tmp_path / "new", modes, repeats=4, slowdown=2.0, cores=64)  # on another machine
    out = tmp_path / "out"
    text = report_of(tmp_path / "new", "--against", tmp_path / "old", "--out", out)
    assert "slower" in section(text, "Against the other results")
    assert steady_of(out / "tables/against.csv") == pytest.approx(2, rel=0.1)
    # A faster GPU beside the processor is no progress on either.
    write_grid(tmp_path / "new" / "gpu", modes, repeats=4, slowdown=0.1, device="H200")
    write_grid(tmp_path / "new" / "cpu", modes, repeats=4)
    report_of(tmp_path / "new", "--against", tmp_path / "old", "--out", out)
    assert steady_of(out / "tables/against.csv") == pytest.approx(1, rel=0.1)
    write_grid(tmp_path / "other", modes, envs=("CartPole-v0",))
    text = report_of(tmp_path / "new", "--against", tmp_path / "other", "--out", out)
    assert "No cell with the same settings is in both." in text


def test_only_the_runs_that_were_asked_for_count(tmp_path, quick):
    runs = write_grid(tmp_path / "runs", envs=ENVS[:1])
    (runs / "CartPole-v1__linen_jit__small__1" / "run.json").unlink()
    names = [x.name for x in runs.iterdir() if "linen" in x.name or "nnx" in x.name]
    (tmp_path / "names").write_text("\n".join(names))
    text = report_of(runs, "--only-runs", tmp_path / "names", "--out", tmp_path / "out")
    assert "since the grid does not list them: 2 of the runs in" in text
    assert "1 run left out" in text
    assert "torch" not in section(text, "The answer")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--baseline", "ppo_x"], "--baseline must be one of ppo_linen or ppo_torch_compile"),
        (["--only-runs", "nowhere"], "No such file"),
    ],
)
def test_bad_usage_is_one_sentence(two_platforms, tmp_path, arguments, words):
    status, _, said = run_command("report", two_platforms / "a", *arguments, "--out", tmp_path)
    assert status == 2
    assert words in said
    assert said.count("\n") == 1


# === Notebooks ==================================================================================
SHOWN = {
    "platforms": (">Platforms</h", "1 run stopped and resumed"),
    "phases": (">WSL2, Fast, 2 cores</h", "These runs have nothing on phases."),
}


def assert_says_nothing_of_when_it_ran(notebook):
    assert not [x.metadata for x in notebook.cells if x.metadata]
    assert "version" not in notebook.metadata.language_info


def code_of(notebook):
    return [x for x in notebook.cells if x.cell_type == "code"]


@pytest.mark.parametrize("path", sorted(ROOT.glob("analysis/*.ipynb")), ids=lambda x: x.stem)
def test_a_notebook_asks_for_sections_that_there_are(path):
    notebook = nbformat.read(path, 4)
    assert_says_nothing_of_when_it_ran(notebook)
    source = "\n".join(x.source for x in code_of(notebook))
    names = re.findall(r'show\(SOURCE, "(.*)"\)', source)
    assert names
    assert set(names) <= {*report.SECTIONS, "platforms"}


@pytest.mark.parametrize("name", SHOWN)
def test_notebooks_show_any_source(tmp_path, name):
    write_plain(write_grid(tmp_path / "here"), seed=3, resumed=[5])
    write_grid(tmp_path / "wsl2", envs=("CartPole-v1",), os="Linux-6.6-microsoft-standard-WSL2")
    notebook = nbformat.read(ROOT / f"analysis/{name}.ipynb", 4)
    first = code_of(notebook)[0]
    first.source = first.source.partition("SOURCE =")[0] + f"SOURCE = {str(tmp_path)!r}"
    nbformat.write(notebook, tmp_path / "copy.ipynb")
    notebooks.run(tmp_path / "copy.ipynb")
    notebook = nbformat.read(tmp_path / "copy.ipynb", 4)
    assert_says_nothing_of_when_it_ran(notebook)
    outputs = [x for cell in code_of(notebook) for x in cell.outputs]
    html = "".join(x.get("data", {}).get("text/html", "") for x in outputs)
    assert [x for x in SHOWN[name] if x not in html] == []

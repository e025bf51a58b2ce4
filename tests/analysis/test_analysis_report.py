"""Reports, their usage errors, and the notebooks that show sections of reports."""

import re
import subprocess
import sys

import nbformat
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from made_up import (
    CACHED,
    COMPILE,
    ENVS,
    LINEN,
    NNX,
    TORCH,
    data_of,
    foreign_runs,
    grid,
    only_experiment,
    run_command,
    write_grid,
    write_plain,
    write_table,
)

from analysis import checks, figures, formatting, measures, page, report, tables
from analysis.page import Text
from analysis.runs import load
from tools import notebooks

WHOLE = ["The answer", "Learning", "Time to a target return", "By environment", "Startup"]
WHOLE += ["Rollout and update", "Compile modes", "Memory", "The runs"]


def report_of(*arguments):
    """Write a report to the folder in the last argument. Return the text of report.md."""
    status, _, errors = run_command("report", *arguments)
    assert status == 0, errors
    text = (arguments[-1] / "report.md").read_text()
    assert "nan" not in text.lower()
    return text


@pytest.fixture
def quick(monkeypatch):
    """Skip the rendering of figures as PNG, which is slow."""
    monkeypatch.setattr(figures, "png", lambda figure: b"")


def titles(text, level=2):
    return re.findall(rf"^{'#' * level} (.*)", text, flags=re.MULTILINE)


def section(text, title):
    return re.split(r"^##+ ", text.split(f"# {title}\n")[1], flags=re.MULTILINE)[0]


def steady_of(frame):
    """Return the ratios of steady iteration times in a table of platforms or earlier results."""
    return frame.query("value == 'steady'")["estimate"].to_numpy()


# === Report =====================================================================================
def test_a_full_grid_gives_every_section_with_separate_files(tmp_path):
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
    assert "| network | script | runs | startup (s) | time per iteration (ms) |" in answer
    assert "time / ppo_linen time" in said
    place, _, sentence, *_ = said.splitlines()
    assert place == f"Report: {tmp_path}/report/report.html"
    assert sentence == answer.strip().splitlines()[0].replace("\\", "")


ALIKE = {LINEN: (5.0, 0.1), NNX: (5.0, 0.1)}
APART = {LINEN: (5.0, 0.1), TORCH: (5.0, 0.9)}
RATIO = r"[\d.]+ \[[\d.]+, [\d.]+\]"
SAME = r" No significant difference from it: "
SLOWER = r" Slower \(time / \w+ time\): "


@pytest.mark.parametrize(
    ("modes", "repeats", "rest"),
    [
        ({LINEN: (5.0, 0.1)}, 5, ""),
        ({LINEN: (5.0, 0.1)}, 1, r" One run each: no conclusion\."),
        (APART, 1, r" One run each: no conclusion\."),
        (ALIKE, 5, rf"{SAME}ppo_\w+\."),
        (ALIKE | {CACHED: (5.0, 0.1)}, 5, rf"{SAME}ppo_\w+ and ppo_\w+\."),
        (APART, 5, rf"{SLOWER}{TORCH} {RATIO}\."),
        (APART | {COMPILE: (5.0, 4.0)}, 5, rf"{SLOWER}{TORCH} {RATIO} and {COMPILE} {RATIO}\."),
        (ALIKE | APART, 5, rf"{SAME}ppo_\w+\.{SLOWER}{TORCH} {RATIO}\."),
    ],
)
def test_headline(modes, repeats, rest):
    runs = grid(modes, repeats=repeats, noise=0.02)
    found = report.headline(only_experiment(runs))
    times = r"[\d.]+ s with ppo_\w+((, the fastest script)|( and [\d.]+ s with ppo_\w+)|)"
    assert re.fullmatch(rf"On CartPole-v1, 100 iterations took {times}\.{rest}", found), found
    assert ("fastest" in found) == (repeats > 1 and len(modes) > 1)


def test_scripts_are_grouped_by_their_intervals():
    """If two scripts are close to a third one, they may still differ from each other."""
    noise = 0.03 * np.array([-1.2, -0.5, 0.0, 0.5, 1.2])
    seconds = {LINEN: np.zeros(5), NNX: 0.03 + noise, CACHED: 0.06 + noise[[2, 0, 4, 1, 3]]}
    runs = grid(dict.fromkeys(seconds, (5.0, 0.1)), repeats=5)
    for mode, logs in seconds.items():
        runs.loc[runs["mode"] == mode, "process"] = 10 * np.exp(logs)
    same, slower = report.comparisons(runs, "process", list(seconds))
    assert same == f"No significant difference from it: {NNX}."
    assert slower.startswith(f"Slower (time / {LINEN} time): {CACHED} 1.06")


def test_the_headline_does_not_compare_scripts_with_too_few_common_seeds():
    runs = grid(APART, repeats=5, noise=0.02)
    few = runs[(runs["mode"] == LINEN) | (runs["repeat"] == 1)]
    no_claim = f"Too few runs to compare: {TORCH}."
    assert report.headline(only_experiment(few)).endswith(f", the fastest script. {no_claim}")
    more = pd.concat([few, grid({NNX: (5.0, 0.9)}, repeats=5, noise=0.02, seed=1)])
    found = report.headline(only_experiment(more))
    assert re.search(rf"{SLOWER}{NNX} {RATIO}\. {no_claim}$", found)


def test_the_headline_uses_the_most_complete_duration_available():
    runs = grid(APART, repeats=5).assign(total=lambda x: x["process"] - x["imports"])
    known = {"process": "100 iterations", "total": "100 iterations without imports"}
    known["steady"] = "an iteration"
    for value, what in known.items():
        found = report.headline(only_experiment(runs))
        assert re.match(rf"On CartPole-v1, {what} took [\d.]+ m?s with ppo_linen", found)
        runs = runs.assign(**{value: np.nan})


def test_the_answer_mentions_a_busy_machine_and_runs_started_by_hand():
    known = grid(APART, repeats=2, machine="3fa9", cores=2, load=[9, 9, 9, 0], script=LINEN)
    hand = grid(APART, repeats=2, platform="Linux, x86_64", script=LINEN)
    of_machine, of_hand = measures.experiments(data_of(pd.concat([known, hand])))
    busy = "Other processes used the machine when 3 of 4 runs started, so"
    assert page.markdown(report.answer(of_machine)[1]).startswith(busy)
    assert report.answer(of_hand)[1] == Text(checks.BY_HAND)
    [alone] = measures.experiments(data_of(hand))
    assert len(report.answer(alone)) == 2


def test_whiskers_are_explained_only_if_they_are_drawn():
    runs = grid(APART, repeats=2)
    assert "whiskers" in page.markdown(report.answer(only_experiment(runs))[-1])
    assert "whiskers" not in page.markdown(report.answer(only_experiment(runs[::2]))[-1])


def test_a_ratio_with_a_very_wide_interval_is_shown_as_not_significant():
    assert formatting.ratio(1.004, 0.9, 1.1) == "1.004× [0.900, 1.100]"
    assert formatting.ratio(0.99, 0.01, 5571.9) == "0.990×, not significant"
    assert formatting.ratio(40, 1.5, 900) == "40.0× [1.5, 900.0]"
    assert formatting.ratio(2.0, float("nan"), float("nan")) == "2.00×"
    runs = grid(APART, repeats=2, noise=2.0)
    made = tables.make("answer", only_experiment(runs))
    assert made.note.endswith(
        "Not significant: the interval contains 1, and its ends differ by more than 100x."
    )
    assert "100x" not in tables.make("answer", only_experiment(grid(APART, repeats=2))).note


# === Platforms, baselines and earlier results ===================================================
def test_a_machine_is_listed_once_per_set_of_versions(tmp_path):
    """Scripts that import different packages share a row if no version differs."""
    write_grid(tmp_path, ("linen jit",), ENVS[:1])
    write_grid(tmp_path, ("torch compile",), ENVS[:1], versions={"torch": "2.13.0"})
    [row] = tables.machine_table(load(tmp_path).runs).cells.to_dict("records")
    assert (row["runs"], row["torch"], row["jax"], row["flax"]) == (
        "4",
        "2.13.0",
        "0.10.2",
        "0.12.8",
    )
    runs = load(tmp_path).runs.assign(started=["2026-02", "2026-01", "2026-04", "2026-03"])
    [row] = tables.machine_table(runs).frame.to_dict("records")
    assert (row["first"], row["last"]) == ("2026-01", "2026-04")
    write_grid(tmp_path, ("nnx cached_partial",), ENVS[:1], versions={"jax": "0.11.0"})
    assert len(tables.machine_table(load(tmp_path).runs).cells) == 3


def test_the_report_states_the_threads_of_pytorch():
    runs = grid({LINEN: (9.0, 1.0), TORCH: (9.0, 2.0)}, repeats=2)
    assert tables.threads(runs) == ""
    runs["num_threads"] = [np.nan, np.nan, 2, 1]
    assert tables.threads(runs) == "PyTorch threads: ppo_torch 1, 2. JAX uses all cores."


@pytest.fixture(scope="module")
def two_platforms(tmp_path_factory):
    folder = tmp_path_factory.mktemp("platforms")
    modes, wsl2 = ("linen jit", "torch compile"), "Linux-6.6-microsoft-standard-WSL2"
    write_grid(folder / "a", modes, ENVS[:1], repeats=3)
    write_grid(folder / "b", modes, ENVS[:1], repeats=3, slowdown=3.0, os=wsl2)
    return folder


def test_each_platform_has_a_chapter_and_platforms_are_compared(two_platforms, tmp_path, quick):
    text = report_of(two_platforms / "a", two_platforms / "b", "--out", tmp_path)
    chapters = ["Linux, Fast, 2 cores", "WSL2, Fast, 2 cores", "Learning", "Platforms"]
    assert titles(text)[:4] == chapters
    assert titles(text, 3).count("The answer") == 2
    assert steady_of(pd.read_csv(tmp_path / "tables/platforms.csv")) == pytest.approx(
        [3, 3], rel=0.1
    )
    text = report_of(two_platforms, "--baseline", "ppo_torch_compile", "--out", tmp_path)
    assert "| time / ppo_torch_compile time |" in text
    assert "| time / ppo_linen time |" not in text


def test_returns_come_first_and_combine_the_seeds_of_two_machines(tmp_path, quick):
    write_grid(tmp_path / "runs/a", ("linen jit",), ENVS[:1], repeats=3, machine="a")
    for seed in (3, 4, 5):  # seed 3 ran on both machines
        write_plain(tmp_path / "runs/b", seed=seed, machine="b")
    write_plain(tmp_path / "runs/b", seed=6, status="diverged")
    status, said, _ = run_command(
        "report", tmp_path / "runs", "--returns", "--out", tmp_path / "out"
    )
    assert status == 0 and "with ppo_linen (5 seeds, " in said.splitlines()[2]
    text = (tmp_path / "out/report.md").read_text()
    assert titles(text)[0] == "Learning"
    assert text.count("Learning curves") == 2  # the caption and the alt text of one figure
    assert "1 run diverged (NaN or infinite losses or parameters) and left out" in text


def against(new, old):
    """Return the only block of the section that compares two folders of runs."""
    [block] = report.against_section(load(new).runs, load(old).runs).blocks
    return block


def test_against_finds_the_slower_result(tmp_path):
    modes = ("linen jit",)
    write_grid(tmp_path / "old", modes, repeats=4)
    write_grid(tmp_path / "new", modes, repeats=4, slowdown=2.0, cores=64)  # on a different machine
    table = against(tmp_path / "new", tmp_path / "old")
    assert set(table.cells["verdict"]) == {"slower"}
    assert steady_of(table.frame) == pytest.approx(2, rel=0.1)
    # GPU runs are not compared with CPU runs on the same machine.
    write_grid(tmp_path / "new" / "gpu", modes, repeats=4, slowdown=0.1, device="H200")
    write_grid(tmp_path / "new" / "cpu", modes, repeats=4)
    table = against(tmp_path / "new", tmp_path / "old")
    assert steady_of(table.frame) == pytest.approx(1, rel=0.1)
    write_grid(tmp_path / "other", modes, envs=("CartPole-v0",))
    nothing = Text("There are no runs with the same settings to compare.")
    assert against(tmp_path / "new", tmp_path / "other") == nothing


def test_the_report_compares_with_earlier_results(two_platforms, tmp_path, quick):
    new, old = two_platforms / "b", two_platforms / "a"
    text = report_of(new, "--against", old, "--out", tmp_path)
    assert "slower" in section(text, "Comparison with the earlier results")


def test_only_runs_ignores_all_other_runs(tmp_path, quick):
    runs = write_grid(tmp_path / "runs", envs=ENVS[:1])
    (runs / "CartPole-v1__linen_jit__small__1" / "run.json").unlink()
    names = [x.name for x in runs.iterdir() if "linen" in x.name or "nnx" in x.name]
    (tmp_path / "names").write_text("\n".join(names))
    text = report_of(runs, "--only-runs", tmp_path / "names", "--out", tmp_path / "out")
    assert "Ignored: 2 runs in" in text
    assert "1 run left out" in text
    assert "torch" not in section(text, "The answer")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--baseline", "ppo_x"], "--baseline must be one of ppo_linen or ppo_torch_compile"),
        (["--only-runs", "nowhere"], "No such file"),
    ],
)
def test_usage_errors_are_one_line(two_platforms, tmp_path, arguments, words):
    status, _, said = run_command("report", two_platforms / "a", *arguments, "--out", tmp_path)
    assert status == 2
    assert words in said
    assert said.count("\n") == 1


def test_a_closed_pipe_ends_the_command_without_a_traceback(tmp_path):
    table = write_table(tmp_path / "t.csv", foreign_runs(commit="a" * 40))
    command = [sys.executable, "-m", "analysis", "pack", "--check", table]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    process.stdout.close()
    assert process.communicate()[1] == b""
    assert process.returncode == 141


# === Notebooks ==================================================================================
SHOWN = {
    "platforms": (">Platforms</h", "no durations: 1."),
    "phases": (">WSL2, Fast, 2 cores</h", "These runs have no data on phases."),
}


def assert_has_no_execution_metadata(notebook):
    assert not [x.metadata for x in notebook.cells if x.metadata]
    assert "version" not in notebook.metadata.language_info


def code_of(notebook):
    return [x for x in notebook.cells if x.cell_type == "code"]


@pytest.mark.parametrize("path", sorted(ROOT.glob("analysis/*.ipynb")), ids=lambda x: x.stem)
def test_notebooks_show_sections_that_exist(path):
    notebook = nbformat.read(path, 4)
    assert_has_no_execution_metadata(notebook)
    source = "\n".join(x.source for x in code_of(notebook))
    names = re.findall(r'show\(SOURCE, "(.*)"\)', source)
    assert names
    assert set(names) <= {*report.SECTIONS, "platforms"}


@pytest.mark.parametrize("name", SHOWN)
def test_notebooks_work_with_any_source(tmp_path, name):
    write_plain(write_grid(tmp_path / "here"), seed=3, resumed=[5])
    write_grid(tmp_path / "wsl2", envs=("CartPole-v1",), os="Linux-6.6-microsoft-standard-WSL2")
    notebook = nbformat.read(ROOT / f"analysis/{name}.ipynb", 4)
    first = code_of(notebook)[0]
    first.source = first.source.partition("SOURCE =")[0] + f"SOURCE = {str(tmp_path)!r}"
    nbformat.write(notebook, tmp_path / "copy.ipynb")
    notebooks.run(tmp_path / "copy.ipynb")
    notebook = nbformat.read(tmp_path / "copy.ipynb", 4)
    assert_has_no_execution_metadata(notebook)
    outputs = [x for cell in code_of(notebook) for x in cell.outputs]
    html = "".join(x.get("data", {}).get("text/html", "") for x in outputs)
    assert [x for x in SHOWN[name] if x not in html] == []

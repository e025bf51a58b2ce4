"""Documents: links lead somewhere, code runs, numbers are what the studies give."""

import argparse
import ast
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest
from conftest import ROOT
from running import arrays, rows, train
from sections import ROWS, read
from test_structure import changed_lines

from analysis import docs, stats, tables
from analysis.checks import problems
from analysis.formatting import number
from analysis.runs import load
from analysis.schema import SourceError
from studies.control import dearness_study
from studies.control import study as control
from studies.gpu import study as gpu

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("analysis/*.md")]
DOCUMENTS += ROOT.glob("studies/**/*.md")
FAULTS = {
    "control": 17,
    "doors": 7,
    "memory": 8,
    "minatar": 3,
    "peers": 3,
}


def prose(path):
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """As GitHub makes them: punctuation goes, spaces become hyphens."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if not re.match(r"\w+:", link):
            target, _, anchor = link.partition("#")
            file = (path.parent / target).resolve() if target else path
            assert file.exists(), link
            assert file.is_relative_to(ROOT), link
            assert not anchor or anchor in anchors(file), link


def blocks(heading, language):
    """The code of a section in docs/scripts.md."""
    page = (ROOT / "docs/scripts.md").read_text()
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


# === Load what was trained ======================================================================
def test_the_pages_lines_read_checkpoints(whole_run, tmp_path, monkeypatch):
    [code] = blocks("Save and resume", "python")
    for name in ("linen", "torch"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        for path in whole_run(f"ppo_{name}").folder.glob("checkpoint.*"):
            shutil.copy(path, tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    assert (names["kernel"].shape, names["weight"].shape) == ((4, 8), (8, 4))


def test_the_pages_lines_work_outside_the_projects_folder(whole_run, tmp_path):
    """By the variable that the page names; a script in more/ is imported as it says."""
    [code] = blocks("Use what was trained", "python")
    [command] = blocks("Use what was trained", "bash")
    (tmp_path / "play.py").write_text(f"from more.dqn_linen import Args\n{code}print(action)\n")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/mine").symlink_to(whole_run("ppo_linen").folder)
    line = command.replace("~/ppo-rosetta", str(ROOT)).replace("python", sys.executable, 1)
    said = subprocess.check_output(["bash", "-c", line], cwd=tmp_path, text=True)
    assert said in ("[0]\n", "[1]\n")


# === Change the network =========================================================================


def with_class(script, code):
    """A script's text with this class in place of its own of the same name."""
    name = ast.parse(code).body[0].name
    (old,) = [x for x in ast.parse(read(script)).body if getattr(x, "name", "") == name]
    lines = read(script).splitlines(keepends=True)
    lines[old.lineno - 1 : old.end_lineno] = [code]
    return "".join(lines)


@pytest.mark.parametrize(("script", "place"), [("ppo_linen", 0), ("ppo_torch", 1)])
def test_the_pages_network_trains(script, place, tmp_path, monkeypatch):
    copy = script.replace("ppo", "cnn")
    (tmp_path / f"{copy}.py").write_text(
        with_class(script, blocks("Change the network", "python")[place])
    )
    monkeypatch.syspath_prepend(tmp_path)
    [flags] = re.findall("ppo_cnn.py (--.+)", blocks("Change the network", "bash")[1])
    folder = train(copy, tmp_path, "run", *flags.split(), iterations=2)
    assert all(row["losses/value_loss"] > 0 for row in rows(folder))
    convolution = [x for name, x in arrays(folder).items() if "conv" in name]
    assert sorted(x.size for x in convolution if x.ndim)[-1] == 3 * 3 * 4 * 16
    assert all(x.any() for x in convolution)  # weights, biases that began as 0, and Adam's moments


def test_the_pages_flag_makes_a_wider_network(tmp_path):
    [flags] = re.findall("ppo_linen.py (--.+)", blocks("Change the network", "bash")[0])
    folder = train("ppo_linen", tmp_path, "run", *flags.split(), iterations=1)
    assert {x.shape for name, x in arrays(folder).items() if "Dense_1/kernel" in name} == {
        (256, 256)
    }


# === Numbers ====================================================================================
def words_of(name):
    """A page's text, without its line ends."""
    return " ".join((ROOT / name).read_text().split())


def column(table, title, source, where=None):
    """A column of one of a study's tables, by script."""
    cells = tables.make(table, docs.experiment_of(source, where)).cells
    return cells.set_index("script")[title]


def test_the_readme_answers_with_the_numbers_of_the_studies():
    page = words_of("README.md")
    training = column("answer", "100 iterations (s)", "studies/peers")
    jax = sorted(training[training.index.str.match("ppo_(linen|nnx|equinox)")], key=float)
    compiled, eager = training[["ppo_torch_compile", "ppo_torch"]]
    assert f"100 iterations takes {jax[0]} to {jax[-1]} s with its start. With PyTorch" in page
    assert f"in the same environments, it takes {compiled} to {eager} s" in page
    envs = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")
    cartpole, acrobot, mountain_car = map(torch_over_linen_in_gymnasium, envs)
    whole = torch_over_linen_in_gymnasium("CartPole-v1", "process")
    assert f"With PyTorch an iteration takes {cartpole} times as long" in page
    assert f"of 20 iterations, with its start, takes {whole} times as long" in page
    assert f"In Acrobot-v1 an iteration takes {acrobot} times as long" in page
    assert f"In MountainCar-v0 an iteration takes {mountain_car} times as long" in page
    startup = column("answer", "startup (s)", "studies/peers")
    eager, compiled = startup[["ppo_torch", "ppo_torch_compile"]]
    assert f"starts in {eager} s, and `ppo_torch_compile.py` in {compiled} s" in page
    small = f"has caught up after {crossing('studies/peers', 'small')} iterations"
    assert small in page and small in words_of("studies/peers/README.md")
    medium = crossing("studies/cpu", "medium")
    assert f"units it has caught up after {medium} iterations" in page
    study = words_of("studies/cpu/README.md")
    assert f"after {medium} iterations" in study
    assert f"takes {cartpole} times as long as `ppo_linen_gymnasium.py`" in study
    assert f"for an iteration, and {whole} times for all 20" in study
    assert f"Acrobot-v1 ({acrobot}) and MountainCar-v0 ({mountain_car})" in study


@pytest.mark.parametrize(
    ("size", "compiled_says", "eager_says"),
    [
        ("small", "iterations take {} times as long as Linen's. It", "iterations take {} times as"),
        ("medium", "and compiled PyTorch's {} times", "PyTorch's iterations take {} times as long"),
    ],
)
def test_the_study_of_seven_scripts_says_what_it_measured(size, compiled_says, eager_says):
    page = words_of("studies/cpu/README.md")
    ratio = column("answer", "times as long as ppo_linen", "studies/cpu", size)
    assert compiled_says.format(ratio["ppo_torch_compile"]) in page
    assert eager_says.format(ratio["ppo_torch"]) in page


def test_the_readme_says_of_robots_what_the_study_measured():
    page = words_of("README.md")
    steps = control.steps_table(ROOT / "studies/control/steps.jsonl").cells
    robots = steps[steps["environment"] != "Pendulum-v1"]["a step (µs)"]
    assert f"outside JAX, takes {robots.iloc[0]} to {robots.iloc[-1]} µs" in page
    left = dearness_study.left_table(ROOT / "studies/control/dearness.jsonl").cells
    longest = left.set_index("a step of the environment takes").loc["10 ms", "PPO, PyTorch"]
    assert f"Where it takes 10 ms, PPO in PyTorch takes {longest} times as long" in page
    cost = ROOT / "studies/control/cost.jsonl"
    robot = control.ppo_costs(cost).cells.set_index(["setting", "script"])
    robot = robot.loc[("PPO, 32 x 64, batches of 256", "torch_gymnasium")]
    ratio = robot["times as long as linen_gymnasium"]
    assert f"takes {ratio} times as much CPU time in uncompiled PyTorch" in page
    compiled = control.sac_costs(cost).cells.set_index("script").loc["torch_compile_gymnasium"]
    ratio = compiled["times as long as linen_gymnasium"]
    assert f"on one core the two cannot be told apart, {ratio}" in page


def test_the_readme_and_the_study_say_of_a_gpu_what_the_races_gave():
    page, study = words_of("README.md"), words_of("studies/gpu/README.md")
    path = ROOT / "studies/gpu/races.jsonl"
    ratios = gpu.ratio_table(path).cells.set_index(["environment", "network"]).loc["CartPole-v1"]
    small, medium, large = ratios["ppo_torch_compile"]
    assert f"takes {small} times as long in compiled PyTorch as in Linen" in page
    assert f"units {large} times. For robots" in page
    robots = gpu.robot_table(path).cells.set_index("script")["times as long as Linen"]
    ratio = robots["ppo_continuous_torch_compile_gymnasium"]
    assert f"compiled PyTorch takes {ratio} times as long as Linen for PPO" in page
    _, low, high = (float(x) for x in re.findall(r"[\d.]+", robots["sac_torch_compile_gymnasium"]))
    assert low < 1 < high
    # In the study's answer, ends of intervals are rounded to whole numbers.
    assert [rounded(x) for x in (small, medium, large)] == [(6, 10), (5, 9), (2, 3)]
    assert [rounded(x) for x in ratios["ppo_torch"]] == [(20, 29), (16, 23), (8, 10)]
    assert "6 to 10 times as long" in study and "5 to 9 times with medium ones" in study
    assert "2 to 3 times with large ones" in study and "20 to 29, 16 to 23 and 8 to 10" in study
    times = gpu.Times(path)
    uncompiled, compiled, linen = (
        [number(times.milliseconds(gpu.ppo(x, "CartPole-v1", size))) for size in gpu.SIZES]
        for x in ("torch", "torch_compile", "linen")
    )
    assert f"takes {uncompiled[0]} ms with small networks, and with medium ones no" in study
    assert f"longer, {uncompiled[1]} ms" in study and f"takes {compiled[0]} ms" in study
    assert linen[0] == "21.4" and linen[2] == "96.3"
    assert "takes 21 ms" in study and "52% of Linen's 96 ms" in study
    share = gpu.share_of_products(path, ("jax", "torch"))
    assert f"{share.estimate:.0%}" == "52%"


def rounded(text):
    """The ends of an interval's text, to whole numbers."""
    _, *ends = (round(float(x)) for x in re.findall(r"[\d.]+", text))
    return tuple(ends)


def torch_over_linen_in_gymnasium(env_id, value="steady"):
    runs = load(ROOT / "studies/cpu/gymnasium").runs
    found = stats.compare(runs[runs["env_id"] == env_id], value, "ppo_linen_gymnasium")
    return tables.texts(found[found["mode"] == "ppo_torch_gymnasium"]).iloc[0]


def crossing(source, size):
    """After how many iterations compiled PyTorch has overtaken the eager one."""
    cells = tables.make("break_even", docs.experiment_of(source, f"CartPole-v1 {size}")).cells
    cells = cells.set_index(["starts sooner", "overtaken by"])
    return cells.loc[("ppo_torch", "ppo_torch_compile"), "after iterations"]


@pytest.mark.parametrize("name", ["linen", "nnx", "equinox", "torch", "torch_compile"])
def test_the_table_of_ease_counts_right(name):
    script = f"ppo_{name}"
    lesson = len(read(script).partition("# === Run log")[0].splitlines())
    times = [
        column("startup", x, "studies/peers")[script] for x in ("startup (s)", "iteration 0 (s)")
    ]
    numbers = [lesson, changed_lines("ppo_linen", script), *times]
    row = " | ".join(map(str, [script, *numbers]))
    assert f"| {row} |" in words_of("docs/ease.md")


@pytest.mark.parametrize("name", ["linen", "nnx", "equinox", "torch"])
def test_ease_counts_the_lines_of_continuous_actions_right(name):
    added = changed_lines(f"ppo_{name}", f"ppo_continuous_{name}")
    others = changed_lines("ppo_continuous_linen", f"ppo_continuous_{name}")
    assert f"| ppo_continuous_{name} | {added} | {others} |" in words_of("docs/ease.md")


def test_ease_counts_the_lines_of_sac_right():
    page = words_of("docs/ease.md")
    linen, torch = changed_lines("dqn_linen", "sac_linen"), changed_lines("dqn_torch", "sac_torch")
    assert f"SAC differs from DQN in {linen} lines in Linen and in {torch} in PyTorch." in page


def test_ease_counts_the_lines_of_compiling_right():
    ppo, sac = (
        changed_lines(f"{name}_gymnasium", f"{name}_compile_gymnasium")
        for name in ("ppo_continuous_torch", "sac_torch")
    )
    said = f"Compiling PPO changes {ppo} lines of PyTorch's script for robots, and compiling SAC"
    assert f"{said} changes {sac}." in words_of("docs/ease.md")


def test_ease_counts_the_lines_of_gymnasiums_lessons_right():
    scripts = ("ppo_torch_gymnasium", "ppo_linen_gymnasium")
    torch, linen = (len(read(x).partition("# === Run log")[0].splitlines()) for x in scripts)
    page = words_of("docs/ease.md")
    assert f"PyTorch's lesson has {torch} lines, and Linen's has {linen}." in page


def test_every_number_in_the_documents_is_what_the_studies_give(capsys):
    """`python -m analysis docs` writes them; a block that is written by hand would differ."""
    assert docs.run(argparse.Namespace(check=True)) == 0, capsys.readouterr().out
    texts = [x.read_text() for pattern in docs.FILES for x in ROOT.glob(pattern)]
    assert sum(x.count("<!-- end -->") for x in texts) == sum(
        len(docs.BLOCK.findall(x)) for x in texts
    )


def test_a_changed_number_is_found_and_written_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "FILES", ("README.md",))
    (tmp_path / "studies").symlink_to(ROOT / "studies")
    block = "<!-- answer of studies/peers in CartPole-v1 small 100it -->\nby hand\n<!-- end -->\n"
    (tmp_path / "README.md").write_text(block)
    assert docs.run(argparse.Namespace(check=True)) == 1
    assert "README.md: not what the studies give" in capsys.readouterr().out
    assert docs.run(argparse.Namespace(check=False)) == 0
    assert "| sb3 | 5 | 4.24 |" in (tmp_path / "README.md").read_text()
    monkeypatch.setitem(docs.SCRIPTS, "ppo_yours", ROWS["ppo_linen"] | {"teaches": "nothing"})
    table = docs.renewed("<!-- table of scripts.toml -->\n<!-- end -->").splitlines()
    assert table[-2] == "| [ppo_yours](more/ppo_yours.py) | discrete | JAX | nothing |"
    with pytest.raises(SourceError, match="no block is called"):
        docs.renewed("<!-- nothing of studies/peers -->\n<!-- end -->")


def test_the_committed_studies_load_and_their_faults_are_known():
    studies = [path.parent for path in ROOT.glob("studies/**/runs.csv")]
    assert len(studies) >= 8
    for study in studies:
        name = study.relative_to(ROOT / "studies").as_posix()
        assert len(problems(load(study))) == FAULTS.get(name, 0), name

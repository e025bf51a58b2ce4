"""Documents: links lead somewhere, code runs, numbers are what the studies give."""

import re
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT
from sections import ROWS, changed_lines, read

from analysis import stats, tables
from analysis.checks import problems
from analysis.formatting import number
from analysis.runs import load
from analysis.schema import SourceError
from studies.gpu import study as gpu
from tools import docs

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


# === Numbers ====================================================================================
def words_of(name):
    """A page's text, without its line ends."""
    return " ".join((ROOT / name).read_text().split())


def column(table, title, source, where=None):
    """A column of one of a study's tables, by script."""
    cells = tables.make(table, docs.experiment_of(source, where)).cells
    return cells.set_index("script")[title]


def test_studies_of_libraries_and_of_seven_scripts_say_what_they_measured():
    small = f"has caught up after {crossing('studies/peers', 'small')} iterations"
    assert small in words_of("studies/peers/README.md")
    study = words_of("studies/cpu/README.md")
    assert f"after {crossing('studies/cpu', 'medium')} iterations" in study
    envs = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")
    cartpole, acrobot, mountain_car = map(torch_over_linen_in_gymnasium, envs)
    whole = torch_over_linen_in_gymnasium("CartPole-v1", "process")
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


def test_the_study_of_a_gpu_says_what_the_races_gave():
    study = words_of("studies/gpu/README.md")
    path = ROOT / "studies/gpu/races.jsonl"
    ratios = gpu.ratio_table(path).cells.set_index(["environment", "network"]).loc["CartPole-v1"]
    small, medium, large = ratios["ppo_torch_compile"]
    robots = gpu.robot_table(path).cells.set_index("script")["times as long as Linen"]
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
    """`python -m tools.docs` writes them; a block that is written by hand would differ."""
    assert docs.write(check=True) == 0, capsys.readouterr().out
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
    assert docs.write(check=True) == 1
    assert "README.md: not what the studies give" in capsys.readouterr().out
    assert docs.write(check=False) == 0
    assert "| sb3 | 5 | 4.24 |" in (tmp_path / "README.md").read_text()
    monkeypatch.setitem(docs.SCRIPTS, "ppo_yours", ROWS["dqn_linen"] | {"teaches": "nothing"})
    table = docs.renewed("<!-- table of scripts.toml -->\n<!-- end -->").splitlines()
    assert table[-2] == "| `more/ppo_yours.py` | nothing |"
    with pytest.raises(SourceError, match="no block is called"):
        docs.renewed("<!-- nothing of studies/peers -->\n<!-- end -->")


def test_the_matrix_has_each_script_once_in_the_column_of_its_framework():
    matrix = docs.renewed("<!-- matrix of scripts.toml -->\n<!-- end -->").splitlines()[3:-1]
    cells = [line.strip("| ").split(" | ") for line in matrix]
    found = Counter(Path(x).stem for x in re.findall(r"\]\((.+?)\)", "".join(matrix)))
    assert found == Counter(ROWS.keys())
    by_files = {row[1]: row for row in cells}
    assert by_files["`more/sac_*_gymnasium.py`"][0] == "SAC, Gymnasium"
    row = "| [linen](more/ppo_rnn_linen.py) | [nnx](more/ppo_rnn_nnx.py) |"
    assert any(x.startswith(f"| PPO, memory | `more/ppo_rnn_*.py` {row}") for x in matrix)
    assert matrix[0].count("](ppo_nnx") == 3 and matrix[0].endswith("(ppo_torch_compile.py) |")


def test_the_committed_studies_load_and_their_faults_are_known():
    studies = [path.parent for path in ROOT.glob("studies/**/runs.csv")]
    assert len(studies) >= 8
    for study in studies:
        name = study.relative_to(ROOT / "studies").as_posix()
        assert len(problems(load(study))) == FAULTS.get(name, 0), name

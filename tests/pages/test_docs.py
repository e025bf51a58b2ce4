"""Documentation: valid links, and numbers that match the studies."""

import re
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT
from sections import ROWS

from analysis.catalog import FRAMEWORKS
from analysis.checks import problems
from analysis.runs import load
from analysis.schema import SourceError
from tools import docs, idioms

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("analysis/*.md")]
DOCUMENTS += ROOT.glob("studies/**/*.md")
KNOWN_PROBLEMS = {
    "robots": 17,
    "doors": 7,
    "recurrent": 8,
    "minatar": 3,
    "peers": 3,
    "ppo_or_sac": 5,
    "atari": 1,
    "simulators": 7,
    "robots/compiled": 1,
    "returns": 26,
    "returns/earlier": 7,
}


def prose(path):
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """Return the anchors that GitHub gives the headings: no punctuation, hyphens for spaces."""
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
def test_numbers_in_the_documents_match_the_studies(capsys):
    """`python -m tools.docs` generates the blocks with numbers; manual edits are errors."""
    assert docs.write(check=True) == 0, capsys.readouterr().out
    texts = [x.read_text() for pattern in docs.FILES for x in ROOT.glob(pattern)]
    assert sum(x.count("<!-- end -->") for x in texts) == sum(
        len(docs.BLOCK.findall(x)) for x in texts
    )


def test_a_changed_number_is_found_and_rewritten(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "FILES", ("README.md",))
    (tmp_path / "studies").symlink_to(ROOT / "studies")
    block = "<!-- answer of studies/peers in CartPole-v1 small 100it -->\nby hand\n<!-- end -->\n"
    (tmp_path / "README.md").write_text(block)
    assert docs.write(check=True) == 1
    assert "README.md: out of date" in capsys.readouterr().out
    assert docs.write(check=False) == 0
    assert "| sb3 | 5 | 4.24 |" in (tmp_path / "README.md").read_text()
    monkeypatch.setitem(docs.SCRIPTS, "ppo_yours", ROWS["dqn_linen"] | {"teaches": "nothing"})
    table = docs.renewed("<!-- table of scripts.toml -->\n<!-- end -->").splitlines()
    assert table[-2] == "| `more/ppo_yours.py` | nothing |"
    with pytest.raises(SourceError, match="no block is called"):
        docs.renewed("<!-- nothing of studies/peers -->\n<!-- end -->")


def test_the_idioms_page_contains_every_excerpt_and_heading():
    """test_numbers_in_the_documents_match_the_studies checks that the page is up to date."""
    page = ROOT / "docs/idioms.md"
    text = page.read_text()
    for idiom in idioms.read_idioms(ROOT):
        assert f"](#{idioms.anchor(idiom['title'])})" in text
        assert idioms.anchor(idiom["title"]) in anchors(page)
        for framework in FRAMEWORKS:
            assert all(idioms.excerpt(ROOT, x).code in text for x in idiom[framework])


def test_the_matrix_has_each_script_once_in_the_column_of_its_framework():
    matrix = docs.renewed("<!-- matrix of scripts.toml -->\n<!-- end -->").splitlines()[3:-1]
    cells = [line.strip("| ").split(" | ") for line in matrix]
    found = Counter(Path(x).stem for x in re.findall(r"\]\((.+?)\)", "".join(matrix)))
    assert found == Counter(ROWS.keys())
    by_files = {row[1]: row for row in cells}
    assert by_files["`more/sac_*_gymnasium.py`"][0] == "SAC, Gymnasium"
    row = "| [linen](more/ppo_rnn_linen.py) | [nnx](more/ppo_rnn_nnx.py) |"
    assert any(x.startswith(f"| PPO, recurrent | `more/ppo_rnn_*.py` {row}") for x in matrix)
    assert matrix[0].count("](ppo_nnx") == 3 and matrix[0].endswith("(ppo_torch_compile.py) |")


def test_committed_studies_load_and_have_only_known_problems():
    studies = [path.parent for path in ROOT.glob("studies/**/runs.csv")]
    assert len(studies) >= 8
    for study in studies:
        name = study.relative_to(ROOT / "studies").as_posix()
        assert len(problems(load(study))) == KNOWN_PROBLEMS.get(name, 0), name

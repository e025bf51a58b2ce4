"""Documents: links lead somewhere, numbers are what the studies give, studies are sound."""

import argparse
import re

import pytest
from conftest import ROOT

from analysis import docs
from analysis.checks import problems
from analysis.runs import load
from analysis.schema import SourceError

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("analysis/*.md")]
DOCUMENTS += ROOT.glob("studies/**/*.md")
FAULTS = {"cpu/slow": 7, "plain/linen": 1, "plain/plain": 1, "minatar": 3, "dqn": 11, "doors": 7}
FAULTS["agents"] = 1  # one scan of 32 and of 64 agents has two repeats of three


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


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1500


def test_every_number_in_the_documents_is_what_the_studies_give(capsys):
    """`python -m analysis docs` writes them; a block that is written by hand would differ."""
    assert docs.run(argparse.Namespace(check=True)) == 0, capsys.readouterr().out
    texts = [x.read_text() for pattern in docs.FILES for x in ROOT.glob(pattern)]
    assert sum(x.count("<!-- end -->") for x in texts) == sum(
        len(docs.BLOCK.findall(x)) for x in texts
    )


def test_a_changed_number_is_found_and_written_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    (tmp_path / "studies").symlink_to(ROOT / "studies")
    block = "<!-- answer of studies/peers in CartPole-v1 small 100it -->\n{}<!-- end -->\n"
    (tmp_path / "README.md").write_text("# A\n" + block.format("by hand\n"))
    monkeypatch.setattr(docs, "FILES", ("README.md",))
    assert docs.run(argparse.Namespace(check=True)) == 1
    assert "README.md: not what the studies give" in capsys.readouterr().out
    assert docs.run(argparse.Namespace(check=False)) == 0
    text = (tmp_path / "README.md").read_text()
    assert "| sb3 | 10 | 4" in text
    assert docs.run(argparse.Namespace(check=True)) == 0
    for wrong in ("nothing of studies/peers", "answer of studies/peers in Pong"):
        with pytest.raises(SourceError, match=r"no block is called|has no run in Pong"):
            docs.renewed(f"<!-- {wrong} -->\n<!-- end -->")


def test_the_committed_studies_load_and_their_faults_are_known():
    studies = [path.parent for path in ROOT.glob("studies/**/runs.csv")]
    assert len(studies) >= 8
    for study in studies:
        name = study.relative_to(ROOT / "studies").as_posix()
        assert len(problems(load(study))) == FAULTS.get(name, 0), name

"""Documents: relative links lead to files, anchors to headings; the README is short."""

import re

import pytest
from conftest import ROOT

from analysis import docs, pack
from analysis.runs import load

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("analysis/*.md")]
DOCUMENTS += [ROOT / "results" / "PERFORMANCE.md"]


def prose(path):
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """As GitHub makes them: punctuation goes, spaces become hyphens."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(path))
    for link in links:
        if not re.match(r"\w+:", link):
            target, _, anchor = link.partition("#")
            file = (path.parent / target).resolve() if target else path
            assert file.exists() and file.is_relative_to(ROOT), link
            assert not anchor or anchor in anchors(file), link


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1500


@pytest.mark.parametrize("name", docs.FILES)
def test_every_number_is_what_the_results_give(name):
    """`python -m analysis.docs` writes them; a block that is written by hand would differ."""
    text = (ROOT / name).read_text()
    assert docs.renewed(text) == text
    assert text.count("<!-- end -->") == len(docs.BLOCK.findall(text))


def test_a_changed_number_is_written_anew():
    text = (ROOT / "README.md").read_text()
    assert docs.renewed(re.sub(r"\| ppo_torch \|.*", "| ppo_torch | 1 |", text)) == text


def test_the_committed_studies_load_and_their_faults_are_known():
    known = {"cpu-slow": 7, "cpu-linen": 1, "cpu-plain": 1, "minatar": 3, "dqn": 11, "doors": 7}
    known |= {"agents": 1}  # one scan of 32 and of 64 agents has two repeats of three
    studies = [path.parent for path in ROOT.glob("studies/**/runs.csv")]
    assert len(studies) >= 8
    for study in studies:
        assert len(pack.problems(load(study))) == known.get(study.name, 0), study.name

"""Documents: relative links lead to files, anchors to headings; the README is short."""

import re

import pytest
from conftest import ROOT

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

"""Who imports whom: the arrows of the house that CONTRIBUTING.md draws."""

import ast
from pathlib import Path

from conftest import ROOT

# Room -> those that it may import from, beside itself. A study is a room of its own.
BELOW = {
    "scripts": set(),
    "analysis": set(),
    "programs": {"analysis"},
    "studies": {"analysis", "programs", "scripts"},
    "tools": {"analysis", "programs", "scripts", "studies"},
}
# Studies that take from another what runs other libraries.
BESIDE = {("studies/control", "studies/peers"), ("studies/memory", "studies/peers")}
FOLDERS = {"analysis": "analysis", "envs": "scripts", "more": "scripts"}
FOLDERS |= {"site": "tools", "tools": "tools"}


def room_of(path: Path) -> str:
    """A room, or studies/NAME; of the files beside this project's folders, the scripts' or not."""
    first, *rest = path.relative_to(ROOT).parts
    if first == "studies" and len(rest) > 1:
        return f"studies/{rest[0]}"
    return FOLDERS.get(first, "scripts" if first.startswith("ppo_") else "programs")


def file_of(name: str, importer: Path) -> Path | None:
    """The file of this project that a dotted name leads to, if one does."""
    parts = name.split(".")
    folders = [ROOT, importer.parent, ROOT / "more", ROOT / "studies/peers"]  # as on sys.path
    for end in range(len(parts), 0, -1):
        for folder in folders:
            path = folder.joinpath(*parts[:end]).with_suffix(".py")
            if path.exists():
                return path
    return None


def imported_by(path: Path) -> set[Path]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {x.name for x in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{x.name}" for x in node.names}
    return {found for name in names if (found := file_of(name, path))}


def test_no_arrow_points_back():
    paths = [x for folder in (*FOLDERS, "studies") for x in (ROOT / folder).rglob("*.py")]
    wrong: dict[tuple[str, str], str] = {}
    for path in [*ROOT.glob("*.py"), *paths]:
        for other in imported_by(path):
            arrow = (room_of(path), room_of(other))
            room, below = (x.partition("/")[0] for x in arrow)
            if arrow[0] != arrow[1] and below not in BELOW[room]:
                wrong[arrow] = f"{path.name} imports {other.name}"
    assert wrong.keys() == BESIDE, wrong

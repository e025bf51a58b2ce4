"""Imports between packages follow the architecture in CONTRIBUTING.md."""

import ast
from pathlib import Path

from conftest import ROOT

# Package -> the other packages that it may import. Each study is a separate package.
BELOW = {
    "scripts": set(),
    "analysis": set(),
    "bench": {"analysis"},
    "commands": {"analysis", "bench"},
    "studies": {"analysis", "bench", "scripts"},
    "tools": {"analysis", "bench", "scripts", "studies"},
}
# (A, B): study A uses the code in study B that runs other libraries.
BESIDE = {("studies/control", "studies/peers"), ("studies/recurrent", "studies/peers")}
BESIDE |= {("studies/atari", "studies/control"), ("studies/returns", "studies/peers")}
FOLDERS = {"analysis": "analysis", "bench": "bench", "envs": "scripts", "more": "scripts"}
FOLDERS |= {"site": "tools", "tools": "tools"}


def package_of(path: Path) -> str:
    """Return the package of a file, such as bench or studies/NAME."""
    first, *rest = path.relative_to(ROOT).parts
    if first == "studies" and len(rest) > 1:
        return f"studies/{rest[0]}"
    return FOLDERS.get(first, "scripts" if first.startswith("ppo_") else "commands")


def file_of(name: str, importer: Path) -> Path | None:
    """Return the file that defines a dotted name, or None if it is outside this project."""
    parts = name.split(".")
    peers = (ROOT / "studies/peers", ROOT / "studies/control/peers")
    folders = [ROOT, importer.parent, ROOT / "more", *peers]  # on sys.path in the scripts
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


def test_imports_follow_the_architecture():
    paths = [x for folder in (*FOLDERS, "studies") for x in (ROOT / folder).rglob("*.py")]
    wrong: dict[tuple[str, str], str] = {}
    for path in [*ROOT.glob("*.py"), *paths]:
        for other in imported_by(path):
            pair = (package_of(path), package_of(other))
            package, imported = (x.partition("/")[0] for x in pair)
            if pair[0] != pair[1] and imported not in BELOW[package]:
                wrong[pair] = f"{path.name} imports {other.name}"
    assert wrong.keys() == BESIDE, wrong

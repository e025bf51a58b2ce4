"""The lines of JSON that this study's measurements write and go on from, and how they fail."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn


def fail(reason: str) -> NoReturn:
    print(reason, file=sys.stderr)
    sys.exit(2)


def read(path: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return a file's lines, each of which has these names; of no file, none.

    A last line that was not written to its end is dropped, also from the file. Another file ends
    the program by a sentence, and stays as it is.
    """
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    rows = []
    for i, line in enumerate(lines):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict) and all(name in row for name in names):
            rows.append(row)
        elif row is not None or i + 1 < len(lines) or not rows:
            fail(f"{path}: line {i + 1} is none of this measurement")
    if lines:
        path.write_text("".join(f"{line}\n" for line in lines[: len(rows)]))
    return rows


def same_place(row: dict[str, Any], where: dict[str, Any]) -> bool:
    """Say whether a line is of this commit, machine and versions.

    A commit with changes counts as the commit, since the measurement's own file may be one of them.
    """
    keys = [key for key in where if key != "commit"]
    commits = {str(x["commit"]).removesuffix("-dirty") for x in (row, where)}
    return len(commits) == 1 and all(row[key] == where[key] for key in keys)


def positive(text: str) -> int:
    """Read a number of rounds from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return int(text)

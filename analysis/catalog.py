"""Load project constants: the scripts, networks, environments and table columns.

This module imports only the standard library, so it is fast to import.
"""

import csv
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Framework names in tables and figures.
FRAMEWORKS = {
    "torch": "PyTorch",
    "linen": "Flax Linen",
    "nnx": "Flax NNX",
    "equinox": "Equinox",
}
# The reason for which benchmark.sh and the analysis leave out a run with the status "diverged".
DIVERGED = "diverged: NaN or infinite losses or parameters"
FIELDS: dict[str, type] = {"folder": str, "algorithm": str, "framework": str, "compile": str}
FIELDS |= {"setting": str, "steps": int, "teaches": str}


class CatalogError(ValueError):
    """Raised if a data file of this project cannot be used; the message is one sentence."""


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogError(f"{path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CatalogError(f"{path.name} is not valid TOML: {error}") from error


def read_csv(name: str) -> list[dict[str, str]]:
    with open(HERE / name, newline="") as file:
        return list(csv.DictReader(file))


def read_scripts() -> dict[str, dict[str, Any]]:
    """Return the tables in scripts.toml, by script name.

    In an installed package, the file is in this folder; in a checkout, in the parent folder.
    """
    path = HERE / "scripts.toml"
    if not path.exists():
        path = HERE.parent / "scripts.toml"
    rows = read_toml(path)
    if not rows:
        raise CatalogError("scripts.toml has no scripts")
    for name, row in rows.items():
        if not isinstance(row, dict):
            raise CatalogError(f"scripts.toml, {name} must be a table, not {row!r}")
        for field, kind in FIELDS.items():
            if not isinstance(row.get(field), kind):
                wanted = f"{field} must be {'a number' if kind is int else 'text'}"
                raise CatalogError(f"scripts.toml, {name}: {wanted}")
    return rows


def read_sizes() -> dict[str, list[int]]:
    """Return the number of units in each hidden layer, by network name."""
    sizes = read_toml(HERE / "sizes.toml")
    for name, units in sizes.items():
        if not isinstance(units, list) or not all(type(x) is int and x > 0 for x in units):
            raise CatalogError(f"sizes.toml: {name} must be a list of positive integers")
    return sizes


SCRIPTS = read_scripts()
SIZES = read_sizes()
ENVIRONMENTS = {row.pop("env_id"): row for row in read_csv("environments.csv")}
COLUMNS = read_csv("columns.csv")


def file_of(script: str) -> str:
    """Return the path of a script in this project, relative to the project root."""
    return str(Path(SCRIPTS[script]["folder"], f"{script}.py"))


def is_continuous(script: str) -> bool:
    """Return whether a script in this project is for continuous actions."""
    row = SCRIPTS[script]
    return row["algorithm"] == "sac" or row["setting"].startswith("continuous")

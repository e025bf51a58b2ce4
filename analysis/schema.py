"""What a table of runs and one of iterations hold: columns.csv says it, and this file checks it."""

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

FLAGS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
MOST_TEXT = 4000  # characters: settings have some 600
VERSIONS = ("python", "torch", "jax", "jaxlib", "flax", "optax", "gymnax", "numpy")


class SourceError(ValueError):
    """A source that cannot be used; the message is one sentence for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(clean(message))


class Kind(NamedTuple):
    words: str  # in a sentence on a value that is not of the kind
    dtype: str
    default: Any  # where there is no value


KINDS = {
    "text": Kind("text", "str", ""),
    "flag": Kind("true or false", "bool", False),
    "number": Kind("a number", "float64", math.nan),
    "seconds": Kind("a number above 1e-9 and below 1e9", "float64", math.nan),
    "count": Kind("a whole number above 0", "float64", math.nan),
    "widths": Kind("a list of whole numbers above 0", "object", None),
    "list": Kind("a list of whole numbers", "object", None),
}


class Column(NamedTuple):
    """A column of a table, or a value of run.json that columns are worked out from."""

    name: str
    kind: str  # a key of KINDS
    must: str  # who cannot be without it: "run", a run of ours, or "table", that too
    source: str  # where run.json has it: "args.seed"; "" if it is worked out
    meaning: str  # for the data dictionary, in Markdown


def read_columns(table: str) -> tuple[Column, ...]:
    with open(Path(__file__).with_name("columns.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    return tuple(Column(*(x[y] for y in Column._fields)) for x in rows if x["table"] == table)


RUNS = read_columns("runs")
INPUTS = read_columns("inputs")  # what run.json holds for columns that are worked out
ITERATIONS = read_columns("iterations")


# === One value ==================================================================================
def clean(text: object) -> str:
    """Return text without what a terminal or a reader could be misled by: control characters."""
    start = str(text)[:MOST_TEXT]
    return "".join(x if x.isprintable() else "\N{REPLACEMENT CHARACTER}" for x in start)


def is_number(x: Any) -> bool:
    return type(x) in (int, float) and abs(x) < 1e100  # neither a flag nor NaN nor infinite


def of_kind(x: Any, kind: str) -> bool:
    match kind:
        case "text":
            return isinstance(x, str)
        case "flag":
            return isinstance(x, bool)
        case "widths":
            return isinstance(x, list) and all(type(n) is int and n > 0 for n in x)
        case "list":
            return isinstance(x, list) and all(type(n) is int for n in x)
        case "seconds":
            return is_number(x) and 1e-9 < x < 1e9
        case "count":
            return is_number(x) and x == int(x) and 0 < x < 1e15
    return is_number(x)


def is_missing(x: Any) -> bool:
    return x is None or x is pd.NA or x is pd.NaT or (isinstance(x, float) and math.isnan(x))


def from_table(x: Any, kind: str) -> Any:
    """Return a cell of a foreign table as the kind has it, if it can be read as that."""
    if is_missing(x) or (kind != "text" and str(x).strip() == ""):
        return None
    if kind == "text":
        return str(x)
    if kind == "flag":
        return FLAGS.get(str(x).strip().lower(), x)
    try:
        return x if isinstance(x, bool) else float(x)
    except (TypeError, ValueError):
        return str(x)  # a cell may hold a list, which is not hashable


def check(values: Mapping[str, Any], columns: Iterable[Column], must: tuple[str, ...]) -> None:
    """Raise ValueError, one reason for a user, for a value that is missing or not of its kind.

    values maps what a column is called in run.json, or else its name; null counts as missing.
    """
    for column in columns:
        name = column.source or column.name
        value = values.get(name)
        if is_missing(value):
            if column.must in must:
                raise ValueError(f"{name} is missing")
        elif not of_kind(value, column.kind):
            raise ValueError(f"{name} is {clean(repr(value)):.40}, not {KINDS[column.kind].words}")


# === Whole tables ===============================================================================
def numbers(values: pd.Series, column: Column) -> pd.Series:
    """Return a foreign column as numbers; raise ValueError as check() if it holds anything else."""
    if values.dtype.kind not in "iuf":
        values = pd.Series([from_table(x, column.kind) for x in values], values.index, dtype=object)
        values = values.where(values.notna(), None)
    for x in values.unique().tolist():
        check({column.name: x}, [column._replace(source="")], ("table",))
    return values.astype("float64")


def complete(table: pd.DataFrame, columns: Iterable[Column]) -> pd.DataFrame:
    """Return a checked table with every column, in one order and with one type each."""
    done = {}
    for column in columns:
        kind = KINDS[column.kind]
        values = table[column.name] if column.name in table else pd.Series(None, table.index)
        if kind.dtype == "str":
            done[column.name] = values.map(lambda x: "" if is_missing(x) else clean(x)).astype(str)
        else:
            filled = values.astype(object).where(values.notna(), kind.default)
            done[column.name] = filled.astype(kind.dtype)
    return pd.DataFrame(done, index=table.index)


def dictionary(columns: Iterable[Column]) -> str:
    """Return the columns as a table in Markdown; those that every table needs are in bold."""
    lines = ["| column | type | meaning |", "|---|---|---|"]
    for column in columns:
        name = f"**`{column.name}`**" if column.must == "table" else f"`{column.name}`"
        lines.append(f"| {name} | {column.kind} | {column.meaning} |")
    return "\n".join(lines)

"""Validate tables of runs and of iterations against columns.csv."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd

from analysis.catalog import COLUMNS

FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False, "": False}
VERSIONS = ("python", "torch", "jax", "jaxlib", "flax", "optax", "gymnax", "numpy")


class SourceError(ValueError):
    """Raised if a source cannot be used; the message is one sentence for the user."""


class Kind(NamedTuple):
    """The values allowed in a column."""

    dtype: str
    description: str = ""  # for error messages
    low: float = math.nan  # exclusive lower bound
    high: float = math.nan  # exclusive upper bound


KINDS = {
    "text": Kind("str"),
    "flag": Kind("bool", "true or false"),
    "number": Kind("float64", "a number", -1e100, 1e100),
    "seconds": Kind("float64", "a number above 1e-9 and below 1e9", 1e-9, 1e9),
    "count": Kind("float64", "a whole number above 0", 0, 1e15),
}


class Column(NamedTuple):
    name: str
    kind: str  # a key of KINDS
    must: str  # "table" if a table must have this column
    source: str  # path in run.json, such as "args.seed"; "" if it is computed


def columns_of(table: str) -> tuple[Column, ...]:
    rows = [row for row in COLUMNS if row["table"] == table]
    return tuple(Column(*(row[name] for name in Column._fields)) for row in rows)


RUNS = columns_of("runs")
ITERATIONS = columns_of("iterations")


def clean(text: object) -> str:
    """Return text without control characters, which another person's runs may contain."""
    return "".join(x if x.isprintable() else "\N{REPLACEMENT CHARACTER}" for x in str(text))


# === Untrusted values ===========================================================================
def validate(table: pd.DataFrame, columns: Iterable[Column]) -> tuple[pd.DataFrame, pd.Series]:
    """Return an untrusted table with all columns in order, converted to their types.

    Also return an error message for each row, or "" if the row is valid.
    """
    table = table.reset_index(drop=True)
    reasons = pd.Series("", table.index, dtype=object)
    done = {}
    for column in columns:
        given = table[column.name] if column.name in table else pd.Series("", table.index)
        values, wrong = convert(given, column.kind)
        for i, cell in given[wrong].items():
            shown = repr(cell) if isinstance(cell, str) else str(cell)
            kind = KINDS[column.kind].description
            reasons[i] = f"{column.name} is {shown:.40}, not {kind}"
        if column.must and column.kind == "text":
            reasons[values == ""] = f"{column.name} is missing"
        done[column.name] = values
    return pd.DataFrame(done, index=table.index), reasons


def convert(given: pd.Series, kind: str) -> tuple[pd.Series, pd.Series]:
    """Return the values converted to a kind, and which of them are not allowed."""
    if kind == "text":
        texts = given.astype(object).where(given.notna(), "")
        return texts.map(clean).astype("str"), pd.Series(False, given.index)
    if kind == "flag":
        texts = given.astype(object).where(given.notna(), "")
        flags = texts.map(lambda x: FLAGS.get(str(x).strip().lower()))
        return flags.astype("bool"), flags.isna()
    numbers = given.astype(object).where(given.notna(), math.nan)
    if not set(map(type, numbers)) <= {float}:  # an int may be too large for a float
        numbers = numbers.map(to_number)
    numbers = numbers.astype("float64")
    fits = numbers.between(KINDS[kind].low, KINDS[kind].high, inclusive="neither")
    if kind == "count":
        fits &= numbers % 1 == 0
    return numbers, numbers.notna() & ~fits


def to_number(cell: object) -> float:
    """Return a cell as a number: NaN if it is empty, infinity if it is not a number."""
    try:
        return float(str(cell).strip() or "nan")
    except ValueError:
        return math.inf

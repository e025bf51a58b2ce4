"""Races by turns: what race.py writes, and what it says of two programs.

A race is lines of JSON. The first says which programs raced, where and how; each further line is a
turn of one program: how many iterations it had, and how many seconds they took.
"""

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
from pydantic import BaseModel, Field, TypeAdapter

from analysis.formatting import number
from analysis.schema import SourceError, clean
from analysis.stats import NOTHING, Interval, median_interval

LEAST_TURNS = 6  # for an interval


class Turn(NamedTuple):
    """What a program did in one turn."""

    turn: int
    program: int  # its number
    iterations: Annotated[int, Field(gt=0)]
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Info(BaseModel, extra="allow"):
    """What must stand in a race's first line."""

    programs: list[str]
    thrown_away: int
    args: dict[str, Any]


class Race(NamedTuple):
    """A race: what its first line says, and its turns."""

    info: dict[str, Any]
    turns: list[Turn]

    def times(self) -> pd.DataFrame:
        """Return seconds an iteration takes: a row for each turn that counts, a column a program.

        A program that was left out has NaN, or no column.
        """
        turns = pd.DataFrame(self.turns, columns=Turn._fields)
        turns["each"] = turns["seconds"] / turns["iterations"]
        counted = turns[turns["turn"] >= self.info["thrown_away"]]
        table = counted.pivot(index="turn", columns="program", values="each")
        return table.rename(columns=dict(enumerate(map(clean, self.info["programs"]))))

    def ratios(self) -> dict[str, Interval]:
        """Return how many times as long as the first's each other program's iteration takes.

        The first is the first that has not been left out.
        """
        times = self.times()
        first = self.first()
        return {x: ratio_of(times[x], times[first]) for x in times.columns if x != first}

    def first(self) -> str:
        """The name of the program that the others are compared with."""
        last = self.times().iloc[-2:].dropna(axis=1, how="all")  # the last round may be cut
        return str(next(iter(last.columns), ""))

    def sentences(self, within: float) -> list[str]:
        """Return what is known of each program and the first, in a sentence each."""
        first = self.first()
        return [sentence(name, first, ratio, within) for name, ratio in self.ratios().items()]


def read(path: Path) -> list[Race]:
    """Return the races of a file, in which they stand one after the other."""
    races: list[Race] = []
    try:
        whole = path.read_text(errors="replace").rpartition("\n")[0]  # a last line may be cut
        for line in whole.splitlines():
            row = json.loads(line)
            if "programs" in row:
                races.append(Race(Info(**row).model_dump(), []))
            else:
                races[-1].turns.append(TypeAdapter(Turn).validate_python(row))
        for race in races:
            race.times()  # where a turn stands twice, there is no table
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise SourceError(f"{path} is no file of race.py: {error}") from error
    return races


def named(path: Path) -> dict[str, Race]:
    """Return the races that a study lists, by name; one that was held twice as it was last."""
    return {x.info["listed"]["name"]: x for x in read(path) if x.info.get("listed")}


def ratio_of(times: pd.Series, first: pd.Series) -> Interval:
    """Return the median of the ratios of two programs' times, turn by turn, and its 95% interval.

    The interval is that of order statistics. A burst of other work spoils the ratio of a turn, and
    a median does not mind by how much.
    """
    ratios = (times / first).dropna()
    if ratios.empty:
        return NOTHING
    return Interval(*(float(np.exp(x)) for x in median_interval(np.log(ratios.to_numpy()))))


def is_known(ratio: Interval, within: float) -> bool:
    """Whether the interval reaches no further than that share from the estimate."""
    return ratio.high / ratio.estimate <= 1 + within and ratio.low / ratio.estimate >= 1 - within


def sentence(name: str, first: str, ratio: Interval, within: float) -> str:
    """What a race says of two programs."""
    inside = f"{ratio.low:.3f} to {ratio.high:.3f}"
    if 1 - within < ratio.low and ratio.high < 1 + within:
        return f"{name} and {first} are equally fast here to within {100 * within:g}% ({inside})."
    if not (ratio.low > 1 or ratio.high < 1):  # NaN, too: a few turns have no interval
        return f"{name} and {first} cannot be told apart: {ratio.estimate:.3f} ({inside})."
    if ratio.estimate > 1:
        return f"{first} is {number(ratio.estimate)} times as fast as {name} here ({inside})."
    inverse = Interval(1 / ratio.estimate, 1 / ratio.high, 1 / ratio.low)
    inside = f"{inverse.low:.3f} to {inverse.high:.3f}"
    return f"{name} is {number(inverse.estimate)} times as fast as {first} here ({inside})."

"""Races by turns: what race.py writes, and what it says of two programs.

A race is lines of JSON. The first says which programs raced, where and how; each further line is a
turn of one program: how many iterations it had, and how many seconds they took.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.schema import SourceError
from analysis.stats import NOTHING, Interval, median_interval

LEAST_TURNS = 6  # for an interval


class Turn(NamedTuple):
    """What a program did in one turn."""

    turn: int
    program: int  # its number
    iterations: int
    seconds: float


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
        return table.rename(columns=dict(enumerate(self.info["programs"])))

    def ratios(self) -> dict[str, Interval]:
        """Return how many times as long as the first program's each other's iteration takes."""
        times = self.times()
        return {name: ratio_of(times[name], times.iloc[:, 0]) for name in times.columns[1:]}

    def sentences(self, within: float) -> list[str]:
        """Return what is known of each program and the first, in a sentence each."""
        ratios = self.ratios()
        first = self.times().columns[:1]
        return [sentence(name, first[0], ratio, within) for name, ratio in ratios.items()]


def read(path: Path) -> list[Race]:
    """Return the races of a file, in which they stand one after the other."""
    races: list[Race] = []
    try:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "programs" in row:
                races.append(Race(row, []))
            else:
                races[-1].turns.append(Turn(**row))
    except (OSError, ValueError, IndexError, TypeError) as error:
        raise SourceError(f"{path} is no file of race.py: {error}") from error
    return races


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
        return f"{name} and {first} are equally fast here to within {within:.0%} ({inside})."
    if not (ratio.low > 1 or ratio.high < 1):  # NaN, too: a few turns have no interval
        return f"{name} and {first} cannot be told apart: {ratio.estimate:.3f} ({inside})."
    if ratio.estimate > 1:
        return f"{first} is {ratio.estimate:.3g} times as fast as {name} here ({inside})."
    inverse = Interval(1 / ratio.estimate, 1 / ratio.high, 1 / ratio.low)
    inside = f"{inverse.low:.3f} to {inverse.high:.3f}"
    return f"{name} is {inverse.estimate:.3g} times as fast as {first} here ({inside})."

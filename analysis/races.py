"""Races by turns: what race.py writes, and what it says of two programs.

A race is a file of lines of JSON. The first says which programs raced, where and how; each further
one is a turn of one program: how many iterations it took and how many seconds they were.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.schema import SourceError
from analysis.stats import Interval, median_interval


class Race(NamedTuple):
    """A race: what its first line says, and its turns."""

    info: dict[str, Any]  # programs, machine, versions, arguments of race.py
    turns: pd.DataFrame  # turn, program (its number), iterations, seconds

    def times(self) -> list[np.ndarray]:
        """Seconds an iteration takes, for each program, in each turn that counts."""
        each = self.turns.assign(each=self.turns["seconds"] / self.turns["iterations"])
        table = each.pivot(index="turn", columns="program", values="each")
        counted = table[table.index >= self.info["thrown_away"]].dropna()
        return [counted[i].to_numpy() for i in range(len(self.info["programs"]))]


def read(path: Path) -> list[Race]:
    """Return the races of a file, in which they stand one after the other."""
    races: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    try:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "programs" in row:
                races.append((row, []))
            else:
                races[-1][1].append(row)
    except (OSError, ValueError, IndexError, TypeError) as error:
        raise SourceError(f"{path} is no file of race.py: {error}") from error
    columns = ["turn", "program", "iterations", "seconds"]
    return [Race(info, pd.DataFrame(rows, columns=columns)) for info, rows in races]


def ratio_of(times: Sequence[float], first: Sequence[float]) -> Interval:
    """Return how many times as long as the first program's an iteration takes, and an interval.

    times and first are seconds an iteration, turn by turn. The estimate is the median of the turns'
    ratios, and the interval, of 95%, is that of their order statistics: a burst of other work
    spoils the ratio of a turn, and a median does not mind by how much.
    """
    logs = np.log(np.asarray(times, float) / np.asarray(first, float))
    return Interval(*(float(np.exp(x)) for x in median_interval(logs)))


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


def sentences(names: Sequence[str], times: Sequence[Iterable[float]], within: float) -> list[str]:
    """What a race says of each program and the first."""
    first, *others = zip(names, map(list, times), strict=True)
    return [sentence(name, first[0], ratio_of(x, first[1]), within) for name, x in others]

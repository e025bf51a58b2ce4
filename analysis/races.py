"""Read and summarize the output of race.py, which interleaves programs.

A race is stored as lines of JSON. The first line describes the programs, the machine and the
settings. Each further line is a turn of one program: the number of iterations and their duration
in seconds. In each round, every program has one turn.
"""

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
from pydantic import AliasChoices, BaseModel, Field, TypeAdapter

from analysis.formatting import number
from analysis.schema import SourceError
from analysis.stats import NOTHING, Interval, median_interval

LEAST_TURNS = 6  # minimum number of rounds for an interval


class Turn(NamedTuple):
    """Number of iterations of one program in one round, and their duration."""

    turn: int  # round number, from 0
    program: int  # index in the list of programs
    iterations: Annotated[int, Field(gt=0)]
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Info(BaseModel, extra="allow"):
    """Fields in the first line of a race."""

    programs: list[str]
    # Number of initial rounds that are ignored; older files call it thrown_away.
    discarded: int = Field(validation_alias=AliasChoices("discarded", "thrown_away"))
    args: dict[str, Any]
    steps: list[int | None] = []  # environment steps per iteration of each program, if known


class Race(NamedTuple):
    """The first line of a race, and its turns."""

    info: dict[str, Any]
    turns: list[Turn]

    def times(self) -> pd.DataFrame:
        """Return the times per iteration in seconds, with a row per round and a column per program.

        A program that failed has NaN in the last rounds, or no column.
        """
        turns = pd.DataFrame(self.turns, columns=Turn._fields)
        turns["each"] = turns["seconds"] / turns["iterations"]
        counted = turns[turns["turn"] >= self.info["discarded"]]
        table = counted.pivot(index="turn", columns="program", values="each")
        return table.rename(columns=dict(enumerate(self.names())))

    def names(self) -> list[str]:
        return self.info["programs"]

    def steps(self) -> dict[str, int]:
        """Return the environment steps per iteration, for the programs that report them."""
        steps = self.info.get("steps") or [None] * len(self.names())
        return {name: x for name, x in zip(self.names(), steps, strict=True) if x}

    def is_per_step(self) -> bool:
        """Return whether programs are compared per environment step instead of per iteration."""
        return set(self.times()) <= set(self.steps())

    def compared_times(self) -> pd.DataFrame:
        """Return times() per environment step if all steps are known; otherwise, per iteration."""
        times = self.times()
        if not self.is_per_step():
            return times
        return times / pd.Series(self.steps())[times.columns]

    def ratios(self) -> dict[str, Interval]:
        """Return, by program name, the ratio of each time to the time of the first program."""
        times = self.compared_times()
        first = self.first()
        return {x: ratio_of(times[x], times[first]) for x in times.columns if x != first}

    def first(self) -> str:
        """Return the name of the first program that did not fail."""
        last = self.times().iloc[-2:].dropna(axis=1, how="all")  # the last round may be incomplete
        return str(next(iter(last.columns), ""))

    def sentences(self, within: float) -> list[str]:
        """Return sentences that compare every other program with the first."""
        first = self.first()
        return [sentence(name, first, ratio, within) for name, ratio in self.ratios().items()]

    def turns_needed(self, within: float) -> float:
        """Estimate the number of rounds until all ratios have the relative precision `within`.

        The result is NaN if there are too few rounds.

        The width of an interval decreases with the square root of the number of rounds.
        """
        ratios = self.ratios().values()
        widths = [max(x.high / x.estimate - 1, 1 - x.low / x.estimate) for x in ratios]
        if not widths or not within:
            return np.nan
        return self.info["discarded"] + len(self.times()) * (max(widths) / within) ** 2


def read(path: Path) -> list[Race]:
    """Return the races in a file."""
    races: list[Race] = []
    try:
        complete = path.read_text(errors="replace").rpartition("\n")[0]
        for line in complete.splitlines():
            row = json.loads(line)
            if "programs" in row:
                races.append(Race(Info(**row).model_dump(), []))
            else:
                races[-1].turns.append(TypeAdapter(Turn).validate_python(row))
        for race in races:
            race.times()  # raises ValueError if a program has two turns in a round
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SourceError(f"{path} was not written by race.py: {error}") from error
    return races


def named(path: Path) -> dict[str, Race]:
    """Return the races of a study by name; if a race was repeated, the last counts."""
    return {x.info["listed"]["name"]: x for x in read(path) if x.info.get("listed")}


def ratio_of(times: pd.Series, first: pd.Series) -> Interval:
    """Return the median, over rounds, of the ratio of two times, with its 95% interval.

    The interval comes from order statistics, so a burst of other load in a few rounds does not
    affect it.
    """
    ratios = (times / first).dropna()
    if ratios.empty:
        return NOTHING
    return Interval(*(float(np.exp(x)) for x in median_interval(np.log(ratios.to_numpy()))))


def is_known(ratio: Interval, within: float) -> bool:
    """Return whether both ends of an interval deviate from the estimate by at most `within`."""
    return ratio.high / ratio.estimate <= 1 + within and ratio.low / ratio.estimate >= 1 - within


def sentence(name: str, first: str, ratio: Interval, within: float) -> str:
    """Return a sentence that compares two programs."""
    if np.isnan(ratio.low):
        return f"{name} and {first}: too few rounds to compare them."
    inside = f"95% interval {ratio.low:.3f} to {ratio.high:.3f}"
    if 1 - within < ratio.low and ratio.high < 1 + within:
        return f"{name} and {first} are equally fast here, to within {100 * within:g}% ({inside})."
    if ratio.low <= 1 <= ratio.high:
        both = f"{name} and {first}"
        return f"No significant difference between {both}: {ratio.estimate:.3f} ({inside})."
    if ratio.estimate > 1:
        return f"{first} is {number(ratio.estimate)}x as fast as {name} here ({inside})."
    inverse = Interval(1 / ratio.estimate, 1 / ratio.high, 1 / ratio.low)
    inside = f"95% interval {inverse.low:.3f} to {inverse.high:.3f}"
    return f"{name} is {number(inverse.estimate)}x as fast as {first} here ({inside})."

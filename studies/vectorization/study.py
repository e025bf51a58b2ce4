"""A table and a figure of what many environments at once cost, from what measure.py measured."""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import figures, stats
from analysis.page import Table
from analysis.schema import SourceError
from analysis.words import interval, number
from studies.vectorization.measure import GAMES, WAYS

COLOURS = ("#E69F00", "#D55E00", "#CC79A7", "#009E73", "#56B4E9", "#0072B2")
SHOWN = (1, 64, 1024, 4096)  # environments, in the table
STARTING = 1024


def read(path: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return the settings of a file, and a row per game, way and number of environments.

    A row has the geometric mean of the seconds and its interval, and the median of start.
    """
    table = []
    names = ["game", "way", "num_envs"]
    try:
        about, *rows = map(json.loads, path.read_text().splitlines())
        about["num_steps"] = int(about["num_steps"])
        for row in rows:
            fine = [0 < row[name] < math.inf for name in ("num_envs", "seconds", "start")]
            if row["game"] not in GAMES or row["way"] not in WAYS or not all(fine):
                raise ValueError(f"{row} is no measurement")
        for _, group in pd.DataFrame(rows).groupby(names, sort=False):
            row = group.iloc[0][names].to_dict()
            row |= stats.geometric_mean(group["seconds"].to_numpy())._asdict()
            table.append(row | {"start": float(group["start"].median()), "repeats": len(group)})
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise SourceError(f"{path} is no file of measure.py: {error}") from error
    return about, pd.DataFrame(table)


def table(path: Path) -> Table:
    """Return the seconds of each game and way at some numbers of environments, to be read."""
    about, frame = read(path)
    cells = []
    for game, way in product(GAMES, WAYS):
        here = frame[(frame["game"] == game) & (frame["way"] == way)].set_index("num_envs")
        if here.empty:
            continue
        row = {"game": game, "way": way} | {f"{x:,} at once (s)": "-" for x in SHOWN}
        for num_envs in here.index.intersection(SHOWN):
            one = here.loc[num_envs]
            row[f"{num_envs:,} at once (s)"] = interval(one["estimate"], one["low"], one["high"])
        starts = here["start"].get(STARTING, np.nan)
        cells.append(row | {f"start at {STARTING:,} (s)": number(starts)})
    caption = f"Seconds for {about['num_steps']} steps of all environments"
    return Table("vectorization", caption, frame, pd.DataFrame(cells))


def draw(table: pd.DataFrame, num_steps: int) -> Figure:
    """Plot seconds against the number of environments, a panel for each game."""
    with figures.in_style():
        games = [x for x in GAMES if x in set(table["game"])]
        figure, panels = figures.make_panels(games, len(games), 4.0)
        looks = dict(zip(WAYS, zip(COLOURS, "sXpD^o", strict=True), strict=True))
        for axes, game in zip(panels, games, strict=True):
            for way, (colour, marker) in looks.items():
                part = table[(table["game"] == game) & (table["way"] == way)].sort_values(
                    "num_envs"
                )
                x, y = part["num_envs"], part["estimate"]
                axes.fill_between(x, part["low"], part["high"], color=colour, alpha=0.18, lw=0)
                axes.plot(x, y, color=colour, marker=marker, mec="white")
            sizes = sorted(set(table["num_envs"]))
            figures.set_log(axes, "x", sizes[0] / 1.3, sizes[-1] * 1.3, 10)
            axes.set_xticks(sizes)
            ends = table[["estimate", "low", "high"]]  # NaN around a single run
            figures.set_log(axes, "y", ends.min().min() / 1.3, ends.max().max() * 1.3, 10)
            axes.set_xlabel("parallel environments")
        panels[0].set_ylabel(f"seconds for {num_steps} steps of all of them")
        entries = [
            (Line2D([], [], color=colour, marker=marker), way)
            for way, (colour, marker) in looks.items()
            if way in set(table["way"])
        ]
        figures.add_legend(figure, entries)
    return figure


BLOCKS = {"vectorization": table}


def update(source: Path, out: Path) -> None:
    """Draw the study's figure."""
    about, rows = read(source / "measured.jsonl")
    (out / "vectorization.png").write_bytes(figures.png(draw(rows, about["num_steps"])))

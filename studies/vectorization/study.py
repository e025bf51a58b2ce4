"""A table and a figure of what many environments at once cost, from what measure.py measured."""

import json
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import figures, stats, words
from analysis.page import Table
from studies.vectorization.measure import GAMES, WAYS

LOOKS = {  # way -> colour, marker
    "sync": ("#E69F00", "s"),
    "async": ("#D55E00", "X"),
    "vector": ("#CC79A7", "p"),
    "envpool": ("#009E73", "D"),
    "gymnax step": ("#56B4E9", "^"),
    "gymnax scan": ("#0072B2", "o"),
}
SHOWN = (1, 64, 1024, 4096)  # environments, in the table
STARTING = 1024
KEYS = ["game", "way", "num_envs"]


def read(path: Path) -> tuple[int, pd.DataFrame]:
    """Return the steps of a measurement, and a row per game, way and number of environments.

    A row has the geometric mean of the seconds and its interval, and the median of start.
    """
    about, *measured = map(json.loads, path.read_text().splitlines())
    rows = []
    for _, group in pd.DataFrame(measured).groupby(KEYS):
        row = group.iloc[0][KEYS].to_dict()
        row |= stats.geometric_mean(group["seconds"].to_numpy())._asdict()
        rows.append(row | {"start": group["start"].median(), "repeats": len(group)})
    frame = pd.DataFrame(rows)
    frame["game"] = pd.Categorical(frame["game"], list(GAMES))  # in this order
    frame["way"] = pd.Categorical(frame["way"], WAYS)
    return about["num_steps"], frame.sort_values(KEYS, ignore_index=True)


def table(path: Path) -> Table:
    """Return the seconds of each game and way at some numbers of environments, to be read."""
    num_steps, frame = read(path)
    shown = frame[frame["num_envs"].isin(SHOWN)]
    rows = shown[["estimate", "low", "high"]].itertuples(index=False)
    cells = shown.assign(text=[words.interval(*row) for row in rows])
    cells = cells.pivot(index=["game", "way"], columns="num_envs", values="text")
    cells = cells.rename(columns="{:,} at once (s)".format)
    starts = shown[shown["num_envs"] == STARTING].set_index(["game", "way"])["start"]
    cells[f"start at {STARTING:,} (s)"] = starts.map(words.number)
    caption = f"Seconds for {num_steps} steps of all environments"
    return Table("vectorization", caption, frame, cells.fillna("-").reset_index())


@figures.styled
def draw(frame: pd.DataFrame, num_steps: int) -> Figure:
    """Plot seconds against the number of environments, a panel for each game."""
    games = list(frame["game"].unique())
    figure, panels = figures.make_panels(games, len(games), 4.0)
    sizes = sorted(set(frame["num_envs"]))
    ends = frame[["estimate", "low", "high"]]  # NaN around a single run
    for axes, game in zip(panels, games, strict=True):
        for way, (colour, marker) in LOOKS.items():
            part = frame[(frame["game"] == game) & (frame["way"] == way)]
            x = part["num_envs"]
            axes.fill_between(x, part["low"], part["high"], color=colour, alpha=0.18, lw=0)
            axes.plot(x, part["estimate"], color=colour, marker=marker, mec="white")
        figures.set_log(axes, "x", sizes[0] / 1.3, sizes[-1] * 1.3, 10)
        axes.set_xticks(sizes)
        figures.set_log(axes, "y", ends.min().min() / 1.3, ends.max().max() * 1.3, 10)
        axes.set_xlabel("parallel environments")
    panels[0].set_ylabel(f"seconds for {num_steps} steps of all of them")
    entries = [
        (Line2D([], [], color=colour, marker=marker), way)
        for way, (colour, marker) in LOOKS.items()
        if way in set(frame["way"])
    ]
    figures.add_legend(figure, entries)
    return figure


BLOCKS = {"vectorization": table}


def update(source: Path, out: Path) -> None:
    """Draw the study's figure."""
    num_steps, frame = read(source / "measured.jsonl")
    (out / "vectorization.png").write_bytes(figures.png(draw(frame, num_steps)))

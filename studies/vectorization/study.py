"""A table and a figure of what many environments at once cost, from what measure.py measured."""

import json
from pathlib import Path

import pandas as pd

from analysis import figures, formatting, stats
from analysis.page import Table
from analysis.tables import across, texts
from studies.vectorization.measure import GAMES, WAYS

LOOKS = {
    "sync": {"color": figures.ORANGE, "marker": "s"},
    "async": {"color": figures.RED, "marker": "X"},
    "vector": {"color": figures.PURPLE, "marker": "p"},
    "envpool": {"color": figures.GREEN, "marker": "D"},
    "gymnax step": {"color": figures.SKY, "marker": "^"},
    "gymnax scan": {"color": figures.BLUE, "marker": "o"},
}
GAME = "CartPole-v1"  # in the table; the figure has both
SHOWN = (1, 64, 1024, 4096)  # environments, in the table
STARTING = 1024
KEYS = ["game", "way", "num_envs"]


def read(path: Path) -> tuple[int, pd.DataFrame]:
    """Return the steps of a measurement, and a row per game, way and number of environments.

    A row has the geometric mean of the seconds and its interval, and the median of start.
    """
    about, *lines = map(json.loads, path.read_text().splitlines())
    measured = pd.DataFrame(lines)
    frame = stats.of_groups(measured, KEYS, "seconds", stats.geometric_mean)
    frame = frame.join(measured.groupby(KEYS)["start"].median(), on=KEYS)
    frame = frame.sort_values("num_envs")
    for name, order in (("way", list(WAYS)), ("game", list(GAMES))):
        frame = frame.sort_values(name, key=lambda x, y=order: x.map(y.index), kind="stable")
    return about["num_steps"], frame


def table(path: Path) -> Table:
    """Return the seconds of each way in one game at some numbers of environments, to be read."""
    num_steps, frame = read(path)
    shown = frame[frame["num_envs"].isin(SHOWN) & (frame["game"] == GAME)]
    titles = shown["num_envs"].map("{:,} at once (s)".format)
    cells = across(shown.assign(title=titles), texts(shown), ["way"], "title")
    starts = shown[shown["num_envs"] == STARTING].set_index("way")["start"]
    starts = starts.map(formatting.number).rename(f"start at {STARTING:,} (s)")
    cells = cells.join(starts, on="way").fillna("-")
    caption = f"Seconds for {num_steps} steps of all environments"
    return Table("vectorization", caption, frame, cells)


BLOCKS = {"vectorization": table}


def update(source: Path, out: Path) -> None:
    """Draw the study's figure."""
    num_steps, frame = read(source / "measured.jsonl")
    points = frame.rename(columns={"game": "panel", "way": "mode", "num_envs": "x"})
    label = f"seconds for {num_steps} steps of all of them"
    figure = figures.bands(points, LOOKS, "parallel environments", label, log=True)
    (out / "vectorization.png").write_bytes(figures.png(figure))

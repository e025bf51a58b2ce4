"""Accuracy of race.py: races between copies and between two scripts, in four conditions."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import races
from analysis.page import Table
from analysis.stats import Interval
from analysis.tables import multiple, table_of, text, value

# Condition -> suffix of the file name.
WAYS = {
    "idle, two cores": "quiet",
    "idle, one core": "quiet_one_core",
    "other load, two cores": "busy",
    "other load, one core": "busy_one_core",
}


def copies_table(folder: Path) -> Table:
    """Return one row per condition: number of intervals that contain 1, and median half-width."""
    rows = []
    for way, name in WAYS.items():
        held, widths, turns = [], [], []
        found = races.read(folder / f"{name}.jsonl")
        for race in found:
            times = race.times()
            turns.append(len(times))
            for first, second in combinations(times, 2):
                ratio = races.ratio_of(times[second], times[first])
                held.append(ratio.low <= 1 <= ratio.high)
                widths.append(max(ratio.high / ratio.estimate - 1, 1 - ratio.low / ratio.estimate))
        wide = f"{np.median(widths):.1%}"
        rows.append((way, len(found), int(np.median(turns)), len(held), sum(held), wide))
    names = ["way", "races", "turns", "pairs", "held", "width"]
    columns = {
        "machine": text("way"),
        "races": text("races"),
        "rounds": text("turns"),
        "pairs of copies": text("pairs"),
        "intervals that contain 1": text("held"),
        "median half-width": text("width"),
    }
    return table_of("race_copies", "Copies", pd.DataFrame(rows, columns=names), columns)


def pair_table(folder: Path) -> Table:
    """Return the ratio and its interval, with one row per condition and race."""
    rows = []
    for way, name in WAYS.items():
        for race in races.read(folder / f"pair_{name}.jsonl"):
            ratio = next(iter(race.ratios().values()))
            rows.append((way, race.info["load"], len(race.times()), *ratio))
    names = ["way", "load", "turns", *Interval._fields]
    columns = {
        "machine": text("way"),
        "initial load": value("load"),
        "rounds": text("turns"),
        "ppo_torch / ppo_linen time": multiple(),
    }
    return table_of("race_pair", "Pair", pd.DataFrame(rows, columns=names), columns)


BLOCKS = {"race_copies": copies_table, "race_pair": pair_table}

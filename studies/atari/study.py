"""Environment steps per second of PPO in Pong, for our scripts and other libraries, from races."""

from pathlib import Path

import pandas as pd

from analysis import figures, races
from analysis.page import Table
from analysis.schema import SourceError
from analysis.stats import Interval
from analysis.tables import multiple, table_of, text, value

LINEN = "Linen"
RACES = ("one core", "two cores")
PRECISIONS = ("", ", bfloat16")
OURS = (LINEN, *(f"{x}{y}" for x in ("compiled PyTorch", "PyTorch") for y in PRECISIONS))


def costs(path: Path, name: str) -> pd.DataFrame:
    """Return a row per program of a race: environment steps per second, and the ratio to Linen."""
    found = races.named(path)
    if name not in found:
        raise SourceError(f"{path} has no race '{name}'")
    times = found[name].compared_times()
    rows = [
        (program, 1 / times[program].median(), *races.ratio_of(times[program], times[LINEN]))
        for program in times
    ]
    return pd.DataFrame(rows, columns=["program", "speed", *Interval._fields])


def cost_table(path: Path) -> Table:
    """Return a row per program, with its speed and ratio on one core and on two."""
    both = [costs(path, name).set_index("program").add_prefix(f"{name}_") for name in RACES]
    frame = pd.concat(both, axis=1).reset_index()
    columns = {"program": text("program")}
    for name in RACES:
        columns[f"{name} (steps/s)"] = value(f"{name}_speed")
        columns[f"time / Linen time, {name}"] = ratio_to_linen(name)
    return table_of("atari_cost", "Pong", frame, columns)


def ratio_to_linen(name: str):
    """Return a function that writes the ratio of a program in a race."""
    written = multiple(f"{name}_")
    return lambda row: "1.00×" if row["program"] == LINEN else written(row)


BLOCKS = {"atari_cost": cost_table}


def update(source: Path, out: Path) -> None:
    """Draw the figure of the study."""
    panels = {name: costs(source / "races.jsonl", name) for name in RACES}
    label = "time per step / Linen time per step"
    (out / "answer.png").write_bytes(figures.png(figures.ratios(panels, OURS, label)))

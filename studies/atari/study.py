"""PPO in Pong: speed of our scripts and other libraries, from races, and learning curves."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import figures, races
from analysis.formatting import number
from analysis.page import Table
from analysis.runs import load
from analysis.schema import SourceError
from analysis.stats import Interval
from analysis.tables import multiple, table_of, text, value

LINEN = "Linen"
RACES = ("one core", "two cores")
PRECISIONS = ("", ", bfloat16")
OURS = (LINEN, *(f"{x}{y}" for x in ("compiled PyTorch", "PyTorch") for y in PRECISIONS))

KEYS = ["run", "seed"]
STEPS = (500_000, 1_000_000, 1_500_000, 2_000_000)
WINDOW = 100_000  # steps over which returns are averaged
# Million steps and returns, read from CleanRL's figure PongNoFrameskip-v4.png (commit 2fff248d).
CLEANRL = ((1, -9.0), (1.5, 5.0), (2, 12.5))


def costs(path: Path, name: str) -> pd.DataFrame:
    """Return one row per program in a race: environment steps per second and ratio to Linen."""
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
    """Return one row per program, with its speed and ratio in each race."""
    both = [costs(path, name).set_index("program").add_prefix(f"{name}_") for name in RACES]
    frame = pd.concat(both, axis=1).reset_index()
    columns = {"program": text("program")}
    for name in RACES:
        columns[f"{name} (steps/s)"] = value(f"{name}_speed")
        columns[f"time / Linen time, {name}"] = ratio_to_linen(name)
    return table_of("atari_cost", "Pong", frame, columns)


def ratio_to_linen(name: str):
    """Return a function that formats the ratio of a row in the given race."""
    written = multiple(f"{name}_")
    return lambda row: "1.00×" if row["program"] == LINEN else written(row)


def read(source: Path) -> pd.DataFrame:
    """Return one row per iteration in which an episode finished. KEYS are the first columns."""
    data = load(source)
    rows = data.iterations.merge(data.runs[KEYS], on="run")
    rows = rows.rename(columns={"charts/episodic_return": "return", "charts/episodes": "episodes"})
    columns = [*KEYS, "global_step", "return", "episodes", "time/elapsed"]
    return rows[rows["episodes"] > 0][columns].sort_values(["seed", "global_step"])


def return_at(run: pd.DataFrame, step: float) -> float:
    """Return the mean return of the episodes that finished in the last WINDOW steps."""
    recent = run[(run["global_step"] > step - WINDOW) & (run["global_step"] <= step)]
    if recent.empty:
        return np.nan
    return float(np.average(recent["return"], weights=recent["episodes"]))


def learning_table(source: Path) -> Table:
    """Return one row per run: its duration, and its return after each of STEPS."""
    rows = []
    for _, run in read(source).groupby("run", sort=False):
        row = {"seed": str(int(run["seed"].iloc[0]))}
        row["minutes"] = number(run["time/elapsed"].iloc[-1] / 60)
        for step in STEPS:
            row[f"after {step / 1e6:g}M steps"] = number(return_at(run, step))
        rows.append(row)
    cells = pd.DataFrame(rows)
    return Table("atari_learning", "Return by environment steps", cells, cells)


@figures.styled
def draw_learning(source: Path) -> Figure:
    """Plot the return of each run, and the returns published by CleanRL, against steps."""
    figure, [axes] = figures.make_panels(["Pong"], 1, 3.6, figures.WIDTH, False)
    for _, run in read(source).groupby("run", sort=False):
        steps = np.arange(WINDOW, run["global_step"].max(), WINDOW / 5)
        values = [return_at(run, x) for x in steps]
        axes.plot(steps / 1e6, values, color=figures.RED, linewidth=1.3)
    steps, values = zip(*CLEANRL, strict=True)
    axes.plot(steps, values, "o", color=figures.GREY)
    axes.set_xlabel("million environment steps, of four frames each")
    axes.set_ylabel(f"mean return of the last {WINDOW:,} steps")
    line = Line2D([], [], color=figures.RED)
    points = Line2D([], [], color=figures.GREY, marker="o", linestyle="")
    entries: list[tuple[Any, str]] = [(line, "PyTorch, 42 x 42, bfloat16: one line per seed")]
    entries.append((points, "CleanRL's ppo_atari.py, 84 x 84: from its documentation"))
    figures.add_legend(figure, entries)
    return figure


BLOCKS = {"atari_cost": cost_table, "atari_learning": learning_table}


def update(source: Path, out: Path) -> None:
    """Draw the figures of the study."""
    panels = {name: costs(source / "races.jsonl", name) for name in RACES}
    label = "time per step / Linen time per step"
    (out / "answer.png").write_bytes(figures.png(figures.ratios(panels, OURS, label)))
    (out / "learning.png").write_bytes(figures.png(draw_learning(source)))

"""Returns of PPO and SAC on robots after the same training time on one core."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import figures, stats
from analysis.formatting import interval, number
from analysis.page import Table
from analysis.runs import load

SECONDS = (60, 120, 180, 270)  # seconds after the start at which returns are compared
WINDOW = 20  # seconds over which returns are averaged
COLORS = {"ppo": figures.BLUE, "sac": figures.ORANGE}
KEYS = ["env_id", "algorithm", "seed"]


def read(source: Path) -> pd.DataFrame:
    """Return one row per iteration in which an episode finished. KEYS are the first columns."""
    data = load(source)
    rows = data.iterations.merge(data.runs[["run", *KEYS, "imports"]], on="run")
    rows["seconds"] = rows["imports"] + rows["time/elapsed"]
    rows = rows.rename(columns={"charts/episodic_return": "return", "charts/episodes": "episodes"})
    columns = [*KEYS, "global_step", "seconds", "return", "episodes"]
    return rows[rows["episodes"] > 0][columns].sort_values([*KEYS, "seconds"])


def return_at(run: pd.DataFrame, second: float) -> float:
    """Return the mean return of the episodes that finished in the last WINDOW seconds."""
    recent = run[(run["seconds"] > second - WINDOW) & (run["seconds"] <= second)]
    if recent.empty:
        return np.nan
    return float(np.average(recent["return"], weights=recent["episodes"]))


def table(source: Path) -> Table:
    """Return the speed and the returns by training time, with one row per robot and algorithm."""
    rows = []
    found: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for _, group in read(source).groupby(["env_id", "algorithm"]):
        env_id, algorithm = group[["env_id", "algorithm"]].iloc[0]
        runs = [run for _, run in group.groupby("seed")]
        rates = [run["global_step"].iloc[-1] / run["seconds"].iloc[-1] for run in runs]
        row = {"robot": env_id, "algorithm": str(algorithm).upper()}
        row["steps/s"] = number(float(np.mean(rates)))
        returns = {x: np.array([return_at(run, x) for run in runs]) for x in SECONDS}
        found[str(env_id), str(algorithm)] = returns
        for second, values in returns.items():
            ends = f"{number(values.min())} to {number(values.max())}"
            row[f"after {second} s"] = f"{number(values.mean())} ({ends})"
        rows.append(row)
    for env_id in dict.fromkeys(env_id for env_id, _ in found):
        row = {"robot": env_id, "algorithm": "SAC minus PPO", "steps/s": "-"}
        for second in SECONDS:
            ppo, sac = (found[env_id, x][second] for x in ("ppo", "sac"))
            row[f"after {second} s"] = interval(*stats.welch(ppo, sac))
        rows.append(row)
    cells = pd.DataFrame(rows).sort_values("robot", kind="stable")
    return Table("ppo_or_sac", "Return by training time", cells, cells)


@figures.styled
def draw(source: Path) -> Figure:
    """Plot the return of each run against seconds, with one panel per robot."""
    rows = read(source)
    figure, panels = figures.make_panels(rows["env_id"].unique(), 2, 3.6, figures.WIDTH, False)
    for axes, (_, group) in zip(panels, rows.groupby("env_id"), strict=True):
        for _, run in group.groupby(["algorithm", "seed"]):
            algorithm = run["algorithm"].iloc[0]
            times = np.arange(WINDOW, run["seconds"].max(), 2)
            values = [return_at(run, x) for x in times]
            axes.plot(times, values, color=COLORS[str(algorithm)], linewidth=1.3)
        axes.set_xlabel("seconds from the start, on one core")
    panels[0].set_ylabel(f"mean return of the last {WINDOW} s")
    entries: list[tuple[Any, str]] = [
        (Line2D([], [], color=color), f"{name.upper()}, one line per seed")
        for name, color in COLORS.items()
    ]
    figures.add_legend(figure, entries)
    return figure


BLOCKS = {"ppo_or_sac": table}


def update(source: Path, out: Path) -> None:
    """Draw the figure of the study."""
    (out / "answer.png").write_bytes(figures.png(draw(source)))

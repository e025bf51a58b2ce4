"""Effect of the framework and of async vectorization with slow environment steps."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import figures, races
from analysis.formatting import number
from analysis.formatting import ratio as written
from analysis.page import Table
from analysis.stats import Interval
from analysis.tables import table_of, text, value

LINEN, COMPILED, TORCH = "Linen", "compiled PyTorch", "PyTorch"
ASYNC = ", async"
NUM_STEPS = 8 * 32  # steps per PPO iteration
SAC_STEPS = 50
# Lines of the figure: time of the first program / time of the second.
OVER_LINEN = {
    "PyTorch, sync": (TORCH, LINEN),
    "PyTorch, async": (TORCH + ASYNC, LINEN + ASYNC),
    "compiled PyTorch, sync": (COMPILED, LINEN),
    "compiled PyTorch, async": (COMPILED + ASYNC, LINEN + ASYNC),
}
GAINS = {"Linen": (LINEN, LINEN + ASYNC), "PyTorch": (TORCH, TORCH + ASYNC)}
GAINS |= {"compiled PyTorch": (COMPILED, COMPILED + ASYNC)}
COLORS = {LINEN: figures.BLUE, TORCH: figures.RED, COMPILED: figures.ORANGE}


def read(path: Path) -> pd.DataFrame:
    """Return one row per race: algorithm, whether the simulator waits, its step time, and times.

    `times` contains the times of all programs in the race.
    """
    rows = []
    for name, race in races.named(path).items():
        words = name.removeprefix("SAC, ").split()
        row: dict[str, Any] = {"algorithm": "SAC" if name.startswith("SAC") else "PPO"}
        row |= {"waits": words[0] == "waits", "microseconds": int(words[1]), "times": race.times()}
        rows.append(row)
    return pd.DataFrame(rows).sort_values(["algorithm", "waits", "microseconds"], kind="stable")


def ratio(times: pd.DataFrame, pair: tuple[str, str]) -> Interval:
    return races.ratio_of(times[pair[0]], times[pair[1]])


def ratio_table(
    path: Path,
    algorithm: str,
    pairs: dict[str, tuple[str, str]],
    rates: dict[str, tuple[str, int]],
) -> Table:
    """Return time ratios and throughput, with one row per step time of the simulator.

    `pairs` maps a column title to the two programs of a ratio; `rates` maps a title to a program
    and its number of environment steps per iteration.
    """
    frame = read(path)
    frame = frame[frame["algorithm"] == algorithm]
    cells = []
    for _, row in frame.iterrows():
        times = row["times"]
        what = "waits" if row["waits"] else "computes"
        shown = {"environment step": f"{what} {row['microseconds']:,} µs"}
        for title, pair in pairs.items():
            if pair[0] in times:
                shown[title] = written(*ratio(times, pair))
        for title, (program, steps) in rates.items():
            shown[title] = number(steps / times[program].median())
        cells.append(shown)
    return Table("simulators", algorithm, frame.drop(columns="times"), pd.DataFrame(cells))


def ppo_table(path: Path) -> Table:
    pairs = {f"{name} / Linen": pair for name, pair in OVER_LINEN.items()}
    return ratio_table(path, "PPO", pairs, {})


def async_table(path: Path) -> Table:
    rates = {"Linen, sync (steps/s)": (LINEN, NUM_STEPS)}
    rates |= {"Linen, async (steps/s)": (LINEN + ASYNC, NUM_STEPS)}
    return ratio_table(path, "PPO", GAINS, rates)


def sac_table(path: Path) -> Table:
    pairs = {f"{name} / Linen": (name, LINEN) for name in (TORCH, COMPILED)}
    return ratio_table(path, "SAC", pairs, {"Linen (steps/s)": (LINEN, SAC_STEPS)})


def steps_table(path: Path) -> Table:
    """Return the median microseconds per step over rounds, with one row per environment."""
    rows = pd.DataFrame(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    by_env = rows.groupby("env_id", sort=False, as_index=False)
    frame = by_env.agg(microseconds=("microseconds", "median")).sort_values("microseconds")
    columns = {"environment": text("env_id"), "time per step (µs)": value("microseconds")}
    return table_of("simulators_steps", "Time per step of the robots", frame, columns)


@figures.styled
def draw(path: Path) -> Figure:
    """Plot the PPO ratios and the speedup from async against the step time of the simulator."""
    frame = read(path)
    frame = frame[(frame["algorithm"] == "PPO") & (frame["microseconds"] > 0)]
    titles = ["PyTorch time / Linen time", "Speedup from async"]
    figure, panels = figures.make_panels(titles, 2, 3.6, figures.WIDTH, sharey=False)
    for axes, pairs in zip(panels, (OVER_LINEN, GAINS), strict=True):
        for name, pair in pairs.items():
            for waits, marker in ((False, "o"), (True, "s")):
                own = frame[frame["waits"] == waits]
                found = np.array([ratio(x, pair) for x in own["times"]])
                color = COLORS[name.partition(",")[0]]
                line = "--" if name.endswith("async") else "-"
                axes.plot(
                    own["microseconds"] / 1000,
                    found[:, 0],
                    color=color,
                    linestyle=line,
                    marker=marker,
                    markersize=4,
                    markerfacecolor="white" if waits else color,
                )
        axes.axhline(1, color=figures.GREY, linewidth=1)
        figures.set_log(axes, sorted(set(frame["microseconds"] / 1000)))
        axes.set_xlabel("time per environment step (ms)")
    panels[0].set_ylabel("PyTorch time / Linen time")
    panels[1].set_ylabel("sync time / async time")
    entries: list[tuple[Any, str]] = [
        (Line2D([], [], color=color), name) for name, color in COLORS.items()
    ]
    styles: dict[str, figures.Style] = {"sync": {"linestyle": "-"}, "async": {"linestyle": "--"}}
    styles |= {"computes": {"linestyle": "", "marker": "o"}}
    styles |= {"waits": {"linestyle": "", "marker": "s", "markerfacecolor": "white"}}
    entries += [(Line2D([], [], color=figures.GREY, **x), name) for name, x in styles.items()]
    figures.add_legend(figure, entries)
    return figure


BLOCKS = {
    "simulators_ppo": ppo_table,
    "simulators_async": async_table,
    "simulators_sac": sac_table,
    "simulators_steps": steps_table,
}


def update(source: Path, out: Path) -> None:
    """Draw the figure of the study."""
    (out / "answer.png").write_bytes(figures.png(draw(source / "races.jsonl")))

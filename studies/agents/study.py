"""What N agents cost: one program for all of them, or a process for each.

README.md has the four ways. A way of P processes at once, one or as many as there are cores, is
measured with P agents, and calculated for each N that P divides: the last P take as long as the
longest of them, those before as long as their mean.

Seconds are from the start of a process to the end of its training. Steps per second are of all
agents together, once nothing compiles any more. Memory is the most that a process had in any
repeat, of processes side by side the sum. Ratios pair within a repeat.
"""

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import figures, stats, words
from analysis.measures import timed
from analysis.page import Table
from analysis.runs import load
from analysis.schema import SourceError

VMAP, SCAN, BESIDE, AFTER = WAYS = "vmap", "one scan", "side by side", "one after another"
NAMES = {"linen": "Flax Linen", "nnx": "Flax NNX", "torch": "PyTorch"}
HUES = {"linen": "#0072B2", "nnx": "#009E73", "torch": "#D55E00"}  # as in analysis.figures
SCRIPTS = {  # script -> framework and way
    "ppo_linen_vmap": ("linen", VMAP),
    "ppo_nnx_vmap": ("nnx", VMAP),
    "ppo_torch_vmap": ("torch", VMAP),
    "one_scan": ("linen", SCAN),
    "ppo_linen": ("linen", AFTER),
    "ppo_nnx": ("nnx", AFTER),
    "ppo_torch_compile": ("torch", AFTER),
}
PAIRS = ((VMAP, AFTER), (VMAP, BESIDE), (SCAN, VMAP))  # whose seconds are divided
LOOKS = {  # way -> line, marker
    VMAP: ("-", "o"),
    SCAN: ((0, (5, 1.6)), "^"),
    BESIDE: ((0, (1.2, 1.2)), "s"),
    AFTER: ((0, (5, 1.5, 1, 1.5)), "D"),
}


# === What was measured ==========================================================================
def programs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per program, or per group of processes side by side.

    Its repeat is the block of 1,000 seeds that the seed of its first agent is in.
    """
    runs = timed(runs).dropna(subset=["process"])
    runs = runs[runs["mode"].str.partition(", ")[0].isin(SCRIPTS)]
    beside = runs["mode"].str.endswith(BESIDE)
    folder = runs["run"].str.rpartition("/")[0]  # that processes of a group share
    rows = []
    for _, part in runs.groupby([runs["run"].where(~beside, folder), "mode"], sort=False):
        one = part.iloc[0]
        script, _, together = one["mode"].partition(", ")
        framework, way = SCRIPTS[script]
        agents = one["num_agents"] if way in (VMAP, SCAN) else len(part)
        if together:
            way = BESIDE
            if together != f"{agents} {BESIDE}":
                continue  # one of them failed
        rows.append(
            {
                "framework": framework,
                "way": way,
                "agents": agents,
                "repeat": (part["seed"].min() - 1) // 1000,
                "seconds": part["process"].max(),
                "mean": part["process"].mean(),
                "rate": (part["batch_size"] / part["steady"]).mean() * agents,
                "megabytes": part["peak_host_bytes"].sum(skipna=False) / 1e6,
            }
        )
    return pd.DataFrame(rows)


def costs(source: Path) -> pd.DataFrame:
    """Return what N agents cost in every way and repeat, for each N that a program was run with.

    Raise SourceError if no run is of a program of many.
    """
    found = programs(load(source).runs)
    if found.empty or not found["way"].isin((VMAP, SCAN)).any():
        raise SourceError("no run is of a program of many agents, such as ppo_linen_vmap")
    groups = found.groupby(["framework", "way", "agents", "repeat"])
    means = groups.mean().assign(megabytes=groups["megabytes"].max()).reset_index()
    counts = sorted(set(means.loc[means["way"].isin((VMAP, SCAN)), "agents"]))
    rows = []
    for one in means.to_dict("records"):
        at_once = one["agents"]
        if one["way"] in (VMAP, SCAN):
            rows.append(one)
            continue
        for count in counts:
            if count % at_once == 0:
                seconds = (count / at_once - 1) * one["mean"] + one["seconds"]
                rows.append(one | {"agents": count, "seconds": seconds})
    return pd.DataFrame(rows)


# === Over repeats ===============================================================================
def over_repeats(table: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return a row per framework, way and N: the geometric mean of a value and its interval."""
    keys = ["framework", "way", "agents"]
    rows = []
    for _, group in table.dropna(subset=[value]).groupby(keys):
        row: dict[str, Any] = group.iloc[0][keys].to_dict()
        rows.append(row | stats.geometric_mean(group[value].to_numpy())._asdict())
    return pd.DataFrame(rows)


def ratios(table: pd.DataFrame) -> pd.DataFrame:
    """Return how many times as long one way takes as another, by repeats that both have."""
    parts = []
    for way, other in PAIRS:
        own, others = (
            table[table["way"] == x].set_index(["framework", "agents", "repeat"])["seconds"]
            for x in (way, other)
        )
        paired = (own / others).rename("ratio").reset_index().assign(way=way)
        parts.append(over_repeats(paired, "ratio").assign(other=other))
    return pd.concat(parts)


def intervals(frame: pd.DataFrame) -> list[str]:
    return [words.interval(*x) for x in frame[["estimate", "low", "high"]].itertuples(index=False)]


def ratio_table(table: pd.DataFrame) -> Table:
    """A row per framework and two ways, and a column per N."""
    frame = ratios(table)
    names = ["framework", "way", "times as long as"]
    shown = frame.rename(columns={"other": names[2]}).replace({"framework": NAMES})
    cells = shown.assign(text=intervals(frame))
    cells = cells.pivot(index=names, columns="agents", values="text").fillna("-")
    cells = cells.loc[pd.MultiIndex.from_frame(shown[names].drop_duplicates())]
    cells = cells.rename(columns="{:,.0f}".format).reset_index()
    return Table("agents_ratios", "Seconds to train N agents, as a ratio", frame, cells)


def rate_table(table: pd.DataFrame) -> Table:
    """A row per framework, and a column per way, of the N with the most steps per second."""
    frame = over_repeats(table.assign(thousands=table["rate"] / 1000), "thousands")
    frame = frame.loc[frame.groupby(["framework", "way"])["estimate"].idxmax()]
    numbers = frame["agents"].map(" (N = {:,.0f})".format)
    cells = frame.replace({"framework": NAMES}).assign(text=intervals(frame) + numbers)
    cells = cells.pivot(index="framework", columns="way", values="text").fillna("-")
    cells = cells[[x for x in WAYS if x in cells]].reset_index()
    return Table("agents_rates", "Most thousands of steps per second", frame, cells)


# === Figure =====================================================================================
def draw_lines(axes: Any, rows: pd.DataFrame, value: str) -> None:
    """Draw a framework's ways against N."""
    hue = HUES[rows["framework"].iloc[0]]
    for way, (line, marker) in LOOKS.items():
        part = rows[rows["way"] == way]
        colour = figures.mix(hue, "black", 0.45) if way == SCAN else hue
        if "low" in part:
            axes.fill_between(
                part["agents"], part["low"], part["high"], color=hue, alpha=0.15, lw=0
            )
        axes.plot(part["agents"], part[value], color=colour, ls=line, marker=marker, mec="white")


@figures.styled
def draw(table: pd.DataFrame) -> Figure:
    """Plot seconds against the number of agents, a panel per framework, and memory in another."""
    seconds = over_repeats(table, "seconds")
    memory = table.groupby(["framework", "way", "agents"])["megabytes"].max().reset_index()
    frameworks = [x for x in NAMES if x in set(table["framework"])]
    titles = [f"{NAMES[x]}: seconds to the end" for x in frameworks]
    figure, panels = figures.make_panels([*titles, "Memory of the host (MB)"], 2, 3.4, sharey=False)
    for axes, framework in zip(panels, frameworks, strict=False):
        draw_lines(axes, seconds[seconds["framework"] == framework], "estimate")
        draw_lines(panels[-1], memory[memory["framework"] == framework], "megabytes")
        axes.set_ylabel("seconds")
        ends = seconds[["estimate", "low", "high"]]
        figures.set_log(axes, "y", ends.min().min() / 1.3, ends.max().max() * 1.3, 8)
    panels[-1].set_ylabel("MB")
    ends = memory["megabytes"]
    figures.set_log(panels[-1], "y", ends.min() / 1.3, ends.max() * 1.3, 8)
    counts = sorted(set(table["agents"]))
    for axes in panels:
        figures.set_log(axes, "x", counts[0] / 1.3, counts[-1] * 1.3, 10)
        axes.set_xticks(counts)
        axes.set_xlabel("agents")
    entries: list[tuple[Any, str]] = [
        (Line2D([], [], color=figures.DARK, ls=line, marker=marker, mec="white"), way)
        for way, (line, marker) in LOOKS.items()
        if way in set(table["way"])
    ]
    entries += [(Line2D([], [], color=HUES[x], lw=4), NAMES[x]) for x in frameworks]
    figures.add_legend(figure, entries)
    return figure


BLOCKS = {
    "agents_ratios": lambda source: ratio_table(costs(source)),
    "agents_rates": lambda source: rate_table(costs(source)),
}


def update(source: Path, out: Path) -> None:
    """Draw the figure of a folder of runs, or of the study, and print the tables."""
    table = costs(source)
    (out / "agents.png").write_bytes(figures.png(draw(table)))
    for found in (ratio_table(table), rate_table(table)):
        print(f"{found.caption}:\n{found.cells.to_string(index=False)}\n")

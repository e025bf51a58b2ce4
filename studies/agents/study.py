"""What N agents cost: one program for all of them, or a process for each.

README.md has the four ways. A way of P processes at once, one or as many as there are cores, is
measured with P agents, and calculated for each N that P divides: the last P take as long as the
longest of them, those before as long as their mean.

Memory is the most that a process had in any repeat, of processes side by side the sum.
"""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis import figures, page, stats
from analysis.catalog import FRAMEWORKS
from analysis.measures import timed
from analysis.page import Table
from analysis.runs import load
from analysis.schema import SourceError
from analysis.tables import across, multiple, texts

VMAP, SCAN, BESIDE, AFTER = "vmap", "one scan", "side by side", "one after another"
PROGRAMS = (VMAP, SCAN)  # of all agents
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
LOOKS = {
    VMAP: {"color": figures.BLUE, "marker": "o"},
    SCAN: {"color": figures.SKY, "marker": "^"},
    BESIDE: {"color": figures.ORANGE, "marker": "s"},
    AFTER: {"color": figures.RED, "marker": "D"},
}
KEYS = ["framework", "way", "agents"]


# === What was measured ==========================================================================
def programs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per program, or per group of processes side by side.

    Its repeat is the block of 1,000 seeds that the seed of its first agent is in.
    """
    runs = timed(runs).dropna(subset=["process"])
    runs = runs[runs["mode"].str.split(", ").str[0].isin(SCRIPTS)]
    beside = runs["mode"].str.endswith(BESIDE)
    folder = runs["run"].str.rpartition("/")[0]  # that processes of a group share
    rows = []
    for _, part in runs.groupby([runs["run"].where(~beside, folder), "mode"], sort=False):
        one = part.iloc[0]
        script, _, together = one["mode"].partition(", ")
        framework, way = SCRIPTS[script]
        agents = one["num_agents"] if way in PROGRAMS else len(part)
        if together and together != f"{agents} {BESIDE}":
            continue  # one of them failed
        rows.append(
            {
                "framework": framework,
                "way": BESIDE if together else way,
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
    if found.empty or not found["way"].isin(PROGRAMS).any():
        raise SourceError("no run is of a program of many agents, such as ppo_linen_vmap")
    groups = found.groupby([*KEYS, "repeat"])
    means = groups.mean().assign(megabytes=groups["megabytes"].max()).reset_index()
    whole = means[means["way"].isin(PROGRAMS)]
    counts = pd.DataFrame({"count": whole["agents"].unique()})
    parts = means[~means["way"].isin(PROGRAMS)].merge(counts, "cross")
    parts = parts[parts["count"] % parts["agents"] == 0]
    before = parts["count"] / parts["agents"] - 1
    seconds = before * parts["mean"] + parts["seconds"]
    return pd.concat([whole, parts.assign(agents=parts["count"], seconds=seconds)])


# === Tables =====================================================================================
def ratio_table(table: pd.DataFrame) -> Table:
    """How many times as long one way takes as another: a column per N, by repeats of both.

    Raise SourceError if no two ways are there.
    """
    names = ["framework", "agents", "repeat"]
    seconds = table.pivot(index=names, columns="way", values="seconds")
    parts = []
    for way, other in PAIRS:
        if way in seconds and other in seconds:
            ratio = (seconds[way] / seconds[other]).rename("ratio").reset_index()
            found = stats.of_groups(ratio, names[:2], "ratio", stats.geometric_mean)
            parts.append(found.assign(way=way, other=other))
    if not parts:
        raise SourceError("no two ways were run, so there is no ratio")
    frame = pd.concat(parts).replace({"framework": FRAMEWORKS})
    frame = frame.rename(columns={"other": "divided by"})
    shown = frame.assign(agents=frame["agents"].map("{:,.0f}".format))
    cells = across(shown, texts(frame, multiple()), ["framework", "way", "divided by"], "agents")
    cells = cells.rename(columns={"way": "method"})
    return Table("agents_ratios", "Seconds to train N agents, as a ratio", frame, cells)


def rate_table(table: pd.DataFrame) -> Table:
    """A row per framework, and a column per way, of the N with the most steps per second."""
    thousands = table.assign(thousands=table["rate"] / 1000)
    frame = stats.of_groups(thousands, KEYS, "thousands", stats.geometric_mean)
    # Processes have the same rate for every N, but for rounding: the smallest N is shown.
    rates = frame.sort_values("agents")["estimate"].round(6)
    frame = frame.loc[rates.groupby([frame["framework"], frame["way"]], sort=False).idxmax()]
    frame = frame.replace({"framework": FRAMEWORKS})
    text = texts(frame) + frame["agents"].map(" (N = {:,.0f})".format)
    cells = across(frame, text, ["framework"], "way")
    cells = cells[["framework", *(x for x in LOOKS if x in cells)]]
    return Table("agents_rates", "Most thousands of steps per second", frame, cells)


# === Figure =====================================================================================
def draw(table: pd.DataFrame) -> Figure:
    """Plot seconds and memory against the number of agents, two panels per framework."""
    seconds = stats.of_groups(table, KEYS, "seconds", stats.geometric_mean)
    seconds["panel"] = seconds["framework"].map(FRAMEWORKS) + ": seconds to the end"
    memory = table.groupby(KEYS, as_index=False)["megabytes"].max()
    memory["panel"] = memory["framework"].map(FRAMEWORKS) + ": MB of the host"
    points = pd.concat([seconds, memory.rename(columns={"megabytes": "estimate"})])
    points = points.rename(columns={"way": "mode", "agents": "x"})
    return figures.bands(points, LOOKS, "agents", "", log=True)


BLOCKS = {
    "agents_ratios": lambda source: ratio_table(costs(source)),
    "agents_rates": lambda source: rate_table(costs(source)),
}


def update(source: Path, out: Path) -> None:
    """Draw the figure of a folder of runs, or of the study, and print the tables."""
    table = costs(source)
    (out / "agents.png").write_bytes(figures.png(draw(table)))
    for make in (rate_table, ratio_table):
        print(f"{page.brief(make(table))}\n")

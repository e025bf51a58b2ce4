"""Cost of training N agents in one program, or in one process per agent.

README.md describes the four methods. A method with P processes at a time (one, or one per core) is
measured with P agents and extrapolated to each multiple N of P: we assume that the last P agents
take as long as the slowest of them, and all others as long as the mean.

Memory is the peak over all repeats; for processes side by side, the sum over processes.
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
PROGRAMS = (VMAP, SCAN)  # methods in which one program trains all agents
SCRIPTS = {  # script -> framework and method
    "ppo_linen_vmap": ("linen", VMAP),
    "ppo_nnx_vmap": ("nnx", VMAP),
    "ppo_torch_vmap": ("torch", VMAP),
    "one_scan": ("linen", SCAN),
    "ppo_linen": ("linen", AFTER),
    "ppo_nnx": ("nnx", AFTER),
    "ppo_torch_compile": ("torch", AFTER),
}
# Pairs of methods; the tables show the time of the first / the time of the second.
PAIRS = (
    (VMAP, AFTER),
    (VMAP, BESIDE),
    (SCAN, VMAP),
)
LOOKS = {
    VMAP: {"color": figures.BLUE, "marker": "o"},
    SCAN: {"color": figures.SKY, "marker": "^"},
    BESIDE: {"color": figures.ORANGE, "marker": "s"},
    AFTER: {"color": figures.RED, "marker": "D"},
}
KEYS = ["framework", "way", "agents"]


# === What was measured ==========================================================================
def programs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per program, or per group of processes side by side.

    Each repeat uses a separate block of 1,000 seeds, so the repeat follows from the first seed.
    """
    runs = timed(runs).dropna(subset=["process"])
    runs = runs[runs["mode"].str.split(", ").str[0].isin(SCRIPTS)]
    beside = runs["mode"].str.endswith(BESIDE)
    folder = runs["run"].str.rpartition("/")[0]  # shared by the processes of a group
    rows = []
    for _, part in runs.groupby([runs["run"].where(~beside, folder), "mode"], sort=False):
        one = part.iloc[0]
        script, _, together = one["mode"].partition(", ")
        framework, way = SCRIPTS[script]
        agents = one["num_agents"] if way in PROGRAMS else len(part)
        if together and together != f"{agents} {BESIDE}":
            continue  # a process of the group failed
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
    """Return the cost of N agents per method and repeat, for each N that one program trained.

    Raise SourceError if no run trained many agents in one program.
    """
    found = programs(load(source).runs)
    if found.empty or not found["way"].isin(PROGRAMS).any():
        raise SourceError("no run trained many agents in one program, as ppo_linen_vmap does")
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
    """Return a table of time ratios between pairs of methods, paired by repeat, by N (columns).

    Raise SourceError if no pair of methods was run.
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
        raise SourceError("no pair of methods was run, so there are no ratios")
    frame = pd.concat(parts).replace({"framework": FRAMEWORKS})
    frame = frame.rename(columns={"other": "divided by"})
    shown = frame.assign(agents=frame["agents"].map("{:,.0f}".format))
    cells = across(shown, texts(frame, multiple()), ["framework", "way", "divided by"], "agents")
    cells = cells.rename(columns={"way": "method"})
    return Table("agents_ratios", "Ratio of the times to train N agents", frame, cells)


def rate_table(table: pd.DataFrame) -> Table:
    """Return the highest throughput over all N, by framework (rows) and method (columns)."""
    thousands = table.assign(thousands=table["rate"] / 1000)
    frame = stats.of_groups(thousands, KEYS, "thousands", stats.geometric_mean)
    # The rate of separate processes is the same for every N, so show the smallest N.
    rates = frame.sort_values("agents")["estimate"].round(6)
    frame = frame.loc[rates.groupby([frame["framework"], frame["way"]], sort=False).idxmax()]
    frame = frame.replace({"framework": FRAMEWORKS})
    text = texts(frame) + frame["agents"].map(" (N = {:,.0f})".format)
    cells = across(frame, text, ["framework"], "way")
    cells = cells[["framework", *(x for x in LOOKS if x in cells)]]
    return Table(
        "agents_rates", "Highest throughput, in thousands of steps per second", frame, cells
    )


# === Figure =====================================================================================
def draw(table: pd.DataFrame) -> Figure:
    """Plot seconds and memory against the number of agents, two panels per framework."""
    seconds = stats.of_groups(table, KEYS, "seconds", stats.geometric_mean)
    seconds["panel"] = seconds["framework"].map(FRAMEWORKS) + ": duration (s)"
    memory = table.groupby(KEYS, as_index=False)["megabytes"].max()
    memory["panel"] = memory["framework"].map(FRAMEWORKS) + ": host memory (MB)"
    points = pd.concat([seconds, memory.rename(columns={"megabytes": "estimate"})])
    points = points.rename(columns={"way": "mode", "agents": "x"})
    return figures.bands(points, LOOKS, "agents", "", log=True)


BLOCKS = {
    "agents_ratios": lambda source: ratio_table(costs(source)),
    "agents_rates": lambda source: rate_table(costs(source)),
}


def update(source: Path, out: Path) -> None:
    """Draw the figure for a folder of runs or for the study, and print the tables."""
    table = costs(source)
    (out / "agents.png").write_bytes(figures.png(draw(table)))
    for make in (rate_table, ratio_table):
        print(f"{page.brief(make(table))}\n")

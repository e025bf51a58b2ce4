"""What N agents cost: one program for all of them, or a process for each.

The runs are those of `./benchmark.sh agents`. There are four ways to train N:

    vmap               one program, whose arrays have an axis of agents
    one scan           the same in Linen, and all iterations in one call (one_scan.py)
    side by side       a process for each, as many at once as there are cores, P: measured with P
                       processes, and calculated for N that P divides: the last P take as long as
                       the longest of them, those before as long as their mean
    one after another  a process for each: measured with one process, which is taken N times

Seconds are from the start of a process to the end of its training. Steps per second are of all
agents together, once nothing compiles any more. Memory is the most that a process had in any
repeat, of processes side by side the sum. Ratios pair within a repeat.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import figures, stats, words
from analysis.measures import timed
from analysis.page import Table
from analysis.runs import load
from analysis.schema import SourceError

FRAMEWORKS = {  # framework -> its name, program of many agents, script of one
    "linen": ("Flax Linen", "ppo_linen_vmap", "ppo_linen"),
    "nnx": ("Flax NNX", "ppo_nnx_vmap", "ppo_nnx"),
    "torch": ("PyTorch", "ppo_torch_vmap", "ppo_torch_compile"),
}
VMAP, SCAN, BESIDE, AFTER = WAYS = "vmap", "one scan", "side by side", "one after another"
LOOKS = {  # way -> line, marker
    VMAP: ("-", "o"),
    SCAN: ((0, (5, 1.6)), "^"),
    BESIDE: ((0, (1.2, 1.2)), "s"),
    AFTER: ((0, (5, 1.5, 1, 1.5)), "D"),
}
KEYS = ["framework", "way", "agents"]


class Study(NamedTuple):
    """What was found in the runs."""

    runs: pd.DataFrame
    costs: pd.DataFrame  # a row per way, N and repeat: KEYS, repeat, measured, seconds, rate, bytes
    summary: pd.DataFrame  # a row per way and N, over repeats


# === What was measured ==========================================================================
def way_of(mode: str) -> tuple[str, str]:
    """Return the way and the framework of a mode, or two empty texts."""
    script, _, beside = mode.partition(", ")
    if script == "one_scan":
        return SCAN, "linen"
    for framework, (_, many, one) in FRAMEWORKS.items():
        if script == many:
            return VMAP, framework
        if script == one:
            return BESIDE if beside else AFTER, framework
    return "", ""


def programs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per program, or per group of processes side by side.

    Its repeat is the block of 1,000 seeds that the seed of its first agent is in.
    """
    ways = [way_of(mode) for mode in runs["mode"]]
    runs = runs.assign(way=[x[0] for x in ways], framework=[x[1] for x in ways])
    runs = timed(runs[runs["way"] != ""]).dropna(subset=["process"])
    beside = runs["way"] == BESIDE
    folder = runs["run"].str.rpartition("/")[0]  # that processes of a group share
    rows = []
    for _, part in runs.groupby([runs["run"].where(~beside, folder), "mode"], sort=False):
        one = part.iloc[0]
        if one["way"] == BESIDE and f", {len(part)} side" not in one["mode"]:
            continue  # one of them failed
        agents = one["num_agents"] if one["way"] in (VMAP, SCAN) else len(part)
        rows.append(
            {
                "framework": one["framework"],
                "way": one["way"],
                "agents": agents,
                "repeat": (part["seed"].min() - 1) // 1000,
                "seconds": part["process"].max(),
                "mean": part["process"].mean(),
                "rate": (part["batch_size"] / part["steady"]).mean() * agents,
                "bytes": part["peak_host_bytes"].sum(skipna=False),
            }
        )
    return pd.DataFrame(rows)


def costs(found: pd.DataFrame) -> pd.DataFrame:
    """Return what N agents cost in every way, for each N that a program of many was run with."""
    groups = found.groupby([*KEYS, "repeat"])
    means = groups.mean().assign(bytes=groups["bytes"].max()).reset_index()
    several = means[means["way"].isin((VMAP, SCAN))]
    counts = sorted(set(several["agents"]))
    rows = several.assign(measured=True).to_dict("records")
    for one in means[means["way"] == AFTER].to_dict("records"):
        for count in counts:
            own = {"agents": count, "seconds": count * one["seconds"], "measured": count == 1}
            rows.append(one | own)
    for group in means[means["way"] == BESIDE].to_dict("records"):
        at_once = group["agents"]
        for count in [x for x in counts if x % at_once == 0]:
            before = (count / at_once - 1) * group["mean"]
            own = {"agents": count, "seconds": before + group["seconds"]}
            rows.append(group | own | {"measured": count == at_once})
    table = pd.DataFrame(rows)
    place = {name: i for i, name in enumerate((*FRAMEWORKS, *WAYS))}
    keys = [table["framework"].map(place), table["way"].map(place), table["agents"]]
    order = np.lexsort([table["repeat"], *keys[::-1]])
    return table.iloc[order].reset_index(drop=True)


# === Over repeats ===============================================================================
def against(table: pd.DataFrame, key: tuple, other: tuple) -> stats.Interval:
    """How many times the seconds of another it takes, by repeats that both have."""
    sides = [
        table[(table[KEYS] == list(x)).all(axis=1)].groupby("repeat")["seconds"].mean()
        for x in (key, other)
    ]
    ratios = (sides[0] / sides[1]).dropna()
    return stats.geometric_mean(ratios) if len(ratios) else stats.Interval(*[np.nan] * 3)


def summarise(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per framework, way and N: what it costs, with intervals.

    seconds and rate are geometric means; after, beside and vmap are the seconds over those of the
    ways of this name. bytes is the most of any repeat.
    """
    rows = []
    for _, group in table.groupby(KEYS, sort=False):
        key = tuple(group.iloc[0][KEYS])
        framework, _, agents = key
        row = dict(zip(KEYS, key, strict=True))
        row |= {"measured": bool(group["measured"].all()), "bytes": group["bytes"].max()}
        parts = {name: stats.geometric_mean(group[name].to_numpy()) for name in ("seconds", "rate")}
        for name, other in (("after", AFTER), ("beside", BESIDE), ("vmap", VMAP)):
            parts[name] = against(table, key, (framework, other, agents))
        for name, three in parts.items():
            row |= dict(zip((name, f"{name}_low", f"{name}_high"), three, strict=True))
        rows.append(row)
    return pd.DataFrame(rows)


def study(source: Path) -> Study:
    """Return what N agents cost; raise SourceError if no run is of a program of many."""
    runs = load(source).runs
    found = programs(runs)
    if found.empty or not found["way"].isin((VMAP, SCAN)).any():
        raise SourceError("no run is of a program of many agents, such as ppo_linen_vmap")
    table = costs(found)
    return Study(runs, table, summarise(table))


# === Tables =====================================================================================
def three(row: dict[Any, Any], name: str) -> tuple[float, float, float]:
    return row[name], row[f"{name}_low"], row[f"{name}_high"]


def wide(own: Study, name: str, caption: str, form: Callable[[dict], str]) -> Table:
    """A row per framework and way, and a column per N."""
    cells = []
    for _, part in own.summary.groupby(["framework", "way"], sort=False):
        framework, way = part.iloc[0][["framework", "way"]]
        row = {"framework": FRAMEWORKS[framework][0], "way": way}
        row |= {f"{x:,.0f}": "-" for x in sorted(set(own.summary["agents"]))}
        for one in part.to_dict("records"):
            row[f"{one['agents']:,.0f}"] = form(one)
        cells.append(row)
    return Table(name, caption, own.summary, pd.DataFrame(cells))


def seconds_table(own: Study) -> Table:
    caption = "Seconds to train N agents to the end"
    return wide(own, "agents", caption, lambda row: words.interval(*three(row, "seconds")))


def ratio_table(own: Study) -> Table:
    rest = own._replace(summary=own.summary[own.summary["way"] != AFTER])
    caption = "Times as long as one process after another"
    return wide(rest, "agents_ratios", caption, lambda row: words.interval(*three(row, "after")))


def rate_table(own: Study) -> Table:
    def form(row: dict) -> str:
        return words.interval(*(x / 1000 for x in three(row, "rate")))

    caption = "Thousands of steps per second, all agents together, once nothing compiles"
    return wide(own, "agents_rates", caption, form)


def memory_table(own: Study) -> Table:
    caption = "Most memory of the host (MB), of processes the sum"
    return wide(own, "agents_memory", caption, lambda row: words.number(row["bytes"] / 1e6))


# === Sentences ==================================================================================
def sentences(own: Study) -> list[str]:
    """Say with which N one program is done sooner."""
    found = []
    for framework, (name, _, script) in FRAMEWORKS.items():
        rows = own.summary[own.summary["framework"] == framework]
        vmap = rows[rows["way"] == VMAP]
        others = {"after": f"{script} one after another", "beside": f"{script} side by side"}
        for column, other in others.items():
            found.append(verdict(vmap, column, f"{name}, vmap", other))
        scan = rows[rows["way"] == SCAN]
        found.append(verdict(scan, "vmap", f"{name}, a whole training in one scan", "vmap"))
    return [x for x in found if x]


def verdict(rows: pd.DataFrame, column: str, what: str, other: str) -> str:
    """Say with which N what is done sooner than the other, and with which later, at 95% each."""
    known = rows.dropna(subset=[f"{column}_low"])
    sooner = known[f"{column}_high"] < 1
    later = known[f"{column}_low"] > 1
    named = {"done sooner": sooner, "done later": later, "not told apart": ~sooner & ~later}
    parts = []
    for verb, chosen in named.items():
        each = [
            f"{x['agents']:,.0f} ({words.interval(*three(x, column))})"
            for x in known[chosen].to_dict("records")
        ]
        if each:
            parts.append(f"{verb} with N = {words.join(each)}")
    return f"{what} against {other}: {'; '.join(parts)}." if parts else ""


# === Figure =====================================================================================
def draw_lines(axes: Any, rows: pd.DataFrame, value: str, scale: float, hue: str) -> None:
    """Draw a framework's ways against N; markers are where it was measured, lines everywhere."""
    for way, (line, marker) in LOOKS.items():
        part = rows[rows["way"] == way].sort_values("agents")
        if f"{value}_low" in part:
            band = [part[f"{value}_{x}"] * scale for x in ("low", "high")]
            axes.fill_between(part["agents"], *band, color=hue, alpha=0.15, lw=0)
        colour = figures.mix(hue, "black", 0.45) if way == SCAN else hue
        axes.plot(part["agents"], part[value] * scale, color=colour, ls=line)
        dots = part[part["measured"]]
        style = {"color": colour, "marker": marker, "ls": "", "mec": "white"}
        axes.plot(dots["agents"], dots[value] * scale, **style)


@figures.styled
def draw(own: Study) -> Figure:
    """Plot seconds against the number of agents, a panel per framework, and memory in another."""
    summary = own.summary
    frameworks = [x for x in FRAMEWORKS if x in set(summary["framework"])]
    titles = [f"{FRAMEWORKS[x][0]}: seconds to the end" for x in frameworks]
    figure, panels = figures.make_panels([*titles, "Memory of the host (MB)"], 2, 3.4, sharey=False)
    counts = sorted(set(summary["agents"]))
    ends = summary[["seconds", "seconds_low", "seconds_high"]]
    for axes, framework in zip(panels, frameworks, strict=False):
        hue = figures.FAMILIES[framework]
        draw_lines(axes, summary[summary["framework"] == framework], "seconds", 1, hue)
        figures.set_log(axes, "y", ends.min().min() / 1.3, ends.max().max() * 1.3, 8)
        axes.set_ylabel("seconds")
    for framework in frameworks:
        rows, hue = summary[summary["framework"] == framework], figures.FAMILIES[framework]
        draw_lines(panels[-1], rows, "bytes", 1e-6, hue)
    memory = summary["bytes"].dropna() / 1e6
    if len(memory):
        figures.set_log(panels[-1], "y", memory.min() / 1.3, memory.max() * 1.3, 8)
    panels[-1].set_ylabel("MB")
    for axes in panels:
        figures.set_log(axes, "x", counts[0] / 1.3, counts[-1] * 1.3, 10)
        axes.set_xticks(counts)
        axes.set_xlabel("agents")
    entries: list[tuple[Any, str]] = [
        (Line2D([], [], color=figures.DARK, ls=line, marker=marker, mec="white"), way)
        for way, (line, marker) in LOOKS.items()
        if way in set(summary["way"])
    ]
    entries += [
        (Line2D([], [], color=figures.FAMILIES[x], lw=4), FRAMEWORKS[x][0]) for x in frameworks
    ]
    figures.add_legend(figure, entries)
    return figure


BLOCKS = {
    "agents": lambda source: seconds_table(study(source)),
    "agents_ratios": lambda source: ratio_table(study(source)),
    "agents_rates": lambda source: rate_table(study(source)),
    "agents_memory": lambda source: memory_table(study(source)),
    "agents_sentences": lambda source: sentences(study(source)),
}


def update(source: Path, out: Path) -> None:
    """Draw the figure of a folder of runs, or of the study, and print what can be said."""
    own = study(source)
    (out / "agents.png").write_bytes(figures.png(draw(own)))
    print("\n".join(sentences(own)))

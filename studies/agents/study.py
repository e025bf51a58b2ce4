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

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import figures, stats, words
from analysis.measures import as_object, timed
from analysis.page import Table
from analysis.runs import Data, load
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
PROCESSES = re.compile(r"(\w+), ([1-9]\d{0,3}) side by side")
CELL = ["platform", "env_id", "size", "sync", "num_iterations", "common"]
VALUES = ("seconds", "started", "rate", "bytes")  # started: seconds, if only one had to start
KEYS = ["framework", "way", "agents"]


class Study(NamedTuple):
    """What was found in the runs."""

    runs: pd.DataFrame  # with the columns way, of (a mode's framework) and processes
    costs: pd.DataFrame  # a row per way, N and repeat; columns of KEYS, repeat, measured and VALUES
    summary: pd.DataFrame  # a row per way and N, over repeats
    at_once: float  # processes of a group side by side, 0 if there was none of several
    notes: list[str]  # what was left out, in sentences


# === What was measured ==========================================================================
def way_of(mode: str) -> tuple[str, str, float]:
    """The way, framework and number of processes at once of a mode; ("", "", NaN) of another."""
    scripts = {"one_scan": (SCAN, "linen", 1.0)}
    for framework, (_, many, one) in FRAMEWORKS.items():
        scripts |= {many: (VMAP, framework, 1.0), one: (AFTER, framework, 1.0)}
    if match := PROCESSES.fullmatch(mode):
        way, framework, _ = scripts.get(match[1], ("", "", 1.0))
        return (BESIDE, framework, float(match[2])) if way == AFTER else ("", "", math.nan)
    return scripts.get(mode, ("", "", math.nan))


def of_study(data: Data) -> tuple[pd.DataFrame, list[str]]:
    """Return the runs of the study's largest cell, and in sentences what is left out."""
    ways = [way_of(mode) for mode in data.runs["mode"]]
    columns = dict(zip(("way", "of", "processes"), zip(*ways, strict=True), strict=True))
    runs = data.runs.assign(**columns, common=data.runs["settings"].map(without_agents))
    runs = runs[runs["way"] != ""]
    if not (runs["way"] == VMAP).any():
        raise SourceError("no run is of a program of many agents, such as ppo_linen_vmap")
    cells = [cell for _, cell in runs.groupby(CELL, sort=False, dropna=False)]
    cells.sort(key=lambda x: ((x["way"] == VMAP).any(), len(x)), reverse=True)
    notes, rest = [], len(runs) - len(cells[0])
    if rest:
        number = words.counted([rest], "run")
        notes.append(f"{number} of other machines, settings or lengths left out.")
    if data.left_out:
        number = words.counted([len(data.left_out)], "run")
        notes.append(f"{number} failed or not whole: {words.some(list(data.left_out), 3)}.")
    if resumed := int(cells[0]["resumed"].sum()):
        number = words.counted([resumed], "run")
        notes.append(f"{number} stopped and resumed: without durations.")
    return cells[0], notes


def without_agents(settings: str) -> str:
    return json.dumps({x: y for x, y in as_object(settings).items() if x != "num_agents"})


def programs(runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return a row per program, or per group side by side; and which groups are left out.

    Its repeat is the block of 1,000 seeds that the seed of its first agent is in.
    """
    rows, notes = [], []
    shown = timed(runs).dropna(subset=["process"])
    shown = shown[shown["num_agents"].notna() | ~shown["way"].isin((VMAP, SCAN))]
    shown = shown.assign(first=shown["seed"].fillna(shown["repeat"]))
    # Of one folder are the processes of a group; a program has one row with durations.
    group = shown["run"].where(shown["way"] != BESIDE, "in " + shown["run"].str.rpartition("/")[0])
    group = group.where(shown["way"] == BESIDE, "run " + shown["run"])
    for _, part in shown.groupby([group, "way", "of", "processes"], sort=False):
        one = part.iloc[0]
        if len(part) != one["processes"]:
            name = str(one["run"]).rpartition("/")[0]
            notes.append(f"{name} has {len(part)} of {one['processes']:.0f} runs: left out.")
            continue
        agents = len(part) if one["way"] in (BESIDE, AFTER) else one["num_agents"]
        row = {"framework": one["of"], "way": one["way"], "agents": agents}
        row |= {"repeat": (part["first"].min() - 1) // 1000, "seconds": part["process"].max()}
        row |= {"mean": part["process"].mean(), "startup": part["startup"].mean()}
        row["rate"] = (part["batch_size"] / part["steady"]).mean() * agents
        row["bytes"] = part["peak_host_bytes"].sum(skipna=False)
        rows.append(row)
    found = pd.DataFrame(rows)
    if found.empty:
        return found, notes
    beside = found["way"] == BESIDE
    at_once = found.loc[beside, "agents"].mode()  # on a machine whose cores changed, of two sizes
    others = beside & ~found["agents"].isin(at_once[:1])
    if others.any():
        number = words.counted([int(others.sum())], "group")
        notes.append(f"{number} of other than {at_once[0]:.0f} processes side by side left out.")
    return found[~others], notes


def costs(found: pd.DataFrame) -> pd.DataFrame:
    """Return what N agents cost in every way, for each N that a program of many was run with."""
    counts = sorted(set(found.loc[found["way"].isin((VMAP, SCAN)), "agents"]))
    groups = found.groupby(["framework", "repeat", "way", "agents"])
    means = groups.mean().assign(bytes=groups["bytes"].max()).reset_index()
    several = means[means["way"].isin((VMAP, SCAN))]
    rows = several.assign(measured=True, started=several["seconds"]).to_dict("records")
    for one in means[means["way"] == AFTER].to_dict("records"):
        for count in counts:
            seconds = count * one["seconds"]
            own = {"agents": count, "seconds": seconds, "measured": count == 1}
            own["started"] = seconds - (count - 1) * one["startup"]
            rows.append(one | own)
            if count == 1:  # one process beside no other
                rows.append(one | own | {"way": BESIDE})
    for group in means[means["way"] == BESIDE].to_dict("records"):
        at_once = group["agents"]
        for count in counts:
            if at_once > 1 and count % at_once == 0:
                before = (count / at_once - 1) * group["mean"]
                own = {"agents": count, "seconds": before + group["seconds"]}
                rows.append(group | own | {"measured": count == at_once})
    table = pd.DataFrame(rows)
    with_others = set(found.loc[(found["way"] == BESIDE) & (found["agents"] > 1), "framework"])
    table = table[(table["way"] != BESIDE) | table["framework"].isin(with_others)]
    place = {name: i for i, name in enumerate((*FRAMEWORKS, *WAYS))}
    keys = [table["framework"].map(place), table["way"].map(place), table["agents"]]
    order = np.lexsort([table["repeat"], *keys[::-1]])
    return table.iloc[order].reset_index(drop=True)


# === Over repeats ===============================================================================
def mean(values: pd.Series) -> stats.Interval:
    """The geometric mean over repeats, and Student's interval."""
    known = values[(values > 0) & np.isfinite(values)].to_numpy(float)
    return stats.geometric_mean(known) if len(known) else stats.Interval(*[math.nan] * 3)


def against(table: pd.DataFrame, value: str, key: tuple, other: tuple) -> stats.Interval:
    """How many times the value of another it is, by repeats that both have; keys are of KEYS."""
    sides = [
        table[(table[KEYS] == list(x)).all(axis=1)].groupby("repeat")[value].mean()
        for x in (key, other)
    ]
    return mean((sides[0] / sides[1]).dropna())


def summarise(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per framework, way and N: means of VALUES, and ratios, each with its interval.

    after and beside are the seconds over those of one after another and side by side, started over
    those of one after another if only the first had to start; of one scan, vmap is the seconds over
    vmap's, and vmap_iteration those of an iteration; growth is the steps per second over those of
    one agent. Of bytes it is the most, without an interval.
    """
    rows = []
    for _, group in table.groupby(KEYS, sort=False):
        key = framework, way, agents = tuple(group.iloc[0][KEYS])
        row = dict(zip(KEYS, key, strict=True))
        row |= {"repeats": group["repeat"].nunique(), "measured": bool(group["measured"].all())}
        parts = {name: mean(group[name]) for name in ("seconds", "rate")}
        parts["bytes"] = stats.Interval(group["bytes"].max(), math.nan, math.nan)
        parts["started"] = against(table, "started", key, (framework, AFTER, agents))
        parts["after"] = against(table, "seconds", key, (framework, AFTER, agents))
        parts["beside"] = against(table, "seconds", key, (framework, BESIDE, agents))
        parts["vmap"] = against(table, "seconds", key, (framework, VMAP, agents))
        slower = against(table, "rate", (framework, VMAP, agents), key)
        parts["vmap_iteration"] = slower  # of as many steps: fewer a second are more seconds
        parts["growth"] = against(table, "rate", key, (framework, way, 1))
        for name, three in parts.items():
            row |= dict(zip((name, f"{name}_low", f"{name}_high"), map(float, three), strict=True))
        rows.append(row)
    return pd.DataFrame(rows)


def study(data: Data) -> Study:
    """Return what N agents cost, by runs; raise SourceError if none is of a program of many."""
    if data.runs.empty:
        raise SourceError("there are no runs")
    runs, others = of_study(data)
    found, broken = programs(runs)
    if found.empty or not found["way"].isin((VMAP, SCAN)).any():
        raise SourceError("no program of many agents has durations")
    table = costs(found)
    if not (found["seconds"] > 0).all():
        raise SourceError("a run took no time")
    at_once = found.loc[(found["way"] == BESIDE) & (found["agents"] > 1), "agents"].max()
    at_once = 0.0 if math.isnan(at_once) else at_once
    return Study(runs, table, summarise(table), at_once, others + broken)


# === Tables =====================================================================================
def wide(own: Study, name: str, caption: str, form: Callable, ways: Sequence[str] = WAYS) -> Table:
    """A row per framework and way, and a column per N."""
    cells = []
    for _, part in own.summary.groupby(["framework", "way"], sort=False):
        framework, way = part.iloc[0][["framework", "way"]]
        row = {"framework": FRAMEWORKS[framework][0], "way": way}
        row |= {f"{x:,.0f}": "-" for x in sorted(set(own.summary["agents"]))}
        for one in part.to_dict("records"):
            row[f"{one['agents']:,.0f}"] = form(one)
        if way in ways:
            cells.append(row)
    return Table(name, caption, own.summary, pd.DataFrame(cells))


def three(row: dict[Any, Any], name: str, scale: float = 1.0) -> tuple[float, float, float]:
    low, high = (row[f"{name}_{x}"] * scale for x in ("low", "high"))
    return row[name] * scale, low, high


def seconds_table(own: Study) -> Table:
    """Seconds to train N agents to the end."""

    def form(row: dict[Any, Any]) -> str:
        return words.interval(*three(row, "seconds"))

    return wide(own, "agents", "Seconds to train N agents to the end", form)


def ratio_table(own: Study) -> Table:
    """Seconds over those of one process after another."""

    def form(row: dict[Any, Any]) -> str:
        same = row["way"] == BESIDE and row["agents"] == 1
        return "-" if same else words.interval(*three(row, "after"))

    caption = "Times as long as one process after another"
    return wide(own, "agents_ratios", caption, form, WAYS[:-1])


def rate_table(own: Study) -> Table:
    """Thousands of environment steps per second, of all agents together."""

    def form(row: dict[Any, Any]) -> str:
        return words.interval(*three(row, "rate", 1e-3))

    caption = "Thousands of steps per second, all agents together, once nothing compiles"
    return wide(own, "agents_rates", caption, form)


def memory_table(own: Study) -> Table:
    """Megabytes of the host's memory."""

    def form(row: dict[Any, Any]) -> str:
        return words.number(row["bytes"] / 1e6)

    return wide(own, "agents_memory", "Most memory of the host (MB), of processes the sum", form)


# === Sentences ==================================================================================
def sentences(own: Study) -> list[str]:
    """Say what was trained, with which N one program is done sooner, and what it takes to hold."""
    one = own.runs.iloc[0]
    repeats = words.counted([own.costs["repeat"].nunique()], "repeat")
    length = words.counted([one["num_iterations"]], "iteration")
    found = [f"{one['env_id']}, the {one['size']} network, {length}, {repeats}."]
    for framework, (name, _, script) in FRAMEWORKS.items():
        rows = own.summary[own.summary["framework"] == framework]
        vmap = rows[rows["way"] == VMAP]
        others = {"after": f"{script} one after another", "beside": f"{script} side by side"}
        for column, other in others.items():
            found.append(verdict(vmap, column, f"{name}, vmap", other))
        scan = rows[rows["way"] == SCAN]
        found.append(verdict(scan, "vmap", f"{name}, a whole training in one scan", "vmap"))
    return [x for x in found if x] + own.notes


def verdict(rows: pd.DataFrame, column: str, what: str, other: str) -> str:
    """Say with which N what is done sooner than the other, and with which later, at 95% each."""
    known = rows.dropna(subset=[f"{column}_low"])
    known = known[~((known["agents"] == 1) & (known["way"] == SCAN))]
    if known.empty:
        return ""
    parts = []
    sooner = known[known[f"{column}_high"] < 1]
    later = known[known[f"{column}_low"] > 1]
    rest = known[~known.index.isin([*sooner.index, *later.index])]
    named = {"done sooner": sooner, "done later": later, "not told apart": rest}
    for verb, part in named.items():
        if len(part):
            each = [
                f"{x['agents']:,.0f} ({words.interval(*three(x, column))})"
                for x in part.to_dict("records")
            ]
            parts.append(f"{verb} with N = {words.join(each)}")
    return f"{what} against {other}: {'; '.join(parts)}."


# === Figure =====================================================================================
def draw_lines(axes: Any, rows: pd.DataFrame, value: str, scale: float, hue: str) -> None:
    """Draw a framework's ways against N; markers are where it was measured, lines everywhere."""
    for way, (line, marker) in LOOKS.items():
        part = rows[rows["way"] == way].sort_values("agents")
        low, high = (part[f"{value}_{x}"] * scale for x in ("low", "high"))
        axes.fill_between(part["agents"], low, high, color=hue, alpha=0.15, lw=0)
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
        hue = figures.FAMILIES[framework][0]
        draw_lines(axes, summary[summary["framework"] == framework], "seconds", 1, hue)
        figures.set_log(axes, "y", ends.min().min() / 1.3, ends.max().max() * 1.3, 8)
        axes.set_ylabel("seconds")
    for framework in frameworks:
        rows, hue = summary[summary["framework"] == framework], figures.FAMILIES[framework][0]
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
        (Line2D([], [], color=figures.FAMILIES[x][0], lw=4), FRAMEWORKS[x][0]) for x in frameworks
    ]
    figures.add_legend(figure, entries)
    return figure


BLOCKS = {
    "agents": lambda source: seconds_table(study(load(source))),
    "agents_ratios": lambda source: ratio_table(study(load(source))),
    "agents_rates": lambda source: rate_table(study(load(source))),
    "agents_memory": lambda source: memory_table(study(load(source))),
    "agents_sentences": lambda source: sentences(study(load(source))),
}


def update(folder: Path, runs: Path | None = None) -> None:
    """Draw the study's figure, of its own runs or of others."""
    own = study(load(runs or folder))
    (folder / "agents.png").write_bytes(figures.png(draw(own)))

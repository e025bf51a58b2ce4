"""The report: from runs to a page that answers first."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import checks, figures, learning, measures, page, stats, tables
from analysis.figures import Look
from analysis.learning import Environment
from analysis.measures import Bench, mode_order, size_order, timed
from analysis.page import Block, Bullets, Plot, Section, Table, Text
from analysis.runs import Data
from analysis.words import counted, join, number, some

MOST_CHAPTERS = 8  # benches that have one each
WHAT = {"process": ("s", 1.0), "steady": ("ms", 1000.0)}  # duration -> unit, how many in a second


class Request(NamedTuple):
    """What the reader asked for."""

    environments: dict[str, Environment]
    baseline: str | None = None
    baseline_platform: str | None = None  # a part of its name
    against: Data | None = None


# === The answer =================================================================================
def headline(bench: Bench) -> str:
    """Say in a sentence for each size which scripts took how long, the fastest first.

    Scripts that cannot be told from the first of a group are in it.
    """
    sentences = []
    sizes = size_order(bench.runs["size"])
    for size in sizes:
        runs = timed(bench.runs[bench.runs["size"] == size])
        value = "process" if runs["process"].notna().any() else "steady"
        runs = measures.known_of(runs, value)
        if runs.empty:
            continue
        unit, factor = WHAT[value]
        parts = []
        for group in told_apart(runs, value):
            seconds = [measures.mean_seconds(runs[runs["mode"] == x], value) for x in group]
            low = number(factor * min(seconds))
            high = number(factor * max(seconds))
            span = low if low == high else f"{low} to {high}"
            parts.append(f"{join(group, 'or')} {span} {unit}")
        envs = list(dict.fromkeys(runs["env_id"]))
        where = f"On {envs[0]}" if len(envs) == 1 else f"Over {len(envs)} environments"
        with_size = f" with the {size} network" if len(sizes) > 1 else ""
        what = "an iteration"
        if value == "process":
            what = counted(runs["num_iterations"], "iteration")
        sentences.append(f"{where}{with_size}, {what} took {join(parts)}.")
    if (timed(bench.runs).groupby(["mode", "env_id", "size"]).size() == 1).all():
        sentences.append("Each program ran once: no difference in time can be claimed.")
    elif any(" or " in x for x in sentences):
        sentences.append("Scripts joined by \u201cor\u201d cannot be told apart.")
    return " ".join(sentences)


def told_apart(runs: pd.DataFrame, value: str) -> list[list[str]]:
    """Return groups of modes in the order of their means: the fastest, and what is like it, first.

    A mode is like the first of a group if the 95% interval of their ratio has 1 in it.
    """
    modes = mode_order(runs["mode"])
    means = {x: measures.mean_seconds(runs[runs["mode"] == x], value) for x in modes}
    groups: list[list[str]] = []
    for mode in sorted(modes, key=lambda x: means[x]):
        if groups:
            first = groups[-1][0]
            pair = stats.compare(runs[runs["mode"].isin((first, mode))], value, first)
            if len(pair) and pair["low"].iloc[0] <= 1 <= pair["high"].iloc[0]:
                groups[-1].append(mode)
                continue
        groups.append([mode])
    return groups


def looks_of(runs: pd.DataFrame) -> dict[str, Look]:
    frameworks = runs.drop_duplicates("mode").set_index("mode")["framework"]
    modes = mode_order(runs["mode"])
    return figures.looks(pd.DataFrame({"mode": modes, "framework": [frameworks[x] for x in modes]}))


def answer_bars(bench: Bench) -> list[Block]:
    """Return bars of whole trainings, or where none is known of iterations."""
    runs = timed(bench.runs)
    value = "process" if runs["process"].notna().any() else "steady"
    # A bar's parts are of the same runs as the whole.
    groups = [measures.known_of(x, value) for _, x in runs.groupby("size", sort=False)]
    known = pd.concat([runs.head(0), *groups])
    frame = measures.measure(known, (value, "startup"), bench.baseline).dropna(subset=[value])
    if frame.empty:
        return []
    unit, factor = WHAT[value]
    own = frame[frame["mode"] == bench.baseline].set_index("size")[value]
    scale = factor * frame["size"].map(own)
    frame["low"] = frame[f"{value}_low"] * scale
    frame["high"] = frame[f"{value}_high"] * scale
    frame["all"] = factor * frame[value]
    parts = {"all": "seconds"}
    caption = f"A steady iteration; whiskers: its ratio to {bench.baseline}'s, at 95%"
    if value == "process":
        caption = f"A whole training; whiskers: its ratio to {bench.baseline}'s, at 95%"
        if frame["startup"].notna().all() and (frame["startup"] < frame["process"]).all():
            frame["rest"] = frame["process"] - frame["startup"]
            parts = {"startup": "startup, iteration 0 included", "rest": "later iterations"}
    return [Plot("answer", figures.bars(frame, looks_of(bench.runs), parts, unit), caption)]


def answer_section(bench: Bench, request: Request) -> Section:
    blocks: list[Block] = [Text(headline(bench)), *answer_bars(bench), tables.answer_table(bench)]
    return Section("The answer", blocks)


# === Details ====================================================================================
def learning_section(bench: Bench, request: Request) -> Section | None:
    """Curves of returns, the test of their equivalence, and when a target was reached."""
    points = learning.progress(bench)
    if points.empty:
        return None
    is_dqn = (bench.runs["algorithm"] == "dqn").all()
    label = "mean return of the last 100 episodes" if is_dqn else "mean episodic return"
    blocks: list[Block] = [Text(x) for x in (tables.alike(bench),) if x]
    looks = looks_of(bench.runs)
    for i, size in enumerate(size_order(points["size"])):
        rows = points[points["size"] == size].rename(columns={"env_id": "panel", "steps": "x"})
        with_size = f", {size} network" if points["size"].nunique() > 1 else ""
        figure = figures.bands(rows, looks, "environment steps", label)
        blocks.append(Plot(f"learning_{i + 1}", figure, f"What was learnt by then{with_size}"))
    found = [tables.last_return_table(bench)] if is_dqn else []
    found.append(tables.return_table(bench, request.environments))
    found.append(tables.target_table(bench, request.environments))
    return Section("Learning", [*blocks, *filled(found)])


def filled(found: Sequence[Table]) -> list[Table]:
    return [x for x in found if len(x.frame)]


def environment_section(bench: Bench, request: Request) -> Section | None:
    """Compare the scripts in each environment."""
    if bench.runs["env_id"].nunique() < 2:
        return None
    table = tables.cell_table(bench)
    names = {f"steady_{x}": x for x in stats.Interval._fields}
    rows = table.frame.rename(columns=names | {"env_id": "row"})
    rows = rows.assign(panel=[f"{size} network" for size in rows["size"]])
    rows = rows[(rows["mode"] != bench.baseline) & rows["estimate"].notna()]
    blocks: list[Block] = []
    if len(rows):
        label = f"a steady iteration: times as long as {bench.baseline}"
        figure = figures.forest(rows, looks_of(bench.runs), label)
        blocks.append(Plot("environments", figure, label.capitalize()))
    return Section("By environment", [*blocks, table])


def startup_section(bench: Bench, request: Request) -> Section | None:
    found: list[Block] = [*filled([tables.startup_table(bench), tables.crossing_table(bench)])]
    runs = timed(bench.runs)
    ratio = (runs["early"] / runs["steady"]).groupby(runs["mode"]).median().dropna()
    late = [f"{mode} ({number(x)} times)" for mode, x in ratio.items() if x > checks.ODD]
    if late:
        found.append(Text(f"Iterations 1 to 7 take longer than later ones in {join(late)}."))
    return Section("Startup", found) if found else None


def phase_section(bench: Bench, request: Request) -> Section | None:
    if bench.synced.empty:
        return None
    table = tables.phase_table(bench)
    parts = {"rollout_steady": "rollout", "update_steady": "update"}
    rows = table.frame.assign(low=np.nan, high=np.nan)
    rows = rows.assign(**{x: 1000 * rows[x] for x in parts})
    figure = figures.bars(rows, looks_of(bench.synced), parts, "ms")
    return Section("Rollout and update", [Plot("phases", figure, table.caption), table])


def compile_section(bench: Bench, request: Request) -> Section | None:
    found = filled([tables.compile_table(bench)])
    return Section("Compile modes", [*found]) if found else None


def memory_section(bench: Bench, request: Request) -> Section | None:
    found = filled([tables.memory_table(bench)])
    return Section("Memory", [*found]) if found else None


SECTIONS: dict[str, Callable[[Bench, Request], Section | None]] = {
    "answer": answer_section,
    "learning": learning_section,
    "environments": environment_section,
    "startup": startup_section,
    "phases": phase_section,
    "compile modes": compile_section,
    "memory": memory_section,
}


# === Sections on all runs =======================================================================
def platform_section(several: Sequence[Bench], request: Request) -> Section | None:
    """Compare the platforms, script by script."""
    runs = pd.concat([bench.runs for bench in several])
    platforms = [str(x) for x in runs["platform"].value_counts().index]
    if len(platforms) < 2:
        return None
    wanted = request.baseline_platform
    baseline = next((x for x in platforms if wanted and wanted in x), platforms[0])
    frame = measures.contenders(runs, "platform", baseline)
    if frame.empty:
        return Section("Platforms", [Text(f"No run was made alike on {join(platforms)}.")])
    caption = f"Times as long as on {baseline}, with 95% intervals, in the blocks that both have"
    table = tables.contender_table("platforms", caption, frame, "platform")
    return Section("Platforms", [table])


def against_section(runs: pd.DataFrame, old: pd.DataFrame) -> Section:
    """Compare two sets of results: the time of `runs` over that of `old`."""
    both = pd.concat([runs.assign(set="new"), old.assign(set="old")], ignore_index=True)
    both = both[both["sync"] == both["sync"].all()]
    if runs["platform"].nunique() == old["platform"].nunique() == 1:
        both = both.assign(platform="")  # a machine and another, or the same by another name
    frame = measures.contenders(both, "set", "old")
    if frame.empty:
        text = "No cell with the same settings is in both."
        return Section("Against the other results", [Text(text)])
    caption = "New over old, with 95% intervals, in the blocks that both have"
    cells = measures.contenders(both, "set", "old", ("size", "env_id", "mode"))
    found: list[Block] = [tables.contender_table("against", caption, frame, "set")]
    if cells["env_id"].nunique() > 1:
        words = f"{caption}, by environment"
        found.append(tables.contender_table("against_cells", words, cells, "set"))
    return Section("Against the other results", found)


def run_section(data: Data) -> Section:
    """Say what a reader should know of the runs themselves."""
    blocks: list[Block] = [Text(tables.scope(data.runs)), Bullets(checks.odd(data))]
    return Section("The runs", [*blocks, tables.machine_table(data.runs)])


# === The page ===================================================================================
def sections_of(data: Data, request: Request) -> list[Section]:
    """Return the whole report."""
    several = measures.benches(data, request.baseline)
    sections = []
    for i, bench in enumerate(several[:MOST_CHAPTERS]):
        made = [make(bench, request) for make in SECTIONS.values()]
        parts = [x for x in made if x]
        if len(several) > 1:
            sections.append(Section(bench.title, [Text(tables.scope(bench.runs))]))
            parts = [nested(x, f"part{i + 1}_") for x in parts]
        sections += parts
    if len(several) > MOST_CHAPTERS:
        names = some([x.title for x in several[MOST_CHAPTERS:]])
        text = f"These have fewer runs, and no chapter: {names}."
        sections.append(Section("More hyperparameters and platforms", [Text(text)]))
    compared = platform_section(several, request)
    if compared:
        sections.append(compared)
    if request.against is not None:
        sections.append(against_section(data.runs, request.against.runs))
    return [*sections, run_section(data)]


def nested(section: Section, prefix: str) -> Section:
    """Return a section one level deeper, whose files have names of their own."""
    blocks = [
        block._replace(name=prefix + block.name) if isinstance(block, Plot | Table) else block
        for block in section.blocks
    ]
    return Section(section.title, blocks, section.level + 1)


def write_report(data: Data, out: Path, request: Request) -> str:
    """Write the report into out; return the answers, sentence and table, as plain text."""
    sections = sections_of(data, request)
    envs = [str(x) for x in dict.fromkeys(data.runs["env_id"])]
    where = envs[0] if len(envs) == 1 else f"{len(envs)} environments"
    page.write(f"Benchmark report: {where}", sections, out)
    answers = [x for x in sections if x.title == "The answer"]
    parts = [block for x in answers for block in x.blocks if isinstance(block, Text | Table)]
    return "\n\n".join(page.brief(x) for x in parts)

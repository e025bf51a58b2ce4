"""The report: from runs to a page that answers first."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from analysis import checks, figures, learning, measures, page, stats, tables
from analysis.figures import Look
from analysis.formatting import join, number, pluralize, some
from analysis.measures import Experiment, in_order, timed
from analysis.page import Block, Bullets, Plot, Section, Table, Text
from analysis.runs import Data, load

MOST_CHAPTERS = 8  # experiments that have one each
# What is answered -> unit, how many in a second, and its name.
WHAT = {
    "process": ("s", 1.0, "whole training"),
    "total": ("s", 1.0, "training without imports"),
    "steady": ("ms", 1000.0, "steady iteration"),
}
ONCE = "Each ran once: no difference in time can be claimed."
JOINED = "Scripts joined by \u201cor\u201d cannot be told from the first of them"


# === The answer =================================================================================
class Group(NamedTuple):
    """Scripts by their time that cannot be told from the first of them."""

    modes: list[str]
    is_compared: bool = True  # False of a single script, where no interval says anything of it


def headline(experiment: Experiment) -> str:
    """Say in a sentence for each size which scripts took how long, the fastest first."""
    sentences = []
    orders = []
    runs = timed(experiment.runs)
    is_of_sizes = experiment.runs["size"].nunique() > 1
    for size, every in in_order(runs).groupby("size", sort=False):
        value = measures.whole(every) or "steady"
        unit, factor, _ = WHAT[value]
        known = measures.comparable(every, value)
        means = measures.summarize(known, [value], experiment.baseline).set_index("mode")[value]
        means = means.sort_values(kind="stable") * factor
        order = order_of(known, value, means.index)
        if not order:
            continue
        parts = []
        for modes, _ in order:
            ends = dict.fromkeys(number(x) for x in (means[modes].min(), means[modes].max()))
            parts.append(f"{join(modes, 'or')} {' to '.join(ends)} {unit}")
        envs = list(dict.fromkeys(known["env_id"]))
        where = f"On {envs[0]}" if len(envs) == 1 else f"Over {len(envs)} environments"
        with_size = f" with the {size} network" if is_of_sizes else ""
        length = pluralize(known["num_iterations"], "iteration")
        what = {"process": length, "total": f"{length} without imports", "steady": "an iteration"}
        sentences.append(f"{where}{with_size}, {what[value]} took {join(parts)}.")
        orders.append(order)
    if runs.groupby(["mode", "size"]).size().max() == 1:
        is_alone = all(len(order) == 1 for order in orders)
        no_claim = "It ran once." if is_alone else ONCE
        return " ".join([*sentences, no_claim])
    return " ".join([*sentences, *explain(orders)])


def order_of(runs: pd.DataFrame, value: str, modes: Sequence[str]) -> list[Group]:
    """Return modes, which come by their time, in groups.

    A mode cannot be told from another if the 95% interval of their ratio has 1 in it.
    """
    groups: list[Group] = []
    for mode in modes:
        compared = [x.modes for x in groups if x.is_compared]
        if not compared:
            groups.append(Group([mode]))
            continue
        first = compared[-1][0]
        pair = stats.compare(runs[runs["mode"].isin((first, mode))], value, first)
        if pair["low"].isna().all():  # of no pair, too
            groups.append(Group([mode], is_compared=False))
        elif pair["low"].iloc[0] <= 1 <= pair["high"].iloc[0]:
            compared[-1].append(mode)
        else:
            groups.append(Group([mode]))
    return groups


def explain(orders: Sequence[list[Group]]) -> list[str]:
    """Say what may be concluded from the scripts' order, for all sizes at once."""
    found = []
    unknown = {mode for order in orders for x in order if not x.is_compared for mode in x.modes}
    if unknown:
        names = some(sorted(unknown))
        found.append(f"Of {names} no difference can be claimed: too few runs have a counterpart.")
    counts = [[len(x.modes) for x in order if x.is_compared] for order in orders]
    if all(x == [1] for x in counts):
        return found
    if all(x == [2] for x in counts):
        found.append("The two cannot be told apart.")
    elif all(len(x) == 1 for x in counts):
        found.append("None of the others can be told from the first.")
    elif all(x == [1, 1] for x in counts) and not unknown:
        found.append("The two can be told apart.")
    elif all(set(x) == {1} for x in counts):
        which = "of the others" if unknown else "script"
        found.append(f"Each {which} can be told from the one before it.")
    elif any(max(x[:-1], default=1) > 1 for x in counts):
        found.append(f"{JOINED}; one that follows them can.")
    else:
        found.append(f"{JOINED}.")
    return found


def answer(experiment: Experiment) -> list[Block]:
    """Return the sentence, what to know before it is trusted, and bars."""
    blocks: list[Block] = [Text(headline(experiment) or "No duration of these runs counts.")]
    blocks += [Text(x) for x in checks.answer_warnings(experiment)]
    return [*blocks, *answer_bars(experiment, looks_of(experiment))]


def answer_bars(experiment: Experiment, looks: dict[str, Look]) -> list[Plot]:
    """Return bars of whole trainings, or where none is known of iterations; or nothing."""
    counts = timed(experiment.runs)
    value = measures.whole(counts) or "steady"
    unit, factor, what = WHAT[value]
    # A bar's parts are of the same runs as the whole.
    runs = measures.comparable(counts, value)
    if runs.empty:
        return []
    frame = measures.summarize(runs, (value, "startup"), experiment.baseline)
    base = frame["size"].map(frame[frame["mode"] == experiment.baseline].set_index("size")[value])
    for end in ("low", "high"):
        frame[end] = factor * base * frame[f"{value}_{end}"]
    frame["all"] = factor * frame[value]
    parts = {"all": "geometric mean"}
    if value == "process" and (frame["startup"] < frame["process"]).all():
        frame["rest"] = frame["process"] - frame["startup"]
        parts = {"startup": "startup", "rest": "later iterations"}
    figure = figures.bars(frame, looks, parts, f"{what} ({unit})")
    caption = f"A {what}"
    if frame["low"].notna().any():
        caption += f"; whiskers: its ratio to {experiment.baseline}'s, at 95%"
    return [Plot("answer", figure, caption)]


def looks_of(experiment: Experiment) -> dict[str, Look]:
    return figures.looks(in_order(experiment.runs.drop_duplicates("mode")))


# === Sections ===================================================================================
def learning_bands(experiment: Experiment) -> list[Block]:
    """Return the curves of returns, a figure for each size."""
    points = in_order(learning.progress(experiment))
    points = points.rename(columns={"env_id": "panel", "steps": "x"})
    off_policy = experiment.runs["algorithm"].isin(learning.OFF_POLICY).all()
    label = "mean return of the last 100 episodes" if off_policy else "mean episodic return"
    plots: list[Block] = []
    for size, own in points.groupby("size", sort=False):
        figure = figures.bands(own, looks_of(experiment), "environment steps", label)
        with_size = f", {size} network" if len(own) < len(points) else ""
        caption = f"What was learnt by then{with_size}"
        plots.append(Plot(f"learning_{len(plots) + 1}", figure, caption))
    return plots


# Of each section the title, and the names of tables or what else is in it.
SECTIONS: dict[str, tuple[str, list[str | Callable[[Experiment], list[Block]]]]] = {
    "answer": ("The answer", [answer, "answer"]),
    "learning": ("Learning", [learning_bands, "last_returns", "returns", "targets"]),
    "environments": ("By environment", ["cells"]),
    "startup": ("Startup", ["startup", "break_even"]),
    "phases": ("Rollout and update", ["phases"]),
    "compile modes": ("Compile modes", ["compile_modes"]),
    "memory": ("Memory", ["memory"]),
}


def section(name: str, experiment: Experiment) -> Section | None:
    """Return one of SECTIONS, if anything is in it."""
    title, parts = SECTIONS[name]
    blocks: list[Block] = []
    for part in parts:
        if isinstance(part, str):
            table = tables.make(part, experiment)
            blocks += [table] if len(table.frame) else []
        else:
            blocks += part(experiment)
    return Section(title, blocks) if blocks else None


# === Of all runs ================================================================================
def compared(name: str, title: str, frame: pd.DataFrame, caption: str) -> Section:
    """Return a section with a table of contenders."""
    if frame.empty:
        return Section(title, [Text("No cell with the same settings is in both.")])
    return Section(title, [tables.contender_table(name, caption, frame)])


def platform_section(several: Sequence[Experiment]) -> Section | None:
    """Compare the platforms, script by script, with the one that has most runs."""
    runs = pd.concat([experiment.runs for experiment in several])
    platforms = [str(x) for x in runs["platform"].value_counts().index]
    if len(platforms) < 2:
        return None
    baseline = platforms[0]
    frame = measures.contenders(runs, "platform", baseline)
    caption = f"Times as long as on {baseline}, with 95% intervals, in the blocks that both have"
    return compared("platforms", "Platforms", frame, caption)


def against_section(runs: pd.DataFrame, old: pd.DataFrame) -> Section:
    """Compare two sets of results: the time of `runs` over that of `old`."""
    both = pd.concat([runs.assign(set="new"), old.assign(set="old")], ignore_index=True)
    both = both[both["sync"] == both["sync"].all()]
    if runs["platform"].nunique() == old["platform"].nunique() == 1:
        both = both.assign(platform="")  # a machine and another, or the same by another name
    frame = measures.contenders(both, "set", "old")
    caption = "New over old, with 95% intervals, in the blocks that both have"
    return compared("against", "Against the other results", frame, caption)


def sections_of(data: Data, baseline: str | None, against: Data | None) -> list[Section]:
    """Return the whole report."""
    several = measures.experiments(data, baseline)
    sections = []
    for i, experiment in enumerate(several[:MOST_CHAPTERS]):
        made = [section(name, experiment) for name in SECTIONS]
        parts = [x for x in made if x]
        if len(several) > 1:
            sections.append(Section(experiment.title, [Text(tables.scope(experiment.runs))]))
            parts = [nested(x, f"part{i + 1}_") for x in parts]
        sections += parts
    if len(several) > MOST_CHAPTERS:
        names = some([x.title for x in several[MOST_CHAPTERS:]])
        text = f"These have fewer runs, and no chapter: {names}."
        sections.append(Section("More hyperparameters and platforms", [Text(text)]))
    compared = platform_section(several)
    if compared:
        sections.append(compared)
    if against is not None:
        sections.append(against_section(data.runs, against.runs))
    about = [Text(tables.scope(data.runs)), Bullets(checks.run_warnings(data))]
    return [*sections, Section("The runs", [*about, tables.machine_table(data.runs)])]


def nested(section: Section, prefix: str) -> Section:
    """Return a section one level deeper, whose files have names of their own."""
    blocks = [
        block._replace(name=prefix + block.name) if isinstance(block, Plot | Table) else block
        for block in section.blocks
    ]
    return Section(section.title, blocks, section.level + 1)


def write_report(
    data: Data, out: Path, baseline: str | None = None, against: Data | None = None
) -> str:
    """Write the report into out; return the answers, sentence and table, as plain text."""
    sections = sections_of(data, baseline, against)
    envs = [str(x) for x in dict.fromkeys(data.runs["env_id"])]
    where = envs[0] if len(envs) == 1 else f"{len(envs)} environments"
    page.write(f"Benchmark report: {where}", sections, out)
    answers = [x for x in sections if x.title == "The answer"]
    parts = [block for x in answers for block in x.blocks if isinstance(block, Text | Table)]
    return "\n\n".join(page.brief(x) for x in parts)


# === In notebooks ===============================================================================
def show(source: Any, *names: str, baseline: str | None = None) -> None:
    """Show sections of the report in a notebook: names are keys of SECTIONS, or "platforms".

    source is one source, or several, as runs.load() takes them.
    """
    data = load(source)
    several = measures.experiments(data, baseline)
    lines = [tables.scope(data.runs)]
    lines += [f"Left out: {name}: {reason}." for name, reason in list(data.left_out.items())[:10]]
    page.show(Section("", [Text(" ".join(lines))]))
    if "platforms" in names:
        same = Section("", [Text("All runs are from one platform.")])
        page.show(platform_section(several) or same)
        return
    for experiment in several:
        if len(several) > 1:
            page.show(Section(experiment.title, []))
        for name in names:
            absent = Section("", [Text(f"These runs have no data on {name}.")])
            page.show(section(name, experiment) or absent)

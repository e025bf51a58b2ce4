"""Write the report on a set of runs: the answer first, then the details."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import checks, figures, learning, measures, page, stats, tables
from analysis.figures import Style
from analysis.formatting import interval, join, number, pluralize, some
from analysis.measures import Experiment, in_order, timed
from analysis.page import Block, Bullets, Plot, Section, Table, Text
from analysis.runs import Data, load

MOST_CHAPTERS = 8  # maximum number of experiments that are shown; the others are only listed
# Column -> unit, number of units per second, and name.
DURATIONS = {
    "process": ("s", 1.0, "entire training"),
    "total": ("s", 1.0, "training without imports"),
    "steady": ("ms", 1000.0, "steady iteration"),
}
ONCE = "One run each: no conclusion."


# === The answer =================================================================================
def headline(experiment: Experiment) -> str:
    """Return sentences that compare the fastest script with the others, for each network size."""
    sentences = []
    runs = timed(experiment.runs)
    is_of_sizes = experiment.runs["size"].nunique() > 1
    for size, every in in_order(runs).groupby("size", sort=False):
        value = measures.whole(every) or "steady"
        unit, factor, _ = DURATIONS[value]
        known = measures.comparable(every, value)
        means = measures.summarize(known, [value], experiment.baseline).set_index("mode")[value]
        means = means.dropna().sort_values(kind="stable") * factor
        if means.empty:
            continue
        envs = list(dict.fromkeys(known["env_id"]))
        where = f"On {envs[0]}" if len(envs) == 1 else f"Over {len(envs)} environments"
        with_size = f" with the {size} network" if is_of_sizes else ""
        length = pluralize(known["num_iterations"], "iteration")
        what = {"process": length, "total": f"{length} without imports", "steady": "an iteration"}
        is_once = every.groupby("mode").size().max() == 1
        if is_once or len(means) == 1:
            times = [f"{number(mean)} {unit} with {mode}" for mode, mean in means.items()]
            sentences.append(f"{where}{with_size}, {what[value]} took {join(times)}.")
            sentences += [ONCE] if is_once else []
            continue
        fastest = f"{number(means.iloc[0])} {unit} with {means.index[0]}, the fastest script"
        sentences.append(f"{where}{with_size}, {what[value]} took {fastest}.")
        sentences += comparisons(known, value, list(means.index))
    return " ".join(dict.fromkeys(sentences))


def comparisons(runs: pd.DataFrame, value: str, modes: Sequence[str]) -> list[str]:
    """Return sentences that compare the other scripts with the first.

    There is one sentence per group: no significant difference, slower, faster, or too few runs.
    """
    fastest, *others = modes
    ratios = stats.compare(runs, value, fastest).set_index("mode")[[*stats.Interval._fields]]
    ratios = ratios.reindex(others)
    low, high = ratios["low"], ratios["high"]
    slower = [f"{mode} {interval(*ratios.loc[mode])}" for mode in others if low[mode] > 1]
    # A script may be faster than the one with the lowest mean in the runs that both have.
    faster = [f"{mode} {interval(*ratios.loc[mode])}" for mode in others if high[mode] < 1]
    same = [mode for mode in others if low[mode] <= 1 <= high[mode]]
    unknown = [mode for mode in others if np.isnan(low[mode])]
    sentences = {
        "No significant difference from it": same,
        f"Slower (time / {fastest} time)": slower,
        f"Faster in runs with the same seed (time / {fastest} time)": faster,
        "Too few runs to compare": unknown,
    }
    return [f"{start}: {join(names)}." for start, names in sentences.items() if names]


def answer(experiment: Experiment) -> list[Block]:
    """Return the headline, warnings about it, and a bar chart."""
    blocks: list[Block] = [Text(headline(experiment) or "These runs have no durations.")]
    blocks += [Text(x) for x in checks.answer_warnings(experiment)]
    return [*blocks, *answer_bars(experiment, styles_of(experiment))]


def answer_bars(experiment: Experiment, styles: dict[str, Style]) -> list[Plot]:
    """Return a bar chart of training times, or of iteration times if only those are known."""
    counts = timed(experiment.runs)
    value = measures.whole(counts) or "steady"
    unit, factor, what = DURATIONS[value]
    # The parts of a bar come from the same runs as its total.
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
    figure = figures.bars(frame, styles, parts, f"{what} ({unit})")
    caption = what.capitalize()
    if frame["low"].notna().any():
        caption += f"; whiskers: 95% interval of the ratio to {experiment.baseline}"
    return [Plot("answer", figure, caption)]


def styles_of(experiment: Experiment) -> dict[str, Style]:
    return figures.styles(in_order(experiment.runs.drop_duplicates("mode")))


# === Sections ===================================================================================
def returns_headline(experiment: Experiment) -> str:
    """Return a sentence with the final returns of each script, for each environment and size."""
    sentences = []
    several_sizes = experiment.runs["size"].nunique() > 1
    rows = learning.final_returns(experiment)
    for _, part in rows.groupby(["size", "env_id"], sort=False):
        first = part.iloc[0]
        parts = [
            f"{number(row['mean'])} with {row['mode']} ({pluralize([row['runs']], 'seed')}, "
            f"{number(row['least'])} to {number(row['most'])})"
            for row in part.to_dict("records")
        ]
        with_size = f" with the {first['size']} network" if several_sizes else ""
        where = f"On {first['env_id']}{with_size}"
        sentences.append(f"{where}, the mean final return was {join(parts)}.")
    return " ".join(sentences)


def learning_blocks(experiment: Experiment) -> list[Block]:
    """Return the final returns in words, and learning curves."""
    sentence = returns_headline(experiment)
    sentences: list[Block] = [Text(sentence)] if sentence else []
    return [*sentences, *learning_bands(experiment)]


def learning_bands(experiment: Experiment) -> list[Block]:
    """Return learning curves, a figure for each size."""
    points = in_order(learning.progress(experiment))
    points = points.rename(columns={"env_id": "panel", "steps": "x"})
    off_policy = experiment.runs["algorithm"].isin(learning.OFF_POLICY).all()
    label = "mean return of the last 100 episodes" if off_policy else "mean episodic return"
    plots: list[Block] = []
    for size, part in points.groupby("size", sort=False):
        figure = figures.bands(part, styles_of(experiment), "environment steps", label)
        with_size = f", {size} network" if len(part) < len(points) else ""
        caption = f"Learning curves{with_size}"
        plots.append(Plot(f"learning_{len(plots) + 1}", figure, caption))
    return plots


# Section -> title and contents: names of tables, or functions that return blocks.
SECTIONS: dict[str, tuple[str, list[str | Callable[[Experiment], list[Block]]]]] = {
    "answer": ("The answer", [answer, "answer"]),
    "learning": ("Learning", [learning_blocks, "last_returns", "returns"]),
    "targets": ("Time to a target return", ["targets"]),
    "environments": ("By environment", ["cells"]),
    "startup": ("Startup", ["startup", "break_even"]),
    "phases": ("Rollout and update", ["phases"]),
    "compile modes": ("Compile modes", ["compile_modes"]),
    "memory": ("Memory", ["memory"]),
}


def section(name: str, experiment: Experiment) -> Section | None:
    """Return one of SECTIONS, or None if it has no contents."""
    title, parts = SECTIONS[name]
    blocks: list[Block] = []
    for part in parts:
        if isinstance(part, str):
            table = tables.make(part, experiment)
            blocks += [table] if len(table.frame) else []
        else:
            blocks += part(experiment)
    return Section(title, blocks) if blocks else None


# === All runs ===================================================================================
def compared(name: str, title: str, frame: pd.DataFrame, caption: str) -> Section:
    """Return a section with a table that compares platforms or two sets of results."""
    if frame.empty:
        return Section(title, [Text("There are no runs with the same settings to compare.")])
    return Section(title, [tables.contender_table(name, caption, frame)])


def platform_section(several: Sequence[Experiment]) -> Section | None:
    """Compare each script on other platforms with the platform that has the most runs."""
    runs = pd.concat([experiment.runs for experiment in several])
    platforms = [str(x) for x in runs["platform"].value_counts().index]
    if len(platforms) < 2:
        return None
    baseline = platforms[0]
    frame = measures.contenders(runs, "platform", baseline)
    caption = f"Time / time on {baseline}, with 95% intervals, over the blocks that both share"
    return compared("platforms", "Platforms", frame, caption)


def against_section(runs: pd.DataFrame, old: pd.DataFrame) -> Section:
    """Return a section that compares two sets of results by the ratio of new to old times."""
    both = pd.concat([runs.assign(set="new"), old.assign(set="old")], ignore_index=True)
    both = both[both["sync"] == both["sync"].all()]
    if runs["platform"].nunique() == old["platform"].nunique() == 1:
        both = both.assign(platform="")  # otherwise runs on different machines are not compared
    frame = measures.contenders(both, "set", "old")
    caption = "New time / old time, with 95% intervals, over the blocks that both share"
    return compared("against", "Comparison with the earlier results", frame, caption)


def sections_of(
    data: Data, baseline: str | None, against: Data | None, returns: bool
) -> list[Section]:
    """Return the sections of the report; with `returns`, it begins with learning."""
    several = measures.experiments(data, baseline)
    names = ["learning", *SECTIONS] if returns else list(SECTIONS)
    pooled = []
    if data.runs["platform"].nunique() > 1:  # returns do not depend on the platform
        names = [x for x in names if x != "learning"]
        every = measures.experiments(measures.without_platforms(data), baseline)
        pooled = chapters(every, ["learning"], "all_")
    sections = chapters(several, list(dict.fromkeys(names)), "part")
    sections = [*pooled, *sections] if returns else [*sections, *pooled]
    compared = platform_section(several)
    if compared:
        sections.append(compared)
    if against is not None:
        sections.append(against_section(data.runs, against.runs))
    about = [Text(tables.scope(data.runs)), Bullets(checks.run_warnings(data))]
    if threads := tables.threads(data.runs):
        about.insert(1, Text(threads))
    return [*sections, Section("The runs", [*about, tables.machine_table(data.runs)])]


def chapters(several: list[Experiment], names: Sequence[str], prefix: str) -> list[Section]:
    """Return the named sections of each experiment, below its title if there are several."""
    sections = []
    for i, experiment in enumerate(several[:MOST_CHAPTERS]):
        parts = [x for x in (section(name, experiment) for name in names) if x]
        if len(several) > 1 and parts:
            sections.append(Section(experiment.title, [Text(tables.scope(experiment.runs))]))
            parts = [nested(x, f"{prefix}{i + 1}_") for x in parts]
        sections += parts
    if len(several) > MOST_CHAPTERS:
        rest = some([x.title for x in several[MOST_CHAPTERS:]])
        text = f"Experiments that are not shown, because they have fewer runs: {rest}."
        sections.append(Section("More hyperparameters and platforms", [Text(text)]))
    return sections


def nested(section: Section, prefix: str) -> Section:
    """Return a section one level deeper, with a prefix added to the names of its files."""
    blocks = [
        block._replace(name=prefix + block.name) if isinstance(block, Plot | Table) else block
        for block in section.blocks
    ]
    return Section(section.title, blocks, section.level + 1)


def write_report(
    data: Data,
    out: Path,
    baseline: str | None = None,
    against: Data | None = None,
    returns: bool = False,
) -> str:
    """Write the report to a folder; return the headlines and tables as plain text."""
    sections = sections_of(data, baseline, against, returns)
    envs = [str(x) for x in dict.fromkeys(data.runs["env_id"])]
    where = envs[0] if len(envs) == 1 else f"{len(envs)} environments"
    page.write(f"Benchmark report: {where}", sections, out)
    title = "Learning" if returns else "The answer"
    answers = [x for x in sections if x.title == title]
    parts = [block for x in answers for block in x.blocks if isinstance(block, Text | Table)]
    return "\n\n".join(page.brief(x) for x in parts)


# === In notebooks ===============================================================================
def show(source: Any, *names: str, baseline: str | None = None) -> None:
    """Show sections of the report in a notebook: names are keys of SECTIONS, or "platforms".

    source is one source or several, as in runs.load().
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

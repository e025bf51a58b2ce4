"""Turn runs into a report of tables and figures.

    python -m analysis.report RUNS [--out DIR] [--against OTHER] [--env-timing FILE]

It prints a table and writes DIR/report.md, DIR/report.html, which needs no other file, and DIR's
figures. Any subset of the benchmark will do, from one run up; the report names what is missing.
"""

import argparse
import base64
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import NamedTuple

import markdown
import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import figures, readings, stats
from analysis.runs import Data, SourceError, load

MEANS = "Geometric means over repeats, then over environments; steps/s follow from the steady time"
MOST_CELLS = 40  # in the table that is printed; beyond them it is one row per mode and size
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto;
       padding: 0 1rem; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; }
th { border-bottom: 2px solid #888; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
"""


class Section(NamedTuple):
    title: str
    text: str  # a reading of the data, or why there is none
    figures: dict[str, Figure]  # file name without suffix -> figure
    tables: dict[str, pd.DataFrame]  # caption -> table whose cells are text


# === Tables =====================================================================================
def cell_table(runs: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return a row per environment, model size and mode: durations, speed and final return."""
    rows = []
    for env_id in sorted(runs["env_id"].unique()):
        for size in stats.sizes(runs):
            cell = runs[(runs["env_id"] == env_id) & (runs["size"] == size)]
            where = {"environment": env_id, "model": size}
            rows += [where | row for row in mode_rows(cell, baseline)]
    return pd.DataFrame(rows).drop(columns="environments")


def overview_table(runs: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return a row per model size and mode, over all environments."""
    parts = [(size, runs[runs["size"] == size]) for size in stats.sizes(runs)]
    rows = [{"model": size} | row for size, part in parts for row in mode_rows(part, baseline)]
    return pd.DataFrame(rows).drop(columns="mean final return")


def mode_rows(runs: pd.DataFrame, baseline: str) -> list[dict[str, str]]:
    """Return a row per mode: mean durations, and the steady time relative to the baseline's."""
    ratios = readings.relative_times(runs, "steady", baseline)
    comparable, rows = readings.one_length(runs), []
    for mode in figures.mode_order(runs["mode"]):
        group = runs[runs["mode"] == mode]
        ratio = "1" if mode == baseline else "-"
        if mode in ratios.index:
            ratio = readings.interval(*ratios.loc[mode, ["ratio", "low", "high"]])
        logs = np.log(group[["startup", "steady"]]).groupby(group["env_id"]).mean().mean()
        startup, steady = np.exp(logs)
        row = {"mode": mode, "environments": str(group["env_id"].nunique())}
        row |= {"runs": str(len(group)), "startup (s)": format_value(startup, ".2f")}
        row |= {"steady iteration (ms)": format_value(1000 * steady, ".1f")}
        row |= {"steps/s": format_value(group["batch_size"].iloc[0] / steady, ",.0f")}
        row |= {f"time / {baseline}": ratio}
        returns = comparable.loc[comparable["mode"] == mode, "final_return"]
        row |= {"mean final return": format_value(returns.mean(), ".1f")}
        rows.append(row)
    return rows


def format_value(value: float, form: str) -> str:
    return "-" if np.isnan(value) else format(value, form)


def speedup_text(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table of stats.speedup_table for reading."""
    rows = []
    for row in table.to_dict("records"):
        interval = "-"
        if row["blocks"]:
            interval = readings.interval(row["paired"], row["low"], row["high"])
        rows.append(
            {
                "candidate": row["candidate"],
                "model": row["size"],
                "speedup, paired, 95% interval": interval,
                "geometric mean": readings.number(row["geometric_mean"]),
                "median": readings.number(row["median"]),
                "minimum": readings.number(row["minimum"]),
                "maximum": readings.number(row["maximum"]),
                "pairs": str(row["pairs"]),
                "blocks": str(row["blocks"]),
                "environments": str(row["environments"]),
            }
        )
    return pd.DataFrame(rows)


def difference_text(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table of stats.difference_table for reading."""
    rows = [
        {
            "candidate": row["candidate"],
            "model": row["size"],
            "mean difference (s), 95% interval": readings.interval(
                row["mean"], row["low"], row["high"]
            ),
            "median": readings.number(row["median"]),
            "minimum": readings.number(row["minimum"]),
            "maximum": readings.number(row["maximum"]),
            "blocks": str(row["blocks"]),
        }
        for row in table.to_dict("records")
    ]
    return pd.DataFrame(rows)


def equivalence_text(tests: pd.DataFrame) -> pd.DataFrame:
    """Return a table of readings.equivalence_table for reading."""
    rows = [
        {
            "environment": row["env_id"],
            "model": row["size"],
            "mode": row["mode"],
            "difference, 90% interval": readings.interval(
                row["difference"], row["low"], row["high"]
            ),
            "margin": readings.number(row["margin"]),
            "p": format_value(row["p_value"], ".3f"),
            "verdict": row["verdict"],
        }
        for row in tests.to_dict("records")
    ]
    return pd.DataFrame(rows)


def return_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the IQM of the final returns, by environment, model size and mode."""
    rows = []
    finished = runs.dropna(subset=["final_return"])
    for _, group in finished.groupby(["env_id", "size", "mode"]):
        first, returns = group.iloc[0], group["final_return"].to_numpy()
        rows.append(
            {
                "environment": first["env_id"],
                "model": first["size"],
                "mode": first["mode"],
                "runs": str(len(returns)),
                "final return, IQM, 95% interval": readings.interval(
                    *stats.iqm_interval([returns])
                ),
                "best return, mean": readings.number(group["best_return"].mean()),
            }
        )
    return pd.DataFrame(rows)


def score_text(scores: pd.DataFrame) -> pd.DataFrame:
    """Return a table of readings.score_table for reading."""
    rows = [
        {
            "model": row["size"],
            "mode": row["mode"],
            "score, IQM, 95% interval": readings.interval(row["estimate"], row["low"], row["high"]),
            "environments": str(row["environments"]),
            "runs": str(row["runs"]),
        }
        for row in scores.to_dict("records")
    ]
    return pd.DataFrame(rows)


def memory_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the most memory, in MB, that any run of a mode and model size used.

    They are compared over the environments that all have, or, if there are none, over all.
    """
    common = readings.shared(runs, ["env_id"], ["size", "mode"])
    groups = (runs if common.empty else common).groupby(["size", "mode"])
    peaks = groups[["peak_host_bytes", "peak_device_bytes"]].max() / 1e6
    peaks = peaks.map(lambda x: format_value(x, ",.0f"))
    names = groups["env_id"].unique()
    peaks.insert(0, "in", names.map(lambda x: x[0] if len(x) == 1 else str(len(x))))
    columns = ["model", "mode", "environments", "host (MB)", "device (MB)"]
    return peaks.reset_index().set_axis(columns, axis="columns")


def machine_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per kind of machine and set of versions."""
    names = ["platform", "host", "device", "driver", "os", "container", "torch", "jax", "flax"]
    groups = runs.groupby([*names, "commit"], sort=False)
    table = groups.agg(runs=("run", "size"), first=("started", "min"), last=("started", "max"))
    table = table.reset_index().drop(columns="platform")
    table["commit"] = table["commit"].str.replace(r"^(.{10})[0-9a-f]*", r"\1", regex=True)
    return table.rename(columns={"host": "machine"}).astype(str).replace("", "-")


# === Anomalies ==================================================================================
def slow_iterations(runs: pd.DataFrame, iterations: pd.DataFrame) -> list[str]:
    """Name the iterations after the first that took about as long as compiling would."""
    rows = iterations.merge(runs[["run", "first"]], on="run")
    usual = rows.groupby("run")["time/iteration"].transform("median")
    extra = rows["time/iteration"] - usual
    odd = rows[(rows["iteration"] > 0) & (extra > 0.25 * rows["first"]) & (extra > 3 * usual)]
    lines = []
    for run, group in odd.groupby("run"):
        seconds = [
            f"{row[1]:.0f} ({readings.number(row[2])} s)"
            for row in group[["iteration", "time/iteration"]].itertuples()
        ]
        lines.append(f"{run}: slow iteration {readings.join(seconds[:5])}, perhaps compiling again")
    return lines


def diverged(iterations: pd.DataFrame) -> list[str]:
    """Name the runs whose losses are no numbers from some iteration to the end."""
    losses = [f"losses/{name}" for name in ("policy_loss", "value_loss", "entropy")]
    rows = iterations.reindex(columns=[*losses, "run", "iteration"])
    finite = rows[rows[losses].notna().any(axis=1)].groupby("run")["iteration"].max()
    last = rows.groupby("run")["iteration"].max()
    since = finite.reindex(last.index, fill_value=-1) + 1
    return [
        f"{run}: no loss is a number from iteration {i:.0f} on"
        for run, i in since[since <= last].items()
    ]


def anomalies(data: Data, speedups: pd.DataFrame) -> dict[str, list[str]]:
    """Return what a reader should know before trusting the numbers, by kind."""
    runs, timed = data.runs, readings.uninterrupted(data.runs)
    found = {"Left out": [f"{name}: {reason}" for name, reason in data.left_out.items()]}
    found["Diverged"] = diverged(data.iterations)
    found["Slow iterations"] = slow_iterations(timed, data.iterations)
    late = data.iterations[data.iterations["iteration"] >= 8].groupby("run")["time/iteration"]
    uneven = (late.mean() / late.median()).loc[lambda x: x > 1.1]
    found["Uneven runs"] = [
        f"{run}: the mean of the steady iterations is {x:.2f} times their median"
        for run, x in uneven.items()
    ]
    cells = timed.groupby([x for x in stats.BLOCK if x != "repeat"])["steady"]
    off = (timed["steady"] / cells.transform("median"))[cells.transform("size") > 2]
    off = off[(off > 1.2) | (off < 1 / 1.2)]
    found["Outliers"] = [
        f"{runs.loc[i, 'run']}: its steady iteration takes {x:.2f} times its cell's median"
        for i, x in off.items()
    ]
    wide = speedups[speedups["high"] > 1.25 * speedups["low"]]
    found["Wide intervals"] = [
        f"{row.candidate}, {row.size}: {readings.interval(row.paired, row.low, row.high)}"
        for row in wide.itertuples()
    ]
    busy = timed[timed["load"] > timed["cores"] + 1]
    found["Made under load"] = [
        f"{row.run}: {row.load:.1f} processes wanted its {row.cores:.0f} cores as it started"
        for row in busy.itertuples()
    ]
    for name, what in [("commit", "commits"), ("torch", "torch"), ("jax", "jax"), ("flax", "flax")]:
        several = sorted(runs[name].unique())
        if len(several) > 1:
            found[f"Several versions: {what}"] = [value or "unknown" for value in several]
    changed = runs["commit"].str.endswith("-dirty").sum()
    if changed:
        found["Uncommitted changes"] = [f"{changed} runs were made with files changed since"]
    return {kind: lines for kind, lines in found.items() if lines}


def anomalies_section(data: Data, speedups: pd.DataFrame) -> Section:
    parts = []
    for kind, lines in anomalies(data, speedups).items():
        more = [f"and {len(lines) - 10} more"] if len(lines) > 10 else []
        items = "\n".join(f"- {line}" for line in [*lines[:10], *more])
        parts.append(f"**{kind}** ({len(lines)})\n\n{items}")
    return Section("Anomalies", "\n\n".join(parts) or "None found.", {}, {})


def limits_section(runs: pd.DataFrame) -> Section:
    """Say what the data cannot."""
    lines = []
    repeats = runs.groupby(["env_id", "size", "mode", "sync"])["repeat"].nunique()
    if repeats.max() == 1:
        lines.append("Each cell ran once, so there is no interval within an environment.")
    elif repeats.min() < 5:
        few = readings.counted([min(repeats)], "repeat")
        lines.append(f"Some cells have {few} only: too few for an interval of their returns.")
    envs = runs.groupby("size")["env_id"].unique()
    if runs["env_id"].nunique() == 1:
        lines.append(f"Only {runs['env_id'].iloc[0]} was run: other environments may differ.")
    else:
        lines += [
            f"The {size} model was run in {envs[size][0]} only."
            for size in stats.sizes(runs)
            if len(envs[size]) == 1
        ]
    missing = [size for size in stats.SIZE_ORDER if size not in set(runs["size"])]
    if missing:
        lines.append(f"No {readings.join(missing, 'or')} model was run.")
    missing = [mode for mode in figures.MODES if mode not in set(runs["mode"])]
    if missing:
        lines.append(f"These modes were not run: {readings.join(missing)}.")
    if not len(readings.synced(runs)):
        lines.append(readings.unphased(runs))
    if readings.uninterrupted(runs)["steady"].isna().any():
        lines.append("Runs of 8 iterations or fewer have no steady state.")
    if runs["platform"].nunique() == 1:
        lines.append(f"All runs are from one machine: {runs['platform'].iloc[0]}.")
    else:
        lines.append("Frameworks are compared within each machine only.")
    if runs["settings"].nunique() > 1:
        lines.append("Runs with different hyperparameters are never compared with each other.")
    lines.append("Intervals tell of environments and processes like these, not of other machines.")
    text = "\n".join(f"- {line}" for line in lines)
    return Section("What these data cannot say", text, {}, {})


# === Sections ===================================================================================
def overall_section(
    runs: pd.DataFrame, baseline: str, complexity: Mapping[str, float] | None
) -> Section:
    """Compare whole trainings; those of each length have figures and a table of their own."""
    drawn, tables = {}, {}
    groups = readings.by_length(runs)
    for length, group in groups:
        suffix = f"_{length}" if len(groups) > 1 else ""
        drawn[f"total{suffix}"] = figures.durations(group, "total", complexity)
        table = stats.speedup_table(group, "total", baseline)
        if table["blocks"].sum():
            speedups = figures.speedups(group, baseline, "total", complexity)
            drawn[f"total_speedup{suffix}"] = speedups
        what = f"whole training of {readings.counted([length], 'iteration')}"
        tables[f"Speedup over {baseline}, {what}"] = speedup_text(table)
    return Section("Overall", readings.overall(runs, baseline), drawn, tables)


def overhead_section(
    runs: pd.DataFrame, baseline: str, complexity: Mapping[str, float] | None
) -> Section:
    steady = stats.speedup_table(runs, "steady", baseline)
    startup = stats.difference_table(runs, "startup", baseline)
    drawn = {"overhead": figures.overhead(runs, complexity)}
    if startup["blocks"].sum():
        drawn["overhead_differences"] = figures.overhead_differences(runs, baseline, complexity)
    if steady["blocks"].sum():
        drawn["steady_speedup"] = figures.speedups(runs, baseline, "steady", complexity)
    tables = {
        f"Speedup over {baseline}, steady iteration": speedup_text(steady),
        f"Startup, seconds more than {baseline}": difference_text(startup),
    }
    parts = [
        readings.startup(runs),
        readings.late_compiling(runs),
        readings.steady(runs, baseline),
        readings.break_even(runs, baseline),
    ]
    return Section("Startup and steady state", " ".join(parts), drawn, tables)


def phases_section(
    runs: pd.DataFrame, baseline: str, complexity: Mapping[str, float] | None
) -> Section:
    drawn = {"phases": figures.phases(runs, baseline, complexity)}
    tables = {
        f"Speedup over {baseline}, {phase}": speedup_text(
            stats.speedup_table(runs, f"{phase}_steady", baseline)
        )
        for phase in ("rollout", "update")
    }
    return Section("Rollout and update", readings.phases(runs, baseline), drawn, tables)


def compilation_section(runs: pd.DataFrame, complexity: Mapping[str, float] | None) -> Section:
    drawn = {"compilation": figures.compilation(runs, complexity)}
    tables = {}
    for framework, group in runs.groupby("framework"):
        table = stats.speedup_table(group, "steady", f"{framework} none")
        if table["blocks"].sum():
            tables[f"Speedup over {framework} none, steady iteration"] = speedup_text(table)
    return Section("Compile modes", readings.compilation(runs), drawn, tables)


def platforms_section(runs: pd.DataFrame, complexity: Mapping[str, float] | None) -> Section:
    baseline, *others = runs["platform"].value_counts().index
    drawn, tables, parts = {}, {}, []
    for i, other in enumerate(others):
        parts.append(readings.platforms(runs, baseline, other))
        both = runs[runs["platform"].isin([baseline, other])]
        table = stats.speedup_table(both, "steady", baseline, "platform")
        if table["blocks"].sum():
            drawn[f"platforms_{i + 1}"] = figures.platforms(
                both, baseline, other, complexity=complexity
            )
            tables[f"Speedup of {other} over {baseline}, steady"] = speedup_text(table)
    return Section("Platforms", " ".join(parts), drawn, tables)


def learning_section(
    runs: pd.DataFrame, iterations: pd.DataFrame, tests: pd.DataFrame, baseline: str
) -> Section:
    drawn, ranges = {}, readings.return_ranges(runs, iterations)
    for size in stats.sizes(runs):
        part = runs[(runs["size"] == size) & runs["final_return"].notna()]
        if len(part):
            drawn[f"learning_{size}"] = figures.learning_curves(part, iterations)
            drawn[f"returns_{size}"] = figures.final_returns(part)
    text = readings.learning(tests, baseline) + readings.unscored(runs, ranges)
    scores = "Final returns over environments, from 0 (lowest return seen) to 1 (highest)"
    tables = {
        scores: score_text(readings.score_table(runs, ranges)),
        "Final returns": return_table(runs),
        f"Equivalence of final returns with {baseline}": equivalence_text(tests),
    }
    return Section("Learning", text, drawn, tables)


def against_section(runs: pd.DataFrame, other: pd.DataFrame) -> Section:
    """Compare two sets of results, cell by cell: the time of `runs` over that of `other`."""
    both = pd.concat([runs.assign(set="new"), other.assign(set="old")], ignore_index=True)
    rows, means = [], []
    for value, name in [("startup", "startup"), ("steady", "steady iteration")]:
        for _, cell in both.groupby(["mode", "env_id", "size", "sync"]):
            where = {"environment": cell["env_id"].iloc[0], "model": cell["size"].iloc[0]}
            rows += against_row(cell, value, where | {"duration": name})
        for _, group in both.groupby(["mode", "sync"]):
            means += against_row(group, value, {"duration": name})
    cells = pd.DataFrame(rows)
    if cells.empty:
        text = "No cell with the same settings is in both."
        return Section("Against the other results", text, {}, {})
    counts = cells["verdict"].value_counts()
    parts = [f"{verdict} in {count}" for verdict, count in counts.items()]
    text = (
        f"Over {readings.counted([len(cells)], 'duration')} of cells that both results have, the "
        f"verdict on the new one is: {readings.join(parts)}. Of those with an interval, one in "
        "twenty would be slower or faster by chance."
    )
    tables = {"Over environments and model sizes": pd.DataFrame(means), "Per cell": cells}
    return Section("Against the other results", text, {}, tables)


def against_row(runs: pd.DataFrame, value: str, where: dict[str, str]) -> list[dict[str, str]]:
    """Return one row that compares the new runs with the old, or none if they share no block."""
    table = stats.speedup_table(runs, value, "old", "set", ignore=("platform",))
    if table.empty or not table.iloc[-1]["blocks"]:
        return []
    row, first = table.iloc[-1], runs.iloc[0]
    ratio, low, high = 1 / row["paired"], 1 / row["high"], 1 / row["low"]
    start = {"mode": first["mode"], "synchronised": "yes" if first["sync"] else "no"}
    result = {"new / old, 95% interval": readings.interval(ratio, low, high)}
    result |= {"verdict": readings.verdict(low, high), "blocks": str(row["blocks"])}
    return [start | where | result]


def sections(
    data: Data, other: Data | None, complexity: Mapping[str, float] | None
) -> tuple[str, list[Section], pd.DataFrame]:
    """Return the answer, the sections, and the table to print."""
    everything = data.runs
    main = everything[everything["platform"] == everything["platform"].value_counts().index[0]]
    main = main[main["settings"] == main["settings"].value_counts().index[0]]
    runs, synced = readings.unsynced(main), readings.synced(main)
    whole, timed = readings.uninterrupted(main), readings.uninterrupted(runs)
    modes = readings.most_modes(whole)
    baseline = readings.choose_baseline(runs)
    comparable = readings.one_length(runs)
    ranges = readings.return_ranges(comparable, data.iterations)
    tests = readings.equivalence_table(comparable, ranges, baseline)
    cells = cell_table(runs, baseline)
    printed = cells if len(cells) <= MOST_CELLS else overview_table(runs, baseline)

    parts = [Section("Summary", scope(everything, main, runs), {}, {MEANS: printed})]
    machines = {"Runs": machine_table(everything), "Most memory": memory_table(whole)}
    parts.append(Section("Hardware and versions", "", {}, machines))
    if len(timed):
        parts.append(overall_section(readings.one_length(timed), baseline, complexity))
        parts.append(overhead_section(timed, baseline, complexity))
    if len(synced):
        parts.append(phases_section(synced, readings.choose_baseline(synced), complexity))
    if modes["compile_mode"].eq("none").any():
        parts.append(compilation_section(modes, complexity))
    everywhere = readings.uninterrupted(everything)
    if everywhere["platform"].nunique() > 1:
        parts.append(platforms_section(readings.unsynced(everywhere), complexity))
    parts.append(learning_section(comparable, data.iterations, tests, baseline))
    if other is not None:
        parts.append(against_section(everything, other.runs))
    parts.append(anomalies_section(data, stats.speedup_table(runs, "steady", baseline)))
    parts.append(limits_section(everything))
    if len(cells) > MOST_CELLS:
        parts.append(Section("Every cell", "", {}, {MEANS: cells}))
    return readings.answer(runs, tests, baseline), parts, printed


def scope(everything: pd.DataFrame, main: pd.DataFrame, runs: pd.DataFrame) -> str:
    """Say which runs the tables are about, and what they are in words."""
    text = f"{readings.counted([len(runs)], 'run')} on {main['platform'].iloc[0]}"
    text += ", made to wait between rollout and update" if runs["sync"].all() else ""
    whole = readings.uninterrupted(main)
    left, synced = len(everything) - len(main), len(whole) - len(readings.uninterrupted(runs))
    if left:
        with_other = f"{readings.counted([left], 'run')} with other settings or on other machines"
        text += f"; {with_other} {'is' if left == 1 else 'are'} not in these tables"
    if synced:
        titles = ["Rollout and update"] if len(readings.synced(main)) else []
        modes = readings.most_modes(whole)
        if modes["sync"].all() and modes["compile_mode"].eq("none").any():
            titles.append("Compile modes")
        with_sync = f"{readings.counted([synced], 'run')} with --sync-for-timing"
        places = readings.join([f"'{title}'" for title in [*titles, "Most memory"]])
        text += (
            f"; {with_sync} {'is' if synced == 1 else 'are'} not in these tables but in {places}"
        )
    words = (
        "Startup is from the start of the process to the end of iteration 0. A cell is all runs of "
        "one mode, environment and model size; a block is the runs of one machine, environment, "
        "model size and repeat, in which modes are compared with each other."
    )
    return " ".join(filter(None, [f"{text}.", readings.resumed(everything), words]))


# === Output =====================================================================================
def markdown_table(table: pd.DataFrame) -> str:
    lines = [list(table.columns), ["---"] * len(table.columns), *table.astype(str).to_numpy()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown_section(section: Section) -> str:
    parts = [f"## {section.title}", section.text]
    parts += [f"![{name.replace('_', ' ')}]({name}.png)" for name in section.figures]
    for caption, table in section.tables.items():
        if len(table):
            parts += [f"**{caption}**", markdown_table(table)]
    return "\n\n".join(part for part in parts if part)


def embed(html: str, folder: Path) -> str:
    """Put the images of folder into html itself."""

    def data_uri(match: re.Match) -> str:
        image = base64.b64encode((folder / match[1]).read_bytes()).decode()
        return f'src="data:image/png;base64,{image}"'

    return re.sub(r'src="([^":]+\.png)"', data_uri, html)


def write_report(
    data: Data,
    out: Path,
    other: Data | None = None,
    complexity: Mapping[str, float] | None = None,
) -> str:
    """Write report.md, report.html and figures into out; return the summary as plain text."""
    with suppress(OSError):
        out.mkdir(parents=True, exist_ok=True)
    if not (out.is_dir() and os.access(out, os.W_OK)):
        raise SourceError(f"--out must be a folder to write to, not {out}")
    answer, parts, printed = sections(data, other, complexity)
    for section in parts:
        for name, figure in section.figures.items():
            figure.savefig(out / f"{name}.png", dpi=150)
    title = "Benchmark report"
    text = "\n\n".join([f"# {title}", answer, *map(markdown_section, parts)]) + "\n"
    (out / "report.md").write_text(text)
    body = embed(markdown.markdown(text, extensions=["tables"]), out)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    (out / "report.html").write_text(f"<!doctype html><html>{head}<body>{body}</body></html>")
    return f"{printed.to_string(index=False)}\n\n{answer}"


def main() -> None:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m analysis.report", description=lines[0])
    parser.add_argument("runs", help="folder of runs, .parquet table, or wandb:entity/project")
    parser.add_argument("--out", type=Path, help="folder to write to; default RUNS/report")
    parser.add_argument("--against", metavar="OTHER", help="older results to compare with")
    timing = "what analysis.env_timing wrote; default results/env_timing.json, if it is there"
    parser.add_argument("--env-timing", metavar="FILE", default=figures.TIMINGS, help=timing)
    args = parser.parse_args()
    mpl.use("agg")
    try:
        data = load(args.runs)
        other = load(args.against) if args.against else None
        complexity = figures.load_complexity(args.env_timing)
        folder = Path(args.runs) if Path(args.runs).is_dir() else Path()
        out = args.out or folder / "report"
        print(write_report(data, out, other, complexity))
    except (SourceError, OSError) as error:
        print(f"analysis.report: {error}", file=sys.stderr)
        sys.exit(2)
    for name, reason in data.left_out.items():
        print(f"left out {name}: {reason}", file=sys.stderr)
    print(f"\nReport: {out / 'report.html'}")


if __name__ == "__main__":
    main()

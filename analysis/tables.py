"""The tables of the report: what is measured, as cells for a reader."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from analysis import learning, measures
from analysis.learning import Environment
from analysis.measures import Bench
from analysis.page import Table
from analysis.runs import PARTS
from analysis.words import counted, duration, interval, join, number

Cell = Callable[[pd.Series], str]
Known = dict[str, Environment]
PART_NAMES = {"imports": "imports", "setup": "set-up", "first": "iteration 0"}


# === Cells ======================================================================================
def table_of(
    name: str, caption: str, frame: pd.DataFrame, columns: dict[str, Cell], note: str = ""
) -> Table:
    """Return a table whose cells are made by a function of each row; empty columns are left out."""
    cells = {title: [cell(row) for _, row in frame.iterrows()] for title, cell in columns.items()}
    kept = {title: x for title, x in cells.items() if any(y not in ("", "-") for y in x)}
    return Table(name, caption, frame, pd.DataFrame(kept), note)


def span(prefix: str = "") -> Cell:
    """Return a function that writes a row's estimate, low and high, named with a prefix."""
    names = [f"{prefix}{x}" for x in ("estimate", "low", "high")]
    return lambda row: interval(*(float(row.get(name, np.nan)) for name in names))


def value(name: str, factor: float = 1) -> Cell:
    return lambda row: number(float(row[name]) * factor)


def text(name: str) -> Cell:
    return lambda row: str(row[name])


def model(frame: pd.DataFrame) -> dict[str, Cell]:
    """Return the column of the model size, if there are several."""
    return {"network": text("size")} if frame["size"].nunique() > 1 else {}


# === Time =======================================================================================
def answer_table(bench: Bench) -> Table:
    """Startup, iteration and whole training of each script, over environments."""
    values = ("startup", "steady", "process")
    frame = measures.measure(bench.runs, values, bench.baseline)
    envs = [str(x) for x in dict.fromkeys(bench.runs["env_id"])]
    where = envs[0] if len(envs) == 1 else "Geometric means over environments"
    note = (
        "Startup: process start to the end of iteration 0, where everything compiles. Iteration: "
        "the mean from iteration 8 on. Training: the whole process. Brackets: 95% intervals."
    )
    for _, group in frame.groupby("size", sort=False) if len(envs) > 1 else ():
        counts = [group[f"{x}_environments"].max() for x in ("steady", "process")]
        note += f" With the {group['size'].iloc[0]} network: {counted(counts[:1], 'environment')}"
        note += f", trainings {counts[1]}." if counts[1] != counts[0] else "."
    caption = f"{where}, {bench.title}"
    return table_of("answer", caption, frame, duration_columns(frame, bench.baseline), note)


def duration_columns(frame: pd.DataFrame, baseline: str) -> dict[str, Cell]:
    lengths = frame["length"].dropna().unique()
    whole = f"{counted(lengths, 'iteration')} (s)" if len(lengths) == 1 else "training (s)"
    columns = model(frame) | {"script": text("mode"), "runs": text("runs")}
    columns["startup (s)"] = value("startup")
    columns["iteration (ms)"] = value("steady", 1000)
    columns[f"times as long as {baseline}"] = span("steady_")
    if len(lengths) > 1:
        columns["iterations"] = value("length")
    columns[whole] = value("process")
    columns["training, times as long"] = span("process_")
    return columns


def cell_table(bench: Bench) -> Table:
    """The same in every environment."""
    values = ("startup", "steady", "process")
    frame = measures.measure(bench.runs, values, bench.baseline, ("size", "env_id"))
    columns = {"environment": text("env_id")} | duration_columns(frame, bench.baseline)
    return table_of("cells", "Every environment, network and script", frame, columns)


def startup_table(bench: Bench) -> Table:
    frame = measures.startups(bench).dropna(subset=["startup"])
    columns = model(frame) | {"script": text("mode")}
    columns |= {f"{PART_NAMES[x]} (s)": value(x) for x in PARTS}
    columns["startup (s)"] = value("startup")
    columns[f"seconds more than {bench.baseline}"] = span()
    return table_of("startup", "Startup and its parts", frame, columns)


def phase_table(bench: Bench) -> Table:
    baseline = measures.choose_baseline(bench.synced, bench.baseline)
    values = ("rollout_steady", "update_steady")
    frame = measures.measure(bench.synced, values, baseline)
    columns = model(frame) | {"script": text("mode")}
    for phase in ("rollout", "update"):
        columns[f"{phase} (ms)"] = value(f"{phase}_steady", 1000)
    columns[f"rollout, times as long as {baseline}"] = span("rollout_steady_")
    columns["update, times as long"] = span("update_steady_")
    return table_of("phases", "A steady iteration of synchronised runs", frame, columns)


def compile_table(bench: Bench) -> Table:
    runs = max((bench.runs, bench.synced), key=lambda x: x["mode"].nunique())
    frame = measures.compiling(runs)
    columns = (model(frame) if len(frame) else {}) | {
        "script": text("mode"),
        "a steady iteration, times as long": span("steady_"),
        "iteration 0, times as long": span("first_"),
        "as": text("compiled"),
    }
    caption = "What leaving compiling out, or doing it otherwise, costs in each framework"
    return table_of("compile_modes", caption, frame, columns)


def crossing_table(bench: Bench) -> Table:
    frame = measures.crossings(bench).rename(columns={"iterations": "estimate"})
    columns = model(frame) | {
        "starts sooner": text("sooner"),
        "overtaken by": text("later"),
        "after iterations": span(),
        "that is": lambda row: duration(row["seconds"]),
    }
    note = (
        "Brackets: from where on the 95% interval of their ratio does not rule out that "
        "it has happened, and from where on it says so."
    )
    caption = "Break-even: one starts sooner, the other overtakes it"
    return table_of("break_even", caption, frame, columns, note)


def contender_table(name: str, caption: str, frame: pd.DataFrame, contender: str) -> Table:
    """How long platforms, or new and old results, take over each other."""
    names = {"startup": "startup", "steady": "steady iteration", "process": "whole training"}
    columns = {contender: text(contender)} if frame[contender].nunique() > 1 else {}
    if frame["settings"].nunique() > 1:
        columns["hyperparameters"] = text("settings")
    columns |= model(frame)
    if "env_id" in frame:
        columns["environment"] = text("env_id")
    columns |= {
        "script": text("mode"),
        "duration": lambda row: names[row["value"]],
        "times as long": span(),
        "verdict": lambda row: verdict(row["low"], row["high"]),
        "blocks": text("blocks"),
    }
    return table_of(name, caption, frame, columns)


def verdict(low: float, high: float) -> str:
    if np.isnan(low):
        return "no interval, so no claim"
    return "slower" if low > 1 else "faster" if high < 1 else "no clear difference"


# === Learning ===================================================================================
def return_table(bench: Bench, known: Known) -> Table:
    frame = learning.returns(bench, known)
    names = ("difference", "difference_low", "difference_high")
    columns = model(frame) | {
        "environment": text("env_id"),
        "script": text("mode"),
        "runs": text("runs"),
        "mean": value("mean"),
        "median": lambda row: interval(row["median"], row["low"], row["high"]),
        f"mean minus {bench.baseline}'s, 90% interval": lambda row: interval(
            *(row[x] for x in names)
        ),
        "margin": value("margin"),
        "verdict": text("verdict"),
    }
    note = (
        "The median has its 95% interval from six runs on. Equivalent: the 90% interval of the "
        "difference of means lies within the margin. Where most runs reach a cap and some miss "
        "it, a mean's interval is too narrow: on CartPole-v1 the test claims equivalence wrongly "
        "up to 16 times in 100, and not 5."
    )
    caption = f"Final returns, and their equivalence with {bench.baseline}'s"
    return table_of("returns", caption, frame, columns, note)


def target_table(bench: Bench, known: Known) -> Table:
    frame = learning.targets(bench, known)
    columns = model(frame) | {
        "environment": text("env_id"),
        "target return": value("target"),
        "script": text("mode"),
        "runs that reached it": lambda row: f"{row['reached']} of {row['runs']}",
        "seconds": span(),
    }
    note = (
        "From the start of the process to the first iteration whose mean return reaches it: the "
        "median, and from six runs on its 95% interval. A run that never gets there counts as "
        "slower than all others."
    )
    return table_of("targets", "Time to a target return", frame, columns, note)


def last_return_table(bench: Bench) -> Table:
    frame = learning.last_returns(bench)
    columns = model(frame) | {
        "environment": text("env_id"),
        "script": text("mode"),
        "runs": text("runs"),
        "last 100 training episodes": span("last_100_"),
        f"minus {bench.baseline}'s": span("minus_"),
        "evaluated": lambda row: str(row["evaluated"] or "-"),
        "greedy": span("greedy_"),
        "epsilon 0.05": span("noisy_"),
        "random agent": span("random_"),
    }
    note = (
        "Means over seeds with 95% intervals (Student's t; of differences, Welch's). The last 100 "
        "training episodes explore as training does; the others are of evaluate.py."
    )
    return table_of("last_returns", "What was learnt, by three measures", frame, columns, note)


# === The runs themselves ========================================================================
def memory_table(bench: Bench) -> Table:
    frame = measures.memory(bench)
    columns = model(frame) | {
        "script": text("mode"),
        "host (MB)": value("peak_host_bytes", 1e-6),
        "device (MB)": value("peak_device_bytes", 1e-6),
    }
    caption = "Most memory used, in the environments that all scripts have"
    return table_of("memory", caption, frame, columns)


def machine_table(runs: pd.DataFrame) -> Table:
    frame = measures.machines(runs)
    columns = {x: text(x) for x in frame if x not in ("commit", "last", "container")}
    columns["os"] = lambda row: row["os"].split("-with")[0]
    columns["first"] = lambda row: row["first"][:16].replace("T", " ")
    columns["container"] = lambda row: "yes" if row["container"] else ""
    columns["commit"] = lambda row: row["commit"][:10] + row["commit"][40:]  # -dirty
    return table_of("machines", "Hardware and versions", frame, columns)


def scope(runs: pd.DataFrame) -> str:
    """Say what was run."""
    modes = measures.mode_order(runs["mode"])
    repeats = runs.groupby(["env_id", "size", "mode", "sync"])["repeat"].nunique()
    parts = [
        counted([runs["env_id"].nunique()], "environment"),
        counted([runs["size"].nunique()], "network size"),
        f"{counted(repeats, 'repeat')} each",
        f"of {counted(runs['num_iterations'], 'iteration')}",
    ]
    of = f"{counted([len(runs)], 'run')} of {counted([len(modes)], 'script')}"
    words = f"{of} in {', '.join(parts)}."
    agents = runs["num_agents"].dropna()
    if len(agents):
        words += f" A program trained {counted(agents, 'agent')} at once, each a run: "
        words += "durations and memory are the program's."
    resumed = list(runs.loc[runs["resumed"], "run"])
    if resumed:
        words += f" {counted([len(resumed)], 'run')} stopped and resumed: without durations."
    return words


def alike(bench: Bench) -> str:
    """Name the scripts that compute the same numbers."""
    same = [(mode, first) for mode, first in learning.identical(bench).items() if mode != first]
    if not same:
        return ""
    names = join([f"{mode} and {first}" for mode, first in same])
    return f"From the same seed the same numbers come out of {names}: they count once."

"""Times with one thread and with two, on two cores."""

import json
from pathlib import Path

import pandas as pd

from analysis import races
from analysis.page import Table
from analysis.stats import Interval, geometric_mean
from analysis.tables import multiple, table_of, text, value

ONE, TWO = "1 thread", "2 threads"
WITHOUT, WITH = "XLA without threads", "XLA with threads"
# Program in intel.jsonl with PyTorch's default of two threads -> the same with one thread.
INTEL = {
    "ppo_torch": "ppo_torch_1thread",
    "ppo_torch_compile": "ppo_torch_compile_1thread",
    "ppo_continuous_torch_compile_gymnasium": "cont_compile_1thread",
    "sac_torch_compile_gymnasium": "sac_1thread",
}


def pairs(path: Path, one: str, two: str) -> pd.DataFrame:
    """Return a row per race of `one` and `two`, with the time of `two` and the ratio one / two."""
    rows = []
    for name, race in races.named(path).items():
        times = race.times()
        if one in times:
            ratio = races.ratio_of(times[one], times[two])
            rows.append((name, 1000 * times[two].median(), *ratio))
    return pd.DataFrame(rows, columns=["program", "ms", *Interval._fields])


def idle_and_busy(path: Path, one: str, two: str) -> pd.DataFrame:
    """Return pairs on idle cores, with the ratio on busy cores in columns named busy_."""
    busy = pairs(path.parent / "busy/races.jsonl", one, two)
    busy = busy.drop(columns="ms").set_index("program").add_prefix("busy_")
    return pairs(path, one, two).join(busy, on="program")


def torch_table(path: Path) -> Table:
    columns = {
        "script and network": text("program"),
        "time per iteration, two threads (ms)": value("ms"),
        "one thread / two threads, idle": multiple(),
        "one thread / two threads, busy": multiple("busy_"),
    }
    return table_of("threads_torch", "PyTorch", idle_and_busy(path, ONE, TWO), columns)


def jax_table(path: Path) -> Table:
    columns = {
        "script and network": text("program"),
        "time per iteration, with threads (ms)": value("ms"),
        "without threads / with threads, idle": multiple(),
        "without threads / with threads, busy": multiple("busy_"),
    }
    return table_of("threads_jax", "JAX", idle_and_busy(path, WITHOUT, WITH), columns)


def linen_table(path: Path) -> Table:
    """Return time / Linen time with one and with two threads, on two idle cores."""
    rows = []
    for name, race in races.named(path).items():
        times = race.times()
        if "Linen" in times:
            row: dict[str, object] = {"program": name}
            for prefix, program in (("one_", ONE), ("two_", TWO)):
                ratio = races.ratio_of(times[program], times["Linen"])
                row |= {prefix + field: x for field, x in ratio._asdict().items()}
            rows.append(row)
    columns = {
        "script and network": text("program"),
        "one thread / Linen": multiple("one_"),
        "two threads / Linen": multiple("two_"),
    }
    return table_of("threads_linen", "PyTorch and Linen", pd.DataFrame(rows), columns)


def intel_table(path: Path) -> Table:
    """Return the ratio of the times with one thread and with two, on an Intel Xeon."""
    rows = []
    for race in races.read(path):
        times = race.times()
        for two, one in INTEL.items():
            if one in times and two in times:
                rows.append((two, *races.ratio_of(times[one], times[two])))
    frame = pd.DataFrame(rows, columns=["program", *Interval._fields])
    columns = {"script": text("program"), "one thread / two threads": multiple()}
    return table_of("threads_intel", "Intel", frame, columns)


def tuning_table(path: Path) -> Table:
    """Return the duration of a study of tune.py with two threads, and the ratio one / two."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    frame = pd.DataFrame(lines[1:])
    one, two = (frame.loc[frame["threads"] == x, "seconds"].to_numpy() for x in (1, 2))
    row = (str(len(two)), two.mean(), *geometric_mean(one / two))
    frame = pd.DataFrame([row], columns=["pairs", "seconds", *Interval._fields])
    columns = {"pairs of studies": text("pairs"), "duration, two threads (s)": value("seconds")}
    columns |= {"one thread / two threads": multiple()}
    return table_of("threads_tuning", "tune.py", frame, columns)


BLOCKS = {
    "threads_tuning": tuning_table,
    "threads_torch": torch_table,
    "threads_jax": jax_table,
    "threads_linen": linen_table,
    "threads_intel": intel_table,
}

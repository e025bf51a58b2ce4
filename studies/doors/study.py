"""Tables and the figure of the study of Doors, from runs of studies.doors.run.

layouts.csv has what complete runs measured, a row for each time that an agent was judged.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import figures, stats
from analysis.page import Table
from analysis.schema import SourceError

LAYOUTS = 225
COUNTS = ("iteration", "global_step", "solved", "steps", "optimal")
CELL = ["cell", "script"]  # cell is the first part of a run's name, as doors-64
MODES = ("dqn_linen", "dqn_linen_gymnasium", "dqn_torch", "dqn_torch_gymnasium")
SETTLED = 25  # iterations after which the pace is measured


def gather(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each time that a complete run was judged; ValueError where a file is none.

    Of the training episodes that ended since the agent was last judged, episodic_return is the mean
    and return_per_step all their returns by all their steps; iteration_seconds is the median of the
    iterations, startup the seconds to the first one's end.
    """
    for path in sorted(folder.glob("*/layouts.jsonl")):
        if not (path.parent / "run.json").exists():
            continue
        try:
            info = json.loads((path.parent / "run.json").read_text())
            if info["resumed"]:
                print(f"{path.parent} went on without a judge: left out", file=sys.stderr)
                continue
            own: dict[str, Any] = {"run": path.parent.name, "script": str(info["script"])}
            own |= {"cell": path.parent.name.split("__")[0], "seed": int(info["args"]["seed"])}
            lines = (path.parent / "metrics.jsonl").read_text().splitlines()
            log, before = pd.DataFrame(map(json.loads, lines)), 0
            own["startup"] = round(info["durations"]["imports"] + log["time/elapsed"].iloc[0], 4)
            for row in map(json.loads, path.read_text().splitlines()):
                counts = {name: int(row[name]) for name in COUNTS}
                part, before = log.iloc[before : counts["iteration"]], counts["iteration"]
                count = part["charts/episodes"].to_numpy(float)
                total, steps = (  # of no episode, return and length are null
                    (count * part[f"charts/episodic_{name}"].astype(float).fillna(0)).sum()
                    for name in ("return", "length")
                )
                measured = {"seconds": float(row["seconds"])}
                measured["iteration_seconds"] = part["time/iteration"].median()
                measured["episodic_return"] = total / (count.sum() or math.nan)
                measured["return_per_step"] = total / (steps or math.nan)
                yield own | counts | {name: round(float(x), 4) for name, x in measured.items()}
        except (LookupError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise SourceError(f"{path.parent} is no run of Doors: {error}") from error


def first_time(rows: pd.DataFrame) -> pd.Series:
    """Of one run's rows, the first where 95% of the layouts are solved; NaN if none."""
    there = rows[rows["solved"] >= 0.95 * LAYOUTS]
    return there.iloc[0] if len(there) else pd.Series(np.nan, rows.columns)


def pace(rows: pd.DataFrame) -> float:
    """Of one run's rows, the seconds of an iteration, once they have settled."""
    return float(rows.loc[rows["iteration"] > SETTLED, "iteration_seconds"].median())


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per cell and script: what its agents solve in the end, when they first did, its pace.

    perfect is how many seeds solve all layouts in at most 1.01 of the fewest steps. Of the share
    solved there are mean, least and most: it has a cap, so an interval of the mean would be too
    narrow. When 95% were first solved is a median with its interval, a seed that never gets there
    being the latest; it lies on the grid of the judgements. rate, the last return_per_step, is a
    mean; startup, pace and whole (the seconds of a run) are geometric means; all with Student's
    intervals.
    """
    table = []
    for _, group in rows.groupby(CELL):
        runs = [run.sort_values("iteration") for _, run in group.groupby("run")]
        last = pd.DataFrame([run.iloc[-1] for run in runs]).astype({"solved": float})
        first = pd.DataFrame([first_time(run) for run in runs])
        perfect = (last["solved"] == LAYOUTS) & (last["steps"] <= 1.01 * last["optimal"])
        solved = last["solved"] / LAYOUTS
        parts: dict[str, Any] = {"solved": (solved.mean(), solved.min(), solved.max())}
        rates = last["return_per_step"].to_numpy(float)
        parts["rate"] = stats.mean_interval(rates, [""] * len(rates))
        for name, column in (("steps_to", "global_step"), ("seconds_to", "seconds")):
            parts[name] = stats.median_interval(first[column].fillna(np.inf).to_numpy(float))
        values = {
            "startup": last["startup"],
            "pace": list(map(pace, runs)),
            "whole": last["seconds"],
        }
        parts |= {name: stats.geometric_mean(np.array(x, float)) for name, x in values.items()}
        row = group.iloc[0][CELL].to_dict() | {"seeds": len(runs), "perfect": int(perfect.sum())}
        row["over_optimum"] = last["steps"].sum() / (last["optimal"].sum() or np.nan)
        for name, three in parts.items():
            row |= dict(zip((name, f"{name}_low", f"{name}_high"), map(float, three), strict=True))
        table.append(row)
    return pd.DataFrame(table)


# === What a difference costs ====================================================================
class Kind(NamedTuple):
    """What runs of one study may differ in."""

    framework: Any
    library: Any
    environments: Any


LEVELS = Kind(("torch", "torch --compile", "linen"), ("gymnasium", "gymnax"), (64, 1024))


def kind_of(cell: str, script: str) -> tuple[str, Kind] | None:
    """The study and the kind: of "doors-public-64" and "dqn_linen", doors-public and linen's."""
    study, _, number = cell.rpartition("-")
    _, framework, *library = script.split("_")
    if not number.isdecimal():
        return None
    if study == "doors-compiled":
        study = "doors"
        framework += " --compile"
    return study, Kind(framework, library[0] if library else "gymnax", int(number))


def contrasts(rows: pd.DataFrame) -> pd.DataFrame:
    """How many times as long runs of one study take that differ in one thing, or in all three.

    Runs pair by seed, as those of a seed follow each other; the intervals are of the geometric mean
    of their ratios. Columns: study, slower and faster (Kind), factor, and of an iteration (pace)
    and of the run (whole) the estimate, low and high.
    """
    runs: dict[tuple[str, Kind], dict[int, tuple[float, float]]] = {}
    for _, run in rows.groupby("run"):
        last = run.sort_values("iteration").iloc[-1]
        if kind := kind_of(last["cell"], last["script"]):
            runs.setdefault(kind, {})[int(last["seed"])] = pace(run), float(last["seconds"])
    table = []
    for study in sorted({study for study, _ in runs}):
        kinds = [Kind(*x) for x in product(*LEVELS) if (study, Kind(*x)) in runs]
        pairs = [(a, b, changes(a, b)) for a, b in combinations(kinds, 2)]
        pairs = [x for x in pairs if len(x[2]) in (1, 3)]
        pairs.sort(key=lambda x: (len(x[2]), Kind._fields.index(x[2][0])))
        for slower, faster, names in pairs:
            a, b = runs[study, slower], runs[study, faster]
            both = sorted(a.keys() & b.keys())
            row: dict[str, Any] = {"study": study, "slower": slower, "faster": faster}
            row["factor"] = ", ".join(names)
            for i, name in enumerate(("pace", "whole")):
                ratio = stats.geometric_mean(np.array([a[x][i] / b[x][i] for x in both]))
                row |= dict(zip((name, f"{name}_low", f"{name}_high"), ratio, strict=True))
            table.append(row)
    return pd.DataFrame(table)


def changes(slower: Kind, faster: Kind) -> list[str]:
    """In what the second is further on than the first; nothing if it is behind in anything."""
    steps = {
        name: level.index(y) - level.index(x)
        for name, level, x, y in zip(Kind._fields, LEVELS, slower, faster, strict=True)
    }
    return [name for name, step in steps.items() if step] if min(steps.values()) >= 0 else []


# === Tables and figures =========================================================================
def draw(rows: pd.DataFrame, column: str, label: str) -> Figure:
    """Plot a column's mean over seeds against steps, with Student's interval."""
    rows = rows.assign(number=rows["cell"].str.partition("-")[2].astype(int)).sort_values("number")
    keys = ["number", "script", "global_step"]
    points = []
    for _, group in rows.groupby(keys):
        number, script, steps = group.iloc[0][keys]
        found = stats.mean_interval(group[column].to_numpy(), [""] * len(group))
        point = {"panel": f"{number:,} environments", "mode": script, "x": steps}
        points.append(point | found._asdict())
    frameworks = [x.split("_")[1] for x in MODES]
    looks = figures.looks(pd.DataFrame({"mode": MODES, "framework": frameworks}))
    return figures.bands(pd.DataFrame(points), looks, "environment steps", label)


def learning_table(rows: pd.DataFrame) -> Table:
    """What agents solve in the end, and after how many steps they first solved nearly all."""
    frame = summary(rows)
    cells = pd.DataFrame(
        {
            "cell": row["cell"],
            "script": row["script"],
            "perfect": f"{row['perfect']} of {row['seeds']}",
            "layouts solved (least, most)": span(row, "solved", "{:.3f}"),
            "steps over the fewest, where solved": number(row["over_optimum"], "{:.4f}"),
            "steps to 95%": span(row, "steps_to", "{:,.0f}"),
            "return by steps, in training": span(row, "rate", "{:.3f}"),
        }
        for row in frame.to_dict("records")
    )
    return Table("doors", "Doors: what greedy agents solve, and when", frame, cells)


def seconds_table(rows: pd.DataFrame) -> Table:
    """What runs take, in seconds."""
    frame = summary(rows)
    cells = pd.DataFrame(
        {
            "cell": row["cell"],
            "script": row["script"],
            "startup": span(row, "startup", "{:.2f}"),
            "5,120 steps": span(row, "pace", "{:.3g}"),
            "640,000 steps, with startup": span(row, "whole", "{:.3g}"),
            "to 95% of the layouts": span(row, "seconds_to", "{:.3g}"),
        }
        for row in frame.to_dict("records")
    )
    return Table("doors_seconds", "Doors: seconds", frame, cells)


def contrasts_table(rows: pd.DataFrame) -> Table:
    """How many times as long the slower of two kinds takes."""
    frame = contrasts(rows)
    cells = pd.DataFrame(
        {
            "study": row["study"],
            "first": described(row["slower"]),
            "second": described(row["faster"]),
            "they differ in": row["factor"],
            "a step, first / second": span(row, "pace", "{:.2f}"),
            "the run, first / second": span(row, "whole", "{:.2f}"),
        }
        for row in frame.to_dict("records")
    )
    return Table("doors_contrasts", "Doors: what a difference costs", frame, cells)


def described(kind: Kind) -> str:
    return f"{kind.framework}, {kind.library}, {kind.environments:,}"


def number(x: float, form: str) -> str:
    """As it is written; of what never is, "never", and of what is not, "-"."""
    return "-" if math.isnan(x) else "never" if math.isinf(x) else form.format(x)


def span(row: dict[Any, Any], name: str, form: str) -> str:
    """An estimate with what lies around it, as far as there is any."""
    estimate, low, high = (number(row[x], form) for x in (name, f"{name}_low", f"{name}_high"))
    return estimate if low in ("-", "never") else f"{estimate} [{low}, {high}]"


def table_at(source: Path, make: Callable[[pd.DataFrame], Table]) -> Table:
    return make(pd.read_csv(source))


BLOCKS = {
    "doors": partial(table_at, make=learning_table),
    "doors_seconds": partial(table_at, make=seconds_table),
    "doors_contrasts": partial(table_at, make=contrasts_table),
}


def update(source: Path, out: Path) -> None:
    """Draw the figure of a folder of runs, gathered into layouts.csv, or of the study."""
    if not (source / "layouts.csv").exists():
        rows = pd.DataFrame(list(gather(source)))
        if rows.empty:
            raise SourceError(f"{source} has no complete run of Doors")
        rows.to_csv(out / "layouts.csv", index=False)
        source = out
    rows = pd.read_csv(source / "layouts.csv")
    rows = rows[rows["cell"].str.fullmatch(r"doors-\d+")].assign(share=rows["solved"] / LAYOUTS)
    if len(rows):
        figure = draw(rows, "share", "share of layouts solved")
        (out / "layouts.png").write_bytes(figures.png(figure))

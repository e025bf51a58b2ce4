"""Tables and a figure of the study of Doors, from runs of analysis.doors_run.

    python -m analysis.doors runs results/doors/layouts.csv

It puts the layouts.jsonl of all complete runs into one table, a row for each time that an agent was
judged, and draws doors.png beside it.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import figures, stats
from analysis.render import Table

LAYOUTS = 225
COUNTS = ("iteration", "global_step", "solved", "steps", "optimal")
KIND = ["cell", "script"]  # cell is the first part of a run's name, as doors-64
MODES = ("dqn_linen", "dqn_linen_gymnasium", "dqn_torch", "dqn_torch_gymnasium")


def gather(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each time that a complete run was judged; ValueError where a file is none."""
    for path in sorted(folder.glob("*/layouts.jsonl")):
        if not (path.parent / "run.json").exists():
            continue
        try:
            info = json.loads((path.parent / "run.json").read_text())
            own: dict[str, Any] = {"run": path.parent.name, "script": str(info["script"])}
            own |= {"cell": path.parent.name.split("__")[0], "seed": int(info["args"]["seed"])}
            for line in path.read_text().splitlines():
                row = json.loads(line)
                counts = {name: int(row[name]) for name in COUNTS}
                yield own | counts | {"seconds": round(float(row["seconds"]), 3)}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path.parent} is no run of Doors: {error}") from error


def first_time(rows: pd.DataFrame) -> pd.Series:
    """Of one run's rows, the first where 95% of the layouts are solved; NaN if none."""
    there = rows[rows["solved"] >= 0.95 * LAYOUTS]
    return there.iloc[0] if len(there) else pd.Series(np.nan, rows.columns)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per kind of run: what its agents solve in the end, and when they first solved 95%.

    Intervals are of the mean over seeds, Student's t at 95%; of seconds, of the geometric mean. Of
    a kind in which some seeds never get there, there are no seconds.
    """
    table = []
    for _, group in rows.groupby(KIND):
        runs = [run.sort_values("iteration") for _, run in group.groupby("run")]
        last = pd.DataFrame([run.iloc[-1] for run in runs]).astype({"solved": float})
        first = pd.DataFrame([first_time(run) for run in runs])
        extra = last["steps"].sum() / max(last["optimal"].sum(), 1)
        perfect = (last["solved"] == LAYOUTS) & (last["steps"] <= 1.01 * last["optimal"])
        one = [""] * len(runs)
        row = group.iloc[0][KIND].to_dict() | {"seeds": len(runs)}
        row |= {"perfect": int(perfect.sum()), "reached": int(first["solved"].notna().sum())}
        row |= {"over_optimum": extra if last["optimal"].sum() else np.nan}
        values = {"solved": last["solved"] / LAYOUTS, "whole": np.log(last["seconds"])}
        values |= {"steps_to": first["global_step"], "seconds_to": np.log(first["seconds"])}
        for name, x in values.items():
            # A mean of the seeds that get there would be that of the lucky ones.
            interval = stats.mean_interval(x.to_numpy(float) + 0 * x.sum(skipna=False), one)
            log = name in ("whole", "seconds_to")
            for end, y in zip(("", "_low", "_high"), interval, strict=True):
                row[name + end] = np.exp(y) if log else y
        table.append(row)
    return pd.DataFrame(table)


@figures.styled
def draw(rows: pd.DataFrame) -> Figure:
    """Plot the share of layouts solved against steps, and against seconds, in the main cells."""
    rows = rows[rows["cell"].str.fullmatch(r"doors-\d+")]
    parts = [
        rows.assign(
            panel=[f"{x.partition('-')[2]} environments, by {word}" for x in rows["cell"]],
            mode=rows["script"],
            x=rows[name],
            y=rows["solved"] / LAYOUTS,
        )
        for name, word in (("global_step", "steps"), ("seconds", "seconds"))
    ]
    looks = figures.looks(
        pd.DataFrame({"mode": MODES, "framework": [x.split("_")[1] for x in MODES]})
    )
    label = "share of the 225 layouts that are solved"
    return figures.curves(pd.concat(parts), looks, "environment steps, or seconds", label)


def table(rows: pd.DataFrame) -> Table:
    """The summary as a table to read."""
    cells = pd.DataFrame(
        {
            "cell": row["cell"],
            "script": row["script"],
            "seeds": str(row["seeds"]),
            "all 225, at most 1.01 of the fewest steps": str(row["perfect"]),
            "solved in the end": span(row, "solved", "{:.3f}"),
            "steps over the fewest": "-"
            if math.isnan(row["over_optimum"])
            else f"{row['over_optimum']:.4f}",
            "seeds that solved 95%": str(row["reached"]),
            "steps to 95%": span(row, "steps_to", "{:,.0f}"),
            "seconds to 95%": span(row, "seconds_to", "{:.3g}"),
            "seconds in all": span(row, "whole", "{:.3g}"),
        }
        for row in summary(rows).to_dict("records")
    )
    return Table("doors", "Doors: what greedy agents solve, and when", summary(rows), cells)


def span(row: dict[Any, Any], name: str, form: str) -> str:
    """An estimate with its interval, as far as there are any."""
    numbers = [row[name], row[f"{name}_low"], row[f"{name}_high"]]
    estimate, low, high = (form.format(x) for x in numbers)
    if math.isnan(numbers[0]):
        return "-"
    return estimate if math.isnan(numbers[1]) else f"{estimate} [{low}, {high}]"


def main() -> None:
    name, lines = "python -m analysis.doors", (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog=name, description=lines[0])
    parser.add_argument("runs", type=Path, help="folder of runs")
    parser.add_argument("out", type=Path, help=".csv file to write; the figure goes beside it")
    args = parser.parse_args()
    try:
        rows = pd.DataFrame(list(gather(args.runs)))
        if rows.empty:
            raise ValueError(f"{args.runs} has no complete run of Doors")
        rows.to_csv(args.out, index=False)
        args.out.with_suffix(".png").write_bytes(figures.png(draw(rows)))
    except (ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

"""Tables and a figure of the study of Doors, from runs of analysis.doors_run.

    python -m analysis.doors runs results/doors/layouts.csv

It puts the layouts.jsonl of all complete runs into one table, a row for each time that an agent was
judged, and draws a figure beside it.
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
from scipy.stats import binomtest

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

    perfect is how many seeds solve all layouts in at most 1.01 of the fewest steps, with the
    interval of their share (Clopper and Pearson). Of the share solved there are mean, least and
    most: it has a cap, so an interval of the mean would be too narrow. Times are medians with their
    intervals, a seed that never gets there being the latest; they lie on the grid of the saves. The
    seconds of whole runs are a geometric mean with Student's interval.
    """
    table = []
    for _, group in rows.groupby(KIND):
        runs = [run.sort_values("iteration") for _, run in group.groupby("run")]
        last = pd.DataFrame([run.iloc[-1] for run in runs]).astype({"solved": float})
        first = pd.DataFrame([first_time(run) for run in runs])
        perfect = (last["solved"] == LAYOUTS) & (last["steps"] <= 1.01 * last["optimal"])
        share = binomtest(int(perfect.sum()), len(runs)).proportion_ci()
        solved = last["solved"] / LAYOUTS
        whole = stats.mean_interval(np.log(last["seconds"].to_numpy(float)), [""] * len(runs))
        parts: dict[str, Any] = {"perfect": (perfect.sum(), share.low, share.high)}
        parts |= {"solved": (solved.mean(), solved.min(), solved.max()), "whole": np.exp(whole)}
        for name, column in (("steps_to", "global_step"), ("seconds_to", "seconds")):
            parts[name] = stats.median_interval(first[column].fillna(np.inf).to_numpy(float))
        row = group.iloc[0][KIND].to_dict() | {"seeds": len(runs)}
        row["over_optimum"] = last["steps"].sum() / (last["optimal"].sum() or np.nan)
        for name, values in parts.items():
            row |= dict(zip((name, f"{name}_low", f"{name}_high"), map(float, values), strict=True))
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
    frame = summary(rows)
    cells = pd.DataFrame(
        {
            "cell": row["cell"],
            "script": row["script"],
            "perfect": f"{row['perfect']:.0f} of {row['seeds']}",
            "at least, at 95%": f"{row['perfect_low']:.0%}",
            "layouts solved (least, most)": span(row, "solved", "{:.3f}"),
            "steps over the fewest, where solved": number(row["over_optimum"], "{:.4f}"),
            "steps to 95%": span(row, "steps_to", "{:,.0f}"),
            "seconds to 95%": span(row, "seconds_to", "{:.3g}"),
            "seconds in all": span(row, "whole", "{:.3g}"),
        }
        for row in frame.to_dict("records")
    )
    return Table("doors", "Doors: what greedy agents solve, and when", frame, cells)


def number(x: float, form: str) -> str:
    """As it is written; of what never is, "never", and of what is not, "-"."""
    return "-" if math.isnan(x) else "never" if math.isinf(x) else form.format(x)


def span(row: dict[Any, Any], name: str, form: str) -> str:
    """An estimate with what lies around it, as far as there is any."""
    estimate, low, high = (number(row[x], form) for x in (name, f"{name}_low", f"{name}_high"))
    return estimate if low == "-" else f"{estimate} [{low}, {high}]"


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

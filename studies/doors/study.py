"""Table and figure of the Doors study, from runs of studies.doors.run.

layouts.csv contains the results of complete runs, with one row per evaluation.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import figures, stats
from analysis.page import Table
from analysis.schema import SourceError
from analysis.tables import multiple, table_of, text

LAYOUTS = 225
SETTLED = 25  # iterations after which the time per step is measured
MODES = ("dqn_linen", "dqn_linen_gymnasium", "dqn_torch", "dqn_torch_gymnasium")
# Cell and script of the first run, then of the second. A cell is the first part of a run name: the
# settings and the number of environments.
CONTRASTS = (
    ("doors-64", "dqn_torch_gymnasium", "doors-1024", "dqn_linen"),
    ("doors-public-64", "dqn_torch_gymnasium", "doors-public-1024", "dqn_linen"),
    ("doors-public-64", "dqn_torch_gymnasium", "doors-public-64", "dqn_linen_gymnasium"),
    ("doors-public-64", "dqn_linen_gymnasium", "doors-public-64", "dqn_linen"),
    ("doors-public-64", "dqn_linen", "doors-public-1024", "dqn_linen"),
)


def gather(folder: Path) -> pd.DataFrame:
    """Return one row per evaluation of a complete run.

    iteration_seconds is the median over the iterations since the previous evaluation.
    """
    parts = []
    for path in sorted(folder.glob("*/layouts.jsonl")):
        run = path.parent
        info = json.loads((run / "run.json").read_text(encoding="utf-8"))
        if info["status"] != "completed":
            continue
        if info["resumed"]:
            print(f"{run} ignored: it was resumed, which skips the evaluations", file=sys.stderr)
            continue
        measured = pd.read_json(path, lines=True)
        log = pd.read_json(run / "metrics.jsonl", lines=True)
        interval = np.searchsorted(measured["iteration"], log["iteration"], side="right")
        measured["iteration_seconds"] = log["time/iteration"].groupby(interval).median()
        described = {
            "run": run.name,
            "script": info["script"],
            "cell": run.name.split("__")[0],
            "seed": info["args"]["seed"],
        }
        parts.append(pd.DataFrame([described]).merge(measured, "cross"))
    if not parts:
        raise SourceError(f"{folder} has no complete run of Doors")
    return pd.concat(parts).round(4)


def contrasts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the ratios between the times of two scripts, per step (pace) and per run (whole).

    Runs are paired by seed, because runs with the same seed ran one after another. The intervals
    are for the geometric mean of the ratios.
    """
    settled = rows[rows["iteration"] > SETTLED]
    keys = ["cell", "script", "seed"]
    pace = settled.groupby(keys)["iteration_seconds"].median()
    whole = rows.groupby(keys)["seconds"].max()
    table = []
    for cell, script, other_cell, other_script in CONTRASTS:
        row = {"first": f"{script}, {cell}", "second": f"{other_script}, {other_cell}"}
        for name, seconds in (("pace", pace), ("whole", whole)):
            ratios = seconds[cell, script] / seconds[other_cell, other_script]
            found = stats.geometric_mean(ratios.dropna().to_numpy())
            row |= {f"{name}_{end}": x for end, x in found._asdict().items()}
        table.append(row)
    return pd.DataFrame(table)


def contrast_table(source: Path) -> Table:
    columns = {
        "A": text("first"),
        "B": text("second"),
        "time per step, A / B": multiple("pace_"),
        "time of the run, A / B": multiple("whole_"),
    }
    frame = contrasts(pd.read_csv(source))
    return table_of("doors_contrasts", "Doors: effect of each difference", frame, columns)


def draw(rows: pd.DataFrame) -> Figure:
    """Plot the mean fraction of layouts solved against steps, with Student's t-intervals."""
    number = rows["cell"].str.partition("-")[2].astype(int)
    rows = rows.assign(number=number, share=rows["solved"] / LAYOUTS).sort_values("number")
    keys = ["number", "script", "global_step"]
    points = stats.of_groups(rows, keys, "share", stats.mean)
    points = points.rename(columns={"script": "mode", "global_step": "x"})
    points["panel"] = points["number"].map("{:,} environments".format)
    frameworks = [x.split("_")[1] for x in MODES]
    styles = figures.styles(pd.DataFrame({"mode": MODES, "framework": frameworks}))
    label = "fraction of layouts solved"
    return figures.bands(points, styles, "environment steps", label)


BLOCKS = {"doors_contrasts": contrast_table}


def update(source: Path, out: Path) -> None:
    """Draw the figure; if source is a folder of runs, first write layouts.csv."""
    if not (source / "layouts.csv").exists():
        gather(source).to_csv(out / "layouts.csv", index=False)
        source = out
    rows = pd.read_csv(source / "layouts.csv")
    rows = rows[rows["cell"].str.fullmatch(r"doors-\d+")]
    if len(rows):
        (out / "layouts.png").write_bytes(figures.png(draw(rows)))

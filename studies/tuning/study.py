"""Table and figure of the results of tune.py, from the best.json of each study."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import figures, stats
from analysis.page import Table
from analysis.schema import SourceError
from analysis.tables import span, table_of, text, value

CLAIM, SEED = "#cc3311", "#4477aa"
# Key of best.json in version 0.2.0 -> current key.
OLD_KEYS = {
    "own": "defaults",
    "own_value_in_study": "default_value_in_study",
    "best_minus_own": "best_minus_defaults",
}


def verdicts(folder: Path) -> pd.DataFrame:
    """Return the defaults, the best trial and their difference, for each study.

    Each row contains the value in the search and the returns of held-out seeds. Raise SourceError
    if there is no study.
    """
    rows = []
    paths = sorted(folder.glob("*/best.json"))
    if not paths:
        raise SourceError(f"{folder} contains no */best.json, which tune.py writes")
    for path in paths:
        stored = json.loads(path.read_text(encoding="utf-8"))
        best = {OLD_KEYS.get(key, key): x for key, x in stored.items()}
        default = best["default_value_in_study"]
        if default is None:  # the defaults were not trained as a trial
            default = np.nan
        claim = best["value_in_study"]
        parts = (
            ("defaults", best["defaults"], default),
            (f"trial {best['best_trial']}", best["best"], claim),
            ("difference, by seed", best["best_minus_defaults"], claim - default),
        )
        for name, fresh, claimed in parts:
            low, high = fresh["interval"] or (np.nan, np.nan)
            row = {"study": path.parent.name, "name": name, "claim": claimed}
            row |= {"iqm_estimate": fresh["iqm"], "iqm_low": low, "iqm_high": high}
            returns = np.array(fresh["returns"], float)  # null becomes NaN: the agent diverged
            mean = stats.mean(returns)
            row |= {f"mean_{end}": x for end, x in mean._asdict().items()}
            rows.append(row | {"returns": np.sort(returns)})
    return pd.DataFrame(rows)


def verdict_table(folder: Path) -> Table:
    columns = {
        "study": text("study"),
        "settings": text("name"),
        "value in the search": value("claim"),
        "held-out seeds: IQM": span("iqm_"),
        "held-out seeds: mean": span("mean_"),
    }
    caption = "Value in the search, and returns of held-out seeds"
    return table_of("verdicts", caption, verdicts(folder), columns)


@figures.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Plot the returns of held-out seeds, their means and the value in the search, per study."""
    studies = list(frame["study"].unique())
    figure, panels = figures.make_panels(studies, len(studies), 3.6, figures.WIDTH, False)
    for axes, study in zip(panels, studies, strict=True):
        sides = frame[frame["study"] == study].iloc[:2]  # without the third row, the difference
        offsets = np.linspace(-0.18, 0.18, len(sides["returns"].iloc[0]))
        seeds = [place + offsets for place in (0, 1)]
        returns = np.concatenate(list(sides["returns"]))
        axes.plot(np.ravel(seeds), returns, "o", color=SEED, ms=4, label="held-out seeds, sorted")
        axes.vlines([0, 1], sides["iqm_low"], sides["iqm_high"], color="black")
        label = "their interquartile mean (IQM), 95% CI"
        axes.plot([0, 1], sides["iqm_estimate"], "_", color="black", ms=22, label=label)
        label = "value in the search"
        axes.plot([0.3, 1.3], sides["claim"], "D", color=CLAIM, ms=8, label=label)
        axes.set_xticks([0, 1], ["defaults", "best trial"])
        axes.set_xlim(-0.5, 1.5)
        axes.set_ylabel("greedy return")
    entries = zip(*panels[0].get_legend_handles_labels(), strict=True)
    figures.add_legend(figure, list(entries))
    return figure


BLOCKS = {"verdicts": verdict_table}


def update(source: Path, out: Path) -> None:
    """Draw the figure of the study."""
    (out / "fresh_seeds.png").write_bytes(figures.png(draw(verdicts(source))))

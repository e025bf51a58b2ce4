"""A table and a figure of what tune.py found, from the best.json that each study leaves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import figures, stats
from analysis.page import Table
from analysis.tables import span, table_of, text, value

CLAIM, SEED = "#cc3311", "#4477aa"


def found(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what each study found, by its name."""
    paths = sorted(folder.glob("*/best.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


def verdicts(folder: Path) -> pd.DataFrame:
    """Return of each study the script's own settings, the best trial's, and what those gain.

    Beside the value that a trial had in the study stand the returns of fresh seeds.
    """
    rows = []
    for study, best in found(folder).items():
        # The script's own settings may have been no trial.
        own_value = np.nan if best["own_value_in_study"] is None else best["own_value_in_study"]
        best_value = best["value_in_study"]
        parts = (
            ("the script's own", best["own"], own_value),
            (f"trial {best['best_trial']}", best["best"], best_value),
            ("difference, by seed", best["best_minus_own"], best_value - own_value),
        )
        for name, fresh, claim in parts:
            returns = np.array(fresh["returns"])
            low, high = fresh["interval"] or (np.nan, np.nan)
            row = {"study": study, "name": name, "claim": claim}
            row |= {"iqm_estimate": fresh["iqm"], "iqm_low": low, "iqm_high": high}
            mean = stats.mean_interval(returns, [""] * len(returns))
            row |= {f"mean_{end}": x for end, x in mean._asdict().items()}
            rows.append(row)
    return pd.DataFrame(rows)


def verdict_table(folder: Path) -> Table:
    columns = {
        "study": text("study"),
        "settings": text("name"),
        "value in the study": value("claim"),
        "fresh seeds, interquartile mean": span("iqm_"),
        "mean": span("mean_"),
    }
    caption = "What a search claimed, and what fresh seeds give"
    return table_of("verdicts", caption, verdicts(folder), columns)


@figures.styled
def draw(folder: Path) -> Figure:
    """A panel per study: the returns of fresh seeds, their means, and what the study claimed."""
    studies = found(folder)
    figure, panels = figures.make_panels(studies, len(studies), 3.6, sharey=False)
    for axes, best in zip(panels, studies.values(), strict=True):
        sides = ((best["own"], best["own_value_in_study"]), (best["best"], best["value_in_study"]))
        for x, (fresh, claim) in enumerate(sides):
            returns = sorted(fresh["returns"])
            places = x + np.linspace(-0.18, 0.18, len(returns))
            axes.plot(places, returns, "o", color=SEED, ms=4, alpha=0.6)
            axes.plot(x, fresh["iqm"], "_", color="black", ms=22)
            axes.plot([x, x], fresh["interval"] or [np.nan] * 2, color="black", lw=1.5)
            if claim is not None:
                axes.plot(x + 0.3, claim, "D", color=CLAIM, ms=8)
        axes.set_xticks([0, 1], ["the script's own settings", "the best trial's"])
        axes.set_xlim(-0.5, 1.5)
        axes.set_ylabel("greedy return")
    entries = [
        (Line2D([], [], color=SEED, marker="o", ls="", alpha=0.6), "fresh seeds, in order"),
        (Line2D([], [], color="black", lw=1.5), "their interquartile mean, 95% interval"),
        (Line2D([], [], color=CLAIM, marker="D", ls=""), "the value in the study"),
    ]
    figures.add_legend(figure, entries)
    return figure


BLOCKS = {"verdicts": verdict_table}


def update(source: Path, out: Path) -> None:
    """Draw the study's figure."""
    (out / "fresh_seeds.png").write_bytes(figures.png(draw(source)))

"""Tables and a figure of what tune.py found, from the best.json that each study leaves."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import figures, stats
from analysis.page import Table
from analysis.schema import SourceError

PARTS = ("best", "own", "best_minus_own")


def load_verdict(folder: Path) -> dict[str, Any]:
    """Return a study's best.json; raise SourceError where it is none."""
    try:
        found = json.loads((folder / "best.json").read_text())
        for part in PARTS:
            numbers = [
                found[part]["iqm"],
                *(found[part]["interval"] or []),
                *found[part]["returns"],
            ]
            if not all(math.isfinite(x) for x in numbers):
                raise ValueError("a return is no number")
        float(found["value_in_study"])
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise SourceError(f"{folder} has no best.json of tune.py: {error}") from error
    return found


def within(interval: Any) -> str:
    known = interval is not None and np.isfinite(interval).all()
    return " [{:.2f}, {:.2f}]".format(*interval) if known else ""


def verdict_table(folder: Path) -> pd.DataFrame:
    """Of each study the script's own settings, the best trial's, and what those gain.

    Beside the value that a trial had in the study stand the returns of fresh seeds.
    """
    rows = []
    for path in sorted(folder.glob("*/best.json")):
        found = load_verdict(path.parent)
        best, own = found["value_in_study"], found["own_value_in_study"]
        gain = None if own is None else best - own
        names = ("the script's own", f"trial {found['best_trial']}", "difference, by seed")
        values = zip(names, ("own", "best", "best_minus_own"), (own, best, gain), strict=True)
        for name, part, value in values:
            fresh = found[part]
            returns = np.array(fresh["returns"])
            mean = stats.mean_interval(returns, [""] * len(returns))
            row = {"study": path.parent.name, "settings": name}
            row["value in the study"] = "-" if value is None else f"{value:.2f}"
            row["fresh seeds, interquartile mean"] = f"{fresh['iqm']:.2f}" + within(
                fresh["interval"]
            )
            row["mean"] = f"{mean.estimate:.2f}" + within(mean[1:])
            row["standard deviation"] = (
                f"{np.std(returns, ddof=1):.2f}" if len(returns) > 1 else "-"
            )
            rows.append(row | {"least": f"{returns.min():.2f}", "most": f"{returns.max():.2f}"})
    return pd.DataFrame(rows)


def settings_table(folder: Path) -> pd.DataFrame:
    """A row per setting that a study searched: where, the script's own, and the best trial's."""
    found = load_verdict(folder)

    def shown(value: object) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    rows = [
        {"setting": name, "searched": text.replace(",", ", ")}
        | {"own": shown(found["own_settings"][name]), "best": shown(found["best_settings"][name])}
        for name, text in found["space"].items()
    ]
    return pd.DataFrame(rows)


@figures.styled
def draw(folder: Path) -> Figure:
    """A panel per study: the returns of fresh seeds, their means, and what the study claimed."""
    found = {path.parent.name: load_verdict(path.parent) for path in folder.glob("*/best.json")}
    figure = Figure(figsize=(4.6 * max(len(found), 1), 4.2), layout="constrained")
    panels = figure.subplots(1, max(len(found), 1), squeeze=False)[0]
    for axes, (name, study) in zip(panels, sorted(found.items()), strict=False):
        claims = (study["own_value_in_study"], study["value_in_study"])
        for x, (part, claim) in enumerate(zip(("own", "best"), claims, strict=True)):
            returns = study[part]["returns"]
            places = x + np.linspace(-0.18, 0.18, len(returns))
            axes.plot(places, sorted(returns), "o", color="#4477aa", ms=4, alpha=0.6)
            low, high = study[part]["interval"] or [study[part]["iqm"]] * 2
            error = [[study[part]["iqm"] - low], [high - study[part]["iqm"]]]
            axes.errorbar(
                x, study[part]["iqm"], error, fmt="_", color="black", ms=22, elinewidth=1.5
            )
            if claim is not None:
                axes.plot(x + 0.3, claim, "D", color="#cc3311", ms=8)
        axes.set_xticks([0, 1], ["the script's own settings", "the best trial's"])
        axes.set_xlim(-0.5, 1.5)
        axes.set_title(figures.short(name), loc="left")
        axes.set_ylabel("greedy return")
    parts = "dots: fresh seeds, in order; bars: their interquartile mean and its 95% interval"
    figure.suptitle(f"{parts}; diamonds: the value in the study", fontsize="small")
    return figure


def shown(name: str, cells: pd.DataFrame) -> Table:
    return Table(name, "", cells, cells)


BLOCKS = {
    "verdicts": lambda folder: shown("verdicts", verdict_table(folder)),
    "settings": lambda folder: shown("settings", settings_table(folder)),
}


def update(source: Path, out: Path) -> None:
    """Draw the study's figure."""
    (out / "fresh_seeds.png").write_bytes(figures.png(draw(source)))

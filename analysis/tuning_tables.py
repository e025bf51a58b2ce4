"""Tables of what tune.py found, from the best.json that a study leaves."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd

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


def with_interval(part: dict[str, Any]) -> str:
    interval = " [{:.2f}, {:.2f}]".format(*part["interval"]) if part["interval"] else ""
    return f"{part['iqm']:.2f}{interval}"


def verdict_table(folder: Path) -> pd.DataFrame:
    """A row per study: what its own seeds say of the best trial, and what fresh seeds say."""
    rows = []
    for path in sorted(folder.glob("*/best.json")):
        found = load_verdict(path.parent)
        best, own = found["value_in_study"], found["own_value_in_study"]
        rows.append(
            {
                "study": path.parent.name,
                "trials: complete, pruned, failed": ", ".join(map(str, found["trials"].values())),
                "best trial": str(found["best_trial"]),
                "its value in the study": f"{best:.2f}",
                "of the script's own settings": "-" if own is None else f"{own:.2f}",
                "gain claimed": "-" if own is None else f"{best - own:.2f}",
                "best, fresh seeds": with_interval(found["best"]),
                "own settings, fresh seeds": with_interval(found["own"]),
                "gain": with_interval(found["best_minus_own"]),
            }
        )
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

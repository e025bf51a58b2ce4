"""Time to step many environments at once, from races between several methods."""

from pathlib import Path

import pandas as pd

from analysis import figures, formatting, races
from analysis.formatting import number
from analysis.page import Table

FIRST = "gymnax scan"


def table(path: Path) -> Table:
    """Return one row per method, and two columns per number of environments."""
    cells: dict[str, dict[str, str]] = {}
    rows = []
    for name, race in races.named(path).items():
        times = race.times()
        for way in times:
            ratio = races.ratio_of(times[way], times[FIRST])
            row = cells.setdefault(way, {"method": way})
            row[f"{name} (ms)"] = number(1000 * times[way].median())
            row[f"{name}: time / {FIRST} time"] = (
                "1.00×" if way == FIRST else formatting.ratio(*ratio)
            )
            rows.append({"name": name, "way": way} | ratio._asdict())
    shown = pd.DataFrame(cells.values()).fillna("-")
    return Table("vectorization", "512 steps in all environments", pd.DataFrame(rows), shown)


BLOCKS = {"vectorization": table}


def update(source: Path, out: Path) -> None:
    """Draw the figure of the study."""
    frame = table(source / "races.jsonl").frame.rename(columns={"way": "program"})
    panels = {str(name): part for name, part in frame.groupby("name", sort=False)}
    label = f"time of 512 steps / {FIRST} time"
    ours = [x for x in frame["program"] if x not in ("vector", "envpool")]
    (out / "answer.png").write_bytes(figures.png(figures.ratios(panels, ours, label)))

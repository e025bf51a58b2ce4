"""Time per environment step of PPO and SAC in MuJoCo, in this project and in other libraries."""

from pathlib import Path

import pandas as pd

from analysis import figures, races
from analysis.page import Table
from analysis.stats import Interval
from analysis.tables import span, table_of, text, value

LINEN = "Linen"
TABLES = {"PPO": ("PPO", "PPO beside LeanRL"), "SAC": ("SAC",)}  # the races of each table
OURS = (LINEN, "compiled PyTorch", "PyTorch")


def costs(path: Path, title: str) -> pd.DataFrame:
    """Return a row per program: microseconds per environment step, and the ratio to Linen.

    The microseconds are those of Linen in the first race times the ratio, so that all rows refer
    to the same race.
    """
    found = races.named(path)
    first, *_ = TABLES[title]
    linen = 1e6 * found[first].compared_times()[LINEN].median()
    rows: dict[str, tuple[object, ...]] = {}
    for name in TABLES[title]:
        times = found[name].compared_times()
        for program in times:
            ratio = races.ratio_of(times[program], times[LINEN])
            rows.setdefault(program, (program, linen * ratio.estimate, *ratio))
    return pd.DataFrame(rows.values(), columns=["program", "step", *Interval._fields])


def cost_table(path: Path, title: str) -> Table:
    columns = {
        "program": text("program"),
        "µs per step": value("step"),
        "time / Linen time": lambda row: "1.00" if row["program"] == LINEN else span()(row),
    }
    return table_of("control_cost", title, costs(path, title), columns)


def ppo_table(path: Path) -> Table:
    return cost_table(path, "PPO")


def sac_table(path: Path) -> Table:
    return cost_table(path, "SAC")


BLOCKS = {"control_ppo": ppo_table, "control_sac": sac_table}


def update(source: Path, out: Path) -> None:
    """Draw the figure of the study."""
    found = {title: costs(source / "races.jsonl", title) for title in TABLES}
    panels = {f"{title} in HalfCheetah": frame for title, frame in found.items()}
    label = "time per step / Linen time per step"
    (out / "answer.png").write_bytes(figures.png(figures.ratios(panels, OURS, label)))

"""What an iteration of PPO and SAC costs in a robot, ours and others', by races."""

from pathlib import Path

import pandas as pd

from analysis import figures, races
from analysis.page import Table
from analysis.stats import Interval
from analysis.tables import span, table_of, text, value

LINEN = "Linen"
# The table's title -> its races, and how many steps of the environment a line of theirs stands for.
TABLES = {"PPO": (("PPO", "PPO beside LeanRL"), 2048), "SAC": (("SAC",), 100)}
LINES = {("PPO beside LeanRL", "LeanRL"): 10, ("PPO beside LeanRL", "LeanRL, compiled"): 10}
OURS = (LINEN, "compiled PyTorch", "PyTorch")


def costs(path: Path, title: str) -> pd.DataFrame:
    """Return a row per program: microseconds of a step with its share of updates, over Linen's.

    The microseconds are Linen's in the first race, times the ratio, so that all are of one race.
    """
    names, steps = TABLES[title]
    found = races.named(path)
    linen = 1e6 * found[names[0]].times()[LINEN].median() / steps
    rows: dict[str, tuple[object, ...]] = {}
    for name in names:
        times = found[name].times()
        for program in times:
            ratio = races.ratio_of(times[program] / LINES.get((name, program), 1), times[LINEN])
            rows.setdefault(program, (program, linen * ratio.estimate, *ratio))
    return pd.DataFrame(rows.values(), columns=["program", "step", *Interval._fields])


def cost_table(path: Path, title: str) -> Table:
    columns = {
        "program": text("program"),
        "a step (µs)": value("step"),
        "times as long as Linen": lambda row: "1.00" if row["program"] == LINEN else span()(row),
    }
    return table_of("control_cost", title, costs(path, title), columns)


def ppo_table(path: Path) -> Table:
    return cost_table(path, "PPO")


def sac_table(path: Path) -> Table:
    return cost_table(path, "SAC")


BLOCKS = {"control_ppo": ppo_table, "control_sac": sac_table}


def update(source: Path, out: Path) -> None:
    """Draw the study's figure."""
    found = {title: costs(source / "races.jsonl", title) for title in TABLES}
    panels = {f"{title} in HalfCheetah": frame for title, frame in found.items()}
    label = "a step, times as long as in Linen"
    (out / "answer.png").write_bytes(figures.png(figures.ratios(panels, OURS, label)))

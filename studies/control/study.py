"""Time per step of PPO and SAC in HalfCheetah, for our scripts and other libraries, from races."""

from pathlib import Path

import pandas as pd

from analysis import figures, races
from analysis.page import Table
from analysis.stats import Interval
from analysis.tables import multiple, table_of, text, value

LINEN = "Linen"
TABLES = {  # table -> names of races
    "PPO": ("PPO", "PPO beside LeanRL", "PPO beside rlox and RLtools"),
    "SAC": ("SAC",),
}
OURS = (LINEN, "compiled PyTorch", "PyTorch")


def costs(path: Path, title: str) -> pd.DataFrame:
    """Return one row per program: microseconds per environment step, and the ratio to Linen.

    The time is the Linen time in the first race multiplied by the ratio, so that all rows refer to
    the same race.
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
        "time per step (µs)": value("step"),
        "time / Linen time": lambda row: "1.00×" if row["program"] == LINEN else multiple()(row),
    }
    return table_of("control_cost", title, costs(path, title), columns)


def ppo_table(path: Path) -> Table:
    return cost_table(path, "PPO")


def sac_table(path: Path) -> Table:
    return cost_table(path, "SAC")


def intel_table(path: Path) -> Table:
    """Return one row per program: its time / Linen time, on an Intel Xeon and an AMD EPYC.

    `path` is the file with the Intel PPO race. The mkl study contains the Intel SAC race, and the
    AMD race with --matmul-precision medium.
    """
    mkl = path.parent.parent / "mkl"
    files = {"PPO": path, "SAC": mkl / "intel_sac.jsonl"}
    rows = []
    for title, file in files.items():
        times = races.read(file)[-1].times()
        amd = costs(path.parent / "races.jsonl", title).set_index("program")
        for program, script in (("compiled PyTorch", "torch_compile"), ("PyTorch", "torch")):
            [name] = [x for x in times if f"{script}_gymnasium" in x and "medium" not in x]
            intel = races.ratio_of(times[name], times.iloc[:, 0])
            row = {"algorithm": title, "program": program}
            row |= {f"intel_{x}": y for x, y in intel._asdict().items()}
            rows.append(row | {f"amd_{x}": amd.loc[program, x] for x in Interval._fields})
    medium = {"algorithm": "SAC", "program": "compiled PyTorch, medium"}
    for machine, race in (
        ("intel", races.read(mkl / "intel_sac.jsonl")[-1]),
        ("amd", races.read(mkl / "races.jsonl")[0]),
    ):
        times = race.times()
        [name] = [x for x in times if "sac_torch_compile" in x and "medium" in x]
        ratio = races.ratio_of(times[name], times.iloc[:, 0])
        medium |= {f"{machine}_{x}": y for x, y in ratio._asdict().items()}
    rows.append(medium)
    columns = {
        "algorithm": text("algorithm"),
        "program": text("program"),
        "Intel Xeon: time / Linen time": multiple("intel_"),
        "AMD EPYC: time / Linen time": multiple("amd_"),
    }
    return table_of("control_intel", "Processors", pd.DataFrame(rows), columns)


BLOCKS = {"control_ppo": ppo_table, "control_sac": sac_table, "control_intel": intel_table}


def update(source: Path, out: Path) -> None:
    """Draw the figure of the study."""
    found = {title: costs(source / "races.jsonl", title) for title in TABLES}
    panels = {f"{title} in HalfCheetah": frame for title, frame in found.items()}
    label = "time per step / Linen time per step"
    (out / "answer.png").write_bytes(figures.png(figures.ratios(panels, OURS, label)))

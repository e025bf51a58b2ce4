"""Speed of float32 products and of training in PyTorch, with matmul precision high and medium."""

from pathlib import Path

import pandas as pd

from analysis import races
from analysis.formatting import number
from analysis.page import Table
from analysis.stats import Interval
from analysis.tables import multiple, table_of, text, value

LINE = " --matmul-precision medium"
# Training -> start of its Linen command.
RACES = {
    "SAC, HalfCheetah-v5, 2 x 256": "more/sac_linen_gymnasium.py",
    "PPO, HalfCheetah-v5, 2 x 64": "more/ppo_continuous_linen_gymnasium.py",
    "PPO, CartPole-v1, 2 x 64": "ppo_linen.py --hidden-sizes 64 64",
    "PPO, CartPole-v1, 2 x 128": "ppo_linen.py --hidden-sizes 128 128",
}


def product_table(path: Path) -> Table:
    """Return one row per width, with two times for each number of rows."""
    products = pd.read_csv(path)
    cells = []
    for width, group in products.groupby("width"):
        row = {"width": f"{width}"}
        for _, each in group.iterrows():
            rows = f"{each['rows']:,.0f} rows"
            row[f"{rows}: high (µs)"] = number(each["high"])
            row[f"{rows}: medium (µs)"] = number(each["medium"])
        cells.append(row)
    return Table("mkl_products", "Products", products, pd.DataFrame(cells))


def race_table(path: Path) -> Table:
    """Return the ratios to Linen with precision high and medium, per race and PyTorch script."""
    rows = []
    found = {race.info["args"]["programs"][0]: race for race in races.read(path)}
    for what, linen in RACES.items():
        race = next((x for first, x in found.items() if first.startswith(linen)), None)
        if race is None:
            continue
        called = race.info["args"]["programs"]
        times = race.times().rename(columns=dict(zip(race.info["programs"], called, strict=True)))
        for program in [x for x in called[1:] if LINE not in x]:
            cells = {"what": what, "mode": Path(program.split()[0]).stem}
            pairs = {"without": program, "with": program + LINE}
            for name, other in pairs.items():
                ratio = races.ratio_of(times[other], times.iloc[:, 0])
                cells |= {f"{name}_{x}": y for x, y in ratio._asdict().items()}
            gain = races.ratio_of(times[program], times[program + LINE])
            rows.append(cells | {f"gain_{x}": y for x, y in gain._asdict().items()})
    columns = {"training": text("what")}
    columns |= {
        "high / Linen time": multiple("without_"),
        "medium / Linen time": multiple("with_"),
    }
    columns |= {"high / medium time": multiple("gain_")}
    return table_of("mkl_races", "Races", pd.DataFrame(rows), columns)


def intel_table(path: Path) -> Table:
    """Return one row per program in the Intel race: its time, and time / Linen time."""
    race = races.read(path)[-1]
    times = race.times()
    rows = []
    for name in times:
        script = Path(name.split()[0]).stem
        precision = "" if "linen" in script else "medium" if LINE in name else "high"
        ratio = races.ratio_of(times[name], times.iloc[:, 0])
        rows.append((script, precision, 1000 * times[name].median(), *ratio))
    names = ["mode", "precision", "ms", *Interval._fields]
    columns = {
        "matmul precision": text("precision"),
        "time per iteration (ms)": value("ms"),
        "time / Linen time": lambda row: multiple()(row) if row["precision"] else "1.00×",
    }
    return table_of("mkl_intel", "Intel", pd.DataFrame(rows, columns=names), columns)


def tanh_table(path: Path) -> Table:
    found = pd.read_csv(path)
    columns = {"implementation": text("way"), "time (µs)": value("microseconds")}
    columns |= {"largest error": text("error")}
    return table_of("mkl_tanh", "tanh", found, columns)


BLOCKS = {
    "mkl_products": product_table,
    "mkl_races": race_table,
    "mkl_intel": intel_table,
    "mkl_tanh": tanh_table,
}

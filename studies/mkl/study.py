"""PyTorch's float32 products on AMD: what products.py and races with and without the line found."""

from pathlib import Path

import pandas as pd

from analysis import races
from analysis.formatting import number
from analysis.page import Table
from analysis.tables import span, table_of, text, value

LINE = " --matmul-precision medium"
# What a race trains -> how its program in Linen begins.
RACES = {
    "SAC, HalfCheetah-v5, 2 x 256": "more/sac_linen_gymnasium.py",
    "PPO, HalfCheetah-v5, 2 x 64": "more/ppo_continuous_linen_gymnasium.py",
    "PPO, CartPole-v1, 2 x 64": "ppo_linen.py --hidden-sizes 64 64",
    "PPO, CartPole-v1, 2 x 128": "ppo_linen.py --hidden-sizes 128 128",
}


def product_table(path: Path) -> Table:
    """A row per width, and for each number of rows the two times and how much faster one is."""
    products = pd.read_csv(path)
    cells = []
    for width, group in products.groupby("width"):
        row = {"width": f"{width}"}
        for _, each in group.iterrows():
            rows = f"{each['rows']:,.0f} rows"
            row[f"{rows}: as it is (µs)"] = number(each["high"])
            row[f"{rows}: with the line (µs)"] = number(each["medium"])
        cells.append(row)
    return Table("mkl_products", "Products", products, pd.DataFrame(cells))


def race_table(path: Path) -> Table:
    """A row per training and script: times as long as Linen, without and with the line."""
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
        "as it is, over Linen": span("without_"),
        "with the line, over Linen": span("with_"),
    }
    columns |= {"as it is, over with the line": span("gain_")}
    return table_of("mkl_races", "Races", pd.DataFrame(rows), columns)


def tanh_table(path: Path) -> Table:
    found = pd.read_csv(path)
    columns = {"tanh of": text("way"), "µs": value("microseconds"), "largest error": text("error")}
    return table_of("mkl_tanh", "tanh", found, columns)


BLOCKS = {"mkl_products": product_table, "mkl_races": race_table, "mkl_tanh": tanh_table}

"""PyTorch and JAX on a GPU, from interleaved races. products.py wrote products.json."""

import json
from pathlib import Path

import pandas as pd

from analysis import figures, races
from analysis.catalog import SIZES
from analysis.formatting import number
from analysis.page import Table
from analysis.stats import Interval
from analysis.tables import multiple, span, table_of, text, texts, value

# Flags of a script for each network; small is the default.
FLAGS = {x: f" --hidden-sizes {' '.join(map(str, units))}" for x, units in SIZES.items()}
FLAGS["small"] = ""
ENVS = {"CartPole-v1": "", "Breakout-MinAtar": " --env-id Breakout-MinAtar"}
OTHERS = ("nnx", "nnx_cached", "nnx_tree", "equinox", "torch_compile", "torch")
CONTROL = {  # training -> the script in Linen
    "SAC, MuJoCo in Gymnasium": "more/sac_linen_gymnasium.py",
    "PPO, MuJoCo in Gymnasium": "more/ppo_continuous_linen_gymnasium.py",
    "PPO, brax": "more/ppo_continuous_linen.py",
    "SAC, brax": "more/sac_linen.py",
}
WIDTH = 1024
WORDS = {"torch_compile": "compiled", "torch": "uncompiled"}
# Number of rows -> number of products with 1024 x 1024 weights, in an iteration of 256 steps and 10
# epochs of 8 minibatches. A network has five such weights; its first and last layers are ignored.
PRODUCTS = {
    32: 256 * 5,  # the actor, in each step
    16384: 5,  # the critic, on all obs and next_obs
    1024: 80 * 2 * 5 * 3,  # both networks, per minibatch: one forward, two backward
}


class Times:
    """Seconds per iteration in each round, by program command."""

    def __init__(self, path: Path) -> None:
        tables: dict[tuple[str, ...], list[pd.DataFrame]] = {}
        self.steps: dict[str, int] = {}  # environment steps per iteration
        for race in races.read(path):
            called = race.info["args"]["programs"]
            names = dict(zip(race.info["programs"], called, strict=True))
            self.steps |= {names[name]: steps for name, steps in race.steps().items()}
            # Merge the rounds of a race that was run twice.
            tables.setdefault(tuple(called), []).append(race.times().rename(columns=names))
        self.tables = [pd.concat(x, ignore_index=True) for x in tables.values()]

    def with_all(self, *programs: str) -> pd.DataFrame | None:
        """Return the rounds of the race that includes all given programs, or None."""
        return next((x for x in self.tables if set(programs) <= set(x.columns)), None)

    def milliseconds(self, program: str) -> float:
        turns = self.with_all(program)
        assert turns is not None
        return 1000 * float(turns[program].median())

    def ratios(self, program: str, first: str) -> pd.Series | None:
        """Return the time of a program divided by the time of `first`, for each round."""
        turns = self.with_all(program, first)
        return None if turns is None else turns[program] / turns[first]

    def ratio(self, program: str, first: str) -> Interval:
        turns = self.with_all(program, first)
        return races.NOTHING if turns is None else races.ratio_of(turns[program], turns[first])

    def called(self, script: str) -> str | None:
        """Return the first command that starts with the script, or None."""
        return next((x for t in self.tables for x in t if x.startswith(f"{script} ")), None)


def ppo(script: str, env: str, size: str) -> str:
    return f"ppo_{script}.py{ENVS[env]}{FLAGS[size]}"


def agents(framework: str, number_of_agents: int) -> str:
    return f"more/ppo_{framework}_vmap.py --num-agents {number_of_agents}"


def ratio_table(path: Path) -> Table:
    """Return one row per environment and network, and one column per script."""
    times = Times(path)
    rows, found = [], []
    for env in ENVS:
        for size in SIZES:
            linen = ppo("linen", env, size)
            if times.with_all(linen) is None:
                continue
            ratios = {x: times.ratio(ppo(x, env, size), linen) for x in OTHERS}
            found += [(env, size, x, *ratio) for x, ratio in ratios.items()]
            cells = {"environment": env, "network": size}
            cells["ppo_linen (ms)"] = number(times.milliseconds(linen))
            frame = pd.DataFrame(ratios.values())
            rows.append(
                cells
                | dict(zip(map("ppo_{}".format, ratios), texts(frame, multiple()), strict=True))
            )
    frame = pd.DataFrame(found, columns=["env_id", "size", "mode", *Interval._fields])
    return Table("gpu_ratios", "Time / ppo_linen time", frame, pd.DataFrame(rows))


def robot_table(path: Path) -> Table:
    """Return one row per script: steps per second, and the ratios to Linen and to eager PyTorch."""
    times = Times(path)
    rows = []
    for what, script in CONTROL.items():
        linen = times.called(script)
        assert linen is not None
        others = (script.replace("linen", x) for x in ("torch_compile", "torch"))
        *_, eager = programs = [linen, *filter(None, map(times.called, others))]
        for program in programs:
            milliseconds = times.milliseconds(program)
            over_linen = times.ratio(program, linen) if program != linen else Interval(1, 1, 1)
            gain = times.ratio(eager, program) if "compile" in program else races.NOTHING
            per_second = 1000 * times.steps[program] / milliseconds
            cells = (what, Path(program.split()[0]).stem, milliseconds, per_second)
            ends = [f"{x}_{y}" for x in ("linen", "eager") for y in Interval._fields]
            rows.append(
                dict(zip(("what", "mode", "ms", "steps"), cells, strict=True))
                | dict(zip(ends, (*over_linen, *gain), strict=True))
            )
    columns = {
        "training": text("what"),
        "time per iteration (ms)": value("ms"),
        "steps/s": value("steps"),
        "time / Linen time": lambda row: (
            "1.00×" if "linen" in row["mode"] else multiple("linen_")(row)
        ),
        "uncompiled / compiled time": multiple("eager_"),
    }
    table = table_of("gpu_robots", "Robots", pd.DataFrame(rows), columns)
    return table._replace(cells=table.cells[["training", "script", *list(columns)[1:]]])


def agent_table(path: Path) -> Table:
    """Return the iteration times, with one row per number of agents in a program."""
    times = Times(path)
    rows = []
    for many in (1, 8, 64):
        row: dict[str, object] = {"agents": many}
        for framework in ("linen", "torch"):
            program = agents(framework, many)
            row[f"{framework}_ms"] = times.milliseconds(program)
            over_one = times.ratio(program, agents(framework, 1))
            row |= dict(zip((f"{framework}_{x}" for x in Interval._fields), over_one, strict=True))
        both = times.ratio(agents("torch", many), agents("linen", many))
        rows.append(row | both._asdict())
    columns = {"agents": lambda row: f"{row['agents']:.0f}"}
    for name, title in (("linen", "Linen"), ("torch", "PyTorch")):
        columns[f"ppo_{name}_vmap (ms)"] = value(f"{name}_ms")
        columns[f"{title}: time / time of 1 agent"] = lambda row, name=name: (
            "1.00×" if row["agents"] == 1 else multiple(f"{name}_")(row)
        )
    columns["PyTorch time / Linen time"] = multiple()
    return table_of("gpu_agents", "Agents in one program", pd.DataFrame(rows), columns)


def fraction_of_products(path: Path, frameworks: tuple[str, ...]) -> Interval:
    """Return the fraction of a Linen iteration that its matrix products take.

    For each size, use the rate of the fastest of the frameworks.
    """
    measured = pd.DataFrame(json.loads((path.parent / "products.json").read_text(encoding="utf-8")))
    fastest = measured[measured["framework"].isin(frameworks)].groupby("rows")["seconds"].min()
    linen = ppo("linen", "CartPole-v1", "large")
    turns = Times(path).with_all(linen)
    assert turns is not None
    seconds = pd.Series((fastest * pd.Series(PRODUCTS)).sum(), turns.index)
    return races.ratio_of(seconds, turns[linen])


def share_table(path: Path) -> Table:
    """Return the fraction with the rates of the faster framework per size, and with JAX rates."""
    rates = {"the faster framework": ("jax", "torch"), "JAX": ("jax",)}
    rows = [{"rate": x, **fraction_of_products(path, y)._asdict()} for x, y in rates.items()]
    columns = {
        "product rate": text("rate"),
        "fraction of the ppo_linen iteration": span(),
    }
    return table_of("gpu_shares", "Products in the large network", pd.DataFrame(rows), columns)


def product_table(path: Path) -> Table:
    """Return the product rate of each framework, with one row per number of matrix rows."""
    frame = pd.DataFrame(json.loads(path.read_text(encoding="utf-8")))
    frame["rate"] = 2e-12 * frame["rows"] * WIDTH**2 / frame["seconds"]
    wide = frame.pivot(index="rows", columns="framework", values="rate").reset_index()
    columns = {
        "rows": lambda row: f"{row['rows']:,.0f}",
        "JAX (TFLOP/s)": value("jax"),
        "PyTorch (TFLOP/s)": value("torch"),
    }
    return table_of("gpu_products", "Products with 1024 x 1024 weights", wide, columns)


BLOCKS = {
    "gpu_ratios": ratio_table,
    "gpu_robots": robot_table,
    "gpu_agents": agent_table,
    "gpu_shares": share_table,
    "gpu_products": product_table,
}


def update(source: Path, out: Path) -> None:
    """Draw the ratio between the PyTorch and Linen times in each round."""
    times = Times(source / "races.jsonl")
    pairs = {}
    for env in ENVS:
        for size in SIZES:
            for script in ("torch_compile", "torch"):
                name = f"{env}, {size}, {WORDS[script]}"
                pairs[name] = (ppo(script, env, size), ppo("linen", env, size))
    for what, linen in CONTROL.items():
        for script in ("torch_compile", "torch"):
            programs = [times.called(linen.replace("linen", x)) for x in (script, "linen")]
            pairs[f"{what}, {WORDS[script]}"] = tuple(x or "" for x in programs)
    ratios = {name: times.ratios(*pair) for name, pair in pairs.items()}
    drawn = pd.DataFrame({name: x for name, x in ratios.items() if x is not None})
    intervals = {name: times.ratio(*pairs[name]) for name in drawn}
    label = "time per iteration: PyTorch / Linen"
    (out / "answer.png").write_bytes(figures.png(figures.spread(drawn, intervals, label)))

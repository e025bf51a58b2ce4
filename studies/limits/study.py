"""Tables and a figure of the time per part of an iteration, from the results of measure.py."""

import json
from pathlib import Path

import pandas as pd

from analysis import figures, races, stats
from analysis.catalog import SIZES
from analysis.formatting import number
from analysis.page import Table
from analysis.stats import NOTHING
from analysis.tables import across, multiple, span, table_of, text, texts, value
from studies.limits import compiled

# Part -> name in the table.
PARTS = {
    "iteration": "iteration",
    "rollout": "rollout",
    "environment": "rollout: environment",
    "policy": "rollout: policy",
    "compiled_policy": "rollout: policy, if compiled",
    "crossing": "rollout: transfers to JAX and back",
    "update": "update",
    "products": "update: products",
    "tanh": "update: tanh and its gradient",
    "Adam": "update: clipping and Adam",
    "gathers": "update: shuffles and gathers",
    "values": "update: values and GAE",
    "rest": "update: rest",
    "log": "logging, between iterations",
    "calls": "update with minibatches of one row",
}
OF_UPDATE = ("products", "tanh", "Adam", "gathers", "values")
DRAWN = {"rollout": "rollout", "products": "products", "tanh": "tanh", "other": "other"}
LINEN = "ppo_linen"
KEYS = ["script", "size", "cores", "process"]
# Race in races.toml -> column of the tables of uses and optimizations.
RACES = {
    "CartPole-v1, 2 x 64": "2 x 64",
    "CartPole-v1, 2 x 256": "2 x 256",
    "CartPole-v1, 2 x 1024": "2 x 1024",
    "HalfCheetah-v5 in Gymnasium": "HalfCheetah-v5, 2 x 64",
}
# Program in races.toml -> use of torch.compile.
USES = {
    "Linen": "none: Flax Linen",
    "eager": "none: uncompiled PyTorch",
    "module": "agent.compile()",
    "step": "minibatch step and policy, as in LeanRL",
    "step_options": "the same, with cpp_wrapper and use_decompose_tanh",
    "ours": "our compiled script",
}
# Program in races.toml -> optimization of ppo_torch_compile.py that it lacks.
OPTIMIZATIONS = {
    "three_graphs": "loss, gradient and Adam in one graph, not in three",
    "two_graphs": "Adam in the graph of the gradient",
    "torch_optim": "custom Adam in that graph instead of torch.optim",
    "adam_per_parameter": "Adam on one vector, not on each parameter",
    "python_wrapper": "cpp_wrapper",
    "library_tanh": "use_decompose_tanh",
    "compiled_policy": "policy not compiled",
}

# Race in races.toml with small intervals -> the script that its programs vary.
PRECISE = {
    "small differences, 2 x 64": "ppo_torch_compile",
    "cpp_wrapper, PPO on HalfCheetah-v5": "ppo_continuous_torch_compile_gymnasium",
    "cpp_wrapper, DQN": "dqn_torch_compile",
    "cpp_wrapper, SAC on HalfCheetah-v5": "sac_torch_compile_gymnasium",
}


def read(path: Path) -> pd.DataFrame:
    """Return the seconds per part (columns), with one row per script, size, cores and process."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    measured = pd.DataFrame([line for line in lines if "part" in line])
    table = measured.pivot(index=KEYS, columns="part", values="seconds")
    table = table.reindex(columns=list(PARTS))  # NaN if not measured
    table["rest"] = table["update"] - table[list(OF_UPDATE)].sum(axis=1)
    return table.reset_index()


def parts(path: Path) -> Table:
    """Return the time of each part of an iteration in milliseconds, with small networks."""
    table = read(path)
    table = table[table["size"] == "small"]
    long = table.melt(KEYS, list(PARTS), value_name="seconds")
    long["milliseconds"] = long["seconds"] * 1000
    frame = stats.of_groups(long, ["part", "script", "cores"], "milliseconds", stats.mean)
    frame = frame[(frame["cores"] == 2) | (frame["script"] == LINEN)]
    frame = frame.sort_values("cores", ascending=False, kind="stable")
    frame = frame.sort_values("part", key=lambda x: x.map(list(PARTS).index), kind="stable")
    frame["part"] = frame["part"].map(PARTS)
    one_core = frame["cores"].map({1: ", one core", 2: ""})
    frame["title"] = frame["script"] + one_core + " (ms)"
    cells = across(frame, frame["estimate"].map(number), ["part"], "title")
    return Table("limits_parts", "Time of the parts of an iteration", frame, cells)


def floors(path: Path) -> Table:
    """Return the ratio of the time of all minibatches to the time of their products in XLA.

    The pass that computes values is excluded: it runs once per update, so it would weigh more in an
    update with one epoch than in an update with ten.
    """
    table = read(path)
    keys = ["size", "cores", "process"]
    alone = table[table["script"] == LINEN].set_index(keys)["products"].rename("floor")
    table = table.join(alone, on=keys)
    table["ratio"] = (table["update"] - table["values"]) / table["floor"]
    frame = stats.of_groups(table, ["script", "size", "cores"], "ratio", stats.geometric_mean)
    frame["size"] = pd.Categorical(frame["size"], list(SIZES))
    frame = frame.sort_values(["script", "size", "cores"], kind="stable")
    frame["network and cores"] = frame["size"].astype(str) + ", " + frame["cores"].astype(str)
    cells = across(frame, texts(frame, multiple()), ["network and cores"], "script")
    return Table(
        "limits_floors", "Minibatch time / time of the matrix products alone", frame, cells
    )


def cartpole_table(path: Path) -> Table:
    """Return the times of ppo_torch.py and cartpole.py in a race, and their ratio."""
    (race,) = races.read(path)
    times, ratios = race.times(), race.ratios()
    rows = [
        (name, 1000 * times[name].median(), *ratios.get(name, stats.Interval(1, 1, 1)))
        for name in times
    ]
    frame = pd.DataFrame(rows, columns=["mode", "ms", *stats.Interval._fields])
    columns = {"time per iteration (ms)": value("ms"), "time / ppo_torch time": multiple()}
    return table_of("limits_cartpole", "CartPole in PyTorch", frame, columns)


def race_ratios(path: Path, programs: dict[str, str], baseline: str) -> pd.DataFrame:
    """Return one row per program, with the ratio of its time to the baseline in each race."""
    frame = pd.DataFrame({"program": list(programs), "what": list(programs.values())})
    found = races.named(path)
    for name, column in RACES.items():
        times = found[name].times()
        ratios = pd.DataFrame(
            [races.ratio_of(times[x], times[baseline]) if x in times else NOTHING for x in programs]
        )
        frame = frame.join(ratios.add_prefix(f"{column}_"))
    return frame


def count_lines(program: str) -> int:
    """Return the number of lines of a program in PyTorch for CartPole-v1."""
    scripts = {"eager": compiled.EAGER, "ours": compiled.COMPILED}
    if program in scripts:
        return len(scripts[program].read_text(encoding="utf-8").splitlines())
    return len(compiled.text_of(program).splitlines())


def uses_table(path: Path) -> Table:
    """Return the time of each use of torch.compile relative to Linen, and the lines it adds."""
    frame = race_ratios(path, USES, baseline="Linen")
    added = [count_lines(x) - count_lines("eager") for x in USES if x != "Linen"]
    frame["lines"] = ["", *map(str, added)]
    columns = {"compiled part": text("what"), "lines added to ppo_torch": text("lines")}
    columns |= {f"{x}: time / Linen time": multiple(f"{x}_") for x in RACES.values()}
    return table_of("limits_uses", "Uses of torch.compile", frame, columns)


def optimizations_table(path: Path) -> Table:
    """Return the time without each optimization relative to the time with all, and its lines."""
    frame = race_ratios(path, OPTIMIZATIONS, baseline="ours")
    frame["lines"] = [str(count_lines("ours") - count_lines(x)) for x in OPTIMIZATIONS]
    columns = {"optimization": text("what"), "lines": text("lines")}
    columns |= {f"{x}: time without / with": multiple(f"{x}_") for x in RACES.values()}
    return table_of("limits_optimizations", "Optimizations of ppo_torch_compile", frame, columns)


def precise_table(path: Path) -> Table:
    """Return the time of compiled scripts without an optimization, relative to the time with it."""
    found = races.named(path)
    rows = []
    for name, script in PRECISE.items():
        times = found[name].times()
        for program in found[name].names()[1:]:
            ratio = races.ratio_of(times[program], times["ours"])
            rows.append((OPTIMIZATIONS[program], script, *ratio))
    frame = pd.DataFrame(rows, columns=["what", "script", *stats.Interval._fields])
    columns = {"optimization": text("what"), "script": text("script")}
    columns |= {"time without / with": multiple()}
    return table_of("limits_precise", "Small effects, measured more precisely", frame, columns)


def startup_table(path: Path) -> Table:
    """Return the duration of a run of one iteration, and what each optimization saves."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    frame = pd.DataFrame(lines[1:])
    seconds = {name: group["seconds"].to_numpy() for name, group in frame.groupby("variant")}
    rows = []
    for variant, what in OPTIMIZATIONS.items():
        if variant in seconds:
            difference = stats.mean(seconds[variant] - seconds["ours"])
            rows.append((what, seconds["ours"].mean(), *difference))
    frame = pd.DataFrame(rows, columns=["what", "seconds", *stats.Interval._fields])
    columns = {"optimization": text("what"), "startup (s)": value("seconds")}
    columns |= {"longer without it (s)": span()}
    return table_of("limits_startup", "Startup of ppo_torch_compile", frame, columns)


def sac_table(path: Path) -> Table:
    """Return the time of each part of an SAC step in Linen, in microseconds."""
    rows = pd.DataFrame(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    columns = {"part of an SAC step": text("part"), "time (µs)": value("microseconds")}
    return table_of("limits_sac", "Parts of an SAC step in Linen", rows, columns)


BLOCKS = {
    "limits_uses": uses_table,
    "limits_optimizations": optimizations_table,
    "limits_precise": precise_table,
    "limits_startup": startup_table,
    "limits_sac": sac_table,
    "limits_cartpole": cartpole_table,
    "limits_parts": parts,
    "limits_floors": floors,
}


def update(source: Path, out: Path) -> None:
    """Draw the figure of the study."""
    table = read(source / "measured.jsonl")
    table = table[(table["size"] == "small") & (table["cores"] == 2)]
    table["other"] = table["update"] - table["products"] - table["tanh"]
    rows = 1000 * table.groupby("script")[list(DRAWN)].mean()
    rows = rows.reset_index(names="mode").assign(size="small", low=float("nan"), high=float("nan"))
    modes = rows[["mode"]].assign(framework=rows["mode"].str.split("_").str[1])
    styles = figures.styles(modes)
    figure = figures.bars(rows, styles, DRAWN, "milliseconds of rollout and update")
    (out / "limits.png").write_bytes(figures.png(figure))

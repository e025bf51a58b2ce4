"""Tables and a figure of where an iteration goes, from what measure.py measured."""

import json
from pathlib import Path

import pandas as pd

from analysis import figures, stats
from analysis.page import Table
from analysis.tables import across, texts
from analysis.words import number

# Part -> its name in the table; those of an update begin where products do.
PARTS = {
    "iteration": "iteration",
    "rollout": "rollout",
    "environment": "rollout: environment",
    "policy": "rollout: policy",
    "compiled_policy": "rollout: policy, if it were compiled",
    "crossing": "rollout: crossing to JAX and back",
    "update": "update",
    "products": "update: products",
    "thin": "update: of them, the logits' weights'",
    "thin_turned": "the same, transposed",
    "tanh": "update: tanh and its derivative",
    "Adam": "update: clipping and Adam",
    "gathers": "update: shuffles and gathers",
    "values": "update: values and GAE",
    "rest": "update: rest",
    "log": "log, between iterations",
    "calls": "update of minibatches of one row",
}
OF_UPDATE = ("products", "tanh", "Adam", "gathers", "values")
DRAWN = {
    "rollout": "rollout",
    "products": "products",
    "tanh": "tanh",
    "others": "Adam, gathers, values",
    "rest": "rest of update",
}
KEYS = ["script", "size", "cores", "process"]


def read(path: Path) -> pd.DataFrame:
    """Return a row per script, size, cores and process, with a part's seconds in each column."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    measured = pd.DataFrame([line for line in lines if "part" in line])
    table = measured.pivot(index=KEYS, columns="part", values="seconds")
    table = table.reindex(columns=list(PARTS))  # what was not measured is NaN
    table["others"] = table[["Adam", "gathers", "values"]].sum(axis=1)
    table["rest"] = table["update"] - table[list(OF_UPDATE)].sum(axis=1)
    return table.reset_index()


def parts(path: Path) -> Table:
    """Return the milliseconds of each part of an iteration with small networks on two cores."""
    table = read(path)
    table = table[(table["size"] == "small") & (table["cores"] == 2)]
    long = table.melt(["script", "process"], list(PARTS), value_name="seconds")
    long["milliseconds"] = long["seconds"] * 1000
    frame = stats.of_groups(long, ["part", "script"], "milliseconds", stats.mean)
    frame = frame.sort_values("part", key=lambda x: x.map(list(PARTS).index), kind="stable")
    frame["part"] = frame["part"].map(PARTS)
    frame["script"] += " (ms)"
    cells = across(frame, frame["estimate"].map(number), ["part"], "script")
    return Table("limits_parts", "Where an iteration goes", frame, cells)


def floors(path: Path) -> Table:
    """Return the time of an update's minibatches over that of their products alone.

    The pass for values is left out: it is one in ten epochs, and would weigh more in fewer.
    """
    table = read(path)
    alone = table.pivot(index=["size", "cores", "process"], columns="script", values="products")
    rows = []
    for script in ("ppo_linen", "ppo_torch", "ppo_torch_compile"):
        own = table[table["script"] == script].set_index(alone.index.names)
        for library, owner in (("XLA", "ppo_linen"), ("PyTorch", "ppo_torch")):
            minibatches = own["update"] - own["values"]
            ratio = (minibatches / alone[owner]).dropna().rename("ratio").reset_index()
            rows.append(ratio.assign(script=script, library=f"times as long as in {library}"))
    ratios = pd.concat(rows)
    frame = stats.of_groups(
        ratios, ["script", "size", "cores", "library"], "ratio", stats.geometric_mean
    )
    frame["size"] = pd.Categorical(frame["size"], ["small", "medium", "large"])
    frame = frame.sort_values(["script", "size", "cores"], kind="stable")
    cells = across(frame, texts(frame), ["script", "size", "cores"], "library")
    return Table("limits_floors", "Minibatches over their products alone", frame, cells)


def cores(path: Path) -> Table:
    """Return how many times as long an iteration and its halves take on one core as on two."""
    table = read(path)
    table = table[table["size"] == "small"].set_index(["script", "process"])
    shown = ["rollout", "update", "products"]
    one = table.loc[table["cores"] == 1, shown]
    two = table.loc[table["cores"] == 2, shown]
    ratios = (one / two).dropna().reset_index()
    long = ratios.melt(["script", "process"], var_name="part", value_name="ratio")
    frame = stats.of_groups(long, ["script", "part"], "ratio", stats.geometric_mean)
    cells = across(frame, texts(frame), ["script"], "part")
    return Table("limits_cores", "On one core, times as long as on two", frame, cells)


BLOCKS = {"limits_parts": parts, "limits_floors": floors, "limits_cores": cores}


def update(source: Path, out: Path) -> None:
    """Draw the study's figure."""
    table = read(source / "measured.jsonl")
    table = table[(table["size"] == "small") & (table["cores"] == 2)]
    rows = 1000 * table.groupby("script")[list(DRAWN)].mean()
    rows = rows.reset_index(names="mode").assign(size="small", low=float("nan"), high=float("nan"))
    modes = rows[["mode"]].assign(framework=rows["mode"].str.split("_").str[1])
    looks = figures.looks(modes)
    figure = figures.bars(rows, looks, DRAWN, "milliseconds of an iteration")
    (out / "limits.png").write_bytes(figures.png(figure))

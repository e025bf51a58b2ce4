"""What differs on a GPU: ratios over Linen in each network, many agents in a program, and targets.

products.json, which products.py writes, lies beside the runs.
"""

import json
from pathlib import Path

import pandas as pd

from analysis import stats
from analysis.measures import experiments, in_order, summarize, timed
from analysis.page import Table
from analysis.runs import load
from analysis.tables import across, span, table_of, text, texts

LINEN, COMPILED = "ppo_linen", "ppo_torch_compile"
AT_MOST = {"small": 2.0, "medium": 1.5, "large": 1.1}  # of COMPILED's iteration over LINEN's
AGENTS, AGENTS_AT_MOST = 64, 2.0  # of a program's iteration over that of one agent
SHARE_AT_LEAST = 0.7  # of products in LINEN's iteration, in the large network
# How many products with weights of 1024 x 1024 have so many rows, in an iteration of 256 steps and
# 10 epochs of 8 minibatches: a network has five. Its first and its output are left out.
PRODUCTS = {
    32: 256 * 5,  # the actor's, in each step
    16384: 5,  # the critic's, of all obs and next_obs
    1024: 80 * 2 * 5 * 3,  # both networks', in each minibatch: one forward and two backward
}
ENDS = list(stats.Interval._fields)


def over_linen(source: Path, by: tuple[str, ...]) -> pd.DataFrame:
    frame = summarize(experiments(load(source))[0].runs, ("steady",), LINEN, by)
    return frame.rename(columns=lambda x: x.removeprefix("steady_"))


def ratio_table(source: Path) -> Table:
    frame = over_linen(source, ("size", "env_id")).dropna(subset=["estimate"])
    frame = frame.rename(columns={"env_id": "environment", "mode": "script"})
    cells = across(frame, texts(frame), ["environment", "script"], "size")
    return Table("gpu_ratios", f"A steady iteration, times as long as {LINEN}'s", frame, cells)


def over_one(source: Path) -> pd.DataFrame:
    """Return the iteration of N agents in a program over that of one, by repeats of both."""
    runs = timed(load(source).runs).dropna(subset=["num_agents"])
    one = runs[runs["num_agents"] == 1].set_index(["mode", "repeat"])["steady"].rename("one")
    both = runs.join(one, on=["mode", "repeat"]).sort_values("num_agents")
    both["ratio"] = both["steady"] / both["one"]
    return in_order(stats.of_groups(both, ["mode", "num_agents"], "ratio", stats.geometric_mean))


def agent_table(source: Path) -> Table:
    frame = over_one(source).rename(columns={"mode": "script"})
    shown = frame.assign(agents=frame["num_agents"].map("{:,.0f}".format))
    cells = across(shown, texts(frame), ["script"], "agents")
    return Table("gpu_agents", "An iteration of N agents, times as long as of one", frame, cells)


def target_table(source: Path) -> Table:
    rows = []
    sizes = over_linen(source, ("size",)).set_index(["mode", "size"])
    for size, most in AT_MOST.items():
        found = sizes.loc[(COMPILED, size), ENDS]
        rows.append((f"{COMPILED} over {LINEN}, {size}", f"at most {most}", *found))
    agents = over_one(source).set_index(["num_agents", "mode"])
    for mode, found in agents.loc[AGENTS, ENDS].iterrows():
        rows.append((f"{AGENTS} agents over one, {mode}", f"at most {AGENTS_AT_MOST}", *found))

    measured = pd.DataFrame(json.loads((source / "products.json").read_text()))
    seconds = (measured.groupby("rows")["seconds"].min() * pd.Series(PRODUCTS)).sum()
    runs = experiments(load(source))[0].runs.query("mode == @LINEN and size == 'large'")
    share = stats.geometric_mean(seconds / timed(runs)["steady"].to_numpy())
    rows.append((f"products' share of {LINEN}, large", f"at least {SHARE_AT_LEAST}", *share))
    columns = {"what": text("what"), "target": text("target"), "measured": span()}
    frame = pd.DataFrame(rows, columns=["what", "target", *ENDS])
    return table_of("gpu_targets", "Targets", frame, columns)


BLOCKS = {"gpu_ratios": ratio_table, "gpu_agents": agent_table, "gpu_targets": target_table}

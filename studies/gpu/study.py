"""What differs on a GPU: each network's ratios over Linen, targets, many agents in one program.

products.json, which products.py writes beside the runs, has the seconds of the large network's
products.
"""

import json
from pathlib import Path

import pandas as pd

from analysis import stats
from analysis.measures import benches, in_order, measure, timed
from analysis.page import Table
from analysis.runs import load
from analysis.tables import across, span, table_of, text, texts

LINEN, COMPILED = "ppo_linen", "ppo_torch_compile"
AT_MOST = {"small": 2.0, "medium": 1.5, "large": 1.1}  # of COMPILED over LINEN
AGENTS, AGENTS_AT_MOST = 64, 2.0  # of a program's iteration over that of one agent
SHARE_AT_LEAST = 0.7  # of the large network's products in LINEN's iteration
# Products of 1024 x 1024 weights and so many rows, in an iteration of 32 environments, 256 steps
# and 10 epochs of 8 minibatches: six layers have five. The first and the output are left out.
PRODUCTS = {
    32: 256 * 5,  # the actor's, in each step
    16384: 5,  # the critic's, of all obs and next_obs
    1024: 80 * 2 * 5 * 3,  # both networks', of a minibatch: one forward and two backward
}


def steady(source: Path, by: tuple[str, ...]) -> pd.DataFrame:
    """Return each script's iteration over LINEN's, in groups."""
    runs = benches(load(source))[0].runs
    frame = measure(runs, ("steady",), LINEN, by)
    return frame.rename(columns=lambda x: x.removeprefix("steady_"))


def agents(source: Path) -> pd.DataFrame:
    """Return the iteration of N agents in one program over that of one, by repeats of both."""
    runs = timed(load(source).runs).dropna(subset=["num_agents", "steady"])
    keys = ["mode", "repeat"]
    one = runs[runs["num_agents"] == 1].set_index(keys)["steady"].rename("one")
    both = runs.join(one, on=keys).sort_values("num_agents")
    both = both.assign(ratio=both["steady"] / both["one"])
    return in_order(stats.of_groups(both, ["mode", "num_agents"], "ratio", stats.geometric_mean))


def share_of_products(source: Path) -> stats.Interval:
    """Return which part of LINEN's iteration the large network's products alone would take."""
    measured = pd.DataFrame(json.loads((source / "products.json").read_text()))
    fastest = measured.groupby("rows")["seconds"].min()
    seconds = sum(count * fastest[rows] for rows, count in PRODUCTS.items())
    runs = timed(benches(load(source))[0].runs)
    runs = runs[(runs["mode"] == LINEN) & (runs["size"] == "large")]
    return stats.geometric_mean(seconds / runs["steady"].dropna().to_numpy())


# === Tables =====================================================================================
def ratio_table(source: Path) -> Table:
    frame = steady(source, ("size", "env_id")).dropna(subset=["estimate"])
    frame = frame.rename(columns={"env_id": "environment", "mode": "script"})
    cells = across(frame, texts(frame), ["environment", "script"], "size")
    return Table("gpu_ratios", f"A steady iteration, times as long as {LINEN}'s", frame, cells)


def agent_table(source: Path) -> Table:
    frame = agents(source).rename(columns={"mode": "script"})
    shown = frame.assign(agents=frame["num_agents"].map("{:,.0f}".format))
    cells = across(shown, texts(frame), ["script"], "agents")
    caption = "An iteration of N agents in one program, times as long as that of one"
    return Table("gpu_agents", caption, frame, cells)


def target_table(source: Path) -> Table:
    ends = list(stats.Interval._fields)
    over_linen = steady(source, ("size",)).set_index(["mode", "size"])
    of_agents = agents(source).set_index(["num_agents", "mode"])
    rows = []
    for size, most in AT_MOST.items():
        found = over_linen.loc[(COMPILED, size), ends]
        rows.append((f"{COMPILED} over {LINEN}, {size}", f"at most {most}", *found))
    for mode, found in of_agents.loc[AGENTS, ends].iterrows():
        rows.append((f"{AGENTS} agents over one, {mode}", f"at most {AGENTS_AT_MOST}", *found))
    share = share_of_products(source)
    rows.append((f"products' share of {LINEN}, large", f"at least {SHARE_AT_LEAST}", *share))
    frame = pd.DataFrame(rows, columns=["what", "target", *ends])
    columns = {"what": text("what"), "target": text("target"), "measured": span()}
    return table_of("gpu_targets", "Targets", frame, columns)


BLOCKS = {"gpu_ratios": ratio_table, "gpu_agents": agent_table, "gpu_targets": target_table}

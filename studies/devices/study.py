"""Speedup from two devices in one training run, and the step time above which two GPUs may help."""

from itertools import pairwise
from pathlib import Path

import pandas as pd

from analysis import races
from analysis.formatting import number
from analysis.page import Table
from analysis.stats import Interval
from analysis.tables import multiple, table_of, text, value

NETWORKS = {"2 x 64": (64, 64), "3 x 256": (256, 256, 256)}  # race name -> units per hidden layer
SCRIPTS = {"Linen": "ppo_linen_sharded", "PyTorch": "ppo_torch_ddp"}
MINIBATCHES = 10 * 8  # minibatches per iteration, over all epochs
# Assumed for two GPUs with a fast link: latency of an all-reduce, and bytes per second.
LATENCY = 20e-6
BANDWIDTH = 100e9


def gain_table(path: Path) -> Table:
    """Return the time per iteration on one and two devices, with one row per network and script."""
    rows = []
    for network, race in races.named(path).items():
        times = race.times()
        for framework, script in SCRIPTS.items():
            one, two = times[f"{framework}, one"], times[f"{framework}, two"]
            ratio = races.ratio_of(two, one)
            rows.append((network, script, 1000 * one.median(), 1000 * two.median(), *ratio))
    names = ["network", "script", "one", "two", *Interval._fields]
    columns = {
        "network": text("network"),
        "script": text("script"),
        "one device (ms)": value("one"),
        "two devices (ms)": value("two"),
        "two / one": multiple(),
    }
    return table_of("devices_gain", "Two devices", pd.DataFrame(rows, columns=names), columns)


def estimate_table(path: Path) -> Table:
    """Return the gradient size, all-reduce time and break-even step time for each network.

    At best, two devices halve the time of a minibatch step and add the all-reduce. So they are
    faster if a step on one device takes more than twice as long as the all-reduce. The measured
    step time includes the rollout.
    """
    rows = []
    for network, race in races.named(path).items():
        size = gradient_bytes(NETWORKS[network])
        step = race.times()["Linen, one"].median() / MINIBATCHES
        reduce = LATENCY + size / BANDWIDTH
        rows.append((network, size, 1e6 * reduce, 2e6 * reduce, 1e6 * step))
    frame = pd.DataFrame(rows, columns=["network", "bytes", "reduce", "least", "step"])
    cells = frame[["network"]].copy()
    cells["gradient size (bytes)"] = frame["bytes"].map(number)
    cells["estimated all-reduce (µs)"] = frame["reduce"].map(number)
    cells["break-even step time on a GPU (µs)"] = frame["least"].map(number)
    cells["step time of ppo_linen_sharded on this CPU (µs)"] = frame["step"].map(number)
    return Table("devices_estimate", "Estimate for two GPUs", frame, cells)


def gradient_bytes(hidden_sizes: tuple[int, ...]) -> int:
    """Return the size in bytes of the float32 gradient of actor and critic in CartPole."""
    total = 0
    for num_outputs in (2, 1):
        sizes = (4, *hidden_sizes, num_outputs)
        total += sum((m + 1) * n for m, n in pairwise(sizes))
    return 4 * total


BLOCKS = {"devices_gain": gain_table, "devices_estimate": estimate_table}

"""What two devices bring one training, and from which step on two GPUs may be worth it."""

import json
from pathlib import Path

import pandas as pd

from analysis import stats
from analysis.formatting import number
from analysis.page import Table
from analysis.tables import texts

KEYS = ["network", "script"]
# Assumed of two GPUs that a fast link joins: an all-reduce's start, and bytes in a second.
LATENCY = 20e-6
BANDWIDTH = 100e9


def read(path: Path) -> pd.DataFrame:
    """Return a row per run."""
    return pd.DataFrame(map(json.loads, path.read_text().splitlines()))


def gain_table(path: Path) -> Table:
    """A row per network and script: the iteration on one device, and how two multiply its time."""
    rows = read(path)
    index = ["round", *KEYS]
    seconds = rows.pivot(index=index, columns="devices", values="iteration").dropna()
    pairs = seconds.reset_index()
    pairs["ratio"] = pairs[2] / pairs[1]
    frame = stats.of_groups(pairs, KEYS, "ratio", stats.geometric_mean)
    medians = pairs.groupby(KEYS)[[1, 2]].median()
    medians.columns = ["one", "two"]
    frame = frame.join(medians, on=KEYS).sort_values("one")
    frame["rounds"] = pairs["round"].nunique()
    cells = frame[KEYS].copy()
    cells["an iteration on one (s)"] = frame["one"].map(number)
    cells["on two (s)"] = frame["two"].map(number)
    cells["times one"] = texts(frame)
    return Table("devices_gain", "An iteration on two devices, beside one", frame, cells)


def estimate_table(path: Path) -> Table:
    """A row per network: bytes to reduce, the time estimated for it, and what must take longer.

    At best two devices halve a minibatch's step, and add the all-reduce. So they gain where the
    step on one takes more than twice the all-reduce. The measured step counts the rollout in.
    """
    rows = read(path)
    alone = rows[(rows["devices"] == 1) & (rows["script"] == "ppo_linen_sharded")]
    step = (alone["iteration"] / alone["minibatches"]).groupby(alone["network"]).median()
    frame = rows.drop_duplicates("network")[["network", "gradient_bytes"]]
    frame = frame.sort_values("gradient_bytes", ignore_index=True)
    frame["reduce"] = LATENCY + frame["gradient_bytes"] / BANDWIDTH
    frame["least"] = 2 * frame["reduce"]
    frame["step"] = frame["network"].map(step)
    cells = frame[["network"]].copy()
    cells["bytes of the gradient"] = frame["gradient_bytes"].map(number)
    cells["all-reduce, estimated (µs)"] = (1e6 * frame["reduce"]).map(number)
    cells["two gain from a step of (µs)"] = (1e6 * frame["least"]).map(number)
    cells["step here, ppo_linen_sharded (µs)"] = (1e6 * frame["step"]).map(number)
    return Table("devices_estimate", "Estimate for two GPUs", frame, cells)


BLOCKS = {"devices_gain": gain_table, "devices_estimate": estimate_table}

"""Training speed of our scripts and other libraries in brax's HalfCheetah, on a CPU."""

import json
from pathlib import Path

import pandas as pd

from analysis import stats
from analysis.formatting import interval, number
from analysis.page import Table, Text
from analysis.tables import multiple, texts

OTHERS = {  # script -> library, and algorithm with network size
    "brax_ppo": ("brax", "PPO, 2 x 64"),
    "brax_sac": ("brax", "SAC, 2 x 256"),
    "purejaxrl_ppo": ("PureJaxRL", "PPO, 2 x 256"),
}
KEYS = ["training", "num_envs", "other"]


def read(path: Path) -> pd.DataFrame:
    """Return the steps per second of each run of our script and of the library that ran after it.

    A round of measure.py starts with a line that names the processor.
    """
    pairs = []
    number_of_round = 0
    ours = None
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "script" not in row:
            number_of_round += 1
        elif row["script"] not in OTHERS:
            ours = row["steps_per_second"]
        else:
            other, training = OTHERS[row["script"]]
            steps = row["steps_per_second"]
            pairs.append((number_of_round, training, row["num_envs"], other, ours, steps))
    return pd.DataFrame(pairs, columns=["round", *KEYS, "ours", "others"])


def many_table(path: Path) -> Table:
    """Return steps per second, with one row per library, training and number of environments.

    A training is an algorithm with a network size.
    """
    pairs = read(path)
    pairs["ratio"] = pairs["ours"] / pairs["others"]
    frame = stats.of_groups(pairs, KEYS, "ratio", stats.geometric_mean)
    frame = frame.join(pairs.groupby(KEYS)[["ours", "others"]].median(), on=KEYS)
    cells = frame[["training"]].copy()
    cells["environments"] = frame["num_envs"].map("{:,}".format)
    cells["our script (steps/s)"] = frame["ours"].map(number)
    cells["library"] = frame["other"]
    cells["library (steps/s)"] = frame["others"].map(number)
    cells["ours / library"] = texts(frame, multiple())
    return Table("brax_many", "Steps per second in HalfCheetahSpring", frame, cells)


def gain(path: Path) -> Text:
    """Return a sentence about the speedup from the fewest to the most environments."""
    pairs = read(path)
    pairs = pairs[(pairs["training"] == "PPO, 2 x 64") & (pairs["other"] == "brax")]
    fewest, most = pairs["num_envs"].min(), pairs["num_envs"].max()
    gains = {}
    for name in ("ours", "others"):
        steps = pairs.pivot(index="round", columns="num_envs", values=name)
        gains[name] = interval(*stats.geometric_mean((steps[most] / steps[fewest]).to_numpy()))
    return Text(
        f"Going from {fewest} to {most:,} environments multiplies the steps per second of our "
        f"script by {gains['ours']} and the steps per second of brax by {gains['others']}."
    )


def speed_table(path: Path) -> Table:
    """Return the speed of our PPO, with one row per robot and number of environments."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    frame = pd.DataFrame([row for row in rows if "script" in row])
    cells = pd.DataFrame({"robot": frame["env_id"].str.replace("envs.", "")})
    cells["environments"] = frame["num_envs"].map("{:,}".format)
    cells["startup (s)"] = frame["start_seconds"].map(number)
    cells["steps/s"] = frame["steps_per_second"].map(number)
    return Table("brax_speed", "Steps per second in other robots", frame, cells)


BLOCKS = {"brax_many": many_table, "brax_gain": gain, "brax_speed": speed_table}

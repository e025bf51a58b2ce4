"""Time MinAtar's unmodified DQN example, and print its time per frame (ms) as a line of JSON.

    git clone https://github.com/kenjyoung/MinAtar ../MinAtar  # commit 4241f24, not included: GPL
    python studies/minatar/example.py ../MinAtar/examples 20000 1

The arguments are the folder of the example, the number of frames and the seed. The first 5,000
frames, in which actions are random and nothing is learned, are not timed.
"""

import importlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from minatar import Environment

folder, frames, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.path.insert(0, folder)
dqn: Any = importlib.import_module("dqn")
dqn.NUM_FRAMES = frames
random.seed(seed)
np.random.seed(seed)
torch.manual_seed(seed)
starts, train = [], dqn.train


def timed(*args):
    starts.append(time.perf_counter())
    train(*args)


dqn.train = timed
env = Environment("breakout")
env.seed(seed)
with tempfile.TemporaryDirectory() as out:
    dqn.dqn(env, False, False, str(Path(out, "breakout")))
row = {"threads": torch.get_num_threads(), "frames": frames, "seed": seed, "updates": len(starts)}
row["ms_per_learning_frame"] = (time.perf_counter() - starts[0]) / len(starts) * 1000
print(json.dumps(row))

"""Stands in for evaluate.py beside a copy of tune.py, for the agents of tune_script.py."""

import json
import math
import os
import sys
from pathlib import Path

flag = next(i for i, word in enumerate(sys.argv) if word.startswith("--"))
folders, flags = sys.argv[1:flag], sys.argv[flag:]
options = dict(zip(flags[::2], flags[1::2], strict=True))
seed, episodes = int(options["--seed"]), int(options["--episodes"])
for folder in map(Path, folders):
    args = json.loads((folder / "checkpoint.npz").read_text())["args"]
    value = -abs(math.log10(args["learning_rate"]) + 3) - 0.5 * args["anneal_lr"]
    value += (1 + args["anneal_lr"]) * (args["seed"] * 37 % 11) ** 2 / 100 + seed / 1e9
    if "no number" in os.environ["MISBEHAVE"]:
        value = float("nan")
    if "no judge" in os.environ["MISBEHAVE"]:
        sys.exit("no judgement")
    result = {"seed": seed, "episodes": episodes, "return": {"mean": value}}
    (folder / "evaluation.json").write_text(json.dumps(result))
    line = {"run": folder.name, "what": "judge", "games": seed, "episodes": episodes}
    file = os.open(os.environ["TRACE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (json.dumps(line) + "\n").encode())
    os.close(file)

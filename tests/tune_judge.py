"""Stands in for evaluate.py, for the agents of tune_script.py."""

import json
import math
import os
import sys
from pathlib import Path

flag = next(i for i, word in enumerate(sys.argv) if word.startswith("--"))
options = dict(zip(sys.argv[flag::2], sys.argv[flag + 1 :: 2], strict=True))
assert options["--env-id"] == "Fake-v1" and Path(options["--script"]).is_file()
games = int(options["--seed"])
episodes = int(options["--episodes"])
for folder in map(Path, sys.argv[1:flag]):
    args = json.loads((folder / "checkpoint.npz").read_text())["args"]
    value = -abs(math.log10(args["learning_rate"]) + 3) - 0.5 * args["anneal_lr"]
    value += (1 + args["anneal_lr"]) * (args["seed"] * 37 % 11) ** 2 / 100 + games / 1e9
    if "no number" in os.environ["MISBEHAVE"]:
        value = float("nan")
    if "no judge" in os.environ["MISBEHAVE"]:
        sys.exit("no judgement")
    (folder / "evaluation.json").write_text(json.dumps({"return": {"mean": value}}))
    line = {"run": folder.name, "what": "judge", "games": games, "episodes": episodes}
    with open(os.environ["TRACE"], "a") as file:
        file.write(json.dumps(line) + "\n")

"""Measure what is left of the frameworks' difference where a step of the environment costs more.

    python -m studies.control.dearness 3    # 3 rounds; adds to studies/control/dearness.jsonl

Each round trains every program once, in a fresh process, in slow.py's environments outside JAX, and
for comparison PPO in gymnax's Pendulum-v1. The programs of one environment and network follow each
other, in an order drawn anew for each round. A line of JSON is a run, written as soon as the run is
over. Called again after it was stopped, it measures only what is missing.

"iteration" is the mean of the iterations after the first ones, in seconds by the clock. In the
first ones the script compiles, and SAC acts at random. "rollout" and "update" are PPO's parts of
an iteration. "whole" is all of the process. Nothing is pinned to a core, as for a user.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from analysis.schema import SIZES
from studies.control import rows
from studies.control.slow import MICROSECONDS
from studies.machine import describe, git_commit

OUT = Path(__file__).with_name("dearness.jsonl")
IN_JAX = "gymnax"
# Minibatches of 64 steps. Dear steps leave no time for an iteration of 2,048.
PPO = ["--num-envs", "8", "--num-steps", "64", "--num-minibatches", "8", "--sync-for-timing"]
# The paper's settings: an update of 256 transitions at each step of one environment.
SAC = ["mujoco", "--num-steps", "100", "--learning-starts", "100", "--buffer-size", "10000"]
STEPS = {"ppo": 512, "sac": 100}  # of an iteration
FIRST = {"ppo": 1, "sac": 2}  # iterations that do not count
MEASURED = {0: 12, 30: 12, 100: 12, 300: 8, 1_000: 4, 10_000: 1}  # iterations that count
SAC_MEASURED = {0: 10, 300: 10, 10_000: 3}
# Else the first compiled run would fill a cache for the others.
COLD = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
KEYS = ("round", "algorithm", "size", "microseconds", "script")
PACKAGES = ("jax", "flax", "torch", "gymnasium", "gymnax", "numpy")


class Cell(NamedTuple):
    """What is compared: the scripts differ in their framework alone."""

    algorithm: str
    size: str  # of the networks
    microseconds: int | str  # of a step; or IN_JAX
    scripts: tuple[str, ...]


def cells() -> Iterator[Cell]:
    outside = ("ppo_continuous_linen_gymnasium", "ppo_continuous_torch_gymnasium")
    inside = ("ppo_continuous_linen", "ppo_continuous_torch")
    sac = ("sac_linen_gymnasium", "sac_torch_gymnasium", "sac_torch_compile_gymnasium")
    for size in ("small", "medium"):
        yield Cell("ppo", size, IN_JAX, inside)
        for microseconds in MICROSECONDS:
            yield Cell("ppo", size, microseconds, outside)
    for microseconds in SAC_MEASURED:
        yield Cell("sac", "256 256", microseconds, sac)


def command_of(cell: Cell, script: str) -> list[str]:
    """Return the call of a script, but for its folder."""
    counts = MEASURED if cell.algorithm == "ppo" else SAC_MEASURED
    measured = 12 if cell.microseconds == IN_JAX else counts[int(cell.microseconds)]
    iterations = FIRST[cell.algorithm] + measured
    env_id = f"studies.control.slow:Slow{cell.microseconds}-v0"
    if cell.microseconds == IN_JAX:
        env_id = "Pendulum-v1"
    flags = SAC
    if cell.algorithm == "ppo":
        flags = [*PPO, "--hidden-sizes", *map(str, SIZES[cell.size])]
    steps = str(iterations * STEPS[cell.algorithm])
    return [f"more/{script}.py", *flags, "--env-id", env_id, "--total-timesteps", steps]


def measure(command: list[str], first: int) -> dict[str, Any]:
    """Run a script in a fresh process; return its seconds, without the first iterations."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *command, "--runs-dir", folder, "--run-name", "run"]
        start = time.perf_counter()
        subprocess.run(words, env=os.environ | COLD, check=True, stdout=subprocess.DEVNULL)
        whole = time.perf_counter() - start
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    row: dict[str, Any] = {"iterations": len(logged), "whole": whole}
    for name in ("iteration", "rollout", "update"):
        values = [x[f"time/{name}"] for x in logged[first:] if f"time/{name}" in x]
        row[name] = statistics.mean(values) if values else None
    return row


def key_of(row: dict[str, Any]) -> tuple:
    return tuple(row[x] for x in KEYS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.control.dearness")
    parser.add_argument("rounds", type=rows.positive)
    parser.add_argument("--only", choices=["ppo", "sac"], help="the algorithm; by default both")
    parser.add_argument("--out", type=Path, default=OUT, help="file that gets a line per run")
    args = parser.parse_args()
    machine = describe()
    where = {
        "commit": git_commit(Path("more/ppo_continuous_linen_gymnasium.py")),
        "machine": {x: machine[x] for x in ("cpu", "cores")} | {"cpus": os.cpu_count()},
        "versions": {name: metadata.version(name) for name in PACKAGES},
    }
    before = rows.read(args.out, (*KEYS, *where))
    same = [row for row in before if args.only in (None, row["algorithm"])]
    if not all(rows.same_place(row, where) for row in same):
        rows.fail(f"{args.out} has runs of another commit, machine or version: begin another --out")
    done = {key_of(row) for row in before}
    for number in range(args.rounds):
        order = random.Random(number)
        turns = [x for x in cells() if args.only in (None, x.algorithm)]
        order.shuffle(turns)
        for cell in turns:
            for script in order.sample(cell.scripts, len(cell.scripts)):
                row: dict[str, Any] = {"round": number, "script": script} | cell._asdict()
                del row["scripts"]
                if key_of(row) in done:
                    continue
                row["steps"] = STEPS[cell.algorithm]
                row |= measure(command_of(cell, script), FIRST[cell.algorithm])
                row["load"] = os.getloadavg()[0]
                row["time"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
                with open(args.out, "a") as file:
                    file.write(json.dumps(row | where) + "\n")
                print(f"round {number + 1} of {args.rounds}: {key_of(row)[1:]}", file=sys.stderr)


if __name__ == "__main__":
    main()

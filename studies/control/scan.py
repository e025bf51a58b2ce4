"""Measure what it brings to train in one compiled call: PPO and SAC in Pendulum-v1.

    python -m studies.control.scan 4    # adds to studies/control/scan.jsonl; 4 minutes a round

Each round runs every program once, in a fresh process, in an order drawn anew. The scripts with
JAX environments use gymnax's Pendulum-v1, and the others Gymnasium's. uv runs rejax in an
environment of its own. "iteration" is in seconds by the clock: of ours the mean after the first
ones, in which they compile and SAC acts at random; of rejax, whose training is one call, the mean
of all. Called again after it was stopped, it measures only what is missing.
"""

import argparse
import json
import os
import platform
import random
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from studies.control import rows
from studies.control.dearness import measure
from studies.machine import describe, git_commit

OUT = Path(__file__).with_name("scan.jsonl")
SMALL, LARGE = "2 x 64", "2 x 256"
FLAGS = {
    SMALL: [],  # the scripts' defaults; SAC's updates are of 64 transitions
    LARGE: ["--hidden-sizes", "256", "256", "--batch-size", "256"],
}
STEPS = {"ppo": 4_096, "sac": 800}  # of an iteration, by default
FIRST = {"ppo": 1, "sac": 2}  # iterations that do not count
MEASURED = {"ppo": 12, "sac": 8}  # iterations that count
PACKAGES = ("jax", "flax", "optax", "torch", "gymnax", "gymnasium", "numpy")


class Program(NamedTuple):
    algorithm: str
    network: str
    script: str


def programs() -> Iterator[Program]:
    yield Program("ppo", SMALL, "ppo_continuous_linen")
    yield Program("ppo", SMALL, "rejax_ppo")
    for network in FLAGS:
        for framework in ("linen", "torch"):
            yield Program("sac", network, f"sac_{framework}")
            yield Program("sac", network, f"sac_{framework}_gymnasium")
        yield Program("sac", network, "sac_torch_compile_gymnasium")
    yield Program("sac", SMALL, "rejax_sac")


def run(program: Program, uv: list[str]) -> dict[str, Any]:
    """Run one of ours, or of rejax's; return its steps and seconds of an iteration."""
    algorithm = program.algorithm
    steps = STEPS[algorithm]
    if not program.script.startswith("rejax"):
        iterations = FIRST[algorithm] + MEASURED[algorithm]
        words = [f"more/{program.script}.py", "--env-id", "Pendulum-v1"]
        words += ["--total-timesteps", str(iterations * steps), *FLAGS[program.network]]
        found = measure(words, FIRST[algorithm])
        return {"steps": steps, "iteration": found["iteration"], "whole": found["whole"]}
    words = [*uv, "studies/control/peers/jax_rejax.py", algorithm, "--iterations", "25"]
    start = time.perf_counter()
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    row = json.loads(done.stdout.splitlines()[-1])
    whole = time.perf_counter() - start
    return {"steps": row["steps"], "iteration": row["iteration"], "whole": whole}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.control.scan")
    parser.add_argument("rounds", type=rows.positive)
    parser.add_argument("--out", type=Path, default=OUT, help="file that gets a line per run")
    parser.add_argument("--uv", default="uv run --script", help="what runs rejax")
    args = parser.parse_args()
    if not shutil.which((shlex.split(args.uv) or [""])[0]):
        rows.fail(f"--uv: '{args.uv}' is no command")
    machine = describe()
    where = {
        "commit": git_commit(Path("more/sac_linen.py")),
        "machine": {"cpu": machine["cpu"], "cpus": os.cpu_count()},
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
    }
    before = rows.read(args.out, ("round", "network", "script", *where))
    if not all(rows.same_place(row, where) for row in before):
        rows.fail(f"{args.out} has runs of another commit, machine or version: begin another --out")
    done = {(x["round"], x["network"], x["script"]) for x in before}
    for number in range(args.rounds):
        turns = list(programs())
        random.Random(number).shuffle(turns)
        for program in turns:
            if (number, program.network, program.script) in done:
                continue
            row: dict[str, Any] = {"round": number} | program._asdict()
            row |= run(program, shlex.split(args.uv))
            row |= {"load": os.getloadavg()[0], "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            with open(args.out, "a") as file:
                file.write(json.dumps(row | where) + "\n")
            print(f"round {number + 1} of {args.rounds}: {program}", flush=True)


if __name__ == "__main__":
    main()

"""Measure an iteration of rejax's PPO and SAC in gymnax's Pendulum-v1, beside ours.

    python -m studies.control.jax_peers 3 >> studies/control/jax_peers.jsonl    # 5 minutes

Each round runs every program once, in a fresh process, in an order drawn anew; uv runs rejax in an
environment of its own. "iteration" is in seconds by the clock: of ours the mean after the first
ones, in which they compile and SAC acts at random; of rejax, whose training is one call, the mean
of all. brax's and PureJaxRL's agents are measured by studies/brax/measure.py.
"""

import argparse
import json
import os
import platform
import random
import shlex
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from studies.control.dearness import measure
from studies.machine import describe, git_commit

OURS = {  # script -> steps of an iteration, and of how many first iterations the time is not taken
    "ppo_continuous_linen": (4_096, 1),
    "sac_linen": (800, 2),
}
ITERATIONS = 25
PACKAGES = ("jax", "flax", "optax", "gymnax", "numpy")


def run(program: str, uv: list[str]) -> dict[str, Any]:
    """Run one of ours, or of rejax's, by its name."""
    if program in OURS:
        steps, first = OURS[program]
        found = measure(
            [f"more/{program}.py", "--total-timesteps", str(ITERATIONS * steps)],
            first,
        )
        return {"steps": steps, "iteration": found["iteration"], "whole": found["whole"]}
    algorithm = program.removeprefix("rejax_")
    words = [*uv, "studies/control/peers/jax_rejax.py", algorithm, "--iterations", str(ITERATIONS)]
    start = time.perf_counter()
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    row = json.loads(done.stdout.splitlines()[-1])
    whole = time.perf_counter() - start
    return {"steps": row["steps"], "iteration": row["iteration"], "whole": whole}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.control.jax_peers")
    parser.add_argument("rounds", type=int)
    parser.add_argument("--uv", default="uv run --script", help="what runs rejax")
    args = parser.parse_args()
    machine = describe()
    where = {
        "commit": git_commit(Path("more/ppo_continuous_linen.py")),
        "machine": {"cpu": machine["cpu"], "cpus": os.cpu_count()},
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
    }
    for number in range(args.rounds):
        programs = [*OURS, "rejax_ppo", "rejax_sac"]
        random.Random(number).shuffle(programs)
        for program in programs:
            row = {"round": number, "script": program} | run(program, shlex.split(args.uv))
            row |= {"load": os.getloadavg()[0], "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            print(json.dumps(row | where), flush=True)


if __name__ == "__main__":
    main()

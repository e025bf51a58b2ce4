"""Measure what one training on two devices costs and brings, on the cores of one machine.

    python -m studies.devices.measure --minutes 12 > studies/devices/measured.jsonl
    python -m studies.devices.measure --minutes 6 --first 4 >> studies/devices/measured.jsonl

Each round trains with both scripts, both networks, and one and two devices, in an order that
changes from round to round. No round begins that may not end in time. A run's iteration is the
median of its iterations but for the first two. One device may use all cores.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from itertools import pairwise, product
from pathlib import Path
from typing import Any

SCRIPTS = ("ppo_linen_sharded", "ppo_torch_ddp")
NETWORKS = {"64 x 64": (64, 64), "3 x 256": (256, 256, 256)}
ITERATIONS = {"64 x 64": 12, "3 x 256": 6}
DEVICES = (1, 2)
STEPS = 8192  # of an iteration
SKIPPED = 2  # iterations, in which programs are compiled


def command(script: str, network: str, devices: int, seed: int, folder: str) -> list[str]:
    words = [sys.executable]
    if script == "ppo_torch_ddp":
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    words += [f"more/{script}.py", "--hidden-sizes", *map(str, NETWORKS[network])]
    words += ["--total-timesteps", str(ITERATIONS[network] * STEPS), "--seed", str(seed)]
    return [*words, "--runs-dir", folder, "--run-name", "run"]


def measure(script: str, network: str, devices: int, seed: int) -> dict[str, Any]:
    """Train once; the seconds of an iteration, and the bytes of the gradient."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    # One process of PyTorch has all cores, and of two each has its part.
    threads = max(1, len(os.sched_getaffinity(0)) // devices)
    env["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory() as folder:
        words = command(script, network, devices, seed, folder)
        subprocess.run(words, env=env, check=True, stdout=subprocess.DEVNULL)
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
        args = json.loads(Path(folder, "run/run.json").read_text())["args"]
    seconds = [json.loads(line)["time/iteration"] for line in lines[SKIPPED:]]
    minibatches = args["update_epochs"] * args["num_minibatches"]
    return {"iteration": statistics.median(seconds), "minibatches": minibatches}


def gradient_bytes(network: str) -> int:
    """Of actor and critic in CartPole, in float32."""
    total = 0
    for num_outputs in (2, 1):
        sizes = (4, *NETWORKS[network], num_outputs)
        total += sum((m + 1) * n for m, n in pairwise(sizes))
    return 4 * total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    args = parser.parse_args()
    if args.minutes <= 0 or args.first < 0:
        parser.error("--minutes must be more than 0, and --first 0 or more")
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
    versions = {name: metadata.version(name) for name in ("jax", "flax", "torch", "numpy")}
    begin = time.perf_counter()
    longest = 0.0
    round_number = args.first
    while time.perf_counter() - begin + 1.1 * longest < 60 * args.minutes:
        start = time.perf_counter()
        cells = list(product(SCRIPTS, NETWORKS, DEVICES))
        random.Random(round_number).shuffle(cells)
        for script, network, devices in cells:
            row: dict[str, Any] = {"round": round_number}
            row |= {"script": script, "network": network, "devices": devices}
            row |= measure(script, network, devices, seed=round_number + 1)
            row |= {"gradient_bytes": gradient_bytes(network), "load": os.getloadavg()[0]}
            row |= {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            row |= {"machine": machine, "versions": versions}
            print(json.dumps(row), flush=True)
        longest = max(longest, time.perf_counter() - start)
        round_number += 1


if __name__ == "__main__":
    main()

"""Measure the CPU time that an iteration of continuous PPO takes, beside Stable-Baselines3's.

    python -m studies.control.cost 5 --sb3 "uv run --script" >> studies/control/cost.jsonl

Each round runs every program twice in HalfCheetah-v5, one after the other: with 5 iterations and
with 100. The difference is 95 iterations without imports and compilation. What counts is user and
system time of the process and its children, on one core.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from importlib import metadata

OURS = ("ppo_continuous_linen_gymnasium", "ppo_continuous_torch_gymnasium")
SETTINGS = {  # the one that learns best in HalfCheetah, and one with smaller batches
    "32 x 64, batches of 256": ["--num-envs", "32", "--num-steps", "64", "--num-minibatches", "8"],
    "8 x 256, batches of 64": ["--num-envs", "8", "--num-steps", "256", "--num-minibatches", "32"],
}
STEPS = 2048  # of an iteration
SHORT, LONG = 5, 100  # iterations: Linen's compilation varies by a second from run to run
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
}


def cpu_seconds(command: list[str]) -> float:
    """Of a process and what it starts, which must succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Pinned to a core: XLA's pool of threads would have one for each.
    pinned = ["taskset", "--cpu-list", "0", *command]
    subprocess.run(pinned, env=os.environ | ONE_THREAD, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int)
    parser.add_argument("--sb3", default="uv run --script", help="what runs sb3_ppo.py")
    args = parser.parse_args()
    cpu = platform.processor() or platform.machine()
    machine = {"cpu": cpu, "python": platform.python_version()}
    names = ("jax", "flax", "torch", "gymnasium", "mujoco", "numpy")
    versions = {name: metadata.version(name) for name in names}
    for round_number in range(args.rounds):
        for setting, flags in SETTINGS.items():
            for name in (*OURS, "sb3"):
                program = [sys.executable, f"more/{name}.py"]
                if name == "sb3":
                    program = [*shlex.split(args.sb3), "studies/control/sb3_ppo.py"]
                seconds = []
                for iterations in (SHORT, LONG):
                    with tempfile.TemporaryDirectory() as folder:
                        command = [*program, "--env-id", "HalfCheetah-v5", *flags]
                        command += ["--total-timesteps", str(iterations * STEPS)]
                        if name != "sb3":
                            command += ["--runs-dir", folder]
                        seconds.append(cpu_seconds(command))
                row = {
                    "round": round_number,
                    "setting": setting,
                    "script": name,
                    "cpu_seconds": seconds,
                    "iteration": (seconds[1] - seconds[0]) / (LONG - SHORT),
                    "load": os.getloadavg()[0],
                    "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                    "machine": machine,
                    "versions": versions,
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

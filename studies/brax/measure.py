"""Time more/ppo_continuous_linen.py in robots of brax and of MuJoCo Playground.

    pip install brax==0.14.2 playground==0.2.0
    python -m studies.brax.measure 10 > studies/brax/speed.jsonl

The argument is the number of iterations, of 64 steps in each environment, after the first one. A
line is a run: "start_seconds" is all but these iterations, so imports, the pool of starts and what
is compiled; "steps_per_second" is the median of these iterations, updates among them;
"cpu_seconds" are those of all threads in the whole run. Times are by the clock: on a busy machine
they say little.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_STEPS = 64
RUNS = [
    ("envs.brax:HalfCheetahSpring", 64),
    ("envs.brax:HalfCheetahSpring", 256),
    ("envs.brax:HalfCheetah", 64),
    ("envs.brax:InvertedPendulumSpring", 64),
    ("envs.playground:CheetahRun", 64),
    ("envs.playground:CheetahRun", 256),
]


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(env_id: str, num_envs: int, iterations: int) -> dict[str, object]:
    steps = num_envs * NUM_STEPS
    words = [sys.executable, "more/ppo_continuous_linen.py", "--env-id", env_id]
    words += ["--num-envs", str(num_envs), "--num-steps", str(NUM_STEPS)]
    words += ["--total-timesteps", str(steps * (iterations + 1)), "--run-name", "run"]
    with tempfile.TemporaryDirectory() as folder:
        start, cpu_start = time.perf_counter(), cpu_seconds()
        subprocess.run([*words, "--runs-dir", folder], check=True, stdout=sys.stderr)
        seconds = time.perf_counter() - start
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    later = [json.loads(line)["time/iteration"] for line in lines[1:]]
    return {
        "env_id": env_id,
        "num_envs": num_envs,
        "num_steps": NUM_STEPS,
        "iterations": iterations,
        "start_seconds": round(seconds - sum(later), 1),
        "steps_per_second": round(steps / statistics.median(later)),
        "cpu_seconds": round(cpu_seconds() - cpu_start, 1),
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    cpu = subprocess.getoutput("lscpu | sed -n 's/^Model name: *//p'")
    print(json.dumps({"cpu": cpu, "cores": os.cpu_count()}), flush=True)
    for env_id, num_envs in RUNS:
        print(json.dumps(measure(env_id, num_envs, int(sys.argv[1]))), flush=True)

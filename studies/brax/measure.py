"""Measure how fast agents train on robots from brax and MuJoCo Playground.

    pip install brax==0.14.2 playground==0.2.0
    python -m studies.brax.measure 10 > studies/brax/speed.jsonl
    python -m studies.brax.measure 3 --many --peers > studies/brax/many.jsonl

The first argument is the number of iterations after the first one. Each line is a run:
"start_seconds" covers everything before these iterations: imports, the pool of initial states and
compilation; "steps_per_second" is the median over these iterations, including updates;
"cpu_seconds" is the CPU time of all threads in the run. The other times are wall-clock times, which
mean little on a busy machine.

Without --many, run more/ppo_continuous_linen.py on several robots, with 64 steps per environment.
With --many, train our PPO and SAC only on HalfCheetahSpring, with 64 to 2,048 environments and 32
steps per environment. With --peers, also train brax's PPO and SAC, in a virtual environment that
uv creates; brax reports the iteration times, which exclude its evaluations. With
--purejaxrl ../purejaxrl, also train PureJaxRL's PPO, and our PPO with the same networks;
studies/brax/peers/jax_purejaxrl.py contains the commands that create this checkout.
"""

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.machine import cpu

RUNS = [
    ("envs.brax:HalfCheetahSpring", 64),
    ("envs.brax:HalfCheetahSpring", 256),
    ("envs.brax:HalfCheetah", 64),
    ("envs.brax:InvertedPendulumSpring", 64),
    ("envs.playground:CheetahRun", 64),
    ("envs.playground:CheetahRun", 256),
]
MANY = (64, 256, 1_024, 2_048)
MANY_STEPS = 32
# As in jax_brax.py: 8 minibatches, independent of the number of environments, and 10 epochs.
PPO = ["more/ppo_continuous_linen.py", "--num-minibatches", "8"]
SAC = ["more/sac_linen.py", "mujoco", "--train-frequency", "8", "--buffer-size", "102400"]


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(
    script: list[str], env_id: str, num_envs: int, num_steps: int, iterations: int, first: int = 1
) -> dict[str, Any]:
    """Train with one of our scripts; return its speed. The first iterations count as startup."""
    steps = num_envs * num_steps
    words = [sys.executable, *script, "--env-id", env_id]
    words += ["--num-envs", str(num_envs), "--num-steps", str(num_steps)]
    words += ["--total-timesteps", str(steps * (iterations + first)), "--run-name", "run"]
    with tempfile.TemporaryDirectory() as folder:
        start, cpu_start = time.perf_counter(), cpu_seconds()
        subprocess.run([*words, "--runs-dir", folder], check=True, stdout=sys.stderr)
        seconds = time.perf_counter() - start
        lines = Path(folder, "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    later = [json.loads(line)["time/iteration"] for line in lines[first:]]
    return {
        "script": Path(script[0]).stem,
        "env_id": env_id,
        "num_envs": num_envs,
        "num_steps": num_steps,
        "iterations": iterations,
        "start_seconds": round(seconds - sum(later), 1),
        "steps_per_second": round(steps / statistics.median(later)),
        "cpu_seconds": round(cpu_seconds() - cpu_start, 1),
        "load": round(os.getloadavg()[0], 1),
    }


def measure_peer(command: list[str], num_envs: int, iterations: int) -> dict[str, Any]:
    """Run a command that trains with another library. Return its speed and CPU time."""
    words = [*command, "--num-envs", str(num_envs), "--num-steps", str(MANY_STEPS)]
    words += ["--iterations", str(iterations)]
    start, cpu_start = time.perf_counter(), cpu_seconds()
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - start
    row = json.loads(done.stdout.splitlines()[-1])
    return {
        "script": row["script"],
        "env_id": row["env_id"],
        "num_envs": num_envs,
        "num_steps": MANY_STEPS,
        "iterations": iterations,
        "start_seconds": round(seconds - iterations * row["iteration"], 1),
        "steps_per_second": row["steps_per_second"],
        "cpu_seconds": round(cpu_seconds() - cpu_start, 1),
        "load": round(os.getloadavg()[0], 1),
    }


def say(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.brax.measure")
    parser.add_argument("iterations", type=int)
    parser.add_argument("--many", action="store_true", help="train in up to 2,048 environments")
    parser.add_argument("--peers", action="store_true", help="with --many: also train brax agents")
    parser.add_argument("--uv", default="uv run --script", help="command for the other libraries")
    parser.add_argument("--purejaxrl", help="with --many: PureJaxRL checkout")
    args = parser.parse_args()
    say({"cpu": cpu(), "cores": os.cpu_count()})
    env_id = "envs.brax:HalfCheetahSpring"
    if not args.many:
        for env_id, num_envs in RUNS:
            say(measure(PPO[:1], env_id, num_envs, 64, args.iterations))
        return
    uv = shlex.split(args.uv)
    brax = [*uv, "studies/brax/peers/jax_brax.py"]
    for num_envs in MANY:
        say(measure(PPO, env_id, num_envs, MANY_STEPS, args.iterations))
        if args.peers:
            say(measure_peer([*brax, "ppo"], num_envs, args.iterations))
    steps = MANY[0] * MANY_STEPS
    # In the first iteration, SAC takes random actions and compiles the update.
    sac = [*SAC, "--learning-starts", str(steps)]
    say(measure(sac, env_id, MANY[0], MANY_STEPS, args.iterations, first=2))
    if args.peers:
        say(measure_peer([*brax, "sac"], MANY[0], args.iterations))
    if args.purejaxrl:
        wide = [*PPO, "--hidden-sizes", "256", "256"]  # PureJaxRL supports no other network
        say(measure(wide, env_id, MANY[1], MANY_STEPS, args.iterations))
        purejaxrl = [*uv, "studies/brax/peers/jax_purejaxrl.py", "--checkout", args.purejaxrl]
        say(measure_peer(purejaxrl, MANY[1], args.iterations))


if __name__ == "__main__":
    main()

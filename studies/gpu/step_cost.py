"""Time the parts of an iteration of ppo_torch_compile.py: which part is worth removing?

    python -m studies.gpu.step_cost step_cost.json

Trains twice. In the first run, "queued" is the time until a call returns; on a GPU, its kernels may
not have finished. In the second run, "finished" includes waiting for the device after every call.
If the queued times of the parts add up to the time of the rollout, the host is the bottleneck.

On a GPU, policy copies its inputs into a CUDA graph, replays the graph and copies the outputs, so
policy minus replay is the time of the copies. "scanned" is the time of an environment step if JAX
runs all steps in one program, without the host.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import torch

import ppo_torch_compile as script

ITERATIONS = 12
WARM_UP = 2  # iterations that are not counted, because they compile
STEPS = 256  # environment steps per iteration, as by default
REPEATS = 7  # of the scan; the fastest counts

Durations = dict[str, list[float]]  # part -> seconds of each call


def wait(result: Any) -> None:
    """Wait for both frameworks on a GPU; on a CPU, PyTorch has always finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    jax.block_until_ready(result)


def durations_of_parts(synchronize: bool, folder: str) -> Durations:
    durations: Durations = defaultdict(list)

    def timed(part: str, function: Callable) -> Callable:
        def call(*arguments):
            start = time.perf_counter()
            result = function(*arguments)
            if synchronize:
                wait(result)
            durations[part].append(time.perf_counter() - start)
            return result

        return call

    rollout, update = script.rollout, script.update

    def rollout_in_parts(policy_fn, obs, env_state, step_fn, *others):
        policy_fn = timed("policy", policy_fn)
        return rollout(policy_fn, obs, env_state, timed("step", step_fn), *others)

    def update_in_parts(agent, optimizer, epoch_fn, *others):
        return update(agent, optimizer, timed("epoch", epoch_fn), *others)

    names = ("to_jax", "to_torch", "stack", "compute_gae")
    changed = {name: timed(name, getattr(script, name)) for name in names}
    changed["rollout"] = timed("rollout", rollout_in_parts)
    changed["update"] = timed("update", update_in_parts)
    graph = torch.cuda.CUDAGraph
    args = script.Args(num_steps=STEPS, runs_dir=folder, run_name=f"synchronize-{synchronize}")
    args.total_timesteps = ITERATIONS * args.batch_size
    args.__post_init__()
    with (
        patch.dict(vars(script), changed),
        patch.object(graph, "replay", timed("replay", graph.replay)),
    ):
        script.train(args)
    return durations


def scanned() -> float:
    """Return the seconds per environment step if all steps are in one JAX program."""
    args = script.Args()
    env = script.VecEnv(args.env_id, args.num_envs)
    _, state = env.reset(jax.random.PRNGKey(1))
    action = jnp.zeros(args.num_envs, jnp.int32)

    @jax.jit
    def steps(state):
        def step(state, _):
            obs, state, results = env.step(state, action)
            return state, (obs, results)

        return jax.lax.scan(step, state, length=STEPS)

    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(steps(state))
        times.append(time.perf_counter() - start)
    return min(times) / STEPS


def main(path: Path) -> None:
    with TemporaryDirectory() as folder:
        queued = durations_of_parts(False, folder)
        finished = durations_of_parts(True, folder)
    rows: list[dict[str, Any]] = []
    for part, calls in queued.items():
        first = len(calls) * WARM_UP // ITERATIONS
        row = {"part": part, "calls_per_iteration": len(calls) / ITERATIONS}
        row["queued_microseconds"] = 1e6 * median(calls[first:])
        row["finished_microseconds"] = 1e6 * median(finished[part][first:])
        rows.append(row)
    rows.append({"part": "scanned", "finished_microseconds": 1e6 * scanned()})
    print("\n".join(map(str, rows)))
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else "cpu"
    found = {"device": device, "torch": torch.__version__, "jax": jax.__version__, "parts": rows}
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

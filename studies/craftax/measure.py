"""Time Craftax with random actions: the environment of the package, ours, and one without resets.

    pip install craftax==1.6.1
    python -m studies.craftax.measure 32 3 > studies/craftax/speed.jsonl

The arguments are the number of environments and the number of rounds. In a round, each variant
takes 64 steps in one jitted scan; the results are used so that XLA cannot remove the steps. The
variants are interleaved, and the first round after compilation is discarded. Each line is one scan:
"seconds" is wall-clock time, and "cpu_seconds" is the CPU time of all threads, which is fairer if
other programs use the same cores.
"""

import json
import os
import platform
import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from craftax.craftax_env import make_craftax_env_from_name

from bench.machine import cpu
from envs.craftax_symbolic import CraftaxSymbolic, CraftaxSymbolicEndless

NUM_STEPS = 64
num_envs, rounds = map(int, sys.argv[1:])
package = partial(make_craftax_env_from_name, "Craftax-Symbolic-v1")
ways: dict[str, Any] = {
    "package, restarts": package(auto_reset=True),
    "package, never restarts": package(auto_reset=False),  # to measure a step without resets
    "ours, 1,024 worlds": CraftaxSymbolic(),
    "ours, endless worlds": CraftaxSymbolicEndless(),
}


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> dict[str, float]:
    seconds, cpu_seconds = (b - a for a, b in zip(start, clocks(), strict=True))
    return {"seconds": round(seconds, 4), "cpu_seconds": round(cpu_seconds, 4)}


def scan(state, key, env):
    """Take NUM_STEPS random steps; return the state and the sums of all results."""

    def step(state, key):
        *keys, action_key = jax.random.split(key, num_envs + 1)
        action = jax.random.randint(action_key, (num_envs,), 0, env.num_actions)
        take = jax.vmap(partial(env.step, params=env.default_params))
        obs, state, reward, *done, info = take(jnp.stack(keys), state, action)
        sums = [x.sum() for x in (reward, sum(done), obs, info.get("final_observation", obs))]
        return state, sums

    state, sums = jax.lax.scan(step, state, jax.random.split(key, NUM_STEPS))
    return state, [x.sum() for x in sums]


def write(**row: Any) -> None:
    print(json.dumps(row), flush=True)


write(cpu=cpu(), cores=os.cpu_count(), device=jax.devices()[0].device_kind, jax=jax.__version__)
start = clocks()
worlds = ways["ours, 1,024 worlds"].worlds
megabytes = sum(x.nbytes for x in jax.tree.leaves(worlds)) / 1e6
write(worlds=1024, megabytes=round(megabytes, 1), python=platform.python_version(), **since(start))
reset = jax.jit(jax.vmap(ways["ours, 1,024 worlds"].reset))
_, first = reset(jax.random.split(jax.random.PRNGKey(0), num_envs))
states, compiled = dict.fromkeys(ways, first), {}
for name, env in ways.items():
    start, key = clocks(), jax.random.PRNGKey(0)
    compiled[name] = jax.jit(partial(scan, env=env)).lower(first, key).compile()
    write(way=name, num_envs=num_envs, compile=since(start))
for number in range(rounds + 1):
    order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
    for name in order:
        start = clocks()
        result = compiled[name](states[name], jax.random.PRNGKey(number))
        states[name], (_, ended, *_) = jax.block_until_ready(result)  # sync
        row = since(start) | {"ended": int(ended), "load": round(os.getloadavg()[0], 1)}
        if number:
            steps = num_envs * NUM_STEPS
            write(way=name, num_envs=num_envs, round=number, steps=steps, **row)

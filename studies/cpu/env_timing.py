"""Measure how long a step of each environment takes: the figures' measure of its complexity.

    python -m studies.cpu.env_timing --num-envs 32 --out studies/cpu/env_timing.json

A measurement is one compiled call that steps all parallel environments through a rollout, with
random actions, restarts and episode statistics, as training does. It writes JSON: the settings,
hardware and versions, and under "environments" one object per environment with the seconds that one
step of all parallel environments takes: trimmed_mean, median, minimum and spread (interquartile
range) over the repetitions, and compile, the seconds that the first call takes.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from ppo_linen import VecEnv
from studies import machine

ENVIRONMENTS = (
    *("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "DiscountingChain-bsuite"),
    *("MemoryChain-bsuite", "UmbrellaChain-bsuite", "BernoulliBandit-misc", "GaussianBandit-misc"),
    *("Asterix-MinAtar", "Breakout-MinAtar", "Freeway-MinAtar", "SpaceInvaders-MinAtar"),
)
NUM_STEPS = 256  # of a measurement
REPEATS = 50  # measurements of an environment
TRIM = 0.1  # of the fastest and of the slowest repetitions, for the trimmed mean


def play(key: jax.Array, state: Any, env: VecEnv, num_steps: int) -> tuple[Any, ...]:
    """Take num_steps random actions in each environment; return the state and the last step.

    The whole step is carried on, or the compiler would leave out what nobody reads.
    """
    actions = jax.random.randint(key, (num_steps, env.num_envs), 0, env.num_actions)

    def step(carry, action):
        return env.step(carry[1], action), None

    carry = jax.eval_shape(env.step, state, actions[0])
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), carry)
    last, _ = jax.lax.scan(step, (empty[0], state, empty[2]), actions)
    return last


def measure(env_id: str, num_envs: int, num_steps: int, repeats: int) -> dict[str, Any]:
    """Time one environment; all values are seconds per step of num_envs environments."""
    env = VecEnv(env_id, num_envs)
    key = jax.random.key(0)
    _, state = jax.jit(env.reset)(key)
    play_fn = jax.jit(partial(play, env=env, num_steps=num_steps))
    seconds = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        _, state, _ = jax.block_until_ready(play_fn(jax.random.fold_in(key, i), state))
        seconds.append(time.perf_counter() - start)
    # The first call compiles; the second still warms caches up.
    steps = np.array(seconds[2:]) / num_steps
    return {
        "env_id": env_id,
        "trimmed_mean": float(stats.trim_mean(steps, TRIM)),
        "median": float(np.median(steps)),
        "minimum": float(steps.min()),
        "spread": float(stats.iqr(steps)),
        "compile": seconds[0],
    }


def hardware() -> dict[str, Any]:
    """What the measurement ran on, and how busy that was (processes over the minute before)."""
    found = machine.describe()
    return {
        "device": jax.devices()[0].device_kind,
        "cpu": found["cpu"],
        "cores": found["cores"],
        "os": platform.platform(),
        "load": found["load"],
    }


def measure_all(env_ids: Iterable[str], num_envs: int, num_steps: int, repeats: int) -> dict:
    """Return what the module's docstring says."""
    settings = {"num_envs": num_envs, "num_steps": num_steps, "repeats": repeats}
    rows = []
    for env_id in env_ids:
        rows.append(measure(env_id, **settings))
        print(f"{env_id:24} {rows[-1]['median'] * 1e6:10.1f} us", file=sys.stderr)
    versions = {name: metadata.version(name) for name in ("jax", "gymnax")}
    return settings | {"hardware": hardware(), "versions": versions, "environments": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies.cpu.env_timing", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--num-envs", type=int, default=32, help="parallel environments")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    with open(args.out, "w") as file:  # before the first minute has gone into measuring
        json.dump(measure_all(ENVIRONMENTS, args.num_envs, NUM_STEPS, REPEATS), file, indent=2)
        file.write("\n")


if __name__ == "__main__":
    main()

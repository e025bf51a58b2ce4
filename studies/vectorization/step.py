"""Step CartPole-v1 with random actions by one method, and print a line after every 512 steps.

    python -m studies.vectorization.step sync 64    # 64 environments, until it is stopped

The methods use the VecEnv of a script, except vector and envpool, which use others.py:

    sync, async, vector  Gymnasium: in sequence, one process each, or vectorized in NumPy
    envpool              EnvPool, in C++, if it is installed: pip install envpool==1.2.5
    gymnax step          one jitted call per step, which returns the observations to the host
    gymnax scan          one jitted call for all steps, which sums observations and rewards

All results are used, because the compiler would remove a loop whose results are unused. Unlike
training, the scan only sums observations and need not write them to memory, so its time is a lower
bound.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

WAYS = ("sync", "async", "vector", "envpool", "gymnax step", "gymnax scan")
ENV_ID = "CartPole-v1"
NUM_STEPS = 512
SEED = 1


def in_gymnasium(how: str, num_envs: int, actions: np.ndarray) -> Callable[[], None]:
    """Return a function that takes all steps, with environments outside JAX."""
    from more.ppo_linen_gymnasium import VecEnv
    from studies.vectorization.others import OtherVecEnv

    if how in ("vector", "envpool"):
        env = OtherVecEnv(how, num_envs, SEED)
    else:
        env = VecEnv(ENV_ID, num_envs, how, SEED)
    env.reset()

    def run() -> None:
        for action in actions:
            env.step(action)

    return run


def in_gymnax(how: str, num_envs: int, actions: np.ndarray) -> Callable[[], None]:
    """Return a function that takes all steps, with environments in JAX."""
    import jax

    from ppo_linen import VecEnv

    env = VecEnv(ENV_ID, num_envs)
    _, first = jax.jit(env.reset)(jax.random.PRNGKey(SEED))
    run_all: Callable = jax.jit(partial(scan, env))
    inputs: Any = jax.device_put(actions)
    if how == "gymnax step":
        run_all = partial(step_by_step, jax.jit(env.step))
        inputs = actions
    return lambda: jax.block_until_ready(run_all(first, inputs))  # sync


def step_by_step(step_fn: Callable, state: Any, actions: Any) -> Any:
    """Take one step per call, as if the actions were chosen outside JAX."""
    for action in actions:
        obs, state, _ = step_fn(state, action)
        np.asarray(obs)  # sync
    return state


def scan(env: Any, state: Any, actions: Any) -> tuple[Any, Any]:
    """Take all steps in one compiled loop; return the state and the sums of all results."""
    import jax

    def step(state, action):
        obs, state, result = env.step(state, action)
        return state, obs.sum() + sum(x.sum() for x in jax.tree.leaves(result))

    state, sums = jax.lax.scan(step, state, actions)
    return state, sums.sum()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.vectorization.step")
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("num_envs", type=int)
    args = parser.parse_args()
    rng = np.random.default_rng(SEED)
    actions = rng.integers(2, size=(NUM_STEPS, args.num_envs), dtype=np.int32)
    make = in_gymnax if args.way.startswith("gymnax") else in_gymnasium
    run = make(args.way, args.num_envs, actions)
    for number in itertools.count(1):
        run()
        print(f"{number * NUM_STEPS} steps", flush=True)


if __name__ == "__main__":
    main()

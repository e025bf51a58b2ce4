"""Train many agents in one compiled program, like PureJaxRL.

    python -m studies.agents.one_scan --env-id CartPole-v1 --num-agents 8

It uses the flags, functions and folders of more/ppo_linen_vmap.py. There, Python calls the compiled
rollout and update in each iteration. Here, jax.lax.scan loops over all iterations, under one
jax.vmap over the agents, and one jax.jit compiles these loops and the initialization. The program
is called once and returns all metrics at the end.

The drawback: nothing is printed, logged or saved before the end, and a run that is stopped or
killed leaves no results. The times of single iterations are unknown, so metrics.jsonl contains
their mean; the first also includes the compile time. All metrics stay on the device until the end,
and a different number of iterations requires recompilation.
"""

import signal
import time
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from more.ppo_linen_vmap import (
    Args,
    Checkpoint,
    RunLogs,
    VecEnv,
    fail,
    make_agent,
    rollout,
    save_checkpoints,
    update,
)


def train_all(seeds: jax.Array, env: VecEnv, args: Args) -> tuple[Any, Any, Any, Any]:
    """Train an agent per seed; return the train_state, obs, env_state and metrics of all agents."""
    keys = jax.vmap(lambda seed: jax.random.split(jax.random.PRNGKey(seed), 3))(seeds)
    # lax.map instead of vmap: on a CPU, the batched initialization of orthogonal matrices
    # sometimes deadlocks (jaxlib 0.10.2).
    make = partial(make_agent, args, env.obs_shape, env.num_actions)
    train_state = jax.lax.map(make, keys[:, 1])
    training = partial(whole_training, env=env, args=args)
    return jax.vmap(training)(train_state, keys[:, 0], keys[:, 2])


def whole_training(train_state, key, env_key, env: VecEnv, args: Args) -> tuple[Any, Any, Any, Any]:
    """Train one agent; return train_state, obs, env_state and the metrics (num_iterations,)."""
    obs, env_state = env.reset(env_key)

    def one_iteration(carry, iteration):
        train_state, obs, env_state = carry
        rollout_key, update_key = jax.random.split(jax.random.fold_in(key, iteration), 2)
        obs, env_state, storage = rollout(train_state, obs, env_state, rollout_key, env, args)
        train_state, metrics = update(train_state, storage, update_key, args)
        return (train_state, obs, env_state), metrics

    start = train_state, obs, env_state
    end, metrics = jax.lax.scan(one_iteration, start, jnp.arange(args.num_iterations))
    return *end, metrics


def train(args: Args) -> None:
    precision = "default" if args.matmul_precision == "high" else "highest"
    jax.config.update("jax_default_matmul_precision", precision)
    device = jax.devices()[0]
    env = VecEnv(args.env_id, args.num_envs)
    log = RunLogs(
        args,
        0,
        packages=["jax", "jaxlib", "flax", "optax", "gymnax", "numpy"],
        script="one_scan",
        framework="linen",
        compile_mode="jit",
        device=device.device_kind,
        obs_shape=env.obs_shape,
        num_actions=env.num_actions,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # end at once: there are no iterations to wait for
    seeds = np.arange(args.seed, args.seed + args.num_agents, dtype=np.uint32)
    start = time.perf_counter()
    program = jax.jit(partial(train_all, env=env, args=args)).lower(seeds).compile()
    compiled = time.perf_counter()
    train_state, obs, env_state, metrics = jax.block_until_ready(program(seeds))  # sync
    end = time.perf_counter()

    metrics = jax.device_get(metrics)  # each (num_agents, num_iterations)
    marks = np.linspace(compiled, end, args.num_iterations + 1).tolist()
    marks[0] = start  # the first iteration includes compilation, as in the scripts
    for iteration in range(args.num_iterations):
        row = {name: x[:, iteration] for name, x in metrics.items()}
        # The log reads the clock at the end of an iteration, but all iterations have already ended.
        with mock.patch.object(time, "perf_counter", return_value=marks[iteration + 1]):
            log.write(iteration, row, marks[iteration])
    save_checkpoints(log, Checkpoint(args.num_iterations, train_state, obs, env_state))
    log.update_info(iteration=args.num_iterations, compile_seconds=compiled - start)
    log.close()


def check(args: Args) -> None:
    """Exit if a flag asks for something that a single compiled program cannot do."""
    usual = Args()
    for name in ("sync_for_timing", "save_every", "resume"):
        if getattr(args, name) != getattr(usual, name):
            fail(f"--{name.replace('_', '-')}: not possible in a single compiled program")


if __name__ == "__main__":
    args = tyro.cli(Args, prog="python -m studies.agents.one_scan")
    check(args)
    train(args)

"""Time the parts of an iteration, and the matrix products that every framework has to compute.

    python -m studies.limits.measure > studies/limits/measured.jsonl

A part is a call to a script function if there is one; otherwise the same operations run in
isolation, with the same shapes and as often as in an iteration. A repetition is one new process
per script, network size and number of cores. In each process the parts are interleaved, and the
time of a part is the median over rounds. The first line of JSON records the versions and the
machine; each further line records a part.
"""

import argparse
import contextlib
import importlib
import io
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from analysis.catalog import SIZES
from bench.machine import describe, git_commit

ROUNDS = {"small": 10, "medium": 5, "large": 2}
EPOCHS = {"small": 10, "medium": 1, "large": 1}  # ten epochs of medium or large would take hours
WARM_UP = 2  # rounds that are not timed
PROCESSES = {"small": 5, "medium": 3, "large": 3}
# Script, network size and number of cores.
CELLS = (
    ("ppo_linen", "small", 2),
    ("ppo_torch", "small", 2),
    ("ppo_torch_compile", "small", 2),
    ("ppo_linen", "small", 1),
    ("ppo_torch", "small", 1),
    ("ppo_linen", "medium", 2),
    ("ppo_torch", "medium", 2),
    ("ppo_linen", "large", 2),
    ("ppo_torch", "large", 2),
)
# The same number of metrics per iteration as in ppo_linen.py.
METRICS = ("charts/episodes", "charts/episodic_return", *(f"losses/{i}" for i in range(12)))
OF_ALL_SIZES = ("update", "values", "products")

Parts = dict[str, Callable[[], Any]]


# === Products ===================================================================================
def make_layers(args: Any, env: Any) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the input (B, i), weight (i, o) and output gradient (B, o) per layer, actor first."""
    rng = np.random.default_rng(1)
    layers = []
    for num_outputs in (env.num_actions, 1):
        sizes = [math.prod(env.obs_shape), *args.hidden_sizes, num_outputs]
        for i, o in itertools.pairwise(sizes):
            shapes = [(args.minibatch_size, i), (i, o), (args.minibatch_size, o)]
            layers.append([rng.normal(size=x).astype(np.float32) / math.sqrt(o) for x in shapes])
    return [tuple(x) for x in layers]


def products(layers, obs_dim: int) -> list:
    """Compute the matrix products of a training step: the forward pass and both gradients."""
    found = []
    for x, weight, gradient in layers:
        found += [x @ weight, x.T @ gradient]
        if x.shape[1] != obs_dim:  # the first layer needs no gradient of its input
            found.append(gradient @ weight.T)
    return found


def hidden(layers, obs_dim: int) -> list:
    """Return the tanh input and gradient of each hidden layer, both (B, i)."""
    return [(x, x + 1) for x, _, _ in layers if x.shape[1] != obs_dim]


def repeat_in_xla(function: Callable, steps: int) -> Callable:
    """Compile a loop that calls the function `steps` times and returns the last results."""

    def run(operands):
        def step(carry, i):
            operands, _ = carry
            # Make the operands depend on i; otherwise XLA would move the products out of the loop.
            operands, _ = jax.lax.optimization_barrier((operands, i))
            return (operands, function(operands)), None

        results = jax.tree.map(jnp.zeros_like, jax.eval_shape(function, operands))
        carry, _ = jax.lax.scan(step, (operands, results), jnp.arange(steps))
        return carry[1]

    return jax.jit(run)


# === Parts ======================================================================================
def make_args(script: Any, size: str, **given: Any) -> Any:
    # Do not anneal the learning rate: a round represents one of many thousand updates.
    return script.Args(
        hidden_sizes=SIZES[size], update_epochs=EPOCHS[size], anneal_lr=False, **given
    )


def single_row_args(script: Any, size: str) -> Any:
    """Return arguments for one-row minibatches, whose updates are almost only call overhead."""
    return make_args(script, size, num_envs=8, num_steps=1)


def linen_parts(script: Any, size: str) -> Parts:
    args = make_args(script, size)
    steps = args.update_epochs * args.num_minibatches
    env = script.VecEnv("CartPole-v1", args.num_envs)
    key, agent_key, env_key = jax.random.split(jax.random.PRNGKey(1), 3)
    train_state = script.make_agent(args, env.obs_shape, env.num_actions, agent_key)
    obs, env_state = jax.jit(env.reset)(env_key)
    rollout = jax.jit(partial(script.rollout, env=env, args=args))
    update = jax.jit(partial(script.update, args=args))
    storage = rollout(train_state, obs, env_state, key)[2]

    def iteration():
        return update(train_state, rollout(train_state, obs, env_state, key)[2], key)

    @jax.jit
    def environment(env_state):
        def step(env_state, _):
            obs, env_state, result = env.step(env_state, jnp.zeros(args.num_envs, jnp.int32))
            return env_state, (obs, result)

        return jax.lax.scan(step, env_state, length=args.num_steps)

    @jax.jit
    def policy(all_obs):
        def step(_, obs):
            return None, train_state.apply_fn(train_state.params, obs, method="get_logits")

        return jax.lax.scan(step, None, all_obs)

    @jax.jit
    def values(storage):
        obs_shape = storage.obs.shape[2:]
        both_obs = jnp.concat([storage.obs, storage.next_obs]).reshape(-1, *obs_shape)
        values = train_state.apply_fn(train_state.params, both_obs, method="get_value")
        value, next_value = values.reshape(2, *storage.reward.shape)
        return script.compute_gae(storage, value, next_value, args)

    numbers = storage.reward.reshape(-1)
    all_obs = storage.obs.reshape(args.batch_size, math.prod(env.obs_shape))
    batch = script.Batch(all_obs, storage.action.reshape(-1), *[numbers] * 4)

    @jax.jit
    def gathers(key):
        def epoch(_, key):
            order = script.shuffle(key, args.batch_size)
            return jax.tree.map(lambda x: x[order], batch), None

        return jax.lax.scan(epoch, batch, jax.random.split(key, args.update_epochs))

    @jax.jit
    def adam(train_state):
        def step(train_state, _):
            return train_state.apply_gradients(grads=train_state.params), None

        return jax.lax.scan(step, train_state, length=steps)

    layers = jax.device_put(make_layers(args, env))
    multiply = repeat_in_xla(partial(products, obs_dim=math.prod(env.obs_shape)), steps)
    activate = repeat_in_xla(activate_in_xla, steps)
    inputs = hidden(layers, math.prod(env.obs_shape))
    few = single_row_args(script, size)
    few_storage = jax.tree.map(lambda x: x[: few.num_steps, : few.num_envs], storage)
    few_update = jax.jit(partial(script.update, args=few))
    return {
        "iteration": iteration,
        "rollout": partial(rollout, train_state, obs, env_state, key),
        "environment": partial(environment, env_state),
        "policy": partial(policy, storage.obs),
        "update": partial(update, train_state, storage, key),
        "products": partial(multiply, layers),
        "tanh": partial(activate, inputs),
        "Adam": partial(adam, train_state),
        "gathers": partial(gathers, key),
        "values": partial(values, storage),
        "calls": partial(few_update, train_state, few_storage, key),
        "log": make_log(script, size),
    }


def activate_in_xla(inputs):
    results = []
    for x, gradient in inputs:
        y = jnp.tanh(x)
        results.append((y, gradient * (1 - y * y)))
    return results


def torch_parts(script: Any, size: str) -> Parts:
    args = make_args(script, size)
    steps = args.update_epochs * args.num_minibatches
    env = script.VecEnv("CartPole-v1", args.num_envs)
    torch.manual_seed(1)
    device = torch.device("cpu")
    agent, optimizer = script.make_agent(args, env.obs_shape, env.num_actions, device)
    jax_device = jax.devices("cpu")[0]
    first_obs, env_state = jax.jit(env.reset)(jax.device_put(jax.random.PRNGKey(1), jax_device))
    obs = script.to_torch(first_obs)
    step_fn = jax.jit(env.step)
    policy_fn = partial(script.policy, agent)
    rollout = partial(script.rollout, policy_fn, obs, env_state, step_fn, env, args)
    storage = rollout()[2]
    update = make_update(script, agent, optimizer, args)
    action = torch.zeros(args.num_envs, dtype=torch.int32)
    noise = torch.zeros(args.num_envs, env.num_actions)
    _, _, result = step_fn(env_state, script.to_jax(action))

    def iteration():
        return update(rollout()[2])

    def environment():
        state = env_state
        for _ in range(args.num_steps):
            obs, state, _ = step_fn(state, script.to_jax(action))
        return obs

    def crossing():
        for _ in range(args.num_steps):
            script.to_jax(action)
            script.to_torch(first_obs)
        return script.to_torch(script.stack([result] * args.num_steps))

    def act(policy_fn):
        for _ in range(args.num_steps):
            policy_fn(obs, noise)

    @torch.no_grad()
    def values():
        value, next_value = agent.get_value(torch.stack([storage.obs, storage.next_obs]))
        return script.compute_gae(storage, value, next_value, args)

    numbers = storage.reward.reshape(-1)
    all_obs = storage.obs.reshape(args.batch_size, math.prod(env.obs_shape))
    batch = script.Batch(all_obs, storage.action.reshape(-1), *[numbers] * 4)

    def gathers():
        for _ in range(args.update_epochs):
            order = torch.randperm(args.batch_size)
            _ = [x[order] for x in batch]

    layers = [tuple(map(torch.from_numpy, x)) for x in make_layers(args, env)]
    inputs = hidden(layers, math.prod(env.obs_shape))

    def repeat(function, operands):
        for _ in range(steps):
            function(operands)

    def multiply(layers):
        return products(layers, math.prod(env.obs_shape))

    def activate(inputs):
        for x, gradient in inputs:
            torch.ops.aten.tanh_backward(gradient, torch.tanh(x))

    few = single_row_args(script, size)
    few_storage = script.Storage(*(x[: few.num_steps, : few.num_envs] for x in storage))
    few_update = make_update(script, agent, optimizer, few)
    parts = {
        "iteration": iteration,
        "rollout": rollout,
        "environment": environment,
        "crossing": crossing,
        "policy": partial(act, policy_fn),
        "update": partial(update, storage),
        "products": partial(repeat, multiply, layers),
        "tanh": partial(repeat, activate, inputs),
        "gathers": gathers,
        "values": values,
        "calls": partial(few_update, few_storage),
        "log": make_log(script, size),
    }
    if script.__name__ == "ppo_torch":  # in compiled scripts, Adam is part of the graph of the step

        def optimize():
            for x in agent.parameters():
                x.grad = torch.zeros_like(x)
            for _ in range(steps):
                torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

        parts["Adam"] = optimize
    else:
        parts["compiled_policy"] = partial(
            act, script.compile_graph(policy_fn, torch.device("cpu"))
        )
    return parts


def make_log(script: Any, size: str) -> Callable:
    """Return a function that logs an iteration to metrics.jsonl and TensorBoard."""
    args = make_args(script, size, runs_dir=tempfile.mkdtemp())
    metrics = dict.fromkeys(METRICS, 0.5)
    with contextlib.redirect_stdout(io.StringIO()):
        log = script.RunLog(args, 0, packages=[])

    def write():
        with contextlib.redirect_stdout(io.StringIO()):  # stdout is reserved for JSON
            log.write(0, metrics, 0.0, 0.5)

    return write


def make_update(script: Any, agent: Any, optimizer: Any, args: Any) -> Callable:
    """Return a function that trains on a storage."""
    if script.__name__ == "ppo_torch":
        scheduler = LambdaLR(optimizer, partial(script.learning_rate_factor, args=args))
        return lambda storage: script.update(agent, optimizer, scheduler, storage, args)
    step = partial(script.minibatch_step, agent, optimizer, args=args)
    step = script.compile_graph(step, torch.device("cpu"))
    epoch = partial(script.epoch, step, args)
    return lambda storage: script.update(agent, optimizer, epoch, storage, args)


# === Measuring ==================================================================================
def measure(name: str, size: str, cores: int, process: int) -> None:
    """Measure each part in this process, and print a line of JSON for it."""
    script = importlib.import_module(name)
    make_parts = linen_parts if name == "ppo_linen" else torch_parts
    parts = make_parts(script, size)
    if size != "small":
        parts = {part: parts[part] for part in OF_ALL_SIZES}
    seconds: dict[str, list[float]] = {part: [] for part in parts}
    for _ in range(WARM_UP + ROUNDS[size]):
        for part, call in parts.items():
            start = time.perf_counter()
            jax.block_until_ready(call())  # sync; torch is synchronous on a CPU
            seconds[part].append(time.perf_counter() - start)
    for part, found in seconds.items():
        row = {"script": name, "size": size, "cores": cores, "process": process, "part": part}
        row["seconds"] = statistics.median(found[WARM_UP:])
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cell", nargs=4, help="script, size, cores and process number")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help="networks to measure")
    args = parser.parse_args()
    if args.cell:
        name, size, cores, process = args.cell
        measure(name, size, int(cores), int(process))
        return
    versions = {name: metadata.version(name) for name in ("jax", "flax", "torch", "numpy")}
    versions["python"] = platform.python_version()
    commit = git_commit(Path(__file__))
    print(json.dumps({"versions": versions, "git_commit": commit, **describe()}), flush=True)
    # The scripts set these before they import NumPy and torch, but this file imports both first.
    threads = os.environ | {"OPENBLAS_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000"}
    for process in range(max(PROCESSES.values())):
        for name, size, cores in CELLS:
            if size in args.sizes and process < PROCESSES[size]:
                command = ["taskset", "--cpu-list", f"0-{cores - 1}", sys.executable, "-m"]
                command += ["studies.limits.measure", "--cell", name, size]
                subprocess.run([*command, str(cores), str(process)], env=threads, check=True)


if __name__ == "__main__":
    main()

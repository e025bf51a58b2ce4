"""Time a training step with a CNN on a CPU, in variants of JAX and PyTorch.

    taskset --cpu-list 0 python -m studies.convolutions.measure > measured.jsonl

A step trains on a minibatch of 256 Atari images: it computes the PPO loss and its gradient, clips
the gradient, and applies Adam. Networks and losses come from more/ppo_cnn_*_gymnasium.py. All
variants start from the same weights and see the same images.

In each round, every variant runs once, in random order. A run is one new process: it compiles,
trains on an epoch of four minibatches to warm up, and then times three more epochs. The slow
variants run only in the first three rounds, and only for one epoch. Times are CPU times, because
other programs may use the same core. The first line of JSON records the versions and the machine;
each further line records a run.
"""

import argparse
import json
import math
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
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
from flax import linen as nn
from flax.training.train_state import TrainState
from torch.optim.lr_scheduler import LambdaLR

from bench.machine import describe, git_commit
from more import ppo_cnn_linen_gymnasium as linen
from more import ppo_cnn_torch_compile_gymnasium as compiled_torch
from more import ppo_cnn_torch_gymnasium as eager_torch

SHAPE = (4, 84, 84)  # image shape: four stacked frames, as in Atari
ROWS = 256  # images per minibatch
STEPS = 4  # minibatches per epoch
ACTIONS = 6
EPOCHS = 3  # timed epochs per process
SLOW = ("Linen, nn.Conv in lax.scan",)  # a step takes about 20 seconds
SLOW_ROUNDS = 3
CPU = torch.device("cpu")

# A function that trains for one epoch and returns the losses (STEPS,), and the compile time in
# seconds, or None if nothing is compiled.
Prepared = tuple[Callable[[], np.ndarray], float | None]


def make_batches(shape: tuple[int, ...], rows: int) -> list[np.ndarray]:
    """Return the fields of a Batch for each of STEPS minibatches: (STEPS, rows, ...)."""
    rng = np.random.default_rng(1)
    size = (STEPS, rows)
    obs = rng.integers(0, 256, (*size, *shape), np.uint8)
    action = rng.integers(0, ACTIONS, size, np.int32)
    logprob = rng.normal(-math.log(ACTIONS), 0.1, size)
    value, advantage, target = rng.normal(size=(3, *size))
    floats = [x.astype(np.float32) for x in (logprob, value, advantage, target)]
    return [obs, action, *floats]


def make_params(shape: tuple[int, ...], flags: dict[str, Any]) -> Any:
    """Return the initial parameters of the Linen script."""
    return linen.make_agent(linen.Args(**flags), shape, True, ACTIONS, jax.random.key(1)).params


def cpu_seconds() -> float:
    """Return the CPU time of this process and its terminated children, such as compilers."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


# === JAX ========================================================================================
class WholeMinibatch(linen.Agent):
    """The agent of the script, except that it convolves all images in a minibatch at once."""

    convolution: Callable | None = None  # passed to nn.Conv; None selects the default convolution

    def setup(self):
        self.on_cpu = False
        self.convs = [
            nn.Conv(n, (k, k), stride, padding="VALID", conv_general_dilated=self.convolution)
            for n, k, stride in self.conv_layers
        ]
        self.hidden = [nn.Dense(n) for n in self.hidden_sizes]
        self.actor = nn.Dense(ACTIONS)
        self.critic = nn.Dense(1)


def make_state(args: Any, params: Any, shape: tuple[int, ...], agent: str) -> TrainState:
    """Return the TrainState of the script, with its agent or one of two variants of the agent."""
    state = linen.make_agent(args, shape, True, ACTIONS, jax.random.key(1)).replace(params=params)
    if agent == "script":
        return state
    convolution = linen.convolve if agent == "whole" else None
    sizes = (args.conv_layers, args.hidden_sizes, ACTIONS, True, args.precision)
    return state.replace(apply_fn=WholeMinibatch(*sizes, convolution).apply)


def gradient_of(state: TrainState, minibatch: linen.Batch, args: Any) -> tuple[jax.Array, Any]:
    loss_fn = partial(linen.ppo_loss, apply_fn=state.apply_fn, batch=minibatch, args=args)
    (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return loss, grads


def train_step(state: TrainState, minibatch: linen.Batch, args: Any) -> tuple[TrainState, Any]:
    loss, grads = gradient_of(state, minibatch, args)
    return state.apply_gradients(grads=grads), loss


def compile_in_jax(function: Callable, *inputs: Any) -> tuple[Callable, float]:
    """Return the compiled function and its compile time in seconds."""
    start = cpu_seconds()
    compiled = jax.jit(function).lower(*inputs).compile()
    return compiled, cpu_seconds() - start


def scan(batches, params, flags, agent: str, unroll: bool = False, **more_flags: Any) -> Prepared:
    """Return a function that runs an epoch as one compiled scan, and the compile time."""
    args = linen.Args(**flags, **more_flags)
    state = make_state(args, params, batches[0].shape[2:], agent)
    batch = linen.Batch(*map(jnp.asarray, batches))
    step = partial(train_step, args=args)
    train, seconds = compile_in_jax(partial(jax.lax.scan, step, unroll=unroll), state, batch)

    def epoch():
        nonlocal state
        state, losses = train(state, batch)
        return np.asarray(losses)

    return epoch, seconds


def python_loop(batches, params, flags, agent: str) -> Prepared:
    """Return a function that calls a compiled step in a Python loop, and the compile time."""
    args = linen.Args(**flags)
    state = make_state(args, params, batches[0].shape[2:], agent)
    minibatches = [linen.Batch(*map(jnp.asarray, x)) for x in zip(*batches, strict=True)]
    step, seconds = compile_in_jax(partial(train_step, args=args), state, minibatches[0])

    def epoch():
        nonlocal state
        losses = []
        for minibatch in minibatches:
            state, loss = step(state, minibatch)
            losses.append(loss)
        return np.asarray(losses)

    return epoch, seconds


# === PyTorch ====================================================================================
class ChannelsFirst(eager_torch.Agent):
    """The agent of the script, except that images stay (B, C, H, W) in memory."""

    def get_features(self, obs):
        x = obs.float().div_(255)
        for conv in self.convs:
            x = conv(x).relu_()
        x = x.flatten(1)
        for layer in self.hidden:
            x = layer(x).relu_()
        return x


def state_dict_of(params: Any, agent: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of the Linen script as a state_dict for a PyTorch agent.

    Flax flattens images as (H, W, C) and PyTorch as (C, H, W), so the inputs of the first hidden
    layer are permuted.
    """
    state = {}
    for name, layer in params["params"].items():
        kernel = np.asarray(layer["kernel"])
        name = name.replace("_", ".")
        if name.startswith("convs"):
            channels = kernel.shape[-1]
            weight = kernel.transpose(3, 2, 0, 1)
        elif name == "hidden.0":
            side = math.isqrt(len(kernel) // channels)  # images are square
            weight = kernel.reshape(side, side, channels, -1).transpose(3, 2, 0, 1)
            weight = weight.reshape(kernel.shape[::-1])
        else:
            weight = kernel.T
        state[f"{name}.weight"] = torch.tensor(weight.copy())
        state[f"{name}.bias"] = torch.tensor(np.array(layer["bias"]))
    return state


def split(batches: list[np.ndarray]) -> list[eager_torch.Batch]:
    """Return the minibatches as tensors."""
    tensors = map(torch.from_numpy, batches)
    return [eager_torch.Batch(*x) for x in zip(*tensors, strict=True)]


def eager(batches, params, flags, channels_last: bool = True, **more_flags: Any) -> Prepared:
    """Return a function that runs an epoch in uncompiled PyTorch, and None for the compile time."""
    args = eager_torch.Args(**flags, **more_flags)
    shape = batches[0].shape[2:]
    agent, optimizer = eager_torch.make_agent(args, shape, True, ACTIONS, CPU)
    if not channels_last:
        agent = ChannelsFirst(args, shape, True, ACTIONS)
        rate = args.learning_rate
        optimizer = torch.optim.Adam(agent.parameters(), rate, eps=args.adam_eps, fused=True)
    scheduler = LambdaLR(optimizer, partial(eager_torch.learning_rate_factor, args=args))
    agent.load_state_dict(state_dict_of(params, agent))
    step = partial(eager_torch.minibatch_step, agent, optimizer, scheduler, args=args)
    return partial(torch_epoch, step, split(batches), args), None


def compiled(batches, params, flags, **more_flags: Any) -> Prepared:
    """Return a function that runs an epoch in compiled PyTorch, and the compile time."""
    args = compiled_torch.Args(**flags, **more_flags)
    agent, optimizer = compiled_torch.make_agent(args, batches[0].shape[2:], True, ACTIONS, CPU)
    agent.load_state_dict(state_dict_of(params, agent))
    step = partial(compiled_torch.minibatch_step, agent, optimizer, args=args)
    step = compiled_torch.compile_graph(step, CPU)
    minibatches = split(batches)
    # The first step compiles. Afterwards, restore the initial parameters and optimizer state.
    saved = [x.detach().clone() for x in (*agent.parameters(), *optimizer.buffers())]
    start = cpu_seconds()
    step(minibatches[0])
    seconds = cpu_seconds() - start
    with torch.no_grad():
        for x, old in zip((*agent.parameters(), *optimizer.buffers()), saved, strict=True):
            x.copy_(old)
    return partial(torch_epoch, step, minibatches, args), seconds


def torch_epoch(step: Callable, minibatches: list[Any], args: Any) -> np.ndarray:
    losses = []
    for minibatch in minibatches:
        metrics = step(minibatch)
        loss = metrics["losses/policy_loss"] - args.ent_coef * metrics["losses/entropy"]
        losses.append(loss + args.vf_coef * metrics["losses/value_loss"])
    return torch.stack(losses).numpy()


# === Variants ===================================================================================
WAYS: dict[str, Callable[..., Prepared]] = {
    "Linen, nn.Conv in lax.scan": partial(scan, agent="plain"),
    "Linen, nn.Conv, scan unrolled": partial(scan, agent="plain", unroll=True),
    "Linen, nn.Conv, Python loop": partial(python_loop, agent="plain"),
    "Linen, convolve in lax.scan": partial(scan, agent="whole"),
    "Linen, convolve in lax.scan, 8 images at a time": partial(scan, agent="script"),
    "Linen, convolve in lax.scan, 8 images at a time, bfloat16": partial(
        scan, agent="script", precision="bfloat16"
    ),
    "PyTorch, channels first": partial(eager, channels_last=False),
    "PyTorch, channels_last": eager,
    "PyTorch, channels_last, compiled": compiled,
    "PyTorch, channels_last, bfloat16": partial(eager, precision="bfloat16"),
    "PyTorch, channels_last, bfloat16, compiled": partial(compiled, precision="bfloat16"),
}


def gradient_error() -> float:
    """Return the largest relative error between gradients of the script and of plain nn.Conv.

    The error of an array is the norm of the difference, divided by the norm of the gradient.
    """
    args = linen.Args()
    params = make_params(SHAPE, {})
    minibatch = linen.Batch(*(jnp.asarray(x[0]) for x in make_batches(SHAPE, ROWS)))
    gradient = jax.jit(partial(gradient_of, args=args))
    grads = [
        gradient(make_state(args, params, SHAPE, agent), minibatch)[1]
        for agent in ("plain", "script")
    ]
    pairs = zip(*map(jax.tree.leaves, grads), strict=True)
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(x)) for x, y in pairs)


# === Measuring ==================================================================================
def measure(way: str, number: int) -> None:
    """Measure one variant in this process, in round `number`, and print a line of JSON."""
    torch.set_num_threads(1)
    epoch, compile_seconds = WAYS[way](make_batches(SHAPE, ROWS), make_params(SHAPE, {}), {})
    times = []
    losses = []
    for _ in range(1 if way in SLOW else 1 + EPOCHS):
        cpu, wall = cpu_seconds(), time.perf_counter()
        losses.append(epoch())
        times.append((cpu_seconds() - cpu, time.perf_counter() - wall))
    timed = times[1:] or times  # the first epoch is the warm-up
    row: dict[str, Any] = {"way": way, "round": number}
    row["seconds"] = statistics.median(x for x, _ in timed) / STEPS  # CPU time per step
    row["wall_seconds"] = statistics.median(x for _, x in timed) / STEPS
    row["compile_seconds"] = compile_seconds  # CPU time
    row["first_losses"] = losses[0].tolist()
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY")
    parser.add_argument("--round", type=int, help="measure the first of --ways in this process")
    args = parser.parse_args()
    if args.round is not None:
        measure(args.ways[0], args.round)
        return
    error = gradient_error()
    if error > 1e-5:
        sys.exit(f"The gradients differ by {error:.0e}, so the times cannot be compared.")
    names = ("jax", "jaxlib", "flax", "optax", "torch", "numpy")
    info: dict[str, Any] = {"versions": {name: metadata.version(name) for name in names}}
    info["versions"]["python"] = platform.python_version()
    info |= {"git_commit": git_commit(Path(__file__)), "gradient_error": error, **describe()}
    print(json.dumps(info), flush=True)
    # Disable the caches, so that each process compiles.
    env = os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    for number in range(args.rounds):
        ways = [x for x in args.ways if x not in SLOW or number < SLOW_ROUNDS]
        for way in random.sample(ways, len(ways)):
            command = [sys.executable, "-m", "studies.convolutions.measure"]
            command += ["--ways", way, "--round", str(number)]
            subprocess.run(command, check=True, env=env)


if __name__ == "__main__":
    main()

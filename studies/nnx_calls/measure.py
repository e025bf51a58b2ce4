"""Time the calls of a Flax NNX update that is compiled in six different ways.

    python -m studies.nnx_calls.measure > studies/nnx_calls/measured.jsonl
    OTHER/bin/python -m studies.nnx_calls.measure >> studies/nnx_calls/measured.jsonl

Needs only jax, flax, optax and numpy, so it runs in any environment with these packages.

An iteration is 80 steps of Adam on a small network, like the 10 epochs of 8 minibatches in PPO, in
80 calls or in fewer calls that scan over several minibatches each. The network is so small that the
calls take most of the time. A repetition is one new process, in which the six variants are
interleaved; the time of a variant is the median over iterations. The first line of JSON records
the versions and the machine; each further line records a measurement.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

from bench.machine import describe, git_commit

STEPS = 80  # Adam steps per iteration
SIZE = 8  # units per layer, and rows per minibatch
WARM_UP = 2  # iterations: the first compiles, and the second may still fill other caches
# Parameter arrays (kernel and bias per layer), and calls per iteration. The two networks of PPO,
# with two hidden layers each, have 12 arrays.
CELLS = ((2, 80), (12, 80), (30, 80), (60, 80), (12, 10), (12, 1))
TX = optax.adam(1e-3)


class Network(nnx.Module):
    def __init__(self, num_layers, rngs):
        layers = [nnx.Linear(SIZE, SIZE, rngs=rngs) for _ in range(num_layers)]
        self.layers = nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return x


def loss_of(network, batch):
    x, y = batch
    return ((network(x) - y) ** 2).mean()


def update(network, optimizer, batches):
    """Train on the minibatches in sequence, in place; return the losses."""
    graphdef, state = nnx.split((network, optimizer))

    def step(state, batch):
        network, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(loss_of)(network, batch)
        optimizer.update(network, grads)
        return nnx.state((network, optimizer)), loss

    state, losses = jax.lax.scan(step, state, batches)
    nnx.update((network, optimizer), state)
    return losses


# === Six variants ================================================================================
# Each returns a function that takes minibatches, trains the network on them and returns the losses.
def jit(network, optimizer):
    """Graph mode, the default: each call splits and merges the objects."""
    return partial(nnx.jit(update, graph=True, graph_updates=True), network, optimizer)


def jit_tree(network, optimizer):
    """Tree mode: each call flattens the objects as a pytree."""
    return partial(nnx.jit(update, graph=False), network, optimizer)


def cached_partial(network, optimizer):
    """Graph mode: the objects are split only once, when cached_partial binds them."""
    graph_jit = nnx.jit(update, graph=True, graph_updates=True)
    return nnx.cached_partial(graph_jit, network, optimizer)


def jit_partial(network, optimizer):
    """Tree mode: the objects are flattened only once, when jit_partial binds them."""
    return nnx.jit_partial(update, network, optimizer, graph=False)


def split_and_merge(network, optimizer):
    """jax.jit with the arrays of the objects; network and optimizer keep their old arrays."""
    graphdef, state = nnx.split((network, optimizer))

    @jax.jit
    def update_state(state, batches):
        network, optimizer = nnx.merge(graphdef, state)
        losses = update(network, optimizer, batches)
        return nnx.state((network, optimizer)), losses

    def call(batches):
        nonlocal state
        state, losses = update_state(state, batches)
        return losses

    return call


def plain(network, optimizer):
    """jax.jit with plain arrays, without Flax: the cost of the call itself in JAX."""
    params = [{"kernel": x.kernel[...], "bias": x.bias[...]} for x in network.layers]
    train_state = (params, TX.init(params))

    def forward(params, x):
        for layer in params:
            x = jax.numpy.tanh(x @ layer["kernel"] + layer["bias"])
        return x

    def loss_of_params(params, batch):
        return loss_of(partial(forward, params), batch)

    def step(train_state, batch):
        params, adam_state = train_state
        loss, grads = jax.value_and_grad(loss_of_params)(params, batch)
        changes, adam_state = TX.update(grads, adam_state)
        return (optax.apply_updates(params, changes), adam_state), loss

    update_arrays = jax.jit(partial(jax.lax.scan, step))

    def call(batches):
        nonlocal train_state
        train_state, losses = update_arrays(train_state, batches)
        return losses

    return call


WAYS = {
    "nnx.jit": jit,
    "nnx.jit, tree": jit_tree,
    "nnx.cached_partial": cached_partial,
    "nnx.jit_partial, tree": jit_partial,
    "jax.jit, split and merge": split_and_merge,
    "jax.jit, plain arrays": plain,
}


# === Measuring ==================================================================================
def make_objects(num_arrays: int) -> tuple[Network, nnx.Optimizer]:
    network = Network(num_arrays // 2, nnx.Rngs(1))
    return network, nnx.Optimizer(network, TX, wrt=nnx.Param)


def make_batches(num_calls: int) -> list[tuple[jax.Array, jax.Array]]:
    """Return the minibatches of each call: x and y, each (STEPS / num_calls, SIZE, SIZE)."""
    numbers = np.random.default_rng(1).normal(size=(2, STEPS, SIZE, SIZE)).astype(np.float32)
    x, y = numbers.reshape(2, num_calls, -1, SIZE, SIZE)
    return [(jax.device_put(a), jax.device_put(b)) for a, b in zip(x, y, strict=True)]


def seconds_of(call: Callable, batches: list[tuple[jax.Array, jax.Array]]) -> float:
    """Return the duration of one iteration in seconds."""
    start = time.perf_counter()
    losses = None
    for batch in batches:
        losses = call(batch)
    jax.block_until_ready(losses)  # sync
    return time.perf_counter() - start


def measure(cells: Iterable[tuple[int, int]], iterations: int) -> None:
    """Measure each variant in each cell in this process, and print a line of JSON for each."""
    for num_arrays, num_calls in cells:
        batches = make_batches(num_calls)
        calls = {way: bind(*make_objects(num_arrays)) for way, bind in WAYS.items()}
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(WARM_UP + iterations):
            for way in random.sample(list(WAYS), len(WAYS)):
                seconds[way].append(seconds_of(calls[way], batches))
        for way in WAYS:
            row: dict[str, str | float] = {"flax": metadata.version("flax"), "way": way}
            row["arrays"] = num_arrays
            row["calls"] = num_calls
            row["seconds"] = statistics.median(seconds[way][WARM_UP:])
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=5, help="0: measure in this process")
    parser.add_argument(
        "--iterations", type=int, default=10, help="iterations of each variant per process"
    )
    args = parser.parse_args()
    if args.processes == 0:
        measure(CELLS, args.iterations)
        return
    versions = {name: metadata.version(name) for name in ("jax", "flax", "optax", "numpy")}
    versions["python"] = platform.python_version()
    commit = git_commit(Path(__file__))
    print(json.dumps({"versions": versions, "git_commit": commit, **describe()}), flush=True)
    command = [sys.executable, "-m", "studies.nnx_calls.measure", "--processes", "0"]
    command += ["--iterations", str(args.iterations)]
    for _ in range(args.processes):
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()

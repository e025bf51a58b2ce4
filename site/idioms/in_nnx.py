"""Flax NNX's idioms that no script has a use for; tests/test_site.py runs them."""

from pathlib import Path

import jax
import numpy as np
from flax import nnx, serialization


def to_device(array: np.ndarray) -> jax.Array:
    return jax.device_put(array)  # a GPU if JAX sees one


def to_host(array: jax.Array) -> np.ndarray:
    return jax.device_get(array)  # sync: waits for the device


def save(agent: nnx.Module, path: Path) -> None:
    state = nnx.to_pure_dict(nnx.state(agent))
    path.write_bytes(serialization.to_bytes(state))


def load(agent: nnx.Module, path: Path) -> None:
    state = nnx.state(agent)
    saved = serialization.from_bytes(nnx.to_pure_dict(state), path.read_bytes())
    nnx.replace_by_pure_dict(state, saved)
    nnx.update(agent, state)  # into the agent that is there


def count_parameters(agent: nnx.Module) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(agent, nnx.Param)))


@nnx.jit
def mean_square(x):
    print(x.shape)  # once, while it is compiled
    jax.debug.print("{}", x.mean())  # at every call, with the values
    return (x**2).mean()

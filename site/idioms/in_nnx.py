"""Flax NNX's idioms that no script has a use for; tests/test_site.py runs them."""

import jax
import numpy as np
from flax import nnx


def to_device(array: np.ndarray) -> jax.Array:
    return jax.device_put(array)  # a GPU if JAX sees one


def to_host(array: jax.Array) -> np.ndarray:
    return jax.device_get(array)  # sync: waits for the device


def count_parameters(agent: nnx.Module) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(agent, nnx.Param)))


@nnx.jit
def mean_square(x):
    print(x.shape)  # once, while it is compiled
    jax.debug.print("{}", x.mean())  # at every call, with the values
    return (x**2).mean()

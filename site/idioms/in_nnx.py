"""Flax NNX idioms that appear in no script; tests/pages/test_site.py runs them."""

import jax
import numpy as np
from flax import nnx


def to_device(array: np.ndarray) -> jax.Array:
    return jax.device_put(array)  # to the GPU, if JAX finds one


def to_host(array: jax.Array) -> np.ndarray:
    return jax.device_get(array)  # sync: waits for the device


def count_parameters(agent: nnx.Module) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(agent, nnx.Param)))


@jax.jit  # nnx.jit is for functions that take NNX objects
def mean_square(x):
    print(x.shape)  # printed once, while JAX traces the function
    jax.debug.print("{}", x.mean())  # printed at every call
    return (x**2).mean()

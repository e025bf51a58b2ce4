"""Flax Linen idioms that appear in no script; tests/pages/test_site.py runs them."""

from typing import Any

import jax
import numpy as np


def to_device(array: np.ndarray) -> jax.Array:
    return jax.device_put(array)  # to the GPU, if JAX finds one


def to_host(array: jax.Array) -> np.ndarray:
    return jax.device_get(array)  # sync: waits for the device


def count_parameters(params: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(params))


@jax.jit
def mean_square(x):
    print(x.shape)  # printed once, while JAX traces the function
    jax.debug.print("{}", x.mean())  # printed at every call
    return (x**2).mean()

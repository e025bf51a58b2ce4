"""Flax Linen's idioms that no script has a use for; tests/test_site.py runs them."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import serialization


def to_device(array: np.ndarray) -> jax.Array:
    return jax.device_put(array)  # a GPU if JAX sees one


def to_host(array: jax.Array) -> np.ndarray:
    return jax.device_get(array)  # sync: waits for the device


def save(params: Any, path: Path) -> None:
    path.write_bytes(serialization.to_bytes(params))


def load(params: Any, path: Path) -> Any:
    return serialization.from_bytes(params, path.read_bytes())  # a new tree, shaped as params


def count_parameters(params: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(params))


@jax.jit
def mean_square(x):
    print(x.shape)  # once, while it is compiled
    jax.debug.print("{}", x.mean())  # at every call, with the values
    return (x**2).mean()

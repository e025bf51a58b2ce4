"""Equinox idioms that appear in no script; tests/pages/test_site.py runs them."""

import equinox as eqx
import jax
import numpy as np


def make_many(make_agent, keys) -> eqx.Module:
    return eqx.filter_vmap(make_agent)(keys)  # adds an agent axis to each array


def call_many(agents, obs) -> jax.Array:
    @eqx.filter_vmap(in_axes=(eqx.if_array(0), None))  # map over agents, not over obs
    def call(agent, obs):
        return agent(obs)

    return call(agents, obs)


def with_bias(linear: eqx.nn.Linear, bias: jax.Array) -> eqx.nn.Linear:
    return eqx.tree_at(lambda x: x.bias, linear, bias)  # a modified copy; modules are immutable


def to_device(array: np.ndarray) -> jax.Array:
    return jax.device_put(array)  # to the GPU, if JAX finds one


def to_host(array: jax.Array) -> np.ndarray:
    return jax.device_get(array)  # sync: waits for the device


def count_parameters(agent: eqx.Module) -> int:
    return sum(x.size for x in jax.tree.leaves(eqx.filter(agent, eqx.is_array)))


@eqx.filter_jit
def mean_square(x):
    print(x.shape)  # printed once, while JAX traces the function
    jax.debug.print("{}", x.mean())  # printed at every call
    return (x**2).mean()

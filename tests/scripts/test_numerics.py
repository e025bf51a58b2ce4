"""Compare GAE, loss, gradient and update of every script with NumPy and with each other."""

import importlib
import inspect
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import reference
import torch
from frameworks import (
    OTHER_FLAGS,
    assert_orthogonal,
    gae,
    make_args,
    make_learner,
    next_rate,
    random_weights,
)
from sections import JAX_SCRIPTS, stand_ins

OBS_DIM, NUM_ACTIONS = 4, 2
FLAGS: dict[str, dict[str, Any]] = {"defaults": {}, "others": OTHER_FLAGS}


def random_storage(seed: int, num_steps: int, end_rate: float = 0.15) -> tuple:
    rng = np.random.default_rng(seed)
    shape = (num_steps, 4)
    return (
        rng.normal(size=(*shape, OBS_DIM)).astype("f"),
        rng.integers(0, NUM_ACTIONS, shape).astype("i"),
        np.log(rng.uniform(0.2, 0.8, shape)).astype("f"),
        rng.normal(size=shape).astype("f"),
        rng.random(shape) < end_rate,
        rng.random(shape) < end_rate,
        rng.normal(size=(*shape, OBS_DIM)).astype("f"),
        rng.normal(size=shape).astype("f"),
        rng.integers(1, 9, shape).astype("f"),
    )


@pytest.mark.parametrize("name", stand_ins("GAE"))
@pytest.mark.parametrize("num_steps", [1, 33])
@pytest.mark.parametrize("flags", FLAGS)
def test_gae_equals_the_loop(name, num_steps, flags):
    script = importlib.import_module(name)
    args = make_args(script, num_steps=num_steps, **FLAGS[flags])
    for seed, end_rate in enumerate((0.0, 0.05, 0.3, 1.0)):
        storage = random_storage(seed, num_steps, end_rate)
        value, next_value = np.random.default_rng(seed).normal(size=(2, num_steps, 4)).astype("f")
        expected = reference.gae(*storage[3:6], value, next_value, args)
        actual = gae(script, storage, value, next_value, args)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module", params=product(stand_ins("Update"), FLAGS), ids=" ".join)
def learner(request):
    """Share a learner among tests with the same script and flags: creating one takes seconds."""
    name, flags = request.param
    learner = make_learner(name, total_timesteps=64, **FLAGS[flags])
    learner.initial_weights = learner.get_weights()
    return learner


def test_initial_weights_are_orthogonal_and_scaled(learner):
    assert_orthogonal(learner.initial_weights["actor"], [2**0.5, 2**0.5, 0.01])
    assert_orthogonal(learner.initial_weights["critic"], [2**0.5, 2**0.5, 1])


def test_loss_and_gradient_equal_numpy(learner):
    weights = random_weights(0, OBS_DIM, (8, 8), NUM_ACTIONS)
    learner.set_weights(weights)
    obs, action, logprob = (x.reshape(64, *x.shape[2:]) for x in random_storage(2, 16)[:3])
    batch = (obs, action, logprob, *np.random.default_rng(1).normal(size=(3, 64)).astype("f"))
    loss, losses, grads = learner.loss_and_grads(batch)
    expected_loss, expected_losses = reference.ppo_loss(weights, batch, learner.args)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert losses == pytest.approx(expected_losses, rel=1e-5, abs=1e-6)
    expected_grads = reference.gradient(weights, batch, learner.args)
    np.testing.assert_allclose(reference.flatten(grads), expected_grads, rtol=1e-3, atol=1e-5)


def test_update_equals_numpy(learner):
    """The schedule covers one update, so with annealing, the next update has learning rate 0."""
    weights, storage = random_weights(3, OBS_DIM, (8, 8), NUM_ACTIONS), random_storage(4, 16)
    learner.set_weights(weights)
    expected, metrics = reference.update(weights, storage, learner.orders(5), learner.args)
    found = learner.update(storage, 5)  # can contain more metrics than the reference
    assert {x: found[x] for x in metrics} == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    actual = reference.flatten(learner.get_weights())
    np.testing.assert_allclose(actual, reference.flatten(expected), atol=1e-5)
    assert learner.update(storage, 5)["charts/learning_rate"] == next_rate(learner.args)


def test_rollout_and_update_are_exactly_equal_in_all_jax_scripts():
    """The layers are wide enough that the order of summation in the gradient norm matters."""
    weights = random_weights(3, OBS_DIM, (64, 64), NUM_ACTIONS)
    first: list[Any] = []
    for name in stand_ins("Update", JAX_SCRIPTS):
        learner = make_learner(name, hidden_sizes=(64, 64))
        learner.set_weights(weights)
        results: list[Any] = [np.asarray(x) for x in learner.rollout(6)]
        found = learner.update(random_storage(4, 16), 5)
        metrics = {x: found[x] for x in (first[-2] if first else found)}  # that all scripts have
        results += [metrics, reference.flatten(learner.get_weights())]
        first = first or results
        for values, expected in zip(results, first, strict=True):
            np.testing.assert_equal(values, expected, err_msg=name)


def test_shuffle():
    """Permutations contain each index once, and all indices are equally likely in all positions."""
    shuffles = [importlib.import_module(name).shuffle for name in JAX_SCRIPTS]
    assert len({inspect.getsource(x) for x in shuffles}) == 1
    shuffle = shuffles[0]
    for size in (1, 2, 1000, 1024):
        order = np.array(shuffle(jax.random.key(size), size))
        np.testing.assert_array_equal(np.sort(order), np.arange(size))
    keys = jax.random.split(jax.random.key(0), 4000)
    places = np.array(jax.vmap(lambda key: shuffle(key, 64))(keys)).argsort(axis=1)
    # 64 indices in 64 positions, 4000 times: chi-squared with 63 * 63 degrees of freedom.
    counts = np.array([np.bincount(column, minlength=64) for column in places.T])
    chi_square = ((counts - 4000 / 64) ** 2 / (4000 / 64)).sum()
    assert abs(chi_square - 63 * 63) < 5 * np.sqrt(2 * 63 * 63)


# === Matrix products ============================================================================
def test_medium_precision_is_float32_on_a_cpu_without_amx():
    """On a CPU with Intel AMX, oneDNN multiplies in bfloat16 instead."""
    x, weight = torch.randn(256, 256), torch.randn(256, 256)
    exact = x.double() @ weight.double()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    error = float((x @ weight - exact).abs().mean() / exact.abs().mean())
    torch.set_float32_matmul_precision(precision)
    flags = Path("/proc/cpuinfo").read_text()
    assert error < (1e-2 if "amx_bf16" in flags else 1e-6)

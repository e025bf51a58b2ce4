"""GAE, loss, gradient and update of every script against NumPy, and against each other."""

import importlib
import inspect
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
import reference
from frameworks import JAX_SCRIPTS, make_learner, random_weights
from sections import stand_ins

OBS_DIM, NUM_ACTIONS, HIDDEN = 4, 2, (8, 8)


def random_storage(seed: int, num_steps: int, num_envs: int, end_rate: float = 0.15) -> tuple:
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_envs)
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
@pytest.mark.parametrize("num_steps", [1, 7, 33])
@pytest.mark.parametrize("bootstrap_truncated", [True, False])
def test_gae_equals_the_loop(name, num_steps, bootstrap_truncated):
    flags = {"num_steps": num_steps, "bootstrap_truncated": bootstrap_truncated}
    learner = make_learner(name, start=False, **flags)
    for seed, end_rate in enumerate((0.0, 0.05, 0.3, 1.0)):
        storage = random_storage(seed, num_steps, 4, end_rate)
        value, next_value = np.random.default_rng(seed).normal(size=(2, num_steps, 4)).astype("f")
        expected = reference.gae(*storage[3:6], value, next_value, learner.args)
        actual = learner.gae(storage, value, next_value)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


LOSS_FLAGS = [
    {},
    {"norm_adv": False},
    {"clip_vloss": False},
    {"clip_coef": 0.05, "ent_coef": 0.5, "vf_coef": 2.0},
]


@pytest.mark.parametrize("name", stand_ins("Agent"))
@pytest.mark.parametrize("flags", LOSS_FLAGS, ids=str)
def test_loss_and_gradient_equal_numpy(name, flags):
    learner = make_learner(name, **flags)
    weights = random_weights(0, OBS_DIM, HIDDEN, NUM_ACTIONS)
    learner.set_weights(weights)
    rng = np.random.default_rng(1)
    obs, action, logprob = (x.reshape(64, *x.shape[2:]) for x in random_storage(2, 16, 4)[:3])
    batch = (obs, action, logprob, *rng.normal(size=(3, 64)).astype("f"))
    loss, losses, grads = learner.loss_and_grads(batch)
    expected_loss, expected_losses = reference.ppo_loss(weights, batch, learner.args)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert losses == pytest.approx(expected_losses, rel=1e-5, abs=1e-6)
    expected_grads = reference.gradient(weights, batch, learner.args)
    np.testing.assert_allclose(reference.flatten(grads), expected_grads, rtol=1e-3, atol=1e-5)


@cache
def updated(name: str, anneal_lr: bool) -> tuple[np.ndarray, dict]:
    """Weights and metrics after one update; if annealed, from the full learning rate to an 8th."""
    weights = random_weights(3, OBS_DIM, HIDDEN, NUM_ACTIONS)
    storage, key = random_storage(4, 16, 4), jax.random.key(5)
    flags: dict[str, Any] = {"total_timesteps": 64, "anneal_lr": anneal_lr}
    orders = make_learner("ppo_linen", start=False).draw_orders(key)
    if name == "numpy":
        args = make_learner("ppo_linen", start=False, **flags).args
        after, metrics = reference.update(weights, storage, orders, args)
        return reference.flatten(after), metrics
    learner = make_learner(name, compiled=anneal_lr, **flags)
    learner.set_weights(weights)
    metrics = learner.update(storage, key, orders)
    return reference.flatten(learner.get_weights()), metrics


@pytest.mark.parametrize("name", stand_ins("Update"))
@pytest.mark.parametrize("anneal_lr", [True, False])
def test_update_equals_numpy_and_the_first_script(name, anneal_lr):
    weights, metrics = updated(name, anneal_lr)
    expected, losses = updated("numpy", anneal_lr)
    np.testing.assert_allclose(weights, expected, atol=1e-5)
    assert {x: metrics[x] for x in losses} == pytest.approx(losses, rel=1e-4, abs=1e-6)
    first, first_metrics = updated("ppo_linen", anneal_lr)
    np.testing.assert_allclose(weights, first, atol=1e-5 if "torch" in name else 1e-6)
    assert metrics == pytest.approx(first_metrics, rel=1e-5, abs=1e-5)


def test_in_jax_rollout_and_update_are_the_same_to_the_last_digit():
    """With layers so wide that it shows in which order the gradient's norm is summed."""
    weights = random_weights(3, OBS_DIM, (64, 64), NUM_ACTIONS)
    first = None
    for name in JAX_SCRIPTS:
        learner = make_learner(name, hidden_sizes=(64, 64))
        learner.set_weights(weights)
        results = [np.asarray(x) for x in learner.rollout()]
        metrics = learner.update(random_storage(4, 16, 4), jax.random.key(5), [])
        results += [metrics, reference.flatten(learner.get_weights())]
        first = first or results
        for values, expected in zip(results, first, strict=True):
            np.testing.assert_equal(values, expected, err_msg=name)


def test_shuffle():
    """An order holds each index once, and every index is as likely in every minibatch."""
    shuffles = [importlib.import_module(name).shuffle for name in JAX_SCRIPTS]
    assert len({inspect.getsource(x) for x in shuffles}) == 1
    shuffle = shuffles[0]
    for size in (1, 2, 1000, 1024, 8192):
        order = np.array(shuffle(jax.random.key(size), size))
        np.testing.assert_array_equal(np.sort(order), np.arange(size))
    keys = jax.random.split(jax.random.key(0), 4000)
    places = np.array(jax.vmap(lambda key: shuffle(key, 64))(keys)).argsort(axis=1)
    # 64 indices in 64 places, 4000 times: a chi-square of 63 * 63 degrees of freedom.
    counts = np.array([np.bincount(column, minlength=64) for column in places.T])
    chi_square = ((counts - 4000 / 64) ** 2 / (4000 / 64)).sum()
    assert abs(chi_square - 63 * 63) < 5 * np.sqrt(2 * 63 * 63)


@pytest.mark.parametrize("name", stand_ins("Agent"))
def test_initial_weights_are_orthogonal_and_scaled(name):
    weights = make_learner(name, hidden_sizes=(16, 16)).get_weights()
    for network, output_scale in (("actor", 0.01), ("critic", 1.0)):
        *hidden, output = weights[network]
        for (kernel, bias), scale in [
            *((layer, 2**0.5) for layer in hidden),
            (output, output_scale),
        ]:
            gram = kernel @ kernel.T if kernel.shape[0] < kernel.shape[1] else kernel.T @ kernel
            np.testing.assert_allclose(gram, scale**2 * np.eye(len(gram)), atol=1e-5)
            assert not bias.any()

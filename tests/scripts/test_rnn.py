"""Recurrent PPO: compare the GRU, its resets, the loss, the gradient and the update with NumPy.

Weights are {"actor": layers, "critic": []}, with five layers (kernel, bias) sorted by name: actor,
critic, the two layers of the encoder (the second one feeds the GRU), and the recurrent layer.
"""

from typing import Any

import numpy as np
import pytest
import reference
from frameworks import assert_orthogonal, make_learner, next_rate
from sections import RNN_SCRIPTS

N, T, OBS_DIM, HIDDEN, H, NUM_ACTIONS = 4, 12, 4, 5, 3, 2
EACH = pytest.mark.parametrize("name", RNN_SCRIPTS)


def make(name: str, **flags: Any) -> Any:
    sizes = {"num_envs": N, "num_steps": T, "hidden_sizes": (HIDDEN,), "gru_hidden_size": H}
    learner = make_learner(name, **sizes | flags, num_minibatches=2, total_timesteps=640)
    learner.initial_weights = learner.get_weights()
    learner.set_weights(random_weights())
    return learner


def random_weights() -> dict:
    rng = np.random.default_rng(0)
    sizes = [(H, NUM_ACTIONS), (H, 1), (OBS_DIM, HIDDEN), (HIDDEN, 3 * H), (H, 3 * H)]
    layers = [(rng.normal(size=(m, n)) / m**0.5, rng.normal(size=n) / 5) for m, n in sizes]
    return {"actor": [(k.astype("f"), b.astype("f")) for k, b in layers], "critic": []}


def random_steps(done_rate: float = 0.15) -> dict[str, np.ndarray]:
    """Return random fields of Storage in order, except gru_state, the states after each step."""
    rng = np.random.default_rng(1)
    return {
        "obs": rng.normal(size=(T, N, OBS_DIM)).astype("f"),
        "action": rng.integers(0, NUM_ACTIONS, (T, N)).astype("i"),
        "logprob": np.log(rng.uniform(0.2, 0.8, (T, N))).astype("f"),
        "initial_gru_state": rng.uniform(-1, 1, size=(N, H)).astype("f"),
        "reward": rng.normal(size=(T, N)).astype("f"),
        "terminated": rng.random((T, N)) < done_rate,
        "truncated": rng.random((T, N)) < done_rate,
        "next_obs": rng.normal(size=(T, N, OBS_DIM)).astype("f"),
        "episode_return": rng.normal(size=(T, N)).astype("f"),
        "episode_length": rng.integers(1, 9, (T, N)).astype("f"),
    }


# === NumPy ======================================================================================
def gru(weights: dict, gru_state: np.ndarray, obs: np.ndarray) -> np.ndarray:
    """Compute a step of a GRU as PyTorch defines it: the reset gate applies after the product."""
    *_, hidden, given, recurrent = weights["actor"]
    x = np.tanh(obs @ hidden[0] + hidden[1]) @ given[0] + given[1]
    h = gru_state @ recurrent[0] + recurrent[1]
    reset = 1 / (1 + np.exp(-x[..., :H] - h[..., :H]))
    keep = 1 / (1 + np.exp(-x[..., H : 2 * H] - h[..., H : 2 * H]))
    new = np.tanh(x[..., 2 * H :] + reset * h[..., 2 * H :])
    return (1 - keep) * new + keep * gru_state


def unroll(weights: dict, initial_gru_state: np.ndarray, done: np.ndarray, obs: np.ndarray):
    """Return the GRU states (B, T, H) after each step."""
    gru_states = np.zeros((*done.shape, H))
    gru_state = initial_gru_state.astype(float)
    for t in range(done.shape[1]):
        if t > 0:
            gru_state = np.where(done[:, t - 1, None], 0, gru_state)
        gru_state = gru(weights, gru_state, obs[:, t])
        gru_states[:, t] = gru_state
    return gru_states


def loss(weights: dict, batch: tuple, args: Any) -> tuple[float, dict[str, float]]:
    gru_state = unroll(weights, *batch[:3]).reshape(-1, H)
    actor, critic = weights["actor"][:2]
    rest = [x.reshape(-1) for x in batch[3:]]
    return reference.ppo_loss({"actor": [actor], "critic": [critic]}, (gru_state, *rest), args)


def batch_of(weights: dict, steps: dict[str, np.ndarray], args: Any) -> list[np.ndarray]:
    """Return the Batch of an update: arrays (N, T, ...), with advantages and targets."""
    done = steps["terminated"] | steps["truncated"]
    gru_state = unroll(weights, steps["initial_gru_state"], done.T, steps["obs"].swapaxes(0, 1))
    gru_state = gru_state.swapaxes(0, 1)
    kernel, bias = weights["actor"][1]
    value = (gru_state @ kernel + bias)[..., 0]
    next_value = (gru(weights, gru_state, steps["next_obs"]) @ kernel + bias)[..., 0]
    ends = (steps[x] for x in ("reward", "terminated", "truncated"))
    advantage = reference.gae(*ends, value, next_value, args)
    parts = [done, steps["obs"], steps["action"], steps["logprob"], value, advantage]
    parts = [x.swapaxes(0, 1) for x in (*parts, advantage + value)]
    return [steps["initial_gru_state"], *parts]


def storage_of(weights: dict, steps: dict[str, np.ndarray]) -> tuple:
    done = steps["terminated"] | steps["truncated"]
    gru_state = unroll(weights, steps["initial_gru_state"], done.T, steps["obs"].swapaxes(0, 1))
    values = list(steps.values())
    return (*values[:3], gru_state.swapaxes(0, 1).astype("f"), *values[3:])


# === The scripts ================================================================================
@EACH
def test_initial_weights_are_orthogonal_and_scaled(name):
    weights = make(name).initial_weights
    assert_orthogonal(weights["actor"] + weights["critic"], [0.01, 1, 2**0.5, 1, 1])


@EACH
@pytest.mark.parametrize("done_rate", [0.0, 0.15, 1.0])
def test_loss_and_gradient_through_time_equal_numpy(name, done_rate):
    """Each episode starts with a GRU state of zeros."""
    learner, weights = make(name), random_weights()
    batch = batch_of(weights, random_steps(done_rate), learner.args)
    batch = [x.astype("f") if x.dtype == "float64" else x for x in batch]
    found, losses, grads = learner.loss_and_grads(tuple(batch))
    expected, expected_losses = loss(weights, tuple(batch), learner.args)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert losses == pytest.approx(expected_losses, rel=1e-4, abs=1e-6)
    grads = {"actor": grads["actor"] + grads["critic"], "critic": []}
    numeric = reference.gradient(weights, tuple(batch), learner.args, loss)
    np.testing.assert_allclose(reference.flatten(grads), numeric, rtol=1e-3, atol=1e-5)


@EACH
def test_update_equals_numpy(name):
    """A truncated episode bootstraps from the GRU state before the reset."""
    learner, weights, steps = make(name), random_weights(), random_steps()
    metrics = learner.update(storage_of(weights, steps), seed=5)
    batch = batch_of(weights, steps, learner.args)
    expected, losses = reference.train(weights, batch, learner.orders(5), learner.args, loss)
    actual = learner.get_weights()
    actual = {"actor": actual["actor"] + actual["critic"], "critic": []}
    np.testing.assert_allclose(reference.flatten(actual), reference.flatten(expected), atol=1e-5)
    assert {x: metrics[x] for x in losses} == pytest.approx(losses, rel=1e-4, abs=1e-6)
    *_, value, _, target = batch
    explained = 1 - (target - value).var() / target.var()
    assert metrics["losses/explained_variance"] == pytest.approx(explained, rel=1e-4, abs=1e-5)
    assert metrics["charts/learning_rate"] == pytest.approx(learner.args.learning_rate)
    later = learner.update(storage_of(weights, steps), seed=5)
    assert later["charts/learning_rate"] == next_rate(learner.args)


@EACH
def test_ratios_of_the_first_update_are_1(name):
    """The update computes the same GRU states as the rollout, even after the end of an episode."""
    learner = make(name, env_id="probes:ShortCartPole", num_steps=64)
    storage = learner.rollout(3)
    steps = {x: np.asarray(getattr(storage, x)) for x in storage._fields}
    assert steps["terminated"].any() and steps["truncated"].any()
    done = steps["terminated"] | steps["truncated"]
    weights = random_weights()
    gru_state = unroll(weights, steps["initial_gru_state"], done.T, steps["obs"].swapaxes(0, 1))
    np.testing.assert_allclose(steps["gru_state"].swapaxes(0, 1), gru_state, atol=1e-6)
    kernel, bias = weights["actor"][0]
    log_probs = reference.log_softmax(gru_state.swapaxes(0, 1) @ kernel + bias)
    logprob = np.take_along_axis(log_probs, steps["action"][..., None], -1)[..., 0]
    np.testing.assert_allclose(np.exp(logprob - steps["logprob"]), 1, atol=1e-5)

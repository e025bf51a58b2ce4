"""DQN's updates, initial weights, replay and schedules against the papers and PyTorch."""

from typing import Any

import dqn
import numpy as np
import pytest
from dqn import COMPILED, FIRST_OF_PAIRS, make_learner, random_batch

import dqn_linen

VECTOR, IMAGE = (4,), (5, 4, 2)
FIRST = pytest.mark.parametrize("name", FIRST_OF_PAIRS)
EACH_AGENT = pytest.mark.parametrize("name", [*FIRST_OF_PAIRS, COMPILED])


# === Loss and update ============================================================================
CASES = [
    (VECTOR, "--loss mse --optimizer adam"),
    (VECTOR, "--loss huber --optimizer rmsprop --optimizer-eps 0.01 --double-q"),
    (IMAGE, "--loss huber --optimizer adam --optimizer-eps 0.01 --double-q"),
    (IMAGE, "--loss mse --optimizer rmsprop --rmsprop-decay 0.8"),
]


@EACH_AGENT
@pytest.mark.parametrize(("obs_shape", "flags"), CASES)
def test_updates_equal_pytorchs(name, obs_shape, flags):
    """50 of them, at a changing rate, some weights at rest: those of an input that is always 0."""
    learner = make_learner(name, obs_shape, f"{flags} --target-network-frequency 7")
    layers, _ = learner.layers()
    batches = [random_batch(seed, 32, int(np.prod(obs_shape)), 3) for seed in range(50)]
    rates = np.geomspace(1e-2, 1e-3, 50).astype("f").tolist()
    updates = dqn.updates(layers, batches, rates, learner.args, obs_shape)
    for i, (*expected, expected_losses) in enumerate(updates):
        losses = learner.update(batches[i], rates[i])
        close: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}
        np.testing.assert_allclose(losses, expected_losses, **close)
        weights = [dqn.flat(x) for x in learner.layers()]
        np.testing.assert_allclose(weights, [dqn.flat(x) for x in expected], **close)
        assert (weights[0] == weights[1]).all() == ((i + 1) % 7 == 0)
    assert np.abs(weights[0] - dqn.flat(layers)).max() > 0.05


# === Initial weights ============================================================================
@EACH_AGENT
def test_initial_weights_are_pytorchs(name):
    """Uniform within 1 / sqrt(inputs), as nn.Linear's and nn.Conv2d's; the target is a copy."""
    learner = make_learner(name, (10, 10, 4), "--hidden-sizes 128 64")
    layers, target = learner.layers()
    np.testing.assert_array_equal(dqn.flat(layers), dqn.flat(target))
    assert [x.shape for x, _ in layers] == [(36, 16), (1024, 128), (128, 64), (64, 3)]
    for kernel, bias in layers:
        bound = len(kernel) ** -0.5
        assert 0.97 * bound < np.abs(kernel).max() <= bound
        assert abs(kernel.mean()) < 5 * bound / np.sqrt(3 * kernel.size)
        assert kernel.std() == pytest.approx(bound / np.sqrt(3), rel=0.1)
        assert 0.3 * bound < np.abs(bias).max() <= bound and len(set(bias)) == len(bias)


# === Replay =====================================================================================
@FIRST
def test_batches_are_whole_rows_drawn_uniformly(name):
    """Of the first 30 of 40 rows, which tell their number in every field."""
    number = np.arange(40)
    obs = number[:, None] + np.array([0, 0.25, 0.5, 0.75])
    fields = obs, number, 2 * number, number % 3 == 0, obs + 1000
    replay = tuple(x.astype(kind) for x, kind in zip(fields, "fif?f", strict=True))
    counts = np.zeros(40)
    for seed in range(20):
        batch = dqn.sample(name, seed, replay, 30, 1000)
        for field, expected in zip(batch, replay, strict=True):
            np.testing.assert_array_equal(field, expected[batch[1]])
        counts += np.bincount(batch[1], minlength=40)
    assert not counts[30:].any()
    chi_square = ((counts[:30] - 20000 / 30) ** 2 / (20000 / 30)).sum()
    assert abs(chi_square - 29) < 5 * np.sqrt(2 * 29)


# === Schedules, the same text in all ============================================================
def plans(flags):
    """The plans of ten iterations of 16 steps."""
    args = dqn.args_of("dqn_linen", flags)
    return [dqn_linen.make_plan(i, args) for i in range(10)]


@pytest.mark.parametrize(("learning_starts", "exploration_steps"), [(0, 1), (33, 320), (10**6, 5)])
def test_epsilon_falls_linearly_from_when_learning_starts(learning_starts, exploration_steps):
    flags = f"--learning-starts {learning_starts} --exploration-steps {exploration_steps} "
    actual = [plan.epsilon for plan in plans(flags + "--start-e 0.9 --end-e 0.1")]
    ends = [learning_starts, learning_starts + exploration_steps]
    expected = np.interp(range(0, 640, 4), ends, [0.9, 0.1])
    np.testing.assert_allclose(np.concatenate(actual), expected, atol=1e-7)


def test_the_learning_rate_falls_by_iteration():
    fixed = [plan.learning_rate for plan in plans("--learning-rate 0.5 --no-anneal-lr")]
    np.testing.assert_array_equal(fixed, np.full((10, 16), 0.5))
    annealed = [plan.learning_rate for plan in plans("--learning-rate 0.5")]
    expected = np.linspace(0.5, 0, 10, endpoint=False)[:, None].repeat(16, axis=1)
    np.testing.assert_allclose(annealed, expected, rtol=1e-6)


@pytest.mark.parametrize("num_envs", [1, 3, 100])
@pytest.mark.parametrize(
    ("train_frequency", "learning_starts"), [(10, 7), (1, 33), (7, 100), (1000, 0)]
)
def test_an_update_follows_every_train_frequency_environment_steps(
    num_envs, train_frequency, learning_starts
):
    """From learning_starts on, whatever num_envs; what one iteration did not do, the next does."""
    flags = f"--train-frequency {train_frequency} --num-envs {num_envs} "
    flags += f"--learning-starts {learning_starts} --buffer-size {32 * num_envs} "
    flags += f"--total-timesteps {160 * num_envs}"
    for step, now in enumerate(np.concatenate([plan.num_updates for plan in plans(flags)])):
        steps = range(step * num_envs + 1, (step + 1) * num_envs + 1)  # each environment's
        learnt = [x - learning_starts for x in steps if x > learning_starts]
        assert now == sum(x % train_frequency == 0 for x in learnt)

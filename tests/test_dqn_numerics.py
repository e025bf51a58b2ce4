"""DQN's updates, initial weights, replay and schedules against the papers and PyTorch."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import dqn
import numpy as np
import pytest
from dqn import FIRST_OF_PAIRS, make_learner, random_batch

import dqn_linen

VECTOR, IMAGE = (4,), (5, 4, 2)
FIRST = pytest.mark.parametrize("name", FIRST_OF_PAIRS)


# === Loss and update ============================================================================
CASES: list[tuple[tuple, dict[str, Any]]] = [
    (VECTOR, {"loss": "mse", "optimizer": "adam"}),
    (VECTOR, {"loss": "huber", "optimizer": "rmsprop", "optimizer_eps": 0.01, "double_q": True}),
    (IMAGE, {"loss": "huber", "optimizer": "adam", "optimizer_eps": 0.01, "double_q": True}),
    (IMAGE, {"loss": "mse", "optimizer": "rmsprop", "rmsprop_decay": 0.8}),
]


@FIRST
@pytest.mark.parametrize(("obs_shape", "flags"), CASES, ids=str)
def test_updates_equal_pytorchs(name, obs_shape, flags):
    """50 of them, at a changing rate, some weights at rest: those of an input that is always 0."""
    learner = make_learner(name, obs_shape, target_network_frequency=7, **flags)
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
@FIRST
def test_initial_weights_are_pytorchs(name):
    """Uniform within 1 / sqrt(inputs), as nn.Linear's and nn.Conv2d's; the target is a copy."""
    learner = make_learner(name, (10, 10, 4), hidden_sizes=(128, 64))
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
def numbered(start, num_envs):
    """Transitions that tell their number, in every field."""
    numbers = np.arange(start, start + num_envs)
    obs = numbers[:, None] + np.array([0, 0.25, 0.5, 0.75])
    fields = obs, numbers % 97, 2 * numbers, numbers % 3 == 0, obs + 1000
    return tuple(x.astype(y) for x, y in zip(fields, "fif?f", strict=True))


@FIRST
def test_batches_are_whole_rows_drawn_uniformly(name):
    """Of the first 30 rows, the oldest of which were written over."""
    learner = make_learner(name, VECTOR, buffer_size=40)
    for start in range(0, 60, 4):
        learner.add(numbered(start, 4), start % 40)
    ring = [np.concatenate([x[40:], x[20:40]]) for x in numbered(0, 60)]
    counts = np.zeros(40)
    for seed in range(20):
        batch = learner.sample(seed, 30, 1000)
        rows = batch[2].astype(int) // 2 % 40
        for field, expected in zip(batch, ring, strict=True):
            np.testing.assert_array_equal(field, expected[rows])
        counts += np.bincount(rows, minlength=40)
    assert not counts[30:].any()
    chi_square = ((counts[:30] - 20000 / 30) ** 2 / (20000 / 30)).sum()
    assert abs(chi_square - 29) < 5 * np.sqrt(2 * 29)


@FIRST
def test_minatars_observations_are_kept_as_bytes(name):
    """And those of one's own environment as numbers, whatever its name."""
    names = {"Breakout-MinAtar": "bool", "MinAtar/Breakout-v0": "bool"}
    for env_id, kind in (names | {"my:MinAtar": "float32", "CartPole-v1": "float32"}).items():
        learner = make_learner(name, VECTOR, env_id=env_id)
        kinds = [str(x.dtype).removeprefix("torch.") for x in learner.replay]
        assert kinds == [kind, "int32", "float32", "bool", kind]
        batch = learner.sample(0, 1, 2)
        assert {batch[0].dtype, batch[4].dtype} == {np.dtype("float32")}


# === Schedules, the same text in all ============================================================
def plans(**flags: Any):
    """The plans of ten iterations of 64 environment steps."""
    args = dqn_linen.Args(**dqn.SMALL | flags)
    return [dqn_linen.make_plan(i, args) for i in range(10)]


@pytest.mark.parametrize(("learning_starts", "exploration_steps"), [(0, 1), (33, 320), (10**6, 5)])
def test_epsilon_falls_linearly_from_when_learning_starts(learning_starts, exploration_steps):
    flags = {"learning_starts": learning_starts, "exploration_steps": exploration_steps}
    actual = [plan.epsilon for plan in plans(start_e=0.9, end_e=0.1, **flags)]
    ends = [learning_starts, learning_starts + exploration_steps]
    expected = np.interp(range(0, 640, 4), ends, [0.9, 0.1])
    np.testing.assert_allclose(np.concatenate(actual), expected, atol=1e-7)


def test_the_learning_rate_falls_by_iteration():
    for i, (fixed, annealed) in enumerate(zip(plans(anneal_lr=False), plans(), strict=True)):
        np.testing.assert_allclose(fixed.learning_rate, np.full(16, 2.5e-4), rtol=1e-6)
        expected = np.full(16, 2.5e-4 * (1 - i / 10))
        np.testing.assert_allclose(annealed.learning_rate, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("replay_ratio", "batch_size", "learning_starts"),
    [("12.8", 128, 7), ("0.1", 7, 33), ("5.3", 1, 100), (repr(1 / 3), 10, 17), ("0", 4, 0)],
)
def test_updates_are_as_many_as_the_replay_ratio_says(replay_ratio, batch_size, learning_starts):
    """After every step, whatever num_envs; what one iteration did not do, the next does."""
    ratio = Fraction(Decimal(replay_ratio)) / batch_size
    flags = {"replay_ratio": float(replay_ratio), "batch_size": batch_size}
    for num_envs in (1, 3, 100):
        flags["num_envs"] = num_envs
        flags["buffer_size"] = 32 * num_envs
        flags["total_timesteps"] = 160 * num_envs
        total = steps = 0
        for plan in plans(learning_starts=learning_starts, **flags):
            for before, now in zip(plan.updates_before, plan.num_updates, strict=True):
                assert before == total
                total += int(now)
                steps += num_envs
                assert total == max(steps - learning_starts, 0) * ratio // 1

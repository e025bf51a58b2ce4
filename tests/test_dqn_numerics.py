"""DQN's targets, gradients, optimizers, replay and schedules against NumPy and PyTorch's own."""

import importlib
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

import dqn
import numpy as np
import pytest
import torch
from dqn import FIRST_OF_PAIRS, TORCH_PAIR, make_learner, random_batch, random_layers
from sections import DQN_SCRIPTS

VECTOR, IMAGE = (4,), (5, 4, 2)
EACH = pytest.mark.parametrize("name", DQN_SCRIPTS)
FIRST = pytest.mark.parametrize("name", FIRST_OF_PAIRS)


# === Loss =======================================================================================
@FIRST
@pytest.mark.parametrize("double_q", [False, True])
def test_td_targets_equal_numpy(name, double_q):
    learner = make_learner(name, VECTOR, double_q=double_q, gamma=0.9)
    rng, batch = np.random.default_rng(0), random_batch(1, 64, 4, 3)
    q_next, target_q_next = rng.normal(size=(2, 64, 3)).astype("f")
    expected = dqn.td_targets(q_next, target_q_next, batch, learner.args)
    actual = learner.td_target(q_next, target_q_next, batch)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(actual[batch[3]], batch[2][batch[3]])  # terminated: the reward
    best = dqn.td_targets(target_q_next, target_q_next, batch, learner.args)
    assert np.allclose(expected, best) != double_q


@FIRST
@pytest.mark.parametrize(
    ("obs_shape", "loss", "double_q"),
    [
        (VECTOR, "mse", False),
        (IMAGE, "huber", False),
        (VECTOR, "huber", True),
        (IMAGE, "mse", True),
    ],
)
def test_loss_and_gradient_equal_numpy(name, obs_shape, loss, double_q):
    learner = make_learner(name, obs_shape, loss=loss, double_q=double_q)
    layers, target = (random_layers(seed, obs_shape, (8, 8), 3) for seed in (0, 1))
    learner.set_weights(layers, target)
    batch = random_batch(2, 64, int(np.prod(obs_shape)), 3)
    expected_loss, mean_q, _ = dqn.loss(layers, target, batch, learner.args, obs_shape)
    actual_loss, losses, grads = learner.loss_and_grads(batch)
    np.testing.assert_allclose(losses, [expected_loss, mean_q], rtol=1e-5, atol=1e-6)
    assert actual_loss == losses[0]
    expected = dqn.gradient(layers, target, batch, learner.args, obs_shape)
    np.testing.assert_allclose(dqn.flatten(grads), dqn.flatten(expected), rtol=1e-4, atol=1e-6)
    q = dqn.forward(layers, batch[0], obs_shape)[-1]
    np.testing.assert_allclose(learner.q(batch[0]), q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("obs_shape", [VECTOR, IMAGE])
@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_numpys_gradient_is_that_of_its_loss(obs_shape, loss):
    """By central differences; the target, which they would move too, is the other network's."""
    args = importlib.import_module("dqn_linen").Args(loss=loss)
    layers, target = (random_layers(seed, obs_shape, (8, 8), 3) for seed in (0, 1))
    batch = random_batch(2, 64, int(np.prod(obs_shape)), 3)
    vector, grads = dqn.flatten(layers), []
    for bump in 1e-6 * np.eye(len(vector)):
        near = (dqn.unflatten(vector + x, layers) for x in (bump, -bump))
        above, below = (dqn.loss(x, target, batch, args, obs_shape)[0] for x in near)
        grads.append((above - below) / 2e-6)
    actual = dqn.flatten(dqn.gradient(layers, target, batch, args, obs_shape))
    np.testing.assert_allclose(actual, grads, rtol=1e-5, atol=1e-7)


# === Update =====================================================================================
@FIRST
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("eps", [1e-8, 0.01])
def test_optimizers_are_pytorchs(name, optimizer, eps, monkeypatch):
    """500 steps of given gradients, some of them always zero, at a changing rate."""
    flags: dict[str, Any] = {"optimizer": optimizer, "optimizer_eps": eps, "rmsprop_decay": 0.9}
    learner = make_learner(name, VECTOR, hidden_sizes=(3,), **flags)
    learner.follow(monkeypatch)
    layers, rng = random_layers(0, VECTOR, (3,), 3), np.random.default_rng(1)
    learner.set_weights(layers)
    param = torch.tensor(dqn.flatten(layers))
    reference = dqn.torch_optimizer(param, learner.args)
    scale = np.geomspace(1e-4, 10, len(param)) * (np.arange(len(param)) % 5 > 0)
    for i in range(500):
        grad = (scale * (rng.normal(size=len(param)) + 0.5)).astype("f")
        rate = np.float32(1e-2 * (1 - i / 1000))
        learner.update_by(dqn.unflatten(grad, layers), rate)
        dqn.descend(param, reference, grad.astype(float), rate)
        if i in (0, 9, 99, 499):
            actual = dqn.flatten(learner.get_weights())
            np.testing.assert_allclose(actual, param, rtol=1e-5, atol=5e-5)
    assert (np.abs(actual - dqn.flatten(layers)) > 0.1)[scale > 0.1].all()


NETWORKS: dict[str, tuple[tuple, dict[str, Any]]] = {
    "MLP": (VECTOR, {"optimizer": "adam"}),
    "CNN": (IMAGE, {"optimizer": "rmsprop", "optimizer_eps": 0.01, "loss": "huber"}),
    "double": (VECTOR, {"optimizer": "rmsprop", "optimizer_eps": 0.01, "double_q": True}),
}


@cache
def updated(name, network):
    """Weights, target and losses of a script, and of NumPy, after 1 update and after 50."""
    obs_shape, own = NETWORKS[network]
    learner = make_learner(name, obs_shape, target_network_frequency=7, **own)
    layers, target = (random_layers(seed, obs_shape, (8, 8), 3) for seed in (3, 4))
    batches = [random_batch(seed, 32, int(np.prod(obs_shape)), 3) for seed in range(50)]
    rates = np.geomspace(1e-2, 1e-3, 50).astype("f")
    learner.set_weights(layers, target)
    losses, results = [], []
    for batch, rate in zip(batches, rates.tolist(), strict=True):
        losses.append(learner.update(batch, rate))
        if len(losses) in (1, 49, 50):
            weights = (dqn.flatten(x) for x in (learner.get_weights(), learner.get_target()))
            results.append((*weights, np.array(losses)))
    args = learner.args, obs_shape
    counts = (1, 49, 50)
    expected = [dqn.train(layers, target, batches[:n], rates[:n], *args) for n in counts]
    return dqn.flatten(layers), counts, results, expected


@EACH
@pytest.mark.parametrize("network", NETWORKS)
def test_updates_equal_numpy_and_each_other(name, network):
    tolerance = 2e-5 if name in TORCH_PAIR else 1e-6
    before, *results = updated(name, network)
    of_first = updated(DQN_SCRIPTS[0], network)[2]
    for count, actual, expected, first in zip(*results, of_first, strict=True):
        weights, target, _ = actual
        assert np.abs(weights - before).max() > (5e-3 if count == 1 else 5e-2)
        assert (weights == target).all() == (count == 49)  # copied every 7 updates
        for x, numpy, theirs in zip(actual, expected, first, strict=True):
            np.testing.assert_allclose(x, numpy, rtol=1e-4, atol=2e-5)
            np.testing.assert_allclose(x, theirs, rtol=1e-5, atol=tolerance)


# === Initial weights ============================================================================
@FIRST
@pytest.mark.parametrize("obs_shape", [(400,), (10, 10, 4)])
def test_initial_weights_are_pytorchs(name, obs_shape):
    """Uniform within 1 / sqrt(inputs), as nn.Linear's and nn.Conv2d's; the target is a copy."""
    learner = make_learner(name, obs_shape, hidden_sizes=(128, 64))
    layers, target = learner.get_weights(), learner.get_target()
    np.testing.assert_array_equal(dqn.flatten(layers), dqn.flatten(target))
    assert len(layers) == (4 if len(obs_shape) == 3 else 3)
    for kernel, bias in layers:
        bound = len(kernel) ** -0.5
        assert 0.97 * bound < np.abs(kernel).max() <= bound
        assert abs(kernel.mean()) < 5 * bound / np.sqrt(3 * kernel.size)
        assert kernel.std() == pytest.approx(bound / np.sqrt(3), rel=0.1)
        assert 0.3 * bound < np.abs(bias).max() <= bound and len(set(bias)) == len(bias)
    theirs = [torch.nn.Linear(400, 500), torch.nn.Conv2d(4, 100, 3)]
    for x, inputs in zip(theirs, (400, 36), strict=True):
        for parameter in x.parameters():
            assert 0.9 * inputs**-0.5 < parameter.abs().max().item() <= inputs**-0.5


# === Replay =====================================================================================
def numbered(start, num_envs):
    """Transitions that tell their number, in every field."""
    numbers = np.arange(start, start + num_envs)
    obs = numbers[:, None] + np.array([0, 0.25, 0.5, 0.75])
    fields = obs, numbers % 97, 2 * numbers, numbers % 3 == 0, obs + 1000
    return tuple(x.astype(y) for x, y in zip(fields, "fif?f", strict=True))


@FIRST
@pytest.mark.parametrize(("num_envs", "buffer_size"), [(1, 7), (3, 12), (4, 4)])
def test_the_replay_holds_the_latest_steps_and_no_batch_another_row(name, num_envs, buffer_size):
    """Rows that nothing was written to are NaN."""
    flags = {"num_envs": num_envs, "buffer_size": buffer_size, "num_steps": 8}
    learner, ring = make_learner(name, VECTOR, **flags), {}
    learner.spoil_replay()
    sample, seen = learner.sampler(32), set()
    for _ in range(3):
        plan = learner.plan()
        for row, num_rows in zip(plan.row.tolist(), plan.num_rows.tolist(), strict=True):
            start = num_envs * (len(ring) // num_envs)
            transition = numbered(start, num_envs)
            learner.add(transition, row)
            for i in range(num_envs):
                ring[start + i] = [x[i] for x in transition]
            latest = list(ring)[-buffer_size:]
            places = [number % buffer_size for number in latest]
            for i, field in enumerate(learner.replayed()):
                np.testing.assert_array_equal(field[places], [ring[x][i] for x in latest])
            assert np.isnan(learner.replayed()[0]).any() == (len(latest) < buffer_size)
            drawn = set()
            for _ in range(3):
                for fields in zip(*sample(num_rows), strict=True):
                    number = int(fields[2]) // 2
                    drawn.add(number)
                    for x, expected in zip(fields, ring[number], strict=True):
                        np.testing.assert_array_equal(x, expected)
            assert drawn <= set(latest)
            assert len(drawn) > 0.6 * len(latest)
            seen |= drawn
    assert len(seen) > 0.95 * len(ring)


@FIRST
def test_batches_are_drawn_uniformly(name):
    learner = make_learner(name, VECTOR, buffer_size=40)
    for row in range(0, 40, 4):
        learner.add(numbered(row, 4), row)
    counts = np.zeros(40)
    sample = learner.sampler(1000)
    for _ in range(20):
        rewards = sample(30)[2]
        counts += np.bincount(rewards.astype(int) // 2, minlength=40)
    assert not counts[30:].any()
    chi_square = ((counts[:30] - 20000 / 30) ** 2 / (20000 / 30)).sum()
    assert abs(chi_square - 29) < 5 * np.sqrt(2 * 29)


@EACH
def test_minatars_observations_are_kept_as_bytes(name):
    breakout = "MinAtar/Breakout-v0" if "gymnasium" in name else "Breakout-MinAtar"
    for env_id, kind in (("CartPole-v1", "float32"), (breakout, "bool")):
        learner = make_learner(name, (10, 10, 4), env_id=env_id)
        assert [str(x.dtype) for x in learner.replayed()] == [
            kind,
            *["int32", "float32", "bool"],
            kind,
        ]
        batch = learner.sampler(2)(1)
        assert [str(x.dtype) for x in batch] == ["float32", "int32", "float32", "bool", "float32"]


# === Schedules ==================================================================================
def plans(name, num_envs=4, num_steps=16, iterations=10, **flags):
    """The script, its Args, and the plans of all iterations."""
    sizes = {"num_envs": num_envs, "num_steps": num_steps, "buffer_size": 32 * num_envs}
    sizes["total_timesteps"] = num_envs * num_steps * iterations
    script = importlib.import_module(name)
    args = script.Args(**dqn.SMALL | sizes | flags)
    return [script.make_plan(i, args) for i in range(iterations)]


@EACH
@pytest.mark.parametrize(
    ("learning_starts", "exploration_steps"), [(0, 1), (32, 320), (33, 7), (10**6, 5)]
)
def test_epsilon_falls_linearly_from_when_learning_starts(name, learning_starts, exploration_steps):
    flags = {"learning_starts": learning_starts, "exploration_steps": exploration_steps}
    expected = []
    for step in range(0, 640, 4):
        done = step - learning_starts
        if done <= 0:
            expected.append(0.9)
        elif done >= exploration_steps:
            expected.append(0.1)
        else:
            expected.append(0.9 - 0.8 * done / exploration_steps)
    actual = [plan.epsilon for plan in plans(name, start_e=0.9, end_e=0.1, **flags)]
    assert actual[0].dtype == np.float32
    np.testing.assert_allclose(np.concatenate(actual), expected, atol=1e-7)


@EACH
@pytest.mark.parametrize("anneal_lr", [False, True])
def test_learning_rate_by_iteration(name, anneal_lr):
    for i, plan in enumerate(plans(name, anneal_lr=anneal_lr, learning_rate=0.5)):
        expected = 0.5 * (1 - i / 10) if anneal_lr else 0.5
        assert plan.learning_rate.dtype == np.float32 and plan.learning_rate.shape == (16,)
        np.testing.assert_allclose(plan.learning_rate, expected, rtol=1e-6)


RATIOS = [("12.8", 128, 7), ("1", 3, 0), ("0.1", 7, 33), ("32", 32, 1), ("5.3", 1, 100)]
RATIOS += [("0", 4, 0), ("1e-05", 1, 0), (repr(1 / 3), 10, 17), (repr(0.1 + 0.2), 32, 5)]


@EACH
@pytest.mark.parametrize(("replay_ratio", "batch_size", "learning_starts"), RATIOS)
def test_updates_are_as_many_as_the_replay_ratio_says(
    name, replay_ratio, batch_size, learning_starts
):
    """After every step, whatever num_envs; what one iteration did not do, the next does."""
    ratio = Fraction(Decimal(replay_ratio)) / batch_size
    for num_envs in (1, 3, 8, 100):
        flags = {"replay_ratio": float(replay_ratio), "batch_size": batch_size}
        flags["learning_starts"] = learning_starts
        total = steps = 0
        for plan in plans(name, num_envs, **flags):
            for before, now in zip(plan.updates_before, plan.num_updates, strict=True):
                assert before == total
                total, steps = total + int(now), steps + num_envs
                assert total == max(steps - learning_starts, 0) * ratio // 1


@EACH
@pytest.mark.parametrize("replay_ratio", [12.8, 1 / 3])
def test_updates_of_the_longest_run(name, replay_ratio):
    """Nothing overflows at the end of two thousand million steps."""
    script = importlib.import_module(name)
    args = script.Args(total_timesteps=2**31 - 1, replay_ratio=replay_ratio)
    plan = script.make_plan(args.num_iterations - 1, args)
    steps = args.num_iterations * 5000
    expected = (steps - 10_000) * Fraction(Decimal(repr(replay_ratio))) / 128 // 1
    assert plan.updates_before[-1] + plan.num_updates[-1] == expected
    assert plan.num_rows[-1] == 10_000 and plan.row[-1] == (steps - 8) % 10_000


# === Target copies ==============================================================================
@EACH
def test_targets_are_copied_every_so_many_updates(name):
    """1, 3, 4, 6, 7, ... of them are done after a step, a copy being due every 2."""
    flags: dict[str, Any] = {"num_steps": 1, "total_timesteps": 64, "learning_starts": 8}
    flags |= {"replay_ratio": 6.0, "target_network_frequency": 2}
    learner, updates = make_learner(name, learning_rate=1e-2, **flags), 0
    target = dqn.flatten(learner.get_target())
    for _ in range(16):
        before, metrics = updates, learner.iterate()
        updates += int(metrics[8])
        weights, old = dqn.flatten(learner.get_weights()), target
        target = dqn.flatten(learner.get_target())
        assert (target != old).any() == (updates // 2 > before // 2)
        if updates:
            assert (target == weights).all() == (updates % 2 == 0)
    assert updates == (64 - 8) * 6 // 16

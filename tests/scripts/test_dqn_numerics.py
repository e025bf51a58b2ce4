"""DQN: compare updates, initial weights, replay and schedules with the papers and PyTorch."""

import importlib
from typing import Any

import dqn
import numpy as np
import pytest
from dqn import AGENTS, REPLAYS, Replay, make_learner, random_batch

VECTOR, IMAGE = (4,), (5, 4, 2)
EACH_AGENT = pytest.mark.parametrize("name", AGENTS)
EACH_REPLAY = pytest.mark.parametrize("name", REPLAYS)


# === Loss and update ============================================================================
CASES = [
    (VECTOR, "--loss mse --optimizer adam --optimizer-eps 0.01"),
    (IMAGE, "--loss huber --optimizer rmsprop --optimizer-eps 0.01 --rmsprop-decay 0.8 --double-q"),
]


@EACH_AGENT
@pytest.mark.parametrize(("obs_shape", "flags"), CASES)
def test_updates_match_the_reference(name, obs_shape, flags):
    """Compare 50 updates with a changing learning rate. One input is 0, so some gradients are 0."""
    learner = make_learner(name, obs_shape, f"{flags} --target-network-frequency 7")
    layers, _ = learner.layers()
    batches = [random_batch(seed, 32, obs_shape, 3) for seed in range(50)]
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
def test_initial_weights_are_as_in_pytorch(name):
    """Weights are uniform within 1 / sqrt(inputs), as in nn.Linear; the target is a copy."""
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


@EACH_AGENT
def test_uint8_observations_are_cast_to_float32(name):
    obs = np.random.default_rng(0).integers(0, 256, (20, *IMAGE), np.uint8)
    _, action, reward, terminated, _ = random_batch(0, 20, IMAGE, 3)
    bytes_, floats = (make_learner(name, IMAGE, "") for _ in range(2))
    bytes_.update((obs, action, reward, terminated, obs), 1e-3)
    obs = obs.astype("f")
    floats.update((obs, action, reward, terminated, obs), 1e-3)
    for x, other in zip(bytes_.layers(), floats.layers(), strict=True):
        np.testing.assert_array_equal(dqn.flat(x), dqn.flat(other))


# === Replay =====================================================================================
def steps(first: int, kind: Any = "f", count: int = 10) -> tuple:
    """Return `count` transitions. Actions are numbered from `first` and determine all fields."""
    number = np.arange(first, first + count)
    obs = number[:, None] + np.array([0, 1, 2, 3])
    fields = obs, number, 2 * number, number % 3 == 0, obs + 100
    kinds = (kind, "i", "f", "?", kind)
    return tuple(x.astype(kind) for x, kind in zip(fields, kinds, strict=True))


@EACH_REPLAY
@pytest.mark.parametrize("num_adds", [3, 4, 6])  # partly filled, full, half overwritten
def test_batches_are_uniform_samples_of_the_latest_transitions(name, num_adds):
    replay = Replay(name, "--num-envs 10 --buffer-size 40")
    for i in range(num_adds):
        replay.add(steps(10 * i))
    counts = np.zeros(10 * num_adds)
    for seed in range(20):
        batch = replay.sample(seed, 1000)
        for field, expected in zip(batch, steps(0, count=10 * num_adds), strict=True):
            np.testing.assert_array_equal(field, expected[batch[1]], strict=True)
        counts += np.bincount(batch[1], minlength=len(counts))
    assert not counts[:-40].any()
    counts = counts[-40:]
    chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert abs(chi_square - (len(counts) - 1)) < 5 * np.sqrt(2 * (len(counts) - 1))


@EACH_REPLAY
@pytest.mark.parametrize("kind", ["uint8", "bool"])
def test_the_replay_keeps_the_dtype_of_observations(name, kind):
    replay = Replay(name, "--num-envs 10 --buffer-size 40", obs_dtype=kind)
    replay.add(steps(0, kind))
    obs, number, _, _, next_obs = replay.sample(1, 100)
    expected = steps(0, kind)
    np.testing.assert_array_equal(obs, expected[0][number], strict=True)
    np.testing.assert_array_equal(next_obs, expected[4][number], strict=True)
    assert obs.dtype == kind


@EACH_REPLAY
def test_the_replay_keeps_the_shape_of_observations(name):
    replay = Replay(name, "--num-envs 10 --buffer-size 40", (2, 2, 1), "uint8")
    obs, *others, next_obs = steps(0, "uint8")
    obs, next_obs = (x.reshape(10, 2, 2, 1) for x in (obs, next_obs))
    replay.add((obs, *others, next_obs))
    batch = replay.sample(1, 100)
    np.testing.assert_array_equal(batch[0], obs[batch[1]], strict=True)
    np.testing.assert_array_equal(batch[4], next_obs[batch[1]], strict=True)


@pytest.mark.parametrize("name", [x for x in REPLAYS if "torch" in x])
def test_a_saved_replay_contains_only_the_part_in_use(name):
    """torch.save writes the entire storage of a tensor, even if the tensor is a slice of it."""
    replay = Replay(name, "--num-envs 10 --buffer-size 40")
    replay.add(steps(0))
    for saved in replay.replay.state_dict()["transitions"].values():
        assert saved.untyped_storage().nbytes() == saved.nbytes


@EACH_REPLAY
@pytest.mark.parametrize(
    ("num_envs", "train_frequency", "learning_starts"),
    [(1, 10, 7), (3, 1, 33), (100, 7, 100), (3, 1000, 0)],
)
def test_an_update_follows_every_train_frequency_environment_steps(
    name, num_envs, train_frequency, learning_starts
):
    """Steps are counted from learning_starts, for any num_envs."""
    flags = f"--train-frequency {train_frequency} --num-envs {num_envs} "
    flags += f"--learning-starts {learning_starts} --buffer-size {32 * num_envs} "
    flags += f"--total-timesteps {160 * num_envs}"
    replay = Replay(name, flags)
    for step in range(160):
        numbers = range(step * num_envs + 1, (step + 1) * num_envs + 1)  # one per environment
        counted = [x - learning_starts for x in numbers if x > learning_starts]
        due = replay.updates_due((step + 1) * num_envs)
        assert due == sum(x % train_frequency == 0 for x in counted)


# === Epsilon, the same function in all scripts ==================================================
def test_epsilon_decays_linearly_after_learning_starts():
    args = dqn.args_of("dqn_linen", "--start-e 0.9 --end-e 0.1 --learning-starts 100")
    for steps, expected in [(0, 0.9), (100, 0.9), (180, 0.7), (260, 0.5), (420, 0.1), (10**6, 0.1)]:
        epsilon = importlib.import_module("dqn_linen").epsilon_after(steps, args)
        assert epsilon == pytest.approx(expected)


def test_without_exploration_steps_epsilon_is_final_once_learning_starts():
    flags = "--start-e 0.9 --end-e 0.1 --learning-starts 100 --exploration-steps 0"
    args = dqn.args_of("dqn_linen", flags)
    epsilon_after = importlib.import_module("dqn_linen").epsilon_after
    assert [epsilon_after(x, args) for x in (0, 99, 100, 10**6)] == [0.9, 0.9, 0.1, 0.1]

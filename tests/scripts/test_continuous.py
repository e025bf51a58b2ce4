"""PPO with continuous actions: compare its arithmetic with NumPy in float64.

If scripts share a section, some tests use only one of them.
"""

import importlib
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import reference
import torch
import tyro
from frameworks import (
    LEARNERS,
    OTHER_FLAGS,
    assert_orthogonal,
    converter,
    next_rate,
    random_weights,
    weights_in,
)
from probes import HIGH, LOW, best_action, nearness
from running import AIM, BATCH, SMALL, arrays, content, op_by_op, train
from scipy.stats import norm
from sections import (
    CONTINUOUS_IN_GYMNASIUM,
    CONTINUOUS_IN_GYMNAX,
    CONTINUOUS_IN_JAX,
    CONTINUOUS_IN_TORCH,
    CONTINUOUS_SCRIPTS,
    but,
    stand_ins,
)

OBS_DIM, ACTION_DIM = 3, 2
EACH = pytest.mark.parametrize("name", CONTINUOUS_SCRIPTS)


def make_learner(name: str, **flags: Any) -> Any:
    """Return a learner with the flags of whole_run, so that it uses the same compiled functions."""
    script: Any = importlib.import_module(name)
    words = [*SMALL.split(), *AIM.split(), "--total-timesteps", str(BATCH)]
    return LEARNERS[name](script, replace(tyro.cli(script.Args, args=words), **flags))


def random_gaussian(seed: int) -> dict:
    log_std = np.random.default_rng(seed).normal(-0.5, 0.3, ACTION_DIM).astype("f")
    return random_weights(seed, OBS_DIM, (8, 8), ACTION_DIM) | {"log_std": [(log_std,)]}


def random_storage(seed: int, end_rate: float = 0.15) -> tuple:
    """Return a random Storage. The means are not 0, and some values are so large that they clip."""
    rng = np.random.default_rng(seed)
    shape = (32, 4)
    obs, next_obs = rng.normal(5, 3, (2, *shape, OBS_DIM)) * rng.choice([1, 9], (*shape, 1))
    reward = np.where(rng.random(shape) < 0.1, 100, rng.normal(3, 2, shape))
    return (
        obs.astype("f"),
        rng.normal(size=(*shape, ACTION_DIM)).astype("f"),
        rng.normal(-2, 0.3, shape).astype("f"),
        reward.astype("f"),
        rng.random(shape) < end_rate,
        rng.random(shape) < end_rate,
        next_obs.astype("f"),
        rng.normal(size=shape).astype("f"),
        rng.integers(1, 9, shape).astype("f"),
        rng.normal(20, 4, shape).astype("f"),
    )


# === Statistics =================================================================================
@pytest.mark.parametrize("name", stand_ins("Statistics", CONTINUOUS_SCRIPTS))
@pytest.mark.parametrize("offset", [0, 1000])
@pytest.mark.parametrize("num_envs", [1, 64])
def test_statistics_cover_all_rollouts(name, offset, num_envs):
    """Compare with NumPy, for a distribution that changes between rollouts."""
    script: Any = importlib.import_module(name)
    rng = np.random.default_rng(0)
    rollouts = [rng.normal(offset + i, 1 + i, (256, OBS_DIM)).astype("f") for i in range(12)]
    if name in CONTINUOUS_IN_TORCH:
        stats = script.RunningMeanStd((OBS_DIM,))
    else:
        stats = script.make_stats((OBS_DIM,)).obs
    for rows in rollouts:
        x = converter(script)(rows.reshape(-1, num_envs, OBS_DIM))
        if name in CONTINUOUS_IN_TORCH:
            stats.update(x)
        else:
            stats = script.merge(stats, x)
    mean, var = reference.moments([x[None] for x in rollouts])
    np.testing.assert_allclose(stats.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(stats.var, var, rtol=1e-5)
    assert stats.count == 12


def test_statistics_change_in_place():
    """A CUDA graph of the policy always reads the same memory, so no tensor may be replaced."""
    stats: Any = importlib.import_module(CONTINUOUS_IN_TORCH[0]).RunningMeanStd((OBS_DIM,))
    places = [x.data_ptr() for x in stats.buffers()]
    stats.update(torch.randn(8, 2, OBS_DIM))
    stats.load_state_dict({name: x + 1 for name, x in stats.state_dict().items()})
    assert [x.data_ptr() for x in stats.buffers()] == places


# === Arithmetic =================================================================================
FLAGS: dict[str, dict[str, Any]] = {
    "usual": {"anneal_lr": True},
    "others": OTHER_FLAGS | {"norm_obs": False, "norm_reward": False},
}
UPDATES = [(name, "usual") for name in stand_ins("Update", CONTINUOUS_SCRIPTS)]
UPDATES += [("ppo_continuous_linen", "others"), ("ppo_continuous_torch_gymnasium", "others")]


@pytest.fixture(scope="module", params=UPDATES, ids=" ".join)
def learner(request):
    """Share a learner among tests with the same script and flags: creating one takes seconds."""
    name, flags = request.param
    learner = make_learner(name, **FLAGS[flags])
    learner.initial_weights = learner.get_weights()
    return learner


def test_initial_weights_are_orthogonal_and_scaled(learner):
    assert_orthogonal(learner.initial_weights["actor"], [2**0.5, 2**0.5, 0.01])
    assert_orthogonal(learner.initial_weights["critic"], [2**0.5, 2**0.5, 1])
    assert not learner.initial_weights["log_std"][0][0].any()


def test_loss_and_gradient_equal_numpy(learner):
    weights = random_gaussian(0)
    learner.set_weights(weights)
    obs, action, logprob = (x.reshape(128, *x.shape[2:]) for x in random_storage(2)[:3])
    batch = (obs / 10, action, logprob, *np.random.default_rng(1).normal(size=(3, 128)).astype("f"))
    loss, losses, grads = learner.loss_and_grads(batch)
    expected_loss, expected_losses = reference.ppo_loss(weights, batch, learner.args)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert losses == pytest.approx(expected_losses, rel=1e-5, abs=1e-6)
    expected_grads = reference.gradient(weights, batch, learner.args)
    np.testing.assert_allclose(reference.flatten(grads), expected_grads, rtol=1e-3, atol=1e-5)


def test_update_equals_numpy(learner):
    """The statistics of the previous rollout normalize obs; logged returns are not scaled."""
    before, storage, weights = random_storage(3), random_storage(4), random_gaussian(3)
    learner.set_weights(weights)
    learner.watch(before)
    normalized = reference.normalized(storage, [before], learner.args)
    expected, metrics = reference.update(weights, normalized, learner.orders(5), learner.args)
    assert learner.update(storage, 5) == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    actual = reference.flatten(learner.get_weights())
    np.testing.assert_allclose(actual, reference.flatten(expected), atol=1e-5)
    (stats,) = learner.stats
    for found, place in ((stats.obs, 0), (stats.discounted_return, 9)):
        mean, var = reference.moments([before[place], storage[place]])
        np.testing.assert_allclose(found.mean, mean, rtol=1e-5)
        np.testing.assert_allclose(found.var, var, rtol=1e-5)
    assert learner.update(storage, 5)["charts/learning_rate"] == next_rate(learner.args)


@pytest.mark.parametrize("limit", [0.1, 1e3])
def test_the_compiled_script_clips_only_gradients_above_the_limit(limit):
    """The other scripts clip with a function of their framework.

    With such a large epsilon, the first step of Adam subtracts the clipped gradient.
    """
    flags = {"adam_eps": 1e4, "learning_rate": 1e4, "update_epochs": 1, "num_minibatches": 1}
    name = "ppo_continuous_torch_compile_gymnasium"
    learner = make_learner(name, max_grad_norm=limit, **flags)
    before, storage, weights = random_storage(3), random_storage(4), random_gaussian(3)
    learner.set_weights(weights)
    learner.watch(before)
    normalized = reference.normalized(storage, [before], learner.args)
    expected, _ = reference.update(weights, normalized, learner.orders(5), learner.args)
    change = np.linalg.norm(reference.flatten(expected) - reference.flatten(weights))
    assert change == pytest.approx(limit, 1e-3) if limit < 1 else 1 < change < limit
    learner.update(storage, 5)
    actual = reference.flatten(learner.get_weights())
    np.testing.assert_allclose(actual, reference.flatten(expected), atol=1e-5)


# === Rollouts ===================================================================================
@cache
def two_rollouts(name: str) -> tuple[Any, list]:
    """Return a learner and two rollouts; the second one uses the statistics of the first."""
    learner = make_learner(name)
    learner.set_weights(random_gaussian(1))
    storages = []
    for seed in (1, 2):
        storages.append(tuple(map(np.asarray, learner.rollout(seed))))
        learner.watch(storages[0])
    return learner, storages


@EACH
def test_transitions(name):
    """VecEnv maps actions to the bounds. Storage keeps unclipped actions and unscaled rewards."""
    learner, storages = two_rollouts(name)
    storage = learner.script.Storage(*map(np.concatenate, zip(*storages, strict=True)))
    signal, far, step = np.moveaxis(storage.obs, -1, 0)
    ended = np.arange(64)[:, None] % 2 * np.ones(4) == 1  # True in every second step
    assert set(signal.ravel()) == {-1, 1} and (far == 1000 + signal).all()
    np.testing.assert_array_equal(storage.truncated, ended)
    assert not storage.terminated.any()
    np.testing.assert_array_equal(step, ended)
    final = np.stack([signal, far, step + 1], -1)  # not the first obs of the next episode
    np.testing.assert_array_equal(storage.next_obs, final)
    assert (abs(storage.action) > 1.1).mean() > 0.1
    in_bounds = LOW + (HIGH - LOW) * (np.clip(storage.action, -1, 1) + 1) / 2
    reward = nearness(signal[..., None], in_bounds)
    np.testing.assert_allclose(storage.reward, reward, atol=1e-5)
    for found, weight in ((storage.episode_return, 1), (storage.discounted_return, 0.5)):
        expected = reward.copy()
        expected[1::2] += weight * reward[::2]
        np.testing.assert_allclose(found, expected, atol=1e-5)


@EACH
def test_actions_are_sampled_with_the_statistics_of_earlier_rollouts(name):
    """Before the first update, all ratios are 1, so even clip_coef 1e-5 clips none."""
    learner, storages = two_rollouts(name)
    weights = random_gaussian(1)
    learner.args = replace(learner.args, clip_coef=1e-5)
    for earlier, storage in ([], storages[0]), (storages[:1], storages[1]):
        obs, action, logprob = (x.reshape(128, -1) for x in storage[:3])
        mean, var = reference.moments([x[0] for x in earlier]) if earlier else (0, 1)
        obs = np.clip((obs - mean) / np.sqrt(var + 1e-8), -10, 10)
        middle = reference.forward(weights["actor"], obs)
        noise = (action - middle) / np.exp(weights["log_std"][0][0])
        assert abs(noise.mean()) < 5 / np.sqrt(256) and 0.75 < noise.std() < 1.25
        expected, _ = reference.log_prob_and_entropy(weights, obs, action)
        np.testing.assert_allclose(logprob[:, 0], expected, atol=1e-5)
        values = np.zeros((3, 128), "f")
        _, losses, _ = learner.loss_and_grads((obs.astype("f"), action, logprob[:, 0], *values))
        assert losses["losses/clip_fraction"] == 0


@pytest.mark.parametrize("names", [CONTINUOUS_IN_GYMNAX, CONTINUOUS_IN_GYMNASIUM])
def test_rollouts_in_jax_are_exactly_equal(names):
    first, *others = (name for name in names if name in CONTINUOUS_IN_JAX)
    assert others
    for name in others:
        for storage, expected in zip(two_rollouts(name)[1], two_rollouts(first)[1], strict=True):
            for values, same in zip(storage, expected, strict=True):
                np.testing.assert_array_equal(values, same, err_msg=name)


@pytest.mark.parametrize("name", stand_ins("Environment", CONTINUOUS_SCRIPTS))
def test_to_bounds_maps_and_clips(name):
    action = np.array([[-1, 1], [0, 0], [1, -1], [0.5, -0.5], [-7, 7]], "f")
    found = importlib.import_module(name).to_bounds(action, LOW, HIGH)
    np.testing.assert_allclose(found, [[-1, 10], [1, 5], [3, 0], [2, 2.5], [-1, 10]])


# === Complete runs ==============================================================================
@pytest.mark.parametrize("name", but(CONTINUOUS_SCRIPTS, "ppo_continuous_nnx_gymnasium"))
def test_training_finds_the_best_actions(name, tmp_path, monkeypatch):
    """load_policy returns the actions in the units of the environment.

    test_nnx_gives_the_same_numbers_as_linen covers the script that is left out.
    """
    op_by_op(monkeypatch, importlib.import_module(name))
    folder = train(name, tmp_path, "run", *AIM.split(), iterations=80)
    signal = np.array([[-1.0], [1.0]])
    obs = np.concatenate([signal, 1000 + signal, [[0], [1]]], 1)
    action = importlib.import_module(name).load_policy(folder)(obs)
    assert (abs(action - best_action(signal)) < 0.1 * (HIGH - LOW)).all()


def gaussians(folder: Path, obs: np.ndarray) -> Any:
    """Return the distributions of actions for obs (N, OBS_DIM), before scaling to the bounds."""
    saved, weights = arrays(folder), weights_in(folder)
    mean, var = saved.get("1"), saved.get("2")  # in Equinox, names are numbers
    for place, x in saved.items():
        if re.search("stats/obs[/.]mean", place):
            mean = x
        if re.search("stats/obs[/.]var", place):
            var = x
    assert mean is not None and var is not None
    inputs = np.clip((obs - mean) / np.sqrt(var + 1e-8), -10, 10)
    return norm(reference.forward(weights["actor"], inputs), np.exp(weights["log_std"][0][0]))


@EACH
def test_load_policy_uses_the_weights_and_statistics_of_the_checkpoint(name, whole_run):
    """The policy returns the mean or, with sample=True, a sample determined by the seed."""
    folder = whole_run(name).folder
    before = content(folder)
    load_policy = importlib.import_module(name).load_policy
    obs = np.random.default_rng(0).normal((0, 1000, 1), (1, 1, 1), (300, OBS_DIM)).astype("f")
    expected = LOW + (HIGH - LOW) * (gaussians(folder, obs).mean().clip(-1, 1) + 1) / 2
    policy = load_policy(folder)
    for _ in range(2):
        np.testing.assert_allclose(policy(obs), expected, atol=1e-3)
    obs = np.tile(obs[:1], (20_000, 1))
    draws = [load_policy(folder, seed=x)(obs, sample=True) for x in (1, 1, 2)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).any()
    assert ((draws[0] >= LOW) & (draws[0] <= HIGH)).all()
    for bound in (-0.6, 0.0, 0.6):  # compare the fraction below, within five standard errors
        share = gaussians(folder, obs[:1]).cdf(bound)
        drawn = (draws[0] < LOW + (HIGH - LOW) * (bound + 1) / 2).mean(0)
        assert (abs(drawn - share) <= 5 * np.sqrt(share * (1 - share) / 20_000) + 1e-4).all()
    assert content(folder) == before


# === Bounds =====================================================================================
class Narrow(gymnasium.Env):
    """An environment that rejects actions outside its bounds, which are not exact in binary."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    actions: ClassVar[list[np.ndarray]] = []  # taken in all instances

    def __init__(self, dtype: str) -> None:
        low, high = np.array([-0.1, 0.1], dtype), np.array([0.1, 0.4], dtype)
        self.action_space = gymnasium.spaces.Box(low, high, dtype=low.dtype.type)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: np.ndarray) -> tuple:
        assert self.action_space.contains(action), action
        Narrow.actions.append(action.copy())
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CONTINUOUS_IN_GYMNASIUM)
def test_actions_are_inside_bounds_that_are_not_exact(name, dtype, tmp_path, monkeypatch):
    """Actions in training and from load_policy reach each bound, but never exceed it."""
    script: Any = importlib.import_module(name)
    monkeypatch.setattr(Narrow, "actions", [])
    op_by_op(monkeypatch, script)
    entry_point: Any = Narrow
    spec = gymnasium.envs.registration.EnvSpec("Narrow-v0", entry_point, max_episode_steps=8)
    spec.kwargs["dtype"] = dtype
    monkeypatch.setitem(gymnasium.registry, "Narrow-v0", spec)
    folder = train(name, tmp_path, "run", "--env-id", "Narrow-v0", iterations=2)
    policy = script.load_policy(folder)
    obs = np.zeros((500, 1), np.float32)
    space: Any = Narrow(dtype).action_space
    assert all(map(space.contains, [*policy(obs), *policy(obs, sample=True)]))
    for actions in (np.array(Narrow.actions), policy(obs, sample=True)):
        np.testing.assert_array_equal(actions.min(0), space.low, strict=True)
        np.testing.assert_array_equal(actions.max(0), space.high, strict=True)

"""VecEnv and rollout: transitions in every environment of the benchmark."""

from functools import cache
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import probes
import pytest
import reference
from frameworks import make_learner
from gymnax.environments import spaces
from sections import stand_ins

import ppo_linen
import ppo_rnn_linen

ROLLOUTS = stand_ins("Rollout")
ENV_IDS = {  # env_id -> obs_shape, num_actions
    "CartPole-v1": ((4,), 2),
    "Acrobot-v1": ((6,), 3),
    "MountainCar-v0": ((2,), 3),
    "DiscountingChain-bsuite": ((2,), 5),
    "MemoryChain-bsuite": ((3,), 2),
    "GaussianBandit-misc": ((4,), 2),
    "Asterix-MinAtar": ((10, 10, 4), 5),
    "Breakout-MinAtar": ((10, 10, 4), 3),
    "Freeway-MinAtar": ((10, 10, 7), 3),
    "SpaceInvaders-MinAtar": ((10, 10, 6), 4),
}


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_shapes_and_types_never_change(env_id):
    """step() returns a state with unchanged shapes and types, so JAX compiles it only once."""
    env = ppo_linen.VecEnv(env_id, 3)
    assert (env.obs_shape, env.num_actions) == ENV_IDS[env_id]
    obs, state = jax.eval_shape(env.reset, jax.random.key(0))
    action = jax.ShapeDtypeStruct((3,), jnp.int32)
    next_obs, next_state, result = jax.eval_shape(env.step, state, action)

    def kinds(tree):
        return jax.tree.map(lambda x: (x.shape, str(x.dtype), x.weak_type), tree)

    assert kinds((obs, state)) == kinds((next_obs, next_state))
    assert obs.shape == (3, *env.obs_shape)
    assert result["next_obs"].shape == obs.shape and result["next_obs"].dtype == obs.dtype
    assert set(result) == set(ppo_linen.Storage._fields[3:])
    flags = {name for name, x in result.items() if x.dtype == jnp.bool_}
    assert flags == {"terminated", "truncated"}
    numbers = result.keys() - flags - {"next_obs"}
    assert {result[name].dtype for name in numbers} == {jnp.dtype("float32")}


class NumpyActions(probes.Probe):
    def action_space(self, params: Any) -> spaces.Discrete:
        return spaces.Discrete(np.prod([3, 2]))


def test_the_number_of_actions_can_be_written_to_run_json():
    gymnax.register("NumpyActions-v0", NumpyActions)
    assert type(ppo_linen.VecEnv("NumpyActions-v0", 1).num_actions) is int


def test_environments_differ_from_each_other_and_between_seeds():
    first, second = (ppo_linen.VecEnv("CartPole-v1", 4).reset(jax.random.key(s)) for s in (1, 2))
    rows = np.concatenate([first[0], second[0]])
    assert len(np.unique(rows, axis=0)) == 8


@cache
def two_rollouts(name):
    """Return weights that prefer action 1 in CartPole, and 128 steps of 4 environments."""
    learner = make_learner(name, num_steps=64)
    weights = learner.get_weights()
    kernel, _ = weights["actor"][-1]
    weights["actor"][-1] = kernel, np.array([0.0, 1.0], "f")
    learner.set_weights(weights)
    rollouts = [map(np.asarray, learner.rollout(seed)) for seed in (1, 2)]
    steps = map(np.concatenate, zip(*rollouts, strict=True))
    return weights, ppo_linen.Storage(*steps)


@pytest.mark.parametrize("name", ROLLOUTS)
def test_transitions(name):
    """Each transition equals a step of CartPole without auto-reset from the same state."""
    _, storage = two_rollouts(name)
    done = storage.terminated | storage.truncated
    assert done.any() and not done.all()
    # next_obs is the next obs, even across two rollouts, unless an episode ended.
    same = (storage.next_obs[:-1] == storage.obs[1:]).all(-1)
    np.testing.assert_array_equal(same, ~done[:-1])
    assert (np.abs(storage.obs[1:][done[:-1]]) <= 0.05).all()  # CartPole starts near 0

    env, params = gymnax.make("CartPole-v1")
    x, x_dot, theta, theta_dot = np.moveaxis(storage.obs, -1, 0)
    zeros: Any = jnp.zeros(x.shape, jnp.int32)  # Any, because gymnax declares int
    state = gymnax.environments.classic_control.cartpole.EnvState(
        x=x, x_dot=x_dot, theta=theta, theta_dot=theta_dot, time=zeros
    )
    step = jax.vmap(jax.vmap(lambda s, a: env.step_env(jax.random.key(0), s, a, params)))
    next_obs, _, reward, terminated, _ = step(state, storage.action)
    np.testing.assert_allclose(storage.next_obs, next_obs, atol=1e-5)
    np.testing.assert_array_equal(storage.reward, reward)
    np.testing.assert_array_equal(storage.terminated, terminated)

    total = np.zeros(4)
    for t in range(128):
        total += storage.reward[t]
        np.testing.assert_array_equal(storage.episode_return[t], total)
        np.testing.assert_array_equal(storage.episode_length[t], total)
        total[done[t]] = 0


@pytest.mark.parametrize("name", ROLLOUTS)
def test_actions_are_drawn_from_the_policy(name):
    """512 samples match their probabilities of about 0.73, within five standard errors."""
    weights, storage = two_rollouts(name)
    logits = reference.forward(weights["actor"], storage.obs.reshape(-1, 4))
    log_probs = reference.log_softmax(logits)
    action = storage.action.ravel()
    expected = log_probs[np.arange(512), action]
    np.testing.assert_allclose(storage.logprob.ravel(), expected, atol=1e-5)
    chance = np.exp(log_probs[:, 1])
    assert (np.abs(chance - 0.73) < 0.1).all()
    assert abs((action - chance).sum()) < 5 * np.sqrt((chance * (1 - chance)).sum())


@pytest.mark.parametrize("name", stand_ins("Environment"))
def test_the_time_limit_truncates_and_does_not_terminate(name):
    storage = make_learner(name, env_id="ProbeSignal-v0").rollout(1)
    assert not storage.terminated.any()
    cut = np.arange(16)[:, None] % 2 * np.ones(4) == 1
    np.testing.assert_array_equal(storage.truncated, cut)
    np.testing.assert_array_equal(storage.episode_length, cut + 1)


def test_feed_back_adds_the_last_action_and_reward_of_the_episode():
    env = ppo_rnn_linen.VecEnv("ProbeSignal-v0", 4, feed_back=True)  # episodes of two steps
    obs, state = env.reset(jax.random.key(0))
    assert env.obs_shape == (1 + 2 + 1,) and not obs[:, 1:].any()
    action = jnp.array([0, 1, 0, 1])
    for is_last in (False, True, False, True):
        obs, state, result = env.step(state, action)
        fed = np.column_stack([np.eye(2)[action], result["reward"]])
        np.testing.assert_array_equal(result["next_obs"][:, 1:], fed)
        np.testing.assert_array_equal(obs[:, 1:], 0 * fed if is_last else fed)

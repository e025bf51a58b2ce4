# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.2", "equinox==0.13.8", "optax==0.2.8", "gymnax==1.0.1", "six==1.17.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""PPO with continuous actions in JAX with Equinox.

    python more/ppo_continuous_equinox.py --env-id Pendulum-v1 --seed 1

Start reading at Statistics. The main ideas:
- Agent models each action as a Gaussian: the mean depends on the observation, log_std does not.
- VecEnv.step() maps actions from [-1, 1] to the bounds and clips them. PPO learns from the actions
  before clipping, because the Gaussian gives their density.
- normalize() uses the statistics of earlier rollouts, so in the first rollout it only clips.
- scale_reward() only divides: subtracting a mean would favor long or short episodes.
Lines marked "# sync" wait for the device.

Compare with ppo_equinox.py for discrete actions, or with ppo_continuous_linen.py for Linen.
"""

import argparse
import importlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads slow down orthogonal() for wide layers

import equinox as eqx
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from gymnax.environments.spaces import Box
from jax.nn.initializers import orthogonal
from tensorboard.summary import Writer


# === Arguments ==================================================================================
@dataclass
class Args:
    seed: int = 1  # random seed
    env_id: str = "Pendulum-v1"  # gymnax environment with continuous actions, or my_module:MyEnv
    total_timesteps: int = 204_800  # environment steps, rounded down to whole rollouts
    learning_rate: float = 3e-4  # Adam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    num_envs: int = 16  # parallel environments
    num_steps: int = 256  # steps per environment in each rollout
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 32  # minibatches per epoch
    update_epochs: int = 10  # passes over each rollout
    norm_obs: bool = True  # normalize observations by their running mean and standard deviation
    norm_reward: bool = True  # divide rewards by the running std of discounted returns
    norm_adv: bool = True  # normalize advantages in each minibatch
    clip_coef: float = 0.2  # clipping range for the probability ratio and the value
    clip_vloss: bool = True  # clip the value loss
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # maximum global norm of the gradient
    adam_eps: float = 1e-5  # Adam's epsilon
    bootstrap_truncated: bool = True  # bootstrap truncated episodes from V(final obs), not from 0
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layer sizes of the actor and the critic
    matmul_precision: Literal["medium", "high", "highest"] = "high"  # highest: no TF32 on a GPU
    sync_for_timing: bool = False  # wait for the device after each rollout, to time it separately
    runs_dir: str = "runs"  # where run folders are created
    run_name: str = ""  # name of the run folder; default {env_id}__{script}__{seed}__{time}
    track: bool = False  # log to Weights & Biases as well
    save_every: int = 0  # save a checkpoint every N iterations; 0: up to ten per run
    resume: str = ""  # run folder to continue; its arguments are kept

    def __post_init__(self) -> None:
        """Check arguments and compute derived ones. tyro reports a ValueError as a usage error."""
        if self.seed not in range(2**32):  # JAX would silently drop the upper bits
            raise ValueError("--seed must be between 0 and 2**32 - 1")
        for name in ("num_envs", "num_steps", "num_minibatches", "update_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        if not self.max_grad_norm > 0:
            raise ValueError("--max-grad-norm must be positive")
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // self.num_minibatches
        self.num_iterations = self.total_timesteps // self.batch_size
        self.num_optimizer_steps = self.num_iterations * self.update_epochs * self.num_minibatches
        if self.batch_size % self.num_minibatches != 0:
            raise ValueError(f"--num-minibatches must divide the batch size ({self.batch_size})")
        if self.num_iterations < 1:
            raise ValueError(f"--total-timesteps must be at least one batch ({self.batch_size})")
        self.hidden_sizes = tuple(self.hidden_sizes)  # a list when loaded from run.json


def parse_args() -> Args:
    """Parse the command line. With --resume, the run's arguments are the defaults."""
    return tyro.cli(Args, default=args_to_resume() or Args())


# === Environment ================================================================================
class EnvState(NamedTuple):
    key: jax.Array  # split at each step
    inner: Any  # gymnax's state, batched: N = num_envs rows in each leaf
    episode_return: jax.Array  # (N,), so far in the current episode
    episode_length: jax.Array  # (N,)
    discounted_return: jax.Array  # (N,), discounts past rewards: gamma * previous + reward


class VecEnv:
    """N = num_envs gymnax environments stepped together. Finished ones restart automatically."""

    def __init__(self, env_id: str, num_envs: int, gamma: float) -> None:
        module, _, name = env_id.partition(":")
        if name.isidentifier():  # a custom class, my_module:MyEnv; test it with envs/check.py
            sys.path.append(os.getcwd())
            self.env = getattr(importlib.import_module(module), name)()
            self.params = self.env.default_params
        elif env_id in gymnax.registered_envs:
            self.env, self.params = gymnax.make(env_id)
        else:
            hint = "use more/ppo_continuous_linen_gymnasium.py or its PyTorch version"
            fail(f"gymnax has no {env_id}. For a Gymnasium environment, {hint}")
        space = self.env.action_space(self.params)
        if not isinstance(space, Box) or not jnp.issubdtype(space.dtype, jnp.floating):
            fail(f"{env_id} has no continuous actions: use ppo_linen.py or ppo_torch.py")
        if not np.all(np.isfinite(space.low) & np.isfinite(space.high)):
            fail(f"{env_id} has unbounded actions, but this script needs finite bounds")
        self.num_envs = num_envs
        self.gamma = gamma
        self.action_space = space
        self.action_low = np.broadcast_to(np.float32(space.low), space.shape)
        self.action_high = np.broadcast_to(np.float32(space.high), space.shape)
        self.action_dim = math.prod(space.shape)
        self.obs_shape = self.env.observation_space(self.params).shape

    def reset(self, key: jax.Array) -> tuple[jax.Array, EnvState]:
        """Start all environments. Return obs (N, *obs_shape) and the state."""
        key, reset_key = jax.random.split(key)
        obs, inner = jax.vmap(self.env.reset)(jax.random.split(reset_key, self.num_envs))
        # Some environments return weakly typed arrays from reset but not from step, so a function
        # that takes them would compile twice. astype makes the types strong.
        obs, inner = jax.tree.map(lambda x: x.astype(x.dtype), (obs, inner))
        zeros = jnp.zeros(self.num_envs)
        return obs, EnvState(key, inner, zeros, zeros, zeros)

    def step(self, state: EnvState, action: jax.Array) -> tuple[jax.Array, EnvState, dict]:
        """Map action (N, action_dim) from [-1, 1] to the bounds, clip it, and step.

        Return obs (after any restart), the state and the results.
        """
        action = action.reshape(self.num_envs, *self.action_space.shape)
        action = to_bounds(action, self.action_low, self.action_high)
        key, step_key = jax.random.split(state.key)
        keys = jax.random.split(step_key, self.num_envs)
        # gymnax restarts finished environments in the same step.
        step = jax.vmap(partial(self.env.step, params=self.params))
        obs, inner, reward, terminated, truncated, info = step(keys, state.inner, action)
        reward = reward.astype(jnp.float32)
        episode_return = state.episode_return + reward
        episode_length = state.episode_length + 1
        discounted_return = self.gamma * state.discounted_return + reward
        results = {
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "next_obs": info["final_observation"],  # before any restart; present at every step
            "episode_return": episode_return,
            "episode_length": episode_length,
            "discounted_return": discounted_return,
        }
        done = terminated | truncated
        episode_return = jnp.where(done, 0, episode_return)
        episode_length = jnp.where(done, 0, episode_length)
        discounted_return = jnp.where(done, 0, discounted_return)
        state = EnvState(key, inner, episode_return, episode_length, discounted_return)
        return obs, state, results


def to_bounds(action, low, high):
    """Map actions from [-1, 1] to [low, high] and clip them, in the dtype of the bounds."""
    action = (high + low) / 2 + (high - low) / 2 * action
    return action.clip(low, high).astype(low.dtype)


# === Statistics =================================================================================
class RunningMeanStd(NamedTuple):
    """Running mean and variance, over all rollouts so far."""

    mean: jax.Array  # (...)
    var: jax.Array  # (...)
    count: jax.Array  # () int32, number of rollouts


class Stats(NamedTuple):
    obs: RunningMeanStd  # (*obs_shape)
    discounted_return: RunningMeanStd  # ()


def make_stats(obs_shape: tuple[int, ...]) -> Stats:
    """Start with mean 0 and variance 1, so that in the first rollout normalize() just clips."""

    def start(shape):
        return RunningMeanStd(jnp.zeros(shape), jnp.ones(shape), jnp.int32(0))

    return Stats(start(obs_shape), start(()))


def merge(stats: RunningMeanStd, x) -> RunningMeanStd:
    """Return the statistics updated with a rollout x (T, N, ...) (Chan et al. 1979)."""
    distance = x - stats.mean  # float32 averages numbers near 0 more accurately
    change = distance.mean((0, 1))
    count = stats.count + 1
    weight = 1 / count  # all rollouts have the same size
    mean = stats.mean + weight * change
    rollout_var = distance.var((0, 1), correction=0)
    var = (1 - weight) * (stats.var + weight * change**2) + weight * rollout_var
    return RunningMeanStd(mean, var, count)


def normalize(obs, stats: RunningMeanStd, args: Args):
    if not args.norm_obs:
        return obs
    return ((obs - stats.mean) / (stats.var + 1e-8) ** 0.5).clip(-10, 10)


def scale_reward(reward, stats: RunningMeanStd, args: Args):
    if not args.norm_reward:
        return reward
    return (reward / (stats.var + 1e-8) ** 0.5).clip(-10, 10)


# === Agent ======================================================================================
class Linear(eqx.Module):
    """A linear layer for batches. eqx.nn.Linear takes one sample, and is slower with jax.vmap."""

    bias: jax.Array  # first, so that the gradient norm is summed in the same order as in Linen
    weight: jax.Array

    def __init__(self, num_inputs, num_outputs, key, scale=2**0.5):
        self.bias = jnp.zeros(num_outputs)
        self.weight = orthogonal(scale)(key, (num_inputs, num_outputs))

    def __call__(self, x):
        return x @ self.weight + self.bias


class MLP(eqx.Module):
    hidden: list[Linear]
    output: Linear

    def __init__(self, num_inputs, hidden_sizes, num_outputs, output_scale, key):
        sizes = (num_inputs, *hidden_sizes)
        *keys, output_key = jax.random.split(key, len(sizes))
        pairs = zip(pairwise(sizes), keys, strict=True)
        self.hidden = [Linear(m, n, layer_key) for (m, n), layer_key in pairs]
        self.output = Linear(sizes[-1], num_outputs, output_key, output_scale)

    def __call__(self, obs):
        x = obs.reshape(len(obs), -1).astype(jnp.float32)
        for layer in self.hidden:
            x = jnp.tanh(layer(x))
        return self.output(x)


class Agent(eqx.Module):
    actor: MLP
    critic: MLP
    log_std: jax.Array

    def __init__(self, obs_shape, hidden_sizes, action_dim, key):
        obs_size = math.prod(obs_shape)
        actor_key, critic_key = jax.random.split(key)
        self.actor = MLP(obs_size, hidden_sizes, action_dim, output_scale=0.01, key=actor_key)
        self.critic = MLP(obs_size, hidden_sizes, 1, output_scale=1.0, key=critic_key)
        self.log_std = jnp.zeros(action_dim)

    def get_gaussian(self, obs):
        """(B, *obs_shape) -> mean and log_std, both (B, action_dim)."""
        mean = self.actor(obs)
        return mean, jnp.broadcast_to(self.log_std, mean.shape)

    def get_value(self, obs):
        return self.critic(obs).squeeze(-1)  # (B, *obs_shape) -> (B,)

    def __call__(self, obs):
        return *self.get_gaussian(obs), self.get_value(obs)


class TrainState(eqx.Module):
    agent: Agent
    opt_state: optax.OptState
    step: jax.Array  # number of completed optimizer steps
    tx: optax.GradientTransformation = eqx.field(static=True)  # functions, not arrays


def make_agent(args: Args, obs_shape: tuple[int, ...], action_dim: int, key) -> TrainState:
    """Initialize the parameters and the optimizer."""
    agent = Agent(obs_shape, args.hidden_sizes, action_dim, key)
    adam = optax.adam(make_schedule(args), eps=args.adam_eps)
    tx = optax.chain(optax.clip_by_global_norm(args.max_grad_norm), adam)
    opt_state = tx.init(eqx.filter(agent, eqx.is_inexact_array))
    return TrainState(agent, opt_state, jnp.int32(0), tx)


def make_schedule(args: Args) -> optax.Schedule:
    """Learning rate for each optimizer step. CleanRL changes it once per iteration instead."""
    if not args.anneal_lr:
        return optax.constant_schedule(args.learning_rate)
    return optax.linear_schedule(args.learning_rate, 0.0, args.num_optimizer_steps)


# === Storage ====================================================================================
class Storage(NamedTuple):
    """A rollout: T = num_steps steps in N = num_envs environments."""

    obs: jax.Array  # (T, N, *obs_shape), before normalization
    action: jax.Array  # (T, N, action_dim), before VecEnv.step scales and clips it
    logprob: jax.Array  # (T, N)
    reward: jax.Array  # (T, N); this and the fields below result from the action
    terminated: jax.Array  # (T, N) bool
    truncated: jax.Array  # (T, N) bool
    next_obs: jax.Array  # (T, N, *obs_shape), before any restart
    episode_return: jax.Array  # (T, N), including this step
    episode_length: jax.Array  # (T, N)
    discounted_return: jax.Array  # (T, N)


class Batch(NamedTuple):
    """Inputs of the loss; B is batch_size or minibatch_size."""

    obs: jax.Array  # (B, *obs_shape), normalized
    action: jax.Array  # (B, action_dim)
    logprob: jax.Array  # (B,)
    value: jax.Array  # (B,)
    advantage: jax.Array  # (B,)
    target: jax.Array  # (B,), the lambda-return that the critic learns


# === Rollout ====================================================================================
def rollout(train_state, stats: Stats, obs, env_state, key, env: VecEnv, args: Args):
    """Run the policy for num_steps steps. Return the next obs, the env_state and the Storage."""
    # Drawing the noise of all steps at once is faster than drawing it at each step.
    noise = jax.random.normal(key, (args.num_steps, args.num_envs, env.action_dim))

    def step(carry, step_noise):
        obs, env_state = carry
        inputs = normalize(obs, stats.obs, args)
        mean, log_std = train_state.agent.get_gaussian(inputs)
        action = mean + jnp.exp(log_std) * step_noise
        new_obs, env_state, results = env.step(env_state, action)
        return (new_obs, env_state), (obs, action, mean, log_std, results)

    # lax.scan compiles the loop over steps: it passes the carry along and stacks the outputs.
    (obs, env_state), outputs = jax.lax.scan(step, (obs, env_state), noise)
    all_obs, action, mean, log_std, results = outputs
    logprob = logprob_of(action, mean, log_std)
    return obs, env_state, Storage(all_obs, action, logprob, **results)


def logprob_of(action, mean, log_std):
    """Log-density of the actions taken: (..., action_dim) each -> (...)."""
    distance = (action - mean) / jnp.exp(log_std)
    return -(0.5 * distance**2 + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)


# === GAE ========================================================================================
def compute_gae(storage: Storage, value, next_value, args: Args) -> jax.Array:
    """Return advantages (T, N) from V(obs) and V(next_obs), both (T, N).

    Schulman et al. 2016, eq. 16. A terminated episode has no future value. A truncated one
    bootstraps from V(next_obs), unless bootstrap_truncated is off. Both end the recursion, since
    the next step starts a new episode.
    """
    done = storage.terminated | storage.truncated
    no_future = storage.terminated if args.bootstrap_truncated else done
    delta = storage.reward + args.gamma * jnp.where(no_future, 0.0, next_value) - value
    decay = jnp.where(done, 0.0, args.gamma * args.gae_lambda)

    def step(next_advantage, inputs):
        step_delta, step_decay = inputs
        advantage = step_delta + step_decay * next_advantage
        return advantage, advantage

    last = jnp.zeros(args.num_envs)
    _, advantages = jax.lax.scan(step, last, (delta, decay), reverse=True)  # backwards in time
    return advantages


# === Loss =======================================================================================
def ppo_loss(agent, batch: Batch, args: Args):
    """PPO's clipped loss (Schulman et al. 2017, eq. 9), and the metrics to log."""
    mean, log_std, value = agent(batch.obs)
    log_ratio = logprob_of(batch.action, mean, log_std) - batch.logprob
    ratio = jnp.exp(log_ratio)

    advantage = batch.advantage
    if args.norm_adv:
        # correction=0 divides by n. CleanRL's PyTorch scripts divide by n - 1.
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -jnp.minimum(advantage * ratio, advantage * clipped_ratio).mean()

    value_error = (value - batch.target) ** 2
    if args.clip_vloss:
        change = (value - batch.value).clip(-args.clip_coef, args.clip_coef)
        value_error = jnp.maximum(value_error, (batch.value + change - batch.target) ** 2)
    value_loss = 0.5 * value_error.mean()

    entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1).mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    return loss, {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": (ratio - 1 - log_ratio).mean(),
        "losses/clip_fraction": (abs(ratio - 1) > args.clip_coef).mean(),
    }


# === Update =====================================================================================
def update(train_state, stats: Stats, storage: Storage, key, args: Args):
    """Train for update_epochs epochs on a rollout. Return the new TrainState, Stats and metrics."""
    learning_rate = make_schedule(args)(train_state.step)
    # Train on the policy's inputs: the new observation statistics take effect in the next rollout.
    # The new return statistics take effect at once, since no rollout uses them.
    obs = normalize(storage.obs, stats.obs, args)
    next_obs = normalize(storage.next_obs, stats.obs, args)
    stats = Stats(
        obs=merge(stats.obs, storage.obs),
        discounted_return=merge(stats.discounted_return, storage.discounted_return),
    )
    reward = scale_reward(storage.reward, stats.discounted_return, args)
    storage = storage._replace(obs=obs, next_obs=next_obs, reward=reward)
    # The parameters are fixed during a rollout, so one pass at the end gives all its values.
    both_obs = jnp.concat([storage.obs, storage.next_obs]).reshape(-1, *storage.obs.shape[2:])
    values = train_state.agent.get_value(both_obs)
    value, next_value = values.reshape(2, args.num_steps, args.num_envs)
    advantage = compute_gae(storage, value, next_value, args)
    target = advantage + value
    fields = (storage.obs, storage.action, storage.logprob, value, advantage, target)
    batch = Batch(*(x.reshape(args.batch_size, *x.shape[2:]) for x in fields))  # (T, N) -> (B,)

    def minibatch_step(train_state, minibatch):
        agent, tx = train_state.agent, train_state.tx
        grads, losses = eqx.filter_grad(ppo_loss, has_aux=True)(agent, minibatch, args)
        updates, opt_state = tx.update(grads, train_state.opt_state)
        agent = eqx.apply_updates(agent, updates)
        return TrainState(agent, opt_state, train_state.step + 1, tx), losses

    def epoch(train_state, key):
        order = shuffle(key, args.batch_size)
        shape = (args.num_minibatches, args.minibatch_size)
        # Gathering once per epoch is faster than once per minibatch.
        minibatches = jax.tree.map(lambda x: x[order].reshape(*shape, *x.shape[1:]), batch)
        return jax.lax.scan(minibatch_step, train_state, minibatches)

    keys = jax.random.split(key, args.update_epochs)
    train_state, losses = jax.lax.scan(epoch, train_state, keys)
    metrics = jax.tree.map(jnp.mean, losses) | episode_statistics(storage)
    metrics["charts/learning_rate"] = learning_rate
    metrics["losses/explained_variance"] = 1 - (target - value).var() / target.var()
    metrics["charts/param_norm"] = optax.global_norm(eqx.filter(train_state.agent, eqx.is_array))
    return train_state, stats, metrics


def shuffle(key, size: int) -> jax.Array:
    """Return a random permutation of range(size), (size,) uint32.

    Faster than jax.random.permutation: each index is in the low bits of a random number, and
    sorting the numbers shuffles the indices. For size 3, two bits hold the index: 1011_00, 0010_01,
    0111_10 sort to 1, 2, 0. With 8192 indices, about 64 pairs draw equal bits and stay in order.
    """
    index_bits = (size - 1).bit_length()
    numbers = jax.random.bits(key, (size,)) >> index_bits << index_bits
    return jnp.sort(numbers | jnp.arange(size, dtype=jnp.uint32)) & (2**index_bits - 1)


def episode_statistics(storage: Storage) -> dict[str, jax.Array]:
    """Number of finished episodes, and the mean, min and max of their returns and lengths.

    If none finished, the statistics are infinite, which the log writes as null.
    """
    done = storage.terminated | storage.truncated
    metrics = {"charts/episodes": done.sum()}
    for name, x in [("return", storage.episode_return), ("length", storage.episode_length)]:
        mean = jnp.where(done, x, 0).sum() / jnp.maximum(done.sum(), 1)
        metrics[f"charts/episodic_{name}"] = jnp.where(done.sum() > 0, mean, jnp.inf)
        metrics[f"charts/episodic_{name}_min"] = jnp.where(done, x, jnp.inf).min()
        metrics[f"charts/episodic_{name}_max"] = jnp.where(done, x, -jnp.inf).max()
    return metrics


# === Training ===================================================================================
def train(args: Args) -> None:
    """Train an agent, or continue a run."""
    # "high" and "medium" are the same here: JAX's default, which allows TF32 on a GPU.
    precision = "highest" if args.matmul_precision == "highest" else "default"
    jax.config.update("jax_default_matmul_precision", precision)
    env = VecEnv(args.env_id, args.num_envs, args.gamma)
    spaces: dict[str, Any] = {
        "obs_shape": env.obs_shape,
        "action_dim": env.action_dim,
        "action_low": env.action_low.tolist(),
        "action_high": env.action_high.tolist(),
        "action_dtype": env.action_low.dtype.name,
    }

    # A checkpoint can hold keys from PRNGKey, such as env_state.key, but not from jax.random.key.
    key, agent_key, env_key = jax.random.split(jax.random.PRNGKey(args.seed), 3)
    iteration = 0
    train_state = make_agent(args, env.obs_shape, env.action_dim, agent_key)
    stats = make_stats(env.obs_shape)
    obs, env_state = jax.jit(env.reset)(env_key)
    if has_checkpoint(args, **spaces):
        like = Checkpoint(iteration, stats, train_state, obs, env_state)
        iteration, stats, train_state, obs, env_state = load_checkpoint(args.resume, like)
    packages = ["jax", "jaxlib", "equinox", "optax", "gymnax", "numpy"]
    log = RunLog(args, iteration, packages, device=jax.devices()[0].device_kind, **spaces)

    # env and args are compile-time constants.
    rollout_fn = eqx.filter_jit(partial(rollout, env=env, args=args))
    update_fn = eqx.filter_jit(partial(update, args=args))
    while iteration < args.num_iterations:
        start = time.perf_counter()
        # Deriving the keys from the iteration number keeps them out of the checkpoint.
        rollout_key, update_key = jax.random.split(jax.random.fold_in(key, iteration))
        obs, env_state, storage = rollout_fn(train_state, stats, obs, env_state, rollout_key)
        middle = 0.0
        if args.sync_for_timing:
            jax.block_until_ready(storage)  # sync
            middle = time.perf_counter()
        train_state, stats, metrics = update_fn(train_state, stats, storage, update_key)
        metrics = jax.device_get(metrics)  # sync
        log.write(iteration, metrics, start, middle)
        iteration += 1
        if log.must_save(iteration):
            save_checkpoint(log.dir, Checkpoint(iteration, stats, train_state, obs, env_state))
            log.update_info(iteration=iteration)
            if log.stopped_by:  # stop only after saving, so that no iteration is lost
                break
    log.close()


# === Checkpoint =================================================================================
class Checkpoint(NamedTuple):
    """Everything a resumed run needs to continue exactly."""

    iteration: int  # number of completed iterations
    stats: Stats
    train_state: TrainState  # must start with the agent: load_policy reads no further
    obs: jax.Array
    env_state: Any


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically: a killed run keeps either the old one or the new one."""
    new = folder / "checkpoint.new"
    eqx.tree_serialise_leaves(new, checkpoint)  # sync
    os.replace(new, folder / "checkpoint.eqx")


def load_checkpoint(folder: str | Path, like: Checkpoint) -> Checkpoint:
    """Read a checkpoint into the structure of `like`."""
    return eqx.tree_deserialise_leaves(Path(folder, "checkpoint.eqx"), like)


def load_policy(folder: str | Path, seed: int = 0) -> Callable[..., np.ndarray]:
    """Load a trained policy: policy(obs) returns the most likely action for each observation.

    obs (N, *obs_shape) and the actions are NumPy arrays. All actions are within the bounds of the
    action space. policy(obs, sample=True) samples the actions instead, as in training.
    """
    info, args = load_info(folder)
    sizes = (info["obs_shape"], args.hidden_sizes, info["action_dim"])
    stats = make_stats(info["obs_shape"])
    like = (0, stats, eqx.filter_eval_shape(Agent, *sizes, jax.random.PRNGKey(0)))
    _, stats, agent = eqx.tree_deserialise_leaves(Path(folder, "checkpoint.eqx"), like)
    get_gaussian = eqx.filter_jit(agent.get_gaussian)
    low, high = (np.array(info[x], info["action_dtype"]) for x in ("action_low", "action_high"))
    rng = np.random.default_rng(seed)

    def policy(obs, sample=False):
        obs = normalize(obs, stats.obs, args)
        mean, log_std = map(np.asarray, get_gaussian(obs))
        action = mean
        if sample:
            action = mean + np.exp(log_std) * rng.standard_normal(mean.shape, np.float32)
        return to_bounds(action.reshape(-1, *low.shape), low, high)

    return policy


# === Run log ====================================================================================
# You can stop reading here. The rest manages the run folder, and is the same in every script.
class RunLog:
    """A run folder: run.json describes the run, and metrics.jsonl has one line per iteration."""

    def __init__(self, args: Args, iteration: int, packages: list[str], **info: Any) -> None:
        """Create the run folder, or reopen it to resume the run. info is added to run.json."""
        name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
        name = args.run_name or name.replace("/", "-").replace(":", "-")
        self.dir = Path(args.resume or Path(args.runs_dir, name))
        self.args = args
        self.steps_per_iteration = args.num_envs * args.num_steps
        self.start = time.perf_counter()
        self.printed = -math.inf  # time of the last line on the terminal
        self.stopped_by = 0  # number of the signal received, if any
        if self.dir.exists() and not args.resume:
            fail(f"{self.dir} already exists. Use another --run-name, or --resume {self.dir}")
        self.dir.mkdir(parents=True, exist_ok=True)
        self.info: dict[str, Any] = {"resumed": []}  # iterations at which the run was resumed
        if args.resume:
            self.info = load_info(self.dir)[0]
            self.info["resumed"].append(iteration)
        self.info |= {
            "script": Path(__file__).stem,
            "status": "running",
            "started": time.time(),  # last start or resume
            "iteration": iteration,  # iterations completed at the last checkpoint
            "args": asdict(args),
            "versions": {name: version(name) for name in packages},
        }
        self.info |= info | json.loads(os.environ.get("RUN_INFO", "{}"))  # set by benchmark.sh

        # A killed run may have logged iterations after its last checkpoint. Drop them.
        self.metrics = open(self.dir / "metrics.jsonl", "a+", buffering=1)  # line-buffered
        self.metrics.seek(0)
        lines = [x for x in self.metrics if x.endswith("\n")]  # the last one may be incomplete
        lines = [x for x in lines if json.loads(x)["iteration"] < iteration]
        self.metrics.truncate(len("".join(lines)))
        if lines:
            self.start -= json.loads(lines[-1])["time/elapsed"]  # so that time/elapsed continues
        for old in self.dir.glob("events.*"):  # rewrite them without the dropped iterations
            old.unlink()
        self.tensorboard = Writer(str(self.dir))
        for line in lines:
            self.plot(json.loads(line))
        self.update_info()
        self.wandb: Any = None
        if args.track:
            import wandb  # only if needed, because importing takes half a second

            self.wandb = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "ppo-rosetta"),
                name=self.dir.name,
                id=self.info.get("wandb_id"),
                resume="allow",
                reinit="create_new",
                dir=self.dir,
                config=self.info,
            )
            self.wandb.define_metric("*", step_metric="global_step")
            self.update_info(wandb_id=self.wandb.id)
        if __name__ == "__main__":  # a program that imports this script handles signals itself
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.stop)
        text = f"Writing to {self.dir}. Ctrl-C saves and stops after the current iteration."
        print(text, flush=True)

    def stop(self, number: int, frame: Any) -> None:
        self.stopped_by = number
        signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once

    def write(self, iteration: int, metrics: dict, start: float, middle: float = 0.0) -> None:
        """Log an iteration that began at `start`. Its rollout ended at `middle` (0: not timed)."""
        end = time.perf_counter()
        row = {name: float(x) for name, x in metrics.items()}
        row["iteration"] = iteration  # counted from 0
        row["global_step"] = (iteration + 1) * self.steps_per_iteration
        row["charts/SPS"] = self.steps_per_iteration / (end - start)  # this iteration only
        row["time/elapsed"] = end - self.start
        row["time/iteration"] = end - start
        if middle:
            row["time/rollout"] = middle - start
            row["time/update"] = end - middle
        is_due = (iteration + 1) % math.ceil(self.args.num_iterations / 100) == 0
        if is_due or end - self.printed > 10:
            self.printed = end
            text = f"iteration {iteration + 1}/{self.args.num_iterations}"
            for name in ("episodes", "episodic_return", "SPS"):
                if math.isfinite(row[f"charts/{name}"]):  # without episodes, there is no return
                    text += f", {name} {row[f'charts/{name}']:g}"
            print(text, flush=True)
        row = {name: x if math.isfinite(x) else None for name, x in row.items()}  # JSON has no NaN
        self.metrics.write(json.dumps(row) + "\n")
        self.plot(row)
        if self.wandb:
            with suppress(ConnectionError):  # SIGTERM to a whole job also ends the W&B process
                self.wandb.log(row, step=iteration)
        checked = [x for name, x in row.items() if name.endswith(("_loss", "/param_norm"))]
        # DQN and SAC have no losses until training begins; charts/updates is 0 until then.
        if None in checked and row.get("charts/updates") != 0:
            self.close(diverged_in=iteration + 1)

    def plot(self, row: dict[str, Any]) -> None:
        """Add a row to TensorBoard."""
        for name, x in row.items():
            if x is not None and "/" in name:
                self.tensorboard.add_scalar(name, x, row["global_step"])

    def must_save(self, iteration: int) -> bool:
        is_due = iteration % (self.args.save_every or math.ceil(self.args.num_iterations / 10)) == 0
        return is_due or iteration == self.args.num_iterations or self.stopped_by > 0

    def update_info(self, **changes: Any) -> None:
        """Update run.json atomically."""
        self.info |= changes
        (self.dir / "run.new").write_text(json.dumps(self.info, indent=2))
        os.replace(self.dir / "run.new", self.dir / "run.json")

    def close(self, diverged_in: int = 0) -> None:
        """Record how the run ended. Exit if it stopped, or diverged in iteration `diverged_in`."""
        is_complete = self.info["iteration"] >= self.args.num_iterations
        status = "completed" if is_complete else "stopped"
        self.update_info(status="diverged" if diverged_in else status, ended=time.time())
        self.metrics.close()
        self.tensorboard.close()
        if self.wandb:
            with suppress(ConnectionError):
                self.wandb.summary.update(self.info)
                self.wandb.finish()
        if diverged_in:
            text = f"Diverged in iteration {diverged_in}: a loss or a parameter is NaN or infinite."
            sys.exit(f"{text} Last checkpoint in {self.dir}: iteration {self.info['iteration']}")
        if not is_complete:
            print(f"Stopped. To continue, add --resume {self.dir}")
            sys.exit(128 + self.stopped_by)  # the shell's convention for signals
        python = "python"
        if "UV_RUN_RECURSION_DEPTH" in os.environ:  # set by uv run
            python = f"uv run --with-requirements {__file__}"
        flags = f" --env-id {self.args.env_id}" if ":" in self.args.env_id else ""
        print(f"Saved to {self.dir}. Evaluate with: {python} evaluate.py {self.dir}{flags}")


def load_info(folder: str | Path) -> tuple[dict[str, Any], Args]:
    """Return the contents of run.json, and the Args in it."""
    info = json.loads(Path(folder, "run.json").read_text())
    if info["script"] != Path(__file__).stem:
        raise ValueError(f"{folder} was created by {info['script']}.py")
    return info, Args(**info["args"])


def args_to_resume() -> Args | None:
    """Return the arguments of the run that --resume names on the command line, if any."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--resume")
    folder = parser.parse_known_args()[0].resume
    return load_info(folder)[1] if folder else None


def has_checkpoint(args: Args, **spaces: Any) -> bool:
    """Return whether --resume names a run with a checkpoint. Exit if the run cannot continue."""
    if not args.resume:
        return False
    info, saved = load_info(args.resume)
    for name, x in asdict(saved).items():
        can_change = name in ("resume", "total_timesteps", "save_every", "track")
        if not can_change and getattr(args, name) != x:
            fail(f"--resume cannot change --{name.replace('_', '-')}, which is {x!r}")
    for name, x in json.loads(json.dumps(spaces)).items():  # tuples become lists, as in run.json
        if x != info[name]:
            fail(f"--resume: {name} is now {x}, but was {info[name]} when the run started")
    if info["iteration"] >= args.num_iterations:
        fail(f"{args.resume} is complete. To train for longer, pass a larger --total-timesteps")
    return info["iteration"] > 0


def fail(reason: str) -> NoReturn:
    print(reason, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    train(parse_args())

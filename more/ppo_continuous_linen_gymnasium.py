# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnasium[mujoco]==1.3.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""PPO with continuous actions, in JAX and Flax Linen, with environments in Gymnasium on the CPU.

    python more/ppo_continuous_linen_gymnasium.py --env-id Pendulum-v1 --seed 1
    python more/ppo_continuous_linen_gymnasium.py mujoco --env-id HalfCheetah-v5 --seed 1

The robots of the second line need: pip install "gymnasium[mujoco]==1.3.0" (uv run installs it).

Read Statistics to Training first. "# sync" marks a line that waits for the device. What to look at:
- Agent gives each number of an action a Gaussian. Its mean depends on obs, its log_std does not.
- VecEnv.step maps [-1, 1] to the bounds, and clips the rest. PPO learns from actions as they were
  drawn: a clipped action has another density than the Gaussian's, and a wrong gradient by it.
- normalise uses the statistics of the rollouts before. In the first rollout it only clips.
- scale_reward divides rewards and subtracts nothing: that would favour long or short episodes.
Diff me with ppo_linen_gymnasium.py to see continuous actions, with ppo_continuous_linen.py to see
environments in JAX, with ppo_continuous_torch_gymnasium.py to see PyTorch.
"""

import time

START = time.perf_counter()  # before the imports, which take seconds

import argparse
import atexit
import json
import math
import multiprocessing
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else wide orthogonal() takes 20 s, not 2

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import linen as nn
from flax.serialization import from_bytes, msgpack_restore, to_bytes
from flax.training.train_state import TrainState
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from jax.nn.initializers import orthogonal
from tensorboard.summary import Writer


# === Arguments ==================================================================================
@dataclass
class Args:
    seed: int = 1  # seed of all random numbers
    env_id: str = "Pendulum-v1"  # Gymnasium environment with continuous actions; my_module:MyEnv-v0
    total_timesteps: int = 204_800  # environment steps, in whole rollouts
    learning_rate: float = 3e-4  # Adam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    num_envs: int = 16  # parallel environments
    num_steps: int = 256  # steps per environment and rollout
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of advantage estimation (GAE)
    num_minibatches: int = 32  # minibatches per epoch
    update_epochs: int = 10  # passes over each rollout
    norm_obs: bool = True  # normalise observations by their running mean and standard deviation
    norm_reward: bool = True  # divide rewards by the running std of discounted returns
    norm_adv: bool = True  # normalise advantages per minibatch
    clip_coef: float = 0.2  # clipping range of ratio and value
    clip_vloss: bool = True  # clip the value loss
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # largest global norm of the gradient
    adam_eps: float = 1e-5  # Adam's epsilon
    bootstrap_truncated: bool = True  # bootstrap truncated episodes from V(final obs); off: with 0
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layers of actor and critic
    matmul_precision: Literal["medium", "high", "highest"] = "high"  # highest: no TF32 on a GPU
    vectorization: Literal["sync", "async"] = "sync"  # one after the other, or a process each
    sync_for_timing: bool = False  # wait for the device after the rollout, to time both phases
    runs_dir: str = "runs"  # folder that gets one folder per run
    run_name: str = ""  # that folder's name; by default {env_id}__{script}__{seed}__{time}
    track: bool = False  # log to Weights & Biases, too
    save_every: int = 0  # iterations between checkpoints; 0: only when training ends or is stopped
    resume: str = ""  # folder of a run to resume; its arguments are the defaults of all others

    def __post_init__(self) -> None:
        """Work out the sizes. On the command line, a ValueError becomes a message."""
        if self.seed not in range(2**32):
            raise ValueError("--seed must lie between 0 and 2**32 - 1")
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // self.num_minibatches
        self.num_iterations = self.total_timesteps // self.batch_size
        self.num_optimizer_steps = self.num_iterations * self.update_epochs * self.num_minibatches
        if self.batch_size % self.num_minibatches != 0:
            raise ValueError(f"--num-minibatches must divide the batch, {self.batch_size} steps")
        if self.num_iterations < 1:
            raise ValueError(f"--total-timesteps must be at least a batch, {self.batch_size} steps")
        self.hidden_sizes = tuple(self.hidden_sizes)  # run.json has a list


def parse_args() -> Args:
    """Read the command line: the name of a preset, if it begins with one, and flags."""
    saved = args_to_resume()  # with --resume, the run's own arguments are the defaults
    if saved:
        return tyro.cli(Args, default=saved)
    mujoco = Args(
        env_id="HalfCheetah-v5",
        total_timesteps=1_000_000,
        num_envs=32,
        num_steps=64,
        num_minibatches=8,
    )
    presets = {
        "pendulum": ("For Pendulum-v1. The word mujoco before the flags: for robots.", Args()),
        "mujoco": ("The best of the settings tried in HalfCheetah-v5, with one seed.", mujoco),
    }
    argv = sys.argv[1:]
    if not argv or argv[0] not in presets:
        argv = ["pendulum", *argv]
    return tyro.extras.overridable_config_cli(presets, args=argv)


# === Environment ================================================================================
class VecEnv:
    """N = num_envs Gymnasium environments with flat observations; an episode's end starts the next.

    All of it is NumPy's, on the host. options, such as render_mode, are the environment's own.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        gamma: float,
        vectorization: str,
        seed: int,
        **options: Any,
    ) -> None:
        namespace = env_id.partition("/")[0]  # my_plugin/MyEnv-v0: Gymnasium loads no plugin
        for plugin in metadata.entry_points(group="gymnasium.envs", name=namespace):
            plugin.load()()
        sys.path.append(os.getcwd())  # where my_module lies
        vector_options: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED, "copy": False}
        wrappers: list[Any] = [WithoutInfo]
        if vectorization == "async":
            vector_options["context"] = "forkserver"  # not fork: this process has threads
            os.environ["PYTHONSAFEPATH"] = "1"  # else a file here could pass for a library
            # The server, from which processes are forked, imports these once for all of them.
            packages = ["gymnasium", "flax", "optax", "torch", "tyro", "tensorboard.summary"]
            loaded = [name for name in packages if name in sys.modules]
            multiprocessing.set_forkserver_preload(loaded)
            wrappers.append(ignore_ctrl_c)
        try:
            self.envs: Any = gymnasium.make_vec(
                env_id, num_envs, vectorization, vector_options, wrappers, **options
            )
        except gymnasium.error.Error as error:  # which says what is wrong with env_id
            fail(f"--env-id: {error}")
        atexit.register(self.envs.close, terminate=True)  # also where a process of async has died
        space = self.envs.single_action_space
        if not isinstance(space, Box) or space.dtype.kind != "f" or not space.is_bounded():
            hint = "for Discrete, see more/ppo_linen_gymnasium.py or the same in PyTorch"
            fail(f"--env-id: actions must be a Box of floats with bounds, not {space}; {hint}")
        obs_space = self.envs.single_observation_space
        if not isinstance(obs_space, Box):
            hint = "gymnasium.wrappers.FlattenObservation makes one-hot vectors of numbers"
            fail(f"--env-id: observations must be arrays, not {obs_space}; {hint}")
        self.num_envs = num_envs
        self.seed = seed
        self.gamma = gamma
        self.action_space = space
        self.action_low = np.float32(space.low)
        self.action_high = np.float32(space.high)
        self.action_dim = math.prod(space.shape)
        self.obs_shape = obs_space.shape
        self.obs_dim = math.prod(self.obs_shape)

    def reset(self, iteration: int = 0) -> np.ndarray:
        """Start every environment; return obs (N, obs_dim).

        Gymnasium cannot save an environment. A run that is resumed at an iteration starts new
        episodes, which are not those that it began with.
        """
        if iteration > 0:
            print("New episodes start: Gymnasium saves no environment.")
        # Not seed + i: runs with seeds 1 and 2 would share all environments but one. 31 bits each,
        # as some simulators take a C int.
        sequence = np.random.SeedSequence([self.seed, iteration])
        seeds = (sequence.generate_state(self.num_envs) >> 1).tolist()
        obs, _ = self.envs.reset(seed=seeds)
        self.episode_return = np.zeros(self.num_envs)  # of the running episode, in float64
        self.episode_length = np.zeros(self.num_envs, np.float32)
        self.discounted_return = np.zeros(self.num_envs)  # the latest reward counts in full
        return self.flatten(obs)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Take action (N, action_dim), of which -1 to 1 spans the bounds, and the rest is clipped.

        Return obs (after any restart) and a dict of results.
        """
        action = action.reshape(self.num_envs, *self.action_space.shape)
        action = to_bounds(action, self.action_low, self.action_high)
        obs, reward, terminated, truncated, _ = self.envs.step(action)
        if np.isnan(obs).any() or np.isnan(reward).any():  # it would ruin all that was learnt
            raise FloatingPointError(f"{self.envs.spec.id} returned NaN")
        next_obs = self.flatten(obs)
        episode_return = self.episode_return + reward
        episode_length = self.episode_length + 1
        discounted_return = self.gamma * self.discounted_return + reward
        result = {
            "reward": reward.astype(np.float32),
            "terminated": terminated,
            "truncated": truncated,
            "next_obs": next_obs,
            "episode_return": episode_return,
            "episode_length": episode_length,
            "discounted_return": discounted_return.astype(np.float32),
        }
        done = terminated | truncated
        self.episode_return = np.where(done, 0, episode_return)
        self.episode_length = np.where(done, 0, episode_length)
        self.discounted_return = np.where(done, 0, discounted_return)
        if not done.any():
            return next_obs, result
        # At once: Gymnasium's default would spend the next step on it.
        obs, _ = self.envs.reset(options={"reset_mask": done})
        return self.flatten(obs), result

    def flatten(self, obs: np.ndarray) -> np.ndarray:
        return obs.reshape(len(obs), self.obs_dim).astype(np.float32)  # a copy


class WithoutInfo(gymnasium.Wrapper):
    """Nobody here reads info, and Gymnasium's merging of it takes time and fails on mixed types."""

    def reset(self, **options: Any) -> tuple:
        obs, _ = self.env.reset(**options)
        return obs, {}

    def step(self, action: Any) -> tuple:
        *result, _ = self.env.step(action)
        return *result, {}


def ignore_ctrl_c(env: gymnasium.Env) -> gymnasium.Env:
    """Keep a terminal's Ctrl-C from a process of async: the training ends after its iteration."""
    if multiprocessing.parent_process():  # Gymnasium makes one in the training's process, too
        os.setsid()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # which closes the environment
    return env


def to_bounds(action, low, high):
    """Map actions from [-1, 1] to [low, high], and clip what lies outside."""
    return ((low + high) / 2 + (high - low) / 2 * action).clip(low, high)


# === Statistics =================================================================================
class RunningMeanStd(NamedTuple):
    """Mean and variance of each number, over all rollouts so far."""

    mean: jax.Array  # (...)
    var: jax.Array  # (...)
    count: jax.Array  # () int32, how many rollouts


class Stats(NamedTuple):
    obs: RunningMeanStd  # (obs_dim,)
    discounted_return: RunningMeanStd  # ()


def make_stats(obs_dim: int) -> Stats:
    """Of obs and of discounted returns. Before any rollout, normalise only clips."""

    def start(*shape):
        return RunningMeanStd(jnp.zeros(shape), jnp.ones(shape), jnp.int32(0))

    return Stats(start(obs_dim), start())


def merge(stats: RunningMeanStd, x) -> RunningMeanStd:
    """Statistics of the rollouts in stats and of one more, x (T, N, ...) (Chan et al. 1979)."""
    distance = x - stats.mean  # float32 adds this up more exactly than an x that is far from 0
    change = distance.mean((0, 1))
    count = stats.count + 1
    weight = 1 / count  # of the new rollout; all have the same size
    mean = stats.mean + weight * change
    rollout_var = distance.var((0, 1), correction=0)
    var = (1 - weight) * (stats.var + weight * change**2) + weight * rollout_var
    return RunningMeanStd(mean, var, count)


def normalise(obs, stats: RunningMeanStd, args: Args):
    if not args.norm_obs:
        return obs
    return ((obs - stats.mean) / (stats.var + 1e-8) ** 0.5).clip(-10, 10)


def scale_reward(reward, stats: RunningMeanStd, args: Args):
    if not args.norm_reward:
        return reward
    return (reward / (stats.var + 1e-8) ** 0.5).clip(-10, 10)


# === Agent ======================================================================================
class MLP(nn.Module):
    hidden_sizes: tuple[int, ...]
    num_outputs: int
    output_scale: float

    @nn.compact
    def __call__(self, x):
        for size in self.hidden_sizes:
            x = nn.tanh(nn.Dense(size, kernel_init=orthogonal(math.sqrt(2)))(x))
        return nn.Dense(self.num_outputs, kernel_init=orthogonal(self.output_scale))(x)


class Agent(nn.Module):
    obs_shape: tuple[int, ...]  # obs comes flat; a CNN would first restore this shape
    hidden_sizes: tuple[int, ...]
    action_dim: int

    def setup(self):
        self.actor = MLP(self.hidden_sizes, self.action_dim, output_scale=0.01)
        self.critic = MLP(self.hidden_sizes, 1, output_scale=1.0)
        self.log_std = self.param("log_std", nn.initializers.zeros, self.action_dim)

    def get_gaussian(self, obs):
        """(..., obs_dim) -> mean and log_std, (..., action_dim) each."""
        mean = self.actor(obs)
        return mean, jnp.broadcast_to(self.log_std, mean.shape)

    def get_value(self, obs):
        return self.critic(obs).squeeze(-1)  # (..., obs_dim) -> (...)

    def __call__(self, obs):
        return *self.get_gaussian(obs), self.get_value(obs)


def make_agent(args: Args, obs_shape: tuple[int, ...], action_dim: int, key) -> TrainState:
    """Initialise the parameters and Adam."""
    agent = Agent(obs_shape, args.hidden_sizes, action_dim)
    params = jax.jit(agent.init)(key, jnp.zeros((1, math.prod(obs_shape))))  # runs __call__
    adam = optax.adam(make_schedule(args), eps=args.adam_eps)
    tx = optax.chain(optax.clip_by_global_norm(args.max_grad_norm), adam)
    train_state = TrainState.create(apply_fn=agent.apply, params=params, tx=tx)
    return train_state.replace(step=jnp.int32(0))  # not an int: update would compile twice


def make_schedule(args: Args) -> optax.Schedule:
    """The learning rate after so many optimizer steps; CleanRL changes it once an iteration."""
    if not args.anneal_lr:
        return optax.constant_schedule(args.learning_rate)
    return optax.linear_schedule(args.learning_rate, 0.0, args.num_optimizer_steps)


# === Storage ====================================================================================
class Storage(NamedTuple):
    """A rollout of T = num_steps in N = num_envs environments."""

    obs: jax.Array  # (T, N, obs_dim), what the action was drawn from, before it is normalised
    action: jax.Array  # (T, N, action_dim), as drawn: before VecEnv.step scales and clips it
    logprob: jax.Array  # (T, N)
    reward: jax.Array  # (T, N), result of the action, like all fields below
    terminated: jax.Array  # (T, N) bool
    truncated: jax.Array  # (T, N) bool
    next_obs: jax.Array  # (T, N, obs_dim), before any restart
    episode_return: jax.Array  # (T, N), including this step
    episode_length: jax.Array  # (T, N)
    discounted_return: jax.Array  # (T, N)


class Batch(NamedTuple):
    """What the loss reads; B = batch_size or minibatch_size."""

    obs: jax.Array  # (B, obs_dim), normalised
    action: jax.Array  # (B, action_dim)
    logprob: jax.Array  # (B,)
    value: jax.Array  # (B,)
    advantage: jax.Array  # (B,)
    target: jax.Array  # (B,), of the critic: the lambda-return


# === Rollout ====================================================================================
def rollout(policy_fn, params, stats: Stats, obs, key, env: VecEnv, args: Args):
    """Act for num_steps from obs (N, obs_dim); return the obs to go on from, Storage, in NumPy."""
    # Drawn for all steps at once, noise takes less time than drawn in every step.
    noise = jax.random.normal(key, (args.num_steps, args.num_envs, env.action_dim))

    steps = []
    for step_noise in np.asarray(noise):  # sync
        action, logprob = map(np.asarray, policy_fn(params, stats.obs, obs, step_noise))  # sync
        new_obs, result = env.step(action)
        steps.append((obs, action, logprob, result))
        obs = new_obs

    # From one tuple per step to one array per name, (T, N, ...).
    all_obs, action, logprob, result = jax.tree.map(lambda *x: np.stack(x), *steps)
    return obs, Storage(all_obs, action, logprob, **result)


def policy(params, stats: RunningMeanStd, obs, noise, apply_fn, args: Args):
    """(N, obs_dim), (N, action_dim) -> action (N, action_dim), logprob (N,)."""
    mean, log_std = apply_fn(params, normalise(obs, stats, args), method="get_gaussian")
    action = mean + jnp.exp(log_std) * noise
    return action, logprob_of(action, mean, log_std)


def logprob_of(action, mean, log_std):
    """The log of the Gaussians' density at action: (..., action_dim) each -> (...)."""
    distance = (action - mean) / jnp.exp(log_std)
    return -(0.5 * distance**2 + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)


# === GAE ========================================================================================
def compute_gae(storage: Storage, value, next_value, args: Args) -> jax.Array:
    """Advantages (T, N) from V(obs) and V(next_obs), each (T, N) (Schulman et al. 2016, eq. 16).

    A termination has no future value. A truncation bootstraps from V(next_obs), unless
    bootstrap_truncated is off. Both cut the recursion: the next step is another episode's.
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
    _, advantages = jax.lax.scan(step, last, (delta, decay), reverse=True)  # back in time
    return advantages


# === Loss =======================================================================================
def ppo_loss(params, apply_fn, batch: Batch, args: Args):
    """PPO's clipped loss (Schulman et al. 2017, eq. 9), and its parts for the log."""
    mean, log_std, value = apply_fn(params, batch.obs)
    log_ratio = logprob_of(batch.action, mean, log_std) - batch.logprob
    ratio = jnp.exp(log_ratio)

    advantage = batch.advantage
    if args.norm_adv:
        # correction=0 divides by their number, n. CleanRL's PyTorch scripts divide by n - 1.
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
    """Train on a rollout for update_epochs; return the next train_state, stats and what to log."""
    learning_rate = make_schedule(args)(train_state.step)
    # The networks must see obs as the actor saw it, so new statistics of obs wait for the next
    # rollout. Those of returns need not wait: no rollout uses them.
    obs = normalise(storage.obs, stats.obs, args)
    next_obs = normalise(storage.next_obs, stats.obs, args)
    stats = Stats(
        obs=merge(stats.obs, storage.obs),
        discounted_return=merge(stats.discounted_return, storage.discounted_return),
    )
    reward = scale_reward(storage.reward, stats.discounted_return, args)
    storage = storage._replace(obs=obs, next_obs=next_obs, reward=reward)
    # Parameters do not change during a rollout, so one pass afterwards gives all its values.
    both_obs = jnp.stack([storage.obs, storage.next_obs])
    value, next_value = train_state.apply_fn(train_state.params, both_obs, method="get_value")
    advantage = compute_gae(storage, value, next_value, args)
    target = advantage + value
    fields = (storage.obs, storage.action, storage.logprob, value, advantage, target)
    batch = Batch(*(x.reshape(args.batch_size, *x.shape[2:]) for x in fields))  # (T, N) -> (B,)

    def minibatch_step(train_state, minibatch):
        loss_fn = partial(ppo_loss, apply_fn=train_state.apply_fn, batch=minibatch, args=args)
        grads, losses = jax.grad(loss_fn, has_aux=True)(train_state.params)
        return train_state.apply_gradients(grads=grads), losses

    def epoch(train_state, key):
        order = shuffle(key, args.batch_size)  # one gather per epoch beats one per minibatch
        shape = (args.num_minibatches, args.minibatch_size)
        minibatches = jax.tree.map(lambda x: x[order].reshape(*shape, *x.shape[1:]), batch)
        return jax.lax.scan(minibatch_step, train_state, minibatches)

    keys = jax.random.split(key, args.update_epochs)
    train_state, losses = jax.lax.scan(epoch, train_state, keys)
    metrics = jax.tree.map(jnp.mean, losses) | episode_statistics(storage)
    metrics["charts/learning_rate"] = learning_rate
    metrics["losses/explained_variance"] = 1 - (target - value).var() / target.var()
    return train_state, stats, metrics


def shuffle(key, size: int) -> jax.Array:
    """A random order of the indices 0 to size - 1, (size,) uint32.

    Sorts random numbers whose low bits are replaced by the index, in a fraction of the time that
    jax.random.permutation takes. For size 3 the index has two bits: 1011_00, 0010_01 and 0111_10
    sort to the order 1, 2, 0. Of 8192 indices, about 64 pairs have equal random bits, and stay in
    ascending order.
    """
    index_bits = (size - 1).bit_length()
    numbers = jax.random.bits(key, (size,)) >> index_bits << index_bits
    return jnp.sort(numbers | jnp.arange(size, dtype=jnp.uint32)) & (2**index_bits - 1)


def episode_statistics(storage: Storage) -> dict[str, jax.Array]:
    """Of the episodes that ended: how many, and mean, minimum and maximum of return and length.

    Where none ended, mean, minimum and maximum are NaN or infinite, which the log has as null.
    """
    done = storage.terminated | storage.truncated
    metrics = {"charts/episodes": done.sum()}
    for name, x in [("return", storage.episode_return), ("length", storage.episode_length)]:
        metrics[f"charts/episodic_{name}"] = jnp.where(done, x, 0).sum() / done.sum()
        metrics[f"charts/episodic_{name}_min"] = jnp.where(done, x, jnp.inf).min()
        metrics[f"charts/episodic_{name}_max"] = jnp.where(done, x, -jnp.inf).max()
    return metrics


# === Training ===================================================================================
def train(args: Args) -> None:
    """Train an agent, from the start or from a checkpoint on."""
    # The same in all frameworks: torch's "high" is TF32 on a GPU, as is JAX's "default".
    precision = "highest" if args.matmul_precision == "highest" else "default"
    jax.config.update("jax_default_matmul_precision", precision)
    env = VecEnv(args.env_id, args.num_envs, args.gamma, args.vectorization, args.seed)
    log = RunLog(
        args,
        framework="linen",
        compile_mode="none" if jax.config.values["jax_disable_jit"] else "jit",
        device=jax.devices()[0].device_kind,
        obs_shape=env.obs_shape,
        action_dim=env.action_dim,
        action_low=env.action_low.tolist(),
        action_high=env.action_high.tolist(),
    )

    # fold_in makes an iteration's keys from its number, so that a checkpoint need not hold them.
    key, agent_key = jax.random.split(jax.random.PRNGKey(args.seed))
    iteration = 0
    train_state = make_agent(args, env.obs_shape, env.action_dim, agent_key)
    stats = make_stats(env.obs_dim)
    if (log.dir / "checkpoint.msgpack").exists():  # resumed
        like = Checkpoint(iteration, train_state, stats)
        iteration, train_state, stats = load_checkpoint(log.dir, like)
    obs = env.reset(iteration)
    log.begin(iteration)

    # To the compiler, args is constant. Donating the arguments would save no time.
    policy_fn = jax.jit(partial(policy, apply_fn=train_state.apply_fn, args=args))
    update_fn = jax.jit(partial(update, args=args))
    while iteration < args.num_iterations:
        start = time.perf_counter()
        iteration_key = jax.random.fold_in(key, iteration)
        rollout_key, update_key = jax.random.split(iteration_key)
        obs, storage = rollout(policy_fn, train_state.params, stats, obs, rollout_key, env, args)
        middle = time.perf_counter()
        train_state, stats, metrics = update_fn(train_state, stats, storage, update_key)
        metrics = jax.device_get(metrics)  # sync
        log.write(iteration, metrics, start, middle)
        iteration += 1
        if log.must_save(iteration):
            save_checkpoint(log.dir, Checkpoint(iteration, train_state, stats))
            log.note_saved(iteration)
            if log.stopped_by:  # only here, after saving, so that no iteration is lost
                break
    log.close(iteration)


# === Checkpoint =================================================================================
class Checkpoint(NamedTuple):
    """All that a resumed training needs, but for the environments."""

    iteration: int  # how many are done
    train_state: TrainState
    stats: Stats


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint. Killed at any moment, a run has the old one or the new one."""
    new = folder / "checkpoint.new"
    try:
        new.write_bytes(to_bytes(checkpoint))  # sync
    except OSError as error:  # a full disk
        new.unlink(missing_ok=True)
        sys.exit(f"{new}: {error}. The checkpoint before it, if there is one, stays.")
    os.replace(new, folder / "checkpoint.msgpack")


def load_checkpoint(folder: Path, like: Checkpoint) -> Checkpoint:
    """What save_checkpoint wrote, in the structure of like."""
    return from_bytes(like, (folder / "checkpoint.msgpack").read_bytes())


def load_policy(folder: str | Path, seed: int = 0) -> Callable[..., np.ndarray]:
    """What a run learnt, as a function: policy(obs) is the likeliest action for each obs.

    obs (N, *obs_shape) and actions are NumPy arrays, as the environment has them. With sample=True
    the actions are drawn from the Gaussians, as in training, by seed; without, they are the means.
    """
    info, args = load_info(folder)
    agent = Agent(info["obs_shape"], args.hidden_sizes, info["action_dim"])
    saved = msgpack_restore(Path(folder, "checkpoint.msgpack").read_bytes())
    params = saved["train_state"]["params"]
    obs_stats = RunningMeanStd(**saved["stats"]["obs"])
    get_gaussian = jax.jit(partial(agent.apply, params, method="get_gaussian"))
    low, high = np.float32(info["action_low"]), np.float32(info["action_high"])
    rng = np.random.default_rng(seed)

    def policy(obs, sample=False):
        obs = normalise(flatten(obs, info["obs_shape"]), obs_stats, args)
        mean, log_std = map(np.asarray, get_gaussian(obs))
        action = mean
        if sample:
            action = mean + np.exp(log_std) * rng.standard_normal(mean.shape, np.float32)
        return to_bounds(action.reshape(-1, *low.shape), low, high)

    return policy


def flatten(obs: Any, obs_shape: list[int]) -> np.ndarray:
    """Observations (N, *obs_shape) as the networks take them, (N, obs_dim) float32."""
    obs = np.array(obs, np.float32)
    if obs.shape[1:] != tuple(obs_shape):
        raise ValueError(f"obs must be of shape (N, *{tuple(obs_shape)}), and is {obs.shape}")
    return obs.reshape(len(obs), math.prod(obs_shape))


# === Run log ====================================================================================
# You may stop reading here. The rest is a run's folder, and is the same in all scripts of PPO.
class RunLog:
    """A run's folder: run.json tells what it is, metrics.jsonl has a line for each iteration.

    Ctrl-C and SIGTERM end a run after the iteration that is under way, with a checkpoint.
    """

    def __init__(self, args: Args, **facts: Any) -> None:
        """Make the folder, or take that of --resume. The facts are added to run.json."""
        self.steps = args.num_envs * args.num_steps  # of environments, in an iteration
        self.start = time.perf_counter()
        self.stopped_by = 0  # number of the signal that came
        self.handlers: dict[int, Any] = {}  # of signals, as they were before
        self.wandb: Any = None
        if not args.run_name:
            name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{time.time():.0f}"
            args = replace(args, run_name=name.replace("/", "-").replace(":", "-"))
        self.args = args
        self.dir = Path(args.resume or Path(args.runs_dir, args.run_name))
        packages = ["torch", "jax", "jaxlib", "flax", "equinox", "optax", "numpy"]
        packages += ["gymnax", "gymnasium", "mujoco"]
        self.info: dict[str, Any] = {
            "script": Path(__file__).stem,
            "status": "running",
            "args": asdict(args),
            "python": platform.python_version(),
            "versions": {name: metadata.version(name) for name in packages if name in sys.modules},
            "os": platform.platform(),
            "cpu": platform.processor() or platform.machine(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "iteration": 0,  # how many the checkpoint has
            "resumed": [],  # from which iterations on
            "durations": {"imports": self.start - START},
        } | facts
        self.info |= json.loads(os.environ.get("RUN_INFO", "{}"))  # what benchmark.sh knows
        if args.resume:
            before, old = load_info(self.dir)
            # What sizes arrays, counts steps or names the folder stays, in scripts that have it.
            sizes = ["num_envs", "num_steps", "hidden_sizes", "gru_hidden_size", "num_agents"]
            for name in ["run_name", "env_id", *sizes, "buffer_size", "optimizer"]:
                if getattr(args, name, None) != getattr(old, name, None):
                    fail(f"--resume: {name} stays as it was, {getattr(old, name)!r}")
            if before["status"] == "completed" and before["iteration"] >= args.num_iterations:
                fail("--resume: the run is complete; a larger --total-timesteps trains it on")
            self.info["resumed"] = before["resumed"]
            self.info["wandb_id"] = before.get("wandb_id")
        elif self.dir.exists():
            fail(f"{self.dir} exists: choose another --run-name, or add --resume {self.dir}")
        else:
            self.dir.mkdir(parents=True)
            self.write_info()

    def begin(self, iteration: int) -> None:
        """Open the files. A resumed run loses what it logged after its checkpoint."""
        if self.args.resume:
            self.info["iteration"] = iteration
            self.info["resumed"].append(iteration)
        self.metrics = open(self.dir / "metrics.jsonl", "a+", buffering=1)  # a line at a time
        self.metrics.seek(0)
        lines = self.metrics.readlines()[:iteration]
        self.metrics.truncate(len("".join(lines)))
        if lines:
            self.start -= json.loads(lines[-1])["time/elapsed"]
        for old in self.dir.glob("events.*"):  # which cannot be cut, so they are written anew
            old.unlink()
        self.tensorboard = Writer(str(self.dir))
        for line in lines:
            self.plot(json.loads(line))
        if self.args.track:
            import wandb  # half a second that only --track pays

            self.wandb = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "ppo-rosetta"),
                name=self.dir.name,
                id=self.info.get("wandb_id"),
                dir=self.dir,
                config=self.info,
                resume="allow",
                reinit="create_new",
            )
            self.wandb.define_metric("*", step_metric="global_step")
            self.info["wandb_id"] = self.wandb.id
        self.write_info()
        if threading.current_thread() is threading.main_thread():  # which alone may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.getsignal(number)
                signal.signal(number, self.stop)
        print(f"Writing to {self.dir}. What is compiled makes iteration 0 slow.", flush=True)

    def stop(self, number: int, frame: Any) -> None:
        self.stopped_by = number
        signal.signal(number, self.handlers[number])  # a second one does what it always did

    def write(self, iteration: int, metrics: dict, start: float, middle: float) -> None:
        """Log an iteration: the rollout from start to middle, the update from middle to now."""
        end = time.perf_counter()
        row = {name: float(x) for name, x in metrics.items()}
        row["iteration"] = iteration
        row["global_step"] = (iteration + 1) * self.steps
        row["charts/SPS"] = self.steps / (end - start)
        row["time/elapsed"] = end - self.start
        row["time/iteration"] = end - start
        if self.args.sync_for_timing:
            row["time/rollout"] = middle - start
            row["time/update"] = end - middle
        # JSON has no NaN: the return of no episode, and a diverged loss, are null.
        finite = {name: x if math.isfinite(x) else None for name, x in row.items()}

        self.metrics.write(json.dumps(finite) + "\n")
        self.plot(finite)
        if (iteration + 1) % math.ceil(self.args.num_iterations / 100) == 0:
            progress = f"iteration {iteration + 1}/{self.args.num_iterations}"
            episodes = f"{row['charts/episodes']:.0f} episodes"
            returns = f"return {row['charts/episodic_return']:.4g}"
            speed = f"{row['charts/SPS']:,.0f} steps/s"
            print(f"{progress}: {episodes}, {returns}, {speed}", flush=True)
        if self.wandb:
            try:
                self.wandb.log(finite, step=iteration)
            except ConnectionError:  # a SIGTERM to all processes of a job ends W&B's, too
                print("W&B's process has ended: it gets no more of this run.", flush=True)
                self.wandb = None

    def plot(self, row: dict[str, Any]) -> None:
        """Add a line of metrics.jsonl to TensorBoard's curves, which show 1,000 points at most."""
        if row["iteration"] % math.ceil(self.args.num_iterations / 1000) > 0:
            return
        for name, x in row.items():
            if x is not None and "/" in name:
                self.tensorboard.add_scalar(name, x, row["global_step"])

    def must_save(self, done: int) -> bool:
        """Whether a checkpoint is due after so many iterations."""
        is_due = self.args.save_every > 0 and done % self.args.save_every == 0
        return is_due or done == self.args.num_iterations or self.stopped_by > 0

    def note_saved(self, done: int) -> None:
        self.info["iteration"] = done
        self.write_info()

    def write_info(self) -> None:
        (self.dir / "run.new").write_text(json.dumps(self.info, indent=2))
        os.replace(self.dir / "run.new", self.dir / "run.json")

    def close(self, done: int) -> None:
        """Say how the run ended: complete, or stopped by a signal."""
        is_complete = done >= self.args.num_iterations
        self.info["status"] = "completed" if is_complete else "stopped"
        self.info["durations"]["total"] = time.perf_counter() - self.start
        self.write_info()
        self.metrics.close()
        self.tensorboard.close()
        if self.wandb:
            self.wandb.summary.update(self.info)
            self.wandb.finish()
        self.give_signals_back()
        if not is_complete:
            print(f"Stopped after {done} iterations. To resume: --resume {self.dir}")
            sys.exit(128 + self.stopped_by)
        print(f"Written to {self.dir}. evaluate.py shows what it learnt.")

    def give_signals_back(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)


def load_info(folder: str | Path) -> tuple[dict[str, Any], Args]:
    """Return what a run's run.json says of it, and its arguments."""
    path = Path(folder, "run.json")
    if not path.exists():
        fail(f"{folder} has no run.json, so it is no run to resume or to play")
    info = json.loads(path.read_text())
    if info["script"] != Path(__file__).stem:
        fail(f"{folder} is a run of {info['script']!r}")
    return info, Args(**info["args"])


def args_to_resume() -> Args | None:
    """The arguments of the run that --resume names on the command line, or None."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume")
    parser.add_argument("--env-id", "--env_id")
    given, _ = parser.parse_known_args()
    if not given.resume:
        return None
    _, args = load_info(given.resume)
    if ":" in args.env_id and given.env_id != args.env_id:  # run.json may be a stranger's
        fail(f"--resume: its environment is code; to run it, add --env-id {args.env_id!r}")
    return args


def fail(reason: str) -> NoReturn:
    print(reason, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    train(parse_args())

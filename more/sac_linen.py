# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnax==1.0.1", "six==1.17.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""SAC in JAX and Flax Linen: acting, replay and learning are one jax.jit.

    python more/sac_linen.py --seed 1                            # Pendulum-v1, in half a minute
    python more/sac_linen.py mujoco --env-id my_module:MyEnv     # the paper's settings, for robots

Read Agent to Training first. "# sync" marks a line that waits for the device. What to look at:
- draw_action squashes a Gaussian to [-1, 1]; the replay holds that, and VecEnv maps it to bounds.
- sac_loss adds up three losses. stop_gradient makes each train its own parameters alone, so that
  one jax.grad and one Adam train all.
- Replay is a tuple of arrays and of the number of steps so far; add returns the next one.
- iterate runs environments, replay and updates in one lax.scan, so an iteration is one call.
Diff me with dqn_linen.py to see what continuous actions change, with sac_torch.py to see PyTorch,
with sac_linen_gymnasium.py to see environments in NumPy.
"""

import time

START = time.perf_counter()  # before the imports, which take seconds

import argparse
import importlib
import json
import math
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

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import linen as nn
from flax import struct
from flax.serialization import from_bytes, msgpack_restore, to_bytes
from gymnax.environments.spaces import Box
from tensorboard.summary import Writer


# === Arguments ==================================================================================
@dataclass
class Args:
    seed: int = 1  # seed of all random numbers
    env_id: str = "Pendulum-v1"  # gymnax environment with continuous actions, or my_module:MyEnv
    total_timesteps: int = 20_000  # environment steps, in whole iterations
    learning_rate: float = 3e-3  # Adam's, of actor, critics and alpha
    anneal_lr: bool = False  # decay the learning rate linearly to 0
    num_envs: int = 4  # parallel environments
    num_steps: int = 200  # steps of each environment per iteration, a line of the log
    gamma: float = 0.99  # discount factor
    buffer_size: int = 100_000  # environment steps that the replay holds
    batch_size: int = 64  # transitions drawn from the replay for each update
    train_frequency: int = 2  # environment steps from one update to the next
    learning_starts: int = 1_000  # environment steps with random actions, before updates begin
    tau: float = 0.01  # share of the way that target critics move to the critics, per update
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layers of the actor and of each critic
    matmul_precision: Literal["medium", "high", "highest"] = "high"  # highest: no TF32 on a GPU
    runs_dir: str = "runs"  # folder that gets one folder per run
    run_name: str = ""  # that folder's name; by default {env_id}__{script}__{seed}__{time}
    track: bool = False  # log to Weights & Biases, too
    save_every: int = 0  # iterations between checkpoints; 0: only when training ends or is stopped
    save_replay: bool = True  # checkpoints hold the replay; off: a resumed run fills a new one
    resume: str = ""  # folder of a run to resume; its arguments are the defaults of all others

    def __post_init__(self) -> None:
        """Work out the sizes. On the command line, a ValueError becomes a message."""
        if self.seed not in range(2**32):  # JAX would take the lower bits, which are another seed
            raise ValueError("--seed must lie between 0 and 2**32 - 1")
        if self.buffer_size % self.num_envs != 0:
            raise ValueError(f"--buffer-size must be a multiple of --num-envs, {self.num_envs}")
        steps = self.num_envs * self.num_steps
        self.num_iterations = self.total_timesteps // steps
        if self.num_iterations < 1:
            raise ValueError(f"--total-timesteps must be at least an iteration, {steps} steps")
        self.hidden_sizes = tuple(self.hidden_sizes)  # run.json has a list


def parse_args() -> Args:
    """Read the command line: the name of a preset, if it begins with one, and flags."""
    saved = args_to_resume()  # with --resume, the run's own arguments are the defaults
    if saved:
        return tyro.cli(Args, default=saved)
    mujoco = Args(
        total_timesteps=1_000_000,
        learning_rate=3e-4,
        num_envs=1,
        num_steps=5_000,
        buffer_size=1_000_000,
        batch_size=256,
        train_frequency=1,
        learning_starts=5_000,
        tau=0.005,
        hidden_sizes=(256, 256),
    )
    source = "The settings of Haarnoja et al. 2018 (arXiv 1812.05905), and CleanRL's random start."
    presets = {
        "pendulum": ("For Pendulum-v1. The word mujoco before the flags: for robots.", Args()),
        "mujoco": (source, mujoco),
    }
    argv = sys.argv[1:]
    if not argv or argv[0] not in presets:
        argv = ["pendulum", *argv]
    return tyro.extras.overridable_config_cli(presets, args=argv)


# === Environment ================================================================================
class EnvState(NamedTuple):
    key: jax.Array  # split at every step
    inner: Any  # gymnax's own state; N = num_envs rows in each leaf
    episode_return: jax.Array  # (N,), of the running episode
    episode_length: jax.Array  # (N,)


class VecEnv:
    """N = num_envs gymnax environments with flat observations; an episode's end starts the next."""

    def __init__(self, env_id: str, num_envs: int) -> None:
        if ":" in env_id:  # your own; envs/check.py tests it
            sys.path.append(os.getcwd())
            module, name = env_id.split(":")
            self.env = getattr(importlib.import_module(module), name)()
            self.params = self.env.default_params
        else:
            try:
                self.env, self.params = gymnax.make(env_id)
            except ValueError as error:
                fail(f"--env-id: {error}")
        self.action_space = self.env.action_space(self.params)
        space = self.action_space
        if not isinstance(space, Box) or not jnp.issubdtype(space.dtype, jnp.floating):
            fail(f"--env-id: {env_id} has no continuous actions: see dqn_linen.py and dqn_torch.py")
        if not np.all(np.isfinite(space.low) & np.isfinite(space.high)):
            fail(f"--env-id: the actions of {env_id} must have finite bounds")
        self.action_low = np.broadcast_to(np.float32(space.low), space.shape)
        self.action_high = np.broadcast_to(np.float32(space.high), space.shape)
        self.num_envs = num_envs
        self.action_dim = math.prod(space.shape)
        self.obs_shape = self.env.observation_space(self.params).shape
        self.obs_dim = math.prod(self.obs_shape)

    def reset(self, key: jax.Array) -> tuple[jax.Array, EnvState]:
        """Start every environment; return obs (N, obs_dim) and the state."""
        key, reset_key = jax.random.split(key)
        obs, inner = jax.vmap(self.env.reset)(jax.random.split(reset_key, self.num_envs))
        # Some environments return weakly typed arrays from reset and strongly typed ones from step,
        # so what takes the state would compile twice. astype makes all of them strong.
        inner = jax.tree.map(lambda x: x.astype(x.dtype), inner)
        zeros = jnp.zeros(self.num_envs)
        return self.flatten(obs), EnvState(key, inner, zeros, zeros)

    def step(self, state: EnvState, action: jax.Array) -> tuple[jax.Array, EnvState, dict]:
        """Take action (N, action_dim), of which -1 to 1 spans the bounds, and the rest is clipped.

        Return obs (after any restart), state and a dict of results.
        """
        action = action.reshape(self.num_envs, *self.action_space.shape)
        action = to_bounds(action, self.action_low, self.action_high)
        key, step_key = jax.random.split(state.key)
        keys = jax.random.split(step_key, self.num_envs)
        step = jax.vmap(partial(self.env.step, params=self.params))
        obs, inner, reward, terminated, truncated, info = step(keys, state.inner, action)
        reward = reward.astype(jnp.float32)
        episode_return = state.episode_return + reward
        episode_length = state.episode_length + 1
        result = {
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "next_obs": self.flatten(info["final_observation"]),
            "episode_return": episode_return,
            "episode_length": episode_length,
        }
        done = terminated | truncated
        episode_return = jnp.where(done, 0, episode_return)
        episode_length = jnp.where(done, 0, episode_length)
        return self.flatten(obs), EnvState(key, inner, episode_return, episode_length), result

    def flatten(self, obs: jax.Array) -> jax.Array:
        return obs.reshape(self.num_envs, self.obs_dim).astype(obs.dtype)  # strong, as in reset


def to_bounds(action, low, high):
    """Map actions from [-1, 1] to [low, high], and clip what lies outside."""
    return ((low + high) / 2 + (high - low) / 2 * action).clip(low, high)


# === Agent ======================================================================================
class MLP(nn.Module):
    hidden_sizes: tuple[int, ...]
    num_outputs: int

    @nn.compact
    def __call__(self, x):
        for size in self.hidden_sizes:
            x = nn.relu(dense(x, size))
        return dense(x, self.num_outputs)


class Actor(nn.Module):
    """A Gaussian for each number of an action, before draw_action squashes it."""

    hidden_sizes: tuple[int, ...]
    action_dim: int

    @nn.compact
    def __call__(self, obs):  # (B, obs_dim) -> mean and log_std, (B, action_dim) each
        x = obs.astype(jnp.float32)
        mean, log_std = jnp.split(MLP(self.hidden_sizes, 2 * self.action_dim)(x), 2, axis=-1)
        # SB3 and SBX clip to the same bounds; CleanRL maps log_std into [-5, 2] by a tanh.
        return mean, log_std.clip(-20, 2)


class Critics(nn.Module):
    """Two estimates of Q(obs, action), which counts rewards and the entropy of later actions."""

    hidden_sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, obs, action):  # (B, obs_dim), (B, action_dim) -> (2, B)
        x = jnp.concatenate([obs.astype(jnp.float32), action], axis=-1)
        return jnp.stack([MLP(self.hidden_sizes, 1)(x).squeeze(-1) for _ in range(2)])


def dense(x, num_outputs: int):
    """A layer with PyTorch's initial weights and biases: uniform within 1 / sqrt(inputs)."""
    bound = 1 / math.sqrt(x.shape[-1])
    init = partial(jax.random.uniform, minval=-bound, maxval=bound)
    return nn.Dense(num_outputs, kernel_init=init, bias_init=init)(x)


@struct.dataclass
class TrainState:
    params: dict[str, Any]  # of "actor" and "critics", and the number "log_alpha"
    target_params: Any  # a moving average of the critics' parameters
    opt_state: Any
    actor_fn: Callable = struct.field(pytree_node=False)
    critics_fn: Callable = struct.field(pytree_node=False)
    tx: optax.GradientTransformation = struct.field(pytree_node=False)


def make_agent(args: Args, obs_shape: tuple[int, ...], action_dim: int, key) -> TrainState:
    """Initialise the parameters, the target critics, which begin as a copy, and the optimizer."""
    actor = Actor(args.hidden_sizes, action_dim)
    critics = Critics(args.hidden_sizes)
    actor_key, critics_key = jax.random.split(key)
    obs = jnp.zeros((1, math.prod(obs_shape)))  # obs comes flat; a CNN would restore its shape
    action = jnp.zeros((1, action_dim))
    params = {
        "actor": jax.jit(actor.init)(actor_key, obs),
        "critics": jax.jit(critics.init)(critics_key, obs, action),
        "log_alpha": jnp.zeros(()),
    }
    copy = jax.tree.map(jnp.copy, params["critics"])  # own memory: training overwrites both
    tx = optax.scale_by_adam()  # without a rate: update multiplies by an iteration's own
    return TrainState(params, copy, tx.init(params), actor.apply, critics.apply, tx)


# === Replay =====================================================================================
class Transition(NamedTuple):
    """One row per step: N = num_envs of them, batch_size in a batch, buffer_size in the replay."""

    obs: jax.Array  # (N, obs_dim) of the environment's type, what the action was chosen from
    action: jax.Array  # (N, action_dim), in [-1, 1] and not in the environment's units
    reward: jax.Array  # (N,) float32, result of the action, like all fields below
    terminated: jax.Array  # (N,) bool
    next_obs: jax.Array  # (N, obs_dim), before any restart


class Replay(NamedTuple):
    """The last buffer_size environment steps."""

    rows: Transition
    num_added: jax.Array  # () int32, how many environment steps so far


def make_replay(args: Args, obs_dim: int, obs_dtype: np.dtype, action_dim: int) -> Replay:
    """An empty one."""
    size = args.buffer_size
    gigabytes = 2 * size * obs_dim * obs_dtype.itemsize / 1e9
    if gigabytes > 1:
        print(f"The replay takes {gigabytes:.1f} GB: --buffer-size {size}, obs and next_obs.")
    rows = Transition(
        obs=jnp.zeros((size, obs_dim), obs_dtype),
        action=jnp.zeros((size, action_dim)),
        reward=jnp.zeros(size),
        terminated=jnp.zeros(size, bool),
        next_obs=jnp.zeros((size, obs_dim), obs_dtype),
    )
    return Replay(rows, jnp.int32(0))


def add(replay: Replay, obs, action, result: dict) -> Replay:
    """Store a step of all environments, over the oldest rows."""
    row = replay.num_added % len(replay.rows.obs)
    step = Transition(obs, action, result["reward"], result["terminated"], result["next_obs"])

    def write(old, new):
        return jax.lax.dynamic_update_slice_in_dim(old, new, row, axis=0)

    rows = jax.tree.map(write, replay.rows, step)
    return Replay(rows, replay.num_added + len(obs))


def sample(replay: Replay, key, batch_size: int) -> Transition:
    """A batch of the rows so far, drawn uniformly with replacement."""
    num_rows = jnp.minimum(replay.num_added, len(replay.rows.obs))
    rows = jax.random.randint(key, (batch_size,), 0, num_rows)
    return Transition(*(x[rows] for x in replay.rows))


def updates_due(replay: Replay, args: Args) -> jax.Array:
    """How many updates are due after the step that was added last."""
    before = updates_after(replay.num_added - args.num_envs, args)
    return updates_after(replay.num_added, args) - before


def updates_after(steps, args: Args) -> jax.Array:
    """How many updates are due once so many steps were added, whatever num_envs is."""
    return jnp.maximum(steps - args.learning_starts, 0) // args.train_frequency


# === Act ========================================================================================
def act(train_state, obs, key, is_random):
    """Actions (N, action_dim) in [-1, 1]: the actor's, or until learning starts random ones."""
    noise_key, action_key = jax.random.split(key)
    mean, log_std = train_state.actor_fn(train_state.params["actor"], obs)
    action, _ = draw_action(mean, log_std, jax.random.normal(noise_key, mean.shape))
    random_action = jax.random.uniform(action_key, mean.shape, minval=-1.0)
    return jnp.where(is_random, random_action, action)


def draw_action(mean, log_std, noise):
    """The tanh of Gaussian draws, (B, action_dim), and the log of their density, (B,)."""
    x = mean + jnp.exp(log_std) * noise
    logprob = -(0.5 * noise**2 + log_std + 0.5 * math.log(2 * math.pi))
    # The log of tanh's slope, 1 - tanh(x)**2, which is 0 in float32 for x above 8 or 9. SB3 and
    # CleanRL add 1e-6 to the slope: at x = 10 its log is then -13.8 instead of -18.6.
    log_slope = 2 * (math.log(2) - x - nn.softplus(-2 * x))
    return jnp.tanh(x), (logprob - log_slope).sum(-1)


# === Loss =======================================================================================
def td_target(next_q, next_logprob, alpha, batch: Transition, args: Args):
    """What Q(obs, action) should be, (B,), from both target critics' values of the next action.

    The lower one counts, since the higher one overestimates (Fujimoto et al. 2018), and entropy is
    a reward. After a termination the future is worth 0. After a truncation it is not: the episode
    could have gone on from next_obs.
    """
    future = next_q.min(0) - alpha * next_logprob
    return batch.reward + args.gamma * jnp.where(batch.terminated, 0.0, future)


def sac_loss(params, train_state, batch: Transition, noise, args: Args):
    """The sum of the critics', the actor's and alpha's losses (Haarnoja et al. 2018), and a log.

    noise (2, B, action_dim) draws the actions at next_obs and at obs.
    """
    actor_fn, critics_fn = train_state.actor_fn, train_state.critics_fn
    fixed = jax.lax.stop_gradient(params)  # for what a loss reads, and does not train
    alpha = jnp.exp(fixed["log_alpha"])

    mean, log_std = actor_fn(fixed["actor"], batch.next_obs)
    next_action, next_logprob = draw_action(mean, log_std, noise[0])
    next_q = critics_fn(train_state.target_params, batch.next_obs, next_action)
    target = td_target(next_q, next_logprob, alpha, batch, args)
    q = critics_fn(params["critics"], batch.obs, batch.action)
    # As SB3 and SBX. CleanRL omits the 0.5, which does not change Adam's steps.
    td_loss = 0.5 * ((q - target) ** 2).mean(-1).sum()

    mean, log_std = actor_fn(params["actor"], batch.obs)
    action, logprob = draw_action(mean, log_std, noise[1])
    action_q = critics_fn(fixed["critics"], batch.obs, action).min(0)
    actor_loss = (alpha * logprob - action_q).mean()

    entropy = -logprob.mean()
    target_entropy = -action.shape[-1]
    # As SB3 and SBX. In the paper and in CleanRL, the first factor is alpha itself.
    alpha_loss = params["log_alpha"] * jax.lax.stop_gradient(entropy - target_entropy)
    loss = td_loss + actor_loss + alpha_loss
    return loss, {
        "losses/td_loss": td_loss,
        "losses/q_value": q.mean(),
        "losses/actor_loss": actor_loss,
        "losses/entropy": entropy,
        "losses/alpha": alpha,
    }


# === Update =====================================================================================
def update(train_state, losses, batch: Transition, noise, learning_rate, args: Args):
    """Train on a batch, and then move the target critics a little towards the critics.

    Return the next train_state and losses, which are sums over updates.
    """
    # One gradient of the sum: each parameter is in one loss alone. All losses see the parameters
    # from before this update, as in brax. SB3 (alpha, critics, actor) and CleanRL (critics, actor,
    # alpha) update one after the other, so their actor sees the new critics.
    loss_fn = partial(sac_loss, train_state=train_state, batch=batch, noise=noise, args=args)
    grads, new_losses = jax.grad(loss_fn, has_aux=True)(train_state.params)
    direction, opt_state = train_state.tx.update(grads, train_state.opt_state)
    params = optax.tree.add_scale(train_state.params, -learning_rate, direction)
    old = train_state.target_params
    target_params = optax.incremental_update(params["critics"], old, args.tau)
    train_state = train_state.replace(
        params=params, target_params=target_params, opt_state=opt_state
    )
    return train_state, jax.tree.map(jnp.add, losses, new_losses)


def learn(i, carry, constants, args: Args):
    """Train on a new batch, and add up the losses: update i of those that are due after a step."""
    train_state, losses = carry
    replay, key, learning_rate = constants
    update_key = jax.random.fold_in(key, i)
    sample_key, noise_key = jax.random.split(update_key)
    batch = sample(replay, sample_key, args.batch_size)
    noise = jax.random.normal(noise_key, (2, *batch.action.shape))
    return update(train_state, losses, batch, noise, learning_rate, args)


class Episodes(NamedTuple):
    """What episode_statistics reads: T = num_steps steps in N = num_envs environments."""

    terminated: jax.Array  # (T, N) bool
    truncated: jax.Array  # (T, N) bool
    episode_return: jax.Array  # (T, N), including this step
    episode_length: jax.Array  # (T, N)


def episode_statistics(episodes: Episodes) -> dict[str, jax.Array]:
    """Of the episodes that ended: how many, and mean, minimum and maximum of return and length.

    Where none ended, mean, minimum and maximum are NaN or infinite, which the log has as null.
    """
    done = episodes.terminated | episodes.truncated
    metrics = {"charts/episodes": done.sum()}
    for name, x in [("return", episodes.episode_return), ("length", episodes.episode_length)]:
        metrics[f"charts/episodic_{name}"] = jnp.where(done, x, 0).sum() / done.sum()
        metrics[f"charts/episodic_{name}_min"] = jnp.where(done, x, jnp.inf).min()
        metrics[f"charts/episodic_{name}_max"] = jnp.where(done, x, -jnp.inf).max()
    return metrics


# === Training ===================================================================================
def iterate(train_state, replay, obs, env_state, key, is_random, learning_rate, env, args: Args):
    """Act, step, store and learn num_steps times; return the four that changed, and what to log."""

    def step(carry, inputs):
        train_state, replay, obs, env_state, losses = carry
        is_random, act_key, learn_key = inputs
        action = act(train_state, obs, act_key, is_random)
        new_obs, env_state, result = env.step(env_state, action)
        # Written first, read afterwards: the other way round, XLA copies the replay at each step.
        replay = add(replay, obs, action, result)

        constants = (replay, learn_key, learning_rate)
        learn_fn = partial(learn, constants=constants, args=args)
        carry = (train_state, losses)
        train_state, losses = jax.lax.fori_loop(0, updates_due(replay, args), learn_fn, carry)
        episodes = Episodes(*(result[x] for x in Episodes._fields))
        return (train_state, replay, new_obs, env_state, losses), episodes

    # A compiled loop over the inputs: the carry goes on from step to step, episodes are stacked.
    names = ("td_loss", "q_value", "actor_loss", "entropy", "alpha")  # of sac_loss
    losses = {f"losses/{name}": jnp.zeros(()) for name in names}
    carry = (train_state, replay, obs, env_state, losses)
    act_keys, learn_keys = jax.random.split(key, (2, args.num_steps))
    carry, episodes = jax.lax.scan(step, carry, (is_random, act_keys, learn_keys))
    updates_before = train_state.opt_state.count
    train_state, replay, obs, env_state, losses = carry
    num_updates = train_state.opt_state.count - updates_before
    metrics = episode_statistics(episodes)
    metrics |= {name: x * (1 / num_updates) for name, x in losses.items()}  # or NaN: 0 * inf
    metrics["charts/learning_rate"] = learning_rate
    metrics["charts/updates"] = num_updates
    return train_state, replay, obs, env_state, metrics


def train(args: Args) -> None:
    """Train an agent, from the start or from a checkpoint on."""
    # The same in all frameworks: torch's "high" is TF32 on a GPU, as is JAX's "default".
    precision = "highest" if args.matmul_precision == "highest" else "default"
    jax.config.update("jax_default_matmul_precision", precision)
    env = VecEnv(args.env_id, args.num_envs)
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

    # PRNGKey and not key: it makes plain arrays, so that a checkpoint can hold env_state. fold_in
    # makes an iteration's keys from its number, so that a checkpoint need not hold them.
    key, agent_key, env_key = jax.random.split(jax.random.PRNGKey(args.seed), 3)
    iteration = 0
    train_state = make_agent(args, env.obs_shape, env.action_dim, agent_key)
    obs, env_state = jax.jit(env.reset)(env_key)
    replay = make_replay(args, env.obs_dim, obs.dtype, env.action_dim)
    if (log.dir / "checkpoint.msgpack").exists():  # resumed
        like = Checkpoint(iteration, train_state, replay, obs, env_state)
        iteration, train_state, replay, obs, env_state = load_checkpoint(log.dir, like)
        if replay.num_added == 0:
            print("The checkpoint has no replay: a new one is filled before updates go on.")
    log.begin(iteration)

    # To the compiler, env and args are constants. What is donated is changed in place: the replay
    # is never copied.
    iterate_fn = jax.jit(partial(iterate, env=env, args=args), donate_argnums=(0, 1, 2, 3))
    while iteration < args.num_iterations:
        start = time.perf_counter()
        steps = np.arange(iteration * log.steps, (iteration + 1) * log.steps, args.num_envs)
        is_random = steps < args.learning_starts  # (num_steps,)
        decay = 1 - iteration / args.num_iterations if args.anneal_lr else 1.0
        learning_rate = args.learning_rate * decay
        iteration_key = jax.random.fold_in(key, iteration)
        train_state, replay, obs, env_state, metrics = iterate_fn(
            train_state, replay, obs, env_state, iteration_key, is_random, learning_rate
        )
        metrics = jax.device_get(metrics)  # sync
        log.write(iteration, metrics, start)
        iteration += 1
        if log.must_save(iteration):
            rows = rows_to_save(replay, args)
            save_checkpoint(log.dir, Checkpoint(iteration, train_state, rows, obs, env_state))
            log.note_saved(iteration)
            if log.stopped_by:  # only here, after saving, so that no iteration is lost
                break
    log.close(iteration)


# === Checkpoint =================================================================================
class Checkpoint(NamedTuple):
    """All that a resumed training needs."""

    iteration: int  # how many are done
    train_state: TrainState
    replay: Replay
    obs: jax.Array
    env_state: Any


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint. Killed at any moment, a run has the old one or the new one."""
    # Flax writes its own classes. An environment's state may be of any class: a list of its leaves.
    checkpoint = checkpoint._replace(env_state=jax.tree.leaves(checkpoint.env_state))
    new = folder / "checkpoint.new"
    try:
        new.write_bytes(to_bytes(checkpoint))  # sync
    except OSError as error:  # a full disk
        new.unlink(missing_ok=True)
        sys.exit(f"{new}: {error}. The checkpoint before it, if there is one, stays.")
    os.replace(new, folder / "checkpoint.msgpack")


def load_checkpoint(folder: Path, like: Checkpoint) -> Checkpoint:
    """What save_checkpoint wrote, in the structure of like."""
    arrays, structure = jax.tree.flatten(like.env_state)
    content = (folder / "checkpoint.msgpack").read_bytes()
    saved = from_bytes(like._replace(env_state=arrays), content)
    num_rows = min(int(saved.replay.num_added), len(like.replay.rows.obs))
    pairs = zip(like.replay.rows, saved.replay.rows, strict=True)
    rows = Transition(*(empty.at[:num_rows].set(x) for empty, x in pairs))
    replay = saved.replay._replace(rows=rows)
    env_state = jax.tree.unflatten(structure, saved.env_state)
    return saved._replace(replay=replay, env_state=env_state)


def rows_to_save(replay: Replay, args: Args) -> Replay:
    """What a checkpoint holds of a replay: the rows so far, or with --no-save-replay none."""
    num_added = replay.num_added if args.save_replay else jnp.int32(0)
    return Replay(jax.tree.map(lambda x: np.asarray(x)[:num_added], replay.rows), num_added)


def load_policy(folder: str | Path, seed: int = 0) -> Callable[..., np.ndarray]:
    """What a run learnt, as a function: policy(obs) is the squashed mean action for each obs.

    obs (N, *obs_shape) and actions are NumPy arrays, as the environment has them. With sample=True
    the actions are drawn, as in training, by seed.
    """
    info, args = load_info(folder)
    actor = Actor(args.hidden_sizes, info["action_dim"])
    saved = msgpack_restore(Path(folder, "checkpoint.msgpack").read_bytes())
    params = saved["train_state"]["params"]["actor"]
    get_gaussian = jax.jit(partial(actor.apply, params))
    low, high = np.float32(info["action_low"]), np.float32(info["action_high"])
    rng = np.random.default_rng(seed)

    def policy(obs, sample=False):
        mean, log_std = get_gaussian(flatten(obs, info["obs_shape"]))
        action = np.asarray(mean)
        if sample:
            action = action + np.exp(log_std) * rng.standard_normal(mean.shape, np.float32)
        return to_bounds(np.tanh(action).reshape(-1, *low.shape), low, high)

    return policy


def flatten(obs: Any, obs_shape: list[int]) -> np.ndarray:
    """Observations (N, *obs_shape) as the networks take them, (N, obs_dim) float32."""
    obs = np.array(obs, np.float32)
    if obs.shape[1:] != tuple(obs_shape):
        raise ValueError(f"obs must be of shape (N, *{tuple(obs_shape)}), and is {obs.shape}")
    return obs.reshape(len(obs), math.prod(obs_shape))


# === Run log ====================================================================================
# You may stop reading here. The rest is a run's folder, and is the same in DQN and SAC.
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

    def write(self, iteration: int, metrics: dict, start: float) -> None:
        """Log an iteration, which began at start and ends now."""
        end = time.perf_counter()
        row = {name: float(x) for name, x in metrics.items()}
        row["iteration"] = iteration
        row["global_step"] = (iteration + 1) * self.steps
        row["charts/SPS"] = self.steps / (end - start)
        row["time/elapsed"] = end - self.start
        row["time/iteration"] = end - start
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

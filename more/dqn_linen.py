# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnax==1.0.1", "six==1.17.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""DQN in JAX and Flax Linen: acting, replay and learning are one jax.jit.

    python more/dqn_linen.py --seed 1          # CartPole-v1
    python more/dqn_linen.py minatar --seed 1  # Breakout, by MinAtar's own settings

Read Agent to Training first. "# sync" marks a line that waits for the device. What to look at:
- TrainState holds parameters, target and optimizer; update returns the next one.
- iterate acts, steps, stores and learns in one lax.scan, so an iteration is one call.
- The replay is written before it is read, and train donates it: XLA changes it in place.
- epsilon comes from outside, for each step, since Python works it out more exactly than float32.
Diff me with dqn_torch.py to see what PyTorch changes, with dqn_linen_gymnasium.py to see what
environments in NumPy do.
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
from flax.serialization import from_bytes, msgpack_restore, to_bytes
from flax.training import train_state
from gymnax.environments.spaces import Discrete
from gymnax.wrappers import StickyActionWrapper
from tensorboard.summary import Writer


# === Arguments ==================================================================================
@dataclass
class Args:
    seed: int = 1  # seed of all random numbers
    env_id: str = "CartPole-v1"  # gymnax environment with discrete actions, or my_module:MyEnv
    sticky_actions: float = 0.0  # chance that an environment repeats its last action instead
    full_actions: bool = False  # MinAtar's games: all six actions, also those without effect
    max_episode_steps: int = 0  # steps after which an episode is truncated; 0: the environment's
    total_timesteps: int = 500_000  # environment steps, in whole iterations
    learning_rate: float = 2.5e-4  # the optimizer's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    num_envs: int = 8  # parallel environments
    num_steps: int = 625  # steps of each environment per iteration, a line of the log
    gamma: float = 0.99  # discount factor
    buffer_size: int = 10_000  # environment steps that the replay holds
    batch_size: int = 128  # transitions drawn from the replay for each update
    train_frequency: int = 10  # environment steps from one update to the next
    learning_starts: int = 10_000  # environment steps before the first update
    target_network_frequency: int = 50  # updates (not steps) between target copies
    double_q: bool = False  # the online network chooses the target's action (Double DQN)
    start_e: float = 1.0  # chance of a random action, until learning starts
    end_e: float = 0.05  # chance of a random action in the end
    exploration_steps: int = 250_000  # environment steps from learning_starts to end_e, linearly
    loss: Literal["mse", "huber"] = "mse"  # of the TD error: squared, or linear beyond 1
    optimizer: Literal["adam", "rmsprop"] = "adam"  # rmsprop: centred, without momentum
    optimizer_eps: float = 1e-8  # added to the root in the optimizer's denominator
    rmsprop_decay: float = 0.95  # decay of RMSProp's moving averages
    hidden_sizes: tuple[int, ...] = (120, 84)  # hidden layers; images are convolved before
    matmul_precision: Literal["medium", "high", "highest"] = "high"  # highest: no TF32 on a GPU
    runs_dir: str = "runs"  # folder that gets one folder per run
    run_name: str = ""  # that folder's name; by default {env_id}__{script}__{seed}__{time}
    track: bool = False  # log to Weights & Biases, too
    save_every: int = 0  # iterations between checkpoints; 0: only when training ends or is stopped
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
    # The settings of MinAtar's examples/dqn.py (Young & Tian 2019), five million frames long.
    minatar = Args(
        env_id="Breakout-MinAtar",
        sticky_actions=0.1,
        full_actions=True,
        max_episode_steps=2**31 - 1,
        total_timesteps=5_000_000,
        anneal_lr=False,
        num_envs=1,
        num_steps=5_000,
        buffer_size=100_000,
        batch_size=32,
        train_frequency=1,
        learning_starts=5_000,
        target_network_frequency=1_000,
        end_e=0.1,
        exploration_steps=100_000,
        loss="huber",
        optimizer="rmsprop",
        optimizer_eps=0.01,
        hidden_sizes=(128,),
    )
    presets = {
        "cartpole": ("Before the flags, minatar chooses other settings.", Args()),
        "minatar": ("The settings of MinAtar's examples/dqn.py: five million frames.", minatar),
    }
    argv = sys.argv[1:]
    if not argv or argv[0] not in presets:
        argv = ["cartpole", *argv]
    return tyro.extras.overridable_config_cli(presets, args=argv)


# === Environment ================================================================================
class EnvState(NamedTuple):
    key: jax.Array  # split at every step
    inner: Any  # gymnax's own state; N = num_envs rows in each leaf
    episode_return: jax.Array  # (N,), of the running episode
    episode_length: jax.Array  # (N,)


class VecEnv:
    """N = num_envs gymnax environments with flat observations; an episode's end starts the next."""

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        sticky_actions: float = 0.0,
        full_actions: bool = False,
        max_episode_steps: int = 0,
    ) -> None:
        if full_actions and not env_id.endswith("-MinAtar"):
            fail(f"--full-actions is for MinAtar's games, not for {env_id}")
        if ":" in env_id:  # your own; envs/check.py tests it
            sys.path.append(os.getcwd())
            module, name = env_id.split(":")
            self.env = getattr(importlib.import_module(module), name)()
            self.params = self.env.default_params
        else:
            options = {"use_minimal_action_set": False} if full_actions else {}
            try:
                self.env, self.params = gymnax.make(env_id, **options)
            except ValueError as error:
                fail(f"--env-id: {error}")
        space = self.env.action_space(self.params)
        if not isinstance(space, Discrete):
            hint = "see more/sac_linen.py or sac_torch.py"
            fail(f"--env-id: {env_id} has continuous actions: {hint}")
        self.num_envs = num_envs
        self.num_actions = space.n
        self.obs_shape = self.env.observation_space(self.params).shape
        self.obs_dim = math.prod(self.obs_shape)
        if sticky_actions > 0:
            self.env = StickyActionWrapper(self.env, sticky_actions)
        if max_episode_steps > 0:
            if not hasattr(self.params, "max_steps_in_episode"):
                fail(f"--max-episode-steps: {env_id} has no max_steps_in_episode in its parameters")
            self.params = self.params.replace(max_steps_in_episode=max_episode_steps)

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
        """Take action (N,) int32; return obs (after any restart), state and a dict of results."""
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


# === Agent ======================================================================================
class Agent(nn.Module):
    """Q(obs, action) of each action: an MLP; before it, for images (H, W, C), a convolution."""

    obs_shape: tuple[int, ...]
    hidden_sizes: tuple[int, ...]
    num_actions: int

    @nn.compact
    def __call__(self, obs):  # (B, obs_dim) -> (B, num_actions)
        x = obs.astype(jnp.float32)  # from the environment's own type
        if len(self.obs_shape) == 3:
            x = neighbourhoods(x.reshape(-1, *self.obs_shape))
            x = nn.relu(dense(x, 16)).reshape(len(obs), -1)
        for size in self.hidden_sizes:
            x = nn.relu(dense(x, size))
        return dense(x, self.num_actions)


def neighbourhoods(x):
    """(B, H, W, C) -> (B, H - 2, W - 2, 9 C): each square's 3 x 3 surroundings.

    A dense layer of these is nn.Conv(features, (3, 3), padding="VALID"), whose XLA code takes
    several times as long in a compiled loop on a CPU.
    """
    _, height, width, _ = x.shape
    corners = [(i, j) for i in range(3) for j in range(3)]
    return jnp.concatenate([x[:, i : i + height - 2, j : j + width - 2] for i, j in corners], -1)


def dense(x, num_outputs: int):
    """A layer with PyTorch's initial weights and biases: uniform within 1 / sqrt(inputs)."""
    bound = 1 / math.sqrt(x.shape[-1])
    init = partial(jax.random.uniform, minval=-bound, maxval=bound)
    return nn.Dense(num_outputs, kernel_init=init, bias_init=init)(x)


class TrainState(train_state.TrainState):
    target_params: Any  # the parameters of some updates ago


def make_agent(args: Args, obs_shape: tuple[int, ...], num_actions: int, key) -> TrainState:
    """Initialise the parameters, the target network, which begins as a copy, and the optimizer."""
    agent = Agent(obs_shape, args.hidden_sizes, num_actions)
    params = jax.jit(agent.init)(key, jnp.zeros((1, math.prod(obs_shape))))
    if args.optimizer == "adam":  # without a rate: update multiplies by the iteration's
        tx = optax.scale_by_adam(eps=args.optimizer_eps)
    else:  # PyTorch's RMSprop(centered=True), which adds eps to the root
        tx = optax.scale_by_stddev(args.rmsprop_decay, args.optimizer_eps, eps_in_sqrt=False)
    copy = jax.tree.map(jnp.copy, params)  # own memory: training overwrites both
    state = TrainState.create(apply_fn=agent.apply, params=params, target_params=copy, tx=tx)
    return state.replace(step=jnp.int32(0))  # not an int: update would compile twice


# === Replay =====================================================================================
class Transition(NamedTuple):
    """One row per step: N = num_envs of them, batch_size in a batch, buffer_size in the replay."""

    obs: jax.Array  # (N, obs_dim) of the environment's type, what the action was chosen from
    action: jax.Array  # (N,) int32
    reward: jax.Array  # (N,) float32, result of the action, like all fields below
    terminated: jax.Array  # (N,) bool
    next_obs: jax.Array  # (N, obs_dim), before any restart


class Replay(NamedTuple):
    """The last buffer_size environment steps."""

    rows: Transition
    num_added: jax.Array  # () int32, how many environment steps so far


def make_replay(args: Args, obs_dim: int, obs_dtype: np.dtype) -> Replay:
    """An empty one."""
    size = args.buffer_size
    gigabytes = 2 * size * obs_dim * obs_dtype.itemsize / 1e9
    if gigabytes > 1:
        print(f"The replay takes {gigabytes:.1f} GB: --buffer-size {size}, obs and next_obs.")
    rows = Transition(
        obs=jnp.zeros((size, obs_dim), obs_dtype),
        action=jnp.zeros(size, jnp.int32),
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
def epsilon_after(steps: int, args: Args) -> float:
    """The chance of a random action after so many environment steps."""
    progress = min(max((steps - args.learning_starts) / args.exploration_steps, 0.0), 1.0)
    return args.start_e + (args.end_e - args.start_e) * progress


def act(train_state, obs, key, epsilon):
    """Actions (N,) int32: each environment's best, or with chance epsilon a random one."""
    q = train_state.apply_fn(train_state.params, obs)
    best = q.argmax(-1).astype(jnp.int32)
    explore_key, action_key = jax.random.split(key)
    explore = jax.random.uniform(explore_key, best.shape) < epsilon
    random_action = jax.random.randint(action_key, best.shape, 0, q.shape[-1])
    return jnp.where(explore, random_action, best)


# === Loss =======================================================================================
def td_target(selector_q, target_q_next, batch: Transition, args: Args):
    """What Q(obs, action) should be, (B,), from two networks' Q(next_obs), (B, num_actions) each.

    It takes the target network's value of the action that selector_q has as best. After a
    termination the future is worth 0. After a truncation it is not: the episode could have gone on
    from next_obs.
    """
    best = selector_q.argmax(-1)
    future = jnp.where(batch.terminated, 0.0, value_of(best, target_q_next))
    return batch.reward + args.gamma * future


def dqn_loss(params, train_state, batch: Transition, args: Args):
    """The mean loss of Q(obs, action), and what to log."""
    q = value_of(batch.action, train_state.apply_fn(params, batch.obs))
    target_q_next = train_state.apply_fn(train_state.target_params, batch.next_obs)
    selector_q = target_q_next  # Mnih et al. 2015
    if args.double_q:
        selector_q = train_state.apply_fn(params, batch.next_obs)  # van Hasselt et al. 2016
    q_target = jax.lax.stop_gradient(td_target(selector_q, target_q_next, batch, args))
    loss_of = optax.huber_loss if args.loss == "huber" else optax.squared_error
    loss = loss_of(q, q_target).mean()
    return loss, {"losses/td_loss": loss, "losses/q_value": q.mean()}


def value_of(action, q):
    """(B,), (B, num_actions) -> (B,)."""
    return jnp.take_along_axis(q, action[:, None], axis=-1).squeeze(-1)


# === Update =====================================================================================
def update(train_state, batch: Transition, learning_rate, args: Args):
    """Train on a batch; every target_network_frequency updates, copy the parameters."""
    loss_fn = partial(dqn_loss, train_state=train_state, batch=batch, args=args)
    grads, losses = jax.grad(loss_fn, has_aux=True)(train_state.params)
    direction, opt_state = train_state.tx.update(grads, train_state.opt_state)
    params = optax.tree.add_scale(train_state.params, -learning_rate, direction)
    step = train_state.step + 1
    copied = step % args.target_network_frequency == 0
    old = train_state.target_params
    target_params = jax.tree.map(lambda new, old: jnp.where(copied, new, old), params, old)
    train_state = train_state.replace(
        step=step, params=params, target_params=target_params, opt_state=opt_state
    )
    return train_state, losses


def learn(i, carry, constants, args: Args):
    """Train on a new batch, and add up the losses: update i of those that are due after a step."""
    train_state, losses = carry
    replay, key, learning_rate = constants
    sample_key = jax.random.fold_in(key, i)
    batch = sample(replay, sample_key, args.batch_size)
    train_state, new_losses = update(train_state, batch, learning_rate, args)
    return train_state, jax.tree.map(jnp.add, losses, new_losses)


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
def iterate(train_state, replay, obs, env_state, key, epsilon, learning_rate, env, args: Args):
    """Act, step, store and learn num_steps times; return the four that changed, and what to log."""

    def step(carry, inputs):
        train_state, replay, obs, env_state, losses = carry
        epsilon, act_key, learn_key = inputs
        action = act(train_state, obs, act_key, epsilon)
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
    losses = {"losses/td_loss": jnp.zeros(()), "losses/q_value": jnp.zeros(())}
    carry = (train_state, replay, obs, env_state, losses)
    act_keys, learn_keys = jax.random.split(key, (2, args.num_steps))
    carry, episodes = jax.lax.scan(step, carry, (epsilon, act_keys, learn_keys))
    updates_before = train_state.step
    train_state, replay, obs, env_state, losses = carry
    num_updates = train_state.step - updates_before
    metrics = episode_statistics(episodes)
    metrics |= {name: x * (1 / num_updates) for name, x in losses.items()}  # or NaN: 0 * inf
    metrics["charts/epsilon"] = epsilon[-1]
    metrics["charts/learning_rate"] = learning_rate
    metrics["charts/updates"] = num_updates
    return train_state, replay, obs, env_state, metrics


def train(args: Args) -> None:
    """Train an agent, from the start or from a checkpoint on."""
    # The same in all frameworks: torch's "high" is TF32 on a GPU, as is JAX's "default".
    precision = "highest" if args.matmul_precision == "highest" else "default"
    jax.config.update("jax_default_matmul_precision", precision)
    options = (args.sticky_actions, args.full_actions, args.max_episode_steps)
    env = VecEnv(args.env_id, args.num_envs, *options)
    log = RunLog(
        args,
        framework="linen",
        compile_mode="none" if jax.config.values["jax_disable_jit"] else "jit",
        device=jax.devices()[0].device_kind,
        obs_shape=env.obs_shape,
        num_actions=env.num_actions,
    )

    # PRNGKey and not key: it makes plain arrays, so that a checkpoint can hold env_state. fold_in
    # makes an iteration's keys from its number, so that a checkpoint need not hold them.
    key, agent_key, env_key = jax.random.split(jax.random.PRNGKey(args.seed), 3)
    iteration = 0
    train_state = make_agent(args, env.obs_shape, env.num_actions, agent_key)
    obs, env_state = jax.jit(env.reset)(env_key)
    replay = make_replay(args, env.obs_dim, obs.dtype)
    if (log.dir / "checkpoint.msgpack").exists():  # resumed
        like = Checkpoint(iteration, train_state, replay, obs, env_state)
        iteration, train_state, replay, obs, env_state = load_checkpoint(log.dir, like)
    log.begin(iteration)

    # To the compiler, env and args are constants. What is donated is changed in place: the replay
    # is never copied.
    iterate_fn = jax.jit(partial(iterate, env=env, args=args), donate_argnums=(0, 1, 2, 3))
    while iteration < args.num_iterations:
        start = time.perf_counter()
        steps = range(iteration * log.steps, (iteration + 1) * log.steps, args.num_envs)
        epsilon = np.array([epsilon_after(x, args) for x in steps], np.float32)
        decay = 1 - iteration / args.num_iterations if args.anneal_lr else 1.0
        learning_rate = args.learning_rate * decay
        iteration_key = jax.random.fold_in(key, iteration)
        train_state, replay, obs, env_state, metrics = iterate_fn(
            train_state, replay, obs, env_state, iteration_key, epsilon, learning_rate
        )
        metrics = jax.device_get(metrics)  # sync
        log.write(iteration, metrics, start)
        iteration += 1
        if log.must_save(iteration):
            save_checkpoint(log.dir, Checkpoint(iteration, train_state, replay, obs, env_state))
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
    replay = checkpoint.replay
    num_added = int(replay.num_added)
    rows = jax.tree.map(lambda x: np.asarray(x)[:num_added], replay.rows)  # those that are filled
    checkpoint = checkpoint._replace(replay=replay._replace(rows=rows))
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


def load_policy(folder: str | Path, seed: int = 0) -> Callable[..., np.ndarray]:
    """What a run learnt, as a function: policy(obs) is the best action for each obs.

    obs (N, *obs_shape) and actions (N,) are NumPy arrays, as the environment has them. Nothing is
    drawn, so the seed, which PPO's scripts have here, changes nothing.
    """
    info, args = load_info(folder)
    agent = Agent(info["obs_shape"], args.hidden_sizes, info["num_actions"])
    saved = msgpack_restore(Path(folder, "checkpoint.msgpack").read_bytes())
    q_fn = jax.jit(partial(agent.apply, saved["train_state"]["params"]))

    def policy(obs):
        return np.asarray(q_fn(flatten(obs, info["obs_shape"]))).argmax(-1)

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

# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnasium==1.3.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""DQN in JAX and Flax Linen, with environments in Gymnasium on the CPU.

    python dqn_linen_gymnasium.py --seed 1          # CartPole-v1
    python dqn_linen_gymnasium.py minatar --seed 1  # Breakout, by MinAtar's own settings

Read Agent to Training first. "# sync" marks a line that waits for the device. What to look at:
- VecEnv.reset makes the environments by --vectorization: in this process (sync), or each in one of
  its own (async). When a run goes on, they start new episodes: Gymnasium saves no environment.
- iterate is a Python loop of two compiled calls: act, whose actions cross to NumPy, and learn.
Diff me with dqn_linen.py to see environments in JAX, with dqn_torch_gymnasium.py to see PyTorch.
"""

import time

START = time.perf_counter()  # before the imports, which take seconds

import atexit
import json
import math
import multiprocessing
import os
import platform
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, NoReturn

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import linen as nn
from flax.training import train_state
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


# === Arguments ==================================================================================
@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of this experiment
    seed: int = 1  # seed of all random numbers
    env_id: str = "CartPole-v1"  # Gymnasium environment with discrete actions; my_module:MyEnv-v0
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
    matmul_precision: Literal["high", "highest"] = "high"  # GPU: TF32 (high), float32 (highest)
    vectorization: Literal["sync", "async"] = "sync"  # one after the other, or a process each
    runs_dir: str = "runs"  # folder that gets one folder per run
    run_name: str = ""  # that folder's name; by default {env_id}__{exp_name}__{seed}__{time}
    track: bool = False  # log to Weights & Biases, too
    save_every: int = 0  # iterations between checkpoints; 0: only when training ends or is stopped
    resume: str = ""  # folder of a stopped run to go on with; it keeps its own arguments

    def __post_init__(self) -> None:
        """Work out the sizes; on the command line, a ValueError is a message and no traceback."""
        sizes = ["num_envs", "num_steps", "buffer_size", "batch_size", "train_frequency"]
        for name in [*sizes, "target_network_frequency", "exploration_steps"]:
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")
        if self.seed not in range(2**32):  # JAX would take the lower bits, which are another seed
            raise ValueError("--seed must lie between 0 and 2**32 - 1")
        if self.buffer_size % self.num_envs != 0:
            raise ValueError(f"--buffer-size must be a multiple of --num-envs, {self.num_envs}")
        steps = self.num_envs * self.num_steps
        self.num_iterations = self.total_timesteps // steps
        if self.num_iterations < 1:
            raise ValueError(f"--total-timesteps must be at least an iteration, {steps} steps")

        self.hidden_sizes = tuple(self.hidden_sizes)  # a checkpoint's JSON has a list
        if min(self.hidden_sizes, default=1) < 1:
            raise ValueError("--hidden-sizes must be 1 or more")
        if not self.run_name:
            name = f"{self.env_id}__{self.exp_name}__{self.seed}__{time.time():.0f}"
            self.run_name = name.replace("/", "-").replace(":", "-")


@dataclass
class MinAtar(Args):
    """The settings of MinAtar's examples/dqn.py (Young & Tian 2019), five million frames long."""

    env_id: str = "MinAtar/Breakout-v0"  # its v0: six actions, sticky by 0.1, no time limit
    total_timesteps: int = 5_000_000  # environment steps, in whole iterations
    anneal_lr: bool = False  # decay the learning rate linearly to 0
    num_envs: int = 1  # parallel environments
    num_steps: int = 5_000  # steps of each environment per iteration, a line of the log
    buffer_size: int = 100_000  # environment steps that the replay holds
    batch_size: int = 32  # transitions drawn from the replay for each update
    train_frequency: int = 1  # environment steps from one update to the next
    learning_starts: int = 5_000  # environment steps before the first update
    target_network_frequency: int = 1_000  # updates (not steps) between target copies
    end_e: float = 0.1  # chance of a random action in the end
    exploration_steps: int = 100_000  # environment steps from learning_starts to end_e, linearly
    loss: Literal["mse", "huber"] = "huber"  # of the TD error: squared, or linear beyond 1
    optimizer: Literal["adam", "rmsprop"] = "rmsprop"  # rmsprop: centred, without momentum
    optimizer_eps: float = 0.01  # added to the root in the optimizer's denominator
    hidden_sizes: tuple[int, ...] = (128,)  # hidden layers; images are convolved before


def parse_args() -> Args:
    """Read the command line: a named configuration if it begins with one, then flags."""
    configurations = {"cartpole": Args, "minatar": MinAtar}
    name = "cartpole"
    flags = sys.argv[1:]
    if flags and flags[0] in configurations:
        name = flags.pop(0)
    choice = f"Before the flags: {' or '.join(configurations)}. Below are the settings of {name}."
    return tyro.cli(configurations[name], args=flags, description=choice)


# === Environment ================================================================================
class VecEnv:
    """N = num_envs Gymnasium environments with flat observations; an episode's end starts the next.

    All of it is NumPy's, on the host. reset() makes the environments; they are closed at the end.
    """

    def __init__(self, env_id: str, num_envs: int, vectorization: str, seed: int) -> None:
        self.num_envs = num_envs
        self.vectorization = vectorization
        self.seed = seed
        if env_id.startswith("."):  # ./my_module.py:MyEnv-v0
            fail(f"--env-id: name it as an import does, my_module:MyEnv-v0, not {env_id}")
        sys.path.append(os.getcwd())  # where my_module lies
        try:
            for package in metadata.entry_points(group="gymnasium.envs"):  # not loaded by itself
                if package.name in ("__root__", env_id.partition("/")[0]):  # MinAtar/Breakout-v0
                    package.load()()
            env: Any = gymnasium.make(env_id)
        except (gymnasium.error.Error, ModuleNotFoundError) as error:  # which say what is missing
            fail(f"--env-id: {error}")
        if not isinstance(env.action_space, Discrete) or env.action_space.start != 0:
            hint = "for a Box, see more/ppo_continuous_*_gymnasium.py"
            fail(f"--env-id: actions must count from 0, and not be {env.action_space}; {hint}")
        if not isinstance(env.observation_space, Box):
            hint = "gymnasium.wrappers.FlattenObservation makes one-hot vectors of numbers"
            fail(f"--env-id: observations must be arrays, not {env.observation_space}; {hint}")
        self.spec = env.spec
        self.action_space = env.action_space
        self.num_actions = int(env.action_space.n)
        self.obs_shape = env.observation_space.shape
        self.obs_dim = math.prod(self.obs_shape)
        # One step now, so that a mistake in the environment shows here, and not in training.
        start = env.reset(seed=0)
        if not isinstance(start, tuple) or len(start) != 2:
            fail(f"--env-id: reset of {env_id} must return obs and info")
        _, reward, *_ = env.step(env.action_space.sample())
        if np.shape(reward) != ():
            fail(f"--env-id: step of {env_id} must return one number as reward, not {reward!r}")
        env.close()

    def reset(self, iteration: int = 0) -> np.ndarray:
        """Make and start every environment; return obs (N, obs_dim).

        Gymnasium cannot save an environment. A run that goes on from an iteration starts new
        episodes, which are not those that it began with.
        """
        if iteration > 0:
            print("New episodes start: no Gymnasium environment can be saved. All else goes on.")
        options: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED, "copy": False}
        wrappers: list[Any] = [WithoutInfo]
        if self.vectorization == "async":
            options["context"] = "forkserver"  # not fork: JAX and torch have threads
            os.environ["PYTHONSAFEPATH"] = "1"  # a process imports no file of the current folder
            wrappers.append(own_session)
        how = (self.spec, self.num_envs, self.vectorization, options, wrappers)
        self.envs: Any = gymnasium.make_vec(*how)
        atexit.register(self.envs.close, terminate=True)  # also where a process of async has died
        # Not seed + i: runs with seeds 1 and 2 would share all environments but one. 31 bits each.
        sequence = np.random.SeedSequence(self.seed, spawn_key=(iteration,) if iteration else ())
        seeds = (sequence.generate_state(self.num_envs) >> 1).tolist()
        obs, _ = self.envs.reset(seed=seeds)
        self.episode_return = np.zeros(self.num_envs)  # of the running episode, in float64
        self.episode_length = np.zeros(self.num_envs, np.float32)
        return self.flatten(obs)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Take action (N,) of integers; return obs (after any restart) and a dict of results."""
        action = action.astype(np.int64)
        obs, reward, terminated, truncated, _ = self.envs.step(action)
        next_obs = self.flatten(obs)
        episode_return = self.episode_return + reward
        episode_length = self.episode_length + 1
        result = {
            "reward": reward.astype(np.float32),
            "terminated": terminated,
            "truncated": truncated,
            "next_obs": next_obs,
            "episode_return": episode_return,
            "episode_length": episode_length,
        }
        done = terminated | truncated
        self.episode_return = np.where(done, 0, episode_return)
        self.episode_length = np.where(done, 0, episode_length)
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


def own_session(env: gymnasium.Env) -> gymnasium.Env:
    """Keep a terminal's Ctrl-C from a process of async: the training ends after its iteration."""
    if multiprocessing.parent_process():  # Gymnasium makes one in the training's process, too
        os.setsid()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # which closes the environment
    return env


# === Agent ======================================================================================
class QNetwork(nn.Module):
    """An MLP; before it, for images (H, W, C), the convolution of MinAtar's network."""

    obs_shape: tuple[int, ...]
    hidden_sizes: tuple[int, ...]
    num_actions: int

    @nn.compact
    def __call__(self, obs):  # (B, obs_dim) -> (B, num_actions)
        x = obs
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


def make_agent(args: Args, env: VecEnv, key: jax.Array) -> TrainState:
    """Initialise the parameters, the target network's copy and the optimizer."""
    network = QNetwork(env.obs_shape, args.hidden_sizes, env.num_actions)
    params = jax.jit(network.init)(key, jnp.zeros((1, env.obs_dim)))
    if args.optimizer == "adam":  # without a rate: update multiplies by the plan's
        tx = optax.scale_by_adam(eps=args.optimizer_eps)
    else:  # PyTorch's RMSprop(centered=True), which adds eps to the root
        tx = optax.scale_by_stddev(args.rmsprop_decay, args.optimizer_eps, eps_in_sqrt=False)
    copy = jax.tree.map(jnp.copy, params)  # own memory: training overwrites both
    state = TrainState.create(apply_fn=network.apply, params=params, target_params=copy, tx=tx)
    return state.replace(step=jnp.int32(0))  # an array, as after every update


# === Replay =====================================================================================
class Transition(NamedTuple):
    """One row per step: N = num_envs of them, batch_size in a batch, buffer_size in the replay."""

    obs: jax.Array  # (N, obs_dim) float32, what the action was chosen from
    action: jax.Array  # (N,) int32
    reward: jax.Array  # (N,) float32, a result of the action, as everything below
    terminated: jax.Array  # (N,) bool
    next_obs: jax.Array  # (N, obs_dim), before any restart


def make_replay(args: Args, env: VecEnv) -> Transition:
    """An empty replay; MinAtar's observations are zeros and ones, and kept as booleans."""
    minatar = "MinAtar" in args.env_id and ":" not in args.env_id  # and none of one's own
    size = args.buffer_size
    obs_dtype = bool if minatar else jnp.float32
    return Transition(
        obs=jnp.zeros((size, env.obs_dim), obs_dtype),
        action=jnp.zeros(size, jnp.int32),
        reward=jnp.zeros(size),
        terminated=jnp.zeros(size, bool),
        next_obs=jnp.zeros((size, env.obs_dim), obs_dtype),
    )


def add(replay: Transition, transition: Transition, row) -> Transition:
    """Write N steps from row on, over the oldest ones."""

    def write(old, new):
        return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), row, axis=0)

    return jax.tree.map(write, replay, transition)


def sample(replay: Transition, key, num_rows, batch_size: int) -> Transition:
    """A batch of the first num_rows rows, drawn uniformly with replacement."""
    rows = jax.random.randint(key, (batch_size,), 0, num_rows)
    batch = Transition(*(x[rows] for x in replay))
    obs = batch.obs.astype(jnp.float32)
    next_obs = batch.next_obs.astype(jnp.float32)
    return batch._replace(obs=obs, next_obs=next_obs)


# === Act ========================================================================================
def epsilon_after(steps: np.ndarray, args: Args) -> np.ndarray:
    """The chance of a random action after so many environment steps."""
    progress = np.clip((steps - args.learning_starts) / args.exploration_steps, 0, 1)
    return args.start_e + (args.end_e - args.start_e) * progress


def act(train_state, obs, key, epsilon, env: VecEnv):
    """Actions (N,) int32: each environment's best, or with chance epsilon a random one."""
    best = train_state.apply_fn(train_state.params, obs).argmax(-1).astype(jnp.int32)
    explore_key, action_key = jax.random.split(key)
    explore = jax.random.uniform(explore_key, best.shape) < epsilon
    random_action = jax.random.randint(action_key, best.shape, 0, env.num_actions)
    return jnp.where(explore, random_action, best)


# === Loss =======================================================================================
def td_target(q_next, target_q_next, batch: Transition, args: Args):
    """What Q(obs, action) should be, (B,), from Q(next_obs) of both networks (B, num_actions).

    The target network's best value (Mnih et al. 2015), or its value of the online network's best
    action (van Hasselt et al. 2016). After a termination the future is worth 0; a truncation is
    none, and next_obs is what the episode would have gone on with.
    """
    best = (q_next if args.double_q else target_q_next).argmax(-1)
    future = jnp.where(batch.terminated, 0.0, value_of(best, target_q_next))
    return batch.reward + args.gamma * future


def dqn_loss(params, train_state, batch: Transition, args: Args):
    """The mean loss of Q(obs, action), and (2,): the loss and the mean Q."""
    q = value_of(batch.action, train_state.apply_fn(params, batch.obs))
    target_q_next = train_state.apply_fn(train_state.target_params, batch.next_obs)
    q_next = train_state.apply_fn(params, batch.next_obs) if args.double_q else target_q_next
    target = jax.lax.stop_gradient(td_target(q_next, target_q_next, batch, args))
    loss_of = optax.huber_loss if args.loss == "huber" else optax.squared_error
    loss = loss_of(q, target).mean()
    return loss, jnp.stack([loss, q.mean()])


def value_of(action, q):
    """(B,), (B, num_actions) -> (B,)."""
    return jnp.take_along_axis(q, action[:, None], axis=-1).squeeze(-1)


# === Update =====================================================================================
class Plan(NamedTuple):
    """What an iteration does at each of its T = num_steps steps, known beforehand."""

    epsilon: np.ndarray  # (T,) float32, chance of a random action
    learning_rate: np.ndarray  # (T,) float32
    row: np.ndarray  # (T,) int32, where the step goes in the replay
    num_rows: np.ndarray  # (T,) int32, how many of the replay are written after it
    num_updates: np.ndarray  # (T,) int32, how many follow the step


def make_plan(iteration: int, args: Args) -> Plan:
    """The iteration's schedules as arrays; counts are integers, so rounding moves no update."""
    first = iteration * args.num_steps
    before = np.arange(first, first + args.num_steps) * args.num_envs  # environment steps so far
    after = before + args.num_envs
    num_updates = updates_after(after, args) - updates_after(before, args)
    learning_rate = args.learning_rate
    if args.anneal_lr:
        learning_rate *= 1 - iteration / args.num_iterations
    return Plan(
        epsilon=epsilon_after(before, args).astype(np.float32),
        learning_rate=np.full(args.num_steps, learning_rate, np.float32),
        row=(before % args.buffer_size).astype(np.int32),
        num_rows=np.minimum(after, args.buffer_size).astype(np.int32),
        num_updates=num_updates.astype(np.int32),
    )


def updates_after(steps, args: Args):
    """How many updates are due after so many environment steps, whatever num_envs is."""
    return np.maximum(steps - args.learning_starts, 0) // args.train_frequency


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


def learn(train_state, replay, losses, transition: Transition, key, now: Plan, args: Args):
    """Store N steps and train on num_updates batches; losses (2,) are summed up."""
    # Written first, read afterwards: the other way round, XLA copies the replay at each step.
    replay = add(replay, transition, now.row)

    def step(i, carry):
        train_state, losses = carry
        batch = sample(replay, jax.random.fold_in(key, i), now.num_rows, args.batch_size)
        train_state, new_losses = update(train_state, batch, now.learning_rate, args)
        return train_state, losses + new_losses

    train_state, losses = jax.lax.fori_loop(0, now.num_updates, step, (train_state, losses))
    return train_state, replay, losses


class Episodes(NamedTuple):
    """What episode_statistics reads: T = num_steps steps in N = num_envs environments."""

    terminated: jax.Array  # (T, N) bool
    truncated: jax.Array  # (T, N) bool
    episode_return: jax.Array  # (T, N), up to and with this step
    episode_length: jax.Array  # (T, N)


def episode_statistics(episodes: Episodes) -> dict[str, jax.Array]:
    """Of the episodes that ended: how many, and mean, minimum and maximum of return and length.

    Where none ended, these are NaN and infinite, which the log leaves out.
    """
    done = episodes.terminated | episodes.truncated
    metrics = {"charts/episodes": done.sum()}
    for name, x in [("return", episodes.episode_return), ("length", episodes.episode_length)]:
        metrics[f"charts/episodic_{name}"] = jnp.where(done, x, 0).sum() / done.sum()
        metrics[f"charts/episodic_{name}_min"] = jnp.where(done, x, jnp.inf).min()
        metrics[f"charts/episodic_{name}_max"] = jnp.where(done, x, -jnp.inf).max()
    return metrics


# === Training ===================================================================================
def iterate(train_state, replay, obs, key, plan: Plan, act_fn, learn_fn, env: VecEnv, args: Args):
    """Act, step, store and learn num_steps times; return what goes on, and what to log."""
    # In NumPy: to take one step's key is then no call of JAX.
    act_keys, learn_keys = np.asarray(jax.random.split(key, (2, args.num_steps)))  # sync
    losses = jnp.zeros(2)
    results = []
    for step in range(args.num_steps):
        now = Plan(*(x[step] for x in plan))  # this step's entry of each array
        action = np.asarray(act_fn(train_state, obs, act_keys[step], now.epsilon))  # sync
        new_obs, result = env.step(action)
        results.append(result)
        row = [obs, action, result["reward"], result["terminated"], result["next_obs"]]
        transition = Transition._make(row)  # of NumPy's arrays, which learn_fn takes to the device
        learnt = learn_fn(train_state, replay, losses, transition, learn_keys[step], now)
        train_state, replay, losses = learnt
        obs = new_obs

    stacked = [np.stack([x[name] for x in results]) for name in Episodes._fields]
    metrics = episode_statistics(Episodes(*map(jnp.asarray, stacked)))
    metrics["charts/epsilon"] = plan.epsilon[-1]
    metrics["charts/updates"] = plan.num_updates.sum()
    td_loss, q_value = losses / plan.num_updates.sum()
    metrics["losses/td_loss"] = td_loss
    metrics["losses/q_value"] = q_value
    return train_state, replay, obs, metrics


def train(args: Args) -> None:
    """Train an agent, from the start or from a checkpoint on."""
    # The same in all frameworks: torch's "high" is TF32 on a GPU, as is JAX's "default".
    precision = "default" if args.matmul_precision == "high" else "highest"
    jax.config.update("jax_default_matmul_precision", precision)
    device = jax.devices()[0]
    env = VecEnv(args.env_id, args.num_envs, args.vectorization, args.seed)
    spaces = {"obs_shape": env.obs_shape, "obs_dim": env.obs_dim, "num_actions": env.num_actions}
    log = RunLog(args, spaces, "linen", "jit", device.device_kind)

    # An iteration's keys are folded in from its number, so resuming needs none.
    key, agent_key = jax.random.split(jax.random.PRNGKey(args.seed))
    train_state = make_agent(args, env, agent_key)
    replay = make_replay(args, env)
    if args.resume:
        train_state, replay = log.load(train_state=train_state, replay=replay)
    obs = env.reset(log.info["iteration"])

    # env and args are bound: to the compiler they are constants. What is donated is changed in
    # place: the replay is never copied.
    act_fn = jax.jit(partial(act, env=env))
    learn_fn = jax.jit(partial(learn, args=args), donate_argnums=range(3))  # in place
    for iteration in range(log.info["iteration"], args.num_iterations):
        start = time.perf_counter()
        iteration_key = jax.random.fold_in(key, iteration)
        plan = make_plan(iteration, args)
        train_state, replay, obs, metrics = iterate(
            train_state, replay, obs, iteration_key, plan, act_fn, learn_fn, env, args
        )
        metrics = jax.device_get(metrics)  # sync
        log.write(metrics, start, time.perf_counter())
        if log.must_save():  # after a signal, this is the end
            log.save(train_state=train_state, replay=replay)
    log.finish((device.memory_stats() or {}).get("peak_bytes_in_use"))


def load_policy(folder: str | Path, seed: int = 0) -> Callable[..., np.ndarray]:
    """What a run learnt, as a function: policy(obs) is the best action for each obs.

    obs (N, *obs_shape) and actions (N,) are NumPy arrays, as the environment has them. Nothing is
    drawn, so the seed, which PPO's scripts have here, changes nothing.
    """
    info, args = load_info(folder)
    env: Any = SimpleNamespace(**info["spaces"])  # all that make_agent asks of an environment
    shapes = jax.eval_shape(partial(make_agent, args, env), jax.random.PRNGKey(0))
    _, saved = load_checkpoint(folder, {"train_state": {"params": shapes.params}})
    params = saved["train_state"]["params"]
    get_q = jax.jit(partial(shapes.apply_fn, params))

    def policy(obs):
        obs = np.reshape(obs, (len(obs), env.obs_dim)).astype(np.float32)
        return np.asarray(get_q(obs)).argmax(-1)

    return policy


# === Run log ====================================================================================
# You may stop reading here. The rest is plumbing without any algorithm. DQN and SAC share it.
class RunLog:
    """A run's folder: metrics as it goes, checkpoints to go on from, run.json once it is complete.

    Ctrl-C and SIGTERM end a run after the iteration that is under way, with a checkpoint.
    """

    def __init__(
        self, args: Args, spaces: dict, framework: str, compile_mode: str, device: str
    ) -> None:
        self.args = args
        self.steps = args.num_envs * args.num_steps  # of environments, in an iteration
        self.received = 0  # number of the signal that came; 0: none
        self.signal = 0  # the same, once the iteration in which it came is done
        self.dir = Path(args.resume or Path(args.runs_dir, args.run_name))
        if (self.dir / "run.json").exists():
            fail(f"{self.dir} exists and is complete: choose another --run-name, or evaluate it")
        if self.dir.exists() and not args.resume:
            fail(f"{self.dir} exists: choose another --run-name, or go on with --resume {self.dir}")

        self.info: dict[str, Any] = {
            "args": asdict(args),
            "spaces": spaces,  # what load_policy must know of the environment
            "script": Path(__file__).stem,
            "framework": framework,
            "compile_mode": compile_mode,
            "device": device,
            "python": platform.python_version(),
            "versions": {x.name: x.version for x in metadata.distributions()},
            "os": platform.platform(),
            "cpu": platform.processor() or platform.machine(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "iteration": 0,  # how many are done
            "resumed": [],
            "wandb_id": None,
            "durations": {"imports": time.perf_counter() - START, "total": 0.0},
        }
        if args.resume:
            self.info, _ = load_info(self.dir)
            self.info["resumed"].append(self.info["iteration"])
        self.info |= json.loads(os.environ.get("RUN_INFO", "{}"))  # what benchmark.sh knows
        self.start = time.perf_counter() - self.info["durations"]["total"]
        try:
            self.dir.mkdir(parents=True, exist_ok=bool(args.resume))
            self.open_files()
        except OSError as error:
            fail(f"{self.dir} cannot be written, or a part of it is missing: {error}")
        self.wandb = self.start_wandb() if args.track else None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.on_signal)
        print(f"{self.dir}: what is compiled is compiled first, which takes a while", flush=True)

    def open_files(self) -> None:
        path = self.dir / "metrics.jsonl"
        lines = []
        if self.args.resume:  # forget what came after the checkpoint
            lines = path.read_bytes().splitlines(keepends=True)[: self.info["iteration"]]
            if b"".join(lines).count(b"\n") < self.info["iteration"]:
                fail(f"{path} has not all iterations that the checkpoint counts")
            os.truncate(path, len(b"".join(lines)))
        self.metrics = open(path, "a", buffering=1)  # a line at a time
        self.tensorboard = EventFileWriter(str(self.dir))
        if lines:  # TensorBoard drops what it has from this step on
            step = json.loads(lines[-1])["global_step"] + 1
            restart = SessionLog(status=SessionLog.START)
            self.tensorboard.add_event(Event(step=step, session_log=restart))

    def start_wandb(self) -> Any:
        import wandb  # half a second that only --track pays

        sys.stdin = open(os.devnull)  # without a key, W&B must fail, not wait for one to be typed
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "ppo-rosetta"),
            name=self.dir.name,
            id=self.info["wandb_id"],
            dir=self.dir,
            config=self.info,
            resume="allow",
            reinit="create_new",
        )
        run.define_metric("*", step_metric="global_step")
        if run.offline:  # a resumed run has a folder of its own, which is to hold all of it
            for line in (self.dir / "metrics.jsonl").read_text().splitlines():
                row = json.loads(line)
                run.log(row, step=row["iteration"])
        self.info["wandb_id"] = run.id
        return run

    def on_signal(self, number: int, frame: Any) -> None:
        self.received = number
        signal.signal(number, signal.SIG_DFL)  # a second one ends the run at once

    def write(self, metrics: dict, start: float, end: float) -> None:
        """Log an iteration."""
        args = self.args
        iteration = self.info["iteration"]
        row = {name: float(x) for name, x in metrics.items()}
        row["iteration"] = iteration
        row["global_step"] = (iteration + 1) * self.steps
        row["charts/learning_rate"] = args.learning_rate
        if args.anneal_lr:
            row["charts/learning_rate"] *= 1 - iteration / args.num_iterations
        row["charts/SPS"] = self.steps / (end - start)
        row["time/elapsed"] = end - self.start
        row["time/iteration"] = end - start
        charts = {name: x for name, x in row.items() if "/" in name and math.isfinite(x)}
        # JSON has no NaN: the return of no episode, and a diverged loss, are null.
        finite = {name: x if math.isfinite(x) else None for name, x in row.items()}

        self.metrics.write(json.dumps(finite) + "\n")
        values = [Summary.Value(tag=name, simple_value=x) for name, x in charts.items()]
        event = Event(step=row["global_step"], wall_time=time.time(), summary=Summary(value=values))
        self.tensorboard.add_event(event)
        if self.wandb:
            self.wandb.log(finite, step=iteration)
        self.info["iteration"] = iteration + 1
        self.signal = self.received  # a later one waits for the next iteration
        if (iteration + 1) % math.ceil(args.num_iterations / 100) == 0:
            text = f"return {row['charts/episodic_return']:.4g}"
            if row["charts/episodes"] == 0:
                text = "no episode ended"
            if math.isnan(row["losses/td_loss"]) and row["charts/updates"] > 0:
                text += ", diverged: the loss is not a number"
            progress = f"iteration {iteration + 1}/{args.num_iterations}: {text}"
            print(f"{progress}, {row['charts/SPS']:,.0f} steps/s", flush=True)

    def must_save(self) -> bool:
        done = self.info["iteration"]
        is_due = self.args.save_every > 0 and done % self.args.save_every == 0
        return is_due or done == self.args.num_iterations or self.signal > 0

    def save(self, **state: Any) -> None:
        """Write a checkpoint to go on from; if a signal came, end there."""
        self.tensorboard.flush()
        self.info["durations"]["total"] = time.perf_counter() - self.start
        arrays = {name_of(path): x for path, x in jax.tree.leaves_with_path(state)}
        with open(self.dir / "checkpoint.new", "wb") as file:
            np.savez(file, info=json.dumps(self.info), **arrays)  # sync
        # Renamed, not written over: killed at any moment, a run has the old one or the new one.
        os.replace(self.dir / "checkpoint.new", self.dir / "checkpoint.npz")
        done = self.info["iteration"]
        if self.signal and done < self.args.num_iterations:
            print(f"Stopped after {done} iterations. To go on:")
            print(python_line(sys.argv[0], "--resume", str(self.dir), *self.own_environment()))
            sys.exit(128 + self.signal)

    def load(self, **state: Any) -> list[Any]:
        """Return the parts of state, with the checkpoint's numbers in them."""
        _, saved = load_checkpoint(self.dir, state)
        return [saved[name] for name in state]  # in their order, which a tree forgets

    def finish(self, peak_device_bytes: int | None) -> None:
        """Write run.json: the run is complete."""
        self.info["status"] = "completed"
        self.info["durations"]["total"] = time.perf_counter() - self.start
        self.info["peak_device_bytes"] = peak_device_bytes
        (self.dir / "run.new").write_text(json.dumps(self.info, indent=2))
        os.replace(self.dir / "run.new", self.dir / "run.json")
        if self.wandb:
            self.wandb.summary.update(self.info)
            self.wandb.finish()
        self.metrics.close()
        self.tensorboard.close()
        print(f"Written to {self.dir}. To see what it learnt:")
        print(self.next_command())

    def own_environment(self) -> list[str]:
        """--env-id for one's own environment: it is code, so each command must name it."""
        return ["--env-id", self.args.env_id] if ":" in self.args.env_id else []

    def next_command(self) -> str:
        """For the agent in motion, evaluate.py; where there is none, TensorBoard for its curves."""
        script = os.path.relpath(__file__)
        for folder in (*Path(__file__).resolve().parents[:2], Path.cwd()):
            if (folder / "evaluate.py").exists():
                words = [os.path.relpath(folder / "evaluate.py"), str(self.dir), "--script", script]
                return python_line(*words, *self.own_environment())
        return python_line("-m", "tensorboard.main", "--logdir", str(self.dir))


def python_line(*words: str) -> str:
    """A line for the shell that runs Python with these words, as this process was run."""
    python = [sys.executable]
    if shutil.which("python") == sys.executable:
        python = ["python"]
    if "UV" in os.environ:
        needs = os.path.relpath(__file__)
        python = ["uv", "run", "--no-project", "--with-requirements", needs, "python"]
    return shlex.join([*python, *words])


def load_checkpoint(folder: str | Path, state: Any = None) -> tuple[dict[str, Any], Any]:
    """Return what a run's checkpoint says of it, and state with the checkpoint's numbers in it."""
    path = Path(folder, "checkpoint.npz")
    names = [name_of(place) for place, _ in jax.tree.leaves_with_path(state)]
    try:
        with np.load(path, allow_pickle=False) as file:  # so a stranger's file runs no code
            info = json.loads(file["info"].item())
            arrays = {name: file[name] for name in names if name in file}
        script = info["script"]
    except Exception as error:  # a damaged file can raise anything
        fail(f"{path} is not there, or is damaged ({type(error).__name__})")
    if script != Path(__file__).stem:
        fail(f"{folder} is a run of {script}.py")

    def read(place, x):
        array = arrays.get(name_of(place))
        if array is None or array.shape != tuple(x.shape):
            fail(f"{folder} has no {name_of(place)} of shape {tuple(x.shape)} in its checkpoint")
        return array

    return info, jax.tree.map_with_path(read, state)


def name_of(path: Any) -> str:
    """The name of an array in a checkpoint: train_state/params/params/actor/Dense_0/kernel."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def load_info(folder: str | Path) -> tuple[dict[str, Any], Args]:
    """Return what a run's checkpoint says of it, and its arguments."""
    info, _ = load_checkpoint(folder)
    try:
        return info, Args(**info["args"])
    except (TypeError, ValueError) as error:  # of another version of this file
        fail(f"{folder} has arguments that {Path(__file__).name} does not take: {error}")


def args_to_resume(given: Args) -> Args:
    """The arguments of the run in the folder given.resume, which goes on with its own."""
    _, args = load_info(given.resume)
    args = replace(args, resume=given.resume)
    if ":" in args.env_id and given.env_id != args.env_id:
        fail(f"--resume: its environment is code; to run it, add --env-id {args.env_id}")
    flags = {word.partition("=")[0] for word in sys.argv[1:] if word.startswith("--")}
    if flags - {"--resume", "--env-id"} or given.env_id not in (Args.env_id, args.env_id):
        fail(f"--resume: {given.resume} goes on with its own arguments, so give no others")
    return args


def fail(reason: str) -> NoReturn:
    print("".join(x if x.isprintable() else "?" for x in reason), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    args = parse_args()
    train(args_to_resume(args) if args.resume else args)

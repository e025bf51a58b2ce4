# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "jax==0.10.2", "gymnax==1.0.1", "six==1.17.0",
#   "numpy==2.4.6", "tyro==1.0.17", "psutil==7.2.2", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""DQN in PyTorch: the environments step in JAX, and arrays cross over as views.

    python dqn_torch.py --seed 1          # CartPole-v1
    python dqn_torch.py minatar --seed 1  # Breakout, by MinAtar's own settings

The environments are gymnax's: one jitted call steps them all. Each framework reads what the other
wrote where it lies; on a GPU, replay and networks stay there, and no step waits for the device.
Diff me with dqn_linen.py to see what JAX changes, with dqn_torch_gymnasium.py to see what
environments in NumPy do.
"""

import copy
import fcntl
import io
import json
import math
import os
import platform
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cache, partial
from importlib import import_module, metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_origin

if __name__ == "__main__":  # Ctrl-C during the imports shows no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves torch its share of a GPU
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # or threads that wait block a shared CPU's cores

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import torch
import tyro
from gymnax.environments.environment import Environment
from gymnax.environments.spaces import Discrete
from gymnax.wrappers import StickyActionWrapper
from tensorboard.summary import Writer
from torch import nn
from torch.nn import functional as F


# === Arguments ==================================================================================
@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of this experiment
    seed: int = 1  # seed of weights, actions, environments and batches
    env_id: str = "CartPole-v1"  # gymnax environment with discrete actions, or my_module:MyEnv
    sticky_actions: float = 0.0  # chance that an environment repeats its last action instead
    full_actions: bool = False  # MinAtar's games: all six actions, also those without effect
    max_episode_steps: int = 0  # steps after which an episode is truncated; 0: the environment's
    total_timesteps: int = 500_000  # environment steps in all, rounded down to whole iterations
    learning_rate: float = 2.5e-4  # the optimizer's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0, per iteration
    num_envs: int = 8  # parallel environments
    num_steps: int = 625  # steps of each environment per iteration, a line of the log
    gamma: float = 0.99  # discount factor
    buffer_size: int = 10_000  # environment steps that the replay holds
    batch_size: int = 128  # transitions drawn from the replay for each update
    replay_ratio: float = 12.8  # times that a step is learnt from: batch_size * updates per step
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
    matmul_precision: Literal["high", "highest"] = "high"  # products on a GPU: TF32, or float32
    compile: bool = False  # one graph for each update: 10 s, then half the time
    runs_dir: str = "runs"  # folder that gets one folder per run
    run_name: str | None = None  # that folder's name; default {env_id}__{exp_name}__{seed}__{time}
    track: bool = False  # log to Weights & Biases too, which reads WANDB_PROJECT, WANDB_MODE, ...
    save_every: int = 0  # iterations between checkpoints; 0: only where training ends or is stopped
    resume: str | None = None  # folder of a stopped run to go on with, by its own arguments

    def __post_init__(self) -> None:
        """Raise ValueError, one sentence on the command line, where a value cannot work."""

        def check(name: str, ok: bool, rule: str) -> None:
            if not ok:
                raise ValueError(f"--{name.replace('_', '-')} {rule}, not {getattr(self, name)}")

        if self.resume is not None and self.run_name is None:
            return  # main replaces these by the checkpoint's, which have a run_name
        sizes = ("num_envs", "num_steps", "buffer_size", "batch_size", "target_network_frequency")
        for name in (*sizes, "exploration_steps", "total_timesteps"):
            check(name, 0 < getattr(self, name) < 2**31, "must lie between 1 and 2**31 - 1")
        check("optimizer_eps", 0 < self.optimizer_eps < 2**31, "must be above 0")
        coefs = ("learning_rate", "replay_ratio")
        for name in (*coefs, "learning_starts", "max_episode_steps", "save_every"):
            check(name, 0 <= getattr(self, name) < 2**31, "must lie between 0 and 2**31 - 1")
        for name in ("gamma", "start_e", "end_e", "rmsprop_decay", "sticky_actions"):
            check(name, 0 <= getattr(self, name) <= 1, "must lie between 0 and 1")
        check("seed", 0 <= self.seed < 2**32, "must lie between 0 and 2**32 - 1")
        widths = all(0 < size <= 2**16 for size in self.hidden_sizes)
        check("hidden_sizes", widths, "must lie between 1 and 65536")
        env = VecEnv(self.env_id, self.num_envs, **self.env_options)  # an unknown one is refused
        height, width, channels = env.obs_shape if len(env.obs_shape) == 3 else (3, 3, 3)
        rule = "must have images (height, width, channels) of 3 x 3 or more, never (channels, n, n)"
        check("env_id", min(height, width) >= 3 and not height < width == channels, rule)

        rule = f"must be a multiple of num_envs = {self.num_envs}"
        check("buffer_size", self.buffer_size % self.num_envs == 0, rule)
        steps = self.num_envs * self.num_steps
        self.num_iterations = self.total_timesteps // steps
        check("total_timesteps", self.num_iterations > 0, f"must be at least {steps}")
        updates = self.total_timesteps * self.replay_ratio / self.batch_size
        check("replay_ratio", updates < 2**31, "must ask for fewer than 2**31 updates in all")

        stem = f"{self.env_id}__{self.exp_name}__{self.seed}".replace("/", "-").replace(":", "-")
        name = self.run_name = self.run_name or f"{stem}__{time.time():.0f}"
        one = Path(name).name == name != ".." and name.isprintable()
        check("run_name", one, "must be the name of one folder in --runs-dir")
        check("runs_dir", self.runs_dir.isprintable(), "must be a folder's name")

        # A checkpoint is put together on the host, where the replay must fit twice.
        size = sum(x.nbytes for x in make_replay(self, env, torch.device("meta")))
        gpu = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else math.inf
        free = psutil.virtual_memory().available
        sizes = f"{2 * size / 1e9:.1f} GB with its checkpoint, {free / 1e9:.1f} free"
        fits = 2 * size < free and size < gpu
        check("buffer_size", fits, f"must fit in memory ({sizes})")

    @property
    def env_options(self) -> dict[str, Any]:
        names = ("sticky_actions", "full_actions", "max_episode_steps")
        return {name: getattr(self, name) for name in names}


@dataclass
class MinAtar(Args):
    """The settings of MinAtar's examples/dqn.py (Young & Tian 2019), five million frames long."""

    env_id: str = "Breakout-MinAtar"  # gymnax environment with discrete actions
    sticky_actions: float = 0.1  # chance that an environment repeats its last action instead
    full_actions: bool = True  # MinAtar's games: all six actions, also those without effect
    max_episode_steps: int = 2**31 - 1  # steps after which an episode is truncated: no limit
    total_timesteps: int = 5_000_000  # environment steps in all, rounded down to whole iterations
    anneal_lr: bool = False  # decay the learning rate linearly to 0, per iteration
    num_envs: int = 1  # parallel environments
    num_steps: int = 5_000  # steps of each environment per iteration, a line of the log
    buffer_size: int = 100_000  # environment steps that the replay holds
    batch_size: int = 32  # transitions drawn from the replay for each update
    replay_ratio: float = 32.0  # times that a step is learnt from: batch_size * updates per step
    learning_starts: int = 5_000  # environment steps before the first update
    target_network_frequency: int = 1_000  # updates (not steps) between target copies
    end_e: float = 0.1  # chance of a random action in the end
    exploration_steps: int = 100_000  # environment steps from learning_starts to end_e, linearly
    loss: Literal["mse", "huber"] = "huber"  # of the TD error: squared, or linear beyond 1
    optimizer: Literal["adam", "rmsprop"] = "rmsprop"  # rmsprop: centred, without momentum
    optimizer_eps: float = 0.01  # added to the root in the optimizer's denominator
    hidden_sizes: tuple[int, ...] = (128,)  # hidden layers; images are convolved before
    compile: bool = True  # one graph for each update: 10 s, then half the time


@dataclass
class Doors(Args):
    """Settings that solve all 225 layouts of envs/doors.py, in 640,000 steps: docs/doors.md."""

    env_id: str = "envs.doors:Doors"  # the module is beside this file
    total_timesteps: int = 640_000  # environment steps in all, rounded down to whole iterations
    learning_rate: float = 3e-4  # the optimizer's learning rate
    num_envs: int = 64  # parallel environments
    num_steps: int = 80  # steps of each environment per iteration, a line of the log
    gamma: float = 0.95  # discount factor
    buffer_size: int = 102_400  # environment steps that the replay holds
    replay_ratio: float = 4.0  # times that a step is learnt from: batch_size * updates per step
    learning_starts: int = 5_120  # environment steps before the first update
    target_network_frequency: int = 20  # updates (not steps) between target copies
    double_q: bool = True  # the online network chooses the target's action (Double DQN)
    exploration_steps: int = 256_000  # environment steps from learning_starts to end_e, linearly
    loss: Literal["mse", "huber"] = "huber"  # of the TD error: squared, or linear beyond 1
    hidden_sizes: tuple[int, ...] = (256, 256)  # hidden layers; images are convolved before


def parse_args() -> Args:
    """Read the command line: a named configuration if it begins with one, then flags."""
    configurations = {"cartpole": Args, "minatar": MinAtar, "doors": Doors}
    words = sys.argv[1:]
    name = words.pop(0) if words and words[0] in configurations else "cartpole"
    choice = f"Before the flags: {' or '.join(configurations)}. Below are the settings of {name}."
    return tyro.cli(configurations[name], args=words, description=choice)


# === Environment ================================================================================
class EnvState(NamedTuple):
    key: jax.Array  # split at every step
    inner: Any  # gymnax's own state; N = num_envs rows in each leaf
    episode_return: jax.Array  # (N,), of the running episode
    episode_length: jax.Array  # (N,)


@cache  # so that it is traced once
def own_environment(env_id: str) -> tuple[Any, Any]:
    """The gymnax Environment that my_module:MyEnv makes, and its parameters.

    Raise ValueError where it is unlike gymnax's: its reset and step are traced, and do not run.
    """

    def kinds(**trees: Any) -> set[str]:
        name = partial(jax.tree_util.keystr, simple=True, separator=".")
        return {f"{name(at)} {x.dtype}{[*x.shape]}" for at, x in jax.tree.leaves_with_path(trees)}

    def must(ok: bool, rule: str) -> None:
        if not ok:
            raise TypeError(rule)

    with own_code(env_id, "make a gymnax Environment") as module:
        env = getattr(module, env_id.partition(":")[2])()
        params, key = env.default_params, jax.random.PRNGKey(0)
        space, moves = env.observation_space(params), env.action_space(params)
        must(isinstance(moves, Discrete) and 0 in range(moves.n), "actions must be Discrete(n > 0)")
        obs, state = jax.eval_shape(env.reset, key)
        must(isinstance(obs, jax.ShapeDtypeStruct), f"obs must be one array, not {obs}")
        must(obs.shape == space.shape, f"obs must have observation_space's shape, {space.shape}")
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)  # not weak
        was, form = kinds(obs=obs, state=state), jax.tree.structure((obs, state))
        must("key<" not in str(was), "keys in its state must be jax.random.PRNGKey's")
        steps = [("step_env", "obs, state, reward, terminated, info")]  # called by gymnax's step,
        steps += [("step", "obs, state, reward, terminated, truncated, info")]  # which says less
        for name, values in steps if type(env).step is Environment.step else steps[1:]:
            result = tuple(jax.eval_shape(getattr(env, name), key, state, jnp.int32(0), params))
            must(len(result) == len(values.split()), f"{name} must return {values}")
            now = kinds(obs=result[0], state=result[1])
            must(was == now, f"reset returns {sorted(was - now)}, but {name} {sorted(now - was)}")
            must(form == jax.tree.structure(result[:2]), f"reset and {name} must build state alike")
        must(getattr(result[2], "shape", None) == (), "reward must be one number")
        end, final = kinds(x=result[3:5]), result[5].get("final_observation")
        must(end == {"x.0 bool[]", "x.1 bool[]"}, "terminated, truncated must be one boolean each")
        must(kinds(obs=final) == kinds(obs=obs), "info must have final_observation, of obs's kind")
        return env, params


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
        actions = {"use_minimal_action_set": False} if full_actions else {}
        try:
            make = own_environment if ":" in env_id else gymnax.make
            self.env, self.params = make(env_id, **actions)
            self.num_actions = self.env.action_space(self.params).n
            self.obs_shape = self.env.observation_space(self.params).shape
        except TypeError as error:
            raise ValueError(f"--full-actions is for MinAtar's games, not for {env_id}") from error
        except (ValueError, AttributeError, OSError) as error:  # unknown, continuous, not at hand
            if ":" in env_id:
                raise
            known = f"be one of {', '.join(gymnax.registered_envs)}, and not {env_id}"
            raise ValueError(f"--env-id must have discrete actions and {known}") from error
        self.num_envs, self.obs_dim = num_envs, math.prod(self.obs_shape)
        if sticky_actions:
            self.env = StickyActionWrapper(self.env, sticky_actions)
        if max_episode_steps and not hasattr(self.params, "max_steps_in_episode"):
            rule = f"needs a max_steps_in_episode in the parameters of {env_id}"
            raise ValueError(f"--max-episode-steps {rule}")
        if max_episode_steps:
            self.params = self.params.replace(max_steps_in_episode=max_episode_steps)

    def reset(self, key: jax.Array) -> tuple[jax.Array, EnvState]:
        """Start every environment; return obs (N, obs_dim) and the state."""
        key, reset_key = jax.random.split(key)
        obs, inner = jax.vmap(self.env.reset)(jax.random.split(reset_key, self.num_envs))
        # astype drops weak types: some environments reset to them and step to others, and whatever
        # takes the state would compile again at its second call.
        inner = jax.tree.map(lambda x: x.astype(x.dtype), inner)
        zeros = jnp.zeros(self.num_envs)
        return self.flatten(obs), EnvState(key, inner, zeros, zeros)

    def step(self, state: EnvState, action: jax.Array) -> tuple[jax.Array, EnvState, dict]:
        """Take action (N,) int32; return obs after any restart, state, what happened by name."""
        key, step_key = jax.random.split(state.key)
        keys = jax.random.split(step_key, self.num_envs)
        step = jax.vmap(lambda *x: self.env.step(*x, self.params))
        obs, inner, reward, terminated, truncated, info = step(keys, state.inner, action)
        reward, next_obs = reward.astype(jnp.float32), self.flatten(info["final_observation"])
        total, length = state.episode_return + reward, state.episode_length + 1
        result = {"reward": reward, "terminated": terminated, "truncated": truncated}
        result |= {"next_obs": next_obs, "episode_return": total, "episode_length": length}
        done = terminated | truncated
        state = EnvState(key, inner, jnp.where(done, 0, total), jnp.where(done, 0, length))
        return self.flatten(obs), state, result

    def flatten(self, obs: jax.Array) -> jax.Array:
        return obs.reshape(self.num_envs, self.obs_dim).astype(jnp.float32)


def to_torch(arrays):
    """Views of JAX arrays, not copies. Never write to one: JAX believes its arrays immutable.

    On a CPU this waits for JAX (sync); on a GPU torch's stream does, not the host. JAX uses the
    memory again once the view is gone, without waiting for torch: keep it until torch has read it.
    """
    return jax.tree.map(torch.from_dlpack, arrays)


def to_jax(tensor):
    """A view of a tensor for JAX, not a copy. Never write to it again: JAX may read it later."""
    # On a CPU, NumPy's view costs a quarter of what DLPack's does.
    return tensor.numpy() if tensor.device.type == "cpu" else jax.dlpack.from_dlpack(tensor)


# === Agent ======================================================================================
class QNetwork(nn.Module):
    """An MLP; before it, for images (H, W, C), the convolution of MinAtar's network."""

    def __init__(self, obs_shape, hidden_sizes, num_actions):
        super().__init__()
        self.obs_shape = obs_shape
        num_inputs = math.prod(obs_shape)
        if len(obs_shape) == 3:
            height, width, channels = obs_shape
            self.conv = nn.Conv2d(channels, 16, 3)
            num_inputs = 16 * (height - 2) * (width - 2)
        sizes = (num_inputs, *hidden_sizes)
        self.hidden = nn.ModuleList(nn.Linear(m, n) for m, n in pairwise(sizes))
        self.output = nn.Linear(sizes[-1], num_actions)

    def forward(self, obs):  # (B, obs_dim) -> (B, num_actions)
        x = obs
        if len(self.obs_shape) == 3:
            x = x.reshape(-1, *self.obs_shape).permute(0, 3, 1, 2)
            x = self.conv(x).relu().reshape(len(obs), -1)
        for layer in self.hidden:
            x = layer(x).relu()
        return self.output(x)


class Moments(NamedTuple):
    """What the optimizer knows of past gradients, P = number of parameters."""

    count: torch.Tensor  # () float32, updates so far
    mean: torch.Tensor  # (P,), moving average of the gradient
    square: torch.Tensor  # (P,), and of its square


class Agent(NamedTuple):
    q_network: QNetwork
    target_network: QNetwork  # the parameters of some updates ago
    moments: Moments


def make_agent(args: Args, env: VecEnv, device: torch.device) -> Agent:
    """Initialise the parameters, the target network's copy and the optimizer."""
    q_network = QNetwork(env.obs_shape, args.hidden_sizes, env.num_actions).to(device)
    target_network = copy.deepcopy(q_network)
    zeros = torch.zeros_like(nn.utils.parameters_to_vector(q_network.parameters()).detach())
    moments = Moments(zeros.new_zeros(()), zeros, zeros.clone())
    return Agent(q_network, target_network, moments)


# === Replay =====================================================================================
class Transition(NamedTuple):
    """One row per step: N = num_envs of them, batch_size in a batch, buffer_size in the replay."""

    obs: torch.Tensor  # (N, obs_dim) float32, what the action was chosen from
    action: torch.Tensor  # (N,) int32
    reward: torch.Tensor  # (N,) float32, a result of the action, as everything below
    terminated: torch.Tensor  # (N,) bool
    next_obs: torch.Tensor  # (N, obs_dim), before any restart


def make_replay(args: Args, env: VecEnv, device: torch.device) -> Transition:
    """An empty replay; MinAtar's observations are zeros and ones, and kept as booleans."""
    minatar = "MinAtar" in args.env_id and ":" not in args.env_id  # and none of one's own
    size, kind = args.buffer_size, torch.bool if minatar else torch.float32
    obs, next_obs = torch.zeros((2, size, env.obs_dim), dtype=kind, device=device)
    zeros = partial(torch.zeros, size, device=device)
    action, terminated = zeros(dtype=torch.int32), zeros(dtype=torch.bool)
    return Transition(obs, action, zeros(), terminated, next_obs)


def add(replay: Transition, transition: Transition, row: int) -> None:
    """Write N steps from row on, over the oldest ones."""
    for old, new in zip(replay, transition, strict=True):
        old[row : row + len(new)] = new


def sample(replay: Transition, num_rows: int, batch_size: int) -> Transition:
    """A batch of the first num_rows rows, drawn uniformly with replacement."""
    rows = torch.randint(num_rows, (batch_size,), device=replay.reward.device)
    batch = Transition(*(x[rows] for x in replay))
    return batch._replace(obs=batch.obs.float(), next_obs=batch.next_obs.float())


# === Act ========================================================================================
def epsilon_after(steps: np.ndarray, args: Args) -> np.ndarray:
    """The chance of a random action after so many environment steps."""
    progress = np.clip((steps - args.learning_starts) / args.exploration_steps, 0, 1)
    return args.start_e + (args.end_e - args.start_e) * progress


@torch.no_grad()
def act(q_network, obs, explore, random_action):
    """Actions (N,) int32: each environment's best, or where it explores (N,) the random one."""
    return torch.where(explore, random_action, q_network(obs).argmax(-1).int())


# === Loss =======================================================================================
def td_target(q_next, target_q_next, batch: Transition, args: Args):
    """What Q(obs, action) should be, (B,), from Q(next_obs) of both networks (B, num_actions).

    The target network's best value (Mnih et al. 2015), or its value of the online network's best
    action (van Hasselt et al. 2016). After a termination the future is worth 0; a truncation is
    none, and next_obs is what the episode would have gone on with.
    """
    best = (q_next if args.double_q else target_q_next).argmax(-1)
    future = torch.where(batch.terminated, 0.0, value_of(best, target_q_next))
    return batch.reward + args.gamma * future


def dqn_loss(q_network, target_network, batch: Transition, args: Args):
    """The mean loss of Q(obs, action), and (2,): the loss and the mean Q."""
    q = value_of(batch.action, q_network(batch.obs))
    with torch.no_grad():
        target_q_next = target_network(batch.next_obs)
        q_next = q_network(batch.next_obs) if args.double_q else target_q_next
        target = td_target(q_next, target_q_next, batch, args)
    loss_of = F.huber_loss if args.loss == "huber" else F.mse_loss
    loss = loss_of(q, target)
    return loss, torch.stack([loss, q.mean()]).detach()


def value_of(action, q):
    """(B,), (B, num_actions) -> (B,)."""
    return q.gather(-1, action[:, None].long()).squeeze(-1)


# === Update =====================================================================================
METRICS = (
    *("charts/episodes", "charts/episodic_return", "charts/episodic_return_min"),
    *("charts/episodic_return_max", "charts/episodic_length", "charts/episodic_length_min"),
    *("charts/episodic_length_max", "charts/epsilon", "charts/updates"),
    *("losses/td_loss", "losses/q_value"),
)


class Plan(NamedTuple):
    """What an iteration does at each of its T = num_steps steps, known beforehand."""

    epsilon: np.ndarray  # (T,) float32, chance of a random action
    learning_rate: np.ndarray  # (T,) float32
    row: np.ndarray  # (T,) int32, where the step goes in the replay
    num_rows: np.ndarray  # (T,) int32, how many of the replay are written after it
    num_updates: np.ndarray  # (T,) int32, how many follow the step
    updates_before: np.ndarray  # (T,) int32, how many were done before; PyTorch's loop asks


def make_plan(iteration: int, args: Args) -> Plan:
    """The iteration's schedules as arrays; counts are integers, so rounding moves no update."""
    first = iteration * args.num_steps
    before = np.arange(first, first + args.num_steps) * args.num_envs  # environment steps so far
    after = before + args.num_envs
    decay = 1 - iteration / args.num_iterations if args.anneal_lr else 1.0
    updates = updates_after(before, args)
    counts = [before % args.buffer_size, np.minimum(after, args.buffer_size)]
    counts += [updates_after(after, args) - updates, updates]
    epsilon = epsilon_after(before, args).astype(np.float32)
    learning_rate = np.full(args.num_steps, args.learning_rate * decay, np.float32)
    return Plan(epsilon, learning_rate, *(x.astype(np.int32) for x in counts))


def updates_after(steps: np.ndarray, args: Args) -> np.ndarray:
    """How many updates are due after so many environment steps, whatever num_envs is."""
    ratio = Fraction(str(args.replay_ratio)) / args.batch_size  # exact: 12.8 as written
    learnt = (max(x - args.learning_starts, 0) for x in steps.tolist())
    return np.array([x * ratio.numerator // ratio.denominator for x in learnt])


def update(
    q_network, target_network, moments: Moments, batch: Transition, learning_rate, args: Args
):
    """Train on a batch, in place; return (2,): the loss and the mean Q.

    Gradient and optimizer (Adam: Kingma & Ba 2015) are written out, so that all of it compiles
    into one graph, which backward() would break. One vector of all gradients: fewer kernels.
    """
    loss, losses = dqn_loss(q_network, target_network, batch, args)
    params = list(q_network.parameters())
    grad = torch.cat([x.flatten() for x in torch.autograd.grad(loss, params)])
    with torch.no_grad():
        count, mean, square = moments
        count += 1
        if args.optimizer == "adam":
            mean.lerp_(grad, 1 - 0.9)
            square.lerp_(grad**2, 1 - 0.999)
            root = (square / (1 - 0.999**count)).sqrt()
            direction = mean / (1 - 0.9**count) / (root + args.optimizer_eps)
        else:  # torch.optim.RMSprop(centered=True)
            mean.lerp_(grad, 1 - args.rmsprop_decay)
            square.lerp_(grad**2, 1 - args.rmsprop_decay)
            direction = grad / ((square - mean**2).sqrt() + args.optimizer_eps)
        for x, dx in zip(params, direction.split([x.numel() for x in params]), strict=True):
            x -= learning_rate * dx.view_as(x)
    return losses


def learn(
    agent: Agent, replay, losses, transition: Transition, learning_rate, now, update_fn, args
):
    """Store N steps and train on num_updates batches, in place; losses (2,) are summed up."""
    row, num_rows, num_updates, updates_before = now
    add(replay, transition, row)
    for i in range(num_updates):
        batch = sample(replay, num_rows, args.batch_size)
        losses += update_fn(batch=batch, learning_rate=learning_rate)
        if (updates_before + i + 1) % args.target_network_frequency == 0:
            agent.target_network.load_state_dict(agent.q_network.state_dict())


class Episodes(NamedTuple):
    """T = num_steps steps in N = num_envs environments."""

    terminated: torch.Tensor  # (T, N) bool
    truncated: torch.Tensor  # (T, N) bool
    episode_return: torch.Tensor  # (T, N), up to and with this step
    episode_length: torch.Tensor  # (T, N)


def episode_statistics(episodes: Episodes):
    """Of the episodes that ended, the number, and of return and length the mean, least and most."""
    done = episodes.terminated | episodes.truncated
    yield done.sum()
    for x in (episodes.episode_return, episodes.episode_length):
        yield torch.where(done, x, 0).sum() / done.sum()
        yield torch.where(done, x, torch.inf).min()
        yield torch.where(done, x, -torch.inf).max()


# === Run log ====================================================================================
# Plumbing, the same in every script: flags, metrics, checkpoints. No algorithm is in here.
def fail(reason: str) -> NoReturn:
    """End the process with a sentence about what its user can mend."""
    print("".join(x if x.isprintable() else " " for x in reason), file=sys.stderr)
    sys.exit(2)


@contextmanager
def own_code(env_id: str, duty: str) -> Generator[Any]:
    """The module of my_module:MyEnv. An error in its code is one sentence, with file and line."""
    module, _, name = env_id.partition(":")
    if not name or not all(map(str.isidentifier, module.split("."))) or module.endswith(".py"):
        form = "be a module's name, a colon and a name in it, as my_module:MyEnv"
        raise ValueError(f"--env-id must {form}, not {env_id}")
    try:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # at the end: no file there hides a package
        yield import_module(module)
    except (Exception, SystemExit) as error:
        places = [f" in {os.getcwd()} or the packages"] * isinstance(error, ModuleNotFoundError)
        for frame, line in traceback.walk_tb(error.__traceback__):
            if str(frame.f_globals.get("__name__")).split(".")[0] == module.split(".")[0]:
                places.append(f" ({frame.f_code.co_filename}, line {line})")
        text = f"{type(error).__name__}: {error}".partition("\n")[0] + "".join(places[-1:])
        raise ValueError(f"--env-id {env_id} must {duty}: {text}") from error


def main(args: Args) -> None:
    """Train by the command line's args, or go on with the run that they name."""
    if args.resume is not None:
        flags = [x.partition("=")[0].replace("_", "-") for x in sys.argv if x.startswith("--")]
        if sum(x != "--env-id" for x in flags) > 1:
            fail("--resume: the run has its arguments, so no flag may stand beside it but --env-id")
        if os.path.exists(Path(args.resume, "run.json")):
            fail(f"--resume: {args.resume} is complete")
        args, *_ = load_checkpoint(args.resume, env_id=args.env_id if "--env-id" in flags else None)
    threading.excepthook = lambda _: None  # train raises the errors of TensorBoard's thread again
    try:
        train(args)
    except OSError as error:
        fail(f"{args.runs_dir}: {error}; --resume goes on from the last checkpoint, if any")


def load_checkpoint(
    folder: str | Path, state: Any = None, env_id: str | None = None
) -> tuple[Args, dict[str, Any], Any]:
    """Return a run's Args, its checkpoint's info, and state with the saved NumPy arrays in it."""
    path, script = Path(os.path.realpath(folder), "checkpoint.npz"), Path(__file__).stem

    def read(place, x):
        name = jax.tree_util.keystr(place, simple=True, separator="/")
        array = file[name]
        if (array.shape, array.dtype.name) != (x.shape, str(x.dtype).removeprefix("torch.")):
            raise ValueError(f"{name} is {array.dtype.name} {array.shape}")
        return array

    try:
        with np.load(path, allow_pickle=False) as file:  # so a stranger's file runs no code
            info = json.loads(file["info"].item())
            if info["script"] != script:
                raise ValueError(f"it is one of {info['script']}.py")
            own = info["args"] | {"hidden_sizes": tuple(info["args"]["hidden_sizes"])}
            for name, x in (own | {"run_name": None}).items():
                kind, hint = type(getattr(Args, name)), Args.__annotations__[name]
                known = hint.__args__ if get_origin(hint) is Literal else [x]
                if x not in known or (type(x) is not kind and (kind, type(x)) != (float, int)):
                    raise ValueError(f"its {name} is {x}")
            name = own["env_id"]
            if env_id != name and (env_id or ":" in name):
                rule = "which is code: to run it, add" if ":" in name else "so it must be"
                fail(f"{folder} was trained in {name}, {rule} --env-id {shlex.quote(name)}")
            own |= {"resume": str(folder), "runs_dir": str(path.parents[1])}
            args = Args(**own | {"run_name": path.parent.name})
            info["iteration"] = range(args.num_iterations + 1).index(info["iteration"])
            info["elapsed"], info["resumed"] = float(info["elapsed"]), [*info["resumed"]]
            return args, info, jax.tree.map_with_path(read, state)
    except Exception as error:  # a damaged file can raise anything
        code_is_wrong = str(error).startswith(f"--env-id {env_id} must")  # own_code says it
        fail(str(error) if code_is_wrong else f"{path} is no checkpoint of {script}.py: {error}")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one piece: killed at any moment, it holds all of the old or of the new."""
    partial_path = path.with_suffix(".partial")
    partial_path.unlink(missing_ok=True)  # were it a link, what it leads to would be written to
    with open(partial_path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial_path, path)


class RunLog:
    """Writes metrics and checkpoints as a run goes; run.json last, where it is complete."""

    def __init__(self, args: Args, framework: str, compile_mode: str, device: str) -> None:
        self.args, self.start, self.saving, self.signals = args, time.perf_counter(), 0.0, []
        self.steps = args.num_envs * args.num_steps  # of environments, per iteration
        now = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
        self.imports = now - (psutil.Process().create_time() - psutil.boot_time())
        self.dir, shell = Path(args.runs_dir, str(args.run_name)), subprocess.getoutput
        git = f"git -C {shlex.quote(str(Path(__file__).parent))} describe --always --dirty"
        gpu = "nvidia-smi --format=csv,noheader 2>/dev/null --query-gpu="
        self.info: dict[str, Any] = {
            **{"args": asdict(args), "script": Path(__file__).stem},
            **{"framework": framework, "compile_mode": compile_mode, "device": device},
            **{"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "resumed": [], "wandb_id": None},
            "git_commit": shell(git + " --abbrev=40 --exclude='*' 2>/dev/null") or None,
            **{"python": platform.python_version(), "os": platform.platform()},
            "versions": {package.name: package.version for package in metadata.distributions()},
            **{"gpu": shell(gpu + "name") or None, "driver": shell(gpu + "driver_version") or None},
            "cpu": shell("lscpu | sed -n 's/^Model name: *//p'") or platform.processor(),
            **{"cores": psutil.cpu_count(logical=False), "load": os.getloadavg()[0]},
            "container": any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv"))),
        }
        try:
            self.dir.mkdir(parents=True, exist_ok=bool(args.resume))
            self.lock = os.open(self.dir, os.O_RDONLY)
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            fail(f"{self.dir} cannot be made, or is in use: {error.strerror}")

    def begin(self, **state: Any) -> tuple[Any, ...]:
        """Return the first iteration and the parts of state, as they are or as they were saved."""
        first, names = 0, list(state)  # jax.tree sorts names
        if self.args.resume:
            _, info, state = load_checkpoint(self.dir, state, self.args.env_id)
            first = info["iteration"]
            self.start -= info["elapsed"]
            self.info |= {name: info[name] for name in ("args", "started", "wandb_id")}
            self.info["resumed"] = [*info["resumed"], first]
        self.open_metrics(first)
        self.handlers = {x: signal.signal(x, self.stop) for x in (signal.SIGINT, signal.SIGTERM)}
        return first, *(state[name] for name in names)

    def open_metrics(self, first: int) -> None:
        """Open what metrics go to; of a run that goes on, keep those of the first iterations."""
        path, lines = self.dir / "metrics.jsonl", []
        if self.args.resume:
            lines = path.read_bytes().split(b"\n")  # the last is not whole
            if len(lines) <= first:
                fail(f"{path} is shorter than its checkpoint says")
            replace_file(path, b"\n".join([*lines[:first], b""]))
        self.wandb: Any = self.start_wandb() if self.args.track else None
        for row in map(json.loads, lines[self.wandb.step : first] if self.wandb else ()):
            self.wandb.log(row, step=row["iteration"])  # a kill came before W&B had sent it
        self.metrics = open(path, "a", buffering=1)
        self.tensorboard = Writer(str(self.dir))

    def start_wandb(self) -> Any:
        import wandb  # half a second that only --track pays

        sys.stdin = open(os.devnull)  # without a key, W&B must fail, not wait for one to be typed
        os.environ.setdefault("WANDB_PROJECT", "ppo-rosetta")
        own: dict[str, Any] = {"name": self.dir.name, "id": self.info["wandb_id"], "dir": self.dir}
        try:
            run = wandb.init(**own, resume="allow", reinit="create_new", config=self.info)
        except (wandb.Error, ValueError) as error:
            if not self.args.resume:
                shutil.rmtree(self.dir)
            fail(f"--track: {' '.join(str(error).split())} (WANDB_MODE=offline needs no account)")
        run.define_metric("*", step_metric="global_step")
        self.info["wandb_id"] = run.id
        return run

    def stop(self, number: Any, _: Any) -> None:
        """End after this iteration; at once at a third signal: a wrapper may send one twice."""
        self.signals.append(number)
        if len(self.signals) == 2:
            signal.signal(number, self.handlers[number])

    def write(self, iteration: int, times: tuple[float, float | None, float], values) -> bool:
        """Log METRICS and times (start, rollout's end or None, end); return whether to save."""
        args, done, (start, middle, end) = self.args, iteration + 1, times
        lr = args.learning_rate * (1 - iteration / args.num_iterations if args.anneal_lr else 1)
        row: dict[str, Any] = dict(zip(METRICS, values, strict=True))
        row |= {"iteration": iteration, "global_step": done * self.steps}
        row |= {"charts/learning_rate": lr, "charts/SPS": self.steps / (end - start)}
        row |= {"time/elapsed": end - self.start, "time/iteration": end - start}
        if middle is not None:
            row |= {"time/rollout": middle - start, "time/update": end - middle}
        # JSON has no NaN: the return of no episode, and a diverged loss, are null.
        row = {name: x if math.isfinite(x) else None for name, x in row.items()}
        self.metrics.write(json.dumps(row) + "\n")
        for name, x in row.items():
            if "/" in name and x is not None:
                self.tensorboard.add_scalar(name, x, row["global_step"])
        if self.wandb:
            self.wandb.log(row, step=iteration)
        if done % math.ceil(args.num_iterations / 100) == 0:
            mean, sps = row["charts/episodic_return"], row["charts/SPS"]
            text = "no episode ended" if mean is None else f"return {mean:.1f}"
            print(f"iteration {done}/{args.num_iterations}: {text}, {sps:,.0f} steps/s", flush=True)
        due = bool(self.signals) or done == args.num_iterations
        return due or (args.save_every > 0 and done % args.save_every == 0)

    def save(self, iteration: int, **state: Any) -> None:
        """Write a checkpoint to go on from after an iteration; if a signal asks for it, end."""
        start, done, buffer = time.perf_counter(), iteration + 1, io.BytesIO()
        self.tensorboard.flush()
        os.fsync(self.metrics.fileno())  # before the checkpoint that counts on them
        name_of = partial(jax.tree_util.keystr, simple=True, separator="/")
        arrays = {name_of(place): x for place, x in jax.tree.leaves_with_path(state)}
        now = {"iteration": done, "elapsed": start - self.start}
        np.savez(buffer, info=json.dumps(self.info | now), **arrays)  # sync
        replace_file(self.dir / "checkpoint.npz", buffer.getvalue())
        self.saving += time.perf_counter() - start
        if self.signals and done < self.args.num_iterations:
            self.close(128 + self.signals[0])
            own = ["--env-id", self.args.env_id] if ":" in self.args.env_id else []
            how = shlex.join([sys.orig_argv[0], sys.argv[0], "--resume", str(self.dir), *own])
            print(f"Stopped after {done} of {self.args.num_iterations} iterations. To go on: {how}")
            sys.exit(128 + self.signals[0])

    def finish(self, peak_device_bytes: int | None) -> dict[str, Any]:
        """Write run.json, and return what it holds."""
        total = time.perf_counter() - self.start
        results: dict[str, Any] = {"status": "completed", "peak_device_bytes": peak_device_bytes}
        results["durations"] = {"imports": self.imports, "total": total, "saving": self.saving}
        peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        results["peak_host_bytes"] = peak_rss * (1 if sys.platform == "darwin" else 1024)
        replace_file(self.dir / "run.json", json.dumps(self.info | results, indent=2).encode())
        if self.wandb:
            self.wandb.summary.update(results)
        self.close(0)
        for number, handler in self.handlers.items():  # not where a signal ends it: one may follow
            signal.signal(number, handler)
        print(f"written to {self.dir}")
        return self.info | results

    def close(self, exit_status: int) -> None:
        self.metrics.close()
        self.tensorboard.close()
        if self.wandb:
            self.wandb.finish(exit_status)
        os.close(self.lock)


# === Training ===================================================================================
def choose_device() -> torch.device:
    """The GPU if torch and JAX both see it; otherwise the CPU, for both."""
    torch_gpu, jax_gpu = torch.cuda.is_available(), jax.default_backend() == "gpu"
    if torch_gpu != jax_gpu:
        sees, blind = ("torch", "jax[cuda13]") if torch_gpu else ("JAX", "torch, a CUDA build")
        print(f"Only {sees} sees a GPU, so both use the CPU; to use the GPU install {blind}.")
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
    return torch.device("cuda" if torch_gpu and jax_gpu else "cpu")


def iterate(
    agent: Agent, replay, obs, env_state, plan: Plan, step_fn, update_fn, env: VecEnv, args: Args
):
    """Act, step, store and learn num_steps times; return obs and env_state to go on from, METRICS.

    Networks, moments and replay change in place.
    """
    shape, device = (args.num_steps, args.num_envs), obs.device
    # Drawn for the whole iteration: calls of PyTorch cost more than their numbers.
    epsilon, learning_rate = (torch.tensor(x, device=device) for x in plan[:2])
    explore = torch.rand(shape, device=device) < epsilon[:, None]
    random_action = torch.randint(env.num_actions, shape, dtype=torch.int32, device=device)

    losses, results = torch.zeros(2, device=device), []
    for step in range(args.num_steps):
        action = act(agent.q_network, obs, explore[step], random_action[step])
        new_obs, env_state, result = step_fn(env_state, to_jax(action))
        results.append(to_torch(result))  # on a CPU, sync; all are kept until torch has read them
        result = results[-1]
        transition = Transition(obs, action, *(result[x] for x in Transition._fields[2:]))
        now = (int(x[step]) for x in plan[2:])
        learn(agent, replay, losses, transition, learning_rate[step], now, update_fn, args)
        obs = to_torch(new_obs)
    episodes = Episodes(*(torch.stack([x[name] for x in results]) for name in Episodes._fields))
    updates = torch.tensor(plan.num_updates.sum(), dtype=torch.float32, device=device)
    metrics = [*episode_statistics(episodes), epsilon[-1], updates, *losses / updates]
    return obs, env_state, torch.stack(metrics)


def compile_graph(function, gpu):
    """Compile a function, autograd.grad and all, into one graph: a graph break is an error."""
    torch._dynamo.config.trace_autograd_ops = True  # ty: ignore[invalid-assignment]
    options: dict[str, Any] = {
        "cpp_wrapper": not gpu,  # C++ calls the kernels: less per call on a CPU
        "cpp.vec_isa_ok": True,  # believe the CPU's flags, and spare 6 s of test programs
    }
    torch.compiler.reset()  # or graphs of earlier calls of train() would count towards its limit
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def train(args: Args) -> dict[str, Any]:
    """Train an agent; return what run.json holds."""
    device = choose_device()
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    log = RunLog(args, "torch", "compile" if args.compile else "env.jit", gpu or "cpu")
    # Alike in all frameworks: TF32 on a GPU is "high" in torch, and the default in JAX.
    precision = "default" if args.matmul_precision == "high" else "highest"
    jax.config.update("jax_default_matmul_precision", precision)
    torch.set_float32_matmul_precision(args.matmul_precision)
    env = VecEnv(args.env_id, args.num_envs, **args.env_options)
    torch.manual_seed(args.seed)
    agent, replay = make_agent(args, env, device), make_replay(args, env, device)
    update_fn = partial(update, *agent, args=args)
    if args.compile:  # now: the first update is due only after learning_starts
        update_fn = compile_graph(update_fn, gpu)
        with torch.random.fork_rng():  # so that an eager run draws the same numbers
            batch = sample(replay, 1, args.batch_size)
        update_fn(batch=batch, learning_rate=torch.zeros((), device=device))  # moves no weight
        for x in agent.moments:
            x.zero_()
    generators = [torch, torch.cuda] if gpu else [torch]
    # DLPack commits arrays to a device; from a state that is not, step_fn would compile twice.
    jax_device = jax.devices(device.type)[0]
    obs, env_state = jax.jit(env.reset)(jax.device_put(jax.random.PRNGKey(args.seed), jax_device))

    # These tensors change in place, so a checkpoint's numbers are copied into them.
    networks = {"q_network": agent.q_network, "target_network": agent.target_network}
    tensors: dict[str, Any] = {name: x.state_dict() for name, x in networks.items()}
    tensors |= {"moments": agent.moments, "replay": replay}
    states = [x.get_rng_state() for x in generators]
    first, saved, states, obs, env_state = log.begin(
        tensors=tensors, generators=states, obs=obs, env_state=env_state
    )
    jax.tree.map(lambda x, y: x.copy_(torch.as_tensor(y)), tensors, saved)
    del saved  # a replay's worth of memory, where a run goes on
    for generator, state in zip(generators, states, strict=True):
        generator.set_rng_state(torch.as_tensor(state))
    obs, env_state = jax.device_put((obs, env_state), jax_device)
    obs = to_torch(obs)

    step_fn = jax.jit(env.step)

    for iteration in range(first, args.num_iterations):
        start = time.perf_counter()
        plan = make_plan(iteration, args)
        state = iterate(agent, replay, obs, env_state, plan, step_fn, update_fn, env, args)
        obs, env_state, metrics = state
        metrics = metrics.tolist()  # sync, and the iteration's only transfer to the host
        if log.write(iteration, (start, None, time.perf_counter()), metrics):
            on_host = jax.tree.map(torch.Tensor.cpu, {"tensors": tensors, "obs": obs})  # sync
            states = [x.get_rng_state() for x in generators]
            log.save(iteration, **on_host, generators=states, env_state=env_state)
    jax_peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return log.finish(torch.cuda.max_memory_allocated() + jax_peak if gpu else None)


if __name__ == "__main__":
    main(parse_args())

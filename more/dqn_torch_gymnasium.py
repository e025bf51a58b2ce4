# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "jax==0.10.2", "gymnasium==1.3.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""DQN in PyTorch, with environments in Gymnasium on the CPU: the stack that most people have.

    python dqn_torch_gymnasium.py --seed 1          # CartPole-v1
    python dqn_torch_gymnasium.py minatar --seed 1  # Breakout, by MinAtar's own settings

Read Agent to Training first. "# sync" marks a line that waits for the device. What to look at:
- VecEnv.reset makes the environments by --vectorization: in this process (sync), or each in one of
  its own (async). When a run goes on, they start new episodes: Gymnasium saves no environment.
- update trains in place: zero_grad, backward, step. learn does so as often as it is due.
Diff me with dqn_torch.py to see environments in JAX, with dqn_linen_gymnasium.py to see JAX.
"""

import time

START = time.perf_counter()  # before the imports, which take seconds

import atexit
import copy
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
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, NoReturn

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # threads that wait sleep soon, and leave the cores

import gymnasium
import jax  # for jax.tree, which maps over tuples and dicts; JAX computes nothing here
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch import nn
from torch.nn import functional as F


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


class Agent(NamedTuple):
    q_network: QNetwork
    target_network: QNetwork  # the parameters of some updates ago
    optimizer: torch.optim.Optimizer


def make_agent(args: Args, env: VecEnv, device: torch.device) -> Agent:
    """Initialise the parameters, the target network's copy and the optimizer."""
    q_network = QNetwork(env.obs_shape, args.hidden_sizes, env.num_actions).to(device)
    target_network = copy.deepcopy(q_network)
    params = q_network.parameters()
    lr = args.learning_rate
    eps = args.optimizer_eps
    if args.optimizer == "adam":
        optimizer = torch.optim.Adam(params, lr, eps=eps, fused=True)
    else:
        optimizer = torch.optim.RMSprop(params, lr, args.rmsprop_decay, eps, centered=True)
    return Agent(q_network, target_network, optimizer)


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
    size = args.buffer_size
    obs_dtype = torch.bool if minatar else torch.float32
    return Transition(
        obs=torch.zeros((size, env.obs_dim), dtype=obs_dtype, device=device),
        action=torch.zeros(size, dtype=torch.int32, device=device),
        reward=torch.zeros(size, device=device),
        terminated=torch.zeros(size, dtype=torch.bool, device=device),
        next_obs=torch.zeros((size, env.obs_dim), dtype=obs_dtype, device=device),
    )


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
def updates_after(steps, args: Args):
    """How many updates are due after so many environment steps, whatever num_envs is."""
    return np.maximum(steps - args.learning_starts, 0) // args.train_frequency


def learn(agent: Agent, replay, losses, global_step: int, args: Args):
    """Train on as many batches as are due after a step of all environments, in place.

    global_step counts the environment steps before it; losses (2,) are summed up.
    """
    after = global_step + args.num_envs
    num_rows = min(after, args.buffer_size)  # rows of the replay that are filled
    for number in range(updates_after(global_step, args), updates_after(after, args)):
        batch = sample(replay, num_rows, args.batch_size)
        losses += update(agent, batch, args)
        if (number + 1) % args.target_network_frequency == 0:
            agent.target_network.load_state_dict(agent.q_network.state_dict())


def update(agent: Agent, batch: Transition, args: Args):
    """Train on a batch, in place; return (2,): the loss and the mean Q."""
    loss, losses = dqn_loss(agent.q_network, agent.target_network, batch, args)
    agent.optimizer.zero_grad()
    loss.backward()
    agent.optimizer.step()
    return losses


class Episodes(NamedTuple):
    """What episode_statistics reads: T = num_steps steps in N = num_envs environments."""

    terminated: torch.Tensor  # (T, N) bool
    truncated: torch.Tensor  # (T, N) bool
    episode_return: torch.Tensor  # (T, N), up to and with this step
    episode_length: torch.Tensor  # (T, N)


def episode_statistics(episodes: Episodes) -> dict[str, torch.Tensor]:
    """Of the episodes that ended: how many, and mean, minimum and maximum of return and length.

    Where none ended, these are NaN and infinite, which the log leaves out.
    """
    done = episodes.terminated | episodes.truncated
    metrics = {"charts/episodes": done.sum()}
    for name, x in [("return", episodes.episode_return), ("length", episodes.episode_length)]:
        metrics[f"charts/episodic_{name}"] = torch.where(done, x, 0).sum() / done.sum()
        metrics[f"charts/episodic_{name}_min"] = torch.where(done, x, torch.inf).min()
        metrics[f"charts/episodic_{name}_max"] = torch.where(done, x, -torch.inf).max()
    return metrics


# === Training ===================================================================================
def iterate(agent: Agent, replay, obs, iteration, env: VecEnv, args: Args):
    """Act, step, store and learn num_steps times; return the obs to go on from, and what to log.

    Networks, optimizer and replay change in place.
    """
    shape = (args.num_steps, args.num_envs)
    device = obs.device
    first = iteration * args.num_steps
    before = np.arange(first, first + args.num_steps) * args.num_envs  # environment steps so far
    # One call for all steps: a call costs more than the numbers that it draws.
    epsilon = torch.tensor(epsilon_after(before, args), dtype=torch.float32, device=device)
    explore = torch.rand(shape, device=device) < epsilon[:, None]
    random_action = torch.randint(env.num_actions, shape, dtype=torch.int32, device=device)

    losses = torch.zeros(2, device=device)
    results = []
    for step, global_step in enumerate(before.tolist()):
        action = act(agent.q_network, obs, explore[step], random_action[step])
        new_obs, result = env.step(action.cpu().numpy())  # sync
        results.append(result)
        result = {name: torch.from_numpy(x).to(device) for name, x in result.items()}
        end = result["terminated"]
        transition = Transition(obs, action, result["reward"], end, result["next_obs"])
        add(replay, transition, row=global_step % args.buffer_size)
        learn(agent, replay, losses, global_step, args)
        obs = torch.from_numpy(new_obs).to(device)

    stacked = [np.stack([x[name] for x in results]) for name in Episodes._fields]
    metrics = episode_statistics(Episodes(*(torch.from_numpy(x).to(device) for x in stacked)))
    updates = updates_after(before[-1] + args.num_envs, args) - updates_after(before[0], args)
    updates = torch.tensor(updates, dtype=torch.float32, device=device)
    metrics["charts/epsilon"] = epsilon[-1]
    metrics["charts/updates"] = updates
    td_loss, q_value = losses / updates
    metrics["losses/td_loss"] = td_loss
    metrics["losses/q_value"] = q_value
    return obs, metrics


def train(args: Args) -> None:
    """Train an agent, from the start or from a checkpoint on."""
    # The same in all frameworks: torch's "high" is TF32 on a GPU, as is JAX's "default".
    torch.set_float32_matmul_precision(args.matmul_precision)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    env = VecEnv(args.env_id, args.num_envs, args.vectorization, args.seed)
    spaces = {"obs_shape": env.obs_shape, "obs_dim": env.obs_dim, "num_actions": env.num_actions}
    log = RunLog(args, spaces, "torch", "eager", gpu or "cpu")

    torch.manual_seed(args.seed)
    agent = make_agent(args, env, device)
    replay = make_replay(args, env, device)
    if args.resume:
        resume(log, agent, replay, args)
    obs = torch.from_numpy(env.reset(log.info["iteration"])).to(device)

    for iteration in range(log.info["iteration"], args.num_iterations):
        start = time.perf_counter()
        decay = 1 - iteration / args.num_iterations if args.anneal_lr else 1.0
        agent.optimizer.param_groups[0]["lr"] = args.learning_rate * decay
        obs, metrics = iterate(agent, replay, obs, iteration, env, args)
        values = torch.stack([*metrics.values()]).tolist()  # sync
        metrics = dict(zip(metrics, values, strict=True))
        log.write(metrics, start, time.perf_counter())
        if log.must_save():  # after a signal, this is the end
            state = training_state(agent, replay)
            state = {name: x.cpu() for name, x in state.items()}  # sync
            log.save(tensors=state)
    log.finish(torch.cuda.max_memory_allocated() if gpu else None)


def training_state(agent: Agent, replay: Transition) -> dict[str, torch.Tensor]:
    """What PyTorch's part of a training goes on from, by name: views, to which resume writes."""
    state = {f"q_network/{name}": x for name, x in agent.q_network.state_dict().items()}
    state |= {f"target_network/{name}": x for name, x in agent.target_network.state_dict().items()}
    state |= {f"replay/{name}": x for name, x in replay._asdict().items()}
    for name, x in agent.q_network.named_parameters():
        for key, moment in agent.optimizer.state[x].items():
            state[f"optimizer/{name}/{key}"] = moment
    state["generator"] = torch.get_rng_state()
    if torch.cuda.is_initialized():
        state["cuda_generator"] = torch.cuda.get_rng_state()
    return state


def resume(log, agent: Agent, replay, args: Args):
    """Go on from log's checkpoint: load it into all that trains."""
    if updates_after(log.info["iteration"] * args.num_steps * args.num_envs, args) > 0:
        for x in agent.q_network.parameters():
            x.grad = torch.zeros_like(x)
        agent.optimizer.step()  # makes its moments, to load into; gradients of 0 change no weight
    state = training_state(agent, replay)
    (saved,) = log.load(tensors=state)
    for name, x in state.items():
        x.copy_(torch.as_tensor(saved[name]))
    torch.set_rng_state(state["generator"])
    if torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda_generator"])


def load_policy(folder: str | Path, seed: int = 0) -> Callable[..., np.ndarray]:
    """What a run learnt, as a function: policy(obs) is the best action for each obs.

    obs (N, *obs_shape) and actions (N,) are NumPy arrays, as the environment has them. Nothing is
    drawn, so the seed, which PPO's scripts have here, changes nothing.
    """
    info, args = load_info(folder)
    env: Any = SimpleNamespace(**info["spaces"])  # all that make_agent asks of an environment
    q_network = make_agent(args, env, torch.device("cpu")).q_network
    _, saved = load_checkpoint(folder, {"tensors": {"q_network": q_network.state_dict()}})
    q_network.load_state_dict(jax.tree.map(torch.as_tensor, saved["tensors"]["q_network"]))

    @torch.no_grad()
    def policy(obs):
        obs = np.reshape(obs, (len(obs), env.obs_dim)).astype(np.float32)
        return q_network(torch.as_tensor(obs)).numpy().argmax(-1)

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

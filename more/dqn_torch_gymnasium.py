# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.3.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""DQN in PyTorch, with environments in Gymnasium on the CPU: the stack that most people have.

    python more/dqn_torch_gymnasium.py --seed 1          # CartPole-v1
    python more/dqn_torch_gymnasium.py minatar --seed 1  # Breakout, by MinAtar's own settings

Read Agent to Training first. "# sync" marks a line that waits for the device. What to look at:
- VecEnv makes the environments by --vectorization: in this process (sync), or each in one of its
  own (async). A resumed run starts new episodes: Gymnasium saves no environment.
- Replay keeps its tensors on the device.
- update trains in place: zero_grad, backward, step.
- train is a plain loop over steps: act, step, store, and learn when it is due.
Diff me with dqn_torch.py to see environments in JAX, with dqn_linen_gymnasium.py to see JAX.
"""

import time

START = time.perf_counter()  # before the imports, which take seconds

import argparse
import atexit
import copy
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
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # idle threads sleep soon and free their cores

import gymnasium
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from tensorboard.summary import Writer
from torch import nn
from torch.nn import functional as F


# === Arguments ==================================================================================
@dataclass
class Args:
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
    matmul_precision: Literal["medium", "high", "highest"] = "high"  # highest: no TF32 on a GPU
    vectorization: Literal["sync", "async"] = "sync"  # one after the other, or a process each
    runs_dir: str = "runs"  # folder that gets one folder per run
    run_name: str = ""  # that folder's name; by default {env_id}__{script}__{seed}__{time}
    track: bool = False  # log to Weights & Biases, too
    save_every: int = 0  # iterations between checkpoints; 0: only when training ends or is stopped
    resume: str = ""  # folder of a run to resume; its arguments are the defaults of all others

    def __post_init__(self) -> None:
        """Work out the sizes. On the command line, a ValueError becomes a message."""
        if self.seed not in range(2**32):
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
        env_id="MinAtar/Breakout-v0",  # its v0: six actions, sticky by 0.1, no time limit
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
class VecEnv:
    """N = num_envs Gymnasium environments with flat observations; an episode's end starts the next.

    All of it is NumPy's, on the host. options, such as render_mode, are the environment's own.
    """

    def __init__(
        self, env_id: str, num_envs: int, vectorization: str, seed: int, **options: Any
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
        if not isinstance(space, Discrete) or space.start != 0:
            hint = "for a Box, see more/sac_linen_gymnasium.py or the same in PyTorch"
            fail(f"--env-id: actions must count from 0, and not be {space}; {hint}")
        obs_space = self.envs.single_observation_space
        if not isinstance(obs_space, Box):
            hint = "gymnasium.wrappers.FlattenObservation makes one-hot vectors of numbers"
            fail(f"--env-id: observations must be arrays, not {obs_space}; {hint}")
        self.num_envs = num_envs
        self.seed = seed
        self.action_space = space
        self.num_actions = int(space.n)
        self.obs_shape = obs_space.shape
        self.obs_dim = math.prod(self.obs_shape)
        self.obs_dtype = np.dtype(np.float32 if obs_space.dtype == np.float64 else obs_space.dtype)

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
        return obs.reshape(len(obs), self.obs_dim).astype(self.obs_dtype)  # a copy


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


# === Agent ======================================================================================
class Agent(nn.Module):
    """Q(obs, action) of each action: an MLP; before it, for images (H, W, C), a convolution."""

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
        x = obs.float()  # from the environment's own type
        if len(self.obs_shape) == 3:
            x = x.reshape(-1, *self.obs_shape).permute(0, 3, 1, 2)
            x = self.conv(x).relu().reshape(len(obs), -1)
        for layer in self.hidden:
            x = layer(x).relu()
        return self.output(x)


def make_agent(args: Args, obs_shape, num_actions: int, device: torch.device):
    """Initialise the parameters, the target network, which begins as a copy, and the optimizer."""
    agent = Agent(obs_shape, args.hidden_sizes, num_actions).to(device)
    target = copy.deepcopy(agent)
    params = agent.parameters()
    lr = args.learning_rate
    eps = args.optimizer_eps
    if args.optimizer == "adam":
        optimizer = torch.optim.Adam(params, lr, eps=eps, fused=True)
    else:
        optimizer = torch.optim.RMSprop(params, lr, args.rmsprop_decay, eps, centered=True)
    return agent, target, optimizer


# === Replay =====================================================================================
class Transition(NamedTuple):
    """One row per step: N = num_envs of them, batch_size in a batch, buffer_size in the replay."""

    obs: torch.Tensor  # (N, obs_dim) of the environment's type, what the action was chosen from
    action: torch.Tensor  # (N,) int32
    reward: torch.Tensor  # (N,) float32, result of the action, like all fields below
    terminated: torch.Tensor  # (N,) bool
    next_obs: torch.Tensor  # (N, obs_dim), before any restart


class Replay:
    """The last buffer_size environment steps, on the device."""

    def __init__(self, args: Args, obs_dim: int, obs_dtype: np.dtype, device: torch.device) -> None:
        self.args = args
        self.num_added = 0  # environment steps so far
        size = args.buffer_size
        gigabytes = 2 * size * obs_dim * obs_dtype.itemsize / 1e9
        if gigabytes > 1:
            print(f"The replay takes {gigabytes:.1f} GB: --buffer-size {size}, obs and next_obs.")
        obs = torch.from_numpy(np.zeros((size, obs_dim), obs_dtype)).to(device)
        self.rows = Transition(
            obs=obs,
            action=torch.zeros(size, dtype=torch.int32, device=device),
            reward=torch.zeros(size, device=device),
            terminated=torch.zeros(size, dtype=torch.bool, device=device),
            next_obs=torch.zeros_like(obs),
        )

    def add(self, obs, action, result: dict) -> None:
        """Store a step of all environments, over the oldest rows."""
        row = self.num_added % self.args.buffer_size
        step = (obs, action, result["reward"], result["terminated"], result["next_obs"])
        for old, new in zip(self.rows, step, strict=True):
            old[row : row + len(new)] = torch.as_tensor(new)
        self.num_added += len(obs)

    def sample(self, batch_size: int) -> Transition:
        """A batch of the rows so far, drawn uniformly with replacement."""
        num_rows = min(self.num_added, self.args.buffer_size)
        rows = torch.randint(num_rows, (batch_size,), device=self.rows.reward.device)
        return Transition(*(x[rows] for x in self.rows))

    def updates_due(self) -> int:
        """How many updates are due after the step that was added last."""
        before = updates_after(self.num_added - self.args.num_envs, self.args)
        return updates_after(self.num_added, self.args) - before

    def state_dict(self) -> dict:
        """For a checkpoint: the rows that are filled."""
        rows = self.rows
        if self.num_added < self.args.buffer_size:
            # Clones, since of a view torch.save would write all the memory.
            rows = Transition(*(x[: self.num_added].clone() for x in rows))
        return {"num_added": self.num_added, "rows": rows._asdict()}

    def load_state_dict(self, state: dict) -> None:
        self.num_added = state["num_added"]
        num_rows = min(self.num_added, self.args.buffer_size)
        for name, x in state["rows"].items():
            getattr(self.rows, name)[:num_rows] = x


def updates_after(steps: int, args: Args) -> int:
    """How many updates are due once so many steps were added, whatever num_envs is."""
    return max(steps - args.learning_starts, 0) // args.train_frequency


# === Act ========================================================================================
def epsilon_after(steps: int, args: Args) -> float:
    """The chance of a random action after so many environment steps."""
    progress = min(max((steps - args.learning_starts) / args.exploration_steps, 0.0), 1.0)
    return args.start_e + (args.end_e - args.start_e) * progress


@torch.no_grad()
def act(agent, obs, epsilon: float):
    """Actions (N,): each environment's best, or with chance epsilon a random one."""
    q = agent(obs)
    best = q.argmax(-1)
    explore = torch.rand(best.shape, device=q.device) < epsilon
    random_action = torch.randint(q.shape[-1], best.shape, device=q.device)
    return torch.where(explore, random_action, best)


# === Loss =======================================================================================
def td_target(selector_q, target_q_next, batch: Transition, args: Args):
    """What Q(obs, action) should be, (B,), from two networks' Q(next_obs), (B, num_actions) each.

    It takes the target network's value of the action that selector_q has as best. After a
    termination the future is worth 0. After a truncation it is not: the episode could have gone on
    from next_obs.
    """
    best = selector_q.argmax(-1)
    future = torch.where(batch.terminated, 0.0, value_of(best, target_q_next))
    return batch.reward + args.gamma * future


def dqn_loss(agent, target, batch: Transition, args: Args):
    """The mean loss of Q(obs, action), and what to log."""
    q = value_of(batch.action, agent(batch.obs))
    with torch.no_grad():
        target_q_next = target(batch.next_obs)
        selector_q = target_q_next  # Mnih et al. 2015
        if args.double_q:
            selector_q = agent(batch.next_obs)  # van Hasselt et al. 2016
        q_target = td_target(selector_q, target_q_next, batch, args)
    loss_of = F.huber_loss if args.loss == "huber" else F.mse_loss
    loss = loss_of(q, q_target)
    return loss, {"losses/td_loss": loss, "losses/q_value": q.mean()}


def value_of(action, q):
    """(B,), (B, num_actions) -> (B,)."""
    return q.gather(-1, action[:, None].long()).squeeze(-1)


# === Update =====================================================================================
def update(agent, target, optimizer, batch: Transition, args: Args):
    """Train on a batch, in place; return its losses."""
    loss, losses = dqn_loss(agent, target, batch, args)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {name: x.detach() for name, x in losses.items()}


def mean_losses(losses: list[dict]) -> dict:
    """Means over an iteration's updates; NaN, which the log has as null, if there were none."""
    if not losses:
        return {"losses/td_loss": math.nan, "losses/q_value": math.nan}
    return {name: torch.stack([x[name] for x in losses]).mean() for name in losses[0]}


def episode_statistics(returns: list[float], lengths: list[float]) -> dict:
    """Of the episodes that ended: how many, and mean, minimum and maximum of return and length.

    Where none ended, mean, minimum and maximum are NaN or infinite, which the log has as null.
    """
    metrics = {"charts/episodes": len(returns)}
    for name, x in [("return", returns), ("length", lengths)]:
        metrics[f"charts/episodic_{name}"] = sum(x) / len(x) if x else math.nan
        metrics[f"charts/episodic_{name}_min"] = min(x, default=math.inf)
        metrics[f"charts/episodic_{name}_max"] = max(x, default=-math.inf)
    return metrics


# === Training ===================================================================================
def train(args: Args) -> None:
    """Train an agent, from the start or from a checkpoint on."""
    torch.set_float32_matmul_precision(args.matmul_precision)  # "high" is TF32 on a GPU
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    env = VecEnv(args.env_id, args.num_envs, args.vectorization, args.seed)
    log = RunLog(
        args,
        framework="torch",
        compile_mode="eager",
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        obs_shape=env.obs_shape,
        num_actions=env.num_actions,
    )

    torch.manual_seed(args.seed)
    iteration = 0
    num_updates = 0
    agent, target, optimizer = make_agent(args, env.obs_shape, env.num_actions, device)
    replay = Replay(args, env.obs_dim, env.obs_dtype, device)
    if (log.dir / "checkpoint.pt").exists():  # resumed
        checkpoint = load_checkpoint(log.dir)
        iteration = checkpoint["iteration"]
        num_updates = checkpoint["num_updates"]
        agent.load_state_dict(checkpoint["agent"])
        target.load_state_dict(checkpoint["target"])
        # Not the settings that were saved: --resume may have come with others.
        settings = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(checkpoint["optimizer"] | {"param_groups": settings})
        replay.load_state_dict(checkpoint["replay"])
        set_rng_state(checkpoint["rng_state"])
    obs = env.reset(iteration)
    log.begin(iteration)

    while iteration < args.num_iterations:
        start = time.perf_counter()
        decay = 1 - iteration / args.num_iterations if args.anneal_lr else 1.0
        optimizer.param_groups[0]["lr"] = args.learning_rate * decay
        returns, lengths, losses = [], [], []
        for _ in range(args.num_steps):
            epsilon = epsilon_after(replay.num_added, args)
            action = act(agent, torch.from_numpy(obs).to(device), epsilon)
            action = action.cpu().numpy()  # sync
            new_obs, result = env.step(action)
            replay.add(obs, action, result)
            obs = new_obs
            done = result["terminated"] | result["truncated"]
            returns += result["episode_return"][done].tolist()
            lengths += result["episode_length"][done].tolist()
            for _ in range(replay.updates_due()):
                batch = replay.sample(args.batch_size)
                losses.append(update(agent, target, optimizer, batch, args))
                num_updates += 1
                if num_updates % args.target_network_frequency == 0:
                    target.load_state_dict(agent.state_dict())
        metrics = episode_statistics(returns, lengths) | mean_losses(losses)
        metrics["charts/epsilon"] = epsilon
        metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        metrics["charts/updates"] = len(losses)
        log.write(iteration, metrics, start)
        iteration += 1
        if log.must_save(iteration):
            checkpoint = {
                "iteration": iteration,
                "num_updates": num_updates,
                "agent": agent.state_dict(),
                "target": target.state_dict(),
                "optimizer": optimizer.state_dict(),
                "replay": replay.state_dict(),
                "rng_state": get_rng_state(),
            }
            save_checkpoint(log.dir, checkpoint)
            log.note_saved(iteration)
            if log.stopped_by:  # only here, after saving, so that no iteration is lost
                break
    log.close(iteration)


# === Checkpoint =================================================================================
def save_checkpoint(folder: Path, checkpoint: dict) -> None:
    """Write a checkpoint. Killed at any moment, a run has the old one or the new one."""
    new = folder / "checkpoint.new"
    try:
        torch.save(checkpoint, new)  # sync
    except (OSError, RuntimeError):  # a full disk, of which PyTorch's own words say nothing
        new.unlink(missing_ok=True)
        sys.exit(f"{new}: is the disk full? The checkpoint before it, if there is one, stays.")
    os.replace(new, folder / "checkpoint.pt")


def load_checkpoint(folder: str | Path) -> dict:
    """What save_checkpoint wrote, on the CPU. With weights_only, a stranger's file runs no code."""
    return torch.load(Path(folder, "checkpoint.pt"), map_location="cpu", weights_only=True)


def get_rng_state() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:  # not if the run began on a CPU
        torch.cuda.set_rng_state(states["cuda"])


def load_policy(folder: str | Path, seed: int = 0) -> Callable[..., np.ndarray]:
    """What a run learnt, as a function: policy(obs) is the best action for each obs.

    obs (N, *obs_shape) and actions (N,) are NumPy arrays, as the environment has them. Nothing is
    drawn, so the seed, which PPO's scripts have here, changes nothing.
    """
    info, args = load_info(folder)
    agent = Agent(info["obs_shape"], args.hidden_sizes, info["num_actions"])
    agent.load_state_dict(load_checkpoint(folder)["agent"])

    @torch.no_grad()
    def policy(obs):
        obs = torch.from_numpy(flatten(obs, info["obs_shape"]))
        return agent(obs).argmax(-1).numpy()

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

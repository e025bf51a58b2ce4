# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium[mujoco]==1.3.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""SAC in compiled PyTorch, with environments in Gymnasium on the CPU.

    python more/sac_torch_compile_gymnasium.py --seed 1  # Pendulum-v1
    pip install "gymnasium[mujoco]==1.3.0"  # for robots; uv run installs it
    python more/sac_torch_compile_gymnasium.py mujoco --seed 1  # settings for HalfCheetah-v5

Read Agent to Training first. "# sync" marks a line that waits for the device. What to look at:
- draw_action squashes a Gaussian to [-1, 1]; the replay holds that, and VecEnv maps it to bounds.
- sac_loss adds up three losses. What one of them reads and does not train is detached, so that one
  gradient and one Adam train all.
- VecEnv makes the environments by --vectorization: in this process (sync), or each in one of its
  own (async). A resumed run starts new episodes: Gymnasium saves no environment.
- compile_graph makes one graph of update, Adam included; on a GPU, capture records it.
Diff me with sac_torch_gymnasium.py to see what compiling takes, with sac_linen_gymnasium.py to see
JAX.
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
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # idle threads sleep soon and free their cores

import gymnasium
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from tensorboard.summary import Writer
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F


# === Arguments ==================================================================================
@dataclass
class Args:
    seed: int = 1  # seed of all random numbers
    env_id: str = "Pendulum-v1"  # Gymnasium environment with continuous actions; my_module:MyEnv-v0
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
    vectorization: Literal["sync", "async"] = "sync"  # one after the other, or a process each
    runs_dir: str = "runs"  # folder that gets one folder per run
    run_name: str = ""  # that folder's name; by default {env_id}__{script}__{seed}__{time}
    track: bool = False  # log to Weights & Biases, too
    save_every: int = 0  # iterations between checkpoints; 0: only when training ends or is stopped
    save_replay: bool = True  # checkpoints hold the replay; off: a resumed run fills a new one
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
    mujoco = Args(
        env_id="HalfCheetah-v5",
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
        if not isinstance(space, Box) or space.dtype.kind != "f" or not space.is_bounded():
            hint = "for Discrete, see more/dqn_linen_gymnasium.py or the same in PyTorch"
            fail(f"--env-id: actions must be a Box of floats with bounds, not {space}; {hint}")
        obs_space = self.envs.single_observation_space
        if not isinstance(obs_space, Box):
            hint = "gymnasium.wrappers.FlattenObservation makes one-hot vectors of numbers"
            fail(f"--env-id: observations must be arrays, not {obs_space}; {hint}")
        self.num_envs = num_envs
        self.seed = seed
        self.action_space = space
        self.action_low = np.float32(space.low)
        self.action_high = np.float32(space.high)
        self.action_dim = math.prod(space.shape)
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


def to_bounds(action, low, high):
    """Map actions from [-1, 1] to [low, high], and clip what lies outside."""
    return ((low + high) / 2 + (high - low) / 2 * action).clip(low, high)


# === Agent ======================================================================================
class MLP(nn.Module):
    def __init__(self, num_inputs, hidden_sizes, num_outputs):
        super().__init__()
        sizes = (num_inputs, *hidden_sizes)
        self.hidden = nn.ModuleList(nn.Linear(m, n) for m, n in pairwise(sizes))
        self.output = nn.Linear(sizes[-1], num_outputs)

    def forward(self, x):
        for layer in self.hidden:
            x = layer(x).relu()
        return self.output(x)


class Actor(nn.Module):
    """A Gaussian for each number of an action, before draw_action squashes it."""

    def __init__(self, obs_dim, hidden_sizes, action_dim):
        super().__init__()
        self.mlp = MLP(obs_dim, hidden_sizes, 2 * action_dim)

    def forward(self, obs):  # (B, obs_dim) -> mean and log_std, (B, action_dim) each
        mean, log_std = self.mlp(obs.float()).chunk(2, dim=-1)
        # SB3 and SBX clip to the same bounds; CleanRL maps log_std into [-5, 2] by a tanh.
        return mean, log_std.clip(-20, 2)


class Critics(nn.Module):
    """Two estimates of Q(obs, action), which counts rewards and the entropy of later actions."""

    def __init__(self, obs_dim, action_dim, hidden_sizes):
        super().__init__()
        self.mlps = nn.ModuleList(MLP(obs_dim + action_dim, hidden_sizes, 1) for _ in range(2))

    def forward(self, obs, action):  # (B, obs_dim), (B, action_dim) -> (2, B)
        x = torch.cat([obs.float(), action], dim=-1)
        return torch.stack([mlp(x).squeeze(-1) for mlp in self.mlps])


class Agent(nn.Module):
    """All that is trained."""

    def __init__(self, obs_shape, hidden_sizes, action_dim):
        super().__init__()
        obs_dim = math.prod(obs_shape)  # obs comes flat; a CNN would first restore its shape
        self.actor = Actor(obs_dim, hidden_sizes, action_dim)
        self.critics = Critics(obs_dim, action_dim, hidden_sizes)
        self.log_alpha = nn.Parameter(torch.zeros(()))


class Adam(nn.Module):
    """Adam (Kingma & Ba 2015), written out to compile into one graph with loss and gradient.

    All P parameters are one vector to it: fewer kernels, which compile in a third less time.
    """

    count: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor

    def __init__(self, num_params, eps, device):
        super().__init__()
        self.eps = eps
        # A count that is a number would be compiled in.
        self.register_buffer("count", torch.zeros((), device=device))
        self.register_buffer("mean", torch.zeros(num_params, device=device))
        self.register_buffer("square", torch.zeros(num_params, device=device))

    def step(self, params, grad, learning_rate):
        """Change the parameters in place by their gradient, (P,)."""
        beta1, beta2 = 0.9, 0.999  # as in torch.optim.Adam
        self.count.add_(1)
        self.mean.lerp_(grad, 1 - beta1)
        self.square.lerp_(grad**2, 1 - beta2)
        root = (self.square / (1 - beta2**self.count)).sqrt() + self.eps
        change = learning_rate * self.mean / (1 - beta1**self.count) / root
        for x, dx in zip(params, change.split([x.numel() for x in params]), strict=True):
            x -= dx.view_as(x)


def make_agent(args: Args, obs_shape, action_dim: int, device: torch.device):
    """Initialise the parameters, the target critics, which begin as a copy, and the optimizer."""
    agent = Agent(obs_shape, args.hidden_sizes, action_dim).to(device)
    target_critics = copy.deepcopy(agent.critics)  # a moving average of the critics' parameters
    num_params = sum(x.numel() for x in agent.parameters())
    return agent, target_critics, Adam(num_params, 1e-8, device)


# === Replay =====================================================================================
class Transition(NamedTuple):
    """One row per step: N = num_envs of them, batch_size in a batch, buffer_size in the replay."""

    obs: torch.Tensor  # (N, obs_dim), what the action was chosen from, of the environment's type
    action: torch.Tensor  # (N, action_dim), in [-1, 1] and not in the environment's units
    reward: torch.Tensor  # (N,) float32, result of the action, like all fields below
    terminated: torch.Tensor  # (N,) bool
    next_obs: torch.Tensor  # (N, obs_dim), before any restart


class Replay:
    """The last buffer_size environment steps, on the device."""

    def __init__(self, args: Args, obs_dim: int, obs_dtype: np.dtype, action_dim: int, device):
        self.args = args
        self.num_added = 0  # environment steps so far
        size = args.buffer_size
        gigabytes = 2 * size * obs_dim * obs_dtype.itemsize / 1e9
        if gigabytes > 1:
            print(f"The replay takes {gigabytes:.1f} GB: --buffer-size {size}, obs and next_obs.")
        obs = torch.from_numpy(np.zeros((size, obs_dim), obs_dtype)).to(device)
        self.rows = Transition(
            obs=obs,
            action=torch.zeros((size, action_dim), device=device),
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
        """For a checkpoint: the rows so far, or with --no-save-replay none."""
        num_added = self.num_added if self.args.save_replay else 0
        # Clones, since of a view torch.save would write all the memory.
        rows = {name: x[:num_added].clone() for name, x in self.rows._asdict().items()}
        return {"num_added": num_added, "rows": rows}

    def load_state_dict(self, state: dict) -> None:
        self.num_added = state["num_added"]
        num_rows = min(self.num_added, self.args.buffer_size)
        for name, x in state["rows"].items():
            getattr(self.rows, name)[:num_rows] = x


def updates_after(steps: int, args: Args) -> int:
    """How many updates are due once so many steps were added, whatever num_envs is."""
    return max(steps - args.learning_starts, 0) // args.train_frequency


# === Act ========================================================================================
@torch.no_grad()
def act(actor, obs, noise):
    """Actions (N, action_dim) in [-1, 1], which the noise draws."""
    mean, log_std = actor(obs)
    action, _ = draw_action(mean, log_std, noise)
    return action


def draw_action(mean, log_std, noise):
    """The tanh of Gaussian draws, (B, action_dim), and the log of their density, (B,)."""
    x = mean + log_std.exp() * noise
    logprob = -(0.5 * noise**2 + log_std + 0.5 * math.log(2 * math.pi))
    # The log of tanh's slope, 1 - tanh(x)**2, which is 0 in float32 for x above 8 or 9. SB3 and
    # CleanRL add 1e-6 to the slope: at x = 10 its log is then -13.8 instead of -18.6.
    log_slope = 2 * (math.log(2) - x - F.softplus(-2 * x))
    return x.tanh(), (logprob - log_slope).sum(-1)


# === Loss =======================================================================================
def td_target(next_q, next_logprob, alpha, batch: Transition, args: Args):
    """What Q(obs, action) should be, (B,), from both target critics' values of the next action.

    The lower one counts, since the higher one overestimates (Fujimoto et al. 2018), and entropy is
    a reward. After a termination the future is worth 0. After a truncation it is not: the episode
    could have gone on from next_obs.
    """
    future = next_q.amin(0) - alpha * next_logprob
    return batch.reward + args.gamma * torch.where(batch.terminated, 0.0, future)


def sac_loss(agent: Agent, target_critics: Critics, batch: Transition, noise, args: Args):
    """The sum of the critics', the actor's and alpha's losses (Haarnoja et al. 2018), and a log.

    noise (2, B, action_dim) draws the actions at next_obs and at obs.
    """
    alpha = agent.log_alpha.detach().exp()

    with torch.no_grad():
        mean, log_std = agent.actor(batch.next_obs)
        next_action, next_logprob = draw_action(mean, log_std, noise[0])
        next_q = target_critics(batch.next_obs, next_action)
        target = td_target(next_q, next_logprob, alpha, batch, args)
    q = agent.critics(batch.obs, batch.action)
    # As SB3 and SBX. CleanRL omits the 0.5, which does not change Adam's steps.
    td_loss = 0.5 * ((q - target) ** 2).mean(-1).sum()

    mean, log_std = agent.actor(batch.obs)
    action, logprob = draw_action(mean, log_std, noise[1])
    # The critics' own parameters, detached: the gradient goes through them to the actor alone.
    fixed = {name: x.detach() for name, x in agent.critics.named_parameters()}
    action_q = functional_call(agent.critics, fixed, (batch.obs, action)).amin(0)
    actor_loss = (alpha * logprob - action_q).mean()

    entropy = -logprob.mean()
    target_entropy = -action.shape[-1]
    # As SB3 and SBX. In the paper and in CleanRL, the first factor is alpha itself.
    alpha_loss = agent.log_alpha * (entropy - target_entropy).detach()
    loss = td_loss + actor_loss + alpha_loss
    return loss, {
        "losses/td_loss": td_loss,
        "losses/q_value": q.mean(),
        "losses/actor_loss": actor_loss,
        "losses/entropy": entropy,
        "losses/alpha": alpha,
    }


# === Update =====================================================================================
def update(agent, target_critics, optimizer, args: Args, learning_rate, noise, *batch):
    """Train on a batch, and then move the target critics a little towards the critics.

    All of it compiles as one graph. By torch.optim.Adam, updates would take 1.66 [1.54, 1.71] times
    as long with 64 units, 1.00 with 256 (CPU time of one thread, on a CPU).
    """
    # One gradient of the sum: each parameter is in one loss alone. All losses see the parameters
    # from before this update, as in brax. SB3 (alpha, critics, actor) and CleanRL (critics, actor,
    # alpha) update one after the other, so their actor sees the new critics.
    loss, losses = sac_loss(agent, target_critics, Transition(*batch), noise, args)
    params = list(agent.parameters())
    grad = nn.utils.parameters_to_vector(torch.autograd.grad(loss, params))
    with torch.no_grad():
        optimizer.step(params, grad, learning_rate)
        critics = agent.critics.parameters()
        for old, new in zip(target_critics.parameters(), critics, strict=True):
            old.lerp_(new, args.tau)
    return {name: x.detach() for name, x in losses.items()}


def compile_graph(function, device):
    """Compile a function with its autograd.grad into one graph: a graph break is an error."""
    from torch._inductor import cpp_builder, exc  # takes 1.5 s, and load_policy compiles nothing

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        fail("torch.compile needs a C++ compiler and Python.h; Debian: apt install g++ python3-dev")
    torch._dynamo.config.trace_autograd_ops = True  # ty: ignore[invalid-assignment]
    options: dict[str, Any] = {
        "cpp_wrapper": device.type == "cpu",  # C++ calls the kernels, sooner than Python would
        "cpp.use_decompose_tanh": True,  # from exp: faster on a CPU, and wrong by 1e-7 near 0
        "cpp.vec_isa_ok": True,  # believe the CPU's flags, and compile no test programs
    }
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def capture(function, state):
    """Record function as a CUDA graph: a replay costs one launch, not one per kernel.

    function takes tensors and returns several, or a dict of them. The first call compiles and
    records. A replay works on the memory it was recorded with: its inputs are copied in, its
    outputs cloned, since the next replay overwrites them. Warming up runs function for real, so the
    tensors of the list state, which it changes, are restored afterwards.
    """
    graph, inputs, outputs = torch.cuda.CUDAGraph(), [], []

    def replay(*new_inputs):
        nonlocal inputs, outputs
        if not inputs:
            inputs = [x.clone() for x in new_inputs]
            saved = [x.clone() for x in state]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):  # as PyTorch's documentation has it
                    function(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            # In the default mode, a CUDA call from another thread would end the recording.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                outputs = function(*inputs)
            with torch.no_grad():
                for x, old in zip(state, saved, strict=True):
                    x.copy_(old)
        for x, new in zip(inputs, new_inputs, strict=True):
            x.copy_(new)
        graph.replay()
        if isinstance(outputs, dict):
            return {name: x.clone() for name, x in outputs.items()}
        return [x.clone() for x in outputs]

    return replay


def mean_losses(losses: list[dict]) -> dict:
    """Means over an iteration's updates; NaN, which the log has as null, if there were none."""
    if not losses:
        names = ("td_loss", "q_value", "actor_loss", "entropy", "alpha")  # of sac_loss
        return {f"losses/{name}": math.nan for name in names}
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
        compile_mode="compile",
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        obs_shape=env.obs_shape,
        action_dim=env.action_dim,
        action_low=env.action_low.tolist(),
        action_high=env.action_high.tolist(),
    )

    torch.manual_seed(args.seed)
    iteration = 0
    agent, target_critics, optimizer = make_agent(args, env.obs_shape, env.action_dim, device)
    replay = Replay(args, env.obs_dim, env.obs_dtype, env.action_dim, device)
    if (log.dir / "checkpoint.pt").exists():  # resumed
        checkpoint = load_checkpoint(log.dir)
        iteration = checkpoint["iteration"]
        agent.load_state_dict(checkpoint["agent"])
        target_critics.load_state_dict(checkpoint["target_critics"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        replay.load_state_dict(checkpoint["replay"])
        set_rng_state(checkpoint["rng_state"])
        if replay.num_added == 0:
            print("The checkpoint has no replay: a new one is filled before updates go on.")
    obs = env.reset(iteration)
    log.begin(iteration)

    # To the compiler, agent, target_critics, optimizer and args are constants.
    torch.compiler.reset()  # or graphs of earlier calls of train() would count towards its limit
    trained = (agent, target_critics, optimizer)
    update_fn = compile_graph(partial(update, *trained, args), device)
    if device.type == "cuda":
        update_fn = capture(update_fn, [y for x in trained for y in x.state_dict().values()])
    # It compiles at the first call, which is made now, since no update is due before
    # learning_starts. What the call changes is put back.
    saved = copy.deepcopy([x.state_dict() for x in trained])
    zeros = [x.new_zeros(args.batch_size, *x.shape[1:]) for x in replay.rows]
    noise = torch.zeros(2, args.batch_size, env.action_dim, device=device)
    update_fn(torch.zeros((), device=device), noise, *zeros)
    for x, state in zip(trained, saved, strict=True):
        x.load_state_dict(state)
    while iteration < args.num_iterations:
        start = time.perf_counter()
        decay = 1 - iteration / args.num_iterations if args.anneal_lr else 1.0
        learning_rate = torch.tensor(args.learning_rate * decay, device=device)
        returns, lengths, losses = [], [], []
        for step in range(args.num_steps):
            global_step = (iteration * args.num_steps + step) * args.num_envs
            if global_step < args.learning_starts:
                action = 2 * torch.rand(args.num_envs, env.action_dim) - 1
            else:
                noise = torch.randn(args.num_envs, env.action_dim, device=device)
                action = act(agent.actor, torch.from_numpy(obs).to(device), noise)
            action = action.cpu().numpy()  # sync
            new_obs, result = env.step(action)
            replay.add(obs, action, result)
            obs = new_obs
            done = result["terminated"] | result["truncated"]
            returns += result["episode_return"][done].tolist()
            lengths += result["episode_length"][done].tolist()
            for _ in range(replay.updates_due()):
                batch = replay.sample(args.batch_size)
                noise = torch.randn((2, *batch.action.shape), device=device)
                losses.append(update_fn(learning_rate, noise, *batch))
        metrics = episode_statistics(returns, lengths) | mean_losses(losses)
        metrics["charts/learning_rate"] = learning_rate
        metrics["charts/updates"] = len(losses)
        log.write(iteration, metrics, start)  # sync
        iteration += 1
        if log.must_save(iteration):
            checkpoint = {
                "iteration": iteration,
                "agent": agent.state_dict(),
                "target_critics": target_critics.state_dict(),
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
    """What a run learnt, as a function: policy(obs) is the squashed mean action for each obs.

    obs (N, *obs_shape) and actions are NumPy arrays, as the environment has them. With sample=True
    the actions are drawn, as in training, by seed.
    """
    info, args = load_info(folder)
    agent = Agent(info["obs_shape"], args.hidden_sizes, info["action_dim"])
    agent.load_state_dict(load_checkpoint(folder)["agent"])
    low, high = np.float32(info["action_low"]), np.float32(info["action_high"])
    rng = np.random.default_rng(seed)

    @torch.no_grad()
    def policy(obs, sample=False):
        obs = torch.from_numpy(flatten(obs, info["obs_shape"]))
        mean, log_std = (x.numpy() for x in agent.actor(obs))
        action = mean
        if sample:
            action = mean + np.exp(log_std) * rng.standard_normal(mean.shape, np.float32)
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

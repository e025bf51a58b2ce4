# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium[mujoco]==1.3.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""SAC in eager PyTorch, with Gymnasium environments on the CPU.

    python more/sac_torch_gymnasium.py --env-id Pendulum-v1 --seed 1
    python more/sac_torch_gymnasium.py mujoco --env-id HalfCheetah-v5 --seed 1

MuJoCo environments need: pip install "gymnasium[mujoco]==1.3.0" (uv run installs it).

Start reading at Environment. The main ideas:
- draw_action() squashes Gaussian samples to [-1, 1]. The replay buffer stores these
  actions, and VecEnv.step() maps them to the bounds.
- sac_loss() adds up three losses. Each loss detaches what it must not train, so that one
  backward pass and one optimizer train everything.
- update() is PyTorch's usual sequence: zero_grad, backward, step.
- train() is a plain loop over environment steps: act, step, store, and run the updates due.
- VecEnv steps the environments one after another (--vectorization sync), or each in its own
  process (async). Both run on the CPU, in NumPy.
- A resumed run starts new episodes, because Gymnasium environments cannot be saved.
Lines marked "# sync" wait for the device.

Compare with dqn_torch_gymnasium.py for discrete actions, with sac_torch.py for environments
in JAX, or with sac_linen_gymnasium.py for JAX.
"""

import argparse
import copy
import json
import math
import multiprocessing
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

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # idle OpenMP threads stop spinning sooner

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
    seed: int = 1  # random seed
    env_id: str = "Pendulum-v1"  # Gymnasium id with continuous actions, or my_module:MyEnv-v0
    total_timesteps: int = 20_000  # environment steps, rounded down to whole iterations
    learning_rate: float = 3e-3  # Adam's learning rate for the actor, the critics and alpha
    anneal_lr: bool = False  # decay the learning rate linearly to 0
    num_envs: int = 4  # parallel environments
    num_steps: int = 200  # steps per environment in each iteration; metrics are logged after each
    gamma: float = 0.99  # discount factor
    buffer_size: int = 100_000  # maximum number of transitions in the replay buffer
    batch_size: int = 64  # transitions per update
    train_frequency: int = 2  # environment steps per update
    learning_starts: int = 1_000  # environment steps with random actions, before the first update
    tau: float = 0.01  # target smoothing coefficient
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layer sizes of the actor and of each critic
    matmul_precision: Literal["medium", "high", "highest"] = "high"  # highest: no TF32 on a GPU
    vectorization: Literal["sync", "async"] = "sync"  # async: each environment in its own process
    runs_dir: str = "runs"  # where run folders are created
    run_name: str = ""  # name of the run folder; default {env_id}__{script}__{seed}__{time}
    track: bool = False  # log to Weights & Biases as well
    save_every: int = 0  # save a checkpoint every N iterations; 0: up to ten per run
    save_replay: bool = True  # save the replay buffer; otherwise a resumed run refills it
    resume: str = ""  # run folder to continue; its arguments are kept

    def __post_init__(self) -> None:
        """Check arguments and compute derived ones. tyro reports a ValueError as a usage error."""
        if self.seed not in range(2**32):
            raise ValueError("--seed must be between 0 and 2**32 - 1")
        counts = ("num_envs", "num_steps", "buffer_size", "batch_size", "train_frequency")
        for name in (*counts, "learning_starts"):
            least = 0 if name == "learning_starts" else 1
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}")
        if self.buffer_size % self.num_envs != 0:
            raise ValueError(f"--buffer-size must be a multiple of --num-envs ({self.num_envs})")
        steps = self.num_envs * self.num_steps
        self.num_iterations = self.total_timesteps // steps
        if self.num_iterations < 1:
            raise ValueError(f"--total-timesteps must be at least one iteration ({steps})")
        self.hidden_sizes = tuple(self.hidden_sizes)  # a list when loaded from run.json


def parse_args() -> Args:
    """Parse the command line, which may start with the preset mujoco."""
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
    flags, default = sys.argv[1:], Args()
    if flags[:1] == ["mujoco"]:
        flags, default = flags[1:], mujoco
    default = args_to_resume() or default  # with --resume, the run's arguments are the defaults
    about = "Put mujoco before the flags to use the MuJoCo settings of Haarnoja et al. 2018."
    parse = partial(tyro.cli, Args, args=flags, default=default, description=about)
    _, unknown = parse(return_unknown_args=True)
    if unknown and not unknown[0].startswith("-"):
        fail(f"Unknown argument: {unknown[0]}. The only preset, mujoco, comes before the flags.")
    return parse()


# === Environment ================================================================================
class VecEnv:
    """N = num_envs Gymnasium environments stepped together. Finished ones restart automatically.

    Runs in NumPy, on the CPU. options are keyword arguments for the environment, like render_mode.
    """

    def __init__(
        self, env_id: str, num_envs: int, vectorization: str, seed: int, **options: Any
    ) -> None:
        sys.path.append(os.getcwd())  # to find my_module in my_module:MyEnv-v0
        vector_options: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED, "copy": False}
        if vectorization == "async":
            vector_options["context"] = "forkserver"  # forking is unsafe: this process has threads
            vector_options["shared_memory"] = False  # it would silently cast and reshape obs
        try:
            self.envs: Any = gymnasium.make_vec(
                env_id, num_envs, vectorization, vector_options, [EnvWrapper], **options
            )
        except gymnasium.error.Error as error:
            fail(f"--env-id: {error}")
        space = self.envs.single_action_space
        if not isinstance(space, Box) or space.dtype.kind != "f" or not space.is_bounded():
            hint = "for Discrete, use more/dqn_linen_gymnasium.py or its PyTorch version"
            fail(f"--env-id: the action space must be a bounded Box of floats, not {space}; {hint}")
        obs_space = self.envs.single_observation_space
        if not isinstance(obs_space, Box):
            hint = "wrap the environment in gymnasium.wrappers.FlattenObservation"
            fail(f"--env-id: the observation space must be a Box, not {obs_space}; {hint}")
        self.num_envs = num_envs
        self.seed = seed
        self.action_space = space
        self.action_low, self.action_high = space.low, space.high
        self.action_dim = math.prod(space.shape)
        self.obs_shape = obs_space.shape
        # 64-bit numbers become float32; other dtypes, such as uint8 for images, are kept.
        self.obs_dtype = np.dtype(np.float32 if obs_space.dtype.itemsize == 8 else obs_space.dtype)

    def reset(self, iteration: int = 0) -> np.ndarray:
        """Start all environments. Return obs (N, *obs_shape).

        Gymnasium environments cannot be saved, so a run that resumes after `iteration` iterations
        starts new episodes, with seeds that it has not used before.
        """
        # With seed + i, runs with seeds 1 and 2 would share all but one environment seed. The shift
        # leaves 31 bits, the most that some simulators accept.
        sequence = np.random.SeedSequence([self.seed, iteration])
        seeds = (sequence.generate_state(self.num_envs) >> 1).tolist()
        obs, _ = self.envs.reset(seed=seeds)
        self.episode_return = np.zeros(self.num_envs)  # so far in the current episode
        self.episode_length = np.zeros(self.num_envs, np.float32)
        return self.checked_copy(obs, self.obs_dtype)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Map action (N, action_dim) from [-1, 1] to the bounds, clip it, and step.

        Return obs (after any restart) and the results.
        """
        action = action.reshape(self.num_envs, *self.action_space.shape)
        action = to_bounds(action, self.action_low, self.action_high)
        obs, reward, terminated, truncated, _ = self.envs.step(action)
        obs = self.checked_copy(obs, self.obs_dtype)  # Gymnasium reuses obs
        episode_return = self.episode_return + reward
        episode_length = self.episode_length + 1
        results = {
            "reward": self.checked_copy(reward, np.float32),
            "terminated": terminated,
            "truncated": truncated,
            "next_obs": obs,
            "episode_return": episode_return,
            "episode_length": episode_length,
        }
        done = terminated | truncated
        self.episode_return = np.where(done, 0, episode_return)
        self.episode_length = np.where(done, 0, episode_length)
        if done.any():  # restart now; by default Gymnasium would use up the next step
            obs, _ = self.envs.reset(options={"reset_mask": done})
            obs = self.checked_copy(obs, self.obs_dtype)
        return obs, results

    def checked_copy(self, x: np.ndarray, dtype: Any) -> np.ndarray:
        """Return a copy of x as dtype. Raise an error for NaN or inf: both ruin the parameters."""
        x = x.astype(dtype)
        if not np.isfinite(x).all():
            env = np.argwhere(~np.isfinite(x))[0][0]
            raise FloatingPointError(f"environment {env} returned NaN or inf: {x[env]}")
        return x


class EnvWrapper(gymnasium.Wrapper):
    """Drop info, which we do not use: merging it is slow, and fails on mixed types."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        if multiprocessing.parent_process():  # in a worker of vectorization="async"
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        obs, _ = self.env.reset(seed=seed, options=options or None)  # Gymnasium may pass {}
        return obs, {}

    def step(self, action: Any) -> tuple:
        *results, _ = self.env.step(action)
        return *results, {}


def to_bounds(action, low, high):
    """Map actions from [-1, 1] to [low, high] and clip them, in the dtype of the bounds."""
    action = (high + low) / 2 + (high - low) / 2 * action
    return action.clip(low, high).astype(low.dtype)


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
    """A Gaussian for each action dimension. draw_action() squashes its samples to [-1, 1]."""

    def __init__(self, obs_size, hidden_sizes, action_dim):
        super().__init__()
        self.mlp = MLP(obs_size, hidden_sizes, 2 * action_dim)

    def forward(self, obs):  # (B, *obs_shape) -> mean and log_std, (B, action_dim) each
        x = obs.reshape(obs.shape[0], -1).float()
        mean, log_std = self.mlp(x).chunk(2, dim=-1)
        # The same bounds as in SB3 and SBX. CleanRL maps log_std to [-5, 2] with a tanh.
        return mean, log_std.clip(-20, 2)


class Critics(nn.Module):
    """Two estimates of Q(obs, action), the return plus a bonus for the entropy of later actions."""

    def __init__(self, obs_size, action_dim, hidden_sizes):
        super().__init__()
        self.mlps = nn.ModuleList(MLP(obs_size + action_dim, hidden_sizes, 1) for _ in range(2))

    def forward(self, obs, action):  # (B, *obs_shape), (B, action_dim) -> (2, B)
        x = torch.cat([obs.reshape(obs.shape[0], -1).float(), action], dim=-1)
        return torch.stack([mlp(x).squeeze(-1) for mlp in self.mlps])


class Agent(nn.Module):
    """Everything that the optimizer trains."""

    def __init__(self, obs_shape, hidden_sizes, action_dim):
        super().__init__()
        obs_size = math.prod(obs_shape)
        self.actor = Actor(obs_size, hidden_sizes, action_dim)
        self.critics = Critics(obs_size, action_dim, hidden_sizes)
        self.log_alpha = nn.Parameter(torch.zeros(()))  # alpha is the weight of the entropy


def make_agent(args: Args, obs_shape, action_dim: int, device: torch.device):
    """Initialize the parameters, the target critics and the optimizer."""
    agent = Agent(obs_shape, args.hidden_sizes, action_dim).to(device)
    target_critics = copy.deepcopy(agent.critics)  # a moving average of the critics' parameters
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, fused=True)
    return agent, target_critics, optimizer


# === Replay =====================================================================================
class Transition(NamedTuple):
    """Transitions; B is batch_size or buffer_size."""

    obs: torch.Tensor  # (B, *obs_shape), input of the policy
    action: torch.Tensor  # (B, action_dim), in [-1, 1]
    reward: torch.Tensor  # (B,); this and the fields below result from the action
    terminated: torch.Tensor  # (B,) bool
    next_obs: torch.Tensor  # (B, *obs_shape), before any restart


class Replay:
    """The last buffer_size transitions, on the device."""

    def __init__(self, args: Args, obs_shape, obs_dtype: np.dtype, action_dim: int, device):
        self.args = args
        self.num_added = 0  # transitions added so far, including those overwritten
        size = args.buffer_size
        obs = torch.from_numpy(np.zeros((size, *obs_shape), obs_dtype)).to(device)
        self.transitions = Transition(
            obs=obs,
            action=torch.zeros((size, action_dim), device=device),
            reward=torch.zeros(size, device=device),
            terminated=torch.zeros(size, dtype=torch.bool, device=device),
            next_obs=torch.zeros_like(obs),
        )

    def add(self, obs, action, result: dict) -> None:
        """Store a step of all environments, overwriting the oldest transitions."""
        start = self.num_added % self.args.buffer_size
        step = (obs, action, result["reward"], result["terminated"], result["next_obs"])
        for buffer, new in zip(self.transitions, step, strict=True):
            # A slice never wraps around, since buffer_size is a multiple of num_envs.
            buffer[start : start + len(new)] = torch.as_tensor(new)
        self.num_added += len(obs)

    def sample(self, batch_size: int) -> Transition:
        """Draw a batch uniformly, with replacement."""
        size = min(self.num_added, self.args.buffer_size)
        indices = torch.randint(size, (batch_size,), device=self.transitions.reward.device)
        return Transition(*(x[indices] for x in self.transitions))

    def updates_due(self) -> int:
        """Number of updates due after the latest step."""
        before = updates_after(self.num_added - self.args.num_envs, self.args)
        return updates_after(self.num_added, self.args) - before

    def state_dict(self) -> dict:
        """The stored transitions; empty with --no-save-replay."""
        num_added = self.num_added if self.args.save_replay else 0
        # Save only the part in use. Without clone, torch.save would write the whole buffer.
        transitions = Transition(*(x[:num_added].clone() for x in self.transitions))
        return {"num_added": num_added, "transitions": transitions._asdict()}

    def load_state_dict(self, state: dict) -> None:
        self.num_added = state["num_added"]
        for name, x in state["transitions"].items():
            getattr(self.transitions, name)[: len(x)] = x


def updates_after(steps: int, args: Args) -> int:
    """Total number of updates due after `steps` steps, counted over all environments."""
    return max(steps - args.learning_starts, 0) // args.train_frequency


# === Act ========================================================================================
@torch.no_grad()
def act(actor, obs, noise):
    """Sample actions (N, action_dim) in [-1, 1]: obs (N, *obs_shape), noise (N, action_dim)."""
    mean, log_std = actor(obs)
    action, _ = draw_action(mean, log_std, noise)
    return action


def draw_action(mean, log_std, noise):
    """Sample from a Gaussian and apply tanh. Return action (B, action_dim) and logprob (B,)."""
    x = mean + log_std.exp() * noise
    logprob = -(0.5 * noise**2 + log_std + 0.5 * math.log(2 * math.pi))
    # This is log(1 - tanh(x)**2), the log of the slope of tanh, in a form that avoids log(0) for
    # large x. SB3 and CleanRL add 1e-6 to the slope instead: at x = 10, they get -13.8, not -18.6.
    log_slope = 2 * (math.log(2) - x - F.softplus(-2 * x))
    return x.tanh(), (logprob - log_slope).sum(-1)


# === Loss =======================================================================================
def td_target(next_q, next_logprob, alpha, batch: Transition, args: Args):
    """Targets (B,) for Q(obs, action), from the target critics' values of the next action, (2, B).

    They use the lower value to reduce overestimation (Fujimoto et al. 2018), and add the entropy
    of the next action. A terminated episode has no future value. A truncated one bootstraps from
    next_obs, like any other step.
    """
    future = next_q.amin(0) - alpha * next_logprob
    return batch.reward + args.gamma * torch.where(batch.terminated, 0.0, future)


def sac_loss(agent: Agent, target_critics: Critics, batch: Transition, noise, args: Args):
    """Sum of the critic, actor and alpha losses (Haarnoja et al. 2018), and the metrics to log.

    noise (2, B, action_dim) is for sampling the actions at next_obs and at obs.
    """
    alpha = agent.log_alpha.detach().exp()

    with torch.no_grad():
        mean, log_std = agent.actor(batch.next_obs)
        next_action, next_logprob = draw_action(mean, log_std, noise[0])
        next_q = target_critics(batch.next_obs, next_action)
        target = td_target(next_q, next_logprob, alpha, batch, args)
    q = agent.critics(batch.obs, batch.action)
    # As in SB3 and SBX. CleanRL omits the 0.5, which does not change Adam's steps.
    td_loss = 0.5 * ((q - target) ** 2).mean(-1).sum()

    mean, log_std = agent.actor(batch.obs)
    action, logprob = draw_action(mean, log_std, noise[1])
    # With detached parameters, the gradient reaches the actor but does not train the critics.
    fixed = {name: x.detach() for name, x in agent.critics.named_parameters()}
    action_q = functional_call(agent.critics, fixed, (batch.obs, action)).amin(0)
    actor_loss = (alpha * logprob - action_q).mean()

    entropy = -logprob.mean()
    target_entropy = -action.shape[-1]
    # As in SB3 and SBX. The paper and CleanRL multiply by alpha instead of log_alpha.
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
def update(agent, target_critics, optimizer, batch: Transition, noise, args: Args):
    """Train the agent in place on a batch, then move the target critics toward the critics."""
    # One gradient of the sum is enough, since each parameter gets its gradient from only one loss.
    # All losses use the parameters from before the update, as in Brax. SB3 (alpha, critics, actor)
    # and CleanRL (critics, actor, alpha) update in turn, so their actor sees the new critics.
    loss, losses = sac_loss(agent, target_critics, batch, noise, args)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        critics = agent.critics.parameters()
        for old, new in zip(target_critics.parameters(), critics, strict=True):
            old.lerp_(new, args.tau)
    return {name: x.detach() for name, x in losses.items()}


def mean_losses(losses: list[dict]) -> dict:
    """Means over the updates of an iteration, or NaN if there were none."""
    if not losses:
        names = ("td_loss", "q_value", "actor_loss", "entropy", "alpha")  # as in sac_loss
        return {f"losses/{name}": math.nan for name in names}
    return {name: torch.stack([x[name] for x in losses]).mean() for name in losses[0]}


def episode_statistics(returns: list[float], lengths: list[float]) -> dict[str, float]:
    """Number of finished episodes, and the mean, min and max of their returns and lengths.

    If none finished, the statistics are NaN or infinite, which the log writes as null.
    """
    metrics: dict[str, float] = {"charts/episodes": len(returns)}
    for name, x in [("return", returns), ("length", lengths)]:
        metrics[f"charts/episodic_{name}"] = sum(x) / len(x) if x else math.nan
        metrics[f"charts/episodic_{name}_min"] = min(x, default=math.inf)
        metrics[f"charts/episodic_{name}_max"] = max(x, default=-math.inf)
    return metrics


# === Training ===================================================================================
def train(args: Args) -> None:
    """Train an agent, or continue a run."""
    # With small networks, PyTorch's default of one thread per core is slow on a busy machine.
    if max(args.hidden_sizes, default=0) < 128 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    torch.set_float32_matmul_precision(args.matmul_precision)  # "high" allows TF32 on a GPU
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.vectorization == "async":
        # Every worker imports this script: load its slow imports once, in the fork server.
        slow = ["gymnasium", "torch", "tyro", "tensorboard.summary"]
        multiprocessing.set_forkserver_preload(slow)
    env = VecEnv(args.env_id, args.num_envs, args.vectorization, args.seed)
    spaces: dict[str, Any] = {
        "obs_shape": env.obs_shape,
        "action_dim": env.action_dim,
        "action_low": env.action_low.tolist(),
        "action_high": env.action_high.tolist(),
        "action_dtype": env.action_low.dtype.name,
    }

    torch.manual_seed(args.seed)
    iteration = 0
    agent, target_critics, optimizer = make_agent(args, env.obs_shape, env.action_dim, device)
    replay = Replay(args, env.obs_shape, env.obs_dtype, env.action_dim, device)
    if has_checkpoint(args, **spaces):
        checkpoint = load_checkpoint(args.resume)
        iteration = checkpoint["iteration"]
        agent.load_state_dict(checkpoint["agent"])
        target_critics.load_state_dict(checkpoint["target_critics"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        replay.load_state_dict(checkpoint["replay"])
        torch.set_rng_state(checkpoint["rng_state"])
        torch.cuda.set_rng_state_all(checkpoint["cuda_rng_states"])
    obs = env.reset(iteration)
    packages = ["torch", "gymnasium", "numpy"]
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    num_threads = torch.get_num_threads()
    log = RunLog(args, iteration, packages, device=device_name, num_threads=num_threads, **spaces)

    while iteration < args.num_iterations:
        start = time.perf_counter()
        # Decay per iteration, not per update: updates start only after learning_starts.
        decay = 1 - iteration / args.num_iterations if args.anneal_lr else 1.0
        optimizer.param_groups[0]["lr"] = args.learning_rate * decay
        returns, lengths, losses = [], [], []
        for step in range(args.num_steps):
            global_step = (iteration * args.num_steps + step) * args.num_envs
            if global_step < args.learning_starts:
                action = 2 * torch.rand(args.num_envs, env.action_dim) - 1
            else:
                noise = torch.randn(args.num_envs, env.action_dim, device=device)
                action = act(agent.actor, torch.from_numpy(obs).to(device), noise)
            action = action.cpu().numpy()  # sync
            if not np.isfinite(action).all():  # an update has diverged
                log.close(diverged_in=iteration + 1)
            new_obs, results = env.step(action)
            replay.add(obs, action, results)
            obs = new_obs
            done = results["terminated"] | results["truncated"]
            returns += results["episode_return"][done].tolist()
            lengths += results["episode_length"][done].tolist()
            for _ in range(replay.updates_due()):
                batch = replay.sample(args.batch_size)
                noise = torch.randn((2, *batch.action.shape), device=device)
                losses.append(update(agent, target_critics, optimizer, batch, noise, args))
        metrics = episode_statistics(returns, lengths) | mean_losses(losses)
        metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        metrics["charts/param_norm"] = nn.utils.get_total_norm(agent.parameters())
        metrics["charts/updates"] = len(losses)
        metrics = {name: float(x) for name, x in metrics.items()}  # sync
        log.write(iteration, metrics, start)
        iteration += 1
        if log.must_save(iteration):
            checkpoint = {
                "iteration": iteration,
                "agent": agent.state_dict(),
                "target_critics": target_critics.state_dict(),
                "optimizer": optimizer.state_dict(),
                "replay": replay.state_dict(),
                "rng_state": torch.get_rng_state(),
                "cuda_rng_states": torch.cuda.get_rng_state_all()[:1],  # of the GPU, if any
            }
            save_checkpoint(log.dir, checkpoint)
            log.update_info(iteration=iteration)
            if log.stopped_by:  # stop only after saving, so that no iteration is lost
                break
    try:
        log.close()
    finally:
        env.envs.close()


# === Checkpoint =================================================================================
def save_checkpoint(folder: Path, checkpoint: dict) -> None:
    """Write a checkpoint atomically: a killed run keeps either the old one or the new one."""
    new = folder / "checkpoint.new"
    torch.save(checkpoint, new)  # sync
    os.replace(new, folder / "checkpoint.pt")


def load_checkpoint(folder: str | Path) -> dict:
    """Load a checkpoint onto the CPU. weights_only prevents the file from running code."""
    return torch.load(Path(folder, "checkpoint.pt"), map_location="cpu", weights_only=True)


def load_policy(folder: str | Path, seed: int = 0) -> Callable[..., np.ndarray]:
    """Load a trained policy: policy(obs) returns the squashed mean action for each observation.

    obs (N, *obs_shape) and the actions are NumPy arrays. All actions are within the bounds of the
    action space. policy(obs, sample=True) samples the actions instead, as in training.
    """
    info, args = load_info(folder)
    agent = Agent(info["obs_shape"], args.hidden_sizes, info["action_dim"])
    agent.load_state_dict(load_checkpoint(folder)["agent"])
    low, high = (np.array(info[x], info["action_dtype"]) for x in ("action_low", "action_high"))
    rng = np.random.default_rng(seed)

    @torch.no_grad()
    def policy(obs, sample=False):
        mean, log_std = (x.numpy() for x in agent.actor(torch.tensor(obs)))
        action = mean
        if sample:
            action = mean + np.exp(log_std) * rng.standard_normal(mean.shape, np.float32)
        return to_bounds(np.tanh(action).reshape(-1, *low.shape), low, high)

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

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.3.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""PPO in eager PyTorch, with environments in Gymnasium on the CPU.

    python more/ppo_torch_gymnasium.py --env-id CartPole-v1 --seed 1

Read Agent to Training first. "# sync" marks a line that waits for the device. What to look at:
- VecEnv makes the environments by --vectorization: in this process (sync), or each in one of its
  own (async). A resumed run starts new episodes: Gymnasium saves no environment.
- VecEnv.step starts the next episode at once, so that no step is spent on it.
- rollout moves observations to the device and actions back, at each step.
Diff me with ppo_torch.py to see environments in JAX, with ppo_linen_gymnasium.py to see JAX.
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
from torch.optim.lr_scheduler import LambdaLR


# === Arguments ==================================================================================
@dataclass
class Args:
    seed: int = 1  # seed of all random numbers
    env_id: str = "CartPole-v1"  # Gymnasium environment with discrete actions; my_module:MyEnv-v0
    total_timesteps: int = 819_200  # environment steps, in whole rollouts
    learning_rate: float = 2.5e-4  # Adam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    num_envs: int = 32  # parallel environments
    num_steps: int = 256  # steps per environment and rollout
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of advantage estimation (GAE)
    num_minibatches: int = 8  # minibatches per epoch
    update_epochs: int = 10  # passes over each rollout
    norm_adv: bool = True  # normalise advantages per minibatch
    clip_coef: float = 0.2  # clipping range of ratio and value
    clip_vloss: bool = True  # clip the value loss
    ent_coef: float = 0.01  # weight of the entropy bonus
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
    """Read the command line. With --resume, the run's own arguments are the defaults."""
    return tyro.cli(Args, default=args_to_resume() or Args())


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
            hint = "for a Box, see more/ppo_continuous_linen_gymnasium.py or the same in PyTorch"
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


# === Agent ======================================================================================
class MLP(nn.Module):
    def __init__(self, num_inputs, hidden_sizes, num_outputs, output_scale):
        super().__init__()
        sizes = (num_inputs, *hidden_sizes)
        self.hidden = nn.ModuleList(linear(m, n, math.sqrt(2)) for m, n in pairwise(sizes))
        self.output = linear(sizes[-1], num_outputs, output_scale)

    def forward(self, x):
        for layer in self.hidden:
            x = layer(x).tanh()
        return self.output(x)


def linear(num_inputs, num_outputs, scale):
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.orthogonal_(layer.weight, scale)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self, obs_shape, hidden_sizes, num_actions):
        super().__init__()
        obs_dim = math.prod(obs_shape)  # obs comes flat; a CNN would first restore its shape
        self.actor = MLP(obs_dim, hidden_sizes, num_actions, output_scale=0.01)
        self.critic = MLP(obs_dim, hidden_sizes, 1, output_scale=1.0)

    def get_logits(self, obs):
        return self.actor(obs)  # (..., obs_dim) -> (..., num_actions)

    def get_value(self, obs):
        return self.critic(obs).squeeze(-1)  # (..., obs_dim) -> (...)

    def forward(self, obs):
        return self.get_logits(obs), self.get_value(obs)


def make_agent(args: Args, obs_shape, num_actions: int, device: torch.device):
    """Initialise the parameters and Adam."""
    agent = Agent(obs_shape, args.hidden_sizes, num_actions).to(device)
    params = agent.parameters()
    optimizer = torch.optim.Adam(params, args.learning_rate, eps=args.adam_eps, fused=True)
    scheduler = LambdaLR(optimizer, partial(learning_rate_factor, args=args))
    return agent, optimizer, scheduler


def learning_rate_factor(step: int, args: Args) -> float:
    """By which the learning rate is multiplied after so many optimizer steps."""
    if not args.anneal_lr:
        return 1.0
    return max(1 - step / args.num_optimizer_steps, 0.0)


# === Storage ====================================================================================
class Storage(NamedTuple):
    """A rollout of T = num_steps in N = num_envs environments."""

    obs: torch.Tensor  # (T, N, obs_dim), what the action was drawn from
    action: torch.Tensor  # (T, N) int32
    logprob: torch.Tensor  # (T, N)
    reward: torch.Tensor  # (T, N), result of the action, like all fields below
    terminated: torch.Tensor  # (T, N) bool
    truncated: torch.Tensor  # (T, N) bool
    next_obs: torch.Tensor  # (T, N, obs_dim), before any restart
    episode_return: torch.Tensor  # (T, N), including this step
    episode_length: torch.Tensor  # (T, N)


class Batch(NamedTuple):
    """What the loss reads; B = batch_size or minibatch_size."""

    obs: torch.Tensor  # (B, obs_dim)
    action: torch.Tensor  # (B,) int32
    logprob: torch.Tensor  # (B,)
    value: torch.Tensor  # (B,)
    advantage: torch.Tensor  # (B,)
    target: torch.Tensor  # (B,), of the critic: the lambda-return


# === Rollout ====================================================================================
def rollout(policy_fn, obs, env: VecEnv, args: Args):
    """Act for num_steps from obs (N, obs_dim); return the obs to go on from, Storage."""
    # Drawn for all steps at once, noise takes less time than drawn in every step.
    noise = torch.empty(args.num_steps, args.num_envs, env.num_actions, device=obs.device)
    noise.exponential_().log_().neg_()  # minus the log of an exponential is Gumbel

    steps, results = [], []
    for step_noise in noise:
        action, logprob = policy_fn(obs, step_noise)
        new_obs, result = env.step(action.cpu().numpy())  # sync
        steps.append((obs, action, logprob))
        results.append(result)  # crosses after the loop: 6 arrays, instead of 6 per step
        obs = torch.from_numpy(new_obs).to(obs.device)

    # From one tuple per step to one tensor per name, (T, N, ...).
    all_obs, action, logprob = map(torch.stack, zip(*steps, strict=True))
    stacked = {name: np.stack([x[name] for x in results]) for name in results[0]}
    result = {name: torch.from_numpy(x).to(obs.device) for name, x in stacked.items()}
    return obs, Storage(all_obs, action, logprob, **result)


@torch.no_grad()
def policy(agent, obs, noise):
    """(N, obs_dim), (N, num_actions) -> action (N,) int32, logprob (N,)."""
    logits = agent.get_logits(obs)
    action = (logits + noise).argmax(-1)  # Gumbel-max trick: samples softmax(logits)
    return action.int(), logprob_of(action, logits.log_softmax(-1))


def logprob_of(action, logprobs):
    """(...), (..., num_actions) -> (...)."""
    return logprobs.gather(-1, action[..., None].long()).squeeze(-1)


# === GAE ========================================================================================
def compute_gae(storage: Storage, value, next_value, args: Args) -> torch.Tensor:
    """Advantages (T, N) from V(obs) and V(next_obs), each (T, N) (Schulman et al. 2016, eq. 16).

    A termination has no future value. A truncation bootstraps from V(next_obs), unless
    bootstrap_truncated is off. Both cut the recursion: the next step is another episode's.
    """
    done = storage.terminated | storage.truncated
    no_future = storage.terminated if args.bootstrap_truncated else done
    delta = storage.reward + args.gamma * torch.where(no_future, 0.0, next_value) - value
    decay = torch.where(done, 0.0, args.gamma * args.gae_lambda)

    advantage = torch.zeros_like(delta[0])
    advantages = []
    for step_delta, step_decay in zip(delta.flip(0), decay.flip(0), strict=True):  # back in time
        advantage = step_delta + step_decay * advantage
        advantages.append(advantage)
    return torch.stack(advantages[::-1])


# === Loss =======================================================================================
def ppo_loss(agent, batch: Batch, args: Args):
    """PPO's clipped loss (Schulman et al. 2017, eq. 9), and its parts for the log."""
    logits, value = agent(batch.obs)
    logprobs = logits.log_softmax(-1)
    log_ratio = logprob_of(batch.action, logprobs) - batch.logprob
    ratio = log_ratio.exp()

    advantage = batch.advantage
    if args.norm_adv:
        # correction=0 divides by their number, n. CleanRL's PyTorch scripts divide by n - 1.
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.minimum(advantage * ratio, advantage * clipped_ratio).mean()

    value_error = (value - batch.target) ** 2
    if args.clip_vloss:
        change = (value - batch.value).clip(-args.clip_coef, args.clip_coef)
        value_error = torch.maximum(value_error, (batch.value + change - batch.target) ** 2)
    value_loss = 0.5 * value_error.mean()

    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    return loss, {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": (ratio - 1 - log_ratio).mean(),
        "losses/clip_fraction": (abs(ratio - 1) > args.clip_coef).float().mean(),
    }


# === Update =====================================================================================
def update(agent, optimizer, scheduler, storage: Storage, args: Args):
    """Train on a rollout for update_epochs, in place; return what to log."""
    learning_rate = torch.full((), optimizer.param_groups[0]["lr"], device=storage.obs.device)
    # Parameters do not change during a rollout, so one pass afterwards gives all its values.
    with torch.no_grad():
        value, next_value = agent.get_value(torch.stack([storage.obs, storage.next_obs]))
    advantage = compute_gae(storage, value, next_value, args)
    target = advantage + value
    fields = (storage.obs, storage.action, storage.logprob, value, advantage, target)
    batch = Batch(*(x.reshape(args.batch_size, *x.shape[2:]) for x in fields))  # (T, N) -> (B,)

    losses = []
    for _ in range(args.update_epochs):
        order = torch.randperm(args.batch_size, device=value.device)
        shuffled = [x[order].chunk(args.num_minibatches) for x in batch]  # one gather an epoch
        for minibatch in zip(*shuffled, strict=True):
            losses.append(minibatch_step(agent, optimizer, scheduler, Batch(*minibatch), args))
    metrics = {name: torch.stack([x[name] for x in losses]).mean() for name in losses[0]}
    metrics |= episode_statistics(storage)
    metrics["charts/learning_rate"] = learning_rate
    metrics["losses/explained_variance"] = 1 - (target - value).var() / target.var()
    return metrics


def minibatch_step(agent, optimizer, scheduler, minibatch: Batch, args: Args):
    """Train on a minibatch, in place; return its losses."""
    loss, losses = ppo_loss(agent, minibatch, args)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    scheduler.step()
    return {name: x.detach() for name, x in losses.items()}


def episode_statistics(storage: Storage) -> dict[str, torch.Tensor]:
    """Of the episodes that ended: how many, and mean, minimum and maximum of return and length.

    Where none ended, mean, minimum and maximum are NaN or infinite, which the log has as null.
    """
    done = storage.terminated | storage.truncated
    metrics = {"charts/episodes": done.sum()}
    for name, x in [("return", storage.episode_return), ("length", storage.episode_length)]:
        metrics[f"charts/episodic_{name}"] = torch.where(done, x, 0).sum() / done.sum()
        metrics[f"charts/episodic_{name}_min"] = torch.where(done, x, torch.inf).min()
        metrics[f"charts/episodic_{name}_max"] = torch.where(done, x, -torch.inf).max()
    return metrics


# === Training ===================================================================================
def train(args: Args) -> None:
    """Train an agent, from the start or from a checkpoint on."""
    # The same in all frameworks: torch's "high" is TF32 on a GPU, as is JAX's "default".
    torch.set_float32_matmul_precision(args.matmul_precision)
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
    agent, optimizer, scheduler = make_agent(args, env.obs_shape, env.num_actions, device)
    if (log.dir / "checkpoint.pt").exists():  # resumed
        checkpoint = load_checkpoint(log.dir)
        iteration = checkpoint["iteration"]
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        # --resume may have come with other flags than were saved.
        optimizer.param_groups[0]["eps"] = args.adam_eps
        scheduler.base_lrs = [args.learning_rate]
        factor = learning_rate_factor(scheduler.last_epoch, args)
        optimizer.param_groups[0]["lr"] = args.learning_rate * factor
        set_rng_state(checkpoint["rng_state"])
    obs = torch.from_numpy(env.reset(iteration)).to(device)
    log.begin(iteration)

    policy_fn = partial(policy, agent)
    while iteration < args.num_iterations:
        start = time.perf_counter()
        obs, storage = rollout(policy_fn, obs, env, args)
        if args.sync_for_timing and device.type == "cuda":
            torch.cuda.synchronize()  # sync
        middle = time.perf_counter()
        metrics = update(agent, optimizer, scheduler, storage, args)
        values = torch.stack([*metrics.values()]).tolist()  # sync
        metrics = dict(zip(metrics, values, strict=True))
        log.write(iteration, metrics, start, middle)
        iteration += 1
        if log.must_save(iteration):
            checkpoint = {
                "iteration": iteration,
                "agent": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "rng_state": get_rng_state(),
            }
            save_checkpoint(log.dir, checkpoint)
            log.note_saved(iteration)
            if log.stopped_by:  # only here, after saving, so that no iteration is lost
                break
    log.close(iteration)


# === Checkpoint =================================================================================
def save_checkpoint(folder: Path, checkpoint: dict) -> None:
    """Write all that a resumed training needs, but for the environments.

    Killed at any moment, a run has the old checkpoint or the new one.
    """
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
    """What a run learnt, as a function: policy(obs) is the likeliest action for each obs.

    obs (N, *obs_shape) and actions (N,) are NumPy arrays, as the environment has them. With
    sample=True the actions are drawn with their probabilities, as in training, by seed.
    """
    info, args = load_info(folder)
    agent = Agent(info["obs_shape"], args.hidden_sizes, info["num_actions"])
    agent.load_state_dict(load_checkpoint(folder)["agent"])
    rng = np.random.default_rng(seed)

    @torch.no_grad()
    def policy(obs, sample=False):
        obs = torch.from_numpy(flatten(obs, info["obs_shape"]))
        logits = agent.get_logits(obs).numpy()
        if sample:
            logits = logits + rng.gumbel(size=logits.shape)  # as in rollout
        return logits.argmax(-1)

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

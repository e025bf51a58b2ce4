# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "jax==0.10.2", "gymnax==1.0.1", "six==1.17.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""PPO in eager PyTorch on many devices: a process for each, and DistributedDataParallel.

    torchrun --nproc-per-node 2 ppo_torch_ddp.py --seed 1  # on two GPUs, or the CPU

Read Agent to Training first. "# sync" marks a line that waits for the device. What to look at:
- torchrun starts a process (rank) for each device: nccl joins GPUs, and gloo CPUs.
- A rank has its share of environments and minibatches, and seeds of its own: args is of all ranks,
  share of one. backward() takes the mean of all ranks' gradients, so parameters stay the same.
- Advantages' mean and variance are of all ranks, and so are metrics.
- The first rank writes the checkpoint. A run may go on with another number of ranks.
Diff me with ppo_torch.py to see what many devices ask for, with ppo_linen_sharded.py to see JAX.
"""

import time

START = time.perf_counter()  # before the imports, which take seconds

import atexit
import difflib
import importlib
import json
import math
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, NoReturn

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves torch its share of a GPU
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # threads that wait sleep soon, and leave the cores

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.distributed as dist
import tyro
from gymnax.environments.spaces import Discrete
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR


# === Arguments ==================================================================================
@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of this experiment
    seed: int = 1  # seed of all random numbers
    env_id: str = "CartPole-v1"  # gymnax environment with discrete actions, or my_module:MyEnv
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
    bootstrap_truncated: bool = True  # a truncated episode goes on with V(final obs); off: with 0
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layers of actor and critic
    matmul_precision: Literal["high", "highest"] = "high"  # GPU: TF32 (high), float32 (highest)
    jit_env: bool = True  # compile the environments' step with XLA; off: run it op by op
    sync_for_timing: bool = False  # wait for the device after the rollout, to time both phases
    runs_dir: str = "runs"  # folder that gets one folder per run
    run_name: str = ""  # that folder's name; by default {env_id}__{exp_name}__{seed}__{time}
    track: bool = False  # log to Weights & Biases, too
    save_every: int = 0  # iterations between checkpoints; 0: only when training ends or is stopped
    resume: str = ""  # folder of a stopped run to go on with; it keeps its own arguments

    def __post_init__(self) -> None:
        """Work out the sizes. On the command line, a ValueError becomes a message."""
        for name in ("num_envs", "num_steps", "num_minibatches", "update_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")
        if self.seed not in range(2**32):  # JAX would take the lower bits, which are another seed
            raise ValueError("--seed must lie between 0 and 2**32 - 1")
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // self.num_minibatches
        self.num_iterations = self.total_timesteps // self.batch_size
        self.num_optimizer_steps = self.num_iterations * self.update_epochs * self.num_minibatches
        if self.batch_size % self.num_minibatches != 0:
            raise ValueError(f"--num-minibatches must divide the batch, {self.batch_size} steps")
        if self.num_iterations < 1:
            raise ValueError(f"--total-timesteps must be at least a batch, {self.batch_size} steps")

        self.hidden_sizes = tuple(self.hidden_sizes)  # a checkpoint's JSON has a list
        if min(self.hidden_sizes, default=1) < 1:
            raise ValueError("--hidden-sizes must be 1 or more")
        if not self.run_name:
            name = f"{self.env_id}__{self.exp_name}__{self.seed}__{time.time():.0f}"
            self.run_name = name.replace("/", "-").replace(":", "-")


# === Environment ================================================================================
class EnvState(NamedTuple):
    key: jax.Array  # split at every step
    inner: Any  # gymnax's own state; N = num_envs rows in each leaf
    episode_return: jax.Array  # (N,), of the running episode
    episode_length: jax.Array  # (N,)


class VecEnv:
    """N = num_envs gymnax environments with flat observations; an episode's end starts the next."""

    def __init__(self, env_id: str, num_envs: int) -> None:
        if ":" in env_id:  # one's own, which envs/check.py checks
            module, _, name = env_id.rpartition(":")
            if not module or module.startswith("."):  # ./my_module.py:MyEnv
                fail(f"--env-id: name it as an import does, my_module:MyEnv, not {env_id}")
            sys.path.append(os.getcwd())
            try:
                make = getattr(importlib.import_module(module), name, None)
            except ModuleNotFoundError as error:  # the module, or a package that it needs
                fail(f"--env-id: {error}")
            if make is None:
                fail(f"--env-id: {module} has no {name}")
            self.env = make()
            self.params = self.env.default_params
        elif env_id in gymnax.registered_envs:
            self.env, self.params = gymnax.make(env_id)
        else:
            (closest,) = difflib.get_close_matches(env_id, gymnax.registered_envs, 1, cutoff=0)
            fail(f"--env-id: gymnax has no {env_id}; the closest name is {closest}")
        self.action_space = self.env.action_space(self.params)
        if not isinstance(self.action_space, Discrete):
            fail(f"--env-id: {env_id} has continuous actions: see more/ppo_continuous_*.py")
        self.num_envs = num_envs
        self.num_actions = self.action_space.n
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
        """Take action (N,) int32; return obs (after any restart), state and a dict of results."""
        key, step_key = jax.random.split(state.key)
        keys = jax.random.split(step_key, self.num_envs)
        step = jax.vmap(partial(self.env.step, params=self.params))
        obs, inner, reward, terminated, truncated, info = step(keys, state.inner, action)
        if reward.shape != (self.num_envs,):
            fail(f"--env-id: step must return one number as reward, not {reward.shape[1:]}")
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
        return obs.reshape(self.num_envs, self.obs_dim).astype(jnp.float32)


def to_torch(arrays):
    """Views of JAX arrays, not copies. Never write to one: JAX believes its arrays immutable.

    On a CPU the host waits for JAX here (sync); on a GPU only torch's stream waits. JAX frees the
    memory once the view is gone, without waiting for torch: keep the view until torch has read it.
    """
    return jax.tree.map(torch.from_dlpack, arrays)  # of one array, or of each in a dict


def to_jax(tensor):
    """A view of a tensor for JAX, not a copy. Never write to the tensor again: JAX may read it."""
    # On a CPU, NumPy's view costs a quarter of what DLPack's does.
    return tensor.numpy() if tensor.device.type == "cpu" else jax.dlpack.from_dlpack(tensor)


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


def make_agent(args: Args, env: VecEnv, device: torch.device):
    """Initialise the parameters and Adam, whose learning rate decays with each optimizer step."""
    agent = Agent(env.obs_shape, args.hidden_sizes, env.num_actions).to(device)
    params = agent.parameters()
    optimizer = torch.optim.Adam(params, args.learning_rate, eps=args.adam_eps, fused=True)
    last_factor = 0.0 if args.anneal_lr else 1.0  # of the learning rate
    scheduler = LinearLR(optimizer, 1.0, last_factor, args.num_optimizer_steps)
    return agent, optimizer, scheduler


# === Storage ====================================================================================
class Storage(NamedTuple):
    """A rollout of T = num_steps in N = num_envs environments."""

    obs: torch.Tensor  # (T, N, obs_dim), what the action was drawn from
    action: torch.Tensor  # (T, N) int32
    logprob: torch.Tensor  # (T, N)
    reward: torch.Tensor  # (T, N), a result of the action, as everything below
    terminated: torch.Tensor  # (T, N) bool
    truncated: torch.Tensor  # (T, N) bool
    next_obs: torch.Tensor  # (T, N, obs_dim), before any restart
    episode_return: torch.Tensor  # (T, N), up to and with this step
    episode_length: torch.Tensor  # (T, N)


class Batch(NamedTuple):
    """What the loss reads; B = batch_size or minibatch_size."""

    obs: torch.Tensor  # (B, obs_dim)
    action: torch.Tensor  # (B,) int32
    logprob: torch.Tensor  # (B,)
    value: torch.Tensor  # (B,)
    advantage: torch.Tensor  # (B,)
    target: torch.Tensor  # (B,), what the critic should say


# === Rollout ====================================================================================
def rollout(policy_fn, obs, env_state, step_fn, env: VecEnv, args: Args):
    """Act for num_steps from obs (N, obs_dim); return the obs to go on from, env_state, Storage."""
    # Noise for all steps at once, to draw actions by. A torch.distributions.Categorical per step
    # would take many times as long, and its checks would wait for the device.
    noise = torch.empty(args.num_steps, args.num_envs, env.num_actions, device=obs.device)
    noise.exponential_().log_().neg_()  # minus the log of an exponential is Gumbel

    steps, results = [], []
    for step_noise in noise:
        logits, action = policy_fn(obs, step_noise)
        new_obs, env_state, result = step_fn(env_state, to_jax(action))
        steps.append((obs, action, logits))
        results.append(result)  # crosses after the loop: 6 arrays, instead of 6 per step
        obs = to_torch(new_obs)  # on a CPU, sync

    # From one tuple per step to one tensor per name, (T, N, ...).
    all_obs, action, logits = map(torch.stack, zip(*steps, strict=True))
    logprob = log_prob_of(action, logits.log_softmax(-1))
    result = to_torch(stack(results))
    return obs, env_state, Storage(all_obs, action, logprob, **result)


@jax.jit
def stack(results):
    """num_steps results of VecEnv.step -> one, each array (T, N, ...)."""
    return jax.tree.map(lambda *steps: jnp.stack(steps), *results)


@torch.no_grad()
def policy(agent, obs, noise):
    """(N, obs_dim), (N, num_actions) -> logits (N, num_actions), action (N,) int32."""
    logits = agent.get_logits(obs)
    action = (logits + noise).argmax(-1)  # Gumbel trick: a draw from softmax(logits)
    return logits, action.int()


def log_prob_of(action, log_probs):
    """(...), (..., num_actions) -> (...)."""
    return log_probs.gather(-1, action[..., None].long()).squeeze(-1)


# === GAE ========================================================================================
def compute_gae(storage: Storage, value, next_value, args: Args) -> torch.Tensor:
    """Advantages (T, N) from V(obs) and V(next_obs), each (T, N) (Schulman et al. 2016, eq. 16).

    After a termination the future is worth 0, after a truncation V(next_obs). After either the next
    step is another episode's, and its advantage does not count.
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
    log_probs = logits.log_softmax(-1)
    log_ratio = log_prob_of(batch.action, log_probs) - batch.logprob
    ratio = log_ratio.exp()

    advantage = batch.advantage
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.minimum(advantage * ratio, advantage * clipped_ratio).mean()

    value_error = (value - batch.target) ** 2
    if args.clip_vloss:
        change = (value - batch.value).clip(-args.clip_coef, args.clip_coef)
        value_error = torch.maximum(value_error, (batch.value + change - batch.target) ** 2)
    value_loss = 0.5 * value_error.mean()

    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    losses = {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": (ratio - 1 - log_ratio).mean(),
        "losses/clip_fraction": (abs(ratio - 1) > args.clip_coef).float().mean(),
    }
    return loss, {name: x.detach() for name, x in losses.items()}


# === Update =====================================================================================
def update(agent, optimizer, scheduler, storage: Storage, args: Args):
    """Train on a rank's share of a rollout, in place; return what to log of all ranks."""
    # Parameters do not change during a rollout, so one pass afterwards gives all its values.
    with torch.no_grad():
        # agent.module is the Agent, which DDP wraps: a method other than forward is called there.
        value, next_value = agent.module.get_value(torch.stack([storage.obs, storage.next_obs]))
    advantage = compute_gae(storage, value, next_value, args)
    target = advantage + value
    batch = Batch(storage.obs, storage.action, storage.logprob, value, advantage, target)
    batch = Batch(*(x.reshape(args.batch_size, *x.shape[2:]) for x in batch))

    loss_args = replace(args, norm_adv=False)  # done by then, over all ranks
    losses = []
    for _ in range(args.update_epochs):
        order = torch.randperm(args.batch_size, device=value.device)
        ordered = Batch(*(x[order] for x in batch))  # one gather an epoch
        if args.norm_adv:
            rows = ordered.advantage.view(args.num_minibatches, -1)
            rows = (rows - mean(rows, 1)) / (variance(rows, 1).sqrt() + 1e-8)
            ordered = ordered._replace(advantage=rows.flatten())
        shuffled = [x.chunk(args.num_minibatches) for x in ordered]
        for minibatch in zip(*shuffled, strict=True):
            losses.append(minibatch_step(agent, optimizer, scheduler, Batch(*minibatch), loss_args))
    metrics = {name: mean(torch.stack([x[name] for x in losses])) for name in losses[0]}
    metrics |= episode_statistics(storage)
    metrics["losses/explained_variance"] = 1 - variance(target - value) / variance(target)
    return metrics


def reduce(x, op=dist.ReduceOp.SUM):
    """Put the sum of all ranks' x, or by op another summary, in the place of x; return it."""
    dist.all_reduce(x, op)
    return x


def mean(x, dim=None):
    """Of all, or along dim, which stays; over all ranks, each of which has as many numbers."""
    return reduce(x.mean(dim, keepdim=dim is not None)) / dist.get_world_size()


def variance(x, dim=None):
    return mean((x - mean(x, dim)) ** 2, dim)


def minibatch_step(agent, optimizer, scheduler, minibatch: Batch, args: Args):
    """Train on a minibatch, in place; return its losses."""
    loss, losses = ppo_loss(agent, minibatch, args)
    optimizer.zero_grad()
    loss.backward()  # DDP makes each gradient the mean of all ranks' here
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    scheduler.step()
    return losses


def episode_statistics(storage: Storage) -> dict[str, torch.Tensor]:
    """Of the episodes that ended: how many, and mean, minimum and maximum of return and length.

    Where none ended, these are NaN and infinite, which the log leaves out.
    """
    done = storage.terminated | storage.truncated
    episodes = reduce(done.sum())
    metrics = {"charts/episodes": episodes}
    for name, x in [("return", storage.episode_return), ("length", storage.episode_length)]:
        metrics[f"charts/episodic_{name}"] = reduce(torch.where(done, x, 0).sum()) / episodes
        low, high = torch.where(done, x, torch.inf).min(), torch.where(done, x, -torch.inf).max()
        metrics[f"charts/episodic_{name}_min"] = reduce(low, dist.ReduceOp.MIN)
        metrics[f"charts/episodic_{name}_max"] = reduce(high, dist.ReduceOp.MAX)
    return metrics


# === Training ===================================================================================
def choose_device() -> torch.device:
    """The GPU if torch and JAX both see it; otherwise the CPU, for both."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))  # torchrun's number, on this machine
    jax.config.update("jax_cuda_visible_devices", str(rank))
    torch_gpu = torch.cuda.is_available()
    if torch_gpu and rank >= torch.cuda.device_count():
        fail("torchrun: start no more processes on a machine than it has GPUs")
    jax_gpu = jax.default_backend() == "gpu"
    if torch_gpu and not jax_gpu:
        print("Only torch sees a GPU, so both use the CPU; to use the GPU install jax[cuda13].")
    if jax_gpu and not torch_gpu:
        print(
            "Only JAX sees a GPU, so both use the CPU; to use the GPU install torch, a CUDA build."
        )
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
    if torch_gpu and jax_gpu:
        torch.cuda.set_device(rank)
    return torch.device("cuda" if torch_gpu and jax_gpu else "cpu")


def aside(args: Args) -> Args:
    """For all ranks but the first, which run the same code: a run folder that vanishes."""
    folder = Path(tempfile.mkdtemp(), "run")
    atexit.register(shutil.rmtree, folder.parent)
    sys.stdout = open(os.devnull, "w")
    resume = ""
    if args.resume:
        folder.mkdir()
        for name in ("checkpoint.npz", "metrics.jsonl"):  # what RunLog reads
            shutil.copy(Path(args.resume, name), folder)
        resume = str(folder)
    return replace(args, runs_dir=str(folder.parent), run_name="run", resume=resume, track=False)


def gather(tree):
    """All ranks' rows, as NumPy arrays."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, jax.tree.map(np.asarray, tree))
    return jax.tree.map(lambda *rows: np.concatenate(rows), *parts)


def train(args: Args) -> None:
    """Train an agent, from the start or from a checkpoint on."""
    # The same in all frameworks: torch's "high" is TF32 on a GPU, as is JAX's "default".
    precision = "default" if args.matmul_precision == "high" else "highest"
    jax.config.update("jax_default_matmul_precision", precision)
    torch.set_float32_matmul_precision(args.matmul_precision)
    device = choose_device()
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    backend = "nccl" if gpu else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    elif not dist.is_initialized():  # without torchrun, a rank alone
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.num_envs % world_size or args.minibatch_size % world_size:
        fail(f"--num-envs: {world_size} ranks cannot share environments and minibatches evenly")
    share = replace(args, num_envs=args.num_envs // world_size)
    env = VecEnv(args.env_id, args.num_envs)
    spaces = {"obs_shape": env.obs_shape, "obs_dim": env.obs_dim, "num_actions": env.num_actions}
    log_args = args if rank == 0 else aside(args)
    log = RunLog(log_args, spaces, "torch", "env.jit" if args.jit_env else "none", gpu or "cpu")
    log.info["devices"] = world_size

    torch.manual_seed(args.seed)
    agent, optimizer, scheduler = make_agent(args, env, device)
    # What comes by DLPack is committed to a device. If the first state were not, step_fn would
    # compile twice.
    key = jax.device_put(jax.random.PRNGKey(args.seed), jax.devices(device.type)[0])
    obs, env_state = jax.jit(env.reset)(key)
    env_state = env_state._replace(key=None)  # an iteration begins with a new one
    if args.resume:
        obs, env_state = resume(log, agent, optimizer, scheduler, obs, env_state)
    rows = slice(rank * share.num_envs, (rank + 1) * share.num_envs)
    obs, env_state = jax.tree.map(lambda x: x[rows], (obs, env_state))
    obs = to_torch(obs)

    env = VecEnv(args.env_id, share.num_envs)
    ddp = DistributedDataParallel(agent)
    step_fn = jax.jit(env.step)
    policy_fn = partial(policy, agent)
    with jax.disable_jit(not args.jit_env):
        for iteration in range(log.info["iteration"], args.num_iterations):
            start = time.perf_counter()
            # Seeds of this rank and iteration, so that a checkpoint need not hold generators.
            seeds = np.random.SeedSequence([args.seed, iteration, rank]).generate_state(2)
            torch.manual_seed(int(seeds[0]))
            env_state = env_state._replace(key=jax.device_put(seeds, key.device))
            obs, env_state, storage = rollout(policy_fn, obs, env_state, step_fn, env, share)
            if args.sync_for_timing and gpu:
                torch.cuda.synchronize()  # sync
            middle = time.perf_counter()
            metrics = update(ddp, optimizer, scheduler, storage, share)
            values = torch.stack([*metrics.values()]).tolist()  # sync: the only transfer
            metrics = dict(zip(metrics, values, strict=True))
            log.write(metrics, start, middle, time.perf_counter())
            signals = torch.tensor(log.signal, device=device)
            log.signal = int(reduce(signals, dist.ReduceOp.MAX))  # sync, and any rank's stops all
            if log.must_save():  # after a signal, this is the end
                state = training_state(agent, optimizer, scheduler)
                state = {name: x.cpu() for name, x in state.items()}  # sync
                envs = gather((obs.cpu(), env_state._replace(key=None)))
                try:
                    log.save(tensors=state, obs=envs[0], env_state=envs[1])
                finally:  # wait: when a rank ends, torchrun ends all, and the first may be writing
                    dist.barrier()
    peak_device_bytes = None
    if gpu:
        jax_peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
        peak_device_bytes = torch.cuda.max_memory_allocated() + jax_peak
    log.finish(peak_device_bytes)
    dist.destroy_process_group()


def training_state(agent, optimizer, scheduler) -> dict[str, torch.Tensor]:
    """What PyTorch's part of a training goes on from, by name: views, to which resume writes."""
    state = {f"agent/{name}": x for name, x in agent.state_dict().items()}
    for name, x in agent.named_parameters():
        for key, moment in optimizer.state[x].items():
            state[f"optimizer/{name}/{key}"] = moment
    state["scheduler/last_epoch"] = torch.tensor(scheduler.last_epoch)
    state["scheduler/lr"] = torch.tensor(scheduler.get_last_lr()[0], dtype=torch.float64)
    return state


def resume(log, agent, optimizer, scheduler, obs, env_state):
    """Go on from log's checkpoint: load it into all that trains; return its obs and env_state."""
    for x in agent.parameters():
        x.grad = torch.zeros_like(x)
    optimizer.step()  # makes Adam's moments, to load into; gradients of 0 change no parameter
    state = training_state(agent, optimizer, scheduler)
    device = obs.device
    saved, obs, env_state = log.load(tensors=state, obs=obs, env_state=env_state)
    for name, x in state.items():
        x.copy_(torch.as_tensor(saved[name]))
    scheduler.last_epoch = int(state["scheduler/last_epoch"])
    optimizer.param_groups[0]["lr"] = float(state["scheduler/lr"])
    return jax.device_put((obs, env_state), device)


def load_policy(folder: str | Path, seed: int = 0) -> Callable[..., np.ndarray]:
    """What a run learnt, as a function: policy(obs) is the likeliest action for each obs.

    obs (N, *obs_shape) and actions (N,) are NumPy arrays, as the environment has them. With
    sample=True the actions are drawn with their probabilities, as in training, by seed.
    """
    info, args = load_info(folder)
    env: Any = SimpleNamespace(**info["spaces"])  # all that make_agent asks of an environment
    agent, *_ = make_agent(args, env, torch.device("cpu"))
    _, saved = load_checkpoint(folder, {"tensors": {"agent": agent.state_dict()}})
    agent.load_state_dict(jax.tree.map(torch.as_tensor, saved["tensors"]["agent"]))
    rng = np.random.default_rng(seed)

    @torch.no_grad()
    def policy(obs, sample=False):
        obs = np.reshape(obs, (len(obs), env.obs_dim)).astype(np.float32)
        logits = agent.get_logits(torch.as_tensor(obs)).numpy()
        if sample:
            logits = logits + rng.gumbel(size=logits.shape)  # as in rollout
        return logits.argmax(-1)

    return policy


# === Run log ====================================================================================
# You may stop reading here. The rest is plumbing without any algorithm, the same in all of PPO.
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

    def write(self, metrics: dict, start: float, middle: float, end: float) -> None:
        """Log an iteration, in which the rollout went over to the update at middle."""
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
        if args.sync_for_timing:
            row["time/rollout"] = middle - start
            row["time/update"] = end - middle
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
            if math.isnan(row["losses/value_loss"]):
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
    args = tyro.cli(Args)
    train(args_to_resume(args) if args.resume else args)

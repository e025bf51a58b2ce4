# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "jax==0.10.2", "gymnax==1.0.1", "six==1.17.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""PPO in eager PyTorch on many devices: a process for each, and DistributedDataParallel.

    torchrun --nproc-per-node 2 more/ppo_torch_ddp.py --seed 1  # on two GPUs, or the CPU

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

import argparse
import importlib
import json
import math
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves torch its share of a GPU
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # idle threads sleep soon and free their cores

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.distributed as dist
import tyro
from gymnax.environments.spaces import Discrete
from tensorboard.summary import Writer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR


# === Arguments ==================================================================================
@dataclass
class Args:
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
    bootstrap_truncated: bool = True  # bootstrap truncated episodes from V(final obs); off: with 0
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layers of actor and critic
    matmul_precision: Literal["medium", "high", "highest"] = "high"  # highest: no TF32 on a GPU
    sync_for_timing: bool = False  # wait for the device after the rollout, to time both phases
    runs_dir: str = "runs"  # folder that gets one folder per run
    run_name: str = ""  # that folder's name; by default {env_id}__{script}__{seed}__{time}
    track: bool = False  # log to Weights & Biases, too
    save_every: int = 0  # iterations between checkpoints; 0: only when training ends or is stopped
    resume: str = ""  # folder of a run to resume; its arguments are the defaults of all others

    def __post_init__(self) -> None:
        """Work out the sizes. On the command line, a ValueError becomes a message."""
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
        self.hidden_sizes = tuple(self.hidden_sizes)  # run.json has a list


def parse_args() -> Args:
    """Read the command line. With --resume, the run's own arguments are the defaults."""
    return tyro.cli(Args, default=args_to_resume() or Args())


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
        space = self.env.action_space(self.params)
        if not isinstance(space, Discrete):
            hint = "see more/ppo_continuous_linen.py or ppo_continuous_torch.py"
            fail(f"--env-id: {env_id} has continuous actions: {hint}")
        self.num_envs = num_envs
        self.num_actions = space.n
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
    return jax.tree.map(torch.from_dlpack, arrays)  # one, or a dict or list of them


def to_jax(tensor):
    """A view of a tensor for JAX, not a copy. Never write to the tensor again: JAX may read it."""
    # On a CPU, NumPy makes a view in less time: DLPack takes tens of microseconds.
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
def rollout(policy_fn, obs, env_state, step_fn, env: VecEnv, args: Args):
    """Act for num_steps from obs (N, obs_dim); return the obs to go on from, env_state, Storage."""
    # Drawn for all steps at once, noise takes less time than drawn in every step.
    # A torch.distributions.Categorical in every step would wait for the device, for its checks.
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
    logprob = logprob_of(action, logits.log_softmax(-1))
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
    action = (logits + noise).argmax(-1)  # Gumbel-max trick: samples softmax(logits)
    return logits, action.int()


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
    """Train on a rank's share of a rollout, in place; return what to log of all ranks."""
    learning_rate = torch.full((), optimizer.param_groups[0]["lr"], device=storage.obs.device)
    # Parameters do not change during a rollout, so one pass afterwards gives all its values.
    with torch.no_grad():
        # agent.module is the Agent, which DDP wraps: a method other than forward is called there.
        value, next_value = agent.module.get_value(torch.stack([storage.obs, storage.next_obs]))
    advantage = compute_gae(storage, value, next_value, args)
    target = advantage + value
    fields = (storage.obs, storage.action, storage.logprob, value, advantage, target)
    batch = Batch(*(x.reshape(args.batch_size, *x.shape[2:]) for x in fields))  # (T, N) -> (B,)

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
    metrics["charts/learning_rate"] = learning_rate
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
    return {name: x.detach() for name, x in losses.items()}


def episode_statistics(storage: Storage) -> dict[str, torch.Tensor]:
    """Of the episodes that ended: how many, and mean, minimum and maximum of return and length.

    Where none ended, mean, minimum and maximum are NaN or infinite, which the log has as null.
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


def train(args: Args) -> None:
    """Train an agent, from the start or from a checkpoint on."""
    # The same in all frameworks: torch's "high" is TF32 on a GPU, as is JAX's "default".
    precision = "highest" if args.matmul_precision == "highest" else "default"
    jax.config.update("jax_default_matmul_precision", precision)
    torch.set_float32_matmul_precision(args.matmul_precision)
    device = choose_device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    elif not dist.is_initialized():  # without torchrun, a rank alone
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.num_envs % world_size or args.minibatch_size % world_size:
        fail(f"--num-envs: {world_size} ranks cannot share environments and minibatches evenly")
    share = replace(args, num_envs=args.num_envs // world_size)
    env = VecEnv(args.env_id, share.num_envs)
    log = start_log(
        args,
        framework="torch",
        compile_mode="none" if jax.config.values["jax_disable_jit"] else "env.jit",
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        devices=world_size,
        obs_shape=env.obs_shape,
        num_actions=env.num_actions,
    )

    torch.manual_seed(args.seed)
    iteration = 0
    agent, optimizer, scheduler = make_agent(args, env.obs_shape, env.num_actions, device)
    # Each rank starts all environments and takes its rows of them further down, so that they are
    # those that a single rank would have.
    all_envs = VecEnv(args.env_id, args.num_envs)
    obs, env_state = jax.jit(all_envs.reset)(jax.random.PRNGKey(args.seed))
    env_state = env_state._replace(key=None)  # an iteration begins with a new one
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
        obs = checkpoint["obs"].numpy()
        env_state = to_env_state(checkpoint["env_state"], like=env_state)
    with all_or_none():
        log.begin(iteration)

    rows = slice(rank * share.num_envs, (rank + 1) * share.num_envs)
    obs, env_state = jax.tree.map(lambda x: x[rows], (obs, env_state))
    # What comes by DLPack is committed to a device. If the first state were not, step_fn would
    # compile twice.
    jax_device = jax.devices(device.type)[0]
    obs, env_state = jax.device_put((obs, env_state), jax_device)
    obs = to_torch(obs)

    ddp = DistributedDataParallel(agent)
    step_fn = jax.jit(env.step)
    policy_fn = partial(policy, agent)
    while iteration < args.num_iterations:
        start = time.perf_counter()
        # Seeds of this rank and iteration, so that a checkpoint need not hold generators.
        seeds = np.random.SeedSequence([args.seed, iteration, rank]).generate_state(2)
        torch.manual_seed(int(seeds[0]))
        env_state = env_state._replace(key=jax.device_put(seeds, jax_device))
        obs, env_state, storage = rollout(policy_fn, obs, env_state, step_fn, env, share)
        if args.sync_for_timing and device.type == "cuda":
            torch.cuda.synchronize()  # sync
        middle = time.perf_counter()
        metrics = update(ddp, optimizer, scheduler, storage, share)
        values = torch.stack([*metrics.values()]).tolist()  # sync
        metrics = dict(zip(metrics, values, strict=True))
        log.write(iteration, metrics, start, middle)
        iteration += 1
        # All ranks decide by the same numbers: a signal to any of them stops all of them here,
        # and one that comes later waits for the next iteration.
        asked = torch.tensor([log.stopped_by, log.must_save(iteration)], device=device)
        stopped_by, must_save = reduce(asked, dist.ReduceOp.MAX).tolist()  # sync
        if must_save:
            env_state = env_state._replace(key=None)
            all_obs, *all_env_state = gather([obs.cpu(), *jax.tree.leaves(env_state)])  # sync
            checkpoint = {
                "iteration": iteration,
                "agent": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "obs": all_obs,
                "env_state": all_env_state,
            }
            with all_or_none():
                if rank == 0:
                    save_checkpoint(log.dir, checkpoint)
                    log.note_saved(iteration)
            if stopped_by:
                log.stopped_by = stopped_by  # it may have come to another rank
                break
    del ddp  # before the group, or PyTorch may wait for gloo's threads for ever
    # When one has ended by a signal, torchrun ends the others: so all at once.
    with all_or_none():
        log.close(iteration)
    dist.destroy_process_group()


def gather(arrays):
    """All ranks' rows of each array, as tensors on the CPU."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [np.asarray(x) for x in arrays])
    return [torch.from_numpy(np.concatenate(rows)) for rows in zip(*parts, strict=True)]


class QuietLog:
    """In the place of RunLog in all ranks but the first: notes signals, and writes nothing."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.dir = Path(args.resume or os.devnull)  # to load from; a new run finds nothing there
        self.stopped_by = 0  # number of the signal that came

    def begin(self, iteration: int) -> None:
        signal.signal(signal.SIGINT, self.stop)
        signal.signal(signal.SIGTERM, self.stop)

    def stop(self, number: int, frame: Any) -> None:
        self.stopped_by = number

    def write(self, *row: Any) -> None:
        pass

    def must_save(self, done: int) -> bool:
        return self.stopped_by > 0  # the first rank knows when one is due

    def close(self, done: int) -> None:
        if done < self.args.num_iterations:
            sys.exit(128 + self.stopped_by)


@contextmanager
def all_or_none() -> Generator[None]:
    """Where one rank fails in this, and says why, the others end, and do not wait for it."""
    worked = False
    try:
        yield
        worked = True
    finally:
        all_worked = [False] * dist.get_world_size()
        dist.all_gather_object(all_worked, worked)
    if not all(all_worked):
        sys.exit(2)


def start_log(args: Args, **facts: Any) -> Any:
    """The run log of this rank."""
    with all_or_none():
        return RunLog(args, **facts) if dist.get_rank() == 0 else QuietLog(args)


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


def to_env_state(tensors: list[torch.Tensor], like: EnvState) -> EnvState:
    """The environments' state from the tensors of its leaves."""
    arrays = [x.numpy() for x in tensors]
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


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

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "jax==0.10.2", "gymnax==1.0.1", "six==1.17.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""Recurrent PPO in eager PyTorch: actor and critic share a GRU.

    python more/ppo_rnn_torch.py --env-id MemoryChain-bsuite --seed 1

Start reading at Agent. The main ideas:
- Agent encodes the observation, updates the GRU state, and reads logits and value from it.
- rollout() carries the GRU state of each environment, and resets it when an episode ends.
- update() shuffles environments, not steps: a minibatch has all steps of some environments.
- unroll() recomputes the GRU states. It splits the steps where episodes end, and runs torch.nn.GRU
  on all parts at once.
Lines marked "# sync" wait for the device.

Compare with ppo_torch.py to see what the GRU changes, or with ppo_rnn_linen.py for JAX.
"""

import argparse
import importlib
import json
import math
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

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves GPU memory for PyTorch
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # idle OpenMP threads stop spinning sooner

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import torch
import tyro
from gymnax.environments.spaces import Discrete
from tensorboard.summary import Writer
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


# === Arguments ==================================================================================
@dataclass
class Args:
    seed: int = 1  # random seed
    env_id: str = "CartPole-v1"  # gymnax environment with discrete actions, or my_module:MyEnv
    total_timesteps: int = 819_200  # environment steps, rounded down to whole rollouts
    learning_rate: float = 1e-3  # Adam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    num_envs: int = 32  # parallel environments
    num_steps: int = 256  # steps per environment in each rollout
    gamma: float = 0.98  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 8  # minibatches per epoch
    update_epochs: int = 10  # passes over each rollout
    norm_adv: bool = True  # normalize advantages in each minibatch
    clip_coef: float = 0.2  # clipping range for the probability ratio and the value
    clip_vloss: bool = True  # clip the value loss
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.02  # weight of the value loss; low, as actor and critic share layers
    max_grad_norm: float = 0.5  # maximum global norm of the gradient
    adam_eps: float = 1e-5  # Adam's epsilon
    bootstrap_truncated: bool = True  # bootstrap truncated episodes from V(final obs), not from 0
    hidden_sizes: tuple[int, ...] = (64,)  # hidden layers of the encoder
    gru_hidden_size: int = 64  # size of the GRU state
    feed_back: bool = False  # append the last action (one-hot) and reward to the observation
    matmul_precision: Literal["medium", "high", "highest"] = "high"  # highest: no TF32 on a GPU
    sync_for_timing: bool = False  # wait for the device after each rollout, to time it separately
    runs_dir: str = "runs"  # where run folders are created
    run_name: str = ""  # name of the run folder; default {env_id}__{script}__{seed}__{time}
    track: bool = False  # log to Weights & Biases as well
    save_every: int = 0  # save a checkpoint every N iterations; 0: up to ten per run
    resume: str = ""  # run folder to continue; its arguments are kept

    def __post_init__(self) -> None:
        """Check arguments and compute derived ones. tyro reports a ValueError as a usage error."""
        if self.seed not in range(2**32):  # JAX would silently drop the upper bits
            raise ValueError("--seed must be between 0 and 2**32 - 1")
        counts = ("num_envs", "num_steps", "num_minibatches", "update_epochs", "gru_hidden_size")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        if not self.max_grad_norm > 0:
            raise ValueError("--max-grad-norm must be positive")
        self.batch_size = self.num_envs * self.num_steps
        self.num_iterations = self.total_timesteps // self.batch_size
        self.num_optimizer_steps = self.num_iterations * self.update_epochs * self.num_minibatches
        if self.num_envs % self.num_minibatches != 0:
            raise ValueError(f"--num-minibatches must divide --num-envs ({self.num_envs})")
        if self.num_iterations < 1:
            raise ValueError(f"--total-timesteps must be at least one batch ({self.batch_size})")
        self.hidden_sizes = tuple(self.hidden_sizes)  # a list when loaded from run.json


def parse_args() -> Args:
    """Parse the command line. With --resume, the run's arguments are the defaults."""
    return tyro.cli(Args, default=args_to_resume() or Args())


# === Environment ================================================================================
class EnvState(NamedTuple):
    key: jax.Array  # split at each step
    inner: Any  # gymnax's state, batched: N = num_envs rows in each leaf
    episode_return: jax.Array  # (N,), so far in the current episode
    episode_length: jax.Array  # (N,)


class VecEnv:
    """N = num_envs gymnax environments stepped together. Finished ones restart automatically."""

    def __init__(self, env_id: str, num_envs: int, feed_back: bool = False) -> None:
        module, _, name = env_id.partition(":")
        if name.isidentifier():  # a custom class, my_module:MyEnv; test it with envs/check.py
            sys.path.append(os.getcwd())
            self.env = getattr(importlib.import_module(module), name)()
            self.params = self.env.default_params
        elif env_id in gymnax.registered_envs:
            self.env, self.params = gymnax.make(env_id)
        else:
            hint = "use more/ppo_linen_gymnasium.py or more/ppo_torch_gymnasium.py"
            fail(f"gymnax has no {env_id}. For a Gymnasium environment, {hint}")
        space = self.env.action_space(self.params)
        if not isinstance(space, Discrete):
            hint = "use more/ppo_continuous_linen.py or more/ppo_continuous_torch.py"
            fail(f"{env_id} has continuous actions: {hint}")
        self.num_envs = num_envs
        self.feed_back = feed_back
        self.num_actions = int(space.n)
        self.obs_shape = self.env.observation_space(self.params).shape
        if feed_back:
            self.obs_shape = (math.prod(self.obs_shape) + self.num_actions + 1,)

    def reset(self, key: jax.Array) -> tuple[jax.Array, EnvState]:
        """Start all environments. Return obs (N, *obs_shape) and the state."""
        key, reset_key = jax.random.split(key)
        obs, inner = jax.vmap(self.env.reset)(jax.random.split(reset_key, self.num_envs))
        # Some environments return weakly typed arrays from reset but not from step, so a function
        # that takes them would compile twice. astype makes the types strong.
        obs, inner = jax.tree.map(lambda x: x.astype(x.dtype), (obs, inner))
        zeros = jnp.zeros(self.num_envs)
        obs = self.add_feedback(obs, jnp.zeros((self.num_envs, self.num_actions + 1)))
        return obs, EnvState(key, inner, zeros, zeros)

    def step(self, state: EnvState, action: jax.Array) -> tuple[jax.Array, EnvState, dict]:
        """Step with action (N,). Return obs (after any restart), the state and the results."""
        key, step_key = jax.random.split(state.key)
        keys = jax.random.split(step_key, self.num_envs)
        # gymnax restarts finished environments in the same step.
        step = jax.vmap(partial(self.env.step, params=self.params))
        obs, inner, reward, terminated, truncated, info = step(keys, state.inner, action)
        reward = reward.astype(jnp.float32)
        feedback = jnp.column_stack([jax.nn.one_hot(action, self.num_actions), reward])
        episode_return = state.episode_return + reward
        episode_length = state.episode_length + 1
        results = {
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "next_obs": self.add_feedback(info["final_observation"], feedback),
            "episode_return": episode_return,
            "episode_length": episode_length,
        }
        done = terminated | truncated
        obs = self.add_feedback(obs, jnp.where(done[:, None], 0, feedback))
        episode_return = jnp.where(done, 0, episode_return)
        episode_length = jnp.where(done, 0, episode_length)
        return obs, EnvState(key, inner, episode_return, episode_length), results

    def add_feedback(self, obs: jax.Array, feedback: jax.Array) -> jax.Array:
        """With feed_back, flatten obs and append feedback (N, num_actions + 1)."""
        if not self.feed_back:
            return obs
        return jnp.column_stack([obs.reshape(self.num_envs, -1).astype(jnp.float32), feedback])


def to_torch(arrays):
    """Share a pytree of JAX arrays with PyTorch without copying.

    Never write to the tensors: JAX assumes that its arrays are immutable. Keep them until PyTorch
    has finished reading, since JAX frees the memory without waiting for PyTorch. On a CPU, this
    waits for JAX (sync); on a GPU, only PyTorch's stream waits.
    """
    return jax.tree.map(torch.from_dlpack, arrays)


def to_jax(tensor):
    """Share a tensor with JAX without copying. Never write to it again: JAX may still read it."""
    # On a CPU, a NumPy array is faster: DLPack takes tens of microseconds.
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
    def __init__(self, obs_shape, hidden_sizes, num_actions, gru_hidden_size):
        super().__init__()
        *sizes, last_size = hidden_sizes  # encode() applies tanh to the last layer, too
        self.encoder = MLP(math.prod(obs_shape), sizes, last_size, output_scale=math.sqrt(2))
        self.gru = nn.GRU(last_size, gru_hidden_size)
        for name, x in self.gru.named_parameters():
            if "weight" in name:
                nn.init.orthogonal_(x)
            else:
                nn.init.zeros_(x)
        self.actor = MLP(gru_hidden_size, (), num_actions, output_scale=0.01)
        self.critic = MLP(gru_hidden_size, (), 1, output_scale=1.0)

    def encode(self, obs):
        """(B, *obs_shape) -> (B, hidden_sizes[-1]), the inputs of the GRU."""
        return self.encoder(obs.reshape(obs.shape[0], -1).float()).tanh()

    def get_logits(self, gru_state):
        return self.actor(gru_state)  # (..., H) -> (..., num_actions), H = gru_hidden_size

    def get_value(self, gru_state):
        return self.critic(gru_state).squeeze(-1)  # (..., H) -> (...)

    def forward(self, gru_state, obs):
        """One step: (B, H), (B, *obs_shape) -> logits, value, new gru_state."""
        sequence = self.encode(obs)[None]  # one step: (1, B, hidden_sizes[-1])
        gru_states, _ = self.gru(sequence, gru_state[None])  # the outputs of a GRU are its states
        gru_state = gru_states[0]
        return self.get_logits(gru_state), self.get_value(gru_state), gru_state


def make_agent(args: Args, obs_shape, num_actions: int, device: torch.device):
    """Initialize the parameters and the optimizer."""
    agent = Agent(obs_shape, args.hidden_sizes, num_actions, args.gru_hidden_size).to(device)
    params = agent.parameters()
    optimizer = torch.optim.Adam(params, args.learning_rate, eps=args.adam_eps, fused=True)
    return agent, optimizer


def learning_rate_factor(step: int, args: Args) -> float:
    """Learning rate factor after `step` optimizer steps. CleanRL changes it once per iteration."""
    if not args.anneal_lr:
        return 1.0
    return 1 - step / args.num_optimizer_steps


# === Storage ====================================================================================
class Storage(NamedTuple):
    """A rollout: T = num_steps steps in N = num_envs environments."""

    obs: torch.Tensor  # (T, N, *obs_shape), input of the policy
    action: torch.Tensor  # (T, N) int32
    logprob: torch.Tensor  # (T, N)
    gru_state: torch.Tensor  # (T, N, H), H = gru_hidden_size, after reading obs
    initial_gru_state: torch.Tensor  # (N, H), before the first obs
    reward: torch.Tensor  # (T, N); this and the fields below result from the action
    terminated: torch.Tensor  # (T, N) bool
    truncated: torch.Tensor  # (T, N) bool
    next_obs: torch.Tensor  # (T, N, *obs_shape), before any restart
    episode_return: torch.Tensor  # (T, N), including this step
    episode_length: torch.Tensor  # (T, N)


class Batch(NamedTuple):
    """Inputs of the loss: T steps of B environments. A minibatch has a subset of them."""

    initial_gru_state: torch.Tensor  # (B, H)
    done: torch.Tensor  # (B, T) bool
    obs: torch.Tensor  # (B, T, *obs_shape)
    action: torch.Tensor  # (B, T) int32
    logprob: torch.Tensor  # (B, T)
    value: torch.Tensor  # (B, T)
    advantage: torch.Tensor  # (B, T)
    target: torch.Tensor  # (B, T), the lambda-return that the critic learns


# === Rollout ====================================================================================
def rollout(policy_fn, obs, gru_state, env_state, step_fn, env: VecEnv, args: Args):
    """Act for num_steps steps. Return the next obs, GRU state and env_state, and the Storage."""
    # Drawing the noise of all steps at once is faster than drawing it at each step. A
    # torch.distributions.Categorical would wait for the device to check its inputs.
    noise = torch.empty(args.num_steps, args.num_envs, env.num_actions, device=obs.device)
    noise.exponential_().log_().neg_()  # -log(exponential) is Gumbel noise

    initial_gru_state = gru_state
    steps, results = [], []
    for step_noise in noise:
        logits, action, gru_state = policy_fn(gru_state, obs, step_noise)
        new_obs, env_state, result = step_fn(env_state, to_jax(action))
        steps.append((obs, action, logits, gru_state))
        results.append(result)  # stacked after the loop
        obs = to_torch(new_obs)  # sync on a CPU
        done = to_torch(result["terminated"]) | to_torch(result["truncated"])
        gru_state = reset_gru(gru_state, done)

    # Turn one tuple per step into one tensor per field, (T, N, ...).
    all_obs, action, logits, gru_states = map(torch.stack, zip(*steps, strict=True))
    logprob = logprob_of(action, logits.log_softmax(-1))
    results = to_torch(stack(results))
    storage = Storage(all_obs, action, logprob, gru_states, initial_gru_state, **results)
    return obs, gru_state, env_state, storage


@jax.jit
def stack(results):
    """Stack the results of num_steps calls to VecEnv.step: (N, ...) -> (T, N, ...)."""
    return jax.tree.map(lambda *steps: jnp.stack(steps), *results)


@torch.no_grad()
def policy(agent, gru_state, obs, noise):
    """Sample actions: gru_state, obs, noise -> logits, action (N,) int32, gru_state."""
    logits, _, gru_state = agent(gru_state, obs)
    action = (logits + noise).argmax(-1)  # Gumbel-max trick: samples softmax(logits)
    return logits, action.int(), gru_state


def reset_gru(gru_state, done):
    """Set the GRU state (N, H) to zero where done (N,) is True."""
    return torch.where(done[:, None], 0.0, gru_state)


def logprob_of(action, logprobs):
    """Log-probability of the actions taken: (...), (..., num_actions) -> (...)."""
    return logprobs.gather(-1, action[..., None].long()).squeeze(-1)


# === GAE ========================================================================================
def compute_gae(storage: Storage, value, next_value, args: Args) -> torch.Tensor:
    """Return advantages (T, N) from V(obs) and V(next_obs), both (T, N).

    Schulman et al. 2016, eq. 16. A terminated episode has no future value. A truncated one
    bootstraps from V(next_obs), unless bootstrap_truncated is off. Both end the recursion, since
    the next step starts a new episode.
    """
    done = storage.terminated | storage.truncated
    no_future = storage.terminated if args.bootstrap_truncated else done
    delta = storage.reward + args.gamma * torch.where(no_future, 0.0, next_value) - value
    decay = torch.where(done, 0.0, args.gamma * args.gae_lambda)

    advantage = torch.zeros_like(delta[0])
    advantages = []
    backwards = zip(delta.flip(0), decay.flip(0), strict=True)
    for step_delta, step_decay in backwards:
        advantage = step_delta + step_decay * advantage
        advantages.append(advantage)
    return torch.stack(advantages[::-1])


# === Loss =======================================================================================
def ppo_loss(agent, batch: Batch, args: Args):
    """PPO's clipped loss (Schulman et al. 2017, eq. 9), and the metrics to log."""
    gru_state = unroll(agent, batch)
    logits = agent.get_logits(gru_state)
    value = agent.get_value(gru_state)
    logprobs = logits.log_softmax(-1)
    log_ratio = logprob_of(batch.action, logprobs) - batch.logprob
    ratio = log_ratio.exp()

    advantage = batch.advantage
    if args.norm_adv:
        # correction=0 divides by n. CleanRL's PyTorch scripts divide by n - 1.
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


def unroll(agent, batch: Batch) -> torch.Tensor:
    """Return the GRU states (B, T, H) under the current parameters."""
    # nn.GRU cannot reset its state within a sequence. Therefore, cut the B sequences into S parts
    # where episodes end, pad the parts with zeros, and run the GRU on all parts at once.
    starts = batch.done.roll(1, dims=1)  # (B, T), True where a part starts
    starts[:, 0] = True
    part = starts.flatten().cumsum(0) - 1  # (B * T,), the part of each step
    first = starts.flatten().nonzero().squeeze(-1)  # sync; (S,), the first step of each part
    steps = torch.arange(len(part), device=part.device)
    position = steps - first[part]  # (B * T,), the position of each step in its part
    gru_state = batch.initial_gru_state.new_zeros(len(first), batch.initial_gru_state.shape[-1])
    # The first part of each sequence starts from initial_gru_state, the others from zero.
    gru_state[part.view_as(starts)[:, 0]] = batch.initial_gru_state

    encoded = agent.encode(batch.obs.flatten(0, 1))  # (B * T, hidden_sizes[-1])
    padded = encoded.new_zeros(int(position.max()) + 1, len(first), encoded.shape[-1])  # sync
    padded[position, part] = encoded
    gru_states, _ = agent.gru(padded, gru_state[None])  # (length of the longest part, S, H)
    return gru_states[position, part].view(*starts.shape, -1)


# === Update =====================================================================================
def update(agent, optimizer, scheduler, storage: Storage, args: Args):
    """Train the agent in place for update_epochs epochs on a rollout. Return the metrics."""
    learning_rate = optimizer.param_groups[0]["lr"]
    # The parameters are fixed during a rollout, so one pass at the end gives all its values.
    with torch.no_grad():
        value = agent.get_value(storage.gru_state)
        # V(next_obs) takes another step of the GRU, from the state before any reset.
        _, next_value, _ = agent(storage.gru_state.flatten(0, 1), storage.next_obs.flatten(0, 1))
    next_value = next_value.view_as(value)
    advantage = compute_gae(storage, value, next_value, args)
    target = advantage + value
    done = storage.terminated | storage.truncated
    fields = (done, storage.obs, storage.action, storage.logprob, value, advantage, target)
    batch = Batch(storage.initial_gru_state, *(x.swapaxes(0, 1) for x in fields))

    losses = []
    for _ in range(args.update_epochs):
        order = torch.randperm(args.num_envs, device=value.device)
        # Gathering once per epoch is faster than once per minibatch.
        shuffled = [x[order].chunk(args.num_minibatches) for x in batch]
        for minibatch in zip(*shuffled, strict=True):
            losses.append(minibatch_step(agent, optimizer, scheduler, Batch(*minibatch), args))
    metrics = {name: torch.stack([x[name] for x in losses]).mean() for name in losses[0]}
    metrics |= episode_statistics(storage)
    metrics["charts/learning_rate"] = learning_rate
    metrics["losses/explained_variance"] = 1 - (target - value).var() / target.var()
    metrics["charts/param_norm"] = nn.utils.get_total_norm(agent.parameters())
    return metrics


def minibatch_step(agent, optimizer, scheduler, minibatch: Batch, args: Args):
    """Train the agent in place on a minibatch. Return the metrics of the loss."""
    loss, losses = ppo_loss(agent, minibatch, args)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    scheduler.step()
    return {name: x.detach() for name, x in losses.items()}


def episode_statistics(storage: Storage) -> dict[str, torch.Tensor]:
    """Number of finished episodes, and the mean, min and max of their returns and lengths.

    If none finished, the statistics are NaN or infinite, which the log writes as null.
    """
    done = storage.terminated | storage.truncated
    metrics = {"charts/episodes": done.sum()}
    for name, x in [("return", storage.episode_return), ("length", storage.episode_length)]:
        metrics[f"charts/episodic_{name}"] = torch.where(done, x, 0).sum() / done.sum()
        metrics[f"charts/episodic_{name}_min"] = torch.where(done, x, torch.inf).min()
        metrics[f"charts/episodic_{name}_max"] = torch.where(done, x, -torch.inf).max()
    return metrics


# === Training ===================================================================================
def choose_device() -> torch.device:
    """Return the GPU if both PyTorch and JAX can use it, otherwise the CPU."""
    torch_gpu = torch.cuda.is_available()
    jax_gpu = jax.default_backend() == "gpu"
    if torch_gpu and not jax_gpu:
        print("Running on the CPU: JAX sees no GPU. To use the GPU, install jax[cuda13].")
    if jax_gpu and not torch_gpu:
        print("Running on the CPU: PyTorch sees no GPU. To use it, install a CUDA build of torch.")
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
    return torch.device("cuda" if torch_gpu and jax_gpu else "cpu")


def train(args: Args) -> None:
    """Train an agent, or continue a run."""
    # With small networks, PyTorch's default of one thread per core is slow on a busy machine.
    if max(args.hidden_sizes, default=0) < 128 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    torch.set_float32_matmul_precision(args.matmul_precision)  # "high" allows TF32 on a GPU
    torch.backends.cudnn.allow_tf32 = args.matmul_precision != "highest"  # for the GRU
    # "high" and "medium" are the same here: JAX's default, which allows TF32 on a GPU.
    precision = "highest" if args.matmul_precision == "highest" else "default"
    jax.config.update("jax_default_matmul_precision", precision)
    device = choose_device()
    env = VecEnv(args.env_id, args.num_envs, args.feed_back)
    spaces = {"obs_shape": env.obs_shape, "num_actions": env.num_actions}

    torch.manual_seed(args.seed)
    iteration = 0
    agent, optimizer = make_agent(args, env.obs_shape, env.num_actions, device)
    # Commit the first state to its device, as DLPack does later, so that step_fn compiles once.
    key = jax.device_put(jax.random.PRNGKey(args.seed), jax.devices(device.type)[0])
    obs, env_state = jax.jit(env.reset)(key)
    obs = to_torch(obs)
    gru_state = torch.zeros(args.num_envs, args.gru_hidden_size, device=device)
    if has_checkpoint(args, **spaces):
        checkpoint = load_checkpoint(args.resume)
        iteration = checkpoint["iteration"]
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["rng_state"])
        torch.cuda.set_rng_state_all(checkpoint["cuda_rng_states"])
        obs = checkpoint["obs"].to(device)
        gru_state = checkpoint["gru_state"].to(device)
        env_state = to_env_state(checkpoint["env_state"], like=env_state)
    packages = ["torch", "jax", "jaxlib", "gymnax", "numpy"]
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    num_threads = torch.get_num_threads()
    log = RunLog(args, iteration, packages, device=device_name, num_threads=num_threads, **spaces)

    step_fn = jax.jit(env.step)
    policy_fn = partial(policy, agent)
    steps = iteration * args.update_epochs * args.num_minibatches  # optimizer steps so far
    factor_fn = partial(learning_rate_factor, args=args)
    scheduler = LambdaLR(optimizer, factor_fn, last_epoch=steps - 1)
    while iteration < args.num_iterations:
        start = time.perf_counter()
        obs, gru_state, env_state, storage = rollout(
            policy_fn, obs, gru_state, env_state, step_fn, env, args
        )
        middle = 0.0
        if args.sync_for_timing:
            if device.type == "cuda":
                torch.cuda.synchronize()  # sync
            middle = time.perf_counter()
        metrics = update(agent, optimizer, scheduler, storage, args)
        values = torch.stack([torch.as_tensor(x, device=device) for x in metrics.values()])
        metrics = dict(zip(metrics, values.tolist(), strict=True))  # sync
        log.write(iteration, metrics, start, middle)
        iteration += 1
        if log.must_save(iteration):
            checkpoint = {
                "iteration": iteration,
                "agent": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng_state": torch.get_rng_state(),
                "cuda_rng_states": torch.cuda.get_rng_state_all()[:1],  # of the GPU, if any
                "obs": obs,
                "gru_state": gru_state,
                "env_state": to_torch(jax.tree.leaves(env_state)),
            }
            save_checkpoint(log.dir, checkpoint)
            log.update_info(iteration=iteration)
            if log.stopped_by:  # stop only after saving, so that no iteration is lost
                break
    log.close()


# === Checkpoint =================================================================================
def save_checkpoint(folder: Path, checkpoint: dict) -> None:
    """Write a checkpoint atomically: a killed run keeps either the old one or the new one."""
    new = folder / "checkpoint.new"
    torch.save(checkpoint, new)  # sync
    os.replace(new, folder / "checkpoint.pt")


def load_checkpoint(folder: str | Path) -> dict:
    """Load a checkpoint onto the CPU. weights_only prevents the file from running code."""
    return torch.load(Path(folder, "checkpoint.pt"), map_location="cpu", weights_only=True)


def to_env_state(tensors: list[torch.Tensor], like: EnvState) -> EnvState:
    """Restore the environments' state from its saved tensors, on the device of `like`."""
    state = jax.tree.unflatten(jax.tree.structure(like), [x.numpy() for x in tensors])
    return jax.device_put(state, like.key.device)


def load_policy(folder: str | Path, seed: int = 0) -> Callable[..., np.ndarray]:
    """Load a trained policy: policy(obs) returns the most likely action for each observation.

    obs (N, *obs_shape) and the actions (N,) are NumPy arrays. policy(obs, sample=True) samples the
    actions instead, as in training. Each call is one step of N environments. The
    GRU states are kept for the next call, but reset where starts (N,) is True (a new episode).
    """
    info, args = load_info(folder)
    agent = Agent(info["obs_shape"], args.hidden_sizes, info["num_actions"], args.gru_hidden_size)
    agent.load_state_dict(load_checkpoint(folder)["agent"])
    rng = np.random.default_rng(seed)
    gru_state = torch.zeros(0, args.gru_hidden_size)

    @torch.no_grad()
    def policy(obs, starts=None, sample=False):
        nonlocal gru_state
        if len(gru_state) != len(obs):  # on the first call, or when N changes
            gru_state = torch.zeros(len(obs), args.gru_hidden_size)
        if starts is not None:
            starts = np.reshape(starts, len(obs)).astype(bool)
            gru_state = reset_gru(gru_state, torch.from_numpy(starts))
        logits, _, gru_state = agent(gru_state, torch.tensor(obs))
        logits = logits.numpy()
        if sample:
            logits = logits + rng.gumbel(size=logits.shape)
        return logits.argmax(-1)

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

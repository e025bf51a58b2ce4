# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "jax==0.10.2", "gymnax==1.0.1", "six==1.17.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""PPO in compiled PyTorch for many agents at once: torch.func.vmap runs the policy and the loss.

    python more/ppo_torch_vmap.py --env-id CartPole-v1 --num-agents 8  # seeds 1 to 8

Start reading at Agent. policy(), compute_gae() and ppo_loss() are still written for one agent:
- make_agents() stacks the tensors of all agents in one module, and makes a generator for each.
- for_each() runs a function for all agents. functional_call() runs the module with the tensors of
  one agent.
- minibatch_step() differentiates the sum of all losses, which gives each agent its gradient.
- rollout() and update() draw from the generator of each agent, which vmap cannot do.
Lines marked "# sync" wait for the device.

Compare with ppo_torch_compile.py for one agent, or with ppo_linen_vmap.py for JAX.
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
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
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
from torch.func import functional_call, vmap


# === Arguments ==================================================================================
@dataclass
class Args:
    seed: int = 1  # random seed of the first agent
    num_agents: int = 8  # agents trained at once; agent k has seed + k
    env_id: str = "CartPole-v1"  # gymnax environment with discrete actions, or my_module:MyEnv
    total_timesteps: int = 819_200  # environment steps per agent, rounded down to whole rollouts
    learning_rate: float = 2.5e-4  # Adam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    num_envs: int = 32  # parallel environments per agent
    num_steps: int = 256  # steps per environment in each rollout
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 8  # minibatches per epoch
    update_epochs: int = 10  # passes over each rollout
    norm_adv: bool = True  # normalize advantages in each minibatch
    clip_coef: float = 0.2  # clipping range for the probability ratio and the value
    clip_vloss: bool = True  # clip the value loss
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # maximum global norm of the gradient
    adam_eps: float = 1e-5  # Adam's epsilon
    bootstrap_truncated: bool = True  # bootstrap truncated episodes from V(final obs), not from 0
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layer sizes of the actor and the critic
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
        for name in ("num_agents", "num_envs", "num_steps", "num_minibatches", "update_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        if not self.max_grad_norm > 0:
            raise ValueError("--max-grad-norm must be positive")
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // self.num_minibatches
        self.num_iterations = self.total_timesteps // self.batch_size
        self.num_optimizer_steps = self.num_iterations * self.update_epochs * self.num_minibatches
        if self.batch_size % self.num_minibatches != 0:
            raise ValueError(f"--num-minibatches must divide the batch size ({self.batch_size})")
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

    def __init__(self, env_id: str, num_envs: int) -> None:
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
        self.num_actions = int(space.n)
        self.obs_shape = self.env.observation_space(self.params).shape

    def reset(self, key: jax.Array) -> tuple[jax.Array, EnvState]:
        """Start all environments. Return obs (N, *obs_shape) and the state."""
        key, reset_key = jax.random.split(key)
        obs, inner = jax.vmap(self.env.reset)(jax.random.split(reset_key, self.num_envs))
        # Some environments return weakly typed arrays from reset but not from step, so a function
        # that takes them would compile twice. astype makes the types strong.
        obs, inner = jax.tree.map(lambda x: x.astype(x.dtype), (obs, inner))
        zeros = jnp.zeros(self.num_envs)
        return obs, EnvState(key, inner, zeros, zeros)

    def step(self, state: EnvState, action: jax.Array) -> tuple[jax.Array, EnvState, dict]:
        """Step with action (N,). Return obs (after any restart), the state and the results."""
        key, step_key = jax.random.split(state.key)
        keys = jax.random.split(step_key, self.num_envs)
        # gymnax restarts finished environments in the same step.
        step = jax.vmap(partial(self.env.step, params=self.params))
        obs, inner, reward, terminated, truncated, info = step(keys, state.inner, action)
        reward = reward.astype(jnp.float32)
        episode_return = state.episode_return + reward
        episode_length = state.episode_length + 1
        results = {
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "next_obs": info["final_observation"],  # before any restart; present at every step
            "episode_return": episode_return,
            "episode_length": episode_length,
        }
        done = terminated | truncated
        episode_return = jnp.where(done, 0, episode_return)
        episode_length = jnp.where(done, 0, episode_length)
        return obs, EnvState(key, inner, episode_return, episode_length), results


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

    def forward(self, obs):
        x = obs.reshape(obs.shape[0], -1).float()
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
        obs_size = math.prod(obs_shape)
        self.actor = MLP(obs_size, hidden_sizes, num_actions, output_scale=0.01)
        self.critic = MLP(obs_size, hidden_sizes, 1, output_scale=1.0)

    def get_logits(self, obs):
        return self.actor(obs)  # (B, *obs_shape) -> (B, num_actions)

    def get_value(self, obs):
        return self.critic(obs).squeeze(-1)  # (B, *obs_shape) -> (B,)

    def forward(self, obs):
        return self.get_logits(obs), self.get_value(obs)


class Adam(nn.Module):
    """Adam (Kingma & Ba 2015), implemented here so that it compiles together with the loss.

    The gradient and the moments are vectors (P,), which takes fewer kernels and less compile time.
    Every tensor has one row per agent.
    """

    count: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor

    def __init__(self, num_agents, num_params, eps, device):
        super().__init__()
        self.eps = eps
        # The count is a tensor, because a number would be a compile-time constant.
        self.register_buffer("count", torch.zeros(num_agents, 1, device=device))
        self.register_buffer("mean", torch.zeros(num_agents, num_params, device=device))
        self.register_buffer("square", torch.zeros(num_agents, num_params, device=device))

    def step(self, params, grad, learning_rate):
        """Update all P parameters in place, given their gradient (num_agents, P)."""
        beta1, beta2 = 0.9, 0.999  # as in torch.optim.Adam
        self.count.add_(1)
        self.mean.lerp_(grad, 1 - beta1)
        self.square.lerp_(grad**2, 1 - beta2)
        root = (self.square / (1 - beta2**self.count)).sqrt() + self.eps
        change = learning_rate * self.mean / (1 - beta1**self.count) / root
        for x, dx in zip(params, change.split([x[0].numel() for x in params], 1), strict=True):
            x -= dx.view_as(x)


def make_agents(args: Args, obs_shape, num_actions: int, device: torch.device):
    """Initialize the stacked parameters, the optimizer and a generator for each agent.

    Agent k gets the same random numbers as in ppo_torch_compile.py with seed + k.
    """
    agents, generators = [], []
    for seed in range(args.seed, args.seed + args.num_agents):
        torch.manual_seed(seed)
        agents.append(Agent(obs_shape, args.hidden_sizes, num_actions).to(device))
        default = torch if device.type == "cpu" else torch.cuda
        generator = torch.Generator(device)
        generator.set_state(default.get_rng_state())
        generators.append(generator)
    num_params = sum(x.numel() for x in agents[0].parameters())
    for params in zip(*(x.parameters() for x in agents), strict=True):
        params[0].data = torch.stack([x.data for x in params])
    return agents[0], Adam(args.num_agents, num_params, args.adam_eps, device), generators


def learning_rate_after(steps, args: Args) -> torch.Tensor:
    """Learning rate for each optimizer step. CleanRL changes it once per iteration instead.

    steps and the result are tensors, because numbers would be compile-time constants.
    """
    if not args.anneal_lr:
        return torch.full_like(steps, args.learning_rate)
    return args.learning_rate * (1 - steps / args.num_optimizer_steps)


def for_each(agent, function):
    """Turn function(agent, ...), written for one agent, into one for stacked inputs of all agents.

    vmap calls it once: inside, tensors have the shapes of one agent, but operations apply to all.
    """

    def call(params, *inputs):
        one_agent = partial(functional_call, agent, params)
        return function(one_agent, *inputs)

    return partial(vmap(call), dict(agent.named_parameters()))


# === Storage ====================================================================================
# Outside vmap, every field of Storage and Batch has a leading num_agents axis.
class Storage(NamedTuple):
    """A rollout: T = num_steps steps in N = num_envs environments."""

    obs: torch.Tensor  # (T, N, *obs_shape), input of the policy
    action: torch.Tensor  # (T, N) int32
    logprob: torch.Tensor  # (T, N)
    reward: torch.Tensor  # (T, N); this and the fields below result from the action
    terminated: torch.Tensor  # (T, N) bool
    truncated: torch.Tensor  # (T, N) bool
    next_obs: torch.Tensor  # (T, N, *obs_shape), before any restart
    episode_return: torch.Tensor  # (T, N), including this step
    episode_length: torch.Tensor  # (T, N)


class Batch(NamedTuple):
    """Inputs of the loss; B is batch_size or minibatch_size."""

    obs: torch.Tensor  # (B, *obs_shape)
    action: torch.Tensor  # (B,) int32
    logprob: torch.Tensor  # (B,)
    value: torch.Tensor  # (B,)
    advantage: torch.Tensor  # (B,)
    target: torch.Tensor  # (B,), the lambda-return that the critic learns


# === Rollout ====================================================================================
def rollout(policy_fn, obs, env_state, step_fn, generators, env: VecEnv, args: Args):
    """Run the policy for num_steps steps. Return the next obs, the env_state and the Storage."""
    # Drawing the noise of all steps at once is faster than drawing it at each step. A
    # torch.distributions.Categorical would wait for the device to check its inputs.
    shape = (args.num_agents, args.num_steps, args.num_envs, env.num_actions)
    noise = torch.empty(shape, device=obs.device)
    for agent_noise, generator in zip(noise, generators, strict=True):
        agent_noise.exponential_(generator=generator)
    noise.log_().neg_()  # -log(exponential) is Gumbel noise

    steps, results = [], []
    for step_noise in noise.unbind(1):
        logits, action = policy_fn(obs, step_noise)
        new_obs, env_state, result = step_fn(env_state, to_jax(action))
        steps.append((obs, action, logits))
        results.append(result)  # stacked after the loop
        obs = to_torch(new_obs)  # sync on a CPU

    # Turn one tuple per step into one tensor per field, (num_agents, T, N, ...).
    all_obs, action, logits = (torch.stack(x, 1) for x in zip(*steps, strict=True))
    logprob = logprob_of(action, logits.log_softmax(-1))
    results = to_torch(stack(results))
    return obs, env_state, Storage(all_obs, action, logprob, **results)


@jax.jit
def stack(results):
    """Stack the results of VecEnv.step along the second axis: (num_agents, T, N, ...)."""
    return jax.tree.map(lambda *steps: jnp.stack(steps, 1), *results)


@torch.no_grad()
def policy(agent, obs, noise):
    """Sample actions: obs, noise (N, num_actions) -> logits (N, num_actions), action (N,) int32."""
    logits, _ = agent(obs)  # functional_call only runs forward(); the compiler drops the critic
    action = (logits + noise).argmax(-1)  # Gumbel-max trick: samples softmax(logits)
    return logits, action.int()


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
    logits, value = agent(batch.obs)
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


# === Update =====================================================================================
def update(agent, optimizer, epoch_fn, storage: Storage, generators, args: Args):
    """Train in place for update_epochs epochs on a rollout. Return metrics, (num_agents,) each."""
    learning_rate = learning_rate_after(optimizer.count, args)
    # The parameters are fixed during a rollout, so one pass at the end gives all its values.
    with torch.no_grad():
        both_obs = torch.stack([storage.obs, storage.next_obs], 1).flatten(1, 3)
        values = for_each(agent, lambda agent, obs: agent(obs)[1])(both_obs)
    value, next_value = values.view(-1, 2, args.num_steps, args.num_envs).unbind(1)
    advantage = vmap(partial(compute_gae, args=args))(storage, value, next_value)
    target = advantage + value
    batch = Batch(storage.obs, storage.action, storage.logprob, value, advantage, target)
    batch = Batch(*(x.flatten(1, 2) for x in batch))

    shuffle = partial(torch.randperm, args.batch_size, device=value.device)
    losses = []
    for _ in range(args.update_epochs):
        order = torch.stack([shuffle(generator=x) for x in generators])
        losses.append(epoch_fn(order, *batch))
    metrics = {name: torch.stack([x[name] for x in losses]).mean((0, 1)) for name in losses[0]}
    metrics |= vmap(episode_statistics)(storage)
    metrics["charts/learning_rate"] = learning_rate.squeeze(1)
    error = target - value
    metrics["losses/explained_variance"] = 1 - error.var((1, 2)) / target.var((1, 2))
    norms = torch.stack([x.flatten(1).norm(dim=1) for x in agent.parameters()])
    metrics["charts/param_norm"] = norms.norm(dim=0)  # (num_agents,)
    return metrics


def epoch(minibatch_fn, args: Args, order, *batch):
    """Train in place for an epoch in `order`. Return metrics, (num_minibatches, num_agents)."""
    # Gathering once per epoch is faster than once per minibatch. order has a row for each agent.
    rows = torch.arange(args.num_agents, device=order.device)[:, None]
    shuffled = [x[rows, order].chunk(args.num_minibatches, 1) for x in batch]
    losses = [minibatch_fn(Batch(*x)) for x in zip(*shuffled, strict=True)]
    return {name: torch.stack([x[name] for x in losses]) for name in losses[0]}


def minibatch_step(agent, optimizer, minibatch: Batch, args: Args):
    """Train each agent in place on its minibatch. Return metrics, (num_agents,) each.

    This function compiles into one graph. An optimizer from torch.optim would need a second one,
    and PPO with small networks would take a tenth longer on a CPU. backward() would compile twice,
    because .grad is None at first.
    """
    loss, losses = for_each(agent, partial(ppo_loss, args=args))(minibatch)
    params = list(agent.parameters())
    # Each loss depends on the parameters of one agent only, so the gradients stay separate.
    grads = torch.autograd.grad(loss.sum(), params)
    grad = torch.cat([x.flatten(1) for x in grads], 1)
    with torch.no_grad():
        grad *= (args.max_grad_norm / (grad.norm(dim=1, keepdim=True) + 1e-6)).clip(max=1.0)
        optimizer.step(params, grad, learning_rate_after(optimizer.count, args))
    return {name: x.detach() for name, x in losses.items()}


def compile_graph(function, device):
    """Compile a function, including autograd.grad, into one graph. A graph break is an error."""
    torch._dynamo.config.trace_autograd_ops = True  # ty: ignore[invalid-assignment]
    options: dict[str, Any] = {
        "cpp_wrapper": device.type == "cpu",  # launches kernels from C++: PPO starts 3 s sooner
        "cpp.use_decompose_tanh": True,  # via exp: up to 15% faster, error of 1e-7 near 0
        "cpp.vec_isa_ok": True,  # trusts the CPU flags instead of compiling test programs
    }
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def capture(function, state):
    """Record function as a CUDA graph. Replaying it costs one launch, not one per kernel.

    function takes tensors and returns a sequence or a dict of tensors. The first call compiles and
    records it. A replay always uses the memory of the recording, so inputs are copied into it and
    outputs are cloned before the next replay overwrites them. The warm-up also runs function:
    state lists the tensors that it changes, which are restored afterwards.
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
                for _ in range(3):  # warm up three times, as in PyTorch's documentation
                    function(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            # In the default mode, a CUDA call from another thread would abort the recording.
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
    """Train the agents, or continue a run."""
    torch.set_float32_matmul_precision(args.matmul_precision)  # "high" allows TF32 on a GPU
    # "high" and "medium" are the same here: JAX's default, which allows TF32 on a GPU.
    precision = "highest" if args.matmul_precision == "highest" else "default"
    jax.config.update("jax_default_matmul_precision", precision)
    device = choose_device()
    env = VecEnv(args.env_id, args.num_envs)
    spaces = {"obs_shape": env.obs_shape, "num_actions": env.num_actions}

    iteration = 0
    agent, optimizer, generators = make_agents(args, env.obs_shape, env.num_actions, device)
    # Commit the first state to its device, as DLPack does later, so that step_fn compiles once.
    seeds = np.arange(args.seed, args.seed + args.num_agents, dtype=np.uint32)
    keys = jax.device_put(jax.vmap(jax.random.PRNGKey)(seeds), jax.devices(device.type)[0])
    obs, env_state = jax.jit(jax.vmap(env.reset))(keys)
    obs = to_torch(obs)
    if has_checkpoint(args, **spaces):
        checkpoint = load_checkpoint(args.resume)
        iteration = checkpoint["iteration"]
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        for generator, state in zip(generators, checkpoint["generators"], strict=True):
            generator.set_state(state.clone())  # clone: PyTorch 2.13 crashes if state is a view
        obs = checkpoint["obs"].to(device)
        env_state = to_env_state(checkpoint["env_state"], like=env_state)
    packages = ["torch", "jax", "jaxlib", "gymnax", "numpy"]
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    num_threads = torch.get_num_threads()
    log = RunLogs(args, iteration, packages, device=device_name, num_threads=num_threads, **spaces)

    step_fn = jax.jit(jax.vmap(env.step))
    torch.compiler.reset()  # graphs from an earlier train() would count toward the recompile limit
    # Compiled code reads the tensors of agent and optimizer on each call, but inlines numbers.
    policy_fn = compile_graph(for_each(agent, policy), device)
    minibatch_fn = compile_graph(partial(minibatch_step, agent, optimizer, args=args), device)
    epoch_fn = partial(epoch, minibatch_fn, args)  # compiling it would unroll its loop
    if device.type == "cuda":
        policy_fn = capture(policy_fn, [])
        epoch_fn = capture(epoch_fn, [*agent.parameters(), *optimizer.buffers()])
    while iteration < args.num_iterations:
        start = time.perf_counter()
        obs, env_state, storage = rollout(policy_fn, obs, env_state, step_fn, generators, env, args)
        middle = 0.0
        if args.sync_for_timing:
            if device.type == "cuda":
                torch.cuda.synchronize()  # sync
            middle = time.perf_counter()
        metrics = update(agent, optimizer, epoch_fn, storage, generators, args)
        values = torch.stack(list(metrics.values()))
        metrics = dict(zip(metrics, values.tolist(), strict=True))  # sync
        log.write(iteration, metrics, start, middle)
        iteration += 1
        if log.run.must_save(iteration):
            checkpoint = {
                "iteration": iteration,
                "agent": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
                "generators": torch.stack([x.get_state() for x in generators]),
                "obs": obs,
                "env_state": to_torch(jax.tree.leaves(env_state)),
            }
            save_checkpoints(log, checkpoint)
            log.update_info(iteration=iteration)
            if log.run.stopped_by:  # stop only after saving, so that no iteration is lost
                break
    log.close()


# === Checkpoint =================================================================================
def save_checkpoint(folder: Path, checkpoint: dict) -> None:
    """Write a checkpoint atomically: a killed run keeps either the old one or the new one."""
    new = folder / "checkpoint.new"
    torch.save(checkpoint, new)  # sync
    os.replace(new, folder / "checkpoint.pt")


def save_checkpoints(log: "RunLogs", checkpoint: dict) -> None:
    """Write a checkpoint per agent, for load_policy, and one for the whole run, for --resume."""
    tensors = checkpoint.copy()
    iteration = tensors.pop("iteration")
    for k, agent in log.agents.items():
        # clone, because torch.save writes the entire storage of a view.
        part = jax.tree.map(lambda x, k=k: x[k].clone(), tensors)
        save_checkpoint(agent.dir, part | {"iteration": iteration})
    save_checkpoint(log.dir, checkpoint)  # last: once it exists, all agents have theirs


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
    actions instead, as in training.
    """
    info, args = load_info(folder)
    if "agent" not in info:
        raise ValueError(f"{folder} has several agents. Load one, such as seed{args.seed}")
    agent = Agent(info["obs_shape"], args.hidden_sizes, info["num_actions"])
    agent.load_state_dict(load_checkpoint(folder)["agent"])
    rng = np.random.default_rng(seed)

    @torch.no_grad()
    def policy(obs, sample=False):
        logits = agent.get_logits(torch.tensor(obs)).numpy()
        if sample:
            logits = logits + rng.gumbel(size=logits.shape)
        return logits.argmax(-1)

    return policy


# === Run logs ===================================================================================
# You can stop reading here. The rest writes the run folder, with a subfolder for each agent.
class RunLogs:
    """A RunLog for each agent, and one for the whole run, with means over the agents.

    --resume uses the run's checkpoint, and evaluate.py those of the agents. An agent that diverges
    gets the status "diverged" and is no longer logged; the others continue.
    """

    def __init__(self, args: Args, iteration: int, packages: list[str], **info: Any) -> None:
        self.run = RunLog(args, iteration, packages, **info)
        self.run.steps_per_iteration *= args.num_agents
        self.dir = self.run.dir
        self.agents: dict[int, RunLog] = {}  # those that have not diverged
        for k in range(args.num_agents):
            folder = self.dir / f"seed{args.seed + k}"
            if folder.exists() and load_info(folder)[0]["status"] == "diverged":
                continue
            agent_args = replace(args, seed=args.seed + k, runs_dir=str(self.dir))
            agent_args.run_name = folder.name
            agent_args.resume = str(folder) if folder.exists() else ""
            with redirect_stdout(None):  # self.run prints one line for all agents
                agent = RunLog(agent_args, iteration, packages, agent=k, **info)
            if agent.wandb:
                agent.wandb.name = f"{self.dir.name}-{folder.name}"
            self.agents[k] = agent
        if __name__ == "__main__":  # self.run handles signals, not the RunLog of the last agent
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.run.stop)

    def write(self, iteration: int, metrics: dict, start: float, middle: float = 0.0) -> None:
        """Log an iteration of all agents. Each metric has shape (num_agents,)."""
        end = time.perf_counter()
        for k, agent in list(self.agents.items()):
            delay = time.perf_counter() - end  # exclude the time spent on logging other agents
            row = {name: x[k] for name, x in metrics.items()}
            try:
                with redirect_stdout(None):
                    agent.write(iteration, row, start + delay, middle + delay if middle else 0.0)
            except SystemExit as error:
                print(f"{agent.dir.name}: {error}", flush=True)
                del self.agents[k]
        # If all agents diverged, the means are NaN, and the whole run ends.
        values = np.array(list(metrics.values()), float)[:, list(self.agents)]
        means = np.ma.masked_invalid(values).mean(1).filled(math.nan)
        delay = time.perf_counter() - end
        row = dict(zip(metrics, means, strict=True))
        self.run.write(iteration, row, start + delay, middle + delay if middle else 0.0)

    def update_info(self, **changes: Any) -> None:
        for log in (*self.agents.values(), self.run):
            log.update_info(**changes)

    def close(self) -> None:
        for agent in self.agents.values():
            with redirect_stdout(None), suppress(SystemExit):  # self.run ends the process
                agent.close()
        self.run.close()


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

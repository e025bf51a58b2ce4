# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "jax==0.10.2", "gymnax==1.0.1", "six==1.17.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""PPO in compiled PyTorch, many agents at once: policy and loss, under torch.func.vmap.

    python more/ppo_torch_vmap.py --env-id CartPole-v1 --num-agents 8  # seeds 1 to 8

Read Agent to Training first; policy, GAE and loss are still written for one agent.
"# sync" marks a line that waits for the device. What to look at:
- make_agents stacks the tensors of all agents in one module, and keeps a generator for each.
- for_each runs a function for all agents: functional_call gives the module one agent's tensors.
- minibatch_step takes the gradient of the summed losses, which is each agent's own.
- rollout and update draw from each agent's generator, since vmap knows no random numbers.
Diff me with ppo_torch_compile.py to see what vmap asks for, with ppo_linen_vmap.py to see JAX.
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
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
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
import tyro
from gymnax.environments.spaces import Discrete
from tensorboard.summary import Writer
from torch import nn
from torch.func import functional_call, vmap


# === Arguments ==================================================================================
@dataclass
class Args:
    seed: int = 1  # seed of the first agent's random numbers
    num_agents: int = 8  # agents that train at once; agent k has seed + k
    env_id: str = "CartPole-v1"  # gymnax environment with discrete actions, or my_module:MyEnv
    total_timesteps: int = 819_200  # environment steps of each agent, in whole rollouts
    learning_rate: float = 2.5e-4  # Adam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    num_envs: int = 32  # parallel environments of each agent
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
        if self.num_agents < 1:
            raise ValueError("--num-agents must be 1 or more")
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


class Adam(nn.Module):
    """Adam (Kingma & Ba 2015), written out to compile into one graph with loss and gradient.

    All P parameters are one vector to it: fewer kernels, which compile in a third less time. What
    differs from ppo_torch_compile.py: each agent has a row of its own in the three buffers.
    """

    count: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor

    def __init__(self, num_agents, num_params, eps, device):
        super().__init__()
        self.eps = eps
        # Of count, too: a number would be compiled in.
        self.register_buffer("count", torch.zeros(num_agents, 1, device=device))
        self.register_buffer("mean", torch.zeros(num_agents, num_params, device=device))
        self.register_buffer("square", torch.zeros(num_agents, num_params, device=device))

    def step(self, params, grad, learning_rate):
        """Change the parameters in place by their gradient, (num_agents, P)."""
        beta1, beta2 = 0.9, 0.999  # as in torch.optim.Adam
        self.count.add_(1)
        self.mean.lerp_(grad, 1 - beta1)
        self.square.lerp_(grad**2, 1 - beta2)
        root = (self.square / (1 - beta2**self.count)).sqrt() + self.eps
        change = learning_rate * self.mean / (1 - beta1**self.count) / root
        for x, dx in zip(params, change.split([x[0].numel() for x in params], 1), strict=True):
            x -= dx.view_as(x)


def make_agents(args: Args, obs_shape, num_actions: int, device: torch.device):
    """Return one Agent and one Adam, of all agents' tensors stacked, and a generator for each.

    Agent k starts, and goes on drawing, as ppo_torch_compile.py does from seed + k.
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
    """The learning rate after so many optimizer steps, as tensors: numbers would be compiled in."""
    if not args.anneal_lr:
        return torch.full_like(steps, args.learning_rate)
    return args.learning_rate * (1 - steps / args.num_optimizer_steps).clip(min=0.0)


def for_each(agent, function):
    """A function(agent, ...) written for one agent -> the same for all, on stacked inputs.

    vmap runs it once: inside, each tensor looks like one agent's, and each operation works on all.
    """

    def call(params, *inputs):
        one_agent = partial(functional_call, agent, params)
        return function(one_agent, *inputs)

    return partial(vmap(call), dict(agent.named_parameters()))


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
def rollout(policy_fn, obs, env_state, step_fn, generators, env: VecEnv, args: Args):
    """Act for num_steps from obs (num_agents, N, obs_dim); return obs, env_state, Storage alike."""
    # Drawn for all steps at once, noise takes less time than drawn in every step.
    # A torch.distributions.Categorical in every step would wait for the device, for its checks.
    shape = (args.num_agents, args.num_steps, args.num_envs, env.num_actions)
    noise = torch.empty(shape, device=obs.device)
    for agent_noise, generator in zip(noise, generators, strict=True):
        agent_noise.exponential_(generator=generator)
    noise.log_().neg_()  # minus the log of an exponential is Gumbel

    steps, results = [], []
    for step_noise in noise.unbind(1):
        logits, action = policy_fn(obs, step_noise)
        new_obs, env_state, result = step_fn(env_state, to_jax(action))
        steps.append((obs, action, logits))
        results.append(result)  # crosses after the loop: 6 arrays, instead of 6 per step
        obs = to_torch(new_obs)  # on a CPU, sync

    # From one tuple per step to one tensor per name, (num_agents, T, N, ...).
    all_obs, action, logits = (torch.stack(x, 1) for x in zip(*steps, strict=True))
    logprob = logprob_of(action, logits.log_softmax(-1))
    result = to_torch(stack(results))
    return obs, env_state, Storage(all_obs, action, logprob, **result)


@jax.jit
def stack(results):
    """num_steps results of VecEnv.step -> one, each array (num_agents, T, N, ...)."""
    return jax.tree.map(lambda *steps: jnp.stack(steps, 1), *results)


@torch.no_grad()
def policy(agent, obs, noise):
    """(N, obs_dim), (N, num_actions) -> logits (N, num_actions), action (N,) int32."""
    logits, _ = agent(obs)  # the compiler leaves the critic out
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
def update(agent, optimizer, epoch_fn, storage: Storage, generators, args: Args):
    """Train on a rollout for update_epochs, in place; return what to log, (num_agents,) each."""
    learning_rate = learning_rate_after(optimizer.count, args)
    # Parameters do not change during a rollout, so one pass afterwards gives all its values.
    with torch.no_grad():
        both_obs = torch.stack([storage.obs, storage.next_obs], 1)
        value, next_value = for_each(agent, lambda agent, obs: agent(obs)[1])(both_obs).unbind(1)
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
    return metrics


def epoch(minibatch_fn, args: Args, order, *batch):
    """Train on a Batch in this order, in place; return losses, (num_minibatches, num_agents)."""
    rows = torch.arange(args.num_agents, device=order.device)[:, None]  # [rows, order]: of each
    shuffled = [x[rows, order].chunk(args.num_minibatches, 1) for x in batch]  # one gather an epoch
    losses = [minibatch_fn(Batch(*x)) for x in zip(*shuffled, strict=True)]
    return {name: torch.stack([x[name] for x in losses]) for name in losses[0]}


def minibatch_step(agent, optimizer, minibatch: Batch, args: Args):
    """Train each agent on its minibatch, in place; return their losses, (num_agents,).

    Gradient, clipping and Adam compile as one graph. The step of a torch.optim would be a second
    one, and backward() would compile twice, since .grad is None at first.
    """
    loss, losses = for_each(agent, partial(ppo_loss, args=args))(minibatch)
    params = list(agent.parameters())
    # No loss reads another agent's parameters, so the gradient of their sum is each one's own.
    grads = torch.autograd.grad(loss.sum(), params)
    grad = torch.cat([x.flatten(1) for x in grads], 1)
    with torch.no_grad():
        grad *= (args.max_grad_norm / (grad.norm(dim=1, keepdim=True) + 1e-6)).clip(max=1.0)
        optimizer.step(params, grad, learning_rate_after(optimizer.count, args))
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
def choose_device() -> torch.device:
    """The GPU if torch and JAX both see it; otherwise the CPU, for both."""
    torch_gpu = torch.cuda.is_available()
    jax_gpu = jax.default_backend() == "gpu"
    if torch_gpu and not jax_gpu:
        print("Only torch sees a GPU, so both use the CPU; to use the GPU install jax[cuda13].")
    if jax_gpu and not torch_gpu:
        print(
            "Only JAX sees a GPU, so both use the CPU; to use the GPU install torch, a CUDA build."
        )
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
    return torch.device("cuda" if torch_gpu and jax_gpu else "cpu")


def train(args: Args) -> None:
    """Train the agents, from the start or from a checkpoint on."""
    # The same in all frameworks: torch's "high" is TF32 on a GPU, as is JAX's "default".
    precision = "highest" if args.matmul_precision == "highest" else "default"
    jax.config.update("jax_default_matmul_precision", precision)
    torch.set_float32_matmul_precision(args.matmul_precision)
    device = choose_device()
    env = VecEnv(args.env_id, args.num_envs)
    log = RunLogs(
        args,
        framework="torch",
        compile_mode="compile, env none" if jax.config.values["jax_disable_jit"] else "compile",
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        obs_shape=env.obs_shape,
        num_actions=env.num_actions,
    )

    iteration = 0
    agent, optimizer, generators = make_agents(args, env.obs_shape, env.num_actions, device)
    # What comes by DLPack is committed to a device. If the first state were not, step_fn would
    # compile twice.
    seeds = np.arange(args.seed, args.seed + args.num_agents, dtype=np.uint32)
    keys = jax.device_put(jax.vmap(jax.random.PRNGKey)(seeds), jax.devices(device.type)[0])
    obs, env_state = jax.jit(jax.vmap(env.reset))(keys)
    obs = to_torch(obs)
    if (log.dir / "checkpoint.pt").exists():  # resumed
        checkpoint = load_checkpoint(log.dir)
        iteration = checkpoint["iteration"]
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        for generator, state in zip(generators, checkpoint["generators"], strict=True):
            generator.set_state(state.clone())  # a row in place would crash PyTorch 2.13
        obs = checkpoint["obs"].to(device)
        env_state = to_env_state(checkpoint["env_state"], like=env_state)
    log.begin(iteration)

    # To the compiler, agent, optimizer and args are constants.
    step_fn = jax.jit(jax.vmap(env.step))
    torch.compiler.reset()  # or graphs of earlier calls of train() would count towards its limit
    policy_fn = compile_graph(for_each(agent, policy), device)
    minibatch_fn = compile_graph(partial(minibatch_step, agent, optimizer, args=args), device)
    epoch_fn = partial(epoch, minibatch_fn, args)  # compiled too, it would be unrolled
    if device.type == "cuda":
        policy_fn = capture(policy_fn, [])
        epoch_fn = capture(epoch_fn, [*agent.parameters(), *optimizer.buffers()])
    while iteration < args.num_iterations:
        start = time.perf_counter()
        obs, env_state, storage = rollout(policy_fn, obs, env_state, step_fn, generators, env, args)
        if args.sync_for_timing and device.type == "cuda":
            torch.cuda.synchronize()  # sync
        middle = time.perf_counter()
        metrics = update(agent, optimizer, epoch_fn, storage, generators, args)
        values = torch.stack([*metrics.values()]).tolist()  # sync
        metrics = dict(zip(metrics, values, strict=True))
        log.write(iteration, metrics, start, middle)
        iteration += 1
        if log.must_save(iteration):
            checkpoint = {
                "iteration": iteration,
                "agent": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
                "generators": torch.stack([x.get_state() for x in generators]),
                "obs": obs,
                "env_state": to_torch(jax.tree.leaves(env_state)),
            }
            save_checkpoints(log, checkpoint)
            log.note_saved(iteration)
            if log.program.stopped_by:  # only here, after saving, so that no iteration is lost
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


def save_checkpoints(log: "RunLogs", checkpoint: dict) -> None:
    """Write each agent's part of a checkpoint, for load_policy, and the whole, to go on from."""
    tensors = checkpoint.copy()
    iteration = tensors.pop("iteration")
    for k, agent in enumerate(log.agents):
        # Cloned, since of a view torch.save writes the whole tensor.
        part = jax.tree.map(lambda x, k=k: x[k].clone(), tensors)
        save_checkpoint(agent.dir, part | {"iteration": iteration})
    save_checkpoint(log.dir, checkpoint)  # last: once it is there, so are the agents'


def load_checkpoint(folder: str | Path) -> dict:
    """What save_checkpoint wrote, on the CPU. With weights_only, a stranger's file runs no code."""
    return torch.load(Path(folder, "checkpoint.pt"), map_location="cpu", weights_only=True)


def to_env_state(tensors: list[torch.Tensor], like: EnvState) -> EnvState:
    """The environments' state from the tensors of its leaves, on the device of the state like."""
    arrays = [x.numpy() for x in tensors]
    state = jax.tree.unflatten(jax.tree.structure(like), arrays)
    return jax.device_put(state, like.key.device)


def load_policy(folder: str | Path, seed: int = 0) -> Callable[..., np.ndarray]:
    """What a run learnt, as a function: policy(obs) is the likeliest action for each obs.

    obs (N, *obs_shape) and actions (N,) are NumPy arrays, as the environment has them. With
    sample=True the actions are drawn with their probabilities, as in training, by seed.
    """
    info, args = load_info(folder)
    if "agent" not in info:
        fail(f"{folder} is of many agents: name one of them, as {folder}/seed{args.seed}")
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


# === Run logs ===================================================================================
# You may stop reading here. The rest writes the program's folder, and in it one for each agent.
class RunLogs:
    """A log for each agent, and the program's, whose metrics are means over the agents.

    Training goes on from the program's checkpoint; an agent's is for evaluate.py.
    """

    def __init__(self, args: Args, **facts: Any) -> None:
        if args.resume and "agent" in load_info(args.resume)[0]:
            fail(f"--resume: {args.resume} is one agent's; its program's folder is the one above")
        if args.seed + args.num_agents > 2**32:
            fail("--seed must lie between 0 and 2**32 - --num-agents")
        self.program = RunLog(args, **facts)
        self.program.steps *= args.num_agents
        self.dir = self.program.dir
        self.agents = []
        for k in range(args.num_agents):
            folder = self.dir / f"seed{args.seed + k}"
            own = replace(
                args,
                seed=args.seed + k,
                runs_dir=str(self.dir),
                run_name=folder.name,
                resume=str(folder) if folder.exists() else "",
            )
            self.agents.append(RunLog(own, agent=k, **facts))

    def begin(self, iteration: int) -> None:
        self.program.begin(iteration)
        for agent in self.agents:
            with redirect_stdout(None):  # one line for all, instead of one for each
                agent.begin(iteration)
            agent.give_signals_back()  # to the program's log
            agent.handlers.clear()
            if agent.wandb:
                agent.wandb.name = f"{self.dir.name}-{agent.dir.name}"

    def write(self, iteration: int, metrics: dict, start: float, middle: float) -> None:
        """Log an iteration of all; each of the metrics is (num_agents,)."""
        end = time.perf_counter()
        for k, agent in enumerate(self.agents):
            own = {name: x[k] for name, x in metrics.items()}
            late = time.perf_counter() - end  # what the logs before took is not the iteration's
            with redirect_stdout(None):
                agent.write(iteration, own, start + late, middle + late)
        values = np.array(list(metrics.values()), float)  # (metrics, num_agents)
        means = np.ma.masked_invalid(values).mean(1).filled(math.nan)
        means = dict(zip(metrics, means, strict=True))
        late = time.perf_counter() - end
        self.program.write(iteration, means, start + late, middle + late)

    def must_save(self, done: int) -> bool:
        return self.program.must_save(done)

    def note_saved(self, done: int) -> None:
        for agent in self.agents:
            agent.note_saved(done)
        self.program.note_saved(done)

    def close(self, done: int) -> None:
        for agent in self.agents:
            with redirect_stdout(None), suppress(SystemExit):  # the program's log ends the process
                agent.close(done)
        self.program.close(done)


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

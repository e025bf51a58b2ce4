# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "jax==0.10.2", "gymnax==1.0.1", "six==1.17.0",
#   "numpy==2.4.6", "tyro==1.0.17", "psutil==7.2.2", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""PPO in compiled PyTorch, many agents at once: policy and loss, under torch.func.vmap.

    python ppo_torch_vmap.py --env-id CartPole-v1 --num-agents 8  # seeds 1 to 8

The environments are gymnax's: one jitted call steps them all. Each framework reads what the other
wrote where it lies; on a GPU, nothing is copied to the host.
Each tensor gets an axis of agents in front; policy, GAE and loss are still written for one agent.
Diff me with ppo_torch_compile.py to see what vmap asks for, with ppo_linen_vmap.py to see JAX.
"""

import fcntl
import io
import json
import math
import os
import platform
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import import_module, metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_origin

if __name__ == "__main__":  # Ctrl-C during the imports shows no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves torch its share of a GPU
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # or threads that wait block a shared CPU's cores

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import torch
import tyro
from gymnax.environments.environment import Environment
from gymnax.environments.spaces import Discrete
from tensorboard.summary import Writer
from torch import nn
from torch.func import functional_call, vmap


# === Arguments ==================================================================================
@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of this experiment
    seed: int = 1  # of the first agent's weights, actions, environments and shuffles
    num_agents: int = 8  # agents that train at once; agent k has seed + k
    env_id: str = "CartPole-v1"  # gymnax environment with discrete actions, or my_module:MyEnv
    total_timesteps: int = 819_200  # environment steps of each agent, down to whole rollouts
    learning_rate: float = 2.5e-4  # Adam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0, per optimizer step
    num_envs: int = 32  # parallel environments of each agent
    num_steps: int = 256  # steps per environment and rollout
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    num_minibatches: int = 8  # minibatches per epoch
    update_epochs: int = 10  # passes over each rollout
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # clipping range of the probability ratio and of the value
    clip_vloss: bool = True  # clip the value loss
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # largest global norm of the gradient
    adam_eps: float = 1e-5  # Adam's epsilon
    bootstrap_truncated: bool = True  # a truncated episode goes on with V(final obs); off: with 0
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layers of the actor, and of the critic
    matmul_precision: Literal["high", "highest"] = "high"  # products on a GPU: TF32, or float32
    jit_env: bool = True  # compile the environments' step with XLA; off: run it op by op
    sync_for_timing: bool = False  # wait for the device after the rollout, to time both phases
    runs_dir: str = "runs"  # folder that gets one folder per run
    run_name: str | None = None  # that folder's name; default {env_id}__{exp_name}__{seed}__{time}
    track: bool = False  # log to Weights & Biases too, which reads WANDB_PROJECT, WANDB_MODE, ...
    save_every: int = 0  # iterations between checkpoints; 0: only where training ends or is stopped
    resume: str | None = None  # folder of a stopped run to go on with, by its own arguments

    def __post_init__(self) -> None:
        """Raise ValueError, one sentence on the command line, where a value cannot work."""

        def check(name: str, ok: bool, rule: str) -> None:
            if not ok:
                raise ValueError(f"--{name.replace('_', '-')} {rule}, not {getattr(self, name)}")

        if self.resume is not None and self.run_name is None:
            return  # main replaces these by the checkpoint's, which have a run_name
        check("num_agents", 0 < self.num_agents <= 4096, "must lie between 1 and 4096")
        for name in ("num_envs", "num_steps", "num_minibatches", "update_epochs"):
            check(name, 0 < getattr(self, name) < 2**31, "must lie between 1 and 2**31 - 1")
        coefs = ("learning_rate", "clip_coef", "ent_coef", "vf_coef", "max_grad_norm", "adam_eps")
        for name in (*coefs, "save_every"):
            check(name, 0 <= getattr(self, name) < math.inf, "must be 0 or more")
        for name in ("gamma", "gae_lambda"):
            check(name, 0 <= getattr(self, name) <= 1, "must lie between 0 and 1")
        last = 2**32 - self.num_agents
        check("seed", 0 <= self.seed <= last, f"must lie between 0 and {last}")
        widths = all(0 < size <= 2**16 for size in self.hidden_sizes or (0,))
        check("hidden_sizes", widths, "must lie between 1 and 65536")
        VecEnv(self.env_id, self.num_envs)  # train makes it; here an unknown one is refused

        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size, rest = divmod(self.batch_size, self.num_minibatches)
        check("num_minibatches", rest == 0, f"must divide num_envs * num_steps = {self.batch_size}")
        self.num_iterations = self.total_timesteps // self.batch_size
        self.num_optimizer_steps = self.num_iterations * self.update_epochs * self.num_minibatches
        rule = f"must be at least {self.batch_size}, for fewer than 2**31 optimizer steps"
        check("total_timesteps", 0 < self.num_optimizer_steps < 2**31, rule)

        stem = f"{self.env_id}__{self.exp_name}__{self.seed}".replace("/", "-").replace(":", "-")
        name = self.run_name = self.run_name or f"{stem}__{time.time():.0f}"
        one = Path(name).name == name != ".." and name.isprintable()
        check("run_name", one, "must be the name of one folder in --runs-dir")
        check("runs_dir", self.runs_dir.isprintable(), "must be a folder's name")


# === Environment ================================================================================
class EnvState(NamedTuple):
    key: jax.Array  # split at every step
    inner: Any  # gymnax's own state; N = num_envs rows in each leaf
    episode_return: jax.Array  # (N,), of the running episode
    episode_length: jax.Array  # (N,)


@cache  # so that it is traced once
def own_environment(env_id: str) -> tuple[Any, Any]:
    """The gymnax Environment that my_module:MyEnv makes, and its parameters.

    Raise ValueError where it is unlike gymnax's: its reset and step are traced, and do not run.
    """

    def kinds(**trees: Any) -> set[str]:
        name = partial(jax.tree_util.keystr, simple=True, separator=".")
        return {f"{name(at)} {x.dtype}{[*x.shape]}" for at, x in jax.tree.leaves_with_path(trees)}

    def must(ok: bool, rule: str) -> None:
        if not ok:
            raise TypeError(rule)

    with own_code(env_id, "make a gymnax Environment") as module:
        env = getattr(module, env_id.partition(":")[2])()
        params, key = env.default_params, jax.random.PRNGKey(0)
        space, moves = env.observation_space(params), env.action_space(params)
        must(isinstance(moves, Discrete) and 0 in range(moves.n), "actions must be Discrete(n > 0)")
        obs, state = jax.eval_shape(env.reset, key)
        must(isinstance(obs, jax.ShapeDtypeStruct), f"obs must be one array, not {obs}")
        must(obs.shape == space.shape, f"obs must have observation_space's shape, {space.shape}")
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)  # not weak
        was, form = kinds(obs=obs, state=state), jax.tree.structure((obs, state))
        must("key<" not in str(was), "keys in its state must be jax.random.PRNGKey's")
        steps = [("step_env", "obs, state, reward, terminated, info")]  # called by gymnax's step,
        steps += [("step", "obs, state, reward, terminated, truncated, info")]  # which says less
        for name, values in steps if type(env).step is Environment.step else steps[1:]:
            result = tuple(jax.eval_shape(getattr(env, name), key, state, jnp.int32(0), params))
            must(len(result) == len(values.split()), f"{name} must return {values}")
            now = kinds(obs=result[0], state=result[1])
            must(was == now, f"reset returns {sorted(was - now)}, but {name} {sorted(now - was)}")
            must(form == jax.tree.structure(result[:2]), f"reset and {name} must build state alike")
        must(getattr(result[2], "shape", None) == (), "reward must be one number")
        end, final = kinds(x=result[3:5]), result[5].get("final_observation")
        must(end == {"x.0 bool[]", "x.1 bool[]"}, "terminated, truncated must be one boolean each")
        must(kinds(obs=final) == kinds(obs=obs), "info must have final_observation, of obs's kind")
        return env, params


class VecEnv:
    """N = num_envs gymnax environments with flat observations; an episode's end starts the next."""

    def __init__(self, env_id: str, num_envs: int) -> None:
        try:
            make = own_environment if ":" in env_id else gymnax.make
            self.env, self.params = make(env_id)
            self.num_actions = self.env.action_space(self.params).n
            self.obs_shape = self.env.observation_space(self.params).shape
        except (ValueError, AttributeError, OSError) as error:  # unknown, continuous, not at hand
            if ":" in env_id:
                raise
            known = f"be one of {', '.join(gymnax.registered_envs)}, and not {env_id}"
            raise ValueError(f"--env-id must have discrete actions and {known}") from error
        self.num_envs, self.obs_dim = num_envs, math.prod(self.obs_shape)

    def reset(self, key: jax.Array) -> tuple[jax.Array, EnvState]:
        """Start every environment; return obs (N, obs_dim) and the state."""
        key, reset_key = jax.random.split(key)
        obs, inner = jax.vmap(self.env.reset)(jax.random.split(reset_key, self.num_envs))
        # astype drops weak types: some environments reset to them and step to others, and whatever
        # takes the state would compile again at its second call.
        inner = jax.tree.map(lambda x: x.astype(x.dtype), inner)
        zeros = jnp.zeros(self.num_envs)
        return self.flatten(obs), EnvState(key, inner, zeros, zeros)

    def step(self, state: EnvState, action: jax.Array) -> tuple[jax.Array, EnvState, dict]:
        """Take action (N,) int32; return obs after any restart, state, what happened by name."""
        key, step_key = jax.random.split(state.key)
        keys = jax.random.split(step_key, self.num_envs)
        step = jax.vmap(lambda *x: self.env.step(*x, self.params))
        obs, inner, reward, terminated, truncated, info = step(keys, state.inner, action)
        reward, next_obs = reward.astype(jnp.float32), self.flatten(info["final_observation"])
        total, length = state.episode_return + reward, state.episode_length + 1
        result = {"reward": reward, "terminated": terminated, "truncated": truncated}
        result |= {"next_obs": next_obs, "episode_return": total, "episode_length": length}
        done = terminated | truncated
        state = EnvState(key, inner, jnp.where(done, 0, total), jnp.where(done, 0, length))
        return self.flatten(obs), state, result

    def flatten(self, obs: jax.Array) -> jax.Array:
        return obs.reshape(self.num_envs, self.obs_dim).astype(jnp.float32)


def to_torch(arrays):
    """Views of JAX arrays, not copies. Never write to one: JAX believes its arrays immutable.

    On a CPU this waits for JAX (sync); on a GPU torch's stream does, not the host. JAX uses the
    memory again once the view is gone, without waiting for torch: keep it until torch has read it.
    """
    return jax.tree.map(torch.from_dlpack, arrays)


def to_jax(tensor):
    """A view of a tensor for JAX, not a copy. Never write to it again: JAX may read it later."""
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
    def __init__(self, obs_dim, hidden_sizes, num_actions):
        super().__init__()
        self.actor = MLP(obs_dim, hidden_sizes, num_actions, output_scale=0.01)
        self.critic = MLP(obs_dim, hidden_sizes, 1, output_scale=1.0)

    def get_logits(self, obs):
        return self.actor(obs)  # (..., obs_dim) -> (..., num_actions)

    def get_value(self, obs):
        return self.critic(obs).squeeze(-1)  # (..., obs_dim) -> (...)

    def forward(self, obs):
        return self.get_logits(obs), self.get_value(obs)


class Adam(NamedTuple):
    mean: torch.Tensor  # one entry per parameter, (P,)
    square: torch.Tensor  # (P,)
    count: torch.Tensor  # of steps; not a number, which would be compiled in


def make_agent(args: Args, env: VecEnv, device: torch.device):
    """Initialise the parameters and Adam."""
    agent = Agent(env.obs_dim, args.hidden_sizes, env.num_actions).to(device)
    mean, square = torch.zeros(2, sum(x.numel() for x in agent.parameters()), device=device)
    return agent, Adam(mean, square, torch.tensor(0, device=device))


def make_agents(args: Args, env: VecEnv, device: torch.device):
    """Return one Agent and one Adam, of all agents' tensors stacked, and a generator for each.

    Agent k starts, and goes on drawing, as ppo_torch_compile.py does from seed + k.
    """
    agents, adams, generators = [], [], []
    for seed in range(args.seed, args.seed + args.num_agents):
        torch.manual_seed(seed)
        agent, adam = make_agent(args, env, device)
        agents.append(agent)
        adams.append(adam)
        generators.append(torch.Generator(device))
        default = torch if device.type == "cpu" else torch.cuda
        generators[-1].set_state(default.get_rng_state())
    for params in zip(*(x.parameters() for x in agents), strict=True):
        params[0].data = torch.stack([x.data for x in params])
    return agents[0], Adam(*map(torch.stack, zip(*adams, strict=True))), generators


def for_each(agent, function, **constants):
    """A function(agent, ...) written for one agent -> the same for all, on stacked inputs.

    vmap runs it once: inside, each tensor looks like one agent's, and each operation works on all.
    """

    def call(params, *inputs):
        return function(partial(functional_call, agent, params), *inputs, **constants)

    return partial(vmap(call), dict(agent.named_parameters()))


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
def rollout(policy_fn, obs, env_state, step_fn, generators, env: VecEnv, args: Args):
    """Act for num_steps from obs (num_agents, N, obs_dim); return obs, env_state, Storage alike."""
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

    all_obs, action, logits = (torch.stack(x, 1) for x in zip(*steps, strict=True))
    logprob = log_prob_of(action, logits.log_softmax(-1))
    return obs, env_state, Storage(all_obs, action, logprob, **to_torch(stack(results)))


@jax.jit
def stack(results):
    """num_steps results of VecEnv.step -> one, each array (num_agents, T, N, ...)."""
    return jax.tree.map(lambda *steps: jnp.stack(steps, 1), *results)


@torch.no_grad()
def policy(agent, obs, noise):
    """(N, obs_dim), (N, num_actions) -> logits (N, num_actions), action (N,) int32."""
    logits, _ = agent(obs)  # the compiler leaves the critic out
    action = (logits + noise).argmax(-1)  # Gumbel trick: a draw from softmax(logits)
    return logits, action.int()


def log_prob_of(action, log_probs):
    """(...), (..., num_actions) -> (...)."""
    return log_probs.gather(-1, action[..., None].long()).squeeze(-1)


# === GAE ========================================================================================
def compute_gae(storage: Storage, value, next_value, args: Args) -> torch.Tensor:
    """Advantages (T, N) from V(obs) and V(next_obs), each (T, N) (Schulman et al. 2016, eq. 16).

    After a termination the future is worth 0, after a truncation V(next_obs); across neither do
    advantages flow from one episode into the one before.
    """
    done = storage.terminated | storage.truncated
    no_future = storage.terminated if args.bootstrap_truncated else done
    delta = storage.reward + args.gamma * torch.where(no_future, 0.0, next_value) - value
    decay = torch.where(done, 0.0, args.gamma * args.gae_lambda)

    advantage = [torch.zeros_like(delta[0])]
    for step_delta, step_decay in zip(delta.flip(0), decay.flip(0), strict=True):
        advantage.append(step_delta + step_decay * advantage[-1])
    return torch.stack(advantage[:0:-1])


# === Loss =======================================================================================
def ppo_loss(agent, batch: Batch, args: Args):
    """PPO's clipped loss (Schulman et al. 2017, eq. 9), and (5,): its parts, KL, clip fraction."""
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
    approx_kl = (ratio - 1 - log_ratio).mean()
    clip_fraction = (abs(ratio - 1) > args.clip_coef).float().mean()
    return loss, torch.stack([policy_loss, value_loss, entropy, approx_kl, clip_fraction]).detach()


# === Update =====================================================================================
METRICS = (
    *("charts/episodes", "charts/episodic_return", "charts/episodic_return_min"),
    *("charts/episodic_return_max", "charts/episodic_length", "charts/episodic_length_min"),
    *("charts/episodic_length_max", "losses/policy_loss", "losses/value_loss", "losses/entropy"),
    *("losses/approx_kl", "losses/clip_fraction", "losses/explained_variance"),
)


def update(agent, epoch_fn, storage: Storage, generators, args: Args):
    """Train on a rollout for update_epochs, in place; return METRICS, (num_agents, 13)."""
    # Parameters do not change during a rollout, so one pass afterwards gives all its values.
    with torch.no_grad():
        all_obs = torch.stack([storage.obs, storage.next_obs], 1)
        value, next_value = for_each(agent, lambda agent, obs: agent(obs)[1])(all_obs).unbind(1)
    advantage = vmap(partial(compute_gae, args=args))(storage, value, next_value)
    target = advantage + value
    batch = Batch(storage.obs, storage.action, storage.logprob, value, advantage, target)
    batch = Batch(*(x.flatten(1, 2) for x in batch))

    shuffle = partial(torch.randperm, args.batch_size, device=value.device)
    orders = [[shuffle(generator=x) for x in generators] for _ in range(args.update_epochs)]
    losses = torch.stack([epoch_fn(batch, torch.stack(order)) for order in orders])
    explained_variance = 1 - (target - value).var((1, 2)) / target.var((1, 2))
    statistics = vmap(lambda x: (*episode_statistics(x),))(storage)
    metrics = [*statistics, *losses.mean((0, 1)).unbind(1), explained_variance]
    return torch.stack(metrics, 1)


def epoch(minibatch_fn, batch: Batch, order, args: Args):
    """Train on a batch in this order, in place; return each minibatch's losses."""
    rows = torch.arange(args.num_agents, device=order.device)[:, None]  # [rows, order]: of each
    shuffled = (x[rows, order].chunk(args.num_minibatches, 1) for x in batch)
    return torch.stack([minibatch_fn(Batch(*x)) for x in zip(*shuffled, strict=True)])


def minibatch_step(agent, adam, minibatch: Batch, args: Args):
    """Train each agent on its minibatch, in place; return their losses (num_agents, 5).

    Gradient, clipping and Adam (Kingma & Ba 2015) compile as one graph. torch.optim would break it,
    and backward() would compile it twice, since .grad is None at first.
    """
    loss, losses = for_each(agent, ppo_loss, args=args)(minibatch)
    params = list(agent.parameters())
    # No loss reads another agent's parameters, so the gradient of their sum is each one's own.
    grads = torch.autograd.grad(loss.sum(), params)
    # One vector for each agent, (num_agents, P): fewer kernels, which compile in a third less time.
    grad = torch.cat([x.flatten(1) for x in grads], 1)
    with torch.no_grad():
        grad *= (args.max_grad_norm / (grad.norm(dim=1, keepdim=True) + 1e-6)).clip(max=1.0)
        count = adam.count[:, None]  # a view: what is added to it is added to adam's
        decay = 1 - count / args.num_optimizer_steps if args.anneal_lr else 1.0
        count.add_(1)
        adam.mean.lerp_(grad, 1 - 0.9)
        adam.square.lerp_(grad**2, 1 - 0.999)
        root = (adam.square / (1 - 0.999**count)).sqrt() + args.adam_eps
        change = args.learning_rate * decay * adam.mean / (1 - 0.9**count) / root
        for x, dx in zip(params, change.split([x[0].numel() for x in params], 1), strict=True):
            x -= dx.view_as(x)
    return losses


def compile_graph(function, gpu):
    """Compile a function, autograd.grad and all, into one graph: a graph break is an error."""
    torch._dynamo.config.trace_autograd_ops = True  # ty: ignore[invalid-assignment]
    options: dict[str, Any] = {
        "cpp_wrapper": not gpu,  # C++ calls the kernels: up to 11% off an update on a CPU
        "cpp.use_decompose_tanh": True,  # from exp: 12% off an update on a CPU, off by 1e-7 near 0
        "cpp.vec_isa_ok": True,  # believe the CPU's flags, and spare 6 s of test programs
    }
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def capture(function, state):
    """Record function as a CUDA graph: a replay costs one launch, not one per kernel.

    The first call compiles and records. A replay works on the memory it was recorded with: its
    inputs are copied in, its outputs cloned, since the next replay overwrites them. Warming up runs
    function for real, so the tensors of state are restored afterwards.
    """
    graph, inputs, outputs = torch.cuda.CUDAGraph(), None, None

    def replay(*new_inputs):
        nonlocal inputs, outputs
        if inputs is None:
            inputs, saved = jax.tree.map(torch.clone, (new_inputs, state))
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):  # as PyTorch's documentation has it
                    function(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            # In the default mode, a CUDA call from one of JAX's threads would end the recording.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                outputs = function(*inputs)
            with torch.no_grad():
                jax.tree.map(lambda x, y: x.copy_(y), state, saved)
        jax.tree.map(lambda x, y: x.copy_(y), inputs, new_inputs)
        graph.replay()
        return jax.tree.map(torch.clone, outputs)

    return replay


def episode_statistics(storage: Storage):
    """Of the episodes that ended, the number, and of return and length the mean, least and most."""
    done = storage.terminated | storage.truncated
    yield done.sum()
    for x in (storage.episode_return, storage.episode_length):
        yield torch.where(done, x, 0).sum() / done.sum()
        yield torch.where(done, x, torch.inf).min()
        yield torch.where(done, x, -torch.inf).max()


# === Run log ====================================================================================
# Plumbing, the same in every script: flags, metrics, checkpoints. No algorithm is in here.
def fail(reason: str) -> NoReturn:
    """End the process with a sentence about what its user can mend."""
    print("".join(x if x.isprintable() else " " for x in reason), file=sys.stderr)
    sys.exit(2)


@contextmanager
def own_code(env_id: str, duty: str) -> Generator[Any]:
    """The module of my_module:MyEnv. An error in its code is one sentence, with file and line."""
    module, _, name = env_id.partition(":")
    if not name or not all(map(str.isidentifier, module.split("."))) or module.endswith(".py"):
        form = "be a module's name, a colon and a name in it, as my_module:MyEnv"
        raise ValueError(f"--env-id must {form}, not {env_id}")
    try:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # at the end: no file there hides a package
        yield import_module(module)
    except (Exception, SystemExit) as error:
        places = [f" in {os.getcwd()} or the packages"] * isinstance(error, ModuleNotFoundError)
        for frame, line in traceback.walk_tb(error.__traceback__):
            if str(frame.f_globals.get("__name__")).split(".")[0] == module.split(".")[0]:
                places.append(f" ({frame.f_code.co_filename}, line {line})")
        text = f"{type(error).__name__}: {error}".partition("\n")[0] + "".join(places[-1:])
        raise ValueError(f"--env-id {env_id} must {duty}: {text}") from error


def main(args: Args) -> None:
    """Train by the command line's args, or go on with the run that they name."""
    if args.resume is not None:
        flags = [x.partition("=")[0].replace("_", "-") for x in sys.argv if x.startswith("--")]
        if sum(x != "--env-id" for x in flags) > 1:
            fail("--resume: the run has its arguments, so no flag may stand beside it but --env-id")
        if os.path.exists(Path(args.resume, "run.json")):
            fail(f"--resume: {args.resume} is complete")
        args, *_ = load_checkpoint(args.resume, env_id=args.env_id if "--env-id" in flags else None)
    threading.excepthook = lambda _: None  # train raises the errors of TensorBoard's thread again
    try:
        train(args)
    except OSError as error:
        fail(f"{args.runs_dir}: {error}; --resume goes on from the last checkpoint, if any")


def load_checkpoint(
    folder: str | Path, state: Any = None, env_id: str | None = None
) -> tuple[Args, dict[str, Any], Any]:
    """Return a run's Args, its checkpoint's info, and state with the saved NumPy arrays in it."""
    path, script = Path(os.path.realpath(folder), "checkpoint.npz"), Path(__file__).stem

    def read(place, x):
        name = jax.tree_util.keystr(place, simple=True, separator="/")
        array = file[name]
        if (array.shape, array.dtype.name) != (x.shape, str(x.dtype).removeprefix("torch.")):
            raise ValueError(f"{name} is {array.dtype.name} {array.shape}")
        return array

    try:
        with np.load(path, allow_pickle=False) as file:  # so a stranger's file runs no code
            info = json.loads(file["info"].item())
            if info["script"] != script:
                raise ValueError(f"it is one of {info['script']}.py")
            own = info["args"] | {"hidden_sizes": tuple(info["args"]["hidden_sizes"])}
            for name, x in (own | {"run_name": None}).items():
                kind, hint = type(getattr(Args, name)), Args.__annotations__[name]
                known = hint.__args__ if get_origin(hint) is Literal else [x]
                if x not in known or (type(x) is not kind and (kind, type(x)) != (float, int)):
                    raise ValueError(f"its {name} is {x}")
            name = own["env_id"]
            if env_id != name and (env_id or ":" in name):
                rule = "which is code: to run it, add" if ":" in name else "so it must be"
                fail(f"{folder} was trained in {name}, {rule} --env-id {shlex.quote(name)}")
            own |= {"resume": str(folder), "runs_dir": str(path.parents[1])}
            args = Args(**own | {"run_name": path.parent.name})
            info["iteration"] = range(args.num_iterations + 1).index(info["iteration"])
            info["elapsed"], info["resumed"] = float(info["elapsed"]), [*info["resumed"]]
            return args, info, jax.tree.map_with_path(read, state)
    except Exception as error:  # a damaged file can raise anything
        code_is_wrong = str(error).startswith(f"--env-id {env_id} must")  # own_code says it
        fail(str(error) if code_is_wrong else f"{path} is no checkpoint of {script}.py: {error}")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one piece: killed at any moment, it holds all of the old or of the new."""
    partial_path = path.with_suffix(".partial")
    partial_path.unlink(missing_ok=True)  # were it a link, what it leads to would be written to
    with open(partial_path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial_path, path)


class RunLog:
    """Writes metrics and checkpoints as a run goes; run.json last, where it is complete."""

    def __init__(self, args: Args, framework: str, compile_mode: str, device: str) -> None:
        self.args, self.start, self.saving, self.signals = args, time.perf_counter(), 0.0, []
        self.steps = args.num_envs * args.num_steps  # of environments, per iteration
        now = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
        self.imports = now - (psutil.Process().create_time() - psutil.boot_time())
        self.dir, shell = Path(args.runs_dir, str(args.run_name)), subprocess.getoutput
        git = f"git -C {shlex.quote(str(Path(__file__).parent))} describe --always --dirty"
        gpu = "nvidia-smi --format=csv,noheader 2>/dev/null --query-gpu="
        self.info: dict[str, Any] = {
            **{"args": asdict(args), "script": Path(__file__).stem},
            **{"framework": framework, "compile_mode": compile_mode, "device": device},
            **{"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "resumed": [], "wandb_id": None},
            "git_commit": shell(git + " --abbrev=40 --exclude='*' 2>/dev/null") or None,
            **{"python": platform.python_version(), "os": platform.platform()},
            "versions": {package.name: package.version for package in metadata.distributions()},
            **{"gpu": shell(gpu + "name") or None, "driver": shell(gpu + "driver_version") or None},
            "cpu": shell("lscpu | sed -n 's/^Model name: *//p'") or platform.processor(),
            **{"cores": psutil.cpu_count(logical=False), "load": os.getloadavg()[0]},
            "container": any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv"))),
        }
        try:
            self.dir.mkdir(parents=True, exist_ok=bool(args.resume))
            self.lock = os.open(self.dir, os.O_RDONLY)
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            fail(f"{self.dir} cannot be made, or is in use: {error.strerror}")

    def begin(self, **state: Any) -> tuple[Any, ...]:
        """Return the first iteration and the parts of state, as they are or as they were saved."""
        first, names = 0, list(state)  # jax.tree sorts names
        if self.args.resume:
            _, info, state = load_checkpoint(self.dir, state, self.args.env_id)
            first = info["iteration"]
            self.start -= info["elapsed"]
            self.info |= {name: info[name] for name in ("args", "started", "wandb_id")}
            self.info["resumed"] = [*info["resumed"], first]
        self.open_metrics(first)
        self.handlers = {x: signal.signal(x, self.stop) for x in (signal.SIGINT, signal.SIGTERM)}
        return first, *(state[name] for name in names)

    def open_metrics(self, first: int) -> None:
        """Open what metrics go to; of a run that goes on, keep those of the first iterations."""
        path, lines = self.dir / "metrics.jsonl", []
        if self.args.resume:
            lines = path.read_bytes().split(b"\n")  # the last is not whole
            if len(lines) <= first:
                fail(f"{path} is shorter than its checkpoint says")
            replace_file(path, b"\n".join([*lines[:first], b""]))
        self.wandb: Any = self.start_wandb() if self.args.track else None
        for row in map(json.loads, lines[self.wandb.step : first] if self.wandb else ()):
            self.wandb.log(row, step=row["iteration"])  # a kill came before W&B had sent it
        self.metrics = open(path, "a", buffering=1)
        self.tensorboard = Writer(str(self.dir))

    def start_wandb(self) -> Any:
        import wandb  # half a second that only --track pays

        sys.stdin = open(os.devnull)  # without a key, W&B must fail, not wait for one to be typed
        os.environ.setdefault("WANDB_PROJECT", "ppo-rosetta")
        own: dict[str, Any] = {"name": self.dir.name, "id": self.info["wandb_id"], "dir": self.dir}
        try:
            run = wandb.init(**own, resume="allow", reinit="create_new", config=self.info)
        except (wandb.Error, ValueError) as error:
            if not self.args.resume:
                shutil.rmtree(self.dir)
            fail(f"--track: {' '.join(str(error).split())} (WANDB_MODE=offline needs no account)")
        run.define_metric("*", step_metric="global_step")
        self.info["wandb_id"] = run.id
        return run

    def stop(self, number: Any, _: Any) -> None:
        """End after this iteration; at once at a third signal: a wrapper may send one twice."""
        self.signals.append(number)
        if len(self.signals) == 2:
            signal.signal(number, self.handlers[number])

    def write(self, iteration: int, times: tuple[float, float | None, float], values) -> bool:
        """Log METRICS and times (start, rollout's end or None, end); return whether to save."""
        args, done, (start, middle, end) = self.args, iteration + 1, times
        lr = args.learning_rate * (1 - iteration / args.num_iterations if args.anneal_lr else 1)
        row: dict[str, Any] = dict(zip(METRICS, values, strict=True))
        row |= {"iteration": iteration, "global_step": done * self.steps}
        row |= {"charts/learning_rate": lr, "charts/SPS": self.steps / (end - start)}
        row |= {"time/elapsed": end - self.start, "time/iteration": end - start}
        if middle is not None:
            row |= {"time/rollout": middle - start, "time/update": end - middle}
        # JSON has no NaN: the return of no episode, and a diverged loss, are null.
        row = {name: x if math.isfinite(x) else None for name, x in row.items()}
        self.metrics.write(json.dumps(row) + "\n")
        for name, x in row.items():
            if "/" in name and x is not None:
                self.tensorboard.add_scalar(name, x, row["global_step"])
        if self.wandb:
            self.wandb.log(row, step=iteration)
        if done % math.ceil(args.num_iterations / 100) == 0:
            mean, sps = row["charts/episodic_return"], row["charts/SPS"]
            text = "no episode ended" if mean is None else f"return {mean:.1f}"
            print(f"iteration {done}/{args.num_iterations}: {text}, {sps:,.0f} steps/s", flush=True)
        due = bool(self.signals) or done == args.num_iterations
        return due or (args.save_every > 0 and done % args.save_every == 0)

    def save(self, iteration: int, **state: Any) -> None:
        """Write a checkpoint to go on from after an iteration; if a signal asks for it, end."""
        start, done, buffer = time.perf_counter(), iteration + 1, io.BytesIO()
        self.tensorboard.flush()
        os.fsync(self.metrics.fileno())  # before the checkpoint that counts on them
        name_of = partial(jax.tree_util.keystr, simple=True, separator="/")
        arrays = {name_of(place): x for place, x in jax.tree.leaves_with_path(state)}
        now = {"iteration": done, "elapsed": start - self.start}
        np.savez(buffer, info=json.dumps(self.info | now), **arrays)  # sync
        replace_file(self.dir / "checkpoint.npz", buffer.getvalue())
        self.saving += time.perf_counter() - start
        if self.signals and done < self.args.num_iterations:
            self.close(128 + self.signals[0])
            own = ["--env-id", self.args.env_id] if ":" in self.args.env_id else []
            how = shlex.join([sys.orig_argv[0], sys.argv[0], "--resume", str(self.dir), *own])
            print(f"Stopped after {done} of {self.args.num_iterations} iterations. To go on: {how}")
            sys.exit(128 + self.signals[0])

    def finish(self, peak_device_bytes: int | None) -> dict[str, Any]:
        """Write run.json, and return what it holds."""
        total = time.perf_counter() - self.start
        results: dict[str, Any] = {"status": "completed", "peak_device_bytes": peak_device_bytes}
        results["durations"] = {"imports": self.imports, "total": total, "saving": self.saving}
        peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        results["peak_host_bytes"] = peak_rss * (1 if sys.platform == "darwin" else 1024)
        replace_file(self.dir / "run.json", json.dumps(self.info | results, indent=2).encode())
        if self.wandb:
            self.wandb.summary.update(results)
        self.close(0)
        for number, handler in self.handlers.items():  # not where a signal ends it: one may follow
            signal.signal(number, handler)
        print(f"written to {self.dir}")
        return self.info | results

    def close(self, exit_status: int) -> None:
        self.metrics.close()
        self.tensorboard.close()
        if self.wandb:
            self.wandb.finish(exit_status)
        os.close(self.lock)


# === Run logs =====================================================================================
class RunLogs(RunLog):
    """Logs means over the agents; each agent's own log is a run's folder inside the program's.

    To go on, the program needs its own checkpoint; an agent's is for evaluate.py.
    """

    def __init__(self, args: Args, *names: str) -> None:
        (soft, hard), files = resource.getrlimit(resource.RLIMIT_NOFILE), 2 * args.num_agents + 256
        if 0 <= hard < files:
            fail(
                f"--num-agents: {args.num_agents} agents open {files} files; ulimit -n says {hard}"
            )
        if 0 <= soft < files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        super().__init__(args, *names)

    def begin(self, **state: Any) -> tuple[Any, ...]:
        args = self.args
        if args.resume and "agent" in load_checkpoint(self.dir, None, args.env_id)[1]:
            fail(f"--resume: {self.dir} is one agent's; its program goes on from {self.dir.parent}")
        return super().begin(**state)

    def open_metrics(self, first: int) -> None:
        super().open_metrics(first)
        agents: list[RunLog] = []
        for k in range(self.args.num_agents):
            seed, agent = self.info["args"]["seed"] + k, RunLog.__new__(RunLog)
            own = {"seed": seed, "runs_dir": str(self.dir), "run_name": f"seed{seed}"}
            info = self.info | {"args": self.info["args"] | own, "agent": k}
            info["wandb_id"] = self.info["wandb_id"] and f"{self.info['wandb_id']}-{seed}"
            # Like this log, but for the lock and the signals. Links are not followed.
            vars(agent).update(vars(self) | {"dir": self.dir / f"seed{seed}", "info": info})
            agent.signals, agent.handlers = [], {}
            try:
                if not self.args.resume:
                    agent.dir.mkdir()
                agent.lock = os.open(agent.dir, os.O_RDONLY | os.O_NOFOLLOW)
            except OSError as error:
                fail(f"{agent.dir} cannot be made, or gone on with: {error.strerror}")
            agent.open_metrics(first)
            if agent.wandb:
                agent.wandb.name = f"{self.dir.name}-seed{seed}"
            agents.append(agent)
        self.agents, self.steps = agents, self.steps * len(agents)

    def write(self, iteration: int, times: tuple[float, float | None, float], values) -> bool:
        """Log METRICS, values (num_agents, 13), and times; return whether to save."""
        with redirect_stdout(io.StringIO()):  # one line for all, instead of one for each
            for agent, own in zip(self.agents, values, strict=True):
                agent.write(iteration, times, own)
        means = np.ma.masked_invalid(values).mean(0).filled(math.nan)
        return super().write(iteration, times, means.tolist())

    def save(self, iteration: int, **state: Any) -> None:
        start = time.perf_counter()
        for k, agent in enumerate(self.agents):
            agent.save(iteration, **jax.tree.map(lambda x, k=k: np.asarray(x)[k], state))  # sync
        self.saving += time.perf_counter() - start
        super().save(iteration, **state)  # last: once it is there, so are the agents'

    def finish(self, peak_device_bytes: int | None) -> dict[str, Any]:
        with redirect_stdout(io.StringIO()):
            while self.agents:  # which close() is not to close again
                self.agents.pop().finish(peak_device_bytes)
        return super().finish(peak_device_bytes)

    def close(self, exit_status: int) -> None:
        for agent in self.agents:
            agent.close(exit_status)
        super().close(exit_status)


# === Training ===================================================================================
def choose_device() -> torch.device:
    """The GPU if torch and JAX both see it; otherwise the CPU, for both."""
    torch_gpu, jax_gpu = torch.cuda.is_available(), jax.default_backend() == "gpu"
    if torch_gpu != jax_gpu:
        sees, blind = ("torch", "jax[cuda13]") if torch_gpu else ("JAX", "torch, a CUDA build")
        print(f"Only {sees} sees a GPU, so both use the CPU; to use the GPU install {blind}.")
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
    return torch.device("cuda" if torch_gpu and jax_gpu else "cpu")


def train(args: Args) -> dict[str, Any]:
    """Train the agents; return what run.json holds."""
    device = choose_device()
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    log = RunLogs(args, "torch", "compile" if args.jit_env else "compile, env none", gpu or "cpu")
    # Alike in all frameworks: TF32 on a GPU is "high" in torch, and the default in JAX.
    precision = "default" if args.matmul_precision == "high" else "highest"
    jax.config.update("jax_default_matmul_precision", precision)
    torch.set_float32_matmul_precision(args.matmul_precision)
    env = VecEnv(args.env_id, args.num_envs)
    agent, adam, generators = make_agents(args, env, device)
    # DLPack commits arrays to a device; from a state that is not, step_fn would compile twice.
    jax_device = jax.devices(device.type)[0]
    seeds = np.arange(args.seed, args.seed + args.num_agents, dtype=np.uint32)
    keys = jax.vmap(jax.random.PRNGKey)(seeds)
    obs, env_state = jax.jit(jax.vmap(env.reset))(jax.device_put(keys, jax_device))

    # These tensors train in place, so a checkpoint's numbers are copied into them.
    tensors = {"agent": agent.state_dict(), "adam": adam}
    states = [np.stack([x.get_state() for x in generators])]
    first, saved, states, obs, env_state = log.begin(
        tensors=tensors, generators=states, obs=obs, env_state=env_state
    )
    jax.tree.map(lambda x, y: x.copy_(torch.as_tensor(y)), tensors, saved)
    for generator, state in zip(generators, states[0], strict=True):
        generator.set_state(torch.as_tensor(state))
    obs, env_state = jax.device_put((obs, env_state), jax_device)
    obs = to_torch(obs)

    # agent, adam and args are bound: to the compiler they are constants.
    step_fn = jax.jit(jax.vmap(env.step))
    torch.compiler.reset()  # or graphs of earlier calls of train() would count towards its limit
    policy_fn = compile_graph(for_each(agent, policy), gpu)
    minibatch_fn = compile_graph(partial(minibatch_step, agent, adam, args=args), gpu)
    epoch_fn = partial(epoch, minibatch_fn, args=args)  # compiled too, it would be unrolled
    if gpu:
        policy_fn = capture(policy_fn, ())
        epoch_fn = capture(epoch_fn, (list(agent.parameters()), adam))

    with jax.disable_jit(not args.jit_env):
        for iteration in range(first, args.num_iterations):
            start = time.perf_counter()
            obs, env_state, storage = rollout(
                policy_fn, obs, env_state, step_fn, generators, env, args
            )
            if args.sync_for_timing and gpu:
                torch.cuda.synchronize()  # sync
            middle = time.perf_counter() if args.sync_for_timing else None
            metrics = update(agent, epoch_fn, storage, generators, args)
            metrics = metrics.tolist()  # sync, and the iteration's only transfer to the host
            if log.write(iteration, (start, middle, time.perf_counter()), metrics):
                on_host = jax.tree.map(torch.Tensor.cpu, {"tensors": tensors, "obs": obs})  # sync
                states = [np.stack([x.get_state() for x in generators])]
                log.save(iteration, **on_host, generators=states, env_state=env_state)
    jax_peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return log.finish(torch.cuda.max_memory_allocated() + jax_peak if gpu else None)


if __name__ == "__main__":
    main(tyro.cli(Args))

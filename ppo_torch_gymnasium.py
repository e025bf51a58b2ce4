# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "jax==0.10.2", "gymnasium==1.3.0",
#   "numpy==2.4.6", "tyro==1.0.17", "psutil==7.2.2", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""PPO in eager PyTorch, with environments in Gymnasium on the CPU.

    python ppo_torch_gymnasium.py --env-id CartPole-v1 --seed 1

--vectorization says what steps the environments: Gymnasium in this process, or in one per
environment (async), its own CartPole in NumPy (vector), or EnvPool, in C++.
Diff me with ppo_torch.py to see environments in JAX, with ppo_linen_gymnasium.py to see JAX.
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
import warnings
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import import_module, metadata
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_origin

if __name__ == "__main__":  # Ctrl-C during the imports shows no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # or threads that wait block a shared CPU's cores

import gymnasium
import jax
import numpy as np
import psutil
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from tensorboard.summary import Writer
from torch import nn


# === Arguments ==================================================================================
@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of this experiment
    seed: int = 1  # seed of weights, actions, environments and shuffles
    env_id: str = "CartPole-v1"  # Gymnasium environment with discrete actions; my_module:MyEnv-v0
    total_timesteps: int = 819_200  # environment steps in all, rounded down to whole rollouts
    learning_rate: float = 2.5e-4  # Adam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0, per optimizer step
    num_envs: int = 32  # parallel environments
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
    vectorization: Literal["sync", "async", "envpool", "vector"] = "sync"  # how environments step
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
        for name in ("num_envs", "num_steps", "num_minibatches", "update_epochs"):
            check(name, 0 < getattr(self, name) < 2**31, "must lie between 1 and 2**31 - 1")
        coefs = ("learning_rate", "clip_coef", "ent_coef", "vf_coef", "max_grad_norm", "adam_eps")
        for name in (*coefs, "save_every"):
            check(name, 0 <= getattr(self, name) < math.inf, "must be 0 or more")
        for name in ("gamma", "gae_lambda"):
            check(name, 0 <= getattr(self, name) <= 1, "must lie between 0 and 1")
        check("seed", 0 <= self.seed < 2**32, "must lie between 0 and 2**32 - 1")
        widths = all(0 < size <= 2**16 for size in self.hidden_sizes or (0,))
        check("hidden_sizes", widths, "must lie between 1 and 65536")
        VecEnv(self.env_id, self.num_envs, self.vectorization, self.seed)  # refuses unknown ones

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
@cache  # so that it is tried once
def own_environment(env_id: str) -> str:
    """Import the module of my_module:MyEnv-v0, which registers it, try a step, return MyEnv-v0."""
    with own_code(env_id, "register a Gymnasium environment"):
        env: Any = gymnasium.make(name := env_id.partition(":")[2])
        (first, _), space = env.reset(seed=0), env.observation_space
        obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        for x in (np.asarray(first), np.asarray(obs)) if isinstance(space, Box) else ():
            if x.shape != space.shape or not np.can_cast(x.dtype, space.dtype, "same_kind"):
                raise TypeError(f"obs must fit observation_space, {space.shape} {space.dtype}")
        _ = float(reward), bool(terminated), bool(truncated)  # each is, or an error
        env.close()
        return name


class VecEnv:
    """N = num_envs Gymnasium environments with flat observations; an episode's end starts the next.

    All of it is NumPy's, on the host. reset() makes the environments; they are closed at the end.
    """

    def __init__(self, env_id: str, num_envs: int, vectorization: str, seed: int) -> None:
        self.env_id, self.num_envs = env_id, num_envs
        self.vectorization, self.seed = vectorization, seed
        try:
            actions, observations = self.spaces()
        except ValueError:
            raise
        except Exception as error:  # unknown, a package or a display is missing, a game's file, ...
            raise ValueError(f"--env-id {env_id}: {' '.join(str(error).split())}") from error
        if not isinstance(actions, Discrete) or actions.start or not isinstance(observations, Box):
            rule = "must have discrete actions from 0 on and see arrays"
            raise ValueError(f"--env-id {rule}, not {env_id}")
        self.num_actions, self.obs_shape = int(actions.n), observations.shape
        self.obs_dim = math.prod(self.obs_shape)

    def spaces(self) -> tuple[Any, Any]:
        """Of actions and of observations; raise an error if there is no such environment."""
        if self.vectorization == "envpool":
            try:
                import envpool  # not among the first lines' packages: it brings 600 MB of games
            except ImportError as error:
                needed = "--vectorization envpool needs a package: pip install envpool==1.2.5"
                raise ValueError(needed) from error
            if self.env_id not in envpool.list_all_envs():
                raise ValueError(f"--vectorization envpool has no environment {self.env_id}")
            warnings.filterwarnings("ignore", ".*precision lowered")  # of the limits in its spaces
            spec = envpool.make_spec(self.env_id)
            return spec.action_space, spec.observation_space
        name = own_environment(self.env_id) if ":" in self.env_id else self.env_id
        if name not in gymnasium.registry:  # a package's, as MinAtar/Breakout-v0
            for package in metadata.entry_points(group="gymnasium.envs"):
                if package.name in ("__root__", name.partition("/")[0]):
                    package.load()()
        self.spec = gymnasium.spec(name)
        own_class = str(self.spec.vector_entry_point)
        if self.vectorization == "vector" and "CartPoleVectorEnv" not in own_class:
            raise ValueError(f"--vectorization vector has CartPole-v1 only, not {self.env_id}")
        env = gymnasium.make(self.spec)
        env.close()
        return env.action_space, env.observation_space

    def reset(self, num_steps: int) -> np.ndarray:
        """Make and start every environment, for num_steps steps each; return obs (N, obs_dim)."""
        # Not seed + i: runs with seeds 1 and 2 would share all environments but one. 31 bits each.
        seeds = (np.random.SeedSequence(self.seed).generate_state(self.num_envs) >> 1).tolist()
        how = self.vectorization
        if how == "envpool":
            import envpool

            self.envs: Any = envpool.make_gymnasium(self.env_id, num_envs=self.num_envs, seed=seeds)
            obs, _ = self.envs.reset()
        elif how == "vector":
            mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
            self.envs = gymnasium.make_vec(self.spec, self.num_envs, mode)
            obs, _ = self.envs.reset(seed=seeds[0])
        else:
            mode = gymnasium.vector.AutoresetMode.DISABLED
            own: dict[str, Any] = {"autoreset_mode": mode, "copy": False}
            if how == "async":  # not by fork: JAX and torch have threads
                own |= {"context": "forkserver", "worker": async_worker}
            self.envs = gymnasium.make_vec(self.spec, self.num_envs, how, vector_kwargs=own)
            obs, _ = self.envs.reset(seed=seeds)
        weakref.finalize(self, self.envs.close)  # also where a signal or an error ends the process
        self.episode_return = np.zeros(self.num_envs, np.float32)  # of the running episode
        self.episode_length = np.zeros(self.num_envs, np.float32)
        # All actions taken, for replay; a checkpoint holds them.
        dtype = np.min_scalar_type(self.num_actions - 1)
        self.actions, self.count = np.zeros((num_steps, self.num_envs), dtype), 0
        return self.flatten(obs)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Take action (N,) of integers; return obs after any restart, and what happened by name."""
        self.actions[self.count] = action
        self.count += 1
        raw_obs, raw_reward, terminated, truncated, _ = self.envs.step(action.astype(np.int64))
        reward, next_obs = raw_reward.astype(np.float32), self.flatten(raw_obs)
        total, length = self.episode_return + reward, self.episode_length + 1
        result = {"reward": reward, "terminated": terminated, "truncated": truncated}
        result |= {"next_obs": next_obs, "episode_return": total, "episode_length": length}
        done = terminated | truncated
        self.episode_return, self.episode_length = np.where(done, 0, (total, length))
        obs = next_obs
        if done.any():  # at once: left to themselves, they would spend their next step on it
            obs = next_obs.copy()
            obs[done] = self.restart(done)
        return obs, result

    def restart(self, done: np.ndarray) -> np.ndarray:
        """Start anew where done (N,); return the obs of those."""
        if self.vectorization != "vector":
            obs, _ = self.envs.reset(options={"reset_mask": done})
            return self.flatten(obs if self.vectorization == "envpool" else obs[done])
        # Gymnasium's own CartPoles can start all anew only, so the others get their state back.
        envs = self.envs.unwrapped
        state, steps = envs.state, envs.steps
        obs, _ = envs.reset()
        envs.state, envs.steps = np.where(done, envs.state, state), np.where(done, 0, steps)
        return self.flatten(obs[done])

    def replay(self, actions: np.ndarray, obs: np.ndarray) -> None:
        """Bring environments just reset to where a stopped run saw obs (N, obs_dim) last.

        Gymnasium has no way to save an environment, but all actions (T, N) since the start, taken
        again, lead to the same state. That costs the time that the environments took before.
        """
        now = obs
        for action in actions.clip(max=self.num_actions - 1):  # a stranger's file may hold more
            now, _ = self.step(action)
        if not np.array_equal(now, obs, equal_nan=True):
            fail(f"--resume: {self.env_id} does not repeat itself, so no run in it can go on")

    def flatten(self, obs: np.ndarray) -> np.ndarray:
        return obs.reshape(len(obs), self.obs_dim).astype(np.float32)


def async_worker(*args: Any) -> None:
    """A process of --vectorization async: the parent handles signals, and this one ends with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        gymnasium.vector.async_vector_env._async_worker(*args)


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


def make_agent(args: Args, env: VecEnv, device: torch.device):
    """Initialise the parameters and Adam."""
    agent = Agent(env.obs_dim, args.hidden_sizes, env.num_actions).to(device)
    adam = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=args.adam_eps, fused=True)
    for x in agent.parameters():  # or they would be made by the first step: too late to resume
        moments = {"exp_avg": torch.zeros_like(x), "exp_avg_sq": torch.zeros_like(x)}
        adam.state[x] = {"step": torch.zeros((), device=device), **moments}
    return agent, adam


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
def rollout(policy_fn, obs, env: VecEnv, args: Args):
    """Act for num_steps from obs (N, obs_dim); return the obs to go on from, Storage."""
    noise = torch.empty(args.num_steps, args.num_envs, env.num_actions, device=obs.device)
    noise.exponential_().log_().neg_()  # minus the log of an exponential is Gumbel

    steps, results = [], []
    for step_noise in noise:
        logits, action = policy_fn(obs, step_noise)
        new_obs, result = env.step(action.cpu().numpy())  # sync
        steps.append((obs, action, logits))
        results.append(result)  # crosses after the loop: 6 arrays, instead of 6 per step
        obs = torch.from_numpy(new_obs).to(obs.device)

    all_obs, action, logits = map(torch.stack, zip(*steps, strict=True))
    logprob = log_prob_of(action, logits.log_softmax(-1))
    result = jax.tree.map(lambda *x: torch.from_numpy(np.stack(x)).to(obs.device), *results)
    return obs, Storage(all_obs, action, logprob, **result)


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


def update(agent, epoch_fn, storage: Storage, args: Args):
    """Train on a rollout for update_epochs, in place; return the METRICS."""
    # Parameters do not change during a rollout, so one pass afterwards gives all its values.
    with torch.no_grad():
        value, next_value = agent.get_value(torch.stack([storage.obs, storage.next_obs]))
    advantage = compute_gae(storage, value, next_value, args)
    target = advantage + value
    batch = Batch(storage.obs, storage.action, storage.logprob, value, advantage, target)
    batch = Batch(*(x.reshape(args.batch_size, *x.shape[2:]) for x in batch))

    shuffle = partial(torch.randperm, args.batch_size, device=value.device)
    losses = torch.stack([epoch_fn(batch, shuffle()) for _ in range(args.update_epochs)])
    explained_variance = 1 - (target - value).var() / target.var()
    metrics = [*episode_statistics(storage), *losses.mean((0, 1)), explained_variance]
    return torch.stack(metrics)


def epoch(minibatch_fn, batch: Batch, order, args: Args):
    """Train on a batch in this order, in place; return each minibatch's losses."""
    shuffled = (x[order].chunk(args.num_minibatches) for x in batch)  # one gather an epoch
    return torch.stack([minibatch_fn(Batch(*x)) for x in zip(*shuffled, strict=True)])


def minibatch_step(agent, adam, counter, minibatch: Batch, args: Args):
    """Train on a minibatch, in place; counter gives the steps done so far. Return losses (5,)."""
    loss, losses = ppo_loss(agent, minibatch, args)
    adam.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    decay = 1 - next(counter) / args.num_optimizer_steps if args.anneal_lr else 1.0
    adam.param_groups[0]["lr"] = args.learning_rate * decay
    adam.step()
    return losses


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


# === Training ===================================================================================
def train(args: Args) -> dict[str, Any]:
    """Train an agent; return what run.json holds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    log = RunLog(args, "torch", "eager", gpu or "cpu")
    # Alike in all frameworks: TF32 on a GPU is "high" in torch, and the default in JAX.
    torch.set_float32_matmul_precision(args.matmul_precision)
    env = VecEnv(args.env_id, args.num_envs, args.vectorization, args.seed)
    torch.manual_seed(args.seed)
    agent, adam = make_agent(args, env, device)
    generators = [torch, torch.cuda] if gpu else [torch]
    obs = env.reset(args.num_iterations * args.num_steps)

    # These tensors train in place, so a checkpoint's numbers are copied into them.
    moments = {name: adam.state[x] for name, x in agent.named_parameters()}
    tensors = {"agent": agent.state_dict(), "adam": moments}
    states = [x.get_rng_state() for x in generators]
    first, saved, states, obs, actions = log.begin(
        tensors=tensors, generators=states, obs=obs, actions=env.actions
    )
    env.replay(actions[: first * args.num_steps], obs)
    jax.tree.map(lambda x, y: x.copy_(torch.as_tensor(y)), tensors, saved)
    for generator, state in zip(generators, states, strict=True):
        generator.set_rng_state(torch.as_tensor(state))
    obs = torch.from_numpy(obs).to(device)

    policy_fn = partial(policy, agent)
    counter = count(first * args.update_epochs * args.num_minibatches)
    epoch_fn = partial(epoch, partial(minibatch_step, agent, adam, counter, args=args), args=args)

    for iteration in range(first, args.num_iterations):
        start = time.perf_counter()
        obs, storage = rollout(policy_fn, obs, env, args)
        if args.sync_for_timing and gpu:
            torch.cuda.synchronize()  # sync
        middle = time.perf_counter() if args.sync_for_timing else None
        metrics = update(agent, epoch_fn, storage, args)
        metrics = metrics.tolist()  # sync
        if log.write(iteration, (start, middle, time.perf_counter()), metrics):
            on_host = jax.tree.map(torch.Tensor.cpu, {"tensors": tensors, "obs": obs})  # sync
            states = [x.get_rng_state() for x in generators]
            log.save(iteration, **on_host, generators=states, actions=env.actions)
    return log.finish(torch.cuda.max_memory_allocated() if gpu else None)


if __name__ == "__main__":
    main(tyro.cli(Args))

"""PPO in eager PyTorch: the environments step in JAX, and arrays cross over as views.

    python ppo_torch.py --env-id CartPole-v1 --seed 1  # 39 s on two cores of an AMD EPYC

The environments are gymnax's: one jitted call steps them all. Each framework reads what the other
wrote where it lies; on a GPU, nothing is copied to the host.
Diff me with ppo_torch_compile.py to see what compiling takes, with ppo_linen.py to see JAX.
"""

import json
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves torch its share of a GPU
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # or threads that wait block a shared CPU's cores

import gymnax
import jax
import jax.numpy as jnp
import psutil
import torch
import tyro
from tensorboard.summary import Writer
from torch import nn
from tqdm import tqdm


# === Arguments ==================================================================================
@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of this experiment
    seed: int = 1  # seed of weights, actions, environments and shuffles
    env_id: str = "CartPole-v1"  # gymnax environment with discrete actions
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
    jit_env: bool = True  # compile the environments' step with XLA; off: run it op by op
    sync_for_timing: bool = False  # wait for the device after the rollout, to time both phases
    runs_dir: str = "runs"  # folder that gets one folder per run
    run_name: str | None = None  # that folder's name; default {env_id}__{exp_name}__{seed}__{time}
    track: bool = False  # log to Weights & Biases too; WANDB_MODE=offline needs no account
    wandb_project: str = "ppo-rosetta"  # W&B project
    wandb_entity: str | None = None  # W&B user or team
    wandb_group: str | None = None  # W&B group
    notes: str = ""  # free text kept with the run

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        return self.batch_size // self.num_minibatches

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size

    def __post_init__(self) -> None:
        """Raise ValueError, one sentence on the command line, where a value cannot work."""

        def check(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ValueError(f"--{name.replace('_', '-')} {rule}, not {getattr(self, name)}")

        counts = ("total_timesteps", "num_envs", "num_steps", "num_minibatches", "update_epochs")
        for name in (*counts, "learning_rate", "clip_coef", "max_grad_norm", "adam_eps"):
            check(0 < getattr(self, name) < math.inf, name, "must be positive")
        for name in ("ent_coef", "vf_coef"):
            check(0 <= getattr(self, name) < math.inf, name, "must be 0 or more")
        for name in ("gamma", "gae_lambda"):
            check(0 <= getattr(self, name) <= 1, name, "must lie between 0 and 1")
        check(0 <= self.seed < 2**32, "seed", "must lie between 0 and 2**32 - 1")
        check(min(self.hidden_sizes, default=0) > 0, "hidden_sizes", "must be positive")
        batch = f"num_envs * num_steps = {self.batch_size}"
        divides = self.batch_size % self.num_minibatches == 0
        check(divides, "num_minibatches", f"must divide {batch}")
        check(self.num_iterations > 0, "total_timesteps", f"must be at least {batch}")
        VecEnv(self.env_id, self.num_envs)  # its ValueError names the environments that work
        stem = f"{self.env_id}__{self.exp_name}__{self.seed}"
        self.run_name = self.run_name or f"{stem}__{time.time():.0f}"
        inside = "/" not in self.run_name and self.run_name not in (".", "..")
        check(inside, "run_name", "must be the name of one folder in --runs-dir")
        new = not os.path.lexists(Path(self.runs_dir, self.run_name))
        check(new, "run_name", "must be new in --runs-dir")


# === Environment ================================================================================
class EnvState(NamedTuple):
    key: jax.Array  # split at every step
    inner: Any  # gymnax's own state; N = num_envs rows in each leaf
    episode_return: jax.Array  # (N,), of the running episode
    episode_length: jax.Array  # (N,)


class VecEnv:
    """N = num_envs gymnax environments with flat observations; an episode's end starts the next.

    ValueError for an environment that gymnax does not have, or whose actions are not discrete.
    """

    def __init__(self, env_id: str, num_envs: int) -> None:
        try:
            self.env, params = gymnax.make(env_id)
            self.num_actions = self.env.action_space(params).n
            self.obs_dim = math.prod(self.env.observation_space(params).shape)
        except (ValueError, AttributeError, OSError) as error:  # unknown, continuous, not at hand
            tested = """CartPole-v1, Acrobot-v1, MountainCar-v0, DiscountingChain-bsuite,
                MemoryChain-bsuite, UmbrellaChain-bsuite, BernoulliBandit-misc, GaussianBandit-misc,
                Asterix-MinAtar, Breakout-MinAtar, Freeway-MinAtar, SpaceInvaders-MinAtar"""
            rule = f"must have discrete actions, as these do: {' '.join(tested.split())}"
            raise ValueError(f"--env-id {rule}; not {env_id}") from error
        self.num_envs = num_envs

    def reset(self, key: jax.Array) -> tuple[jax.Array, EnvState]:
        """Start every environment; return obs (N, obs_dim) and the state."""
        key, reset_key = jax.random.split(key)
        obs, inner = jax.vmap(self.env.reset)(jax.random.split(reset_key, self.num_envs))
        # Some environments return weak types from reset and strong ones from step: without the
        # cast, the second call of every jitted function would compile it again.
        inner = jax.tree.map(lambda x: x.astype(x.dtype), inner)
        return self.flatten(obs), EnvState(key, inner, *jnp.zeros((2, self.num_envs)))

    def step(self, state: EnvState, action: jax.Array) -> tuple[jax.Array, EnvState, tuple]:
        """Take action (N,) int32; return obs after any restart, the state, and the action's result.

        The result is the last six fields of Storage: next_obs is before any restart, and
        episode_return and episode_length count up to and with this step.
        """
        key, step_key = jax.random.split(state.key)
        keys = jax.random.split(step_key, self.num_envs)
        step = jax.vmap(self.env.step)
        obs, inner, reward, terminated, truncated, info = step(keys, state.inner, action)
        reward, next_obs = reward.astype(jnp.float32), self.flatten(info["final_observation"])
        total, length = state.episode_return + reward, state.episode_length + 1
        done = terminated | truncated
        state = EnvState(key, inner, jnp.where(done, 0, total), jnp.where(done, 0, length))
        return self.flatten(obs), state, (reward, terminated, truncated, next_obs, total, length)

    def flatten(self, obs: jax.Array) -> jax.Array:
        return obs.reshape(self.num_envs, self.obs_dim).astype(jnp.float32)


def to_torch(arrays):
    """Views of JAX arrays, not copies. Never write to one: JAX believes its arrays immutable.

    On a CPU this waits for JAX (sync); on a GPU torch's stream does, not the host. Keep a view
    until torch has read it: then JAX may use its memory again, and does not wait for torch.
    """
    return jax.tree.map(torch.from_dlpack, arrays)


def to_jax(tensor):
    """A view of a tensor for JAX, not a copy. Never write to it again: JAX may read it later.

    On a CPU, NumPy's view costs a quarter of what DLPack's does.
    """
    return tensor.numpy() if tensor.device.type == "cpu" else jax.dlpack.from_dlpack(tensor)


# === Agent ======================================================================================
class MLP(nn.Sequential):
    def __init__(self, num_inputs, hidden_sizes, num_outputs, output_scale):
        sizes = (num_inputs, *hidden_sizes, num_outputs)
        layers = []
        for m, n in pairwise(sizes):
            layers += [nn.Linear(m, n), nn.Tanh()]
            nn.init.orthogonal_(layers[-2].weight, math.sqrt(2))
            nn.init.zeros_(layers[-2].bias)
        nn.init.orthogonal_(layers[-2].weight, output_scale)
        super().__init__(*layers[:-1])


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
    """Initialise the parameters and Adam, whose learning rate decays with each optimizer step."""
    agent = Agent(env.obs_dim, args.hidden_sizes, env.num_actions).to(device)
    num_optimizer_steps = args.num_iterations * args.update_epochs * args.num_minibatches
    adam = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=args.adam_eps, fused=True)
    decay = (lambda step: 1 - step / num_optimizer_steps) if args.anneal_lr else (lambda step: 1)
    return agent, (adam, torch.optim.lr_scheduler.LambdaLR(adam, decay))


# === Storage ====================================================================================
class Storage(NamedTuple):
    """A rollout of T = num_steps in N = num_envs environments."""

    obs: torch.Tensor  # (T, N, obs_dim), what the action was drawn from
    action: torch.Tensor  # (T, N) int32
    logprob: torch.Tensor  # (T, N)
    reward: torch.Tensor  # (T, N), the result of the action, as everything below
    terminated: torch.Tensor  # (T, N) bool
    truncated: torch.Tensor  # (T, N) bool
    next_obs: torch.Tensor  # (T, N, obs_dim)
    episode_return: torch.Tensor  # (T, N)
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
def rollout(policy_fn, obs, env_state, step_fn, stack_fn, env: VecEnv, args: Args):
    """Act for num_steps from obs (N, obs_dim); return the obs to go on from, env_state, Storage."""
    noise = torch.empty(args.num_steps, args.num_envs, env.num_actions, device=obs.device)
    noise.exponential_().log_().neg_()  # Gumbel

    steps, results = [], []
    for step_noise in noise:
        logits, action = policy_fn(obs, step_noise)
        new_obs, env_state, result = step_fn(env_state, to_jax(action))
        steps.append((obs, action, logits))
        results.append(result)  # crosses after the loop: 6 arrays, instead of 6 per step
        obs = to_torch(new_obs)

    all_obs, action, logits = map(torch.stack, zip(*steps, strict=True))
    logprob = select(logits.log_softmax(-1), action)
    return obs, env_state, Storage(all_obs, action, logprob, *to_torch(stack_fn(results)))


def stack(results):
    """num_steps results of VecEnv.step -> one, each array (T, N, ...)."""
    return jax.tree.map(lambda *steps: jnp.stack(steps), *results)


@torch.no_grad()
def policy(agent, obs, noise):
    """(N, obs_dim), (N, num_actions) -> logits (N, num_actions), action (N,) int32."""
    logits = agent.get_logits(obs)
    action = (logits + noise).argmax(-1)  # Gumbel trick: a draw from softmax(logits)
    return logits, action.int()


def select(log_probs, action):
    """(..., num_actions), (...) -> (...)."""
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

    # A[t] = delta[t] + decay[t] * A[t + 1] is linear, so log2(T) parallel steps solve it.
    def later(x, steps):
        return nn.functional.pad(x[steps:], (0, 0, 0, steps))

    # advantage sums `steps` deltas, decay weighs what follows them; each turn doubles steps.
    advantage, steps = delta, 1
    while steps < args.num_steps:
        advantage = advantage + decay * later(advantage, steps)
        decay, steps = decay * later(decay, steps), 2 * steps
    return advantage


# === Loss =======================================================================================
def ppo_loss(agent, batch: Batch, args: Args):
    """PPO's clipped loss (Schulman et al. 2017, eq. 9), and (5,): its parts, KL, clip fraction."""
    logits, value = agent(batch.obs)
    log_probs = logits.log_softmax(-1)
    log_ratio = select(log_probs, batch.action) - batch.logprob
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
def update(agent, minibatch_fn, storage: Storage, args: Args):
    """Train on a rollout for update_epochs, in place; return the METRICS."""
    # Parameters do not change during a rollout, so one pass afterwards gives all its values.
    with torch.no_grad():
        value, next_value = agent.get_value(torch.stack([storage.obs, storage.next_obs]))
    advantage = compute_gae(storage, value, next_value, args)
    target = advantage + value
    batch = Batch(storage.obs, storage.action, storage.logprob, value, advantage, target)
    batch = Batch(*(x.reshape(args.batch_size, *x.shape[2:]) for x in batch))

    losses = []
    for _ in range(args.update_epochs):
        order = torch.randperm(args.batch_size, device=value.device)
        shuffled = (x[order].chunk(args.num_minibatches) for x in batch)
        losses += [minibatch_fn(Batch(*minibatch)) for minibatch in zip(*shuffled, strict=True)]

    explained_variance = 1 - (target - value).var() / target.var()
    losses = [*torch.stack(losses).mean(0), explained_variance]
    return torch.stack([*episode_statistics(storage), *losses])


def minibatch_step(agent, optimizer, minibatch: Batch, args: Args):
    """Train on a minibatch, in place; return its losses (5,)."""
    adam, scheduler = optimizer
    loss, losses = ppo_loss(agent, minibatch, args)
    adam.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    adam.step()
    scheduler.step()
    return losses


def episode_statistics(storage: Storage):
    """Number of episodes that ended, then mean, minimum and maximum of their return and length."""
    done = storage.terminated | storage.truncated
    yield done.sum()
    for x in (storage.episode_return, storage.episode_length):
        low, high = torch.where(done, x, torch.inf).min(), torch.where(done, x, -torch.inf).max()
        yield from (torch.where(done, x, 0).sum() / done.sum(), low, high)


# === Run log ====================================================================================
METRICS = (
    *("charts/episodes", "charts/episodic_return", "charts/episodic_return_min"),
    *("charts/episodic_return_max", "charts/episodic_length", "charts/episodic_length_min"),
    *("charts/episodic_length_max", "losses/policy_loss", "losses/value_loss", "losses/entropy"),
    *("losses/approx_kl", "losses/clip_fraction", "losses/explained_variance"),
)


def shell(command: str) -> str | None:
    """What command prints when it is run beside this file, or None if that is nothing."""
    here = Path(__file__).parent
    run = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=here)
    return run.stdout.strip() or None


def process_age() -> float:
    """Seconds since this process began, as a difference of two times since boot."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock) - (psutil.Process().create_time() - psutil.boot_time())


class RunLog:
    """Writes metrics.jsonl and TensorBoard's file during training; run.json last, in one piece."""

    def __init__(self, args: Args, framework: str, compile_mode: str, device: str) -> None:
        self.args, self.start, self.imports = args, time.perf_counter(), process_age()
        self.rows: list[dict[str, Any]] = []
        kernel, query = platform.release(), "nvidia-smi --format=csv,noheader --query-gpu="
        self.info: dict[str, Any] = {
            "args": vars(args),
            "framework": framework,
            "compile_mode": compile_mode,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "git_commit": shell("git describe --always --dirty --abbrev=40 --exclude='*'"),
            "python": platform.python_version(),
            "versions": {package.name: package.version for package in metadata.distributions()},
            "device": device,
            "gpu": shell(query + "name"),
            "driver": shell(query + "driver_version"),
            "cpu": shell("lscpu | sed -n 's/^Model name: *//p'") or platform.processor(),
            "cores": psutil.cpu_count(logical=False),
            "load": os.getloadavg()[0],  # processes that ran or waited, in the minute before
            "os": platform.platform(),
            "kernel": kernel,
            "wsl2": "microsoft" in kernel.lower(),
            "container": any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv"))),
        }
        self.dir = Path(args.runs_dir, str(args.run_name))
        try:
            self.dir.mkdir(parents=True)
        except OSError as error:
            print(f"--runs-dir: {self.dir} cannot be made: {error.strerror}", file=sys.stderr)
            sys.exit(2)
        self.wandb = self.start_wandb() if args.track else None
        self.metrics = open(self.dir / "metrics.jsonl", "w")
        self.tensorboard = Writer(str(self.dir))
        self.bar = tqdm(total=args.num_iterations, file=sys.stdout, disable=not sys.stdout.isatty())

    def start_wandb(self) -> Any:
        import wandb  # half a second that only --track pays

        args, sizes = self.args, "x".join(map(str, self.args.hidden_sizes))
        commit = (self.info["git_commit"] or "no commit")[:12]
        tags = [args.exp_name, self.info["compile_mode"], args.env_id, sizes, commit]
        sys.stdin = open(os.devnull)  # without a key, W&B must fail, not wait for one to be typed
        try:
            run = wandb.init(
                project=args.wandb_project,
                entity=args.wandb_entity,
                group=args.wandb_group,
                name=args.run_name,
                notes=args.notes,
                tags=tags,
                config=self.info,
                dir=self.dir,
            )
        except wandb.Error as error:
            shutil.rmtree(self.dir)
            reason = str(error).splitlines()[0]
            print(f"--track: {reason} (WANDB_MODE=offline needs no account)", file=sys.stderr)
            sys.exit(2)
        run.define_metric("*", step_metric="global_step")
        return run

    def write(self, iteration: int, times: tuple[float, float, float], values: list[float]) -> None:
        """Log an iteration: its start, end of rollout and end, and the values of METRICS."""
        args, step, (start, middle, end) = self.args, (iteration + 1) * self.args.batch_size, times
        decay = 1 - iteration / args.num_iterations if args.anneal_lr else 1
        row: dict[str, Any] = dict(zip(METRICS, values, strict=True))
        row |= {"iteration": iteration, "global_step": step}
        row |= {"charts/learning_rate": args.learning_rate * decay}
        row |= {"charts/SPS": args.batch_size / (end - start)}
        row |= {"time/elapsed": end - self.start, "time/iteration": end - start}
        if args.sync_for_timing:
            row |= {"time/rollout": middle - start, "time/update": end - middle}
        # JSON has no NaN: the return of no episode, and a diverged loss, are null.
        row = {name: x if math.isfinite(x) else None for name, x in row.items()}
        self.rows.append(row)
        self.metrics.write(json.dumps(row) + "\n")
        self.metrics.flush()
        for name, x in row.items():
            if "/" in name and x is not None:
                self.tensorboard.add_scalar(name, x, step)
        if self.wandb:
            self.wandb.log(row)
        mean_return = row["charts/episodic_return"]
        text = "no episode ended" if mean_return is None else f"return {mean_return:.1f}"
        text += f", {row['charts/SPS']:,.0f} steps/s"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()
        if self.bar.disable and (iteration + 1) % math.ceil(args.num_iterations / 100) == 0:
            print(f"iteration {iteration + 1}/{args.num_iterations}: {text}", flush=True)

    def finish(self, peak_device_bytes: int | None) -> dict[str, Any]:
        """Write run.json, print a summary, and return what run.json holds."""
        seconds = [row["time/iteration"] for row in self.rows]
        returns = [x for row in self.rows if (x := row["charts/episodic_return"]) is not None]
        peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        durations = {
            "imports": self.imports,
            "setup": self.rows[0]["time/elapsed"] - seconds[0],
            "first_iteration": seconds[0],
            "early_iteration": fmean(seconds[1:8]) if seconds[1:8] else None,
            "steady_iteration": fmean(seconds[8:]) if seconds[8:] else None,
            "total": time.perf_counter() - self.start,
            "process": process_age(),
        }
        results = {
            "status": "completed",
            "durations": durations,
            "final_return": returns[-1] if returns else None,
            "best_return": max(returns, default=None),
            "peak_host_bytes": peak_rss if sys.platform == "darwin" else peak_rss * 1024,
            "peak_device_bytes": peak_device_bytes,
        }
        with open(self.dir / "run.json.partial", "w") as file:
            json.dump(self.info | results, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.rename(file.name, self.dir / "run.json")
        self.bar.close()
        self.metrics.close()
        self.tensorboard.close()
        if self.wandb:
            self.wandb.summary.update(results)
            self.wandb.finish()
        for name, x in {**durations, "final return": results["final_return"]}.items():
            unit = "" if name == "final return" else " s"
            print(f"{name.replace('_', ' '):>16}  " + ("none" if x is None else f"{x:.3f}{unit}"))
        print(f"{'written to':>16}  {self.dir}")
        return self.info | results


# === Training ===================================================================================
def choose_device() -> torch.device:
    """The GPU if torch and JAX both see it; otherwise the CPU, for both."""
    torch_gpu, jax_gpu = torch.cuda.is_available(), jax.default_backend() == "gpu"
    if torch_gpu and jax_gpu:
        return torch.device("cuda")
    if torch_gpu or jax_gpu:
        sees, blind = ("torch", "jax[cuda13]") if torch_gpu else ("JAX", "torch, a CUDA build")
        print(f"Only {sees} sees a GPU, so both use the CPU; to use the GPU install {blind}.")
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
    return torch.device("cpu")


def train(args: Args) -> dict[str, Any]:
    """Train an agent; return what run.json holds."""
    device = choose_device()
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    log = RunLog(args, "torch", "env.jit" if args.jit_env else "none", gpu or "cpu")
    # Set for all frameworks alike: by default JAX takes TF32 on a GPU, and torch float32.
    precision = "tensorfloat32" if args.matmul_precision == "high" else "float32"
    jax.config.update("jax_default_matmul_precision", precision)
    torch.set_float32_matmul_precision(args.matmul_precision)
    env = VecEnv(args.env_id, args.num_envs)
    torch.manual_seed(args.seed)
    agent, optimizer = make_agent(args, env, device)

    # env and args are bound: to a compiler they are constants.
    reset_fn = jax.jit(env.reset)
    step_fn = jax.jit(env.step)
    stack_fn = jax.jit(stack)
    policy_fn = partial(policy, agent)
    minibatch_fn = partial(minibatch_step, agent, optimizer, args=args)

    with jax.disable_jit(not args.jit_env):
        # DLPack commits arrays to a device; from a state that is not, step_fn would compile twice.
        key = jax.device_put(jax.random.key(args.seed), jax.devices(device.type)[0])
        obs, env_state = reset_fn(key)
        obs = to_torch(obs)
        for iteration in range(args.num_iterations):
            start = time.perf_counter()
            obs, env_state, storage = rollout(
                policy_fn, obs, env_state, step_fn, stack_fn, env, args
            )
            if args.sync_for_timing and gpu:
                torch.cuda.synchronize()  # sync
            middle = time.perf_counter()
            metrics = update(agent, minibatch_fn, storage, args)
            metrics = metrics.tolist()  # sync, and the iteration's only transfer to the host
            log.write(iteration, (start, middle, time.perf_counter()), metrics)
    jax_peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return log.finish(torch.cuda.max_memory_allocated() + jax_peak if gpu else None)


if __name__ == "__main__":
    train(tyro.cli(Args))

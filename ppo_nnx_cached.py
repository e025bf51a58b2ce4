"""PPO in JAX and Flax NNX: the rollout and the update are one cached nnx.jit each.

    python ppo_nnx_cached.py --env-id CartPole-v1 --seed 1  # 15 s on two cores of an AMD EPYC

The environments are gymnax's and step inside the jitted rollout, so an iteration is two calls.
Agent and optimizer are objects that own their arrays: nnx.cached_partial takes them apart once.
Diff me with ppo_linen.py to see what NNX changes, with ppo_nnx.py to see what caching changes.
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

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # or wide orthogonal init takes 10 times longer

import gymnax
import jax
import jax.numpy as jnp
import optax
import psutil
import tyro
from flax import nnx
from jax.nn.initializers import orthogonal
from tensorboard.summary import Writer
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
    jit: bool = True  # compile with XLA; off: run op by op
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


# === Agent ======================================================================================
class MLP(nnx.Module):
    def __init__(self, num_inputs, hidden_sizes, num_outputs, output_scale, rngs):
        sizes = (num_inputs, *hidden_sizes)
        make = partial(nnx.Linear, kernel_init=orthogonal(math.sqrt(2)), rngs=rngs)
        self.hidden = nnx.List([make(m, n) for m, n in pairwise(sizes)])
        self.output = make(sizes[-1], num_outputs, kernel_init=orthogonal(output_scale))

    def __call__(self, x):
        for layer in self.hidden:
            x = nnx.tanh(layer(x))
        return self.output(x)


class Agent(nnx.Module):
    def __init__(self, obs_dim, hidden_sizes, num_actions, rngs):
        self.actor = MLP(obs_dim, hidden_sizes, num_actions, output_scale=0.01, rngs=rngs)
        self.critic = MLP(obs_dim, hidden_sizes, 1, output_scale=1.0, rngs=rngs)

    def get_logits(self, obs):
        return self.actor(obs)  # (..., obs_dim) -> (..., num_actions)

    def get_value(self, obs):
        return self.critic(obs).squeeze(-1)  # (..., obs_dim) -> (...)

    def __call__(self, obs):
        return self.get_logits(obs), self.get_value(obs)


def make_agent(args: Args, env: VecEnv, key: jax.Array) -> tuple[Agent, nnx.Optimizer]:
    """Initialise the parameters and Adam, whose learning rate decays with each optimizer step."""
    agent = Agent(env.obs_dim, args.hidden_sizes, env.num_actions, nnx.Rngs(key))
    num_optimizer_steps = args.num_iterations * args.update_epochs * args.num_minibatches
    decay = optax.linear_schedule(args.learning_rate, 0.0, num_optimizer_steps)
    adam = optax.adam(decay if args.anneal_lr else args.learning_rate, eps=args.adam_eps)
    tx = optax.chain(optax.clip_by_global_norm(args.max_grad_norm), adam)
    tx = optax.flatten(tx)  # one vector of all parameters: less to compile, and to hand over
    return agent, nnx.Optimizer(agent, tx, wrt=nnx.Param)


# === Storage ====================================================================================
class Storage(NamedTuple):
    """A rollout of T = num_steps in N = num_envs environments."""

    obs: jax.Array  # (T, N, obs_dim), what the action was drawn from
    action: jax.Array  # (T, N) int32
    logprob: jax.Array  # (T, N)
    reward: jax.Array  # (T, N), the result of the action, as everything below
    terminated: jax.Array  # (T, N) bool
    truncated: jax.Array  # (T, N) bool
    next_obs: jax.Array  # (T, N, obs_dim)
    episode_return: jax.Array  # (T, N)
    episode_length: jax.Array  # (T, N)


class Batch(NamedTuple):
    """What the loss reads; B = batch_size or minibatch_size."""

    obs: jax.Array  # (B, obs_dim)
    action: jax.Array  # (B,) int32
    logprob: jax.Array  # (B,)
    value: jax.Array  # (B,)
    advantage: jax.Array  # (B,)
    target: jax.Array  # (B,), what the critic should say


# === Rollout ====================================================================================
def rollout(agent, obs, env_state, key, env: VecEnv, args: Args):
    """Act for num_steps from obs (N, obs_dim); return the obs to go on from, env_state, Storage."""
    noise = jax.random.gumbel(key, (args.num_steps, args.num_envs, env.num_actions))

    def step(carry, step_noise):
        obs, env_state = carry
        logits = agent.get_logits(obs)
        action = (logits + step_noise).argmax(-1)  # Gumbel trick: a draw from softmax(logits)
        new_obs, env_state, result = env.step(env_state, action)
        return (new_obs, env_state), (obs, action, logits, *result)

    (obs, env_state), steps = jax.lax.scan(step, (obs, env_state), noise)
    all_obs, action, logits, *result = steps
    logprob = select(jax.nn.log_softmax(logits), action)
    return obs, env_state, Storage(all_obs, action, logprob, *result)


def select(log_probs, action):
    """(..., num_actions), (...) -> (...)."""
    return jnp.take_along_axis(log_probs, action[..., None], axis=-1).squeeze(-1)


# === GAE ========================================================================================
def compute_gae(storage: Storage, value, next_value, args: Args) -> jax.Array:
    """Advantages (T, N) from V(obs) and V(next_obs), each (T, N) (Schulman et al. 2016, eq. 16).

    After a termination the future is worth 0, after a truncation V(next_obs); across neither do
    advantages flow from one episode into the one before.
    """
    done = storage.terminated | storage.truncated
    no_future = storage.terminated if args.bootstrap_truncated else done
    delta = storage.reward + args.gamma * jnp.where(no_future, 0.0, next_value) - value
    decay = jnp.where(done, 0.0, args.gamma * args.gae_lambda)

    # A[t] = delta[t] + decay[t] * A[t + 1] is linear, so log2(T) parallel steps solve it.
    def later(x, steps):
        return jnp.pad(x[steps:], ((0, steps), (0, 0)))

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
    log_probs = jax.nn.log_softmax(logits)
    log_ratio = select(log_probs, batch.action) - batch.logprob
    ratio = jnp.exp(log_ratio)

    advantage = batch.advantage
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -jnp.minimum(advantage * ratio, advantage * clipped_ratio).mean()

    value_error = (value - batch.target) ** 2
    if args.clip_vloss:
        change = (value - batch.value).clip(-args.clip_coef, args.clip_coef)
        value_error = jnp.maximum(value_error, (batch.value + change - batch.target) ** 2)
    value_loss = 0.5 * value_error.mean()

    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    approx_kl = (ratio - 1 - log_ratio).mean()
    clip_fraction = (abs(ratio - 1) > args.clip_coef).mean()
    return loss, jnp.stack([policy_loss, value_loss, entropy, approx_kl, clip_fraction])


# === Update =====================================================================================
def update(agent, optimizer, storage: Storage, key, args: Args):
    """Train on a rollout for update_epochs, in place; return the METRICS."""
    # Parameters do not change during a rollout, so one pass afterwards gives all its values.
    all_obs = jnp.stack([storage.obs, storage.next_obs])
    value, next_value = agent.get_value(all_obs)
    advantage = compute_gae(storage, value, next_value, args)
    target = advantage + value
    batch = Batch(storage.obs, storage.action, storage.logprob, value, advantage, target)
    batch = Batch(*(x.reshape(args.batch_size, *x.shape[2:]) for x in batch))

    # lax.scan carries arrays: the objects are taken apart here, and put together in every step.
    graphdef, state = nnx.split((agent, optimizer))

    def minibatch_step(state, minibatch):
        agent, optimizer = nnx.merge(graphdef, state)
        loss_fn = partial(ppo_loss, batch=minibatch, args=args)
        grads, losses = nnx.grad(loss_fn, has_aux=True)(agent)
        optimizer.update(agent, grads)
        return nnx.state((agent, optimizer)), losses

    def epoch(state, key):
        order = shuffle(key, args.batch_size)  # one gather per epoch beats one per minibatch
        shape = (args.num_minibatches, args.minibatch_size)
        minibatches = jax.tree.map(lambda x: x[order].reshape(*shape, *x.shape[1:]), batch)
        return jax.lax.scan(minibatch_step, state, minibatches)

    keys = jax.random.split(key, args.update_epochs)
    state, losses = jax.lax.scan(epoch, state, keys)
    nnx.update((agent, optimizer), state)
    explained_variance = 1 - (target - value).var() / target.var()
    losses = [*losses.mean((0, 1)), explained_variance]
    return jnp.stack([*episode_statistics(storage), *losses])


def shuffle(key, size: int) -> jax.Array:
    """A random order of the indices 0 to size - 1, (size,) uint32.

    Sorts random numbers whose low bits hold the index: a sixth of jax.random.permutation's time.
    Equal numbers keep their order, which shows only where a border of minibatches parts them: at
    one border in 64 at the defaults.
    """
    index_bits = (size - 1).bit_length()
    numbers = jax.random.bits(key, (size,)) >> index_bits << index_bits
    return jnp.sort(numbers | jnp.arange(size, dtype=jnp.uint32)) & (2**index_bits - 1)


def episode_statistics(storage: Storage):
    """Number of episodes that ended, then mean, minimum and maximum of their return and length."""
    done = storage.terminated | storage.truncated
    yield done.sum()
    for x in (storage.episode_return, storage.episode_length):
        low, high = jnp.where(done, x, jnp.inf).min(), jnp.where(done, x, -jnp.inf).max()
        yield from (jnp.where(done, x, 0).sum() / done.sum(), low, high)


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
def train(args: Args) -> dict[str, Any]:
    """Train an agent; return what run.json holds."""
    device = jax.devices()[0]
    log = RunLog(args, "nnx", "cached_partial" if args.jit else "none", device.device_kind)
    # Set for all frameworks alike: by default JAX takes TF32 on a GPU, and torch float32.
    precision = "tensorfloat32" if args.matmul_precision == "high" else "float32"
    jax.config.update("jax_default_matmul_precision", precision)
    env = VecEnv(args.env_id, args.num_envs)
    key, agent_key, env_key = jax.random.split(jax.random.key(args.seed), 3)

    jax.config.update("jax_disable_most_optimizations", True)  # what runs once is not worth it
    agent, optimizer = make_agent(args, env, agent_key)
    with jax.disable_jit(not args.jit):
        obs, env_state = jax.jit(env.reset)(env_key)
    jax.config.update("jax_disable_most_optimizations", False)
    # env and args are bound: to the compiler they are constants.
    jit = partial(nnx.jit, graph=True, graph_updates=True)  # objects change in place
    rollout_fn = nnx.cached_partial(jit(partial(rollout, env=env, args=args)), agent)
    update_fn = nnx.cached_partial(jit(partial(update, args=args)), agent, optimizer)

    with jax.disable_jit(not args.jit):
        for iteration in range(args.num_iterations):
            start = time.perf_counter()
            key, rollout_key, update_key = jax.random.split(key, 3)
            obs, env_state, storage = rollout_fn(obs, env_state, rollout_key)
            if args.sync_for_timing:
                jax.block_until_ready(storage)  # sync
            middle = time.perf_counter()
            metrics = update_fn(storage, update_key)
            metrics = metrics.tolist()  # sync, and the iteration's only transfer to the host
            log.write(iteration, (start, middle, time.perf_counter()), metrics)
    return log.finish((device.memory_stats() or {}).get("peak_bytes_in_use"))


if __name__ == "__main__":
    train(tyro.cli(Args))

# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnax==1.0.1", "six==1.17.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""PPO in JAX with Flax NNX on multiple devices: XLA partitions the code for one device.

    python more/ppo_nnx_sharded.py --seed 1                        # on all visible GPUs
    JAX_NUM_CPU_DEVICES=2 python more/ppo_nnx_sharded.py --seed 1  # on two CPU devices

Start reading at Training. The main ideas:
- train() chooses a sharding for each array: a copy of the parameters, and a part of the
  environments, on every device. XLA partitions both compiled functions accordingly.
- The loss is a mean over the entire minibatch, so XLA adds the all-reduces that average gradients
  and advantage statistics over all devices.
- update() splits the batch by device before it shuffles, so that no step moves to another device.
- Only the first process writes the run folder. A run can resume on a different number of devices.
Lines marked "# sync" wait for the device.

Compare with ppo_nnx_tree.py for one device, or with ppo_linen_sharded.py, where shard_map and pmean
make the communication explicit.
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
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads slow down orthogonal() for wide layers

import jax

if __name__ == "__main__" and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
    # Connect the processes that srun started. Importing gymnax would start JAX in each separately.
    # If a process is killed, the others end after 15 s; if it raises an exception, after 60 s.
    jax.distributed.initialize(heartbeat_timeout_seconds=15, shutdown_timeout_seconds=60)

import gymnax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from flax.serialization import from_bytes, msgpack_restore, to_bytes
from gymnax.environments.spaces import Discrete
from jax.experimental.multihost_utils import process_allgather
from jax.nn.initializers import orthogonal
from tensorboard.summary import Writer


# === Arguments ==================================================================================
@dataclass
class Args:
    seed: int = 1  # random seed
    env_id: str = "CartPole-v1"  # gymnax environment with discrete actions, or my_module:MyEnv
    total_timesteps: int = 819_200  # environment steps, rounded down to whole rollouts
    learning_rate: float = 2.5e-4  # Adam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    num_envs: int = 32  # parallel environments
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
        for name in ("num_envs", "num_steps", "num_minibatches", "update_epochs"):
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


# === Agent ======================================================================================
class MLP(nnx.Module):
    def __init__(self, num_inputs, hidden_sizes, num_outputs, output_scale, rngs):
        sizes = (num_inputs, *hidden_sizes)
        make = partial(nnx.Linear, kernel_init=orthogonal(math.sqrt(2)), rngs=rngs)
        self.hidden = nnx.List([make(m, n) for m, n in pairwise(sizes)])
        self.output = make(sizes[-1], num_outputs, kernel_init=orthogonal(output_scale))

    def __call__(self, obs):
        x = obs.reshape(len(obs), -1).astype(jnp.float32)
        for layer in self.hidden:
            x = nnx.tanh(layer(x))
        return self.output(x)


class Agent(nnx.Module):
    def __init__(self, obs_shape, hidden_sizes, num_actions, rngs):
        obs_size = math.prod(obs_shape)
        self.actor = MLP(obs_size, hidden_sizes, num_actions, output_scale=0.01, rngs=rngs)
        self.critic = MLP(obs_size, hidden_sizes, 1, output_scale=1.0, rngs=rngs)

    def get_logits(self, obs):
        return self.actor(obs)  # (B, *obs_shape) -> (B, num_actions)

    def get_value(self, obs):
        return self.critic(obs).squeeze(-1)  # (B, *obs_shape) -> (B,)

    def __call__(self, obs):
        return self.get_logits(obs), self.get_value(obs)


def make_agent(args: Args, obs_shape, num_actions: int, key) -> tuple[Agent, nnx.Optimizer]:
    """Initialize the parameters and the optimizer."""
    agent = Agent(obs_shape, args.hidden_sizes, num_actions, nnx.Rngs(key))
    adam = optax.adam(make_schedule(args), eps=args.adam_eps)
    tx = optax.chain(optax.clip_by_global_norm(args.max_grad_norm), adam)
    return agent, nnx.Optimizer(agent, tx, wrt=nnx.Param)


def make_schedule(args: Args) -> optax.Schedule:
    """Learning rate for each optimizer step. CleanRL changes it once per iteration instead."""
    if not args.anneal_lr:
        return optax.constant_schedule(args.learning_rate)
    return optax.linear_schedule(args.learning_rate, 0.0, args.num_optimizer_steps)


# === Storage ====================================================================================
class Storage(NamedTuple):
    """A rollout: T = num_steps steps in N = num_envs environments."""

    obs: jax.Array  # (T, N, *obs_shape), input of the policy
    action: jax.Array  # (T, N) int32
    logprob: jax.Array  # (T, N)
    reward: jax.Array  # (T, N); this and the fields below result from the action
    terminated: jax.Array  # (T, N) bool
    truncated: jax.Array  # (T, N) bool
    next_obs: jax.Array  # (T, N, *obs_shape), before any restart
    episode_return: jax.Array  # (T, N), including this step
    episode_length: jax.Array  # (T, N)


class Batch(NamedTuple):
    """Inputs of the loss; B is batch_size or minibatch_size."""

    obs: jax.Array  # (B, *obs_shape)
    action: jax.Array  # (B,) int32
    logprob: jax.Array  # (B,)
    value: jax.Array  # (B,)
    advantage: jax.Array  # (B,)
    target: jax.Array  # (B,), the lambda-return that the critic learns


# === Rollout ====================================================================================
def rollout(agent, obs, env_state, key, env: VecEnv, args: Args):
    """Run the policy for num_steps steps. Return the next obs, the env_state and the Storage."""
    # Drawing the noise of all steps at once is faster than drawing it at each step.
    noise = jax.random.gumbel(key, (args.num_steps, args.num_envs, env.num_actions))

    def step(carry, step_noise):
        obs, env_state = carry
        logits = agent.get_logits(obs)
        action = (logits + step_noise).argmax(-1)  # Gumbel-max trick: samples softmax(logits)
        new_obs, env_state, results = env.step(env_state, action)
        return (new_obs, env_state), (obs, action, logits, results)

    # lax.scan compiles the loop over steps: it passes the carry along and stacks the outputs.
    (obs, env_state), outputs = jax.lax.scan(step, (obs, env_state), noise)
    all_obs, action, logits, results = outputs
    logprob = logprob_of(action, jax.nn.log_softmax(logits))
    return obs, env_state, Storage(all_obs, action, logprob, **results)


def logprob_of(action, logprobs):
    """Log-probability of the actions taken: (...), (..., num_actions) -> (...)."""
    return jnp.take_along_axis(logprobs, action[..., None], axis=-1).squeeze(-1)


# === GAE ========================================================================================
def compute_gae(storage: Storage, value, next_value, args: Args) -> jax.Array:
    """Return advantages (T, N) from V(obs) and V(next_obs), both (T, N).

    Schulman et al. 2016, eq. 16. A terminated episode has no future value. A truncated one
    bootstraps from V(next_obs), unless bootstrap_truncated is off. Both end the recursion, since
    the next step starts a new episode.
    """
    done = storage.terminated | storage.truncated
    no_future = storage.terminated if args.bootstrap_truncated else done
    delta = storage.reward + args.gamma * jnp.where(no_future, 0.0, next_value) - value
    decay = jnp.where(done, 0.0, args.gamma * args.gae_lambda)

    def step(next_advantage, inputs):
        step_delta, step_decay = inputs
        advantage = step_delta + step_decay * next_advantage
        return advantage, advantage

    last = jnp.zeros(args.num_envs)
    _, advantages = jax.lax.scan(step, last, (delta, decay), reverse=True)  # backwards in time
    return advantages


# === Loss =======================================================================================
def ppo_loss(agent, batch: Batch, args: Args):
    """PPO's clipped loss (Schulman et al. 2017, eq. 9), and the metrics to log."""
    logits, value = agent(batch.obs)
    logprobs = jax.nn.log_softmax(logits)
    log_ratio = logprob_of(batch.action, logprobs) - batch.logprob
    ratio = jnp.exp(log_ratio)

    advantage = batch.advantage
    if args.norm_adv:
        # correction=0 divides by n. CleanRL's PyTorch scripts divide by n - 1.
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -jnp.minimum(advantage * ratio, advantage * clipped_ratio).mean()

    value_error = (value - batch.target) ** 2
    if args.clip_vloss:
        change = (value - batch.value).clip(-args.clip_coef, args.clip_coef)
        value_error = jnp.maximum(value_error, (batch.value + change - batch.target) ** 2)
    value_loss = 0.5 * value_error.mean()

    entropy = -(jnp.exp(logprobs) * logprobs).sum(-1).mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    return loss, {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": (ratio - 1 - log_ratio).mean(),
        "losses/clip_fraction": (abs(ratio - 1) > args.clip_coef).mean(),
    }


# === Update =====================================================================================
def update(agent, optimizer, storage: Storage, key, args: Args, num_devices: int):
    """Train the agent in place for update_epochs epochs on a rollout. Return the metrics."""
    learning_rate = make_schedule(args)(optimizer.step[...])
    # The parameters are fixed during a rollout, so one pass at the end gives all its values.
    # Merging the axes (2 T, N) would gather all observations on every device; vmap does not.
    values = jax.vmap(agent.get_value)(jnp.concat([storage.obs, storage.next_obs]))
    value, next_value = values.reshape(2, args.num_steps, args.num_envs)
    advantage = compute_gae(storage, value, next_value, args)
    target = advantage + value
    fields = (storage.obs, storage.action, storage.logprob, value, advantage, target)
    batch = Batch(*(split_by_device(x, num_devices) for x in fields))

    # In tree mode, objects are pytrees: jax.lax.scan and jax.grad accept them and return new ones.
    train_state = (agent, optimizer)
    # epoch() normalizes the advantages of all minibatches at once, so the loss must not.
    loss_args = replace(args, norm_adv=False)

    def minibatch_step(train_state, minibatch):
        agent, optimizer = train_state
        grads, losses = jax.grad(ppo_loss, has_aux=True)(agent, minibatch, loss_args)
        optimizer.update(agent, grads)
        return (agent, optimizer), losses

    def epoch(train_state, keys):
        # Each device shuffles its own steps, so that none of them moves to another device.
        order = jax.vmap(partial(shuffle, size=args.batch_size // num_devices))(keys)
        # Gathering once per epoch is faster than once per minibatch.
        minibatches = jax.tree.map(partial(gather, order=order, args=args), batch)
        if args.norm_adv:
            minibatches = minibatches._replace(advantage=normalize(minibatches.advantage))
        return jax.lax.scan(minibatch_step, train_state, minibatches)

    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(num_devices))
    keys = jax.vmap(partial(jax.random.split, num=args.update_epochs), out_axes=1)(keys)
    train_state, losses = jax.lax.scan(epoch, train_state, keys)
    nnx.update((agent, optimizer), nnx.state(train_state))
    metrics = jax.tree.map(jnp.mean, losses) | episode_statistics(storage)
    metrics["charts/learning_rate"] = learning_rate
    metrics["losses/explained_variance"] = 1 - (target - value).var() / target.var()
    metrics["charts/param_norm"] = optax.global_norm(nnx.state(agent, nnx.Param))
    return metrics


def split_by_device(x, num_devices: int) -> jax.Array:
    """(T, N, ...) -> (D, B / D, ...): each of D devices has the steps of its environments."""
    x = x.reshape(len(x), num_devices, -1, *x.shape[2:]).swapaxes(0, 1)
    return x.reshape(num_devices, -1, *x.shape[3:])


def gather(x, order, args: Args) -> jax.Array:
    """(D, B / D, ...) -> (num_minibatches, minibatch_size, ...), with rows from every device."""
    x = jax.vmap(lambda rows, order: rows[order])(x, order)
    x = x.reshape(len(x), args.num_minibatches, -1, *x.shape[2:]).swapaxes(0, 1)
    return x.reshape(args.num_minibatches, args.minibatch_size, *x.shape[3:])


def normalize(advantage) -> jax.Array:
    """Normalize each row of (num_minibatches, minibatch_size)."""
    mean = advantage.mean(1, keepdims=True)
    return (advantage - mean) / (advantage.std(1, correction=0, keepdims=True) + 1e-8)


def shuffle(key, size: int) -> jax.Array:
    """Return a random permutation of range(size), (size,) uint32.

    Faster than jax.random.permutation: each index is in the low bits of a random number, and
    sorting the numbers shuffles the indices. For size 3, two bits hold the index: 1011_00, 0010_01,
    0111_10 sort to 1, 2, 0. With 8192 indices, about 64 pairs draw equal bits and stay in order.
    """
    index_bits = (size - 1).bit_length()
    numbers = jax.random.bits(key, (size,)) >> index_bits << index_bits
    return jnp.sort(numbers | jnp.arange(size, dtype=jnp.uint32)) & (2**index_bits - 1)


def episode_statistics(storage: Storage) -> dict[str, jax.Array]:
    """Number of finished episodes, and the mean, min and max of their returns and lengths.

    If none finished, the statistics are infinite, which the log writes as null.
    """
    done = storage.terminated | storage.truncated
    metrics = {"charts/episodes": done.sum()}
    for name, x in [("return", storage.episode_return), ("length", storage.episode_length)]:
        mean = jnp.where(done, x, 0).sum() / jnp.maximum(done.sum(), 1)
        metrics[f"charts/episodic_{name}"] = jnp.where(done.sum() > 0, mean, jnp.inf)
        metrics[f"charts/episodic_{name}_min"] = jnp.where(done, x, jnp.inf).min()
        metrics[f"charts/episodic_{name}_max"] = jnp.where(done, x, -jnp.inf).max()
    return metrics


# === Training ===================================================================================
def train(args: Args) -> None:
    """Train an agent, or continue a run."""
    # "high" and "medium" are the same here: JAX's default, which allows TF32 on a GPU.
    precision = "highest" if args.matmul_precision == "highest" else "default"
    jax.config.update("jax_default_matmul_precision", precision)
    # Auto: XLA chooses the sharding wherever the code does not specify it.
    mesh = jax.make_mesh((jax.device_count(),), ("devices",), (jax.sharding.AxisType.Auto,))
    if args.num_envs % mesh.size or args.minibatch_size % mesh.size:
        fail(f"The number of devices, {mesh.size}, must divide --num-envs and the minibatch size")
    env = VecEnv(args.env_id, args.num_envs)
    spaces = {"obs_shape": env.obs_shape, "num_actions": env.num_actions}

    # A checkpoint can hold keys from PRNGKey, such as env_state.key, but not from jax.random.key.
    key, agent_key, env_key = jax.random.split(jax.random.PRNGKey(args.seed), 3)
    iteration = 0
    with jax.set_mesh(mesh):  # shards parameters with out_sharding in their metadata; none here
        agent, optimizer = make_agent(args, env.obs_shape, env.num_actions, agent_key)
    obs, env_state = jax.jit(env.reset)(env_key)
    objects = {"agent": agent, "optimizer": optimizer}
    if has_checkpoint(args, **spaces):
        train_state = nnx.to_pure_dict(nnx.state(objects))
        like = Checkpoint(iteration, train_state, obs, env_state)
        iteration, train_state, obs, env_state = load_checkpoint(args.resume, like)
        nnx.update(objects, train_state)
    log_type = RunLog if jax.process_index() == 0 else QuietLog  # only the first process writes
    packages = ["jax", "jaxlib", "flax", "optax", "gymnax", "numpy"]
    log: Any = log_type(
        args, iteration, packages, device=jax.devices()[0].device_kind, devices=mesh.size, **spaces
    )

    # So far, each process has the same arrays. Now every device gets a copy of each parameter that
    # is not sharded, and its shard of the environments.
    train_state = nnx.state(objects)
    shardings = nnx.get_named_sharding(train_state, mesh)
    nnx.update(objects, jax.device_put(train_state, shardings))
    replicated = jax.NamedSharding(mesh, jax.P())
    by_rows = jax.NamedSharding(mesh, jax.P("devices"))  # (N, ...)
    by_columns = jax.NamedSharding(mesh, jax.P(None, "devices"))  # (T, N, ...)
    env_sharding = jax.tree.map(lambda x: by_rows, env_state)._replace(key=replicated)
    obs = jax.device_put(obs, by_rows)
    env_state = jax.device_put(env_state, env_sharding)

    # env, args and num_devices are compile-time constants.
    jit = partial(nnx.jit_partial, graph=False)  # tree mode, which Flax plans to make the default
    out_shardings = by_rows, env_sharding, by_columns
    rollout_fn = jit(partial(rollout, env=env, args=args), agent, out_shardings=out_shardings)
    update_fn = jit(partial(update, args=args, num_devices=mesh.size), agent, optimizer)
    while iteration < args.num_iterations:
        start = time.perf_counter()
        # Deriving the keys from the iteration number keeps them out of the checkpoint.
        rollout_key, update_key = jax.random.split(jax.random.fold_in(key, iteration))
        obs, env_state, storage = rollout_fn(obs, env_state, rollout_key)
        middle = 0.0
        if args.sync_for_timing:
            jax.block_until_ready(storage)  # sync
            middle = time.perf_counter()
        metrics = update_fn(storage, update_key)
        metrics = jax.device_get(metrics)  # sync
        log.write(iteration, metrics, start, middle)
        iteration += 1
        # All processes must make the same decision, so a signal to one stops all of them. If it
        # arrives after this call, they stop in the next iteration.
        flags = np.array([log.stopped_by, log.must_save(iteration)])
        stopped_by, must_save = process_allgather(flags).max(0).tolist()  # sync
        if must_save:
            # A single file lets a run resume with any number of devices. For a model that is too
            # large for one host, Orbax can save from every process.
            train_state = nnx.to_pure_dict(nnx.state(objects))
            arrays = process_allgather((train_state, obs, env_state), tiled=True)  # sync
            if jax.process_index() == 0:
                save_checkpoint(log.dir, Checkpoint(iteration, *arrays))
                log.update_info(iteration=iteration)
            if stopped_by:  # stop only after saving, so that no iteration is lost
                log.stopped_by = stopped_by  # another process may have received the signal
                break
    log.close()


class QuietLog:
    """RunLog for all processes but the first: it handles signals and writes nothing."""

    def __init__(self, *unused: Any, **unused_info: Any) -> None:
        self.stopped_by = 0  # number of the signal received, if any
        if __name__ == "__main__":  # a program that imports this script handles signals itself
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.stop)

    def stop(self, number: int, frame: Any) -> None:
        self.stopped_by = number

    def write(self, *unused: Any) -> None:
        pass

    def must_save(self, iteration: int) -> bool:
        return self.stopped_by > 0  # the first process decides if a checkpoint is due

    def close(self) -> None:
        pass


# === Checkpoint =================================================================================
class Checkpoint(NamedTuple):
    """Everything a resumed run needs to continue exactly."""

    iteration: int  # number of completed iterations
    train_state: dict  # arrays of the agent and the optimizer
    obs: jax.Array
    env_state: Any


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically: a killed run keeps either the old one or the new one."""
    # Save only the arrays of env_state: Flax may not support the classes of an environment.
    checkpoint = checkpoint._replace(env_state=jax.tree.leaves(checkpoint.env_state))
    new = folder / "checkpoint.new"
    new.write_bytes(to_bytes(checkpoint))  # sync
    os.replace(new, folder / "checkpoint.msgpack")


def load_checkpoint(folder: str | Path, like: Checkpoint) -> Checkpoint:
    """Read a checkpoint into the structure of `like`."""
    arrays, structure = jax.tree.flatten(like.env_state)
    data = Path(folder, "checkpoint.msgpack").read_bytes()
    saved = from_bytes(like._replace(env_state=arrays), data)
    return saved._replace(env_state=jax.tree.unflatten(structure, saved.env_state))


def load_policy(folder: str | Path, seed: int = 0) -> Callable[..., np.ndarray]:
    """Load a trained policy: policy(obs) returns the most likely action for each observation.

    obs (N, *obs_shape) and the actions (N,) are NumPy arrays. policy(obs, sample=True) samples the
    actions instead, as in training.
    """
    info, args = load_info(folder)
    sizes = (info["obs_shape"], info["num_actions"])
    agent, _ = nnx.eval_shape(partial(make_agent, args, *sizes, jax.random.PRNGKey(0)))
    saved = msgpack_restore(Path(folder, "checkpoint.msgpack").read_bytes())
    nnx.update(agent, nnx.restore_int_paths(saved["train_state"]["agent"]))
    get_logits = jax.jit(agent.get_logits)
    rng = np.random.default_rng(seed)

    def policy(obs, sample=False):
        logits = np.asarray(get_logits(obs))
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

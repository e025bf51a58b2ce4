# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnax==1.0.1", "six==1.17.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""DQN in JAX with Flax Linen.

    python more/dqn_linen.py --seed 1          # CartPole-v1
    python more/dqn_linen.py minatar --seed 1  # Breakout, with MinAtar's settings

Start reading at Agent. The main ideas:
- TrainState holds the parameters, the target network and the optimizer; update() returns a new one.
- iterate() acts, steps, stores and updates in lax.scan, a compiled loop.
- train() compiles iterate() with jax.jit, so an iteration takes one call. It donates the replay
  buffer, which lets XLA update it in place.
Lines marked "# sync" wait for the device.

Compare with dqn_torch.py for PyTorch, or with dqn_linen_gymnasium.py for Gymnasium
environments.
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
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import linen as nn
from flax.serialization import from_bytes, msgpack_restore, to_bytes
from flax.training import train_state
from gymnax.environments.spaces import Discrete
from gymnax.wrappers import StickyActionWrapper
from tensorboard.summary import Writer


# === Arguments ==================================================================================
@dataclass
class Args:
    seed: int = 1  # random seed
    env_id: str = "CartPole-v1"  # gymnax environment with discrete actions, or my_module:MyEnv
    sticky_actions: float = 0.0  # probability that the previous action is repeated
    full_actions: bool = False  # MinAtar: all six actions, including those without effect
    max_episode_steps: int = 0  # truncate episodes after N steps; 0: the environment's default
    total_timesteps: int = 500_000  # environment steps, rounded down to whole iterations
    learning_rate: float = 2.5e-4  # the optimizer's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    num_envs: int = 8  # parallel environments
    num_steps: int = 625  # steps per environment in each iteration; metrics are logged after each
    gamma: float = 0.99  # discount factor
    buffer_size: int = 10_000  # maximum number of transitions in the replay buffer
    batch_size: int = 128  # transitions per update
    train_frequency: int = 10  # environment steps per update
    learning_starts: int = 10_000  # environment steps before the first update
    target_network_frequency: int = 50  # copy to the target network every N updates (not steps)
    double_q: bool = False  # Double DQN: the online network chooses the target's action
    start_e: float = 1.0  # initial epsilon, the probability of a random action
    end_e: float = 0.05  # final epsilon
    exploration_steps: int = 250_000  # steps of epsilon decay after learning_starts; 0: at once
    loss: Literal["mse", "huber"] = "mse"  # loss of the TD error; huber: linear beyond 1
    optimizer: Literal["adam", "rmsprop"] = "adam"  # rmsprop: centered, without momentum
    optimizer_eps: float = 1e-8  # the optimizer's epsilon, added outside the square root
    rmsprop_decay: float = 0.95  # decay rate of RMSProp's moving averages
    hidden_sizes: tuple[int, ...] = (120, 84)  # hidden layers; for images, after a convolution
    matmul_precision: Literal["medium", "high", "highest"] = "high"  # highest: no TF32 on a GPU
    runs_dir: str = "runs"  # where run folders are created
    run_name: str = ""  # name of the run folder; default {env_id}__{script}__{seed}__{time}
    track: bool = False  # log to Weights & Biases as well
    save_every: int = 0  # save a checkpoint every N iterations; 0: up to ten per run
    resume: str = ""  # run folder to continue; its arguments are kept

    def __post_init__(self) -> None:
        """Check arguments and compute derived ones. tyro reports a ValueError as a usage error."""
        if self.seed not in range(2**32):  # JAX would silently drop the upper bits
            raise ValueError("--seed must be between 0 and 2**32 - 1")
        counts = ("num_envs", "num_steps", "buffer_size", "batch_size", "train_frequency")
        for name in (*counts, "target_network_frequency", "learning_starts", "exploration_steps"):
            least = 0 if name in ("learning_starts", "exploration_steps") else 1
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}")
        if self.buffer_size % self.num_envs != 0:
            raise ValueError(f"--buffer-size must be a multiple of --num-envs ({self.num_envs})")
        steps = self.num_envs * self.num_steps
        self.num_iterations = self.total_timesteps // steps
        if self.num_iterations < 1:
            raise ValueError(f"--total-timesteps must be at least one iteration ({steps})")
        self.hidden_sizes = tuple(self.hidden_sizes)  # a list when loaded from run.json


def parse_args() -> Args:
    """Parse the command line, which may start with the preset minatar."""
    minatar = Args(
        env_id="Breakout-MinAtar",
        sticky_actions=0.1,
        full_actions=True,
        max_episode_steps=2**31 - 1,  # no limit
        total_timesteps=5_000_000,
        anneal_lr=False,
        num_envs=1,
        num_steps=5_000,
        buffer_size=100_000,
        batch_size=32,
        train_frequency=1,
        learning_starts=5_000,
        target_network_frequency=1_000,
        end_e=0.1,
        exploration_steps=100_000,
        loss="huber",
        optimizer="rmsprop",
        optimizer_eps=0.01,
        hidden_sizes=(128,),
    )
    flags, default = sys.argv[1:], Args()
    if flags[:1] == ["minatar"]:
        flags, default = flags[1:], minatar
    default = args_to_resume() or default  # with --resume, the run's arguments are the defaults
    about = "Put minatar before the flags to use the MinAtar settings of Young & Tian 2019."
    parse = partial(tyro.cli, Args, args=flags, default=default, description=about)
    _, unknown = parse(return_unknown_args=True)
    if unknown and not unknown[0].startswith("-"):
        fail(f"Unknown argument: {unknown[0]}. The only preset, minatar, comes before the flags.")
    return parse()


# === Environment ================================================================================
class EnvState(NamedTuple):
    key: jax.Array  # split at each step
    inner: Any  # gymnax's state, batched: N = num_envs rows in each leaf
    episode_return: jax.Array  # (N,), so far in the current episode
    episode_length: jax.Array  # (N,)


class VecEnv:
    """N = num_envs gymnax environments stepped together. Finished ones restart automatically."""

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        sticky_actions: float = 0.0,
        full_actions: bool = False,
        max_episode_steps: int = 0,
    ) -> None:
        module, _, name = env_id.partition(":")
        if name.isidentifier():  # a custom class, my_module:MyEnv; test it with envs/check.py
            sys.path.append(os.getcwd())
            self.env = getattr(importlib.import_module(module), name)()
            self.params = self.env.default_params
        elif env_id in gymnax.registered_envs:
            options = {"use_minimal_action_set": False} if full_actions else {}
            self.env, self.params = gymnax.make(env_id, **options)
        else:
            hint = "use more/dqn_linen_gymnasium.py or more/dqn_torch_gymnasium.py"
            fail(f"gymnax has no {env_id}. For a Gymnasium environment, {hint}")
        space = self.env.action_space(self.params)
        if not isinstance(space, Discrete):
            hint = "use more/sac_linen.py or more/sac_torch.py"
            fail(f"{env_id} has continuous actions: {hint}")
        self.num_envs = num_envs
        self.num_actions = int(space.n)
        self.obs_shape = self.env.observation_space(self.params).shape
        if sticky_actions > 0:
            self.env = StickyActionWrapper(self.env, sticky_actions)
        if max_episode_steps > 0:
            self.params = self.params.replace(max_steps_in_episode=max_episode_steps)

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
class Agent(nn.Module):
    """Q-network: an MLP. For images (H, W, C), a convolution comes first."""

    hidden_sizes: tuple[int, ...]
    num_actions: int

    @nn.compact
    def __call__(self, obs):  # (B, *obs_shape) -> (B, num_actions)
        x = obs.astype(jnp.float32)  # not / 255: MinAtar's images contain only 0 and 1
        if obs.ndim == 4:
            x = nn.relu(dense(patches(x), 16))
        x = x.reshape(len(obs), -1)
        for size in self.hidden_sizes:
            x = nn.relu(dense(x, size))
        return dense(x, self.num_actions)


def patches(x):
    """All 3x3 patches of images: (B, H, W, C) -> (B, H - 2, W - 2, 9 * C).

    A dense layer on the patches equals nn.Conv(features, (3, 3), padding="VALID"), but is several
    times faster in a compiled loop on a CPU.
    """
    _, height, width, _ = x.shape
    corners = [(i, j) for i in range(3) for j in range(3)]
    return jnp.concatenate([x[:, i : i + height - 2, j : j + width - 2] for i, j in corners], -1)


def dense(x, num_outputs: int):
    """A dense layer with PyTorch's default initialization: uniform in +-1 / sqrt(inputs)."""
    bound = 1 / math.sqrt(x.shape[-1])
    init = partial(jax.random.uniform, minval=-bound, maxval=bound)
    return nn.Dense(num_outputs, kernel_init=init, bias_init=init)(x)


class TrainState(train_state.TrainState):
    target_params: Any  # parameters of the target network


def make_agent(args: Args, obs_shape: tuple[int, ...], num_actions: int, key) -> TrainState:
    """Initialize the parameters, the target network as a copy, and the optimizer."""
    agent = Agent(args.hidden_sizes, num_actions)
    params = jax.jit(agent.init)(key, jnp.zeros((1, *obs_shape)))
    # The optimizers have no learning rate: update() applies it.
    if args.optimizer == "adam":
        tx = optax.scale_by_adam(eps=args.optimizer_eps)
    else:  # like torch.optim.RMSprop(centered=True), which adds eps outside the square root
        tx = optax.scale_by_stddev(args.rmsprop_decay, args.optimizer_eps, eps_in_sqrt=False)
    target_params = jax.tree.map(jnp.copy, params)  # a copy, because train() donates both
    return TrainState.create(
        apply_fn=agent.apply, params=params, target_params=target_params, tx=tx
    )


# === Replay =====================================================================================
class Transition(NamedTuple):
    """Transitions; B is num_envs, batch_size or buffer_size."""

    obs: jax.Array  # (B, *obs_shape), input of the policy
    action: jax.Array  # (B,) int32
    reward: jax.Array  # (B,); this and the fields below result from the action
    terminated: jax.Array  # (B,) bool
    next_obs: jax.Array  # (B, *obs_shape), before any restart


class Replay(NamedTuple):
    """The last buffer_size transitions."""

    transitions: Transition
    num_added: jax.Array  # () int32, transitions added so far, including those overwritten


def make_replay(args: Args, obs_shape: tuple[int, ...], obs_dtype: np.dtype) -> Replay:
    """Create an empty replay buffer."""
    size = args.buffer_size
    transitions = Transition(
        obs=jnp.zeros((size, *obs_shape), obs_dtype),
        action=jnp.zeros(size, jnp.int32),
        reward=jnp.zeros(size),
        terminated=jnp.zeros(size, bool),
        next_obs=jnp.zeros((size, *obs_shape), obs_dtype),
    )
    return Replay(transitions, jnp.int32(0))


def add(replay: Replay, obs, action, result: dict) -> Replay:
    """Store a step of all environments, overwriting the oldest transitions."""
    start = replay.num_added % len(replay.transitions.obs)
    step = Transition(obs, action, result["reward"], result["terminated"], result["next_obs"])

    def write(old, new):
        return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=0)

    transitions = jax.tree.map(write, replay.transitions, step)
    return Replay(transitions, replay.num_added + len(obs))


def sample(replay: Replay, key, batch_size: int) -> Transition:
    """Draw a batch uniformly, with replacement."""
    size = jnp.minimum(replay.num_added, len(replay.transitions.obs))
    indices = jax.random.randint(key, (batch_size,), 0, size)
    return Transition(*(x[indices] for x in replay.transitions))


def updates_due(replay: Replay, args: Args) -> jax.Array:
    """Number of updates due after the latest step."""
    before = updates_after(replay.num_added - args.num_envs, args)
    return updates_after(replay.num_added, args) - before


def updates_after(steps, args: Args) -> jax.Array:
    """Total number of updates due after `steps` steps, counted over all environments."""
    return jnp.maximum(steps - args.learning_starts, 0) // args.train_frequency


# === Act ========================================================================================
def epsilon_after(steps: int, args: Args) -> float:
    """Probability of a random action after `steps` environment steps."""
    if args.exploration_steps == 0:  # epsilon drops at once
        return args.start_e if steps < args.learning_starts else args.end_e
    progress = min(max((steps - args.learning_starts) / args.exploration_steps, 0.0), 1.0)
    return args.start_e + (args.end_e - args.start_e) * progress


def act(train_state, obs, key, epsilon):
    """Epsilon-greedy actions (N,) int32."""
    q = train_state.apply_fn(train_state.params, obs)
    best = q.argmax(-1)
    explore_key, action_key = jax.random.split(key)
    explore = jax.random.uniform(explore_key, best.shape) < epsilon
    random_action = jax.random.randint(action_key, best.shape, 0, q.shape[-1])
    return jnp.where(explore, random_action, best)


# === Loss =======================================================================================
def td_target(selector_q, target_q_next, batch: Transition, args: Args):
    """Targets (B,) for Q(obs, action), from two arrays of Q(next_obs), each (B, num_actions).

    selector_q chooses the next action, and target_q_next gives its value. Both come from the target
    network unless double_q is on. A terminated episode has no future value. A truncated one
    bootstraps from next_obs, like any other step.
    """
    best = selector_q.argmax(-1)
    future = jnp.where(batch.terminated, 0.0, value_of(best, target_q_next))
    return batch.reward + args.gamma * future


def dqn_loss(params, train_state, batch: Transition, args: Args):
    """DQN's loss, and the metrics to log."""
    q = value_of(batch.action, train_state.apply_fn(params, batch.obs))
    target_q_next = train_state.apply_fn(train_state.target_params, batch.next_obs)
    selector_q = target_q_next  # Mnih et al. 2015
    if args.double_q:
        selector_q = train_state.apply_fn(params, batch.next_obs)  # van Hasselt et al. 2016
    q_target = jax.lax.stop_gradient(td_target(selector_q, target_q_next, batch, args))
    loss_of = optax.huber_loss if args.loss == "huber" else optax.squared_error
    loss = loss_of(q, q_target).mean()
    return loss, {"losses/td_loss": loss, "losses/q_value": q.mean()}


def value_of(action, q):
    """Q of the given actions: (B,), (B, num_actions) -> (B,)."""
    return jnp.take_along_axis(q, action[:, None], axis=-1).squeeze(-1)


# === Update =====================================================================================
def update(train_state, batch: Transition, learning_rate, args: Args):
    """Train on a batch. Return the new TrainState and the metrics of the loss."""
    loss_fn = partial(dqn_loss, train_state=train_state, batch=batch, args=args)
    grads, losses = jax.grad(loss_fn, has_aux=True)(train_state.params)
    updates, opt_state = train_state.tx.update(grads, train_state.opt_state)
    params = optax.tree.add_scale(train_state.params, -learning_rate, updates)
    step = train_state.step + 1
    is_copied = step % args.target_network_frequency == 0
    old = train_state.target_params
    target_params = jax.tree.map(lambda new, old: jnp.where(is_copied, new, old), params, old)
    train_state = train_state.replace(
        step=step, params=params, target_params=target_params, opt_state=opt_state
    )
    return train_state, losses


def learn(i, carry, constants, args: Args):
    """Run the i-th update due after a step: train on a new batch and add up the losses."""
    train_state, losses = carry
    replay, key, learning_rate = constants
    sample_key = jax.random.fold_in(key, i)
    batch = sample(replay, sample_key, args.batch_size)
    train_state, new_losses = update(train_state, batch, learning_rate, args)
    return train_state, jax.tree.map(jnp.add, losses, new_losses)


class Episodes(NamedTuple):
    """Inputs of episode_statistics: T = num_steps steps in N = num_envs environments."""

    terminated: jax.Array  # (T, N) bool
    truncated: jax.Array  # (T, N) bool
    episode_return: jax.Array  # (T, N), including this step
    episode_length: jax.Array  # (T, N)


def episode_statistics(episodes: Episodes) -> dict[str, jax.Array]:
    """Number of finished episodes, and the mean, min and max of their returns and lengths.

    If none finished, the statistics are infinite, which the log writes as null.
    """
    done = episodes.terminated | episodes.truncated
    metrics = {"charts/episodes": done.sum()}
    for name, x in [("return", episodes.episode_return), ("length", episodes.episode_length)]:
        mean = jnp.where(done, x, 0).sum() / jnp.maximum(done.sum(), 1)
        metrics[f"charts/episodic_{name}"] = jnp.where(done.sum() > 0, mean, jnp.inf)
        metrics[f"charts/episodic_{name}_min"] = jnp.where(done, x, jnp.inf).min()
        metrics[f"charts/episodic_{name}_max"] = jnp.where(done, x, -jnp.inf).max()
    return metrics


# === Training ===================================================================================
def iterate(train_state, replay, obs, env_state, key, epsilon, learning_rate, env, args: Args):
    """Act, step, store and update for num_steps steps. Return the new states and the metrics."""

    def step(carry, inputs):
        train_state, replay, obs, env_state, losses = carry
        epsilon, act_key, learn_key = inputs
        action = act(train_state, obs, act_key, epsilon)
        new_obs, env_state, result = env.step(env_state, action)
        # Write before reading: in the other order, XLA copies the replay buffer at each step.
        replay = add(replay, obs, action, result)

        constants = (replay, learn_key, learning_rate)
        learn_fn = partial(learn, constants=constants, args=args)
        carry = (train_state, losses)
        train_state, losses = jax.lax.fori_loop(0, updates_due(replay, args), learn_fn, carry)
        episodes = Episodes(*(result[x] for x in Episodes._fields))
        return (train_state, replay, new_obs, env_state, losses), episodes

    # lax.scan compiles the loop over steps: it passes the carry along and stacks the outputs.
    losses = {"losses/td_loss": jnp.zeros(()), "losses/q_value": jnp.zeros(())}
    carry = (train_state, replay, obs, env_state, losses)
    act_keys, learn_keys = jax.random.split(key, (2, args.num_steps))
    carry, episodes = jax.lax.scan(step, carry, (epsilon, act_keys, learn_keys))
    updates_before = train_state.step
    train_state, replay, obs, env_state, losses = carry
    num_updates = train_state.step - updates_before
    metrics = episode_statistics(episodes)
    per_update = 1 / jnp.maximum(num_updates, 1)
    for name, x in losses.items():  # without updates: infinity, which the log writes as null
        metrics[name] = jnp.where(num_updates > 0, x * per_update, jnp.inf)
    metrics["charts/epsilon"] = epsilon[-1]
    metrics["charts/learning_rate"] = learning_rate
    metrics["charts/param_norm"] = optax.global_norm(train_state.params)
    metrics["charts/updates"] = num_updates
    return train_state, replay, obs, env_state, metrics


def train(args: Args) -> None:
    """Train an agent, or continue a run."""
    # "high" and "medium" are the same here: JAX's default, which allows TF32 on a GPU.
    precision = "highest" if args.matmul_precision == "highest" else "default"
    jax.config.update("jax_default_matmul_precision", precision)
    options = (args.sticky_actions, args.full_actions, args.max_episode_steps)
    env = VecEnv(args.env_id, args.num_envs, *options)
    spaces = {"obs_shape": env.obs_shape, "num_actions": env.num_actions}

    # A checkpoint can hold keys from PRNGKey, such as env_state.key, but not from jax.random.key.
    key, agent_key, env_key = jax.random.split(jax.random.PRNGKey(args.seed), 3)
    iteration = 0
    train_state = make_agent(args, env.obs_shape, env.num_actions, agent_key)
    obs, env_state = jax.jit(env.reset)(env_key)
    replay = make_replay(args, env.obs_shape, obs.dtype)
    if has_checkpoint(args, **spaces):
        like = Checkpoint(iteration, train_state, replay, obs, env_state)
        iteration, train_state, replay, obs, env_state = load_checkpoint(args.resume, like)
    packages = ["jax", "jaxlib", "flax", "optax", "gymnax", "numpy"]
    log = RunLog(args, iteration, packages, device=jax.devices()[0].device_kind, **spaces)

    # env and args are compile-time constants. Donated arguments are updated in place, so the replay
    # buffer is never copied.
    iterate_fn = jax.jit(partial(iterate, env=env, args=args), donate_argnums=(0, 1, 2, 3))
    while iteration < args.num_iterations:
        start = time.perf_counter()
        # Decay per iteration, not per update: updates start only after learning_starts.
        decay = 1 - iteration / args.num_iterations if args.anneal_lr else 1.0
        learning_rate = args.learning_rate * decay
        first = iteration * log.steps_per_iteration
        steps = range(first, first + log.steps_per_iteration, args.num_envs)
        epsilon = np.array([epsilon_after(x, args) for x in steps], np.float32)
        # Deriving the keys from the iteration number keeps them out of the checkpoint.
        iteration_key = jax.random.fold_in(key, iteration)
        train_state, replay, obs, env_state, metrics = iterate_fn(
            train_state, replay, obs, env_state, iteration_key, epsilon, learning_rate
        )
        metrics = jax.device_get(metrics)  # sync
        log.write(iteration, metrics, start)
        iteration += 1
        if log.must_save(iteration):
            save_checkpoint(log.dir, Checkpoint(iteration, train_state, replay, obs, env_state))
            log.update_info(iteration=iteration)
            if log.stopped_by:  # stop only after saving, so that no iteration is lost
                break
    log.close()


# === Checkpoint =================================================================================
class Checkpoint(NamedTuple):
    """Everything a resumed run needs to continue exactly."""

    iteration: int  # number of completed iterations
    train_state: TrainState
    replay: Replay
    obs: jax.Array
    env_state: Any


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically: a killed run keeps either the old one or the new one."""
    # Save only the arrays of env_state: Flax may not support the classes of an environment.
    checkpoint = checkpoint._replace(env_state=jax.tree.leaves(checkpoint.env_state))
    num_added = int(checkpoint.replay.num_added)
    in_use = jax.tree.map(lambda x: np.asarray(x)[:num_added], checkpoint.replay.transitions)
    replay = checkpoint.replay._replace(transitions=in_use)
    new = folder / "checkpoint.new"
    new.write_bytes(to_bytes(checkpoint._replace(replay=replay)))  # sync
    os.replace(new, folder / "checkpoint.msgpack")


def load_checkpoint(folder: str | Path, like: Checkpoint) -> Checkpoint:
    """Read a checkpoint into the structure of `like`."""
    arrays, structure = jax.tree.flatten(like.env_state)
    data = Path(folder, "checkpoint.msgpack").read_bytes()
    saved = from_bytes(like._replace(env_state=arrays), data)
    pairs = zip(like.replay.transitions, saved.replay.transitions, strict=True)
    transitions = Transition(*(empty.at[: len(x)].set(x) for empty, x in pairs))
    replay = saved.replay._replace(transitions=transitions)
    env_state = jax.tree.unflatten(structure, saved.env_state)
    return saved._replace(replay=replay, env_state=env_state)


def load_policy(folder: str | Path, seed: int = 0) -> Callable[..., np.ndarray]:
    """Load a trained policy: policy(obs) returns the greedy action for each observation.

    obs (N, *obs_shape) and the actions (N,) are NumPy arrays. seed is unused: nothing is random.
    """
    info, args = load_info(folder)
    agent = Agent(args.hidden_sizes, info["num_actions"])
    saved = msgpack_restore(Path(folder, "checkpoint.msgpack").read_bytes())
    q_fn = jax.jit(partial(agent.apply, saved["train_state"]["params"]))

    def policy(obs):
        return np.asarray(q_fn(obs)).argmax(-1)

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

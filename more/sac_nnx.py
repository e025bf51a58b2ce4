# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnax==1.0.1", "six==1.17.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""SAC in JAX with Flax NNX. An entire training iteration is one compiled function.

    python more/sac_nnx.py --env-id Pendulum-v1 --seed 1
    python more/sac_nnx.py mujoco --env-id my_module:MyEnv --seed 1  # with the MuJoCo settings

Start reading at Agent. The main ideas:
- draw_action() squashes Gaussian samples to [-1, 1]. The replay buffer stores these
  actions, and VecEnv.step() maps them to the bounds.
- sac_loss() adds up three losses. stop_gradient keeps each loss from training the parameters of
  another, so that one jax.grad and one optimizer train everything.
- Replay is a tuple of arrays, and add() returns a new one.
- iterate() runs the environments, the replay buffer and the updates in lax.scan, a compiled loop.
- train() compiles iterate() with nnx.jit_partial, so an iteration takes one call. It changes the
  agent, the target critics and the optimizer in place.
Lines marked "# sync" wait for the device.

Compare with dqn_nnx.py for discrete actions, with sac_nnx_gymnasium.py for environments
in NumPy, or with sac_linen.py for Flax Linen.
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

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from flax.serialization import from_bytes, msgpack_restore, to_bytes
from gymnax.environments.spaces import Box
from tensorboard.summary import Writer


# === Arguments ==================================================================================
@dataclass
class Args:
    seed: int = 1  # random seed
    env_id: str = "Pendulum-v1"  # gymnax environment with continuous actions, or my_module:MyEnv
    total_timesteps: int = 20_000  # environment steps, rounded down to whole iterations
    learning_rate: float = 3e-3  # Adam's learning rate for the actor, the critics and alpha
    anneal_lr: bool = False  # decay the learning rate linearly to 0
    num_envs: int = 4  # parallel environments
    num_steps: int = 200  # steps per environment in each iteration; metrics are logged after each
    gamma: float = 0.99  # discount factor
    buffer_size: int = 100_000  # maximum number of transitions in the replay buffer
    batch_size: int = 64  # transitions per update
    train_frequency: int = 2  # environment steps per update
    learning_starts: int = 1_000  # environment steps with random actions, before the first update
    tau: float = 0.01  # target smoothing coefficient
    hidden_sizes: tuple[int, ...] = (64, 64)  # hidden layer sizes of the actor and of each critic
    matmul_precision: Literal["medium", "high", "highest"] = "high"  # highest: no TF32 on a GPU
    runs_dir: str = "runs"  # where run folders are created
    run_name: str = ""  # name of the run folder; default {env_id}__{script}__{seed}__{time}
    track: bool = False  # log to Weights & Biases as well
    save_every: int = 0  # save a checkpoint every N iterations; 0: up to ten per run
    save_replay: bool = True  # save the replay buffer; otherwise a resumed run refills it
    resume: str = ""  # run folder to continue; its arguments are kept

    def __post_init__(self) -> None:
        """Check arguments and compute derived ones. tyro reports a ValueError as a usage error."""
        if self.seed not in range(2**32):  # JAX would silently drop the upper bits
            raise ValueError("--seed must be between 0 and 2**32 - 1")
        counts = ("num_envs", "num_steps", "buffer_size", "batch_size", "train_frequency")
        for name in (*counts, "learning_starts"):
            least = 0 if name == "learning_starts" else 1
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
    """Parse the command line, which may start with the preset mujoco."""
    mujoco = Args(
        total_timesteps=1_000_000,
        learning_rate=3e-4,
        num_envs=1,
        num_steps=5_000,
        buffer_size=1_000_000,
        batch_size=256,
        train_frequency=1,
        learning_starts=5_000,
        tau=0.005,
        hidden_sizes=(256, 256),
    )
    flags, default = sys.argv[1:], Args()
    if flags[:1] == ["mujoco"]:
        flags, default = flags[1:], mujoco
    default = args_to_resume() or default  # with --resume, the run's arguments are the defaults
    about = "Put mujoco before the flags to use the MuJoCo settings of Haarnoja et al. 2018."
    parse = partial(tyro.cli, Args, args=flags, default=default, description=about)
    _, unknown = parse(return_unknown_args=True)
    if unknown and not unknown[0].startswith("-"):
        fail(f"Unknown argument: {unknown[0]}. The only preset, mujoco, comes before the flags.")
    return parse()


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
            hint = "use more/sac_linen_gymnasium.py or more/sac_torch_gymnasium.py"
            fail(f"gymnax has no {env_id}. For a Gymnasium environment, {hint}")
        space = self.env.action_space(self.params)
        if not isinstance(space, Box) or not jnp.issubdtype(space.dtype, jnp.floating):
            fail(f"{env_id} has no continuous actions: use more/dqn_linen.py or more/dqn_torch.py")
        if not np.all(np.isfinite(space.low) & np.isfinite(space.high)):
            fail(f"{env_id} has unbounded actions, but this script needs finite bounds")
        self.num_envs = num_envs
        self.action_space = space
        self.action_low = np.broadcast_to(np.float32(space.low), space.shape)
        self.action_high = np.broadcast_to(np.float32(space.high), space.shape)
        self.action_dim = math.prod(space.shape)
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
        """Map action (N, action_dim) from [-1, 1] to the bounds, clip it, and step.

        Return obs (after any restart), the state and the results.
        """
        action = action.reshape(self.num_envs, *self.action_space.shape)
        action = to_bounds(action, self.action_low, self.action_high)
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


def to_bounds(action, low, high):
    """Map actions from [-1, 1] to [low, high] and clip them, in the dtype of the bounds."""
    action = (high + low) / 2 + (high - low) / 2 * action
    return action.clip(low, high).astype(low.dtype)


# === Agent ======================================================================================
class MLP(nnx.Module):
    def __init__(self, num_inputs, hidden_sizes, num_outputs, rngs):
        sizes = (num_inputs, *hidden_sizes)
        self.hidden = nnx.List([dense(m, n, rngs) for m, n in pairwise(sizes)])
        self.output = dense(sizes[-1], num_outputs, rngs)

    def __call__(self, x):
        for layer in self.hidden:
            x = nnx.relu(layer(x))
        return self.output(x)


class Actor(nnx.Module):
    """A Gaussian for each action dimension. draw_action() squashes its samples to [-1, 1]."""

    def __init__(self, obs_size, hidden_sizes, action_dim, rngs):
        self.mlp = MLP(obs_size, hidden_sizes, 2 * action_dim, rngs)

    def __call__(self, obs):  # (B, *obs_shape) -> mean and log_std, (B, action_dim) each
        x = obs.reshape(len(obs), -1).astype(jnp.float32)
        mean, log_std = jnp.split(self.mlp(x), 2, axis=-1)
        # The same bounds as in SB3 and SBX. CleanRL maps log_std to [-5, 2] with a tanh.
        return mean, log_std.clip(-20, 2)


class Critics(nnx.Module):
    """Two estimates of Q(obs, action), the return plus a bonus for the entropy of later actions."""

    def __init__(self, obs_size, action_dim, hidden_sizes, rngs):
        sizes = (obs_size + action_dim, hidden_sizes, 1)
        self.mlps = nnx.List([MLP(*sizes, rngs) for _ in range(2)])

    def __call__(self, obs, action):  # (B, *obs_shape), (B, action_dim) -> (2, B)
        x = obs.reshape(len(obs), -1).astype(jnp.float32)
        x = jnp.concatenate([x, action], axis=-1)
        return jnp.stack([mlp(x).squeeze(-1) for mlp in self.mlps])


def dense(num_inputs: int, num_outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    """A dense layer with PyTorch's default initialization: uniform in +-1 / sqrt(inputs)."""
    bound = 1 / math.sqrt(num_inputs)
    init = partial(jax.random.uniform, minval=-bound, maxval=bound)
    return nnx.Linear(num_inputs, num_outputs, kernel_init=init, bias_init=init, rngs=rngs)


class Agent(nnx.Module):
    """Everything that the optimizer trains."""

    def __init__(self, obs_shape, hidden_sizes, action_dim, rngs):
        obs_size = math.prod(obs_shape)
        self.actor = Actor(obs_size, hidden_sizes, action_dim, rngs)
        self.critics = Critics(obs_size, action_dim, hidden_sizes, rngs)
        self.log_alpha = nnx.Param(jnp.zeros(()))  # alpha is the weight of the entropy


class TrainState(NamedTuple):
    agent: Agent
    target_critics: Critics  # a moving average of the critics
    optimizer: nnx.Optimizer


def make_agent(args: Args, obs_shape: tuple[int, ...], action_dim: int, key) -> TrainState:
    """Initialize the parameters, the target critics and the optimizer."""
    agent = Agent(obs_shape, args.hidden_sizes, action_dim, nnx.Rngs(key))
    # A copy of the arrays, because jax.jit cannot donate the same buffer twice.
    target_critics = nnx.clone(agent.critics, arrays=True)
    # scale_by_adam does not apply the learning rate; scale_by_rate() does.
    rate = optax.GradientTransformationExtraArgs(optax.init_empty_state, scale_by_rate)
    tx = optax.chain(optax.scale_by_adam(), rate)
    return TrainState(agent, target_critics, nnx.Optimizer(agent, tx, wrt=nnx.Param))


def scale_by_rate(updates, state, params=None, *, learning_rate=0.0, **_):
    """Multiply the updates by -learning_rate, an argument of optimizer.update()."""
    return optax.tree.scale(-learning_rate, updates), state


# === Replay =====================================================================================
class Transition(NamedTuple):
    """Transitions; B is num_envs, batch_size or buffer_size."""

    obs: jax.Array  # (B, *obs_shape), input of the policy
    action: jax.Array  # (B, action_dim), in [-1, 1]
    reward: jax.Array  # (B,); this and the fields below result from the action
    terminated: jax.Array  # (B,) bool
    next_obs: jax.Array  # (B, *obs_shape), before any restart


class Replay(NamedTuple):
    """The last buffer_size transitions."""

    transitions: Transition
    num_added: jax.Array  # () int32, transitions added so far, including those overwritten


def make_replay(args: Args, obs_shape, obs_dtype: np.dtype, action_dim: int) -> Replay:
    """Create an empty replay buffer."""
    size = args.buffer_size
    transitions = Transition(
        obs=jnp.zeros((size, *obs_shape), obs_dtype),
        action=jnp.zeros((size, action_dim)),
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
def act(actor, obs, key, is_random):
    """Sample actions (N, action_dim) in [-1, 1], from the policy or, if is_random, uniformly."""
    noise_key, action_key = jax.random.split(key)
    mean, log_std = actor(obs)
    action, _ = draw_action(mean, log_std, jax.random.normal(noise_key, mean.shape))
    random_action = jax.random.uniform(action_key, mean.shape, minval=-1.0)
    return jnp.where(is_random, random_action, action)


def draw_action(mean, log_std, noise):
    """Sample from a Gaussian and apply tanh. Return action (B, action_dim) and logprob (B,)."""
    x = mean + jnp.exp(log_std) * noise
    logprob = -(0.5 * noise**2 + log_std + 0.5 * math.log(2 * math.pi))
    # This is log(1 - tanh(x)**2), the log of the slope of tanh, in a form that avoids log(0) for
    # large x. SB3 and CleanRL add 1e-6 to the slope instead: at x = 10, they get -13.8, not -18.6.
    log_slope = 2 * (math.log(2) - x - nnx.softplus(-2 * x))
    return jnp.tanh(x), (logprob - log_slope).sum(-1)


# === Loss =======================================================================================
def td_target(next_q, next_logprob, alpha, batch: Transition, args: Args):
    """Targets (B,) for Q(obs, action), from the target critics' values of the next action, (2, B).

    They use the lower value to reduce overestimation (Fujimoto et al. 2018), and add the entropy
    of the next action. A terminated episode has no future value. A truncated one bootstraps from
    next_obs, like any other step.
    """
    future = next_q.min(0) - alpha * next_logprob
    return batch.reward + args.gamma * jnp.where(batch.terminated, 0.0, future)


def sac_loss(agent: Agent, target_critics: Critics, batch: Transition, noise, args: Args):
    """Sum of the critic, actor and alpha losses (Haarnoja et al. 2018), and the metrics to log.

    noise (2, B, action_dim) is for sampling the actions at next_obs and at obs.
    """
    fixed = jax.lax.stop_gradient(agent)  # the same values, which jax.grad treats as constants
    alpha = jnp.exp(fixed.log_alpha[...])

    mean, log_std = fixed.actor(batch.next_obs)
    next_action, next_logprob = draw_action(mean, log_std, noise[0])
    next_q = target_critics(batch.next_obs, next_action)
    target = td_target(next_q, next_logprob, alpha, batch, args)
    q = agent.critics(batch.obs, batch.action)
    # As in SB3 and SBX. CleanRL omits the 0.5, which does not change Adam's steps.
    td_loss = 0.5 * ((q - target) ** 2).mean(-1).sum()

    mean, log_std = agent.actor(batch.obs)
    action, logprob = draw_action(mean, log_std, noise[1])
    action_q = fixed.critics(batch.obs, action).min(0)
    actor_loss = (alpha * logprob - action_q).mean()

    entropy = -logprob.mean()
    target_entropy = -action.shape[-1]
    # As in SB3 and SBX. The paper and CleanRL multiply by alpha instead of log_alpha.
    alpha_loss = agent.log_alpha[...] * jax.lax.stop_gradient(entropy - target_entropy)
    loss = td_loss + actor_loss + alpha_loss
    return loss, {
        "losses/td_loss": td_loss,
        "losses/q_value": q.mean(),
        "losses/actor_loss": actor_loss,
        "losses/entropy": entropy,
        "losses/alpha": alpha,
    }


# === Update =====================================================================================
def update(train_state, losses, batch: Transition, noise, learning_rate, args: Args):
    """Train in place on a batch, then move the target critics toward the critics.

    Return losses with the losses of this update added.
    """
    agent, target_critics, optimizer = train_state
    # One gradient of the sum is enough, since each parameter gets its gradient from only one loss.
    # All losses use the parameters from before the update, as in Brax. SB3 (alpha, critics, actor)
    # and CleanRL (critics, actor, alpha) update in turn, so their actor sees the new critics.
    grad_fn = jax.grad(sac_loss, has_aux=True)  # in tree mode, objects are pytrees
    grads, new_losses = grad_fn(agent, target_critics, batch, noise, args)
    optimizer.update(agent, grads, learning_rate=learning_rate)
    new_target = optax.incremental_update(agent.critics, target_critics, args.tau)
    nnx.update(target_critics, nnx.state(new_target))
    return jax.tree.map(jnp.add, losses, new_losses)


def learn(i, carry, constants, args: Args):
    """Run the i-th update due after a step: train on a new batch and add up the losses."""
    train_state, losses = carry
    replay, key, learning_rate = constants
    update_key = jax.random.fold_in(key, i)
    sample_key, noise_key = jax.random.split(update_key)
    batch = sample(replay, sample_key, args.batch_size)
    noise = jax.random.normal(noise_key, (2, *batch.action.shape))
    losses = update(train_state, losses, batch, noise, learning_rate, args)
    return train_state, losses


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
def iterate(train_state, replay, obs, env_state, key, is_random, learning_rate, env, args: Args):
    """Act, step, store and update for num_steps steps. Return the new states and the metrics."""

    def step(carry, inputs):
        train_state, replay, obs, env_state, losses = carry
        is_random, act_key, learn_key = inputs
        action = act(train_state.agent.actor, obs, act_key, is_random)
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
    names = ("td_loss", "q_value", "actor_loss", "entropy", "alpha")  # as in sac_loss
    losses = {f"losses/{name}": jnp.zeros(()) for name in names}
    carry = (train_state, replay, obs, env_state, losses)
    act_keys, learn_keys = jax.random.split(key, (2, args.num_steps))
    carry, episodes = jax.lax.scan(step, carry, (is_random, act_keys, learn_keys))
    updates_before = train_state.optimizer.step[...]
    new_train_state, replay, obs, env_state, losses = carry
    nnx.update(train_state, nnx.state(new_train_state))  # the loop returns new objects
    num_updates = train_state.optimizer.step[...] - updates_before
    metrics = episode_statistics(episodes)
    per_update = 1 / jnp.maximum(num_updates, 1)
    for name, x in losses.items():  # without updates: infinity, which the log writes as null
        metrics[name] = jnp.where(num_updates > 0, x * per_update, jnp.inf)
    metrics["charts/learning_rate"] = learning_rate
    metrics["charts/param_norm"] = optax.global_norm(train_state.agent)
    metrics["charts/updates"] = num_updates
    return replay, obs, env_state, metrics


def train(args: Args) -> None:
    """Train an agent, or continue a run."""
    # "high" and "medium" are the same here: JAX's default, which allows TF32 on a GPU.
    precision = "highest" if args.matmul_precision == "highest" else "default"
    jax.config.update("jax_default_matmul_precision", precision)
    env = VecEnv(args.env_id, args.num_envs)
    spaces: dict[str, Any] = {
        "obs_shape": env.obs_shape,
        "action_dim": env.action_dim,
        "action_low": env.action_low.tolist(),
        "action_high": env.action_high.tolist(),
        "action_dtype": env.action_low.dtype.name,
    }

    # A checkpoint can hold keys from PRNGKey, such as env_state.key, but not from jax.random.key.
    key, agent_key, env_key = jax.random.split(jax.random.PRNGKey(args.seed), 3)
    iteration = 0
    train_state = make_agent(args, env.obs_shape, env.action_dim, agent_key)
    obs, env_state = jax.jit(env.reset)(env_key)
    replay = make_replay(args, env.obs_shape, obs.dtype, env.action_dim)
    if has_checkpoint(args, **spaces):
        arrays = nnx.to_pure_dict(nnx.state(train_state))
        like = Checkpoint(iteration, arrays, replay, obs, env_state)
        iteration, arrays, replay, obs, env_state = load_checkpoint(args.resume, like)
        nnx.update(train_state, arrays)
    packages = ["jax", "jaxlib", "flax", "optax", "gymnax", "numpy"]
    log = RunLog(args, iteration, packages, device=jax.devices()[0].device_kind, **spaces)

    # env and args are compile-time constants. Donated arguments are updated in place, so the replay
    # buffer is never copied. graph=False selects the tree mode of NNX.
    jit = partial(nnx.jit_partial, graph=False, donate_argnums=(0, 1, 2, 3))
    iterate_fn = jit(partial(iterate, env=env, args=args), train_state)
    while iteration < args.num_iterations:
        start = time.perf_counter()
        # Decay per iteration, not per update: updates start only after learning_starts.
        decay = 1 - iteration / args.num_iterations if args.anneal_lr else 1.0
        learning_rate = args.learning_rate * decay
        first = iteration * log.steps_per_iteration
        steps = np.arange(first, first + log.steps_per_iteration, args.num_envs)
        is_random = steps < args.learning_starts  # (num_steps,)
        # Deriving the keys from the iteration number keeps them out of the checkpoint.
        iteration_key = jax.random.fold_in(key, iteration)
        replay, obs, env_state, metrics = iterate_fn(
            replay, obs, env_state, iteration_key, is_random, learning_rate
        )
        metrics = jax.device_get(metrics)  # sync
        log.write(iteration, metrics, start)
        iteration += 1
        if log.must_save(iteration):
            saved = replay_to_save(replay, args)
            arrays = nnx.to_pure_dict(nnx.state(train_state))
            save_checkpoint(log.dir, Checkpoint(iteration, arrays, saved, obs, env_state))
            log.update_info(iteration=iteration)
            if log.stopped_by:  # stop only after saving, so that no iteration is lost
                break
    log.close()


# === Checkpoint =================================================================================
class Checkpoint(NamedTuple):
    """Everything a resumed run needs to continue exactly."""

    iteration: int  # number of completed iterations
    train_state: dict  # arrays of the TrainState
    replay: Replay
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
    pairs = zip(like.replay.transitions, saved.replay.transitions, strict=True)
    transitions = Transition(*(empty.at[: len(x)].set(x) for empty, x in pairs))
    replay = saved.replay._replace(transitions=transitions)
    env_state = jax.tree.unflatten(structure, saved.env_state)
    return saved._replace(replay=replay, env_state=env_state)


def replay_to_save(replay: Replay, args: Args) -> Replay:
    """The stored transitions; empty with --no-save-replay."""
    num_added = replay.num_added if args.save_replay else jnp.int32(0)
    transitions = jax.tree.map(lambda x: np.asarray(x)[:num_added], replay.transitions)
    return Replay(transitions, num_added)


def load_policy(folder: str | Path, seed: int = 0) -> Callable[..., np.ndarray]:
    """Load a trained policy: policy(obs) returns the squashed mean action for each observation.

    obs (N, *obs_shape) and the actions are NumPy arrays. All actions are within the bounds of the
    action space. policy(obs, sample=True) samples the actions instead, as in training.
    """
    info, args = load_info(folder)
    sizes = (info["obs_shape"], info["action_dim"])
    agent = nnx.eval_shape(partial(make_agent, args, *sizes, jax.random.PRNGKey(0))).agent
    saved = msgpack_restore(Path(folder, "checkpoint.msgpack").read_bytes())
    nnx.update(agent, nnx.restore_int_paths(saved["train_state"]["agent"]))
    get_gaussian = jax.jit(agent.actor)
    low, high = (np.array(info[x], info["action_dtype"]) for x in ("action_low", "action_high"))
    rng = np.random.default_rng(seed)

    def policy(obs, sample=False):
        mean, log_std = map(np.asarray, get_gaussian(obs))
        action = mean
        if sample:
            action = mean + np.exp(log_std) * rng.standard_normal(mean.shape, np.float32)
        return to_bounds(np.tanh(action).reshape(-1, *low.shape), low, high)

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

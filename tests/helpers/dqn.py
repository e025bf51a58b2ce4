"""Reference implementation of DQN in float64, and a NumPy interface to all DQN scripts.

Weights are lists of layers (kernel, bias), and kernels are (inputs, outputs). For images (H, W, C),
the first kernel (9 C, 16) is the 3x3 convolution, written as a dense layer on patches.
"""

import dataclasses
import importlib
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import flax
import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import probes
import pytest
import torch
from flax import nnx
from gymnax.environments.classic_control.cartpole import CartPole
from gymnax.environments.spaces import Box
from running import arrays, parse
from running import flat as flat_tree
from sections import DQN_PAIRS, ROWS

LINEN_PAIR, NNX_PAIR, TORCH_PAIR = DQN_PAIRS
COMPILED = "dqn_torch_compile"
# One script for each version of the Agent section and of the Replay section. Only the two eager
# PyTorch scripts share their Agent section. Replay sections are the same in Linen and NNX, and in
# all PyTorch scripts.
AGENTS = (*LINEN_PAIR, *NNX_PAIR, TORCH_PAIR[0], COMPILED)
REPLAYS = (*LINEN_PAIR, TORCH_PAIR[0])
LOSSES = ("losses/td_loss", "losses/q_value")

Layers = list[tuple[np.ndarray, np.ndarray]]


# === Reference, with PyTorch autograd and optimizers ============================================
# The reference shares no code with the scripts.
def q_values(params: list[torch.Tensor], obs: np.ndarray, obs_shape: tuple) -> torch.Tensor:
    x = torch.tensor(obs, dtype=torch.float64)
    if len(obs_shape) == 3:
        # unfold() returns (B, H - 2, W - 2, C, 3, 3), and flatten() (B, H - 2, W - 2, 9 C).
        x = x.unfold(1, 3, 1).unfold(2, 3, 1).permute(0, 1, 2, 4, 5, 3).flatten(3)
    for i in range(0, len(params) - 2, 2):
        x = (x @ params[i] + params[i + 1]).relu().flatten(1)
    return x @ params[-2] + params[-1]


def loss(params: list, target_params: list, batch: tuple, args: Any, obs_shape: tuple):
    """Return the loss and the mean Q-value. Truncated episodes bootstrap from next_obs."""
    obs, action, reward, terminated, next_obs = batch
    indices = np.arange(len(action))
    future = q_values(target_params, next_obs, obs_shape).detach()
    choice = q_values(params, next_obs, obs_shape) if args.double_q else future
    future = future[indices, choice.argmax(1)]
    future[terminated] = 0.0
    taken = q_values(params, obs, obs_shape)[indices, action]
    error = (taken - (torch.tensor(reward) + args.gamma * future)).abs()
    losses = error**2
    if args.loss == "huber":
        losses = torch.where(error <= 1, error**2 / 2, error - 0.5)
    return losses.mean(), taken.mean()


def parameters(layers: Layers) -> list[torch.Tensor]:
    arrays = [x for layer in layers for x in layer]
    return [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in arrays]


def copies_of(params: list[torch.Tensor]) -> Layers:
    arrays = [x.detach().numpy().copy() for x in params]
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def updates(layers: Layers, batches, rates, args: Any, obs_shape: tuple):
    """For each update, yield the new layers of both networks, and [loss, mean Q-value]."""
    params = parameters(layers)
    target_params = parameters(layers)
    if args.optimizer == "adam":
        optimizer: Any = torch.optim.Adam(params, eps=args.optimizer_eps)
    else:
        decay, eps = args.rmsprop_decay, args.optimizer_eps
        optimizer = torch.optim.RMSprop(params, alpha=decay, eps=eps, centered=True)
    for i, (batch, rate) in enumerate(zip(batches, rates, strict=True)):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        losses = loss(params, target_params, batch, args, obs_shape)
        losses[0].backward()
        optimizer.step()
        if (i + 1) % args.target_network_frequency == 0:
            target_params = parameters(copies_of(params))
        yield copies_of(params), copies_of(target_params), [x.item() for x in losses]


def random_batch(seed: int, size: int, obs_shape: tuple, num_actions: int) -> tuple:
    """Return the fields of a random Transition. The first number in each obs is 0."""
    rng = np.random.default_rng(seed)
    obs, next_obs = rng.normal(size=(2, size, *obs_shape)).astype("f")
    obs.reshape(size, -1)[:, 0] = 0
    action = rng.integers(0, num_actions, size).astype("i")
    reward = (2 * rng.normal(size=size)).astype("f")
    return obs, action, reward, rng.random(size) < 0.3, next_obs


# === The scripts ================================================================================
def layers_of(named: Mapping[str, Any]) -> Layers:
    """Convert named arrays of a network to layers. Sorted by name, a bias precedes its kernel."""
    names = sorted(named)
    kernels = [np.array(named[name]) for name in names[1::2]]
    if "Conv_0/kernel" in named or "conv/kernel" in named:  # (rows, columns, C, 16)
        kernels[0] = kernels[0].reshape(-1, 16)
    if "output.weight" in named:  # PyTorch: (outputs, inputs)
        kernels = [x.T for x in kernels]
    if "conv.weight" in named:
        # Transposed kernels are (columns, rows, C, 16) and (16 H W, outputs).
        image, hidden = kernels[:2]
        kernels[0] = image.swapaxes(0, 1).reshape(-1, 16)
        hidden = hidden.reshape(16, -1, hidden.shape[1]).swapaxes(0, 1)
        kernels[1] = hidden.reshape(-1, hidden.shape[2])
    return list(zip(kernels, (np.array(named[name]) for name in names[::2]), strict=True))


def layers_in(folder: Path) -> Layers:
    """Return the network layers in the checkpoint of a run."""
    beginning = re.compile("train_state/params/params/|(train_state/)?agent/")
    found = arrays(folder).items()
    return layers_of({beginning.sub("", name): x for name, x in found if beginning.match(name)})


def flat(layers: Layers) -> np.ndarray:
    return np.concatenate([np.ravel(x).astype(float) for layer in layers for x in layer])


def replay_in(folder: Path) -> list[np.ndarray]:
    """Return the replay buffer in the checkpoint of a run, as the fields of a Transition."""
    found = arrays(folder)
    names = ("obs", "action", "reward", "terminated", "next_obs")
    return [found[f"replay/transitions/{name}"] for name in names]


class Linen:
    """NumPy interface to the weights and updates of a script."""

    def __init__(self, script: ModuleType, args: Any, obs_shape: tuple) -> None:
        self.script, self.args = script, args
        self.state = script.make_agent(args, obs_shape, 3, jax.random.PRNGKey(args.seed))
        self.update_fn = jax.jit(partial(script.update, args=args))

    def layers(self) -> list[Layers]:
        """Return the layers of the network and of the target network."""
        trees = self.state.params, self.state.target_params
        return [layers_of(flax.traverse_util.flatten_dict(x["params"], sep="/")) for x in trees]

    def update(self, batch: tuple, learning_rate: float) -> list[float]:
        batch = self.script.Transition(*map(jnp.array, batch))
        self.state, losses = self.update_fn(self.state, batch, learning_rate)
        return [float(losses[name]) for name in LOSSES]


class NNX(Linen):
    """NNX version of Linen. The state is a dict of arrays."""

    def __init__(self, script: ModuleType, args: Any, obs_shape: tuple) -> None:
        self.script, self.args = script, args
        objects = script.make_agent(args, obs_shape, 3, jax.random.PRNGKey(args.seed))
        self.graphdef, state = nnx.split(objects, graph=False)
        self.state = nnx.to_pure_dict(state)
        self.update_fn = jax.jit(self.new_state)

    def new_state(self, state: dict, batch: Any, learning_rate: Any) -> tuple[dict, dict]:
        if "gymnasium" in self.script.__name__:
            own = self.graphdef, self.args
            return self.script.update(state, batch, learning_rate, *own)
        objects = nnx.merge(self.graphdef, state)
        losses = self.script.update(objects, batch, learning_rate, self.args)
        return nnx.to_pure_dict(nnx.state(objects)), losses

    def layers(self) -> list[Layers]:
        return [layers_of(dict(flat_tree(self.state[x]))) for x in ("agent", "target")]


class Torch:
    """PyTorch version of Linen. update() also copies the target network, as train() does."""

    def __init__(self, script: ModuleType, args: Any, obs_shape: tuple) -> None:
        self.script, self.args = script, args
        torch.manual_seed(args.seed)
        made = script.make_agent(args, obs_shape, 3, torch.device("cpu"))
        self.agent, self.target, self.optimizer = made
        self.done = 0  # number of updates

    def layers(self) -> list[Layers]:
        """Return the layers of the network and of the target network."""
        return [layers_of(x.state_dict()) for x in (self.agent, self.target)]

    def update(self, batch: tuple, learning_rate: float) -> list[float]:
        batch = self.script.Transition(*map(torch.tensor, batch))
        losses = self.update_in_place(batch, learning_rate)
        self.done += 1
        if self.done % self.args.target_network_frequency == 0:
            self.target.load_state_dict(self.agent.state_dict())
        return [float(losses[name]) for name in LOSSES]

    def update_in_place(self, batch: Any, learning_rate: float) -> dict:
        self.optimizer.param_groups[0]["lr"] = learning_rate
        return self.script.update(self.agent, self.target, self.optimizer, batch, self.args)


class TorchCompile(Torch):
    """Interface to the compiled script, without torch.compile."""

    def update_in_place(self, batch: Any, learning_rate: float) -> dict:
        rate = torch.tensor(learning_rate)
        return self.script.update(self.agent, self.target, self.optimizer, batch, rate, self.args)


SMALL = "--num-envs 4 --num-steps 16 --total-timesteps 640 --hidden-sizes 8 8 --buffer-size 128 "
SMALL += "--batch-size 16 --train-frequency 4 --learning-starts 32 --exploration-steps 320 "
SMALL += "--target-network-frequency 5 --matmul-precision highest "


def args_of(name: str, flags: str) -> Any:
    script = importlib.import_module(name)
    return script.tyro.cli(script.Args, args=(SMALL + flags).split())


def make_learner(name: str, obs_shape: tuple, flags: str) -> Any:
    """Return a learner for an environment with three actions."""
    kinds = {"linen": Linen, "nnx": NNX, "torch": TorchCompile if name == COMPILED else Torch}
    kind = kinds[ROWS[name]["framework"]]
    return kind(importlib.import_module(name), args_of(name, flags), obs_shape)


class Replay:
    """NumPy interface to the replay buffer of a script."""

    def __init__(
        self, name: str, flags: str, obs_shape: tuple = (4,), obs_dtype: Any = "f"
    ) -> None:
        self.script, self.args = importlib.import_module(name), args_of(name, flags)
        self.is_pure = name == "dqn_linen"
        make = self.script.make_replay if self.is_pure else self.script.Replay
        device = [torch.device("cpu")] if "torch" in name else []
        self.replay = make(self.args, obs_shape, np.dtype(obs_dtype), *device)

    def add(self, transitions: tuple) -> None:
        """Add one step of all environments, given as the fields of a Transition."""
        obs, action, *others = transitions
        result = dict(zip(("reward", "terminated", "next_obs"), others, strict=True))
        if self.is_pure:
            self.replay = self.script.add(self.replay, obs, action, result)
        else:
            self.replay.add(obs, action, result)

    def sample(self, seed: int, batch_size: int) -> list[np.ndarray]:
        torch.manual_seed(seed)
        if self.is_pure:
            batch = self.script.sample(self.replay, jax.random.key(seed), batch_size)
        elif "torch" in self.script.__name__:
            batch = self.replay.sample(batch_size)
        else:
            batch = self.replay.sample(np.random.default_rng(seed), batch_size)
        return [np.array(x) for x in batch]

    def updates_due(self, num_steps: int) -> int:
        """Return the number of updates due once num_steps transitions are stored."""
        if self.is_pure:
            replay = self.replay._replace(num_added=jnp.int32(num_steps))
            return int(self.script.updates_due(replay, self.args))
        self.replay.num_added = num_steps
        return self.replay.updates_due()


# === Environments in gymnax and in Gymnasium ====================================================
# CartPole, truncated after 10 steps.
class ShortCartPole(CartPole):
    @property
    def default_params(self) -> Any:
        return dataclasses.replace(super().default_params, max_steps_in_episode=10)


if "ShortCartPole-v0" not in gymnax.registered_envs:
    gymnax.register("ShortCartPole-v0", ShortCartPole)
    own: Any = gymnasium.spec("CartPole-v1").entry_point
    gymnasium.register("ShortCartPole-v0", entry_point=own, max_episode_steps=10)


class Ends(probes.ProbeSignal):
    """Probe whose episodes with signal 1 terminate after a step; others are truncated after two."""

    def is_terminated(self, state: Any, params: Any) -> jax.Array:
        return state.signal > 0


class GymnasiumEnds(probes.GymnasiumSignal):
    def step(self, action: Any) -> tuple:
        obs, reward, *_ = super().step(action)
        return obs, reward, bool(obs[0] > 0), False, {}


# === Observations that are not float32 ==========================================================
class Bytes(probes.Probe):
    def observe(self, key: Any, state: Any, action: Any, params: Any) -> jax.Array:
        return jnp.where(state.signal > 0, jnp.uint8(7), jnp.uint8(250)).repeat(3)

    def observation_space(self, params: Any) -> Box:
        return Box(0, 255, (3,), jnp.uint8)


class GymnasiumBytes(probes.GymnasiumSignal):
    observation_space = gymnasium.spaces.Box(0, 255, (3,), np.uint8)

    def reset(self, **options: Any) -> tuple:
        obs, info = super().reset(**options)
        self.seen = np.full(3, 7 if obs[0] > 0 else 250, self.observation_space.dtype)
        return self.seen, info

    def step(self, action: Any) -> tuple:
        _, *others = super().step(action)
        return self.seen, *others


class GymnasiumNumbers(GymnasiumBytes):
    """Environment with float64 observations."""

    observation_space = gymnasium.spaces.Box(0, 255, (3,), np.float64)


if "Bytes-v0" not in gymnax.registered_envs:
    gymnax.register("Bytes-v0", Bytes)
    gymnax.register("Ends-v0", Ends)
    kinds: dict[str, Any] = {"Bytes-v0": GymnasiumBytes, "Numbers-v0": GymnasiumNumbers}
    kinds["Ends-v0"] = GymnasiumEnds
    for env_id, kind in kinds.items():
        gymnasium.register(env_id, kind, max_episode_steps=2)


def step_cartpole(obs: np.ndarray, action: Any) -> tuple[np.ndarray, float, bool]:
    """Take one step of CartPole from obs in Gymnasium. Return next_obs, reward and terminated."""
    env: Any = gymnasium.make("CartPole-v1").unwrapped
    env.reset()
    env.state = obs
    return env.step(int(action))[:3]


# === Helpers for the DQN and SAC tests ==========================================================
def statistics(episodes: list[tuple[float, int]]) -> dict[str, float]:
    """Return the logged metrics of an iteration, given its finished episodes (return, length)."""
    metrics: dict[str, float] = {"charts/episodes": len(episodes)}
    for name, x in zip(("return", "length"), np.array(episodes).T, strict=True):
        metrics[f"charts/episodic_{name}"] = x.mean()
        metrics[f"charts/episodic_{name}_min"] = x.min()
        metrics[f"charts/episodic_{name}_max"] = x.max()
    return metrics


def finished_episodes(reward: np.ndarray, done: np.ndarray, num_steps: int) -> list[list]:
    """Return a list per iteration with the episodes (return, length) that finished in it.

    reward and done are arrays (T, N). An iteration has num_steps steps.
    """
    iterations: list[list] = [[] for _ in range(len(reward) // num_steps)]
    for env in range(reward.shape[1]):
        start = 0
        for step in np.flatnonzero(done[:, env]):
            episode = reward[start : step + 1, env].sum(), step + 1 - start
            iterations[step // num_steps].append(episode)
            start = step + 1
    return iterations


def assert_counts_are_checked(name: str, flags: list[str], monkeypatch: Any, capfd: Any) -> None:
    """Assert that counts below the minimum are usage errors."""
    monkeypatch.setenv("COLUMNS", "200")  # so that tyro does not wrap the message
    flags = ["num-envs", "num-steps", "buffer-size", "batch-size", "train-frequency", *flags]
    messages = {"total-timesteps": (0, "must be at least one iteration")}
    for flag in flags:
        least = 0 if flag in ("learning-starts", "exploration-steps") else 1
        messages[flag] = least - 1, f"must be at least {least}"
    for flag, (value, message) in messages.items():
        with pytest.raises(SystemExit) as stopped:
            parse(name, f"--{flag}", value)
        output, errors = capfd.readouterr()
        assert stopped.value.code == 2 and output == ""
        assert f"--{flag} {message}" in errors and "Traceback" not in errors

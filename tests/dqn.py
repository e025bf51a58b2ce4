"""The DQN scripts behind one interface, NumPy in and out; and DQN's arithmetic in float64.

Weights are read as layers [(kernel (inputs, outputs), bias), ...]. For images (H, W, C) the first
layer is that of the 3 x 3 surroundings: (9 C, 16).
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
import torch
from gymnax.environments.classic_control.cartpole import CartPole
from gymnax.environments.spaces import Box
from running import arrays
from sections import DQN_PAIRS

LINEN_PAIR, TORCH_PAIR = DQN_PAIRS
COMPILED = "dqn_torch_compile"
# One script for each text of a section: Agent, Loss and Update are the same to the letter in a
# pair, but for the compiled script's optimizers; Replay is in the scripts of PyTorch.
AGENTS = (LINEN_PAIR[0], TORCH_PAIR[0], COMPILED)
REPLAYS = (*LINEN_PAIR, TORCH_PAIR[0])
LOSSES = ("losses/td_loss", "losses/q_value")

Layers = list[tuple[np.ndarray, np.ndarray]]


# === From the papers, with PyTorch's gradients and optimizers; shares no code with the scripts ===
def q_values(params: list[torch.Tensor], obs: np.ndarray, obs_shape: tuple) -> torch.Tensor:
    x = torch.tensor(obs, dtype=torch.float64)
    if len(obs_shape) == 3:  # (B, H - 2, W - 2, C, 3, 3), and then 9 C
        x = x.reshape(-1, *obs_shape).unfold(1, 3, 1).unfold(2, 3, 1)
        x = x.permute(0, 1, 2, 4, 5, 3).flatten(3)
    for i in range(0, len(params) - 2, 2):
        x = (x @ params[i] + params[i + 1]).relu().flatten(1)
    return x @ params[-2] + params[-1]


def loss(params: list, target_params: list, batch: tuple, args: Any, obs_shape: tuple):
    """The loss and the mean Q; the target is a constant, and a truncation like any other step."""
    obs, action, reward, terminated, next_obs = batch
    rows = np.arange(len(action))
    future = q_values(target_params, next_obs, obs_shape).detach()
    choice = q_values(params, next_obs, obs_shape) if args.double_q else future
    future = future[rows, choice.argmax(1)]
    future[terminated] = 0.0
    taken = q_values(params, obs, obs_shape)[rows, action]
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
    """After each update: the layers, those of the target, and the loss and the mean Q."""
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


def random_batch(seed: int, size: int, obs_dim: int, num_actions: int) -> tuple:
    """The first number of every obs is 0."""
    rng = np.random.default_rng(seed)
    obs, next_obs = rng.normal(size=(2, size, obs_dim)).astype("f")
    obs[:, 0] = 0
    action = rng.integers(0, num_actions, size).astype("i")
    reward = (2 * rng.normal(size=size)).astype("f")
    return obs, action, reward, rng.random(size) < 0.3, next_obs


# === The scripts ================================================================================
def layers_of(named: Mapping[str, Any]) -> Layers:
    """From a network's arrays by a script's names for them, biases before the kernels."""
    names = sorted(named)
    kernels = [np.array(named[name]) for name in names[1::2]]
    if "output.weight" in named:  # PyTorch's: (outputs, inputs)
        kernels = [x.T for x in kernels]
    if "conv.weight" in named:  # (columns, rows, C, 16) by now; and then (16 H W, outputs)
        image, hidden = kernels[:2]
        kernels[0] = image.swapaxes(0, 1).reshape(-1, 16)
        hidden = hidden.reshape(16, -1, hidden.shape[1]).swapaxes(0, 1)
        kernels[1] = hidden.reshape(-1, hidden.shape[2])
    return list(zip(kernels, (np.array(named[name]) for name in names[::2]), strict=True))


def layers_in(folder: Path) -> Layers:
    """Of the network in a run's checkpoint."""
    beginning = re.compile("train_state/params/params/|agent/")
    found = arrays(folder).items()
    return layers_of({beginning.sub("", name): x for name, x in found if beginning.match(name)})


def flat(layers: Layers) -> np.ndarray:
    return np.concatenate([np.ravel(x).astype(float) for layer in layers for x in layer])


def replay_in(folder: Path) -> list[np.ndarray]:
    """Of the replay in a run's checkpoint: a Transition's fields."""
    found = arrays(folder)
    names = ("obs", "action", "reward", "terminated", "next_obs")
    return [found[f"replay/rows/{name}"] for name in names]


class Linen:
    def __init__(self, script: ModuleType, args: Any, obs_shape: tuple) -> None:
        self.script, self.args = script, args
        self.state = script.make_agent(args, obs_shape, 3, jax.random.PRNGKey(args.seed))
        self.update_fn = jax.jit(partial(script.update, args=args))

    def layers(self) -> list[Layers]:
        """Of the network, and of the target network."""
        trees = self.state.params, self.state.target_params
        return [layers_of(flax.traverse_util.flatten_dict(x["params"], sep="/")) for x in trees]

    def update(self, batch: tuple, learning_rate: float) -> list[float]:
        batch = self.script.Transition(*map(jnp.array, batch))
        self.state, losses = self.update_fn(self.state, batch, learning_rate)
        return [float(losses[name]) for name in LOSSES]


class Torch:
    """The target is copied here: test_dqn_training.py sees to it that train does so."""

    def __init__(self, script: ModuleType, args: Any, obs_shape: tuple) -> None:
        self.script, self.args = script, args
        torch.manual_seed(args.seed)
        made = script.make_agent(args, obs_shape, 3, torch.device("cpu"))
        self.agent, self.target, self.optimizer = made
        self.done = 0  # updates

    def layers(self) -> list[Layers]:
        """Of the network, and of the target network."""
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
    """The same, op by op: nothing is compiled by torch.compile."""

    def update_in_place(self, batch: Any, learning_rate: float) -> dict:
        rate = torch.tensor(learning_rate)
        return self.script.update(self.agent, self.target, self.optimizer, batch, rate, self.args)


SMALL = "--num-envs 4 --num-steps 16 --total-timesteps 640 --hidden-sizes 8 8 --buffer-size 128 "
SMALL += "--batch-size 16 --train-frequency 4 --learning-starts 32 --exploration-steps 320 "
SMALL += "--target-network-frequency 5 --matmul-precision highest "


def args_of(name: str, flags: str) -> Any:
    script = importlib.import_module(name)
    return script.tyro.cli(script.Args, args=(SMALL + flags).split())


def make_learner(name: str, obs_shape: tuple, flags: str) -> Linen | Torch:
    """Of environments with three actions."""
    kinds = {"dqn_linen": Linen, "dqn_torch": Torch, COMPILED: TorchCompile}
    return kinds[name](importlib.import_module(name), args_of(name, flags), obs_shape)


class Replay:
    """A script's replay."""

    def __init__(
        self, name: str, flags: str, obs_shape: tuple = (4,), obs_dtype: Any = "f"
    ) -> None:
        self.script, self.args = importlib.import_module(name), args_of(name, flags)
        self.is_pure = name == "dqn_linen"
        make = self.script.make_replay if self.is_pure else self.script.Replay
        device = [torch.device("cpu")] if "torch" in name else []
        self.replay = make(self.args, obs_shape, np.dtype(obs_dtype), *device)

    def add(self, transitions: tuple) -> None:
        """A step of all environments: the fields of a Transition."""
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
        """With so many steps added, the last of which all environments took at once."""
        if self.is_pure:
            replay = self.replay._replace(num_added=jnp.int32(num_steps))
            return int(self.script.updates_due(replay, self.args))
        self.replay.num_added = num_steps
        return self.replay.updates_due()


# === CartPole that is cut off after 10 steps, in both libraries =================================
class ShortCartPole(CartPole):
    @property
    def default_params(self) -> Any:
        return dataclasses.replace(super().default_params, max_steps_in_episode=10)


if "ShortCartPole-v0" not in gymnax.registered_envs:
    gymnax.register("ShortCartPole-v0", ShortCartPole)
    own: Any = gymnasium.spec("CartPole-v1").entry_point
    gymnasium.register("ShortCartPole-v0", entry_point=own, max_episode_steps=10)


# === Observations that are no float32 ===========================================================
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
    """In float64."""

    observation_space = gymnasium.spaces.Box(0, 255, (3,), np.float64)


if "Bytes-v0" not in gymnax.registered_envs:
    gymnax.register("Bytes-v0", Bytes)
    kinds: dict[str, Any] = {"Bytes-v0": GymnasiumBytes, "Numbers-v0": GymnasiumNumbers}
    for env_id, kind in kinds.items():
        gymnasium.register(env_id, kind, max_episode_steps=2)


def step_cartpole(obs: np.ndarray, action: Any) -> tuple[np.ndarray, float, bool]:
    """Of Gymnasium's CartPole, put where obs says: next_obs, reward and terminated."""
    env: Any = gymnasium.make("CartPole-v1").unwrapped
    env.reset()
    env.state = obs
    return env.step(int(action))[:3]

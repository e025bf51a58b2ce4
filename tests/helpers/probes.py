"""Probe environments for gymnax and Gymnasium, with known values and best actions.

The idea is from Andy Jones: a probe is so simple that a failure points to one kind of bug.
"""

from typing import Any

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces
from gymnax.environments.classic_control.cartpole import CartPole, EnvParams


@struct.dataclass
class State:
    time: jax.Array
    signal: jax.Array  # -1 or 1


@struct.dataclass
class Params:
    max_steps_in_episode: int = 1000


class Probe(environment.Environment):
    """Episodes have one step with reward 1, so the value is 1. Base class of the other probes."""

    @property
    def default_params(self) -> Any:
        return Params()

    def reset_env(self, key: jax.Array, params: Params) -> tuple[jax.Array, State]:
        signal = jnp.where(jax.random.bernoulli(key), 1.0, -1.0)
        state = State(jnp.int32(0), signal)
        return self.observe(key, state, None, params), state

    def step_env(self, key: jax.Array, state: State, action: Any, params: Params) -> tuple:
        reward = self.reward(state, action)
        state = State(state.time + 1, state.signal)
        obs = self.observe(key, state, action, params)
        return obs, state, reward, self.is_terminated(state, params), {}

    def reward(self, state: State, action: Any) -> jax.Array:
        return jnp.float32(1.0)

    def observe(self, key: jax.Array, state: State, action: Any, params: Params) -> jax.Array:
        return jnp.zeros(1)

    def is_terminated(self, state: State, params: Params) -> jax.Array:
        return state.time >= 1

    def action_space(self, params: Params) -> spaces.Space:
        return spaces.Discrete(2)

    def observation_space(self, params: Params) -> spaces.Box:
        return spaces.Box(-1.0, 1.0, (1,))


class ShortCartPole(CartPole):
    """CartPole with a limit of 12 steps, so some episodes terminate and others are truncated."""

    @property
    def default_params(self) -> EnvParams:
        return EnvParams(max_steps_in_episode=12)


class ProbeSignal(Probe):
    """The observation, a signal, tells which action has reward 1. The other has reward -1.

    Episodes are truncated after 2 steps. If they bootstrap, the value is 1 / (1 - gamma).
    """

    @property
    def default_params(self) -> Any:
        return Params(max_steps_in_episode=2)

    def reward(self, state: State, action: Any) -> jax.Array:
        return jnp.where((action == 1) == (state.signal > 0), 1.0, -1.0)

    def observe(self, key: jax.Array, state: State, action: Any, params: Params) -> jax.Array:
        return state.signal[None]

    def is_terminated(self, state: State, params: Params) -> jax.Array:
        return jnp.bool_(False)


class Recall1(Probe):
    """The first observation shows which action gets reward 1 at the end. The other gets -1."""

    steps = 1  # number of steps between the signal and the rewarded action

    def reward(self, state: State, action: Any) -> jax.Array:
        right = jnp.where((action == 1) == (state.signal > 0), 1.0, -1.0)
        return jnp.where(state.time == self.steps, right, 0.0)

    def observe(self, key: jax.Array, state: State, action: Any, params: Params) -> jax.Array:
        return jnp.where(state.time == 0, state.signal, 0.0)[None]

    def is_terminated(self, state: State, params: Params) -> jax.Array:
        return state.time > self.steps


class Recall10(Recall1):
    steps = 10


# Bounds of continuous actions: -1 to 3, and 0 to 10.
LOW, HIGH = np.array([-1, 0], np.float32), np.array([3, 10], np.float32)
IMAGE = (5, 6, 2)  # height, width, channels


def best_action(signal: Any) -> Any:
    """Return (2, 2.5) if the signal is 1, and (0, 7.5) if it is -1."""
    return np.array([1, 5], np.float32) + np.array([1, -2.5], np.float32) * signal


def nearness(signal: Any, action: Any) -> Any:
    """Return the reward of an action: 1 for the best, and less for actions farther from it."""
    return 1 - (((action - best_action(signal)) / (HIGH - LOW)) ** 2).mean(-1)


class Aim(ProbeSignal):
    """The best action has reward 1. An observation is (signal, 1000 + signal, time)."""

    def reward(self, state: State, action: Any) -> jax.Array:
        return nearness(state.signal, action)

    def observe(self, key: jax.Array, state: State, action: Any, params: Params) -> jax.Array:
        return jnp.stack([state.signal, 1000 + state.signal, state.time.astype(jnp.float32)])

    def action_space(self, params: Params) -> spaces.Space:
        return spaces.Box(jnp.array(LOW), jnp.array(HIGH), (2,))

    def observation_space(self, params: Params) -> spaces.Box:
        return spaces.Box(-1.0, 1001.0, (3,))


class ImageAim(Aim):
    """The observation is an image in which all pixels have the value of the signal."""

    def observe(self, key: jax.Array, state: State, action: Any, params: Params) -> jax.Array:
        return jnp.full(IMAGE, state.signal)

    def observation_space(self, params: Params) -> spaces.Box:
        return spaces.Box(-1.0, 1.0, IMAGE)


class Unbounded(Aim):
    def action_space(self, params: Params) -> spaces.Space:
        return spaces.Box(-jnp.inf, jnp.inf, (2,))


class GymnasiumSignal(gymnasium.Env):
    """ProbeSignal for Gymnasium. A TimeLimit wrapper truncates the episodes."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        self.obs = self.np_random.choice(np.array([[-1], [1]], np.float32))
        return self.obs, {}

    def step(self, action: Any) -> tuple:
        reward = 1.0 if (action == 1) == (self.obs[0] > 0) else -1.0
        return self.obs, reward, False, False, {}


class GymnasiumAim(gymnasium.Env):
    """Aim for Gymnasium. A TimeLimit wrapper truncates the episodes."""

    action_space: Any = gymnasium.spaces.Box(LOW, HIGH)
    observation_space = gymnasium.spaces.Box(-1, 1001, (3,), np.float32)
    signals: tuple[int, ...] = (-1, 1)

    def observe(self) -> np.ndarray:
        return np.array([self.signal, 1000 + self.signal, self.time], np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        self.signal = self.np_random.choice(self.signals)
        self.time = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple:
        self.time += 1
        return self.observe(), float(nearness(self.signal, action)), False, False, {}


class GymnasiumAimAlike(GymnasiumAim):
    """GymnasiumAim with identical episodes, so a resumed run can equal an uninterrupted one."""

    signals = (1,)


class GymnasiumImageAim(GymnasiumAim):
    observation_space = gymnasium.spaces.Box(-1, 1, IMAGE, np.float32)

    def observe(self) -> np.ndarray:
        return np.full(IMAGE, self.signal, np.float32)


class GymnasiumUnbounded(GymnasiumAim):
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))


class GymnasiumIntegers(GymnasiumAim):
    action_space = gymnasium.spaces.Box(-100, 100, (2,), np.int8)


class GymnasiumDoubles(GymnasiumAim):
    """Environment with float64 action bounds."""

    action_space = gymnasium.spaces.Box(np.float64(LOW), np.float64(HIGH), dtype=np.float64)


def make_doubled(env_id: str) -> gymnasium.Env:
    """Make an environment with a wrapper that uses a lambda, which an EnvSpec cannot contain."""
    env = gymnasium.make(env_id)
    return gymnasium.wrappers.TransformReward(env, lambda reward: 2 * float(reward))


if "ProbeSignal-v0" not in gymnax.registered_envs:
    for probe in (ProbeSignal, Aim, ImageAim, Unbounded):
        gymnax.register(f"{probe.__name__}-v0", probe)
    kinds: dict[str, type] = {"ProbeSignal": GymnasiumSignal, "Aim": GymnasiumAim}
    kinds |= {"AimAlike": GymnasiumAimAlike, "Unbounded": GymnasiumUnbounded}
    kinds |= {"ImageAim": GymnasiumImageAim}
    kinds |= {"Integers": GymnasiumIntegers, "Doubles": GymnasiumDoubles}
    for name, kind in kinds.items():
        entry_point = f"probes:{kind.__name__}"
        gymnasium.register(f"{name}-v0", entry_point=entry_point, max_episode_steps=2)
    for name in ("ProbeSignal", "Aim"):
        options = {"env_id": f"{name}-v0"}
        gymnasium.register(f"Doubled{name}-v0", entry_point="probes:make_doubled", kwargs=options)

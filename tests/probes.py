"""Environments whose values and best actions are known, Probe...-v0 in gymnax and in Gymnasium.

The idea is Andy Jones's: each probe fails for one kind of mistake.
"""

from typing import Any

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces


@struct.dataclass
class State:
    time: jax.Array
    signal: jax.Array  # -1 or 1


@struct.dataclass
class Params:
    max_steps_in_episode: int = 1000


class Probe(environment.Environment):
    """One step, reward 1: the value is 1. The others override what they change."""

    length = 1  # steps until an episode terminates

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
        return state.time >= self.length

    def action_space(self, params: Params) -> spaces.Discrete:
        return spaces.Discrete(2)

    def observation_space(self, params: Params) -> spaces.Box:
        return spaces.Box(-1.0, 1.0, (1,))


class ProbeDiscount(Probe):
    """Two steps, reward 1 for the last: values gamma, then 1."""

    length = 2

    def reward(self, state: State, action: Any) -> jax.Array:
        return (state.time == 1).astype(jnp.float32)

    def observe(self, key: jax.Array, state: State, action: Any, params: Params) -> jax.Array:
        return state.time.astype(jnp.float32)[None]


class ProbeTruncation(Probe):
    """Reward 1 for ever, cut off after 2 steps: value 1 / (1 - gamma), if that is bootstrapped."""

    length = 1_000_000

    @property
    def default_params(self) -> Any:
        return Params(max_steps_in_episode=2)

    def observe(self, key: jax.Array, state: State, action: Any, params: Params) -> jax.Array:
        return (state.time == 1).astype(jnp.float32)[None]


class ProbeBoth(ProbeTruncation):
    """The same for the action that the observation names; for the other, reward -1."""

    def reward(self, state: State, action: Any) -> jax.Array:
        return jnp.where((action == 1) == (state.signal > 0), 1.0, -1.0)

    def observe(self, key: jax.Array, state: State, action: Any, params: Params) -> jax.Array:
        return state.signal[None]


class GymnasiumProbe(gymnasium.Env):
    """A probe for Gymnasium, which truncates it."""

    def __init__(self, probe: type[Probe]) -> None:
        self.probe, self.params = probe(), Params()
        self.action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def observe(self) -> np.ndarray:
        key: Any = None
        return np.asarray(self.probe.observe(key, self.state, None, self.params))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        self.state = State(jnp.int32(0), jnp.float32(self.np_random.choice([-1, 1])))
        return self.observe(), {}

    def step(self, action: Any) -> tuple:
        reward = float(self.probe.reward(self.state, action))
        self.state = State(self.state.time + 1, self.state.signal)
        return self.observe(), reward, bool(self.state.time >= self.probe.length), False, {}


for probe in (ProbeDiscount, ProbeTruncation, ProbeBoth):
    if f"{probe.__name__}-v0" not in gymnax.registered_envs:
        gymnax.register(f"{probe.__name__}-v0", probe)
        gymnasium.register(
            f"{probe.__name__}-v0",
            entry_point="probes:GymnasiumProbe",
            kwargs={"probe": probe},
            max_episode_steps=probe().default_params.max_steps_in_episode,
        )

"""Adapt environments with the brax interface to gymnax 1.0.1.

At every step, gymnax computes a reset of every environment and usually discards it. If resets are
expensive, as in brax and MuJoCo Playground, a reset takes longer than the step itself. Pooled
therefore computes initial states once, and a reset picks one of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces


@struct.dataclass
class State:
    inner: Any  # state of the wrapped environment
    time: jax.Array  # () int32, steps in the current episode; gymnax reads it for the time limit


class Pooled(environment.Environment):
    """Wrap an environment with the brax interface for gymnax.

    env.reset(key) and env.step(state, action) return a state with obs, reward, done and info. done
    ignores the time limit, max_steps. Episodes start from one of num_starts initial states, which
    are the same in every run.
    """

    def __init__(self, env: Any, max_steps: int = 1000, num_starts: int = 1024) -> None:
        self.env, self.max_steps, self.num_starts = env, max_steps, num_starts
        keys = jax.random.split(jax.random.PRNGKey(0), num_starts)
        # This runs only once, so skip optimizations: brax then compiles in half the time.
        options = {"xla_backend_optimization_level": 0}
        starts = jax.jit(jax.vmap(env.reset), compiler_options=options)(keys)
        self.starts = jax.tree.map(np.asarray, starts)  # sync

    @property
    def default_params(self) -> environment.EnvParams:
        return environment.EnvParams(max_steps_in_episode=self.max_steps)

    def reset_env(self, key: jax.Array, params: Any) -> tuple[jax.Array, State]:
        """Start an episode. Return obs and state."""
        start_key, episode_key = jax.random.split(key)
        number = jax.random.randint(start_key, (), 0, self.num_starts)
        inner = jax.tree.map(lambda x: jnp.asarray(x)[number], self.starts)
        if "rng" in inner.info:  # episodes from the same initial state must differ
            inner.info["rng"] = episode_key
        return inner.obs, State(inner, jnp.int32(0))

    def step_env(self, key: jax.Array, state: State, action: Any, params: Any) -> tuple:
        """Take an action. Return obs, state, reward, terminated and info.

        If the simulation diverges, the episode terminates with a reward of 0 and the previous
        observation, because one NaN would destroy the running statistics and the parameters.
        """
        inner = self.env.step(state.inner, action)
        is_finite = jnp.isfinite(inner.obs).all() & jnp.isfinite(inner.reward)
        obs = jnp.where(is_finite, inner.obs, state.inner.obs)
        reward = jnp.where(is_finite, inner.reward, 0.0)
        terminated = (inner.done > 0) | ~is_finite
        return obs, State(inner, state.time + 1), reward, terminated, {}

    def action_space(self, params: Any = None) -> spaces.Box:
        return spaces.Box(-1.0, 1.0, (self.env.action_size,))

    def observation_space(self, params: Any = None) -> spaces.Box:
        return spaces.Box(-np.inf, np.inf, self.starts.obs.shape[1:])

"""Environments with brax's interface, for gymnax 1.0.1: envs/brax.py and envs/playground.py use it.

gymnax's step computes a restart for every environment at every step, and mostly throws it away.
Where a simulation begins with a long computation, which also takes long to compile, that costs more
than the step. So starts are made once, and a restart picks one of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces


@struct.dataclass
class State:
    inner: Any  # brax's own
    time: jax.Array  # () int32, steps of the running episode, by which gymnax truncates


class Pooled(environment.Environment):
    """An environment with brax's interface, for gymnax. Its episodes begin from one of num_starts.

    It has state = env.reset(key) and state = env.step(state, action), whose state has obs, reward,
    done and info; done does not know of the time limit, max_steps. The starts are always the same.
    """

    def __init__(self, env: Any, max_steps: int = 1000, num_starts: int = 1024) -> None:
        self.env, self.max_steps, self.num_starts = env, max_steps, num_starts
        keys = jax.random.split(jax.random.PRNGKey(0), num_starts)
        # It runs once, so it is compiled quickly and not well: brax's resets in half the time.
        quickly = {"xla_backend_optimization_level": 0}
        starts = jax.jit(jax.vmap(env.reset), compiler_options=quickly)(keys)
        self.starts = jax.tree.map(np.asarray, starts)  # sync

    @property
    def default_params(self) -> environment.EnvParams:
        return environment.EnvParams(max_steps_in_episode=self.max_steps)

    def reset_env(self, key: jax.Array, params: Any) -> tuple[jax.Array, State]:
        """Begin an episode; return obs and state."""
        start_key, own_key = jax.random.split(key)
        number = jax.random.randint(start_key, (), 0, self.num_starts)
        inner = jax.tree.map(lambda x: jnp.asarray(x)[number], self.starts)
        if "rng" in inner.info:  # what the episode draws itself is not the same after each restart
            inner.info["rng"] = own_key
        return inner.obs, State(inner, jnp.int32(0))

    def step_env(self, key: jax.Array, state: State, action: Any, params: Any) -> tuple:
        """Take an action; return obs, state, reward, terminated and info.

        Where the simulation blows up, the episode terminates, as in Gymnasium's Ant. A single NaN
        would ruin the running statistics and the parameters for good. So the obs before it stays,
        and the reward is 0.
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

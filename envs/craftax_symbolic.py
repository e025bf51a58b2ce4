"""Craftax with symbolic observations, for gymnax 1.0.1: a large game written in JAX.

    pip install craftax==1.6.1
    python ppo_linen.py --env-id envs.craftax_symbolic:CraftaxSymbolic
    python ppo_linen.py --env-id envs.craftax_symbolic:CraftaxClassicSymbolic

Rules, worlds, observations and rewards come from the craftax package (Matthews et al. 2024, MIT
license). This file calls the package and contains none of its code. It splits `done`: the death of
the player or of the last boss terminates an episode, and max_timesteps truncates it.

The original environment generates a new world at every step, which takes as long as a dozen steps,
and usually discards it. CraftaxSymbolic needs a world only at the start of an episode, and picks
one of num_worlds worlds that are generated at the first reset. An agent may memorize them, so its
returns say little about other worlds: in ten million steps with episodes of 300 steps, each of the
1,024 worlds appears 33 times. The 1,024 worlds take 127 MB, and each program compiled with them
holds a copy. CraftaxSymbolicEndless generates a new world for each episode; with equal keys it
matches the original environment. studies/craftax/README.md compares their speeds.
"""

from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import environment, spaces
from jax.custom_batching import custom_vmap

try:  # not in requirements.txt: it installs a game engine and a plotting library
    from craftax.craftax.envs.craftax_symbolic_env import CraftaxSymbolicEnvNoAutoReset
    from craftax.craftax_classic.envs.craftax_symbolic_env import (
        CraftaxClassicSymbolicEnvNoAutoReset,
    )
except ModuleNotFoundError as error:
    reason = "envs.craftax_symbolic needs a package: pip install craftax==1.6.1"
    raise ModuleNotFoundError(reason) from error


class CraftaxSymbolic(environment.Environment):
    """Craftax for gymnax: pure functions of the state of one environment.

    reset() returns obs (8268,) float32 and the state of the package. step() returns obs, state,
    reward, terminated, truncated and info; info["final_observation"] is the observation before a
    restart. At most one of terminated and truncated is true.

    num_worlds worlds are generated from the seed with the default parameters of the package. With
    0, each episode has a new world. Raises ValueError if num_worlds is negative.
    """

    package: Any = CraftaxSymbolicEnvNoAutoReset

    def __init__(self, num_worlds: int = 1024, seed: int = 0) -> None:
        if num_worlds < 0:
            raise ValueError(f"num_worlds must be 0 or more, not {num_worlds}")
        self.game, self.num_worlds, self.seed = self.package(), num_worlds, seed

    @property
    def default_params(self) -> Any:
        return self.game.default_params

    @cached_property
    def worlds(self) -> Any:
        """Worlds as NumPy arrays (num_worlds, ...); (1, ...) if an array is equal in all worlds.

        Compiled programs hold copies of these arrays, so integers that fit are stored as uint8.
        """

        def pack(x: Any) -> np.ndarray:
            x = np.asarray(x)  # sync
            if (x == x[0]).all():
                return x[:1]
            return (
                x.astype(np.uint8) if x.dtype == np.int32 and 0 <= x.min() <= x.max() < 256 else x
            )

        @jax.jit
        def make(keys):  # lax.map compiles in half the time of vmap, and is as fast on a CPU
            return jax.lax.map(lambda key: self.game.reset_env(key, self.default_params)[1], keys)

        # Run this compiled, even if the first reset is being traced or runs without jit.
        with jax.ensure_compile_time_eval(), jax.disable_jit(False):
            keys = jax.random.split(jax.random.PRNGKey(self.seed), self.num_worlds)
            return jax.tree.map(pack, make(keys))

    def reset_env(self, key: jax.Array, params: Any) -> tuple[jax.Array, Any]:
        """Start an episode. Return obs and state."""
        if self.num_worlds == 0:
            return strong(self.game.reset_env(key, params))
        world = jax.random.randint(key, (), 0, self.num_worlds)
        kinds = jax.eval_shape(self.game.reset_env, key, params)[1]
        one = lambda x, kind: jnp.asarray(x)[world % len(x)].astype(kind.dtype)  # noqa: E731
        state = jax.tree.map(one, self.worlds, kinds)
        return strong((self.game.get_obs(state), state))

    def step_env(self, key: jax.Array, state: Any, action: Any, params: Any) -> tuple:
        """Take an action. Return obs, state, reward, terminated and info."""
        obs, state, reward, _, info = self.game.step_env(key, state, action, params)
        # Unlike in the package, the discount is not 0 at the time limit.
        info["discount"] = self.discount(state, params)
        obs, state, reward = strong((obs, state, reward))
        return obs, state, reward, self.is_terminated(state, params), info

    @partial(jax.jit, static_argnames=("self",))
    def step(
        self, key: jax.Array, state: Any, action: Any, params: Any | None = None
    ) -> tuple[Any, Any, jax.Array, jax.Array, jax.Array, dict[Any, Any]]:
        """Take a step like gymnax, but compute the reset only if the episode has ended."""
        params = self.default_params if params is None else params
        step_key, reset_key = jax.random.split(key)
        last_obs, state, reward, terminated, info = self.step_env(step_key, state, action, params)
        truncated = self.is_truncated(state, params)
        done = terminated | truncated
        obs, state = self.restart(done, reset_key, params, last_obs, state)
        info |= {"terminated": terminated, "truncated": truncated, "final_observation": last_obs}
        return obs, state, reward, terminated, truncated, info

    def restart(self, *given: Any) -> tuple[jax.Array, Any]:
        """Return obs and state after a possible restart.

        The inputs are done, key, params, obs and state. Under vmap, lax.cond would start all
        episodes and select between complete states of 270 kB. A custom rule for vmap loops over the
        environments that are done instead.
        """

        @custom_vmap
        def one(done, key, params, obs, state):
            return jax.lax.cond(done, lambda: self.reset_env(key, params), lambda: (obs, state))

        @one.def_vmap
        def all_done(num_envs, batched, *given):
            every = lambda x, has: x if has else jnp.broadcast_to(x, (num_envs, *jnp.shape(x)))  # noqa: E731
            done, keys, params, *now = jax.tree.map(every, given, tuple(batched))
            first_done = jnp.argsort(~done)

            def begin(i, now):
                row = first_done[i]
                key, values = jax.tree.map(lambda x: x[row], (keys, params))
                new = self.reset_env(key, values)
                return jax.tree.map(lambda x, y: x.at[row].set(y), now, new)

            now = jax.lax.fori_loop(0, done.sum(), begin, tuple(now))
            return now, jax.tree.map(lambda _: True, now)

        return one(*given)

    def is_terminated(self, state: Any, params: Any) -> jax.Array:
        """Return whether the game has ended, ignoring the time limit."""
        return self.game.is_terminal(state, params.replace(max_timesteps=np.iinfo(np.int32).max))

    def is_truncated(self, state: Any, params: Any) -> jax.Array:
        """Return whether the time limit was reached; False if the game has ended as well."""
        return (state.timestep >= params.max_timesteps) & ~self.is_terminated(state, params)

    def action_space(self, params: Any = None) -> spaces.Discrete:
        return spaces.Discrete(self.num_actions)

    def observation_space(self, params: Any = None) -> spaces.Box:
        return spaces.Box(0.0, 1.0, self.game.observation_space(params).shape)

    @property
    def num_actions(self) -> int:
        return self.game.num_actions


class CraftaxClassicSymbolic(CraftaxSymbolic):
    """Craftax-Classic, a smaller game: one level instead of nine, obs (1345,), 17 actions."""

    package = CraftaxClassicSymbolicEnvNoAutoReset


CraftaxSymbolicEndless = partial(CraftaxSymbolic, num_worlds=0)
CraftaxClassicSymbolicEndless = partial(CraftaxClassicSymbolic, num_worlds=0)


def strong(tree: Any) -> Any:
    """Convert to arrays, and remove the weak types that some functions in the package return."""
    return jax.tree.map(lambda x: x.astype(x.dtype), jax.tree.map(jnp.asarray, tree))

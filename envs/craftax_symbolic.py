"""Craftax with symbols instead of pixels, for gymnax 1.0.1: a large game that is all JAX.

    pip install craftax==1.6.1
    python ppo_linen.py --env-id envs.craftax_symbolic:CraftaxSymbolic
    python ppo_linen.py --env-id envs.craftax_symbolic:CraftaxClassicSymbolic

The rules, worlds, observations and rewards are those of the craftax package (Matthews et al. 2024,
MIT licence), which is called here; none of its code is. Its one `done` is split: death, or the last
boss's, terminates an episode, and its limit max_timesteps truncates one.

Its own environment makes a new world in every environment at every step, and mostly throws it away,
although that takes as long as a dozen steps. Here only an episode's end starts another, and its
world is one of num_worlds, which are made at the first reset and kept. That gives up endless new
worlds for 1,024: an agent that has been in each of them often may know them by heart, so how it
does in them says little about others. Ten million steps in episodes of 300 are in each of them 33
times. The 1,024 worlds take 127 MB, and each program compiled with them holds a copy.
CraftaxSymbolicEndless makes a new world for each episode, and gives what the package's environment
does with the same keys. studies/craftax/README.md says how long a step takes with
either.
"""

from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import environment, spaces
from jax.custom_batching import custom_vmap

try:  # not among the project's requirements: it brings a game engine and a plotting library
    from craftax.craftax.envs.craftax_symbolic_env import CraftaxSymbolicEnvNoAutoReset
    from craftax.craftax_classic.envs.craftax_symbolic_env import (
        CraftaxClassicSymbolicEnvNoAutoReset,
    )
except ModuleNotFoundError as error:
    reason = "envs.craftax_symbolic needs a package: pip install craftax==1.6.1"
    raise ModuleNotFoundError(reason) from error


class CraftaxSymbolic(environment.Environment):
    """Craftax for gymnax: functions of one environment's state, for jax.jit and jax.vmap.

    reset() returns obs (8268,) of float32 and the package's state. step() returns six values: obs,
    state, reward of float32, terminated, truncated and info, whose "final_observation" is the one
    before the restart. At most one of terminated and truncated is true.

    num_worlds is how many worlds there are, made by the package's default parameters from the seed;
    0 makes a new one for each episode. Raises ValueError where it is below that.
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
        """NumPy arrays (num_worlds, ...), or (1, ...) of what is the same in all worlds.

        Whatever is compiled with them holds a copy, so they are kept small: as uint8, if they fit.
        """

        def pack(x: Any) -> np.ndarray:
            x = np.asarray(x)  # sync
            if (x == x[0]).all():
                return x[:1]
            return (
                x.astype(np.uint8) if x.dtype == np.int32 and 0 <= x.min() <= x.max() < 256 else x
            )

        @jax.jit
        def make(keys):  # one by one: it compiles in half the time, and is as fast on a CPU
            return jax.lax.map(lambda key: self.game.reset_env(key, self.default_params)[1], keys)

        # The first reset may be a traced one, or one without jit. This one runs, and compiled.
        with jax.ensure_compile_time_eval(), jax.disable_jit(False):
            keys = jax.random.split(jax.random.PRNGKey(self.seed), self.num_worlds)
            return jax.tree.map(pack, make(keys))

    def reset_env(self, key: jax.Array, params: Any) -> tuple[jax.Array, Any]:
        """Begin an episode; return obs and state."""
        if self.num_worlds == 0:
            return strong(self.game.reset_env(key, params))
        world = jax.random.randint(key, (), 0, self.num_worlds)
        kinds = jax.eval_shape(self.game.reset_env, key, params)[1]
        one = lambda x, kind: jnp.asarray(x)[world % len(x)].astype(kind.dtype)  # noqa: E731
        state = jax.tree.map(one, self.worlds, kinds)
        return strong((self.game.get_obs(state), state))

    def step_env(self, key: jax.Array, state: Any, action: Any, params: Any) -> tuple:
        """Take an action; return obs, state, reward, terminated and info."""
        obs, state, reward, _, info = self.game.step_env(key, state, action, params)
        info["discount"] = self.discount(state, params)  # the package's is 0 at the limit too
        obs, state, reward = strong((obs, state, reward))
        return obs, state, reward, self.is_terminated(state, params), info

    @partial(jax.jit, static_argnames=("self",))
    def step(
        self, key: jax.Array, state: Any, action: Any, params: Any | None = None
    ) -> tuple[Any, Any, jax.Array, jax.Array, jax.Array, dict[Any, Any]]:
        """gymnax's step, which would make a new world each time, but for that."""
        params = self.default_params if params is None else params
        step_key, reset_key = jax.random.split(key)
        last_obs, state, reward, terminated, info = self.step_env(step_key, state, action, params)
        truncated = self.is_truncated(state, params)
        done = terminated | truncated
        obs, state = self.restart(done, reset_key, params, last_obs, state)
        info |= {"terminated": terminated, "truncated": truncated, "final_observation": last_obs}
        return obs, state, reward, terminated, truncated, info

    def restart(self, *given: Any) -> tuple[jax.Array, Any]:
        """Obs and state after any restart, given done, key, params and obs and state before it.

        Under vmap, a condition would begin all episodes and choose between whole states, which are
        270 kB each. So vmap has a rule of its own: a loop over the environments that are done.
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
                key, own = jax.tree.map(lambda x: x[row], (keys, params))
                return jax.tree.map(lambda x, y: x.at[row].set(y), now, self.reset_env(key, own))

            now = jax.lax.fori_loop(0, done.sum(), begin, tuple(now))
            return now, jax.tree.map(lambda _: True, now)

        return one(*given)

    def is_terminated(self, state: Any, params: Any) -> jax.Array:
        """Over by the package's rules, had it no limit."""
        return self.game.is_terminal(state, params.replace(max_timesteps=np.iinfo(np.int32).max))

    def is_truncated(self, state: Any, params: Any) -> jax.Array:
        """At the limit, and not over: an end has one reason."""
        return (state.timestep >= params.max_timesteps) & ~self.is_terminated(state, params)

    def action_space(self, params: Any = None) -> spaces.Discrete:
        return spaces.Discrete(self.num_actions)

    def observation_space(self, params: Any = None) -> spaces.Box:
        return spaces.Box(0.0, 1.0, self.game.observation_space(params).shape)

    @property
    def num_actions(self) -> int:
        return self.game.num_actions


class CraftaxClassicSymbolic(CraftaxSymbolic):
    """Crafter's game, which is smaller: one level instead of nine, obs (1345,), 17 actions."""

    package = CraftaxClassicSymbolicEnvNoAutoReset


CraftaxSymbolicEndless = partial(CraftaxSymbolic, num_worlds=0)
CraftaxClassicSymbolicEndless = partial(CraftaxClassicSymbolic, num_worlds=0)


def strong(tree: Any) -> Any:
    """As arrays without weak types: the package resets to Python's numbers, and steps to others."""
    return jax.tree.map(lambda x: x.astype(x.dtype), jax.tree.map(jnp.asarray, tree))

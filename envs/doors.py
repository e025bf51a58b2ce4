"""Doors for gymnax. doors_gymnasium.py contains the rules, and the same game for Gymnasium.

python more/dqn_linen.py --env-id envs.doors:Doors
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces

from envs.doors_gymnasium import DISTANCE, LIMIT, MOVES, NEXT, SIZE, START_ROW, draw, layout


@struct.dataclass
class State:
    """State of an episode; all fields are int32."""

    row: jax.Array  # position of the agent
    column: jax.Array
    goal: jax.Array  # column of the goal
    time: jax.Array  # steps taken


@struct.dataclass
class Params:
    max_steps_in_episode: int = LIMIT


class Doors(environment.Environment):
    """Doors for gymnax: pure functions of the state of one environment.

    reset() and step() are inherited. step() calls step_env(), restarts finished episodes, and
    returns obs (45,), state, reward, terminated, truncated and info; info["final_observation"] is
    the observation before a restart.
    """

    @property
    def default_params(self) -> Any:
        return Params()

    def reset_env(self, key: jax.Array, params: Params) -> tuple[jax.Array, State]:
        a, b = jax.random.key_data(key)[:2]  # safe, because nothing else uses the key
        return self.start(*layout(a, b))

    def start(self, agent: Any, goal: Any) -> tuple[jax.Array, State]:
        """Start an episode with the columns of agent and goal. Return obs and state."""
        state = State(*map(jnp.int32, (START_ROW, agent, goal, 0)))
        return self.observe(None, state), state

    def step_env(self, key: Any, state: State, action: Any, params: Params) -> tuple:
        """Take an action. Return obs, state, reward, terminated and info."""
        row, column = jnp.asarray(NEXT)[state.row, state.column, action]
        new = State(row, column, state.goal, state.time + 1)
        reward = self.distance(state) - self.distance(new)
        return self.observe(key, new), new, reward, self.is_terminated(new, params), {}

    def distance(self, state: State) -> jax.Array:
        return jnp.asarray(DISTANCE)[state.row, state.column, state.goal]

    def observe(self, key: Any, state: State, action: Any = None, params: Any = None) -> jax.Array:
        positions = jnp.stack([state.row, state.column, state.goal])
        return jax.nn.one_hot(positions, SIZE, dtype=jnp.float32).ravel()

    def is_terminated(self, state: State, params: Any) -> jax.Array:
        return self.distance(state) == 0

    def is_truncated(self, state: State, params: Params) -> jax.Array:
        """Return whether the time limit was reached; False if the agent is at the goal."""
        return (state.time >= params.max_steps_in_episode) & (self.distance(state) > 0)

    def action_space(self, params: Any = None) -> spaces.Discrete:
        return spaces.Discrete(len(MOVES))

    def observation_space(self, params: Any = None) -> spaces.Box:
        return spaces.Box(0.0, 1.0, (3 * SIZE,))

    @property
    def num_actions(self) -> int:
        return len(MOVES)

    def render(self, state: State, params: Any = None) -> np.ndarray:
        """Draw the state of one environment: (240, 240, 3) uint8."""
        return draw(int(state.row), int(state.column), int(state.goal))  # sync

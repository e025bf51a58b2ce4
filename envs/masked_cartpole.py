"""CartPole without velocities, for gymnax and for Gymnasium: a task for recurrent PPO.

    python more/ppo_rnn_linen.py --env-id envs.masked_cartpole:MaskedCartPole
    python more/ppo_torch_gymnasium.py --env-id envs.masked_cartpole:MaskedCartPole-v0

Like CartPole-v1, but observations contain only the position of the cart and the angle of the pole.
The agent must infer the velocities from earlier observations.
"""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnax.environments import spaces
from gymnax.environments.classic_control.cartpole import CartPole, EnvParams, EnvState


class MaskedCartPole(CartPole):
    """CartPole without velocities, for gymnax."""

    def get_obs(self, state: EnvState, params=None, key=None) -> jax.Array:
        return jnp.array([state.x, state.theta])

    def observation_space(self, params: EnvParams) -> spaces.Box:
        return spaces.Box(-jnp.inf, jnp.inf, (2,), jnp.float32)


def make_masked(**options) -> gymnasium.Env:
    """Return CartPole without velocities, for Gymnasium."""
    space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    env = CartPoleEnv(**options)
    return gymnasium.wrappers.TransformObservation(env, lambda obs: obs[[0, 2]], space)


gymnasium.register("MaskedCartPole-v0", make_masked, max_episode_steps=500)

"""Two more methods for stepping CartPole, with the VecEnv of ppo_linen_gymnasium.py.

The vector method uses Gymnasium's vectorized CartPole, written in NumPy, and the envpool method
uses EnvPool, written in C++. A wrapper adds the reset_mask option of Gymnasium to each.
"""

import warnings
from typing import Any

import gymnasium
import numpy as np

from more.ppo_linen_gymnasium import VecEnv

CARTPOLE = "CartPole-v1"


class Vector:
    """Gymnasium's vectorized CartPole with reset_mask.

    A partial reset resets all environments and then restores those that are not in the mask.
    """

    def __init__(self, num_envs: int) -> None:
        mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
        self.envs: Any = gymnasium.make_vec(CARTPOLE, num_envs, mode)
        self.step = self.envs.step
        self.close = self.envs.close

    def reset(self, seed: Any = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        if options is None:
            return self.envs.reset(seed=seed[0])
        done = options["reset_mask"]
        envs = self.envs.unwrapped
        state = envs.state
        steps = envs.steps
        self.envs.reset()
        envs.state = np.where(done, envs.state, state)
        envs.steps = np.where(done, 0, steps)
        return envs.state.T.astype(np.float32), {}


class EnvPool:
    """EnvPool's CartPole with reset_mask: a partial reset returns all observations."""

    def __init__(self, num_envs: int, seed: Any) -> None:
        import envpool  # optional, because it is large: pip install envpool==1.2.5

        warnings.filterwarnings("ignore", ".*precision lowered")  # warning about space bounds
        self.envs: Any = envpool.make_gymnasium(CARTPOLE, num_envs=num_envs, seed=seed)
        self.close = self.envs.close

    def reset(self, seed: Any = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        if options is None:
            self.obs, _ = self.envs.reset()
        else:
            self.obs[options["reset_mask"]], _ = self.envs.reset(options=options)
        return self.obs, {}

    def step(self, action: np.ndarray) -> tuple:
        obs, *rest = self.envs.step(action)
        self.obs = obs.copy()
        return obs, *rest


class OtherVecEnv(VecEnv):
    """VecEnv for CartPole-v1, stepped with the method `how`: vector or envpool."""

    def __init__(self, how: str, num_envs: int, seed: int) -> None:
        super().__init__(CARTPOLE, 1, "sync", seed)  # creates one environment, which is not used
        self.num_envs = num_envs
        self.how = how

    def reset(self, iteration: int = 0) -> np.ndarray:
        seeds = (np.random.SeedSequence(self.seed).generate_state(self.num_envs) >> 1).tolist()
        self.envs = Vector(self.num_envs) if self.how == "vector" else EnvPool(self.num_envs, seeds)
        obs, _ = self.envs.reset(seed=seeds)
        self.step_count = 0
        self.episode_return = np.zeros(self.num_envs)
        self.episode_length = np.zeros(self.num_envs, np.float32)
        return obs.astype(self.obs_dtype)

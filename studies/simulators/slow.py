"""Simulators with a fixed step time in microseconds, such as Slow300-v0 and Sleep1000-v0.

    python more/ppo_continuous_linen_gymnasium.py --env-id studies.simulators.slow:Slow300-v0

Observations and actions have the same shapes as in HalfCheetah-v5. A step updates 17 numbers, which
takes a few microseconds. Then Slow computes for the given time, and Sleep waits, like a simulator
on another machine. These environments are not meant for learning.
"""

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

MICROSECONDS = (0, 30, 100, 300, 1_000, 3_000, 10_000)
OBS_DIM, ACTION_DIM = 17, 6
EPISODE = 1_000  # steps per episode


class Slow(gymnasium.Env):
    """Environment with a decaying state; actions are added to its first elements."""

    def __init__(self, microseconds: float, waits: bool) -> None:
        self.seconds = microseconds * 1e-6
        self.waits = waits
        self.observation_space = Box(-np.inf, np.inf, (OBS_DIM,))
        self.action_space = Box(-1.0, 1.0, (ACTION_DIM,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple:
        super().reset(seed=seed)
        self.obs = self.np_random.standard_normal(OBS_DIM, np.float32)
        return self.obs, {}

    def step(self, action: np.ndarray) -> tuple:
        obs = self.obs * np.float32(0.9)
        obs[:ACTION_DIM] += action
        self.obs = obs
        reward = -float(obs @ obs)
        if self.waits:
            time.sleep(self.seconds)
            return obs, reward, False, False, {}
        # Start the clock here, so that a step takes self.seconds longer than a step of Slow0.
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass
        return obs, reward, False, False, {}


for name, waits in (("Slow", False), ("Sleep", True)):
    for microseconds in MICROSECONDS:
        gymnasium.register(
            f"{name}{microseconds}-v0",
            f"{__name__}:Slow",
            max_episode_steps=EPISODE,
            kwargs={"microseconds": microseconds, "waits": waits},
        )

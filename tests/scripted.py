"""A Gymnasium environment whose every transition is known, and others like it.

Noisy-v0 has no seed, and Quits-v0 calls sys.exit(0) in its first step.
"""

import sys
from typing import Any

import gymnasium
import numpy as np

ENDS = [(1, True, False), (3, False, True), (2, True, True), (5, True, False)]


class Scripted(gymnasium.Env):
    """Episodes end as ENDS says in turn; the observation tells which, when, by what, and a draw."""

    action_space = gymnasium.spaces.Discrete(3)
    observation_space = gymnasium.spaces.Box(0, 10**6, (2, 2), np.int64)
    closed = 0

    def __init__(self, noisy: bool = False) -> None:
        self.episode, self.noisy = -1, noisy

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        if seed is not None:
            self.episode = int(self.np_random.integers(4))
        if self.noisy:
            self.np_random = np.random.default_rng()
        self.episode, self.time = self.episode + 1, 0
        self.draw = int(self.np_random.integers(10**6))
        return self.observe(0), {}

    def observe(self, action: int) -> np.ndarray:
        return np.array([[self.episode, self.time], [action, self.draw]])

    def step(self, action: Any) -> tuple:
        self.time += 1
        length, terminated, truncated = ENDS[self.episode % len(ENDS)]
        ends = self.time == length
        assert self.time <= length, "stepped beyond its end"
        # An integer reward, that would overflow if the action were of eight bits.
        reward = 200 * self.time + (action - 1) * 100
        return self.observe(action), reward, ends and terminated, ends and truncated, {"x": 1}

    def close(self) -> None:
        Scripted.closed += 1


class Quits(Scripted):
    def step(self, action: Any) -> tuple:
        sys.exit(0)


if "Scripted-v0" not in gymnasium.registry:
    gymnasium.register("Scripted-v0", entry_point="scripted:Scripted")
    gymnasium.register("Noisy-v0", entry_point="scripted:Scripted", kwargs={"noisy": True})
    gymnasium.register("Quits-v0", entry_point="scripted:Quits")

"""Wrappers that print a line for each iteration, for race.py."""

from typing import Any

import gymnasium

STEPS = 100  # SAC steps per progress line


class Lines(gymnasium.Wrapper):
    """Print a line after every STEPS steps."""

    count = 0

    def step(self, action: Any) -> tuple:
        self.count += 1
        if self.count % STEPS == 0:
            print(f"{self.count} steps", flush=True)
        return super().step(action)


class VectorLines(gymnasium.vector.VectorWrapper):
    """Print a line after every num_steps steps of the vector environment."""

    def __init__(self, env: gymnasium.vector.VectorEnv, num_steps: int) -> None:
        super().__init__(env)
        self.num_steps = num_steps
        self.count = 0

    def step(self, actions: Any) -> tuple:
        self.count += 1
        if self.count % self.num_steps == 0:
            print(f"{self.count} steps", flush=True)
        return super().step(actions)

"""Measure the steps per second of a Gymnasium environment with random actions.

    python envs/speed.py my_module:MyEnv-v0 async 4 1.5  # 4 processes, measured for 1.5 seconds

envs/check.py runs this file in a separate process, which it can kill if the environment hangs.
"""

import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np


class DropInfo(gymnasium.Wrapper):
    """Drop info, as the training scripts do, because merging it is slow."""

    def reset(self, **options: Any) -> tuple:
        obs, _ = self.env.reset(**options)
        return obs, {}

    def step(self, action: Any) -> tuple:
        *results, _ = self.env.step(action)
        return *results, {}


def steps_per_second(env_id: str, vectorization: str, num_envs: int, seconds: float) -> float:
    """Step num_envs environments for `seconds`, and return environment steps per second."""
    options: dict[str, Any] = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    options["copy"] = False
    if vectorization == "async":
        multiprocessing.set_forkserver_preload(["gymnasium"])
        options["context"] = "forkserver"
    wrappers: list[Any] = [DropInfo]
    if vectorization == "vector_entry_point":  # the vector environment of ale-py
        options, wrappers = {}, []
    envs = gymnasium.make_vec(env_id, num_envs, vectorization, options, wrappers)
    envs.action_space.seed(0)
    envs.reset(seed=0)
    num_steps = 0
    start = time.perf_counter()
    while num_steps == 0 or time.perf_counter() < start + seconds:
        _, _, terminated, truncated, _ = envs.step(envs.action_space.sample())
        done = np.logical_or(terminated, truncated)
        if done.any():
            envs.reset(options={"reset_mask": done})
        num_steps += num_envs
    speed = num_steps / (time.perf_counter() - start)
    envs.close()
    return speed


if __name__ == "__main__":
    sys.path += [str(Path(__file__).resolve().parents[1]), os.getcwd()]
    env_id, vectorization, num_envs, seconds = sys.argv[1:]
    speed = steps_per_second(env_id, vectorization, int(num_envs), float(seconds))
    print(f"\n{speed} steps per second")

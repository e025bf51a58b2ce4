"""A Gymnasium environment with known transitions, and environments that fail."""

import multiprocessing
from typing import Any

import gymnasium
import numpy as np

# (length, terminated, truncated) of each episode
ENDS = [(1, True, False), (3, False, True), (2, True, True), (5, True, False)]


class Scripted(gymnasium.Env):
    """Episodes end as listed in ENDS. An observation is ((episode, time), (action, draw))."""

    action_space = gymnasium.spaces.Discrete(3)
    observation_space = gymnasium.spaces.Box(0, 10**6, (2, 2), np.int64)

    def __init__(self) -> None:
        self.episode = -1

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        if seed is not None:
            self.episode = int(self.np_random.integers(4))
        self.episode, self.time = self.episode + 1, 0
        self.draw = int(self.np_random.integers(10**6))
        return self.observe(0), {}

    def observe(self, action: int) -> np.ndarray:
        return np.array([[self.episode, self.time], [action, self.draw]])

    def step(self, action: Any) -> tuple:
        self.time += 1
        length, terminated, truncated = ENDS[self.episode % len(ENDS)]
        ends = self.time == length
        assert self.time <= length, "step after the end of the episode"
        # The reward is an integer. It would overflow if the action were an int8.
        reward = 200 * self.time + (action - 1) * 100
        info = {"x": 1 if self.draw % 2 else None}  # Gymnasium cannot merge these types
        return self.observe(action), reward, ends and terminated, ends and truncated, info


class Rich(Scripted):
    """Environment with rewards whose sum is not exact in float32."""

    def step(self, action: Any) -> tuple:
        obs, _, _, _, info = super().step(action)
        self.time = 0
        return obs, 2.0**24 + 1, False, False, info


class Constant(gymnasium.Env):
    """Environment in which all episodes are identical and have one step."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(0, 1, (4,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        return np.ones(4, np.float32), {}

    def step(self, action: Any) -> tuple:
        return np.ones(4, np.float32), float(action), True, False, {}


class Sensor(gymnasium.Env):
    """Observations and rewards are the attributes obs and reward. Episodes have 4 steps."""

    action_space: Any = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    obs: Any = (1.0, 2.0, 3.0)
    reward = 0.0

    def observe(self) -> np.ndarray:
        return np.array(self.obs, self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple:
        self.time += 1
        return self.observe(), self.reward, self.time == 4, False, {}


class ContinuousSensor(Sensor):
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)


class NeedsNoOptions(Constant):
    """The observation is 1 if the options of the last reset were None, and 0 otherwise."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        obs, info = super().reset(seed=seed)
        return obs * (options is None), info


class Needs(Scripted):
    def __init__(self) -> None:
        raise gymnasium.error.DependencyNotInstalled("a package is not installed")


class ArmError(Exception):
    pass


class FailsInWorker(Scripted):
    """The training process can create the environment, but a worker cannot."""

    def __init__(self) -> None:
        super().__init__()
        if multiprocessing.parent_process():
            raise ArmError("the left arm is not there")


class Fails(Constant):
    def step(self, action: Any) -> tuple:
        raise ArmError("the left arm has fallen off")


class FailsToClose(Constant):
    def close(self) -> None:
        raise ArmError("the simulator is gone")


class FloatImages(Scripted):
    """The observations do not have the dtype of the observation space."""

    observation_space = gymnasium.spaces.Box(0, 255, (2, 2), np.uint8)

    def observe(self, action: int) -> np.ndarray:
        return np.full((2, 2), 0.5)


class FlatObs(Scripted):
    """The observations do not have the shape of the observation space."""

    def observe(self, action: int) -> np.ndarray:
        return super().observe(action).ravel()


KINDS = (Scripted, Rich, Constant, Sensor, ContinuousSensor, NeedsNoOptions, Needs)
KINDS += (FailsInWorker, Fails, FailsToClose, FloatImages, FlatObs)
if "Scripted-v0" not in gymnasium.registry:
    for kind in KINDS:
        gymnasium.register(f"{kind.__name__}-v0", entry_point=f"scripted:{kind.__name__}")

"""A Gymnasium environment whose every transition is known, and others that are wrong."""

import os
import subprocess
from typing import Any

import gymnasium
import numpy as np

ENDS = [(1, True, False), (3, False, True), (2, True, True), (5, True, False)]


class Scripted(gymnasium.Env):
    """Episodes end as ENDS says in turn; the observation tells which, when, by what, and a draw."""

    action_space = gymnasium.spaces.Discrete(3)
    observation_space = gymnasium.spaces.Box(0, 10**6, (2, 2), np.int64)
    closed = 0

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
        assert self.time <= length, "stepped beyond its end"
        # An integer reward, that would overflow if the action were of eight bits.
        reward = 200 * self.time + (action - 1) * 100
        info = {"x": 1 if self.draw % 2 else None}  # which Gymnasium cannot put into one array
        return self.observe(action), reward, ends and terminated, ends and truncated, info

    def close(self) -> None:
        Scripted.closed += 1


class Rich(Scripted):
    """A reward that float32 cannot count one by one."""

    def step(self, action: Any) -> tuple:
        obs, _, _, _, info = super().step(action)
        self.time = 0
        return obs, 2.0**24 + 1, False, False, info


class Constant(gymnasium.Env):
    """Every episode is one step long and like every other: new ones are no different."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(0, 1, (4,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        return np.ones(4, np.float32), {}

    def step(self, action: Any) -> tuple:
        return np.ones(4, np.float32), float(action), True, False, {}


class OnlyObs(Scripted):
    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        obs, _ = super().reset(seed=seed)
        return obs


class RewardOfShape1(Scripted):
    def step(self, action: Any) -> tuple:
        obs, reward, *others = super().step(action)
        return obs, np.array([reward]), *others


class Needs(Scripted):
    def __init__(self) -> None:
        raise gymnasium.error.DependencyNotInstalled("a package is not installed")


class Later(Scripted):
    """Goes wrong after its first reset, when whoever made it has tried it out."""

    resets = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self.resets += options is not None
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple:
        if self.resets > 0:
            self.go_wrong()
        return super().step(action)

    def go_wrong(self) -> None:
        raise NotImplementedError


class ArmError(ConnectionError):
    """Gymnasium's pipes raise others of its kind."""


class Fails(Later):
    """It has started a program, which ends with it."""

    program = None

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        if self.program is None:
            self.program = subprocess.Popen(["sleep", "300"])
        return super().reset(seed=seed, options=options)

    def close(self) -> None:
        if self.program is not None:
            self.program.terminate()
            self.program.wait()

    def go_wrong(self) -> None:
        raise ArmError("the left arm has fallen off")


class Quits(Later):
    """Its process is gone, as where the kernel kills it because memory runs out."""

    def go_wrong(self) -> None:
        os._exit(0)


KINDS = (Scripted, Rich, Constant, OnlyObs, Needs, RewardOfShape1, Fails, Quits)
if "Scripted-v0" not in gymnasium.registry:
    for kind in KINDS:
        gymnasium.register(f"{kind.__name__}-v0", entry_point=f"scripted:{kind.__name__}")

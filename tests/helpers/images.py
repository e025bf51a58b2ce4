"""Image environments for Gymnasium, both valid and invalid, and a mock of ale-py."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode

# Convolutions for images of at least 7 x 7 pixels.
SMALL_CONVS = "--conv-channels 4 8 --conv-kernels 3 3 --conv-strides 2 1"


class Constant(gymnasium.Env):
    """Environment with identical episodes, so a resumed run can equal an uninterrupted one."""

    action_space: Any = Discrete(2)
    observation_space: Any = Box(0, 255, (9, 8, 3), np.uint8)

    def observe(self) -> Any:
        rng = np.random.default_rng(0)
        return rng.integers(0, 256, self.observation_space.shape, self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action: Any) -> tuple:
        return self.observe(), float(action), True, False, {}


class Rewards(Constant):
    def step(self, action: Any) -> tuple:
        return self.observe(), (0.3, -2.5)[action], True, False, {}


class Gray(Constant):
    observation_space = Box(0, 255, (9, 8), np.uint8)


class First(Constant):
    """Environment with channels-first images: (channels, height, width)."""

    observation_space = Box(0, 255, (3, 9, 8), np.uint8)


class Large(Constant):
    observation_space = Box(0, 255, (1000, 1000, 3), np.uint8)

    def observe(self) -> np.ndarray:
        return np.zeros(self.observation_space.shape, np.uint8)


class Floats(Constant):
    observation_space = Box(0, 1, (9, 8, 3), np.float32)


class Nested(Constant):
    observation_space = Dict({"image": Box(0, 255, (9, 8, 3), np.uint8)})


class Stacked(Constant):
    observation_space = Box(0, 255, (4, 9, 8, 3), np.uint8)


class Joystick(Constant):
    action_space = Box(-1, 1, (2,), np.float32)


class Buttons(Constant):
    action_space = MultiDiscrete([2, 2])


for kind in (Constant, Rewards, Gray, First, Large, Floats, Nested, Stacked, Joystick, Buttons):
    gymnasium.register(f"Image{kind.__name__}-v0", f"images:{kind.__name__}")


# === A mock of ale-py ===========================================================================
# (reward, lives, terminated, truncated) after each step. All games in an environment are identical.
GAME = [(7, 2, False, False), (0, 1, False, False), (-3, 1, False, False), (400, 0, True, False)]
CUT_OFF = [(1, 2, False, False), (0, 2, False, True)]
GAMES = [GAME, CUT_OFF]  # GAME in environments 0, 2, ..., and CUT_OFF in 1, 3, ...


class Arcade(gymnasium.vector.VectorEnv):
    """Stand-in for AtariVectorEnv. Each frame shows the game number and the step."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    made: "Arcade"  # the latest instance

    def __init__(self, num_envs: int, **options: Any) -> None:
        Arcade.made = self
        self.num_envs, self.options = num_envs, options
        self.seeds: list[np.ndarray] = []  # one array per reset with seeds
        self.shape = (4, options["img_height"], options["img_width"])
        self.single_observation_space = Box(0, 255, self.shape, np.uint8)
        self.single_action_space = Discrete(3)
        self.number = np.zeros(num_envs, int)  # game number
        self.time = np.zeros(num_envs, int)

    def observe(self) -> np.ndarray:
        obs = np.zeros((self.num_envs, *self.shape), np.uint8)
        obs[:, 0, 0, 0] = self.number
        obs[:, 0, 0, 1] = self.time
        return obs

    def reset(self, *, seed: Any = None, options: dict | None = None) -> tuple:
        mask = (options or {}).get("reset_mask", np.full(self.num_envs, True))
        if seed is not None:
            assert isinstance(seed, np.ndarray) and seed.max() < 2**31  # required by ale-py
            self.seeds.append(seed)
        self.number[mask] += 1
        self.time[mask] = 0
        return self.observe(), {}

    def step(self, actions: np.ndarray) -> tuple:
        assert actions.dtype == np.int64
        games = [GAMES[i % 2] for i in range(self.num_envs)]
        before = [2 if t == 0 else game[t - 1][1] for t, game in zip(self.time, games, strict=True)]
        now = [game[t] for t, game in zip(self.time, games, strict=True)]
        reward, lives, is_over, truncated = map(np.array, zip(*now, strict=True))
        terminated = is_over
        if self.options["life_loss_info"]:
            terminated = is_over | (lives < before)
        self.time += 1
        info = {"lives": lives}
        return self.observe(), reward.astype(np.int32), terminated, truncated, info


def stand_in_for_ale_py(patch: pytest.MonkeyPatch) -> None:
    """Make ale_py importable, whether or not it is installed."""
    module = ModuleType("ale_py")
    module.__spec__ = ModuleSpec("ale_py", None)
    patch.setitem(sys.modules, "ale_py", module)


gymnasium.register("ALE/Arcade-v5", vector_entry_point="images:Arcade")

"""PixelGrid: a gridworld with image observations, for Gymnasium.

    python more/ppo_cnn_torch_gymnasium.py --env-id envs.pixel_grid:PixelGrid-v0 \\
        --conv-channels 16 32 --conv-kernels 3 3 --conv-strides 1 2 --hidden-sizes 64 \\
        --num-envs 32 --num-steps 32 --gamma 0.9 --learning-rate 2e-3 --total-timesteps 60000

An example of an environment with images. The player is a bright square. One of two striped squares
is the goal, with vertical stripes, and ends the episode with reward 1. The other is a trap, with
horizontal stripes, and ends it with reward -1. In every image the stripes start at a random offset,
so both squares look the same on average, and no single pixel distinguishes them: an agent that
cannot recognize stripes has a mean return of at most 0. The best possible mean return is 1.
"""

from typing import Any

import gymnasium
import numpy as np

SIZE = 3  # cells per side
PIXELS = 4  # pixels per side of a cell
SHAPE = (SIZE * PIXELS, SIZE * PIXELS, 1)
MOVES = np.array([(-1, 0), (0, 1), (1, 0), (0, -1)])  # up, right, down, left


class PixelGrid(gymnasium.Env):
    """Walk to the vertical stripes, within the grid. Images are uint8 (12, 12, 1)."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012
    action_space = gymnasium.spaces.Discrete(len(MOVES))
    observation_space = gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        cells = self.np_random.choice(SIZE**2, 3, replace=False)
        self.player, self.goal, self.trap = np.stack(np.divmod(cells, SIZE), axis=-1)
        return self.observe(), {}

    def step(self, action: Any) -> tuple:
        self.player = np.clip(self.player + MOVES[action], 0, SIZE - 1)
        is_at_goal = bool((self.player == self.goal).all())
        is_at_trap = bool((self.player == self.trap).all())
        reward = float(is_at_goal) - float(is_at_trap)
        return self.observe(), reward, is_at_goal or is_at_trap, False, {}

    def observe(self) -> np.ndarray:
        self.image = np.zeros(SHAPE, np.uint8)
        offsets = self.np_random.integers(2, size=2)
        vertical, horizontal = (np.arange(PIXELS) + offsets[:, None]) % 2 * 255
        self.cell(self.goal)[:] = vertical
        self.cell(self.trap)[:] = horizontal[:, None]
        self.cell(self.player)[:] = 255
        return self.image.copy()

    def cell(self, position: np.ndarray) -> np.ndarray:
        """Return the pixels of a cell, as a view of the image."""
        row, column = position * PIXELS
        return self.image[row : row + PIXELS, column : column + PIXELS, 0]

    def render(self) -> np.ndarray:
        """Return the enlarged image, (192, 192, 3) uint8."""
        return self.image.repeat(16, axis=0).repeat(16, axis=1).repeat(3, axis=2)


gymnasium.register("PixelGrid-v0", f"{__name__}:PixelGrid", max_episode_steps=16)

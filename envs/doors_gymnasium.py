"""Doors: cross a wall through one of three gaps. The rules, and the game for Gymnasium.

    ........x......   row 0: the goal x
    ...............
    .####.####.####   row 7: a wall with gaps in columns 0, 5 and 10
    ...............
    ...o...........   row 14: the agent o starts here

The grid has 15 x 15 squares; five of its rows are shown. The columns of agent and goal are drawn
independently, which gives 225 layouts. The actions are stay, right, down, left and up. A move into
the wall or across the border has no effect. The reward is the decrease in Euclidean distance to the
goal, so all paths to the goal have the same return and differ only in length. Reaching the goal
terminates an episode; otherwise it is truncated after 50 steps. The observation is three one-hot
vectors of length 15: the row and the column of the agent, and the column of the goal.

    python -m studies.doors.run more/dqn_torch_gymnasium.py doors

With the settings of this command, agents solve all layouts; see studies/doors.

doors.py is the same game for gymnax, and imports the rules from this file. This file does not
import JAX, so that PyTorch scripts start faster.

The task comes from a public comparison of DQN in PyTorch and Flax, engyasin/ilsurvey on GitHub.
Its two versions of the game differed. In JAX, one key determined both columns, some moves into the
wall earned a reward, and the last step of a truncated episode returned the first observation of the
next one. In Gymnasium, every reset seeded the global random number generators. The two versions
here return equal numbers, and the same two random words select the same layout in both.
"""

import math
from typing import Any

import gymnasium
import numpy as np

# === Rules of both games ========================================================================
SIZE = 15  # rows and columns; row 0 is the top
WALL, GAPS = 7, (0, 5, 10)  # row of the wall, columns of its gaps
GOAL_ROW, START_ROW = 0, SIZE - 1
MOVES = ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0))  # (rows down, columns right) per action
LIMIT = 50  # time limit in steps; a shortest path has at most 28


def neighbor(row: int, column: int, move: tuple[int, int]) -> tuple[int, int]:
    """Return the square after a move. The agent cannot enter the wall or leave the grid."""
    to = row + move[0], column + move[1]
    inside = 0 <= to[0] < SIZE and 0 <= to[1] < SIZE
    return to if inside and (to[0] != WALL or to[1] in GAPS) else (row, column)


# Lookup tables, used by both versions of the game.
LINE = range(SIZE)
NEXT = np.array(  # [row, column, action] -> next square
    [[[neighbor(i, j, move) for move in MOVES] for j in LINE] for i in LINE], np.int32
)
DISTANCE = np.array(  # [row, column, goal column] -> distance to the goal
    [[[math.hypot(i - GOAL_ROW, j - goal) for goal in LINE] for j in LINE] for i in LINE], "f"
)


def layout(a: Any, b: Any) -> tuple[Any, Any]:
    """Map two 32-bit words to the columns of agent and goal.

    The words are Python integers or uint32 arrays in JAX. All 225 layouts are equally likely, even
    for the words of PRNGKey(0), PRNGKey(1), ..., which are (0, 0), (0, 1), ...
    """
    return divmod(scramble(scramble(a) ^ b) % SIZE**2, SIZE)


def scramble(x: Any) -> Any:
    """Hash 32 bits to 31 bits.

    Unlike JAX integers, Python integers do not overflow, so a mask removes the high bits. The mask
    has 31 bits because JAX does not accept a 32-bit constant.
    """
    for _ in range(2):
        x = (x ^ x >> 16) * 0x45D9F3B & 0x7FFFFFFF
    return x ^ x >> 16


def all_layouts() -> np.ndarray:
    """Return the columns of agent and goal in all layouts, (225, 2); the goal varies fastest."""
    return np.indices((SIZE, SIZE)).reshape(2, -1).T


def optimal_steps(agent: Any, goal: Any) -> Any:
    """Return the length of a shortest path between two columns, given as integers or arrays."""
    sideways = [abs(agent - gap) + abs(goal - gap) for gap in GAPS]
    return START_ROW - GOAL_ROW + np.min(sideways, axis=0)


def draw(row: int, column: int, goal: int) -> np.ndarray:
    """Draw an image (240, 240, 3) uint8. The agent is a blue disc, the goal an orange square."""
    colors = np.full((SIZE, SIZE, 3), 245, np.uint8)
    colors[WALL] = 70, 70, 80
    colors[WALL, GAPS] = 245
    colors[GOAL_ROW, goal] = 240, 160, 40
    image = colors.repeat(16, axis=0).repeat(16, axis=1)
    image[::16] = image[:, ::16] = 215  # lines between the squares
    square = image[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
    y, x = np.indices((16, 16)) - 8
    square[x**2 + y**2 < 6**2] = 40, 100, 200
    return image


# === Gymnasium ==================================================================================
class DoorsGymnasium(gymnasium.Env):
    """Doors for Gymnasium, in plain Python.

    The class counts its steps itself, because the TimeLimit wrapper in Gymnasium also sets
    truncated if the episode terminates in the last step.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    # Indexing a list is several times faster than indexing an array.
    next_square, distance = NEXT.tolist(), DISTANCE.tolist()

    def __init__(self, render_mode: str | None = None, max_steps_in_episode: int = LIMIT) -> None:
        self.render_mode, self.max_steps_in_episode = render_mode, max_steps_in_episode
        self.action_space = gymnasium.spaces.Discrete(len(MOVES))
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (3 * SIZE,))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Start an episode. Return obs (45,) and info.

        options={"words": (a, b)} selects the layout for a gymnax key with these words, and
        options={"layout": (agent, goal)} selects a layout by its columns. Raise ValueError if a
        column does not exist.
        """
        super().reset(seed=seed)
        options = options or {}
        if "layout" in options:
            agent, goal = map(int, options["layout"])
        elif "words" in options:
            agent, goal = layout(*map(int, options["words"]))
        else:
            agent, goal = layout(*self.np_random.integers(2**32, size=2).tolist())
        if agent not in LINE or goal not in LINE:
            raise ValueError(
                f"layout must be two columns from 0 to {SIZE - 1}, not {agent}, {goal}"
            )
        self.row, self.column, self.goal, self.time = START_ROW, agent, goal, 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple:
        """Take an action. Return obs (45,), reward, terminated, truncated and info."""
        before = self.distance[self.row][self.column][self.goal]
        self.row, self.column = self.next_square[self.row][self.column][action]
        after = self.distance[self.row][self.column][self.goal]
        self.time += 1
        truncated = self.time >= self.max_steps_in_episode and after > 0
        return self.observe(), before - after, after == 0, truncated, {}

    def observe(self) -> np.ndarray:
        obs = np.zeros(3 * SIZE, np.float32)
        obs[self.row] = obs[SIZE + self.column] = obs[2 * SIZE + self.goal] = 1
        return obs

    def render(self) -> Any:
        """Draw the state: (240, 240, 3) uint8."""
        return draw(self.row, self.column, self.goal)


gymnasium.register("Doors-v0", f"{__name__}:DoorsGymnasium")
SHORT = {"max_steps_in_episode": 15}  # as in the public comparison; too few for most layouts
gymnasium.register("DoorsShort-v0", f"{__name__}:DoorsGymnasium", kwargs=SHORT)

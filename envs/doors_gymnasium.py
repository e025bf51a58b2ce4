"""Doors: cross a wall by one of its three gaps, its rules, and the game for Gymnasium.

    ........x......   row 0: the goal x
    ...............
    .####.####.####   row 7: a wall, whose gaps are columns 0, 5 and 10
    ...............
    ...o...........   row 14: the agent o starts here

The grid has 15 x 15 squares, and five of its rows are shown. Agent and goal each get a column at
random, independently: 225 layouts. Five actions: stay, right, down, left, up. A move into the wall
or over the border does nothing and pays nothing. Any other pays by how much nearer the goal came,
as the crow flies, so that all ways there pay the same, and only their lengths differ. The goal
terminates an episode, and 50 steps without it truncate one. What the agent sees are three one-hots
of 15: its row, its column, the goal's column.

    python -m studies.doors.run more/dqn_torch_gymnasium.py doors

That trains by the settings with which agents solve all layouts; studies/doors has what they bring.

doors.py has the same game for gymnax, by the rules in here. This file does without JAX, so that
PyTorch on Gymnasium need not wait for it.

The task is that of a public comparison of DQN in PyTorch and in Flax, engyasin/ilsurvey on GitHub.
There the two libraries had different games: in JAX one key gave both columns, for a while pushing
against the wall paid, and the last step of a truncated episode saw the next one's first square; in
Gymnasium every reset seeded the random numbers of the whole process. Here both do the same, to the
last digit, and start in the same layout where they are given the same two words.
"""

import math
from typing import Any

import gymnasium
import numpy as np

# === Rules, for both ============================================================================
SIZE = 15  # rows and columns; rows are counted from the top
WALL, GAPS = 7, (0, 5, 10)  # the wall's row, and its columns without wall
GOAL_ROW, START_ROW = 0, SIZE - 1
MOVES = ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0))  # of each action: rows down, columns right
LIMIT = 50  # steps; the longest of the shortest ways has 28


def neighbour(row: int, column: int, move: tuple[int, int]) -> tuple[int, int]:
    """Where a move leads to: where it began, if there is wall or border."""
    to = row + move[0], column + move[1]
    inside = 0 <= to[0] < SIZE and 0 <= to[1] < SIZE
    return to if inside and (to[0] != WALL or to[1] in GAPS) else (row, column)


# What both look up at every step, computed once.
LINE = range(SIZE)
NEXT = np.array(  # [row, column, action]: the square after it
    [[[neighbour(i, j, move) for move in MOVES] for j in LINE] for i in LINE], np.int32
)
DISTANCE = np.array(  # [row, column, goal's column]: from there to the goal
    [[[math.hypot(i - GOAL_ROW, j - goal) for goal in LINE] for j in LINE] for i in LINE], "f"
)


def layout(a: Any, b: Any) -> tuple[Any, Any]:
    """The columns of agent and goal that two words of 32 bits stand for.

    The words are integers, or uint32 in JAX. All 225 layouts are equally likely, also for the words
    of PRNGKey(0), PRNGKey(1), ..., which are no random ones: (0, 0), (0, 1), ...
    """
    return divmod(scramble(scramble(a) ^ b) % SIZE**2, SIZE)


def scramble(x: Any) -> Any:
    """A hash of 32 bits into 31: what overflows in JAX, the mask cuts off in Python.

    (JAX would not take a mask of 32 bits as a constant.)
    """
    for _ in range(2):
        x = (x ^ x >> 16) * 0x45D9F3B & 0x7FFFFFFF
    return x ^ x >> 16


def all_layouts() -> np.ndarray:
    """The columns of agent and goal in all layouts, (225, 2), the goal's changing fastest."""
    return np.indices((SIZE, SIZE)).reshape(2, -1).T


def optimal_steps(agent: Any, goal: Any) -> Any:
    """Steps of the shortest way from one column to another: of integers, or of arrays of them."""
    sideways = [abs(agent - gap) + abs(goal - gap) for gap in GAPS]
    return START_ROW - GOAL_ROW + np.min(sideways, axis=0)


def draw(row: int, column: int, goal: int) -> np.ndarray:
    """A picture (240, 240, 3) of uint8: the agent is a blue disc, the goal an orange square."""
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
    """Doors for Gymnasium: one environment, which changes its own state, in plain Python.

    It counts its steps itself. Gymnasium's TimeLimit, which register(max_episode_steps=50) would
    put around it, also calls truncated what terminates in the last step.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    # In a list a number is found several times faster than in an array.
    next_square, distance = NEXT.tolist(), DISTANCE.tolist()

    def __init__(self, render_mode: str | None = None, max_steps_in_episode: int = LIMIT) -> None:
        self.render_mode, self.max_steps_in_episode = render_mode, max_steps_in_episode
        self.action_space = gymnasium.spaces.Discrete(len(MOVES))
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (3 * SIZE,))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Begin an episode; return obs (45,) and info.

        options={"words": (a, b)} begins as gymnax does with a key of these words, and
        options={"layout": (agent, goal)} in these columns; ValueError if they are none.
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
            raise ValueError(f"a layout is two columns from 0 to {SIZE - 1}, not {agent}, {goal}")
        self.row, self.column, self.goal, self.time = START_ROW, agent, goal, 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple:
        """Take an action; return obs (45,), reward, terminated, truncated and info."""
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
        """Draw the state: (240, 240, 3) of uint8."""
        return draw(self.row, self.column, self.goal)


gymnasium.register("Doors-v0", f"{__name__}:DoorsGymnasium")
SHORT = {"max_steps_in_episode": 15}  # as in the public comparison: few layouts can be solved
gymnasium.register("DoorsShort-v0", f"{__name__}:DoorsGymnasium", kwargs=SHORT)

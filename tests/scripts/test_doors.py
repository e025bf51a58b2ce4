"""Doors in gymnax and Gymnasium: compare both versions, and check them with a map and a search."""

from collections import deque
from functools import cache
from itertools import product
from math import dist
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from scipy import stats

from envs import check, doors
from envs import doors_gymnasium as rules

ENV_ID = "envs.doors_gymnasium:Doors-v0"
MAP = ["." * 15] * 7 + [".####.####.####"] + ["." * 15] * 7
SQUARES = [(i, j) for i, j in product(range(15), repeat=2) if MAP[i][j] == "."]
STAY, RIGHT, DOWN, LEFT, UP = range(5)
TURNS = {STAY: (0, 0), RIGHT: (0, 1), DOWN: (1, 0), LEFT: (0, -1), UP: (-1, 0)}


def after(square, action):
    """Return the square that an action leads to, according to the map."""
    row, column = square[0] + TURNS[action][0], square[1] + TURNS[action][1]
    free = 0 <= row < 15 and 0 <= column < 15 and MAP[row][column] == "."
    return (row, column) if free else square


def search(goal):
    """Return the number of steps from each square to column `goal` of row 0, found by a search."""
    steps, queue = {(0, goal): 0}, deque([(0, goal)])
    while queue:
        square = queue.popleft()
        for action in TURNS:  # moves are reversible
            if after(square, action) not in steps:
                steps[after(square, action)] = steps[square] + 1
                queue.append(after(square, action))
    return steps


STEPS = [search(goal) for goal in range(15)]


@cache
def best(square, goal):
    """Return the first action of a shortest path."""
    return min(TURNS, key=lambda action: STEPS[goal][after(square, action)])


def where(obs):
    """Decode obs (45,) into the square of the agent and the column of the goal."""
    rows = np.asarray(obs).reshape(3, 15)
    assert rows.dtype == np.float32
    assert rows.sum(1).tolist() == rows.max(1).tolist() == [1, 1, 1] and rows.min() == 0
    row, column, goal = rows.argmax(1).tolist()
    return (row, column), goal


def make(**options) -> Any:
    return gymnasium.make(ENV_ID, **options).unwrapped


# All tests share this instance, because JAX would compile the methods of a second one again.
DOORS = doors.Doors()
reset_all, start_all = jax.jit(jax.vmap(DOORS.reset)), jax.jit(jax.vmap(DOORS.start))
gymnax_step = jax.jit(jax.vmap(DOORS.step, (0, 0, 0, None)))


# === Rules ======================================================================================
def test_every_move_from_every_square():
    """Moves into the wall or a border have no effect and no reward.

    Testing Gymnasium is enough: both versions use the same table of moves.
    """
    env = make()
    env.reset(seed=0)
    for square, goal, action in product(SQUARES, range(15), TURNS):
        to = after(square, action)
        pay = dist(square, (0, goal)) - dist(to, (0, goal))
        (env.row, env.column), env.goal, env.time = square, goal, 0
        obs, reward, terminated, truncated, _ = env.step(action)
        assert where(obs) == (to, goal)
        assert (terminated, truncated) == (to == (0, goal), False)
        assert reward == pytest.approx(pay, abs=2e-6)
        if to == square:
            assert reward == 0


def test_optimal_steps_and_layouts():
    """optimal_steps() equals the search, and episodes start with the requested layout."""
    layouts = rules.all_layouts()
    found = [STEPS[goal][14, agent] for agent, goal in layouts]
    assert rules.optimal_steps(*layouts.T).tolist() == found
    assert (max(found), round(np.mean(found), 1)) == (28, 19.6)
    env = make()
    for (agent, goal), row in zip(layouts, np.asarray(start_all(*layouts.T)[0]), strict=True):
        first, _ = env.reset(options={"layout": (agent, goal)})
        assert where(first) == where(row) == ((14, agent), goal)


def test_both_versions_agree_over_many_episodes():
    """Actions are random in 16 environments, and mostly follow shortest paths in 16 others.

    With a limit of 20 steps, many episodes reach the goal in the last step.
    """
    rng = np.random.default_rng(0)
    limit: Any = {"max_steps_in_episode": 20}
    random = np.where(np.arange(32) < 16, 1, 0.05)
    keys = jax.random.split(jax.random.PRNGKey(0), 32)
    obs, state = reset_all(keys)
    envs, ends, starts = [make(**limit) for _ in random], np.zeros(2, int), set()
    for env, row, words in zip(envs, np.asarray(obs), np.asarray(keys), strict=True):
        np.testing.assert_array_equal(env.reset(options={"words": words})[0], row)
    for step in range(200):
        actions = [best(*where(row)) for row in np.asarray(obs)]
        actions = np.where(rng.random(32) < random, rng.integers(5, size=32), actions).astype("i")
        keys = jax.random.split(jax.random.PRNGKey(step + 1), 32)
        obs, state, *result, info = gymnax_step(keys, state, actions, doors.Params(**limit))
        final = np.asarray(info["final_observation"])
        reward, terminated, truncated = map(np.asarray, result)
        next_words = np.asarray(jax.vmap(jax.random.split)(keys)[:, 1])  # keys of the gymnax resets
        for i, env in enumerate(envs):
            row, pay, *done, _ = env.step(actions[i])
            np.testing.assert_array_equal(row, final[i])
            assert np.float32(pay) == reward[i]
            assert done == [terminated[i], truncated[i]]
            assert not all(done)  # reaching the goal in the last step only terminates
            if any(done):
                row, _ = env.reset(options={"words": next_words[i]})
                starts.add(where(row))
            np.testing.assert_array_equal(row, obs[i])
            ends += done
    assert min(ends) > 60 and len(starts) > 60
    assert {row for (row, _), _ in starts} == {14}


# === Random numbers =============================================================================
def test_all_layouts_are_equally_likely():
    """The layouts of consecutive seeds are independent."""
    obs, _ = reset_all(jax.vmap(jax.random.PRNGKey)(jnp.arange(225 * 40)))
    places = [where(row) for row in np.asarray(obs)]
    agent, goal = np.array([(square[1], goal) for square, goal in places]).T
    assert stats.chisquare(np.bincount(15 * agent + goal, minlength=225)).pvalue > 0.005
    for before, now in ((agent[:-1], agent[1:]), (goal[:-1], goal[1:])):
        table = np.histogram2d(before, now, bins=15)[0]
        assert stats.chi2_contingency(table).pvalue > 0.005


# === Interfaces =================================================================================
@pytest.mark.filterwarnings("error")
def test_gymnasium_and_this_project_accept_the_environment(capsys):
    check_env(make(render_mode="rgb_array"))
    assert gymnasium.spec("Doors-v0").max_episode_steps is None
    assert (rules.LIMIT, DOORS.default_params.max_steps_in_episode) == (50, 50)
    for name in ("envs.doors:Doors", ENV_ID):
        check.main(name)
        assert f"{name}: OK" in capsys.readouterr().out

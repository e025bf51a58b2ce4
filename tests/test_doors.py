"""Doors in both libraries: in step with each other, and with a map and a search written here."""

import math
import pickle
import random
from collections import deque
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from scipy import stats

from envs import doors
from envs import doors_gymnasium as rules

ENV_ID = "envs.doors_gymnasium:Doors-v0"  # as envs.doors:Doors-v0 is, which imports more
MAP = ["." * 15] * 7 + [".####.####.####"] + ["." * 15] * 7
SQUARES = [(i, j) for i, j in product(range(15), repeat=2) if MAP[i][j] == "."]
STAY, RIGHT, DOWN, LEFT, UP = range(5)
TURNS = {STAY: (0, 0), RIGHT: (0, 1), DOWN: (1, 0), LEFT: (0, -1), UP: (-1, 0)}


def after(square, action):
    """By the map: the square that an action leads to."""
    row, column = square[0] + TURNS[action][0], square[1] + TURNS[action][1]
    free = 0 <= row < 15 and 0 <= column < 15 and MAP[row][column] == "."
    return (row, column) if free else square


def search(goal):
    """Breadth first from the goal in row 0: how many steps each square is away."""
    steps, queue = {(0, goal): 0}, deque([(0, goal)])
    while queue:
        square = queue.popleft()
        for action in TURNS:  # each move can be taken back
            if after(square, action) not in steps:
                steps[after(square, action)] = steps[square] + 1
                queue.append(after(square, action))
    return steps


STEPS = [search(goal) for goal in range(15)]


@cache
def best(square, goal):
    """The first action of a shortest way."""
    return min(TURNS, key=lambda action: STEPS[goal][after(square, action)])


def where(obs):
    """The agent's square and the goal's column, as obs (45,) shows them."""
    assert obs.shape == (45,) and obs.dtype == np.float32
    rows = np.asarray(obs).reshape(3, 15)
    assert rows.sum(1).tolist() == rows.max(1).tolist() == [1, 1, 1] and rows.min() == 0
    row, column, goal = rows.argmax(1).tolist()
    return (row, column), goal


def words_of(keys):
    return np.asarray(jax.random.key_data(keys)).tolist()


def make(**options) -> Any:
    return gymnasium.make(ENV_ID, **options).unwrapped


# A module's one environment: another one's functions would be compiled again.
DOORS = doors.Doors()
reset_all, start_all = jax.jit(jax.vmap(DOORS.reset)), jax.jit(jax.vmap(DOORS.start))


@jax.jit
@jax.vmap
def gymnax_step(key, state, action):
    obs, state, reward, terminated, truncated, info = DOORS.step(key, state, action)
    result = {"obs": obs, "reward": reward, "terminated": terminated, "truncated": truncated}
    return state, result | {"final": info["final_observation"]}


def step_all(keys, state, actions):
    """A step of N environments; return their state, and in NumPy what happened."""
    state, result = gymnax_step(keys, state, jnp.asarray(actions, jnp.int32))
    return state, SimpleNamespace(**jax.device_get(result))


# === In step ====================================================================================
@pytest.fixture(scope="module")
def played():
    """640 steps of 64 environments in gymnax and in Gymnasium, compared; what happened at each.

    32 of them act blindly, in 20,480 steps, and 32 on shortest ways but for a share of actions.
    """
    num_envs, record, rng = 64, [], np.random.default_rng(0)
    blind = np.where(np.arange(num_envs) < 32, 1, rng.uniform(0, 0.5, num_envs))
    keys = jax.random.split(jax.random.PRNGKey(0), num_envs)
    obs, state = reset_all(keys)
    envs = [make() for _ in range(num_envs)]
    for env, row, words in zip(envs, obs, words_of(keys), strict=True):
        np.testing.assert_array_equal(env.reset(options={"words": words})[0], row)
    for step in range(640):
        places = [where(row) for row in np.asarray(obs)]
        actions, others = [best(*place) for place in places], rng.integers(5, size=num_envs)
        actions = np.where(rng.random(num_envs) < blind, others, actions)
        keys = jax.random.split(jax.random.PRNGKey(step + 1), num_envs)
        state, result = step_all(keys, state, actions)
        next_words = words_of(jax.vmap(jax.random.split)(keys)[:, 1])  # which gymnax resets with
        for i, env in enumerate(envs):
            row, reward, terminated, truncated, info = env.step(actions[i])
            np.testing.assert_array_equal(row, result.final[i])
            assert np.float32(reward) == result.reward[i] and info == {}
            assert (terminated, truncated) == (result.terminated[i], result.truncated[i])
            if terminated or truncated:
                row, _ = env.reset(options={"words": next_words[i]})
            np.testing.assert_array_equal(row, result.obs[i])
        obs, result.places = result.obs, places
        record.append(result)
    return record


def test_both_do_the_same_at_every_step(played):
    """The fixture compares them. Here: whatever there is to compare came up."""
    seen = {square for result in played for square, _ in result.places}
    assert seen >= {square for square in SQUARES if square[0] > 0}
    assert sum(result.terminated.sum() for result in played) > 300
    assert sum(result.truncated.sum() for result in played) > 300
    rewards = np.stack([result.reward for result in played])
    assert min((rewards < 0).sum(), (rewards == 0).sum(), (rewards > 0).sum()) > 5000


def test_an_end_shows_its_last_square_and_begins_another_layout(played):
    starts = []
    for result in played:
        done = result.terminated | result.truncated
        np.testing.assert_array_equal(result.obs[~done], result.final[~done])
        starts += [where(row) for row in result.obs[done]]
        for row, terminated in zip(result.final[done], result.terminated[done], strict=True):
            square, goal = where(row)
            assert terminated == (square == (0, goal))
    assert {row for (row, _), _ in starts} == {14}
    assert len(starts) > 600 and len(set(starts)) > 200


def test_any_way_to_the_goal_returns_the_distance_at_its_start(played):
    total, length, begin, detours = np.zeros(64), np.zeros(64, int), [*played[0].places], []
    for result in played:
        total, length = total + result.reward, length + 1
        for i in np.flatnonzero(result.terminated | result.truncated):
            (square, goal) = begin[i]
            if result.terminated[i]:
                assert total[i] == pytest.approx(math.hypot(14, square[1] - goal), abs=1e-5)
                detours.append(length[i] - STEPS[goal][square])
            total[i], length[i], begin[i] = 0, 0, where(result.obs[i])
    assert min(detours) == 0 and max(detours) > 20


# === Rules ======================================================================================
def test_every_move_from_every_square():
    """Blocked ones, by the wall and by four borders, neither move nor pay."""
    cases = [*product(SQUARES, range(15), TURNS)]
    rows, columns = np.array([square for square, _, _ in cases], np.int32).T
    goals, actions = np.array([case[1:] for case in cases], np.int32).T
    keys = jnp.zeros((len(cases), 2), jnp.uint32)
    state = doors.State(*map(jnp.array, (rows, columns, goals, np.zeros_like(rows))))
    _, result = step_all(keys, state, actions)
    env, blocked = make(), 0
    env.reset(seed=0)
    for i, (square, goal, action) in enumerate(cases):
        to = after(square, action)
        pay = math.dist(square, (0, goal)) - math.dist(to, (0, goal))
        (env.row, env.column), env.goal, env.time = square, goal, 0
        obs, reward, terminated, truncated, _ = env.step(action)
        ends = to == (0, goal), False
        assert where(obs) == where(result.final[i]) == (to, goal)
        assert (terminated, truncated) == ends == (result.terminated[i], result.truncated[i])
        assert reward == pytest.approx(pay, abs=2e-6)
        assert result.reward[i] == pytest.approx(pay, abs=2e-6)
        if to == square:
            assert reward == result.reward[i] == 0
            blocked += action != STAY
    assert blocked == 15 * (15 + 15 + 15 + 14 + 2 * 12 + 5)  # borders, the wall, inside its gaps


def test_a_search_finds_the_closed_form():
    layouts = rules.all_layouts()
    assert layouts.tolist() == [list(pair) for pair in product(range(15), repeat=2)]
    found = [STEPS[goal][14, agent] for agent, goal in layouts]
    assert rules.optimal_steps(*layouts.T).tolist() == found
    assert [rules.optimal_steps(agent, goal) for agent, goal in layouts.tolist()] == found
    assert (max(found), round(np.mean(found), 1)) == (28, 19.6)


def test_all_layouts_are_solved_in_their_shortest_steps():
    """By the search's actions, in both libraries from where each is told to start."""
    layouts = rules.all_layouts()
    obs, state = start_all(*layouts.T)
    envs, left = [make() for _ in layouts], rules.optimal_steps(*layouts.T)
    for env, layout, row in zip(envs, layouts, obs, strict=True):
        first, _ = env.reset(options={"layout": layout})
        assert where(first) == where(row) == ((14, layout[0]), layout[1])
    keys, seen = jnp.zeros((225, 2), jnp.uint32), [where(row) for row in np.asarray(obs)]
    while (left > 0).any():
        actions = [best(*place) for place in seen]
        state, result = step_all(keys, state, actions)
        for i in np.flatnonzero(left > 0):
            _, _, terminated, _, _ = envs[i].step(actions[i])
            assert terminated == result.terminated[i] == (left[i] == 1)
        left, seen = left - 1, [where(row) for row in result.final]


def play_gymnax(layout, actions, **limit):
    params = doors.Params(**limit)
    _, state = DOORS.start(*layout)
    for action in actions:
        _, state, _, terminated, truncated, _ = DOORS.step(jax.random.key(0), state, action, params)
        yield bool(terminated), bool(truncated)


def play_gymnasium(layout, actions, **limit):
    env = gymnasium.make(ENV_ID, **limit)
    env.reset(options={"layout": layout})
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        yield terminated, truncated


@pytest.mark.parametrize("play", [play_gymnax, play_gymnasium])
def test_time_ends_an_episode_unless_the_goal_does(play):
    """After 50 steps to the step, and what ends there at the goal is not called truncated."""
    assert [*play((3, 4), [STAY] * 50)] == [(False, False)] * 49 + [(False, True)]
    limit: Any = {"max_steps_in_episode": 30}
    assert [*play((3, 4), [STAY] * 30, **limit)] == [(False, False)] * 29 + [(False, True)]
    for waits in (35, 36, 37):  # and 14 steps up
        ends = [*play((5, 5), [STAY] * waits + [UP] * 14)][:50]
        last = (True, False) if waits < 37 else (False, True)
        assert ends == [(False, False)] * (len(ends) - 1) + [last]
        assert len(ends) == min(waits + 14, 50)


@pytest.mark.parametrize("layout", [(15, 0), (0, 15), (-1, 3), (3, -1)])
def test_a_layout_outside_is_refused(layout):
    with pytest.raises(ValueError, match="a layout is two columns from 0 to 14, not"):
        make().reset(options={"layout": layout})


# === Random numbers =============================================================================
def test_words_make_the_same_layout_in_both():
    words = np.random.default_rng(0).integers(2**32, size=(20_000, 2), dtype=np.uint32)
    raw = jax.vmap(jax.random.PRNGKey)(jnp.arange(1000))
    edges = [*product((0, 1, 2**31 - 1, 2**31, 2**32 - 1), repeat=2)]
    words = np.concatenate([words, raw, np.array(edges, np.uint32)])
    in_jax = jax.jit(jax.vmap(rules.layout))(*jnp.asarray(words).T)
    assert np.stack(in_jax, 1).tolist() == [list(rules.layout(*pair)) for pair in words.tolist()]
    obs, _ = reset_all(raw)
    same, _ = reset_all(jax.vmap(jax.random.key)(jnp.arange(1000)))
    np.testing.assert_array_equal(obs, same)
    env = make()
    for row, key in zip(np.asarray(obs), np.asarray(raw), strict=True):
        np.testing.assert_array_equal(env.reset(options={"words": key})[0], row)


def layouts_of_seeds(num):
    return reset_all(jax.vmap(jax.random.PRNGKey)(jnp.arange(num)))[0]


def layouts_of_first_words(num):
    env = make()
    return [env.reset(options={"words": (word, 0)})[0] for word in range(num)]


def layouts_of_split(num):
    return reset_all(jax.random.split(jax.random.PRNGKey(1), num))[0]


def layouts_of_gymnasium(num):
    env = make()
    return [env.reset(seed=None if i else 1)[0] for i in range(num)]


@pytest.mark.parametrize(
    "draw", [layouts_of_seeds, layouts_of_first_words, layouts_of_split, layouts_of_gymnasium]
)
def test_all_layouts_are_as_likely(draw):
    """And their columns independent of each other, and of those of the next episode."""
    places = [where(row) for row in np.asarray(draw(225 * 40))]
    agent, goal = np.array([(square[1], goal) for square, goal in places]).T
    counts = np.bincount(15 * agent + goal, minlength=225)
    pairs = [(agent, goal), (agent[:-1], agent[1:]), (goal[:-1], goal[1:]), (goal[:-1], agent[1:])]
    tables = [np.histogram2d(*pair, bins=15)[0] for pair in pairs]
    values = [stats.chisquare(counts), *map(stats.chi2_contingency, tables)]
    assert len(counts) == 225 and min(value.pvalue for value in values) > 0.005


def starts(env, num, seed=None):
    return [env.reset(seed=None if i else seed)[0].tobytes() for i in range(num)]


def test_random_numbers_are_private():
    """They come from the seed alone, whatever others do, and nobody else's are touched."""
    expected = starts(make(), 50, seed=3)
    np.random.seed(5)
    random.seed(5)
    before = np.random.get_state(legacy=False)["state"]["key"].tolist(), random.getstate()
    env, other, drawn = make(), make(), []
    other.reset(seed=4)
    for i in range(50):
        drawn.append(env.reset(seed=None if i else 3)[0].tobytes())
        other.reset()
        other.step(UP)
        env.step(UP)
    now = np.random.get_state(legacy=False)["state"]["key"].tolist(), random.getstate()
    assert drawn == expected and now == before
    assert starts(make(), 50, seed=4) != expected
    np.random.seed(5)
    unseeded = starts(make(), 50)
    np.random.seed(5)
    assert starts(make(), 50) != unseeded


# === Interfaces =================================================================================
@pytest.mark.filterwarnings("error")
def test_gymnasiums_own_check():
    check_env(make(render_mode="rgb_array"))
    env = gymnasium.make(ENV_ID)
    env.reset(seed=0)
    env.step(env.action_space.sample())
    assert env.spec and env.spec.id == "Doors-v0" and env.spec.max_episode_steps is None


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gymnasiums_vector_environments(mode):
    """As the scripts make them; the first one goes the shortest way, the second one anywhere."""
    seeds: Any = [3, 4]
    own: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED}
    own |= {"context": "forkserver"} if mode == "async" else {}
    vector = gymnasium.make_vec(ENV_ID, 2, mode, vector_kwargs=own, max_steps_in_episode=40)
    envs, ends = [make(max_steps_in_episode=40) for _ in range(2)], np.zeros(2)
    rng = np.random.default_rng(0)
    try:
        obs, _ = vector.reset(seed=seeds)
        rows = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
        for _ in range(100):
            np.testing.assert_array_equal(obs, rows)
            actions = np.array([best(*where(obs[0])), rng.integers(5)])
            obs, rewards, terminated, truncated, _ = vector.step(actions)
            values = [env.step(action) for env, action in zip(envs, actions, strict=True)]
            rows, *results = zip(*(value[:4] for value in values), strict=True)
            np.testing.assert_array_equal([rewards, terminated, truncated], results)
            done, rows = terminated | truncated, [*rows]
            if done.any():
                obs, _ = vector.reset(options={"reset_mask": done})
                rows = [envs[i].reset()[0] if done[i] else rows[i] for i in range(2)]
                ends += done
        assert ends.min() >= 2
    finally:
        vector.close()


def test_a_pickled_environment_goes_on_alike():
    env = make()
    env.reset(seed=0)
    env.step(UP)
    copy = pickle.loads(pickle.dumps(env))
    np.testing.assert_array_equal(copy.step(LEFT)[0], env.step(LEFT)[0])
    assert starts(copy, 20) == starts(env, 20)


def test_gymnaxs_shapes_and_types_stay():
    key, params = jax.random.PRNGKey(0), DOORS.default_params
    assert params.max_steps_in_episode == 50
    obs, state = jax.eval_shape(DOORS.reset, key)
    next_obs, next_state, reward, terminated, truncated, info = jax.eval_shape(
        DOORS.step, key, state, jnp.int32(0)
    )
    for before, now in ((obs, next_obs), (state, next_state), (obs, info["final_observation"])):
        for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(now), strict=True):
            assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, False)
    assert (reward.shape, reward.dtype) == ((), jnp.float32)
    assert {(x.shape, x.dtype) for x in (terminated, truncated)} == {((), jnp.dtype(bool))}
    space, actions = DOORS.observation_space(params), DOORS.action_space(params)
    assert (space.shape, space.dtype, obs.shape) == ((45,), jnp.float32, (45,))
    assert (space.low, space.high, actions.n, DOORS.num_actions) == (0, 1, 5, 5)


def test_gymnax_without_compiling_is_the_same():
    key, action = jax.random.PRNGKey(3), jnp.int32(UP)
    obs, state = DOORS.reset(key)
    compiled = DOORS.step(key, state, action)
    with jax.disable_jit():
        same_obs, same_state = DOORS.reset(key)
        eager = DOORS.step(key, same_state, action)
    jax.tree.map(np.testing.assert_array_equal, (obs, compiled), (same_obs, eager))


def test_pictures():
    env = make(render_mode="rgb_array")
    env.reset(options={"layout": (3, 8)})
    _, state = DOORS.start(3, 8)
    image = env.render()
    assert image.shape == (240, 240, 3) and image.dtype == np.uint8
    np.testing.assert_array_equal(DOORS.render(state, DOORS.default_params), image)
    centres = [[tuple(color) for color in row] for row in image[8::16, 8::16].tolist()]
    wall, floor, goal, agent = centres[7][1], centres[7][0], centres[0][8], centres[14][3]
    colors = {".": floor, "#": wall, "x": goal, "o": agent}
    assert len(set(colors.values())) == 4
    rows = [[*row] for row in MAP]
    rows[0][8], rows[14][3] = "x", "o"
    assert centres == [[colors[square] for square in row] for row in rows]

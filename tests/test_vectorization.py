"""The race of ways to step many environments: what is timed, and what is made of it."""

import json
import sys
from functools import partial

import jax
import numpy as np
import pytest

from analysis import vectorization
from ppo_linen import VecEnv


def start(num_steps: int):
    env = VecEnv("CartPole-v1", 3)
    _, state = jax.jit(env.reset)(jax.random.PRNGKey(1))
    return env, state, jax.random.randint(jax.random.key(2), (num_steps, 3), 0, 2)


def test_a_loop_and_single_steps_do_the_same():
    env, state, actions = start(40)
    by_step, _ = vectorization.step_by_step(jax.jit(env.step), state, actions)
    by_scan, _ = jax.jit(partial(vectorization.scan, env))(state, actions)
    for ours, theirs in zip(jax.tree.leaves(by_step), jax.tree.leaves(by_scan), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_the_loop_reads_all_that_it_computes():
    """What comes out depends on the first step's actions, so no step can be left out."""
    env, state, actions = start(2)
    scan = jax.jit(partial(vectorization.scan, env))
    assert scan(state, actions)[1] != scan(state, 1 - actions)[1]
    assert "while" in str(scan.lower(state, actions).compile().as_text())


@pytest.mark.parametrize("way", ["sync", "vector", "gymnax step", "gymnax scan"])
def test_every_way_is_measured(way, capsys):
    vectorization.measure("CartPole-v1", way, [2], 3)
    row = json.loads(capsys.readouterr().out)
    assert row["way"] == way and row["num_envs"] == 2
    assert row["start"] > 0 and row["seconds"] > 0


def test_each_game_has_the_ways_that_it_can_be_stepped_in():
    ways = {
        game: {x for y, x in vectorization.cells() if y == game} for game in vectorization.GAMES
    }
    assert ways["Doors"] == set(vectorization.WAYS) - set(vectorization.ONLY_CARTPOLE)
    assert ways["CartPole-v1"] >= ways["Doors"] | {"vector"}


def rows(values: list[float]) -> list[dict]:
    own = {"game": "Doors", "way": "sync", "num_envs": 4, "start": 2.0}
    return [own | {"seconds": x, "repeat": i} for i, x in enumerate(values)]


def test_the_summary_is_a_geometric_mean_with_students_interval():
    [row] = vectorization.summary(rows([1.0, 2.0, 4.0])).to_dict("records")
    assert row["seconds"] == pytest.approx(2) and row["repeats"] == 3
    half = 4.3027 * np.log(2) / np.sqrt(3)
    assert np.log([row["low"], row["high"]]) == pytest.approx(
        np.log(2) + np.array([-half, half]), rel=1e-4
    )


def test_a_figure_is_drawn_beside_the_file(tmp_path, monkeypatch):
    path = tmp_path / "them.jsonl"
    lines = [{"num_steps": 512}, *rows([1.0, 2.0])]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    monkeypatch.setattr(sys, "argv", ["vectorization", "--draw", str(path)])
    vectorization.main()
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["", "{}", "nonsense", '{"num_steps": 1}\n{"game": 1}'])
def test_what_cannot_be_drawn_is_one_sentence(text, tmp_path, monkeypatch, capsys):
    path = tmp_path / "them.jsonl"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["vectorization", "--draw", str(path)])
    with pytest.raises(SystemExit, match="2"):
        vectorization.main()
    assert "cannot be drawn" in capsys.readouterr().err

"""The race of ways to step many environments: what is timed, and what is made of it."""

import json
import sys
import time
from functools import partial
from importlib import metadata
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import ppo_linen_gymnasium
from analysis import docs, vectorization
from analysis.schema import SourceError
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


# === What the two clocks cover ==================================================================
@pytest.fixture
def events(monkeypatch):
    """What happens in order: a "clock" that is read, a "compilation", a "step" or run of steps."""
    seen = []

    def noted(word, function):
        def wrapped(*args):
            seen.append(word)
            return function(*args)

        return wrapped

    def on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append("compilation")

    own_time = SimpleNamespace(perf_counter=noted("clock", time.perf_counter))
    monkeypatch.setattr(vectorization, "time", own_time)
    steps = noted("run", vectorization.step_by_step)
    monkeypatch.setattr(vectorization, "step_by_step", steps)
    gymnasium_env = ppo_linen_gymnasium.VecEnv
    monkeypatch.setattr(gymnasium_env, "step", noted("step", gymnasium_env.step))
    jax.monitoring.register_event_duration_secs_listener(on_event)
    yield seen
    jax.monitoring.unregister_event_duration_listener(on_event)


def spans(events):
    """What lies between one reading of the clocks and the next."""
    words = [x.split() for x in " ".join(events).split("clock")]
    assert len(words) == 5  # two clocks, each read twice
    return words


@pytest.mark.parametrize("way", ["gymnax step", "gymnax scan"])
def test_all_is_compiled_before_the_steps_are_timed(way, events):
    vectorization.in_gymnax(way, "CartPole-v1", 5, 7)
    _, start, between, seconds, _ = spans(events)
    assert start.count("compilation") >= 2  # the reset, and what steps
    assert "compilation" not in between + seconds


def test_the_start_of_single_steps_takes_one_and_not_a_rollout(events, monkeypatch):
    lengths, run = [], vectorization.step_by_step

    def spy(step_fn, state, actions):
        lengths.append(len(actions))
        return run(step_fn, state, actions)

    monkeypatch.setattr(vectorization, "step_by_step", spy)
    vectorization.in_gymnax("gymnax step", "CartPole-v1", 3, 6)
    assert [x.count("run") for x in spans(events)] == [0, 1, 1, 1, 0]
    assert lengths == [1, 6, 6]


def test_gymnasium_starts_with_one_step(events):
    vectorization.in_gymnasium("sync", "CartPole-v1", 3, 6)
    assert [x.count("step") for x in spans(events)] == [0, 1, 0, 6, 0]


@pytest.mark.parametrize("way", ["sync", "gymnax scan"])
def test_the_first_size_does_not_pay_for_the_process(way, monkeypatch, capsys):
    sizes, name = [], "in_gymnax" if way == "gymnax scan" else "in_gymnasium"

    def run(how, env_id, *size):
        sizes.append(size)
        return 1.0, 2.0

    monkeypatch.setattr(vectorization, name, run)
    vectorization.measure("CartPole-v1", way, [4, 2], 9)
    assert sizes == [(1, 1), (4, 9), (2, 9)]
    assert len(capsys.readouterr().out.splitlines()) == 2


# === The race ===================================================================================
def test_each_game_has_the_ways_that_it_can_be_stepped_in():
    ways = {
        game: {x for y, x in vectorization.cells() if y == game} for game in vectorization.GAMES
    }
    assert ways["Doors"] == set(vectorization.WAYS) - set(vectorization.ONLY_CARTPOLE)
    assert ways["CartPole-v1"] >= ways["Doors"] | {"vector"}


@pytest.fixture
def raced(monkeypatch):
    """The game, the way and the numbers of environments of each process, none of which starts."""
    seen = []

    def run(command, **options):
        words = command[command.index("--one") + 1 :]
        seen.append((words[0], words[1], words[words.index("--num-envs") + 1 :]))
        return SimpleNamespace(stdout="{}\n")

    monkeypatch.setattr(vectorization.subprocess, "run", run)
    return seen


def test_ways_take_turns_in_an_order_of_their_own(raced):
    found = list(vectorization.race([1, 2], 3, 4))
    ways = sorted(vectorization.cells())
    turns = [[x[:2] for x in raced[i : i + len(ways)]] for i in range(0, len(raced), len(ways))]
    assert len(turns) == 4 and all(sorted(turn) == ways for turn in turns)
    assert len(set(map(tuple, turns))) > 1
    assert [x["repeat"] for x in found] == [i for i in range(1, 5) for _ in ways]


def test_more_environments_than_processes_are_no_way_of_async(raced):
    list(vectorization.race([8, 128], 3, 1))
    assert {tuple(sizes) for _, way, sizes in raced if way == "async"} == {("8",)}
    raced.clear()
    list(vectorization.race([128], 3, 1))
    assert {way for _, way, _ in raced} == {way for _, way in vectorization.cells()} - {"async"}
    assert all(sizes == ["128"] for *_, sizes in raced)


@pytest.mark.parametrize("there", [True, False])
def test_the_first_line_says_what_was_measured_on_what(there, monkeypatch, capsys):
    def version(name):
        return "1.2.3" if name == "envpool" else metadata.version(name)

    find = SimpleNamespace(find_spec=lambda name: there or None)
    monkeypatch.setattr(vectorization, "util", find)
    monkeypatch.setattr(vectorization, "metadata", SimpleNamespace(version=version))
    monkeypatch.setattr(vectorization.os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    monkeypatch.setattr(vectorization, "race", lambda *args: [])
    monkeypatch.setattr(sys, "argv", ["vectorization", "--num-envs", "2"])
    vectorization.main()
    about = json.loads(capsys.readouterr().out)
    assert about["num_envs"] == [2] and about["hardware"]["usable_cpus"] == 3
    assert about["versions"]["jax"] == jax.__version__
    assert about["versions"].get("envpool") == ("1.2.3" if there else None)


# === Reading a file =============================================================================
def rows(values: list[float], num_envs: int = 4, way: str = "sync") -> list[dict]:
    own = {"game": "Doors", "way": way, "num_envs": num_envs}
    starts = [9.0, 2.0, 2.5][: len(values)]
    return [
        own | {"seconds": x, "start": y, "repeat": i}
        for i, (x, y) in enumerate(zip(values, starts, strict=True))
    ]


@pytest.fixture
def file(tmp_path):
    def write(*measured):
        path = tmp_path / "them.jsonl"
        path.write_text("".join(f"{json.dumps(x)}\n" for x in ({"num_steps": 512}, *measured)))
        return path

    return write


def test_the_summary_is_a_geometric_mean_with_students_interval(file):
    about, frame = vectorization.read(file(*rows([1.0, 2.0, 4.0])))
    [row] = frame.to_dict("records")
    assert about["num_steps"] == 512
    assert row["estimate"] == pytest.approx(2) and row["repeats"] == 3 and row["start"] == 2.5
    half = 4.3027 * np.log(2) / np.sqrt(3)
    assert np.log([row["low"], row["high"]]) == pytest.approx(
        np.log(2) + np.array([-half, half]), rel=1e-4
    )


def test_the_table_has_a_row_for_each_way_in_the_order_of_the_ways(file):
    scan = [rows([0.5, 0.5], 1, "gymnax scan"), rows([3.0, 3.0, 3.0], 1024, "gymnax scan")]
    path = file(*scan[1], *rows([1.0], 64), *scan[0], *rows([7.0], 16))
    table = vectorization.table(path)
    assert "512 steps" in table.caption
    assert table.cells.to_dict("split")["data"] == [
        ["Doors", "sync", "-", "1.00", "-", "-", "-"],
        ["Doors", "gymnax scan", "0.500 [0.500, 0.500]", "-", "3.00 [3.00, 3.00]", "-", "2.50"],
    ]
    at_once = [f"{x} at once (s)" for x in ("1", "64", "1,024", "4,096")]
    assert list(table.cells) == ["game", "way", *at_once, "start at 1,024 (s)"]
    assert docs.block("vectorization", str(path), None, None).count("| Doors |") == 2


def test_a_figure_is_drawn_beside_the_file(file, monkeypatch):
    path = file(*rows([1.0, 2.0]))
    monkeypatch.setattr(sys, "argv", ["vectorization", "--draw", str(path)])
    vectorization.main()
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_has_round_numbers_and_a_panel_for_each_game(file):
    other = [x | {"game": "CartPole-v1"} for x in rows([50.0], 1024)]
    _, frame = vectorization.read(file(*rows([0.01]), *rows([1.0, 2.0, 4.0], 64), *other))
    figure = vectorization.draw(frame, 512)
    figure.draw_without_rendering()
    assert [x.get_title("left") for x in figure.axes] == list(vectorization.GAMES)
    for axes in figure.axes:
        assert [x.get_text() for x in axes.get_xticklabels()] == ["4", "64", "1,024"]
        assert not any(x.get_text() for x in axes.get_xticklabels(minor=True))
        low, high = axes.get_ylim()
        assert low < 0.01 and high > 50
    labels = {x.get_text() for x in figure.axes[0].get_yticklabels()}
    assert {"0.01", "0.1", "1", "10"} <= labels
    assert [x.get_text() for x in figure.legends[0].get_texts()] == ["sync"]


@pytest.mark.parametrize("text", ["", "{}", "nonsense", '{"num_steps": 1}\n{"game": 1}'])
def test_what_cannot_be_drawn_is_one_sentence(text, tmp_path, monkeypatch, capsys):
    path = tmp_path / "them.jsonl"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["vectorization", "--draw", str(path)])
    with pytest.raises(SystemExit, match="2"):
        vectorization.main()
    assert "is no file of analysis.vectorization" in capsys.readouterr().err
    with pytest.raises(SourceError, match="is no file of"):  # as analysis.docs wants it
        vectorization.table(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("game", "Pong"), ("way", "by hand"), ("num_envs", 0), ("num_envs", "a")),
        *(("seconds", 0), ("seconds", float("nan")), ("start", float("inf"))),
    ],
)
def test_a_row_that_is_no_measurement(name, value, file):
    with pytest.raises(SourceError, match="is no file of analysis"):
        vectorization.read(file(*rows([1.0]), rows([2.0])[0] | {name: value}))


def test_a_figure_that_cannot_be_written_is_one_sentence(file, monkeypatch, capsys):
    path = file(*rows([1.0, 2.0]))
    path.with_suffix(".png").mkdir()
    monkeypatch.setattr(sys, "argv", ["vectorization", "--draw", str(path)])
    with pytest.raises(SystemExit, match="2"):
        vectorization.main()
    assert capsys.readouterr().err.startswith("vectorization: [Errno")

"""The studies' own tables, figures and measurements.

The tables of the committed studies stand in their pages, and test_docs compares each number with
what the code gives. Here is what those studies do not have.
"""

import importlib
import json
import sys
from functools import partial

import jax
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from made_up import data_of, table

from analysis import __main__
from analysis.pack import of_first_agents
from analysis.runs import save
from analysis.schema import SourceError
from ppo_linen import VecEnv
from studies.agents import study as agents
from studies.cpu import env_timing
from studies.doors import study as doors
from studies.tuning import study as tuning
from studies.vectorization import measure

PNG = b"\x89PNG"


@pytest.mark.parametrize("name", ["agents", "doors", "tuning", "vectorization"])
def test_a_studys_figure_is_drawn(name, tmp_path):
    study = importlib.import_module(f"studies.{name}.study")
    study.update(ROOT / "studies" / name, tmp_path)
    [path] = tmp_path.iterdir()
    assert path.read_bytes().startswith(PNG)
    assert (ROOT / "studies" / name / path.name).exists()


# === Agents =====================================================================================
def runs_of(mode, count, seconds, program=True):
    """A row per agent of a program, or per process."""
    rows = []
    for seed in range(1, count + 1):
        row = {"run": f"{mode}/seed{seed}", "mode": mode, "seed": seed, "repeat": seed}
        row |= {"settings": "{}", "process": seconds, "steady": 0.1}
        if program:
            row |= {"num_agents": count, "agent": seed - 1, "settings": '{"num_agents": 2}'}
        rows.append(row)
    return rows


@pytest.fixture
def runs():
    rows = runs_of("ppo_linen_vmap", 2, 12.0) + runs_of("ppo_linen", 1, 8.0, False)
    rows += runs_of("ppo_linen, 2 side by side", 2, 10.0, False)
    return table(rows, batch_size=8192.0, num_iterations=100.0, peak_host_bytes=1e9)


def test_a_group_of_which_one_process_failed_is_left_out(runs, tmp_path):
    save(data_of(runs), tmp_path)
    memory = agents.costs(tmp_path).set_index("way")["megabytes"]
    assert memory.to_dict() == {agents.VMAP: 1000, agents.AFTER: 1000, agents.BESIDE: 2000}
    save(data_of(runs.iloc[:-1]), tmp_path)
    assert set(agents.costs(tmp_path)["way"]) == {agents.VMAP, agents.AFTER}
    save(data_of(runs[runs["mode"] == "ppo_linen"]), tmp_path)
    with pytest.raises(SourceError, match="no run is of a program of many agents"):
        agents.costs(tmp_path)


def test_of_a_packed_study_the_first_agents_are_enough(runs, tmp_path, monkeypatch, capsys):
    """And the command draws the figure of other runs, of a single repeat."""
    small = of_first_agents(data_of(runs, pd.DataFrame({"run": runs["run"], "iteration": 0.0})))
    assert len(small.runs) == len(runs)
    assert len(small.iterations) == len(runs) - 1
    save(small, tmp_path)
    words = ["study", f"{ROOT}/studies/agents", str(tmp_path), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["analysis", *words])
    with pytest.raises(SystemExit, match="0"):
        __main__.main()
    assert "Most thousands of steps per second" in capsys.readouterr().out
    assert (tmp_path / "agents.png").read_bytes().startswith(PNG)


# === Doors ======================================================================================
def test_what_is_gathered_of_doors_and_drawn(tmp_path, capsys):
    for name in ("a", "unfinished", "resumed"):
        run = tmp_path / f"doors-64__{name}"
        run.mkdir()
        line = {"global_step": 10, "solved": 225, "steps": 9, "optimal": 9, "seconds": 1.23456}
        lines = [json.dumps(line | {"iteration": x}) for x in (2, 5)]
        (run / "layouts.jsonl").write_text("\n".join(lines))
        seconds = (9.0, 1.0, 2.0, 7.0, 3.0)  # of iterations 0, 1, and 2, 3, 4
        log = [json.dumps({"iteration": i, "time/iteration": x}) for i, x in enumerate(seconds)]
        (run / "metrics.jsonl").write_text("\n".join(log))
        if name != "unfinished":
            resumed = [40] if name == "resumed" else []
            info = {"script": "dqn_linen", "args": {"seed": 1}, "resumed": resumed}
            (run / "run.json").write_text(json.dumps(info))
    doors.update(tmp_path, tmp_path)
    assert "resumed went on without a judge" in capsys.readouterr().err
    found = pd.read_csv(tmp_path / "layouts.csv")
    assert found["run"].tolist() == ["doors-64__a"] * 2
    assert found["iteration_seconds"].tolist() == [5, 3]
    columns = ["cell", "script", "seed", "global_step", "seconds"]
    assert found.loc[0, columns].tolist() == ["doors-64", "dqn_linen", 1, 10, 1.2346]
    assert (tmp_path / "layouts.png").read_bytes().startswith(PNG)


# === Tuning =====================================================================================
def test_the_scripts_own_settings_may_be_no_trial(tmp_path):
    part = {"iqm": 15.21, "interval": [15.1, 15.3], "returns": [15.0, 16.0]}
    found = {"best": part, "own": part | {"interval": None}, "best_minus_own": part}
    values = {"best_trial": 17, "value_in_study": 15.5, "own_value_in_study": None}
    (tmp_path / "a").mkdir()
    (tmp_path / "a/best.json").write_text(json.dumps(found | values))
    mean = "15.5 [9.1, 21.9]"  # 15.5 +- 12.706 * 0.5
    assert tuning.verdict_table(tmp_path).cells.to_numpy().tolist() == [
        ["a", "the script's own", "-", "15.2", mean],
        ["a", "trial 17", "15.5", "15.2 [15.1, 15.3]", mean],
        ["a", "difference, by seed", "-", "15.2 [15.1, 15.3]", mean],
    ]
    tuning.update(tmp_path, tmp_path)


# === Vectorization ==============================================================================
def test_a_loop_and_single_steps_do_the_same_and_all_is_read():
    env = VecEnv("CartPole-v1", 3)
    _, state = jax.jit(env.reset)(jax.random.PRNGKey(1))
    actions = jax.random.randint(jax.random.key(2), (40, 3), 0, 2)
    step = jax.jit(env.step)
    by_step, _ = measure.step_by_step(step, state, actions)
    by_scan, total = jax.jit(partial(measure.scan, env))(state, actions)
    for ours, theirs in zip(jax.tree.leaves(by_step), jax.tree.leaves(by_scan), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    expected = 0.0
    for action in actions:
        obs, state, result = step(state, action)
        expected += sum(x.sum() for x in jax.tree.leaves((obs, result)))
    np.testing.assert_allclose(total, expected, rtol=1e-4)


def test_every_way_is_measured_one_in_a_process_of_its_own(monkeypatch):
    ways = [("CartPole-v1", "async"), ("Doors", "gymnax scan")]
    monkeypatch.setattr(measure, "cells", lambda: ways)
    rows = list(measure.race([1, 65], 3, 1))
    found = sorted((x["game"], x["way"], x["num_envs"]) for x in rows)
    assert found == [(*ways[0], 1), (*ways[1], 1), (*ways[1], 65)]  # 65 processes are too many
    assert all(min(x["start"], x["seconds"]) > 0 and x["repeat"] == 1 for x in rows)


# === The environments' step times ===============================================================
def test_step_times_are_summaries_of_what_the_clock_says(monkeypatch):
    """Compiling takes 100 s here, the warm-up 7, and the repetitions 1 to 10 s for 2 steps each."""
    durations = [100.0, 7.0, *np.arange(1.0, 11.0)]
    clock = iter(np.cumsum([x for y in durations for x in (0, y)]))
    monkeypatch.setattr(env_timing.time, "perf_counter", lambda: next(clock))
    result = env_timing.measure_all(["CartPole-v1"], num_envs=2, num_steps=2, repeats=10)
    [row] = result["environments"]
    expected = {"trimmed_mean": np.arange(2, 10).mean() / 2, "median": 2.75, "minimum": 0.5}
    expected |= {"spread": (7.75 - 3.25) / 2, "compile": 100.0, "env_id": "CartPole-v1"}
    assert row == pytest.approx(expected)
    assert (result["num_envs"], result["num_steps"], result["repeats"]) == (2, 2, 10)

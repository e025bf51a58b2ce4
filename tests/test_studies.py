"""The studies' own tables, figures and measurements, from runs and files made by hand."""

import json
import sys
from functools import partial

import jax
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from made_up import by, data_of, grid, only_bench, table
from scipy.stats import gmean

from analysis import __main__
from analysis.pack import of_first_agents
from analysis.runs import save
from analysis.schema import SourceError
from ppo_linen import VecEnv
from studies.agents import study as agents
from studies.cpu import env_timing
from studies.doors import study as doors
from studies.peers import study as peers
from studies.tuning import study as tuning
from studies.vectorization import measure
from studies.vectorization import study as vectorization

PNG = b"\x89PNG"

# === Agents =====================================================================================
COUNTS = (1, 2, 4, 8)
NOISE = (1.0, 1.1, 0.95)  # of a repeat, the same in all ways: it cancels in ratios


def runs_of(mode, count, repeat, seconds, steady, program=True):
    """A row per agent of a program, or per process: each takes a second less than the last."""
    rows = []
    for k in range(count):
        seed = 1000 * repeat + 1 + k
        row = {"run": f"{mode} {count} {repeat}/seed{seed}", "mode": mode, "steady": steady}
        row |= {"seed": seed, "repeat": seed, "process": seconds - k, "settings": "{}"}
        if program:
            row |= {"num_agents": count, "agent": k, "settings": f'{{"num_agents": {count}}}'}
        rows.append(row)
    return rows


@pytest.fixture
def many():
    """Linen: vmap takes 10 + N seconds, alone 8, two side by side 12; one scan 12 + N."""
    rows = []
    for repeat, noise in enumerate(NOISE):
        for count in COUNTS:
            rows += runs_of("ppo_linen_vmap", count, repeat, noise * (10 + count), 0.1)
            rows += runs_of("one_scan", count, repeat, noise * (12 + count), 0.05)
        rows += runs_of("ppo_linen", 1, repeat, noise * 8, 0.04, False)
        rows += runs_of("ppo_linen, 2 side by side", 2, repeat, noise * 12, 0.08, False)
    common = {"batch_size": 8192.0, "num_iterations": 100.0, "peak_host_bytes": 1e9}
    return table(rows, **common, algorithm="ppo", commit="a" * 40)


def costs_of(runs, folder):
    save(data_of(runs), folder)
    return agents.costs(folder)


def test_what_each_way_of_training_n_agents_costs(many, tmp_path):
    costs = costs_of(many, tmp_path)
    seconds = by(agents.over_repeats(costs, "seconds"), "way", "agents")
    ratios = by(agents.ratios(costs), "way", "other", "agents")
    for count in COUNTS:
        assert seconds[agents.VMAP, count]["estimate"] == pytest.approx(gmean(NOISE) * (10 + count))
        assert seconds[agents.AFTER, count]["estimate"] == pytest.approx(gmean(NOISE) * 8 * count)
        for end in ("estimate", "low", "high"):  # the noise of repeats cancels
            ratio = ratios[agents.VMAP, agents.AFTER, count][end]
            assert ratio == pytest.approx((10 + count) / (8 * count))
            ratio = ratios[agents.SCAN, agents.VMAP, count][end]
            assert ratio == pytest.approx((12 + count) / (10 + count))
        if count > 1:
            # The last two take as long as the longer of them, those before as long as their mean.
            beside = [x * 12 + (count / 2 - 1) * (x * 12 - 0.5) for x in NOISE]
            assert seconds[agents.BESIDE, count]["estimate"] == pytest.approx(gmean(beside))
    assert set(costs.loc[costs["way"] == agents.BESIDE, "megabytes"]) == {2000}
    cells = agents.ratio_table(costs).cells
    assert cells.iloc[1, :4].tolist() == ["Flax Linen", "vmap", "side by side", "-"]
    [cells] = agents.rate_table(costs).cells.to_numpy().tolist()  # thousands: 8.192 N / seconds
    most = ("655", 8), ("1,311", 8), ("205", 2), ("205", 1)
    assert cells == ["Flax Linen", *(f"{x} [{x}, {x}] (N = {n})" for x, n in most)]


def test_a_group_of_which_one_process_failed_is_left_out(many, tmp_path):
    costs = costs_of(many[many["run"] != "ppo_linen, 2 side by side 2 2/seed2002"], tmp_path)
    assert set(costs.loc[costs["way"] == agents.BESIDE, "repeat"]) == {0, 1}
    with pytest.raises(SourceError, match="no run is of a program of many agents"):
        costs_of(many[many["mode"] == "ppo_linen"], tmp_path)


def test_of_a_packed_study_the_first_agents_are_enough(many, tmp_path, monkeypatch, capsys):
    """And the command draws the figure of other runs."""
    data = data_of(many, pd.DataFrame({"run": many["run"], "iteration": 0.0}))
    small = of_first_agents(data)
    assert len(small.runs) == len(many)
    assert len(small.iterations) == 3 * (2 * len(COUNTS) + 3)
    save(small, tmp_path)
    words = ["study", f"{ROOT}/studies/agents", str(tmp_path), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["analysis", *words])
    with pytest.raises(SystemExit, match="0"):
        __main__.main()
    assert "Most thousands of steps per second" in capsys.readouterr().out
    assert (tmp_path / "agents.png").read_bytes().startswith(PNG)


# === Doors ======================================================================================
def judged(cell, script, seed, pace, whole):
    """Rows of a run that was judged after iterations 20 and 40."""
    own = {"cell": cell, "script": script, "seed": seed, "solved": 225}
    first = {"iteration": 20, "global_step": 1000, "seconds": 1.0, "iteration_seconds": 50.0}
    last = {"iteration": 40, "global_step": 2000, "seconds": whole, "iteration_seconds": pace}
    return [own | first, own | last]


def test_contrasts_pair_runs_of_a_seed():
    rows = []
    for seed in (1, 2, 3):
        for cell, script in {x for pair in doors.CONTRASTS for x in (pair[:2], pair[2:])}:
            slow = 6 if script == "dqn_torch_gymnasium" else 2
            rows += judged(cell, script, seed, slow * seed, 2 * slow * seed**2)
    rows = [x for x in rows if x["seed"] < 3 or x["cell"] != "doors-1024"]
    frame = doors.contrasts(pd.DataFrame(rows))
    for name in ("pace", "whole"):
        for end in ("estimate", "low", "high"):
            assert frame[f"{name}_{end}"].tolist() == pytest.approx([3, 3, 3, 1, 1])
    assert frame["first"].iloc[-1] == "dqn_linen, doors-public-64"


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


# === Peers ======================================================================================
def test_the_peers_table():
    modes = {"ppo_linen": (5.0, 0.06), "ppo_torch": (4.0, 0.3), "sb3": (5.0, 0.35)}
    bench = only_bench(grid(modes | {"sbx": (9.0, 0.2)}, repeats=10, final_return=480.0))
    cells = peers.peer_table(bench).cells.set_index("script")
    assert list(cells.index) == ["ppo_linen", "ppo_torch", "sbx", "sb3"]
    columns = ["iteration (ms)", "times as long as ppo_linen", "as sb3", "target"]
    expected = ["200", "3.33 [3.33, 3.33]", "0.571 [0.571, 0.571]", "-"]
    assert cells.loc["sbx", columns].tolist() == expected
    assert cells["target"].tolist()[:2] == ["0.14", "0.56"]
    assert set(cells["median final return"]) == {"480 [480, 480]"}


# === Tuning =====================================================================================
def test_what_tuning_claimed_and_what_fresh_seeds_give(tmp_path):
    part = {"iqm": 15.21, "interval": [15.1, 15.3], "returns": [15.0, 16.0]}
    found = {"best": part, "own": part | {"interval": None}, "best_minus_own": part}
    for name, own in (("a", 10.0), ("no trial", None)):  # the script's own may be no trial
        values = {"best_trial": 17, "value_in_study": 15.5, "own_value_in_study": own}
        (tmp_path / name).mkdir()
        (tmp_path / name / "best.json").write_text(json.dumps(found | values))
    mean = "15.5 [9.1, 21.9]"  # 15.5 +- 12.706 * 0.5
    assert tuning.verdict_table(tmp_path).cells.to_numpy().tolist()[:4] == [
        ["a", "the script's own", "10.0", "15.2", mean],
        ["a", "trial 17", "15.5", "15.2 [15.1, 15.3]", mean],
        ["a", "difference, by seed", "5.50", "15.2 [15.1, 15.3]", mean],
        ["no trial", "the script's own", "-", "15.2", mean],
    ]
    tuning.update(tmp_path, tmp_path)
    assert (tmp_path / "fresh_seeds.png").read_bytes().startswith(PNG)


# === Vectorization ==============================================================================
def test_a_loop_and_single_steps_do_the_same_and_all_is_read():
    env = VecEnv("CartPole-v1", 3)
    _, state = jax.jit(env.reset)(jax.random.PRNGKey(1))
    actions = jax.random.randint(jax.random.key(2), (40, 3), 0, 2)
    scan = jax.jit(partial(measure.scan, env))
    by_step, _ = measure.step_by_step(jax.jit(env.step), state, actions)
    by_scan, total = scan(state, actions)
    for ours, theirs in zip(jax.tree.leaves(by_step), jax.tree.leaves(by_scan), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    other = actions.at[0].set(1 - actions[0])  # so no step can be left out
    assert scan(state, other)[1] != total


def test_every_way_is_measured_one_in_a_process_of_its_own(monkeypatch):
    ways = [("CartPole-v1", "async"), ("Doors", "gymnax scan")]
    assert set(ways) < set(measure.cells())
    monkeypatch.setattr(measure, "cells", lambda: ways)
    rows = list(measure.race([1, 65], 3, 1))
    found = sorted((x["game"], x["way"], x["num_envs"]) for x in rows)
    assert found == [(*ways[0], 1), (*ways[1], 1), (*ways[1], 65)]  # 65 processes are too many
    assert all(min(x["start"], x["seconds"]) > 0 and x["repeat"] == 1 for x in rows)


def test_the_table_and_the_figure_of_what_was_measured(tmp_path):
    own = {"game": "Doors", "way": "gymnax scan", "num_envs": 1024}
    rows = [own | {"seconds": x, "start": x + 1} for x in (1.0, 2.0, 4.0)]
    rows.append(rows[0] | {"way": "sync", "num_envs": 64})
    lines = map(json.dumps, ({"num_steps": 512}, *rows))
    (tmp_path / "measured.jsonl").write_text("\n".join(lines))
    cells = vectorization.table(tmp_path / "measured.jsonl").cells
    assert cells.to_dict("split")["data"] == [
        ["Doors", "sync", "1.00", "-", "-"],
        ["Doors", "gymnax scan", "-", "2.0 [0.4, 11.2]", "3.00"],
    ]  # 4.3027 log 2 / sqrt 3 to both sides
    vectorization.update(tmp_path, tmp_path)
    assert (tmp_path / "vectorization.png").read_bytes().startswith(PNG)


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
    assert result["versions"]["jax"] == jax.__version__

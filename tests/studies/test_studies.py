"""Tables, figures and measurements in studies.

test_docs.py compares the tables of the committed studies with their pages. These tests cover cases
that do not occur there.
"""

import importlib
import json
import time
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import gymnasium
import jax
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT

import ppo_linen
from analysis import tables
from analysis.runs import load, save
from analysis.schema import SourceError
from studies.agents import study as agents
from studies.brax import study as brax
from studies.control import study as control
from studies.devices import study as devices
from studies.doors import study as doors
from studies.gpu import study as gpu
from studies.gpu import throughput
from studies.limits import measure as limits_measure
from studies.limits import study as limits
from studies.minatar import study as minatar
from studies.simulators import steps as robot_steps
from studies.simulators import study as simulators
from studies.threads import study as threads
from studies.vectorization import step
from studies.vectorization.others import OtherVecEnv

PNG = b"\x89PNG"


@pytest.mark.parametrize(
    "name",
    ["agents", "control", "doors", "gpu", "limits", "recurrent", "peers", "simulators", "tuning"],
)
def test_the_figures_of_a_study_are_drawn(name, tmp_path):
    study = importlib.import_module(f"studies.{name}.study")
    study.update(ROOT / "studies" / name, tmp_path)
    paths = list(tmp_path.iterdir())
    assert paths
    for path in paths:
        assert path.read_bytes().startswith(PNG)
        assert (ROOT / "studies" / name / path.name).exists()


# === Agents =====================================================================================
def test_a_group_with_a_failed_process_is_left_out(tmp_path):
    data = load(ROOT / "studies/agents")
    runs = data.runs
    beside = runs.index[runs["mode"].str.endswith(agents.BESIDE)]
    assert len(agents.programs(runs.drop(beside[0]))) == len(agents.programs(runs)) - 1
    save(data._replace(runs=runs[runs["mode"] == "ppo_linen"]), tmp_path)
    with pytest.raises(SourceError, match="no run trained many agents in one program"):
        agents.costs(tmp_path)


# === Races ======================================================================================
def listed_race(path, name, steps=(), /, **seconds):
    """Append a race of ten rounds to a file. Steps and seconds are per progress line."""
    info = {"programs": list(seconds), "discarded": 0, "args": {}, "listed": {"name": name}}
    info["steps"] = list(steps)
    lines: list[Any] = [info]
    for turn, (program, each) in product(range(10), enumerate(seconds.values())):
        speed = 1 + turn  # the machine slows down over time
        row = {"turn": turn, "program": program, "iterations": 2, "seconds": 2 * each * speed}
        lines.append(row)
    with open(path, "a") as file:
        file.write("".join(json.dumps(x) + "\n" for x in lines))
    return path


def test_tables_of_a_race(tmp_path):
    path = listed_race(tmp_path / "races.jsonl", "one, small", a=9.0, b=9.0)
    listed_race(path, "one, small", a=0.002, b=0.004)  # replaces the race of the same name
    listed_race(path, "one, large", a=0.2, c=0.1)
    listed_race(path, "two", a=1.0, b=1.0)
    assert tables.race_table(path, "one, small").cells.to_numpy().tolist() == [
        ["a", "11.0", "1.00×"],
        ["b", "22.0", "2.00× [2.00, 2.00]"],
    ]
    over = tables.race_table(path, "one, small", "b").cells.iloc[:, -1]
    assert over.tolist() == ["0.500× [0.500, 0.500]", "1.00×"]
    with pytest.raises(SourceError, match="no race 'three'"):
        tables.race_table(path, "three")


def test_programs_are_compared_per_step_if_their_lines_cover_different_steps(tmp_path):
    path = listed_race(tmp_path / "races.jsonl", "PPO", [2048] * 2, Linen=0.2048, CleanRL=0.4096)
    lean = {"Linen": 0.2048, "LeanRL": 6.144, "LeanRL, compiled": 2.048}
    lean = {x: 2 * y for x, y in lean.items()}
    listed_race(path, "PPO beside LeanRL", [2048, 20480, 20480], **lean)
    listed_race(path, "PPO beside rlox and RLtools", [2048] * 2, Linen=0.1, rlox=0.4)
    found = control.costs(path, "PPO").set_index("program")
    assert found["estimate"].round(6).to_dict() == {
        "Linen": 1,
        "CleanRL": 2,
        "LeanRL": 3,
        "LeanRL, compiled": 1,
        "rlox": 4,
    }
    assert found["step"]["LeanRL"] == pytest.approx(1e6 * 5.5 * 3 * 0.2048 / 2048)


def test_simulators_are_compared_with_the_same_vectorization(tmp_path):
    seconds = {"Linen": 1.0, "PyTorch": 1.2, "compiled PyTorch": 1.1}
    for name in list(seconds):
        seconds[f"{name}, async"] = 0.5 if name == "Linen" else 1.0
    path = listed_race(tmp_path / "races.jsonl", "waits 3000 µs", **seconds)
    listed_race(path, "SAC, computes 0 µs", Linen=1.0, PyTorch=2.0)
    (row,) = simulators.ppo_table(path).cells.to_dict("records")
    assert row["environment step"] == "waits 3,000 µs"
    assert row["PyTorch, sync / Linen"] == "1.20× [1.20, 1.20]"
    assert row["PyTorch, async / Linen"] == "2.00× [2.00, 2.00]"
    (row,) = simulators.async_table(path).cells.to_dict("records")
    assert [row["Linen"], row["PyTorch"]] == ["2.00× [2.00, 2.00]", "1.20× [1.20, 1.20]"]
    assert row["Linen, sync (steps/s)"] == "46.5"  # 256 steps in 5.5 s
    (row,) = simulators.sac_table(path).cells.to_dict("records")
    assert row["PyTorch / Linen"] == "2.00× [2.00, 2.00]"


# === Simulators =================================================================================
def test_slow_environments_take_the_time_in_their_name():
    """Subtract the step time of Slow0; use the fastest step, because other load adds time."""

    def shortest_step(name, steps):
        env = gymnasium.make(f"studies.simulators.slow:{name}").unwrapped
        obs, _ = env.reset(seed=1)
        assert obs.shape == (17,)
        action = env.action_space.sample()
        assert action.shape == (6,)
        found = []
        for _ in range(steps):
            start = time.perf_counter()
            env.step(action)
            found.append(time.perf_counter() - start)
        return min(found) * 1e6

    free = shortest_step("Slow0-v0", 1_000)
    for name, microseconds in (
        ("Slow300-v0", 300),
        ("Slow10000-v0", 10_000),
        ("Sleep3000-v0", 3_000),
    ):
        costs = shortest_step(name, 30) - free
        assert costs == pytest.approx(microseconds, rel=0.1)


def test_the_step_time_of_a_robot_is_the_median_over_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr(robot_steps, "STEPS", 250)  # an episode of Pendulum has 200
    assert 1 < robot_steps.measure("Pendulum-v1", 1) < 10_000
    rows = [
        {"env_id": x, "microseconds": y} for x, y in [("b", 30), ("a", 9), ("b", 10), ("b", 20)]
    ]
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert simulators.steps_table(path).cells.to_numpy().tolist() == [["a", "9.00"], ["b", "20.0"]]


# === GPU ========================================================================================
def write_race(path, programs, *rounds, steps=()):
    """Append a race to a file. A round lists the seconds per iteration; round 0 is discarded."""
    lines: list[dict[str, Any]] = [
        {"programs": [f"short {x}" for x in programs], "discarded": 1, "steps": steps},
    ]
    lines[0]["args"] = {"programs": programs}
    for turn, seconds in enumerate(rounds):
        for program, each in enumerate(seconds):
            row = {"turn": turn, "program": program, "iterations": 2, "seconds": 2 * each}
            lines.append(row)
    with open(path, "a") as file:
        file.write("".join(json.dumps(x) + "\n" for x in lines))
    return path


def test_races_of_the_same_programs_are_pooled(tmp_path):
    """Ratios are computed within a round. Here, both programs are slow in the same rounds."""
    path = tmp_path / "races.jsonl"
    pair = ["a.py", "b.py --env-id X"]
    write_race(path, ["a.py", "other.py"], (1.0, 1.0))
    write_race(path, pair, (9.0, 1.0), (1.0, 2.0), (4.0, 8.0), (2.0, 4.0))
    write_race(path, pair, (9.0, 1.0), (1.0, 3.0), (1.0, 2.0), (8.0, 16.0))
    times = gpu.Times(path)
    assert times.ratio(pair[1], "a.py") == pytest.approx((2, 2, 3))
    assert times.milliseconds("a.py") == 1500
    assert np.isnan(times.ratio("other.py", pair[1])).all()
    assert (times.called("b.py"), times.called("c.py")) == (pair[1], None)


def test_throughput_is_the_median_over_rounds(tmp_path):
    """A program that failed is left out."""
    programs = ["ppo_linen.py --env-id X --num-envs 32", "more/ppo_nnx.py --num-envs 4 --env-id Y"]
    path = write_race(
        tmp_path / "races.jsonl",
        [*programs, "ppo_torch.py --env-id X --num-envs 32"],
        *[(9.0, 9.0), (1.0, 0.5), (2.0, 0.5), (4.0, 0.5)],
        steps=[64, 8, None],
    )
    frame = throughput.read([path])
    columns = ["panel", "mode", "x", "estimate"]
    assert frame[columns].to_numpy().tolist() == [["X", "Linen", 32, 32], ["Y", "NNX", 4, 16]]
    throughput.main([path], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


# === Doors ======================================================================================
def test_doors_runs_are_gathered_and_drawn(tmp_path, capsys):
    for name in ("a", "unfinished", "resumed"):
        run = tmp_path / f"doors-64__{name}"
        run.mkdir()
        line = {"global_step": 10, "solved": 225, "steps": 9, "optimal": 9, "seconds": 1.23456}
        lines = [json.dumps(line | {"iteration": x}) for x in (2, 5)]
        (run / "layouts.jsonl").write_text("\n".join(lines))
        seconds = (9.0, 1.0, 2.0, 7.0, 3.0)  # iterations 0 to 4
        log = [json.dumps({"iteration": i, "time/iteration": x}) for i, x in enumerate(seconds)]
        (run / "metrics.jsonl").write_text("\n".join(log))
        info: dict[str, Any] = {"script": "dqn_linen", "args": {"seed": 1}}
        info["status"] = "running" if name == "unfinished" else "completed"
        info["resumed"] = [40] if name == "resumed" else []
        (run / "run.json").write_text(json.dumps(info))
    doors.update(tmp_path, tmp_path)
    assert "resumed ignored: it was resumed" in capsys.readouterr().err
    found = pd.read_csv(tmp_path / "layouts.csv")
    assert found["run"].tolist() == ["doors-64__a"] * 2
    assert found["iteration_seconds"].tolist() == [5, 3]
    columns = ["cell", "script", "seed", "global_step", "seconds"]
    assert found.loc[0, columns].tolist() == ["doors-64", "dqn_linen", 1, 10, 1.2346]
    assert (tmp_path / "layouts.png").read_bytes().startswith(PNG)


# === Vectorization ==============================================================================
@pytest.mark.parametrize("way", [x for x in step.WAYS if x != "envpool"])
def test_every_way_of_stepping_continues_after_episodes_end(way):
    actions = np.zeros((300, 2), np.int32)  # always push left, so that episodes end
    make = step.in_gymnax if way.startswith("gymnax") else step.in_gymnasium
    run = make(way, 2, actions)
    run()
    run()


@pytest.mark.parametrize("how", ["vector", "envpool"])
def test_other_vector_environments_restart_only_finished_episodes(how):
    """Each step equals a step of Gymnasium's CartPole from the same state."""
    if how == "envpool":
        pytest.importorskip("envpool")
    env, ends = OtherVecEnv(how, 4, seed=1), 0
    alone: Any = gymnasium.make("CartPole-v1")
    obs, rng = env.reset(), np.random.default_rng(1)
    for action in rng.integers(0, 2, (200, 4)):
        before = obs
        obs, result = env.step(action)
        for i in range(4):
            alone.reset()
            alone.unwrapped.state = before[i]
            next_obs, _, terminated, _, _ = alone.step(int(action[i]))
            np.testing.assert_allclose(result["next_obs"][i], next_obs, atol=1e-5)
            assert result["terminated"][i] == terminated
            if terminated:
                assert (abs(obs[i]) <= 0.05).all() and (obs[i] != next_obs).all()
            else:
                np.testing.assert_array_equal(obs[i], result["next_obs"][i])
            ends += terminated
    assert ends > 20


# === Limits =====================================================================================
def test_matrix_products_match_a_training_step_in_both_frameworks():
    args = ppo_linen.Args(hidden_sizes=(3,), num_envs=2, num_steps=4, num_minibatches=2)
    layers = limits_measure.make_layers(args, SimpleNamespace(obs_shape=(2,), num_actions=5))
    assert [x.shape for layer in layers[:2] for x in layer] == [
        *((4, 2), (2, 3), (4, 3)),
        *((4, 3), (3, 5), (4, 5)),
    ]
    expected = limits_measure.products(layers, obs_dim=2)
    assert [x.shape for x in expected] == [
        *((4, 3), (2, 3), (4, 5), (3, 5), (4, 3)),
        *((4, 3), (2, 3), (4, 1), (3, 1), (4, 3)),
    ]
    in_xla = limits_measure.repeat_in_xla(partial(limits_measure.products, obs_dim=2), steps=3)
    tensors = [tuple(map(torch.from_numpy, layer)) for layer in layers]
    for found in (in_xla(layers), limits_measure.products(tensors, obs_dim=2)):
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5)


def test_the_rest_of_an_update_and_its_ratio_to_the_products(tmp_path):
    seconds = {"update": 10.0, "products": 4.0, "tanh": 1.0, "gathers": 1.0, "values": 1.0}
    rows = []
    for script, factor in {"ppo_linen": 1, "ppo_torch": 2}.items():
        cell = {"script": script, "size": "small", "cores": 2}
        for process, (part, x) in product([0, 1], seconds.items()):
            rows.append(cell | {"process": process, "part": part, "seconds": factor * x})
    path = tmp_path / "measured.jsonl"
    path.write_text("\n".join(json.dumps(x) for x in [{"versions": {}}, *rows]))
    assert limits.read(path)["rest"].tolist() == [3, 3, 6, 6]
    [shown] = limits.floors(path).cells.to_numpy().tolist()
    assert shown == ["small, 2", "2.25× [2.25, 2.25]", "4.50× [4.50, 4.50]"]


# === MinAtar ====================================================================================
def test_the_parts_of_a_frame_are_paired_by_seed(tmp_path):
    data = load(ROOT / "studies/minatar/speed")
    runs = data.runs.assign(steady=data.runs["seed"] * 5.0)  # 1 to 4 ms per frame
    runs.loc[runs["mode"] != minatar.JAX, "steady"] *= 2
    save(data._replace(runs=runs), tmp_path)
    lines = [{"seed": x, "ms_per_learning_frame": 4 * x} for x in runs["seed"].unique().tolist()]
    (tmp_path / "example.jsonl").write_text("\n".join(map(json.dumps, lines)))
    parts = minatar.frames(tmp_path).frame.set_index("way")
    found = parts.loc[["PyTorch with Gymnasium", "MinAtar's example"], ["low", "high"]]
    np.testing.assert_allclose(found, [[0.5, 0.5], [0.25, 0.25]])


# === Devices ====================================================================================
def test_brax_compares_pairs_within_a_round(tmp_path):
    """The runs of a pair are consecutive, because the speed of the machine varies over time."""
    path = tmp_path / "many.jsonl"
    lines = []
    for speed in (1, 2, 3):
        lines.append({"cpu": "Fast", "cores": 2})
        for num_envs, ours, others in ((64, 600, 300), (2_048, 700, 1_400)):
            for script, steps in (("ppo_continuous_linen", ours), ("brax_ppo", others)):
                row: dict[str, Any] = {"script": script, "num_envs": num_envs, "cpu_seconds": 9}
                row |= {"env_id": "envs.brax:HalfCheetahSpring", "start_seconds": 24.7}
                lines.append(row | {"steps_per_second": steps * speed})
    path.write_text("\n".join(map(json.dumps, lines)))
    cells = brax.many_table(path).cells
    assert list(cells["ours / library"]) == ["2.00× [2.00, 2.00]", "0.500× [0.500, 0.500]"]
    assert list(cells["our script (steps/s)"]) == ["1,200", "1,400"]
    assert list(cells["environments"]) == ["64", "2,048"]
    assert brax.speed_table(path).cells.iloc[-1].to_list() == [
        "brax:HalfCheetahSpring",
        "2,048",
        "24.7",
        "4,200",
    ]
    said = brax.gain(path).text
    assert "script by 1.17 [1.17, 1.17]" in said
    assert said.endswith("brax by 4.67 [4.67, 4.67].")


def test_the_gain_from_two_devices_and_the_estimate_for_two_gpus(tmp_path):
    seconds = {"Linen, one": 0.8, "Linen, two": 0.4, "PyTorch, one": 1.0, "PyTorch, two": 1.0}
    path = tmp_path / "races.jsonl"
    for network in devices.NETWORKS:
        listed_race(path, network, **seconds)
    gain = devices.gain_table(path)
    assert gain.cells["two / one"].tolist() == ["0.500× [0.500, 0.500]", "1.00× [1.00, 1.00]"] * 2
    estimate = devices.estimate_table(path).frame.set_index("network")
    size = ppo_linen.Args(hidden_sizes=devices.NETWORKS["3 x 256"])
    env = ppo_linen.VecEnv(size.env_id, 1)
    key = jax.random.PRNGKey(0)
    params = ppo_linen.make_agent(size, env.obs_shape, env.num_actions, key).params
    assert estimate["bytes"]["3 x 256"] == sum(x.nbytes for x in jax.tree.leaves(params))
    reduce = 20e-6 + estimate["bytes"] / 100e9
    np.testing.assert_allclose(estimate["least"], 2e6 * reduce)
    assert estimate["step"]["3 x 256"] == pytest.approx(5.5e6 * 0.8 / 80)


def test_one_thread_beside_two(tmp_path):
    path = tmp_path / "races.jsonl"
    listed_race(path, "torch", **{threads.ONE: 2.0, threads.TWO: 1.0, "Linen": 0.5})
    listed_race(path, "jax", **{threads.WITHOUT: 1.0, threads.WITH: 4.0})
    (tmp_path / "busy").mkdir()
    busy = tmp_path / "busy/races.jsonl"
    listed_race(busy, "torch", **{threads.ONE: 1.0, threads.TWO: 3.0})
    listed_race(busy, "jax", **{threads.WITHOUT: 1.0, threads.WITH: 2.0})
    [row] = threads.torch_table(path).cells.to_dict("records")
    ratios = list(row.values())
    assert ratios == ["torch", "5,500", "2.00× [2.00, 2.00]", "0.333× [0.333, 0.333]"]
    [row] = threads.linen_table(path).cells.to_dict("records")
    assert list(row.values()) == ["torch", "4.00× [4.00, 4.00]", "2.00× [2.00, 2.00]"]
    [row] = threads.jax_table(path).cells.to_dict("records")
    ratios = list(row.values())
    assert ratios == ["jax", "22,000", "0.250× [0.250, 0.250]", "0.500× [0.500, 0.500]"]


def test_tune_with_one_thread_is_compared_with_two(tmp_path):
    path = tmp_path / "tuning.jsonl"
    rows = [{"threads": x, "seconds": 50.0 * x} for _ in range(3) for x in (1, 2)]
    path.write_text("\n".join(map(json.dumps, [{}, *rows])))
    [row] = threads.tuning_table(path).cells.to_numpy().tolist()
    assert row[:2] == ["3", "100"] and row[2].startswith("0.500×")

"""The studies' own tables, figures and measurements.

The tables of the committed studies stand in their pages, and test_docs compares each number with
what the code gives. Here is what those studies do not have.
"""

import importlib
import json
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
from analysis.runs import load, save
from analysis.schema import SourceError
from studies.agents import study as agents
from studies.brax import study as brax
from studies.control import cost
from studies.control import study as control
from studies.devices import measure as devices_measure
from studies.devices import study as devices
from studies.doors import study as doors
from studies.gpu import study as gpu
from studies.limits import measure as limits_measure
from studies.limits import study as limits
from studies.minatar import study as minatar
from studies.vectorization import measure
from studies.vectorization.others import OtherVecEnv

PNG = b"\x89PNG"


@pytest.mark.parametrize(
    "name",
    ["agents", "control", "doors", "gpu", "limits", "memory", "peers", "tuning", "vectorization"],
)
def test_a_studys_figures_are_drawn(name, tmp_path):
    study = importlib.import_module(f"studies.{name}.study")
    study.update(ROOT / "studies" / name, tmp_path)
    paths = list(tmp_path.iterdir())
    assert paths
    for path in paths:
        assert path.read_bytes().startswith(PNG)
        assert (ROOT / "studies" / name / path.name).exists()


# === Agents =====================================================================================
def test_a_group_of_which_one_process_failed_is_left_out(tmp_path):
    data = load(ROOT / "studies/agents")
    runs = data.runs
    beside = runs.index[runs["mode"].str.endswith(agents.BESIDE)]
    assert len(agents.programs(runs.drop(beside[0]))) == len(agents.programs(runs)) - 1
    save(data._replace(runs=runs[runs["mode"] == "ppo_linen"]), tmp_path)
    with pytest.raises(SourceError, match="no run is of a program of many agents"):
        agents.costs(tmp_path)


# === Control ====================================================================================
def made_up_costs(path):
    """Rounds that are slower for all alike, which changes no ratio; sbx has two of them."""
    seconds = {
        "PPO, small": {"linen_gymnasium": 0.5, "sb3": 2, "sbx": 1},
        cost.SAC: {"linen_gymnasium": 0.01, "sb3": 0.02, "torch_gymnasium": 0.01},
    }
    rows: list[dict[str, Any]] = []
    for round_number, slowness in enumerate([1, 2, 4]):
        for setting, scripts in seconds.items():
            for script, each in scripts.items():
                row: dict[str, Any] = {"round": round_number, "setting": setting}
                row["script"] = script
                own = (0.8, 1.6, 3.2)[round_number] if script == "torch_gymnasium" else 1.0
                row |= {"cpu_each": each * slowness * own, "cpu_start": 3 * slowness}
                if (script, round_number) != ("sbx", 2):
                    rows.append(row)
    path.write_text("".join(json.dumps(x) + "\n" for x in rows))
    return path


def test_costs_are_ratios_within_a_round(tmp_path):
    """The seconds are of Linen's rounds: those of sbx, too, which lacks the slowest one."""
    path = made_up_costs(tmp_path / "cost.jsonl")
    assert control.ppo_costs(path).cells.to_numpy().tolist() == [
        ["PPO, small", "linen_gymnasium", "6.00", "3", "1.00", "1.00", "0.250 [0.250, 0.250]"],
        ["PPO, small", "sb3", "6.00", "3", "4.00", "4.00 [4.00, 4.00]", "1.00"],
        ["PPO, small", "sbx", "4.50", "2", "2.00", "2.00", "0.500"],
    ]
    sac = control.sac_costs(path).cells.to_numpy().tolist()
    assert sac[0][:5] == ["linen_gymnasium", "6.00", "3", "20.0", "1.00"]
    assert [x[0] for x in sac] == ["linen_gymnasium", "torch_gymnasium", "sb3"]  # as in cost.py


def test_a_target_is_met_or_missed_by_its_interval_alone(tmp_path):
    cells = control.target_table(made_up_costs(tmp_path / "cost.jsonl")).cells
    found = {
        tuple(x) for x in cells[["script", "times as long as", "the interval says"]].to_numpy()
    }
    assert found == {
        ("linen_gymnasium", "sb3", "met"),
        ("torch_gymnasium", "sb3", "undecided"),
    }


# === GPU ========================================================================================
def made_up_race(path, programs, *rounds):
    """Seconds of an iteration of each program, in each round; the first round does not count."""
    lines: list[dict[str, Any]] = [
        {"programs": [f"short {x}" for x in programs], "thrown_away": 1},
    ]
    lines[0]["args"] = {"programs": programs}
    for turn, seconds in enumerate(rounds):
        for program, each in enumerate(seconds):
            row = {"turn": turn, "program": program, "iterations": 2, "seconds": 2 * each}
            lines.append(row)
    with open(path, "a") as file:
        file.write("".join(json.dumps(x) + "\n" for x in lines))
    return path


def test_races_of_the_same_programs_are_one(tmp_path):
    """The pair of a ratio is of one turn: here both programs are slow in the same ones."""
    path = tmp_path / "races.jsonl"
    pair = ["a.py", "b.py --env-id X"]
    made_up_race(path, ["a.py", "other.py"], (1.0, 1.0))
    made_up_race(path, pair, (9.0, 1.0), (1.0, 2.0), (4.0, 8.0), (2.0, 4.0))
    made_up_race(path, pair, (9.0, 1.0), (1.0, 3.0), (1.0, 2.0), (8.0, 16.0))
    times = gpu.Times(path)
    assert times.ratio(pair[1], "a.py") == pytest.approx((2, 2, 3))
    assert times.milliseconds("a.py") == 1500
    assert np.isnan(times.ratio("other.py", pair[1])).all()
    assert (times.called("b.py"), times.called("c.py")) == (pair[1], None)


@pytest.mark.parametrize(
    ("direction", "said"),
    [("at most", ["met", "undecided", "missed"]), ("at least", ["missed", "undecided", "met"])],
)
def test_a_gpus_target_is_met_or_missed_by_its_interval_alone(direction, said):
    rows = [{"low": x, "high": x + 0.5, "target": 2, "direction": direction} for x in (1, 1.8, 2.1)]
    assert [gpu.verdict(pd.Series(row)) for row in rows] == said


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
        info: dict[str, Any] = {"script": "dqn_linen", "args": {"seed": 1}}
        info["status"] = "running" if name == "unfinished" else "completed"
        info["resumed"] = [40] if name == "resumed" else []
        (run / "run.json").write_text(json.dumps(info))
    doors.update(tmp_path, tmp_path)
    assert "resumed went on without evaluation" in capsys.readouterr().err
    found = pd.read_csv(tmp_path / "layouts.csv")
    assert found["run"].tolist() == ["doors-64__a"] * 2
    assert found["iteration_seconds"].tolist() == [5, 3]
    columns = ["cell", "script", "seed", "global_step", "seconds"]
    assert found.loc[0, columns].tolist() == ["doors-64", "dqn_linen", 1, 10, 1.2346]
    assert (tmp_path / "layouts.png").read_bytes().startswith(PNG)


# === Vectorization ==============================================================================
def test_every_way_is_measured_one_in_a_process_of_its_own(monkeypatch):
    ways = [("CartPole-v1", "async"), ("Doors", "gymnax scan")]
    monkeypatch.setattr(measure, "cells", lambda: ways)
    rows = list(measure.race([1, 65], 3, 1))
    found = sorted((x["game"], x["way"], x["num_envs"]) for x in rows)
    assert found == [(*ways[0], 1), (*ways[1], 1), (*ways[1], 65)]  # 65 processes are too many
    assert all(min(x["start"], x["seconds"]) > 0 and x["repeat"] == 1 for x in rows)


@pytest.mark.parametrize("how", measure.ONLY_CARTPOLE)
def test_what_steps_cartpole_in_its_own_way_restarts_those_that_ended_alone(how):
    """Each step is that of Gymnasium's CartPole, put where it was."""
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
def test_the_products_are_those_of_a_step_in_both_frameworks():
    args = ppo_linen.Args(hidden_sizes=(3,), num_envs=2, num_steps=4, num_minibatches=2)
    layers = limits_measure.make_layers(args, SimpleNamespace(obs_dim=2, num_actions=5))
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


def test_the_rest_of_an_update_and_its_times_over_the_products(tmp_path):
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
    assert shown == ["small, 2", "2.25 [2.25, 2.25]", "4.50 [4.50, 4.50]"]


# === MinAtar ====================================================================================
def test_a_part_of_a_frame_is_paired_by_seed(tmp_path):
    data = load(ROOT / "studies/minatar/speed")
    runs = data.runs.assign(steady=data.runs["seed"] * 5.0)  # a millisecond a frame, or twice that
    runs.loc[runs["mode"] != minatar.JAX, "steady"] *= 2
    save(data._replace(runs=runs), tmp_path)
    lines = [{"seed": x, "ms_per_learning_frame": 4 * x} for x in runs["seed"].unique().tolist()]
    (tmp_path / "example.jsonl").write_text("\n".join(map(json.dumps, lines)))
    parts = minatar.frames(tmp_path).frame.set_index("way")
    found = parts.loc[["PyTorch on Gymnasium's copy", "MinAtar's own example"], ["low", "high"]]
    np.testing.assert_allclose(found, [[0.5, 0.5], [0.25, 0.25]])


# === Devices ====================================================================================
def test_brax_compares_pairs_within_a_round(tmp_path):
    """Each round on a machine of another speed; the pair is what ran one after the other."""
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
    assert list(cells["ours, times as many"]) == ["2.00 [2.00, 2.00]", "0.500 [0.500, 0.500]"]
    assert list(cells["our script (steps/s)"]) == ["1,200", "1,400"]
    assert list(cells["environments"]) == ["64", "2,048"]
    assert brax.speed_table(path).cells.iloc[-1].to_list() == [
        "brax:HalfCheetahSpring",
        "2,048",
        "24.7",
        "4,200",
    ]
    said = brax.gain(path).text
    assert "With 2,048 environments our script trains 1.17 [1.17, 1.17] times" in said
    assert said.endswith("as with 64, and brax's agent 4.67 [4.67, 4.67] times as many.")


def test_two_devices_beside_one_and_the_step_from_which_two_gpus_gain(tmp_path):
    networks = devices_measure.NETWORKS
    scripts = devices_measure.SCRIPTS
    rows = []
    for network, script, count, k in product(networks, scripts, (1, 2), range(3)):
        row = {"round": k, "network": network, "script": script, "devices": count}
        row["iteration"] = (1 + k) * (0.8 if count == 1 else 0.6)  # rounds are paired
        row |= {"minibatches": 80, "gradient_bytes": devices_measure.gradient_bytes(network)}
        rows.append(row)
    rows.append(rows[0] | {"round": 3, "iteration": 99})  # cut off before its partner
    path = tmp_path / "measured.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    gain = devices.gain_table(path)
    assert len(gain.frame) == 4 and set(gain.frame["rounds"]) == {3}
    assert set(gain.cells["times one"]) == {"0.7500 [0.7500, 0.7500]"}
    estimate = devices.estimate_table(path).frame.set_index("network")
    size = ppo_linen.Args(hidden_sizes=networks["3 x 256"])
    env = ppo_linen.VecEnv(size.env_id, 1)
    key = jax.random.PRNGKey(0)
    params = ppo_linen.make_agent(size, env.obs_shape, env.num_actions, key).params
    assert estimate["gradient_bytes"]["3 x 256"] == sum(x.nbytes for x in jax.tree.leaves(params))
    reduce = 20e-6 + estimate["gradient_bytes"] / 100e9
    np.testing.assert_allclose(estimate["least"], 2 * reduce)
    assert estimate["step"]["3 x 256"] == pytest.approx(1.6 / 80)

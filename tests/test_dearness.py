"""studies/control: what is left of the difference where a step of the environment costs more."""

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium
import pandas as pd
import pytest
from conftest import ROOT

from studies.brax import measure as brax_measure
from studies.control import dearness, dearness_study, rows, scan, slow, steps, study

OWN = {"linen": 0.1, "torch_compile": 0.15, "torch": 0.4}  # seconds of an iteration


def made_up(path: Path, rounds: int = 3, **changes: float) -> Path:
    """Runs that follow the rule, each round on a machine of another speed; changes are factors."""
    lines = []
    for number in range(rounds):
        for cell in dearness.cells():
            for script in cell.scripts:
                framework = script.removesuffix("_gymnasium").partition("_")[2]
                framework = framework.removeprefix("continuous_")
                own = OWN[framework] * (1 + 0.1 * number)
                steps = dearness.STEPS[cell.algorithm]
                cost = 0.0 if cell.microseconds == dearness.IN_JAX else float(cell.microseconds)
                iteration = own + steps * cost * 1e-6
                iteration *= changes.get(f"{framework}_{cell.microseconds}", 1.0)
                row: dict[str, Any] = {"round": number, "script": script} | cell._asdict()
                del row["scripts"]
                row |= {"steps": steps, "iteration": iteration, "iterations": 13}
                row |= {"rollout": own / 4, "update": own * 3 / 4, "whole": 10 + 13 * iteration}
                row |= {"commit": "abc1234" * 5, "machine": {"cpu": "Fast <b>", "cpus": 2}}
                lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    return path


# === The environment ============================================================================
def test_a_step_takes_as_long_as_its_name_says():
    """On top of a step of Slow0; the least of many, since a busy machine only adds."""

    def least(name, steps):
        env = gymnasium.make(f"studies.control.slow:{name}").unwrapped
        env.reset(seed=1)
        action = env.action_space.sample()
        found = []
        for _ in range(steps):
            start = time.perf_counter()
            env.step(action)
            found.append(time.perf_counter() - start)
        return min(found) * 1e6

    free = least("Slow0-v0", 1_000)
    assert free < 100
    for microseconds in (300, 10_000):
        costs = least(f"Slow{microseconds}-v0", 30) - free
        assert costs == pytest.approx(microseconds, rel=0.1)


def test_its_shapes_are_those_of_the_robot_that_it_stands_for():
    env = gymnasium.make("studies.control.slow:Slow0-v0", microseconds=0)
    obs, _ = env.reset(seed=1)
    assert obs in env.observation_space
    assert env.get_wrapper_attr("spec").max_episode_steps == slow.EPISODE
    after, reward, *_ = env.step(env.action_space.sample())
    assert after in env.observation_space and (after != obs).any() and isinstance(reward, float)


# === The measurement ============================================================================
def test_killed_it_goes_on_with_what_is_missing(tmp_path, monkeypatch, capsys):
    calls = []

    def measure(command, first):
        calls.append(tuple(command))
        return {"iteration": 1.0}

    monkeypatch.setattr(dearness, "measure", measure)
    out = tmp_path / "measured.jsonl"
    monkeypatch.setattr(sys, "argv", ["dearness", "2", "--out", str(out)])
    dearness.main()
    whole = out.read_text()
    all_calls = list(calls)
    assert (
        len(set(all_calls)) * 2
        == len(all_calls)
        == 2 * sum(len(x.scripts) for x in dearness.cells())
    )
    first, second, *_ = whole.splitlines(keepends=True)
    out.write_text(first + second[:-20])  # as a kill may leave it
    calls.clear()
    dearness.main()
    assert calls == all_calls[1:]
    assert [dearness.key_of(json.loads(x)) for x in out.read_text().splitlines()] == [
        dearness.key_of(json.loads(x)) for x in whole.splitlines()
    ]
    monkeypatch.setattr(dearness, "git_commit", lambda path: "another")
    with pytest.raises(SystemExit, match="2"):
        dearness.main()
    assert "begin another --out" in capsys.readouterr().err


def test_what_is_timed_are_the_iterations_after_the_first_ones(monkeypatch):
    monkeypatch.chdir(ROOT)
    _, cell, *_ = dearness.cells()
    command = dearness.command_of(cell, cell.scripts[0])
    first = dearness.FIRST[cell.algorithm]
    steps = int(command[command.index("--total-timesteps") + 1])
    command[-1] = str((first + 1) * dearness.STEPS[cell.algorithm])
    row = dearness.measure(command, first)
    assert row["iterations"] == first + 1 < steps / dearness.STEPS[cell.algorithm]
    assert 0 < row["iteration"] < row["whole"]
    assert row["rollout"] + row["update"] == pytest.approx(row["iteration"])


def test_a_peers_line_is_kept_with_what_it_was_told(tmp_path):
    """Each peer's last line is JSON; the stand-in for uv and the peer says its words in it, too."""
    stand_in = tmp_path / "uv.py"
    stand_in.write_text(
        "import json, sys\nprint('warning')\n"
        "row = {'script': ' '.join(sys.argv[1:]), 'env_id': 'x', 'steps': 7}\n"
        "print(json.dumps(row | {'iteration': 0.5, 'steps_per_second': 14}))\n"
    )
    uv = [sys.executable, str(stand_in)]
    row = scan.run(scan.Program("sac", scan.SMALL, "rejax_sac"), uv)
    assert (row["steps"], row["iteration"]) == (7, 0.5) and row["whole"] > 0
    row = brax_measure.measure_peer([*uv, "ppo"], 256, 2)
    words = "ppo --num-envs 256 --num-steps 32 --iterations 2"
    assert row["script"] == words and row["steps_per_second"] == 14
    for word in ("brax/peers/jax_brax.py", "control/peers/jax_rejax.py"):
        assert (ROOT / "studies" / word).exists()


def test_an_iteration_of_the_scans_has_the_steps_of_the_scripts_defaults():
    for program in scan.programs():
        if program.script.startswith("rejax"):
            continue
        args = import_module(program.script).Args()
        assert args.num_envs * args.num_steps == scan.STEPS[program.algorithm]
        assert args.hidden_sizes == (64, 64)


def test_the_scans_table_compares_within_rounds(tmp_path):
    """Each round on a machine of another speed; one scan takes half and a fifth."""
    path = tmp_path / "scan.jsonl"
    factors = {"sac_linen": 1, "sac_torch": 2, "sac_torch_gymnasium": 5}
    made = []
    for number in range(3):
        for script, factor in factors.items():
            row: dict[str, Any] = {"round": number, "algorithm": "sac", "network": scan.SMALL}
            made.append(row | {"script": script, "steps": 800, "iteration": factor * (1 + number)})
    path.write_text("\n".join(map(json.dumps, made)) + "\n")
    cells = study.scan_table(path).cells.set_index("script")
    ratios = cells["times as long as one scan"]
    assert list(ratios) == ["1.00", "2.00 [2.00, 2.00]", "5.00 [5.00, 5.00]"]
    assert cells.loc["sac_linen", "a step (µs)"] == "2,500"


def test_what_a_step_of_a_robot_takes_is_the_median_of_its_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "STEPS", 250)  # an episode of Pendulum has 200
    assert 1 < steps.measure("Pendulum-v1", 1) < 10_000
    rows = [
        {"env_id": x, "microseconds": y} for x, y in [("b", 30), ("a", 9), ("b", 10), ("b", 20)]
    ]
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert study.steps_table(path).cells.to_numpy().tolist() == [["a", "9.00"], ["b", "20.0"]]


def test_a_measurement_goes_on_from_whole_lines_and_touches_no_other_file(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"round": 0}\n{"round": 1}')
    assert [x["round"] for x in rows.read(path, ("round",))] == [0, 1]
    path.write_text('{"round": 0}\n{"round": 1}\n{"rou')
    assert [x["round"] for x in rows.read(path, ("round",))] == [0, 1]
    assert path.read_text() == '{"round": 0}\n{"round": 1}\n'
    for other in ("my note", '{"a": 1}\nmy note', '{"round": 0}\n{"a": 1}\n', "[]"):
        path.write_text(other)
        with pytest.raises(SystemExit) as end:
            rows.read(path, ("round",))
        assert end.value.code == 2 and "is none of this measurement" in capsys.readouterr().err
        assert path.read_text() == other
    assert rows.read(tmp_path / "none", ("round",)) == []
    where = {"commit": "abc", "machine": {"cpus": 2}}
    assert rows.same_place(where | {"commit": "abc-dirty"}, where)
    assert not rows.same_place(where | {"commit": "abd"}, where)
    assert not rows.same_place(where | {"machine": {"cpus": 4}}, where)


# === What it says ===============================================================================
def test_the_rule_gives_what_was_measured_of_runs_that_follow_it(tmp_path):
    path = made_up(tmp_path / "runs.jsonl")
    cells = dearness_study.ratio_table(path).cells.set_index(["training", "script", "how"])
    small = cells.loc["PPO, 2 x 64", "PyTorch"]
    assert small.loc["measured", "0 µs"] == small.loc["measured", "gymnax"] == "4.00 [4.00, 4.00]"
    # In the middle round the scripts take 0.44 and 0.11 s, and 300 µs are 0.1536 s an iteration.
    assert float(small.loc["measured", "300 µs"].split()[0]) == pytest.approx(2.25, abs=0.01)
    for column in ("30 µs", "300 µs", "10,000 µs"):
        assert small.loc["measured", column].split()[0] == small.loc["by the rule", column]
    assert cells.loc[("SAC, 2 x 256", "compiled PyTorch", "measured"), "0 µs"].startswith("1.50")
    left = dearness_study.left_table(path).cells.set_index("a step of the environment takes")
    costs = ["30 µs", "300 µs", "1,000 µs", "10,000 µs"]
    assert list(left["PPO, PyTorch"]) == list(small.loc["measured", costs])
    found = dearness_study.rule_table(path).cells.set_index(["training", "script"])
    at_300, end = found.loc[("PPO, 2 x 64", "PyTorch")]
    assert at_300 == "2.25 [2.09, 2.42]"
    # An iteration of 512 steps takes 0.4 and 0.1 s of its own, and in later rounds more.
    low, middle, high = ((0.4 - 1.1 * 0.1) / 0.1 / 512 * 1e3 * x for x in (1, 1.1, 1.2))
    assert end == f"{middle:.2f} ({low:.2f} to {high:.2f})"
    assert "at most 0.0%" in dearness_study.error_of_rule(path).text
    own = dearness_study.own_table(path).cells.set_index(["training", "script"])
    assert own.loc[("PPO, 3 x 256", "Linen"), "own time of a step (µs)"] == "214"


def test_what_does_not_follow_the_rule_is_said(tmp_path):
    path = made_up(tmp_path / "runs.jsonl", torch_1000=1.2)
    assert "at most 16.7%" in dearness_study.error_of_rule(path).text


def test_from_when_on_little_is_left():
    torch, linen = pd.Series([500e-6]), pd.Series([100e-6])
    end = dearness_study.left_from(torch, linen, most=1.1)
    assert ((torch + end) / (linen + end)).item() == pytest.approx(1.1)
    assert dearness_study.found_in_rounds(-1, 2, 3) == "-"


def test_a_round_that_is_half_done_and_a_file_that_has_no_rule_are_drawn(tmp_path):
    path = made_up(tmp_path / "runs.jsonl", rounds=1)
    lines = [x for x in path.read_text().splitlines() if '"microseconds": 0' not in x]
    path.write_text("\n".join(lines[:-1]) + "\n")
    assert len(dearness_study.draw(path).axes) == 3
    assert "measured" in set(dearness_study.ratio_table(path).cells["how"])


def test_without_rounds_it_says_how_it_is_called(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dearness"])
    with pytest.raises(SystemExit, match="2"):
        dearness.main()
    assert "rounds" in capsys.readouterr().err

"""The studies' own tables and measurements, from runs and files made by hand."""

import json
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from jax.core import Tracer
from made_up import data_of, grid, only_bench, table
from scipy.stats import gmean

from analysis import __main__, docs
from analysis.checks import problems
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


def updated(source, out, monkeypatch):
    """Run the command that draws a study's figure of other runs."""
    words = ["analysis", "study", *map(str, source), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        __main__.main()
    return end.value.code


# === Agents =====================================================================================
COUNTS = (1, 2, 4, 8)
NOISE = (1.0, 1.1, 0.95)  # of a repeat, the same in all ways: it cancels in ratios


def program(mode, count, repeat, seconds, steady):
    """A row per agent of a program; its first has the durations."""
    first = 1000 * repeat + 1
    settings = f'{{"gamma": 0.99, "num_agents": {count}}}'
    return [
        {"run": f"{mode} {count} {repeat}/seed{first + k}", "mode": mode, "num_agents": count}
        | {"agent": k, "seed": first + k, "repeat": first + k, "settings": settings}
        | {"process": seconds if k == 0 else None, "steady": steady if k == 0 else None}
        for k in range(count)
    ]


def processes(count, repeat, seconds, steady):
    """A row per process; of those side by side, each takes a second less than the one before."""
    first, mode = 1000 * repeat + 1, "ppo_linen" + f", {count} side by side" * (count > 1)
    return [
        {"run": f"{mode} {repeat}/seed{first + k}", "mode": mode, "settings": '{"gamma": 0.99}'}
        | {"seed": first + k, "repeat": first + k, "process": seconds - k, "steady": steady}
        for k in range(count)
    ]


@pytest.fixture
def many(tmp_path):
    """Linen: vmap takes 10 + N seconds, alone 8, two side by side 12; one scan 12 + N."""
    rows = []
    for repeat, noise in enumerate(NOISE):
        for count in COUNTS:
            rows += program("ppo_linen_vmap", count, repeat, noise * (10 + count), 0.1)
            rows += program("one_scan", count, repeat, noise * (12 + count), 0.05)
        rows += processes(1, repeat, noise * 8, 0.04)
        rows += processes(2, repeat, noise * 12, 0.08)
    rng = np.random.default_rng(0)  # a ratio without any spread has no width
    for row in rows:
        row["process"] = row["process"] and row["process"] * np.exp(0.001 * rng.standard_normal())
    common = {"batch_size": 8192.0, "num_iterations": 100.0, "peak_host_bytes": 1e9}
    return table(rows, **common, algorithm="ppo", commit="a" * 40)


def study_of(runs, folder):
    save(data_of(runs), folder / "study")
    return agents.study(folder / "study")


def cell(own, way, count):
    rows = own.summary[(own.summary["way"] == way) & (own.summary["agents"] == count)]
    [row] = rows.to_dict("records")
    return row


def test_what_each_way_of_training_n_agents_costs(many, tmp_path):
    own = study_of(many, tmp_path)
    middle = gmean(NOISE)
    for count in COUNTS:
        vmap = cell(own, agents.VMAP, count)
        assert vmap["seconds"] == pytest.approx(middle * (10 + count), rel=0.01)
        assert vmap["rate"] == pytest.approx(count * 8192 / 0.1)
        assert vmap["after"] == pytest.approx((10 + count) / (8 * count), rel=0.01)
        assert vmap["after_high"] / vmap["after_low"] < 1.05  # the noise of repeats cancels
        after = cell(own, agents.AFTER, count)
        assert after["seconds"] == pytest.approx(middle * 8 * count, rel=0.01)
        assert after["rate"] == pytest.approx(8192 / 0.04)
        assert after["measured"] == (count == 1)
        assert cell(own, agents.SCAN, count)["vmap"] == pytest.approx(
            (12 + count) / (10 + count), rel=0.01
        )
        if count > 1:
            # The last two take as long as the longer of them, those before as long as their mean.
            beside = cell(own, agents.BESIDE, count)
            seconds = [x * 12 + (count / 2 - 1) * (x * 12 - 0.5) for x in NOISE]
            assert beside["seconds"] == pytest.approx(gmean(seconds), rel=0.01)
            assert beside["rate"] == pytest.approx(2 * 8192 / 0.08)
            assert (beside["bytes"], beside["measured"]) == (2e9, count == 2)
    said = " ".join(agents.sentences(own))
    assert "Flax Linen, vmap against ppo_linen one after another: done sooner with N = 2 (" in said
    assert "; done later with N = 1 (1.3" in said
    cells = agents.seconds_table(own).cells
    assert list(cells) == ["framework", "way", *map(str, COUNTS)]
    assert cells["way"].tolist() == list(agents.WAYS)
    assert agents.memory_table(own).cells["8"].tolist() == ["1,000", "1,000", "2,000", "1,000"]


def test_a_group_of_which_one_process_failed_is_left_out(many, tmp_path):
    lacking = many[many["run"] != "ppo_linen, 2 side by side 2/seed2002"]
    costs = study_of(lacking, tmp_path).costs
    assert set(costs.loc[costs["way"] == agents.BESIDE, "repeat"]) == {0, 1}


def test_of_one_repeat_nothing_is_claimed_and_without_a_program_there_is_no_study(many, tmp_path):
    assert agents.sentences(study_of(many[many["seed"] < 1000], tmp_path)) == []
    with pytest.raises(SourceError, match="no run is of a program of many agents"):
        study_of(many[many["mode"] == "ppo_linen"], tmp_path)


def test_of_a_packed_study_the_first_agents_are_enough(many, tmp_path, monkeypatch, capsys):
    data = data_of(many, pd.DataFrame({"run": many["run"], "iteration": 0.0}))
    assert problems(data) == []
    small = of_first_agents(data)
    assert len(small.runs) == len(many)
    assert len(small.iterations) == 3 * (2 * len(COUNTS) + 3)
    save(small, tmp_path / "study")
    assert updated([ROOT / "studies/agents", tmp_path / "study"], tmp_path, monkeypatch) == 0
    assert "done sooner" in capsys.readouterr().out
    assert (tmp_path / "agents.png").read_bytes().startswith(PNG)
    lacking = many[~many["run"].str.startswith("one_scan 4 2/")].reset_index(drop=True)
    assert "one_scan lacks 1 run that others have" in problems(data_of(lacking))


# === Doors ======================================================================================
def rows_of(cell, script, seed, solved, seconds):
    """Rows of a run that was judged after iterations 20, 40, ..., ten steps a layout."""
    own = {"run": f"{cell}__{script}__seed{seed}", "script": script, "cell": cell, "seed": seed}
    return [
        own
        | {"iteration": 20 * (i + 1), "global_step": (i + 1) * 1000, "solved": x, "steps": 10 * x}
        | {"optimal": 10 * x, "seconds": z, "startup": z / 4, "iteration_seconds": z / 10}
        | {"return_per_step": x / 225}
        for i, (x, z) in enumerate(zip(solved, seconds, strict=True))
    ]


def test_what_agents_in_doors_solve_and_when():
    rows = rows_of("doors-64", "dqn_linen", 1, [0, 214, 225], [5, 10, 15])
    rows += rows_of("doors-64", "dqn_linen", 2, [0, 213, 225], [5, 10, 40])
    rows[-1]["steps"] = 2300  # more than the fewest
    rows += rows_of("doors-64", "dqn_torch", 1, [0, 10, 100], [5, 10, 15])
    linen, torch = doors.summary(pd.DataFrame(rows)).to_dict("records")
    assert (linen["seeds"], linen["perfect"], torch["perfect"]) == (2, 1, 0)
    assert linen["over_optimum"] == pytest.approx(4550 / 4500)
    assert (linen["steps_to"], linen["seconds_to"]) == (2500, pytest.approx(25))
    assert np.isnan(linen["seconds_to_low"])  # of two values a median has no interval
    assert torch["solved"] == pytest.approx(100 / 225)
    assert linen["whole"] == pytest.approx(np.sqrt(15 * 40))
    # of the rows after iteration 25 the median: the mean of 1 and 1.5, and of 1 and 4
    assert linen["pace"] == pytest.approx(np.sqrt(1.25 * 2.5))
    cells = doors.seconds_table(pd.DataFrame(rows)).cells
    assert cells["to 95% of the layouts"].tolist() == ["25", "never"]
    cells = doors.learning_table(pd.DataFrame(rows)).cells
    assert cells["perfect"].tolist() == ["1 of 2", "0 of 1"]


def test_a_seed_that_never_gets_there_is_the_latest():
    rows = []
    for seed in range(1, 11):
        rows += rows_of(
            "doors-64", "dqn_linen", seed, [0, 225 if seed < 10 else 100], [5, 10 + seed]
        )
    (row,) = doors.summary(pd.DataFrame(rows)).to_dict("records")
    assert (row["seconds_to"], row["perfect"], row["solved_low"]) == (15.5, 9, 100 / 225)
    assert (row["seconds_to_low"], row["seconds_to_high"]) == (12, 19)


def test_contrasts_pair_runs_of_a_seed_that_differ_in_one_thing():
    """A run takes base * framework * library * number seconds, times a factor of its seed."""
    rows = []
    factors = {"dqn_torch_gymnasium": 6, "dqn_torch": 3, "dqn_linen_gymnasium": 2, "dqn_linen": 1}
    for seed in (1, 2, 3):
        for script, factor in factors.items():
            rows += rows_of("doors-64", script, seed, [0, 225], [1, 40 * factor * seed])
        if seed < 3:
            rows += rows_of("doors-1024", "dqn_linen", seed, [0, 225], [1, 10 * seed**2])
    rows += rows_of("doors-slow_target", "dqn_linen", 1, [0, 225], [1, 7])
    found = doors.contrasts(pd.DataFrame(rows))
    ratios = found[["factor", "whole"]].to_numpy().tolist()
    number = np.sqrt(4 * 2)  # of seeds 1 and 2, which both have
    expected = [["framework", 3], ["framework", 3], ["library", 2], ["library", 2]]
    expected += [["environments", number], ["framework, library, environments", 6 * number]]
    assert [x for x, _ in ratios] == [x for x, _ in expected]
    assert [y for _, y in ratios] == pytest.approx([y for _, y in expected])
    compiled = rows_of("doors-compiled-64", "dqn_torch_gymnasium", 1, [0, 225], [1, 40 * 4])
    more = doors.contrasts(pd.DataFrame(rows + compiled))
    frameworks = more.loc[more["factor"] == "framework", "whole"]
    assert sorted(frameworks.round(6)) == [1.5, 2, 3, 3]  # to and from 4
    assert (
        doors.contrasts_table(pd.DataFrame(rows)).cells["first"].iloc[-1] == "torch, gymnasium, 64"
    )


LINE = {"iteration": 5, "global_step": 10, "solved": 225, "steps": 9, "optimal": 9, "seconds": 1.5}


def judged(folder, lines, complete=True, resumed=()):
    folder.mkdir(exist_ok=True)
    (folder / "layouts.jsonl").write_text(lines)
    row = {"time/iteration": 0.5, "time/elapsed": 1.25}
    log = [
        row | {"charts/episodes": count, "charts/episodic_return": mean} | length
        for count, mean in ((0, None), (1, 5.0), (3, 1.0))
        for length in [{"charts/episodic_length": 10 if count else None}]
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, log)))
    info = {"script": "dqn_linen", "args": {"seed": 1}, "resumed": [*resumed]}
    if complete:
        (folder / "run.json").write_text(json.dumps(info | {"durations": {"imports": 0.5}}))


def test_what_is_gathered_of_doors_and_drawn(tmp_path, monkeypatch, capsys):
    runs, out = tmp_path / "runs", tmp_path / "out"
    runs.mkdir()
    judged(runs / "doors-64__a", json.dumps(LINE) + "\n")
    judged(runs / "doors-64__b", json.dumps(LINE) + "\n", complete=False)
    judged(runs / "doors-64__c", json.dumps(LINE), resumed=[40])
    assert updated([ROOT / "studies/doors", runs], out, monkeypatch) == 0
    assert "c went on without a judge" in capsys.readouterr().err
    [row] = pd.read_csv(out / "layouts.csv").to_dict("records")
    assert (row["run"], row["cell"], row["startup"]) == ("doors-64__a", "doors-64", 1.75)
    assert (row["episodic_return"], row["return_per_step"]) == (2, 0.2)
    assert (out / "layouts.png").read_bytes().startswith(PNG)
    for line in (json.dumps(LINE | {"solved": "many"}), "[" * 100_000, '{"iteration": Infinity}'):
        judged(runs / "doors-64__d", line)
        assert updated([ROOT / "studies/doors", runs], out, monkeypatch) == 2
        assert "doors-64__d is no run of Doors" in capsys.readouterr().err


# === Peers ======================================================================================
MODES = {"ppo_linen": (5.0, 0.06), "ppo_torch": (4.0, 0.3), "sb3": (5.0, 0.35), "sbx": (9.0, 0.2)}


def test_the_peers_table_and_whether_targets_are_met():
    bench = only_bench(grid(MODES, repeats=10, final_return=480.0))
    cells = peers.peer_table(bench).cells.set_index("script")
    assert list(cells.index) == ["ppo_linen", "ppo_torch", "sbx", "sb3"]
    assert cells.loc["sbx", ["iteration (ms)", "as sb3"]].tolist() == [
        "200",
        "0.571 [0.571, 0.571]",
    ]
    assert set(cells["median final return"]) == {"480 [480, 480]"}
    lines = peers.target_lines(bench)
    assert lines[0].startswith(
        "ppo_linen takes 0.1714 [0.1714, 0.1714] of sb3's iteration; the target"
    )
    assert [x.rpartition(" ")[2] for x in lines] == ["missed.", "missed."]
    assert peers.target_lines(only_bench(grid({"sb3": (5.0, 1.0)}))) == []


@pytest.mark.parametrize(
    ("steady", "repeats", "noise", "verdict"),
    [
        (0.1, 5, 0.01, "met"),
        (0.2, 5, 0.01, "missed"),
        (0.135, 5, 0.1, "undecided"),  # met by the mean, and not by the whole interval
        (0.1, 1, 0.0, "left open, with too few repeats for a claim"),
    ],
)
def test_a_target_is_met_or_missed_by_the_whole_interval(steady, repeats, noise, verdict):
    modes = {"ppo_linen": (5.0, steady), "sb3": (5.0, 1.0)}
    [line] = peers.target_lines(only_bench(grid(modes, repeats=repeats, noise=noise)))
    assert line.endswith(f"the target, at most 0.14, is {verdict}.")


# === Tuning =====================================================================================
PART = {"iqm": 15.212, "interval": [15.1, 15.3], "returns": [15.2, 15.224]}
VERDICT = {
    "trials": {"complete": 9, "pruned": 30, "failed": 1},
    **{"best_trial": 17, "value_in_study": 15.5, "own_value_in_study": 10.0},
    "space": {"<b>": "1e-5:1e-2:log", "double_q": "True,False"},
    "own_settings": {"<b>": 0.00025, "double_q": False},
    "best_settings": {"<b>": 0.003296191, "double_q": True},
    **{"best": PART, "own": PART | {"interval": None}, "best_minus_own": PART},
}


def write_verdict(folder, **changes):
    (folder / "one").mkdir(exist_ok=True)
    (folder / "one" / "best.json").write_text(json.dumps(VERDICT | changes))


def test_what_tuning_claimed_and_what_fresh_seeds_give(tmp_path, monkeypatch):
    write_verdict(tmp_path)
    mean = ["15.21 [15.06, 15.36]", "0.02", "15.20", "15.22"]  # 15.212 +- 12.706 * 0.012
    assert tuning.verdict_table(tmp_path).to_numpy().tolist() == [
        ["one", "the script's own", "10.00", "15.21", *mean],
        ["one", "trial 17", "15.50", "15.21 [15.10, 15.30]", *mean],
        ["one", "difference, by seed", "5.50", "15.21 [15.10, 15.30]", *mean],
    ]
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "own_blocks", lambda source: tuning.BLOCKS)
    text = docs.block("settings", "one", None, None)  # a stranger's text, and no markup
    assert r"| \<b\> | 1e-5:1e-2:log | 0.00025 | 0.003296 |" in text
    write_verdict(tmp_path, own_value_in_study=None)  # the script's own were no trial's
    assert list(tuning.verdict_table(tmp_path)["value in the study"]) == ["-", "15.50", "-"]
    tuning.update(tmp_path, tmp_path)
    assert (tmp_path / "fresh_seeds.png").read_bytes().startswith(PNG)
    for changes in ({"best": None}, {"own": PART | {"iqm": float("nan")}}, {"value_in_study": "x"}):
        write_verdict(tmp_path, **changes)
        with pytest.raises(SourceError, match=r"has no best\.json of tune\.py"):
            tuning.verdict_table(tmp_path)


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


def test_every_way_is_measured_one_in_a_process_of_its_own(capfd):
    command = [
        sys.executable,
        "-m",
        "studies.vectorization.measure",
        "--one",
        "CartPole-v1",
        "sync",
    ]
    command += ["--num-envs", "2", "1", "--num-steps", "3"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=100)
    measure.measure("Doors", "gymnax scan", [2], 3)
    rows = [json.loads(x) for x in capfd.readouterr().out.splitlines()]
    assert [(x["way"], x["num_envs"]) for x in rows] == [
        ("sync", 2),
        ("sync", 1),
        ("gymnax scan", 2),
    ]
    assert all(min(x["start"], x["seconds"]) > 0 for x in rows)


def test_ways_take_turns_in_an_order_of_their_own(monkeypatch):
    seen = []

    def run(command, **options):
        words = command[command.index("--one") + 1 :]
        seen.append((words[0], words[1], words[words.index("--num-envs") + 1 :]))
        return SimpleNamespace(stdout="{}\n")

    monkeypatch.setattr(measure.subprocess, "run", run)
    found = list(measure.race([1, 128], 3, 4))
    ways = sorted(measure.cells())
    turns = [[x[:2] for x in seen[i : i + len(ways)]] for i in range(0, len(seen), len(ways))]
    assert all(sorted(turn) == ways for turn in turns)
    assert len(set(map(tuple, turns))) > 1
    assert [x["repeat"] for x in found] == [i for i in range(1, 5) for _ in ways]
    assert {len(sizes) for _, way, sizes in seen if way == "async"} == {1}  # 128 processes are none


def measurements(values, num_envs, way):
    own = {"game": "Doors", "way": way, "num_envs": num_envs}
    return [own | {"seconds": x, "start": x + 1, "repeat": i} for i, x in enumerate(values)]


def test_the_table_and_the_figure_of_what_was_measured(tmp_path, monkeypatch):
    rows = measurements([1.0, 2.0, 4.0], 1024, "gymnax scan") + measurements([1.0], 64, "sync")
    path = tmp_path / "measured.jsonl"

    def write(*lines):
        path.write_text("".join(f"{json.dumps(x)}\n" for x in ({"num_steps": 512}, *lines)))

    write(*rows)
    found = vectorization.table(path)
    assert "512 steps" in found.caption
    assert found.cells.to_dict("split")["data"] == [
        ["Doors", "sync", "-", "1.00", "-", "-", "-"],
        ["Doors", "gymnax scan", "-", "-", "2.0 [0.4, 11.2]", "-", "3.00"],
    ]  # 4.3027 log 2 / sqrt 3 to both sides
    words = [ROOT / "studies/vectorization", tmp_path]
    assert updated(words, tmp_path / "out", monkeypatch) == 0
    assert (tmp_path / "out/vectorization.png").read_bytes().startswith(PNG)
    for name, value in (("game", "Pong"), ("way", "x"), ("num_envs", 0), ("seconds", np.inf)):
        write(*rows, rows[0] | {name: value})
        with pytest.raises(SourceError, match=r"is no file of measure\.py"):
            vectorization.table(path)


# === The environments' step times ===============================================================
def test_play_takes_every_action_as_often_as_it_says():
    env = VecEnv("Acrobot-v1", 64)
    _, state = env.reset(jax.random.key(1))
    seen = []
    step = env.step

    def spy(state, action):
        seen.append(action)
        return step(state, action)

    env.step = spy
    with jax.disable_jit():
        _, state, _ = env_timing.play(jax.random.key(2), state, env, 2)
    played = [x for x in seen if not isinstance(x, Tracer)]
    assert [set(x.tolist()) for x in played] == [{0, 1, 2}] * 2
    assert set(state.episode_length.tolist()) == {2}


def test_step_times_are_summaries_of_what_the_clock_says(monkeypatch):
    """Compiling takes 100 s here, the warm-up 7, and the repetitions 1 to 10 s for 2 steps each."""
    durations = [100.0, 7.0, *np.arange(1.0, 11.0)]
    clock = iter(np.cumsum([x for y in durations for x in (0, y)]))
    monkeypatch.setattr(env_timing.time, "perf_counter", lambda: next(clock))
    row = env_timing.measure("CartPole-v1", num_envs=2, num_steps=2, repeats=10)
    expected = {"trimmed_mean": np.arange(2, 10).mean() / 2, "median": 2.75, "minimum": 0.5}
    expected |= {"spread": (7.75 - 3.25) / 2, "compile": 100.0, "env_id": "CartPole-v1"}
    assert row == pytest.approx(expected)


def test_the_file_of_step_times_says_what_was_measured_and_on_what(tmp_path, capsys):
    out = tmp_path / "times.json"
    flags = ["--env-ids", "CartPole-v1", "--num-envs", "3", "--num-steps", "4", "--repeats", "2"]
    env_timing.main([*flags, "--out", str(out)])
    result = json.loads(out.read_text())
    assert (result["num_envs"], result["num_steps"], result["repeats"]) == (3, 4, 2)
    assert [row["env_id"] for row in result["environments"]] == ["CartPole-v1"]
    assert result["hardware"]["device"] == "cpu"
    assert result["versions"]["jax"] == jax.__version__
    capsys.readouterr()
    for flags in (["--num-envs", "0"], ["--env-ids", "Pendulum-v1"], ["--out", "/no/such/x.json"]):
        with pytest.raises(SystemExit, match="2"):
            env_timing.main(flags)
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert flags[0 if "Pendulum" not in flags[1] else 1] in said

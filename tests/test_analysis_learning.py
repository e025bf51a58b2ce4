"""What agents learned: returns, curves and targets, on made-up runs whose truth is known."""

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fake_runs import results, run_info
from made_up import (
    CACHED,
    COMPILE,
    LINEN,
    NNX,
    TORCH,
    by,
    grid,
    logs,
    only_bench,
    returning,
)
from scipy import stats

from analysis import learning
from analysis.learning import load_environments
from analysis.measures import benches, mode_order
from analysis.runs import LAST_EPISODES, last_return, load
from analysis.schema import SourceError

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

CARTPOLE, MOUNTAIN = "CartPole-v1", "MountainCar-v0"
KNOWN = load_environments()


# === Environments ===============================================================================
def test_every_environment_is_fixed_in_advance_with_a_reason():
    table = pd.read_csv(learning.ENVIRONMENTS)
    assert len(KNOWN) == len(table) == 13
    assert table["reason"].str.contains("Margin: ").all()
    assert (table["margin"] <= 0.15 * (table["reference"] - table["untrained"]).abs()).all()


@pytest.mark.parametrize("margin", ["1", "0", "-1", "1e-320", "1e308", "x", None])
def test_a_file_of_environments_of_ones_own_or_one_sentence(tmp_path, margin):
    path = tmp_path / "mine.csv"
    path.write_text(f"\ufeffenv_id,target{',margin' if margin else ''}\nMine-v0,,{margin}\n")
    if margin == "1":
        [(name, known)] = load_environments(path).items()
        assert (name, known.margin) == ("Mine-v0", 1)
        assert np.isnan(known.target)
    else:
        with pytest.raises(SourceError, match=r"mine\.csv (is not a CSV file with|must have)"):
            load_environments(path)


# === The same numbers ===========================================================================
def modes_with(losses, repeats):
    """Runs of each mode in its repeats, whose losses follow from a number of the mode."""
    frames = [
        grid({mode: (6.0, 0.1)}, repeats=9).query("repeat in @which")
        for mode, which in repeats.items()
    ]
    frame = pd.concat(frames, ignore_index=True)
    return frame, logs(frame, loss=lambda run, i: losses[run["mode"]] / run["repeat"] + i)


def test_modes_that_compute_the_same_are_found_where_only_some_seeds_overlap():
    losses = {LINEN: 1.0, NNX: 2.0, CACHED: 2.0, TORCH: 3.0}
    repeats = {LINEN: [1, 2], NNX: [1, 2, 3], CACHED: [3, 4], TORCH: [1]}
    frame, iterations = modes_with(losses, repeats)
    same = {LINEN: LINEN, NNX: NNX, CACHED: NNX, TORCH: TORCH}
    shuffled = iterations.sample(frac=1, random_state=0)
    shuffled["time/iteration"] = np.arange(len(shuffled)) + 1.0  # no two take equally long
    assert learning.identical(only_bench(frame, shuffled)) == same
    apart = frame[(frame["mode"] != CACHED) | (frame["repeat"] != 3)]
    assert learning.identical(only_bench(apart, iterations))[CACHED] == CACHED
    swapped = learning.identical(only_bench(frame, iterations, baseline=CACHED))
    assert swapped == {CACHED: CACHED, LINEN: LINEN, NNX: CACHED, TORCH: TORCH}
    last = iterations["run"] == frame.loc[frame["mode"] == NNX, "run"].iloc[-1]
    iterations.loc[last & (iterations["iteration"] == 9), "losses/entropy"] += 1e-12
    assert learning.identical(only_bench(frame, iterations))[CACHED] == CACHED


def test_returns_that_all_reach_a_cap_are_no_sign_of_the_same_computation():
    frame = grid({LINEN: (6.0, 0.1), TORCH: (8.0, 2.0)}, (MOUNTAIN,), repeats=2)
    iterations = logs(frame, returns=lambda run, i: -200.0, loss=lambda run, i: np.nan)
    assert learning.identical(only_bench(frame, iterations))[TORCH] == TORCH


# === Returns and their equivalence ==============================================================
def test_returns_are_described_and_tested_against_the_baseline():
    rng = np.random.default_rng(0)
    values: dict[str, Any] = {LINEN: 490 + rng.normal(0, 3, 6), NNX: 491 + rng.normal(0, 3, 6)}
    values |= {COMPILE: 380 + rng.normal(0, 3, 6), TORCH: [500, 500, 500, 500, 400, 500]}
    values |= {CACHED: [490, 490, 490]}
    found = by(learning.returns(only_bench(returning(values)), KNOWN), "mode")
    verdicts = {mode: row["verdict"] for mode, row in found.items()}
    tested = {NNX: "equivalent", COMPILE: "different", TORCH: "undecided"}
    assert verdicts == {LINEN: "", CACHED: "", **tested}
    row, mine = found[COMPILE], np.sort(values[COMPILE])
    assert row["mean"] == pytest.approx(mine.mean())
    assert row["difference"] == pytest.approx(mine.mean() - np.mean(values[LINEN]))
    assert row["difference_high"] < -25
    expected = [mine[2:4].mean(), mine[0], mine[5]]
    assert [row[x] for x in ("median", "low", "high")] == pytest.approx(expected)
    assert (row["runs"], row["margin"]) == (6, 25)
    assert np.isnan([found[LINEN]["difference"], found[CACHED]["low"]]).all()


def test_other_verdicts_say_why_nothing_is_tested():
    alike = returning({LINEN: [-200.0] * 6, TORCH: [-200.0] * 6}, MOUNTAIN)
    unknown = returning({LINEN: range(6), TORCH: range(6)}, "Unknown-v0")
    alone = returning({TORCH: range(6)}, "Acrobot-v1")
    few = returning({LINEN: range(4), TORCH: range(4)}, "Catch")
    frame = pd.concat([alike, unknown, alone, few])
    found = by(learning.returns(only_bench(frame), KNOWN), "env_id", "mode")
    assert found[MOUNTAIN, TORCH]["verdict"] == "all alike"
    assert found["Unknown-v0", TORCH]["verdict"] == "no margin"
    assert found["Acrobot-v1", TORCH]["verdict"] == ""
    assert len(found) == 5  # none of Catch, which has too few runs


def test_a_mode_that_computes_the_same_counts_once_where_both_were_run():
    values = np.linspace(400, 500, 6)
    both = returning({LINEN: values + 1, NNX: values, CACHED: values})
    without = returning({LINEN: -values, CACHED: -values}, "Acrobot-v1")
    frame = pd.concat([both, without], ignore_index=True)
    iterations = logs(frame, loss=lambda run, i: run["final_return"] + i)
    iterations.loc[iterations["run"].isin(without["run"]), "losses/entropy"] *= 2
    found = by(learning.returns(only_bench(frame, iterations), KNOWN), "env_id", "mode")
    assert found[CARTPOLE, CACHED]["verdict"] == "as ppo_nnx"
    assert np.isnan(found[CARTPOLE, CACHED]["difference"])
    assert np.isfinite(found["Acrobot-v1", CACHED]["difference"])


def test_returns_are_of_the_commonest_length_and_of_resumed_runs_too():
    usual = returning({LINEN: np.arange(1.0, 7)}, length=20)
    longer = returning({LINEN: [100.0] * 3}, length=50)
    usual.loc[0, "resumed"] = True
    found = by(learning.returns(only_bench(pd.concat([usual, longer])), KNOWN), "mode")
    assert (found[LINEN]["runs"], found[LINEN]["mean"]) == (6, 3.5)
    assert learning.returns(only_bench(usual.assign(final_return=np.nan)), KNOWN).empty


# === Along the way ==============================================================================
def test_curves_carry_a_return_on_and_begin_with_the_process():
    frame = returning({LINEN: [9.0]})
    seen = {2: 5.0, 7: 9.0}
    iterations = logs(frame, returns=lambda run, i: seen.get(i, np.nan))
    found = learning.curves(only_bench(frame, iterations))
    assert found["return"].tolist() == [5.0] * 5 + [9.0] * 3
    assert found["steps"].tolist() == [100.0 * i for i in range(3, 11)]
    assert found["seconds"].tolist() == pytest.approx([6 + 0.1 * i for i in range(2, 10)])


def test_progress_is_the_mean_over_seeds_with_students_interval():
    frame = returning({LINEN: [0.0] * 4, TORCH: [0.0]})
    values = np.random.default_rng(0).normal(size=(5, 10))
    values[1, 3] = np.nan  # no episode ended: the return of the iteration before goes on
    values[2, 0] = np.nan  # and before the first there is none
    rows = {run: values[i] for i, run in enumerate(frame["run"])}
    iterations = logs(frame, returns=lambda run, i: rows[run["run"]][i])
    found = by(learning.progress(only_bench(frame, iterations)), "mode", "steps")
    values[1, 3] = values[1, 2]
    assert (LINEN, 100) not in found
    for i in range(1, 10):
        row, four = found[LINEN, 100 * (i + 1)], values[:4, i]
        low, high = stats.t.interval(0.95, 3, four.mean(), stats.sem(four))
        assert (row["estimate"], row["low"], row["high"]) == pytest.approx((four.mean(), low, high))
    assert found[TORCH, 100]["estimate"] == pytest.approx(values[4, 0])
    assert np.isnan(found[TORCH, 100]["low"])


def reaching(hits, env=CARTPOLE):
    """Runs of each mode, of which each first has a return of 480 in the iteration given."""
    frame = returning({mode: [0.0] * len(x) for mode, x in hits.items()}, env)

    def value(run, i):
        return 480.0 if i == hits[run["mode"]][int(run["repeat"]) - 1] else 100.0

    return frame, logs(frame, returns=value)


def test_targets_are_first_reached_in_the_median_and_never_is_slower_than_all():
    never = 99
    hits = {LINEN: [4, 2, 7, 9, 3, 5], TORCH: [1, 2, never, never, never], NNX: [never]}
    hits |= {COMPILE: [1, 2, 3, 4, 5, 6, 7, never, never, never]}
    found = by(learning.targets(only_bench(*reaching(hits)), KNOWN), "mode")
    row = found[LINEN]
    assert (row["target"], row["runs"], row["reached"]) == (475, 6, 6)
    ends = 6 + 0.1 * np.array([4.5, 2, 9])  # the median iteration, the first and the last
    assert [row[x] for x in ("estimate", "low", "high")] == pytest.approx(list(ends))
    assert (found[TORCH]["reached"], found[TORCH]["estimate"]) == (2, np.inf)
    assert (found[NNX]["reached"], found[NNX]["estimate"]) == (0, np.inf)
    assert np.isfinite(found[COMPILE]["low"])
    assert np.isinf(found[COMPILE]["high"])


@pytest.mark.parametrize("case", ["never", "no target", "unknown", "no seconds", "resumed", "some"])
def test_there_is_no_time_to_a_target_without_one_or_without_seconds(case):
    env = {"no target": "Asterix-MinAtar", "unknown": "Unknown-v0"}.get(case, CARTPOLE)
    frame, iterations = reaching({LINEN: [99 if case == "never" else 1] * 6}, env)
    if case == "no seconds":
        frame["imports"] = np.nan
    frame["resumed"] = case == "resumed"
    frame.loc[0, "imports"] = np.nan
    found = learning.targets(only_bench(frame, iterations), KNOWN)
    assert found["runs"].tolist() == ([5] if case == "some" else [])


# === DQN ========================================================================================
GYMNAX: dict[str, Any] = {"sticky_actions": 0.0, "full_actions": False, "max_episode_steps": 0}
RULES: dict[str, Any] = {"sticky_actions": 0.1, "full_actions": True}
RULES |= {"max_episode_steps": 2**31 - 1}


def write_dqn(folder, script="dqn_linen", seed=1, iterations=12, **flags):
    """Write a run of DQN with the flags that its script would have; return its folder."""
    info = run_info(seed=seed, script=script, framework=script.split("_")[1])
    info["compile_mode"] = "compile" if flags.get("compile") else "jit"
    args = {"exp_name": script, "seed": seed, "num_envs": 1, "num_steps": 500, "loss": "huber"}
    args |= {"total_timesteps": 500 * iterations, "replay_ratio": 32.0, "hidden_sizes": [128]}
    gymnasium = {"env_id": "MinAtar/Breakout-v0", "vectorization": "sync"}
    args |= gymnasium if "gymnasium" in script else RULES | {"env_id": "Breakout-MinAtar"}
    args |= {"run_name": f"{script}__{seed}__{len(list(folder.glob('*')))}"} | flags
    info["args"] = args
    rows = []
    for i, value in enumerate(np.linspace(0, 8, iterations) + seed):
        row = {"iteration": i, "global_step": 500 * (i + 1), "time/elapsed": 1.0 + 3 * (i + 1)}
        row |= {"time/iteration": 3.0, "charts/episodes": 20, "charts/episodic_return": value}
        rows.append(row | {"charts/epsilon": 0.1, "losses/q_value": 2.0})
    path = folder / args["run_name"]
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "run.json").write_text(json.dumps(info | results(rows)))
    return path


def evaluated(path, mean, name="evaluation", **changes):
    result = {"iteration": 12, "actions": "greedy", "epsilon": 0, "return": {"mean": mean}}
    result |= {"episodes": 100, "max_steps": 10_000}
    (path / f"{name}.json").write_text(json.dumps(result | changes))


def test_a_run_of_dqn_becomes_a_row_with_what_was_evaluated(tmp_path):
    path = write_dqn(tmp_path)
    evaluated(path, 9.5)
    evaluated(path, 8.5, "evaluation-epsilon-0.05", epsilon=0.05)
    evaluated(path, 0.5, "evaluation-epsilon-1", epsilon=1.0)
    [row] = load(tmp_path).runs.to_dict("records")
    assert (row["mode"], row["algorithm"], row["sync"]) == ("dqn_linen", "dqn", False)
    assert (row["env_id"], row["size"], row["batch_size"]) == ("MinAtar/Breakout-v0", "128", 500)
    settings = {"loss": "huber", "num_envs": 1, "num_steps": 500, "replay_ratio": 32.0}
    assert json.loads(row["settings"]) == settings | {"total_timesteps": 6000}
    assert (row["greedy_return"], row["noisy_return"], row["random_return"]) == (9.5, 8.5, 0.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"iteration": 11},  # of an agent that was trained further since
        {"actions": "sampled"},
        {"epsilon": 0.5},
        {"episodes": 1},
        {"episodes": None},
        {"max_steps": 20},
        {"return": None},
    ],
)
def test_an_evaluation_of_something_else_does_not_count(tmp_path, changes):
    evaluated(write_dqn(tmp_path), 9.5, **changes)
    assert load(tmp_path).runs["greedy_return"].isna().all()


def test_the_last_100_episodes():
    """Of an iteration only the mean is known: the first that counts does so in part."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        counts = rng.integers(0, 60, 12)
        means = np.where(counts, rng.normal(size=12), np.nan)
        every = np.repeat(np.where(counts, means, 0), counts)
        rows = [
            {"charts/episodes": float(n), "charts/episodic_return": x if n else None}
            for n, x in zip(counts, means.tolist(), strict=True)
        ]
        found = learning.running_return(means, counts.astype(float))
        for i in range(12):
            part = every[: counts[: i + 1].sum()]
            wanted = part[-LAST_EPISODES:].mean() if len(part) >= LAST_EPISODES else np.nan
            assert found[i] == pytest.approx(wanted, nan_ok=True)
        expected = None if np.isnan(found[-1]) else pytest.approx(found[-1])
        assert last_return(rows) == expected


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (GYMNAX | {"env_id": "envs.doors:Doors"}, "Doors-v0"),
        (GYMNAX | {"env_id": "envs.doors_gymnasium:Doors-v0"}, "Doors-v0"),
        ({}, "MinAtar/Breakout-v0"),
        (GYMNAX, "Breakout-MinAtar"),
        ({"sticky_actions": 0.2}, None),
        ({"full_actions": False}, None),
        ({"env_id": "Freeway-MinAtar"}, "MinAtar/Freeway-v0"),
        ({"env_id": "Asterix-MinAtar"}, None),  # the two were not compared
    ],
)
def test_an_environment_is_one_with_its_options(tmp_path, flags, name):
    write_dqn(tmp_path, **flags)
    [found] = load(tmp_path).runs["env_id"]
    start = f"{flags.get('env_id', 'Breakout-MinAtar')}, "
    assert found == name or (name is None and found.startswith(start))


def test_a_mode_names_what_computes_differently_and_both_libraries_pair(tmp_path):
    kinds: list[tuple[str, dict[str, Any]]] = [("dqn_torch", {}), ("dqn_torch", {"compile": True})]
    kinds += [("dqn_linen_gymnasium", {}), ("dqn_linen_gymnasium", {"vectorization": "async"})]
    for script, flags in kinds:
        write_dqn(tmp_path, script, **flags)
    runs = load(tmp_path).runs
    assert mode_order(runs["mode"]) == [
        *("dqn_torch --compile", "dqn_torch", "dqn_linen_gymnasium"),
        "dqn_linen_gymnasium --vectorization async",
    ]
    [bench] = benches(load(tmp_path))
    assert bench.runs["env_id"].nunique() == 1


@pytest.mark.parametrize("flags", [{"loss": "mse"}, {"iterations": 24}, {"double_q": True}])
def test_other_settings_and_lengths_of_dqn_never_pool(tmp_path, flags):
    for seed in (1, 2):
        write_dqn(tmp_path, seed=seed)
        write_dqn(tmp_path, seed=seed, **flags)
    several = benches(load(tmp_path))
    assert [len(x.runs) for x in several] == [2, 2]
    assert len({x.title for x in several}) == 2


def test_last_returns_and_progress_of_dqn_are_of_the_last_100_episodes(tmp_path):
    for seed in range(1, 6):
        path = write_dqn(tmp_path, seed=seed)
        if seed < 4:
            evaluated(path, 10.0 + seed)
            evaluated(path, 0.5, "evaluation-epsilon-1", epsilon=1.0)
        write_dqn(tmp_path, "dqn_torch_gymnasium", seed + 2)
    [bench] = benches(load(tmp_path))
    found = by(learning.last_returns(bench), "mode")
    row = found["dqn_linen"]
    sides = [bench.runs.loc[bench.runs["mode"] == x, "last_100_return"] for x in found]
    values = sides[0].to_numpy()
    low, high = stats.t.interval(0.95, 4, values.mean(), stats.sem(values))
    three = [row[f"last_100_{x}"] for x in ("estimate", "low", "high")]
    assert three == pytest.approx([values.mean(), low, high])
    assert (row["runs"], row["evaluated"], row["greedy_estimate"]) == (5, 3, 12)
    assert row["random_estimate"] == 0.5
    assert np.isnan([row["random_low"], row["noisy_estimate"], row["minus_estimate"]]).all()
    welch = stats.ttest_ind(sides[1], values, equal_var=False).confidence_interval()
    other = found["dqn_torch_gymnasium"]
    assert other["minus_estimate"] == pytest.approx(2)
    assert (other["minus_low"], other["minus_high"]) == pytest.approx(tuple(welch))
    points = learning.progress(bench)
    own = points[points["mode"] == "dqn_linen"]
    assert own["steps"].tolist() == list(range(2500, 6001, 500))  # the first have fewer episodes
    assert own["estimate"].iloc[-1] == pytest.approx(values.mean())

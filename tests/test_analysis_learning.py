"""What agents learned: returns, curves and targets, on made-up runs whose truth is known."""

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fake_runs import plain_rows, run_info, write_run
from made_up import CACHED, COMPILE, LINEN, NNX, TORCH, by, grid, logs, only_bench, returning
from scipy import stats

from analysis import learning
from analysis.learning import load_environments
from analysis.runs import LAST_EPISODES, RULES, last_return, load, name_environment, name_mode
from analysis.schema import SourceError

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

CARTPOLE, MOUNTAIN = "CartPole-v1", "MountainCar-v0"
KNOWN = load_environments()
ENDS = ("estimate", "low", "high")


def test_every_environment_is_fixed_in_advance_with_a_reason():
    table = pd.read_csv(learning.ENVIRONMENTS)
    assert list(KNOWN) == list(table["env_id"])
    assert table["reason"].str.contains("Margin: ").all()
    assert (table["margin"] <= 0.15 * (table["reference"] - table["untrained"]).abs()).all()


@pytest.mark.parametrize("margin", ["1", "0", "-1", "1e308", "x", None])
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
def test_modes_that_compute_the_same_are_found_where_only_some_seeds_overlap():
    losses = {LINEN: 1.0, NNX: 2.0, CACHED: 2.0, TORCH: 3.0}
    repeats = {LINEN: [1, 2], NNX: [1, 2, 3], CACHED: [3, 4], TORCH: [1]}
    parts = [grid({x: (6.0, 0.1)}, repeats=9).query("repeat in @y") for x, y in repeats.items()]
    frame = pd.concat(parts, ignore_index=True)
    iterations = logs(frame, loss=lambda run, i: losses[run["mode"]] / run["repeat"] + i)
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
    assert row["minus_estimate"] == pytest.approx(mine.mean() - np.mean(values[LINEN]))
    assert row["minus_high"] < -25
    assert [row[x] for x in ENDS] == pytest.approx([mine[2:4].mean(), mine[0], mine[5]])
    assert (row["runs"], row["margin"]) == (6, 25)
    assert np.isnan([found[LINEN]["minus_estimate"], found[CACHED]["low"]]).all()


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
    assert np.isnan(found[CARTPOLE, CACHED]["minus_estimate"])
    assert np.isfinite(found["Acrobot-v1", CACHED]["minus_estimate"])


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
    found = learning.curves(only_bench(frame, iterations)).dropna(subset=["return"])
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
        assert [row[x] for x in ENDS] == pytest.approx([four.mean(), low, high])
    assert found[TORCH, 100]["estimate"] == pytest.approx(values[4, 0])
    assert np.isnan(found[TORCH, 100]["low"])


def reaching(hits, env=CARTPOLE):
    """Runs of each mode, of which each first has a return of 475 in the iteration given."""
    frame = returning({mode: [0.0] * len(x) for mode, x in hits.items()}, env)

    def value(run, i):
        return 475.0 if i == hits[run["mode"]][int(run["repeat"]) - 1] else 100.0

    return frame, logs(frame, returns=value)


def test_targets_are_first_reached_in_the_median_and_never_is_slower_than_all():
    never = 99
    hits = {LINEN: [4, 2, 7, 9, 3, 5], TORCH: [1, 2, never, never, never], NNX: [never]}
    hits |= {COMPILE: [1, 2, 3, 4, 5, 6, 7, never, never, never]}
    found = by(learning.targets(only_bench(*reaching(hits)), KNOWN), "mode")
    row = found[LINEN]
    assert (row["target"], row["runs"], row["reached"]) == (475, 6, 6)
    ends = 6 + 0.1 * np.array([4.5, 2, 9])  # the median iteration, the first and the last
    assert [row[x] for x in ENDS] == pytest.approx(list(ends))
    assert (found[TORCH]["reached"], found[TORCH]["estimate"]) == (2, np.inf)
    assert (found[NNX]["reached"], found[NNX]["estimate"]) == (0, np.inf)
    assert np.isfinite(found[COMPILE]["low"])
    assert np.isinf(found[COMPILE]["high"])


@pytest.mark.parametrize("case", ["never", "no target", "unknown", "resumed", "some"])
def test_there_is_no_time_to_a_target_without_one_or_without_seconds(case):
    env = {"no target": "Asterix-MinAtar", "unknown": "Unknown-v0"}.get(case, CARTPOLE)
    frame, iterations = reaching({LINEN: [99 if case == "never" else 1] * 6}, env)
    frame["resumed"] = case == "resumed"
    frame.loc[0, "imports"] = np.nan
    found = learning.targets(only_bench(frame, iterations), KNOWN)
    assert found["runs"].tolist() == ([5] if case == "some" else [])


# === DQN ========================================================================================
def dqn_run(folder):
    """Write a run of DQN in MinAtar's Breakout by MinAtar's rules; return its folder."""
    info = run_info(script="dqn_linen")
    info["args"] |= {
        "exp_name": "dqn_linen",
        "num_envs": 1,
        "num_steps": 500,
        "total_timesteps": 6000,
    }
    info["args"] |= RULES | {"env_id": "Breakout-MinAtar"}
    rows = [x | {"charts/episodes": 20} for x in plain_rows(info)]
    del info["args"]["sync_for_timing"]  # which DQN has not
    return write_run(folder, info, rows)


def evaluated(path, mean, name="evaluation", **changes):
    result = {"iteration": 12, "actions": "greedy", "epsilon": 0, "return": {"mean": mean}}
    result |= {"episodes": 100, "max_steps": 10_000}
    (path / f"{name}.json").write_text(json.dumps(result | changes))


def test_a_run_of_dqn_becomes_a_row_with_what_was_evaluated(tmp_path):
    path = dqn_run(tmp_path)
    evaluated(path, 9.5)
    evaluated(path, 8.5, "evaluation-epsilon-0.05", epsilon=0.05)
    evaluated(path, 0.5, "evaluation-epsilon-1", epsilon=1)
    [row] = load(tmp_path).runs.to_dict("records")
    assert (row["mode"], row["algorithm"], row["sync"]) == ("dqn_linen", "dqn", False)
    assert (row["env_id"], row["last_100_return"]) == ("MinAtar/Breakout-v0", 90)
    assert json.loads(row["settings"])["total_timesteps"] == 6000  # other lengths never pool
    assert (row["greedy_return"], row["noisy_return"], row["random_return"]) == (9.5, 8.5, 0.5)


@pytest.mark.parametrize(
    "changes", [{"iteration": 11}, {"actions": "sampled"}, {"epsilon": 0.5}, {"episodes": 1}]
)
def test_an_evaluation_of_something_else_does_not_count(tmp_path, changes):
    evaluated(dqn_run(tmp_path), 9.5, **changes)
    assert load(tmp_path).runs["greedy_return"].isna().all()


@pytest.mark.parametrize(
    ("env_id", "flags", "name"),
    [
        ("envs.doors_gymnasium:Doors-v0", {}, "Doors-v0"),
        ("Breakout-MinAtar", RULES, "MinAtar/Breakout-v0"),
        ("Breakout-MinAtar", {}, "Breakout-MinAtar"),
        ("Breakout-MinAtar", {"sticky_actions": 0.2}, "Breakout-MinAtar, sticky_actions 0.2"),
    ],
)
def test_an_environment_is_one_with_its_options(env_id, flags, name):
    assert name_environment({"env_id": env_id} | flags) == name


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ({"compile": True}, "dqn_torch --compile"),
        ({"vectorization": "async"}, "dqn_torch --vectorization async"),
        ({"vectorization": "sync", "compile": False}, ""),  # as it usually does
    ],
)
def test_a_mode_names_what_computes_differently(args, name):
    assert name_mode({"script": "dqn_torch", "args": args}) == name


def test_the_last_100_episodes():
    """Of an iteration only the mean is known: the first that counts does so in part."""
    rng = np.random.default_rng(0)
    for _ in range(10):
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


def test_last_returns_and_progress_of_dqn_are_of_the_last_100_episodes():
    frame = returning({"dqn_linen": range(5), "dqn_torch": range(5)}, algorithm="dqn")
    last = np.random.default_rng(0).normal(size=10)
    frame = frame.assign(
        last_100_return=last, random_return=0.5, greedy_return=[1, 2, 3, *[np.nan] * 7]
    )
    iterations = logs(frame, returns=lambda run, i: float(i)).assign(**{"charts/episodes": 30})
    bench = only_bench(frame, iterations)
    found = by(learning.last_returns(bench), "mode")
    row, other = found["dqn_linen"], found["dqn_torch"]
    low, high = stats.t.interval(0.95, 4, last[:5].mean(), stats.sem(last[:5]))
    assert [row[f"last_100_{x}"] for x in ENDS] == pytest.approx([last[:5].mean(), low, high])
    assert (row["runs"], row["evaluated"], row["greedy_estimate"]) == (5, 3, 2)
    assert row["random_estimate"] == 0.5
    assert np.isnan([row["random_low"], row["noisy_estimate"], row["minus_estimate"]]).all()
    welch = stats.ttest_ind(last[5:], last[:5], equal_var=False).confidence_interval()
    assert (other["minus_low"], other["minus_high"]) == pytest.approx(tuple(welch))
    points = learning.progress(bench)
    assert points.loc[points["mode"] == "dqn_linen", "steps"].min() == 400  # of 30 episodes each
    assert points["estimate"].iloc[0] == pytest.approx((10 * 0 + 30 * (1 + 2 + 3)) / 100)

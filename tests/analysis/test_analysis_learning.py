"""Returns, learning curves and targets, on synthetic runs with known true values."""

import numpy as np
import pandas as pd
import pytest
from made_up import CACHED, LINEN, NNX, TORCH, by, logs, only_experiment, returning
from scipy import stats

from analysis import learning

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

CARTPOLE, MOUNTAIN = "CartPole-v1", "MountainCar-v0"
KNOWN = learning.load_environments()
ENDS = ("estimate", "low", "high")


# === Returns and equivalence ====================================================================
def test_verdicts():
    rows = np.arange(6.0)
    frame = pd.concat(
        [
            returning({LINEN: 490 + rows, NNX: 491 + rows, TORCH: 380 + rows, CACHED: rows[:3]}),
            returning({LINEN: [-200.0] * 6, TORCH: [-200.0] * 6}, MOUNTAIN),
            returning({LINEN: rows, TORCH: rows + 1}, "Unknown-v0"),
            returning({TORCH: rows}, "Acrobot-v1"),
            returning({LINEN: rows[:4], TORCH: rows[:4]}, "Catch"),  # too few runs
        ]
    )
    found = by(learning.returns(only_experiment(frame), KNOWN), "env_id", "mode")
    verdicts = {key: row["verdict"] for key, row in found.items() if row["verdict"]}
    assert verdicts == {
        (CARTPOLE, NNX): "equivalent",
        (CARTPOLE, TORCH): "different",
        (MOUNTAIN, TORCH): "all alike",
        ("Unknown-v0", TORCH): "no margin",
    }
    assert len(found) == 9
    assert found[CARTPOLE, TORCH]["minus_estimate"] == pytest.approx(-110)


def test_identical_returns_are_tested_once_unless_all_are_at_the_maximum():
    values = np.linspace(400, 500, 6)
    both = returning({LINEN: values + 1, NNX: values, CACHED: values[::-1]})
    cap = returning({LINEN: values, NNX: [500.0] * 6, CACHED: [500.0] * 6}, "Acrobot-v1")
    frame = pd.concat([both, cap], ignore_index=True)
    found = by(learning.returns(only_experiment(frame), KNOWN), "env_id", "mode")
    assert found[CARTPOLE, CACHED]["verdict"] == "as ppo_nnx"
    assert np.isnan(found[CARTPOLE, CACHED]["minus_estimate"])
    assert np.isfinite(found[CARTPOLE, NNX]["minus_estimate"])
    assert np.isfinite(found["Acrobot-v1", CACHED]["minus_estimate"])
    of_cached = by(
        learning.returns(only_experiment(frame, baseline=CACHED), KNOWN), "env_id", "mode"
    )
    assert of_cached[CARTPOLE, NNX]["verdict"] == "as ppo_nnx_cached"


def test_off_policy_scripts_are_compared_over_the_last_100_episodes():
    rows = np.arange(6.0)
    frame = returning({LINEN: 490 + rows, TORCH: 380 + rows}).assign(algorithm="dqn")
    frame["last_100_return"] = frame["final_return"] + 5
    found = by(learning.last_returns(only_experiment(frame)), "mode")
    assert found[TORCH]["minus_estimate"] == pytest.approx(-110)
    assert found[TORCH]["last_100_estimate"] == pytest.approx(387.5)
    assert np.isnan(found[LINEN]["minus_estimate"])


# === Learning curves and targets ================================================================
def test_progress_is_the_mean_over_seeds_with_a_t_interval():
    frame = returning({LINEN: [0.0] * 4, TORCH: [0.0]})
    values = np.random.default_rng(0).normal(size=(5, 10))
    values[1, 3] = np.nan  # no episode finished, so the previous return counts
    values[2, 0] = np.nan  # no return yet
    rows = {run: values[i] for i, run in enumerate(frame["run"])}
    iterations = logs(frame, returns=lambda run, i: rows[run["run"]][i])
    found = by(learning.progress(only_experiment(frame, iterations)), "mode", "steps")
    values[1, 3] = values[1, 2]
    assert (LINEN, 100) not in found
    for i in range(1, 10):
        row, four = found[LINEN, 100 * (i + 1)], values[:4, i]
        low, high = stats.t.interval(0.95, 3, four.mean(), stats.sem(four))
        assert [row[x] for x in ENDS] == pytest.approx([four.mean(), low, high])
        assert [row["least"], row["most"]] == [four.min(), four.max()]
    assert found[TORCH, 100]["estimate"] == pytest.approx(values[4, 0])
    assert np.isnan(found[TORCH, 100]["low"])


def test_time_to_target_is_a_median_and_infinite_if_the_target_is_missed():
    never = 99
    hits = {LINEN: [4, 2, 7, 9, 3, 5], TORCH: [1, 2, never, never, never], NNX: [never]}
    hits |= {CACHED: [1, 2, 3, 4, 5, 6, 7, never, never, never]}
    frame = returning({mode: [0.0] * len(x) for mode, x in hits.items()})

    def value(run, i):
        return 475.0 if i == hits[run["mode"]][int(run["repeat"]) - 1] else 100.0

    iterations = logs(frame, returns=value)
    found = by(learning.targets(only_experiment(frame, iterations), KNOWN), "mode")
    row = found[LINEN]
    assert (row["target"], row["runs"], row["reached"]) == (475, 6, 6)
    ends = 6 + 0.1 * np.array([4.5, 2, 9])  # median, fastest and slowest run
    assert [row[x] for x in ENDS] == pytest.approx(list(ends))
    assert (found[TORCH]["reached"], found[TORCH]["estimate"]) == (2, np.inf)
    assert (found[NNX]["reached"], found[NNX]["estimate"]) == (0, np.inf)
    assert np.isfinite(found[CACHED]["low"])
    assert np.isinf(found[CACHED]["high"])
    for nothing in (frame.assign(resumed=True), frame[frame["mode"] == NNX]):
        assert learning.targets(only_experiment(nothing, iterations), KNOWN).empty


def test_dqn_progress_is_the_mean_of_the_last_100_episodes():
    frame = returning({"dqn_linen": range(5), "dqn_torch": range(5)}, algorithm="dqn")
    iterations = logs(frame, returns=lambda run, i: float(i))
    iterations["charts/episodes"] = 30
    points = learning.progress(only_experiment(frame, iterations))
    # The 100th episode finishes in the fourth iteration.
    assert points.loc[points["mode"] == "dqn_linen", "steps"].min() == 400
    assert points["estimate"].iloc[0] == pytest.approx((10 * 0 + 30 * (1 + 2 + 3)) / 100)

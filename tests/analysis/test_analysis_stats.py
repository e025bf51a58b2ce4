"""Statistics, compared with independent calculations and simulations with known true values."""

import math

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from made_up import by, table
from scipy import special

from analysis import learning, stats, tables

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
ENDS = list(stats.Interval._fields)


# === Intervals of means =========================================================================
@pytest.mark.parametrize("envs", ["ABC", "AAA"])
def test_the_interval_of_three_values_equals_a_calculation_by_hand(envs):
    # Variance 7/3, 2 degrees of freedom: the half-width is 4.3027 * sqrt(7/9) = 3.7946.
    found = stats.mean_interval(np.array([1.0, 2, 4]), list(envs))
    assert found == pytest.approx((2.3333, -1.4612, 6.1279), abs=1e-4)
    geometric = stats.geometric_mean(np.array([2, 4, 16]))  # 2 to the power of 1, 2 and 4
    assert np.log2(geometric) == pytest.approx((2.3333, -1.4612, 6.1279), abs=1e-4)
    assert np.isnan(stats.mean_interval(np.array([3.0]), ["A"])[1:]).all()


@pytest.mark.parametrize(
    ("counts", "between", "least", "most"),
    [
        ((3,) * 12, 1.0, 0.935, 0.97),
        ((3,) * 3, 0.0, 0.98, 1.0),
        ((5,), 0.0, 0.935, 0.965),
    ],
)
def test_intervals_of_means_cover_the_truth_in_95_percent_of_cases(counts, between, least, most):
    rng = np.random.default_rng(3)
    envs = np.repeat(np.arange(len(counts)), counts)
    values = 0.3 + between**0.5 * rng.standard_normal((len(counts), 4000))[envs]
    values += rng.standard_normal((len(envs), 4000))
    _, low, high = stats.mean_interval(values, [str(x) for x in envs])
    held = np.mean((low <= 0.3) & (high >= 0.3))
    assert held >= least
    assert held <= most


# === Pairs ======================================================================================
ROWS = [("torch", "A", 1, 2.0), ("torch", "A", 2, 4.0), ("torch", "B", 1, 8.0)]
ROWS += [("torch", "B", 2, 8.0), ("linen", "A", 1, 1.0), ("linen", "A", 2, 1.0)]
ROWS += [("linen", "B", 1, 2.0)]
EXAMPLE = pd.DataFrame(ROWS, columns=["mode", "env_id", "repeat", "steady"])


def only_row(frame):
    [row] = frame.to_dict("records")
    return row


def test_ratios_are_candidate_over_baseline_within_blocks():
    # The ratios are 2 and 4 in A, and 4 in B: log2 is on average 1.5 in A, and 2 in B.
    row = only_row(stats.compare(table(EXAMPLE), "steady", "linen"))
    assert row["estimate"] == pytest.approx(2**1.75)
    assert (row["mode"], row["size"], row["blocks"]) == ("torch", "small", 3)
    # The means of log2 have the variance 1/8, but noise alone explains 1/2 * (1/2 + 1) / 2 = 0.375.
    # The larger one counts.
    assert row["high"] == pytest.approx(2 ** (1.75 + 12.7062 * (0.375 / 2) ** 0.5), rel=1e-4)
    found = by(stats.compare(table(EXAMPLE), "steady", "linen", by=("env_id",)), "env_id")
    assert {x: y["estimate"] for x, y in found.items()} == pytest.approx({"A": 8**0.5, "B": 4})
    more = stats.compare(table(EXAMPLE), "steady", "linen", contrast=stats.more_seconds)
    torch, linen = (8**0.5 * 8) ** 0.5, 2**0.5  # geometric means over the common blocks
    assert only_row(more)["estimate"] == pytest.approx(torch - linen)
    # Delta method: the change of a mean is the mean times the change of its logarithm.
    changes = torch * np.log([2, 4, 8]) - linen * np.log([1, 1, 2])
    _, low, high = stats.mean_interval(changes, list("AAB"))
    assert only_row(more)["high"] - only_row(more)["low"] == pytest.approx(high - low)


@pytest.mark.parametrize("column", ["platform", "settings", "sync", "size", "env_id"])
def test_runs_are_paired_only_if_everything_else_is_equal(column):
    runs = table(EXAMPLE)
    runs.loc[runs["mode"] == "torch", column] = True if column == "sync" else "other"
    assert stats.compare(runs, "steady", "linen").empty


def test_runs_of_different_lengths_are_neither_paired_nor_pooled():
    """Startup matters less in a longer run, so the ratio depends on the length."""
    rows = []
    cells = [(env, 1, 20, 5.0, 4.0) for env in "ABC"]
    cells += [("A", repeat, 1000, 50.0, 0.25) for repeat in range(2, 5)]
    for env, repeat, length, seconds, ratio in cells:
        row = {"env_id": env, "repeat": repeat, "num_iterations": length}
        rows.append(row | {"mode": "base", "process": seconds})
        rows.append(row | {"mode": "other", "process": seconds * ratio})
    runs = table(rows)
    row = only_row(stats.compare(runs, "process", "base"))
    assert [row[x] for x in ENDS] == pytest.approx([4, 4, 4])
    found = by(stats.compare(runs, "process", "base", by=("size", "env_id")), "env_id")
    assert [found[x]["estimate"] for x in "ABC"] == pytest.approx([0.25, 4, 4])
    runs.loc[runs["mode"] == "other", "num_iterations"] += 1
    assert stats.compare(runs, "process", "base").empty


# === Returns ====================================================================================
@pytest.mark.parametrize("runs", [6, 10])
def test_intervals_of_medians_cover_the_truth_in_95_percent_of_cases(runs):
    """70% of the runs reach the maximum, which is therefore the true median."""
    _, low, high = stats.median_interval(np.arange(runs))  # ranks of the ends, from 0
    rng = np.random.default_rng(6)
    shape = (4000, runs)
    values = np.where(rng.random(shape) < 0.7, 500.0, rng.uniform(200, 500, shape))
    values = np.sort(values, axis=1)
    inside = (values[:, int(low)] <= 500) & (values[:, int(high)] >= 500)
    assert inside.mean() >= 0.94
    ends = np.sort(values[0])[[int(low), int(high)]]
    assert stats.median_interval(values[0]) == (np.median(values[0]), *ends)


def test_equivalence_is_two_one_sided_welch_tests():
    rng = np.random.default_rng(7)
    seen = set()
    for _ in range(60):
        a = rng.normal(0, rng.uniform(0.2, 2), rng.integers(5, 12))
        b = rng.normal(rng.uniform(-3, 3), rng.uniform(0.2, 2), rng.integers(5, 12))
        found, verdict = stats.equivalence(a, b, 1.0)
        n, m = len(a), len(b)
        va, vb = np.var(a, ddof=1) / n, np.var(b, ddof=1) / m
        freedom = (va + vb) ** 2 / (va**2 / (n - 1) + vb**2 / (m - 1))
        half = special.stdtrit(freedom, 0.95) * np.sqrt(va + vb)
        d = b.mean() - a.mean()
        assert found == pytest.approx((d, d - half, d + half))
        ends = [special.stdtr(freedom, (s * d - 1) / math.sqrt(va + vb)) for s in (-1, 1)]
        assert (verdict == "equivalent") == (max(ends) < 0.05)  # the larger p-value
        assert (verdict == "different") == (d - half > 1 or d + half < -1)
        seen.add(verdict)
    assert seen == {"equivalent", "different", "undecided"}


def test_identical_returns_are_tested_without_a_warning():
    cap, far = np.full(6, 500.0), np.full(6, 400.0)
    some = np.array([500.0, 498, 500, 499, 500, 500])
    assert stats.equivalence(cap, cap, 25) == ((0, 0, 0), "equivalent")
    assert stats.equivalence(cap, far, 25) == ((-100, -100, -100), "different")
    assert stats.equivalence(some, cap, 25)[1] == "equivalent"
    few, verdict = stats.equivalence(np.arange(4.0), np.arange(9.0), 100)
    assert verdict == ""
    assert np.isnan(few.low)


def test_the_report_states_how_often_equivalence_is_claimed_wrongly():
    """Resample returns of CartPole. The baseline always reaches the target; the candidate misses
    it so often that the means differ by exactly the margin."""
    runs = pd.read_csv(ROOT / "tests/golden/peers/runs.csv")
    returns = runs.loc[runs["mode"].str.startswith("ppo_"), "final_return"].to_numpy()
    known = learning.load_environments()["CartPole-v1"]
    there, missed = returns[returns >= known.target], returns[returns < known.target]
    often = known.margin / (there.mean() - missed.mean())
    rng = np.random.default_rng(0)
    claims = 0
    for _ in range(1000):
        misses = rng.random(5) < often
        candidate = np.where(misses, rng.choice(missed, 5), rng.choice(there, 5))
        claims += stats.equivalence(rng.choice(there, 5), candidate, 25)[1] == "equivalent"
    assert claims / 1000 == pytest.approx(0.25, abs=0.03)
    assert "25%" in tables.TABLES["returns"].note

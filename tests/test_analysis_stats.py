"""Statistics against numbers worked out by hand, and against simulations whose truth is known."""

import numpy as np
import pandas as pd
import pytest

from analysis import stats
from analysis.runs import complete


def runs_table(rows):
    """A table of runs from (mode, environment, repeat, steady seconds)."""
    table = pd.DataFrame(rows, columns=["mode", "env_id", "repeat", "steady"])
    table["size"] = "small"
    return complete(table)


EXAMPLE = [
    ("torch", "A", 1, 2.0),
    ("torch", "A", 2, 4.0),
    ("torch", "B", 1, 8.0),
    ("torch", "B", 2, 8.0),
    ("linen", "A", 1, 1.0),
    ("linen", "A", 2, 1.0),
    ("linen", "B", 1, 2.0),
]


def test_speedups_of_the_worked_example():
    # All pairs: 2 2 4 4 in A, 4 4 in B. In blocks: 2 and 4 in A, 4 in B.
    row = stats.speedup_table(runs_table(EXAMPLE), "steady", "torch").iloc[0]
    assert row["geometric_mean"] == pytest.approx(2 ** (10 / 6))
    assert (row["median"], row["minimum"], row["maximum"], row["pairs"]) == (4, 2, 4, 6)
    assert row["paired"] == pytest.approx(2**1.75)  # the mean over A, 1.5, and B, 2, in powers
    assert (row["environments"], row["blocks"]) == (2, 3)
    assert row["low"] < row["paired"] < row["high"]


def test_swapping_baseline_and_candidate_inverts_a_speedup():
    there = stats.speedup_table(runs_table(EXAMPLE), "steady", "torch").iloc[0]
    back = stats.speedup_table(runs_table(EXAMPLE), "steady", "linen").iloc[0]
    for name, other in [("paired", "paired"), ("low", "high"), ("minimum", "maximum")]:
        assert there[name] == pytest.approx(1 / back[other])


def test_differences_of_the_worked_example():
    # In blocks: -1 and -3 in A, -6 in B.
    row = stats.difference_table(runs_table(EXAMPLE), "steady", "torch").iloc[0]
    assert row["mean"] == pytest.approx((-2 - 6) / 2)
    assert (row["minimum"], row["median"], row["maximum"], row["blocks"]) == (-6, -3, -1, 3)


def test_sizes_come_in_order_and_then_all_together():
    large, small = runs_table(EXAMPLE).assign(size="large"), runs_table(EXAMPLE)
    large.loc[large["mode"] == "torch", "steady"] *= 4
    table = stats.speedup_table(pd.concat([large, small]), "steady", "torch").set_index("size")
    assert list(table.index) == ["small", "large", "all"]
    assert table.loc["large", "paired"] == pytest.approx(4 * table.loc["small", "paired"])
    assert table.loc["all", "paired"] == pytest.approx(2 * table.loc["small", "paired"])


@pytest.mark.parametrize("column", ["platform", "settings", "sync", "size", "env_id"])
def test_runs_pair_only_where_all_but_the_mode_is_equal(column):
    runs = runs_table(EXAMPLE)
    other = True if column == "sync" else "other"
    runs.loc[runs["mode"] == "torch", column] = other
    assert stats.pair(runs, "steady", "torch", "linen").empty
    assert len(stats.pair(runs, "steady", "torch", "linen", ignore=(column,))) in (3, 6)


def test_a_run_made_twice_counts_once():
    """One seed at two lengths is one block: no interval, where four pairs would make a claim."""
    again = [("torch", "A", 1, 2.2), ("linen", "A", 1, 1.1)]
    first = [row for row in EXAMPLE if row[1:3] == ("A", 1)]
    row = stats.speedup_table(runs_table([*first, *again]), "steady", "torch").iloc[0]
    assert row["blocks"] == 1 and row["paired"] == pytest.approx(2.1 / 1.05)
    assert np.isnan(row["low"]) and np.isnan(row["high"])


def test_platforms_pair_within_a_mode():
    runs = runs_table(EXAMPLE)
    both = pd.concat([runs.assign(platform="x"), runs.assign(platform="y", steady=runs.steady / 3)])
    table = stats.speedup_table(both, "steady", "x", contender="platform")
    assert table["paired"].tolist() == pytest.approx([3])
    assert table["low"].tolist() == pytest.approx([3])


def test_a_run_without_the_value_is_not_paired():
    runs = runs_table(EXAMPLE)
    runs.loc[0, "steady"] = np.nan
    assert len(stats.pair(runs, "steady", "torch", "linen")) == 2


def test_nothing_to_repeat_over_gives_no_interval():
    runs = runs_table([row for row in EXAMPLE if row[1:3] == ("A", 1)])
    row = stats.speedup_table(runs, "steady", "torch").iloc[0]
    assert row["paired"] == 2
    assert np.isnan(row["low"])
    assert np.isnan(row["high"])


@pytest.mark.parametrize(
    ("num_envs", "num_sizes", "repeats", "between", "within"),
    [(12, 1, 3, 0.2, 0.03), (12, 3, 2, 0.1, 0.1), (12, 1, 1, 0.2, 0.0), (1, 1, 5, 0.0, 0.05)],
)
def test_intervals_hold_the_truth_95_times_in_100(num_envs, num_sizes, repeats, between, within):
    rng, truth, hits, trials = np.random.default_rng(1), 0.3, 0, 250
    shape = (num_envs, num_sizes, repeats)
    env, size, _ = (x.ravel().astype(str) for x in np.indices(shape))
    for _ in range(trials):
        value = truth + between * rng.standard_normal((num_envs, 1, 1))
        value = value + np.linspace(-1, 1, num_sizes)[:, None] * (num_sizes > 1)
        value = (value + within * rng.standard_normal(shape)).ravel()
        cells = pd.DataFrame({"env_id": env, "size": size, "value": value})
        interval = stats.hierarchical_interval(cells)
        hits += interval.low <= truth <= interval.high
    assert 0.915 <= hits / trials <= 0.985


def test_repeats_alone_do_not_narrow_an_interval_over_environments():
    few = [("torch", env, r, s) for env, s in (("A", 2), ("B", 4), ("C", 8)) for r in range(2)]
    many = [("torch", env, r, s) for env, s in (("A", 2), ("B", 4), ("C", 8)) for r in range(50)]
    tables = []
    for rows in (few, many):
        linen = [("linen", env, r, 1.0) for _, env, r, _ in rows]
        tables.append(stats.speedup_table(runs_table(rows + linen), "steady", "torch").iloc[0])
    assert tables[0]["low"] == pytest.approx(tables[1]["low"], rel=0.1)


# === Returns ====================================================================================
def test_iqm_is_the_mean_of_the_middle_half():
    assert stats.iqm(np.array([-100.0, 2, 3, 4, 5, 6, 7, 1000])) == pytest.approx(4.5)


def test_iqm_intervals_hold_the_truth_about_95_times_in_100():
    rng, hits, trials = np.random.default_rng(2), 0, 250
    for _ in range(trials):
        interval = stats.iqm_interval(list(7 + rng.standard_normal((6, 10))))
        hits += interval.low <= 7 <= interval.high
    assert 0.9 <= hits / trials <= 0.985
    assert np.isnan(stats.iqm_interval([np.array([1.0]), np.array([2.0])]).low)
    assert np.isnan(stats.iqm_interval([np.arange(4.0)]).low)
    assert not np.isnan(stats.iqm_interval([np.arange(5.0)]).low)


def test_the_iqm_bootstrap_is_stratified():
    # Within each environment all runs are equal, so drawing within one changes nothing.
    assert stats.iqm_interval([np.zeros(4), np.full(4, 9.0)]) == (4.5, 4.5, 4.5)


def test_equivalence_of_the_worked_example():
    # Means 10 and 11, variances 1 and 1 over 3: error sqrt(2/3), 4 degrees of freedom, t 2.1318.
    result = stats.equivalence(np.array([9.0, 10, 11]), np.array([10.0, 11, 12]), margin=3)
    assert result.difference == 1
    assert result.low == pytest.approx(1 - 2.1318 * (2 / 3) ** 0.5, abs=1e-3)
    assert result.high == pytest.approx(1 + 2.1318 * (2 / 3) ** 0.5, abs=1e-3)
    assert result.verdict == "equivalent"
    assert result.p_value == pytest.approx(0.0353, abs=1e-4)  # of t = 2 / sqrt(2/3) = 2.449


def test_equivalence_has_four_verdicts():
    def verdict(a, b, margin):
        return stats.equivalence(np.array(a), np.array(b), margin).verdict

    assert verdict([1.0, 1.1, 0.9], [1.0, 1.1, 0.9], 1.0) == "equivalent"
    assert verdict([1.0, 1.1, 0.9], [5.0, 5.1, 4.9], 1.0) == "different"
    assert verdict([1.0, 3.0, 5.0], [1.0, 3.0, 5.0], 1.0) == "undecided"
    assert verdict([1.0], [1.0, 1.0], 1.0) == "too few runs"
    assert verdict([0.0, 0.0], [0.0, 0.0], 1.0) == "equivalent"
    assert verdict([0.0, 0.0], [2.0, 2.0], 1.0) == "different"


def test_equivalence_is_claimed_wrongly_5_times_in_100():
    rng, margin, trials = np.random.default_rng(3), 1.5, 2000

    def rate(difference):
        pairs = rng.standard_normal((trials, 2, 10)) + np.array([[0.0], [difference]])
        verdicts = [stats.equivalence(a, b, margin).verdict for a, b in pairs]
        return verdicts.count("equivalent") / trials

    assert 0.03 < rate(margin) < 0.07  # the frameworks differ by just the margin
    assert rate(0.0) > 0.7

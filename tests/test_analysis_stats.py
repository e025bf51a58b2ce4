"""Statistics against numbers worked out otherwise, and against simulations whose truth is known."""

import numpy as np
import pandas as pd
import pytest
from made_up import table
from scipy import special

from analysis import stats

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


# === The interval of a mean =====================================================================
@pytest.mark.parametrize("envs", ["ABC", "AAA"])
def test_three_values_give_the_interval_worked_out_by_hand(envs):
    # Variance 7/3 and 2 degrees of freedom, of environments or of runs: 4.3027 sqrt(7/9) = 3.7946.
    interval = stats.mean_interval(np.array([1.0, 2, 4]), list(envs))
    assert interval == pytest.approx((2.3333, -1.4612, 6.1279), abs=1e-4)


def by_hand(values, envs):
    """The estimate and its standard error, in plain sums."""
    cells = {env: [x for x, y in zip(values, envs, strict=True) if y == env] for env in set(envs)}
    means = {env: sum(cell) / len(cell) for env, cell in cells.items()}
    mean = sum(means.values()) / len(means)
    squares = sum((x - means[env]) ** 2 for env, cell in cells.items() for x in cell)
    per_run = squares / max(1, len(values) - len(cells))
    noise = sum(per_run / len(cell) for cell in cells.values()) / len(cells)
    between = sum((x - mean) ** 2 for x in means.values()) / max(1, len(cells) - 1)
    return mean, (max(between, noise) / len(cells)) ** 0.5


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_intervals_of_uneven_cells_equal_plain_sums(spread):
    rng = np.random.default_rng(1)
    for _ in range(20):
        envs = np.repeat(list("ABCDE"), rng.integers(1, 5, 5))
        envs = rng.permutation(envs)
        values = rng.standard_normal(len(envs)) + spread * (envs == "A")
        mean, error = by_hand(values.tolist(), envs.tolist())
        half_width = 2.776445 * error  # Student's t with 4 degrees of freedom
        expected = (mean, mean - half_width, mean + half_width)
        assert stats.mean_interval(values, envs.tolist()) == pytest.approx(expected, abs=1e-5)


def test_several_quantities_at_once_have_the_intervals_of_each():
    rng, envs = np.random.default_rng(2), list("ABBCCC")
    values = rng.standard_normal((6, 4))
    together = stats.mean_interval(values, envs)
    for i in range(4):
        alone = stats.mean_interval(values[:, i], envs)
        assert [x[i] for x in together] == pytest.approx(list(alone), abs=1e-12)


def test_a_lone_run_has_no_interval():
    estimate, low, high = stats.mean_interval(np.array([3.0]), ["A"])
    assert estimate == 3 and np.isnan(low) and np.isnan(high)


def test_a_higher_confidence_widens_the_interval():
    # Student's t with 2 degrees of freedom: 9.9248 at 99%.
    interval = stats.mean_interval(np.array([1.0, 2, 4]), list("ABC"), 0.99)
    assert interval.high - interval.estimate == pytest.approx(9.9248 * (7 / 9) ** 0.5, abs=1e-4)


def test_a_geometric_mean_has_the_interval_of_the_logarithms():
    # In powers of 2: 1, 2, 4 as above, so from 2 ** -1.4612 to 2 ** 6.1279.
    interval = stats.geometric_mean(np.array([2, 4, 16]))
    assert np.log2(interval) == pytest.approx((2.3333, -1.4612, 6.1279), abs=1e-4)
    estimate, low, high = stats.geometric_mean(np.array([3.0]))
    assert estimate == pytest.approx(3) and np.isnan(low) and np.isnan(high)


@pytest.mark.parametrize(
    ("counts", "between", "least", "most"),
    [
        ((3,) * 12, 1.0, 0.935, 0.97),
        ((3,) * 3, 0.0, 0.98, 1.0),
        ((1, 1, 1, 1, 10), 1.0, 0.94, 1.0),
        ((1, 1, 1, 1, 10), 0.0, 0.94, 1.0),
        ((5,), 0.0, 0.935, 0.965),
        ((1,) * 12, 1.0, 0.935, 0.965),
        ((2, 2), 1.0, 0.935, 1.0),
    ],
)
def test_intervals_hold_the_truth_95_times_in_100(counts, between, least, most):
    rng, trials, truth = np.random.default_rng(3), 4000, 0.3
    envs = np.repeat(np.arange(len(counts)), counts)
    values = truth + between**0.5 * rng.standard_normal((len(counts), trials))[envs]
    values += rng.standard_normal((len(envs), trials))
    _, low, high = stats.mean_interval(values, [str(x) for x in envs])
    assert least <= np.mean((low <= truth) & (truth <= high)) <= most


# === Pairs ======================================================================================
EXAMPLE = pd.DataFrame(
    [
        ("torch", "A", 1, 2.0),
        ("torch", "A", 2, 4.0),
        ("torch", "B", 1, 8.0),
        ("torch", "B", 2, 8.0),
        ("linen", "A", 1, 1.0),
        ("linen", "A", 2, 1.0),
        ("linen", "B", 1, 2.0),
    ],
    columns=["mode", "env_id", "repeat", "steady"],
)


def only_row(frame):
    [row] = frame.to_dict("records")
    return row


def test_a_ratio_is_the_candidates_time_over_the_baselines_within_blocks():
    # 2 and 4 in A, 4 in B: the mean over A, 1.5, and B, 2, in powers of 2.
    row = only_row(stats.compare(table(EXAMPLE), "steady", "linen"))
    assert (row["mode"], row["size"]) == ("torch", "small")
    assert row["estimate"] == pytest.approx(2**1.75)
    assert (row["environments"], row["blocks"]) == (2, 3)
    # Between: 1/8 of squared powers; noise: (1/2 over one degree of freedom) times (1/2 + 1) / 2.
    assert row["high"] == pytest.approx(2 ** (1.75 + 12.7062 * (0.375 / 2) ** 0.5), rel=1e-4)
    back = only_row(stats.compare(table(EXAMPLE), "steady", "torch"))
    for name, other in [("estimate", "estimate"), ("low", "high"), ("high", "low")]:
        assert row[name] == pytest.approx(1 / back[other])


def test_ratios_by_environment():
    runs = table(EXAMPLE)
    both = pd.concat([runs, runs.assign(size="large", steady=runs["steady"] ** 2)])
    found = stats.compare(both, "steady", "linen", by=("size", "env_id"))
    cells = {(x["size"], x["env_id"]): x["estimate"] for _, x in found.iterrows()}
    assert cells == pytest.approx(
        {("small", "A"): 8**0.5, ("small", "B"): 4, ("large", "A"): 8, ("large", "B"): 16}
    )


def test_a_repeats_own_pace_drops_out_of_a_ratio():
    pace = 10.0 ** np.arange(4)
    rows = [{"mode": "base", "repeat": i, "steady": pace[i]} for i in range(4)]
    rows += [{"mode": "other", "repeat": i, "steady": 3 * pace[i]} for i in (3, 1, 0, 2)]
    row = only_row(stats.compare(table(rows), "steady", "base"))
    assert [row[x] for x in stats.Interval._fields] == pytest.approx([3, 3, 3])


def test_repeats_that_are_not_unique_are_never_crossed():
    rng = np.random.default_rng(4)
    rows = pd.DataFrame({"mode": ["a"] * 6 + ["b"] * 6, "repeat": [*range(6)] * 2})
    rows["steady"] = np.exp(0.1 * rng.standard_normal(12))
    numbered = only_row(stats.compare(table(rows), "steady", "a"))
    alike = only_row(stats.compare(table(rows.assign(repeat=1)), "steady", "a"))
    assert alike["blocks"] == 1 and np.isnan(alike["low"])  # six by six would be a narrow claim
    halves = only_row(stats.compare(table(rows.assign(repeat=rows.repeat // 3)), "steady", "a"))
    assert halves["blocks"] == 2
    assert halves["high"] / halves["low"] > numbered["high"] / numbered["low"]


def test_a_run_without_the_value_is_not_paired():
    runs = table(EXAMPLE)
    runs.loc[0, "steady"] = np.nan
    assert len(stats.pair(runs, "steady", "torch", "linen")) == 2
    nothing = stats.compare(runs.assign(steady=np.nan), "steady", "linen")
    assert nothing.empty and "estimate" in nothing


@pytest.mark.parametrize("column", ["platform", "settings", "sync", "size", "env_id"])
def test_runs_pair_only_where_all_but_the_contender_is_equal(column):
    runs = table(EXAMPLE)
    other = True if column == "sync" else "other"
    runs.loc[runs["mode"] == "torch", column] = other
    assert stats.pair(runs, "steady", "linen", "torch").empty


def lengths(cells):
    """Runs of two modes from (environment, repeat, iterations, seconds, times as long)."""
    rows = []
    for env, repeat, length, seconds, ratio in cells:
        row = {"env_id": env, "repeat": repeat, "num_iterations": length}
        for mode, factor in (("base", 1), ("other", ratio)):
            rows.append(row | {"mode": mode, "steady": factor, "process": seconds * factor})
    return table(rows)


def test_whole_runs_pair_only_at_equal_length():
    runs = lengths([("A", 1, 20, 5.0, 2.0), ("A", 2, 20, 5.0, 2.0)])
    runs.loc[runs["mode"] == "other", "num_iterations"] = [20, 40]
    assert len(stats.pair(runs, "process", "base", "other")) == 1
    assert len(stats.pair(runs, "steady", "base", "other")) == 2


def test_whole_runs_of_two_lengths_are_not_pooled():
    """The longer a training, the less its startup counts: no ratio holds for two lengths."""
    short = [(env, 1, 20, 5.0, 4.0) for env in "ABC"]
    long = [("A", repeat, 1000, 50.0, 0.25) for repeat in range(1, 5)]
    runs = lengths(short + long)
    row = only_row(stats.compare(runs, "process", "base"))
    assert [row[x] for x in stats.Interval._fields] == pytest.approx([4, 4, 4])
    assert row["blocks"] == 3
    found = stats.compare(runs, "process", "base", by=("size", "env_id")).set_index("env_id")
    assert found["estimate"].to_dict() == pytest.approx({"A": 0.25, "B": 4, "C": 4})
    assert found["blocks"].to_dict() == {"A": 4, "B": 1, "C": 1}


def test_a_whole_run_of_unknown_length_is_not_compared():
    runs = lengths([("A", 1, 20, 5.0, 2.0)]).assign(num_iterations=np.nan)
    assert stats.compare(runs, "process", "base").empty


def test_of_lengths_that_are_as_common_the_longest_counts():
    runs = lengths([("A", 1, 20, 1.0, 1.0), ("A", 1, 50, 1.0, 1.0)])
    assert set(stats.of_length(runs)["num_iterations"]) == {50}
    assert stats.of_length(runs.head(0)).empty


def test_platforms_compare_within_each_mode():
    runs = table(EXAMPLE)
    factor = runs["mode"].map({"torch": 3.0, "linen": 0.5})
    both = pd.concat([runs, runs.assign(platform="there", steady=runs["steady"] * factor)])
    found = stats.compare(both, "steady", "here", "platform", by=("size", "mode"))
    assert set(found["platform"]) == {"there"}
    assert found.set_index("mode")["estimate"].to_dict() == pytest.approx(
        {"torch": 3, "linen": 0.5}
    )


def test_differences_are_means_over_repeats_and_then_environments():
    # 1 and 3 in A, 6 in B.
    row = only_row(stats.compare(table(EXAMPLE), "steady", "linen", contrast=stats.difference))
    assert row["estimate"] == pytest.approx((2 + 6) / 2)
    noise = (2 / 1) * (1 / 2 + 1) / 2
    error = (max((4**2) / 2, noise) / 2) ** 0.5
    assert row["low"] == pytest.approx(4 - 12.7062 * error, rel=1e-4)


def test_seconds_more_are_the_difference_of_the_geometric_means():
    row = only_row(stats.compare(table(EXAMPLE), "steady", "linen", contrast=stats.more_seconds))
    torch, linen = (8**0.5 * 8) ** 0.5, 2**0.5  # over the blocks that both have
    assert row["estimate"] == pytest.approx(torch - linen)


def test_the_interval_of_seconds_more_holds_the_truth_95_times_in_100():
    rng, hits, trials = np.random.default_rng(5), 0, 600
    env = np.repeat(list("ABCDEFGHIJ"), 3)
    for _ in range(trials):
        own = 0.3 * rng.standard_normal(10).repeat(3)  # what both modes pay in an environment
        noise = 0.1 * rng.standard_normal((2, 30))
        pairs = pd.DataFrame({"env_id": env, "baseline": 7 * np.exp(own + noise[0])})
        pairs["candidate"] = 9 * np.exp(own + noise[1])
        truth = 2 * np.exp(own.reshape(10, 3)[:, 0].mean())  # in these environments
        _, low, high = stats.more_seconds(pairs)
        hits += low <= truth <= high
    assert 0.935 <= hits / trials <= 1


# === Returns ====================================================================================
def cartpole(rng, shape):
    low = rng.random(shape) < 0.1
    return np.where(low, rng.uniform(400, 430, shape), rng.uniform(490, 500, shape))


def acrobot(rng, shape):
    stuck = rng.random(shape) < 0.1
    return np.where(stuck, -500.0, -80 - rng.exponential(20, shape))


def bimodal(rng, shape):
    low = rng.random(shape) < 0.45
    return np.where(low, 100, 400) + 5 * rng.standard_normal(shape)


def capped(rng, shape):
    return np.where(rng.random(shape) < 0.7, 500.0, rng.uniform(200, 500, shape))


MEDIANS = {  # of each distribution, from its quantiles
    cartpole: 490 + 10 * 0.4 / 0.9,
    acrobot: -80 - 20 * np.log(0.9 / 0.4),
    bimodal: 400 + 5 * special.ndtri(0.05 / 0.55),
    capped: 500.0,
}


@pytest.mark.parametrize("runs", [6, 10, 20])
def test_intervals_of_medians_hold_the_truth_95_times_in_100(runs):
    """Order statistics: which ones are looked up once, and then used in every trial."""
    _, low, high = stats.median_interval(np.arange(runs))
    rng = np.random.default_rng(6)
    for draw, median in MEDIANS.items():
        values = np.sort(draw(rng, (4000, runs)), axis=1)
        inside = (values[:, int(low)] <= median) & (median <= values[:, int(high)])
        assert inside.mean() >= 0.94, draw.__name__
    for values in rng.standard_normal((20, runs)):
        expected = (np.median(values), *np.sort(values)[[int(low), int(high)]])
        assert stats.median_interval(values) == pytest.approx(expected)


def test_too_few_values_have_no_interval_of_the_median():
    for runs in range(1, 6):
        estimate, low, high = stats.median_interval(np.arange(runs, dtype=float))
        assert estimate == (runs - 1) / 2 and np.isnan(low) and np.isnan(high)
    assert stats.median_interval(np.arange(6.0)) == (2.5, 0, 5)


def test_values_without_end_have_a_median_and_an_interval():
    endless = np.array([1.0, 2, 3, np.inf, np.inf, np.inf])
    assert stats.median_interval(endless) == (np.inf, 1, np.inf)
    assert stats.median_interval(endless[[0, 1, 2, 3, 4]]).estimate == 3


def welch(a, b, margin):
    """The 90% interval of the difference of means and the larger of both one-sided p-values."""
    n, m = len(a), len(b)
    va, vb = np.var(a, ddof=1) / n, np.var(b, ddof=1) / m
    error, freedom = np.sqrt(va + vb), (va + vb) ** 2 / (va**2 / (n - 1) + vb**2 / (m - 1))
    difference = np.mean(b) - np.mean(a)
    quantile = special.stdtrit(freedom, 0.95)
    least = special.stdtr(freedom, -(difference + margin) / error)
    most = special.stdtr(freedom, (difference - margin) / error)
    return difference - quantile * error, difference + quantile * error, max(least, most)


def test_equivalence_is_two_one_sided_welch_tests():
    rng, seen = np.random.default_rng(7), set()
    for _ in range(100):
        a = rng.normal(0, rng.uniform(0.2, 2), rng.integers(5, 12))
        b = rng.normal(rng.uniform(-3, 3), rng.uniform(0.2, 2), rng.integers(5, 12))
        result = stats.equivalence(a, b, 1.0)
        low, high, p_value = welch(a, b, 1.0)
        assert result[:3] == pytest.approx((b.mean() - a.mean(), low, high))
        assert (result.verdict == "equivalent") == (p_value < 0.05)
        assert (result.verdict == "different") == (low > 1 or high < -1)
        seen.add(result.verdict)
    assert seen == {"equivalent", "different", "undecided"}


def test_one_side_whose_runs_all_end_alike_is_tested_without_a_warning():
    cap, some = np.full(6, 500.0), np.array([500.0, 498, 500, 499, 500, 500])
    for a, b in ((cap, some), (some, cap)):
        low, high, _ = welch(a, b, 1.0)
        assert stats.equivalence(a, b, 25)[1:3] == pytest.approx((low, high))


def test_runs_that_all_end_alike_can_be_told_apart_or_not():
    same, far = np.full(5, 500.0), np.full(5, 400.0)
    assert stats.equivalence(same, same, 25) == (0, 0, 0, "equivalent")
    assert stats.equivalence(same, far, 25) == (-100, -100, -100, "different")


def test_fewer_than_five_runs_of_a_side_are_too_few():
    for a, b in [(4, 9), (9, 4)]:
        result = stats.equivalence(np.arange(a, dtype=float), np.arange(b, dtype=float), 100)
        assert result.verdict == "too few runs" and np.isnan(result.low)
    assert stats.equivalence(np.arange(5.0), np.arange(5.0), 100).verdict == "equivalent"


@pytest.mark.parametrize("runs", [5, 10])
def test_equivalence_at_the_margin_is_claimed_5_times_in_100(runs):
    rng, margin, trials = np.random.default_rng(8), 25.0, 1000

    def rate(draw, difference):
        pairs = draw(rng, (trials, 2, runs))
        verdicts = [stats.equivalence(a, b + difference, margin).verdict for a, b in pairs]
        return verdicts.count("equivalent") / trials

    assert rate(cartpole, margin) <= 0.065
    assert rate(lambda rng, shape: 10 * rng.standard_normal(shape), margin) <= 0.065
    assert rate(lambda rng, shape: 10 * rng.standard_normal(shape), 0.0) > 0.9


def test_welch():
    """As SciPy's by hand: means 2 and 4, variances 1 and 10 / 3, three and four values."""
    found = stats.welch(np.array([1.0, 2, 3]), np.array([2.0, 3, 5, 6]))
    assert found.estimate == 2
    error = 1 / 3 + 10 / 3 / 4
    freedom = error**2 / ((1 / 3) ** 2 / 2 + (10 / 12) ** 2 / 3)
    half = special.stdtrit(freedom, 0.975) * np.sqrt(error)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half))
    assert np.isnan(stats.welch(np.array([1.0]), np.array([1.0, 2])).low)

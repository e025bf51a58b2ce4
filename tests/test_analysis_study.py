"""What the tables say of time, on made-up runs whose truth is known."""

import numpy as np
import pandas as pd
import pytest
from made_up import CACHED, COMPILE, LINEN, NNX, TORCH, grid, only_bench, table

from analysis import bench, report, stats, study
from analysis.learning import load_environments
from analysis.render import Table

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

ENVS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")
KNOWN = load_environments()
# Startup and steady seconds; the compiled one overtakes the other after 1 + 12 / 1.5 iterations.
TWO = {COMPILE: (20.0, 0.5), TORCH: (8.0, 2.0)}
THREE = {LINEN: (6.0, 0.1), **TWO}


def by(frame, *names):
    """The rows of a table, by the values in the columns named."""
    rows = frame.to_dict("records")
    found = {tuple(row[x] for x in names) if len(names) > 1 else row[names[0]]: row for row in rows}
    assert len(found) == len(rows)
    return found


def geometric(runs, mode, value, envs):
    """The mean over environments of the mean over repeats, of logarithms, in plain loops."""
    means = []
    for env in envs:
        cell = runs[(runs["mode"] == mode) & (runs["env_id"] == env)]
        means.append(sum(np.log(x) for x in cell[value]) / len(cell))
    return np.exp(sum(means) / len(means))


# === The answer =================================================================================
def test_the_summary_equals_direct_computation():
    runs = grid(THREE, ENVS, repeats=3, noise=0.1)
    runs = runs[(runs["env_id"] == ENVS[0]) | (runs["repeat"] < 3)]  # the first counts no more
    found = by(study.summary(only_bench(runs), KNOWN), "mode")
    assert list(found) == [LINEN, COMPILE, TORCH]
    for mode, row in found.items():
        for value in ("startup", "steady", "process"):
            assert row[value] == pytest.approx(geometric(runs, mode, value, ENVS)), (mode, value)
        assert (row["size"], row["runs"], row["length"]) == ("small", 7, 100)
        assert row["environments"] == row["process_environments"] == 3
        for value in ("steady", "process"):
            assert row[f"{value}_estimate"] == pytest.approx(row[value] / found[LINEN][value])
    sides = runs[runs["mode"] == TORCH], runs[runs["mode"] == LINEN]
    torch, linen = (x.sort_values(["env_id", "repeat"])["steady"].to_numpy() for x in sides)
    logs = stats.mean_interval(np.log(torch / linen), sorted(runs[runs["mode"] == LINEN]["env_id"]))
    assert found[TORCH]["steady_low"] == pytest.approx(np.exp(logs.low))
    assert found[TORCH]["steady_high"] == pytest.approx(np.exp(logs.high))
    assert np.isnan(found[LINEN]["steady_low"])


def test_seconds_are_of_the_environments_that_all_modes_have():
    runs = grid(THREE, ENVS, repeats=2, noise=0.1)
    lacking = runs[~((runs["mode"] == TORCH) & (runs["env_id"] == ENVS[2]))]
    found = by(study.summary(only_bench(lacking), KNOWN), "mode")
    for mode, row in found.items():
        assert row["environments"] == 2
        assert row["steady"] == pytest.approx(geometric(runs, mode, "steady", ENVS[:2]))
    # A ratio is of all blocks that the two modes share.
    every = geometric(runs, COMPILE, "steady", ENVS) / geometric(runs, LINEN, "steady", ENVS)
    assert found[COMPILE]["steady_estimate"] == pytest.approx(every)


def test_environments_are_counted_that_have_a_steady_iteration_if_any_has():
    runs = grid(TWO, ENVS)
    short = runs.assign(steady=runs["steady"].where(runs["env_id"] != ENVS[0]))
    for frame, count in ((short, 2), (runs.assign(steady=np.nan), 3)):
        assert set(study.summary(only_bench(frame), KNOWN)["environments"]) == {count}


def test_modes_without_an_environment_in_common_are_not_compared():
    runs = pd.concat([grid({LINEN: (6.0, 0.1)}, ENVS[:1]), grid({TORCH: (8.0, 9.0)}, ENVS[1:])])
    made = only_bench(runs)
    found = by(study.summary(made, KNOWN), "mode")
    assert found[LINEN]["steady"] == pytest.approx(0.1)
    assert found[TORCH]["environments"] == 2
    assert "steady_low" not in found[TORCH] or np.isnan(found[TORCH]["steady_low"])
    for what in (study.lines, study.measured, study.crossings, study.decisions, study.memory):
        assert what(made).empty, what.__name__


def test_a_stray_run_does_not_take_the_environments_from_all_others():
    """A mode is left out where that leaves more pairs of modes to compare than its environments."""
    runs = grid(THREE, ENVS, repeats=2, noise=0.1)
    stray = grid({NNX: (6.0, 0.1)}, ENVS[:1])
    made, alone = only_bench(pd.concat([runs, stray])), only_bench(runs)
    found = by(study.summary(made, KNOWN), "mode")
    expected = by(study.summary(alone, KNOWN), "mode")
    for mode in THREE:
        assert found[mode] == pytest.approx(expected[mode], nan_ok=True)
    assert np.isnan(found[NNX]["steady"]) and found[NNX]["environments"] == 0
    assert found[NNX]["steady_estimate"] > 0 and np.isnan(found[NNX]["steady_low"])
    for what in (study.lines, study.decisions, study.measured):
        assert what(made).equals(what(alone)), what.__name__


def test_modes_share_environments_so_that_most_pairs_compare():
    def kept(**envs):
        rows = [{"mode": mode, "env_id": env} for mode, own in envs.items() for env in own]
        part = bench.shared(table(rows))
        return {"".join(sorted(set(x["env_id"]))) for _, x in part.groupby("mode")}, set(
            part["mode"]
        )

    assert kept(a="AB", b="AB") == ({"AB"}, {"a", "b"})
    assert kept(a="ABCD", b="ABCD", c="ABC") == ({"ABC"}, {"a", "b", "c"})  # 3 times 3 over 4
    assert kept(a="ABCD", b="ABCD", c="A") == ({"ABCD"}, {"a", "b"})  # 4 over 3 times 1
    assert kept(a="ABC", b="BCD", c="CDE") == ({"C"}, {"a", "b", "c"})
    assert kept(a="A", b="B", c="BC") == ({"B"}, {"b", "c"})
    assert kept(a="A", b="B") == (set(), set())
    assert kept(a="AB") == ({"AB"}, {"a"})


def test_sizes_are_kept_apart_in_every_table():
    small = grid(THREE, ENVS, repeats=2)
    slower = {mode: (startup, 17 * steady) for mode, (startup, steady) in THREE.items()}
    runs = pd.concat([grid(slower, ENVS[:1], repeats=2, size="large"), small])
    made = only_bench(runs.assign(peak_host_bytes=1.0))
    found = by(study.summary(made, KNOWN), "size", "mode")
    assert list(found) == [(size, mode) for size in ("small", "large") for mode in THREE]
    assert found["large", LINEN]["steady"] == pytest.approx(1.7)
    assert found["small", LINEN]["steady"] == pytest.approx(0.2)  # of 0.1, 0.2 and 0.4
    tables = (study.lines, study.measured, study.crossings, study.startups, study.trainings)
    for what in (*tables, study.decisions, study.memory):
        assert list(dict.fromkeys(what(made)["size"])) == ["small", "large"], what.__name__


def test_whole_trainings_are_of_the_commonest_length():
    """A tenth of the environments with five times the length is another training, not a mean."""
    usual = grid(THREE, ENVS, length=20)
    longer = grid(THREE, ENVS[:1], repeats=10, length=100)
    runs = pd.concat([usual[usual["env_id"] != ENVS[0]], longer])
    made = only_bench(runs)
    found = by(study.summary(made, KNOWN), "mode")
    assert found[TORCH]["length"] == 20
    assert (found[TORCH]["environments"], found[TORCH]["process_environments"]) == (3, 2)
    assert found[TORCH]["process"] == pytest.approx(geometric(usual, TORCH, "process", ENVS[1:]))
    rows = by(study.by_environment(made, "process"), "mode", "env_id")
    assert (TORCH, ENVS[0]) not in rows
    every = geometric(usual, TORCH, "process", ENVS[1:]) / geometric(
        usual, LINEN, "process", ENVS[1:]
    )
    assert rows[TORCH, study.EVERY]["estimate"] == pytest.approx(every)
    assert set(study.trainings(made)["length"]) == {20}


def test_resumed_runs_count_neither_for_durations_nor_for_the_length():
    runs = grid(THREE, ENVS[:1], repeats=2, length=20)
    stopped = grid(THREE, ENVS, repeats=9, length=50, resumed=True)
    durations = ["startup", "steady", "process", "imports", "setup", "first", "early"]
    stopped[durations] = np.nan
    with_them, without = only_bench(pd.concat([runs, stopped])), only_bench(runs)
    names = ["size", "mode", "startup", "steady", "length", "process", "environments"]
    assert study.summary(with_them, KNOWN)[names].equals(study.summary(without, KNOWN)[names])
    for what in (study.startups, study.trainings, study.lines, study.decisions):
        assert what(with_them).equals(what(without)), what.__name__


def test_one_environment_has_a_return_and_several_have_a_score():
    """The score is that of the table of scores: every environment weighs the same."""
    runs = grid({LINEN: (6.0, 0.1), TORCH: (8.0, 2.0)}, ENVS[:2], repeats=2)
    runs["final_return"] = np.where(runs["env_id"] == ENVS[0], 261.0, -80.0)  # scores 0.5 and 1
    extra = grid({LINEN: (6.0, 0.1)}, ENVS[:1], repeats=9).query("repeat > 2")
    lone = grid({LINEN: (6.0, 0.1)}, ENVS[:1], repeats=3, size="medium")
    lone["final_return"] = [100.0, 200, 300]
    runs = pd.concat([runs, extra.assign(final_return=261.0), lone])
    found = by(study.summary(only_bench(runs), KNOWN), "size", "mode")
    assert found["small", LINEN]["score"] == pytest.approx(0.75)
    assert np.isnan(found["small", LINEN]["return"])
    assert found["medium", LINEN]["return"] == 200
    torch_alone = runs[~((runs["mode"] == TORCH) & (runs["env_id"] == ENVS[1]))]
    found = by(study.summary(only_bench(torch_alone), KNOWN), "size", "mode")
    assert found["small", LINEN]["score"] == found["small", TORCH]["score"] == pytest.approx(0.5)


def test_a_startup_is_one_number_everywhere():
    runs = grid(THREE, ENVS, repeats=3, noise=0.3, batch_size=study.BUDGETS[0])
    made = only_bench(runs)
    expected = {mode: geometric(runs, mode, "startup", ENVS) for mode in THREE}
    lines = study.lines(made)
    first = lines[lines["iterations"] == 1]
    for frame in (study.summary(made, KNOWN), study.startups(made)):
        seconds = dict(zip(frame["mode"], frame["startup"], strict=True))
        assert seconds == pytest.approx(expected)
    assert dict(zip(first["mode"], first["estimate"], strict=True)) == pytest.approx(expected)
    for frame in (study.trainings(made), study.startups(made)):
        parts = frame[["imports", "setup", "first"]].sum(axis=1)
        assert dict(zip(frame["mode"], parts, strict=True)) == pytest.approx(expected)
    one = by(study.decisions(made), "environments", "budget")[study.EVERY, study.BUDGETS[0]]
    assert (one["iterations"], one["mode"]) == (1, LINEN)
    assert one["seconds"] == pytest.approx(expected[LINEN])


# === Time against iterations ====================================================================
def test_lines_are_exact_and_their_bands_those_of_the_logarithms():
    runs = grid(THREE, ENVS, repeats=2, noise=0.1)
    lines = study.lines(only_bench(runs))
    assert list(dict.fromkeys(lines["mode"])) == list(THREE)
    some = pd.DataFrame(lines.groupby("mode").nth([0, 30, -1]))
    for row in some.to_dict("records"):
        part = runs[runs["mode"] == row["mode"]]
        seconds = part["startup"] + (row["iterations"] - 1) * part["steady"]
        expected = stats.mean_interval(np.log(seconds).to_numpy(), part["env_id"])
        assert [row[x] for x in stats.Interval._fields] == pytest.approx(list(np.exp(expected)))
    assert lines["iterations"].max() == 1000
    longer = study.lines(only_bench(grid(THREE, length=2000)))
    assert longer["iterations"].max() == pytest.approx(6000)
    assert longer["low"].isna().all()  # of a single run


def test_what_is_drawn_is_of_the_environments_that_every_mode_has():
    """A crossing that is marked in the figure lies on its lines, whatever else was run."""
    dear = {mode: (9 * startup, steady) for mode, (startup, steady) in TWO.items()}
    runs = pd.concat([grid(THREE, ENVS[:1], repeats=2), grid(dear, ENVS[1:], repeats=2)])
    made = study.drawn(only_bench(runs))
    assert set(made.runs["env_id"]) == {ENVS[0]}
    assert study.lines(only_bench(runs)).equals(study.lines(made))
    cell = by(study.crossings(made), "sooner", "later")[TORCH, COMPILE]
    assert (cell["iterations"], cell["seconds"]) == pytest.approx((9, 24), rel=1e-3)
    every = by(study.crossings(only_bench(runs)), "sooner", "later")[TORCH, COMPILE]
    assert every["iterations"] > 10


def test_measured_trainings_are_of_the_length_that_all_reached():
    dearer = {mode: (startup, 3 * steady) for mode, (startup, steady) in TWO.items()}
    runs = pd.concat([grid(dearer, ENVS[:1], length=50), grid(TWO, ENVS[1:2], length=20)])
    rows = []
    for _, run in runs.iterrows():
        for i in range(int(run["num_iterations"])):
            elapsed = run["startup"] - run["imports"] + i * run["steady"]
            rows.append({"run": run["run"], "iteration": float(i), "time/elapsed": elapsed})
    found = by(study.measured(only_bench(runs, pd.DataFrame(rows))), "mode")
    for mode, (startup, steady) in TWO.items():
        assert found[mode]["iterations"] == 20
        expected = np.sqrt((startup + 19 * steady) * (startup + 19 * 3 * steady))
        assert found[mode]["seconds"] == pytest.approx(expected)


def test_measured_trainings_need_no_iterations_if_the_length_is_one():
    made = only_bench(grid(THREE, length=30))
    found = by(study.measured(made), "mode")
    assert {mode: row["seconds"] for mode, row in found.items()} == pytest.approx(
        {mode: startup + 29 * steady for mode, (startup, steady) in THREE.items()}
    )
    assert study.measured(only_bench(grid(THREE, length=30, steady=np.nan))).empty


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_crossing_is_where_the_lines_meet(repeats):
    # 20 + 0.5 (n - 1) = 8 + 2 (n - 1) at n = 9, after 24 seconds.
    [row] = study.crossings(only_bench(grid(TWO, repeats=repeats))).to_dict("records")
    assert (row["size"], row["sooner"], row["later"]) == ("small", TORCH, COMPILE)
    assert row["iterations"] == pytest.approx(9, rel=1e-3)
    assert row["seconds"] == pytest.approx(24, rel=1e-3)
    if repeats > 1:  # without noise
        assert (row["low"], row["high"]) == pytest.approx((9, 9), rel=1e-3)
    else:
        assert np.isnan(row["low"]) and np.isnan(row["high"])


def test_a_crossing_over_environments_is_where_the_mean_ratio_is_one():
    [row] = study.crossings(only_bench(grid(TWO, ENVS, repeats=2))).to_dict("records")
    n = row["iterations"] - 1
    factors = np.array([1, 2, 4])
    assert np.log((20 + 0.5 * factors * n) / (8 + 2 * factors * n)).mean() == pytest.approx(
        0, abs=1e-3
    )


@pytest.mark.parametrize("steady", [0.5, 0.6])
def test_parallel_and_parting_lines_do_not_cross(steady):
    modes = {LINEN: (6.0, 0.5), TORCH: (8.0, steady)}
    assert study.crossings(only_bench(grid(modes, repeats=3))).empty


def test_a_crossing_that_noise_does_not_rule_out_has_no_end():
    modes = {LINEN: (6.0, 1.0), TORCH: (20.0, 0.99)}
    runs = grid(modes, ENVS, repeats=3, noise=0.05, seed=1)
    [row] = study.crossings(only_bench(runs)).to_dict("records")
    assert row["low"] > 1 and np.isinf(row["high"])
    assert study.clear(pd.DataFrame([row])).empty
    alike = {LINEN: (6.0, 1.0), TORCH: (6.2, 0.5)}
    [row] = study.crossings(only_bench(grid(alike, ENVS, 3, noise=0.1, seed=3))).to_dict("records")
    assert row["low"] == 1 and np.isfinite(row["high"])
    assert study.clear(pd.DataFrame([row])).empty


def test_a_mode_run_in_fewer_blocks_does_not_spoil_other_pairs():
    runs = grid(TWO, ENVS, repeats=3, noise=0.05)
    once = grid({LINEN: (9.0, 0.4)}, ENVS[:1])
    pair = by(study.crossings(only_bench(runs)), "sooner", "later")
    found = by(study.crossings(only_bench(pd.concat([runs, once]))), "sooner", "later")
    assert found[TORCH, COMPILE] == pytest.approx(pair[TORCH, COMPILE])
    assert set(found) == {(TORCH, COMPILE), (TORCH, LINEN)}
    assert np.isnan(found[TORCH, LINEN]["low"])


def test_of_crossings_close_by_the_first_is_drawn():
    rows = [("small", 10, 20), ("small", 11, 21), ("small", 10, 60), ("large", 10, 20)]
    frame = pd.DataFrame(rows, columns=["size", "iterations", "seconds"])
    kept = study.apart(frame)
    assert list(kept.itertuples(index=False, name=None)) == [rows[0], *rows[2:]]
    assert study.apart(frame.head(0)).empty


def test_the_ends_of_a_crossing_are_found_on_wavy_curves_too():
    grid_, values = np.array([1.0, 10, 100, 1000]), np.array([1.0, -1, 1, -1])
    assert study.end_of(values > 0, values, grid_) == pytest.approx(10**2.5)
    assert study.end_of(values > 5, values, grid_) == 1
    assert np.isinf(study.end_of(-values > 0, -values, grid_))


def test_intervals_of_crossings_hold_the_truth_95_times_in_100():
    """Of one environment with five repeats; every trial is a size of its own, in one bench."""
    trials = 300
    rng = np.random.default_rng(4)
    modes = [mode for mode in TWO for _ in range(5 * trials)]
    runs = pd.DataFrame({"mode": modes})
    runs["size"] = np.tile(np.arange(trials).repeat(5), 2).astype(str)
    runs["repeat"] = np.tile(np.arange(5.0), 2 * trials)
    for i, name in enumerate(("startup", "steady")):
        noise = np.exp(0.1 * rng.standard_normal(len(runs)))
        runs[name] = runs["mode"].map({mode: x[i] for mode, x in TWO.items()}) * noise
    found = study.crossings(only_bench(table(runs)))
    assert len(found) == trials
    hits = (found["low"] <= 9) & (found["high"] >= 9)
    assert 0.92 <= hits.mean() <= 0.98


# === A decision by case =========================================================================
SIX = tuple("ABCDEF")


def test_decisions_name_the_mode_that_is_known_to_be_first():
    made = only_bench(grid(TWO, repeats=3, noise=0.001, batch_size=20_000))
    found = by(study.decisions(made), "budget")
    # 5, 50, 500 and 5000 iterations; the lines cross at 9.
    first = {budget: row["mode"] for budget, row in found.items()}
    assert list(first) == list(study.BUDGETS)
    assert list(first.values()) == [TORCH, COMPILE, COMPILE, COMPILE]
    assert found[study.BUDGETS[0]]["seconds"] == pytest.approx(8 + 4 * 2, rel=0.01)
    assert found[study.BUDGETS[3]]["seconds"] == pytest.approx(20 + 4999 * 0.5, rel=0.01)
    assert [row["ties"] for row in found.values()] == [[]] * 4
    assert {row["environments"] for row in found.values()} == {"CartPole-v1"}


def test_runs_too_short_for_a_steady_state_are_not_in_decisions():
    runs = grid(THREE, ENVS, repeats=2)
    short = (runs["mode"] == TORCH) & (runs["env_id"] == ENVS[2])
    cut = runs.assign(steady=runs["steady"].mask(short))
    assert study.decisions(only_bench(cut)).equals(study.decisions(only_bench(runs[~short])))


def test_a_budget_is_reached_by_the_last_iteration_it_takes():
    found = study.decisions(only_bench(grid(TWO, batch_size=8192)))
    assert found["iterations"].tolist() == [13, 123, 1221, 12208]


def test_decisions_name_the_modes_that_cannot_be_told_from_the_first():
    modes = {LINEN: (6.0, 0.1), NNX: (6.0, 0.1), TORCH: (60.0, 2.0)}
    found = study.decisions(only_bench(grid(modes, ENVS, repeats=3, noise=0.05)))
    for _, row in found.iterrows():
        assert {row["mode"], *row["ties"]} == {LINEN, NNX}


def test_without_any_interval_a_decision_has_no_ties():
    found = study.decisions(only_bench(grid(THREE)))
    assert len(found) == 4 and found["ties"].isna().all()


def test_a_mode_that_ran_once_is_not_ruled_out_and_hides_no_other():
    runs = pd.concat([grid(TWO, repeats=3, noise=0.01), grid({LINEN: (9.0, 3.0)})])
    found = study.decisions(only_bench(runs))
    assert [LINEN] in found["ties"].tolist()
    assert all(TORCH not in row["ties"] for _, row in found.iterrows() if row["mode"] == COMPILE)


def test_a_mode_without_a_block_in_common_is_not_ruled_out():
    other = grid({LINEN: (90.0, 30.0)}, repeats=2).assign(repeat=lambda x: x["repeat"] + 10)
    found = study.decisions(only_bench(pd.concat([grid(TWO, repeats=3, noise=0.01), other])))
    assert all(LINEN in ties for ties in found["ties"])


@pytest.mark.parametrize("case", ["one mode", "two batch sizes", "no batch size", "too short"])
def test_there_is_no_decision_without_a_choice_or_a_budget(case):
    runs = grid(TWO if case != "one mode" else {LINEN: (6.0, 0.1)}, repeats=2)
    if case == "two batch sizes":
        runs["batch_size"] = [1000, 1000, 2000, 2000]
    elif case != "one mode":
        runs["batch_size" if case == "no batch size" else "steady"] = np.nan
    assert study.decisions(only_bench(runs)).empty


def test_environments_are_classed_by_cost_from_six_on():
    made = only_bench(grid(THREE, SIX, repeats=2))
    assert study.cost_classes(made, "small") == {
        study.EVERY: list(SIX),
        "the 3 cheapest": list("ABC"),
        "the 3 costliest": list("DEF"),
    }
    assert list(study.cost_classes(only_bench(grid(THREE, SIX[:5])), "small")) == [study.EVERY]
    assert study.cost_classes(only_bench(grid(THREE, SIX[:1])), "small") == {"A": ["A"]}
    found = by(study.decisions(made), "environments", "budget")
    costs = {name: found[name, 10_000_000]["seconds"] for name in study.cost_classes(made, "small")}
    expected = [
        6 + 9999 * 0.1 * np.array([2.0**i for i in part]) for part in ((0, 1, 2), (3, 4, 5))
    ]
    cheap, dear = (np.exp(np.log(x).mean()) for x in expected)
    assert costs["the 3 cheapest"] == pytest.approx(cheap)
    assert costs["the 3 costliest"] == pytest.approx(dear)
    assert costs[study.EVERY] == pytest.approx(np.sqrt(cheap * dear))


def test_the_first_and_its_ties_hold_the_truly_first_95_times_in_100():
    """Eight scripts of which one is a little sooner: the luckiest of the others may look clear."""
    rng, hits, naive, trials = np.random.default_rng(5), 0, 0, 250
    index = pd.MultiIndex.from_product([list("ABCDEF"), [1, 2, 3]], names=["env_id", "repeat"])
    for _ in range(trials):
        logs = 0.1 * rng.standard_normal((8, len(index)))
        logs[0] -= 0.001
        found = {str(i): pd.DataFrame(x, index=index) for i, x in enumerate(logs)}
        first = study.first_done(found)
        hits += "0" in (first["mode"], *first["ties"])
        best = int(first["mode"])
        naive += best == 0 or stats.mean_interval(logs[0] - logs[best], index.droplevel(1)).low <= 0
    assert hits / trials >= 0.95
    assert naive < hits


# === By environment, phase, compile mode and platform ===========================================
def test_environments_come_by_their_cost_and_all_of_them_last():
    runs = grid({LINEN: (6.0, 0.1), TORCH: (8.0, 0.3)}, ("C", "A", "B"), repeats=2)
    shuffled = runs.sample(frac=1, random_state=1)
    lone = grid({LINEN: (6.0, 1.0), TORCH: (8.0, 2.0)}, ("A",), repeats=2, size="large")
    frame = study.by_environment(only_bench(pd.concat([lone, shuffled])), "steady")
    small = frame[frame["size"] == "small"]
    assert small["env_id"].tolist() == ["C", "A", "B", study.EVERY]
    assert small["estimate"].tolist() == pytest.approx([3] * 4)
    assert small["blocks"].tolist() == [2, 2, 2, 6]
    assert frame[frame["size"] == "large"]["env_id"].tolist() == ["A"]


def test_runs_too_short_for_a_steady_state_have_whole_trainings_by_environment():
    runs = grid(TWO, ENVS, repeats=2, length=4, steady=np.nan, early=np.nan)
    frame = study.by_environment(only_bench(runs), "process")
    assert set(frame["env_id"]) == {*ENVS, study.EVERY}
    assert study.by_environment(only_bench(runs), "steady").empty


def test_parts_of_startups_add_up_and_differences_are_those_of_the_column():
    runs = grid(THREE, ENVS, repeats=3, noise=0.2)
    dearer = runs["env_id"].map({ENVS[0]: 1, ENVS[1]: 3, ENVS[2]: 9})  # or all means are alike
    for name in ("imports", "setup", "first", "startup"):
        runs[name] *= dearer
    found = by(study.startups(only_bench(runs)), "mode")
    for mode, row in found.items():
        assert row["imports"] + row["setup"] + row["first"] == pytest.approx(row["startup"])
        assert row["startup"] == pytest.approx(geometric(runs, mode, "startup", ENVS))
        if mode != LINEN:
            assert row["estimate"] == pytest.approx(row["startup"] - found[LINEN]["startup"])
            assert row["low"] < row["estimate"] < row["high"]
    assert np.isnan(found[LINEN]["estimate"])


def test_a_part_that_some_runs_lack_is_not_shown():
    runs = grid(TWO, repeats=2)
    runs.loc[0, "imports"] = np.nan
    found = by(study.startups(only_bench(runs)), "mode")
    assert np.isnan(found[COMPILE]["imports"])
    assert found[COMPILE]["first"] == pytest.approx(10)
    assert found[TORCH]["imports"] == pytest.approx(2.4)


def test_trainings_are_their_parts_stacked():
    frame = study.trainings(only_bench(grid(THREE, ENVS, repeats=2, noise=0.1)))
    assert frame["mode"].tolist() == list(THREE)
    parts = frame[["imports", "setup", "first", "rest"]].sum(axis=1)
    assert parts.tolist() == pytest.approx(frame["process"].tolist())
    exact = by(study.trainings(only_bench(grid(TWO))), "mode")
    assert exact[TORCH]["rest"] == pytest.approx(99 * 2)
    assert study.trainings(only_bench(grid(TWO, process=np.nan))).empty


def phased(modes, **common):
    """Runs made to wait: the rollout is three quarters of an iteration, and of TORCH half."""
    runs = grid(modes, ENVS, repeats=2, sync=True, **common)
    share = np.where(runs["mode"] == TORCH, 0.5, 0.75)
    return runs.assign(
        rollout_steady=share * runs["steady"], update_steady=(1 - share) * runs["steady"]
    )


def test_phases_are_of_runs_made_to_wait_alone():
    runs = pd.concat([grid(THREE, ENVS, repeats=2), phased({LINEN: (6.0, 0.4), TORCH: (8.0, 2.0)})])
    runs["run"] = range(len(runs))
    made = only_bench(runs)
    assert not made.runs["sync"].any() and made.synced["sync"].all()
    found = by(study.phases(made), "mode")
    assert set(found) == {LINEN, TORCH}
    assert found[LINEN]["rollout"] == pytest.approx(0.75 * 0.4 * 2)
    assert found[LINEN]["share"] == pytest.approx(0.75)
    assert found[TORCH]["share"] == pytest.approx(0.5)
    assert found[TORCH]["rollout_estimate"] == pytest.approx(1 / 0.3)
    assert found[TORCH]["update_estimate"] == pytest.approx(1 / 0.1)
    assert study.phases(only_bench(grid(TWO))).empty


def compile_modes():
    """Every framework compiled and op by op, which takes as many times as long as its name says."""
    rows = [("linen", "jit", 1), ("linen", "none", 40), ("nnx", "cached_partial", 0.5)]
    rows += [("nnx", "jit", 1), ("nnx", "none", 60), ("torch", "none", 8), ("torch", "env.jit", 2)]
    rows += [("torch", "compile", 1), ("equinox", "jit", 1)]
    frame = pd.DataFrame(rows, columns=["framework", "compile_mode", "steady"])
    frame = frame.assign(first=4 / frame["steady"], mode="", script="")
    frame = pd.concat([frame.assign(repeat=i, env_id=env) for i in (1, 2) for env in "AB"])
    return table(frame.drop(columns=["mode", "script"]).assign(mode=""))


def test_op_by_op_takes_so_many_times_as_long_as_the_compiled_script():
    found = by(study.compiling(compile_modes()), "mode", "value")
    ratios = {mode: row["estimate"] for (mode, value), row in found.items() if value == "steady"}
    assert ratios == pytest.approx(
        {
            "linen none": 40,
            "nnx none": 60,
            "nnx cached_partial": 0.5,
            "torch none": 8,
            "torch env.jit": 2,
        }
    )
    assert found["torch none", "first"]["estimate"] == pytest.approx(1 / 8)
    assert found["torch none", "steady"]["compiled"] == "torch compile"
    assert found["nnx none", "steady"]["compiled"] == "nnx jit"
    assert {row["framework"] for row in found.values()} == {"linen", "nnx", "torch"}


def test_without_a_run_of_both_ways_nothing_is_said_of_compiling():
    runs = compile_modes()
    for part in (runs["compile_mode"] != "none", runs["compile_mode"] == "none"):
        found = study.compiling(runs[part])
        assert found.empty and "estimate" in found


def test_compile_modes_are_of_the_runs_with_more_modes():
    few, many = grid(TWO), grid(THREE, sync=True)
    assert study.most_modes(pd.concat([few, many]))["sync"].all()
    assert not study.most_modes(pd.concat([few.assign(sync=True), many.assign(sync=False)]))[
        "sync"
    ].any()


def test_platforms_are_compared_mode_by_mode_and_by_whole_trainings_too():
    here = grid(TWO, ENVS, repeats=2)
    there = grid(
        {COMPILE: (10.0, 1.0), TORCH: (24.0, 1.0)}, ENVS, repeats=2, platform="there", noise=0.01
    )
    found = by(study.contenders(pd.concat([here, there]), "platform", "here"), "value", "mode")
    assert {x: row["estimate"] for x, row in found.items() if x[0] != "process"} == pytest.approx(
        {
            ("startup", COMPILE): 0.5,
            ("startup", TORCH): 3,
            ("steady", COMPILE): 2,
            ("steady", TORCH): 0.5,
        },
        rel=0.02,
    )
    whole = np.log([(10 + 99 * x) / (20 + 99 * x / 2) for x in (1, 2, 4)]).mean()
    assert found["process", COMPILE]["estimate"] == pytest.approx(np.exp(whole), rel=0.02)
    assert found["steady", TORCH]["high"] < 0.52


def test_platforms_are_compared_within_each_set_of_hyperparameters():
    """Three times as long with few environments and a third with many is 1 on average: neither."""
    pace = {("here", 32): 1.0, ("there", 32): 3.0, ("here", 4096): 3.0, ("there", 4096): 1.0}
    parts = [
        grid({LINEN: (6.0, steady)}, repeats=2, platform=where, settings=f'{{"num_envs": {count}}}')
        for (where, count), steady in pace.items()
    ]
    found = by(study.contenders(pd.concat(parts), "platform", "here"), "settings", "value")
    assert found["num_envs 32", "steady"]["estimate"] == pytest.approx(3)
    assert found["num_envs 4096", "steady"]["estimate"] == pytest.approx(1 / 3)
    assert set(study.contenders(pd.concat(parts[:2]), "platform", "here")["settings"]) == {""}


def test_other_results_are_compared_on_the_same_platform_if_there_are_several():
    """A faster GPU beside the processor is no progress on either."""
    old, new = grid(TWO, repeats=2), grid(TWO, repeats=2, noise=0.001)
    quick = {mode: (startup / 9, steady / 9) for mode, (startup, steady) in TWO.items()}
    both = pd.concat([new, grid(quick, repeats=2, platform="GPU")])
    [table] = [x for x in report.against_section(both, old).blocks if isinstance(x, Table)][:1]
    assert table.frame["estimate"].tolist() == pytest.approx([1] * 6, rel=0.01)
    elsewhere = new.assign(platform="another name")
    [table] = [x for x in report.against_section(elsewhere, old).blocks if isinstance(x, Table)][:1]
    assert table.frame["estimate"].tolist() == pytest.approx([1] * 6, rel=0.01)


def test_platforms_that_share_nothing_have_an_empty_table():
    here, there = grid(TWO), grid(TWO, ("Z",), platform="there")
    found = study.contenders(pd.concat([here, there]), "platform", "here")
    assert found.empty and {"platform", "value", "estimate"} <= set(found)


# === Noise, memory, machines ====================================================================
def test_noise_is_the_slowest_over_the_fastest_in_the_worst_cell():
    runs = grid(TWO, ENVS, repeats=3)
    assert study.noise(only_bench(runs), "steady") == (1, 6)
    runs.loc[4, "steady"] *= 1.5
    runs.loc[5, "steady"] /= 1.2
    assert study.noise(only_bench(runs), "steady") == (pytest.approx(1.8), 6)
    worst, cells = study.noise(only_bench(grid(TWO, ENVS)), "steady")
    assert np.isnan(worst) and cells == 0


def test_memory_is_the_most_in_the_environments_that_all_modes_have():
    runs = grid(TWO, ENVS, repeats=2)
    runs["peak_host_bytes"] = np.arange(len(runs), dtype=float)
    runs = runs[~((runs["mode"] == COMPILE) & (runs["env_id"] == ENVS[2]))]
    found = by(study.memory(only_bench(runs)), "mode")
    assert {mode: row["peak_host_bytes"] for mode, row in found.items()} == {COMPILE: 3, TORCH: 9}
    assert study.memory(only_bench(grid(TWO))).empty
    stopped = runs.assign(resumed=True, peak_host_bytes=1e15, run=runs["run"] + "!")
    assert study.memory(only_bench(pd.concat([runs, stopped]))).equals(
        study.memory(only_bench(runs))
    )


def test_machines_are_counted_with_their_first_and_last_start():
    runs = pd.concat([grid(TWO, repeats=2), grid(TWO, torch="2.13")])
    runs["started"] = [f"2026-01-0{i + 1}" for i in range(len(runs))]
    found = by(study.machines(runs), "torch")
    assert {x: row["runs"] for x, row in found.items()} == {"": 4, "2.13": 2}
    assert (found[""]["first"], found[""]["last"]) == ("2026-01-01", "2026-01-04")


# === Benches ====================================================================================
def benches_of(*frames):
    runs = pd.concat(frames, ignore_index=True)
    return bench.benches(bench.Data(runs, pd.DataFrame({"run": []}), {}))


def test_a_bench_is_of_one_platform_and_one_set_of_hyperparameters():
    few, many = grid(TWO), grid(TWO, repeats=2, platform="there")
    other = grid(TWO, settings='{"num_envs": 64}', repeats=3)
    found = benches_of(few, many, other)
    assert [len(x.runs) for x in found] == [6, 4, 2]
    assert [x.title for x in found] == ["here, num_envs 64", "there", "here"]


def test_hyperparameters_of_strangers_may_be_any_text():
    texts = ("", "128", "lr=1", '{"num_envs": 64}')
    found = benches_of(*(grid(TWO, settings=x) for x in texts))
    titles = ["here", "here, settings 128", "here, settings lr=1", "here, num_envs 64"]
    assert sorted(x.title for x in found) == sorted(titles)


@pytest.mark.parametrize(
    ("wanted", "modes", "found"),
    [
        (None, THREE, LINEN),
        (TORCH, THREE, TORCH),
        ("absent", THREE, LINEN),
        (None, {CACHED: (1.0, 1.0)}, CACHED),
    ],
)
def test_the_baseline_is_the_one_wanted_or_linen_or_what_there_is(wanted, modes, found):
    more = grid({COMPILE: (20.0, 0.5)}, repeats=9).tail(8)
    runs = pd.concat([grid(modes), more.head(8 * (LINEN in modes))])
    assert only_bench(runs, baseline=wanted).baseline == found


def test_tables_come_by_size_environment_and_mode():
    frame = pd.DataFrame(
        {"size": ["9x9", "large", "small", "small"], "mode": [LINEN, *[TORCH] * 3]}
    )
    frame["env_id"] = ["B", "B", "B", "A"]
    found = bench.in_order(frame)
    assert found["size"].tolist() == ["small", "small", "large", "9x9"]
    assert found["env_id"].tolist() == ["B", "A", "B", "B"]  # as they came
    frame = pd.DataFrame({"mode": ["b", TORCH, "a", LINEN]})
    assert bench.in_order(frame)["mode"].tolist() == [LINEN, TORCH, "a", "b"]

"""Returns, scores, targets, sentences and anomalies, on made-up runs whose truth is known."""

import re

import numpy as np
import pandas as pd
import pytest
from made_up import CACHED, COMPILE, LINEN, NNX, TORCH, grid, only_bench

from analysis import anomalies, bench, learning, readings, runs, schema, study
from analysis.learning import Environment, load_environments

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

CARTPOLE, UMBRELLA, MOUNTAIN = "CartPole-v1", "UmbrellaChain-bsuite", "MountainCar-v0"
KNOWN = load_environments()


def by(frame, *names):
    """The rows of a table, by the values in the columns named."""
    rows = frame.to_dict("records")
    found = {tuple(row[x] for x in names) if len(names) > 1 else row[names[0]]: row for row in rows}
    assert len(found) == len(rows)
    return found


def returning(values, env=CARTPOLE, **common):
    """Runs with the final returns given for each mode, numbered from 1."""
    parts = []
    for mode, returns in values.items():
        part = grid({mode: (6.0, 0.1)}, (env,), repeats=len(returns), **common)
        parts.append(part.assign(final_return=np.array(returns, float)))
    return pd.concat(parts, ignore_index=True)


def metrics(frame, returns=None, loss=None, **columns):
    """Ten iterations of each run: a return and a loss by a function of the run's row and i.

    Without one, every run has losses of its own, and no returns. Iteration 0 compiles.
    """
    rows = []
    for own, (_, run) in enumerate(frame.iterrows()):
        for i in range(10):
            row = {"run": run["run"], "iteration": float(i), "global_step": 100.0 * (i + 1)}
            elapsed = run["setup"] + run["first"] + i * run["steady"]
            row |= {"time/iteration": run["steady"] if i else run["first"], "time/elapsed": elapsed}
            row["losses/entropy"] = loss(run, i) if loss else 0.5 + own
            row["charts/episodic_return"] = returns(run, i) if returns else np.nan
            rows.append(row | columns)
    return schema.complete(pd.DataFrame(rows), schema.ITERATIONS)


# === Environments ===============================================================================
def test_every_environment_is_fixed_in_advance_with_a_reason():
    table = pd.read_csv(learning.ENVIRONMENTS)
    assert len(KNOWN) == len(table) == 13
    assert table["reason"].str.contains("Margin: ").all()
    for env, known in KNOWN.items():
        span = known.reference - known.untrained
        assert 0 < known.margin <= 0.15 * abs(span), env
        assert np.isnan(known.target) or 0.1 <= learning.score(known.target, known) <= 1, env


def test_a_file_of_environments_of_ones_own(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("env_id,untrained,reference,target,margin\nMine-v0,0,10,,1\n")
    known = load_environments(path)["Mine-v0"]
    assert known[:2] == (0, 10) and np.isnan(known.target) and known.margin == 1
    for wrong in ("env_id,untrained\nMine-v0,0\n", "env_id,untrained,reference,target,margin\nx,a"):
        path.write_text(wrong)
        with pytest.raises(schema.SourceError, match=r"mine\.csv is not a CSV file with"):
            load_environments(path)


def test_a_score_is_the_way_from_untrained_to_the_reference():
    assert learning.score(261, KNOWN[CARTPOLE]) == pytest.approx(0.5)
    assert learning.score(-500, Environment(-500, -80, -100, 10)) == 0
    assert np.isnan(learning.score(1.0, None))
    assert np.isnan(learning.score(1.0, Environment(5, 5, 5, 1)))


# === The same numbers ===========================================================================
def modes_with(losses, repeats):
    """Runs of each mode in its repeats, whose losses follow from a number of the mode."""
    frames = [
        grid({mode: (6.0, 0.1)}, repeats=9).query("repeat in @which")
        for mode, which in repeats.items()
    ]
    frame = pd.concat(frames, ignore_index=True)
    return frame, metrics(frame, loss=lambda run, i: losses[run["mode"]] / run["repeat"] + i)


def test_modes_that_compute_the_same_are_found_where_only_some_seeds_overlap():
    losses = {LINEN: 1.0, NNX: 2.0, CACHED: 2.0, TORCH: 3.0}
    repeats = {LINEN: [1, 2], NNX: [1, 2, 3], CACHED: [3, 4], TORCH: [1]}
    frame, iterations = modes_with(losses, repeats)
    same = {LINEN: LINEN, NNX: NNX, CACHED: NNX, TORCH: TORCH}
    assert learning.identical(only_bench(frame, iterations)) == same
    apart = frame[(frame["mode"] != CACHED) | (frame["repeat"] != 3)]
    assert learning.identical(only_bench(apart, iterations))[CACHED] == CACHED
    swapped = learning.identical(only_bench(frame, iterations, baseline=CACHED))
    assert swapped == {CACHED: CACHED, LINEN: LINEN, NNX: CACHED, TORCH: TORCH}


def test_modes_that_differ_in_one_shared_seed_do_not_compute_the_same():
    frame, iterations = modes_with({LINEN: 1.0, NNX: 1.0}, {LINEN: [1, 2, 3], NNX: [1, 2, 3]})
    assert learning.identical(only_bench(frame, iterations))[NNX] == LINEN
    last = iterations["run"] == frame.loc[frame["mode"] == NNX, "run"].iloc[-1]
    iterations.loc[last & (iterations["iteration"] == 9), "losses/entropy"] += 1e-12
    assert learning.identical(only_bench(frame, iterations))[NNX] == NNX


def test_fingerprints_ignore_times_and_the_order_of_rows():
    frame, iterations = modes_with({LINEN: 1.0, NNX: 1.0}, {LINEN: [1], NNX: [1]})
    before = learning.fingerprints(only_bench(frame, iterations))
    assert before.nunique() == 1 and len(before) == 2
    times = [x for x in iterations if x.startswith("time/")] + ["charts/SPS"]
    for i, name in enumerate(times):
        iterations[name] = np.arange(20.0) + i
    shuffled = iterations.sample(frac=1, random_state=0)
    after = learning.fingerprints(only_bench(frame, shuffled))
    assert after.to_dict() == before.to_dict()


def test_returns_that_all_reach_a_cap_are_no_sign_of_the_same_computation():
    frame = grid({LINEN: (6.0, 0.1), TORCH: (8.0, 2.0)}, (MOUNTAIN,), repeats=2)
    iterations = metrics(frame, returns=lambda run, i: -200.0, loss=lambda run, i: np.nan)
    assert learning.identical(only_bench(frame, iterations))[TORCH] == TORCH


# === Returns and their equivalence ==============================================================
def test_returns_are_described_and_tested_against_the_baseline():
    rng = np.random.default_rng(0)
    values = {
        LINEN: 490 + rng.normal(0, 3, 6),
        NNX: 491 + rng.normal(0, 3, 6),
        COMPILE: 380 + rng.normal(0, 3, 6),
        TORCH: [500, 500, 500, 500, 400, 500],
        CACHED: [490, 490, 490],
    }
    found = by(learning.returns(only_bench(returning(values)), KNOWN), "mode")
    verdicts = {mode: row["verdict"] for mode, row in found.items()}
    assert verdicts == {
        LINEN: "",
        NNX: "equivalent",
        CACHED: "too few runs",
        COMPILE: "different",
        TORCH: "undecided",
    }
    row, mine = found[COMPILE], np.sort(values[COMPILE])
    assert row["mean"] == pytest.approx(mine.mean())
    assert row["difference"] == pytest.approx(mine.mean() - np.mean(values[LINEN]))
    assert row["difference_low"] < row["difference"] < row["difference_high"] < -25
    assert [row[x] for x in ("median", "low", "high")] == pytest.approx(
        [mine[2:4].mean(), mine[0], mine[5]]
    )
    assert (row["lowest"], row["highest"], row["runs"]) == (mine[0], mine[5], 6)
    assert row["margin"] == 25
    assert row["score"] == pytest.approx((mine.mean() - 22) / 478)
    assert np.isnan(found[LINEN]["difference"]) and np.isnan(found[CACHED]["low"])


def test_other_verdicts_say_why_nothing_is_tested():
    alike = returning({LINEN: [-200.0] * 6, TORCH: [-200.0] * 6}, MOUNTAIN)
    unknown = returning({LINEN: range(6), TORCH: range(6)}, "Unknown-v0")
    alone = returning({TORCH: range(6)}, "Acrobot-v1")
    found = by(
        learning.returns(only_bench(pd.concat([alike, unknown, alone])), KNOWN), "env_id", "mode"
    )
    assert found[MOUNTAIN, TORCH]["verdict"] == "all alike"
    assert found["Unknown-v0", TORCH]["verdict"] == "no margin"
    assert np.isnan(found["Unknown-v0", TORCH]["score"])
    assert found["Acrobot-v1", TORCH]["verdict"] == ""
    blank = {"Unknown-v0": Environment(0, 10, 5, np.nan)}
    found = by(learning.returns(only_bench(unknown), blank), "mode")
    assert found[TORCH]["verdict"] == "no margin"


def test_a_mode_that_computes_the_same_counts_once():
    values = np.linspace(400, 500, 6)
    frame = returning({LINEN: values[::-1], NNX: values, CACHED: values})
    iterations = metrics(frame, loss=lambda run, i: run["final_return"] + i)
    found = by(learning.returns(only_bench(frame, iterations), KNOWN), "mode")
    assert found[CACHED]["verdict"] == "as ppo_nnx"
    assert np.isnan(found[CACHED]["difference"])
    assert found[NNX]["verdict"] in ("equivalent", "undecided")
    wanted = by(learning.returns(only_bench(frame, iterations, CACHED), KNOWN), "mode")
    assert (wanted[CACHED]["verdict"], wanted[NNX]["verdict"]) == ("", "as ppo_nnx_cached")


def test_a_mode_is_tested_where_the_one_like_it_was_not_run():
    values = np.linspace(400, 500, 6)
    both = returning({LINEN: values + 1, NNX: values, CACHED: values})
    without = returning({LINEN: -values, CACHED: -values}, "Acrobot-v1")
    frame = pd.concat([both, without], ignore_index=True)
    iterations = metrics(frame, loss=lambda run, i: run["final_return"] + i)
    iterations.loc[iterations["run"].isin(without["run"]), "losses/entropy"] *= 2
    found = by(learning.returns(only_bench(frame, iterations), KNOWN), "env_id", "mode")
    assert found[CARTPOLE, CACHED]["verdict"] == "as ppo_nnx"
    assert np.isfinite(found["Acrobot-v1", CACHED]["difference"])


def test_one_wild_iteration_changes_no_verdict():
    """The margin is fixed: it was once a share of the returns seen, and -30 made all equivalent."""
    rng = np.random.default_rng(1)
    values = {LINEN: 0.86 + rng.normal(0, 0.1, 6), TORCH: 0.8 + rng.normal(0, 0.1, 6)}
    frame = returning(values, UMBRELLA)
    tame = metrics(frame, returns=lambda run, i: 0.8)
    wild = tame.copy()
    wild.loc[13, ["charts/episodic_return", "charts/episodic_return_min"]] = -30.0
    before, after = (learning.returns(only_bench(frame, x), KNOWN) for x in (tame, wild))
    assert before["verdict"].tolist() == ["", "undecided"]
    assert after.equals(before)


def test_returns_are_of_the_commonest_length_and_of_resumed_runs_too():
    usual = returning({LINEN: [1.0, 2.0, 3.0]}, length=20)
    longer = returning({LINEN: [100.0, 100.0]}, length=50)
    usual.loc[0, "resumed"] = True
    found = by(learning.returns(only_bench(pd.concat([usual, longer])), KNOWN), "mode")
    assert (found[LINEN]["runs"], found[LINEN]["mean"]) == (3, 2)
    nothing = only_bench(usual.assign(final_return=np.nan))
    assert learning.returns(nothing, KNOWN).empty and learning.scores(nothing, KNOWN).empty


def test_scores_weigh_every_environment_alike_however_many_runs_it_has():
    frame = pd.concat(
        [
            returning({LINEN: [500.0] * 10, TORCH: [261.0] * 10}),  # scores 1 and 0.5
            returning({LINEN: [0.0] * 2, TORCH: [0.25] * 2}, UMBRELLA),
            returning({LINEN: [7.0] * 9}, "Unknown-v0"),
        ]
    )
    found = by(learning.scores(only_bench(frame), KNOWN), "mode")
    assert found[LINEN]["score"] == pytest.approx(0.5)
    assert found[TORCH]["score"] == pytest.approx(0.375)
    assert found[TORCH]["estimate"] == pytest.approx(-0.125)
    assert found[TORCH]["environments"] == 2
    # Differences of -0.5 and 0.25, and 12.7062 times their error.
    assert found[TORCH]["low"] == pytest.approx(-0.125 - 12.7062 * 0.375, rel=1e-4)
    assert np.isnan(found[LINEN]["estimate"])


def test_scores_are_of_the_environments_that_all_modes_have():
    frame = pd.concat(
        [
            returning({LINEN: [500.0], TORCH: [261.0]}),
            returning({LINEN: [0.0]}, UMBRELLA),
            returning({LINEN: [500.0]}, size="large"),
        ]
    )
    found = by(learning.scores(only_bench(frame), KNOWN), "size", "mode")
    assert found["small", LINEN]["score"] == 1 and found["small", TORCH]["score"] == 0.5
    apart = frame[(frame["mode"] == TORCH) | (frame["env_id"] == UMBRELLA)]
    assert learning.scores(only_bench(apart), KNOWN).empty


# === Learning against seconds ===================================================================
def test_learning_curves_carry_a_return_on_and_begin_with_the_process():
    frame = returning({LINEN: [9.0]})
    seen = {2: 5.0, 7: 9.0}
    iterations = metrics(frame, returns=lambda run, i: seen.get(i, np.nan))
    found = learning.learning(only_bench(frame, iterations), "small")
    assert found["return"].tolist() == [5.0] * 5 + [9.0] * 3
    assert found["steps"].tolist() == [100.0 * i for i in range(3, 11)]
    assert found["seconds"].tolist() == pytest.approx([6 + 0.1 * i for i in range(2, 10)])
    assert set(found["run"]) == set(frame["run"])
    assert learning.learning(only_bench(frame, iterations), "large").empty


def reaching(hits, env=CARTPOLE):
    """Runs of each mode, of which each first has a return of 480 in the iteration given."""
    frame = returning({mode: [0.0] * len(x) for mode, x in hits.items()}, env)
    return frame, metrics(
        frame,
        returns=lambda run, i: 480.0 if i == hits[run["mode"]][int(run["repeat"]) - 1] else 100.0,
    )


def test_targets_are_first_reached_in_the_median_with_its_interval():
    frame, iterations = reaching({LINEN: [4, 2, 7, 9, 3, 5]})
    [row] = learning.targets(only_bench(frame, iterations), KNOWN).to_dict("records")
    assert (row["target"], row["runs"], row["reached"]) == (475, 6, 6)
    ends = 6 + 0.1 * np.array([4.5, 2, 9])  # the median iteration, the first and the last
    assert [row[x] for x in ("estimate", "low", "high")] == pytest.approx(list(ends))


def test_runs_that_never_reach_a_target_count_as_slower_than_all():
    never = 99
    hits = {LINEN: [1, 2, 3, never, never], TORCH: [1, 2, never, never, never], NNX: [never]}
    found = by(learning.targets(only_bench(*reaching(hits)), KNOWN), "mode")
    assert {x: (y["reached"], y["runs"]) for x, y in found.items()} == {
        LINEN: (3, 5),
        TORCH: (2, 5),
        NNX: (0, 1),
    }
    assert found[LINEN]["estimate"] == pytest.approx(6 + 0.1 * 3)
    assert np.isinf(found[TORCH]["estimate"]) and np.isinf(found[NNX]["estimate"])
    many = {LINEN: [1, 2, 3, 4, 5, 6, 7, never, never, never]}
    [row] = learning.targets(only_bench(*reaching(many)), KNOWN).to_dict("records")
    assert np.isfinite(row["low"]) and np.isinf(row["high"])


def test_runs_without_seconds_are_not_among_those_that_reach_a_target():
    frame, iterations = reaching({LINEN: [1] * 6})
    frame.loc[0, "imports"] = np.nan
    [row] = learning.targets(only_bench(frame, iterations), KNOWN).to_dict("records")
    assert (row["runs"], row["reached"]) == (5, 5) and np.isfinite(row["estimate"])


@pytest.mark.parametrize("case", ["never", "no target", "unknown", "no seconds", "resumed"])
def test_there_is_no_time_to_a_target_without_one_or_without_seconds(case):
    env = {"no target": "Asterix-MinAtar", "unknown": "Unknown-v0"}.get(case, CARTPOLE)
    frame, iterations = reaching({LINEN: [99 if case == "never" else 1] * 6}, env)
    if case == "no seconds":
        frame["imports"] = np.nan
    frame["resumed"] = case == "resumed"
    assert learning.targets(only_bench(frame, iterations), KNOWN).empty


# === Sentences on learning ======================================================================
def learned(frame, iterations=None):
    made = only_bench(frame, iterations)
    return readings.learned(learning.returns(made, KNOWN), made)


def test_verdicts_are_counted_and_differences_named():
    rng = np.random.default_rng(2)
    close = {mode: 490 + rng.normal(0, 2, 6) for mode in (LINEN, NNX)}
    text = learned(returning(close | {TORCH: 400 + rng.normal(0, 2, 6)}))
    assert "Against ppo_linen, final returns are equivalent in 1 and different in 1 of" in text
    assert "of 2 comparisons, by two one-sided tests at 5%" in text
    assert "Different: ppo_torch in CartPole-v1 (small)." in text
    lone = learned(returning(close))
    assert "equivalent in 1 of 1 comparison, by" in lone
    assert "ifferent:" not in lone


def test_what_was_not_tested_is_said():
    few = {LINEN: [1.0, 2, 3], TORCH: [1.0, 2, 3], NNX: [1.0, 2]}
    assert (
        learned(returning(few)) == "Final returns could not be tested, for want of 5 runs a side."
    )
    mixed = returning({LINEN: range(6), TORCH: range(6), NNX: [1.0, 2]})
    assert "1 comparison could not be tested, for want of 5 runs a side." in learned(mixed)
    alike = {LINEN: [-200.0] * 6, TORCH: [-200.0] * 6, NNX: [-200.0] * 6}
    text = learned(returning(alike, MOUNTAIN))
    assert text == "In 2 comparisons all runs returned the same: nothing to tell apart."
    unknown = returning({LINEN: range(6), TORCH: range(6)}, "Unknown-v0")
    assert learned(unknown) == "No margin was fixed for Unknown-v0, so nothing is tested there."


def test_modes_that_compute_the_same_are_named():
    frame = returning({LINEN: range(6), NNX: range(1, 7), CACHED: range(1, 7)})
    text = learned(frame, metrics(frame, loss=lambda run, i: run["final_return"] + i))
    assert "the same numbers come out of ppo_nnx_cached and ppo_nnx: they count once." in text
    assert "of 1 comparison" in text


def test_no_episode_ended_only_where_iterations_say_so():
    frame = returning({LINEN: [np.nan], TORCH: [np.nan]})
    assert learned(frame) == "These data have no returns."
    assert learned(frame, metrics(frame)) == "These data have no returns."
    assert learned(frame, metrics(frame, **{"charts/episodes": 3.0})) == learned(frame)
    ended = metrics(frame, **{"charts/episodes": 0.0})
    assert learned(frame, ended) == "No episode ended in CartPole-v1."


def test_environments_without_a_return_are_named_beside_others():
    frame = pd.concat(
        [
            returning({LINEN: range(6)}),
            returning({LINEN: [np.nan]}, "Freeway-MinAtar"),
            returning({LINEN: [np.nan]}, MOUNTAIN),
        ]
    )
    text = learned(frame, metrics(frame[frame["env_id"] == MOUNTAIN], **{"charts/episodes": 0.0}))
    assert "No episode ended in MountainCar-v0." in text
    assert "These data have no returns of Freeway-MinAtar." in text
    assert CARTPOLE not in text


# === Sentences on durations =====================================================================
TWO = {COMPILE: (20.0, 0.5), TORCH: (8.0, 2.0)}
THREE = {LINEN: (6.0, 0.1), **TWO}
ENVS = (CARTPOLE, "Acrobot-v1", MOUNTAIN)


def steady(made):
    columns = ("steady_estimate", "steady_low", "steady_high")
    return readings.ratios(study.summary(made, KNOWN), made.baseline, "an iteration", columns)


def test_ratios_have_the_direction_and_the_numbers_of_the_table():
    modes = {LINEN: (6.0, 1.0), NNX: (6.0, 1.0), COMPILE: (9.0, 0.5), TORCH: (8.0, 4.0)}
    made = only_bench(grid(modes, ENVS, repeats=3, noise=0.02))
    [text] = steady(made)
    assert text.startswith("Relative to ppo_linen, an iteration takes ")
    for mode, low, high in [(COMPILE, 0.45, 0.55), (TORCH, 3.8, 4.2)]:
        found = re.search(rf"([\d.]+) \[([\d.]+), ([\d.]+)\] (times as long )?in {mode}\b", text)
        assert found
        assert low < float(found[2]) <= float(found[1]) <= float(found[3]) < high
    assert text.count("times as long") == 1
    *_, alike = text.removesuffix(".").split(". ")
    assert re.findall(r"(\w+) \([\d.]+ \[[\d.]+, [\d.]+\]\)", alike) == ["ppo_nnx"]
    assert "times as long" not in alike


def test_without_an_interval_nothing_is_claimed():
    single = only_bench(grid(THREE))
    assert steady(single) == []
    assert readings.crossings(single) == []
    lone = only_bench(grid({LINEN: (6.0, 1.0)}, ENVS, repeats=3))
    assert "steady_low" not in study.summary(lone, KNOWN) or steady(lone) == []


def test_every_size_has_a_sentence_of_its_own():
    large = grid(THREE, ENVS, repeats=2, size="large")
    made = only_bench(pd.concat([large, grid(THREE, ENVS, repeats=2)]))
    first, second = steady(made)
    assert "an iteration with the small network takes" in first
    assert "an iteration with the large network takes" in second
    assert len(readings.crossings(made)) == 2


def test_crossings_name_who_overtakes_whom_and_when():
    made = only_bench(grid(TWO, ENVS[:1], repeats=3, noise=0.001, length=50))
    [text] = readings.crossings(made)
    assert re.fullmatch(
        "ppo_torch_compile starts later than ppo_torch and has overtaken it after 9.0. "
        r"\[[89].\d+, 9.\d+\] iterations, 24.\d s\.",
        text,
    )
    [beyond] = readings.crossings(only_bench(grid(TWO, repeats=3, length=9)))
    assert beyond.endswith("24.0 s.")
    [beyond] = readings.crossings(only_bench(grid(TWO, repeats=3, length=8)))
    assert beyond.endswith("24.0 s, extrapolated.")


def test_noise_is_of_repeats_or_of_modes_that_compute_the_same():
    frame = grid({LINEN: (6.0, 1.0)}, repeats=2)
    frame.loc[0, "steady"] = 1.7
    text = readings.noise(only_bench(frame))
    assert "the slowest took up to 1.70 times as long" in text
    loss = {LINEN: 0.0, NNX: 1.0, CACHED: 1.0}
    for nnx, cached in ((1.0, 1.56), (1.56, 1.0)):
        frame = grid({LINEN: (6.0, 1.0), NNX: (6.0, nnx), CACHED: (6.0, cached)})
        iterations = metrics(frame, loss=lambda run, i: loss[run["mode"]])
        text = readings.noise(only_bench(frame, iterations))
        assert text.startswith("Each script ran once, so there is no interval and no claim. ppo_nn")
        assert "one took 1.56 times as long as of the other" in text
        assert "computed" not in readings.noise(only_bench(frame))


def test_single_runs_of_several_environments_are_not_said_to_have_no_interval():
    text = readings.noise(only_bench(grid(TWO, ENVS)))
    assert text.startswith("Each script ran once in an environment and network")
    assert "no interval" not in text
    short = grid(TWO, repeats=3, steady=np.nan)
    assert readings.noise(only_bench(short)) == ""


def test_startups_are_later_or_sooner_than_the_baselines():
    modes = {LINEN: (10.0, 1.0), NNX: (10.0, 1.0), COMPILE: (20.0, 1.0), TORCH: (8.0, 1.0)}
    text = readings.startup(only_bench(grid(modes, ENVS, repeats=3, noise=0.01)))
    later = re.search(r"ppo_torch_compile starts (\S+) \[(\S+), (\S+)\] s later", text)
    sooner = re.search(r"ppo_torch starts (\S+) \[(\S+), (\S+)\] s sooner", text)
    assert later and sooner and re.match(r"[A-Z][a-z ]+ ppo_linen, ", text)
    for found, seconds in ((later, 10), (sooner, 2)):
        low, high = float(found[2]), float(found[3])
        assert low < float(found[1]) < high
        assert low == pytest.approx(seconds, rel=0.2) and high == pytest.approx(seconds, rel=0.2)
    assert "ppo_nnx starts" not in text
    assert "s later" not in readings.startup(only_bench(grid(modes)))


def test_late_compiling_is_seen_in_the_first_iterations():
    frame = grid(TWO, repeats=3)
    text = readings.late_compiling(frame)
    assert text.startswith("Iterations 1-7 take at most 1.00 times") and "ends with" in text
    frame["early"] *= np.where(frame["mode"] == COMPILE, 3, 1)
    expected = "Iterations 1-7 still take longer than later ones: 3.00 times as long in"
    assert readings.late_compiling(frame) == f"{expected} ppo_torch_compile."
    assert "too short" in readings.late_compiling(frame.assign(steady=np.nan))
    assert readings.startup(only_bench(grid(TWO, early=np.nan))) == ""


def test_phases_give_the_rollouts_share_and_both_ratios():
    frame = grid({LINEN: (6.0, 1.0), TORCH: (8.0, 4.0)}, ENVS, repeats=2, sync=True)
    share = np.where(frame["mode"] == TORCH, 0.5, 0.8)
    frame["rollout_steady"], frame["update_steady"] = (
        x * frame["steady"] for x in (share, 1 - share)
    )
    text = readings.phases(only_bench(frame))
    assert "a steady iteration's time, 50% in ppo_torch and 80% in ppo_linen." in text
    assert "a rollout takes 2.50 [2.50, 2.50] times as long in ppo_torch" in text
    assert "an update takes 10.0 [10.0, 10.0] times as long in ppo_torch" in text


# === Words ======================================================================================
def test_numbers_and_intervals_are_readable():
    values = (0, 0.5, 1.2345, 99.96, 1234.5, -200, np.nan, np.inf)
    assert [readings.number(x) for x in values] == [
        *("0.00", "0.500", "1.23", "100", "1,234", "-200", "-", "-")
    ]
    assert readings.interval(2.0, 1.0, 3.0) == "2.00 [1.00, 3.00]"
    assert readings.interval(2.0, np.nan, np.nan) == "2.00"
    assert readings.interval(2.0, 1e-9, 1e9).startswith("2.00 [<0.001, >1")
    assert readings.interval(50_000, 20_000, np.inf) == "50,000 [20,000, no end]"
    assert readings.interval(50_000, 20_000, 80_000) == "50,000 [20,000, 80,000]"
    assert readings.interval(np.inf, 1.0, np.inf) == "-"


def test_counts_are_singular_or_plural():
    assert readings.counted([1], "run") == "1 run"
    assert readings.counted([3, 1], "run") == "1 to 3 runs"
    assert readings.counted([0], "run") == "0 runs"
    assert readings.counted([np.nan], "run") == "an unknown number of runs"
    assert readings.join(["a"]) == "a"
    assert readings.join(["a", "b", "c"], "or") == "a, b or c"
    assert readings.some([str(i) for i in range(12)], 10).endswith("8, 9 and 2 more")


def test_steps_and_seconds_are_short():
    assert [readings.compact(x) for x in (100_000, 1_000_000, 819_200)] == ["100k", "1M", "819,200"]
    seconds = [readings.duration(x) for x in (8.8, 119, 156, 14_760)]
    assert seconds == ["8.80 s", "119 s", "2.60 min", "4.10 h"]


def test_scope_and_time_spent_are_counted():
    one = grid({LINEN: (6.0, 0.1)}, length=20)
    expected = (
        "1 run of 1 script in 1 environment, 1 network size, 1 repeat each, of 20 iterations."
    )
    assert readings.scope(one) == expected
    many = pd.concat([grid(THREE, ENVS, repeats=2), one.assign(size="large", process=np.nan)])
    expected = "19 runs of 3 scripts in 3 environments, 2 network sizes, 1 to 2 repeats each, of 20"
    assert readings.scope(many) == f"{expected} to 100 iterations."
    assert readings.spent(many).startswith("18 runs took ")
    assert readings.spent(one) == "1 run took 7.90 s in all."


def test_resumed_runs_are_named():
    frame = grid(TWO)
    assert readings.resumed(frame) == ""
    frame.loc[0, "resumed"] = True
    name = frame.loc[0, "run"]
    expected = "1 run was stopped and resumed, and counts for learning but not for durations or"
    assert readings.resumed(frame) == f"{expected} memory: {name}."
    assert readings.resumed(frame.assign(resumed=True)).startswith(
        "2 runs were stopped and resumed"
    )


def test_verdicts_on_new_results_are_counted():
    rows = [(1.1, 1.2), (1.1, 1.3), (0.5, 0.9), (0.9, 1.1), (np.nan, np.nan)]
    text = readings.verdicts(pd.DataFrame(rows, columns=["low", "high"]))
    assert "Over 5 durations" in text and "by chance" in text
    counts = "slower in 2, faster in 1, no clear difference in 1 and no interval, so no claim in 1."
    assert counts in text
    alone = readings.verdicts(pd.DataFrame(rows[-1:], columns=["low", "high"]))
    assert "Over 1 duration of" in alone and "by chance" not in alone


# === Limits =====================================================================================
def limits(*frames, iterations=None):
    frame = pd.concat(frames, ignore_index=True)
    empty = schema.complete(pd.DataFrame(), schema.ITERATIONS)
    several = bench.benches(runs.Data(frame, empty if iterations is None else iterations, {}))
    return "\n".join(readings.limits(frame, several))


def test_limits_name_what_was_run_little_or_not_at_all():
    text = limits(grid(TWO))
    for sentence in (
        "Each cell ran once, so there is no interval within an environment.",
        "Only CartPole-v1 was run: other environments may differ.",
        "No medium or large network was run.",
        "No run has --sync-for-timing, so rollout and update have no times.",
        "All runs are from one platform: here.",
    ):
        assert sentence in text
    assert "without a failure" not in text and "8 iterations" not in text
    few = pd.concat([grid(TWO, ENVS, repeats=3), grid({LINEN: (6.0, 1.0)}, size="large")])
    assert "Some cells have 1 repeat only" in limits(few)
    assert "The large network was run in CartPole-v1 only." in limits(few)
    assert "Runs of 8 iterations or fewer have no steady state." in limits(grid(TWO, steady=np.nan))


def test_limits_say_what_repeats_cannot_see():
    text = limits(returning({LINEN: range(10), TORCH: range(3)}))
    assert "Even 10 runs without a failure to learn may hide that up to 26% fail" in text
    assert "Even 1 run without a failure" in limits(returning({LINEN: [1.0]}))


def test_limits_name_environments_that_not_every_script_has():
    assert "Seconds" not in limits(grid(TWO, ENVS)) and "too few" not in limits(grid(TWO, ENVS))
    some = grid(THREE, ENVS).query("mode != @TORCH or env_id != @CARTPOLE")
    expected = "Seconds and decisions are over the 2 of 3 environments that scripts share."
    assert expected in limits(some)
    stray = grid({NNX: (6.0, 1.0)}, ENVS[:1])
    text = limits(grid(THREE, ENVS), stray)
    assert "ppo_nnx was run in too few environments to be among the seconds and decisions." in text
    assert "scripts share" not in text
    apart = [grid({LINEN: (6.0, 1.0)}, ENVS[:1]), grid({TORCH: (8.0, 2.0)}, ENVS[1:])]
    assert "No environment has two scripts: seconds do not compare." in limits(*apart)
    there = [x.assign(platform="there", run=x["run"] + "!") for x in apart]
    assert "two scripts of there: seconds" in limits(grid(TWO, ENVS), *there)
    assert "share" not in limits(grid({LINEN: (6.0, 1.0)}, ENVS))
    large = grid({NNX: (6.0, 1.0)}, ENVS[:1], size="large")
    both = limits(grid(THREE, ENVS), grid(THREE, ENVS, size="large"), large)
    assert "seconds and decisions with the large network." in both
    some["run"] += " large"
    assert "decisions with the large network are over" in limits(some.assign(size="large"), some)


# === Anomalies ==================================================================================
def found(frame, iterations, **left_out):
    return anomalies.find(runs.Data(frame, iterations, left_out))


def test_clean_runs_have_no_anomaly_however_wide_their_intervals():
    frame = grid(THREE, ENVS, repeats=2, noise=0.3)
    assert found(frame, metrics(frame)) == {}
    assert found(frame, metrics(frame.head(0))) == {}


def test_every_kind_of_anomaly_is_named():
    frame = grid({LINEN: (6.0, 0.1), TORCH: (8.0, 2.0)}, repeats=4)
    iterations = metrics(frame)
    names = frame["run"].tolist()

    def of(i, first=0):
        return (iterations["run"] == names[i]) & (iterations["iteration"] >= first)

    frame.loc[0, ["load", "cores"]] = 9.5, 2
    frame.loc[1, "steady"] = 0.13
    frame.loc[2, "commit"] = "b" * 40 + "-dirty"
    frame.loc[3, "torch"] = "2.13"
    iterations.loc[of(4, 7), "losses/entropy"] = np.nan
    iterations.loc[of(5, 5) & (iterations["iteration"] == 5), "time/iteration"] = 60.0
    iterations.loc[of(6, 9), "time/iteration"] = 3.0
    kinds = found(frame, iterations, broken="no run.json")
    assert kinds == {
        "Left out": ["broken: no run.json"],
        "Diverged": [f"{names[4]}: no loss is a number from iteration 7 on"],
        "Slow iterations": [f"{names[5]}: slow iteration 5 (60.0 s), perhaps compiling again"],
        "Outliers": [f"{names[1]}: its steady iteration takes 1.30 times its cell's median"],
        "Made under load": [f"{names[0]}: 9.5 processes wanted its 2 cores as it started"],
        "Several versions: commits": ["unknown", "b" * 40 + "-dirty"],
        "Several versions: torch": ["unknown", "2.13"],
        "Uncommitted changes": ["1 run made with files changed since the commit"],
    }


def test_a_run_whose_steady_iterations_are_uneven_is_named():
    frame = grid({LINEN: (6.0, 0.1)})
    rows = metrics(frame)
    more = pd.concat([rows, rows.assign(iteration=rows["iteration"] + 10)], ignore_index=True)
    more["time/iteration"] = 0.1
    assert found(frame, more) == {}
    more.loc[19, "time/iteration"] = 0.5
    [line] = found(frame, more)["Uneven runs"]
    assert "mean of the steady iterations is 1.33 times their median" in line


def test_a_cell_of_two_has_no_outlier_and_resumed_runs_are_none():
    frame = grid({LINEN: (6.0, 0.1)}, repeats=2)
    frame.loc[1, "steady"] = 0.9
    assert found(frame, metrics(frame)) == {}
    frame = grid({LINEN: (6.0, 0.1)}, repeats=5)
    frame.loc[4, ["steady", "resumed", "load", "cores"]] = 0.9, True, 99, 2
    assert found(frame, metrics(frame.head(4))) == {}


def test_runs_that_diverge_at_once_are_named_but_not_a_table_without_losses():
    frame = grid(TWO)
    iterations = metrics(frame, loss=lambda run, i: np.nan if run["mode"] == TORCH else 0.5)
    [line] = found(frame, iterations)["Diverged"]
    assert line.endswith("no loss is a number from iteration 0 on") and line.startswith(TORCH)
    assert found(frame, metrics(frame, loss=lambda run, i: np.nan)) == {}


@pytest.mark.parametrize("margin", ["0", "-1", "1e-320", "1e308", "x", ""])
def test_a_file_of_environments_with_a_margin_that_cannot_be_is_one_sentence(tmp_path, margin):
    path = tmp_path / "mine.csv"
    path.write_text(f"\ufeffenv_id,untrained,reference,target,margin\nA,0,1,,{margin}\n")
    if margin == "":
        assert np.isnan(learning.load_environments(path)["A"].margin)
        return
    with pytest.raises(schema.SourceError, match=r"mine\.csv"):
        learning.load_environments(path)

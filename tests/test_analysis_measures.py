"""Which runs may be compared, and what they say of time, against plain NumPy and old reports."""

from functools import cache

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from made_up import COMPILE, LINEN, NNX, TORCH, by, data_of, grid, only_bench, table

from analysis import learning, measures, stats, tables
from analysis.runs import load

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

ENVS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")
# Startup and steady seconds; the compiled one overtakes the other after 1 + 12 / 1.5 iterations.
TWO = {COMPILE: (20.0, 0.5), TORCH: (8.0, 2.0)}
THREE = {LINEN: (6.0, 0.1), **TWO}
ALL = ("startup", "steady", "process")


def lines(modes=TWO, *args, **more):
    """A grid in which torch compiles in one mode and is eager in the other."""
    runs = grid(modes, *args, **more)
    return runs.assign(compile_mode=np.where(runs["mode"] == TORCH, "env.jit", "compile"))


def geometric(runs, mode, value, envs):
    """The mean over environments of the mean over repeats, of logarithms, in plain loops."""
    means = []
    for env in envs:
        cell = runs[(runs["mode"] == mode) & (runs["env_id"] == env)]
        means.append(sum(np.log(x) for x in cell[value]) / len(cell))
    return np.exp(sum(means) / len(means))


def measured(runs, values=ALL, names=("mode",), **more):
    return by(measures.measure(runs, values, LINEN, **more), *names)


# === Means and ratios ===========================================================================
def test_means_and_ratios_equal_direct_computation():
    runs = grid(THREE, ENVS, repeats=3, noise=0.1)
    runs = runs[(runs["env_id"] == ENVS[0]) | (runs["repeat"] < 3)]  # the first counts no more
    found = measured(runs)
    assert list(found) == [LINEN, COMPILE, TORCH]
    for mode, row in found.items():
        for value in ALL:
            assert row[value] == pytest.approx(geometric(runs, mode, value, ENVS))
            assert row[f"{value}_estimate"] == pytest.approx(row[value] / found[LINEN][value])
        assert (row["size"], row["runs"], row["length"]) == ("small", 7, 100)
    sides = runs[runs["mode"] == TORCH], runs[runs["mode"] == LINEN]
    torch, linen = (x.sort_values(["env_id", "repeat"])["steady"].to_numpy() for x in sides)
    logs = stats.mean_interval(np.log(torch / linen), sorted(sides[1]["env_id"]))
    ends = [found[TORCH][f"steady_{x}"] for x in ("low", "high")]
    assert ends == pytest.approx(list(np.exp(logs[1:])))
    assert np.isnan(found[LINEN]["steady_low"])


def test_a_stray_run_does_not_take_the_environments_from_all_others():
    runs = grid(THREE, ENVS, repeats=2, noise=0.1)
    found = measured(pd.concat([runs, grid({NNX: (6.0, 0.1)}, ENVS[:1])], ignore_index=True))
    alone = measured(runs)
    assert all(found[mode] == pytest.approx(alone[mode], nan_ok=True) for mode in THREE)
    assert np.isnan(found[NNX]["steady"])
    assert found[NNX]["steady_environments"] == 0
    lacking = runs[~((runs["mode"] == TORCH) & (runs["env_id"] == ENVS[2]))]
    for mode, row in measured(lacking).items():
        assert row["steady_environments"] == 2
        assert row["steady"] == pytest.approx(geometric(runs, mode, "steady", ENVS[:2]))


@pytest.mark.parametrize(
    ("envs", "kept", "modes"),
    [
        (("ABCD", "ABCD", "ABC"), "ABC", "012"),  # 3 times 3 over 4
        (("ABCD", "ABCD", "A"), "ABCD", "01"),  # 4 over 3 times 1
        (("ABC", "BCD", "CDE"), "C", "012"),
        (("A", "B"), "", ""),
        (("AB",), "AB", "0"),
    ],
)
def test_modes_share_environments_so_that_most_pairs_compare(envs, kept, modes):
    rows = [{"mode": str(i), "env_id": env} for i, own in enumerate(envs) for env in own]
    part = measures.shared(table(rows))
    assert "".join(sorted(set(part["env_id"]))) == kept
    assert "".join(sorted(set(part["mode"]))) == modes


def test_modes_without_an_environment_in_common_have_seconds_and_no_ratio():
    parts = [grid({LINEN: (6.0, 0.1)}, ENVS[:1]), grid({TORCH: (8.0, 9.0)}, ENVS[1:])]
    found = measured(pd.concat(parts, ignore_index=True))
    assert found[LINEN]["steady"] == pytest.approx(0.1)
    assert found[TORCH]["steady_environments"] == 2
    assert np.isnan(found[TORCH]["steady_estimate"])


def test_whole_trainings_are_of_the_commonest_length_and_sizes_are_kept_apart():
    """A tenth of the environments with five times the length is another training, not a mean."""
    usual = grid(THREE, ENVS, length=20)
    longer = grid(THREE, ENVS[:1], repeats=10, length=100)
    large = grid({LINEN: (6.0, 1.7)}, size="large")
    parts = [usual[usual["env_id"] != ENVS[0]], longer, large]
    found = measured(pd.concat(parts, ignore_index=True), names=("size", "mode"))
    assert list(found) == [*(("small", x) for x in THREE), ("large", LINEN)]
    row = found["small", TORCH]
    assert (row["length"], row["steady_environments"], row["process_environments"]) == (20, 3, 2)
    assert row["process"] == pytest.approx(geometric(usual, TORCH, "process", ENVS[1:]))
    assert found["large", LINEN]["steady"] == pytest.approx(1.7)


def test_resumed_runs_and_all_but_a_programs_first_agent_count_for_no_duration():
    runs = grid(THREE, ENVS[:1], repeats=2, length=20)
    stopped = grid(THREE, ENVS, repeats=9, length=50, resumed=True, peak_host_bytes=1e15)
    others = grid(THREE, ENVS, repeats=5, length=50, agent=1.0)
    every = pd.concat([runs, stopped, others], ignore_index=True)
    pd.testing.assert_frame_equal(
        measures.measure(every, ALL, LINEN), measures.measure(runs, ALL, LINEN)
    )
    assert measures.memory(only_bench(every)).empty


def test_parts_of_startups_add_up_and_differences_are_those_of_the_column():
    runs = grid(THREE, ENVS, repeats=3, noise=0.2)
    dearer = runs["env_id"].map({ENVS[0]: 1, ENVS[1]: 3, ENVS[2]: 9})  # or all means are alike
    for name in (*measures.PARTS, "startup"):
        runs[name] *= dearer
    found = by(measures.startups(only_bench(runs)), "mode")
    for mode, row in found.items():
        assert sum(row[x] for x in measures.PARTS) == pytest.approx(row["startup"])
        assert row["startup"] == pytest.approx(geometric(runs, mode, "startup", ENVS))
        more = np.nan if mode == LINEN else row["startup"] - found[LINEN]["startup"]
        assert row["estimate"] == pytest.approx(more, nan_ok=True)
    runs.loc[(runs["mode"] == TORCH) & (runs["repeat"] == 1), "imports"] = np.nan
    found = by(measures.startups(only_bench(runs)), "mode")
    assert np.isnan(found[TORCH]["imports"])
    assert found[COMPILE]["imports"] > 0


# === Break-even =================================================================================
@pytest.mark.parametrize("repeats", [1, 3])
def test_a_crossing_is_where_the_lines_meet(repeats):
    # 20 + 0.5 (n - 1) = 8 + 2 (n - 1) at n = 9, after 24 seconds.
    [row] = measures.crossings(only_bench(lines(repeats=repeats))).to_dict("records")
    assert (row["size"], row["sooner"], row["later"]) == ("small", TORCH, COMPILE)
    assert (row["estimate"], row["seconds"]) == pytest.approx((9, 24), rel=1e-3)
    ends = (9, 9) if repeats > 1 else (np.nan, np.nan)  # without noise; of one run there is none
    assert (row["low"], row["high"]) == pytest.approx(ends, rel=1e-3, nan_ok=True)


def test_a_crossing_over_environments_is_where_the_mean_ratio_is_one():
    [row] = measures.crossings(only_bench(lines(TWO, ENVS, repeats=2))).to_dict("records")
    n = row["estimate"] - 1
    factors = np.array([1, 2, 4])
    ratios = (20 + 0.5 * factors * n) / (8 + 2 * factors * n)
    assert np.log(ratios).mean() == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    "modes",
    [
        {TORCH: (8.0, 2.0), COMPILE: (20.0, 2.5)},  # never
        {TORCH: (8.0, 2.0), COMPILE: (8000.0, 1.0)},  # beyond ten times the measured length
        {TORCH: (8.0, 2.0), LINEN: (30.0, 0.001)},  # of two frameworks
        {NNX: (8.0, 2.0), "ppo_nnx_vmap": (30.0, 0.001)},  # both compiled
    ],
)
def test_lines_that_do_not_cross_within_reach_or_are_no_pair_have_no_crossing(modes):
    runs = lines(modes, repeats=3)
    runs["framework"] = runs["mode"].str.split("_").str[1]
    assert measures.crossings(only_bench(runs)).empty


def test_a_crossing_that_noise_does_not_rule_out_has_no_end():
    runs = lines({COMPILE: (20.0, 0.9), TORCH: (6.0, 1.0)}, ENVS, repeats=3, noise=0.1, seed=1)
    [row] = measures.crossings(only_bench(runs)).to_dict("records")
    assert row["low"] > 1
    assert np.isinf(row["high"])


# === Compile modes, platforms, memory ===========================================================
def test_op_by_op_takes_so_many_times_as_long_as_the_compiled_script():
    rows = [("linen", "jit", 1), ("linen", "none", 40), ("nnx", "cached_partial", 0.5)]
    rows += [("nnx", "jit", 1), ("nnx", "none", 60), ("torch", "none", 8), ("torch", "env.jit", 2)]
    rows += [("torch", "compile", 1), ("equinox", "jit", 1)]
    frame = pd.DataFrame(rows, columns=["framework", "compile_mode", "steady"])
    frame = frame.assign(first=4 / frame["steady"], mode="", script="")
    frame = pd.concat([frame.assign(repeat=i, env_id=env) for i in (1, 2) for env in "AB"])
    runs = table(frame.reset_index(drop=True))
    found = by(measures.compiling(only_bench(runs)), "mode")
    expected = {"linen none": 40, "nnx none": 60, "nnx cached_partial": 0.5}
    expected |= {"torch none": 8, "torch env.jit": 2}
    assert {x: y["steady_estimate"] for x, y in found.items()} == pytest.approx(expected)
    assert found["torch none"]["first_estimate"] == pytest.approx(1 / 8)
    assert found["torch none"]["compiled"] == "torch compile"
    assert found["nnx none"]["compiled"] == "nnx jit"
    assert measures.compiling(only_bench(runs[runs["compile_mode"] != "none"])).empty


def test_platforms_are_compared_mode_by_mode_within_each_set_of_hyperparameters():
    """Three times as long with few environments and a third with many is 1 on average: neither."""
    pace = {("here", 32): 1.0, ("there", 32): 3.0, ("here", 4096): 3.0, ("there", 4096): 1.0}
    parts = [
        grid({LINEN: (6.0, steady)}, repeats=2, platform=where, settings=f'{{"num_envs": {count}}}')
        for (where, count), steady in pace.items()
    ]
    runs = pd.concat(parts, ignore_index=True)
    found = by(measures.contenders(runs, "platform", "here"), "settings", "value")
    assert found["num_envs 32", "steady"]["estimate"] == pytest.approx(3)
    assert found["num_envs 4096", "steady"]["estimate"] == pytest.approx(1 / 3)
    apart = pd.concat([grid(TWO), grid(TWO, ("Z",), platform="there")], ignore_index=True)
    assert measures.contenders(apart, "platform", "here").empty


def test_memory_is_the_most_in_the_environments_that_all_modes_have():
    runs = grid(TWO, ENVS, repeats=2)
    runs["peak_host_bytes"] = np.arange(len(runs), dtype=float)
    runs = runs[~((runs["mode"] == COMPILE) & (runs["env_id"] == ENVS[2]))]
    found = by(measures.memory(only_bench(runs)), "mode")
    assert {mode: row["peak_host_bytes"] for mode, row in found.items()} == {COMPILE: 3, TORCH: 9}


# === Benches ====================================================================================
def titles(*frames):
    found = measures.benches(data_of(pd.concat(frames, ignore_index=True)))
    return [x.title for x in found], [len(x.runs) for x in found]


def test_a_bench_is_of_one_platform_and_one_set_of_hyperparameters():
    few, many = grid(TWO), grid(TWO, repeats=2, platform="there")
    other = grid(TWO, settings='{"num_envs": 64}', repeats=3)
    assert titles(few, many, other) == (["here, num_envs 64", "there", "here"], [6, 4, 2])
    texts = ("", "128", "lr=1", '{"num_envs": 64}')  # a stranger's may be any text
    expected = ["here", "here, settings 128", "here, settings lr=1", "here, num_envs 64"]
    assert sorted(titles(*(grid(TWO, settings=x) for x in texts))[0]) == sorted(expected)
    runs = pd.concat([grid(THREE), grid({COMPILE: (20.0, 0.5)}, repeats=3).tail(2)])
    assert [only_bench(runs, baseline=x).baseline for x in (None, TORCH)] == [LINEN, TORCH]
    assert only_bench(runs[runs["mode"] != LINEN], baseline="absent").baseline == COMPILE


@pytest.mark.parametrize("factor", [1.0, 1.2, 0.8])
def test_two_starts_of_a_machine_are_two_platforms_if_one_scripts_time_differs(factor):
    """The second start's CartPole takes that much longer in one script, all else is alike."""
    first = grid(THREE, ENVS, repeats=5, noise=0.02, boot="a", started="2026-01-01")
    second = grid(THREE, ENVS, repeats=5, noise=0.02, seed=1, boot="b", started="2026-01-02")
    slower = (second["mode"] == TORCH) & (second["env_id"] == ENVS[0])
    second.loc[slower, "steady"] *= factor
    second["repeat"] += 5
    third = grid(THREE, ENVS, repeats=1, seed=2, noise=0.5, boot="c", started="2026-01-03")
    unknown = grid(THREE, ENVS, repeats=5, boot="")  # of which nothing can be said
    found, _ = titles(first, second, third.assign(repeat=99.0), unknown.assign(repeat=77.0))
    assert found == (["here"] if factor == 1 else ["here", "here, boot b"])


# === What the reports of the old code said ======================================================
@cache
def bench_of(study):
    return measures.benches(load(ROOT / "studies" / study))[0]


@pytest.mark.parametrize(
    ("study", "name", "row"),
    [
        ("peers", "answer", "ppo_nnx 10 5.10 39.8 1.04 [0.94, 1.16] 9.21 1.057 [1.002, 1.114]"),
        ("peers", "startup", "ppo_nnx 1.57 1.42 2.11 5.10 0.277 [0.062, 0.492] 45.4"),
        ("peers", "returns", "ppo_nnx 10 479 493 [440, 500] 12.7 [-24.1, 49.4] 25.0 undecided"),
        ("peers", "targets", "ppo_nnx 475 10 of 10 6.71 [6.46, 7.73]"),
        ("cpu/sync", "phases", "ppo_nnx 5.59 53.0 1.45 [0.89, 2.36] 1.33 [0.77, 2.30]"),
        ("cpu/gymnasium", "cells", "ppo_torch 3 6.38 316 5.8 [1.7, 20.4] 13.0 1.65 [0.62, 4.34]"),
        ("dqn", "last_returns", "dqn_torch 5 493 [482, 505] -2.9 [-14.4, 8.5] 5 499 [497, 501]"),
        ("cpu", "break_even", "medium ppo_torch ppo_torch_compile 54.1 [23.2, no end] 59.1 s"),
        ("cpu/modes", "compile_modes", "ppo_nnx_cached 0.906 0.931 ppo_nnx"),
        ("cpu", "memory", "small ppo_nnx 1,056"),
    ],
)
def test_a_studys_tables_have_the_numbers_that_they_had(study, name, row):
    """The second row as a reader has it and, of some, every number to 1e-9."""
    bench = bench_of(study)
    made = tables.make(name, bench, learning.load_environments())
    assert " ".join(made.cells.iloc[1]).endswith(row)
    path = ROOT / f"tests/golden/{study.replace('/', '-')}-{name}.csv"
    if not path.exists():
        return
    old = pd.read_csv(path, keep_default_na=False, na_values=[""])
    assert set(old) <= set(made.frame)
    assert len(made.frame) == len(old)
    numbers = list(old.select_dtypes("number"))
    keys = [x for x in ("size", "env_id", "mode") if x in old]
    new = made.frame.set_index(keys).loc[old.set_index(keys).index, numbers]
    np.testing.assert_allclose(new.astype(float), old[numbers].astype(float), rtol=1e-9)

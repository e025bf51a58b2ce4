"""Selection of comparable runs, and mean durations, checked against NumPy and golden files."""

from functools import cache

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from made_up import COMPILE, ENVS, LINEN, NNX, TORCH, by, data_of, grid, only_experiment

from analysis import measures, tables
from analysis.runs import load

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

TWO = {COMPILE: (20.0, 0.5), TORCH: (8.0, 2.0)}  # startup and time per iteration, in seconds
THREE = {LINEN: (6.0, 0.1)} | TWO
ALL = ("startup", "steady", "process")


def geometric(runs, mode, value, envs):
    """Return the geometric mean over repeats, then over environments, in plain loops."""
    means = []
    for env in envs:
        cell = runs[(runs["mode"] == mode) & (runs["env_id"] == env)]
        means.append(sum(np.log(x) for x in cell[value]) / len(cell))
    return np.exp(sum(means) / len(means))


def measured(runs, *names):
    return by(measures.summarize(runs, ALL, LINEN), *names, "mode")


# === Means and ratios ===========================================================================
def test_means_and_ratios_equal_direct_computation():
    runs = grid(THREE, ENVS, repeats=3, noise=0.1)
    # The environments have 3, 2 and 2 repeats, but equal weights.
    runs = runs[(runs["env_id"] == ENVS[0]) | (runs["repeat"] < 3)]
    found = measured(runs)
    assert list(found) == [LINEN, COMPILE, TORCH]
    for mode, row in found.items():
        for value in ALL:
            assert row[value] == pytest.approx(geometric(runs, mode, value, ENVS))
            assert row[f"{value}_estimate"] == pytest.approx(row[value] / found[LINEN][value])
        assert (row["size"], row["runs"], row["length"]) == ("small", 7, 100)
    assert np.isnan(found[LINEN]["steady_low"])


def test_a_stray_run_does_not_reduce_the_common_environments():
    runs = grid(THREE, ENVS, repeats=2, noise=0.1)
    found = measured(pd.concat([runs, grid({NNX: (6.0, 0.1)}, ENVS[:1])], ignore_index=True))
    alone = measured(runs)
    assert all(found[mode] == pytest.approx(alone[mode], nan_ok=True) for mode in THREE)
    assert np.isnan(found[NNX]["steady"])
    assert found[NNX]["steady_environments"] == 0
    lacking = runs[~((runs["mode"] == TORCH) & (runs["env_id"] == ENVS[2]))]
    found = measured(lacking)
    for mode, row in found.items():
        assert row["steady_environments"] == 2
        assert row["steady"] == pytest.approx(geometric(runs, mode, "steady", ENVS[:2]))
        assert row["steady_estimate"] == pytest.approx(row["steady"] / found[LINEN]["steady"])


def test_parts_of_the_startup_weight_environments_equally():
    """Imports take 30% of the start-up in three runs, and 60% in a run in another environment."""
    runs = grid({LINEN: (10.0, 0.1)}, ENVS[:2], repeats=3)
    runs = runs[(runs["env_id"] == ENVS[0]) | (runs["repeat"] == 1)]
    runs.loc[runs["env_id"] == ENVS[1], ["imports", "first"]] = (6.0, 2.0)
    [row] = measures.startups(only_experiment(runs)).to_dict("records")
    assert [row[x] for x in measures.PARTS] == pytest.approx([4.5, 2.0, 3.5])


def test_resumed_runs_and_later_agents_of_a_program_have_no_durations():
    runs = grid(THREE, ENVS[:1], repeats=2, length=20)
    stopped = grid(THREE, ENVS, repeats=9, length=50, resumed=True)
    others = grid(THREE, ENVS, repeats=5, length=50, agent=1.0)
    every = pd.concat([runs, stopped, others], ignore_index=True)
    pd.testing.assert_frame_equal(
        measures.summarize(every, ALL, LINEN), measures.summarize(runs, ALL, LINEN)
    )


def test_crossings_of_eager_and_compiled_scripts_of_one_framework():
    def crossings(modes):
        runs = grid(modes, repeats=3)
        runs["framework"] = runs["mode"].str.split("_").str[1]
        runs["compile_mode"] = np.where(runs["mode"] == TORCH, "env.jit", "compile")
        return measures.crossings(only_experiment(runs)).to_dict("records")

    [row] = crossings(TWO)  # 20 + 0.5 (n - 1) = 8 + 2 (n - 1) at n = 9, after 24 seconds
    assert (row["size"], row["sooner"], row["later"]) == ("small", TORCH, COMPILE)
    assert [row[x] for x in ("estimate", "low", "high")] == pytest.approx([9] * 3, rel=1e-3)
    assert row["seconds"] == pytest.approx(24, rel=1e-3)
    assert crossings({TORCH: (8.0, 2.0), COMPILE: (20.0, 2.5)}) == []  # they never cross
    assert crossings({TORCH: (8.0, 2.0), COMPILE: (8000.0, 1.0)}) == []  # they cross too late
    assert crossings({TORCH: (8.0, 2.0), LINEN: (30.0, 0.001)}) == []  # different frameworks
    assert crossings({NNX: (8.0, 2.0), "ppo_nnx_vmap": (30.0, 0.001)}) == []  # both compiled


# === Platforms and experiments ==================================================================
def test_platforms_are_compared_separately_for_each_set_of_hyperparameters():
    """One platform is 3x as slow with few environments and 3x as fast with many."""
    pace = {("here", 32): 1.0, ("there", 32): 3.0, ("here", 4096): 3.0, ("there", 4096): 1.0}
    parts = [
        grid({LINEN: (6.0, steady)}, repeats=2, platform=where, settings=f'{{"num_envs": {count}}}')
        for (where, count), steady in pace.items()
    ]
    runs = pd.concat(parts, ignore_index=True)
    found = by(measures.contenders(runs, "platform", "here"), "settings", "value")
    assert found["num_envs 32", "steady"]["estimate"] == pytest.approx(3)
    assert found["num_envs 4096", "steady"]["estimate"] == pytest.approx(1 / 3)


def titles(*frames):
    found = measures.experiments(data_of(pd.concat(frames, ignore_index=True)))
    return [x.title for x in found], [len(x.runs) for x in found]


def test_an_experiment_has_one_platform_and_one_set_of_hyperparameters():
    few, many = grid(TWO), grid(TWO, repeats=2, platform="there")
    other = grid(TWO, settings='{"num_envs": 64}', repeats=3)
    assert titles(few, many, other) == (["here, num_envs 64", "there", "here"], [6, 4, 2])
    runs = pd.concat([grid(THREE), grid({COMPILE: (20.0, 0.5)}, repeats=3).tail(2)])
    assert [only_experiment(runs, baseline=x).baseline for x in (None, TORCH)] == [LINEN, TORCH]
    assert only_experiment(runs[runs["mode"] != LINEN], baseline="absent").baseline == COMPILE
    # The default baseline is the first script, even if a different script has more runs.
    modes = {"ppo_continuous_linen": (6.0, 0.1), "ppo_continuous_torch": (9.0, 0.4)}
    assert only_experiment(
        pd.concat([grid(modes), grid(modes, repeats=3).tail(2)])
    ).baseline == min(modes)


# === Golden files ===============================================================================
@cache
def experiment_of(folder):
    return measures.experiments(load(folder))[0]


@pytest.mark.parametrize(
    ("study", "name", "row"),
    [
        (
            "golden/peers",
            "answer",
            "ppo_nnx 10 6.69 82.4 0.99× [0.94, 1.06] 15.1 1.02× [0.97, 1.07]",
        ),
        ("golden/peers", "startup", "ppo_nnx 2.22 1.71 2.76 6.69 0.266 [-0.199, 0.730] 86.8"),
        (
            "golden/peers",
            "returns",
            "ppo_nnx 10 480 500 [419, 500] 13.0 [-26.9, 52.9] 25.0 undecided",
        ),
        ("golden/peers", "targets", "ppo_nnx 475 10 of 10 10.0 [9.2, 11.4]"),
        ("golden/cpu/sync", "phases", "ppo_nnx 5.87 71.9 1.16× [1.11, 1.21] 1.02× [0.96, 1.08]"),
        (
            "golden/cpu/gymnasium",
            "cells",
            "ppo_torch 3 7.10 302 3.53× [3.06, 4.07] 12.9 1.49× [1.42, 1.58]",
        ),
        (
            "../studies/dqn",
            "last_returns",
            "5 497 [491, 502] 0.478 [-5.985, 6.940] 5 500 [500, 500]",
        ),
        ("golden/cpu", "break_even", "medium ppo_torch ppo_torch_compile 25.5 [18.5, 41.3] 43.4"),
        ("golden/cpu/modes", "compile_modes", "ppo_torch ppo_torch_compile 1.93× 0.227×"),
        ("golden/cpu", "memory", "small ppo_nnx 920"),
    ],
)
def test_tables_match_the_golden_files(study, name, row):
    """Compare the second row as printed and, for some tables, every number to 1e-9.

    golden/ also contains the runs, because new measurements may replace the runs in studies/.
    """
    made = tables.make(name, experiment_of(ROOT / "tests" / study))
    assert " ".join(made.cells.iloc[1]).endswith(row)
    path = ROOT / "tests" / study / f"{name}.csv"
    if not path.exists():
        return
    old = pd.read_csv(path, keep_default_na=False, na_values=[""])
    assert set(old) <= set(made.frame)
    assert len(made.frame) == len(old)
    numbers = list(old.select_dtypes("number"))
    keys = [x for x in ("size", "env_id", "mode") if x in old]
    new = made.frame.set_index(keys).loc[old.set_index(keys).index, numbers]
    np.testing.assert_allclose(new.astype(float), old[numbers].astype(float), rtol=1e-9)

"""The grid, statistics, tables and figures of the returns study, and how its data is gathered."""

from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from made_up import grid, run_info, write_run
from running import parse

from analysis.page import Text
from analysis.runs import Data, load, save
from bench import plan
from bench.arguments import parse_args
from studies.returns import pack, study

LINEN, TORCH = study.LINEN, study.TORCH
CARTPOLE = "CartPole-v1"


# === Grid =======================================================================================
def listed(pattern):
    """Return the runs of the study that --only selects."""
    args = parse_args(["returns", "--only", pattern])
    runs = plan.expand({"returns": plan.read_study("returns")}, args)
    return [run for run in runs if args.only.search(run.key)]


@pytest.mark.parametrize("script", ["continuous_linen_gymnasium", "sac_linen_gymnasium"])
def test_the_flags_in_the_grid_are_the_mujoco_preset(script):
    _, file, *flags = listed(f"HalfCheetah-v5.*__{script}__")[0].command
    name = file.rpartition("/")[2].removesuffix(".py")
    found = asdict(parse(name, *flags))
    preset = asdict(parse(name, "mujoco"))
    for own in ("seed", "total_timesteps", "runs_dir", "run_name"):
        del found[own], preset[own]
    assert found == preset


def test_the_runs_are_listed_seed_by_seed_and_resume():
    runs = listed("continuous_(linen|torch)_gymnasium__488it")
    assert [run.repeat for run in runs if run.is_resumable] == sorted(12 * list(range(1, 11)))


# === Statistics =================================================================================
def test_the_interquartile_mean_ignores_outliers():
    values = np.array([-1e9, -1e9, 1.0, 2, 3, 4, 5, 6, 1e9, 1e9])
    found = study.bootstrapped(study.iqm, values)
    assert found.estimate == 3.5 and found.low < 3.5 < found.high


def test_samples_are_resampled_separately():
    """If both samples are constant, every bootstrap difference is the same."""
    found = study.bootstrapped(study.iqm_difference, np.full(6, 10.0), np.full(9, 25.0))
    assert found == (15, 15, 15)


def test_a_few_seeds_have_no_interval():
    found = study.bootstrapped(study.iqm, np.array([1.0, 2, 3, 6]))
    assert found.estimate == 2.5 and np.isnan([found.low, found.high]).all()


def test_the_bootstrap_interval_covers_the_true_mean():
    rng = np.random.default_rng(0)
    found = [study.bootstrapped(study.iqm, rng.normal(size=10)) for _ in range(60)]
    assert 48 <= sum(x.low < 0 < x.high for x in found) <= 60


# === Tables =====================================================================================
def write_study(folder, returns, env_id, length=488, batch_size=2048, **common):
    """Save a study with the given returns of each mode, one per seed, in one environment."""
    parts = [
        grid({mode: (6.0, 0.1)}, (env_id,), len(values), length).assign(last_100_return=values)
        for mode, values in returns.items()
    ]
    runs = pd.concat(parts, ignore_index=True).assign(batch_size=batch_size, **common)
    runs["framework"] = runs["mode"].str.extract("(linen|torch)", expand=False)
    runs["script"], runs["seed"] = runs["mode"], runs["repeat"]
    rows = []
    for run, value in zip(runs["run"], runs["last_100_return"], strict=True):
        for i in range(length):
            step = batch_size * (i + 1)
            row = {"run": run, "iteration": i, "global_step": step, "charts/episodes": 100}
            rows.append(row | {"charts/episodic_return": value * (i + 1) / length})
    save(Data(runs, pd.DataFrame(rows), {}), folder)
    return folder


def cells(table):
    return table.cells.to_dict("records")


def test_a_table_of_returns(tmp_path):
    returns = {LINEN: [1400.0, 1500, 1600, 1700, 1800], TORCH: [1000.0, 2000]}
    write_study(tmp_path, returns, "HalfCheetah-v5", 20, greedy_return=[7.0] * 6 + [np.nan])
    linen, torch = cells(study.continuous_table(tmp_path))
    assert linen["seeds"] == "5" and linen["IQM"].startswith("1,600 [1,")
    assert linen["mean ± standard deviation"] == "1,600 ± 158"
    assert linen["steps"] == "40,960" and linen["IQM, greedy"] == "7.00"
    # Two seeds have no interval, and one of them was not evaluated.
    assert (torch["IQM"], torch["IQM, greedy"]) == ("1,500", "-")
    assert study.others_table(tmp_path) == Text("There are no runs yet.")
    [row] = cells(study.frameworks_table(tmp_path))
    assert row["seeds, this script and Linen"] == "2 and 5" and row["difference"] == "-100"


def test_complete_runs_are_counted(tmp_path):
    returns = {"sac_linen_gymnasium": [9.0, 9.0]}
    names = ["Hopper-v5__default__sac_linen_gymnasium__200it__seed2", "not in grid.toml"]
    write_study(tmp_path, returns, "Hopper-v5", 200, 5_000, run=names)
    rows = {row["algorithm"]: row for row in cells(study.coverage_table(tmp_path))}
    assert [row["complete runs"] for row in rows.values()].count("0") == len(rows) - 1 == 5
    assert rows["SAC"]["complete runs"] == "1"
    assert rows["SAC"]["runs in grid.toml"] == str(len(listed("sac_")))


def test_published_returns_are_compared_with_returns_of_the_same_kind(tmp_path):
    """The greedy returns of PyTorch and of the untrained environment are not used."""
    returns = {"ppo_linen": [480.0, 490], "ppo_torch": [1.0, 1]}
    write_study(tmp_path, returns, CARTPOLE, 10, 8192, greedy_return=[500.0, 498, 1, 1])
    rows = {row["source"]: row for row in cells(study.published_table(tmp_path))}
    assert set(rows) == {"CleanRL", "Stable-Baselines3 zoo", "gymnax"}
    assert rows["CleanRL"]["our return"] == "485.0 ± 7.1"
    assert rows["CleanRL"]["their return"] == "490.0 ± 6.1"
    assert rows["Stable-Baselines3 zoo"]["our return"] == "499.0 ± 1.4"
    assert rows["gymnax"]["our return"] == "485.0 ± 7.1"


def test_training_returns_of_longer_runs_are_read_at_the_published_number_of_steps(tmp_path):
    write_study(tmp_path, {"ppo_linen": [500.0]}, CARTPOLE, 100, 8192, greedy_return=[450.0])
    rows = {row["source"]: row for row in cells(study.published_table(tmp_path))}
    assert rows["CleanRL"]["our steps"] == "499,712"  # 61 of 100 iterations
    assert rows["CleanRL"]["our return"] == "305.0"
    assert rows["Stable-Baselines3 zoo"]["our steps"] == "819,200"
    assert rows["Stable-Baselines3 zoo"]["our return"] == "450.0"


def test_runs_with_other_hyperparameters_have_their_own_table(tmp_path):
    settings = 2 * ['{"gamma": 0.99, "total_timesteps": 1}'] + ['{"gamma": 0.9999}']
    write_study(tmp_path, {LINEN: [30.0, 34, 280]}, "Swimmer-v5", 20, settings=settings)
    [row] = cells(study.continuous_table(tmp_path))
    assert (row["seeds"], row["IQM"]) == ("2", "32.0")
    [row] = cells(study.variants_table(tmp_path))
    assert (row["changed hyperparameters"], row["IQM"]) == ("gamma 0.9999", "280")


def test_frameworks_are_compared_over_several_environments(tmp_path):
    """The ratios 2 and 1/8 have the geometric mean 1/2."""
    for env_id, ratio in (("Hopper-v5", 2), ("Ant-v5", 1 / 8)):
        returns = {LINEN: 5 * [80.0], TORCH: 5 * [80.0 * ratio]}
        write_study(tmp_path / env_id, returns, env_id, 20)
    said = study.pooled(tmp_path).text
    assert said.startswith("PyTorch / Linen, over 2 environments: 0.500 [0.500, 0.500].")


def test_the_runs_in_each_mode_are_counted(tmp_path):
    low, high = study.HIGH - 1.0, study.HIGH + 1.0
    for name, length, torch in (("a", 488, 7 * [low] + 3 * [high]), ("b", 489, 10 * [low])):
        write_study(tmp_path / name, {LINEN: 5 * [low], TORCH: torch}, study.CHEETAH, length)
    rows = cells(study.modes_table(tmp_path))
    counts = [row[f"seeds above {study.HIGH:,}"] for row in rows]
    assert [row["iterations"] for row in rows] == ["488", "489"] * 2
    assert counts == ["0", "0", "3", "0"]
    said = study.modes_test(tmp_path).text
    assert "0 of 5 with 488 and 0 of 5 with 489 iterations in Linen (p = 1.00)" in said
    # Only new seeds count in PyTorch: 10 / (12 choose 3).
    assert "3 of 5 with 488 and 0 of 7 with 489 iterations in PyTorch (p = 0.05)" in said
    # Only the comparison of lengths uses runs of 489 iterations.
    assert [row["seeds"] for row in cells(study.continuous_table(tmp_path))] == ["5", "10"]


def test_earlier_runs_count_unless_they_were_repeated_on_the_same_processor(tmp_path):
    """The second seed was repeated with a different result, and the third was not repeated."""
    low, high = study.HIGH - 1.0, study.HIGH + 1.0
    amd = {"cpu": "AMD EPYC"}
    intel = {"cpu": "Intel(R) Xeon(R) Processor", "platform": "there"}
    write_study(tmp_path, {TORCH: [low, low]}, study.CHEETAH, 488, **amd)
    write_study(tmp_path / "earlier/a", {TORCH: [low, high, high]}, study.CHEETAH, 488, **amd)
    write_study(tmp_path / "earlier/b", {TORCH: [high]}, study.CHEETAH, 488, **intel)
    rows = cells(study.modes_table(tmp_path))
    assert [row["processor"] for row in rows] == ["AMD EPYC", "Intel Xeon"]
    assert [row["seeds"] for row in rows] == ["3", "1"]
    assert [row[f"seeds above {study.HIGH:,}"] for row in rows] == ["1", "1"]
    said = study.reproduced(tmp_path).text
    assert said == "Of 2 earlier runs repeated on the same processor, 1 gave identical returns."


def test_a_long_sac_run_is_also_read_earlier(tmp_path):
    returns = {"sac_linen_gymnasium": [9_000.0]}
    write_study(tmp_path, returns, "Hopper-v5", 200, 5_000, algorithm="sac", greedy_return=[1.0])
    early, late = sorted(cells(study.others_table(tmp_path)), key=lambda x: len(x["steps"]))
    assert (early["steps"], late["steps"]) == ("500,000", "1,000,000")
    assert early["IQM"] == "4,500" and late["IQM"] == "9,000"
    assert (early["IQM, greedy"], late["IQM, greedy"]) == ("-", "1.00")


def test_the_figures_show_every_run(tmp_path):
    returns = {LINEN: [1400.0, 1500, 1600], TORCH: [1000.0, 2000]}
    write_study(tmp_path, returns, study.CHEETAH, 20)
    [axes] = study.draw_curves(tmp_path, "continuous").axes
    assert len(axes.lines) == 5 + 1  # and the line of CleanRL
    np.testing.assert_allclose(np.asarray(axes.lines[0].get_ydata())[-1], 1400)
    [axes] = study.draw_modes(tmp_path).axes
    assert [np.size(x.get_xdata()) for x in axes.lines[:2]] == [3, 2]
    study.update(tmp_path, tmp_path)
    for name in ("continuous.png", "halfcheetah.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


# === Data =======================================================================================
def test_runs_are_added_to_the_study_without_durations(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(pack.subprocess, "run", lambda words, check: called.append(words))
    monkeypatch.setattr(pack, "HERE", tmp_path / "study")
    for folder, seeds in (("first", (1, 2)), ("second", (2, 3))):
        for seed in seeds:
            info = run_info(seed=seed)
            path = write_run(tmp_path / folder, info)
            (path / "checkpoint.msgpack").touch()
            if seed == 1:
                (path / "evaluation.json").write_text("{}")
        atari = run_info(seed=9, env_id="ALE/Pong-v5", args={"run_name": "pong"})
        (write_run(tmp_path / folder, atari) / "checkpoint.pt").touch()
        write_run(tmp_path / folder, run_info(seed=8, args={"run_name": "sb3"}))
        monkeypatch.setattr(pack.sys, "argv", ["pack", str(tmp_path / folder)])
        pack.main()
    evaluated = [[x for x in words if x.startswith(str(tmp_path))] for words in called]
    assert [len(x) for x in evaluated] == [1, 2]  # not evaluated ones, Atari or other libraries
    runs = load(tmp_path / "study").runs
    assert sorted(runs["seed"]) == [1, 2, 3, 8, 9]
    assert runs[pack.DURATIONS].isna().all(axis=None)
    assert not load(tmp_path / "first").runs["steady"].isna().any()


def test_the_committed_study_has_its_figures():
    folder = ROOT / "studies/returns"
    for kind in study.read(folder)["kind"].unique():
        assert (folder / f"{kind}.png").exists()

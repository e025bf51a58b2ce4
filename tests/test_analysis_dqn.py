"""Runs of DQN, and of environments in Gymnasium: what they are called, and what never pools."""

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fake_runs import results, run_info, write_grid
from scipy import stats

from analysis import docs, learning, pack, report, schema, study
from analysis.bench import MODES, benches, mode_order
from analysis.runs import LAST_EPISODES, last_return, load

RULES: dict[str, Any] = {"sticky_actions": 0.1, "full_actions": True}
RULES |= {"max_episode_steps": 2**31 - 1}
GYMNAX: dict[str, Any] = {"sticky_actions": 0.0, "full_actions": False, "max_episode_steps": 0}
ATARI: dict[str, Any] = {"env_id": "MinAtar/Breakout-v0", "vectorization": "sync"}


def write_dqn(folder, script="dqn_linen", seed=1, iterations=12, returns=None, **flags):
    """Write a run of DQN with the flags that its script would have; return its folder."""
    info = run_info("linen jit", seed=seed)
    info |= {"script": script, "framework": script.split("_")[1]}
    info["compile_mode"] = "compile" if flags.get("compile") else "jit"
    library = ATARI if "gymnasium" in script else GYMNAX | RULES | {"env_id": "Breakout-MinAtar"}
    args = {"exp_name": script, "seed": seed, "num_envs": 1, "num_steps": 500, "loss": "huber"}
    args |= {"total_timesteps": 500 * iterations, "replay_ratio": 32.0, "hidden_sizes": [128]}
    args |= {"runs_dir": "runs", "track": False, "save_every": 0, "resume": None}
    args |= {"compile": False} if "torch" in script else {}
    args |= library | {"run_name": f"{script}__{seed}__{len(list(folder.glob('*')))}"} | flags
    info["args"] = args
    returns = np.linspace(0, 8, iterations) + seed if returns is None else returns
    slower = 3.0 if "torch" in script else 1.0
    rows = []
    for i, value in enumerate(returns):
        row = {"iteration": i, "global_step": 500 * (i + 1), "time/elapsed": 1 + slower * (i + 1)}
        row |= {"time/iteration": slower, "charts/episodes": 20, "charts/episodic_return": value}
        row |= {"charts/epsilon": 0.1, "charts/updates": 500.0, "losses/td_loss": 0.1}
        rows.append(row | {"losses/q_value": 2.0})
    path = folder / args["run_name"]
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "run.json").write_text(json.dumps(info | results(rows)))
    return path


def evaluated(path, mean, name="evaluation", **changes):
    result = {"iteration": 12, "actions": "greedy", "epsilon": 0, "return": {"mean": mean}}
    result |= {"episodes": 100, "max_steps": 10_000}
    (path / f"{name}.json").write_text(json.dumps(result | changes))


# === One run ====================================================================================
def test_a_run_of_dqn_becomes_a_row(tmp_path):
    path = write_dqn(tmp_path)
    evaluated(path, 9.5)
    evaluated(path, 8.5, "evaluation-epsilon-0.05", epsilon=0.05)
    evaluated(path, 0.5, "evaluation-epsilon-1", epsilon=1.0)
    data = load(tmp_path)
    row = data.runs.iloc[0]
    assert (row["mode"], row["algorithm"]) == ("dqn_linen", "dqn")
    assert (row["env_id"], row["size"]) == ("MinAtar/Breakout-v0", "128")
    assert (row["sync"], row["batch_size"], row["num_iterations"]) == (False, 500, 12)
    settings = json.loads(row["settings"])
    assert settings == {
        **{"loss": "huber", "num_envs": 1, "num_steps": 500, "replay_ratio": 32.0},
        "total_timesteps": 6000,
    }
    assert row[["greedy_return", "noisy_return", "random_return"]].tolist() == [9.5, 8.5, 0.5]
    assert data.iterations["losses/q_value"].tolist() == [2.0] * 12
    assert data.iterations["charts/epsilon"].tolist() == [0.1] * 12


@pytest.mark.parametrize(
    "changes",
    [
        {"iteration": 11},  # of an agent that was trained further since
        {"actions": "sampled"},
        {"epsilon": 0.5},
        {"episodes": 1},
        {"episodes": None},
        {"max_steps": 20},
        {"return": {"mean": "9"}},
        {"return": {"mean": True}},
        {"return": None},
    ],
)
def test_an_evaluation_of_something_else_does_not_count(tmp_path, changes):
    evaluated(write_dqn(tmp_path), 9.5, **changes)
    assert np.isnan(load(tmp_path).runs["greedy_return"]).all()
    (tmp_path / "dqn_linen__1__0" / "evaluation.json").write_text("[" * 100_000)
    assert np.isnan(load(tmp_path).runs["greedy_return"]).all()


def test_the_last_100_episodes():
    """Of an iteration only the mean is known: the first that counts does so in part."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        counts = rng.integers(0, 60, 12)
        means = np.where(counts, rng.normal(size=12), np.nan)
        every = np.repeat(np.where(counts, means, 0), counts)
        rows = [
            {"charts/episodes": float(n), "charts/episodic_return": x if n else None}
            for n, x in zip(counts, means.tolist(), strict=True)
        ]
        expected = every[-100:].mean() if len(every) >= 100 else None
        found = learning.running_return(means, counts.astype(float))
        assert last_return(rows) == (expected and pytest.approx(expected))
        for i in range(12):
            part = every[: counts[: i + 1].sum()]
            wanted = part[-LAST_EPISODES:].mean() if len(part) >= LAST_EPISODES else np.nan
            assert found[i] == pytest.approx(wanted, nan_ok=True)


# === Names ======================================================================================
@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (GYMNAX | {"env_id": "envs.doors:Doors"}, "Doors-v0"),
        (GYMNAX | {"env_id": "envs.doors_gymnasium:Doors-v0"}, "Doors-v0"),
        ({}, "MinAtar/Breakout-v0"),
        (GYMNAX, "Breakout-MinAtar"),
        ({"sticky_actions": 0.2}, None),
        ({"full_actions": False}, None),
        ({"max_episode_steps": 0}, None),
        (GYMNAX | {"env_id": "CartPole-v1"}, "CartPole-v1"),
        ({"env_id": "Freeway-MinAtar"}, "MinAtar/Freeway-v0"),
        ({"env_id": "Asterix-MinAtar"}, None),  # the two were not compared
    ],
)
def test_an_environment_is_one_with_its_options(tmp_path, flags, name):
    write_dqn(tmp_path, **flags)
    found = load(tmp_path).runs["env_id"].iloc[0]
    if name is None:
        assert found.startswith(f"{flags.get('env_id', 'Breakout-MinAtar')}, ")
    else:
        assert found == name


def test_a_mode_names_what_computes_differently(tmp_path):
    for script, flags in (
        ("dqn_torch", {}),
        ("dqn_torch", {"compile": True}),
        ("dqn_torch_gymnasium", {"compile": True}),
        ("dqn_linen_gymnasium", {}),
        ("dqn_linen_gymnasium", {"vectorization": "async"}),
    ):
        write_dqn(tmp_path, script, **flags)
    runs = load(tmp_path).runs
    assert mode_order(runs["mode"]) == [
        *("dqn_torch --compile", "dqn_torch", "dqn_linen_gymnasium"),
        *("dqn_torch_gymnasium --compile", "dqn_linen_gymnasium --vectorization async"),
    ]
    assert runs["settings"].nunique() == 1  # so that they are compared
    assert len(set(MODES)) == len(MODES)


# === What pools =================================================================================
def test_two_libraries_pair_in_one_environment(tmp_path):
    for seed in (1, 2, 3):
        for script in ("dqn_linen", "dqn_torch_gymnasium"):
            write_dqn(tmp_path, script, seed)
    [bench] = benches(load(tmp_path))
    assert bench.baseline == "dqn_linen" and bench.runs["env_id"].nunique() == 1
    row = study.pace(bench).set_index("mode").loc["dqn_torch_gymnasium"]
    assert row["estimate"] == pytest.approx(3) and row["step"] == pytest.approx(3 / 500)
    assert (row["runs"], row["length"]) == (3, 6000)
    assert row["whole"] == pytest.approx(2 + 1 + 12 * 3)  # imports, set-up, iterations
    assert row["full"] == pytest.approx(3 + study.FULL * 3 / 500)


@pytest.mark.parametrize(
    "flags",
    [
        {"loss": "mse"},
        {"replay_ratio": 16.0},
        {"num_envs": 2, "num_steps": 250},
        {"iterations": 24},
        {"optimizer": "adam"},
        {"double_q": True},
    ],
)
def test_other_settings_never_pool(tmp_path, flags):
    for seed in (1, 2):
        write_dqn(tmp_path, seed=seed)
        write_dqn(tmp_path, seed=seed, **flags)
    several = benches(load(tmp_path))
    assert [len(x.runs) for x in several] == [2, 2]
    assert len({x.title for x in several}) == 2


def test_ppo_and_dqn_stand_apart_and_titles_list_no_foreign_settings(tmp_path):
    write_grid(tmp_path / "ppo", envs=("CartPole-v1",))
    write_dqn(tmp_path / "dqn", **GYMNAX, env_id="CartPole-v1")
    data = load([tmp_path / "ppo", tmp_path / "dqn"])
    assert [x.title for x in benches(data)] == [
        f"{x}, Linux, Fast, 2 cores" for x in ("PPO", "DQN")
    ]
    assert [x.baseline for x in benches(data)] == ["ppo_linen", "dqn_linen"]


def test_rules_keep_breakout_apart(tmp_path):
    """gymnax's plain Breakout is another game: one bench, but no pairs."""
    write_dqn(tmp_path, seed=1)
    write_dqn(tmp_path, "dqn_torch", seed=1, **GYMNAX)
    [bench] = benches(load(tmp_path))
    assert "estimate" in study.pace(bench) and study.pace(bench)["estimate"].dropna().tolist() == [
        1
    ]
    assert len(learning.returns(bench, learning.load_environments())) == 2


# === What is shown ==============================================================================
@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(1, 6):
        for script in ("dqn_linen", "dqn_torch_gymnasium"):
            path = write_dqn(folder, script, seed)
            if seed < 4:
                evaluated(path, 10.0 + seed)
    return folder


def test_last_returns_have_the_intervals_of_student(grid):
    [bench] = benches(load(grid))
    row = learning.last_returns(bench).set_index("mode").loc["dqn_linen"]
    values = bench.runs.loc[bench.runs["mode"] == "dqn_linen", "last_100_return"]
    low, high = stats.t.interval(0.95, 4, values.mean(), stats.sem(values))
    found = row[["last_100_estimate", "last_100_low", "last_100_high"]].astype(float)
    np.testing.assert_allclose(found, [values.mean(), low, high])
    assert (row["runs"], row["evaluated"], row["greedy_estimate"]) == (5, 3, 12)
    assert np.isnan(row["noisy_estimate"])


def test_the_curve_is_the_mean_of_the_last_100_over_seeds(grid):
    [bench] = benches(load(grid))
    points = learning.recent(bench, "128")
    own = points[points["mode"] == "dqn_linen"]
    assert own["steps"].tolist() == list(range(2500, 6001, 500))  # the first have fewer episodes
    runs = bench.runs[bench.runs["mode"] == "dqn_linen"]
    assert own["estimate"].iloc[-1] == pytest.approx(runs["last_100_return"].mean())
    assert (own["low"] < own["estimate"]).all() and (own["runs"] == 5).all()
    assert own["seconds"].iloc[-1] == pytest.approx(2 + 1 + 12)


def test_the_report_of_dqn(grid, tmp_path):
    request = report.Request(learning.load_environments())
    data = load(grid)
    report.write_report(data, tmp_path, request)
    text = (tmp_path / "report.md").read_text()
    assert "last 100 training episodes" in text and "steps per second" in text
    assert "--sync-for-timing" not in text and "medium" not in text
    assert "| MinAtar/Breakout-v0 | dqn_torch_gymnasium | 5 |" in text
    names = {path.name for path in (tmp_path / "figures").glob("*.png")}
    assert {"recent_steps_1.png", "recent_seconds_1.png"} <= names


def test_a_report_of_ppo_has_nothing_of_dqn(tmp_path):
    data = load(write_grid(tmp_path / "runs"))
    report.write_report(data, tmp_path / "out", report.Request(learning.load_environments()))
    text = (tmp_path / "out/report.md").read_text()
    assert "last 100" not in text and "steps per second" not in text


def test_a_study_may_hold_two_lengths(tmp_path):
    for iterations in (12, 24):
        write_dqn(tmp_path, iterations=iterations)
    assert pack.problems(load(tmp_path)) == []
    write_dqn(tmp_path, loss="mse")
    assert any("sets of hyperparameters" in x for x in pack.problems(load(tmp_path)))


def test_a_document_may_ask_for_a_length(tmp_path):
    for iterations, seed in ((12, 1), (12, 2), (24, 1)):
        write_dqn(tmp_path, iterations=iterations, seed=seed)
    assert len(docs.bench_of(str(tmp_path), None, None).runs) == 2
    assert len(docs.bench_of(str(tmp_path), "24it", None).runs) == 1
    table = docs.block("pace", str(tmp_path), "24it", None)
    assert "for 12,000 steps" in table and "dqn_linen" in table


def test_a_foreign_value_is_no_evaluation(tmp_path):
    """W&B's config is a stranger's."""
    path = write_dqn(tmp_path)
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(info | {"evaluations": {"greedy": "<script>"}}))
    assert np.isnan(load(tmp_path).runs["greedy_return"]).all()


def test_a_study_keeps_what_was_evaluated(grid, tmp_path):
    study_of = load(grid)
    pack.save(study_of, tmp_path)
    again = load(tmp_path)
    own = ["greedy_return", "last_100_return", "algorithm", "mode", "env_id"]
    pd.testing.assert_frame_equal(study_of.runs[own], again.runs[own])
    assert set(schema.complete(again.runs, schema.RUNS)) == {x.name for x in schema.RUNS}

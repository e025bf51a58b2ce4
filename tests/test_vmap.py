"""Many agents in one program: each trains as it would alone, and leaves a run of its own.

That programs go on from a checkpoint, and what they compile and transfer, test_training.py has.
"""

import importlib
import shutil
import sys

import numpy as np
import pytest
import torch
from running import (
    AGENTS,
    SEED,
    arrays,
    assert_close,
    assert_tensorboard_agrees,
    content,
    info,
    main,
    metrics,
    op_by_op,
    rewind,
)
from sections import VMAP_SCRIPTS

import evaluate
from analysis.runs import load

SEEDS = range(SEED - AGENTS + 1, SEED + 1)


@pytest.mark.parametrize(
    ("name", "alone"),
    zip(VMAP_SCRIPTS, ["ppo_linen", "ppo_nnx", "ppo_torch_compile"], strict=True),
)
def test_each_agent_trains_as_alone_with_its_seed(name, alone, whole_run):
    """From the same keys: the same episodes, and numbers that differ by rounding."""
    agent, alone = whole_run(name).folder / f"seed{SEED}", whole_run(alone).folder
    assert_close(metrics(agent), metrics(alone))
    ours, theirs = arrays(agent), arrays(alone)
    if name == "ppo_torch_vmap":  # whose agents have a generator each
        theirs["generators"] = theirs.pop("rng_state/cpu")
    assert ours.keys() == theirs.keys()
    for place in ours:
        assert ours[place].dtype == theirs[place].dtype
        np.testing.assert_allclose(ours[place], theirs[place], rtol=1e-3, atol=1e-5)
    program = metrics(whole_run(name).folder)
    steps = [AGENTS * row["global_step"] for row in metrics(agent)]
    assert [row["global_step"] for row in program] == steps  # of all agents together
    other = metrics(whole_run(name).folder / f"seed{SEED - 1}")
    assert other[0]["losses/value_loss"] != metrics(agent)[0]["losses/value_loss"]


def test_an_agent_that_diverges_leaves_the_others_untouched(whole_run, tmp_path, monkeypatch):
    """To the last digit: its weights become NaN in a checkpoint from which all go on."""
    name = "ppo_torch_vmap"  # whose gradients and norms are written out
    run = whole_run(name)
    folder = rewind(run, tmp_path / "program")
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    for place, x in checkpoint["agent"].items():
        if place.endswith("weight"):
            x[1] = torch.nan
    torch.save(checkpoint, folder / "checkpoint.pt")
    op_by_op(monkeypatch, importlib.import_module(name))
    assert main(name, "--resume", folder) == 0
    first, second, third = (f"seed{seed}" for seed in SEEDS)
    for agent in (first, third):
        assert metrics(folder / agent) == metrics(run.folder / agent)
    losses = [row["losses/value_loss"] for row in metrics(folder / second)]
    assert [x is None for x in losses] == [False, False, True, True, True]
    assert all(row["losses/value_loss"] > 0 for row in metrics(folder))  # of those that have one


# === Run logs, the same in all ==================================================================
def test_every_agent_has_a_folder_that_is_like_a_runs(whole_run):
    folder = whole_run("ppo_linen_vmap").folder
    program, means = info(folder), metrics(folder)
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert names == [f"seed{seed}" for seed in SEEDS]
    agents = [metrics(folder / name) for name in names]
    for k, (name, rows) in enumerate(zip(names, agents, strict=True)):
        run = info(folder / name)
        assert (run["agent"], run["args"]["num_agents"]) == (k, AGENTS)
        own = {"seed": SEEDS[k], "runs_dir": str(folder), "run_name": name}
        assert run["args"] == program["args"] | own
        assert (run["status"], run["iteration"]) == ("completed", 5)
        assert [row["global_step"] for row in rows] == [128 * (i + 1) for i in range(5)]
        assert_tensorboard_agrees(folder / name)
    assert "agent" not in program
    for i, row in enumerate(means):
        for name in ("losses/entropy", "charts/episodic_return"):
            assert row[name] == pytest.approx(np.mean([rows[i][name] for rows in agents]))
        assert row["global_step"] == AGENTS * 128 * (i + 1)


def test_evaluate_and_the_report_read_all_agents(whole_run, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(whole_run("ppo_linen_vmap").folder, tmp_path / "program")
    monkeypatch.setattr(sys, "argv", ["evaluate.py", str(folder), "--episodes", "4"])
    evaluate.main()
    said = capsys.readouterr().out
    for seed in SEEDS:
        assert f"{folder}/seed{seed}: ppo_linen_vmap, CartPole-v1, seed {seed}" in said
    assert "mean over 3 seeds " in said
    data = load(folder)
    assert data.runs["run"].tolist() == [f"seed{seed}" for seed in SEEDS] and not data.left_out
    assert data.runs["total"].notna().tolist() == [True, False, False]


def test_an_agent_alone_is_not_gone_on_with(whole_run, tmp_path, capfd):
    folder = shutil.copytree(whole_run("ppo_linen_vmap").folder, tmp_path / "program")
    before = content(folder)
    assert main("ppo_linen_vmap", "--resume", folder / f"seed{SEED}") == 2
    assert "the one above" in capfd.readouterr().err
    assert content(folder) == before

"""Training many agents at once: each one trains as it would alone and has a run folder.

test_training.py tests resuming, and counts compilations and transfers.
"""

import importlib
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from running import (
    AGENTS,
    BATCH,
    SEED,
    arrays,
    assert_close,
    assert_same_checkpoints,
    assert_tensorboard_agrees,
    command,
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
def test_each_agent_trains_as_it_would_alone(name, alone, whole_run):
    """The episodes are the same, and the numbers are equal up to rounding."""
    agent, alone = whole_run(name).folder / f"seed{SEED}", whole_run(alone).folder
    assert_close(metrics(agent), metrics(alone))
    ours, theirs = arrays(agent), arrays(alone)
    if name == "ppo_torch_vmap":  # there is one generator for each agent
        theirs["generators"] = theirs.pop("rng_state")
    assert ours.keys() == theirs.keys()
    for place in ours:
        assert ours[place].dtype == theirs[place].dtype
        np.testing.assert_allclose(ours[place], theirs[place], rtol=1e-3, atol=1e-5)
    program = metrics(whole_run(name).folder)
    steps = [AGENTS * row["global_step"] for row in metrics(agent)]
    assert [row["global_step"] for row in program] == steps  # steps of all agents
    other = metrics(whole_run(name).folder / f"seed{SEED - 1}")
    assert other[0]["losses/value_loss"] != metrics(agent)[0]["losses/value_loss"]


def test_an_agent_that_diverges_does_not_affect_the_others(
    whole_run, tmp_path, monkeypatch, capsys
):
    """Set the weights of one agent to NaN in a checkpoint, then resume the run."""
    name = "ppo_torch_vmap"  # this script computes gradients and norms with custom code
    run = whole_run(name)
    folder = rewind(run, tmp_path / "program")
    first, second, third = names = [f"seed{seed}" for seed in SEEDS]
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    for place, x in checkpoint["agent"].items():
        if place.endswith("weight"):
            x[1] = torch.nan
    torch.save(checkpoint, folder / "checkpoint.pt")
    saved = (folder / second / "checkpoint.pt").read_bytes()
    op_by_op(monkeypatch, importlib.import_module(name))
    assert main(name, "--resume", folder) == 0
    for agent in (first, third):
        assert metrics(folder / agent) == metrics(run.folder / agent)
        assert_same_checkpoints(folder / agent, run.folder / agent)
    losses = [row["losses/value_loss"] for row in metrics(folder / second)]
    assert [x is None for x in losses] == [False, False, True]
    assert (folder / second / "checkpoint.pt").read_bytes() == saved
    # The program logs means over the agents that have not diverged.
    assert all(row["losses/value_loss"] > 0 for row in metrics(folder))
    assert [x for x in capsys.readouterr().out.splitlines() if second in x and "3" in x]
    statuses = [info(path)["status"] for path in (folder, *(folder / x for x in names))]
    assert statuses == ["completed", "completed", "diverged", "completed"]
    # A longer run leaves the agent out.
    assert main(name, "--resume", folder, "--total-timesteps", 6 * BATCH) == 0
    assert [len(metrics(folder / x)) for x in names] == [6, 3, 6]
    assert info(folder / second)["status"] == "diverged"


@pytest.mark.parametrize("name", ["ppo_linen_vmap", "ppo_nnx_vmap"])
def test_in_jax_each_agent_saves_its_own_numbers_after_another_diverged(name, monkeypatch):
    script = importlib.import_module(name)
    saved: dict[Any, Any] = {}
    monkeypatch.setattr(script, "save_checkpoint", saved.__setitem__)
    agents = {k: SimpleNamespace(dir=k) for k in (0, 2)}  # without agent 1
    numbers = np.array([10, 11, 12])
    checkpoint = script.Checkpoint(5, numbers, numbers, numbers)
    script.save_checkpoints(SimpleNamespace(dir="program", agents=agents), checkpoint)
    assert saved == {0: (5, 10, 10, 10), 2: (5, 12, 12, 12), "program": checkpoint}


def test_a_run_ends_with_status_1_if_all_agents_diverge(tmp_path, monkeypatch):
    name = "ppo_torch_vmap"
    op_by_op(monkeypatch, importlib.import_module(name))
    flags = ["--learning-rate", 1e30, "--adam-eps", 1e-30, "--num-agents", 2]
    words = command(name, "run", 100, "--runs-dir", tmp_path, *flags)[2:]
    assert isinstance(main(name, *words), str)  # a text, which Python prints, for status 1
    folder = tmp_path / "run"
    assert {info(x.parent)["status"] for x in folder.rglob("run.json")} == {"diverged"}


def test_each_agent_clips_its_gradient_only_above_the_limit():
    """The second agent has large targets, and therefore a large gradient.

    With such a large epsilon, the first step of Adam subtracts the clipped gradient.
    """
    script: Any = importlib.import_module("ppo_torch_vmap")
    args = script.Args(num_agents=2, max_grad_norm=10.0, adam_eps=1e4, learning_rate=1e4)
    agent, optimizer, _ = script.make_agents(args, (4,), 2, torch.device("cpu"))
    before = [x.detach().clone() for x in agent.parameters()]
    torch.manual_seed(0)
    obs, action = torch.randn(2, 32, 4), torch.randint(2, (2, 32))
    logprob, value, advantage, target = torch.randn(4, 2, 32)
    target[1] *= 1000
    batch = script.Batch(obs, action, logprob, value, advantage, target)
    script.minibatch_step(agent, optimizer, batch, args)
    pairs = zip(agent.parameters(), before, strict=True)
    changes = torch.cat([(x.detach() - y).flatten(1) for x, y in pairs], 1).norm(dim=1)
    assert 0.1 < changes[0] < 9 and changes[1].item() == pytest.approx(10, rel=1e-3)


# === Run logs ===================================================================================
def test_every_agent_has_a_run_folder(whole_run):
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


def test_the_means_of_a_run_exclude_agents_that_have_diverged():
    script: Any = importlib.import_module("ppo_torch_vmap")
    logged = []
    agent = SimpleNamespace(write=lambda *args: None)
    run = SimpleNamespace(write=lambda iteration, row, *times: logged.append(row))
    log = SimpleNamespace(agents={0: agent, 2: agent}, run=run)  # without agent 1
    script.RunLogs.write(log, 5, {"charts/episodic_return": [1.0, 10.0, 2.0]}, 0.0)
    assert logged == [{"charts/episodic_return": 1.5}]


def test_evaluate_and_the_report_include_all_agents(whole_run, tmp_path, monkeypatch, capsys):
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


@pytest.mark.parametrize("name", VMAP_SCRIPTS)
def test_load_policy_requires_the_folder_of_one_agent(name, whole_run):
    folder, script = whole_run(name).folder, importlib.import_module(name)
    first = f"seed{SEEDS[0]}"
    with pytest.raises(ValueError, match=f"several agents. Load one, such as {first}$"):
        script.load_policy(folder)
    obs = np.random.default_rng(0).normal(size=(16, 4)).astype("f")
    assert set(script.load_policy(folder / first)(obs).tolist()) <= {0, 1}

"""Many agents in one program: each trains as it would alone, and leaves a run of its own."""

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT
from sections import VMAP_SCRIPTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_resume import main
from test_training import Counts, train

from analysis.runs import load

ALONE = {"ppo_linen_vmap": "ppo_linen", "ppo_nnx_vmap": "ppo_nnx"}
ALONE |= {"ppo_torch_vmap": "ppo_torch_compile"}
AGENTS, ITERATIONS = 3, 6
SEED = 2**32 - AGENTS  # of the first; the last has the highest that there is
LAST = f"seed{SEED + AGENTS - 1}"


class Program(NamedTuple):
    """A run of train() with AGENTS agents, and what it looked like on the way."""

    name: str
    folder: Path
    saved: list[Path]  # copies of the folder after iterations 2, 4 and 6
    counts: list[dict[str, int]]  # of compilations and transfers, per iteration
    graph_breaks: dict[str, int]  # of torch.compile, by reason


@pytest.fixture(scope="module")
def program_of(tmp_path_factory) -> Callable[[str], Program]:
    """Train each script once, and keep what that left."""
    made: dict[str, Program] = {}

    def make(name: str) -> Program:
        script, runs_dir, saved = importlib.import_module(name), tmp_path_factory.mktemp(name), []
        flags = {"seed": SEED, "num_agents": AGENTS, "run_name": "program", "save_every": 2}
        save = script.RunLogs.save

        def keep(log, **state):
            save(log, **state)
            saved.append(runs_dir / f"saved{log.info['iteration']}" / "program")
            shutil.copytree(log.program.dir, saved[-1])

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with pytest.MonkeyPatch.context() as patch:
            counts = Counts(patch)
            counts.watch(patch, SimpleNamespace(RunLog=script.RunLogs))
            patch.setattr(script.RunLogs, "save", keep)
            train(name, runs_dir, **flags)
        breaks = dict(torch._dynamo.utils.counters["graph_break"])
        return Program(name, runs_dir / "program", saved, counts.per_iteration, breaks)

    def program(name: str) -> Program:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return program


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """What was logged, without the durations."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    timed = ("time/iteration", "time/elapsed", "charts/SPS")
    return [{name: x for name, x in row.items() if name not in timed} for row in rows]


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "checkpoint.npz") as file:
        return dict(file)


def assert_close(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Equal but for rounding, and null where the other is."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name, x in one.items():
            assert (x is None) == (other[name] is None), name
            assert x is None or x == pytest.approx(other[name], rel=1e-3, abs=1e-6), name


# === Training ===================================================================================
@pytest.mark.parametrize("name", VMAP_SCRIPTS)
def test_each_agent_trains_as_alone_with_its_seed(name, program_of, tmp_path):
    """From the same keys: the same episodes, and numbers that differ by rounding."""
    *_, alone = train(ALONE[name], tmp_path, seed=SEED + AGENTS - 1)
    agent = program_of(name).folder / LAST
    assert_close(rows_of(agent), rows_of(alone))
    ours, theirs = arrays_of(agent), arrays_of(alone)
    assert ours.keys() == theirs.keys()
    for place in ours.keys() - {"info"}:
        shape, dtype = theirs[place].shape, theirs[place].dtype
        assert (ours[place].shape, ours[place].dtype) == (shape, dtype)
        np.testing.assert_allclose(ours[place], theirs[place], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", VMAP_SCRIPTS)
def test_nothing_compiles_again_and_one_transfer_brings_all_metrics(name, program_of):
    program = program_of(name)
    first, *rest = program.counts
    assert first["compilations"] > 0 and len(rest) == ITERATIONS - 1
    # Compiled by torch: the policy of all agents, and a minibatch step of all; both are whole.
    assert {row["graphs"] for row in program.counts} == {2 if name == "ppo_torch_vmap" else 0}
    assert not program.graph_breaks
    # A tensor in PyTorch, and in JAX a dict of 13 arrays.
    transfers = 1 if name == "ppo_torch_vmap" else 13
    for i, row in enumerate(rest, 1):
        saved = i % 2 == 0  # the iteration before wrote a checkpoint, which takes transfers
        assert row.get("compilations", 0) == 0
        assert saved or row["transfers"] == transfers


@pytest.mark.parametrize("name", VMAP_SCRIPTS[::2])
def test_an_agent_that_diverges_leaves_the_others_untouched(name, program_of, tmp_path):
    """To the last digit: its weights become NaN in a checkpoint from which all go on."""
    program, folder = program_of(name), tmp_path / "program"
    shutil.copytree(program.saved[0], folder)
    arrays: dict[str, Any] = arrays_of(folder)
    weights = [x for x in arrays if (arrays[x].ndim == 3 and "kernel" in x) or "weight" in x]
    assert len(weights) >= 6
    for place in weights:
        arrays[place][1] = np.nan
    np.savez(folder / "checkpoint.npz", **arrays)
    assert main(name, "--resume", folder) == 0
    for k in (0, 2):
        seed = f"seed{SEED + k}"
        assert rows_of(folder / seed) == rows_of(program.folder / seed)
    lost = rows_of(folder / f"seed{SEED + 1}")[2:]
    assert all(row["losses/value_loss"] is None for row in lost)
    assert all(row["losses/value_loss"] > 0 for row in rows_of(folder))  # of those that have one


def test_wide_layers_of_many_agents_are_made_without_waiting_for_each_other(tmp_path):
    """Their orthogonal matrices: made in one batch, on two cores those waited for ever."""
    flags = "--num-agents 8 --num-envs 2 --num-steps 2 --num-minibatches 1 --update-epochs 1 "
    flags += "--hidden-sizes 256 256 --total-timesteps 4"
    command = [sys.executable, ROOT / "ppo_linen_vmap.py", *flags.split(), "--runs-dir", tmp_path]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0


# === Run logs ===================================================================================
@pytest.mark.parametrize("name", VMAP_SCRIPTS)
def test_every_agent_has_a_folder_that_is_like_a_runs(name, program_of):
    folder = program_of(name).folder
    program = json.loads((folder / "run.json").read_text())
    means = rows_of(folder)
    agents = [rows_of(folder / f"seed{SEED + k}") for k in range(AGENTS)]
    names = sorted(x.name for x in folder.iterdir() if x.is_dir())
    assert names == [f"seed{SEED + k}" for k in range(AGENTS)]
    for k, rows in enumerate(agents):
        path = folder / f"seed{SEED + k}"
        info = json.loads((path / "run.json").read_text())
        assert (info["agent"], info["args"]["num_agents"]) == (k, AGENTS)
        own = {"seed": SEED + k, "runs_dir": str(folder), "run_name": path.name}
        assert info["args"] == program["args"] | own
        assert info["durations"]["total"] <= program["durations"]["total"]
        assert [row["global_step"] for row in rows] == [128 * (i + 1) for i in range(ITERATIONS)]
        events = EventAccumulator(str(path), size_guidance={"tensors": 0}).Reload()
        assert len(events.Tensors("losses/entropy")) == ITERATIONS
    assert "agent" not in program
    for i, row in enumerate(means):
        for name in ("losses/entropy", "charts/episodic_return"):
            values = [rows[i][name] for rows in agents if rows[i][name] is not None]
            assert row[name] == pytest.approx(np.mean(values)) if values else row[name] is None
        assert row["global_step"] == AGENTS * 128 * (i + 1)


@pytest.mark.parametrize("name", VMAP_SCRIPTS)
def test_a_program_goes_on_from_its_checkpoint_to_the_last_digit(name, program_of, tmp_path):
    """Even where a kill came between the agents' checkpoints, which are ahead, and its own."""
    program, folder = program_of(name), tmp_path / "moved"
    shutil.copytree(program.saved[1], folder)  # after 4 iterations
    shutil.copy(program.saved[0] / "checkpoint.npz", folder)  # after 2
    assert main(name, "--resume", folder) == 0
    for path in (".", *(f"seed{SEED + k}" for k in range(AGENTS))):
        assert rows_of(folder / path) == rows_of(program.folder / path)
        ours, theirs = arrays_of(folder / path), arrays_of(program.folder / path)
        assert ours.keys() == theirs.keys()
        assert all((ours[x] == theirs[x]).all() for x in ours if x != "info")
        assert json.loads((folder / path / "run.json").read_text())["resumed"] == [2]


def test_evaluate_and_the_report_read_all_agents(program_of, tmp_path):
    folder, seeds = tmp_path / "program", [SEED + k for k in range(AGENTS)]
    shutil.copytree(program_of("ppo_linen_vmap").folder, folder)
    command = [sys.executable, ROOT / "evaluate.py", folder, "--episodes", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    for seed in seeds:
        assert f"{folder}/seed{seed}: ppo_linen_vmap, CartPole-v1, seed {seed}" in done.stdout
    assert "mean over 3 seeds " in done.stdout
    data = load(folder)
    assert data.runs["run"].tolist() == [f"seed{x}" for x in seeds] and not data.left_out
    assert data.runs["total"].notna().tolist() == [True, False, False]
    (folder / LAST / "checkpoint.npz").unlink()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and f"{LAST}/checkpoint.npz is not there" in done.stderr


def test_an_agent_alone_is_not_gone_on_with(program_of, tmp_path, capfd):
    folder = tmp_path / "program"
    shutil.copytree(program_of("ppo_linen_vmap").saved[0], folder)
    capfd.readouterr()
    assert main("ppo_linen_vmap", "--resume", folder / LAST) == 2
    said = f"--resume: {folder / LAST} is one agent's; its program's folder is the one above\n"
    assert capfd.readouterr().err == said

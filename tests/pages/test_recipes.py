"""The recipes in docs/: read their code from the pages and run it as a reader would."""

import ast
import csv
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from conftest import ROOT
from flax.serialization import msgpack_restore
from running import BATCH, SMALL, arrays, main, metrics, rows

import ppo_linen

ONE_EPOCH = ("--no-anneal-lr", "--update-epochs", 1)


def section(page, heading):
    text = (ROOT / f"docs/{page}.md").read_text()
    assert f"\n## {heading}\n" in text
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def blocks(page, heading, language):
    """The code blocks of a section."""
    return re.findall(rf"^```{language}\n(.*?)^```", section(page, heading), re.M | re.S)


def train(name, runs_dir, run_name, *flags, iterations):
    """Train a script, or a copy that is not in scripts.toml, to the end. Return the folder."""
    own = ("--total-timesteps", BATCH * iterations, "--runs-dir", runs_dir, "--run-name", run_name)
    assert main(name, *SMALL.split(), *own, *flags) == 0
    return Path(runs_dir, run_name)


def test_the_machines_of_the_studies_are_listed_as_tested():
    text = section("devices", "Tested on")
    for path in ROOT.glob("studies/**/runs.csv"):
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                assert f"| {row['python']}:" in text
                cpu = re.search("AMD EPYC|Intel.+Xeon|x86_64", row["cpu"])
                assert cpu and cpu[0].replace("(R)", "").replace("(TM)", "") in text


# === Edits of a copy ============================================================================
def edited(text, diff):
    """Apply a diff from a page to the text of a script. Each hunk must match once."""
    for group in re.split(r"^@@ \w+ @@\n", diff, flags=re.M)[1:]:
        lines = group.splitlines(keepends=True)
        old = "".join(x[1:] for x in lines if x[0] in " -")
        new = "".join(x[1:] for x in lines if x[0] in " +")
        assert set(x[0] for x in lines) <= set(" -+") and text.count(old) == 1, group
        text = text.replace(old, new)
    return text


def with_class(text, code):
    """Replace the class of the same name in the text of a script."""
    name = ast.parse(code).body[0].name
    (old,) = [x for x in ast.parse(text).body if getattr(x, "name", "") == name]
    lines = text.splitlines(keepends=True)
    lines[old.lineno - 1 : old.end_lineno] = [code]
    return "".join(lines)


@pytest.fixture
def copy_of(tmp_path, monkeypatch):
    """Return a function that makes a changed copy of a script, a module with the given name."""
    monkeypatch.syspath_prepend(tmp_path)

    def copy_of(script, name, change, code):
        text = (ROOT / f"{script}.py").read_text()
        (tmp_path / f"{name}.py").write_text(change(text, code))
        importlib.invalidate_caches()
        return name

    yield copy_of
    for kind in ("cnn", "kl", "warm", "small", "metric"):
        for framework in ("linen", "torch"):
            sys.modules.pop(f"{kind}_{framework}", None)


FRAMEWORKS = [("linen", 0), ("torch", 1)]


@pytest.mark.parametrize(("framework", "place"), FRAMEWORKS)
def test_a_custom_network_trains(framework, place, copy_of, tmp_path):
    code = blocks("extend", "Change the network", "python")[place]
    copy = copy_of(f"ppo_{framework}", f"cnn_{framework}", with_class, code)
    [flags] = re.findall("ppo_cnn.py (--.+)", blocks("extend", "Change the network", "bash")[1])
    folder = train(copy, tmp_path, "run", *flags.split(), iterations=2)
    assert all(row["losses/value_loss"] > 0 for row in rows(folder))
    convolution = [x for name, x in arrays(folder).items() if "conv" in name]
    assert sorted(x.size for x in convolution if x.ndim)[-1] == 3 * 3 * 4 * 16
    assert all(x.any() for x in convolution)  # weights, biases that started as 0, Adam's moments


def without_run_log(text, code):
    return text.partition("# === Run log")[0] + code


@pytest.mark.parametrize(("framework", "place"), FRAMEWORKS)
def test_a_copy_without_the_run_log_trains(framework, place, copy_of, tmp_path, capsys):
    [code] = blocks("extend", "Make it smaller", "python")
    name = copy_of(f"ppo_{framework}", f"small_{framework}", without_run_log, code)
    script = importlib.import_module(name)
    sizes = {"num_envs": 4, "num_steps": 32, "num_minibatches": 2, "hidden_sizes": (8,)}
    script.train(script.Args(total_timesteps=3 * BATCH, runs_dir=str(tmp_path / "runs"), **sizes))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["0", "1", "2"]


@pytest.mark.parametrize("place", [0, 1])
def test_a_metric_and_a_schedule(place, copy_of, tmp_path):
    code = blocks("extend", "Add a metric, or a schedule", "diff")[place]
    copy = copy_of("ppo_linen", "metric_linen", edited, code)
    logged = rows(train(copy, tmp_path, "run", iterations=20))
    if place == 0:
        assert all(row["charts/value_mean"] is not None for row in logged)
    else:
        rates = [row["charts/learning_rate"] for row in logged]
        assert rates[0] == 0 and rates.index(max(rates)) == 2 and 0 < rates[-1] < 1e-4 / 4


def test_a_flag_makes_a_wider_network(tmp_path):
    [flags] = re.findall("ppo_linen.py (--.+)", blocks("extend", "Change the network", "bash")[0])
    folder = train("ppo_linen", tmp_path, "run", *flags.split(), iterations=1)
    assert {x.shape for name, x in arrays(folder).items() if "Dense_1/kernel" in name} == {
        (256, 256)
    }


@pytest.mark.parametrize(("framework", "place"), FRAMEWORKS)
def test_target_kl_stops_after_an_epoch(framework, place, copy_of, tmp_path):
    """A huge --target-kl has no effect; a negative one stops after one of two epochs."""
    heading = "Change the loss, or stop an epoch early"
    code = blocks("extend", heading, "diff")[place]
    copy = copy_of(f"ppo_{framework}", f"kl_{framework}", edited, code)
    script = f"ppo_{framework}"
    far = metrics(train(copy, tmp_path, "far", "--target-kl", 1e9, iterations=3))
    assert [row.pop("charts/epochs") for row in far] == [2, 2, 2]
    assert_alike(far, metrics(train(script, tmp_path, "whole", iterations=3)))
    # The KL divergence is at least 0, and 0 up to rounding in the first minibatch.
    near = metrics(train(copy, tmp_path, "near", "--target-kl", -1, *ONE_EPOCH[:1], iterations=3))
    assert [row.pop("charts/epochs") for row in near] == [1, 1, 1]
    if framework == "linen":  # in PyTorch, one permutation less changes the next actions
        assert_alike(near, metrics(train(script, tmp_path, "one", *ONE_EPOCH, iterations=3)))


def assert_alike(rows, expected):
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(("framework", "place"), FRAMEWORKS)
def test_a_new_run_starts_from_trained_weights(framework, place, copy_of, tmp_path, whole_run):
    """With a learning rate of 0, it also ends with them."""
    code = blocks("extend", "Start a new run from trained weights", "diff")[place]
    copy = copy_of(f"ppo_{framework}", f"warm_{framework}", edited, code)
    other = whole_run(f"ppo_{framework}").folder
    flags = ("--start-from", other, "--learning-rate", 0, "--num-envs", 8)
    before, after = weights(other), weights(train(copy, tmp_path, "run", *flags, iterations=2))
    assert before.keys() == after.keys() and len(before) == 12
    for name, x in before.items():
        np.testing.assert_array_equal(x, after[name], err_msg=name)


def weights(folder):
    found = arrays(folder).items()
    return {name: x for name, x in found if name.startswith(("train_state/params/", "agent/"))}


def test_a_copy_of_a_finished_run_trains_for_longer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = train("ppo_linen", "runs", "mine", iterations=2)
    copy_it, resume_it = blocks("extend", "Train a finished run for longer", "bash")[0].splitlines()
    subprocess.run(copy_it.split(), check=True)
    words = resume_it.replace("2000000", "512").split()[2:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ppo_linen.py", *words])
        ppo_linen.train(ppo_linen.parse_args())
    assert (len(rows(folder)), len(rows(tmp_path / "runs/longer"))) == (2, 4)
    assert 0 < rows(tmp_path / "runs/longer")[-1]["charts/learning_rate"] <= 1e-4 / 4


# === A policy in another program ================================================================
def test_a_program_in_another_folder_plays_an_episode(tmp_path):
    """With a script from more/, found through the variable that the page names."""
    [code] = blocks("use", "Use a policy in your own program", "python")
    [command] = blocks("use", "Use a policy in your own program", "bash")
    (tmp_path / "play.py").write_text(code)
    train("ppo_linen_gymnasium", tmp_path / "runs", "gym", iterations=1)
    line = command.replace("~/ppo-rosetta", str(ROOT)).replace("python", sys.executable, 1)
    said = subprocess.check_output(["bash", "-c", line], cwd=tmp_path, text=True)
    assert 1 <= float(said) <= 500


# === Export ====================================================================================
PLACE = "Export a policy"
PAIRS = [
    ("ppo_linen", "ppo_torch"),
    ("ppo_continuous_linen", "ppo_continuous_torch"),
    ("ppo_continuous_linen_gymnasium", "ppo_continuous_torch_gymnasium"),
]


@pytest.mark.parametrize("column", range(3))
def test_the_table_of_checkpoint_arrays(column, whole_run):
    """Its expressions give arrays of the right shapes, in each framework."""
    lines = re.findall(r"^\| (.+) \|$", section("extend", PLACE), re.M)
    (_, *frameworks), (_, *roots), *table = [x.split(" | ") for x in lines if "---" not in x]
    run = whole_run(f"ppo_continuous_{frameworks[column].lower().replace('pytorch', 'torch')}")
    saved = read(run.folder)
    found = {}
    for label, *cells in table:
        if cells[column].startswith("("):
            found["order"] = cells[column]
            continue
        root = '`saved["stats"]`' if "`saved" in label else roots[column]
        found[label] = np.shape(eval((root + cells[column]).replace("`", ""), {"saved": saved}))
    [obs_dim] = found['mean of observations, prefix `saved["stats"]`']
    [action_dim] = found["log standard deviation of the actions"]
    shapes = [(obs_dim, 8), (8, 8), (8, action_dim), (8, 1)]
    order = found.pop("order")
    if order == "(outputs, inputs)":
        shapes = [shape[::-1] for shape in shapes]
    else:
        assert order == "(inputs, outputs)"
    matrices = [x for x in found.values() if len(x) == 2]
    assert (matrices, len(found)) == (shapes, 8)


def read(folder):
    """Read a checkpoint as the page does."""
    (path,) = folder.glob("checkpoint.*")
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    return msgpack_restore(path.read_bytes())


def exported(linen, pytorch):
    """Run the program of the page for two scripts, and return its names."""
    program, discrete, _, continuous = blocks("extend", PLACE, "python")
    program += discrete
    if "continuous" in linen:
        program = program.replace("from ppo_linen", f"from more.{linen}")
        more = "import Agent, RunningMeanStd, normalize"
        program = program.replace("from ppo_torch import Agent", f"from more.{pytorch} {more}")
        program += continuous
    names: dict[str, Any] = {}
    exec(program, names)
    return names


def observations(folder, count):
    shape = load_info(folder)["obs_shape"]
    return np.random.default_rng(0).normal(size=(count, *shape)).astype("f")


def load_info(folder):
    info, _ = importlib.import_module(folder.parent.name).load_info(folder)
    return info


@pytest.mark.parametrize(("linen", "pytorch"), PAIRS)
def test_a_linen_run_becomes_a_pytorch_agent(linen, pytorch, whole_run):
    """Logits or means, values and log_std agree to 1e-6."""
    folder = whole_run(linen).folder
    obs = observations(folder, 300)
    with torch.no_grad():
        theirs = exported(linen, pytorch)["to_torch"](folder)(torch.from_numpy(obs))
    script, info = importlib.import_module(linen), load_info(folder)
    actions = info.get("num_actions") or info["action_dim"]
    agent = script.Agent((8, 8), actions)
    with jax.default_matmul_precision("highest"):
        ours = agent.apply(read(folder)["train_state"]["params"], obs)
    assert len(ours) == len(theirs) == (3 if "continuous" in linen else 2)
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("linen", "pytorch"), PAIRS)
def test_the_pytorch_policy_acts_as_the_linen_policy(linen, pytorch, whole_run):
    folder = whole_run(linen).folder
    obs = observations(folder, 300)
    with torch.no_grad():
        theirs = exported(linen, pytorch)["Policy"](folder)(torch.from_numpy(obs))
    assert_same_actions(importlib.import_module(linen).load_policy(folder)(obs), theirs.numpy())


def assert_same_actions(ours, theirs):
    assert ours.shape == theirs.shape and len(np.unique(ours)) > 1
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("linen", "pytorch"), PAIRS)
def test_onnx_runtime_acts_as_the_linen_policy(linen, pytorch, whole_run, tmp_path, monkeypatch):
    """Also with other numbers of observations than in the export."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    folder = whole_run(linen).folder
    (tmp_path / "runs").mkdir()
    shutil.copytree(folder, tmp_path / "runs/mine")
    monkeypatch.chdir(tmp_path)
    code = blocks("extend", PLACE, "python")[2]
    names = exported(linen, pytorch) | {"obs": observations(folder, 300)}
    exec(code, names)
    ours = importlib.import_module(linen).load_policy(folder)(names["obs"])
    assert_same_actions(ours, names["action"])
    [one] = names["session"].run(None, {"obs": names["obs"][:1]})
    np.testing.assert_allclose(one, ours[:1], rtol=1e-6, atol=1e-6)

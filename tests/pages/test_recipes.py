"""Read the code of the recipes in docs/ from the pages, and run it as a reader would."""

import ast
import csv
import importlib
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import dqn
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import ROOT
from flax import nnx
from flax.serialization import msgpack_restore
from running import BATCH, SMALL, arrays, main, metrics, op_by_op, rows
from sections import (
    CONTINUOUS_SCRIPTS,
    DQN_SCRIPTS,
    RNN_SCRIPTS,
    ROWS,
)
from sections import read as read_script

import ppo_linen

ONE_EPOCH = ("--no-anneal-lr", "--update-epochs", 1)


def section(page, heading):
    text = (ROOT / f"docs/{page}.md").read_text()
    assert f"\n## {heading}\n" in text
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def blocks(page, heading, language):
    """Return the code blocks of a section in the given language."""
    return re.findall(rf"^```{language}\n(.*?)^```", section(page, heading), re.M | re.S)


def train(name, runs_dir, run_name, *flags, iterations):
    """Train with a script or with a copy of one, and return the run folder."""
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
    """Replace the class in the text of a script that has the same name as the class in code."""
    name = ast.parse(code).body[0].name
    (old,) = [x for x in ast.parse(text).body if getattr(x, "name", "") == name]
    lines = text.splitlines(keepends=True)
    lines[old.lineno - 1 : old.end_lineno] = [code]
    return "".join(lines)


@pytest.fixture
def copy_of(tmp_path, monkeypatch):
    """Return a function that writes a changed copy of a script as a module with a new name."""
    monkeypatch.syspath_prepend(tmp_path)

    def copy_of(script, name, change, code):
        text = (ROOT / f"{script}.py").read_text()
        (tmp_path / f"{name}.py").write_text(change(text, code))
        importlib.invalidate_caches()
        return name

    yield copy_of
    for kind in ("kl", "warm", "small", "metric"):
        for framework in ("linen", "torch"):
            sys.modules.pop(f"{kind}_{framework}", None)


# === Convolutions ===============================================================================
NETWORK = "Change the network"
# One script for each framework and kind of edit, and one for Gymnasium.
CONVOLVED = ["ppo_linen", "ppo_nnx", "ppo_equinox", "ppo_torch", "ppo_rnn_linen", "ppo_rnn_torch"]
CONVOLVED += ["ppo_continuous_linen", "ppo_continuous_torch", "dqn_linen", "dqn_torch"]
# Environment id -> channels of the observations.
INPUTS = {"Breakout-MinAtar": 4, "envs.pixel_grid:PixelGrid-v0": 1, "ImageAim-v0": 2}


def with_convolution(text, name):
    """Add a convolution to the Agent class in the text of a script, as docs/extend.md explains."""
    framework = ROWS[name]["framework"]
    if name in DQN_SCRIPTS:
        place = ("linen", "nnx", "torch").index(framework)
        return edited(text, blocks("extend", NETWORK, "diff")[place])
    *classes, encode, gaussian, _ = blocks("extend", NETWORK, "python")
    code = dict(zip(("linen", "nnx", "equinox", "torch"), classes, strict=True))[framework]
    if name in RNN_SCRIPTS:
        return with_class(text, with_features(class_in(text), code, "encode", encode))
    if name in CONTINUOUS_SCRIPTS:
        agent = with_features(class_in(text), code, "get_gaussian", "")
        return with_class(text, with_gaussian(agent, gaussian))
    return with_class(text, code)


def class_in(text):
    (old,) = [x for x in ast.parse(text).body if getattr(x, "name", "") == "Agent"]
    lines = text.splitlines(keepends=True)
    return "".join(lines[old.lineno - 1 : old.end_lineno])


def with_features(agent, code, method, line):
    """Copy the convolution from the class in code to agent, and add a line to the given method."""
    convolution = r"^        (?:height, .*?\n        obs_shape = .*?\n|self\.conv = .*?\n)"
    [lines] = re.findall(convolution, code, re.M | re.S)
    [get_features] = re.findall(r"^    def get_features.*?\n\n", code, re.M | re.S)
    [fields] = re.findall(r"^class .*\n((?:    conv: .*\n)?)", code)
    agent = re.sub("(^class .*\n)", rf"\1{fields}", agent)
    beginning = r"(    def (?:__init__|setup)\(.*\n(?:        super\(\).*\n)?)"
    agent = re.sub(beginning, rf"\1{lines}", agent)
    return re.sub(
        rf'    def {method}\(.*\n        """.*\n',
        rf"{get_features}\g<0>{textwrap.indent(line, 8 * ' ')}",
        agent,
    )


def with_gaussian(agent, code):
    """Rename get_gaussian to gaussian_of, and replace get_value and all later methods with code."""
    call = re.findall(r"def (__call__|forward)\(", agent)[-1]
    agent = agent.partition("    def get_value(")[0].replace("def get_gaussian", "def gaussian_of")
    return agent + textwrap.indent(code.replace("__call__", call), "    ")


def kernels_of(folder, inputs, outputs):
    """Return the 3x3 kernels in a checkpoint, and Adam's moments for them."""
    sizes = sorted([3, 3, inputs, outputs])
    return {name: x for name, x in arrays(folder).items() if sorted(x.shape[-4:]) == sizes}


@pytest.mark.parametrize("name", CONVOLVED)
def test_a_convolution_trains(name, tmp_path, monkeypatch):
    [command] = re.findall("ppo_cnn.py (--.+)", blocks("extend", NETWORK, "bash")[1])
    env_id = command.split()[-1]
    flags = [*SMALL.split(), "--total-timesteps", 2 * BATCH]
    if name in CONTINUOUS_SCRIPTS:
        env_id = "ImageAim-v0"
    elif "gymnasium" in name:
        env_id = "envs.pixel_grid:PixelGrid-v0"
    if name in DQN_SCRIPTS:
        flags = [*dqn.SMALL.split(), "--total-timesteps", 2 * 64]
    flags += ["--env-id", env_id, "--save-every", 1, "--runs-dir", tmp_path, "--run-name", "run"]
    copy = f"cnn_{name}"
    (tmp_path / f"{copy}.py").write_text(with_convolution(read_script(name), name))
    monkeypatch.syspath_prepend(tmp_path)
    script = importlib.import_module(copy)
    op_by_op(monkeypatch, script)
    save, saved = script.save_checkpoint, []

    def keep(folder, *what):
        save(folder, *what)
        sizes = (16, 32) if name in DQN_SCRIPTS else (INPUTS[env_id], 16)
        saved.append(kernels_of(folder, *sizes))

    monkeypatch.setattr(script, "save_checkpoint", keep)
    assert main(copy, *flags) == 0
    sys.modules.pop(copy)
    assert len(saved) >= 2 and saved[0]
    for place, kernel in saved[0].items():
        assert (kernel != saved[-1][place]).any(), place


def with_fast_gradient(text, framework):
    """Copy the custom gradient to the text of a script, and use it as docs/extend.md explains."""
    source = read_script("ppo_cnn_linen_gymnasium")
    [lines] = re.findall(r"^AXES.*?^strided_convolution\.defvjp.*?\n", source, re.M | re.S)
    text = text.replace("\nclass Agent(", f"\n{lines}\n\nclass Agent(")
    if framework == "equinox":
        code = textwrap.indent(blocks("extend", NETWORK, "python")[-1], "    ")
        return re.sub(r"    def get_features.*?\n(?=\n)", code, text, flags=re.S)
    argument = re.search("`(conv_general_dilated=.+?)`", section("extend", NETWORK))
    assert argument
    return text.replace('padding="VALID"', f'padding="VALID", {argument[1]}')


def outputs_of(script, framework):
    """Return new parameters, and a function that maps parameters and obs to logits and values."""
    key = jax.random.key(0)
    args = script.Args(hidden_sizes=(8,), matmul_precision="highest")
    made = script.make_agent(args, (7, 6, 3), 2, key)
    if framework == "linen":
        return made.params, made.apply_fn
    if framework == "nnx":
        graphdef, params = nnx.split(made[0])
        return params, lambda params, obs: nnx.merge(graphdef, params)(obs)
    params, static = eqx.partition(made.agent, eqx.is_inexact_array)
    return params, lambda params, obs: eqx.combine(params, static)(obs)


@pytest.mark.parametrize("framework", ["linen", "nnx", "equinox"])
def test_the_fast_gradient_of_a_convolution_matches_xla(framework, tmp_path, monkeypatch):
    name = f"ppo_{framework}"
    text = with_convolution(read_script(name), name)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"plain_{name}.py").write_text(text)
    (tmp_path / f"fast_{name}.py").write_text(with_fast_gradient(text, framework))
    obs = np.random.default_rng(0).normal(size=(5, 7, 6, 3)).astype("f")
    found = []
    for kind in ("plain", "fast"):
        params, outputs = outputs_of(importlib.import_module(f"{kind}_{name}"), framework)
        sys.modules.pop(f"{kind}_{name}")

        def loss(params, outputs=outputs):
            logits, value = outputs(params, obs)
            return jnp.sin(100 * logits).sum() + jnp.sin(value).sum()

        grad = jax.value_and_grad(loss)
        assert ("optimization_barrier" in str(jax.make_jaxpr(grad)(params))) == (kind == "fast")
        with jax.default_matmul_precision("highest"):
            found.append(jax.tree.leaves(grad(params)))
    for plain, fast in zip(*found, strict=True):
        assert np.abs(plain).max() > 1e-3
        np.testing.assert_allclose(fast, plain, rtol=1e-4, atol=1e-4)


FRAMEWORKS = [("linen", 0), ("torch", 1)]


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
    # The KL divergence is never negative, so it always exceeds this target.
    near = metrics(train(copy, tmp_path, "near", "--target-kl", -1, *ONE_EPOCH[:1], iterations=3))
    assert [row.pop("charts/epochs") for row in near] == [1, 1, 1]
    if framework == "linen":  # in PyTorch, skipping a permutation changes later random numbers
        assert_alike(near, metrics(train(script, tmp_path, "one", *ONE_EPOCH, iterations=3)))


def assert_alike(rows, expected):
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(("framework", "place"), FRAMEWORKS)
def test_a_new_run_starts_from_trained_weights(framework, place, copy_of, tmp_path, whole_run):
    """The learning rate is 0, so the weights do not change during the run."""
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
    rates = [row["charts/learning_rate"] for row in rows(tmp_path / "runs/longer")]
    assert rates[2:] == pytest.approx([2.5e-4 / 2, 2.5e-4 / 4])


def test_an_nnx_agent_with_dropout_trains(copy_of, tmp_path):
    """Each minibatch draws new numbers. Without dropout, the result is that of the script."""
    [code] = blocks("nnx", "grad", "diff")
    plain = copy_of("ppo_nnx_tree", "others_nnx", edited, code)
    ours = metrics(train(plain, tmp_path, "plain", iterations=2))
    assert_alike(ours, metrics(train("ppo_nnx_tree", tmp_path, "script", iterations=2)))
    text = (tmp_path / "others_nnx.py").read_text()
    layer = "        self.output = make("
    text = text.replace(layer, f"        self.dropout = nnx.Dropout(0.5, rngs=rngs)\n{layer}")
    text = text.replace("return self.output(x)", "return self.output(self.dropout(x))")
    state = "nnx.state(objects, nnx.Not(nnx.RngState))"  # as the page explains under State
    text = text.replace("nnx.state(objects)", state)
    (tmp_path / "dropout_nnx.py").write_text(text)
    changed = metrics(train("dropout_nnx", tmp_path, "dropout", iterations=2))
    assert changed[0] != ours[0]


def test_a_linen_run_continues_in_nnx(tmp_path, monkeypatch):
    """The parameters and the state of Adam move: the metrics match a longer run to rounding."""
    monkeypatch.chdir(tmp_path)
    whole = train("ppo_linen", "runs", "whole", "--no-anneal-lr", iterations=4)
    train("ppo_linen", "runs", "linen", "--no-anneal-lr", iterations=2)
    [code] = blocks("nnx", "Move a Linen project to NNX", "python")
    exec(code, {})
    assert main("ppo_nnx_tree", "--resume", "runs/nnx", "--total-timesteps", 4 * BATCH) == 0
    assert_alike(metrics(Path("runs/nnx")), metrics(whole))
    assert (len(rows(Path("runs/nnx"))), len(rows(Path("runs/linen")))) == (4, 2)


# === A policy in another program ================================================================
def test_a_program_in_another_folder_runs_an_episode(tmp_path):
    """The command on the page adds the project to PYTHONPATH."""
    [code] = blocks("use", "Use a policy in your own program", "python")
    [command] = blocks("use", "Use a policy in your own program", "bash")
    (tmp_path / "play.py").write_text(code)
    train("ppo_linen_gymnasium", tmp_path / "runs", "gym", iterations=1)
    line = command.replace("~/ppo-rosetta", str(ROOT)).replace("python", sys.executable, 1)
    said = subprocess.check_output(["bash", "-c", line], cwd=tmp_path, text=True)
    assert 1 <= float(said) <= 500


# === Export =====================================================================================
PLACE = "Export a policy"
PAIRS = [
    ("ppo_linen", "ppo_torch"),
    ("ppo_continuous_linen_gymnasium", "ppo_continuous_torch_gymnasium"),
]


@pytest.mark.parametrize("column", range(3))
def test_the_table_of_checkpoint_arrays(column, whole_run):
    """The expressions in the column of each framework give arrays with the expected shapes."""
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
    """Load a checkpoint as docs/extend.md explains."""
    (path,) = folder.glob("checkpoint.*")
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    return msgpack_restore(path.read_bytes())


def exported(linen, pytorch):
    """Run the export program in docs/extend.md for two scripts. Return its global variables."""
    program, discrete, _, continuous, *_ = blocks("extend", PLACE, "python")
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
    """The outputs (logits or means, values, log_std) agree to 1e-6."""
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
def test_the_pytorch_policy_acts_like_the_linen_policy(linen, pytorch, whole_run):
    folder = whole_run(linen).folder
    obs = observations(folder, 300)
    with torch.no_grad():
        theirs = exported(linen, pytorch)["Policy"](folder)(torch.from_numpy(obs))
    assert_same_actions(importlib.import_module(linen).load_policy(folder)(obs), theirs.numpy())


def assert_same_actions(ours, theirs):
    assert ours.shape == theirs.shape and len(np.unique(ours)) > 1
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


ONNX = ["ppo_torch", "ppo_continuous_torch_gymnasium", "ppo_continuous_linen_gymnasium"]


@pytest.mark.parametrize("name", ONNX)
def test_onnx_runtime_acts_like_the_policy_of_a_run(name, whole_run, tmp_path, monkeypatch):
    """The batch size may differ from the one used for the export, 2."""
    folder = whole_run(name).folder
    (tmp_path / "runs").mkdir()
    shutil.copytree(folder, tmp_path / "runs/mine")
    monkeypatch.chdir(tmp_path)
    program, discrete, run_it, _, *from_pytorch = blocks("extend", PLACE, "python")
    if "linen" in name:
        names = exported(*PAIRS[1])
    else:
        names = {}
        exec(program + discrete + from_pytorch["continuous" in name], names)
    policy = importlib.import_module(name).load_policy(folder)
    names["obs"] = observations(folder, 300)
    exec(run_it, names)
    assert_same_actions(policy(names["obs"]), names["action"])
    for size in (1, 3):
        batch = names["obs"][:size]
        [action] = names["session"].run(None, {"obs": batch})
        np.testing.assert_allclose(action, policy(batch), rtol=1e-6, atol=1e-6, strict=True)


@pytest.fixture
def convolved(tmp_path, monkeypatch):
    """Run the export program for agents with a convolution. Yield its global variables."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    program, discrete, *_ = blocks("extend", PLACE, "python")
    [diff] = blocks("extend", PLACE, "diff")
    program = edited(program, diff) + discrete
    for name in ("ppo_linen", "ppo_torch"):
        copy = name.replace("ppo", "cnn")
        (tmp_path / f"{copy}.py").write_text(with_convolution(read_script(name), name))
        program = program.replace(f"from {name} import", f"from {copy} import")
    train("cnn_linen", "runs", "mine", "--env-id", "Breakout-MinAtar", iterations=1)
    names: dict[str, Any] = {}
    exec(program, names)
    names["obs"] = np.random.default_rng(0).normal(size=(100, 10, 10, 4)).astype("f")
    yield names
    for copy in ("cnn_linen", "cnn_torch"):
        sys.modules.pop(copy)


def test_a_linen_agent_with_a_convolution_becomes_a_pytorch_agent(convolved):
    """Frameworks flatten features in different orders, and a wrong order raises no error."""
    obs = convolved["obs"]
    agent = importlib.import_module("cnn_linen").Agent((8, 8), 3)
    with jax.default_matmul_precision("highest"):
        ours = agent.apply(read(Path("runs/mine"))["train_state"]["params"], obs)
    with torch.no_grad():
        theirs = convolved["to_torch"]("runs/mine")(torch.from_numpy(obs))
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their.numpy(), rtol=1e-5, atol=1e-6)


def test_onnx_runtime_acts_like_a_policy_with_a_convolution(convolved):
    exec(blocks("extend", PLACE, "python")[2], convolved)
    ours = importlib.import_module("cnn_linen").load_policy("runs/mine")(convolved["obs"])
    assert_same_actions(ours, convolved["action"])

"""What a user would type ends in one sentence, exit status 2, no traceback, no file."""

import os
import shutil
import sqlite3
import subprocess
import sys

import pytest
from conftest import ROOT
from running import content, main, train
from sections import ALL_SCRIPTS, VMAP_SCRIPTS, stand_ins

SIZES = "must be 1 or more"
BAD = [
    ("--seed -1", "--seed must lie between 0 and 2**32 - "),
    ("--seed 4294967296", "--seed must lie between 0 and 2**32 - "),
    ("--num-envs 0", f"--num-envs {SIZES}"),
    ("--num-steps -1", f"--num-steps {SIZES}"),
    ("--update-epochs 0", f"--update-epochs {SIZES}"),
    ("--num-minibatches 0", f"--num-minibatches {SIZES}"),
    ("--num-minibatches 7", "--num-minibatches must divide the batch, 8192 steps"),
    ("--total-timesteps 100", "--total-timesteps must be at least a batch, 8192 steps"),
    ("--num-envs many", "invalid literal for int"),
    ("--matmul-precision low", "--matmul-precision"),
    ("--no-such-flag", "--no-such-flag"),
]
BAD_ENVIRONMENTS = [
    ("CartPole-v7", "gymnax has no CartPole-v7; the closest name is CartPole-v1"),
    ("Breakout", "gymnax has no Breakout; the closest name is Breakout-MinAtar"),
    ("Pendulum-v1", "the actions of Pendulum-v1 are continuous, and must be discrete"),
]


@pytest.mark.parametrize("name", stand_ins("Arguments", (*ALL_SCRIPTS, *VMAP_SCRIPTS)))
@pytest.mark.parametrize(("flags", "sentence"), BAD)
def test_bad_values(name, flags, sentence, tmp_path, capfd):
    assert main(name, *flags.split()) == 2
    output, errors = capfd.readouterr()
    assert sentence in errors and "Traceback" not in errors
    assert output == ""
    assert not list(tmp_path.iterdir())


def test_the_highest_seed_of_many_agents(tmp_path, capfd):
    """The last agent's is seed + num_agents - 1."""
    assert main("ppo_linen_vmap", "--num-agents", 2, "--seed", 2**32 - 1) == 2
    assert "--seed must lie between 0 and 2**32 - --num-agents" in capfd.readouterr().err
    assert main("ppo_linen_vmap", "--num-agents", 0) == 2
    assert f"--num-agents {SIZES}" in capfd.readouterr().err


@pytest.mark.parametrize(("env_id", "sentence"), BAD_ENVIRONMENTS)
def test_bad_environments(env_id, sentence, tmp_path, capfd):
    assert main("ppo_linen", "--env-id", env_id) == 2
    assert capfd.readouterr() == ("", f"--env-id: {sentence}\n")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A stopped run, and a complete one."""
    folder = tmp_path_factory.mktemp("runs")
    train("ppo_linen", folder, "stopped", stops=1, iterations=2)
    train("ppo_linen", folder, "complete", iterations=1)
    return folder


EXISTS = "exists: choose another --run-name, or go on with --resume"
COMPLETE = "exists and is complete: choose another --run-name, or evaluate it"
OWN = "goes on with its own arguments, so give no others"
FOLDERS = [
    ("--runs-dir {runs} --run-name stopped", "{runs}/stopped " + EXISTS + " {runs}/stopped"),
    ("--runs-dir {runs} --run-name complete", "{runs}/complete " + COMPLETE),
    ("--resume {runs}/complete", "{runs}/complete " + COMPLETE),
    ("--resume {runs}/stopped --seed 2", "--resume: {runs}/stopped " + OWN),
    ("--resume {runs}/stopped --no-anneal-lr", "--resume: {runs}/stopped " + OWN),
    (
        "--resume {runs}/missing",
        "{runs}/missing/checkpoint.npz is not there, or is damaged (FileNotFoundError)",
    ),
]


@pytest.mark.parametrize(("flags", "sentence"), FOLDERS)
def test_folders(runs, flags, sentence, capfd):
    before = content(runs)
    assert main("ppo_linen", *flags.format(runs=runs).split()) == 2
    assert capfd.readouterr() == ("", sentence.format(runs=runs) + "\n")
    assert content(runs) == before


def test_a_folder_in_use(runs, tmp_path, capfd):
    """Until that process ends; the lock is any system's, by SQLite."""
    folder = shutil.copytree(runs / "stopped", tmp_path / "stopped")
    lock = sqlite3.connect(folder / "lock")
    lock.execute("BEGIN EXCLUSIVE")
    assert main("ppo_linen", "--resume", folder) == 2
    assert capfd.readouterr() == ("", f"{folder} is in use by another process\n")
    lock.close()
    assert main("ppo_linen", "--resume", folder) == 0


@pytest.mark.parametrize("name", ["ppo_torch_compile", "ppo_torch_vmap"])
def test_without_a_cpp_compiler(name, tmp_path):
    """As in a slim container; PyTorch itself prints 69 lines."""
    command, env = [sys.executable, ROOT / f"{name}.py"], os.environ | {"PATH": ""}
    env.pop("CXX", None)
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    said = "torch.compile needs a C++ compiler, which is not there; on Debian: apt install g++\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_tracking_without_a_key_waits_for_none(tmp_path):
    """W&B's own words say what to do."""
    command = [sys.executable, ROOT / "ppo_linen.py", "--track"]
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_MODE": "online"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | home, timeout=120
    )
    assert done.returncode == 1
    assert "wandb login" in done.stderr

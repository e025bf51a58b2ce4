"""What a user would type ends in one sentence, exit status 2, no traceback, no file."""

import importlib
import os
import shutil
import sqlite3
import subprocess
import sys
from typing import Any

import pytest
from conftest import ROOT
from running import content, main
from sections import ALL_SCRIPTS, VMAP_SCRIPTS
from test_dqn_structure import function
from torch._inductor import cpp_builder

SEED = "--seed must lie between 0 and 2**32 - "
PPO = {
    "--seed 4294967296": f"{SEED}1",
    "--num-envs 0": "--num-envs must be 1 or more",
    "--num-envs many": "invalid literal for int",
    "--num-minibatches 7": "--num-minibatches must divide the batch, 8192 steps",
    "--total-timesteps 8191": "must be at least a batch, 8192 steps",
    "--no-such-flag": "--no-such-flag",
    "--env-id CartPole-v7": "gymnax has no CartPole-v7; the closest name is CartPole-v1\n",
    "--env-id Pendulum-v1": "the actions of Pendulum-v1 are continuous, and must be discrete\n",
}
MANY = {
    "--num-agents 0": "--num-agents must be 1 or more",
    "--seed 4294967295": f"{SEED}--num-agents",
}
DQN = {
    "--seed -1": f"{SEED}1",
    "--exploration-steps 0": "--exploration-steps must be 1 or more",
    "--buffer-size 10001": "--buffer-size must be a multiple of --num-envs, 8",
    "--total-timesteps 4999": "must be at least an iteration, 5000 steps",
    "--full-actions": "--full-actions is for MinAtar's games, not for CartPole-v1\n",
    "--env-id Breakout": "gymnax has no Breakout; the closest name is Breakout-MinAtar\n",
}
BAD = [("ppo_linen", *x) for x in PPO.items()]
BAD += [("ppo_linen_vmap", *x) for x in MANY.items()]
BAD += [("dqn_linen", *x) for x in DQN.items()]


@pytest.mark.parametrize(("name", "flags", "sentence"), BAD)
def test_what_cannot_work_is_one_sentence(name, flags, sentence, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # of the box around what is wrong with a flag
    assert main(name, *flags.split()) == 2
    output, errors = capfd.readouterr()
    assert sentence in errors and "Traceback" not in errors
    assert errors.count("\n") == 1 or "--help" in errors
    assert output == "" and not list(tmp_path.iterdir())


def test_the_other_scripts_check_their_flags_by_the_same_words():
    """DQN's four: test_dqn_structure.py. Environments in Gymnasium: test_gymnasium.py."""
    for scripts in (ALL_SCRIPTS, VMAP_SCRIPTS):
        assert len({function(name, "__post_init__") for name in scripts}) == 1


@pytest.fixture
def runs(whole_run, tmp_path, monkeypatch):
    """A complete run, and one that was killed before it could write run.json."""
    for name in ("complete", "killed"):
        shutil.copytree(whole_run("ppo_torch").folder, tmp_path / name)
    (tmp_path / "killed/run.json").unlink()
    monkeypatch.chdir(tmp_path)
    return tmp_path


NAME = "choose another --run-name, or"
OWN = "--resume: killed goes on with its own arguments, so give no others"
FOLDERS = {
    "--runs-dir . --run-name killed": f"killed exists: {NAME} go on with --resume killed",
    "--resume complete": f"complete exists and is complete: {NAME} evaluate it",
    "--resume killed --seed 2": OWN,
    "--resume no": "no/checkpoint.npz is not there, or is damaged (FileNotFoundError)",
}


@pytest.mark.parametrize("flags", FOLDERS)
def test_folders(flags, runs, capfd):
    before = content(runs)
    capfd.readouterr()
    assert main("ppo_torch", *flags.split()) == 2
    assert capfd.readouterr() == ("", FOLDERS[flags] + "\n")
    assert content(runs) == before


def test_a_folder_in_use(runs, capfd):
    """Until that process ends; the lock is any system's, by SQLite."""
    lock = sqlite3.connect("killed/lock")
    lock.execute("BEGIN EXCLUSIVE")
    capfd.readouterr()
    assert main("ppo_torch", "--resume", "killed") == 2
    assert capfd.readouterr() == ("", "killed is in use by another process\n")
    lock.close()
    assert main("ppo_torch", "--resume", "killed") == 0


@pytest.mark.parametrize("name", ["ppo_torch_compile", "dqn_torch"])
def test_without_a_cpp_compiler(name, monkeypatch, capfd):
    """As in a slim container; PyTorch itself prints 69 lines."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    search = cpp_builder.cpp_compiler_search.__wrapped__  # which remembers nothing
    monkeypatch.setattr(cpp_builder, "cpp_compiler_search", search)
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(name).compile_graph(len, gpu=None)
    said = "torch.compile needs a C++ compiler, which is not there; on Debian: apt install g++\n"
    assert (stopped.value.code, capfd.readouterr().err) == (2, said)


def test_tracking_without_a_key_waits_for_none(tmp_path):
    """W&B's own words say what to do."""
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_MODE": "online"}
    command = [sys.executable, ROOT / "ppo_linen.py", "--track"]
    options: Any = {"capture_output": True, "text": True, "cwd": tmp_path, "timeout": 120}
    done = subprocess.run(command, env=os.environ | home, **options)
    assert done.returncode == 1 and "wandb login" in done.stderr

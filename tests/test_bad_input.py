"""What a user would type ends in one sentence, exit status 2, no traceback, no file."""

import importlib
import os
import shutil
import sqlite3
import subprocess
import sys

import pytest
from conftest import ROOT
from dqn import main
from sections import ALL_SCRIPTS, VMAP_SCRIPTS
from test_dqn_structure import function
from torch._inductor import cpp_builder

SEED = "--seed must lie between 0 and 2**32 - "
CONTINUOUS = "--env-id: the actions of Pendulum-v1 are continuous, and must be discrete\n"
PPO = {
    "--seed -1": f"{SEED}1",
    "--seed 4294967296": f"{SEED}1",
    "--num-envs 0": "--num-envs must be 1 or more",
    "--num-envs many": "invalid literal for int",
    "--num-minibatches 7": "--num-minibatches must divide the batch, 8192 steps",
    "--total-timesteps 8191": "must be at least a batch, 8192 steps",
    "--no-such-flag": "--no-such-flag",
    "--env-id CartPole-v7": "gymnax has no CartPole-v7; the closest name is CartPole-v1\n",
    "--env-id Pendulum-v1": CONTINUOUS,
}
MANY = {
    "--num-agents 0": "--num-agents must be 1 or more",
    "--seed 4294967295": f"{SEED}--num-agents",
}
DQN = {
    "--seed -1": f"{SEED}1",
    "--exploration-steps 0": "--exploration-steps must be 1 or more",
    "minatar --num-envs 3": "--buffer-size must be a multiple of --num-envs, 3",
    "--total-timesteps 4999": "must be at least an iteration, 5000 steps",
    "atari --seed 1": "atari",
    "--full-actions": "--full-actions is for MinAtar's games, not for CartPole-v1\n",
    "--env-id Breakout": "gymnax has no Breakout; the closest name is Breakout-MinAtar\n",
    "--env-id Pendulum-v1": CONTINUOUS,
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A complete run, and one that was killed before it could write run.json."""
    folder = tmp_path_factory.mktemp("runs")
    flags = (
        "--num-envs 2 --num-steps 8 --num-minibatches 1 --total-timesteps 32 --run-name complete"
    )
    assert main("ppo_torch", "--runs-dir", folder, *flags.split()) == 0
    shutil.copytree(folder / "complete", folder / "killed")
    (folder / "killed/run.json").unlink()
    return folder


EXISTS = "{runs}/killed exists: choose another --run-name, or go on with --resume {runs}/killed"
COMPLETE = "{runs}/complete exists and is complete: choose another --run-name, or evaluate it"
OWN = "--resume: {runs}/killed goes on with its own arguments, so give no others"
MISSING = "{runs}/no/checkpoint.npz is not there, or is damaged (FileNotFoundError)"
FOLDERS = [
    ("--runs-dir {runs} --run-name killed", EXISTS),
    ("--runs-dir {runs} --run-name complete", COMPLETE),
    ("--resume {runs}/complete", COMPLETE),
    ("--resume {runs}/killed --no-anneal-lr", OWN),
    ("--resume {runs}/no", MISSING),
]


@pytest.mark.parametrize(("flags", "sentence"), FOLDERS)
def test_folders(runs, flags, sentence, capfd):
    before = {x: x.is_file() and x.read_bytes() for x in runs.rglob("*")}
    assert main("ppo_torch", *flags.format(runs=runs).split()) == 2
    assert capfd.readouterr() == ("", sentence.format(runs=runs) + "\n")
    assert before == {x: x.is_file() and x.read_bytes() for x in runs.rglob("*")}


def test_a_folder_in_use(runs, tmp_path, capfd):
    """Until that process ends; the lock is any system's, by SQLite."""
    folder = shutil.copytree(runs / "killed", tmp_path / "killed")
    lock = sqlite3.connect(folder / "lock")
    lock.execute("BEGIN EXCLUSIVE")
    assert main("ppo_torch", "--resume", folder) == 2
    assert capfd.readouterr() == ("", f"{folder} is in use by another process\n")
    lock.close()
    assert main("ppo_torch", "--resume", folder) == 0


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
    command = [sys.executable, ROOT / "ppo_linen.py", "--track"]
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_MODE": "online"}
    env = os.environ | home
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120
    )
    assert done.returncode == 1 and "wandb login" in done.stderr

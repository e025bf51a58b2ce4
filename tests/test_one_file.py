"""A script alone in an empty folder trains: by `uv run`, and where a system has nothing else."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from sections import DQN_SCRIPTS

SIZES = "--num-envs 4 --num-steps 32 --hidden-sizes 8 --run-name one --total-timesteps"


def test_by_uv_it_trains_is_stopped_and_goes_on(tmp_path):
    """As a new user would; the other scripts' first lines are tested as text."""
    name = "ppo_linen"
    (tmp_path / f"{name}.py").write_bytes((ROOT / f"{name}.py").read_bytes())
    command = f"uv run --quiet {name}.py {SIZES} {128 * 400} --update-epochs 1"
    env = {name: x for name, x in os.environ.items() if name != "VIRTUAL_ENV"}
    env |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path.parent / f"{name}-compiled")}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # for the second process
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command.split(), cwd=tmp_path, env=env, text=True, stdout=pipe, stderr=pipe
    )
    assert process.stdout and process.stderr
    while not process.stdout.readline().startswith("iteration"):
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "")
    command = output.splitlines()[-1].removeprefix("To go on: ")
    assert command == f"uv run {name}.py --resume runs/one"
    subprocess.run(shlex.split(command), cwd=tmp_path, env=env, check=True, capture_output=True)
    lines = (tmp_path / "runs/one/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == list(range(400))


# Runs a script as if a system had none of these modules.
WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys(["fcntl", "resource", "pwd", "grp"]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PPO = f"{SIZES} 256 --num-minibatches 2 --update-epochs 1"
DQN = f"{SIZES} 256 --buffer-size 128 --learning-starts 64"
KINDS = [
    ("ppo_linen", PPO),
    ("ppo_torch", PPO),
    ("ppo_linen_gymnasium", PPO),
    ("ppo_linen_vmap", f"{PPO} --num-agents 2"),
    *((name, DQN) for name in DQN_SCRIPTS[1:3]),
]


@pytest.mark.parametrize(("name", "flags"), KINDS)
def test_it_needs_no_module_that_a_system_lacks_and_no_command(name, flags, tmp_path, compiled):
    (tmp_path / f"{name}.py").write_bytes((ROOT / f"{name}.py").read_bytes())
    env = os.environ | {"PATH": "", "JAX_COMPILATION_CACHE_DIR": str(compiled)}
    command = [sys.executable, "-c", WITHOUT, f"{name}.py", *flags.split()]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    info = json.loads((tmp_path / "runs" / "one" / "run.json").read_text())
    assert info["status"] == "completed"
    assert info["cpu"] and info["os"]

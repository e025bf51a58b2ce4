"""A script alone in an empty folder trains: by uv, as a new user would, and by a bare Python."""

import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from running import info, rows

SIZES = "--num-envs 4 --num-steps 32 --hidden-sizes 8 --run-name one --total-timesteps"


def test_by_uv_it_trains_is_stopped_and_goes_on(tmp_path, compiled):
    shutil.copy(ROOT / "ppo_linen.py", tmp_path)
    runner = ["uv", "run"] if shutil.which("uv") else ["python"]
    words = [*runner, "ppo_linen.py", *SIZES.split(), str(128 * 400), "--update-epochs", "1"]
    env = {name: x for name, x in os.environ.items() if name != "VIRTUAL_ENV"}
    env |= {"JAX_COMPILATION_CACHE_DIR": str(compiled)}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # for the second process
    process = subprocess.Popen(words, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE)
    assert process.stdout
    while not process.stdout.readline().startswith("iteration"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    told = output.splitlines()[-1]
    assert told == f"To go on: {' '.join(runner)} ppo_linen.py --resume runs/one"
    command = shlex.split(told.removeprefix("To go on: "))
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    assert [row["iteration"] for row in rows(tmp_path / "runs/one")] == list(range(400))


# Runs a script as if a system had none of these modules.
WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys(["fcntl", "resource", "pwd", "grp"]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("ppo_torch", "--num-minibatches 2 --update-epochs 1"),
        ("dqn_linen_gymnasium", "--buffer-size 128 --learning-starts 64"),
    ],
)
def test_it_needs_no_module_that_a_system_lacks_and_no_command(name, flags, tmp_path, compiled):
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    env = os.environ | {"PATH": "", "JAX_COMPILATION_CACHE_DIR": str(compiled)}
    command = [sys.executable, "-c", WITHOUT, f"{name}.py", *SIZES.split(), "256", *flags.split()]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = info(tmp_path / "runs/one")
    assert run["status"] == "completed" and run["cpu"] and run["os"]

"""A script alone in an empty folder: `uv run` installs what its first lines name, and trains."""

import json
import os
import shlex
import signal
import subprocess

import pytest
from conftest import ROOT


@pytest.mark.parametrize(
    ("name", "iterations"),
    [("ppo_linen", 1500), ("ppo_equinox", 1500), ("ppo_linen_gymnasium", 400)],
)
def test_trains_is_stopped_and_goes_on(name, iterations, tmp_path):
    """As a new user would; PyTorch's scripts are tried by hand, since uv takes 5 GB of CUDA."""
    (tmp_path / f"{name}.py").write_bytes((ROOT / f"{name}.py").read_bytes())
    command = f"uv run --quiet {name}.py --total-timesteps {128 * iterations} --run-name one"
    command += " --num-envs 4 --num-steps 32 --update-epochs 1 --hidden-sizes 8"
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
    done, _, command = output.splitlines()[-1].partition(". To go on: ")
    assert done.startswith("Stopped after ") and done.endswith(f" of {iterations} iterations")
    subprocess.run(shlex.split(command), cwd=tmp_path, env=env, check=True, capture_output=True)
    lines = (tmp_path / "runs/one/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == list(range(iterations))

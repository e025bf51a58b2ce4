"""What only a GPU can show. Skipped where there is none."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from frameworks import SCRIPTS, TORCH_SCRIPTS
from sections import VMAP_SCRIPTS

pytestmark = pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="no NVIDIA GPU")


def run(name, folder, run_name, flags="", **environment):
    """Train for 20 iterations on the GPU, which the other tests hide; run.json and the metrics."""
    command = [sys.executable, ROOT / f"{name}.py", "--total-timesteps", "163840", *flags.split()]
    command += ["--runs-dir", folder, "--run-name", run_name]
    subprocess.run(command, check=True, env=visible() | environment)
    return read(folder / run_name)


def visible():
    hidden = ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")
    return {key: value for key, value in os.environ.items() if key not in hidden}


def read(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [
        {key: x for key, x in json.loads(line).items() if key.startswith(("losses/", "charts/ep"))}
        for line in lines
    ]
    return json.loads((folder / "run.json").read_text()), rows


@pytest.mark.parametrize("name", [*SCRIPTS, *VMAP_SCRIPTS])
def test_runs_on_the_gpu_and_learns(name, tmp_path):
    done, rows = run(name, tmp_path, "run")
    assert done["device"] != "cpu" and done["peak_device_bytes"] > 0
    assert rows[-1]["charts/episodic_return"] > 100


@pytest.mark.parametrize("name", [*TORCH_SCRIPTS, "ppo_torch_vmap"])
def test_no_race_between_the_frameworks(name, tmp_path):
    """Waiting for each kernel changes nothing, to the bit: no stream reads what another writes."""
    _, overlapped = run(name, tmp_path, "overlapped")
    _, blocking = run(name, tmp_path, "blocking", CUDA_LAUNCH_BLOCKING="1")
    assert overlapped == blocking


def test_cuda_graphs_compute_what_eager_torch_computes(tmp_path):
    """From the same seed, and until rounding makes an action differ."""
    flags = "--matmul-precision highest"
    _, eager = run("ppo_torch", tmp_path, "eager", flags)
    _, graphs = run("ppo_torch_compile", tmp_path, "graphs", flags)
    for key, x in eager[0].items():
        assert graphs[0][key] == pytest.approx(x, rel=1e-2, abs=1e-4)


def test_agents_in_cuda_graphs_train_as_alone(tmp_path):
    """From the same seeds, and until rounding makes an action differ."""
    flags = "--matmul-precision highest"
    run("ppo_torch_vmap", tmp_path, "many", f"{flags} --num-agents 2")
    for seed in (1, 2):
        _, alone = run("ppo_torch_compile", tmp_path, f"alone{seed}", f"{flags} --seed {seed}")
        _, agent = read(tmp_path / "many" / f"seed{seed}")
        for key, x in alone[0].items():
            assert agent[0][key] == pytest.approx(x, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("name", [*SCRIPTS, *VMAP_SCRIPTS])
def test_a_run_that_is_stopped_goes_on_to_the_last_digit(name, tmp_path):
    """The state of both frameworks' random numbers on the device is in the checkpoint."""
    _, whole = run(name, tmp_path, "whole")
    script, folder = ROOT / f"{name}.py", tmp_path / "stopped"
    flags = ["--total-timesteps", "163840", "--runs-dir", tmp_path, "--run-name", "stopped"]
    process = subprocess.Popen(
        [sys.executable, script, *flags], env=visible(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    for _ in range(6):  # the first says that it compiles
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    subprocess.run([sys.executable, script, "--resume", folder], check=True, env=visible())
    assert read(folder)[1] == whole

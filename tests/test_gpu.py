"""What only a GPU can show. Skipped where there is none."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from running import info, metrics
from sections import SCRIPTS, TORCH_SCRIPTS, VMAP_SCRIPTS

pytestmark = pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="no NVIDIA GPU")
EACH = pytest.mark.parametrize("name", [*SCRIPTS, *VMAP_SCRIPTS])
HIDDEN = ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "XLA_FLAGS")  # by which other tests hide it
GPU = {key: value for key, value in os.environ.items() if key not in HIDDEN}


def command(name, folder, flags=""):
    sizes = ["--total-timesteps", "163840", "--runs-dir", folder.parent, "--run-name", folder.name]
    return [sys.executable, ROOT / f"{name}.py", *sizes, *flags.split()]


def run(name, folder, flags="", **environment):
    """Train for 20 iterations on the GPU; the metrics."""
    subprocess.run(command(name, folder, flags), check=True, env=GPU | environment)
    return metrics(folder)


def assert_begin_alike(rows, expected):
    """In the first iteration; then, rounding makes an action differ."""
    assert rows[0] == pytest.approx(expected[0], rel=1e-2, abs=1e-4)


@EACH
def test_learns_and_a_stopped_run_goes_on_to_the_last_digit(name, tmp_path):
    """The state of both frameworks' random numbers on the device is in the checkpoint."""
    whole, folder = run(name, tmp_path / "whole"), tmp_path / "stopped"
    assert whole[-1]["charts/episodic_return"] > 100
    done = info(tmp_path / "whole")
    assert done["device"] != "cpu" and done["peak_device_bytes"] > 0
    process = subprocess.Popen(command(name, folder), env=GPU, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    for _ in range(6):  # the first says that it compiles
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    script = ROOT / f"{name}.py"
    subprocess.run([sys.executable, script, "--resume", folder], check=True, env=GPU)
    assert metrics(folder) == whole


@pytest.mark.parametrize("name", [*TORCH_SCRIPTS, "ppo_torch_vmap"])
def test_no_race_between_the_frameworks(name, tmp_path):
    """Waiting for each kernel changes nothing, to the bit: no stream reads what another writes."""
    overlapped = run(name, tmp_path / "overlapped")
    assert overlapped == run(name, tmp_path / "blocking", CUDA_LAUNCH_BLOCKING="1")


def test_cuda_graphs_compute_what_eager_torch_computes_for_many_agents_too(tmp_path):
    flags = "--matmul-precision highest"
    graphs = run("ppo_torch_compile", tmp_path / "graphs", flags)
    assert_begin_alike(graphs, run("ppo_torch", tmp_path / "eager", flags))
    run("ppo_torch_vmap", tmp_path / "many", f"{flags} --num-agents 2")
    assert_begin_alike(metrics(tmp_path / "many/seed1"), graphs)
    second = run("ppo_torch_compile", tmp_path / "second", f"{flags} --seed 2")
    assert_begin_alike(metrics(tmp_path / "many/seed2"), second)

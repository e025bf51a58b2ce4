"""Complete runs on a GPU, each in a separate process, as a user would start it."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from running import info, metrics
from sections import ROWS, path_of

pytestmark = pytest.mark.skipif(
    "TEST_DEVICE" not in os.environ or not torch.cuda.is_available(),
    reason="needs a GPU. Run tests/gpu/run.sh",
)
TORCH = ["ppo_torch", "ppo_torch_compile", "ppo_torch_vmap", "ppo_continuous_torch", "sac_torch"]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Return a function that starts a script. All processes share a compilation cache.

    Without the cache, each process would time kernels and select the fastest, and two processes
    could select kernels that round differently.
    """
    caches = tmp_path_factory.mktemp("caches")
    env = dict(os.environ)
    env["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    env["JAX_COMPILATION_CACHE_DIR"] = str(caches / "jax")
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

    def start(name, *flags, **variables):
        command = [sys.executable, path_of(name), *map(str, flags)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=env | variables, stdout=pipe, text=True)

    return start


def folder_flags(name, folder, iterations):
    steps = ROWS[name]["steps"] * iterations
    return ["--total-timesteps", steps, "--runs-dir", folder.parent, "--run-name", folder.name]


def run(start, name, folder, *flags, iterations=5, **variables):
    """Run the training to the end and return the metrics."""
    process = start(name, *folder_flags(name, folder, iterations), *flags, **variables)
    process.communicate(timeout=300)
    assert process.returncode == 0
    return metrics(folder)


def assert_same_first_iteration(rows, expected):
    """Compare only the first iteration; after it, rounding errors can change the actions."""
    assert rows[0] == pytest.approx(expected[0], rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("name", ["ppo_linen", "ppo_torch_compile"])
def test_training_works_and_resuming_is_exact(name, start, tmp_path):
    """In PyTorch, the checkpoint must contain the state of the random generator on the GPU."""
    whole = run(start, name, tmp_path / "whole", iterations=20)
    assert whole[-1]["charts/episodic_return"] > 100
    assert info(tmp_path / "whole")["device"] != "cpu"
    folder = tmp_path / "stopped"
    process = start(name, *folder_flags(name, folder, iterations=20))
    for _ in range(6):  # the first line is not an iteration
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    process = start(name, "--resume", folder)
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert metrics(folder) == whole


@pytest.mark.parametrize("name", TORCH)
def test_the_frameworks_wait_for_each_other(name, start, tmp_path):
    """The results are the same if the host waits for each kernel."""
    overlapped = run(start, name, tmp_path / "overlapped")
    assert overlapped == run(start, name, tmp_path / "blocking", CUDA_LAUNCH_BLOCKING="1")


def test_cuda_graphs_agree_with_eager_pytorch(start, tmp_path):
    flags = ["--matmul-precision", "highest"]
    graphs = run(start, "ppo_torch_compile", tmp_path / "graphs", *flags)
    assert_same_first_iteration(graphs, run(start, "ppo_torch", tmp_path / "eager", *flags))
    run(start, "ppo_torch_vmap", tmp_path / "many", *flags, "--num-agents", 2)
    assert_same_first_iteration(metrics(tmp_path / "many/seed1"), graphs)
    second = run(start, "ppo_torch_compile", tmp_path / "second", *flags, "--seed", 2)
    assert_same_first_iteration(metrics(tmp_path / "many/seed2"), second)

"""Run all tests on the CPU, where results are reproducible to the last digit.

Only tests/gpu/run.sh sets TEST_DEVICE, which lets the tests use the GPU.
"""

import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock

# Halves the CPU time of JAX: compile without optimization, and with XLA's previous loop emitters.
FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
if "TEST_DEVICE" in os.environ:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # otherwise JAX reserves most of the GPU
else:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["XLA_FLAGS"] = FAST_COMPILATION
os.environ["OMP_NUM_THREADS"] = "1"  # OpenMP threads spin, which slows down other tests
os.environ["WANDB_MODE"] = "offline"
os.environ.pop("WANDB_API_KEY", None)

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / x) for x in ("more", "tools", "tests/helpers"))]


def start_process(words, folder, env, **options):
    """Start a process in a new session and return it. Stdout and stderr are text pipes."""
    return subprocess.Popen(
        list(map(str, words)),
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


@pytest.fixture(scope="session")
def session_dir(tmp_path_factory):
    """Return a folder that all workers of pytest-xdist share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def compiled(session_dir):
    """Share a JAX compilation cache. Return environment variables to share it with subprocesses.

    Tests can still count compilations, because JAX also reports those that come from the cache.
    """
    import jax

    place = str(session_dir / "compiled")
    jax.config.update("jax_compilation_cache_dir", place)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    return {
        "JAX_COMPILATION_CACHE_DIR": place,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@pytest.fixture(scope="session")
def whole_run(session_dir):
    """Return a function that maps a script to its reference run, which the first call creates."""
    from running import make_whole_run, read_whole_run

    @cache
    def whole_run(name):
        place = session_dir / "runs" / name
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(place / "lock"):
            if not (place / "counts.json").exists():
                make_whole_run(name, place)
        return read_whole_run(place)

    return whole_run


def wait_for(condition):
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("the condition is still false after a minute")

"""Describe the machine: everything that affects running times, except the program itself.

    RUN_INFO=$(python -m bench.machine ppo_linen.py) python ppo_linen.py

The script copies RUN_INFO into run.json. benchmark.sh sets RUN_INFO for each run. A value is null
if it is unknown, for example because a tool is missing, fails or does not answer.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

TIMEOUT = 10  # seconds to wait for a tool; nvidia-smi may hang
# Environment variables that set the number of threads.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "XLA_FLAGS")
CGROUPS = Path("/sys/fs/cgroup")


def output(*words: str) -> str | None:
    """Return the output of a command, or None if it fails or prints nothing."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"LC_ALL": "C"},  # lscpu translates its output
            timeout=TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return done.stdout.decode(errors="replace").strip() or None


def cpu() -> str | None:
    # Unlike /proc/cpuinfo, lscpu knows the names of ARM processors.
    found = re.search(r"^Model name: +(.+)$", output("lscpu") or "", re.MULTILINE)
    return found[1] if found else None


def cpu_quota() -> float | None:
    """Return the number of CPUs that cgroups (v2) grant this process, or None if unlimited."""
    quotas = []
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        group = next(x.removeprefix("0::/") for x in lines if x.startswith("0::/"))
        for folder in (CGROUPS / group, *(CGROUPS / group).parents):
            with suppress(OSError, ValueError):  # no such file, or the quota is "max"
                quota, period = map(int, (folder / "cpu.max").read_text(encoding="utf-8").split())
                quotas.append(quota / period)
    return min(quotas, default=None)


def gpu() -> tuple[str | None, str | None]:
    """Return the driver version and the name of the first GPU."""
    query = "--query-gpu=driver_version,name"
    text = output("nvidia-smi", "--format=csv,noheader", query) or ""
    driver, _, name = text.partition("\n")[0].partition(", ")
    return driver or None, name or None


def git_commit(script: Path) -> str | None:
    """Return the commit of a script, or None if it is not in git.

    The suffix -dirty means that the repository has uncommitted changes.
    """
    git = ("git", "-C", str(script.parent))
    if output(*git, "ls-files", "--error-unmatch", script.name) is None:
        return None
    commit = output(*git, "rev-parse", "HEAD")
    # Ignore the results that a study is still collecting, because they do not affect programs.
    others = (":/", ":(exclude,top)*.jsonl")
    is_dirty = output(*git, "status", "--porcelain", "--untracked-files=no", "--", *others)
    return f"{commit}-dirty" if commit and is_dirty else commit


def hash_of(file: str) -> str | None:
    try:
        name = Path(file).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return hashlib.sha256(name.encode()).hexdigest()[:8] if name else None


def describe() -> dict[str, Any]:
    """Return a description of the machine, without the script."""
    driver, gpu_name = gpu()
    boot = hash_of("/proc/sys/kernel/random/boot_id")
    return {
        "python": platform.python_version(),
        "os": platform.platform(),
        "machine": hash_of("/etc/machine-id") or boot,  # a container may have no machine-id
        "boot": boot,  # differs between cloned machines, which share a machine-id
        "cpu": cpu(),
        "cores": psutil.cpu_count(logical=False),
        "cpu_quota": cpu_quota(),
        "threads": {name: os.environ[name] for name in THREADS if name in os.environ},
        "load": os.getloadavg()[0],  # 1-minute load average
        "gpu": gpu_name,
        "driver": driver,
        "container": os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"),
    }


def main() -> None:
    info = describe() | {"git_commit": git_commit(Path(sys.argv[1]))}
    print(json.dumps(info | {"launched": time.time()}))  # the script starts right after this


if __name__ == "__main__":
    main()

"""Print what a run's durations depend on, as JSON.

    RUN_INFO=$(python studies/machine.py ppo_linen.py) python ppo_linen.py

benchmark.sh does that for each run, and the run keeps it in run.json. What cannot be known is null:
where a tool is missing, fails or does not answer, nothing that it says counts. Of a script that no
git repository holds, the commit is null.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

SECONDS = 10  # for a tool to answer: nvidia-smi may hang with its driver


def output(*words: str) -> str | None:
    """What a command says; None where it fails or says nothing."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"LC_ALL": "C"},  # lscpu is translated
            timeout=SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return done.stdout.decode(errors="replace").strip() or None


def cpu() -> str | None:
    # lscpu has a name for ARM's processors, too, which /proc/cpuinfo has not.
    found = re.search(r"^Model name: +(.+)$", output("lscpu") or "", re.MULTILINE)
    return found[1] if found else None


def gpu() -> tuple[str | None, str | None]:
    """The first GPU's driver and name."""
    query = "--query-gpu=driver_version,name"
    text = output("nvidia-smi", "--format=csv,noheader", query) or ""
    driver, _, name = text.partition("\n")[0].partition(", ")
    return driver or None, name or None


def git_commit(script: Path) -> str | None:
    git = ("git", "-C", str(script.parent))
    if output(*git, "ls-files", "--error-unmatch", script.name) is None:
        return None
    commit = output(*git, "rev-parse", "HEAD")
    # What a study has measured so far is no program.
    others = (":/", ":(exclude,top)*.jsonl")
    is_dirty = output(*git, "status", "--porcelain", "--untracked-files=no", "--", *others)
    return f"{commit}-dirty" if commit and is_dirty else commit


def hash_of(file: str) -> str | None:
    try:
        name = Path(file).read_text().strip()
    except OSError:
        return None
    return hashlib.sha256(name.encode()).hexdigest()[:8] if name else None


def describe() -> dict[str, str | int | float | bool | None]:
    """What does not depend on the script."""
    driver, gpu_name = gpu()
    boot = hash_of("/proc/sys/kernel/random/boot_id")
    return {
        "machine": hash_of("/etc/machine-id") or boot,  # a container may have no id
        "boot": boot,  # clones of a machine have one id
        "cpu": cpu(),
        "cores": psutil.cpu_count(logical=False),
        "load": os.getloadavg()[0],  # processes that ran or waited, in the last minute
        "gpu": gpu_name,
        "driver": driver,
        "container": os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"),
    }


if __name__ == "__main__":
    print(json.dumps(describe() | {"git_commit": git_commit(Path(sys.argv[1]))}))

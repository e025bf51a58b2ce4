"""Time a training run of one iteration, for each use of torch.compile, with empty caches.

    taskset --cpu-list 1 python -m studies.limits.first_iteration > studies/limits/first.jsonl

Most of the time is imports and compiling. Each round runs every program once, in a new process and
with a new folder for the caches of torch.compile. Each line of JSON is one run.
"""

import json
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.machine import describe, git_commit

ROOT = Path(__file__).parents[2]
ROUNDS = 5
STEPS = 8192  # one iteration
PROGRAMS = {"ours": ["ppo_torch_compile.py"], "eager": ["ppo_torch.py"]}
PROGRAMS |= {
    name: ["studies/limits/compiled.py", name]
    for name in (
        "module",
        "step",
        "torch_optim",
        "adam_per_parameter",
        "python_wrapper",
        "tested_flags",
    )
}


def seconds(command: list[str]) -> float:
    """Return the duration of a run of one iteration. Raise CalledProcessError if it fails."""
    with TemporaryDirectory() as folder:
        flags = ["--total-timesteps", str(STEPS), "--runs-dir", folder]
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/caches"}
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, *command, *flags],
            cwd=ROOT,
            env=os.environ | caches,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return time.perf_counter() - start


def main() -> None:
    info = describe() | {"git_commit": git_commit(ROOT / "ppo_torch_compile.py")}
    print(json.dumps(info | {"torch": metadata.version("torch")}), flush=True)
    for number in range(ROUNDS):
        for name, command in PROGRAMS.items():
            row = {"round": number, "program": name, "seconds": seconds(command)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

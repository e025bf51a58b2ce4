"""Time a study of tune.py on two cores, with one PyTorch thread per worker and with two.

    python -m studies.threads.tuning > studies/threads/tuning.jsonl    # eight minutes

Two workers run four trials of ppo_torch.py, and train twice with a held-out seed. Each line of JSON
after the first contains the duration of one study in seconds, including startup. The studies
with one and with two threads alternate.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.machine import describe

ROOT = Path(__file__).parents[2]
PAIRS = 3
COMMAND = ["tune.py", "ppo_torch", "--workers", "2", "--trials", "4", "--num-seeds", "1"]
COMMAND += ["--held-out-seeds", "1", "--pruner", "none", "--episodes", "20"]
COMMAND += ["--space", "gamma=0.9,0.95,0.98,0.995", "--total-timesteps", "163840"]


def measure(threads: int) -> float:
    """Return the duration of a study in seconds."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, *COMMAND, "--studies-dir", folder],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return time.perf_counter() - start


def main() -> None:
    print(json.dumps(describe() | {"command": COMMAND}), flush=True)
    for _ in range(PAIRS):
        for threads in (1, 2):
            row = {"threads": threads, "seconds": measure(threads)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

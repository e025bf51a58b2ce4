"""Time the startup of ppo_torch_compile.py with and without an optimization, on one core.

    taskset --cpu-list 0 python -m studies.limits.startup > studies/limits/startup.jsonl

This takes five minutes. Each line of JSON after the first contains the duration in seconds of a
process that trains for one iteration, with empty compilation caches. The variants alternate.
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
ROUNDS = 5
VARIANTS = {
    "ours": ["ppo_torch_compile.py"],
    "python_wrapper": ["studies/limits/compiled.py", "python_wrapper"],
    "adam_per_parameter": ["studies/limits/compiled.py", "adam_per_parameter"],
}


def measure(words: list[str]) -> float:
    """Return the duration of a run of one iteration, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "OMP_NUM_THREADS": "1"}
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, *words, "--total-timesteps", "8192", "--runs-dir", folder],
            cwd=ROOT,
            env=os.environ | caches,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return time.perf_counter() - start


def main() -> None:
    print(json.dumps(describe()), flush=True)
    for _ in range(ROUNDS):
        for variant, words in VARIANTS.items():
            print(json.dumps({"variant": variant, "seconds": measure(words)}), flush=True)


if __name__ == "__main__":
    main()

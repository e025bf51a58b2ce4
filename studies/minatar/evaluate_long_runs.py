"""Evaluate the long runs in the minatar study: greedy, with epsilon 0.05, and with random actions.

    python -m studies.minatar.evaluate_long_runs runs

Runs that were already evaluated are skipped.
"""

import json
import subprocess
import sys
from pathlib import Path

FILES = {
    "0": "evaluation.json",
    "0.05": "evaluation-epsilon-0.05.json",
    "1": "evaluation-epsilon-1.json",
}


def is_long(run: Path) -> bool:
    """Return whether the run is complete, and not one of the short runs that measure speed."""
    info = json.loads((run / "run.json").read_text(encoding="utf-8"))
    return info["status"] == "completed" and info["args"]["save_every"] == 20  # as in grid.toml


def main() -> None:
    runs = [path for path in sorted(Path(sys.argv[1]).glob("minatar__*")) if is_long(path)]
    for epsilon, file in FILES.items():
        pending = [str(run) for run in runs if not (run / file).exists()]
        if pending:
            words = ["evaluate.py", *pending, "--episodes", "100", "--epsilon", epsilon]
            subprocess.run([sys.executable, *words], check=True)


if __name__ == "__main__":
    main()

"""Evaluate the long runs of the study minatar: greedy, at epsilon 0.05, and all at random.

    python -m studies.minatar.judge runs

Each is evaluated once; a quick look by the user, of fewer episodes, does not count.
"""

import json
import subprocess
import sys
from pathlib import Path

EPISODES, MAX_STEPS = 100, 10_000
FILES = {
    "0": "evaluation.json",
    "0.05": "evaluation-epsilon-0.05.json",
    "1": "evaluation-epsilon-1.json",
}


def read(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def is_long(run: Path) -> bool:
    """Is it complete, and one of those that save checkpoints?"""
    return read(run / "run.json").get("args", {}).get("save_every", 0) > 0


def is_judged(path: Path) -> bool:
    found = read(path)
    return (found.get("episodes"), found.get("max_steps")) == (EPISODES, MAX_STEPS)


def evaluate(runs: list[Path], epsilon: str) -> bool:
    words = ["evaluate.py", *map(str, runs), "--episodes", str(EPISODES)]
    if epsilon != "0":
        words += ["--epsilon", epsilon]
    return subprocess.run([sys.executable, *words]).returncode == 0


def main() -> None:
    runs = [path for path in sorted(Path(sys.argv[1]).glob("minatar__*")) if is_long(path)]
    for epsilon, file in FILES.items():
        pending = [run for run in runs if not is_judged(run / file)]
        if not pending or evaluate(pending, epsilon):
            continue
        for run in pending:  # one of them is damaged: the others count
            if not evaluate([run], epsilon):
                print(f"This run could not be evaluated: {run}")


if __name__ == "__main__":
    main()

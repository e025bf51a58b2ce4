"""Evaluate the completed runs in a folder, and add them to the data of this study.

    python -m studies.returns.pack runs/returns

Runs that were already evaluated are skipped. The tables keep the runs of earlier calls, so each
machine can add its runs. Of the iterations, only the columns that the study needs are kept.
Durations are removed, because other programs may have used the machine during the runs.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from analysis.runs import Data, load, merge, save
from analysis.schema import RUNS

HERE = Path(__file__).parent
DURATIONS = [x.name for x in RUNS if x.kind == "seconds"]
COLUMNS = ["run", "iteration", "global_step", "charts/episodes", "charts/episodic_return"]
BATCH = 20  # runs per call to evaluate.py


def pending(folder: Path) -> Iterator[Path]:
    """Yield the completed runs that evaluate.py has not evaluated.

    Runs on Atari games and runs of other libraries, which save no checkpoint, are left out.
    """
    for path in sorted(folder.glob("*/run.json")):
        info = json.loads(path.read_text(encoding="utf-8"))
        is_atari = info["args"]["env_id"].startswith("ALE/")
        is_done = (path.parent / "evaluation.json").exists()
        has_checkpoint = any(path.parent.glob("checkpoint.*"))
        if info["status"] == "completed" and has_checkpoint and not is_atari and not is_done:
            yield path.parent


def evaluate(runs: list[Path]) -> None:
    """Call evaluate.py, which stores the greedy returns in the run folders."""
    modules = ["envs.masked_cartpole:MaskedCartPole", "envs.memory_chain:MemoryChain30"]
    trusted = [word for name in modules for word in ("--env-id", name)]
    for start in range(0, len(runs), BATCH):
        some = map(str, runs[start : start + BATCH])
        subprocess.run([sys.executable, "evaluate.py", *some, *trusted], check=True)


def combine(old: Data, new: Data) -> Data:
    """Return the runs of both; a run that is in both is taken from the new data."""
    is_kept = ~old.runs["run"].isin(new.runs["run"])
    runs = old.runs[is_kept]
    iterations = old.iterations[old.iterations["run"].isin(runs["run"])]
    return merge([Data(runs, iterations, {}), new])


def main() -> None:
    folder = Path(sys.argv[1])
    evaluate(list(pending(folder)))
    data = load(folder)
    if (HERE / "runs.csv").exists():
        data = combine(load(HERE), data)
    runs = data.runs.assign(source="").sort_values("run", ignore_index=True)
    runs[DURATIONS] = float("nan")
    iterations = data.iterations[COLUMNS].sort_values(["run", "iteration"], ignore_index=True)
    save(Data(runs, iterations, {}), HERE)
    print(f"{len(runs)} runs in {HERE}")


if __name__ == "__main__":
    main()

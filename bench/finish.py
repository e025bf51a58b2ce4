"""Finish a benchmark: run the end commands of the studies, write the report, and list failed runs.

    python -m bench.finish PLAN

The exit status is 0 if all runs are complete, and 1 otherwise.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from bench import processes
from bench.run import Plan


def run_python(words: list[str], names: str = "") -> bool:
    """Run Python with `names` on its standard input, and return whether it succeeded."""
    sys.stdout.flush()
    return subprocess.run([sys.executable, *words], input=names.encode()).returncode == 0


def write_report(plan: Plan) -> None:
    out = Path(plan.runs_dir, "report")
    out.mkdir(parents=True, exist_ok=True)
    for end in plan.ends:
        words = [x.replace("RUNS", plan.runs_dir) for x in end.split()]
        if not run_python(words):
            print(f"This command failed: {shlex.join(['python', *words])}")
    renamed = sorted(map(str, Path("studies").glob("*/names.toml")))
    words = ["-m", "analysis", "report", plan.runs_dir, "--out", str(out)]
    words += ["--names", *renamed, "--only-runs", "/dev/stdin"]
    words += ["--returns"] if plan.returns else []
    names = "".join(f"{Path(run.folder).name}\n" for run in plan.runs)
    if not run_python(words, names):
        print(f"Could not write the report; the runs are in {plan.runs_dir}.")


def main() -> None:
    plan = Plan.read(sys.argv[1])
    mark = os.environ[processes.MARK] = processes.new_mark()
    processes.end_on_signals(mark)
    offline = list(Path(plan.runs_dir).glob("*/wandb/offline-run-*"))
    if plan.track and offline:
        wandb = shlex.quote(str(Path(sys.executable).with_name("wandb")))
        runs = f"{shlex.quote(plan.runs_dir)}/*/wandb/offline-run-*"
        print(f"To upload the offline runs to W&B: {wandb} sync {runs}")
    missing = [run for run in plan.runs if not run.is_done()]
    total = len(plan.runs)
    if not missing:
        print(f"Runs complete: {total} of {total}, in {plan.runs_dir}.")
    if plan.report:
        write_report(plan)
    if not missing:
        return
    print(f"Runs not complete: {len(missing)} of {total}:")
    for run in missing:
        reason = (
            run.failed.read_text(encoding="utf-8").strip() if run.failed.exists() else "not run"
        )
        print(f"    {run.name}: {reason}; output in {run.state / run.name}.log")
    print(f"To run them again: {plan.invocation}")
    sys.exit(1)


if __name__ == "__main__":
    main()

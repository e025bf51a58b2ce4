"""Pack a folder of runs into a study: one table of runs and one of iterations, checked.

python -m analysis pack runs/cpu studies/cpu        # check, then write studies/cpu
python -m analysis pack --check studies/cpu         # check only
"""

import argparse
import re
import sys
from pathlib import Path

from analysis.checks import problems
from analysis.measures import mode_order
from analysis.runs import SPEEDS, TABLES, Data, load, save
from analysis.schema import RUNS, SourceError
from analysis.words import counted, join


def add_arguments(parser: argparse.ArgumentParser, source: str) -> None:
    parser.add_argument("runs", help=source)
    parser.add_argument("out", nargs="?", type=Path, help="folder to write, as studies/my-gpu")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--anyway", action="store_true", help="pack it in spite of what is found")
    words = "runs with such names shared their cores: leave their durations out"
    parser.add_argument("--learning-only", metavar="REGEX", help=words)
    words = "of programs of many agents, keep the iterations of the first agents alone"
    parser.add_argument("--first-agents", action="store_true", help=words)


def run(args: argparse.Namespace) -> int:
    if (args.out is None) != args.check:
        raise SourceError("pack needs a folder to write, or --check")
    if args.out and ((args.out.exists() and not args.out.is_dir()) or any_run(args.out)):
        raise SourceError(f"{args.out} must be a folder for a study, without runs in it")
    data = load(args.runs)
    if args.learning_only:
        data = without_durations(data, args.learning_only)
    if args.first_agents:
        data = of_first_agents(data)
    found = problems(data)
    for line in found:
        print(f"analysis: {line}", file=sys.stderr)
    if found and not args.anyway:
        return 1
    if not args.check:
        save(data._replace(runs=data.runs.assign(source="")), args.out)
    done = "checked" if args.check else f"packed into {args.out / TABLES[0]}"
    print(f"{counted([len(data.runs)], 'run')} of {join(mode_order(data.runs['mode']))} {done}.")
    return 0


def any_run(folder: Path) -> bool:
    return any(True for _ in folder.glob("**/run.json"))


def without_durations(data: Data, names: str) -> Data:
    """Return data in which runs whose names match have no durations, as resumed ones have none."""
    try:
        pattern = re.compile(names)
    except re.error as error:
        raise SourceError(f"--learning-only must be a regular expression: {error}") from None
    runs = data.runs.copy()
    iterations = data.iterations.copy()
    chosen = runs["run"].map(lambda x: pattern.search(x) is not None)
    runs.loc[chosen, [x.name for x in RUNS if x.kind == "seconds"]] = float("nan")
    shared = iterations["run"].isin(runs.loc[chosen, "run"])
    iterations.loc[shared, list(SPEEDS)] = float("nan")
    count = counted([int(chosen.sum())], "run")
    note = f"{count} shared the cores with other work, and count for learning alone"
    return data._replace(runs=runs, iterations=iterations, notes=(*data.notes, note))


def of_first_agents(data: Data) -> Data:
    """Return data with the iterations of one agent of each program alone; all runs stay."""
    others = data.runs.loc[data.runs["agent"] > 0, "run"]
    if others.empty:
        return data
    iterations = data.iterations[~data.iterations["run"].isin(others)].reset_index(drop=True)
    note = "of programs of many agents, the iterations of the first agents alone are kept"
    return data._replace(iterations=iterations, notes=(*data.notes, note))

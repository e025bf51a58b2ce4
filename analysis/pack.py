"""Pack a folder of runs into a study: one table of runs and one of iterations, checked."""

import argparse
import sys

from analysis.checks import problems
from analysis.measures import mode_order
from analysis.runs import TABLES, Data, load, save
from analysis.schema import SourceError
from analysis.words import counted, join


def run(args: argparse.Namespace) -> int:
    if (args.out is None) != args.check:
        raise SourceError("pack needs a folder to write, or --check")
    if args.out and any(args.out.glob("**/run.json")):
        raise SourceError(f"{args.out} must be a folder for a study, without runs in it")
    data = load(args.runs)
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


def of_first_agents(data: Data) -> Data:
    """Return data with the iterations of one agent of each program alone; all runs stay."""
    others = data.runs.loc[data.runs["agent"] > 0, "run"]
    iterations = data.iterations[~data.iterations["run"].isin(others)].reset_index(drop=True)
    note = "of programs of many agents, the iterations of the first agents alone are kept"
    return data._replace(iterations=iterations, notes=(*data.notes, note))

"""Pack a folder of runs into a study: one table of runs and one of iterations, checked."""

import argparse
import sys

from analysis.checks import problems
from analysis.measures import mode_order
from analysis.runs import TABLES, load, save
from analysis.schema import SourceError
from analysis.words import counted, join


def run(args: argparse.Namespace) -> int:
    if (args.out is None) != args.check:
        raise SourceError("pack needs a folder to write, or --check")
    if args.out and any(args.out.glob("**/run.json")):
        raise SourceError(f"{args.out} must be a folder for a study, without runs in it")
    data = load(args.runs)
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

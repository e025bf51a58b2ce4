"""Analyze training runs and races: python -m analysis {report,race,pack} ..."""

import argparse
import os
import sys
from pathlib import Path

import matplotlib as mpl

from analysis import figures, races, report
from analysis.checks import problems
from analysis.formatting import join, pluralize
from analysis.measures import mode_order
from analysis.runs import load, save
from analysis.schema import SourceError

SOURCE = "folder with runs or studies, table (.csv, .parquet), or wandb:entity/project"
NAMES = "TOML files that rename environments, such as studies/doors/names.toml"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m analysis", description=__doc__)
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("report", help="write a report with tables and figures")
    command.set_defaults(run=make_report)
    add = command.add_argument
    add("runs", nargs="+", help=SOURCE)
    add("--out", type=Path, help="folder to write to; default RUNS/report")
    add("--against", metavar="OLD", help="earlier results to compare with")
    compared = "script to compare the others with; default ppo_linen"
    add("--baseline", metavar="SCRIPT", help=compared)
    leading = "begin with returns instead of durations"
    add("--returns", action="store_true", help=leading)
    listed = "file with one run name per line; other runs are ignored"
    add("--only-runs", metavar="FILE", type=Path, help=listed)
    add("--names", metavar="FILE", type=Path, nargs="+", default=[], help=NAMES)

    command = commands.add_parser("race", help="summarize and plot the results of race.py")
    command.set_defaults(run=show_race)
    add = command.add_argument
    add("file", type=Path, help="results file of race.py, such as races/TIME.jsonl")
    add("--out", type=Path, help="figure to write; default FILE with the suffix .png")

    command = commands.add_parser("pack", help="check runs, and save them as a study")
    command.set_defaults(run=pack)
    add = command.add_argument
    add("runs", help=SOURCE)
    add("out", nargs="?", type=Path, help="folder to write to, such as studies/my-gpu")
    add("--check", action="store_true", help="only check; write nothing")
    add("--anyway", action="store_true", help="write the study even if the runs have problems")
    add("--names", metavar="FILE", type=Path, nargs="+", default=[], help=NAMES)
    return parser.parse_args()


def make_report(args: argparse.Namespace) -> int:
    only = args.only_runs.read_text(errors="replace").splitlines() if args.only_runs else None
    source = args.runs if len(args.runs) > 1 else args.runs[0]
    data = load(source, only=only, names=args.names)
    modes = mode_order(data.runs["mode"])
    if args.baseline and args.baseline not in modes:
        raise SourceError(f"--baseline must be one of {join(modes, 'or')}")
    old = load(args.against) if args.against else None
    out = args.out or default_out(args.runs)
    answers = report.write_report(data, out, args.baseline, old, args.returns)
    for note in data.notes if only else ():
        print(f"{note}.")
    for name, reason in data.left_out.items():
        print(f"Left out: {name}: {reason}", file=sys.stderr)
    print(f"Report: {out / 'report.html'}\n\n{answers}")
    return 0


def default_out(sources: list[str]) -> Path:
    """Return the default report folder: in the source, or else in the working directory."""
    path = Path(sources[0])
    return path / "report" if len(sources) == 1 and path.is_dir() else Path("report")


def show_race(args: argparse.Namespace) -> int:
    """Print and plot the result of the last race in a file."""
    found = races.read(args.file)
    times = found[-1].compared_times() if found else None
    if times is None or len(times) < races.LEAST_TURNS or len(times.columns) < 2:
        raise SourceError(f"{args.file} has too few rounds or programs to compare")
    last = found[-1]
    first = last.first()
    ratios = times.drop(columns=first).div(times[first], axis=0)
    label = f"time / {first} time"
    out = args.out or args.file.with_suffix(".png")
    out.write_bytes(figures.png(figures.spread(ratios, last.ratios(), label)))
    print("\n".join(last.sentences(last.info["args"]["within"])))
    print(f"Figure: {out}")
    return 0


def pack(args: argparse.Namespace) -> int:
    """Check runs, and save them as a study: a table of runs and a table of iterations."""
    if (args.out is None) != args.check:
        raise SourceError("pack needs either a folder to write to or --check")
    if args.out and any(args.out.glob("**/run.json")):
        raise SourceError(f"{args.out} contains runs; choose another folder")
    data = load(args.runs, names=args.names)
    found = problems(data)
    for line in found:
        print(f"analysis: {line}", file=sys.stderr)
    if found and not args.anyway:
        return 1
    if not args.check:
        save(data._replace(runs=data.runs.assign(source="")), args.out)
    done = "checked" if args.check else f"packed into {args.out}"
    print(f"{pluralize([len(data.runs)], 'run')} of {join(mode_order(data.runs['mode']))} {done}.")
    return 0


def main() -> None:
    mpl.use("agg")
    args = parse()
    try:
        status = args.run(args)
        sys.stdout.flush()  # raises BrokenPipeError if the reader has exited
        sys.exit(status)
    except BrokenPipeError:  # for example, in `report RUNS | head`
        # Python flushes stdout again at exit, so redirect it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # exit status of a program killed by SIGPIPE
    except (SourceError, OSError) as error:
        print(f"analysis: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

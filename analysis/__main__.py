"""From runs to an answer: python -m analysis report, pack, study or docs; --help says more."""

import argparse
import sys
from pathlib import Path

import matplotlib as mpl
import pandas as pd

from analysis import docs, learning, pack, report
from analysis.measures import mode_order
from analysis.runs import load
from analysis.schema import SourceError
from analysis.words import join

SOURCE = "folder of runs or studies at any depth, table (.csv, .parquet), or wandb:entity/project"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m analysis", description=__doc__)
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("report", help="tables and figures of runs, as one page")
    command.set_defaults(run=make_report)
    add = command.add_argument
    add("runs", nargs="+", help=SOURCE)
    add("--out", type=Path, help="folder to write to; default RUNS/report")
    add("--against", metavar="OLD", help="older results to compare with")
    words = "script, as the tables name it, that the others are compared with; default ppo_linen"
    add("--baseline", metavar="SCRIPT", help=words)
    words = "platform, or a part of its name, that the others are compared with"
    add("--baseline-platform", metavar="TEXT", help=words)
    words = "CSV file of targets and margins; default analysis/environments.csv"
    add("--environments", metavar="FILE", default=learning.ENVIRONMENTS, help=words)
    words = "file with a run's name a line: of the source, these alone count"
    add("--only-runs", metavar="FILE", type=Path, help=words)

    command = commands.add_parser("pack", help="check runs, and write them as a study")
    command.set_defaults(run=pack.run)
    add = command.add_argument
    add("runs", help=SOURCE)
    add("out", nargs="?", type=Path, help="folder to write, as studies/my-gpu")
    add("--check", action="store_true", help="write nothing")
    add("--anyway", action="store_true", help="pack it in spite of what is found")
    words = "of programs of many agents, keep the iterations of the first agents alone"
    add("--first-agents", action="store_true", help=words)

    command = commands.add_parser("study", help="draw a study's own figures anew")
    command.set_defaults(run=update_study)
    add = command.add_argument
    add("folder", type=Path, help="studies/NAME")
    add("runs", type=Path, nargs="?", help="runs of yours; default the study's")
    add("--out", type=Path, help="folder to write to; default RUNS/report")

    command = commands.add_parser("docs", help="write the numbers of the documents from studies/")
    command.set_defaults(run=docs.run)
    command.add_argument("--check", action="store_true", help="write nothing; exit 1 if it would")
    return parser.parse_args()


def make_report(args: argparse.Namespace) -> int:
    only = args.only_runs.read_text().splitlines() if args.only_runs else None
    data = load(args.runs if len(args.runs) > 1 else args.runs[0], only=only)
    check_names(args, data.runs)
    old = load(args.against) if args.against else None
    known = learning.load_environments(args.environments)
    out = args.out or default_out(args.runs)
    request = report.Request(known, args.baseline, args.baseline_platform, old)
    print(report.write_report(data, out, request))
    for note in data.notes if only else ():
        print(f"{note}.")
    for name, reason in data.left_out.items():
        print(f"left out {name}: {reason}", file=sys.stderr)
    print(f"\nReport: {out / 'report.html'}")
    return 0


def check_names(args: argparse.Namespace, runs: pd.DataFrame) -> None:
    """Raise SourceError for a baseline that was not run."""
    modes = mode_order(runs["mode"])
    if args.baseline and args.baseline not in modes:
        raise SourceError(f"--baseline must be one of {join(modes, 'or')}")
    platforms = list(dict.fromkeys(runs["platform"]))
    if args.baseline_platform and not any(args.baseline_platform in x for x in platforms):
        raise SourceError(f"--baseline-platform must be part of {join(platforms, 'or')}")


def default_out(sources: list[str]) -> Path:
    """Return where a report goes: into a folder of runs, beside a table, or else here."""
    path = Path(sources[0])
    if len(sources) == 1 and path.is_dir():
        return path / "report"
    if len(sources) == 1 and path.is_file():
        return path.with_name(f"{path.stem}-report")
    return Path("report")


def update_study(args: argparse.Namespace) -> int:
    if not (args.folder / "study.py").exists():
        raise SourceError(f"{args.folder} has no study.py")
    out = args.folder
    if args.runs:
        out = args.out or args.runs / "report"
        out.mkdir(parents=True, exist_ok=True)
    docs.study_of(args.folder).update(args.runs or args.folder, out)
    return 0


def main() -> None:
    mpl.use("agg")
    args = parse()
    try:
        sys.exit(args.run(args))
    except (SourceError, OSError) as error:
        print(f"analysis: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

"""Draw the figures of a study.

python -m tools.draw studies/agents
python -m tools.draw studies/agents runs/agents    # from new runs, in runs/agents/report
"""

import argparse
import importlib
import sys
from pathlib import Path

from analysis.schema import SourceError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.draw")
    add = parser.add_argument
    add("folder", type=Path, help="studies/NAME")
    add("runs", type=Path, nargs="?", help="folder with runs; default the data in the study")
    add(
        "--out",
        type=Path,
        help="folder to write to; default RUNS/report, or the study",
    )
    args = parser.parse_args()
    if not (args.folder / "study.py").exists():
        parser.error(f"{args.folder} has no study.py")
    if args.runs and not args.runs.is_dir():
        parser.error(f"{args.runs} is not a folder of runs")
    study = importlib.import_module(f"studies.{args.folder.name}.study")
    if not hasattr(study, "update"):
        parser.error(f"{args.folder} has no figures")
    out = args.out or (args.runs / "report" if args.runs else args.folder)
    out.mkdir(parents=True, exist_ok=True)
    try:
        study.update(args.runs or args.folder, out)
    except (SourceError, OSError) as error:
        print(f"draw: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

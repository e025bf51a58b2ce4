"""Pack a folder of runs into a study: one table of runs, one of iterations, and their report.

    python -m analysis.pack runs/cpu results/cpu        # check, then write results/cpu
    python -m analysis.pack --check results/cpu         # check only
    python -m analysis.pack runs results/dqn --learning-only 100it --anyway

It names what a reader would hold against the study. Then it packs nothing, unless with --anyway.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib as mpl
import pandas as pd

from analysis import learning, render, report
from analysis.bench import as_object, mode_order, under_load
from analysis.readings import counted, join, some
from analysis.runs import SPEEDS, TABLES, Data, load, save
from analysis.schema import RUNS, VERSIONS, SourceError

ONE = {"platform": "platforms", "settings": "sets of hyperparameters", "commit": "commits"}


def problems(data: Data) -> list[str]:
    """Return what a reader would hold against a study, in sentences; of a sound one, none."""
    runs, found = data.runs.assign(settings=data.runs["settings"].map(without_length)), []
    if data.left_out:
        found.append(
            f"{counted([len(data.left_out)], 'run')} left out: {some(list(data.left_out), 3)}"
        )
    for name, words in ONE.items():
        if runs[name].nunique() > 1:
            found.append(f"{runs[name].nunique()} {words}, where a study has one")
    # A peer's environment lacks what it does not need.
    if any(runs.loc[runs[name] != "", name].nunique() > 1 for name in VERSIONS):
        found.append("different versions of Python or packages")
    if (runs["commit"] == "").any() or runs["commit"].str.endswith("-dirty").any():
        found.append("runs of scripts that are not committed, so nobody can make them again")
    resumed = runs["resumed"].sum()
    if resumed:
        found.append(f"{counted([resumed], 'run')} stopped and resumed")
    busy = len(under_load(runs))
    if busy:
        found.append(f"{counted([busy], 'run')} made while others used the machine")
    return found + missing(runs)


def without_length(settings: str) -> str:
    """Return hyperparameters without length and number of agents: a study may hold several."""
    several = ("total_timesteps", "num_agents")
    return json.dumps({x: y for x, y in as_object(settings).items() if x not in several})


def missing(runs: pd.DataFrame) -> list[str]:
    """Name the modes that lack a run which another mode has in the same grid."""
    grid = ["sync", "env_id", "size", "num_iterations", "repeat", "num_agents"]
    # A program's agents, and processes side by side, have seeds that others need not have.
    runs = runs[~(runs["agent"] > 0) & ~runs["mode"].str.endswith(" side by side")]
    several, lines = runs["num_agents"].notna(), []
    if several.any():  # then a repeat is a block of 1,000 seeds, and scripts alone have some of it
        runs = runs.assign(repeat=(runs["repeat"] - 1) // 1000)
    for part in (runs[~several], runs[several]):
        blocks = part[grid].drop_duplicates()
        for mode in mode_order(part["mode"]):
            lacking = len(blocks) - len(part.loc[part["mode"] == mode, grid].drop_duplicates())
            if lacking:
                lines.append(f"{mode} lacks {counted([lacking], 'run')} that others have")
    return lines


def without_durations(data: Data, names: str) -> Data:
    """Return data in which runs whose names match have no durations, as resumed ones have none."""
    runs, iterations = data.runs.copy(), data.iterations.copy()
    chosen = runs["run"].str.contains(names)
    durations = [x.name for x in RUNS if x.kind == "seconds"]
    runs.loc[chosen, durations] = float("nan")
    shared = iterations["run"].isin(runs.loc[chosen, "run"])
    iterations.loc[shared, iterations.columns.intersection(SPEEDS)] = float("nan")
    count = counted([int(chosen.sum())], "run")
    note = f"{count} shared the cores with other work, and count for learning alone"
    return data._replace(runs=runs, iterations=iterations, notes=(*data.notes, note))


def of_first_agents(data: Data) -> Data:
    """Return data with the iterations of one agent of each program alone; all runs stay."""
    others = data.runs.loc[data.runs["agent"] > 0, "run"]
    iterations = data.iterations[~data.iterations["run"].isin(others)].reset_index(drop=True)
    note = "of programs of many agents, the iterations of the first agents alone are kept"
    return data._replace(
        iterations=iterations, notes=(*data.notes, note) if len(others) else data.notes
    )


def pack(data: Data, out: Path) -> None:
    """Write data as a study into the folder out, with its report."""
    if (out.exists() and not out.is_dir()) or any(out.glob("**/run.json")):
        raise SourceError(f"{out} must be a folder for a study, without runs in it")
    save(data._replace(runs=data.runs.assign(source="")), out)
    known = learning.load_environments()
    report.write_report(data, out / "report", report.Request(known))


def main() -> None:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m analysis.pack", description=lines[0])
    parser.add_argument("runs", help="folder of runs, table, or wandb:entity/project")
    parser.add_argument("out", nargs="?", type=Path, help="folder to write, as results/my-gpu")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--anyway", action="store_true", help="pack it in spite of what is found")
    parser.add_argument(
        "--learning-only",
        metavar="REGEX",
        help="runs with such names shared their cores: leave their durations out",
    )
    parser.add_argument(
        "--first-agents",
        action="store_true",
        help="of programs of many agents, keep the iterations of the first agents alone",
    )
    args = parser.parse_args()
    if (args.out is None) != args.check:
        parser.error("give a folder to write, or --check")
    mpl.use("agg")
    render.forgive_terminals()
    try:
        data = load(args.runs)
        if args.learning_only:
            data = without_durations(data, args.learning_only)
        if args.first_agents:
            data = of_first_agents(data)
        found = problems(data)
        for line in found:
            print(f"analysis.pack: {line}", file=sys.stderr)
        if found and not args.anyway:
            sys.exit(1)
        if not args.check:
            pack(data, args.out)
        done = "checked" if args.check else f"packed into {args.out / TABLES[0]}"
        modes = join(mode_order(data.runs["mode"]))
        print(f"{counted([len(data.runs)], 'run')} of {modes} {done}.", flush=True)
    except (SourceError, OSError) as error:
        print(f"analysis.pack: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

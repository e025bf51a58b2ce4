"""The command line of benchmark.sh: python -m bench.arguments --help

This module imports only the standard library, so that --help works before anything is installed.
"""

import argparse
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent


def fail(reason: str) -> NoReturn:
    print(f"benchmark.sh: {reason}", file=sys.stderr)
    sys.exit(2)


try:
    from analysis import catalog
except ValueError as error:  # a CatalogError, whose class may not be imported yet
    fail(str(error))

DEFAULT_SCRIPTS = ["torch", "torch_compile", "linen", "nnx", "nnx_cached"]


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message.removeprefix("argument "))


# === Types of flags =============================================================================
def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, not '{text}'")
    return int(text)


def items(text: str) -> list[str]:
    if os.path.isfile(text):  # do not split the path of a script, which may contain spaces
        return [text]
    words = text.replace(",", " ").split()
    if not words:
        raise argparse.ArgumentTypeError(f"must name one or more, not '{text}'")
    return words


def expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error:
        raise argparse.ArgumentTypeError(f"must be a regular expression, not '{text}'") from None


def folder(text: str) -> Path:
    return Path(text) if Path.cwd() == ROOT else Path(text).absolute()


# === Parser =====================================================================================
def make_parser() -> Parser:
    parser = Parser(
        usage="./benchmark.sh [STUDY ...] [flags]",
        description=(
            "Run training scripts, each in a new process, and report their durations and returns.\n"
            "If benchmark.sh is stopped or killed, run the same command again to continue."
        ),
        epilog=f"{sizes_text()}\n\n{scripts_text()}\n\n{studies_text()}\n\n{STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "studies", nargs="*", metavar="STUDY", help="studies to run, in this order; default quick"
    )

    group = parser.add_argument_group("choose the runs yourself, instead of a study")
    add = group.add_argument
    add("--scripts", type=items, metavar="LIST", help=f"default {','.join(DEFAULT_SCRIPTS)}")
    environments = "default CartPole-v1, or Pendulum-v1 for continuous actions"
    add("--envs", type=items, metavar="LIST", help=f"{environments}; or my_module:MyEnv")
    networks = "network sizes; default small, or those of the script with --preset or --returns"
    add("--sizes", type=items, metavar="LIST", help=networks)
    add("--preset", metavar="NAME", default="", help="preset of the scripts, such as mujoco")
    steps = "environment steps per run, instead of --iterations"
    add("--total-timesteps", type=positive, metavar="N", help=steps)
    returns = "begin the report with returns, and resume interrupted runs"
    add("--returns", action="store_true", help=returns)
    phases = "time rollout and update separately, by waiting for the device after each rollout"
    add("--phases", action="store_true", help=phases)
    devices = "train on N devices; only for linen_sharded, nnx_sharded and torch_ddp"
    add("--devices", type=positive, metavar="N", help=devices)

    add = parser.add_argument_group("change the list of runs").add_argument
    iterations = "iterations per run; default 100, or as in the study"
    add("--iterations", type=positive, metavar="N", help=iterations)
    repeats = "repeat each run with N seeds; default 1, or as in the study"
    add("--repeats", type=positive, metavar="N", help=repeats)
    only = "run only the commands that match"
    add("--only", type=expression, metavar="REGEX", default=re.compile(""), help=only)
    add(
        "--from",
        type=positive,
        metavar="I",
        default=1,
        dest="first",
        help="start at this line of --list",
    )
    add("--to", type=positive, metavar="I", help="end at this line of --list")

    add = parser.add_argument_group("print the runs without running them").add_argument
    add("--list", action="store_true", help="print the commands")
    add("--count", action="store_true", help="print the number of commands")
    missing = "print the missing runs and how long they will take"
    add("--dry-run", action="store_true", help=missing)

    add = parser.add_argument_group("how to run them").add_argument
    runs = "folder for the runs, default runs; complete runs are not repeated"
    add("--runs-dir", type=folder, metavar="DIR", default=folder("runs"), help=runs)
    timeout = "end a run after S seconds; default 86400, a day"
    add("--timeout", type=positive, metavar="S", default=86400, help=timeout)
    among = "distribute the runs over these GPUs, one run at a time on each"
    add("--gpus", type=items, metavar="LIST", default=[], help=f"{among}, as named by nvidia-smi")
    track = "also log to Weights & Biases, offline unless a server accepts your key"
    add("--track", action="store_true", help=track)
    report = "skip the report and the final command of the study"
    add("--no-report", action="store_true", help=report)
    return parser


STATUS = "Exit status: 0 if all runs are complete, 1 if some are not, 2 for a usage error."


def sizes_text() -> str:
    sizes = [f"{size} ({', '.join(map(str, units))})" for size, units in catalog.SIZES.items()]
    return "\n  ".join(["Network sizes (units of each hidden layer):", *sizes])


def scripts_text() -> str:
    """Return the short names of all scripts, grouped by their environment steps per iteration."""
    groups: dict[int, list[str]] = {}
    for script, row in catalog.SCRIPTS.items():
        groups.setdefault(row["steps"], []).append(script.removeprefix("ppo_"))
    lines = ["Scripts, by environment steps per iteration (any other: path/to/mine.py):"]
    for steps, names in groups.items():
        start = f"  {steps:<7,}"
        lines.append(
            textwrap.fill(" ".join(names), 90, initial_indent=start, subsequent_indent=" " * 9)
        )
    return "\n".join([*lines, "  torch-none, linen-none, nnx-none, equinox-none: without jax.jit"])


def studies_text() -> str:
    """Return the names of the studies and the first line of each grid.toml, which describes it."""
    lines = ["Studies (studies/NAME/grid.toml), and how long they take on two idle cores:"]
    for path in sorted((ROOT / "studies").glob("*/grid.toml")):
        with open(path, encoding="utf-8") as file:
            text = file.readline().removeprefix("#").strip()
        lines.append(f"  {path.parent.name:<11} {text}")
    return "\n".join(lines)


def parse_args(words: list[str]) -> argparse.Namespace:
    args = make_parser().parse_args(words)
    names = ["scripts", "envs", "sizes", "preset", "total_timesteps"]
    names += ["returns", "phases", "devices"]
    custom = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]
    if custom and args.studies:
        study = args.studies[0]
        fail(f"{custom[0]} cannot be combined with a study: omit '{study}', or use --only")
    if args.devices and args.gpus:
        fail("--devices uses the GPUs in CUDA_VISIBLE_DEVICES, so omit --gpus.")
    if args.total_timesteps and args.iterations:
        fail("--total-timesteps sets the number of iterations, so omit --iterations")
    if args.preset and not args.total_timesteps:
        fail("--preset changes the steps per iteration, so add --total-timesteps")
    args.is_custom = bool(custom)
    args.studies = list(dict.fromkeys(args.studies)) or ["quick"]
    return args


if __name__ == "__main__":
    parse_args(sys.argv[1:])

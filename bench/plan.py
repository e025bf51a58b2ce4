"""List the runs that the arguments of benchmark.sh select, and write the plan to a file.

    python -m bench.plan PROGRAM FOLDER FILE [arguments of benchmark.sh]

PROGRAM is the path with which benchmark.sh was called, and FOLDER is the working directory of the
caller. The first line of FILE contains the number of missing runs and the GPUs, the second line the
command line, and the third line the Plan as JSON. With --list, --count or --dry-run, the result is
printed and FILE stays empty.

The first argument of benchmark.sh may name a study; docs/benchmark.md describes its grid.toml.
"""

import argparse
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback if Ctrl-C interrupts the imports

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.machine import output
from bench.run import Plan, Run, log_event

ROOT = Path(__file__).resolve().parent.parent
MODULE_AND_NAME = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z0-9_-]+"  # a custom environment
DEFAULT_SCRIPTS = ["torch", "torch_compile", "linen", "nnx", "nnx_cached"]
# Rough seconds per iteration on two idle cores, used only to estimate the total duration.
COMPILED = {"small": 0.05, "medium": 0.6, "large": 38.4, "default": 0.25}
UNCOMPILED = {"small": 15.7, "medium": 26.3, "large": 66, "default": 15.7}
STARTUP = 8  # seconds
LONG = 7200  # seconds; before a longer benchmark, benchmark.sh prints how long it will take


def fail(reason: str) -> NoReturn:
    text = reason.replace("\n", "\\n")
    print(f"benchmark.sh: {text}", file=sys.stderr)
    sys.exit(2)


try:
    from analysis.catalog import (
        ENVIRONMENTS,
        SCRIPTS,
        SIZES,
        CatalogError,
        file_of,
        is_continuous,
        read_toml,
    )
except ValueError as error:  # a CatalogError, whose class may not be imported yet
    fail(str(error))

# Environment names become part of run names, so exclude names with a slash.
KNOWN = [x for x in ENVIRONMENTS if "/" not in x]
ALL = [
    name
    for name in KNOWN
    if (ENVIRONMENTS[name]["library"], ENVIRONMENTS[name]["actions"]) == ("gymnax", "discrete")
]
NETWORKS = SIZES | {"default": []}  # units per hidden layer; "default" keeps the script default

# === Studies ====================================================================================
# Each description completes the sentence "NAME must be".
Count = Annotated[int, Field(gt=0, lt=10**9, description="a positive integer")]
Counts = Annotated[list[Count], Field(min_length=1, description="a list of positive integers")]
Text = Annotated[str, Field(pattern=r"^\PC*[^\pC\pZ]\PC*$", description="one line of text")]
Texts = Annotated[list[Text], Field(min_length=1, description="a list of strings")]
Name = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$",
        description="a name of letters, digits, '_', '-' and '.'",
    ),
]
Flag = Annotated[str, Field(pattern="^[a-z][a-z0-9-]*$")]
Value = bool | int | float | Text
Flags = Annotated[
    dict[Flag, Value | list[Value]],
    Field(description="a table of flags such as { num-envs = 8, anneal-lr = false }"),
]


class Options(BaseModel):
    """Keys in grid.toml that apply to all runs, or to the runs in one [[runs]] table."""

    model_config = ConfigDict(extra="forbid", strict=True)
    scripts: Texts = []
    envs: Texts = []
    sizes: Texts = []
    flags: Flags = {}
    preset: Name = ""  # key in the presets of the study
    label: Name = ""  # prefix of the run names
    repeats: Count = 1
    iterations: Count = 100
    steps: Count = 0  # environment steps per iteration; 0 means the value in scripts.toml
    devices: Count = 0  # number of devices per run; 0 means the default
    seconds: Count = 0  # expected duration of a run; 0 means an estimate
    wrapper: Name = ""  # a module that runs the script
    seeds: Counts = [1]
    seed_stride: Count = 1  # difference between the seeds of two successive repeats
    track: bool = Field(True, description="true or false")


class Study(Options):
    """All keys of grid.toml."""

    shuffle: Literal["blocks", "repeats"] = Field("blocks", description="'blocks' or 'repeats'")
    begin: Text = ""
    end: Text = ""
    programs: dict[Name, Text] = Field({}, description="a table of commands by name")
    presets: dict[str, Flags] = Field({}, description="a table of tables of flags")
    runs: list[dict[str, Any]] = Field([], description="tables, each below a line [[runs]]")


class Row(Options):
    """Options of a [[runs]] table, completed from its study and the command line."""

    where: str  # prefix for error messages, such as the position in grid.toml
    shuffle: str
    has_iterations: bool  # whether the [[runs]] table sets iterations


@dataclass
class Grid:
    repeats: int
    rows: list[Row] = field(default_factory=list)
    programs: dict[str, list[str]] = field(default_factory=dict)  # name -> Python arguments
    begin: str = ""
    end: str = ""


Model = TypeVar("Model", bound=BaseModel)


def check(where: str, table: dict[str, Any], model: type[Model]) -> Model:
    try:
        return model.model_validate(table)
    except ValidationError as errors:
        error = errors.errors()[0]
    key = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        fail(f"{where}: unknown key '{key}'; docs/benchmark.md lists all keys")
    fail(f"{where}: {key} must be {model.model_fields[key].description}, not {table[key]!r}")


def read_study(study: str, args: argparse.Namespace) -> Grid:
    name = f"studies/{study}/grid.toml"
    if not os.path.isfile(ROOT / name):
        fail(f"there is no study '{study}'; see ./benchmark.sh --help")
    try:
        table = read_toml(ROOT / name)
    except CatalogError as error:
        fail(f"studies/{study}/{error}")
    found = check(name, table, Study)
    grid = Grid(args.repeats or found.repeats, begin=found.begin, end=found.end)
    for number, run in enumerate(found.runs, 1):
        where = f"{name}, [[runs]] {number}"
        options = check(where, run, Options).model_dump(exclude_unset=True)
        grid.rows.append(make_row(f"{where}: ", options, found, args))
    for program, text in found.programs.items():
        grid.programs[program] = text.split()
    if not grid.rows:
        fail(f"{name} has no [[runs]]")
    return grid


def make_row(where: str, options: dict[str, Any], study: Study, args: argparse.Namespace) -> Row:
    """Complete the options of a [[runs]] table from its study and the command line."""
    row = Row.model_construct(**(study.model_dump() | options))
    row.where = where
    for key in ("scripts", "envs", "sizes"):
        if not getattr(row, key):
            fail(f"{where}{key} is missing")
    if row.preset and row.preset not in study.presets:
        fail(f"{where}there is no preset '{row.preset}'")
    row.flags = study.flags | study.presets.get(row.preset, {}) | options.get("flags", {})
    repeats = args.repeats or study.repeats
    row.repeats = min(repeats, options.get("repeats", repeats))
    row.has_iterations = "iterations" in options
    if args.iterations and not row.has_iterations:
        row.iterations = args.iterations
        row.seconds = row.seconds * args.iterations // study.iterations
    return row


# === Arguments ==================================================================================
class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message.removeprefix("argument "))


def positive(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"must be a positive integer, not '{text}'")
    return int(text)


def items(text: str) -> list[str]:
    if os.path.isfile(text):  # False for text that is too long to be a path
        return [text]  # do not split the path of a script, which may contain spaces
    words = text.replace(",", " ").split()
    if not words:
        raise argparse.ArgumentTypeError(f"must name one or more, not '{text}'")
    return words


def expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError):
        raise argparse.ArgumentTypeError(f"must be a regular expression, not '{text}'") from None


def folder(text: str) -> Path:
    if not text or text.startswith("-"):
        raise argparse.ArgumentTypeError(f"must name a folder, not '{text}'")
    path = Path(text)
    return path if Path.cwd() == ROOT else path.absolute()


def parse_args(words: list[str]) -> argparse.Namespace:
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("study", nargs="?")
    for name in ("scripts", "envs", "sizes"):
        parser.add_argument(f"--{name}", type=items)
    parser.add_argument("--phases", action="store_true")
    for name in ("iterations", "repeats", "to", "devices"):
        parser.add_argument(f"--{name}", type=positive)
    parser.add_argument("--timeout", type=positive, default=86400)
    parser.add_argument("--gpus", type=lambda text: text.split(","), default=[])
    parser.add_argument("--seed", type=positive, default=1)
    parser.add_argument("--from", type=positive, default=1, dest="first")
    parser.add_argument("--only", type=expression, default=re.compile(""))
    for name in ("track", "list", "count", "dry-run", "no-report"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--runs-dir", type=folder, default=folder("runs"))
    parser.add_argument("--notes", default="")
    args = parser.parse_args(words)
    names = ("scripts", "envs", "sizes", "phases", "devices")
    custom = [f"--{name}" for name in names if getattr(args, name)]
    if custom and args.study:
        fail(f"{custom[0]} cannot be combined with a study: omit '{args.study}', or use --only")
    if args.devices and args.gpus:
        fail("--devices uses the GPUs in CUDA_VISIBLE_DEVICES, so omit --gpus.")
    args.study = "custom" if custom else args.study or "quick"
    return args


def check_gpus(gpus: list[str]) -> None:
    """Fail unless nvidia-smi lists each GPU; with a wrong name, CUDA would silently use none."""
    lines = (output("nvidia-smi", "-L") or "").splitlines() if gpus else []
    seen = []
    for gpu in gpus:
        line = [x for x in lines if x.startswith(f"GPU {gpu}: ") or f"(UUID: {gpu})" in x]
        if not line:
            fail(f"--gpus must be numbers or UUIDs that 'nvidia-smi -L' lists, not '{gpu}'.")
        if line in seen:
            fail(f"--gpus must name each GPU once, but '{gpu}' is listed twice.")
        seen.append(line)


def check_runs_dir(folder: Path) -> None:
    """Fail unless the folder, or else its nearest existing parent, is writable."""
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        fail(f"--runs-dir needs a folder that you can write to, but '{folder}' is not one.")


def custom_grid(args: argparse.Namespace) -> Grid:
    """Return the grid that --scripts, --envs, --sizes, --devices and --phases describe."""
    grid = Grid(args.repeats or 1)
    scripts = [name_of(x, grid.programs) for x in args.scripts or DEFAULT_SCRIPTS]
    options = {
        "scripts": scripts,
        "envs": args.envs or [default_env(scripts)],
        "sizes": args.sizes or ["small"],
    }
    if args.devices:
        for script in scripts:
            row = SCRIPTS.get(full_name(script))
            if not row or row["setting"] != "many devices":
                fail(f"--devices is for linen_sharded and torch_ddp, not for {script}")
        options["devices"] = args.devices
    if args.phases:
        options["label"] = "phases"
        options["flags"] = {"sync-for-timing": True}
    grid.rows.append(make_row("--", options, Study(), args))
    return grid


# === Scripts ====================================================================================
def default_env(scripts: list[str]) -> str:
    """Return an environment that works with all scripts; fail if there is none."""
    known = [x for x in scripts if full_name(x) in SCRIPTS]
    continuous = [x for x in known if is_continuous(full_name(x))]
    if not continuous:
        return "CartPole-v1"
    discrete = [x for x in known if x not in continuous]
    if discrete:
        both = f"{continuous[0]} needs continuous actions and {discrete[0]} discrete ones"
        fail(f"--scripts: {both}, so they have no environment in common")
    return "Pendulum-v1"


def name_of(text: str, programs: dict[str, list[str]]) -> str:
    """Return the short name of a script that is given by name or path.

    Add a file that is not a script of this project to `programs`.
    """
    path = Path(text).absolute()
    name = path.name.removesuffix(".py")
    short = name.removeprefix("ppo_")
    if full_name(short) in SCRIPTS:
        known = ROOT / path_of(short)
        if "/" in text and not (os.path.isfile(path) and path.samefile(known)):
            fail(f"--scripts: '{text}' has the name of a script of this project")
        return short
    if path.suffix != ".py" or not os.path.isfile(path):
        fail(f"--scripts: '{text}' is neither a script of this project nor the path of a file")
    if not re.fullmatch(r"\w+", name, re.ASCII):
        fail(f"--scripts: runs are named after '{name}', so use only letters, digits and _")
    if programs.setdefault(name, [str(path)]) != [str(path)]:
        fail(f"--scripts: '{path}' and '{programs[name][0]}' have the same name")
    return name


def full_name(short: str) -> str:
    """Return the name in scripts.toml for the short name of a script.

    Short names omit the prefix ppo_, and linen-none is ppo_linen without compilation.
    """
    return short if short in SCRIPTS else f"ppo_{short.removesuffix('-none')}"


def path_of(short: str) -> str:
    name = full_name(short)
    if not os.path.isfile(ROOT / file_of(name)):
        fail(f"scripts.toml lists {name}, but {file_of(name)} does not exist")
    return file_of(name)


def steps_of(short: str) -> int:
    """Return the steps per iteration; for a custom script, those of a similar script."""
    if full_name(short) in SCRIPTS:
        return SCRIPTS[full_name(short)]["steps"]
    rows = list(SCRIPTS.values())
    return next((x for x in rows if short.startswith(f"{x['algorithm']}_")), rows[0])["steps"]


# === Runs =======================================================================================
def expand(grid: Grid, args: argparse.Namespace) -> list[Run]:
    """Return all runs, shuffled within blocks; --seed sets the order."""
    runs: dict[str, Run] = {}
    for repeat in range(1, grid.repeats + 1):
        for row in grid.rows:
            if repeat > row.repeats:
                continue
            envs = ALL if row.envs == ["all"] else row.envs
            for cell in product(envs, row.sizes, row.scripts, row.seeds):
                run = make_run(grid, args, row, cell, repeat)
                runs.setdefault(run.name, run)
    blocks = [run.block for run in runs.values()]

    def order(run: Run) -> tuple[int, int, str]:
        salted = f"{args.seed} {run.name}".encode()
        return run.repeat, blocks.index(run.block), hashlib.md5(salted).hexdigest()

    return sorted(runs.values(), key=order)


def make_run(
    grid: Grid, args: argparse.Namespace, row: Row, cell: tuple[str, str, str, int], repeat: int
) -> Run:
    env, size, script, first_seed = cell
    # @doors selects the doors preset of the script.
    is_preset = env.startswith("@") and args.study != "custom"
    if not is_preset and env not in KNOWN and not re.fullmatch(MODULE_AND_NAME, env):
        fail(f"{row.where}envs must be among: {' '.join(KNOWN)}; or my_module:MyEnv; not '{env}'")
    if size not in NETWORKS:
        fail(f"{row.where}sizes must be among: {' '.join(NETWORKS)}; not '{size}'")
    if script not in grid.programs and full_name(script) not in SCRIPTS:
        fail(f"{row.where}there is no script '{script}'")
    seed = first_seed + row.seed_stride * (repeat - 1)
    # Replace the colon in a custom environment id with a dot; no other name contains a dot.
    parts = [row.label, env.replace(":", ".")]
    if is_preset:
        parts = [row.label or env[1:]]
    parts += [size, script, f"{row.devices}devices" if row.devices else ""]
    name = "__".join(filter(None, [*parts, f"{row.iterations}it", f"seed{seed}"]))

    words = list(grid.programs.get(script) or [path_of(script)])
    settings = []  # arguments for the `env` command
    # A script looks for custom environments in the working directory.
    if ":" in env and Path.cwd() != ROOT:
        settings.append(f"--chdir={Path.cwd()}")
        words[0] = str(ROOT / words[0])
    is_compiled = not script.endswith("-none") or script in grid.programs
    if not is_compiled:
        settings.append("JAX_DISABLE_JIT=1")
    if row.devices and SCRIPTS[full_name(script)]["framework"] == "torch":
        # --standalone finds a free port, so several runs can execute at the same time.
        launch = ["-m", "torch.distributed.run", "--standalone"]
        words = [*launch, f"--nproc-per-node={row.devices}", *words]
    elif row.devices:  # only for CPUs, because JAX always uses all visible GPUs
        settings.append(f"JAX_NUM_CPU_DEVICES={row.devices}")
    if row.wrapper:
        words = ["-m", row.wrapper, *words]
    words += [env[1:]] if is_preset else ["--env-id", env]
    if NETWORKS[size]:
        words += ["--hidden-sizes", *map(str, NETWORKS[size])]
    steps = row.iterations * (row.steps or steps_of(script))
    words += words_of(row.flags)
    words += ["--seed", str(seed), "--total-timesteps", str(steps)]
    seconds = row.iterations * UNCOMPILED.get(size, UNCOMPILED["default"])
    if is_compiled:
        seconds = STARTUP + row.iterations * COMPILED.get(size, COMPILED["default"])
    key = " ".join(word.rpartition("/")[2] for word in [*words, "--run-name", name])
    if args.track and row.track:
        words.append("--track")
    runs_dir = args.runs_dir
    if name.startswith("warmup__"):
        runs_dir /= ".benchmark/warmup"  # ignored by the report
    runner = ["env", *settings, sys.executable] if settings else [sys.executable]
    words += ["--runs-dir", as_argument(runs_dir), "--run-name", name]
    return Run(
        study=args.study,
        order_seed=args.seed,
        runs_dir=str(args.runs_dir),
        timeout=args.timeout,
        name=name,
        folder=as_argument(runs_dir / name),
        repeat=repeat,
        command=runner + words,
        key=key,
        block=[row.label, env, size, row.iterations] if row.shuffle == "blocks" else [],
        seconds=row.seconds or int(seconds),
    )


def words_of(flags: dict[str, Any]) -> list[str]:
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            values = value if isinstance(value, list) else [value]
            words += [f"--{name}", *map(str, values)]
    return words


def as_argument(path: Path) -> str:
    """Return a path that a script cannot mistake for a flag."""
    return f"./{path}" if str(path).startswith("-") else str(path)


# === Output =====================================================================================
def in_words(seconds: int) -> str:
    if seconds > LONG:
        return f"about {(seconds + 1800) // 3600} hours"
    return f"about {(seconds + 59) // 60} minutes"


def on_one_line(words: list[str]) -> str:
    """Return a command on one line, quoted for a shell."""
    return shlex.join(words).replace("\n", "'$'\\n''")


def print_missing(runs: list[Run]) -> None:
    missing = []
    for run in runs:
        status = "done   "
        if not run.is_done():
            missing.append(run.seconds)
            status = "stopped" if run.is_resumable() else "missing"
        print(f"{status}  {run.name}")
    duration = in_words(sum(missing))
    print(f"Runs missing: {len(missing)} of {len(runs)}, {duration} on two idle cores.")


def begin(args: argparse.Namespace, grid: Grid, runs: list[Run], invocation: str) -> Plan:
    """Prepare the runs folder, run the begin command of the study, and return the plan."""
    missing = [i for i, run in enumerate(runs) if not run.is_done()]
    event = {"event": "grid", "study": args.study, "runs": len(runs), "order_seed": args.seed}
    event |= {"complete": len(runs) - len(missing), "repeats": grid.repeats}
    event |= {"host": os.uname().nodename, "notes": args.notes, "invocation": invocation}
    try:
        (args.runs_dir / ".benchmark").mkdir(parents=True, exist_ok=True)
        for run in runs:
            run.failed.unlink(missing_ok=True)
        log_event(args.runs_dir, **event)
    except OSError as error:
        fail(f"{args.runs_dir}: {error.strerror}")
    seconds = sum(runs[i].seconds for i in missing)
    if seconds > LONG:
        duration = f"{in_words(seconds)} on two idle cores"
        print(f"This takes {duration}: {len(missing)} runs. You can stop it and continue later.")
    sys.stdout.flush()
    if grid.begin:
        command = [sys.executable, *grid.begin.split()]
        if subprocess.run(command, cwd=ROOT).returncode != 0:
            sys.exit(2)
    return Plan(
        invocation=invocation,
        runs_dir=str(args.runs_dir),
        started=time.time(),
        end=grid.end,
        track=args.track,
        report=not args.no_report,
        notes=args.notes,
        runs=runs,
        missing=missing,
    )


def main() -> None:
    program, called_from, file, *words = sys.argv[1:]
    os.chdir(called_from)
    args = parse_args(words)
    grid = custom_grid(args) if args.study == "custom" else read_study(args.study, args)
    if args.iterations and all(row.has_iterations for row in grid.rows):
        fail(f"--iterations: all runs in studies/{args.study}/grid.toml set iterations")
    runs = [run for run in expand(grid, args) if re.search(args.only, run.key)]
    if not runs:
        fail(f"nothing to run: no command matches --only '{args.only.pattern}'")
    for line, run in enumerate(runs, 1):
        run.line = line
    chosen = runs[args.first - 1 : args.to]
    if not chosen:
        fail(f"nothing to run: the list has {len(runs)} lines, and none is within --from and --to")
    if args.count:
        print(len(chosen))
    elif args.list:
        for run in chosen:
            print(on_one_line(run.command))
    else:
        check_gpus(args.gpus)
        check_runs_dir(args.runs_dir)
        if args.dry_run:
            print_missing(chosen)
        else:
            plan = begin(args, grid, chosen, on_one_line([program, *words]))
            plan.write(file, ",".join(args.gpus) or "-")


if __name__ == "__main__":
    main()

"""List the runs that the arguments of benchmark.sh select, and write the plan to a file.

    python -m bench.plan PROGRAM FOLDER FILE [arguments of benchmark.sh]

PROGRAM is the path with which benchmark.sh was called, and FOLDER is the working directory of the
caller. The first line of FILE contains the number of missing runs and the GPUs, the second line the
command line, and the third line the Plan as JSON. With --list, --count or --dry-run, the result is
printed and FILE stays empty.

docs/benchmark.md describes grid.toml, the file that lists the runs of a study.
"""

import argparse
import csv
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
from typing import Annotated, Any, Literal, TypeVar

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback if Ctrl-C interrupts the imports

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.arguments import DEFAULT_SCRIPTS, ROOT, catalog, fail, parse_args
from bench.machine import output
from bench.run import Plan, Run, log_event

MODULE_AND_NAME = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z0-9_-]+"  # a custom environment
GYMNASIUM_ID = r"([A-Za-z0-9_-]+/)?[A-Za-z0-9_.-]+"
ONLY_AT_THE_END = str(10**9)  # value of --save-every
# Rough seconds to the end of iteration 0 and per further iteration, with the default settings and
# the small network, on two idle cores. From runs.csv and races.jsonl in studies/.
with open(Path(__file__).with_name("durations.csv"), newline="") as file:
    DURATIONS = {row["script"]: row for row in csv.DictReader(file)}
MORE = {"medium": 1.0, "large": 38.0}  # additional seconds per iteration with a larger network
LONG = 7200  # seconds; before a longer benchmark, benchmark.sh prints how long it will take

# Environment names become part of run names, so exclude names with a slash.
KNOWN = [x for x in catalog.ENVIRONMENTS if "/" not in x]
ALL = [
    name
    for name in KNOWN
    if (catalog.ENVIRONMENTS[name]["library"], catalog.ENVIRONMENTS[name]["actions"])
    == ("gymnax", "discrete")
]
NETWORKS = catalog.SIZES | {
    "default": []
}  # units per hidden layer; "default" keeps the script default

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
    returns: bool = Field(False, description="true or false")  # whether the runs measure returns
    begin: Text = ""
    end: Text = ""
    programs: dict[Name, Text] = Field({}, description="a table of commands by name")
    presets: dict[str, Flags] = Field({}, description="a table of tables of flags")
    runs: list[dict[str, Any]] = Field([], description="tables, each below a line [[runs]]")


class Row(Options):
    """Options of a [[runs]] table, completed from its study and the command line."""

    where: str  # prefix for error messages, such as the position in grid.toml
    shuffle: str
    returns: bool
    has_iterations: bool  # whether the [[runs]] table sets iterations


@dataclass
class Grid:
    study: str
    repeats: int
    returns: bool
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
        table = catalog.read_toml(ROOT / name)
    except catalog.CatalogError as error:
        fail(f"studies/{study}/{error}")
    found = check(name, table, Study)
    grid = Grid(study, args.repeats or found.repeats, found.returns)
    grid.begin = found.begin
    grid.end = found.end
    for number, run in enumerate(found.runs, 1):
        where = f"{name}, [[runs]] {number}"
        options = check(where, run, Options).model_dump(exclude_unset=True)
        grid.rows.append(make_row(f"{where}: ", options, found, args))
    for program, text in found.programs.items():
        grid.programs[program] = text.split()
    if not grid.rows:
        fail(f"{name} has no [[runs]]")
    if args.iterations and all(row.has_iterations for row in grid.rows):
        fail(f"--iterations: all runs in {name} set iterations")
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


# === Checks =====================================================================================
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
    """Return the grid that --scripts, --envs and the flags next to them in --help describe."""
    grid = Grid("custom", args.repeats or 1, args.returns)
    scripts = [name_of(x, grid.programs) for x in args.scripts or DEFAULT_SCRIPTS]
    options = {
        "scripts": scripts,
        "envs": args.envs or [default_env(scripts)],
        "sizes": args.sizes or ["default" if args.preset or args.returns else "small"],
    }
    if args.devices:
        for script in scripts:
            row = catalog.SCRIPTS.get(full_name(script))
            if not row or row["setting"] != "many devices":
                fail(f"--devices is for linen_sharded and torch_ddp, not for {script}")
        options["devices"] = args.devices
    if args.phases:
        options["label"] = "phases"
        options["flags"] = {"sync-for-timing": True}
    grid.rows.append(make_row("--", options, Study(returns=args.returns), args))
    return grid


# === Scripts ====================================================================================
def default_env(scripts: list[str]) -> str:
    """Return an environment that works with all scripts; fail if there is none."""
    known = [x for x in scripts if full_name(x) in catalog.SCRIPTS]
    continuous = [x for x in known if catalog.is_continuous(full_name(x))]
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
    if full_name(short) in catalog.SCRIPTS:
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
    return short if short in catalog.SCRIPTS else f"ppo_{short.removesuffix('-none')}"


def path_of(short: str) -> str:
    name = full_name(short)
    if not os.path.isfile(ROOT / catalog.file_of(name)):
        fail(f"scripts.toml lists {name}, but {catalog.file_of(name)} does not exist")
    return catalog.file_of(name)


def steps_of(short: str) -> int:
    """Return the steps per iteration; for a custom script, those of a similar script."""
    if full_name(short) in catalog.SCRIPTS:
        return catalog.SCRIPTS[full_name(short)]["steps"]
    rows = list(catalog.SCRIPTS.values())
    return next((x for x in rows if short.startswith(f"{x['algorithm']}_")), rows[0])["steps"]


def seconds_of(short: str, size: str, iterations: float) -> int:
    """Return the rough duration of a run; a custom script is assumed to be like ppo_torch."""
    name = short if short in catalog.SCRIPTS else f"ppo_{short}"
    row = DURATIONS.get(name, DURATIONS["ppo_torch"])
    return int(float(row["startup"]) + iterations * (float(row["iteration"]) + MORE.get(size, 0)))


# === Runs =======================================================================================
def expand(grids: list[Grid], args: argparse.Namespace) -> list[Run]:
    """Return the runs of all grids, one grid after the other."""
    runs: dict[str, Run] = {}
    for grid in grids:
        for run in expand_grid(grid, args):
            other = runs.setdefault(run.name, run)
            if other.command != run.command:
                both = f"{other.study} and {run.study} have different runs named {run.name}"
                fail(f"{both}; start them separately, with different --runs-dir")
    return list(runs.values())


def expand_grid(grid: Grid, args: argparse.Namespace) -> list[Run]:
    """Return the runs of a grid, shuffled within blocks; --seed sets the order."""
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
    # In a study, the environment @doors selects the doors preset of the script.
    is_preset = env.startswith("@") and not args.is_custom
    if not is_preset:
        check_env(row.where, env, script, grid)
    if size not in NETWORKS:
        fail(f"{row.where}sizes must be among: {' '.join(NETWORKS)}; not '{size}'")
    if script not in grid.programs and full_name(script) not in catalog.SCRIPTS:
        fail(f"{row.where}there is no script '{script}'")
    seed = first_seed + row.seed_stride * (repeat - 1)
    total = args.total_timesteps or row.iterations * (row.steps or steps_of(script))
    length = f"{total}steps" if args.total_timesteps else f"{row.iterations}it"
    # Replace the characters in an environment id that a folder name should not contain.
    parts = [row.label, re.sub("[:/]", ".", env), args.preset]
    if is_preset:
        parts = [row.label or env[1:]]
    parts += [size, script, f"{row.devices}devices" if row.devices else ""]
    name = "__".join(filter(None, [*parts, length, f"seed{seed}"]))

    words = list(grid.programs.get(script) or [path_of(script)])
    settings = []  # arguments for the `env` command
    # A script looks for custom environments in the working directory.
    if ":" in env and Path.cwd() != ROOT:
        settings.append(f"--chdir={Path.cwd()}")
        words[0] = str(ROOT / words[0])
    is_compiled = not script.endswith("-none") or script in grid.programs
    if not is_compiled:
        settings.append("JAX_DISABLE_JIT=1")
    if row.devices and catalog.SCRIPTS[full_name(script)]["framework"] == "torch":
        # --standalone finds a free port, so several runs can execute at the same time.
        launch = ["-m", "torch.distributed.run", "--standalone"]
        words = [*launch, f"--nproc-per-node={row.devices}", *words]
    elif row.devices:  # only for CPUs, because JAX always uses all visible GPUs
        settings.append(f"JAX_NUM_CPU_DEVICES={row.devices}")
    if row.wrapper:
        words = ["-m", row.wrapper, *words]
    if args.preset:
        words.append(args.preset)
    words += [env[1:]] if is_preset else ["--env-id", env]
    if NETWORKS[size]:
        words += ["--hidden-sizes", *map(str, NETWORKS[size])]
    words += words_of(row.flags)
    words += ["--seed", str(seed), "--total-timesteps", str(total)]
    is_resumable = row.returns or "save-every" in row.flags
    if not is_resumable and (script not in grid.programs or args.is_custom):
        words += ["--save-every", ONLY_AT_THE_END]  # saving would be part of the measured time
    key = " ".join(word.rpartition("/")[2] for word in [*words, "--run-name", name])
    if args.track and row.track:
        words.append("--track")
    runs_dir = args.runs_dir
    if name.startswith("warmup__"):
        runs_dir /= ".benchmark/warmup"  # ignored by the report
    runner = ["env", *settings, sys.executable] if settings else [sys.executable]
    words += ["--runs-dir", as_argument(runs_dir), "--run-name", name]
    return Run(
        study=grid.study,
        order_seed=args.seed,
        runs_dir=str(args.runs_dir),
        timeout=args.timeout,
        name=name,
        folder=as_argument(runs_dir / name),
        repeat=repeat,
        command=runner + words,
        key=key,
        block=[row.label, env, size, row.iterations] if row.shuffle == "blocks" else [],
        seconds=row.seconds or seconds_of(script, size, total / steps_of(script)),
        is_resumable=is_resumable,
    )


def check_env(where: str, env: str, script: str, grid: Grid) -> None:
    """Fail unless an environment id is known, custom, or may be known to Gymnasium."""
    if env in KNOWN or re.fullmatch(MODULE_AND_NAME, env):
        return
    is_gymnasium = script.endswith("_gymnasium") or script in grid.programs
    if not is_gymnasium or not re.fullmatch(GYMNASIUM_ID, env):
        fail(f"{where}envs must be among: {' '.join(KNOWN)}; or my_module:MyEnv; not '{env}'")
    if "/" in env:  # such as ALE/Pong-v5, which the script registers
        return
    import gymnasium  # slow to import, and only such environments need it

    try:
        gymnasium.spec(env)
    except gymnasium.error.Error as error:
        fail(f"{where}envs: Gymnasium has no environment '{env}': {error}")


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
    minutes = (seconds + 59) // 60
    return f"about {minutes} minute{'' if minutes == 1 else 's'}"


def on_one_line(words: list[str]) -> str:
    """Return a command on one line, quoted for a shell."""
    return shlex.join(words).replace("\n", "'$'\\n''")


def print_missing(runs: list[Run]) -> None:
    missing = []
    for run in runs:
        status = "done   "
        if not run.is_done():
            missing.append(run.seconds)
            status = "stopped" if run.can_resume() else "missing"
        print(f"{status}  {run.name}")
    duration = in_words(sum(missing))
    print(f"Runs missing: {len(missing)} of {len(runs)}, {duration} on two idle cores.")


def begin(args: argparse.Namespace, grids: list[Grid], runs: list[Run], invocation: str) -> Plan:
    """Prepare the runs folder, run the begin commands of the studies, and return the plan."""
    missing = [i for i, run in enumerate(runs) if not run.is_done()]
    study = " ".join(grid.study for grid in grids)
    event = {"event": "grid", "study": study, "runs": len(runs), "order_seed": args.seed}
    event |= {"complete": len(runs) - len(missing)}
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
    for grid in grids:
        command = [sys.executable, *grid.begin.split()]
        if grid.begin and subprocess.run(command, cwd=ROOT).returncode != 0:
            sys.exit(2)
    return Plan(
        invocation=invocation,
        runs_dir=str(args.runs_dir),
        started=time.time(),
        ends=[grid.end for grid in grids if grid.end],
        returns=all(grid.returns for grid in grids),
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
    grids = [custom_grid(args)] if args.is_custom else [read_study(x, args) for x in args.studies]
    runs = [run for run in expand(grids, args) if re.search(args.only, run.key)]
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
            plan = begin(args, grids, chosen, on_one_line([program, *words]))
            plan.write(file, ",".join(args.gpus) or "-")


if __name__ == "__main__":
    main()

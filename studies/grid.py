"""Print the runs of a study, or of a grid that flags describe, for benchmark.sh.

    python -m studies.grid quick --repeats 2 --list

Without --list, --count and --dry-run the grid begins: its folder and its line in the log are made.
The first line printed then says how many runs are missing, and how long they take; each of the next
has a command of the study's begin or end, or a run: its folder, and all of it as JSON.
docs/benchmark.md describes studies/NAME/grid.toml.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import signal
import sys
import tomllib
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C in the imports is no traceback

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from studies.machine import output
from studies.one_run import Run, note

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = (
    *("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "DiscountingChain-bsuite"),
    *("MemoryChain-bsuite", "UmbrellaChain-bsuite", "BernoulliBandit-misc", "GaussianBandit-misc"),
    *("Asterix-MinAtar", "Breakout-MinAtar", "Freeway-MinAtar", "SpaceInvaders-MinAtar"),
)
CONTINUOUS = ("Pendulum-v1", "InvertedPendulum-v5", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")
OWN_ENVIRONMENT = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z0-9_-]+"
FIVE = ["torch", "torch_compile", "linen", "nnx", "nnx_cached"]  # as in quick
# About how many seconds an iteration takes on two cores, compiled and not: for the time left.
COMPILED = {"small": 0.05, "medium": 0.6, "large": 38.4, "own": 0.25}
UNCOMPILED = {"small": 15.7, "medium": 26.3, "large": 66, "own": 15.7}
STARTUP = 8  # seconds


def fail(reason: str) -> NoReturn:
    text = reason.replace("\n", "\\n")
    print(f"benchmark.sh: {text}", file=sys.stderr)
    sys.exit(2)


# === TOML =======================================================================================
# A description ends the sentence about a value that is something else.
Count = Annotated[int, Field(gt=0, lt=10**9, description="a whole number from 1 on")]
Counts = Annotated[
    list[Count], Field(min_length=1, description="a list of whole numbers from 1 on")
]
Text = Annotated[str, Field(pattern=r"^\PC*[^\pC\pZ]\PC*$", description="a text")]  # of one line
Texts = Annotated[list[Text], Field(min_length=1, description="a list of texts")]
Name = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$",
        description="a name, of letters, digits, '_', '-' and '.'",
    ),
]
Flag = Annotated[str, Field(pattern="^[a-z][a-z0-9-]*$")]
Value = bool | int | float | Text
Flags = Annotated[
    dict[Flag, Value | list[Value]],
    Field(description="a table of flags, as { num-envs = 8, anneal-lr = false }"),
]


class Options(BaseModel):
    """What grid.toml may set for all its runs, and below [[runs]] for some of them."""

    model_config = ConfigDict(extra="forbid", strict=True)
    scripts: Texts = []
    envs: Texts = []
    sizes: Texts = []
    flags: Flags = {}
    preset: Name = ""
    label: Name = ""
    repeats: Count = 1
    iterations: Count = 100
    steps: Count = 0  # of an iteration; 0 is as scripts.toml says
    devices: Count = 0  # of a run
    seconds: Count = 0  # 0 is an estimate
    wrapper: Name = ""  # a module that runs the script
    seeds: Counts = [1]
    seed_stride: Count = 1  # from a repeat's seed to the next one's
    track: bool = Field(True, description="true or false")


class Study(Options):
    """What it may set for all alone."""

    shuffle: Literal["blocks", "repeats"] = Field("blocks", description="'blocks' or 'repeats'")
    begin: Text = ""
    end: Text = ""
    include: Texts = []
    programs: dict[Name, Text] = Field({}, description="a table of commands by their names")
    presets: dict[str, Flags] = Field({}, description="a table of tables of flags")
    runs: list[dict[str, Any]] = Field([], description="tables, each below a line [[runs]]")


class Row(Options):
    """A table of [[runs]] with all options: its own, those of its file, and those of flags."""

    where: str  # begins the sentence about what is wrong in it
    shuffle: str
    has_own_iterations: bool


class Script(BaseModel):
    """What is read of a row of scripts.toml."""

    model_config = ConfigDict(strict=True)
    algorithm: Text
    framework: Text
    folder: Text
    family: Text
    steps: Count


Model = TypeVar("Model", bound=BaseModel)


def read_toml(name: str) -> dict[str, Any]:
    """A file of the project, by its path from the project's root on."""
    try:
        with open(ROOT / name, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        fail(f"{name} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        fail(f"{name} is not valid TOML: {error}")


def check(where: str, table: dict[str, Any], model: type[Model]) -> Model:
    try:
        return model.model_validate(table)
    except ValidationError as errors:
        error = errors.errors()[0]
    key = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        fail(f"{where}: there is no key '{key}'; docs/benchmark.md has those that there are")
    if error["type"] == "missing":
        fail(f"{where}: {key} is missing")
    fail(f"{where}: {key} must be {model.model_fields[key].description}, not {table[key]!r}")


def read_scripts() -> dict[str, Script]:
    scripts = {}
    for name, row in read_toml("scripts.toml").items():
        where = f"scripts.toml, {name}"
        if not isinstance(row, dict):
            fail(f"{where} must be a table, not {row!r}")
        scripts[name] = check(where, row, Script)
    if not scripts:
        fail("scripts.toml has no scripts")
    return scripts


def read_sizes() -> dict[str, list[int]]:
    """The units of each hidden layer, by a network's name; own is what the script has."""
    sizes = read_toml("analysis/sizes.toml")
    fields: dict[str, Any] = dict.fromkeys(sizes, (Counts, ...))
    check("analysis/sizes.toml", sizes, create_model("Sizes", **fields))
    sizes["own"] = []
    return sizes


SCRIPTS = read_scripts()
SIZES = read_sizes()


# === Arguments ==================================================================================
class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message.removeprefix("argument "))


def positive(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"must be a positive whole number, not '{text}'")
    return int(text)


def items(text: str) -> list[str]:
    if os.path.isfile(text):  # False, too, for what is too long to be a path
        return [text]  # a script's path may have spaces
    words = text.replace(",", " ").split()
    if not words:
        raise argparse.ArgumentTypeError(f"must name one or more, not '{text}'")
    return words


def expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError):
        raise argparse.ArgumentTypeError(f"must be a regular expression, not '{text}'") from None


def parse_args() -> argparse.Namespace:
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("study", nargs="?")
    for name in ("scripts", "envs", "sizes"):
        parser.add_argument(f"--{name}", type=items)
    parser.add_argument("--sync", action="store_true")
    for name in ("iterations", "repeats", "to", "devices"):
        parser.add_argument(f"--{name}", type=positive)
    parser.add_argument("--timeout", type=positive, default=86400)
    parser.add_argument("--gpus", type=lambda text: text.split(","), default=[])
    parser.add_argument("--seed", type=positive, default=1)
    parser.add_argument("--from", type=positive, default=1, dest="first")
    parser.add_argument("--only", type=expression, default=re.compile(""))
    for name in ("track", "list", "count", "dry-run"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    # Of benchmark.sh: where it was called, how, and with which Python.
    parser.add_argument("--called-from", type=os.chdir)
    parser.add_argument("--invocation", default="")
    parser.add_argument("--notes", default="")
    parser.add_argument("--python", default="python")
    args = parser.parse_args()
    own = [f"--{x}" for x in ("scripts", "envs", "sizes", "sync", "devices") if getattr(args, x)]
    if own and args.study:
        fail(f"{own[0]} makes a grid of your own, so leave out '{args.study}', or use --only")
    if args.devices and args.gpus:
        fail("--devices takes the GPUs of CUDA_VISIBLE_DEVICES, so leave out --gpus.")
    args.study = "custom" if own else args.study or "quick"
    return args


def check_gpus(gpus: list[str]) -> None:
    """CUDA takes the beginning of a UUID, too; where it sees no such GPU, runs go to the CPU."""
    lines = (output("nvidia-smi", "-L") or "").splitlines() if gpus else []
    seen = []
    for gpu in gpus:
        line = [x for x in lines if x.startswith(f"GPU {gpu}: ") or f"(UUID: {gpu})" in x]
        if not line:
            fail(f"--gpus must be numbers or UUIDs that 'nvidia-smi -L' lists, not '{gpu}'.")
        if line in seen:
            fail(f"--gpus must name a GPU once, but '{gpu}' is there twice.")
        seen.append(line)


def check_runs_dir(folder: Path) -> None:
    """It, or the folder that it would be made in, must be one to write to."""
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        fail(f"--runs-dir needs a folder to write to, which '{folder}' is not.")


# === The grid ===================================================================================
@dataclass
class Grid:
    repeats: int
    rows: list[Row] = field(default_factory=list)
    programs: dict[str, list[str]] = field(default_factory=dict)  # words for Python, by name
    begin: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)


def make_grid(args: argparse.Namespace) -> Grid:
    """What --scripts, --envs, --sizes and --sync describe."""
    grid = Grid(args.repeats or 1)
    scripts = [name_of(x, grid.programs) for x in args.scripts or FIVE]
    own = {
        "scripts": scripts,
        "envs": args.envs or [default_env(scripts)],
        "sizes": args.sizes or ["small"],
    }
    if args.devices:
        for script in scripts:
            row = SCRIPTS.get(full_name(script))
            if not row or row.family != "many devices":
                others = "linen_sharded and torch_ddp do not"
                fail(f"--devices: {script} trains on one device; {others}")
        own["devices"] = args.devices
    if args.sync:
        own["label"] = "sync"
        own["flags"] = {"sync-for-timing": True}
    grid.rows.append(complete("--", own, Study(), args))
    return grid


def default_env(scripts: list[str]) -> str:
    """One that all the scripts take."""
    known = [x for x in scripts if full_name(x) in SCRIPTS]
    continuous = [x for x in known if is_continuous(x)]
    if not continuous:
        return "CartPole-v1"
    discrete = [x for x in known if x not in continuous]
    if discrete:
        both = f"{continuous[0]} takes continuous actions and {discrete[0]} discrete ones"
        fail(f"--scripts: {both}, so no environment is for both")
    return "Pendulum-v1"


def read_grid(study: str, args: argparse.Namespace, including: tuple[str, ...] = ()) -> Grid:
    """A study's, and those that it includes."""
    name = f"studies/{study}/grid.toml"
    if not os.path.isfile(ROOT / name):
        fail(f"there is no study '{study}'; see ./benchmark.sh --help")
    if study in including:
        fail(f"{name} includes itself")
    found = check(name, read_toml(name), Study)
    grid = Grid(args.repeats or found.repeats)
    for number, table in enumerate(found.runs, 1):
        where = f"{name}, [[runs]] {number}"
        own = check(where, table, Options).model_dump(exclude_unset=True)
        grid.rows.append(complete(f"{where}: ", own, found, args))
    for program, text in found.programs.items():
        grid.programs[program] = text.split()
    if found.begin:
        grid.begin.append(found.begin)
    if found.end:
        grid.end.append(found.end)
    for other in found.include:
        included = read_grid(other, args, (*including, study))
        grid.rows += included.rows
        grid.programs = included.programs | grid.programs
        grid.begin += included.begin
        grid.end += included.end
    if not grid.rows:
        fail(f"{name} has no [[runs]]")
    return grid


def complete(where: str, own: dict[str, Any], study: Study, args: argparse.Namespace) -> Row:
    """A table of [[runs]] that sets its own options, with all others."""
    row = Row.model_construct(**(study.model_dump() | own))
    row.where = where
    for key in ("scripts", "envs", "sizes"):
        if not getattr(row, key):
            fail(f"{where}{key} is missing")
    if row.preset and row.preset not in study.presets:
        fail(f"{where}there is no preset '{row.preset}'")
    row.flags = study.flags | study.presets.get(row.preset, {}) | own.get("flags", {})
    repeats = args.repeats or study.repeats
    row.repeats = min(repeats, own.get("repeats", repeats))
    row.has_own_iterations = "iterations" in own
    if args.iterations and not row.has_own_iterations:
        row.iterations = args.iterations
        row.seconds = row.seconds * args.iterations // study.iterations
    return row


def name_of(text: str, programs: dict[str, list[str]]) -> str:
    """The name of a script that is given by name, by file name or by path; add what it runs."""
    path = Path(text).absolute()
    name = path.name.removesuffix(".py")
    short = name.removeprefix("ppo_")
    if full_name(short) in SCRIPTS:
        known = ROOT / file_of(short)
        if "/" in text and not (os.path.isfile(path) and path.samefile(known)):
            fail(f"--scripts: '{text}' has the name of a script of this project")
        return short
    if path.suffix != ".py" or not os.path.isfile(path):
        fail(f"--scripts: '{text}' is neither a script of this project nor the path of one")
    if not re.fullmatch(r"\w+", name, re.ASCII):
        fail(f"--scripts: runs are named after '{name}', so it must be of letters, digits and _")
    if programs.setdefault(name, [str(path)]) != [str(path)]:
        fail(f"--scripts: '{path}' and '{programs[name][0]}' have one name")
    return name


def full_name(short: str) -> str:
    """A script's name as scripts.toml has it.

    In names of runs PPO's have no ppo_, and linen-none is ppo_linen that compiles nothing.
    """
    return short if short in SCRIPTS else f"ppo_{short.removesuffix('-none')}"


def file_of(short: str) -> str:
    """The file of a script of this project, from its root on."""
    name = full_name(short)
    file = str(Path(SCRIPTS[name].folder, f"{name}.py"))
    if not os.path.isfile(ROOT / file):
        fail(f"scripts.toml has {name}, but {file} is not there")
    return file


def is_continuous(short: str) -> bool:
    """Whether a script of this project is for continuous actions."""
    row = SCRIPTS[full_name(short)]
    return row.algorithm == "sac" or row.family.startswith("continuous")


def steps_of(short: str) -> int:
    """Those of an iteration; one's own script is taken for the first whose algorithm it names."""
    if full_name(short) in SCRIPTS:
        return SCRIPTS[full_name(short)].steps
    rows = list(SCRIPTS.values())
    return next((x for x in rows if short.startswith(f"{x.algorithm}_")), rows[0]).steps


def expand(grid: Grid, args: argparse.Namespace) -> list[Run]:
    """All runs, in their order."""
    runs: dict[str, Run] = {}
    for repeat in range(1, grid.repeats + 1):
        for row in grid.rows:
            if repeat > row.repeats:
                continue
            envs = ENVIRONMENTS if row.envs == ["all"] else row.envs
            for cell in product(envs, row.sizes, row.scripts, row.seeds):
                run = describe(grid, args, row, cell, repeat)
                runs.setdefault(run.name, run)
    blocks = [run.block for run in runs.values()]

    def order(run: Run) -> tuple[int, int, str]:
        salted = f"{args.seed} {run.name}".encode()
        return run.repeat, blocks.index(run.block), hashlib.md5(salted).hexdigest()

    return sorted(runs.values(), key=order)


def describe(
    grid: Grid, args: argparse.Namespace, row: Row, cell: tuple[str, str, str, int], repeat: int
) -> Run:
    env, size, script, first = cell
    is_configuration = env.startswith("@") and args.study != "custom"  # no flag has one
    known = (*ENVIRONMENTS, *CONTINUOUS)
    if not is_configuration and env not in known and not re.fullmatch(OWN_ENVIRONMENT, env):
        fail(f"{row.where}envs must be of: {' '.join(known)}; or my_module:MyEnv; not '{env}'")
    if size not in SIZES:
        fail(f"{row.where}sizes must be of: {' '.join(SIZES)}; not '{size}'")
    if script not in grid.programs and full_name(script) not in SCRIPTS:
        fail(f"{row.where}there is no script '{script}'")
    seed = first + row.seed_stride * (repeat - 1)
    # A dot for the colon of one's own: no other environment's name has one.
    parts = [row.label, env.replace(":", ".")]
    if is_configuration:  # a label says more
        parts = [row.label or env[1:]]
    parts += [size, script, f"{row.devices}devices" if row.devices else ""]
    name = "__".join(filter(None, [*parts, f"{row.iterations}it", f"seed{seed}"]))

    words = list(grid.programs.get(script) or [file_of(script)])
    settings = []  # of the command `env`
    # A script looks for one's own environment in the folder that it runs in.
    if ":" in env and Path.cwd() != ROOT:
        settings.append(f"--chdir={Path.cwd()}")
        words[0] = str(ROOT / words[0])
    compiles = not script.endswith("-none") or script in grid.programs
    if not compiles:
        settings.append("JAX_DISABLE_JIT=1")
    if row.devices and SCRIPTS[full_name(script)].framework == "torch":
        # A port that is free, so that several can run beside each other.
        launch = ["-m", "torch.distributed.run", "--standalone"]
        words = [*launch, f"--nproc-per-node={row.devices}", *words]
    elif row.devices:  # of a CPU; of GPUs JAX takes those that it sees
        settings.append(f"JAX_NUM_CPU_DEVICES={row.devices}")
    if row.wrapper:
        words = ["-m", row.wrapper, *words]
    words += [env[1:]] if is_configuration else ["--env-id", env]
    if SIZES[size]:
        words += ["--hidden-sizes", *map(str, SIZES[size])]
    steps = row.iterations * (row.steps or steps_of(script))
    words += words_of(row.flags)
    words += ["--seed", str(seed), "--total-timesteps", str(steps)]
    seconds = row.iterations * UNCOMPILED.get(size, UNCOMPILED["own"])
    if compiles:
        seconds = STARTUP + row.iterations * COMPILED.get(size, COMPILED["own"])
    key = " ".join(word.rpartition("/")[2] for word in [*words, "--run-name", name])
    if args.track and row.track:
        words.append("--track")
    folder = args.runs_dir
    if name.startswith("warmup__"):
        folder /= ".benchmark/warmup"  # out of the report's way
    runner = ["env", *settings, args.python] if settings else [args.python]
    words += ["--runs-dir", as_path(folder), "--run-name", name]
    return Run(
        study=args.study,
        order_seed=args.seed,
        runs_dir=str(args.runs_dir),
        timeout=args.timeout,
        name=name,
        folder=as_path(folder / name),
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


def as_path(path: Path) -> str:
    """As a script takes it, to which -runs would be a flag."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def in_words(seconds: int) -> str:
    if seconds > 7200:
        return f"about {(seconds + 1800) // 3600} hours"
    return f"about {(seconds + 59) // 60} minutes"


# === What is printed ============================================================================
def print_missing(runs: list[Run]) -> None:
    left = []
    for run in runs:
        word = "done   "
        if not run.is_done():
            left.append(run.seconds)
            word = "stopped" if run.is_stopped() else "missing"
        print(f"{word}  {run.name}")
    print(f"Runs missing: {len(left)} of {len(runs)}, {in_words(sum(left))} on two cores.")


def begin(args: argparse.Namespace, grid: Grid, runs: list[Run]) -> None:
    """Make the folder of the runs, and print what the loop of benchmark.sh reads."""
    left = [run.seconds for run in runs if not run.is_done()]
    event = {"event": "grid", "study": args.study, "runs": len(runs), "order_seed": args.seed}
    event |= {"complete": len(runs) - len(left), "repeats": grid.repeats}
    event |= {"host": os.uname().nodename, "notes": args.notes, "invocation": args.invocation}
    try:
        (args.runs_dir / ".benchmark").mkdir(parents=True, exist_ok=True)
        for run in runs:
            run.failed.unlink(missing_ok=True)
        note(args.runs_dir, **event)
    except OSError as error:
        fail(f"{args.runs_dir}: {error.strerror}")
    print("study", len(left), in_words(sum(left)), sep="\t")
    for command in grid.begin:
        print("begin", command, sep="\t")
    for command in grid.end:
        print("end", command, sep="\t")
    for run in runs:
        place = Path(run.folder).relative_to(args.runs_dir)
        print("run", place, json.dumps(asdict(run)), sep="\t")


def main() -> None:
    args = parse_args()
    grid = make_grid(args) if args.study == "custom" else read_grid(args.study, args)
    if args.iterations and all(row.has_own_iterations for row in grid.rows):
        fail(f"--iterations: all runs of studies/{args.study}/grid.toml have their own")
    runs = [run for run in expand(grid, args) if re.search(args.only, run.key)]
    if not runs:
        fail(f"nothing to run: no command matches --only '{args.only.pattern}'")
    for line, run in enumerate(runs, 1):
        run.line = line
    chosen = runs[args.first - 1 : args.to]
    if not chosen:
        fail(f"nothing to run: the list has {len(runs)} lines, and none from --from to --to")
    if args.count:
        print(len(chosen))
    elif args.list:
        for run in chosen:  # on one line, as bash reads it
            print(shlex.join(run.command).replace("\n", "'$'\\n''"))
    else:
        check_gpus(args.gpus)
        check_runs_dir(args.runs_dir)
        if args.dry_run:
            print_missing(chosen)
        else:
            begin(args, grid, chosen)


if __name__ == "__main__":
    main()

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
from itertools import product
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback if Ctrl-C interrupts the imports

from pydantic import BaseModel, NonNegativeInt, PositiveInt, ValidationError

from bench.arguments import DEFAULT_SCRIPTS, ROOT, catalog, fail, parse_args
from bench.machine import output
from bench.run import Plan, Run, log_event

ONLY_AT_THE_END = str(10**9)  # value of --save-every
# Rough seconds to the end of iteration 0 and per further iteration, with the default settings and
# the small network, on two idle cores. From runs.csv and races.jsonl in studies/.
with open(Path(__file__).with_name("durations.csv"), newline="") as file:
    DURATIONS = {row["script"]: row for row in csv.DictReader(file)}
MORE = {"medium": 1.0, "large": 38.0}  # additional seconds per iteration with a larger network
LONG = 7200  # seconds; before a longer benchmark, benchmark.sh prints how long it will take

ALL = [
    name
    for name, row in catalog.ENVIRONMENTS.items()
    if (row["library"], row["actions"]) == ("gymnax", "discrete")
]
NETWORKS = catalog.SIZES | {"default": []}  # units per hidden layer; [] keeps the script default

# === Studies ====================================================================================
Value = bool | int | float | str


class Options(BaseModel, extra="forbid", strict=True):
    """Keys in grid.toml that apply to all runs, or to the runs in one [[runs]] table."""

    scripts: list[str] = []
    envs: list[str] = []
    sizes: list[str] = []
    flags: dict[str, Value | list[Value]] = {}
    preset: str = ""  # key in the presets of the study
    label: str = ""  # prefix of the run names
    repeats: PositiveInt = 1
    iterations: PositiveInt = 100
    steps: NonNegativeInt = 0  # environment steps per iteration; 0 means the value in scripts.toml
    devices: NonNegativeInt = 0  # number of devices per run; 0 means the default
    seconds: NonNegativeInt = 0  # expected duration of a run; 0 means an estimate
    wrapper: str = ""  # a module that runs the script
    seeds: list[PositiveInt] = [1]
    seed_stride: PositiveInt = 1  # difference between the seeds of two successive repeats
    track: bool = True


class Study(Options):
    """All keys of grid.toml."""

    shuffle: Literal["blocks", "repeats"] = "blocks"
    returns: bool = False  # whether the runs measure returns
    begin: str = ""
    end: str = ""
    programs: dict[str, str] = {}  # name -> arguments for Python
    presets: dict[str, dict[str, Value | list[Value]]] = {}
    runs: list[Options] = []


def read_study(name: str) -> Study:
    path = f"studies/{name}/grid.toml"
    if not os.path.isfile(ROOT / path):
        fail(f"there is no study '{name}'; see ./benchmark.sh --help")
    try:
        study = Study(**catalog.read_toml(ROOT / path))
    except catalog.CatalogError as error:
        fail(f"studies/{name}/{error}")
    except ValidationError as errors:
        error = errors.errors()[0]
        fail(f"{path}: {'.'.join(map(str, error['loc']))}: {error['msg']}")
    if not study.runs:
        fail(f"{path} has no [[runs]]")
    return study


def custom_study(args: argparse.Namespace) -> Study:
    """Return the study that --scripts, --envs and the flags next to them in --help describe."""
    programs: dict[str, str] = {}
    scripts = [name_of(x, programs) for x in args.scripts or DEFAULT_SCRIPTS]
    study = Study(scripts=scripts, programs=programs, returns=args.returns, runs=[Options()])
    study.envs = args.envs or [default_env(scripts)]
    study.sizes = args.sizes or ["default" if args.preset or args.returns else "small"]
    if args.phases:
        study.label = "phases"
        study.flags = {"sync-for-timing": True}
    if args.devices:
        study.devices = args.devices
        rows = catalog.SCRIPTS.items()
        several = [x.removeprefix("ppo_") for x, row in rows if row["setting"] == "many devices"]
        for script in scripts:
            if script not in several:
                fail(f"--devices is for {', '.join(several)}, not for {script}")
    return study


def rows_of(name: str, study: Study, args: argparse.Namespace) -> list[Study]:
    """Return the study once per [[runs]] table, with the values of that table and of the flags."""
    rows = []
    for run in study.runs:
        row = study.model_copy(update=run.model_dump(exclude_unset=True))
        for key in ("scripts", "envs", "sizes"):
            if not getattr(row, key):
                fail(f"studies/{name}/grid.toml: {key} is missing")
        if row.preset and row.preset not in study.presets:
            fail(f"studies/{name}/grid.toml: there is no preset '{row.preset}'")
        row.flags = study.flags | study.presets.get(row.preset, {}) | run.flags
        row.repeats = args.repeats or study.repeats
        if "repeats" in run.model_fields_set:
            row.repeats = min(row.repeats, run.repeats)
        if args.iterations and "iterations" not in run.model_fields_set:
            row.iterations = args.iterations
            row.seconds = row.seconds * args.iterations // study.iterations
        rows.append(row)
    return rows


# === Scripts ====================================================================================
def default_env(scripts: list[str]) -> str:
    known = [full_name(x) for x in scripts if full_name(x) in catalog.SCRIPTS]
    return "Pendulum-v1" if any(map(catalog.is_continuous, known)) else "CartPole-v1"


def name_of(text: str, programs: dict[str, str]) -> str:
    """Return the short name of a script that is given by name or path.

    Add a file that is not a script of this project to `programs`.
    """
    path = Path(text).absolute()
    name = path.name.removesuffix(".py")
    short = name.removeprefix("ppo_")
    if full_name(short) in catalog.SCRIPTS:
        known = ROOT / file_of(short)
        if "/" in text and not (path.is_file() and path.samefile(known)):
            fail(f"--scripts: '{text}' has the name of a script of this project")
        return short
    if path.suffix != ".py" or not path.is_file():
        fail(f"--scripts: '{text}' is neither a script of this project nor the path of a file")
    command = shlex.quote(str(path))
    if programs.setdefault(name, command) != command:
        fail(f"--scripts: {command} and {programs[name]} have the same name")
    return name


def full_name(short: str) -> str:
    """Return the name in scripts.toml for the short name of a script.

    Short names omit the prefix ppo_, and linen-none is ppo_linen without compilation.
    """
    return short if short in catalog.SCRIPTS else f"ppo_{short.removesuffix('-none')}"


def file_of(short: str) -> str:
    return catalog.file_of(full_name(short))


def steps_of(short: str) -> int:
    """Return the steps per iteration; for a custom script, those of a similar script."""
    if full_name(short) in catalog.SCRIPTS:
        return catalog.SCRIPTS[full_name(short)]["steps"]
    rows = list(catalog.SCRIPTS.values())
    return next((x for x in rows if short.startswith(f"{x['algorithm']}_")), rows[0])["steps"]


def seconds_of(short: str, size: str, iterations: float) -> int:
    """Return the rough duration of a run; a custom script is assumed to be like ppo_torch."""
    name = short if short in catalog.SCRIPTS else f"ppo_{short}"
    similar = DURATIONS.get(name.replace("nnx", "linen"), DURATIONS["ppo_torch"])
    row = DURATIONS.get(name, similar)
    return int(float(row["startup"]) + iterations * (float(row["iteration"]) + MORE.get(size, 0)))


# === Runs =======================================================================================
def expand(studies: dict[str, Study], args: argparse.Namespace) -> list[Run]:
    """Return the runs of all studies, one study after the other."""
    runs: dict[str, Run] = {}
    for name, study in studies.items():
        for run in expand_study(name, study, args):
            other = runs.setdefault(run.name, run)
            if other.command != run.command:
                both = f"{other.study} and {run.study} have different runs named {run.name}"
                fail(f"{both}; start them separately, with different --runs-dir")
    return list(runs.values())


def expand_study(name: str, study: Study, args: argparse.Namespace) -> list[Run]:
    """Return the runs of a study, shuffled within blocks; the order depends only on their names."""
    runs: dict[str, Run] = {}
    rows = rows_of(name, study, args)
    for repeat in range(1, max(row.repeats for row in rows) + 1):
        for row in rows:
            if repeat > row.repeats:
                continue
            envs = ALL if row.envs == ["all"] else row.envs
            for cell in product(envs, row.sizes, row.scripts, row.seeds):
                run = make_run(name, row, args, cell, repeat)
                runs.setdefault(run.name, run)
    blocks = [run.block for run in runs.values()]

    def order(run: Run) -> tuple[int, int, str]:
        return run.repeat, blocks.index(run.block), hashlib.md5(run.name.encode()).hexdigest()

    return sorted(runs.values(), key=order)


def make_run(
    study: str, row: Study, args: argparse.Namespace, cell: tuple[str, str, str, int], repeat: int
) -> Run:
    env, size, script, first_seed = cell
    # In a study, the environment @doors selects the doors preset of the script.
    is_preset = env.startswith("@") and not args.is_custom
    is_program = script in row.programs
    if not is_program and full_name(script) not in catalog.SCRIPTS:
        fail(f"there is no script '{script}'")
    if size not in NETWORKS:
        fail(f"sizes must be among: {' '.join(NETWORKS)}; not '{size}'")
    # Gymnasium scripts check the environment id themselves.
    is_known = env in catalog.ENVIRONMENTS or ":" in env or is_preset
    if not is_known and not is_program and not script.endswith("_gymnasium"):
        known = " ".join(catalog.ENVIRONMENTS)
        fail(f"envs must be among: {known}; or my_module:MyEnv; not '{env}'")
    seed = first_seed + row.seed_stride * (repeat - 1)
    total = args.total_timesteps or row.iterations * (row.steps or steps_of(script))
    length = f"{total}steps" if args.total_timesteps else f"{row.iterations}it"
    # Replace the characters in an environment id that a folder name should not contain.
    parts = [row.label, re.sub("[:/]", ".", env), args.preset]
    if is_preset:
        parts = [row.label or env[1:]]
    parts += [size, script, f"{row.devices}devices" if row.devices else ""]
    name = "__".join(filter(None, [*parts, length, f"seed{seed}"]))

    words = shlex.split(row.programs[script]) if is_program else [file_of(script)]
    settings = []  # arguments for the `env` command
    # A script looks for custom environments in the working directory.
    if ":" in env and Path.cwd() != ROOT:
        settings.append(f"--chdir={Path.cwd()}")
        words[0] = str(ROOT / words[0])
    if script.endswith("-none") and not is_program:
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
    if not is_resumable and (args.is_custom or not is_program):
        words += ["--save-every", ONLY_AT_THE_END]  # saving would be part of the measured time
    key = " ".join(word.rpartition("/")[2] for word in [*words, "--run-name", name])
    if args.track and row.track:
        words.append("--track")
    runs_dir = args.runs_dir
    if name.startswith("warmup__"):
        runs_dir /= ".benchmark/warmup"  # ignored by the report
    runner = ["env", *settings, sys.executable] if settings else [sys.executable]
    words += ["--runs-dir", str(runs_dir), "--run-name", name]
    return Run(
        study=study,
        runs_dir=str(args.runs_dir),
        timeout=args.timeout,
        name=name,
        folder=str(runs_dir / name),
        repeat=repeat,
        command=runner + words,
        key=key,
        block=[row.label, env, size, row.iterations] if row.shuffle == "blocks" else [],
        seconds=row.seconds or seconds_of(script, size, total / steps_of(script)),
        is_resumable=is_resumable,
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


# === Output =====================================================================================
def check_gpus(gpus: list[str]) -> None:
    """Fail unless nvidia-smi lists each GPU; with a wrong name, CUDA would silently use none."""
    listed = (output("nvidia-smi", "-L") or "") if gpus else ""
    for gpu in gpus:
        if f"GPU {gpu}: " not in listed and f"(UUID: {gpu})" not in listed:
            fail(f"--gpus must be numbers or UUIDs that 'nvidia-smi -L' lists, not '{gpu}'.")


def in_words(seconds: int) -> str:
    if seconds > LONG:
        return f"about {(seconds + 1800) // 3600} hours"
    minutes = (seconds + 59) // 60
    return f"about {minutes} minute{'' if minutes == 1 else 's'}"


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


def begin(
    args: argparse.Namespace, studies: dict[str, Study], runs: list[Run], invocation: str
) -> Plan:
    """Prepare the runs folder, run the begin commands of the studies, and return the plan."""
    missing = [i for i, run in enumerate(runs) if not run.is_done()]
    event = {"event": "grid", "study": " ".join(studies), "runs": len(runs)}
    event |= {"complete": len(runs) - len(missing)}
    event |= {"host": os.uname().nodename, "invocation": invocation}
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
    for study in studies.values():
        command = [sys.executable, *study.begin.split()]
        if study.begin and subprocess.run(command, cwd=ROOT).returncode != 0:
            sys.exit(2)
    return Plan(
        invocation=invocation,
        runs_dir=str(args.runs_dir),
        started=time.time(),
        ends=[study.end for study in studies.values() if study.end],
        returns=all(study.returns for study in studies.values()),
        track=args.track,
        report=not args.no_report,
        runs=runs,
        missing=missing,
    )


def main() -> None:
    program, called_from, file, *words = sys.argv[1:]
    os.chdir(called_from)
    args = parse_args(words)
    studies = {name: read_study(name) for name in args.studies}
    if args.is_custom:
        studies = {"custom": custom_study(args)}
    runs = [run for run in expand(studies, args) if re.search(args.only, run.key)]
    if not runs:
        fail(f"nothing to run: no command matches --only '{args.only.pattern}'")
    chosen = runs[args.first - 1 : args.to]
    if not chosen:
        fail(f"nothing to run: the list has {len(runs)} lines, and none is within --from and --to")
    if args.count:
        print(len(chosen))
    elif args.list:
        for run in chosen:
            print(shlex.join(run.command))
    else:
        check_gpus(args.gpus)
        if args.dry_run:
            print_missing(chosen)
        else:
            plan = begin(args, studies, chosen, shlex.join([program, *words]))
            plan.write(file, ",".join(args.gpus) or "-")


if __name__ == "__main__":
    main()

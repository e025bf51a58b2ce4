"""Print the runs of a study, or of a grid that flags describe, for benchmark.sh.

    python studies/grid.py quick --repeats 2

The first line has the study, its repeats and the seed of its order; then there is a line for each
command at its begin and its end, and one for each run: its place in the list, repeat, seconds that
it takes on two cores, name, and command. docs/benchmark.md describes studies/NAME/grid.toml.
It imports the standard library alone: benchmark.sh --list comes before any setup.
"""

import argparse
import hashlib
import os
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

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

Check = Callable[[Any], bool]


def fail(reason: str) -> NoReturn:
    text = reason.replace("\n", "\\n")
    print(f"benchmark.sh: {text}", file=sys.stderr)
    sys.exit(2)


# === TOML =======================================================================================
def is_number(value: Any) -> bool:
    return type(value) is int and 0 < value < 10**9  # a bool is an int, too


def is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and value.strip() != ""


def is_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\w[\w.-]*", value, re.ASCII) is not None


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(is_text(x) for x in value)


def is_numbers(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(is_number(x) for x in value)


def is_order(value: Any) -> bool:
    return value in ("blocks", "repeats")


def is_flags(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    for name, given in value.items():
        several = given if isinstance(given, list) else [given]
        if not re.fullmatch("[a-z][a-z0-9-]*", name):
            return False
        if not all(isinstance(x, bool | int | float) or is_text(x) for x in several):
            return False
    return True


def is_programs(value: Any) -> bool:
    return isinstance(value, dict) and all(is_name(x) and is_text(y) for x, y in value.items())


def is_presets(value: Any) -> bool:
    return isinstance(value, dict) and all(is_flags(x) for x in value.values())


def is_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, dict) for x in value)


# What a value must be, by the check that it did not pass.
KINDS: dict[Check, str] = {
    is_number: "a whole number from 1 on",
    is_switch: "true or false",
    is_text: "a text",
    is_name: "a name, of letters, digits, '_', '-' and '.'",
    is_texts: "a list of texts",
    is_numbers: "a list of whole numbers from 1 on",
    is_order: "'blocks' or 'repeats'",
    is_flags: "a table of flags, as { num-envs = 8, anneal-lr = false }",
    is_programs: "a table of commands by their names",
    is_presets: "a table of tables of flags",
    is_tables: "tables, each below a line [[runs]]",
}
# What grid.toml may set for all its runs, and below [[runs]] for some of them.
OPTIONS: dict[str, Check] = {
    "scripts": is_texts,
    "envs": is_texts,
    "sizes": is_texts,
    "flags": is_flags,
    "preset": is_name,
    "label": is_name,
    "repeats": is_number,
    "iterations": is_number,
    "steps": is_number,  # of an iteration
    "devices": is_number,  # of a run
    "seconds": is_number,
    "wrapper": is_name,  # a module that runs the script
    "seeds": is_numbers,
    "seed_stride": is_number,  # from a repeat's seed to the next one's
    "track": is_switch,
}
# What it may set for all alone.
COMMON: dict[str, Check] = {
    "shuffle": is_order,
    "begin": is_text,
    "end": is_text,
    "include": is_texts,
    "programs": is_programs,
    "presets": is_presets,
    "runs": is_tables,
}
DEFAULTS: dict[str, Any] = {
    "repeats": 1,
    "iterations": 100,
    "seeds": [1],
    "seed_stride": 1,
    "track": True,
    "shuffle": "blocks",
}
# What is read of a row of scripts.toml.
ROW: dict[str, Check] = {
    "algorithm": is_text,
    "framework": is_text,
    "family": is_text,
    "steps": is_number,
}


def read_toml(name: str) -> dict[str, Any]:
    """A file of the project, by its path from the project's root on."""
    try:
        with open(ROOT / name, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        fail(f"{name} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        fail(f"{name} is not valid TOML: {error}")


def check_values(where: str, table: dict[str, Any], checks: dict[str, Check]) -> None:
    for key, value in table.items():
        if key in checks and not checks[key](value):
            fail(f"{where}: {key} must be {KINDS[checks[key]]}, not {value!r}")


def check_keys(where: str, table: dict[str, Any], known: dict[str, Check]) -> None:
    for key in table:
        if key not in known:
            fail(f"{where}: there is no key '{key}'; docs/benchmark.md has those that there are")


def read_scripts() -> dict[str, dict[str, Any]]:
    rows = read_toml("scripts.toml")
    for name, row in rows.items():
        where = f"scripts.toml, {name}"
        if not isinstance(row, dict):
            fail(f"{where} must be a table, not {row!r}")
        for key in ROW:
            if key not in row:
                fail(f"{where}: {key} is missing")
        check_values(where, row, ROW)
    if not rows:
        fail("scripts.toml has no scripts")
    return rows


def read_sizes() -> dict[str, list[int]]:
    """The units of each hidden layer, by a network's name; own is what the script has."""
    sizes = read_toml("analysis/sizes.toml")
    check_values("analysis/sizes.toml", sizes, dict.fromkeys(sizes, is_numbers))
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
    parser.add_argument("--seed", type=positive, default=1)
    parser.add_argument("--from", type=positive, default=1, dest="first")
    parser.add_argument("--only", type=expression, default=re.compile(""))
    parser.add_argument("--track", action="store_true")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--python", default="python")
    args = parser.parse_args()
    own = [f"--{x}" for x in ("scripts", "envs", "sizes", "sync", "devices") if getattr(args, x)]
    if own and args.study:
        fail(f"{own[0]} makes a grid of your own, so leave out '{args.study}', or use --only")
    args.study = "custom" if own else args.study or "quick"
    return args


# === The grid ===================================================================================
@dataclass
class Grid:
    repeats: int
    rows: list[dict[str, Any]] = field(default_factory=list)  # of [[runs]], with all options
    programs: dict[str, list[str]] = field(default_factory=dict)  # words for Python, by name
    begin: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)


def make_grid(args: argparse.Namespace) -> Grid:
    """What --scripts, --envs, --sizes and --sync describe."""
    grid = Grid(args.repeats or 1)
    scripts = [name_of(x, grid.programs) for x in args.scripts or FIVE]
    row: dict[str, Any] = {
        "scripts": scripts,
        "envs": args.envs or [default_env(scripts)],
        "sizes": args.sizes or ["small"],
    }
    if args.devices:
        for script in scripts:
            if full_name(script) not in SCRIPTS or not is_on_many_devices(script):
                fail(
                    f"--devices: {script} trains on one device; linen_sharded and torch_ddp do not"
                )
        row["devices"] = args.devices
    if args.sync:
        row["label"] = "sync"
        row["flags"] = {"sync-for-timing": True}
    grid.rows.append(complete("--", row, DEFAULTS, {}, args))
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
    table = read_toml(name)
    check_keys(name, table, OPTIONS | COMMON)
    check_values(name, table, OPTIONS | COMMON)
    common = DEFAULTS | table
    grid = Grid(args.repeats or common["repeats"])
    for number, row in enumerate(table.get("runs", []), 1):
        where = f"{name}, [[runs]] {number}"
        check_keys(where, row, OPTIONS)
        check_values(where, row, OPTIONS)
        grid.rows.append(complete(f"{where}: ", row, common, table.get("presets", {}), args))
    for program, text in table.get("programs", {}).items():
        grid.programs[program] = text.split()
    if "begin" in table:
        grid.begin.append(table["begin"])
    if "end" in table:
        grid.end.append(table["end"])
    for other in table.get("include", []):
        included = read_grid(other, args, (*including, study))
        grid.rows += included.rows
        grid.programs = included.programs | grid.programs
        grid.begin += included.begin
        grid.end += included.end
    if not grid.rows:
        fail(f"{name} has no [[runs]]")
    return grid


def complete(
    where: str,
    row: dict[str, Any],
    common: dict[str, Any],
    presets: dict[str, dict[str, Any]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """A row of [[runs]] with all options: its own, those of its file, and those of the flags.

    where begins the sentence about what is wrong in it.
    """
    found = common | row | {"where": where}
    for key in ("scripts", "envs", "sizes"):
        if key not in found:
            fail(f"{where}{key} is missing")
    preset = found.get("preset")
    if preset and preset not in presets:
        fail(f"{where}there is no preset '{preset}'")
    found["flags"] = common.get("flags", {}) | presets.get(preset, {}) | row.get("flags", {})
    repeats = args.repeats or common["repeats"]
    found["repeats"] = min(repeats, row.get("repeats", repeats))
    found["has_own_iterations"] = "iterations" in row
    if args.iterations and not found["has_own_iterations"]:
        found["iterations"] = args.iterations
        if "seconds" in found:
            found["seconds"] *= args.iterations / common["iterations"]
    return found


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
    for file in (f"{name}.py", f"more/{name}.py"):
        if os.path.isfile(ROOT / file):
            return file
    fail(f"scripts.toml has {name}, but neither {name}.py nor more/{name}.py is there")


def is_continuous(short: str) -> bool:
    """Whether a script of this project is for continuous actions."""
    row = SCRIPTS[full_name(short)]
    return row["algorithm"] == "sac" or row["family"].startswith("continuous")


def is_on_many_devices(short: str) -> bool:
    """Whether a script of this project trains one agent on many devices."""
    return SCRIPTS[full_name(short)]["family"] == "many devices"


def steps_of(short: str) -> int:
    """Those of an iteration; one's own script is taken for the first whose algorithm it names."""
    if full_name(short) in SCRIPTS:
        return SCRIPTS[full_name(short)]["steps"]
    rows = list(SCRIPTS.values())
    return next((x for x in rows if short.startswith(f"{x['algorithm']}_")), rows[0])["steps"]


def expand(grid: Grid, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs, in their order."""
    runs: dict[str, dict[str, Any]] = {}
    for repeat in range(1, grid.repeats + 1):
        for row in grid.rows:
            if repeat > row["repeats"]:
                continue
            envs = ENVIRONMENTS if row["envs"] == ["all"] else row["envs"]
            for cell in product(envs, row["sizes"], row["scripts"], row["seeds"]):
                run = describe(grid, args, row, cell, repeat)
                runs.setdefault(run["name"], run)
    blocks = list(dict.fromkeys(run["block"] for run in runs.values()))

    def order(run: dict[str, Any]) -> tuple[int, int, str]:
        salted = f"{args.seed} {run['name']}".encode()
        return run["repeat"], blocks.index(run["block"]), hashlib.md5(salted).hexdigest()

    return sorted(runs.values(), key=order)


def describe(grid, args, row, cell, repeat) -> dict[str, Any]:
    """One run: its name, block and seconds, what --only looks at, and its command."""
    env, size, script, first = cell
    where = row["where"]
    is_configuration = env.startswith("@") and args.study != "custom"  # no flag has one
    known = (*ENVIRONMENTS, *CONTINUOUS)
    if not is_configuration and env not in known and not re.fullmatch(OWN_ENVIRONMENT, env):
        fail(f"{where}envs must be of: {' '.join(known)}; or my_module:MyEnv; not '{env}'")
    if size not in SIZES:
        fail(f"{where}sizes must be of: {' '.join(SIZES)}; not '{size}'")
    if script not in grid.programs and full_name(script) not in SCRIPTS:
        fail(f"{where}there is no script '{script}'")
    iterations = row["iterations"]
    seed = first + row["seed_stride"] * (repeat - 1)
    label = row.get("label", "")
    # A dot for the colon of one's own: no other environment's name has one.
    parts = [label, env.replace(":", ".")]
    if is_configuration:  # a label says more
        parts = [label or env[1:]]
    devices = row.get("devices", 0)
    parts += [size, script, f"{devices}devices" if devices else ""]
    name = "__".join(filter(None, [*parts, f"{iterations}it", f"seed{seed}"]))

    words = list(grid.programs.get(script) or [file_of(script)])
    settings = []  # of the command `env`
    # A script looks for one's own environment in the folder that it runs in.
    if ":" in env and Path.cwd() != ROOT:
        settings.append(f"--chdir={Path.cwd()}")
        words[0] = str(ROOT / words[0])
    compiles = not script.endswith("-none") or script in grid.programs
    if not compiles:
        settings.append("JAX_DISABLE_JIT=1")
    if devices and SCRIPTS[full_name(script)]["framework"] == "torch":
        # A port that is free, so that several can run beside each other.
        words = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={devices}",
            *words,
        ]
    elif devices:  # of a CPU; of GPUs JAX takes those that it sees
        settings.append(f"JAX_NUM_CPU_DEVICES={devices}")
    if "wrapper" in row:
        words = ["-m", row["wrapper"], *words]
    words += [env[1:]] if is_configuration else ["--env-id", env]
    if SIZES[size]:
        words += ["--hidden-sizes", *map(str, SIZES[size])]
    steps = row.get("steps") or steps_of(script)
    words += words_of(row["flags"])
    words += ["--seed", str(seed), "--total-timesteps", str(iterations * steps)]
    seconds = iterations * UNCOMPILED.get(size, UNCOMPILED["own"])
    if compiles:
        seconds = STARTUP + iterations * COMPILED.get(size, COMPILED["own"])
    key = " ".join(word.rpartition("/")[2] for word in [*words, "--run-name", name])
    if args.track and row["track"]:
        words.append("--track")
    folder = args.runs_dir
    if name.startswith("warmup__"):
        folder /= ".benchmark/warmup"  # out of the report's way
    runner = ["env", *settings, args.python] if settings else [args.python]
    words += ["--runs-dir", as_path(folder), "--run-name", name]
    return {
        "name": name,
        "repeat": repeat,
        "block": (label, env, size, iterations) if row["shuffle"] == "blocks" else (),
        "key": key,
        "seconds": int(row.get("seconds", seconds)),
        "command": " ".join(map(quoted, runner + words)),
    }


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


def quoted(word: str) -> str:
    """As bash reads it, on one line."""
    if re.fullmatch(r"[A-Za-z0-9_./,:=+-]+", word):
        return word
    for raw, escaped in {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t"}.items():
        word = word.replace(raw, escaped)
    return f"$'{word}'"


def main() -> None:
    args = parse_args()
    grid = make_grid(args) if args.study == "custom" else read_grid(args.study, args)
    if args.iterations and all(row["has_own_iterations"] for row in grid.rows):
        fail(f"--iterations: all runs of studies/{args.study}/grid.toml have their own")
    runs = [run for run in expand(grid, args) if re.search(args.only, run["key"])]
    if not runs:
        fail(f"nothing to run: no command matches --only '{args.only.pattern}'")
    chosen = list(enumerate(runs, 1))[args.first - 1 : args.to]
    if not chosen:
        fail(f"nothing to run: the list has {len(runs)} lines, and none from --from to --to")
    print("study", args.study, grid.repeats, args.seed, sep="\t")
    for command in grid.begin:
        print("begin", command, sep="\t")
    for command in grid.end:
        print("end", command, sep="\t")
    for number, run in chosen:
        print("run", number, run["repeat"], run["seconds"], run["name"], run["command"], sep="\t")


if __name__ == "__main__":
    main()

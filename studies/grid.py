"""Print the runs of a study, or of a grid that flags describe, for benchmark.sh.

    python studies/grid.py quick --repeats 2

The first line has the study, its repeats and the seed of its order; then there is a line for each
command at its begin and its end, and one for each run: its place in the list, repeat, seconds that
it takes on two cores, name, and command. docs/benchmark.md has the format of studies/NAME/grid.
It imports the standard library alone: benchmark.sh --list comes before any setup.
"""

import argparse
import hashlib
import os
import re
import sys
import tomllib
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = (
    *("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "DiscountingChain-bsuite"),
    *("MemoryChain-bsuite", "UmbrellaChain-bsuite", "BernoulliBandit-misc", "GaussianBandit-misc"),
    *("Asterix-MinAtar", "Breakout-MinAtar", "Freeway-MinAtar", "SpaceInvaders-MinAtar"),
)
OWN_ENVIRONMENT = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z0-9_-]+"
SCRIPTS = tomllib.loads((ROOT / "scripts.toml").read_text())
FIVE = ["torch", "torch_compile", "linen", "nnx", "nnx_cached"]  # as in quick
SIZES = {"small": [64] * 2, "medium": [256] * 3, "large": [1024] * 6, "own": []}
# About how many seconds an iteration takes on two cores, compiled and not: for the time left.
COMPILED = {"small": 0.05, "medium": 0.6, "large": 38.4, "own": 0.25}
UNCOMPILED = {"small": 15.7, "medium": 26.3, "large": 66, "own": 15.7}
STARTUP = 8  # seconds
# What a grid may set for all its lines, and a line for its runs.
OPTIONS = {
    "repeats": "1",
    "iterations": "100",
    "steps": "",  # of an iteration
    "seconds": "",
    "through": "",  # a module that runs the script
    "name": "",
    "track": "yes",
    "seeds": "1",
    "stride": "1",  # from a repeat's seed to the next one's
    "block": "environment",  # or repeat: what is shuffled as one
}


def fail(reason: str) -> NoReturn:
    text = reason.replace("\n", "\\n")
    print(f"benchmark.sh: {text}", file=sys.stderr)
    sys.exit(2)


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


def parse_args() -> argparse.Namespace:
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("study", nargs="?")
    for name in ("scripts", "envs", "sizes"):
        parser.add_argument(f"--{name}", type=items)
    parser.add_argument("--sync", action="store_true")
    for name in ("iterations", "repeats", "to"):
        parser.add_argument(f"--{name}", type=positive)
    parser.add_argument("--seed", type=positive, default=1)
    parser.add_argument("--from", type=positive, default=1, dest="first")
    parser.add_argument("--only", default="")
    parser.add_argument("--track", action="store_true")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--python", default="python")
    args = parser.parse_args()
    own = [f"--{x}" for x in ("scripts", "envs", "sizes", "sync") if getattr(args, x)]
    if own and args.study:
        fail(f"{own[0]} makes a grid of your own, so leave out '{args.study}', or use --only")
    args.study = "custom" if own else args.study or "quick"
    return args


# === The grid ===================================================================================
class Grid:
    def __init__(self, args: argparse.Namespace) -> None:
        self.options = dict(OPTIONS)
        self.scripts: dict[str, list[str]] = {}  # the words that a name stands for
        self.flags: dict[str, list[str]] = {}
        self.lines: list[list[str]] = []
        self.commands: list[tuple[str, str]] = []  # begin or end, and a command
        if args.study == "custom":
            self.make(args)
        else:
            self.read(args.study)
        self.scale = 1.0  # of the seconds that it says
        if args.iterations:
            if all("iterations=" in " ".join(words) for words in self.lines):
                fail(f"--iterations: each line of studies/{args.study}/grid has its own")
            self.scale = args.iterations / int(self.options["iterations"])
            self.options["iterations"] = str(args.iterations)
        if args.repeats:
            self.options["repeats"] = str(args.repeats)

    def make(self, args: argparse.Namespace) -> None:
        """A grid of one line, by the flags."""
        names = [self.name_of(x) for x in args.scripts or FIVE]
        cells = [args.envs or ["CartPole-v1"], args.sizes or ["small"], names]
        sync = ["name=sync", "--sync-for-timing"] if args.sync else []
        self.lines.append([",".join(x) for x in cells] + sync)

    def read(self, study: str) -> None:
        path = ROOT / "studies" / study / "grid"
        if not os.path.isfile(path):
            fail(f"there is no study '{study}'; see ./benchmark.sh --help")
        for line in path.read_text().splitlines():
            word, _, rest = line.strip().partition(" ")
            words = rest.split()
            if not word or word.startswith("#"):
                continue
            if word in OPTIONS and len(words) == 1:
                self.options[word] = words[0]
            elif word == "script" and words:
                self.scripts[words[0]] = words[1:]
            elif word == "flags" and words:
                self.flags.setdefault(words[0], []).extend(words[1:])
            elif word in ("begin", "end") and words:
                self.commands.append((word, rest))
            elif word == "include":
                self.read(rest)
            elif word == "run" and len(words) >= 3:
                self.lines.append(words)
            else:
                fail(f"studies/{study}/grid: docs/benchmark.md has no such line: {line.strip()}")

    def name_of(self, text: str) -> str:
        """The name of a script that is given by name, by file name or by path."""
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
            fail(
                f"--scripts: runs are named after '{name}', so it must be of letters, digits and _"
            )
        if self.scripts.setdefault(name, [str(path)]) != [str(path)]:
            fail(f"--scripts: '{path}' and '{self.scripts[name][0]}' have one name")
        return name


def full_name(short: str) -> str:
    """A script's name as scripts.toml has it.

    In names of runs PPO's have no ppo_, and linen-none is ppo_linen that compiles nothing.
    """
    return short if short in SCRIPTS else f"ppo_{short.removesuffix('-none')}"


def file_of(short: str) -> str:
    """The file of a script of this project, from its root on."""
    file = f"{full_name(short)}.py"
    return file if os.path.isfile(ROOT / file) else f"more/{file}"


def steps_of(short: str) -> int:
    """Those of an iteration; one's own script is taken for the first whose algorithm it names."""
    if full_name(short) in SCRIPTS:
        return SCRIPTS[full_name(short)]["steps"]
    rows = list(SCRIPTS.values())
    return next((x for x in rows if short.startswith(f"{x['algorithm']}_")), rows[0])["steps"]


def expand(grid: Grid, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs, in their order."""
    runs: dict[str, dict[str, Any]] = {}
    for repeat in range(1, int(grid.options["repeats"]) + 1):
        for envs, sizes, scripts, *words in grid.lines:
            options = dict(grid.options)
            flags = []
            for word in words:
                key, _, value = word.partition("=")
                if key == "flags":
                    flags += grid.flags[value]
                elif key in OPTIONS and value:
                    options[key] = value
                else:
                    flags.append(word)
            if repeat > int(options["repeats"]):
                continue
            each = ENVIRONMENTS if envs == "all" else envs.split(",")
            seeds = options["seeds"].split(",")
            for cell in product(each, sizes.split(","), scripts.split(","), seeds):
                run = describe(grid, args, options, flags, cell, repeat)
                runs.setdefault(run["name"], run)
    blocks = list(dict.fromkeys(run["block"] for run in runs.values()))

    def order(run: dict[str, Any]) -> tuple[int, int, str]:
        salted = f"{args.seed} {run['name']}".encode()
        return run["repeat"], blocks.index(run["block"]), hashlib.md5(salted).hexdigest()

    return sorted(runs.values(), key=order)


def describe(grid, args, options, flags, cell, repeat) -> dict[str, Any]:
    """One run: its name, block and seconds, what --only looks at, and its command."""
    env, size, script, first = cell
    is_configuration = env.startswith("@") and args.study != "custom"  # no flag has one
    if not is_configuration and env not in ENVIRONMENTS and not re.fullmatch(OWN_ENVIRONMENT, env):
        fail(f"--envs must be of: {' '.join(ENVIRONMENTS)}; or my_module:MyEnv; not '{env}'")
    if size not in SIZES:
        fail(f"--sizes must be of: {' '.join(SIZES)}; not '{size}'")
    if script not in grid.scripts and full_name(script) not in SCRIPTS:
        fail(f"there is no script '{script}'")
    iterations = int(options["iterations"])
    seed = int(first) + int(options["stride"]) * (repeat - 1)
    # A dot for the colon of one's own: no other environment's name has one.
    parts = [options["name"], env.replace(":", ".")]
    if is_configuration:  # a line's name says more
        parts = [options["name"] or env[1:]]
    name = "__".join(filter(None, [*parts, size, script, f"{iterations}it", f"seed{seed}"]))

    words = list(grid.scripts.get(script, [file_of(script)]))
    runner = [args.python]
    # A script looks for one's own environment in the folder that it runs in.
    if ":" in env and Path.cwd() != ROOT:
        runner = ["env", f"--chdir={Path.cwd()}", args.python]
        words[0] = str(ROOT / words[0])
    if options["through"]:
        words = ["-m", options["through"], *words]
    words += [env[1:]] if is_configuration else ["--env-id", env]
    if SIZES[size]:
        words += ["--hidden-sizes", *map(str, SIZES[size])]
    steps = int(options["steps"] or steps_of(script))
    words += [*flags, "--seed", str(seed), "--total-timesteps", str(iterations * steps)]
    seconds = STARTUP + iterations * COMPILED[size]
    if script.endswith("-none"):
        is_torch = SCRIPTS[full_name(script)]["framework"] == "torch"
        words.append("--no-jit-env" if is_torch else "--no-jit")
        seconds = iterations * UNCOMPILED[size]
    if options["seconds"]:
        seconds = int(options["seconds"])
        if options["iterations"] == grid.options["iterations"]:
            seconds *= grid.scale
    key = " ".join(word.rpartition("/")[2] for word in [*words, "--run-name", name])
    if args.track and options["track"] == "yes":
        words.append("--track")
    folder = args.runs_dir
    if name.startswith("warmup__"):
        folder /= ".benchmark/warmup"  # out of the report's way
    words += ["--runs-dir", str(folder), "--run-name", name]
    return {
        "name": name,
        "repeat": repeat,
        "block": (options["name"], env, size, iterations) if options["block"] != "repeat" else (),
        "key": key,
        "seconds": int(seconds),
        "command": " ".join(map(quoted, runner + words)),
    }


def quoted(word: str) -> str:
    """As bash reads it, on one line."""
    if re.fullmatch(r"[A-Za-z0-9_./,:=+-]+", word):
        return word
    for raw, escaped in {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t"}.items():
        word = word.replace(raw, escaped)
    return f"$'{word}'"


def main() -> None:
    args = parse_args()
    try:
        grid = Grid(args)
        runs = [run for run in expand(grid, args) if re.search(args.only, run["key"])]
    except (re.error, OverflowError):
        fail(f"--only must be a regular expression, not '{args.only}'")
    except (ValueError, LookupError, ArithmeticError, RecursionError) as error:
        fail(f"studies/{args.study}/grid has a number or a name that is none: {error}")
    if not runs:
        fail(f"nothing to run: no command matches --only '{args.only}'")
    chosen = list(enumerate(runs, 1))[args.first - 1 : args.to]
    if not chosen:
        fail(f"nothing to run: the list has {len(runs)} lines, and none from --from to --to")
    print("study", args.study, grid.options["repeats"], args.seed, sep="\t")
    for word, command in sorted(grid.commands, key=lambda x: x[0]):  # begin, then end
        print(word, command, sep="\t")
    for number, run in chosen:
        print("run", number, run["repeat"], run["seconds"], run["name"], run["command"], sep="\t")


if __name__ == "__main__":
    main()

"""Print the runs of a study, or of a grid that flags describe, for benchmark.sh.

    python studies/grid.py quick --repeats 2

The first line has the study, its repeats and the seed of its order; then there is a line for each
command at its begin and its end, and one for each run: its place in the list, repeat, seconds that
it takes on two cores, name, and command. docs/benchmark.md has the format of studies/NAME/grid.
It imports the standard library alone: benchmark.sh --list comes before any setup.
"""

import argparse
import hashlib
import re
import sys
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
SIZES = {"small": [64] * 2, "medium": [256] * 3, "large": [1024] * 6, "own": []}
# Seconds of an iteration on two cores, compiled and not; docs/benchmark.md has their source.
COMPILED = {"small": 0.05, "medium": 0.6, "large": 38.4, "own": 0.25}
UNCOMPILED = {"small": 15.7, "medium": 26.3, "large": 66, "own": 15.7}
STARTUP = 8  # seconds
# What a grid may set for all its lines, and a line for its runs.
DEFAULTS = {"repeats": "1", "iterations": "100", "steps": "", "seconds": "", "through": ""}
DEFAULTS |= {"name": "", "track": "yes", "seeds": "1", "stride": "1", "block": "environment"}


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
    found = text.replace(",", " ").split()
    if not found:
        raise argparse.ArgumentTypeError("must name at least one")
    return found


def scripts(text: str) -> list[str]:
    return [text] if Path(text).is_file() else items(text)  # a path may have spaces


def parse_args() -> argparse.Namespace:
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("study", nargs="*")
    parser.add_argument("--scripts", type=scripts)
    parser.add_argument("--envs", type=items)
    parser.add_argument("--sizes", type=items)
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
        fail(f"{own[0]} makes a grid of your own, so leave out '{args.study[0]}', or use --only")
    if len(args.study) > 1:
        fail(f"there is one study, not both '{args.study[0]}' and '{args.study[1]}'")
    if (args.repeats or 0) > 1000:
        fail(f"--repeats must be at most 1000, not {args.repeats}")
    if args.to and args.first > args.to:
        fail(f"--from is {args.first}, which is after --to {args.to}")
    try:
        re.compile(args.only)
    except re.error:
        fail(f"--only must be a regular expression, not '{args.only}'")
    args.own = bool(own)
    return args


# === The grid ===================================================================================
class Grid:
    def __init__(self) -> None:
        self.defaults = dict(DEFAULTS)
        self.scale = 1.0  # of the seconds that it says, by --iterations
        self.named: dict[str, list[str]] = {}  # what a name stands for
        self.lines: list[list[str]] = []
        self.begin: list[str] = []
        self.end: list[str] = []

    def read(self, study: str) -> None:
        path = ROOT / "studies" / study / "grid"
        if not re.fullmatch(r"[\w-]+", study) or not path.is_file():
            fail(f"there is no study '{study}'; see ./benchmark.sh --help")
        for line in path.read_text().splitlines():
            word, _, rest = line.strip().partition(" ")
            words = rest.split()
            if word in DEFAULTS and len(words) == 1:
                self.defaults[word] = words[0]
            elif word in ("script", "flags") and words:
                self.named.setdefault(words[0], []).extend(words[1:])
            elif word == "begin":
                self.begin.append(rest)
            elif word == "end":
                self.end.append(rest)
            elif word == "include":
                self.read(rest)
            elif word == "run" and len(words) >= 3:
                self.lines.append(words)
            elif word and word[0] != "#":
                fail(f"studies/{study}/grid: docs/benchmark.md has no such line: {line.strip()}")


def make_grid(args: argparse.Namespace) -> Grid:
    grid = Grid()
    if args.own:
        envs, sizes = args.envs or ["CartPole-v1"], args.sizes or ["small"]
        names = args.scripts or ["torch", "torch_compile", "linen", "nnx", "nnx_cached"]
        names = [own_script(grid, x) for x in names]
        sync = ["name=sync", "--sync-for-timing"] if args.sync else []
        grid.lines.append([",".join(envs), ",".join(sizes), ",".join(names), *sync])
        args.study = "custom"
    else:
        args.study = args.study[0] if args.study else "quick"
        grid.read(args.study)
    if args.iterations:
        if all("iterations=" in " ".join(words) for words in grid.lines):
            fail(f"--iterations: each line of studies/{args.study}/grid has its own")
        grid.scale = args.iterations / int(grid.defaults["iterations"])
        grid.defaults["iterations"] = str(args.iterations)
    grid.defaults["repeats"] = str(args.repeats or grid.defaults["repeats"])
    return grid


def file_of(script: str) -> str:
    """The file of a script of this project, which may not be there."""
    return f"{script}.py" if script.startswith("dqn_") else f"ppo_{script.removesuffix('-none')}.py"


def own_script(grid: Grid, text: str) -> str:
    """The name of a script that is given by name, by file name or by path."""
    path, name = Path(text).absolute(), Path(text).name.removesuffix(".py")
    short = name.removeprefix("ppo_")
    known = ROOT / file_of(short)
    if known.is_file():
        if "/" in text and not (path.is_file() and path.samefile(known)):
            fail(f"--scripts: '{text}' has the name of a script of this project")
        return short
    if path.suffix != ".py" or not path.is_file():
        fail(f"--scripts: '{text}' is neither a script of this project nor the path of one")
    if not re.fullmatch(r"\w+", name, re.ASCII):
        fail(f"--scripts: runs are named after '{name}', so it must be of letters, digits and _")
    if grid.named.setdefault(name, [str(path)]) != [str(path)]:
        fail(f"--scripts: '{path}' and '{grid.named[name][0]}' have one name")
    return name


def expand(grid: Grid, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs, in their order."""
    runs = {}
    for repeat in range(1, int(grid.defaults["repeats"]) + 1):
        for envs, sizes, names, *words in grid.lines:
            own, flags = dict(grid.defaults), []
            for word in words:
                key, _, value = word.partition("=")
                if key == "flags":
                    flags += grid.named[value]
                elif key in DEFAULTS and value:
                    own[key] = value
                else:
                    flags.append(word)
            if repeat > int(own["repeats"]):
                continue
            each = ENVIRONMENTS if envs == "all" else envs.split(",")
            cells = product(each, sizes.split(","), names.split(","), own["seeds"].split(","))
            for env, size, script, first in cells:
                seed = int(first) + int(own["stride"]) * (repeat - 1)
                run = describe(grid, args, own, flags, env, size, script, seed)
                runs.setdefault(run["name"], run | {"repeat": repeat})
    blocks = list(dict.fromkeys(run["block"] for run in runs.values()))
    place = {block: number for number, block in enumerate(blocks)}

    def order(run: dict[str, Any]) -> tuple[int, int, str]:
        salted = f"{args.seed} {run['name']}".encode()
        return run["repeat"], place[run["block"]], hashlib.md5(salted).hexdigest()

    return sorted(runs.values(), key=order)


def describe(grid, args, own, flags, env, size, script, seed) -> dict[str, Any]:
    """One run: its name, block and seconds, what --only looks at, and its command."""
    if env[0] != "@" and env not in ENVIRONMENTS and not re.fullmatch(OWN_ENVIRONMENT, env):
        fail(f"--envs must be of: {' '.join(ENVIRONMENTS)}; or my_module:MyEnv; not '{env}'")
    if size not in SIZES:
        fail(f"--sizes must be of: {' '.join(SIZES)}; not '{size}'")
    if script not in grid.named and not (ROOT / file_of(script)).is_file():
        fail(f"there is no script '{script}'")
    iterations = int(own["iterations"])
    # A dot for the colon of one's own: no other environment's name has one.
    parts = [own["name"], env.replace(":", "."), size, script, f"{iterations}it", f"seed{seed}"]
    if env[0] == "@":  # a line's name says more
        parts[:2] = [own["name"] or env[1:]]
    name = "__".join(filter(None, parts))

    words = list(grid.named.get(script, [file_of(script)]))
    runner = [args.python]
    # A script looks for one's own environment in the folder that it runs in.
    if ":" in env and Path.cwd() != ROOT:
        runner = ["env", f"--chdir={Path.cwd()}", args.python]
        words[0] = str(ROOT / words[0])
    if own["through"]:
        words = ["-m", own["through"], *words]
    words += [env[1:]] if env[0] == "@" else ["--env-id", env]
    if SIZES[size]:
        words += ["--hidden-sizes", *map(str, SIZES[size])]
    steps = int(own["steps"] or (5000 if script.startswith("dqn_") else 8192))
    words += [*flags, "--seed", str(seed), "--total-timesteps", str(iterations * steps)]
    seconds = STARTUP + iterations * COMPILED[size]
    if script.endswith("-none"):
        words.append("--no-jit-env" if script == "torch-none" else "--no-jit")
        seconds = iterations * UNCOMPILED[size]
    if own["seconds"]:
        seconds = int(own["seconds"])
        if own["iterations"] == grid.defaults["iterations"]:
            seconds *= grid.scale
    key = " ".join(word.rpartition("/")[2] for word in [*words, "--run-name", name])
    if args.track and own["track"] == "yes":
        words.append("--track")
    folder = args.runs_dir
    if name.startswith("warmup__"):
        folder /= ".benchmark/warmup"  # out of the report's way
    words += ["--runs-dir", str(folder), "--run-name", name]
    block = (own["name"], env, size, iterations) if own["block"] == "environment" else ()
    run = {"name": name, "block": block, "key": key, "seconds": int(seconds)}
    return run | {"command": " ".join(map(quoted, runner + words))}


def quoted(word: str) -> str:
    """As bash reads it, on one line."""
    if re.fullmatch(r"[A-Za-z0-9_./,:=+-]+", word):
        return word
    for raw, escaped in {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t"}.items():
        word = word.replace(raw, escaped)
    return f"$'{word}'"


def main() -> None:
    args = parse_args()
    grid = make_grid(args)
    try:
        runs = expand(grid, args)
    except (ValueError, KeyError) as error:
        fail(f"studies/{args.study}/grid has a number or a name that is none: {error}")
    runs = [run for run in runs if re.search(args.only, run["key"])]
    if not runs:
        fail(f"nothing to run: no command matches --only '{args.only}'")
    if args.first > len(runs):
        fail(f"nothing to run: --from is {args.first}, but the list ends at line {len(runs)}")
    print("study", args.study, grid.defaults["repeats"], args.seed, sep="\t")
    for line in grid.begin:
        print("begin", line, sep="\t")
    for line in grid.end:
        print("end", line, sep="\t")
    for number, run in enumerate(runs[: args.to], 1):
        if number >= args.first:
            values = [run[x] for x in ("repeat", "seconds", "name", "command")]
            print("run", number, *values, sep="\t")


if __name__ == "__main__":
    main()

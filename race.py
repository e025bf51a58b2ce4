"""Race programs: which one is the fastest on this machine, and by how much?

    python race.py ppo_linen.py ppo_torch.py
    python race.py more/ppo_linen_gymnasium.py more/ppo_torch_gymnasium.py
    python race.py ppo_linen.py ../before/ppo_linen.py  # the effect of a change
    python race.py ppo_linen.py "python ../cleanrl/ppo.py @SPS:" --steps 512 --name JAX CleanRL
    python race.py --study studies/control  # the missing races of a study

All programs start and compile, and are then paused. After that, they run interleaved: in each
round, every program runs for one second while the others are paused. Other load on the machine
slows programs with the same number of threads by about the same factor, so the ratio of their times
varies much less than the times themselves. The race ends when every 95% interval is within
--within of its ratio, or after --turns rounds.

A program is a script of this project, a copy of one, or a command in quotes. Flags after -- are
passed to all scripts; to pass a flag to only one of them, quote the script and the flag together.
For any other program, append @TEXT, where TEXT appears in its progress lines and nowhere else. A
race measures only the time per iteration; benchmark.sh also measures startup and returns.
"""

import fcntl
import json
import os
import shlex
import signal
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import IO, Annotated, Any, NoReturn

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback if Ctrl-C interrupts the imports

import numpy as np
import tyro
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from analysis import races
from analysis.races import Race, is_known
from bench import machine
from bench.interleave import Interleaved, Program, Runner, Settings

DISCARDED = 2  # rounds discarded at the start, while caches and the clock frequency settle
MOST_LETTERS = 16  # maximum length of a program name in the header of the table
MIN_TURNS = 10  # minimum number of rounds after the discarded ones
PACKAGES = ("jax", "jaxlib", "flax", "equinox", "optax", "torch", "numpy", "gymnax", "gymnasium")


@dataclass
class Args(Settings):
    programs: tyro.conf.Positional[tuple[str, ...]] = ()  # scripts, or commands in quotes
    study: Path | None = None  # study folder; run the missing races of its races.toml
    within: float = 0.03  # end when all 95% intervals are within this fraction of their ratios
    steps: tuple[int, ...] = ()  # environment steps per progress line of each program with @TEXT
    names: Annotated[tuple[str, ...], tyro.conf.arg(name="name")] = ()  # program names in the table
    out: Path | None = None  # output file; default a new file in races/

    def __post_init__(self) -> None:
        if self.study and self.programs:
            raise ValueError("name programs or a --study, not both")
        if not self.study and len(self.programs) < 2:
            raise ValueError("name two programs or more")
        if self.names and len(set(self.names)) != len(self.programs):
            raise ValueError("--name must give each program a different name")
        if not (self.within >= 0 and self.seconds > 0 and self.patience > 0):
            raise ValueError("--within must be 0 or more, --seconds and --patience positive")
        if self.turns < DISCARDED + MIN_TURNS:
            raise ValueError(f"--turns must be {DISCARDED + MIN_TURNS} or more")
        if self.warm_up < 1 or any(x < 1 for x in self.steps):
            raise ValueError("--warm-up and --steps must be 1 or more")


def fail(reason: str) -> NoReturn:
    print(f"race.py: {reason}", file=sys.stderr)
    sys.exit(2)


# === Programs ===================================================================================
def read_programs(args: Args, flags: Sequence[str], folder: Path) -> list[Program]:
    steps = list(args.steps)
    others = [x for x in args.programs if x.rpartition(" ")[2].startswith("@")]
    if len(steps) == 1:
        steps *= len(others)
    if steps and len(steps) != len(others):
        fail(f"--steps: {len(steps)} numbers for {len(others)} programs with @TEXT")
    programs = []
    for number, text in enumerate(args.programs):
        program = read_program(text, number, flags, folder)
        if text in others and steps:
            program = program._replace(steps=steps.pop(0))
        programs.append(program)
    return programs


def read_program(text: str, number: int, flags: Sequence[str], folder: Path) -> Program:
    """Return the program that a command-line argument describes."""
    try:
        words = [text] if Path(text).is_file() else shlex.split(text)
    except ValueError as error:
        fail(f"{text}: {error}")
    progress = words.pop()[1:] if words and words[-1].startswith("@") else ""
    if not words:
        fail(f"{text!r} does not contain a command")
    script = next((Path(word) for word in words if word.endswith(".py")), None)
    command = [sys.executable, *words] if words[0].endswith(".py") else words
    if progress:
        name = text.rpartition("@")[0].strip()
        return Program(name, command, progress.encode(), f"{number}.txt", script, None)
    advice = "append @TEXT, where TEXT appears in its progress lines."
    if script is None or not script.is_file():
        fail(f"{text}: no such script. For any other program, {advice}")
    if "RunLog" not in script.read_text(errors="replace"):
        fail(f"{script} does not write a run folder: {advice}")
    command += [*flags, "--runs-dir", str(folder), "--run-name", str(number)]
    if not has_flag(command, "--total-timesteps"):
        command += ["--total-timesteps", str(10**9)]  # the program must not end before the race
    if not has_flag(command, "--save-every"):
        command += ["--save-every", str(10**9)]  # do not time checkpoints
    return Program(text, command, b"{", f"{number}/metrics.jsonl", script, None)


def has_flag(words: Sequence[str], flag: str) -> bool:
    return any(word.replace("_", "-").startswith(flag) for word in words)


def names_of(programs: list[Program]) -> list[str]:
    """Return short names for the programs, built from the parts that differ."""
    stems = [program.script.stem if program.script else program.name for program in programs]
    written = [program.name for program in programs]
    for names in (stems, differences(written), written):
        if len(set(names)) == len(names) and all(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(written, 1)]


def differences(texts: list[str]) -> list[str]:
    """Return the commands without the flags and values that they all share."""
    parts = [parts_of(text) for text in texts]
    common = set.intersection(*map(set, parts))
    names = []
    for program, *flags in parts:
        rest = [x for x in flags if x not in common]
        if program in common:
            names.append(" ".join([Path(program).name, *rest]))
        else:
            names.append(" ".join([program, *rest]))
    return names


def parts_of(text: str) -> list[str]:
    """Split a command into parts; each part is a flag with its values, or a single word."""
    first, *words = text.split()
    parts = [first]
    for word in words:
        if word.startswith("-") or not parts[-1].startswith("-"):
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    return parts


# === Studies ====================================================================================
class Listed(BaseModel, extra="forbid"):
    """A race in races.toml."""

    name: str
    programs: dict[str, str]  # name in tables and figures -> program
    flags: str = ""  # passed to all scripts
    steps: dict[str, int] = {}  # program name -> environment steps per progress line
    cores: str = ""  # this and the fields below are the race.py flags of the same name
    within: float = 0.03
    turns: int = 60
    seconds: float = 1.0
    warm_up: int = 3
    apart: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return the Args fields that the race sets, as a dict from name to value."""
        others = [x for x, y in self.programs.items() if y.rpartition(" ")[2].startswith("@")]
        steps = tuple(self.steps[x] for x in others) if self.steps else ()
        names = {field.name for field in fields(Args)}
        values = {name: x for name, x in self.model_dump().items() if name in names}
        values |= {"programs": tuple(self.programs.values()), "names": tuple(self.programs)}
        return values | {"steps": steps}


class Study(BaseModel, extra="forbid"):
    """Contents of a races.toml file."""

    races: list[Listed]


def missing_races(study: Path) -> list[Listed]:
    """Return the races in races.toml that are not in races.jsonl with the same settings."""
    try:
        listed = Study(**tomllib.loads((study / "races.toml").read_text(encoding="utf-8"))).races
        for x in listed:
            Args(**x.arguments())
        out = study / "races.jsonl"
        done = races.read(out) if out.exists() else []
        found = [Listed(**x.info["listed"]) for x in done if x.info.get("listed")]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        fail(f"{study / 'races.toml'}: {place}: {first['msg']}")
    except KeyError as error:
        fail(f"{study / 'races.toml'}: steps has no entry for {error}")
    except (OSError, ValueError) as error:
        fail(f"{study / 'races.toml'}: {error}")
    return [x for x in listed if x not in found]


def race_study(args: Args) -> list[str]:
    """Run the missing races of a study, and return the failures. A stopped race is not saved."""
    assert args.study is not None
    failures = []
    missing = missing_races(args.study)
    for number, listed in enumerate(missing, 1):
        print(f"Race {number} of {len(missing)}: {listed.name}", flush=True)
        out = Path("races", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{number}.jsonl")
        of_race = replace(args, study=None, out=out, **listed.arguments())
        failed = run_race(of_race, shlex.split(listed.flags), listed)
        if "stopped" in failed:
            return [*failures, *failed]
        if failed:
            failures += [f"{listed.name}: {reason}" for reason in failed]
            continue
        with open(args.study / "races.jsonl", "a") as file:
            file.write(out.read_text(encoding="utf-8"))
    return failures


# === Race =======================================================================================
def run_race(args: Args, flags: Sequence[str], listed: Listed | None = None) -> list[str]:
    """Run a race, write its turns to a file, and return the failures."""
    out = args.out or Path("races", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl")
    interleaved = Interleaved(args)
    try:
        programs = read_programs(args, flags, interleaved.folder)
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "a", buffering=1) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            race = Race(describe(programs, args, flags, listed), [])
            failures = follow(interleaved, programs, race, args, file)
    except BlockingIOError:
        fail(f"another race is writing to {out}")
    except OSError as error:
        fail(f"cannot run {error.filename}: {error.strerror}" if error.filename else str(error))
    finally:
        interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
        interleaved.close()
        signal.signal(signal.SIGINT, interrupted)
    if race.turns:
        print(f"Results: {out}. Plot them with: python -m analysis race {out}", flush=True)
    return failures


def follow(
    interleaved: Interleaved, programs: list[Program], race: Race, args: Args, file: IO[str]
) -> list[str]:
    """Run rounds until each ratio is known, updating the table; return the failures."""
    failures = []
    console = Console(highlight=False, soft_wrap=True)
    with Live("Starting and compiling all programs.", console=console, auto_refresh=False) as live:
        live.refresh()
        try:
            interleaved.start(programs)
            race.info["steps"] = [runner.steps for runner in interleaved.runners]
            race.info["num_threads"] = [torch_threads(runner) for runner in interleaved.runners]
            file.write(json.dumps(race.info) + "\n")
            start = time.perf_counter()
            for number, turns in enumerate(interleaved.rounds(), 1):
                for turn in turns:
                    race.turns.append(turn)
                    file.write(json.dumps(turn._asdict()) + "\n")
                seconds = (time.perf_counter() - start) / number
                live.update(table_of(race, args, number, seconds), refresh=True)
                known = all(is_known(x, args.within) for x in race.ratios().values())
                if number >= DISCARDED + MIN_TURNS and known:
                    break
        except KeyboardInterrupt:
            failures.append("stopped")
    if not console.is_terminal:
        print()  # rich does not end the last line
    if race.turns:
        print("\n".join(race.sentences(args.within)))
        print(threads_of(race, args.cores))
    return [reason_of(x) for x in interleaved.runners if x.failure] + failures


def torch_threads(runner: Runner) -> int | None:
    """Return the number of PyTorch threads of a script; None for JAX and other programs."""
    info = runner.folder / str(runner.number) / "run.json"
    return json.loads(info.read_text()).get("num_threads") if info.exists() else None


def threads_of(race: Race, cores: str) -> str:
    """Return a sentence about the CPUs of the race and the number of PyTorch threads."""
    sentences = [f"CPUs: {cores or 'all'}."]
    known = zip(race.names(), race.info["num_threads"], strict=True)
    threads = [f"{name} {count}" for name, count in known if count]
    if threads:
        sentences.append(f"PyTorch threads: {', '.join(threads)}.")
    return " ".join(sentences)


def table_of(race: Race, args: Args, number: int, seconds: float) -> Table:
    """Return the results after `number` rounds, which took `seconds` each on average."""
    left = max(0, int(seconds * (turns_of(race, args) - number)))
    most = int(seconds * (args.turns - number))
    caption = f"{number} rounds; about {left} s left, at most {most} s"
    times = race.compared_times()
    first = race.first()
    table = Table(caption=caption)
    unit, factor = ("µs/step", 1e6) if race.is_per_step() else ("ms/iteration", 1e3)
    table.add_column("program")  # the only column that is narrowed, if the terminal is narrow
    baseline = first if len(first) <= MOST_LETTERS else "first"
    for title in (unit, Text(f"time / {baseline}"), "95% interval"):
        table.add_column(title, no_wrap=True)
    ratios = race.ratios()
    for name in times:
        shown = Text(name, no_wrap=True, overflow="ellipsis")
        median = f"{factor * times[name].median():.4g}"
        if name in ratios:
            estimate, low, high = ratios[name]
            table.add_row(shown, median, f"{estimate:.3f}", f"{low:.3f} to {high:.3f}")
        else:
            table.add_row(shown, median, "1", "")
    return table


def turns_of(race: Race, args: Args) -> float:
    """Return an estimate of the total number of rounds."""
    needed = race.turns_needed(args.within)
    return args.turns if np.isnan(needed) else np.clip(needed, DISCARDED + MIN_TURNS, args.turns)


def reason_of(runner: Runner) -> str:
    """Return why a program failed, and the end of its output."""
    reason = f"{runner.program.name} was dropped from the race: it {runner.failure}. Last lines:"
    return "\n  ".join([reason, *runner.tail()])


def describe(
    programs: list[Program], args: Args, flags: Sequence[str], listed: Listed | None
) -> dict[str, Any]:
    """Return the first line of the output file, as a dict: everything that affects the race."""
    installed = {dist.metadata["Name"].lower(): dist.version for dist in metadata.distributions()}
    commits = [machine.git_commit(x.script.resolve()) if x.script else None for x in programs]
    return {
        "programs": list(args.names) or names_of(programs),
        "listed": listed.model_dump() if listed else None,
        "flags": list(flags),
        "commits": commits,
        "discarded": DISCARDED,
        "args": asdict(args) | {"out": None, "study": None},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {name: installed[name] for name in PACKAGES if name in installed},
        "cpus": os.cpu_count(),
    } | machine.describe()


def interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args = tyro.cli(Args, args=words[:end], description=__doc__)
    signal.signal(signal.SIGINT, interrupt)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, interrupt)
    failures = race_study(args) if args.study else run_race(args, words[end + 1 :])
    for failure in failures:
        print(f"race.py: {failure}", file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

"""Race programs by turns: which is the fastest on this machine, and by how much.

    python race.py ppo_linen.py ppo_torch.py
    python race.py more/sac_linen_gymnasium.py more/sac_torch_gymnasium.py -- mujoco --num-steps 200
    python race.py ppo_linen.py ../before/ppo_linen.py  # what a change brings
    python race.py ppo_linen.py "python ../cleanrl/cleanrl/ppo.py @SPS:"
    python race.py --study studies/control  # what its races.toml lists, and its races.jsonl lacks

All programs start and compile, and are stopped. Then each in turn goes on for a second or more, in
an order that alternates, while the others stand still. What else the machine does meets all of them
alike, so the ratio of two programs in one turn is steady where their times are not. The race ends
when each ratio is known to within --within, or after --turns.

A program is a script of this project, a copy of one, or a command in quotes. Flags after -- go to
all scripts, and flags within the quotes to one. Of any other program, the last word of the command,
after @, is what each line holds that ends an iteration. A race measures iterations alone; start-up
and memory are benchmark.sh's.
"""

import fcntl
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C in the imports is no traceback

import psutil
import tyro
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from analysis import races
from analysis.races import Race, Turn, is_known
from analysis.schema import clean
from bench import machine

THROWN_AWAY = 2  # turns of each program that do not count: caches fill, clocks of the CPU settle
MIN_TURNS = 10  # that count, before a race may end
LOOK = 0.002  # seconds between looks for a new line
GUARD = "--guard"  # makes race.py the process that start_guard describes
PACKAGES = ("jax", "jaxlib", "flax", "equinox", "optax", "torch", "numpy", "gymnax", "gymnasium")


@dataclass
class Args:
    programs: tyro.conf.Positional[tuple[str, ...]] = ()  # scripts, or commands in quotes
    study: Path | None = None  # folder whose races.toml lists races; its races.jsonl gets them
    within: float = 0.03  # end when each ratio is known to within this share
    turns: int = 60  # end after so many turns of each program
    seconds: float = 1.0  # a turn takes at least so long, and ends with an iteration
    warm_up: int = 3  # iterations before the first turn; more, where learning starts later
    apart: bool = False  # start one after the other, as a GPU asks for: docs/benchmark.md
    cores: str = ""  # CPUs that the programs may use, as 0 or 0,1; by default all
    patience: float = 600.0  # seconds without an iteration after which a program counts as hanging
    out: Path | None = None  # file for the turns; by default one in races/

    def __post_init__(self) -> None:
        if self.study and self.programs:
            raise ValueError("name programs or a --study")
        if not self.study and len(self.programs) < 2:
            raise ValueError("name two programs or more")
        if not (self.within >= 0 and self.seconds > 0 and self.patience > 0):
            raise ValueError("--within, --seconds and --patience must be positive numbers")
        if self.turns < THROWN_AWAY + MIN_TURNS:
            raise ValueError(f"--turns must be {THROWN_AWAY + MIN_TURNS} or more")
        if self.warm_up < 1:
            raise ValueError("--warm-up must be 1 or more")


def fail(reason: str) -> NoReturn:
    print(f"race.py: {reason}", file=sys.stderr)
    sys.exit(2)


# === Programs ===================================================================================
class Program(NamedTuple):
    name: str
    words: list[str]  # the command
    mark: bytes  # what a line holds that ends an iteration
    pattern: str  # where such lines are, in the race's folder
    script: Path | None


def read_program(text: str, number: int, flags: Sequence[str], folder: Path) -> Program:
    """What an argument of the command line stands for."""
    text = clean(text)
    try:
        words = shlex.split(text)
    except ValueError as error:
        fail(f"{text}: {error}")
    mark = words.pop()[1:] if words and words[-1].startswith("@") else ""
    if not words:
        fail(f"{text!r} names no program")
    script = next((Path(word) for word in words if word.endswith(".py")), None)
    if words and words[0].endswith(".py"):
        words = [sys.executable, *words]
    if mark:
        name = text.rpartition("@")[0].strip()
        return Program(name, words, mark.encode(), f"{number}.txt", script)
    if script is None or not script.is_file():
        fail(f"{text} is no script; a program of another kind ends with @ and what its lines hold")
    if "RunLog" not in script.read_text(errors="replace"):
        fail(f"{script} writes no run folder: end it with @ and what its lines hold, as @SPS:")
    own = ["--runs-dir", str(folder), "--run-name", str(number)]
    if not any(word.startswith(("--total-timesteps", "--total_timesteps")) for word in flags):
        own += ["--total-timesteps", str(10**9)]  # it must not end before the race does
    # A program of many agents has a file for each, of which any one tells when an iteration ends.
    return Program(text, [*words, *flags, *own], b"{", f"{number}/**/metrics.jsonl", script)


class Racer:
    """A program's process, which stands still except in its turns. What fails is left out."""

    def __init__(
        self, program: Program, number: int, folder: Path, args: Args, guard: "Guard"
    ) -> None:
        self.program = program
        self.number = number
        self.folder = folder
        self.output = folder / f"{number}.txt"
        self.lines: Path | None = None
        self.position = 0  # up to which the lines are read
        self.patience = args.patience
        self.seen = time.perf_counter()  # when it went on, or ended an iteration
        self.failure = ""
        self.guard = guard
        pinned = ["taskset", "--cpu-list", args.cores] if args.cores else []
        # On a GPU, each of several programs would take three quarters of the memory.
        environment = {"PYTHONUNBUFFERED": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with open(self.output, "wb") as file:
            try:
                self.process = psutil.Popen(
                    [*pinned, *program.words],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=environment | os.environ,
                    start_new_session=True,  # a terminal's Ctrl-C reaches race.py alone
                )
            except OSError as error:
                fail(f"{program.name} does not start: {error.strerror}")
        self.members = [psutil.Process(self.process.pid)]
        guard.add(self.members[0])

    def take_turn(self, seconds: float) -> tuple[int, float]:
        """Run for so long at least; return how many iterations there were, and their seconds.

        They are counted from the end of the turn's first iteration, which had begun before, and on
        a GPU may have gone on while the program stood still, to the end of the last.
        """
        self.count_new_lines()  # those of the turn before that came too late to be seen
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.resume()
        self.seen = time.perf_counter()
        self.wait_for_lines()
        first = self.seen
        done = 0
        while not self.failure and (done == 0 or self.seen - first < seconds):
            done += self.wait_for_lines()
        self.stand_still()
        return done, self.seen - first

    def stand_still(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.process.suspend()
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def family(self) -> list[psutil.Process]:
        """The program's processes, and those that it had: workers live on where it ends."""
        with suppress(psutil.NoSuchProcess):
            for process in self.members[0].children(recursive=True):
                if process not in self.members:
                    self.members.append(process)
                    self.guard.add(process)
        return self.members[::-1]

    def wait_for_lines(self) -> int:
        """Return how many iterations have ended since the last look, once one has."""
        while not (new := self.look()) and not self.failure:
            time.sleep(LOOK)
        return new

    def look(self) -> int:
        """Return how many iterations have ended since the last look."""
        now = time.perf_counter()
        new = self.count_new_lines()
        if new:
            self.seen = now
        elif self.process.poll() is not None:
            self.failure = f"ended by itself, with exit status {self.process.returncode}"
        elif now - self.seen > self.patience:
            self.failure = f"had no iteration in {self.patience:g} s"
        return new

    def count_new_lines(self) -> int:
        """Whole lines with the program's mark since the last look."""
        if self.lines is None:
            self.lines = next(self.folder.glob(self.program.pattern), None)
        if self.lines is None or self.lines.stat().st_size == self.position:
            return 0
        with open(self.lines, "rb") as file:
            file.seek(self.position)
            lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        self.position += sum(map(len, lines))
        return sum(self.program.mark in line for line in lines)

    def last_words(self) -> str:
        """Why it failed, and the end of what it printed."""
        lines = self.output.read_text(errors="replace")[-5000:].splitlines()[-10:]
        lines = [clean(line) for line in lines]
        reason = f"{self.program.name} is left out: it {self.failure}. Its last lines:"
        return "\n  ".join([reason, *lines])


class Guard:
    """A process that ends what race.py has started, once race.py has ended, however it did.

    It reads a folder to delete, and then processes, a line each; the end of the lines is the sign.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[psutil.Process] = []
        self.process = subprocess.Popen(
            [sys.executable, __file__, GUARD],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,  # what ends race.py's session does not end the guard
        )
        self.tell(str(folder))

    def add(self, process: psutil.Process) -> None:
        self.processes.append(process)
        self.tell(f"{process.pid} {process.create_time()}")

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed
            print(line, file=self.process.stdin, flush=True)

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.process.wait() != 0:
            clean_up(self.folder, self.processes)


def be_guard() -> None:
    folder = sys.stdin.readline().rstrip("\n")
    processes = []
    for line in sys.stdin:
        number, created = line.split()
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(number))
            if process.create_time() == float(created):  # and no later one of that number
                processes.append(process)
    if folder:
        clean_up(Path(folder), processes)


def clean_up(folder: Path, processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.suspend()  # so that it starts no more
            for member in [*process.children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
    shutil.rmtree(folder, ignore_errors=True)


# === Study ======================================================================================
class Listed(BaseModel, extra="forbid"):
    """A race of a study's races.toml."""

    name: str
    programs: dict[str, str]  # what the study calls each, and the program
    flags: str = ""  # of all scripts
    cores: str = ""  # the rest as on the command line
    within: float = 0.03
    turns: int = 60
    seconds: float = 1.0
    warm_up: int = 3
    apart: bool = False

    def settings(self) -> dict[str, Any]:
        """What Args has of it, too."""
        names = {field.name for field in fields(Args)} - {"programs"}
        return {name: x for name, x in self.model_dump().items() if name in names}


class Study(BaseModel, extra="forbid"):
    """A study's races.toml."""

    races: list[Listed]


def missing_in(study: Path) -> list[Listed]:
    """The races that a study lists and has not, as they are listed."""
    try:
        listed = Study(**tomllib.loads((study / "races.toml").read_text())).races
        for x in listed:
            Args(programs=tuple(x.programs.values()), **x.settings())
        out = study / "races.jsonl"
        done = races.read(out) if out.exists() else []
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        fail(f"{study / 'races.toml'}: {place}: {first['msg']}")
    except (OSError, ValueError) as error:
        fail(f"{study / 'races.toml'}: {error}")
    found = [x.info.get("listed") for x in done]
    return [x for x in listed if x.model_dump() not in found]


def race_study(args: Args) -> list[str]:
    """Hold the races that lack; return what went wrong. Stopped, a study loses one race at most."""
    assert args.study is not None
    failures = []
    listed = missing_in(args.study)
    for number, x in enumerate(listed, 1):
        print(f"Race {number} of {len(listed)}: {x.name}", flush=True)
        programs = tuple(x.programs.values())
        out = Path("races", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{number}.jsonl")
        own = replace(args, programs=programs, study=None, out=out, **x.settings())
        failed = hold(own, shlex.split(x.flags), x)
        if "stopped" in failed:
            return [*failures, *failed]
        if failed:
            failures += [f"{x.name}: {reason}" for reason in failed]
            continue
        with open(args.study / "races.jsonl", "a") as file:
            file.write(out.read_text())
    return failures


# === Race =======================================================================================
def start(programs: list[Program], args: Args, folder: Path, guard: Guard) -> list[Racer]:
    """Start the programs, and stop each after its warm-up."""
    racers = []
    for number, program in enumerate(programs):
        racers.append(Racer(program, number, folder, args, guard))
        if args.apart:
            warm_up(racers[-1:], args.warm_up)
    if not args.apart:
        warm_up(racers, args.warm_up)
    return racers


def warm_up(racers: list[Racer], num_iterations: int) -> None:
    left = {racer.number: num_iterations for racer in racers}
    while left:
        time.sleep(LOOK)
        for racer in racers:
            if racer.number in left:
                left[racer.number] -= racer.look()
                if racer.failure or left[racer.number] <= 0:
                    racer.stand_still()
                    del left[racer.number]


def take_round(racers: list[Racer], number: int, args: Args) -> Iterator[Turn]:
    """Let each program take a turn, in an order that alternates."""
    for racer in racers if number % 2 == 0 else racers[::-1]:
        if racer.failure:
            continue
        num_iterations, seconds = racer.take_turn(args.seconds)
        if not racer.failure:
            yield Turn(number, racer.number, num_iterations, seconds)


def names_of(programs: list[Program]) -> list[str]:
    """Short names, no two the same: a script's own, or what was written, or that and a number."""
    short = [program.script.stem if program.script else program.name for program in programs]
    written = [program.name for program in programs]
    for names in (short, written):
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(written, 1)]


def table_of(race: Race) -> Table:
    """What is known so far."""
    times = race.times()
    table = Table(caption=f"{len(times)} turns each")
    table.add_column("program", overflow="fold")
    for name in ("ms an iteration", "times as long", "95% interval"):
        table.add_column(name)
    ratios = race.ratios()
    for name in times:
        middle = f"{1000 * times[name].median():.4g}"
        if name in ratios:
            estimate, low, high = ratios[name]
            table.add_row(Text(name), middle, f"{estimate:.3f}", f"{low:.3f} to {high:.3f}")
        else:
            table.add_row(Text(name), middle, "1", "")
    return table


def describe(
    programs: list[Program], args: Args, flags: Sequence[str], listed: Listed | None
) -> dict[str, Any]:
    """What a race depends on, as the first line of its file."""
    installed = {dist.metadata["Name"].lower(): dist.version for dist in metadata.distributions()}
    commits = [machine.git_commit(x.script.resolve()) if x.script else None for x in programs]
    return {
        "programs": list(listed.programs) if listed else names_of(programs),
        "listed": listed.model_dump() if listed else None,
        "flags": list(flags),
        "commits": commits,
        "thrown_away": THROWN_AWAY,
        "args": asdict(args) | {"out": None, "study": None},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "versions": {name: installed[name] for name in PACKAGES if name in installed},
        "os": platform.platform(),
        "cpus": os.cpu_count(),
    } | machine.describe()


def interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def race(
    programs: list[Program], found: Race, args: Args, folder: Path, guard: Guard, file: IO[str]
) -> list[str]:
    """Race until each ratio is known, and show what is; return what went wrong."""
    file.write(json.dumps(found.info) + "\n")
    racers: list[Racer] = []
    failures = []
    console = Console(highlight=False, soft_wrap=True)
    with Live("All start and compile.", console=console, auto_refresh=False) as live:
        live.refresh()
        try:
            racers = start(programs, args, folder, guard)
            for number in range(args.turns):
                for turn in take_round(racers, number, args):
                    found.turns.append(turn)
                    file.write(json.dumps(turn._asdict()) + "\n")
                live.update(table_of(found), refresh=True)
                if sum(not racer.failure for racer in racers) < 2:
                    break
                enough = number + 1 >= THROWN_AWAY + MIN_TURNS
                if enough and all(is_known(x, args.within) for x in found.ratios().values()):
                    break
        except KeyboardInterrupt:
            failures.append("stopped")
    if not console.is_terminal:
        print()  # rich ends no line there
    for sentence in found.sentences(args.within):
        print(sentence)
    return [racer.last_words() for racer in racers if racer.failure] + failures


def hold(args: Args, flags: Sequence[str], listed: Listed | None = None) -> list[str]:
    """Race, and keep the turns in a file; return what went wrong."""
    out = args.out or Path("races", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl")
    folder = Path(tempfile.mkdtemp(prefix="race-"))
    guard = Guard(folder)
    try:
        programs = [read_program(x, i, flags, folder) for i, x in enumerate(args.programs)]
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "a", buffering=1) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = Race(describe(programs, args, flags, listed), [])
            failures = race(programs, found, args, folder, guard, file)
        print(f"Turns: {out}. To draw them: python -m analysis race {out}", flush=True)
    except BlockingIOError:
        fail(f"another race writes to {out}")
    except OSError as error:
        fail(str(error))
    finally:
        interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
        guard.close()
        signal.signal(signal.SIGINT, interrupted)
    return failures


def main() -> None:
    words = sys.argv[1:]
    place = words.index("--") if "--" in words else len(words)
    flags = words[place + 1 :]
    args = tyro.cli(Args, args=words[:place], description=__doc__)
    signal.signal(signal.SIGINT, interrupt)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # which nohup sets
            signal.signal(number, interrupt)
    failures = race_study(args) if args.study else hold(args, flags)
    for failure in failures:
        print(f"race.py: {failure}", file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == [GUARD]:
        be_guard()
    else:
        main()

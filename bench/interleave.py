"""Run programs interleaved: in each round, each program runs for a second and is then paused.

Other load on the machine slows all programs equally, so the ratios of their times are steady even
if the times are not.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from analysis.races import Turn
from bench import processes

POLL = 0.002  # seconds between checks for new progress lines


@dataclass
class Settings:
    turns: int = 60  # maximum number of rounds; in a round, each program has one turn
    seconds: float = 1.0  # minimum duration of a turn, which ends with an iteration
    warm_up: int = 3  # iterations before the first turn; DQN and SAC need more
    apart: bool = False  # start programs one after the other, for GPUs; see docs/benchmark.md
    cores: str = ""  # CPUs that the programs may use, such as 0 or 0,1; by default all
    patience: float = 600.0  # seconds without an iteration before a program is considered hung


class Program(NamedTuple):
    name: str
    command: list[str]
    text: bytes  # appears in every progress line and nowhere else
    pattern: str  # glob pattern for the file with the progress lines, in the race folder
    script: Path | None
    steps: int | None  # environment steps per progress line; None for scripts, which log them


class Runner:
    """The processes of one program, which are paused except during its turns."""

    def __init__(self, program: Program, number: int, folder: Path, mark: str, settings: Settings):
        self.program = program
        self.number = number
        self.folder = folder
        self.mark = f"{mark}.{number}"
        self.patience = settings.patience
        self.output = folder / f"{number}.txt"
        self.file: Path | None = None  # contains the progress lines
        self.position = 0  # number of bytes read from `file`
        self.steps = program.steps
        self.last_step = 0
        self.seen = time.perf_counter()  # time of the last progress line
        self.failure = ""
        pinned = ["taskset", "--cpu-list", settings.cores] if settings.cores else []
        # By default, each JAX program would reserve three quarters of the GPU memory.
        environment = {"PYTHONUNBUFFERED": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with open(self.output, "wb") as file:
            self.process = subprocess.Popen(
                [*pinned, *program.command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment | os.environ | {processes.MARK: self.mark},
                start_new_session=True,  # Ctrl-C in a terminal reaches only race.py
            )

    def take_turn(self, seconds: float) -> tuple[int, float]:
        """Run for at least `seconds`; return the number of iterations and their duration.

        The first iteration of a turn is not counted, because it started in an earlier turn and may
        have continued on a GPU while the program was paused.
        """
        self.read_lines()  # discard lines that were written after the last turn
        processes.resume(self.mark)
        self.seen = time.perf_counter()
        self.wait_for_lines()
        start = self.seen
        iterations = 0
        while not self.failure and (iterations == 0 or self.seen - start < seconds):
            iterations += self.wait_for_lines()
        processes.pause(self.mark)
        return iterations, self.seen - start

    def wait_for_lines(self) -> int:
        """Wait for iterations to finish; return their number, which is 0 if the program failed."""
        while not (new := self.poll()) and not self.failure:
            time.sleep(POLL)
        return new

    def poll(self) -> int:
        """Return the number of iterations that finished since the last call."""
        now = time.perf_counter()
        new = self.read_lines()
        if new:
            self.seen = now
        elif self.process.poll() is not None:
            self.failure = f"ended with exit status {self.process.returncode}"
        elif now - self.seen > self.patience:
            self.failure = f"finished no iteration in {self.patience:g} s"
        return new

    def read_lines(self) -> int:
        """Return the number of new progress lines that are complete."""
        if self.file is None:
            self.file = next(self.folder.glob(self.program.pattern), None)
        if self.file is None or self.file.stat().st_size == self.position:
            return 0
        with open(self.file, "rb") as file:
            file.seek(self.position)
            lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        self.position += sum(map(len, lines))
        found = [line for line in lines if self.program.text in line]
        if self.file.name == "metrics.jsonl":
            self.read_steps(found)
        return len(found)

    def read_steps(self, lines: list[bytes]) -> None:
        """Set the environment steps per iteration from lines of metrics.jsonl."""
        for line in lines:
            step = int(json.loads(line)["global_step"])
            self.steps = step - self.last_step
            self.last_step = step

    def tail(self) -> list[str]:
        """Return the last lines of the output."""
        return self.output.read_text(errors="replace")[-5000:].splitlines()[-10:]


class Interleaved:
    """Programs that run interleaved. They end with close(), or when this process ends."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = Path(tempfile.mkdtemp(prefix="race-"))
        self.mark = processes.new_mark()
        self.guard = processes.Guard(self.mark, folder=self.folder)
        self.runners: list[Runner] = []

    def start(self, programs: list[Program]) -> None:
        """Start the programs and pause each after its warm-up.

        Raise OSError if a program cannot be started.
        """
        for number, program in enumerate(programs):
            self.runners.append(Runner(program, number, self.folder, self.mark, self.settings))
            if self.settings.apart:
                self.warm_up(self.runners[-1:])
        if not self.settings.apart:
            self.warm_up(self.runners)

    def warm_up(self, runners: list[Runner]) -> None:
        left = {runner.number: self.settings.warm_up for runner in runners}
        while left:
            time.sleep(POLL)
            for runner in runners:
                if runner.number in left:
                    left[runner.number] -= runner.poll()
                    if runner.failure or left[runner.number] <= 0:
                        processes.pause(runner.mark)
                        del left[runner.number]

    def rounds(self) -> Iterator[Iterator[Turn]]:
        """Yield rounds while at least two programs are left. A round yields a turn per program."""
        for number in range(self.settings.turns):
            yield self.take_round(number)
            if sum(not runner.failure for runner in self.runners) < 2:
                break

    def take_round(self, number: int) -> Iterator[Turn]:
        """Yield one turn per program. The order is reversed in every other round."""
        for runner in self.runners if number % 2 == 0 else self.runners[::-1]:
            if runner.failure:
                continue
            iterations, seconds = runner.take_turn(self.settings.seconds)
            if not runner.failure:
                yield Turn(number, runner.number, iterations, seconds)

    def close(self) -> None:
        self.guard.close()

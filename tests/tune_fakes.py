"""A copy of tune.py beside stand-ins for a script and for evaluate.py, and ways to run it fast.

tune.py takes seconds to import what it needs, so most tests run its file in their own process, and
those that kill it in processes that a server forks, which has imported all that before.
"""

import contextlib
import json
import math
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
from conftest import ROOT

import analysis.tuning

QUICK = ["ppo_fake", "--num-seeds", "2", "--fresh-seeds", "2", "--episodes", "5"]
QUICK += ["--pruner", "none"]


def make_project(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    shutil.copy(ROOT / "tune.py", path)
    shutil.copy(ROOT / "tests/tune_script.py", path / "ppo_fake.py")
    shutil.copy(ROOT / "tests/tune_judge.py", path / "evaluate.py")
    (path / "analysis").symlink_to(ROOT / "analysis")
    return path


def environment(project: Path, **misbehave: str) -> dict[str, str]:
    own = {"TRACE": str(project / "trace"), "MISBEHAVE": json.dumps(misbehave)}
    return own | {"PYTHONPATH": str(project)}


class InProcess(futures.Executor):
    """Stands in for the pool of one process that asks the script for its arguments."""

    def __init__(self, *_: Any, **options: Any) -> None:
        pass

    def submit(self, fn: Callable, /, *args: Any, **options: Any) -> futures.Future:
        future: futures.Future = futures.Future()
        try:
            future.set_result(fn(*args, **options))
        except Exception as error:
            future.set_exception(error)
        return future


def run(project: Path, words: list[str]) -> int:
    """Run tune.py in this process, which it changes: arguments, signals, current directory."""
    os.chdir(project)
    sys.argv = ["tune.py", *words]
    sys.path.insert(0, str(project))
    sys.modules.pop("ppo_fake", None)
    try:
        runpy.run_path(str(project / "tune.py"), run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.path.remove(str(project))
        sys.modules.pop("ppo_fake", None)
    return 0


def make_quick(setattr: Callable) -> None:
    """Drop what takes longer than all else, and is tested by a real study."""
    setattr(analysis.tuning, "draw", lambda *_: None)
    setattr(futures, "ProcessPoolExecutor", InProcess)


def slow_down_asking(setattr: Callable) -> None:
    """So that who counts the trials in the meantime, and does not wait, makes one too many."""
    ask = optuna.Study.ask

    def slowly(*args: Any, **options: Any) -> optuna.Trial:
        time.sleep(0.05)
        return ask(*args, **options)

    setattr(optuna.Study, "ask", slowly)


def prune_below(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """A pruner that is as strict with the first trial as with all others."""
    strict = optuna.pruners.ThresholdPruner(lower=value)
    monkeypatch.setattr(
        optuna.pruners.HyperbandPruner, "prune", lambda _, *trial: strict.prune(*trial)
    )


# === Fixtures ===================================================================================
@pytest.fixture
def project(tmp_path):
    yield make_project(tmp_path)
    for process in processes_in(tmp_path):
        process.kill()


@pytest.fixture
def command(project, monkeypatch, capsys):
    """Run tune.py in this process; return exit status, output and errors."""
    handlers = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)}
    make_quick(monkeypatch.setattr)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.chdir(project)

    def call(*words, **misbehave):
        for name, value in environment(project, **misbehave).items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        status = run(project, list(map(str, words)))
        return status, *capsys.readouterr()

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def server():
    start_server()


# === Processes ==================================================================================
def begin(project: Path, words: list[str], own: dict[str, str], log: Path) -> None:
    """In a forked process: run tune.py, with its output in files."""
    for number, end in ((1, ".out"), (2, ".err")):
        with open(log.with_suffix(end), "wb", 0) as file:
            os.dup2(file.fileno(), number)
    os.environ.update(own)
    make_quick(setattr)
    if "SLOW" in own:
        slow_down_asking(setattr)
    status = run(project, words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Command:
    """A running command of tune.py."""

    count = 0

    def __init__(
        self, project: Path, *words: str, own: dict[str, str] | None = None, **misbehave: str
    ) -> None:
        Command.count += 1
        self.log = project / f"command-{Command.count}"
        args = (project, list(words), environment(project, **misbehave) | (own or {}), self.log)
        self.process = SERVER.Process(target=begin, args=args)
        self.process.start()
        assert self.process.pid
        self.pid = self.process.pid

    def wait(self) -> tuple[int | None, str, str]:
        """Exit status, output and errors."""
        self.process.join(60)
        texts = [self.log.with_suffix(x) for x in (".out", ".err")]
        out, err = (x.read_text() if x.exists() else "" for x in texts)
        return self.process.exitcode, out, err


SERVER = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Import all that a command needs, in the process that forks them."""
    SERVER.set_forkserver_preload(["tune_preload"])
    old = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    multiprocessing.forkserver.ensure_running()
    os.environ.pop("PYTHONPATH")
    os.environ |= {} if old is None else {"PYTHONPATH": old}


def processes_in(project: Path) -> list[psutil.Process]:
    """What this test's commands started, by its environment, at any remove."""

    def belongs(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            mine = process.environ().get("TRACE") == str(project / "trace")
            return mine and process.status() != psutil.STATUS_ZOMBIE
        return False

    return [x for x in psutil.process_iter() if belongs(x)]


def wait_for(condition: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for does not come"
        time.sleep(0.01)


# === What was done ==============================================================================
def traced(project: Path, *what: str) -> list[dict[str, Any]]:
    """What happened to runs, in order; with `what`, only that."""
    path = project / "trace"
    lines = path.read_text().splitlines() if path.exists() else []
    return [x for x in map(json.loads, lines) if not what or x["what"] in what]


def check_runs(project: Path) -> None:
    """No run began twice at once, or again where it had ended, or lost what it had saved."""
    done: dict[str, Any] = {}
    for event in traced(project, "start", "stop", "end", "locked out"):
        run, was = event["place"], done.get(event["place"])
        if event["what"] == "start":
            assert was != "end", f"{run} was complete"
            assert event["first"] == (was if isinstance(was, int) else 0), f"{run} lost {was}"
            done[run] = "start"
        elif event["what"] == "stop":
            assert was == "start"
            done[run] = event["done"]
        else:
            assert event["what"] == "end" and was == "start", event
            done[run] = "end"


def greedy(settings: dict[str, Any], seed: int, games: int) -> float:
    """What tune_judge.py says of the agent that these settings give."""
    value = -abs(math.log10(settings["learning_rate"]) + 3) - 0.5 * settings["anneal_lr"]
    return value + (1 + settings["anneal_lr"]) * (seed * 37 % 11) ** 2 / 100 + games / 1e9

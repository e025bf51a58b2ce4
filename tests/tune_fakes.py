"""tune.py on stand-ins for a script and for evaluate.py, in this process or in forked ones.

tune.py takes seconds to import what it needs, so most tests call its main() in their own process,
and those that kill it in processes that a server forks, which has imported all that before.
"""

import json
import logging
import math
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
from conftest import ROOT

import tune

QUICK = ["fake.py", "--num-seeds", "2", "--fresh-seeds", "2", "--episodes", "5"]
QUICK += ["--pruner", "none"]
NAME = "fake__Fake-v1"


def environment(project: Path, **misbehave: str) -> dict[str, str]:
    return {"TRACE": str(project / "trace"), "MISBEHAVE": json.dumps(misbehave)}


def run(project: Path, words: list[str]) -> int:
    """Run tune.py in this process, which it changes: arguments, signals, modules, environment."""
    os.chdir(project)
    sys.argv = ["tune.py", *words]
    try:
        tune.main()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else 1
    return 0


def make_quick(setattr: Callable, project: Path) -> None:
    """Judge by a stand-in, and drop what takes longer than all else."""
    setattr(tune, "HERE", str(project))
    setattr(tune.tuning, "draw", lambda *_: None)


@pytest.fixture
def project(tmp_path):
    shutil.copy(ROOT / "tests/tune_script.py", tmp_path / "fake.py")
    shutil.copy(ROOT / "tests/tune_judge.py", tmp_path / "evaluate.py")
    yield tmp_path
    for pid in processes_in(tmp_path):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def command(project, monkeypatch, capsys):
    """Run tune.py in this process; return exit status, output and errors."""
    handlers = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)}
    make_quick(monkeypatch.setattr, project)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(logging.root.manager, "disable", 0)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
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
    """Import all that a command needs, in the process that forks them."""
    names = ["tune_fakes", "optuna.storages.journal", "sqlalchemy.dialects.sqlite"]
    SERVER.set_forkserver_preload(names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
        multiprocessing.forkserver.ensure_running()


SERVER = multiprocessing.get_context("forkserver")


def begin(project: Path, words: list[str], own: dict[str, str], log: Path) -> None:
    """In a forked process: run tune.py, with its output in files."""
    os.dup2(os.open(log.with_suffix(".out"), os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(os.open(log.with_suffix(".err"), os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update(own)
    make_quick(setattr, project)
    if "NO_SETPRIV" in own:
        tune.DIE_TOO = []
    if "SLOW" in own:  # so that who counts the trials in the meantime makes one too many
        ask = optuna.Study.ask
        setattr(optuna.Study, "ask", lambda *args: [time.sleep(0.05), ask(*args)][1])  # noqa: B010
    status = run(project, words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Command:
    """A running command of tune.py."""

    count = 0

    def __init__(self, project: Path, *words: str, own: Any = None, **misbehave: str) -> None:
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
        out, err = [x.read_text() if x.exists() else "" for x in texts]
        return self.process.exitcode, out, err


def processes_in(project: Path) -> list[int]:
    """What this test's commands started, and has not ended."""
    return [pid for pid in {x["pid"] for x in traced(project, "start")} if psutil.pid_exists(pid)]


def wait_for(condition: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for does not come"
        time.sleep(0.01)


# === What was done ==============================================================================
def load(project: Path, storage: Any = None) -> optuna.Study:
    storage = storage or f"sqlite:///{project}/tuned/{NAME}/study.db"
    return optuna.load_study(study_name=NAME, storage=storage)


def report(project: Path) -> dict[str, Any]:
    return json.loads((project / "tuned" / NAME / "best.json").read_text())


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

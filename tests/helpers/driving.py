"""Run benchmark.sh on mock training scripts, and read its results."""

import json
import os
import subprocess
import sys
from contextlib import suppress

import psutil
from conftest import start_process


def add_tool(project, name, text):
    (project / "tools").mkdir(exist_ok=True)
    (project / "tools" / name).write_text(text)
    (project / "tools" / name).chmod(0o755)


def add_grid(project, text, study="mine"):
    (project / "studies" / study).mkdir(exist_ok=True)
    (project / "studies" / study / "grid.toml").write_text(text)


def environment(project, **stand_in):
    """Return variables that make benchmark.sh use this Python and the folder of the test."""
    return os.environ | {
        "VENV": sys.prefix,
        "TMPDIR": str(project),
        "TRACE": str(project / "trace"),
        "PATH": f"{project}/tools:{os.environ['PATH']}",
        "STAND_IN": json.dumps(stand_in),
    }


def start(project, *flags, env=None, cwd=None, program="./benchmark.sh", **stand_in):
    # Do not let benchmark.sh inherit ignored signals, such as SIGHUP if pytest runs under nohup.
    words = ["env", "--default-signal=INT,HUP", program, *flags]
    env = env or environment(project, **stand_in)
    return start_process(words, cwd or project, env, stdin=subprocess.DEVNULL)


def finish(driver):
    driver.stdout, driver.stderr = map(str, driver.communicate(timeout=120))
    return driver


def bench(project, *flags, **options):
    return finish(start(project, *flags, **options))


def succeed(project, *flags, **options):
    driver = bench(project, *flags, **options)
    assert (driver.returncode, driver.stderr) == (0, ""), driver.stdout + driver.stderr
    return driver.stdout


def names_of(project, *flags, **options):
    lines = succeed(project, *flags, "--list", **options).splitlines()
    return [line.split()[-1] for line in lines]


def trace(project):
    path = project / "trace"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def started(project):
    return [name for event, name, *_ in trace(project) if event == "start"]


def is_complete(path):
    return '"status": "completed"' in path.read_text()


def completed(project):
    paths = (project / "runs").glob("*/run.json")
    return sorted(path.parent.name for path in paths if is_complete(path))


def info_of(project, name):
    return json.loads((project / "runs" / name / "run.json").read_text())


def log_of(project):
    return (project / "runs/benchmark.jsonl").read_text().splitlines()


def processes_in(project):
    """Return all running processes that benchmark.sh started in the folder of this test."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # the process has ended, or belongs to another user
            is_ours = process.environ().get("TMPDIR") == str(project)
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found

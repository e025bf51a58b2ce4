"""Pause, resume and end all processes of a program.

All processes of a program inherit an environment variable, the mark. This module finds them by
their mark, even if their parent has ended or they have started a new session. The mark "a" also
matches processes with the marks "a.1" and "a.2".
"""

import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

MARK = "BENCH_MARK"  # name of the environment variable
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # by default, these end a program


def new_mark() -> str:
    return uuid.uuid4().hex


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes with a mark, except zombies, which have no environment."""
    found = []
    for process in psutil.process_iter(["environ"]):
        value = (process.info["environ"] or {}).get(MARK, "")
        if value == mark or value.startswith(f"{mark}."):
            found.append(process)
    return found


def pause(mark: str) -> None:
    """Pause the marked processes, and any that they start in the meantime."""
    paused: set[psutil.Process] = set()
    while new := set(marked(mark)) - paused:
        for process in new:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        paused |= new


def resume(mark: str) -> None:
    for process in marked(mark):
        with suppress(psutil.NoSuchProcess):
            process.resume()


def end(mark: str) -> None:
    """Kill the marked processes."""
    for _ in range(200):  # bounded, because a process blocked in a driver cannot be killed
        left = marked(mark)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        if not left:
            return
        time.sleep(0.05)


def end_on_signals(mark: str) -> None:
    """Install signal handlers that end the marked processes and this process."""

    def stop(number: int, _: Any) -> None:
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        end(mark)
        sys.exit(128 + number)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)


class Guard:
    """A process that ends the marked processes once this process has ended, even by SIGKILL.

    It also deletes the folder, if one is given.
    """

    def __init__(self, mark: str, folder: Path | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, mark, str(folder or "")],
            stdin=subprocess.PIPE,  # closed when this process ends
            start_new_session=True,  # closing the terminal does not end the guard
        )

    def close(self) -> None:
        """End the marked processes now."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def clean_up(mark: str, folder: str) -> None:
    end(mark)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.read()
    clean_up(*sys.argv[1:])

"""Make one run of a grid, for benchmark.sh, which says how far it is:

    python -m studies.one_run RUN GPU DRIVER PROGRESS [wait]

RUN is JSON, of studies/grid.py. A run has its GPU for itself, or the machine where it has none, and
no two drivers make the same one. Both are by locks that the run inherits: so they outlive a killed
driver for as long as its last run does. The driver's process is known by its number: where it is
gone, no run begins. With wait, another process that is at this run is waited for.
"""

import errno
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from studies.machine import describe, git_commit

# Exit statuses. With 0 the run is complete, or it failed and that is told.
END = 74  # the grid ends here
BUSY = 75  # another process is at this run
MARK = "BENCHMARK_RUN"  # a variable that all processes of a run have
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Run:
    """What studies/grid.py says of a run."""

    study: str
    order_seed: int
    runs_dir: str
    timeout: int  # seconds
    name: str
    folder: str  # where it writes
    repeat: int
    command: list[str]
    key: str  # what --only looks at
    block: list[Any]  # within which it is shuffled
    seconds: int  # on two cores, about
    line: int = 0  # of the list
    gpu: str = ""

    @property
    def state(self) -> Path:
        return Path(self.runs_dir, ".benchmark")

    @property
    def failed(self) -> Path:
        """A file that says why, from a failure on until a driver begins."""
        return self.state / f"{self.name}.failed"

    def is_done(self) -> bool:
        """run.json is there from the start on, and says in the end that the run is completed."""
        try:
            return '"status": "completed"' in Path(self.folder, "run.json").read_text()
        except (OSError, ValueError):
            return False

    def is_stopped(self) -> bool:
        """It has a checkpoint to go on from, and is one of the long runs that do."""
        if "--save-every" not in self.command or self.is_done():
            return False
        files = [x for x in Path(self.folder).glob("checkpoint.*") if x.suffix != ".new"]
        return any(x.is_file() and x.stat().st_size for x in files)

    def script(self) -> str:
        return next((x for x in self.command if x.endswith(".py")), "benchmark.sh")


# === Files ======================================================================================
def note(runs_dir: str, **event: Any) -> None:
    """Add a line to the log, in one piece since other drivers write, too."""
    now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "load": os.getloadavg()}
    line = json.dumps(now | event).encode() + b"\n"
    with open(f"{runs_dir}/benchmark.jsonl", "ab+", buffering=0) as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - 1))
        if size and log.read(1) != b"\n":  # half a line, from when the disk was full
            line = b"\n" + line
        log.write(line)


def check_room(run: Run) -> None:
    """Raise OSError where a run could not write its files."""
    # One name for all, so that what a killed process leaves there goes with the next.
    space = run.state / "space"
    try:
        space.write_bytes(bytes(1_000_000))
    finally:
        space.unlink(missing_ok=True)


# === Processes ==================================================================================
def lock(file: IO[bytes], what: str) -> bool:
    """Lock a file; if another process holds it, say what is waited for, or give up for nothing."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not what:
            return False
        print(f"Waiting for {what}.", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    return True


def kill_all() -> None:
    """Kill what this process started, whatever its parent or process group is by now."""
    mark = os.environ[MARK]
    for _ in range(200):  # and not for ever, should a device's driver hold one
        processes = psutil.process_iter(["environ"])
        left = [x for x in processes if (x.info["environ"] or {}).get(MARK) == mark]
        for process in left:
            with suppress(psutil.Error):  # it has ended by now
                process.kill()
        if not left:
            return
        time.sleep(0.05)


def stop(number: int, _: object) -> None:
    for other in STOPPING:
        signal.signal(other, signal.SIG_IGN)
    kill_all()
    sys.exit(128 + number)


def wandb_mode() -> str:
    """Online if a server accepts the key, else offline; it waits for nobody."""
    code = "import sys, wandb; sys.exit(not wandb.login(verify=True))"
    words = ["timeout", "30", sys.executable, "-c", code]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True)
    return "offline" if done.returncode else "online"


# === One run ====================================================================================
def words_of(run: Run) -> list[str]:
    """The command, or how it goes on from a checkpoint."""
    if run.is_stopped():
        script = run.command.index(run.script())
        return [*run.command[: script + 1], "--resume", run.folder]
    if os.path.lexists(run.folder):  # what a killed run had measured
        (run.state / "partial").mkdir(exist_ok=True)
        shutil.move(run.folder, run.state / f"partial/{run.name}.{time.time_ns()}")
    return run.command


def make(run: Run, progress: str, output: IO[bytes], gpu_lock: IO[bytes]) -> None:
    """Make the run, and tell how it begins and ends."""
    check_room(run)
    mode, said = "", f"{progress} {run.name}"
    if run.gpu:
        said += f" on GPU {run.gpu}"
    if "--track" in run.command:
        mode = os.environ.get("WANDB_MODE") or wandb_mode()
        os.environ |= {"WANDB_MODE": mode, "WANDB_RUN_GROUP": f"{run.study}-repeat{run.repeat}"}
        said += f", W&B {mode}"
    print(said, flush=True)
    words = words_of(run)
    event = {"event": "start", "run": run.name, "line": run.line, "study": run.study}
    event |= {"order_seed": run.order_seed, "gpu": run.gpu, "wandb": mode}
    note(run.runs_dir, **event, command=shlex.join(words))
    info = describe() | {"git_commit": git_commit(Path(run.script()))}
    output.truncate(0)
    start = time.monotonic()
    process = subprocess.Popen(
        # It leads a process group of its own, which a terminal's Ctrl-C does not reach.
        ["timeout", "--kill-after=10", str(run.timeout), *words],
        env=os.environ | {"RUN_INFO": json.dumps(info)},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=[output.fileno(), gpu_lock.fileno()],  # the locks
    )
    status = process.wait()
    kill_all()
    if status < 0:
        status = 128 - status  # as a shell counts signals
    seconds = int(time.monotonic() - start)
    end = {"event": "end", "run": run.name, "exit_status": status, "seconds": seconds}
    if run.is_done():
        note(run.runs_dir, **end, completed="yes")
    else:
        check_room(run)
        tell_failure(run, end, output)


def tell_failure(run: Run, end: dict[str, Any], output: IO[bytes]) -> None:
    status, seconds = end["exit_status"], end["seconds"]
    reason, after = f"exit status {status}", f", after {seconds} s"
    if status == 137:
        reason = "killed, as the kernel does when memory runs out"
    if seconds >= run.timeout:
        reason, after = f"no end after {run.timeout} s", ""
    output.seek(-min(2000, output.seek(0, os.SEEK_END)), os.SEEK_END)
    tail = output.read().decode(errors="replace")
    note(run.runs_dir, **end, completed="no", reason=reason, tail=tail)
    run.failed.write_text(f"{reason}{after}\n")
    print(f"FAILED {run.name}: {reason}{after}")
    for line in tail.splitlines()[-5:]:
        print(f"    {line[:200]}")


def take_turn(run: Run, driver: int, progress: str, wait: bool) -> int:
    """Make the run when its turn has come, unless another process did; return the exit status."""
    # Per machine, user and GPU; a Slurm job has GPUs of its own, whatever their numbers.
    job, gpus = (os.environ.get(x, "") for x in ("SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES"))
    place = os.environ.get("TMPDIR") or "/tmp"
    place += f"/ppo-benchmark.{os.getuid()}.{job}.{gpus}.lock"
    # The file of the run's output is its lock, too.
    with open(run.state / f"{run.name}.log", "ab+") as output, open(place, "ab") as gpu_lock:
        what = f"{run.name}, which is running already or left a process behind"
        if not lock(output, what if wait else ""):
            return BUSY
        if not run.is_done() and not run.failed.exists():
            lock(gpu_lock, "another benchmark on this machine to finish its run")
            if not psutil.pid_exists(driver):
                return END  # it was killed
            make(run, progress, output, gpu_lock)
        # Unlocked, and not only closed: a process that outlived its run may hold them open.
        fcntl.flock(gpu_lock, fcntl.LOCK_UN)
        fcntl.flock(output, fcntl.LOCK_UN)
    return 0


def main() -> None:
    text, gpu, driver, progress, *wait = sys.argv[1:]
    run = Run(**(json.loads(text) | {"gpu": gpu}))
    os.environ[MARK] = f"{os.getpid()} {run.name}"
    if gpu:
        # CUDA would number the fastest GPU first, and not as nvidia-smi does.
        os.environ |= {"CUDA_VISIBLE_DEVICES": gpu, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    for number in STOPPING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)
    try:
        sys.exit(take_turn(run, int(driver), progress, wait != []))
    except OSError as error:  # of the disk, or of its locks
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = f"no room left in {run.runs_dir}" if is_full else error
        rest = "so the grid stops; completed runs are kept."
        print(f"benchmark.sh: {reason}, {rest}", file=sys.stderr)
        sys.exit(END)


if __name__ == "__main__":
    main()

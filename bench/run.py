"""Execute one run of a plan in a new process: python -m bench.run PLAN NUMBER GPU DRIVER [wait]

benchmark.sh calls this for each run. NUMBER is an index into the missing runs of the plan, GPU is
"-" if no GPU is assigned to the run, and DRIVER is the process id of benchmark.sh. If another
process is executing the run, exit with status 75 or, with "wait", wait for that process.

Locks ensure that only one run at a time uses a GPU, or the machine if it has no GPU, and that two
calls to benchmark.sh never execute the same run. The run inherits the locks, so they are held until
it ends, even if benchmark.sh is killed. No run starts after benchmark.sh has ended.
"""

import errno
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import psutil

from analysis.catalog import DIVERGED
from bench import processes
from bench.machine import describe, git_commit

# Exit statuses. 0 means that the run is complete or its failure was reported.
NO_MORE_RUNS = 74  # the disk is full, or benchmark.sh was killed
BUSY = 75  # another process is executing this run


@dataclass
class Run:
    study: str
    runs_dir: str
    timeout: int  # seconds
    name: str
    folder: str  # run folder, to which the script writes
    repeat: int
    command: list[str]
    key: str  # the text that --only searches
    block: list[Any]  # runs with equal values are shuffled together
    seconds: int  # rough duration, on two idle cores
    is_resumable: bool  # whether an interrupted run resumes from its checkpoint, or starts over
    gpu: str = ""

    @property
    def state(self) -> Path:
        """The folder for logs, locks and unfinished runs."""
        return Path(self.runs_dir, ".benchmark")

    @property
    def failed(self) -> Path:
        """The file with the reason for a failure; benchmark.sh deletes it when it starts."""
        return self.state / f"{self.name}.failed"

    def has_status(self, status: str) -> bool:
        path = Path(self.folder, "run.json")
        return path.exists() and f'"status": "{status}"' in path.read_text(encoding="utf-8")

    def is_done(self) -> bool:
        return self.has_status("completed")

    def can_resume(self) -> bool:
        """Return whether this is an unfinished run that has a checkpoint to resume from."""
        if not self.is_resumable or self.is_done() or self.has_status("diverged"):
            return False
        return any(x.suffix != ".new" for x in Path(self.folder).glob("checkpoint.*"))

    def script(self) -> str:
        return next((x for x in self.command if x.endswith(".py")), "benchmark.sh")


@dataclass
class Plan:
    """Everything that a call to benchmark.sh will do."""

    invocation: str  # command line of benchmark.sh; running it again continues the plan
    runs_dir: str
    started: float  # time.time()
    ends: list[str]  # Python arguments to run after the last run; RUNS is replaced with runs_dir
    returns: bool  # whether the report begins with returns
    track: bool
    report: bool
    runs: list[Run]
    missing: list[int]  # indices of the runs that were not complete at the start

    def write(self, path: str, gpus: str) -> None:
        """Write two lines for benchmark.sh, then the plan as JSON."""
        values = vars(self) | {"runs": [vars(run) for run in self.runs]}
        first = f"{len(self.missing)} {gpus}"
        Path(path).write_text(f"{first}\n{self.invocation}\n{json.dumps(values)}\n")

    @staticmethod
    def read(path: str) -> "Plan":
        *_, line = Path(path).read_text(encoding="utf-8").splitlines()
        values = json.loads(line)
        return Plan(**(values | {"runs": [Run(**x) for x in values["runs"]]}))

    def progress(self) -> str:
        """Return the number of complete runs and the elapsed and remaining time, as text."""
        seconds = int(time.time() - self.started)
        missing = sum(not self.runs[i].is_done() for i in self.missing)
        done = len(self.missing) - missing
        text = f"{len(self.runs) - missing}/{len(self.runs)} done, {timedelta(seconds=seconds)}"
        if done:
            text += f", about {timedelta(seconds=seconds * missing // done)} left"
        return f"[{text}]"


# === Files ======================================================================================
def log_event(runs_dir: str, **event: Any) -> None:
    """Append a line to the log in one call, because other drivers may write at the same time."""
    now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "load": os.getloadavg()}
    with open(f"{runs_dir}/benchmark.jsonl", "ab", buffering=0) as log:
        log.write(json.dumps(now | event).encode() + b"\n")


def lock(file: IO[bytes], holder: str) -> bool:
    """Lock a file and return True.

    If another process has locked it, print `holder` and wait; if holder is empty, return False.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not holder:
            return False
        print(f"Waiting for {holder}.", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    return True


# === One run ====================================================================================
def command_of(run: Run) -> list[str]:
    """Return the command that starts the run, or resumes it from a checkpoint."""
    if run.can_resume():
        script = run.command.index(run.script())
        return [*run.command[: script + 1], "--resume", run.folder]
    if os.path.lexists(run.folder):  # keep the measurements of a killed run
        (run.state / "partial").mkdir(exist_ok=True)
        shutil.move(run.folder, run.state / f"partial/{run.name}.{time.time_ns()}")
    return run.command


def environment_of(run: Run) -> dict[str, str]:
    environment = os.environ | {
        # Disable compilation caches; otherwise the second run would start faster.
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    environment.setdefault("WANDB_FINISH_TIMEOUT", "60")  # seconds to wait for a server
    if "--track" in run.command:
        environment["WANDB_RUN_GROUP"] = f"{run.study}-repeat{run.repeat}"
        environment["WANDB_MODE"] = environment.get("WANDB_MODE") or wandb_mode()
    return environment


def wandb_mode() -> str:
    """Return "online" if a server accepts the API key, and "offline" otherwise."""
    code = "import sys, wandb; sys.exit(not wandb.login(verify=True))"
    words = ["timeout", "30", sys.executable, "-c", code]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True)
    return "offline" if done.returncode else "online"


def make(run: Run, plan: Plan, output: IO[bytes], gpu_lock: IO[bytes]) -> None:
    """Execute the run, and log its start and its end."""
    environment = environment_of(run)
    mode = environment["WANDB_MODE"] if "--track" in run.command else ""
    details = [f" on GPU {run.gpu}"] if run.gpu else []
    details += [f", W&B {mode}"] if mode else []
    print(f"{plan.progress()} {run.name}{''.join(details)}", flush=True)
    command = command_of(run)
    event = {"event": "start", "run": run.name, "study": run.study, "gpu": run.gpu, "wandb": mode}
    log_event(run.runs_dir, **event, command=shlex.join(command))
    info = describe() | {"git_commit": git_commit(Path(run.script()))}
    without_jit = "JAX_DISABLE_JIT=1" in command or bool(environment.get("JAX_DISABLE_JIT"))
    info |= {"jit_disabled": without_jit, "launched": time.time()}
    output.truncate(0)
    start = time.monotonic()
    process = subprocess.Popen(
        # timeout creates a process group, so Ctrl-C in a terminal does not reach the run.
        ["timeout", "--kill-after=10", str(run.timeout), *command],
        env=environment | {"RUN_INFO": json.dumps(info)},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=[output.fileno(), gpu_lock.fileno()],  # the run holds the locks
    )
    status = process.wait()
    processes.end(os.environ[processes.MARK])
    if status < 0:
        status = 128 - status  # ended by a signal: convert to the status that a shell returns
    seconds = int(time.monotonic() - start)
    event = {"event": "end", "run": run.name, "exit_status": status, "seconds": seconds}
    if run.is_done():
        log_event(run.runs_dir, **event, completed="yes")
    else:
        report_failure(run, event, output)


def report_failure(run: Run, event: dict[str, Any], output: IO[bytes]) -> None:
    status, seconds = event["exit_status"], event["seconds"]
    reason = f"exit status {status}, after {seconds} s"
    if run.has_status("diverged"):
        reason = DIVERGED
    elif seconds >= run.timeout:
        reason = f"not finished after {run.timeout} s (--timeout)"
    elif status == 137:
        reason = f"killed after {seconds} s, probably because the memory was full"
    output.seek(-min(2000, output.seek(0, os.SEEK_END)), os.SEEK_END)
    tail = output.read().decode(errors="replace")
    log_event(run.runs_dir, **event, completed="no", reason=reason, tail=tail)
    run.failed.write_text(f"{reason}\n")
    print(f"FAILED {run.name}: {reason}")
    for line in tail.splitlines()[-5:]:
        print(f"    {line[:200]}")


def wait_and_make(run: Run, plan: Plan, driver: int, wait: bool) -> int:
    """Execute the run when its GPU is free, unless it is complete by then; return the status."""
    # One lock per machine, user and GPU. The Slurm job is part of the name, because different jobs
    # use different GPUs with the same numbers.
    job, gpus = (os.environ.get(x, "") for x in ("SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES"))
    gpu_file = os.environ.get("TMPDIR") or "/tmp"
    gpu_file += f"/ppo-benchmark.{os.getuid()}.{job}.{gpus}.lock"
    # The file with the output of the run is also its lock.
    with open(run.state / f"{run.name}.log", "ab+") as output, open(gpu_file, "ab") as gpu_lock:
        holder = f"{run.name}, which is running already or left a process behind"
        if not lock(output, holder if wait else ""):
            return BUSY
        if not run.is_done() and not run.failed.exists():
            lock(gpu_lock, "another benchmark on this machine to finish its run")
            if not psutil.pid_exists(driver):
                return NO_MORE_RUNS
            make(run, plan, output, gpu_lock)
        # Closing is not enough: a process that outlived its run may keep the files open.
        fcntl.flock(gpu_lock, fcntl.LOCK_UN)
        fcntl.flock(output, fcntl.LOCK_UN)
    return 0


def main() -> None:
    path, number, gpu, driver, *wait = sys.argv[1:]
    plan = Plan.read(path)
    run = plan.runs[plan.missing[int(number)]]
    mark = os.environ[processes.MARK] = processes.new_mark()
    processes.end_on_signals(mark)
    if gpu != "-":
        run.gpu = gpu
        # By default, GPU 0 is the fastest GPU in CUDA, unlike in nvidia-smi.
        os.environ |= {"CUDA_VISIBLE_DEVICES": gpu, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    try:
        sys.exit(wait_and_make(run, plan, int(driver), wait == ["wait"]))
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = f"no space left in {run.runs_dir}" if is_full else error
        print(f"benchmark.sh: {reason}; stopping. Completed runs are kept.", file=sys.stderr)
        sys.exit(NO_MORE_RUNS)


if __name__ == "__main__":
    main()

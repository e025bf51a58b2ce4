"""Train by one script in as many processes as there are cores, each with its own core and seed.

    python -m studies.agents.side_by_side ppo_linen.py --seed 1 --runs-dir runs --run-name pair

Flags are the script's. With two cores that is seeds 1 and 2, in runs/pair/seed1 and seed2.
Each run.json says side_by_side, how many there were, by which the analysis knows that durations are
not those of a process alone. At the end, if all are complete, runs/pair gets a run.json as of a
program of many agents: seconds (from the start of the first to the end of the last) and, on Linux,
peak_host_bytes (the sum of theirs). A signal that ends this process kills them, and all that they
started; SIGKILL, which nobody can catch, kills them alone.
"""

import argparse
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil

TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"
CGROUP = Path("/sys/fs/cgroup/cpu.max")
PR_SET_PDEATHSIG = 1


def usable_cores() -> list[set[int]]:
    """The CPUs of each physical core that this process may use.

    The sets are empty where the system chooses: on macOS, and where a container's control group
    (its own, version 2) has less time than there are cores, as with docker run --cpus 2.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [set() for _ in range(psutil.cpu_count(logical=False) or 1)]
    cores: dict[Any, set[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            parts = ("physical_package_id", "core_id")
            place: Any = tuple(Path(TOPOLOGY.format(cpu, x)).read_text() for x in parts)
        except OSError:  # a container may hide it
            place = cpu
        cores.setdefault(place, set()).add(cpu)
    try:
        quota, period = map(float, CGROUP.read_text().split())
    except (OSError, ValueError):  # none, or "max"
        return list(cores.values())
    number = max(1, int(quota / period))
    return [set() for _ in range(number)] if number < len(cores) else list(cores.values())


def die_with(parent: int) -> None:
    """In a new process: let the kernel kill it when its parent dies, be it by SIGKILL."""
    with suppress(AttributeError, OSError):  # Linux alone has this
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it is dead already
        os._exit(1)


def fail(reason: str, status: int = 2) -> NoReturn:
    print(f"studies.agents.side_by_side: {reason}", file=sys.stderr)
    sys.exit(status)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file in one piece: it is there as a whole, or not at all."""
    partial = path.with_suffix(".partial")
    with open(partial, "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def train(script: str, flags: list[str], seed: int, folder: Path, cores: list[set[int]]) -> None:
    """Run the script in a process on each core; end this one where any of them fails."""
    children: dict[str, subprocess.Popen] = {}

    def stop(number: int, _: Any) -> None:
        for child in children.values():
            with suppress(ProcessLookupError):  # it leads a group, which may outlive it
                os.killpg(child.pid, signal.SIGKILL)
        os._exit(128 + number)  # at once: what it interrupts may be waiting for one of them

    ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    for number in ends:
        signal.signal(number, stop)
    # JAX would take most of a GPU's memory for the first process.
    environ, parent = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ, os.getpid()
    said = json.loads(environ.get("RUN_INFO") or "{}")
    environ["RUN_INFO"] = json.dumps(said | {"side_by_side": len(cores)})
    start = time.perf_counter()

    def begin(cpus: set[int]) -> None:  # in the new process
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
        if cpus:  # or the threads of each, as many as there are cores, would wait for each other
            os.sched_setaffinity(0, cpus)
        die_with(parent)

    for own_seed, cpus in enumerate(cores, seed):
        name = f"seed{own_seed}"
        words = [sys.executable, script, *flags, "--seed", str(own_seed)]
        words += ["--runs-dir", str(folder), "--run-name", name]
        # A signal waits until the process is on the list of those that it kills.
        signal.pthread_sigmask(signal.SIG_BLOCK, ends)
        children[name] = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,
            preexec_fn=partial(begin, cpus),
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
    codes = {name: child.wait() for name, child in children.items()}
    seconds = time.perf_counter() - start
    failed = [f"{name} ended with status {code}" for name, code in codes.items() if code]
    if failed:
        fail(f"{' and '.join(failed)}: {shlex.join([script, *flags])}", 1)
    own = {"status": "completed", "args": {"num_agents": len(cores)}, "seconds": seconds}
    infos = [json.loads((folder / name / "run.json").read_text()) for name in children]
    if all("peak_host_bytes" in info for info in infos):
        own["peak_host_bytes"] = sum(info["peak_host_bytes"] for info in infos)
    (folder / "metrics.jsonl").touch()
    write_json(folder / "run.json", own)


def main() -> None:
    name, lines = "python -m studies.agents.side_by_side", (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog=name, description=lines[0], allow_abbrev=False)
    parser.add_argument("script", help="such as ppo_linen.py; its flags follow")
    parser.add_argument("--seed", type=int, default=1, help="of the first process")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--run-name", help="folder in it; default side_by_side__SCRIPT__SEED__TIME")
    args, flags = parser.parse_known_args()
    if Path(args.script).suffix != ".py" or not Path(args.script).is_file():
        fail(f"the first word must be a script, such as ppo_linen.py, not {args.script}")
    if Path(args.script).stem.endswith("_vmap"):
        fail(f"{args.script} trains several agents already")
    for flag in ("--resume", "--track"):
        if any(x.partition("=")[0] == flag for x in flags):
            fail(f"{flag} is for a process alone")
    stem = Path(args.script).stem
    own = args.run_name or f"side_by_side__{stem}__{args.seed}__{time.time():.0f}"
    folder, cores = args.runs_dir / own, usable_cores()
    try:
        folder.mkdir(parents=True)
        train(args.script, flags, args.seed, folder, cores)
    except OSError as error:
        fail(f"{folder}: {error.strerror}")
    except (ValueError, TypeError) as error:
        fail(f"{folder} has a run.json that is none: {error!r}", 1)


if __name__ == "__main__":
    main()

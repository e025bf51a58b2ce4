"""Train by one script in as many processes as there are cores, each with its own core and seed.

    python -m studies.agents.side_by_side ppo_linen.py --seed 1 --runs-dir runs --run-name pair

Flags are the script's. With two cores that is seeds 1 and 2, in runs/pair/seed1 and seed2.
Each run.json says side_by_side, how many there were, by which the analysis knows that durations are
not those of a process alone. At the end, if all are complete, runs/pair gets a run.json as of a
program of many agents: seconds (from the start of the first to the end of the last) and
peak_host_bytes (the sum of theirs). A signal that ends this process kills them, and all that they
started; SIGKILL, which nobody can catch, kills them alone. It needs Linux, with setpriv and taskset
of util-linux.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
CGROUP = Path("/sys/fs/cgroup/cpu.max")
# The kernel kills the process when its parent dies.
DIE_TOO = ["setpriv", "--pdeathsig", "KILL"]


def usable_cores() -> list[set[int]]:
    """The CPUs of each physical core that this process may use.

    A container's control group (its own, version 2) may give it the time of fewer, as with docker
    run --cpus 2.
    """
    cores: dict[str, set[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        core = str(cpu)
        with suppress(OSError):  # a container may hide it
            core = Path(SIBLINGS.format(cpu)).read_text()
        cores.setdefault(core, set()).add(cpu)
    found = list(cores.values())
    with suppress(OSError, ValueError):  # there is no such group, or it says "max"
        quota, period = map(int, CGROUP.read_text().split())
        return found[: max(1, quota // period)]
    return found


def train(script: str, flags: list[str], seed: int, folder: Path) -> None:
    """Run the script in a process on each core; end this one where any of them fails."""
    children: dict[str, subprocess.Popen] = {}
    cores = usable_cores()

    def stop(number: int, _: Any) -> None:
        for child in children.values():
            with suppress(ProcessLookupError):  # it leads a group, which may outlive it
                os.killpg(child.pid, signal.SIGKILL)
        os._exit(128 + number)  # at once: what it interrupts may be waiting for one of them

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    # JAX would take most of a GPU's memory for the first process.
    environ = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
    info = json.loads(environ.get("RUN_INFO", "{}"))
    start = time.perf_counter()
    info |= {"side_by_side": len(cores), "launched": time.time()}
    environ["RUN_INFO"] = json.dumps(info)
    for own_seed, cpus in enumerate(cores, seed):
        name = f"seed{own_seed}"
        # Or the threads of each, as many as there are cores, would wait for each other.
        pin = ["taskset", "--cpu-list", ",".join(map(str, cpus))]
        words = [*DIE_TOO, *pin, sys.executable, "-m", "studies.agents.peak", script, *flags]
        words += ["--seed", str(own_seed), "--runs-dir", str(folder), "--run-name", name]
        children[name] = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, env=environ, start_new_session=True
        )
    codes = {name: child.wait() for name, child in children.items()}
    seconds = time.perf_counter() - start
    failed = [f"{name} ended with status {code}" for name, code in codes.items() if code]
    if failed:
        sys.exit(f"{' and '.join(failed)}: {shlex.join([script, *flags])}")
    infos = [json.loads((folder / name / "run.json").read_text()) for name in children]
    own = {
        "status": "completed",
        "args": {"num_agents": len(cores)},
        "seconds": seconds,
        "peak_host_bytes": sum(info["peak_host_bytes"] for info in infos),
    }
    (folder / "metrics.jsonl").touch()
    part = folder / "run.partial"  # run.json is there as a whole, or not at all
    part.write_text(json.dumps(own))
    part.replace(folder / "run.json")


def main() -> None:
    name, lines = "python -m studies.agents.side_by_side", (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog=name, description=lines[0], allow_abbrev=False)
    parser.add_argument("script", help="such as ppo_linen.py; its flags follow")
    parser.add_argument("--seed", type=int, default=1, help="of the first process")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--run-name", required=True, help="a new folder in it")
    args, flags = parser.parse_known_args()
    folder = args.runs_dir / args.run_name
    if folder.exists():
        parser.error(f"{folder} exists: choose another --run-name")
    folder.mkdir(parents=True)
    train(args.script, flags, args.seed, folder)


if __name__ == "__main__":
    main()

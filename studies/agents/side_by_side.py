"""Run a script in one process per core, each with a different seed.

    python -m studies.agents.side_by_side ppo_linen.py --seed 1 --runs-dir runs --run-name pair

All other flags are passed to the script. With two cores this trains with seeds 1 and 2, in
runs/pair/seed1 and seed2. In each run.json, side_by_side is the number of processes, which
tells the analysis that the process did not run alone. If all processes complete, this program
writes a run.json to runs/pair, like a program that trains many agents. It contains seconds (from
the start of the first process to the end of the last) and peak_host_bytes (the sum over
processes). A signal that ends this program also kills its children and their descendants; SIGKILL,
which cannot be caught, only kills the children. Needs Linux, and setpriv and taskset from
util-linux.
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
# With this prefix, the kernel kills a process when its parent dies.
DIE_TOO = ["setpriv", "--pdeathsig", "KILL"]


def usable_cores() -> list[set[int]]:
    """Return the CPUs of each physical core that this process may use.

    A control group (version 2) may limit the process to fewer cores, as with docker run --cpus 2.
    """
    cores: dict[str, set[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        core = str(cpu)
        with suppress(OSError):  # containers may hide this file
            core = Path(SIBLINGS.format(cpu)).read_text(encoding="utf-8")
        cores.setdefault(core, set()).add(cpu)
    found = list(cores.values())
    with suppress(OSError, ValueError):  # no control group, or no limit ("max")
        quota, period = map(int, CGROUP.read_text(encoding="utf-8").split())
        return found[: max(1, quota // period)]
    return found


def train(script: str, flags: list[str], seed: int, folder: Path) -> None:
    """Run the script in one process per core; exit with an error if one of them fails."""
    children: dict[str, subprocess.Popen] = {}
    cores = usable_cores()

    def stop(number: int, _: Any) -> None:
        for child in children.values():
            with suppress(ProcessLookupError):  # the process group may already be gone
                os.killpg(child.pid, signal.SIGKILL)
        os._exit(128 + number)  # exit at once, because the main thread may be waiting for a child

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    # Otherwise the first JAX process would reserve most of the GPU memory.
    environ = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
    info = json.loads(environ.get("RUN_INFO", "{}"))
    start = time.perf_counter()
    info |= {"side_by_side": len(cores), "launched": time.time()}
    environ["RUN_INFO"] = json.dumps(info)
    for process_seed, cpus in enumerate(cores, seed):
        name = f"seed{process_seed}"
        # Pin each process to its core; otherwise each would start one thread per core.
        pin = ["taskset", "--cpu-list", ",".join(map(str, cpus))]
        words = [*DIE_TOO, *pin, sys.executable, "-m", "studies.agents.peak", script, *flags]
        words += ["--seed", str(process_seed), "--runs-dir", str(folder), "--run-name", name]
        children[name] = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, env=environ, start_new_session=True
        )
    codes = {name: child.wait() for name, child in children.items()}
    seconds = time.perf_counter() - start
    failed = [f"{name} ended with status {code}" for name, code in codes.items() if code]
    if failed:
        sys.exit(f"{' and '.join(failed)}: {shlex.join([script, *flags])}")
    infos = [
        json.loads((folder / name / "run.json").read_text(encoding="utf-8")) for name in children
    ]
    summary = {
        "status": "completed",
        "args": {"num_agents": len(cores)},
        "seconds": seconds,
        "peak_host_bytes": sum(info["peak_host_bytes"] for info in infos),
    }
    (folder / "metrics.jsonl").touch()
    part = folder / "run.partial"  # write run.json atomically
    part.write_text(json.dumps(summary))
    part.replace(folder / "run.json")


def main() -> None:
    name, lines = "python -m studies.agents.side_by_side", (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog=name, description=lines[0], allow_abbrev=False)
    parser.add_argument("script", help="such as ppo_linen.py; its flags follow")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first process")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--run-name", required=True, help="new folder in --runs-dir")
    args, flags = parser.parse_known_args()
    folder = args.runs_dir / args.run_name
    if folder.exists():
        parser.error(f"{folder} exists: choose another --run-name")
    folder.mkdir(parents=True)
    train(args.script, flags, args.seed, folder)


if __name__ == "__main__":
    main()

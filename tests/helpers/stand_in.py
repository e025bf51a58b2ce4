"""Stand-in for a training script, to test benchmark.sh quickly.

It writes the same files as a script. The environment variable STAND_IN is a JSON object that maps
part of a run name to a kind of failure. When a run starts, hangs or ends, it adds a line to the
file that the environment variable TRACE names.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def trace(event: str) -> None:
    with open(os.environ["TRACE"], "a") as file:
        file.write(f"{event} {folder.name} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}\n")


def write_info(status: str) -> None:
    variables = {name: x for name, x in os.environ.items() if name.startswith(VARIABLES)}
    info = {"status": status, "args": flags, "variables": variables, "folder": os.getcwd()}
    info["machine"] = json.loads(os.environ["RUN_INFO"])
    info["first"] = first
    (folder / "run.new").write_text(json.dumps(info, indent=2))
    os.replace(folder / "run.new", folder / "run.json")


VARIABLES = ("CUDA_", "WANDB_", "JAX_", "TORCHINDUCTOR_")
flags = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
resumed = flags.get("--resume")
folder = Path(resumed or Path(flags["--runs-dir"], flags["--run-name"]))
checkpoint = folder / "checkpoint.msgpack"
if folder.exists() and not resumed:
    sys.exit(f"--run-name must be new in --runs-dir, not {folder.name}")
folder.mkdir(parents=True, exist_ok=True)
trace("start")
first = int(checkpoint.read_text()) if resumed else 0
write_info("running")
plans = json.loads(os.environ["STAND_IN"])
plan = next((plan for part, plan in plans.items() if part in folder.name), "")
if plan == "crash":
    raise RuntimeError("shapes do not match \N{SNOWMAN}")
if plan == "killed" and not resumed:
    checkpoint.write_text("8")
    os.kill(os.getpid(), signal.SIGKILL)
if plan == "hang":
    # The child is in a new session, and inherits the open files of this process.
    subprocess.Popen(["sleep", "1000"], start_new_session=True, close_fds=False)
    trace("hang")
    time.sleep(1000)
if plan == "fill":  # as if the disk was full from now on
    log = folder.parent / "benchmark.jsonl"
    log.unlink()
    log.symlink_to("/dev/full")
if plan.startswith("0."):
    time.sleep(float(plan))
if plan == "diverged":
    write_info("diverged")
    sys.exit("Diverged: NaN or infinite losses in iteration 7.")
if plan != "silent":
    write_info("completed")
trace("end")

"""Stands in for a training script where the real ones would be too slow to test the driver with.

It writes the same files into the same folder. STAND_IN is JSON: a part of a run's name -> how that
run misbehaves. TRACE names a file that gets a line as a run begins and one as it ends.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def trace(event: str) -> None:
    if name := os.environ.get("TRACE"):
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        with open(name, "a") as file:
            file.write(
                f"{event} {folder.name} gpu={gpu} wandb={os.environ.get('WANDB_MODE', '')}\n"
            )


flags = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
folder = Path(flags["--runs-dir"], flags["--run-name"])
if folder.exists():
    sys.exit(f"--run-name must be new in --runs-dir, not {folder.name}")
folder.mkdir(parents=True)
trace("start")
plans = json.loads(os.environ.get("STAND_IN", "{}"))
plan = next((plan for part, plan in plans.items() if part in folder.name), "")
with open(folder / "metrics.jsonl", "w") as metrics:
    print(json.dumps({"iteration": 0}), file=metrics, flush=True)
    if plan == "crash":
        raise RuntimeError("shapes do not match \N{SNOWMAN}")
    if plan == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if plan == "fill":
        metrics.write(" " * 100_000_000)
    if plan == "daemon":
        process = subprocess.Popen(
            ["sleep", "1000"], env={}, start_new_session=True, close_fds=False
        )
        (folder / "daemon").write_text(str(process.pid))
    if plan == "hang":
        subprocess.Popen(["sh", "-c", "sleep 1000 &"], start_new_session=True, close_fds=False)
        print("hangs", flush=True)
        time.sleep(1000)
    if plan.startswith("0."):
        time.sleep(float(plan))
if plan != "silent":
    variables = {name: x for name, x in os.environ.items() if name.startswith(("CUDA_", "WANDB_"))}
    machine = json.loads(os.environ.get("RUN_INFO", "{}"))
    info = {"args": flags, "variables": variables, "machine": machine}
    info["folder"] = os.getcwd()
    (folder / "run.json.partial").write_text(json.dumps(info))
    os.rename(folder / "run.json.partial", folder / "run.json")
trace("end")

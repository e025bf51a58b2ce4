"""Stands in for a training script where the real ones would be too slow to test the driver with.

It writes the same files into the same folder. STAND_IN is JSON: a part of a run's name -> how that
run misbehaves. TRACE names a file that gets a line as a run begins, one for each iteration of a
long one, and one as it ends.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def trace(event: str) -> None:
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    with open(os.environ["TRACE"], "a") as file:
        file.write(f"{event} {folder.name} gpu={gpu} wandb={os.environ.get('WANDB_MODE', '')}\n")


flags = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
resumed = flags.get("--resume")
folder = Path(resumed or Path(flags["--runs-dir"], flags["--run-name"]))
if folder.exists() and not resumed:
    sys.exit(f"--run-name must be new in --runs-dir, not {folder.name}")
folder.mkdir(parents=True, exist_ok=True)
trace("start")
plans = json.loads(os.environ.get("STAND_IN", "{}"))
plan = next((plan for part, plan in plans.items() if part in folder.name), "")
first = int((folder / "checkpoint.npz").read_text()) if resumed else 0
with open(folder / "metrics.jsonl", "a") as metrics:
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
    for iteration in range(first, 12 if plan == "long" else 0):
        trace(f"iteration-{iteration}")
        time.sleep(0.05)
        if resumed or "--save-every" in flags:
            (folder / "partial").write_text(str(iteration + 1))
            os.replace(folder / "partial", folder / "checkpoint.npz")
if plan != "silent":
    variables = {name: x for name, x in os.environ.items() if name.startswith(("CUDA_", "WANDB_"))}
    info = {"args": flags, "variables": variables, "folder": os.getcwd(), "first": first}
    info["machine"] = json.loads(os.environ.get("RUN_INFO", "{}"))
    (folder / "run.json.partial").write_text(json.dumps(info))
    os.rename(folder / "run.json.partial", folder / "run.json")
trace("end")

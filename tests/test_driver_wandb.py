"""--track; and one small grid of real scripts, from its start to its report and to W&B."""

import json
import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager

import psutil
from conftest import ROOT
from test_driver import add_tool, bench, completed, environment, info_of, project, succeed
from wandb_server import WandbServer

from analysis.runs import load

__all__ = ["project"]  # a fixture


@contextmanager
def serving():
    server = WandbServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def without_settings(tmp_path, **variables):
    """An environment in which no settings of W&B count but these."""
    env = environment(tmp_path) | {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    return {name: x for name, x in env.items() if not name.startswith("WANDB_")} | variables


def key_for(url):
    return {"WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40}


def test_groups_and_notes_and_online_only_where_a_server_answers(project):
    """The driver waits 30 s for it, of which a stand-in for that call of timeout makes 2."""
    flags = ("quick", "--only", "linen", "--track", "--notes", "it's\n@5")
    another = {"WANDB_RUN_GROUP": "another", "WANDB_NOTES": "another"}
    with serving() as server:
        env = without_settings(project, **key_for(server.url), **another)
        succeed(project, *flags, "--repeats", "1", env=env)
    own = '#!/bin/sh\n[ "$1" = 30 ] && shift && set -- 2 "$@"\n'
    add_tool(project, "timeout", f'{own}exec {shutil.which("timeout")} "$@"\n')
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        succeed(project, *flags, "--repeats", "2", env=without_settings(project, **key_for(url)))
    for repeat, mode in ((1, "online"), (2, "offline")):
        variables = info_of(project, completed(project)[repeat - 1])["variables"]
        assert variables["WANDB_RUN_GROUP"] == f"quick-repeat{repeat}"
        assert (variables["WANDB_NOTES"], variables["WANDB_MODE"]) == ("it's\n@5", mode)
        assert variables["WANDB_FINISH_TIMEOUT"] == "60"


def test_a_small_real_grid(tmp_path):
    """Of a script and of a copy under another name, offline; what is sent later is complete."""
    shutil.copy(ROOT / "ppo_linen.py", tmp_path / "mine.py")
    runs, scripts = tmp_path / "runs", f"linen,{tmp_path}/mine.py"
    flags = ("--scripts", scripts, "--iterations", "1", "--runs-dir", str(runs))
    env = without_settings(tmp_path, XLA_FLAGS="--xla_backend_optimization_level=0")
    driver = bench(ROOT, *flags, "--track", "--notes", "a note", env=env)
    assert driver.returncode == 0, driver.stdout + driver.stderr
    names = completed(tmp_path)
    for name in names:
        run = info_of(tmp_path, name)
        assert run["status"] == "completed" and run["peak_host_bytes"] > 0
        assert len(run["machine"]) == 8 and run["cores"] == psutil.cpu_count(logical=False)
    assert sorted(load(runs).runs["mode"]) == ["mine", "ppo_linen"]
    report, send, end = driver.stdout.splitlines()[-3:]
    assert report == f"Report: {runs}/report/report.html"
    assert end == f"Runs complete: 2 of 2, in {runs}."
    what, _, command = send.partition(": ")
    assert what == "To send the offline runs to W&B"
    with serving() as server:
        env = without_settings(tmp_path, **key_for(server.url))
        subprocess.run(command, shell=True, cwd=ROOT, env=env, check=True, capture_output=True)
    sent = {run["name"]: run for run in server.runs.values()}
    assert sorted(sent) == names
    for run in sent.values():
        assert (run["group"], run["notes"]) == ("custom-repeat1", "a note")
        assert json.loads(run["config"])["framework"]["value"] == "linen"
        assert len(run["history"]) == 1 and "charts/SPS" in run["history"][0]

"""--track with the real W&B client: offline, and against a small server on loopback."""

import json
import os
import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from test_driver import ROOT, bench, cell_of, completed, environment, project, trace

__all__ = ["project"]  # a fixture

KEY = "a" * 40
TIMEOUT = shutil.which("timeout")
GRID = ["--scripts", "linen", "--iterations", "1", "--track", "--notes", "a note", "--no-report"]


@contextmanager
def server(leaves=False):
    """Say yes to whatever the client asks; yield the address, and the bodies of its requests.

    If it leaves, it does so as soon as a run has begun.
    """
    requests = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            requests.append((self.path, body))
            data = {}
            if self.path == "/graphql":
                query = json.loads(body)["query"]
                if "viewer" in query:
                    data = {"viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}"}}
                if "upsertBucket" in query:
                    owner = {"id": "3", "name": "me"}
                    place = {"id": "4", "name": "p", "entity": owner}
                    bucket = {"id": "2", "name": "run", "config": "{}", "project": place}
                    data = {"upsertBucket": {"bucket": bucket, "inserted": True}}
                if "createRunFiles" in query:
                    data = {"createRunFiles": {"runID": "2", "uploadHeaders": [], "files": []}}
            reply = json.dumps({"data": data}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)
            if leaves and "upsertBucket" in data:
                threading.Thread(target=close).start()

        def log_message(self, format, *args):
            pass

    def close():
        http.shutdown()
        http.server_close()

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", requests
    finally:
        close()


def tracked(tmp_path, *flags, **variables):
    """Run a grid with --track and the real script; no home folder's key or settings count."""
    env = environment(tmp_path) | {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    env = {name: x for name, x in env.items() if not name.startswith("WANDB_")} | variables
    command = [ROOT / "benchmark.sh", *GRID, *flags, "--runs-dir", tmp_path / "runs"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_without_a_key_runs_are_offline_and_can_be_sent_later(tmp_path):
    driver = tracked(tmp_path)
    assert driver.returncode == 0, driver.stdout + driver.stderr
    (name,) = completed(tmp_path)
    (command,) = [x for x in driver.stdout.splitlines() if x.startswith("To send the offline runs")]
    command = command.partition(": ")[2]
    with server() as (url, requests):
        env = environment(tmp_path) | {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY}
        env.pop("WANDB_MODE", None)
        sync = subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True)
        assert sync.returncode == 0, sync.stderr
    check_upload(requests, name)


def test_with_a_key_and_a_server_runs_are_online(tmp_path):
    with server() as (url, requests):
        driver = tracked(tmp_path, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
    assert driver.returncode == 0, driver.stdout + driver.stderr
    assert "offline" not in driver.stdout
    check_upload(requests, *completed(tmp_path))


def check_upload(requests, name):
    """The run arrived with group, name, notes and configuration, and with its history."""
    bodies = [json.loads(body) for path, body in requests if path == "/graphql"]
    upserts = [body["variables"] for body in bodies if "upsertBucket" in body["query"]]
    run = next(x for x in upserts if x.get("groupName"))
    assert (run["groupName"], run["displayName"]) == ("custom-repeat1", name)
    assert run["notes"] == "a note"
    assert json.loads(run["config"])["framework"]["value"] == "linen"
    history = b"".join(body for path, body in requests if path.endswith("/file_stream"))
    assert b"charts/SPS" in history


def test_a_server_that_goes_away_does_not_stop_the_grid(tmp_path):
    with server(leaves=True) as (url, requests):
        own = {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY, "WANDB_FINISH_TIMEOUT": "1"}
        driver = tracked(tmp_path, **own)
    assert driver.returncode == 0, driver.stdout + driver.stderr
    assert len(completed(tmp_path)) == 1 and ", W&B online" in driver.stdout
    assert not any(path.endswith("/file_stream") for path, _ in requests)


def test_a_server_that_never_answers_does_not_stop_the_grid(project):
    """It takes the connection, and then says nothing; the stand-ins only show which mode is set.

    The driver waits for it for 30 s, of which a stand-in for that one call of timeout makes 5.
    """
    sooner = project / "tools/timeout"
    sooner.write_text(f'#!/bin/sh\n[ "$1" = 30 ] && shift && set -- 5 "$@"\nexec {TIMEOUT} "$@"\n')
    sooner.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        os.environ |= {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY}
        mode = os.environ.pop("WANDB_MODE")
        try:
            driver = bench(project, "--only", "linen", "--repeats", "1", "--track")
        finally:
            os.environ["WANDB_MODE"] = mode
            del os.environ["WANDB_BASE_URL"], os.environ["WANDB_API_KEY"]
    assert driver.returncode == 0, driver.stdout + driver.stderr
    assert {words[3] for words in trace(project)} == {"wandb=offline"}


def test_groups_are_presets_and_repeats(project, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_GROUP", "another")
    monkeypatch.setenv("WANDB_NOTES", "another")
    flags = ("--scripts", "linen", "--repeats", "2", "--no-report", "--track")
    for notes in ("it's\n@5", ""):
        assert bench(project, *flags, *(["--notes", notes] if notes else [])).returncode == 0
        for name in completed(project):
            path = project / "runs" / name / "run.json"
            variables = json.loads(path.read_text())["variables"]
            assert variables["WANDB_RUN_GROUP"] == f"custom-repeat{cell_of(name)['seed']}"
            assert variables["WANDB_NOTES"] == (notes or "another")
            path.unlink()


def test_without_tracking_no_command_names_wandb(project):
    assert " --track " not in bench(project, "--list").stdout
    for line in bench(project, "--list", "--track", "--notes", "a note").stdout.splitlines():
        assert " --track " in line and "wandb" not in line and "note" not in line

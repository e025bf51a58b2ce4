"""--track with the real W&B client: offline, and against a small server on loopback."""

import json
import os
import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager

import pytest
from test_driver import ROOT, add_tool, bench, completed, environment, info_of, project, succeed
from wandb_server import WandbServer

__all__ = ["project"]  # a fixture

GRID = ["--scripts", "linen", "--iterations", "1", "--track", "--notes", "a note", "--no-report"]


class Server(WandbServer):
    """Keeps what it is told of runs; leaves, if it is to, as soon as one has begun."""

    upserts: list
    leaves = False

    def answer(self, query, variables):
        if "UpsertBucket" in query:
            self.upserts.append(variables)
            if self.leaves:
                threading.Thread(target=self.leave).start()
        return super().answer(query, variables)

    def leave(self):
        self.shutdown()
        self.server_close()


@contextmanager
def serving(leaves=False):
    server = Server()
    server.upserts, server.leaves = [], leaves
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.leave()


def tracked(tmp_path, **variables):
    """Run a grid with --track and the real script; no home folder's key or settings count."""
    env = environment(tmp_path) | {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    env = {name: x for name, x in env.items() if not name.startswith("WANDB_")} | variables
    driver = bench(ROOT, *GRID, "--runs-dir", str(tmp_path / "runs"), env=env)
    assert driver.returncode == 0, driver.stdout + driver.stderr
    assert len(completed(tmp_path)) == 1
    return driver.stdout


def key_of(server):
    return {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40}


@pytest.mark.parametrize("key", [False, True])
def test_a_run_arrives_now_or_when_it_is_sent_later(tmp_path, key):
    """With group, name, notes and configuration, and with its history."""
    with serving() as server:
        said = tracked(tmp_path, **(key_of(server) if key else {}))
        assert ("offline" in said) == (not key)
        if not key:
            (line,) = [x for x in said.splitlines() if x.startswith("To send the offline runs")]
            env = {**environment(tmp_path), **key_of(server)}
            del env["WANDB_MODE"]
            subprocess.run(line.partition(": ")[2], shell=True, cwd=ROOT, env=env, check=True)
    sent = next(x for x in server.upserts if x.get("groupName"))
    name = completed(tmp_path)[0]
    found = [sent["groupName"], sent["displayName"], sent["notes"]]
    assert found == ["custom-repeat1", name, "a note"]
    assert json.loads(sent["config"])["framework"]["value"] == "linen"
    (run,) = server.runs.values()
    assert "charts/SPS" in run["history"][0]


def test_a_server_that_goes_away_does_not_stop_the_grid(tmp_path):
    with serving(leaves=True) as server:
        said = tracked(tmp_path, WANDB_FINISH_TIMEOUT="1", **key_of(server))
    assert ", W&B online" in said
    assert not any(run["history"] for run in server.runs.values())


def test_a_server_that_never_answers_does_not_stop_the_grid(project):
    """The driver waits 30 s for it, of which a stand-in for that call of timeout makes 2."""
    own = '#!/bin/sh\n[ "$1" = 30 ] && shift && set -- 2 "$@"\n'
    add_tool(project, "timeout", f'{own}exec {shutil.which("timeout")} "$@"\n')
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = environment(project) | {"WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40}
        del env["WANDB_MODE"]
        succeed(project, "--scripts", "linen", "--track", env=env)
    (name,) = completed(project)
    assert info_of(project, name)["variables"]["WANDB_MODE"] == "offline"


def test_groups_are_studies_and_repeats(project):
    another = {"WANDB_RUN_GROUP": "another", "WANDB_NOTES": "another"}
    flags = ("quick", "--only", "linen", "--repeats", "2", "--track", "--notes", "it's\n@5")
    succeed(project, *flags, env=environment(project) | another)
    for repeat, name in enumerate(completed(project), 1):
        variables = info_of(project, name)["variables"]
        assert variables["WANDB_RUN_GROUP"] == f"quick-repeat{repeat}"
        assert variables["WANDB_NOTES"] == "it's\n@5"
    env = os.environ | environment(project)
    for flags, expected in ((("agents",), {False}), (("agents", "--track"), {True, False})):
        lines = succeed(ROOT, *flags, "--list", env=env).splitlines()
        assert {" --track " in line for line in lines} == expected
        # It could not tell those side by side from runs that had the machine for themselves.
        assert not any(" --track " in line for line in lines if "side_by_side" in line)

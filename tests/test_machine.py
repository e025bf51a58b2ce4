"""What benchmark.sh tells a run of its machine, in RUN_INFO."""

import json
import os
import re
import subprocess
import sys

import psutil
from conftest import ROOT

from studies import machine


def test_what_is_known_of_a_machine_and_of_a_script(tmp_path):
    """What a tool says as it fails is no answer, wherever it says it."""
    tools = tmp_path / "tools"
    tools.mkdir()
    script = tmp_path / "ppo_mine.py"
    script.write_text("")

    def add_tool(name, text):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)

    def said():
        env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
        command = [sys.executable, "-IS", ROOT / "studies/machine.py", script]
        done = subprocess.run(command, env=env, check=True, capture_output=True)
        return json.loads(done.stdout)

    assert said()["git_commit"] is None
    git = ["git", "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "ppo_mine.py"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    first = said()
    assert re.fullmatch("[0-9a-f]{40}", first["git_commit"])
    assert first["cores"] == psutil.cpu_count(logical=False) and first["load"] >= 0
    assert isinstance(first["container"], bool) and isinstance(first["cpu"], str)
    script.write_text("# changed\n")
    add_tool("nvidia-smi", "echo 'a, b' >&2 && echo '570.1, NVIDIA H200, x'")
    second = said()
    assert (second["driver"], second["gpu"]) == ("570.1", "NVIDIA H200, x")
    assert second["git_commit"] == first["git_commit"] + "-dirty"
    assert second["machine"] == first["machine"]
    for name in ("nvidia-smi", "lscpu", "git"):
        add_tool(name, "echo 'Model name: it has failed' && exit 9")
    failed = said()
    assert failed["gpu"] is failed["driver"] is failed["git_commit"] is None
    assert "failed" not in str(failed)


def test_the_machine_is_a_hash_of_its_id_or_of_its_boot(monkeypatch):
    boot = "/proc/sys/kernel/random/boot_id"
    for files, expected in (
        ({"/etc/machine-id": "abc"}, ("ba7816bf", None)),
        ({"/etc/machine-id": "", boot: "abc"}, ("ba7816bf", "ba7816bf")),
        ({"/etc/machine-id": "abd", boot: "abc"}, ("a52d159f", "ba7816bf")),
        ({}, (None, None)),
    ):
        monkeypatch.setattr(machine, "read", lambda path, files=files: files.get(str(path)))
        found = machine.describe()
        assert (found["machine"], found["boot"]) == expected

"""What a run is told of its machine, in RUN_INFO."""

import re
import shutil
import subprocess

import psutil
from test_driver import ONE, add_tool, completed, info_of, project, succeed

from studies import machine

__all__ = ["project"]  # a fixture


def test_a_run_is_told_what_machine_it_is_on(project):
    """What a tool says as it fails is no answer, wherever it says it."""
    git = ["git", "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "ppo_linen.py"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=project, check=True)
    succeed(project, "--scripts", "linen,torch", "--no-report")
    torch, linen = (info_of(project, x)["machine"] for x in reversed(completed(project)))
    assert re.fullmatch("[0-9a-f]{40}", linen["git_commit"]) and torch["git_commit"] is None
    assert linen["cores"] == psutil.cpu_count(logical=False) and linen["load"] >= 0
    assert isinstance(linen["container"], bool) and isinstance(linen["cpu"], str)
    with open(project / "ppo_linen.py", "a") as file:
        file.write("# changed\n")
    add_tool(project, "nvidia-smi", "#!/bin/sh\necho 'a, b' >&2 && echo '570.1, NVIDIA H200, x'\n")
    shutil.rmtree(project / "runs")
    succeed(project, *ONE)
    gpu = info_of(project, *completed(project))["machine"]
    assert (gpu["driver"], gpu["gpu"]) == ("570.1", "NVIDIA H200, x")
    assert gpu["git_commit"] == linen["git_commit"] + "-dirty"
    assert gpu["machine"] == linen["machine"]
    for name in ("nvidia-smi", "lscpu", "git"):
        add_tool(project, name, "#!/bin/sh\necho 'Model name: it has failed' && exit 9\n")
    shutil.rmtree(project / "runs")
    succeed(project, *ONE)
    failed = info_of(project, *completed(project))["machine"]
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

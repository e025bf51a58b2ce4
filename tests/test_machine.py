"""What benchmark.sh tells a run of its machine, in RUN_INFO."""

import json
import os
import re
import subprocess
import sys

import psutil
from conftest import ROOT


def test_what_is_known_of_a_machine_and_of_a_script(tmp_path):
    """What a tool says as it fails is no answer, wherever it says it."""
    script = tmp_path / "ppo_mine.py"
    script.write_text("")

    def said(text):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{text}\n")
        tool.chmod(0o755)
        env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = [sys.executable, "-IS", ROOT / "studies/machine.py", script]
        done = subprocess.run(command, env=env, check=True, capture_output=True)
        return json.loads(done.stdout)

    failed = said("echo 'it has failed, truly' && exit 9")
    assert failed["gpu"] is failed["driver"] is failed["git_commit"] is None
    git = ["git", "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "ppo_mine.py"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    script.write_text("# changed\n")
    found = said("echo 'a, b' >&2 && echo '570.1, NVIDIA H200, x'")
    assert (found["driver"], found["gpu"]) == ("570.1", "NVIDIA H200, x")
    assert re.fullmatch("[0-9a-f]{40}-dirty", found["git_commit"])
    assert re.fullmatch("[0-9a-f]{8}", found["machine"])
    assert found["cores"] == psutil.cpu_count(logical=False)

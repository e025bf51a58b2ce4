"""setup.sh, with a mock of Python that records the pip commands, and bench/machine.py."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, start_process
from driving import add_tool

from bench import machine

PYTHON = """#!/bin/bash
case "$*" in
*" install "*)
  read -rt "${SLOW:-0}" <> <(:)
  line=$*
  echo "${line#*--no-input }" >>"$CALLS"
  [[ -z $FAIL || "$*" != *"$FAIL"* ]]
  ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
"""
TOOLS = "bash cat cksum cp cut dirname du find flock grep mkdir readlink uname"
SOURCE = "set -euo pipefail; source ./setup.sh; command -v python"
LOCKED = "--no-compile --constraint requirements-lock.txt --requirement"


@pytest.fixture
def project(tmp_path):
    for path in [ROOT / "setup.sh", *ROOT.glob("requirements*.txt")]:
        shutil.copy(path, tmp_path)
    add_tool(tmp_path, "python3.12", PYTHON)
    for tool in TOOLS.split():
        (tmp_path / "tools" / tool).symlink_to(str(shutil.which(tool)))
    return tmp_path


def start(project, **variables):
    """Start a shell that sources setup.sh and prints the path of python. PATH is project/tools."""
    own = {"PATH": str(project / "tools"), "CALLS": str(project / "calls"), "FAIL": ""}
    env = {name: x for name, x in os.environ.items() if name != "VENV"} | own | variables
    return start_process(["bash", "-c", SOURCE], project, env)


def setup(project, **variables):
    process = start(project, **variables)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout.splitlines(), stderr.splitlines()


def calls(project):
    path = project / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_setup_installs_once_and_again_after_changes_and_failures(project):
    code, said, _ = setup(project, FAIL="download.pytorch.org")
    assert code == 0 and any("PyPI" in line for line in said)
    python = [str(project / ".venv/bin/python")]
    assert setup(project) == (0, python, []) and len(calls(project)) == 2
    for name in ("requirements.txt", "requirements-lock.txt"):
        with open(project / name, "a") as file:
            file.write("einops==0.8.1\n")
        code, _, errors = setup(project, FAIL="--requirement")
        assert code == 2 and "pip failed" in errors[-1]
        assert setup(project)[0] == 0
        torch, again = calls(project)[-2:]
        assert " --index-url https://download.pytorch.org/whl/cpu torch==" in torch
        assert again == f"{LOCKED} requirements.txt"
        assert setup(project) == (0, python, [])


def test_a_missing_compiler_and_missing_python_headers_are_reported(project):
    code, _, errors = setup(project)
    assert code == 0 and "apt install g++ python3-dev" in "".join(errors)
    (project / "requirements.txt").write_text("torch==2.13.0\n")
    # The mock of g++ reads stdin, because otherwise echo in setup.sh could fail.
    add_tool(project, "g++", "#!/bin/bash\nmapfile\n")
    assert setup(project)[2] == []


def test_with_an_nvidia_gpu_setup_installs_the_cuda_requirements(project):
    """SETUP_WITH=tune also installs requirements-tune.txt."""
    add_tool(project, "nvidia-smi", "#!/bin/bash\n")
    assert setup(project, SETUP_WITH="tune")[0] == 0
    files = ("requirements-cuda.txt", "requirements-tune.txt")
    assert calls(project) == [f"{LOCKED} {name}" for name in files]
    assert len(setup(project, SETUP_WITH="tune")[1]) == 1  # nothing is installed again


def test_concurrent_setups_install_once(project):
    both = [start(project, SLOW="0.3") for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0] and len(calls(project)) == 2
    waiting = f"setup: waiting for another setup of {project}/.venv\n{project}/.venv/bin/python\n"
    assert waiting in said


def test_setup_errors_are_one_line(project):
    missing = ["setup: VENV is 'nowhere', but there is no nowhere/bin/python."]
    assert setup(project, VENV="nowhere") == (2, [], missing)
    (project / ".venv").write_text("in the way")
    code, said, (error,) = setup(project)
    assert (code, said) == (2, []) and f"cannot write to {project}/.venv" in error
    (project / ".venv").unlink()
    old = f'exec {sys.executable} -c "import sys; sys.version_info = (3, 10); $2"'
    add_tool(project, "python3.12", f"#!/bin/bash\n{old}\n")
    error = "setup: no Python 3.11 or later on PATH. Install one, then run this again."
    assert setup(project) == (2, [], [error])


def test_the_lock_file_contains_every_pinned_requirement():
    lines = (ROOT / "requirements-lock.txt").read_text().splitlines()
    locked = {line.partition(" ;")[0] for line in lines}
    for path in ROOT.glob("requirements*.txt"):
        for line in path.read_text().splitlines():
            pin = re.sub(r"\[.*\]", "", line.partition(" ")[0])
            assert pin in locked or "==" not in pin, f"{pin}: CONTRIBUTING.md says how to lock it"


# === bench/machine.py ===========================================================================
def test_description_of_the_machine_and_the_commit(tmp_path):
    """The stdout of failed tools and the stderr of all tools are ignored."""
    script = tmp_path / "ppo_mine.py"
    script.write_text("")

    def said(text):
        add_tool(tmp_path, "nvidia-smi", f"#!/bin/sh\n{text}\n")
        env = os.environ | {"PATH": f"{tmp_path}/tools:{os.environ['PATH']}"}
        command = [sys.executable, ROOT / "bench/machine.py", script]
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


def test_the_load_is_the_average_over_the_last_minute(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1.0, 5.0, 15.0))
    assert machine.describe()["load"] == 1.0

"""setup.sh, with a stand-in for Python that only notes what it is asked to install."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from test_driver import add_tool

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
LATER = "--requirement requirements.txt"


@pytest.fixture
def project(tmp_path):
    for path in [ROOT / "setup.sh", *ROOT.glob("requirements*.txt")]:
        shutil.copy(path, tmp_path)
    add_tool(tmp_path, "python3.12", PYTHON)
    for tool in TOOLS.split():
        (tmp_path / "tools" / tool).symlink_to(str(shutil.which(tool)))
    return tmp_path


def start(project, **variables):
    """Source setup.sh with only the project's tools on PATH; print the `python` that it leaves."""
    own = {"PATH": str(project / "tools"), "CALLS": str(project / "calls"), "FAIL": ""}
    env = {name: x for name, x in os.environ.items() if name != "VENV"} | own | variables
    command, pipe = ["bash", "-c", SOURCE], subprocess.PIPE
    return subprocess.Popen(command, cwd=project, env=env, stdout=pipe, stderr=pipe, text=True)


def setup(project, **variables):
    process = start(project, **variables)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout.splitlines(), stderr.splitlines()


def calls(project):
    path = project / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_it_installs_once_and_what_changed_or_failed_again(project):
    code, said, _ = setup(project, FAIL="download.pytorch.org")
    assert code == 0 and any("torch comes from PyPI" in line for line in said)
    python = [str(project / ".venv/bin/python")]
    assert setup(project) == (0, python, []) and len(calls(project)) == 2
    with open(project / "requirements.txt", "a") as file:
        file.write("einops==0.8.1\n")
    code, _, errors = setup(project, FAIL="--requirement")
    assert code == 2 and "pip failed" in errors[-1]
    assert setup(project)[0] == 0
    torch, again = calls(project)[4:]
    assert " --index-url https://download.pytorch.org/whl/cpu torch==" in torch and again == LATER
    assert setup(project) == (0, python, [])


def test_it_says_what_it_installs_that_it_is_alive_and_that_it_is_done(project):
    """Of the small addition it says its own size."""
    text = (project / "setup.sh").read_text().replace("read -rt 20", "read -rt 0.2")
    (project / "setup.sh").write_text(text)
    _, (_, *said, python), _ = setup(project, SLOW="0.7", SETUP_WITH="tune")
    alive = "setup: still installing after "
    assert [x for x in said if not x.startswith(alive)] == [
        "setup: installing requirements.txt into .venv: 2.5 GB, some minutes",
        "setup: done",
        "setup: installing requirements-tune.txt into .venv: 0.4 GB on top, some minutes",
        "setup: done",
    ]
    assert said[1].startswith(alive) and said[-2].startswith(alive)
    assert setup(project, SETUP_WITH="tune")[1] == [python]  # nothing is left to do
    assert calls(project)[1:] == [LATER, "--requirement requirements-tune.txt"]


def test_without_a_compiler_or_pythons_headers_a_line_says_what_will_not_run(project):
    code, _, errors = setup(project)
    assert code == 0 and "apt install g++ python3-dev" in "".join(errors)
    (project / "requirements.txt").write_text("torch==2.13.0\n")
    add_tool(project, "g++", "#!/bin/bash\nmapfile\n")  # read, or echo would fail
    assert setup(project)[2] == []


def test_an_nvidia_gpu_gets_the_cuda_requirements(project):
    add_tool(project, "nvidia-smi", "#!/bin/bash\n")
    assert setup(project)[0] == 0
    assert calls(project) == ["--requirement requirements-cuda.txt"]


def test_two_setups_at_once_install_once(project):
    both = [start(project, SLOW="0.3") for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0] and len(calls(project)) == 2
    waiting = f"setup: waiting for another setup of {project}/.venv\n{project}/.venv/bin/python\n"
    assert waiting in said


def test_an_environment_of_ones_own_is_used_as_it_is(project):
    (project / "own/bin").mkdir(parents=True)
    add_tool(project, "../own/bin/python", PYTHON)
    assert setup(project, VENV="own") == (0, [str(project / "own/bin/python")], [])
    assert calls(project) == [] and not (project / ".venv").exists()


def test_what_cannot_be_set_up_gets_one_sentence(project):
    missing = ["setup: VENV is 'nowhere', which has no bin/python."]
    assert setup(project, VENV="nowhere") == (2, [], missing)
    (project / ".venv").write_text("in the way")
    code, said, (error,) = setup(project)
    assert (code, said) == (2, []) and f"{project}/.venv" in error
    (project / ".venv").unlink()
    old = f'exec {sys.executable} -c "import sys; sys.version_info = (3, 10); $2"'
    add_tool(project, "python3.12", f"#!/bin/bash\n{old}\n")
    error = "setup: no Python 3.11 or later on PATH: install one, then run this again."
    assert setup(project) == (2, [], [error])


def test_the_newest_versions_need_python_3_13(project):
    shutil.copy(ROOT / "test.sh", project)
    env = {"PATH": str(project / "tools")}
    done = subprocess.run(
        ["bash", "test.sh", "newest"], cwd=project, env=env, capture_output=True, text=True
    )
    error = "test: newest needs Python 3.13, as python3.13 on PATH.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", error)
    assert not (project / ".venv-newest").exists()

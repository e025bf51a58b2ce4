"""setup.sh, with a stand-in for Python that only notes what it is asked to install."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON = """#!/bin/bash
case "$*" in
*" install "*)
  line=$*
  echo "${line#*--no-input }" >>"$CALLS"
  [[ -z $FAIL || "$*" != *"$FAIL"* ]]
  ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    for name in ("setup.sh", "requirements.txt", "requirements-cuda.txt", "requirements-tune.txt"):
        shutil.copy(ROOT / name, tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in (
        "bash",
        "cat",
        "cksum",
        "cp",
        "dirname",
        "find",
        "flock",
        "grep",
        "mkdir",
        "readlink",
        "uname",
    ):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    add_tool(tmp_path, "python3.12", PYTHON)
    return tmp_path


def add_tool(project, name, text):
    path = project / "tools" / name
    path.write_text(text)
    path.chmod(0o755)


def setup(project, fail="", **variables):
    """Source setup.sh with only the project's tools on PATH; print the `python` that it leaves."""
    own = {"PATH": str(project / "tools"), "CALLS": str(project / "calls"), "FAIL": fail}
    env = {name: x for name, x in os.environ.items() if name != "VENV"} | own | variables
    command = ["bash", "-c", "set -euo pipefail; source ./setup.sh; command -v python"]
    return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=60)


def calls(project):
    path = project / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_the_first_time_installs_and_the_second_does_not(project):
    first = setup(project)
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[-1] == str(project / ".venv/bin/python")
    torch, requirements = calls(project)
    assert " --index-url https://download.pytorch.org/whl/cpu torch==" in torch
    assert requirements == "--requirement requirements.txt"
    second = setup(project)
    assert second.stdout.splitlines() == [str(project / ".venv/bin/python")]
    assert len(calls(project)) == 2


def test_changed_requirements_are_installed(project):
    setup(project)
    with open(project / "requirements.txt", "a") as file:
        file.write("einops==0.8.1\n")
    assert setup(project).returncode == 0 and len(calls(project)) == 4


def test_a_failed_installation_is_explained_and_repeated(project):
    failed = setup(project, fail="--requirement")
    assert failed.returncode == 2 and "pip failed" in failed.stderr.splitlines()[-1]
    assert setup(project).returncode == 0
    assert calls(project)[-1] == "--requirement requirements.txt"


def test_without_pytorchs_index_torch_comes_from_pypi(project):
    result = setup(project, fail="download.pytorch.org")
    assert result.returncode == 0 and "torch comes from PyPI" in result.stdout
    assert calls(project)[-1] == "--requirement requirements.txt"


def test_without_a_compiler_or_pythons_headers_a_line_says_what_will_not_run(project):
    without = setup(project)
    assert without.returncode == 0 and "apt install g++ python3-dev" in without.stderr
    (project / "requirements.txt").write_text("torch==2.13.0\n")
    add_tool(project, "g++", "#!/bin/bash\nmapfile\n")  # read, or echo would fail
    assert setup(project).stderr == ""


def test_an_nvidia_gpu_gets_the_cuda_requirements(project):
    add_tool(project, "nvidia-smi", "#!/bin/bash\n")
    assert setup(project).returncode == 0
    assert calls(project) == ["--requirement requirements-cuda.txt"]


def test_what_only_the_tests_need_comes_on_top_once(project):
    setup(project)
    for _ in range(2):
        assert setup(project, SETUP_WITH="tune").returncode == 0
        assert setup(project).returncode == 0
    assert calls(project)[2:] == ["--requirement requirements-tune.txt"]


def test_two_setups_at_once_install_once(project):
    add_tool(project, "python3.12", PYTHON.replace("case", "read -rt 0.3 <> <(:)\ncase", 1))
    env = os.environ | {"PATH": str(project / "tools"), "CALLS": str(project / "calls"), "FAIL": ""}
    env.pop("VENV", None)
    command = ["bash", "-c", "set -euo pipefail; source ./setup.sh"]
    both = [
        subprocess.Popen(command, cwd=project, env=env, stdout=subprocess.PIPE) for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[0].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(calls(project)) == 2
    assert [x for x in said if "making" not in x] == [
        f"setup: waiting for another setup of {project}/.venv\n"
    ]


def test_an_old_python_gets_one_sentence(project):
    program = (
        f'#!/bin/bash\nexec {sys.executable} -c "import sys; sys.version_info = (3, 10); $2"\n'
    )
    add_tool(project, "python3.12", program)
    result = setup(project)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "setup: no Python 3.11 or later on PATH: install one, then run this again.\n"
    )


def test_an_environment_of_ones_own_is_used_as_it_is(project):
    own = project / "own"
    (own / "bin").mkdir(parents=True)
    add_tool(project, "../own/bin/python", PYTHON)
    assert setup(project, VENV="own").stdout.splitlines() == [str(own / "bin/python")]
    assert calls(project) == [] and not (project / ".venv").exists()
    (project / "own/elsewhere").mkdir()
    command = ["bash", "-c", "source ../../setup.sh; command -v python"]
    env = {"PATH": str(project / "tools"), "VENV": ".."}
    away = subprocess.run(command, cwd=project / "own/elsewhere", env=env, capture_output=True)
    assert away.stdout.decode().splitlines() == [str(own / "bin/python")]
    missing = setup(project, VENV="nowhere")
    assert missing.returncode == 2
    assert missing.stderr == "setup: VENV is 'nowhere', which has no bin/python.\n"


def test_cdpath_and_links_do_not_lead_to_another_environment(project):
    (project / "elsewhere").mkdir()
    (project / "elsewhere/link.sh").symlink_to(project / "setup.sh")
    setup(project)
    for path in ("./setup.sh", "elsewhere/link.sh"):
        env = {"PATH": str(project / "tools"), "CDPATH": f"{project}/elsewhere:{project}"}
        command = ["bash", "-c", f"source {path}; command -v python"]
        result = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.splitlines() == [str(project / ".venv/bin/python")]


def test_an_environment_that_path_cannot_hold_gets_one_sentence(project):
    (project / "a:b/bin").mkdir(parents=True)
    add_tool(project, "../a:b/bin/python", PYTHON)
    result = setup(project, VENV="a:b")
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1 and f"{project}/a:b/bin" in result.stderr


def test_a_folder_that_cannot_be_written_to_gets_one_sentence(project):
    (project / ".venv").write_text("in the way")
    result = setup(project)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1 and f"{project}/.venv" in result.stderr

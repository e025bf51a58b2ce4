"""Run another library in the environment that uv creates from the metadata in its script.

    python -m studies.peers.run install studies/peers
    python -m studies.peers.run studies/peers/ppo_sb3.py --seed 1

The first command creates the environments for all files in a folder in advance, so that timed runs
need not wait for uv.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from studies.peers.peer import fail

RUN = ["uv", "run", "--quiet", "--offline", "--script"]
# Compile bytecode during installation; otherwise the first run would do it.
SYNC = ["uv", "sync", "--quiet", "--compile-bytecode"]


def peers(folder: Path) -> list[Path]:
    """Return the files in a folder that declare dependencies in a script-metadata block."""
    files = sorted(folder.glob("*.py"))
    return [file for file in files if file.read_text(encoding="utf-8").startswith("# /// script\n")]


def is_installed(file: str) -> bool:
    done = subprocess.run([*RUN, file, "--help"], capture_output=True)
    return done.returncode == 0


def install(file: str) -> None:
    """Create the environment for a file, with the CPU build of PyTorch, which excludes CUDA."""
    print(
        f"uv installs the dependencies of {file}: 1 GB, about a minute the first time", flush=True
    )
    once = os.environ | {"UV_HTTP_RETRIES": "0"}
    if subprocess.run([*SYNC, "--script", file], env=once, capture_output=True).returncode == 0:
        return
    print("PyTorch's CPU index does not respond; installing torch from PyPI", flush=True)
    links = [f"--find-links={link}" for link in find_links()]
    subprocess.run([*SYNC, "--no-sources", *links, "--script", file], check=True)
    subprocess.run([*RUN, file, "--help"], check=True, stdout=subprocess.DEVNULL)


def find_links() -> list[str]:
    """Return pip's find-links setting, because uv ignores the settings of pip."""
    pip = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    asked = subprocess.run(pip, capture_output=True, text=True)
    return (os.environ.get("PIP_FIND_LINKS") or asked.stdout).split()


def main() -> None:
    if not shutil.which("uv"):
        fail("The other libraries need uv, which creates an environment for each: pip install uv")
    os.environ["UV_PYTHON"] = sys.executable
    if sys.argv[1:2] != ["install"]:
        os.execvp("uv", [*RUN, *sys.argv[1:]])
    files = [str(x) for folder in sys.argv[2:] for x in peers(Path(folder))]
    if not files:
        fail(f"install: no library to install in '{' '.join(sys.argv[2:])}'")
    for file in files:
        if not is_installed(file):
            try:
                install(file)
            except subprocess.CalledProcessError:
                fail(f"uv could not install the dependencies of {file}; see its message above.")


if __name__ == "__main__":
    main()

"""Run a peer in the environment that uv makes of its file's first lines.

    python -m studies.peers.run install studies/peers
    python -m studies.peers.run studies/peers/ppo_sb3.py --seed 1

The first makes the environments of a folder's peers, which a timed run must find.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from studies.peers.peer import fail

RUN = ["uv", "run", "--quiet", "--offline", "--script"]
SYNC = ["uv", "sync", "--quiet", "--compile-bytecode"]  # which is no part of a first start


def peers(folder: Path) -> list[Path]:
    """Its files that name what they need in their first lines."""
    files = sorted(folder.glob("*.py"))
    return [file for file in files if file.read_text().startswith("# /// script\n")]


def is_installed(file: str) -> bool:
    done = subprocess.run([*RUN, file, "--help"], capture_output=True)
    return done.returncode == 0


def install(file: str) -> None:
    """Make the environment of a peer; PyTorch's index for CPUs saves CUDA's gigabytes."""
    print(
        f"uv installs what {file} names; the first time, this takes a minute and 1 GB", flush=True
    )
    once = os.environ | {"UV_HTTP_RETRIES": "0"}
    if subprocess.run([*SYNC, "--script", file], env=once, capture_output=True).returncode == 0:
        return
    print("PyTorch's CPU index does not answer, so torch comes from PyPI", flush=True)
    links = [f"--find-links={link}" for link in find_links()]
    subprocess.run([*SYNC, "--no-sources", *links, "--script", file], check=True)
    subprocess.run([*RUN, file, "--help"], check=True, stdout=subprocess.DEVNULL)


def find_links() -> list[str]:
    """Those of pip, whose settings uv does not read."""
    pip = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    asked = subprocess.run(pip, capture_output=True, text=True)
    return (os.environ.get("PIP_FIND_LINKS") or asked.stdout).split()


def main() -> None:
    if not shutil.which("uv"):
        fail("the peers need uv, which makes an environment for each: pip install uv")
    os.environ["UV_PYTHON"] = sys.executable
    if sys.argv[1:2] != ["install"]:
        os.execvp("uv", [*RUN, *sys.argv[1:]])
    files = [str(x) for folder in sys.argv[2:] for x in peers(Path(folder))]
    if not files:
        fail(f"install: there is no peer in '{' '.join(sys.argv[2:])}'")
    for file in files:
        if not is_installed(file):
            try:
                install(file)
            except subprocess.CalledProcessError:
                fail(f"uv could not install what {file} names, as it says above.")


if __name__ == "__main__":
    main()

"""Find a file from another repository in the user's checkout, and record its commit."""

import argparse
import subprocess
from pathlib import Path

from peer import RunLog, fail


def find(args: argparse.Namespace, repository: str, commit: str, file: str) -> Path:
    """Return the file in args.checkout, or exit if it is modified or at a different commit.

    The checkout is removed from args, because it is not a setting of the algorithm.
    """
    checkout = Path(vars(args).pop("checkout"))
    if args.hidden_sizes != [64, 64]:
        fail(f"The networks of {file} have two layers of 64 units: --hidden-sizes 64 64")
    return unchanged(checkout, repository, commit, file)


def unchanged(checkout: Path, repository: str, commit: str, file: str) -> Path:
    """Return the file in the checkout, or exit if it is modified or at a different commit."""
    checkout = checkout.absolute()
    git = ["git", "-C", str(checkout)]
    done = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", file]).returncode
    if done.stdout.strip() != commit or changed:
        fail(
            f"{checkout} is not an unmodified checkout of {commit[:9]}. To create one:\n"
            f"  git clone https://github.com/{repository} {checkout}\n"
            f"  git -C {checkout} checkout {commit}"
        )
    return checkout / file


def record(log: RunLog, repository: str, commit: str) -> None:
    """Record the repository and commit in run.json, like a package version."""
    log.info["versions"][repository] = commit

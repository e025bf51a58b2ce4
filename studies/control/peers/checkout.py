"""Run a file from a checkout of another repository."""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

sys.path.append(str(Path(__file__).parents[2] / "peers"))

import foreign


def become(
    args: argparse.Namespace, repository: str, commit: str, file: str, words: list[str]
) -> NoReturn:
    """Replace this process with a run of the file, on the CPU, with words and args as flags.

    The file is not modified, and nothing is patched.
    """
    settings = vars(args)
    path = foreign.unchanged(Path(settings.pop("checkout")), repository, commit, file)
    for name, value in settings.items():
        words = [*words, f"--{name.replace('_', '-')}", str(value)]
    os.environ["PYTHONPATH"] = str(path.parents[1])  # CleanRL's SAC imports cleanrl_utils
    os.environ["WANDB_MODE"] = "disabled"  # LeanRL always calls W&B
    # Draw the progress bar only at each report: every 10 iterations in PPO, every 100 steps in SAC.
    os.environ["TQDM_MININTERVAL"] = "1e9"
    os.execv(sys.executable, [sys.executable, str(path), "--no-cuda", *words])

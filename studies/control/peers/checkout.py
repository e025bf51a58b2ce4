"""What the peers share that are files of another repository, in the user's own checkout."""

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
    """Go on as the unchanged file, with these flags and those of args, on the CPU.

    It then runs in a process of its own, as its users run it; nothing of it is patched.
    """
    settings = vars(args)
    path = foreign.unchanged(Path(settings.pop("checkout")), repository, commit, file)
    for name, value in settings.items():
        words = [*words, f"--{name.replace('_', '-')}", str(value)]
    os.environ["PYTHONPATH"] = str(path.parents[1])  # CleanRL's SAC imports cleanrl_utils
    os.environ["WANDB_MODE"] = "disabled"  # LeanRL always calls W&B
    # Its bar is drawn at each report alone: in PPO after 10 iterations, in SAC after 100 steps.
    os.environ["TQDM_MININTERVAL"] = "1e9"
    os.execv(sys.executable, [sys.executable, str(path), "--no-cuda", *words])

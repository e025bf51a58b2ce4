# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==0.29.1", "numpy==1.26.4", "tyro==1.0.17",
#   "tensorboard==2.21.0"]
#
# [tool.uv.sources]  # CPU build: CUDA adds gigabytes
# torch = { index = "pytorch-cpu", marker = "sys_platform == 'linux'" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""Run CleanRL's unmodified ppo.py from your checkout, with our hyperparameters as flags.

    git clone https://github.com/vwxyzjn/cleanrl ../cleanrl
    git -C ../cleanrl checkout fe8d8a03c41a7ef5b523e2e354bd01c363e786bb
    uv run studies/peers/ppo_cleanrl.py --env-id CartPole-v1 --seed 1
    ./benchmark.sh peers

Differences from our script: a truncation counts as a termination, and the learning rate decays per
iteration.

The unmodified file runs in this process, and its output is read line by line: an iteration lasts
from one "SPS:" to the next, and the first also includes imports and setup. Its TensorBoard events
are written to the run folder. CleanRL needs Gymnasium 0.29 and therefore NumPy 1. It runs with the
PyTorch version of our scripts instead of 2.4.1, which it requires.
"""

import io
import os
import re
import runpy
import sys

import foreign
from peer import BATCH_SIZE, RunLog, describe, num_iterations, parse_args

REPOSITORY = "vwxyzjn/cleanrl"
COMMIT = "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb"
# Settings whose flags have the same name in CleanRL; all others have the same default.
FLAGS = (
    *("learning_rate", "num_envs", "num_steps", "gamma", "gae_lambda", "num_minibatches"),
    *("update_epochs", "clip_coef", "ent_coef", "vf_coef", "max_grad_norm"),
)


class Output(io.TextIOBase):
    """Stream that parses CleanRL's output: episodic returns, and SPS after each update."""

    def __init__(self, log: RunLog) -> None:
        self.log = log
        self.returns: list[float] = []

    def write(self, text: str) -> int:
        found = re.search(r"episodic_return=\[?([-\d.e+]+)", text)
        if found:
            self.returns.append(float(found[1]))
        if text.startswith("SPS:"):
            self.log.write(describe(self.returns, []))
            self.returns = []
        return len(text)


def main() -> None:
    args = parse_args("cleanrl", checkout=("../cleanrl", "CleanRL checkout"))
    file = foreign.find(args, REPOSITORY, COMMIT, "cleanrl/ppo.py")
    log = RunLog(args, "eager")
    foreign.record(log, REPOSITORY, COMMIT)
    words = ["--env-id", args.env_id, "--seed", str(args.seed), "--no-cuda"]
    words += ["--total-timesteps", str(num_iterations(args) * BATCH_SIZE)]
    for name in FLAGS:
        words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    os.chdir(log.dir)
    terminal = sys.stdout
    sys.argv = [str(file), *words]
    sys.stdout = Output(log)
    try:
        runpy.run_path(str(file), run_name="__main__")
    finally:
        sys.stdout = terminal
    log.finish()


if __name__ == "__main__":
    main()

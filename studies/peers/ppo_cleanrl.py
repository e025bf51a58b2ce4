# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==0.29.1", "numpy==1.26.4", "tyro==1.0.17",
#   "tensorboard==2.21.0"]
#
# [tool.uv.sources]  # the build without CUDA's gigabytes
# torch = { index = "pytorch-cpu", marker = "sys_platform == 'linux'" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""A peer: CleanRL's ppo.py itself, from your own checkout, with our sizes by its own flags.

    git clone https://github.com/vwxyzjn/cleanrl ../cleanrl
    git -C ../cleanrl checkout fe8d8a03c41a7ef5b523e2e354bd01c363e786bb
    uv run studies/peers/ppo_cleanrl.py --env-id CartPole-v1 --seed 1
    ./benchmark.sh peers

It differs in these: a truncation counts as a termination, and the learning rate falls per
iteration.

The file runs as it is, in this process. What it
prints is read as it comes: an iteration lasts from one "SPS:" to the next, and the first also has
its imports and setup. Its events for TensorBoard are written into the run's folder. It takes
Gymnasium 0.29, hence NumPy 1; PyTorch is that of our scripts, not 2.4.1 as in its own list.
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
# Settings that have a flag of the same name there; the others are the same by default.
FLAGS = (
    *("learning_rate", "num_envs", "num_steps", "gamma", "gae_lambda", "num_minibatches"),
    *("update_epochs", "clip_coef", "ent_coef", "vf_coef", "max_grad_norm"),
)


class Output(io.TextIOBase):
    """Reads what CleanRL prints: an episode's return as it ends, and SPS after each update."""

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
    args = parse_args("cleanrl", checkout=("../cleanrl", "a checkout of CleanRL at the commit"))
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

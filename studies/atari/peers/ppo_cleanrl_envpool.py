# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gym==0.23.1", "envpool==0.8.4", "numpy==1.26.4",
#   "tyro==1.0.17", "tensorboard==2.21.0"]
#
# [tool.uv.sources]  # CPU build: CUDA adds gigabytes
# torch = { index = "pytorch-cpu", marker = "sys_platform == 'linux'" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""Run CleanRL's unmodified ppo_atari_envpool.py from your checkout, with the shared settings.

    git clone https://github.com/vwxyzjn/cleanrl ../cleanrl
    git -C ../cleanrl checkout fe8d8a03c41a7ef5b523e2e354bd01c363e786bb
    uv run studies/atari/peers/ppo_cleanrl_envpool.py --total-timesteps 10240

Differences from our script: the games run in EnvPool threads; a truncation counts as a
termination; the learning rate decays per iteration. Nothing is patched. EnvPool is version 0.8.4:
CleanRL requires 0.6, which has no build for Python 3.11, and the newest version lacks the interface
of gym 0.23 that the file needs. CleanRL writes TensorBoard events to ./runs.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "control/peers"))

import checkout
import flags

REPOSITORY = "vwxyzjn/cleanrl"
COMMIT = "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb"
FILE = "cleanrl/ppo_atari_envpool.py"


def main() -> None:
    parser = flags.ppo(env_id="Pong-v5")
    parser.add_argument("--checkout", default="../cleanrl", help="checkout of CleanRL")
    checkout.become(parser.parse_args(), REPOSITORY, COMMIT, FILE, [])


if __name__ == "__main__":
    main()

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==0.29.1", "ale-py==0.10.2", "numpy==1.26.4",
#   "opencv-python-headless==4.11.0.86", "tyro==1.0.17", "tensorboard==2.21.0"]
#
# [tool.uv.sources]  # CPU build: CUDA adds gigabytes
# torch = { index = "pytorch-cpu", marker = "sys_platform == 'linux'" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""Run CleanRL's unmodified ppo_atari.py from your checkout, with the shared settings.

    git clone https://github.com/vwxyzjn/cleanrl ../cleanrl
    git -C ../cleanrl checkout fe8d8a03c41a7ef5b523e2e354bd01c363e786bb
    uv run studies/atari/peers/ppo_cleanrl.py --total-timesteps 10240

Differences from our script: the games run one after the other, each in Python wrappers, which also
press FIRE after a lost life; frames are scaled before they become gray; a truncation counts as
a termination; the learning rate decays per iteration.

The prefix ale_py: in the environment ID imports ale_py, which registers its games, so nothing is
patched. The file needs Gymnasium 0.29, which needs ale-py 0.10. PyTorch, ale-py and OpenCV are
newer than in CleanRL's requirements, which do not install on Python 3.11. CleanRL writes
TensorBoard events to ./runs.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "control/peers"))

import checkout
import flags

REPOSITORY = "vwxyzjn/cleanrl"
COMMIT = "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb"
FILE = "cleanrl/ppo_atari.py"


def main() -> None:
    parser = flags.ppo(env_id="ale_py:PongNoFrameskip-v4")
    parser.add_argument("--checkout", default="../cleanrl", help="checkout of CleanRL")
    checkout.become(parser.parse_args(), REPOSITORY, COMMIT, FILE, [])


if __name__ == "__main__":
    main()

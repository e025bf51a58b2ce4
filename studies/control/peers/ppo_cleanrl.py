# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium[mujoco]==0.29.1", "mujoco==4.0.0", "numpy==1.26.4",
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
"""Run CleanRL's unmodified ppo_continuous_action.py from your checkout, with shared settings.

    git clone https://github.com/vwxyzjn/cleanrl ../cleanrl
    git -C ../cleanrl checkout fe8d8a03c41a7ef5b523e2e354bd01c363e786bb
    uv run studies/control/peers/ppo_cleanrl.py --total-timesteps 20480

Differences from our script: a truncation counts as a termination; the learning rate decays per
iteration; each environment has separate wrappers and running statistics, which are updated at
each step. The file needs Gymnasium 0.29, which has HalfCheetah-v4 (the same robot) instead of v5.
The versions of PyTorch and MuJoCo are the same as for the other libraries and differ from CleanRL's
requirements. CleanRL writes TensorBoard events to ./runs.
"""

import checkout
import flags

REPOSITORY = "vwxyzjn/cleanrl"
COMMIT = "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb"
FILE = "cleanrl/ppo_continuous_action.py"


def main() -> None:
    parser = flags.ppo(env_id="HalfCheetah-v4")
    parser.add_argument("--checkout", default="../cleanrl", help="checkout of CleanRL")
    checkout.become(parser.parse_args(), REPOSITORY, COMMIT, FILE, [])


if __name__ == "__main__":
    main()

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "tensordict==0.6.2", "gymnasium[mujoco]==0.29.1",
#   "mujoco==4.0.0", "numpy==1.26.4", "tyro==1.0.17", "tqdm==4.70.1", "wandb==0.31.0"]
#
# [tool.uv.sources]  # CPU build: CUDA adds gigabytes
# torch = { index = "pytorch-cpu", marker = "sys_platform == 'linux'" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""Run LeanRL's unmodified continuous PPO from your checkout, with the shared settings.

    git clone https://github.com/meta-pytorch/LeanRL ../leanrl
    git -C ../leanrl checkout 8dbb6336b7f6cc65cdbbeb2e86637c38867e2677
    uv run studies/control/peers/ppo_leanrl.py --total-timesteps 20480 --compile

Runs ppo_continuous_action.py, or ppo_continuous_action_torchcompile.py with --compile. Differences
from our script: a truncation counts as a termination; the learning rate decays per iteration; each
environment has separate wrappers and running statistics, which are updated at each step. CUDA
graphs are off, because there is no GPU, and W&B is disabled. Both files need Gymnasium 0.29, which
has HalfCheetah-v4 (the same robot) instead of v5, and an old version of TensorDict, because the
compiled file fails with newer ones.
"""

import checkout
import flags

REPOSITORY = "meta-pytorch/LeanRL"
COMMIT = "8dbb6336b7f6cc65cdbbeb2e86637c38867e2677"
EAGER = "leanrl/ppo_continuous_action.py"
COMPILED = "leanrl/ppo_continuous_action_torchcompile.py"


def main() -> None:
    parser = flags.ppo(env_id="HalfCheetah-v4")
    parser.add_argument("--checkout", default="../leanrl", help="checkout of LeanRL")
    parser.add_argument("--compile", action="store_true", help="run the compiled version")
    args = parser.parse_args()
    compiled = vars(args).pop("compile")
    file = COMPILED if compiled else EAGER
    checkout.become(args, REPOSITORY, COMMIT, file, ["--compile"] if compiled else [])


if __name__ == "__main__":
    main()

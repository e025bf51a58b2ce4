# /// script
# requires-python = ">=3.11"
# dependencies = ["stable-baselines3==2.9.2", "torch==2.13.0", "gymnasium[mujoco]==1.3.0",
#   "mujoco==4.0.0", "numpy==2.4.6"]
#
# [tool.uv.sources]  # CPU build: CUDA adds gigabytes
# torch = { index = "pytorch-cpu", marker = "sys_platform == 'linux'" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""Train Stable-Baselines3's SAC with its default settings, which are the shared settings.

    uv run studies/control/peers/sac_sb3.py --total-timesteps 1000

The defaults are two layers of 256 units, batches of 256, a replay buffer of a million transitions
and an update per step. Each update trains alpha, the critics and the actor, in this order.
"""

import flags
import lines
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.env_util import make_vec_env


def main() -> None:
    args = flags.sac().parse_args()
    torch.set_num_threads(1)
    envs = make_vec_env(args.env_id, seed=args.seed, wrapper_class=lines.Lines)
    starts = args.learning_starts
    model = SAC("MlpPolicy", envs, learning_starts=starts, seed=args.seed, device="cpu")
    model.learn(args.total_timesteps)


if __name__ == "__main__":
    main()

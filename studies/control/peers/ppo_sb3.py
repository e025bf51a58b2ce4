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
"""Train Stable-Baselines3's PPO with VecNormalize and the shared settings.

    uv run studies/control/peers/ppo_sb3.py --total-timesteps 20480

Differences from our script: the value loss has no factor of 1/2 and uses only the clipped error;
the learning rate decays per iteration; observation statistics are updated at each step.
"""

import flags
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize


def main() -> None:
    args = flags.ppo().parse_args()
    torch.set_num_threads(1)
    envs = VecNormalize(make_vec_env(args.env_id, args.num_envs, seed=args.seed))
    model = PPO(
        "MlpPolicy",
        envs,
        learning_rate=LinearSchedule(3e-4, 0.0, 1.0),
        n_steps=args.num_steps,
        batch_size=args.num_envs * args.num_steps // args.num_minibatches,
        n_epochs=10,
        clip_range_vf=0.2,
        ent_coef=0.0,
        policy_kwargs={"net_arch": [64, 64], "optimizer_kwargs": {"eps": 1e-5}},
        seed=args.seed,
        device="cpu",
        verbose=1,
    )
    model.learn(args.total_timesteps, log_interval=1)  # a line per iteration, for race.py


if __name__ == "__main__":
    main()

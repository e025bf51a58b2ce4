# /// script
# requires-python = ">=3.11"
# dependencies = ["stable-baselines3==2.9.2", "torch==2.13.0", "gymnasium[mujoco]==1.3.0",
#   "numpy==2.4.6"]
#
# [tool.uv.sources]  # the build without CUDA's gigabytes
# torch = { index = "pytorch-cpu", marker = "sys_platform == 'linux'" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""A peer: Stable-Baselines3's PPO with VecNormalize, by the settings that cost.py gives all.

uv run studies/control/sb3_ppo.py --total-timesteps 20480
"""

import argparse

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default="HalfCheetah-v5")
    parser.add_argument("--total-timesteps", type=int, default=20_480)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=256)
    parser.add_argument("--num-minibatches", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
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
    )
    model.learn(args.total_timesteps)


if __name__ == "__main__":
    main()

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
"""Train Stable-Baselines3's PPO with VecNormalize and the settings of CleanRL.

    python -m studies.peers.run install studies/returns
    uv run studies/returns/ppo_continuous_sb3.py --env-id HalfCheetah-v5 --total-timesteps 999424
    ./benchmark.sh returns --only continuous_sb3

The published returns are from versions 2 to 4 of the MuJoCo environments. CleanRL's
ppo_continuous_action.py does not run in version 5, because it needs Gymnasium 0.29. This program
trains with the same settings in version 5: one environment, and rollouts of 2,048 steps.

Differences from CleanRL: the value loss has no factor of 1/2 and uses only the clipped error;
truncated episodes bootstrap from the value of the last observation.
"""

import sys
from pathlib import Path

from stable_baselines3 import PPO
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize

sys.path.append(str(Path(__file__).parents[1] / "peers"))

from peer import RunLog, parse_args
from peer_sb3 import train


def main() -> None:
    args = parse_args("continuous_sb3")
    args.num_envs = 1
    args.num_steps = 2048
    args.num_minibatches = 32
    args.learning_rate = 3e-4
    args.ent_coef = 0.0

    def make_model(envs):
        return PPO(
            "MlpPolicy",
            VecNormalize(envs, gamma=args.gamma),
            learning_rate=LinearSchedule(args.learning_rate, 0.0, 1.0),
            n_steps=args.num_steps,
            batch_size=args.num_steps // args.num_minibatches,
            n_epochs=args.update_epochs,
            gamma=args.gamma,
            gae_lambda=args.gae_lambda,
            clip_range=args.clip_coef,
            clip_range_vf=args.clip_coef,
            ent_coef=args.ent_coef,
            vf_coef=args.vf_coef,
            max_grad_norm=args.max_grad_norm,
            policy_kwargs={
                "net_arch": args.hidden_sizes,
                "optimizer_kwargs": {"eps": args.adam_eps},
            },
            seed=args.seed,
            device="cpu",
        )

    train(RunLog(args, "eager"), args, make_model)


if __name__ == "__main__":
    main()

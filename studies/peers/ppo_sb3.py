# /// script
# requires-python = ">=3.11"
# dependencies = ["stable-baselines3==2.9.2", "torch==2.13.0", "gymnasium==1.3.0",
#   "numpy==2.4.6"]
#
# [tool.uv.sources]  # CPU build: CUDA adds gigabytes
# torch = { index = "pytorch-cpu", marker = "sys_platform == 'linux'" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""Train Stable-Baselines3's PPO, set up as in its documentation, with our hyperparameters.

    uv run studies/peers/ppo_sb3.py --env-id CartPole-v1 --seed 1
    ./benchmark.sh peers

Differences from our script: the value loss has no factor of 1/2 and uses only the clipped error;
the learning rate decays per iteration.
"""

import torch
from peer import RunLog, parse_args
from peer_sb3 import train
from stable_baselines3 import PPO
from stable_baselines3.common.utils import LinearSchedule


def main() -> None:
    args = parse_args("sb3")

    def make_model(envs):
        sizes = args.hidden_sizes
        return PPO(
            "MlpPolicy",
            envs,
            learning_rate=LinearSchedule(args.learning_rate, 0.0, 1.0),
            n_steps=args.num_steps,
            batch_size=args.num_envs * args.num_steps // args.num_minibatches,
            n_epochs=args.update_epochs,
            gamma=args.gamma,
            gae_lambda=args.gae_lambda,
            clip_range=args.clip_coef,
            clip_range_vf=args.clip_coef,
            normalize_advantage=args.norm_adv,
            ent_coef=args.ent_coef,
            vf_coef=args.vf_coef,
            max_grad_norm=args.max_grad_norm,
            policy_kwargs={
                "net_arch": {"pi": sizes, "vf": sizes},
                "activation_fn": torch.nn.Tanh,
                "ortho_init": True,
                "optimizer_kwargs": {"eps": args.adam_eps},
            },
            seed=args.seed,
            device="cpu",
        )

    train(RunLog(args, "eager"), args, make_model)


if __name__ == "__main__":
    main()

# /// script
# requires-python = ">=3.11"
# dependencies = ["sb3-contrib==2.9.2", "stable-baselines3==2.9.2", "torch==2.13.0",
#   "gymnasium==1.3.0", "numpy==2.4.6"]
#
# [tool.uv.sources]  # CPU build: CUDA adds gigabytes
# torch = { index = "pytorch-cpu", marker = "sys_platform == 'linux'" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""Train RecurrentPPO from sb3-contrib, used as documented, with our hyperparameters.

    uv run studies/recurrent/ppo_sb3_recurrent.py --env-id CartPole-v1 --seed 1
    ./benchmark.sh recurrent

README.md lists the differences from our algorithm.
"""

import sys
from pathlib import Path

import gymnasium
import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.utils import LinearSchedule

sys.path.append(str(Path(__file__).parents[1] / "peers"))

from peer import RunLog, parse_args
from peer_sb3 import train

# envs.masked_cartpole imports JAX, so the environment is reimplemented below.
MASKED_CARTPOLE = "envs.masked_cartpole:MaskedCartPole"


def make_masked_cartpole() -> gymnasium.Env:
    space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    env = gymnasium.make("CartPole-v1")
    return gymnasium.wrappers.TransformObservation(env, lambda obs: obs[[0, 2]], space)


class Encoder(BaseFeaturesExtractor):
    """Linear layer before the LSTM."""

    def __init__(self, space: gymnasium.spaces.Box, size: int) -> None:
        super().__init__(space, size)
        self.layer = torch.nn.Linear(space.shape[0], size)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.layer(obs).tanh()


def main() -> None:
    args = parse_args("sb3_recurrent", gru_hidden_size=(64, "hidden size of the LSTM"))
    args.learning_rate = 1e-3
    args.gamma = 0.98
    args.vf_coef = 0.02
    make_env = make_masked_cartpole if args.env_id == MASKED_CARTPOLE else None

    def make_model(envs):
        return RecurrentPPO(
            "MlpLstmPolicy",
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
                "features_extractor_class": Encoder,
                "features_extractor_kwargs": {"size": args.hidden_sizes[0]},
                "lstm_hidden_size": args.gru_hidden_size,
                "shared_lstm": True,  # one LSTM for actor and critic instead of two
                "enable_critic_lstm": False,
                "net_arch": [],
                "optimizer_kwargs": {"eps": args.adam_eps},
            },
            seed=args.seed,
            device="cpu",
        )

    train(RunLog(args, "eager"), args, make_model, make_env)


if __name__ == "__main__":
    main()

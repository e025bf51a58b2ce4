# /// script
# requires-python = ">=3.11"
# dependencies = ["stable-baselines3==2.9.2", "torch==2.13.0", "gymnasium==1.3.0",
#   "ale-py==0.12.1", "opencv-python-headless==4.13.0.92", "numpy==2.4.6"]
#
# [tool.uv.sources]  # CPU build: CUDA adds gigabytes
# torch = { index = "pytorch-cpu", marker = "sys_platform == 'linux'" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""Train Stable-Baselines3's PPO with CnnPolicy and the shared settings.

    uv run studies/atari/peers/ppo_sb3.py --total-timesteps 10240

Differences from our script: the games run one after the other, each in Python wrappers, which also
press FIRE after a lost life; the value loss has no factor of 1/2 and uses only the clipped error;
the learning rate decays per iteration.
"""

import ale_py
import flags
import gymnasium
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecFrameStack


def main() -> None:
    args = flags.ppo(env_id="PongNoFrameskip-v4").parse_args()
    gymnasium.register_envs(ale_py)
    envs = VecFrameStack(make_atari_env(args.env_id, args.num_envs, seed=args.seed), n_stack=4)
    model = PPO(
        "CnnPolicy",
        envs,
        learning_rate=LinearSchedule(2.5e-4, 0.0, 1.0),
        n_steps=args.num_steps,
        batch_size=args.num_envs * args.num_steps // args.num_minibatches,
        n_epochs=4,
        clip_range=0.1,
        clip_range_vf=0.1,
        ent_coef=0.01,
        policy_kwargs={"optimizer_kwargs": {"eps": 1e-5}},
        seed=args.seed,
        device="cpu",
        verbose=1,
    )
    model.learn(args.total_timesteps, log_interval=1)  # a line per iteration, for race.py


if __name__ == "__main__":
    main()

# /// script
# requires-python = ">=3.11"
# dependencies = ["rlox==1.2.0", "torch==2.13.0", "gymnasium[mujoco]==1.3.0", "mujoco==4.0.0",
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
"""Train rlox's PPO, set up as in its documentation, with the shared settings.

    uv run studies/control/peers/ppo_rlox.py --total-timesteps 20480

Differences from our script: actions are not clipped to their bounds; a truncated episode is
bootstrapped twice, from its final observation and from the first one of the next episode, into
which the advantage continues; observation and reward statistics are updated at each step; the
learning rate decays per iteration.
"""

import flags
import torch
from rlox import Trainer
from rlox.callbacks import Callback


class Lines(Callback):
    """Callback that prints a line per iteration; rlox calls on_step() after each update."""

    iterations = 0

    def on_step(self, **others) -> bool:
        self.iterations += 1
        print(f"{self.iterations} iterations", flush=True)
        return True


def main() -> None:
    args = flags.ppo().parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    settings = {
        "n_envs": args.num_envs,
        "n_steps": args.num_steps,
        "n_epochs": 10,
        "batch_size": args.num_envs * args.num_steps // args.num_minibatches,
        "learning_rate": 3e-4,
        "anneal_lr": True,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "clip_eps": 0.2,
        "clip_vloss": True,
        "normalize_advantages": True,
        "normalize_obs": True,
        "normalize_rewards": True,
        "ent_coef": 0.0,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
    }
    trainer = Trainer("ppo", env=args.env_id, seed=args.seed, callbacks=[Lines()], config=settings)
    trainer.train(args.total_timesteps)


if __name__ == "__main__":
    main()

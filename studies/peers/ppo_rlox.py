# /// script
# requires-python = ">=3.11"
# dependencies = ["rlox==1.2.0", "torch==2.13.0", "gymnasium==1.3.0", "numpy==2.4.6"]
#
# [tool.uv.sources]  # CPU build: CUDA adds gigabytes
# torch = { index = "pytorch-cpu", marker = "sys_platform == 'linux'" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""Train rlox's PPO, set up as in its documentation, with our hyperparameters.

    uv run studies/peers/ppo_rlox.py --env-id CartPole-v1 --seed 1
    python race.py --study studies/peers

CartPole-v1 and GAE are written in Rust, the policy and the update in PyTorch. The class HybridPPO
also runs the policy in Rust during rollouts, but in version 1.2.0 it does not learn CartPole-v1.

Differences from our script: a truncated episode is bootstrapped twice, from its final observation
and from the first one of the next episode, into which the advantage continues; the learning rate
decays per iteration.
"""

import torch
from peer import BATCH_SIZE, RunLog, describe, fail, num_iterations, parse_args
from rlox import Trainer
from rlox.callbacks import Callback


class Report(Callback):
    """Callback that ends a log iteration; rlox calls on_step() after each update."""

    def __init__(self, log: RunLog) -> None:
        super().__init__()
        self.log = log
        self.reported = 0  # number of episodes in earlier iterations

    def on_step(self, *, algo, **others) -> bool:
        returns = algo.collector.episode_rewards[self.reported :]
        self.reported += len(returns)
        self.log.write(describe(returns, []))
        return True


def main() -> None:
    args = parse_args("rlox")
    if args.hidden_sizes != [64, 64]:
        fail("The networks of rlox have two layers of 64 units: --hidden-sizes 64 64")
    log = RunLog(args, "eager")
    torch.manual_seed(args.seed)
    settings = {
        "n_envs": args.num_envs,
        "n_steps": args.num_steps,
        "n_epochs": args.update_epochs,
        "batch_size": BATCH_SIZE // args.num_minibatches,
        "learning_rate": args.learning_rate,
        "anneal_lr": args.anneal_lr,
        "gamma": args.gamma,
        "gae_lambda": args.gae_lambda,
        "clip_eps": args.clip_coef,
        "clip_vloss": args.clip_vloss,
        "normalize_advantages": args.norm_adv,
        "ent_coef": args.ent_coef,
        "vf_coef": args.vf_coef,
        "max_grad_norm": args.max_grad_norm,
    }
    callbacks = [Report(log)]
    trainer = Trainer("ppo", env=args.env_id, seed=args.seed, callbacks=callbacks, config=settings)
    log.begin()
    trainer.train(num_iterations(args) * BATCH_SIZE)
    log.finish()


if __name__ == "__main__":
    main()

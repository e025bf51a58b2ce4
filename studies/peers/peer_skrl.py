"""Environments that write the run log, and settings, for skrl in JAX and in PyTorch."""

import argparse
from typing import Any

import gymnasium
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from peer import RunLog, describe, num_iterations


class Envs(RecordEpisodeStatistics):
    """Environments as in skrl's examples, in which a reset takes an extra step.

    An iteration of the log ends at the first step of the next one, or at write().
    """

    def __init__(self, args: argparse.Namespace, log: RunLog) -> None:
        super().__init__(gymnasium.make_vec(args.env_id, args.num_envs, "sync"))
        self.log = log
        self.num_steps = args.num_steps
        self.steps_taken = 0
        self.returns: list[float] = []
        self.lengths: list[float] = []

    def step(self, actions: Any) -> Any:
        if self.steps_taken == 0:
            self.log.begin()
        elif self.steps_taken % self.num_steps == 0:
            self.write()
        self.steps_taken += 1
        result = super().step(actions)
        infos = result[-1]
        if "episode" in infos:
            ended = infos["_episode"]
            self.returns += infos["episode"]["r"][ended].tolist()
            self.lengths += infos["episode"]["l"][ended].tolist()
        return result

    def write(self) -> None:
        self.log.write(describe(self.returns, self.lengths))
        self.returns = []
        self.lengths = []


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments for PPO_CFG."""
    return {
        "rollouts": args.num_steps,
        "learning_epochs": args.update_epochs,
        "mini_batches": args.num_minibatches,
        "discount_factor": args.gamma,
        "gae_lambda": args.gae_lambda,
        "learning_rate": args.learning_rate,
        "grad_norm_clip": args.max_grad_norm,
        "ratio_clip": args.clip_coef,
        "value_clip": args.clip_coef,
        "value_loss_scale": args.vf_coef / 2,  # the value loss of skrl has no factor of 1/2
        "time_limit_bootstrap": args.bootstrap_truncated,
        "experiment": {"write_interval": 0, "checkpoint_interval": 0},
    }


def trainer_settings(args: argparse.Namespace) -> dict[str, Any]:
    steps = num_iterations(args) * args.num_steps
    return {"timesteps": steps, "headless": True, "disable_progressbar": True}

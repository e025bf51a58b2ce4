"""Environments and a callback for libraries that use Stable-Baselines3's training loop."""

import argparse
from collections.abc import Callable
from typing import Any

from peer import RunLog, describe, num_iterations
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env


def train(
    log: RunLog,
    args: argparse.Namespace,
    make_model: Callable[[Any], Any],
    make_env: Callable[[], Any] | None = None,
) -> None:
    """Train the model that make_model creates, for a whole number of iterations.

    make_env creates the environment if Gymnasium does not know args.env_id.
    """
    # make_vec_env returns a DummyVecEnv, which steps the environments in sequence.
    envs = make_vec_env(make_env or args.env_id, args.num_envs, seed=args.seed)
    make_model(envs).learn(num_iterations(args) * log.batch_size, callback=Callback(log))
    log.finish()


class Callback(BaseCallback):
    """Callback that ends a log iteration after train().

    The library has no hook after train(), so an iteration ends at the start of the next rollout or
    at the end of training.
    """

    def __init__(self, log: RunLog) -> None:
        super().__init__()
        self.log = log
        self.episodes: list[dict[str, float]] = []  # finished in this iteration

    def _on_rollout_start(self) -> None:
        if self.num_timesteps:
            self.write()
        self.log.begin()

    def _on_step(self) -> bool:
        self.episodes += [x["episode"] for x in self.locals["infos"] if "episode" in x]
        return True

    def _on_training_end(self) -> None:
        self.write()

    def write(self) -> None:
        self.log.write(describe([x["r"] for x in self.episodes], [x["l"] for x in self.episodes]))
        self.episodes = []

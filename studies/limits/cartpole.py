"""ppo_torch.py with CartPole-v1 in compiled PyTorch, to measure the cost of an environment in JAX.

    python race.py ppo_torch.py studies/limits/cartpole.py

Everything except the environment comes from ppo_torch.py, including train and RunLog.
"""

import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

os.environ["JAX_DISABLE_JIT"] = "1"  # then jax.jit(env.step) returns env.step
sys.path.append(str(Path(__file__).parents[2]))

import torch

import ppo_torch


class State(NamedTuple):
    """State of N environments; each field has shape (N,), except physics (N, 4)."""

    physics: torch.Tensor  # position, speed, angle, angular speed
    time: torch.Tensor
    episode_return: torch.Tensor


class VecEnv:
    """CartPole-v1 (Barto, Sutton and Anderson 1983), vectorized, with the rules of gymnax."""

    num_actions, obs_shape, obs_dim = 2, (4,), 4

    def __init__(self, env_id: str, num_envs: int) -> None:
        self.num_envs = num_envs
        self.step = torch.compile(step)

    def reset(self, key) -> tuple[torch.Tensor, State]:
        physics = torch.empty(self.num_envs, 4).uniform_(-0.05, 0.05)
        zeros = torch.zeros(self.num_envs)
        return physics, State(physics, zeros, zeros)


@torch.no_grad()
def step(state: State, action: torch.Tensor) -> tuple[torch.Tensor, State, dict]:
    """Take action (N,); return obs (after any restart), state and a dict of results."""
    _, speed, angle, turn = state.physics.unbind(-1)
    force = 20.0 * action - 10.0
    pull = (force + 0.05 * turn**2 * angle.sin()) / 1.1
    turning = (9.8 * angle.sin() - angle.cos() * pull) / (0.5 * (4 / 3 - angle.cos() ** 2 / 11))
    push = pull - 0.05 * turning * angle.cos() / 1.1
    changes = torch.stack([speed, push, turn, turning], -1)
    physics = state.physics + 0.02 * changes
    time = state.time + 1
    terminated = (physics[:, 0].abs() > 2.4) | (physics[:, 2].abs() > 12 * math.pi / 180)
    truncated = time >= 500
    done = terminated | truncated
    result = {
        "reward": torch.ones_like(time),
        "terminated": terminated,
        "truncated": truncated,
        "next_obs": physics,
        "episode_return": state.episode_return + 1,
        "episode_length": time,
    }
    start = 0.1 * torch.rand_like(physics) - 0.05
    obs = torch.where(done[:, None], start, physics)
    return obs, State(obs, time * ~done, time * ~done), result


def stack(results: list[dict]) -> dict:
    return {name: torch.stack([x[name] for x in results]) for name in results[0]}


if __name__ == "__main__":
    for name, replacement in (("VecEnv", VecEnv), ("stack", stack)):
        setattr(ppo_torch, name, replacement)
    for name in ("to_torch", "to_jax"):
        setattr(ppo_torch, name, lambda x: x)
    ppo_torch.train(ppo_torch.parse_args())

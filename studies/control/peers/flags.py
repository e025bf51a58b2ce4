"""The peers' flags, and the lines that race.py counts. It imports nothing of this repository."""

import argparse


def ppo(env_id: str = "HalfCheetah-v5") -> argparse.ArgumentParser:
    """What continuous PPO is told; the defaults learn best in HalfCheetah."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default=env_id)
    parser.add_argument("--total-timesteps", type=int, default=20_480)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--num-steps", type=int, default=64)
    parser.add_argument("--num-minibatches", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    return parser


def sac(env_id: str = "HalfCheetah-v5") -> argparse.ArgumentParser:
    """What SAC is told; an update follows each step after the random ones."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default=env_id)
    parser.add_argument("--total-timesteps", type=int, default=1_000)
    parser.add_argument("--learning-starts", type=int, default=500, help="random steps before")
    parser.add_argument("--seed", type=int, default=1)
    return parser

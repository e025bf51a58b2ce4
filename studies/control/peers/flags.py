"""Flags of the other libraries. Imports nothing from this repository."""

import argparse


def ppo(env_id: str = "HalfCheetah-v5") -> argparse.ArgumentParser:
    """Return the parser for continuous PPO; its defaults are the settings of all libraries."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default=env_id)
    parser.add_argument("--total-timesteps", type=int, default=20_480)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--num-steps", type=int, default=64)
    parser.add_argument("--num-minibatches", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    return parser


def sac(env_id: str = "HalfCheetah-v5") -> argparse.ArgumentParser:
    """Return the parser for SAC, which updates after each step, except the initial random steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default=env_id)
    parser.add_argument("--total-timesteps", type=int, default=1_000)
    parser.add_argument("--learning-starts", type=int, default=500, help="initial random steps")
    parser.add_argument("--seed", type=int, default=1)
    return parser

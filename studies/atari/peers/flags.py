"""Flags of the other libraries. Imports nothing from this repository."""

import argparse


def ppo(env_id: str) -> argparse.ArgumentParser:
    """Return the parser for PPO in Atari; its defaults are those of CleanRL and our scripts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default=env_id)
    parser.add_argument("--total-timesteps", type=int, default=10_240)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=128)
    parser.add_argument("--num-minibatches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    return parser

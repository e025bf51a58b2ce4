"""Time the environment steps of Pong with random actions, without a network.

taskset --cpu-list 0 python -m studies.atari.emulator > studies/atari/emulator.json
"""

import json
import time
from importlib.metadata import version

import numpy as np

from bench.machine import cpu
from more.ppo_cnn_torch_gymnasium import Args, VecEnv

ROUNDS = 11


def main() -> None:
    args = Args()
    env = VecEnv(args.env_id, args.num_envs, args.vectorization, args.seed)
    env.reset()
    rng = np.random.default_rng(0)
    durations = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for action in rng.integers(env.num_actions, size=(args.num_steps, args.num_envs)):
            env.step(action)
        durations.append(time.perf_counter() - start)
    result = {"seconds": durations, "steps": args.batch_size, "ale-py": version("ale-py")}
    print(json.dumps(result | {"cpu": cpu()}))


if __name__ == "__main__":
    main()

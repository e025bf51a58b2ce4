"""Time the steps of Gymnasium's robots, with random actions.

    pip install "gymnasium[mujoco]==1.3.0"
    python -m studies.simulators.steps > studies/simulators/steps.jsonl    # a minute

Each line of JSON is one of five rounds of an environment: the wall-clock time of its steps and
resets, divided by the number of steps.
"""

import json
import os
import time
from importlib import metadata

import gymnasium

from bench.machine import describe

ENVIRONMENTS = (
    *("Pendulum-v1", "InvertedPendulum-v5", "Hopper-v5", "HalfCheetah-v5", "Walker2d-v5"),
    *("Ant-v5", "Humanoid-v5"),
)
ROUNDS = 5
STEPS = 2_000


def measure(env_id: str, seed: int) -> float:
    """Return the time per step in microseconds."""
    env = gymnasium.make(env_id)
    env.action_space.seed(seed)
    actions = [env.action_space.sample() for _ in range(STEPS)]
    env.reset(seed=seed)
    start = time.perf_counter()
    for action in actions:
        *_, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    seconds = time.perf_counter() - start
    env.close()
    return seconds / STEPS * 1e6


def main() -> None:
    machine = describe()
    versions = {name: metadata.version(name) for name in ("gymnasium", "mujoco", "numpy")}
    for number in range(ROUNDS):
        for env_id in ENVIRONMENTS:
            row = {"round": number, "env_id": env_id, "microseconds": measure(env_id, number)}
            row |= {"load": os.getloadavg()[0], "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            print(json.dumps(row | {"cpu": machine["cpu"], "versions": versions}), flush=True)


if __name__ == "__main__":
    main()

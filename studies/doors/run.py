"""Train a DQN agent in Doors, and evaluate it on all layouts during training.

    python -m studies.doors.run more/dqn_linen.py doors --seed 1

The argument doors selects SETTINGS; flags after it override them. Every five iterations the greedy
policy also plays an episode in each of the 225 layouts and appends a line of JSON to layouts.jsonl
in the run folder: iteration, global_step, seconds (since the process started), solved (number of
solved layouts), steps (total number of steps in the solved layouts) and optimal (minimum possible
number of these steps). The durations in the run folder exclude the evaluations. A run that was
stopped starts over, because --resume would not evaluate.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from envs.doors_gymnasium import LIMIT, DoorsGymnasium, all_layouts, optimal_steps

EVERY = 5  # iterations between evaluations
# With these settings, agents solve all layouts within 640,000 steps. flags_of adds --env-id.
SETTINGS = """
    --total-timesteps 640000 --learning-rate 3e-4 --num-envs 64 --num-steps 80 --gamma 0.95
    --buffer-size 102400 --train-frequency 32 --learning-starts 5120 --target-network-frequency 20
    --double-q --exploration-steps 256000 --loss huber --hidden-sizes 256 256
"""


def evaluate(policy: Callable) -> dict[str, int]:
    """Play one episode in each layout; return the totals that layouts.jsonl contains.

    The policy maps observations (225, 45) to actions (225,).
    """
    layouts = all_layouts()
    envs = [DoorsGymnasium() for _ in layouts]
    starts = [env.reset(options={"layout": x})[0] for env, x in zip(envs, layouts, strict=True)]
    obs = np.stack(starts)
    steps = np.zeros(len(envs), int)
    solved = np.zeros(len(envs), bool)
    for _ in range(LIMIT):
        actions = policy(obs)
        playing = ~solved
        for i in np.flatnonzero(playing):
            obs[i], _, solved[i], _, _ = envs[i].step(actions[i])
        steps += playing
    fewest = optimal_steps(*layouts.T)
    return {
        "solved": int(solved.sum()),
        "steps": int(steps[solved].sum()),
        "optimal": int(fewest[solved].sum()),
    }


def load_policy(script: Any, folder: Path) -> Callable:
    """Load the policy from the last checkpoint, without changing the random state of training."""
    if not hasattr(script, "torch"):
        return script.load_policy(folder)
    with script.torch.random.fork_rng(devices=[]):  # load_policy draws initial weights
        return script.load_policy(folder)


def train(script: Any) -> None:
    """Run a script with sys.argv, and evaluate its agent after each checkpoint."""
    args = script.parse_args()
    args.save_every = EVERY

    class RunLog(script.RunLog):
        """The RunLog of the script, extended to evaluate each saved checkpoint."""

        def update_info(self, **changes: Any) -> None:
            super().update_info(**changes)
            if "iteration" not in changes:
                return
            start = time.time()
            iteration = changes["iteration"]
            row = {
                "iteration": iteration,
                "global_step": iteration * self.steps_per_iteration,
                "seconds": start - self.info.get("launched", self.info["started"]),
            }
            row |= evaluate(load_policy(script, self.dir))
            with open(self.dir / "layouts.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
            seconds = time.time() - start
            self.start += seconds
            self.info["started"] += seconds
            if "launched" in self.info:
                self.info["launched"] += seconds

    script.RunLog = RunLog
    script.train(args)


def flags_of(script: str, words: list[str]) -> list[str]:
    """Return the flags for the script. If a flag is repeated, the script uses the last value."""
    if words[:1] != ["doors"]:
        return words
    is_gymnasium = script.endswith("_gymnasium")
    env_id = "envs.doors_gymnasium:Doors-v0" if is_gymnasium else "envs.doors:Doors"
    return ["--env-id", env_id, *SETTINGS.split(), *words[1:]]


def main() -> None:
    _, file, *words = sys.argv
    path = Path(file)
    sys.argv = [file, *flags_of(path.stem, words)]  # as if the script had been called directly
    sys.path.insert(0, str(path.parent))
    train(importlib.import_module(path.stem))


if __name__ == "__main__":
    main()

"""Train in Doors by one of the DQN scripts, and evaluate the agent on all layouts as it learns.

    python -m studies.doors.run more/dqn_linen.py doors --seed 1

The word doors stands for SETTINGS, and flags after it change them. The script then does what it
does by these flags. Every five iterations the greedy agent also starts from each of the 225
layouts, and the run's folder gets a line of JSON in layouts.jsonl: iteration, global_step, seconds
(since the script began), solved (how many layouts), steps (taken in those) and optimal (the fewest
possible in those). The run's clock stands still meanwhile. A run that is stopped begins anew: the
script's --resume would go on without evaluation.
"""

import time

START = time.perf_counter()  # before the imports, which take seconds

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from envs.doors_gymnasium import LIMIT, DoorsGymnasium, all_layouts, optimal_steps

EVERY = 5  # iterations
# By these agents solve all layouts, in 640,000 steps. --env-id is added.
SETTINGS = """
    --total-timesteps 640000 --learning-rate 3e-4 --num-envs 64 --num-steps 80 --gamma 0.95
    --buffer-size 102400 --train-frequency 32 --learning-starts 5120 --target-network-frequency 20
    --double-q --exploration-steps 256000 --loss huber --hidden-sizes 256 256
"""


def evaluate(policy: Callable) -> dict[str, int]:
    """Play all layouts at once by a policy, (225, 45) -> (225,)."""
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
    """What a script has just saved, without a trace in the training's random numbers."""
    if not hasattr(script, "torch"):
        return script.load_policy(folder)
    with script.torch.random.fork_rng(devices=[]):  # first weights are drawn, for nothing
        return script.load_policy(folder)


def train(script: Any) -> None:
    """Run a script by sys.argv, and evaluate its agent as it learns."""
    args = script.parse_args()
    args.save_every = EVERY

    class RunLog(script.RunLog):
        """That of the script, which also evaluates what was saved."""

        def note_saved(self, done: int) -> None:
            super().note_saved(done)
            start = time.perf_counter()
            row = {
                "iteration": done,
                "global_step": done * self.steps,
                "seconds": self.info["durations"]["imports"] + start - self.start,
            }
            row |= evaluate(load_policy(script, self.dir))
            with open(self.dir / "layouts.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
            self.start += time.perf_counter() - start

    script.RunLog = RunLog
    script.START = START
    script.train(args)


def flags_of(script: str, words: list[str]) -> list[str]:
    """The flags that a script gets; of a flag that is given twice, it takes the last."""
    if words[:1] != ["doors"]:
        return words
    is_gymnasium = script.endswith("_gymnasium")
    env_id = "envs.doors_gymnasium:Doors-v0" if is_gymnasium else "envs.doors:Doors"
    return ["--env-id", env_id, *SETTINGS.split(), *words[1:]]


def main() -> None:
    _, file, *words = sys.argv
    path = Path(file)
    sys.argv = [file, *flags_of(path.stem, words)]  # as if the script had been called
    sys.path.insert(0, str(path.parent))
    train(importlib.import_module(path.stem))


if __name__ == "__main__":
    main()

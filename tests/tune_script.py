"""Stands in for a training script: ten iterations, at once.

It has a real one's files, lock, signals and --resume. What its agent returns is an exact function
of its settings, which tune_fakes.py has too. MISBEHAVE is JSON: a part of a run's name -> how that
run misbehaves. TRACE names a file that gets a line for what happens to each run.
"""

import json
import math
import os
import signal
import sqlite3
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

ITERATIONS = 10


@dataclass
class Args:
    exp_name: str = "fake"
    seed: int = 1
    env_id: str = "Fake-v1"
    total_timesteps: int = 1000
    learning_rate: float = 0.1
    anneal_lr: bool = True
    num_minibatches: int = 8
    gamma: float = 0.99
    loss: Literal["mse", "huber"] = "mse"
    hidden_sizes: tuple[int, ...] = (64, 64)
    seconds: float = 0.0  # of training
    runs_dir: str = "runs"
    run_name: str = ""
    track: bool = False
    resume: str = ""

    def __post_init__(self) -> None:
        if self.num_minibatches < 1 or 96 % self.num_minibatches:
            raise ValueError(f"--num-minibatches must divide 96, not {self.num_minibatches}")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"--gamma must lie between 0 and 1, not {self.gamma}")


@dataclass
class Short(Args):
    total_timesteps: int = 500


def parse_args() -> Args:
    """A named configuration may come first, as with a DQN."""
    words = sys.argv[1:]
    kind = Args
    if words and words[0] == "short":
        kind = Short
        words.pop(0)
    if "tyro" in sys.modules:
        return sys.modules["tyro"].cli(kind, args=words)
    values: dict[str, Any] = {}  # of what tune.py writes; tyro takes longer than all else here
    while words:
        flag = words.pop(0).removeprefix("--").replace("-", "_")
        default = getattr(Args, flag.removeprefix("no_"))
        if isinstance(default, bool):
            values[flag.removeprefix("no_")] = not flag.startswith("no_")
        elif isinstance(default, tuple):
            end = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
            values[flag] = tuple(map(int, words[:end]))
            words = words[end:]
        else:
            values[flag] = type(default)(words.pop(0))
    return kind(**values)


def trace(folder: Path, what: str, **more: Any) -> None:
    event = {"run": folder.name, "what": what, "pid": os.getpid(), "place": str(folder)}
    with open(os.environ["TRACE"], "a") as file:
        file.write(json.dumps(event | more) + "\n")


def train(args: Args) -> None:
    first = 0
    signals = []
    folder = Path(args.resume or Path(args.runs_dir, args.run_name))
    if args.resume:
        saved = json.loads((folder / "checkpoint.npz").read_text())
        first = saved["iteration"]
        args = Args(**saved["args"])
    plans = json.loads(os.environ.get("MISBEHAVE", "{}"))
    plan = next((plan for part, plan in plans.items() if part in folder.name), "")
    if plan == "refuse":
        print("a word before it\n--gamma must be\tsmaller \x1b[31m here")
        sys.exit(2)
    try:
        folder.mkdir(parents=True, exist_ok=bool(first))
        lock = sqlite3.connect(folder / "lock", timeout=0)
        lock.execute("BEGIN EXCLUSIVE")
    except (OSError, sqlite3.OperationalError) as error:
        trace(folder, "locked out")
        sys.exit(f"{folder} is there, or is in use: {error}")
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    if plan == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    trace(folder, "start", first=first, settings=asdict(args))
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)[:first] if first else []
    path.write_text("".join(lines))
    with open(path, "a", buffering=1) as metrics:
        for iteration in range(first, ITERATIONS):
            time.sleep(args.seconds / ITERATIONS)
            mean = -abs(math.log10(args.learning_rate) + 3)
            row = {"charts/episodic_return": mean, "charts/episodes": 100.0, "losses/nan": None}
            row["global_step"] = (iteration + 1) * args.total_timesteps // ITERATIONS
            metrics.write(json.dumps(row) + "\n")
            if iteration == 4 and plan in ("hang", "stubborn"):
                for _ in range(3000):  # half a minute, and then the test has failed
                    if not signals:
                        time.sleep(0.01)
            elif iteration == 4 and plan == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif iteration == 4 and plan == "crash":
                raise RuntimeError("shapes do not match \N{SNOWMAN}")
            if signals or iteration == ITERATIONS - 1:
                own = {"args": asdict(args), "iteration": iteration + 1}
                (folder / "checkpoint.npz").write_text(json.dumps(own))
            if signals and iteration < ITERATIONS - 1:
                trace(folder, "stop", done=iteration + 1)
                sys.exit(128 + signals[0])
    (folder / "run.json").write_text('{"versions": {"jax": "1"}}')
    trace(folder, "end")


if __name__ == "__main__":
    train(parse_args())

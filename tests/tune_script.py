"""Stands in for a training script, as ppo_fake.py beside a copy of tune.py: ten iterations at once.

It has a real one's files, lock, signals and --resume. What its agent returns is an exact function
of its settings, which tune_fakes.py has too. MISBEHAVE is JSON: a part of a run's name -> how that
run misbehaves. TRACE names a file that gets a line for what happens to each run.
"""

import fcntl
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

ITERATIONS = 10


@dataclass
class Args:
    exp_name: str = "ppo_fake"
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
    run_name: str | None = None
    track: bool = False
    save_every: int = 0
    resume: str | None = None

    def __post_init__(self) -> None:
        if self.num_minibatches < 1 or 96 % self.num_minibatches:
            raise ValueError(f"--num-minibatches must divide 96, not {self.num_minibatches}")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"--gamma must lie between 0 and 1, not {self.gamma}")


def read_flags(words: list[str]) -> Args:
    """As tyro does, which takes longer than all else here; only what tune.py writes."""
    values: dict[str, Any] = {}
    while words:
        flag = words.pop(0).removeprefix("--").replace("-", "_")
        default = getattr(Args, flag.removeprefix("no_"))
        if isinstance(default, bool):
            values[flag.removeprefix("no_")] = not flag.startswith("no_")
        elif isinstance(default, tuple):
            values[flag] = []
            while words and not words[0].startswith("--"):
                values[flag].append(int(words.pop(0)))
        else:
            values[flag] = (str if default is None else type(default))(words.pop(0))
    return Args(**values)


def trace(folder: Path, what: str, **more: Any) -> None:
    event = {"run": folder.name, "what": what, "pid": os.getpid(), "place": str(folder)}
    line = json.dumps(event | more) + "\n"
    file = os.open(os.environ["TRACE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


def fail(reason: str) -> NoReturn:
    print(reason, file=sys.stderr)
    sys.exit(2)


def write(path: Path, content: Any) -> None:
    path.with_suffix(".partial").write_text(json.dumps(content))
    os.replace(path.with_suffix(".partial"), path)


def main(args: Args) -> None:
    first, signals = 0, []
    if args.resume:
        folder = Path(args.resume)
        saved = json.loads((folder / "checkpoint.npz").read_text())
        first, args = saved["iteration"], Args(**saved["args"])
    else:
        folder = Path(args.runs_dir, str(args.run_name))
    plans = json.loads(os.environ.get("MISBEHAVE", "{}"))
    plan = next((plan for part, plan in plans.items() if part in folder.name), "")
    if plan == "refuse":
        print("a word before it", file=sys.stderr)
        fail("--gamma must be\tsmaller \x1b[31m here")
    try:
        folder.mkdir(parents=True, exist_ok=bool(first))
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        trace(folder, "locked out")
        fail(f"{folder} cannot be made, or is in use: {error.strerror}")
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
            row |= {"iteration": iteration, "time/elapsed": float(iteration)}
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
                write(folder / "checkpoint.npz", own)
            if signals and iteration < ITERATIONS - 1:
                trace(folder, "stop", done=iteration + 1)
                print(f"Stopped after {iteration + 1} of {ITERATIONS} iterations.")
                sys.exit(128 + signals[0])
    info: dict[str, Any] = {
        "git_commit": "0" * 40,
        "python": "3",
        "os": "Linux",
        "cpu": "a",
        "cores": 2,
    }
    info |= {"gpu": None, "load": 0.5, "versions": {"jax": "1", "other": "2"}}
    info["durations"] = {"total": 1.5}
    write(folder / "run.json", info)
    trace(folder, "end")


if __name__ == "__main__":
    main(read_flags(sys.argv[1:]))

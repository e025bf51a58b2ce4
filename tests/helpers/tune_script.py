"""Stand-in for a training script with ten iterations, and for evaluate.py.

It writes the same files. The returns of its episodes are a function of the settings. The
environment variable MISBEHAVE is a JSON object that maps part of a run name to a kind of failure.
Each event adds a line to the file that the variable TRACE names.
"""

import argparse
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

ITERATIONS = 10


@dataclass
class Args:
    seed: int = 1
    env_id: str = "Fake-v1"
    total_timesteps: int = 1000
    learning_rate: float = 0.1
    anneal_lr: bool = True
    num_minibatches: int = 8
    gamma: float = 0.99
    loss: Literal["mse", "huber"] = "mse"
    hidden_sizes: tuple[int, ...] = (64, 64)
    seconds: float = 0.0  # duration of training in seconds
    runs_dir: str = "runs"
    run_name: str = ""
    resume: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"--gamma must be between 0 and 1, not {self.gamma}")


@dataclass
class Short(Args):
    total_timesteps: int = 500


def parse_args() -> Args:
    """Parse the flags. A named configuration may precede them, as in the DQN scripts."""
    words = sys.argv[1:]
    kind = Args
    if words[:1] == ["short"]:
        kind = Short
        words.pop(0)
    if "tyro" in sys.modules:
        return sys.modules["tyro"].cli(kind, args=words)
    parser = argparse.ArgumentParser()  # importing tyro is slow
    for x in fields(kind):
        options: dict[str, Any] = {"type": type(x.default)}
        if isinstance(x.default, bool):
            options = {"action": argparse.BooleanOptionalAction}
        if isinstance(x.default, tuple):
            options = {"type": int, "nargs": "+"}
        parser.add_argument(f"--{x.name.replace('_', '-')}", default=x.default, **options)
    return kind(**vars(parser.parse_args(words)))


def trace(folder: Path, what: str, **more: Any) -> None:
    event = {"run": folder.name, "what": what, "pid": os.getpid(), "place": str(folder)}
    with open(os.environ["TRACE"], "a") as file:
        file.write(json.dumps(event | more) + "\n")


def write_info(folder: Path, status: str, args: Args) -> None:
    info = {"status": status, "args": asdict(args)}
    (folder / "run.new").write_text(json.dumps(info))
    os.replace(folder / "run.new", folder / "run.json")


def recent(args: dict[str, Any]) -> float:
    """Return the mean return of an iteration, which is highest at a learning rate of 0.001."""
    return -abs(math.log10(args["learning_rate"]) + 3)


def luck(seed: int) -> float:
    return (seed * 37 % 11) ** 2 / 100


def train(args: Args) -> None:
    folder = Path(args.runs_dir, args.run_name)
    plans = json.loads(os.environ["MISBEHAVE"])
    plan = next((plan for part, plan in plans.items() if part in folder.name), "")
    folder.mkdir(parents=True)
    trace(folder, "start", settings=asdict(args))
    write_info(folder, "running", args)
    if plan == "refused":
        print("--env-id: a package is missing", file=sys.stderr)
        sys.exit(2)
    for iteration in range(ITERATIONS):
        time.sleep(args.seconds / ITERATIONS)
        value = recent(asdict(args)) + luck(args.seed)
        row = {"charts/episodic_return": value, "charts/episodes": 100.0}
        row["global_step"] = (iteration + 1) * args.total_timesteps // ITERATIONS
        with open(folder / "metrics.jsonl", "a") as metrics:
            metrics.write(json.dumps(row | {"losses/nan": None}) + "\n")
        if iteration == 4 and plan == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if iteration == 4 and plan == "crash":
            error = RuntimeError("shapes do not match \N{SNOWMAN}")
            error.add_note(f"{'-' * 20}\nFor simplicity, JAX has removed its internal frames")
            raise error
        if iteration == 4 and plan == "diverged":
            write_info(folder, "diverged", args)
            sys.exit("Diverged in iteration 5: NaN or infinite losses.")
        if iteration == 4 and plan == "hang":
            signal.pause()
        (folder / "checkpoint.msgpack").write_text(str(iteration + 1))
    write_info(folder, "completed", args)
    trace(folder, "end")


def greedy(args: dict[str, Any], seed: int, eval_seed: int) -> float:
    """Return the mean return of an agent in episodes with the seed eval_seed."""
    value = recent(args) - 0.5 * args["anneal_lr"]
    return value + (1 + args["anneal_lr"]) * luck(seed) + eval_seed / 1e9


def evaluate() -> None:
    flag = next(i for i, word in enumerate(sys.argv) if word.startswith("--"))
    options = dict(zip(sys.argv[flag::2], sys.argv[flag + 1 :: 2], strict=True))
    assert options["--env-id"] == "Fake-v1" and Path(options["--script"]).is_file()
    eval_seed, episodes = int(options["--seed"]), int(options["--episodes"])
    for folder in map(Path, sys.argv[1:flag]):
        assert (folder / "checkpoint.msgpack").exists()
        args = json.loads((folder / "run.json").read_text())["args"]
        value = greedy(args, args["seed"], eval_seed)
        if "nan" in os.environ["MISBEHAVE"]:
            value = math.nan
        (folder / "evaluation.json").write_text(json.dumps({"return": {"mean": value}}))
        trace(folder, "evaluate", seed=eval_seed, episodes=episodes)


if __name__ == "__main__":
    if Path(sys.argv[0]).name == "evaluate.py":
        evaluate()
    else:
        train(parse_args())

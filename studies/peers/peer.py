"""Command-line flags and run folders for other libraries, compatible with our scripts.

Each library imports this module in a separate environment, so it needs only the standard library.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

# Named as in ppo_torch.py, so that the analysis can compare runs. Some libraries deviate from
# these settings, as README.md describes; for example, SBX never clips the value loss.
SETTINGS: dict[str, Any] = {
    "learning_rate": 2.5e-4,
    "anneal_lr": True,
    "num_envs": 32,
    "num_steps": 256,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "num_minibatches": 8,
    "update_epochs": 10,
    "norm_adv": True,
    "clip_coef": 0.2,
    "clip_vloss": True,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
    "adam_eps": 1e-5,
    "bootstrap_truncated": True,
    "matmul_precision": "high",
    "sync_for_timing": False,
}
BATCH_SIZE = SETTINGS["num_envs"] * SETTINGS["num_steps"]


def fail(reason: str) -> NoReturn:
    print(reason, file=sys.stderr)
    sys.exit(2)


def parse_args(script: str, **extra: tuple[Any, str]) -> argparse.Namespace:
    """Return the flags that benchmark.sh passes, together with the SETTINGS.

    `extra` maps the name of each additional flag to its default and its help text.
    """
    parser = argparse.ArgumentParser(prog=f"ppo_{script}.py")
    parser.add_argument("--env-id", default="CartPole-v1", help="environment name in the library")
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[64, 64])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=100 * BATCH_SIZE)
    parser.add_argument("--runs-dir", default="runs")
    parser.add_argument("--run-name")
    parser.add_argument("--save-every", help="ignored, because there are no checkpoints")
    for name, (usual, meaning) in extra.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(usual), default=usual, help=meaning)
    args = parser.parse_args()
    del args.save_every
    args.run_name = args.run_name or f"{args.env_id}__{script}__{args.seed}__{time.time():.0f}"
    if args.total_timesteps < BATCH_SIZE:
        parser.error(f"--total-timesteps must be at least one batch ({BATCH_SIZE} steps)")
    if Path(args.runs_dir, args.run_name).exists():
        parser.error(f"--run-name: {args.run_name} already exists in {args.runs_dir}")
    return argparse.Namespace(exp_name=script, **SETTINGS, **vars(args))


def num_iterations(args: argparse.Namespace) -> int:
    return args.total_timesteps // (args.num_envs * args.num_steps)


def describe(returns: Sequence[float], lengths: Sequence[float]) -> dict[str, Any]:
    """Return the metrics of the episodes that finished in an iteration, as in metrics.jsonl."""
    charts: dict[str, Any] = {"charts/episodes": len(returns)}
    for name, values in {"return": returns, "length": lengths}.items():
        for suffix, of in {"": fmean, "_min": min, "_max": max}.items():
            found = float(of(values)) if len(values) else None
            charts[f"charts/episodic_{name}{suffix}"] = found
    return charts


class RunLog:
    """Write metrics.jsonl during the run, like ppo_torch.py, and run.json once it is complete.

    An iteration is timed from the previous write(), or from begin() if that was called later, to
    the next write().
    """

    def __init__(self, args: argparse.Namespace, compile_mode: str) -> None:
        self.beginning = time.perf_counter()
        self.iteration = 0
        self.batch_size = args.num_envs * args.num_steps
        self.dir = Path(args.runs_dir, args.run_name).absolute()
        self.info: dict[str, Any] = {
            "args": vars(args),
            "script": args.exp_name,
            "framework": args.exp_name,
            "compile_mode": compile_mode,
            "device": "cpu",
            "versions": {package.name: package.version for package in metadata.distributions()},
            "started": time.time(),
            "resumed": [],
            "wandb_id": None,
        }
        self.info |= json.loads(os.environ.get("RUN_INFO", "{}"))  # set by benchmark.sh
        self.dir.mkdir(parents=True)
        self.metrics = open(self.dir / "metrics.jsonl", "w", buffering=1)
        self.begin()

    def begin(self) -> None:
        self.start = time.perf_counter()

    def write(self, charts: dict[str, Any], end: float | None = None) -> None:
        """Write the metrics of an iteration that ended at `end`, by default now."""
        end = time.perf_counter() if end is None else end
        row = {
            "iteration": self.iteration,
            "global_step": (self.iteration + 1) * self.batch_size,
            "charts/SPS": self.batch_size / (end - self.start),
            "time/elapsed": end - self.beginning,
            "time/iteration": end - self.start,
        }
        self.metrics.write(json.dumps(row | charts) + "\n")
        self.iteration += 1
        self.start = end

    def finish(self) -> None:
        peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.info["status"] = "completed"
        self.info["ended"] = time.time()
        self.info["peak_host_bytes"] = peak_rss * (1 if sys.platform == "darwin" else 1024)
        partial = self.dir / "run.partial"
        partial.write_text(json.dumps(self.info, indent=2))
        partial.replace(self.dir / "run.json")
        print(f"Written to {self.dir}")

"""What both peers need: flags, environments, and a run's folder as our scripts leave it.

It runs in a peer's own environment, and imports nothing of this repository.
"""

import argparse
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

# By ppo_torch.py's names, so that the analysis knows what to compare. What a library does not do in
# the same way (SBX, for one, never clips the value loss) is in README.md.
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


def parse_args(script: str, **own: str) -> argparse.Namespace:
    """Return the flags that benchmark.sh passes, and the SETTINGS.

    own are a peer's own numbers, 0 if not given, and what they mean.
    """
    parser = argparse.ArgumentParser(prog=f"ppo_{script}.py")
    parser.add_argument("--env-id", default="CartPole-v1", help="a Gymnasium environment")
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[64, 64])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=100 * BATCH_SIZE)
    parser.add_argument("--runs-dir", default="runs")
    parser.add_argument("--run-name")
    for name, meaning in own.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=0, help=meaning)
    args = parser.parse_args()
    args.run_name = args.run_name or f"{args.env_id}__{script}__{args.seed}__{time.time():.0f}"
    return argparse.Namespace(exp_name=script, **SETTINGS, **vars(args))


def train(
    args: argparse.Namespace,
    start: float,
    compile_mode: str,
    make_model: Callable[[Any], Any],
    make_env: Callable[[], Any] | None = None,
) -> None:
    """Train what make_model makes of the environments, for whole iterations.

    start is when the script began, before its imports. make_env makes an environment, if env_id
    does not name it.
    """
    log = RunLog(args, start, compile_mode)
    envs = make_vec_env(make_env or args.env_id, args.num_envs, seed=args.seed)  # a DummyVecEnv
    make_model(envs).learn(args.total_timesteps // BATCH_SIZE * BATCH_SIZE, callback=log)
    log.finish()


class RunLog(BaseCallback):
    """Writes metrics.jsonl as a run goes, and run.json where it is complete, as ppo_torch.py does.

    An iteration lasts from the start of its rollout to the end of train(), where the library calls
    nothing: to the start of the next rollout, or to the end of training.
    """

    def __init__(self, args: argparse.Namespace, start: float, compile_mode: str) -> None:
        super().__init__()
        self.args = args
        self.begin = time.perf_counter()
        self.iteration = 0
        self.dir = Path(args.runs_dir, args.run_name)
        self.info: dict[str, Any] = {
            "args": vars(args),
            "script": args.exp_name,
            "framework": args.exp_name,
            "compile_mode": compile_mode,
            "device": "cpu",
            "python": platform.python_version(),
            "versions": {package.name: package.version for package in metadata.distributions()},
            "os": platform.platform(),
            "cpu": platform.processor() or platform.machine(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "resumed": [],
            "wandb_id": None,
            "durations": {"imports": self.begin - start},
        }
        self.info |= json.loads(os.environ.get("RUN_INFO", "{}"))  # what benchmark.sh knows
        self.dir.mkdir(parents=True)
        self.metrics = open(self.dir / "metrics.jsonl", "w", buffering=1)

    def _on_rollout_start(self) -> None:
        if self.num_timesteps:
            self.write()
        self.episodes: list[dict[str, float]] = []  # those that end in this iteration
        self.start = time.perf_counter()

    def _on_step(self) -> bool:
        self.episodes += [x["episode"] for x in self.locals["infos"] if "episode" in x]
        return True

    def _on_training_end(self) -> None:
        self.write()

    def write(self) -> None:
        end = time.perf_counter()
        row = {
            "iteration": self.iteration,
            "global_step": self.num_timesteps,
            "charts/episodes": len(self.episodes),
            "charts/SPS": BATCH_SIZE / (end - self.start),
            "time/elapsed": end - self.begin,
            "time/iteration": end - self.start,
        }
        for name, key in {"return": "r", "length": "l"}.items():
            values = [float(x[key]) for x in self.episodes]
            for suffix, of in {"": fmean, "_min": min, "_max": max}.items():
                row[f"charts/episodic_{name}{suffix}"] = of(values) if values else None
        self.metrics.write(json.dumps(row) + "\n")
        self.iteration += 1

    def finish(self) -> None:
        peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.info["status"] = "completed"
        self.info["durations"]["total"] = time.perf_counter() - self.begin
        self.info["peak_device_bytes"] = None
        self.info["peak_host_bytes"] = peak_rss * (1 if sys.platform == "darwin" else 1024)
        partial = self.dir / "run.partial"
        partial.write_text(json.dumps(self.info, indent=2))
        partial.replace(self.dir / "run.json")
        print(f"Written to {self.dir}")

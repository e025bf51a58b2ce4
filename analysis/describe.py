"""Describe one run: compute its row in the table of runs from run.json and metrics.jsonl."""

import json
import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

import numpy as np

from analysis.catalog import DIVERGED, SCRIPTS, SIZES
from analysis.schema import RUNS, SourceError

SIZE_OF = {tuple(units): name for name, units in SIZES.items()}  # hidden units -> network name
# Arguments that change an environment and are therefore part of its name.
RULES = ("sticky_actions", "full_actions", "max_episode_steps")
# Arguments that the `settings` column omits; most of them are part of other columns.
NOT_SETTINGS = {
    *("exp_name", "seed", "env_id", "hidden_sizes", "sync_for_timing"),
    *("runs_dir", "run_name", "track", "save_every", "resume"),
    "vectorization",  # part of the `mode` column
    "total_timesteps",  # given by the `num_iterations` column
    *RULES,
}
LAST_EPISODES = 100  # number of episodes that last_100_return averages, as in MinAtar
WINDOWS = {"first": slice(0, 1), "early": slice(1, 8), "steady": slice(8, None)}
# Arguments that only one algorithm has; they identify the algorithm of a copied script.
ARGUMENT_OF = {"ppo": "clip_coef", "dqn": "target_network_frequency", "sac": "tau"}
WITHOUT_JIT = " without jit"  # suffix of the variant name if JAX compiled nothing


def require_completed(info: dict[str, Any]) -> None:
    """Raise SourceError, with the reason, unless the run is complete and its losses are finite."""
    status = info.get("status")
    if status == "running":
        raise SourceError("it was killed, or is still running")
    if status == "stopped":
        raise SourceError("it was stopped before its end")
    if status == "diverged":
        raise SourceError(DIVERGED)
    if status != "completed":
        raise SourceError(f"status is {status}")


def describe(info: dict[str, Any]) -> dict[str, Any]:
    """Return the row for a run; raise SourceError, with the reason, if the run is not complete.

    info contains the fields of run.json, the lines of metrics.jsonl as "metrics", and optionally
    the results of evaluate.py as "evaluations".
    """
    require_completed(info)
    args = info["args"]
    metrics = info["metrics"]
    hidden = args["hidden_sizes"]
    batch_size = args["num_envs"] * args["num_steps"]
    num_iterations = args["total_timesteps"] // batch_size
    iterations = [row["iteration"] for row in metrics]
    if len(iterations) != num_iterations or iterations != list(range(num_iterations)):
        raise SourceError(f"the logged iterations are not 0 to {num_iterations - 1}")
    values = dict(info)
    for part in ("args", "versions", "evaluations"):
        values |= {f"{part}.{name}": x for name, x in info.get(part, {}).items()}
    settings = {name: x for name, x in sorted(args.items()) if name not in NOT_SETTINGS}
    algorithm = algorithm_of(info["script"], args)
    if algorithm in ("dqn", "sac"):
        # Round down to full iterations: the scripts skip the remaining steps.
        settings["total_timesteps"] = num_iterations * batch_size
    row = {x.name: values.get(x.source) for x in RUNS if x.source}
    row |= {
        "algorithm": algorithm,
        "framework": framework_of(info),
        "compile_mode": compile_mode_of(info),
        "mode": variant_of(info),
        "env_id": environment_of(args),
        "size": SIZE_OF.get(tuple(hidden), "x".join(map(str, hidden)) or "none"),
        "settings": json.dumps(settings),
        "batch_size": batch_size,
        "platform": platform_of(info),
        "started": date_of(info.get("started")),
        "resumed": bool(info.get("resumed")),
        "last_100_return": last_return(metrics),
    }
    row |= durations_of(info)
    if row["resumed"] or row["agent"] not in (None, 0):
        row |= dict.fromkeys([x.name for x in RUNS if x.kind == "seconds"])
    return row


def algorithm_of(script: str, args: Collection[str] = ()) -> str:
    """Return the algorithm in scripts.toml; otherwise guess it, or return "" if that fails."""
    if script in SCRIPTS:
        return SCRIPTS[script]["algorithm"]
    for algorithm, argument in ARGUMENT_OF.items():
        if script.startswith(f"{algorithm}_") or argument in args:
            return algorithm
    return ""


def framework_of(info: dict[str, Any]) -> str:
    """Return the framework in scripts.toml; otherwise guess it from the packages that are used."""
    if info["script"] in SCRIPTS:
        return SCRIPTS[info["script"]]["framework"]
    packages = [x for x in ("torch", "equinox", "flax") if x in info.get("versions", {})]
    return info.get("framework") or (packages or ["unknown"])[0]


def compile_mode_of(info: dict[str, Any]) -> str:
    """Return the compile mode; JAX_DISABLE_JIT disables all compilation in JAX."""
    if info["script"] not in SCRIPTS:
        return info.get("compile_mode") or ("none" if info.get("jit_disabled") else "unknown")
    mode = SCRIPTS[info["script"]]["compile"]
    if not info.get("jit_disabled") or mode == "eager":
        return mode
    return "compile, env none" if mode == "compile" else "none"


def environment_of(args: dict[str, Any]) -> str:
    """Return the environment name, with the options that change the environment."""
    return ", ".join([args["env_id"], *(f"{x} {args[x]}" for x in RULES if args.get(x))])


def variant_of(info: dict[str, Any]) -> str:
    """Return the script name with the options that change how it runs, or "" if there are none."""
    name = info["script"]
    if info["args"].get("vectorization", "sync") != "sync":
        name += f" --vectorization {info['args']['vectorization']}"
    if info.get("devices", 1) > 1:  # one training run uses all devices
        return f"{name}, {info['devices']} devices"
    if info.get("side_by_side"):  # number of processes that shared the machine
        return f"{name}, {info['side_by_side']} side by side"
    return name if name != info["script"] else ""


def platform_of(info: dict[str, Any]) -> str:
    """Return the platform, such as "Linux, H200, driver 570, AMD EPYC, 16 cores, machine 3fa9".

    It is "unknown" unless the environment variable RUN_INFO described the machine when the run
    started. benchmark.sh sets this variable.
    """
    gpu = [] if info["device"] == "cpu" else [info["device"]]
    if not info.get("os"):
        return ", ".join(["unknown", *gpu])
    cpu = re.sub(r"\((R|TM)\)| CPU| Processor|@.*", "", info.get("cpu") or "").strip()
    parts = ["WSL2" if "microsoft" in info["os"].lower() else info["os"].split("-")[0]]
    if gpu:
        parts += [*gpu, f"driver {info.get('driver') or 'unknown'}"]
    parts.append(cpu or "unknown processor")
    if info.get("cores"):
        parts.append(f"{info['cores']} cores")
    if info.get("machine"):
        parts.append(f"machine {info['machine']}")
    return ", ".join(parts)


def date_of(started: object) -> object:
    """Convert a Unix time in seconds to an ISO 8601 date; return anything else unchanged."""
    if not isinstance(started, int | float):
        return started
    return datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds")


def durations_of(info: dict[str, Any]) -> dict[str, float]:
    """Return durations in seconds; durations that include imports need a recorded launch time."""
    metrics = info["metrics"]
    first = metrics[0]["time/iteration"]
    setup = metrics[0]["time/elapsed"] - first
    row = {"setup": setup}
    if "ended" in info:
        row["total"] = info["ended"] - info["started"]
    if "ended" in info and "launched" in info:
        row["imports"] = info["started"] - info["launched"]
        row["startup"] = row["imports"] + setup + first
        row["process"] = info["ended"] - info["launched"]
    for phase, prefix in (("iteration", ""), ("rollout", "rollout_"), ("update", "update_")):
        seconds = [x[f"time/{phase}"] for x in metrics if x.get(f"time/{phase}") is not None]
        for name, window in WINDOWS.items():
            if seconds[window]:
                row[prefix + name] = fmean(seconds[window])
    return row


def last_return(metrics: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean return of about the last LAST_EPISODES episodes; None if fewer finished."""
    if not metrics:  # the run has just started
        return None
    names = ("charts/episodic_return", "charts/episodes")
    means, counts = np.array([[row.get(x) for row in metrics] for x in names], float)
    last = float(running_return(means, counts)[-1])
    return None if np.isnan(last) else last


def running_return(means: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the mean of the last LAST_EPISODES returns after each iteration.

    The result is NaN while fewer episodes have finished. Only the mean return of each iteration is
    known, so it is used as the return of every episode in that iteration.
    """
    counts = np.where(np.isnan(means), 0, np.nan_to_num(counts))
    ends = np.append(0, np.cumsum(counts))
    totals = np.append(0, np.cumsum(np.nan_to_num(means) * counts))
    known = np.append(True, np.diff(ends) > 0)  # np.interp needs increasing positions
    before = np.interp(ends[1:] - LAST_EPISODES, ends[known], totals[known])
    return np.where(ends[1:] >= LAST_EPISODES, (totals[1:] - before) / LAST_EPISODES, np.nan)

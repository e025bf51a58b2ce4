"""Writes runs as the scripts leave them, with durations and returns that a test chooses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

# mode -> script, framework, compile mode, mean seconds of the first and of a steady iteration
MODES: dict[str, tuple[str, str, str, float, float]] = {
    "torch none": ("ppo_torch", "torch", "none", 1.5, 2.0),
    "torch env.jit": ("ppo_torch", "torch", "env.jit", 1.0, 0.25),
    "torch compile": ("ppo_torch_compile", "torch", "compile", 20.0, 0.12),
    "linen none": ("ppo_linen", "linen", "none", 4.0, 3.5),
    "linen jit": ("ppo_linen", "linen", "jit", 3.0, 0.06),
    "nnx none": ("ppo_nnx", "nnx", "none", 4.2, 3.9),
    "nnx jit": ("ppo_nnx", "nnx", "jit", 3.2, 0.062),
    "nnx cached_partial": ("ppo_nnx_cached", "nnx", "cached_partial", 3.2, 0.061),
}
SIZES = {"small": [64, 64], "medium": [256] * 3, "large": [1024] * 6}
COST = {"small": 1.0, "medium": 3.0, "large": 40.0}
WSL2 = "Linux-6.6-microsoft-standard-WSL2-x86_64"


def run_info(
    mode: str = "linen jit",
    env_id: str = "CartPole-v1",
    size: str = "small",
    seed: int = 1,
    iterations: int = 12,
    sync: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """Return what run.json holds under benchmark.sh, but for the results.

    changes replace top-level values.
    """
    script, framework, compile_mode, *_ = MODES[mode]
    name = f"{env_id}__{mode.replace(' ', '_')}__{size}__{'sync__' if sync else ''}{seed}"
    args: dict[str, Any] = {"exp_name": script, "seed": seed, "env_id": env_id}
    args |= {"total_timesteps": 8192 * iterations, "num_envs": 32, "num_steps": 256}
    args |= {"hidden_sizes": SIZES[size], "learning_rate": 2.5e-4, "sync_for_timing": sync}
    args |= {"run_name": name, "runs_dir": "runs", "track": False, "save_every": 0, "resume": ""}
    info: dict[str, Any] = {"args": args, "script": script, "framework": framework}
    info |= {"compile_mode": compile_mode, "resumed": [], "wandb_id": None}
    info |= {"started": f"2026-01-01T00:00:{seed:02}+0000", "git_commit": "a" * 40}
    info |= {"versions": {"torch": "2.13.0", "jax": "0.10.2", "flax": "0.12.8"}}
    info |= {"device": "cpu", "gpu": None, "driver": None, "cpu": "Fast(R) CPU @ 3GHz", "cores": 2}
    info |= {"load": 0.5, "os": "Linux-6.1-x86_64", "container": False}
    return info | changes


def metrics_rows(
    info: dict[str, Any], seconds: np.ndarray, returns: np.ndarray
) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl for the given seconds and returns of each iteration."""
    rows = []
    for i, (duration, value) in enumerate(zip(seconds.tolist(), returns.tolist(), strict=True)):
        row = {"iteration": i, "global_step": 8192 * (i + 1), "time/iteration": duration}
        row |= {"time/elapsed": 1 + sum(seconds[: i + 1].tolist()), "losses/entropy": 0.5}
        row |= {"charts/episodic_return": None if np.isnan(value) else value}
        if info["args"]["sync_for_timing"]:
            row |= {"time/rollout": 0.75 * duration, "time/update": 0.25 * duration}
        rows.append(row)
    return rows


def plain_rows(info: dict[str, Any]) -> list[dict[str, Any]]:
    """Return twelve iterations that take 0.1 s, 0.2 s, ... and return 0, 10, ..."""
    return metrics_rows(info, np.arange(1, 13) / 10, np.arange(12) * 10.0)


def results(rows: list[dict[str, Any]], imports: float = 2.0) -> dict[str, Any]:
    """Return the part of run.json that the scripts compute at the end."""
    durations = {"imports": imports, "total": rows[-1]["time/elapsed"]}
    memory = {"peak_host_bytes": 500_000_000, "peak_device_bytes": None}
    return {"status": "completed", "durations": durations} | memory


def write_run(folder: Path, info: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """Write the folder of a completed run, and return it."""
    path = folder / info["args"]["run_name"]
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "run.json").write_text(json.dumps(info | results(rows)))
    return path


def write_plain(folder: Path, **changes: Any) -> Path:
    """Write a run that differs from others only in its changes, and return its folder."""
    info = run_info(**changes)
    return write_run(folder, info, plain_rows(info))


def write_grid(
    folder: Path,
    modes: tuple[str, ...] = ("linen jit", "nnx cached_partial", "torch compile"),
    envs: tuple[str, ...] = ("CartPole-v1", "Acrobot-v1"),
    sizes: tuple[str, ...] = ("small",),
    repeats: int = 2,
    iterations: int = 12,
    sync: bool = False,
    slowdown: float = 1.0,
    **changes: Any,
) -> Path:
    """Write a run per cell and repeat, with noise of a few percent, and return folder."""
    rng = np.random.default_rng(0)
    for seed in range(1, repeats + 1):
        for i, env_id in enumerate(envs):
            for size in sizes:
                for mode in modes:
                    *_, first, steady = MODES[mode]
                    seconds = np.full(iterations, steady * COST[size] * (1 + i / 4) * slowdown)
                    seconds *= np.exp(0.03 * rng.standard_normal() + 0.02 * rng.random(iterations))
                    seconds[0] += first
                    returns = 20 + 400 * np.linspace(0, 1, iterations) + rng.normal(0, 5)
                    info = run_info(mode, env_id, size, seed, iterations, sync, **changes)
                    write_run(folder, info, metrics_rows(info, seconds, returns))
    return folder


def foreign_runs(
    platforms: tuple[str, ...] = ("A100", "H100"),
    sizes: tuple[str, ...] = tuple(SIZES),
    envs: tuple[str, ...] = tuple(f"Env{i}-v0" for i in range(12)),
    repeats: int = 2,
    **columns: Any,
) -> pd.DataFrame:
    """Return somebody else's table, of the columns that it must have and of a platform.

    H100 takes half as long as A100, and an eager run three times as long as a compiled one.
    """
    rng = np.random.default_rng(0)
    rows = [
        {"platform": platform, "framework": "mine", "compile_mode": mode, "env_id": env_id}
        | {"size": size, "first": 5.0 / factor}
        | {"steady": 0.1 * COST[size] * factor * (1 + k) / (1 + j) * rng.lognormal(0, 0.05)}
        for j, platform in enumerate(platforms)
        for size in sizes
        for k, env_id in enumerate(envs)
        for mode, factor in (("jit", 1.0), ("eager", 3.0))
        for _ in range(repeats)
    ]
    return pd.DataFrame(rows).assign(**columns)


def foreign_iterations(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the least that a table of iterations may hold: returns that rise, by run."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"run": np.repeat(runs["run"].to_numpy(), 12)})
    table["iteration"] = np.tile(np.arange(12), len(runs))
    return table.assign(**{"charts/episodic_return": table["iteration"] + rng.random(len(table))})


def write_table(path: Path, table: pd.DataFrame) -> Path:
    """Write a table as its suffix says, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        table.to_csv(path, index=False)
    else:
        table.to_parquet(path)
    return path

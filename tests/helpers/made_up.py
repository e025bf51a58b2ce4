"""Synthetic runs with known true values, as tables and as run folders."""

import io
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis import __main__, catalog, measures, runs, schema

LINEN, NNX, CACHED = "ppo_linen", "ppo_nnx", "ppo_nnx_cached"
COMPILE, TORCH = "ppo_torch_compile", "ppo_torch"
FRAMEWORKS = {LINEN: "linen", NNX: "nnx", CACHED: "nnx", COMPILE: "torch", TORCH: "torch"}
ENVS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")


# === Tables =====================================================================================
def table(rows: pd.DataFrame | Sequence[dict[str, Any]], **common: Any) -> pd.DataFrame:
    """Return a table of runs with all columns. Columns not given have a default or are empty."""
    frame = pd.DataFrame(rows).assign(**common)
    usual: dict[str, Any] = {"run": [f"run {i + 1}" for i in range(len(frame))], "size": "small"}
    usual |= {"env_id": "CartPole-v1", "repeat": 1.0, "platform": "here", "compile_mode": "jit"}
    for name, x in usual.items():
        if name not in frame:
            frame[name] = x
    if "framework" not in frame:
        frame["framework"] = [FRAMEWORKS.get(x, x.split(" ")[0]) for x in frame["mode"]]
    return runs.fill(schema.validate(frame, schema.RUNS)[0])


def grid(
    modes: dict[str, tuple[float, float]],
    envs: Sequence[str] = ("CartPole-v1",),
    repeats: int = 1,
    length: int = 100,
    noise: float = 0.0,
    seed: int = 0,
    **common: Any,
) -> pd.DataFrame:
    """Return a run per mode, environment and repeat.

    modes maps a mode to the durations (startup, iteration) in seconds. Iterations in environment n
    take 2 ** n times as long. Startup and iterations have separate log-normal noise. Imports, setup
    and iteration 0 take 30%, 20% and 50% of the startup.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for mode, (i, env), repeat in product(modes, enumerate(envs), range(1, repeats + 1)):
        startup, steady = modes[mode] * np.exp(noise * rng.standard_normal(2))
        steady *= 2**i
        row = {"mode": mode, "env_id": env, "repeat": float(repeat), "num_iterations": length}
        row |= {"imports": 0.3 * startup, "setup": 0.2 * startup, "first": 0.5 * startup}
        row |= {"startup": startup, "steady": steady, "early": steady, "batch_size": 1000}
        row |= {"process": startup + (length - 1) * steady}
        rows.append(row | {"run": f"{mode}, {env}, {repeat}"})
    return table(rows, **common)


def returning(values: dict[str, Any], env: str = "CartPole-v1", **common: Any) -> pd.DataFrame:
    """Return runs with given final returns. values maps a mode to one return per repeat."""
    parts = []
    for mode, returns in values.items():
        part = grid({mode: (6.0, 0.1)}, (env,), repeats=len(returns), **common)
        parts.append(part.assign(final_return=np.array(returns, float)))
    return pd.concat(parts, ignore_index=True)


def logs(
    frame: pd.DataFrame, returns: Callable | None = None, loss: Callable | None = None
) -> pd.DataFrame:
    """Return ten iterations per run. returns and loss map a run and an iteration to a value.

    By default, every run has different losses and no returns. Iteration 0 includes compilation.
    """
    rows = []
    for own, (_, run) in enumerate(frame.iterrows()):
        for i in range(10):
            row = {"run": run["run"], "iteration": float(i), "global_step": 100.0 * (i + 1)}
            row["time/iteration"] = run["steady"] if i else run["first"]
            row["time/elapsed"] = run["setup"] + run["first"] + i * run["steady"]
            row["losses/entropy"] = loss(run, i) if loss else 0.5 + own
            row["charts/episodic_return"] = returns(run, i) if returns else np.nan
            rows.append(row)
    return schema.validate(pd.DataFrame(rows), schema.ITERATIONS)[0]


def data_of(frame: pd.DataFrame, iterations: pd.DataFrame | None = None, **more: Any) -> runs.Data:
    """Return a Data object with the runs and iterations, as if they had been loaded from files."""
    table = pd.DataFrame() if iterations is None else iterations
    found, _ = schema.validate(table, schema.ITERATIONS)
    return runs.Data(frame.reset_index(drop=True), found, more.pop("left_out", {}), **more)


def only_experiment(
    frame: pd.DataFrame, iterations: pd.DataFrame | None = None, baseline: str | None = None
) -> measures.Experiment:
    """Return the experiment that the runs belong to. Fail unless they belong to the same one."""
    [made] = measures.experiments(data_of(frame, iterations), baseline)
    return made


def by(frame: pd.DataFrame, *names: str) -> dict[Any, dict[str, Any]]:
    """Return the rows of a table as a dict, keyed by the values in the named columns."""
    rows = frame.to_dict("records")
    found = {tuple(row[x] for x in names) if len(names) > 1 else row[names[0]]: row for row in rows}
    assert len(found) == len(rows)
    return found


# === Files ======================================================================================
# mode -> script, framework, compile mode, extra seconds of iteration 0, seconds per iteration
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
SECONDS = np.arange(1, 13) / 10  # duration of each iteration: 0.1, 0.2, ...
NEW_YEAR = 1767225600.0  # 2026-01-01, in UTC
RETURNS = np.arange(12) * 10.0


def run_info(
    mode: str = "linen jit",
    env_id: str = "CartPole-v1",
    size: str = "small",
    seed: int = 1,
    sync: bool = False,
    args: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Return the content of run.json for a run that benchmark.sh started, without the results.

    args override arguments of the run, and changes override top-level values.
    """
    script, _, compile_mode, *_ = MODES[mode]
    name = f"{env_id}__{mode.replace(' ', '_')}__{size}__{'sync__' if sync else ''}{seed}"
    own: dict[str, Any] = {"seed": seed, "env_id": env_id}
    own |= {"total_timesteps": 8192 * 12, "num_envs": 32, "num_steps": 256}
    own |= {"hidden_sizes": catalog.SIZES[size], "learning_rate": 2.5e-4, "sync_for_timing": sync}
    own |= {"run_name": name, "runs_dir": "runs", "track": False, "save_every": 0, "resume": ""}
    info: dict[str, Any] = {"args": own | (args or {}), "script": script}
    info |= {"jit_disabled": compile_mode == "none", "resumed": [], "wandb_id": None}
    started = changes.get("started", NEW_YEAR + seed)
    info |= {"launched": started - 2.0, "started": started, "git_commit": "a" * 40}
    info |= {"versions": {"torch": "2.13.0", "jax": "0.10.2", "flax": "0.12.8"}}
    info |= {"device": "cpu", "gpu": None, "driver": None, "cpu": "Fast(R) CPU @ 3GHz", "cores": 2}
    info |= {"load": 0.5, "os": "Linux-6.1-x86_64", "container": False}
    return info | changes


def metrics_rows(
    info: dict[str, Any], seconds: np.ndarray = SECONDS, returns: np.ndarray = RETURNS
) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl from the duration and the return of each iteration."""
    rows = []
    for i, (duration, value) in enumerate(zip(seconds.tolist(), returns.tolist(), strict=True)):
        row = {"iteration": i, "global_step": 8192 * (i + 1), "time/iteration": duration}
        row |= {"time/elapsed": 1 + sum(seconds[: i + 1].tolist()), "losses/entropy": 0.5}
        row |= {"charts/episodic_return": value}
        if info["args"].get("sync_for_timing"):
            row |= {"time/rollout": 0.75 * duration, "time/update": 0.25 * duration}
        rows.append(row)
    return rows


def results(info: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the entries that are added to run.json at the end, including peak memory."""
    ended = info["started"] + rows[-1]["time/elapsed"]
    return {"status": "completed", "ended": ended, "peak_host_bytes": 500_000_000}


def write_run(folder: Path, info: dict[str, Any], rows: list[dict[str, Any]] | None = None) -> Path:
    """Write a run folder and return it. The run is completed unless info has another status."""
    rows = rows or metrics_rows(info)
    path = folder / info["args"]["run_name"]
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "run.json").write_text(json.dumps(results(info, rows) | info))
    return path


def write_plain(folder: Path, **changes: Any) -> Path:
    """Write a run with the defaults of run_info(), apart from changes, and return its folder."""
    return write_run(folder, run_info(**changes))


def write_grid(
    folder: Path,
    modes: Sequence[str] = ("linen jit", "nnx cached_partial", "torch compile"),
    envs: Sequence[str] = ENVS[:2],
    sizes: Sequence[str] = ("small",),
    repeats: int = 2,
    slowdown: float = 1.0,
    **changes: Any,
) -> Path:
    """Write runs whose durations have a few percent of noise, and return the folder."""
    rng = np.random.default_rng(0)
    for seed, env_id, size, mode in product(range(1, repeats + 1), envs, sizes, modes):
        *_, first, steady = MODES[mode]
        pace = steady * slowdown * (1 if size == "small" else 3)
        seconds = pace * np.exp(0.03 * rng.standard_normal() + 0.02 * rng.random(12))
        seconds[0] += first
        info = run_info(mode, env_id, size, seed, **changes)
        write_run(folder, info, metrics_rows(info, seconds, RETURNS + rng.normal(0, 5)))
    return folder


# === Tables from other sources ==================================================================
def foreign_runs(**columns: Any) -> pd.DataFrame:
    """Return a table of runs from another source: two modes, and some optional columns.

    An eager iteration takes 3x as long as a compiled one.
    """
    runs = grid({"mine jit": (10.0, 0.1), "mine eager": (3.0, 0.3)}, ENVS[:1], 4, 12, 0.05)
    runs["compile_mode"] = runs["mode"].str.removeprefix("mine ")
    runs["total"] = runs["first"] + 11 * runs["steady"]
    runs["final_return"] = np.arange(len(runs))
    runs["run"] = [f"r{i}" for i in range(len(runs))]
    names = ["run", "framework", "compile_mode", "env_id", "size", "first", "steady"]
    more = ["repeat", "startup", "process", "num_iterations", "total", "final_return"]
    return runs[[*names, *more]].assign(**columns)


def foreign_iterations(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a minimal table of iterations, with increasing returns per run."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"run": np.repeat(runs["run"].to_numpy(), 12)})
    table["iteration"] = np.tile(np.arange(12), len(runs))
    table["charts/episodic_return"] = table["iteration"] + rng.random(len(table))
    return table


def write_table(path: Path, table: pd.DataFrame) -> Path:
    """Write a table in the format of its suffix, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        table.to_csv(path, index=False)
    else:
        table.to_parquet(path)
    return path


def write_study(folder: Path, runs: pd.DataFrame, iterations: pd.DataFrame) -> Path:
    """Write two tables from another source to a folder, and return the folder."""
    write_table(folder / "runs.csv", runs)
    write_table(folder / "iterations.parquet", iterations)
    return folder


def run_command(*arguments: object) -> tuple[Any, str, str]:
    """Run the analysis in this process. Return its exit status, stdout and stderr."""
    out = io.StringIO()
    err = io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["analysis", *map(str, arguments)])
        with pytest.raises(SystemExit) as end, warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", DeprecationWarning)
            __main__.main()
    return end.value.code, out.getvalue(), err.getvalue()

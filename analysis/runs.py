"""Load benchmark runs, from wherever they are, into one table of runs and one of iterations.

A source is a folder that holds runs at any depth, a table saved as parquet, or
"wandb:entity/project". README.md documents every column.
"""

import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

SIZES = {(64, 64): "small", (256,) * 3: "medium", (1024,) * 6: "large"}
# Arguments that say who and where, not how much work; all others are the column `settings`.
NOT_SETTINGS = {
    *("exp_name", "seed", "env_id", "hidden_sizes", "jit", "jit_env", "sync_for_timing"),
    *("runs_dir", "run_name", "track", "wandb_project", "wandb_entity", "wandb_group", "notes"),
    *("save_every", "resume"),
    "total_timesteps",  # the column num_iterations
}
WINDOWS = {"first": slice(0, 1), "early": slice(1, 8), "steady": slice(8, None)}
# Runs that agree in all of these are copies, or repetitions of one another: the latest counts.
IDENTITY = [
    *("script", "mode", "env_id", "size", "settings", "num_iterations", "sync", "repeat"),
    *("platform", "host", "commit", "torch", "jax", "flax", "driver"),
]
REQUIRED = ("framework", "compile_mode", "env_id", "size", "repeat", "first", "steady")
TEXT = (
    *("run", "name", "source", "script", "framework", "compile_mode", "mode", "env_id", "size"),
    *("hidden_sizes", "settings", "platform", "host", "device", "gpu", "driver", "os", "started"),
    *("commit", "torch", "jax", "flax", "versions", "notes"),
)
NUMBERS = (
    *("repeat", "seed", "num_iterations", "batch_size", "cores", "load", "imports", "setup"),
    *("startup", "first", "early", "steady", "saving", "total", "process", "rollout_first"),
    *("rollout_early", "rollout_steady", "update_first", "update_early", "update_steady", "sps"),
    *("final_return", "best_return", "peak_host_bytes", "peak_device_bytes"),
)
FLAGS = ("sync", "wsl2", "container", "resumed")
MEASURES = (
    *("charts/episodes", "charts/episodic_return", "charts/episodic_return_min"),
    *("charts/episodic_return_max", "charts/episodic_length", "charts/episodic_length_min"),
    *("charts/episodic_length_max", "charts/learning_rate", "charts/SPS", "losses/policy_loss"),
    *("losses/value_loss", "losses/entropy", "losses/approx_kl", "losses/clip_fraction"),
    *("losses/explained_variance", "time/elapsed", "time/iteration", "time/rollout"),
    "time/update",
)
SPEEDS = [name for name in MEASURES if name.startswith("time/") or name == "charts/SPS"]


def is_number(x: Any) -> bool:
    return type(x) in (int, float) and abs(x) < 1e300  # neither a flag nor NaN nor infinite


KINDS: dict[str, Callable[[Any], bool]] = {
    "text": lambda x: isinstance(x, str),
    "true or false": lambda x: isinstance(x, bool),
    "a number": is_number,
    "a number above 0": lambda x: is_number(x) and x > 0,
    "a whole number above 0": lambda x: type(x) is int and x > 0,
    "a list of whole numbers above 0": lambda x: (
        isinstance(x, list) and all(type(n) is int and n > 0 for n in x)
    ),
    "a list of whole numbers": lambda x: isinstance(x, list) and all(type(n) is int for n in x),
}
WANTED = {
    "text": "script framework compile_mode started device os gpu driver cpu git_commit args.env_id "
    "args.run_name args.notes",
    "true or false": "container args.sync_for_timing",
    "a number": "args.seed repeat cores load peak_host_bytes peak_device_bytes durations.saving",
    "a number above 0": "durations.imports durations.total durations.process",
    "a whole number above 0": "args.num_envs args.num_steps args.total_timesteps",
    "a list of whole numbers above 0": "args.hidden_sizes",
    "a list of whole numbers": "resumed",
}
# These may be null; and, since W&B drops a summary's nulls and runs differ in age, absent.
NULLABLE = (
    *("gpu", "driver", "cpu", "git_commit", "repeat", "cores", "load", "peak_device_bytes"),
    *("args.notes", "durations.saving", "durations.process", "resumed"),
)


class SourceError(ValueError):
    """A source that gives no runs; the message is one sentence for the user."""


class Data(NamedTuple):
    """Everything that a source gave."""

    runs: pd.DataFrame  # a row per run
    iterations: pd.DataFrame  # a row per run and iteration; `run` refers to the table of runs
    left_out: dict[str, str]  # name of a run that was not used -> why


class Record(NamedTuple):
    """A run as its source gave it."""

    run: str  # unique within the source
    source: str
    info: dict[str, Any]  # what run.json holds
    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl


def load_runs(source: str | Path, **options: Any) -> pd.DataFrame:
    """Return one row per run; options are those of load(). Runs left out are named in a warning."""
    return warn_of_left_out(load(source, **options)).runs


def load_iterations(source: str | Path, **options: Any) -> pd.DataFrame:
    """Return one row per run and iteration; options are those of load()."""
    return warn_of_left_out(load(source, **options)).iterations


def warn_of_left_out(data: Data) -> Data:
    if data.left_out:
        names = "; ".join(f"{name} ({reason})" for name, reason in data.left_out.items())
        warnings.warn(f"{len(data.left_out)} runs left out: {names}", stacklevel=3)
    return data


def load(
    source: str | Path,
    filters: dict[str, Any] | None = None,
    cache: str | Path | None = None,
) -> Data:
    """Load both tables from a folder, a .parquet table, or "wandb:entity/project".

    filters select W&B runs, in its MongoDB syntax. cache names a .parquet file: it is read if it
    exists, and otherwise written. Raise SourceError if there is nothing to load.
    """
    if cache and iterations_path(cache).exists():
        return load_table(Path(cache))
    if str(source).startswith("wandb:"):
        records, left_out = read_wandb(str(source).removeprefix("wandb:"), filters)
    elif str(source).endswith(".parquet"):
        return load_table(Path(source))
    else:
        records, left_out = read_folder(Path(source))
    data = tabulate(records, left_out)
    if data.runs.empty:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(left_out.items())[:3])
        more = f" ({len(left_out)} left out, e.g. {reasons})" if left_out else ""
        raise SourceError(f"no completed run in {source}{more}")
    if cache:
        save(data, cache)
    return data


# === Folders ====================================================================================
def read_folder(folder: Path) -> tuple[list[Record], dict[str, str]]:
    """Return the complete runs at any depth below folder, and why the others are left out."""
    if not folder.is_dir():
        raise SourceError(f"{folder} is not a folder of runs")
    records, left_out = [], {}
    for path in find_runs(folder):
        run = str(path.relative_to(folder)) if path != folder else path.resolve().name
        try:
            records.append(Record(run, str(path), *read_run(path)))
        except (OSError, ValueError) as error:
            left_out[run] = str(error)
    complete_runs = {record.run for record in records}
    failed = {run: reason for run, reason in failures(folder) if run not in complete_runs}
    return records, left_out | failed


def failures(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the runs that failed under benchmark.sh, and why, from the logs that it keeps."""
    for log in sorted([*folder.glob("benchmark.jsonl"), *folder.glob("*/benchmark.jsonl")]):
        for line in log.read_text(errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # half a line, from a driver that was killed as it wrote
            if isinstance(event, dict) and event.get("completed") == "no" and event.get("run"):
                run = log.parent.relative_to(folder) / str(event["run"])
                yield str(run), str(event.get("reason") or "it failed")


def find_runs(folder: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(folder):
        if {"run.json", "metrics.jsonl"} & set(files):
            folders.clear()
            yield Path(path)
        # Hidden folders are the driver's: warm-ups, and what killed runs left behind.
        folders[:] = sorted(x for x in folders if x != "wandb" and not x.startswith("."))


def read_run(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return run.json and the lines of metrics.jsonl; raise ValueError if the run is no good."""
    if not (path / "run.json").exists():
        raise ValueError("no run.json: it was killed or stopped, or is still running")
    try:
        info = json.loads((path / "run.json").read_text())
    except ValueError:
        raise ValueError("run.json is not JSON") from None
    try:
        metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        raise ValueError("no metrics.jsonl") from None
    except ValueError:
        raise ValueError("metrics.jsonl is not JSON lines") from None
    return info, metrics


# === Weights & Biases ===========================================================================
def read_wandb(path: str, filters: dict[str, Any] | None) -> tuple[list[Record], dict[str, str]]:
    """Return the finished runs of path, "entity/project", and why the others are left out.

    Runs come in pages. Each history takes requests of its own, so they are fetched side by side.
    """
    if not re.fullmatch(r"[^/]+/[^/]+", path):
        raise SourceError(f"a W&B source is wandb:entity/project, not wandb:{path}")
    import wandb  # half a second that only this source pays

    wandb.setup(wandb.Settings(silent=True))  # without a key it must fail, not ask for one
    left_out = {}
    try:
        found = list(wandb.Api(timeout=30).runs(path, filters, per_page=100, lazy=False))
        finished = [run for run in found if "durations" in run.summary_metrics]
        with ThreadPoolExecutor(8) as pool:
            histories = list(pool.map(read_history, finished))
    except (wandb.Error, ValueError) as error:
        raise SourceError(f"W&B gave no runs of {path}: {error}") from error
    for run in found:
        if run not in finished:
            left_out[f"{run.name} ({run.id})"] = f"no results; W&B calls it {run.state}"
    records = [
        Record(run.id, run.url, run.config | dict(run.summary_metrics), history)
        for run, history in zip(finished, histories, strict=True)
    ]
    return records, left_out


def read_history(run: Any) -> list[dict[str, Any]]:
    """Return what a W&B run logged, without W&B's own keys.

    A run that was killed and resumed logs some iterations twice: those made again count.
    """
    rows = run.scan_history()
    rows = [{name: x for name, x in row.items() if not name.startswith("_")} for row in rows]
    return list({row.get("iteration"): row for row in rows}.values())


# === Tables =====================================================================================
def tabulate(records: Iterable[Record], left_out: dict[str, str]) -> Data:
    """Check the records, describe each by a row, and drop duplicates; left_out grows."""
    rows, iterations = [], []
    for record in records:
        try:
            check(record)
            rows.append(describe(record))
        except ValueError as error:
            left_out[record.run] = str(error)
        else:
            iterations += [{"run": record.run} | row for row in record.metrics]
    runs = complete(pd.DataFrame(rows))
    if not runs.empty:
        runs = runs.sort_values("started", kind="stable", key=parse_times)
        # A run without a stop has all that a resumed one has, and durations: old or not, it counts.
        runs = runs.sort_values("resumed", kind="stable", ascending=False)
        copies = runs.duplicated(IDENTITY, keep="last")
        kept = runs[~copies].set_index(IDENTITY)[["run", "resumed"]]
        for _, copy in runs[copies].iterrows():
            better = kept.loc[tuple(copy[IDENTITY])]
            why = "newer" if better["resumed"] == copy["resumed"] else "not a resumed one"
            left_out[copy["run"]] = f"same settings as {better['run']}, which is {why}"
        runs = runs[~copies].sort_values("run", ignore_index=True)
    table = pd.DataFrame(iterations, columns=["run", "iteration", "global_step", *MEASURES])
    table = table[table["run"].isin(runs["run"])].reset_index(drop=True)
    table = table.astype(dict.fromkeys(MEASURES, "float64"))
    table.loc[table["run"].isin(runs.loc[runs["resumed"], "run"]), SPEEDS] = np.nan
    return Data(runs, table, left_out)


def parse_times(times: pd.Series) -> pd.Series:
    return pd.to_datetime(times, format="ISO8601", utc=True, errors="coerce")


def check(record: Record) -> None:
    """Raise ValueError, with one reason, for a record that is not a completed and whole run."""
    info = record.info if isinstance(record.info, dict) else {}
    for part in ("args", "durations", "versions"):
        if not isinstance(info.get(part), dict):
            raise ValueError(f"not a run of this benchmark: it has no {part}")
    if info.get("status") != "completed":
        raise ValueError(f"status is {info.get('status')}")
    parts = {
        f"{part}.{name}": x for part in ("args", "durations") for name, x in info[part].items()
    }
    check_kinds({"script": info["args"].get("exp_name")} | info | parts, WANTED, NULLABLE)
    num_iterations = count_iterations(info["args"])
    if num_iterations == 0:
        raise ValueError("its total_timesteps are not enough for an iteration")
    if len(record.metrics) != num_iterations:
        raise ValueError(f"{len(record.metrics)} iterations instead of {num_iterations}")
    times = ["time/iteration", "time/elapsed"]
    times += ["time/rollout", "time/update"] if info["args"]["sync_for_timing"] else []
    wanted = {"a whole number above 0": "global_step", "a number above 0": " ".join(times)}
    wanted["a number"] = " ".join(MEASURES)
    nullable = [name for name in MEASURES if name not in times]
    for i, row in enumerate(record.metrics):
        if not isinstance(row, dict) or row.get("iteration") != i:
            raise ValueError(f"line {i + 1} of its metrics is not iteration {i}")
        check_kinds(row, wanted, nullable, f"iteration {i}: ")
    if record.metrics[0]["time/elapsed"] <= record.metrics[0]["time/iteration"]:
        raise ValueError("iteration 0: time/elapsed is not above time/iteration")


def check_kinds(
    values: dict[str, Any], wanted: dict[str, str], nullable: Sequence[str], where: str = ""
) -> None:
    """Raise ValueError for the first of the wanted values that is not of its kind."""
    for kind, names in wanted.items():
        for name in names.split():
            value = values.get(name)
            if name not in values and name not in nullable:
                raise ValueError(f"{where}{name} is missing")
            if not KINDS[kind](value) and not (value is None and name in nullable):
                raise ValueError(f"{where}{name} is {json.dumps(value):.40}, not {kind}")


def count_iterations(args: dict[str, Any]) -> int:
    return args["total_timesteps"] // (args["num_envs"] * args["num_steps"])


def describe(record: Record) -> dict[str, Any]:
    """Return the row of a run that check() found good."""
    info, args = record.info, record.info["args"]
    hidden, versions = tuple(args["hidden_sizes"]), info["versions"]
    versions = {name.lower(): version for name, version in versions.items()}
    cpu = re.sub(r"\((R|TM)\)| CPU| Processor|@.*", "", info.get("cpu") or "unknown CPU").strip()
    host = f"{cpu}, {info.get('cores')} cores"
    on_gpu = info["device"] != "cpu"
    wsl2 = "microsoft" in info["os"].lower()
    system = "WSL2" if wsl2 else info["os"].split("-")[0]
    unit = f"{info['device']}, driver {info.get('driver')}" if on_gpu else host
    settings = {name: x for name, x in sorted(args.items()) if name not in NOT_SETTINGS}
    returns = [row.get("charts/episodic_return") for row in record.metrics]
    returns = [x for x in returns if x is not None]
    return {
        "run": record.run,
        "name": args["run_name"],
        "source": record.source,
        "script": info.get("script") or args["exp_name"],
        "framework": info["framework"],
        "compile_mode": info["compile_mode"],
        "env_id": args["env_id"],
        "size": SIZES.get(hidden, "x".join(map(str, hidden))),
        "hidden_sizes": " ".join(map(str, hidden)),
        "settings": json.dumps(settings),
        "repeat": args["seed"] if info.get("repeat") is None else info["repeat"],
        "seed": args["seed"],
        "sync": args["sync_for_timing"],
        "num_iterations": count_iterations(args),
        "batch_size": args["num_envs"] * args["num_steps"],
        "platform": f"{system}, {unit}",
        "host": host,
        "device": info["device"],
        "gpu": info.get("gpu"),
        "driver": info.get("driver"),
        "os": info["os"],
        "wsl2": wsl2,
        "container": info["container"],
        "cores": info.get("cores"),
        "load": info.get("load"),
        "started": info["started"],
        "commit": info.get("git_commit"),
        **{name: versions.get(name) for name in ("torch", "jax", "flax")},
        "versions": json.dumps(info["versions"], sort_keys=True),
        "notes": args.get("notes"),
        "resumed": bool(info.get("resumed")),
        "final_return": returns[-1] if returns else None,
        "best_return": max(returns, default=None),
        "peak_host_bytes": info["peak_host_bytes"],
        "peak_device_bytes": info.get("peak_device_bytes"),
    } | ({} if info.get("resumed") else measure(record))


def measure(record: Record) -> dict[str, float | None]:
    """Return the durations of a run that was never stopped."""
    durations, args, metrics = record.info["durations"], record.info["args"], record.metrics
    first = metrics[0]["time/iteration"]
    setup = metrics[0]["time/elapsed"] - first
    row = {name: durations.get(name) for name in ("imports", "saving", "total")}
    row |= {"setup": setup, "startup": durations["imports"] + setup + first}
    row["process"] = durations.get("process", durations["imports"] + durations["total"])
    for prefix, name in [("", "iteration"), ("rollout_", "rollout"), ("update_", "update")]:
        seconds = [line.get(f"time/{name}") for line in metrics]
        seconds = [x for x in seconds if x is not None]
        parts = {f"{prefix}{window}": seconds[part] for window, part in WINDOWS.items()}
        row |= {window: fmean(part) for window, part in parts.items() if part}
    if "steady" in row:
        row["sps"] = args["num_envs"] * args["num_steps"] / row["steady"]
    return row


def complete(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs with every column, in one order and with one type each."""
    runs = runs.copy()
    if "mode" not in runs and {"framework", "compile_mode"} <= set(runs):
        runs["mode"] = runs["framework"] + " " + runs["compile_mode"]
    for name in TEXT:
        runs[name] = (runs[name] if name in runs else pd.Series(None, runs.index)).astype("str")
        runs[name] = runs[name].fillna("")
    for name in NUMBERS:
        column = runs[name] if name in runs else pd.Series(None, runs.index)
        runs[name] = column.astype("float64")
    for name in FLAGS:
        runs[name] = (runs[name] if name in runs else pd.Series(False, runs.index)).astype("bool")
    return runs[[*TEXT, *FLAGS, *NUMBERS]]


# === Saved tables ===============================================================================
def save(data: Data, path: str | Path) -> None:
    """Write path, a .parquet file of runs and of what was left out; beside it, the iterations."""
    runs = data.runs.copy()
    runs.attrs["left_out"] = data.left_out
    runs.to_parquet(path)
    data.iterations.to_parquet(iterations_path(path))


def iterations_path(path: str | Path) -> Path:
    return Path(path).with_suffix(".iterations.parquet")


def load_table(path: Path) -> Data:
    """Read a table of runs, with or without one of iterations; missing columns are filled in."""
    try:
        runs = pd.read_parquet(path)
    except (OSError, ValueError):
        raise SourceError(f"{path} is not a table in parquet format") from None
    missing = [name for name in REQUIRED if name not in runs]
    if missing:
        raise SourceError(f"{path} is not a table of runs: no column {', '.join(missing)}")
    if "run" not in runs:
        runs["run"] = [f"row {i}" for i in range(len(runs))]
    iterations = pd.DataFrame(columns=["run", "iteration", "global_step", *MEASURES])
    if iterations_path(path).exists():
        iterations = pd.read_parquet(iterations_path(path))
    left_out = runs.attrs.pop("left_out", {})
    try:
        return Data(complete(runs), iterations, left_out)
    except ValueError as error:
        raise SourceError(f"{path} is not a table of runs: {error}") from None

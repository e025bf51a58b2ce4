"""Load benchmark runs, from wherever they are, into one table of runs and one of iterations.

A source is a folder that holds runs or studies at any depth, a table (.csv or .parquet), or
"wandb:entity/project".
"""

import json
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import schema
from analysis.schema import ITERATIONS, RUNS, SCRIPTS, SIZES, Column, SourceError, clean

SIZE_OF = {tuple(units): name for name, units in SIZES.items()}  # by a network's hidden layers
# Arguments that change an environment, and belong to its name.
RULES = ("sticky_actions", "full_actions", "max_episode_steps")
# Arguments that say who and where, not how much work; all others are the column `settings`.
NOT_SETTINGS = {
    *("exp_name", "seed", "env_id", "hidden_sizes", "sync_for_timing"),
    *("runs_dir", "run_name", "track", "save_every", "resume"),
    "vectorization",  # the column mode
    "total_timesteps",  # the column num_iterations
    *RULES,
}
EVALUATIONS = {  # column -> file of evaluate.py, its epsilon
    "greedy": ("evaluation.json", 0),
    "noisy": ("evaluation-epsilon-0.05.json", 0.05),
    "random": ("evaluation-epsilon-1.json", 1),
}
LAST_EPISODES = 100  # MinAtar's measure of learning
WINDOWS = {"first": slice(0, 1), "early": slice(1, 8), "steady": slice(8, None)}
# Runs that agree in all of these are made twice: the latest counts.
IDENTITY = ["mode", "platform", "settings", "sync", "env_id", "size", "num_iterations", "repeat"]
PARTS = ("imports", "setup", "first")  # of startup
SPEEDS = ["time/elapsed", "time/iteration", "time/rollout", "time/update", "charts/SPS"]
# An argument tells the algorithm of a copy that has a name of its own.
TELLING = {"ppo": "clip_coef", "dqn": "target_network_frequency", "sac": "tau"}
OP_BY_OP = " without jit"  # what stands behind a script's name where JAX compiled nothing
TABLES = ("runs.csv", "runs.parquet")  # either makes its folder a study
# What is raised where a file holds something else than a run.
FOREIGN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class Data(NamedTuple):
    """Everything that a source gave."""

    runs: pd.DataFrame  # a row per run
    iterations: pd.DataFrame  # a row per run and iteration; `run` refers to the table of runs
    left_out: dict[str, str]  # name of a run that was not used -> why
    notes: tuple[str, ...] = ()  # what was filled in, in sentences


def load(
    source: str | Path | Sequence[str | Path],
    filters: dict[str, Any] | None = None,
    only: Collection[str] | None = None,
    names: Iterable[Path] = (),
) -> Data:
    """Load a source, or several; raise SourceError if there is nothing to load.

    filters select W&B runs, in its MongoDB syntax. only names the runs of a folder that count.
    names are TOML files of other names for environments, as where two libraries have one game.
    """
    if isinstance(source, (str, Path)):
        parts = [read(source, filters, only)]
    else:
        several = dict.fromkeys(str(Path(x)) for x in source)
        parts = [rename(read(name, filters), name) for name in several]
    data = merge(parts)
    for path in names:
        data.runs["env_id"] = data.runs["env_id"].replace(read_names(path))
    data = count_once(data)
    if data.runs.empty:
        reasons = [f"{name}: {reason}" for name, reason in data.left_out.items()]
        more = f" ({len(reasons)} left out, e.g. {reasons[0]})" if reasons else ""
        raise SourceError(f"no completed run in {source}{more}")
    return data


def read(
    source: str | Path, filters: dict[str, Any] | None, only: Collection[str] | None = None
) -> Data:
    """Return what a source holds, with runs that were made twice."""
    if str(source).startswith("wandb:"):
        return read_wandb(str(source).removeprefix("wandb:"), filters)
    if Path(source).suffix in (".csv", ".parquet"):
        return read_table(Path(source))
    return read_folder(Path(source), only)


def read_names(path: Path) -> dict[str, str]:
    """Return a study's names for environments, by what its runs call them."""
    try:
        found = tomllib.loads(path.read_text())
    except ValueError as error:
        raise SourceError(f"{path} is not valid TOML: {error}") from error
    if not all(isinstance(x, str) for x in found.values()):
        raise SourceError(f"{path} has a name that is not text")
    return {x: clean(y) for x, y in found.items()}


def rename(data: Data, source: str) -> Data:
    """Return data whose runs' names begin with their source."""
    start = clean(source) + "/"
    runs = data.runs.assign(run=start + data.runs["run"])
    iterations = data.iterations.assign(run=start + data.iterations["run"])
    left_out = {f"{source}/{name}": reason for name, reason in data.left_out.items()}
    return Data(runs, iterations, left_out, tuple(f"{source}: {x}" for x in data.notes))


def merge(parts: Sequence[Data]) -> Data:
    return Data(
        pd.concat([part.runs for part in parts], ignore_index=True),
        pd.concat([part.iterations for part in parts], ignore_index=True),
        {name: reason for part in parts for name, reason in part.left_out.items()},
        tuple(note for part in parts for note in part.notes),
    )


def count_once(data: Data) -> Data:
    """Return data in which, of runs made twice, the latest counts, and left_out says so."""
    started = pd.to_datetime(data.runs["started"], format="ISO8601", utc=True, errors="coerce")
    # A run with durations has all that one without has: old or not, it counts.
    runs = data.runs.assign(started=started, untimed=is_untimed(data.runs))
    order = runs.sort_values(
        ["untimed", "started"], ascending=[False, True], kind="stable", na_position="first"
    )
    copies = order.index[order.duplicated(IDENTITY, keep="last")]
    better = order.groupby(IDENTITY, dropna=False)["run"].transform("last")
    again = {order.loc[i, "run"]: f"made again as {better[i]}, which counts" for i in copies}
    left_out = {clean(x): clean(y) for x, y in (data.left_out | again).items()}
    runs = data.runs.drop(copies).sort_values("run", ignore_index=True)
    iterations = data.iterations[data.iterations["run"].isin(runs["run"])].reset_index(drop=True)
    return Data(runs, iterations, left_out, tuple(clean(x) for x in data.notes))


def is_untimed(runs: pd.DataFrame) -> pd.Series:
    """Whether a run has no durations of its own: it was stopped, or another agent has them."""
    return runs["resumed"] | ~runs["agent"].isin((0, float("nan")))


# === Folders ====================================================================================
def read_folder(folder: Path, only: Collection[str] | None = None) -> Data:
    """Return the complete runs and the studies below folder, and why others are left out."""
    if not folder.is_dir():
        raise SourceError(f"{folder} is not a folder of runs, nor a table (.csv or .parquet)")
    left_out = {run: x for run, x in failures(folder).items() if only is None or run in only}
    records = []
    studies = []
    others = set()
    for path in find_runs(folder):
        name = str(path.relative_to(folder)) if path != folder else path.resolve().name
        top = name.partition("/")[0]  # a run of many agents, or side by side, has runs inside
        tables = [path / x for x in TABLES if (path / x).exists()]
        if only is not None and top not in only:
            others.add(top)
        elif tables:
            study = read_table(tables[0])
            studies.append(study if path == folder else rename(study, name))
        else:
            failed = left_out.pop(name, None)  # perhaps at first, and not when it was made again
            try:
                records.append(read_run(path) | {"run": clean(name), "source": str(path)})
            except SourceError as error:
                left_out[name] = failed or str(error)
    data = tabulate(records)
    note = f"Left out, since the grid does not list them: {len(others)} of the runs in {folder}"
    notes = (note,) if others else ()
    return merge([data._replace(left_out=left_out | data.left_out, notes=notes), *studies])


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs and of studies; links to folders are not followed."""
    for path, folders, files in os.walk(folder):
        if set(TABLES) & set(files):
            folders.clear()
        # Hidden folders are the driver's: warm-ups, and what killed runs left behind.
        folders[:] = sorted(x for x in folders if x != "wandb" and not x.startswith("."))
        if {*TABLES, "run.json", "metrics.jsonl"} & set(files):
            yield Path(path)


def failures(folder: Path) -> dict[str, str]:
    """Return the runs that failed under benchmark.sh, and why, from the logs that it keeps."""
    found = {}
    logs = [*folder.glob("benchmark.jsonl"), *folder.glob("*/benchmark.jsonl")]
    for log in filter(Path.is_file, logs):
        for line in log.read_bytes().splitlines():
            with suppress(*FOREIGN):  # half a line, of a driver that was killed as it wrote
                event = json.loads(line)
                if event.get("completed") == "no":
                    path = log.parent.relative_to(folder) / event["run"]
                    found[str(path)] = event.get("reason", "it failed")
    return found


def read_run(path: Path) -> dict[str, Any]:
    """Return run.json, with metrics and evaluations in it."""
    info = parse(path / "run.json")
    if not isinstance(info, dict):
        raise SourceError("run.json is not a run's")
    must_be_complete(info)
    info["metrics"] = parse(path / "metrics.jsonl", by_line=True)
    info["evaluations"] = read_evaluations(path, len(info["metrics"]))
    return info


def must_be_complete(info: dict[str, Any]) -> None:
    status = info.get("status")
    if status == "running":
        raise SourceError("it was killed, or is still running")
    if status != "completed":
        raise SourceError(f"status is {status}")


def parse(path: Path, by_line: bool = False) -> Any:
    """Return the value of a JSON file, or those of its lines; raise SourceError if it is none."""
    if not path.is_file():  # a pipe would be waited for
        raise SourceError(f"no file {path.name}")
    text = path.read_bytes()
    if by_line:
        text = b"[" + b",".join(text.splitlines()) + b"]"
    try:
        return json.loads(text, parse_constant=lambda _: None)  # JSON has no NaN
    except (ValueError, RecursionError):
        raise SourceError(f"{path.name} is not JSON") from None


def read_evaluations(path: Path, num_iterations: int) -> dict[str, float]:
    """Return the mean returns of evaluate.py that are of the trained agent, by name."""
    found = {}
    for name, (file, epsilon) in EVALUATIONS.items():
        with suppress(*FOREIGN):  # it is not there, or not evaluate.py's
            own = parse(path / file)
            rules = (own["iteration"], own["actions"], own["epsilon"], own["max_steps"])
            if rules == (num_iterations, "greedy", epsilon, 10_000) and own["episodes"] >= 100:
                found[name] = own["return"]["mean"]
    return found


# === Weights & Biases ===========================================================================
def read_wandb(path: str, filters: dict[str, Any] | None) -> Data:
    """Return the finished runs of path, "entity/project", and why the others are left out."""
    if not re.fullmatch(r"[^/]+/[^/]+", path):
        raise SourceError(f"a W&B source is wandb:entity/project, not wandb:{path}")
    import wandb  # half a second that only this source pays

    wandb.setup(wandb.Settings(silent=True))  # without a key it must fail, not ask for one
    try:
        found = list(wandb.Api(timeout=30).runs(path, filters, per_page=100, lazy=False))
        finished = [run for run in found if "durations" in run.summary_metrics]
        with ThreadPoolExecutor(8) as pool:  # each history takes requests of its own
            histories = list(pool.map(read_history, finished))
    except (wandb.Error, ValueError) as error:
        raise SourceError(f"W&B gave no runs of {path}: {error}") from error
    left_out = {
        f"{run.name} ({run.id})": f"no results; W&B calls it {run.state}"
        for run in found
        if run not in finished
    }
    records = []
    for run, history in zip(finished, histories, strict=True):
        info = {**run.config, **run.summary_metrics}
        records.append(info | {"run": run.id, "source": run.url, "metrics": history})
    data = tabulate(records)
    return data._replace(left_out=left_out | data.left_out)


def read_history(run: Any) -> list[dict[str, Any]]:
    """Return what a W&B run logged; of iterations that a resumed run logged twice, the latter."""
    rows = run.scan_history()
    rows = [{name: x for name, x in row.items() if not name.startswith("_")} for row in rows]
    return list({str(row.get("iteration")): row for row in rows}.values())


# === One run ====================================================================================
def tabulate(records: Iterable[dict[str, Any]]) -> Data:
    """Describe each run by a row, and check all. A record is run.json with metrics, run, source."""
    rows = []
    metrics = []
    left_out = {}
    for info in records:
        try:
            if "num_agents" in info["args"] and info.get("agent") is None:
                continue  # a program: each agent that it trained is a run of its own
            rows.append(describe(info))
            metrics += [row | {"run": info["run"]} for row in info["metrics"]]
        except SourceError as error:
            left_out[info["run"]] = str(error)
        except FOREIGN as error:
            left_out[info["run"]] = f"not a run of this benchmark: {error!r:.80}"
    # As objects: text that is not clean yet may be more than pandas can hold.
    runs = pd.DataFrame(rows, columns=[x.name for x in RUNS], dtype=object)
    iterations = pd.DataFrame(metrics, columns=[x.name for x in ITERATIONS], dtype=object)
    data = make_data(runs, iterations)
    return data._replace(left_out=left_out | data.left_out)


def describe(info: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a run; raise SourceError, with a reason, for one that is not complete."""
    must_be_complete(info)
    args = info["args"]
    metrics = info["metrics"]
    hidden = args["hidden_sizes"]
    batch_size = args["num_envs"] * args["num_steps"]
    num_iterations = args["total_timesteps"] // batch_size
    iterations = [row["iteration"] for row in metrics]
    if len(iterations) != num_iterations or iterations != list(range(num_iterations)):
        raise SourceError(f"{len(metrics)} iterations instead of {num_iterations}, from 0 on")
    values = dict(info)
    for part in ("args", "durations", "versions", "evaluations"):
        values |= {f"{part}.{name}": x for name, x in info.get(part, {}).items()}
    settings = {name: x for name, x in sorted(args.items()) if name not in NOT_SETTINGS}
    algorithm = algorithm_of(info["script"], args)
    if algorithm in ("dqn", "sac"):
        # Of whole iterations: what is left over is not trained.
        settings["total_timesteps"] = num_iterations * batch_size
    row = {x.name: values.get(x.source) for x in RUNS if x.source}
    row |= {
        "algorithm": algorithm,
        "mode": name_mode(info),
        "env_id": name_environment(args),
        "size": SIZE_OF.get(tuple(hidden), "x".join(map(str, hidden)) or "none"),
        "settings": json.dumps(settings),
        "batch_size": batch_size,
        "platform": describe_platform(info),
        "resumed": bool(info.get("resumed")),
        "last_100_return": last_return(metrics),
    }
    row |= durations_of(info)
    if row["resumed"] or row["agent"] not in (None, 0):
        row |= dict.fromkeys([x.name for x in RUNS if x.kind == "seconds"])
    return row


def algorithm_of(script: str, args: Collection[str] = ()) -> str:
    """Return a script's algorithm by scripts.toml, its name or its arguments; "" if unknown."""
    if script in SCRIPTS:
        return SCRIPTS[script]["algorithm"]
    for name, argument in TELLING.items():
        if script.startswith(f"{name}_") or argument in args:
            return name
    return ""


def name_environment(args: dict[str, Any]) -> str:
    """Return a name, with the options that change an environment."""
    return ", ".join([args["env_id"], *(f"{x} {args[x]}" for x in RULES if args.get(x))])


def name_mode(info: dict[str, Any]) -> str:
    """Return the script with what changes how it computes; "" where make_data() knows."""
    name = info["script"]
    if info["args"].get("vectorization", "sync") != "sync":
        name += f" --vectorization {info['args']['vectorization']}"
    if info.get("devices", 1) > 1:  # one training on all of them
        return f"{name}, {info['devices']} devices"
    if info.get("side_by_side"):  # how many processes shared the machine
        return f"{name}, {info['side_by_side']} side by side"
    return name if name != info["script"] else ""


def describe_platform(info: dict[str, Any]) -> str:
    """Return "Linux, NVIDIA H200, driver 570, AMD EPYC, 16 cores, machine 3fa9"."""
    cpu = re.sub(r"\((R|TM)\)| CPU| Processor|@.*", "", info.get("cpu") or "").strip()
    parts = ["WSL2" if "microsoft" in info["os"].lower() else info["os"].split("-")[0]]
    if info["device"] != "cpu":
        parts += [info["device"], f"driver {info.get('driver') or 'unknown'}"]
    parts.append(cpu or "unknown processor")
    if info.get("cores"):
        parts.append(f"{info['cores']} cores")
    if info.get("machine"):
        parts.append(f"machine {info['machine']}")
    return ", ".join(parts)


def durations_of(info: dict[str, Any]) -> dict[str, float]:
    """Return the durations, in seconds, of a run that was never stopped."""
    metrics = info["metrics"]
    imports = info["durations"]["imports"]
    first = metrics[0]["time/iteration"]
    setup = metrics[0]["time/elapsed"] - first
    row = {"setup": setup, "startup": imports + setup + first}
    row["process"] = imports + info["durations"]["total"]
    for phase, prefix in (("iteration", ""), ("rollout", "rollout_"), ("update", "update_")):
        seconds = [x[f"time/{phase}"] for x in metrics if x.get(f"time/{phase}") is not None]
        for name, window in WINDOWS.items():
            if seconds[window]:
                row[prefix + name] = fmean(seconds[window])
    return row


def last_return(metrics: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean return of about the last LAST_EPISODES episodes, if so many ended."""
    if not metrics:  # of a run that tune.py is watching
        return None
    names = ("charts/episodic_return", "charts/episodes")
    means, counts = np.array([[row.get(x) for row in metrics] for x in names], float)
    last = float(running_return(means, counts)[-1])
    return None if np.isnan(last) else last


def running_return(means: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the mean of the last LAST_EPISODES episodes after each iteration: NaN until then.

    Of an iteration only its mean is known, so of the first one that counts, the mean stands for
    those of its episodes that do.
    """
    counts = np.where(np.isnan(means), 0, np.nan_to_num(counts))
    ends = np.append(0, np.cumsum(counts))
    totals = np.append(0, np.cumsum(np.nan_to_num(means) * counts))
    known = np.append(True, np.diff(ends) > 0)  # np.interp wants episodes to rise
    before = np.interp(ends[1:] - LAST_EPISODES, ends[known], totals[known])
    return np.where(ends[1:] >= LAST_EPISODES, (totals[1:] - before) / LAST_EPISODES, np.nan)


# === Tables =====================================================================================
def read_table(path: Path) -> Data:
    """Read a table of runs and, if it is a study's, what lies beside it."""
    table = open_table(path, RUNS)
    iterations = pd.DataFrame()
    about: dict[str, Any] = {"left_out": {}, "notes": []}
    if path.name in TABLES:
        for beside in path.parent.glob("iterations.*"):
            iterations = open_table(beside, ITERATIONS)
        for beside in path.parent.glob("about.json"):
            about = parse(beside)
    try:
        left_out = {str(run): str(reason) for run, reason in about["left_out"].items()}
        notes = list(map(str, about["notes"]))
    except FOREIGN:
        raise SourceError(f"{path.parent}/about.json is not a study's") from None
    unread = [x for x in table if x not in {y.name for y in RUNS}]
    if unread:
        names = ", ".join(unread[:10])
        notes = [f"{path.name} has columns that are not read: {names}", *notes]
    data = make_data(table, iterations)
    return data._replace(left_out=left_out | data.left_out, notes=tuple(notes))


def open_table(path: Path, columns: Iterable[Column]) -> pd.DataFrame:
    """Return a table as it is in a file; of .csv, every cell is text."""
    try:
        if not path.is_file():
            raise ValueError("it is not there, or not a file")
        if path.suffix == ".csv":
            table = pd.read_csv(path, dtype="str", keep_default_na=False)
            if not isinstance(table.index, pd.RangeIndex):
                raise ValueError("its rows are longer than its header")
        else:
            table = pd.read_parquet(path)
            if table.index.name:
                table = table.reset_index()  # it may be a column: `run`
    except Exception as error:  # of a damaged file, pyarrow raises whatever it meets
        reason = str(error).partition("\n")[0]
        raise SourceError(f"{path} is not a table that can be read: {reason:.80}") from None
    table = table.rename(columns=lambda x: str(x).strip())
    if not table.columns.is_unique:
        raise SourceError(f"{path} has two columns of one name")
    missing = [x.name for x in columns if x.must and x.name not in table]
    if missing:
        raise SourceError(f"{path} has no column {', '.join(missing)}")
    return table


def save(data: Data, folder: str | Path) -> None:
    """Write data as a study: runs.csv, iterations.parquet and about.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data.iterations.to_parquet(folder / "iterations.parquet", compression="zstd")
    about = {"left_out": data.left_out, "notes": data.notes}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    data.runs.to_csv(folder / TABLES[0], index=False, lineterminator="\n")


# === One schema =================================================================================
def make_data(table: pd.DataFrame, iterations: pd.DataFrame) -> Data:
    """Return the rows that are runs, and their iterations, and why other rows are left out."""
    runs, reasons = schema.validate(table, RUNS)
    names = [name or f"row {i}" for i, name in enumerate(runs["run"], 1)]
    runs["run"] = pd.Series(names, runs.index, dtype="str")
    iterations, wrong = schema.validate(iterations, ITERATIONS)
    wrong[iterations.duplicated(["run", "iteration"])] = "it is there twice"
    for i, reason in wrong[wrong != ""].items():
        number = iterations.at[i, "iteration"]
        reasons[runs["run"] == iterations.at[i, "run"]] = f"iteration {number:g}: {reason}"
    runs["repeat"] = runs["repeat"].fillna(runs["seed"])
    reasons[runs["repeat"].isna()] = "it has neither repeat nor seed"
    # What a table of runs may leave to that of iterations.
    groups = iterations.sort_values("iteration").groupby("run")
    final = runs["run"].map(groups["charts/episodic_return"].last())
    runs["final_return"] = runs["final_return"].fillna(final)
    length = runs["run"].map(groups["iteration"].max() + 1)
    runs["num_iterations"] = runs["num_iterations"].fillna(length)
    for name in ("total", "process", "final_return"):
        lacking = runs[name].notna() & runs["num_iterations"].isna()
        reasons[lacking] = f"it has {name} but no num_iterations, on which that depends"
    reasons[runs["run"].duplicated()] = "another row has the same run"
    left_out = {run: reason for run, reason in zip(runs["run"], reasons, strict=True) if reason}
    runs = fill(runs[reasons == ""].reset_index(drop=True))
    untimed = iterations["run"].isin(runs.loc[is_untimed(runs), "run"])
    iterations.loc[untimed, SPEEDS] = float("nan")
    return Data(runs, iterations, left_out)


def fill(runs: pd.DataFrame) -> pd.DataFrame:
    """Return checked rows with algorithm and mode, where they are missing, from other columns."""
    of_script = runs["script"].where(runs["compile_mode"] != "none", runs["script"] + OP_BY_OP)
    mode = of_script.where(runs["script"] != "", runs["framework"] + " " + runs["compile_mode"])
    algorithm = runs["script"].map(algorithm_of)
    runs["mode"] = runs["mode"].where(runs["mode"] != "", mode)
    runs["algorithm"] = runs["algorithm"].where(runs["algorithm"] != "", algorithm)
    return runs

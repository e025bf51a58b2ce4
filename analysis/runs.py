"""Load benchmark runs from a source into a table of runs and a table of iterations.

A source is a folder that contains runs or studies at any depth, a table (.csv or .parquet), or
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
from typing import Any, NamedTuple

import pandas as pd

from analysis import schema
from analysis.describe import WITHOUT_JIT, algorithm_of, describe, require_completed
from analysis.schema import ITERATIONS, RUNS, Column, SourceError, clean

EVALUATIONS = {  # column -> file written by evaluate.py, and its epsilon
    "greedy": ("evaluation.json", 0),
    "noisy": ("evaluation-epsilon-0.05.json", 0.05),
    "random": ("evaluation-epsilon-1.json", 1),
}
# Rows that agree in all of these columns are repetitions of the same run; only the latest counts.
IDENTITY = ["mode", "platform", "settings", "sync", "env_id", "size", "num_iterations", "repeat"]
SPEEDS = ["time/elapsed", "time/iteration", "time/rollout", "time/update", "charts/SPS"]
TABLES = ("runs.csv", "runs.parquet")  # a folder with either is a study
# Errors that occur while reading a file that does not contain a run.
FOREIGN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class Data(NamedTuple):
    """The runs and iterations of a source."""

    runs: pd.DataFrame  # one row per run
    iterations: pd.DataFrame  # one row per run and iteration; `run` refers to the table of runs
    left_out: dict[str, str]  # name of an excluded run -> reason
    notes: tuple[str, ...] = ()  # sentences about values that were filled in or ignored


def load(
    source: str | Path | Sequence[str | Path],
    filters: dict[str, Any] | None = None,
    only: Collection[str] | None = None,
    names: Iterable[Path] = (),
) -> Data:
    """Load one source or several; raise SourceError if there is nothing to load.

    filters selects W&B runs, in MongoDB query syntax. only lists the names of the runs to use in a
    folder. names lists TOML files that rename environments, for example if two libraries have the
    same game.
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
    """Return everything in a source, including repeated runs."""
    if str(source).startswith("wandb:"):
        return read_wandb(str(source).removeprefix("wandb:"), filters)
    if Path(source).suffix in (".csv", ".parquet"):
        return read_table(Path(source))
    return read_folder(Path(source), only)


def read_names(path: Path) -> dict[str, str]:
    """Return the new names of environments, by the names in the runs."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SourceError(f"{path} is not valid TOML: {error}") from error
    if not all(isinstance(x, str) for x in found.values()):
        raise SourceError(f"{path}: every name must be text")
    return found


def rename(data: Data, source: str) -> Data:
    """Return data with the source as a prefix of each run name."""
    runs = data.runs.assign(run=f"{source}/" + data.runs["run"])
    iterations = data.iterations.assign(run=f"{source}/" + data.iterations["run"])
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
    """Return data with only the latest of repeated runs; left_out names the others."""
    started = pd.to_datetime(data.runs["started"], format="ISO8601", utc=True, errors="coerce")
    # A run with durations has priority over one without, even if it is older.
    runs = data.runs.assign(started=started, untimed=is_untimed(data.runs))
    order = runs.sort_values(
        ["untimed", "started"], ascending=[False, True], kind="stable", na_position="first"
    )
    copies = order.index[order.duplicated(IDENTITY, keep="last")]
    better = order.groupby(IDENTITY, dropna=False)["run"].transform("last")
    again = {order.loc[i, "run"]: f"repeated as {better[i]}, which is used" for i in copies}
    left_out = {clean(x): clean(y) for x, y in (data.left_out | again).items()}
    runs = data.runs.drop(copies).sort_values("run", ignore_index=True)
    iterations = data.iterations[data.iterations["run"].isin(runs["run"])].reset_index(drop=True)
    return Data(runs, iterations, left_out, tuple(clean(x) for x in data.notes))


def is_untimed(runs: pd.DataFrame) -> pd.Series:
    """Return which runs have no durations: resumed runs, and agents other than the first."""
    return runs["resumed"] | ~runs["agent"].isin((0, float("nan")))


# === Folders ====================================================================================
def read_folder(folder: Path, only: Collection[str] | None = None) -> Data:
    """Return the completed runs and the studies below a folder, and reasons for excluded runs."""
    if not folder.is_dir():
        raise SourceError(f"{folder} is neither a folder of runs nor a table (.csv or .parquet)")
    left_out = {run: x for run, x in failures(folder).items() if only is None or run in only}
    records = []
    studies = []
    others = set()
    for path in find_runs(folder):
        name = str(path.relative_to(folder)) if path != folder else path.resolve().name
        top = name.partition("/")[0]  # a run with several agents contains a folder per agent
        tables = [path / x for x in TABLES if (path / x).exists()]
        if only is not None and top not in only:
            others.add(top)
        elif tables:
            study = read_table(tables[0])
            studies.append(study if path == folder else rename(study, name))
        else:
            failed = left_out.pop(name, None)  # the run may have failed first and completed later
            try:
                records.append(read_run(path) | {"run": name, "source": str(path)})
            except SourceError as error:
                left_out[name] = failed or str(error)
    data = tabulate(records)
    note = f"Ignored: {len(others)} runs in {folder} are not part of this study"
    notes = (note,) if others else ()
    return merge([data._replace(left_out=left_out | data.left_out, notes=notes), *studies])


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs and of studies, without following links."""
    for path, folders, files in os.walk(folder):
        if set(TABLES) & set(files):
            folders.clear()
        # benchmark.sh stores warm-up runs and unfinished runs in hidden folders.
        folders[:] = sorted(x for x in folders if x != "wandb" and not x.startswith("."))
        if {*TABLES, "run.json", "metrics.jsonl"} & set(files):
            yield Path(path)


def failures(folder: Path) -> dict[str, str]:
    """Return the runs that failed under benchmark.sh, with the reasons from its log."""
    found = {}
    logs = [*folder.glob("benchmark.jsonl"), *folder.glob("*/benchmark.jsonl")]
    for log in logs:
        for line in log.read_bytes().splitlines():
            with suppress(*FOREIGN):  # the last line is incomplete if benchmark.sh was killed
                event = json.loads(line)
                if event.get("completed") == "no":
                    path = log.parent.relative_to(folder) / event["run"]
                    found[str(path)] = event.get("reason", "it failed")
    return found


def read_run(path: Path) -> dict[str, Any]:
    """Return run.json with the metrics and the evaluations added."""
    info = parse(path / "run.json")
    if not isinstance(info, dict):
        raise SourceError("run.json does not describe a run")
    require_completed(info)
    info["metrics"] = parse(path / "metrics.jsonl", by_line=True)
    info["evaluations"] = read_evaluations(path, len(info["metrics"]))
    return info


def parse(path: Path, by_line: bool = False) -> Any:
    """Return the value in a JSON file, or a list of the values in its lines."""
    if not path.is_file():
        raise SourceError(f"{path.name} is missing")
    text = path.read_bytes()
    if by_line:
        text = b"[" + b",".join(text.splitlines()) + b"]"
    try:
        return json.loads(text, parse_constant=lambda _: None)  # read NaN as None
    except ValueError:
        raise SourceError(f"{path.name} is not JSON") from None


def read_evaluations(path: Path, num_iterations: int) -> dict[str, float]:
    """Return the mean returns that evaluate.py measured for the trained agent, by column."""
    found = {}
    for name, (file, epsilon) in EVALUATIONS.items():
        with suppress(*FOREIGN):  # the file is missing, or evaluate.py did not write it
            result = parse(path / file)
            rules = [result[x] for x in ("iteration", "actions", "epsilon", "max_steps")]
            if rules == [num_iterations, "greedy", epsilon, 10_000] and result["episodes"] >= 100:
                found[name] = result["return"]["mean"]
    return found


# === Weights & Biases ===========================================================================
def read_wandb(path: str, filters: dict[str, Any] | None) -> Data:
    """Return the finished runs of "entity/project", and the reasons for excluded runs."""
    if not re.fullmatch(r"[^/]+/[^/]+", path):
        raise SourceError(f"a W&B source is wandb:entity/project, not wandb:{path}")
    import wandb  # importing wandb takes half a second

    wandb.setup(wandb.Settings(silent=True))  # fail without a key instead of asking for one
    try:
        found = list(wandb.Api(timeout=30).runs(path, filters, per_page=100, lazy=False))
        finished = [run for run in found if "status" in run.summary_metrics]
        with ThreadPoolExecutor(8) as pool:  # reading a history takes several requests
            histories = list(pool.map(read_history, finished))
    except (wandb.Error, ValueError) as error:
        raise SourceError(f"W&B returned no runs for {path}: {error}") from error
    left_out = {
        f"{run.name} ({run.id})": f"no results; its state in W&B is {run.state}"
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
    """Return the log of a W&B run; if a resumed run logged an iteration twice, keep the last."""
    rows = run.scan_history()
    rows = [{name: x for name, x in row.items() if not name.startswith("_")} for row in rows]
    return list({str(row.get("iteration")): row for row in rows}.values())


# === One run ====================================================================================
def tabulate(records: Iterable[dict[str, Any]]) -> Data:
    """Return validated tables; a record has the keys of run.json, plus metrics, run and source."""
    rows = []
    metrics = []
    left_out = {}
    for info in records:
        try:
            if "num_agents" in info["args"] and info.get("agent") is None:
                continue  # this program trained several agents, each with its own record
            rows.append(describe(info))
            metrics += [row | {"run": info["run"]} for row in info["metrics"]]
        except SourceError as error:
            left_out[info["run"]] = str(error)
        except FOREIGN as error:
            left_out[info["run"]] = f"not a run of this project: {error!r:.80}"
    # Use dtype=object: the pandas string type rejects some characters that clean() removes later.
    runs = pd.DataFrame(rows, columns=[x.name for x in RUNS], dtype=object)
    iterations = pd.DataFrame(metrics, columns=[x.name for x in ITERATIONS], dtype=object)
    data = make_data(runs, iterations)
    return data._replace(left_out=left_out | data.left_out)


# === Tables =====================================================================================
def read_table(path: Path) -> Data:
    """Read a table of runs and, if it belongs to a study, the other files in its folder."""
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
        raise SourceError(f"{path.parent}/about.json does not describe a study") from None
    unread = [x for x in table if x not in {y.name for y in RUNS}]
    if unread:
        names = ", ".join(unread[:10])
        notes = [f"Ignored columns of {path.name}: {names}", *notes]
    data = make_data(table, iterations)
    return data._replace(left_out=left_out | data.left_out, notes=tuple(notes))


def open_table(path: Path, columns: Iterable[Column]) -> pd.DataFrame:
    """Return the table in a file; every cell of a .csv file is text."""
    try:
        if not path.is_file():
            raise ValueError("no such file")
        if path.suffix == ".csv":
            table = pd.read_csv(path, dtype="str", keep_default_na=False)
            if not isinstance(table.index, pd.RangeIndex):
                raise ValueError("its rows are longer than its header")
        else:
            table = pd.read_parquet(path)
            if table.index.name:
                table = table.reset_index()  # the index may contain the `run` column
    except Exception as error:  # pyarrow raises many kinds of errors for a damaged file
        reason = str(error).partition("\n")[0]
        raise SourceError(f"{path} cannot be read as a table: {reason:.80}") from None
    table = table.rename(columns=lambda x: str(x).strip())
    if not table.columns.is_unique:
        raise SourceError(f"{path} has two columns with the same name")
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


# === Checks =====================================================================================
def make_data(table: pd.DataFrame, iterations: pd.DataFrame) -> Data:
    """Return the valid rows with their iterations, and the reasons for excluded rows."""
    runs, reasons = schema.validate(table, RUNS)
    names = [name or f"row {i}" for i, name in enumerate(runs["run"], 1)]
    runs["run"] = pd.Series(names, runs.index, dtype="str")
    iterations, wrong = schema.validate(iterations, ITERATIONS)
    wrong[iterations.duplicated(["run", "iteration"])] = "it appears twice"
    for i, reason in wrong[wrong != ""].items():
        number = iterations.at[i, "iteration"]
        reasons[runs["run"] == iterations.at[i, "run"]] = f"iteration {number:g}: {reason}"
    runs["repeat"] = runs["repeat"].fillna(runs["seed"])
    reasons[runs["repeat"].isna()] = "it has neither repeat nor seed"
    # A table of runs may omit columns that follow from the table of iterations.
    groups = iterations.sort_values("iteration").groupby("run")
    final = runs["run"].map(groups["charts/episodic_return"].last())
    runs["final_return"] = runs["final_return"].fillna(final)
    length = runs["run"].map(groups["iteration"].max() + 1)
    runs["num_iterations"] = runs["num_iterations"].fillna(length)
    for name in ("total", "process", "final_return"):
        lacking = runs[name].notna() & runs["num_iterations"].isna()
        reasons[lacking] = f"it has {name} but no num_iterations"
    reasons[runs["run"].duplicated()] = "another row has the same run name"
    left_out = {run: reason for run, reason in zip(runs["run"], reasons, strict=True) if reason}
    runs = fill(runs[reasons == ""].reset_index(drop=True))
    untimed = iterations["run"].isin(runs.loc[is_untimed(runs), "run"])
    iterations.loc[untimed, SPEEDS] = float("nan")
    return Data(runs, iterations, left_out)


def fill(runs: pd.DataFrame) -> pd.DataFrame:
    """Return validated rows, with missing algorithms and modes filled in from other columns."""
    of_script = runs["script"].where(runs["compile_mode"] != "none", runs["script"] + WITHOUT_JIT)
    mode = of_script.where(runs["script"] != "", runs["framework"] + " " + runs["compile_mode"])
    algorithm = runs["script"].map(algorithm_of)
    runs["mode"] = runs["mode"].where(runs["mode"] != "", mode)
    runs["algorithm"] = runs["algorithm"].where(runs["algorithm"] != "", algorithm)
    return runs

"""Load benchmark runs, from wherever they are, into one table of runs and one of iterations.

A source is a folder that holds runs or studies at any depth, a table (.csv or .parquet), or
"wandb:entity/project". columns.csv says what the columns are; README.md has them as tables.
"""

import json
import os
import re
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from analysis import schema
from analysis.schema import INPUTS, ITERATIONS, RUNS, Column, SourceError

SIZES = {(64, 64): "small", (256,) * 3: "medium", (1024,) * 6: "large"}
# Arguments that say who and where, not how much work; all others are the column `settings`.
NOT_SETTINGS = {
    *("exp_name", "seed", "env_id", "hidden_sizes", "jit", "jit_env", "sync_for_timing"),
    *("runs_dir", "run_name", "track", "wandb_project", "wandb_entity", "wandb_group", "notes"),
    *("save_every", "resume"),
    *("vectorization", "compile", "threads"),  # the column mode
    *("sticky_actions", "full_actions", "max_episode_steps"),  # env_id
    "total_timesteps",  # the column num_iterations
}
# The same game by MinAtar's rules, in gymnax and in Gymnasium; tests/test_minatar.py compares them.
MINATAR = {f"{x}-MinAtar": f"MinAtar/{x}-v0" for x in ("Breakout", "Freeway", "SpaceInvaders")}
RULES = {"sticky_actions": 0.1, "full_actions": True, "max_episode_steps": 2**31 - 1}
# Doors, which tests/test_doors.py compares, by the name that both have beside the module's.
DOORS = {
    "envs.doors:Doors": "Doors-v0",
    "envs.doors:Doors-v0": "Doors-v0",
    "envs.doors_gymnasium:Doors-v0": "Doors-v0",
}
EVALUATIONS = {  # column -> file of evaluate.py, its epsilon
    "greedy": ("evaluation.json", 0),
    "noisy": ("evaluation-epsilon-0.05.json", 0.05),
    "random": ("evaluation-epsilon-1.json", 1),
}
LAST_EPISODES = 100  # MinAtar's measure of learning
WINDOWS = {"first": slice(0, 1), "early": slice(1, 8), "steady": slice(8, None)}
# Runs that agree in all of these are made twice: the latest counts.
IDENTITY = (
    *("mode", "platform", "settings", "sync", "env_id", "size", "num_iterations", "repeat"),
)
PARTS = ("imports", "setup", "first")  # of startup
SUMS = {"startup": PARTS, "process": ("imports", "total")}
SPEEDS = ("time/elapsed", "time/iteration", "time/rollout", "time/update", "charts/SPS")
# Of scripts whose names do not begin with it.
ALGORITHMS = {"one_scan": "ppo", "sb3": "ppo", "sbx": "ppo"}
# Arguments that tell, of a copy under a name of its own, what it is a copy of.
TELLING = {"clip_coef": "ppo", "target_network_frequency": "dqn"}
OP_BY_OP = {"torch": "--no-jit-env"}  # flags that turn compiling off; elsewhere --no-jit
# Text that a spreadsheet would run is quoted in a study's runs.csv, as spreadsheets do it.
FORMULA = re.compile("'*[=+@-]")
QUOTED = "^'(?='*[=+@-])"
TABLES = ("runs.csv", "runs.parquet")  # either makes its folder a study


class Data(NamedTuple):
    """Everything that a source gave."""

    runs: pd.DataFrame  # a row per run
    iterations: pd.DataFrame  # a row per run and iteration; `run` refers to the table of runs
    left_out: dict[str, str]  # name of a run that was not used -> why
    notes: tuple[str, ...] = ()  # what was filled in, in sentences


class Record(NamedTuple):
    """A run as its source gave it."""

    run: str  # unique within the source
    source: str
    info: dict[str, Any]  # what run.json holds
    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl


def load(
    source: str | Path | Sequence[str | Path],
    filters: dict[str, Any] | None = None,
    only: Collection[str] | None = None,
) -> Data:
    """Load both tables from a folder, a table, or "wandb:entity/project", or from several.

    filters select W&B runs, in its MongoDB syntax. only names the runs of a folder that count; a
    note says how many others there are. Raise SourceError if there is nothing to load.
    """
    if isinstance(source, (str, Path)):
        parts = read(source, filters, only)
    else:
        names = dict.fromkeys(str(Path(x)) for x in source)
        parts = [rename(part, name) for name in names for part in read(name, filters)]
    data = merge(parts or [tabulate([], {})])
    if data.runs.empty:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(data.left_out.items())[:3])
        more = f" ({len(data.left_out)} left out, e.g. {reasons})" if data.left_out else ""
        raise SourceError(f"no completed run in {source}{more}")
    return data


def read(
    source: str | Path, filters: dict[str, Any] | None, only: Collection[str] | None = None
) -> list[Data]:
    """Return what a source holds, in parts, and with runs that were made twice."""
    if str(source).startswith("wandb:"):
        return [tabulate(*read_wandb(str(source).removeprefix("wandb:"), filters))]
    if not str(source):
        raise SourceError("the source is empty: name a folder of runs, a table or a W&B project")
    if Path(source).suffix in (".csv", ".parquet"):
        return [load_table(Path(source), "")]
    return read_folder(Path(source), only)


def rename(data: Data, source: str) -> Data:
    """Return data whose runs' names begin with their source."""
    start = schema.clean(source) + "/"
    runs = data.runs.assign(run=start + data.runs["run"])
    iterations = data.iterations.assign(run=start + data.iterations["run"])
    left_out = {f"{source}/{name}": reason for name, reason in data.left_out.items()}
    return Data(runs, iterations, left_out, tuple(f"{source}: {x}" for x in data.notes))


# === Folders ====================================================================================
def read_folder(folder: Path, only: Collection[str] | None = None) -> list[Data]:
    """Return the complete runs and the studies below folder, and why others are left out."""
    if not folder.is_dir():
        raise SourceError(f"{folder} is not a folder of runs, nor a table (.csv or .parquet)")
    records = []
    left_out = {}
    studies = []
    programs = set()
    others = set()
    closed: list[OSError] = []
    for path, is_study in find_runs(folder, closed):
        name = str(path.relative_to(folder)) if path != folder else ""
        first = name.partition("/")[0]  # a run of many agents, or side by side, has runs inside
        if only is not None and first not in only:
            others.add(first)
            continue
        if is_study:
            tables = [path / x for x in TABLES if (path / x).exists()]
            studies.append(load_table((tables or [path / TABLES[0]])[0], name))
            continue
        run = name or path.resolve().name
        try:
            record = Record(run, str(path), *read_run(path))
        except (OSError, ValueError) as error:
            left_out[run] = str(error)
        else:
            if is_program(record.info):
                programs.add(run)
            else:
                records.append(record)
    left_out |= {schema.clean(x.filename): "it cannot be opened" for x in closed}
    complete_runs = programs | {record.run for record in records}
    failed = {run: reason for run, reason in failures(folder) if run not in complete_runs}
    if only is not None:
        failed = {run: reason for run, reason in failed.items() if run in only}
    data = tabulate(records, left_out | failed)
    if others:
        note = f"Left out, since the grid does not list them: {len(others)} of the runs in {folder}"
        data = data._replace(notes=(note,))
    return [data, *studies]


def failures(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the runs that failed under benchmark.sh, and why, from the logs that it keeps."""
    logs = [*folder.glob("benchmark.jsonl"), *folder.glob("*/benchmark.jsonl")]
    for log in sorted(x for x in logs if x.is_file()):
        for line in log.read_text(errors="replace").splitlines():
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue  # half a line, from a driver that was killed as it wrote
            if isinstance(event, dict) and event.get("completed") == "no" and event.get("run"):
                run = log.parent.relative_to(folder) / str(event["run"])
                yield str(run), str(event.get("reason") or "it failed")


def find_runs(folder: Path, closed: list[OSError]) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of runs and of studies, and whether it is a study.

    Folders that cannot be opened go into closed; links to folders are not followed.
    """
    for path, folders, files in os.walk(folder, onerror=closed.append):
        is_study = bool(set(TABLES) & set(files))
        if is_study:
            folders.clear()
        if is_study or {"run.json", "metrics.jsonl"} & set(files):
            yield Path(path), is_study  # a run of many agents has a run of each inside
        # Hidden folders are the driver's: warm-ups, and what killed runs left behind.
        folders[:] = sorted(x for x in folders if x != "wandb" and not x.startswith("."))


def read_run(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return run.json and the lines of metrics.jsonl; raise ValueError if the run is no good."""
    for name in ("run.json", "metrics.jsonl"):
        if name == "run.json" and not (path / name).exists():
            raise ValueError("no run.json: it was killed or stopped, or is still running")
        if not (path / name).is_file():  # a folder or a pipe would hang or confuse
            raise ValueError(f"no file {name}")
    try:
        info = json.loads((path / "run.json").read_text())
    except (ValueError, RecursionError):
        raise ValueError("run.json is not JSON") from None
    try:
        lines = (path / "metrics.jsonl").read_text().splitlines()
        # JSON has no NaN; what writes it means null.
        metrics = [json.loads(line, parse_constant=lambda _: None) for line in lines]
    except (ValueError, RecursionError):
        raise ValueError("metrics.jsonl is not JSON lines") from None
    if isinstance(info, dict):
        info["evaluations"] = read_evaluations(path, len(metrics))
    return info, metrics


def read_evaluations(path: Path, num_iterations: int) -> dict[str, float]:
    """Return the mean returns of evaluate.py that are of the trained agent, by name."""
    found = {}
    for name, (file, epsilon) in EVALUATIONS.items():
        if not (path / file).is_file():
            continue
        try:
            own = json.loads((path / file).read_text())
            same = own["iteration"] == num_iterations and own["actions"] == "greedy"
            same &= own.get("epsilon", 0) == epsilon
            # A quick look, of few episodes or short ones, is another measure.
            same &= own["episodes"] >= 100 and own.get("max_steps", 10_000) == 10_000
            if same and schema.is_number(own["return"]["mean"]):
                found[name] = own["return"]["mean"]
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # not evaluate.py's
    return found


def is_program(info: Any) -> bool:
    """Return whether it is of a program that trained agents, each of which is a run of its own."""
    args = info.get("args") if isinstance(info, dict) else None
    return isinstance(args, dict) and "num_agents" in args and info.get("agent") is None


# === Weights & Biases ===========================================================================
def read_wandb(path: str, filters: dict[str, Any] | None) -> tuple[list[Record], dict[str, str]]:
    """Return the finished runs of path, "entity/project", and why the others are left out.

    Runs come in pages. Each history takes requests of its own, so they are fetched side by side.
    """
    if not re.fullmatch(r"[^/]+/[^/]+", path):
        raise SourceError(f"a W&B source is wandb:entity/project, not wandb:{path}")
    import wandb  # half a second that only this source pays

    wandb.setup(wandb.Settings(silent=True))  # without a key it must fail, not ask for one
    try:
        found = list(wandb.Api(timeout=30).runs(path, filters, per_page=100, lazy=False))
        finished = [run for run in found if "durations" in run.summary_metrics]
        with ThreadPoolExecutor(8) as pool:
            histories = list(pool.map(read_history, finished))
    except (wandb.Error, ValueError) as error:
        raise SourceError(f"W&B gave no runs of {path}: {error}") from error
    left_out = {
        f"{run.name} ({run.id})": f"no results; W&B calls it {run.state}"
        for run in found
        if run not in finished
    }
    records = [
        Record(run.id, run.url, run.config | dict(run.summary_metrics), history)
        for run, history in zip(finished, histories, strict=True)
        if not is_program(run.config)
    ]
    return records, left_out


def read_history(run: Any) -> list[dict[str, Any]]:
    """Return what a W&B run logged, without W&B's own keys.

    A run that was killed and resumed logs some iterations twice: those made again count.
    """
    rows = run.scan_history()
    rows = [{name: x for name, x in row.items() if not name.startswith("_")} for row in rows]
    return list({str(row.get("iteration")): row for row in rows}.values())


# === Many runs ==================================================================================
def tabulate(records: Iterable[Record], left_out: dict[str, str]) -> Data:
    """Check the records and describe each by a row."""
    rows = []
    metrics = []
    left_out = dict(left_out)
    for record in records:
        try:
            row = describe(record, check_run(record))
            check_row(row, ())  # sums, too, must be what a study can hold
        except (ValueError, RecursionError) as error:
            left_out[record.run] = str(error)
        else:
            rows.append(row)
            metrics += [row | {"run": record.run} for row in record.metrics]
    # As objects, since text that is not clean yet may be more than pandas can hold.
    runs = fill(pd.DataFrame(rows, columns=[x.name for x in RUNS], dtype=object))
    table = pd.DataFrame(metrics, columns=[x.name for x in ITERATIONS], dtype=object)
    iterations = schema.complete(table, ITERATIONS)
    without = iterations["run"].isin(runs.loc[is_untimed(runs), "run"])
    iterations.loc[without, list(SPEEDS)] = float("nan")
    return Data(runs, iterations, left_out)


def merge(parts: Sequence[Data]) -> Data:
    """Return the parts as one; of runs made twice, the latest counts, and left_out says so."""
    runs = pd.concat([part.runs for part in parts], ignore_index=True)
    iterations = pd.concat([part.iterations for part in parts], ignore_index=True)
    left_out = {name: reason for part in parts for name, reason in part.left_out.items()}
    twice = runs.duplicated("run")  # as where a folder is given, and one within it
    left_out |= dict.fromkeys(runs.loc[twice, "run"], "its name is there twice: the first counts")
    runs = number_repeats(runs[~twice])
    started = pd.to_datetime(runs["started"], format="ISO8601", utc=True, errors="coerce")
    # A run with durations has all that one without has: old or not, it counts.
    order = runs.assign(started=started, untimed=is_untimed(runs)).sort_values(
        ["untimed", "started"], ascending=[False, True], kind="stable", na_position="first"
    )
    copies = order.index[order.duplicated(list(IDENTITY), keep="last")]
    better = order.groupby(list(IDENTITY), dropna=False)["run"].transform("last")
    for i in copies:
        left_out[order.loc[i, "run"]] = f"made again as {better[i]}, which counts"
    runs = runs.drop(copies).sort_values("run", ignore_index=True)
    iterations = iterations[iterations["run"].isin(runs["run"])]
    iterations = iterations.drop_duplicates(["run", "iteration"], ignore_index=True)
    left_out = {schema.clean(name): schema.clean(reason) for name, reason in left_out.items()}
    notes = tuple(schema.clean(x) for part in parts for x in part.notes)
    return Data(runs, iterations, left_out, notes)


def is_untimed(runs: pd.DataFrame) -> pd.Series:
    """Whether a run has no durations of its own: it was stopped, or another agent has them."""
    return runs["resumed"] | ~runs["agent"].isin((0, float("nan")))


def number_repeats(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs whose repeat is known or, in the order of the rows of a cell, a number."""
    cells = [name for name in IDENTITY if name != "repeat"]
    most = runs.groupby(cells, dropna=False)["repeat"].transform("max").fillna(0)
    number = runs[runs["repeat"].isna()].groupby(cells, dropna=False).cumcount() + 1
    return runs.assign(repeat=runs["repeat"].fillna(most + number))


# === One run ====================================================================================
def check_run(record: Record) -> dict[str, Any]:
    """Return the values of a completed and whole run by their path in run.json, as "args.seed".

    Raise ValueError, with one reason, for any other record.
    """
    info = record.info if isinstance(record.info, dict) else {}
    for part in ("args", "durations", "versions"):
        if not isinstance(info.get(part), dict):
            raise ValueError(f"not a run of this benchmark: it has no {part}")
    if info.get("status") != "completed":
        raise ValueError(f"status is {schema.clean(info.get('status')):.40}")
    found = info.get("evaluations")  # W&B has none
    groups = {"evaluations": found if isinstance(found, dict) else {}}
    groups |= {x: info[x] for x in ("args", "durations")}
    parts = {f"{x}.{name}": y for x, group in groups.items() for name, y in group.items()}
    values = {"script": info["args"].get("exp_name")} | info | parts
    if algorithm_of_run(values["script"], info["args"]) == "dqn":
        values["args.sync_for_timing"] = False  # acting and learning take turns at every step
    schema.check(values, [x for x in (*RUNS, *INPUTS) if x.source], ("run", "table"))
    num_iterations = count_iterations(info["args"])
    if num_iterations == 0:
        raise ValueError("its total_timesteps are not enough for an iteration")
    if len(record.metrics) != num_iterations:
        raise ValueError(f"{len(record.metrics)} iterations instead of {num_iterations}")
    phases = ("time/rollout", "time/update") if values["args.sync_for_timing"] else ()
    columns = [x._replace(must="run" if x.name in phases else x.must) for x in ITERATIONS[1:]]
    for i, row in enumerate(record.metrics):
        if not isinstance(row, dict) or row.get("iteration") != i:
            raise ValueError(f"line {i + 1} of its metrics is not iteration {i}")
        try:
            schema.check(row, columns, ("run", "table"))
        except ValueError as error:
            raise ValueError(f"iteration {i}: {error}") from None
    if record.metrics[0]["time/elapsed"] <= record.metrics[0]["time/iteration"]:
        raise ValueError("iteration 0: time/elapsed is not above time/iteration")
    return {name: x for name, x in values.items() if not schema.is_missing(x)}


def count_iterations(args: dict[str, Any]) -> int:
    return args["total_timesteps"] // (args["num_envs"] * args["num_steps"])


def algorithm_of(script: Any) -> str:
    name = str(script).partition("_")[0]
    return name if name in ("ppo", "dqn") else ALGORITHMS.get(str(script), "")


def algorithm_of_run(script: Any, args: dict[str, Any]) -> str:
    found = [name for argument, name in TELLING.items() if argument in args]
    return algorithm_of(script) or (found[0] if found else "")


def name_environment(args: dict[str, Any]) -> str:
    """Return an environment's name, with the options that change what it does.

    What two libraries have under two names, and play alike, has one.
    """
    env_id = DOORS.get(args["env_id"], args["env_id"])
    options = {x: args[x] for x in RULES if args.get(x)}
    if options == RULES and env_id in MINATAR:
        return MINATAR[env_id]
    return ", ".join([env_id, *(f"{name} {x}" for name, x in options.items())])


def name_mode(info: dict[str, Any], script: str) -> str | None:
    """Return the script with flags that change how it computes; None where fill() knows."""
    args = info["args"]
    flags = []
    if args.get("vectorization", "sync") != "sync":
        flags.append(f"--vectorization {args['vectorization']}")
    if args.get("compile"):
        flags.append("--compile")
    if args.get("threads"):
        flags.append(f"--threads {args['threads']}")
    name = " ".join([script, *flags])
    if info.get("side_by_side"):  # how many processes shared the machine
        return f"{name}, {info['side_by_side']} side by side"
    return name if flags else None


def describe(record: Record, values: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a run that check_run() found good."""
    args = record.info["args"]
    hidden = tuple(args["hidden_sizes"])
    versions = {str(name).lower(): str(x) for name, x in record.info["versions"].items()}
    versions["python"] = str(values.get("python", ""))
    settings = {name: x for name, x in sorted(args.items()) if name not in NOT_SETTINGS}
    algorithm = algorithm_of_run(values["script"], args)
    batch_size = args["num_envs"] * args["num_steps"]
    if algorithm == "dqn":
        # Of whole iterations: what is left over is not trained.
        settings["total_timesteps"] = count_iterations(args) * batch_size
    returns = known_numbers(record.metrics, "charts/episodic_return")
    row = {x.name: values.get(x.source) for x in RUNS if x.source}
    row |= {name: versions.get(name) for name in schema.VERSIONS}
    row |= {
        "run": record.run,
        "source": record.source,
        "algorithm": algorithm,
        "mode": name_mode(record.info, values["script"]),
        "env_id": name_environment(args),
        "size": SIZES.get(hidden, "x".join(map(str, hidden))),
        "settings": json.dumps(settings),
        "repeat": values.get("repeat", args["seed"]),
        "num_iterations": count_iterations(args),
        "batch_size": batch_size,
        "platform": describe_platform(values),
        "resumed": bool(values.get("resumed")),
        "final_return": returns[-1] if returns else None,
        "last_100_return": last_return(record.metrics),
    }
    durations = [x.name for x in RUNS if x.kind == "seconds"]
    untimed = row["resumed"] or (row["agent"] or 0) != 0
    return row | (dict.fromkeys(durations) if untimed else measure(record))


def describe_platform(values: dict[str, Any]) -> str:
    """Return "Linux, NVIDIA H200, driver 570, AMD EPYC, 16 cores, machine 3fa9": what times are of.

    Two machines may call themselves by the same name, so the driver's hash is a part of it.
    """
    cpu = re.sub(r"\((R|TM)\)| CPU| Processor|@.*", "", values.get("cpu", "")).strip()
    parts = ["WSL2" if "microsoft" in values["os"].lower() else values["os"].split("-")[0]]
    if values["device"] != "cpu":
        parts += [values["device"], f"driver {values.get('driver', 'unknown')}"]
    parts.append(cpu or "unknown processor")
    if "cores" in values:
        parts.append(f"{values['cores']} cores")
    if "machine" in values:
        parts.append(f"machine {values['machine']}")
    return ", ".join(parts)


def measure(record: Record) -> dict[str, float]:
    """Return the durations, in seconds, of a run that was never stopped."""
    metrics = record.metrics
    first = metrics[0]["time/iteration"]
    setup = metrics[0]["time/elapsed"] - first
    row = {"setup": setup, "startup": record.info["durations"]["imports"] + setup + first}
    seconds = known_numbers(metrics, "time/iteration")
    parts = {name: seconds[part] for name, part in WINDOWS.items()}
    for phase in ("rollout", "update"):
        parts[f"{phase}_steady"] = known_numbers(metrics, f"time/{phase}")[WINDOWS["steady"]]
    return row | {name: fmean(part) for name, part in parts.items() if part}


def last_return(metrics: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean return of about the last LAST_EPISODES episodes, if so many ended.

    Of an iteration only its mean is known, so of the first one that counts, the mean stands for
    those of its episodes that do.
    """
    left = float(LAST_EPISODES)
    total = 0.0
    for row in reversed(metrics):
        value = row.get("charts/episodic_return")
        count = row.get("charts/episodes")
        if value is None or count is None or not count > 0:
            continue
        weight = min(left, float(count))
        total += weight * value
        left -= weight
        if left <= 0:
            return total / LAST_EPISODES
    return None


def known_numbers(metrics: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in metrics if not schema.is_missing(row.get(name))]


def fill(runs: pd.DataFrame) -> pd.DataFrame:
    """Return checked rows with every column, and what can be worked out from others filled in."""
    runs = schema.complete(runs, RUNS)
    flags = runs["framework"].map(OP_BY_OP).fillna("--no-jit")
    of_script = runs["script"] + (" " + flags).where(runs["compile_mode"] == "none", "")
    mode = of_script.where(runs["script"] != "", runs["framework"] + " " + runs["compile_mode"])
    algorithm = runs["script"].map(algorithm_of)
    runs["algorithm"] = runs["algorithm"].where(runs["algorithm"] != "", algorithm)
    runs["mode"] = runs["mode"].where(runs["mode"] != "", mode)
    for name, parts in SUMS.items():
        known = known_parts(runs, parts)
        if known == parts or runs[name].isna().all():  # or rows would differ in what is meant
            runs[name] = runs[name].fillna(runs[[*known]].sum(axis=1, skipna=False))
    return runs


def known_parts(runs: pd.DataFrame, parts: Sequence[str]) -> tuple[str, ...]:
    """Return those parts of a duration that all rows have which have the last and longest."""
    rows = runs[runs[parts[-1]].notna()]
    return tuple(x for x in parts if rows[x].notna().all())


# === Tables =====================================================================================
def save(data: Data, folder: str | Path) -> None:
    """Write data as a study: runs.csv, iterations.parquet and, if there is more, about.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = ("iterations.parquet", "about.json", TABLES[0])  # the last makes it a study
    parts = [folder / f".{name}" for name in names]
    data.iterations.to_parquet(parts[0], compression="zstd")
    about = {"left_out": data.left_out, "notes": data.notes}
    parts[1].write_text(json.dumps(about, indent=1) + "\n")
    quoted = data.runs.map(lambda x: f"'{x}" if isinstance(x, str) and FORMULA.match(x) else x)
    quoted.to_csv(parts[2], index=False, lineterminator="\n")
    for part, name in zip(parts, names, strict=True):  # all are whole before any takes its place
        part.replace(folder / name)
    if not (data.left_out or data.notes):
        (folder / "about.json").unlink()


def load_table(path: Path, name: str) -> Data:
    """Read a table of runs and, if it is a study's, what lies beside it; name is put before runs.

    A row that is not a run is left out with a reason, as a folder would be.
    """
    table = read_table(path, RUNS)
    prefix = f"{name}/" if name else ""
    is_study = path.name in TABLES
    iterations = load_table_of_iterations(path.parent, prefix) if is_study else pd.DataFrame()
    iterations = schema.complete(iterations, ITERATIONS)
    runs, left_out = read_rows(table, prefix, iterations)
    if "repeat" not in table:
        runs["repeat"] = runs["seed"]
    runs, notes = drop_repeats(runs, path.name)
    unread = [schema.clean(x) for x in table if x not in {y.name for y in RUNS}]
    if unread:
        notes.append(f"{path.name} has columns that are not read: {', '.join(unread[:10])}")
    for column, parts in SUMS.items():
        known = known_parts(runs, parts)
        if column not in table and known != parts and runs[column].notna().any():
            notes.append(f"{path.name} has no {column}, so {' + '.join(known)} stands for it")
    strangers = set(iterations["run"]) - set(runs["run"])
    if strangers:
        notes.append(f"{path.name} lacks {len(strangers)} runs of which there are iterations")
    if is_study:
        others, more = load_about(path.parent / "about.json")
        left_out |= {f"{prefix}{run}": reason for run, reason in others.items()}
        notes += more
    return Data(runs, iterations, left_out, tuple(f"{name}: {x}" if name else x for x in notes))


def read_table(path: Path, columns: Iterable[Column]) -> pd.DataFrame:
    """Return a table as it is in a file; of .csv, every cell is text and an empty one missing."""
    try:
        if not path.is_file():
            raise ValueError("it is not there, or not a file")
        if path.suffix == ".parquet":
            with path.open("rb") as file:
                table = pd.read_parquet(file)
            named = [x for x in table.index.names if x and x not in table]
            table = table.reset_index(named) if named else table  # it may be a column: `run`
        else:
            table = pd.read_csv(path, dtype="str", keep_default_na=False).replace("", None)
            table = table.replace(QUOTED, "", regex=True)
            if not isinstance(table.index, pd.RangeIndex):
                raise ValueError("its rows are longer than its header")
    except Exception as error:  # of a damaged file, pyarrow raises whatever it meets
        reason = str(error).splitlines()[0] if str(error) else "it is damaged"
        raise SourceError(f"{path} is not a table that can be read: {reason:.80}") from None
    table = table.rename(columns=lambda x: str(x).strip())
    missing = [x.name for x in columns if x.must == "table" and x.name not in table]
    if missing:
        raise SourceError(f"{path} has no column {', '.join(missing)}")
    return table


def read_rows(
    table: pd.DataFrame, prefix: str, iterations: pd.DataFrame
) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return the rows that are runs, checked and filled in, and why others are left out."""
    rows = {}
    left_out = {}
    known = of_iterations(iterations)
    for i, cells in enumerate(table.to_dict("records"), 1):
        row = {x.name: schema.from_table(cells.get(x.name), x.kind) for x in RUNS}
        name = row["run"]
        row["run"] = schema.clean(prefix + (name or f"row {i}"))
        row |= {x: y for x, y in known.get(row["run"], {}).items() if row[x] is None}
        try:
            check_row(row, rows)
        except ValueError as error:
            left_out[f"{row['run']} (row {i})" if name else row["run"]] = str(error)
        else:
            rows[row["run"]] = row
    return fill(pd.DataFrame(list(rows.values()), columns=[x.name for x in RUNS])), left_out


def of_iterations(iterations: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Return, by run, what a table of runs may leave to that of iterations."""
    groups = iterations.sort_values("iteration").groupby("run")
    columns = {"final_return": groups["charts/episodic_return"].last()}
    columns["num_iterations"] = groups["iteration"].max() + 1
    return {str(run): row for run, row in pd.DataFrame(columns).to_dict("index").items()}


def check_row(row: dict[str, Any], names: Container[str]) -> None:
    """Raise ValueError, with one reason, for a row of a table that is no run."""
    schema.check(row, [x._replace(source="") for x in RUNS], ())
    for column in RUNS:
        if column.must == "table" and column.kind == "text" and not row[column.name]:
            raise ValueError(f"{column.name} is missing")
    if row["run"] in names:
        raise ValueError("another row has the same run")
    for name in ("total", "process", "final_return"):
        if row[name] is not None and row["num_iterations"] is None:
            raise ValueError(f"it has {name} but no num_iterations, on which that depends")


def drop_repeats(runs: pd.DataFrame, name: str) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows of a table, without their repeats unless those are known and unique.

    Runs are compared within a repeat: if two rows share one, either could belong to it.
    """
    if runs["repeat"].notna().all() and not runs.duplicated(list(IDENTITY)).any():
        return runs, []
    what = "repeats that are not unique" if runs["repeat"].notna().all() else "no repeats"
    note = f"{name} has {what}, so its runs were numbered in the order of their rows"
    return runs.assign(repeat=float("nan")), [note]


def load_table_of_iterations(folder: Path, prefix: str) -> pd.DataFrame:
    """Return the iterations of a study, or an empty table if it has none."""
    paths = [x for x in (folder / "iterations.parquet", folder / "iterations.csv") if x.exists()]
    if not paths:
        return pd.DataFrame()
    table = read_table(paths[0], ITERATIONS)
    for column in ITERATIONS[1:]:
        if column.name in table:
            try:
                table[column.name] = schema.numbers(table[column.name], column)
            except ValueError as error:
                raise SourceError(f"{paths[0]}: {error}") from None
    table["run"] = [schema.clean(f"{prefix}{x}") for x in table["run"]]
    twice = table.loc[table.duplicated(["run", "iteration"]), ["run", "iteration"]]
    if len(twice):
        run, iteration = twice.iloc[0]
        raise SourceError(f"{paths[0]}: {run} has iteration {iteration:.0f} twice")
    return table


def load_about(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return what a study says of runs that were left out, and of what was filled in."""
    if not path.exists():
        return {}, []
    try:
        if not path.is_file():
            raise ValueError("not a file")
        about = json.loads(path.read_text())
        left_out = {str(run): str(reason) for run, reason in about["left_out"].items()}
        return left_out, [str(x) for x in about["notes"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise SourceError(f"{path} is not JSON of left_out, an object, and notes, a list") from None

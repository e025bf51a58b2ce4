"""A study of tune.py: its trials, its table and figures, and its copy in MLflow."""

import contextlib
import json
import os
import sqlite3
from collections.abc import Generator
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from analysis.schema import clean


def plain(text: object) -> str:
    """Other people's text as one short line, without what a terminal would obey."""
    return clean(" ".join(str(text).split()))[:500]


@contextlib.contextmanager
def locked(path: Path, seconds: float = 0) -> Generator[bool]:
    """Hold a lock file until the process ends; False where another has it for so many seconds."""
    with contextlib.closing(sqlite3.connect(path, timeout=seconds)) as connection:
        try:
            connection.execute("BEGIN EXCLUSIVE")
            free = True
        except sqlite3.OperationalError:
            free = False
        yield free


# === Trials =====================================================================================
def counted(study: optuna.Study, *which: TrialState) -> list[FrozenTrial]:
    """The trials, or those in some states, without those that a later one goes on with."""
    trials = study.get_trials(deepcopy=False, states=which or None)
    return [x for x in trials if x.state != TrialState.FAIL or "error" in x.user_attrs]


def run_of(trial: FrozenTrial | optuna.Trial, runs: Path, seed: int | str) -> Path:
    """Where a trial trains with a seed: one that goes on with another, where that one did."""
    number = int(trial.user_attrs.get("goes_on", trial.number))
    return runs / f"{number:04d}-seed-{seed}"


def read_rows(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; the last may be on its way."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


# === Files ======================================================================================
def write_table(study: optuna.Study, folder: Path) -> None:
    """Write trials.csv: a row per trial, with its settings, or why it failed."""
    table = study.trials_dataframe(("number", "state", "value", "duration", "params", "user_attrs"))
    table = table.drop(columns=["user_attrs_place", "user_attrs_seen"], errors="ignore")
    table.to_csv(folder / "trials.csv", index=False)


def draw(study: optuna.Study, folder: Path) -> None:
    """Draw Optuna's figures, as HTML to explore (plotly) and as PNG (matplotlib)."""
    from matplotlib import pyplot
    from optuna import visualization as html
    from optuna.visualization import matplotlib as png

    pyplot.switch_backend("agg")
    top = list(optuna.importance.get_param_importances(study))[:4]
    for name in ("optimization_history", "param_importances", "parallel_coordinate", "contour"):
        options = {"params": top} if name == "contour" else {}
        page = getattr(html, f"plot_{name}")(study, **options)
        page.write_html(folder / f"{name}.html", include_plotlyjs="directory")
        getattr(png, f"plot_{name}")(study, **options)
        pyplot.gcf().set_size_inches((16, 13) if name == "contour" else (14, 6))
        pyplot.savefig(folder / f"{name}.png", bbox_inches="tight")


# === MLflow =====================================================================================
def copy_to_mlflow(command: Any, result: dict[str, Any] | None) -> None:
    """Log the trials of this place that MLflow has not yet; with the verdict, all, and it.

    A study is a run, and each trial that ended a child of it; they are found by their tags.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    import mlflow

    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "ppo-rosetta"))
    study = command.study
    key = study.user_attrs["id"]
    logged = {}
    for run in mlflow.search_runs(filter_string=f"tags.study_id = '{key}'", output_format="list"):
        if run.info.status == "RUNNING" and run.data.tags["place"] == command.place:
            mlflow.delete_run(run.info.run_id)  # who logged it was killed on the way
        else:
            logged[run.data.tags["trial"]] = run.info.run_id
    tags = {"study_id": key, "place": command.place, "trial": "none"}
    if "none" not in logged:
        with mlflow.start_run(run_name=study.study_name, tags=tags) as run:
            mlflow.log_params(study.user_attrs["begun"])
        logged["none"] = run.info.run_id
    for trial in counted(study, TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL):
        ours = result is not None or trial.user_attrs.get("place") == command.place
        if ours and str(trial.number) not in logged:
            tags["trial"] = str(trial.number)
            tags["state"] = trial.state.name
            tags["error"] = trial.user_attrs.get("error", "")
            name = f"trial-{trial.number:04d}"
            parent = logged["none"]
            with mlflow.start_run(run_name=name, nested=True, parent_run_id=parent, tags=tags):
                mlflow.log_params(command.own | trial.params)
                log_metrics(mlflow, trial, command.trials)
    if result is not None:
        with mlflow.start_run(run_id=logged["none"]):
            log_verdict(mlflow, command.folder, result)


def log_metrics(mlflow: Any, trial: FrozenTrial, runs: Path) -> None:
    """Log a trial's value, and over environment steps the metrics of each seed."""
    if trial.state == TrialState.COMPLETE:
        mlflow.log_metric("value", trial.value)
    for run in runs.glob(run_of(trial, runs, "*").name):
        seed = run.name.partition("-")[2]
        for row in read_rows(run):
            metrics = {f"{x}/{seed}": y for x, y in row.items() if "/" in x and y is not None}
            mlflow.log_metrics(metrics, row["global_step"], synchronous=False)
    mlflow.flush_async_logging()


def log_verdict(mlflow: Any, folder: Path, result: dict[str, Any]) -> None:
    """Log the verdict, the tables, the figures and the best settings' agent."""
    for part in ("best", "own", "best_minus_own"):
        mlflow.log_metric(f"fresh_seeds/{part}", result[part]["iqm"])
    mlflow.set_tags({f"best/{name}": x for name, x in result["best_settings"].items()})
    for path in folder.iterdir():
        if path.suffix in (".json", ".csv", ".png", ".html", ".js"):
            mlflow.log_artifact(path)
    mlflow.log_artifacts(folder / result["best_runs"][0], "best")

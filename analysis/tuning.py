"""What a study of tune.py leaves: its trials as a table, Optuna's figures, and a copy in MLflow.

Trials may be of a storage that others write to as well: what they hold is data.
"""

import json
import logging
import os
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import psutil
from optuna.trial import FrozenTrial, TrialState

from analysis.render import csv_text, write_whole

PAUSE = 300  # seconds without MLflow after it failed: some of its stores take minutes to give up


def plain(text: object) -> str:
    """Other people's text as one short line, without what a terminal would obey."""
    line = " ".join(str(text).split())[:500]
    return "".join(x if x.isprintable() else "?" for x in line)


def counted(study: optuna.Study) -> list[FrozenTrial]:
    """The study's trials, without those that a later one repeats, or that were too many."""
    trials = study.get_trials(deepcopy=False)
    again = {x for trial in trials for x in history(trial)}
    return [x for x in trials if x.number not in again and "surplus" not in x.user_attrs]


def states(trials: list[FrozenTrial], *which: TrialState) -> list[FrozenTrial]:
    return [trial for trial in trials if trial.state in which]


def history(trial: FrozenTrial) -> list[int]:
    """The numbers of the interrupted trials that a trial repeats, one after the other."""
    return list(trial.system_attrs.get("retry_history", []))


def first_number(trial: FrozenTrial) -> int:
    """A trial's number, or that of the interrupted one that it repeats."""
    return int(trial.system_attrs.get("failed_trial", trial.number))


def folder_of(trial: FrozenTrial, folder: Path, seed: int) -> Path:
    """Where a trial trains with a seed: one that repeats an interrupted one, in that one's."""
    return folder / "trials" / f"{first_number(trial):04d}-seed-{seed}"


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; the last may be on its way."""
    try:
        lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def value_of(trial: FrozenTrial) -> float | None:
    """A complete trial's value; of a pruned one, Optuna gives the last step's instead."""
    return trial.value if trial.state == TrialState.COMPLETE else None


# === Files ======================================================================================
def write_table(study: optuna.Study, folder: Path) -> None:
    """Write trials.csv: a row per trial, with its settings, or why it failed."""
    rows = [
        {"trial": x.number, "state": x.state.name, "value": value_of(x)}
        | {"last_step": x.last_step, "seconds": x.duration and x.duration.total_seconds()}
        | {"recent_return": x.intermediate_values.get(x.last_step)}
        | x.params
        | {"error": plain(x.user_attrs.get("error", ""))}
        for x in counted(study)
    ]
    write_whole(folder / "trials.csv", csv_text(pd.DataFrame(rows)).encode())


def draw(study: optuna.Study, folder: Path) -> None:
    """Draw Optuna's figures, as HTML to explore (plotly) and as PNG (matplotlib)."""
    if len(states(counted(study), TrialState.COMPLETE)) < 2:
        return print("no figures: they need two complete trials")
    import matplotlib as mpl
    from matplotlib import pyplot
    from optuna import visualization as html
    from optuna.visualization import matplotlib as png

    mpl.use("agg")
    few = optuna.importance.get_param_importances(study)
    few = [name for name in few if len({x.params.get(name) for x in study.trials}) > 1][:4]
    kinds: dict[str, tuple[str, dict]] = {
        "history": ("plot_optimization_history", {}),
        "importance": ("plot_param_importances", {}),
        "contour": ("plot_contour", {"params": few}),
        "parallel": ("plot_parallel_coordinate", {}),
    }
    for name, (plot, options) in kinds.items():
        if name == "contour" and len(few) < 2:
            continue
        figure = getattr(html, plot)(study, **options)
        figure.write_html(folder / f"{name}.html", include_plotlyjs="directory")
        settings: Any = {"savefig.bbox": "tight"}
        with mpl.rc_context(settings), warnings.catch_warnings(action="ignore"):  # of one value
            axes = np.ravel(getattr(png, plot)(study, **options))[0]
            axes.figure.set_size_inches((16, 13) if name == "contour" else (14, 6))
            axes.figure.savefig(folder / f"{name}.png")
            pyplot.close(axes.figure)


# === MLflow =====================================================================================
class Tracker:
    """Copies a study to MLflow: a parent run, and a child for each trial that ended.

    What MLflow has already is found by tags, so nothing is there twice, and what it missed comes
    later: without a server one sentence is printed, and the study goes on.
    """

    def __init__(
        self,
        uri: str,
        study: optuna.Study,
        folder: Path,
        own: dict[str, Any],
        about: dict[str, Any],
    ) -> None:
        """own is what the script does by itself, about how the study is made."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        self.uri, self.study, self.folder, self.own, self.about = uri, study, folder, own, about
        self.logged: set[int] = set()
        self.parent, self.well, self.pause = "", True, 0.0
        self.me: tuple = (socket.gethostname(), os.getpid())
        # Each command logs its own trials, and those of commands that had ended before it began.
        workers = {self.worker_of(trial) for trial in counted(study)} - {self.me}
        self.dead = {x for x in workers if x[0] == self.me[0] and not psutil.pid_exists(x[1])}

    def sync(self, result: dict[str, Any] | None = None) -> None:
        """Log what MLflow does not have; with the verdict, finish the parent run."""
        if result is None and time.monotonic() < self.pause:
            return
        try:
            import mlflow
            from mlflow.store.db import utils

            logging.getLogger("mlflow").setLevel(logging.ERROR)  # it tells of tables and retries
            vars(utils)["MAX_RETRY_COUNT"] = 1  # else minutes go by for a database that is down
            uri = None if self.uri in ("default", "") else self.uri
            self.client = mlflow.MlflowClient(uri)
            self.begin()
            for trial in counted(self.study):
                ours = self.worker_of(trial) in (self.me, *self.dead)
                if ours and trial.state.is_finished() and trial.number not in self.logged:
                    self.log_trial(trial)
                    self.logged.add(trial.number)
            if result is not None:
                self.finish(result)
            self.well = True
        except Exception as error:  # whatever it is, the study is worth more than its copy
            if self.well:
                said = plain(error) or type(error).__name__
                print(f"--mlflow: {said}; the study goes on, and is logged later", file=sys.stderr)
            self.well, self.parent = False, ""  # what is half logged is found and made anew
            self.pause = time.monotonic() + PAUSE

    def worker_of(self, trial: FrozenTrial) -> tuple:
        return tuple(trial.user_attrs.get("worker", ["", 0]))[:2]

    def begin(self) -> None:
        """Find or make the parent run, and find the trials that are logged."""
        if self.parent:
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ppo-rosetta")
        found = self.client.get_experiment_by_name(name)
        self.experiment = found.experiment_id if found else self.client.create_experiment(name)
        key = self.study.user_attrs["id"]
        runs = self.find(f"tags.study_id = '{key}' and tags.kind = 'study'")
        if runs:
            parent = runs[0].info.run_id
        else:
            tags, name = {"kind": "study", "study_id": key}, self.study.study_name
            parent = self.client.create_run(self.experiment, tags=tags, run_name=name).info.run_id
            self.log(parent, self.about, [])
        for run in self.find(f"tags.study_id = '{key}' and tags.kind = 'trial'"):
            host, pid = run.data.tags["logger"].split()
            half = run.info.status == "RUNNING" and host == self.me[0]
            if half and (int(pid) == self.me[1] or not psutil.pid_exists(int(pid))):
                self.client.delete_run(run.info.run_id)
            else:
                self.logged.add(int(run.data.tags["trial"]))
        self.parent = parent

    def find(self, what: str) -> list[Any]:
        runs, token = [], None
        while True:
            page = self.client.search_runs([self.experiment], what, page_token=token)
            runs, token = [*runs, *page], page.token
            if not token:
                return runs

    def log(self, run: str, params: dict[str, Any], metrics: list[Any]) -> None:
        from mlflow.entities import Param

        pairs = [Param(name, str(x)[:6000]) for name, x in params.items()]
        self.client.log_batch(run, params=pairs, metrics=metrics[:800])  # the limit is 1,000
        for i in range(800, len(metrics), 800):
            self.client.log_batch(run, metrics=metrics[i : i + 800])

    def log_trial(self, trial: FrozenTrial) -> None:
        """Make a trial's run: its settings, value, state, and the metrics of each seed."""
        from mlflow.entities import Metric

        assert trial.datetime_start and trial.datetime_complete
        start, end = (
            int(x.timestamp() * 1000) for x in (trial.datetime_start, trial.datetime_complete)
        )
        tags = {"mlflow.parentRunId": self.parent, "kind": "trial", "trial": str(trial.number)}
        tags |= {"study_id": self.study.user_attrs["id"], "state": trial.state.name}
        tags["logger"] = "{} {}".format(*self.me)
        if "error" in trial.user_attrs:
            tags["error"] = plain(trial.user_attrs["error"])
        name = f"trial-{trial.number:04d}"
        run = self.client.create_run(self.experiment, start, tags, name).info.run_id
        metrics = [
            Metric("recent_return", x, start, step) for step, x in trial.intermediate_values.items()
        ]
        value = value_of(trial)
        metrics += [] if value is None else [Metric("value", value, end, 0)]
        for seed in range(1, self.about["num_seeds"] + 1):
            rows = read_rows(folder_of(trial, self.folder, seed))
            for row in rows:
                at = start + int(1000 * (row.get("time/elapsed") or 0))
                metrics += [
                    Metric(f"{name}/seed-{seed}", float(x), at, int(row["global_step"]))
                    for name, x in row.items()
                    if "/" in name and x is not None
                ]
        self.log(run, self.own | trial.params, metrics)
        status = {"COMPLETE": "FINISHED", "PRUNED": "KILLED"}.get(trial.state.name, "FAILED")
        self.client.set_terminated(run, status, end)

    def finish(self, result: dict[str, Any]) -> None:
        """Give the parent the verdict, the tables, the figures and the best settings' agents."""
        from mlflow.entities import Metric

        now, client, parent = int(time.time() * 1000), self.client, self.parent
        metrics = [
            Metric(f"fresh_seeds/{part}", result[part]["iqm"], now, 0)
            for part in ("best", "own", "best_minus_own")
        ]
        had = client.get_run(parent).data.metrics
        self.log(parent, {}, [x for x in metrics if had.get(x.key) != x.value])
        for x, value in result["best_settings"].items():  # a tag may change when trials are added
            client.set_tag(parent, f"best/{x}", str(value))
        for path in sorted(self.folder.iterdir()):
            if path.suffix in (".json", ".csv", ".png", ".html", ".js"):
                client.log_artifact(parent, str(path))
        returns = result["best"]["returns"]
        middle = returns.index(sorted(returns)[len(returns) // 2])
        for i, name in enumerate(result["best_runs"]):
            files = ["evaluation.json", *["checkpoint.npz"] * (i == middle)]  # of a typical agent
            for file in files:
                path = self.folder / "fresh" / name / file
                client.log_artifact(parent, str(path), f"best/{name}")
        client.set_terminated(parent)

"""tune.py --mlflow: a study in MLflow's own database, and in a real server on loopback."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna")
mlflow = pytest.importorskip("mlflow")
fakes = pytest.importorskip("tune_fakes")
project, server, command = fakes.project, fakes.server, fakes.command  # fixtures
NAME = "ppo_fake__Fake-v1"
WORDS = ["ppo_fake", "--num-seeds", "2", "--fresh-seeds", "3", "--episodes", "5"]
FIGURES = {"history.png": b"\x89PNG", "history.html": b"<p>", "plotly.min.js": b"1"}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the database and the artifacts are; the first test makes its tables."""
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture(scope="module")
def uri(place):
    """The address of a server, on the database that the first test made."""
    port = free_port()
    words = f"-m mlflow server --host 127.0.0.1 --port {port} --workers 1".split()
    words += ["--backend-store-uri", f"sqlite:///{place}/mlflow.db"]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with open(place / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, *words, "--artifacts-destination", str(place / "artifacts")],
            cwd=place,
            env=os.environ | quiet,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"

    def answers():
        assert process.poll() is None, (place / "log").read_text()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health") as answer:
            return answer.status == 200

    try:
        fakes.wait_for(answers, 90)
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait()


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, place):
    """What tune.py sets, and what a user may have set, is this test's alone."""
    for name in [x for x in os.environ if x.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    for name in ("TELEMETRY", "HTTP_REQUEST_MAX_RETRIES", "HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(f"MLFLOW_{name}", "x")  # so that it is put back
        monkeypatch.delenv(f"MLFLOW_{name}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}/mlflow.db")


@pytest.fixture
def figures(command, monkeypatch):
    """The figures' files, without what it takes to draw them."""

    def draw(_, folder):
        for name, content in FIGURES.items():
            (folder / name).write_bytes(content)

    monkeypatch.setattr(fakes.analysis.tuning, "draw", draw)


def load(project):
    return optuna.load_study(
        study_name=NAME, storage=f"sqlite:///{project}/studies/{NAME}/study.db"
    )


def find(client, project, experiment="ppo-rosetta"):
    """The study's parent run, and its children by the number of their trial."""
    experiment = client.get_experiment_by_name(experiment).experiment_id
    key = load(project).user_attrs["id"]
    runs = client.search_runs([experiment], f"tags.study_id = '{key}'")
    (parent,) = (x for x in runs if x.data.tags["kind"] == "study")
    children = [x for x in runs if x is not parent]
    found = {int(x.data.tags["trial"]): x for x in children}
    assert len(found) == len(children), "a trial is there twice"
    for run in children:
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.info.run_name == f"trial-{int(run.data.tags['trial']):04d}"
    return parent, found


def artifacts(client, run, under=None):
    """Paths and contents' sizes of all that a run has."""
    found = {}
    for x in client.list_artifacts(run.info.run_id, under):
        found |= artifacts(client, run, x.path) if x.is_dir else {x.path: x.file_size}
    return found


def test_without_an_address_it_is_mlflow_s_own(place, project, command, monkeypatch):
    """Its tables are made without a word; an experiment may be named as MLflow has it."""
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    status, out, err = command(*WORDS, "--pruner", "none", "--trials", 2, "--mlflow")
    assert (status, err) == (0, "") and (place / "mlflow.db").exists()
    assert "tables" not in out and "INFO" not in out
    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    parent, children = find(client, project, "mine")
    assert children.keys() == {0, 1} and parent.info.status == "FINISHED"
    assert parent.info.run_name == NAME


def test_a_study_is_a_run_and_each_trial_a_child(project, command, figures, uri, monkeypatch):
    fakes.prune_below(monkeypatch, -1.5)  # the script's own learning rate is two decades off
    words = [*WORDS, "--trials", 5, "--space", "learning_rate=1e-3:3e-3", "--no-anneal-lr"]
    words += ["--space", "learning_rate=9e-4,1e-3,2e-3,3e-3,1e-1", "--seed", 3, "--mlflow", uri]
    status, _, err = command(*words, **{"0001-": "refuse"})
    assert (status, err) == (0, "")
    client, trials = mlflow.MlflowClient(uri), load(project).trials
    parent, children = find(client, project)
    assert sorted(children) == [0, 1, 2, 3, 4]
    statuses = {"COMPLETE": "FINISHED", "PRUNED": "KILLED", "FAIL": "FAILED"}
    assert {x.state.name for x in trials} == set(statuses)
    for trial in trials:
        run = children[trial.number]
        info, data = run.info, run.data
        assert info.status == statuses[trial.state.name] and data.tags["state"] == trial.state.name
        assert info.start_time == pytest.approx(trial.datetime_start.timestamp() * 1000, abs=1)
        assert info.end_time == pytest.approx(trial.datetime_complete.timestamp() * 1000, abs=1)
        own = {"env_id": "Fake-v1", "total_timesteps": "1000", "anneal_lr": "False"}
        expected = own | {name: str(x) for name, x in trial.params.items()}
        assert expected.items() <= data.params.items() and "seed" not in data.params
        assert ("gamma must be smaller" in data.tags.get("error", "")) == (trial.number == 1)
        check_metrics(client, run, trial)

    result = json.loads((project / "studies" / NAME / "best.json").read_text())
    assert parent.info.status == "FINISHED" and parent.data.params["script"] == "ppo_fake.py"
    assert parent.data.params["flags"] == "--no-anneal-lr"
    assert parent.data.params["space/learning_rate"] == "0.0009,0.001,0.002,0.003,0.1"
    for part in ("best", "own", "best_minus_own"):
        assert parent.data.metrics[f"fresh_seeds/{part}"] == result[part]["iqm"]
    for name, value in result["best_settings"].items():
        assert parent.data.tags[f"best/{name}"] == str(value)
    found, folder = artifacts(client, parent), project / "studies" / NAME
    runs = [folder / "fresh" / x for x in result["best_runs"]]
    whole = {f"best/{x.name}/evaluation.json": x / "evaluation.json" for x in runs}
    whole |= {x: folder / x for x in ("best.json", "trials.csv", *FIGURES)}
    returns = result["best"]["returns"]
    middle = runs[returns.index(sorted(returns)[1])]
    whole[f"best/{middle.name}/checkpoint.npz"] = middle / "checkpoint.npz"
    assert found == {name: path.stat().st_size for name, path in whole.items()}
    best = Path(client.download_artifacts(parent.info.run_id, "best.json", str(project)))
    assert best.read_bytes() == (folder / "best.json").read_bytes()

    # Said again, nothing is there twice; with more trials, these are added.
    before = {x.info.run_id for x in children.values()}
    assert command(*words)[0] == 0
    parent, children = find(client, project)
    assert {x.info.run_id for x in children.values()} == before
    check_metrics(client, children[2], trials[2])
    for name in parent.data.metrics:
        assert len(client.get_metric_history(parent.info.run_id, name)) == 1, name
    assert artifacts(client, parent) == found
    assert command(*words, "--trials", 6)[::2] == (0, "")
    parent, children = find(client, project)
    assert sorted(children) == [0, 1, 2, 3, 4, 5] and parent.info.status == "FINISHED"


def check_metrics(client, run, trial):
    """Every metric of each seed is there once, at its step; what is no number is not."""
    names = {"charts/episodic_return", "charts/episodes", "time/elapsed"}
    seeds = {"COMPLETE": (1, 2), "PRUNED": (1,), "FAIL": ()}[trial.state.name]
    own = {f"{name}/seed-{seed}" for name in names for seed in seeds}
    others = {"value"} if trial.state.name == "COMPLETE" else set()
    others |= {"recent_return"} if seeds else set()
    assert run.data.metrics.keys() == own | others
    for name in own:
        history = client.get_metric_history(run.info.run_id, name)
        assert [x.step for x in history] == [100 * i for i in range(1, len(history) + 1)]
        assert len(history) == 10 or trial.state.name == "PRUNED"
        start = run.info.start_time
        assert [x.timestamp - start for x in history] == [1000 * i for i in range(len(history))]
        if name.startswith("time/"):
            assert [x.value for x in history] == list(range(len(history)))
    if seeds:
        history = client.get_metric_history(run.info.run_id, "recent_return")
        assert {x.step: x.value for x in history} == trial.intermediate_values
    if trial.state.name == "COMPLETE":
        assert run.data.metrics["value"] == trial.value


def test_what_mlflow_missed_comes_later(project, command, figures, uri):
    """The trials of a command that did not log, of one without a server, and half a trial."""
    words = [*WORDS, "--pruner", "none", "--trials"]
    assert fakes.Command(project, *words, "2").wait()[0] == 0
    start = time.monotonic()
    status, _, err = command(*words, 4, "--mlflow", f"http://127.0.0.1:{free_port()}")
    assert status == 0 and err.count("\n") == 1 and err.startswith("--mlflow: ")
    assert err.endswith("; the study goes on, and is logged later\n") and "Traceback" not in err
    assert time.monotonic() - start < 60
    starts = fakes.traced(project, "start")
    assert command(*words, 4, "--mlflow", uri)[::2] == (0, "")
    assert fakes.traced(project, "start") == starts
    client = mlflow.MlflowClient(uri)
    parent, children = find(client, project)
    assert sorted(children) == [0, 1, 2, 3]
    assert {x.info.status for x in children.values()} == {"FINISHED"}
    for trial in load(project).trials:
        check_metrics(client, children[trial.number], trial)
    assert "best.json" in artifacts(client, parent)

    half = children[1].info.run_id
    gone = subprocess.Popen(["true"])
    gone.wait()
    client.set_tag(half, "logger", f"{socket.gethostname()} {gone.pid}")
    client.update_run(half, status="RUNNING")
    assert command(*words, 4, "--mlflow", uri)[::2] == (0, "")
    _, again = find(client, project)
    assert sorted(again) == [0, 1, 2, 3] and again[1].info.run_id != half
    check_metrics(client, again[1], load(project).trials[1])


def test_without_mlflow_a_sentence_says_so(project, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    status, out, err = command(*WORDS, "--pruner", "none", "--trials", 2, "--mlflow")
    assert status == 0 and "2/2 trials: 2 complete" in out and "best settings" in out
    assert err.count("\n") == 1 and err.startswith("--mlflow: ") and "mlflow" in err[10:]

"""tune.py with mocks of a training script and evaluate.py, and with a real script.

The imports of tune.py take seconds, so its commands run in processes forked from a server that
has already imported everything.
"""

import ast
import json
import multiprocessing
import multiprocessing.forkserver
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import filelock
import numpy as np
import psutil
import pytest
from conftest import ROOT, wait_for
from scipy import stats
from sections import (
    CONTINUOUS_IN_GYMNASIUM,
    CONTINUOUS_SCRIPTS,
    PPO_SCRIPTS,
    ROWS,
    SAC_SCRIPTS,
    path_of,
)
from tune_script import Args, greedy, luck, recent

from studies.tuning import study as tuning

optuna = pytest.importorskip("optuna")
tune = pytest.importorskip("tune")
TrialState = optuna.trial.TrialState

QUICK = ["fake.py", "--num-seeds", 2, "--fresh-seeds", 2, "--episodes", 5, "--pruner", "none"]
NAME = "fake__Fake-v1"
SERVER = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="session", autouse=True)
def server():
    names = ["test_tune", "optuna.storages.journal", "sqlalchemy.dialects.sqlite"]
    SERVER.set_forkserver_preload(names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
        multiprocessing.forkserver.ensure_running()


@pytest.fixture
def project(tmp_path):
    for name in ("fake.py", "evaluate.py"):
        shutil.copy(ROOT / "tests/helpers/tune_script.py", tmp_path / name)
    yield tmp_path
    for pid in processes_in(tmp_path):
        os.kill(pid, signal.SIGKILL)


def begin(project, words, env, patch):
    """Run tune.py in a forked process, with its output redirected to files."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(project / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(project)
    os.environ.update(env)
    sys.argv = ["tune.py", *words]
    tune.HERE = project  # folder of the mock of evaluate.py
    tune.draw = lambda *_: None  # drawing is slow
    if patch:
        patch()
    tune.main(*tune.parse_args())


def start(project, *words, mlflow="", patch=None, **plans):
    env = {"TRACE": str(project / "trace"), "MISBEHAVE": json.dumps(plans)}
    env["MLFLOW_TRACKING_URI"] = mlflow
    process = SERVER.Process(target=begin, args=(project, [*map(str, words)], env, patch))
    process.start()
    return process


def wait(project, process):
    """Wait for tune.py to end. Return its exit status, stdout and stderr."""
    process.join(60)
    return process.exitcode, (project / "out").read_text(), (project / "err").read_text()


def run(project, *words, **options):
    return wait(project, start(project, *words, **options))


def processes_in(project):
    """Return the ids of live training processes. The check of TRACE excludes reused ids."""
    own = str(project / "trace")
    found = []
    for pid in {x["pid"] for x in traced(project, "start")}:
        with suppress(psutil.Error):  # the process has ended
            if psutil.Process(pid).environ().get("TRACE") == own:
                found.append(pid)
    return found


def load(project, storage=None):
    storage = storage or f"sqlite:///{project}/tuned/{NAME}/study.db"
    return optuna.load_study(study_name=NAME, storage=storage)


def values_of(project, storage=None):
    """Return the value of each trial of a study. All trials must be complete."""
    trials = tune.counted(load(project, storage))
    assert {x.state for x in trials} == {TrialState.COMPLETE}
    return {x.number: x.value for x in trials}


def report(project):
    return json.loads((project / "tuned" / NAME / "best.json").read_text())


def traced(project, *what):
    """Return the events whose kind is in `what`, in order."""
    path = project / "trace"
    lines = path.read_text().splitlines() if path.exists() else []
    return [x for x in map(json.loads, lines) if x["what"] in what]


def check_runs(project):
    """Assert that no run ran twice at the same time, restarted after its end, or lost progress."""
    saved = {}  # run -> iteration at which it stopped, or its last event
    for event in traced(project, "start", "stop", "end"):
        run = event["place"]
        if event["what"] == "start":
            before = saved.get(run, 0)
            assert before != "end" and event["first"] == (0 if before == "start" else before)
        else:
            assert saved[run] == "start"
        saved[run] = event.get("done", event["what"])


# === Results ====================================================================================
def test_a_study(project):
    """The value is the interquartile mean over seeds. The best trial is rerun on held-out seeds."""
    words = ["fake.py", "--trials", 3, "--num-seeds", 4, "--fresh-seeds", 3, "--episodes", 7]
    words += ["--pruner", "none", "--workers", 2, "--space", "gamma=none", "--seconds", "0.1"]
    status, out, err = run(project, *words)
    assert (status, err) == (0, "") and len(values_of(project)) == 3
    trials = load(project).trials
    own = {"learning_rate": 0.1, "anneal_lr": True, "num_minibatches": 8, "hidden_sizes": "64x64"}
    assert trials[0].params == own | {"loss": "mse"}  # the defaults of the script
    for x in trials:
        values = [greedy(x.params, seed, 1_000_000) for seed in range(1, 5)]
        assert x.value == pytest.approx(sum(sorted(values)[1:3]) / 2)
        told = [recent(x.params) + luck(seed) for seed in range(1, 5)]
        for seeds, step in ((2, 44), (3, 66), (4, 89)):  # one report per finished seed
            value = stats.trim_mean(told[:seeds], 0.25)
            assert x.intermediate_values[step] == pytest.approx(value)
    best = max(trials, key=lambda x: x.value)
    result = report(project)
    assert (result["best_settings"], result["best_trial"]) == (best.params, best.number)
    fresh = range(1001, 1004)
    tuned = [greedy(best.params, x, 2_000_000) for x in fresh]
    untuned = [greedy(own, x, 2_000_000) for x in fresh]
    parts = {"best": tuned, "defaults": untuned, "best_minus_defaults": np.subtract(tuned, untuned)}
    for name, values in parts.items():
        assert result[name]["returns"] == pytest.approx(list(values))
        assert result[name]["text"] in out
    assert f"--learning-rate {best.params['learning_rate']} " in result["command"]

    # Trials, final runs and their evaluations use disjoint seeds.
    trained = Counter((x["run"][0] == "0", x["settings"]["seed"]) for x in traced(project, "start"))
    assert trained == {(True, x): 3 for x in range(1, 5)} | {(False, x): 2 for x in fresh}
    evaluated = Counter((x["seed"], x["episodes"]) for x in traced(project, "evaluate"))
    assert evaluated == {(1_000_000, 7): 3 * 4, (2_000_000, 7): 2 * 3}

    # Checkpoints of trials are deleted, and those of the final runs are kept.
    kept = [x.parent.name for x in project.rglob("checkpoint.*")]
    assert len(kept) == 2 * 3 and not any(x.startswith("0") for x in kept)

    # The figures make no network requests.
    tune.draw(load(project), project)
    for name in ("optimization_history", "param_importances", "parallel_coordinate", "contour"):
        page = (project / f"{name}.html").read_text()
        assert 'src="plotly.min.js"' in page and 'src="http' not in page


def test_summary():
    """The interquartile mean has a Tukey-McLaughlin interval, and the mean has a t interval."""
    returns = [1.0, 2.0, 4.0, 7.0, 8.0, 9.0, 9.5, 100.0]
    result = tune.summary(returns)
    assert (result["iqm"], result["mean"]) == (7, 17.5625)
    winsorized = stats.sem([4, 4, 4, 7, 8, 9, 9, 9])
    reach = stats.t.ppf(0.975, 3) * winsorized / (1 - 2 * 2 / 8)
    assert result["interval"] == pytest.approx([7 - reach, 7 + reach], rel=1e-4)
    reach = stats.t.ppf(0.975, 7) * stats.sem(returns)
    assert np.diff(result["mean_interval"]) == pytest.approx(2 * reach, rel=1e-4)
    assert tune.summary([2.0] * 12)["interval"] is None  # not an interval of width 0


def write_info(folder, status, iteration=10):
    """Write the run.json of a run with ten iterations."""
    folder.mkdir(exist_ok=True)
    args = {"total_timesteps": 1050, "num_envs": 4, "num_steps": 25}
    info = {"status": status, "iteration": iteration, "args": args, "versions": {}}
    (folder / "run.json").write_text(json.dumps(info))


def test_exactly_the_runs_at_their_last_iteration_are_complete(tmp_path):
    """The scripts refuse to resume such a run, but they resume a diverged run that was stopped."""
    assert not tune.is_complete(tmp_path)
    ends = [("running", 9, False), ("stopped", 9, False), ("completed", 10, True)]
    ends += [("diverged", 9, False), ("diverged", 10, True)]
    for status, iteration, is_complete in ends:
        write_info(tmp_path, status, iteration)
        assert tune.is_complete(tmp_path) == is_complete, (status, iteration)


def evaluate_mock(command, folders, *_):
    """Return 9 for each agent, or raise CannotAct if one of the runs is named "unable"."""
    if "unable" in [folder.name for folder in folders]:
        raise tune.CannotAct("the actions are NaN")
    return [9.0] * len(folders)


def test_only_an_agent_that_cannot_act_counts_as_minus_infinity(tmp_path, monkeypatch):
    ends = {"a": "completed", "unable": "diverged", "able": "diverged", "failed": "running"}
    for name, status in ends.items():
        write_info(tmp_path / name, status)
    monkeypatch.setattr(tune, "evaluate", evaluate_mock)
    folders = [tmp_path / name for name in ends]
    returns = tune.held_out_returns(Mock(), folders, [tmp_path / "failed"], Mock())
    assert returns == [9, -np.inf, 9, -np.inf]


def test_other_errors_of_an_evaluation_are_raised(tmp_path, monkeypatch):
    """The evaluation of a diverged agent can also reach the timeout, or run out of memory."""
    error = tune.TrialError("not finished after 3 s")
    monkeypatch.setattr(tune, "evaluate", Mock(side_effect=error))
    with pytest.raises(tune.TrialError, match="not finished"):
        tune.held_out_return(Mock(), tmp_path, Mock())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_held_out_run_that_fails_with_nan_actions_does_not_end_the_verdict(tmp_path, monkeypatch):
    """The failed run was the first one, and left no run folder."""

    def train(command, folder, settings, seed, watch):
        if folder.name == "defaults-seed-1001":
            raise tune.CannotAct("an action is NaN")
        write_info(folder, "completed")

    command = new_command(tmp_path)
    command.args.fresh_seeds = 2
    (command.trials / "fresh").mkdir()
    command.study.tell(command.study.ask(command.space), 1.0)
    monkeypatch.setattr(tune, "train", train)
    monkeypatch.setattr(tune, "evaluate", evaluate_mock)
    result = tune.verdict(command, tune.best_of(command.study))
    assert result["defaults"]["returns"] == [-np.inf, 9]
    assert result["best"]["returns"] == [9, 9]


@pytest.mark.parametrize(
    "kind, text",
    [
        ("CannotAct", "FloatingPointError: an action is NaN or infinite, so training has diverged"),
        ("CannotAct", "runs/a: the policy returned NaN or infinite actions; training may have"),
        ("TrialError", "FloatingPointError: environment 0 returned a reward with NaN or inf in"),
        ("TrialError", "MemoryError: out of memory"),
    ],
)
def test_nan_actions_differ_from_other_errors(tmp_path, kind, text):
    """NaN in a reward or an observation is a fault of the environment."""
    code = f"import sys; print('Diverged: NaN or infinite losses.'); sys.exit({text!r})"
    with pytest.raises(tune.TrialError) as error:
        tune.run(new_command(tmp_path), ["-c", code], tmp_path / "log", Mock())
    assert error.type is getattr(tune, kind)


def test_tune_py_recognizes_the_errors_about_nan_actions():
    """These are the programs that check the actions."""
    scripts = [*CONTINUOUS_IN_GYMNASIUM, *(name for name in SAC_SCRIPTS if "gymnasium" in name)]
    for path in [ROOT / "evaluate.py", *map(path_of, scripts)]:
        assert any(text in path.read_text() for text in tune.NAN_ACTIONS), path


def test_best_json_has_null_instead_of_nan_and_infinity():
    text = tune.to_json({"best": {"returns": [-np.inf, 1.5], "iqm": np.nan}, "best_trial": 3})
    found = json.loads(text, parse_constant=pytest.fail)
    assert found == {"best": {"returns": [None, 1.5], "iqm": None}, "best_trial": 3}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_study_of_tuning_reads_the_verdict_on_a_diverged_agent(tmp_path):
    part = tune.summary([5.0, -np.inf, 6.0, 7.0])
    result = {"defaults": part, "best": part, "best_minus_defaults": part, "best_trial": 3}
    result |= {"default_value_in_study": 5.0, "value_in_study": 6.0}
    (tmp_path / "a").mkdir()
    (tmp_path / "a/best.json").write_text(tune.to_json(result))
    row = tuning.verdicts(tmp_path).iloc[0]
    assert row["iqm_estimate"] == 5.5 and np.isnan(row["mean_estimate"])


def test_mlflow_receives_an_agent_that_has_a_checkpoint(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b/checkpoint.msgpack").touch()
    part = {"iqm": 1.0}
    result = {"best": part, "defaults": part, "best_minus_defaults": part, "best_settings": {}}
    mlflow = Mock()
    tune.log_verdict(mlflow, tmp_path, result | {"best_runs": ["a", "b"]})
    mlflow.log_artifacts.assert_called_once_with(tmp_path / "b", "best")


def test_differences_of_diverged_agents():
    best, defaults = [3.0, -np.inf, -np.inf, 4.0], [1.0, -np.inf, 2.0, -np.inf]
    assert tune.differences(best, defaults) == [2, 0, -np.inf, np.inf]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_summary_of_a_diverged_agent():
    """The interquartile mean drops it, but the mean does not."""
    result = tune.summary([5.0, -np.inf, 6.0, 7.0])
    assert (result["iqm"], result["mean"], result["mean_interval"]) == (5.5, -np.inf, None)


GREEDY = {"actions": "greedy", "epsilon": 0.0, "max_steps": 10_000, "episodes": 100, "seed": 7}


def write_evaluation(folder, value, **changes):
    results = GREEDY | changes | {"return": {"mean": value}}
    (folder / "evaluation.json").write_text(json.dumps(results))


def test_all_settings_of_an_evaluation_must_match(tmp_path):
    assert not tune.has_settings(tmp_path / "evaluation.json", GREEDY)
    write_evaluation(tmp_path, 2.0)
    assert tune.has_settings(tmp_path / "evaluation.json", GREEDY)
    other = {"episodes": 1000, "seed": 0, "actions": "sampled", "epsilon": 0.1, "max_steps": 9}
    for name, value in other.items():
        write_evaluation(tmp_path, 2.0, **{name: value})
        assert not tune.has_settings(tmp_path / "evaluation.json", GREEDY), name


def test_an_evaluation_with_other_settings_is_kept_but_not_used(tmp_path, monkeypatch):
    """evaluate.py does not replace results with more episodes."""

    def run(*_):
        if not (tmp_path / "evaluation.json").exists():
            write_evaluation(tmp_path, 3.0)

    monkeypatch.setattr(tune, "run", run)
    write_evaluation(tmp_path, 2.0, episodes=1000)
    assert tune.evaluate(new_command(tmp_path), [tmp_path], 7, Mock()) == [3]
    kept = json.loads((tmp_path / "evaluation-by-hand.json").read_text())
    assert (kept["episodes"], kept["return"]["mean"]) == (1000, 2)


def test_an_evaluation_with_the_same_settings_is_not_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "run", Mock(side_effect=AssertionError))
    write_evaluation(tmp_path, 2.0)
    assert tune.evaluate(new_command(tmp_path), [tmp_path], 7, Mock()) == [2]


def test_an_evaluation_without_results_is_an_error(tmp_path, monkeypatch):
    """evaluate.py ends with status 0 if it cannot write its results."""
    monkeypatch.setattr(tune, "run", Mock())
    with pytest.raises(tune.TrialError, match=r"evaluation\.json"):
        tune.evaluate(new_command(tmp_path), [tmp_path], 7, Mock())


def test_a_study_prefers_better_settings(tmp_path):
    """The synthetic objective has its optimum at 0.8. Most of the later trials are close to it."""
    _, space, study = new_study(tmp_path, "tpe")
    for _ in range(40):
        trial = study.ask(space)
        study.tell(trial, -abs(trial.params["gamma"] - 0.8))
    distances = [abs(x.params["gamma"] - 0.8) for x in study.trials]
    assert np.median(distances[20:]) < 0.1
    assert tune.best_of(study).params["gamma"] == pytest.approx(0.8, abs=0.05)
    for value in (0.3, 0.1 + 0.2):  # equal up to rounding: the first one is the best
        study.tell(study.ask(space), value)
    assert tune.best_of(study).number == 40


# === Interruptions ==============================================================================
def test_the_same_command_continues_after_a_kill_at_any_moment(project):
    """No finished trial is lost or repeated, and no process is left behind."""
    words = [*QUICK, "--workers", 2, "--seconds", "0.3", "--trials", 5]
    rng = random.Random(1)
    ended = {}
    for _ in range(3):
        command = start(project, *words)
        seen = len(traced(project, "start", "end")) + rng.randrange(1, 6)
        wait_for(lambda n=seen: len(traced(project, "start", "end")) >= n)
        time.sleep(rng.uniform(0, 0.2))
        command.kill()
        status, _, err = wait(project, command)
        assert (status, err) == (-signal.SIGKILL, "")
        wait_for(lambda: not processes_in(project))
        complete = [x for x in tune.counted(load(project)) if x.state == TrialState.COMPLETE]
        ended |= {x.number: x.value for x in complete}
    assert run(project, *words)[::2] == (0, "")
    values = values_of(project)
    assert len(values) == 5 and ended.items() <= values.items()
    check_runs(project)
    assert len(traced(project, "end")) == 5 * 2 + 2 * 2


def new_study(folder, sampler="random"):
    """Return the arguments, the search space, and a study without trials."""
    folder.mkdir(exist_ok=True)
    args = tune.Args(folder / "fake.py", sampler=sampler, pruner="none")
    space = {"gamma": optuna.distributions.FloatDistribution(0, 1)}
    return args, space, tune.open_study("name", args, folder, {}, {"gamma": 0.5})


def new_command(folder):
    """Return a command for a study without trials."""
    args, space, study = new_study(folder)
    args.script.write_text("")
    version = tune.version_of(args.script)
    defaults = {"env_id": "Fake-v1", "gamma": 0.5}
    return tune.Command(args, [], defaults, space, folder, study, folder, "here", version)


def test_an_interrupted_trial_continues(tmp_path, capsys):
    """A trial from another machine is taken over only after its heartbeats have stopped."""
    command = new_command(tmp_path)
    args, space, study = command.args, command.space, command.study
    study.ask()  # a trial without hyperparameters
    tune.requeue(command)
    second = study.ask(space)
    second.set_user_attr("place", "here")
    other = study.ask(space)
    args.storage = "shared"
    tune.requeue(command)
    third = study.ask(space)
    assert [x.number for x in tune.counted(study)] == [other.number, third.number]
    for trial in (second, third):
        assert trial.params["gamma"] == 0.5
        assert tune.run_of(trial, tmp_path, 1) == tmp_path / "0000-seed-1"
    third.set_user_attr("place", "here")
    third.set_user_attr("error", "it failed, and could not say so")
    tune.requeue(command)
    assert study.trials[-1].number == third.number and study.trials[-1].state == TrialState.FAIL
    # Seconds since the last heartbeat, and the expected state.
    for seconds, state in ((0, TrialState.RUNNING), (700, TrialState.FAIL)):
        other.set_user_attr("heard", time.time() - seconds)
        tune.requeue(command)
        assert study.trials[other.number].state == state
    (waiting,) = tune.counted(study, TrialState.WAITING)
    assert waiting.user_attrs["goes_on"] == other.number
    tune.finish(command)
    assert "Other commands are running trials" in capsys.readouterr().out


def disable_guard():
    tune.processes.Guard = Mock()
    tune.HEARTBEAT = 0


def test_a_command_waits_for_the_processes_of_a_killed_one(project):
    """Without the guard, the training process outlives its command, so the next command waits."""
    words = ["fake.py", "--trials", 1, "--num-seeds", 1, "--fresh-seeds", 1, "--episodes", 5]
    command = start(project, *words, patch=disable_guard, **{"0000-": "hang"})
    wait_for(lambda: processes_in(project))
    first = last_heartbeat(project)
    wait_for(lambda: last_heartbeat(project) > first)
    command.kill()
    wait(project, command)
    (left,) = processes_in(project)
    (lock,) = project.rglob("0000-seed-*.lock")
    with pytest.raises(filelock.Timeout):  # a command that is slow to start would not wait for it
        filelock.FileLock(lock, timeout=0).acquire()
    again = start(project, *words)
    time.sleep(3)
    assert len(traced(project, "start")) == 1
    os.kill(left, signal.SIGTERM)
    assert wait(project, again)[::2] == (0, "")
    check_runs(project)


def last_heartbeat(project):
    return load(project).trials[0].user_attrs["heard"]


def test_a_signal_saves_checkpoints_and_the_same_command_continues(project):
    """Send the signal during trials and during final runs, which hang until it arrives."""
    words = [*QUICK, "--workers", 2, "--trials", 3, "--seconds", "0.1"]
    trial, fresh = {"0002-seed-1"}, {"defaults-seed-1001", "defaults-seed-1002"}
    for number, runs in ((signal.SIGINT, trial), (signal.SIGTERM, fresh)):
        command = start(project, *words, **dict.fromkeys(runs, "hang"))
        wait_for(lambda runs=runs: runs <= {x["run"] for x in traced(project, "start")})
        os.kill(command.pid, number)
        status, out, err = wait(project, command)
        assert (status, err) == (128 + number, "") and not processes_in(project)
        assert out.splitlines()[-1] == "Stopped. Run the same command again to continue."
        assert runs <= {x["run"] for x in traced(project, "stop")}
    assert run(project, *words)[::2] == (0, "")
    check_runs(project)
    assert trial | fresh <= {x["run"] for x in traced(project, "start") if x["first"]}
    assert len(values_of(project)) == 3


def test_two_machines_share_a_storage(project):
    """Both commands use the same journal file."""
    words = [*QUICK, "--trials", 6, "--seconds", "0.1", "--storage", project / "journal"]
    commands = [start(project, *words, "--studies-dir", x) for x in ("here", "there")]
    assert [wait(project, x)[::2] for x in commands] == [(0, "")] * 2
    check_runs(project)
    assert {x["place"].split("/")[-4] for x in traced(project, "start")} >= {"here", "there"}
    assert len(values_of(project, tune.open_storage(str(project / "journal"), project))) >= 6


# === Pruning and failures =======================================================================
def prune_strictly():
    """Prune trials with a value below -1.5. Hyperband would never prune the first trial."""
    strict = optuna.pruners.ThresholdPruner(lower=-1.5)
    optuna.pruners.HyperbandPruner.prune = lambda _, *trial: strict.prune(*trial)


def test_hyperband_prunes_at_a_ninth_and_at_a_third(tmp_path):
    """Each trial is worse than all previous ones."""
    args = tune.Args(tmp_path / "fake.py", storage=str(tmp_path / "journal"))
    pruner = tune.open_study("name", args, tmp_path, {}, {}).pruner
    study = optuna.create_study(study_name="name", direction="maximize", pruner=pruner)
    ends = set()
    for number in range(30):
        trial = study.ask()
        for step in (1, 4, 9, 10, 29, 30, 89):
            trial.report(-number, step)
            if trial.should_prune():
                ends.add(step)
                break
        study.tell(trial, -number)
    assert ends == {10, 30}


def test_pruning_a_trial_ends_its_process(project):
    """The default learning rate is 100x too large. Only trials that use it are pruned."""
    words = ["fake.py", "--num-seeds", 2, "--fresh-seeds", 1, "--trials", 3, "--workers", 2]
    words += ["--space", "learning_rate=1e-3,2e-3,3e-3"]
    status, out, err = run(project, *words, patch=prune_strictly, **{"0000-": "hang"})
    assert (status, err) == (0, "") and "trial 0: pruned | " in out
    trials = load(project).trials
    lag = [x for x in trials if x.params["learning_rate"] == 0.1]
    assert trials[0] in lag and {x.state for x in lag} == {TrialState.PRUNED}
    assert {x.state for x in trials if x not in lag} == {TrialState.COMPLETE}
    assert [x["run"] for x in traced(project, "stop")] == ["0000-seed-1"]
    assert not processes_in(project)


def test_failures_are_reported_and_the_study_continues(project):
    """The same command repeats failed final runs, but not failed trials."""
    words = [*QUICK, "--trials", 5, "--workers", 2, "--timeout", 3]
    plans = {"0001-": "crash", "0002-seed-2": "killed", "0003-": "hang"}
    plans["defaults-seed-1002"] = "crash"
    status, out, err = run(project, *words, **plans)
    said = tune.plain("RuntimeError: shapes do not match \N{SNOWMAN} \x1b[31m")
    crash = f"fake.py ended with status 1: {said}"
    assert (status, err) == (1, crash + "\n") and "\x1b" not in out
    told = {1: crash, 2: "fake.py ended with status -9: no output", 3: "not finished after 3 s"}
    for trial in load(project).trials:
        assert (trial.state == TrialState.FAIL) == (trial.number in told)
        assert trial.user_attrs.get("error") == told.get(trial.number)
    for number, sentence in told.items():
        assert f"trial {number}: {sentence} | " in out
    assert not processes_in(project)
    before = Counter(x["run"] for x in traced(project, "start"))
    assert run(project, *words)[0] == 0
    after = Counter(x["run"] for x in traced(project, "start"))
    assert after - before == {"defaults-seed-1002": 1}


def test_a_training_that_ends_early_with_status_0_is_an_error(tmp_path, monkeypatch):
    """The environment may have called sys.exit()."""
    monkeypatch.setattr(tune, "run", Mock())
    with pytest.raises(tune.TrialError, match="before training was complete"):
        tune.train(new_command(tmp_path), tmp_path / "run", {}, 1, Mock())


def test_exception_of():
    """JAX adds a note, which Python prints after the exception."""
    start = "Traceback (most recent call last):\n"
    first = f'{start}  File "a.py", line 1\nKeyError: 1\n\nDuring handling another occurred:\n\n'
    last = f'{start}  File "a.py", line 2\n    f(x)\n    ^^^^\nValueError: 3 is not 4\nin f\n'
    note = f"{'-' * 20}\nFor simplicity, JAX has removed its internal frames from the traceback.\n"
    assert tune.exception_of(first + last + note) == "ValueError: 3 is not 4 in f"
    assert tune.exception_of("Warning: a\nno environment\n") == ""


def test_another_process_may_end_a_trial_before_it_fails(tmp_path, monkeypatch):
    command = new_command(tmp_path)

    def fail(_, trial):
        command.study.tell(trial.number, state=TrialState.FAIL)
        command.stop.set()
        raise tune.TrialError

    monkeypatch.setattr(tune, "train_and_evaluate", fail)
    tune.work(command)
    assert "error" not in command.study.trials[0].user_attrs


def test_the_error_of_any_worker_is_reported(tmp_path, monkeypatch):
    """The second worker failed. The first one was stopped for this reason, and ended before it."""
    command = new_command(tmp_path)
    command.args.workers = 2
    second = iter((False, True))

    def work(_):
        if next(second):
            command.stop.set()
            time.sleep(0.1)
            raise OSError("disk full")
        command.stop.wait()
        raise tune.Stopped

    monkeypatch.setattr(tune, "work", work)
    with pytest.raises(OSError, match="disk full"):
        tune.tune(command)


def test_no_run_starts_after_the_script_has_changed(tmp_path, capsys):
    command = new_command(tmp_path)
    command.args.script.write_text("# another")
    with pytest.raises(SystemExit):
        tune.run(command, ["-c", "0"], tmp_path / "log", Mock())
    assert "fake.py has changed" in capsys.readouterr().err and not (tmp_path / "log").exists()


def test_if_all_trials_fail_the_error_is_one_line(project):
    status, out, err = run(project, *QUICK, "--trials", 1, diverged="")
    assert (status, err) == (1, "no trial is complete; trials.csv lists the reasons\n")
    assert "trial 0: the return of an agent is not finite" in out


def test_a_failure_with_the_default_settings_ends_the_study(project):
    """The script reports the error. Once its cause is fixed, the same command continues."""
    words = [*QUICK, "--trials", 2]
    sentence = "fake.py ended with status 2: --env-id: a package is missing\n"
    assert run(project, *words, **{"0000-": "refused"})[::2] == (2, sentence)
    assert run(project, *words, **{"0002-": "refused"})[::2] == (0, "")
    own, another = tune.counted(load(project))
    assert own.params["learning_rate"] == 0.1 and own.state == TrialState.COMPLETE
    assert another.user_attrs["error"] == sentence.strip()


# === Command line ===============================================================================
@pytest.mark.parametrize(
    "words, sentence",
    [
        ("fake.py --gamma 2", "--gamma must be between 0 and 1, not 2.0"),
        ("fake.py --run-name=x", "--run-name cannot be set: tune.py sets it for each run"),
        ("fake.py --studies-dir /dev/null", "the study cannot be opened: [Errno 20] Not a dir"),
        ("fake.py --gamma 0.9 --space gamma=0.9,1", "gamma is fixed, by a flag"),
        ("fake.py --space gama=0.9", "the script has no gama"),
        ("fake.py --space gamma=a:\x1b[31m", "must be NAME=LOW:HIGH[:log] or NAME=A,B,C"),
        ("fake.py --space gamma=0.5:2", "the range from 0.5 to 2.0 is empty or not allowed"),
        ("many.py", "many.py does not train one agent"),
        ("ppo_lenin", "ppo_lenin is neither a file nor a script of this project"),
    ],
)
def test_usage_errors(project, words, sentence):
    text = (project / "fake.py").read_text()
    many = text.replace("    seed: int", "    num_agents: int = 8\n    seed: int", 1)
    (project / "many.py").write_text(many)
    status, _, err = run(project, *words.split(" "))
    assert status == 2 and sentence in " ".join(err.replace("│", " ").split()), err
    assert "Traceback" not in err and "\x1b" not in err and not (project / "trace").exists()


@pytest.mark.parametrize(
    "code, sentence",
    [
        ("", "does not train one agent"),
        ("parse_args = dict", "does not train one agent"),
        ("raise RuntimeError('no display')", "cannot be imported: RuntimeError: no display"),
        ("raise SystemExit", "cannot be imported: SystemExit"),
    ],
)
def test_a_file_that_is_not_a_training_script(tmp_path, monkeypatch, capsys, code, sentence):
    for name in ("path", "argv"):
        monkeypatch.setattr(sys, name, getattr(sys, name).copy())
    monkeypatch.delitem(sys.modules, "not_a_script", raising=False)
    (tmp_path / "not_a_script.py").write_text(code)
    with pytest.raises(SystemExit, match="2"):
        tune.ask_script(tmp_path / "not_a_script.py", [])
    assert sentence in capsys.readouterr().err
    sys.modules.pop("not_a_script", None)


def test_a_study_continues_only_with_the_same_code_and_in_one_command(project):
    words = [*QUICK, "--trials", 1]
    assert run(project, *words)[0] == 0
    code = (project / "fake.py").read_text()
    (project / "fake.py").write_text(code + "# another\n")
    changed = f"study {NAME} was started with different settings (version)"
    sentence = f"{changed}; choose a different --study\n"
    assert run(project, *words)[::2] == (2, sentence)
    (project / "fake.py").write_text(code)
    with tune.locked(project / "tuned" / NAME / "study.lock", ""):
        status, _, err = run(project, *words)
    assert status == 2 and err.startswith("another command is running this study")
    # Flags that do not affect the result of a trial may change.
    more = ["--trials", 2, "--workers", 2, "--seed", 9, "--timeout", 90, "--fresh-seeds", 3]
    assert run(project, *words, *more)[0] == 0
    check_runs(project)
    assert len(values_of(project)) == 2 and len(report(project)["defaults"]["returns"]) == 3
    # Without its database, the study starts over with new runs.
    (project / "tuned" / NAME / "study.db").unlink()
    assert run(project, *words)[0] == 0
    assert Counter(x["run"] for x in traced(project, "start"))["0000-seed-1"] == 2


def test_a_script_in_any_folder_gets_the_flags_unknown_to_tune_py(project):
    """The flags may start with a named configuration. The script may import a module next to it."""
    home = project / "else where"
    home.mkdir()
    (home / "beside.py").write_text("GAMMA = 0.9\n")
    code = "from beside import GAMMA\n" + (project / "fake.py").read_text()
    (home / "mine.py").write_text(code.replace("gamma: float = 0.99", "gamma: float = GAMMA"))
    own = ["short", "--no-anneal-lr"]
    words = ["else where/mine.py", *own, *QUICK[1:], "--trials", 1, "--studies-dir", "w?at %41 #'é"]
    assert run(project, *words)[::2] == (0, "")
    given = [x["settings"] for x in traced(project, "start")]
    assert {(x["total_timesteps"], x["anneal_lr"], x["gamma"]) for x in given} == {
        (500, False, 0.9)
    }
    (best,) = (json.loads(path.read_text()) for path in project.glob("w*/*/best.json"))
    assert "anneal_lr" not in best["best_settings"] and " ".join(own) in best["command"]


def test_parse_range(capsys):
    kinds = optuna.distributions

    def parse(name, text):
        return tune.parse_range(name, text, Args())

    assert parse("gamma", "0.1:0.5") == kinds.FloatDistribution(0.1, 0.5)
    assert parse("learning_rate", "1e-5:1%:log") == kinds.FloatDistribution(1e-5, 10, log=True)
    assert parse("num_minibatches", "2:48:log") == kinds.IntDistribution(2, 48, log=True)
    # Choices include the default of the script, so that the first trial can use it.
    assert parse("anneal_lr", "False") == kinds.CategoricalDistribution([False, True])
    assert parse("hidden_sizes", "8x8,9").choices == ("8x8", "9", "64x64")
    assert parse("gamma", "0.9,2,0.5,0.9") == kinds.CategoricalDistribution([0.9, 0.5, 0.99])
    assert parse("loss", "huber,l1").choices == ("huber", "mse")
    assert "Leaving out gamma=2.0: Error" in capsys.readouterr().out


def test_the_seed_determines_the_proposed_settings(tmp_path):
    """If the study is resumed, it does not repeat the settings that it proposed first."""
    found = []
    for place in ("a", "b", "a"):
        _, space, study = new_study(tmp_path / place)
        found.append([study.ask(space).params["gamma"] for _ in range(3)])
    assert found[0] == found[1] and found[0][0] == 0.5
    assert not set(found[0]) & set(found[2])


def test_the_search_space_consists_of_flags_of_the_scripts():
    """PPO and DQN search over 12 flags, continuous PPO over 14, and SAC over 8."""
    for name in ROWS:
        path = tune.find_script(Path(name))
        assert path.samefile(path_of(name))
        tree = ast.parse(path.read_text())
        (found,) = (x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == "Args")
        names = {ast.unparse(x.target) for x in found.body if isinstance(x, ast.AnnAssign)}
        assert {*tune.GIVEN, "env_id", "total_timesteps"} <= names
        how_often_it_logs = set() if name in PPO_SCRIPTS else {"num_steps"}
        space = tune.SPACE | tune.CONTINUOUS_SPACE | tune.SAC_SPACE
        searched = space.keys() & names - how_often_it_logs
        count = 12
        if name in SAC_SCRIPTS:
            count = 8
        if name in CONTINUOUS_SCRIPTS:
            count = 14
        assert len(searched) == count, (path, searched)


# === A real script and MLflow ===================================================================
@pytest.fixture
def begin_command(monkeypatch):
    """Return a function that maps tune.py arguments to a Command before its first trial."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv("COLUMNS", "500")

    def begin_command(folder, *words):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["tune.py", *map(str, words)])
        return tune.begin(*tune.parse_args())

    yield begin_command
    sys.modules.pop("fake", None)


def test_a_trial_of_a_real_script(tmp_path, compiled, begin_command, monkeypatch):
    for name, value in compiled.items():
        monkeypatch.setenv(name, value)
    words = "ppo_linen --trials 1 --num-seeds 1 --episodes 8"
    words += " --num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 2"
    words += " --hidden-sizes 8 8 --total-timesteps 512"
    command = begin_command(tmp_path, *words.split())
    tune.work(command)
    (trial,) = command.study.trials
    assert 1 <= trial.value <= 500
    args = json.loads((command.trials / "0000-seed-1/run.json").read_text())["args"]
    assert (args["num_envs"], args["total_timesteps"], args["seed"]) == (4, 512, 1)


def test_mlflow_receives_each_trial_once(project, begin_command, monkeypatch):
    """The first attempt finds no server, the second succeeds, and the third adds nothing."""
    mlflow = pytest.importorskip("mlflow")
    words = [*QUICK, "--trials", 2]
    assert run(project, *words, **{"0001-": "crash"})[::2] == (0, "")
    monkeypatch.setattr(tune, "draw", lambda *_: None)
    command = begin_command(project, *words, "--mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(SystemExit, match=r"^--mlflow: .*run the same command to try again$"):
        tune.finish(command)
    server = f"sqlite:///{project}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    for _ in range(2):
        tune.finish(command)
    client = mlflow.MlflowClient(server)
    experiment = client.get_experiment_by_name("ppo-rosetta")
    found = client.search_runs([experiment.experiment_id])
    runs = {x.info.run_name: x for x in found}
    assert runs.keys() == {NAME, "trial-0000", "trial-0001"} and len(found) == 3
    result = report(project)
    assert runs[NAME].data.metrics["fresh_seeds/best"] == result["best"]["iqm"]
    files = {x.path for x in client.list_artifacts(runs[NAME].info.run_id)}
    assert files == {"best.json", "trials.csv", "best"}
    good = runs["trial-0000"]
    assert good.data.metrics["value"] == result["value_in_study"]
    history = client.get_metric_history(good.info.run_id, "charts/episodic_return/seed-1")
    assert [x.step for x in history] == list(range(100, 1001, 100))
    assert "shapes do not match" in runs["trial-0001"].data.tags["error"]

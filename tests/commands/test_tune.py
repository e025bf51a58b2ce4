"""tune.py with mocks of a training script and evaluate.py, and with a real script.

The imports of tune.py take seconds, so its commands run in processes forked from a server that
has already imported everything.
"""

import ast
import json
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import signal
import sqlite3
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import tyro
from conftest import ROOT, wait_for
from scipy import stats
from sections import CONTINUOUS_SCRIPTS, PPO_SCRIPTS, ROWS, SAC_SCRIPTS, path_of
from tune_script import Args, greedy, luck, recent

from studies.tuning import study as tuning

optuna = pytest.importorskip("optuna")
tune = pytest.importorskip("tune")
TrialState = optuna.trial.TrialState

QUICK = ["fake.py", "--num-seeds", 2, "--held-out-seeds", 1, "--episodes", 5, "--pruner", "none"]
NAME = "fake__Fake-v1"
SERVER = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="session", autouse=True)
def server():
    storage = ("sqlalchemy.dialects.sqlite", "alembic.command", "optuna.storages._rdb.models")
    SERVER.set_forkserver_preload(["test_tune", *storage])
    with pytest.MonkeyPatch.context() as patch:
        folders = ("", "tests", "tests/commands", "tests/helpers")
        patch.setenv("PYTHONPATH", ":".join(str(ROOT / x) for x in folders))
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
    tune.main()


def start(project, *words, mlflow="", patch=None, **plans):
    env = {"TRACE": str(project / "trace"), "MISBEHAVE": json.dumps(plans)}
    env["MLFLOW_TRACKING_URI"] = mlflow
    process = SERVER.Process(target=begin, args=(project, [*map(str, words)], env, patch))
    process.start()
    return process


def wait(project, process):
    """Wait for tune.py to end. Return its exit status, stdout and stderr."""
    process.join(300)
    return process.exitcode, (project / "out").read_text(), (project / "err").read_text()


def run(project, *words, **options):
    return wait(project, start(project, *words, **options))


def processes_in(project):
    """Return the ids of live training processes. The check of TRACE excludes reused ids."""
    trace = str(project / "trace")
    found = []
    for pid in {x["pid"] for x in traced(project, "start")}:
        with suppress(psutil.Error):  # the process has ended
            if psutil.Process(pid).environ().get("TRACE") == trace:
                found.append(pid)
    return found


def load(project, storage=None):
    storage = storage or f"sqlite:///{project}/tuned/{NAME}/study.db"
    return optuna.load_study(study_name=NAME, storage=storage)


def best_json(project):
    return json.loads((project / "tuned" / NAME / "best.json").read_text())


def traced(project, *what):
    """Return the events whose kind is in `what`, in order."""
    path = project / "trace"
    lines = path.read_text().splitlines() if path.exists() else []
    return [x for x in map(json.loads, lines) if x["what"] in what]


def started(project):
    """Return how often each run was started."""
    return Counter(x["run"] for x in traced(project, "start"))


# === Results ====================================================================================
def test_a_study(project, capsys):
    """The value is the interquartile mean over seeds. The best trial is rerun on held-out seeds."""
    words = ["fake.py", "--trials", 3, "--num-seeds", 4, "--held-out-seeds", 3, "--episodes", 7]
    words += ["--pruner", "none", "--workers", 2, "--gamma", "0.9"]
    status, out, err = run(project, *words)
    assert (status, err) == (0, "")
    trials = load(project).trials
    assert [x.state for x in trials] == [TrialState.COMPLETE] * 3
    defaults = {
        "learning_rate": 0.1,
        "anneal_lr": True,
        "num_minibatches": 8,
        "hidden_sizes": "64x64",
        "loss": "mse",
    }
    assert trials[0].params == defaults
    for x in trials:
        values = [greedy(x.params, seed, 1_000_000) for seed in range(1, 5)]
        assert x.value == pytest.approx(sum(sorted(values)[1:3]) / 2)
        training = [recent(x.params) + luck(seed) for seed in range(1, 5)]
        for seeds in range(1, 5):
            value = stats.trim_mean(training[:seeds], 0.25)
            assert x.intermediate_values[seeds] == pytest.approx(value)
    best = max(trials, key=lambda x: x.value)
    result = best_json(project)
    assert (result["best_settings"], result["best_trial"]) == (best.params, best.number)
    held_out = range(1001, 1004)
    tuned = [greedy(best.params, x, 2_000_000) for x in held_out]
    untuned = [greedy(defaults, x, 2_000_000) for x in held_out]
    parts = (
        ("defaults", "defaults", untuned),
        ("best", f"best settings, from trial {best.number}", tuned),
        ("best_minus_defaults", "difference, paired by seed", np.subtract(tuned, untuned)),
    )
    for name, title, values in parts:
        assert result[name]["returns"] == pytest.approx(list(values))
        tune.summary(title, list(values))
        assert capsys.readouterr().out in out
    assert f"--learning-rate {best.params['learning_rate']} " in result["command"]

    # Trials, held-out runs and their evaluations use disjoint seeds.
    seeds = Counter((x["run"][0] == "0", x["settings"]["seed"]) for x in traced(project, "start"))
    assert seeds == {(True, x): 3 for x in range(1, 5)} | {(False, x): 2 for x in held_out}
    evaluated = Counter((x["seed"], x["episodes"]) for x in traced(project, "evaluate"))
    assert evaluated == {(1_000_000, 7): 3 * 4, (2_000_000, 7): 2 * 3}

    # Checkpoints of trials are deleted, and those of the held-out runs are kept.
    kept = [x.parent.name for x in project.rglob("checkpoint.*")]
    assert len(kept) == 2 * 3 and not any(x.startswith("0") for x in kept)

    # The figures make no network requests.
    tune.draw(load(project), project)
    for name in ("optimization_history", "param_importances", "parallel_coordinate", "slice"):
        page = (project / f"{name}.html").read_text()
        assert 'src="plotly.min.js"' in page and 'src="http' not in page


def test_summary(capsys):
    """The interquartile mean has a Tukey-McLaughlin interval."""
    returns = [1.0, 2.0, 4.0, 7.0, 8.0, 9.0, 9.5, 100.0]
    result = tune.summary("best", returns)
    winsorized = stats.sem([4, 4, 4, 7, 8, 9, 9, 9])
    reach = stats.t.ppf(0.975, 3) * winsorized / (1 - 2 * 2 / 8)
    assert result["iqm"] == 7
    assert result["interval"] == pytest.approx([7 - reach, 7 + reach], rel=1e-4)
    text = "  best: 7.0 [1.7, 12.3], mean 17.6 [-10.4, 45.5], 1 to 100\n"
    assert capsys.readouterr().out == text
    assert tune.summary("best", [2.0] * 12)["interval"] is None  # not an interval of width 0


def test_a_held_out_run_that_diverges_counts_as_minus_infinity(project):
    """best.json has null for it, and the study of tuning can read that file."""
    words = [*QUICK, "--held-out-seeds", 4, "--trials", 2, "--space", "learning_rate=1e-3:2e-3"]
    plans = {"trial-0001-seed-1002": "diverged", "seed-1003": "diverged"}
    status, out, err = run(project, *words, **plans)
    assert (status, err) == (0, "") and "1002: fake.py ended with status 1: Diverged in" in out
    result = best_json(project)
    assert [x is None for x in result["best"]["returns"]] == [False, True, True, False]
    assert result["best_minus_defaults"]["returns"][1:3] == [None, 0]
    rows = tuning.verdicts(project / "tuned")
    assert rows["iqm_estimate"].iloc[0] == pytest.approx(result["defaults"]["iqm"])


def test_the_errors_after_divergence_have_a_phrase_in_common():
    """Errors about NaN in an observation or a reward differ, because the environment causes it."""
    for path in [ROOT / "evaluate.py", *map(path_of, ROWS)]:
        text = path.read_text()
        assert tune.DIVERGED in text and f"returned {tune.DIVERGED}:" not in text, path


# === Interruptions ==============================================================================
def test_the_same_command_continues_after_a_kill(project):
    """Interrupted trials start over, even if the settings are outside the search space."""
    words = [*QUICK, "--workers", 2, "--trials", 4, "--space", "learning_rate=1e-4:1e-2:log"]
    command = start(project, *words, **{"0000-": "hang"})
    wait_for(lambda: started(project)["0000-seed-1"] and tune.ended(load(project)))
    command.kill()
    assert wait(project, command)[::2] == (-signal.SIGKILL, "")
    wait_for(lambda: not processes_in(project))
    before = {x.number: x.value for x in tune.ended(load(project))}
    assert run(project, *words)[::2] == (0, "")
    trials = load(project).trials
    after = {x.number: x.value for x in tune.ended(load(project))}
    assert before and before.items() <= after.items() and len(after) == 4
    assert trials[0].state == TrialState.FAIL
    (again,) = (x for x in tune.ended(load(project)) if x.params == {"learning_rate": 0.1})
    assert again.state == TrialState.COMPLETE
    assert set(started(project).values()) == {1}


def test_a_signal_ends_the_runs_and_the_same_command_continues(project):
    """Send the signal during trials and during held-out runs, which hang until it arrives."""
    words = [*QUICK, "--workers", 2, "--trials", 3, "--held-out-seeds", 2]
    trial, held_out = {"0002-seed-1"}, {"defaults-seed-1001", "defaults-seed-1002"}
    for number, runs in ((signal.SIGINT, trial), (signal.SIGTERM, held_out)):
        command = start(project, *words, **dict.fromkeys(runs, "hang"))
        wait_for(lambda runs=runs: runs <= started(project).keys())
        wait_for(lambda: len(tune.ended(load(project))) >= 2)
        os.kill(command.pid, number)
        status, out, err = wait(project, command)
        assert (status, err) == (128 + number, "")
        assert out.splitlines()[-1] == "Stopped. Run the same command again to continue."
        wait_for(lambda: not processes_in(project))
    assert run(project, *words)[::2] == (0, "")
    interrupted, again = load(project).trials[2:]
    assert interrupted.state == TrialState.FAIL and again.params == interrupted.params
    assert len(tune.ended(load(project))) == 3
    ended = Counter(x["run"] for x in traced(project, "end"))
    assert set(ended.values()) == {1} and len(ended) == 3 * 2 + 2 * 2
    assert started(project)["defaults-seed-1002"] == 2


def test_two_machines_share_a_storage(project):
    """The machine that finishes its last trial last evaluates the best settings."""
    storage = f"sqlite:///{project}/shared.db"
    optuna.storages.RDBStorage(storage)  # creates the tables, which two machines cannot do at once
    words = [*QUICK, "--trials", 4, "--seconds", "0.5", "--storage", storage]
    commands = [start(project, *words, "--studies-dir", x) for x in ("here", "there")]
    assert [wait(project, x)[::2] for x in commands] == [(0, "")] * 2
    trials = [x for x in traced(project, "start") if x["run"][0] == "0"]
    assert {x["place"].split("/")[0] for x in trials} == {"here", "there"}
    assert set(Counter(x["run"] for x in trials).values()) == {1}
    study = load(project, storage)
    assert 4 <= len(tune.ended(study)) <= 5
    study.enqueue_trial({"gamma": 0.9})
    trial = study.ask()
    assert "Other machines are running trials" in run(project, *words)[1]
    # If a machine goes down, its trial is queued again.
    study._storage.record_heartbeat(trial._trial_id)
    with sqlite3.connect(project / "shared.db") as database:
        database.execute("UPDATE trial_heartbeats SET heartbeat = '2020-01-01 00:00:00'")
    assert "Greedy return" in run(project, *words)[1]
    (again,) = study.get_trials(states=(TrialState.WAITING,))
    assert again.system_attrs["fixed_params"] == {"gamma": 0.9}


def test_a_transaction_locks_the_database(tmp_path):
    """Otherwise two workers could start the same waiting trial."""
    study = new_study(tmp_path)
    engine = study._storage._backend.engine
    other = sqlite3.connect(tmp_path / "study.db", timeout=0)
    with engine.begin(), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("BEGIN IMMEDIATE")


def new_study(folder, pruner="none"):
    folder.mkdir(exist_ok=True)
    args = tune.Args(Path("fake.py"), pruner=pruner)
    return tune.open_study("name", args, folder, {}, {"gamma": 0.5})


# === Pruning and failures =======================================================================
def prune_strictly():
    """Prune trials with a value below -1.5, and all trials after their second seed.

    Hyperband would never prune the first trial.
    """
    strict = optuna.pruners.ThresholdPruner(lower=-1.5)

    def prune(_, study, trial):
        return trial.last_step == 2 or strict.prune(study, trial)

    optuna.pruners.HyperbandPruner.prune = prune


def test_hyperband_prunes_after_one_and_two_seeds(tmp_path):
    """Each trial is worse than all previous ones."""
    study = new_study(tmp_path, pruner="hyperband")
    ends = set()
    for number in range(15):
        trial = study.ask()
        for seeds in range(1, 4):
            trial.report(-number, seeds)
            if trial.should_prune():
                ends.add(seeds)
                break
        study.tell(trial, -number)
    assert ends == {1, 2}


def test_a_trial_is_pruned_between_seeds(project):
    """The default learning rate is 100x too large. Only trials that use it are pruned.

    After the last seed, no trial is pruned: all that is left is its evaluation.
    """
    words = ["fake.py", "--num-seeds", 2, "--held-out-seeds", 1, "--trials", 3, "--workers", 1]
    words += ["--space", "learning_rate=1e-3,2e-3,3e-3"]
    status, out, err = run(project, *words, patch=prune_strictly)
    assert (status, err) == (0, "") and "trial 0: pruned | " in out
    trials = load(project).trials
    pruned = [x for x in trials if x.params["learning_rate"] == 0.1]
    assert trials[0] in pruned and {x.state for x in pruned} == {TrialState.PRUNED}
    assert {x.state for x in trials if x not in pruned} == {TrialState.COMPLETE}
    assert started(project)["0000-seed-1"] == 1 and started(project)["0000-seed-2"] == 0


def test_failures_are_reported_and_the_study_continues(project):
    """The same command repeats failed held-out runs, but not failed trials."""
    words = [*QUICK, "--trials", 6, "--workers", 2, "--held-out-seeds", 2]
    plans = {"0001-": "crash", "0002-seed-2": "killed", "0003-": "diverged", "0004-": "refused"}
    plans |= {"defaults-seed-1002": "crash"}
    status, out, err = run(project, *words, **plans)
    start = "fake.py ended with status"
    crash = f"{start} 1: RuntimeError: shapes do not match \N{SNOWMAN}"
    assert (status, err) == (1, crash + "\n")
    reasons = {
        1: crash,
        2: f"{start} -9: no output",
        3: f"{start} 1: Diverged in iteration 5: NaN or infinite losses.",
        4: f"{start} 2: --env-id: a package is missing",
    }
    for trial in load(project).trials:
        assert (trial.state == TrialState.FAIL) == (trial.number in reasons)
        assert trial.user_attrs.get("error") == reasons.get(trial.number)
    table = (project / "tuned" / NAME / "trials.csv").read_text()
    for number, reason in reasons.items():
        assert f"trial {number}: {reason} | " in out and reason in table
    assert not processes_in(project)
    before = started(project)
    assert run(project, *words)[0] == 0
    repeated = {
        run for run, count in started(project).items() if before[run] and count > before[run]
    }
    assert repeated == {"defaults-seed-1002"}


def test_reason_of():
    """JAX adds a note, which Python prints after the exception."""
    error = "Traceback (most recent call last):\n    f(x)\n    ^^^^\nValueError: 3 is not 4\n"
    note = f"{'-' * 20}\nFor simplicity, JAX has removed its internal frames from the traceback.\n"
    usage = "╭─ Parsing ─╮\n│ Error parsing --a: x │\n│ For help: │"
    assert tune.reason_of(error + note) == "ValueError: 3 is not 4"
    assert tune.reason_of("Warning: a\nno environment\n") == "no environment"
    assert tune.reason_of(usage) == "Error parsing --a: x"


def test_if_all_trials_fail_the_error_is_one_line(project):
    status, out, err = run(project, *QUICK, "--trials", 1, nan="")
    assert (status, err) == (1, "no trial completed; trials.csv lists the reasons\n")
    assert "trial 0: the return of an agent is NaN or infinite" in out


def test_if_the_script_refuses_the_defaults_the_study_ends(project):
    """Once the cause is fixed, the same command continues with the defaults."""
    words = [*QUICK, "--trials", 1]
    sentence = "fake.py ended with status 2: --env-id: a package is missing\n"
    assert run(project, *words, **{"0000-": "refused"})[::2] == (1, sentence)
    assert run(project, *words)[::2] == (0, "")
    assert tune.ended(load(project))[0].params["learning_rate"] == 0.1


# === Command line ===============================================================================
@pytest.mark.parametrize(
    "words, sentence",
    [
        ("fake.py --gamma 2", "--gamma must be between 0 and 1, not 2.0"),
        ("fake.py --studies-dir /dev/null", "the study cannot be opened: [Errno 20] Not a dir"),
        ("fake.py --storage mysql://host/base", "cannot be opened: Failed to import DB access"),
        ("fake.py --gamma 0.9 --space gamma=0.9,1", "gamma is fixed"),
        ("fake.py --space gama=0.9", "gama is fixed, or is not a flag of the script"),
        ("fake.py --space gamma=0.5:2", "Leaving out gamma=2: Error parsing Args: --gamma must"),
        ("fake.py --space gamma=0.5:0.2", "--space gamma=0.5:0.2 must be NAME=LOW:HIGH"),
        ("fake.py --space seconds=1:2:log", ":log requires a positive LOW and default"),
        ("many.py", "many.py must train one agent"),
        ("other.py", "other.py must train one agent"),
        ("ppo_lenin", "ppo_lenin is neither a file nor a script of this project"),
    ],
)
def test_usage_errors(project, words, sentence):
    text = (project / "fake.py").read_text()
    many = text.replace("    seed: int", "    num_agents: int = 8\n    seed: int", 1)
    (project / "many.py").write_text(many)
    (project / "other.py").write_text("parse_args = dict")
    status, out, err = run(project, *words.split(" "))
    assert status == 2 and sentence in " ".join((out + err).replace("│", " ").split()), err
    assert "Traceback" not in err and not (project / "trace").exists()


def test_a_study_continues_only_with_the_same_settings_and_in_one_command(project):
    words = [*QUICK, "--trials", 1]
    assert run(project, *words)[0] == 0
    held_out = {x for x in started(project) if x[0] != "0"}
    assert held_out == {"defaults-seed-1001"}  # the defaults are also the best settings
    sentence = f"study {NAME} was started with another value of episodes; choose another --study\n"
    assert run(project, *words, "--episodes", 6)[::2] == (2, sentence)
    with tune.FileLock(project / "tuned" / NAME / "study.lock"):
        status, _, err = run(project, *words)
    assert status == 2 and err.startswith("another command is running this study")
    # Flags that do not affect the result of a trial may change.
    more = ["--trials", 2, "--workers", 2, "--seed", 9, "--held-out-seeds", 2]
    assert run(project, *words, *more)[0] == 0
    assert set(started(project).values()) == {1}
    assert len(tune.ended(load(project))) == 2
    assert len(best_json(project)["defaults"]["returns"]) == 2
    # Without its database, the study starts over with new runs.
    (project / "tuned" / NAME / "study.db").unlink()
    assert run(project, *words)[0] == 0
    assert started(project)["0000-seed-1"] == 2


def test_a_script_in_any_folder_gets_the_flags_unknown_to_tune_py(project):
    """The flags may start with a named configuration. The script may import a module next to it."""
    home = project / "else where"
    home.mkdir()
    (home / "beside.py").write_text("GAMMA = 0.9\n")
    code = "from beside import GAMMA\n" + (project / "fake.py").read_text()
    (home / "mine.py").write_text(code.replace("gamma: float = 0.99", "gamma: float = GAMMA"))
    own = ["short", "--no-anneal-lr"]
    words = ["else where/mine.py", *own, *QUICK[1:], "--trials", 1, "--studies-dir", "my studies"]
    assert run(project, *words)[::2] == (0, "")
    given = [x["settings"] for x in traced(project, "start")]
    assert {(x["total_timesteps"], x["anneal_lr"], x["gamma"]) for x in given} == {
        (500, False, 0.9)
    }
    (best,) = (json.loads(path.read_text()) for path in project.glob("my studies/*/best.json"))
    assert "anneal_lr" not in best["best_settings"] and " ".join(own) in best["command"]


def test_parse_range(capsys):
    kinds = optuna.distributions

    def parse(name, text):
        trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(1)).ask()
        tune.parse_range(name, text, Args())(trial)
        return trial.distributions[name]

    assert parse("gamma", "0.1:0.5") == kinds.FloatDistribution(0.1, 0.5)
    assert parse("learning_rate", "1e-5:1%:log") == kinds.FloatDistribution(1e-5, 10, log=True)
    assert parse("num_minibatches", "2:48:log") == kinds.IntDistribution(2, 48, log=True)
    # Choices include the default of the script, so that the first trial can use it.
    assert parse("anneal_lr", "False") == kinds.CategoricalDistribution([False, True])
    assert parse("hidden_sizes", "8x8,9").choices == ("8x8", "9", "64x64")
    assert parse("gamma", "0.9,2,0.5,0.9") == kinds.CategoricalDistribution([0.9, 0.5, 0.99])
    assert parse("loss", "huber,l1").choices == ("huber", "mse")
    assert "Leaving out gamma=2: Error" in capsys.readouterr().out


def test_space_limits_the_search_to_the_settings_that_it_names():
    """A name without a range uses the default range."""
    given = ("learning-rate", "gamma=0.5:0.9")
    expected = {"learning_rate": tune.SPACE["learning_rate"], "gamma": "0.5:0.9"}
    assert tune.ranges_of(given, [], Args()) == expected
    assert "clip_coef" not in tune.ranges_of((), [], Args())  # the script has no such flag
    assert len(tune.ranges_of((), ["--gamma", "0.9"], Args())) == 5


def test_the_seed_determines_the_proposed_settings(tmp_path):
    """If the study is resumed, it does not repeat the settings that it proposed first."""
    found = []
    for place in ("a", "b", "a"):
        study = new_study(tmp_path / place)
        study.optimize(lambda trial: trial.suggest_float("gamma", 0, 1), n_trials=3)
        found.append([x.params["gamma"] for x in study.trials[-3:]])
    assert found[0] == found[1] and found[0][0] == 0.5
    assert not set(found[0]) & set(found[2])


def test_the_search_space_consists_of_flags_of_the_scripts():
    """PPO and DQN search over 12 flags, continuous PPO over 14, and SAC over 8."""
    for name in ROWS:
        tree = ast.parse(path_of(name).read_text())
        (found,) = (x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == "Args")
        names = {ast.unparse(x.target) for x in found.body if isinstance(x, ast.AnnAssign)}
        searched = names & tune.SPACE.keys()
        if name not in PPO_SCRIPTS:
            searched -= {"num_steps"}  # it sets how often metrics are logged
        count = 8 if name in SAC_SCRIPTS else 14 if name in CONTINUOUS_SCRIPTS else 12
        assert len(searched) == count, (name, searched)


# === A real script and MLflow ===================================================================
@pytest.fixture
def begin_command(monkeypatch):
    """Return a function that maps tune.py arguments to a Command before its first trial."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv("COLUMNS", "500")

    def begin_command(folder, *words):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["tune.py", *map(str, words)])
        return tune.begin(*tyro.cli(tune.Args, return_unknown_args=True))

    yield begin_command
    sys.modules.pop("fake", None)


def test_a_trial_of_a_real_script(tmp_path, begin_command):
    words = "ppo_torch_gymnasium --trials 1 --num-seeds 1 --episodes 8"
    words += " --num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 2"
    words += " --hidden-sizes 8 8 --total-timesteps 512"
    command = begin_command(tmp_path, *words.split())
    tune.search(command)
    assert 1 <= command.study.best_value <= 500
    args = json.loads((command.folder / "trials/0000-seed-1/run.json").read_text())["args"]
    assert (args["num_envs"], args["total_timesteps"], args["seed"]) == (4, 512, 1)


def test_mlflow_receives_each_trial(project, begin_command, monkeypatch):
    """The first attempt finds no server, and the second succeeds."""
    mlflow = pytest.importorskip("mlflow")
    words = [*QUICK, "--trials", 2]
    assert run(project, *words, **{"0001-": "crash"})[::2] == (0, "")
    monkeypatch.setattr(tune, "draw", lambda *_: None)
    command = begin_command(project, *words, "--mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(SystemExit, match=r"^--mlflow: .*run the same command to try again$"):
        tune.finish(command)
    server = f"sqlite:///{project}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    tune.finish(command)
    client = mlflow.MlflowClient(server)
    experiment = client.get_experiment_by_name("ppo-rosetta")
    found = client.search_runs([experiment.experiment_id])
    runs = {x.info.run_name: x for x in found}
    assert runs.keys() == {NAME, "trial-0000", "trial-0001"} and len(found) == 3
    result = best_json(project)
    assert runs[NAME].data.metrics["held_out_seeds/best"] == result["best"]["iqm"]
    files = {x.path for x in client.list_artifacts(runs[NAME].info.run_id)}
    assert files == {"best.json", "trials.csv"}
    assert runs["trial-0000"].data.metrics["value"] == result["value_in_study"]
    assert runs["trial-0000"].data.params["learning_rate"] == "0.1"
    assert "shapes do not match" in runs["trial-0001"].data.tags["error"]

"""tune.py on stand-ins for a script and for evaluate.py, killed and stopped, and a real study."""

import ast
import contextlib
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
from conftest import ROOT
from scipy import stats
from tune_script import Args

optuna = pytest.importorskip("optuna")
fakes = pytest.importorskip("tune_fakes")
tune = pytest.importorskip("tune")
from tune_fakes import NAME, QUICK, check_runs, load, report, traced, wait_for

project, server, command = fakes.project, fakes.server, fakes.command  # fixtures
TrialState = optuna.trial.TrialState
counted = tune.counted


# === What a study finds and says ================================================================
def test_the_best_settings_are_judged_by_fresh_seeds(project, command):
    words = ["fake.py", "--trials", 4, "--num-seeds", 1, "--fresh-seeds", 5, "--episodes", 7]
    words += ["--pruner", "none", "--workers", 2, "--space", "gamma=none", "--seconds", "0.1"]
    status, out, err = command(*words)
    assert (status, err) == (0, "")
    trials = load(project).trials
    assert len(trials) == 4 and {x.state for x in trials} == {TrialState.COMPLETE}
    own = {"learning_rate": 0.1, "anneal_lr": True, "num_minibatches": 8, "hidden_sizes": "64x64"}
    assert trials[0].params == own | {"loss": "mse"}  # the script's own
    for x in trials:
        assert x.value == pytest.approx(fakes.greedy(x.params, 1, 1_000_000))
    best = max(trials, key=lambda x: x.value)
    result = report(project)
    assert (result["best_settings"], result["best_trial"]) == (best.params, best.number)
    assert result["own_settings"] == trials[0].params
    values = (result["value_in_study"], result["own_value_in_study"])
    assert values == (best.value, trials[0].value)
    fresh = range(1001, 1006)
    tuned = [fakes.greedy(best.params, x, 2_000_000) for x in fresh]
    untuned = [fakes.greedy(own, x, 2_000_000) for x in fresh]
    parts = {"best": tuned, "own": untuned, "best_minus_own": np.subtract(tuned, untuned)}
    for name, values in parts.items():
        assert result[name]["returns"] == pytest.approx(list(values))
        assert result[name]["text"] in out
    assert f"--learning-rate {best.params['learning_rate']} " in result["command"]

    # Seeds of trials and of the verdict, and of the games that judge them, have none in common.
    starts, judged = traced(project, "start"), traced(project, "judge")
    trained = Counter((x["run"][0] == "0", x["settings"]["seed"]) for x in starts)
    assert trained == {(True, 1): 4} | {(False, seed): 2 for seed in fresh}
    games = Counter((x["games"], x["episodes"]) for x in judged)
    assert games == {(1_000_000, 7): 4, (2_000_000, 7): 10}
    running = [1 if x["what"] == "start" else -1 for x in traced(project, "start", "end")]
    assert max(np.cumsum(running)) == 2  # workers

    # Said again, nothing is trained or judged again.
    status, out, _ = command(*words)
    assert status == 0 and report(project) == result
    assert (traced(project, "start"), traced(project, "judge")) == (starts, judged)


@pytest.mark.parametrize("n", [2, 12])
def test_summary(n):
    """The interquartile mean with Tukey and McLaughlin's interval, the mean with Student's."""
    values = np.sort(np.random.default_rng(n).standard_cauchy(n))
    result = tune.summary(list(values))
    cut = n // 4
    middle = values[cut : n - cut].mean()
    winsorized = values.clip(values[cut], values[n - cut - 1])
    reach = stats.t.ppf(0.975, n - 2 * cut - 1) * stats.sem(winsorized) / (1 - 2 * cut / n)
    assert (result["iqm"], result["mean"]) == pytest.approx((middle, values.mean()))
    assert result["interval"] == pytest.approx([middle - reach, middle + reach], rel=1e-4)
    reach = stats.t.ppf(0.975, n - 1) * stats.sem(values)
    assert np.diff(result["mean_interval"]) == pytest.approx(2 * reach, rel=1e-4)
    alike = tune.summary([2.0] * n)  # no interval, and not one of no width
    assert (alike["iqm"], alike["interval"], alike["mean_interval"]) == (2, None, None)


def test_a_trial_is_worth_the_interquartile_mean_of_its_seeds(project, command):
    """Of four seeds, without the best and the worst; told as the seeds finish."""
    words = ["--space", "gamma=0.5,0.6", "--trials", 2, "--num-seeds", 4, "--fresh-seeds", 1]
    assert command("fake.py", *words, "--pruner", "none")[0] == 0
    for x in load(project).trials:
        values = [fakes.greedy(x.params, seed, 1_000_000) for seed in range(1, 5)]
        assert x.value == pytest.approx(sum(sorted(values)[1:3]) / 2)
        recent = -abs(math.log10(x.params["learning_rate"]) + 3)
        assert set(x.intermediate_values.values()) == {recent}
        assert {44, 66, 89} <= set(x.intermediate_values)
    table = (project / "tuned" / NAME / "trials.csv").read_text()
    assert "params_gamma" in table and table.count("\n") == 3
    # What a trial leaves: numbers, and no agent, but for the verdict's.
    left = [x for x in (project / "tuned" / NAME).rglob("*") if x.parent.name[:4] == "0001"]
    assert {x.name for x in left} == {"metrics.jsonl", "run.json", "evaluation.json", "lock"}
    assert len(list(project.glob("tuned/*/*/fresh/*/checkpoint.npz"))) == 2


def test_words_that_are_not_tune_s_go_to_every_run(project, command):
    words = ["short", "--no-anneal-lr", "--hidden-sizes", 8, 9, "--seed", 5, "--study", "mine"]
    assert command("fake.py", *words, *QUICK[1:], "--trials", 2)[0] == 0
    for x in traced(project, "start"):
        own = x["settings"]
        assert (own["total_timesteps"], own["anneal_lr"]) == (500, False)
        assert own["hidden_sizes"] == [8, 9]
        assert own["seed"] == int(x["run"].rpartition("-")[2]) in (1, 2, 1001, 1002)
    result = json.loads((project / "tuned/mine/best.json").read_text())
    assert set(result["best_settings"]) == {"learning_rate", "num_minibatches", "gamma", "loss"}
    assert " short --no-anneal-lr --hidden-sizes 8 9 " in result["command"]


def test_the_same_seed_proposes_the_same(project, command):
    """But not again where a study goes on."""

    def proposed(name, seed, trials):
        words = ["--trials", trials, "--study", name, "--seed", seed, "--num-seeds", 1]
        assert command(*QUICK, *words, "--fresh-seeds", 1, "--sampler", "random")[0] == 0
        storage = f"sqlite:///{project}/tuned/{name}/study.db"
        return [x.params for x in optuna.load_study(study_name=name, storage=storage).trials]

    found = [proposed(*x, 2) for x in (("a", 1), ("b", 1), ("c", 2))]
    assert found[0] == found[1] != found[2]
    assert len({json.dumps(x) for x in proposed("a", 1, 3)}) == 3


# === Interruptions ==============================================================================
def finished(project):
    """Trials that are over, as the storage has them; none before there is a study."""
    with contextlib.suppress(Exception):
        return {x.number: x.value for x in load(project).get_trials(states=[TrialState.COMPLETE])}
    return {}


def test_killed_at_any_moment_the_same_command_goes_on(project):
    """No trial that was over is lost or made again, and none of its processes stays."""
    words = [*QUICK, "--workers", "2", "--seconds", "0.3", "--trials", "6"]
    rng = random.Random(1)
    before = {}
    for _ in range(4):
        command = fakes.Command(project, *words)
        seen = len(traced(project)) + rng.randrange(6)
        wait_for(lambda n=seen, x=command: len(traced(project)) >= n or not x.process.is_alive())
        time.sleep(rng.uniform(0, 0.2))
        with contextlib.suppress(ProcessLookupError):
            os.kill(command.pid, signal.SIGKILL)
        status, _, err = command.wait()
        assert status in (-signal.SIGKILL, 0) and not err, err
        wait_for(lambda: not fakes.processes_in(project), 10)
        assert before.items() <= finished(project).items()
        before = finished(project)
    age(project)  # a kill may have come as below
    commands = [fakes.Command(project, *words, own={"SLOW": "1"}) for _ in range(2)]
    assert [x.wait()[::2] for x in commands] == [(0, "")] * 2
    trials = counted(load(project))
    assert len(trials) == 6 and {x.state for x in trials} == {TrialState.COMPLETE}
    assert before.items() <= finished(project).items()
    check_runs(project)
    ended = Counter(x["run"] for x in traced(project, "end"))
    assert set(ended.values()) == {1} and len(ended) == 6 * 2 + 2 * 2


def age(project):
    """Make the trials that are running a day older than they are."""
    with sqlite3.connect(project / f"tuned/{NAME}/study.db") as database:
        older = "datetime_start = datetime(datetime_start, '-1 day')"
        database.execute(f"UPDATE trials SET {older} WHERE state = 'RUNNING'")


def test_killed_while_a_trial_gets_its_settings(project, command, monkeypatch):
    """It is begun, and nobody's yet, and what it had to try is tried by another."""

    def die(*_):
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.samplers.TPESampler, "before_trial", die)
        command(*QUICK, "--trials", 2)
    assert load(project).trials[0].state == TrialState.RUNNING
    age(project)
    assert command(*QUICK, "--trials", 2)[0] == 0
    trials = counted(load(project))
    assert len(trials) == 2 and trials[0].params["learning_rate"] == 0.1  # the script's own


@pytest.mark.parametrize(
    "sent, begun", [("SIGINT", ["0002-seed-1"]), ("SIGTERM", ["own-seed-1001", "own-seed-1002"])]
)
def test_a_signal_saves_and_the_same_command_goes_on(project, sent, begun):
    """Whether it comes in trials or in the last runs; these do not end by themselves."""
    words = [*QUICK, "--workers", "2", "--trials", "4", "--seconds", "0.1"]
    number = getattr(signal, sent)
    command = fakes.Command(project, *words, **dict.fromkeys(begun, "hang"))
    wait_for(lambda: set(begun) <= {x["run"] for x in traced(project, "start")})
    os.kill(command.pid, number)
    status, out, err = command.wait()
    assert (status, err) == (128 + number, "") and not fakes.processes_in(project)
    assert out.splitlines()[-1] == "Stopped. The same command goes on."
    stopped = {x["run"] for x in traced(project, "stop")}
    assert stopped >= set(begun) and not (project / "tuned" / NAME / "best.json").exists()
    status, _, err = fakes.Command(project, *words).wait()
    assert (status, err) == (0, "")
    check_runs(project)
    assert {x["run"] for x in traced(project, "start") if x["first"]} == stopped
    trials = counted(load(project))
    assert len(trials) == 4 and {x.state for x in trials} == {TrialState.COMPLETE}


@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv is not installed")
@pytest.mark.parametrize("own", [{}, {"NO_SETPRIV": "1"}])
def test_a_killed_command_s_scripts_are_waited_for(project, own):
    """They save and end; where nothing tells them, they train on, and none trains beside them."""
    words = [*QUICK, "--trials", "1", "--seconds", "2", "--fresh-seeds", "1", "--num-seeds", "1"]
    command = fakes.Command(project, *words, own=own)
    wait_for(lambda: traced(project, "start"))
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    assert fakes.Command(project, *words).wait()[::2] == (0, "")
    check_runs(project)
    assert len(traced(project, "stop")) == (not own) and not traced(project, "locked out")


def test_a_trial_of_a_machine_that_is_silent_for_long_goes_on_elsewhere(project, command):
    assert command(*QUICK, "--trials", 1)[0] == 0
    study = load(project)
    study.enqueue_trial({"learning_rate": 0.005, "anneal_lr": True})
    there = study.ask()
    there.set_user_attr("place", "elsewhere:/x")
    there.set_user_attr("seen", time.time() - 500)
    status, out, _ = command(*QUICK, "--trials", 2)
    assert status == 0 and "other commands run trials" in out
    there.set_user_attr("seen", time.time() - 700)
    assert command(*QUICK, "--trials", 2)[0] == 0
    (_, again) = counted(load(project))
    assert again.params["learning_rate"] == 0.005 and again.state == TrialState.COMPLETE


# === Pruning and failing ========================================================================
def test_a_pruned_trial_s_process_is_ended(project, command, monkeypatch):
    """The script's own learning rate of 0.1 is two decades off; the choices are not."""
    strict = optuna.pruners.ThresholdPruner(lower=-1.5)  # as strict with the first as with all
    hyperband = optuna.pruners.HyperbandPruner
    monkeypatch.setattr(hyperband, "prune", lambda _, *trial: strict.prune(*trial))
    words = ["fake.py", "--num-seeds", 2, "--fresh-seeds", 1, "--trials", 3, "--workers", 2]
    words += ["--space", "learning_rate=1e-3,2e-3,3e-3"]
    status, out, err = command(*words, **{"0000-": "hang"})
    assert (status, err) == (0, "") and "trial 0: pruned | " in out
    trials = load(project).trials
    lag = [x for x in trials if x.params["learning_rate"] == 0.1]
    assert trials[0] in lag and {x.state for x in lag} == {TrialState.PRUNED}
    assert {x.state for x in trials if x not in lag} == {TrialState.COMPLETE}
    assert [x["run"] for x in traced(project, "stop")] == ["0000-seed-1"]
    assert not list(project.glob("tuned/*/*/0000-*/checkpoint.npz"))
    assert not fakes.processes_in(project)
    command(*words)  # a pruned trial is over
    check_runs(project)


def test_hyperband_prunes_what_lags_and_not_the_best(project, command):
    words = ["fake.py", "--num-seeds", 2, "--fresh-seeds", 1, "--trials", 10, "--workers", 2]
    assert command(*words)[0] == 0
    trials = load(project).trials
    pruned = [x for x in trials if x.state == TrialState.PRUNED]
    gap = [abs(math.log10(x.params["learning_rate"]) + 3) for x in trials]
    assert len(pruned) >= 2 and min(gap[x.number] for x in pruned) > min(gap)
    assert trials[report(project)["best_trial"]].state == TrialState.COMPLETE


def test_a_script_that_ignores_sigterm_is_killed(project, command, monkeypatch):
    wait = subprocess.Popen.wait
    shorter = {60: 0.5}
    monkeypatch.setattr(subprocess.Popen, "wait", lambda x, t=None: wait(x, shorter.get(t, t)))
    words = [*QUICK, "--trials", 1, "--timeout", 1]
    status, _, err = command(*words, **{"0000-": "stubborn"})
    assert (status, err) == (1, "no trial is complete: trials.csv says why\n")
    assert load(project).trials[0].user_attrs["error"] == "no end after 1 s"
    assert not fakes.processes_in(project) and not traced(project, "stop", "end")


def test_failing_trials_are_told_and_the_study_goes_on(project, command):
    plans = {"0001-": "refuse", "0002-seed-2": "crash", "0003-seed-1": "killed"}
    status, out, err = command(*QUICK, "--trials", 5, "--workers", 2, **plans)
    assert (status, err) == (0, "") and "2 complete" in out and "3 fail" in out
    told = {
        1: "fake.py ended by 2: --gamma must be smaller ?[31m here",
        2: "fake.py ended by 1: RuntimeError: shapes do not match \N{SNOWMAN}",
        3: "fake.py ended by -9: it said nothing",
    }
    for trial in load(project).trials:
        assert (trial.state == TrialState.FAIL) == (trial.number in told)
        assert trial.user_attrs.get("error") == told.get(trial.number)
    for number, sentence in told.items():
        assert f"trial {number}: {sentence} | " in out
    logs = {x.name for x in project.glob("tuned/*/*/*.log")}
    assert logs == {"0001-seed-1.log", "0002-seed-2.log", "0003-seed-1.log"}
    starts = len(traced(project, "start"))
    assert command(*QUICK, "--trials", 5)[0] == 0  # what failed is over
    assert len(traced(project, "start")) == starts


@pytest.mark.parametrize(
    "plan, sentence",
    [
        ({"-seed-": "refuse"}, "fake.py ended by 2: --gamma must be smaller ?[31m here"),
        ({"no judge": ""}, "evaluate.py ended by 1: no judgement"),
        ({"no number": ""}, "an agent's return is no number"),
    ],
)
def test_where_the_first_trials_fail_one_sentence_says_why(project, command, plan, sentence):
    status, _, err = command(*QUICK, "--trials", 9, **plan)
    assert (status, err) == (1, f"the first 3 trials failed: {sentence}\n")
    assert len(load(project).trials) == 3


def test_a_failing_verdict_is_one_sentence_and_can_be_made_later(project, command):
    words = [*QUICK, "--trials", 2]
    status, _, err = command(*words, **{"own-seed-1002": "crash"})
    assert status == 1 and len(err.splitlines()) == 1 and "shapes do not match" in err
    assert command(*words)[0] == 0
    starts = Counter(x["run"] for x in traced(project, "start"))
    assert starts["own-seed-1002"] == 2 and set(starts.values()) == {1, 2}


# === Several at once ============================================================================
@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_two_commands_share_a_storage(project, kind):
    """In one folder, by default; with a storage elsewhere each in its own, as on two machines."""
    words = [*QUICK, "--trials", "6", "--workers", "2", "--seconds", "0.1"]
    storage = None
    places = ["tuned", "tuned"]
    if kind == "journal":
        words += ["--storage", "journal"]
        backend = optuna.storages.journal.JournalFileBackend(str(project / "journal"))
        storage = optuna.storages.JournalStorage(backend)
        places = ["here", "there"]
    commands = [
        fakes.Command(project, *words, "--studies-dir", x, own={"SLOW": "1"}) for x in places
    ]
    ended = [x.wait() for x in commands]
    assert [x[::2] for x in ended] == [(0, "")] * 2, ended
    assert all(out.count("\ntrial ") > 1 for _, out, _ in ended)
    check_runs(project)
    trials = counted(load(project, storage))
    assert len(trials) == 6 and {x.state for x in trials} == {TrialState.COMPLETE}
    assert len({json.dumps(x.params) for x in trials}) == 6
    assert len({x["run"] for x in traced(project, "start") if x["run"][0] == "0"}) == 6 * 2


# === What a user gets wrong, and may well do ====================================================
SPACE = "is no NAME=LOW:HIGH[:log] or NAME=A,B,C"


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--trials", "0"], "--trials must be 1 or more"),
        (["--lern", "1"], "Unrecognized options: --lern"),
        (["--gamma", "2"], "--gamma must lie between 0 and 1, not 2.0"),
        (["--run-name=x"], "--run-name cannot be set: tune.py gives it to each run"),
        (["--studies-dir", "/dev/null"], "the study cannot be opened: [Errno 20] Not a directory"),
        (["--storage", "postgresql://127.0.0.1:1/none"], "the study cannot be opened: "),
        (["--gamma", "0.9", "--space", "gamma=0.9,1"], "gamma is fixed, by a flag"),
        (["--space", "gama=0.9,0.95"], "the script has no gama; the closest name is gamma"),
        (["--space", "gamma"], f"--space gamma= {SPACE}: "),
        (["--space", "gamma=a:\x1b[31m"], f"--space gamma=a:?[31m {SPACE}: "),
        (["--space", "gamma=0.9:0.8"], "it has no values from 0.9 to 0.8"),
        (["--space", "gamma=0.5:2"], "it has no values from 0.5 to 2.0"),
        (["--space", "env_id=a,b"], "env_id is fixed, by a flag or since it changes the task"),
    ],
)
def test_what_is_wrong_is_said(project, command, words, sentence):
    status, _, err = command(*QUICK, "--trials", "1", *words)
    assert status == 2 and sentence in " ".join(err.replace("│", " ").split()), err
    assert "Traceback" not in err and not traced(project)


def test_a_study_goes_on_only_as_it_was_begun(project, command):
    words = [*QUICK, "--trials", "1"]
    assert command(*words)[0] == 0
    events = traced(project)
    changed = {
        "num_seeds": ["--num-seeds", "3"],
        "pruner": ["--pruner", "hyperband"],
        "flags": ["--total-timesteps", "500"],
        "space": ["--space", "gamma=0.5,0.6"],
    }
    sentence = f"study {NAME} was begun with another {{}}: name another by --study\n"
    for what, now in changed.items():
        assert command(*words, *now)[::2] == (2, sentence.format(what))
    code = (project / "fake.py").read_text()
    (project / "fake.py").write_text(code + "# another\n")
    assert command(*words)[2] == sentence.format("version")
    (project / "fake.py").write_text(code)
    assert traced(project) == events
    # These only say how, or how much.
    more = ["--trials", "2", "--workers", "2", "--seed", "9", "--timeout", "90"]
    assert command(*words, *more, "--fresh-seeds", "3")[0] == 0
    check_runs(project)
    assert len(load(project).trials) == 2 and len(report(project)["own"]["returns"]) == 3
    # Another study of this name, as the database is new, has other runs.
    (project / "tuned" / NAME / "study.db").unlink()
    assert command(*words)[0] == 0
    assert Counter(x["run"] for x in traced(project, "start"))["0000-seed-1"] == 2


def test_a_script_lies_anywhere_and_no_file_stands_in_for_python_s(project):
    """As a command: an edited copy, from a folder that has a random.py, as the copy's own has."""
    place, home = project / "w?at %41 #'é", project / "else where"
    for folder in (place, home):
        folder.mkdir()
        for name in ("random.py", "json.py", "optuna.py"):
            (folder / name).write_text("raise SystemExit('a file of this folder was imported')")
    (home / "beside.py").write_text("GAMMA = 0.9\n")  # what a copy imports from its own folder
    code = "import random\nfrom beside import GAMMA\n" + (project / "fake.py").read_text()
    code = code.replace("gamma: float = 0.99", "gamma: float = GAMMA")
    (home / "mine.py").write_text(code)
    shutil.copy(ROOT / "tune.py", project)
    (project / "analysis").symlink_to(ROOT / "analysis")
    for folder in (place, project):
        script = os.path.relpath(home / "mine.py", folder)
        words = [sys.executable, project / "tune.py", script, *QUICK[1:], "--trials", "1"]
        own = os.environ | fakes.environment(project)
        done = subprocess.run(words, cwd=folder, env=own, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), done
        assert (folder / "tuned/mine__Fake-v1/best.json").exists()
        for name in ("random.py", "json.py", "optuna.py"):  # beside tune.py, too
            shutil.copy(place / name, project)
    assert {x["settings"]["gamma"] for x in traced(project, "start")} == {0.9}


@pytest.mark.parametrize("own", ["num_agents: int = 8\n    run_name", "name_of_run"])
def test_what_is_no_script_of_one_agent_is_said(project, command, own):
    text = (project / "fake.py").read_text()
    (project / "mine.py").write_text(text.replace("run_name", own, 1))
    status, _, err = command("mine.py")
    assert (status, err.count("\n")) == (2, 1) and "does not train one agent" in err
    assert command("none.py")[::2] == (2, "SCRIPT: there is no file none.py\n")


def test_ranges(capsys):
    kinds = optuna.distributions

    def parse(name, text):
        return tune.parse_range(name, text, Args())

    assert parse("gamma", "0.1:0.5") == kinds.FloatDistribution(0.1, 0.5)
    assert parse("learning_rate", "1e-5:1%:log") == kinds.FloatDistribution(1e-5, 10, log=True)
    assert parse("num_minibatches", "2:48:log") == kinds.IntDistribution(2, 48, log=True)
    # A choice has the script's own value, too, so that the first trial can have it.
    assert parse("anneal_lr", "False") == kinds.CategoricalDistribution([False, True])
    assert parse("hidden_sizes", "8x8,9").choices == ("8x8", "9", "64x64")
    assert parse("num_minibatches", "4,5,2,4") == kinds.CategoricalDistribution([4, 2, 8])
    assert parse("loss", "huber,l1").choices == ("huber", "mse")
    assert "num_minibatches is searched without 5: Error" in capsys.readouterr().out


def test_the_space_is_of_settings_that_scripts_have():
    """Each PPO has twelve of them, each DQN twelve; and what tune.py gives and reads is in all."""
    for path in [*ROOT.glob("ppo_*.py"), *ROOT.glob("dqn_*.py")]:
        tree = ast.parse(path.read_text())
        (found,) = (x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == "Args")
        names = {ast.unparse(x.target) for x in found.body if isinstance(x, ast.AnnAssign)}
        assert {*tune.OURS, "env_id", "total_timesteps"} <= names
        searched = tune.SPACE.keys() & names - ({"num_steps"} if "replay_ratio" in names else set())
        assert len(searched) == 12, (path, searched)


# === A real script, figures and MLflow ==========================================================
def test_a_real_study(tmp_path, compiled):
    """Of ppo_linen.py, by the command itself."""
    words = ["ppo_linen.py", "--trials", "1", "--num-seeds", "1", "--fresh-seeds", "1"]
    words += ["--episodes", "8", "--workers", "2", "--num-envs", "4", "--num-steps", "64"]
    words += ["--total-timesteps", "2048", "--update-epochs", "2", "--hidden-sizes", "8"]
    quick = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    quick |= {"JAX_COMPILATION_CACHE_DIR": str(compiled)}
    quick |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    words = [sys.executable, ROOT / "tune.py", *words]
    done = subprocess.run(words, cwd=tmp_path, env=quick, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done
    (folder,) = (tmp_path / "tuned").iterdir()
    seeds = set()
    for path in folder.rglob("run.json"):
        args = json.loads(path.read_text())["args"]
        assert (args["num_envs"], args["total_timesteps"]) == (4, 2048)
        seeds.add(args["seed"])
    assert seeds == {1, 1001}
    assert 1 <= json.loads((folder / "best.json").read_text())["own"]["iqm"] <= 500


def test_figures_are_whole_and_ask_no_network(tmp_path):
    study = optuna.create_study()
    for i in range(5):
        trial = study.ask({"a": optuna.distributions.FloatDistribution(0, 1)})
        trial.suggest_categorical("b", ["x", "y"])
        study.tell(trial, i)
    tune.tuning.draw(study, tmp_path)
    names = {"optimization_history", "param_importances", "parallel_coordinate", "contour"}
    assert {x.stem for x in tmp_path.glob("*.png")} == names
    for path in tmp_path.glob("*.png"):
        assert path.stat().st_size > 10_000
        page = path.with_suffix(".html").read_text()
        assert 'src="plotly.min.js"' in page and 'src="http' not in page


def test_mlflow_has_all_of_a_study_once(project, command, monkeypatch):
    """What it missed without a server, and what a killed command had half logged, comes later."""
    mlflow = pytest.importorskip("mlflow")
    for name in [x for x in os.environ if x.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    words = [*QUICK, "--trials", 3, "--space", "loss=none", "--mlflow"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    status, _, err = command(*words, **{"0001-": "crash"})
    assert status == 0 and err.count("\n") == 1 and err.startswith("--mlflow: "), err
    assert err.endswith("; the study goes on, and is logged later\n")

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project}/mlflow.db")
    for _ in range(2):
        assert command(*words)[::2] == (0, "")
        found = mlflow.search_runs(experiment_names=["ppo-rosetta"], output_format="list")
        runs = {run.data.tags["trial"]: run for run in found}
        assert len(found) == 4 and runs.keys() == {"none", "0", "1", "2"}
        mlflow.MlflowClient().update_run(runs["2"].info.run_id, status="RUNNING")
    again = mlflow.search_runs(experiment_names=["ppo-rosetta"], output_format="list")
    assert runs["2"].info.run_id in {run.info.run_id for run in again}
    parent = runs.pop("none")
    for number, run in runs.items():
        trial = load(project).trials[int(number)]
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.tags["state"] == trial.state.name
        assert run.data.tags["error"] == trial.user_attrs.get("error", "")
        assert run.data.params["gamma"] == str(trial.params["gamma"])
        assert run.data.params["loss"] == "mse" and run.data.metrics.get("value") == trial.value
        name = "charts/episodic_return/seed-1"
        steps = [x.step for x in mlflow.MlflowClient().get_metric_history(run.info.run_id, name)]
        assert steps == [100 * (1 + i) for i in range(5 if number == "1" else 10)]
    result = report(project)
    assert parent.data.metrics["fresh_seeds/best"] == result["best"]["iqm"]
    assert parent.data.tags["best/gamma"] == str(result["best_settings"]["gamma"])
    files = {x.path for x in mlflow.MlflowClient().list_artifacts(parent.info.run_id)}
    assert files == {"best.json", "trials.csv", "best"}

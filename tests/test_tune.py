"""tune.py on stand-ins for a script and for evaluate.py, killed and stopped, and a real study."""

import ast
import contextlib
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import PIL.Image
import psutil
import pytest
from conftest import ROOT
from scipy import stats
from tune_script import read_flags

optuna = pytest.importorskip("optuna")
sqlalchemy = pytest.importorskip("sqlalchemy")
fakes = pytest.importorskip("tune_fakes")
tune = pytest.importorskip("tune")
QUICK, check_runs, traced, wait_for = fakes.QUICK, fakes.check_runs, fakes.traced, fakes.wait_for
project, server, command = fakes.project, fakes.server, fakes.command  # fixtures
TrialState = optuna.trial.TrialState

NAME = "ppo_fake__Fake-v1"


def load(project, storage=None):
    storage = storage or f"sqlite:///{project}/studies/{NAME}/study.db"
    return optuna.load_study(study_name=NAME, storage=storage)


def counted(study):
    """The trials that count: without those that another repeats, and the one too many."""
    again = {y for x in study.trials for y in x.system_attrs.get("retry_history", [])}
    again |= {x.number for x in study.trials if "surplus" in x.user_attrs}
    return [x for x in study.trials if x.number not in again]


def table(project):
    return pd.read_csv(project / "studies" / NAME / "trials.csv")


def report(project):
    return json.loads((project / "studies" / NAME / "best.json").read_text())


# === What a study finds and says ================================================================
def test_the_best_settings_are_found_and_judged_by_fresh_seeds(project, command):
    space = ["--space", "learning_rate=1e-7:1:log", "--space", "gamma=none"]
    space += ["--space", "hidden_sizes=none", "--space", "num_minibatches=none"]
    seeds = ["--num-seeds", 1, "--fresh-seeds", 9, "--episodes", 7, "--pruner", "none"]
    status, out, err = command("ppo_fake.py", "--trials", 24, *seeds, *space)
    assert (status, err) == (0, "")
    trials = load(project).trials
    assert len(trials) == 24 and {x.state for x in trials} == {TrialState.COMPLETE}
    assert trials[0].params == {"learning_rate": 0.1, "anneal_lr": True}  # the script's own
    # Of random proposals, so many are rarely so near, and on average they are two decades off.
    misses = [abs(math.log10(x.params["learning_rate"]) + 3) for x in trials]
    assert min(misses) < 0.1 and statistics.fmean(misses[8:]) < 1.25
    best = max(trials, key=lambda x: x.value)
    assert best.params["anneal_lr"] is False
    for x in trials:
        assert x.value == pytest.approx(fakes.greedy(x.params, 1, 1_000_000))

    result, fresh = report(project), [1000 + i for i in range(1, 10)]
    own = trials[0].params
    assert result["best_settings"] == best.params and result["best_trial"] == best.number
    assert result["own_settings"] == own and result["fresh_seeds"] == fresh
    assert result["value_in_study"] == best.value
    assert result["own_value_in_study"] == trials[0].value
    assert result["trials"] == {"complete": 24, "pruned": 0, "failed": 0}
    tuned = [fakes.greedy(best.params, x, 2_000_000) for x in fresh]
    untuned = [fakes.greedy(own, x, 2_000_000) for x in fresh]
    parts = {"best": tuned, "own": untuned, "best_minus_own": np.subtract(tuned, untuned)}
    for name, values in parts.items():
        assert result[name]["returns"] == pytest.approx(list(values))
        mean, low, high = trimmed(values)
        assert result[name]["iqm"] == pytest.approx(mean)
        assert result[name]["interval"] == pytest.approx([low, high])
        assert f"{mean:.4g} [{low:.4g}, {high:.4g}]" in out
    words = shlex.split(result["command"])
    script = read_flags(words[2:])
    assert {x: getattr(script, x) for x in best.params} == best.params

    # Seeds of trials and of the verdict, and of the games that judge them, have none in common.
    starts, judged = traced(project, "start"), traced(project, "judge")
    trained = {kind: Counter() for kind in ("trial", "fresh")}
    for x in starts:
        kind = "fresh" if x["run"].startswith(("trial-", "own-")) else "trial"
        trained[kind][x["settings"]["seed"]] += 1
    assert trained["trial"] == {1: 24} and trained["fresh"] == dict.fromkeys(fresh, 2)
    games = Counter((x["games"], x["episodes"]) for x in judged)
    assert games == {(1_000_000, 7): 24, (2_000_000, 7): 18}

    # Said again, nothing is trained or judged again.
    status, out, _ = command("ppo_fake.py", "--trials", 24, *seeds, *space)
    assert status == 0 and report(project) == result
    assert (traced(project, "start"), traced(project, "judge")) == (starts, judged)


def trimmed(values):
    """Mean without the lowest and highest quarter, and Tukey and McLaughlin's 95% interval."""
    values = np.sort(np.array(values))
    n = len(values)
    cut = n // 4
    mean = values[cut : n - cut].mean()
    winsorized = values.clip(values[cut], values[n - cut - 1])
    error = winsorized.std(ddof=1) / ((1 - 2 * cut / n) * math.sqrt(n))
    reach = stats.t.ppf(0.975, n - 2 * cut - 1) * error
    return mean, mean - reach, mean + reach


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 12, 13])
def test_summary(n):
    values = list(np.random.default_rng(n).standard_cauchy(n))
    result, (mean, low, high) = tune.summary(values), trimmed(values)
    assert result["iqm"] == pytest.approx(mean) and result["returns"] == values
    assert result["interval"] == pytest.approx([low, high])
    assert result["mean"] == pytest.approx(np.mean(values))
    reach = stats.t.ppf(0.975, n - 1) * stats.sem(values)
    assert result["mean_interval"] == pytest.approx(
        [np.mean(values) - reach, np.mean(values) + reach]
    )
    assert (result["min"], result["max"]) == (min(values), max(values))
    alike = tune.summary([2.0] * n)  # no interval, and not one of no width
    assert (alike["iqm"], alike["interval"], alike["mean_interval"]) == (2, None, None)


def test_a_trial_is_worth_the_interquartile_mean_of_its_seeds(project, command):
    """Of four seeds, without the best and the worst; told as the seeds finish."""
    words = ["--space", "gamma=0.5,0.6", "--trials", 3, "--num-seeds", 4, "--fresh-seeds", 1]
    assert command("ppo_fake", *words, "--pruner", "none")[0] == 0
    for x in load(project).trials:
        values = [fakes.greedy(x.params, seed, 1_000_000) for seed in range(1, 5)]
        assert x.value == pytest.approx(sum(sorted(values)[1:3]) / 2)
        recent = -abs(math.log10(x.params["learning_rate"]) + 3)
        assert list(x.intermediate_values.values()) == pytest.approx([recent] * 13)
        steps = sorted(x.intermediate_values)
        assert len(steps) == 10 + 3 and steps[-1] == tune.STEPS - 1
    # The script's own gamma is not in the space, so it is tried in the verdict only.
    assert report(project)["own_value_in_study"] is None
    assert report(project)["best"]["interval"] is None  # of one seed
    rows = table(project)
    assert list(rows["trial"]) == [0, 1, 2] and set(rows["state"]) == {"COMPLETE"}
    assert list(rows["value"]) == pytest.approx([x.value for x in load(project).trials])
    assert set(rows["gamma"]) <= {0.5, 0.6}
    # What a trial leaves: numbers, and no agent, but for the verdict's.
    left = {x.name for x in (project / "studies" / NAME / "trials").rglob("*") if x.is_file()}
    assert left == {"metrics.jsonl", "run.json", "evaluation.json"}
    assert len(list((project / "studies" / NAME / "fresh").glob("*/checkpoint.npz"))) == 2


def test_where_the_own_settings_are_best_they_train_once(project, command):
    space = [f"{x}=none" for x in ("anneal_lr", "gamma", "hidden_sizes", "num_minibatches")]
    words = [y for x in [*space, "learning_rate=0.1:1"] for y in ("--space", x)]
    assert command(*QUICK, "--trials", 2, *words)[0] == 0
    result = report(project)
    assert result["best"] == result["own"] and result["best_trial"] == 0
    assert result["best_minus_own"]["returns"] == [0, 0]
    assert result["best_minus_own"]["interval"] is None
    assert result["best_runs"] == ["own-seed-1001", "own-seed-1002"]
    assert len(list((project / "studies" / NAME / "fresh").iterdir())) == 2


def test_flags_that_are_not_tune_s_go_to_every_run(project, command):
    words = ["--total-timesteps", 500, "--no-anneal-lr", "--hidden-sizes", 8, 9, "--seed", 5]
    status, _, _ = command("ppo_fake", *words, *QUICK[1:], "--trials", 2, "--study", "mine")
    assert status == 0
    for x in traced(project, "start"):
        own = x["settings"]
        assert (own["total_timesteps"], own["anneal_lr"]) == (500, False)
        assert own["hidden_sizes"] == [8, 9]
        assert own["seed"] == int(x["run"].rpartition("-")[2]) in (1, 2, 1001, 1002)
    result = json.loads((project / "studies/mine/best.json").read_text())
    assert set(result["best_settings"]) == {"learning_rate", "num_minibatches", "gamma"}
    assert " --total-timesteps 500 --no-anneal-lr --hidden-sizes 8 9 " in result["command"]


def test_the_same_seed_proposes_the_same(project, command):
    """But not again where a study goes on."""

    def proposed(name, seed, trials):
        words = ["--trials", trials, "--study", name, "--seed", seed, "--num-seeds", 1]
        assert command(*QUICK, *words, "--fresh-seeds", 1, "--sampler", "random")[0] == 0
        storage = f"sqlite:///{project}/studies/{name}/study.db"
        return [x.params for x in optuna.load_study(study_name=name, storage=storage).trials]

    found = [proposed(*x, 3) for x in (("a", 1), ("b", 1), ("c", 2))]
    assert found[0] == found[1] != found[2]
    more = proposed("a", 1, 6)
    assert more[:3] == found[0] and len({json.dumps(x) for x in more}) == 6


# === Interruptions ==============================================================================
SLOW = [*QUICK, "--workers", "2", "--seconds", "0.3", "--timeout", "60"]
SLOW += ["--trials", "8"]


def finished(project, storage=None):
    """Trials that are over, as the storage has them; none before there is a study."""
    try:
        study = load(project, storage)
    except (KeyError, sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError):
        return {}
    over = (TrialState.COMPLETE, TrialState.PRUNED)
    return {
        x.number: (x.value, x.params, x.datetime_complete) for x in study.trials if x.state in over
    }


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_any_moment_the_same_command_goes_on(project, seed):
    """No trial that was over is lost or made again, and none of its processes stays."""
    rng, before = random.Random(seed), {}
    for _ in range(5):
        command = fakes.Command(project, *SLOW)
        seen = len(traced(project)) + rng.randrange(8)
        wait_for(lambda n=seen, x=command: len(traced(project)) >= n or not x.process.is_alive())
        time.sleep(rng.uniform(0, 0.2))
        with contextlib.suppress(ProcessLookupError):
            os.kill(command.pid, signal.SIGKILL)
        status, _, err = command.wait()
        assert status in (-signal.SIGKILL, 0) and not err, err
        wait_for(lambda: not fakes.processes_in(project), 10)
        after = finished(project)
        assert before.items() <= after.items()
        before = after
    age(project)  # a kill may have come as above
    status, out, err = fakes.Command(project, *SLOW).wait()
    assert (status, err) == (0, ""), err
    trials = counted(load(project))
    assert [x.user_attrs for x in trials if x.state != TrialState.COMPLETE] == [], out
    assert len(trials) == 8
    assert before.items() <= finished(project).items()
    check_runs(project)
    ended = Counter(x["run"] for x in traced(project, "end"))
    assert set(ended.values()) == {1} and len(ended) == 8 * 2 + 2 * 2
    assert len(table(project)) == 8
    assert len({json.dumps(x.params) for x in trials}) == 8
    assert not fakes.processes_in(project)


@pytest.mark.parametrize(
    "sent, begun", [("SIGINT", ["0002-seed-1"]), ("SIGTERM", ["own-seed-1001", "own-seed-1002"])]
)
def test_a_signal_saves_and_the_same_command_goes_on(project, sent, begun):
    """Whether it comes in trials or in the last runs; these do not end by themselves."""
    words = [*QUICK, "--workers", "2", "--trials", "4", "--seconds", "0.1"]
    number = getattr(signal, sent)
    command = fakes.Command(project, *words, **dict.fromkeys(begun, "hang"))
    wait_for(lambda: set(begun) <= {x["run"] for x in traced(project, "start")})
    before = finished(project)
    os.kill(command.pid, number)
    status, out, err = command.wait()
    assert (status, err) == (128 + number, "") and not fakes.processes_in(project)
    assert out.splitlines()[-1] == "Stopped. The same command goes on."
    stopped = {x["run"] for x in traced(project, "stop")}
    assert stopped >= set(begun) and not (project / "studies" / NAME / "best.json").exists()
    status, _, err = fakes.Command(project, *words).wait()
    assert (status, err) == (0, "")
    check_runs(project)
    assert {x["run"] for x in traced(project, "start") if x["first"]} == stopped
    trials = counted(load(project))
    assert len(trials) == 4 and {x.state for x in trials} == {TrialState.COMPLETE}
    assert before.items() <= finished(project).items()


@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv is not installed")
def test_a_killed_command_s_scripts_save_and_end(project):
    words = [*QUICK, "--trials", "1", "--fresh-seeds", "1"]
    command = fakes.Command(project, *words, **{"0000-seed-1": "hang"})
    wait_for(lambda: traced(project, "start"))
    os.kill(command.pid, signal.SIGKILL)
    wait_for(lambda: not fakes.processes_in(project), 10)
    (stop,) = traced(project, "stop")
    assert fakes.Command(project, *words).wait()[0] == 0
    check_runs(project)
    assert [x["first"] for x in traced(project, "start")][:2] == [0, stop["done"]]


def test_ctrl_c_thrice_does_not_wait(project):
    command = fakes.Command(project, *QUICK, "--trials", "2", **{"-seed-": "stubborn"})
    wait_for(lambda: traced(project, "start"))
    for _ in range(3):
        os.kill(command.pid, signal.SIGINT)
        time.sleep(0.3)
    start = time.monotonic()
    assert command.wait()[0] == 130 and time.monotonic() - start < 5


def test_a_run_that_outlives_its_command_is_waited_for(project, tmp_path, monkeypatch):
    """Where nothing tells a script that tune.py was killed, it trains on: none trains beside it."""
    words = [*QUICK, "--trials", "1", "--seconds", "2", "--fresh-seeds", "1", "--num-seeds", "1"]
    own = {"PATH": str(tmp_path / "nothing")}  # no setpriv
    command = fakes.Command(project, *words, own=own)
    wait_for(lambda: traced(project, "start"))
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    assert fakes.processes_in(project)
    status, _, err = fakes.Command(project, *words, own=own).wait()
    assert (status, err) == (0, "")
    check_runs(project)
    assert not traced(project, "locked out", "stop")
    assert Counter(x["run"] for x in traced(project, "start"))["0000-seed-1"] == 1


def age(project):
    """Make the trials that are running a day older than they are."""
    with contextlib.closing(sqlite3.connect(project / f"studies/{NAME}/study.db")) as database:
        older = "datetime_start = datetime(datetime_start, '-1 day')"
        database.execute(f"UPDATE trials SET {older} WHERE state = 'RUNNING'")
        database.commit()


def test_killed_while_a_trial_gets_its_settings(project, command, monkeypatch):
    """It is begun, and nobody's yet: no command must wait for it for ever."""

    def die(*_):
        raise SystemExit(9)

    words = [*QUICK, "--trials", "2", "--timeout", "100"]
    with monkeypatch.context() as patch:
        patch.setattr(optuna.samplers.TPESampler, "infer_relative_search_space", die)
        command(*words)
    (trial,) = load(project).trials
    assert trial.state == TrialState.RUNNING
    age(project)
    status, out, _ = command(*words)
    assert status == 0 and "run elsewhere" not in out
    assert (project / "studies" / NAME / "best.json").exists()
    assert len(counted(load(project))) == 2


def test_a_clock_that_is_set_kills_no_trial(project, command, monkeypatch):
    """Linux keeps when it booted, and each process began, by the clock: to whole seconds."""
    words = [*QUICK, "--trials", "1", "--seconds", "2"]
    other = fakes.Command(project, *words)
    wait_for(lambda: traced(project, "start"))
    clock = psutil._psplatform.boot_time
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: clock() + 1)
    assert command(*words)[::2] == (0, "")
    assert other.wait()[::2] == (0, "")
    assert len(load(project).trials) == 1


# === Pruning and failing ========================================================================
def test_a_pruned_trial_s_process_is_ended(project, command, monkeypatch):
    """The script's own learning rate of 0.1 is two decades off; the choices are not."""
    fakes.prune_below(monkeypatch, -1.5)
    words = ["ppo_fake", "--num-seeds", 2, "--fresh-seeds", 1, "--trials", 3, "--workers", 2]
    words += ["--space", "learning_rate=1e-3,2e-3,3e-3,1e-1"]
    status, out, err = command(*words, **{"0000-": "hang"})
    assert (status, err) == (0, "")
    states = {x.number: x for x in load(project).trials}
    lag = [x for x in states.values() if x.params["learning_rate"] == 0.1]
    assert states[0] in lag and {x.state for x in lag} == {TrialState.PRUNED}
    assert len(lag) < 3
    assert {x.state for x in states.values() if x not in lag} == {TrialState.COMPLETE}
    assert re.search(r"trial 0: pruned at \d%", out) and not fakes.processes_in(project)
    assert [x["run"] for x in traced(project, "stop")] == ["0000-seed-1"]
    left = project / "studies" / NAME / "trials"
    assert (left / "0000-seed-1/metrics.jsonl").exists()
    assert not (left / "0000-seed-1/checkpoint.npz").exists()
    assert not (left / "0000-seed-2").exists()
    assert not [*left.glob("*.log"), *left.glob("*/checkpoint.npz")]
    row = table(project).iloc[0]
    assert row["state"] == "PRUNED" and math.isnan(row["value"])
    assert row["recent_return"] == -2
    command(*words)  # a pruned trial is over
    check_runs(project)
    assert not [x for x in traced(project, "start") if x["first"]]


def test_hyperband_prunes_what_lags_and_not_the_best(project, command):
    words = ["ppo_fake", "--num-seeds", 2, "--fresh-seeds", 1, "--trials", 16]
    assert command(*words)[0] == 0
    trials = load(project).trials
    pruned = [x for x in trials if x.state == TrialState.PRUNED]
    assert len(pruned) >= 3 and max(x.last_step for x in pruned) < 100
    gap = [abs(math.log10(x.params["learning_rate"]) + 3) for x in trials]
    assert min(gap[x.number] for x in pruned) > min(gap)
    assert trials[report(project)["best_trial"]].state == TrialState.COMPLETE


def test_a_script_that_ignores_sigterm_is_killed(project, command, monkeypatch):
    fakes.prune_below(monkeypatch, -1.5)
    wait, asked = subprocess.Popen.wait, []

    def shorter(process, timeout=None):
        asked.append(timeout)
        return wait(process, 0.5 if timeout and timeout > 1 else timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", shorter)
    words = ["ppo_fake", "--num-seeds", 2, "--trials", 1, "--space", "learning_rate=1e-1,1"]
    status, out, err = command(*words, **{"0000-": "stubborn"})
    assert re.search(r"trial 0: pruned at \d%", out) and 60 in asked
    assert (status, len(err.splitlines())) == (1, 1) and "no trial is complete" in err
    (start,) = traced(project, "start")
    assert not psutil.pid_exists(start["pid"]) and not traced(project, "stop")


def test_failing_trials_are_told_and_the_study_goes_on(project, command):
    plans = {"0001-": "refuse", "0002-seed-2": "crash", "0003-seed-1": "killed"}
    status, out, err = command(*QUICK, "--trials", 6, "--workers", 2, **plans)
    assert (status, err) == (0, "") and "6/6 trials: 3 complete, 0 pruned, 3 failed" in out
    rows = table(project)
    assert list(rows["state"] == "FAIL") == [False, True, True, True, False, False]
    assert rows["error"][rows["state"] == "COMPLETE"].isna().all()
    told = {
        1: "ppo_fake.py ended by exit 2: --gamma must be smaller ?[31m here",
        2: "ppo_fake.py ended by exit 1: RuntimeError: shapes do not match \N{SNOWMAN}",
        3: "ppo_fake.py ended by SIGKILL: it printed nothing",
    }
    assert rows["error"].dropna().to_dict() == told
    assert rows["value"].isna().tolist() == [False, True, True, True, False, False]
    for number, sentence in told.items():
        assert f"trial {number}: {sentence} | " in out
    logs = {x.name for x in (project / "studies" / NAME / "trials").glob("*.log")}
    assert logs == {"0001-seed-1.log", "0002-seed-2.log", "0003-seed-1.log"}
    assert report(project)["trials"] == {"complete": 3, "pruned": 0, "failed": 3}
    starts = len(traced(project, "start"))
    assert command(*QUICK, "--trials", 6)[0] == 0  # what failed is over
    assert len(traced(project, "start")) == starts


@pytest.mark.parametrize(
    "plan, sentence",
    [
        ({"-seed-": "refuse"}, "ppo_fake.py ended by exit 2: --gamma must be smaller ?[31m here"),
        ({"no judge": ""}, "evaluate.py ended by exit 1: no judgement"),
        ({"no number": ""}, "an agent's return is no number"),
    ],
)
def test_where_all_fail_one_sentence_says_why(project, command, plan, sentence):
    status, _, err = command(*QUICK, "--trials", 2, **plan)
    assert (status, err) == (1, f"no trial is complete: {sentence}\n")
    assert list(table(project)["state"]) == ["FAIL"] * 2
    status, _, err = command(*QUICK, "--trials", 9, "--study", "more", **plan)
    assert (status, err) == (1, f"the first 3 trials failed: {sentence}\n")
    assert not (project / "studies" / NAME / "best.json").exists()


def test_a_failing_verdict_is_one_sentence_and_can_be_made_later(project, command):
    words = [*QUICK, "--trials", 2]
    status, _, err = command(*words, **{"own-seed-1002": "crash"})
    assert status == 1 and len(err.splitlines()) == 1 and "shapes do not match" in err
    assert command(*words)[0] == 0
    starts = Counter(x["run"] for x in traced(project, "start"))
    assert starts["own-seed-1002"] == 2 and set(starts.values()) == {1, 2}
    assert report(project)["own"]["returns"]


def test_a_hanging_script_ends_by_timeout(project, command):
    words = [*QUICK, "--trials", 2, "--timeout", 1, "--workers", 2]
    status, _, err = command(*words, **{"0000-seed-1": "hang"})
    assert (status, err) == (0, "") and not fakes.processes_in(project)
    assert list(table(project)["error"].fillna("")) == ["no end after 1 s", ""]


# === Several at once ============================================================================
def check_shared(project, study, trials, verdicts=1):
    """Every trial is there once, was made once, and by settings of its own."""
    check_runs(project)
    runs = Counter(x["run"] for x in traced(project, "start") if x["run"][0] == "0")
    own = counted(study)
    assert runs == {f"{x.number:04d}-seed-{seed}": 1 for x in own for seed in (1, 2)}
    assert len(own) == trials and {x.state for x in own} == {TrialState.COMPLETE}
    assert len({json.dumps(x.params) for x in own}) == trials
    for x in own:
        values = [fakes.greedy(x.params, seed, 1_000_000) for seed in (1, 2)]
        assert x.value == pytest.approx(statistics.fmean(values))
    fresh = Counter(x["run"] for x in traced(project, "end") if x["run"][0] != "0")
    assert set(fresh.values()) == {verdicts} and len(fresh) == 4


def test_workers(project, command, monkeypatch):
    fakes.slow_down_asking(monkeypatch.setattr)
    status, _, _ = command(*QUICK, "--trials", 10, "--workers", 3, "--seconds", "0.2")
    assert status == 0
    check_shared(project, load(project), 10)
    running = most = 0
    for x in traced(project, "start", "end"):
        running += 1 if x["what"] == "start" else -1
        most = max(most, running)
    assert 2 <= most <= 3  # on a busy machine, the third may begin where the first has ended


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_two_commands_share_a_storage(project, kind):
    storage = None
    words = [*QUICK, "--trials", "10", "--workers", "2", "--seconds", "0.1"]
    if kind == "journal":
        words += ["--storage", "journal"]
        backend = optuna.storages.journal.JournalFileBackend(str(project / "journal"))
        storage = optuna.storages.JournalStorage(backend)
    commands = [fakes.Command(project, *words, own={"SLOW": "1"}) for _ in range(2)]
    ended = [x.wait() for x in commands]
    assert [x[::2] for x in ended] == [(0, "")] * 2, ended
    check_shared(project, load(project, storage), 10)
    for _, out, _ in ended:
        assert out.count("\ntrial ") > 1
    assert report(project)["trials"] == {"complete": 10, "pruned": 0, "failed": 0}
    status, _, err = fakes.Command(project, *words).wait()
    assert (status, err) == (0, "")  # they are of one study


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_commands_go_on_after_an_interruption(project, sent):
    """What was interrupted is repeated once, though all look for it at the same moment."""
    words = [*QUICK, "--trials", "6", "--workers", "2", "--seconds", "0.3"]
    command = fakes.Command(project, *words)
    wait_for(lambda: len(traced(project, "start")) >= 4)
    os.kill(command.pid, sent)
    assert command.wait()[0] == (130 if sent == signal.SIGINT else -sent)
    commands = [fakes.Command(project, *words, own={"SLOW": "1"}) for _ in range(3)]
    ended = [x.wait() for x in commands]
    assert [x[::2] for x in ended] == [(0, "")] * 3, ended
    check_runs(project)
    trials = counted(load(project))
    assert len(trials) == 6 and {x.state for x in trials} == {TrialState.COMPLETE}


def test_runs_of_another_study_are_not_taken_for_this_one_s(project, command):
    words = [*QUICK, "--trials", 1]
    assert command(*words)[0] == 0
    (project / "studies" / NAME / "study.db").unlink()
    sentence = f"studies/{NAME} has the runs of another study: name another by --study\n"
    assert command(*words)[::2] == (2, sentence)


def test_who_dies_with_the_script_s_own_settings_leaves_them_to_another(project, command):
    """Killed between Optuna's ask and its first proposal, the trial has no settings yet."""
    assert command(*QUICK, "--trials", 1)[0] == 0
    study = load(project)
    study.enqueue_trial({"learning_rate": 0.005, "anneal_lr": True})
    dead = study.ask()
    dead.set_user_attr("worker", [socket.gethostname(), 2**22 + 1, 1.0])  # no such process
    assert command(*QUICK, "--trials", 2)[0] == 0
    (_, again) = counted(load(project))
    assert again.params["learning_rate"] == 0.005 and again.system_attrs["failed_trial"] == 1


def test_values_that_the_space_has_not_fail_with_a_sentence(project, command):
    assert command(*QUICK, "--trials", 1)[0] == 0
    load(project).enqueue_trial({"learning_rate": "abc"})
    assert command(*QUICK, "--trials", 2)[0] == 0
    error = table(project)["error"].iloc[1]
    assert error.startswith("the storage has other values of a setting: ")


@pytest.mark.parametrize(
    "kind", ["worker", "start", "settings", "minimize", "retry_history", "returns"]
)
def test_a_study_that_others_wrote_is_refused(project, command, kind):
    place = project / "studies" / NAME
    place.mkdir(parents=True)
    direction = "minimize" if kind == "minimize" else "maximize"
    study = optuna.create_study(
        study_name=NAME, storage=f"sqlite:///{place}/study.db", direction=direction
    )
    users = {"worker": {"worker": [["../../x"]]}, "start": {"worker": ["a", 1, "now"]}}
    users = (users | {"returns": {"returns": 5}}).get(kind, {})
    systems = {kind: "../../x"} if kind == "retry_history" else {}
    study.add_trial(optuna.create_trial(value=1.0, user_attrs=users, system_attrs=systems))
    if kind == "settings":
        study.set_user_attr("settings", [1])
    sentence = f"study {NAME} is none of tune.py: name another by --study\n"
    assert command(*QUICK)[::2] == (2, sentence)


def test_a_place_with_any_name_has_the_database(project, command):
    place = "w?at %41 #'é"
    assert command(*QUICK, "--trials", 1, "--studies-dir", place)[0] == 0
    assert (project / place / NAME / "study.db").is_file()


@pytest.fixture
def postgres(tmp_path_factory):
    """The address of a database in a server of this test's own."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("PostgreSQL's server is not installed")
    place = Path(
        subprocess.check_output(["mktemp", "-d", "/tmp/tune-pg-XXXXXX"], text=True).strip()
    )
    be = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    if be:
        shutil.chown(place, "postgres")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data, tools = place / "data", found[-1].parent
    quick = f"-k {place} -p {port} -c listen_addresses= -c fsync=off"

    def call(*words):
        subprocess.run([*be, *words], check=True, cwd=place, stdout=subprocess.DEVNULL)

    try:
        call(tools / "initdb", "-D", data, "-A", "trust", "-U", "me", "--no-sync")
        call(tools / "pg_ctl", "-D", data, "-o", quick, "-l", place / "log", "-w", "start")
        yield f"postgresql://me@/postgres?host={place}&port={port}"
    finally:
        subprocess.run([*be, tools / "pg_ctl", "-D", data, "-m", "immediate", "stop"], cwd=place)
        shutil.rmtree(place)


def test_two_machines_share_a_postgresql_server(project, postgres):
    words = [*QUICK, "--trials", "10", "--seconds", "0.1", "--storage", postgres]
    places = [project / "here", project / "there"]
    commands = [
        fakes.Command(project, *words, "--studies-dir", str(x), own={"SLOW": "1"}) for x in places
    ]
    ended = [x.wait() for x in commands]
    assert [x[::2] for x in ended] == [(0, "")] * 2, ended
    verdicts = [x / NAME / "best.json" for x in places]
    check_shared(project, load(project, postgres), 10, sum(x.exists() for x in verdicts))
    for place in places:
        assert len(list((place / NAME / "trials").glob("*-seed-1"))) > 1
        assert len(pd.read_csv(place / NAME / "trials.csv")) == 10
    assert not [*project.rglob("study.db")]


# === What a user gets wrong =====================================================================
SCRIPT = "ppo_fake.py, which gets what tune.py does not know, says:"
RANGE = "must be NAME=LOW:HIGH, NAME=LOW:HIGH:log, NAME=A,B,C or NAME=none"


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--trials", "0"], "--trials must lie between 1 and 1000000, not 0"),
        (["--num-seeds", "1001"], "--num-seeds must lie between 1 and 1000, not 1001"),
        (["--fresh-seeds", "-1"], "--fresh-seeds must lie between 1 and 1000, not -1"),
        (["--episodes", "0"], "--episodes must lie between 1 and 1000000, not 0"),
        (["--workers", "0"], "--workers must lie between 1 and 1000, not 0"),
        (["--workers", "two"], "invalid literal for int() with base 10: 'two'"),
        (["--timeout", "nan"], "--timeout must be a number of seconds above 0, not nan"),
        (["--timeout", "0"], "--timeout must be a number of seconds above 0, not 0.0"),
        (["--seed", "-1"], "--seed must lie between 0 and 2**32 - 1, not -1"),
        (["--sampler", "grid"], "grid"),
        *[
            (["--study", x], f"--study must be the name of one folder in --studies-dir, not {x}")
            for x in ("../x", "..", "a/b", "/x", ".")
        ],
    ],
)
def test_wrong_values_are_refused(project, command, words, sentence):
    status, out, err = command("ppo_fake", *words)
    assert (status, out) == (2, "") and sentence in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err and not (project / "studies").exists()


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--lern", "1"], f"{SCRIPT} Unrecognized options: --lern, 1"),
        (["word"], f"{SCRIPT} Unrecognized options: word"),
        (["--gamma", "2"], f"{SCRIPT} --gamma must lie between 0 and 1, not 2.0"),
        (["--run-name", "x"], "--run-name cannot be set: tune.py gives it to each run"),
        (["--run_name=x"], "--run-name cannot be set: tune.py gives it to each run"),
        (["--resume", "x"], "--resume cannot be set: tune.py gives it to each run"),
        (["--runs-dir", "x"], "--runs-dir cannot be set: tune.py gives it to each run"),
        (["--studies-dir", "/dev/null"], f"Not a directory: '/dev/null/{NAME}'"),
        (
            ["--gamma", "0.9", "--space", "gamma=0.9,1"],
            "--space gamma: a flag gives it one value, so it cannot be searched",
        ),
        (
            ["--no-anneal-lr", "--space", "anneal_lr=True,False"],
            "--space anneal_lr: a flag gives it one value, so it cannot be searched",
        ),
        (
            [
                y
                for x in ("learning_rate", "gamma", "anneal_lr", "num_minibatches", "hidden_sizes")
                for y in ("--space", f"{x}=none")
            ],
            "--space leaves nothing to search",
        ),
    ],
)
def test_wrong_flags_get_one_sentence(project, command, words, sentence):
    check_sentence(project, command(*QUICK, "--trials", "1", *words), sentence)


@pytest.mark.parametrize(
    "space, sentence",
    [
        ("gamma", f"gamma {RANGE}"),
        ("gama=0.9,0.95", "gama=0.9,0.95: ppo_fake.py has no setting gama (is it gamma?)"),
        ("zzz=1,2", "zzz=1,2: ppo_fake.py has no setting zzz"),
        ("gamma=", f"gamma= {RANGE}: "),
        ("gamma=a:b", f"gamma=a:b {RANGE}: "),
        ("gamma=0.9,", f"gamma=0.9, {RANGE}: "),
        ("gamma=0.9:0.8", f"gamma=0.9:0.8 {RANGE}: 0.9 is not below 0.8"),
        ("gamma=0.9:0.9", f"gamma=0.9:0.9 {RANGE}: 0.9 is not below 0.9"),
        ("gamma=0.8:0.9:lin", f"gamma=0.8:0.9:lin {RANGE}: it has no such range"),
        ("gamma=0.8:0.9:log:", f"gamma=0.8:0.9:log: {RANGE}: it has no such range"),
        ("gamma=nan:1", f"gamma=nan:1 {RANGE}: nan is not below 1"),
        ("gamma=0:1:log", f"gamma=0:1:log {RANGE}: "),
        ("gamma=0.5:2", "gamma=0.5:2: --gamma must lie between 0 and 1, not 2.0"),
        ("gamma=0:inf", "gamma=0:inf: --gamma must lie between 0 and 1, not inf"),
        ("gamma=0.9,2", "gamma=0.9,2: --gamma must lie between 0 and 1, not 2.0"),
        ("gamma=nan", "gamma=nan: --gamma must lie between 0 and 1, not nan"),
        ("num_minibatches=1.5,2", f"num_minibatches=1.5,2 {RANGE}: "),
        ("num-minibatches=2:5", "num_minibatches=2:5: --num-minibatches must divide 96, not 5"),
        ("num_minibatches=0:4:log", f"num_minibatches=0:4:log {RANGE}: "),
        ("anneal_lr=yes,no", f"anneal_lr=yes,no {RANGE}: "),
        ("anneal_lr=0:1", f"anneal_lr=0:1 {RANGE}: it has no such range"),
        ("loss=mse,l1", f"loss=mse,l1 {RANGE}: l1 is none of mse, huber"),
        ("loss=mse:huber", f"loss=mse:huber {RANGE}: it has no such range"),
        ("hidden_sizes=64:128", f"hidden_sizes=64:128 {RANGE}: it has no such range"),
        ("hidden_sizes=64x,32", f"hidden_sizes=64x,32 {RANGE}: "),
        ("learning_rate=\x1b[31m:1", f"learning_rate=?[31m:1 {RANGE}: "),
        *[
            (f"{x}=1,2", f"{x} would change the task, or is no setting of the agent")
            for x in ("env_id", "total_timesteps", "seed", "run_name", "track", "resume")
        ],
    ],
)
def test_wrong_spaces_get_one_sentence(project, command, space, sentence):
    result = command(*QUICK, "--trials", "1", "--space", space)
    check_sentence(project, result, f"--space {sentence}")


@pytest.mark.parametrize(
    "storage",
    [
        *("mysql://x/y", "foo://", "://", "postgresql://127.0.0.1:1/none", "redis://127.0.0.1:1"),
        *("/dev/null/x", "", ".", "sqlite:////dev/null/x", "sqlite:///other"),
    ],
)
def test_wrong_storages_get_one_sentence(project, command, storage):
    (project / "other").write_text("no database at all" * 100)
    check_sentence(project, command(*QUICK, "--trials", "1", "--storage", storage), "")


def check_sentence(project, result, sentence):
    """One line that says it, without the boxes and rules that tyro draws, and nothing is begun."""
    status, out, err = result
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert sentence in err and err.isprintable() == (err == "") and err[:-1].isprintable()
    assert "---" not in err and "helptext" not in err and "Traceback" not in err
    assert not traced(project)
    if sentence.endswith(": "):
        assert not err.rstrip().endswith(":")
    elif sentence:
        assert err == f"{sentence}\n" or err.startswith("[Errno")


def test_the_script_must_be_one_of_those_beside_it(project, command):
    (project / "sub").mkdir()
    shutil.copy(project / "ppo_fake.py", project / "sub")
    shutil.copy(project / "ppo_fake.py", project / "ppo_fake_vmap.py")  # many agents a process
    names = ("nothing", "evaluate.py", "ppo_other", "sub/ppo_fake.py", "/tmp/ppo_fake.py")
    for name in (*names, "ppo_fake_vmap.py"):
        status, _, err = command(name, "--trials", "1")
        assert status == 2 and f"SCRIPT must be one of ppo_fake.py, not {name}" in " ".join(
            err.replace("│", " ").split()
        )
    assert command()[0] == 2
    (project / "ppo_fake.py").write_text("import nothing_at_all")
    result = command("ppo_fake", "--trials", "1")
    sentence = "ppo_fake.py cannot be imported: No module named 'nothing_at_all'"
    check_sentence(project, result, sentence)


def test_a_study_goes_on_only_as_it_was_begun(project, command):
    words = [*QUICK, "--trials", "1"]
    assert command(*words)[0] == 0
    events, begun = traced(project), f"study {NAME} was begun with"
    changed = {
        "other num seeds (2, now 3)": ["--num-seeds", "3"],
        "other episodes (5, now 6)": ["--episodes", "6"],
        "other pruner (none, now hyperband)": ["--pruner", "hyperband"],
        "other sampler (tpe, now random)": ["--sampler", "random"],
        "other flags ([], now ": ["--total-timesteps", "500"],
        "other space (": ["--space", "gamma=0.5,0.6"],
    }
    for was, now in changed.items():
        status, out, err = command(*words, *now)
        assert (status, err.count("\n")) == (2, 1) and "trial" not in out
        assert err.startswith(f"{begun} {was}") and err.endswith(": name another by --study\n")
    code = (project / "ppo_fake.py").read_text()
    (project / "ppo_fake.py").write_text(code + "# another\n")
    assert command(*words)[2].startswith(f"{begun} another version of ppo_fake.py: ")
    (project / "ppo_fake.py").write_text(code)
    # Nor do the runs of one study become another's, in a storage that is new.
    status, _, err = command(*words, "--storage", "elsewhere.journal")
    assert (status, err.count("\n")) == (2, 1) and "has the runs of another study" in err
    assert traced(project) == events
    # These only say how, or how much.
    more = ["--trials", "2", "--workers", "2", "--seed", "9", "--timeout", "90"]
    assert command(*words, *more, "--fresh-seeds", "3")[0] == 0
    check_runs(project)
    assert len(load(project).trials) == 2 and len(report(project)["fresh_seeds"]) == 3


def test_as_a_command(project):
    """The real thing, in processes of its own: a sentence, and without Optuna what to install."""

    def call():
        words = [sys.executable, "tune.py", "ppo_fake", "--space", "gamma=0.9,2"]
        return subprocess.run(words, cwd=project, capture_output=True, text=True)

    done = call()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "--space gamma=0.9,2: --gamma must lie between 0 and 1, not 2.0\n"
    (project / "optuna.py").write_text("raise ImportError(\"No module named 'optuna'\")")
    done = call()
    assert (done.returncode, done.stdout) == (2, "")
    sentence = "No module named 'optuna': pip install -r requirements-tune.txt"
    assert done.stderr == f"tune.py: {sentence}\n"


# === Ranges =====================================================================================
def parse(text, own, literals=()):
    return tune.parse_range("name", text, own, literals)


def test_ranges():
    kinds = optuna.distributions
    choices, floats = kinds.CategoricalDistribution, kinds.FloatDistribution
    assert parse("0.1:2", 1.0) == floats(0.1, 2.0)
    assert parse("1e-5:1e-2:log", 1.0) == floats(1e-5, 1e-2, log=True)
    assert parse("2:20:log", 4) == kinds.IntDistribution(2, 20, log=True)
    assert parse("2:20", 4) == kinds.IntDistribution(2, 20)
    assert parse("0.9,1", 0.5) == choices([0.9, 1.0])
    assert parse("4,2,4", 1) == choices([4, 2])
    assert parse("True,false", True) == choices([True, False])
    assert parse("huber,mse", "mse", ("mse", "huber")) == choices(["huber", "mse"])
    assert parse("64x64,8", (1, 2)) == choices(["64x64", "8"])
    for text, own in (("1:2", True), ("1:2", "a"), ("1:2", (1,)), ("1:2:3", 1), ("1.5:2", 1)):
        with pytest.raises(tune.Problem, match=r"--space name="):
            parse(text, own)


def test_words_are_what_a_script_reads():
    settings = {"learning_rate": 1e-05, "anneal_lr": False, "hidden_sizes": "8x16", "gamma": 0.5}
    settings |= {"num_minibatches": 3, "loss": "huber"}
    words = tune.words_of(settings)
    assert words[:6] == ["--learning-rate", "1e-05", "--no-anneal-lr", "--hidden-sizes", "8", "16"]
    read = read_flags([*words])
    assert read.hidden_sizes == [8, 16]
    assert {x: getattr(read, x) for x in settings} == settings | {"hidden_sizes": [8, 16]}
    assert tune.words_of({"anneal_lr": True}) == ["--anneal-lr"]


def test_spaces_are_of_settings_that_scripts_have():
    """Each name is in every script of its kind, and each range is one of its kind of value."""
    for kind, space in tune.SPACES.items():
        scripts = sorted(ROOT.glob(f"{kind}_*.py"))
        assert len(scripts) > 3
        for path in scripts:
            fields = arguments(path)
            for name, text in space.items():
                assert name in fields, (path, name)
                values = tune.parse_range(name, re.sub(r"(\d+)%", r"\g<1>00", text), *fields[name])
                assert not isinstance(values, optuna.distributions.CategoricalDistribution) or (
                    len(values.choices) > 1
                )
        for name in (*tune.OURS, *tune.TASK):
            assert name not in space
    for path in [*ROOT.glob("ppo_*.py"), *ROOT.glob("dqn_*.py")]:
        assert {*tune.OURS, "env_id", "total_timesteps"} <= arguments(path).keys()


def arguments(path):
    """A script's Args without importing it: name -> its own value, and the literals allowed."""
    (found,) = (
        x
        for x in ast.parse(path.read_text()).body
        if isinstance(x, ast.ClassDef) and x.name == "Args"
    )
    fields = {}
    for x in found.body:
        if isinstance(x, ast.AnnAssign) and x.value is not None:
            value = None
            with contextlib.suppress(ValueError):
                value = ast.literal_eval(x.value)
            hint = ast.unparse(x.annotation)
            literals = ast.literal_eval(hint[8:-1]) if hint.startswith("Literal[") else ()
            fields[ast.unparse(x.target)] = value, literals
    return fields


# === A real script ==============================================================================
@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A small study of ppo_linen.py by the command itself, with figures."""
    place = tmp_path_factory.mktemp("real")
    words = ["ppo_linen.py", "--trials", "2", "--num-seeds", "2", "--fresh-seeds", "2"]
    words += ["--episodes", "8", "--workers", "2", "--studies-dir", place, "--pruner", "none"]
    words += ["--num-envs", "4", "--total-timesteps", "2048", "--space", "num_steps=32,64"]
    words += ["--space", "num_minibatches=none", "--update-epochs", "2"]
    words += ["--hidden-sizes", "8"]
    quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    quick |= {"JAX_COMPILATION_CACHE_DIR": str(place / "cache")}
    quick |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = subprocess.run(
        [sys.executable, "tune.py", *words],
        cwd=ROOT,
        env=os.environ | quick,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return place / "ppo_linen__CartPole-v1", done.stdout


def test_a_real_study(real):
    folder, out = real
    assert "2/2 trials: 2 complete, 0 pruned, 0 failed" in out
    result = json.loads((folder / "best.json").read_text())
    assert result["best_settings"].keys() == tune.SPACES["ppo"].keys() - {
        "num_minibatches",
        "update_epochs",
        "hidden_sizes",
    }
    assert "--num-envs 4 --total-timesteps 2048" in result["command"]
    for path, seeds, games in (("trials", (1, 2), 1_000_000), ("fresh", (1001, 1002), 2_000_000)):
        runs = [x for x in (folder / path).iterdir() if x.is_dir()]
        assert len(runs) == 4
        for run in runs:
            info = json.loads((run / "run.json").read_text())
            assert (info["args"]["num_envs"], info["args"]["total_timesteps"]) == (4, 2048)
            assert info["args"]["seed"] == int(run.name.rpartition("-")[2]) in seeds
            found = json.loads((run / "evaluation.json").read_text())
            assert (found["seed"], found["episodes"]) == (games, 8)
    for part in ("best", "own"):
        assert all(1 <= x <= 500 for x in result[part]["returns"])
    assert result["python"] and result["versions"].keys() >= {"jax", "flax", "optuna"}


def test_figures_are_whole_and_ask_no_network(real):
    folder, _ = real
    names = {"history", "importance", "parallel"}
    assert names <= {x.stem for x in folder.glob("*.png")} <= names | {"contour"}
    for path in folder.glob("*.png"):
        with PIL.Image.open(path) as image:
            image.load()
            assert 600 < image.width < 3000 and 300 < image.height < 3000
            colors = image.convert("RGB").getcolors(1 << 24)
            assert colors and len(colors) > 20
        page = path.with_suffix(".html").read_text()
        assert re.findall(r"<script[^>]*\bsrc=\"([^\"]*)\"", page) == ["plotly.min.js"]
        assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", page)
        assert "learning_rate" in page or path.stem == "history"
    assert (folder / "plotly.min.js").stat().st_size > 1_000_000

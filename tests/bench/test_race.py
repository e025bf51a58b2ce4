"""race.py: interleaving, cleanup of processes, and the analysis of races."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
from conftest import wait_for
from made_up import run_command
from rich.console import Console

import race as race_module
from analysis import races
from analysis.schema import SourceError
from analysis.stats import Interval
from bench import interleave, processes
from bench.interleave import Program, Runner, Settings
from bench.processes import new_mark

ROOT = Path(__file__).resolve().parents[2]
# A program that prints a line after each pause and has a child process in another session.
TICKER = """
import subprocess, sys, time
seconds, times = float(sys.argv[1]), int(sys.argv[2])
worker = subprocess.Popen(["sleep", "1000"], start_new_session=True)
for _ in range(times):
    time.sleep(seconds)
    print("tick", flush=True)
print("a last word")
"""


@pytest.fixture
def ticker(tmp_path):
    (tmp_path / "ticker.py").write_text(TICKER)
    return lambda seconds, times=10**6: f"{tmp_path}/ticker.py {seconds} {times} @tick"


def start(folder, *words):
    """Start race.py, which writes to turns.jsonl in the folder, and return the process."""
    command = [sys.executable, ROOT / "race.py", "--out", folder / "turns.jsonl", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=folder)


def race(folder, *words):
    """Run race.py to the end. Return the exit status, stdout and stderr."""
    process = start(folder, *words)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def num_turns(folder):
    path = folder / "turns.jsonl"
    return path.read_text().count('"turn"') if path.exists() else 0


def is_guard(process):
    return str(ROOT / "bench/processes.py") in process.cmdline()


def racers_of(process):
    """Return the running descendants of race.py, except for its guard."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
        return [x for x in family if not is_guard(x)]
    except psutil.NoSuchProcess:
        return []


# === Rounds =====================================================================================
def test_a_race_names_the_faster_program_and_saves_its_turns(tmp_path, ticker):
    slow, fast = ticker(0.04), ticker(0.01)
    status, out, err = race(tmp_path, "--turns", "12", "--seconds", "0.1", slow, fast)
    assert (status, err) == (0, "")
    assert "x as fast as" in out and "no significant" not in out.lower()
    (found,) = races.read(tmp_path / "turns.jsonl")
    assert len(found.turns) == 24 and len(found.times()) == 10  # two rounds are discarded
    assert found.info["versions"]["numpy"] == np.__version__
    assert all(turn.seconds >= 0.1 and turn.iterations >= 1 for turn in found.turns)
    assert found.info["steps"] == [None, None] and not found.is_per_step()
    assert found.times().median().iloc[0] > 0.036  # smaller if untimed iterations were counted
    order = [turn.program for turn in found.turns]
    assert order == [0, 1, 1, 0] * 6


class Clock:
    """A clock that stands still except in sleep(), and a program that writes lines at set times."""

    def __init__(self, runner, *times):
        self.now = 0.0
        self.runner = runner
        self.times = list(times)

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        """Advance the clock to the next line; without one, by a minute."""
        self.now = self.times.pop(0) if self.times else self.now + 60
        with open(self.runner.output, "a") as file:
            file.write("tick\n")


def take_turn(folder, monkeypatch, start, *times, stale=""):
    """Return the result of a turn that starts at `start`, and the runner."""
    program = Program("program", ["true"], b"tick", "0.txt", None, None)
    runner = Runner(program, 0, folder, new_mark(), Settings())
    runner.process.wait()
    monkeypatch.setattr(runner.process, "poll", lambda: None)  # the program is running
    runner.output.write_text(stale)
    runner.seen = 0.0
    clock = Clock(runner, *times)
    clock.now = start
    monkeypatch.setattr(interleave, "time", clock)
    return runner.take_turn(seconds=2.5), runner


def test_an_iteration_that_began_before_the_turn_is_not_timed(tmp_path, monkeypatch):
    """A line was written at the end of the last turn, and the first iteration takes 10 s."""
    found, _ = take_turn(tmp_path, monkeypatch, 0.0, 10.0, 11.0, 12.0, 13.0, stale="tick\n")
    assert found == (3, 3.0)


def test_the_time_for_which_a_program_was_paused_does_not_count_as_hanging(tmp_path, monkeypatch):
    found, runner = take_turn(tmp_path, monkeypatch, 1000.0, 1001.0, 1004.0)
    assert (found, runner.failure) == ((1, 3.0), "")


def test_pausing_a_program_does_not_pause_one_whose_number_starts_alike():
    mark = new_mark()
    programs = []
    for number in (1, 10):
        env = os.environ | {processes.MARK: f"{mark}.{number}"}
        programs.append(subprocess.Popen(["sleep", "60"], env=env))
    try:
        first, tenth = (psutil.Process(x.pid) for x in programs)
        wait_for(lambda: len(processes.marked(mark)) == 2)
        processes.pause(f"{mark}.1")
        wait_for(lambda: first.status() == psutil.STATUS_STOPPED)  # takes effect after kill()
        assert tenth.status() != psutil.STATUS_STOPPED
    finally:
        processes.end(mark)


def test_all_programs_but_one_are_paused(tmp_path, ticker):
    process = start(tmp_path, "--turns", "30", *[ticker(0.02), ticker(0.02), ticker(0.02)])
    wait_for(lambda: num_turns(tmp_path) > 0)
    for _ in range(20):
        racers = [x for x in racers_of(process) if "ticker.py" in " ".join(x.cmdline())]
        states = [x.status() for x in racers]
        assert len(states) == 3 and states.count(psutil.STATUS_STOPPED) >= 2
        time.sleep(0.03)
    process.terminate()
    process.communicate(timeout=60)


def test_flags_are_passed_to_all_scripts(tmp_path, compiled, monkeypatch):
    for variable, value in compiled.items():
        monkeypatch.setenv(variable, value)
    script = str(ROOT / "ppo_linen.py")
    turns = ("--turns", "12", "--seconds", "0.05", "--within", "10")
    flags = ("--num-envs", "2", "--num-steps", "8", "--num-minibatches", "1")
    status, out, err = race(tmp_path, *turns, script, f"{script} --seed 2", "--", *flags)
    assert status == 0, err
    (found,) = races.read(tmp_path / "turns.jsonl")
    assert found.info["programs"] == ["ppo_linen.py", "ppo_linen.py --seed 2"]
    assert found.info["steps"] == [16, 16] and "µs/step" in out
    assert found.info["flags"] == list(flags)
    assert [len(commit) >= 40 for commit in found.info["commits"]] == [True, True]
    assert not (tmp_path / "runs").exists()


def test_steps_give_times_per_step_for_other_programs_and_names_name_them(tmp_path, ticker, capsys):
    programs = (ticker(0.01), ticker(0.02))
    words = ("--turns", "12", "--seconds", "0.05", "--steps", "10", "20", "--name", "one", "two")
    status, out, err = race(tmp_path, *programs, *words)
    assert (status, err) == (0, "") and "µs/step" in out
    (found,) = races.read(tmp_path / "turns.jsonl")
    assert (found.info["steps"], found.names()) == ([10, 20], ["one", "two"])
    (ratio,) = found.ratios().values()
    # 2x the time for 2x the steps; on a busy machine, sleep() takes longer than it should.
    assert ratio.estimate == pytest.approx(1, abs=0.4)
    args = race_module.Args(programs=programs, steps=(1, 2, 3))
    with pytest.raises(SystemExit):
        race_module.read_programs(args, [], tmp_path)
    assert "--steps: 3 numbers for 2 programs with @TEXT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["a.py", "b.py"], ["a", "b"]),
        (["a.py --x 1 --y", "a.py --x 2 --y"], ["a.py --x 1", "a.py --x 2"]),
        (["a.py --x 1", "../a.py --x 1"], ["a.py", "../a.py"]),
        (["a.py p --x 1", "a.py p", "b.py p"], ["a.py --x 1", "a.py", "b.py"]),
        (["a.py", "a.py"], ["a.py (1)", "a.py (2)"]),
    ],
)
def test_names_contain_only_the_parts_that_differ(texts, names):
    programs = [Program(x, [], b"", "", Path(x.split()[0]), None) for x in texts]
    assert race_module.names_of(programs) == names


def test_a_long_name_does_not_wrap_the_table(capsys):
    found = synthetic_race([1.0] * 12, [2.0] * 12)
    found.info["programs"] = ["a" * 200, "b b" * 60]
    table = race_module.table_of(found, race_module.Args(programs=("a", "b")), 12, 1.0)
    Console(width=80, soft_wrap=True).print(table)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and max(map(len, lines)) <= 80
    assert "ms/iteration" in lines[1] and "2.000 to 2.000" in lines[4]


def test_a_race_states_the_cpus_and_the_threads_of_pytorch():
    found = synthetic_race([1.0] * 12, [2.0] * 12)
    found.info["programs"] = ["linen", "torch"]
    found.info["num_threads"] = [None, None]
    assert race_module.threads_of(found, "") == "CPUs: all."
    found.info["num_threads"] = [None, 1]
    assert race_module.threads_of(found, "0,1") == "CPUs: 0,1. PyTorch threads: torch 1."


def command_of(text, *flags):
    program = race_module.read_program(text, 0, flags, Path("folder"))
    return " ".join(program.command[1:])


def test_scripts_neither_end_nor_save_during_a_race_unless_flags_ask_for_it():
    script = str(ROOT / "ppo_linen.py")
    rest = "--runs-dir folder --run-name 0"
    long = "--total-timesteps 1000000000"
    assert command_of(script) == f"{script} {rest} {long} --save-every 1000000000"
    saving = f"{script} --save_every 1"
    assert command_of(saving) == f"{saving} {rest} {long}"
    short = f"{script} --save-every 1 --total-timesteps 9000"
    assert command_of(short) == f"{short} {rest}"


# === Termination ================================================================================
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_signal_leaves_a_process_behind(number, tmp_path, ticker):
    process = start(tmp_path, "--seconds", "0.05", "--within", "0", ticker(0.01), ticker(0.01))
    wait_for(lambda: num_turns(tmp_path) >= 20)
    family = racers_of(process)
    assert len(family) == 4  # two programs, each with a child process
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    if number != signal.SIGKILL:
        assert process.returncode == 1 and "stopped" in err
        assert " and " in out or "here" in out  # a result from the rounds so far
    wait_for(lambda: not any(x.is_running() for x in family))
    assert num_turns(tmp_path) >= 20


def test_a_program_that_exits_is_left_out_and_the_race_continues(tmp_path, ticker):
    programs = [ticker(0.01), ticker(0.011), ticker(0.012, times=60)]
    turns = ("--turns", "15", "--seconds", "0.1", "--within", "0")
    status, out, err = race(tmp_path, *turns, *programs)
    assert status == 1
    assert "was dropped from the race: it ended with exit status 0" in err and "a last word" in err
    assert "0.011" in out
    workers = [x.info for x in psutil.process_iter(["name", "cwd"]) if x.info["name"] == "sleep"]
    assert str(tmp_path) not in [x["cwd"] for x in workers]
    (found,) = races.read(tmp_path / "turns.jsonl")
    assert [turn.program for turn in found.turns].count(0) == 15


def test_a_program_without_progress_lines_is_left_out(tmp_path, ticker):
    silent = f"{sys.executable} -c 'import time; print(1, flush=True); time.sleep(99)' @tick"
    status, _, err = race(tmp_path, "--patience", "3", ticker(0.01), silent)
    assert status == 1
    assert "finished no iteration in 3 s. Last lines:\n  1" in err


@pytest.mark.parametrize(
    ("programs", "reason"),
    [
        (["mine.py", "my/b.py"], "my/b.py: no such script"),
        (["a.py", "b.py"], "a.py: no such script. For any other program, append @TEXT, where TEXT"),
        (["true @x", "nowhere/at-all @x"], "cannot run nowhere/at-all: No such file or directory"),
        (["'a", "b"], "'a: No closing quotation"),
        (["", "b"], "'' does not contain a command"),
        (["@x", "@y"], "does not contain a command"),
        ([str(ROOT / "evaluate.py"), "b"], "does not write a run folder"),
    ],
)
def test_usage_errors_are_one_sentence(programs, reason, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "my project"  # a path may contain a space
    folder.mkdir()
    (folder / "mine.py").write_text("RunLog")
    monkeypatch.chdir(folder)
    args = race_module.Args(programs=tuple(programs), out=tmp_path / "turns.jsonl")
    with pytest.raises(SystemExit) as end:
        race_module.run_race(args, [])
    assert end.value.code == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert reason in sentence


def test_wrong_flags_have_no_traceback(tmp_path, ticker):
    status, _, err = race(tmp_path, ticker(1), ticker(1), "--name", "a")
    assert status == 2 and "--name must give each program a different name" in err
    assert "Traceback" not in err


# === Studies ====================================================================================
def write_study(folder, *races):
    """Write races.toml. Each race is a tuple of its name and the commands of its programs."""
    lines = []
    for name, *ticks in races:
        lines += ["[[races]]", f"name = {name!r}", "turns = 12", "seconds = 0.05", "within = 9.0"]
        lines.append("[races.programs]")
        lines += [f"{chr(97 + i)} = {tick!r}" for i, tick in enumerate(ticks)]
    (folder / "races.toml").write_text("\n".join(lines))


def race_study(folder):
    """Run race.py --study to the end. Return the exit status, stdout and stderr."""
    command = [sys.executable, ROOT / "race.py", "--study", folder]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_a_study_runs_only_the_missing_races(tmp_path, ticker):
    fast, slow, broken = ticker(0.01), ticker(0.02), ticker(0.01, times=5)
    write_study(tmp_path, ("one", fast, slow), ("broken", fast, broken), ("two", slow, fast))
    status, out, err = race_study(tmp_path)
    assert status == 1 and "race.py: broken: " in err and "was dropped" in err
    found = races.named(tmp_path / "races.jsonl")  # without the failed race
    assert list(found) == ["one", "two"]
    assert found["one"].info["programs"] == ["a", "b"]
    assert found["one"].ratios()["b"].estimate > 1.5 and found["two"].ratios()["b"].estimate < 0.7

    write_study(tmp_path, ("one", fast, slow), ("two", slow, slow))  # race two has changed
    status, out, err = race_study(tmp_path)
    assert (status, err) == (0, "") and "Race 1 of 1: two" in out
    assert len(races.read(tmp_path / "races.jsonl")) == 3
    assert races.named(tmp_path / "races.jsonl")["two"].info["listed"]["programs"]["b"] == slow


def test_a_stopped_study_keeps_only_complete_races(tmp_path, ticker):
    write_study(tmp_path, ("one", ticker(0.01), ticker(0.01)), ("two", ticker(9), ticker(9)))
    pipe = subprocess.PIPE
    command = [sys.executable, ROOT / "race.py", "--study", tmp_path]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)
    path = tmp_path / "races.jsonl"
    wait_for(path.exists)
    wait_for(lambda: len(racers_of(process)) == 4)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "stopped" in err and "Traceback" not in err
    assert list(races.named(path)) == ["one"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ("races = 3", "races.toml: races: Input should be a valid list"),
        ("[[races]]\nname = 'x'\nspeed = 3\n[races.programs]", "races.0.speed: Extra inputs"),
        ("[[races]]\nname = 'x'\n[races.programs]\na = 'x'", "name two programs or more"),
        ("[[races]", "races.toml"),
    ],
)
def test_errors_in_races_toml_are_one_sentence(text, reason, tmp_path, capsys):
    if text is not None:
        (tmp_path / "races.toml").write_text(text)
    with pytest.raises(SystemExit) as end:
        race_module.missing_races(tmp_path)
    assert end.value.code == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert reason in sentence


# === Analysis ===================================================================================
def synthetic_race(*programs):
    """Return a race. Each argument lists the times per iteration of a program, one per round."""
    names = [str(i) for i in range(len(programs))]
    info = {"programs": names, "discarded": 0, "args": {"within": 0.03}}
    turns = [
        races.Turn(turn, program, 10, 10 * seconds)
        for program, times in enumerate(programs)
        for turn, seconds in enumerate(times)
    ]
    return races.Race(info, turns)


def test_outliers_in_a_few_rounds_do_not_change_the_ratio():
    first = np.full(20, 0.1)
    second = 2 * first
    second[[3, 11, 17]] = 5.0
    (ratio,) = synthetic_race(first, second).ratios().values()
    assert ratio == pytest.approx((2, 2, 2))


def test_the_other_programs_are_compared_if_the_first_is_left_out():
    found = synthetic_race([1.0, 1.0], [2.0] * 8, [3.0] * 8)
    assert found.first() == "1"
    assert found.ratios()["2"] == pytest.approx((1.5, 1.5, 1.5))


def test_a_race_ends_after_at_least_ten_rounds_besides_the_discarded():
    """Both programs take exactly the same time, so the ratio is known after a few rounds."""
    rounds = ([races.Turn(turn, x, 1, 1.0) for x in (0, 1)] for turn in range(60))
    runner = SimpleNamespace(steps=None, failure="", folder=Path("none"), number=0)
    interleaved: Any = SimpleNamespace(start=list, rounds=lambda: rounds, runners=[runner] * 2)
    found = races.Race({"programs": ["a", "b"], "discarded": race_module.DISCARDED}, [])
    args = race_module.Args(programs=("a", "b"))
    assert race_module.follow(interleaved, [], found, args, io.StringIO()) == []
    assert len(found.times()) == 10


def test_discarded_rounds_and_missing_programs():
    found = synthetic_race([9, 9, 1, 1, 1, 1, 1, 1], [9, 9, 2, 2, 2, 2, 2, 2, 7], [9, 9, 3])
    found.info["discarded"] = 2
    assert list(found.times().columns) == ["0", "1", "2"]
    ratios = found.ratios()
    assert ratios["1"] == pytest.approx((2, 2, 2))  # ignores the round that program 0 lacks
    assert ratios["2"].estimate == pytest.approx(3) and np.isnan(ratios["2"].low)


def test_half_the_interval_needs_four_times_the_rounds():
    found = synthetic_race(np.ones(12), np.linspace(1, 2, 12))
    found.info["discarded"] = 2
    ratio = found.ratios()["1"]
    width = max(ratio.high / ratio.estimate - 1, 1 - ratio.low / ratio.estimate)
    assert found.turns_needed(width) == pytest.approx(2 + 10)
    assert found.turns_needed(width / 2) == pytest.approx(2 + 4 * 10)


EQUAL = "b and a are equally fast here, to within 3%"
UNCLEAR = "No significant difference between b and a"


@pytest.mark.parametrize(
    ("ratio", "sentence"),
    [
        ((2.0, 1.9, 2.1), "a is 2.00x as fast as b here (95% interval 1.900 to 2.100)."),
        ((0.5, 0.4, 0.625), "b is 2.00x as fast as a here (95% interval 1.600 to 2.500)."),
        ((1.01, 0.98, 1.02), f"{EQUAL} (95% interval 0.980 to 1.020)."),
        ((1.01, 1.005, 1.02), f"{EQUAL} (95% interval 1.005 to 1.020)."),
        ((1.1, 0.9, 1.2), f"{UNCLEAR}: 1.100 (95% interval 0.900 to 1.200)."),
        ((1.1, np.nan, np.nan), "b and a: too few rounds to compare them."),
    ],
)
def test_sentence(ratio, sentence):
    assert races.sentence("b", "a", races.Interval(*ratio), 0.03) == sentence


@pytest.mark.parametrize(
    ("low", "high", "known"), [(1.95, 2.05, True), (1.5, 2.05, False), (1.95, 2.5, False)]
)
def test_a_ratio_is_known_if_both_ends_of_its_interval_are_close(low, high, known):
    assert races.is_known(Interval(2, low, high), 0.03) is known


def normal(rng, n):
    return rng.normal(0, 0.05, n)


def heavy_tails(rng, n):
    return 0.03 * rng.standard_t(2, n)


def bursts(rng, n):
    return rng.normal(0, 0.03, n) + np.where(rng.random(n) < 0.2, rng.normal(0, 1, n), 0)


def drift(rng, n):
    """Log ratios on a machine whose speed is a random walk. The order of programs alternates."""
    speed = np.cumsum(rng.normal(0, 0.02, 2 * n)).reshape(n, 2)
    return (speed[:, 1] - speed[:, 0]) * np.where(np.arange(n) % 2, -1, 1)


@pytest.mark.parametrize("noise", [normal, heavy_tails, bursts, drift])
def test_intervals_cover_the_truth_despite_optional_stopping(noise):
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(120):
        logs = noise(rng, 60)
        for n in range(10, 61):
            ratio = races.ratio_of(pd.Series(2 * np.exp(logs[:n])), pd.Series(np.ones(n)))
            if races.is_known(ratio, 0.03):
                break
        held += ratio.low <= 2 <= ratio.high
    assert held / 120 > 0.89  # 95% minus three standard errors


def test_analysis_draws_a_race(tmp_path):
    rng = np.random.default_rng(0)
    found = synthetic_race(*np.exp(rng.normal(0, 0.1, (3, 12))))
    lines = [found.info, *(turn._asdict() for turn in found.turns)]
    path = tmp_path / "race.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, out, _ = run_command("race", path)
    assert status == 0 and len(out.splitlines()) == 3
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


HEAD = '{"programs": ["a", "b"], "thrown_away": 0, "args": {}}\n'
TURN = '{"turn": 0, "program": 0, "iterations": 1, "seconds": 1}'
STRANGE = ["[]", "{}", "x", '{"turn": 1}', '{"programs": 3}', HEAD + '{"turn": 1}']
STRANGE += [HEAD + TURN.replace("1}", "NaN}"), HEAD + TURN + "\n" + TURN]


@pytest.mark.parametrize("text", STRANGE, ids=range(len(STRANGE)))
def test_a_file_that_race_py_did_not_write_is_an_error(text, tmp_path):
    path = tmp_path / "race.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(SourceError, match="was not written by race"):
        races.read(path)

"""A run that is stopped or killed goes on; what cannot go on is refused, and nothing is unpickled.

The Run log is the same to the letter in all scripts, so here one of JAX and one of PyTorch stand
for all. That each script goes on to the last digit, test_training.py has.
"""

import importlib
import json
import os
import pickle
import random
import shlex
import shutil
import signal
import struct
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, start_process
from running import (
    AGENTS,
    SEED,
    arrays,
    assert_tensorboard_agrees,
    change,
    command,
    info,
    main,
    metrics,
    rewind,
    train,
)
from wandb.proto.wandb_internal_pb2 import Record

BIAS = {"ppo_linen": "train_state/params/params/actor/Dense_2/bias"}
BIAS["ppo_torch"] = "tensors/agent/actor.output.bias"
EACH = pytest.mark.parametrize("name", BIAS)


# === Real processes =============================================================================
@pytest.fixture
def start(tmp_path, compiled):
    """Start scripts in tmp_path; they find compiled what another process has compiled."""
    processes = []

    def start(*command):
        own = {name: x for name, x in os.environ.items() if name not in ("UV", "VIRTUAL_ENV")}
        processes.append(start_process(command, tmp_path, own | compiled))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def count_lines(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(process, folder, count):
    deadline = time.monotonic() + 120
    while process.poll() is None and count_lines(folder) < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("name", "signals"),
    [("ppo_linen", [signal.SIGKILL]), ("ppo_torch", [signal.SIGINT, signal.SIGKILL])],
)
def test_a_run_that_is_stopped_and_killed_ends_as_one_that_is_not(name, signals, start, tmp_path):
    """At any moment; the command that the run prints is run."""
    rng, iterations = random.Random(name), 100
    folder, resumed = tmp_path / "runs/stopped", []
    process = start(*command(name, "stopped", iterations, "--save-every", 7))
    for number in signals:
        wait_for_lines(process, folder, sum(resumed[-1:]) + rng.randrange(8, 40))
        time.sleep(rng.uniform(0, 0.02))
        os.killpg(process.pid, number)  # as Ctrl-C in a terminal
        output, errors = process.communicate(timeout=120)
        done = json.loads(arrays(folder)["info"].item())["iteration"]
        resumed.append(done)
        assert not (folder / "run.json").exists()
        if number == signal.SIGKILL:
            assert process.returncode == -number
            assert 0 <= count_lines(folder) - done < 7 + 1
            assert main(name, "--resume", folder) == 0
        else:
            assert (process.returncode, errors) == (128 + number, "")
            assert count_lines(folder) == done
            *_, said, told = output.splitlines()
            assert said == f"Stopped after {done} iterations. To go on:"
            assert shlex.split(told)[1:] == [f"{ROOT / name}.py", "--resume", "runs/stopped"]
            process = start(*shlex.split(told))
    whole = train(name, tmp_path, "whole", iterations=iterations)
    assert metrics(folder) == metrics(whole)
    run = info(folder)
    assert (run["resumed"], run["iteration"], run["args"]["resume"]) == (resumed, iterations, "")
    assert_tensorboard_agrees(folder)


# === Lines to paste =============================================================================
SHORT = "--num-envs 4 --num-steps 32 --hidden-sizes 8 --update-epochs 1"


def output_of_line(line, start):
    """What a line prints that a run ended with, pasted into a shell."""
    process = start("bash", "-c", line)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


def test_a_script_alone_goes_on_and_shows_its_curves_by_the_lines_that_it_prints(start, tmp_path):
    """In an empty folder; by uv where that is there, as a new user would."""
    shutil.copy(ROOT / "ppo_linen.py", tmp_path)
    runner, python = ["python"], "python"
    if shutil.which("uv"):
        runner = ["uv", "run"]
        python = "uv run --no-project --with-requirements ppo_linen.py python"
    flags = f"{SHORT} --run-name one --total-timesteps {128 * 400}"
    process = start(*runner, "ppo_linen.py", *flags.split())
    while not process.stdout.readline().startswith("iteration"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    told = output.splitlines()[-1]
    assert told == f"{python} ppo_linen.py --resume runs/one"
    told = output_of_line(told, start).splitlines()[-1]
    assert [row["iteration"] for row in metrics(tmp_path / "runs/one")] == list(range(400))
    assert told == f"{python} -m tensorboard.main --logdir runs/one"
    assert "charts/episodic_return" in output_of_line(f"{told} --inspect", start)


def test_an_edited_copy_with_an_environment_of_ones_own_is_played_by_its_last_line(start, tmp_path):
    """From another folder, whose name has a space, as the copy's has."""
    shutil.copy(ROOT / "evaluate.py", tmp_path)
    shutil.copy(ROOT / "tests/probes.py", tmp_path / "mine.py")
    (tmp_path / "my scripts").mkdir()
    shutil.copy(ROOT / "ppo_linen.py", tmp_path / "my scripts/ppo copy.py")
    flags = f"{SHORT} --env-id mine:ProbeSignal --run-name first --total-timesteps 128"
    process = start(sys.executable, "my scripts/ppo copy.py", *flags.split())
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "ppo copy, mine:ProbeSignal, seed 1" in output_of_line(output.splitlines()[-1], start)


def test_a_second_signal_ends_a_run_at_once():
    """Where an iteration hangs, the first one would wait for ever."""
    log: Any = SimpleNamespace(received=0)
    before = signal.getsignal(signal.SIGTERM)
    importlib.import_module("ppo_linen").RunLog.on_signal(log, signal.SIGTERM, None)
    assert (log.received, signal.getsignal(signal.SIGTERM)) == (signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, before)


# === The last iteration =========================================================================
def test_a_stop_in_the_last_iteration_completes_the_run(tmp_path, monkeypatch, capfd):
    """Before its checkpoint, which is the run's only one."""
    log = importlib.import_module("ppo_torch").RunLog
    save = log.save

    def stop_and_save(log, **state):
        signal.raise_signal(signal.SIGTERM)
        save(log, **state)

    monkeypatch.setattr(log, "save", stop_and_save)
    folder = train("ppo_torch", tmp_path, "stopped")
    assert (folder / "run.json").exists()
    assert "Stopped" not in capfd.readouterr().out


@EACH
def test_a_run_that_was_killed_before_run_json_has_only_that_to_write(name, whole_run, tmp_path):
    folder = shutil.copytree(whole_run(name).folder, tmp_path / "killed")
    (folder / "run.json").unlink()
    before = (folder / "metrics.jsonl").read_bytes()
    assert main(name, "--resume", folder) == 0
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert info(folder)["resumed"] == [4]


# === What may lie in a folder ===================================================================
class Attack:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@EACH
def test_what_cannot_go_on_is_refused_in_a_sentence(name, whole_run, tmp_path, capfd):
    """Its checkpoint stays. No sentence says how to load it unsafely, and no code in it runs."""
    folder, attack = rewind(whole_run(name), tmp_path / "killed"), Attack(tmp_path / "attacked")
    path, good = folder / "checkpoint.npz", arrays(folder)
    whole = path.read_bytes()

    def refused(sentence, script=name):
        before = path.read_bytes()
        capfd.readouterr()
        assert main(script, "--resume", folder) == 2
        assert capfd.readouterr().err.endswith(f"{sentence}\n")
        assert path.read_bytes() == before

    other = "ppo_torch" if name == "ppo_linen" else "ppo_linen"
    refused(f"{folder} is a run of {name}.py", other)
    damages = {"ValueError": b"no checkpoint\n", "EOFError": b"", "BadZipFile": whole[:1000]}
    for error, damaged in damages.items():
        path.write_bytes(damaged)
        refused(f"{path} is not there, or is damaged ({error})")

    bias = BIAS[name]
    for name_of_it, array in ((bias, np.zeros(3, "f")), ("another name", good[bias])):
        changed = {name: x for name, x in good.items() if name != bias}
        changed[name_of_it] = array
        np.savez(path, **changed)
        refused(f"{folder} has no {bias} of shape (2,) in its checkpoint")

    objects = np.array([attack, 1], dtype=object)
    for array in ("info", "obs"):
        np.savez(path, allow_pickle=True, **good | {array: objects})
        refused(f"{path} is not there, or is damaged (ValueError)")
    path.write_bytes(pickle.dumps(attack))
    refused(f"{path} is not there, or is damaged (ValueError)")
    assert not attack.path.exists()


# === Weights & Biases ===========================================================================
def wandb_records(path):
    """What W&B's client kept of an offline run, in the format of LevelDB's logs.

    A record is one piece or several. Before each piece stand a checksum of 4 bytes, the length of
    the piece, and whether it is a whole record, its first, a middle or its last piece. The file is
    in blocks, and a piece never goes over the end of one.
    """
    data, place, record = path.read_bytes(), len(":W&B") + 3, b""
    while place < len(data):
        left = 2**15 - place % 2**15  # in the block
        length, kind = struct.unpack_from("<HB", data, place + 4) if left > 6 else (left, 0)
        if kind:
            record += data[place + 7 : place + 7 + length]
        if kind in (1, 4):
            yield Record.FromString(record)
            record = b""
        place += length + 7 if kind else left


def parsed(items):
    return {x.key or x.nested_key[0]: json.loads(x.value_json) for x in items}


def test_wandb_has_a_run_for_the_program_and_one_for_each_agent(whole_run, tmp_path):
    """Under the ids that they had before; an offline folder has all, also from before."""
    folder = rewind(whole_run("ppo_linen_vmap"), tmp_path / "many")
    change(folder, {"track": True}, wandb_id="kept")
    assert main("ppo_linen_vmap", "--resume", folder) == 0
    seeds = range(SEED - AGENTS + 1, SEED + 1)
    folders = {"kept": folder} | {f"kept-{x}": folder / f"seed{x}" for x in seeds}
    files = {x.stem.removeprefix("run-"): x for x in folder.rglob("wandb/offline-run-*/*.wandb")}
    assert files.keys() == folders.keys()
    for run_id, path in folders.items():
        records = list(wandb_records(files[run_id]))
        names = [x.run.display_name for x in records if x.run.display_name]
        assert names[-1] == ("many" if run_id == "kept" else f"many-{path.name}")
        history = [parsed(x.history.item) for x in records if x.history.item]
        assert [row["iteration"] for row in history] == [0, 1, 2, 3]
        for row, logged in zip(history, metrics(path), strict=True):
            assert row.items() >= {name: x for name, x in logged.items() if x is not None}.items()
        config = parsed(y for x in records for y in x.run.config.update)
        own = info(path)
        assert (config["args"], config["resumed"]) == (own["args"], [2])
        summary = parsed(y for x in records for y in x.summary.update)
        assert (summary["status"], summary["durations"]) == ("completed", own["durations"])

"""A run that is stopped or killed at any moment goes on to the same numbers, to the last digit."""

import errno
import fcntl
import importlib
import json
import os
import pickle
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from conftest import ROOT
from frameworks import ALL_SCRIPTS, GYMNASIUM_SCRIPTS, JAX_SCRIPTS
from sections import VMAP_SCRIPTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_server import WandbServer

from analysis.runs import load

SMALL = "--num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 2 --hidden-sizes 8 8"
BATCH = 128


# === Real processes =============================================================================
@pytest.fixture
def start(tmp_path, compiled):
    """Start scripts in tmp_path; they find compiled what another process has compiled."""
    processes = []
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(*command):
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=os.environ | cache,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def command(name, run_name, iterations, *flags):
    sizes = [*SMALL.split(), "--total-timesteps", BATCH * iterations]
    return [sys.executable, ROOT / f"{name}.py", *sizes, "--run-name", run_name, *flags]


def end(process, timeout=120):
    """The exit status, and both outputs, of which none shows a traceback."""
    output, errors = process.communicate(timeout=timeout)
    assert "Traceback" not in output + errors, output + errors
    return process.returncode, output, errors


def wait_for_lines(process, folder, count):
    deadline = time.monotonic() + 120
    while process.poll() is None and count_lines(folder) < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def count_lines(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def metrics(folder):
    """What a run logged, without the durations."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {key: x for key, x in row.items() if not key.startswith("time/") and key != "charts/SPS"}
        for row in rows
    ]


def checkpoint_info(folder):
    with np.load(folder / "checkpoint.npz") as file:
        return json.loads(file["info"].item())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_wrapper_sends_twice_saves(number, start, tmp_path):
    """An iteration op by op takes seconds, in which both come."""
    slow = ("--no-jit", "--num-steps", 128, "--update-epochs", 8)
    process = start(*command("ppo_linen", "twice", 40, *slow))
    wait_for_lines(process, tmp_path / "runs" / "twice", 1)
    for _ in range(2):
        process.send_signal(number)
        time.sleep(0.1)
    assert end(process)[0] == 128 + number
    assert checkpoint_info(tmp_path / "runs" / "twice")["iteration"] >= 1


def test_the_third_signal_ends_at_once(monkeypatch):
    """The second puts back what was there before."""
    script, set_to = importlib.import_module("ppo_linen"), []
    monkeypatch.setattr(signal, "signal", lambda number, handler: set_to.append(handler))
    log = script.RunLog.__new__(script.RunLog)
    before: dict[Any, Any] = {signal.SIGTERM: signal.SIG_IGN}
    log.signals, log.handlers = [], before
    log.stop(signal.SIGTERM, None)
    assert not set_to
    log.stop(signal.SIGTERM, None)
    assert set_to == [signal.SIG_IGN]


GYMNASIUM = [("ppo_linen_gymnasium", "async"), ("ppo_linen_gymnasium", "envpool")]
GYMNASIUM += [(name, "vector") for name in GYMNASIUM_SCRIPTS]


@pytest.mark.parametrize(
    ("name", "vectorization"),
    [*((name, None) for name in (*ALL_SCRIPTS, VMAP_SCRIPTS[0])), *GYMNASIUM],
)
def test_a_run_that_is_stopped_and_killed_ends_as_one_that_is_not(
    name, vectorization, start, tmp_path
):
    """At any moment; the command that the run prints is run."""
    if vectorization == "envpool":
        pytest.importorskip("envpool")
    flags = ["--vectorization", vectorization] if vectorization else []
    flags += ["--num-agents", 2] if name in VMAP_SCRIPTS else []
    rng, iterations = random.Random(f"{name} {vectorization}"), 600 if name in JAX_SCRIPTS else 250
    whole = metrics(train(name, "runs", "whole", *flags, iterations=iterations))
    folder = tmp_path / "runs" / "stopped"
    process = start(*command(name, "stopped", iterations, *flags, "--save-every", 7))
    resumed, how = [], [sys.executable, ROOT / f"{name}.py", "--resume", folder]
    # Ctrl-C in a terminal goes to the whole group: to workers of the compiler, or of Gymnasium.
    asked = [signal.SIGTERM, signal.SIGINT]
    if name != "ppo_torch_compile" and vectorization != "async":
        asked = [rng.choice(asked)]
    for number in rng.sample([signal.SIGKILL, *asked], 1 + len(asked)):
        wait_for_lines(process, folder, sum(resumed[-1:]) + rng.randrange(8, 40))
        time.sleep(rng.uniform(0, 0.02))
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        status, output, errors = end(process)
        done = checkpoint_info(folder)["iteration"]
        if number == signal.SIGKILL:
            assert status == -number
            assert 0 <= count_lines(folder) - done < 7 + 1
        else:
            assert status == 128 + number and not errors
            assert count_lines(folder) == done
            said, _, told = output.splitlines()[-1].partition(" To go on: ")
            assert said == f"Stopped after {done} of {iterations} iterations."
            how = shlex.split(told)
        assert not (folder / "run.json").exists()
        resumed.append(done)
        process = start(*how)
    status, output, errors = end(process)
    assert (status, errors) == (0, "")
    assert metrics(folder) == whole
    agents = sorted(Path("runs", "whole").glob("seed*"))
    assert len(agents) == 2 * (name in VMAP_SCRIPTS)
    assert all(metrics(folder / agent.name) == metrics(agent) for agent in agents)
    assert [row["iteration"] for row in whole] == list(range(iterations))
    info = json.loads((folder / "run.json").read_text())
    assert info["resumed"] == resumed
    assert info["args"]["run_name"] == "stopped" and info["args"]["resume"] is None
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    steps = {event.step for event in events.Tensors("losses/entropy")}
    assert steps == {row["global_step"] for row in whole}


# === In this process ============================================================================
@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def main(name, *flags):
    """Run a script's main(); its exit status."""
    script = importlib.import_module(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script.__file__, *map(str, flags)])
        patch.setattr(threading, "excepthook", threading.excepthook)  # main changes it
        try:
            script.main(script.tyro.cli(script.Args))
        except SystemExit as stopped:
            return stopped.code
    return 0


def train(name, runs_dir, run_name, *flags, iterations=6, stops=None):
    """Train, stopped by SIGTERM in iteration number stops; return the folder."""
    script = importlib.import_module(name)
    write = script.RunLog.write

    def write_and_stop(log, iteration, *args):
        if iteration + 1 == stops:
            signal.raise_signal(signal.SIGTERM)
        return write(log, iteration, *args)

    own = ["--runs-dir", runs_dir, "--run-name", run_name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.RunLog, "write", write_and_stop)
        status = main(name, *command(name, run_name, iterations)[2:], *own, *flags)
    assert status == (0 if stops in (None, iterations) else 128 + signal.SIGTERM)
    return Path(runs_dir, run_name)


def content(folder):
    """All there is in a folder, to see that nothing has changed."""
    paths = sorted(Path(folder).rglob("*"))
    return [(x, x.lstat().st_mtime_ns, x.is_file() and x.read_bytes()) for x in paths]


# === Refusals ===================================================================================
@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A stopped run, and a complete one."""
    folder = tmp_path_factory.mktemp("runs")
    train("ppo_torch", folder, "stopped", stops=4)
    train("ppo_torch", folder, "complete", "--save-every", 2)
    return folder


@pytest.fixture
def stopped(runs, tmp_path):
    return Path(shutil.copytree(runs / "stopped", tmp_path / "stopped"))


@pytest.fixture
def refused(capfd):
    """Resume; check that it ends in one sentence, and that the folder is as it was."""

    def refused(folder, sentence, *flags, name="ppo_torch"):
        before = content(folder)
        capfd.readouterr()
        assert main(name, "--resume", folder, *flags) == 2
        output, errors = capfd.readouterr()
        assert sentence in errors and errors.count("\n") == 1 and not output
        assert content(folder) == before

    return refused


def test_what_cannot_be_resumed(runs, refused, tmp_path):
    refused(runs / "complete", "is complete")
    refused(tmp_path, "checkpoint.npz is no checkpoint of ppo_torch.py: ")
    refused(tmp_path / "missing", "missing/checkpoint.npz is no checkpoint")
    assert not list(tmp_path.iterdir())
    for flags in (["--seed", 1], ["--anneal-lr"], ["--no-track"], ["--seed=2"], ["--resume", 1]):
        refused(runs / "stopped", "no flag may stand beside it", *flags)


def test_a_run_of_another_script(runs, refused, tmp_path):
    """Also of the one whose arrays have the same names."""
    refused(runs / "stopped", "of ppo_linen.py: it is one of ppo_torch.py", name="ppo_linen")
    folder = train("ppo_nnx_cached", tmp_path, "cached", stops=1)
    refused(folder, "of ppo_nnx.py: it is one of ppo_nnx_cached.py", name="ppo_nnx")


def test_a_run_that_is_running_is_left_alone(stopped, refused):
    lock = os.open(stopped, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    refused(stopped, "is in use")
    os.close(lock)


@pytest.mark.parametrize("lines", [None, 0, 3])
def test_metrics_that_are_shorter_than_the_checkpoint(stopped, refused, lines):
    path = stopped / "metrics.jsonl"
    rows = path.read_bytes().splitlines(keepends=True)
    path.unlink()
    if lines is not None:
        path.write_bytes(b"".join(rows[:lines]) + b'{"iteration": 3, "global')
    refused(stopped, "metrics.jsonl")


class Attack:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_strangers_checkpoint_runs_no_code(stopped, refused, tmp_path):
    path, attack = stopped / "checkpoint.npz", Attack(tmp_path / "attacked")
    with np.load(path) as file:
        arrays = dict(file)
    array = np.array([attack, 1], dtype=object)
    attacks: list[Any] = [
        partial(np.savez, path, **arrays | {name: array}) for name in ("info", "obs")
    ]
    attacks += [lambda: path.write_bytes(pickle.dumps(attack))]
    attacks += [lambda: np.save(open(path, "wb"), array)]
    for write in attacks:
        write()
        refused(stopped, "is no checkpoint")
        assert not attack.path.exists()
    np.load(path, allow_pickle=True)
    assert attack.path.exists()  # as it would have, had one of them been unpickled


def rewrite(folder, **changes):
    """Replace arrays of a checkpoint, or parts of its info; None leaves one out."""
    path = folder / "checkpoint.npz"
    with np.load(path) as file:
        arrays = dict(file)
    info = json.loads(arrays["info"].item())
    for name, x in changes.items():
        (arrays if name in arrays else info)[name] = x
    if "info" not in changes:
        arrays["info"] = np.array(json.dumps(info))
    np.savez(path, **{name: x for name, x in arrays.items() if x is not None})


DAMAGES = {
    "empty": lambda file: b"",
    "text": lambda file: b"not a checkpoint\n",
    "cut short by a byte": lambda file: file[:-1],
    "cut short by half": lambda file: file[: len(file) // 2],
    "without its start": lambda file: file[100:],
    "nothing but zeros": lambda file: bytes(len(file)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_no_checkpoint(stopped, refused, damage):
    path = stopped / "checkpoint.npz"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    refused(stopped, "is no checkpoint of ppo_torch.py: ")


def test_a_flipped_bit_is_seen_or_does_no_harm(stopped, capfd):
    """Every byte in turn: a checkpoint that loads has the numbers that were saved."""
    script, path = importlib.import_module("ppo_torch"), stopped / "checkpoint.npz"
    whole = path.read_bytes()
    with np.load(path) as file:
        saved = {name: x for name, x in file.items() if name != "info"}
    _, info, _ = script.load_checkpoint(stopped)
    for i in random.Random(1).sample(range(len(whole)), 500):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :])
        try:
            _, now, loaded = script.load_checkpoint(stopped, saved)
        except SystemExit as refused:
            assert refused.code == 2
            assert "no checkpoint" in capfd.readouterr().err
        else:
            assert now == info and loaded.keys() == saved.keys()
            for name, x in loaded.items():
                np.testing.assert_array_equal(x, saved[name])


@pytest.mark.parametrize(
    "change",
    [
        {"obs": None},
        {"tensors/agent/actor.output.bias": np.zeros(3, "f")},
        {"generators/0": np.zeros(5056, "f")},
        {"obs": np.zeros((4, 3), "f")},
        {"obs": np.zeros((4, 4))},
        {"obs": np.full((4, 4), "x")},
        {"info": None},
        {"info": np.array("{")},
        {"info": np.array("[]")},
        {"info": np.zeros(2)},
        {"args": None},
        {"args": []},
        {"script": None},
        {"iteration": None},
        {"iteration": "3"},
        {"iteration": 3.5},
        {"iteration": -1},
        {"iteration": 5},
        {"iteration": 7},
        {"iteration": 10**30},
        {"resumed": 5},
        {"resumed": None},
    ],
    ids=str,
)
def test_what_a_checkpoint_must_hold(stopped, refused, change):
    rewrite(stopped, **change)
    refused(stopped, f"{stopped}/")


@pytest.mark.parametrize(
    "change",
    [
        {"no_such_flag": 1},
        {"env_id": "CartPole-v7"},
        {"env_id": None},
        {"num_envs": "4"},
        {"num_envs": 4.0},
        {"num_envs": 0},
        {"num_envs": 8},
        {"seed": 1.5},
        {"hidden_sizes": 8},
        {"hidden_sizes": ["8", 8]},
        {"hidden_sizes": [8, 8, 8]},
        {"learning_rate": "x"},
        {"learning_rate": None},
        {"anneal_lr": "no"},
        {"total_timesteps": 10**20},
        {"exp_name": 3},
    ],
    ids=str,
)
def test_the_arguments_of_a_checkpoint(stopped, refused, change):
    rewrite(stopped, args=checkpoint_info(stopped)["args"] | change)
    refused(stopped, f"{stopped}/checkpoint.npz is no checkpoint of ppo_torch.py: ")


# === The same numbers ===========================================================================
class Compilations:
    """How many there were before each RunLog.write, since the one before."""

    def __init__(self, monkeypatch, name):
        script = importlib.import_module(name)
        write, self.count, self.counts = script.RunLog.write, 0, []

        def watched(log, *args):
            self.counts.append(self.count)
            save = write(log, *args)
            self.count = 0
            return save

        monkeypatch.setattr(script.RunLog, "write", watched)
        jax.monitoring.register_event_duration_secs_listener(self.on_event)
        torch._dynamo.utils.counters.clear()

    def on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("ppo_linen", "--env-id Breakout-MinAtar"),  # booleans and integers
        ("ppo_nnx", "--env-id MountainCar-v0"),  # whose state is weakly typed when it is reset
        ("ppo_nnx_cached", "--no-anneal-lr"),
        ("ppo_equinox", "--env-id Breakout-MinAtar"),
        ("ppo_torch", "--env-id MountainCar-v0 --no-anneal-lr"),
        ("ppo_torch", "--env-id Breakout-MinAtar"),
        ("ppo_torch_compile", "--env-id Breakout-MinAtar"),
    ],
)
def test_a_resumed_run_is_the_same_and_compiles_nothing_twice(name, flags, tmp_path, monkeypatch):
    whole = train(name, tmp_path, "whole", *flags.split())
    stopped = train(name, tmp_path, "stopped", *flags.split(), "--save-every", 2, stops=3)
    assert checkpoint_info(stopped)["iteration"] == 3
    compilations = Compilations(monkeypatch, name)
    assert main(name, "--resume", stopped) == 0
    assert metrics(stopped) == metrics(whole)
    first, *rest = compilations.counts
    assert first > 0 and rest == [0, 0]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 2 * (name == "ppo_torch_compile")
    assert metrics(whole)[0]["losses/entropy"] != metrics(whole)[3]["losses/entropy"]


def test_a_resumed_state_is_committed_to_its_device(tmp_path, monkeypatch):
    """As actions by DLPack are, on a GPU: one that is not would compile the step twice."""
    script, compiled = importlib.import_module("ppo_torch"), []
    stopped = train("ppo_torch", tmp_path, "stopped", stops=3)

    def on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(kwargs["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(on_event)
    monkeypatch.setattr(script, "to_jax", jax.dlpack.from_dlpack)
    assert main("ppo_torch", "--resume", stopped) == 0
    assert compiled.count("jit(step)") == 1


@pytest.mark.parametrize("name", ["ppo_nnx_cached", "ppo_torch"])
def test_op_by_op(name, tmp_path):
    """A checkpoint's arrays are NumPy's, whose own operations could have other last digits."""
    flags = ["--no-jit-env" if name == "ppo_torch" else "--no-jit", "--num-steps", "2"]
    flags += ["--update-epochs", "1", "--total-timesteps", "16"]
    whole = train(name, tmp_path, "whole", *flags)
    stopped = train(name, tmp_path, "stopped", *flags, stops=1)
    assert main(name, "--resume", stopped) == 0
    assert metrics(stopped) == metrics(whole)


@pytest.mark.parametrize("save_every", [1, 4, 6, 100])
def test_checkpoints_change_nothing(save_every, tmp_path):
    """Without the flag, and without a stop, the only one is that of the last iteration."""
    whole = train("ppo_torch", tmp_path, "whole")
    saved = train("ppo_torch", tmp_path, "saved", "--save-every", save_every)
    assert metrics(saved) == metrics(whole)
    arrays = [np.load(folder / "checkpoint.npz") for folder in (whole, saved)]
    assert arrays[0].files == arrays[1].files
    for name in set(arrays[0].files) - {"info"}:
        np.testing.assert_array_equal(arrays[0][name], arrays[1][name])


def test_a_stop_in_the_last_iteration_completes_the_run(tmp_path, capfd):
    folder = train("ppo_torch", tmp_path, "stopped", stops=6)
    assert (folder / "run.json").exists()
    assert "Stopped" not in capfd.readouterr().out


def test_killed_before_run_json(tmp_path):
    """After the last checkpoint there is nothing to train, only run.json to write."""
    folder = train("ppo_torch", tmp_path, "killed")
    (folder / "run.json").unlink()
    (folder / "run.partial").write_text("{")
    before = (folder / "metrics.jsonl").read_bytes()
    assert main("ppo_torch", "--resume", folder) == 0
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert json.loads((folder / "run.json").read_text())["resumed"] == [6]
    assert not list(folder.glob("*.partial"))


def test_the_newer_of_two_checkpoints_is_cut_short(tmp_path):
    whole = train("ppo_torch", tmp_path, "whole")
    folder = train("ppo_torch", tmp_path, "killed", "--save-every", 2, stops=3)
    checkpoint = (folder / "checkpoint.npz").read_bytes()
    (folder / "checkpoint.partial").write_bytes(checkpoint[: len(checkpoint) // 2])
    (folder / "metrics.partial").write_bytes(b'{"iteration": 0')
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 3, "a row that was": "logged after it"}\n{"iteration": 4, "and a')
    assert main("ppo_torch", "--resume", folder) == 0
    assert metrics(folder) == metrics(whole)
    assert not list(folder.glob("*.partial"))


def test_killed_while_a_checkpoint_is_written(start, tmp_path):
    """A wide network and --save-every 1: checkpoint.partial is there most of the time."""
    wide = ["--hidden-sizes", 512, 512, "--save-every", 1]
    whole = train("ppo_torch", tmp_path, "whole", *wide, iterations=12)
    process, folder = start(*command("ppo_torch", "killed", 12, *wide)), tmp_path / "runs/killed"
    while not all((folder / f"checkpoint.{x}").exists() for x in ("npz", "partial")):
        assert process.poll() is None
    process.kill()
    assert end(process)[0] == -signal.SIGKILL
    assert 0 < checkpoint_info(folder)["iteration"] < 12
    assert main("ppo_torch", "--resume", folder) == 0
    assert metrics(folder) == metrics(whole)


# === What is in the way =========================================================================
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_leaves_the_older_checkpoint(number, tmp_path, monkeypatch, capfd):
    whole = train("ppo_torch", tmp_path, "whole")
    script, calls = importlib.import_module("ppo_torch"), []
    replace_file = script.replace_file

    def full(path, content):
        calls.append(path)
        if len(calls) == 3:
            path.with_suffix(".partial").write_bytes(content[:1000])
            raise OSError(number, os.strerror(number))
        replace_file(path, content)

    monkeypatch.setattr(script, "replace_file", full)
    capfd.readouterr()
    flags = ["--run-name", "full", "--save-every", 1, "--runs-dir", tmp_path]
    assert main("ppo_torch", *command("ppo_torch", "full", 6)[2:], *flags) == 2
    errors = capfd.readouterr().err
    assert errors.count("\n") == 1 and str(tmp_path) in errors and "--resume" in errors
    assert checkpoint_info(tmp_path / "full")["iteration"] == 2
    shutil.copytree(tmp_path / "full", tmp_path / "room")  # the lock goes with the process
    assert main("ppo_torch", "--resume", tmp_path / "room") == 0
    assert metrics(tmp_path / "room") == metrics(whole)


def test_a_limit_in_mid_run_is_one_sentence(start, tmp_path):
    """Its first victims are TensorBoard's thread, and what it still tries to write at the end."""
    flags = ["--hidden-sizes", 8, "--save-every", 1]
    process = start(*command("ppo_torch", "full", 60, *flags))
    wait_for_lines(process, tmp_path / "runs/full", 5)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (50_000, 50_000))
    status, _, errors = end(process)
    assert status == 2 and errors.count("\n") == 1 and "File too large" in errors
    assert main("ppo_torch", "--resume", tmp_path / "runs/full") == 0
    whole = train("ppo_torch", tmp_path, "whole", *flags, iterations=60)
    assert metrics(tmp_path / "runs/full") == metrics(whole)


def test_a_tiny_disk(start, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=80k", "tmpfs", disk]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk, and not in every container")
    try:
        flags = ["--hidden-sizes", 8, "--save-every", 1]
        process = start(*command("ppo_torch", "full", 60, *flags, "--runs-dir", disk))
        status, _, errors = end(process)
        assert status == 2 and errors.count("\n") == 1 and "No space left" in errors
        subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
        assert main("ppo_torch", "--resume", disk / "full") == 0
        whole = train("ppo_torch", tmp_path, "whole", *flags, iterations=60)
        assert metrics(disk / "full") == metrics(whole)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_links_in_a_strangers_folder_lead_nowhere(tmp_path):
    """What they point to is read at most; with the script's own files, they are replaced."""
    whole = train("ppo_torch", tmp_path, "whole")
    folder, precious = train("ppo_torch", tmp_path, "stranger", stops=3), tmp_path / "precious"
    precious.mkdir()
    for name in ("checkpoint.partial", "metrics.partial", "run.partial"):
        (precious / name).write_text("precious")
        (folder / name).symlink_to(precious / name)
    for name in ("metrics.jsonl", "checkpoint.npz"):
        (folder / name).rename(precious / name)
        (folder / name).symlink_to(precious / name)
    (folder / "run.json").symlink_to(precious / "run.json")  # which is not there
    before = content(precious)
    assert main("ppo_torch", "--resume", folder) == 0
    assert content(precious) == before
    assert metrics(folder) == metrics(whole)
    assert not any(path.is_symlink() for path in folder.iterdir())


def test_the_folder_may_be_moved_and_named_in_any_way(tmp_path, monkeypatch, capfd):
    whole = train("ppo_torch", tmp_path, "whole")
    train("ppo_torch", "runs of 'mine'", "first", stops=3)
    told = capfd.readouterr().out.splitlines()[-1].partition("To go on: ")[2]
    assert shlex.split(told)[2:] == ["--resume", "runs of 'mine'/first"]
    (tmp_path / "elsewhere ü").mkdir()
    folder = Path("runs of 'mine'/first").rename(tmp_path / "elsewhere ü" / "second run")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "nowhere").mkdir()
    for cwd, name in [
        (tmp_path, "elsewhere ü/second run/"),
        (tmp_path, "link"),
        (folder, "."),
        (tmp_path / "nowhere", "../elsewhere ü//second run"),
        (tmp_path / "nowhere", folder),
    ]:
        copy = shutil.copytree(folder, tmp_path / "copy")
        monkeypatch.chdir(cwd)
        assert main("ppo_torch", "--resume", name) == 0
        assert metrics(folder) == metrics(whole)
        assert json.loads((folder / "run.json").read_text())["args"]["run_name"] == "first"
        shutil.rmtree(folder)
        copy.rename(folder)
    assert not list((tmp_path / "nowhere").iterdir())


def test_nobody_reads_the_output(start, tmp_path):
    """As with `| head`: one sentence, in place of a traceback."""
    process = start(*command("ppo_torch", "head", 1000, "--hidden-sizes", 8))
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 2
    errors = process.stderr.read()
    assert "Broken pipe" in errors and errors.count("\n") == 1


@pytest.mark.parametrize("delay", [0.5, 1, 2, 3])
def test_ctrl_c_in_the_imports_and_the_set_up_shows_no_traceback(start, delay):
    process = start(*command("ppo_torch", "early", 100_000))
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    status, _, errors = end(process)
    assert status in (-signal.SIGINT, 128 + signal.SIGINT) and not errors


@pytest.mark.parametrize("flags", [[], ["--track"]])
def test_ctrl_c_again_and_again_shows_no_traceback(start, tmp_path, flags):
    process = start(*command("ppo_torch", "impatient", 100_000, *flags))
    wait_for_lines(process, tmp_path / "runs/impatient", 3)
    for delay in np.geomspace(1e-3, 0.1, 20):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(delay)
    status, _, errors = end(process)
    assert status in (-signal.SIGINT, 128 + signal.SIGINT)
    assert "Exception" not in errors and "KeyboardInterrupt" not in errors


@pytest.mark.parametrize("flags", [["--runs-dir", "runs\udcff"], ["--run-name", "run\udcff"]])
def test_names_that_cannot_be_encoded(tmp_path, flags, capfd):
    assert main("ppo_torch", *SMALL.split(), "--total-timesteps", BATCH, *flags) == 2
    assert "Traceback" not in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["x" * 300, "loop", "file", ""])
def test_folders_that_are_none(tmp_path, folder, capfd):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    assert main("ppo_torch", "--resume", folder) == 2
    errors = capfd.readouterr().err
    assert "is no checkpoint of ppo_torch.py: " in errors and errors.count("\n") == 1
    assert len(list(tmp_path.iterdir())) == 2


# === Weights & Biases ===========================================================================
@pytest.fixture
def server(tmp_path, monkeypatch):
    server = WandbServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()


def history_of(run):
    """The rows that a server has, by iteration; of those with the same one, the later counts."""
    return {row["iteration"]: row for row in map(json.loads, run["history"])}


def check_run(run, folder, resumed):
    assert run["state"] == "finished"
    rows, history = metrics(folder), history_of(run)
    assert sorted(history) == list(range(len(rows)))
    for row in rows:
        for key, x in row.items():
            assert history[row["iteration"]].get(key) == x
    config = {name: x["value"] for name, x in json.loads(run["config"]).items() if name[0] != "_"}
    info, summary = json.loads((folder / "run.json").read_text()), json.loads(run["summary"])
    assert config["resumed"] == resumed == info["resumed"]
    assert config["args"] == info["args"] and config["framework"] == "linen"
    assert (summary["status"], summary["iteration"]) == ("completed", len(rows) - 1)
    assert summary["durations"]["total"] == info["durations"]["total"]


def test_wandb_online_has_every_iteration_once(start, server, tmp_path, monkeypatch):
    """Also those before the checkpoint that a kill -9 let W&B's client not send any more."""
    monkeypatch.setenv("WANDB_MODE", "online")
    folder, how = tmp_path / "runs/online", [sys.executable, ROOT / "ppo_linen.py", "--resume"]
    resumed = []
    process = start(*command("ppo_linen", "online", 500, "--track", "--save-every", 10))
    for number in (signal.SIGTERM, signal.SIGKILL):
        wait_for_lines(process, folder, sum(resumed) + 50)
        process.send_signal(number)
        assert end(process)[0] == (-number if number == signal.SIGKILL else 128 + number)
        resumed.append(checkpoint_info(folder)["iteration"])
        process = start(*how, folder)
    assert end(process)[0] == 0
    ((run_id, run),) = server.runs.items()
    check_run(run, folder, resumed)
    assert len(run["history"]) == 500
    assert json.loads((folder / "run.json").read_text())["wandb_id"] == run_id


def test_wandb_offline_leaves_folders_of_one_run(start, server, tmp_path, monkeypatch):
    folder, how = tmp_path / "runs/offline", [sys.executable, ROOT / "ppo_linen.py", "--resume"]
    process = start(*command("ppo_linen", "offline", 500, "--track", "--save-every", 10))
    wait_for_lines(process, folder, 50)
    process.kill()
    assert end(process)[0] == -signal.SIGKILL
    done = checkpoint_info(folder)["iteration"]
    assert end(start(*how, folder))[0] == 0
    folders = sorted(folder.glob("wandb/offline-run-*"))
    assert len(folders) == 2 and len({path.name.split("-")[-1] for path in folders}) == 1
    for path in folders:
        assert end(start(sys.executable, "-m", "wandb", "sync", path))[0] == 0
    (run,) = server.runs.values()
    check_run(run, folder, [done])


def test_wandb_has_a_run_for_the_program_and_one_for_each_agent(
    start, server, tmp_path, monkeypatch
):
    """All go on under the ids that they had."""
    monkeypatch.setenv("WANDB_MODE", "online")
    folder, flags = tmp_path / "runs/many", ("--num-agents", 2, "--track", "--save-every", 10)
    process = start(*command("ppo_linen_vmap", "many", 200, *flags))
    wait_for_lines(process, folder, 30)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 128 + signal.SIGTERM
    done = checkpoint_info(folder)["iteration"]
    assert end(start(sys.executable, ROOT / "ppo_linen_vmap.py", "--resume", folder))[0] == 0
    (program, *_) = server.runs
    folders = {program: folder} | {f"{program}-{x}": folder / f"seed{x}" for x in (1, 2)}
    assert server.runs.keys() == folders.keys()
    for run_id, path in folders.items():
        check_run(server.runs[run_id], path, [done])
    names = {server.runs[run_id]["name"] for run_id in folders}
    assert names == {"many", "many-seed1", "many-seed2"}
    data = load("wandb:team/project")
    assert data.runs["agent"].tolist() == [0, 1] and not data.left_out

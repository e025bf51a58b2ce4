"""Stopped, killed and finished runs can be resumed. No code in a run folder is executed.

The Run log section is identical in all scripts, so one script per framework is enough.
test_training.py tests that every PPO script resumes exactly.
"""

import errno
import importlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, start_process
from frameworks import weights_in
from running import (
    AGENTS,
    BATCH,
    SEED,
    arrays,
    assert_same_checkpoints,
    assert_tensorboard_agrees,
    change,
    checkpoints,
    command,
    content,
    info,
    main,
    metrics,
    op_by_op,
    parse,
    rewind,
    rows,
    stop,
    train,
)
from sections import PPO_SCRIPTS, ROWS, read
from wandb.proto.wandb_internal_pb2 import Record

EACH = pytest.mark.parametrize("name", ["ppo_linen", "ppo_torch"])


# === Real processes =============================================================================
@pytest.fixture
def start(tmp_path, compiled):
    """Return a function that starts scripts in tmp_path, with the shared compilation cache."""
    processes = []

    def start(*command):
        processes.append(start_process(command, tmp_path, os.environ | compiled))
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
    [
        ("ppo_linen", [signal.SIGKILL, signal.SIGTERM]),
        ("ppo_torch", [signal.SIGINT, signal.SIGKILL]),
    ],
)
def test_stopping_and_killing_a_run_does_not_change_its_result(name, signals, start, tmp_path):
    """The signals arrive at random moments."""
    rng, iterations = random.Random(name), 100
    folder, resumed = tmp_path / "runs/stopped", []
    words = command(name, "stopped", iterations, "--save-every", 7)
    for number in signals:
        process = start(*words)
        wait_for_lines(process, folder, sum(resumed[-1:]) + rng.randrange(10, 40))
        time.sleep(rng.uniform(0, 0.02))
        os.killpg(process.pid, number)  # signals the process group, as Ctrl-C does
        output, errors = process.communicate(timeout=120)
        done = int(arrays(folder)["iteration"]) if checkpoints(folder) else 0
        said = info(folder)
        assert said["iteration"] == done
        if number == signal.SIGKILL:
            assert (process.returncode, said["status"]) == (-number, "running")
            assert 0 <= count_lines(folder) - done < 7 + 1
        else:
            assert (process.returncode, said["status"], errors) == (128 + number, "stopped", "")
            assert count_lines(folder) == done
            assert "--resume runs/stopped" in output.splitlines()[-1]
        resumed.append(done)
        words = [*words[:2], "--resume", "runs/stopped"]
    assert main(name, "--resume", folder) == 0
    assert metrics(folder) == metrics(train(name, tmp_path, "whole", iterations=iterations))
    run = info(folder)
    assert (run["status"], run["resumed"]) == ("completed", resumed)
    assert_tensorboard_agrees(folder)


def test_a_second_process_in_a_run_folder_is_refused(start, tmp_path):
    words = command("ppo_torch", "run", 10_000, "--save-every", 1)
    first = start(*words)
    wait_for_lines(first, tmp_path / "runs/run", 3)
    before = info(tmp_path / "runs/run")["started"]
    second = start(*words[:2], "--resume", "runs/run")
    _, errors = second.communicate(timeout=120)
    assert (second.returncode, errors) == (2, "Another process is training in runs/run\n")
    assert info(tmp_path / "runs/run")["started"] == before
    assert first.poll() is None


def test_a_closed_terminal_does_not_end_the_training(tmp_path, compiled):
    terminal, process_side = os.openpty()
    words = [*map(str, command("ppo_torch", "run", 50)), "--runs-dir", str(tmp_path)]
    options: dict[str, Any] = {"stdout": process_side, "stderr": process_side}
    process = subprocess.Popen(words, env=os.environ | compiled, start_new_session=True, **options)
    os.close(process_side)
    os.read(terminal, 1)
    os.close(terminal)
    assert process.wait(timeout=120) == 0
    assert info(tmp_path / "run")["status"] == "completed"


def test_a_run_does_not_fail_if_nobody_reads_its_output(start, tmp_path):
    """Ctrl-C in `python ppo_torch.py | tee log.txt` ends tee before the training."""
    process = start(*command("ppo_torch", "run", 50))
    process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=120)
    assert (process.returncode, process.stderr.read()) == (0, "")
    assert info(tmp_path / "runs/run")["status"] == "completed"


# === Signals ====================================================================================
@pytest.mark.parametrize("moment", ["write", "must_save", "update_info"])
def test_a_stop_at_any_moment_ends_with_a_checkpoint(moment, tmp_path, monkeypatch):
    """The signal arrives in an iteration, after must_save() returned False, or during saving."""
    log = importlib.import_module("ppo_torch").RunLog
    original = getattr(log, moment)
    calls = []

    def interrupted(log, *args, **changes):
        value = original(log, *args, **changes)
        calls.append(args)
        if len(calls) == 2:
            stop(log)
        return value

    monkeypatch.setattr(log, moment, interrupted)
    flags = command("ppo_torch", "run", 8, "--runs-dir", tmp_path, "--save-every", 3)[2:]
    assert main("ppo_torch", *flags) == 128 + signal.SIGTERM
    folder = tmp_path / "run"
    done = {"write": 2, "must_save": 3, "update_info": 3}[moment]
    assert (len(rows(folder)), int(arrays(folder)["iteration"])) == (done, done)
    assert (info(folder)["iteration"], info(folder)["status"]) == (done, "stopped")


def test_a_stop_in_the_last_iteration_completes_the_run(tmp_path, monkeypatch):
    log = importlib.import_module("ppo_torch").RunLog
    write = log.write

    def write_and_stop(log, *args):
        write(log, *args)
        stop(log)

    monkeypatch.setattr(log, "write", write_and_stop)
    assert info(train("ppo_torch", tmp_path, "run", iterations=1))["status"] == "completed"


def test_a_second_signal_ends_the_process(start, tmp_path):
    """The process does not finish the iteration, which may be long."""
    process = start(*command("ppo_torch", "run", 10_000, "--num-steps", 2**14))
    assert process.stdout.readline().startswith("Writing to runs/run.")
    for _ in range(120):  # signals that arrive during compilation count as one
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        if process.poll() is not None:
            break
    assert process.returncode == -signal.SIGTERM


def test_a_diverged_run_that_was_stopped_has_the_status_diverged(tmp_path):
    script = importlib.import_module("ppo_torch")
    log = script.RunLog(script.Args(runs_dir=str(tmp_path), run_name="run"), 0, [])
    log.has_diverged = True
    stop(log)
    with pytest.raises(SystemExit):
        log.close()
    assert info(tmp_path / "run")["status"] == "diverged"


def test_an_imported_script_sets_no_signal_handlers(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train("ppo_torch", tmp_path, "run", iterations=1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# === Files ======================================================================================
def test_missing_lines_do_not_duplicate_iterations(whole_run, tmp_path, monkeypatch):
    folder = rewind(whole_run("ppo_torch"), tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[2:]))
    op_by_op(monkeypatch, importlib.import_module("ppo_torch"))
    assert main("ppo_torch", "--resume", folder) == 0
    assert [row["iteration"] for row in rows(folder)] == [2, 3, 4]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def lockf(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "lockf", lockf)
    assert info(train("ppo_torch", tmp_path, "run", iterations=1))["status"] == "completed"


# === Changed arguments ==========================================================================
def test_the_arguments_of_a_run_are_the_defaults_when_it_resumes(whole_run, tmp_path):
    folder = shutil.copytree(whole_run("ppo_linen").folder, tmp_path / "run")
    args = parse("ppo_linen", "--resume", folder, "--total-timesteps", 1024)
    assert (args.seed, args.hidden_sizes, args.num_envs) == (SEED, (8, 8), 4)
    assert (args.total_timesteps, args.num_iterations) == (1024, 8)


@EACH
@pytest.mark.parametrize(("space", "before"), [("obs_shape", [3]), ("num_actions", 5)])
def test_a_changed_environment_is_refused(name, space, before, whole_run, tmp_path, capfd):
    folder = rewind(whole_run(name), tmp_path / "run")
    now = info(folder)[space]
    change(folder, **{space: before})
    files = content(folder)
    capfd.readouterr()
    assert main(name, "--resume", folder) == 2
    said = f"--resume: {space} is now {now}, but was {before} when the run started\n"
    assert capfd.readouterr().err == said
    assert content(folder) == files


def resumed(name, run, folder, monkeypatch, *flags):
    """Resume the run after its second iteration, with flags. Return the metrics."""
    rewind(run, folder)
    op_by_op(monkeypatch, importlib.import_module(name))
    assert main(name, "--resume", folder, *flags) == 0
    assert metrics(folder)[:2] == metrics(run.folder)[:2]
    return metrics(folder)


@EACH
@pytest.mark.parametrize(
    ("flags", "factors"),
    [
        (["--total-timesteps", 8 * BATCH], [1 - i / 8 for i in range(2, 8)]),
        (["--no-anneal-lr"], [1, 1, 1]),
    ],
)
def test_the_learning_rate_follows_the_new_schedule(
    name, flags, factors, whole_run, tmp_path, monkeypatch
):
    found = resumed(name, whole_run(name), tmp_path / "run", monkeypatch, *flags)
    rates = [row["charts/learning_rate"] for row in found[2:]]
    assert rates == pytest.approx([2.5e-4 * x for x in factors])


@pytest.mark.parametrize(
    "flags",
    ["--gamma 0.5", "--gae-lambda 0.5", "--clip-coef 0.001", "--ent-coef 1", "--vf-coef 0.1"],
)
def test_changed_loss_flags_apply_from_the_resumed_iteration(
    flags, whole_run, tmp_path, monkeypatch
):
    """The rollout of the resumed iteration is unchanged."""
    run = whole_run("ppo_torch")
    found = resumed("ppo_torch", run, tmp_path / "run", monkeypatch, *flags.split())[2]
    expected = metrics(run.folder)[2]
    differing = {key.split("/")[0] for key, x in found.items() if x != expected[key]}
    assert differing == {"losses"}


@EACH
def test_a_new_seed_changes_the_random_numbers_only_in_jax(name, whole_run, tmp_path, monkeypatch):
    """The PyTorch generator continues from the checkpoint."""
    run = whole_run(name)
    found = resumed(name, run, tmp_path / "run", monkeypatch, "--seed", 5)
    assert (found == metrics(run.folder)) == (name == "ppo_torch")


@EACH
def test_other_flags_change_neither_result_nor_folder(name, whole_run, tmp_path, monkeypatch):
    run = whole_run(name)
    flags = ["--save-every", "1", "--no-sync-for-timing", "--matmul-precision", "highest"]
    flags += ["--run-name", "other", "--runs-dir", tmp_path / "elsewhere"]
    found = resumed(name, run, tmp_path / "run", monkeypatch, *flags)
    assert found == metrics(run.folder)
    assert_same_checkpoints(tmp_path / "run", run.folder)
    assert [x.name for x in tmp_path.iterdir()] == ["run"]


# In PyTorch, checkpoints contain a learning rate, which resuming must replace. In JAX, they do not.
TRAINED_ON = [name for name in PPO_SCRIPTS if ROWS[name]["framework"] == "torch"]
TRAINED_ON += ["ppo_linen", "ppo_nnx", "ppo_equinox"]


@pytest.mark.parametrize("name", TRAINED_ON)
def test_a_complete_run_continues_at_a_new_learning_rate(name, whole_run, tmp_path, monkeypatch):
    """The new learning rate is so small that Adam cannot change a weight."""
    run = whole_run(name).folder
    folder = shutil.copytree(run, tmp_path / "run")
    op_by_op(monkeypatch, importlib.import_module(name))
    flags = ["--total-timesteps", 8 * BATCH, "--learning-rate", 1e-30]
    assert main(name, "--resume", folder, *flags) == 0
    places = [path.parent.relative_to(run) for path in run.rglob("metrics.jsonl")]
    for place in places:
        assert metrics(folder / place)[:5] == metrics(run / place)
        rates = [row["charts/learning_rate"] for row in rows(folder / place)[5:]]
        anneal_lr = info(run)["args"]["anneal_lr"]
        expected = [1e-30 * (1 - i / 8 if anneal_lr else 1) for i in (5, 6, 7)]
        assert rates == pytest.approx(expected, rel=1e-5, abs=0)
        assert_tensorboard_agrees(folder / place)
        before, after = info(run / place), info(folder / place)
        assert (after["status"], after["iteration"], after["resumed"]) == ("completed", 8, [5])
        given = {"total_timesteps": 8 * BATCH, "learning_rate": 1e-30, "runs_dir": "", "resume": ""}
        assert after["args"] | given == before["args"] | given
        assert (after["args"]["total_timesteps"], after["args"]["learning_rate"]) == (1024, 1e-30)
    place = max(places)  # the last agent, if there are many
    before, after = weights_in(run / place), weights_in(folder / place)
    for network, layers in before.items():
        for layer, same in zip(layers, after[network], strict=True):
            for x, y in zip(layer, same, strict=True):
                np.testing.assert_allclose(y, x, rtol=0, atol=1e-20)


# In eager PyTorch, checkpoints also contain the optimizer hyperparameters, such as epsilon.
EAGER = [name for name in TRAINED_ON if "scheduler.step()" in read(name)]


@pytest.mark.parametrize("name", EAGER)
def test_a_resumed_run_uses_a_new_adam_epsilon(name, whole_run, tmp_path, monkeypatch):
    """The new epsilon is so large that Adam cannot change a weight."""
    run = whole_run(name)
    folder = rewind(run, tmp_path / "run")
    op_by_op(monkeypatch, importlib.import_module(name))
    assert main(name, "--resume", folder, "--adam-eps", 1e30) == 0
    before = arrays(run.saved / "2")
    for place, x in arrays(folder).items():
        if place.startswith("agent/"):
            np.testing.assert_array_equal(x, before[place], err_msg=place)


# Arguments that define the environment, the arrays in a checkpoint, or the PPO schedule.
CANNOT_CHANGE = {"env_id", "image_size", "channels_first", "feed_back"}
CANNOT_CHANGE |= {"num_envs", "num_steps", "num_agents", "buffer_size", "optimizer"}
CANNOT_CHANGE |= {"hidden_sizes", "gru_hidden_size"}
CANNOT_CHANGE |= {"conv_channels", "conv_kernels", "conv_strides"}
CANNOT_CHANGE |= {"num_minibatches", "update_epochs"}


@pytest.mark.parametrize("name", ROWS)
def test_flags_that_a_checkpoint_depends_on_cannot_change(name, tmp_path, capsys):
    script = importlib.import_module(name)
    old = script.Args(resume=str(tmp_path))
    (tmp_path / "run.json").write_text(json.dumps({"script": name, "args": asdict(old)}))
    for argument in CANNOT_CHANGE & asdict(old).keys():
        changed = copy(old)
        setattr(changed, argument, "other")
        with pytest.raises(SystemExit) as stopped:
            script.has_checkpoint(changed)
        value = getattr(old, argument)
        assert stopped.value.code == 2
        assert capsys.readouterr().err == f"--resume cannot change {argument}, which is {value!r}\n"


@EACH
def test_a_run_without_a_checkpoint_starts_over(name, whole_run, tmp_path, monkeypatch, capsys):
    run = whole_run(name)
    folder = rewind(run, tmp_path / "killed")
    (path,) = folder.glob("checkpoint.*")
    path.unlink()
    change(folder, iteration=0)
    op_by_op(monkeypatch, importlib.import_module(name))
    assert main(name, "--resume", folder) == 0
    assert "has no checkpoint, so training starts over" in capsys.readouterr().out
    assert metrics(folder) == metrics(run.folder)
    assert_same_checkpoints(folder, run.folder)


# === A full disk ================================================================================
@contextmanager
def full_disk():
    """Simulate a full disk: limit the size of each file to 1000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


FRAMEWORKS = ("ppo_linen", "ppo_nnx", "ppo_equinox", "ppo_torch")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_full_disk_keeps_the_previous_checkpoint(name, whole_run, tmp_path, monkeypatch):
    run = whole_run(name)
    folder = rewind(run, tmp_path / "run")
    script = importlib.import_module(name)
    save = script.save_checkpoint

    def fill_and_save(*args):
        with full_disk():
            save(*args)

    monkeypatch.setattr(script, "save_checkpoint", fill_and_save)
    with pytest.raises((OSError, RuntimeError)) as raised:
        main(name, "--resume", folder)
    assert "File too large" in f"{raised.value} {raised.value.__context__}"
    (folder / "checkpoint.new").unlink()
    assert_same_checkpoints(folder, run.saved / "2")
    assert (info(folder)["iteration"], info(folder)["status"]) == (2, "running")


# === Code in a run folder =======================================================================
class Attack:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_code_in_a_checkpoint_is_not_executed(name, whole_run, tmp_path):
    """Try a plain pickle, the two formats of PyTorch, and the NumPy format of Equinox."""
    folder, attack = rewind(whole_run(name), tmp_path / "run"), Attack(tmp_path / "attacked")
    (path,) = folder.glob("checkpoint.*")
    contents = [io.BytesIO(pickle.dumps(attack)), io.BytesIO(), io.BytesIO(), io.BytesIO()]
    torch.save({"agent": attack}, contents[1])
    torch.save({"agent": attack}, contents[2], _use_new_zipfile_serialization=False)
    np.save(contents[3], np.array([attack], dtype=object), allow_pickle=True)
    for written in contents:
        path.write_bytes(written.getvalue())
        with pytest.raises(Exception):  # noqa: B017  (the type depends on the library)
            importlib.import_module(name).load_policy(folder)
        with pytest.raises(Exception):  # noqa: B017
            main(name, "--resume", folder)
    assert not attack.path.exists()
    pickle.loads(contents[0].getvalue())
    assert attack.path.exists()


# === Weights & Biases ===========================================================================
def wandb_records(path):
    """Yield the records of an offline W&B run, which has the format of LevelDB logs.

    A record has one or several pieces. Each piece starts with a checksum of 4 bytes, its length,
    and its kind: entire record, first, middle or last piece. The file consists of blocks, and no
    piece crosses the end of a block.
    """
    data, place, record = path.read_bytes(), len(":W&B") + 3, b""
    while place < len(data):
        left = 2**15 - place % 2**15  # bytes left in the block
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
    """A resumed run keeps the ids of its W&B runs."""
    folder = rewind(whole_run("ppo_linen_vmap"), tmp_path / "many")
    folders = {"kept": folder}
    for seed in range(SEED - AGENTS + 1, SEED + 1):
        folders[f"kept-{seed}"] = folder / f"seed{seed}"
    for run_id, path in folders.items():
        change(path, wandb_id=run_id)
    assert main("ppo_linen_vmap", "--resume", folder, "--track") == 0
    files = {x.stem.removeprefix("run-"): x for x in folder.rglob("wandb/offline-run-*/*.wandb")}
    assert files.keys() == folders.keys()
    for run_id, path in folders.items():
        records = list(wandb_records(files[run_id]))
        names = [x.run.display_name for x in records if x.run.display_name]
        assert names[-1] == ("many" if run_id == "kept" else f"many-{path.name}")
        history = [parsed(x.history.item) for x in records if x.history.item]
        assert [row["iteration"] for row in history] == [2, 3, 4]
        for row, logged in zip(history, metrics(path)[2:], strict=True):
            assert row.items() >= {name: x for name, x in logged.items() if x is not None}.items()
        config = parsed(y for x in records for y in x.run.config.update)
        own = info(path)
        assert (config["args"], config["resumed"]) == (own["args"], [2])
        summary = parsed(y for x in records for y in x.summary.update)
        assert (summary["status"], summary["ended"]) == ("completed", own["ended"])


END_OF_A_JOB = """
import json, signal, psutil, ppo_linen
write = ppo_linen.RunLog.write

def write_and_end(log, iteration, *args):
    if iteration == 3:
        (service,) = [x for x in psutil.Process().children() if "wandb" in x.name()]
        service.terminate()
        service.wait()
        # Written before the first checkpoint, so that a killed run keeps its W&B run.
        assert json.loads((log.dir / "run.json").read_text())["wandb_id"] == log.wandb.id
        log.stopped_by = signal.SIGTERM
    write(log, iteration, *args)

ppo_linen.RunLog.write = write_and_end
ppo_linen.train(ppo_linen.parse_args())
"""


def test_no_iteration_is_lost_if_the_wandb_process_ends(start, tmp_path, monkeypatch):
    """If a whole job receives SIGTERM, the W&B process also ends."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # set if this process uses W&B
    _, _, *flags = command("ppo_linen", "run", 10, "--track")
    process = start(sys.executable, "-c", END_OF_A_JOB, *flags)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, errors
    folder = tmp_path / "runs/run"
    assert (len(rows(folder)), int(arrays(folder)["iteration"])) == (4, 4)
    assert info(folder)["status"] == "stopped"

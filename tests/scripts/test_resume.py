"""The run folder: what a run writes, how it ends, and how it resumes.

The Run log section is identical in all scripts, so one script is enough, or one per framework for
checkpoints. test_training.py tests that every PPO script resumes exactly.
"""

import importlib
import io
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import struct
import sys
import time
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, start_process, wait_for
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
from sections import ROWS, read, scripts, stand_ins
from wandb.proto.wandb_internal_pb2 import Record

EACH = pytest.mark.parametrize("name", ["ppo_linen", "ppo_torch"])
FRAMEWORKS = ("ppo_linen", "ppo_nnx", "ppo_equinox", "ppo_torch")


# === Real processes =============================================================================
@pytest.fixture
def start(tmp_path, compiled):
    """Return a function that starts scripts in tmp_path, with the shared compilation cache."""
    processes = []

    def start(*command, **variables):
        processes.append(start_process(command, tmp_path, os.environ | compiled | variables))
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
        ("ppo_torch", [signal.SIGINT]),
    ],
)
def test_stopping_and_killing_a_run_does_not_change_its_result(name, signals, start, tmp_path):
    """The signals arrive at random moments."""
    rng, iterations = random.Random(name), 100
    folder, resumed = tmp_path / "runs/stopped", []
    words = command(name, "stopped", iterations)
    for number in signals:
        process = start(*words)
        wait_for_lines(process, folder, sum(resumed[-1:]) + rng.randrange(12, 40))
        time.sleep(rng.uniform(0, 0.02))
        os.killpg(process.pid, number)  # signals the process group, as Ctrl-C does
        output, errors = process.communicate(timeout=120)
        done = int(arrays(folder)["iteration"])
        said = info(folder)
        assert said["iteration"] == done
        if number == signal.SIGKILL:
            assert (process.returncode, said["status"]) == (-number, "running")
            assert done > 0 and 0 <= count_lines(folder) - done < 10 + 1
        else:
            assert (process.returncode, said["status"], errors) == (128 + number, "stopped", "")
            assert count_lines(folder) == done
            assert output.endswith("--resume runs/stopped\n")
        resumed.append(done)
        words = [*words[:2], "--resume", "runs/stopped"]
    assert main(name, "--resume", folder) == 0
    assert metrics(folder) == metrics(train(name, tmp_path, "whole", iterations=iterations))
    run = info(folder)
    assert (run["status"], run["resumed"]) == ("completed", resumed)
    assert_tensorboard_agrees(folder)


def test_a_second_signal_ends_the_process(start, tmp_path):
    """The process does not finish the iteration, which may be long."""
    process = start(*command("ppo_torch", "run", 10_000, "--num-steps", 2**14))
    assert "runs/run" in process.stdout.readline()
    for _ in range(120):  # signals that arrive during compilation count as one
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        if process.poll() is not None:
            break
    assert process.returncode == -signal.SIGTERM


# The functions of os and signal that Python's documentation marks as available only on Unix.
ONLY_ON_UNIX = {
    "os": "chown chroot confstr copy_file_range ctermid eventfd eventfd_read eventfd_write fchdir "
    "fchmod fchown fdatasync fork forkpty fpathconf fstatvfs getegid geteuid getgid getgrouplist "
    "getgroups getloadavg getpgid getpgrp getpriority getresgid getresuid getsid getuid getxattr "
    "grantpt initgroups killpg lchown listxattr lockf major makedev memfd_create minor mkfifo "
    "mknod nice openpty pathconf pidfd_open posix_fadvise posix_fallocate posix_openpt posix_spawn "
    "posix_spawnp pread preadv ptsname pwrite pwritev readv register_at_fork removexattr "
    "sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getparam "
    "sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setparam sched_setscheduler "
    "sched_yield sendfile setegid seteuid setgid setgroups setns setpgid setpriority setregid "
    "setresgid setresuid setreuid setsid setuid setxattr splice statvfs sync sysconf tcgetpgrp "
    "tcsetpgrp timerfd_create timerfd_gettime timerfd_settime ttyname uname unlockpt unshare wait "
    "wait3 wait4 waitid WCOREDUMP WEXITSTATUS WIFCONTINUED WIFEXITED WIFSIGNALED WIFSTOPPED "
    "WSTOPSIG WTERMSIG writev",
    "signal": "alarm getitimer pause pidfd_send_signal pthread_kill pthread_sigmask setitimer "
    "siginterrupt sigpending sigtimedwait sigwait sigwaitinfo",
}
WITHOUT_THEM = """
import json, os, runpy, signal, sys

names, *sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0])  # packages that it imports may use what their platform has
for module, functions in json.loads(names).items():
    for name in functions.split():
        vars(sys.modules[module]).pop(name, None)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("name", ["ppo_linen", "ppo_torch_gymnasium"])
def test_a_script_needs_nothing_that_exists_only_on_unix(name, start, tmp_path):
    words = [json.dumps(ONLY_ON_UNIX), *command(name, "run", 2)[1:]]
    # On Windows, USERNAME is set, so Python does not call os.getuid().
    process = start(sys.executable, "-c", WITHOUT_THEM, *words, USERNAME="anyone")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert info(tmp_path / "runs/run")["status"] == "completed"


@pytest.mark.parametrize("name", ROWS)
def test_no_script_names_a_function_that_exists_only_on_unix(name):
    used = set(re.findall(r"\b(os|signal)\.(\w+)", read(name)))
    assert not [x for x in used if x[1] in ONLY_ON_UNIX[x[0]].split()]


# === Checkpoints ================================================================================
def run_log(folder, iterations, **flags):
    """Return a new RunLog of ppo_torch for a run in a folder."""
    script = importlib.import_module("ppo_torch")
    args: dict[str, Any] = {"num_envs": 4, "num_steps": 32, "num_minibatches": 2}
    args |= {"total_timesteps": BATCH * iterations, "runs_dir": str(folder)} | flags
    return script.RunLog(script.Args(**args), 0, [])


@pytest.mark.parametrize(
    ("iterations", "save_every", "expected"),
    [(1000, 0, range(100, 1001, 100)), (11, 0, [2, 4, 6, 8, 10, 11]), (8, 3, [3, 6, 8])],
)
def test_a_run_saves_ten_checkpoints_unless_save_every_says_otherwise(
    iterations, save_every, expected, tmp_path
):
    log = run_log(tmp_path, iterations, save_every=save_every)
    assert [x for x in range(1, iterations + 1) if log.must_save(x)] == list(expected)


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


def test_an_imported_script_sets_no_signal_handlers(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run_log(tmp_path, 1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# === Divergence =================================================================================
ROW = {"charts/episodes": 0, "charts/episodic_return": math.inf, "losses/value_loss": 1.0}


def test_a_run_that_diverges_ends_with_status_1(start, tmp_path):
    """The last checkpoint has the parameters before the first NaN."""
    flags = ["--learning-rate", 1e30, "--adam-eps", 1e-30, "--save-every", 1]
    process = start(*command("ppo_linen", "run", 100, *flags))
    _, errors = process.communicate(timeout=120)
    folder = tmp_path / "runs/run"
    done = info(folder)["iteration"]
    assert (process.returncode, info(folder)["status"]) == (1, "diverged")
    assert re.search(f"iteration {done + 1}: .* in runs/run: iteration {done}\n$", errors)
    assert len(rows(folder)) == done + 1
    for text in ((folder / "metrics.jsonl").read_text(), (folder / "run.json").read_text()):
        assert "NaN" not in text and "Infinity" not in text


def test_parameters_that_become_nan_in_the_last_minibatch_are_not_saved(tmp_path, monkeypatch):
    """All losses of the iteration, which precede the optimizer steps, are finite."""
    script = importlib.import_module("ppo_torch")
    step = script.minibatch_step
    steps = []

    def step_and_diverge(agent, *others):
        losses = step(agent, *others)
        steps.append(losses)
        if len(steps) == 3 * 4:  # two epochs of two minibatches
            with torch.no_grad():
                agent.critic.output.bias.fill_(torch.nan)
        return losses

    monkeypatch.setattr(script, "minibatch_step", step_and_diverge)
    flags = command("ppo_torch", "run", 6, "--runs-dir", tmp_path)[2:]
    assert "iteration 3" in str(main("ppo_torch", *flags))
    folder = tmp_path / "run"
    losses = [x for name, x in rows(folder)[2].items() if name.endswith("_loss")]
    assert len(rows(folder)) == 3 and None not in losses
    assert (info(folder)["status"], info(folder)["iteration"]) == ("diverged", 2)
    found = arrays(folder)
    assert found["iteration"] == 2
    assert all(np.isfinite(x).all() for name, x in found.items() if name.startswith("agent/"))


@pytest.mark.parametrize(
    ("metric", "updates", "diverges"),
    [
        ("losses/value_loss", None, True),
        ("charts/param_norm", None, True),
        ("losses/explained_variance", None, False),  # NaN if all targets are equal
        ("losses/value_loss", 0, False),  # DQN and SAC before training begins
        ("losses/value_loss", 1, True),
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_in_losses_and_parameters_end_a_run(
    metric, updates, diverges, value, tmp_path
):
    log = run_log(tmp_path, 10, run_name="run")
    row = ROW | {metric: value}
    if updates is not None:
        row["charts/updates"] = updates
    if diverges:
        with pytest.raises(SystemExit):
            log.write(0, row, 0.0)
    else:
        log.write(0, row, 0.0)
    assert info(tmp_path / "run")["status"] == ("diverged" if diverges else "running")


# === Progress ===================================================================================
@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.1, [1, 10, 20, 30]),
        (4, [1, 4, 7, 10, 13, 16, 19, 20, 23, 26, 29, 30]),
        (11, range(1, 31)),
    ],
)
def test_progress_is_printed_every_percent_and_every_ten_seconds(
    seconds, expected, tmp_path, monkeypatch, capsys
):
    """Without finished episodes, no return is printed."""
    script = importlib.import_module("ppo_torch")
    now = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now, time=time.time, time_ns=time.time_ns)
    monkeypatch.setattr(script, "time", clock)
    log = run_log(tmp_path, 1000)
    capsys.readouterr()
    for iteration in range(30):
        start, now = now, now + seconds
        log.write(iteration, ROW, start)
    printed = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1].partition("/")[0]) for line in printed] == list(expected)
    assert all("episodes 0" in line and "return" not in line for line in printed)


def test_tensorboard_has_every_iteration_of_a_long_run(tmp_path):
    log = run_log(tmp_path, 10**6, run_name="run")
    for iteration in range(3):
        log.write(iteration, ROW, 0.0)
    log.tensorboard.close()
    assert_tensorboard_agrees(tmp_path / "run")


# === Run folders ================================================================================
def test_two_runs_started_in_the_same_second_have_different_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1e9)
    assert run_log(tmp_path, 1).dir != run_log(tmp_path, 1).dir


# === Arguments with --resume ====================================================================
def test_the_arguments_of_a_run_are_the_defaults_when_it_resumes(whole_run, tmp_path):
    folder = shutil.copytree(whole_run("ppo_linen").folder, tmp_path / "run")
    args = parse("ppo_linen", "--resume", folder, "--total-timesteps", 1024)
    assert (args.seed, args.hidden_sizes, args.num_envs) == (SEED, (8, 8), 4)
    assert (args.total_timesteps, args.num_iterations) == (1024, 8)


def test_only_three_arguments_can_change_when_a_run_resumes(tmp_path, capsys):
    script = importlib.import_module("ppo_linen")
    old = script.Args(resume=str(tmp_path))
    said = {"script": "ppo_linen", "args": asdict(old), "iteration": 1}
    (tmp_path / "run.json").write_text(json.dumps(said))
    arguments = asdict(old)
    del arguments["resume"]
    refused = set()
    for name, value in arguments.items():
        changed = copy(old)
        setattr(changed, name, "other")
        try:
            assert script.has_checkpoint(changed)
        except SystemExit as stopped:
            refused.add(name)
            errors = capsys.readouterr().err
            assert stopped.code == 2 and errors.count("\n") == 1
            assert f"--{name.replace('_', '-')}, " in errors and repr(value) in errors
    assert arguments.keys() - refused == {"total_timesteps", "save_every", "track"}


PRESETS = [("ppo_continuous_linen_gymnasium", "mujoco"), ("sac_linen", "mujoco")]
PRESETS += [("sac_linen_gymnasium", "mujoco")]
PRESETS += [("dqn_linen", "minatar"), ("dqn_linen_gymnasium", "minatar")]


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_a_preset_changes_nothing_when_a_run_resumes(name, preset, tmp_path):
    """The command of a run continues it if --resume is added."""
    first = parse(name, preset, "--seed", 7)
    said = {"script": name, "args": asdict(first), "iteration": 1}
    (tmp_path / "run.json").write_text(json.dumps(said))
    again = parse(name, preset, "--resume", tmp_path)
    assert importlib.import_module(name).has_checkpoint(again)
    assert asdict(again) == asdict(first) | {"resume": str(tmp_path)}


@EACH
@pytest.mark.parametrize(("space", "before"), [("obs_shape", [3]), ("num_actions", 5)])
def test_a_changed_environment_is_refused(name, space, before, whole_run, tmp_path, capfd):
    folder = rewind(whole_run(name), tmp_path / "run")
    now = info(folder)[space]
    change(folder, **{space: before})
    files = content(folder)
    capfd.readouterr()
    assert main(name, "--resume", folder) == 2
    errors = capfd.readouterr().err
    assert errors.count("\n") == 1
    assert all(x in errors for x in (space, str(now), str(before)))
    assert content(folder) == files


# In PyTorch, checkpoints contain a learning rate, which resuming must replace. In JAX, they do not.
LONGER = (*stand_ins("Checkpoint", scripts("ppo", "torch")), *FRAMEWORKS[:3])


@pytest.mark.parametrize("name", LONGER)
def test_a_complete_run_continues_with_the_schedule_of_a_longer_one(
    name, whole_run, tmp_path, monkeypatch
):
    run = whole_run(name).folder
    folder = shutil.copytree(run, tmp_path / "run")
    op_by_op(monkeypatch, importlib.import_module(name))
    assert main(name, "--resume", folder, "--total-timesteps", 8 * BATCH) == 0
    place = max(path.parent.relative_to(run) for path in run.rglob("metrics.jsonl"))
    assert metrics(folder / place)[:5] == metrics(run / place)
    args = info(run)["args"]
    factors = [1 - i / 8 if args["anneal_lr"] else 1 for i in (5, 6, 7)]
    rates = [row["charts/learning_rate"] for row in rows(folder / place)[5:]]
    assert rates == pytest.approx([args["learning_rate"] * x for x in factors])
    assert_tensorboard_agrees(folder / place)
    after = info(folder / place)
    assert (after["status"], after["iteration"], after["resumed"]) == ("completed", 8, [5])


@EACH
def test_a_run_without_a_checkpoint_starts_over(name, whole_run, tmp_path, monkeypatch):
    run = whole_run(name)
    folder = rewind(run, tmp_path / "killed")
    (path,) = checkpoints(folder)
    path.unlink()
    change(folder, iteration=0)
    op_by_op(monkeypatch, importlib.import_module(name))
    assert main(name, "--resume", folder) == 0
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
    with pytest.raises((OSError, RuntimeError)):
        main(name, "--resume", folder)
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
    """Try a plain pickle, the two formats of PyTorch, and the NumPy format of Equinox.

    A checkpoint that cannot be loaded leaves the run folder untouched.
    """
    folder, attack = rewind(whole_run(name), tmp_path / "run"), Attack(tmp_path / "attacked")
    (path,) = folder.glob("checkpoint.*")
    contents = [io.BytesIO(pickle.dumps(attack)), io.BytesIO(), io.BytesIO(), io.BytesIO()]
    torch.save({"agent": attack}, contents[1])
    torch.save({"agent": attack}, contents[2], _use_new_zipfile_serialization=False)
    np.save(contents[3], np.array([attack], dtype=object), allow_pickle=True)
    for written in contents:
        path.write_bytes(written.getvalue())
        before = content(folder)
        with pytest.raises(Exception):  # noqa: B017  (the type depends on the library)
            importlib.import_module(name).load_policy(folder)
        with pytest.raises(Exception):  # noqa: B017
            main(name, "--resume", folder)
        assert content(folder) == before
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


def is_complete(path):
    """W&B may write the last records shortly after finish() on a busy machine."""
    return any(record.HasField("exit") for record in wandb_records(path))


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
        wait_for(partial(is_complete, files[run_id]))
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
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # set if this process uses W&B
    _, _, *flags = command("ppo_linen", "run", 10, "--track")
    process = start(sys.executable, "-c", END_OF_A_JOB, *flags, PYTHONPATH=str(ROOT))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, errors
    folder = tmp_path / "runs/run"
    assert (len(rows(folder)), int(arrays(folder)["iteration"])) == (4, 4)
    assert info(folder)["status"] == "stopped"

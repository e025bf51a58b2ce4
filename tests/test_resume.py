"""A run that is stopped or killed at any moment goes on to the same numbers, to the last digit."""

import gc
import importlib
import json
import os
import pickle
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import wandb
from conftest import ROOT
from frameworks import ALL_SCRIPTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_training import Counts
from wandb_server import WandbServer

from analysis.runs import load

SMALL = "--num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 2 --hidden-sizes 8 8"
BATCH = 128
# One script of each kind; their Run log is the same to the letter.
KINDS: list[tuple[str, tuple]] = [("ppo_linen", ()), ("ppo_torch", ())]
KINDS += [("ppo_linen_gymnasium", ()), ("ppo_linen_vmap", ("--num-agents", 2))]


# === Real processes =============================================================================
@pytest.fixture
def start(tmp_path, compiled):
    """Start scripts in tmp_path; they find compiled what another process has compiled."""
    processes = []

    def start(*command):
        env = dict(os.environ)
        env.pop("UV", None)  # hints would be uv's
        env["JAX_COMPILATION_CACHE_DIR"] = str(compiled)
        env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=env,
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


@pytest.mark.parametrize(("name", "flags"), KINDS)
def test_a_run_that_is_stopped_and_killed_ends_as_one_that_is_not(name, flags, start, tmp_path):
    """At any moment; the command that the run prints is run."""
    rng, iterations = random.Random(name), 150
    whole = train(name, "runs", "whole", *flags, iterations=iterations)
    folder = tmp_path / "runs" / "stopped"
    process = start(*command(name, "stopped", iterations, *flags, "--save-every", 7))
    resumed, how = [], [sys.executable, ROOT / f"{name}.py", "--resume", folder]
    # Ctrl-C in a terminal goes to the whole group of processes.
    for number in rng.sample([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], 3):
        wait_for_lines(process, folder, sum(resumed[-1:]) + rng.randrange(8, 40))
        time.sleep(rng.uniform(0, 0.02))
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        status, output, errors = end(process)
        done = checkpoint_info(folder)["iteration"]
        if number == signal.SIGKILL:
            assert status == -number
            assert 0 <= count_lines(folder) - done < 7 + 1
        else:
            assert (status, errors) == (128 + number, "")
            assert count_lines(folder) == done
            *_, said, told = output.splitlines()
            assert said == f"Stopped after {done} iterations."
            assert told.startswith(f"To go on: python {ROOT / name}.py --resume ")
            how = [sys.executable, *shlex.split(told.removeprefix("To go on: python "))]
        assert not (folder / "run.json").exists()
        resumed.append(done)
        process = start(*how)
    assert end(process)[::2] == (0, "")
    agents = [path.name for path in sorted(whole.glob("seed*"))]
    assert len(agents) == 2 * (name == "ppo_linen_vmap")
    for own in (".", *agents):
        assert metrics(folder / own) == metrics(whole / own)
        info = json.loads((folder / own / "run.json").read_text())
        assert (info["resumed"], info["iteration"]) == (resumed, iterations)
        events = EventAccumulator(str(folder / own), size_guidance={"tensors": 0}).Reload()
        steps = {event.step for event in events.Tensors("losses/entropy")}
        assert steps == {row["global_step"] for row in metrics(whole / own)}
    assert info["args"]["resume"] == ""


# === In this process ============================================================================
@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UV", raising=False)


def main(name, *flags):
    """Run a script as from a command line; its exit status."""
    script, numbers = importlib.import_module(name), (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script.__file__, *map(str, flags)])
        try:
            args = script.tyro.cli(script.Args)
            script.train(script.args_of_run(args) if args.resume else args)
        except SystemExit as stopped:
            return stopped.code
        finally:
            for number, handler in zip(numbers, handlers, strict=True):
                signal.signal(number, handler)
            gc.collect()  # the run log, and with it the folder's lock
    return 0


def train(name, runs_dir, run_name, *flags, iterations=6, stops=None):
    """Train, stopped by SIGTERM in iteration number stops; return the folder."""
    script = importlib.import_module(name)
    write = script.RunLog.write

    def write_and_stop(log, *args):
        if log.info["iteration"] + 1 == stops:
            signal.raise_signal(signal.SIGTERM)
        write(log, *args)

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


# === The same numbers ===========================================================================
ENVIRONMENTS = {
    "ppo_linen": "Breakout-MinAtar",  # booleans and integers
    "ppo_nnx": "MountainCar-v0",  # whose state is weakly typed when it is reset
    "ppo_torch": "MountainCar-v0",
}


@torch._dynamo.config.patch(recompile_limit=2)  # as many as one call of train() needs
@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_a_resumed_run_is_the_same_and_compiles_nothing_twice(name, tmp_path, monkeypatch):
    """Each script says in train() what its state is."""
    flags = ["--env-id", ENVIRONMENTS.get(name, "CartPole-v1")]
    whole = train(name, tmp_path, "whole", *flags)
    stopped = train(name, tmp_path, "stopped", *flags, "--save-every", 2, stops=3)
    assert checkpoint_info(stopped)["iteration"] == 3
    assert count_lines(stopped) == 3
    torch._dynamo.utils.counters.clear()
    counts = Counts(monkeypatch)
    counts.watch(monkeypatch, importlib.import_module(name))
    assert main(name, "--resume", stopped) == 0
    assert metrics(stopped) == metrics(whole)
    first, *rest = counts.per_iteration
    assert [row.get("compilations", 0) for row in rest] == [0, 0]
    assert name == "ppo_torch_gymnasium" or first["compilations"] > 0
    assert first["graphs"] == 2 * (name == "ppo_torch_compile")
    arrays = [np.load(folder / "checkpoint.npz") for folder in (whole, stopped)]
    assert arrays[0].files == arrays[1].files
    for place in set(arrays[0].files) - {"info"}:
        np.testing.assert_array_equal(arrays[0][place], arrays[1][place])


def test_actions_by_dlpack_compile_the_step_once(tmp_path, monkeypatch):
    """As on a GPU: an array from DLPack is committed to its device, and JAX compiles for that."""
    script, compiled = importlib.import_module("ppo_torch"), []

    def on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(kwargs["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(on_event)
    monkeypatch.setattr(script, "to_jax", jax.dlpack.from_dlpack)
    folder = train("ppo_torch", tmp_path, "stopped", stops=3)
    assert compiled.count("jit(step)") == 1
    assert main("ppo_torch", "--resume", folder) == 0
    assert compiled.count("jit(step)") == 2


# === What may lie in a folder ===================================================================
@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A stopped run, and a complete one."""
    folder = tmp_path_factory.mktemp("runs")
    train("ppo_torch", folder, "stopped", stops=4)
    train("ppo_torch", folder, "complete")
    return folder


@pytest.fixture
def stopped(runs, tmp_path):
    return Path(shutil.copytree(runs / "stopped", tmp_path / "stopped"))


def test_what_came_after_the_checkpoint_is_forgotten(runs, stopped):
    """Rows of metrics, the last of them cut short, and a half of the next checkpoint."""
    half = (stopped / "checkpoint.npz").read_bytes()[:1000]
    (stopped / "checkpoint.new").write_bytes(half)
    with open(stopped / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 4, "a row that was": "logged after it"}\n{"iteration": 5, "and a')
    assert main("ppo_torch", "--resume", stopped) == 0
    assert metrics(stopped) == metrics(runs / "complete")
    assert not list(stopped.glob("*.new"))


def test_killed_before_run_json(runs, tmp_path):
    """After the last checkpoint there is nothing to train, only run.json to write."""
    folder = Path(shutil.copytree(runs / "complete", tmp_path / "killed"))
    (folder / "run.json").unlink()
    before = (folder / "metrics.jsonl").read_bytes()
    assert main("ppo_torch", "--resume", folder) == 0
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert json.loads((folder / "run.json").read_text())["resumed"] == [6]


def test_a_stop_in_the_last_iteration_completes_the_run(tmp_path, capfd):
    folder = train("ppo_torch", tmp_path, "stopped", stops=6)
    assert (folder / "run.json").exists()
    assert "Stopped" not in capfd.readouterr().out


def test_under_uv_the_hint_is_uvs(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("UV", "/usr/bin/uv")
    folder = train("ppo_torch", tmp_path, "stopped", stops=1)
    told = capfd.readouterr().out.splitlines()[-1]
    assert told == f"To go on: uv run {ROOT / 'ppo_torch.py'} --resume {folder}"


def save(path, arrays):
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=True, **arrays)


class Attack:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def refused(capfd):
    """Resume; check that it ends in one sentence, and that the folder is as it was."""

    def refused(folder, sentence, *flags, name="ppo_torch"):
        before = content(folder)
        capfd.readouterr()
        assert main(name, "--resume", folder, *flags) == 2
        output, errors = capfd.readouterr()
        assert (output, errors) == ("", f"{sentence}\n")
        assert content(folder) == before

    return refused


DAMAGES: dict[str, Any] = {
    "ValueError": lambda file: b"not a checkpoint\n",
    "EOFError": lambda file: b"",
    "BadZipFile": lambda file: file[: len(file) // 2],
    "UnpicklingError": lambda file: bytes(len(file)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_one_sentence(stopped, refused, damage):
    """None of which says how to load it unsafely."""
    path = stopped / "checkpoint.npz"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    error = "ValueError" if damage == "UnpicklingError" else damage
    refused(stopped, f"{path} is not there, or is damaged ({error})")


def test_a_strangers_checkpoint_runs_no_code(stopped, refused, tmp_path):
    path, attack = stopped / "checkpoint.npz", Attack(tmp_path / "attacked")
    with np.load(path) as file:
        arrays: dict[str, Any] = dict(file)
    array = np.array([attack, 1], dtype=object)
    for content_of_file in (arrays | {"info": array}, arrays | {"obs": array}):
        save(path, content_of_file)
        refused(stopped, f"{path} is not there, or is damaged (ValueError)")
    path.write_bytes(pickle.dumps(attack))
    refused(stopped, f"{path} is not there, or is damaged (ValueError)")
    assert not attack.path.exists()
    np.load(path, allow_pickle=True)
    assert attack.path.exists()  # as it would have, had one of them been unpickled


def test_a_checkpoint_that_does_not_fit(runs, stopped, refused, capfd):
    refused(runs / "stopped", f"{runs}/stopped is a run of ppo_torch.py", name="ppo_linen")
    path = stopped / "checkpoint.npz"
    with np.load(path) as file:
        arrays: dict[str, Any] = dict(file)
    bias = "tensors/agent/actor.output.bias"
    for other in ({bias: np.zeros(3, "f")}, {"another name": arrays[bias]}):
        kept = {name: x for name, x in arrays.items() if name != bias}
        save(path, kept | other)
        assert main("ppo_torch", "--resume", stopped) == 2
        said = f"{stopped} has no {bias} of shape (2,) in its checkpoint\n"
        assert capfd.readouterr().err == said


# === Weights & Biases ===========================================================================
@pytest.fixture
def server(tmp_path, monkeypatch):
    server = WandbServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_MODE", "online")
    yield server
    wandb.teardown()  # or the process's next run would look for this server
    server.shutdown()
    server.server_close()


def check_wandb(run, folder):
    """It has every iteration once; of those with the same number, the later counts."""
    assert run["state"] == "finished"
    history = {row["iteration"]: row for row in map(json.loads, run["history"])}
    rows = metrics(folder)
    assert sorted(history) == list(range(len(rows)))
    for row in rows:
        assert row.items() <= history[row["iteration"]].items()
    config = {name: x["value"] for name, x in json.loads(run["config"]).items() if name[0] != "_"}
    info, summary = json.loads((folder / "run.json").read_text()), json.loads(run["summary"])
    assert config["resumed"] == info["resumed"] and len(info["resumed"]) == 1
    assert config["args"] == info["args"] and config["framework"] == "linen"
    assert (summary["status"], summary["durations"]) == ("completed", info["durations"])


def test_wandb_has_a_run_for_the_program_and_one_for_each_agent(start, server, tmp_path):
    """All go on under the ids that they had."""
    folder, how = tmp_path / "runs/many", [sys.executable, ROOT / "ppo_linen_vmap.py", "--resume"]
    flags = ("--num-agents", 2, "--track", "--save-every", 10)
    process = start(*command("ppo_linen_vmap", "many", 200, *flags))
    wait_for_lines(process, folder, 30)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 128 + signal.SIGTERM
    assert end(start(*how, folder))[0] == 0
    (program, *_) = server.runs
    folders = {program: folder} | {f"{program}-{x}": folder / f"seed{x}" for x in (1, 2)}
    assert server.runs.keys() == folders.keys()
    for run_id, path in folders.items():
        check_wandb(server.runs[run_id], path)
    assert {run["name"] for run in server.runs.values()} == {"many", "many-seed1", "many-seed2"}
    data = load("wandb:team/project")
    assert data.runs["agent"].tolist() == [0, 1] and not data.left_out

"""Whole runs of train(): what they leave and cost, and that they repeat to the last digit."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jax
import pytest
import torch
import wandb
from conftest import ROOT
from frameworks import ALL_SCRIPTS, JAX_SCRIPTS, TORCH_SCRIPTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch._inductor import metrics as inductor
from torch.utils._python_dispatch import TorchDispatchMode

SMALL: dict[str, Any] = {"num_envs": 4, "num_steps": 32, "num_minibatches": 2}
SMALL |= {"update_epochs": 2}
SMALL |= {"hidden_sizes": (8, 8), "total_timesteps": 128 * 6}


def train(name, runs_dir, **flags):
    script = importlib.import_module(name)
    args = script.Args(**SMALL | {"runs_dir": str(runs_dir)} | flags)
    run = script.train(args)
    folder = Path(args.runs_dir, args.run_name)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return run, rows, folder


class Counts:
    """Compilations, and transfers to the host, between one RunLog.write and the next."""

    def __init__(self, monkeypatch):
        self.now, self.per_iteration = Counter(), []
        jax.monitoring.register_event_duration_secs_listener(self.on_event)
        array: Any = type(jax.numpy.zeros(1))
        monkeypatch.setattr(array, "_value", property(self.counted("transfers", array._value.fget)))
        # Not numpy(), which is a view of a tensor on a CPU, and refuses one on a GPU.
        for method in ("tolist", "item", "cpu", "__bool__", "__float__", "__int__"):
            original = getattr(torch.Tensor, method)
            monkeypatch.setattr(torch.Tensor, method, self.counted("transfers", original))

    def counted(self, what, function):
        def wrapped(*args, **kwargs):
            self.now[what] += 1
            return function(*args, **kwargs)

        return wrapped

    def on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.now["compilations"] += event == "/jax/core/compile/backend_compile_duration"

    def watch(self, monkeypatch, script):
        write = script.RunLog.write

        def watched(log, *args):
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            self.per_iteration.append({**self.now, "graphs": graphs})
            due = write(log, *args)
            self.now.clear()
            return due

        monkeypatch.setattr(script.RunLog, "write", watched)


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_compilations_transfers_and_graph_breaks(name, tmp_path, monkeypatch):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    script, counts = importlib.import_module(name), Counts(monkeypatch)
    counts.watch(monkeypatch, script)
    train(name, tmp_path, env_id="MountainCar-v0")  # weakly typed when it is reset
    first, *rest = counts.per_iteration
    assert name == "ppo_torch_gymnasium" or first["compilations"] > 0
    for row in rest:
        assert row.get("compilations", 0) == 0
        # On the CPU a view of an action is no transfer in JAX; torch's cpu() counts, per step.
        assert row["transfers"] == (1 + 32 if name == "ppo_torch_gymnasium" else 1)
    if name == "ppo_torch_compile":
        # The policy and the minibatch step: two graphs, whole, and kernels made for them.
        assert {row["graphs"] for row in counts.per_iteration} == {2}
        assert not torch._dynamo.utils.counters["graph_break"]
        assert inductor.generated_kernel_count > 0
    else:
        assert first["graphs"] == 0


@pytest.mark.parametrize("name", ["ppo_linen", "ppo_torch"])
def test_matmul_precision_means_the_same_in_both_frameworks(name, tmp_path):
    """TF32 on a GPU: in JAX the default, since its "high" computes some products in float32."""
    for precision, jax_has in [("highest", "highest"), ("high", "default")]:
        train(name, tmp_path, matmul_precision=precision, total_timesteps=128, run_name=precision)
        assert jax.config.jax_default_matmul_precision == jax_has  # ty: ignore[missing-attribute]
        assert name == "ppo_linen" or torch.get_float32_matmul_precision() == precision


@pytest.mark.parametrize("name", TORCH_SCRIPTS)
def test_actions_by_dlpack_compile_the_step_once(name, tmp_path, monkeypatch):
    """As on a GPU: an array from DLPack is committed to its device, and JAX compiles for that."""
    script, compiled = importlib.import_module(name), []

    def on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(kwargs["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(on_event)
    monkeypatch.setattr(script, "to_jax", jax.dlpack.from_dlpack)
    train(name, tmp_path, total_timesteps=128)
    assert compiled.count("jit(step)") == 1


def test_a_captured_function_replays_and_its_state_is_restored(monkeypatch):
    """capture() with stand-ins for CUDA, whose graph calls the function again on its memory."""
    script, seen, static = importlib.import_module("ppo_torch_compile"), [], []

    def function(x):
        seen.append(x)
        static.append(x + state)
        state.add_(1)
        return static[-1]

    class Graph:
        def replay(self):
            recorded = static[3]  # of the recording, after three calls to warm up
            recorded.copy_(function(seen[3]))

    state, stand_in = torch.zeros(1), MagicMock()
    monkeypatch.setattr(torch, "cuda", stand_in)
    stand_in.CUDAGraph = Graph
    replay = script.capture(function, (state,))
    assert not seen and not stand_in.graph.called  # nothing runs before the first call
    x = torch.tensor([10.0])
    first, second = replay(x), replay(x + 1)
    assert (first.item(), second.item(), state.item()) == (10, 12, 2)
    assert len(seen) == 6 and x.item() == 10
    assert stand_in.graph.call_args.kwargs == {"capture_error_mode": "thread_local"}
    assert stand_in.graph.call_count == 1


class Recording(TorchDispatchMode):
    """A CUDA graph's stand-in: records operations, and runs them again on the same memory."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, results))
        return results

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, results in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(jax.tree.leaves(results), jax.tree.leaves(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # else a view, or changed in place
                    old.copy_(new)


@pytest.mark.parametrize(("name", "agents"), [("ppo_torch_compile", ()), ("ppo_torch_vmap", (3,))])
def test_an_epoch_replays_from_a_recording_of_one(name, agents, monkeypatch):
    """Each with its own batch and order; the minibatch step is not compiled, to be recorded."""
    script = importlib.import_module(name)
    args = script.Args(**SMALL | ({"num_agents": 3} if agents else {}))
    args.__post_init__()
    env, cpu = script.VecEnv(args.env_id, args.num_envs), torch.device("cpu")
    results = []
    for recorded in (False, True):
        torch.manual_seed(1)
        make = script.make_agents if agents else script.make_agent
        agent, adam, *_ = make(args, env, cpu)
        minibatch_fn = partial(script.minibatch_step, agent, adam, args=args)
        epoch_fn = partial(script.epoch, minibatch_fn, args=args)
        with monkeypatch.context() as patch:
            if recorded:
                stand_in = MagicMock()
                stand_in.CUDAGraph = Recording
                stand_in.graph = lambda graph, capture_error_mode: graph
                patch.setattr(torch, "cuda", stand_in)
                epoch_fn = script.capture(epoch_fn, (list(agent.parameters()), adam))
            for _ in range(3):
                shape = (*agents, args.batch_size)
                action = torch.randint(env.num_actions, shape, dtype=torch.int32)
                batch = [torch.randn(*shape, env.obs_dim), action, *torch.randn(4, *shape)]
                order = torch.stack([torch.randperm(args.batch_size) for _ in range(3)])
                losses = epoch_fn(script.Batch(*batch), order if agents else order[0])
                results.append((recorded, losses, *map(torch.clone, agent.parameters())))
    eager, replayed = results[:3], results[3:]
    for one, other in zip(eager, replayed, strict=True):
        assert one[1].shape == (args.num_minibatches, *agents, 5)
        assert all(map(torch.equal, one[1:], other[1:]))
    assert not torch.equal(eager[0][1], eager[1][1])


def test_nothing_compiles_again_on_any_environment(tmp_path, monkeypatch):
    """One script stands for all six, whose environment sections are the same to the letter."""
    from test_environment import ENV_IDS

    script = importlib.import_module("ppo_linen")
    for env_id in ENV_IDS:
        counts = Counts(monkeypatch)
        counts.watch(monkeypatch, script)
        with less_optimized():
            train("ppo_linen", tmp_path, env_id=env_id, total_timesteps=128 * 3)
        monkeypatch.undo()
        compiled = [row.get("compilations", 0) for row in counts.per_iteration]
        assert compiled[0] > 0 and compiled[1:] == [0, 0], env_id


@contextmanager
def less_optimized():
    """JAX compiles in half the time, for tests of how often it does."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def without_time(rows):
    return [
        {key: x for key, x in row.items() if not key.startswith("time/") and key != "charts/SPS"}
        for row in rows
    ]


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_a_seed_repeats_to_the_last_digit_and_another_differs(name, tmp_path):
    first, again, other = (
        without_time(train(name, tmp_path, seed=seed, run_name=run_name)[1])
        for seed, run_name in ((1, "first"), (1, "again"), (2, "other"))
    )
    assert first == again
    for before, after in zip(first, other, strict=True):
        assert before["losses/value_loss"] != after["losses/value_loss"]
        assert before["losses/entropy"] != after["losses/entropy"]


@torch._dynamo.config.patch(recompile_limit=2)  # as many as one call of train() needs
def test_train_can_be_called_again_with_other_sizes(tmp_path):
    for width in (8, 16):
        sizes: dict[str, Any] = {"hidden_sizes": (width,), "total_timesteps": 128}
        train("ppo_torch_compile", tmp_path, run_name=str(width), **sizes)


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_what_a_run_leaves(name, tmp_path):
    run, rows, folder = train(name, tmp_path, sync_for_timing=True, total_timesteps=128 * 10)
    assert json.loads((folder / "run.json").read_text()) == json.loads(json.dumps(run))
    left = sorted(path.name.split(".")[0] for path in folder.iterdir())
    assert left == ["checkpoint", "events", "metrics", "run"]

    assert [row["iteration"] for row in rows] == list(range(10))
    assert [row["global_step"] for row in rows] == [128 * (i + 1) for i in range(10)]
    for i, row in enumerate(rows):
        total = row["time/rollout"] + row["time/update"]
        assert total == pytest.approx(row["time/iteration"])
        assert row["charts/SPS"] == pytest.approx(128 / row["time/iteration"])
        assert row["charts/learning_rate"] == pytest.approx(2.5e-4 * (1 - i / 10))

    seconds, times = run["durations"], [row["time/iteration"] for row in rows]
    assert 0 < seconds["saving"] < seconds["total"] - sum(times)
    assert rows[0]["time/elapsed"] > times[0] and seconds["total"] > rows[-1]["time/elapsed"]
    assert seconds["imports"] > 0 and run["script"] == name and run["resumed"] == []
    assert run["status"] == "completed"
    assert run["args"]["env_id"] == "CartPole-v1" and run["peak_host_bytes"] > 2**20
    assert run["versions"]["jax"] == jax.__version__ and run["device"] == "cpu"

    events = EventAccumulator(str(folder)).Reload()
    tags = {key for key in rows[-1] if "/" in key and rows[-1][key] is not None}
    assert tags <= set(events.Tags()["tensors"])
    steps = [event.step for event in events.Tensors("losses/entropy")]
    assert steps == [row["global_step"] for row in rows]


def test_no_finished_episode_and_no_nan(tmp_path):
    """Freeway's first episode lasts 2500 steps; a diverging run divides by nothing useful."""
    _, rows, _ = train("ppo_linen", tmp_path, env_id="Freeway-MinAtar", total_timesteps=256)
    assert rows[0]["charts/episodes"] == 0 and rows[0]["charts/episodic_return"] is None
    _, rows, folder = train("ppo_linen", tmp_path, learning_rate=1e30, adam_eps=1e-30)
    assert rows[-1]["losses/policy_loss"] is None
    for path in (folder / "metrics.jsonl", folder / "run.json"):
        assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()


@pytest.mark.parametrize("name", [*JAX_SCRIPTS, "ppo_torch"])
def test_without_compilation(name, tmp_path):
    """Op by op, a run is the same but for the last digits."""
    flag = "jit_env" if name in TORCH_SCRIPTS else "jit"
    tiny = {"num_steps": 4, "total_timesteps": 16, "update_epochs": 1, "run_name": "compiled"}
    compiled, rows, _ = train(name, tmp_path, **tiny)
    tiny["run_name"] = "op_by_op"
    run, rows_op_by_op, _ = train(name, tmp_path, **tiny, **{flag: False})
    assert run["compile_mode"] == "none" != compiled["compile_mode"]
    for key, x in without_time(rows)[0].items():
        assert x is None or rows_op_by_op[0][key] == pytest.approx(x, rel=1e-3, abs=1e-5)


def command(name, folder, *flags):
    small = "--num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 2"
    return [sys.executable, str(folder / f"{name}.py"), *small.split(), *flags]


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_alone_in_an_empty_folder_then_killed(name, tmp_path, compiled):
    """A script copied alone runs; after kill -9 its metrics are whole and run.json is absent."""
    (tmp_path / f"{name}.py").write_bytes((ROOT / f"{name}.py").read_bytes())
    flags = ("--total-timesteps", "12800000", "--run-name", "killed")
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(compiled)}
    process = subprocess.Popen(
        command(name, tmp_path, *flags), cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "runs" / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(len(rows)))
    assert not (tmp_path / "runs" / "killed" / "run.json").exists()


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_learns_cartpole(name, tmp_path):
    """40 iterations of 2048 steps: far above the 20 that random actions reach."""
    flags: dict[str, Any] = {"num_envs": 16, "num_steps": 128, "num_minibatches": 4}
    flags |= {"update_epochs": 8, "hidden_sizes": (64, 64)}
    flags |= {"total_timesteps": 2048 * 40, "learning_rate": 1e-3}
    _, rows, _ = train(name, tmp_path, **flags)
    assert rows[0]["charts/episodic_return"] < 40
    assert rows[-1]["charts/episodic_return"] > 150


def test_tracking_offline(tmp_path, monkeypatch):
    """The real W&B client, without an account: a run that `wandb sync` can send."""
    monkeypatch.setenv("WANDB_NOTES", "a note")
    run, _, folder = train("ppo_nnx", tmp_path, track=True)
    wandb.teardown()  # W&B's own process writes the file, and is waited for when a script ends
    (record,) = folder.glob("wandb/offline-run-*/*.wandb")
    content = record.read_bytes()
    for text in (run["args"]["run_name"], "a note", "losses/entropy", "peak_host_bytes"):
        assert text.encode() in content


def test_progress(tmp_path):
    """A line for each hundredth of the training, and one that says where it is."""
    flags = f"--total-timesteps 384 --runs-dir {tmp_path} --run-name piped".split()
    done = subprocess.run(
        command("ppo_linen", ROOT, *flags), capture_output=True, text=True, check=True
    )
    *lines, last = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"iteration {i}/3" for i in (1, 2, 3)]
    assert all(re.search(r": return \d+\.\d, [\d,]+ steps/s$", line) for line in lines[1:])
    assert last == f"written to {tmp_path}/piped" and done.stderr == ""


@pytest.mark.parametrize("name", TORCH_SCRIPTS)
@pytest.mark.parametrize(("torch_gpu", "jax_gpu"), [(True, False), (False, True), (False, False)])
def test_both_frameworks_use_the_cpu_unless_both_see_a_gpu(
    name, torch_gpu, jax_gpu, monkeypatch, capsys
):
    script = importlib.import_module(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_gpu)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if jax_gpu else "cpu")
    assert script.choose_device() == torch.device("cpu")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (torch_gpu != jax_gpu)
    if lines:
        assert lines[0].endswith("jax[cuda13]." if torch_gpu else "torch, a CUDA build.")

"""Whole runs of train(): that they learn, what they leave, and what they cost."""

import importlib
import json
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jax
import pytest
import torch
import wandb
from frameworks import ALL_SCRIPTS, TORCH_SCRIPTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch._inductor import metrics as inductor
from torch.utils._python_dispatch import TorchDispatchMode

SMALL: dict[str, Any] = {"num_envs": 4, "num_steps": 32, "num_minibatches": 2}
SMALL |= {"update_epochs": 2}
SMALL |= {"hidden_sizes": (8, 8), "total_timesteps": 128 * 6}


def train(name, runs_dir, **flags):
    """Return run.json, the rows of metrics.jsonl, and the folder."""
    script = importlib.import_module(name)
    args = script.Args(**SMALL | {"runs_dir": str(runs_dir)} | flags)
    script.train(args)
    folder = Path(args.runs_dir, args.run_name)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads((folder / "run.json").read_text()), rows, folder


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
            write(log, *args)
            self.now.clear()

        monkeypatch.setattr(script.RunLog, "write", watched)


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_a_run_learns_compiles_once_and_leaves_what_it_should(name, tmp_path, monkeypatch):
    """40 iterations of 2048 steps: far above the 20 that random actions reach."""
    torch._dynamo.utils.counters.clear()
    script, counts = importlib.import_module(name), Counts(monkeypatch)
    counts.watch(monkeypatch, script)
    flags: dict[str, Any] = {"num_envs": 16, "num_steps": 128, "num_minibatches": 4}
    flags |= {"update_epochs": 8, "hidden_sizes": (64, 64), "learning_rate": 1e-3}
    run, rows, folder = train(
        name, tmp_path, total_timesteps=2048 * 40, sync_for_timing=True, **flags
    )
    assert rows[0]["charts/episodic_return"] < 40
    assert rows[-1]["charts/episodic_return"] > 150
    check_counts(name, counts.per_iteration, len(rows))
    check_files(name, run, rows, folder)


def check_counts(name, counts, iterations):
    first, *rest = counts
    assert len(rest) == iterations - 1
    assert name == "ppo_torch_gymnasium" or first["compilations"] > 0
    # One transfer brings all metrics: a tensor in PyTorch, and in JAX a dict of 13 arrays. On the
    # CPU a view of an action is no transfer in JAX; PyTorch's cpu() counts, for each of 128 steps.
    transfers = {"ppo_torch_gymnasium": 1 + 128}.get(name, 1 if "torch" in name else 13)
    for row in rest:
        assert row.get("compilations", 0) == 0
        assert row["transfers"] == transfers
    # The policy and the minibatch step: two graphs, whole, and kernels made for them.
    compiled = name == "ppo_torch_compile"
    assert {row["graphs"] for row in counts} == {2 if compiled else 0}
    assert not torch._dynamo.utils.counters["graph_break"]
    assert not compiled or inductor.generated_kernel_count > 0


def check_files(name, run, rows, folder):
    left = sorted(path.name.split(".")[0] for path in folder.iterdir())
    assert left == ["checkpoint", "events", "lock", "metrics", "run"]
    for i, row in enumerate(rows):
        assert (row["iteration"], row["global_step"]) == (i, 2048 * (i + 1))
        total = row["time/rollout"] + row["time/update"]
        assert total == pytest.approx(row["time/iteration"])
        assert row["charts/SPS"] == pytest.approx(2048 / row["time/iteration"])
        assert row["charts/learning_rate"] == pytest.approx(1e-3 * (1 - i / 40))
    times = [row["time/iteration"] for row in rows]
    assert rows[0]["time/elapsed"] > times[0]
    assert run["durations"]["total"] > rows[-1]["time/elapsed"] > sum(times)
    assert run["durations"]["imports"] > 0
    assert (run["script"], run["status"], run["device"]) == (name, "completed", "cpu")
    assert (run["iteration"], run["resumed"]) == (40, [])
    assert run["args"]["env_id"] == "CartPole-v1"
    assert run["versions"]["jax"] == jax.__version__
    assert run["peak_host_bytes"] > 2**20
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    tags = {key for key in rows[-1] if "/" in key and rows[-1][key] is not None}
    assert tags <= set(events.Tags()["tensors"])
    steps = [event.step for event in events.Tensors("losses/entropy")]
    assert steps == [row["global_step"] for row in rows]


@pytest.mark.parametrize("name", ["ppo_linen", "ppo_torch"])
def test_matmul_precision_means_the_same_in_both_frameworks(name, tmp_path, monkeypatch):
    """TF32 on a GPU: in JAX the default, since its "high" computes some products in float32."""
    script = importlib.import_module(name)
    monkeypatch.setattr(script, "VecEnv", MagicMock(side_effect=InterruptedError))
    for precision, jax_has in [("highest", "highest"), ("high", "default")]:
        with pytest.raises(InterruptedError):  # before anything is compiled
            train(name, tmp_path, matmul_precision=precision)
        assert jax.config.jax_default_matmul_precision == jax_has  # ty: ignore[missing-attribute]
        assert name == "ppo_linen" or torch.get_float32_matmul_precision() == precision


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
                assert {x.shape for x in losses.values()} == {(args.num_minibatches, *agents)}
                results.append([*losses.values(), *map(torch.clone, agent.parameters())])
    eager, replayed = results[:3], results[3:]
    for one, other in zip(eager, replayed, strict=True):
        assert all(map(torch.equal, one, other))
    assert not torch.equal(eager[0][0], eager[1][0])


def test_another_seed_gives_other_numbers(tmp_path):
    """One script for each kind of generator: JAX's keys and PyTorch's."""
    for name in ("ppo_linen", "ppo_torch"):
        first, other = (
            train(name, tmp_path, seed=seed, total_timesteps=128)[1][0] for seed in (1, 2)
        )
        assert first["losses/value_loss"] != other["losses/value_loss"]
        assert first["losses/entropy"] != other["losses/entropy"]


def test_no_finished_episode_and_a_diverged_loss_are_null_and_said(tmp_path, capsys):
    """No episode of CartPole ends in two steps; such a learning rate makes NaN of the weights."""
    flags: dict[str, Any] = {"num_steps": 2, "learning_rate": 1e30, "adam_eps": 1e-30}
    _, rows, folder = train("ppo_linen", tmp_path, total_timesteps=8 * 3, **flags)
    assert (rows[0]["charts/episodes"], rows[0]["charts/episodic_return"]) == (0, None)
    assert rows[0]["charts/episodic_length_max"] is None
    assert rows[-1]["losses/policy_loss"] is None and rows[-1]["losses/value_loss"] is None
    for path in (folder / "metrics.jsonl", folder / "run.json"):
        assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("iteration 1/3: no episode ended")
    assert ", diverged: the loss is not a number, " in said[3]


@pytest.mark.parametrize("name", ["ppo_linen", "ppo_torch"])
def test_without_compilation(name, tmp_path):
    """Op by op, a run is the same but for the last digits."""
    flag = "jit_env" if name == "ppo_torch" else "jit"
    tiny = {"num_steps": 4, "total_timesteps": 16, "update_epochs": 1, "run_name": "compiled"}
    compiled, rows, _ = train(name, tmp_path, **tiny)
    tiny["run_name"] = "op_by_op"
    run, rows_op_by_op, _ = train(name, tmp_path, **tiny, **{flag: False})
    assert run["compile_mode"] == "none"
    assert compiled["compile_mode"] == ("jit" if name == "ppo_linen" else "env.jit")
    for key, x in rows[0].items():
        if x is not None and key.startswith(("losses/", "charts/episod")):
            assert rows_op_by_op[0][key] == pytest.approx(x, rel=1e-3, abs=1e-5)


def test_tracking_offline(tmp_path, monkeypatch):
    """The real W&B client, without an account: a run that `wandb sync` can send."""
    monkeypatch.setenv("WANDB_NOTES", "a note")
    run, _, folder = train("ppo_linen", tmp_path, track=True)
    wandb.teardown()  # W&B's own process writes the file, and is waited for when a script ends
    (record,) = folder.glob("wandb/offline-run-*/*.wandb")
    content = record.read_bytes()
    for text in (run["args"]["run_name"], "a note", "losses/entropy", "peak_host_bytes"):
        assert text.encode() in content


def test_what_is_printed(tmp_path, capsys, monkeypatch):
    """A line for each hundredth of the training; the driver's RUN_INFO is in run.json."""
    monkeypatch.setenv("RUN_INFO", '{"gpu_driver": "580.1", "cores": 7}')
    run, _, folder = train("ppo_linen", tmp_path, total_timesteps=128 * 150)
    assert (run["gpu_driver"], run["cores"], run["framework"]) == ("580.1", 7, "linen")
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first == f"{folder}: the first iteration takes longer, since it compiles"
    assert [line.split(":")[0] for line in lines] == [
        f"iteration {2 * i}/150" for i in range(1, 76)
    ]
    assert all(re.search(r": return \d+(\.\d+)?, [\d,]+ steps/s$", line) for line in lines[1:])
    assert last == f"Written to {folder}; python evaluate.py {folder} plays it"


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

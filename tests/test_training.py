"""Whole runs of train(): that they go on, learn, what they leave, and what they cost."""

import importlib
import os
import re
import shlex
from unittest.mock import MagicMock

import jax
import numpy as np
import probes  # noqa: F401  (registers the environment)
import pytest
import reference
import scripted  # noqa: F401  (registers the environments)
import torch
from conftest import ROOT
from frameworks import weights_in
from running import (
    Counts,
    arrays,
    assert_close,
    assert_tensorboard_agrees,
    flags_of,
    info,
    main,
    make_whole_run,
    metrics,
    op_by_op,
    rewind,
    rows,
    train,
)
from sections import ALL_SCRIPTS, GYMNASIUM_SCRIPTS, PPO_SCRIPTS, RNN_SCRIPTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch._inductor import metrics as inductor

COMPILED = ("ppo_torch_compile", "ppo_torch_vmap")
LIKE_NNX = ("ppo_nnx_cached", "ppo_nnx_tree")  # they train as ppo_nnx does, to the last digit


# === Every script ===============================================================================
@pytest.fixture(scope="module", params=PPO_SCRIPTS)
def name(request):
    """Of the module, so that one process does all tests of a script's run."""
    return request.param


def check_counts(name, counts):
    first, *rest = counts
    assert name.endswith("torch_gymnasium") or first["compilations"] > 0
    assert not any(row.get("compilations", 0) for row in rest)
    steps_in_jax = "torch" in name and "gymnasium" not in name
    assert first.get("jit(step)", 0) == steps_in_jax


def test_nothing_compiles_twice_and_one_transfer_brings_all_metrics(name, whole_run):
    counts = whole_run(name).counts
    assert len(counts) == 4
    check_counts(name, counts)
    # A tensor in PyTorch, and in JAX a dict of 13 arrays. On the CPU a view of an action is no
    # transfer in JAX; PyTorch's cpu() counts, for each of 32 steps. With memory it must know how
    # long the longest episode is, in each of 4 minibatches.
    own = {"ppo_torch_gymnasium": 1 + 32, "ppo_rnn_torch": 1 + 4}
    own["ppo_continuous_torch_gymnasium"] = own["ppo_torch_gymnasium"]
    own["ppo_torch_ddp"] = 2  # and whether a rank received a signal
    transfers = own.get(name, 1 if "torch" in name else 13)
    # A checkpoint takes transfers after the second iteration.
    assert (counts[1]["transfers"], counts[3]["transfers"]) == (transfers, transfers)


def test_a_run_goes_on_from_its_checkpoint_to_the_last_digit(
    name, whole_run, tmp_path, monkeypatch
):
    """What came after the checkpoint is forgotten; of many agents, theirs is ahead."""
    run = whole_run(name)
    if name in GYMNASIUM_SCRIPTS:  # which go on with new episodes, so here all are alike
        flags = (*flags_of(name), "--env-id", "Constant-v0")

        def begin(folder):
            train(name, folder.parent, folder.name, *flags, iterations=4)

        run = make_whole_run(name, tmp_path, begin)
    folder = rewind(run, tmp_path / "killed")
    script, counts = importlib.import_module(name), Counts(monkeypatch)
    counts.watch(monkeypatch, script)
    op_by_op(monkeypatch, script)
    assert main(name, "--resume", folder) == 0
    assert len(counts.per_iteration) == 2
    check_counts(name, counts.per_iteration)
    places = [path.parent.relative_to(folder) for path in folder.rglob("checkpoint.npz")]
    assert len(places) == (4 if "vmap" in name else 1)
    for place in places:
        assert metrics(folder / place) == metrics(run.folder / place)
        assert_tensorboard_agrees(folder / place)
        assert info(folder / place)["resumed"] == [2]
        ours, theirs = arrays(folder / place), arrays(run.folder / place)
        assert ours.keys() == theirs.keys()
        for array in ours.keys() - {"info"}:
            np.testing.assert_array_equal(ours[array], theirs[array], strict=True)


def test_all_of_nnx_train_alike(whole_run):
    first, *others = (metrics(whole_run(name).folder) for name in ("ppo_nnx", *LIKE_NNX))
    assert all(other == first for other in others)


# === Learning ===================================================================================
@pytest.mark.parametrize("name", ["ppo_linen", "ppo_torch"])
def test_a_run_learns_and_leaves_what_it_should(name, tmp_path, capsys, monkeypatch):
    """40 iterations of 2048 steps: far above the 20 that random actions reach."""
    monkeypatch.setenv("RUN_INFO", '{"gpu_driver": "580.1", "cores": 7}')  # the driver's
    flags = "--num-envs 16 --num-steps 128 --num-minibatches 4 --update-epochs 8 --hidden-sizes 64"
    flags += f" 64 --learning-rate 1e-3 --total-timesteps {2048 * 40} --sync-for-timing"
    folder = train(name, tmp_path, "run", *flags.split())
    logged, run = rows(folder), info(folder)
    assert logged[0]["charts/episodic_return"] < 40
    assert logged[-1]["charts/episodic_return"] > 150

    left = sorted(path.name.split(".")[0] for path in folder.iterdir())
    assert left == ["checkpoint", "events", "metrics", "run"]
    for i, row in enumerate(logged):
        assert (row["iteration"], row["global_step"]) == (i, 2048 * (i + 1))
        total = row["time/rollout"] + row["time/update"]
        assert total == pytest.approx(row["time/iteration"])
        assert row["charts/SPS"] == pytest.approx(2048 / row["time/iteration"])
        assert row["charts/learning_rate"] == pytest.approx(1e-3 * (1 - i / 40))
    times = [row["time/iteration"] for row in logged]
    assert run["durations"]["total"] > logged[-1]["time/elapsed"] > sum(times)
    assert run["durations"]["imports"] > 0
    assert (run["script"], run["status"], run["device"]) == (name, "completed", "cpu")
    assert (run["iteration"], run["resumed"], run["args"]["env_id"]) == (40, [], "CartPole-v1")
    assert (run["gpu_driver"], run["cores"], run["framework"]) == ("580.1", 7, name[4:])
    assert run["versions"]["jax"] == jax.__version__
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = {key for key, x in logged[-1].items() if "/" in key and x is not None}
    assert tags <= set(events.Tags()["scalars"])

    first, *lines, written, last = capsys.readouterr().out.splitlines()
    assert first == f"{folder}: what is compiled is compiled first, which takes a while"
    line = r"iteration \d+/40: (return [\d.]+|no episode ended), [\d,]+ steps/s"
    assert len(lines) == 40 and all(re.fullmatch(line, x) for x in lines)
    assert written == f"Written to {folder}. To see what it learnt:"
    files = [os.path.relpath(ROOT / x) for x in ("evaluate.py", f"{name}.py")]
    assert shlex.split(last)[1:] == [files[0], str(folder), "--script", files[1]]


def test_no_finished_episode_and_a_diverged_loss_are_null_and_said(tmp_path, capsys):
    """No episode of CartPole ends in two steps; such a learning rate makes NaN of the weights."""
    flags = ["--num-steps", 2, "--learning-rate", 1e30, "--adam-eps", 1e-30]
    folder = train("ppo_linen", tmp_path, "run", *flags, "--total-timesteps", 8 * 150)
    logged = rows(folder)
    assert (logged[0]["charts/episodes"], logged[0]["charts/episodic_return"]) == (0, None)
    assert logged[0]["charts/episodic_length_max"] is None
    assert logged[-1]["losses/policy_loss"] is None and logged[-1]["losses/value_loss"] is None
    for path in (folder / "metrics.jsonl", folder / "run.json"):
        assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 + 75 + 2  # a line for each hundredth, which are two iterations
    assert said[1].startswith("iteration 2/150: no episode ended")
    assert said[75].startswith("iteration 150/150: ")
    assert ", diverged: the loss is not a number, " in said[75]


# === Environments whose values and best actions are known =======================================
PROBE = "--num-envs 16 --num-steps 16 --num-minibatches 4 --update-epochs 8 --hidden-sizes 16 "
PROBE += "--learning-rate 1e-2 --no-anneal-lr --gamma 0.5 --gae-lambda 0.5 --no-clip-vloss "
PROBE += "--env-id ProbeSignal-v0 --total-timesteps 6400"


@pytest.mark.parametrize("name", [x for x in ALL_SCRIPTS if x not in LIKE_NNX])
def test_the_best_actions_and_their_values(name, tmp_path, monkeypatch):
    """What an observation asks for, and a future beyond a cut."""
    op_by_op(monkeypatch, importlib.import_module(name))
    weights = weights_in(train(name, tmp_path, "run", *PROBE.split()))
    obs = np.array([[-1.0], [1.0]])
    probs = np.exp(reference.log_softmax(reference.forward(weights["actor"], obs)))
    assert probs[0, 0] > 0.95 and probs[1, 1] > 0.95
    np.testing.assert_allclose(reference.forward(weights["critic"], obs), 2.0, atol=0.2)


RECALL = "--num-envs 32 --num-steps 22 --num-minibatches 4 --update-epochs 8 --hidden-sizes 16 "
RECALL += "--gru-hidden-size 16 --learning-rate 1e-2 --gamma 0.99 --vf-coef 0.5"


@pytest.mark.parametrize("name", RNN_SCRIPTS)
def test_what_was_seen_10_steps_ago_is_remembered(name, tmp_path):
    """Without a memory, the mean return is 0. One step ago: test_policy.py."""
    flags = f"{RECALL} --env-id probes:Recall10 --total-timesteps {32 * 22 * 30}"
    folder = train(name, tmp_path, "run", *flags.split())
    assert rows(folder)[-1]["charts/episodic_return"] > 0.8


# === Compilation ================================================================================
@pytest.mark.parametrize(("name", "flag"), [("ppo_linen", "jit"), ("ppo_torch", "jit-env")])
def test_without_xla_a_run_is_the_same_but_for_the_last_digits(name, flag, tmp_path):
    flags = ["--num-steps", 4, "--total-timesteps", 16, "--update-epochs", 1, "--hidden-sizes", 8]
    compiled = train(name, tmp_path, "compiled", *flags)
    without = train(name, tmp_path, "without", *flags, f"--no-{flag}")
    assert info(without)["compile_mode"] == "none"
    assert info(compiled)["compile_mode"] == ("jit" if name == "ppo_linen" else "env.jit")
    assert_close(metrics(without), metrics(compiled))


@pytest.mark.parametrize("name", COMPILED)
def test_by_torch_compile_too_and_its_graphs_are_whole(name, whole_run, tmp_path, monkeypatch):
    """The minibatch step, and of many agents the policy; their kernels are made once."""
    torch._dynamo.utils.counters.clear()
    counts = Counts(monkeypatch)
    counts.watch(monkeypatch, importlib.import_module(name))
    folder = train(name, tmp_path, "compiled", *flags_of(name), iterations=4)
    graphs = 1 if name == "ppo_torch_compile" else 2
    assert [row["graphs"] for row in counts.per_iteration] == [graphs] * 4
    assert not torch._dynamo.utils.counters["graph_break"]
    assert inductor.generated_kernel_count > 0
    assert counts.per_iteration[1]["transfers"] == 1
    assert_close(metrics(folder), metrics(whole_run(name).folder))


def test_a_captured_function_replays_and_its_state_is_restored(monkeypatch):
    """capture() with stand-ins for CUDA, whose graph calls the function again on its memory."""
    seen, static, state, cuda = [], [], torch.zeros(1), MagicMock()

    def function(x):
        seen.append(x)
        static.append(x + state)
        state.add_(1)
        return static[-1]

    class Graph:
        def replay(self):
            recorded = static[3]  # of the recording, after three calls to warm up
            recorded.copy_(function(seen[3]))

    monkeypatch.setattr(torch, "cuda", cuda)
    cuda.CUDAGraph = Graph
    replay = importlib.import_module("ppo_torch_compile").capture(function, (state,))
    x = torch.tensor([10.0])
    first, second = replay(x), replay(x + 1)
    assert (first.item(), second.item(), state.item()) == (10, 12, 2)
    assert len(seen) == 6 and x.item() == 10
    cuda.graph.assert_called_once()
    assert cuda.graph.call_args.kwargs == {"capture_error_mode": "thread_local"}


# === Devices ====================================================================================
@pytest.mark.parametrize("name", PPO_SCRIPTS)
def test_matmul_precision_means_the_same_in_all(name, tmp_path, monkeypatch):
    """TF32 on a GPU: in JAX the default, since its "high" computes some products in float32."""
    script = importlib.import_module(name)
    stop = MagicMock(side_effect=InterruptedError)  # before anything is compiled
    monkeypatch.setattr(script, "VecEnv", stop)
    for precision, jax_has in [("highest", "highest"), ("high", "default")]:
        with pytest.raises(InterruptedError):
            script.train(script.Args(matmul_precision=precision))
        has = jax.config.jax_default_matmul_precision  # ty: ignore[missing-attribute]
        assert has == jax_has or name.endswith("torch_gymnasium")  # in which JAX has no part
        assert "torch" not in name or torch.get_float32_matmul_precision() == precision


@pytest.mark.parametrize(
    ("torch_gpu", "jax_gpu", "missing"),
    [(True, False, "jax[cuda13]."), (False, True, "torch, a CUDA build."), (False, False, "")],
)
def test_both_frameworks_use_the_cpu_unless_both_see_a_gpu(
    torch_gpu, jax_gpu, missing, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_gpu)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if jax_gpu else "cpu")
    for name in ("ppo_torch", *COMPILED):
        script = importlib.import_module(name)
        assert script.choose_device() == torch.device("cpu")
        said = capsys.readouterr().out
        assert said.endswith(f"{missing}\n") if missing else not said

"""Complete runs of train(): files, resuming, messages, learning and compilation."""

import importlib
import json
import signal
import subprocess
import sys
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest
import reference
import torch
from conftest import ROOT
from flax import nnx
from frameworks import weights_in
from running import (
    AGENTS,
    BATCH,
    Counts,
    arrays,
    assert_close,
    assert_same_checkpoints,
    assert_tensorboard_agrees,
    flags_of,
    info,
    main,
    metrics,
    op_by_op,
    rewind,
    rows,
    stop,
    train,
)
from sections import (
    ALL_SCRIPTS,
    CONTINUOUS_SCRIPTS,
    IMAGE_SCRIPTS,
    PPO_SCRIPTS,
    but,
    scripts,
)
from torch._inductor import metrics as inductor

COMPILED = ("ppo_torch_compile", "ppo_torch_vmap", "ppo_continuous_torch_compile_gymnasium")
COMPILED += ("ppo_cnn_torch_compile_gymnasium",)
IN_NUMPY = [x for x in scripts("ppo", "torch") if "gymnasium" in x]  # scripts without JAX
LIKE_NNX = ("ppo_nnx_cached", "ppo_nnx_tree")  # the same numbers as ppo_nnx


# === Every script ===============================================================================
@pytest.fixture(scope="module", params=PPO_SCRIPTS)
def name(request):
    """Return the name of a script. With module scope, pytest groups the tests by script."""
    return request.param


def check_counts(name, counts):
    first, *rest = counts
    assert name in IN_NUMPY or first["compilations"] > 0
    assert not any(row.get("compilations", 0) for row in rest)
    steps_in_jax = "torch" in name and "gymnasium" not in name
    assert first.get("jit(step)", 0) == steps_in_jax


def test_nothing_compiles_twice_and_metrics_need_one_transfer(name, whole_run):
    counts = whole_run(name).counts
    assert len(counts) == 5
    check_counts(name, counts)
    # The metrics are one tensor in PyTorch, and 15 arrays in JAX. In addition, PyTorch scripts for
    # Gymnasium call cpu() in each of 32 steps, and ppo_rnn_torch reads a number per minibatch.
    own = dict.fromkeys(IN_NUMPY, 1 + 32) | {"ppo_rnn_torch": 1 + 4}
    own["ppo_torch_ddp"] = 2  # one for metrics, one for signals
    own["ppo_continuous_equinox"] = 14  # its constant learning rate is not an array
    transfers = own.get(name, 1 if "torch" in name else 15)
    # Skip counts[2] and counts[4], which include saving a checkpoint.
    assert (counts[1]["transfers"], counts[3]["transfers"]) == (transfers, transfers)


def test_a_run_folder_describes_the_run(name, whole_run):
    """Compare what scripts pass to RunLog; test_the_files_of_a_run covers the rest."""
    folder = whole_run(name).folder
    logged, run = rows(folder), info(folder)
    for i, row in enumerate(logged):
        share = 1 - i / 5 if run["args"]["anneal_lr"] else 1
        rate = pytest.approx(run["args"]["learning_rate"] * share)
        assert row["charts/learning_rate"] == rate
        assert row["charts/episodes"] > 0 and row["losses/entropy"] > 0
        assert row["charts/param_norm"] > 0
    expected = {"script": name, "status": "completed", "iteration": 5, "device": "cpu"}
    expected |= {"obs_shape": [4], "num_actions": 2}
    if name in IMAGE_SCRIPTS:
        expected |= {"obs_shape": [9, 8, 3], "channels_first": False}
    if name in CONTINUOUS_SCRIPTS:
        expected |= {"obs_shape": [3], "action_low": [-1, 0], "action_high": [3, 10]}
        del expected["num_actions"]
    assert run.items() >= expected.items()
    assert run["versions"]["numpy"] == np.__version__
    framework = "torch" if "torch" in name else "jax"
    assert run["versions"][framework] == importlib.import_module(framework).__version__


def test_a_checkpoint_has_the_current_observations(name, whole_run):
    """In CartPole and Aim, the first number of an observation is also part of the state.

    XLA may round the two copies differently.
    """
    if "gymnasium" in name:
        pytest.skip("the state of Gymnasium environments cannot be saved")
    folder = whole_run(name).folder
    (obs_dim,) = info(folder)["obs_shape"]
    found = list(arrays(folder).values())
    first = [x for x in found if x.shape[-2:] == (4, obs_dim)][-1][..., 0]
    assert any(x.shape == first.shape and np.allclose(x, first, atol=1e-6) for x in found)


def test_resuming_is_exact(name, whole_run, tmp_path, monkeypatch):
    """Resume after the second iteration, at 1000 s. A signal then stops the run in the fourth."""
    run = whole_run(name)
    folder = rewind(run, tmp_path / "killed")
    for path in folder.rglob("metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[1]["time/elapsed"] = 1000.0
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    script, counts = importlib.import_module(name), Counts(monkeypatch)
    op_by_op(monkeypatch, script)
    log = getattr(script, "RunLogs", script.RunLog)
    write = log.write

    def write_and_stop(log, iteration, *args):
        write(log, iteration, *args)
        if iteration == 3:
            stop(log)

    monkeypatch.setattr(log, "write", write_and_stop)
    counts.watch(monkeypatch, script)
    assert main(name, "--resume", folder) == 128 + signal.SIGTERM
    assert len(counts.per_iteration) == 2
    check_counts(name, counts.per_iteration)
    assert_same_checkpoints(folder, run.saved / "4")
    places = [path.parent.relative_to(folder) for path in folder.rglob("checkpoint.*")]
    assert len(places) == (4 if "vmap" in name else 1)
    for place in places:
        assert metrics(folder / place) == metrics(run.folder / place)[:4]
        elapsed = [row["time/elapsed"] for row in rows(folder / place)]
        assert 1000 < elapsed[2] < elapsed[3]
        assert_tensorboard_agrees(folder / place)
        said = info(folder / place)
        assert (said["status"], said["iteration"], said["resumed"]) == ("stopped", 4, [2])


@pytest.mark.parametrize(("name", "agents"), [("ppo_torch", 1), ("ppo_linen_vmap", AGENTS)])
def test_the_files_of_a_run(name, agents, whole_run):
    folder = whole_run(name).folder
    logged, run = rows(folder), info(folder)
    steps = BATCH * agents
    for i, row in enumerate(logged):
        assert (row["iteration"], row["global_step"]) == (i, steps * (i + 1))
        total = row["time/rollout"] + row["time/update"]
        assert total == pytest.approx(row["time/iteration"])
        assert row["charts/SPS"] == pytest.approx(steps / row["time/iteration"])
    assert_tensorboard_agrees(folder)
    times = [row["time/iteration"] for row in logged]
    assert min(run["ended"] - run["started"], logged[-1]["time/elapsed"]) > sum(times)
    left = sorted(path.name.split(".")[0] for path in folder.iterdir() if path.is_file())
    assert left == ["checkpoint", "events", "metrics", "run"]
    assert (run["resumed"], run["args"]["hidden_sizes"]) == ([], [8, 8])


def test_the_three_nnx_scripts_give_the_same_numbers(whole_run):
    first, *others = (metrics(whole_run(name).folder) for name in ("ppo_nnx", *LIKE_NNX))
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", [x for x in scripts("ppo", "nnx") if x.endswith("_gymnasium")])
def test_nnx_gives_the_same_numbers_as_linen(name, whole_run, tmp_path, monkeypatch):
    """The scripts initialize weights with different keys, so copy those of Linen."""
    other = name.replace("nnx", "linen")
    script, linen = map(importlib.import_module, (name, other))
    make_agent = script.make_agent

    def make_same_agent(*args):
        agent, optimizer = make_agent(*args)
        structure = jax.tree.structure(nnx.state(agent))
        leaves = jax.tree.leaves(linen.make_agent(*args).params)  # in the same order
        nnx.update(agent, jax.tree.unflatten(structure, leaves))
        return agent, optimizer

    monkeypatch.setattr(script, "make_agent", make_same_agent)
    folder = train(name, tmp_path, "run", *flags_of(name), iterations=5)
    assert metrics(folder) == metrics(whole_run(other).folder)


# === Messages ===================================================================================
def test_statistics_are_null_without_finished_episodes(tmp_path, monkeypatch):
    """No episode of CartPole ends in the first two steps."""
    monkeypatch.setenv("RUN_INFO", '{"gpu_driver": "580.1", "cores": 7}')  # as benchmark.sh does
    folder = train("ppo_torch", tmp_path, "run", "--num-steps", 2, "--total-timesteps", 8)
    [row] = rows(folder)
    assert (row["charts/episodes"], row["charts/episodic_return"]) == (0, None)
    assert row["charts/episodic_length_max"] is None
    assert "NaN" not in (folder / "metrics.jsonl").read_text()
    assert (info(folder)["gpu_driver"], info(folder)["cores"]) == ("580.1", 7)


def test_jax_computes_no_nan_on_purpose(tmp_path, monkeypatch):
    """No episode ends in the first two steps, so there is no mean return."""
    jax.config.update("jax_debug_nans", True)
    try:
        train("ppo_linen", tmp_path, "run", "--num-steps", 2, "--total-timesteps", 8)
    finally:
        jax.config.update("jax_debug_nans", False)


def test_metrics_may_be_python_numbers(tmp_path, monkeypatch):
    script = importlib.import_module("ppo_torch")
    statistics = script.episode_statistics
    monkeypatch.setattr(
        script, "episode_statistics", lambda storage: statistics(storage) | {"charts/mine": 3.5}
    )
    assert rows(train("ppo_torch", tmp_path, "run", iterations=2))[-1]["charts/mine"] == 3.5


def test_the_last_line_is_a_command_that_works(tmp_path, capsys, monkeypatch):
    """The command works with a custom environment."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/helpers"))
    folder = train("ppo_linen", tmp_path, "a", "--env-id", "probes:Recall1", iterations=1)
    _, _, line = capsys.readouterr().out.splitlines()[-1].partition(": ")
    python, *words = line.split()
    assert python == "python"
    subprocess.run([sys.executable, *words, "--episodes", "2"], cwd=ROOT, check=True)
    assert (folder / "evaluation.json").exists()


@pytest.mark.parametrize("env_id", ["MinAtar/Breakout-v0", "my_module:MyEnv"])
def test_the_environment_id_adds_no_folders_to_the_path(env_id, tmp_path):
    script = importlib.import_module("ppo_torch")
    log = script.RunLog(script.Args(env_id=env_id, runs_dir=str(tmp_path)), 0, [])
    assert log.dir.parent == tmp_path and ":" not in log.dir.name
    assert (log.dir / "run.json").exists()


# === Probe environments =========================================================================
PROBE = "--num-envs 16 --num-steps 16 --num-minibatches 4 --update-epochs 8 --hidden-sizes 16 "
PROBE += "--learning-rate 1e-2 --no-anneal-lr --gamma 0.5 --gae-lambda 0.5 --no-clip-vloss "
PROBE += "--env-id ProbeSignal-v0 --total-timesteps 6400"


@pytest.mark.parametrize("name", but(ALL_SCRIPTS, *LIKE_NNX, "ppo_nnx_gymnasium"))
def test_agents_learn_the_best_actions_and_their_values(name, tmp_path, monkeypatch):
    """The observation names the best action, and truncated episodes are bootstrapped.

    The scripts that are left out give the same numbers as one of the others.
    """
    op_by_op(monkeypatch, importlib.import_module(name))
    weights = weights_in(train(name, tmp_path, "run", *PROBE.split()))
    obs = np.array([[-1.0], [1.0]])
    probs = np.exp(reference.log_softmax(reference.forward(weights["actor"], obs)))
    assert probs[0, 0] > 0.95 and probs[1, 1] > 0.95
    np.testing.assert_allclose(reference.forward(weights["critic"], obs), 2.0, atol=0.2)


# === Compilation ================================================================================
@pytest.mark.parametrize("name", COMPILED)
def test_torch_compile_gives_the_same_numbers_without_graph_breaks(
    name, whole_run, tmp_path, monkeypatch
):
    """The minibatch step, and in some scripts the policy, is compiled in the first iteration."""
    torch._dynamo.utils.counters.clear()
    counts = Counts(monkeypatch)
    counts.watch(monkeypatch, importlib.import_module(name))
    folder = train(name, tmp_path, "compiled", *flags_of(name), iterations=5)
    graphs = 1 if name in ("ppo_torch_compile", "ppo_cnn_torch_compile_gymnasium") else 2
    assert [row["graphs"] for row in counts.per_iteration] == [graphs] * 5
    assert not torch._dynamo.utils.counters["graph_break"]
    assert inductor.generated_kernel_count > 0
    assert counts.per_iteration[1]["transfers"] == whole_run(name).counts[1]["transfers"]
    assert_close(metrics(folder), metrics(whole_run(name).folder))


def test_a_captured_function_replays_and_its_state_is_restored(monkeypatch):
    """CUDA is replaced by a mock, whose graph calls the function on the recorded memory."""
    seen, static, state, cuda = [], [], torch.zeros(1), MagicMock()

    def function(x):
        seen.append(x)
        static.append(x + state)
        state.add_(1)
        return {"sum": static[-1]}

    class Graph:
        def replay(self):
            recorded = static[3]  # the recorded call follows three warm-up calls
            recorded.copy_(function(seen[3])["sum"])

    monkeypatch.setattr(torch, "cuda", cuda)
    cuda.CUDAGraph = Graph
    replay = importlib.import_module("ppo_torch_compile").capture(function, [state])
    x = torch.tensor([10.0])
    first, second = replay(x)["sum"], replay(x + 1)["sum"]
    assert (first.item(), second.item(), state.item()) == (10, 12, 2)
    assert len(seen) == 6 and x.item() == 10
    cuda.graph.assert_called_once()
    assert cuda.graph.call_args.kwargs == {"capture_error_mode": "thread_local"}


# === Devices ====================================================================================
@pytest.mark.parametrize("name", PPO_SCRIPTS)
def test_matmul_precision_means_the_same_in_all_scripts(name, tmp_path, monkeypatch):
    """For TF32 on a GPU, JAX needs "default": its "high" computes some products in float32."""
    script = importlib.import_module(name)
    stop = MagicMock(side_effect=InterruptedError)  # stops before compilation
    monkeypatch.setattr(script, "VecEnv", stop)
    names = [("highest", "highest"), ("high", "default"), ("medium", "default")]
    for precision, jax_has in names:
        with pytest.raises(InterruptedError):
            script.train(script.Args(matmul_precision=precision))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        has = jax.config.jax_default_matmul_precision  # ty: ignore[missing-attribute]
        assert has == jax_has or name in IN_NUMPY
        assert "torch" not in name or torch.get_float32_matmul_precision() == precision


@pytest.mark.parametrize(
    ("torch_gpu", "jax_gpu", "missing"),
    [(True, False, "jax[cuda13]."), (False, True, "a CUDA build of torch."), (False, False, "")],
)
def test_both_frameworks_use_the_cpu_unless_both_see_a_gpu(
    torch_gpu, jax_gpu, missing, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_gpu)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if jax_gpu else "cpu")
    for name in ("ppo_torch", "ppo_torch_compile", "ppo_torch_vmap"):
        script = importlib.import_module(name)
        assert script.choose_device() == torch.device("cpu")
        said = capsys.readouterr().out
        assert said.endswith(f"{missing}\n") if missing else not said

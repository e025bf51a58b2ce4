"""One training on many devices: it is that of one device, it goes on, and it ends as a whole.

JAX's devices are those of one CPU, by JAX_NUM_CPU_DEVICES, or of two processes that believe to be
Slurm's. PyTorch's are processes of torchrun.
"""

import importlib
import math
import os
import re
import shutil
import signal
import socket
import sys
import time
import weakref
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, start_process
from flax.training.train_state import TrainState
from frameworks import make_args
from running import (
    BATCH,
    arrays,
    assert_close,
    assert_same_checkpoints,
    change,
    command,
    info,
    main,
    metrics,
    train,
)
from sections import path_of
from torch.nn.parallel import DistributedDataParallel

import evaluate
import ppo_linen
import ppo_linen_sharded
import ppo_torch

SHARDED, DDP = "ppo_linen_sharded", "ppo_torch_ddp"
# 4 environments, 32 steps, 2 epochs of 2 minibatches; a step is large enough to tell mistakes.
FLAGS = ["--learning-rate", "1e-2", "--matmul-precision", "highest"]
COLLECTIVE = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


def start(devices, name, *words, **variables):
    """A script on so many devices of this machine, from the list that command() returns."""
    program = [sys.executable]
    found = jax.config.jax_compilation_cache_dir  # ty: ignore[missing-attribute]
    own = {"JAX_COMPILATION_CACHE_DIR": found}
    own["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    if name == SHARDED:
        own["JAX_NUM_CPU_DEVICES"] = str(devices)
    else:
        program += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    return start_process([*program, *words], ROOT, os.environ | own | variables)


def run(devices, name, *words, **variables):
    process = start(devices, name, *words, **variables)
    said = process.communicate(timeout=300)
    assert process.returncode == 0, said


def wait_for_iterations(folder, process):
    path = folder / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Script -> the folder of four iterations, of 4 devices in JAX and of 2 ranks in PyTorch.

    JAX's program lies beside it as text. A copy named half has the checkpoint after two iterations.
    """

    @cache
    def whole(name):
        runs_dir = tmp_path_factory.mktemp(name)
        devices = 2
        variables = {}
        if name == SHARDED:
            devices = 4
            flags = "--xla_dump_hlo_as_text --xla_backend_optimization_level=0"
            variables = {"XLA_FLAGS": f"--xla_dump_to={runs_dir}/program {flags}"}
            variables["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # found there, it leaves no text
        for iterations, run_name in ((4, "run"), (2, "half")):
            words = command(name, run_name, iterations, "--runs-dir", runs_dir, *FLAGS)[1:]
            run(devices, name, *words, "--no-anneal-lr", **variables)
            variables = {}
        change(runs_dir / "half", args={"total_timesteps": 4 * BATCH})
        return runs_dir / "run"

    return whole


# === The gradient of the whole batch ============================================================
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_jaxs_devices_take_the_gradient_of_the_whole_minibatch(devices):
    """By vmap, which gives the collectives their meaning on one device; SGD shows gradients."""
    args = make_args(ppo_linen, num_envs=8, update_epochs=1, max_grad_norm=1e9)
    share = replace(args, num_envs=8 // devices, norm_adv=False)
    env = ppo_linen.VecEnv(args.env_id, args.num_envs)
    made = ppo_linen.make_agent(args, env.obs_shape, env.num_actions, jax.random.PRNGKey(0))
    params = made.params
    agent = ppo_linen.Agent(env.obs_shape, args.hidden_sizes, env.num_actions)
    state = TrainState.create(apply_fn=agent.apply, params=params, tx=optax.sgd(0.1))
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(4, 16, 8)).astype("f")
    obs = rng.normal(size=(16, 8, 4)).astype("f")
    rows[0] -= 1  # logprob
    action = jnp.array(rng.integers(0, 2, (16, 8)), jnp.int32)
    batch = ppo_linen.Batch(jnp.array(obs), action, *jnp.array(rows))
    key = jax.random.PRNGKey(7)

    # (T, N, ...) -> (devices, T, N / devices, ...)
    parts = jax.tree.map(lambda x: jnp.stack(jnp.split(x, devices, axis=1)), batch)
    on_share = partial(ppo_linen_sharded.train_on_share, args=share, norm_adv=True)
    on_all = jax.vmap(on_share, in_axes=(None, 0, None), axis_name="devices", axis_size=devices)
    found, _ = jax.jit(on_all)(state, parts, key)

    keys = [jax.random.split(jax.random.fold_in(key, i), 1)[0] for i in range(devices)]
    orders = [ppo_linen.shuffle(x, share.batch_size) for x in keys]
    assert devices == 1 or (orders[0] != orders[1]).any()
    minibatches = [
        jax.tree.map(lambda x, i=i: x[i].reshape(-1, *x.shape[3:])[orders[i]], parts)
        for i in range(devices)
    ]
    loss = partial(ppo_linen.ppo_loss, apply_fn=agent.apply, args=args)
    grad = jax.jit(jax.grad(loss, has_aux=True))
    for rows in np.split(np.arange(share.batch_size), args.num_minibatches):
        taken = [jax.tree.map(lambda x, rows=rows: x[rows], part) for part in minibatches]
        whole = jax.tree.map(lambda *x: jnp.concatenate(x), *taken)
        grads, _ = grad(state.params, batch=whole)
        state = state.apply_gradients(grads=grads)
    for device in range(devices):
        ours = jax.tree.map(lambda x, device=device: x[device], found.params)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), ours, state.params)


def one_rank_for_all(ranks, iterations, args):
    """What so many ranks do, in one: their rollouts, whose minibatches are put together.

    The agent, and what there is to log of each iteration.
    """
    share = replace(args, num_envs=args.num_envs // ranks)
    whole, env = (ppo_torch.VecEnv(args.env_id, x.num_envs) for x in (args, share))
    torch.manual_seed(args.seed)
    sizes = whole.obs_shape, whole.num_actions
    agent, optimizer, scheduler = ppo_torch.make_agent(args, *sizes, torch.device("cpu"))
    obs, state = jax.jit(whole.reset)(jax.random.PRNGKey(args.seed))
    state = state._replace(key=None)
    pick = [slice(i * share.num_envs, (i + 1) * share.num_envs) for i in range(ranks)]
    carries = [jax.tree.map(lambda x, rows=rows: x[rows], (obs, state)) for rows in pick]
    carries = [(ppo_torch.to_torch(x), y) for x, y in carries]
    step = jax.jit(env.step)
    policy = partial(ppo_torch.policy, agent)
    logged = []
    for iteration in range(iterations):
        parts, whole, losses = [], [], []
        episodes = []
        for i, (x, y) in enumerate(carries):
            seeds = np.random.SeedSequence([args.seed, iteration, i]).generate_state(2)
            torch.manual_seed(int(seeds[0]))
            y = y._replace(key=jnp.array(seeds))
            x, y, storage = ppo_torch.rollout(policy, x, y, step, env, share)
            carries[i] = (x, y)
            with torch.no_grad():
                value = agent.get_value(storage.obs)
                next_value = agent.get_value(storage.next_obs)
            advantage = ppo_torch.compute_gae(storage, value, next_value, share)
            batch = [*storage[:3], value, advantage, advantage + value]
            batch = [x.reshape(share.batch_size, *x.shape[2:]) for x in batch]
            whole.append(torch.stack(batch[4:]))
            orders = [torch.randperm(share.batch_size) for _ in range(args.update_epochs)]
            epochs = [[x[order].chunk(args.num_minibatches) for x in batch] for order in orders]
            parts.append(epochs)
            episodes += storage.episode_return[storage.terminated | storage.truncated].tolist()
        for epoch in range(args.update_epochs):
            for k in range(args.num_minibatches):
                columns = zip(*(part[epoch] for part in parts), strict=True)
                minibatch = [torch.cat([x[k] for x in column]) for column in columns]
                batch = ppo_torch.Batch(*minibatch)
                losses.append(ppo_torch.minibatch_step(agent, optimizer, scheduler, batch, args))
        row = {name: float(np.mean([x[name] for x in losses])) for name in losses[0]}
        advantage, target = torch.cat(whole, 1)
        row["losses/explained_variance"] = float(1 - advantage.var() / target.var())
        row |= {"charts/episodes": len(episodes), "charts/episodic_return": np.mean(episodes)}
        row |= {f"charts/episodic_return_{x.__name__}": x(episodes) for x in (min, max)}
        logged.append(row)
    return agent, logged


@pytest.mark.parametrize("ranks", [2, 4])
def test_pytorchs_ranks_learn_as_one_that_has_all_their_minibatches(ranks, whole, tmp_path):
    folder = whole(DDP)
    if ranks == 4:
        words = command(DDP, "run", 4, "--runs-dir", tmp_path, *FLAGS)[1:]
        run(ranks, DDP, *words, "--no-anneal-lr")
        folder = tmp_path / "run"
    args = replace(ppo_torch.Args(**info(folder)["args"]), matmul_precision="highest")
    agent, expected = one_rank_for_all(ranks, 4, args)
    assert_close([{x: row[x] for x in expected[0]} for row in metrics(folder)], expected)
    found = arrays(folder)
    for name, x in agent.state_dict().items():
        np.testing.assert_allclose(found[f"agent/{name}"], x, atol=1e-5)
    assert info(folder)["devices"] == ranks


def test_jaxs_devices_learn_as_one_whose_minibatch_is_the_whole_batch(tmp_path):
    """For which no order counts, so ppo_linen's numbers are those to have."""
    flags = [*FLAGS, "--num-minibatches", "1", "--update-epochs", "2"]
    alone = train("ppo_linen", tmp_path, "alone", *flags, iterations=4)
    words = command(SHARDED, "two", 4, "--runs-dir", tmp_path, *flags)[1:]
    run(2, SHARDED, *words)
    assert_close(metrics(tmp_path / "two"), metrics(alone))
    ours, theirs = arrays(tmp_path / "two"), arrays(alone)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-5)


def test_jax_reduces_once_a_minibatch_and_gathers_nothing(whole):
    """In the compiled program of four devices."""
    texts = {}
    for name in ("rollout", "update"):
        [path] = (whole(SHARDED).parent / "program").glob(f"*jit_{name}*after_optimizations.txt")
        texts[name] = path.read_text()
    assert not re.findall(COLLECTIVE, texts["rollout"])
    assert set(re.findall(COLLECTIVE, texts["update"])) == {"all-reduce"}
    results = re.findall(r" = (.*?) all-reduce\(", texts["update"])
    sizes = [sorted(map(size_of, re.findall(r"\[([\d,]*)\]", x))) for x in results]
    # All arrays of the gradient, and numbers, of which each of two minibatches has one.
    gradient = sorted([4 * 8, 8, 8 * 8, 8, 8 * 2, 2, 4 * 8, 8, 8 * 8, 8, 8 * 1, 1])
    assert [x for x in sizes if max(x) > 2] == [gradient]
    assert len(sizes) == 9


def size_of(shape):
    return math.prod(int(x) for x in shape.split(",") if x)


# === Going on ===================================================================================
@pytest.mark.parametrize(("name", "devices"), [(SHARDED, 4), (DDP, 2)])
def test_as_many_devices_go_on_to_the_last_digit(name, devices, whole, tmp_path):
    folder = shutil.copytree(whole(name).parent / "half", tmp_path / "half")
    run(devices, name, path_of(name), "--resume", folder)
    assert metrics(folder) == metrics(whole(name))
    assert_same_checkpoints(folder, whole(name))


@pytest.mark.parametrize(("name", "devices"), [(SHARDED, 1), (SHARDED, 2), (DDP, 1)])
def test_another_number_of_devices_goes_on(name, devices, whole, tmp_path, monkeypatch, capsys):
    """From the same parameters and the same episodes."""
    folder = shutil.copytree(whole(name).parent / "half", tmp_path / "half")
    if devices == 1:
        assert main(name, "--resume", folder) == 0
    else:
        run(devices, name, path_of(name), "--resume", folder)
    ours, theirs = metrics(folder), metrics(whole(name))
    assert ours[:2] == theirs[:2] and len(ours) == 4
    assert (info(folder)["resumed"], info(folder)["devices"]) == ([2], devices)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", str(folder), "--episodes", "2"])
    evaluate.main()
    assert f"{folder}: {name}, CartPole-v1" in capsys.readouterr().out


# === Ending =====================================================================================
def start_two(name, tmp_path):
    """Two processes of a long run that trains: what waits for them, and both."""
    words = command(name, "run", 10**6, "--runs-dir", tmp_path, *FLAGS)[1:]
    if name == SHARDED:
        both = start_two_tasks(*words)
        wait_for_iterations(tmp_path / "run", both[0])
        return both, [psutil.Process(x.pid) for x in both]
    waiting = start(2, name, *words)
    wait_for_iterations(tmp_path / "run", waiting)
    children = psutil.Process(waiting.pid).children()
    both = sorted(children, key=lambda x: int(x.environ()["RANK"]))
    return [waiting], both


def start_two_tasks(*words):
    """JAX's, as srun starts them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    slurm |= {"SLURM_STEP_NUM_TASKS": "2", "JAX_COORDINATOR_ADDRESS": f"localhost:{port}"}
    both = []
    for i in range(2):
        own = {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}
        both.append(start(1, SHARDED, *words, **slurm, **own))
    return both


@pytest.mark.parametrize("name", [SHARDED, DDP])
def test_a_killed_process_ends_the_others_with_an_error(name, tmp_path):
    waiting, both = start_two(name, tmp_path)
    both[1].kill()
    for process in waiting:
        process.communicate(timeout=100)  # JAX notices after 15 seconds
        assert process.returncode != 0
    assert not psutil.wait_procs(both, timeout=10)[1]
    assert info(tmp_path / "run")["status"] == "running"


@pytest.mark.parametrize("name", [SHARDED, DDP])
def test_a_signal_to_one_process_stops_all_with_a_checkpoint(name, tmp_path):
    """To torchrun, as Ctrl-C has it, and of JAX's processes to the second."""
    waiting, both = start_two(name, tmp_path)
    waiting[-1].send_signal(signal.SIGINT)
    said = [process.communicate(timeout=60)[0] for process in waiting]
    assert "Stopped after" in said[0]
    assert all(process.returncode != 0 for process in waiting)
    assert not psutil.wait_procs(both, timeout=10)[1]
    folder = tmp_path / "run"
    done = len(metrics(folder))
    assert done > 2 and arrays(folder)["iteration"] == done
    assert (info(folder)["status"], info(folder)["iteration"]) == ("stopped", done)


def test_where_the_first_task_cannot_begin_both_end(tmp_path):
    """As where a job is submitted twice."""
    (tmp_path / "run").mkdir()
    both = start_two_tasks(*command(SHARDED, "run", 4, "--runs-dir", tmp_path)[1:])
    said = [process.communicate(timeout=100)[1] for process in both]
    assert f"{tmp_path / 'run'} exists: choose another --run-name" in said[0]
    assert "exists" not in said[1]
    assert [process.returncode for process in both] == [2, 2]


def told_by(name):
    """The function by which a process tells the others whether it works, and where it is."""
    if name == DDP:
        return dist, "all_gather_object"
    return importlib.import_module(name), "process_allgather"


def test_ddp_is_freed_before_its_group(tmp_path, monkeypatch):
    """Freed later, it may wait for a thread of gloo that waits for Python's lock, for ever."""
    script = importlib.import_module(DDP)
    made, left = [], []

    def make(agent):
        ddp = DistributedDataParallel(agent)
        made.append(weakref.ref(ddp))
        return ddp

    def destroy():
        left.extend(x() for x in made)
        answer()

    answer = dist.destroy_process_group
    monkeypatch.setattr(script, "DistributedDataParallel", make)
    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    train(DDP, tmp_path, "run", iterations=2)
    assert left == [None]


@pytest.mark.parametrize("name", [SHARDED, DDP])
def test_the_others_wait_for_the_first_to_save_and_hear_that_it_failed(name, tmp_path, monkeypatch):
    """Once one rank has ended, torchrun ends the first one, which may be writing."""
    module, function = told_by(name)
    answer = getattr(module, function)
    told = []

    def tell(*words, **flags):
        told.append(words[-1])
        return answer(*words, **flags)

    monkeypatch.setattr(module, function, tell)
    save = MagicMock(side_effect=InterruptedError)
    monkeypatch.setattr(importlib.import_module(name), "save_checkpoint", save)
    with pytest.raises(InterruptedError):
        train(name, tmp_path, "run", iterations=2)
    assert not told[-1]


@pytest.mark.parametrize("name", [SHARDED, DDP])
def test_where_another_fails_this_one_ends(name, monkeypatch):
    def two(*words):
        words[0][:] = [True, False]

    module, function = told_by(name)
    both = np.array([True, False])
    monkeypatch.setattr(module, function, two if name == DDP else lambda worked: both)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(SystemExit, match="2"), importlib.import_module(name).all_or_none():
        pass


@pytest.mark.parametrize(("name", "asked"), [(SHARDED, "process_allgather"), (DDP, "reduce")])
def test_a_signal_while_processes_ask_each_other_waits_for_the_next_iteration(
    name, asked, tmp_path, monkeypatch
):
    """Stopping at once, one process would save alone and wait for ever; forgetting it, train on."""
    script = importlib.import_module(name)
    answer = getattr(script, asked)
    path = tmp_path / "run/metrics.jsonl"
    calls = []

    def ask(x, *words, **flags):
        x = answer(x, *words, **flags)
        if path.exists() and path.read_text().count("\n") == 3:
            calls.append(x)
            if len(calls) == 1:  # the first since the third iteration was logged
                signal.raise_signal(signal.SIGINT)
        return x

    monkeypatch.setattr(script, asked, ask)
    words = command(name, "run", 10, "--runs-dir", tmp_path)[2:]
    assert main(name, *words) == 128 + signal.SIGINT
    assert calls and len(metrics(tmp_path / "run")) == 4
    assert info(tmp_path / "run")["status"] == "stopped"


@pytest.mark.parametrize("name", [SHARDED, DDP])
def test_what_devices_cannot_share_is_said(name, tmp_path, monkeypatch, capfd):
    """By two that there are not."""
    if name == SHARDED:
        monkeypatch.setattr(jax, "make_mesh", lambda *shape: SimpleNamespace(size=2))
    else:
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    words = command(name, "run", 4, "--runs-dir", tmp_path, "--num-envs", "3")[2:]
    assert main(name, *words, "--total-timesteps", "960") == 2
    assert "cannot share environments and minibatches evenly" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_op_by_op_is_for_one_process(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    jax.config.update("jax_disable_jit", True)
    try:
        assert main(SHARDED, "--runs-dir", tmp_path) == 2
    finally:
        jax.config.update("jax_disable_jit", False)
    assert capfd.readouterr().err == "JAX_DISABLE_JIT: processes can only share what is compiled\n"


def test_a_rank_without_a_gpu_is_said_where_others_have_one(monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(DDP).choose_device()
    assert "no more processes on a machine than it has GPUs" in capfd.readouterr().err

"""Training on multiple devices: compare it with one device, resume it, and stop it.

In JAX, the devices are parts of one CPU (JAX_NUM_CPU_DEVICES), or two processes with the variables
that Slurm sets. In PyTorch, they are processes started by torchrun.
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

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import FAST_COMPILATION, ROOT, start_process
from flax.training.train_state import TrainState
from frameworks import floats, make_args, make_learner
from running import (
    arrays,
    assert_close,
    assert_same_checkpoints,
    command,
    info,
    main,
    metrics,
    stop,
    train,
)
from sections import path_of
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import evaluate
import ppo_linen
import ppo_linen_sharded
import ppo_nnx_sharded
import ppo_nnx_tree
import ppo_torch
from analysis.catalog import SCRIPTS

SHARDED, NNX, DDP = "ppo_linen_sharded", "ppo_nnx_sharded", "ppo_torch_ddp"
OWN_THREADS = ("ppo_torch_vmap", "ppo_cnn_torch_gymnasium", "ppo_cnn_torch_compile_gymnasium")
ONE_THREAD = [x for x in SCRIPTS if "torch" in x and x not in OWN_THREADS]
# Runs have 4 environments, 32 steps, 2 epochs and 2 minibatches. A high learning rate amplifies
# errors.
FLAGS = ["--learning-rate", "1e-2", "--matmul-precision", "highest"]
COLLECTIVE = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


class Reached(Exception):
    pass


@pytest.mark.parametrize(
    ("units", "variables", "expected"),
    [
        (64, {}, [1]),
        (128, {}, []),
        (64, {"OMP_NUM_THREADS": "2"}, []),
    ],
)
@pytest.mark.parametrize("name", ONE_THREAD)
def test_small_networks_use_one_thread(name, units, variables, expected, monkeypatch):
    def reached(_):
        raise Reached

    script = importlib.import_module(name)
    monkeypatch.delenv("OMP_NUM_THREADS")
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", reached)  # comes right after
    with pytest.raises(Reached):
        script.train(script.Args(hidden_sizes=(8, units)))
    assert set_to == expected


def start(devices, name, *words, **variables):
    """Start a script on several devices of this machine. words are its path and arguments."""
    program = [sys.executable]
    found = jax.config.jax_compilation_cache_dir  # ty: ignore[missing-attribute]
    own = {"JAX_COMPILATION_CACHE_DIR": found}
    own["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    if name != DDP:
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


# Copies the run folder after the second iteration. The first argument is the name of the script.
COPY = """
import importlib, shutil, sys

script = importlib.import_module(sys.argv.pop(1))
update_info = script.RunLog.update_info

def update_and_copy(log, **changes):
    update_info(log, **changes)
    if changes.get("iteration") == 2:
        shutil.copytree(log.dir, log.dir.parent / "half")

script.RunLog.update_info = update_and_copy
script.train(script.parse_args())
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that trains a script for four iterations on 4 JAX devices or 2 ranks.

    Next to the run folder, program/ contains the compiled JAX programs as text, and half/ is the
    run as it is after a kill, with two of the four iterations.
    """

    @cache
    def whole(name):
        runs_dir = tmp_path_factory.mktemp(name)
        devices = 2
        variables = {}
        if name != DDP:
            devices = 4
            dump = f"--xla_dump_hlo_as_text --xla_dump_to={runs_dir}/program"
            variables = {"XLA_FLAGS": f"{dump} {FAST_COMPILATION}"}
            variables["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # cached programs are not dumped
        program = runs_dir / "train_and_copy.py"
        program.write_text(COPY)
        flags = command(name, "run", 4, "--runs-dir", runs_dir, *FLAGS)[2:]
        variables["PYTHONPATH"] = f"{ROOT}:{ROOT}/more"
        run(devices, name, program, name, *flags, **variables)
        assert info(runs_dir / "half")["iteration"] == 2
        return runs_dir / "run"

    return whole


# === Comparison with one device =================================================================
def test_jax_devices_compute_the_gradient_of_the_entire_minibatch():
    """vmap simulates the devices. With SGD, parameter changes are proportional to gradients."""
    devices = 4
    args = make_args(ppo_linen, num_envs=8, update_epochs=1, max_grad_norm=1e9)
    share = replace(args, num_envs=8 // devices, norm_adv=False)
    env = ppo_linen.VecEnv(args.env_id, args.num_envs)
    made = ppo_linen.make_agent(args, env.obs_shape, env.num_actions, jax.random.PRNGKey(0))
    params = made.params
    agent = ppo_linen.Agent(args.hidden_sizes, env.num_actions)
    state = TrainState.create(apply_fn=agent.apply, params=params, tx=optax.sgd(0.1))
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(4, 16, 8)).astype("f")
    obs = rng.normal(size=(16, 8, 4)).astype("f")
    rows[0] -= 1  # log-probabilities are negative
    action = jnp.array(rng.integers(0, 2, (16, 8)), jnp.int32)
    batch = ppo_linen.Batch(jnp.array(obs), action, *jnp.array(rows))
    key = jax.random.PRNGKey(7)

    # (T, N, ...) -> (devices, T, N / devices, ...)
    parts = jax.tree.map(lambda x: jnp.stack(jnp.split(x, devices, axis=1)), batch)
    on_share = partial(ppo_linen_sharded.train_on_shard, args=share, norm_adv=True)
    on_all = jax.vmap(on_share, in_axes=(None, 0, None), axis_name="devices", axis_size=devices)
    found, _ = jax.jit(on_all)(state, parts, key)

    keys = [jax.random.split(jax.random.fold_in(key, i), 1)[0] for i in range(devices)]
    orders = [ppo_linen.shuffle(x, share.batch_size) for x in keys]
    assert (orders[0] != orders[1]).any()
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
    """Train one agent on the joined minibatches of several ranks, in this process.

    Return the agent and a list with the metrics of each iteration.
    """
    share = replace(args, num_envs=args.num_envs // ranks)
    whole, env = (ppo_torch.VecEnv(args.env_id, x.num_envs) for x in (args, share))
    torch.manual_seed(args.seed)
    sizes = whole.obs_shape, whole.num_actions
    agent, optimizer = ppo_torch.make_agent(args, *sizes, torch.device("cpu"))
    scheduler = LambdaLR(optimizer, partial(ppo_torch.learning_rate_factor, args=args))
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
            both_obs = torch.stack([storage.obs, storage.next_obs])
            with torch.no_grad():
                values = agent.get_value(both_obs.flatten(0, 2))
            value, next_value = values.view(2, args.num_steps, share.num_envs)
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


def test_pytorch_ranks_train_as_one_rank_with_their_joined_minibatches(whole):
    """The learning rate decays; it depends on the steps of all ranks."""
    ranks, folder = 2, whole(DDP)
    args = replace(ppo_torch.Args(**info(folder)["args"]), matmul_precision="highest")
    agent, expected = one_rank_for_all(ranks, 4, args)
    assert_close([{x: row[x] for x in expected[0]} for row in metrics(folder)], expected)
    found = arrays(folder)
    for name, x in agent.state_dict().items():
        np.testing.assert_allclose(found[f"agent/{name}"], x, atol=1e-5)
    assert info(folder)["devices"] == ranks


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_each_nnx_minibatch_has_the_same_number_of_steps_from_every_device(num_devices):
    """x[t, n] is 8 * t + n, so x % 8 is the environment, and x * num_devices // 8 its device."""
    args = make_args(ppo_nnx_sharded, num_envs=8)
    x = jnp.arange(args.batch_size).reshape(args.num_steps, 8)
    rows = ppo_nnx_sharded.split_by_device(x, num_devices)
    keys = jax.random.split(jax.random.PRNGKey(1), num_devices)
    order = jnp.stack([ppo_nnx_sharded.shuffle(key, rows.shape[1]) for key in keys])
    minibatches = np.array(ppo_nnx_sharded.gather(rows, order, args))
    assert sorted(minibatches.flat) == list(range(args.batch_size))
    assert (minibatches != np.sort(minibatches)).any(1).all()
    for minibatch in minibatches:
        counts = np.bincount(minibatch % 8 * num_devices // 8, minlength=num_devices)
        assert (counts == args.minibatch_size // num_devices).all()


@pytest.mark.parametrize("norm_adv", [True, False])
def test_nnx_update_on_one_device_equals_that_of_ppo_nnx_tree(norm_adv):
    made = make_learner("ppo_nnx_tree", norm_adv=norm_adv)
    other = make_learner("ppo_nnx_tree", norm_adv=norm_adv)
    storage, key = made.rollout(1), jax.random.key(2)
    update = partial(ppo_nnx_sharded.update, args=made.args, num_devices=1)
    ours = made.jit(update)(made.state, made.optimizer, storage, key)
    inputs = other.state, other.optimizer, storage, jax.random.fold_in(key, 0)
    theirs = other.jit(partial(ppo_nnx_tree.update, args=made.args))(*inputs)
    assert_close([floats(ours)], [floats(theirs)])
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), made.get_tree(), other.get_tree())


@pytest.mark.parametrize(("name", "one"), [(SHARDED, "ppo_linen"), (NNX, "ppo_nnx_tree")])
def test_jax_devices_train_as_one_device_with_one_minibatch(name, one, tmp_path):
    """With one minibatch per epoch, the order of the steps does not matter."""
    flags = [*FLAGS, "--num-minibatches", "1", "--update-epochs", "2"]
    alone = train(one, tmp_path, "alone", *flags, iterations=4)
    words = command(name, "two", 4, "--runs-dir", tmp_path, *flags)[1:]
    run(2, name, *words)
    assert_close(metrics(tmp_path / "two"), metrics(alone))
    ours, theirs = arrays(tmp_path / "two"), arrays(alone)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("name", "num_losses"), [(SHARDED, 0), (NNX, 5)])
def test_jax_communicates_only_through_one_all_reduce_per_minibatch(name, num_losses, whole):
    """Read the programs that JAX compiled for four devices: the rollout, then the update.

    In NNX, the operation that reduces the gradient also reduces the losses.
    """
    pattern = r"jit_(rollout|update|wrapped_fun)\..*after_optimizations\.txt"  # NNX wraps both
    folder = whole(name).parent / "program"
    rollout, update = [
        x.read_text() for x in sorted(folder.iterdir()) if re.search(pattern, x.name)
    ]
    assert not re.findall(COLLECTIVE, rollout)
    assert set(re.findall(COLLECTIVE, update)) == {"all-reduce"}
    results = re.findall(r" = (.*?) all-reduce\(", update)
    sizes = [sorted(map(size_of, re.findall(r"\[([\d,]*)\]", x))) for x in results]
    # One operation reduces the whole gradient. The others reduce one number, or one per minibatch.
    gradient = [4 * 8, 8, 8 * 8, 8, 8 * 2, 2, 4 * 8, 8, 8 * 8, 8, 8 * 1, 1]
    assert [x for x in sizes if max(x) > 2] == [sorted([*gradient, *[1] * num_losses])]
    assert len(sizes) == 9


def size_of(shape):
    return math.prod(int(x) for x in shape.split(",") if x)


# === Resuming ===================================================================================
@pytest.mark.parametrize(("name", "devices"), [(SHARDED, 4), (NNX, 4), (DDP, 2)])
def test_resuming_on_the_same_number_of_devices_is_exact(name, devices, whole, tmp_path):
    folder = shutil.copytree(whole(name).parent / "half", tmp_path / "half")
    run(devices, name, path_of(name), "--resume", folder)
    assert metrics(folder) == metrics(whole(name))
    assert_same_checkpoints(folder, whole(name))


@pytest.mark.parametrize("name", [SHARDED, NNX, DDP])
def test_resuming_on_a_new_number_of_devices(name, whole, tmp_path, monkeypatch, capsys):
    """The log continues after the second iteration, and evaluate.py accepts the run."""
    folder = shutil.copytree(whole(name).parent / "half", tmp_path / "half")
    assert main(name, "--resume", folder) == 0
    ours, theirs = metrics(folder), metrics(whole(name))
    assert ours[:2] == theirs[:2] and len(ours) == 4
    assert (info(folder)["resumed"], info(folder)["devices"]) == ([2], 1)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", str(folder), "--episodes", "2"])
    evaluate.main()
    assert f"{folder}: {name}, CartPole-v1" in capsys.readouterr().out


# === Termination ================================================================================
def start_two(name, tmp_path):
    """Start a long run. Return the started processes (or torchrun), and both training processes."""
    words = command(name, "run", 10**6, "--runs-dir", tmp_path, *FLAGS)[1:]
    if name != DDP:
        both = start_two_tasks(name, *words)
        wait_for_iterations(tmp_path / "run", both[0])
        return both, [psutil.Process(x.pid) for x in both]
    waiting = start(2, name, *words)
    wait_for_iterations(tmp_path / "run", waiting)
    children = psutil.Process(waiting.pid).children()
    both = sorted(children, key=lambda x: int(x.environ()["RANK"]))
    return [waiting], both


# Shorten the shutdown timeout: if a process raises, the others end after 15 s instead of 60 s.
SOONER = """
import runpy, sys
import jax

initialize = jax.distributed.initialize

def initialize_with_shorter_timeout(*, shutdown_timeout_seconds, **others):
    initialize(shutdown_timeout_seconds=shutdown_timeout_seconds // 4, **others)

jax.distributed.initialize = initialize_with_shorter_timeout
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start_two_tasks(name, *words):
    """Start two JAX processes as srun does."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    slurm |= {"SLURM_STEP_NUM_TASKS": "2", "JAX_COORDINATOR_ADDRESS": f"localhost:{port}"}
    both = []
    for i in range(2):
        own = {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}
        both.append(start(1, name, "-c", SOONER, *words, **slurm, **own))
    return both


@pytest.mark.parametrize("name", [SHARDED, DDP])
def test_a_signal_to_one_process_stops_all_with_a_checkpoint(name, tmp_path):
    """In PyTorch, torchrun receives the signal, as with Ctrl-C. In JAX, the second process does."""
    waiting, both = start_two(name, tmp_path)
    waiting[-1].send_signal(signal.SIGINT)
    said = [process.communicate(timeout=60)[0] for process in waiting]
    folder = tmp_path / "run"
    assert f"--resume {folder}" in said[0]
    codes = [1] if name == DDP else [128 + signal.SIGINT, 0]
    assert [process.returncode for process in waiting] == codes
    assert not psutil.wait_procs(both, timeout=10)[1]
    done = len(metrics(folder))
    assert done > 2 and arrays(folder)["iteration"] == done
    assert (info(folder)["status"], info(folder)["iteration"]) == ("stopped", done)


def test_a_run_that_diverges_ends_all_processes(tmp_path):
    """Only the first process knows, and the others wait for it."""
    flags = ["--learning-rate", 1e30, "--adam-eps", 1e-30]
    process = start(2, DDP, *command(DDP, "run", 100, "--runs-dir", tmp_path, *flags)[1:])
    assert "Diverged" in process.communicate(timeout=150)[1]
    assert process.returncode
    assert info(tmp_path / "run")["status"] == "diverged"


def test_ddp_is_freed_before_the_process_group(tmp_path, monkeypatch):
    """Otherwise, PyTorch can hang: it waits for a Gloo thread, which waits for the GIL."""
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


@pytest.mark.parametrize(("name", "reduce"), [(SHARDED, "process_allgather"), (DDP, "reduce")])
def test_a_signal_during_a_reduction_stops_the_next_iteration(name, reduce, tmp_path, monkeypatch):
    """If one process stopped immediately, the others would wait for it forever."""
    script = importlib.import_module(name)
    path = tmp_path / "run/metrics.jsonl"
    write, original = script.RunLog.write, getattr(script, reduce)
    logs, calls = [], []

    def watched_write(log, *args):
        logs.append(log)
        write(log, *args)

    def watched_reduce(x, *args, **flags):
        x = original(x, *args, **flags)
        if path.exists() and path.read_text().count("\n") == 3:
            calls.append(x)
            if len(calls) == 1:  # the first call after the third iteration was logged
                stop(logs[-1])
        return x

    monkeypatch.setattr(script.RunLog, "write", watched_write)
    monkeypatch.setattr(script, reduce, watched_reduce)
    words = command(name, "run", 10, "--runs-dir", tmp_path, "--save-every", "1")[2:]
    assert main(name, *words) == 128 + signal.SIGTERM
    assert calls and len(metrics(tmp_path / "run")) == 4
    assert info(tmp_path / "run")["status"] == "stopped"


@pytest.mark.parametrize("name", [SHARDED, NNX, DDP])
def test_the_number_of_devices_must_divide_the_batch(name, tmp_path, monkeypatch, capfd):
    """Simulate two devices."""
    if name != DDP:
        monkeypatch.setattr(jax, "make_mesh", lambda *shape: SimpleNamespace(size=2))
    else:
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    words = command(name, "run", 4, "--runs-dir", tmp_path, "--num-envs", "3")[2:]
    assert main(name, *words, "--total-timesteps", "960") == 2
    message = ", 2, must divide --num-envs and the minibatch size"
    assert message in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
    if name == DDP:
        dist.destroy_process_group()

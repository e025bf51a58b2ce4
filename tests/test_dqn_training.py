"""DQN's iterations and whole runs: what they store, learn, copy, compile and wait for."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import dqn
import jax
import numpy as np
import pytest
import torch
from conftest import ROOT
from dqn import LINEN_PAIR, TORCH_PAIR, make_learner
from sections import DQN_SCRIPTS
from test_training import Counts
from torch.utils._python_dispatch import TorchDispatchMode

EACH = pytest.mark.parametrize("name", DQN_SCRIPTS)


# === What is stored =============================================================================
@EACH
def test_every_transition_is_stored_whole_and_nothing_else_is_learnt_from(name):
    """Told-v0 says in an observation when it is, after which action, and how the episode ends."""
    flags: dict[str, Any] = {"num_envs": 4, "num_steps": 100, "total_timesteps": 1600}
    flags |= {"buffer_size": 800, "learning_starts": 0, "replay_ratio": 2.0, "batch_size": 32}
    learner = make_learner(name, env_id="Told-v0", **flags)
    learner.spoil_replay()
    for iteration in range(3):
        assert np.isfinite(learner.iterate()).all()
        obs, action, reward, terminated, next_obs = learner.replayed()
        assert np.isnan(obs).any() == (iteration == 0)
    assert np.isfinite(dqn.flatten(learner.get_weights())).all()

    # 800 rows hold the steps 400 to 1200, of which the last 400 are in the first rows.
    steps = [np.roll(x, 400, 0).reshape(200, 4, *x.shape[1:]) for x in learner.replayed()]
    obs, action, reward, terminated, next_obs = steps
    time, signal = obs[..., 0], obs[..., 2]
    np.testing.assert_array_equal(reward, 10 * time + action + 1)
    np.testing.assert_array_equal(next_obs[..., 0], time + 1)
    np.testing.assert_array_equal(next_obs[..., 1], action)
    np.testing.assert_array_equal(next_obs[..., 2], signal)
    np.testing.assert_array_equal(terminated, (signal > 0) & (time == 2))
    done = terminated | (time == 4)
    np.testing.assert_array_equal(obs[1:][~done[:-1]], next_obs[:-1][~done[:-1]])
    np.testing.assert_array_equal(obs[1:][done[:-1]][:, :2], [[0, -1]] * done[:-1].sum())
    assert terminated.any(0).all() and (time == 4).any(0).all()
    assert set(action.ravel()) == set(range(5))


@EACH
def test_each_environment_draws_for_itself_whether_to_explore(name):
    """Weights of zero choose action 0, so every other action was drawn."""
    flags: dict[str, Any] = {"start_e": 0.5, "end_e": 0.5, "replay_ratio": 0.0, "num_envs": 4}
    flags |= {"num_steps": 1000, "total_timesteps": 8000, "buffer_size": 8000}
    learner = make_learner(name, env_id="Told-v0", **flags)
    learner.set_weights([(0 * kernel, 0 * bias) for kernel, bias in learner.get_weights()])
    for _ in range(2):
        learner.iterate()
    action = learner.replayed()[1].reshape(2000, 4)
    explored = (action > 0).astype(float)
    rate = 0.5 * 4 / 5
    error = 5 * np.sqrt(rate * (1 - rate) / 2000)
    assert (np.abs(explored.mean(0) - rate) < error).all()
    between = np.corrcoef(explored.T) - np.eye(4)
    assert np.abs(between).max() < 5 / np.sqrt(2000)
    later = [np.corrcoef(x[1:], x[:-1])[0, 1] for x in explored.T]
    assert np.abs(later).max() < 5 / np.sqrt(2000)
    assert (explored[:1000] != explored[1000:]).any(0).all()  # an iteration's draws are its own
    both = action[(action[:, 0] > 0) & (action[:, 1] > 0), :2] - 1
    counts = np.bincount(both @ [4, 1], minlength=16)
    expected = counts.sum() / 16
    assert ((counts - expected) ** 2 / expected).sum() < 15 + 5 * np.sqrt(2 * 15)


# === What is learnt =============================================================================
PROBES: dict[str, Any] = {"num_envs": 4, "num_steps": 50, "total_timesteps": 4000, "gamma": 0.5}
PROBES |= {"hidden_sizes": (16,), "buffer_size": 400, "batch_size": 32, "replay_ratio": 8.0}
PROBES |= {"learning_starts": 100, "exploration_steps": 1, "end_e": 0.5, "learning_rate": 1e-2}
PROBES |= {"target_network_frequency": 10}


@EACH
@pytest.mark.parametrize(
    ("env_id", "expected"),
    [
        # Place 1 is worth half of place 2, at which time is up; a termination is worth nothing.
        ("Final-v0", {(1, 0, 0): (2, 2), (0, 1, 0): (4, 4), (0, 0, 1): (8, 8)}),
        ("ProbeDiscount-v0", {(0,): (0.5, 0.5), (1,): (1, 1)}),
        ("ProbeTruncation-v0", {(0,): (2, 2), (1,): (2, 2)}),
        ("ProbeBoth-v0", {(-1,): (1, -1), (1,): (-1, 1)}),
    ],
)
def test_known_values(name, env_id, expected):
    learner = make_learner(name, env_id=env_id, **PROBES)
    for _ in range(learner.args.num_iterations):
        learner.iterate()
    q = learner.q(np.array(list(expected), np.float32))
    np.testing.assert_allclose(q, list(expected.values()), atol=0.15)


@pytest.mark.parametrize("name", DQN_SCRIPTS)
def test_double_q_overestimates_less(name):
    """By NumPy's own count: of 200 actions worth 0 the best looks better than it is."""
    rng = np.random.default_rng(0)
    q_next, target_q_next = rng.normal(size=(2, 500, 200)).astype("f")
    batch = dqn.random_batch(1, 500, 4, 3)
    batch = (*batch[:2], np.zeros(500, "f"), np.zeros(500, bool), batch[4])
    means = {}
    for double_q in (False, True):
        learner = make_learner(name, (4,), double_q=double_q, gamma=1.0)
        means[double_q] = learner.td_target(q_next, target_q_next, batch).mean()
    assert means[False] > 2.5 and abs(means[True]) < 0.25


CARTPOLE: dict[str, Any] = {"num_envs": 8, "num_steps": 250, "total_timesteps": 60_000}
CARTPOLE |= {"learning_rate": 1e-3, "hidden_sizes": (64, 64), "batch_size": 64}
CARTPOLE |= {"replay_ratio": 8.0, "learning_starts": 1000, "exploration_steps": 10_000}
CARTPOLE |= {"target_network_frequency": 100}


def train(name, runs_dir, **flags):
    """Args, run.json, metrics by iteration."""
    script = importlib.import_module(name)
    args = script.Args(runs_dir=str(runs_dir), **flags)
    run = script.train(args)
    folder = Path(args.runs_dir, args.run_name)
    return run, [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()], folder


@EACH
def test_learns_cartpole(name, tmp_path):
    """In 60,000 steps far beyond the 22 that random actions reach."""
    _, rows, _ = train(name, tmp_path, **CARTPOLE)
    assert rows[0]["charts/episodic_return"] < 35
    assert np.mean([row["charts/episodic_return"] for row in rows[-5:]]) > 100


# === What a run logs ============================================================================
SMALL: dict[str, Any] = dqn.SMALL | {"total_timesteps": 64 * 6}


@EACH
def test_what_a_run_logs(name, tmp_path):
    run, rows, _ = train(name, tmp_path, **SMALL, learning_rate=1e-3)
    args = run["args"]
    assert (run["script"], run["status"]) == (name, "completed")
    assert run["framework"] == ("linen" if name in LINEN_PAIR else "torch")
    updates = [row["charts/updates"] for row in rows]
    assert updates == [8, *[16] * 5]  # 16 samples a batch, 4 a step: one for every 4 steps
    for i, row in enumerate(rows):
        assert row["global_step"] == 64 * (i + 1)
        assert row["charts/learning_rate"] == pytest.approx(1e-3 * (1 - i / 6))
        progress = (64 * (i + 1) - 4 - 32) / 320
        assert row["charts/epsilon"] == pytest.approx(1 - 0.95 * min(progress, 1))
        assert row["losses/td_loss"] > 0 and row["losses/q_value"] is not None
        assert row["charts/episodic_length"] == row["charts/episodic_return"] > 0
    assert args["num_envs"] == 4 and rows[0]["charts/episodes"] > 0


@EACH
def test_an_iteration_without_updates(name, tmp_path):
    """Its loss is null, not 0; nothing in a file is NaN."""
    _, rows, folder = train(name, tmp_path, **SMALL | {"learning_starts": 100})
    assert rows[0]["charts/updates"] == 0
    assert rows[0]["losses/td_loss"] is rows[0]["losses/q_value"] is None
    assert rows[2]["losses/td_loss"] > 0
    assert "NaN" not in (folder / "metrics.jsonl").read_text()


@EACH
def test_another_seed_is_another_run(name, tmp_path):
    """That the same seed is the same run, test_dqn_resume.py has."""
    runs = [train(name, tmp_path, **SMALL | {"total_timesteps": 192}, seed=x)[1] for x in (1, 2)]
    for before, after in zip(*runs, strict=True):
        assert before["losses/q_value"] != after["losses/q_value"]


# === Costs ======================================================================================
@EACH
def test_compilations_and_transfers(name, tmp_path, monkeypatch):
    script, counts = importlib.import_module(name), Counts(monkeypatch)
    counts.watch(monkeypatch, script)
    torch._dynamo.utils.counters.clear()
    train(name, tmp_path, **SMALL | {"env_id": "MountainCar-v0"})  # weakly typed when it is reset
    first, *rest = counts.per_iteration
    assert name == "dqn_torch_gymnasium" or first["compilations"] > 0
    assert len(rest) == 5 and first["graphs"] == 0
    for row in rest:
        assert row.get("compilations", 0) == 0
        # On the CPU a view of an action is no transfer in JAX; torch's cpu() counts, per step.
        assert row["transfers"] == (1 + 16 if name == "dqn_torch_gymnasium" else 1)


def replay_copies(text, rows):
    """Lines of compiled HLO that copy an array of so many rows."""
    return re.findall(rf"^.* = \w+\[{rows}(?:,\d+)*\]\S* copy\(.*$", text, re.M)


def compiled(name, rows, runs_dir, **flags):
    """The HLO of what train() compiles that has the replay."""
    script, jit, texts = importlib.import_module(name), jax.jit, []

    def noting(function, **options):
        jitted = jit(function, **options)
        if getattr(function, "func", None) not in (script.iterate, script.learn):
            return jitted

        def call(*arguments):
            executable = jitted.lower(*arguments).compile()
            texts.append(executable.as_text())
            return executable(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", noting)
        sizes = {"buffer_size": rows, "num_steps": 2, "total_timesteps": 2 * flags["num_envs"]}
        train(name, runs_dir, **SMALL | sizes | flags)
    return texts[0]


@pytest.mark.parametrize("name", LINEN_PAIR)
@pytest.mark.parametrize("game", [False, True])
def test_the_replay_is_never_copied(name, game, tmp_path, monkeypatch):
    """4,004 rows, of floats or of bytes. Sampled before the step is written, it would be."""
    flags: dict[str, Any] = {"replay_ratio": 16.0, "num_envs": 4}
    if game:
        breakout = "MinAtar/Breakout-v0" if "gymnasium" in name else "Breakout-MinAtar"
        flags |= {"env_id": breakout, "num_envs": 1, "optimizer": "rmsprop"}
    text = compiled(name, 4004, tmp_path, **flags, run_name="first")
    assert re.search(r"\[4004,\d+\]", text)
    assert not replay_copies(text, 4004)

    script = importlib.import_module(name)
    learn, add = script.learn, script.add

    def learn_then_store(train_state, replay, losses, transition, key, now, args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(script, "add", lambda replay, transition, row: replay)
            result = learn(train_state, replay, losses, transition, key, now, args)
        return result[0], add(replay, transition, now.row), result[2]

    if not game:
        monkeypatch.setattr(script, "learn", learn_then_store)
        assert replay_copies(compiled(name, 4004, tmp_path, **flags), 4004)


class Operations(TorchDispatchMode):
    """Notes what PyTorch does, and where a number or a size would be waited for."""

    waits = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "bincount")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args: Any = (), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        masks = args[1] if self.names[-1] in ("index", "index_put", "index_put_") else []
        masks = [x for x in masks if x is not None and x.dtype in (torch.bool, torch.uint8)]
        self.names += ["nonzero"] * len(masks)  # what a mask as an index does on a GPU
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", TORCH_PAIR)
@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_torch_waits_for_no_number_in_a_step(name, loss):
    flags: dict[str, Any] = {"loss": loss, "optimizer": "rmsprop" if loss == "huber" else "adam"}
    learner = make_learner(name, **flags, double_q=loss == "huber")
    learner.iterate()
    with Operations() as operations:
        learner.iterate()
    assert len(operations.names) > 16 * 20
    assert not set(operations.names) & set(Operations.waits)
    with Operations() as operations:  # as these would be seen
        x = torch.ones(2)
        x[x > 0].sum().item()
    assert {"_local_scalar_dense", "nonzero"} <= set(operations.names)


@pytest.mark.parametrize("name", TORCH_PAIR)
def test_torch_compile_is_one_graph_compiled_once(name, tmp_path, monkeypatch):
    """At a learning rate that changes; and its run is the op-by-op one but for last digits."""
    script, counts = importlib.import_module(name), Counts(monkeypatch)
    counts.watch(monkeypatch, script)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    flags = SMALL | {"learning_rate": 1e-3}
    with torch._dynamo.config.patch(error_on_recompile=True):
        run, rows, _ = train(name, tmp_path, **flags, compile=True, run_name="compiled")
    assert run["compile_mode"] == "compile"
    assert {row["graphs"] for row in counts.per_iteration} == {1}
    assert not torch._dynamo.utils.counters["graph_break"]
    _, eager, _ = train(name, tmp_path, **flags, run_name="eager")
    for row, expected in zip(rows, eager, strict=True):
        for key in ("losses/td_loss", "losses/q_value", "charts/episodic_return"):
            assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5)


# === Bad input ==================================================================================
BAD: list[tuple[dict[str, Any], str]] = [
    ({"buffer_size": 10_001}, "--buffer-size must be a multiple of num_envs = 8, not 10001"),
    ({"buffer_size": 2**31 - 8}, r"--buffer-size .*memory.*\d{2,}\.\d GB .*\d\.\d .*free"),
    ({"buffer_size": 0}, "--buffer-size must lie between 1 and"),
    ({"batch_size": 0}, "--batch-size must lie between 1 and"),
    ({"target_network_frequency": 0}, "--target-network-frequency must lie between 1 and"),
    ({"exploration_steps": 0}, "--exploration-steps must lie between 1 and"),
    ({"replay_ratio": -1.0}, "--replay-ratio must lie between 0 and"),
    ({"replay_ratio": float("nan")}, "--replay-ratio must lie between 0 and"),
    ({"learning_rate": float("inf")}, "--learning-rate must lie between 0 and"),
    ({"learning_starts": -1}, "--learning-starts must lie between 0 and"),
    ({"optimizer_eps": float("nan")}, "--optimizer-eps must be above 0"),
    ({"rmsprop_decay": 1.5}, "--rmsprop-decay must lie between 0 and 1"),
    ({"end_e": 1.1}, "--end-e must lie between 0 and 1"),
    ({"start_e": -0.1}, "--start-e must lie between 0 and 1"),
    ({"gamma": 1.5}, "--gamma must lie between 0 and 1"),
    ({"seed": 2**32}, "--seed must lie"),
    ({"num_envs": 0}, "--num-envs must lie between 1 and"),
    ({"num_steps": 2**31}, "--num-steps must lie between 1 and"),
    ({"total_timesteps": 4999}, "--total-timesteps must be at least 5000"),
    ({"hidden_sizes": (0,)}, "--hidden-sizes must lie between 1 and"),
    ({"run_name": "a/b"}, "--run-name must be the name of one folder"),
    ({"replay_ratio": 2**31 - 1, "batch_size": 1}, r"--replay-ratio .* fewer than 2\*\*31 updates"),
    ({"env_id": "Pong-v77"}, "--env-id "),
    ({"env_id": "Pendulum-v1"}, r"--env-id must have (discrete|actions 0, 1)"),
]


@EACH
@pytest.mark.parametrize(("flags", "message"), BAD, ids=str)
def test_bad_values(name, flags, message):
    with pytest.raises(ValueError, match=message) as error:
        importlib.import_module(name).Args(**flags)
    assert "\n" not in str(error.value)


GYMNAX: list[tuple[dict[str, Any], str]] = [
    ({"full_actions": True}, "--full-actions is for MinAtar's games, not for CartPole-v1"),
    ({"sticky_actions": 1.1}, "--sticky-actions must lie between 0 and 1"),
    ({"max_episode_steps": -1}, "--max-episode-steps must lie between 0 and"),
]


@pytest.mark.parametrize("name", ["dqn_linen", "dqn_torch"])
@pytest.mark.parametrize(("flags", "message"), GYMNAX, ids=str)
def test_bad_values_of_gymnaxs(name, flags, message):
    with pytest.raises(ValueError, match=message):
        importlib.import_module(name).Args(**flags)


def test_bad_values_of_gymnasiums():
    with pytest.raises(ValueError, match="--vectorization vector has CartPole-v1 only"):
        importlib.import_module("dqn_linen_gymnasium").MinAtar(vectorization="vector")


@EACH
@pytest.mark.parametrize("shape", [(2, 9, 3), (9, 2, 3), (4, 84, 84)], ids=str)
def test_images_that_cannot_be_convolved(name, shape, monkeypatch):
    """Too small ones, and ones whose channels come first, as EnvPool's Atari has them."""
    script = importlib.import_module(name)
    make = script.VecEnv.__init__

    def other(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.obs_shape = shape

    monkeypatch.setattr(script.VecEnv, "__init__", other)
    with pytest.raises(ValueError, match=r"--env-id must have images .height, width, channels."):
        script.Args()


@EACH
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("atari --seed 1", "atari"),
        ("--seed 1 minatar", "minatar"),
        ("minatar cartpole", "cartpole"),
        ("minatar --buffer-size 2000000000", "GB"),
        ("--buffer-size 10001", "--buffer-size must be a multiple of"),
        ("--loss l1", "--loss"),
        ("--optimizer sgd", "--optimizer"),
        ("--no-such-flag", "--no-such-flag"),
    ],
)
def test_bad_words(name, words, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert dqn.main(name, *words.split()) == 2
    captured = capsys.readouterr()
    assert named in captured.err and "Traceback" not in captured.err
    assert not list(tmp_path.iterdir())


@EACH
def test_one_sentence_in_a_process_of_its_own(name, tmp_path):
    command = [sys.executable, str(ROOT / f"{name}.py"), "minatar", "--num-envs", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ)
    assert done.returncode == 2 and "Traceback" not in done.stderr + done.stdout
    assert "--buffer-size must be a multiple of num_envs = 3" in done.stderr
    assert not list(tmp_path.iterdir())

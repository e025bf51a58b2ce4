"""DQN's iterations and whole runs: what they store, learn, log, copy, compile and wait for."""

import importlib
import json
import re
import types
from typing import Any

import dqn
import gymnax
import jax
import numpy as np
import pytest
import torch
from dqn import FIRST_OF_PAIRS, LINEN_PAIR, make_learner
from probes import Probe
from sections import DQN_GYMNASIUM_SCRIPTS, DQN_SCRIPTS
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
        assert np.isfinite(list(learner.iterate().values())).all()
        assert np.isnan(learner.replayed()[0]).any() == (iteration == 0)
    assert np.isfinite(dqn.flat(learner.weights())).all()

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
    flags |= {"num_steps": 500, "total_timesteps": 4000, "buffer_size": 4000}
    learner = make_learner(name, env_id="Told-v0", **flags)
    zeros = [jax.tree.map(lambda x: 0 * x, learner.weights()) for _ in range(2)]
    learner.set_weights(*zeros)
    for _ in range(2):
        learner.iterate()
    action = learner.replayed()[1].reshape(1000, 4)
    shares = np.bincount(action.ravel(), minlength=5) / action.size
    np.testing.assert_allclose(shares, [0.6, 0.1, 0.1, 0.1, 0.1], atol=0.04)
    explored = (action > 0).astype(float)
    assert np.abs(np.corrcoef(explored.T) - np.eye(4)).max() < 5 / np.sqrt(1000)
    later = [np.corrcoef(x[1:], x[:-1])[0, 1] for x in explored.T]
    assert np.abs(later).max() < 5 / np.sqrt(1000)
    assert (explored[:500] != explored[500:]).any(0).all()  # an iteration's draws are its own


# === Whole runs =================================================================================
def train(name, folder, **flags):
    """The run of train(): what run.json holds, and the metrics of each iteration."""
    script = importlib.import_module(name)
    own = {"runs_dir": str(folder.parent), "run_name": folder.name}
    script.train(script.Args(**dqn.SMALL | {"total_timesteps": 64 * 6} | own | flags))
    text = (folder / "metrics.jsonl").read_text()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]  # no NaN
    return json.loads((folder / "run.json").read_text()), rows


@EACH
def test_a_run_learns_cartpole_compiles_once_and_logs_what_it_does(name, tmp_path, monkeypatch):
    """In 20,000 steps far beyond the 22 that random actions reach; no update in the first 2,400."""
    torch._dynamo.utils.counters.clear()
    script, counts = importlib.import_module(name), Counts(monkeypatch)
    counts.watch(monkeypatch, script)
    flags: dict[str, Any] = {"num_envs": 8, "num_steps": 250, "hidden_sizes": (64, 64)}
    flags |= {"buffer_size": 10_000, "batch_size": 64, "replay_ratio": 8.0}
    flags |= {"learning_starts": 2400, "exploration_steps": 5000, "learning_rate": 1e-3}
    flags |= {"target_network_frequency": 100, "total_timesteps": 20_000}
    run, rows = train(name, tmp_path / "run", **flags)
    assert rows[0]["charts/episodic_return"] < 35
    assert rows[-1]["charts/episodic_return"] > 100

    assert (run["script"], run["status"], run["args"]["num_envs"]) == (name, "completed", 8)
    assert run["framework"] == ("linen" if name in LINEN_PAIR else "torch")
    assert [row["charts/updates"] for row in rows] == [0, 200, *[250] * 8]
    for i, row in enumerate(rows):
        assert (row["iteration"], row["global_step"]) == (i, 2000 * (i + 1))
        assert row["charts/learning_rate"] == pytest.approx(1e-3 * (1 - i / 10))
        progress = np.clip((2000 * (i + 1) - 8 - 2400) / 5000, 0, 1)
        assert row["charts/epsilon"] == pytest.approx(1 - 0.95 * progress)
        for loss in ("losses/td_loss", "losses/q_value"):
            assert (row[loss] is None) == (i == 0)
        assert row["charts/episodic_length"] == row["charts/episodic_return"] > 0

    first, *rest = counts.per_iteration
    assert name == "dqn_torch_gymnasium" or first["compilations"] > 0
    # One transfer brings all metrics: a tensor in PyTorch, and in JAX a dict of arrays. On the CPU
    # a view of an action is no transfer in JAX; PyTorch's cpu() counts, for each of 250 steps.
    transfers = {"dqn_linen": 11, "dqn_linen_gymnasium": 9, "dqn_torch": 1}.get(name, 1 + 250)
    assert [row.get("compilations", 0) for row in rest] == [0] * 9
    assert [row["transfers"] for row in rest] == [transfers] * 9
    assert {row["graphs"] for row in counts.per_iteration} == {0}


def test_a_loss_without_updates_has_not_diverged(tmp_path, capsys):
    """At such a learning rate, weights are soon no numbers."""
    flags: dict[str, Any] = {"learning_starts": 128, "learning_rate": 1e38}
    _, rows = train("dqn_torch_gymnasium", tmp_path / "run", **flags)
    losses = [row["losses/td_loss"] is None for row in rows]
    said = ["diverged" in line for line in capsys.readouterr().out.splitlines()[1:7]]
    assert losses[:2] == [True, True] and said == [False, False, *losses[2:]] and said[-1]


@pytest.mark.parametrize("name", DQN_GYMNASIUM_SCRIPTS)
def test_another_seed_begins_with_other_weights(name, tmp_path):
    """That the same seed is the same run, test_dqn_resume.py has."""
    ends, weights = ("/target_params/params/Dense_0/kernel", "/q_network/hidden.0.weight"), []
    for seed in (1, 2):
        train(name, tmp_path / str(seed), seed=seed, total_timesteps=64, learning_rate=0.0)
        with np.load(tmp_path / str(seed) / "checkpoint.npz") as file:
            weights += [x for key, x in file.items() if key.endswith(ends)]
    first, second = weights
    assert (first != second).any()


# === Costs ======================================================================================
def replay_copies(name, folder, donated=True, **flags):
    """Lines of what train() compiles that copy an array of 4,004 rows."""
    script, jit, texts = importlib.import_module(name), jax.jit, []

    def noting(function, **options):
        jitted = jit(function, **options if donated else {})
        if getattr(function, "func", None) not in (script.iterate, script.learn):
            return jitted

        def call(*arguments):
            executable = jitted.lower(*arguments).compile()
            texts.append(executable.as_text())
            return executable(*arguments)

        return call

    flags |= {"buffer_size": 4004, "num_steps": 2, "replay_ratio": 16.0, "total_timesteps": 8}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", noting)
        train(name, folder, **flags)
    assert re.search(r"\[4004,\d+\]", texts[0])
    return re.findall(r"^.* = \w+\[4004(?:,\d+)*\]\S* copy\(.*$", texts[0], re.M)


def test_the_replay_is_never_copied(tmp_path):
    """4,004 rows, of bytes or of floats. Sampled before the step is written, it would be."""
    game: dict[str, Any] = {"env_id": "Breakout-MinAtar", "num_envs": 1, "optimizer": "rmsprop"}
    assert not replay_copies("dqn_linen", tmp_path / "game", **game)
    assert not replay_copies("dqn_linen_gymnasium", tmp_path / "floats")
    assert replay_copies("dqn_linen_gymnasium", tmp_path / "kept", donated=False)


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


@pytest.mark.parametrize(
    ("name", "loss", "optimizer"),
    [("dqn_torch", "huber", "rmsprop"), ("dqn_torch_gymnasium", "mse", "adam")],
)
def test_torch_waits_for_no_number_in_a_step(name, loss, optimizer):
    learner = make_learner(name, loss=loss, optimizer=optimizer, double_q=True)
    with Operations() as operations:
        learner.iterate()
    assert len(operations.names) > 16 * 20 and not {*operations.names} & {*Operations.waits}


# === Bad input ==================================================================================
class Endless(Probe):
    default_params: Any = types.SimpleNamespace()  # has no max_steps_in_episode


if "Endless-v0" not in gymnax.registered_envs:
    gymnax.register("Endless-v0", Endless)

REFUSED = [
    ("dqn_linen", "--buffer-size 10001", "--buffer-size must be a multiple of --num-envs, 8"),
    ("dqn_linen", "minatar --num-envs 3", "--buffer-size must be a multiple of --num-envs, 3"),
    ("dqn_linen", "--exploration-steps 0", "--exploration-steps must be 1 or more"),
    ("dqn_linen", "--total-timesteps 4999", "must be at least an iteration, 5000 steps"),
    ("dqn_linen", "atari --seed 1", "atari"),
]
for name in FIRST_OF_PAIRS:
    REFUSED += [
        (name, "--full-actions", "--full-actions is for MinAtar's games, not for CartPole-v1\n"),
        (name, "--env-id Endless-v0 --max-episode-steps 9", "Endless-v0 has no max_steps_in_ep"),
        (
            name,
            "--env-id CartPole-v7",
            "gymnax has no CartPole-v7; the closest name is CartPole-v1",
        ),
        (name, "--env-id Pendulum-v1", "the actions of Pendulum-v1 are continuous, and must be"),
    ]


@pytest.mark.parametrize(("name", "flags", "sentence"), REFUSED)
def test_what_cannot_work_is_one_sentence(name, flags, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # of the box around what is wrong with a flag
    assert dqn.main(name, *flags.split()) == 2
    errors = capsys.readouterr().err
    assert sentence in errors and "Traceback" not in errors
    assert errors.count("\n") == 1 or "--help" in errors
    assert not list(tmp_path.iterdir())

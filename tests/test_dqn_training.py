"""DQN's whole runs: what they store, draw, learn, log, copy, compile and wait for."""

import importlib
import json
import re
from types import SimpleNamespace
from typing import Any

import dqn
import jax
import numpy as np
import pytest
import torch
from dqn import LINEN_PAIR, TORCH_PAIR
from sections import DQN_SCRIPTS
from test_training import Counts
from torch.utils._python_dispatch import TorchDispatchMode


def train(name, folder, **flags):
    """The run of train(): what run.json holds, and the metrics of each iteration."""
    script = importlib.import_module(name)
    own = {"runs_dir": str(folder.parent), "run_name": folder.name}
    script.train(script.Args(**dqn.SMALL | own | flags))
    text = (folder / "metrics.jsonl").read_text()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]  # no NaN
    return json.loads((folder / "run.json").read_text()), rows


# === What an iteration does =====================================================================
TOLD: dict[str, Any] = {"env_id": "Told-v0", "num_steps": 250, "total_timesteps": 3000}
TOLD |= {"buffer_size": 2000, "learning_starts": 400, "replay_ratio": 2.0, "learning_rate": 0.0}
TOLD |= {"exploration_steps": 600, "end_e": 0.5}


@pytest.fixture(scope="module", params=DQN_SCRIPTS)
def told(request, tmp_path_factory):
    """A run of three iterations whose weights do not move, in an environment that tells all.

    The replay is NaN wherever nothing has been stored.
    """
    name, folder = request.param, tmp_path_factory.mktemp("told") / "run"
    script = importlib.import_module(name)
    make_replay = script.make_replay

    def make_nan(*args):
        empty = make_replay(*args)
        return type(empty)(*(x * np.nan if "float" in str(x.dtype) else x for x in empty))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "make_replay", make_nan)
        counts = Counts(patch)
        counts.watch(patch, script)
        _, rows = train(name, folder, **TOLD)
    with np.load(folder / "checkpoint.npz") as file:
        arrays = dict(file)
    # 2000 rows hold the steps 1000 to 3000, of which the last 1000 are in the first rows.
    places = [
        x for field in script.Transition._fields for x in arrays if x.endswith(f"replay/{field}")
    ]
    steps = [np.roll(arrays[x], 1000, 0).reshape(500, 4, *arrays[x].shape[1:]) for x in places]
    return SimpleNamespace(
        name=name,
        rows=rows,
        counts=counts.per_iteration,
        arrays=arrays,
        steps=script.Transition(*steps),
    )


def test_every_transition_is_stored_whole(told):
    obs, action, reward, terminated, next_obs = told.steps
    time, signal = np.moveaxis(obs, -1, 0)
    np.testing.assert_array_equal(reward, 10 * time + action + 1)
    np.testing.assert_array_equal(next_obs, np.stack([time + 1, signal], -1))
    np.testing.assert_array_equal(terminated, (signal > 0) & (time == 2))
    done = terminated | (time == 4)
    np.testing.assert_array_equal(obs[1:][~done[:-1]], next_obs[:-1][~done[:-1]])
    assert not time[1:][done[:-1]].any()
    assert terminated.any(0).all() and (time == 4).any(0).all()


def test_only_what_is_stored_is_learnt_from_as_often_as_planned(told):
    """From NaN a loss would be NaN. 2.0 / 16 updates a step, after the first 400."""
    assert [row["charts/updates"] for row in told.rows] == [75, 125, 125]
    assert all(row["losses/td_loss"] > 0 for row in told.rows)
    (done,) = (x for name, x in told.arrays.items() if name.endswith(("state/step", "count")))
    assert done == 325


def test_each_environment_draws_for_itself_whether_to_explore(told):
    """Half of the actions are drawn, of which a fifth are the best one all the same."""
    beginnings = "train_state/params/params/", "tensors/q_network/"
    found = {
        x.removeprefix(y): array
        for y in beginnings
        for x, array in told.arrays.items()
        if x.startswith(y)
    }
    params = dqn.parameters(dqn.layers_of(found))
    best = dqn.q_values(params, told.steps.obs.reshape(2000, 2), (2,)).argmax(1).reshape(500, 4)
    later = (told.steps.action - best.numpy()) % 5
    shares = np.bincount(later.ravel(), minlength=5) / later.size
    np.testing.assert_allclose(shares, [0.6, 0.1, 0.1, 0.1, 0.1], atol=0.04)
    explored = (later > 0).astype(float)
    assert np.abs(np.corrcoef(explored.T) - np.eye(4)).max() < 5 / np.sqrt(500)
    following = [np.corrcoef(x[1:], x[:-1])[0, 1] for x in explored.T]
    assert np.abs(following).max() < 5 / np.sqrt(500)
    assert (explored[:250] != explored[250:]).any(0).all()  # an iteration's draws are its own


def test_an_iteration_logs_its_last_epsilon(told):
    progress = np.clip((np.array([996, 1996, 2996]) - 400) / 600, 0, 1)
    assert [row["charts/epsilon"] for row in told.rows] == pytest.approx(1 - 0.5 * progress)


def test_nothing_compiles_again_and_nothing_waits_but_for_actions_and_metrics(told):
    """One transfer brings all metrics: a tensor in PyTorch, and in JAX a dict of arrays.

    On the CPU a view of an action is no transfer in JAX; PyTorch's cpu() counts, for each step.
    """
    transfers = {"dqn_linen": 11, "dqn_linen_gymnasium": 9, "dqn_torch": 1}.get(told.name, 1 + 250)
    first, *rest = told.counts
    assert told.name == "dqn_torch_gymnasium" or first["compilations"] > 0
    assert [row.get("compilations", 0) for row in rest] == [0, 0]
    assert [row["transfers"] for row in rest] == [transfers, transfers]


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
def test_torch_waits_for_no_number_in_a_step(name, loss, optimizer, tmp_path, monkeypatch):
    script, operations = importlib.import_module(name), Operations()
    iterate = script.iterate

    def noting(*args):
        with operations:
            return iterate(*args)

    monkeypatch.setattr(script, "iterate", noting)
    flags: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "double_q": True}
    train(name, tmp_path / "run", total_timesteps=64, **flags)
    assert len(operations.names) > 16 * 20 and not {*operations.names} & {*Operations.waits}


# === The replay is never copied =================================================================
@pytest.mark.parametrize("name", LINEN_PAIR)
def test_the_replay_is_never_copied(name, tmp_path, monkeypatch):
    """In what train() compiles. Sampled before the step is written, or not donated, it would be."""
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

    monkeypatch.setattr(jax, "jit", noting)
    train(name, tmp_path / "run", buffer_size=4004, num_steps=2, total_timesteps=8)
    assert re.search(r"\[4004,4\]", texts[0])
    assert not re.findall(r"^.* = \w+\[4004(?:,\d+)*\]\S* copy\(.*$", texts[0], re.M)


# === Whole runs =================================================================================
@pytest.mark.parametrize("name", ["dqn_linen", "dqn_torch_gymnasium"])
def test_a_run_learns_cartpole(name, tmp_path):
    """In 20,000 steps far beyond the 22 that random actions reach; no update in the first 2,400."""
    flags: dict[str, Any] = {"num_envs": 8, "num_steps": 250, "hidden_sizes": (64, 64)}
    flags |= {"buffer_size": 10_000, "batch_size": 64, "replay_ratio": 8.0}
    flags |= {"learning_starts": 2400, "exploration_steps": 5000, "learning_rate": 1e-3}
    flags |= {"target_network_frequency": 100, "total_timesteps": 20_000}
    run, rows = train(name, tmp_path / "run", **flags)
    assert rows[0]["charts/episodic_return"] < 35
    assert rows[-1]["charts/episodic_return"] > 100
    assert (run["script"], run["status"], run["framework"]) == (
        name,
        "completed",
        name.split("_")[1],
    )
    for i, row in enumerate(rows):
        assert (row["iteration"], row["global_step"]) == (i, 2000 * (i + 1))
        assert row["charts/learning_rate"] == pytest.approx(1e-3 * (1 - i / 10))
        assert row["charts/episodic_length"] == row["charts/episodic_return"] > 0


def test_a_loss_without_updates_has_not_diverged(tmp_path, capsys):
    """At such a learning rate, weights are soon no numbers."""
    flags: dict[str, Any] = {"learning_starts": 128, "learning_rate": 1e38}
    _, rows = train("dqn_torch_gymnasium", tmp_path / "run", total_timesteps=64 * 6, **flags)
    losses = [row["losses/td_loss"] is None for row in rows]
    said = ["diverged" in line for line in capsys.readouterr().out.splitlines()[1:7]]
    assert losses[:2] == [True, True] and said == [False, False, *losses[2:]] and said[-1]


@pytest.mark.parametrize("name", DQN_SCRIPTS)
def test_another_seed_begins_with_other_weights(name, tmp_path, monkeypatch):
    """That the same seed is the same run, test_dqn_resume.py has."""
    script, made = importlib.import_module(name), []
    make_agent = script.make_agent

    def make_and_stop(*args):
        made.append(make_agent(*args))
        raise InterruptedError

    monkeypatch.setattr(script, "make_agent", make_and_stop)
    for seed in (1, 2):
        with pytest.raises(InterruptedError):
            train(name, tmp_path / str(seed), seed=seed)
    networks = [x.q_network.state_dict() if name in TORCH_PAIR else x.params for x in made]
    first, second = ([np.array(x) for x in jax.tree.leaves(network)] for network in networks)
    assert all((x != y).any() for x, y in zip(first, second, strict=True))

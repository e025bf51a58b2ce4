"""DQN's whole runs: what they store, draw, learn, log, save, compile and wait for."""

import importlib
import json
from types import SimpleNamespace

import dqn
import numpy as np
import pytest
import scripted  # noqa: F401  (registers the environments)
import torch
from running import arrays, info, main, make_whole_run, metrics, op_by_op, rewind, rows
from sections import DQN_SCRIPTS


def train(name, folder, flags):
    """Train by the flags; return the metrics of each iteration."""
    own = ["--runs-dir", folder.parent, "--run-name", folder.name]
    assert main(name, *(dqn.SMALL + flags).split(), *own) == 0
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]  # no NaN


# === An iteration ===============================================================================
TOLD = "--env-id ShortCartPole-v0 --num-steps 250 --total-timesteps 3000 --buffer-size 2400 "
TOLD += "--learning-starts 2000 --train-frequency 8 --start-e 0.5 --end-e 0 "
TOLD += "--exploration-steps 2000 --save-every 2"


@pytest.fixture(scope="module", params=DQN_SCRIPTS)
def told(request, tmp_path_factory):
    """A run that learns in its third iteration alone, of which much is known.

    The replay is NaN wherever nothing has been stored.
    """
    name = request.param
    script = importlib.import_module(name)
    make_replay = script.make_replay

    def make_nan(*args):
        empty = make_replay(*args)
        return type(empty)(*(x * np.nan if "float" in str(x.dtype) else x for x in empty))

    folder = tmp_path_factory.mktemp("told")
    with pytest.MonkeyPatch.context() as patch:
        if name != dqn.COMPILED:  # whose update is compiled by a batch of the empty replay
            patch.setattr(script, "make_replay", make_nan)
        run = make_whole_run(name, folder, lambda place: train(name, place, TOLD))
    half = rewind(run, folder / "half")
    return SimpleNamespace(name=name, half=half, rows=rows(run.folder), **run._asdict())


def steps_in(told, folder):
    """What is in a checkpoint's replay, by row."""
    found = arrays(folder)
    fields = importlib.import_module(told.name).Transition._fields
    return [x for name in fields for place, x in found.items() if place.endswith(f"replay/{name}")]


def test_every_transition_is_stored_whole(told):
    """2400 rows hold the steps 600 to 3000, of which the last 600 are in the first rows."""
    obs, action, reward, terminated, next_obs = steps_in(told, told.folder)
    steps = [dqn.step_cartpole(*x) for x in zip(obs, action, strict=True)]
    expected = [np.array(x) for x in zip(*steps, strict=True)]
    np.testing.assert_allclose(next_obs, expected[0], atol=1e-5)
    np.testing.assert_array_equal([reward, terminated], expected[1:])
    obs, terminated, next_obs = (np.roll(x, -600, 0) for x in (obs, terminated, next_obs))
    begins = (obs[4:] != next_obs[:-4]).any(1)
    assert begins[terminated[:-4]].all()
    assert terminated.sum() > 20 and begins[~terminated[:-4]].sum() > 20  # the latter were cut off


def test_each_environment_draws_for_itself_whether_to_explore(told):
    """Half of 2000 actions are drawn, of which half are the best one all the same."""
    obs, action, *_ = (x[:2000] for x in steps_in(told, told.half))
    params = dqn.parameters(dqn.layers_in(told.half))
    best = dqn.q_values(params, obs, (4,)).argmax(1).numpy()
    explored = (action != best).reshape(500, 4).astype(float)
    assert abs(explored.mean() - 0.25) < 0.05
    assert np.abs(np.corrcoef(explored.T) - np.eye(4)).max() < 5 / np.sqrt(500)
    later = [np.corrcoef(x[1:], x[:-1])[0, 1] for x in explored.T]
    assert np.abs(later).max() < 5 / np.sqrt(500)
    assert (explored[:250] != explored[250:]).any(0).all()  # an iteration's draws are its own


def test_only_what_is_stored_is_learnt_from_as_often_as_is_logged(told):
    """From NaN a loss would be NaN. An update in 8 steps, after the first 2000."""
    assert [row["charts/updates"] for row in told.rows] == [0, 0, 125]
    assert [row["losses/td_loss"] is None for row in told.rows] == [True, True, False]
    places = arrays(told.folder).items()
    ends = ("train_state/step", "optimizer/count", "optimizer/output.bias/step")
    (done,) = (x for name, x in places if name.endswith(ends))
    assert done == 125
    epsilons = [row["charts/epsilon"] for row in told.rows]  # of the last step
    assert epsilons == pytest.approx([0.5, 0.5, 0.5 * (1 - 996 / 2000)])


def test_nothing_compiles_again_and_nothing_waits_but_for_actions_and_metrics(told):
    """One transfer brings all metrics: a tensor in PyTorch, and in JAX a dict of arrays.

    On the CPU a view of an action is no transfer in JAX; PyTorch's cpu() counts, for each step.
    """
    first, *rest = told.counts
    assert told.name == "dqn_torch_gymnasium" or first["compilations"] > 0
    assert [row.get("compilations", 0) for row in rest] == [0, 0]
    in_jax = {"dqn_linen": 11, "dqn_linen_gymnasium": 9}
    in_torch = {"dqn_torch": 1, dqn.COMPILED: 1, "dqn_torch_gymnasium": 1 + 250}
    assert rest[0]["transfers"] == (in_jax | in_torch)[told.name]


def test_a_killed_run_goes_on_to_the_same_numbers(told, tmp_path, monkeypatch, capsys):
    """In its third iteration, before which no update was made."""
    op_by_op(monkeypatch, importlib.import_module(told.name))  # as the whole run was
    folder = rewind(told, tmp_path / "killed")
    assert main(told.name, "--resume", folder) == 0
    assert info(folder)["resumed"] == [2]
    if "gymnasium" in told.name:  # with new episodes
        assert "New episodes start" in capsys.readouterr().out
        assert metrics(folder)[:2] == metrics(told.folder)[:2]
        assert len(metrics(folder)) == len(metrics(told.folder))
    else:
        assert metrics(folder) == metrics(told.folder)
        assert_same_arrays(folder, told.folder)


def assert_same_arrays(folder, other):
    """Of checkpoints."""
    ours, theirs = arrays(folder), arrays(other)
    assert ours.keys() == theirs.keys()
    for place in ours.keys() - {"info"}:
        np.testing.assert_array_equal(ours[place], theirs[place], strict=True)


@pytest.mark.parametrize(
    ("name", "optimizer"), [*((x, "rmsprop") for x in DQN_SCRIPTS), ("dqn_torch", "adam")]
)
def test_a_run_killed_between_updates_goes_on_to_the_same_numbers(
    name, optimizer, tmp_path, monkeypatch
):
    """With the optimizer's moments of before, and a learning rate that falls."""
    op_by_op(monkeypatch, importlib.import_module(name))
    flags = f"--optimizer {optimizer} --learning-rate 1e-3 --save-every 5"
    if "gymnasium" in name:  # which goes on with new episodes, so here all are alike
        flags += " --env-id Constant-v0"
    run = make_whole_run(name, tmp_path, lambda place: train(name, place, flags))
    folder = rewind(run, tmp_path / "killed")
    assert main(name, "--resume", folder) == 0
    assert info(folder)["resumed"] == [5]
    assert metrics(folder) == metrics(run.folder)
    assert_same_arrays(folder, run.folder)


# === What differs between scripts, or is DQN's alone ============================================
def test_a_compiled_run_is_one_graph_and_the_run_op_by_op_but_for_last_digits(tmp_path):
    """At a learning rate that changes."""
    flags = "--learning-rate 1e-3 --total-timesteps 384 "
    eager = train("dqn_torch", tmp_path / "eager", flags)
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = train(dqn.COMPILED, tmp_path / "compiled", flags)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    for row, expected in zip(compiled, eager, strict=True):
        for key in ("losses/td_loss", "losses/q_value", "charts/episodic_return"):
            assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", [x for x in DQN_SCRIPTS if "torch" in x])
def test_the_learning_rate_falls_by_iteration(name, tmp_path, monkeypatch):
    """In JAX it is in the plan: test_dqn_numerics.py."""
    script = importlib.import_module(name)
    iterate, rates = script.iterate, []

    def spy(agent, *others):
        optimizer = agent.optimizer
        rates.append(
            float(optimizer.lr) if name == dqn.COMPILED else optimizer.param_groups[0]["lr"]
        )
        return iterate(agent, *others)

    op_by_op(monkeypatch, script)
    monkeypatch.setattr(script, "iterate", spy)
    for flags in ("", "--no-anneal-lr"):
        train(name, tmp_path / f"run{flags}", f"{flags} --learning-rate 0.5 --total-timesteps 256")
    assert rates == [0.5, 0.375, 0.25, 0.125] + [0.5] * 4


def test_a_loss_without_updates_has_not_diverged(tmp_path, capsys):
    """At such a learning rate, weights are soon no numbers."""
    flags = "--learning-starts 128 --learning-rate 1e38 --total-timesteps 384"
    rows = train("dqn_torch_gymnasium", tmp_path / "run", flags)
    losses = [row["losses/td_loss"] is None for row in rows]
    said = ["diverged" in line for line in capsys.readouterr().out.splitlines()[1:7]]
    assert losses[:2] == [True, True] and said == [False, False, *losses[2:]] and said[-1]


@pytest.mark.parametrize("name", ["dqn_linen_gymnasium", "dqn_torch"])
def test_a_run_learns_cartpole(name, tmp_path):
    """In 20,000 steps far beyond the 22 that random actions reach."""
    flags = "--num-envs 8 --num-steps 250 --hidden-sizes 64 64 --buffer-size 10000 "
    flags += "--batch-size 64 --train-frequency 8 --learning-starts 2400 --exploration-steps 5000 "
    flags += "--learning-rate 1e-3 --target-network-frequency 100 --total-timesteps 20000"
    rows = train(name, tmp_path / "run", flags)
    assert rows[0]["charts/episodic_return"] < 35
    assert rows[-1]["charts/episodic_return"] > 100

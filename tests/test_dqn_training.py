"""DQN's whole runs: what they store, draw, learn, log, save, compile and wait for."""

import importlib
import json
import re
import signal
from functools import partial
from types import SimpleNamespace

import dqn
import jax
import numpy as np
import pytest
import scripted  # noqa: F401  (registers the environments)
import torch
from running import (
    arrays,
    assert_same_checkpoints,
    info,
    main,
    make_whole_run,
    metrics,
    op_by_op,
    rewind,
    rows,
    stop,
)
from sections import DQN_SCRIPTS, scripts

import dqn_linen

EACH = pytest.mark.parametrize("name", DQN_SCRIPTS)
EACH_IN_TORCH = pytest.mark.parametrize("name", scripts("dqn", "torch"))


def train(name, folder, flags):
    """Train by the flags; return the metrics of each iteration."""
    own = ["--runs-dir", folder.parent, "--run-name", folder.name]
    assert main(name, *(dqn.SMALL + flags).split(), *own) == 0
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]  # no NaN


# === A signal ===================================================================================
def test_a_stopped_run_says_by_which_signal(tmp_path, monkeypatch):
    """SAC's run log is the same to the letter."""
    write = dqn_linen.RunLog.write

    def write_and_stop(log, *args):
        write(log, *args)
        stop(log)

    monkeypatch.setattr(dqn_linen.RunLog, "write", write_and_stop)
    own = ["--runs-dir", tmp_path, "--run-name", "run"]
    assert main("dqn_linen", *dqn.SMALL.split(), *own) == 128 + signal.SIGTERM
    assert (info(tmp_path / "run")["status"], len(rows(tmp_path / "run"))) == ("stopped", 1)


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
    maker = "make_replay" if name == "dqn_linen" else "Replay"
    make = getattr(script, maker)

    def make_nan(*args):
        replay = make(*args)
        floats = {x: getattr(replay.transitions, x) for x in ("obs", "reward", "next_obs")}
        nan = replay.transitions._replace(**{field: x * np.nan for field, x in floats.items()})
        if name == "dqn_linen":
            return replay._replace(transitions=nan)
        replay.transitions = nan
        return replay

    folder = tmp_path_factory.mktemp("told")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, maker, make_nan)
        run = make_whole_run(name, folder, lambda place: train(name, place, TOLD))
    half = rewind(run, folder / "half")
    return SimpleNamespace(name=name, half=half, rows=rows(run.folder), **run._asdict())


def test_every_transition_is_stored_whole(told):
    """2400 rows hold the steps 600 to 3000, of which the last 600 are in the first rows."""
    obs, action, reward, terminated, next_obs = dqn.replay_in(told.folder)
    steps = [dqn.step_cartpole(*x) for x in zip(obs, action, strict=True)]
    expected = [np.array(x) for x in zip(*steps, strict=True)]
    np.testing.assert_allclose(next_obs, expected[0], atol=1e-5)
    np.testing.assert_array_equal([reward, terminated], expected[1:])
    obs, terminated, next_obs = (np.roll(x, -600, 0) for x in (obs, terminated, next_obs))
    begins = (obs[4:] != next_obs[:-4]).any(1)
    assert begins[terminated[:-4]].all()
    assert terminated.sum() > 20 and begins[~terminated[:-4]].sum() > 20  # the latter were cut off


def test_a_checkpoint_has_the_rows_that_are_filled(told):
    assert [len(x) for x in dqn.replay_in(told.half)] == [2000] * 5
    assert [len(x) for x in dqn.replay_in(told.folder)] == [2400] * 5


def test_each_environment_draws_for_itself_whether_to_explore(told):
    """Half of 2000 actions are drawn, of which half are the best one all the same."""
    obs, action, *_ = dqn.replay_in(told.half)
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
    for name in dqn.LOSSES:
        assert [row[name] is None for row in told.rows] == [True, True, False]
    found = arrays(told.folder)
    counts = {"train_state/step", "num_updates", "optimizer/count"} & found.keys()
    assert counts and all(found[place] == 125 for place in counts)
    epsilons = [row["charts/epsilon"] for row in told.rows]  # of the last step
    assert epsilons == pytest.approx([0.5, 0.5, 0.5 * (1 - 996 / 2000)])


def test_nothing_compiles_again_and_nothing_waits_but_for_actions_and_metrics(told):
    """A transfer for each metric in JAX, and in PyTorch for each step's actions (cpu()).

    On the CPU a view is no transfer in JAX. The log's own, of losses, come after what is counted.
    """
    compilations = [row.get("compilations", 0) for row in told.counts]
    late = 1 if told.name == "dqn_linen_gymnasium" else 0  # update, when the first one is due
    assert (compilations[0] > 0) == (told.name != "dqn_torch_gymnasium")
    assert compilations[1:] == [0, late]
    expected = {"dqn_linen": 12, "dqn_torch_gymnasium": 250}
    assert told.counts[1].get("transfers", 0) == expected.get(told.name, 0)


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
        assert_same_checkpoints(folder, told.folder)


@pytest.mark.parametrize(
    ("name", "optimizer"), [*((x, "rmsprop") for x in DQN_SCRIPTS), ("dqn_torch", "adam")]
)
def test_a_run_killed_between_updates_goes_on_to_the_same_numbers(
    name, optimizer, tmp_path, monkeypatch
):
    """With the optimizer's moments of before, and a learning rate that falls."""
    op_by_op(monkeypatch, importlib.import_module(name))
    flags = f"--optimizer {optimizer} --learning-rate 1e-3 --save-every 2"
    if "gymnasium" in name:  # which goes on with new episodes, so here all are alike
        flags += " --env-id Constant-v0"
    run = make_whole_run(name, tmp_path, lambda place: train(name, place, flags))
    folder = rewind(run, tmp_path / "killed")
    assert main(name, "--resume", folder) == 0
    assert info(folder)["resumed"] == [2]
    assert metrics(folder) == metrics(run.folder)
    assert_same_checkpoints(folder, run.folder)


@EACH
def test_other_flags_hold_when_a_run_goes_on_and_another_replay_is_refused(
    name, tmp_path, monkeypatch, capfd
):
    """192 steps have filled 128 rows: where the next step goes depends on their number.

    At such an epsilon of the optimizer nothing moves, by which it tells that it takes it.
    """
    op_by_op(monkeypatch, importlib.import_module(name))
    folder = tmp_path / "run"
    train(name, folder, "--total-timesteps 192 --learning-rate 0.6")
    others = {"--buffer-size 64": 128, "--buffer-size 256": 128, "--optimizer rmsprop": "adam"}
    for flag, value in others.items():
        assert main(name, "--resume", folder, "--total-timesteps", 256, *flag.split()) == 2
        assert f"stays as it was, {value!r}\n" in capfd.readouterr().err
    before = arrays(folder)
    flags = ["--total-timesteps", 256, "--learning-rate", 0.1, "--optimizer-eps", 1e30]
    assert main(name, "--resume", folder, *flags) == 0
    for place, x in arrays(folder).items():
        if place.startswith(("agent/", "train_state/params/")):
            np.testing.assert_array_equal(x, before[place], err_msg=place)
    rates = [row["charts/learning_rate"] for row in rows(folder)]
    assert rates == pytest.approx([0.6, 0.4, 0.2, 0.025])


# === What every script does =====================================================================
@EACH
def test_losses_are_logged_by_their_own_names(name, tmp_path, monkeypatch):
    """ProbeSignal has two observations and two actions, and nothing is learnt at a rate of 0."""
    op_by_op(monkeypatch, importlib.import_module(name))
    folder = tmp_path / "run"
    found = train(name, folder, "--env-id ProbeSignal-v0 --learning-rate 0 --total-timesteps 128")
    q = dqn.q_values(dqn.parameters(dqn.layers_in(folder)), np.array([[-1.0], [1.0]]), (1,))
    reward = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    errors = (q - (reward + 0.99 * q.amax(1, keepdim=True))) ** 2
    for row in found:
        assert q.min() < row["losses/q_value"] < q.max()
        assert errors.min() < row["losses/td_loss"] < errors.max()
        assert not q.min() < row["losses/td_loss"] < q.max()


@EACH
def test_each_update_of_a_step_draws_a_batch_of_its_own(name, tmp_path, monkeypatch):
    """Two in each step."""
    script, drawn = importlib.import_module(name), []
    op_by_op(monkeypatch, script)
    place = script if name == "dqn_linen" else script.Replay
    sample = place.sample

    def spy(*args):
        batch = sample(*args)
        if name == "dqn_linen":  # whose loop is compiled
            jax.debug.callback(lambda x: drawn.append(np.array(x).tobytes()), batch.obs)
        else:
            drawn.append(np.array(batch.obs).tobytes())
        return batch

    monkeypatch.setattr(place, "sample", spy)
    found = train(name, tmp_path / "run", "--train-frequency 2 --total-timesteps 128")
    jax.effects_barrier()
    assert [row["charts/updates"] for row in found] == [16, 32]
    assert len(drawn) == len(set(drawn)) == 48


@EACH
def test_the_learning_rate_falls_by_iteration(name, tmp_path, monkeypatch):
    """What is logged is what an update is given."""
    script, given = importlib.import_module(name), []
    update = script.update

    def spy(*args, **options):
        if "linen" in name:  # update(train_state, batch, learning_rate, ...), compiled
            jax.debug.callback(lambda x: given.append(float(x)), args[2])
        elif name == dqn.COMPILED:  # update(agent, target, optimizer, batch, learning_rate, ...)
            given.append(args[4].item())
        else:
            given.append(args[2].param_groups[0]["lr"])
        return update(*args, **options)

    op_by_op(monkeypatch, script)
    monkeypatch.setattr(script, "update", spy)
    for flags, expected in (("", [0.5, 0.375, 0.25, 0.125]), ("--no-anneal-lr", [0.5] * 4)):
        given.clear()
        own = f"{flags} --learning-rate 0.5 --total-timesteps 256"
        found = train(name, tmp_path / f"run{flags}", own)
        jax.effects_barrier()
        assert [row["charts/learning_rate"] for row in found] == expected
        assert set(given) - {0} == set(expected)  # 0: to compile it


@EACH
@pytest.mark.parametrize(("env_id", "kind"), [("Bytes-v0", "uint8"), ("Numbers-v0", "float32")])
def test_the_replay_keeps_observations_in_the_environments_own_type(
    name, env_id, kind, tmp_path, monkeypatch
):
    """Gymnasium's float64 in float32."""
    if env_id == "Numbers-v0" and "gymnasium" not in name:
        pytest.skip("JAX has no float64")
    op_by_op(monkeypatch, importlib.import_module(name))
    train(name, tmp_path / "run", f"--env-id {env_id} --total-timesteps 64")
    obs, *_, next_obs = dqn.replay_in(tmp_path / "run")
    for x in (obs, next_obs):
        assert (x.dtype, x.shape) == (kind, (64, 3)) and set(x.flat) == {7, 250}


# === What differs between scripts ===============================================================
def test_xla_copies_no_replay():
    """Where its rows were read before they are written, it would copy all of them at each step."""
    args = dqn.args_of("dqn_linen", "--buffer-size 1000")
    env = dqn_linen.VecEnv(args.env_id, args.num_envs)
    key = jax.random.PRNGKey(0)
    obs, env_state = env.reset(key)
    train_state = dqn_linen.make_agent(args, env.obs_shape, env.num_actions, key)
    replay = dqn_linen.make_replay(args, env.obs_shape, obs.dtype)
    iterate = partial(dqn_linen.iterate, env=env, args=args)
    own = train_state, replay, obs, env_state, key, np.zeros(args.num_steps, "f"), 1e-3
    text = jax.jit(iterate, donate_argnums=range(4)).lower(*own).compile().as_text()
    assert text and "f32[1000,4]" in text
    assert not re.search(r"\[1000[,\]].* copy\(", text)


@EACH_IN_TORCH
def test_the_target_is_the_agent_of_some_updates_ago(name, tmp_path, monkeypatch):
    """In Linen update copies it: test_dqn_numerics.py."""
    script, seen = importlib.import_module(name), []
    op_by_op(monkeypatch, script)
    update = script.update

    def spy(agent, target, *args, **options):
        both = [dqn.flat(dqn.layers_of(x.state_dict())) for x in (agent, target)]
        seen.append(both)
        return update(agent, target, *args, **options)

    monkeypatch.setattr(script, "update", spy)
    train(name, tmp_path / "run", "--total-timesteps 128 --learning-rate 1e-2")
    del seen[: len(seen) - 24]  # the compiled one's first call, which only compiles
    for i, (agent, target) in enumerate(seen):
        np.testing.assert_array_equal(target, seen[i - i % 5][0])
        assert (agent == target).all() == (i % 5 == 0)


def test_compiling_changes_nothing(tmp_path, monkeypatch):
    """Before the first update the parameters are the eager run's, and the moments 0."""
    op_by_op(monkeypatch, importlib.import_module(dqn.COMPILED))
    for optimizer in ("adam", "rmsprop"):
        flags = f"--optimizer {optimizer} --learning-starts 1000 --total-timesteps 64"
        train(dqn.COMPILED, tmp_path / f"compiled-{optimizer}", flags)
        train("dqn_torch", tmp_path / f"eager-{optimizer}", flags)
        compiled, eager = (arrays(tmp_path / f"{x}-{optimizer}") for x in ("compiled", "eager"))
        moments = [x for place, x in compiled.items() if place.startswith("optimizer/")]
        assert len(moments) == (3 if optimizer == "adam" else 2)
        assert not any(x.any() for x in moments)
        for place in eager:
            if place.startswith(("agent/", "target/", "rng_state/")):
                np.testing.assert_array_equal(compiled[place], eager[place], err_msg=place)


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
        for key in (*dqn.LOSSES, "charts/episodic_return"):
            assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", ["dqn_linen_gymnasium", "dqn_torch"])
def test_a_run_learns_cartpole(name, tmp_path):
    """In 20,000 steps far beyond the 22 that random actions reach."""
    flags = "--num-envs 8 --num-steps 250 --hidden-sizes 64 64 --buffer-size 10000 "
    flags += "--batch-size 64 --train-frequency 8 --learning-starts 2400 --exploration-steps 5000 "
    flags += "--learning-rate 1e-3 --target-network-frequency 100 --total-timesteps 20000"
    rows = train(name, tmp_path / "run", flags)
    assert rows[0]["charts/episodic_return"] < 35
    assert rows[-1]["charts/episodic_return"] > 100

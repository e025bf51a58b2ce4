"""Complete runs of DQN: replay, exploration, updates, metrics, checkpoints and compilation."""

import importlib
import json
import re
from functools import partial
from types import SimpleNamespace

import dqn
import jax
import numpy as np
import pytest
import scripted  # noqa: F401  (registers the environments)
import torch
from flax import nnx
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
)
from sections import DQN_SCRIPTS, scripts, stand_ins

EACH = pytest.mark.parametrize("name", DQN_SCRIPTS)
IN_SCAN = ("dqn_linen", "dqn_nnx")  # an iteration is one compiled loop
EACH_IN_TORCH = pytest.mark.parametrize("name", scripts("dqn", "torch"))


def train(name, folder, flags):
    """Train with SMALL and flags. Return the metrics of each iteration."""
    own = ["--runs-dir", folder.parent, "--run-name", folder.name]
    assert main(name, *(dqn.SMALL + flags).split(), *own) == 0
    text = (folder / "metrics.jsonl").read_text()
    # JSON has no NaN, but Python would accept it.
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


# === A run in detail ============================================================================
KNOWN = "--env-id ShortCartPole-v0 --num-steps 250 --total-timesteps 3000 --buffer-size 2400 "
KNOWN += "--learning-starts 2000 --train-frequency 8 --start-e 0.5 --end-e 0 "
KNOWN += "--exploration-steps 2000 --save-every 2"


@pytest.fixture(scope="module", params=DQN_SCRIPTS)
def known_run(request, tmp_path_factory):
    """Return a run that has updates only in its third iteration.

    The replay buffer is initially NaN, so sampling an unused transition would affect the losses.
    """
    name = request.param
    script = importlib.import_module(name)
    maker = "make_replay" if name in IN_SCAN else "Replay"
    make = getattr(script, maker)

    def make_nan(*args):
        replay = make(*args)
        floats = {x: getattr(replay.transitions, x) for x in ("obs", "reward", "next_obs")}
        nan = replay.transitions._replace(**{field: x * np.nan for field, x in floats.items()})
        if name in IN_SCAN:
            return replay._replace(transitions=nan)
        replay.transitions = nan
        return replay

    jax.numpy.zeros(1)  # compiles a function that running.Counts also calls
    folder = tmp_path_factory.mktemp("known_run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, maker, make_nan)
        run = make_whole_run(name, folder, lambda place: train(name, place, KNOWN))
    half = rewind(run, folder / "half")
    return SimpleNamespace(name=name, half=half, rows=rows(run.folder), **run._asdict())


def test_stored_transitions_match_cartpole(known_run):
    """The replay buffer has steps 600 to 3000, because the last 600 have overwritten the first."""
    obs, action, reward, terminated, next_obs = dqn.replay_in(known_run.folder)
    steps = [dqn.step_cartpole(*x) for x in zip(obs, action, strict=True)]
    expected = [np.array(x) for x in zip(*steps, strict=True)]
    np.testing.assert_allclose(next_obs, expected[0], atol=1e-5)
    np.testing.assert_array_equal([reward, terminated], expected[1:])
    obs, terminated, next_obs = (np.roll(x, -600, 0) for x in (obs, terminated, next_obs))
    begins = (obs[4:] != next_obs[:-4]).any(1)
    assert begins[terminated[:-4]].all()
    # Many episodes terminated, and many others were truncated.
    assert terminated.sum() > 20 and begins[~terminated[:-4]].sum() > 20


def test_a_checkpoint_contains_only_the_part_of_the_replay_in_use(known_run):
    assert [len(x) for x in dqn.replay_in(known_run.half)] == [2000] * 5
    assert [len(x) for x in dqn.replay_in(known_run.folder)] == [2400] * 5


def test_each_environment_explores_independently(known_run):
    """At epsilon 0.5, half of 2000 actions are random, and half of these are the best action."""
    obs, action, *_ = dqn.replay_in(known_run.half)
    params = dqn.parameters(dqn.layers_in(known_run.half))
    best = dqn.q_values(params, obs, (4,)).argmax(1).numpy()
    explored = (action != best).reshape(500, 4).astype(float)
    assert abs(explored.mean() - 0.25) < 0.05
    assert np.abs(np.corrcoef(explored.T) - np.eye(4)).max() < 5 / np.sqrt(500)
    later = [np.corrcoef(x[1:], x[:-1])[0, 1] for x in explored.T]
    assert np.abs(later).max() < 5 / np.sqrt(500)
    assert (explored[:250] != explored[250:]).any(0).all()  # exploration differs between iterations


def test_updates_read_only_stored_transitions_and_are_counted(known_run):
    """There is one update per 8 steps after step 2000.

    Until then, the losses are null, which does not count as divergence.
    """
    assert [row["charts/updates"] for row in known_run.rows] == [0, 0, 125]
    for name in dqn.LOSSES:
        assert [row[name] is None for row in known_run.rows] == [True, True, False]
    assert info(known_run.folder)["status"] == "completed"
    found = arrays(known_run.folder)
    counts = {"train_state/step", "train_state/optimizer/step", "num_updates", "optimizer/count"}
    counts &= found.keys()
    assert counts and all(found[place] == 125 for place in counts)
    epsilons = [row["charts/epsilon"] for row in known_run.rows]  # at the last step of an iteration
    assert epsilons == pytest.approx([0.5, 0.5, 0.5 * (1 - 996 / 2000)])


def test_nothing_compiles_twice_and_only_actions_and_metrics_are_transferred(known_run):
    """There is one transfer per array of metrics, and one per step for the Gymnasium actions.

    On a CPU, JAX shares the memory of the actions with NumPy, so there is no transfer.
    """
    compilations = [row.get("compilations", 0) for row in known_run.counts]
    # The first update compiles update().
    late = 1 if known_run.name in ("dqn_linen_gymnasium", "dqn_nnx_gymnasium") else 0
    assert (compilations[0] > 0) == (known_run.name != "dqn_torch_gymnasium")
    assert compilations[1:] == [0, late]
    expected = {
        "dqn_linen": 13,
        "dqn_nnx": 13,
        "dqn_torch": 9,
        dqn.COMPILED: 10,
        "dqn_torch_gymnasium": 251,
    }
    assert known_run.counts[1].get("transfers", 0) == expected.get(known_run.name, 0)


def test_a_resumed_run_continues_exactly(known_run, tmp_path, monkeypatch):
    """The run is resumed before the first update."""
    op_by_op(monkeypatch, importlib.import_module(known_run.name))  # as in known_run
    folder = rewind(known_run, tmp_path / "killed")
    assert main(known_run.name, "--resume", folder) == 0
    assert info(folder)["resumed"] == [2]
    if "gymnasium" in known_run.name:
        assert metrics(folder)[:2] == metrics(known_run.folder)[:2]
        assert len(metrics(folder)) == len(metrics(known_run.folder))
    else:
        assert metrics(folder) == metrics(known_run.folder)
        assert_same_checkpoints(folder, known_run.folder)


@pytest.mark.parametrize(
    ("name", "optimizer"), [*((x, "rmsprop") for x in DQN_SCRIPTS), ("dqn_torch", "adam")]
)
def test_a_run_resumed_between_updates_continues_exactly(name, optimizer, tmp_path, monkeypatch):
    """When the run resumes, the optimizer has moments, and the learning rate has decayed."""
    op_by_op(monkeypatch, importlib.import_module(name))
    flags = f"--optimizer {optimizer} --learning-rate 1e-3 --save-every 2"
    if "gymnasium" in name:  # new episodes start, so all must be identical
        flags += " --env-id Constant-v0"
    run = make_whole_run(name, tmp_path, lambda place: train(name, place, flags))
    folder = rewind(run, tmp_path / "killed")
    assert main(name, "--resume", folder) == 0
    assert info(folder)["resumed"] == [2]
    assert metrics(folder) == metrics(run.folder)
    assert_same_checkpoints(folder, run.folder)


# === Every script ===============================================================================
@EACH
def test_each_loss_is_logged_under_its_name(name, tmp_path, monkeypatch):
    """At learning rate 0, the reference gives bounds for the losses in ProbeSignal."""
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
def test_every_update_samples_a_new_batch(name, tmp_path, monkeypatch):
    """Even two updates after the same step have different batches."""
    script, drawn = importlib.import_module(name), []
    op_by_op(monkeypatch, script)
    place = script if name in IN_SCAN else script.Replay
    sample = place.sample

    def spy(*args):
        batch = sample(*args)
        if name in IN_SCAN:
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
def test_the_learning_rate_decays_per_iteration(name, tmp_path, monkeypatch):
    """The logged learning rate is the one that update() uses."""
    script, given = importlib.import_module(name), []
    update = script.update

    def spy(*args, **options):
        if "torch" not in name:  # update(train_state, batch, learning_rate, ...), compiled
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
        assert set(given) - {0} == set(expected)  # 0 in a call that only compiles


@EACH
@pytest.mark.parametrize(("env_id", "kind"), [("Bytes-v0", "uint8"), ("Numbers-v0", "float32")])
def test_the_replay_stores_the_dtype_of_the_environment(name, env_id, kind, tmp_path, monkeypatch):
    """The replay buffer keeps the dtype, except that it stores float64 as float32."""
    if env_id == "Numbers-v0" and "gymnasium" not in name:
        pytest.skip("float64 is disabled in JAX")
    op_by_op(monkeypatch, importlib.import_module(name))
    train(name, tmp_path / "run", f"--env-id {env_id} --total-timesteps 64")
    obs, *_, next_obs = dqn.replay_in(tmp_path / "run")
    for x in (obs, next_obs):
        assert (x.dtype, x.shape) == (kind, (64, 3)) and set(x.flat) == {7, 250}


@EACH
def test_episode_statistics_match_numpy(name, tmp_path, monkeypatch):
    """In Ends, some episodes terminate after one step, and the others are truncated after two."""
    op_by_op(monkeypatch, importlib.import_module(name))
    found = train(name, tmp_path / "run", "--env-id Ends-v0 --total-timesteps 128")
    obs, _, reward, terminated, _ = dqn.replay_in(tmp_path / "run")
    obs, reward, terminated = (x.reshape(32, 4) for x in (obs, reward, terminated))
    np.testing.assert_array_equal(terminated, obs > 0)
    truncated = np.zeros((32, 4), bool)
    for step in range(1, 32):  # the second step of an episode that began at step - 1
        truncated[step] = ~terminated[step] & ~terminated[step - 1] & ~truncated[step - 1]
    expected = dqn.finished_episodes(reward, terminated | truncated, 16)
    assert len(found) == 2 and terminated[:16].any() and truncated[:16].any()
    for row, episodes in zip(found, expected, strict=True):
        for key, x in dqn.statistics(episodes).items():
            assert row[key] == pytest.approx(x, rel=1e-5), key


@pytest.mark.parametrize("name", stand_ins("Arguments", DQN_SCRIPTS))
def test_counts_below_the_minimum_are_usage_errors(name, monkeypatch, capfd):
    flags = ["target-network-frequency", "learning-starts", "exploration-steps"]
    dqn.assert_counts_are_checked(name, flags, monkeypatch, capfd)


@pytest.mark.parametrize("name", stand_ins("Loss", DQN_SCRIPTS))
def test_a_run_whose_loss_diverges_ends(name, tmp_path, monkeypatch):
    """Updates start in the second iteration. The null losses of the first one do not count."""
    op_by_op(monkeypatch, importlib.import_module(name))
    flags = "--learning-rate 1e30 --learning-starts 64 --total-timesteps 192"
    own = ["--runs-dir", tmp_path, "--run-name", "run"]
    assert main(name, *(dqn.SMALL + flags).split(), *own) not in (0, 2)
    assert [row["losses/td_loss"] for row in rows(tmp_path / "run")] == [None] * 2
    assert info(tmp_path / "run")["status"] == "diverged"


# === Some of the scripts ========================================================================
@pytest.mark.parametrize("name", IN_SCAN)
def test_xla_does_not_copy_the_replay(name):
    """If a step read the replay before writing to it, XLA would copy the buffer each time."""
    script = importlib.import_module(name)
    args = dqn.args_of(name, "--buffer-size 1000")
    env = script.VecEnv(args.env_id, args.num_envs)
    key = jax.random.PRNGKey(0)
    obs, env_state = env.reset(key)
    train_state = script.make_agent(args, env.obs_shape, env.num_actions, key)
    replay = script.make_replay(args, env.obs_shape, obs.dtype)
    iterate = partial(script.iterate, env=env, args=args)
    own = replay, obs, env_state, key, np.zeros(args.num_steps, "f"), 1e-3
    donated = (0, 1, 2, 3)
    if name == "dqn_nnx":
        iterate_fn = nnx.jit_partial(iterate, train_state, graph=False, donate_argnums=donated)
        lowered = iterate_fn.lower(*own)
    else:
        lowered = jax.jit(iterate, donate_argnums=donated).lower(train_state, *own)
    text = lowered.compile().as_text()
    assert text and "f32[1000,4]" in text
    assert not re.search(r"\[1000[,\]].* copy\(", text)


@EACH_IN_TORCH
def test_the_target_network_is_copied_every_few_updates(name, tmp_path, monkeypatch):
    """In JAX, update() copies the target network, which test_dqn_numerics.py tests."""
    script, seen = importlib.import_module(name), []
    op_by_op(monkeypatch, script)
    update = script.update

    def spy(agent, target, *args, **options):
        both = [dqn.flat(dqn.layers_of(x.state_dict())) for x in (agent, target)]
        seen.append(both)
        return update(agent, target, *args, **options)

    monkeypatch.setattr(script, "update", spy)
    train(name, tmp_path / "run", "--total-timesteps 128 --learning-rate 1e-2")
    del seen[: len(seen) - 24]  # the first call of the compiled script only compiles
    for i, (agent, target) in enumerate(seen):
        np.testing.assert_array_equal(target, seen[i - i % 5][0])
        assert (agent == target).all() == (i % 5 == 0)


def test_the_call_that_compiles_leaves_no_trace(tmp_path, monkeypatch):
    """If there are no updates, parameters equal those of an eager run, and moments are 0."""
    op_by_op(monkeypatch, importlib.import_module(dqn.COMPILED))
    for optimizer in ("adam", "rmsprop"):
        flags = f"--optimizer {optimizer} --learning-starts 64 --total-timesteps 64"
        train(dqn.COMPILED, tmp_path / f"compiled-{optimizer}", flags)
        train("dqn_torch", tmp_path / f"eager-{optimizer}", flags)
        compiled, eager = (arrays(tmp_path / f"{x}-{optimizer}") for x in ("compiled", "eager"))
        moments = [x for place, x in compiled.items() if place.startswith("optimizer/")]
        assert len(moments) == (3 if optimizer == "adam" else 2)
        assert not any(x.any() for x in moments)
        for place in eager:
            if place.startswith(("agent/", "target/", "rng_state")):
                np.testing.assert_array_equal(compiled[place], eager[place], err_msg=place)


def test_a_compiled_run_is_one_graph_and_matches_the_eager_run(tmp_path):
    """The learning rate changes during the run."""
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
    """Training takes 20,000 steps. The mean return of random actions is 22."""
    flags = "--num-envs 8 --num-steps 250 --hidden-sizes 64 64 --buffer-size 10000 "
    flags += "--batch-size 64 --train-frequency 8 --learning-starts 2400 --exploration-steps 5000 "
    flags += "--learning-rate 1e-3 --target-network-frequency 100 --total-timesteps 20000"
    rows = train(name, tmp_path / "run", flags)
    assert rows[0]["charts/episodic_return"] < 35
    assert rows[-1]["charts/episodic_return"] > 100

"""evaluate.py: every script's checkpoints, an unbiased count, strangers' files, and the GIF."""

import importlib
import io
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import probes
import pytest
from conftest import ROOT
from frameworks import SCRIPTS
from PIL import Image
from scipy import stats

import evaluate

SMALL: dict[str, Any] = {"num_envs": 4, "num_steps": 32, "num_minibatches": 2, "update_epochs": 2}
SMALL |= {"hidden_sizes": (8, 8, 8), "total_timesteps": 128 * 6, "learning_rate": 0.01}
SMALL_DQN: dict[str, Any] = {"num_envs": 4, "num_steps": 32, "learning_starts": 64}
SMALL_DQN |= {"buffer_size": 512, "batch_size": 16, "replay_ratio": 1.0, "learning_rate": 0.01}
SMALL_DQN |= {"hidden_sizes": (8, 8), "total_timesteps": 128 * 6}
EPISODES = 12
GREEDY = evaluate.Args(runs=("",), episodes=EPISODES)


class ProbeLengths(probes.Probe):
    """Episodes of 1 or of 50 steps, with equal odds, and a reward of 1 for each step."""

    def is_terminated(self, state: probes.State, params: probes.Params) -> jax.Array:
        return state.time >= jnp.where(state.signal > 0, 1, 50)


if "ProbeLengths-v0" not in gymnax.registered_envs:
    gymnax.register("ProbeLengths-v0", ProbeLengths)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """Name of a script, and perhaps Breakout -> folder of a short run; each is trained once."""
    folders: dict[str, Path] = {}

    def train(name, env="CartPole-v1"):
        key = f"{name} {env}"
        if key not in folders:
            script, runs_dir = importlib.import_module(name), tmp_path_factory.mktemp("runs")
            flags = SMALL if name.startswith("ppo") else SMALL_DQN
            if env == "Breakout" and name.endswith("_gymnasium"):
                flags = flags | {"env_id": "MinAtar/Breakout-v0"}
            elif env == "Breakout":
                flags = flags | {"env_id": "Breakout-MinAtar", "sticky_actions": 0.25}
                flags |= {"full_actions": True, "max_episode_steps": 2**31 - 1}
            script.train(script.Args(**flags | {"runs_dir": str(runs_dir), "run_name": name}))
            folders[key] = runs_dir / name
        return folders[key]

    return train


@pytest.fixture
def copied_run(small_run, tmp_path):
    """A run's folder that a test may change, with nothing but the checkpoint."""
    folder = tmp_path / "copied"
    folder.mkdir()
    shutil.copy(small_run("ppo_linen") / "checkpoint.npz", folder)
    return folder


@pytest.fixture
def command(monkeypatch, capsys):
    """Call main by a command line; return exit status, output and errors."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words)])
        status: Any = 0
        capsys.readouterr()  # what a training before it said
        try:
            evaluate.main()
        except SystemExit as stopped:
            status = stopped.code
        return status, *capsys.readouterr()

    return call


def stand_in(env_id, name="stand-in"):
    """A run without a checkpoint, whose actions are all alike to the policy."""
    script = importlib.import_module("ppo_linen")
    num_actions = script.VecEnv(env_id, 1).num_actions
    args = SimpleNamespace(env_id=env_id, seed=1, num_envs=4, num_steps=32)
    uniform = jax.jit(lambda obs: jnp.zeros((len(obs), num_actions)))
    return evaluate.Run(Path(name), script, args, 6, uniform)


def numpy_logits(folder, obs):
    """The actor by the names in the file alone: tanh between layers, none after the last."""
    with np.load(folder / "checkpoint.npz") as file:
        own = ("train_state/params/", "train_state/agent/", "state/agent/", "tensors/agent/")
        arrays = {x: file[x] for x in sorted(file.files) if x.startswith(own) and "actor" in x}
    kernels = [x.T if "tensors" in name else x for name, x in arrays.items() if x.ndim == 2]
    biases = [x for x in arrays.values() if x.ndim == 1]
    assert len(kernels) == len(biases) == 4
    for i, (kernel, bias) in enumerate(zip(kernels, biases, strict=True)):
        obs = (np.tanh(obs) if i else obs) @ kernel + bias
    return obs


# === Agents and episodes ========================================================================
@pytest.mark.parametrize("name", SCRIPTS)
def test_greedy_actions_are_those_of_the_checkpoint(name, small_run):
    folder = small_run(name)
    run, args = evaluate.load_run(str(folder)), evaluate.Args(runs=("",), episodes=EPISODES)
    env, seen = run.script.VecEnv("CartPole-v1", 8), []
    for step, (obs, state, result) in zip(range(30), evaluate.play(run, 8, args), strict=False):
        logits = numpy_logits(folder, np.asarray(obs))
        np.testing.assert_allclose(run.get_logits(obs), logits, rtol=1e-4, atol=1e-5)
        _, _, expected = env.step(state, jnp.asarray(logits.argmax(-1), jnp.int32))
        np.testing.assert_allclose(result["next_obs"], expected["next_obs"], atol=1e-6)
        seen.append(logits.argmax(-1))
        assert step < 30
    assert 0 < np.mean(seen) < 1  # both actions
    result = evaluate.evaluate(run, args)
    assert (result["script"], result["env_id"]) == (name, "CartPole-v1")
    assert (result["iteration"], result["global_step"]) == (6, 128 * 6)
    assert len(result["returns"]) == len(result["lengths"]) == EPISODES


def test_sampled_actions_are_drawn_from_the_policy():
    probs = np.array([0.1, 0.6, 0.3], "f")
    logits = np.tile(np.log(probs), (10_000, 1))
    counts = []
    for step in (0, 1):
        action = np.asarray(evaluate.choose(logits, jax.random.PRNGKey(0), step, True))
        counts.append(np.bincount(action, minlength=3) / 10_000)
        np.testing.assert_allclose(counts[-1], probs, atol=5 * 0.5 / 100)
    assert (counts[0] != counts[1]).any()  # new noise at each step
    assert (np.asarray(evaluate.choose(logits, jax.random.PRNGKey(0), 0, False)) == 1).all()


def test_a_sampled_evaluation_returns_what_training_did(tmp_path):
    """The policy hardly changes in the last iterations, whose actions were sampled too."""
    script = importlib.import_module("ppo_linen")
    flags: dict[str, Any] = {"num_envs": 16, "num_steps": 128, "num_minibatches": 4}
    flags |= {"update_epochs": 8, "learning_rate": 1e-3, "runs_dir": str(tmp_path)}
    script.train(script.Args(**flags, total_timesteps=2048 * 30, run_name="trained"))
    flags |= {"total_timesteps": 2048, "learning_rate": 1e-9}
    script.train(script.Args(**flags, run_name="fresh"))
    lines = (tmp_path / "trained" / "metrics.jsonl").read_text().splitlines()[-6:]
    rows = [json.loads(line) for line in lines]
    count = np.array([row["charts/episodes"] for row in rows])
    trained = count @ [row["charts/episodic_return"] for row in rows] / count.sum()

    args = evaluate.Args(runs=("",), episodes=200, sample=True)
    results = [
        evaluate.evaluate(evaluate.load_run(str(tmp_path / name)), args)
        for name in ("trained", "fresh")
    ]
    total = results[0]["return"]
    # Training's mean is of fewer episodes: its standard error is that much larger.
    error = total["std"] * math.sqrt(1 / 200 + 1 / count.sum())
    assert abs(total["mean"] - trained) < 3 * error
    assert total["mean"] > 100
    assert results[1]["return"]["mean"] < 40


@pytest.mark.parametrize(("episodes", "max_envs"), [(200, 8), (130, 128), (3, 128)])
def test_every_environment_plays_its_share(episodes, max_envs, monkeypatch):
    monkeypatch.setattr(evaluate, "MAX_ENVS", max_envs)
    run, args = stand_in("ProbeLengths-v0"), evaluate.Args(runs=("",), episodes=episodes)
    result = evaluate.evaluate(run, args)
    assert len(result["lengths"]) == episodes and result["returns"] == result["lengths"]

    num_envs = min(episodes, max_envs)
    played: list[list[int]] = [[] for _ in range(num_envs)]
    for _, (_, _, step) in zip(range(50 * 26), evaluate.play(run, num_envs, args), strict=False):
        for i in np.flatnonzero(step["terminated"]):
            played[i].append(int(step["episode_length"][i]))
    shares = [episodes // num_envs + (i < episodes % num_envs) for i in range(num_envs)]
    expected = [x for own, share in zip(played, shares, strict=True) for x in own[:share]]
    assert sorted(result["lengths"]) == sorted(expected)


def test_short_episodes_are_not_counted_more_often():
    """Lengths of 1 and 50 have the mean 25.5; the first 400 to end anywhere have another."""
    run, args = stand_in("ProbeLengths-v0"), evaluate.Args(runs=("",), episodes=400)
    result, first_to_end = evaluate.evaluate(run, args), []
    for _, _, step in evaluate.play(run, evaluate.MAX_ENVS, args):
        first_to_end += step["episode_length"][step["terminated"]].tolist()
        if len(first_to_end) >= 400:
            break
    assert abs(result["length"]["mean"] - 25.5) < 4 * 24.5 / math.sqrt(400)
    assert abs(np.mean(first_to_end[:400]) - 25.5) > 4 * 24.5 / math.sqrt(400)


def test_truncated_episodes_count(monkeypatch):
    play = evaluate.play
    monkeypatch.setattr(evaluate, "play", lambda *args: itertools.islice(play(*args), 50))
    run, args = stand_in("ProbeTruncation-v0"), evaluate.Args(runs=("",), episodes=EPISODES)
    assert evaluate.evaluate(run, args)["lengths"] == [2] * EPISODES


def test_a_seed_repeats_and_another_differs():
    run = stand_in("CartPole-v1")
    for sample in (False, True):
        first, again, other = (
            evaluate.evaluate(run, evaluate.Args(("",), EPISODES, sample=sample, seed=seed))
            for seed in (1, 1, 2)
        )
        assert first == again
        assert first["returns"] != other["returns"]


def test_summary():
    values = [1.0, 5.0, 2.0, 2.0]
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    expected = {"mean": 2.5, "interval": [low, high], "std": np.std(values, ddof=1)}
    assert evaluate.summary(values) == {
        key: pytest.approx(x) for key, x in (expected | {"min": 1.0, "max": 5.0}).items()
    }
    assert evaluate.summary([7.0])["interval"] is None and evaluate.summary([7.0])["std"] is None


def test_an_episode_that_gets_to_max_steps_counts_as_it_stands():
    """Lengths of 1 and 50 become 1 and 20; after a cap the next episode begins, as after an end."""
    args = evaluate.Args(runs=("",), episodes=400, max_steps=20)
    result = evaluate.evaluate(stand_in("ProbeLengths-v0"), args)
    assert set(result["lengths"]) == {1, 20} and result["returns"] == result["lengths"]
    assert result["capped"] == result["lengths"].count(20) and 160 < result["capped"] < 240
    assert result["max_steps"] == 20


def test_no_episode_is_capped_that_ends_at_max_steps():
    args = evaluate.Args(runs=("",), episodes=EPISODES, max_steps=50)
    assert evaluate.evaluate(stand_in("ProbeLengths-v0"), args)["capped"] == 0


def test_exploring():
    """Each environment tosses its own coin at each step, and draws from all actions."""
    best = jnp.zeros(20_000, int)
    key, counts = jax.random.PRNGKey(0), []
    for step in (0, 1):
        action = np.asarray(evaluate.explore(best, key, step, 0.3, 4))
        counts.append(np.bincount(action, minlength=4) / len(best))
        np.testing.assert_allclose(counts[-1], [0.775, 0.075, 0.075, 0.075], atol=0.015)
    assert (counts[0] != counts[1]).any()
    assert not np.asarray(evaluate.explore(best, key, 0, 0.0, 4)).any()


def test_a_random_agent_is_the_same_whatever_the_agent_learned(small_run):
    args = evaluate.Args(runs=("",), episodes=EPISODES, epsilon=1)
    first, second = (
        evaluate.evaluate(evaluate.load_run(str(small_run(name))), args)
        for name in ("ppo_linen", "ppo_nnx")
    )
    assert first["returns"] == second["returns"] and first["epsilon"] == 1
    greedy = evaluate.evaluate(evaluate.load_run(str(small_run("ppo_linen"))), GREEDY)
    assert first["returns"] != greedy["returns"]


# === DQN, and environments in Gymnasium =========================================================
DQN = ("dqn_linen", "dqn_torch", "dqn_linen_gymnasium", "dqn_torch_gymnasium")
GYMNASIUM = ("ppo_linen_gymnasium", "ppo_torch_gymnasium", *DQN[2:])


def numpy_values(folder, obs, shape):
    """Q of every action, by the names in the file alone: a convolution, then layers with ReLU."""
    with np.load(folder / "checkpoint.npz") as file:
        own = ("train_state/params/", "tensors/q_network/")
        arrays = {x: file[x] for x in file.files if x.startswith(own)}
    layers = {}
    for name, array in arrays.items():
        place, kind = name.rsplit("/" if "linen" in folder.name else ".", 1)
        order = next(i for i, x in enumerate(("conv", "hidden.", "output", "")) if x in place)
        layers.setdefault((order, place), {})[kind] = array
    layers = [layers[x] for x in sorted(layers)]
    pairs = [(x["kernel"] if "kernel" in x else x["weight"].T, x["bias"]) for x in layers]
    x = np.asarray(obs, np.float64)
    if len(shape) == 3:
        kernel, bias = pairs.pop(0)
        if kernel.ndim == 4:  # PyTorch's, transposed: columns, rows, channels, outputs
            kernel = kernel.transpose(1, 0, 2, 3).reshape(-1, len(bias))
        images = x.reshape(-1, *shape)
        rows = [
            [images[:, i : i + 3, j : j + 3].reshape(len(x), -1) for j in range(shape[1] - 2)]
            for i in range(shape[0] - 2)
        ]
        squares = np.maximum(np.array(rows).transpose(2, 0, 1, 3) @ kernel + bias, 0)
        torch = "torch" in folder.name
        x = (squares.transpose(0, 3, 1, 2) if torch else squares).reshape(len(x), -1)
    for i, (kernel, bias) in enumerate(pairs):
        x = (np.maximum(x, 0) if i else x) @ kernel + bias
    return x


@pytest.mark.parametrize("env", ["CartPole-v1", "Breakout"])
@pytest.mark.parametrize("name", DQN)
def test_greedy_actions_of_a_dqn(name, env, small_run):
    folder = small_run(name, env)
    run = evaluate.load_run(str(folder))
    shape = (10, 10, 4) if env == "Breakout" else (4,)
    for _, (obs, _, result) in zip(range(30), evaluate.play(run, 8, GREEDY), strict=False):
        values = numpy_values(folder, obs, shape)
        np.testing.assert_allclose(run.get_logits(obs), values, rtol=1e-4, atol=1e-5)
        if env == "CartPole-v1":  # the second action is a push to the right
            faster = result["next_obs"][:, 1] > obs[:, 1]
            np.testing.assert_array_equal(faster, values.argmax(-1) == 1)
    result = evaluate.evaluate(run, GREEDY)
    assert (result["script"], result["env_id"]) == (name, run.args.env_id)
    assert (result["iteration"], result["global_step"]) == (6, 128 * 6)


def test_a_dqn_plays_the_environment_that_it_learned_in(small_run):
    run = evaluate.load_run(str(small_run("dqn_linen", "Breakout")))
    env = evaluate.make_env(run.script, run.args, 1)
    assert env.num_actions == 6 and env.params.max_steps_in_episode == 2**31 - 1
    assert env.env._sticky_action_prob == 0.25


@pytest.mark.parametrize("name", GYMNASIUM)
def test_gymnasium_runs_play_in_gymnasium(name, small_run):
    run, args = evaluate.load_run(str(small_run(name))), evaluate.Args(("",), 12, seed=7)
    other = evaluate.make_env(run.script, run.args, 12, seed=7)
    expected = other.reset(200)
    for _, (obs, state, result) in zip(range(200), evaluate.play(run, 12, args), strict=False):
        np.testing.assert_array_equal(obs, expected)
        np.testing.assert_array_equal(state.astype("f"), obs[0])  # CartPole shows its state
        action = np.asarray(run.get_logits(obs)).argmax(-1)
        expected, wanted = other.step(action)
        assert all((result[x] == wanted[x]).all() for x in wanted)
    result = evaluate.evaluate(run, args)
    assert len(result["returns"]) == 12 and result == evaluate.evaluate(run, args)
    assert result["returns"] != evaluate.evaluate(run, GREEDY)["returns"]


@pytest.mark.parametrize("name", GYMNASIUM[:1])
def test_capped_episodes_in_gymnasium(name, small_run):
    run = evaluate.load_run(str(small_run(name)))
    args = evaluate.Args(("",), episodes=8, epsilon=1, max_steps=6)  # the shortest end after 8
    for _, (obs, _, result) in zip(range(13), evaluate.play(run, 8, args), strict=False):
        assert (result["episode_length"] <= 6).all()
        if result["episode_length"][0] == 1:
            assert (abs(obs) <= 0.05).all()
    result = evaluate.evaluate(run, args)
    assert result["lengths"] == result["returns"] == [6] * 8 and result["capped"] == 8


def test_files_of_several_evaluations(copied_run, command):
    for flags, words in (
        ("", "greedy actions, seed 0"),
        ("--epsilon 0.05", "greedy actions, epsilon 0.05, seed 0"),
        ("--epsilon 1 --max-steps 9", "random actions, seed 0"),
    ):
        status, out, err = command(copied_run, "--episodes", 50, *flags.split())
        assert (status, err) == (0, "") and out.splitlines()[0].endswith(words)
        head, row = (line.split() for line in out.splitlines()[1:])
        assert ("capped" in head) == ("--max-steps" in flags)
    names = {"": 0, "-epsilon-0.05": 0.05, "-epsilon-1": 1}
    for name, epsilon in names.items():
        result = json.loads((copied_run / f"evaluation{name}.json").read_text())
        assert result["epsilon"] == epsilon
    assert row[-1] == str(result["capped"]) and result["capped"] > 40
    assert len(list(copied_run.glob("evaluation*"))) == 3


@pytest.mark.parametrize("name", ["ppo_linen_gymnasium", *DQN])
def test_gif_of_other_scripts(name, small_run, tmp_path):
    """CartPole is drawn, Breakout as squares, whatever library it is from."""
    envs = ["CartPole-v1", "Breakout"] if "dqn" in name else ["CartPole-v1"]
    for env in envs:
        path, run = tmp_path / "picture.gif", evaluate.load_run(str(small_run(name, env)))
        args = evaluate.Args(("",), epsilon=0.5 if env == "Breakout" else 1)
        path.write_bytes(evaluate.draw([run], args))
        frames = frames_of(path)
        assert len(frames) > 5 and (frames[0] != frames[4]).any()
        black = (frames[0][68:] < 20).all(-1).mean()
        assert (black > 0.3) == (env == "Breakout")


# === Command line ===============================================================================
def test_table_and_files(small_run, copied_run, command):
    folders = small_run("ppo_nnx"), copied_run
    status, out, err = command(folders[0], f"{folders[1]}/", "--episodes", EPISODES)
    head, *table = out.splitlines()
    assert status == 0 and err == ""
    assert head == f"{EPISODES} episodes a run, greedy actions, seed 0"
    assert len(table) == 3 and len({len(line) for line in table}) == 1
    for line, folder, script in zip(table[1:], folders, ("ppo_nnx", "ppo_linen"), strict=True):

        def refuse(name):
            raise AssertionError(name)

        text = (folder / "evaluation.json").read_text()
        result = json.loads(text, parse_constant=refuse)
        total = result["return"]
        low, high = total["interval"]
        cells = [folder.name, script, "CartPole-v1", "1", "768", f"{total['mean']:.2f}"]
        cells += [f"[{low:.2f},", f"{high:.2f}]", f"{total['std']:.2f}", f"{total['min']:g}"]
        assert line.split() == [*cells, f"{total['max']:g}", f"{result['length']['mean']:.1f}"]
        assert total == evaluate.summary(result["returns"])
        assert (result["episodes"], result["actions"], result["seed"]) == (EPISODES, "greedy", 0)
        assert not list(folder.glob("*.partial"))


def test_one_episode_has_no_interval(copied_run, command):
    status, out, _ = command(copied_run, "--episodes", 1, "--sample", "--seed", 5)
    assert status == 0 and out.startswith("1 episodes a run, sampled actions, seed 5\n")
    assert out.splitlines()[2].split()[6:8] == ["-", "-"]
    result = json.loads((copied_run / "evaluation.json").read_text())
    assert result["return"]["interval"] is None and result["actions"] == "sampled"


def test_a_dqn_has_no_policy_to_sample(small_run, command):
    folder = small_run("dqn_linen")
    status, out, err = command(folder, "--episodes", 1, "--sample")
    assert (status, out) == (2, "") and err.startswith("--sample ") and err.count("\n") == 1
    assert not (folder / "evaluation.json").exists()


def test_a_folder_that_cannot_be_written_to(small_run, copied_run, command):
    (copied_run / "evaluation.json").mkdir()
    other = small_run("ppo_linen")
    status, out, err = command(copied_run, other, "--episodes", 1)
    assert status == 2 and len(out.splitlines()) == 4
    assert err.startswith("these files cannot be written: ") and err.count("\n") == 1
    assert (other / "evaluation.json").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "RUN must be the folder of a run"),
        ("run --episodes 0", "--episodes must be positive, not 0"),
        ("run --episodes some", "--episodes"),
        ("run --seed -1", "--seed must lie between"),
        ("run --epsilon 1.5", "--epsilon must lie between 0 and 1, not 1.5"),
        ("run --epsilon nan", "--epsilon must lie between 0 and 1"),
        ("run --max-steps 0", "--max-steps must lie between 1 and"),
        ("run --gif picture.png", "--gif must be a file that ends in .gif"),
        ("run --gif folder.gif", "--gif must be a file"),
        ("run --gif missing/picture.gif", "--gif must be a file"),
        ("run", "run has no checkpoint to evaluate: [Errno 2] No such file"),
    ],
)
def test_bad_command_line(flags, message, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.gif").mkdir()
    status, out, err = command(*flags.split())
    assert status == 2
    assert message in " ".join(err.replace("│", "").split())
    assert "Traceback" not in out + err
    assert [path.name for path in tmp_path.iterdir()] == ["folder.gif"]


def call(*words, **options):
    return [sys.executable, str(ROOT / "evaluate.py"), *words]


def test_from_the_folder_of_a_renamed_run(copied_run):
    folder = copied_run.rename(copied_run.parent / "another name $x^2$")
    done = subprocess.run(call(".", "--episodes", "2"), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2].startswith("another name $x^2$  ppo_linen  CartPole-v1")
    assert (folder / "evaluation.json").exists()


def test_interrupted(copied_run):
    """Killed by the signal, which a shell reports as status 130."""
    words = call(str(copied_run), "--episodes", "1000000")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while b"jaxlib" not in Path(f"/proc/{process.pid}/maps").read_bytes():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.communicate() == (b"", b"")
    assert process.returncode == -signal.SIGINT
    assert [path.name for path in copied_run.iterdir()] == ["checkpoint.npz"]


# === Strangers' files ===========================================================================
def change(folder, content):
    """Rewrite the checkpoint's JSON by a function of it, or the whole file as bytes."""
    path = folder / "checkpoint.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
        return
    with np.load(path) as file:
        arrays = dict(file)
    info = json.loads(arrays["info"].item())
    arrays["info"] = np.array(json.dumps(content(info)))
    np.savez(path, **arrays)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def pickled():
    buffer = io.BytesIO()
    np.savez(buffer, info=np.array(Evil(), dtype=object))
    return buffer.getvalue()


def with_args(**changes):
    return lambda info: info | {"args": info["args"] | changes}


STRANGE = [
    *(
        lambda info, name=name: info | {"script": name}
        for name in ("../../evil", "evil", "os", "ppo_linen\n\x1b[31m", "", "evaluate", 5, None)
    ),
    lambda info: info | {"script": ["ppo_linen"]},
    lambda info: info | {"script": "ppo_nnx"},
    lambda info: info | {"iteration": "5"},
    lambda info: {},
    lambda info: [],
    with_args(env_id="<b>$x^2$\x1b[31m"),
    with_args(env_id=["CartPole-v1"]),
    with_args(**{"\x1b[31m\nevil": 1}),
    with_args(hidden_sizes=[8, 8]),
    with_args(hidden_sizes=[65536] * 3),  # 34 GB, if it were made
    with_args(hidden_sizes=[8.0, 8.0, 8.0]),
    with_args(hidden_sizes="888"),
    pickled(),
    b"",
    b"no zip file",
    b"PK\x03\x04" + b"\0" * 100,
]


@pytest.mark.parametrize("content", STRANGE)
def test_a_strange_file_runs_nothing(content, copied_run, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil.py").write_text("import os\nos.mkdir('evil')\n")
    change(copied_run, content)
    status, out, err = command(copied_run, "--episodes", 1)
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and err[:-1].isprintable() and len(err) < 1100
    assert "checkpoint" in err and str(copied_run) in err
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "checkpoint.npz",
        "copied",
        "evil.py",
    ]


@pytest.mark.parametrize("name", SCRIPTS)
def test_huge_layers_are_refused_before_they_are_made(name, small_run, tmp_path, capsys):
    shutil.copy(small_run(name) / "checkpoint.npz", tmp_path)
    change(tmp_path, with_args(hidden_sizes=[65536] * 3))
    with pytest.raises(SystemExit):
        evaluate.load_run(str(tmp_path))
    assert "is float32" in capsys.readouterr().err


# === Picture ====================================================================================
def frames_of(path):
    frames = []
    with Image.open(path) as file:
        image: Any = file
        assert image.format == "GIF" and image.info["duration"] >= 40
        for i in range(image.n_frames):
            image.seek(i)
            frames.append(np.asarray(image.convert("RGB")))
    return frames


@pytest.mark.parametrize("pygame", [True, False])
def test_gif_of_two_runs(pygame, small_run, copied_run, command, monkeypatch):
    """A panel for each, which moves; without pygame that of the observations."""
    if not pygame:
        monkeypatch.setitem(sys.modules, "pygame", None)
    path = copied_run / "two.GIF"
    folders = small_run("ppo_nnx"), copied_run
    status, out, err = command(*folders, "--episodes", 1, "--gif", path)
    assert (status, err) == (0, "")
    assert out.count("pip install pygame-ce") == (0 if pygame else 2)
    frames = frames_of(path)
    assert len(frames) > 10 and frames[0].shape == (268, 600, 3)
    assert path.stat().st_size < 2**20
    for x in (0, 300):
        panels = np.stack([frame[68:, x : x + 300] for frame in frames])
        assert (panels[0] != panels[5]).any()
        colorful = (np.ptp(panels[0].astype(int), axis=-1) > 50).mean()
        # A pole on white, or one column of a strip whose other columns are still to come.
        assert 0 < colorful < 0.05
        colorful = (np.ptp(panels[-1].astype(int), axis=-1) > 50).mean()
        assert (colorful < 0.05) == pygame
    assert (frames[0][0, 0] == 255).all()


@pytest.mark.parametrize(
    ("env_id", "seconds"),
    [
        ("Acrobot-v1", 10.48),
        ("MountainCar-v0", (200 / 2 + 12) * 0.04),
        ("Breakout-MinAtar", None),
        ("Catch-bsuite", (8 * 2 + 12) * 0.04),
        ("DeepSea-bsuite", (7 * 2 + 12) * 0.04),
        ("SimpleBandit-bsuite", 12 * 0.04),
        ("DiscountingChain-bsuite", (99 * 2 + 12) * 0.04),
        ("FrozenLake-misc", None),
        ("FourRooms-misc", None),
    ],
)
def test_gif_of_other_environments(env_id, seconds, tmp_path):
    """It lasts as long as the episode, and half a second for its end, up to 10 s."""
    run, args = stand_in(env_id), evaluate.Args(runs=("",), sample=True)
    path = tmp_path / "picture.gif"
    path.write_bytes(evaluate.draw([run], args))
    duration = 0
    with Image.open(path) as file:
        frames: Any = file
        for i in range(frames.n_frames):
            frames.seek(i)
            duration += frames.info["duration"]
    assert frames.size == (300, 268)
    assert frames.n_frames > 1 or env_id == "SimpleBandit-bsuite"  # whose only step stands still
    assert seconds is None or duration / 1000 == pytest.approx(seconds)
    assert path.stat().st_size < 2**20


def test_titles_are_plain_text(monkeypatch):
    """Frames with different names differ; what the terminal would obey is not drawn."""
    monkeypatch.setattr(evaluate, "FRAMES", 3)
    args = evaluate.Args(runs=("",))
    names = ("$x^2$", "$x^3$", "a" * 500, "\x1b[31m", "?[31m")
    pictures = [evaluate.draw([stand_in("CartPole-v1", name)], args) for name in names]
    assert len(set(pictures)) == 4 and pictures[3] == pictures[4]

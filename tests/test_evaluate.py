"""evaluate.py: every kind of checkpoint, what counts, groups of seeds, strangers' files, GIFs."""

import shutil
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dqn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import probes
import pytest
from conftest import ROOT
from PIL import Image, ImageSequence
from running import change, main, rewind
from scipy import stats

import evaluate
import ppo_linen

# A script of each kind of agent, and of each kind of environment.
PPO = ("ppo_linen", "ppo_nnx", "ppo_equinox", "ppo_torch")
DQN = {"dqn_linen_gymnasium": (4,), "dqn_torch": (10, 10, 4)}
BREAKOUT = "--env-id Breakout-MinAtar --sticky-actions 0.25 --full-actions --max-episode-steps 99"


class ProbeLengths(probes.Probe):
    """Episodes of 1 or of 50 steps, with equal odds, and a reward of 1 for each step."""

    def is_terminated(self, state: probes.State, params: probes.Params) -> jax.Array:
        return state.time >= jnp.where(state.signal > 0, 1, 50)


if "ProbeLengths-v0" not in gymnax.registered_envs:
    gymnax.register("ProbeLengths-v0", ProbeLengths)


@pytest.fixture(scope="session")
def dqn_run(tmp_path_factory):
    """Name of a DQN script -> folder of a short run, which is made once."""
    runs_dir = tmp_path_factory.mktemp("runs")

    @cache
    def train(name):
        flags = dqn.SMALL + (BREAKOUT if name == "dqn_torch" else "")
        own = ["--total-timesteps", 128, "--runs-dir", runs_dir, "--run-name", name]
        assert main(name, *flags.split(), *own) == 0
        return runs_dir / name

    return train


@pytest.fixture
def copied_run(whole_run, tmp_path):
    """A run's folder that a test may change."""
    return shutil.copytree(whole_run("ppo_linen").folder, tmp_path / "copied")


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


def stand_in(env_id, logits=(0.0, 0.0), folder="stand-in", seed=1):
    """A run without a checkpoint, whose policy is the same in every state."""
    args = SimpleNamespace(env_id=env_id, seed=seed, num_envs=4, num_steps=32)

    def load_policy(folder, seed=0):
        rng = np.random.default_rng(seed)

        def policy(obs, sample=False):
            noise = rng.gumbel(size=(len(obs), len(logits)))
            return (logits + noise if sample else np.tile(logits, (len(obs), 1))).argmax(-1)

        return policy

    script = SimpleNamespace(
        __name__="ppo_linen", __file__="", VecEnv=ppo_linen.VecEnv, load_policy=load_policy
    )
    return evaluate.Run(Path(folder), script, args, 6)


def play(run, **flags):
    return evaluate.evaluate(run, evaluate.Args(runs=("some",), **flags))


# === Scripts ====================================================================================
@pytest.mark.parametrize("name", PPO)
def test_a_run_of_each_framework_is_played(name, whole_run):
    result = play(evaluate.load_run(str(whole_run(name).folder)), episodes=3)
    assert (result["script"], result["iteration"], result["global_step"]) == (name, 5, 640)
    assert len(result["returns"]) == 3 and result["returns"] == result["lengths"]


def test_a_run_is_played_in_the_environment_that_it_learned_in(dqn_run):
    run = evaluate.load_run(str(dqn_run("dqn_torch")))
    env = evaluate.make_env(run.script, run.args, 1)
    assert (env.num_actions, env.params.max_steps_in_episode) == (6, 99)
    assert env.env._sticky_action_prob == 0.25


@pytest.mark.parametrize("name", ["ppo_continuous_torch", "ppo_continuous_linen_gymnasium"])
def test_continuous_actions_are_played_in_their_own_units(name, whole_run):
    """VecEnv takes them between -1 and 1. Two steps of a probe, whose rewards are known."""
    run = evaluate.load_run(str(whole_run(name).folder))
    result = play(run, episodes=8)
    policy, returns = run.script.load_policy(run.folder), []
    for signal in (-1, 1):
        obs = np.array([[signal, 1000 + signal, time] for time in (0, 1)])
        returns.append(probes.nearness(signal, policy(obs)).sum())
    found = np.array(result["returns"])[:, None]
    assert (abs(found - returns).min(1) < 1e-4).all() and set(result["lengths"]) == {2}


CONTINUOUS = """import json
from pathlib import Path
import gymnax
import numpy as np
import ppo_linen


class VecEnv(ppo_linen.VecEnv):
    def __init__(self, env_id, num_envs):
        self.env, self.params = gymnax.make(env_id)
        self.action_space = self.env.action_space(self.params)
        self.num_envs, self.obs_dim, self.obs_shape = num_envs, 3, (3,)


def load_info(folder):
    info = json.loads(Path(folder, "run.json").read_text())
    return info, ppo_linen.Args(**info["args"])


def load_policy(folder, seed=0):
    return lambda obs: np.full((len(obs), 1), 1.5, np.float32)
"""


def test_a_kind_of_action_that_no_script_has_is_played(copied_run, command, tmp_path):
    """With some actions at random, which are drawn from the environment's space."""
    change(copied_run, {"env_id": "Pendulum-v1"}, script="continuous")
    (tmp_path / "continuous.py").write_text(CONTINUOUS)
    flags = ("--script", tmp_path / "continuous.py", "--episodes", 3, "--max-steps", 20)
    status, out, _ = command(copied_run, *flags, "--epsilon", 0.5)
    assert status == 0 and "copied: continuous, Pendulum-v1" in out and "3 capped" in out
    assert command(copied_run, *flags, "--sample")[::2] == (
        2,
        "--sample: continuous has no policy to draw from; see --epsilon\n",
    )


def test_a_script_lies_anywhere(copied_run, command, tmp_path):
    change(copied_run, script="mine")
    sentence = "There is no mine.py beside evaluate.py: add --script path/to/mine.py\n"
    assert command(copied_run) == (2, "", sentence)
    (tmp_path / "else where").mkdir()
    mine = shutil.copy(ROOT / "ppo_linen.py", tmp_path / "else where/mine.py")
    status, out, _ = command(copied_run, "--script", mine, "--episodes", 2)
    assert status == 0 and "copied: mine, CartPole-v1, seed 4294967295, 640 steps" in out


# === Episodes ===================================================================================
DRAWS = [({}, 1.0), ({"sample": True}, 0.7), ({"epsilon": 0.5}, 0.75)]


@pytest.mark.parametrize(("flags", "expected"), DRAWS)
def test_actions(flags, expected, monkeypatch):
    """Of CartPole's two, the second pushes to the right; its policy has it at 0.7."""
    monkeypatch.setattr(evaluate, "painter", lambda run, env: lambda obs, state: np.asarray(obs))
    run = stand_in("CartPole-v1", np.log([0.3, 0.7]))
    args = evaluate.Args(runs=("some",), **flags)
    steps = evaluate.play(run, args, 2000, draws=True)
    before, after = next(steps)[0], next(steps)[0]
    assert abs((after[:, 1] > before[:, 1]).mean() - expected) < 0.05


@pytest.mark.parametrize("max_steps", [20, 10_000])
def test_each_environment_plays_one_episode(max_steps):
    """Of lengths 1 and 50, as many are short as long; of the first to end, most would be short."""
    result = play(stand_in("ProbeLengths-v0"), episodes=400, max_steps=max_steps)
    assert set(result["lengths"]) == {1, min(50, max_steps)}
    assert result["returns"] == result["lengths"]
    assert abs(result["lengths"].count(1) - 200) < 40
    assert result["capped"] == (result["lengths"].count(20) if max_steps == 20 else 0)


def test_a_seed_repeats_and_another_differs(dqn_run):
    gymnasiums = evaluate.load_run(dqn_run("dqn_linen_gymnasium"))
    for run, flags in ((stand_in("CartPole-v1"), {"sample": True}), (gymnasiums, {"epsilon": 0.5})):
        results = [play(run, **flags, seed=x) for x in (1, 1, 2)]
        assert results[0] == results[1]
        assert results[0]["returns"] != results[2]["returns"]


# === Numbers ====================================================================================
def test_difference_is_welchs():
    a, b = [10.0, 12.0, 11.0, 14.0], [9.0, 5.0, 8.0]
    low, high = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    expected = f"higher by 4.42 [{low:.2f}, {high:.2f}]: more than the seeds explain"
    assert evaluate.difference_of(a, b) == expected
    assert evaluate.difference_of(a, [9, 15]).endswith(": no difference can be claimed")
    assert evaluate.difference_of(a, [9]).endswith("of one seed, no difference can be claimed")
    assert evaluate.difference_of(b, a).startswith(f"lower by 4.42 [{low:.2f}, {high:.2f}]: more")
    same = evaluate.difference_of([500.0] * 3, [500.0] * 2)
    assert same == "higher by 0.00 [0.00, 0.00]: no difference can be claimed"
    assert evaluate.difference_of([500.0] * 3, [9.0] * 2).endswith("more than the seeds explain")


def test_groups_of_seeds(command, monkeypatch, tmp_path):
    """Their means are over runs, not over episodes; each side of --against is one group."""
    returns = {"a1": 10.0, "a2": 12.0, "a3": 17.0, "a4": 29.0, "b1": 3.0, "b2": 4.0, "c3": 5.0}
    games = {"a": "CartPole-v1", "b": "CartPole-v1", "c": "Acrobot-v1"}
    for name in returns:
        (tmp_path / name).mkdir()

    def load_runs(names, args):
        return [stand_in(games[x[0]], folder=tmp_path / x, seed=int(x[1])) for x in names]

    def evaluate_run(run, args):
        value = returns[run.folder.name]
        total = evaluate.summary([value - 1, value + 1])
        return {"return": total, "length": total, "global_step": 768, "capped": 0}

    monkeypatch.setattr(evaluate, "load_runs", load_runs)
    monkeypatch.setattr(evaluate, "evaluate", evaluate_run)
    status, out, _ = command("a1", "a2", "a3", "a4", "--against", "b1", "b2")
    low, high = stats.t.interval(0.95, 3, 17, stats.sem([10, 12, 17, 29]))
    interval = f"17.00 [{low:.2f}, {high:.2f}]"
    assert f"mean over 4 seeds {interval}, interquartile mean 14.50\n" in out
    assert f"The first are {evaluate.difference_of([10, 12, 17, 29], [3, 4])}\n" in out
    assert status == 0 and (tmp_path / "b2/evaluation.json").exists()
    for words in (("a1", "c3", "--against", "b1"), ("a1", "--against", "b1", "c3")):
        status, _, err = command(*words)
        assert status == 2 and err.startswith("--against: on each side")
    assert command("c3", "--epsilon", "0.5")[0] == 0
    assert [x.name for x in (tmp_path / "c3").iterdir()] == ["evaluation-epsilon-0.5.json"]


# === Command line and strangers' files ==========================================================
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--episodes 0", "--episodes and --max-steps must be 1 or more"),
        ("--seed -1", "--seed must be 0 or more"),
        ("--script missing.py", "--script: missing.py is no Python file"),
    ],
)
def test_bad_command_line(flags, sentence, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # of the box around what is wrong with a flag
    status, out, err = command("run", *flags.split())
    assert (status, out) == (2, "") and sentence in err


STRANGE = [
    ({"script": "../../evil\n\x1b[31m"}, "There is no ../../evil??[31m.py"),
    ({"args": {"env_id": "evil:Evil"}}, "is code; to run it, add --env-id evil:Evil"),
    ({"args": {"env_id": "\x1b[31m"}}, "run.json names no environment, but ?[31m"),
    ({"args": {"exp_name": "x"}}, "is a run of another version of ppo_linen.py, or is damaged: "),
]


@pytest.mark.parametrize(("changes", "message"), STRANGE)
def test_a_strange_file_runs_nothing(changes, message, copied_run, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil.py").write_text("import os\nos.mkdir('evil')\n")
    change(copied_run, **changes)
    status, out, err = command(copied_run, "--episodes", 1)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err and err[:-1].isprintable()
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("name", PPO)
def test_a_damaged_checkpoint_is_one_sentence(name, whole_run, command, tmp_path):
    folder = shutil.copytree(whole_run(name).folder, tmp_path / "run")
    (path,) = folder.glob("checkpoint.*")
    path.write_bytes(path.read_bytes()[:1000])
    status, out, err = command(folder)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"{name}.py cannot read its checkpoint, which may be damaged: " in err
    path.rename(folder / "checkpoint.new")  # as where the run was killed while it wrote its first
    said = f"{folder} has no checkpoint: a run writes one when it ends, and by --save-every\n"
    assert command(folder) == (2, "", said)
    (folder / "run.json").write_text("[")
    said = f"{folder}/run.json is not there, or is damaged (JSONDecodeError)\n"
    assert command(folder) == (2, "", said)


@pytest.mark.parametrize("text", ["import nowhere", "x = ["])
def test_a_script_that_cannot_be_imported_is_one_sentence(text, copied_run, command, tmp_path):
    change(copied_run, script="broken")
    script = tmp_path / "broken.py"
    script.write_text(f"{text}\ndef load_policy(folder):\n    pass\n")
    status, out, err = command(copied_run, "--script", script)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"{script} cannot be imported: ")


@pytest.mark.parametrize("status", ["running", "stopped"])
def test_a_run_that_has_not_ended_is_played_if_it_has_a_checkpoint(status, whole_run, tmp_path):
    folder = rewind(whole_run("ppo_torch"), tmp_path / "run")
    change(folder, status=status)
    result = play(evaluate.load_run(str(folder)), episodes=3)
    assert (result["iteration"], result["global_step"]) == (2, 256)


# === Picture ====================================================================================
@pytest.mark.parametrize("name", ["ppo_linen", *DQN])
def test_gif(name, whole_run, dqn_run, command, tmp_path):
    """CartPole is drawn, Breakout as squares on black."""
    folder = dqn_run(name) if name in DQN else whole_run(name).folder
    folder = shutil.copytree(folder, tmp_path / "run")
    path = tmp_path / "picture.gif"
    status, out, err = command(folder, "--episodes", 1, "--max-steps", 40, "--gif", path)
    assert (status, err) == (0, "") and out.endswith(f"Written: {path}\n")
    with Image.open(path) as file:
        frames = [np.asarray(x.convert("RGB")) for x in ImageSequence.Iterator(file)]
    assert len(frames) > 3 and frames[0].shape == (268, 300, 3)
    assert (frames[0][68:] != frames[3][68:]).any()
    dark = (frames[0][68:] < 20).all(-1).mean()  # of CartPole, the cart and its rail
    assert dark > 0.3 if name == "dqn_torch" else 0.001 < dark < 0.3

"""evaluate.py: checkpoints of all scripts, episodes, groups of seeds, untrusted files and GIFs."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dqn
import gymnasium
import gymnax
import images
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
import ppo_cnn_torch_gymnasium
import ppo_linen
import ppo_linen_gymnasium

# The PPO scripts cover all kinds of checkpoints, and the DQN scripts all kinds of observations.
PPO = ("ppo_linen", "ppo_nnx", "ppo_equinox", "ppo_torch")
DQN = {"dqn_linen_gymnasium": (4,), "dqn_torch": (10, 10, 4)}
BREAKOUT = "--env-id Breakout-MinAtar --sticky-actions 0.25 --full-actions --max-episode-steps 99"


class ProbeLengths(probes.Probe):
    """Episodes of 1 or 50 steps, equally likely, with a reward of 1 per step."""

    def is_terminated(self, state: probes.State, params: probes.Params) -> jax.Array:
        return state.time >= jnp.where(state.signal > 0, 1, 50)


if "ProbeLengths-v0" not in gymnax.registered_envs:
    gymnax.register("ProbeLengths-v0", ProbeLengths)


@pytest.fixture(scope="session")
def dqn_run(tmp_path_factory):
    """Return a function that maps the name of a DQN script to the folder of a short run."""
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
    """Return a copy of a run folder that the test may change."""
    return shutil.copytree(whole_run("ppo_linen").folder, tmp_path / "copied")


@pytest.fixture
def command(monkeypatch, capsys):
    """Return a function that runs main() and returns its exit status, stdout and stderr."""
    monkeypatch.setattr(evaluate, "PROGRESS_INTERVAL", np.inf)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words)])
        status: Any = 0
        capsys.readouterr()  # discard the output of training
        try:
            evaluate.main()
        except SystemExit as stopped:
            status = stopped.code
        return status, *capsys.readouterr()

    return call


def stand_in(env_id, logits=(0.0, 0.0), folder="stand-in", seed=1, script=ppo_linen, eval_seed=0):
    """Return a run without a checkpoint. Its policy ignores the observation."""
    args = SimpleNamespace(env_id=env_id, seed=seed, num_envs=4, num_steps=32, vectorization="sync")

    rng = np.random.default_rng(eval_seed)

    def policy(obs, sample=False):
        noise = rng.gumbel(size=(len(obs), len(logits)))
        return (logits + noise if sample else np.tile(logits, (len(obs), 1))).argmax(-1)

    parts: dict[str, Any] = {"__name__": script.__name__, "__file__": ""}
    if hasattr(script, "gymnasium"):
        parts["gymnasium"] = script.gymnasium
    module = SimpleNamespace(**parts, VecEnv=script.VecEnv)
    return evaluate.Run(Path(folder), module, args, 6, policy)


def new_args(**flags):
    return evaluate.Args(runs=("some",), **flags)


def load(folder, **flags):
    return evaluate.load_run(Path(folder), new_args(**flags))


def play(run, **flags):
    args = new_args(**flags)
    with evaluate.make_env(run, args, evaluate.count_envs(run, args)) as env:
        return evaluate.evaluate(run, env, args)


# === Scripts ====================================================================================
@pytest.mark.parametrize("name", PPO)
def test_runs_of_all_frameworks(name, whole_run):
    result = play(load(whole_run(name).folder), episodes=3)
    assert (result["script"], result["iteration"], result["global_step"]) == (name, 5, 640)
    assert len(result["returns"]) == 3 and result["returns"] == result["lengths"]


def test_the_environment_has_the_arguments_of_the_run(dqn_run):
    with evaluate.make_env(load(dqn_run("dqn_torch")), new_args(), 1) as env:
        assert (env.num_actions, env.params.max_steps_in_episode) == (6, 99)
        assert env.env._sticky_action_prob == 0.25


@pytest.mark.parametrize("name", ["ppo_continuous_torch", "ppo_continuous_linen_gymnasium"])
def test_continuous_actions_have_the_units_of_the_environment(name, whole_run):
    """VecEnv takes actions in [-1, 1]. The probe has two steps with known rewards."""
    run = load(whole_run(name).folder)
    result = play(run, episodes=8)
    returns = []
    for signal in (-1, 1):
        obs = np.array([[signal, 1000 + signal, time] for time in (0, 1)])
        returns.append(probes.nearness(signal, run.policy(obs)).sum())
    found = np.array(result["returns"])[:, None]
    assert (abs(found - returns).min(1) < 1e-4).all() and set(result["lengths"]) == {2}


def test_random_actions():
    """They are uniform between the bounds of the environment, which differ by dimension."""
    low, high = np.array([-1, 5], "f"), np.array([3, 6], "f")
    env = SimpleNamespace(num_envs=2000, action_low=low, action_high=high)
    actions = evaluate.random_actions(env, np.random.default_rng(0))
    np.testing.assert_allclose(actions.min(0), low, atol=0.01)
    np.testing.assert_allclose(actions.max(0), high, atol=0.01)
    np.testing.assert_allclose(actions.mean(0), (low + high) / 2, atol=0.1)
    env = SimpleNamespace(num_envs=2000, num_actions=3)
    actions = evaluate.random_actions(env, np.random.default_rng(0))
    assert (np.bincount(actions) > 500).tolist() == [True] * 3


def test_a_deterministic_policy_cannot_be_sampled(dqn_run, command):
    status, _, err = command(dqn_run("dqn_torch"), "--sample")
    assert (status, err) == (
        2,
        "--sample: the policy of dqn_torch is deterministic; try --epsilon\n",
    )


def test_a_script_in_any_folder(copied_run, command, tmp_path):
    change(copied_run, script="mine")
    sentence = "There is no mine.py next to evaluate.py: add --script path/to/mine.py\n"
    assert command(copied_run) == (2, "", sentence)
    (tmp_path / "else where").mkdir()
    mine = shutil.copy(ROOT / "ppo_linen.py", tmp_path / "else where/mine.py")
    status, out, _ = command(copied_run, "--script", mine, "--episodes", 2)
    assert status == 0 and "copied: mine, CartPole-v1, seed 4294967295, 640 steps" in out


# === Episodes ===================================================================================
@pytest.mark.parametrize(
    ("trained_with", "episodes", "expected"), [(1, 100, 1), (4, 100, 4), (8, 4, 4), (8, 6, 6)]
)
def test_async_uses_at_most_as_many_environments_as_training(trained_with, episodes, expected):
    run: Any = SimpleNamespace(args=SimpleNamespace(num_envs=trained_with, vectorization="async"))
    assert evaluate.count_envs(run, new_args(episodes=episodes)) == expected


def test_a_resumed_run_belongs_to_the_group_of_its_seeds():
    """Only arguments that affect the result define a group."""
    script = SimpleNamespace(__file__="ppo.py")
    runs: list[Any] = [
        SimpleNamespace(script=script, iteration=3, args=SimpleNamespace(gamma=0.9, **others))
        for others in ({"seed": 1, "resume": ""}, {"seed": 2, "resume": "runs/second"})
    ]
    assert evaluate.settings_of(runs[0]) == evaluate.settings_of(runs[1])


def test_actions_are_mapped_to_the_unit_range():
    """The bounds of a dimension may be equal."""
    low, high = np.array([-1, 5], "f"), np.array([3, 5], "f")
    env = SimpleNamespace(action_low=low, action_high=high)
    found = [evaluate.to_unit_range(x, env).tolist() for x in (low, np.array([2, 5], "f"), high)]
    assert found == [[-1, 0], [0.5, 0], [1, 0]]


ACTIONS = [({}, 1.0), ({"sample": True}, 0.7), ({"epsilon": 0.5}, 0.75)]


@pytest.mark.parametrize(("flags", "expected"), ACTIONS)
def test_greedy_sampled_and_random_actions(flags, expected, monkeypatch):
    """Action 1 of CartPole pushes right. The policy chooses it with probability 0.7."""
    monkeypatch.setattr(evaluate, "render", lambda run, envs, obs: obs)
    run = stand_in("CartPole-v1", np.log([0.3, 0.7]))
    with evaluate.make_env(run, new_args(), 2000) as env:
        steps = evaluate.play(run, env, new_args(**flags), with_images=True)
        before, *_ = next(steps)
        after, *_ = next(steps)
    assert abs((after[:, 1] > before[:, 1]).mean() - expected) < 0.05


@pytest.mark.parametrize("max_steps", [20, 10_000])
def test_episodes_of_any_length_count_once(max_steps):
    """Half of the episodes have 1 step, half have 50."""
    result = play(stand_in("ProbeLengths-v0"), episodes=400, max_steps=max_steps)
    assert set(result["lengths"]) == {1, min(50, max_steps)}
    assert result["returns"] == result["lengths"]
    assert abs(result["lengths"].count(1) - 200) < 40
    assert result["capped"] == (result["lengths"].count(20) if max_steps == 20 else 0)


class Uneven(gymnasium.Env):
    """Episodes of 1 and 50 steps, alternating; environments start with either."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    length = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = {0: int(self.np_random.choice([1, 50])), 1: 50, 50: 1}[self.length]
        self.time = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(4, np.float32), 1.0, self.time == self.length, False, {}


if "Uneven-v0" not in gymnasium.registry:
    entry_point: Any = Uneven
    gymnasium.register("Uneven-v0", entry_point)


def test_short_episodes_are_not_overrepresented():
    """The first episodes to finish are mostly short, but each environment plays as many."""
    run = stand_in("Uneven-v0", (0, 0, 0, 0), script=ppo_linen_gymnasium)
    result = play(run, episodes=40, num_envs=10)
    assert result["lengths"].count(1) == result["lengths"].count(50) == 20
    assert result["returns"] == result["lengths"] and result["num_envs"] == 10


def test_a_new_episode_follows_a_capped_one_in_gymnasium():
    run = stand_in("CartPole-v1", script=ppo_linen_gymnasium)
    result = play(run, episodes=6, max_steps=5, num_envs=2)
    assert result["lengths"] == result["returns"] == [5] * 6


def test_only_the_capped_episodes_that_count_are_counted(monkeypatch):
    """The first environment plays a third episode while the second finishes its second one."""
    capped = np.array([[1, 0], [1, 1], [1, 0], [0, 1]], bool)
    results = {"episode_return": np.zeros(2), "episode_length": np.full(2, 5)}
    steps = ((None, results, np.zeros(2, bool), x) for x in capped)
    monkeypatch.setattr(evaluate, "play", lambda *_: steps)
    env, args = SimpleNamespace(num_envs=2), new_args(episodes=4)
    found = evaluate.evaluate(stand_in("CartPole-v1"), env, args)
    assert found["capped"] == 4


def test_a_recurrent_policy_receives_the_starts_of_episodes():
    seen = []

    def policy(obs, starts):
        seen.append(starts.tolist())
        return np.zeros(len(obs), int)

    run = stand_in("ProbeLengths-v0")._replace(policy=policy)
    with evaluate.make_env(run, new_args(seed=3), 4) as env:
        steps = zip(evaluate.play(run, env, new_args(seed=3)), range(8), strict=False)
        ends = [done.tolist() for (_, _, done, _), _ in steps]
    assert any(map(any, ends)) and seen == [[True] * 4, *ends][: len(seen)]


class LostLives(ppo_cnn_torch_gymnasium.VecEnv):
    """VecEnv without the terminal_on_life_loss argument: losing a life ends the episode."""

    def __init__(self, env_id, num_envs, vectorization, seed):
        super().__init__(env_id, num_envs, vectorization, seed)


@pytest.mark.parametrize("env_class", [ppo_cnn_torch_gymnasium.VecEnv, LostLives])
def test_an_episode_of_an_atari_run_is_a_full_game(env_class, monkeypatch):
    images.stand_in_for_ale_py(monkeypatch)
    run = stand_in("ALE/Arcade-v5", script=ppo_cnn_torch_gymnasium)
    run.script.VecEnv = env_class
    result = play(run, episodes=4, num_envs=2)
    assert result["returns"] == [404, 404, 1, 1]
    assert result["lengths"] == [4, 4, 2, 2]
    assert images.Arcade.made.options["life_loss_info"] == (env_class is LostLives)


SINGLE = """import gymnasium
import numpy as np


class Single(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}
    instances = 0

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        if Single.instances:
            raise RuntimeError("only one simulation per process")
        Single.instances += 1

    def close(self):
        Single.instances -= 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(1, np.float32), 1.0, False, self.time == 10, {}

    def render(self):
        return np.full((48, 64, 3), self.time, np.uint8)


gymnasium.register("Single-v0", Single)
"""


@pytest.fixture
def single(tmp_path, monkeypatch):
    """Yield a run in an environment that allows only one instance per process."""
    (tmp_path / "single.py").write_text(SINGLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield stand_in("single:Single-v0", script=ppo_linen_gymnasium)
    sys.modules.pop("single", None)
    gymnasium.registry.pop("Single-v0", None)


ONE: dict[str, Any] = {"episodes": 2, "num_envs": 1}
PROCESSES: dict[str, Any] = {"episodes": 6, "num_envs": 2, "vectorization": "async"}


@pytest.mark.parametrize("flags", [ONE, PROCESSES, {"episodes": 6}])
def test_one_simulator_per_process(flags, single, tmp_path):
    """Each process closes its instance before it creates the next. Defaults come from the run."""
    single.args.vectorization = "async"
    single.args.num_envs = 4
    result = play(single, **flags)
    assert result["returns"] == [10.0] * flags["episodes"]
    assert result["num_envs"] == flags.get("num_envs", 3)  # 3, as 6 is not divisible by 4
    panels = evaluate.draw_episode(single, new_args(**flags))
    assert [panel.shape for panel in panels] == [(268, 300, 3)] * 10  # the images are shrunk


def test_the_seed_determines_the_episodes(dqn_run):
    in_gymnasium = load(dqn_run("dqn_linen_gymnasium"))
    seeds = (1, 1, 2)
    sampled = [play(stand_in("CartPole-v1", eval_seed=x), sample=True, seed=x) for x in seeds]
    random = [play(in_gymnasium, epsilon=0.5, seed=x) for x in seeds]
    for results in (sampled, random):
        assert results[0] == results[1]
        assert results[0]["returns"] != results[2]["returns"]


@pytest.mark.parametrize("script", [ppo_linen, ppo_linen_gymnasium])
def test_the_seed_of_the_run_does_not_matter(script):
    runs = [stand_in("CartPole-v1", seed=seed, script=script) for seed in (1, 2)]
    assert play(runs[0], episodes=5)["returns"] == play(runs[1], episodes=5)["returns"]


def test_nan_actions_are_an_error_of_the_policy():
    run = stand_in("ProbeLengths-v0")._replace(policy=lambda obs: np.full(len(obs), np.nan))
    with pytest.raises(SystemExit, match="stand-in: the policy returned NaN"):
        play(run, episodes=2)


def test_a_long_evaluation_shows_progress(monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "PROGRESS_INTERVAL", 0.0)
    play(stand_in("CartPole-v1"), episodes=3)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("stand-in: 0 of 3 episodes, step 1, ")


# === Statistics =================================================================================
def test_compare_is_welchs_t_test():
    a, b = [10.0, 12.0, 11.0, 14.0], [9.0, 5.0, 8.0]
    low, high = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    expected = f"higher by 4.42 [{low:.2f}, {high:.2f}]: a significant difference"
    assert evaluate.compare(a, b) == expected
    assert evaluate.compare(a, [9, 15]).endswith(": no significant difference")
    assert evaluate.compare(a, [9]).endswith("one seed in a group is too few for a conclusion")
    assert evaluate.compare(b, a).startswith(f"lower by 4.42 [{low:.2f}, {high:.2f}]: a sig")
    same = evaluate.compare([500.0] * 3, [500.0] * 2)
    assert same == "higher by 0.00 [0.00, 0.00]: no significant difference"
    assert evaluate.compare([500.0] * 3, [9.0] * 2).endswith(": a significant difference")


def test_groups_of_seeds(command, monkeypatch, tmp_path):
    """Means are over runs, not over episodes. Each side of --against is one group."""
    returns = {"a1": 10.0, "a2": 12.0, "a3": 17.0, "a4": 29.0, "b1": 3.0, "b2": 4.0, "c3": 5.0}
    returns["d5"] = 6.0
    env_ids = {"a": "CartPole-v1", "b": "CartPole-v1", "c": "Acrobot-v1", "d": "CartPole-v1"}
    for name in returns:
        (tmp_path / name).mkdir()

    def load_runs(names, args):
        runs = [stand_in(env_ids[x[0]], folder=tmp_path / x, seed=int(x[1])) for x in names]
        return [x._replace(iteration=7) if x.folder.name == "d5" else x for x in runs]

    def evaluate_run(run, env, args):
        value = returns[run.folder.name]
        total = evaluate.summarize([value - 1, value + 1])
        return {"return": total, "length": total, "global_step": 768, "capped": 0}

    monkeypatch.setattr(evaluate, "load_runs", load_runs)
    monkeypatch.setattr(evaluate, "evaluate", evaluate_run)
    status, out, _ = command("a1", "a2", "a3", "a4", "--against", "b1", "b2")
    low, high = stats.t.interval(0.95, 3, 17, stats.sem([10, 12, 17, 29]))
    interval = f"17.00 [{low:.2f}, {high:.2f}]"
    assert f"mean over 4 seeds {interval}, interquartile mean 14.50\n" in out
    difference = evaluate.compare([10, 12, 17, 29], [3, 4])
    assert f"The mean return of the first group is {difference}\n" in out
    assert status == 0 and (tmp_path / "b2/evaluation.json").exists()
    for words in (
        ("a1", "c3", "--against", "b1"),
        ("a1", "--against", "b1", "c3"),
        ("a1", "--against", "b1", "d5"),  # d5 was trained for longer
    ):
        status, _, err = command(*words)
        assert status == 2 and err.startswith("--against: the runs of a group must")


# === Command line and untrusted files ===========================================================
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--episodes 0", "--episodes and --max-steps must be 1 or more"),
        ("--num-envs 0", "--num-envs must divide --episodes (100), so that"),
        ("--num-envs 8", "--num-envs must divide --episodes (100), so that"),
    ],
)
def test_usage_errors(flags, sentence, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # a wide error box, without line breaks in the message
    status, out, err = command("run", *flags.split())
    assert (status, out) == (2, "") and sentence in err


@pytest.mark.parametrize("flags", [("--vectorization", "async"), ("--num-envs", 4)])
def test_flags_for_gymnasium(flags, copied_run, command):
    status, out, err = command(copied_run, *flags)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("--num-envs and --vectorization are for Gymnasium") and "in JAX" in err


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"episodes": 5, "seed": 5}, "evaluation.json"),
        ({"epsilon": 0.05}, "evaluation-epsilon-0.05.json"),
        ({"sample": True, "max_steps": 5}, "evaluation-sample-max-steps-5.json"),
    ],
)
def test_evaluations_with_other_settings_have_other_files(flags, name):
    assert evaluate.file_name(new_args(**flags)) == name


def test_a_folder_that_cannot_be_written(copied_run, command, tmp_path):
    """Results are printed, the GIF is drawn, and an error names the file that was not written."""
    other = shutil.copytree(copied_run, tmp_path / "other")
    (copied_run / "evaluation.json").mkdir()
    gif = tmp_path / "runs.gif"
    flags = ("--episodes", 2, "--gif", gif)
    status, out, err = command(copied_run, other, *flags)
    assert status == 0 and out.count("  return ") == 2
    assert err == f"Could not write {copied_run}/evaluation.json (Is a directory)\n"
    assert gif.exists() and f"  Wrote {other}/evaluation.json\n" in out


def test_start_through_a_symlink(tmp_path):
    (tmp_path / "evaluate").symlink_to(ROOT / "evaluate.py")
    loader = SourceFileLoader("linked", str(tmp_path / "evaluate"))
    spec: Any = importlib.util.spec_from_loader("linked", loader)
    linked = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "linked", linked)
        loader.exec_module(linked)
    assert linked.load_script("ppo_linen", ()).__file__ == str(ROOT / "ppo_linen.py")


UNTRUSTED = [
    ({"script": "../../evil"}, "There is no ../../evil.py"),
    ({"args": {"env_id": "evil:Evil"}}, "this run uses your module evil; add --env-id evil:Evil\n"),
    (
        {"args": {"env_id": "evil:a; b"}},
        "this run uses your module evil; add --env-id 'evil:a; b'\n",
    ),
    ({"iteration": None}, "is damaged, or from a different version of ppo_linen.py: "),
    ({"args": {"exp_name": "x"}}, "is damaged, or from a different version of ppo_linen.py: "),
]


@pytest.mark.parametrize(("changes", "message"), UNTRUSTED)
def test_untrusted_files_run_no_code(changes, message, copied_run, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil.py").write_text("import os\nos.mkdir('evil')\n")
    change(copied_run, **changes)
    status, out, err = command(copied_run, "--episodes", 1)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("name", PPO)
def test_a_damaged_run_folder(name, whole_run, command, tmp_path):
    folder = shutil.copytree(whole_run(name).folder, tmp_path / "run")
    (path,) = folder.glob("checkpoint.*")
    path.write_bytes(path.read_bytes()[:1000])
    status, out, err = command(folder)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"{folder} is damaged, or from a different version of {name}.py: ")
    path.rename(folder / "checkpoint.new")  # as if killed while writing the first checkpoint
    change(folder, status="diverged", iteration=0)
    status, _, err = command(folder)
    assert status == 2 and err.startswith(f"{folder} has no checkpoint (its status is diverged): ")
    (folder / "run.json").write_text("[")
    message = f"{folder} is not a run folder: cannot read run.json (JSONDecodeError)\n"
    assert command(folder) == (2, "", message)


def test_help_describes_every_flag():
    """tyro reads the descriptions from the file, also when the file is the main program."""
    words = [sys.executable, str(ROOT / "evaluate.py"), "--help"]
    wide = os.environ | {"COLUMNS": "300"}
    output = subprocess.run(words, env=wide, capture_output=True, text=True, check=True).stdout
    assert not re.search(r"^│ +\(default", output, re.M)  # without a description


@pytest.mark.parametrize("status", ["running", "stopped", "diverged"])
def test_an_unfinished_run_with_a_checkpoint(status, whole_run, tmp_path, capsys):
    folder = rewind(whole_run("ppo_torch"), tmp_path / "run")
    change(folder, status=status)
    result = play(load(folder), episodes=3)
    assert (result["iteration"], result["global_step"]) == (2, 256)
    hint = f"{folder} diverged: this is its last checkpoint, after 2 iterations\n"
    assert (hint in capsys.readouterr().err) == (status == "diverged")


# === GIF ========================================================================================
def test_frames_are_drawn_unchanged():
    rng = np.random.default_rng(0)
    image = rng.integers(256, size=(60, 80, 3), dtype=np.uint8)
    np.testing.assert_array_equal(evaluate.draw_observation(image), image)
    stack = rng.integers(256, size=(4, 84, 84), dtype=np.uint8)
    np.testing.assert_array_equal(evaluate.draw_observation(stack), stack[-1])


@pytest.mark.parametrize("name", ["ppo_linen", *DQN])
def test_gif(name, whole_run, dqn_run, command, tmp_path):
    """CartPole is rendered; Breakout is drawn as squares on black."""
    folder = dqn_run(name) if name in DQN else whole_run(name).folder
    folder = shutil.copytree(folder, tmp_path / "run")
    path = tmp_path / "new/picture.gif"
    status, out, err = command(folder, "--episodes", 1, "--max-steps", 40, "--gif", path)
    assert (status, err) == (0, "") and f"Wrote {path}\n" in out
    with Image.open(path) as file:
        frames = [np.asarray(x.convert("RGB")) for x in ImageSequence.Iterator(file)]
    assert len(frames) > 3 and frames[0].shape == (268, 300, 3)
    assert (frames[0][68:] != frames[3][68:]).any()
    dark = (frames[0][68:] < 20).all(-1).mean()  # in CartPole: the cart and the track
    assert dark > 0.3 if name == "dqn_torch" else 0.001 < dark < 0.3

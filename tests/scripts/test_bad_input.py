"""Invalid arguments give a one-line error and exit status 2, and write no files."""

import ast
import importlib
import shutil
import textwrap
from dataclasses import fields

import pytest
from running import content, main, parse
from sections import (
    ALL_SCRIPTS,
    CONTINUOUS_SCRIPTS,
    PPO_SCRIPTS,
    ROWS,
    but,
    function,
    group_of,
    stand_ins,
)

CONTINUOUS, CONTINUOUS_GYMNASIUM = "ppo_continuous_linen", "ppo_continuous_linen_gymnasium"
BAD = [
    ("ppo_linen", "--seed 4294967296", "--seed must be between 0 and 2**32 - 1"),
    ("ppo_linen", "--num-envs many", "invalid literal for int"),
    ("ppo_linen", "--num-minibatches 7", "--num-minibatches must divide the batch size (8192)"),
    ("ppo_linen", "--total-timesteps 8191", "--total-timesteps must be at least one batch (8192)"),
    ("ppo_linen", "--env-id LunarLander-v3", "more/ppo_linen_gymnasium.py"),
    ("ppo_linen", "--num-envs 0", "--num-envs must be at least 1"),
    ("ppo_torch", "--env-id probes:Aim-v0", "more/ppo_torch_gymnasium.py"),
    ("ppo_torch", "--update-epochs 0", "--update-epochs must be at least 1"),
    ("ppo_linen", "--env-id Pendulum-v1", "use more/ppo_continuous_linen.py"),
    ("ppo_rnn_linen", "--num-minibatches 64", "--num-minibatches must divide --num-envs"),
    ("ppo_linen_vmap", "--num-agents 0", "--num-agents must be at least 1"),
    (CONTINUOUS, "--env-id CartPole-v1", "use ppo_linen.py"),
    (CONTINUOUS, "--env-id Unbounded-v0", "bounds"),
    (CONTINUOUS_GYMNASIUM, "--env-id CartPole-v1", "use more/ppo_linen_gymnasium.py"),
    (CONTINUOUS_GYMNASIUM, "--env-id Unbounded-v0", "a bounded Box of floats"),
    (CONTINUOUS_GYMNASIUM, "--env-id Integers-v0", "a bounded Box of floats"),
    (CONTINUOUS_GYMNASIUM, "--seed 1 mujoco", "mujoco, comes before the flags"),
    (CONTINUOUS_GYMNASIUM, "atari", "The only preset, mujoco"),
    ("sac_linen", "pendulum", "The only preset, mujoco"),
    ("sac_linen_gymnasium", "pendulum", "The only preset, mujoco"),
    ("dqn_linen", "atari", "The only preset, minatar"),
    ("dqn_linen_gymnasium", "atari", "The only preset, minatar"),
]


@pytest.mark.parametrize(("name", "flags", "sentence"), BAD)
def test_invalid_arguments_are_one_line_errors(name, flags, sentence, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # so that tyro does not wrap the error
    assert main(name, *flags.split()) == 2
    output, errors = capfd.readouterr()
    assert sentence in errors and "Traceback" not in errors
    assert errors.count("\n") == 1 or "--help" in errors
    assert output == "" and not list(tmp_path.iterdir())


MAY_BE_0 = ("seed", "save_every", "exploration_steps", "learning_starts", "max_episode_steps")


ARGUMENTS = stand_ins("Arguments", tuple(ROWS))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_counts_are_at_least_1(name):
    script = importlib.import_module(name)
    counts = [x.name for x in fields(script.Args) if type(x.default) is int]
    for count in but(tuple(counts), *MAY_BE_0):
        said = rf"--{count.replace('_', '-')} must be at least (1|one)"
        with pytest.raises(ValueError, match=said):
            script.Args(**{count: 0})


@pytest.mark.parametrize("name", stand_ins("Arguments", PPO_SCRIPTS))
def test_a_maximum_gradient_norm_of_0_is_refused(name):
    """It would freeze the parameters."""
    with pytest.raises(ValueError, match="--max-grad-norm must be positive"):
        importlib.import_module(name).Args(max_grad_norm=0.0)


@pytest.mark.parametrize("for_gymnasium", [False, True])
def test_the_other_scripts_check_their_flags_in_the_same_way(for_gymnasium):
    """Compare the code without comments. Skip scripts that share no Arguments section."""
    names = [x for x in (*ALL_SCRIPTS, *CONTINUOUS_SCRIPTS) if group_of(x, "Arguments")]
    names = [x for x in names if ("gymnasium" in x) == for_gymnasium]
    texts = [textwrap.dedent(function(name, "__post_init__")) for name in names]
    assert len({ast.unparse(ast.parse(text)) for text in texts}) == 1


FOLDERS = [
    ("--runs-dir . --run-name complete", "complete already exists"),
    ("--resume complete", "complete is complete"),
    ("--resume complete --num-envs 8", "--num-envs, which is 4"),
]


@pytest.mark.parametrize(("flags", "sentence"), FOLDERS)
def test_existing_folders_do_not_change(flags, sentence, whole_run, tmp_path, monkeypatch, capfd):
    """A run folder is neither overwritten nor resumed with incompatible arguments."""
    shutil.copytree(whole_run("ppo_torch").folder, tmp_path / "complete")
    monkeypatch.chdir(tmp_path)
    before = content(tmp_path)
    capfd.readouterr()
    assert main("ppo_torch", *flags.split()) == 2
    output, errors = capfd.readouterr()
    assert output == "" and sentence in errors and errors.count("\n") == 1
    assert content(tmp_path) == before


def test_only_runs_of_the_same_script_can_be_resumed(whole_run):
    folder = whole_run("ppo_linen").folder
    with pytest.raises(ValueError, match="was created by ppo_linen"):
        parse("ppo_torch", "--resume", folder)

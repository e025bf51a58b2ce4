"""What a user would type ends in one sentence, exit status 2, no traceback, no file."""

import ast
import shutil
import textwrap

import pytest
from running import content, main
from sections import ALL_SCRIPTS, CONTINUOUS_SCRIPTS, function, group_of

CONTINUOUS, CONTINUOUS_GYMNASIUM = "ppo_continuous_linen", "ppo_continuous_linen_gymnasium"
BAD = [
    ("ppo_linen", "--seed 4294967296", "--seed must be between 0 and 2**32 - 1"),
    ("ppo_linen", "--num-envs many", "invalid literal for int"),
    ("ppo_linen", "--num-minibatches 7", "--num-minibatches must divide the batch size, 8192"),
    ("ppo_linen", "--total-timesteps 8191", "--total-timesteps must be at least one batch, 8192"),
    ("ppo_linen", "--env-id LunarLander-v3", "more/ppo_linen_gymnasium.py"),
    ("ppo_linen", "--num-envs 0", "--num-envs must be at least 1"),
    ("ppo_torch", "--update-epochs 0", "--update-epochs must be at least 1"),
    ("ppo_linen", "--env-id Pendulum-v1", "use more/ppo_continuous_linen.py"),
    ("ppo_rnn_linen", "--num-minibatches 64", "--num-minibatches must divide --num-envs"),
    ("ppo_linen_vmap", "--num-agents 0", "--num-agents must be at least 1"),
    ("ppo_linen_vmap", "--seed 4294967295", "--seed"),
    (CONTINUOUS, "--env-id CartPole-v1", "use ppo_linen.py"),
    (CONTINUOUS, "--env-id Unbounded-v0", "bounds"),
    (CONTINUOUS_GYMNASIUM, "--env-id CartPole-v1", "use more/ppo_linen_gymnasium.py"),
    (CONTINUOUS_GYMNASIUM, "--env-id Unbounded-v0", "bounds"),
    (CONTINUOUS_GYMNASIUM, "--env-id Integers-v0", "a Box of floats"),
]


@pytest.mark.parametrize(("name", "flags", "sentence"), BAD)
def test_what_cannot_work_is_one_sentence(name, flags, sentence, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # of the box around what is wrong with a flag
    assert main(name, *flags.split()) == 2
    output, errors = capfd.readouterr()
    assert sentence in errors and "Traceback" not in errors
    assert errors.count("\n") == 1 or "--help" in errors
    assert output == "" and not list(tmp_path.iterdir())


def test_the_other_scripts_check_their_flags_in_the_same_way():
    """But for comments, and for scripts with Arguments of their own."""
    names = [x for x in (*ALL_SCRIPTS, *CONTINUOUS_SCRIPTS) if group_of(x, "Arguments")]
    texts = [textwrap.dedent(function(name, "__post_init__")) for name in names]
    assert len({ast.unparse(ast.parse(text)) for text in texts}) == 1


FOLDERS = [
    ("--runs-dir . --run-name complete", "complete exists"),
    ("--resume complete --num-envs 8", "--resume cannot change num_envs, which is 4"),
    ("--resume complete --update-epochs 3", "--resume cannot change update_epochs, which is 2"),
    ("--resume complete --env-id Acrobot-v1", "--resume cannot change env_id"),
    ("--resume complete", "The run is complete"),
]


@pytest.mark.parametrize(("flags", "sentence"), FOLDERS)
def test_folders(flags, sentence, whole_run, tmp_path, monkeypatch, capfd):
    """A run folder is neither overwritten nor resumed with arguments that do not fit."""
    shutil.copytree(whole_run("ppo_torch").folder, tmp_path / "complete")
    monkeypatch.chdir(tmp_path)
    before = content(tmp_path)
    capfd.readouterr()
    assert main("ppo_torch", *flags.split()) == 2
    output, errors = capfd.readouterr()
    assert output == "" and sentence in errors and errors.count("\n") == 1
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("folder", "error"), [("nowhere", FileNotFoundError), ("other", ValueError)]
)
def test_what_is_not_a_run_of_this_script_cannot_be_resumed(
    folder, error, whole_run, tmp_path, monkeypatch
):
    shutil.copytree(whole_run("ppo_linen").folder, tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=r"nowhere|a run of ppo_linen.py"):
        main("ppo_torch", "--resume", folder)

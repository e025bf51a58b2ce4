"""What a user would type ends in one sentence, exit status 2, no traceback, no file."""

import ast
import shutil
import textwrap

import pytest
import torch
from running import content, main
from sections import ALL_SCRIPTS, CONTINUOUS_SCRIPTS, function, group_of
from torch._inductor import cpp_builder

import ppo_torch_compile

CONTINUOUS, CONTINUOUS_GYMNASIUM = "ppo_continuous_linen", "ppo_continuous_linen_gymnasium"
BAD = [
    ("ppo_linen", "--seed 4294967296", "--seed must lie between 0 and 2**32 - 1"),
    ("ppo_linen", "--num-envs many", "invalid literal for int"),
    ("ppo_linen", "--num-minibatches 7", "--num-minibatches must divide the batch, 8192 steps"),
    ("ppo_linen", "--total-timesteps 8191", "--total-timesteps must be at least a batch, 8192"),
    ("ppo_linen", "--env-id CartPole-v7", "--env-id: CartPole-v7"),
    ("ppo_linen", "--env-id Pendulum-v1", "see more/ppo_continuous_linen.py"),
    ("ppo_rnn_linen", "--num-minibatches 64", "--num-minibatches must divide --num-envs"),
    ("ppo_linen_vmap", "--num-agents 0", "--num-agents must be 1 or more"),
    ("ppo_linen_vmap", "--seed 4294967295", "--seed"),
    (CONTINUOUS, "--env-id CartPole-v1", "see ppo_linen.py"),
    (CONTINUOUS, "--env-id Unbounded-v0", "bounds"),
    (CONTINUOUS_GYMNASIUM, "--env-id CartPole-v1", "see more/ppo_linen_gymnasium.py"),
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
    ("--runs-dir . --run-name complete", "--resume complete"),
    ("--resume nowhere", "nowhere"),
    ("--resume other", "a run of 'ppo_linen'"),
    # With others the first rollout would fail, or count its steps wrong.
    ("--resume complete --num-envs 8", "num_envs stays as it was, 4"),
    ("--resume complete --env-id Acrobot-v1", "env_id stays as it was, 'CartPole-v1'"),
    ("--resume complete --run-name other", "run_name stays as it was, 'whole'"),
    ("--resume complete", "the run is complete; a larger --total-timesteps trains it on"),
]


@pytest.mark.parametrize(("flags", "sentence"), FOLDERS)
def test_folders(flags, sentence, whole_run, tmp_path, monkeypatch, capfd):
    """That of a run is neither begun anew by chance nor gone on with by another script."""
    shutil.copytree(whole_run("ppo_torch").folder, tmp_path / "complete")
    shutil.copytree(whole_run("ppo_linen").folder, tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    before = content(tmp_path)
    capfd.readouterr()
    assert main("ppo_torch", *flags.split()) == 2
    output, errors = capfd.readouterr()
    assert output == "" and sentence in errors and errors.count("\n") == 1
    assert content(tmp_path) == before


def test_without_a_cpp_compiler(monkeypatch, capfd):
    """As in a slim container; PyTorch itself prints 69 lines."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    search = cpp_builder.cpp_compiler_search.__wrapped__  # which remembers nothing
    monkeypatch.setattr(cpp_builder, "cpp_compiler_search", search)
    with pytest.raises(SystemExit) as stopped:
        ppo_torch_compile.compile_graph(len, torch.device("cpu"))
    assert stopped.value.code == 2 and "C++ compiler" in capfd.readouterr().err

"""What a user would type ends in one sentence, exit status 2, no traceback, no file."""

import shutil

import pytest
from running import change, content, main
from sections import ALL_SCRIPTS, CONTINUOUS_SCRIPTS
from test_dqn_structure import function
from torch._inductor import cpp_builder

import ppo_torch_compile

SEED = "--seed must lie between 0 and 2**32 - "
BAD = [
    ("ppo_linen", "--seed 4294967296", f"{SEED}1"),
    ("ppo_linen", "--num-envs many", "invalid literal for int"),
    ("ppo_linen", "--num-minibatches 7", "--num-minibatches must divide the batch, 8192 steps"),
    ("ppo_linen", "--total-timesteps 8191", "must be at least a batch, 8192 steps"),
    ("ppo_linen", "--env-id CartPole-v7", "has no CartPole-v7; the closest name is CartPole-v1\n"),
    ("ppo_linen", "--env-id Pendulum-v1", "has continuous actions: see more/ppo_continuous_*.py\n"),
    ("ppo_linen", "--env-id no_module:MyEnv", "--env-id: No module named 'no_module'\n"),
    ("ppo_linen", "--env-id json:MyEnv", "--env-id: json has no MyEnv\n"),
    ("ppo_linen", "--env-id ./my_module:MyEnv", "--env-id: name it as an import does, my_module:"),
    ("ppo_continuous_linen", "--env-id CartPole-v1", "CartPole-v1 has discrete actions: see ppo_"),
    ("ppo_continuous_linen", "--env-id Unbounded-v0", "of Unbounded-v0 must have finite bounds\n"),
    (
        "ppo_continuous_linen_gymnasium",
        "--env-id CartPole-v1",
        "--env-id: actions must be a Box, and not Discrete(2); for Discrete, see ",
    ),
    (
        "ppo_continuous_linen_gymnasium",
        "--env-id Unbounded-v0",
        "of Unbounded-v0 must have finite bounds\n",
    ),
    ("ppo_linen", "--total-timesteps -1", "--total-timesteps must be at least a batch, 8192 steps"),
    ("ppo_linen", "--hidden-sizes 64 0", "--hidden-sizes must be 1 or more"),
    ("ppo_linen_vmap", "--num-agents 0", "--num-agents must be 1 or more"),
    ("ppo_linen_vmap", "--seed 4294967295", f"{SEED}--num-agents"),
    ("dqn_linen", "--exploration-steps 0", "--exploration-steps must be 1 or more"),
    ("dqn_linen", "--buffer-size 10001", "--buffer-size must be a multiple of --num-envs, 8"),
    ("dqn_linen", "--full-actions", "is for MinAtar's games, not for CartPole-v1\n"),
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


def test_the_other_scripts_check_their_flags_by_the_same_words():
    """DQN's four: test_dqn_structure.py. Environments in Gymnasium: test_gymnasium.py."""
    names = (*ALL_SCRIPTS, *CONTINUOUS_SCRIPTS)
    assert len({function(name, "__post_init__") for name in names}) == 1


@pytest.fixture
def runs(whole_run, tmp_path, monkeypatch):
    """A complete run; one that was killed before it could write run.json; parts of runs."""
    for name in ("complete", "killed", "bare", "cut", "old"):
        shutil.copytree(whole_run("ppo_torch").folder, tmp_path / name)
    for name in ("killed", "bare", "cut", "old"):
        (tmp_path / name / "run.json").unlink()
    (tmp_path / "bare/metrics.jsonl").unlink()
    with open(tmp_path / "cut/metrics.jsonl", "r+b") as file:
        file.truncate(file.seek(0, 2) - 5)
    change(tmp_path / "old", {"replay_ratio": 4.0})
    monkeypatch.chdir(tmp_path)
    return tmp_path


NO_FOLDER = "cannot be written, or a part of it is missing"
FOLDERS = [
    ("--runs-dir killed/metrics.jsonl --run-name x", f"killed/metrics.jsonl/x {NO_FOLDER}: [Err"),
    ("--runs-dir . --run-name killed", "killed exists: choose another --run-name, or go on with "),
    ("--resume complete", "complete exists and is complete: choose another --run-name, or eval"),
    ("--resume killed --seed 1", "--resume: killed goes on with its own arguments, so give no "),
    ("--resume killed --env-id Acrobot-v1", "--resume: killed goes on with its own arguments, "),
    ("--resume bare", f"bare {NO_FOLDER}: [Errno 2] No such file"),
    ("--resume cut", "cut/metrics.jsonl has not all iterations that the checkpoint counts"),
    ("--resume old", "old has arguments that ppo_torch.py does not take: "),
]


@pytest.mark.parametrize(("flags", "sentence"), FOLDERS)
def test_folders(flags, sentence, runs, capfd):
    before = content(runs)
    capfd.readouterr()
    assert main("ppo_torch", *flags.split()) == 2
    output, errors = capfd.readouterr()
    assert output == "" and errors.startswith(sentence) and errors.count("\n") == 1
    assert content(runs) == before


def test_without_a_cpp_compiler(monkeypatch, capfd):
    """As in a slim container; PyTorch itself prints 69 lines."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    search = cpp_builder.cpp_compiler_search.__wrapped__  # which remembers nothing
    monkeypatch.setattr(cpp_builder, "cpp_compiler_search", search)
    with pytest.raises(SystemExit) as stopped:
        ppo_torch_compile.compile_graph(len, gpu=None)
    said = "torch.compile needs a C++ compiler, which is not there; on Debian: apt install g++\n"
    assert (stopped.value.code, capfd.readouterr().err) == (2, said)

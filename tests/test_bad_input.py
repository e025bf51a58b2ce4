"""Bad input ends in one sentence that names the flag, exit status 2, no traceback, no file."""

import importlib
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from frameworks import ALL_SCRIPTS

BAD = [
    ({"env_id": "CartPole-v7"}, "--env-id .*(Freeway-MinAtar.*not CartPole|`v0`, `v1`)"),
    ({"env_id": "Pendulum-v1"}, "--env-id must have discrete actions"),
    ({"num_envs": 0}, "--num-envs must lie between 1 and"),
    ({"num_steps": -1}, "--num-steps must lie between 1 and"),
    ({"total_timesteps": 0}, "--total-timesteps must be at least 8192"),
    ({"total_timesteps": 100}, "--total-timesteps must be at least 8192"),
    ({"num_minibatches": 7}, r"--num-minibatches must divide num_envs \* num_steps = 8192, not 7"),
    ({"update_epochs": 0}, "--update-epochs must lie between 1 and"),
    ({"learning_rate": float("nan")}, "--learning-rate must be 0 or more"),
    ({"learning_rate": float("inf")}, "--learning-rate must be 0 or more"),
    ({"gamma": 1.5}, "--gamma must lie between 0 and 1"),
    ({"gae_lambda": -0.1}, "--gae-lambda must lie"),
    ({"clip_coef": -0.1}, "--clip-coef must be 0 or more"),
    ({"ent_coef": -1.0}, "--ent-coef must be 0 or more"),
    ({"max_grad_norm": -1.0}, "--max-grad-norm must be 0 or more"),
    ({"hidden_sizes": (64, 0)}, "--hidden-sizes must lie between 1 and"),
    ({"hidden_sizes": ()}, "--hidden-sizes must lie between 1 and"),
    ({"seed": -1}, "--seed must lie"),
    ({"seed": 2**32}, "--seed must lie"),
    ({"save_every": -1}, "--save-every must be 0 or more"),
    ({"total_timesteps": 99999999999999999999}, "--total-timesteps must be .* fewer than"),
    ({"hidden_sizes": (99999999999999,)}, "--hidden-sizes must lie between 1 and 65536"),
    ({"num_envs": 2**40, "total_timesteps": 2**60}, "--num-envs must lie between"),
]


@pytest.mark.parametrize("name", ALL_SCRIPTS)
@pytest.mark.parametrize(("flags", "message"), BAD, ids=str)
def test_bad_values(name, flags, message):
    with pytest.raises(ValueError, match=message):
        importlib.import_module(name).Args(**flags)


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_bad_folders(name, tmp_path, capsys):
    script = importlib.import_module(name)
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    for run_name in ("..", ".", "../beside", str(tmp_path), "a\nb", "a\0b", "a\udce9"):
        with pytest.raises(ValueError, match="--run-name must be the name of one folder"):
            script.Args(runs_dir=str(tmp_path), run_name=run_name)
    bad: list[dict[str, str]] = [{"runs_dir": str(tmp_path / "file")}]
    bad += [{"runs_dir": str(tmp_path), "run_name": x} for x in ("x" * 300, "taken")]
    for flags in bad:
        with pytest.raises(SystemExit) as stopped:
            script.train(script.Args(**flags))
        message = capsys.readouterr().err
        assert stopped.value.code == 2
        assert "cannot be made" in message and message.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]


def run(name, *flags, **environment):
    command = [sys.executable, str(ROOT / f"{name}.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-envs 0", "--num-envs must lie between 1 and"),
        ("--num-envs many", "invalid literal for int"),
        ("--no-such-flag", "--no-such-flag"),
        ("--matmul-precision low", "--matmul-precision"),
    ],
)
def test_command_line(flags, message, tmp_path):
    done = run("ppo_linen", *flags.split(), "--runs-dir", str(tmp_path / "runs"))
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr + done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "WANDB_MODE=offline"),  # no key: no prompt, and offline mode is offered
        ({"WANDB_MODE": "bogus"}, "bogus"),
        ({"WANDB_BASE_URL": "notaurl"}, "notaurl"),
    ],
)
def test_tracking_that_cannot_work(variables, words, tmp_path):
    flags = ["--track", "--runs-dir", str(tmp_path / "runs")]
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_MODE": "online"}
    done = run("ppo_linen", *flags, **home | variables)
    assert done.returncode == 2
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("--track")]
    assert words in line and "Traceback" not in done.stderr
    assert not list((tmp_path / "runs").iterdir())


def test_tracking_with_a_long_name(tmp_path):
    flags = ["--track", "--runs-dir", str(tmp_path), "--exp-name", "x" * 100]
    small = "--total-timesteps 64 --num-envs 4 --num-steps 16 --hidden-sizes 8"
    done = run("ppo_linen", *flags, *small.split(), WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr

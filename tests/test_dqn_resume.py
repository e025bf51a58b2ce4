"""A DQN run that is stopped or killed goes on to the same numbers, its replay included."""

import importlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import dqn
import numpy as np
import pytest
import torch
from conftest import ROOT
from sections import DQN_SCRIPTS
from test_resume import checkpoint_info, content, end, metrics, start, wait_for_lines  # noqa: F401

EACH = pytest.mark.parametrize("name", DQN_SCRIPTS)
SMALL = "--num-envs 4 --num-steps 16 --hidden-sizes 8 8 --buffer-size 128 --batch-size 16"
SMALL += " --replay-ratio 4 --learning-starts 32 --exploration-steps 320"
SMALL += " --target-network-frequency 5 --matmul-precision highest"


def train(name, runs_dir, run_name, *flags, iterations=6, stops=None):
    """Train, stopped by SIGTERM in iteration number stops; return the folder."""
    script = importlib.import_module(name)
    write = script.RunLog.write

    def write_and_stop(log, iteration, *args):
        if iteration + 1 == stops:
            signal.raise_signal(signal.SIGTERM)
        return write(log, iteration, *args)

    words = flags[:1] if flags[:1] == ("minatar",) else ()
    own = ["--runs-dir", runs_dir, "--run-name", run_name, "--total-timesteps", 64 * iterations]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.RunLog, "write", write_and_stop)
        status = dqn.main(name, *words, *SMALL.split(), *own, *flags[len(words) :])
    assert status == (0 if stops in (None, iterations) else 128 + signal.SIGTERM)
    return Path(runs_dir, run_name)


def arrays(folder):
    with np.load(folder / "checkpoint.npz") as file:
        return {name: x for name, x in file.items() if name != "info"}


def same(folder, whole):
    """Metrics, and all that training would go on from, to the last digit."""
    assert metrics(folder) == metrics(whole)
    ours, theirs = arrays(folder), arrays(whole)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        np.testing.assert_array_equal(x, theirs[name], err_msg=name)


@EACH
@pytest.mark.parametrize("kind", ["cartpole", "minatar"])
def test_a_stopped_run_goes_on_to_the_same_numbers(name, kind, tmp_path):
    """Stopped before the replay is full or, in MinAtar, in the middle of its second round."""
    stops, flags = 1, ["--double-q"]
    if kind == "minatar":
        stops, flags = 3, ["minatar", *([] if "linen" in name else ["--no-compile"])]
    whole = train(name, tmp_path, "whole", *flags)
    folder = train(name, tmp_path, "stopped", *flags, stops=stops)
    assert checkpoint_info(folder)["iteration"] == stops
    (rows,) = (x for key, x in arrays(folder).items() if key.endswith("replay/obs"))
    assert len(rows) == 128 and rows.any() and not rows[64 * stops :].any()
    assert dqn.main(name, "--resume", folder) == 0
    same(folder, whole)
    assert json.loads((folder / "run.json").read_text())["resumed"] == [stops]
    losses = [row["losses/td_loss"] for row in metrics(whole)]
    assert len(set(losses)) == 6


@pytest.mark.parametrize("name", ["dqn_torch"])
def test_a_compiled_run_goes_on_to_the_same_numbers(name, tmp_path):
    whole = train(name, tmp_path, "whole", "--compile")
    folder = train(name, tmp_path, "stopped", "--compile", stops=3)
    torch._dynamo.utils.counters.clear()
    assert dqn.main(name, "--resume", folder) == 0
    same(folder, whole)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ["dqn_linen", "dqn_torch_gymnasium"])
def test_a_killed_run_goes_on_to_the_same_numbers(name, start, tmp_path):  # noqa: F811
    """kill -9 at any moment; what was logged since the checkpoint is done again."""
    iterations, own = 150, ["--save-every", 5, "--total-timesteps", 64 * 150]
    command = [sys.executable, ROOT / f"{name}.py", *SMALL.split(), *own, "--run-name"]
    folder = tmp_path / "runs/killed"
    process = start(*command, "killed")
    wait_for_lines(process, folder, 23)
    process.kill()
    assert end(process)[0] == -signal.SIGKILL
    done = checkpoint_info(folder)["iteration"]
    assert 0 < done < iterations and done % 5 == 0 and not (folder / "run.json").exists()
    status, _, errors = end(start(sys.executable, ROOT / f"{name}.py", "--resume", folder))
    assert (status, errors) == (0, "")
    assert end(start(*command, "whole"))[0] == 0
    same(folder, tmp_path / "runs/whole")


@EACH
def test_what_is_no_checkpoint_of_a_script_is_refused_in_a_sentence(name, tmp_path, capfd):
    """Another script's, one that lacks the replay, one of another size, one cut short."""
    folder = train(name, tmp_path, "stopped", stops=2)
    copies = map(str, range(100))  # a refused one's lock goes with the process
    capfd.readouterr()

    def refused(script, sentence, *flags):
        nonlocal folder
        folder = shutil.copytree(folder, tmp_path / next(copies))
        before = content(folder)
        assert dqn.main(script, "--resume", folder, *flags) == 2
        output, errors = capfd.readouterr()
        assert sentence in errors and errors.count("\n") == 1 and not output
        assert content(folder) == before

    for other in {*DQN_SCRIPTS} - {name}:
        refused(other, f"is no checkpoint of {other}.py: it is one of {name}.py")
    refused(name, "no flag may stand beside it", "--double-q")
    saved, info = arrays(folder), np.load(folder / "checkpoint.npz")["info"]
    (obs,) = (x for x in saved if x.endswith("replay/obs"))
    wrong = {name: x for name, x in saved.items() if name != obs}
    for changed in (wrong, wrong | {obs: saved[obs][:64]}, wrong | {obs: saved[obs] > 0}):
        folder = shutil.copytree(folder, tmp_path / next(copies))
        np.savez(folder / "checkpoint.npz", info=info, **changed)
        refused(name, f"is no checkpoint of {name}.py: ")
    own = json.loads(info.item())
    strange = [{"args": own["args"] | {x: "other"}} for x in ("loss", "optimizer")]
    for change in (*strange, {"elapsed": "long"}, {"elapsed": None}):
        folder = shutil.copytree(folder, tmp_path / next(copies))
        np.savez(folder / "checkpoint.npz", info=json.dumps(own | change), **saved)
        refused(name, f"is no checkpoint of {name}.py: ")
    path = folder / "checkpoint.npz"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(name, f"is no checkpoint of {name}.py: ")


def test_an_environment_must_be_where_it_was(tmp_path, capfd):
    """Gymnasium's environments take the actions again, which must lead to the same place."""
    folder = train("dqn_linen_gymnasium", tmp_path, "stopped", stops=3)
    path, changed = folder / "checkpoint.npz", arrays(folder)
    info = np.load(path)["info"]
    changed["actions"][:40] ^= 1
    np.savez(path, info=info, **changed)
    assert dqn.main("dqn_linen_gymnasium", "--resume", folder) == 2
    errors = capfd.readouterr().err
    assert "CartPole-v1" in errors and "Traceback" not in errors
    assert os.path.exists(folder / "metrics.jsonl")

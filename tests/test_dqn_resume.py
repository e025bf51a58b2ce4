"""A DQN run that is stopped or killed goes on to the same numbers, its replay included.

Run log is that of PPO but for a few lines, so one script and one signal of each kind will do.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time

import dqn
import numpy as np
import pytest
import torch
from conftest import ROOT
from test_resume import metrics

SMALL = "--num-envs 4 --num-steps 16 --hidden-sizes 8 8 --buffer-size 128 --batch-size 16"
SMALL += " --replay-ratio 4 --learning-starts 32 --exploration-steps 320"
SMALL += " --target-network-frequency 5 --matmul-precision highest"


def train(name, folder, *flags, iterations=6, stops=None):
    """Train, stopped by SIGTERM in iteration number stops."""
    script = importlib.import_module(name)
    write = script.RunLog.write

    def write_and_stop(log, *args):
        if log.info["iteration"] + 1 == stops:
            signal.raise_signal(signal.SIGTERM)
        write(log, *args)

    words = flags[:1] if flags[:1] == ("minatar",) else ()
    own = ["--runs-dir", folder.parent, "--run-name", folder.name]
    own += ["--total-timesteps", 64 * iterations]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.RunLog, "write", write_and_stop)
        status = dqn.main(name, *words, *SMALL.split(), *own, *flags[len(words) :])
    assert status == (128 + signal.SIGTERM if stops else 0)


def load(folder):
    """The arrays of a run's checkpoint, and what it says of the run."""
    with np.load(folder / "checkpoint.npz") as file:
        arrays = dict(file)
    return arrays, json.loads(arrays.pop("info").item())


def same(folder, whole):
    """Metrics, and all that training would go on from, to the last digit."""
    assert metrics(folder) == metrics(whole)
    ours, theirs = load(folder)[0], load(whole)[0]
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        np.testing.assert_array_equal(x, theirs[name], err_msg=name)


@pytest.mark.parametrize(
    ("name", "stops", "flags"),
    [
        ("dqn_linen", 1, ["--double-q"]),
        ("dqn_linen_gymnasium", 1, []),
        ("dqn_torch", 3, ["minatar", "--no-compile"]),
        ("dqn_torch_gymnasium", 3, ["minatar", "--no-compile"]),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_numbers(name, stops, flags, tmp_path):
    """Stopped before the replay is full or, in MinAtar, in the middle of its second round."""
    whole, folder = tmp_path / "whole", tmp_path / "stopped"
    train(name, whole, *flags)
    train(name, folder, *flags, stops=stops)
    arrays, info = load(folder)
    assert info["iteration"] == stops
    (rows,) = (x for key, x in arrays.items() if key.endswith("replay/obs"))
    assert len(rows) == 128 and rows.any() and not rows[64 * stops :].any()
    assert dqn.main(name, "--resume", folder) == 0
    same(folder, whole)
    assert json.loads((folder / "run.json").read_text())["resumed"] == [stops]
    assert len({row["losses/td_loss"] for row in metrics(whole)}) == 6


def test_a_compiled_run_is_one_graph_and_goes_on_to_the_same_numbers(tmp_path):
    """At a learning rate that changes. It is the run op by op, but for last digits."""
    whole, folder, eager = (tmp_path / x for x in ("whole", "stopped", "eager"))
    flags = ["--learning-rate", 1e-3]
    train("dqn_torch", eager, *flags)
    for run, stops in ((whole, None), (folder, 3), (folder, None)):
        torch._dynamo.utils.counters.clear()
        with torch._dynamo.config.patch(error_on_recompile=True):
            if run.exists():
                assert dqn.main("dqn_torch", "--resume", folder) == 0
            else:
                train("dqn_torch", run, "--compile", *flags, stops=stops)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]
    same(folder, whole)
    for row, expected in zip(metrics(whole), metrics(eager), strict=True):
        for key in ("losses/td_loss", "losses/q_value", "charts/episodic_return"):
            assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5)


def test_a_killed_run_goes_on_to_the_same_numbers(tmp_path):
    """kill -9 at any moment; what was logged since the checkpoint is done again."""
    name, whole, folder = "dqn_torch_gymnasium", tmp_path / "whole", tmp_path / "killed"
    flags = [*SMALL.split(), "--save-every", "5", "--total-timesteps", "3200"]
    own = ["--runs-dir", str(tmp_path), "--run-name", "killed"]
    process = subprocess.Popen([sys.executable, f"{ROOT}/{name}.py", *flags, *own])
    path = folder / "metrics.jsonl"
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 13):
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    done = load(folder)[1]["iteration"]
    assert 0 < done < 50 and done % 5 == 0 and not (folder / "run.json").exists()
    assert dqn.main(name, "--resume", folder) == 0
    train(name, whole, iterations=50)
    same(folder, whole)


def test_what_cannot_go_on_is_refused_in_a_sentence(tmp_path, capfd):
    """Another script's run, given other flags, of another size, and cut short."""
    name, folder = "dqn_torch_gymnasium", tmp_path / "stopped"
    train(name, folder, stops=2)
    path, (arrays, info) = folder / "checkpoint.npz", load(folder)

    def refused(script, sentence, *flags):
        before, _ = path.read_bytes(), capfd.readouterr()
        assert dqn.main(script, "--resume", folder, *flags) == 2
        assert f"{sentence}\n" in capfd.readouterr().err
        assert path.read_bytes() == before and not (folder / "run.json").exists()

    refused("dqn_torch", f"{folder} is a run of {name}.py")
    refused(name, "goes on with its own arguments, so give no others", "--double-q")
    arrays["tensors/replay/obs"] = arrays["tensors/replay/obs"][:64]
    np.savez(path, info=json.dumps(info), **arrays)
    place = "tensors/replay/obs of shape (128, 4)"
    refused(name, f"{folder} has no {place} in its checkpoint")
    os.truncate(path, path.stat().st_size // 2)
    refused(name, f"{path} is not there, or is damaged (BadZipFile)")


def test_what_a_run_is_like_is_read_without_its_replay(tmp_path, monkeypatch):
    """Its replay may take gigabytes, and evaluate.py asks for the weights alone."""
    script, read = importlib.import_module("dqn_torch_gymnasium"), []
    train(script.__name__, tmp_path / "run", iterations=1)
    get = np.lib.npyio.NpzFile.__getitem__

    def noting(self, name):
        read.append(name)
        return get(self, name)

    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", noting)
    info, _ = script.load_checkpoint(tmp_path / "run")
    assert read == ["info"] and info["iteration"] == 1
    state = {"tensors": {"q_network": {"output.bias": np.zeros(2)}}}
    script.load_checkpoint(tmp_path / "run", state)
    assert read == ["info", "info", "tensors/q_network/output.bias"]

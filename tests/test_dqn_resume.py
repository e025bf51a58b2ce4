"""A DQN run that is stopped goes on to the same numbers, its replay included.

Run log is PPO's but for a few lines, so what else can happen to a run test_resume.py has.
"""

import gc
import importlib
import json
import signal

import dqn
import numpy as np
import pytest
import torch

SMALL = "--num-envs 4 --num-steps 16 --hidden-sizes 8 8 --buffer-size 128 --batch-size 16"
SMALL += " --replay-ratio 4 --learning-starts 32 --exploration-steps 320 --total-timesteps 384"
SMALL += " --target-network-frequency 5 --matmul-precision highest --learning-rate 1e-3"


def train(name, folder, *flags, stops=None):
    """Train for six iterations, stopped by SIGTERM in number stops."""
    script = importlib.import_module(name)
    write = script.RunLog.write

    def write_and_stop(log, *args):
        if log.info["iteration"] + 1 == stops:
            signal.raise_signal(signal.SIGTERM)
        write(log, *args)

    own = ["--runs-dir", folder.parent, "--run-name", folder.name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.RunLog, "write", write_and_stop)
        status = dqn.main(name, *flags, *SMALL.split(), *own)
    gc.collect()  # a stopped run's log, and with it the folder's lock
    assert status == (128 + signal.SIGTERM if stops else 0)


def metrics(folder):
    """What a run logged, without the durations."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "charts/SPS")
    return [{key: x for key, x in row.items() if not key.startswith(timed)} for row in rows]


def load(folder):
    """The arrays of a run's checkpoint, and what it says of the run."""
    with np.load(folder / "checkpoint.npz") as file:
        arrays = dict(file)
    return arrays, json.loads(arrays.pop("info").item())


@pytest.mark.parametrize(
    ("name", "stops", "flags"),
    [
        ("dqn_linen", 1, []),
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
    assert metrics(folder) == metrics(whole)
    assert len({row["losses/td_loss"] for row in metrics(whole)}) == 6
    ours, theirs = load(folder)[0], load(whole)[0]
    assert ours.keys() == theirs.keys()
    for place, x in ours.items():
        np.testing.assert_array_equal(x, theirs[place], err_msg=place)
    assert json.loads((folder / "run.json").read_text())["resumed"] == [stops]


def test_a_compiled_run_is_one_graph_and_the_run_op_by_op_but_for_last_digits(tmp_path):
    """At a learning rate that changes."""
    train("dqn_torch", tmp_path / "eager")
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        train("dqn_torch", tmp_path / "compiled", "--compile")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    rows = zip(metrics(tmp_path / "compiled"), metrics(tmp_path / "eager"), strict=True)
    for row, expected in rows:
        for key in ("losses/td_loss", "losses/q_value", "charts/episodic_return"):
            assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5)


def test_what_a_run_is_like_is_read_without_its_replay(tmp_path, monkeypatch):
    """It may take gigabytes, and args_of_run() asks for nothing but info."""
    script, read = importlib.import_module("dqn_torch_gymnasium"), []
    train(script.__name__, tmp_path / "run", stops=1)
    get = np.lib.npyio.NpzFile.__getitem__

    def noting(self, name):
        read.append(name)
        return get(self, name)

    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", noting)
    info, _ = script.load_checkpoint(tmp_path / "run")
    assert read == ["info"] and info["iteration"] == 1

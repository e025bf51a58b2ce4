"""Whole runs solve environments whose answers are known: of every script, the hardest."""

import importlib
from typing import Any

import numpy as np
import probes  # noqa: F401  (registers the environments)
import pytest
import reference
from frameworks import weights_in
from running import op_by_op, train
from sections import ALL_SCRIPTS

FLAGS = "--num-envs 16 --num-steps 16 --num-minibatches 4 --update-epochs 8 --hidden-sizes 16 "
FLAGS += "--learning-rate 1e-2 --no-anneal-lr --gamma 0.5 --no-clip-vloss --total-timesteps 6400"


def solve(name: str, runs_dir: Any, env_id: str, *flags: Any) -> dict:
    return weights_in(train(name, runs_dir, env_id, *FLAGS.split(), "--env-id", env_id, *flags))


@pytest.mark.parametrize(
    ("env_id", "values", "flags"),
    [
        ("ProbeDiscount-v0", {0.0: 0.5, 1.0: 1.0}, []),
        # With bootstrapping a cut is invisible; without it, it is an end.
        ("ProbeTruncation-v0", {0.0: 2.0, 1.0: 2.0}, ["--gae-lambda", 0.5]),
        ("ProbeTruncation-v0", {0.0: 1.5, 1.0: 1.0}, ["--no-bootstrap-truncated"]),
    ],
)
def test_values(env_id, values, flags, tmp_path):
    weights = solve("ppo_linen", tmp_path, env_id, *flags)
    actual = reference.forward(weights["critic"], np.array(list(values))[:, None])
    np.testing.assert_allclose(actual[:, 0], list(values.values()), atol=0.1)


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_every_script_solves_the_hardest(name, tmp_path, monkeypatch):
    """What an observation asks for, and a future beyond a cut."""
    op_by_op(monkeypatch, importlib.import_module(name))
    weights = solve(name, tmp_path, "ProbeBoth-v0", "--gae-lambda", 0.5)
    obs = np.array([[-1.0], [1.0]])
    probs = np.exp(reference.log_softmax(reference.forward(weights["actor"], obs)))
    assert probs[0, 0] > 0.95 and probs[1, 1] > 0.95
    np.testing.assert_allclose(reference.forward(weights["critic"], obs), [[2], [2]], atol=0.2)

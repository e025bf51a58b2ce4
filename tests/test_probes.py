"""Every script's train() solves an environment whose values and best actions are known."""

import importlib

import numpy as np
import probes  # noqa: F401  (registers the environment)
import pytest
import reference
from frameworks import weights_in
from running import op_by_op, train
from sections import ALL_SCRIPTS

FLAGS = "--num-envs 16 --num-steps 16 --num-minibatches 4 --update-epochs 8 --hidden-sizes 16 "
FLAGS += "--learning-rate 1e-2 --no-anneal-lr --gamma 0.5 --gae-lambda 0.5 --no-clip-vloss "
FLAGS += "--env-id ProbeSignal-v0 --total-timesteps 6400"


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_the_best_actions_and_their_values(name, tmp_path, monkeypatch):
    """What an observation asks for, and a future beyond a cut."""
    op_by_op(monkeypatch, importlib.import_module(name))
    weights = weights_in(train(name, tmp_path, "run", *FLAGS.split()))
    obs = np.array([[-1.0], [1.0]])
    probs = np.exp(reference.log_softmax(reference.forward(weights["actor"], obs)))
    assert probs[0, 0] > 0.95 and probs[1, 1] > 0.95
    np.testing.assert_allclose(reference.forward(weights["critic"], obs), 2.0, atol=0.2)

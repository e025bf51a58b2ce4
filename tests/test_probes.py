"""Every script's train() solves an environment whose values and best actions are known."""

import importlib

import numpy as np
import probes  # noqa: F401  (registers the environment)
import pytest
import reference
from frameworks import weights_in
from running import op_by_op, rows, train
from sections import ALL_SCRIPTS, RNN_SCRIPTS

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


RECALL = "--num-envs 32 --num-steps 62 --num-minibatches 4 --update-epochs 8 --hidden-sizes 16 "
RECALL += "--gru-hidden-size 16 --learning-rate 1e-2 --gamma 0.99 --vf-coef 0.5"


@pytest.mark.parametrize("name", RNN_SCRIPTS)
@pytest.mark.parametrize(("steps", "iterations"), [(1, 10), (30, 40)])
def test_what_was_seen_some_steps_ago_is_remembered(name, steps, iterations, tmp_path):
    """Without a memory, the mean return is 0."""
    flags = f"{RECALL} --env-id probes:Recall{steps} --total-timesteps {32 * 62 * iterations}"
    folder = train(name, tmp_path, "run", *flags.split())
    assert rows(folder)[-1]["charts/episodic_return"] > 0.8

"""Every script's pieces solve environments whose answers are known."""

from typing import Any

import numpy as np
import probes  # noqa: F401  (registers the environments)
import pytest
from frameworks import ALL_SCRIPTS, make_learner

FLAGS: dict[str, Any] = {
    "num_envs": 16,
    "num_steps": 16,
    "num_minibatches": 4,
    "update_epochs": 8,
    "hidden_sizes": (16,),
    "learning_rate": 1e-2,
    "anneal_lr": False,
    "gamma": 0.5,
    "clip_vloss": False,
    "total_timesteps": 256 * 25,
}


def train(name: str, env_id: str, **flags):
    learner = make_learner(name, env_id=env_id, **FLAGS | flags)
    for _ in range(learner.args.num_iterations):
        learner.iterate()
    return learner


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_values(name):
    expected = {
        "Probe-v0": ({0.0: 1.0}, {}),
        "ProbeObservation-v0": ({-1.0: -1.0, 1.0: 1.0}, {}),
        "ProbeDiscount-v0": ({0.0: 0.5, 1.0: 1.0}, {}),
        # With bootstrapping the cut is invisible; without it, the second step is the last.
        "ProbeTruncation-v0": ({0.0: 2.0, 1.0: 2.0}, {"gae_lambda": 0.5}),
    }
    for env_id, (values, flags) in expected.items():
        learner = train(name, env_id, **flags)
        obs = np.array(list(values), "f")[:, None]
        np.testing.assert_allclose(learner.apply(obs)[1], list(values.values()), atol=0.1)
    learner = train(name, "ProbeTruncation-v0", bootstrap_truncated=False)
    np.testing.assert_allclose(
        learner.apply(np.array([[0.0], [1.0]], "f"))[1], [1.5, 1.0], atol=0.1
    )


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_actions(name):
    learner = train(name, "ProbeAction-v0")
    assert learner.apply(np.zeros((1, 1), "f"))[0][0, 1] > 0.95
    learner = train(name, "ProbeBoth-v0")
    probs, values = learner.apply(np.array([[-1.0], [1.0]], "f"))
    assert probs[0, 0] > 0.95 and probs[1, 1] > 0.95
    np.testing.assert_allclose(values, [1.0, 1.0], atol=0.2)

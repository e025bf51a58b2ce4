"""The scripts' pieces solve environments whose answers are known: Linen's all, each the hardest."""

from typing import Any

import numpy as np
import probes  # noqa: F401  (registers the environments)
import pytest
from frameworks import make_learner
from sections import stand_ins

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


# The values of observations, and flags. With bootstrapping a cut is invisible.
VALUES = {
    "Probe-v0": ({0.0: 1.0}, {}),
    "ProbeObservation-v0": ({-1.0: -1.0, 1.0: 1.0}, {}),
    "ProbeDiscount-v0": ({0.0: 0.5, 1.0: 1.0}, {}),
    "ProbeTruncation-v0": ({0.0: 2.0, 1.0: 2.0}, {"gae_lambda": 0.5}),
}


def check_values(name: str, env_id: str, values: dict[float, float], **flags):
    learner = train(name, env_id, **flags)
    obs = np.array(list(values), "f")[:, None]
    np.testing.assert_allclose(learner.apply(obs)[1], list(values.values()), atol=0.1)


@pytest.mark.parametrize("env_id", VALUES)
def test_values(env_id):
    values, flags = VALUES[env_id]
    check_values("ppo_linen", env_id, values, **flags)


def test_a_cut_that_is_not_bootstrapped_is_an_end():
    check_values("ppo_linen", "ProbeTruncation-v0", {0.0: 1.5, 1.0: 1.0}, bootstrap_truncated=False)


def test_an_action():
    learner = train("ppo_linen", "ProbeAction-v0")
    assert learner.apply(np.zeros((1, 1), "f"))[0][0, 1] > 0.95


@pytest.mark.parametrize("name", stand_ins("Rollout"))
def test_every_script_solves_the_hardest_two(name):
    """What an observation asks for; and a future beyond a cut."""
    learner = train(name, "ProbeBoth-v0")
    probs, values = learner.apply(np.array([[-1.0], [1.0]], "f"))
    assert probs[0, 0] > 0.95 and probs[1, 1] > 0.95
    np.testing.assert_allclose(values, [1.0, 1.0], atol=0.2)
    values, flags = VALUES["ProbeTruncation-v0"]
    check_values(name, "ProbeTruncation-v0", values, **flags)

"""load_policy: the trained policy as a function of observations, in every script."""

import importlib
import shutil
from functools import cache
from typing import Any

import dqn
import numpy as np
import pytest
import reference
from frameworks import weights_in
from running import main, op_by_op, rewrite, train
from sections import (
    CONTINUOUS_SCRIPTS,
    DQN_SCRIPTS,
    IMAGE_SCRIPTS,
    PPO_SCRIPTS,
    RNN_SCRIPTS,
    but,
    stand_ins,
)

# test_continuous.py and test_cnn.py test the policies of the other PPO scripts.
DISCRETE = stand_ins("Checkpoint", but(PPO_SCRIPTS, *CONTINUOUS_SCRIPTS, *IMAGE_SCRIPTS))
FEEDFORWARD = but(tuple(DISCRETE), *RNN_SCRIPTS)
BREAKOUT = "--env-id Breakout-MinAtar --sticky-actions 0.25 --full-actions --max-episode-steps 99"


@pytest.fixture(scope="session")
def folder_of(whole_run, tmp_path_factory):
    """Return a function that maps the name of a script to the folder of a short run."""

    @cache
    def folder_of(name):
        if name in DQN_SCRIPTS:
            breakout = BREAKOUT if "gymnasium" not in name else ""
            flags = f"{dqn.SMALL} {breakout} --hidden-sizes 64 --total-timesteps 128".split()
            folder = tmp_path_factory.mktemp(name)
            with pytest.MonkeyPatch.context() as patch:
                op_by_op(patch, importlib.import_module(name))
                assert main(name, *flags, "--runs-dir", folder, "--run-name", "run") == 0
            return folder / "run"
        folder = whole_run(name).folder
        return max(folder.glob("seed*")) if "vmap" in name else folder

    return folder_of


def policy_of(name, folder, **options):
    return importlib.import_module(name).load_policy(folder, **options)


@pytest.mark.parametrize("name", FEEDFORWARD)
def test_ppo_policy_returns_the_most_likely_action_of_the_actor(name, folder_of):
    folder = folder_of(name)
    obs = np.random.default_rng(0).normal(size=(300, 4))
    logits = reference.forward(weights_in(folder)["actor"], obs)
    action = policy_of(name, folder)(obs)
    assert isinstance(action, np.ndarray) and 0 < action.mean() < 1
    sure = abs(logits[:, 1] - logits[:, 0]) > 1e-5
    np.testing.assert_array_equal(action[sure], logits.argmax(-1)[sure])


def hundredfold(x):
    """Multiply x by 100 if it belongs to an actor output layer, whose initial scale is 0.01."""
    return 100 * x if 2 in np.shape(x) and "float" in str(x.dtype) else x


@pytest.mark.parametrize("name", DISCRETE)
def test_samples_follow_the_probabilities_and_depend_on_the_seed(name, folder_of, tmp_path):
    """20,000 samples for one obs; the tolerance is five standard errors."""
    folder = shutil.copytree(folder_of(name), tmp_path / "run")
    rewrite(folder, hundredfold)
    obs = np.tile([0.5, -1.0, 0.1, 1.0], (20_000, 1))
    draws = [policy_of(name, folder, seed=seed)(obs, sample=True) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).any() and set(draws[0]) == {0, 1}
    if name in FEEDFORWARD:
        chance = np.exp(reference.log_softmax(reference.forward(weights_in(folder)["actor"], obs)))
        assert abs(chance[0, 1] - 0.5) > 0.05
        error = np.sqrt(chance[0].prod() / len(obs))
        assert abs(draws[0].mean() - chance[0, 1]) < 5 * error


@pytest.mark.parametrize("name", stand_ins("Checkpoint", DQN_SCRIPTS))
def test_dqn_policy_returns_the_best_action_of_the_network(name, folder_of):
    """The gymnax scripts play Breakout, so their observations are images."""
    folder = folder_of(name)
    shape = (4,) if "gymnasium" in name else (10, 10, 4)
    obs = 5 * np.random.default_rng(0).normal(size=(50, *shape)).astype("f")
    params = dqn.parameters(dqn.layers_in(folder))
    expected = dqn.q_values(params, obs, shape).detach().numpy()
    action = policy_of(name, folder)(obs)
    assert len(set(action)) > 1
    best_two = np.sort(expected)[:, -2:]
    sure = np.diff(best_two)[:, 0] > 1e-4
    np.testing.assert_array_equal(action[sure], expected.argmax(-1)[sure])


RECALL = "--num-envs 32 --num-steps 62 --num-minibatches 4 --update-epochs 8 --hidden-sizes 16 "
RECALL += "--gru-hidden-size 16 --learning-rate 1e-2 --gamma 0.99 --vf-coef 0.5"


@pytest.mark.parametrize("name", RNN_SCRIPTS)
def test_an_rnn_policy_remembers_until_an_episode_starts(name, tmp_path):
    """Recall1 shows a signal, then nothing, and rewards the action that the signal named."""
    flags = f"{RECALL} --env-id probes:Recall1 --total-timesteps {32 * 62 * 10}"
    policy: Any = policy_of(name, train(name, tmp_path, "run", *flags.split()))
    obs_dim = 1
    signal = np.where(np.arange(20) % 2 == 0, 1.0, -1.0)[:, None]
    nothing = np.zeros((20, obs_dim))
    policy(signal)
    np.testing.assert_array_equal(policy(nothing), signal[:, 0] > 0)
    # Ten environments restart, and must forget the signal. The others must remember it.
    policy(signal)
    starts = np.arange(20) < 10
    action = policy(nothing, starts.astype(int))
    assert len(set(action[:10])) == 1
    np.testing.assert_array_equal(action[10:], signal[10:, 0] > 0)
    assert len(policy(nothing[:3])) == 3  # a new batch size resets the GRU state

"""The environments' step times: what is measured, and what is written."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

from analysis import env_timing
from ppo_linen import VecEnv


def test_play_steps_every_environment_as_often_as_it_says():
    env = VecEnv("MountainCar-v0", 5)
    _, state = env.reset(jax.random.key(1))
    obs, state, result = env_timing.play(jax.random.key(2), state, env, 7)
    assert obs.shape == (5, 2)
    assert result["episode_length"].tolist() == state.episode_length.tolist() == [7] * 5


def test_play_takes_every_action():
    env = VecEnv("Acrobot-v1", 64)
    _, state = env.reset(jax.random.key(1))
    seen = []
    step = env.step

    def spy(state, action):
        seen.append(action)
        return step(state, action)

    env.step = spy
    with jax.disable_jit():
        env_timing.play(jax.random.key(2), state, env, 3)
    played = [x for x in seen if not isinstance(x, Tracer)]
    assert len(played) == 3 and all(set(x.tolist()) == {0, 1, 2} for x in played)


def test_measure_summarises_what_the_clock_says(monkeypatch):
    """Compiling takes 100 s here, the warm-up 7, and the repetitions 1 to 10 s for 2 steps each."""
    durations = iter([100.0, 7.0, *np.arange(1.0, 11.0)])
    now = [0.0, 0]

    def clock():
        now[1] += 1
        now[0] += next(durations) if now[1] % 2 == 0 else 0
        return now[0]

    monkeypatch.setattr(env_timing.time, "perf_counter", clock)
    row = env_timing.measure("CartPole-v1", num_envs=2, num_steps=2, repeats=10)
    assert row == {
        "env_id": "CartPole-v1",
        "trimmed_mean": pytest.approx(np.arange(2, 10).mean() / 2),
        "median": 2.75,
        "minimum": 0.5,
        "spread": pytest.approx((7.75 - 3.25) / 2),
        "compile": 100.0,
    }


def test_the_file_says_what_was_measured_and_on_what(tmp_path, capsys):
    flags = ["--env-ids", "CartPole-v1", "Acrobot-v1", "--num-envs", "3", "--num-steps", "4"]
    env_timing.main([*flags, "--repeats", "2", "--out", str(tmp_path / "times.json")])
    result = json.loads((tmp_path / "times.json").read_text())
    assert (result["num_envs"], result["num_steps"], result["repeats"]) == (3, 4, 2)
    assert [row["env_id"] for row in result["environments"]] == ["CartPole-v1", "Acrobot-v1"]
    assert all(0 < row["minimum"] <= row["median"] for row in result["environments"])
    assert result["hardware"]["device"] == "cpu" and result["versions"]["jax"] == jax.__version__
    assert jnp.isfinite(result["hardware"]["load"])


@pytest.mark.parametrize(
    "flags, word",
    [
        (["--num-envs", "0"], "--num-envs"),
        (["--repeats", "-1"], "--repeats"),
        (["--env-ids", "Pendulum-v1"], "Pendulum-v1"),
        (["--out", "/no/such/folder/x.json"], "--out"),
    ],
)
def test_bad_values_get_one_sentence(flags, word, capsys):
    with pytest.raises(SystemExit) as stopped:
        env_timing.main(flags)
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and len(message.splitlines()) == 1 and word in message

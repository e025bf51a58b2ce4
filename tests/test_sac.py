"""SAC's arithmetic against the papers in float64, and what its runs store, save and learn.

A script joins by its name in SAC_SCRIPTS, and by what reads its weights in LEARNERS.
"""

import dataclasses
import importlib
import inspect
import re
import shutil
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import PendulumEnv
from gymnax.environments.classic_control.pendulum import Pendulum
from running import arrays, assert_close, main, make_whole_run, metrics, op_by_op, rewind, rows
from scipy.stats import kstest
from sections import SAC_SCRIPTS

COMPILED = "sac_torch_compile_gymnasium"
EACH = pytest.mark.parametrize("name", SAC_SCRIPTS)
OBS_DIM, ACTION_DIM, BATCH = 3, 2, 16

# Weights are {"actor": layers, "critics": [layers, layers], "log_alpha": number}, layers being
# [(bias, kernel (inputs, outputs)), ...]; the actor's last layer gives means, then log_stds.


# === From the papers, in float64 NumPy; shares no code with the scripts =========================
def forward(layers: list, x: np.ndarray) -> np.ndarray:
    for bias, kernel in layers[:-1]:
        x = np.maximum(x @ kernel + bias, 0)
    bias, kernel = layers[-1]
    return x @ kernel + bias


def log_slope_of_tanh(x):
    """The log of 1 / cosh(x) ** 2, whose cosh is exp(|x|) / 2 but for a factor."""
    x = np.abs(np.asarray(x, np.float64))
    return -2 * (x + np.log1p(np.exp(-2 * x)) - np.log(2))


def draw(actor: list, obs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Actions and the log of their density, which is the Gaussian's divided by tanh's slope."""
    mean, log_std = np.split(forward(actor, obs), 2, axis=-1)
    std = np.exp(np.clip(log_std, -20, 2))
    x = mean + std * noise
    gaussian = np.exp(-(((x - mean) / std) ** 2) / 2) / np.sqrt(2 * np.pi) / std
    return np.tanh(x), (np.log(gaussian) - log_slope_of_tanh(x)).sum(-1)


def q_values(critics: list, obs: np.ndarray, action: np.ndarray) -> np.ndarray:
    both = np.concatenate([obs, action], -1)
    return np.array([forward(layers, both)[:, 0] for layers in critics])


def losses_of(weights: dict, target_critics: list, batch: tuple, noise, gamma: float) -> dict:
    """The three losses; each is minimised over its own weights, with the others' fixed."""
    obs, action, reward, terminated, next_obs = (np.asarray(x, np.float64) for x in batch)
    alpha = np.exp(weights["log_alpha"])
    next_action, next_logprob = draw(weights["actor"], next_obs, noise[0])
    next_value = q_values(target_critics, next_obs, next_action).min(0) - alpha * next_logprob
    target = reward + gamma * (1 - terminated) * next_value
    errors = q_values(weights["critics"], obs, action) - target
    drawn, logprob = draw(weights["actor"], obs, noise[1])
    best = q_values(weights["critics"], obs, drawn).min(0)
    return {
        "critics": (errors**2 / 2).mean(1).sum(),
        "actor": (alpha * logprob - best).mean(),
        "log_alpha": weights["log_alpha"] * (-logprob - -ACTION_DIM).mean(),
        "q_value": (errors + target).mean(),
        "entropy": -logprob.mean(),
        "alpha": alpha,
    }


def gradients(weights: dict, target_critics: list, batch: tuple, noise, gamma: float) -> dict:
    """Central differences: of the critics' loss by the critics alone, and so on."""
    grads = {}
    for part in ("actor", "critics", "log_alpha"):
        vector, unravel = ravel(weights[part])
        grad = np.zeros_like(vector)
        for i, bump in enumerate(1e-6 * np.eye(len(vector))):
            above, below = (
                losses_of(weights | {part: unravel(x)}, target_critics, batch, noise, gamma)[part]
                for x in (vector + bump, vector - bump)
            )
            grad[i] = (above - below) / 2e-6
        grads[part] = unravel(grad)
    return grads


def ravel(tree: Any) -> tuple[np.ndarray, Any]:
    """A tree's numbers in a row, and how to make such a tree from a row."""
    leaves, structure = jax.tree.flatten(tree)
    ends = np.cumsum([np.size(x) for x in leaves])[:-1]

    def unravel(vector: np.ndarray) -> Any:
        parts = zip(np.split(vector, ends), leaves, strict=True)
        return jax.tree.unflatten(structure, [x.reshape(np.shape(y)) for x, y in parts])

    return np.concatenate([np.ravel(x).astype(np.float64) for x in leaves]), unravel


def updates(weights: dict, batches: tuple, noises: tuple, rates: list, args: Any):
    """After each update by Adam: the weights, the target critics and the losses of before."""
    vector, unravel = ravel(weights)
    target, unravel_target = ravel(weights["critics"])
    mean, square = np.zeros_like(vector), np.zeros_like(vector)
    for i, (batch, noise, rate) in enumerate(zip(batches, noises, rates, strict=True)):
        told = unravel(vector), unravel_target(target), batch, noise, args.gamma
        losses = losses_of(*told)
        grad, _ = ravel(gradients(*told))
        mean = 0.9 * mean + 0.1 * grad
        square = 0.999 * square + 0.001 * grad**2
        root = np.sqrt(square / (1 - 0.999 ** (i + 1))) + 1e-8
        vector = vector - rate * mean / (1 - 0.9 ** (i + 1)) / root
        critics, _ = ravel(unravel(vector)["critics"])
        target = (1 - args.tau) * target + args.tau * critics
        yield vector, target, losses


# === The scripts ================================================================================
def to_weights(arrays: list) -> dict:
    """From all weights in order of their names: of each layer the bias, then the kernel."""
    *layers, log_alpha = map(np.array, arrays)
    ends = len(layers) // 3
    actor = list(zip(layers[:ends:2], layers[1:ends:2], strict=True))
    return {"actor": actor, "critics": to_critics(layers[ends:]), "log_alpha": log_alpha}


def in_order(named: dict) -> list:
    """In order of their names; PyTorch's weights are (outputs, inputs)."""
    return [x.T if name.endswith("weight") else x for name, x in sorted(named.items())]


def to_critics(arrays: list) -> list:
    arrays = [np.array(x) for x in arrays]
    layers = list(zip(arrays[::2], arrays[1::2], strict=True))
    return [layers[: len(layers) // 2], layers[len(layers) // 2 :]]


class Linen:
    """Weights, losses and updates of a script, as NumPy's."""

    def __init__(self, script: Any, args: Any, env: Any) -> None:
        self.script, self.args = script, args
        self.state = script.make_agent(args, env, jax.random.PRNGKey(args.seed))
        # Compiled whole: op by op, JAX compiles each operation.
        self.update_fn = jax.jit(partial(script.update, args=args))
        self.grad_fn = jax.jit(jax.grad(partial(script.sac_loss, args=args), has_aux=True))
        self.draw_fn = jax.jit(script.draw_action)

    def weights(self) -> dict:
        return to_weights(jax.tree.leaves(self.state.params))

    def target_critics(self) -> list:
        return to_critics(jax.tree.leaves(self.state.target_params))

    def set_weights(self, weights: dict) -> None:
        """The target critics stay."""
        leaves = [jnp.asarray(x, jnp.float32) for x in jax.tree.leaves(weights)]
        params = jax.tree.unflatten(jax.tree.structure(self.state.params), leaves)
        self.state = self.state.replace(params=params)

    def losses_and_grads(self, batch: tuple, noise: np.ndarray) -> tuple[np.ndarray, dict]:
        batch = self.script.Transition(*map(jnp.array, batch))
        grads, losses = self.grad_fn(self.state.params, self.state, batch, noise)
        return np.array(losses), to_weights(jax.tree.leaves(grads))

    def update(self, batch: tuple, noise: np.ndarray, rate: float) -> np.ndarray:
        batch = self.script.Transition(*map(jnp.array, batch))
        self.state, losses = self.update_fn(self.state, batch, noise, np.float32(rate))
        return np.array(losses)

    def draw_action(self, mean, log_std, noise) -> list[np.ndarray]:
        return [np.array(x) for x in self.draw_fn(mean, log_std, noise)]


class Torch:
    """The same, op by op: nothing is compiled by torch.compile."""

    def __init__(self, script: Any, args: Any, env: Any) -> None:
        self.script, self.args = script, args
        torch.manual_seed(args.seed)
        self.agent = script.make_agent(args, env, torch.device("cpu"))

    def weights(self) -> dict:
        return to_weights(in_order(self.agent.params.state_dict()))

    def target_critics(self) -> list:
        return to_critics(in_order(self.agent.target_critics.state_dict()))

    def set_weights(self, weights: dict) -> None:
        """The target critics stay."""
        state = self.agent.params.state_dict()
        for old, new in zip(in_order(state), jax.tree.leaves(weights), strict=True):
            old.copy_(torch.tensor(new))

    def losses_and_grads(self, batch: tuple, noise: np.ndarray) -> tuple[np.ndarray, dict]:
        batch = self.script.Transition(*map(torch.tensor, batch))
        loss, losses = self.script.sac_loss(self.agent, batch, torch.tensor(noise), self.args)
        params = dict(self.agent.params.named_parameters())
        grads = torch.autograd.grad(loss, list(params.values()))
        return losses.numpy(), to_weights(in_order(dict(zip(params, grads, strict=True))))

    def update(self, batch: tuple, noise: np.ndarray, rate: float) -> np.ndarray:
        batch = self.script.Transition(*map(torch.tensor, batch))
        losses = self.script.update(self.agent, batch, torch.tensor(noise), rate, self.args)
        return losses.numpy()

    def draw_action(self, mean, log_std, noise) -> list[np.ndarray]:
        drawn = self.script.draw_action(*map(torch.tensor, (mean, log_std, noise)))
        return [x.numpy() for x in drawn]


LEARNERS = {
    "sac_linen": Linen,
    "sac_linen_gymnasium": Linen,
    "sac_torch": Torch,
    "sac_torch_gymnasium": Torch,
    COMPILED: Torch,
}
EACH_LEARNER = pytest.mark.parametrize("name", LEARNERS)
LOGGED = ["critics", "q_value", "actor", "entropy", "alpha"]  # in the order of the script's losses


def make_learner(name: str, *flags: str) -> Any:
    script = importlib.import_module(name)
    args = script.tyro.cli(script.Args, args=["--hidden-sizes", "5", "4", *flags])
    env = SimpleNamespace(obs_shape=(OBS_DIM,), obs_dim=OBS_DIM, action_dim=ACTION_DIM)
    return LEARNERS[name](script, args, env)


def random_batch(seed: int) -> tuple[tuple, np.ndarray]:
    """And the noise of its actions."""
    rng = np.random.default_rng(seed)
    obs, next_obs = rng.normal(size=(2, BATCH, OBS_DIM)).astype("f")
    action = rng.uniform(-1, 1, (BATCH, ACTION_DIM)).astype("f")
    reward = rng.normal(size=BATCH).astype("f")
    noise = rng.normal(size=(2, BATCH, ACTION_DIM)).astype("f")
    return (obs, action, reward, rng.random(BATCH) < 0.3, next_obs), noise


def moved(weights: dict) -> dict:
    """Farther apart than at the start, with one log_std above its bound and one below."""
    rng = np.random.default_rng(0)
    vector, unravel = ravel(weights)
    weights = unravel(vector + 0.3 * rng.normal(size=len(vector)))
    weights["actor"][-1][0][ACTION_DIM:] = 3, -30
    return weights


# === Texts ======================================================================================
@pytest.mark.parametrize(
    ("function", "other"),
    [("capture", "ppo_torch_compile"), ("compile_graph", "dqn_torch_compile")],
)
def test_what_is_tested_elsewhere_is_the_same_here(function, other):
    ours, theirs = (getattr(importlib.import_module(x), function) for x in (COMPILED, other))
    assert inspect.getsource(ours) == inspect.getsource(theirs)


# === Loss and update ============================================================================
@EACH_LEARNER
def test_the_density_of_squashed_draws(name):
    """Where a float32 of tanh's slope is 0, too: log_slope_of_tanh(20) is -38.6."""
    x = np.linspace(-20, 20, 4001, dtype="f")[:, None]
    action, logprob = make_learner(name).draw_action(x, 0 * x, 0 * x)
    np.testing.assert_allclose(action, np.tanh(x), rtol=1e-5)
    log_slope = -logprob - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(log_slope, log_slope_of_tanh(x[:, 0]), rtol=1e-5, atol=1e-5)


@EACH_LEARNER
def test_losses_and_gradients_equal_numpys(name):
    learner = make_learner(name)
    target_critics = learner.target_critics()
    learner.set_weights(moved(learner.weights()))
    weights = jax.tree.map(np.float64, learner.weights())
    batch, noise = random_batch(1)
    losses, grads = learner.losses_and_grads(batch, noise)
    expected = losses_of(weights, target_critics, batch, noise, learner.args.gamma)
    np.testing.assert_allclose(losses, [expected[x] for x in LOGGED], rtol=1e-5)
    expected = gradients(weights, target_critics, batch, noise, learner.args.gamma)
    for part, grad in grads.items():
        vector, _ = ravel(grad)
        assert np.abs(vector).max() > 0.01
        np.testing.assert_allclose(vector, ravel(expected[part])[0], rtol=1e-3, atol=1e-5)


@EACH_LEARNER
def test_updates_equal_numpys(name):
    """Eight of them, at a changing rate."""
    learner = make_learner(name, "--tau", "0.1")
    batches, noises = zip(*map(random_batch, range(8)), strict=True)
    rates = np.geomspace(1e-2, 1e-3, 8).tolist()
    start = learner.weights()
    expected = updates(start, batches, noises, rates, learner.args)
    for i, (weights, target_critics, losses) in enumerate(expected):
        actual = learner.update(batches[i], noises[i], rates[i])
        np.testing.assert_allclose(actual, [losses[x] for x in LOGGED], rtol=1e-3, atol=1e-4)
        vectors = ravel(learner.weights())[0], ravel(learner.target_critics())[0]
        np.testing.assert_allclose(vectors[0], weights, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(vectors[1], target_critics, rtol=1e-3, atol=1e-4)
    assert np.median(np.abs(weights - ravel(start)[0])) > 0.01


@EACH_LEARNER
def test_before_any_update(name):
    """Targets are the critics, which are two; alpha is 1."""
    learner = make_learner(name)
    weights = learner.weights()
    first, second = (ravel(layers)[0] for layers in weights["critics"])
    assert not np.isin(first, second).any()
    np.testing.assert_array_equal(ravel(weights["critics"])[0], ravel(learner.target_critics())[0])
    assert weights["log_alpha"] == 0


# === Runs =======================================================================================
class ShortPendulum(Pendulum):
    """Cut off after 10 steps, and terminated once it turns fast."""

    @property
    def default_params(self) -> Any:
        return dataclasses.replace(super().default_params, max_steps_in_episode=10)

    def is_terminated(self, state: Any, params: Any) -> Any:
        return abs(state.theta_dot) > 2


class ShortPendulumInGymnasium(PendulumEnv):
    def step(self, u: Any) -> tuple:
        obs, reward, _, truncated, info = super().step(u)
        return obs, reward, bool(abs(obs[2]) > 2), truncated, info


class AlikePendulum(PendulumEnv):
    """Whose episodes begin alike, so that new ones go on as those of a killed run would have."""

    def reset(self, **options: Any) -> tuple:
        super().reset(**options)
        self.state = np.array([2.0, 0.5])
        return self._get_obs(), {}


gymnax.register("ShortPendulum-v0", ShortPendulum)
OURS: dict[str, Any] = {"ShortPendulum-v0": ShortPendulumInGymnasium, "Alike-v0": AlikePendulum}
for env_id, kind in OURS.items():
    gymnasium.register(env_id, entry_point=kind, max_episode_steps=10)


def step_pendulum(obs: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By the differential equation: next obs (B, 3) and rewards of actions (B, 1) in [-1, 1]."""
    cos, sin, speed = obs.astype(np.float64).T
    angle = np.arctan2(sin, cos)
    torque = 2 * action[:, 0]
    reward = -(angle**2 + 0.1 * speed**2 + 0.001 * torque**2)
    speed = np.clip(speed + (15 * sin + 3 * torque) * 0.05, -8, 8)
    angle = angle + 0.05 * speed
    return np.stack([np.cos(angle), np.sin(angle), speed], -1), reward


SMALL = "--env-id ShortPendulum-v0 --num-envs 4 --num-steps 250 --total-timesteps 4000 "
SMALL += "--hidden-sizes 8 8 --batch-size 16 --learning-starts 1500 --train-frequency 8 "
SMALL += "--buffer-size 2400 --learning-rate 1e-5 --matmul-precision highest --save-every 2 "
SMALL += "--anneal-lr "


def train(name, folder, flags=""):
    own = ["--runs-dir", folder.parent, "--run-name", folder.name]
    assert main(name, *(SMALL + flags).split(), *own) == 0


@pytest.fixture(scope="module", params=SAC_SCRIPTS)
def told(request, tmp_path_factory):
    """A run of four iterations of 1000 steps, whose replay is NaN where nothing is stored."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    with pytest.MonkeyPatch.context() as patch:
        if name != COMPILED:  # whose update is compiled by a batch of the empty replay
            make_nan_replays(patch, name)
        run = make_whole_run(name, folder, lambda place: train(name, place))
    half = rewind(run, folder / "half")
    return SimpleNamespace(name=name, half=half, rows=rows(run.folder), **run._asdict())


def make_nan_replays(patch, name):
    script = importlib.import_module(name)
    make_replay = script.make_replay

    def make_nan(*args):
        empty = make_replay(*args)
        return type(empty)(*(x * np.nan if "float" in str(x.dtype) else x for x in empty))

    patch.setattr(script, "make_replay", make_nan)


def stored_in(folder):
    """A checkpoint's replay: obs, action, reward, terminated and next_obs."""
    found = arrays(folder)
    fields = ("obs", "action", "reward", "terminated", "next_obs")
    return [x for name in fields for place, x in found.items() if place.endswith(f"replay/{name}")]


def weights_in(folder):
    """Of a checkpoint, in order of their names."""
    beginning = re.compile("(train_state|tensors)/params/")
    return to_weights(in_order({x: y for x, y in arrays(folder).items() if beginning.match(x)}))


def test_every_transition_is_stored_whole(told):
    """2400 rows hold the steps 1600 to 4000, of which the last 1600 are in the first rows."""
    obs, action, reward, terminated, next_obs = (
        np.roll(x, -1600, 0) for x in stored_in(told.folder)
    )
    expected = step_pendulum(obs, action)
    np.testing.assert_allclose(next_obs, expected[0], atol=1e-5)
    np.testing.assert_allclose(reward, expected[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(terminated, np.abs(next_obs[:, 2]) > 2)
    begins = (obs[4:] != next_obs[:-4]).any(1)
    assert begins[terminated[:-4]].all()
    assert terminated.sum() > 20 and begins[~terminated[:-4]].sum() > 20  # the latter were cut off


def test_actions_are_uniform_until_learning_starts(told):
    """And drawn from the actor's Gaussian afterwards, which hardly changes at such a learning rate.

    The checkpoint has the 2000 rows that are written by then.
    """
    obs, action, *_ = stored_in(told.half)
    assert action.shape == (2000, 1)
    random, drawn = action[:1500, 0], action[1500:, 0]
    assert kstest(random, "uniform", (-1, 2)).pvalue > 0.01
    mean, log_std = np.split(forward(weights_in(told.half)["actor"], obs[1500:]), 2, axis=-1)
    noise = (np.arctanh(drawn) - mean[:, 0]) / np.exp(log_std[:, 0])
    assert kstest(noise, "norm").pvalue > 0.01
    by_env = random.reshape(-1, 4)
    assert np.abs(np.corrcoef(by_env.T) - np.eye(4)).max() < 5 / np.sqrt(375)
    assert np.abs(np.corrcoef(by_env[1:, 0], by_env[:-1, 0])[0, 1]) < 5 / np.sqrt(375)


def test_only_what_is_stored_is_learnt_from_as_often_as_is_logged(told):
    """From NaN a loss would be NaN. An update in 8 steps, after the first 1500."""
    assert [row["charts/updates"] for row in told.rows] == [0, 62, 125, 125]
    assert [row["losses/td_loss"] is None for row in told.rows] == [True, False, False, False]
    assert told.rows[-1]["losses/alpha"] < told.rows[1]["losses/alpha"] < 1


# Metrics cross as a tensor from PyTorch, and as a dict of arrays from JAX. With environments in
# Gymnasium each step's action crosses, too; from JAX on a CPU that is a view, which is not counted.
TRANSFERS = {
    "sac_linen": 13,
    "sac_linen_gymnasium": 12,
    "sac_torch": 1,
    "sac_torch_gymnasium": 1 + 250,
    COMPILED: 1 + 250,
}


def test_nothing_compiles_again_and_nothing_waits_but_for_actions_and_metrics(told):
    assert [row.get("compilations", 0) for row in told.counts[1:]] == [0, 0, 0]
    assert told.counts[1]["transfers"] == TRANSFERS[told.name]


def test_load_policy_plays_what_the_checkpoint_holds(told):
    """In the environment's units; or draws as in training."""
    policy = importlib.import_module(told.name).load_policy(told.folder)
    obs = np.random.default_rng(0).normal(size=(5, 3))
    mean, log_std = np.split(forward(weights_in(told.folder)["actor"], obs), 2, axis=-1)
    np.testing.assert_allclose(policy(obs), 2 * np.tanh(mean), rtol=1e-4, atol=1e-5)
    drawn = policy(np.repeat(obs[:1], 500, 0), sample=True)
    noise = (np.arctanh(drawn / 2) - mean[0]) / np.exp(log_std[0])
    assert kstest(noise[:, 0], "norm").pvalue > 0.01


def test_a_killed_run_goes_on_to_the_same_numbers(told, tmp_path, monkeypatch):
    """In Gymnasium, where it goes on with new episodes, these begin alike."""
    name, whole = told.name, told.folder
    op_by_op(monkeypatch, importlib.import_module(name))  # as the whole run was
    folder = shutil.copytree(told.half, tmp_path / "killed")
    if "gymnasium" in name:
        run = make_whole_run(name, tmp_path, lambda place: train(name, place, "--env-id Alike-v0"))
        whole = run.folder
        folder = rewind(run, tmp_path / "killed alike")
    assert main(name, "--resume", folder) == 0
    assert metrics(folder) == metrics(whole)
    ours, theirs = arrays(folder), arrays(whole)
    assert ours.keys() == theirs.keys()
    for place in ours.keys() - {"info"}:
        np.testing.assert_array_equal(ours[place], theirs[place], strict=True)


@EACH
def test_without_a_saved_replay_learning_waits_for_a_new_one(name, tmp_path, monkeypatch, capsys):
    """That holds 1500 steps again, which are not random."""
    if name != COMPILED:
        make_nan_replays(monkeypatch, name)
    op_by_op(monkeypatch, importlib.import_module(name))
    flags = "--no-save-replay --learning-rate 0.1"
    run = make_whole_run(name, tmp_path, lambda place: train(name, place, flags))
    assert [len(x) for x in stored_in(run.folder)] == [0] * 5
    folder = rewind(run, tmp_path / "killed")
    capsys.readouterr()
    assert main(name, "--resume", folder) == 0
    assert "has no replay: a new one is filled before updates go on" in capsys.readouterr().out
    assert [row["charts/updates"] for row in rows(folder)] == [0, 62, 0, 62]
    assert rows(folder)[-1]["losses/td_loss"] is not None


def test_a_compiled_run_is_one_graph_and_the_run_op_by_op_but_for_last_digits(tmp_path):
    """At a learning rate that changes."""
    flags = "--total-timesteps 3000 --train-frequency 40"
    train("sac_torch_gymnasium", tmp_path / "eager", flags)
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(COMPILED, tmp_path / "compiled", flags)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert_close(metrics(tmp_path / "compiled"), metrics(tmp_path / "eager"))


@pytest.mark.parametrize("name", ["sac_linen", "sac_torch_gymnasium"])
def test_a_run_learns_pendulum(name, tmp_path):
    """To hold it upright, in 9,600 steps; random actions reach -1,200."""
    own = ["--runs-dir", tmp_path, "--run-name", "run", "--total-timesteps", 9_600]
    assert main(name, *own) == 0
    returns = [row["charts/episodic_return"] for row in rows(tmp_path / "run")]
    assert min(returns[:2]) < -900 and max(returns[-5:]) > -170

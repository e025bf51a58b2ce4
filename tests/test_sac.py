"""SAC's arithmetic against the papers in float64, and what its runs store, save and learn.

A script joins by its name in SAC_SCRIPTS, and by what reads its weights in LEARNERS.
"""

import dataclasses
import importlib
import inspect
import shutil
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.serialization import msgpack_restore, msgpack_serialize
from gymnasium.envs.classic_control import PendulumEnv
from gymnax.environments.classic_control.pendulum import Pendulum
from running import (
    arrays,
    assert_close,
    assert_same_checkpoints,
    main,
    make_whole_run,
    metrics,
    op_by_op,
    rewind,
    rows,
)
from scipy.stats import kstest
from sections import SAC_SCRIPTS

COMPILED = "sac_torch_compile_gymnasium"
EACH = pytest.mark.parametrize("name", SAC_SCRIPTS)
OBS_DIM, ACTION_DIM, BATCH = 3, 2, 16
LOSSES = [f"losses/{x}" for x in ("td_loss", "q_value", "actor_loss", "entropy", "alpha")]

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

    def __init__(self, script: Any, args: Any) -> None:
        self.script, self.args = script, args
        key = jax.random.PRNGKey(args.seed)
        self.state = script.make_agent(args, (OBS_DIM,), ACTION_DIM, key)
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

    def losses_and_grads(self, batch: tuple, noise: np.ndarray) -> tuple[dict, dict]:
        batch = self.script.Transition(*map(jnp.array, batch))
        grads, losses = self.grad_fn(self.state.params, self.state, batch, noise)
        return losses, to_weights(jax.tree.leaves(grads))

    def update(self, batch: tuple, noise: np.ndarray, rate: float) -> dict:
        batch = self.script.Transition(*map(jnp.array, batch))
        zeros = {name: jnp.zeros(()) for name in LOSSES}
        self.state, losses = self.update_fn(self.state, zeros, batch, noise, rate)
        return losses

    def draw_action(self, mean, log_std, noise) -> list[np.ndarray]:
        return [np.array(x) for x in self.draw_fn(mean, log_std, noise)]


class Torch:
    """The same, op by op: nothing is compiled by torch.compile."""

    def __init__(self, script: Any, args: Any) -> None:
        self.script, self.args = script, args
        torch.manual_seed(args.seed)
        made = script.make_agent(args, (OBS_DIM,), ACTION_DIM, torch.device("cpu"))
        self.agent, self.critics, self.optimizer = made

    def weights(self) -> dict:
        return to_weights(in_order(self.agent.state_dict()))

    def target_critics(self) -> list:
        return to_critics(in_order(self.critics.state_dict()))

    def set_weights(self, weights: dict) -> None:
        """The target critics stay."""
        state = self.agent.state_dict()
        for old, new in zip(in_order(state), jax.tree.leaves(weights), strict=True):
            old.copy_(torch.tensor(new))

    def losses_and_grads(self, batch: tuple, noise: np.ndarray) -> tuple[dict, dict]:
        given = self.script.Transition(*map(torch.tensor, batch)), torch.tensor(noise)
        loss, losses = self.script.sac_loss(self.agent, self.critics, *given, self.args)
        params = dict(self.agent.named_parameters())
        grads = torch.autograd.grad(loss, list(params.values()))
        losses = {name: x.detach() for name, x in losses.items()}
        return losses, to_weights(in_order(dict(zip(params, grads, strict=True))))

    def update(self, batch: tuple, noise: np.ndarray, rate: float) -> dict:
        trained = self.agent, self.critics, self.optimizer
        own = self.script.Transition(*map(torch.tensor, batch)), torch.tensor(noise)
        if self.script.__name__ == COMPILED:
            return self.script.update(*trained, self.args, torch.tensor(rate), own[1], *own[0])
        self.optimizer.param_groups[0]["lr"] = rate
        return self.script.update(*trained, *own, self.args)

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


def make_learner(name: str, *flags: str) -> Any:
    script = importlib.import_module(name)
    args = script.tyro.cli(script.Args, args=["--hidden-sizes", "5", "4", *flags])
    return LEARNERS[name](script, args)


def as_logged(losses: dict) -> dict:
    """NumPy's losses by the names of the log."""
    return {
        "losses/td_loss": losses["critics"],
        "losses/q_value": losses["q_value"],
        "losses/actor_loss": losses["actor"],
        "losses/entropy": losses["entropy"],
        "losses/alpha": losses["alpha"],
    }


def assert_losses_equal(actual: dict, losses: dict, rtol: float, atol: float = 0) -> None:
    expected = as_logged(losses)
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(actual[name], x, rtol, atol, err_msg=name)


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
@pytest.mark.parametrize("piece", ["Adam", "compile_graph", "capture"])
def test_what_is_tested_elsewhere_is_the_same_here(piece):
    ours, theirs = (importlib.import_module(x) for x in (COMPILED, "ppo_torch_compile"))
    assert inspect.getsource(getattr(ours, piece)) == inspect.getsource(getattr(theirs, piece))


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
    assert_losses_equal(losses, expected, rtol=1e-5)
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
        assert_losses_equal(actual, losses, rtol=1e-3, atol=1e-4)
        vectors = ravel(learner.weights())[0], ravel(learner.target_critics())[0]
        np.testing.assert_allclose(vectors[0], weights, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(vectors[1], target_critics, rtol=1e-3, atol=1e-4)
    assert np.median(np.abs(weights - ravel(start)[0])) > 0.01


@EACH_LEARNER
def test_before_any_update(name):
    """Weights are PyTorch's, uniform within 1 / sqrt(inputs); targets are the critics, alpha 1."""
    learner = make_learner(name, "--hidden-sizes", "128", "64")
    weights = learner.weights()
    sizes = [(OBS_DIM, 128), (128, 64), (64, 2 * ACTION_DIM)]
    assert [kernel.shape for _, kernel in weights["actor"]] == sizes
    for layers in (weights["actor"], *weights["critics"]):
        for bias, kernel in layers:
            bound = len(kernel) ** -0.5
            assert 0.9 * bound < np.abs(kernel).max() <= bound
            assert kernel.std() == pytest.approx(bound / np.sqrt(3), rel=0.15)
            assert 0 < np.abs(bias).max() <= bound and len(set(bias)) > 0.9 * len(bias)
    first, second = (ravel(layers)[0] for layers in weights["critics"])
    assert np.isin(first, second).mean() < 0.01
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


class BytePendulum(ShortPendulum):
    """Whose observations are bytes, as images are."""

    def get_obs(self, state: Any, params: Any = None, key: Any = None) -> jax.Array:
        return to_bytes(super().get_obs(state, params, key)).astype(jnp.uint8)


class BytePendulumInGymnasium(PendulumEnv):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.observation_space: Any = gymnasium.spaces.Box(0, 255, (3,), np.uint8)

    def _get_obs(self) -> Any:
        return to_bytes(super()._get_obs()).astype(np.uint8)


def to_bytes(obs: Any) -> Any:
    return (16 * (obs + 8)).clip(0, 255)


class DoublePendulumInGymnasium(PendulumEnv):
    """Whose observations are float64, as MuJoCo's are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.observation_space: Any = gymnasium.spaces.Box(-8, 8, (3,), np.float64)

    def _get_obs(self) -> Any:
        return super()._get_obs().astype(np.float64)


for env_id, kind in {"ShortPendulum-v0": ShortPendulum, "Byte-v0": BytePendulum}.items():
    gymnax.register(env_id, kind)
OURS: dict[str, Any] = {
    "ShortPendulum-v0": ShortPendulumInGymnasium,
    "Alike-v0": AlikePendulum,
    "Byte-v0": BytePendulumInGymnasium,
    "Double-v0": DoublePendulumInGymnasium,
}
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
        make_nan_replays(patch, name)
        run = make_whole_run(name, folder, lambda place: train(name, place))
    half = rewind(run, folder / "half")
    return SimpleNamespace(name=name, half=half, rows=rows(run.folder), **run._asdict())


def make_nan_replays(patch, name):
    script = importlib.import_module(name)
    if name == "sac_linen":
        make_replay = script.make_replay

        def make_nan(*args):
            empty = make_replay(*args)
            return empty._replace(
                transitions=script.Transition(*map(make_nan_of, empty.transitions))
            )

        def make_nan_of(x):
            return x * np.nan if x.dtype == np.float32 else x

        patch.setattr(script, "make_replay", make_nan)
        return

    class NanReplay(script.Replay):
        def __init__(self, *args):
            super().__init__(*args)
            for x in self.transitions:
                if x.dtype in (np.float32, torch.float32):
                    x[:] = np.nan

    patch.setattr(script, "Replay", NanReplay)


def stored_in(folder):
    """A checkpoint's replay: obs, action, reward, terminated and next_obs."""
    found = arrays(folder)
    fields = ("obs", "action", "reward", "terminated", "next_obs")
    return [found[f"replay/transitions/{name}"] for name in fields]


def weights_in(folder):
    """Of a checkpoint, in order of their names."""
    beginnings = ("train_state/params/", "agent/")
    named = {x: y for x, y in arrays(folder).items() if x.startswith(beginnings)}
    return to_weights(in_order(named))


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


# Metrics cross when they are logged, but JAX's of sac_linen before. With environments in Gymnasium
# each step's action crosses; from JAX on a CPU that is a view, which is not counted.
TRANSFERS = {
    "sac_linen": 14,
    "sac_linen_gymnasium": 0,
    "sac_torch": 0,
    "sac_torch_gymnasium": 250,
    COMPILED: 250,
}


def test_nothing_compiles_again_and_nothing_waits_but_for_actions_and_metrics(told):
    assert [row.get("compilations", 0) for row in told.counts[2:]] == [0, 0]
    assert told.counts[3].get("transfers", 0) == TRANSFERS[told.name]


def test_load_policy_plays_what_the_checkpoint_holds(told):
    """In the environment's units."""
    policy = importlib.import_module(told.name).load_policy(told.folder)
    obs = np.random.default_rng(0).normal(size=(5, 3))
    mean, _ = np.split(forward(weights_in(told.folder)["actor"], obs), 2, axis=-1)
    np.testing.assert_allclose(policy(obs), 2 * np.tanh(mean), rtol=1e-4, atol=1e-5)


def test_load_policy_draws_as_in_training(told, tmp_path):
    """By a std that is far from 1."""
    folder = tmp_path / "changed"
    shutil.copytree(told.folder, folder)
    widen(folder, 0.8)
    policy = importlib.import_module(told.name).load_policy(folder)
    obs = np.random.default_rng(0).normal(size=(1, 3))
    mean, log_std = np.split(forward(weights_in(folder)["actor"], obs), 2, axis=-1)
    assert log_std > 0.5
    drawn = policy(np.repeat(obs, 500, 0), sample=True)
    noise = (np.arctanh(drawn.astype(float) / 2) - mean) / np.exp(log_std)
    assert kstest(noise[:, 0], "norm").pvalue > 0.01


def widen(folder, by):
    """Add to the log_std that a checkpoint's actor tells, by its bias."""
    path = next(folder.glob("checkpoint.*"))
    if path.suffix == ".pt":
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["agent"]["actor.mlp.output.bias"][1] += by
        torch.save(checkpoint, path)
    else:
        checkpoint = msgpack_restore(path.read_bytes())
        layer = checkpoint["train_state"]["params"]["actor"]["params"]["MLP_0"]["Dense_2"]
        layer["bias"] = layer["bias"] + np.array([0, by], "f")
        path.write_bytes(msgpack_serialize(checkpoint))


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
    assert_same_checkpoints(folder, whole)


@EACH
def test_without_a_saved_replay_learning_waits_for_a_new_one(name, tmp_path, monkeypatch, capsys):
    """That holds 1500 steps again, which are not random: here, all actions of the actor are 0.5."""
    script = importlib.import_module(name)
    make_nan_replays(monkeypatch, name)
    op_by_op(monkeypatch, script)
    monkeypatch.setattr(script, "draw_action", draw_half)
    run = make_whole_run(name, tmp_path, lambda place: train(name, place, "--no-save-replay"))
    assert [len(x) for x in stored_in(run.folder)] == [0] * 5
    folder = rewind(run, tmp_path / "killed")
    capsys.readouterr()
    assert main(name, "--resume", folder, "--save-replay") == 0
    assert "has no replay: a new one is filled before updates go on" in capsys.readouterr().out
    assert [row["charts/updates"] for row in rows(folder)] == [0, 62, 0, 62]
    assert rows(folder)[-1]["losses/td_loss"] is not None
    action = stored_in(folder)[1]
    np.testing.assert_array_equal(action, np.full((2000, 1), 0.5))


def draw_half(mean, log_std, noise):
    return 0 * mean + 0.5, 0 * log_std.sum(-1)


# === What updates are given =====================================================================
LEARNING = "--num-envs 2 --num-steps 30 --total-timesteps 240 --learning-starts 60 "
LEARNING += "--train-frequency 1 --buffer-size 360 --batch-size 32 --learning-rate 1e-3 "


class Update(NamedTuple):
    """What update was called with."""

    weights: dict
    target_critics: list
    batch: tuple
    noise: np.ndarray
    rate: float


def record_updates(patch, name) -> list[Update]:
    """The list that gets an Update for each call of the script's update."""
    script = importlib.import_module(name)
    update, found = script.update, []

    def in_linen(state, losses, batch, noise, rate, args):
        told = jax.tree.leaves(state.params), jax.tree.leaves(state.target_params)
        jax.debug.callback(keep, *told, tuple(batch), noise, rate, ordered=True)
        return update(state, losses, batch, noise, rate, args)

    def in_torch(agent, target_critics, optimizer, batch, noise, args):
        told = in_order(agent.state_dict()), in_order(target_critics.state_dict())
        keep(*told, batch, noise, optimizer.param_groups[0]["lr"])
        return update(agent, target_critics, optimizer, batch, noise, args)

    def in_compiled(agent, target_critics, optimizer, args, rate, noise, *batch):
        if noise.any():  # and not the call that compiles
            told = in_order(agent.state_dict()), in_order(target_critics.state_dict())
            keep(*told, batch, noise, rate)
        return update(agent, target_critics, optimizer, args, rate, noise, *batch)

    def keep(weights, target_critics, batch, noise, rate):
        batch = tuple(np.array(x) for x in batch)
        given = to_weights(weights), to_critics(target_critics), batch, np.array(noise)
        found.append(Update(*given, float(rate)))

    recorded = in_linen if "linen" in name else in_compiled if name == COMPILED else in_torch
    patch.setattr(script, "update", recorded)
    return found


@pytest.fixture(scope="module", params=SAC_SCRIPTS)
def learnt(request, tmp_path_factory):
    """A run of 60 random steps, and then of 60 updates in each of three iterations."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    with pytest.MonkeyPatch.context() as patch:
        updates = record_updates(patch, name)
        run = make_whole_run(name, folder, lambda place: train(name, place, LEARNING))
        jax.effects_barrier()
    assert len(updates) == 180
    return SimpleNamespace(name=name, updates=updates, run=run, folder=folder)


def test_noise_and_batches_are_drawn_anew(learnt):
    """For obs and for next_obs, and for both updates that follow a step."""
    noise = np.array([x.noise.reshape(2, 32) for x in learnt.updates])
    assert kstest(noise.ravel(), "norm").pvalue > 0.01
    assert len(np.unique(noise)) > 0.99 * noise.size
    assert abs(np.corrcoef(noise[:, 0].ravel(), noise[:, 1].ravel())[0, 1]) < 5 / np.sqrt(180 * 32)
    for first, second in zip(learnt.updates[::2], learnt.updates[1::2], strict=True):
        assert (first.batch[2] != second.batch[2]).mean() > 0.8


def test_batches_are_whole_rows_drawn_uniformly(learnt):
    """Of the steps so far, of which there are 62, twice, then 64, and so on; of the newest, too."""
    stored = stored_in(learnt.run.folder)
    numbers = {obs.tobytes(): number for number, obs in enumerate(stored[0])}
    assert len(numbers) == 240
    places, of_newest, expected = [], 0, 0.0
    rng = np.random.default_rng(0)
    for i, update in enumerate(learnt.updates):
        num_rows = 62 + i // 2 * 2
        drawn = np.array([numbers[obs.tobytes()] for obs in update.batch[0]])
        for x, y in zip(update.batch, stored, strict=True):
            np.testing.assert_array_equal(x, y[drawn])
        assert drawn.max() < num_rows
        places.append((drawn + rng.random(32)) / num_rows)
        of_newest += (drawn == num_rows - 1).sum()
        expected += 32 / num_rows
    assert kstest(np.concatenate(places), "uniform").pvalue > 0.01
    assert abs(of_newest - expected) < 5 * np.sqrt(expected)


def test_the_log_has_the_mean_losses_by_name(learnt):
    for i, row in enumerate(rows(learnt.run.folder)[1:]):
        updates = learnt.updates[60 * i : 60 * (i + 1)]
        losses = [as_logged(losses_of(*x[:4], gamma=0.99)) for x in updates]
        for name in losses[0]:
            mean = np.mean([x[name] for x in losses])
            assert row[name] == pytest.approx(mean, rel=1e-3, abs=1e-5), name


def test_the_learning_rate_is_what_the_arguments_say(learnt, tmp_path, monkeypatch):
    """Also of a run that goes on with others; it is that of an iteration's updates, and logged."""
    rates = [x.rate for x in learnt.updates[::60]]
    np.testing.assert_allclose(rates, [0.75e-3, 0.5e-3, 0.25e-3], rtol=1e-6)
    assert [x.rate for x in learnt.updates] == np.repeat(rates, 60).tolist()
    logged = [row["charts/learning_rate"] for row in rows(learnt.run.folder)]
    np.testing.assert_allclose(logged, [1e-3, *rates], rtol=1e-6)

    op_by_op(monkeypatch, importlib.import_module(learnt.name))
    updates = record_updates(monkeypatch, learnt.name)
    folder = rewind(learnt.run, tmp_path / "killed")
    flags = "--learning-rate 6e-3 --total-timesteps 360"
    assert main(learnt.name, "--resume", folder, *flags.split()) == 0
    jax.effects_barrier()
    rates = [x.rate for x in updates[::60]]
    np.testing.assert_allclose(rates, [4e-3, 3e-3, 2e-3, 1e-3], rtol=1e-6)
    logged = [row["charts/learning_rate"] for row in rows(folder)]
    np.testing.assert_allclose(logged[2:], rates, rtol=1e-6)


def test_the_call_that_compiles_changes_nothing(tmp_path, monkeypatch):
    """A run without updates ends as one in eager PyTorch, random numbers and all."""
    op_by_op(monkeypatch, importlib.import_module(COMPILED))
    for name in (COMPILED, "sac_torch_gymnasium"):
        train(name, tmp_path / name, LEARNING + "--learning-starts 240")
    ours, eager = (arrays(tmp_path / x) for x in (COMPILED, "sac_torch_gymnasium"))
    assert [ours.pop(f"optimizer/{x}").any() for x in ("count", "mean", "square")] == [False] * 3
    assert eager.keys() - ours.keys() == {x for x in eager if x.startswith("optimizer")}
    for place, x in ours.items():
        np.testing.assert_array_equal(x, eager[place], err_msg=place)


# === Types of observations ======================================================================
@EACH
def test_the_replay_keeps_the_type_of_observations(name, tmp_path, monkeypatch):
    """Of bytes, say; but for float64. The network reads them as numbers."""
    script = importlib.import_module(name)
    op_by_op(monkeypatch, script)
    train(name, tmp_path / "bytes", LEARNING + "--env-id Byte-v0")
    obs, *_, next_obs = stored_in(tmp_path / "bytes")
    assert obs.dtype == next_obs.dtype == np.uint8
    begins = (obs[2:] != next_obs[:-2]).any(1)
    assert begins.sum() >= 20 and len(np.unique(obs[:, 2])) > 20
    assert rows(tmp_path / "bytes")[-1]["losses/td_loss"] is not None
    mean, _ = np.split(forward(weights_in(tmp_path / "bytes")["actor"], obs[:9]), 2, axis=-1)
    policy = script.load_policy(tmp_path / "bytes")
    np.testing.assert_allclose(policy(obs[:9]), 2 * np.tanh(mean), rtol=1e-4, atol=1e-5)
    if "gymnasium" in name:
        train(name, tmp_path / "double", LEARNING + "--env-id Double-v0")
        assert stored_in(tmp_path / "double")[0].dtype == np.float32


@EACH
def test_a_large_replay_says_what_it_takes(name, capsys):
    """Of 1.2 GB, of which none is taken here."""
    script = importlib.import_module(name)
    for obs_size in (9_000, 12_000):
        sizes = script.Args(buffer_size=50_000), (obs_size,), np.dtype(np.uint8), 1
        if name == "sac_linen":
            jax.eval_shape(lambda sizes=sizes: script.make_replay(*sizes))
        elif name == "sac_linen_gymnasium":
            script.Replay(*sizes)
        else:
            script.Replay(*sizes, torch.device("meta"))
    assert capsys.readouterr().out.split(":")[0] == "The replay takes 1.2 GB"


# === Environments in Gymnasium ==================================================================
@pytest.mark.parametrize("name", [x for x in SAC_SCRIPTS if "gymnasium" in x])
def test_a_run_that_goes_on_has_new_episodes(name):
    """Which are not those that it began with, and the same if it goes on again."""
    env = importlib.import_module(name).VecEnv("Pendulum-v1", 2, "sync", 1)
    first, third, again = env.reset(), env.reset(3), env.reset(3)
    assert not np.isin(first, third).any()
    np.testing.assert_array_equal(third, again)


# === Whole trainings ============================================================================
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

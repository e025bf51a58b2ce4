"""SAC: compare updates with a float64 reference, and test complete runs.

For a new script, add the class that reads its weights to LEARNERS.
"""

import dataclasses
import importlib
import inspect
import shutil
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import dqn
import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from flax.serialization import msgpack_restore, msgpack_serialize
from gymnasium.envs.classic_control import PendulumEnv
from gymnax.environments.classic_control.pendulum import Pendulum
from gymnax.environments.spaces import Box as GymnaxBox
from running import (
    arrays,
    assert_close,
    assert_same_checkpoints,
    change,
    info,
    main,
    make_whole_run,
    metrics,
    op_by_op,
    rewind,
    rows,
)
from scipy.stats import kstest
from sections import ROWS, SAC_SCRIPTS, but, stand_ins

COMPILED = "sac_torch_compile_gymnasium"
EACH = pytest.mark.parametrize("name", SAC_SCRIPTS)
IN_SCAN = ("sac_linen", "sac_nnx")  # an iteration is one compiled loop
IN_GYMNASIUM = tuple(x for x in SAC_SCRIPTS if "gymnasium" in x)
OBS_DIM, ACTION_DIM, BATCH = 3, 2, 16
LOSSES = [f"losses/{x}" for x in ("td_loss", "q_value", "actor_loss", "entropy", "alpha")]

# Weights are {"actor": layers, "critics": [layers, layers], "log_alpha": number}. Layers are
# [(bias, kernel (inputs, outputs)), ...]. The last layer of the actor outputs means, then log_stds.


# === Reference: the papers' formulas in float64 NumPy ===========================================
# The reference shares no code with the scripts.
def forward(layers: list, x: np.ndarray) -> np.ndarray:
    for bias, kernel in layers[:-1]:
        x = np.maximum(x @ kernel + bias, 0)
    bias, kernel = layers[-1]
    return x @ kernel + bias


def log_slope_of_tanh(x):
    """Return log(1 / cosh(x)**2), where cosh(x) = exp(|x|) / 2 * (1 + exp(-2 |x|))."""
    x = np.abs(np.asarray(x, np.float64))
    return -2 * (x + np.log1p(np.exp(-2 * x)) - np.log(2))


def draw(actor: list, obs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return actions and their log density: a Gaussian density divided by the slope of tanh."""
    mean, log_std = np.split(forward(actor, obs), 2, axis=-1)
    std = np.exp(np.clip(log_std, -20, 2))
    x = mean + std * noise
    gaussian = np.exp(-(((x - mean) / std) ** 2) / 2) / np.sqrt(2 * np.pi) / std
    return np.tanh(x), (np.log(gaussian) - log_slope_of_tanh(x)).sum(-1)


def q_values(critics: list, obs: np.ndarray, action: np.ndarray) -> np.ndarray:
    both = np.concatenate([obs, action], -1)
    return np.array([forward(layers, both)[:, 0] for layers in critics])


def losses_of(weights: dict, target_critics: list, batch: tuple, noise, gamma: float) -> dict:
    """Return the three losses and metrics. Each loss trains only the weights with its name."""
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
    """Return the gradient of each loss for the weights with its name, by central differences."""
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
    """Return the numbers of a tree as a vector, and the function that restores the tree."""
    leaves, structure = jax.tree.flatten(tree)
    ends = np.cumsum([np.size(x) for x in leaves])[:-1]

    def unravel(vector: np.ndarray) -> Any:
        parts = zip(np.split(vector, ends), leaves, strict=True)
        return jax.tree.unflatten(structure, [x.reshape(np.shape(y)) for x, y in parts])

    return np.concatenate([np.ravel(x).astype(np.float64) for x in leaves]), unravel


def updates(weights: dict, batches: tuple, noises: tuple, rates: list, args: Any):
    """Yield the weights and target critics after each Adam update, and the losses before it."""
    vector, unravel = ravel(weights)
    target, unravel_target = ravel(weights["critics"])
    mean, square = np.zeros_like(vector), np.zeros_like(vector)
    for i, (batch, noise, rate) in enumerate(zip(batches, noises, rates, strict=True)):
        known_run = unravel(vector), unravel_target(target), batch, noise, args.gamma
        losses = losses_of(*known_run)
        grad, _ = ravel(gradients(*known_run))
        mean = 0.9 * mean + 0.1 * grad
        square = 0.999 * square + 0.001 * grad**2
        root = np.sqrt(square / (1 - 0.999 ** (i + 1))) + 1e-8
        vector = vector - rate * mean / (1 - 0.9 ** (i + 1)) / root
        critics, _ = ravel(unravel(vector)["critics"])
        target = (1 - args.tau) * target + args.tau * critics
        yield vector, target, losses


# === The scripts ================================================================================
def to_weights(arrays: list) -> dict:
    """Convert arrays sorted by name: the bias and the kernel of each layer, and log_alpha."""
    *layers, log_alpha = map(np.array, arrays)
    ends = len(layers) // 3
    actor = list(zip(layers[:ends:2], layers[1:ends:2], strict=True))
    return {"actor": actor, "critics": to_critics(layers[ends:]), "log_alpha": log_alpha}


def in_order(named: dict) -> list:
    """Return arrays sorted by name, and transpose PyTorch weights, which are (outputs, inputs)."""
    return [x.T if name.endswith("weight") else x for name, x in sorted(named.items())]


def to_critics(arrays: list) -> list:
    arrays = [np.array(x) for x in arrays]
    layers = list(zip(arrays[::2], arrays[1::2], strict=True))
    return [layers[: len(layers) // 2], layers[len(layers) // 2 :]]


class Linen:
    """NumPy interface to the weights, losses and updates of a script."""

    def __init__(self, script: Any, args: Any) -> None:
        self.script, self.args = script, args
        key = jax.random.PRNGKey(args.seed)
        self.state = script.make_agent(args, (OBS_DIM,), ACTION_DIM, key)
        # Compiling the entire function is faster than compiling each operation.
        self.update_fn = jax.jit(partial(script.update, args=args))
        self.grad_fn = jax.jit(jax.grad(partial(script.sac_loss, args=args), has_aux=True))
        self.draw_fn = jax.jit(script.draw_action)

    def weights(self) -> dict:
        return to_weights(jax.tree.leaves(self.state.params))

    def target_critics(self) -> list:
        return to_critics(jax.tree.leaves(self.state.target_params))

    def set_weights(self, weights: dict) -> None:
        """Set all weights except the target critics."""
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


class NNX(Linen):
    """NNX version of Linen. The state is a dict of arrays."""

    def __init__(self, script: Any, args: Any) -> None:
        self.script, self.args = script, args
        key = jax.random.PRNGKey(args.seed)
        objects = script.make_agent(args, (OBS_DIM,), ACTION_DIM, key)
        self.graphdef, state = nnx.split(objects, graph=False)
        self.state = nnx.to_pure_dict(state)
        self.update_fn = jax.jit(self.new_state)
        self.grad_fn = jax.jit(self.grads_of)
        self.draw_fn = jax.jit(script.draw_action)

    def new_state(self, state, losses, batch, noise, rate):
        if "gymnasium" in self.script.__name__:
            return self.script.update(state, losses, batch, noise, rate, self.graphdef, self.args)
        objects = nnx.merge(self.graphdef, state)
        losses = self.script.update(objects, losses, batch, noise, rate, self.args)
        return nnx.to_pure_dict(nnx.state(objects)), losses

    def grads_of(self, state, batch, noise):
        agent, target_critics, _ = nnx.merge(self.graphdef, state)
        grad_fn = jax.grad(self.script.sac_loss, has_aux=True)
        grads, losses = grad_fn(agent, target_critics, batch, noise, self.args)
        return nnx.to_pure_dict(nnx.state(grads)), losses

    def weights(self) -> dict:
        return to_weights(jax.tree.leaves(self.state["agent"]))

    def target_critics(self) -> list:
        return to_critics(jax.tree.leaves(self.state["target_critics"]))

    def set_weights(self, weights: dict) -> None:
        leaves = [jnp.asarray(x, jnp.float32) for x in jax.tree.leaves(weights)]
        agent = jax.tree.unflatten(jax.tree.structure(self.state["agent"]), leaves)
        self.state = self.state | {"agent": agent}

    def losses_and_grads(self, batch: tuple, noise: np.ndarray) -> tuple[dict, dict]:
        batch = self.script.Transition(*map(jnp.array, batch))
        grads, losses = self.grad_fn(self.state, batch, noise)
        return losses, to_weights(jax.tree.leaves(grads))


class Torch:
    """PyTorch version of Linen, without torch.compile."""

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
        """Set all weights except the target critics."""
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
    "sac_nnx": NNX,
    "sac_nnx_gymnasium": NNX,
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
    """Return the losses of the reference under the names in the log."""
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
    """Return a batch, and the noise that update() uses to draw actions."""
    rng = np.random.default_rng(seed)
    obs, next_obs = rng.normal(size=(2, BATCH, OBS_DIM)).astype("f")
    action = rng.uniform(-1, 1, (BATCH, ACTION_DIM)).astype("f")
    reward = rng.normal(size=BATCH).astype("f")
    noise = rng.normal(size=(2, BATCH, ACTION_DIM)).astype("f")
    return (obs, action, reward, rng.random(BATCH) < 0.3, next_obs), noise


def moved(weights: dict) -> dict:
    """Return changed weights with one log_std above the upper bound and one below the lower one."""
    rng = np.random.default_rng(0)
    vector, unravel = ravel(weights)
    weights = unravel(vector + 0.3 * rng.normal(size=len(vector)))
    weights["actor"][-1][0][ACTION_DIM:] = 3, -30
    return weights


# === Identical functions ========================================================================
@pytest.mark.parametrize("piece", ["Adam", "compile_graph", "capture"])
def test_functions_that_are_tested_elsewhere_are_identical_here(piece):
    ours, theirs = (importlib.import_module(x) for x in (COMPILED, "ppo_torch_compile"))
    assert inspect.getsource(getattr(ours, piece)) == inspect.getsource(getattr(theirs, piece))


# === Loss and update ============================================================================
@EACH_LEARNER
def test_logprob_of_squashed_actions(name):
    """Include actions for which the slope of tanh is 0 in float32: its log at 20 is -38.6."""
    x = np.linspace(-20, 20, 4001, dtype="f")[:, None]
    action, logprob = make_learner(name).draw_action(x, 0 * x, 0 * x)
    np.testing.assert_allclose(action, np.tanh(x), rtol=1e-5)
    log_slope = -logprob - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(log_slope, log_slope_of_tanh(x[:, 0]), rtol=1e-5, atol=1e-5)


@EACH_LEARNER
def test_losses_and_gradients_match_numpy(name):
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
def test_updates_match_numpy(name):
    """Compare eight updates with a changing learning rate."""
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
def test_initial_weights(name):
    """Weights are uniform within 1 / sqrt(inputs) as in PyTorch, targets are copies, alpha is 1."""
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
    """Episodes are truncated after 10 steps, and terminate if the pendulum turns fast."""

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
    """All episodes start in the same state, so that a resumed run can be compared exactly."""

    def reset(self, **options: Any) -> tuple:
        super().reset(**options)
        self.state = np.array([2.0, 0.5])
        return self._get_obs(), {}


class BytePendulum(ShortPendulum):
    """Observations are uint8, as in images."""

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
    """Observations are float64, as in MuJoCo."""

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
    """Integrate the equation of motion with action (B, 1). Return next_obs (B, 3), reward (B,)."""
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
def known_run(request, tmp_path_factory):
    """Return a run of four iterations of 1000 steps. Unused entries of its buffer are NaN."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    with pytest.MonkeyPatch.context() as patch:
        make_nan_replays(patch, name)
        run = make_whole_run(name, folder, lambda place: train(name, place))
    half = rewind(run, folder / "half")
    return SimpleNamespace(name=name, half=half, rows=rows(run.folder), **run._asdict())


def make_nan_replays(patch, name):
    script = importlib.import_module(name)
    if name in IN_SCAN:
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
    """Return the replay buffer in a checkpoint: obs, action, reward, terminated, next_obs."""
    found = arrays(folder)
    fields = ("obs", "action", "reward", "terminated", "next_obs")
    return [found[f"replay/transitions/{name}"] for name in fields]


def weights_in(folder):
    """Return the weights in a checkpoint."""
    prefixes = ("train_state/params/", "train_state/agent/", "agent/")
    named = {x: y for x, y in arrays(folder).items() if x.startswith(prefixes)}
    return to_weights(in_order(named))


def test_stored_transitions_match_pendulum(known_run):
    """The buffer has steps 1600 to 4000, because the last 1600 have overwritten the first."""
    obs, action, reward, terminated, next_obs = (
        np.roll(x, -1600, 0) for x in stored_in(known_run.folder)
    )
    expected = step_pendulum(obs, action)
    np.testing.assert_allclose(next_obs, expected[0], atol=1e-5)
    np.testing.assert_allclose(reward, expected[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(terminated, np.abs(next_obs[:, 2]) > 2)
    begins = (obs[4:] != next_obs[:-4]).any(1)
    assert begins[terminated[:-4]].all()
    # Many episodes terminated, and many others were truncated.
    assert terminated.sum() > 20 and begins[~terminated[:-4]].sum() > 20


def test_actions_are_uniform_until_learning_starts(known_run):
    """Once learning starts, the actor chooses actions. It hardly changes at this learning rate."""
    obs, action, *_ = stored_in(known_run.half)
    assert action.shape == (2000, 1)
    random, drawn = action[:1500, 0], action[1500:, 0]
    assert kstest(random, "uniform", (-1, 2)).pvalue > 0.01
    mean, log_std = np.split(forward(weights_in(known_run.half)["actor"], obs[1500:]), 2, axis=-1)
    noise = (np.arctanh(drawn) - mean[:, 0]) / np.exp(log_std[:, 0])
    assert kstest(noise, "norm").pvalue > 0.01
    by_env = random.reshape(-1, 4)
    assert np.abs(np.corrcoef(by_env.T) - np.eye(4)).max() < 5 / np.sqrt(375)
    assert np.abs(np.corrcoef(by_env[1:, 0], by_env[:-1, 0])[0, 1]) < 5 / np.sqrt(375)


def test_updates_read_only_stored_transitions_and_are_counted(known_run):
    """There is one update per 8 steps after step 1500. Empty entries would make the losses NaN."""
    assert [row["charts/updates"] for row in known_run.rows] == [0, 62, 125, 125]
    assert [row["losses/td_loss"] is None for row in known_run.rows] == [True, False, False, False]
    assert known_run.rows[-1]["losses/alpha"] < known_run.rows[1]["losses/alpha"] < 1


def test_episode_statistics_match_numpy(known_run):
    """Some episodes terminate, and others are truncated after 10 steps."""
    _, _, reward, terminated, _ = stored_in(known_run.half)
    reward, terminated = (x.reshape(500, 4) for x in (reward, terminated))
    truncated = np.zeros((500, 4), bool)
    length = np.zeros(4)  # of the current episode in each environment
    for step in range(500):
        length += 1
        truncated[step] = length == 10
        length[terminated[step] | truncated[step]] = 0
    expected = dqn.finished_episodes(reward, terminated | truncated, 250)
    assert terminated[:250].any() and (truncated & ~terminated)[:250].any()
    for row, episodes in zip(known_run.rows[:2], expected, strict=True):
        for key, x in dqn.statistics(episodes).items():
            assert row[key] == pytest.approx(x, rel=1e-5), key


# One transfer per metric that is an array, and one per step for the Gymnasium actions. On a CPU,
# JAX shares the memory of the actions with NumPy, so there is no transfer.
TRANSFERS = {
    "sac_linen": 15,
    "sac_nnx": 15,
    "sac_linen_gymnasium": 5,  # losses
    "sac_nnx_gymnasium": 5,
    "sac_torch": 13,  # losses, episode statistics and the norm of the parameters
    "sac_torch_gymnasium": 250 + 6,
    COMPILED: 250 + 7,  # losses, the norm and the learning rate
}


def test_nothing_compiles_twice_and_only_actions_and_metrics_are_transferred(known_run):
    assert [row.get("compilations", 0) for row in known_run.counts[2:]] == [0, 0]
    assert known_run.counts[3].get("transfers", 0) == TRANSFERS[known_run.name]


def test_load_policy_returns_the_mean_action_within_the_bounds(known_run):
    policy = importlib.import_module(known_run.name).load_policy(known_run.folder)
    obs = np.random.default_rng(0).normal(size=(5, 3))
    mean, _ = np.split(forward(weights_in(known_run.folder)["actor"], obs), 2, axis=-1)
    np.testing.assert_allclose(policy(obs), 2 * np.tanh(mean), rtol=1e-4, atol=1e-5)


def test_load_policy_can_sample_as_in_training(known_run, tmp_path):
    """The standard deviation is far from 1."""
    folder = tmp_path / "changed"
    shutil.copytree(known_run.folder, folder)
    widen(folder, 0.8)
    policy = importlib.import_module(known_run.name).load_policy(folder)
    obs = np.random.default_rng(0).normal(size=(1, 3))
    mean, log_std = np.split(forward(weights_in(folder)["actor"], obs), 2, axis=-1)
    assert log_std > 0.5
    drawn = policy(np.repeat(obs, 500, 0), sample=True)
    noise = (np.arctanh(drawn.astype(float) / 2) - mean) / np.exp(log_std)
    assert kstest(noise[:, 0], "norm").pvalue > 0.01


def widen(folder, by):
    """Add `by` to the log_std of the actor in a checkpoint."""
    add_to_output(folder, [0, by])


def add_to_output(folder, change):
    """Add to the output bias of the actor in a checkpoint."""
    path = next(folder.glob("checkpoint.*"))
    if path.suffix == ".pt":
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["agent"]["actor.mlp.output.bias"] += torch.tensor(change)
        torch.save(checkpoint, path)
    else:
        checkpoint = msgpack_restore(path.read_bytes())
        state = checkpoint["train_state"]
        if "agent" in state:  # NNX
            layer = state["agent"]["actor"]["mlp"]["output"]
        else:
            layer = state["params"]["actor"]["params"]["MLP_0"]["Dense_2"]
        layer["bias"] = layer["bias"] + np.array(change, "f")
        path.write_bytes(msgpack_serialize(checkpoint))


def test_a_resumed_run_continues_exactly(known_run, tmp_path, monkeypatch):
    """In Gymnasium, resuming starts new episodes, so all episodes must be identical."""
    name, whole = known_run.name, known_run.folder
    op_by_op(monkeypatch, importlib.import_module(name))  # as in known_run
    folder = shutil.copytree(known_run.half, tmp_path / "killed")
    if "gymnasium" in name:
        run = make_whole_run(name, tmp_path, lambda place: train(name, place, "--env-id Alike-v0"))
        whole = run.folder
        folder = rewind(run, tmp_path / "killed alike")
    assert main(name, "--resume", folder) == 0
    assert metrics(folder) == metrics(whole)
    assert_same_checkpoints(folder, whole)


@EACH
def test_without_a_saved_replay_updates_wait_for_a_new_one(name, tmp_path, monkeypatch):
    """After resuming, the actor chooses all actions, which are always 0.5 in this test."""
    script = importlib.import_module(name)
    make_nan_replays(monkeypatch, name)
    op_by_op(monkeypatch, script)
    monkeypatch.setattr(script, "draw_action", draw_half)
    run = make_whole_run(name, tmp_path, lambda place: train(name, place, "--no-save-replay"))
    assert [len(x) for x in stored_in(run.folder)] == [0] * 5
    folder = rewind(run, tmp_path / "killed")
    change(folder, {"save_replay": True})  # a resumed run keeps its arguments
    assert main(name, "--resume", folder) == 0
    assert [row["charts/updates"] for row in rows(folder)] == [0, 62, 0, 62]
    assert rows(folder)[-1]["losses/td_loss"] is not None
    action = stored_in(folder)[1]
    np.testing.assert_array_equal(action, np.full((2000, 1), 0.5))


def draw_half(mean, log_std, noise):
    return 0 * mean + 0.5, 0 * log_std.sum(-1)


# === Inputs of update() =========================================================================
LEARNING = "--num-envs 2 --num-steps 30 --total-timesteps 240 --learning-starts 60 "
LEARNING += "--train-frequency 1 --buffer-size 360 --batch-size 32 --learning-rate 1e-3 "


class Update(NamedTuple):
    """Arguments of one call to update()."""

    weights: dict
    target_critics: list
    batch: tuple
    noise: np.ndarray
    rate: float


def record_updates(patch, name) -> list[Update]:
    """Return a list to which each call of update() in the script appends an Update."""
    script = importlib.import_module(name)
    update, found = script.update, []

    def in_linen(state, losses, batch, noise, rate, args):
        known_run = jax.tree.leaves(state.params), jax.tree.leaves(state.target_params)
        jax.debug.callback(keep, *known_run, tuple(batch), noise, rate, ordered=True)
        return update(state, losses, batch, noise, rate, args)

    def in_nnx(state, losses, batch, noise, rate, *others, **options):
        objects = nnx.merge(options["graphdef"], state) if "gymnasium" in name else state
        known_run = jax.tree.leaves(objects.agent), jax.tree.leaves(objects.target_critics)
        jax.debug.callback(keep, *known_run, tuple(batch), noise, rate, ordered=True)
        return update(state, losses, batch, noise, rate, *others, **options)

    def in_torch(agent, target_critics, optimizer, batch, noise, args):
        known_run = in_order(agent.state_dict()), in_order(target_critics.state_dict())
        keep(*known_run, batch, noise, optimizer.param_groups[0]["lr"])
        return update(agent, target_critics, optimizer, batch, noise, args)

    def in_compiled(agent, target_critics, optimizer, args, rate, noise, *batch):
        if noise.any():  # the call that only compiles has no noise
            known_run = in_order(agent.state_dict()), in_order(target_critics.state_dict())
            keep(*known_run, batch, noise, rate)
        return update(agent, target_critics, optimizer, args, rate, noise, *batch)

    def keep(weights, target_critics, batch, noise, rate):
        batch = tuple(np.array(x) for x in batch)
        given = to_weights(weights), to_critics(target_critics), batch, np.array(noise)
        found.append(Update(*given, float(rate)))

    kinds = {"linen": in_linen, "nnx": in_nnx, "torch": in_torch}
    recorded = in_compiled if name == COMPILED else kinds[ROWS[name]["framework"]]
    patch.setattr(script, "update", recorded)
    return found


@pytest.fixture(scope="module", params=SAC_SCRIPTS)
def trained(request, tmp_path_factory):
    """Return a run with 60 random steps, then 60 updates in each of three iterations."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    with pytest.MonkeyPatch.context() as patch:
        updates = record_updates(patch, name)
        run = make_whole_run(name, folder, lambda place: train(name, place, LEARNING))
        jax.effects_barrier()
    assert len(updates) == 180
    return SimpleNamespace(name=name, updates=updates, run=run, folder=folder)


def test_every_update_has_new_noise_and_a_new_batch(trained):
    """Noise differs between obs and next_obs. Two updates after the same step differ in batches."""
    noise = np.array([x.noise.reshape(2, 32) for x in trained.updates])
    assert kstest(noise.ravel(), "norm").pvalue > 0.01
    assert len(np.unique(noise)) > 0.99 * noise.size
    assert abs(np.corrcoef(noise[:, 0].ravel(), noise[:, 1].ravel())[0, 1]) < 5 / np.sqrt(180 * 32)
    for first, second in zip(trained.updates[::2], trained.updates[1::2], strict=True):
        assert (first.batch[2] != second.batch[2]).mean() > 0.8


def test_batches_are_uniform_samples_of_the_stored_transitions(trained):
    """Two updates sample from 62 transitions, the next two from 64, and so on."""
    stored = stored_in(trained.run.folder)
    numbers = {obs.tobytes(): number for number, obs in enumerate(stored[0])}
    assert len(numbers) == 240
    positions, newest, expected = [], 0, 0.0
    rng = np.random.default_rng(0)
    for i, update in enumerate(trained.updates):
        size = 62 + i // 2 * 2
        drawn = np.array([numbers[obs.tobytes()] for obs in update.batch[0]])
        for x, y in zip(update.batch, stored, strict=True):
            np.testing.assert_array_equal(x, y[drawn])
        assert drawn.max() < size
        positions.append((drawn + rng.random(32)) / size)
        newest += (drawn == size - 1).sum()
        expected += 32 / size
    assert kstest(np.concatenate(positions), "uniform").pvalue > 0.01
    assert abs(newest - expected) < 5 * np.sqrt(expected)


def test_mean_losses_are_logged_under_their_names(trained):
    for i, row in enumerate(rows(trained.run.folder)[1:]):
        updates = trained.updates[60 * i : 60 * (i + 1)]
        losses = [as_logged(losses_of(*x[:4], gamma=0.99)) for x in updates]
        for name in losses[0]:
            mean = np.mean([x[name] for x in losses])
            assert row[name] == pytest.approx(mean, rel=1e-3, abs=1e-5), name


def test_the_learning_rate_decays_per_iteration(trained):
    """The logged learning rate is the one that the updates use."""
    rates = [x.rate for x in trained.updates[::60]]
    np.testing.assert_allclose(rates, [0.75e-3, 0.5e-3, 0.25e-3], rtol=1e-6)
    assert [x.rate for x in trained.updates] == np.repeat(rates, 60).tolist()
    logged = [row["charts/learning_rate"] for row in rows(trained.run.folder)]
    np.testing.assert_allclose(logged, [1e-3, *rates], rtol=1e-6)


def test_the_call_that_compiles_leaves_no_trace(tmp_path, monkeypatch):
    """A run without updates ends as in eager PyTorch, including the random generator states."""
    op_by_op(monkeypatch, importlib.import_module(COMPILED))
    for name in (COMPILED, "sac_torch_gymnasium"):
        train(name, tmp_path / name, LEARNING + "--learning-starts 240")
    ours, eager = (arrays(tmp_path / x) for x in (COMPILED, "sac_torch_gymnasium"))
    assert [ours.pop(f"optimizer/{x}").any() for x in ("count", "mean", "square")] == [False] * 3
    assert eager.keys() - ours.keys() == {x for x in eager if x.startswith("optimizer")}
    for place, x in ours.items():
        np.testing.assert_array_equal(x, eager[place], err_msg=place)


@pytest.mark.parametrize("name", IN_GYMNASIUM)
def test_a_run_that_diverges_does_not_pass_the_actions_to_the_environment(
    name, tmp_path, monkeypatch
):
    op_by_op(monkeypatch, importlib.import_module(name))
    flags = (SMALL + LEARNING + "--learning-rate 1e30 --no-anneal-lr").split()
    error = main(name, *flags, "--runs-dir", tmp_path, "--run-name", "run")
    assert str(error).startswith("Diverged in iteration ")
    assert info(tmp_path / "run")["status"] == "diverged"


# === Dtypes of observations =====================================================================
@EACH
def test_the_replay_keeps_the_dtype_of_observations(name, tmp_path, monkeypatch):
    """uint8 observations are stored unchanged, and float64 observations as float32."""
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


@pytest.mark.parametrize("name", but(tuple(stand_ins("Replay", SAC_SCRIPTS)), "sac_linen"))
def test_a_resumed_full_replay_buffer_overwrites_the_oldest_transition(name):
    """With three entries, transitions 0 to 3 are added before the run resumes, and 4 after it."""
    script = importlib.import_module(name)
    inputs = script.Args(num_envs=1, buffer_size=3), (1,), np.dtype(np.float32), 1
    device = (torch.device("cpu"),) if "torch" in name else ()
    replay, resumed = (script.Replay(*inputs, *device) for _ in range(2))
    for number in range(5):
        if number == 4:
            resumed.load_state_dict(replay.state_dict())
            replay = resumed
        x = np.full((1, 1), number, np.float32)
        replay.add(x, x, {"reward": x[0], "terminated": x[0] > 9, "next_obs": x})
    assert np.ravel(replay.transitions.obs).tolist() == [3, 4, 2]


@pytest.mark.parametrize("name", [x for x in stand_ins("Replay", SAC_SCRIPTS) if "torch" in x])
def test_a_saved_replay_contains_only_the_part_in_use(name):
    """torch.save writes the entire storage of a tensor, even if the tensor is a slice of it."""
    script = importlib.import_module(name)
    args = script.Args(num_envs=1, buffer_size=3)
    replay = script.Replay(args, (1,), np.dtype(np.float32), 1, torch.device("cpu"))
    x = np.ones((1, 1), np.float32)
    replay.add(x, x, {"reward": x[0], "terminated": x[0] > 9, "next_obs": x})
    for saved in replay.state_dict()["transitions"].values():
        assert saved.untyped_storage().nbytes() == saved.nbytes


# === Gymnasium ==================================================================================
@pytest.mark.parametrize("name", stand_ins("Environment", IN_GYMNASIUM))
def test_a_resumed_run_starts_new_episodes(name):
    """The new episodes depend on the iteration, and differ from the first ones."""
    env = importlib.import_module(name).VecEnv("Pendulum-v1", 2, "sync", 1)
    first, third, again = env.reset(), env.reset(3), env.reset(3)
    assert not np.isin(first, third).any()
    np.testing.assert_array_equal(third, again)


# === Bounds of actions ==========================================================================
# Mapping [-1, 1] to these bounds is inexact because of rounding, in float32 and in float64.
LOW, HIGH = [-0.1, -0.2], [0.2, 0.1]


class Bounded(PendulumEnv):
    """Pendulum that rejects actions outside the bounds or with a different dtype."""

    def __init__(self, dtype: Any = np.float32) -> None:
        super().__init__()
        self.action_space: Any = gymnasium.spaces.Box(np.array(LOW, dtype), np.array(HIGH, dtype))

    def step(self, u: Any) -> tuple:
        assert self.action_space.contains(u) and u.dtype == self.action_space.dtype, u
        return super().step(u[:1])


bounded: Any = Bounded
for bits in (32, 64):
    gymnasium.register(f"Bounded{bits}-v0", bounded, kwargs={"dtype": np.dtype(f"float{bits}")})


class BoundedInGymnax(Pendulum):
    """The observation is the action."""

    def step_env(self, key: Any, state: Any, action: Any, params: Any) -> tuple:
        _, *others = super().step_env(key, state, action[0], params)
        return jnp.append(action, 0.0), *others

    def reset_env(self, key: Any, params: Any) -> tuple:
        return jnp.zeros(3), super().reset_env(key, params)[1]

    def action_space(self, params: Any = None) -> Any:
        return GymnaxBox(jnp.array(LOW), jnp.array(HIGH), (2,))


gymnax.register("Bounded32-v0", BoundedInGymnax)
EXTREMES = np.array([[-1, -1], [1, 1], [-1, 1], [1, -1]], np.float32)


@EACH
def test_actions_are_inside_bounds_that_are_not_binary_fractions(name, tmp_path, monkeypatch):
    """Check steps with extreme actions, a training run, and load_policy."""
    script = importlib.import_module(name)
    op_by_op(monkeypatch, script)
    for bits in (32, 64) if "gymnasium" in name else (32,):
        space = Bounded(np.dtype(f"float{bits}")).action_space
        env_id = f"Bounded{bits}-v0"
        assert_steps_are_inside(script, env_id, space)
        folder = tmp_path / f"{bits}"
        train(name, folder, f"{LEARNING} --env-id {env_id} --total-timesteps 60")
        obs = np.zeros((2, 3), "f")
        for shift, expected in ((99, [0.2, -0.2]), (-198, [-0.1, 0.1])):
            add_to_output(folder, [shift, -shift, 0, 0])  # tanh maps these means to -1 or 1
            policy = script.load_policy(folder)
            for action in (*policy(obs), *policy(obs, sample=True)):
                assert space.contains(action) and action.dtype == space.dtype
                np.testing.assert_allclose(action, expected, rtol=1e-6)


def assert_steps_are_inside(script, env_id, space):
    if "gymnasium" in script.__name__:  # the environment checks its actions
        env = script.VecEnv(env_id, 4, "sync", 1)
        env.reset()
        env.step(EXTREMES)
        return
    env = script.VecEnv(env_id, 4)
    _, state = env.reset(jax.random.PRNGKey(0))
    _, _, results = jax.jit(env.step)(state, EXTREMES)
    actions = np.array(results["next_obs"])[:, :2]
    for action, extreme in zip(actions, EXTREMES, strict=True):
        assert space.contains(action)
        np.testing.assert_allclose(action, np.where(extreme > 0, HIGH, LOW), rtol=1e-6)


# === Counts =====================================================================================
@pytest.mark.parametrize("name", stand_ins("Arguments", SAC_SCRIPTS))
def test_counts_below_the_minimum_are_usage_errors(name, monkeypatch, capfd):
    dqn.assert_counts_are_checked(name, ["learning-starts"], monkeypatch, capfd)


# === Long runs ==================================================================================
def test_a_compiled_run_is_one_graph_and_matches_the_eager_run(tmp_path):
    """The learning rate changes during the run."""
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
    """Training takes 9,600 steps. The mean return of random actions is -1,200."""
    own = ["--runs-dir", tmp_path, "--run-name", "run", "--total-timesteps", 9_600]
    assert main(name, *own) == 0
    returns = [row["charts/episodic_return"] for row in rows(tmp_path / "run")]
    assert min(returns[:2]) < -900 and max(returns[-5:]) > -170

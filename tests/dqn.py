"""The DQN scripts behind one interface, NumPy in and out; and DQN's arithmetic in float64.

Weights travel as layers [(kernel (inputs, outputs), bias), ...] of Linen's network, whose first one
is, for images (H, W, C), that of the 3 x 3 surroundings (9 C, 16). The names and shapes that a
script has for them are its form.
"""

import gc
import importlib
import signal
import sys
from functools import cached_property, partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnax.environments import spaces
from probes import Params, Probe, State
from sections import DQN_PAIRS

LINEN_PAIR, TORCH_PAIR = DQN_PAIRS
# A pair's Agent, Replay, Act, Loss and Update are the same to the letter, which is tested.
FIRST_OF_PAIRS = (LINEN_PAIR[0], TORCH_PAIR[0])

Layers = list[tuple[np.ndarray, np.ndarray]]
# Less to compile, which is what takes long here.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


# === From the papers, with PyTorch's gradients and optimizers; shares no code with the scripts ===
def q_values(params: list[torch.Tensor], obs: np.ndarray, obs_shape: tuple) -> torch.Tensor:
    x = torch.tensor(obs, dtype=torch.float64)
    if len(obs_shape) == 3:  # (B, H - 2, W - 2, C, 3, 3), and then 9 C
        x = x.reshape(-1, *obs_shape).unfold(1, 3, 1).unfold(2, 3, 1)
        x = x.permute(0, 1, 2, 4, 5, 3).flatten(3)
    for i in range(0, len(params) - 2, 2):
        x = (x @ params[i] + params[i + 1]).relu().flatten(1)
    return x @ params[-2] + params[-1]


def loss(params: list, target_params: list, batch: tuple, args: Any, obs_shape: tuple):
    """The loss and the mean Q; the target is a constant, and a truncation like any other step."""
    obs, action, reward, terminated, next_obs = batch
    rows = np.arange(len(action))
    future = q_values(target_params, next_obs, obs_shape).detach()
    choice = q_values(params, next_obs, obs_shape) if args.double_q else future
    future = future[rows, choice.argmax(1)]
    future[terminated] = 0.0
    taken = q_values(params, obs, obs_shape)[rows, action]
    error = (taken - (torch.tensor(reward) + args.gamma * future)).abs()
    losses = error**2
    if args.loss == "huber":
        losses = torch.where(error <= 1, error**2 / 2, error - 0.5)
    return losses.mean(), taken.mean()


def parameters(layers: Layers) -> list[torch.Tensor]:
    arrays = [x for layer in layers for x in layer]
    return [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in arrays]


def layers_of(params: list[torch.Tensor]) -> Layers:
    arrays = [x.detach().numpy().copy() for x in params]
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def train(layers: Layers, target_layers: Layers, batches, rates, args: Any, obs_shape: tuple):
    """After each update: the layers, those of the target, and the loss and the mean Q."""
    params, target_params = parameters(layers), parameters(target_layers)
    if args.optimizer == "adam":
        optimizer: Any = torch.optim.Adam(params, eps=args.optimizer_eps)
    else:
        decay, eps = args.rmsprop_decay, args.optimizer_eps
        optimizer = torch.optim.RMSprop(params, alpha=decay, eps=eps, centered=True)
    for i, (batch, rate) in enumerate(zip(batches, rates, strict=True)):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        losses = loss(params, target_params, batch, args, obs_shape)
        losses[0].backward()
        optimizer.step()
        if (i + 1) % args.target_network_frequency == 0:
            target_params = parameters(layers_of(params))
        yield layers_of(params), layers_of(target_params), [x.item() for x in losses]


def random_layers(seed: int, obs_shape: tuple, hidden: tuple, num_actions: int) -> Layers:
    rng = np.random.default_rng(seed)
    pairs = list(pairwise([int(np.prod(obs_shape)), *hidden, num_actions]))
    if len(obs_shape) == 3:
        height, width, channels = obs_shape
        pairs[0] = (16 * (height - 2) * (width - 2), hidden[0])
        pairs.insert(0, (9 * channels, 16))
    return [
        ((rng.normal(size=(m, n)) / np.sqrt(m)).astype("f"), rng.normal(size=n).astype("f") / 10)
        for m, n in pairs
    ]


def random_batch(seed: int, size: int, obs_dim: int, num_actions: int) -> tuple:
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(size, obs_dim)).astype("f"),
        rng.integers(0, num_actions, size).astype("i"),
        (2 * rng.normal(size=size)).astype("f"),
        rng.random(size) < 0.3,
        rng.normal(size=(size, obs_dim)).astype("f"),
    )


def flat(form: Any) -> np.ndarray:
    """All weights of a script's form."""
    return np.concatenate([np.ravel(x).astype(float) for x in jax.tree.leaves(form)])


# === Learners ===================================================================================
class Learner:
    """Agent, replay and environments, made and trained by the script's functions.

    With the agent's env alone, there is nothing to iterate on.
    """

    start_env: Any
    device: tuple = ()

    def __init__(self, script: ModuleType, args: Any, env: Any) -> None:
        self.script, self.args, self.iteration = script, args, 0
        self.env = env or self.make_env()
        self.replay = script.make_replay(args, self.env, *self.device)
        if not env:
            self.start_env()

    def make_env(self) -> Any:
        args = self.args
        if hasattr(args, "vectorization"):
            return self.script.VecEnv(args.env_id, args.num_envs, args.vectorization, args.seed)
        return self.script.VecEnv(args.env_id, args.num_envs)

    def replayed(self) -> tuple[np.ndarray, ...]:
        return tuple(np.array(x) for x in self.replay)

    def plan(self) -> Any:
        self.iteration += 1
        return self.script.make_plan(self.iteration - 1, self.args)


class Linen(Learner):
    @cached_property
    def state(self) -> Any:
        return self.script.make_agent(self.args, self.env, jax.random.PRNGKey(self.args.seed))

    @cached_property
    def update_fn(self) -> Any:
        return jit(partial(self.script.update, args=self.args))

    def start_env(self) -> None:
        script, args, env = self.script, self.args, self.env
        if hasattr(args, "vectorization"):
            self.obs = env.reset(10_000)
            self.act_fn = jit(partial(script.act, env=env))
            self.learn_fn = jit(partial(script.learn, args=args), donate_argnums=range(3))
        else:
            self.obs, self.env_state = jit(env.reset)(jax.random.PRNGKey(args.seed))
            iterate = partial(script.iterate, env=env, args=args)
            self.iterate_fn = jit(iterate, donate_argnums=range(4))

    def iterate(self) -> dict[str, float]:
        inputs = jax.random.PRNGKey(self.iteration), self.plan()
        carry = self.state, self.replay, self.obs
        if hasattr(self.args, "vectorization"):
            own = self.act_fn, self.learn_fn, self.env, self.args
            *carry, metrics = self.script.iterate(*carry, *inputs, *own)
        else:
            *carry, self.env_state, metrics = self.iterate_fn(*carry, self.env_state, *inputs)
        self.state, self.replay, self.obs = carry
        return {name: float(x) for name, x in metrics.items()}

    def form(self, layers: Layers) -> Any:
        arrays = [{"kernel": jnp.array(x, "f"), "bias": jnp.array(y, "f")} for x, y in layers]
        return {"params": {f"Dense_{i}": x for i, x in enumerate(arrays)}}

    def weights(self) -> Any:
        return self.state.params

    def target(self) -> Any:
        return self.state.target_params

    def set_weights(self, form: Any, target: Any) -> None:
        self.state = self.state.replace(params=form, target_params=target)

    def update(self, batch: tuple, learning_rate: float) -> np.ndarray:
        batch = self.script.Transition(*map(jnp.array, batch))
        self.state, losses = self.update_fn(self.state, batch, np.float32(learning_rate))
        return np.array(losses)

    def add(self, transition: tuple, row: int) -> None:
        transition = self.script.Transition(*map(jnp.array, transition))
        self.replay = self.script.add(self.replay, transition, row)

    def sample(self, seed: int, num_rows: int, batch_size: int) -> list[np.ndarray]:
        key = jax.random.key(seed)
        return [np.array(x) for x in self.script.sample(self.replay, key, num_rows, batch_size)]

    def spoil_replay(self) -> None:
        nan = (jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x for x in self.replay)
        self.replay = self.script.Transition(*nan)


class Torch(Learner):
    device = (torch.device("cpu"),)

    @cached_property
    def agent(self) -> Any:
        torch.manual_seed(self.args.seed)
        return self.script.make_agent(self.args, self.env, *self.device)

    @cached_property
    def update_fn(self) -> Any:
        return partial(self.script.update, *self.agent, args=self.args)

    def start_env(self) -> None:
        if hasattr(self.args, "vectorization"):
            self.obs = torch.from_numpy(self.env.reset(10_000))
        else:
            key = jax.random.PRNGKey(self.args.seed)
            obs, self.env_state = jit(self.env.reset)(key)
            self.obs, self.step_fn = self.script.to_torch(obs), jit(self.env.step)

    def iterate(self) -> dict[str, float]:
        carry, own = (self.agent, self.replay, self.obs), (self.update_fn, self.env, self.args)
        if hasattr(self.args, "vectorization"):
            self.obs, metrics = self.script.iterate(*carry, self.plan(), *own)
        else:
            steps = self.env_state, self.plan(), self.step_fn
            self.obs, self.env_state, metrics = self.script.iterate(*carry, *steps, *own)
        return {name: float(x.numpy()) for name, x in metrics.items()}  # no operation of PyTorch's

    def form(self, layers: Layers) -> dict[str, torch.Tensor]:
        shape, layers, form = self.env.obs_shape, list(layers), {}
        if len(shape) == 3:
            kernel, form["conv.bias"] = layers.pop(0)
            form["conv.weight"] = kernel.reshape(3, 3, shape[2], 16).transpose(3, 2, 0, 1)
            kernel, bias = layers[0]  # its inputs are (H W, 16), PyTorch's are (16, H W)
            kernel = kernel.reshape(-1, 16, kernel.shape[1]).transpose(1, 0, 2)
            layers[0] = kernel.reshape(-1, kernel.shape[2]), bias
        names = [*(f"hidden.{i}" for i in range(len(layers) - 1)), "output"]
        for name, (kernel, bias) in zip(names, layers, strict=True):
            form |= {f"{name}.weight": kernel.T, f"{name}.bias": bias}
        return {name: torch.tensor(x.astype("f")) for name, x in form.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: x.clone() for name, x in self.agent.q_network.state_dict().items()}

    def target(self) -> dict[str, torch.Tensor]:
        return {name: x.clone() for name, x in self.agent.target_network.state_dict().items()}

    def set_weights(self, form: Any, target: Any) -> None:
        self.agent.q_network.load_state_dict(form)
        self.agent.target_network.load_state_dict(target)

    def update(self, batch: tuple, learning_rate: float) -> np.ndarray:
        """By learn, which copies the target, from a batch that is not drawn."""
        batch, losses = self.script.Transition(*map(torch.tensor, batch)), torch.zeros(2)
        done = int(self.agent.moments.count)
        now = SimpleNamespace(row=0, num_rows=1, num_updates=1, updates_before=done)
        rate = torch.tensor(learning_rate)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.script, "sample", lambda *_: batch)
            own = now, self.update_fn, self.args
            self.script.learn(self.agent, self.replay, losses, batch, rate, *own)
        return losses.numpy()

    def add(self, transition: tuple, row: int) -> None:
        transition = self.script.Transition(*map(torch.tensor, transition))
        self.script.add(self.replay, transition, row)

    def sample(self, seed: int, num_rows: int, batch_size: int) -> list[np.ndarray]:
        torch.manual_seed(seed)
        return [x.numpy() for x in self.script.sample(self.replay, num_rows, batch_size)]

    def spoil_replay(self) -> None:
        for x in self.replay:
            if x.is_floating_point():
                x.fill_(torch.nan)


SMALL: dict[str, Any] = {"num_envs": 4, "num_steps": 16, "total_timesteps": 640}
SMALL |= {"hidden_sizes": (8, 8), "buffer_size": 128, "batch_size": 16, "replay_ratio": 4.0}
SMALL |= {"learning_starts": 32, "exploration_steps": 320, "target_network_frequency": 5}
SMALL |= {"matmul_precision": "highest"}


def make_learner(name: str, obs_shape: tuple = (), **flags: Any) -> Any:
    """The learner of script name, small but for flags; without environments where obs_shape is."""
    script = importlib.import_module(name)
    kind = Linen if name in LINEN_PAIR else Torch
    size = {"obs_dim": int(np.prod(obs_shape)), "num_actions": 3}
    env = SimpleNamespace(obs_shape=obs_shape, **size) if obs_shape else None
    return kind(script, script.Args(**SMALL | flags), env)


def main(name: str, *flags: Any) -> Any:
    """Run a script by its flags, as the last lines of it do; its exit status."""
    script = importlib.import_module(name)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script.__file__, *map(str, flags)])
        try:
            args = script.parse_args()
            script.train(script.args_of_run(args) if args.resume else args)
        except SystemExit as stopped:
            return stopped.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            gc.collect()  # the run log, and with it the folder's lock
    return 0


# === An environment in both libraries whose every step is known =================================
class Told(Probe):
    """Observes time, the last action and a draw of -1 or 1; 1 terminates after 3, -1 is cut at 5.

    Reward 10 time + action + 1, action one of five.
    """

    @property
    def default_params(self) -> Any:
        return Params(max_steps_in_episode=5)

    def reward(self, state: State, action: Any) -> jax.Array:
        return 10.0 * state.time + action + 1

    def observe(self, key: jax.Array, state: State, action: Any, params: Params) -> jax.Array:
        last = jnp.float32(-1 if action is None else action)
        return jnp.stack([state.time.astype(jnp.float32), last, state.signal])

    def is_terminated(self, state: State, params: Params) -> jax.Array:
        return (state.signal > 0) & (state.time >= 3)

    def action_space(self, params: Params) -> spaces.Discrete:
        return spaces.Discrete(5)

    def observation_space(self, params: Params) -> spaces.Box:
        return spaces.Box(-1.0, 5.0, (3,))


class GymnasiumTold(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(5)
    observation_space = gymnasium.spaces.Box(-1.0, 5.0, (3,), np.float32)

    def observe(self, action: int) -> np.ndarray:
        return np.array([self.time, action, self.signal], np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        self.time, self.signal = 0, int(self.np_random.choice([-1, 1]))
        return self.observe(-1), {}

    def step(self, action: Any) -> tuple:
        reward = 10.0 * self.time + action + 1
        self.time += 1
        return self.observe(action), reward, self.signal > 0 and self.time >= 3, False, {}


if "Told-v0" not in gymnax.registered_envs:
    gymnax.register("Told-v0", Told)
    gymnasium.register("Told-v0", entry_point="dqn:GymnasiumTold", max_episode_steps=5)

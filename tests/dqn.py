"""The DQN scripts behind one interface, NumPy in and out; and DQN's arithmetic in float64 NumPy.

Weights travel as layers [(kernel (inputs, outputs), bias), ...] of Linen's network, whose first one
is, for images (H, W, C), that of the 3 x 3 surroundings (9 C, 16).
"""

import importlib
import sys
import threading
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

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


# === NumPy, from the papers; shares no code with the scripts ====================================
def forward(layers: Layers, obs: np.ndarray, obs_shape: tuple) -> list[np.ndarray]:
    """What each layer is given, and the last one's output."""
    x = obs.astype(float)
    if len(obs_shape) == 3:  # (B, H - 2, W - 2, 3, 3, C)
        image = x.reshape(-1, *obs_shape)
        x = np.lib.stride_tricks.sliding_window_view(image, (3, 3), axis=(1, 2))
        x = np.moveaxis(x, 3, -1).reshape(*x.shape[:3], -1)
    values = [x]
    for i, (kernel, bias) in enumerate(layers):
        x = x @ kernel + bias
        x = np.maximum(x, 0) if i < len(layers) - 1 else x
        x = x.reshape(len(obs), -1)
        values.append(x)
    return values


def td_targets(q_next, target_q_next, batch: tuple, args: Any) -> np.ndarray:
    """One transition at a time; one that was truncated is one like any other."""
    _, _, reward, terminated, _ = batch
    targets = []
    for i in range(len(reward)):
        future = 0.0
        if not terminated[i]:
            choose = q_next[i] if args.double_q else target_q_next[i]
            future = target_q_next[i][list(choose).index(max(choose))]
        targets.append(reward[i] + args.gamma * future)
    return np.array(targets, float)


def loss(layers: Layers, target_layers: Layers, batch: tuple, args: Any, obs_shape: tuple):
    """The loss, the mean Q, and the loss's derivative by Q (B, A)."""
    obs, action, _, _, next_obs = batch
    q = forward(layers, obs, obs_shape)[-1]
    q_next, target_q_next = (forward(x, next_obs, obs_shape)[-1] for x in (layers, target_layers))
    taken = q[np.arange(len(action)), action]
    error = taken - td_targets(q_next, target_q_next, batch, args)
    if args.loss == "mse":
        losses, slope = error**2, 2 * error
    else:
        small = np.abs(error) <= 1
        losses = np.where(small, error**2 / 2, np.abs(error) - 0.5)
        slope = np.where(small, error, np.sign(error))
    by_q = np.zeros_like(q)
    by_q[np.arange(len(action)), action] = slope / len(action)
    return losses.mean(), taken.mean(), by_q


def gradient(layers, target_layers, batch, args, obs_shape) -> Layers:
    """Backwards, layer by layer; the target is a constant."""
    values = forward(layers, batch[0], obs_shape)
    slope = loss(layers, target_layers, batch, args, obs_shape)[2]
    grads = []
    for i in reversed(range(len(layers))):
        kernel = layers[i][0]
        x = values[i].reshape(-1, len(kernel))
        slope = slope.reshape(len(x), -1)
        grads.insert(0, (x.T @ slope, slope.sum(0)))
        if i:  # which has passed a ReLU
            slope = (slope @ kernel.T).reshape(values[i].shape) * (values[i] > 0)
    return grads


def flatten(layers: Layers) -> np.ndarray:
    return np.concatenate([np.ravel(x).astype(float) for layer in layers for x in layer])


def unflatten(vector: np.ndarray, like: Layers) -> Layers:
    layers, start = [], 0
    for kernel, bias in like:
        middle, end = start + kernel.size, start + kernel.size + bias.size
        layers.append((vector[start:middle].reshape(kernel.shape), vector[middle:end]))
        start = end
    return layers


def torch_optimizer(param: torch.Tensor, args: Any) -> torch.optim.Optimizer:
    eps: Any = {"lr": args.learning_rate, "eps": args.optimizer_eps}
    if args.optimizer == "adam":
        return torch.optim.Adam([param], **eps)
    return torch.optim.RMSprop([param], alpha=args.rmsprop_decay, centered=True, **eps)


def descend(param: torch.Tensor, optimizer: torch.optim.Optimizer, grad, learning_rate) -> None:
    for group in optimizer.param_groups:
        group["lr"] = float(learning_rate)
    param.grad = torch.tensor(grad)
    optimizer.step()


def train(layers, target_layers, batches, rates, args, obs_shape):
    """Weights, target and losses after updates by NumPy's gradients and PyTorch's optimizer."""
    param = torch.tensor(flatten(layers))
    optimizer, losses = torch_optimizer(param, args), []
    for i, (batch, rate) in enumerate(zip(batches, rates, strict=True)):
        now = unflatten(param.numpy(), layers)
        losses.append(loss(now, target_layers, batch, args, obs_shape)[:2])
        grads = gradient(now, target_layers, batch, args, obs_shape)
        descend(param, optimizer, flatten(grads), rate)
        if (i + 1) % args.target_network_frequency == 0:
            target_layers = unflatten(param.numpy().copy(), layers)
    return flatten(unflatten(param.numpy(), layers)), flatten(target_layers), np.array(losses)


def random_layers(seed: int, obs_shape: tuple, hidden: tuple, num_actions: int) -> Layers:
    rng, sizes = np.random.default_rng(seed), [int(np.prod(obs_shape)), *hidden, num_actions]
    pairs = list(pairwise(sizes))
    if len(obs_shape) == 3:
        height, width, channels = obs_shape
        pairs[0] = (16 * (height - 2) * (width - 2), sizes[1])
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


# === Learners ===================================================================================
class Learner:
    """Agent, replay and environments, made and trained by the script's functions."""

    make_agent: Any
    set_update: Any
    make_replay: Any
    start_env: Any

    def __init__(self, script: ModuleType, args: Any) -> None:
        self.script, self.args, self.iteration = script, args, 0

    def start(self, env: Any = None) -> None:
        """With the agent's env alone, there is nothing to iterate on."""
        self.env = env or self.make_env()
        self.make_agent()
        self.set_update()
        self.replay = self.make_replay()
        if not env:
            self.start_env()

    def make_env(self) -> Any:
        args = self.args
        if hasattr(args, "vectorization"):
            return self.script.VecEnv(args.env_id, args.num_envs, args.vectorization, args.seed)
        return self.script.VecEnv(args.env_id, args.num_envs, **args.env_options)

    def total_steps(self) -> int:
        return self.args.num_iterations * self.args.num_steps

    def replayed(self) -> tuple[np.ndarray, ...]:
        return tuple(np.array(x) for x in self.replay)

    def plan(self) -> Any:
        self.iteration += 1
        return self.script.make_plan(self.iteration - 1, self.args)


class Linen(Learner):
    made: ClassVar[dict[tuple, Any]] = {}

    def make_agent(self) -> None:
        script, args = self.script, self.args
        self.key, agent_key, self.env_key = jax.random.split(jax.random.PRNGKey(args.seed), 3)
        own = args.optimizer, args.optimizer_eps, args.rmsprop_decay, args.hidden_sizes, args.seed
        key = (script.__name__, self.env.obs_shape, self.env.num_actions, *own)
        if key not in self.made:  # a second or so, to compile what makes it
            self.made[key] = script.make_agent(args, self.env, agent_key)
        self.state = jax.tree.map(jnp.copy, self.made[key])  # what iterate donates is gone

    def set_update(self) -> None:
        self.update_fn = jax.jit(partial(self.script.update, args=self.args))

    def make_replay(self) -> Any:
        return self.script.make_replay(self.args, self.env)

    def start_env(self) -> None:
        script, args, env = self.script, self.args, self.env
        if hasattr(args, "vectorization"):
            self.obs = env.reset(self.total_steps())
            act_fn = jax.jit(partial(script.act, env=env))
            learn_fn = jax.jit(partial(script.learn, args=args), donate_argnums=range(3))
            functions = {"act_fn": act_fn, "learn_fn": learn_fn}
            self.iterate_fn = partial(script.iterate, **functions, env=env, args=args)
        else:
            self.obs, self.env_state = jax.jit(env.reset)(self.env_key)
            iterate = partial(script.iterate, env=env, args=args)
            self.iterate_fn = jax.jit(iterate, donate_argnums=range(4))

    def iterate(self) -> np.ndarray:
        key = jax.random.fold_in(self.key, self.iteration)
        if hasattr(self.args, "vectorization"):
            carry = self.state, self.replay, self.obs
            *carry, metrics = self.iterate_fn(*carry, key, self.plan())
            self.state, self.replay, self.obs = carry
        else:
            carry = self.state, self.replay, self.obs, self.env_state
            *carry, metrics = self.iterate_fn(*carry, key, self.plan())
            self.state, self.replay, self.obs, self.env_state = carry
        return np.array(metrics)

    def tree(self, layers: Layers) -> dict:
        names = [f"Dense_{i}" for i in range(len(layers))]
        parts = ({"kernel": jnp.array(x), "bias": jnp.array(y)} for x, y in layers)
        return {"params": dict(zip(names, parts, strict=True))}

    def layers(self, tree: dict) -> Layers:
        dense = [tree["params"][f"Dense_{i}"] for i in range(len(tree["params"]))]
        return [(np.array(x["kernel"]), np.array(x["bias"])) for x in dense]

    def get_weights(self) -> Layers:
        return self.layers(self.state.params)

    def get_target(self) -> Layers:
        return self.layers(self.state.target_params)

    def set_weights(self, layers: Layers, target_layers: Layers | None = None) -> None:
        target = self.tree(target_layers or layers)
        self.state = self.state.replace(params=self.tree(layers), target_params=target)

    def q(self, obs: np.ndarray) -> np.ndarray:
        return np.array(jax.jit(self.state.apply_fn)(self.state.params, jnp.array(obs)))

    def td_target(self, q_next, target_q_next, batch: tuple) -> np.ndarray:
        batch = self.script.Transition(*map(jnp.array, batch))
        td_target = jax.jit(partial(self.script.td_target, args=self.args))
        return np.array(td_target(q_next, target_q_next, batch))

    def loss_and_grads(self, batch: tuple) -> tuple[float, np.ndarray, Layers]:
        batch = self.script.Transition(*map(jnp.array, batch))
        loss_fn = partial(self.script.dqn_loss, args=self.args)
        grad_fn = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
        (loss, losses), grads = grad_fn(self.state.params, self.state, batch)
        return float(loss), np.array(losses), self.layers(grads)

    def update(self, batch: tuple, learning_rate: float) -> np.ndarray:
        batch = self.script.Transition(*map(jnp.array, batch))
        self.state, losses = self.update_fn(self.state, batch, np.float32(learning_rate))
        return np.array(losses)

    def follow(self, patch: pytest.MonkeyPatch) -> None:
        """From now on the loss is such that its gradient is the batch."""

        def dqn_loss(params, train_state, batch, args):
            return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, params, batch))), jnp.zeros(2)

        patch.setattr(self.script, "dqn_loss", dqn_loss)

    def update_by(self, grads: Layers, learning_rate: float) -> None:
        rate = np.float32(learning_rate)
        self.state, _ = self.update_fn(self.state, self.tree(grads), rate)

    def add(self, transition: tuple, row: int) -> None:
        transition = self.script.Transition(*map(jnp.array, transition))
        self.replay = self.script.add(self.replay, transition, row)

    def sampler(self, batch_size: int) -> Any:
        """number of rows -> a batch."""
        sample, keys = jax.jit(self.script.sample, static_argnums=3), iter(range(10**6))
        return lambda num_rows: tuple(
            np.array(x)
            for x in sample(self.replay, jax.random.key(next(keys)), num_rows, batch_size)
        )

    def spoil_replay(self) -> None:
        nan = (jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x for x in self.replay)
        self.replay = self.script.Transition(*nan)


class Torch(Learner):
    def make_agent(self) -> None:
        script, args = self.script, self.args
        torch.manual_seed(args.seed)
        self.agent = script.make_agent(args, self.env, torch.device("cpu"))

    def set_update(self) -> None:
        self.update_fn = partial(self.script.update, *self.agent, args=self.args)
        if self.args.compile:
            self.update_fn = self.script.compile_graph(self.update_fn, None)

    def make_replay(self) -> Any:
        return self.script.make_replay(self.args, self.env, torch.device("cpu"))

    def start_env(self) -> None:
        if hasattr(self.args, "vectorization"):
            self.obs = torch.from_numpy(self.env.reset(self.total_steps()))
        else:
            key = jax.random.PRNGKey(self.args.seed)
            obs, self.env_state = jax.jit(self.env.reset)(key)
            self.obs, self.step_fn = self.script.to_torch(obs), jax.jit(self.env.step)

    def iterate(self) -> np.ndarray:
        carry, own = (self.agent, self.replay, self.obs), (self.update_fn, self.env, self.args)
        if hasattr(self.args, "vectorization"):
            self.obs, metrics = self.script.iterate(*carry, self.plan(), *own)
        else:
            steps = self.env_state, self.plan(), self.step_fn
            self.obs, self.env_state, metrics = self.script.iterate(*carry, *steps, *own)
        return metrics.numpy()

    def state_dict(self, layers: Layers) -> dict[str, torch.Tensor]:
        shape, layers, state = self.env.obs_shape, list(layers), {}
        if len(shape) == 3:
            kernel, bias = layers.pop(0)
            conv = kernel.reshape(3, 3, shape[2], 16).transpose(3, 2, 0, 1)
            state |= {"conv.weight": conv, "conv.bias": bias}
            kernel, bias = layers[0]  # its inputs are (H W, 16), PyTorch's are (16, H W)
            kernel = kernel.reshape(-1, 16, kernel.shape[1]).transpose(1, 0, 2)
            layers[0] = kernel.reshape(-1, kernel.shape[2]), bias
        names = [*(f"hidden.{i}" for i in range(len(layers) - 1)), "output"]
        for name, (kernel, bias) in zip(names, layers, strict=True):
            state |= {f"{name}.weight": kernel.T, f"{name}.bias": bias}
        return {name: torch.tensor(x.copy()) for name, x in state.items()}

    def layers(self, state: dict[str, torch.Tensor]) -> Layers:
        arrays = {name: x.detach().numpy().copy() for name, x in state.items()}
        kernels = [(x, arrays[f"{x}.weight"].T) for x in self.layer_names()]
        layers = [(kernel, arrays[f"{name}.bias"]) for name, kernel in kernels]
        if "conv.weight" in arrays:
            kernel, bias = layers[0]
            kernel = kernel.reshape(16, -1, kernel.shape[1]).transpose(1, 0, 2)
            layers[0] = kernel.reshape(-1, kernel.shape[2]), bias
            conv = arrays["conv.weight"].transpose(2, 3, 1, 0).reshape(-1, 16)
            layers.insert(0, (conv, arrays["conv.bias"]))
        return layers

    def layer_names(self) -> list[str]:
        return [*(f"hidden.{i}" for i in range(len(self.agent.q_network.hidden))), "output"]

    def get_weights(self) -> Layers:
        return self.layers(self.agent.q_network.state_dict())

    def get_target(self) -> Layers:
        return self.layers(self.agent.target_network.state_dict())

    def set_weights(self, layers: Layers, target_layers: Layers | None = None) -> None:
        self.agent.q_network.load_state_dict(self.state_dict(layers))
        self.agent.target_network.load_state_dict(self.state_dict(target_layers or layers))

    @torch.no_grad()
    def q(self, obs: np.ndarray) -> np.ndarray:
        return self.agent.q_network(torch.tensor(obs)).numpy()

    def td_target(self, q_next, target_q_next, batch: tuple) -> np.ndarray:
        batch = self.script.Transition(*map(torch.tensor, batch))
        values = torch.tensor(q_next), torch.tensor(target_q_next)
        return self.script.td_target(*values, batch, self.args).numpy()

    def loss_and_grads(self, batch: tuple) -> tuple[float, np.ndarray, Layers]:
        batch = self.script.Transition(*map(torch.tensor, batch))
        loss, losses = self.script.dqn_loss(*self.agent[:2], batch, self.args)
        named = dict(self.agent.q_network.named_parameters())
        grads = torch.autograd.grad(loss, list(named.values()))
        return loss.item(), losses.numpy(), self.layers(dict(zip(named, grads, strict=True)))

    def update(self, batch: tuple, learning_rate: float) -> np.ndarray:
        """What iterate does of it."""
        batch = self.script.Transition(*map(torch.tensor, batch))
        losses = self.update_fn(batch=batch, learning_rate=torch.tensor(learning_rate))
        if int(self.agent.moments.count) % self.args.target_network_frequency == 0:
            self.agent.target_network.load_state_dict(self.agent.q_network.state_dict())
        return losses.numpy()

    def follow(self, patch: pytest.MonkeyPatch) -> None:
        def dqn_loss(network, target_network, batch, args):
            products = ((x * batch[name]).sum() for name, x in network.named_parameters())
            return torch.stack(list(products)).sum(), torch.zeros(2)

        patch.setattr(self.script, "dqn_loss", dqn_loss)

    def update_by(self, grads: Layers, learning_rate: float) -> None:
        rate = torch.tensor(learning_rate, dtype=torch.float32)
        self.update_fn(batch=self.state_dict(grads), learning_rate=rate)

    def add(self, transition: tuple, row: int) -> None:
        transition = self.script.Transition(*map(torch.tensor, transition))
        self.script.add(self.replay, transition, row)

    def sampler(self, batch_size: int) -> Any:
        return lambda num_rows: tuple(
            x.numpy() for x in self.script.sample(self.replay, num_rows, batch_size)
        )

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
    learner = kind(script, script.Args(**SMALL | flags))
    size = {"obs_dim": int(np.prod(obs_shape)), "num_actions": 3}
    learner.start(SimpleNamespace(obs_shape=obs_shape, **size) if obs_shape else None)
    return learner


def main(name: str, *flags: Any) -> Any:
    """Run a script's main() by flags; its exit status."""
    script = importlib.import_module(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script.__file__, *map(str, flags)])
        patch.setattr(threading, "excepthook", threading.excepthook)  # main changes it
        try:
            script.main(script.parse_args())
        except SystemExit as stopped:
            return stopped.code
    return 0


# === Environments in both libraries whose every step is known ===================================
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


class Final(Probe):
    """Places in a row. From 2 a step pays 8 and terminates; from 0 on, time is up after two steps.

    Half the episodes start at 2. So what place 1 is worth comes from what stood at the cut, place
    2: not 0, as after a termination, and not from where the next episode starts.
    """

    @property
    def default_params(self) -> Any:
        return Params(max_steps_in_episode=2)

    def place(self, state: State) -> jax.Array:
        return state.time + jnp.where(state.signal > 0, 2, 0)

    def reward(self, state: State, action: Any) -> jax.Array:
        return jnp.where(self.place(state) == 2, 8.0, 0.0)

    def observe(self, key: jax.Array, state: State, action: Any, params: Params) -> jax.Array:
        return (self.place(state) == jnp.arange(3)).astype(jnp.float32)

    def is_terminated(self, state: State, params: Params) -> jax.Array:
        return self.place(state) >= 3

    def observation_space(self, params: Params) -> spaces.Box:
        return spaces.Box(0.0, 1.0, (3,))


class GymnasiumFinal(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(0.0, 1.0, (3,), np.float32)

    def observe(self) -> np.ndarray:
        return np.eye(3, 4, dtype=np.float32)[:, self.place]

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        self.place = int(self.np_random.choice([0, 2]))
        return self.observe(), {}

    def step(self, action: Any) -> tuple:
        self.place += 1
        return self.observe(), 8.0 * (self.place == 3), self.place >= 3, False, {}


for probe in (Told, Final):
    if f"{probe.__name__}-v0" not in gymnax.registered_envs:
        gymnax.register(f"{probe.__name__}-v0", probe)
        gymnasium.register(
            f"{probe.__name__}-v0",
            entry_point=f"dqn:Gymnasium{probe.__name__}",
            max_episode_steps=probe().default_params.max_steps_in_episode,
        )

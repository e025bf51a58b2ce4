"""NumPy interface to the functions of all PPO scripts, with small networks.

Weights are {"actor": [(kernel, bias), ...], "critic": [...]}, where kernels are (inputs, outputs).
For continuous actions, weights also contain {"log_std": [(array,)]}.
"""

import importlib
import inspect
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from running import arrays, info
from sections import ROWS

Weights = dict[str, list[tuple[np.ndarray, ...]]]
Metrics = dict[str, float]

# Values other than the defaults for flags of GAE, the loss and the optimizer.
OTHER_FLAGS: dict[str, Any] = {"norm_adv": False, "clip_vloss": False, "clip_coef": 0.05}
OTHER_FLAGS |= {"ent_coef": 0.5, "vf_coef": 2.0, "anneal_lr": False, "bootstrap_truncated": False}
OTHER_FLAGS |= {"gamma": 0.9, "gae_lambda": 0.8, "max_grad_norm": 5.0, "adam_eps": 1e-3}


def random_weights(seed: int, obs_dim: int, hidden: tuple[int, ...], num_actions: int) -> Weights:
    rng = np.random.default_rng(seed)

    def layers(num_outputs: int) -> list[tuple[np.ndarray, ...]]:
        sizes = (obs_dim, *hidden, num_outputs)
        return [
            (rng.normal(size=(m, n)).astype("f") / np.sqrt(m), rng.normal(size=n).astype("f") / 10)
            for m, n in pairwise(sizes)
        ]

    return {"actor": layers(num_actions), "critic": layers(1)}


# The arrays are sorted by name: the bias and the kernel of each actor layer, then of each critic
# layer, then log_std, if any. Kernels are (inputs, outputs), so those of PyTorch are transposed.
def to_weights(arrays: list[Any]) -> Weights:
    copies = [np.array(x) for x in arrays]
    weights: Weights = {}
    log_std = [copies.pop()] if len(copies) % 2 == 1 else []
    layers: Any = list(zip(copies[1::2], copies[::2], strict=True))
    weights["actor"] = layers[: len(layers) // 2]
    weights["critic"] = layers[len(layers) // 2 :]
    for array in log_std:
        weights["log_std"] = [(array,)]
    return weights


def to_arrays(weights: Weights) -> list[np.ndarray]:
    layers = weights["actor"] + weights["critic"] + weights.get("log_std", [])
    return [x for layer in layers for x in reversed(layer)]


def weights_in(folder: Path) -> Weights:
    """Return the weights in the checkpoint of a run.

    The arrays in an Equinox checkpoint are numbered. Number 0 is the iteration. If actions are
    continuous, six arrays with running statistics follow. Then come the parameters of the agent.
    """
    found, run = arrays(folder), info(folder)
    framework = ROWS[run["script"]]["framework"]
    if framework == "equinox":
        number = 4 * (1 + len(run["args"]["hidden_sizes"])) + ("action_dim" in run)
        first = 7 if "action_dim" in run else 1
        return to_weights([found[str(first + i)] for i in range(number)])
    beginnings = ("train_state/params/", "train_state/agent/", "agent/")  # Linen, NNX, PyTorch
    names = sorted(name for name in found if name.startswith(beginnings))
    return to_weights([found[x].T if framework == "torch" else found[x] for x in names])


def assert_orthogonal(layers: list[tuple], scales: list[float]) -> None:
    """Assert that kernels are orthogonal matrices times the scales, and that biases are 0."""
    for (kernel, bias), scale in zip(layers, scales, strict=True):
        gram = kernel @ kernel.T if kernel.shape[0] < kernel.shape[1] else kernel.T @ kernel
        np.testing.assert_allclose(gram, scale**2 * np.eye(len(gram)), atol=1e-5)
        assert not bias.any()


def next_rate(args: Any) -> Any:
    """Return the learning rate that the log of the second iteration should contain."""
    share = 1 - 1 / args.num_iterations if args.anneal_lr else 1
    return pytest.approx(args.learning_rate * share, abs=1e-9)


def num_shuffled(args: Any) -> int:
    """Return the number of items that update() shuffles.

    The items are environments for recurrent PPO, and transitions otherwise.
    """
    return args.num_envs if hasattr(args, "gru_hidden_size") else args.batch_size


def initial_gru_state(args: Any, zeros: Any) -> list[Any]:
    """Return [zeros((num_envs, gru_hidden_size))] for recurrent PPO, and [] otherwise."""
    sizes = args.num_envs, getattr(args, "gru_hidden_size", 0)
    return [zeros(sizes)] if sizes[1] else []


def floats(metrics: dict[str, Any]) -> Metrics:
    return {name: float(x) for name, x in metrics.items()}


def converter(script: ModuleType) -> Any:
    """Return the function that converts a NumPy array to an array of the framework."""
    return torch.tensor if "torch" in script.__name__ else jnp.array


def gae(script: ModuleType, storage: tuple, value, next_value, args: Any) -> np.ndarray:
    storage = script.Storage(*map(converter(script), storage))
    values = converter(script)(value), converter(script)(next_value)
    return np.array(script.compute_gae(storage, *values, args))


def make_env(script: ModuleType, args: Any) -> Any:
    """Create the VecEnv of a script from args."""
    names = [x for x in inspect.signature(script.VecEnv).parameters if x != "options"]
    return script.VecEnv(*(getattr(args, x) for x in names))


def sizes(env: Any) -> tuple:
    """Return the arguments of make_agent() that describe the spaces of an environment."""
    if hasattr(env, "action_dim"):
        return env.obs_shape, env.action_dim
    if hasattr(env, "channels_first"):
        return env.obs_shape, env.channels_first, env.num_actions
    return env.obs_shape, env.num_actions


# === JAX ========================================================================================
class Linen:
    """An agent and its environments, created and trained by the functions of a script."""

    jit: Any = staticmethod(jax.jit)

    def __init__(self, script: ModuleType, args: Any) -> None:
        self.script, self.args = script, args
        self.make_env()
        self.make_agent(jax.random.PRNGKey(args.seed))
        self.stats: list[Any] = []  # running statistics; empty in scripts without them
        if hasattr(script, "make_stats"):
            self.stats.append(script.make_stats(self.env.obs_shape))
        self.update_fn = self.jit(partial(script.update, args=args))

    def make_env(self) -> None:
        self.env = make_env(self.script, self.args)
        self.rollout_fn = self.jit(partial(self.script.rollout, env=self.env, args=self.args))
        self.obs, self.env_state = jax.jit(self.env.reset)(jax.random.PRNGKey(self.args.seed))

    def make_agent(self, key: jax.Array) -> None:
        self.state = self.script.make_agent(self.args, *sizes(self.env), key)

    def get_tree(self) -> Any:
        return self.state.params

    def set_tree(self, tree: Any) -> None:
        self.state = self.state.replace(params=tree)

    def get_weights(self) -> Weights:
        return to_weights(jax.tree.leaves(self.get_tree()))

    def set_weights(self, weights: Weights) -> None:
        leaves = [jnp.array(x) for x in to_arrays(weights)]
        self.set_tree(jax.tree.unflatten(jax.tree.structure(self.get_tree()), leaves))

    def grad(self, batch: Any) -> tuple:
        apply_fn = self.state.apply_fn
        loss_fn = partial(self.script.ppo_loss, apply_fn=apply_fn, batch=batch, args=self.args)
        return jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(self.state.params)

    def loss_and_grads(self, batch: tuple) -> tuple[float, Metrics, Weights]:
        (loss, losses), grads = self.grad(self.script.Batch(*map(jnp.array, batch)))
        return float(loss), floats(losses), to_weights(jax.tree.leaves(grads))

    def orders(self, seed: int) -> list[np.ndarray]:
        """Return the permutations that update(..., seed) uses."""
        keys = jax.random.split(jax.random.key(seed), self.args.update_epochs)
        size = num_shuffled(self.args)
        return [np.array(self.script.shuffle(key, size)).astype(int) for key in keys]

    def update(self, storage: tuple, seed: int) -> Metrics:
        storage = self.script.Storage(*map(jnp.array, storage))
        new = self.update_fn(self.state, *self.stats, storage, jax.random.key(seed))
        self.state, *self.stats, metrics = new
        return floats(metrics)

    def watch(self, storage: tuple) -> None:
        """Update the running statistics with a rollout, without training."""
        merge, (stats,) = self.script.merge, self.stats
        new = merge(stats.obs, storage[0]), merge(stats.discounted_return, storage[9])
        self.stats = [self.script.Stats(*new)]

    def rollout(self, seed: int) -> Any:
        carry = self.obs, *initial_gru_state(self.args, jnp.zeros), self.env_state
        new = self.rollout_fn(self.state, *self.stats, *carry, jax.random.key(seed))
        self.obs, *_, self.env_state, storage = new
        return storage


class LinenGymnasium(Linen):
    def make_env(self) -> None:
        self.env = make_env(self.script, self.args)
        self.obs = self.env.reset()

    def rollout(self, seed: int) -> Any:
        policy = partial(self.script.policy, apply_fn=self.state.apply_fn)
        if self.stats:
            policy = partial(policy, args=self.args)
        carry = self.state.params, *self.stats, self.obs, jax.random.key(seed)
        self.obs, storage = self.script.rollout(jax.jit(policy), *carry, self.env, self.args)
        return storage


class NNX(Linen):
    jit = partial(nnx.jit, graph=True, graph_updates=True)

    def make_agent(self, key: jax.Array) -> None:
        self.state, self.optimizer = self.script.make_agent(self.args, *sizes(self.env), key)

    def get_tree(self) -> Any:
        return nnx.state(self.state)

    def set_tree(self, tree: Any) -> None:
        nnx.update(self.state, tree)

    def grad(self, batch: Any) -> tuple:
        grad_fn = nnx.value_and_grad(self.script.ppo_loss, has_aux=True)
        return self.jit(partial(grad_fn, args=self.args))(self.state, batch)

    def update(self, storage: tuple, seed: int) -> Metrics:
        storage = self.script.Storage(*map(jnp.array, storage))
        trained = self.state, self.optimizer, *self.stats
        new = self.update_fn(*trained, storage, jax.random.key(seed))
        *self.stats, metrics = new if self.stats else [new]
        return floats(metrics)


class NNXTree(NNX):
    jit = partial(nnx.jit, graph=False)


class NNXGymnasium(NNXTree, LinenGymnasium):
    def rollout(self, seed: int) -> Any:
        policy = self.script.policy
        if self.stats:
            policy = partial(policy, args=self.args)
        policy_fn = nnx.jit_partial(policy, self.state, graph=False)
        carry = *self.stats, self.obs, jax.random.key(seed)
        self.obs, storage = self.script.rollout(policy_fn, *carry, self.env, self.args)
        return storage


class Equinox(Linen):
    jit = staticmethod(eqx.filter_jit)

    def get_tree(self) -> Any:
        return self.state.agent

    def set_tree(self, tree: Any) -> None:
        self.state = eqx.tree_at(lambda x: x.agent, self.state, tree)

    def grad(self, batch: Any) -> tuple:
        grad_fn = eqx.filter_value_and_grad(self.script.ppo_loss, has_aux=True)
        return self.jit(partial(grad_fn, args=self.args))(self.state.agent, batch)


# === PyTorch ====================================================================================
class Torch:
    """PyTorch version of Linen, without torch.compile."""

    def __init__(self, script: ModuleType, args: Any) -> None:
        self.script, self.args = script, args
        torch.manual_seed(args.seed)
        self.make_env()
        self.agent, optimizer = script.make_agent(args, *sizes(self.env), torch.device("cpu"))
        self.learning = [optimizer]
        if hasattr(script, "LambdaLR"):
            factor_fn = partial(script.learning_rate_factor, args=args)
            self.learning.append(script.LambdaLR(optimizer, factor_fn))
        self.policy_fn = partial(script.policy, self.agent)
        self.stats: list[Any] = []  # running statistics; empty in scripts without them
        if hasattr(script, "Stats"):
            self.stats.append(script.Stats(self.env.obs_shape))
            self.policy_fn = partial(script.policy, self.agent, self.stats[0].obs, args=args)

    def make_env(self) -> None:
        self.env = make_env(self.script, self.args)
        self.step_fn = jax.jit(self.env.step)
        obs, self.env_state = jax.jit(self.env.reset)(jax.random.PRNGKey(self.args.seed))
        self.obs = self.script.to_torch(obs)

    def tensors(self) -> list[torch.nn.Parameter]:
        return [x for _, x in sorted(self.agent.named_parameters())]

    def get_weights(self) -> Weights:
        return to_weights([x.detach().numpy().T for x in self.tensors()])

    @torch.no_grad()
    def set_weights(self, weights: Weights) -> None:
        for x, array in zip(self.tensors(), to_arrays(weights), strict=True):
            x.copy_(torch.tensor(array.T))

    def loss_and_grads(self, batch: tuple) -> tuple[float, Metrics, Weights]:
        batch = self.script.Batch(*map(torch.tensor, batch))
        loss, losses = self.script.ppo_loss(self.agent, batch, self.args)
        grads = torch.autograd.grad(loss, self.tensors())
        losses = floats({name: x.detach() for name, x in losses.items()})
        return loss.item(), losses, to_weights([x.numpy().T for x in grads])

    def orders(self, seed: int) -> list[np.ndarray]:
        """Return the permutations that update(..., seed) uses."""
        torch.manual_seed(seed)
        size = num_shuffled(self.args)
        return [torch.randperm(size).numpy() for _ in range(self.args.update_epochs)]

    def update(self, storage: tuple, seed: int) -> Metrics:
        torch.manual_seed(seed)
        storage = self.script.Storage(*map(torch.tensor, storage))
        trained = self.agent, *self.learning, *self.stats
        return floats(self.script.update(*trained, storage, self.args))

    def watch(self, storage: tuple) -> None:
        """Update the running statistics with a rollout, without training."""
        (stats,) = self.stats
        stats.obs.update(torch.tensor(storage[0]))
        stats.discounted_return.update(torch.tensor(storage[9]))

    def rollout(self, seed: int) -> Any:
        torch.manual_seed(seed)
        carry = self.obs, *initial_gru_state(self.args, torch.zeros), self.env_state
        new = self.script.rollout(self.policy_fn, *carry, self.step_fn, self.env, self.args)
        self.obs, *_, self.env_state, storage = new
        return storage


class TorchCompile(Torch):
    def __init__(self, script: ModuleType, args: Any) -> None:
        super().__init__(script, args)
        step = partial(script.minibatch_step, self.agent, *self.learning, args=args)
        self.learning.append(partial(script.epoch, step, args))


class TorchGymnasium(Torch):
    def make_env(self) -> None:
        self.env = make_env(self.script, self.args)
        self.obs = torch.from_numpy(self.env.reset())

    def rollout(self, seed: int) -> Any:
        torch.manual_seed(seed)
        self.obs, storage = self.script.rollout(self.policy_fn, self.obs, self.env, self.args)
        return storage


class TorchCompileGymnasium(TorchCompile, TorchGymnasium):
    pass


class TorchRecurrent(Torch):
    def tensors(self) -> list[torch.nn.Parameter]:
        named = dict(self.agent.named_parameters())
        names = [x for x in sorted(named) if "gru" not in x]
        names += [f"gru.{x}_{y}_l0" for y in ("ih", "hh") for x in ("bias", "weight")]
        return [named[x] for x in names]


LEARNERS: dict[str, Any] = {
    "ppo_linen": Linen,
    "ppo_linen_gymnasium": LinenGymnasium,
    "ppo_nnx": NNX,
    "ppo_nnx_tree": NNXTree,
    "ppo_nnx_gymnasium": NNXGymnasium,
    "ppo_equinox": Equinox,
    "ppo_torch": Torch,
    "ppo_torch_compile": TorchCompile,
    "ppo_torch_gymnasium": TorchGymnasium,
    "ppo_rnn_linen": Linen,
    "ppo_rnn_nnx": NNXTree,
    "ppo_rnn_equinox": Equinox,
    "ppo_rnn_torch": TorchRecurrent,
    "ppo_continuous_linen": Linen,
    "ppo_continuous_nnx": NNXTree,
    "ppo_continuous_equinox": Equinox,
    "ppo_continuous_torch": Torch,
    "ppo_continuous_linen_gymnasium": LinenGymnasium,
    "ppo_continuous_nnx_gymnasium": NNXGymnasium,
    "ppo_continuous_torch_gymnasium": TorchGymnasium,
    "ppo_continuous_torch_compile_gymnasium": TorchCompileGymnasium,
    "ppo_cnn_linen_gymnasium": LinenGymnasium,
    "ppo_cnn_nnx_gymnasium": NNXGymnasium,
    "ppo_cnn_torch_gymnasium": TorchGymnasium,
    "ppo_cnn_torch_compile_gymnasium": TorchCompileGymnasium,
}


def make_args(script: ModuleType, **flags: Any) -> Any:
    small: dict[str, Any] = {"num_envs": 4, "num_steps": 16, "num_minibatches": 4}
    small |= {"update_epochs": 2, "hidden_sizes": (8, 8), "total_timesteps": 640}
    return script.Args(**small | {"matmul_precision": "highest"} | flags)


def make_learner(name: str, **flags: Any) -> Any:
    """Return a learner for a script with small default hyperparameters, which flags override."""
    script = importlib.import_module(name)
    return LEARNERS[name](script, make_args(script, **flags))

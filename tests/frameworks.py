"""The PPO scripts behind one interface: NumPy in, NumPy out, always through their own functions.

Weights travel as {"actor": [(kernel, bias), ...], "critic": [...]}, kernels (inputs, outputs).
"""

import importlib
from functools import partial
from itertools import count, pairwise
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from sections import ALL_SCRIPTS, GYMNASIUM_SCRIPTS, JAX_SCRIPTS, SCRIPTS, TORCH_SCRIPTS

__all__ = ["ALL_SCRIPTS", "GYMNASIUM_SCRIPTS", "JAX_SCRIPTS", "SCRIPTS", "TORCH_SCRIPTS"]
__all__ += ["make_learner", "random_weights"]

Weights = dict[str, list[tuple[np.ndarray, np.ndarray]]]
Metrics = dict[str, float]


def random_weights(seed: int, obs_dim: int, hidden: tuple[int, ...], num_actions: int) -> Weights:
    rng = np.random.default_rng(seed)

    def layers(num_outputs: int) -> list[tuple[np.ndarray, np.ndarray]]:
        sizes = (obs_dim, *hidden, num_outputs)
        return [
            (rng.normal(size=(m, n)).astype("f") / np.sqrt(m), rng.normal(size=n).astype("f") / 10)
            for m, n in pairwise(sizes)
        ]

    return {"actor": layers(num_actions), "critic": layers(1)}


def floats(metrics: dict[str, Any]) -> Metrics:
    return {name: float(x) for name, x in metrics.items()}


class Linen:
    """A learner: agent, optimizer and environments, made by the script's functions."""

    def __init__(self, script: ModuleType, args: Any) -> None:
        self.script, self.args = script, args

    def start(self) -> None:
        script, args = self.script, self.args
        self.env = script.VecEnv(args.env_id, args.num_envs)
        self.key, agent_key, env_key = jax.random.split(jax.random.PRNGKey(args.seed), 3)
        self.state = script.make_agent(args, self.env, agent_key)
        self.rollout_fn = jax.jit(partial(script.rollout, env=self.env, args=args))
        self.update_fn = jax.jit(partial(script.update, args=args))
        self.obs, self.env_state = jax.jit(self.env.reset)(env_key)

    def get_weights(self) -> Weights:
        def layers(params: dict) -> list:
            dense = [params[f"Dense_{i}"] for i in range(len(params))]
            return [(np.array(x["kernel"]), np.array(x["bias"])) for x in dense]

        params = self.state.params["params"]
        return {name: layers(params[name]) for name in ("actor", "critic")}

    def set_weights(self, weights: Weights) -> None:
        params = {
            name: {
                f"Dense_{i}": {"kernel": jnp.array(kernel), "bias": jnp.array(bias)}
                for i, (kernel, bias) in enumerate(layers)
            }
            for name, layers in weights.items()
        }
        self.state = self.state.replace(params={"params": params})

    def loss_and_grads(self, batch: tuple) -> tuple[float, Metrics, Weights]:
        batch = self.script.Batch(*map(jnp.array, batch))
        loss_fn = partial(
            self.script.ppo_loss, apply_fn=self.state.apply_fn, batch=batch, args=self.args
        )
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, losses), grads = grad_fn(self.state.params)
        before, self.state = self.state, self.state.replace(params=grads)
        grads, self.state = self.get_weights(), before
        return float(loss), floats(losses), grads

    def gae(self, storage: tuple, value: np.ndarray, next_value: np.ndarray) -> np.ndarray:
        storage = self.script.Storage(*map(jnp.array, storage))
        arrays = storage, jnp.array(value), jnp.array(next_value)
        return np.array(self.script.compute_gae(*arrays, self.args))

    def draw_orders(self, key: jax.Array) -> list[np.ndarray]:
        """The permutations that update(..., key) shuffles by."""
        keys = jax.random.split(key, self.args.update_epochs)
        size = self.args.batch_size
        return [np.array(self.script.shuffle(key, size)).astype(int) for key in keys]

    def update(self, storage: tuple, key: jax.Array, orders: list[np.ndarray]) -> Metrics:
        storage = self.script.Storage(*map(jnp.array, storage))
        self.state, metrics = self.update_fn(self.state, storage, key)
        return floats(metrics)

    def rollout(self) -> Any:
        self.key, key = jax.random.split(self.key)
        self.obs, self.env_state, storage = self.rollout_fn(
            self.state, self.obs, self.env_state, key
        )
        return storage

    def iterate(self) -> Metrics:
        """One iteration of training."""
        storage = self.rollout()
        self.key, key = jax.random.split(self.key)
        self.state, metrics = self.update_fn(self.state, storage, key)
        return floats(metrics)

    def apply(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Action probabilities and values of obs."""
        logits, value = self.state.apply_fn(self.state.params, jnp.array(obs))
        return np.array(jax.nn.softmax(logits)), np.array(value)


def start_gymnasium(script: ModuleType, args: Any) -> tuple[Any, np.ndarray]:
    """The environments, ready for more steps than a test takes, and their first obs."""
    env = script.VecEnv(args.env_id, args.num_envs, args.vectorization, args.seed)
    return env, env.reset(num_steps=10_000)


class LinenGymnasium(Linen):
    def start(self) -> None:
        script, args = self.script, self.args
        self.env, self.obs = start_gymnasium(script, args)
        self.key, agent_key = jax.random.split(jax.random.PRNGKey(args.seed))
        self.state = script.make_agent(args, self.env, agent_key)
        self.policy_fn = jax.jit(partial(script.policy, apply_fn=self.state.apply_fn))
        self.update_fn = jax.jit(partial(script.update, args=args))

    def rollout(self) -> Any:
        self.key, key = jax.random.split(self.key)
        arguments = self.policy_fn, self.state.params, self.obs, key, self.env, self.args
        self.obs, storage = self.script.rollout(*arguments)
        return storage


class NNX(Linen):
    def start(self) -> None:
        script, args = self.script, self.args
        self.env = script.VecEnv(args.env_id, args.num_envs)
        self.key, agent_key, env_key = jax.random.split(jax.random.PRNGKey(args.seed), 3)
        self.agent, self.optimizer = script.make_agent(args, self.env, agent_key)
        jit = partial(nnx.jit, graph=True, graph_updates=True)
        wrap = nnx.cached_partial if script.__name__ == "ppo_nnx_cached" else partial
        self.rollout_fn = wrap(jit(partial(script.rollout, env=self.env, args=args)), self.agent)
        self.update_fn = wrap(jit(partial(script.update, args=args)), self.agent, self.optimizer)
        self.obs, self.env_state = jax.jit(self.env.reset)(env_key)

    def _layers(self, agent: Any) -> dict[str, list]:
        return {
            name: [*getattr(agent, name).hidden, getattr(agent, name).output]
            for name in ("actor", "critic")
        }

    def get_weights(self) -> Weights:
        return {
            name: [(np.array(x.kernel[...]), np.array(x.bias[...])) for x in layers]
            for name, layers in self._layers(self.agent).items()
        }

    def set_weights(self, weights: Weights) -> None:
        for name, layers in self._layers(self.agent).items():
            for layer, (kernel, bias) in zip(layers, weights[name], strict=True):
                layer.kernel[...], layer.bias[...] = jnp.array(kernel), jnp.array(bias)

    def loss_and_grads(self, batch: tuple) -> tuple[float, Metrics, Weights]:
        batch = self.script.Batch(*map(jnp.array, batch))
        loss_fn = partial(self.script.ppo_loss, batch=batch, args=self.args)
        (loss, losses), grads = nnx.value_and_grad(loss_fn, has_aux=True)(self.agent)
        copy = nnx.clone(self.agent)
        nnx.update(copy, grads)
        before, self.agent = self.agent, copy
        grads, self.agent = self.get_weights(), before
        return float(loss), floats(losses), grads

    def update(self, storage: tuple, key: jax.Array, orders: list[np.ndarray]) -> Metrics:
        storage = self.script.Storage(*map(jnp.array, storage))
        return floats(self.update_fn(storage, key))

    def rollout(self) -> Any:
        self.key, key = jax.random.split(self.key)
        self.obs, self.env_state, storage = self.rollout_fn(self.obs, self.env_state, key)
        return storage

    def iterate(self) -> Metrics:
        storage = self.rollout()
        self.key, key = jax.random.split(self.key)
        return floats(self.update_fn(storage, key))

    def apply(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits, value = self.agent(jnp.array(obs))
        return np.array(jax.nn.softmax(logits)), np.array(value)


class NNXTree(NNX):
    def start(self) -> None:
        super().start()
        script, args = self.script, self.args
        jit = partial(nnx.jit_partial, graph=False)
        self.rollout_fn = jit(partial(script.rollout, env=self.env, args=args), self.agent)
        self.update_fn = jit(partial(script.update, args=args), self.agent, self.optimizer)


class Equinox(Linen):
    def start(self) -> None:
        super().start()
        script, args = self.script, self.args
        self.rollout_fn = eqx.filter_jit(partial(script.rollout, env=self.env, args=args))
        self.update_fn = eqx.filter_jit(partial(script.update, args=args))

    def _layers(self, agent: Any) -> dict[str, list]:
        return {name: [*x.hidden, x.output] for name, x in vars(agent).items()}

    def get_weights(self, agent: Any = None) -> Weights:
        return {
            name: [(np.array(x.weight), np.array(x.bias)) for x in layers]
            for name, layers in self._layers(agent or self.state.agent).items()
        }

    def set_weights(self, weights: Weights) -> None:
        leaves = [
            jnp.array(x)
            for layers in weights.values()
            for kernel, bias in layers
            for x in (bias, kernel)
        ]
        agent = jax.tree.unflatten(jax.tree.structure(self.state.agent), leaves)
        self.state = eqx.tree_at(lambda x: x.agent, self.state, agent)

    def loss_and_grads(self, batch: tuple) -> tuple[float, Metrics, Weights]:
        batch = self.script.Batch(*map(jnp.array, batch))
        grad_fn = eqx.filter_value_and_grad(self.script.ppo_loss, has_aux=True)
        (loss, losses), grads = grad_fn(self.state.agent, batch, self.args)
        return float(loss), floats(losses), self.get_weights(grads)

    def apply(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits, value = jax.vmap(self.state.agent)(jnp.array(obs))
        return np.array(jax.nn.softmax(logits)), np.array(value)


class Torch:
    compiled = False  # by torch.compile, which takes many seconds

    def __init__(self, script: ModuleType, args: Any) -> None:
        self.script, self.args = script, args

    def start(self) -> None:
        script, args = self.script, self.args
        self.env = script.VecEnv(args.env_id, args.num_envs)
        torch.manual_seed(args.seed)
        self.agent, adam = script.make_agent(args, self.env, torch.device("cpu"))
        self.step_fn = jax.jit(self.env.step)
        self.policy_fn = partial(script.policy, self.agent)
        if script.__name__ == "ppo_torch":
            step = partial(script.minibatch_step, self.agent, adam, count())
            minibatch_fn = partial(step, args=args)
        else:
            minibatch_fn = partial(script.minibatch_step, self.agent, adam, args=args)
        if self.compiled and script.__name__ == "ppo_torch_compile":
            torch.compiler.reset()
            self.policy_fn = script.compile_graph(self.policy_fn, gpu=None)
            minibatch_fn = script.compile_graph(minibatch_fn, gpu=None)
        self.epoch_fn = partial(script.epoch, minibatch_fn, args=args)
        obs, self.env_state = jax.jit(self.env.reset)(jax.random.PRNGKey(args.seed))
        self.obs = script.to_torch(obs)

    def _layers(self) -> dict[str, list]:
        networks = {"actor": self.agent.actor, "critic": self.agent.critic}
        return {name: [*x.hidden, x.output] for name, x in networks.items()}

    def get_weights(self) -> Weights:
        return {
            name: [(x.weight.detach().numpy().T.copy(), x.bias.detach().numpy().copy()) for x in xs]
            for name, xs in self._layers().items()
        }

    @torch.no_grad()
    def set_weights(self, weights: Weights) -> None:
        for name, layers in self._layers().items():
            for layer, (kernel, bias) in zip(layers, weights[name], strict=True):
                layer.weight.copy_(torch.tensor(kernel.T))
                layer.bias.copy_(torch.tensor(bias))

    def loss_and_grads(self, batch: tuple) -> tuple[float, Metrics, Weights]:
        batch = self.script.Batch(*map(torch.tensor, batch))
        loss, losses = self.script.ppo_loss(self.agent, batch, self.args)
        self.agent.zero_grad()
        loss.backward()
        grads = {
            name: [(x.weight.grad.numpy().T.copy(), x.bias.grad.numpy().copy()) for x in xs]
            for name, xs in self._layers().items()
        }
        self.agent.zero_grad()
        return loss.item(), floats(losses), grads

    def gae(self, storage: tuple, value: np.ndarray, next_value: np.ndarray) -> np.ndarray:
        storage = self.script.Storage(*map(torch.tensor, storage))
        arrays = storage, torch.tensor(value), torch.tensor(next_value)
        return self.script.compute_gae(*arrays, self.args).numpy()

    def update(self, storage: tuple, key: jax.Array, orders: list[np.ndarray]) -> Metrics:
        storage = self.script.Storage(*map(torch.tensor, storage))
        draws, randperm = iter(orders), torch.randperm

        def draw(size: int, **kwargs: Any) -> torch.Tensor:
            # The compiler calls randperm too, for patterns of other sizes.
            ours = size == self.args.batch_size
            return torch.tensor(next(draws)) if ours else randperm(size, **kwargs)

        torch.randperm = draw  # ty: ignore[invalid-assignment]
        try:
            return floats(self.script.update(self.agent, self.epoch_fn, storage, self.args))
        finally:
            torch.randperm = randperm

    def rollout(self) -> Any:
        self.obs, self.env_state, storage = self.script.rollout(
            *(self.policy_fn, self.obs, self.env_state, self.step_fn, self.env, self.args)
        )
        return storage

    def iterate(self) -> Metrics:
        storage = self.rollout()
        return floats(self.script.update(self.agent, self.epoch_fn, storage, self.args))

    @torch.no_grad()
    def apply(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits, value = self.agent(torch.tensor(obs))
        return logits.softmax(-1).numpy(), value.numpy()


class TorchGymnasium(Torch):
    def start(self) -> None:
        script, args = self.script, self.args
        torch.manual_seed(args.seed)
        self.env, obs = start_gymnasium(script, args)
        self.agent, adam = script.make_agent(args, self.env, torch.device("cpu"))
        self.policy_fn = partial(script.policy, self.agent)
        step = partial(script.minibatch_step, self.agent, adam, count())
        self.epoch_fn = partial(script.epoch, partial(step, args=args), args=args)
        self.obs = torch.from_numpy(obs)

    def rollout(self) -> Any:
        arguments = self.policy_fn, self.obs, self.env, self.args
        self.obs, storage = self.script.rollout(*arguments)
        return storage


LEARNERS: dict[str, Any] = {"ppo_linen": Linen, "ppo_nnx": NNX, "ppo_nnx_cached": NNX}
LEARNERS |= {"ppo_nnx_tree": NNXTree, "ppo_equinox": Equinox}
LEARNERS |= {"ppo_linen_gymnasium": LinenGymnasium, "ppo_torch_gymnasium": TorchGymnasium}


def make_learner(name: str, start: bool = True, compiled: bool = False, **flags: Any) -> Any:
    """The learner of script name, with small defaults that flags override.

    JAX always compiles it; PyTorch does so if that is asked for, and if the script does.
    """
    script = importlib.import_module(name)
    small: dict[str, Any] = {"num_envs": 4, "num_steps": 16, "num_minibatches": 4}
    small |= {"update_epochs": 2}
    small |= {"hidden_sizes": (8, 8), "total_timesteps": 640, "matmul_precision": "highest"}
    learner = LEARNERS.get(name, Torch)(script, script.Args(**small | flags))
    learner.compiled = compiled
    if start:
        learner.start()
    return learner

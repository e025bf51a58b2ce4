"""Time the parts of an SAC step in Linen: acting, environment, replay buffer and update.

    taskset --cpu-list 0 python -m studies.limits.sac > studies/limits/sac.jsonl    # a minute

It uses HalfCheetah-v5 and the mujoco preset: two layers of 256 units, and an update of 256
transitions after each step. Each line of JSON contains the median time of one part in
microseconds. "products" is only the matrix products of an update, and "gradient" is an update
without Adam and the target critics.
"""

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.machine import describe
from more import sac_linen_gymnasium as sac

CALLS = 300
WIDTH, BATCH = 256, 256


def products(obs_dim: int, action_dim: int) -> Counter[tuple[int, int, int]]:
    """Return the number of products (m, k) x (k, n) in an update, for each (m, k, n)."""
    actor = [(obs_dim, WIDTH), (WIDTH, WIDTH), (WIDTH, 2 * action_dim)]
    critic = [(obs_dim + action_dim, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)]
    found: Counter[tuple[int, int, int]] = Counter()
    # Network, and number of forward passes, weight gradients, and input gradients (for all layers
    # except the first, then for the first).
    for layers, forward, weights, inputs, inputs_first in (
        # The actor runs on next_obs and obs; only the pass on obs (actor loss) is differentiated.
        (actor, 2, 1, 1, 0),
        # Two critics, in the target, the critic loss and the actor loss. The actor loss needs the
        # gradient of the action, but no weight gradients.
        (critic, 2 * 3, 2, 2 * 2, 2),
    ):
        for number, (k, n) in enumerate(layers):
            found[BATCH, k, n] += forward
            found[k, BATCH, n] += weights
            found[BATCH, n, k] += inputs_first if number == 0 else inputs
    return found


def run_products(inputs: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
    """Compute all products in sequence, looping over the first axis of each pair of inputs."""
    return [jax.lax.map(lambda pair: pair[0] @ pair[1], pair) for pair in inputs]


def median(run: Callable[[], Any]) -> float:
    """Return the median duration of a call in microseconds, after some warm-up calls."""
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds[CALLS // 10 :])


def main() -> None:
    args = sac.Args(
        env_id="HalfCheetah-v5",
        num_envs=1,
        buffer_size=10_000,
        batch_size=BATCH,
        hidden_sizes=(WIDTH, WIDTH),
    )
    env = sac.VecEnv(args.env_id, 1, "sync", 1)
    replay = sac.Replay(args, env.obs_shape, env.obs_dtype, env.action_dim)
    rng = np.random.default_rng(1)
    obs = env.reset(0)
    for _ in range(1_000):
        action = rng.uniform(-1, 1, (1, env.action_dim)).astype(np.float32)
        new_obs, result = env.step(action)
        replay.add(obs, action, result)
        obs = new_obs
    train_state = sac.make_agent(args, env.obs_shape, env.action_dim, jax.random.PRNGKey(1))
    batch = replay.sample(rng, BATCH)
    noise = rng.standard_normal((2, *batch.action.shape), np.float32)
    losses = ("td_loss", "q_value", "actor_loss", "entropy", "alpha")
    sums = {f"losses/{name}": jnp.zeros(()) for name in losses}
    update_fn = jax.jit(partial(sac.update, args=args))
    loss_fn = partial(sac.sac_loss, args=args)
    gradient_fn = jax.jit(jax.grad(loss_fn, has_aux=True))
    act_fn = jax.jit(sac.act)
    pairs = [
        (jnp.ones((count, m, k)), jnp.ones((count, k, n)))
        for (m, k, n), count in products(math.prod(env.obs_shape), env.action_dim).items()
        if count
    ]
    products_fn = jax.jit(run_products)
    parts: dict[str, Callable[[], Any]] = {
        "act": lambda: np.asarray(act_fn(train_state, obs, noise[0, :1])),
        "environment": lambda: env.step(action),
        "replay": lambda: (replay.add(obs, action, result), replay.sample(rng, BATCH)),
        "noise": lambda: rng.standard_normal((2, *batch.action.shape), np.float32),
        "update": lambda: update_fn(train_state, sums, batch, noise, 3e-4),
        "gradient": lambda: gradient_fn(train_state.params, train_state, batch, noise),
        "products": lambda: products_fn(pairs),
    }
    machine = describe()
    for name, run in parts.items():
        row = {"part": name, "microseconds": median(run)}
        print(json.dumps(row | {"cpu": machine["cpu"], "load": machine["load"]}), flush=True)


if __name__ == "__main__":
    main()

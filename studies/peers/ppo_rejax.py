# /// script
# requires-python = ">=3.11"
# dependencies = ["rejax==0.1.3", "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "distrax==0.1.9",
#   "gymnax==0.0.9", "gymnasium==1.3.0", "numpy==2.4.6", "six==1.17.0",
#   "tfp-nightly==0.26.0.dev20261027"]
# ///
"""Train rejax's PPO, set up as in its documentation, with our hyperparameters.

    uv run studies/peers/ppo_rejax.py --env-id CartPole-v1 --seed 1
    ./benchmark.sh peers

Differences from our script: a truncation counts as a termination; gradients are clipped by value
instead of by norm; Adam's epsilon is 1e-8; actor and critic have separate optimizers; weights
are not initialized orthogonally.

The training run is one compiled call. The eval_callback of the library runs once per iteration
and calls Python through jax.experimental.io_callback, as its documentation shows; an iteration
lasts from one such call to the next. No evaluation episodes are played. The first iteration
includes compilation, as in our scripts. rejax needs gymnax before version 1.0.
"""

from typing import Any, NamedTuple

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback
from peer import BATCH_SIZE, RunLog, num_iterations, parse_args
from rejax import PPO


class State(NamedTuple):
    inner: Any
    now: jax.Array  # (2,): return and length of the current episode
    ended: jax.Array  # (3,): number, and sums of returns and lengths, of finished episodes


class Counted:
    """gymnax environment that counts episodes and sums their returns, which rejax does not do."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.default_params = env.default_params
        self.observation_space = env.observation_space
        self.action_space = env.action_space

    def reset(self, key, params):
        obs, inner = self.env.reset(key, params)
        return obs, State(inner, jnp.zeros(2), jnp.zeros(3))

    def step(self, key, state, action, params):
        obs, inner, reward, done, info = self.env.step(key, state.inner, action, params)
        now = state.now + jnp.array([reward, 1.0])
        ended = state.ended + jnp.where(done, jnp.append(1, now), 0)
        return obs, State(inner, jnp.where(done, 0, now), ended), reward, done, info


def main() -> None:
    args = parse_args("rejax")
    log = RunLog(args, "jit")
    before = np.zeros(3)

    def report(ended, params) -> None:
        nonlocal before
        episodes, returns, lengths = (ended - before).tolist()
        before = ended
        charts = {"charts/episodes": episodes}
        charts["charts/episodic_return"] = returns / episodes if episodes else None
        charts["charts/episodic_length"] = lengths / episodes if episodes else None
        log.write(charts)

    def eval_callback(algo, state, rng):
        # Pass the parameters to the callback, so that it runs after the update.
        params = (state.actor_ts.params, state.critic_ts.params)
        io_callback(report, None, state.env_state.ended.sum(0), params, ordered=True)
        return ()

    env, _ = gymnax.make(args.env_id)
    updates = num_iterations(args) * args.update_epochs * args.num_minibatches
    algo = PPO.create(
        env=Counted(env),
        agent_kwargs={"hidden_layer_sizes": args.hidden_sizes, "activation": "tanh"},
        total_timesteps=num_iterations(args) * BATCH_SIZE,
        learning_rate=optax.linear_schedule(args.learning_rate, 0.0, updates),
        num_envs=args.num_envs,
        num_steps=args.num_steps,
        num_minibatches=args.num_minibatches,
        num_epochs=args.update_epochs,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_eps=args.clip_coef,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef,
        max_grad_norm=args.max_grad_norm,
        eval_freq=BATCH_SIZE,
        skip_initial_evaluation=True,
    )
    algo = algo.replace(eval_callback=eval_callback)
    jax.block_until_ready(jax.jit(algo.train)(jax.random.PRNGKey(args.seed)))
    log.finish()


if __name__ == "__main__":
    main()

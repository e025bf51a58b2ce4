# /// script
# requires-python = ">=3.11"
# dependencies = ["rejax==0.1.3", "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "distrax==0.1.9",
#   "gymnax==0.0.9", "gymnasium==1.3.0", "numpy==2.4.6", "six==1.17.0",
#   "tfp-nightly==0.26.0.dev20261027"]
# ///
"""A peer: rejax's PPO and SAC in gymnax's Pendulum-v1, by the settings of ours.

    uv run --script studies/control/peers/jax_rejax.py ppo
    uv run --script studies/control/peers/jax_rejax.py sac

It prints a line of JSON. The whole training is one compiled call, without evaluations. It is
compiled ("first" are these seconds), then called once; "iteration" is the call's time divided by
the number of iterations.

Both differ in these: a truncation counts as a termination; each gradient is clipped, and not their
norm; Adam's epsilon is 1e-8; actor and critic have an optimizer each. SAC has ReLU, as ours; its
replay is filled by the policy, and not at random.
"""

import argparse
import json
import time

import gymnax
import jax
import optax
from rejax import PPO, SAC


def make_ppo(num_iterations: int):
    """As ppo_continuous_linen.py: 16 environments, 256 steps, 10 epochs of 32 minibatches."""
    steps = 16 * 256
    env, params = gymnax.make("Pendulum-v1")
    algo = PPO.create(
        env=env,
        env_params=params,
        agent_kwargs={"hidden_layer_sizes": (64, 64), "activation": "tanh"},
        total_timesteps=num_iterations * steps,
        learning_rate=optax.linear_schedule(3e-4, 0.0, num_iterations * 10 * 32),
        num_envs=16,
        num_steps=256,
        num_minibatches=32,
        num_epochs=10,
        gamma=0.99,
        gae_lambda=0.95,
        clip_eps=0.2,
        ent_coef=0.0,
        vf_coef=0.5,
        max_grad_norm=0.5,
        normalize_observations=True,
        normalize_rewards=True,
        eval_freq=steps,
        skip_initial_evaluation=True,
    )
    return algo, steps


def make_sac(num_iterations: int):
    """As sac_linen.py: 4 environments, an update of 64 transitions every second step."""
    steps = 4 * 200
    env, params = gymnax.make("Pendulum-v1")
    algo = SAC.create(
        env=env,
        env_params=params,
        agent_kwargs={"activation": "relu"},
        hidden_layer_sizes=(64, 64),
        total_timesteps=num_iterations * steps,
        learning_rate=3e-3,
        num_envs=4,
        num_epochs=2,
        batch_size=64,
        buffer_size=100_000,
        fill_buffer=1_000,
        gamma=0.99,
        polyak=0.99,
        eval_freq=steps,
        skip_initial_evaluation=True,
    )
    return algo, steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("algorithm", choices=["ppo", "sac"])
    parser.add_argument("--iterations", type=int, default=25)
    args = parser.parse_args()
    make = make_ppo if args.algorithm == "ppo" else make_sac
    algo, steps = make(args.iterations)
    algo = algo.replace(eval_callback=lambda algo, state, key: ())
    key = jax.random.PRNGKey(1)
    start = time.perf_counter()
    program = jax.jit(algo.train).lower(key).compile()
    compiled = time.perf_counter()
    jax.block_until_ready(program(key))
    iteration = (time.perf_counter() - compiled) / args.iterations
    row = {
        "script": f"rejax_{args.algorithm}",
        "env_id": "Pendulum-v1",
        "steps": steps,
        "first": round(compiled - start, 3),
        "iteration": round(iteration, 5),
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

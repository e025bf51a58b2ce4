# /// script
# requires-python = ">=3.11"
# dependencies = ["jaxnasium[algs]==0.1.1", "jax==0.10.2", "equinox==0.13.8", "optax==0.2.8",
#   "distrax==0.1.9", "numpy==2.4.6", "tfp-nightly==0.26.0.dev20261027"]
# ///
"""Train jaxnasium's PPO in its environments, set up as documented, with our hyperparameters.

    uv run studies/peers/ppo_jaxnasium.py --env-id CartPole-v1 --seed 1
    ./benchmark.sh peers

Differences from our script: Adam's epsilon is 1e-4, and there is one warm-up step.

The training run is one compiled call. The library calls its log_function once per iteration,
with the results of the rollout; an iteration lasts from one such call to the next. The first
iteration includes compilation, as in our scripts.
"""

import jax
import jaxnasium as jym
import numpy as np
from jaxnasium.algorithms import PPO
from jaxnasium.algorithms.architectures import MLP
from peer import BATCH_SIZE, RunLog, describe, num_iterations, parse_args


def main() -> None:
    args = parse_args("jaxnasium")
    log = RunLog(args, "jit")

    def report(info, iteration) -> None:
        ended = np.asarray(info["returned_episode"])
        returns = np.asarray(info["returned_episode_returns"])[ended]
        log.write(describe(returns, np.asarray(info["returned_episode_lengths"])[ended]))

    body = MLP.with_params(hidden_sizes=tuple(args.hidden_sizes), activation=jax.nn.tanh)
    algorithm = PPO(
        total_timesteps=num_iterations(args) * BATCH_SIZE,
        learning_rate_start=args.learning_rate,
        learning_rate_end=0.0,
        num_envs=args.num_envs,
        num_steps=args.num_steps,
        num_minibatches=args.num_minibatches,
        num_epochs=args.update_epochs,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_coef=args.clip_coef,
        clip_coef_vf=args.clip_coef,
        ent_coef_start=args.ent_coef,
        ent_coef_end=None,
        vf_coef=args.vf_coef / 2,  # jaxnasium's value loss has no factor of 1/2
        max_grad_norm=args.max_grad_norm,
        warmup_steps=0,
        normalize_observations=False,
        normalize_rewards=False,
        actor_kwargs={"body": body},
        critic_kwargs={"body": body},
        log_function=report,
        log_interval=1,
    )
    env = jym.make(args.env_id)
    jax.block_until_ready(algorithm.train(jax.random.PRNGKey(args.seed), env)[1])
    log.finish()


if __name__ == "__main__":
    main()

# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["brax==0.14.2", "jax==0.7.2", "flax==0.12.0", "optax==0.2.6", "mujoco==3.3.7",
#   "mujoco-mjx==3.3.7"]
# ///
"""Train brax's PPO or SAC on brax's HalfCheetah with spring physics, with our hyperparameters.

    uv run --script studies/brax/peers/jax_brax.py ppo --num-envs 256

Prints a line of JSON. "first" is the duration in seconds of the first iteration, which compiles;
"iteration" is the median duration of the later ones. Both are reported by the library and exclude
its evaluations, which SAC cannot switch off. brax 0.14.2 calls a function that JAX removed after
0.9, so it needs an older version of JAX than our scripts.

Differences from our PPO: a minibatch consists of full rollouts from some environments; rewards are
not scaled; the learning rate is constant; actions are squashed by tanh; values are not clipped;
Adam's epsilon is 1e-8. Differences from our SAC: the replay buffer stores float32 transitions;
each iteration ends with an evaluation.
"""

import argparse
import functools
import json
import statistics

from brax import envs
from brax.training.agents.ppo import networks as ppo_networks
from brax.training.agents.ppo import train as ppo
from brax.training.agents.sac import networks as sac_networks
from brax.training.agents.sac import train as sac

EPISODE = 1_000
MINIBATCHES, EPOCHS = 8, 10
TRAIN_FREQUENCY = 8  # environment steps per SAC update


def train_ppo(args: argparse.Namespace, progress_fn) -> None:
    steps = args.num_envs * args.num_steps
    ppo.train(
        environment=envs.get_environment("halfcheetah", backend="spring"),
        num_timesteps=steps * (args.iterations + 1),
        num_evals=args.iterations + 2,  # an iteration precedes each evaluation except the first
        run_evals=False,
        episode_length=EPISODE,
        num_envs=args.num_envs,
        unroll_length=args.num_steps,
        batch_size=args.num_envs // MINIBATCHES,
        num_minibatches=MINIBATCHES,
        num_updates_per_batch=EPOCHS,
        learning_rate=3e-4,
        entropy_cost=0.0,
        discounting=0.99,
        gae_lambda=0.95,
        clipping_epsilon=0.2,
        max_grad_norm=0.5,
        normalize_observations=True,
        network_factory=functools.partial(
            ppo_networks.make_ppo_networks,
            policy_hidden_layer_sizes=(64, 64),
            value_hidden_layer_sizes=(64, 64),
        ),
        progress_fn=progress_fn,
        seed=1,
    )


def train_sac(args: argparse.Namespace, progress_fn) -> None:
    steps = args.num_envs * args.num_steps
    sac.train(
        environment=envs.get_environment("halfcheetah", backend="spring"),
        num_timesteps=steps * (args.iterations + 2),
        num_evals=args.iterations + 2,
        num_eval_envs=1,
        episode_length=EPISODE,
        num_envs=args.num_envs,
        min_replay_size=steps,
        max_replay_size=100_000,
        batch_size=256,
        grad_updates_per_step=args.num_envs // TRAIN_FREQUENCY,
        learning_rate=3e-4,
        discounting=0.99,
        tau=0.005,
        network_factory=functools.partial(
            sac_networks.make_sac_networks, hidden_layer_sizes=(256, 256)
        ),
        progress_fn=progress_fn,
        seed=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("algorithm", choices=["ppo", "sac"])
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--num-steps", type=int, default=32, help="steps per environment")
    parser.add_argument("--iterations", type=int, default=3, help="iterations after the first")
    args = parser.parse_args()
    if args.num_envs < 1 or args.num_envs % MINIBATCHES:
        parser.error(f"--num-envs must be a multiple of {MINIBATCHES}")
    steps = args.num_envs * args.num_steps
    seconds = []

    def progress(_, metrics):
        if "training/sps" in metrics:  # absent from the evaluation before training
            seconds.append(steps / float(metrics["training/sps"]))

    train = train_ppo if args.algorithm == "ppo" else train_sac
    train(args, progress)
    row = {
        "script": f"brax_{args.algorithm}",
        "env_id": "halfcheetah, spring",
        "num_envs": args.num_envs,
        "num_steps": args.num_steps,
        "first": round(seconds[0], 3),
        "iteration": round(statistics.median(seconds[1:]), 5),
        "steps_per_second": round(steps / statistics.median(seconds[1:])),
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

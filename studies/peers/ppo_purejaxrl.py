# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "distrax==0.1.9", "gymnax==0.0.9",
#   "gymnasium==1.3.0", "brax==0.14.2", "mujoco==3.3.7", "mujoco-mjx==3.3.7", "navix==0.7.4",
#   "numpy==2.4.6", "six==1.17.0", "tfp-nightly==0.26.0.dev20261027"]
# ///
"""Run PureJaxRL's unmodified ppo.py from your checkout, with our hyperparameters in its config.

    git clone https://github.com/luchris429/purejaxrl ../purejaxrl
    git -C ../purejaxrl checkout 31756b197773a52db763fdbe6d635e4b46522a73
    uv run studies/peers/ppo_purejaxrl.py --env-id CartPole-v1 --seed 1
    ./benchmark.sh peers

Differences from our script: a truncation counts as a termination, and the learning rate decays per
iteration.

The training run is one compiled call, which reports nothing before its end. The time of an
iteration is the time of the call divided by the number of iterations; the first also includes
compilation, as in our scripts. The file needs gymnax before version 1.0, and imports brax and
navix, which CartPole does not use.
"""

import runpy
import sys
import time

import foreign
import jax
import numpy as np
from peer import BATCH_SIZE, RunLog, describe, num_iterations, parse_args

REPOSITORY = "luchris429/purejaxrl"
COMMIT = "31756b197773a52db763fdbe6d635e4b46522a73"


def main() -> None:
    args = parse_args("purejaxrl", checkout=("../purejaxrl", "PureJaxRL checkout"))
    file = foreign.find(args, REPOSITORY, COMMIT, "purejaxrl/ppo.py")
    sys.path.append(str(file.parent))  # for the wrappers that the file imports
    make_train = runpy.run_path(str(file))["make_train"]
    log = RunLog(args, "jit")
    foreign.record(log, REPOSITORY, COMMIT)
    config = {
        "LR": args.learning_rate,
        "NUM_ENVS": args.num_envs,
        "NUM_STEPS": args.num_steps,
        "TOTAL_TIMESTEPS": num_iterations(args) * BATCH_SIZE,
        "UPDATE_EPOCHS": args.update_epochs,
        "NUM_MINIBATCHES": args.num_minibatches,
        "GAMMA": args.gamma,
        "GAE_LAMBDA": args.gae_lambda,
        "CLIP_EPS": args.clip_coef,
        "ENT_COEF": args.ent_coef,
        "VF_COEF": args.vf_coef,
        "MAX_GRAD_NORM": args.max_grad_norm,
        "ACTIVATION": "tanh",
        "ENV_NAME": args.env_id,
        "ANNEAL_LR": args.anneal_lr,
        "DEBUG": False,
    }
    train = make_train(config)
    key = jax.random.PRNGKey(args.seed)
    log.begin()
    program = jax.jit(train).lower(key).compile()
    compiled = time.perf_counter()
    out = jax.block_until_ready(program(key))
    end = time.perf_counter()

    info = jax.device_get(out["metrics"])  # each (num_iterations, num_steps, num_envs)
    marks = np.linspace(compiled, end, num_iterations(args) + 1)[1:].tolist()
    for iteration, mark in enumerate(marks):
        ended = info["returned_episode"][iteration]
        returns = info["returned_episode_returns"][iteration][ended]
        log.write(describe(returns, info["returned_episode_lengths"][iteration][ended]), mark)
    log.finish()


if __name__ == "__main__":
    main()

# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["jax==0.7.2", "flax==0.12.0", "optax==0.2.6", "distrax==0.1.7", "gymnax==0.0.9",
#   "brax==0.14.2", "navix==0.7.4", "mujoco==3.3.7", "mujoco-mjx==3.3.7"]
# ///
"""Run PureJaxRL's unmodified ppo_continuous_action.py from your checkout, with our hyperparameters.

    git clone https://github.com/luchris429/purejaxrl ../purejaxrl
    git -C ../purejaxrl checkout 31756b197773a52db763fdbe6d635e4b46522a73
    uv run --script studies/brax/peers/jax_purejaxrl.py --checkout ../purejaxrl --num-envs 256

Trains on brax's HalfCheetah. The file supports only brax environments, always with positional
physics; here the default backend of its wrapper is changed to spring. Its networks always have two
layers of 256 units, so run our script with --hidden-sizes 256 256. Differences from our script: a
truncation counts as a termination; running statistics are updated at each step.

Prints a line of JSON. The training run is one compiled call; its time is divided by the number
of iterations; "first" is the time to compile.
"""

import argparse
import json
import runpy
import subprocess
import sys
import time
from pathlib import Path

import jax

COMMIT = "31756b197773a52db763fdbe6d635e4b46522a73"
FILE = "purejaxrl/ppo_continuous_action.py"


def find(checkout: Path) -> Path:
    """Return the file in an unmodified checkout of COMMIT, or exit."""
    git = ["git", "-C", str(checkout)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True).returncode
    if head.stdout.strip() != COMMIT or changed:
        print(
            f"--checkout: {checkout} is not an unmodified checkout of {COMMIT[:9]}", file=sys.stderr
        )
        sys.exit(2)
    return checkout / FILE


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkout", type=Path, default=Path("../purejaxrl"))
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--num-steps", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=3)
    args = parser.parse_args()
    file = find(args.checkout)
    sys.path.append(str(file.parent))  # for the wrappers that the file imports
    import wrappers

    wrappers.BraxGymnaxWrapper.__init__.__defaults__ = ("spring",)
    make_train = runpy.run_path(str(file))["make_train"]
    steps = args.num_envs * args.num_steps
    config = {
        "LR": 3e-4,
        "NUM_ENVS": args.num_envs,
        "NUM_STEPS": args.num_steps,
        "TOTAL_TIMESTEPS": steps * args.iterations,
        "UPDATE_EPOCHS": 10,
        "NUM_MINIBATCHES": 8,
        "GAMMA": 0.99,
        "GAE_LAMBDA": 0.95,
        "CLIP_EPS": 0.2,
        "ENT_COEF": 0.0,
        "VF_COEF": 0.5,
        "MAX_GRAD_NORM": 0.5,
        "ACTIVATION": "tanh",
        "ENV_NAME": "halfcheetah",
        "ANNEAL_LR": True,
        "NORMALIZE_ENV": True,
        "DEBUG": False,
    }
    key = jax.random.PRNGKey(1)
    start = time.perf_counter()
    program = jax.jit(make_train(config)).lower(key).compile()
    compiled = time.perf_counter()
    jax.block_until_ready(program(key))
    iteration = (time.perf_counter() - compiled) / args.iterations
    row = {
        "script": "purejaxrl_ppo",
        "env_id": "halfcheetah, spring",
        "num_envs": args.num_envs,
        "num_steps": args.num_steps,
        "first": round(compiled - start, 3),
        "iteration": round(iteration, 5),
        "steps_per_second": round(steps / iteration),
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

# /// script
# requires-python = ">=3.11"
# dependencies = ["rltools[mkl]==2.2.1", "gymnasium[mujoco]==1.3.0", "mujoco==4.0.0",
#   "numpy==2.4.6"]
# ///
"""Train the PPO of RLtools, a C++ library, with the shared settings.

    uv run studies/control/peers/ppo_rltools.py --total-timesteps 20480
    uv run studies/control/peers/ppo_rltools.py --env-id pendulum --num-envs 16 --num-steps 256

RLtools compiles the training loop at the first run, which takes about a minute and needs a C++
compiler and the Python headers. The environments are Gymnasium's, stepped in sequence from C++.
The id pendulum selects the pendulum of RLtools, in C++, through environment.h.

Differences from our script: observations and rewards are not normalized; the value loss and the
norm of the gradient are not clipped; the actor and the critic have separate optimizers, with a
constant learning rate; weights are not initialized orthogonally; the last step of a truncated
episode has advantage 0.
"""

from functools import partial
from pathlib import Path

import flags
import gymnasium
import numpy as np
from rltools import PPO


def main() -> None:
    args = flags.ppo().parse_args()

    def make_env() -> gymnasium.Env:
        env = gymnasium.make(args.env_id)
        clip = partial(np.clip, a_min=-1, a_max=1)  # ClipAction would change the action space
        return gymnasium.wrappers.TransformAction(env, clip, env.action_space)

    in_cpp = {"path": str(Path(__file__).parent), "action_dim": 1, "observation_dim": 3}
    batch_size = args.num_envs * args.num_steps
    trainer = PPO(
        in_cpp if args.env_id == "pendulum" else make_env,
        interface_name=args.env_id.replace("-", "_"),
        enable_evaluation=False,
        STEP_LIMIT=args.total_timesteps // batch_size,
        N_ENVIRONMENTS=args.num_envs,
        ON_POLICY_RUNNER_STEPS_PER_ENV=args.num_steps,
        BATCH_SIZE=batch_size // args.num_minibatches,
        N_EPOCHS=10,
        GAMMA=0.99,
        LAMBDA=0.95,
        EPSILON_CLIP=0.2,
        INITIAL_ACTION_STD=1.0,
        ACTION_ENTROPY_COEFFICIENT=0.0,
        ACTOR_ACTIVATION_FUNCTION="TANH",
        CRITIC_ACTIVATION_FUNCTION="TANH",
        OPTIMIZER_ALPHA=3e-4,
        OPTIMIZER_EPSILON=1e-5,
    )
    state = trainer.State(args.seed)
    for iteration in range(1, args.total_timesteps // batch_size + 1):
        state.step()  # a rollout and its update
        print(f"{iteration} iterations", flush=True)


if __name__ == "__main__":
    main()

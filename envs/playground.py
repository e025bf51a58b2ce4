"""The DeepMind Control Suite from MuJoCo Playground for gymnax 1.0.1, with physics in JAX.

    pip install playground==0.2.0
    python more/ppo_continuous_linen.py --env-id envs.playground:CheetahRun

The tasks are AcrobotSwingup, AcrobotSwingupSparse, BallInCup, CartpoleBalance,
CartpoleBalanceSparse, CartpoleSwingup, CartpoleSwingupSparse, CheetahRun, FingerSpin,
FingerTurnEasy, FingerTurnHard, FishSwim, HopperHop, HopperStand, HumanoidRun, HumanoidStand,
HumanoidWalk, PendulumSwingup, PointMass, ReacherEasy, ReacherHard, SwimmerSwimmer6, WalkerRun,
WalkerStand and WalkerWalk.

Physics, observations and rewards come from the playground package (Zakka et al. 2025, Apache 2
license). This file calls the package and contains none of its code. Actions are in [-1, 1].
Episodes are truncated after 1,000 steps. They start from one of 1,024 initial states;
envs/pooled.py explains why.

By default the package simulates with Warp, which needs an NVIDIA GPU. This file selects MuJoCo in
JAX (MJX), which runs on any device. The locomotion and manipulation robots are missing because the
package downloads their models on first use.
"""

from functools import partial

from envs.pooled import Pooled

try:  # not in requirements.txt: 550 MB
    from mujoco_playground import dm_control_suite
except ModuleNotFoundError as error:
    reason = "envs.playground needs a package: pip install playground==0.2.0"
    raise ModuleNotFoundError(reason) from error


def make(name: str) -> Pooled:
    config = dm_control_suite.get_default_config(name)
    env = dm_control_suite.load(name, config, config_overrides={"impl": "jax"})
    return Pooled(env, max_steps=config.episode_length)


def __getattr__(name: str) -> partial[Pooled]:
    """Return a function that makes the task called name, such as CheetahRun."""
    if name in dm_control_suite.ALL_ENVS:
        return partial(make, name)
    raise AttributeError(f"{__name__} has no {name}")

"""DeepMind's Control Suite as MuJoCo Playground has it, for gymnax 1.0.1: physics in JAX.

    pip install playground==0.2.0
    python more/ppo_continuous_linen.py --env-id envs.playground:CheetahRun

There are AcrobotSwingup, AcrobotSwingupSparse, BallInCup, CartpoleBalance, CartpoleBalanceSparse,
CartpoleSwingup, CartpoleSwingupSparse, CheetahRun, FingerSpin, FingerTurnEasy, FingerTurnHard,
FishSwim, HopperHop, HopperStand, HumanoidRun, HumanoidStand, HumanoidWalk, PendulumSwingup,
PointMass, ReacherEasy, ReacherHard, SwimmerSwimmer6, WalkerRun, WalkerStand and WalkerWalk.

Physics, observations and rewards are those of the playground package (Zakka et al. 2025, Apache 2
licence), which is called here; none of its code is. An action's numbers lie in [-1, 1]. An episode
is truncated after 1,000 steps, and begins from one of 1,024 starts, for which envs/pooled.py gives
the reason.

The package would simulate with Warp, which needs an NVIDIA GPU. Here MuJoCo's physics in JAX (MJX)
does, on any device. The package's robots for locomotion and manipulation are left out, since their
models are downloaded when they are first used.
"""

from functools import partial

from envs.pooled import Pooled

try:  # not among the project's requirements: it brings 550 MB
    from mujoco_playground import dm_control_suite
except ModuleNotFoundError as error:
    reason = "envs.playground needs a package: pip install playground==0.2.0"
    raise ModuleNotFoundError(reason) from error


def make(name: str) -> Pooled:
    config = dm_control_suite.get_default_config(name)
    env = dm_control_suite.load(name, config, config_overrides={"impl": "jax"})
    return Pooled(env, max_steps=config.episode_length)


def __getattr__(name: str) -> partial[Pooled]:
    """CheetahRun -> the function that makes one. Python asks here for what it does not find."""
    if name in dm_control_suite.ALL_ENVS:
        return partial(make, name)
    raise AttributeError(f"{__name__} has no {name}")

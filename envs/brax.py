"""Robots from brax for gymnax 1.0.1. The physics runs in JAX, so complete rollouts are compiled.

    pip install brax==0.14.2
    python more/ppo_continuous_linen.py --env-id envs.brax:HalfCheetahSpring

The robots are Ant, HalfCheetah, Hopper, Humanoid, HumanoidStandup, InvertedDoublePendulum,
InvertedPendulum, Pusher, Reacher and Walker2d. Names without a suffix use the default physics of
brax, which is also called Generalized. The suffixes Spring and Positional select simpler physics,
and MJX selects MuJoCo. Returns under different physics cannot be compared. Swimmer is missing
because brax 0.14.2 cannot reset it with this version of JAX.

Physics, observations and rewards come from the brax package (Freeman et al. 2021, Apache 2
license). This file calls the package and contains none of its code. Actions are in [-1, 1].
Episodes are truncated after 1,000 steps.

An episode starts from one of 1,024 initial states; envs/pooled.py explains why.
"""

from functools import partial
from typing import Any

from envs.pooled import Pooled

try:  # not in requirements.txt: 135 MB
    from brax import envs
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("envs.brax needs a package: pip install brax==0.14.2") from error


def make(name: str, **options: Any) -> Pooled:
    return Pooled(envs.get_environment(name, **options))


ROBOTS = {
    "Ant": "ant",
    "HalfCheetah": "halfcheetah",
    "Hopper": "hopper",
    "Humanoid": "humanoid",
    "HumanoidStandup": "humanoidstandup",
    "InvertedDoublePendulum": "inverted_double_pendulum",
    "InvertedPendulum": "inverted_pendulum",
    "Pusher": "pusher",
    "Reacher": "reacher",
    "Walker2d": "walker2d",
}


def __getattr__(name: str) -> partial[Pooled]:
    """Return a function that makes the robot called name, such as HalfCheetahSpring."""
    if name in ROBOTS:
        return partial(make, ROBOTS[name])
    for backend in ("Generalized", "Positional", "Spring", "MJX"):
        robot = name.removesuffix(backend)
        if robot != name and robot in ROBOTS:
            return partial(make, ROBOTS[robot], backend=backend.lower())
    raise AttributeError(f"{__name__} has no {name}")

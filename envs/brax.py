"""brax's robots for gymnax 1.0.1: physics in JAX, so that whole rollouts are compiled.

    pip install brax==0.14.2
    python more/ppo_continuous_linen.py --env-id envs.brax:HalfCheetahSpring

There are Ant, HalfCheetah, Hopper, Humanoid, HumanoidStandup, InvertedDoublePendulum,
InvertedPendulum, Pusher, Reacher and Walker2d. Without a suffix they have brax's default physics,
which is the same as with Generalized. The suffixes Spring and Positional choose simpler physics,
and MJX chooses MuJoCo's own. A return with one of them cannot be compared with a return with
another. Swimmer is left out: brax 0.14.2 cannot reset it with the project's version of JAX.

Physics, observations and rewards are those of the brax package (Freeman et al. 2021, Apache 2
licence), which is called here; none of its code is. An action's numbers lie in [-1, 1], as those of
brax's own agents. An episode that is not over after 1,000 steps is truncated.

An episode begins from one of 1,024 starts, for which envs/pooled.py gives the reason.
"""

from functools import partial
from typing import Any

from envs.pooled import Pooled

try:  # not among the project's requirements: it brings 135 MB
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
    """HalfCheetahSpring -> the function that makes one. Python asks for what it does not find."""
    if name in ROBOTS:
        return partial(make, ROBOTS[name])
    for backend in ("Generalized", "Positional", "Spring", "MJX"):
        robot = name.removesuffix(backend)
        if robot != name and robot in ROBOTS:
            return partial(make, ROBOTS[robot], backend=backend.lower())
    raise AttributeError(f"{__name__} has no {name}")

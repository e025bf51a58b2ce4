"""Check that an environment of your own is as the scripts need it.

    python ~/ppo-rosetta/envs/check.py my_module:MyEnv       # in gymnax: a class or a function
    python ~/ppo-rosetta/envs/check.py my_module:MyEnv-v0    # in Gymnasium: a registered id

In gymnax, reset and step are traced, and do not run. In Gymnasium 300 steps are taken, twice. A
broken rule is a sentence, with exit status 2. An error in your code is shown as Python shows it.
"""

import os
import sys

if __name__ == "__main__":  # where you stand is searched last: a file random.py hides no package
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path = [folder for folder in sys.path if folder not in (here, os.getcwd())]
    sys.path += [os.path.dirname(here), os.getcwd()]
os.environ["JAX_PLATFORMS"] = "cpu"  # a GPU is not needed, and may be training

import importlib
from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments.environment import Environment
from gymnax.environments.spaces import Discrete


def check_gymnax(env: Any) -> None:
    rule = f"it must be in gymnax, not {env!r}; of one in Gymnasium, use its registered id"
    must(hasattr(env, "default_params"), rule)
    params = env.default_params
    actions = env.action_space(params)
    must(isinstance(actions, Discrete), f"action_space must be gymnax's Discrete, not {actions}")
    space = env.observation_space(params)
    must(hasattr(space, "shape"), f"observation_space must be gymnax's Box, not {space}")

    key = jax.random.PRNGKey(0)
    result = jax.eval_shape(env.reset, key)
    must_return("reset", result, "obs, state")
    obs, state = result
    rule = f"obs must be one array of observation_space's shape, {space.shape}, not {obs}"
    must(getattr(obs, "shape", None) == space.shape, rule)
    before = kinds(obs, state)
    must("key<" not in str(before), "state must have no keys but jax.random.PRNGKey's")
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)  # not weak
    six = "obs, state, reward, terminated, truncated, info"
    steps: list[Any] = [("step", partial(env.step, params=params), six)]
    if type(env).step is Environment.step:  # which calls step_env, whose errors say more
        five = "obs, state, reward, terminated, info"
        steps.insert(0, ("step_env", lambda *given: env.step_env(*given, params), five))
    for name, step, values in steps:
        result = jax.eval_shape(step, key, state, jnp.int32(0))
        must_return(name, result, values)
        after = kinds(*result[:2])
        for place in before | after:
            rule = f"{place} must stay {before.get(place)}, not become {after.get(place)} in {name}"
            must(before.get(place) == after.get(place), rule)
        same = jax.tree.structure((obs, state)) == jax.tree.structure(tuple(result[:2]))
        must(same, f"reset and {name} must make state of the same classes, tuples and lists")
    _, _, reward, terminated, truncated, info = result
    must(getattr(reward, "shape", None) == (), f"reward must be one number, not {reward}")
    for flag in (terminated, truncated):
        must(kinds(flag) == {"obs": "bool ()"}, "terminated and truncated must be one boolean each")
    rule = "info must have final_observation, obs before a restart, of the same type and shape"
    must(kinds(info.get("final_observation")) == kinds(obs), rule)
    if isinstance(space, Discrete):
        print("A number as obs trains, but worse than a one-hot vector of it, by jax.nn.one_hot.")


def kinds(obs: Any, state: Any = None) -> dict[str, str]:
    """Place -> type and shape, as {"state.height": "float32 ()"}."""
    leaves = jax.tree.leaves_with_path({"obs": obs, "state": state})
    name_of = partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name_of(path): f"{x.dtype} {x.shape}" for path, x in leaves}


def check_gymnasium(name: str) -> None:
    # Without Gymnasium's own wrappers, whose errors say less.
    make: Any = partial(gymnasium.make, name, max_episode_steps=-1, disable_env_checker=True)
    env = make()
    actions = env.action_space
    rule = f"action_space must be Discrete and begin with 0, not {actions}"
    must(isinstance(actions, gymnasium.spaces.Discrete) and actions.start == 0, rule)
    space = env.observation_space
    rule = f"observation_space must be a Box, as gymnasium's FlattenObservation makes, not {space}"
    must(isinstance(space, gymnasium.spaces.Box), rule)
    same = np.array_equal(play(env), play(make()), equal_nan=True)
    must(same, "a seed must lead to the same obs again: draw from self.np_random alone")


def play(env: Any) -> list[np.ndarray]:
    """Take 300 steps, at most 100 of them in an episode; return each obs."""
    rng = np.random.default_rng(0)
    all_obs = [checked(env, "reset", env.reset(seed=0, options=None), "obs, info")]
    for time in range(1, 301):
        result = env.step(rng.integers(env.action_space.n))
        all_obs.append(checked(env, "step", result, "obs, reward, terminated, truncated, info"))
        if result[2] or result[3] or time % 100 == 0:
            all_obs.append(checked(env, "reset", env.reset(options={}), "obs, info"))
    return all_obs


def checked(env: Any, name: str, result: Any, values: str) -> np.ndarray:
    """The obs in what reset or step returned."""
    must_return(name, result, values)
    obs = np.asarray(result[0])
    space = env.observation_space
    rule = f"obs must be {space.dtype} {space.shape}, as observation_space, not {obs!r}"
    must(obs.shape == space.shape and np.can_cast(obs.dtype, space.dtype, "same_kind"), rule)
    for x in map(np.asarray, result[1:-1]):
        rule = f"reward, terminated and truncated must be one number each, not {x!r}"
        must(x.shape == () and x.dtype.kind in "biuf", rule)
    must(isinstance(result[-1], dict), f"info must be a dict, not {result[-1]}")
    return obs


def must_return(name: str, result: Any, values: str) -> None:
    parts = result if isinstance(result, tuple | list) else [result]
    must(len(parts) == len(values.split()), f"{name} must return {values}")


def must(ok: bool, rule: str) -> None:
    if not ok:
        print(rule, file=sys.stderr)
        sys.exit(2)


def main(env_id: str) -> None:
    module, _, name = env_id.rpartition(":")
    rule = f"name my_module:MyEnv, or in Gymnasium my_module:MyEnv-v0, not {env_id!r}"
    must(name != "" and module.replace(".", "_").isidentifier(), rule)
    try:
        found: Any = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        rule = f"there is no module {module} in {os.getcwd()} or the packages"
        must(error.name not in (module, module.partition(".")[0]), rule)
        raise  # it is one that yours imports
    if name in gymnasium.registry:
        check_gymnasium(name)
    else:
        must(callable(found), f"{module} has no class {name}, and registers no such id")
        check_gymnax(found())
    print(f"{env_id} is as the scripts need it")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))

"""Check that an environment of your own is as the scripts need it.

    python ~/ppo-rosetta/envs/check.py my_module:MyEnv       # in gymnax: a class or a function
    python ~/ppo-rosetta/envs/check.py my_module:MyEnv-v0    # in Gymnasium: a registered id

Types and shapes are checked first, and then what random actions lead to. A broken rule is a
sentence, with exit status 2, and so is a package that is missing. What may be meant as it is, is a
sentence, too, with exit status 0. An error in your code is shown as Python shows it. Random actions
do not come everywhere.
"""

import os
import sys

if __name__ == "__main__":  # where you stand is searched last: a file random.py hides no package
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path = [folder for folder in sys.path if folder not in (here, os.getcwd())]
    sys.path += [os.path.dirname(here), os.getcwd()]
os.environ["JAX_PLATFORMS"] = "cpu"  # a GPU is not needed, and may be training
os.environ["SDL_VIDEODRIVER"] = "dummy"  # pygame draws without a display,
os.environ["SDL_AUDIODRIVER"] = "dummy"  # and without loudspeakers
os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo, too

import importlib
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments.environment import Environment
from gymnax.environments.spaces import Box, Discrete

NUM_ENVS, NUM_STEPS = 16, 2_000  # of random play in gymnax
STEPS, SECONDS = 5_000, 20  # of random play in Gymnasium, whichever ends first
AGAIN = 300  # steps that Gymnasium takes once more, from the same seed
SILENCE = 2.0  # seconds after which a word is said


# === gymnax =====================================================================================
def check_gymnax(env: Any) -> str:
    """Return which actions it has, discrete or continuous."""
    rule = "it is in Gymnasium: give the id under which gymnasium.register has it"
    must(not isinstance(env, gymnasium.Env), rule)
    has_own_step = getattr(type(env), "step", None) is not Environment.step
    parts = ["default_params", "action_space", "observation_space"]
    parts += ["reset", "step"] if has_own_step else ["reset_env", "step_env"]
    for part in parts:
        inherited = getattr(type(env), part, None) is getattr(Environment, part)
        has_it = hasattr(env, part) and (part == "reset" or not inherited)
        must(has_it, f"{type(env).__name__} has no {part}, which gymnax's environments have")
    params = env.default_params
    kind = kind_of_actions(env.action_space(params), Discrete, Box)
    space = env.observation_space(params)
    must(hasattr(space, "shape"), f"observation_space must be gymnax's Box, not {space}")
    check_types(env, params, kind, space)
    check_play(env, params, space)
    if isinstance(space, Discrete):
        print("A number as obs trains, but worse than a one-hot vector of it, by jax.nn.one_hot.")
    return kind


def check_types(env: Any, params: Any, kind: str, space: Any) -> None:
    """Trace reset and step, which takes no step and sees all types and shapes."""
    key = jax.random.PRNGKey(0)
    result = jax.eval_shape(env.reset, key)
    must_return("reset", result, "obs, state")
    obs, state = result
    rule = f"obs must be one array of observation_space's shape, {space.shape}, not {obs}"
    must(getattr(obs, "shape", None) == space.shape, rule)
    before = kinds(obs, state)
    must("key<" not in str(before), "state must have no keys but jax.random.PRNGKey's")
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)  # not weak
    action = jax.ShapeDtypeStruct((), jnp.int32)
    if kind == "continuous":
        action = jax.ShapeDtypeStruct(env.action_space(params).shape, jnp.float32)
    six = "obs, state, reward, terminated, truncated, info"
    steps: list[Any] = [("step", partial(env.step, params=params), six)]
    if type(env).step is Environment.step:  # which calls step_env, whose errors say more
        five = "obs, state, reward, terminated, info"
        steps.insert(0, ("step_env", lambda *given: env.step_env(*given, params), five))
        if type(env).is_truncated is Environment.is_truncated:
            rule = "gymnax truncates by state.time and default_params.max_steps_in_episode:"
            has_limit = hasattr(state, "time") and hasattr(params, "max_steps_in_episode")
            must(has_limit, f"{rule} have both, or an is_truncated of your own")
    for name, step, values in steps:
        result = jax.eval_shape(step, key, state, action)
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


def kinds(obs: Any, state: Any = None) -> dict[str, str]:
    """Place -> type and shape, as {"state.height": "float32 ()"}."""
    leaves = jax.tree.leaves_with_path({"obs": obs, "state": state})
    return {name_of(path): f"{x.dtype} {x.shape}" for path, x in leaves}


def name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def check_play(env: Any, params: Any, space: Any) -> None:
    """Take NUM_STEPS random steps in each of NUM_ENVS environments."""
    actions = env.action_space(params)
    step_all = jax.vmap(partial(env.step, params=params))

    def step(carry, key):
        state, least, most = carry
        keys = jax.random.split(key, 2 * NUM_ENVS)
        action = jax.vmap(actions.sample)(keys[:NUM_ENVS])
        obs, state, reward, terminated, truncated, info = step_all(keys[NUM_ENVS:], state, action)
        seen = jnp.concatenate([obs, info["final_observation"]])
        least, most = jnp.minimum(least, seen.min(0)), jnp.maximum(most, seen.max(0))
        return (state, least, most), (reward, terminated, truncated)

    @jax.jit
    def play(key):
        obs, state = jax.vmap(env.reset)(jax.random.split(key, NUM_ENVS))
        state = jax.tree.map(lambda x: x.astype(x.dtype), state)  # not weak
        start = (state, obs.min(0), obs.max(0))
        return jax.lax.scan(step, start, jax.random.split(key, NUM_STEPS))

    print(f"Compiling, and then {NUM_STEPS:,} random steps in {NUM_ENVS} environments.", flush=True)
    jax.block_until_ready(play(jax.random.PRNGKey(0)))
    start = time.perf_counter()
    (state, least, most), results = jax.block_until_ready(play(jax.random.PRNGKey(0)))
    seconds = (time.perf_counter() - start) / NUM_STEPS
    print(f"Compiled, a step of {NUM_ENVS} environments takes {microseconds(seconds)}.")
    reward, terminated, truncated = map(np.asarray, results)  # (NUM_STEPS, NUM_ENVS)
    low, high = (0, space.n - 1) if isinstance(space, Discrete) else (space.low, space.high)
    must_lie_in(np.asarray(least), low, high)
    must_lie_in(np.asarray(most), low, high)
    broken = reward[~np.isfinite(reward)]
    must(broken.size == 0, f"reward must be a finite number, not {broken[:1]}")
    ends = []
    for column in range(NUM_ENVS):
        steps = np.flatnonzero(terminated[:, column] | truncated[:, column])
        lengths = np.diff(steps, prepend=-1).tolist()
        ends += zip(lengths, terminated[steps, column].tolist(), strict=True)
    limit = getattr(params, "max_steps_in_episode", None)
    must_end(ends, limit, NUM_STEPS)
    has_step_env = getattr(type(env), "step_env", Environment.step_env) is not Environment.step_env
    if has_step_env and hasattr(state, "time") and limit is not None:
        check_time_limit(env, params, state, int(limit))
        limit = None  # lengths have no more to say of it: a game may well end by itself there
    if hasattr(env, "render"):
        must_be_image(env.render(jax.tree.map(lambda x: np.asarray(x[0]), state), params))
    check_ends(ends, limit, reward.size)


def check_time_limit(env: Any, params: Any, states: Any, limit: int) -> None:
    """Take one step from each state twice: told that it is the limit's, and the one before that.

    All else is the same. So where every episode terminates in the former alone, time is the reason.
    """
    keys = jax.random.split(jax.random.PRNGKey(1), NUM_ENVS)
    action = jax.vmap(env.action_space(params).sample)(keys)

    @jax.jit
    def terminated_at(time):
        def tell(path, x):
            return jnp.full_like(x, time - 1) if name_of(path) == "time" else x

        states_then = jax.tree.map_with_path(tell, states)
        step = jax.vmap(env.step_env, in_axes=(0, 0, 0, None))
        return step(keys, states_then, action, params)[3]

    goes_on = ~np.asarray(terminated_at(limit - 1))
    ended = np.asarray(terminated_at(limit))[goes_on]
    rule = "step_env must not return the time limit as terminated, since step truncates by it: "
    rule += f"with state.time at {limit}, which is max_steps_in_episode, all {ended.size} episodes "
    rule += f"terminated, and with {limit - 1} none of them"
    must(ended.size == 0 or not ended.all(), rule)


# === Gymnasium ==================================================================================
def check_gymnasium(name: str) -> str:
    """Return which actions it has, discrete or continuous."""
    # Without Gymnasium's own wrappers, whose errors say less.
    make: Any = partial(gymnasium.make, name, max_episode_steps=-1, disable_env_checker=True)
    try:
        env = make()
    except gymnasium.error.DependencyNotInstalled as error:  # which says how to install it
        fail(str(error))
    for part in ("action_space", "observation_space"):
        must(hasattr(env, part), f"{name} has no {part}, which Gymnasium's environments have")
    actions = env.action_space
    kind = kind_of_actions(actions, gymnasium.spaces.Discrete, gymnasium.spaces.Box)
    starts_at_0 = kind == "continuous" or actions.start == 0
    must(starts_at_0, f"the actions must begin with 0, not as {actions}")
    space = env.observation_space
    rule = f"observation_space must be a Box, as gymnasium's FlattenObservation makes, not {space}"
    must(isinstance(space, gymnasium.spaces.Box), rule)
    limit = gymnasium.spec(name).max_episode_steps
    played = play(env, limit, STEPS)
    again = play(make(), limit, len(played.numbers)).numbers
    same = np.array_equal(played.numbers[: len(again)], again, equal_nan=True)
    must(same, "a seed must lead to the same obs and rewards again: draw from self.np_random alone")
    check_render(make, env.metadata.get("render_modes", ()))
    if played.num_steps == STEPS:
        must_end(played.ends, limit, STEPS)
    step, reset = played.step_seconds, played.reset_seconds
    each = microseconds((step + reset) / played.num_steps)
    print(f"A step takes {each}, of which starts of episodes are {reset / (step + reset):.0%}.")
    check_ends(played.ends, limit, played.num_steps)
    return kind


class Played(NamedTuple):
    """What random steps have led to."""

    numbers: np.ndarray  # obs and rewards of the first AGAIN steps
    ends: list[tuple[int, bool]]  # of episodes: length, and whether it terminated
    num_steps: int
    step_seconds: float  # in all calls of step
    reset_seconds: float  # in all calls of reset but the first, which may load things


def play(env: Any, limit: int | None, steps: int) -> Played:
    """Take random steps, as many as there is time for."""
    env.action_space.seed(0)
    checked(env, "reset", env.reset(seed=0, options=None), "obs, info")
    numbers, ends = [], []
    num_steps = 0
    length = 0
    step_seconds = reset_seconds = 0.0
    start = said = time.perf_counter()
    while num_steps < steps and time.perf_counter() < start + SECONDS:
        action = env.action_space.sample()
        before = time.perf_counter()
        result = env.step(action)
        now = time.perf_counter()
        step_seconds += now - before
        if now - said > SILENCE:
            print(f"Random play: {num_steps:,} of {steps:,} steps after {now - start:.0f} s")
            said = now
        obs = checked(env, "step", result, "obs, reward, terminated, truncated, info")
        _, reward, terminated, truncated, _ = result
        if num_steps < AGAIN:
            numbers.append(np.append(obs, reward))
        num_steps += 1
        length += 1
        if terminated or truncated or length == limit:
            ends.append((length, bool(terminated)))
            length = 0
            before = time.perf_counter()
            result = env.reset(options={})
            reset_seconds += time.perf_counter() - before
            checked(env, "reset", result, "obs, info")
    return Played(np.array(numbers, float), ends, num_steps, step_seconds, reset_seconds)


def checked(env: Any, name: str, result: Any, values: str) -> np.ndarray:
    """The obs in what reset or step returned."""
    must_return(name, result, values)
    obs = np.asarray(result[0])
    space = env.observation_space
    if obs.shape != space.shape or not np.can_cast(obs.dtype, space.dtype, "same_kind"):
        fail(f"obs must be {space.dtype} {space.shape}, as observation_space, not {obs!r}")
    must_lie_in(obs, space.low, space.high)
    for x in map(np.asarray, result[1:-1]):
        if x.shape != () or x.dtype.kind not in "biuf":
            fail(f"reward, terminated and truncated must be one number each, not {x!r}")
        if not np.isfinite(x):
            fail(f"reward must be a finite number, not {x}")
    must(isinstance(result[-1], dict), "info must be a dict")
    return obs


def check_render(make: Any, modes: Any) -> None:
    """Draw a picture, as evaluate.py --gif does."""
    if "rgb_array" not in modes:
        print('metadata["render_modes"] has no "rgb_array": a GIF would show obs, and no picture.')
        return
    rule = '__init__ must take render_mode, and keep it as self.render_mode: "rgb_array" is in '
    rule += 'metadata["render_modes"]'
    try:
        env = make(render_mode="rgb_array")
        env.reset(seed=0)
        image = None
        if env.render_mode == "rgb_array":
            image = env.render()
    except TypeError as error:  # Gymnasium's, with all that __init__ was given
        must("render_mode" not in str(error), rule)
        raise
    except Exception as error:  # as where MuJoCo finds no display
        print(f"A GIF cannot be drawn here: {type(error).__name__}: {error}")
        return
    must(env.render_mode == "rgb_array", rule)
    must_be_image(image)


# === Both =======================================================================================
def kind_of_actions(actions: Any, discrete: type, box: type) -> str:
    """Return discrete, or continuous where they are vectors of floats between finite bounds."""
    if isinstance(actions, discrete):
        return "discrete"
    must(isinstance(actions, box), f"action_space must be Discrete or a Box, not {actions}")
    must(len(actions.shape) == 1, f"actions in a Box must be vectors, not {actions}")
    is_float = np.issubdtype(actions.dtype, np.floating)
    must(is_float, f"actions in a Box must be floats, and not {actions.dtype} as in {actions}")
    low, high = np.asarray(actions.low), np.asarray(actions.high)
    is_finite = np.isfinite(low).all() and np.isfinite(high).all()
    has_bounds = bool(is_finite and (low < high).all())
    must(has_bounds, f"actions in a Box must lie between finite bounds, not {actions}")
    return "continuous"


def check_ends(ends: list[tuple[int, bool]], limit: int | None, steps: int) -> None:
    """Look for a time limit in the lengths of random episodes, beside which stands "terminated".

    Lengths alone do not prove one: a game of its own may always take nine steps. But where its
    time limit is known to be that long, the same step cannot be both.
    """
    longest = max((length for length, _ in ends), default=0)
    terminated = [does for length, does in ends if length == longest]
    told_apart = len(terminated) < 3 or not all(terminated)
    seen = f"all {len(terminated):,} random episodes that came to step {longest:,} terminated there"
    rule = f"{seen}, which is also the time limit: return terminated without it"
    must(told_apart or longest != limit, rule)
    print(f"In {steps:,} random steps {len(ends):,} episodes ended.")
    if not told_apart and 20 * len(terminated) >= len(ends):  # any game has a longest one
        print(f"{seen[:1].upper()}{seen[1:]}: if that is a time limit, it must be truncated.")


def must_end(ends: list[tuple[int, bool]], limit: int | None, steps: int) -> None:
    """So many steps in a row must end an episode: the returns of those that end are logged."""
    is_longer = limit is not None and limit > steps
    rule = f"no episode ended within {steps:,} random steps: terminate or truncate it"
    must(len(ends) > 0 or is_longer, rule)


def microseconds(seconds: float) -> str:
    digits = 0 if seconds >= 1e-5 else 1
    return f"{1e6 * seconds:,.{digits}f} \N{MICRO SIGN}s"


def must_lie_in(obs: np.ndarray, low: Any, high: Any) -> None:
    if not np.isfinite(obs).all():
        fail(f"obs must be finite numbers, not {obs}")
    rounding = 1e-5 * np.maximum(1, np.abs(obs.astype(float)))
    outside = (obs < low - rounding) | (obs > high + rounding)
    if outside.any():
        place = tuple(np.argwhere(outside)[0].tolist())
        low, high = np.broadcast_to(low, obs.shape)[place], np.broadcast_to(high, obs.shape)[place]
        rule = f"obs must lie in observation_space, from {low} to {high} at {place}"
        fail(f"{rule}, not at {obs[place]}")


def must_be_image(image: Any) -> None:
    array = np.asarray(image)
    is_image = array.ndim == 3 and array.shape[-1] == 3 and array.dtype == np.uint8
    rule = "render must return (height, width, 3) of uint8, not"
    must(is_image, f"{rule} {array.shape} of {array.dtype}")


def must_return(name: str, result: Any, values: str) -> None:
    parts = result if isinstance(result, tuple | list) else [result]
    must(len(parts) == len(values.split()), f"{name} must return {values}")


def must(ok: bool, rule: str) -> None:
    if not ok:
        fail(rule)


def fail(rule: str) -> NoReturn:
    print(rule, file=sys.stderr)
    sys.exit(2)


def scripts_for(kind: str, in_gymnasium: bool) -> str:
    """The names of this project's scripts that train in it."""
    rows = tomllib.loads((Path(__file__).parents[1] / "scripts.toml").read_text())
    names = []
    for name, row in rows.items():
        takes_continuous = "_continuous_" in name or row["algorithm"] == "sac"
        fits = takes_continuous == (kind == "continuous")
        if fits and name.endswith("_gymnasium") == in_gymnasium:
            names.append(name)
    return ", ".join(names)


def main(env_id: str) -> None:
    module, _, name = env_id.rpartition(":")
    rule = f"name my_module:MyEnv, or in Gymnasium my_module:MyEnv-v0, not {env_id!r}"
    must(name != "" and module.replace(".", "_").isidentifier(), rule)
    try:
        found: Any = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        rule = f"there is no module {module} in {os.getcwd()} or the packages"
        must(error.name not in (module, module.partition(".")[0]), rule)
        fail(str(error))  # a package that it imports is missing
    in_gymnasium = name in gymnasium.registry
    if in_gymnasium:
        kind = check_gymnasium(name)
    else:
        must(callable(found), f"{module} has no class {name}, and registers no such id")
        kind = check_gymnax(found())
    print(f"{env_id} is as these scripts need it: {scripts_for(kind, in_gymnasium)}")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))

"""Check that the training scripts can use your environment, and recommend scripts.

    python ~/ppo-rosetta/envs/check.py my_module:MyEnv     # gymnax: a class or a function
    python ~/ppo-rosetta/envs/check.py my_module:MyEnv-v0  # Gymnasium: a registered id
    python ~/ppo-rosetta/envs/check.py ALE/Breakout-v5     # Atari

The check compares types and shapes with the spaces of the environment, and then takes thousands of
random steps. Random actions do not reach every state, so mistakes may remain undetected. For a
Gymnasium environment it also measures whether --vectorization async is faster than sync.

If a check fails or a package is missing, the script prints a one-line error and exits with status
2. If there are only hints, the status is 0. An exception in your code ends the check with a
traceback, and so does a call that has not returned after two minutes.
"""

import os
import sys

if __name__ == "__main__":
    # Search the current folder last, so that a file like random.py does not shadow a module.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path = [folder for folder in sys.path if folder not in (here, os.getcwd())]
    sys.path += [os.path.dirname(here), os.getcwd()]
os.environ["JAX_PLATFORMS"] = "cpu"  # the GPU may be in use by a training run
os.environ["SDL_VIDEODRIVER"] = "dummy"  # pygame draws without a display
os.environ["SDL_AUDIODRIVER"] = "dummy"
os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo renders without a display

import argparse
import faulthandler
import importlib
import importlib.util
import math
import random
import re
import shlex
import signal
import subprocess
import tempfile
import time
import tomllib
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments.environment import Environment
from gymnax.environments.spaces import Box, Discrete

ROOT = Path(__file__).resolve().parents[1]
NUM_ENVS, NUM_STEPS = 16, 2_000  # random steps in gymnax
STEPS, SECONDS = 5_000, 20  # limits for random play in Gymnasium; the first one reached ends it
REPEATED_OBS = 300  # observations that are compared after a repetition with the same seed
REPEATED_NUMBERS = 10_000_000  # limit for their total size, because images need much memory
PROGRESS_AFTER = 2.0  # seconds between progress lines
PATIENCE = 120.0  # seconds after which the environment counts as hanging
ASYNC_SECONDS = 1.5  # duration of each speed measurement
ASYNC_PATIENCE = 60.0  # timeout of one measurement in seconds, including environment startup
ASYNC_GAIN = 1.2  # minimum speed-up at which async is recommended
FLOAT32_MAX = np.finfo(np.float32).max  # training converts obs and rewards to float32
ATARI_ENVS = 8  # default num_envs of the image scripts
FRAMEWORKS = {"linen": "JAX, Flax Linen", "nnx": "JAX, Flax NNX", "equinox": "JAX, Equinox"}
FRAMEWORKS |= {"torch": "PyTorch"}
GRAPH_MODE = ("ppo_nnx", "ppo_nnx_cached")  # not recommended: ppo_nnx_tree uses tree mode
MIN_IMAGE = 5  # minimum pixels per side for SMALL_CONVS
MIN_LARGE_IMAGE = 36  # minimum pixels per side for the default convolutions
SMALL_CONVS = ["--conv-channels", "16", "32", "--conv-kernels", "3", "3"]
SMALL_CONVS += ["--conv-strides", "1", "2"]


class Checked(NamedTuple):
    """Properties of an environment that determine the recommended script."""

    is_continuous: bool
    action_shape: tuple[int, ...]
    obs_shape: tuple[int, ...]
    fits_cnn: bool = False  # obs are uint8 images from 0 to 255, which scripts for images need


# === gymnax =====================================================================================
def check_gymnax(env: Any) -> Checked:
    """Check an instance of a gymnax environment."""
    rule = "this is a Gymnasium environment: give the id under which it is registered"
    must(not isinstance(env, gymnasium.Env), rule)
    overrides_step = getattr(type(env), "step", None) is not Environment.step
    parts = ["default_params", "action_space", "observation_space"]
    parts += ["reset", "step"] if overrides_step else ["reset_env", "step_env"]
    for part in parts:
        is_inherited = getattr(type(env), part, None) is getattr(Environment, part)
        is_defined = hasattr(env, part) and (part == "reset" or not is_inherited)
        must(is_defined, f"{type(env).__name__} has no {part}, which gymnax needs")
    params = env.default_params
    actions = env.action_space(params)
    is_continuous = check_actions(actions, Discrete, Box)
    space = env.observation_space(params)
    must(hasattr(space, "shape"), f"observation_space must be a gymnax Box, not {space}")
    must_have_axes(space, Box)
    check_types(env, params, is_continuous, space)
    check_random_play(env, params, space)
    if isinstance(space, Discrete):
        print("The PyTorch scripts need vectors, not integers: convert obs with jax.nn.one_hot.")
    return Checked(is_continuous, actions.shape, space.shape)


def check_types(env: Any, params: Any, is_continuous: bool, space: Any) -> None:
    """Check types and shapes by tracing reset and step, without running them."""
    generators = str(np.random.get_state()), random.getstate()
    key = jax.random.PRNGKey(0)
    result = jax.eval_shape(env.reset, key)
    must_return("reset", result, "obs, state")
    obs, state = result
    rule = f"obs must be one array with the shape of observation_space, {space.shape}, not {obs}"
    must(getattr(obs, "shape", None) == space.shape, rule)
    before = types_of(obs, state)
    must("key<" not in str(before), "random keys in state must come from jax.random.PRNGKey")
    # reset may return weakly typed arrays; the scripts remove the weak types.
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    action = jax.ShapeDtypeStruct((), jnp.int32)
    if is_continuous:
        action = jax.ShapeDtypeStruct(env.action_space(params).shape, jnp.float32)
    six = "obs, state, reward, terminated, truncated, info"
    steps: list[Any] = [("step", partial(env.step, params=params), six)]
    if type(env).step is Environment.step:
        # The inherited step calls step_env. Check step_env first: its errors are more specific.
        five = "obs, state, reward, terminated, info"
        steps.insert(0, ("step_env", lambda *inputs: env.step_env(*inputs, params), five))
        if type(env).is_truncated is Environment.is_truncated:
            rule = "gymnax truncates by state.time and default_params.max_steps_in_episode:"
            has_limit = hasattr(state, "time") and hasattr(params, "max_steps_in_episode")
            must(has_limit, f"{rule} define both, or override is_truncated")
    for name, step, values in steps:
        result = jax.eval_shape(step, key, state, action)
        must_return(name, result, values)
        after = types_of(*result[:2])
        for leaf in before | after:
            old, new = before.get(leaf), after.get(leaf)
            must(old == new, f"{name} must not change {leaf} from {old} to {new}")
        is_same = jax.tree.structure((obs, state)) == jax.tree.structure(tuple(result[:2]))
        must(is_same, f"reset and {name} must return states with the same structure")
    _, _, reward, terminated, truncated, info = result
    must(getattr(reward, "shape", None) == (), f"reward must be one number, not {reward}")
    for flag in (terminated, truncated):
        is_boolean = types_of(flag) == {"obs": "bool ()"}
        must(is_boolean, "terminated and truncated must be one boolean each")
    rule = "info must have final_observation, the last observation before a restart, with the "
    rule += "shape and dtype of obs"
    must(types_of(info.get("final_observation")) == types_of(obs), rule)
    rule = "random numbers must come from jax.random and the key, not from np.random or random, "
    rule += "whose numbers become constants when JAX compiles reset and step"
    must(generators == (str(np.random.get_state()), random.getstate()), rule)


def types_of(obs: Any, state: Any = None) -> dict[str, str]:
    """Return the type and shape of each array by its path: {"state.height": "float32 ()", ...}."""
    leaves = jax.tree.leaves_with_path({"obs": obs, "state": state})
    return {name_of(path): f"{x.dtype} {x.shape}" for path, x in leaves}


def name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def check_random_play(env: Any, params: Any, space: Any) -> None:
    """Take NUM_STEPS random steps in each of NUM_ENVS environments."""
    actions = env.action_space(params)
    step_all = jax.vmap(partial(env.step, params=params))

    def step(carry, key):
        state, low, high = carry
        keys = jax.random.split(key, 2 * NUM_ENVS)
        action = jax.vmap(actions.sample)(keys[:NUM_ENVS])
        obs, state, reward, terminated, truncated, info = step_all(keys[NUM_ENVS:], state, action)
        final_obs = info["final_observation"]
        both_obs = jnp.concatenate([obs, final_obs])
        is_equal = (obs == final_obs).reshape(NUM_ENVS, -1).all(1)
        low, high = jnp.minimum(low, both_obs.min(0)), jnp.maximum(high, both_obs.max(0))
        return (state, low, high), (reward, terminated, truncated, is_equal)

    @jax.jit
    def play(key):
        obs, state = jax.vmap(env.reset)(jax.random.split(key, NUM_ENVS))
        state = jax.tree.map(lambda x: x.astype(x.dtype), state)  # remove weak types
        start = (state, obs.min(0), obs.max(0))
        return jax.lax.scan(step, start, jax.random.split(key, NUM_STEPS))

    print(f"Compiling, then {NUM_STEPS:,} random steps in {NUM_ENVS} environments.", flush=True)
    jax.block_until_ready(play(jax.random.PRNGKey(0)))
    start = time.perf_counter()
    (state, lowest, highest), results = jax.block_until_ready(play(jax.random.PRNGKey(0)))
    seconds = (time.perf_counter() - start) / NUM_STEPS
    print(f"{microseconds(seconds)} per compiled step of {NUM_ENVS} environments.")
    # Each array has the shape (NUM_STEPS, NUM_ENVS).
    reward, terminated, truncated, is_equal = map(np.asarray, results)
    low, high = (0, space.n - 1) if isinstance(space, Discrete) else (space.low, space.high)
    must_be_within(np.asarray(lowest), low, high)
    must_be_within(np.asarray(highest), low, high)
    broken = reward[~np.isfinite(reward)]
    must(broken.size == 0, f"reward must be a finite number, not {broken[:1]}")
    if isinstance(actions, Box):
        check_action_bounds_gymnax(step_all, state, actions)
    episodes = []
    for column in range(NUM_ENVS):
        ends = np.flatnonzero(terminated[:, column] | truncated[:, column])
        lengths = np.diff(ends, prepend=-1).tolist()
        episodes += zip(lengths, terminated[ends, column].tolist(), strict=True)
    # A new episode almost never starts with the last observation of the previous episode.
    is_end = terminated | truncated
    if is_end.any() and is_equal[is_end].all() and (lowest != highest).any():
        found = 'obs and info["final_observation"] were equal at the end of every random episode'
        print(f"{found}: step must return the first obs of the next episode as obs.")
    limit = getattr(params, "max_steps_in_episode", None)
    must_end(episodes, limit, NUM_STEPS)
    has_step_env = getattr(type(env), "step_env", Environment.step_env) is not Environment.step_env
    if has_step_env and hasattr(state, "time") and limit is not None:
        check_time_limit(env, params, state, int(limit))
        limit = None  # already checked, so episode lengths do not matter
    if hasattr(env, "render"):
        must_be_image(env.render(jax.tree.map(lambda x: np.asarray(x[0]), state), params))
    check_episode_ends(episodes, limit, reward.size)


def check_action_bounds_gymnax(step_all: Any, state: Any, actions: Box) -> None:
    """Take a step with all actions at their lower bounds, and one at their upper bounds."""
    keys = jax.random.split(jax.random.PRNGKey(2), NUM_ENVS)
    for bound in (actions.low, actions.high):
        action = jnp.broadcast_to(jnp.float32(bound), (NUM_ENVS, *actions.shape))
        _, _, reward, _, _, info = jax.jit(step_all)(keys, state, action)
        obs = info["final_observation"]
        is_finite = bool(jnp.isfinite(obs).all() and jnp.isfinite(reward).all())
        must(is_finite, f"obs and reward must be finite after action {action[0]}, a bound")


def check_time_limit(env: Any, params: Any, states: Any, limit: int) -> None:
    """Step twice from each state: once to the time limit, and once to the step before it.

    Apart from the time, both steps are equal. So if every episode terminates at the limit but not
    before it, the environment returns the time limit as terminated.
    """
    keys = jax.random.split(jax.random.PRNGKey(1), NUM_ENVS)
    action = jax.vmap(env.action_space(params).sample)(keys)

    @jax.jit
    def terminated_at(time):
        def set_time(path, x):
            return jnp.full_like(x, time - 1) if name_of(path) == "time" else x

        changed = jax.tree.map_with_path(set_time, states)
        step = jax.vmap(env.step_env, in_axes=(0, 0, 0, None))
        return step(keys, changed, action, params)[3]

    continues = ~np.asarray(terminated_at(limit - 1))
    ended = np.asarray(terminated_at(limit))[continues]
    rule = "step_env must not return the time limit as terminated, because step truncates there: "
    rule += f"with state.time at {limit}, max_steps_in_episode, all {ended.size} episodes "
    rule += f"terminated, and with {limit - 1} none of them"
    must(ended.size == 0 or not ended.all(), rule)


# === Gymnasium ==================================================================================
def restart_watchdog() -> None:
    """Print a traceback and end this program, unless called again within PATIENCE seconds."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True, file=2)  # stderr


def check_gymnasium(env_id: str) -> Checked:
    """Check a registered Gymnasium environment, such as my_module:MyEnv-v0."""
    name = env_id.rpartition(":")[2]
    # Disable the Gymnasium wrappers, because their errors are less specific than ours.
    make: Any = partial(gymnasium.make, name, max_episode_steps=-1, disable_env_checker=True)
    restart_watchdog()
    try:
        env = make()
    except gymnasium.error.DependencyNotInstalled as error:  # the error names the package
        fail(str(error))
    for part in ("action_space", "observation_space"):
        must(hasattr(env, part), f"{name} has no {part}, which Gymnasium needs")
    actions = env.action_space
    is_continuous = check_actions(actions, gymnasium.spaces.Discrete, gymnasium.spaces.Box)
    starts_at_0 = is_continuous or actions.start == 0
    must(starts_at_0, f"actions must count from 0, not {actions}")
    space = env.observation_space
    if not isinstance(space, gymnasium.spaces.Box):
        hint = "docs/environments.md shows how to flatten observations"
        fail(f"observation_space must be a Box, not {space}: {hint}")
    must_have_axes(space, gymnasium.spaces.Box)
    limit = gymnasium.spec(name).max_episode_steps
    played = play(env, limit, STEPS)
    if is_continuous:
        check_action_bounds(env)
    statistics = keeper_of_statistics(env)
    render_modes = env.metadata.get("render_modes", ())
    env.close()
    check_repeatability(env_id, make, played, limit, statistics)
    check_render(make, render_modes)
    faulthandler.cancel_dump_traceback_later()
    if played.num_steps == STEPS:
        must_end(played.episodes, limit, STEPS)
    if played.obs_dtypes != {str(space.dtype)}:
        found = ", ".join(sorted(played.obs_dtypes - {str(space.dtype)}))
        hint = f"return obs.astype(np.{space.dtype}), or Gymnasium prints warnings in training"
        print(f"obs are {found}, but observation_space is {space.dtype}: {hint}.")
    if space.dtype.itemsize == 8:
        loss = "" if space.dtype.kind == "f" else ", which rounds integers above 2**24"
        print(f"Training converts obs from {space.dtype} to float32{loss}.")
    fits_cnn = check_images(space)
    if fits_cnn and played.numbers[:, :-1].max() == 1:  # the last column is the reward
        print("All pixels are 0 or 1, but training divides them by 255: return 0 and 255 instead.")
    step, reset = played.step_seconds, played.reset_seconds
    seconds = microseconds((step + reset) / played.num_steps)
    print(f"{seconds} per step; resets take {reset / (step + reset):.0%} of it.")
    check_episode_ends(played.episodes, limit, played.num_steps)
    return Checked(is_continuous, actions.shape, space.shape, fits_cnn)


class Played(NamedTuple):
    """Results of random steps."""

    numbers: np.ndarray  # the first observations of reset and step, each with its reward or 0
    obs_dtypes: set[str]
    episodes: list[tuple[int, bool]]  # length, and whether the episode terminated
    num_steps: int
    step_seconds: float  # total duration of all calls to step
    reset_seconds: float  # the same for reset, except the first call, which may load files


def play(env: Any, limit: int | None, steps: int, seed: int = 0) -> Played:
    """Take up to `steps` random steps, but stop after SECONDS. All seeds get the same actions."""
    restart_watchdog()
    env.action_space.seed(0)
    result = env.reset(seed=seed, options=None)
    obs = must_be_obs(env, "reset", result, "obs, info")
    obs_dtypes = {str(obs.dtype)}
    numbers, episodes = [np.append(obs, 0)], []
    max_rows = min(REPEATED_OBS, REPEATED_NUMBERS // numbers[0].size)
    num_steps = 0
    length = 0
    step_seconds = reset_seconds = 0.0
    start = last_report = time.perf_counter()
    while num_steps < steps and time.perf_counter() < start + SECONDS:
        action = env.action_space.sample()
        before = time.perf_counter()
        result = env.step(action)
        now = time.perf_counter()
        step_seconds += now - before
        if now - last_report > PROGRESS_AFTER:
            print(f"{num_steps:,} of {steps:,} random steps after {now - start:.0f} s", flush=True)
            last_report = now
            restart_watchdog()
        obs = must_be_obs(env, "step", result, "obs, reward, terminated, truncated, info")
        obs_dtypes.add(str(obs.dtype))
        _, reward, terminated, truncated, _ = result
        if len(numbers) < max_rows:
            numbers.append(np.append(obs, reward))
        num_steps += 1
        length += 1
        if terminated or truncated or length == limit:
            episodes.append((length, bool(terminated)))
            length = 0
            before = time.perf_counter()
            result = env.reset(options=None)
            reset_seconds += time.perf_counter() - before
            obs = must_be_obs(env, "reset", result, "obs, info")
            if len(numbers) < max_rows:
                numbers.append(np.append(obs, 0))
    numbers = np.array(numbers, float)
    return Played(numbers, obs_dtypes, episodes, num_steps, step_seconds, reset_seconds)


def must_have_axes(space: Any, box: type) -> None:
    """Check that a Box is not a single number, because the networks need at least one axis."""
    is_number = isinstance(space, box) and space.shape == ()
    must(not is_number, "obs must have at least one axis: use the shape (1,), not ()")


def must_be_obs(env: Any, name: str, result: Any, values: str) -> np.ndarray:
    """Check what reset or step returned. Return the observation."""
    must_return(name, result, values)
    obs = np.asarray(result[0])
    space = env.observation_space
    if obs.shape != space.shape or not np.can_cast(obs.dtype, space.dtype, "same_kind"):
        rule = f"obs of {name} must be {space.dtype} {space.shape}, as observation_space says"
        fail(f"{rule}, not {obs.dtype} {obs.shape}")
    must_be_within(obs, space.low, space.high)
    for x in map(np.asarray, result[1:-1]):
        if x.shape != () or x.dtype.kind not in "biuf":
            fail(f"reward, terminated and truncated must be one number each, not {x!r}")
        if not np.abs(x) <= FLOAT32_MAX:
            fail(f"reward must be a finite number in float32, not {x}")
    must(isinstance(result[-1], dict), "info must be a dict")
    return obs


def check_action_bounds(env: Any) -> None:
    """Take a step with all actions at their lower bounds, and one at their upper bounds.

    In training, actions outside the bounds are clipped to them.
    """
    for name in ("low", "high"):
        action = getattr(env.action_space, name).copy()
        env.reset(seed=0)
        try:
            result = env.step(action)
        except Exception as error:
            error.add_note(f"The action was {action}, action_space.{name}. Training sends it, too.")
            raise
        must_be_obs(env, "step", result, "obs, reward, terminated, truncated, info")


def keeper_of_statistics(env: Any) -> str:
    """Return the name of the class in a chain of wrappers that normalizes by running statistics."""
    while True:
        if any(type(x).__name__ == "RunningMeanStd" for x in vars(env).values()):
            return type(env).__name__
        if not isinstance(env, gymnasium.Wrapper):
            return ""
        env = env.env


def check_repeatability(
    env_id: str, make: Any, played: Played, limit: int | None, statistics: str
) -> None:
    """Check that a seed gives the same obs and rewards in a second instance and after a reset.

    statistics is the name of a class that keeps running statistics, or empty.
    """
    restart_watchdog()
    try:
        env = make()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        print(f"A second instance in the same process failed ({reason}), so seeds are not checked.")
        return
    repeated = play(env, limit, len(played.numbers)).numbers
    after_reset = play(env, limit, len(played.numbers)).numbers
    other_seed = play(env, limit, len(played.numbers), seed=1).numbers
    env.close()
    rule = "the same seed must give the same obs and rewards: use only self.np_random"
    must(is_same(played.numbers, repeated), rule)
    if not is_same(repeated, after_reset):
        found = "After a reset, the same seed gives different obs or rewards than in a new instance"
        reason = "does reset set every variable?"
        if statistics:
            reason = f"{statistics} keeps running statistics, which checkpoints do not contain, so "
            reason += "evaluate.py starts without them. Scale by constants instead, or use a "
            reason += "script for continuous actions, with --norm-obs and --norm-reward"
        print(f"{found}: {reason}")
    if is_same(after_reset, other_seed):
        found = "Seeds 0 and 1 gave the same obs and rewards"
        print(f"{found}. If the environment is not deterministic, use self.np_random.")
    check_independence(env_id, make, played, limit)


class Interleaved(gymnasium.Wrapper):
    """Wrapper that also resets or steps a second instance in each call, before it returns."""

    def __init__(self, env: Any, other: Any) -> None:
        super().__init__(env)
        self.other = other

    def reset(self, **options: Any) -> tuple:
        result = self.env.reset(**options)
        self.other.reset(seed=1)
        return result

    def step(self, action: Any) -> tuple:
        result = self.env.step(action)
        _, _, terminated, truncated, _ = self.other.step(action)
        if terminated or truncated:
            self.other.reset()
        return result


def check_independence(env_id: str, make: Any, played: Played, limit: int | None) -> None:
    """Check that stepping a second instance does not change the obs or rewards of the first."""
    # Try it in another process first: some simulators hang or crash if a process has two instances.
    speed = measure_speed(env_id, "sync", 2)
    if isinstance(speed, str):
        print(f"Using two instances at the same time failed ({speed}): use --vectorization async.")
        return
    restart_watchdog()
    env, other = make(), make()
    pair = Interleaved(env, other)
    numbers = play(pair, limit, len(played.numbers)).numbers
    env.close()
    other.close()
    rule = "instances must not share data, but stepping a second one changes the obs or rewards of "
    rule += "the first: store arrays, state and random generators (self.np_random) in self, or "
    rule += "train with --vectorization async"
    must(is_same(played.numbers, numbers), rule)


def is_same(numbers: np.ndarray, repeated: np.ndarray) -> bool:
    """Return whether the steps that both contain are equal; slow environments stop early."""
    length = min(len(numbers), len(repeated))
    return np.array_equal(numbers[:length], repeated[:length])


def check_render(make: Any, modes: Any) -> None:
    """Render an image, as evaluate.py --gif does."""
    if "rgb_array" not in modes:
        modes_hint = 'metadata["render_modes"] has no "rgb_array"'
        print(f"{modes_hint}: a GIF will show the observations instead of an image.")
        return
    rule = '__init__ must take render_mode and set self.render_mode, because "rgb_array" is in '
    rule += 'metadata["render_modes"]'
    restart_watchdog()
    try:
        env = make(render_mode="rgb_array")
        env.reset(seed=0)
        image = None
        if env.render_mode == "rgb_array":
            image = env.render()
        env.close()
    except TypeError as error:  # Gymnasium's message includes the arguments passed to __init__
        must("render_mode" not in str(error), rule)
        raise
    except Exception as error:  # for example from MuJoCo without a display
        print(f"A GIF cannot be drawn here: {type(error).__name__}: {error}")
        return
    must(env.render_mode == "rgb_array", rule)
    must_be_image(image)


def check_images(space: Any) -> bool:
    """Describe observations that are images. Return whether the scripts for images accept them."""
    if not are_images(space.shape):
        return False
    *_, order = image_layout(space.shape)
    print(f"Observations are images: ({order}) = {space.shape}.")
    if space.dtype != np.uint8:
        hint = "use gymnasium.wrappers.TransformObservation to train a CNN"
        print(f"Images should be uint8 from 0 to 255, not {space.dtype}: {hint}.")
        return False
    if space.low.min() != 0 or space.high.max() != 255:
        bounds = f"{space.low.min()} to {space.high.max()}"
        print(f"The bounds of uint8 images should be 0 and 255, not {bounds}.")
        return False
    return True


def are_images(shape: tuple[int, ...]) -> bool:
    return len(shape) in (2, 3) and min(image_layout(shape)[:2]) >= MIN_IMAGE


def image_layout(shape: tuple[int, ...]) -> tuple[int, int, str]:
    """Return the height and width of images, and the order of their axes."""
    if len(shape) == 2:
        return shape[0], shape[1], "H, W"
    if shape[0] < min(shape[1:]):
        return shape[1], shape[2], "C, H, W"
    return shape[0], shape[1], "H, W, C"


# === sync or async ==============================================================================
def measure_speeds(env_id: str) -> dict[tuple[str, int], float | str]:
    """Return steps per second by (vectorization, num_envs), or the reason if a measurement failed.

    After a failure, larger numbers of environments are skipped.
    """
    found = f"measured for {ASYNC_SECONDS} s each"
    print(f"Is async faster? Steps per second without training, {found} (skip: --no-async-test):")
    speeds: dict[tuple[str, int], float | str] = {}
    for vectorization in ("sync", "async"):
        for num_envs in (1, 2, 4, 8):
            speed = measure_speed(env_id, vectorization, num_envs)
            speeds[vectorization, num_envs] = speed
            text = speed if isinstance(speed, str) else f"{speed:,.0f}"
            print(f"  {vectorization:5} --num-envs {num_envs}: {text}", flush=True)
            if isinstance(speed, str):
                break
    return speeds


def measure_speed(env_id: str, vectorization: str, num_envs: int) -> float | str:
    """Return steps per second, or the reason for a failure.

    envs/speed.py runs in a separate process group, which is killed at the end.
    """
    command = [sys.executable, str(ROOT / "envs/speed.py"), env_id, vectorization, str(num_envs)]
    command += [str(ASYNC_SECONDS)]
    variables = os.environ | {"PYTHONSAFEPATH": "1"}  # do not import modules from envs/
    # Use files rather than pipes: a simulator process that is still running keeps a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, env=variables, start_new_session=True
        )
        try:
            process.wait(ASYNC_PATIENCE)
        except subprocess.TimeoutExpired:
            return f"not finished after {ASYNC_PATIENCE:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        found = re.search(r"^(\S+) steps per second$", out.read(), re.M)
        return float(found[1]) if found else reason_of(err.read())


def reason_of(output: str) -> str:
    """Return the exception that ended a process, not the connection error that it caused."""
    errors = re.findall(r"^(?:[\w.]+: )?[\w.]*(?:Error|Exception)\b.*", output, re.M)
    lost = ("EOFError", "ConnectionResetError", "BrokenPipeError")
    causes = [line for line in errors if not line.startswith(lost)]
    return (causes or errors or ["the process ended without an error message"])[-1]


def recommend_vectorization(speeds: dict[tuple[str, int], float | str]) -> tuple[str, list[str]]:
    """Return a recommendation as a sentence, and as flags for the training script."""
    numbers = {key: x for key, x in speeds.items() if not isinstance(x, str)}
    sync = [x for (name, _), x in numbers.items() if name == "sync"]
    many = {n: x for (name, n), x in numbers.items() if name == "async"}
    if not numbers:
        return "Neither sync nor async worked here.", []
    if not many:
        return "Use sync, the default: async did not work.", []
    # Use the smallest number of environments whose speed is close to the highest.
    num_envs = min(n for n, x in many.items() if x > 0.9 * max(many.values()))
    flags = ["--vectorization", "async", "--num-envs", str(num_envs)]
    if not sync or isinstance(speeds.get(("sync", 2)), str):
        return f"Use {' '.join(flags)}: sync did not work with several environments.", flags
    gain = many[num_envs] / max(sync)
    if gain < 1:
        return "Use sync, the default: async is slower here.", []
    if gain < ASYNC_GAIN:
        return f"Use sync, the default: async is only {gain:.2g}x as fast here.", []
    return f"Use {' '.join(flags)}: {gain:.2g}x as fast as the fastest sync setting.", flags


# === Atari ======================================================================================
def is_atari(name: str) -> bool:
    """Return whether an id names an Atari game. Refuse ids that skip the usual preprocessing."""
    if importlib.util.find_spec("ale_py") is None:
        rule = "Atari games need the package ale-py (GPL-2.0): pip install ale-py==0.12.1"
        must(not name.startswith("ALE/"), rule)
        return False
    importlib.import_module("ale_py")  # registers the games
    spec = gymnasium.registry.get(name)
    if spec is not None and spec.entry_point == "ale_py.env:AtariEnv":
        right = f"ALE/{spec.kwargs['game'].title().replace('_', '')}-v5"
        rule = f"{name} is an Atari game without the usual preprocessing: use --env-id {right}"
        must(name == right, rule)
    return name.startswith("ALE/")


def check_atari(name: str) -> None:
    """Play random games in threads of ale-py, which the image scripts also use."""
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:  # the error suggests a similar name
        fail(str(error))
    speed = measure_speed(f"ale_py:{name}", "vector_entry_point", ATARI_ENVS)
    if isinstance(speed, str):
        fail(speed)
    print(f"{speed:,.0f} random steps per second in {ATARI_ENVS} games, in threads of ale-py.")
    print("Atari games do not use --vectorization.")


# === Both =======================================================================================
def check_actions(actions: Any, discrete: type, box: type) -> bool:
    """Check the action space. Return whether actions are continuous."""
    if isinstance(actions, discrete):
        return False
    must(isinstance(actions, box), f"action_space must be Discrete or a Box, not {actions}")
    must(len(actions.shape) == 1, f"actions in a Box must be vectors, not {actions}")
    is_float = np.issubdtype(actions.dtype, np.floating)
    must(is_float, f"actions in a Box must be floats, not {actions.dtype} as in {actions}")
    low, high = np.asarray(actions.low), np.asarray(actions.high)
    must(bool((low <= high).all()), f"every action in a Box needs low <= high, not {actions}")
    remedy = "use bounds such as -1 and 1, and scale actions in step"
    is_finite = bool(np.isfinite(low).all() and np.isfinite(high).all())
    must(is_finite, f"actions in a Box must have finite bounds, not {actions}: {remedy}")
    return True


def check_episode_ends(episodes: list[tuple[int, bool]], limit: int | None, steps: int) -> None:
    """Detect a time limit that is returned as terminated.

    Episode lengths alone prove nothing, because a game may always take nine steps. But if all
    episodes that reach a known time limit terminate there, this is not a coincidence.
    """
    longest = max((length for length, _ in episodes), default=0)
    terminated = [flag for length, flag in episodes if length == longest]
    is_suspicious = len(terminated) >= 3 and all(terminated)
    found = (
        f"all {len(terminated):,} random episodes that reached step {longest:,} terminated there"
    )
    rule = f"{found}, but that is the time limit: do not return it as terminated"
    must(not is_suspicious or longest != limit, rule)
    print(f"{len(episodes):,} episodes ended in {steps:,} random steps.")
    lengths = {length for length, _ in episodes if length != limit}
    if len(lengths) >= 3 and not any(flag for _, flag in episodes):
        hint = "return truncated only for time limits"
        print(f"No episode terminated, but episodes of different lengths were truncated: {hint}.")
    if is_suspicious and 20 * len(terminated) >= len(episodes):  # at least 5% of the episodes
        print(f"{found[:1].upper()}{found[1:]}: if that is a time limit, return it as truncated.")


def must_end(episodes: list[tuple[int, bool]], limit: int | None, steps: int) -> None:
    """Check that episodes end, because training logs only the returns of finished episodes."""
    is_longer = limit is not None and limit > steps
    rule = f"no episode ended within {steps:,} random steps: terminate or truncate episodes"
    must(len(episodes) > 0 or is_longer, rule)


def microseconds(seconds: float) -> str:
    digits = 0 if seconds >= 1e-5 else 1
    return f"{1e6 * seconds:,.{digits}f} \N{MICRO SIGN}s"


def must_be_within(obs: np.ndarray, low: Any, high: Any) -> None:
    if not (np.abs(obs) <= FLOAT32_MAX).all():
        fail(f"obs must be finite numbers in float32, not {obs}")
    tolerance = 1e-5 * np.maximum(1, np.abs(obs.astype(float)))
    outside = (obs < low - tolerance) | (obs > high + tolerance)
    if outside.any():
        index = tuple(np.argwhere(outside)[0].tolist())
        low, high = np.broadcast_to(low, obs.shape)[index], np.broadcast_to(high, obs.shape)[index]
        name = f"obs[{', '.join(map(str, index))}]" if index else "obs"
        fail(f"{name} is {obs[index]}, outside observation_space ({low} to {high})")


def must_be_image(image: Any) -> None:
    array = np.asarray(image)
    is_image = array.ndim == 3 and array.shape[-1] == 3 and array.dtype == np.uint8
    rule = "render must return uint8 (height, width, 3), not"
    must(is_image, f"{rule} {array.dtype} {array.shape}")


def must_return(name: str, result: Any, values: str) -> None:
    parts = result if isinstance(result, tuple | list) else [result]
    must(len(parts) == len(values.split()), f"{name} must return {values}")


def must(ok: bool, rule: str) -> None:
    if not ok:
        fail(rule)


def fail(rule: str) -> NoReturn:
    print(rule, file=sys.stderr)
    sys.exit(2)


# === Command line ===============================================================================
def setting_of(checked: Checked, in_gymnasium: bool) -> str:
    """Return the setting in scripts.toml that fits the environment."""
    if checked.fits_cnn and not checked.is_continuous:
        return "images"
    words = ["continuous"] if checked.is_continuous else []
    words += ["Gymnasium"] if in_gymnasium else []
    return ", ".join(words) or "plain"


def words_for(checked: Checked, setting: str) -> list[str]:
    """Return the preset or the flags that the scripts need."""
    if setting == "continuous, Gymnasium" and math.prod(checked.action_shape) > 1:
        return ["mujoco"]
    if setting != "images":
        return []
    height, width, order = image_layout(checked.obs_shape)
    flags = ["--channels-first"] if order == "C, H, W" else []
    return [*flags, *(SMALL_CONVS if min(height, width) < MIN_LARGE_IMAGE else [])]


def main(env_id: str, async_test: bool = False) -> None:
    if is_atari(env_id.removeprefix("ale_py:")):
        check_atari(env_id.removeprefix("ale_py:"))
        recommend(env_id, "images", [], [])
        return
    module, _, name = env_id.rpartition(":")
    rule = f"give my_module:MyEnv, or my_module:MyEnv-v0 for Gymnasium, not {env_id!r}"
    must(name != "" and module.replace(".", "_").isidentifier(), rule)
    try:
        found: Any = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        rule = f"there is no module {module} in {os.getcwd()} or among the installed packages"
        must(error.name not in (module, module.partition(".")[0]), rule)
        fail(str(error))  # a package that the module imports is missing
    in_gymnasium = name in gymnasium.registry
    flags: list[str] = []
    if in_gymnasium:
        is_atari(name)  # refuse games that ale_py or the module registers under other names
        checked = check_gymnasium(env_id)
        if async_test:
            sentence, flags = recommend_vectorization(measure_speeds(env_id))
            print(sentence)
    else:
        must(callable(found), f"{module} has no class {name} and registers no such id")
        checked = check_gymnax(found())
    setting = setting_of(checked, in_gymnasium)
    if are_images(checked.obs_shape) and setting != "images":
        print(
            "The networks of these scripts flatten images; docs/extend.md shows how to use a CNN."
        )
    words = words_for(checked, setting)
    recommend(env_id, setting, words, flags)
    if "mujoco" in words:
        print(
            "mujoco selects the settings for locomotion, with a million steps. For simpler tasks,"
        )
        print("leave it out; docs/environments.md explains when.")


def recommend(env_id: str, setting: str, words: list[str], flags: list[str]) -> None:
    """Print the commands that train in this environment, one per framework."""
    scripts: dict[str, Path] = {}  # the first script of each framework
    for name, row in tomllib.loads((ROOT / "scripts.toml").read_text()).items():
        is_recommended = row["algorithm"] == "ppo" and name not in GRAPH_MODE
        if is_recommended and row["setting"] == setting:
            scripts.setdefault(row["framework"], ROOT / row["folder"] / f"{name}.py")
    print(f"{env_id}: OK. Train with one of these:")
    for framework, path in scripts.items():
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        command = shlex.join(["python", str(path), *words, "--env-id", env_id, *flags])
        print(f"    {command}  # {FRAMEWORKS[framework]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("env_id", help="my_module:MyEnv, or my_module:MyEnv-v0 for Gymnasium")
    parser.add_argument("--no-async-test", action="store_true", help="skip measuring async")
    args = parser.parse_args()
    main(args.env_id, async_test=not args.no_async_test)

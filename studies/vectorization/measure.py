"""Measure how many environments at once cost, in every way that the scripts step them.

    python -m studies.vectorization.measure > studies/vectorization/measured.jsonl

For 1 to 4,096 parallel environments it times 512 steps with random actions, restarts and episode
statistics, by the scripts' own VecEnv (others.py has that of vector and envpool), in these ways:

    sync, async, vector  Gymnasium: one after the other, a process each, CartPole's own in NumPy
    envpool              EnvPool, in C++, if it is installed: pip install envpool==1.2.5
    gymnax step          a jitted call for each step, whose observations come back to the host
    gymnax scan          one jitted call for all steps, whose observations and rewards are summed up

Nothing that is timed goes unread: of a compiled loop whose results nobody reads the compiler leaves
nothing. Yet the scan only sums observations up, so the compiler need not write them to memory, as
training must: its seconds are a lower bound.

Two clocks run. The first (start) covers VecEnv(), reset() and what comes before stepping at full
speed: of the scan, compiling it; of the others, the first step, in which gymnax step is compiled.
The second (seconds) covers the steps. Neither covers what a process loads once, as it takes a step
of one environment before; the drawing of actions; and, in gymnax, a first run of all steps, which
is slower than those after it.

A repetition of one way is one fresh process; ways take turns, in an order drawn anew for each
repetition. The first line of JSON has the settings, hardware and versions, the others a measurement
each.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata, util
from typing import Any

import numpy as np

from studies.machine import describe

GAMES = {  # name -> environment in gymnax, in Gymnasium
    "CartPole-v1": ("CartPole-v1", "CartPole-v1"),
    "Doors": ("envs.doors:Doors", "envs.doors_gymnasium:Doors-v0"),
}
WAYS = ("sync", "async", "vector", "envpool", "gymnax step", "gymnax scan")
ONLY_CARTPOLE = ("vector", "envpool")
MOST_PROCESSES = 64  # of async: it has one for each environment


# === One process ================================================================================
def in_gymnasium(how: str, env_id: str, num_envs: int, num_steps: int) -> tuple[float, float]:
    """Return the seconds of starting and of num_steps steps of num_envs environments."""
    from more.ppo_linen_gymnasium import VecEnv
    from studies.vectorization.others import OtherVecEnv

    begin = time.perf_counter()
    if how in ONLY_CARTPOLE:
        env = OtherVecEnv(how, num_envs, seed=1)
    else:
        env = VecEnv(env_id, num_envs, how, seed=1)
    env.reset()
    env.step(np.zeros(num_envs, np.int32))
    start = time.perf_counter() - begin
    actions = draw_actions(env.num_actions, num_steps, num_envs)
    begin = time.perf_counter()
    for action in actions:
        env.step(action)
    seconds = time.perf_counter() - begin
    env.envs.close()
    return start, seconds


def in_gymnax(how: str, env_id: str, num_envs: int, num_steps: int) -> tuple[float, float]:
    """Return the seconds of starting and of num_steps steps of num_envs environments."""
    import jax

    from ppo_linen import VecEnv

    begin = time.perf_counter()
    env = VecEnv(env_id, num_envs)
    _, state = jax.block_until_ready(jax.jit(env.reset)(jax.random.PRNGKey(1)))
    if how == "gymnax scan":
        shape = jax.ShapeDtypeStruct((num_steps, num_envs), np.int32)
        run = jax.jit(partial(scan, env)).lower(state, shape).compile()
    else:
        run = partial(step_by_step, jax.jit(env.step))
        run(state, np.zeros((1, num_envs), np.int32))
    start = time.perf_counter() - begin
    actions: Any = draw_actions(env.num_actions, num_steps, num_envs)
    if how == "gymnax scan":
        actions = jax.block_until_ready(jax.device_put(actions))
    state, _ = jax.block_until_ready(run(state, actions))
    begin = time.perf_counter()
    jax.block_until_ready(run(state, actions))  # sync
    return start, time.perf_counter() - begin


def draw_actions(num_actions: int, num_steps: int, num_envs: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    return rng.integers(num_actions, size=(num_steps, num_envs), dtype=np.int32)


def step_by_step(step_fn: Callable, state: Any, actions: Any) -> tuple[Any, Any]:
    """A call for each step, as where something outside JAX chooses the actions."""
    obs = None
    for action in actions:
        obs, state, _ = step_fn(state, action)
        obs = np.asarray(obs)  # sync
    return state, obs


def scan(env: Any, state: Any, actions: Any) -> tuple[Any, Any]:
    """All steps in one compiled loop; return the state, and the sum of all that came out."""
    import jax

    def step(state, action):
        obs, state, result = env.step(state, action)
        return state, obs.sum() + sum(x.sum() for x in jax.tree.leaves(result))

    state, sums = jax.lax.scan(step, state, actions)
    return state, sums.sum()


def measure(game: str, how: str, sizes: list[int], num_steps: int) -> None:
    """Print a line of JSON for each number of environments."""
    in_jax = how.startswith("gymnax")
    run, env_id = (in_gymnax, GAMES[game][0]) if in_jax else (in_gymnasium, GAMES[game][1])
    if how == "async":  # its processes are forks of one that has imported the script
        import multiprocessing

        multiprocessing.set_forkserver_preload(["more.ppo_linen_gymnasium"])
    run(how, env_id, 1, 1)  # imports, a backend, helpers: else the first size would pay for them
    for num_envs in sizes:
        start, seconds = run(how, env_id, num_envs, num_steps)
        row = {"game": game, "way": how, "num_envs": num_envs, "start": start, "seconds": seconds}
        print(json.dumps(row), flush=True)


# === All of them ================================================================================
def cells() -> Iterator[tuple[str, str]]:
    """The games and the ways that each can be stepped in here."""
    for game in GAMES:
        for way in WAYS:
            missing = way == "envpool" and util.find_spec("envpool") is None
            if not missing and (game == "CartPole-v1" or way not in ONLY_CARTPOLE):
                yield game, way


def race(sizes: list[int], num_steps: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Measure every game and way in a fresh process, repeats times."""
    order, turns = random.Random(1), list(cells())
    for repeat in range(1, repeats + 1):
        order.shuffle(turns)
        for game, way in turns:
            few = [x for x in sizes if way != "async" or x <= MOST_PROCESSES]
            if not few:
                continue
            words = ["--one", game, way, "--num-steps", str(num_steps)]
            words += ["--num-envs", *map(str, few)]
            command = [sys.executable, "-m", "studies.vectorization.measure", *words]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            print(f"repetition {repeat} of {repeats}: {game}, {way}", file=sys.stderr)
            for line in result.stdout.splitlines():
                yield json.loads(line) | {"repeat": repeat}


def main() -> None:
    name, lines = "python -m studies.vectorization.measure", (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog=name, description=lines[0])
    parser.add_argument("--num-envs", type=int, nargs="+", default=[4**i for i in range(7)])
    parser.add_argument("--num-steps", type=int, default=512, help="steps of a measurement")
    parser.add_argument("--repeats", type=int, default=5, help="fresh processes of each way")
    parser.add_argument("--one", nargs=2, metavar=("GAME", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(*args.one, args.num_envs, args.num_steps)
    else:
        settings = {name: getattr(args, name) for name in ("num_envs", "num_steps", "repeats")}
        packages = ["jax", "gymnax", "gymnasium", "numpy"]
        packages += ["envpool"] if util.find_spec("envpool") else []
        settings["hardware"] = describe() | {"usable_cpus": len(os.sched_getaffinity(0))}
        settings["versions"] = {name: metadata.version(name) for name in packages}
        print(json.dumps(settings), flush=True)
        for row in race(args.num_envs, args.num_steps, args.repeats):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

"""Measure how many environments at once cost, in every way that the scripts step them.

    python -m analysis.vectorization > results/vectorization.jsonl
    python -m analysis.vectorization --draw results/vectorization.jsonl

For 1 to 4,096 parallel environments it times 512 steps with random actions, restarts and episode
statistics, by the scripts' own VecEnv, in these ways:

    sync, async, vector  Gymnasium: one after the other, a process each, CartPole's own in NumPy
    envpool              EnvPool, in C++, if it is installed: pip install envpool==1.2.5
    gymnax step          a jitted call for each step, whose observations come back to the host
    gymnax scan          one jitted call for all steps, whose observations and rewards are summed up

Nothing that is timed goes unread: of a compiled loop whose results nobody reads the compiler leaves
nothing. What comes before the first step is timed apart (start): environments are made, programs
compiled. A repetition of one way is one fresh process; ways take turns, in an order drawn anew for
each repetition. The first line of JSON has the settings, hardware and versions, the others a
measurement each. --draw writes a figure beside the file, with 95% intervals over repetitions.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np

GAMES = {  # name -> environment in gymnax, in Gymnasium
    "CartPole-v1": ("CartPole-v1", "CartPole-v1"),
    "Doors": ("envs.doors:Doors", "envs.doors_gymnasium:Doors-v0"),
}
WAYS = ("sync", "async", "vector", "envpool", "gymnax step", "gymnax scan")
COLOURS = ("#E69F00", "#D55E00", "#CC79A7", "#009E73", "#56B4E9", "#0072B2")
ONLY_CARTPOLE = ("vector", "envpool")
MOST_PROCESSES = 64  # of async: it has one for each environment


# === One process ================================================================================
def in_gymnasium(how: str, env_id: str, num_envs: int, num_steps: int) -> tuple[float, float]:
    """Return the seconds of starting and of num_steps steps of num_envs environments."""
    from ppo_linen_gymnasium import VecEnv

    begin = time.perf_counter()
    env = VecEnv(env_id, num_envs, how, seed=1)
    actions = np.random.default_rng(1).integers(env.num_actions, size=(num_steps + 1, num_envs))
    env.reset(num_steps + 1)
    env.step(actions[0])
    start = time.perf_counter()
    for action in actions[1:]:
        env.step(action)
    end = time.perf_counter()
    env.envs.close()
    return start - begin, end - start


def in_gymnax(how: str, env_id: str, num_envs: int, num_steps: int) -> tuple[float, float]:
    """Return the seconds of compiling and of num_steps steps of num_envs environments."""
    import jax

    from ppo_linen import VecEnv

    begin = time.perf_counter()
    env = VecEnv(env_id, num_envs)
    keys = jax.random.split(jax.random.PRNGKey(1), 3)
    actions = jax.random.randint(keys[0], (2, num_steps, num_envs), 0, env.num_actions)
    _, state = jax.jit(env.reset)(keys[1])
    if how == "gymnax scan":
        run = jax.jit(partial(scan, env))
    else:
        run = partial(step_by_step, jax.jit(env.step))
    state, _ = jax.block_until_ready(run(state, actions[0]))
    start = time.perf_counter()
    jax.block_until_ready(run(state, actions[1]))  # sync
    return start - begin, time.perf_counter() - start


def step_by_step(step_fn: Callable, state: Any, actions: Any) -> tuple[Any, Any]:
    """A call for each step, as where something outside JAX chooses the actions."""
    obs = None
    for action in np.asarray(actions):
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

        multiprocessing.set_forkserver_preload(["ppo_linen_gymnasium"])
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
    order = random.Random(1)
    for repeat in range(1, repeats + 1):
        for game, way in order.sample(cell := list(cells()), len(cell)):
            few = [x for x in sizes if way != "async" or x <= MOST_PROCESSES]
            words = ["--one", game, way, "--num-steps", str(num_steps)]
            words += ["--num-envs", *map(str, few)]
            command = [sys.executable, "-m", "analysis.vectorization", *words]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            print(f"repetition {repeat} of {repeats}: {game}, {way}", file=sys.stderr)
            for line in result.stdout.splitlines():
                yield json.loads(line) | {"repeat": repeat}


def summary(rows: list[dict[str, Any]]) -> Any:
    """A row per game, way and number: the geometric mean of the seconds, and its 95% interval."""
    import pandas as pd

    from analysis import stats

    table, names = [], ["game", "way", "num_envs"]
    for _, group in pd.DataFrame(rows).groupby(names, sort=False):
        one = [""] * len(group)
        seconds = np.exp(stats.mean_interval(np.log(group["seconds"].to_numpy()), one))
        row = group.iloc[0][names].to_dict()
        row |= dict(zip(("seconds", "low", "high"), map(float, seconds), strict=True))
        table.append(row | {"start": float(group["start"].median()), "repeats": len(group)})
    return pd.DataFrame(table)


def draw(table: Any, num_steps: int) -> Any:
    """Plot seconds against the number of environments, a panel for each game."""
    from matplotlib.lines import Line2D

    from analysis import figures

    with figures.in_style():
        games = list(table["game"].unique())
        figure, panels = figures.make_panels(games, len(games), 4.0)
        looks = dict(zip(WAYS, zip(COLOURS, "sXpD^o", strict=True), strict=True))
        for axes, game in zip(panels, games, strict=True):
            for way, (colour, marker) in looks.items():
                part = table[(table["game"] == game) & (table["way"] == way)].sort_values(
                    "num_envs"
                )
                x, y = part["num_envs"], part["seconds"]
                axes.fill_between(x, part["low"], part["high"], color=colour, alpha=0.18, lw=0)
                axes.plot(x, y, color=colour, marker=marker, mec="white")
            axes.set(xscale="log", yscale="log", xlabel="parallel environments")
            axes.set_xticks(sorted(set(table["num_envs"])), minor=False)
            axes.set_xticks([], minor=True)
        panels[0].set_ylabel(f"seconds for {num_steps} steps of all of them")
        entries = [
            (Line2D([], [], color=colour, marker=marker), way)
            for way, (colour, marker) in looks.items()
            if way in set(table["way"])
        ]
        figures.add_legend(figure, entries)
    return figure


def parse() -> argparse.Namespace:
    name, lines = "python -m analysis.vectorization", (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog=name, description=lines[0])
    parser.add_argument("--num-envs", type=int, nargs="+", default=[4**i for i in range(7)])
    parser.add_argument("--num-steps", type=int, default=512, help="steps of a measurement")
    parser.add_argument("--repeats", type=int, default=5, help="fresh processes of each way")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw what was measured")
    parser.add_argument("--one", nargs=2, metavar=("GAME", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(*args.num_envs, args.num_steps, args.repeats) < 1:
        parser.error("--num-envs, --num-steps and --repeats must be positive")
    return args


def main() -> None:
    args = parse()
    if args.one:
        measure(*args.one, args.num_envs, args.num_steps)
    elif args.draw:
        from analysis import figures

        try:
            about, *rows = map(json.loads, args.draw.read_text().splitlines())
            table, num_steps = summary(rows), int(about["num_steps"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"vectorization: {args.draw} cannot be drawn: {error}", file=sys.stderr)
            sys.exit(2)
        args.draw.with_suffix(".png").write_bytes(figures.png(draw(table, num_steps)))
    else:
        from analysis.env_timing import hardware

        settings = {name: getattr(args, name) for name in ("num_envs", "num_steps", "repeats")}
        packages = ("jax", "gymnax", "gymnasium", "numpy")
        versions = {name: metadata.version(name) for name in packages}
        print(json.dumps(settings | {"hardware": hardware(), "versions": versions}), flush=True)
        for row in race(args.num_envs, args.num_steps, args.repeats):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

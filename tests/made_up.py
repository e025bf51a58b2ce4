"""Tables of runs whose truth a test chooses, without files."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from analysis import bench, runs, schema

LINEN, NNX, CACHED, _, COMPILE, TORCH = bench.MODES[:6]
FRAMEWORKS = {LINEN: "linen", NNX: "nnx", CACHED: "nnx", COMPILE: "torch", TORCH: "torch"}


def table(rows: pd.DataFrame | Sequence[dict[str, Any]], **common: Any) -> pd.DataFrame:
    """Return a complete table of runs; columns that are neither in rows nor common are empty."""
    frame = pd.DataFrame(rows).assign(**common)
    usual: dict[str, Any] = {"run": [f"run {i + 1}" for i in range(len(frame))], "size": "small"}
    usual |= {"env_id": "CartPole-v1", "repeat": 1.0, "platform": "here", "compile_mode": "jit"}
    for name, x in usual.items():
        if name not in frame:
            frame[name] = x
    if "framework" not in frame:
        frame["framework"] = [FRAMEWORKS.get(x, x.split(" ")[0]) for x in frame["mode"]]
    return runs.fill(frame)


def grid(
    modes: dict[str, tuple[float, float]],
    envs: Sequence[str] = ("CartPole-v1",),
    repeats: int = 1,
    length: int = 100,
    noise: float = 0.0,
    seed: int = 0,
    **common: Any,
) -> pd.DataFrame:
    """Return a run per mode, environment and repeat, from each mode's startup and iteration.

    The n-th environment's iterations take 2 ** n times as long. Noise is log-normal, and of the
    startup and the iteration apart; a startup is imports, set-up and iteration 0 as 3 : 2 : 5.
    """
    rng, rows = np.random.default_rng(seed), []
    for mode, (i, env), repeat in product(modes, enumerate(envs), range(1, repeats + 1)):
        startup, steady = modes[mode] * np.exp(noise * rng.standard_normal(2))
        steady *= 2**i
        row = {"mode": mode, "env_id": env, "repeat": float(repeat), "num_iterations": length}
        row |= {"imports": 0.3 * startup, "setup": 0.2 * startup, "first": 0.5 * startup}
        row |= {"startup": startup, "steady": steady, "early": steady, "batch_size": 1000}
        row |= {"process": startup + (length - 1) * steady}
        rows.append(row | {"run": f"{mode}, {env}, {repeat}"})
    return table(rows, **common)


def only_bench(
    frame: pd.DataFrame, iterations: pd.DataFrame | None = None, baseline: str | None = None
) -> bench.Bench:
    """Return the bench of runs that are of one platform and one set of hyperparameters."""
    found = schema.complete(pd.DataFrame() if iterations is None else iterations, schema.ITERATIONS)
    [made] = bench.benches(runs.Data(frame, found, {}), baseline)
    return made

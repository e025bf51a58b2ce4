"""Tables of runs whose truth a test chooses, without files."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from analysis import measures, runs, schema

LINEN, NNX, CACHED, _, COMPILE, TORCH = measures.MODES[:6]
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
    return runs.fill(schema.check(frame, schema.RUNS)[0])


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
    rng = np.random.default_rng(seed)
    rows = []
    for mode, (i, env), repeat in product(modes, enumerate(envs), range(1, repeats + 1)):
        startup, steady = modes[mode] * np.exp(noise * rng.standard_normal(2))
        steady *= 2**i
        row = {"mode": mode, "env_id": env, "repeat": float(repeat), "num_iterations": length}
        row |= {"imports": 0.3 * startup, "setup": 0.2 * startup, "first": 0.5 * startup}
        row |= {"startup": startup, "steady": steady, "early": steady, "batch_size": 1000}
        row |= {"process": startup + (length - 1) * steady}
        rows.append(row | {"run": f"{mode}, {env}, {repeat}"})
    return table(rows, **common)


def returning(values: dict[str, Any], env: str = "CartPole-v1", **common: Any) -> pd.DataFrame:
    """Return runs with the final returns given for each mode, numbered from 1."""
    parts = []
    for mode, returns in values.items():
        part = grid({mode: (6.0, 0.1)}, (env,), repeats=len(returns), **common)
        parts.append(part.assign(final_return=np.array(returns, float)))
    return pd.concat(parts, ignore_index=True)


def logs(
    frame: pd.DataFrame, returns: Callable | None = None, loss: Callable | None = None
) -> pd.DataFrame:
    """Return ten iterations of each run: a return and a loss by a function of its row and of i.

    Without one, every run has losses of its own, and no returns. Iteration 0 compiles.
    """
    rows = []
    for own, (_, run) in enumerate(frame.iterrows()):
        for i in range(10):
            row = {"run": run["run"], "iteration": float(i), "global_step": 100.0 * (i + 1)}
            row["time/iteration"] = run["steady"] if i else run["first"]
            row["time/elapsed"] = run["setup"] + run["first"] + i * run["steady"]
            row["losses/entropy"] = loss(run, i) if loss else 0.5 + own
            row["charts/episodic_return"] = returns(run, i) if returns else np.nan
            rows.append(row)
    return schema.check(pd.DataFrame(rows), schema.ITERATIONS)[0]


def data_of(frame: pd.DataFrame, iterations: pd.DataFrame | None = None, **more: Any) -> runs.Data:
    """Return runs, numbered anew, as a source would give them."""
    table = pd.DataFrame() if iterations is None else iterations
    found, _ = schema.check(table, schema.ITERATIONS)
    return runs.Data(frame.reset_index(drop=True), found, more.pop("left_out", {}), **more)


def only_bench(
    frame: pd.DataFrame, iterations: pd.DataFrame | None = None, baseline: str | None = None
) -> measures.Bench:
    """Return the bench of runs that are of one platform and one set of hyperparameters."""
    [made] = measures.benches(data_of(frame, iterations), baseline)
    return made


def by(frame: pd.DataFrame, *names: str) -> dict[Any, dict[str, Any]]:
    """Return the rows of a table, by the values in the columns named."""
    rows = frame.to_dict("records")
    found = {tuple(row[x] for x in names) if len(names) > 1 else row[names[0]]: row for row in rows}
    assert len(found) == len(rows)
    return found

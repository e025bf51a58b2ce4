"""Runs that may be compared with each other, and the order in which they are shown.

A bench is all runs of one platform and one set of hyperparameters.
"""

import json
from collections.abc import Sequence
from itertools import combinations
from math import comb
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import schema
from analysis.runs import Data, is_untimed

BASELINES = ("ppo_linen", "dqn_linen")
# The order of tables and figures; what is not here comes after it, by name.
MODES = (
    *("ppo_linen", "ppo_nnx", "ppo_nnx_cached", "ppo_equinox", "ppo_torch_compile", "ppo_torch"),
    *("ppo_linen_vmap", "ppo_nnx_vmap", "ppo_torch_vmap"),
    *("ppo_linen_gymnasium", "ppo_torch_gymnasium"),
    *("sbx", "sb3", "sb3 --threads 1"),
    *("dqn_linen", "dqn_torch --compile", "dqn_torch", "dqn_linen_gymnasium"),
    *("dqn_torch_gymnasium --compile", "dqn_torch_gymnasium"),
    *("ppo_linen --no-jit", "ppo_nnx --no-jit", "ppo_equinox --no-jit", "ppo_torch --no-jit-env"),
)
SIZES = ("small", "medium", "large")


class Bench(NamedTuple):
    """Runs that may be compared: of one platform, one algorithm and its hyperparameters."""

    title: str
    runs: pd.DataFrame  # not made to wait between phases, or all if there are none
    synced: pd.DataFrame  # those with --sync-for-timing and steady phases
    iterations: pd.DataFrame  # of runs
    baseline: str
    synced_baseline: str


# === Choices ====================================================================================
def benches(data: Data, baseline: str | None = None) -> list[Bench]:
    """Return the benches of data, those with most runs first."""
    keys = ["platform", "algorithm", "settings"]
    groups = [x for _, x in data.runs.groupby(keys, sort=False)]
    groups.sort(key=len, reverse=True)
    titles = describe_benches(groups)
    return [make_bench(*pair, data, baseline) for pair in zip(titles, groups, strict=True)]


def describe_benches(groups: Sequence[pd.DataFrame]) -> list[str]:
    """Return each group's platform and, of its hyperparameters, those that the groups differ in."""
    titles = []
    several = len({x["algorithm"].iloc[0] for x in groups}) > 1
    for group in groups:
        platform, algorithm, text = group[["platform", "algorithm", "settings"]].iloc[0]
        # Those of another algorithm have other names: to list them all would tell nothing.
        alike = [x["settings"].iloc[0] for x in groups if x["algorithm"].iloc[0] == algorithm]
        parts = [algorithm.upper() if several else "", platform or "platform not named"]
        titles.append(", ".join(filter(None, [*parts, differences(alike)[text]])))
    return titles


def differences(texts: Sequence[str]) -> dict[str, str]:
    """Return each text of hyperparameters and, in words, those that the texts differ in."""
    settings = {text: as_object(text) for text in texts}
    names = sorted({name for x in settings.values() for name in x})
    differ = [x for x in names if len({json.dumps(y.get(x)) for y in settings.values()}) > 1]
    return {
        text: schema.clean(", ".join(f"{x} {own[x]}" for x in differ if x in own))
        for text, own in settings.items()
    }


def as_object(settings: str) -> dict[str, Any]:
    """Return hyperparameters by name; in a foreign table they may be any text, or none."""
    try:
        found = json.loads(settings)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"settings": settings} if settings else {}


def make_bench(title: str, runs: pd.DataFrame, data: Data, baseline: str | None) -> Bench:
    synced = runs[runs["sync"] & runs["rollout_steady"].notna()]
    runs = runs if runs["sync"].all() else runs[~runs["sync"]]
    iterations = data.iterations[data.iterations["run"].isin(runs["run"])]
    names = [choose_baseline(x, baseline) for x in (runs, synced)]
    return Bench(title, runs, synced, iterations, *names)


def choose_baseline(runs: pd.DataFrame, wanted: str | None) -> str:
    """Return the mode wanted if it was run, or else the JAX one, or the mode with most runs."""
    counts = runs["mode"].value_counts()
    found = [x for x in (wanted, *BASELINES, *counts.index) if x in counts.index]
    return str(found[0]) if found else ""


def mode_order(modes: Sequence[str] | pd.Series) -> list[str]:
    return [x for x in MODES if x in set(modes)] + sorted(set(modes) - set(MODES))


def size_order(sizes: Sequence[str] | pd.Series) -> list[str]:
    return [x for x in SIZES if x in set(sizes)] + sorted(set(sizes) - set(SIZES))


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table by size, environment (as they come) and mode."""
    orders = {"size": size_order, "env_id": pd.unique, "mode": mode_order}
    orders = {x: list(order(table[x])) for x, order in orders.items() if x in table}
    places = [table[x].map({y: i for i, y in enumerate(order)}) for x, order in orders.items()]
    return table.iloc[np.lexsort(places[::-1])].reset_index(drop=True)


def timed(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that count for durations: never resumed, and one of each program's agents."""
    return runs[~is_untimed(runs)]


def under_load(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs at whose start others wanted the cores; one may be the run before it."""
    return runs[runs["load"] > runs["cores"] + 1]


def shared(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of some modes in environments that have all of these, which may be none.

    Means over environments may be compared only if they are the same ones. Where a mode lacks some,
    they are left out or the mode is, whichever leaves more pairs of modes to compare.
    """
    envs = [set(x) for _, x in runs.groupby("mode")["env_id"]]
    if len(envs) < 2:
        return runs
    choices = [set.intersection(*envs), *(a & b for a, b in combinations(envs, 2))]

    def pairs(choice: set[str]) -> int:
        return len(choice) * comb(sum(choice <= x for x in envs), 2)

    best = max(choices, key=pairs)
    part = runs[runs["env_id"].isin(best)]
    return part[part.groupby("mode")["env_id"].transform("nunique") == len(best)]

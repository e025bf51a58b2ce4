"""Returns of continuous PPO and SAC on robots, and the effect of running statistics."""

import json
from pathlib import Path

import pandas as pd

from analysis import figures, learning, stats
from analysis.formatting import number
from analysis.measures import experiments, in_order
from analysis.page import Table
from analysis.runs import load
from analysis.tables import across, texts

ENVIRONMENTS = ["Pendulum-v1", "InvertedPendulum-v5", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"]
LEARNED = ("Pendulum-v1", "InvertedPendulum-v5")  # the others are in studies/returns
ABLATIONS = {
    "norm_obs": "observations not normalized",
    "norm_reward": "rewards not scaled",
}
ABLATED = {  # environment -> script of the ablation
    "Pendulum-v1": "ppo_continuous_linen",
    "HalfCheetah-v5": "ppo_continuous_linen_gymnasium",
}


def read(source: Path, algorithm: str = "ppo") -> pd.DataFrame:
    """Return one row per run, including the ablated flags, which are always True for SAC."""
    runs = load(source).runs
    runs = runs[runs["algorithm"] == algorithm].copy()
    settings = runs["settings"].map(json.loads)
    for name in ABLATIONS:
        runs[name] = settings.map(lambda x, key=name: x.get(key, True))
    return runs.sort_values(["env_id", "mode"], key=lambda x: x.map(order), kind="stable")


def order(name: str) -> str:
    """Return a sort key: the position of an environment in ENVIRONMENTS, or the script name."""
    return str(ENVIRONMENTS.index(name)) if name in ENVIRONMENTS else name


def learning_table(source: Path) -> Table:
    """Return the mean and minimum return over seeds, by script (rows) and environment (columns)."""
    runs = read(source)
    runs = runs[runs["norm_obs"] & runs["norm_reward"] & runs["env_id"].isin(LEARNED)]
    keys = ["env_id", "mode"]
    frame = runs.groupby(keys, sort=False)["last_100_return"].agg(["mean", "min", "count"])
    frame = frame.reset_index().rename(columns={"mode": "script"})
    shown = frame["mean"].map(number) + " (" + frame["min"].map(number) + ")"
    cells = across(frame, shown, ["script"], "env_id").fillna("-")
    return Table("robots_learning", "Return of the last 100 episodes", frame, cells)


def sac_table(source: Path) -> Table:
    """Return the greedy return of each seed, with one row per script and environment."""
    runs = read(source, "sac")
    runs["steps"] = runs["num_iterations"] * runs["batch_size"]
    keys = ["env_id", "steps", "mode"]
    columns = ["greedy_return", "final_return"]
    frame = runs.sort_values("seed").groupby(keys, sort=False)[columns].agg(list).reset_index()
    cells = frame[["mode", "env_id"]].rename(columns={"mode": "script", "env_id": "environment"})
    cells["steps"] = frame["steps"].map("{:,.0f}".format)
    cells["greedy return, by seed"] = frame["greedy_return"].map(listed)
    cells["return in the last training iteration, by seed"] = frame["final_return"].map(listed)
    return Table("robots_sac", "Returns of SAC agents", frame, cells)


def listed(values: list[float]) -> str:
    return "; ".join(map(number, values))


def ablation_table(source: Path) -> Table:
    """Return the effect of each flag, with Welch's interval, per environment and flag."""
    runs = read(source)
    rows = []
    for env_id, script in ABLATED.items():
        here = runs[(runs["env_id"] == env_id) & (runs["mode"] == script)]
        whole = here[here["norm_obs"] & here["norm_reward"]]["last_100_return"].to_numpy()
        for name, meaning in ABLATIONS.items():
            without = here[~here[name]]["last_100_return"].to_numpy()
            found = stats.welch(whole, without)._asdict()
            row = {"environment": env_id, "change": meaning, "seeds": len(without)}
            rows.append(row | {"with": whole.mean(), "without": without.mean()} | found)
    frame = pd.DataFrame(rows)
    cells = frame[["environment", "change", "seeds"]].astype(str)
    cells["with both"] = frame["with"].map(number)
    cells["without"] = frame["without"].map(number)
    cells["difference"] = texts(frame)
    return Table("robots_ablations", "Effect of the running statistics", frame, cells)


def compiled_table(source: Path) -> Table:
    """Return the uncompiled and compiled returns and their difference, per environment."""
    runs = load(source).runs
    rows = []
    for env_id, here in runs.groupby("env_id"):
        is_compiled = here["mode"].str.contains("compile")
        plain = here[~is_compiled]["last_100_return"].to_numpy()
        compiled = here[is_compiled]["last_100_return"].to_numpy()
        row = {"environment": env_id, "seeds": len(plain), "plain": plain.mean()}
        row |= {"compiled": compiled.mean()} | stats.welch(plain, compiled)._asdict()
        rows.append(row)
    frame = pd.DataFrame(rows)
    cells = frame[["environment", "seeds"]].astype(str)
    cells["PyTorch"] = frame["plain"].map(number)
    cells["compiled PyTorch"] = frame["compiled"].map(number)
    cells["difference"] = texts(frame)
    return Table("robots_compiled", "Compiled and uncompiled PyTorch", frame, cells)


def curves(source: Path) -> pd.DataFrame:
    """Return learning curves of PPO in the environments in LEARNED, as rows for figures.bands."""
    parts = []
    for experiment in experiments(load(source)):
        settings = experiment.runs["settings"].map(json.loads)
        plain = settings.map(lambda x: all(x.get(name, True) for name in ABLATIONS))
        is_shown = experiment.runs["env_id"].isin(LEARNED) & (experiment.runs["algorithm"] == "ppo")
        runs = experiment.runs[plain & is_shown]
        parts.append(learning.progress(experiment._replace(runs=runs)))
    points = pd.concat(parts, ignore_index=True).rename(columns={"steps": "x", "env_id": "panel"})
    return points.sort_values("panel", kind="stable")


def update(source: Path, out: Path) -> None:
    """Draw the figure of the study."""
    points = curves(source)
    runs = load(source).runs
    modes = in_order(runs[runs["mode"].isin(points["mode"])].drop_duplicates("mode"))
    figure = figures.bands(points, figures.styles(modes), "steps", "mean return")
    (out / "answer.png").write_bytes(figures.png(figure))


BLOCKS = {
    "robots_learning": learning_table,
    "robots_sac": sac_table,
    "robots_ablations": ablation_table,
    "robots_compiled": compiled_table,
}

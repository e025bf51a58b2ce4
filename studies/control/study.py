"""What continuous PPO and SAC learn, what running statistics bring, what an iteration costs."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import figures, races, stats
from analysis.formatting import number
from analysis.page import Table
from analysis.runs import load
from analysis.stats import Interval
from analysis.tables import across, span, table_of, text, texts, value
from studies.control import dearness_study
from studies.control.cost import LINEN, PPO_BIG, PROGRAMS, SAC, TARGETS
from studies.peers.study import HUES

ENVIRONMENTS = ["Pendulum-v1", "InvertedPendulum-v5", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"]
ABLATIONS = {
    "norm_obs": "observations not normalised",
    "norm_reward": "rewards not scaled",
}
ABLATED = {  # environment -> the script in which the switches were tried
    "Pendulum-v1": "ppo_continuous_linen",
    "HalfCheetah-v5": "ppo_continuous_linen_gymnasium",
}
LIBRARY = "sb3"
# Mean and standard deviation of ten seeds of Tianshou's SAC in HalfCheetah-v3, without drawing
# actions: examples/mujoco/benchmark/HalfCheetah-v3/result.json of thu-ml/tianshou, commit 22c0b9bd.
PUBLISHED = {
    50_000: (4747.2, 345.0),
    100_000: (6514.6, 514.2),
    200_000: (8207.6, 928.3),
    300_000: (9059.3, 1051.4),
}
RACED = {  # what a peer's file is, in races.jsonl
    "lean_ppo_continuous_action": "LeanRL",
    "lean_ppo_continuous_action_torchcompile": "LeanRL, compiled",
    "cleanrl_ppo": "CleanRL",
    "ppo_sb3": "Stable-Baselines3",
}
SHOWN = (PPO_BIG, SAC)  # the settings in the figure


def read(source: Path, algorithm: str = "ppo") -> pd.DataFrame:
    """Return a row per run, with what it returned and its two switches, which SAC has not."""
    runs = load(source).runs
    runs = runs[runs["algorithm"] == algorithm].copy()
    settings = runs["settings"].map(json.loads)
    for name in ABLATIONS:
        runs[name] = settings.map(lambda x, key=name: x.get(key, True))
    return runs.sort_values(["env_id", "mode"], key=lambda x: x.map(order), kind="stable")


def order(name: str) -> str:
    """What a name is sorted by: environments as above, scripts by their names."""
    return str(ENVIRONMENTS.index(name)) if name in ENVIRONMENTS else name


def learning_table(source: Path) -> Table:
    """A row per script, and a column per environment: the mean over seeds, and each worst seed."""
    runs = read(source)
    runs = runs[runs["norm_obs"] & runs["norm_reward"]]
    keys = ["env_id", "mode"]
    frame = runs.groupby(keys, sort=False)["last_100_return"].agg(["mean", "min", "count"])
    frame = frame.reset_index().rename(columns={"mode": "script"})
    shown = frame["mean"].map(number) + " (" + frame["min"].map(number) + ")"
    cells = across(frame, shown, ["script"], "env_id").fillna("-")
    return Table("control_learning", "Return of the last 100 episodes", frame, cells)


def sac_table(source: Path) -> Table:
    """A row per script and environment: what each seed's agent returns when it explores no more."""
    runs = read(source, "sac")
    runs["steps"] = runs["num_iterations"] * runs["batch_size"]
    keys = ["env_id", "steps", "mode"]
    columns = ["greedy_return", "final_return"]
    frame = runs.sort_values("seed").groupby(keys, sort=False)[columns].agg(list).reset_index()
    cells = frame[["mode", "env_id"]].rename(columns={"mode": "script", "env_id": "environment"})
    cells["steps"] = frame["steps"].map("{:,.0f}".format)
    cells["greedy, by seed"] = frame["greedy_return"].map(listed)
    cells["last iteration of training, by seed"] = frame["final_return"].map(listed)
    return Table("control_sac", "What SAC's agents return", frame, cells)


def curve_table(source: Path) -> Table:
    """SAC's run to 300,000 steps in HalfCheetah beside PUBLISHED, a row per number of steps there.

    Ours are means of the last five iterations.
    """
    data = load(source)
    longest = data.runs["num_iterations"] == 60
    run = data.runs[longest & (data.runs["algorithm"] == "sac")]
    log = data.iterations[data.iterations["run"].isin(run["run"])].sort_values("iteration")
    means = log.set_index("global_step")["charts/episodic_return"].rolling(5).mean()
    rows = [
        {"steps": steps, "ours": means.loc[steps], "published": published, "std": std}
        for steps, (published, std) in PUBLISHED.items()
    ]
    frame = pd.DataFrame(rows)
    cells = pd.DataFrame({"steps": frame["steps"].map("{:,}".format)})
    cells["sac_linen_gymnasium, in training"] = frame["ours"].map(number)
    cells["Tianshou, published"] = frame["published"].map(number) + " ± " + frame["std"].map(number)
    return Table("control_sac_curve", "SAC in HalfCheetah", frame, cells)


def listed(values: list[float]) -> str:
    return "; ".join(map(number, values))


def ablation_table(source: Path) -> Table:
    """A row per environment and switch: the return with and without, and Welch's interval."""
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
    cells["with all"] = frame["with"].map(number)
    cells["without"] = frame["without"].map(number)
    cells["difference"] = texts(frame)
    return Table("control_ablations", "What the running statistics bring", frame, cells)


def costs(path: Path, algorithm: str) -> pd.DataFrame:
    """A row per setting and script: its start, its ratios to Linen and SB3, and its seconds.

    The seconds are Linen's mean times the ratio, so that all are of Linen's rounds. Two rounds say
    too little of their spread for an interval.
    """
    rows = pd.DataFrame(map(json.loads, path.read_text().splitlines()))
    rows = rows[rows["setting"].str.startswith(algorithm)]
    rows = in_order(rows)
    keys = ["setting", "script"]
    by_script = rows.groupby(keys, sort=False, as_index=False)
    frame = by_script.agg(start=("cpu_start", "median"), rounds=("round", "size"))
    for of in (LINEN, LIBRARY):
        found = ratios(rows, of).set_index(keys)
        frame = frame.join(found.add_prefix(f"{of}_"), on=keys)
        frame.loc[frame["script"] == of, [f"{of}_low", f"{of}_high"]] = math.nan  # itself
    linen = rows[rows["script"] == LINEN]
    seconds = stats.of_groups(linen, ["setting"], "cpu_each", stats.geometric_mean)
    seconds = seconds.set_index("setting")["estimate"].rename("seconds")
    frame = frame.join(seconds, on="setting")
    frame["each"] = frame["seconds"] * frame[f"{LINEN}_estimate"]
    return frame


def in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Settings and scripts in the order of cost.py; unknown ones come last."""
    places = {(x.setting, x.name): i for i, x in enumerate(PROGRAMS)}
    keys = zip(rows["setting"], rows["script"], strict=True)
    place = [places.get(key, len(places)) for key in keys]
    return rows.assign(place=place).sort_values("place", kind="stable")


def ratios(rows: pd.DataFrame, of: str) -> pd.DataFrame:
    """A row per setting and script: how many times as long as another, within a round."""
    keys = ["setting", "script"]
    baseline = rows[rows["script"] == of].set_index(["round", "setting"])["cpu_each"]
    pairs = rows.join(baseline.rename("baseline"), on=["round", "setting"])
    pairs["ratio"] = pairs["cpu_each"] / pairs["baseline"]
    frame = stats.of_groups(pairs, keys, "ratio", stats.geometric_mean)
    counts = pairs.groupby(keys, as_index=False).agg(pairs=("ratio", "count"))
    frame = frame.merge(counts, on=keys)
    frame.loc[frame["pairs"] < 3, ["low", "high"]] = math.nan
    return frame


def target_table(path: Path) -> Table:
    """A row per target of cost.py: met or missed where the interval says so."""
    rows = pd.DataFrame(map(json.loads, path.read_text().splitlines()))
    found = []
    for target in TARGETS:
        frame = ratios(rows[rows["setting"] == target.setting], target.of)
        frame = frame[frame["script"] == target.script]
        found.append(frame.assign(of=target.of, most=target.most))
    frame = pd.concat(found, ignore_index=True)
    frame["verdict"] = "undecided"
    frame.loc[frame["high"] <= frame["most"], "verdict"] = "met"
    frame.loc[frame["low"] > frame["most"], "verdict"] = "missed"
    columns = {
        "setting": text("setting"),
        "script": text("script"),
        "times as long as": text("of"),
        "at most": value("most"),
        "measured": span(),
        "the interval says": text("verdict"),
    }
    return table_of("control_targets", "Targets of the costs", frame, columns)


def ppo_costs(path: Path) -> Table:
    columns = {
        "setting": text("setting"),
        "script": text("script"),
        "start (CPU s)": value("start"),
        "rounds": text("rounds"),
        "an iteration (CPU s)": value("each"),
        f"times as long as {LINEN}": span(f"{LINEN}_"),
        f"as {LIBRARY}": span(f"{LIBRARY}_"),
    }
    caption = "CPU time of an iteration of 2,048 steps by PPO"
    return table_of("control_cost_ppo", caption, costs(path, "PPO"), columns)


def sac_costs(path: Path) -> Table:
    columns = {
        "script": text("script"),
        "start (CPU s)": value("start"),
        "rounds": text("rounds"),
        "a step and its update (CPU ms)": value("each", 1000),
        f"times as long as {LINEN}": span(f"{LINEN}_"),
        f"as {LIBRARY}": span(f"{LIBRARY}_"),
    }
    caption = "CPU time of a step by SAC, with its update"
    return table_of("control_cost_sac", caption, costs(path, "SAC"), columns)


def scan_table(path: Path) -> Table:
    """A row per algorithm, network and script: a step, and how many times it takes of one scan's.

    The last is the ratio to the script in Linen whose environments, acting and learning are one
    compiled call.
    """
    rows = pd.DataFrame(map(json.loads, path.read_text().splitlines()))
    keys = ["algorithm", "network", "script"]
    rows["step"] = rows["iteration"] / rows["steps"]
    scans = {"ppo": "ppo_continuous_linen", "sac": "sac_linen"}
    is_scan = rows["script"] == rows["algorithm"].map(scans)
    where = ["round", "algorithm", "network"]
    rows = rows.join(rows[is_scan].set_index(where)["step"].rename("scan"), on=where)
    rows["ratio"] = rows["step"] / rows["scan"]
    frame = stats.of_groups(rows, keys, "ratio", stats.geometric_mean)
    frame.loc[frame["script"] == frame["algorithm"].map(scans), ["low", "high"]] = math.nan
    frame = frame.join(rows.groupby(keys)["step"].median(), on=keys)
    frame = frame.sort_values(["algorithm", "network", "step"], ascending=[True, False, True])
    frame["training"] = frame["algorithm"].str.upper() + ", " + frame["network"]
    columns = {
        "training": text("training"),
        "script": text("script"),
        "a step (µs)": value("step", 1e6),
        "times as long as one scan": span(),
    }
    return table_of("control_scan", "A step in Pendulum-v1, with its updates", frame, columns)


def steps_table(path: Path) -> Table:
    """A row per environment: the microseconds of a step, the median of the rounds."""
    rows = pd.DataFrame(map(json.loads, path.read_text().splitlines()))
    by_env = rows.groupby("env_id", sort=False, as_index=False)
    frame = by_env.agg(microseconds=("microseconds", "median")).sort_values("microseconds")
    columns = {"environment": text("env_id"), "a step (µs)": value("microseconds")}
    return table_of("control_steps", "What a step of a robot takes", frame, columns)


@figures.styled
def draw_costs(path: Path) -> Figure:
    """Plot what an iteration of PPO and a step of SAC take, a panel each, the shortest on top.

    An interval is that of the ratio to Linen, cut and marked where it goes far beyond all bars.
    """
    titles = ["PPO: an iteration (CPU s)", "SAC: a step (CPU ms)"]
    figure, panels = figures.make_panels(titles, 2, 3.2, figures.LONE, sharey=False)
    for axes, algorithm, factor in zip(panels, ("PPO", "SAC"), (1, 1000), strict=True):
        frame = costs(path, algorithm)
        frame = frame[frame["setting"].isin(SHOWN)].sort_values("each", ascending=False)
        frame["framework"] = frame["script"].map(framework_of)
        looks = figures.looks(frame.rename(columns={"script": "mode"}), HUES)
        places = range(len(frame))
        length = frame["each"] * factor
        colours = [looks[script]["color"] for script in frame["script"]]
        axes.barh(places, length, 0.62, color=colours)
        linen = length[frame["script"] == LINEN].iloc[0]
        low, high = frame[[f"{LINEN}_low", f"{LINEN}_high"]].to_numpy(float).T * linen
        cut = figures.FARTHEST_WHISKER * length.max()
        ends = np.minimum(high, cut)
        leaves = high > cut
        axes.plot([low, ends], [places, places], color=figures.DARK, linewidth=1)
        axes.plot(ends[leaves], np.flatnonzero(leaves), ">", color=figures.DARK, markersize=4)
        farthest = np.fmax(length.to_numpy(), np.nan_to_num(ends))
        for place, seconds, end in zip(places, length, farthest, strict=True):
            at = (end, place)
            axes.annotate(number(seconds), at, (5, 0), textcoords="offset points", va="center")
        axes.set_yticks(places, list(frame["script"]))
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, 1.15 * farthest.max())
    line = Line2D([], [], color=figures.DARK)
    mark = Line2D([], [], color=figures.DARK, marker=">", linestyle="", markersize=4)
    entries: list[tuple[Any, str]] = [(line, "95% interval of the ratio to linen_gymnasium")]
    figures.add_legend(figure, [*entries, (mark, figures.GOES_ON)])
    return figure


def framework_of(script: str) -> str:
    """Whose colour a script has: ours by framework, each peer its own."""
    first = script.split("_")[0]
    return script if first not in ("linen", "torch", "sb3", "sbx") else first


def race_table(path: Path) -> Table:
    """A row per program of the race: milliseconds, and times as long as Linen."""
    (race,) = races.read(path)
    times, ratios = race.times(), race.ratios()
    rows = []
    for name in times:
        script = RACED.get(str(name), str(name))
        rows.append((script, 1000 * times[name].median(), *ratios.get(name, Interval(1, 1, 1))))
    frame = pd.DataFrame(rows, columns=["mode", "ms", *Interval._fields])
    columns = {"an iteration (ms)": value("ms"), "times as long as our Linen": span()}
    return table_of("control_race", "By turns", frame, columns)


BLOCKS = {
    "control_learning": learning_table,
    "control_sac": sac_table,
    "control_sac_curve": curve_table,
    "control_ablations": ablation_table,
    "control_cost_ppo": ppo_costs,
    "control_cost_sac": sac_costs,
    "control_targets": target_table,
    "control_scan": scan_table,
    "control_steps": steps_table,
    "control_race": race_table,
} | dearness_study.BLOCKS


def update(source: Path, out: Path) -> None:
    """Draw the study's figures."""
    figure = dearness_study.draw(source / "dearness.jsonl")
    (out / "control_dearness.png").write_bytes(figures.png(figure))
    figure = draw_costs(source / "cost.jsonl")
    (out / "control_cost.png").write_bytes(figures.png(figure))

"""Comparison of our scripts with other PPO libraries."""

from pathlib import Path

import pandas as pd

from analysis import figures, report, stats, tables
from analysis.measures import MODES, Experiment, experiments, mode_order, summarize, timed
from analysis.page import Table
from analysis.runs import load
from analysis.tables import multiple, span, table_of, text, value

LINEN, LIBRARY = "ppo_linen", "sb3"
PEERS = ("purejaxrl", "rejax", "jaxnasium", "sbx", "skrl_jax")  # JAX first, then PyTorch
PEERS += ("cleanrl", "skrl_torch", "torchrl", "sb3")
RACES = ("CartPole-v1", "Rust and C")
HUES = {"sb3": "#8C564B", "sbx": "#7F7F00"}


def order(experiment: Experiment) -> list[str]:
    """Return the scripts, ours first and then PEERS."""
    return mode_order(experiment.runs["mode"], [*MODES, *PEERS])


def peers(experiment: Experiment) -> pd.DataFrame:
    """Return one row per script: its times, ratios to two other scripts, and the final return."""
    frame = summarize(experiment.runs, ("startup", "steady", "process"), LINEN).set_index("mode")
    others = summarize(experiment.runs, ("steady",), LIBRARY).set_index("mode")
    runs = timed(experiment.runs)
    returns = stats.of_groups(runs, ["mode"], "final_return", stats.median_interval)
    returns = returns.set_index("mode")
    for end in stats.Interval._fields:
        frame[f"library_{end}"] = others[f"steady_{end}"]
        frame[f"return_{end}"] = returns[end]
    return frame.loc[order(experiment)].reset_index()


def peer_table(source: Path) -> Table:
    columns = {
        "script": text("mode"),
        "runs": text("runs"),
        "startup (s)": value("startup"),
        "time per iteration (ms)": value("steady", 1000),
        f"time / {LINEN} time": multiple("steady_"),
        f"time / {LIBRARY} time": multiple("library_"),
        "100 iterations (s)": value("process"),
        "median final return": span("return_"),
    }
    caption = "Other PPO libraries"
    return table_of("peers", caption, peers(experiments(load(source))[0]), columns)


BLOCKS = {"peers": peer_table}


def update(source: Path, out: Path) -> None:
    """Draw the bar chart of training times, in the order of the table, and the race figure."""
    experiment = experiments(load(source))[0]
    scripts = experiment.runs.drop_duplicates("mode").set_index("mode").loc[order(experiment)]
    [plot] = report.answer_bars(experiment, figures.styles(scripts.reset_index(), HUES))
    (out / "answer.png").write_bytes(figures.png(plot.figure))
    frames = [tables.race_table(source / "races.jsonl", name).frame for name in RACES]
    race = pd.concat(frames).drop_duplicates("program")
    ours = [x for x in race["program"] if x in MODES]
    label = f"time per iteration / {LINEN} time"
    figure = figures.ratios({"PPO on CartPole-v1": race}, ours, label)
    (out / "race.png").write_bytes(figures.png(figure))

"""Returns of the scripts, with all seeds, and beside published returns.

The return of a run is the mean over its last 100 training episodes. The interquartile mean (IQM)
and its bootstrap interval are those of Agarwal et al. (2021), computed with SciPy.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.stats import binomtest, bootstrap, fisher_exact, trim_mean

from analysis import figures
from analysis.checks import without_length
from analysis.describe import running_return
from analysis.formatting import interval, join, number, pluralize
from analysis.measures import as_object, in_order
from analysis.page import Table, Text
from analysis.runs import load
from analysis.schema import SourceError
from analysis.stats import LEAST_RUNS, Interval
from analysis.tables import span, table_of, text
from bench import plan
from bench.arguments import parse_args

HERE = Path(__file__).parent
ALGORITHMS = {
    "continuous": "PPO, continuous actions",
    "discrete": "PPO, discrete actions",
    "dqn": "DQN",
    "rnn": "PPO, recurrent",
    "sac": "SAC",
    "cnn": "PPO, images",
}
CHEETAH = "HalfCheetah-v5"
HIGH = 1_800  # a return between the two modes of HalfCheetah
EXTRA = 489  # iterations of the HalfCheetah runs that only the comparison of lengths uses
FIRST_NEW = {488: 6, 489: 4}  # first seed in PyTorch that was not run before the question arose
SAC_STEPS = 500_000  # SAC runs that are longer are also read at this step
RESAMPLES = 10_000
LINEN, TORCH = (f"ppo_continuous_{x}_gymnasium" for x in ("linen", "torch"))
NAMES = {LINEN: "Linen", TORCH: "PyTorch"}
RUN = ["mode", "processor", "num_iterations", "seed"]  # columns that identify a HalfCheetah run
# Kind of a published return -> its description, and the column with our returns of that kind.
PROTOCOLS = {
    "training": ("last 100 training episodes", "return"),
    "greedy": ("evaluation of one agent, greedy", "greedy_return"),
    "best": ("best evaluation during training", "return"),
    "best_greedy": ("best evaluation during training, greedy", "greedy_return"),
    "sampled": ("evaluation of one agent, sampled actions", "return"),
    "figure": ("training episodes, read from a figure", "return"),
}


# === Runs =======================================================================================
def kind_of(mode: str) -> str:
    """Return the key in ALGORITHMS for a script."""
    prefix = mode.removeprefix("ppo_").partition("_")[0]
    return prefix if prefix in ALGORITHMS else "discrete"


def read(source: Path) -> pd.DataFrame:
    """Return one row per run, and another one for a SAC run that is longer than SAC_STEPS.

    The column "changes" contains the hyperparameters that differ from most runs of the script.
    """
    data = load(source)
    runs = data.runs.assign(
        kind=data.runs["mode"].map(kind_of),
        steps=data.runs["num_iterations"] * data.runs["batch_size"],
        changes=data.runs.groupby("mode")["settings"].transform(changes),
    )
    runs = runs.rename(columns={"last_100_return": "return"})
    longer = runs[(runs["kind"] == "sac") & (runs["steps"] > SAC_STEPS)]
    curves = progress(data.iterations)
    early = curves[curves["global_step"] == SAC_STEPS].set_index("run")["return"]
    longer = longer.assign(steps=SAC_STEPS, greedy_return=np.nan)
    longer["return"] = longer["run"].map(early).astype("float64")
    return pd.concat([runs, longer], ignore_index=True)


def changes(settings: pd.Series) -> pd.Series:
    """Return the hyperparameters that differ from most of the runs, such as "gamma 0.9999"."""
    texts = settings.map(without_length)
    usual = as_object(texts.mode()[0])
    parsed = texts.map(as_object)
    return parsed.map(
        lambda values: ", ".join(f"{x} {values[x]}" for x in values if values[x] != usual.get(x))
    )


def of_kind(runs: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Return the runs of a kind in the order of grid.toml.

    The extra HalfCheetah runs and the runs with other hyperparameters are left out.
    """
    is_extra = (runs["env_id"] == CHEETAH) & (runs["num_iterations"] == EXTRA)
    runs = runs[(runs["kind"] == kind) & (runs["changes"] == "") & ~is_extra]
    return in_order(runs).sort_values("env_id", key=in_grid, kind="stable")


def in_grid(envs: pd.Series) -> pd.Series:
    """Return a sort key: the position at which an environment first appears in grid.toml."""
    grid = (HERE / "grid.toml").read_text(encoding="utf-8")
    return envs.map(lambda env_id: grid.index(f'"{env_id}"'))


def progress(iterations: pd.DataFrame) -> pd.DataFrame:
    """Return the mean of the last 100 returns after each iteration, as the column "return"."""
    parts = []
    for _, rows in iterations.sort_values("iteration").groupby("run"):
        means, counts = rows[["charts/episodic_return", "charts/episodes"]].to_numpy(float).T
        parts.append(rows.assign(**{"return": running_return(means, counts)}))
    return pd.concat(parts, ignore_index=True)


# === Statistics =================================================================================
def iqm(values: np.ndarray, axis: int = -1) -> Any:
    """Return the interquartile mean: the mean of the middle half."""
    return trim_mean(values, 0.25, axis=axis)


def iqm_difference(a: np.ndarray, b: np.ndarray, axis: int = -1) -> Any:
    return iqm(b, axis) - iqm(a, axis)


def bootstrapped(statistic: Callable[..., Any], *samples: np.ndarray) -> Interval:
    """Return a statistic of several samples, with its 95% percentile bootstrap interval.

    Each sample is resampled separately, so the bootstrap is stratified. With fewer than LEAST_RUNS
    values in a sample, there is no interval.
    """
    estimate = float(statistic(*samples, axis=-1))
    if min(map(len, samples)) < LEAST_RUNS:
        return Interval(estimate, np.nan, np.nan)
    found = bootstrap(samples, statistic, n_resamples=RESAMPLES, method="percentile", rng=1)
    return Interval(estimate, *map(float, found.confidence_interval))


def with_sd(mean: float, sd: float) -> str:
    """Return "1,443 ± 46", or only the mean if there is no standard deviation."""
    decimals = 2
    if abs(mean) >= 10:
        decimals = 1
    if abs(mean) >= 1000:
        decimals = 0
    spread = f" ± {sd:,.{decimals}f}" if np.isfinite(sd) else ""
    return f"{mean:,.{decimals}f}{spread}"


# === Tables =====================================================================================
def continuous_table(source: Path) -> Table:
    """Return the returns of PPO with continuous actions."""
    return summarize(of_kind(read(source), "continuous"), "returns_continuous")


def others_table(source: Path) -> Table | Text:
    """Return the returns of all other kinds, or a sentence if there are no runs."""
    runs = read(source)
    parts = [of_kind(runs, kind) for kind in ALGORITHMS if kind != "continuous"]
    selected = pd.concat(parts, ignore_index=True)
    return Text("There are no runs yet.") if selected.empty else summarize(selected, "others")


def variants_table(source: Path) -> Table | Text:
    """Return the returns of runs with other hyperparameters, or a sentence if there are none."""
    runs = read(source)
    selected = runs[runs["changes"] != ""].sort_values("env_id", key=in_grid, kind="stable")
    return Text("There are no runs yet.") if selected.empty else summarize(selected, "variants")


def coverage_table(source: Path) -> Table:
    """Return how many of the runs in grid.toml are complete, by kind."""
    args = parse_args(["returns"])
    listed = plan.expand({"returns": plan.read_study("returns")}, args)
    names = pd.Series([run.name for run in listed])
    kinds = names.str.split("__").str[-3].map(kind_of)
    complete = kinds[names.isin(read(source)["run"])].value_counts()
    rows = [
        {"kind": kind, "complete": complete.get(kind, 0), "listed": count}
        for kind, count in kinds.value_counts(sort=False).items()
    ]
    columns: dict[str, Any] = {
        "algorithm": lambda row: ALGORITHMS[row["kind"]],
        "complete runs": text("complete"),
        "runs in grid.toml": text("listed"),
    }
    return table_of("returns_coverage", "Complete runs", pd.DataFrame(rows), columns)


def summarize(selected: pd.DataFrame, name: str) -> Table:
    """Return the returns by environment, script, hyperparameters and number of steps."""
    rows = []
    keys = ["env_id", "mode", "changes", "steps"]
    for _, runs in selected.groupby(keys, sort=False):
        row = runs[keys].iloc[0].to_dict()
        row |= {"seeds": len(runs), "mean": runs["return"].mean(), "sd": runs["return"].std()}
        row |= bootstrapped(iqm, runs["return"].to_numpy())._asdict()
        greedy = runs["greedy_return"].dropna().to_numpy()
        row["greedy"] = float(iqm(greedy)) if len(greedy) == len(runs) else np.nan
        rows.append(row)
    columns: dict[str, Any] = {
        "changed hyperparameters": text("changes"),
        "steps": lambda row: f"{row['steps']:,.0f}",
        "seeds": text("seeds"),
        "IQM": span(),
        "mean ± standard deviation": lambda row: with_sd(row["mean"], row["sd"]),
        "IQM, greedy": lambda row: number(row["greedy"]),
    }
    return table_of(name, "Returns", pd.DataFrame(rows), columns)


def published_table(source: Path) -> Table:
    """Return one row per published return for which there are runs, with the mean of our runs.

    Training returns of longer runs are read at the number of steps of the published return.
    """
    runs = read(source)
    curves = progress(load(source).iterations)
    rows = []
    for row in pd.read_csv(HERE / "published.csv").to_dict("records"):
        framework = "torch" if row["kind"] == "cnn" else "linen"  # PyTorch is faster with images
        here = runs[(runs["env_id"] == row["env_id"]) & (runs["framework"] == framework)]
        here = of_kind(here, row["kind"])
        protocol, column = PROTOCOLS[row["episodes"]]
        here = here[here["steps"] == here["steps"].max()]
        ours, steps = here[column].dropna(), here["steps"].max()
        if column == "return" and steps > row["steps"]:
            before = curves[curves["run"].isin(here["run"])]
            before = before[before["global_step"] <= row["steps"]].groupby("run").last()
            ours, steps = before["return"], before["global_step"].max()
        if len(ours):
            row |= {"protocol": protocol, "our_steps": steps, "our_seeds": len(ours)}
            rows.append(row | {"our_mean": ours.mean(), "our_sd": ours.std()})
    if not rows:
        raise SourceError(f"{source} has no run in an environment of published.csv")
    columns: dict[str, Any] = {
        "algorithm": lambda row: ALGORITHMS[row["kind"]],
        "source": text("source"),
        "their environment": text("version"),
        "their return": lambda row: with_sd(row["mean"], row["sd"]),
        "seeds": text("seeds"),
        "steps": lambda row: f"{row['steps']:,.0f}",
        "episodes": text("protocol"),
        "our return": lambda row: with_sd(row["our_mean"], row["our_sd"]),
        "our seeds": text("our_seeds"),
        "our steps": lambda row: f"{row['our_steps']:,.0f}",
    }
    return table_of("returns_published", "Published returns", pd.DataFrame(rows), columns)


def frameworks_table(source: Path) -> Table:
    """Return the difference between each script and Linen, in the same environment."""
    runs = read(source)
    rows = []
    for kind in ALGORITHMS:
        for _, here in of_kind(runs, kind).groupby(["env_id", "steps"], sort=False):
            linen = here.loc[here["framework"] == "linen", "return"].to_numpy()
            for _, others in here[here["framework"] != "linen"].groupby("mode", sort=False):
                if len(linen):
                    returns = others["return"].to_numpy()
                    row = others[["env_id", "mode"]].iloc[0].to_dict()
                    row |= {"seeds": f"{len(returns)} and {len(linen)}"}
                    row |= {"here": iqm(returns), "linen": iqm(linen)}
                    rows.append(row | bootstrapped(iqm_difference, linen, returns)._asdict())
    columns: dict[str, Any] = {
        "seeds, this script and Linen": text("seeds"),
        "IQM": lambda row: number(row["here"]),
        "IQM, Linen": lambda row: number(row["linen"]),
        "difference": span(),
    }
    return table_of("returns_frameworks", "Frameworks", pd.DataFrame(rows), columns)


def pooled(source: Path) -> Text:
    """Return the ratio of PyTorch's returns to Linen's over all MuJoCo environments."""
    runs = of_kind(read(source), "continuous")
    samples = [
        here.loc[here["mode"] == mode, "return"].to_numpy()
        for _, here in runs[runs["mode"].isin(NAMES)].groupby("env_id")
        for mode in NAMES
    ]
    found = bootstrapped(geometric_mean_ratio, *samples)
    return Text(
        f"PyTorch / Linen, over {len(samples) // 2} environments: {interval(*found)}. This is the "
        "geometric mean of the ratios of the IQMs, with a stratified bootstrap interval."
    )


def geometric_mean_ratio(*samples: np.ndarray, axis: int = -1) -> Any:
    """Return the geometric mean of the IQM ratios of the samples (a1, b1, a2, b2, ...), b to a."""
    ratios = [iqm(b, axis) / iqm(a, axis) for a, b in zip(samples[::2], samples[1::2], strict=True)]
    return np.exp(np.mean(np.log(ratios), axis=0))


def cheetah(source: Path) -> pd.DataFrame:
    """Return the PPO runs on HalfCheetah, of all lengths, with the processor of each."""
    runs = read(source)
    runs = runs[(runs["env_id"] == CHEETAH) & (runs["kind"] == "continuous")]
    # The processor of runs that were started by hand is recorded as x86_64; they ran on AMD.
    is_intel = runs["cpu"].str.contains("Intel")
    return runs.assign(processor=np.where(is_intel, "Intel Xeon", "AMD EPYC"))


def with_earlier(source: Path) -> pd.DataFrame:
    """Return the runs of cheetah() and the earlier ones that were not repeated."""
    folders = [x for x in (source, source / "earlier") if x.exists()]
    runs = pd.concat([cheetah(folder) for folder in folders], ignore_index=True)
    runs = runs.drop_duplicates(RUN).sort_values(["processor", "num_iterations"])
    return in_order(runs)


def modes_table(source: Path) -> Table:
    """Return how many HalfCheetah runs end above HIGH, by script, processor and iterations."""
    rows = []
    keys = ["mode", "processor", "num_iterations"]
    for _, runs in with_earlier(source).groupby(keys, sort=False):
        count = int((runs["return"] > HIGH).sum())
        row = runs[keys].iloc[0].to_dict()
        row |= {"count": count, "runs": len(runs)}
        low, high = binomtest(count, len(runs)).proportion_ci(method="wilson")
        row |= {"share": count / len(runs), "share_low": low, "share_high": high}
        rows.append(row | bootstrapped(iqm, runs["return"].to_numpy())._asdict())
    columns: dict[str, Any] = {
        "processor": text("processor"),
        "iterations": lambda row: f"{row['num_iterations']:.0f}",
        "seeds": text("runs"),
        f"seeds above {HIGH:,}": text("count"),
        "proportion": lambda row: interval(row["share"], row["share_low"], row["share_high"]),
        "IQM": span(),
    }
    return table_of("returns_modes", "Modes of HalfCheetah", pd.DataFrame(rows), columns)


def modes_test(source: Path) -> Text:
    """Return how many runs end above HIGH, and p-values of the test between the two lengths."""
    runs = with_earlier(source)
    count = int((runs["return"] > HIGH).sum())
    total = f"{count} of {len(runs)} runs end above {HIGH:,}"
    is_old = (runs["mode"] == TORCH) & (runs["seed"] < runs["num_iterations"].map(FIRST_NEW))
    runs = runs[(runs["processor"] == "AMD EPYC") & ~is_old]
    parts = []
    for mode, here in runs[runs["mode"].isin(NAMES)].groupby("mode", sort=False):
        is_high = here["return"] > HIGH
        counts = is_high.groupby(here["num_iterations"]).agg(high="sum", runs="size")
        p_value = fisher_exact(np.c_[counts["high"], counts["runs"] - counts["high"]]).pvalue
        shares = [f"{x.high} of {x.runs} with {x.Index:.0f}" for x in counts.itertuples()]
        parts.append(f"{join(shares)} iterations in {NAMES[str(mode)]} (p = {p_value:.2f})")
    return Text(
        f"In total, {total}. On the AMD EPYC, and in PyTorch only with seeds that were not run "
        f"before the question arose: {'; '.join(parts)}. The p-values are from Fisher's exact test."
    )


def reproduced(source: Path) -> Text:
    """Return how many of the earlier runs that were repeated gave identical returns."""
    sources = {"old": source / "earlier", "new": source}
    logged = {name: load(folder).iterations.groupby("run") for name, folder in sources.items()}
    pairs = cheetah(sources["old"]).merge(cheetah(sources["new"]), on=RUN)
    same = 0
    for old_run, new_run in zip(pairs["run_x"], pairs["run_y"], strict=True):
        old, new = logged["old"].get_group(old_run), logged["new"].get_group(new_run)
        columns = ["iteration", "charts/episodes", "charts/episodic_return"]
        same += old[columns].reset_index(drop=True).equals(new[columns].reset_index(drop=True))
    repeated = pluralize([len(pairs)], "earlier run")
    return Text(f"Of {repeated} repeated on the same processor, {same} gave identical returns.")


def divergence(source: Path) -> Text:
    """Return the first returns of a seed with both lengths, in PyTorch on the AMD EPYC."""
    runs = cheetah(source)
    runs = runs[(runs["mode"] == TORCH) & (runs["seed"] == 1)].set_index("num_iterations")["run"]
    rows = load(source).iterations.dropna(subset=["charts/episodic_return"])
    first = rows.sort_values("iteration").groupby("run")["charts/episodic_return"].first()
    means = [f"{number(first[runs[length]])} with {length}" for length in (EXTRA - 1, EXTRA)]
    return Text(f"Mean return of the first episodes, with seed 1 in PyTorch: {join(means)}.")


# === Figures ====================================================================================
@figures.styled
def draw_curves(source: Path, kind: str) -> Figure:
    """Plot the return of each run against steps, with one panel per environment."""
    runs = of_kind(read(source), kind).drop_duplicates("run")
    styles = figures.styles(in_order(runs).drop_duplicates("mode"))
    curves = progress(load(source).iterations)
    panels = list(runs["env_id"].unique())
    height, width = (4.4, figures.LONE) if len(panels) == 1 else (2.9, figures.WIDTH)
    titles = [panel.rpartition(":")[2] for panel in panels]
    figure, axs = figures.make_panels(titles, min(len(panels), 3), height, width, False)
    published = pd.read_csv(HERE / "published.csv")
    published = published[(published["kind"] == kind) & (published["source"] == "CleanRL")]
    for axes, panel in zip(axs, panels, strict=True):
        for run in runs[runs["env_id"] == panel].itertuples():
            curve = curves[curves["run"] == run.run]
            style = styles[str(run.mode)]
            axes.plot(
                curve["global_step"] / 1e6, curve["return"], linewidth=0.8, alpha=0.7, **style
            )
        for mean in published.loc[published["env_id"] == panel, "mean"]:
            axes.axhline(mean, color=figures.GREY, linestyle=":", linewidth=1.2)
    figure.supxlabel("million environment steps", fontsize=9)
    figure.supylabel("mean return of the last 100 episodes", fontsize=9)
    entries: list[tuple[Any, str]] = [
        (Line2D([], [], **style), figures.short(mode, 40)) for mode, style in styles.items()
    ]
    if not published.empty:
        line = Line2D([], [], color=figures.GREY, linestyle=":")
        entries.append((line, "CleanRL's documentation"))
    figures.add_legend(figure, entries)
    return figure


@figures.styled
def draw_modes(source: Path) -> Figure:
    """Plot the return of each HalfCheetah run as a dot, in the order of modes_table()."""
    runs = with_earlier(source)
    styles = figures.styles(runs.drop_duplicates("mode"))
    keys = ["mode", "processor", "num_iterations"]
    groups = [x for _, x in runs.groupby(keys, sort=False)]
    figure, (axes,) = figures.make_panels([""], 1, 0.9 + 0.4 * len(groups), figures.LONE)
    names = []
    for place, group in enumerate(groups):
        mode, processor, length = group[keys].iloc[0]
        names.append(f"{mode}\n{processor}, {length:.0f} iterations")
        heights = place + np.linspace(-0.25, 0.25, len(group))  # in order of the seeds
        color = styles[str(mode)]["color"]
        axes.plot(group.sort_values("seed")["return"], heights, "o", color=color, markersize=4)
    axes.set_yticks(range(len(groups)), names, fontsize=8)
    axes.set_ylim(len(groups) - 0.4, -0.6)  # first group on top
    axes.tick_params(axis="y", length=0)
    axes.axvline(HIGH, color=figures.GREY, linestyle=":", linewidth=1.2)
    axes.set_title("")
    axes.set_xlabel(f"return on {CHEETAH} after a million steps, one dot per seed")
    return figure


BLOCKS: dict[str, Callable[[Path], Table | Text]] = {
    "returns_continuous": continuous_table,
    "returns_others": others_table,
    "returns_coverage": coverage_table,
    "returns_published": published_table,
    "returns_frameworks": frameworks_table,
    "returns_pooled": pooled,
    "returns_variants": variants_table,
    "returns_modes": modes_table,
    "returns_modes_test": modes_test,
    "returns_reproduced": reproduced,
    "returns_divergence": divergence,
}


def update(source: Path, out: Path) -> None:
    """Draw the figures of the study: one per kind that has runs, and one for HalfCheetah."""
    for kind in read(source)["kind"].unique():
        (out / f"{kind}.png").write_bytes(figures.png(draw_curves(source, kind)))
    (out / "halfcheetah.png").write_bytes(figures.png(draw_modes(source)))

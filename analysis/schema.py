"""What a table of runs and one of iterations hold: the one place that says it.

Loading, checks and the data dictionary in README.md all follow from the columns below.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pandas as pd


class SourceError(ValueError):
    """A source that cannot be used; the message is one sentence for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(clean(message))


class Column(NamedTuple):
    """A column of a table, or a value of run.json that columns are worked out from."""

    name: str
    kind: str  # a key of KINDS
    meaning: str  # for the data dictionary, in Markdown
    source: str = ""  # where run.json has it: "args.seed"; "" if it is worked out
    must: str = ""  # who cannot be without it: "run", a run of ours, or "table", that too


class Kind(NamedTuple):
    words: str  # in a sentence on a value that is not of the kind
    dtype: str
    default: Any  # where there is no value


KINDS = {
    "text": Kind("text", "str", ""),
    "flag": Kind("true or false", "bool", False),
    "number": Kind("a number", "float64", math.nan),
    "seconds": Kind("a number above 1e-9 and below 1e9", "float64", math.nan),
    "count": Kind("a whole number above 0", "float64", math.nan),
    "widths": Kind("a list of whole numbers above 0", "object", None),
    "list": Kind("a list of whole numbers", "object", None),
}
FLAGS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
MOST_TEXT = 4000  # characters: settings have some 600
VERSIONS = ("python", "torch", "jax", "jaxlib", "flax", "optax", "gymnax", "numpy")

RUNS = (
    Column("run", "text", "unique name of the run: its folder, or W&B's id; if missing, its row"),
    Column("name", "text", "`--run-name`", "args.run_name", "run"),
    Column("source", "text", "the folder, or W&B's address, that it came from"),
    Column("script", "text", "file name without suffix, as `ppo_linen`", "script", "run"),
    Column(
        "algorithm", "text", "`ppo` or `dqn`: what the script's name begins with, or else its flags"
    ),
    Column(
        "framework", "text", "`torch`, `linen`, `nnx`, `equinox` or another", "framework", "table"
    ),
    Column(
        "compile_mode",
        "text",
        "`none`, `jit`, `cached_partial`, `env.jit`, `compile` or another",
        "compile_mode",
        "table",
    ),
    Column(
        "mode",
        "text",
        "what is compared: the script, with its flag if it ran op by op, as `ppo_linen --no-jit`, "
        "or otherwise than it usually does, as `--vectorization async`; `ppo_linen, 2 side by"
        " side` ran beside another process; if missing, made of `script`, or of `framework` and "
        "`compile_mode`",
    ),
    Column(
        "env_id",
        "text",
        "environment, with the options that change it; `MinAtar/Breakout-v0` is also gymnax's "
        "`Breakout-MinAtar` by MinAtar's rules: sticky actions, all six of them, no limit of steps",
        "args.env_id",
        "table",
    ),
    Column("size", "text", "`small`, `medium`, `large`, or widths as `128x128`", "", "table"),
    Column("hidden_sizes", "text", "widths of the hidden layers, as `64 64`"),
    Column(
        "settings",
        "text",
        "JSON of all other hyperparameters that change an iteration's work; of DQN, whose runs of "
        "other lengths are other experiments, `total_timesteps` too",
    ),
    Column("platform", "text", "system, GPU with driver, processor: runs on two are kept apart"),
    Column("device", "text", "what trained: `cpu`, or the GPU's name", "device", "run"),
    Column(
        "gpu",
        "text",
        "the machine's GPU, even where it was not used; like `driver`, `container`, `commit`, "
        "`cores` and `load`, known of runs that `benchmark.sh` started",
        "gpu",
    ),
    Column("driver", "text", "its driver", "driver"),
    Column("cpu", "text", "processor", "cpu"),
    Column("os", "text", "operating system", "os", "run"),
    Column("container", "flag", "ran in a container", "container"),
    Column("started", "text", "start, ISO 8601", "started", "run"),
    Column("commit", "text", "git commit, with `-dirty` if files had changed", "git_commit"),
    *(Column(name, "text", f"version of {name}") for name in VERSIONS),
    Column("notes", "text", "`--notes` of older runs", "args.notes"),
    Column("resumed", "flag", "was stopped and gone on with: it has no durations"),
    Column(
        "sync",
        "flag",
        "`--sync-for-timing`: waited for the device between rollout and update",
        "args.sync_for_timing",
        "run",
    ),
    Column(
        "repeat",
        "number",
        "number of the repeat: the seed, unless `run.json` has a `repeat`; in a table without "
        "both, or in which it is not unique, rows are numbered in their order",
        "repeat",
    ),
    Column("seed", "number", "`--seed`", "args.seed", "run"),
    Column("num_agents", "count", "agents that its program trained at once", "args.num_agents"),
    Column(
        "agent",
        "number",
        "which of them it is, from 0; only the first has durations, which are the program's",
        "agent",
    ),
    Column(
        "num_iterations",
        "count",
        "iterations; needed by `total`, `process` and returns, which compare only if it is equal; "
        "if missing, from the table of iterations",
    ),
    Column("batch_size", "count", "environment steps per iteration"),
    Column("cores", "number", "physical cores", "cores"),
    Column("load", "number", "processes that ran or waited in the minute before it", "load"),
    Column(
        "imports",
        "seconds",
        "start of the script (of runs up to November 2026, of its process) to start of training: "
        "above all its imports",
        "durations.imports",
        "run",
    ),
    Column("setup", "seconds", "start of training to start of iteration 0"),
    Column(
        "startup",
        "seconds",
        "process start to the end of iteration 0; if missing, `imports` + `setup` + `first`, "
        "or, if no row has it, those of them that all rows have",
    ),
    Column("first", "seconds", "iteration 0, in which everything compiles", "", "table"),
    Column("early", "seconds", "mean of iterations 1-7"),
    Column("steady", "seconds", "mean of iterations 8 and later", "", "table"),
    Column(
        "saving",
        "number",
        "of older runs, writing checkpoints; part of `total`",
        "durations.saving",
    ),
    Column("total", "seconds", "start of training to its end", "durations.total", "run"),
    Column(
        "process",
        "seconds",
        "whole training, process start to end; if missing, `imports` + `total`, "
        "or, if no row has it and not all have `imports`, `total`",
        "durations.process",
    ),
    *(
        Column(f"{phase}_{window}", "seconds", f"the {phase}, {words}; only if `sync`")
        for phase in ("rollout", "update")
        for window, words in (
            ("first", "iteration 0"),
            ("early", "mean of iterations 1-7"),
            ("steady", "mean of iterations 8 and later"),
        )
    ),
    Column(
        "final_return",
        "number",
        "mean return in the last iteration that ended an episode; if missing, from the table of "
        "iterations",
    ),
    Column("best_return", "number", "highest mean return of any iteration; likewise"),
    Column(
        "last_100_return",
        "number",
        "mean return of about the last 100 training episodes: the means of the last iterations, "
        "weighted by their episodes, the first of them in part; if fewer ended, there is none",
    ),
    *(
        Column(
            f"{name}_return",
            "number",
            f"mean return of `evaluate.py`'s episodes of the trained agent, {words}",
            f"evaluations.{name}",
        )
        for name, words in (
            ("greedy", "`evaluation.json`"),
            ("noisy", "with `--epsilon 0.05`"),
            ("random", "with `--epsilon 1`, which is a random agent's"),
        )
    ),
    Column("peak_host_bytes", "number", "most memory used, in bytes; on Linux", "peak_host_bytes"),
    Column(
        "peak_device_bytes",
        "number",
        "the same on the GPU, workspaces of cuBLAS included",
        "peak_device_bytes",
    ),
)
# What run.json holds for the columns that are worked out.
INPUTS = (
    Column("num_envs", "count", "", "args.num_envs", "run"),
    Column("num_steps", "count", "", "args.num_steps", "run"),
    Column("total_timesteps", "count", "", "args.total_timesteps", "run"),
    Column("hidden_sizes", "widths", "", "args.hidden_sizes", "run"),
    Column("resumed", "list", "", "resumed"),
)
ITERATIONS = (
    Column("run", "text", "the run's name in the table of runs", must="table"),
    Column("iteration", "number", "from 0", must="table"),
    Column("global_step", "count", "environment steps so far", must="run"),
    Column("charts/episodes", "number", "episodes that ended in the iteration"),
    *(
        Column(f"charts/episodic_{name}{suffix}", "number", f"their {words}{unit}")
        for name, unit in (("return", "return"), ("length", "length in steps"))
        for suffix, words in (("", "mean "), ("_min", "lowest "), ("_max", "highest "))
    ),
    Column("charts/learning_rate", "number", "at the iteration's start"),
    Column("charts/epsilon", "number", "DQN's chance of a random action, at the iteration's end"),
    Column("charts/updates", "number", "DQN's updates in the iteration"),
    Column("charts/SPS", "number", "environment steps per second"),
    *(
        Column(f"losses/{name}", "number", words)
        for name, words in (
            ("policy_loss", "mean over minibatches"),
            ("value_loss", "mean over minibatches"),
            ("entropy", "mean over minibatches"),
            ("approx_kl", "mean over minibatches"),
            ("clip_fraction", "mean over minibatches"),
            ("explained_variance", "of the returns by the values"),
            ("td_loss", "mean over DQN's updates"),
            ("q_value", "mean value of the actions that DQN learnt from"),
        )
    ),
    Column("time/elapsed", "seconds", "since the start of training", must="run"),
    Column("time/iteration", "seconds", "the iteration", must="run"),
    Column("time/rollout", "seconds", "its rollout; only with `--sync-for-timing`"),
    Column("time/update", "seconds", "its update; likewise"),
)


# === One value ==================================================================================
def clean(text: str) -> str:
    """Return text without what a terminal or a reader could be misled by: control characters."""
    return "".join(x if x.isprintable() else "\N{REPLACEMENT CHARACTER}" for x in text[:MOST_TEXT])


def is_number(x: Any) -> bool:
    return type(x) in (int, float) and abs(x) < 1e100  # neither a flag nor NaN nor infinite


def of_kind(x: Any, kind: str) -> bool:
    if kind == "text":
        return isinstance(x, str)
    if kind == "flag":
        return isinstance(x, bool)
    if kind in ("widths", "list"):
        least = 1 if kind == "widths" else -math.inf
        return isinstance(x, list) and all(type(n) is int and n >= least for n in x)
    if not is_number(x) or kind == "number":
        return is_number(x)
    return 1e-9 < x < 1e9 if kind == "seconds" else x == int(x) and 0 < x < 1e15


def is_missing(x: Any) -> bool:
    return x is None or x is pd.NA or x is pd.NaT or (isinstance(x, float) and math.isnan(x))


def from_table(x: Any, kind: str) -> Any:
    """Return a cell of a foreign table as the kind has it, if it can be read as that."""
    if is_missing(x) or (kind != "text" and str(x).strip() == ""):
        return None
    if kind == "text":
        return str(x)
    if kind == "flag":
        return FLAGS.get(str(x).strip().lower(), x)
    try:
        return x if isinstance(x, bool) else float(x)
    except (TypeError, ValueError):
        return x


def numbers(values: pd.Series, column: Column) -> pd.Series:
    """Return a foreign column as numbers; raise ValueError as check() if it holds anything else."""
    known = values.dtype.kind in "iuf"
    cells = values.astype("float64") if known else [from_table(x, column.kind) for x in values]
    for x in cells:
        if not of_kind(x, column.kind):
            check({column.name: x}, [column], ("table",))
    return pd.Series(cells, values.index, dtype="float64")


def check(values: Mapping[str, Any], columns: Iterable[Column], must: tuple[str, ...]) -> None:
    """Raise ValueError, one reason for a user, for a value that is missing or not of its kind.

    values maps what a column is called in run.json, or else its name; null counts as missing.
    """
    for column in columns:
        name = column.source or column.name
        value = values.get(name)
        if is_missing(value):
            if column.must in must:
                raise ValueError(f"{name} is missing")
        elif not of_kind(value, column.kind):
            raise ValueError(f"{name} is {clean(repr(value)):.40}, not {KINDS[column.kind].words}")


# === Whole tables ===============================================================================
def complete(table: pd.DataFrame, columns: Iterable[Column]) -> pd.DataFrame:
    """Return a checked table with every column, in one order and with one type each."""
    done = {}
    for column in columns:
        kind = KINDS[column.kind]
        values = table[column.name] if column.name in table else pd.Series(None, table.index)
        if kind.dtype == "str":
            done[column.name] = values.map(lambda x: "" if is_missing(x) else clean(x)).astype(str)
        else:
            filled = values.astype(object).where(values.notna(), kind.default)
            done[column.name] = filled.astype(kind.dtype)
    return pd.DataFrame(done, index=table.index)


def dictionary(columns: Iterable[Column]) -> str:
    """Return the columns as a table in Markdown; those that every table needs are in bold."""
    lines = ["| column | type | meaning |", "|---|---|---|"]
    for column in columns:
        name = f"**`{column.name}`**" if column.must == "table" else f"`{column.name}`"
        lines.append(f"| {name} | {column.kind} | {column.meaning} |")
    return "\n".join(lines)

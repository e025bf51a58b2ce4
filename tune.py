"""Tune the hyperparameters of a script, and evaluate the best ones with held-out seeds.

    python tune.py dqn_linen --trials 40 --env-id envs.doors:Doors
    python tune.py ppo_linen --space learning_rate=1e-4:1e-2:log --space gamma=0.9,0.99
    python tune.py dqn_linen minatar --workers 2 --mlflow
    python tune.py path/to/mine.py                # an edited copy of a script

Any other flags are passed on to the script and stay fixed. Each trial trains with several seeds. At
the end, the best settings and the defaults are trained again with held-out seeds: only these
returns are unbiased. Results are written to tuned/NAME. If tune.py is stopped or killed, run the
same command again to continue.
"""

import importlib
import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import tyro
from scipy import stats

from analysis import formatting
from analysis.catalog import SCRIPTS, file_of
from analysis.describe import last_return
from analysis.stats import mean
from bench import processes

try:
    import optuna
    import sqlalchemy.event
    import sqlalchemy.exc
    from filelock import FileLock, Timeout
    from optuna import visualization
    from optuna.trial import FrozenTrial, TrialState
except ImportError as error:
    print(f"tune.py: {error}: pip install -r requirements-tune.txt", file=sys.stderr)
    sys.exit(2)

HERE = Path(__file__).resolve().parent
# Search space; settings that the script does not have are skipped. LOW:HIGH is uniform, or
# log-uniform with :log; % is percent of total_timesteps. A,B,C is a choice between these values
# and the default. Values that the script rejects are left out.
SPACE = {
    "learning_rate": "1e-5:1e-2:log",
    "anneal_lr": "True,False",
    "num_steps": "32,64,128,256,512",
    "num_minibatches": "2,4,8,16",
    "update_epochs": "2:20:log",
    "gamma": "0.9,0.95,0.98,0.99,0.995,0.999",
    "gae_lambda": "0.8,0.9,0.95,0.98,1.0",
    "clip_coef": "0.1:0.4",
    "ent_coef": "0.0,1e-5,1e-4,1e-3,1e-2,1e-1",
    "vf_coef": "0.2:1.0",
    "max_grad_norm": "0.3:3.0:log",
    "buffer_size": "10000,50000,100000",
    "batch_size": "32,64,128,256",
    "train_frequency": "1:16:log",
    "target_network_frequency": "10:1000:log",
    "double_q": "True,False",
    "end_e": "0.01:0.2:log",
    "exploration_steps": "2%:50%:log",
    "loss": "mse,huber",
    "hidden_sizes": "64x64,128x128,256x256",
    "norm_obs": "True,False",
    "norm_reward": "True,False",
    "tau": "1e-3:5e-2:log",
}
HELD_OUT = 1_000  # seed offset: trials use seeds 1, 2, ...; held-out runs use 1001, 1002, ...
TRIAL_EPISODES, HELD_OUT_EPISODES = 1_000_000, 2_000_000  # seeds passed to evaluate.py
DIVERGED = "NaN or infinite"  # in the error messages of scripts and evaluate.py after divergence


@dataclass
class Args:
    script: tyro.conf.Positional[Path]  # name of a script in scripts.toml, or path to a file
    trials: int = 40  # trials in the study, on all machines together
    num_seeds: int = 4  # seeds per trial
    held_out_seeds: int = 12  # held-out seeds for the best settings and for the defaults
    episodes: int = 100  # episodes per evaluation, with greedy actions
    workers: int = 1  # number of concurrent trials on this machine
    space: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # NAME, NAME=LOW:HIGH[:log], NAME=A,B,C
    pruner: Literal["hyperband", "none"] = "hyperband"  # algorithm that stops unpromising trials
    seed: int = 1  # seed of the sampler; trials train with seeds 1 to num_seeds
    study: str = ""  # name of the study; default SCRIPT__ENVIRONMENT
    studies_dir: Path = Path("tuned")  # folder with one folder per study
    storage: str = ""  # database, such as postgresql://...; default SQLite in the study's folder
    mlflow: bool = False  # log the study to MLflow; configure it with MLFLOW_TRACKING_URI, ...

    def __post_init__(self) -> None:
        for name in ("trials", "num_seeds", "held_out_seeds", "episodes", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")


@dataclass
class Command:
    """State of one tune.py process."""

    args: Args
    words: list[str]  # script flags for all runs
    env_id: str
    defaults: dict[str, Any]  # default values of the settings in `space`
    space: dict[str, Callable]  # setting -> function that proposes its value in a trial
    folder: Path  # the folder of the study
    study: optuna.Study
    file_lock: FileLock  # held until this process ends, so that no other one runs the study


class TrialError(Exception):
    """Raised if a trial fails; the message is one sentence."""


def fail(reason: str) -> NoReturn:
    """End with a message about something the user can fix."""
    print(reason, file=sys.stderr)
    sys.exit(2)


# === Space ======================================================================================
def ask_script(path: Path, words: list[str]) -> Any:
    """Return the script arguments with these flags; if a flag is invalid, tyro exits."""
    sys.path.insert(0, str(path.parent))
    script = importlib.import_module(path.stem)
    sys.argv = [path.name, *words]
    given = script.parse_args() if hasattr(script, "parse_args") else None
    if not hasattr(given, "total_timesteps") or hasattr(given, "num_agents"):
        fail(f"{path} must train one agent, as ppo_linen.py and dqn_linen.py do")
    return given


def ranges_of(asked: tuple[str, ...], words: list[str], given: Any) -> dict[str, str]:
    """Return the search space as a mapping from settings to ranges in the syntax of --space."""
    flags = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    fixed = {flag.removeprefix("no-").replace("-", "_") for flag in flags}
    if hasattr(given, "train_frequency"):
        fixed.add("num_steps")  # in DQN and SAC, num_steps sets how often metrics are logged
    free = asdict(given).keys() - fixed
    ranges = {}
    for word in asked or [name for name in SPACE if name in free]:
        name, _, text = word.partition("=")
        name = name.replace("-", "_")
        if name not in free:
            fail(f"--space {word}: {name} is fixed, or is not a flag of the script")
        ranges[name] = text or SPACE.get(name, "")
    return ranges


def shown(value: Any) -> Any:
    """Return a value in a form that Optuna supports: the tuple (64, 64) becomes 64x64."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else value


def parse_range(name: str, text: str, given: Any) -> Callable:
    """Return a function that proposes a value from NAME=RANGE in a trial."""
    if ":" not in text:
        values = [parse(name, word, given) for word in text.split(",")]
        choices = dict.fromkeys(x for x in [*values, shown(getattr(given, name))] if x is not None)
        return methodcaller("suggest_categorical", name, list(choices))
    try:
        low, high = (parse(name, word, given) for word in text.removesuffix(":log").split(":"))
        method = "suggest_int" if isinstance(low, int) else "suggest_float"
        propose = methodcaller(method, name, low, high, log=text.endswith(":log"))
        propose(optuna.trial.FixedTrial({name: getattr(given, name)}))  # checks the range
    except (ValueError, TypeError):
        form = "NAME=LOW:HIGH[:log] or NAME=A,B,C; :log requires a positive LOW and default"
        fail(f"--space {name}={text} must be {form}")
    return propose


def parse(name: str, word: str, given: Any) -> Any:
    """Return the value of a setting; if the script rejects it, print the reason and return None."""
    if word.endswith("%"):
        word = f"{given.total_timesteps * float(word[:-1]) / 100:.0f}"
    words = word.split("x") if isinstance(getattr(given, name), tuple) else [word]
    words.insert(0, f"--{name.replace('_', '-')}")
    config = (tyro.conf.FlagConversionOff,)  # --anneal-lr False instead of --no-anneal-lr
    try:
        with redirect_stderr(io.StringIO()) as output:
            args = tyro.cli(type(given), args=words, default=given, config=config)
    except SystemExit:
        print(f"Leaving out {name}={word}: {reason_of(output.getvalue())}")
        return None
    return shown(getattr(args, name))


def words_of(settings: dict[str, Any]) -> list[str]:
    """Return the settings as command-line flags."""
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif name == "hidden_sizes":
            words += [f"--{flag}", *value.split("x")]
        else:
            words += [f"--{flag}", str(value)]
    return words


# === Runs =======================================================================================
def run(words: list[str], log: Path) -> None:
    """Run a script to completion, or raise TrialError and keep its output."""
    log.parent.mkdir(exist_ok=True)
    with open(log, "wb") as file:
        status = subprocess.run(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # Ctrl-C in the terminal reaches only tune.py
        ).returncode
    if status != 0:
        reason = reason_of(log.read_text(errors="replace"))
        raise TrialError(f"{Path(words[0]).name} ended with status {status}: {reason}")
    log.unlink()


def reason_of(output: str) -> str:
    """Return the error that ended a script: the last exception or tyro error, or the last line."""
    lines = [x for line in output.splitlines() if (x := line.strip("│╭╮╰╯─ "))]
    errors = [x for x in lines if re.match(r"Error parsing|Diverged|[\w.]+(Error|Exception)\b", x)]
    return (errors or lines or ["no output"])[-1]


def train(command: Command, folder: Path, settings: dict[str, Any], seed: int) -> None:
    """Train in a new run folder."""
    shutil.rmtree(folder, ignore_errors=True)  # an interrupted run, or one from a deleted study
    given = {"seed": seed, "runs_dir": folder.parent, "run_name": folder.name}
    words = [*command.words, *words_of(settings), *words_of(given)]
    run([str(command.args.script), *words], Path(f"{folder}.log"))


def evaluate(command: Command, folders: list[Path], seed: int) -> list[float]:
    """Return the mean return of each agent in greedy episodes."""
    words = [str(HERE / "evaluate.py"), *map(str, folders)]
    words += ["--episodes", str(command.args.episodes), "--seed", str(seed)]
    words += ["--script", str(command.args.script), "--env-id", command.env_id]
    run(words, Path(f"{folders[0]}.evaluate.log"))
    results = [json.loads((folder / "evaluation.json").read_bytes()) for folder in folders]
    returns = [result["return"]["mean"] for result in results]
    if not np.isfinite(returns).all():
        raise TrialError("the return of an agent is NaN or infinite")
    return returns


# === Trials =====================================================================================
def objective(command: Command, trial: optuna.Trial) -> float:
    """Train and evaluate; return the interquartile mean of the returns over seeds."""
    settings = {name: propose(trial) for name, propose in command.space.items()}
    seeds = range(1, 1 + command.args.num_seeds)
    folders = [command.folder / "trials" / f"{trial.number:04d}-seed-{seed}" for seed in seeds]
    recent: list[float] = []  # training return of each finished seed
    try:
        for seed, folder in enumerate(folders, 1):
            train(command, folder, settings, seed)
            lines = (folder / "metrics.jsonl").read_bytes().splitlines()
            value = last_return([json.loads(line) for line in lines])
            if value is not None:  # enough episodes have finished
                recent.append(value)
                trial.report(stats.trim_mean(recent, 0.25), seed)
            if folder != folders[-1] and trial.should_prune():
                raise optuna.TrialPruned
        returns = evaluate(command, folders, TRIAL_EPISODES)
    except TrialError as error:
        if settings == command.defaults and "ended with status 2:" in str(error):
            sys.exit(str(error))  # a usage error or a missing package: all trials would fail
        trial.set_user_attr("error", str(error))
        raise
    finally:
        for path in (command.folder / "trials").glob(f"{trial.number:04d}-*/checkpoint.*"):
            path.unlink()
    trial.set_user_attr("returns", returns)
    return stats.trim_mean(returns, 0.25)


def ended(study: optuna.Study) -> list[FrozenTrial]:
    """Return all trials that ended, except interrupted ones."""
    trials = [x for x in study.get_trials(deepcopy=False) if x.state.is_finished()]
    return [x for x in trials if x.state != TrialState.FAIL or "error" in x.user_attrs]


def completed(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def retry(study: optuna.Study, trial: FrozenTrial) -> None:
    """Queue the settings of an interrupted trial again.

    Optuna's RetryHeartbeatStaleTrialCallback fails if a default is outside the search space.
    """
    study.enqueue_trial(trial.system_attrs.get("fixed_params", trial.params))


def report(command: Command, study: optuna.Study, trial: FrozenTrial) -> None:
    """Print the result of a trial; end the search if the study is complete."""
    count = len(ended(study))
    if count >= command.args.trials:  # other machines may have run some of them
        study.stop()
    result = trial.user_attrs.get("error", "pruned")
    if trial.state == TrialState.COMPLETE:
        result = f"{trial.value:.4g}"
    best = ""
    if completed(study):
        best = f", best {study.best_value:.4g} (trial {study.best_trial.number})"
    print(f"trial {trial.number}: {result} | {count}/{command.args.trials}{best}", flush=True)


def search(command: Command) -> None:
    """Run trials until the study has enough of them; write trials.csv, with a row per trial."""
    command.study.optimize(
        partial(objective, command),
        n_trials=max(0, command.args.trials - len(ended(command.study))),
        n_jobs=command.args.workers,
        catch=(TrialError,),
        callbacks=[partial(report, command)],
    )
    columns = ("number", "state", "value", "duration", "params", "user_attrs")
    command.study.trials_dataframe(columns).to_csv(command.folder / "trials.csv", index=False)


# === Evaluation =================================================================================
def compare(command: Command) -> dict[str, Any]:
    """Compare the best settings with the defaults, after training both with held-out seeds."""
    best = command.study.best_trial
    defaults = [x.value for x in completed(command.study) if x.params == command.defaults]
    name = "defaults" if best.params == command.defaults else f"trial-{best.number:04d}"
    of_defaults = held_out_returns(command, "defaults", command.defaults)
    of_best = held_out_returns(command, name, best.params)
    # Two returns of minus infinity differ by 0.
    differences = [x - y if x != y else 0.0 for x, y in zip(of_best, of_defaults, strict=True)]
    words = ["python", str(command.args.script), *command.words, *words_of(best.params)]
    print(f"Greedy return with {len(of_best)} held-out seeds, interquartile mean [95% interval]:")
    result = {
        "best_trial": best.number,
        "best_settings": best.params,
        "value_in_study": best.value,  # a maximum, so biased upwards
        "default_value_in_study": defaults[0] if defaults else None,
        "defaults": summary("defaults", of_defaults),
        "best": summary(f"best settings, from trial {best.number}", of_best),
        "best_minus_defaults": summary("difference, paired by seed", differences),
        "command": shlex.join(words),
    }
    return result | command.study.user_attrs["begun"]


def held_out_returns(command: Command, name: str, settings: dict[str, Any]) -> list[float]:
    """Train with held-out seeds; return the mean return of each agent."""
    seeds = range(HELD_OUT + 1, HELD_OUT + 1 + command.args.held_out_seeds)
    with ThreadPoolExecutor(command.args.workers) as pool:
        return list(pool.map(partial(held_out_return, command, name, settings), seeds))


def held_out_return(command: Command, name: str, settings: dict[str, Any], seed: int) -> float:
    """Train with one held-out seed; the return is minus infinity if training diverges.

    The study keeps the return, so the next command does not train this agent again.
    """
    folder = command.folder / "held_out" / f"{name}-seed-{seed}"
    known = command.study.user_attrs
    if folder.name in known:
        return known[folder.name]
    try:
        train(command, folder, settings, seed)
        (value,) = evaluate(command, [folder], HELD_OUT_EPISODES)
        result = f"{value:.4g}"
    except TrialError as error:
        if DIVERGED not in str(error):
            raise
        value = -np.inf
        result = str(error)
    print(f"{folder.name}: {result}", flush=True)
    command.study.set_user_attr(folder.name, value)
    return value


def summary(title: str, returns: list[float]) -> dict[str, Any]:
    """Return the interquartile mean (Agarwal et al. 2021) with its 95% interval, and print both.

    The interval follows Tukey and McLaughlin (1963). It is None if the variance is zero. The mean
    with Student's t interval and the range are only printed.
    """
    iqm = stats.trim_mean(returns, 0.25)
    cut = (len(returns) // 4 + 1e-9) / len(returns)
    low, high = map(float, stats.mstats.trimmed_mean_ci(returns, (cut, cut)))
    interval = [low, high] if low < high else None
    text = formatting.interval(iqm, *(interval or (np.nan, np.nan)))
    text += f", mean {formatting.interval(*mean(np.array(returns)))}"
    print(f"  {title}: {text}, {min(returns):.4g} to {max(returns):.4g}")
    return {"iqm": iqm, "interval": interval, "returns": returns}


def finish(command: Command) -> None:
    """Evaluate the best settings with held-out seeds; draw the figures."""
    study = command.study
    if not completed(study):
        sys.exit("no trial completed; trials.csv lists the reasons")
    optuna.storages.fail_stale_trials(study)
    if study.get_trials(states=(TrialState.RUNNING,)):
        print("Other machines are running trials. Run this command again when they are done.")
        return
    result = compare(command)
    finite = json.loads(json.dumps(result), parse_constant=lambda _: None)  # NaN is not JSON
    (command.folder / "best.json").write_text(json.dumps(finite, indent=2))
    print(f"Written to {command.folder}. Train with the best settings: {result['command']}")
    draw(study, command.folder)
    if command.args.mlflow:
        try:
            copy_to_mlflow(command, result)
        except Exception as error:  # a server or its client can raise anything
            sys.exit(f"--mlflow: {error}; run the same command to try again")


def draw(study: optuna.Study, folder: Path) -> None:
    """Write Optuna's figures as HTML files."""
    for name in ("optimization_history", "param_importances", "parallel_coordinate", "slice"):
        figure = getattr(visualization, f"plot_{name}")(study)
        figure.write_html(folder / f"{name}.html", include_plotlyjs="directory")


def copy_to_mlflow(command: Command, result: dict[str, Any]) -> None:
    """Log a finished study as a run with one child run per trial."""
    import mlflow

    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "ppo-rosetta"))
    with mlflow.start_run(run_name=command.study.study_name):
        mlflow.log_params(command.study.user_attrs["begun"])
        for trial in ended(command.study):
            tags = {"state": trial.state.name, "error": trial.user_attrs.get("error", "")}
            with mlflow.start_run(run_name=f"trial-{trial.number:04d}", nested=True, tags=tags):
                mlflow.log_params(trial.params)
                if trial.state == TrialState.COMPLETE and trial.value is not None:
                    mlflow.log_metric("value", trial.value)
        for part in ("best", "defaults", "best_minus_defaults"):
            mlflow.log_metric(f"held_out_seeds/{part}", result[part]["iqm"])
        for path in command.folder.iterdir():
            if path.suffix in (".json", ".csv", ".html", ".js"):
                mlflow.log_artifact(str(path))


# === Command ====================================================================================
def begin(args: Args, words: list[str]) -> Command:
    """Open the study that the command line describes."""
    if args.workers > 1:  # the workers share a GPU
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if str(args.script) in SCRIPTS:
        args.script = HERE / file_of(str(args.script))
    if not args.script.is_file():
        fail(f"SCRIPT: {args.script} is neither a file nor a script of this project")
    given = ask_script(args.script.absolute(), words)
    os.environ["COLUMNS"] = "500"  # tyro must not wrap the messages that reason_of() reads
    ranges = ranges_of(args.space, words, given)
    space = {name: parse_range(name, text, given) for name, text in ranges.items()}
    if not space:
        fail("nothing to tune: your flags fix every setting of the search space")
    print(", ".join(f"{name}={text}" for name, text in ranges.items()), flush=True)
    defaults = {name: shown(getattr(given, name)) for name in space}
    begun: dict[str, Any] = {"script": args.script.name, "flags": words, "space": ranges}
    begun |= {"num_seeds": args.num_seeds, "episodes": args.episodes}
    name = args.study or f"{args.script.stem}__{given.env_id}"
    folder = args.studies_dir / name.replace("/", "-").replace(":", "-")
    file_lock = FileLock(folder / "study.lock", timeout=0)
    try:
        file_lock.acquire()  # creates the folder
        study = open_study(name, args, folder, begun, defaults)
    except Timeout:
        fail("another command is running this study; use --workers 2 for two trials at a time")
    except (OSError, ImportError, sqlalchemy.exc.SQLAlchemyError) as error:
        fail(f"the study cannot be opened: {error}")
    return Command(args, words, given.env_id, defaults, space, folder, study, file_lock)


def open_study(name: str, args: Args, folder: Path, begun: dict, defaults: dict) -> optuna.Study:
    """Create the study, or continue it if it was started with the same settings."""
    pruner: Any = optuna.pruners.NopPruner()
    if args.pruner == "hyperband":
        pruner = optuna.pruners.HyperbandPruner(1, args.num_seeds, reduction_factor=2)
    storage = optuna.storages.RDBStorage(
        args.storage or f"sqlite:///{folder.absolute()}/study.db",
        heartbeat_interval=10,  # seconds
        grace_period=60,  # seconds without a heartbeat after which a trial starts over
        heartbeat_stale_trial_callback=retry,
    )
    if storage.engine.dialect.name == "sqlite":
        # Lock the database before reading, or two workers can start the same waiting trial.
        begin = partial(sqlalchemy.Connection.exec_driver_sql, statement="BEGIN IMMEDIATE")
        sqlalchemy.event.listen(storage.engine, "begin", begin)
    study = optuna.create_study(
        study_name=name,
        storage=storage,
        pruner=pruner,
        direction="maximize",
        load_if_exists=True,
    )
    started = study.user_attrs.get("begun", begun)
    changed = [x for x in begun if begun[x] != started[x]]
    if changed:
        fail(f"study {name} was started with another value of {changed[0]}; choose another --study")
    study.set_user_attr("begun", begun)
    # Add the number of trials, so that a resumed study or a second machine makes new proposals.
    seed = args.seed + len(study.trials)
    # TPE keeps a separate history for each Hyperband bracket, so start each with few random trials.
    study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=5)
    study.enqueue_trial(defaults, skip_if_exists=True)  # the first trial uses the defaults
    if not args.storage:  # only this process uses the database: running trials were interrupted
        for trial in study.get_trials(states=(TrialState.RUNNING,)):
            study.tell(trial.number, state=TrialState.FAIL)
            retry(study, trial)
    return study


def stop(number: int, _: Any) -> None:
    """End this process after a signal; the guard then ends all runs."""
    print("Stopped. Run the same command again to continue.", flush=True)
    os._exit(128 + number)


def main() -> None:
    args, words = tyro.cli(Args, description=__doc__, return_unknown_args=True)
    logging.disable(logging.WARNING)  # Optuna and MLflow log every step
    warnings.simplefilter("ignore")  # for example about intervals from a single seed
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    command = begin(args, words)
    mark = processes.new_mark()
    guard = processes.Guard(mark)
    os.environ[processes.MARK] = mark  # all runs inherit the mark, but the guard does not
    try:
        search(command)
        finish(command)
    except TrialError as error:
        sys.exit(str(error))
    finally:
        guard.close()


if __name__ == "__main__":
    main()

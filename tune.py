"""Tune the hyperparameters of a script, and evaluate the best ones with held-out seeds.

    python tune.py dqn_linen --trials 40 --env-id envs.doors:Doors
    python tune.py ppo_linen --space learning_rate=1e-4:1e-2:log --space gamma=0.9,0.99
    python tune.py dqn_linen minatar --workers 2 --mlflow
    python tune.py path/to/mine.py                # an edited copy of a script

Any other flags are passed on to the script and stay fixed. Each trial trains with several seeds. At
the end, the best settings and the defaults train again with seeds that no trial used: only their
returns are an unbiased estimate. Results are written to tuned/NAME. If tune.py is stopped or
killed, run the same command again to continue.
"""

import contextlib
import hashlib
import importlib
import io
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import quote

import tyro


@dataclass
class Args:
    script: tyro.conf.Positional[Path]  # name of a script in scripts.toml, or path to a file
    trials: int = 40  # trials in the study, on all its machines together
    num_seeds: int = 4  # seeds per trial
    fresh_seeds: int = 12  # held-out seeds for the best settings and for the defaults
    episodes: int = 100  # greedy episodes per evaluation of an agent
    workers: int = 1  # number of concurrent trials on this machine
    space: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # NAME=LOW:HIGH[:log], =A,B,C or =none
    sampler: Literal["tpe", "random"] = "tpe"  # algorithm that proposes settings
    pruner: Literal["hyperband", "none"] = "hyperband"  # algorithm that stops unpromising trials
    seed: int = 1  # seed of the sampler; trials train with seeds 1 to num_seeds
    timeout: float = 86_400.0  # seconds after which a run or an evaluation counts as hanging
    study: str = ""  # name of the study; default SCRIPT__ENVIRONMENT
    studies_dir: str = "tuned"  # folder with one folder per study
    storage: str = ""  # database (postgresql://...) or journal file; default in the study's folder
    mlflow: bool = False  # copy the study to MLflow, configured by MLFLOW_TRACKING_URI, ...

    def __post_init__(self) -> None:
        for name in ("trials", "num_seeds", "fresh_seeds", "episodes", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")


def parse_args() -> tuple[Args, list[str]]:
    """Return the arguments for tune.py, and the flags for the script."""
    return tyro.cli(Args, description=__doc__, return_unknown_args=True)


if __name__ == "__main__":
    ARGUMENTS = parse_args()  # before the slow imports, so that --help answers at once

import numpy as np
from scipy import stats

try:
    import optuna
    from filelock import FileLock, Timeout
    from optuna import visualization
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import FrozenTrial, TrialState
except ImportError as error:
    print(f"tune.py: {error}: pip install -r requirements-tune.txt", file=sys.stderr)
    sys.exit(2)

from analysis.catalog import SCRIPTS, file_of
from analysis.describe import last_return
from analysis.schema import clean
from bench import processes

HERE = Path(__file__).resolve().parent
# Search space; settings that the script does not have are skipped. LOW:HIGH is uniform, or
# log-uniform with :log. A,B,C is a choice between these values and the default. Values that the
# script rejects are dropped.
SPACE = {
    "learning_rate": "1e-5:1e-2:log",
    "anneal_lr": "True,False",
    "num_steps": "32,64,128,256,512",
    "num_minibatches": "2,4,8,16",
    "update_epochs": "2:20:log",
    "gamma": "0.9,0.95,0.98,0.99,0.995,0.999",
    "gae_lambda": "0.8,0.9,0.95,0.98,1.0",
    "clip_coef": "0.1:0.4",
    "ent_coef": "1e-6:1e-1:log",
    "vf_coef": "0.2:1.0",
    "max_grad_norm": "0.3:3.0:log",
    "buffer_size": "10000,50000,100000",
    "batch_size": "32,64,128",
    "train_frequency": "4:32:log",
    "target_network_frequency": "10:1000:log",
    "double_q": "True,False",
    "end_e": "0.01:0.2:log",
    "exploration_steps": "2%:50%:log",
    "loss": "mse,huber",
    "hidden_sizes": "64x64,128x128,256x256",
}
CONTINUOUS_SPACE = {  # changes to SPACE for continuous actions
    "norm_obs": "True,False",
    "norm_reward": "True,False",
    "ent_coef": "0.0,1e-4,1e-3,1e-2",  # the default is 0, which has no logarithm
}
SAC_SPACE = {
    "batch_size": "64,128,256",
    "train_frequency": "1:8:log",
    "tau": "1e-3:5e-2:log",
}
GIVEN = {"seed", "runs_dir", "run_name", "resume"}
NEEDED = GIVEN | {"env_id", "total_timesteps"}
NOT_SEARCHED = GIVEN | {"save_every", "save_replay", "track", "matmul_precision"}
NOT_SEARCHED |= {"env_id", "total_timesteps", "max_episode_steps", "sticky_actions", "full_actions"}
HELD_OUT = 1_000  # trials train with seeds 1, 2, ..., held-out runs with seeds 1001, 1002, ...
TRIAL_EPISODES, HELD_OUT_EPISODES = 1_000_000, 2_000_000  # evaluation seeds
GREEDY = {"actions": "greedy", "epsilon": 0.0, "max_steps": 10_000}  # defaults of evaluate.py
ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
HEARTBEAT = 60  # seconds between heartbeats
SILENCE = 600  # seconds without a heartbeat after which a trial counts as interrupted
STEPS = 90  # progress reports per trial; Hyperband prunes after a ninth and a third of them
GRACE = 60  # seconds from SIGTERM, which makes a script save a checkpoint, to SIGKILL
# Errors of the continuous Gymnasium scripts and of evaluate.py if an agent cannot act. The error
# about NaN in an observation or a reward is different, because the environment causes it.
NAN_ACTIONS = ("an action is NaN or infinite", "returned NaN or infinite actions")


class TrialError(Exception):
    """Raised if a trial fails; the message is one sentence."""


class Refused(TrialError):
    """Raised if a script rejects its command line."""


class CannotAct(TrialError):
    """Raised if the actions of an agent are NaN or infinite, because its training diverged."""


class Stopped(Exception):
    """Raised if a signal ended a run; the run saved a checkpoint and can be resumed."""


@dataclass
class Command:
    """State of one tune.py process."""

    args: Args
    words: list[str]  # script flags for all runs
    defaults: dict[str, Any]  # script arguments after applying `words`, by name
    space: dict[str, Any]  # setting -> Optuna distribution
    folder: Path  # the folder of the study
    study: optuna.Study
    trials: Path  # folder for the runs of this study only
    place: str  # host name and path of `trials`
    version: str  # hash of the script
    mark: str = field(default_factory=processes.new_mark)  # identifies the processes of all runs
    stop: threading.Event = field(default_factory=threading.Event)  # set by a signal
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while using Optuna


def plain(text: object) -> str:
    """Return untrusted text as one short line without control characters."""
    return clean(" ".join(str(text).split()))[:500]


def fail(reason: str) -> NoReturn:
    """End with a message about something the user can fix."""
    print(plain(reason), file=sys.stderr)
    sys.exit(2)


def find_script(given: Path) -> Path:
    """Return the path to a script that is given by name or path."""
    if str(given) in SCRIPTS:
        return HERE / file_of(str(given))
    if not given.is_file():
        fail(f"SCRIPT: {given} is neither a file nor a script of this project")
    return given


# === Space ======================================================================================
def ask_script(path: Path, words: list[str]) -> Any:
    """Return the script arguments with these flags; if a flag is invalid, tyro exits."""
    sys.path.insert(0, str(path.parent))
    try:
        script = importlib.import_module(path.stem)
    except (Exception, SystemExit) as error:  # the file can be any program
        fail(f"{path} cannot be imported: {type(error).__name__}: {error}")
    sys.argv = [path.name, *words]
    given = script.parse_args() if hasattr(script, "parse_args") else None
    names = {x.name for x in fields(given)} if is_dataclass(given) else set()
    if not names >= NEEDED or "num_agents" in names:
        fail(f"{path} does not train one agent, as ppo_linen.py and dqn_linen.py do")
    return given


def version_of(script: Path) -> str:
    return hashlib.sha256(script.read_bytes()).hexdigest()


def ranges_of(asked: tuple[str, ...], words: list[str], given: Any) -> dict[str, str]:
    """Return the search space as a mapping from settings to ranges in the syntax of --space."""
    known = asdict(given)
    flags = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    fixed = {flag.removeprefix("no-").replace("-", "_") for flag in flags}
    for name in fixed & GIVEN:
        fail(f"--{name.replace('_', '-')} cannot be set: tune.py sets it for each run")
    if "train_frequency" in known:
        fixed.add("num_steps")  # in DQN and SAC, num_steps sets how often metrics are logged
    space = SPACE
    if "norm_obs" in known:
        space = SPACE | CONTINUOUS_SPACE
    if "tau" in known:
        space = SPACE | SAC_SPACE
    ranges = {x: text for x, text in space.items() if x in known and x not in fixed}
    for word in asked:
        name, _, text = word.partition("=")
        name = name.replace("-", "_")
        if name not in known:
            fail(f"--space {word}: the script has no {name}")
        if name in NOT_SEARCHED or name in fixed:
            fail(f"--space {word}: {name} is fixed, by a flag or because it changes the task")
        ranges[name] = text
    return {name: text for name, text in ranges.items() if text != "none"}


def shown(value: Any) -> Any:
    """Return a value in a form that Optuna supports: the tuple (64, 64) becomes 64x64."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else value


def parse_range(name: str, text: str, given: Any) -> Any:
    """Return the Optuna distribution for NAME=RANGE, without values that the script rejects."""
    default = shown(getattr(given, name))

    def parse(word: str) -> Any:
        if word.endswith("%"):
            word = f"{given.total_timesteps * float(word[:-1]) / 100:.0f}"
        if isinstance(default, bool):
            return {"True": True, "False": False}[word]
        return type(default)(word)

    try:
        if ":" not in text:
            choices = dict.fromkeys([*map(parse, text.split(",")), default])
            return CategoricalDistribution([x for x in choices if takes(given, name, x)])
        low, high = (parse(word) for word in text.removesuffix(":log").split(":"))
        kind = IntDistribution if type(default) is int else FloatDistribution
        if low < high and takes(given, name, low) and takes(given, name, high):
            return kind(low, high, log=text.endswith(":log"))
        raise ValueError(f"the range from {low} to {high} is empty or not allowed")
    except (ValueError, KeyError, TypeError) as error:
        fail(f"--space {name}={text} must be NAME=LOW:HIGH[:log] or NAME=A,B,C: {error}")


def takes(given: Any, name: str, value: Any) -> bool:
    """Return whether the script accepts a value; print the reason if it does not."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            tyro.cli(type(given), args=words_of({name: value}), default=given)
    except SystemExit:
        print(f"Leaving out {name}={value}: {sentence_of(said.getvalue())}")
        return False
    return True


def sentence_of(text: str) -> str:
    """Return the last line of a script's output, or the first line of an error from tyro."""
    lines = [plain(x).strip("│╭╮╰╯─ ") for x in text.splitlines()]
    lines = [x for x in lines if x]
    for line in lines:
        if line.startswith("Error parsing"):
            return line
    return lines[-1] if lines else "no output"


def exception_of(text: str) -> str:
    """Return the exception from the last traceback, without the note that JAX adds.

    If there is no traceback, return "".
    """
    _, start, traceback = text.rpartition("Traceback (most recent call last):\n")
    lines = [x for x in traceback.splitlines() if start and not x.startswith(" ")]
    return plain(" ".join(lines).partition("-------------------- For simplicity, JAX")[0])


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
@contextlib.contextmanager
def locked(path: Path, why_not: str, seconds: float = 0) -> Generator[list[int]]:
    """Hold a file lock; fail if another process still holds it after `seconds`.

    Yield a list with the file descriptor. A process that inherits it holds the lock until it ends.
    """
    descriptors: list[int] = []
    lock = FileLock(path, timeout=seconds, on_acquired=descriptors.append)
    try:
        lock.acquire()
    except Timeout:
        fail(why_not)
    try:
        yield descriptors
    finally:
        lock.release()


def run(
    command: Command, words: list[str], log: Path, watch: Callable, locks: Sequence[int] = ()
) -> None:
    """Run a script to completion; raise TrialError, Stopped, or any exception from watch().

    After an exception, the process gets SIGTERM, which makes a script save a checkpoint, and
    SIGKILL after GRACE seconds. The process holds the locks until it ends, even if tune.py is
    killed.
    """
    if command.stop.is_set():
        raise Stopped
    if version_of(command.args.script) != command.version:
        fail(f"{command.args.script} has changed; undo the change, or choose a different --study")
    deadline = time.monotonic() + command.args.timeout
    mark = f"{command.mark}.{processes.new_mark()}"
    # Start a new session, so that Ctrl-C in the terminal does not reach the process.
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=os.environ | {processes.MARK: mark},
            start_new_session=True,
            pass_fds=locks,
        )
    try:
        while process.poll() is None:
            watch()
            if command.stop.is_set():
                raise Stopped
            if time.monotonic() > deadline:
                raise TrialError(f"not finished after {command.args.timeout:g} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        processes.end(mark)
        status = process.wait()
    if status in (-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT):
        raise Stopped
    if status != 0:
        output = log.read_text(errors="replace")
        said = sentence_of(output)
        if status == 1:  # uncaught exception; otherwise a traceback may be only a warning
            said = exception_of(output) or said
        kind = Refused if status == 2 else TrialError
        if status == 1 and any(text in said for text in NAN_ACTIONS):
            kind = CannotAct
        raise kind(f"{Path(words[0]).name} ended with status {status}: {said}")
    log.unlink()


def info_of(run: Path) -> dict[str, Any]:
    """Return the contents of run.json, or {} if there is none."""
    path = run / "run.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def is_complete(run: Path) -> bool:
    """Return whether a run reached its last iteration. Such a run cannot be resumed."""
    info = info_of(run)
    if info.get("status") == "diverged":  # a signal may have stopped it before its last iteration
        args = info["args"]
        steps_per_iteration = args["num_envs"] * args["num_steps"]
        return info["iteration"] >= args["total_timesteps"] // steps_per_iteration
    return info.get("status") == "completed"


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run; their names depend on the framework."""
    return [x for x in run.glob("checkpoint.*") if x.name != "checkpoint.new"]


def train(command: Command, folder: Path, settings: dict, seed: int, watch: Callable) -> None:
    """Train to completion, resuming from a checkpoint if there is one."""
    why_not = f"{folder}: a process from a killed command is still training there; end it first"
    with locked(Path(f"{folder}.lock"), why_not, 60) as locks:
        if is_complete(folder):
            return
        if checkpoints(folder):
            words = ["--resume", str(folder), "--env-id", command.defaults["env_id"]]
        else:
            shutil.rmtree(folder, ignore_errors=True)  # a run killed before its first checkpoint
            given = {"seed": seed, "runs_dir": folder.parent, "run_name": folder.name}
            words = [*command.words, *words_of(settings), *words_of(given)]
        run(command, [str(command.args.script), *words], Path(f"{folder}.log"), watch, locks)
        if not is_complete(folder):
            raise TrialError(f"{command.args.script.name} ended before training was complete")


def read_rows(run: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def evaluate(command: Command, folders: list[Path], seed: int, watch: Callable) -> list[float]:
    """Return the mean return of each agent, in greedy episodes with held-out seeds."""
    settings = GREEDY | {"episodes": command.args.episodes, "seed": seed}
    files = [folder / "evaluation.json" for folder in folders]
    missing = [path for path in files if not has_settings(path, settings)]
    if missing:
        for path in missing:
            if path.exists():  # keep the user's evaluation; evaluate.py might not replace it
                path.replace(path.with_name("evaluation-by-hand.json"))
        words = [str(path.parent) for path in missing]
        words += ["--episodes", str(command.args.episodes), "--seed", str(seed)]
        words += ["--script", str(command.args.script), "--env-id", command.defaults["env_id"]]
        run(command, [str(HERE / "evaluate.py"), *words], Path(f"{folders[0]}.evaluate.log"), watch)
    for path in missing:
        if not has_settings(path, settings):
            raise TrialError(f"evaluate.py did not write {path}")
    returns = [json.loads(path.read_text(encoding="utf-8"))["return"]["mean"] for path in files]
    if not np.isfinite(returns).all():
        raise TrialError("the return of an agent is not finite")
    return returns


def has_settings(path: Path, settings: dict[str, Any]) -> bool:
    """Return whether the file exists and contains an evaluation with these settings."""
    if not path.exists():
        return False
    found = json.loads(path.read_text(encoding="utf-8"))
    return all(found.get(name) == x for name, x in settings.items())


# === Trials =====================================================================================
def counted(study: optuna.Study, *which: TrialState) -> list[FrozenTrial]:
    """Return trials in the given states (default: all) that no other trial has taken over."""
    trials = study.get_trials(deepcopy=False, states=which or None)
    return [x for x in trials if x.state != TrialState.FAIL or "error" in x.user_attrs]


def run_of(trial: FrozenTrial | optuna.Trial, trials: Path, seed: int | str) -> Path:
    """Return the run folder for a trial and seed; a requeued trial uses the original folder."""
    number = int(trial.user_attrs.get("goes_on", trial.number))
    return trials / f"{number:04d}-seed-{seed}"


def work(command: Command) -> None:
    """Run trials until the study has enough of them or a signal arrives."""
    study = command.study
    try:
        while not command.stop.is_set():
            with command.lock:
                waiting = counted(study, TrialState.WAITING)  # the defaults, or requeued trials
                if not waiting and len(counted(study)) >= command.args.trials:
                    return
                trial = study.ask(command.space)
            # Ignore the trial if its heartbeat was so old that another process took it over.
            with contextlib.suppress(UpdateFinishedTrialError):
                run_trial(command, trial)
    except BaseException:
        command.stop.set()  # stop the other workers, too
        raise


def requeue(command: Command) -> None:
    """End interrupted trials, and queue new ones that continue their runs.

    Optuna's heartbeat does not support journal files or ask and tell, and its
    RetryHeartbeatStaleTrialCallback rejects settings outside the search space, although the
    defaults may be outside.
    """
    for trial in counted(command.study, TrialState.RUNNING):
        # Another machine may be running the trial. A container or a Slurm job may restart under
        # a different host name, so a long time without a heartbeat also counts as an interruption.
        is_ours = not command.args.storage or trial.user_attrs.get("place") == command.place
        heard = trial.user_attrs.get("heard", 0.0)
        # Without a heartbeat, use the start time. Add a day, because its time zone is unknown.
        if not heard and trial.datetime_start:
            heard = trial.datetime_start.timestamp() + 86_400
        if is_ours or time.time() > heard + SILENCE:
            try:
                command.study.tell(trial.number, state=TrialState.FAIL)
            except (ValueError, UpdateFinishedTrialError):
                continue  # another process has already ended it
            # A trial with an error failed, but its process ended before it could tell Optuna.
            if "error" not in trial.user_attrs:
                settings = trial.system_attrs.get("fixed_params", {}) | trial.params
                first = trial.user_attrs.get("goes_on", trial.number)
                command.study.enqueue_trial(settings, {"goes_on": first})


def run_trial(command: Command, trial: optuna.Trial) -> None:
    """Run a trial, and report the result to Optuna."""
    study = command.study
    try:
        trial.set_user_attr("place", command.place)
        trial.set_user_attr("heard", time.time())
        returns = train_and_evaluate(command, trial)
        trial.set_user_attr("returns", returns)
        ended = study.tell(trial, stats.trim_mean(returns, 0.25))
    except optuna.TrialPruned:
        ended = study.tell(trial, state=TrialState.PRUNED)
    except TrialError as error:
        defaults = {x: command.defaults[x] for x in command.space}
        if isinstance(error, Refused) and trial.params == defaults:
            raise  # all trials will fail, for example because a package is missing
        trial.set_user_attr("error", str(error))
        ended = study.tell(trial, state=TrialState.FAIL)
    with command.lock:
        report_trial(command, ended)


def train_and_evaluate(command: Command, trial: optuna.Trial) -> list[float]:
    """Train with each seed, reporting progress to Optuna; return the mean return of each agent."""
    num_seeds = command.args.num_seeds
    folders = [run_of(trial, command.trials, 1 + i) for i in range(num_seeds)]
    recent: list[float] = []
    reported = -1  # last reported step, from 0 to STEPS - 1
    heard = time.monotonic()

    def report(value: float, seeds: float) -> None:
        nonlocal reported
        step = int((STEPS - 1) * seeds / num_seeds)
        if step > reported:
            reported = step
            with command.lock:
                trial.report(value, step)
                if trial.should_prune():
                    raise optuna.TrialPruned

    def watch() -> None:
        """Send a heartbeat, and report the progress of the first seed."""
        nonlocal heard
        if time.monotonic() > heard + HEARTBEAT:
            heard = time.monotonic()
            with command.lock:
                trial.set_user_attr("heard", time.time())
        rows = [] if recent else read_rows(folders[0])
        value = last_return(rows)
        if value is not None:
            report(value, rows[-1]["global_step"] / command.defaults["total_timesteps"])

    for i, folder in enumerate(folders):
        train(command, folder, trial.params, 1 + i, watch)
        value = last_return(read_rows(folder))
        if value is not None:  # None if too few episodes finished
            recent.append(value)
            report(stats.trim_mean(recent, 0.25), 1 + i)
    return evaluate(command, folders, TRIAL_EPISODES, watch)


def report_trial(command: Command, trial: FrozenTrial) -> None:
    """Print the result of a trial and the state of the study; delete the trial's checkpoints."""
    said = trial.user_attrs.get("error", "pruned")
    if trial.state == TrialState.COMPLETE:
        said = f"{trial.value:.4g}"
    for seed in range(1, command.args.num_seeds + 1):
        for path in checkpoints(run_of(trial, command.trials, seed)):
            path.unlink()
    best = best_of(command.study)
    states = Counter(x.state.name.lower() for x in counted(command.study))
    text = ", ".join(f"{number} {state}" for state, number in states.items())
    text += f", best {best.value:.4g} (trial {best.number})" if best else ""
    print(f"trial {trial.number}: {said} | {command.args.trials} trials: {text}", flush=True)
    write_table(command.study, command.folder)


def best_of(study: optuna.Study) -> FrozenTrial | None:
    """Return the best complete trial; values that differ only by rounding count as equal."""
    complete = counted(study, TrialState.COMPLETE)
    return max(complete, key=lambda x: round(x.value or 0.0, 6), default=None)


# === Study ======================================================================================
def open_storage(url: str, folder: Path) -> str | optuna.storages.BaseStorage:
    """Return a database, by default SQLite in the folder of the study, or a journal file."""
    if url and "://" not in url:
        # Optuna's lock does not work with a relative path.
        backend = optuna.storages.journal.JournalFileBackend(os.path.abspath(url))
        return optuna.storages.JournalStorage(backend)
    return url or f"sqlite:///{quote(str(folder.absolute()))}/study.db?timeout=60"


def open_study(name: str, args: Args, folder: Path, begun: dict, defaults: dict) -> optuna.Study:
    """Create the study, or continue it if it was started with the same settings."""
    pruner: Any = optuna.pruners.NopPruner()
    if args.pruner == "hyperband":
        pruner = optuna.pruners.HyperbandPruner(STEPS // 9, STEPS, reduction_factor=3)
    study = optuna.create_study(
        study_name=name,
        storage=open_storage(args.storage, folder),
        pruner=pruner,
        direction="maximize",
        load_if_exists=True,
    )
    is_new = "id" not in study.user_attrs
    seed = args.seed if is_new and not args.storage else None  # machines need different proposals
    # TPE keeps a separate history for each Hyperband bracket, so start each with few random trials.
    study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=5)
    if args.sampler == "random":
        study.sampler = optuna.samplers.RandomSampler(seed)
    if is_new:
        study.enqueue_trial(defaults, skip_if_exists=True)  # the first trial uses the defaults
        study.set_user_attr("begun", begun)
        study.set_user_attr("id", f"{time.time_ns():x}")
    other = [x for x in begun if begun[x] != study.user_attrs["begun"].get(x)]
    if other:
        changed = f"study {name} was started with different settings ({other[0]})"
        fail(f"{changed}; choose a different --study")
    return study


# === Evaluation =================================================================================
def verdict(command: Command, best: FrozenTrial) -> dict[str, Any]:
    """Compare the best settings with the defaults, after training both with held-out seeds."""
    num_seeds = command.args.fresh_seeds
    defaults = {name: command.defaults[name] for name in command.space}
    trials = counted(command.study, TrialState.COMPLETE)
    watch = command.stop.is_set  # has no effect: these runs report no progress
    trainings = []
    for name, settings in (("defaults", defaults), (f"trial-{best.number:04d}", best.params)):
        for seed in range(HELD_OUT + 1, HELD_OUT + 1 + num_seeds):
            folder = command.trials / "fresh" / f"{name}-seed-{seed}"
            trainings.append((folder, settings, seed))
    folders = [folder for folder, *_ in trainings]
    failed: list[Path] = []  # runs that could not continue because their actions were NaN

    def train_one(training: tuple[Path, dict, int]) -> None:
        try:
            train(command, *training, watch)
        except CannotAct as error:
            print(f"{training[0].name}: {error}")
            failed.append(training[0])

    with ThreadPoolExecutor(command.args.workers) as pool:
        for i, _ in enumerate(pool.map(train_one, trainings)):
            print(f"{i + 1}/{len(folders)} runs with held-out seeds", flush=True)
    returns = held_out_returns(command, folders, failed, watch)
    of_best, of_defaults = returns[num_seeds:], returns[:num_seeds]
    words = ["python", str(command.args.script), *command.words, *words_of(best.params)]
    infos = [info_of(folder) for folder in folders]
    found = {
        "best_trial": best.number,
        "best_settings": best.params,
        "default_settings": defaults,
        "value_in_study": best.value,  # a maximum, so biased upwards
        "default_value_in_study": next((x.value for x in trials if x.params == defaults), None),
        "best_runs": [str(folder.relative_to(command.folder)) for folder in folders[-num_seeds:]],
        "best": summary(of_best),
        "defaults": summary(of_defaults),
        "best_minus_defaults": summary(differences(of_best, of_defaults)),
        "command": shlex.join(words),
        # A run that fails in its first iteration leaves no run.json.
        "versions": next((info["versions"] for info in infos if info), {}),
    }
    return found | command.study.user_attrs["begun"]


def held_out_returns(
    command: Command, folders: list[Path], failed: list[Path], watch: Callable
) -> list[float]:
    """Return the mean return of each agent; minus infinity if its run failed or it cannot act."""
    able = [folder for folder in folders if folder not in failed]
    try:
        values = evaluate(command, able, HELD_OUT_EPISODES, watch)
    except CannotAct:  # evaluate.py ends at the first agent that cannot act
        values = [held_out_return(command, folder, watch) for folder in able]
    returns = dict.fromkeys(failed, -np.inf) | dict(zip(able, values, strict=True))
    for folder in folders:
        if returns[folder] == -np.inf or info_of(folder)["status"] == "diverged":
            print(f"{folder.name}: training diverged; the return is {returns[folder]:.4g}")
    return [returns[folder] for folder in folders]


def held_out_return(command: Command, folder: Path, watch: Callable) -> float:
    """Return the mean return of an agent; minus infinity if it cannot act."""
    try:
        return evaluate(command, [folder], HELD_OUT_EPISODES, watch)[0]
    except CannotAct as error:
        print(f"{folder.name}: {error}")
        return -np.inf


def differences(of_best: list[float], of_defaults: list[float]) -> list[float]:
    """Return the differences, paired by seed; two returns of minus infinity differ by 0."""
    return [x - y if x != y else 0.0 for x, y in zip(of_best, of_defaults, strict=True)]


def summary(returns: list[float]) -> dict[str, Any]:
    """Return the interquartile mean (Agarwal et al. 2021) and the mean, with 95% t intervals.

    The interval for the interquartile mean follows Tukey and McLaughlin (1963). An interval is None
    if the variance is zero.
    """
    n = len(returns)
    cut = (n // 4 + 1e-9) / n
    found: dict[str, Any] = {"iqm": stats.trim_mean(returns, 0.25), "mean": float(np.mean(returns))}
    intervals = {
        "interval": stats.mstats.trimmed_mean_ci(returns, (cut, cut)),
        "mean_interval": stats.t.interval(0.95, n - 1, found["mean"], stats.sem(returns)),
    }
    for name, (low, high) in intervals.items():
        found[name] = [float(f"{low:.6g}"), float(f"{high:.6g}")] if low < high else None
    text = f"{found['iqm']:.4g} {found['interval']}, mean {found['mean']:.4g} "
    text += f"{found['mean_interval']}, {min(returns):.4g} to {max(returns):.4g}"
    return found | {"returns": returns, "text": text.replace("None", "(no interval)")}


def to_json(result: dict[str, Any]) -> str:
    """Return the result as JSON, which has no NaN and no infinity: these become null."""
    finite = json.loads(json.dumps(result), parse_constant=lambda _: None)
    return json.dumps(finite, indent=2)


def finish(command: Command) -> None:
    """Once all trials have ended, evaluate the best one with held-out seeds; draw the figures."""
    if command.stop.is_set():
        raise Stopped
    study = command.study
    if len(counted(study, *ENDED)) < command.args.trials:
        print("Other commands are running trials. Run this command again when they have finished.")
        return
    best = best_of(study)
    if best is None:
        raise TrialError("no trial is complete; trials.csv lists the reasons")
    result = verdict(command, best)
    (command.folder / "best.json").write_text(to_json(result))
    seeds = command.args.fresh_seeds
    print(f"Greedy return with {seeds} held-out seeds, interquartile mean [95% interval]:")
    print(f"  defaults: {result['defaults']['text']}")
    print(f"  best settings, from trial {best.number}: {result['best']['text']}")
    print(f"  difference, paired by seed: {result['best_minus_defaults']['text']}")
    print(f"Written to {command.folder}. Train with the best settings: {result['command']}")
    if len(counted(study, TrialState.COMPLETE)) > 1:
        draw(study, command.folder)
    if command.args.mlflow:
        try:
            copy_to_mlflow(command, result)
        except Exception as error:  # a server or its client can raise anything
            sys.exit(f"--mlflow: {plain(error)}; run the same command to try again")


# === Tables and figures =========================================================================
def write_table(study: optuna.Study, folder: Path) -> None:
    """Write trials.csv, with one row per trial: its settings, and the reason if it failed."""
    table = study.trials_dataframe(("number", "state", "value", "duration", "params", "user_attrs"))
    table = table.drop(columns=["user_attrs_place", "user_attrs_heard"], errors="ignore")
    table.to_csv(folder / "trials.csv", index=False)


def draw(study: optuna.Study, folder: Path) -> None:
    """Write Optuna's figures as HTML files."""
    top = list(optuna.importance.get_param_importances(study))[:4]
    figures = {
        "optimization_history": visualization.plot_optimization_history(study),
        "param_importances": visualization.plot_param_importances(study),
        "parallel_coordinate": visualization.plot_parallel_coordinate(study),
        "contour": visualization.plot_contour(study, params=top),
    }
    for name, figure in figures.items():
        figure.write_html(folder / f"{name}.html", include_plotlyjs="directory")


# === MLflow =====================================================================================
def copy_to_mlflow(command: Command, result: dict[str, Any]) -> None:
    """Log a finished study as a run with one child run per trial; delete earlier copies."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    import mlflow

    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "ppo-rosetta"))
    study = command.study
    key = study.user_attrs["id"]
    for old in mlflow.search_runs(filter_string=f"tags.study_id = '{key}'", output_format="list"):
        mlflow.delete_run(old.info.run_id)
    with mlflow.start_run(run_name=study.study_name, tags={"study_id": key}):
        mlflow.log_params(study.user_attrs["begun"])
        for trial in counted(study, *ENDED):
            tags = {"study_id": key, "state": trial.state.name}
            tags["error"] = trial.user_attrs.get("error", "")
            with mlflow.start_run(run_name=f"trial-{trial.number:04d}", nested=True, tags=tags):
                mlflow.log_params(command.defaults | trial.params)
                log_metrics(mlflow, trial, command.trials)
        log_verdict(mlflow, command.folder, result)


def log_metrics(mlflow: Any, trial: FrozenTrial, trials: Path) -> None:
    """Log the value of a trial, and the metrics for each seed over environment steps."""
    if trial.state == TrialState.COMPLETE:
        mlflow.log_metric("value", trial.value)
    for folder in trials.glob(run_of(trial, trials, "*").name):
        seed = folder.name.partition("-")[2]
        for row in read_rows(folder):
            metrics = {f"{x}/{seed}": y for x, y in row.items() if "/" in x and y is not None}
            mlflow.log_metrics(metrics, row["global_step"], synchronous=False)
    mlflow.flush_async_logging()


def log_verdict(mlflow: Any, folder: Path, result: dict[str, Any]) -> None:
    """Log the evaluation, the tables, the figures and an agent with the best settings."""
    for part in ("best", "defaults", "best_minus_defaults"):
        mlflow.log_metric(f"fresh_seeds/{part}", result[part]["iqm"])
    mlflow.set_tags({f"best/{name}": x for name, x in result["best_settings"].items()})
    for path in folder.iterdir():
        if path.suffix in (".json", ".csv", ".html", ".js"):
            mlflow.log_artifact(path)
    agents = [folder / run for run in result["best_runs"] if checkpoints(folder / run)]
    if agents:  # a run that failed because it diverged has no checkpoint
        mlflow.log_artifacts(agents[0], "best")


# === Command ====================================================================================
def begin(args: Args, words: list[str]) -> Command:
    """Open the study that the command line describes."""
    if args.workers > 1:  # the workers share a GPU
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    args.script = find_script(args.script)
    given = ask_script(args.script.absolute(), words)
    os.environ["COLUMNS"] = "500"  # tyro must not wrap the messages that sentence_of() reads
    ranges = ranges_of(args.space, words, given)
    space = {name: parse_range(name, text, given) for name, text in ranges.items()}
    if not space:
        fail("--space leaves no setting to search")
    print(", ".join(f"{name}={text}" for name, text in ranges.items()), flush=True)
    defaults = {x: shown(value) for x, value in asdict(given).items() if x not in GIVEN}
    version = version_of(args.script)
    begun = {"script": args.script.name, "flags": words, "space": ranges, "version": version}
    begun |= {x: getattr(args, x) for x in ("num_seeds", "episodes", "sampler", "pruner")}
    name = args.study or f"{args.script.stem}__{given.env_id}"
    folder = Path(args.studies_dir, name.replace("/", "-").replace(":", "-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        study = open_study(name, args, folder, begun, {x: defaults[x] for x in space})
    except Exception as error:  # a database or its client can raise anything
        fail(f"the study cannot be opened: {error}")
    trials = folder / study.user_attrs["id"]
    (trials / "fresh").mkdir(parents=True, exist_ok=True)
    place = f"{socket.gethostname()}:{trials.absolute()}"
    return Command(args, words, defaults, space, folder, study, trials, place, version)


def tune(command: Command) -> None:
    """Run the trials, and then evaluate the best one."""
    requeue(command)
    with ThreadPoolExecutor(command.args.workers) as pool:
        workers = [pool.submit(work, command) for _ in range(command.args.workers)]
    # A worker that fails stops the others, so any exception other than Stopped is the reason.
    errors = [error for worker in workers if (error := worker.exception())]
    errors.sort(key=lambda error: isinstance(error, Stopped))
    if errors:
        raise errors[0]
    finish(command)


def main(args: Args, words: list[str]) -> None:
    logging.disable(logging.WARNING)  # Optuna and MLflow log every step
    warnings.simplefilter("ignore")  # for example about intervals from a single seed
    command = begin(args, words)
    guard = processes.Guard(command.mark, GRACE)
    status = 1  # exit status if a script was stopped by a signal that tune.py did not receive

    def stop(number: int, frame: Any) -> None:
        nonlocal status
        status = 128 + number
        command.stop.set()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    try:
        why_not = "another command is running this study; use --workers 2 for two trials at a time"
        with locked(command.folder / "study.lock", why_not):
            tune(command)
    except Stopped:
        print("Stopped. Run the same command again to continue.")
        sys.exit(status)
    except Refused as error:
        fail(str(error))
    except TrialError as error:
        sys.exit(str(error))
    finally:
        guard.close()


if __name__ == "__main__":
    main(*ARGUMENTS)

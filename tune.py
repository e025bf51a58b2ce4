"""Tune a script's settings: each trial trains it with several seeds, fresh seeds judge the best.

    python tune.py dqn_linen --trials 40 --env-id envs.doors:Doors
    python tune.py ppo_linen --space learning_rate=1e-4:1e-2:log --space gamma=0.9,0.99
    python tune.py dqn_linen minatar --workers 2 --mlflow
    python tune.py path/to/mine.py                # a copy of a script, edited as you like

Flags that are not below are the script's, and stay fixed. In the end the best settings, and the
script's own, train again with seeds that no trial had: only those returns say what they are worth.
All is in tuned/NAME. Stopped or killed at any moment, the same command goes on.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import quote

import numpy as np
import tyro
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

from analysis import runs
from analysis.schema import SCRIPTS, clean, file_of

HERE = Path(__file__).resolve().parent
# What is searched, where the script has it. LOW:HIGH is uniform, and with :log its logarithm is;
# A,B,C is a choice, which the script's own value joins, and what it refuses leaves.
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
CONTINUOUS_SPACE = {  # in place of that, or beside it
    "norm_obs": "True,False",
    "norm_reward": "True,False",
    "ent_coef": "0.0,1e-4,1e-3,1e-2",  # the scripts' own is 0, which has no logarithm
}
SAC_SPACE = {
    "batch_size": "64,128,256",
    "train_frequency": "1:8:log",
    "tau": "1e-3:5e-2:log",
}
OURS = {"seed", "runs_dir", "run_name", "resume"}
NOT_SEARCHED = OURS | {"save_every", "save_replay", "track", "matmul_precision"}
NOT_SEARCHED |= {"env_id", "total_timesteps", "max_episode_steps", "sticky_actions", "full_actions"}
FRESH = 1_000  # trials train with seeds 1, 2, ..., the last runs with 1001, ...
TRIAL_GAMES, FRESH_GAMES = 1_000_000, 2_000_000  # seeds of the games that judge them
ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
BEAT, SILENCE = 60, 600  # seconds: how often a trial tells that it runs; who is silent was killed
STEPS = 90  # that a trial reports; Hyperband judges at a ninth and a third of them
# A script gets SIGTERM if tune.py is killed, and saves a checkpoint.
DIE_TOO = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []


@dataclass
class Args:
    script: tyro.conf.Positional[Path]  # one of scripts.toml by its name, or the path of a file
    trials: int = 40  # trials in the study, those of all its machines together
    num_seeds: int = 4  # seeds that a trial trains with
    fresh_seeds: int = 12  # seeds of the best settings' and the script's own last trainings
    episodes: int = 100  # greedy episodes that judge an agent
    workers: int = 1  # trials at a time, on this machine
    space: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # NAME=LOW:HIGH[:log], =A,B,C or =none
    sampler: Literal["tpe", "random"] = "tpe"  # what proposes settings
    pruner: Literal["hyperband", "none"] = "hyperband"  # what ends trials that lag behind
    seed: int = 1  # seed of the sampler; scripts get 1 to num_seeds
    timeout: float = 86_400.0  # seconds after which a training or a judgement counts as hanging
    study: str = ""  # name of the study; by default the script's and the environment's
    studies_dir: str = "tuned"  # folder that gets one folder per study
    storage: str = ""  # database (postgresql://...) or journal file; by default in the study
    mlflow: bool = False  # copy the study to MLflow, which reads MLFLOW_TRACKING_URI, ...

    def __post_init__(self) -> None:
        for name in ("trials", "num_seeds", "fresh_seeds", "episodes", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")


class TrialError(Exception):
    """Why a trial failed, in a sentence."""


class Refused(TrialError):
    """A script says that its command is a mistake."""


class Stopped(Exception):
    """A signal ended a run, with a checkpoint; somebody goes on with it."""


@dataclass
class Command:
    """All that a command of tune.py goes by."""

    args: Args
    words: list[str]  # the script's flags that all runs have
    own: dict[str, Any]  # the script's arguments by those words
    space: dict[str, Any]  # Optuna's distributions, by setting
    folder: Path  # of the study
    study: optuna.Study
    trials: Path  # where they train; another study of the same name has another one
    place: str  # that folder, and its machine
    stop: threading.Event = field(default_factory=threading.Event)  # set by a signal
    lock: threading.Lock = field(default_factory=threading.Lock)  # one worker at a time has Optuna


def plain(text: object) -> str:
    """Other people's text as one short line, without what a terminal would obey."""
    return clean(" ".join(str(text).split()))[:500]


def fail(reason: str) -> NoReturn:
    """End the process with a sentence about what its user can mend."""
    print(plain(reason), file=sys.stderr)
    sys.exit(2)


def find_script(given: Path) -> Path:
    """The file of one of this project's scripts by its name, or a path as it is."""
    if str(given) in SCRIPTS:
        return HERE / file_of(str(given))
    if not given.is_file():
        fail(f"SCRIPT: {given} is neither a file nor the name of a script of this project")
    return given


# === Space ======================================================================================
def ask_script(path: Path, words: list[str]) -> Any:
    """The script's arguments by these words; where they are wrong, tyro says so and exits."""
    sys.path.insert(0, str(path.parent))
    script = importlib.import_module(path.stem)
    sys.argv = [path.name, *words]
    given = script.parse_args()
    if not vars(given).keys() > OURS or "num_agents" in vars(given):
        fail(f"{path} does not train one agent, as ppo_linen.py and dqn_linen.py do")
    return given


def ranges_of(asked: tuple[str, ...], words: list[str], given: Any) -> dict[str, str]:
    """What is searched, by setting, as --space would have it."""
    known = asdict(given)
    flags = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    fixed = {flag.removeprefix("no-").replace("-", "_") for flag in flags}
    for name in fixed & OURS:
        fail(f"--{name.replace('_', '-')} cannot be set: tune.py gives it to each run")
    if "train_frequency" in known:
        fixed.add("num_steps")  # to DQN and SAC, it is how often they log
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
            fail(f"--space {word}: {name} is fixed, by a flag or since it changes the task")
        ranges[name] = text
    return {name: text for name, text in ranges.items() if text != "none"}


def shown(value: Any) -> Any:
    """A setting's value as Optuna has it, which knows no tuples: 64x64."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else value


def parse_range(name: str, text: str, given: Any) -> Any:
    """Optuna's distribution of the values that NAME=RANGE names, if the script takes them."""
    own = shown(getattr(given, name))

    def parse(word: str) -> Any:
        if word.endswith("%"):
            word = f"{given.total_timesteps * float(word[:-1]) / 100:.0f}"
        if isinstance(own, bool):
            return {"True": True, "False": False}[word]
        return type(own)(word)

    try:
        if ":" not in text:
            choices = dict.fromkeys([*map(parse, text.split(",")), own])
            return CategoricalDistribution([x for x in choices if takes(given, name, x)])
        low, high = (parse(word) for word in text.removesuffix(":log").split(":"))
        kind = IntDistribution if type(own) is int else FloatDistribution
        if low < high and takes(given, name, low) and takes(given, name, high):
            return kind(low, high, log=text.endswith(":log"))
        raise ValueError(f"it has no values from {low} to {high}")
    except (ValueError, KeyError, TypeError) as error:
        fail(f"--space {name}={text} is no NAME=LOW:HIGH[:log] or NAME=A,B,C: {error}")


def takes(given: Any, name: str, value: Any) -> bool:
    """Whether the script takes a value of a setting; if not, say so."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            tyro.cli(type(given), args=words_of({name: value}), default=given)
    except SystemExit:
        print(f"{name} is searched without {value}: {sentence_of(said.getvalue())}")
        return False
    return True


def sentence_of(text: str) -> str:
    """What a script said last; of tyro's box, its first line."""
    lines = [plain(x).strip("│╭╮╰╯─ ") for x in text.splitlines()]
    lines = [x for x in lines if x]
    for line in lines:
        if line.startswith("Error parsing"):
            return line
    return lines[-1] if lines else "it said nothing"


def words_of(settings: dict[str, Any]) -> list[str]:
    """The flags that give a script these settings."""
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
    """Hold a lock file, or fail where another process has it for so many seconds.

    The file's descriptor is yielded: a process that gets it holds the lock until it ends.
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
    command: Command, words: list[str], log: Path, look: Callable, locks: Sequence[int] = ()
) -> None:
    """Run a script to its end; raise TrialError, or Stopped, or what look raises.

    The process ends, too: by SIGTERM, by which a script saves a checkpoint, or else by SIGKILL.
    Until then it holds the locks, even if this process is killed.
    """
    if command.stop.is_set():
        raise Stopped
    deadline = time.monotonic() + command.args.timeout
    launch = [*DIE_TOO, sys.executable, *words]
    # In a session of its own: a terminal's Ctrl-C reaches tune.py, which tells it.
    with open(log, "wb") as file:
        process = subprocess.Popen(
            launch,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            pass_fds=locks,
        )
    try:
        while process.poll() is None:
            look()
            if command.stop.is_set():
                raise Stopped
            if time.monotonic() > deadline:
                raise TrialError(f"no end after {command.args.timeout:g} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        status = process.wait()
    if status in (-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT):
        raise Stopped
    if status != 0:
        said = sentence_of(log.read_text(errors="replace"))
        kind = Refused if status == 2 else TrialError
        raise kind(f"{Path(words[0]).name} ended by {status}: {said}")
    log.unlink()


def is_complete(run: Path) -> bool:
    path = run / "run.json"
    return path.exists() and json.loads(path.read_text())["status"] == "completed"


def checkpoints(run: Path) -> list[Path]:
    """What a run's script goes on from; each framework's has another name."""
    return [x for x in run.glob("checkpoint.*") if x.name != "checkpoint.new"]


def train(command: Command, folder: Path, settings: dict, seed: int, look: Callable) -> None:
    """Train to the end, or go on from a checkpoint."""
    why_not = f"{folder}: what a killed command left behind still trains there; end it first"
    with locked(Path(f"{folder}.lock"), why_not, 60) as locks:
        if is_complete(folder):
            return
        if checkpoints(folder):
            words = ["--resume", str(folder), "--env-id", command.own["env_id"]]
        else:
            shutil.rmtree(folder, ignore_errors=True)  # it was killed before its first checkpoint
            own = {"seed": seed, "runs_dir": folder.parent, "run_name": folder.name}
            words = [*command.words, *words_of(settings), *words_of(own)]
        run(command, [str(command.args.script), *words], Path(f"{folder}.log"), look, locks)


def read_rows(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; the last may be on its way."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def judge(command: Command, folders: list[Path], games: int, look: Callable) -> list[float]:
    """The mean return of each run's agent in greedy episodes, from the seed `games`."""
    files = [folder / "evaluation.json" for folder in folders]
    missing = [str(path.parent) for path in files if not path.exists()]
    if missing:
        words = [*missing, "--episodes", str(command.args.episodes), "--seed", str(games)]
        words += ["--script", str(command.args.script), "--env-id", command.own["env_id"]]
        run(command, [str(HERE / "evaluate.py"), *words], Path(f"{folders[0]}.judge.log"), look)
    returns = [json.loads(path.read_text())["return"]["mean"] for path in files]
    if not np.isfinite(returns).all():
        raise TrialError("an agent's return is no number")
    return returns


# === Trials =====================================================================================
def counted(study: optuna.Study, *which: TrialState) -> list[FrozenTrial]:
    """The trials, or those in some states, without those that a later one goes on with."""
    trials = study.get_trials(deepcopy=False, states=which or None)
    return [x for x in trials if x.state != TrialState.FAIL or "error" in x.user_attrs]


def run_of(trial: FrozenTrial | optuna.Trial, trials: Path, seed: int | str) -> Path:
    """Where a trial trains with a seed: one that goes on with another, where that one did."""
    number = int(trial.user_attrs.get("goes_on", trial.number))
    return trials / f"{number:04d}-seed-{seed}"


def work(command: Command) -> None:
    """Run trials until there are enough, or a signal stops them."""
    study = command.study
    try:
        while not command.stop.is_set():
            with command.lock:
                waiting = counted(study, TrialState.WAITING)  # the first, and interrupted ones
                if not waiting and len(counted(study)) >= command.args.trials:
                    return
                trial = study.ask(command.space)
            run_trial(command, trial)
    except BaseException:
        command.stop.set()  # the other workers
        raise


def requeue(command: Command) -> None:
    """Queue what was interrupted: its trial ends, and another goes on with its runs.

    Not by Optuna's heartbeat, which a journal file has not, nor ask and tell; and its
    RetryHeartbeatStaleTrialCallback takes no settings that lie outside of what is searched, as the
    script's own may.
    """
    for trial in counted(command.study, TrialState.RUNNING):
        # Of a study that machines share, another one may be running it. A container or a job of
        # Slurm may come back under another name, so that silence tells, too.
        is_ours = not command.args.storage or trial.user_attrs.get("place") == command.place
        heard = trial.user_attrs.get("heard", 0.0)
        if not heard and trial.datetime_start:  # in the time of its machine's zone
            heard = trial.datetime_start.timestamp() + 86_400
        if is_ours or time.time() > heard + SILENCE:
            try:
                command.study.tell(trial.number, state=TrialState.FAIL)
            except (ValueError, UpdateFinishedTrialError):
                continue  # another command was first
            if "error" not in trial.user_attrs:  # else it had failed, and was about to say so
                settings = trial.system_attrs.get("fixed_params", {}) | trial.params
                first = trial.user_attrs.get("goes_on", trial.number)
                command.study.enqueue_trial(settings, {"goes_on": first})


def run_trial(command: Command, trial: optuna.Trial) -> None:
    """Run a trial, and tell Optuna how it ended."""
    study = command.study
    try:
        trial.set_user_attr("place", command.place)
        trial.set_user_attr("heard", time.time())
        returns = train_and_judge(command, trial)
        trial.set_user_attr("returns", returns)
        ended = study.tell(trial, stats.trim_mean(returns, 0.25))
    except optuna.TrialPruned:
        ended = study.tell(trial, state=TrialState.PRUNED)
    except UpdateFinishedTrialError:
        return  # it stood still for so long that another command goes on with it
    except TrialError as error:
        own = {x: command.own[x] for x in command.space}
        if isinstance(error, Refused) and trial.params == own:
            raise  # so do all: as where a package is missing
        trial.set_user_attr("error", str(error))
        ended = study.tell(trial, state=TrialState.FAIL)
    with command.lock:
        report_trial(command, ended)


def train_and_judge(command: Command, trial: optuna.Trial) -> list[float]:
    """Train with each seed in turn, telling Optuna how it does; return what the agents return."""
    num_seeds = command.args.num_seeds
    folders = [run_of(trial, command.trials, 1 + i) for i in range(num_seeds)]
    recent: list[float] = []
    reported = -1  # the last step that was, a part of the whole trial
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

    def look() -> None:
        """Say that the trial runs, and how it does while the first seed trains."""
        nonlocal heard
        if time.monotonic() > heard + BEAT:
            heard = time.monotonic()
            with command.lock:
                trial.set_user_attr("heard", time.time())
        rows = [] if recent else read_rows(folders[0])
        value = runs.last_return(rows)
        if value is not None:
            report(value, rows[-1]["global_step"] / command.own["total_timesteps"])

    for i, folder in enumerate(folders):
        train(command, folder, trial.params, 1 + i, look)
        value = runs.last_return(read_rows(folder))
        if value is not None:  # enough episodes ended
            recent.append(value)
            report(stats.trim_mean(recent, 0.25), 1 + i)
    return judge(command, folders, TRIAL_GAMES, look)


def report_trial(command: Command, trial: FrozenTrial) -> None:
    """Print how a trial ended, and where the study is; of its runs, the metrics stay."""
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
    """The complete trial of the largest value; at a ceiling, rounding alone tells values apart."""
    complete = counted(study, TrialState.COMPLETE)
    return max(complete, key=lambda x: round(x.value or 0.0, 6), default=None)


# === Study ======================================================================================
def open_storage(url: str, folder: Path) -> str | optuna.storages.BaseStorage:
    """A database, by default SQLite in the study's folder, or a journal file."""
    if url and "://" not in url:
        # Of a relative path in a folder, Optuna's lock would not be there.
        backend = optuna.storages.journal.JournalFileBackend(os.path.abspath(url))
        return optuna.storages.JournalStorage(backend)
    return url or f"sqlite:///{quote(str(folder.absolute()))}/study.db?timeout=60"


def open_study(name: str, args: Args, folder: Path, begun: dict, own: dict) -> optuna.Study:
    """Make the study, or go on with it, if it was begun with the same."""
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
    seed = args.seed if is_new and not args.storage else None  # else others propose the same
    # To TPE, each of Hyperband's brackets is a history of its own, begun by few random trials.
    study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=5)
    if args.sampler == "random":
        study.sampler = optuna.samplers.RandomSampler(seed)
    if is_new:
        study.enqueue_trial(own, skip_if_exists=True)  # the first trial: what the script does
        study.set_user_attr("begun", begun)
        study.set_user_attr("id", f"{time.time_ns():x}")
    other = [x for x in begun if begun[x] != study.user_attrs["begun"].get(x)]
    if other:
        fail(f"study {name} was begun with another {other[0]}: name another by --study")
    return study


# === Verdict ====================================================================================
def verdict(command: Command, best: FrozenTrial) -> dict[str, Any]:
    """Train by the best settings, and by the script's own, with seeds that no trial had."""
    num_seeds = command.args.fresh_seeds
    own = {name: command.own[name] for name in command.space}
    trials = counted(command.study, TrialState.COMPLETE)
    look = command.stop.is_set  # nobody is told how these do
    trainings = []
    for name, settings in (("own", own), (f"trial-{best.number:04d}", best.params)):
        for seed in range(FRESH + 1, FRESH + 1 + num_seeds):
            folder = command.trials / "fresh" / f"{name}-seed-{seed}"
            trainings.append((folder, settings, seed))
    folders = [folder for folder, *_ in trainings]

    def train_fresh(training: tuple[Path, dict, int]) -> None:
        train(command, *training, look)

    with ThreadPoolExecutor(command.args.workers) as pool:
        for i, _ in enumerate(pool.map(train_fresh, trainings)):
            print(f"{i + 1}/{len(folders)} runs with fresh seeds", flush=True)
    returns = judge(command, folders, FRESH_GAMES, look)
    of_best = returns[num_seeds:]
    words = ["python", str(command.args.script), *command.words, *words_of(best.params)]
    found = {
        "best_trial": best.number,
        "best_settings": best.params,
        "own_settings": own,
        "value_in_study": best.value,  # the largest of all: on average more than they are worth
        "own_value_in_study": next((x.value for x in trials if x.params == own), None),
        "best_runs": [str(folder.relative_to(command.folder)) for folder in folders[-num_seeds:]],
        "best": summary(of_best),
        "own": summary(returns[:num_seeds]),
        "best_minus_own": summary(np.subtract(of_best, returns[:num_seeds]).tolist()),
        "command": shlex.join(words),
        "versions": json.loads((folders[0] / "run.json").read_text())["versions"],
    }
    return found | command.study.user_attrs["begun"]


def summary(returns: list[float]) -> dict[str, Any]:
    """Interquartile mean (Agarwal et al. 2021) and mean, each with a 95% interval by Student's t.

    The former's is Tukey and McLaughlin's of 1963. Where no variance is left, there is none.
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


def finish(command: Command) -> None:
    """Once all trials have ended, judge the best by fresh seeds, say so, and draw the figures."""
    if command.stop.is_set():
        raise Stopped
    study = command.study
    if len(counted(study, *ENDED)) < command.args.trials:
        print("other commands run trials; after them, the same command has the verdict")
        return
    best = best_of(study)
    if best is None:
        raise TrialError("no trial is complete: trials.csv says why")
    result = verdict(command, best)
    (command.folder / "best.json").write_text(json.dumps(result, indent=2))
    print(f"greedy return with {command.args.fresh_seeds} fresh seeds, interquartile mean [95%]:")
    print(f"  the script's own settings: {result['own']['text']}")
    print(f"  best settings, of trial {best.number}: {result['best']['text']}")
    print(f"  difference, seed by seed: {result['best_minus_own']['text']}")
    print(f"written to {command.folder}; to train with the best: {result['command']}")
    if len(counted(study, TrialState.COMPLETE)) > 1:
        draw(study, command.folder)
    if command.args.mlflow:
        try:
            copy_to_mlflow(command, result)
        except Exception as error:  # a server, and what connects to it, can raise anything
            sys.exit(f"--mlflow: {plain(error)}; the same command tries again")


# === Tables and figures =========================================================================
def write_table(study: optuna.Study, folder: Path) -> None:
    """Write trials.csv: a row per trial, with its settings, or why it failed."""
    table = study.trials_dataframe(("number", "state", "value", "duration", "params", "user_attrs"))
    table = table.drop(columns=["user_attrs_place", "user_attrs_heard"], errors="ignore")
    table.to_csv(folder / "trials.csv", index=False)


def draw(study: optuna.Study, folder: Path) -> None:
    """Draw Optuna's figures, as HTML."""
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
    """Log a study that has its verdict: a run, and a child of it for each trial that ended.

    They replace what was there of it.
    """
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
                mlflow.log_params(command.own | trial.params)
                log_metrics(mlflow, trial, command.trials)
        log_verdict(mlflow, command.folder, result)


def log_metrics(mlflow: Any, trial: FrozenTrial, trials: Path) -> None:
    """Log a trial's value, and over environment steps the metrics of each seed."""
    if trial.state == TrialState.COMPLETE:
        mlflow.log_metric("value", trial.value)
    for folder in trials.glob(run_of(trial, trials, "*").name):
        seed = folder.name.partition("-")[2]
        for row in read_rows(folder):
            metrics = {f"{x}/{seed}": y for x, y in row.items() if "/" in x and y is not None}
            mlflow.log_metrics(metrics, row["global_step"], synchronous=False)
    mlflow.flush_async_logging()


def log_verdict(mlflow: Any, folder: Path, result: dict[str, Any]) -> None:
    """Log the verdict, the tables, the figures and the best settings' agent."""
    for part in ("best", "own", "best_minus_own"):
        mlflow.log_metric(f"fresh_seeds/{part}", result[part]["iqm"])
    mlflow.set_tags({f"best/{name}": x for name, x in result["best_settings"].items()})
    for path in folder.iterdir():
        if path.suffix in (".json", ".csv", ".html", ".js"):
            mlflow.log_artifact(path)
    mlflow.log_artifacts(folder / result["best_runs"][0], "best")


# === Command ====================================================================================
def begin() -> Command:
    """Read the command line, and open the study that it names."""
    args, words = tyro.cli(Args, description=__doc__, return_unknown_args=True)
    if args.workers > 1:  # several share a GPU
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    args.script = find_script(args.script)
    given = ask_script(args.script.absolute(), words)
    os.environ["COLUMNS"] = "500"  # else tyro wraps sentences that are read from now on
    ranges = ranges_of(args.space, words, given)
    space = {name: parse_range(name, text, given) for name, text in ranges.items()}
    if not space:
        fail("--space leaves nothing to search")
    print(", ".join(f"{name}={text}" for name, text in ranges.items()), flush=True)
    own = {x: shown(value) for x, value in asdict(given).items() if x not in OURS}
    begun = {"script": args.script.name, "flags": words, "space": ranges}
    begun["version"] = hashlib.sha256(args.script.read_bytes()).hexdigest()
    begun |= {x: getattr(args, x) for x in ("num_seeds", "episodes", "sampler", "pruner")}
    name = args.study or f"{args.script.stem}__{given.env_id}"
    folder = Path(args.studies_dir, name.replace("/", "-").replace(":", "-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        study = open_study(name, args, folder, begun, {x: own[x] for x in space})
    except Exception as error:  # a database, and what connects to it, can raise anything
        fail(f"the study cannot be opened: {error}")
    trials = folder / study.user_attrs["id"]
    (trials / "fresh").mkdir(parents=True, exist_ok=True)
    place = f"{socket.gethostname()}:{trials.absolute()}"
    return Command(args, words, own, space, folder, study, trials, place)


def tune(command: Command) -> None:
    """Run the trials, and then what judges the best of them."""
    requeue(command)
    with ThreadPoolExecutor(command.args.workers) as pool:
        workers = [pool.submit(work, command) for _ in range(command.args.workers)]
    for worker in workers:
        worker.result()
    finish(command)


def main() -> None:
    """Tune, and report what the best settings give with fresh seeds."""
    logging.disable(logging.WARNING)  # Optuna and MLflow tell of each step
    warnings.simplefilter("ignore")  # of own settings out of a range, of one seed's intervals, ...
    command = begin()
    status = 1  # somebody stopped a script

    def stop(number: int, frame: Any) -> None:
        nonlocal status
        status = 128 + number
        command.stop.set()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    try:
        why_not = "another command runs this study; --workers 2 runs two trials at a time"
        with locked(command.folder / "study.lock", why_not):
            tune(command)
    except Stopped:
        print("Stopped. The same command goes on.")
        sys.exit(status)
    except Refused as error:
        fail(str(error))
    except TrialError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

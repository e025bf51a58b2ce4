"""Tune a script's settings: each trial trains it with several seeds, fresh seeds judge the best.

    python tune.py dqn_linen.py --trials 40 --env-id envs.doors:Doors
    python tune.py ppo_linen.py --space learning_rate=1e-4:1e-2:log --space gamma=0.9,0.99
    python tune.py dqn_linen.py doors --workers 2 --mlflow

The script is a ppo_*.py or dqn_*.py beside this file; flags that are not below are the script's,
and stay fixed. Optuna proposes settings from a space (SPACES in this file, changed by --space); the
first trial has the script's own. A trial trains with each of a few seeds, in processes of their
own, and its value is the interquartile mean of what the agents return when they play greedily, from
a seed that no training had. A trial that lags behind is pruned, by the returns in its
metrics.jsonl. In the end the best settings, and the script's own, train again with seeds that no
trial had: only those returns say what the settings are worth.

By default these are up to 40 x 4 trainings, and 2 x 12 in the end. All is in studies/NAME. Stopped
or killed at any moment, the same command goes on; several machines share a study by --storage.
"""

import contextlib
import difflib
import fcntl
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import (
    FIRST_EXCEPTION,
    Executor,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, get_args
from urllib.parse import quote

if __name__ in ("__main__", "__mp_main__"):  # Ctrl-C during the imports shows no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import numpy as np
import psutil
import tyro
from scipy import stats

try:
    import optuna
    import sqlalchemy.exc
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.trial import FrozenTrial, TrialState
except ImportError as error:
    print(f"tune.py: {error}: pip install -r requirements-tune.txt", file=sys.stderr)
    sys.exit(2)

from analysis.render import forgive_terminals, write_whole
from analysis.runs import last_return
from analysis.stats import mean_interval
from analysis.tuning import (
    Tracker,
    counted,
    draw,
    first_number,
    folder_of,
    history,
    plain,
    read_rows,
    states,
    value_of,
    write_table,
)

Values = CategoricalDistribution | FloatDistribution | IntDistribution

HERE = Path(__file__).parent
# What is searched, of each algorithm; --space changes it. LOW:HIGH is uniform, and with :log its
# logarithm is; A,B,C is a choice; 2% is of total_timesteps. The script's own value joins a choice,
# and what the script refuses leaves it. Not searched is what trades time for memory: num_envs.
SPACES = {
    "ppo": {
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
        "hidden_sizes": "64x64,128x128,256x256",
    },
    "dqn": {
        "learning_rate": "1e-5:1e-2:log",
        "anneal_lr": "True,False",
        "gamma": "0.9,0.95,0.98,0.99,0.995,0.999",
        "buffer_size": "10000,50000,100000",
        "batch_size": "32,64,128",
        "replay_ratio": "4:32:log",
        "target_network_frequency": "10:1000:log",
        "double_q": "True,False",
        "end_e": "0.01:0.2:log",
        "exploration_steps": "2%:50%:log",
        "loss": "mse,huber",
        "hidden_sizes": "64x64,120x84,256x256",
    },
}
OURS = ("seed", "runs_dir", "run_name", "resume")
NOT_SEARCHED = (*OURS, "save_every", "track", "exp_name", "matmul_precision")
TASK = ("env_id", "total_timesteps", "max_episode_steps", "sticky_actions", "full_actions")
RANGE = "must be NAME=LOW:HIGH, NAME=LOW:HIGH:log, NAME=A,B,C or NAME=none"
# Seeds: trials train with 1, 2, ... and the last runs with FRESH + 1, ...; each kind plays its
# games from a seed of its own.
FRESH, TRIAL_GAMES, FRESH_GAMES = 1_000, 1_000_000, 2_000_000
PACKAGES = ("optuna", "jax", "flax", "torch", "gymnax", "gymnasium")
HEARTBEAT, GRACE = 60, 600  # seconds; a trial that was silent for longer is taken for dead
# Steps that a trial reports, 0 to 89: Hyperband judges at 10 and 30, a ninth and a third of it.
STEPS = 90
HOPELESS = 3  # failures from the start that end a command
STORAGE_ERRORS = (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError)
# A script gets SIGTERM if tune.py is killed, and saves a checkpoint.
DIE_TOO = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []


@dataclass
class Args:
    script: Annotated[  # ppo_*.py or dqn_*.py
        str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT")
    ]
    trials: int = 40  # trials in the study, those of all its machines and commands together
    num_seeds: int = 4  # seeds that a trial trains with
    fresh_seeds: int = 12  # seeds of the best settings' and the script's own last trainings
    episodes: int = 100  # greedy episodes that judge an agent
    workers: int = 1  # trials at a time, on this machine
    space: Annotated[  # a setting to search: NAME=LOW:HIGH[:log], NAME=A,B,C; =none: not searched
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=RANGE")
    ] = ()
    sampler: Literal["tpe", "random"] = "tpe"  # what proposes settings
    pruner: Literal["hyperband", "none"] = "hyperband"  # what ends trials that lag behind
    seed: int = 1  # seed of the sampler; scripts get 1 to num_seeds
    timeout: float = 86_400.0  # seconds after which a training or a judgement counts as hanging
    study: str | None = None  # name of the study; default: the script's and the environment's
    studies_dir: str = "studies"  # folder that gets one folder per study
    storage: str | None = None  # database (postgresql://...) or journal file; default: in the study
    mlflow: Annotated[  # copy the study to MLflow, at this URI or else where MLflow does by default
        str | None, tyro.conf.arg(metavar="[URI]")
    ] = None

    def __post_init__(self) -> None:
        """Raise ValueError, one sentence on the command line, where a value cannot work."""
        path = self.script_path
        elsewhere = os.sep in self.script and not (
            os.path.exists(self.script) and path.is_file() and path.samefile(self.script)
        )
        known = [x.name for kind in SPACES for x in sorted(HERE.glob(f"{kind}_*.py"))]
        known = [x for x in known if not x.endswith("_vmap.py")]  # a trial has an agent a process
        if elsewhere or path.name not in known:
            raise ValueError(f"SCRIPT must be one of {', '.join(known)}, not {plain(self.script)}")
        most = {"num_seeds": FRESH, "fresh_seeds": FRESH, "workers": 1000}
        for name in ("trials", "num_seeds", "fresh_seeds", "episodes", "workers"):
            if not 0 < getattr(self, name) <= most.get(name, 10**6):
                rule = f"must lie between 1 and {most.get(name, 10**6)}, not {getattr(self, name)}"
                raise ValueError(f"--{name.replace('_', '-')} {rule}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must lie between 0 and 2**32 - 1, not {self.seed}")
        if not 0 < self.timeout < threading.TIMEOUT_MAX:
            raise ValueError(f"--timeout must be a number of seconds above 0, not {self.timeout}")
        name = self.study
        if name is not None and not (
            Path(name).name == name not in ("", "..") and name.isprintable()
        ):
            rule = "must be the name of one folder in --studies-dir"
            raise ValueError(f"--study {rule}, not {plain(name)}")

    @property
    def script_path(self) -> Path:
        return HERE / (Path(self.script).name.removesuffix(".py") + ".py")

    @property
    def algorithm(self) -> str:
        return self.script_path.name.partition("_")[0]


class Problem(Exception):
    """What a user can mend, in a sentence."""


class TrialError(Exception):
    """Why a trial failed, in a sentence."""


class Stopped(Exception):
    """A signal ends the command; what ran goes on with the next one."""


# === Space ======================================================================================
def ask_script(name: str, commands: list[list[str]]) -> list[dict[str, Any] | str]:
    """Of each command line: the script's arguments, or its sentence on what is wrong with it.

    Each is {name: (value, the literals allowed)}. It runs in a process of its own, since a script
    brings JAX or PyTorch with it, and those would take memory, on a GPU as well.
    """
    os.environ |= {"JAX_PLATFORMS": "cpu", "COLUMNS": "1000"}
    script, answers = importlib.import_module(name), []
    for words in commands:
        said, sys.argv = io.TextIOWrapper(io.BytesIO(), "utf-8"), [f"{name}.py", *words]
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                read = getattr(script, "parse_args", partial(tyro.cli, script.Args))
                args = read()
            kinds = {x: get_args(y) for x, y in script.Args.__annotations__.items()}
            answers.append({x: (y, kinds[x]) for x, y in asdict(args).items() if x in kinds})
        except SystemExit:  # the sentence is in a box, above its first rule
            said.seek(0)
            lines = [line.strip("│ \n") for line in said][1:]
            end = next((i for i, line in enumerate(lines) if line[:1] in "─╰"), len(lines))
            text = " ".join(lines[:end])
            answers.append(text.removeprefix("Error parsing Args: ") or "it ended without a word")
    return answers


def end_with_parent() -> None:
    """Let the process that asks a script end where tune.py is killed."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def parse_range(name: str, text: str, own: Any, literals: tuple) -> Values:
    """The values that NAME=RANGE names, of the kind that the script's own value has."""

    def value(word: str) -> Any:
        if isinstance(own, bool):
            return {"true": True, "false": False}[word.lower()]
        if isinstance(own, tuple):
            return "x".join(str(int(x)) for x in word.split("x"))  # Optuna knows no tuples
        if literals and isinstance(own, str) and word not in literals:
            raise ValueError(f"{word} is none of {', '.join(map(str, literals))}")
        return type(own)(word)

    try:
        if ":" not in text:
            choices = list(dict.fromkeys(value(x) for x in text.split(",")))
            return CategoricalDistribution(choices)
        low, high, *log = text.split(":")
        if type(own) not in (int, float) or log not in ([], ["log"]):
            raise ValueError("it has no such range")
        kind = IntDistribution if isinstance(own, int) else FloatDistribution
        if not value(low) < value(high):
            raise ValueError(f"{low} is not below {high}")
        return kind(value(low), value(high), log=bool(log))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise Problem(f"--space {name}={plain(text)} {RANGE}: {plain(error)}") from error


def words_of(settings: dict[str, Any]) -> list[str]:
    """The flags that give a script these settings."""
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{flag}" if value else f"--no-{flag}"]
        elif name == "hidden_sizes":
            words += [f"--{flag}", *str(value).split("x")]
        else:
            words += [f"--{flag}", str(value)]
    return words


class Plan(NamedTuple):
    """What is tuned: a script by its fixed words, over a space."""

    script: Path
    words: list[str]  # flags that all runs have
    own: dict[str, Any]  # the script's arguments by those words
    space: dict[str, Values]
    texts: dict[str, str]  # of the space, as --space would have it

    @property
    def own_settings(self) -> dict[str, Any]:
        return {name: self.own[name] for name in self.space}


def make_plan(args: Args, words: list[str], pool: Executor) -> Plan:
    """Check words and space with the script itself; raise Problem where it does not have them."""
    path = args.script_path

    def ask(commands: list[list[str]]) -> list[dict[str, Any] | str]:
        try:
            return pool.submit(ask_script, path.stem, commands).result()
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # a script can raise anything
            raise Problem(
                f"{path.name} cannot be imported: {plain(error) or type(error).__name__}"
            ) from error

    (known,) = ask([words])
    if isinstance(known, str):
        raise Problem(f"{path.name}, which gets what tune.py does not know, says: {plain(known)}")
    flags = {x[2:].partition("=")[0].replace("-", "_") for x in words if x.startswith("--")}
    fixed = {x.removeprefix("no_") for x in flags} | flags
    for name in [x for x in OURS if x in fixed]:
        raise Problem(f"--{name.replace('_', '-')} cannot be set: tune.py gives it to each run")

    asked = {}
    for text in args.space:
        name, equals, values = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals:
            raise Problem(f"--space {plain(text)} {RANGE}")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" (is it {near[0]}?)" if near else ""
            raise Problem(f"--space {plain(text)}: {path.name} has no setting {plain(name)}{hint}")
        if name in NOT_SEARCHED or name in TASK:
            raise Problem(f"--space {name} would change the task, or is no setting of the agent")
        if name in fixed and values.strip() != "none":
            raise Problem(f"--space {name}: a flag gives it one value, so it cannot be searched")
        asked[name] = values.strip()
    default = {x: y for x, y in SPACES[args.algorithm].items() if x in known and x not in fixed}
    texts = {x: y for x, y in (default | asked).items() if y != "none"}
    own = {x: "x".join(map(str, y)) if isinstance(y, tuple) else y for x, (y, _) in known.items()}

    def of_total(percent: re.Match[str]) -> str:
        return f"{known['total_timesteps'][0] * float(percent[1]) / 100:.0f}"

    space, trials = {}, []
    for name, text in texts.items():
        text = texts[name] = re.sub(r"(\d+(?:\.\d+)?)%", of_total, text)
        values = parse_range(name, text, *known[name])
        if isinstance(values, CategoricalDistribution):
            if name not in asked and own[name] not in values.choices:
                values = CategoricalDistribution([*values.choices, own[name]])
            trials += [(name, x) for x in values.choices]
        else:
            trials += [(name, x) for x in (values.low, values.high)]
        space[name] = values
    if not space:
        raise Problem("--space leaves nothing to search")
    answers = ask([[*words, *words_of({name: value})] for name, value in trials])
    for (name, value), answer in zip(trials, answers, strict=True):
        if isinstance(answer, str):
            choices = [x for x in getattr(space[name], "choices", []) if x != value]
            if name in asked or not choices:
                raise Problem(f"--space {name}={texts[name]}: {plain(answer)}")
            space[name] = CategoricalDistribution(choices)
    for name, values in space.items():
        if isinstance(values, CategoricalDistribution):
            texts[name] = ",".join(map(str, values.choices))
    return Plan(path, words, own, space, texts)


# === Runs =======================================================================================
class Runner(NamedTuple):
    """How runs are made: fresh processes of the script, and of evaluate.py."""

    args: Args
    plan: Plan
    folder: Path  # of the study
    stop: threading.Event  # set by a signal
    forking: threading.Lock  # until it has its own program, a new process holds what ours holds

    @property
    def consent(self) -> list[str]:
        """What says that this environment's code may run, where it is code."""
        env_id = str(self.plan.own["env_id"])
        return ["--env-id", env_id] if ":" in env_id else []

    def start(self, command: list[str], log: Path) -> subprocess.Popen:
        environment = dict(os.environ)
        if self.args.workers > 1:  # several share a GPU
            environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        with self.forking, open(log, "wb") as file:
            # A session of its own: a terminal's Ctrl-C reaches tune.py, which tells it.
            return subprocess.Popen(
                [*DIE_TOO, sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def watch(self, command: list[str], log: Path) -> Generator[None]:
        """Run a command, yielding as it runs; raise TrialError if it fails, Stopped by a signal.

        However this ends, the process has ended too: one that runs on gets SIGTERM, by which a
        script saves a checkpoint, and if that does not help SIGKILL.
        """
        if self.stop.is_set():
            raise Stopped
        process, deadline = self.start(command, log), time.monotonic() + self.args.timeout
        try:
            while process.poll() is None:
                yield
                if self.stop.is_set():
                    raise Stopped
                if time.monotonic() > deadline:
                    raise TrialError(f"no end after {self.args.timeout:g} s")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    process.send_signal(number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(60)
        if process.returncode in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, 130, 143):
            self.stop.wait(2)  # where all processes get a signal, ours may be the last to come
        if self.stop.is_set() and process.returncode != 0:
            raise Stopped
        if process.returncode != 0:
            lines = log.read_text(errors="replace").split("\n")
            said = [plain(x) for x in lines if x.strip()] or ["it printed nothing"]
            code = process.returncode
            how = f"exit {code}" if code > 0 else signal.Signals(-code).name
            raise TrialError(f"{Path(command[0]).name} ended by {how}: {said[-1]}")
        log.unlink(missing_ok=True)

    def train(self, folder: Path, settings: dict, seed: int) -> Generator[list[dict[str, Any]]]:
        """Train to the end, or go on from a checkpoint; after each iteration, yield all metrics."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            self.wait_for(folder)
        own = {"seed": seed, "runs_dir": folder.parent, "run_name": folder.name}
        command = [*self.plan.words, *words_of(settings), *words_of(own)]
        if (folder / "checkpoint.npz").exists():
            command = ["--resume", str(folder), *self.consent]
        elif folder.exists() and not (folder / "run.json").exists():
            shutil.rmtree(folder)  # it was killed before its first checkpoint
        running = self.watch([str(self.plan.script), *command], beside(folder, ".log"))
        looks = [None] if (folder / "run.json").exists() else chain(running, [None])
        seen, size = 0, 0
        with contextlib.closing(running):  # whoever stops listening ends the process
            for _ in looks:
                path = folder / "metrics.jsonl"
                before, size = size, path.stat().st_size if path.exists() else 0
                if size > before:
                    rows = read_rows(folder)
                    yield from (rows[:i] for i in range(seen + 1, len(rows) + 1))
                    seen = len(rows)

    def wait_for(self, folder: Path) -> None:
        """Wait until a process that a killed command left behind has ended, by its checkpoint."""
        deadline = time.monotonic() + 60
        while not self.stop.is_set():
            with self.forking, locked(folder) as free:
                if free:
                    return
            if time.monotonic() > deadline:
                raise TrialError(f"{folder} is in use by another process")
            time.sleep(0.2)
        raise Stopped

    def judge(self, folders: list[Path], games: int) -> list[float]:
        """The mean return of each run's agent in greedy episodes, from the seed `games`."""

        def found(folder: Path) -> float | None:
            with contextlib.suppress(OSError, ValueError):
                said = json.loads((folder / "evaluation.json").read_text())
                if (said["seed"], said["episodes"]) == (games, self.args.episodes):
                    return float(said["return"]["mean"])
            return None

        missing = [str(folder) for folder in folders if found(folder) is None]
        if missing:
            words = ["--episodes", str(self.args.episodes), "--seed", str(games), *self.consent]
            log = beside(folders[0], ".evaluation.log")
            for _ in self.watch([str(HERE / "evaluate.py"), *missing, *words], log):
                pass
        returns = [found(folder) for folder in folders]
        if not np.isfinite(np.array(returns, float)).all():
            raise TrialError("an agent's return is no number")
        return [float(x) for x in returns if x is not None]


@contextlib.contextmanager
def locked(folder: Path) -> Generator[bool]:
    """Hold a folder, as a script holds its run's; False where another process has it."""
    place, free = os.open(folder, os.O_RDONLY), False
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        yield free
    finally:
        os.close(place)


def beside(folder: Path, end: str) -> Path:
    return folder.with_name(folder.name + end)


def iqm(values: list[float]) -> float:
    """Interquartile mean: without the lowest and the highest quarter; of three or fewer, the mean.

    Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice".
    """
    return float(stats.trim_mean(values, 0.25))


# === Trials =====================================================================================
class Shared(NamedTuple):
    """What the workers of a command share."""

    interrupted: set[int]  # numbers of trials that a signal, or the storage, interrupted
    claiming: threading.Lock  # held from counting the trials until one more has its settings
    pruning: threading.Lock  # Optuna's pruner is not made for threads
    telling: threading.Lock  # one line, and one call to MLflow, at a time


def suggest(trial: optuna.Trial, name: str, values: Values) -> Any:
    if isinstance(values, CategoricalDistribution):
        return trial.suggest_categorical(name, values.choices)
    if isinstance(values, IntDistribution):
        return trial.suggest_int(name, values.low, values.high, log=values.log)
    return trial.suggest_float(name, values.low, values.high, log=values.log)


def run_trial(
    trial: optuna.Trial, runner: Runner, shared: Shared, claim: contextlib.ExitStack
) -> float:
    """Train by settings that Optuna proposes, with each seed in turn; return the trial's value.

    The steps that Optuna knows are parts of the whole trial, all seeds together. While the first
    seed trains, its recent return is reported; after that, whenever a seed has ended, the
    interquartile mean of those that have.
    """
    most = runner.args.trials
    trial.set_user_attr("worker", [socket.gethostname(), os.getpid(), started(psutil.Process())])
    frozen = next(x for x in trial.study.get_trials(deepcopy=False) if x.number == trial.number)
    first, others = first_number(frozen), counted(trial.study)
    twins = [x for x in others if x.number < trial.number and first_number(x) == first]
    if twins or len({first_number(x) for x in others if first_number(x) < first}) >= most:
        trial.set_user_attr("surplus", True)  # two commands counted at once, and both made one
        raise TrialError
    try:
        settings = {name: suggest(trial, name, x) for name, x in runner.plan.space.items()}
    except (ValueError, TypeError) as error:
        said = f"the storage has other values of a setting: {plain(error)}"
        trial.set_user_attr("error", said)
        raise TrialError(said) from error
    claim.close()
    seeds = range(1, runner.args.num_seeds + 1)
    folders = [folder_of(frozen, runner.folder, seed) for seed in seeds]
    reported = -1 if frozen.last_step is None else frozen.last_step

    def report(value: float, progress: float) -> None:
        nonlocal reported
        step = min(int(STEPS * progress), STEPS - 1)
        if step <= reported:
            return
        reported = step
        with shared.pruning:
            trial.report(value, step)
            # Hyperband goes by a trial's number, so one that repeats another is no longer judged.
            if not history(frozen) and trial.should_prune():
                raise optuna.TrialPruned

    recent: list[float] = []
    try:
        for seed, folder in zip(seeds, folders, strict=True):
            value = None
            with contextlib.closing(runner.train(folder, settings, seed)) as progress:
                for rows in progress:
                    value = last_return(rows)  # None: too few episodes yet
                    if seed == 1 and value is not None:
                        done = rows[-1]["global_step"] / runner.plan.own["total_timesteps"]
                        report(value, min(done, 1) / len(seeds))
            if value is not None:
                recent.append(value)
                report(iqm(recent), seed / len(seeds))
        returns = runner.judge(folders, TRIAL_GAMES)
        trial.set_user_attr("returns", returns)
        return iqm(returns)
    except (Stopped, *STORAGE_ERRORS):
        shared.interrupted.add(trial.number)
        raise
    except TrialError as error:
        trial.set_user_attr("error", str(error))
        raise


def best_of(study: optuna.Study, plan: Plan) -> FrozenTrial | None:
    """The complete trial of the largest value, of equals that of the largest mean.

    What is not within the space is another's, in a storage that others write to as well.
    """
    complete = [
        trial
        for trial in states(counted(study), TrialState.COMPLETE)
        if trial.params.keys() == plan.space.keys()
        and all(holds(plan.space[x], value) for x, value in trial.params.items())
    ]

    def rank(trial: FrozenTrial) -> tuple[float, float, int]:
        returns = trial.user_attrs.get("returns", [])
        value = float(f"{trial.value:.6g}")  # at a ceiling, rounding alone tells values apart
        return value, sum(x for x in returns if type(x) is float), -trial.number

    return max(complete, key=rank, default=None)


def repeat(study: optuna.Study, trial: FrozenTrial) -> None:
    """Queue what a trial that was interrupted had to do; the new one goes on in its folders."""
    # Killed before it had its settings, the script's own must be proposed again.
    attrs = {x: y for x, y in trial.system_attrs.items() if x == "fixed_params"}
    attrs["failed_trial"] = first_number(trial)
    again = optuna.create_trial(
        state=TrialState.WAITING,
        params=trial.params,
        distributions=trial.distributions,
        system_attrs=attrs | {"retry_history": [*history(trial), trial.number]},
        intermediate_values=trial.intermediate_values,
    )
    study.add_trial(again)


def started(process: psutil.Process) -> float:
    """When a process began, in seconds since the boot: in between, the clock may have been set."""
    return process.create_time() - psutil.boot_time()


def recover(study: optuna.Study, args: Args) -> None:
    """Queue again what died with a command: one of this machine, or one that is silent for long."""
    optuna.storages.fail_stale_trials(study)  # repeats them, where the storage knows heartbeats
    for trial in states(counted(study), TrialState.RUNNING, TrialState.FAIL):
        host, pid, start = trial.user_attrs.get("worker", ("", 0, 0))
        dead = host == socket.gethostname()
        with contextlib.suppress(psutil.Error):
            dead = dead and abs(started(psutil.Process(pid)) - start) > 0.05
        if trial.state == TrialState.FAIL:
            if dead and "error" not in trial.user_attrs:  # killed before it was queued again
                repeat(study, trial)
            continue
        longest = min(args.timeout, 1e8) * (args.num_seeds + 1) if host else HEARTBEAT
        began = trial.datetime_start or datetime.now()
        if dead or datetime.now() - began > timedelta(seconds=longest):
            with contextlib.suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):
                study.tell(trial.number, state=TrialState.FAIL)
                repeat(study, trial)


def work(study: optuna.Study, runner: Runner, shared: Shared, tell: Callable) -> None:
    """Run trials until there are enough, or a signal stops them."""
    objective = partial(run_trial, runner=runner, shared=shared)
    callbacks = [lambda study, trial: tell(trial)]
    while not runner.stop.is_set():
        with contextlib.ExitStack() as claim:
            claim.enter_context(shared.claiming)
            recover(study, runner.args)
            trials = counted(study)
            if len(trials) >= runner.args.trials and not states(trials, TrialState.WAITING):
                return
            # A machine that slept may find its trial taken for dead, and given to another.
            with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
                caught, once = (
                    (TrialError, Stopped, *STORAGE_ERRORS),
                    partial(objective, claim=claim),
                )
                try:
                    study.optimize(once, 1, catch=caught, callbacks=callbacks)
                except AssertionError as error:  # Optuna could not even say that the trial failed
                    raise error.__context__ or error from None
                except ValueError as error:  # as above: what Optuna says where it comes to the end
                    if not str(error).startswith("Cannot tell a"):
                        raise


def describe(study: optuna.Study, runner: Runner, seconds: float, ended: int) -> str:
    """Trials done, pruned and failed, the best so far, and the time left, fresh seeds included.

    seconds is for how long this command has been at it, in which `ended` trials ended.
    """
    trials, args = counted(study), runner.args
    complete, pruned, failed = (
        states(trials, x) for x in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
    )
    done, best = len(complete) + len(pruned) + len(failed), best_of(study, runner.plan)
    text = f"{done}/{args.trials} trials: {len(complete)} complete, {len(pruned)} pruned"
    text += f", {len(failed)} failed, "
    text += f"best {best.value:.4g} (trial {best.number})" if best else "no best yet"
    left = seconds / max(ended, 1) * (args.trials - done)
    if complete:
        whole = np.mean([x.duration.total_seconds() for x in complete if x.duration])
        left += float(whole) / args.num_seeds * 2 * args.fresh_seeds / args.workers
    return text + (f", {left / 60:.0f} min left" if left >= 60 else f", {left:.0f} s left")


# === Storage ====================================================================================
def open_storage(url: str | None, folder: Path) -> optuna.storages.BaseStorage:
    """A database, by default SQLite in the study's folder, or a journal file."""
    if url is not None and "://" not in url:
        path = Path(url).absolute()  # of a relative one in a folder, Optuna's lock would not be
        if path.exists() and not path.is_file():
            raise Problem(f"--storage {url} is no file")
        backend = optuna.storages.journal.JournalFileBackend(str(path))
        return optuna.storages.JournalStorage(backend)
    url = url or f"sqlite:///{quote(str(folder.absolute() / 'study.db'))}"
    memory = sqlalchemy.engine.make_url(url).database in (None, "", ":memory:")
    if url.startswith("redis") or (url.startswith("sqlite") and (memory or "mode=memory" in url)):
        raise Problem("--storage must last, and be none that unpickles, as Optuna does with Redis")
    options: dict[str, Any] = {"heartbeat_interval": HEARTBEAT, "grace_period": GRACE}
    options["heartbeat_stale_trial_callback"] = repeat
    engine: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("sqlite"):
        engine["connect_args"] = {"timeout": 60}
    for _ in range(5):
        with contextlib.suppress(sqlalchemy.exc.SQLAlchemyError):
            return optuna.storages.RDBStorage(url, engine_kwargs=engine, **options)
        time.sleep(0.5)  # two commands may be making the tables at once
    return optuna.storages.RDBStorage(url, engine_kwargs=engine, **options)


def open_study(name: str, args: Args, plan: Plan, storage: Any, folder: Path) -> optuna.Study:
    """Make the study, or go on with it; raise Problem where flags, space or script are others."""
    code = hashlib.sha256(plan.script.read_bytes()).hexdigest()
    settings: dict[str, Any] = {"script": plan.script.name, "version": code}
    settings |= {"flags": plan.words, "space": plan.texts}
    settings |= {x: getattr(args, x) for x in ("num_seeds", "episodes", "sampler", "pruner")}
    hyperband = optuna.pruners.HyperbandPruner(STEPS // 9, STEPS, reduction_factor=3)
    pruners = {"none": optuna.pruners.NopPruner(), "hyperband": hyperband}
    options: dict[str, Any] = {
        "study_name": name,
        "storage": storage,
        "pruner": pruners[args.pruner],
    }
    try:
        study, seeds = optuna.create_study(direction="maximize", **options), [args.seed]
    except optuna.exceptions.DuplicatedStudyError:
        study = optuna.load_study(**options)
        # Begun again by the same seed, the sampler would propose the same again.
        seeds = [args.seed, len(study.get_trials(deepcopy=False)), time.time_ns() % 2**32]
    vet(study)
    patience = 0 if len(seeds) == 1 else 50
    while "id" not in study.user_attrs and patience:  # who made the study is about to write it
        patience -= 1
        time.sleep(0.1)
    if "id" not in study.user_attrs and not study.get_trials(deepcopy=False):
        if all(holds(values, plan.own[x]) for x, values in plan.space.items()):
            study.enqueue_trial(plan.own_settings)  # the first trial: what the script does anyway
        else:
            print("the script's own settings are not in the space, so no trial has them")
    made = study.user_attrs.get("settings", settings)
    for x in [x for x in settings if settings[x] != made.get(x)]:
        was = f"other {x.replace('_', ' ')} ({plain(made.get(x))}, now {plain(settings[x])})"
        was = f"another version of {plan.script.name}" if x == "version" else was
        raise Problem(f"study {name} was begun with {was}: name another by --study")
    study.set_user_attr("settings", settings)
    key = study.user_attrs.get("id") or uuid.uuid4().hex
    study.set_user_attr("id", key)
    mark = folder / "study_id"
    if any((folder / x).exists() for x in ("trials", "fresh")) and (
        not mark.is_file() or mark.read_text() != key
    ):
        raise Problem(f"{folder} has the runs of another study: name another by --study")
    write_whole(mark, key.encode())
    seed = int(np.random.SeedSequence(seeds).generate_state(1)[0])
    # Each of Hyperband's brackets is a history of its own to TPE, so of ten random trials in each,
    # Optuna's default, there would be few left to propose.
    random, tpe = optuna.samplers.RandomSampler, optuna.samplers.TPESampler
    study.sampler = random(seed) if args.sampler == "random" else tpe(seed=seed, n_startup_trials=5)
    return study


def vet(study: optuna.Study) -> None:
    """Raise Problem where the attributes that tune.py reads are not what it writes."""

    def right(trial: FrozenTrial) -> bool:
        host, pid, start = trial.user_attrs.get("worker", ("", 0, 0.0))
        before = history(trial) + [first_number(trial)] * bool(history(trial))
        fine = all(type(x) is int and 0 <= x < trial.number for x in before)
        fine = fine and isinstance(trial.user_attrs.get("returns", []), list)
        fine = fine and isinstance(host, str) and type(pid) is int and pid >= 0
        return fine and isinstance(start, float)

    try:
        fine = study.direction == optuna.study.StudyDirection.MAXIMIZE
        fine = fine and isinstance(study.user_attrs.get("settings", {}), dict)
        fine = fine and isinstance(study.user_attrs.get("id", ""), str)
        fine = fine and all(map(right, study.get_trials(deepcopy=False)))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        fine = False
    if not fine:
        raise Problem(f"study {study.study_name} is none of tune.py: name another by --study")


def holds(values: Values, value: Any) -> bool:
    if isinstance(values, CategoricalDistribution):
        return value in values.choices
    return values.low <= value <= values.high


# === Verdict ====================================================================================
def verdict(study: optuna.Study, best: FrozenTrial, runner: Runner) -> dict[str, Any]:
    """Train by the best settings, and by the script's own, with seeds that no trial had.

    Returns what best.json holds; raises TrialError if a run fails.
    """
    args, plan, own = runner.args, runner.plan, runner.plan.own_settings
    settings, names = {"best": best.params, "own": own}, {"own": "own"}
    names["best"] = "own" if best.params == own else f"trial-{best.number:04d}"
    seeds = range(FRESH + 1, FRESH + 1 + args.fresh_seeds)
    fresh = runner.folder / "fresh"
    folders = {x: [fresh / f"{names[x]}-seed-{seed}" for seed in seeds] for x in settings}
    jobs = {folders[x][i]: (settings[x], seed) for x in settings for i, seed in enumerate(seeds)}
    said = f"{len(jobs)} runs with fresh seeds, by the best settings and by the script's own"
    print(said, flush=True)

    def train(folder: Path) -> None:
        for _ in runner.train(folder, *jobs[folder]):
            pass

    with ThreadPoolExecutor(args.workers) as pool:
        for i, _ in enumerate(pool.map(train, jobs)):
            print(f"{i + 1}/{len(jobs)} runs", flush=True)
    runner.judge(list(jobs), FRESH_GAMES)
    parts = {x: summary(runner.judge(folders[x], FRESH_GAMES)) for x in settings}
    for x, part in parts.items():
        infos = [json.loads((folder / "run.json").read_text()) for folder in folders[x]]
        part["median_seconds"] = float(np.median([y["durations"]["total"] for y in infos]))
    pairs = zip(parts["best"]["returns"], parts["own"]["returns"], strict=True)
    parts["best_minus_own"] = summary([x - y for x, y in pairs])

    trials = counted(study)
    complete = states(trials, TrialState.COMPLETE)
    counts = (len(states(trials, x)) for x in (TrialState.PRUNED, TrialState.FAIL))
    return {
        "study": study.study_name,
        "script": plan.script.name,
        "flags": plan.words,
        "space": plan.texts,
        "sampler": args.sampler,
        "pruner": args.pruner,
        "num_seeds": args.num_seeds,
        "episodes": args.episodes,
        "trials": dict(
            zip(("complete", "pruned", "failed"), (len(complete), *counts), strict=True)
        ),
        "seconds_of_trials": sum(x.duration.total_seconds() for x in trials if x.duration),
        "best_trial": best.number,
        "best_settings": best.params,
        "own_settings": own,
        "value_in_study": best.value,  # the largest of all: on average more than they are worth
        "own_value_in_study": next((x.value for x in complete if x.params == own), None),
        "fresh_seeds": list(seeds),
        "best_runs": [folder.name for folder in folders["best"]],
        **parts,
        "command": shlex.join(["python", plan.script.name, *plan.words, *words_of(best.params)]),
        **{x: infos[0][x] for x in ("git_commit", "python", "os", "cpu", "cores", "gpu", "load")},
        "versions": {x: y for x, y in infos[0]["versions"].items() if x in PACKAGES},
    }


def summary(returns: list[float]) -> dict[str, Any]:
    """Interquartile mean of a number per seed, mean, their 95% intervals, and the numbers.

    Intervals are Student's t, of the interquartile mean with the winsorized variance (after Tukey
    and McLaughlin 1963, as SciPy has it). They are None for one seed, and where so many are alike
    that no variance is left.
    """
    cut, n = (len(returns) // 4 + 1e-9) / len(returns), len(returns)
    found: dict[str, Any] = {"iqm": iqm(returns), "interval": None, "mean": float(np.mean(returns))}
    found |= {"mean_interval": None, "min": min(returns), "max": max(returns), "returns": returns}
    if n > 1:
        of_iqm = map(float, stats.mstats.trimmed_mean_ci(returns, (cut, cut)))
        of_mean = mean_interval(np.array(returns), [""] * n)[1:]
        for name, (low, high) in {"interval": of_iqm, "mean_interval": of_mean}.items():
            found[name] = [low, high] if low < high else None
    return found


def spoken(part: dict[str, Any]) -> str:
    def within(interval: list[float] | None) -> str:
        return "[{:.4g}, {:.4g}]".format(*interval) if interval else "no interval"

    text = f"{part['iqm']:.4g} {within(part['interval'])}, mean {part['mean']:.4g}"
    text += f" {within(part['mean_interval'])}"
    return f"{text}, from {part['min']:.4g} to {part['max']:.4g}"


# === Command ====================================================================================
def fail(reason: object) -> NoReturn:
    """End the process with a sentence about what its user can mend."""
    print(plain(reason), file=sys.stderr)
    sys.exit(2)


def read_words(words: list[str]) -> tuple[Args, list[str]]:
    """Split the command line into tune.py's own arguments and the script's."""
    if "--mlflow" in words:
        then = words.index("--mlflow") + 1
        is_uri = any(x in "".join(words[then : then + 1]) for x in ":/")
        if not is_uri or words[then].endswith(".py"):
            words = [*words[:then], "default", *words[then:]]
    return tyro.cli(Args, args=words, description=__doc__, return_unknown_args=True)


def main() -> None:
    """Tune, and report what the best settings give with fresh seeds."""
    forgive_terminals()
    args, words = read_words(sys.argv[1:])
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=end_with_parent) as pool:
        plan = make_plan(args, words, pool)
    name = args.study or plain(f"{plan.script.stem}__{plan.own['env_id']}").replace("/", "-")
    folder = Path(args.studies_dir, name.replace(":", "-"))
    folder.mkdir(parents=True, exist_ok=True)
    runner, signals = Runner(args, plan, folder, threading.Event(), threading.Lock()), []
    try:
        storage = open_storage(args.storage, folder)
        study = open_study(name, args, plan, storage, folder)
    except Problem:
        raise
    except Exception as error:  # a database, and what connects to it, can raise anything
        raise Problem(f"--storage: {error}") from error
    about = {"script": plan.script.name, "flags": shlex.join(words), "num_seeds": args.num_seeds}
    about |= {"episodes": args.episodes} | {f"space/{x}": y for x, y in plan.texts.items()}
    own = {x: y for x, y in plan.own.items() if x not in OURS}
    tracker = Tracker(args.mlflow, study, folder, own, about) if args.mlflow is not None else None

    def stop(number: int, _: Any) -> None:
        """Let every process save and end; at a third signal, without waiting for them."""
        signals.append(number)
        runner.stop.set()
        if len(signals) > 2:
            os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    print(f"{name}: {', '.join(f'{x}={y}' for x, y in plan.texts.items())}", flush=True)
    shared = Shared(set(), threading.Lock(), threading.Lock(), threading.Lock())
    start, ended = time.monotonic(), []

    def tell(trial: FrozenTrial) -> None:
        """Print how a trial ended, and keep of its runs the metrics and numbers alone."""
        if trial.number in shared.interrupted:
            return repeat(study, trial)
        if "surplus" in trial.user_attrs:
            return
        with shared.telling:
            ended.append(trial.state)
            value, said = value_of(trial), plain(trial.user_attrs.get("error", "failed"))
            if trial.state == TrialState.PRUNED:
                said = f"pruned at {100 * (trial.last_step or 0) // STEPS}%"
            said = said if value is None else f"{value:.4g}"
            progress = describe(study, runner, time.monotonic() - start, len(ended))
            print(f"trial {trial.number}: {said} | {progress}", flush=True)
            for seed in range(1, args.num_seeds + 1) if trial.state != TrialState.FAIL else ():
                path = folder_of(trial, folder, seed)
                (path / "checkpoint.npz").unlink(missing_ok=True)
                beside(path, ".log").unlink(missing_ok=True)
            if tracker:
                tracker.sync()
            if set(ended) == {TrialState.FAIL} and len(ended) == HOPELESS:
                runner.stop.set()

    with ThreadPoolExecutor(args.workers) as pool:
        workers = [pool.submit(work, study, runner, shared, tell) for _ in range(args.workers)]
        wait(workers, return_when=FIRST_EXCEPTION)
        if any(x.done() and x.exception() for x in workers):
            runner.stop.set()
    for worker in workers:
        worker.result()
    try:
        finish(study, runner, tracker)
    except Stopped:
        if not signals:
            raise TrialError(f"the first {HOPELESS} trials failed: {last_error(study)}") from None
        print("Stopped. The same command goes on.")
        sys.exit(128 + signals[0])


def last_error(study: optuna.Study) -> str:
    errors = [x.user_attrs["error"] for x in counted(study) if "error" in x.user_attrs]
    return plain((errors or ["no reason is known"])[-1])


def finish(study: optuna.Study, runner: Runner, tracker: Tracker | None) -> None:
    """Write the table, and once no trial is left the verdict and the figures; print it."""
    if runner.stop.is_set():
        raise Stopped
    folder, best = runner.folder, best_of(study, runner.plan)
    left = states(counted(study), TrialState.RUNNING, TrialState.WAITING)
    write_table(study, folder)
    if left:
        print(f"{len(left)} trials run elsewhere; after them, the same command has the verdict")
        return
    if best is None:
        raise TrialError(f"no trial is complete: {last_error(study)}")
    (folder / "fresh").mkdir(exist_ok=True)
    with locked(folder / "fresh") as free:
        if not free:
            print("another command trains with fresh seeds; it will print the verdict")
            return
        result = verdict(study, best, runner)
    write_whole(folder / "best.json", json.dumps(result, indent=2).encode())
    try:
        draw(study, folder)
    except Exception as error:  # others draw, of what others may have written
        print(f"no figures: {plain(error)}", file=sys.stderr)
    if tracker:
        tracker.sync(result)
    print(f"greedy return with {len(result['fresh_seeds'])} fresh seeds, interquartile mean [95%]")
    print(f"  {runner.plan.script.stem}'s own settings: {spoken(result['own'])}")
    if result["best_settings"] == result["own_settings"]:
        print("  no trial did better")
    else:
        print(f"  best settings, of trial {best.number}: {spoken(result['best'])}")
        print(f"  difference, seed by seed: {spoken(result['best_minus_own'])}")
        print(f"to train with the best: {result['command']}")
    print(f"written to {folder}")


if __name__ == "__main__":
    try:
        main()
    except (Problem, OSError) as error:
        fail(error)
    except (TrialError, sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.OptunaError) as error:
        print(plain(error), file=sys.stderr)
        sys.exit(1)

# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnax==1.0.1", "six==1.17.0",
#   "numpy==2.4.6", "scipy==1.17.1", "tyro==1.0.17", "tensorboard==2.21.0", "gymnasium==1.3.0",
#   "pygame-ce==2.5.8", "pillow==13.0.0", "matplotlib==3.11.2"]
# ///
"""Evaluate trained policies: mean returns with confidence intervals, comparisons and GIFs.

    python evaluate.py runs/first runs/second       # 100 episodes per run
    python evaluate.py runs/a_* --against runs/b_*  # compare two groups of seeds
    python evaluate.py runs/first --epsilon 1 --gif random.gif  # a random agent, as a baseline
    python evaluate.py runs/mine --script path/to/mine.py --env-id my_module:MyEnv
    python evaluate.py runs/slow --num-envs 4 --vectorization async  # in four processes

A run is a folder with run.json and a checkpoint; it may still be training. A folder with one
subfolder per agent also works. load_policy in the training script loads the policy. The script must
be in the folder of this file or in more/, or be given with --script. Everything runs on the CPU.
"""

import importlib.util
import inspect
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

os.environ["JAX_PLATFORMS"] = "cpu"  # fast enough, and the same numbers with and without a GPU
os.environ["SDL_VIDEODRIVER"] = "dummy"  # pygame draws without a display
os.environ["SDL_AUDIODRIVER"] = "dummy"

import gymnasium
import jax
import numpy as np
import tyro
from gymnax.visualize import vis_gym
from matplotlib import colormaps
from PIL import Image, ImageDraw, ImageFont, ImageOps
from scipy import stats

HERE = Path(__file__).resolve().parent
PROGRESS_AFTER = 2.0  # seconds until the first progress line


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]  # run folders
    against: tuple[str, ...] = ()  # run folders of a second group, to compare with
    episodes: int = 100  # episodes per run
    sample: bool = False  # sample actions from the policy instead of taking the most likely one
    epsilon: float = 0.0  # probability of a uniformly random action; 1: a random agent
    max_steps: int = 10_000  # maximum episode length; longer episodes are cut off and counted
    seed: int = 0  # seed of environments and actions, the same for every run
    num_envs: int | None = None  # parallel environments; default: one per episode, fewer with async
    vectorization: Literal["sync", "async"] | None = None  # default: as in training
    script: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()  # training script in another folder
    env_id: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # my_module:MyEnv to trust and import
    gif: Path | None = None  # write the first episodes of all runs, side by side, to this GIF

    def __post_init__(self) -> None:
        """Check the flags. On the command line, a ValueError becomes a message."""
        if not self.runs:
            raise ValueError("name at least one run folder")
        if self.episodes < 1 or self.max_steps < 1:
            raise ValueError("--episodes and --max-steps must be 1 or more")
        if self.num_envs is not None and self.num_envs < 1:
            raise ValueError("--num-envs must be 1 or more")
        if self.num_envs and self.episodes % self.num_envs > 0:
            fitting = -(-self.episodes // self.num_envs) * self.num_envs
            rule = f"--episodes must be a multiple of --num-envs ({self.num_envs})"
            raise ValueError(f"{rule}, so that environments play the same number: try {fitting}")
        if self.seed not in range(2**32):  # JAX would silently drop the upper bits
            raise ValueError("--seed must be between 0 and 2**32 - 1")
        if not 0 <= self.epsilon <= 1:
            raise ValueError("--epsilon must be between 0 and 1")
        for path in self.script:
            if path.suffix != ".py" or not path.is_file():
                raise ValueError(f"--script: {path} is not a Python file")
        if self.gif and not self.gif.parent.is_dir():
            raise ValueError(f"--gif: folder {self.gif.parent} does not exist")


class Run(NamedTuple):
    folder: Path
    script: Any  # imported training script
    args: Any  # Args of the script
    iteration: int  # training iterations completed


def fail(reason: str, status: int = 2) -> NoReturn:
    """Print an error and exit."""
    warn(reason)
    sys.exit(status)


def warn(text: str) -> None:
    """Print a line to stderr, without control characters."""
    print("".join(x if x.isprintable() else "?" for x in text), file=sys.stderr)


# === Loading runs ===============================================================================
def load_runs(folders: tuple[str, ...], args: Args) -> list[Run]:
    """Load all runs. A folder with subfolders seed0, seed1, ... holds one run per agent."""
    runs = []
    for folder in folders:
        # Sort by length first, so that seed9 comes before seed10.
        agents = sorted(Path(folder).glob("seed*/"), key=lambda x: (len(x.name), x))
        runs += [load_run(str(x), args.env_id, args.script) for x in agents or [folder]]
    return runs


def load_run(folder: str, env_ids: tuple[str, ...] = (), scripts: tuple[Path, ...] = ()) -> Run:
    """Load a run. Its run.json is not trusted: it never decides what code is imported."""
    path = Path(folder, "run.json")
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        name = str(info["script"])
        env_id = str(info["args"]["env_id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f"{folder} is not a run folder: cannot read run.json ({type(error).__name__})")
    if not env_id.isprintable():
        fail(f"{path}: env_id is not printable: {env_id}")
    if ":" in env_id and env_id not in env_ids:
        module = env_id.partition(":")[0]
        fail(f"{folder}: this run uses your module {module}; add --env-id {shlex.quote(env_id)}")
    if all(x.name == "checkpoint.new" for x in Path(folder).glob("checkpoint.*")):
        hint = "a script saves one when it ends or is stopped, and with --save-every"
        fail(f"{folder} has no checkpoint yet: {hint}")
    script = load_script(name, scripts)
    try:
        info, run_args = script.load_info(folder)
        iteration = int(info["iteration"])
    except (OSError, AttributeError, TypeError, ValueError, LookupError) as error:
        fail(f"{folder} is damaged, or from a different version of {name}.py: {error}")
    if info.get("status") == "diverged":
        warn(f"warning: {folder} diverged: its losses became NaN or infinite")
    return Run(Path(folder), script, run_args, iteration)


def load_script(name: str, scripts: tuple[Path, ...]) -> Any:
    """Import the training script `name`; skip files with this name that have no load_policy."""
    file = None
    for path in [*scripts, *HERE.glob("*.py"), *HERE.glob("more/*.py")]:
        if path.stem == name and "\ndef load_policy(" in path.read_text(encoding="utf-8"):
            file = path
            break
    if file is None:
        fail(f"There is no {name}.py next to evaluate.py: add --script path/to/{name}.py")
    spec: Any = importlib.util.spec_from_file_location(name, file)
    script = importlib.util.module_from_spec(spec)
    sys.modules[name] = script  # dataclasses and pickle look up the module there
    sys.path.append(str(file.parent))  # for the imports of the script
    try:
        spec.loader.exec_module(script)
    except (ImportError, SyntaxError) as error:
        fail(f"{file} cannot be imported: {error}")
    return script


def load_policy(run: Run, seed: int) -> Callable:
    """Load the policy of a run, a function that maps observations to actions."""
    try:
        return run.script.load_policy(run.folder, seed)
    except Exception as error:  # a damaged file can raise anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        name = run.script.__name__
        fail(f"{run.folder}: {name}.py cannot load the checkpoint, maybe it is damaged: {reason}")


# === Environments ===============================================================================
def make_env(run: Run, args: Args, num_envs: int, **options: Any) -> Any:
    """Make the VecEnv of the training script; pass options to gymnasium.make_vec."""
    values = vars(run.args) | {"num_envs": num_envs, "seed": args.seed}
    values["vectorization"] = args.vectorization
    values["terminal_on_life_loss"] = False  # Atari: an episode is a full game
    names = inspect.signature(run.script.VecEnv).parameters
    given = {name: values[name] for name in names if name in values}
    try:
        return run.script.VecEnv(**given, **options)
    except ModuleNotFoundError as error:
        reason = str(error).partition(". ")[0]
        fail(f"{run.args.env_id} cannot be imported in {os.getcwd()}: {reason}")


class JaxEnvs:
    """Run N = num_envs environments in JAX. Observations, actions and results are NumPy arrays."""

    def __init__(self, run: Run, args: Args, num_envs: int) -> None:
        self.env = make_env(run, args, num_envs)
        self.state: Any = None
        self.seed = args.seed
        self.jit_reset = jax.jit(self.env.reset)
        self.jit_step = jax.jit(self.env.step)
        self.sample = jax.jit(jax.vmap(self.env.env.action_space(self.env.params).sample))

    def reset(self) -> Any:
        obs, self.state = self.jit_reset(jax.random.PRNGKey(self.seed))
        return obs

    def step(self, action: np.ndarray) -> tuple[Any, dict[str, np.ndarray]]:
        obs, self.state, results = self.jit_step(self.state, action)
        return obs, jax.device_get(results)

    def restart(self, obs: Any, mask: np.ndarray, rng: np.random.Generator) -> Any:
        """Start new episodes where mask (N,) is true. Return the observations."""

        def select(new, old):
            if np.shape(old)[:1] != mask.shape:  # the random key, shared by all environments
                return old
            return np.where(mask.reshape(-1, *[1] * (np.ndim(old) - 1)), new, old)

        new = self.jit_reset(rng.integers(2**32, size=2, dtype=np.uint32))
        obs, self.state = jax.tree.map(select, new, (obs, self.state))
        return obs

    def random_actions(self, rng: np.random.Generator) -> np.ndarray:
        keys = rng.integers(2**32, size=(self.env.num_envs, 2), dtype=np.uint32)
        return np.asarray(self.sample(keys))

    def close(self) -> None:
        pass


class AtariScreens(gymnasium.vector.VectorWrapper):
    """Show the screens of Atari games in color.

    ale-py does not render its vector environments. A second vector environment therefore plays the
    same games, with the same seeds and actions, and its observations are the screens.
    """

    def __init__(self, envs: Any) -> None:
        super().__init__(envs)
        options: Any = {"grayscale": False, "stack_num": 1, "img_height": 210, "img_width": 160}
        self.twin = gymnasium.make_vec(envs.spec, envs.num_envs, "vector_entry_point", **options)

    def reset(self, **options: Any) -> Any:
        self.screens, _ = self.twin.reset(**options)
        return self.env.reset(**options)

    def step(self, actions: np.ndarray) -> Any:
        self.screens, *_ = self.twin.step(actions)
        return self.env.step(actions)

    def render(self) -> Any:
        return self.screens[:, -1].copy()  # (N, 210, 160, 3) uint8

    def close(self, **options: Any) -> None:
        self.twin.close(**options)
        self.env.close(**options)


class GymnasiumEnvs:
    """Run N = num_envs Gymnasium environments, with the interface of JaxEnvs."""

    state: Any = None

    def __init__(self, run: Run, args: Args, num_envs: int, render: bool) -> None:
        try:
            self.env = make_env(run, args, num_envs)
            if render and getattr(self.env, "is_atari", False):
                self.env.envs = AtariScreens(self.env.envs)
            elif render and self.can_render(run.args.env_id):
                self.close()  # a simulator may allow only one instance
                self.env = make_env(run, args, num_envs, render_mode="rgb_array")
        except Exception as error:
            if args.vectorization == "sync":
                flags = "--num-envs 4 --vectorization async"
                error.add_note(
                    f"If your simulator allows only one instance per process, add {flags}"
                )
            raise
        self.action_space = self.env.envs.single_action_space
        self.action_space.seed(args.seed)

    def can_render(self, env_id: str) -> bool:
        """Return whether to call render; for MinAtar, draw observations instead, as in gymnax."""
        modes = self.env.envs.metadata.get("render_modes", ())
        return "rgb_array" in modes and "MinAtar/" not in env_id

    def reset(self) -> np.ndarray:
        return self.env.reset()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        return self.env.step(action)

    def restart(self, obs: np.ndarray, mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        obs, _ = self.env.envs.reset(options={"reset_mask": mask})
        self.env.episode_return = np.where(mask, 0, self.env.episode_return)
        self.env.episode_length = np.where(mask, 0, self.env.episode_length)
        return obs

    def random_actions(self, rng: np.random.Generator) -> np.ndarray:
        return np.stack([self.action_space.sample() for _ in range(self.env.num_envs)])

    def close(self) -> None:
        self.env.envs.close()


# === Episodes ===================================================================================
class Step(NamedTuple):
    """One step of N environments."""

    image: np.ndarray | None  # first environment, before the step: (height, width, 3) uint8
    episode_return: np.ndarray  # (N,) return of the current episodes, including this step
    episode_length: np.ndarray  # (N,)
    done: np.ndarray  # (N,) bool: the episode ended; in Atari, the full game
    capped: np.ndarray  # (N,) bool: stopped by --max-steps


def play(run: Run, args: Args, num_envs: int, render: bool = False) -> Generator[Step]:
    """Yield steps of N = num_envs environments endlessly."""
    policy = load_policy(run, args.seed)
    policy_options: dict[str, Any] = {"sample": True} if args.sample else {}
    is_recurrent = "starts" in inspect.signature(policy).parameters
    rng = np.random.default_rng(args.seed)
    if hasattr(run.script, "gymnasium"):
        envs: Any = GymnasiumEnvs(run, args, num_envs, render)
    else:
        envs = JaxEnvs(run, args, num_envs)
    with closing(envs):
        get_image = make_renderer(run, envs.env) if render else None
        obs = envs.reset()
        starts = np.full(num_envs, True)
        while True:
            obs = np.array(obs).reshape(num_envs, *envs.env.obs_shape)
            if is_recurrent:
                policy_options["starts"] = starts
            action = policy(obs, **policy_options)
            explores = rng.random(num_envs) < args.epsilon
            if explores.any():
                action[explores] = envs.random_actions(rng)[explores]
            if not np.isfinite(action).all():
                reason = "the policy returned NaN or infinite actions; training may have diverged"
                fail(f"{run.folder}: {reason}", status=1)
            image = get_image(obs, envs.state) if get_image else None
            if hasattr(envs.env, "action_low"):
                action = to_unit_range(action, envs.env)
            obs, results = envs.step(action)
            # In Atari a lost life can set terminated; restart is true only at the end of a game.
            done = results.get("restart", results["terminated"] | results["truncated"])
            capped = ~done & (results["episode_length"] >= args.max_steps)
            yield Step(image, results["episode_return"], results["episode_length"], done, capped)
            starts = done | capped
            if capped.any():
                obs = envs.restart(obs, capped, rng)


def to_unit_range(action: np.ndarray, env: Any) -> np.ndarray:
    """Map actions from the bounds of the environment to [-1, 1], as VecEnv.step expects."""
    center = env.action_low / 2 + env.action_high / 2  # low + high can overflow in float32
    half = env.action_high / 2 - env.action_low / 2
    return (action - center) / np.where(half > 0, half, 1)  # half is 0 if the bounds are equal


def fill_in(run: Run, args: Args) -> Args:
    """Return args with defaults for vectorization and num_envs, which depend on the run."""
    vectorization = args.vectorization or getattr(run.args, "vectorization", "sync")
    num_envs = args.num_envs
    if num_envs is None and vectorization == "async":
        # At most as many processes as in training, with the same number of episodes in each.
        counts = range(1, min(run.args.num_envs, args.episodes) + 1)
        num_envs = max(n for n in counts if args.episodes % n == 0)
    return replace(args, vectorization=vectorization, num_envs=num_envs or args.episodes)


def evaluate(run: Run, args: Args) -> dict[str, Any]:
    """Play evaluation episodes with the agent of a run. Return the contents of evaluation.json.

    Each environment plays the same number of episodes. Counting the first episodes that finish
    would favor short episodes.
    """
    args = fill_in(run, args)
    num_envs = args.num_envs or args.episodes
    episodes_per_env = args.episodes // num_envs
    returns = np.zeros((num_envs, episodes_per_env))
    lengths = np.zeros((num_envs, episodes_per_env), int)
    capped = np.full((num_envs, episodes_per_env), False)
    finished = np.zeros(num_envs, int)  # number of finished episodes per environment
    start = time.perf_counter()
    next_report = start + PROGRESS_AFTER
    with closing(play(run, args, num_envs)) as steps:
        for number, step in enumerate(steps, 1):
            playing = (finished < episodes_per_env) & (step.done | step.capped)
            rows = np.flatnonzero(playing)
            columns = finished[rows]
            returns[rows, columns] = step.episode_return[rows]
            lengths[rows, columns] = step.episode_length[rows]
            capped[rows, columns] = step.capped[rows]
            finished[rows] += 1
            if finished.min() == episodes_per_env:
                break
            now = time.perf_counter()
            if now > next_report:
                progress = f"{finished.sum()} of {args.episodes} episodes, step {number:,}"
                print(f"{run.folder}: {progress}, {now - start:.0f} s", file=sys.stderr, flush=True)
                next_report = now + (now - start) / 2
    return {
        "script": run.script.__name__,
        "env_id": run.args.env_id,
        "run_seed": run.args.seed,
        "iteration": run.iteration,
        "global_step": run.iteration * run.args.num_envs * run.args.num_steps,
        "episodes": args.episodes,
        "num_envs": num_envs,
        "actions": "sampled" if args.sample else "greedy",
        "epsilon": args.epsilon,
        "seed": args.seed,
        "max_steps": args.max_steps,
        "capped": int(capped.sum()),
        "return": summarize(returns.ravel()),
        "length": summarize(lengths.ravel()),
        "returns": returns.ravel().tolist(),
        "lengths": lengths.ravel().tolist(),
    }


def summarize(values: Any) -> dict[str, Any]:
    """Return the mean with a 95% interval (Student's t), the standard deviation and the range.

    A single value has no interval.
    """
    summary: dict[str, Any] = {"mean": float(np.mean(values)), "interval": None, "std": None}
    if len(values) > 1:
        half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
        summary["interval"] = [summary["mean"] - half, summary["mean"] + half]
        summary["std"] = float(np.std(values, ddof=1))
    return summary | {"min": float(np.min(values)), "max": float(np.max(values))}


def format_mean(summary: dict[str, Any]) -> str:
    if summary["interval"] is None:
        return f"{summary['mean']:.2f}"
    low, high = summary["interval"]
    return f"{summary['mean']:.2f} [{low:.2f}, {high:.2f}]"


# === Seeds ======================================================================================
def settings_of(run: Run) -> str:
    """Return a string that is equal for runs that differ only in their seed."""
    ignored = {"seed", "num_agents", "run_name", "runs_dir", "resume", "save_every", "track"}
    settings = {name: x for name, x in vars(run.args).items() if name not in ignored}
    return f"{run.script.__file__}, {run.iteration} iterations, {settings}"


def compare(a: list[float], b: list[float]) -> str:
    """Describe the difference between the means of two groups of seeds (Welch's t-test)."""
    high, low = (a, b) if np.mean(a) >= np.mean(b) else (b, a)
    difference = np.mean(high) - np.mean(low)
    start = f"{'higher' if high is a else 'lower'} by {difference:.2f}"
    if min(len(a), len(b)) == 1:
        return f"{start}, but one seed in a group is too few for a conclusion"
    lower, upper = difference, difference
    if np.ptp(a) or np.ptp(b):
        # SciPy warns if all values in a group are equal.
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            test = stats.ttest_ind(high, low, equal_var=False)
        lower, upper = test.confidence_interval()
    verdict = "a significant difference" if lower > 0 else "no significant difference"
    return f"{start} [{lower:.2f}, {upper:.2f}]: {verdict}"


# === GIF ========================================================================================
def make_renderer(run: Run, env: Any) -> Callable:
    """Return a function that maps (obs, state) to an image of the first environment.

    Images are (height, width, 3) uint8. Without a renderer, they show the observation.
    """
    env_id = run.args.env_id

    def first_state(state):
        inner = jax.tree.map(lambda x: np.asarray(x[0]), state.inner)
        return inner.env_state if getattr(run.args, "sticky_actions", 0) else inner

    def render_classic_control(obs, state):
        screen.state = vis_gym.get_gym_state(first_state(state), env_id)
        screen.last_u = getattr(first_state(state), "last_u", None)  # the torque arrow of Pendulum
        return screen.render()

    if hasattr(env, "envs"):  # Gymnasium
        renders = getattr(env.envs, "render_mode", None) == "rgb_array"
        if renders or isinstance(env.envs, AtariScreens):
            return lambda obs, state: env.envs.render()[0]
    elif env_id in vis_gym.SUPPORTED_GYM_ENVS and hasattr(env, "params"):
        screen: Any = gymnasium.make(env_id, render_mode="rgb_array").unwrapped
        return render_classic_control
    elif ":" in env_id and hasattr(env.env, "render"):
        return lambda obs, state: env.env.render(first_state(state), env.params)
    return lambda obs, state: draw_observation(obs[0])


def draw_observation(obs: np.ndarray) -> np.ndarray:
    """Draw an observation: frames unchanged, grids as colored squares, vectors as a heat map."""
    if obs.ndim == 3 and obs.dtype == np.uint8 and sorted(obs.shape)[1] >= 32:
        if obs.shape[0] < obs.shape[-1]:
            obs = np.moveaxis(obs, 0, -1)  # channels last
        return obs if obs.shape[-1] == 3 else obs[..., -1:].repeat(3, -1)  # the latest frame, gray
    if obs.ndim in (2, 3):
        channels = obs.reshape(*obs.shape[:2], -1) > 0
        numbers = (channels * np.arange(1, channels.shape[-1] + 1)).max(-1)  # last active channel
        colors = colormaps["tab10"].with_extremes(under="black")
        return colors(numbers - 1, bytes=True)[..., :3]
    values = stats.logistic.cdf(obs.ravel())
    row = colormaps["viridis"](values, bytes=True)[None, :, :3]
    return row.repeat(len(values) // 8 + 1, axis=0)


def first_episode(run: Run, args: Args) -> list[Step]:
    steps = []
    with closing(play(run, args, 1, render=True)) as episode:
        for step in episode:
            steps.append(step)
            if step.done[0] or step.capped[0]:
                break
    return steps


def draw(runs: list[Run], args: Args, path: Path) -> None:
    """Write a GIF with one panel per run: the first 500 steps of the first episode.

    A shorter episode shows its last frame until the longest one ends.
    """
    args = replace(args, max_steps=min(args.max_steps, 500))
    episodes = [first_episode(run, fill_in(run, args)) for run in runs]
    length = max(len(episode) for episode in episodes)
    frames = [Image.new("RGB", (300 * len(runs), 268), "white") for _ in range(length)]
    for i, (run, episode) in enumerate(zip(runs, episodes, strict=True)):
        name = "/".join(run.folder.resolve().parts[-2:])
        agent = f"{run.script.__name__}, {run.iteration} iterations, epsilon {args.epsilon:g}"
        for number, frame in enumerate(frames):
            step = episode[min(number, len(episode) - 1)]
            image = Image.fromarray(np.asarray(step.image))
            frame.paste(
                ImageOps.contain(image, (284, 192), Image.Resampling.BOX), (300 * i + 8, 68)
            )
            result = f"return {step.episode_return[0]:g}{', finished' if step.done[0] else ''}"
            for y, text in [(6, name), (28, agent), (46, result)]:
                font = ImageFont.load_default(min(14, 500 / len(text)))  # fits into the panel
                ImageDraw.Draw(frame).text((300 * i + 8, y), text, "black", font)
    duration = min(100, 10_000 // length)  # ms per frame: at most 10 s in total
    try:
        frames[0].save(
            path, "gif", save_all=True, append_images=frames[1:], duration=duration, loop=0
        )
    except OSError as error:
        fail(f"--gif: {error}")


# === Command line ===============================================================================
def main() -> None:
    """Evaluate the runs on the command line. Exit with status 0 only if this succeeds."""
    args = tyro.cli(Args, description=__doc__)  # reads the comments in Args, through __file__
    if __name__ == "__main__":
        # Otherwise each worker process would import this file, which takes seconds.
        del globals()["__file__"]
    try:
        evaluate_all(args)
    except SystemExit as stopped:
        if not stopped.code:
            raise RuntimeError("an environment or a script called sys.exit()") from stopped
        raise
    except (EOFError, ConnectionResetError) as error:
        error.add_note("With --vectorization async: a worker process crashed or called sys.exit()")
        raise


def evaluate_all(args: Args) -> None:
    """Evaluate all runs, compare them and, with --gif, draw them."""
    if args.gif and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo renders without a display
    runs = load_runs(args.runs, args)
    others = load_runs(args.against, args)
    for run in runs + others:
        # Check every checkpoint before the first long evaluation.
        policy = load_policy(run, args.seed)
        if args.sample and "sample" not in inspect.signature(policy).parameters:
            fail(f"--sample: the policy of {run.script.__name__} is deterministic; try --epsilon")
        if args.vectorization == "async" and not hasattr(run.script, "gymnasium"):
            fail(f"--vectorization async: the environments of {run.folder} run in JAX; remove it")
    groups: dict[Any, list[Run]] = {}
    for i, run in enumerate(runs + others):
        groups.setdefault((i < len(runs), settings_of(run)), []).append(run)
    if others and len(groups) > 2:
        fail("--against: the runs of a group must differ only in their seed")
    for run in runs:
        if run.folder.resolve() in [other.folder.resolve() for other in others]:
            fail(f"--against: {run.folder} is in both groups")
    if others and runs[0].args.env_id != others[0].args.env_id:
        env_ids = f"{runs[0].args.env_id} and {others[0].args.env_id}"
        warn(f"warning: --against compares two environments, {env_ids}")
    file = file_name(args)
    means = []
    kept = []
    unwritten = []
    for group in groups.values():
        mean_returns = {}  # seed -> mean return
        for run in group:
            results = evaluate(run, args)
            mean_returns[run.args.seed] = results["return"]["mean"]
            report(run, results)
            if has_more_episodes(Path(run.folder, file), results):
                kept.append(str(Path(run.folder, file)))
                continue
            try:
                new = Path(run.folder, file).with_suffix(".new")
                new.write_text(json.dumps(results, indent=2), encoding="utf-8")
                new.replace(new.with_suffix(".json"))
            except OSError as error:
                unwritten.append(f"{Path(run.folder, file)} ({error.strerror})")
        means.append(list(mean_returns.values()))
        if len(mean_returns) > 1:
            mean, iqm = format_mean(summarize(means[-1])), stats.trim_mean(means[-1], 0.25)
            print(f"mean over {len(mean_returns)} seeds {mean}, interquartile mean {iqm:.2f}")
        else:
            print("one seed, so no interval over seeds")
    if others:
        print(f"The first group is {compare(*means)}")
    if args.gif:
        draw(runs + others, args, args.gif)
        print(f"Wrote {args.gif}")
    if len(kept + unwritten) < len(runs + others):
        print(f"Wrote {file} to the run folders")
    if kept:
        print(f"Kept {', '.join(kept)} (more episodes). To replace a file, delete it first.")
    if unwritten:
        print(f"Could not write {', '.join(unwritten)}", file=sys.stderr)


def file_name(args: Args) -> str:
    """Return the name of the results file, which depends on the settings."""
    name = "evaluation"
    if args.sample:
        name += "-sample"
    if args.epsilon:
        name += f"-epsilon-{args.epsilon:g}"
    if args.max_steps != Args.max_steps:
        name += f"-max-steps-{args.max_steps}"
    return f"{name}.json"


def has_more_episodes(file: Path, results: dict[str, Any]) -> bool:
    """Return whether the file contains results for the same iteration with more episodes."""
    try:
        old = json.loads(file.read_text(encoding="utf-8"))
        return old["iteration"] == results["iteration"] and old["episodes"] > results["episodes"]
    except (OSError, ValueError, LookupError, TypeError):
        return False  # there is no file, or it is damaged


def report(run: Run, results: dict[str, Any]) -> None:
    """Print the result of a run."""
    agent = f"{run.script.__name__}, {run.args.env_id}, seed {run.args.seed}"
    print(f"{run.folder}: {agent}, {results['global_step']:,} steps")
    total = results["return"]
    length = f"length {results['length']['mean']:.1f}, {results['capped']} capped"
    print(f"  return {format_mean(total)}, {total['min']:g} to {total['max']:g}, {length}")


if __name__ == "__main__":
    main()

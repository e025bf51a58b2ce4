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

A run is a folder with run.json and a checkpoint; it may still be training. For a folder with one
subfolder per agent, all agents are evaluated. The policy is loaded by load_policy in the training
script, which must be in the folder of evaluate.py or in more/, or be given with --script.
Everything runs on the CPU.
"""

import importlib
import inspect
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

os.environ["JAX_PLATFORMS"] = "cpu"  # fast enough, and the same numbers with and without a GPU
os.environ["SDL_VIDEODRIVER"] = "dummy"  # without a display, pygame would print an error,
os.environ["SDL_AUDIODRIVER"] = "dummy"  # and without a sound card, dozens of them

import jax
import numpy as np
import tyro
from gymnax.visualize import vis_gym
from matplotlib import colormaps
from PIL import Image, ImageDraw, ImageOps
from scipy import stats

HERE = Path(__file__).resolve().parent
PROGRESS_INTERVAL = 10.0  # seconds between progress lines


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]  # run folders
    against: tuple[str, ...] = ()  # run folders of a second group, to compare with
    episodes: int = 100  # episodes per run
    sample: bool = False  # sample actions from the policy instead of taking the most likely one
    epsilon: float = 0.0  # probability of a uniformly random action; 1: a random agent
    max_steps: int = 10_000  # maximum episode length; longer episodes are cut off ("capped")
    seed: int = 0  # seed of environments and actions, the same for every run
    num_envs: int | None = None  # Gymnasium environments; default: one per episode, fewer if async
    vectorization: Literal["sync", "async"] | None = None  # in Gymnasium; default: as in training
    script: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()  # training script in another folder
    env_id: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # my_module:MyEnv to trust and import
    gif: Path | None = None  # write the first episode of each run, side by side, to this GIF

    def __post_init__(self) -> None:
        """Check the flags. tyro reports a ValueError as a usage error."""
        if not self.runs:
            raise ValueError("name at least one run folder")
        if min(self.episodes, self.max_steps) < 1:
            raise ValueError("--episodes and --max-steps must be 1 or more")
        if self.num_envs is not None and (self.num_envs < 1 or self.episodes % self.num_envs != 0):
            rule = f"--num-envs must divide --episodes ({self.episodes})"
            raise ValueError(f"{rule}, so that all environments play the same number of episodes")


class Run(NamedTuple):
    folder: Path
    script: Any  # imported training script
    args: Any  # Args of the script
    iteration: int  # training iterations completed at the checkpoint
    policy: Callable  # from load_policy in the script


def fail(reason: str) -> NoReturn:
    print(reason, file=sys.stderr)
    sys.exit(2)


# === Loading runs ===============================================================================
def load_runs(folders: tuple[str, ...], args: Args) -> list[Run]:
    """Load all runs. A folder with subfolders seed0, seed1, ... holds one run per agent."""
    runs = []
    for folder in folders:
        # Sort by length first, so that seed9 comes before seed10.
        agents = sorted(Path(folder).glob("seed*/"), key=lambda x: (len(x.name), x))
        runs += [load_run(x, args) for x in agents or [Path(folder)]]
    return runs


def load_run(folder: Path, args: Args) -> Run:
    """Load a run. Its run.json is not trusted: it never decides what code is imported."""
    try:
        info = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        name = info["script"]
        env_id = str(info["args"]["env_id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f"{folder} is not a run folder: cannot read run.json ({type(error).__name__})")
    if ":" in env_id and env_id not in args.env_id:
        module = env_id.partition(":")[0]
        fail(f"{folder}: this run uses your module {module}; add --env-id {shlex.quote(env_id)}")
    if info.get("iteration") == 0:
        hint = "wait for the first one, or train again with --save-every 1"
        fail(f"{folder} has no checkpoint (its status is {info['status']}): {hint}")
    script = load_script(name, args.script)
    try:
        info, run_args = script.load_info(folder)
        iteration = int(info["iteration"])
        policy = script.load_policy(folder, args.seed)
    except Exception as error:  # a damaged file can raise anything
        fail(f"{folder} is damaged, or from a different version of {name}.py: {error!r}")
    if args.sample and "sample" not in inspect.signature(policy).parameters:
        fail(f"--sample: the policy of {name} is deterministic; try --epsilon")
    if not hasattr(script, "gymnasium") and (args.num_envs or args.vectorization):
        flags = "--num-envs and --vectorization are for Gymnasium"
        fail(f"{flags}, but the environments of {folder} run in JAX: remove these flags")
    if info["status"] == "diverged":
        hint = f"this is its last checkpoint, after {iteration} iterations"
        print(f"{folder} diverged: {hint}", file=sys.stderr)
    return Run(folder, script, run_args, iteration, policy)


def load_script(name: str, scripts: tuple[Path, ...]) -> Any:
    """Import the training script `name` from --script, this folder or more/."""
    files = [*scripts, *HERE.glob("*.py"), *HERE.glob("more/*.py")]
    file = next((x for x in files if x.stem == name), None)
    if file is None:
        fail(f"There is no {name}.py next to evaluate.py: add --script path/to/{name}.py")
    sys.path.insert(0, str(file.parent))
    return importlib.import_module(name)


# === Environments ===============================================================================
@contextmanager
def make_env(run: Run, args: Args, num_envs: int, **options: Any) -> Generator[Any]:
    """Make the VecEnv of the training script, and close it. Pass options to gymnasium.make_vec."""
    values = vars(run.args) | {"num_envs": num_envs, "seed": args.seed}
    values["terminal_on_life_loss"] = False  # Atari: an episode is a full game
    if args.vectorization:
        values["vectorization"] = args.vectorization
    names = inspect.signature(run.script.VecEnv).parameters
    given = {name: values[name] for name in names if name in values}
    env = run.script.VecEnv(**given, **options)
    try:
        yield env
    finally:
        if hasattr(env, "envs"):
            env.envs.close()


class JaxEnvs:
    """Wrap a JAX VecEnv and keep its state, so that it has the interface of a Gymnasium one."""

    def __init__(self, env: Any, seed: int) -> None:
        self.env = env
        self.seed = seed
        self.jit_step = jax.jit(env.step)

    def reset(self) -> Any:
        obs, self.state = jax.jit(self.env.reset)(jax.random.PRNGKey(self.seed))
        return obs

    def step(self, action: np.ndarray) -> tuple[Any, dict[str, np.ndarray]]:
        obs, self.state, results = self.jit_step(self.state, action)
        return obs, jax.device_get(results)


def random_actions(env: Any, rng: np.random.Generator) -> np.ndarray:
    """Sample uniformly random actions, in the units of the environment."""
    if hasattr(env, "num_actions"):
        return rng.integers(env.num_actions, size=env.num_envs)
    return rng.uniform(env.action_low, env.action_high, (env.num_envs, *env.action_low.shape))


def to_unit_range(action: np.ndarray, env: Any) -> np.ndarray:
    """Map actions from the bounds of the environment to [-1, 1], as VecEnv.step expects."""
    center = (env.action_low + env.action_high) / 2
    half = (env.action_high - env.action_low) / 2
    return (action - center) / np.where(half > 0, half, 1)  # half is 0 if the bounds are equal


# === Episodes ===================================================================================
def play(run: Run, env: Any, args: Args, with_images: bool = False) -> Iterator[tuple]:
    """Step N = env.num_envs environments endlessly. Yield image, results, done and capped.

    image shows the first environment before the step; results come from VecEnv.step. done (N,) is
    true at the end of an episode, and capped (N,) where --max-steps cut it off. After a capped
    episode, Gymnasium environments are reset. JAX environments are not: only their first episode is
    used.
    """
    policy_options: dict[str, Any] = {"sample": True} if args.sample else {}
    is_recurrent = "starts" in inspect.signature(run.policy).parameters
    rng = np.random.default_rng(args.seed)
    in_gymnasium = hasattr(env, "envs")
    envs = env if in_gymnasium else JaxEnvs(env, args.seed)
    obs = envs.reset()
    starts = np.full(env.num_envs, True)
    while True:
        obs = np.array(obs)
        if is_recurrent:
            policy_options["starts"] = starts
        action = run.policy(obs, **policy_options)
        explores = rng.random(env.num_envs) < args.epsilon
        if explores.any():
            action[explores] = random_actions(env, rng)[explores]
        if not np.isfinite(action).all():
            reason = "the policy returned NaN or infinite actions; training may have diverged"
            sys.exit(f"{run.folder}: {reason}")
        image = render(run, envs, obs) if with_images else None
        if hasattr(env, "action_low"):
            action = to_unit_range(action, env)
        obs, results = envs.step(action)
        # In Atari a lost life can set terminated; restart is true only at the end of a game.
        done = results.get("restart", results["terminated"] | results["truncated"])
        capped = ~done & (results["episode_length"] >= args.max_steps)
        yield image, results, done, capped
        starts = done | capped
        if capped.any() and in_gymnasium:
            obs, _ = env.envs.reset(options={"reset_mask": capped})
            obs = obs.astype(getattr(env, "obs_dtype", obs.dtype))
            env.episode_return[capped] = 0
            env.episode_length[capped] = 0


def count_envs(run: Run, args: Args) -> int:
    """Number of environments. With async, the default is at most the number in training."""
    vectorization = args.vectorization or getattr(run.args, "vectorization", "sync")
    if args.num_envs or vectorization == "sync":
        return args.num_envs or args.episodes
    counts = range(1, min(run.args.num_envs, args.episodes) + 1)
    return max(n for n in counts if args.episodes % n == 0)


def evaluate(run: Run, env: Any, args: Args) -> dict[str, Any]:
    """Play evaluation episodes with the agent of a run. Return the contents of evaluation.json.

    Each environment plays the same number of episodes. Counting the first episodes that finish
    would favor short episodes.
    """
    episodes_per_env = args.episodes // env.num_envs
    returns = np.zeros((env.num_envs, episodes_per_env))
    lengths = np.zeros((env.num_envs, episodes_per_env), int)
    num_capped = 0
    finished = np.zeros(env.num_envs, int)  # number of finished episodes per environment
    start = printed = time.perf_counter()
    for number, (_, results, done, capped) in enumerate(play(run, env, args), 1):
        rows = np.flatnonzero((finished < episodes_per_env) & (done | capped))
        returns[rows, finished[rows]] = results["episode_return"][rows]
        lengths[rows, finished[rows]] = results["episode_length"][rows]
        num_capped += int(capped[rows].sum())
        finished[rows] += 1
        if finished.min() == episodes_per_env:
            break
        now = time.perf_counter()
        if now - printed > PROGRESS_INTERVAL:
            printed = now
            progress = f"{finished.sum()} of {args.episodes} episodes, step {number:,}"
            print(f"{run.folder}: {progress}, {now - start:.0f} s", file=sys.stderr, flush=True)
    return {
        "script": run.script.__name__,
        "env_id": run.args.env_id,
        "run_seed": run.args.seed,
        "iteration": run.iteration,
        "global_step": run.iteration * run.args.num_envs * run.args.num_steps,
        "episodes": args.episodes,
        "num_envs": env.num_envs,
        "actions": "sampled" if args.sample else "greedy",
        "epsilon": args.epsilon,
        "seed": args.seed,
        "max_steps": args.max_steps,
        "capped": num_capped,
        "return": summarize(returns.ravel()),
        "length": summarize(lengths.ravel()),
        "returns": returns.ravel().tolist(),
        "lengths": lengths.ravel().tolist(),
    }


def summarize(values: Any) -> dict[str, Any]:
    """Return the mean, its 95% interval (Student's t; None for a single value) and the range."""
    summary: dict[str, Any] = {"mean": float(np.mean(values)), "interval": None}
    if len(values) > 1:
        half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
        summary["interval"] = [summary["mean"] - half, summary["mean"] + half]
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
def render(run: Run, envs: Any, obs: np.ndarray) -> Any:
    """Return an image of the first environment, or of its observation if it has no renderer."""
    env_id = run.args.env_id
    if not isinstance(envs, JaxEnvs):
        if envs.envs.render_mode == "rgb_array":
            return envs.envs.render()[0]
        return draw_observation(obs[0])
    state = jax.tree.map(lambda x: np.asarray(x[0]), envs.state.inner)
    if getattr(run.args, "sticky_actions", 0):
        state = state.env_state
    if env_id in vis_gym.SUPPORTED_GYM_ENVS:
        return vis_gym.render_gym_frame(env_id, state, envs.env.params)
    if ":" in env_id and hasattr(envs.env.env, "render"):
        return envs.env.env.render(state, envs.env.params)
    return draw_observation(obs[0])


def draw_observation(obs: np.ndarray) -> np.ndarray:
    """Draw an observation: frames unchanged, grids as colored squares, vectors as a heat map."""
    if obs.ndim == 3 and obs.dtype == np.uint8 and sorted(obs.shape)[1] >= 32:
        if obs.shape[-1] == 3:
            return obs
        return obs[-1] if obs.shape[0] < obs.shape[-1] else obs[..., -1]  # the latest frame
    if obs.ndim in (2, 3):
        channels = obs.reshape(*obs.shape[:2], -1) > 0
        numbers = (channels * np.arange(1, channels.shape[-1] + 1)).max(-1)  # last active channel
        return colormaps["tab10"].with_extremes(under="black")(numbers - 1, bytes=True)
    row = colormaps["viridis"](stats.logistic.cdf(obs.ravel()), bytes=True)
    return row[None].repeat(obs.size // 8 + 1, axis=0)


def draw_episode(run: Run, args: Args) -> Iterator[np.ndarray]:
    """Play the first episode, at most 500 steps of it. Yield one panel per step."""
    options = {}
    if hasattr(run.script, "gymnasium") and "MinAtar/" not in run.args.env_id:
        with make_env(run, args, 1) as env:  # closed first: some allow one instance per process
            if "rgb_array" in env.envs.metadata.get("render_modes", ()):
                options["render_mode"] = "rgb_array"
    with make_env(run, args, 1, **options) as env:
        steps = islice(play(run, env, args, with_images=True), 500)
        for image, results, done, capped in steps:
            result = f"return {results['episode_return'][0]:g}{', finished' if done[0] else ''}"
            yield draw_panel(run, args, image, result)
            if done[0] or capped[0]:
                break


def draw_panel(run: Run, args: Args, image: Any, result: str) -> np.ndarray:
    """Return a small picture, (268, 300, 3): three lines of text above the shrunk image."""
    panel = Image.new("RGB", (300, 268), "white")
    image = ImageOps.contain(Image.fromarray(np.asarray(image)), (284, 192), Image.Resampling.BOX)
    panel.paste(image, (8, 68))
    name = "/".join(run.folder.resolve().parts[-2:])
    agent = f"{run.script.__name__}, {run.iteration} iterations, epsilon {args.epsilon:g}"
    size = min(14, 500 / max(len(name), len(agent)))  # the text fits into the panel
    ImageDraw.Draw(panel).text((8, 6), f"{name}\n{agent}\n{result}", "black", font_size=size)
    return np.asarray(panel)


def draw_frames(runs: list[Run], args: Args) -> Iterator[Image.Image]:
    """Yield the frames of a GIF with one panel per run.

    All episodes are played at the same time, to hold only one frame in memory. An episode that has
    ended shows its last panel until the longest one ends.
    """
    last: dict[int, np.ndarray] = {}
    for panels in zip_longest(*[draw_episode(run, args) for run in runs]):
        last |= {i: panel for i, panel in enumerate(panels) if panel is not None}
        yield Image.fromarray(np.hstack([*last.values()]))


# === Command line ===============================================================================
def main() -> None:
    """Evaluate the runs on the command line, compare them and, with --gif, draw them."""
    args = tyro.cli(Args, description=__doc__)  # reads the comments in Args, through __file__
    if __name__ == "__main__":
        # Otherwise each worker process would import this file, which takes seconds.
        del globals()["__file__"]
    if args.gif and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo renders without a display
    runs = load_runs(args.runs, args)
    others = load_runs(args.against, args)
    groups: dict[Any, list[Run]] = {}
    for i, run in enumerate(runs + others):
        groups.setdefault((i < len(runs), settings_of(run)), []).append(run)
    if others and len(groups) > 2:
        fail("--against: the runs of a group must differ only in their seed")
    means = []
    for group in groups.values():
        mean_returns = {}  # seed -> mean return
        for run in group:
            with make_env(run, args, count_envs(run, args)) as env:
                results = evaluate(run, env, args)
                report(run, results, run.folder / file_name(args))
            mean_returns[run.args.seed] = results["return"]["mean"]
        means.append(list(mean_returns.values()))
        if len(mean_returns) > 1:
            mean, iqm = format_mean(summarize(means[-1])), stats.trim_mean(means[-1], 0.25)
            print(f"mean over {len(mean_returns)} seeds {mean}, interquartile mean {iqm:.2f}")
    if others:
        print(f"The mean return of the first group is {compare(*means)}")
    if args.gif:
        frames = draw_frames(runs + others, args)
        args.gif.parent.mkdir(parents=True, exist_ok=True)
        next(frames).save(args.gif, "gif", save_all=True, append_images=frames, duration=30, loop=0)
        print(f"Wrote {args.gif}")


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


def report(run: Run, results: dict[str, Any], file: Path) -> None:
    """Print and write the results. If a run folder is read-only, the evaluation continues."""
    agent = f"{run.script.__name__}, {run.args.env_id}, seed {run.args.seed}"
    print(f"{run.folder}: {agent}, {results['global_step']:,} steps")
    total = results["return"]
    length = f"length {results['length']['mean']:.1f}, {results['capped']} capped"
    print(f"  return {format_mean(total)}, {total['min']:g} to {total['max']:g}, {length}")
    try:
        file.write_text(json.dumps(results, indent=2), encoding="utf-8")
        print(f"  Wrote {file}", flush=True)
    except OSError as error:
        print(f"Could not write {file} ({error.strerror})", file=sys.stderr)


if __name__ == "__main__":
    main()

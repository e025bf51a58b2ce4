# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnax==1.0.1", "six==1.17.0",
#   "numpy==2.4.6", "scipy==1.17.1", "tyro==1.0.17", "tensorboard==2.21.0", "gymnasium==1.3.0",
#   "pygame-ce==2.5.8", "pillow==13.0.0", "matplotlib==3.11.2"]
# ///
"""Play the agents of runs: what they return, with intervals, and a GIF to look at.

    python evaluate.py runs/first runs/second       # 100 episodes of each
    python evaluate.py runs/a_* --against runs/b_*  # seeds of a, seeds of b: do they differ?
    python evaluate.py runs/first --epsilon 1 --gif random.gif  # the same games, at random
    python evaluate.py runs/mine --script path/to/mine.py --env-id my_module:MyEnv

A run is a folder with run.json and a checkpoint, finished or not, or one with a folder for each
agent. Its script is --script's, or lies beside this file or in more/; its load_policy is what acts.
Everything runs on the CPU.
"""

import importlib.util
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

os.environ["JAX_PLATFORMS"] = "cpu"  # fast enough, and the same numbers with and without a GPU
os.environ["SDL_VIDEODRIVER"] = "dummy"  # pygame draws without a display,
os.environ["SDL_AUDIODRIVER"] = "dummy"  # and without loudspeakers

import gymnasium
import jax
import numpy as np
import tyro
from gymnax.visualize import vis_gym
from matplotlib import colormaps
from PIL import Image, ImageDraw, ImageFont, ImageOps
from scipy import stats


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]  # folders of runs
    against: tuple[str, ...] = ()  # folders of other runs, to compare them with
    episodes: int = 100  # episodes of each run
    sample: bool = False  # draw actions from the policy; off: take the likeliest one
    epsilon: float = 0.0  # chance that an action is random instead; 1: a random agent
    max_steps: int = 10_000  # an episode that gets here counts as it stands; some would not end
    seed: int = 0  # seed of environments and actions, the same for every run
    script: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()  # a script that is not beside this one
    env_id: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # my_module:MyEnv, whose code may run
    gif: Path | None = None  # .gif file for the runs' first episodes, side by side, up to 10 s

    def __post_init__(self) -> None:  # a ValueError is a message on the command line
        if not self.runs:
            raise ValueError("name the folder of a run, or several")
        if self.episodes < 1 or self.max_steps < 1:
            raise ValueError("--episodes and --max-steps must be 1 or more")
        if self.seed < 0:
            raise ValueError("--seed must be 0 or more")
        if not 0 <= self.epsilon <= 1:
            raise ValueError("--epsilon must lie between 0 and 1")
        for path in self.script:
            if path.suffix != ".py" or not path.is_file():
                raise ValueError(f"--script: {path} is no Python file")
        if self.gif and not self.gif.parent.is_dir():
            raise ValueError(f"--gif: there is no folder {self.gif.parent}")


class Run(NamedTuple):
    folder: Path
    script: Any
    args: Any  # the script's Args
    iteration: int  # how many the agent was trained for


def fail(reason: str) -> NoReturn:
    print("".join(x if x.isprintable() else "?" for x in reason), file=sys.stderr)
    sys.exit(2)


# === Agents =====================================================================================
def load_runs(folders: tuple[str, ...], args: Args) -> list[Run]:
    """Load each run; a program that trained many agents has one for each of them."""
    runs = []
    for folder in folders:
        agents = sorted(Path(folder).glob("seed*/"), key=lambda x: (len(x.name), x))  # 9, then 10
        runs += [load_run(str(x), args.env_id, args.script) for x in agents or [folder]]
    return runs


def load_run(folder: str, env_ids: tuple[str, ...] = (), scripts: tuple[Path, ...] = ()) -> Run:
    """Read what a run is. It may be a stranger's: none of it becomes code, or the path to code."""
    path = Path(folder, "run.json")
    try:
        info = json.loads(path.read_text())
        name = str(info["script"])
        env_id = str(info["args"]["env_id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f"{path} is not there, or is damaged ({type(error).__name__})")
    if not env_id.isprintable():  # the script may print it
        fail(f"{path} names no environment, but {env_id}")
    if ":" in env_id and env_id not in env_ids:
        fail(f"{folder}: its environment is code; to run it, add --env-id {env_id}")
    if all(x.name == "checkpoint.new" for x in Path(folder).glob("checkpoint.*")):
        fail(f"{folder} has no checkpoint: a run writes one when it ends, and by --save-every")
    script = load_script(name, scripts)
    try:
        info, run_args = script.load_info(folder)
    except (TypeError, ValueError, LookupError) as error:
        fail(f"{folder} is a run of another version of {name}.py, or is damaged: {error}")
    return Run(Path(folder), script, run_args, info["iteration"])


def load_script(name: str, scripts: tuple[Path, ...]) -> Any:
    """Import the script of that name, and run nothing else that has it."""
    here = Path(__file__).parent
    files = [*scripts, *here.glob("*.py"), *here.glob("more/*.py")]
    file = next(
        (x for x in files if x.stem == name and "\ndef load_policy(" in x.read_text()), None
    )
    if file is None:
        fail(f"There is no {name}.py beside evaluate.py: add --script path/to/{name}.py")
    spec: Any = importlib.util.spec_from_file_location(name, file)
    script = importlib.util.module_from_spec(spec)
    sys.modules[name] = script  # where dataclasses look for it
    sys.path.append(str(file.parent))  # for what it imports from there
    try:
        spec.loader.exec_module(script)
    except (ImportError, SyntaxError) as error:
        fail(f"{file} cannot be imported: {error}")
    return script


def load_policy(run: Run, seed: int) -> Callable:
    try:
        return run.script.load_policy(run.folder, seed)
    except Exception as error:  # a damaged file can raise anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        name = run.script.__name__
        fail(f"{run.folder}: {name}.py cannot read its checkpoint, which may be damaged: {reason}")


def make_env(script: Any, args: Any, num_envs: int, seed: int = 0, **options: Any) -> Any:
    """The script's VecEnv, with the environments that the run had; options are Gymnasium's."""
    values = vars(args) | {"num_envs": num_envs, "seed": seed}
    values["vectorization"] = "sync"  # Gymnasium's environments, in this process
    names = inspect.signature(script.VecEnv).parameters
    given = {name: values[name] for name in names if name in values}
    return script.VecEnv(**given, **options)


# === Episodes ===================================================================================
def play(run: Run, args: Args, num_envs: int, draws: bool = False) -> Iterator[tuple]:
    """Play an episode in each of N = num_envs environments, until the last of them is over.

    Yields after each step the first one's picture, if draws, and (N,) returns, lengths, over.
    """
    in_gymnasium = hasattr(run.script, "gymnasium")
    env = make_env(run.script, run.args, num_envs, args.seed)
    if draws and in_gymnasium and can_render(env, run.args.env_id):
        env = make_env(run.script, run.args, num_envs, args.seed, render_mode="rgb_array")
    look = painter(run, env) if draws else None
    policy = load_policy(run, args.seed)
    options = {"sample": True} if args.sample else {}
    if in_gymnasium:
        obs = env.reset()
        state = None
        env.action_space.seed(args.seed)
    else:
        obs, state = jax.jit(env.reset)(jax.random.PRNGKey(args.seed))
        step = jax.jit(env.step)
        draw = jax.jit(jax.vmap(env.env.action_space(env.params).sample))
    rng = np.random.default_rng(args.seed)
    returns = np.zeros(num_envs)
    lengths = np.zeros(num_envs)
    over = np.full(num_envs, False)
    while not over.all() and lengths.max() < args.max_steps:
        obs = np.array(obs).reshape(num_envs, *env.obs_shape)  # a copy: JAX's is read-only
        action = policy(obs, **options)
        explores = rng.random(num_envs) < args.epsilon
        if explores.any():  # by the space's own draws, whatever kind of action it has
            if in_gymnasium:
                random_action = np.stack([env.action_space.sample() for _ in explores])
            else:
                random_action = draw(rng.integers(2**32, size=(num_envs, 2), dtype=np.uint32))
            action[explores] = random_action[explores]
        picture = look(obs, state) if look else None
        if hasattr(env, "action_low"):
            action = from_bounds(action, env)
        if in_gymnasium:
            obs, result = env.step(action)
        else:
            obs, state, result = step(state, action)
        result = jax.device_get(result)
        returns = np.where(over, returns, result["episode_return"])
        lengths = np.where(over, lengths, result["episode_length"])
        over = over | result["terminated"] | result["truncated"]
        yield picture, returns, lengths, over


def from_bounds(action: np.ndarray, env: Any) -> np.ndarray:
    """Continuous actions as VecEnv.step takes them: from -1 to 1, which it maps to the bounds."""
    return 2 * (action - env.action_low) / (env.action_high - env.action_low) - 1


def evaluate(run: Run, args: Args) -> dict[str, Any]:
    """Play an episode in each of many environments; return what evaluation.json holds.

    Of episodes in fewer environments, the first ones to end would be the short ones.
    """
    *_, last_step = play(run, args, args.episodes)
    _, returns, lengths, over = last_step
    return {
        "script": run.script.__name__,
        "env_id": run.args.env_id,
        "run_seed": run.args.seed,
        "iteration": run.iteration,
        "global_step": run.iteration * run.args.num_envs * run.args.num_steps,
        "episodes": args.episodes,
        "actions": "sampled" if args.sample else "greedy",
        "epsilon": args.epsilon,
        "seed": args.seed,
        "max_steps": args.max_steps,
        "capped": int((~over).sum()),
        "return": summary(returns),
        "length": summary(lengths),
        "returns": returns.tolist(),
        "lengths": lengths.astype(int).tolist(),
    }


def summary(values: Any) -> dict[str, Any]:
    """Mean, its 95% interval by Student's t, and spread; of one value no interval."""
    found: dict[str, Any] = {"mean": float(np.mean(values)), "interval": None, "std": None}
    if len(values) > 1:
        half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
        found["interval"] = [found["mean"] - half, found["mean"] + half]
        found["std"] = float(np.std(values, ddof=1))
    return found | {"min": float(np.min(values)), "max": float(np.max(values))}


def format_mean(found: dict[str, Any]) -> str:
    if found["interval"] is None:
        return f"{found['mean']:.2f}"
    return f"{found['mean']:.2f} [{found['interval'][0]:.2f}, {found['interval'][1]:.2f}]"


# === Seeds ======================================================================================
def settings_of(run: Run) -> str:
    """What is the same in runs that differ in the seed alone."""
    others = {"seed", "num_agents", "run_name", "runs_dir", "resume", "save_every", "track"}
    settings = {name: x for name, x in vars(run.args).items() if name not in others}
    return f"{run.script.__file__}, {run.iteration} iterations, {settings}"


def difference_of(a: list[float], b: list[float]) -> str:
    """What to say of the difference between two groups' means over seeds, by Welch's t."""
    high, low = (a, b) if np.mean(a) >= np.mean(b) else (b, a)
    difference = np.mean(high) - np.mean(low)
    start = f"{'higher' if high is a else 'lower'} by {difference:.2f}"
    if min(len(a), len(b)) == 1:
        return f"{start}: of one seed, no difference can be claimed"
    least, most = difference, difference
    if np.ptp(a) or np.ptp(b):
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # one side alike
            test = stats.ttest_ind(high, low, equal_var=False)
        least, most = test.confidence_interval()
    verdict = "more than the seeds explain" if least > 0 else "no difference can be claimed"
    return f"{start} [{least:.2f}, {most:.2f}]: {verdict}"


# === Picture ====================================================================================
def can_render(env: Any, env_id: str) -> bool:
    """Whether Gymnasium's environments draw themselves. MinAtar's are drawn as gymnax's are."""
    modes = env.envs.metadata.get("render_modes", ())
    return "rgb_array" in modes and "MinAtar/" not in env_id


def painter(run: Run, env: Any) -> Callable:
    """A function of obs and state: the first environment's picture, (height, width, 3) uint8."""
    env_id = run.args.env_id

    def first(state):
        inner = jax.tree.map(lambda x: np.asarray(x[0]), state.inner)
        return inner.env_state if getattr(run.args, "sticky_actions", 0) else inner

    def draw_classic(obs, state):
        screen.state = vis_gym.get_gym_state(first(state), env_id)
        screen.last_u = getattr(first(state), "last_u", None)  # Pendulum's arrow
        return screen.render()

    def draw_squares(obs, state):  # of a grid the things in it, of other numbers how large they are
        numbers = obs[0]
        if len(env.obs_shape) == 1:
            row = colormaps["viridis"](stats.logistic.cdf(numbers), bytes=True)[None, :, :3]
            return row.repeat(len(numbers) // 8 + 1, axis=0)
        things = numbers.reshape(*env.obs_shape[:2], -1) > 0
        kind = (things * np.arange(1, things.shape[-1] + 1)).max(-1)  # of many, the last one
        return colormaps["tab10"].with_extremes(under="black")(kind - 1, bytes=True)[..., :3]

    if hasattr(env, "envs"):  # Gymnasium's
        if env.envs.render_mode == "rgb_array":
            return lambda obs, state: env.envs.envs[0].render()
    elif env_id in vis_gym.SUPPORTED_GYM_ENVS and hasattr(env, "params"):  # gymnax's
        screen: Any = gymnasium.make(env_id, render_mode="rgb_array").unwrapped
        return draw_classic
    elif ":" in env_id and hasattr(env.env, "render"):
        return lambda obs, state: env.env.render(first(state), env.params)
    return draw_squares


def draw(runs: list[Run], args: Args, path: Path) -> None:
    """A panel per run, side by side, of an episode's first 500 steps; one that is over waits."""
    args = replace(args, max_steps=min(args.max_steps, 500))
    episodes = [list(play(run, args, 1, draws=True)) for run in runs]
    length = max(len(episode) for episode in episodes)
    images = [Image.new("RGB", (300 * len(runs), 268), "white") for _ in range(length)]
    for i, (run, episode) in enumerate(zip(runs, episodes, strict=True)):
        name = "/".join(run.folder.resolve().parts[-2:])
        agent = f"{run.script.__name__}, {run.iteration} iterations, epsilon {args.epsilon:g}"
        for step, image in enumerate(images):
            picture, returns, _, over = episode[min(step, len(episode) - 1)]
            panel = ImageOps.contain(Image.fromarray(picture), (284, 192), Image.Resampling.BOX)
            image.paste(panel, (300 * i + 8, 68))
            now = f"return {returns[0]:g}{', over' if over[0] else ''}"
            for y, text in [(6, name), (28, agent), (46, now)]:
                font = ImageFont.load_default(min(14, 500 / len(text)))  # so that it fits in
                ImageDraw.Draw(image).text((300 * i + 8, y), text, "black", font)
    time = min(100, 10_000 // length)  # ms a frame, so that it takes 10 s at most
    images[0].save(path, "gif", save_all=True, append_images=images[1:], duration=time, loop=0)


def main() -> None:
    """Evaluate the runs that the command line names, and draw them if it says so."""
    args = tyro.cli(Args, description=__doc__)
    if args.gif and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo draws without a display
    runs = load_runs(args.runs, args)
    others = load_runs(args.against, args)
    for run in runs + others:
        policy = load_policy(run, args.seed)  # once before all else, which takes a while
        if args.sample and "sample" not in inspect.signature(policy).parameters:
            fail(f"--sample: {run.script.__name__} has no policy to draw from; see --epsilon")
    groups: dict[Any, list[Run]] = {}
    for i, run in enumerate(runs + others):
        groups.setdefault((i < len(runs), settings_of(run)), []).append(run)
    if others and len(groups) > 2:
        fail("--against: on each side of it, runs must differ in the seed alone")
    file = f"evaluation-epsilon-{args.epsilon:g}.json" if args.epsilon else "evaluation.json"
    means = []
    for group in groups.values():
        returns = {}
        for run in group:
            result = evaluate(run, args)
            total = result["return"]
            returns[run.args.seed] = total["mean"]
            agent = f"{run.script.__name__}, {run.args.env_id}, seed {run.args.seed}"
            print(f"{run.folder}: {agent}, {result['global_step']:,} steps")
            length = f"length {result['length']['mean']:.1f}, {result['capped']} capped"
            print(f"  return {format_mean(total)}, {total['min']:g} to {total['max']:g}, {length}")
            try:
                new = Path(run.folder, file).with_suffix(".new")
                new.write_text(json.dumps(result, indent=2))
                new.replace(new.with_suffix(".json"))
            except OSError as error:
                fail(f"{file} cannot be written: {error}")
        means.append(list(returns.values()))
        if len(returns) > 1:
            mean, middle = format_mean(summary(means[-1])), stats.trim_mean(means[-1], 0.25)
            print(f"mean over {len(returns)} seeds {mean}, interquartile mean {middle:.2f}")
        else:
            print("one seed, so no interval over seeds")
    if others:
        print(f"The first are {difference_of(*means)}")
    print(f"Written: {file} in the folder of each run")
    if args.gif:
        draw(runs + others, args, args.gif)
        print(f"Written: {args.gif}")


if __name__ == "__main__":
    main()

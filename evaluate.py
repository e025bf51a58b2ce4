# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnax==1.0.1", "six==1.17.0",
#   "numpy==2.4.6", "scipy==1.17.1", "tyro==1.0.17", "psutil==7.2.2", "tensorboard==2.21.0",
#   "gymnasium==1.3.0", "pygame-ce==2.5.8", "pillow==13.0.0", "matplotlib==3.11.2"]
# ///
"""Play the agents of runs: what they return, with intervals, and a GIF to look at.

    python evaluate.py runs/first runs/second     # 100 episodes of each, as a table
    python evaluate.py runs/first --gif first.gif
    python evaluate.py runs/first --epsilon 1     # the same games, by a random agent
    python evaluate.py runs/eight                 # each of the agents that a ppo_*_vmap.py trained
    python evaluate.py runs/mine --env-id my_module:MyEnv    # which is code, and run

A run is a folder with the checkpoint.npz of a ppo_*.py or dqn_*.py beside this file, finished or
not. The numbers also go to evaluation.json in that folder; with --epsilon 0.05, so that both can be
kept, to evaluation-epsilon-0.05.json. Everything runs on the CPU.
"""

import contextlib
import copy
import importlib
import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple, NoReturn

if __name__ == "__main__":  # Ctrl-C ends it without a traceback; files are written in one piece
    signal.signal(signal.SIGINT, signal.SIG_DFL)
os.environ["JAX_PLATFORMS"] = "cpu"  # fast enough, and the same numbers with and without a GPU

import jax
import numpy as np
import tyro
from scipy import stats

MAX_ENVS = 128
CLASSIC = ("Acrobot-v1", "CartPole-v1", "MountainCar-v0")  # gymnasium draws them
FRAMES, FRAME_MS, HOLD = 262, 40, 12  # of a GIF: frames, their time, frames that show an end


@dataclass
class Args:
    runs: Annotated[  # folders of runs
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")
    ]
    episodes: int = 100  # episodes of each run
    sample: bool = False  # draw PPO's actions from the policy; off: take the best one
    epsilon: float = 0.0  # chance that an action is random instead; 1: a random agent
    max_steps: int = 10_000  # an episode that gets here counts as it stands; some would not end
    seed: int = 0  # seed of environments and actions, the same for every run
    env_id: Annotated[  # my_module:MyEnv of a run in it, whose code this runs; once for each
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="MODULE:NAME")
    ] = ()
    gif: Path | None = None  # .gif file for the runs' first episodes, side by side, up to 10 s

    def __post_init__(self) -> None:
        """Raise ValueError, one sentence on the command line, where a value cannot work."""
        if not self.runs:
            raise ValueError("RUN must be the folder of a run")
        if self.episodes < 1:
            raise ValueError(f"--episodes must be positive, not {self.episodes}")
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"--epsilon must lie between 0 and 1, not {self.epsilon}")
        if not 0 < self.max_steps < 2**24:  # float32 counts them
            rule = "must lie between 1 and 2**24 - 1"
            raise ValueError(f"--max-steps {rule}, not {self.max_steps}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must lie between 0 and 2**32 - 1, not {self.seed}")
        if self.gif:
            ok = self.gif.suffix.lower() == ".gif" and not self.gif.is_dir()
            if not (ok and os.access(self.gif.parent, os.W_OK | os.X_OK)):
                rule = "must be a file that ends in .gif, in a folder that can be written to"
                raise ValueError(f"--gif {rule}, not {self.gif}")


class Run(NamedTuple):
    folder: Path
    script: ModuleType
    args: Any  # the script's Args
    iteration: int  # how many the agent was trained for
    get_logits: Callable  # (N, obs_dim) -> (N, num_actions); of a DQN, its values


def plain(text: object) -> str:
    """Text from a run or a path as one short line, without what a terminal would obey."""
    line = " ".join(str(text).split())[:1000]
    return "".join(x if x.isprintable() else "?" for x in line)


def fail(reason: object) -> NoReturn:
    """End the process with a sentence about what its user can mend."""
    print(plain(reason), file=sys.stderr)
    sys.exit(2)


# === Agents =====================================================================================
# A function per framework: read puts the checkpoint's arrays into a template, and returns it last.
# Templates have shapes and no numbers, so that a wrong one is refused before it takes memory.
# What an actor's logits are to PPO, the network's values are to DQN: the best action's is largest.
def linen_agent(script: ModuleType, args: Any, env: Any, read: Callable) -> Callable:
    make = partial(script.make_agent, args, env)
    template = {"train_state": jax.eval_shape(make, jax.random.PRNGKey(0))}
    agent = read(template)[2]["train_state"]
    method = None if hasattr(script, "QNetwork") else "get_logits"
    return jax.jit(partial(agent.apply_fn, agent.params, method=method))


def nnx_agent(script: ModuleType, args: Any, env: Any, read: Callable) -> Callable:
    make = partial(script.make_agent, args, env)
    agent, _ = script.nnx.eval_shape(make, jax.random.PRNGKey(0))
    template = {"state": script.nnx.state({"agent": agent})}
    script.nnx.update({"agent": agent}, read(template)[2]["state"])
    return jax.jit(agent.get_logits)


def equinox_agent(script: ModuleType, args: Any, env: Any, read: Callable) -> Callable:
    make = partial(script.make_agent, args, env)
    template = {"train_state": jax.eval_shape(make, jax.random.PRNGKey(0))}
    return jax.jit(jax.vmap(read(template)[2]["train_state"].agent.get_logits))


def torch_agent(script: ModuleType, args: Any, env: Any, read: Callable) -> Callable:
    is_dqn = hasattr(script, "QNetwork")
    name, make = ("q_network", script.QNetwork) if is_dqn else ("agent", script.Agent)
    with script.torch.device("meta"):
        agent = make(env.obs_shape if is_dqn else env.obs_dim, args.hidden_sizes, env.num_actions)
    arrays = read({"tensors": {name: agent.state_dict()}})[2]["tensors"][name]
    tensors = {name: script.torch.as_tensor(array) for name, array in arrays.items()}
    agent.load_state_dict(tensors, assign=True)
    agent.requires_grad_(False)
    get_logits = agent if is_dqn else agent.get_logits
    return lambda obs: get_logits(script.torch.from_numpy(np.array(obs))).numpy()


# A script's framework shows in what it imports.
AGENTS = {"eqx": equinox_agent, "TrainState": linen_agent, "nnx": nnx_agent, "torch": torch_agent}


def load_run(folder: str, env_ids: tuple[str, ...] = ()) -> Run:
    """Read a run's checkpoint; where it is none, end the process with a sentence.

    It may be a stranger's: the script that it names is looked up among those beside this file,
    never made into a path, nothing is unpickled, and of environments that are code only those in
    env_ids are imported.
    """
    here, said = Path(__file__).parent, io.StringIO()
    scripts = sorted(path.stem for kind in ("ppo", "dqn") for path in here.glob(f"{kind}_*.py"))
    try:
        with np.load(Path(folder, "checkpoint.npz"), allow_pickle=False) as file:
            info = json.loads(file["info"].item())
        name, iteration = info["script"], info["iteration"]
        if name not in scripts or type(iteration) is not int:
            raise ValueError(f"{name} is none of {', '.join(scripts)}")
        script = importlib.import_module(name)
        make_agent = next(make for name, make in AGENTS.items() if hasattr(script, name))
        own = [x for x in env_ids if x == info["args"]["env_id"]]
        read = partial(script.load_checkpoint, folder, env_id=own[0] if own else None)
        with contextlib.redirect_stderr(said):  # the sentence that read may end with
            args, _, _ = read()
            get_logits = make_agent(script, args, make_env(script, args, 1), read)
    except SystemExit:
        fail(said.getvalue())
    except Exception as error:  # a damaged file can raise anything
        fail(f"{folder} has no checkpoint to evaluate: {error}")
    return Run(Path(folder).resolve(), script, args, iteration, get_logits)


def agents_of(folder: str) -> list[str]:
    """The folders of the agents that a program trained at once, by seed; of a run, its own."""
    found = [x.parent for x in Path(folder).glob("seed*/metrics.jsonl")]
    return [str(x) for x in sorted(found, key=lambda x: (len(x.name), x.name))] or [folder]


def make_env(script: ModuleType, args: Any, num_envs: int, seed: int = 0) -> Any:
    """The script's VecEnv, with the environments that the run had."""
    if not is_gymnasium(script):
        return script.VecEnv(args.env_id, num_envs, **getattr(args, "env_options", {}))
    # Those of sync, async and vector are the same ones; async would have a process for each.
    how = "envpool" if args.vectorization == "envpool" else "sync"
    return script.VecEnv(args.env_id, num_envs, how, seed)


def is_gymnasium(script: ModuleType) -> bool:
    return hasattr(script, "gymnasium")


def name_of(run: Run) -> str:
    """The folder's name; of one of many agents, with their program's before it."""
    parts = run.folder.parts[-2 if hasattr(run.args, "num_agents") else -1 :]
    return plain("/".join(parts))


def steps_of(run: Run) -> int:
    """Environment steps that the agent was trained for."""
    return run.iteration * run.args.num_envs * run.args.num_steps


# === Episodes ===================================================================================
class Gymnax:
    """A script's environments in gymnax, with their state beside them."""

    def __init__(self, run: Run, num_envs: int, seed: int, draw: bool) -> None:
        self.env = make_env(run.script, run.args, num_envs)
        self.reset_fn, self.step_fn = jax.jit(self.env.reset), jax.jit(self.env.step)
        self.key = jax.random.split(jax.random.PRNGKey(seed), 3)[1]

    def reset(self) -> jax.Array:
        obs, self.state = self.reset_fn(self.key)
        return obs

    def step(self, action: jax.Array) -> tuple[jax.Array, dict[str, np.ndarray]]:
        obs, self.state, result = self.step_fn(self.state, action)
        return obs, jax.device_get(result)

    def restart(self, obs: jax.Array, over: np.ndarray) -> jax.Array:
        """Start anew where over (N,), as an episode's end would."""

        def choose_rows(new, old):
            return jax.numpy.where(over.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        new_obs, fresh = self.reset_fn(self.state.key)
        rows = jax.tree.map(choose_rows, fresh[1:], self.state[1:])
        self.state = type(fresh)(fresh.key, *rows)
        return choose_rows(new_obs, obs)


class Gymnasium:
    """A script's environments in Gymnasium, behind the same functions."""

    def __init__(self, run: Run, num_envs: int, seed: int, draw: bool) -> None:
        self.env = make_env(run.script, run.args, num_envs, seed)
        better = self.env.vectorization == "envpool" or self.env.env_id in CLASSIC
        self.drawn = draw and not better and "MinAtar/" not in self.env.env_id
        if self.drawn:
            import gymnasium

            one, spec = gymnasium.make(self.env.spec), copy.deepcopy(self.env.spec)
            one.close()
            self.drawn = "rgb_array" in (one.metadata.get("render_modes") or ())
            if self.drawn:
                spec.kwargs |= {"render_mode": "rgb_array"}
                try:
                    gymnasium.make(spec).close()
                    self.env.spec = spec
                except TypeError:  # a class may inherit its modes, and take none
                    self.drawn = False

    def reset(self) -> np.ndarray:
        return self.env.reset(1)

    def step(self, action: jax.Array) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        self.env.count = 0  # it keeps actions for resuming, and here none are needed
        return self.env.step(np.asarray(action))

    def restart(self, obs: np.ndarray, over: np.ndarray) -> np.ndarray:
        obs = obs.copy()
        obs[over] = self.env.restart(over)
        for total in (self.env.episode_return, self.env.episode_length):
            total[over] = 0
        return obs

    @property
    def state(self) -> np.ndarray | None:
        """That of the first environment, or its picture; None if there is neither to show."""
        if self.drawn:
            return picture(self.env.env_id, self.env.envs.envs[0].render)
        if self.env.env_id not in CLASSIC or self.env.vectorization == "envpool":
            return None
        return np.array(self.env.envs.envs[0].unwrapped.state)


@partial(jax.jit, static_argnames="sample")
def choose(logits, key, step, sample: bool):
    """(N, num_actions) -> (N,): the best action, or by the Gumbel trick a draw from softmax."""
    noise = jax.random.gumbel(jax.random.fold_in(key, step), logits.shape)
    return (logits + noise * sample).argmax(-1)


@jax.jit
def explore(action, key, step, epsilon, num_actions):
    """Each of the actions (N,), or with chance epsilon a random one."""
    coin_key, action_key = jax.random.split(jax.random.fold_in(key, step))
    other = jax.random.randint(action_key, action.shape, 0, num_actions, action.dtype)
    return jax.numpy.where(jax.random.uniform(coin_key, action.shape) < epsilon, other, action)


def play(
    run: Run, num_envs: int, args: Args, draw: bool = False
) -> Iterator[tuple[Any, Any, dict]]:
    """For ever: obs (N, obs_dim) and state before a step, and the step's result in NumPy.

    The result also has capped (N,): the episodes that end here only because of args.max_steps.
    """
    games: Any = (Gymnasium if is_gymnasium(run.script) else Gymnax)(run, num_envs, args.seed, draw)
    key, _, explore_key = jax.random.split(jax.random.PRNGKey(args.seed), 3)
    obs = games.reset()
    for step in count():
        action = choose(run.get_logits(obs), key, step, args.sample)
        if args.epsilon > 0:
            action = explore(action, explore_key, step, args.epsilon, games.env.num_actions)
        state = games.state
        next_obs, result = games.step(action)
        done = result["terminated"] | result["truncated"]
        result["capped"] = (result["episode_length"] >= args.max_steps) & ~done
        if result["capped"].any():
            next_obs = games.restart(next_obs, result["capped"])
        yield obs, state, result
        obs = next_obs


def evaluate(run: Run, args: Args) -> dict[str, Any]:
    """Play args.episodes episodes; return what evaluation.json holds.

    How many of them each environment plays is fixed beforehand, alike but for one if they do not
    split evenly: the first to end anywhere would be the short ones.
    """
    num_envs = min(args.episodes, MAX_ENVS)
    left = args.episodes // num_envs + (np.arange(num_envs) < args.episodes % num_envs)
    returns, lengths, capped = [], [], 0
    for _, _, result in play(run, num_envs, args):
        over = result["terminated"] | result["truncated"] | result["capped"]
        counted = over & (left > 0)
        capped += int((result["capped"] & counted).sum())
        returns += result["episode_return"][counted].tolist()
        lengths += result["episode_length"][counted].astype(int).tolist()
        left -= counted
        if not left.any():
            break
    steps = steps_of(run)
    return {
        **{"script": run.script.__name__, "env_id": run.args.env_id, "run_seed": run.args.seed},
        **{"iteration": run.iteration, "global_step": steps, "episodes": args.episodes},
        **{"actions": "sampled" if args.sample else "greedy", "epsilon": args.epsilon},
        **{"seed": args.seed, "max_steps": args.max_steps, "capped": capped},
        **{"return": summary(returns), "length": summary(lengths)},
        **{"returns": returns, "lengths": lengths},
    }


def summary(values: list) -> dict[str, Any]:
    """Mean, its 95% interval by Student's t, sample standard deviation, least and most.

    Of a single value, interval and deviation are None.
    """
    n, mean, std, interval = len(values), float(np.mean(values)), None, None
    if n > 1:
        std = float(np.std(values, ddof=1))
        half = float(stats.t.ppf(0.975, n - 1)) * std / math.sqrt(n)
        interval = [mean - half, mean + half]
    return {"mean": mean, "interval": interval, "std": std, "min": min(values), "max": max(values)}


def said(args: Args) -> str:
    return f"epsilon {args.epsilon:g}"


def print_table(runs: list[Run], results: list[dict[str, Any]]) -> None:
    """A line per run in aligned columns, names to the left and numbers to the right."""
    some_capped = any(result["capped"] for result in results)
    rows = [["run", "script", "environment", "seed", "steps", "return", "95% interval", "std"]]
    rows[0] += ["min", "max", "length", *["capped"] * some_capped]
    for run, result in zip(runs, results, strict=True):
        total, steps = result["return"], f"{result['global_step']:,}"
        row = [name_of(run), result["script"], result["env_id"], str(result["run_seed"])]
        row += [steps, f"{total['mean']:.2f}", "-", "-", f"{total['min']:g}", f"{total['max']:g}"]
        if total["interval"]:
            row[6:8] = "[{:.2f}, {:.2f}]".format(*total["interval"]), f"{total['std']:.2f}"
        row += [f"{result['length']['mean']:.1f}", *[str(result["capped"])] * some_capped]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        pairs = list(zip(row, widths, strict=True))
        print(*(x.ljust(n) for x, n in pairs[:3]), *(x.rjust(n) for x, n in pairs[3:]), sep="  ")


# === Picture ====================================================================================
def picture(env_id: str, render: Callable) -> np.ndarray:
    """What an environment draws of itself, (height, width, 3) uint8."""
    try:
        image = np.asarray(render())
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
            found = f"{image.dtype} {image.shape}"
            raise TypeError(f"render must return uint8 (height, width, 3), not {found}")
        return image
    except Exception as error:  # its code can raise anything
        fail(f"--gif: {env_id}: {type(error).__name__}: {error}")


def record(run: Run, args: Args) -> tuple[list[tuple], int]:
    """FRAMES frames of one environment, and how many of them its first episode takes.

    A frame is obs (obs_dim,), the environment's state in its library, return so far, number of the
    episode, if it ends.
    """
    frames, episode, first = [], 1, FRAMES
    # CartPole has 50 steps a second, so 2 a frame; what moves by whole squares takes 2 frames.
    stride, repeat = (2, 1) if run.args.env_id in CLASSIC else (1, 2)
    for obs, state, result in play(run, 1, args, draw=True):
        total, length = result["episode_return"][0], result["episode_length"][0]
        over = any(result[x][0] for x in ("terminated", "truncated", "capped"))
        if over or (length - 1) % stride == 0:
            if not is_gymnasium(run.script):
                state = jax.tree.map(lambda x: np.asarray(x[0]), state.inner)
                if getattr(run.args, "sticky_actions", 0):
                    state = state.env_state
            frame = np.asarray(obs[0]), state, total, episode, over
            frames += [frame] * (HOLD if over else repeat)
        if len(frames) >= FRAMES:
            break
        if over:
            first, episode = min(first, len(frames)), episode + 1
    return frames[:FRAMES], first


def pictures(run: Run, frames: list[tuple]) -> Iterator[np.ndarray]:
    """Draw one frame after the other, (height, width, 3) uint8.

    Classic control is drawn by gymnasium, what draws itself by itself, a grid as coloured squares,
    and of anything else what was observed so far: a row for each number, a column for each frame.
    """
    import gymnasium
    from gymnax.visualize import vis_gym
    from matplotlib import colormaps

    env_id, env = run.args.env_id, make_env(run.script, run.args, 1)
    if env_id in CLASSIC and frames[0][1] is not None:
        os.environ |= {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy"}  # no display
        screen: Any = gymnasium.make(env_id, render_mode="rgb_array").unwrapped
        own = is_gymnasium(run.script)
        if not own:
            vis_gym.set_gym_params(screen, env_id, env.params)
        try:
            for _, state, *_ in frames:
                screen.state = state if own else vis_gym.get_gym_state(state, env_id)
                yield screen.render()
            return
        except gymnasium.error.DependencyNotInstalled:
            print("--gif draws observations; pip install pygame-ce==2.5.8, and it draws the scene")
    elif is_gymnasium(run.script) and frames[0][1] is not None:
        yield from (state for _, state, *_ in frames)
        return
    elif ":" in env_id and hasattr(env, "env") and hasattr(env.env, "render"):
        for _, state, *_ in frames:
            yield picture(env_id, partial(env.env.render, state, env.params))
        return
    shape, obs = env.obs_shape, np.stack([frame[0] for frame in frames])
    if len(shape) > 1:  # of the things in a square, the one in the last channel
        things = obs.reshape(len(obs), *shape[:2], -1) > 0
        kind = (things * np.arange(1, things.shape[-1] + 1)).max(-1)
        colors = colormaps["tab10"].with_extremes(under="black")
        yield from colors(kind - 1, bytes=True)[..., :3]
    else:
        scaled = (obs - obs.min(0)) / np.maximum(np.ptp(obs, axis=0), 1e-8)
        strip = colormaps["viridis"](scaled.T, bytes=True)[..., :3]
        strip = strip.repeat(max(1, 160 // len(strip)), axis=0)
        for i in range(len(frames)):
            yield np.where(np.arange(len(frames))[:, None] <= i, strip, np.uint8(255))


def draw(runs: list[Run], args: Args) -> bytes:
    """A GIF with a panel per run, side by side, as long as the longest of the first episodes.

    A panel whose episode is over fades for half a second and goes on with the next.
    """
    from PIL import Image, ImageDraw, ImageFont

    width, height, top = 300, 200, 68
    size, font = (width * len(runs), top + height), ImageFont.load_default
    recorded = [record(run, args) for run in runs]
    length = max(first for _, first in recorded)
    images = [Image.new("RGB", size, "white") for _ in range(length)]
    for i, (run, (frames, _)) in enumerate(zip(runs, recorded, strict=True)):
        x, name = i * width + 8, name_of(run)[-38:]
        trained = f"{run.script.__name__}, {steps_of(run):,} steps"
        if args.epsilon > 0:
            trained = "random actions" if args.epsilon == 1 else f"{trained}, {said(args)}"
        shown = zip(images, frames[:length], pictures(run, frames[:length]), strict=True)
        for image, (_, _, total, episode, over), array in shown:
            scale = min((width - 16) / array.shape[1], (height - 8) / array.shape[0])
            box = max(1, round(array.shape[1] * scale)), max(1, round(array.shape[0] * scale))
            smooth = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST
            picture = Image.fromarray(array).resize(box, smooth)
            if over:
                picture = Image.blend(picture, Image.new("RGB", box, "white"), 0.5)
            image.paste(picture, (x, top))
            text, (word, color) = ImageDraw.Draw(image).text, ("", "black")
            if over:
                word, color = " is over", "firebrick"
            text((x, 6), name, "black", font(17 if len(name) < 30 else 13))
            text((x, 28), trained, "dimgray", font(13 if len(trained) < 42 else 11))
            text((x, 46), f"episode {episode}{word}: return {total:g}", color, font(13))
    # One palette, of some frames, for all: then a pixel that stays the same takes no space.
    some = np.vstack([np.asarray(image) for image in images[:: len(images) // 8 + 1]])
    palette = Image.fromarray(some).quantize(128, Image.Quantize.MAXCOVERAGE)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    buffer, options = io.BytesIO(), {"save_all": True, "duration": FRAME_MS, "loop": 0}
    images[0].save(buffer, "gif", append_images=images[1:], **options)
    return buffer.getvalue()


def main() -> None:
    """Evaluate the runs that the command line names, and draw them if it says so."""
    args = tyro.cli(Args, description=__doc__)
    runs = [load_run(x, args.env_id) for folder in args.runs for x in agents_of(folder)]
    for env_id in [x for x in args.env_id if x not in {run.args.env_id for run in runs}]:
        fail(f"--env-id {env_id}: no run was trained in it")
    if args.sample and any(hasattr(run.script, "QNetwork") for run in runs):
        fail("--sample draws from a policy, and a DQN has none: --epsilon is for it")
    results = [evaluate(run, args) for run in runs]
    actions = f"{results[0]['actions']} actions"
    if args.epsilon > 0:
        actions = "random actions" if args.epsilon == 1 else f"{actions}, {said(args)}"
    print(f"{args.episodes} episodes a run, {actions}, seed {args.seed}")
    print_table(runs, results)
    contents = [json.dumps(result, indent=2).encode() for result in results]
    name = f"evaluation-epsilon-{args.epsilon:g}.json" if args.epsilon else "evaluation.json"
    files = {run.folder / name: x for run, x in zip(runs, contents, strict=True)}
    if args.gif:
        files[args.gif] = draw(runs, args)
    failed = []
    for path, content in files.items():
        try:
            runs[0].script.replace_file(path, content)
        except OSError as error:
            failed.append(f"{path} ({error.strerror})")
    if failed:
        fail(f"these files cannot be written: {', '.join(failed)}")


if __name__ == "__main__":
    main()

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.3.0",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""DQN in eager PyTorch, with Gymnasium environments on the CPU.

    python more/dqn_torch_gymnasium.py --seed 1          # CartPole-v1
    python more/dqn_torch_gymnasium.py minatar --seed 1  # Breakout; pip install minatar

Start reading at Environment. The main ideas:
- VecEnv steps the environments one after another (--vectorization sync), or each in its own
  process (async). Both run on the CPU, in NumPy.
- VecEnv.step() restarts finished environments at once. By default, Gymnasium would use the next
  step for the restart.
- Replay keeps its tensors on the device.
- update() is PyTorch's usual sequence: zero_grad, backward, step.
- train() is a plain loop over steps: act, step, store, and run the updates due.
- A resumed run starts new episodes, because Gymnasium environments cannot be saved.
Lines marked "# sync" wait for the device.

Compare with dqn_torch.py for environments in JAX, or with dqn_linen_gymnasium.py for JAX.
"""

import argparse
import copy
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # idle OpenMP threads stop spinning sooner

import gymnasium
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from tensorboard.summary import Writer
from torch import nn
from torch.nn import functional as F


# === Arguments ==================================================================================
@dataclass
class Args:
    seed: int = 1  # random seed
    env_id: str = "CartPole-v1"  # Gymnasium id with discrete actions, or my_module:MyEnv-v0
    total_timesteps: int = 500_000  # environment steps, rounded down to whole iterations
    learning_rate: float = 2.5e-4  # the optimizer's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    num_envs: int = 8  # parallel environments
    num_steps: int = 625  # steps per environment in each iteration; metrics are logged after each
    gamma: float = 0.99  # discount factor
    buffer_size: int = 10_000  # maximum number of transitions in the replay buffer
    batch_size: int = 128  # transitions per update
    train_frequency: int = 10  # environment steps per update
    learning_starts: int = 10_000  # environment steps before the first update
    target_network_frequency: int = 50  # copy to the target network every N updates (not steps)
    double_q: bool = False  # Double DQN: the online network chooses the target's action
    start_e: float = 1.0  # initial epsilon, the probability of a random action
    end_e: float = 0.05  # final epsilon
    exploration_steps: int = 250_000  # steps of epsilon decay after learning_starts; 0: at once
    loss: Literal["mse", "huber"] = "mse"  # loss of the TD error; huber: linear beyond 1
    optimizer: Literal["adam", "rmsprop"] = "adam"  # rmsprop: centered, without momentum
    optimizer_eps: float = 1e-8  # the optimizer's epsilon, added outside the square root
    rmsprop_decay: float = 0.95  # decay rate of RMSProp's moving averages
    hidden_sizes: tuple[int, ...] = (120, 84)  # hidden layers; for images, after a convolution
    matmul_precision: Literal["medium", "high", "highest"] = "high"  # highest: no TF32 on a GPU
    vectorization: Literal["sync", "async"] = "sync"  # async: each environment in its own process
    runs_dir: str = "runs"  # where run folders are created
    run_name: str = ""  # name of the run folder; default {env_id}__{script}__{seed}__{time}
    track: bool = False  # log to Weights & Biases as well
    save_every: int = 0  # save a checkpoint every N iterations; 0: up to ten per run
    resume: str = ""  # run folder to continue; its arguments are kept

    def __post_init__(self) -> None:
        """Check arguments and compute derived ones. tyro reports a ValueError as a usage error."""
        if self.seed not in range(2**32):
            raise ValueError("--seed must be between 0 and 2**32 - 1")
        counts = ("num_envs", "num_steps", "buffer_size", "batch_size", "train_frequency")
        for name in (*counts, "target_network_frequency", "learning_starts", "exploration_steps"):
            least = 0 if name in ("learning_starts", "exploration_steps") else 1
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}")
        if self.buffer_size % self.num_envs != 0:
            raise ValueError(f"--buffer-size must be a multiple of --num-envs ({self.num_envs})")
        steps = self.num_envs * self.num_steps
        self.num_iterations = self.total_timesteps // steps
        if self.num_iterations < 1:
            raise ValueError(f"--total-timesteps must be at least one iteration ({steps})")
        self.hidden_sizes = tuple(self.hidden_sizes)  # a list when loaded from run.json


def parse_args() -> Args:
    """Parse the command line, which may start with the preset minatar."""
    minatar = Args(
        env_id="MinAtar/Breakout-v0",  # all six actions, sticky with probability 0.1, no time limit
        total_timesteps=5_000_000,
        anneal_lr=False,
        num_envs=1,
        num_steps=5_000,
        buffer_size=100_000,
        batch_size=32,
        train_frequency=1,
        learning_starts=5_000,
        target_network_frequency=1_000,
        end_e=0.1,
        exploration_steps=100_000,
        loss="huber",
        optimizer="rmsprop",
        optimizer_eps=0.01,
        hidden_sizes=(128,),
    )
    flags, default = sys.argv[1:], Args()
    if flags[:1] == ["minatar"]:
        flags, default = flags[1:], minatar
    default = args_to_resume() or default  # with --resume, the run's arguments are the defaults
    about = "Put minatar before the flags to use the MinAtar settings of Young & Tian 2019."
    parse = partial(tyro.cli, Args, args=flags, default=default, description=about)
    _, unknown = parse(return_unknown_args=True)
    if unknown and not unknown[0].startswith("-"):
        fail(f"Unknown argument: {unknown[0]}. The only preset, minatar, comes before the flags.")
    return parse()


# === Environment ================================================================================
class VecEnv:
    """N = num_envs Gymnasium environments stepped together. Finished ones restart automatically.

    Runs in NumPy, on the CPU. options are keyword arguments for the environment, like render_mode.
    """

    def __init__(
        self, env_id: str, num_envs: int, vectorization: str, seed: int, **options: Any
    ) -> None:
        sys.path.append(os.getcwd())  # to find my_module in my_module:MyEnv-v0
        if env_id.startswith("MinAtar/") and env_id not in gymnasium.registry:
            import minatar.gym  # pip install minatar==1.0.15

            minatar.gym.register_envs()
        vector_options: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED, "copy": False}
        if vectorization == "async":
            vector_options["context"] = "forkserver"  # forking is unsafe: this process has threads
            vector_options["shared_memory"] = False  # it would silently cast and reshape obs
        try:
            self.envs: Any = gymnasium.make_vec(
                env_id, num_envs, vectorization, vector_options, [EnvWrapper], **options
            )
        except gymnasium.error.Error as error:
            fail(f"--env-id: {error}")
        space = self.envs.single_action_space
        if not isinstance(space, Discrete) or space.start != 0:
            hint = "for a Box, use more/sac_linen_gymnasium.py or its PyTorch version"
            fail(f"--env-id: the action space must be Discrete with start=0, not {space}; {hint}")
        obs_space = self.envs.single_observation_space
        if not isinstance(obs_space, Box):
            hint = "wrap the environment in gymnasium.wrappers.FlattenObservation"
            fail(f"--env-id: the observation space must be a Box, not {obs_space}; {hint}")
        self.num_envs = num_envs
        self.seed = seed
        self.num_actions = int(space.n)
        self.obs_shape = obs_space.shape
        # 64-bit numbers become float32; other dtypes, such as uint8 for images, are kept.
        self.obs_dtype = np.dtype(np.float32 if obs_space.dtype.itemsize == 8 else obs_space.dtype)

    def reset(self, iteration: int = 0) -> np.ndarray:
        """Start all environments. Return obs (N, *obs_shape).

        Gymnasium environments cannot be saved, so a run that resumes after `iteration` iterations
        starts new episodes, with seeds that it has not used before.
        """
        # With seed + i, runs with seeds 1 and 2 would share all but one environment seed. The shift
        # leaves 31 bits, the most that some simulators accept.
        sequence = np.random.SeedSequence([self.seed, iteration])
        seeds = (sequence.generate_state(self.num_envs) >> 1).tolist()
        obs, _ = self.envs.reset(seed=seeds)
        self.episode_return = np.zeros(self.num_envs)  # so far in the current episode
        self.episode_length = np.zeros(self.num_envs, np.float32)
        return self.checked_copy(obs, self.obs_dtype)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Step with integer action (N,). Return obs (after any restart) and the results."""
        obs, reward, terminated, truncated, _ = self.envs.step(action.astype(np.int64))
        obs = self.checked_copy(obs, self.obs_dtype)  # Gymnasium reuses obs
        episode_return = self.episode_return + reward
        episode_length = self.episode_length + 1
        results = {
            "reward": self.checked_copy(reward, np.float32),
            "terminated": terminated,
            "truncated": truncated,
            "next_obs": obs,
            "episode_return": episode_return,
            "episode_length": episode_length,
        }
        done = terminated | truncated
        self.episode_return = np.where(done, 0, episode_return)
        self.episode_length = np.where(done, 0, episode_length)
        if done.any():  # restart now; by default Gymnasium would use up the next step
            obs, _ = self.envs.reset(options={"reset_mask": done})
            obs = self.checked_copy(obs, self.obs_dtype)
        return obs, results

    def checked_copy(self, x: np.ndarray, dtype: Any) -> np.ndarray:
        """Return a copy of x as dtype. Raise an error for NaN or inf: both ruin the parameters."""
        x = x.astype(dtype)
        if not np.isfinite(x).all():
            env = np.argwhere(~np.isfinite(x))[0][0]
            raise FloatingPointError(f"environment {env} returned NaN or inf: {x[env]}")
        return x


class EnvWrapper(gymnasium.Wrapper):
    """Drop info, which we do not use: merging it is slow, and fails on mixed types."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        if multiprocessing.parent_process():  # in a worker of vectorization="async"
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        obs, _ = self.env.reset(seed=seed, options=options or None)  # Gymnasium may pass {}
        return obs, {}

    def step(self, action: Any) -> tuple:
        *results, _ = self.env.step(action)
        return *results, {}


# === Agent ======================================================================================
class Agent(nn.Module):
    """Q-network: an MLP. For images (H, W, C), a convolution comes first."""

    def __init__(self, obs_shape, hidden_sizes, num_actions):
        super().__init__()
        num_inputs = math.prod(obs_shape)
        if len(obs_shape) == 3:
            height, width, channels = obs_shape
            self.conv = nn.Conv2d(channels, 16, 3)
            num_inputs = 16 * (height - 2) * (width - 2)
        sizes = (num_inputs, *hidden_sizes)
        self.hidden = nn.ModuleList(nn.Linear(m, n) for m, n in pairwise(sizes))
        self.output = nn.Linear(sizes[-1], num_actions)

    def forward(self, obs):  # (B, *obs_shape) -> (B, num_actions)
        x = obs.float()  # not divided by 255: MinAtar's images contain only 0 and 1
        if obs.ndim == 4:
            x = self.conv(x.permute(0, 3, 1, 2)).relu()  # PyTorch convolves (B, C, H, W)
        x = x.reshape(x.shape[0], -1)
        for layer in self.hidden:
            x = layer(x).relu()
        return self.output(x)


def make_agent(args: Args, obs_shape, num_actions: int, device: torch.device):
    """Initialize the parameters, the target network as a copy, and the optimizer."""
    agent = Agent(obs_shape, args.hidden_sizes, num_actions).to(device)
    target = copy.deepcopy(agent)
    params = agent.parameters()
    lr = args.learning_rate
    eps = args.optimizer_eps
    if args.optimizer == "adam":
        optimizer = torch.optim.Adam(params, lr, eps=eps, fused=True)
    else:
        optimizer = torch.optim.RMSprop(
            params, lr, alpha=args.rmsprop_decay, eps=eps, centered=True
        )
    return agent, target, optimizer


# === Replay =====================================================================================
class Transition(NamedTuple):
    """Transitions; B is batch_size or buffer_size."""

    obs: torch.Tensor  # (B, *obs_shape), input of the policy
    action: torch.Tensor  # (B,) int32
    reward: torch.Tensor  # (B,); this and the fields below result from the action
    terminated: torch.Tensor  # (B,) bool
    next_obs: torch.Tensor  # (B, *obs_shape), before any restart


class Replay:
    """The last buffer_size transitions, on the device."""

    def __init__(self, args: Args, obs_shape, obs_dtype: np.dtype, device: torch.device) -> None:
        self.args = args
        self.num_added = 0  # transitions added so far, including those overwritten
        size = args.buffer_size
        obs = torch.from_numpy(np.zeros((size, *obs_shape), obs_dtype)).to(device)
        self.transitions = Transition(
            obs=obs,
            action=torch.zeros(size, dtype=torch.int32, device=device),
            reward=torch.zeros(size, device=device),
            terminated=torch.zeros(size, dtype=torch.bool, device=device),
            next_obs=torch.zeros_like(obs),
        )

    def add(self, obs, action, result: dict) -> None:
        """Store a step of all environments, overwriting the oldest transitions."""
        start = self.num_added % self.args.buffer_size
        step = (obs, action, result["reward"], result["terminated"], result["next_obs"])
        for buffer, new in zip(self.transitions, step, strict=True):
            # A slice never wraps around, since buffer_size is a multiple of num_envs.
            buffer[start : start + len(new)] = torch.as_tensor(new)
        self.num_added += len(obs)

    def sample(self, batch_size: int) -> Transition:
        """Draw a batch uniformly, with replacement."""
        size = min(self.num_added, self.args.buffer_size)
        indices = torch.randint(size, (batch_size,), device=self.transitions.reward.device)
        return Transition(*(x[indices] for x in self.transitions))

    def updates_due(self) -> int:
        """Number of updates due after the latest step."""
        before = updates_after(self.num_added - self.args.num_envs, self.args)
        return updates_after(self.num_added, self.args) - before

    def state_dict(self) -> dict:
        # Save only the part in use. Without clone, torch.save would write the whole buffer.
        transitions = Transition(*(x[: self.num_added].clone() for x in self.transitions))
        return {"num_added": self.num_added, "transitions": transitions._asdict()}

    def load_state_dict(self, state: dict) -> None:
        self.num_added = state["num_added"]
        for name, x in state["transitions"].items():
            getattr(self.transitions, name)[: len(x)] = x


def updates_after(steps: int, args: Args) -> int:
    """Total number of updates due after `steps` steps, counted over all environments."""
    return max(steps - args.learning_starts, 0) // args.train_frequency


# === Act ========================================================================================
def epsilon_after(steps: int, args: Args) -> float:
    """Probability of a random action after `steps` environment steps."""
    if args.exploration_steps == 0:  # epsilon drops at once
        return args.start_e if steps < args.learning_starts else args.end_e
    progress = min(max((steps - args.learning_starts) / args.exploration_steps, 0.0), 1.0)
    return args.start_e + (args.end_e - args.start_e) * progress


@torch.no_grad()
def act(agent, obs, epsilon: float):
    """Epsilon-greedy actions (N,)."""
    q = agent(obs)
    best = q.argmax(-1)
    explore = torch.rand(best.shape, device=q.device) < epsilon
    random_action = torch.randint(q.shape[-1], best.shape, device=q.device)
    return torch.where(explore, random_action, best)


# === Loss =======================================================================================
def td_target(selector_q, target_q_next, batch: Transition, args: Args):
    """Targets (B,) for Q(obs, action), from two arrays of Q(next_obs), each (B, num_actions).

    selector_q chooses the next action, and target_q_next gives its value. Both come from the target
    network unless double_q is on. A terminated episode has no future value. A truncated one
    bootstraps from next_obs, like any other step.
    """
    best = selector_q.argmax(-1)
    future = torch.where(batch.terminated, 0.0, value_of(best, target_q_next))
    return batch.reward + args.gamma * future


def dqn_loss(agent, target, batch: Transition, args: Args):
    """DQN's loss, and the metrics to log."""
    q = value_of(batch.action, agent(batch.obs))
    with torch.no_grad():
        target_q_next = target(batch.next_obs)
        selector_q = target_q_next  # Mnih et al. 2015
        if args.double_q:
            selector_q = agent(batch.next_obs)  # van Hasselt et al. 2016
        q_target = td_target(selector_q, target_q_next, batch, args)
    loss_of = F.huber_loss if args.loss == "huber" else F.mse_loss
    loss = loss_of(q, q_target)
    return loss, {"losses/td_loss": loss, "losses/q_value": q.mean()}


def value_of(action, q):
    """Q of the given actions: (B,), (B, num_actions) -> (B,)."""
    return q.gather(-1, action[:, None].long()).squeeze(-1)


# === Update =====================================================================================
def update(agent, target, optimizer, batch: Transition, args: Args):
    """Train the agent in place on a batch. Return the metrics of the loss."""
    loss, losses = dqn_loss(agent, target, batch, args)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {name: x.detach() for name, x in losses.items()}


def mean_losses(losses: list[dict]) -> dict:
    """Means over the updates of an iteration, or NaN if there were none."""
    if not losses:
        return {"losses/td_loss": math.nan, "losses/q_value": math.nan}
    return {name: torch.stack([x[name] for x in losses]).mean() for name in losses[0]}


def episode_statistics(returns: list[float], lengths: list[float]) -> dict[str, float]:
    """Number of finished episodes, and the mean, min and max of their returns and lengths.

    If none finished, the statistics are NaN or infinite, which the log writes as null.
    """
    metrics: dict[str, float] = {"charts/episodes": len(returns)}
    for name, x in [("return", returns), ("length", lengths)]:
        metrics[f"charts/episodic_{name}"] = sum(x) / len(x) if x else math.nan
        metrics[f"charts/episodic_{name}_min"] = min(x, default=math.inf)
        metrics[f"charts/episodic_{name}_max"] = max(x, default=-math.inf)
    return metrics


# === Training ===================================================================================
def train(args: Args) -> None:
    """Train an agent, or continue a run."""
    # With small networks, PyTorch's default of one thread per core is slow on a busy machine.
    if max(args.hidden_sizes, default=0) < 128 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    torch.set_float32_matmul_precision(args.matmul_precision)  # "high" allows TF32 on a GPU
    torch.backends.cudnn.allow_tf32 = args.matmul_precision != "highest"  # for convolutions
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.vectorization == "async":
        # Every worker imports this script: load its slow imports once, in the fork server.
        slow = ["gymnasium", "torch", "tyro", "tensorboard.summary"]
        multiprocessing.set_forkserver_preload(slow)
    env = VecEnv(args.env_id, args.num_envs, args.vectorization, args.seed)
    spaces = {"obs_shape": env.obs_shape, "num_actions": env.num_actions}

    torch.manual_seed(args.seed)
    iteration = 0
    num_updates = 0
    agent, target, optimizer = make_agent(args, env.obs_shape, env.num_actions, device)
    replay = Replay(args, env.obs_shape, env.obs_dtype, device)
    if has_checkpoint(args, **spaces):
        checkpoint = load_checkpoint(args.resume)
        iteration = checkpoint["iteration"]
        num_updates = checkpoint["num_updates"]
        agent.load_state_dict(checkpoint["agent"])
        target.load_state_dict(checkpoint["target"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        replay.load_state_dict(checkpoint["replay"])
        torch.set_rng_state(checkpoint["rng_state"])
        torch.cuda.set_rng_state_all(checkpoint["cuda_rng_states"])
    obs = env.reset(iteration)
    packages = ["torch", "gymnasium", "numpy"]
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    num_threads = torch.get_num_threads()
    log = RunLog(args, iteration, packages, device=device_name, num_threads=num_threads, **spaces)

    while iteration < args.num_iterations:
        start = time.perf_counter()
        # Decay per iteration, not per update: updates start only after learning_starts.
        decay = 1 - iteration / args.num_iterations if args.anneal_lr else 1.0
        optimizer.param_groups[0]["lr"] = args.learning_rate * decay
        returns, lengths, losses = [], [], []
        for _ in range(args.num_steps):
            epsilon = epsilon_after(replay.num_added, args)
            action = act(agent, torch.from_numpy(obs).to(device), epsilon)
            action = action.cpu().numpy()  # sync
            new_obs, result = env.step(action)
            replay.add(obs, action, result)
            obs = new_obs
            done = result["terminated"] | result["truncated"]
            returns += result["episode_return"][done].tolist()
            lengths += result["episode_length"][done].tolist()
            for _ in range(replay.updates_due()):
                batch = replay.sample(args.batch_size)
                losses.append(update(agent, target, optimizer, batch, args))
                num_updates += 1
                if num_updates % args.target_network_frequency == 0:
                    target.load_state_dict(agent.state_dict())
        metrics = episode_statistics(returns, lengths) | mean_losses(losses)
        metrics["charts/epsilon"] = epsilon
        metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        metrics["charts/param_norm"] = nn.utils.get_total_norm(agent.parameters())
        metrics["charts/updates"] = len(losses)
        metrics = {name: float(x) for name, x in metrics.items()}  # sync
        log.write(iteration, metrics, start)
        iteration += 1
        if log.must_save(iteration):
            checkpoint = {
                "iteration": iteration,
                "num_updates": num_updates,
                "agent": agent.state_dict(),
                "target": target.state_dict(),
                "optimizer": optimizer.state_dict(),
                "replay": replay.state_dict(),
                "rng_state": torch.get_rng_state(),
                "cuda_rng_states": torch.cuda.get_rng_state_all()[:1],  # of the GPU, if any
            }
            save_checkpoint(log.dir, checkpoint)
            log.update_info(iteration=iteration)
            if log.stopped_by:  # stop only after saving, so that no iteration is lost
                break
    try:
        log.close()
    finally:
        env.envs.close()


# === Checkpoint =================================================================================
def save_checkpoint(folder: Path, checkpoint: dict) -> None:
    """Write a checkpoint atomically: a killed run keeps either the old one or the new one."""
    new = folder / "checkpoint.new"
    torch.save(checkpoint, new)  # sync
    os.replace(new, folder / "checkpoint.pt")


def load_checkpoint(folder: str | Path) -> dict:
    """Load a checkpoint onto the CPU. weights_only prevents the file from running code."""
    return torch.load(Path(folder, "checkpoint.pt"), map_location="cpu", weights_only=True)


def load_policy(folder: str | Path, seed: int = 0) -> Callable[..., np.ndarray]:
    """Load a trained policy: policy(obs) returns the greedy action for each observation.

    obs (N, *obs_shape) and the actions (N,) are NumPy arrays. seed is unused: nothing is random.
    """
    info, args = load_info(folder)
    agent = Agent(info["obs_shape"], args.hidden_sizes, info["num_actions"])
    agent.load_state_dict(load_checkpoint(folder)["agent"])

    @torch.no_grad()
    def policy(obs):
        return agent(torch.tensor(obs)).argmax(-1).numpy()

    return policy


# === Run log ====================================================================================
# You can stop reading here. The rest manages the run folder, and is the same in every script.
class RunLog:
    """A run folder: run.json describes the run, and metrics.jsonl has one line per iteration."""

    def __init__(self, args: Args, iteration: int, packages: list[str], **info: Any) -> None:
        """Create the run folder, or reopen it to resume the run. info is added to run.json."""
        name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
        name = args.run_name or name.replace("/", "-").replace(":", "-")
        self.dir = Path(args.resume or Path(args.runs_dir, name))
        self.args = args
        self.steps_per_iteration = args.num_envs * args.num_steps
        self.start = time.perf_counter()
        self.printed = -math.inf  # time of the last line on the terminal
        self.stopped_by = 0  # number of the signal received, if any
        if self.dir.exists() and not args.resume:
            fail(f"{self.dir} already exists. Use another --run-name, or --resume {self.dir}")
        self.dir.mkdir(parents=True, exist_ok=True)
        self.info: dict[str, Any] = {"resumed": []}  # iterations at which the run was resumed
        if args.resume:
            self.info = load_info(self.dir)[0]
            self.info["resumed"].append(iteration)
        self.info |= {
            "script": Path(__file__).stem,
            "status": "running",
            "started": time.time(),  # last start or resume
            "iteration": iteration,  # iterations completed at the last checkpoint
            "args": asdict(args),
            "versions": {name: version(name) for name in packages},
        }
        self.info |= info | json.loads(os.environ.get("RUN_INFO", "{}"))  # set by benchmark.sh

        # A killed run may have logged iterations after its last checkpoint. Drop them.
        self.metrics = open(self.dir / "metrics.jsonl", "a+", buffering=1)  # line-buffered
        self.metrics.seek(0)
        lines = [x for x in self.metrics if x.endswith("\n")]  # the last one may be incomplete
        lines = [x for x in lines if json.loads(x)["iteration"] < iteration]
        self.metrics.truncate(len("".join(lines)))
        if lines:
            self.start -= json.loads(lines[-1])["time/elapsed"]  # so that time/elapsed continues
        for old in self.dir.glob("events.*"):  # rewrite them without the dropped iterations
            old.unlink()
        self.tensorboard = Writer(str(self.dir))
        for line in lines:
            self.plot(json.loads(line))
        self.update_info()
        self.wandb: Any = None
        if args.track:
            import wandb  # only if needed, because importing takes half a second

            self.wandb = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "ppo-rosetta"),
                name=self.dir.name,
                id=self.info.get("wandb_id"),
                resume="allow",
                reinit="create_new",
                dir=self.dir,
                config=self.info,
            )
            self.wandb.define_metric("*", step_metric="global_step")
            self.update_info(wandb_id=self.wandb.id)
        if __name__ == "__main__":  # a program that imports this script handles signals itself
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.stop)
        text = f"Writing to {self.dir}. Ctrl-C saves and stops after the current iteration."
        print(text, flush=True)

    def stop(self, number: int, frame: Any) -> None:
        self.stopped_by = number
        signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once

    def write(self, iteration: int, metrics: dict, start: float, middle: float = 0.0) -> None:
        """Log an iteration that began at `start`. Its rollout ended at `middle` (0: not timed)."""
        end = time.perf_counter()
        row = {name: float(x) for name, x in metrics.items()}
        row["iteration"] = iteration  # counted from 0
        row["global_step"] = (iteration + 1) * self.steps_per_iteration
        row["charts/SPS"] = self.steps_per_iteration / (end - start)  # this iteration only
        row["time/elapsed"] = end - self.start
        row["time/iteration"] = end - start
        if middle:
            row["time/rollout"] = middle - start
            row["time/update"] = end - middle
        is_due = (iteration + 1) % math.ceil(self.args.num_iterations / 100) == 0
        if is_due or end - self.printed > 10:
            self.printed = end
            text = f"iteration {iteration + 1}/{self.args.num_iterations}"
            for name in ("episodes", "episodic_return", "SPS"):
                if math.isfinite(row[f"charts/{name}"]):  # without episodes, there is no return
                    text += f", {name} {row[f'charts/{name}']:g}"
            print(text, flush=True)
        row = {name: x if math.isfinite(x) else None for name, x in row.items()}  # JSON has no NaN
        self.metrics.write(json.dumps(row) + "\n")
        self.plot(row)
        if self.wandb:
            with suppress(ConnectionError):  # SIGTERM to a whole job also ends the W&B process
                self.wandb.log(row, step=iteration)
        checked = [x for name, x in row.items() if name.endswith(("_loss", "/param_norm"))]
        # DQN and SAC have no losses until training begins; charts/updates is 0 until then.
        if None in checked and row.get("charts/updates") != 0:
            self.close(diverged_in=iteration + 1)

    def plot(self, row: dict[str, Any]) -> None:
        """Add a row to TensorBoard."""
        for name, x in row.items():
            if x is not None and "/" in name:
                self.tensorboard.add_scalar(name, x, row["global_step"])

    def must_save(self, iteration: int) -> bool:
        is_due = iteration % (self.args.save_every or math.ceil(self.args.num_iterations / 10)) == 0
        return is_due or iteration == self.args.num_iterations or self.stopped_by > 0

    def update_info(self, **changes: Any) -> None:
        """Update run.json atomically."""
        self.info |= changes
        (self.dir / "run.new").write_text(json.dumps(self.info, indent=2))
        os.replace(self.dir / "run.new", self.dir / "run.json")

    def close(self, diverged_in: int = 0) -> None:
        """Record how the run ended. Exit if it stopped, or diverged in iteration `diverged_in`."""
        is_complete = self.info["iteration"] >= self.args.num_iterations
        status = "completed" if is_complete else "stopped"
        self.update_info(status="diverged" if diverged_in else status, ended=time.time())
        self.metrics.close()
        self.tensorboard.close()
        if self.wandb:
            with suppress(ConnectionError):
                self.wandb.summary.update(self.info)
                self.wandb.finish()
        if diverged_in:
            text = f"Diverged in iteration {diverged_in}: a loss or a parameter is NaN or infinite."
            sys.exit(f"{text} Last checkpoint in {self.dir}: iteration {self.info['iteration']}")
        if not is_complete:
            print(f"Stopped. To continue, add --resume {self.dir}")
            sys.exit(128 + self.stopped_by)  # the shell's convention for signals
        python = "python"
        if "UV_RUN_RECURSION_DEPTH" in os.environ:  # set by uv run
            python = f"uv run --with-requirements {__file__}"
        flags = f" --env-id {self.args.env_id}" if ":" in self.args.env_id else ""
        print(f"Saved to {self.dir}. Evaluate with: {python} evaluate.py {self.dir}{flags}")


def load_info(folder: str | Path) -> tuple[dict[str, Any], Args]:
    """Return the contents of run.json, and the Args in it."""
    info = json.loads(Path(folder, "run.json").read_text())
    if info["script"] != Path(__file__).stem:
        raise ValueError(f"{folder} was created by {info['script']}.py")
    return info, Args(**info["args"])


def args_to_resume() -> Args | None:
    """Return the arguments of the run that --resume names on the command line, if any."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--resume")
    folder = parser.parse_known_args()[0].resume
    return load_info(folder)[1] if folder else None


def has_checkpoint(args: Args, **spaces: Any) -> bool:
    """Return whether --resume names a run with a checkpoint. Exit if the run cannot continue."""
    if not args.resume:
        return False
    info, saved = load_info(args.resume)
    for name, x in asdict(saved).items():
        can_change = name in ("resume", "total_timesteps", "save_every", "track")
        if not can_change and getattr(args, name) != x:
            fail(f"--resume cannot change --{name.replace('_', '-')}, which is {x!r}")
    for name, x in json.loads(json.dumps(spaces)).items():  # tuples become lists, as in run.json
        if x != info[name]:
            fail(f"--resume: {name} is now {x}, but was {info[name]} when the run started")
    if info["iteration"] >= args.num_iterations:
        fail(f"{args.resume} is complete. To train for longer, pass a larger --total-timesteps")
    return info["iteration"] > 0


def fail(reason: str) -> NoReturn:
    print(reason, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    train(parse_args())

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.3.0", "ale-py==0.12.1",
#   "numpy==2.4.6", "tyro==1.0.17", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""PPO from pixels in compiled PyTorch, for Atari and other Gymnasium environments.

    python more/ppo_cnn_torch_compile_gymnasium.py --env-id ALE/Breakout-v5 --seed 1
    python more/ppo_cnn_torch_compile_gymnasium.py --env-id my_module:MyEnv-v0

Start reading at Environment. The main ideas:
- VecEnv runs Atari games in ale-py's threads. For the agent, a lost life ends the episode and
  rewards are clipped; the log has the scores of full games.
- The actor and the critic share one convolutional network. Images stay uint8 until they reach it.
- minibatch_step() compiles into one graph: the loss, its gradient, clipping and Adam.
- compile_graph() wraps torch.compile. capture() records the policy and an epoch as CUDA graphs.
Lines marked "# sync" wait for the device.

Compare with ppo_cnn_torch_gymnasium.py to see what compiling changes, or with
ppo_cnn_linen_gymnasium.py for JAX.
"""

import argparse
import importlib.util
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
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode
from tensorboard.summary import Writer
from torch import nn


# === Arguments ==================================================================================
@dataclass
class Args:
    seed: int = 1  # random seed
    env_id: str = "ALE/Pong-v5"  # Atari game, or my_module:MyEnv-v0 with uint8 images
    image_size: int = 84  # height and width to which Atari frames are scaled
    sticky_actions: float = 0.0  # probability that an Atari game repeats the previous action
    terminal_on_life_loss: bool = True  # for the agent, a lost life ends an episode
    channels_first: bool = False  # images of a custom environment are (C, H, W), not (H, W, C)
    total_timesteps: int = 10_000_000  # environment steps, rounded down to whole rollouts
    learning_rate: float = 2.5e-4  # Adam's learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    num_envs: int = 8  # parallel environments
    num_steps: int = 128  # steps per environment in each rollout
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # normalize advantages in each minibatch
    clip_coef: float = 0.1  # clipping range for the probability ratio and the value
    clip_vloss: bool = True  # clip the value loss
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # maximum global norm of the gradient
    adam_eps: float = 1e-5  # Adam's epsilon
    bootstrap_truncated: bool = True  # bootstrap truncated episodes from V(final obs), not from 0
    conv_channels: tuple[int, ...] = (32, 64, 64)  # output channels of the convolutions
    conv_kernels: tuple[int, ...] = (8, 4, 3)  # kernel sizes of the convolutions
    conv_strides: tuple[int, ...] = (4, 2, 1)  # strides of the convolutions
    hidden_sizes: tuple[int, ...] = (512,)  # sizes of the hidden layers after the convolutions
    precision: Literal["float32", "bfloat16"] = "float32"  # compute dtype of conv and hidden layers
    matmul_precision: Literal["medium", "high", "highest"] = "high"  # highest: no TF32 on a GPU
    vectorization: Literal["sync", "async"] = "sync"  # async: one process per custom environment
    sync_for_timing: bool = False  # wait for the device after each rollout, to time it separately
    runs_dir: str = "runs"  # where run folders are created
    run_name: str = ""  # name of the run folder; default {env_id}__{script}__{seed}__{time}
    track: bool = False  # log to Weights & Biases as well
    save_every: int = 0  # save a checkpoint every N iterations; 0: up to ten per run
    resume: str = ""  # run folder to continue; its arguments are kept

    def __post_init__(self) -> None:
        """Check arguments and compute derived ones. tyro reports a ValueError as a usage error."""
        if self.seed not in range(2**32):
            raise ValueError("--seed must be between 0 and 2**32 - 1")
        for name in ("image_size", "num_envs", "num_steps", "num_minibatches", "update_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        if not self.max_grad_norm > 0:
            raise ValueError("--max-grad-norm must be positive")
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // self.num_minibatches
        self.num_iterations = self.total_timesteps // self.batch_size
        self.num_optimizer_steps = self.num_iterations * self.update_epochs * self.num_minibatches
        if self.batch_size % self.num_minibatches != 0:
            raise ValueError(f"--num-minibatches must divide the batch size ({self.batch_size})")
        if self.num_iterations < 1:
            raise ValueError(f"--total-timesteps must be at least one batch ({self.batch_size})")
        for name in ("conv_channels", "conv_kernels", "conv_strides", "hidden_sizes"):
            setattr(self, name, tuple(getattr(self, name)))  # a list when loaded from run.json
        conv_sizes = (self.conv_channels, self.conv_kernels, self.conv_strides)
        if len(set(map(len, conv_sizes))) > 1:
            raise ValueError("--conv-channels, --conv-kernels and --conv-strides differ in length")
        self.conv_layers = tuple(zip(*conv_sizes, strict=True))


def parse_args() -> Args:
    """Parse the command line. With --resume, the run's arguments are the defaults."""
    return tyro.cli(Args, default=args_to_resume() or Args())


# === Environment ================================================================================
class VecEnv:
    """N = num_envs image environments stepped together. Finished ones restart automatically.

    Runs in NumPy, on the CPU. Atari games run in ale-py's threads; vectorization applies only to
    custom environments. options are keyword arguments for the environment, like render_mode.
    After a lost life, terminated is True, but the game continues. Unlike CleanRL, ale-py presses
    FIRE only at the start of a game, so an agent must learn to press it after a lost life.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        vectorization: str,
        seed: int,
        image_size: int = 84,
        sticky_actions: float = 0.0,
        terminal_on_life_loss: bool = True,
        channels_first: bool = False,
        **options: Any,
    ) -> None:
        sys.path.append(os.getcwd())  # to find my_module in my_module:MyEnv-v0
        vector_options: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED, "copy": False}
        if vectorization == "async":
            vector_options["context"] = "forkserver"  # forking is unsafe: this process has threads
            vector_options["shared_memory"] = False  # it would silently cast and reshape obs
        self.is_atari = env_id.startswith(("ALE/", "ale_py:ALE/"))
        try:
            if self.is_atari:
                self.envs: Any = make_atari(
                    env_id, num_envs, image_size, sticky_actions, terminal_on_life_loss, **options
                )
            else:
                self.envs = gymnasium.make_vec(
                    env_id, num_envs, vectorization, vector_options, [EnvWrapper], **options
                )
        except gymnasium.error.Error as error:
            fail(f"--env-id: {error} Atari games have ids such as ALE/Breakout-v5.")
        spec: Any = self.envs.spec
        if not self.is_atari and str(spec.entry_point).startswith("ale_py"):
            game = spec.kwargs["game"].title().replace("_", "")  # from "space_invaders"
            fail(f"--env-id: use ALE/{game}-v5, which this script preprocesses")
        space = self.envs.single_action_space
        if not isinstance(space, Discrete) or space.start != 0:
            hint = "more/ppo_continuous_*_gymnasium.py accept a Box, but flatten images"
            fail(f"--env-id: the action space must be Discrete with start=0, not {space}; {hint}")
        obs_space: Any = self.envs.single_observation_space
        if obs_space.dtype != np.uint8 or len(obs_space.shape) not in (2, 3):
            hint = "convert them with gymnasium.wrappers.TransformObservation"
            hint += ", or for vectors, use more/ppo_linen_gymnasium.py or its PyTorch version"
            fail(f"--env-id: the observations must be uint8 images, not {obs_space}; {hint}")
        self.num_envs = num_envs
        self.seed = seed
        self.num_actions = int(space.n)
        self.obs_shape = obs_space.shape
        # Atari images are (stacked frames, H, W). The agent adds an axis to images (H, W).
        self.channels_first = self.is_atari or (channels_first and len(self.obs_shape) == 3)

    def reset(self, iteration: int = 0) -> np.ndarray:
        """Start all environments. Return obs (N, *obs_shape).

        Gymnasium environments cannot be saved, so a run that resumes after `iteration` iterations
        starts new episodes, with seeds that it has not used before.
        """
        # With seed + i, runs with seeds 1 and 2 would share all but one environment seed. The shift
        # leaves 31 bits, the most that some simulators accept.
        sequence = np.random.SeedSequence([self.seed, iteration])
        seeds = (sequence.generate_state(self.num_envs) >> 1).tolist()
        obs, _ = self.envs.reset(seed=np.array(seeds) if self.is_atari else seeds)
        self.episode_return = np.zeros(self.num_envs)  # so far in the current episode
        self.episode_length = np.zeros(self.num_envs, np.float32)
        return obs.copy()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Step with integer action (N,). Return obs (after any restart) and the results."""
        obs, reward, terminated, truncated, info = self.envs.step(action.astype(np.int64))
        obs = obs.copy()  # Gymnasium reuses obs
        episode_return = self.episode_return + reward
        episode_length = self.episode_length + 1
        restart = terminated | truncated
        if self.is_atari:
            restart = (terminated & (info["lives"] == 0)) | truncated
            reward = np.sign(reward)  # for learning only; episode_return has the score
        results = {
            "reward": self.checked_copy(reward, np.float32),
            "terminated": terminated,
            "truncated": truncated,
            "restart": restart,
            "next_obs": obs,
            "episode_return": episode_return,
            "episode_length": episode_length,
        }
        self.episode_return = np.where(restart, 0, episode_return)
        self.episode_length = np.where(restart, 0, episode_length)
        if restart.any():  # restart now; by default Gymnasium would use up the next step
            obs = self.envs.reset(options={"reset_mask": restart})[0].copy()
        return obs, results

    def checked_copy(self, x: np.ndarray, dtype: Any) -> np.ndarray:
        """Return a copy of x as dtype. Raise an error for NaN or inf: both ruin the parameters."""
        x = x.astype(dtype)
        if not np.isfinite(x).all():
            env = np.argwhere(~np.isfinite(x))[0][0]
            raise FloatingPointError(f"environment {env} returned NaN or inf: {x[env]}")
        return x


def make_atari(
    env_id: str,
    num_envs: int,
    image_size: int,
    sticky_actions: float,
    terminal_on_life_loss: bool,
    **options: Any,
) -> gymnasium.vector.VectorEnv:
    """Create Atari games with the usual preprocessing (Mnih et al. 2015; Machado et al. 2018)."""
    if importlib.util.find_spec("ale_py") is None:
        hint = "pip install ale-py==0.12.1 (GPL-2.0, so not in requirements.txt)"
        fail(f"--env-id: Atari games need the ale-py package: {hint}")
    return gymnasium.make_vec(
        f"ale_py:{env_id.removeprefix('ale_py:')}",  # this prefix makes Gymnasium import ale_py
        num_envs,
        # ale-py's vector environment; VecEnv resets games itself, before ale-py's autoreset would
        "vector_entry_point",
        img_height=image_size,
        img_width=image_size,
        repeat_action_probability=sticky_actions,
        life_loss_info=terminal_on_life_loss,  # episodic_life would restart games
        noop_max=30,  # a game starts with up to 30 frames of no-ops
        use_fire_reset=True,  # then press FIRE, in games that have it
        frameskip=4,  # frames per step; observations use the pixelwise maximum of the last two
        reward_clipping=False,  # VecEnv.step clips rewards after adding them to the score
        grayscale=True,
        stack_num=4,  # each observation stacks the last four frames
        **options,
    )


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
    """Convolutions and hidden layers (Mnih et al. 2015), shared by the actor and the critic."""

    def __init__(self, args: Args, obs_shape, channels_first: bool, num_actions: int):
        super().__init__()
        self.channels_first = channels_first  # images are (C, H, W)
        self.use_bfloat16 = args.precision == "bfloat16"
        height, width, channels = image_size_of(obs_shape, channels_first)
        self.convs = nn.ModuleList()
        for num_outputs, kernel, stride in args.conv_layers:
            self.convs.append(initialize(nn.Conv2d(channels, num_outputs, kernel, stride)))
            channels = num_outputs
            height = (height - kernel) // stride + 1
            width = (width - kernel) // stride + 1
        sizes = (channels * height * width, *args.hidden_sizes)
        self.hidden = nn.ModuleList(initialize(nn.Linear(m, n)) for m, n in pairwise(sizes))
        self.actor = initialize(nn.Linear(sizes[-1], num_actions), scale=0.01)
        self.critic = initialize(nn.Linear(sizes[-1], 1), scale=1.0)

    def get_features(self, obs):
        """Features (B, hidden_sizes[-1]) of obs (B, *obs_shape) uint8."""
        images = obs[..., None] if obs.dim() == 3 else obs  # (B, H, W) -> (B, H, W, 1)
        if not self.channels_first:
            images = images.permute(0, 3, 1, 2)
        x = images.contiguous(memory_format=torch.channels_last).float().div_(255)
        # Parameters stay float32; autocast computes these layers in bfloat16.
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.use_bfloat16):
            for conv in self.convs:
                x = conv(x).relu_()
            # Flattened in the order (C, H, W). Flax flattens in the order (H, W, C), so weights of
            # the first hidden layer must be permuted to move them between frameworks.
            x = x.flatten(1)
            for layer in self.hidden:
                x = layer(x).relu_()
        return x.float()

    def get_logits(self, obs):
        return self.actor(self.get_features(obs))  # (B, *obs_shape) -> (B, num_actions)

    def get_value(self, obs):
        return self.critic(self.get_features(obs)).squeeze(-1)  # (B, *obs_shape) -> (B,)

    def forward(self, obs):
        features = self.get_features(obs)
        return self.actor(features), self.critic(features).squeeze(-1)


def initialize(layer, scale=2**0.5):
    nn.init.orthogonal_(layer.weight, scale)
    nn.init.zeros_(layer.bias)
    return layer


def image_size_of(obs_shape, channels_first: bool) -> tuple[int, int, int]:
    """Height, width and number of channels of an image (H, W), (H, W, C) or (C, H, W)."""
    if len(obs_shape) == 2:
        return (*obs_shape, 1)
    if channels_first:
        channels, height, width = obs_shape
        return height, width, channels
    return obs_shape


def check_image_size(args: Args, obs_shape, channels_first: bool) -> None:
    """Exit if images are too small for the convolutions."""
    height, width, _ = image_size_of(obs_shape, channels_first)
    size = 1  # output size; go back from the last convolution to the first
    for _, kernel, stride in reversed(args.conv_layers):
        size = (size - 1) * stride + kernel
    if min(height, width) < size:
        flags = "--conv-channels 16 32 --conv-kernels 3 3 --conv-strides 1 1"
        hint = f"for small images, add {flags}; for images (C, H, W), add --channels-first"
        fail(
            f"The convolutions need {size} x {size} pixels or more, not {height} x {width}; {hint}"
        )


class Adam(nn.Module):
    """Adam (Kingma & Ba 2015), implemented here so that it compiles together with the loss.

    The gradient and the moments are vectors (P,), which takes fewer kernels and less compile time.
    """

    count: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor

    def __init__(self, num_params, eps, device):
        super().__init__()
        self.eps = eps
        # The count is a tensor, because a number would be a compile-time constant.
        self.register_buffer("count", torch.zeros((), device=device))
        self.register_buffer("mean", torch.zeros(num_params, device=device))
        self.register_buffer("square", torch.zeros(num_params, device=device))

    def step(self, params, grad, learning_rate):
        """Update all P parameters in place, given their gradient (P,)."""
        beta1, beta2 = 0.9, 0.999  # as in torch.optim.Adam
        self.count.add_(1)
        self.mean.lerp_(grad, 1 - beta1)
        self.square.lerp_(grad**2, 1 - beta2)
        root = (self.square / (1 - beta2**self.count)).sqrt() + self.eps
        change = learning_rate * self.mean / (1 - beta1**self.count) / root
        for x, dx in zip(params, change.split([x.numel() for x in params]), strict=True):
            x -= dx.view_as(x)


def make_agent(args: Args, obs_shape, channels_first: bool, num_actions: int, device: torch.device):
    """Initialize the parameters and the optimizer."""
    check_image_size(args, obs_shape, channels_first)
    agent = Agent(args, obs_shape, channels_first, num_actions)
    agent = agent.to(device).to(memory_format=torch.channels_last)  # ty: ignore[no-matching-overload]
    num_params = sum(x.numel() for x in agent.parameters())
    return agent, Adam(num_params, args.adam_eps, device)


def learning_rate_after(steps, args: Args) -> torch.Tensor:
    """Learning rate for each optimizer step. CleanRL changes it once per iteration instead.

    steps and the result are tensors, because numbers would be compile-time constants.
    """
    if not args.anneal_lr:
        return torch.full_like(steps, args.learning_rate)
    return args.learning_rate * (1 - steps / args.num_optimizer_steps)


# === Storage ====================================================================================
class Storage(NamedTuple):
    """A rollout: T = num_steps steps in N = num_envs environments."""

    obs: torch.Tensor  # (T, N, *obs_shape) uint8, input of the policy
    action: torch.Tensor  # (T, N) int32
    logprob: torch.Tensor  # (T, N)
    value: torch.Tensor  # (T, N), V(obs)
    next_value: torch.Tensor  # (T, N), V(next_obs); not used after termination
    reward: torch.Tensor  # (T, N); this and the fields below result from the action
    terminated: torch.Tensor  # (T, N) bool
    truncated: torch.Tensor  # (T, N) bool
    restart: torch.Tensor  # (T, N) bool; in Atari, a lost life sets terminated but not restart
    episode_return: torch.Tensor  # (T, N), including this step
    episode_length: torch.Tensor  # (T, N)


class Batch(NamedTuple):
    """Inputs of the loss; B is batch_size or minibatch_size."""

    obs: torch.Tensor  # (B, *obs_shape) uint8
    action: torch.Tensor  # (B,) int32
    logprob: torch.Tensor  # (B,)
    value: torch.Tensor  # (B,)
    advantage: torch.Tensor  # (B,)
    target: torch.Tensor  # (B,), the lambda-return that the critic learns


# === Rollout ====================================================================================
def rollout(policy_fn, value_fn, obs, env: VecEnv, args: Args):
    """Run the policy for num_steps steps. Return the next obs and the Storage."""
    # Drawing the noise of all steps at once is faster than drawing it at each step.
    noise = torch.empty(args.num_steps, args.num_envs, env.num_actions, device=obs.device)
    noise.exponential_().log_().neg_()  # -log(exponential) is Gumbel noise

    steps, results = [], []
    for step_noise in noise:
        action, logprob, value = policy_fn(obs, step_noise)
        new_obs, result = env.step(action.cpu().numpy())  # sync
        next_obs = result.pop("next_obs")
        final_value = value  # unused unless an episode was truncated
        if result["truncated"].any():
            final_value = value_fn(torch.from_numpy(next_obs).to(obs.device))
        steps.append((obs, action, logprob, value, final_value))
        results.append(result)  # moved to the device after the loop, one copy per field
        obs = torch.from_numpy(new_obs).to(obs.device)

    # Turn one tuple per step into one tensor per field, (T, N, ...).
    all_obs, action, logprob, value, final_value = map(torch.stack, zip(*steps, strict=True))
    stacked = {name: np.stack([x[name] for x in results]) for name in results[0]}
    results = {name: torch.from_numpy(x).to(obs.device) for name, x in stacked.items()}
    # V(next_obs) is the value of the next step, unless an episode has ended. Truncated episodes
    # use final_value. Terminated ones have no future value.
    next_value = torch.cat([value[1:], value_fn(obs)[None]])
    next_value = torch.where(results["truncated"], final_value, next_value)
    return obs, Storage(all_obs, action, logprob, value, next_value, **results)


@torch.no_grad()
def policy(agent, obs, noise):
    """Sample actions: obs, noise (N, num_actions) -> action (N,) int32, logprob, value (N,)."""
    # The actor and the critic share the network, so the value takes almost no extra time.
    logits, value = agent(obs)
    action = (logits + noise).argmax(-1)  # Gumbel-max trick: samples softmax(logits)
    return action.int(), logprob_of(action, logits.log_softmax(-1)), value


def logprob_of(action, logprobs):
    """Log-probability of the actions taken: (...), (..., num_actions) -> (...)."""
    return logprobs.gather(-1, action[..., None].long()).squeeze(-1)


# === GAE ========================================================================================
def compute_gae(storage: Storage, value, next_value, args: Args) -> torch.Tensor:
    """Return advantages (T, N) from V(obs) and V(next_obs), both (T, N).

    Schulman et al. 2016, eq. 16. A terminated episode has no future value. A truncated one
    bootstraps from V(next_obs), unless bootstrap_truncated is off. Both end the recursion, since
    the next step starts a new episode.
    """
    done = storage.terminated | storage.truncated
    no_future = storage.terminated if args.bootstrap_truncated else done
    delta = storage.reward + args.gamma * torch.where(no_future, 0.0, next_value) - value
    decay = torch.where(done, 0.0, args.gamma * args.gae_lambda)

    advantage = torch.zeros_like(delta[0])
    advantages = []
    backwards = zip(delta.flip(0), decay.flip(0), strict=True)
    for step_delta, step_decay in backwards:
        advantage = step_delta + step_decay * advantage
        advantages.append(advantage)
    return torch.stack(advantages[::-1])


# === Loss =======================================================================================
def ppo_loss(agent, batch: Batch, args: Args):
    """PPO's clipped loss (Schulman et al. 2017, eq. 9), and the metrics to log."""
    logits, value = agent(batch.obs)
    logprobs = logits.log_softmax(-1)
    log_ratio = logprob_of(batch.action, logprobs) - batch.logprob
    ratio = log_ratio.exp()

    advantage = batch.advantage
    if args.norm_adv:
        # correction=0 divides by n. CleanRL's PyTorch scripts divide by n - 1.
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.minimum(advantage * ratio, advantage * clipped_ratio).mean()

    value_error = (value - batch.target) ** 2
    if args.clip_vloss:
        change = (value - batch.value).clip(-args.clip_coef, args.clip_coef)
        value_error = torch.maximum(value_error, (batch.value + change - batch.target) ** 2)
    value_loss = 0.5 * value_error.mean()

    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    return loss, {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": (ratio - 1 - log_ratio).mean(),
        "losses/clip_fraction": (abs(ratio - 1) > args.clip_coef).float().mean(),
    }


# === Update =====================================================================================
def update(agent, optimizer, epoch_fn, storage: Storage, args: Args):
    """Train the agent in place for update_epochs epochs on a rollout. Return the metrics."""
    learning_rate = learning_rate_after(optimizer.count, args)
    advantage = compute_gae(storage, storage.value, storage.next_value, args)
    target = advantage + storage.value
    fields = (storage.obs, storage.action, storage.logprob, storage.value, advantage, target)
    batch = Batch(*(x.reshape(args.batch_size, *x.shape[2:]) for x in fields))  # (T, N) -> (B,)

    losses = []
    for _ in range(args.update_epochs):
        order = torch.randperm(args.batch_size, device=advantage.device)
        losses.append(epoch_fn(order, *batch))
    metrics = {name: torch.stack([x[name] for x in losses]).mean() for name in losses[0]}
    metrics |= episode_statistics(storage)
    metrics["charts/learning_rate"] = learning_rate
    metrics["losses/explained_variance"] = 1 - (target - storage.value).var() / target.var()
    metrics["charts/param_norm"] = nn.utils.get_total_norm(agent.parameters())
    return metrics


def epoch(minibatch_fn, args: Args, order, *batch):
    """Train the agent in place for an epoch: order (batch_size,) shuffles the fields of the Batch.

    Return the metrics, (num_minibatches,) each.
    """
    # Gathering once per epoch is faster than once per minibatch.
    shuffled = [x[order].chunk(args.num_minibatches) for x in batch]
    losses = [minibatch_fn(Batch(*x)) for x in zip(*shuffled, strict=True)]
    return {name: torch.stack([x[name] for x in losses]) for name in losses[0]}


def minibatch_step(agent, optimizer, minibatch: Batch, args: Args):
    """Train the agent in place on a minibatch. Return the metrics of the loss.

    This function compiles into one graph. An optimizer from torch.optim would need a second one,
    and PPO with small networks would take a tenth longer on a CPU. backward() would compile twice,
    because .grad is None at first.
    """
    loss, losses = ppo_loss(agent, minibatch, args)
    params = list(agent.parameters())
    # Not parameters_to_vector, which needs gradients that are contiguous, not channels_last.
    grad = torch.cat([x.flatten() for x in torch.autograd.grad(loss, params)])
    with torch.no_grad():
        grad *= (args.max_grad_norm / (grad.norm() + 1e-6)).clip(max=1.0)
        optimizer.step(params, grad, learning_rate_after(optimizer.count, args))
    return {name: x.detach() for name, x in losses.items()}


def compile_graph(function, device):
    """Compile a function, including autograd.grad, into one graph. A graph break is an error."""
    torch._dynamo.config.trace_autograd_ops = True  # ty: ignore[invalid-assignment]
    options: dict[str, Any] = {
        "cpp_wrapper": device.type == "cpu",  # launches kernels from C++: PPO starts 3 s sooner
        "cpp.use_decompose_tanh": True,  # via exp: up to 15% faster, error of 1e-7 near 0
        "cpp.vec_isa_ok": True,  # trusts the CPU flags instead of compiling test programs
    }
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def capture(function, state):
    """Record function as a CUDA graph. Replaying it costs one launch, not one per kernel.

    function takes tensors and returns a sequence or a dict of tensors. The first call compiles and
    records it. A replay always uses the memory of the recording, so inputs are copied into it and
    outputs are cloned before the next replay overwrites them. The warm-up also runs function:
    state lists the tensors that it changes, which are restored afterwards.
    """
    graph, inputs, outputs = torch.cuda.CUDAGraph(), [], []

    def replay(*new_inputs):
        nonlocal inputs, outputs
        if not inputs:
            inputs = [x.clone() for x in new_inputs]
            saved = [x.clone() for x in state]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):  # warm up three times, as in PyTorch's documentation
                    function(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            # In the default mode, a CUDA call from another thread would abort the recording.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                outputs = function(*inputs)
            with torch.no_grad():
                for x, old in zip(state, saved, strict=True):
                    x.copy_(old)
        for x, new in zip(inputs, new_inputs, strict=True):
            x.copy_(new)
        graph.replay()
        if isinstance(outputs, dict):
            return {name: x.clone() for name, x in outputs.items()}
        return [x.clone() for x in outputs]

    return replay


def episode_statistics(storage: Storage) -> dict[str, torch.Tensor]:
    """Number of finished episodes, and the mean, min and max of their returns and lengths.

    If none finished, the statistics are NaN or infinite, which the log writes as null.
    """
    done = storage.restart  # a lost life does not end a game
    metrics = {"charts/episodes": done.sum()}
    for name, x in [("return", storage.episode_return), ("length", storage.episode_length)]:
        metrics[f"charts/episodic_{name}"] = torch.where(done, x, 0).sum() / done.sum()
        metrics[f"charts/episodic_{name}_min"] = torch.where(done, x, torch.inf).min()
        metrics[f"charts/episodic_{name}_max"] = torch.where(done, x, -torch.inf).max()
    return metrics


# === Training ===================================================================================
def train(args: Args) -> None:
    """Train an agent, or continue a run."""
    torch.set_float32_matmul_precision(args.matmul_precision)  # "high" allows TF32 on a GPU
    torch.backends.cudnn.allow_tf32 = args.matmul_precision != "highest"  # for convolutions
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.vectorization == "async":
        # Every worker imports this script: load its slow imports once, in the fork server.
        slow = ["gymnasium", "torch", "tyro", "tensorboard.summary"]
        multiprocessing.set_forkserver_preload(slow)
    env = VecEnv(
        args.env_id,
        args.num_envs,
        args.vectorization,
        args.seed,
        args.image_size,
        args.sticky_actions,
        args.terminal_on_life_loss,
        args.channels_first,
    )
    spaces = {"obs_shape": env.obs_shape, "num_actions": env.num_actions}
    spaces["channels_first"] = env.channels_first

    torch.manual_seed(args.seed)
    iteration = 0
    sizes = (env.obs_shape, env.channels_first, env.num_actions)
    agent, optimizer = make_agent(args, *sizes, device)
    if has_checkpoint(args, **spaces):
        checkpoint = load_checkpoint(args.resume)
        iteration = checkpoint["iteration"]
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["rng_state"])
        torch.cuda.set_rng_state_all(checkpoint["cuda_rng_states"])
    obs = torch.from_numpy(env.reset(iteration)).to(device)
    packages = ["torch", "gymnasium", "numpy"]
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    num_threads = torch.get_num_threads()
    log = RunLog(args, iteration, packages, device=device_name, num_threads=num_threads, **spaces)

    torch.compiler.reset()  # graphs from an earlier train() would count toward the recompile limit
    policy_fn = partial(policy, agent)  # on a CPU, a compiled policy is slower to call
    value_fn = torch.no_grad()(agent.get_value)
    # Compiled code reads the tensors of agent and optimizer on each call, but inlines numbers.
    minibatch_fn = compile_graph(partial(minibatch_step, agent, optimizer, args=args), device)
    epoch_fn = partial(epoch, minibatch_fn, args)  # compiling it would unroll its loop
    if device.type == "cuda":
        policy_fn = capture(compile_graph(policy_fn, device), [])
        epoch_fn = capture(epoch_fn, [*agent.parameters(), *optimizer.buffers()])
    while iteration < args.num_iterations:
        start = time.perf_counter()
        # Autocast keeps the bfloat16 copies of weights until its outermost context ends. Without
        # this context, every step on a CPU would convert the weights again.
        with torch.autocast(device.type, enabled=False):
            obs, storage = rollout(policy_fn, value_fn, obs, env, args)
        middle = 0.0
        if args.sync_for_timing:
            if device.type == "cuda":
                torch.cuda.synchronize()  # sync
            middle = time.perf_counter()
        metrics = update(agent, optimizer, epoch_fn, storage, args)
        values = torch.stack([torch.as_tensor(x, device=device) for x in metrics.values()])
        metrics = dict(zip(metrics, values.tolist(), strict=True))  # sync
        log.write(iteration, metrics, start, middle)
        iteration += 1
        if log.must_save(iteration):
            checkpoint = {
                "iteration": iteration,
                "agent": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
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
    """Load a trained policy: policy(obs) returns the most likely action for each observation.

    obs (N, *obs_shape) and the actions (N,) are NumPy arrays. policy(obs, sample=True) samples the
    actions instead, as in training.
    """
    info, args = load_info(folder)
    agent = Agent(args, info["obs_shape"], info["channels_first"], info["num_actions"])
    agent.load_state_dict(load_checkpoint(folder)["agent"])
    rng = np.random.default_rng(seed)

    @torch.no_grad()
    def policy(obs, sample=False):
        logits = agent.get_logits(torch.tensor(obs)).numpy()
        if sample:
            logits = logits + rng.gumbel(size=logits.shape)
        return logits.argmax(-1)

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

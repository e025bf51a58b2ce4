# /// script
# requires-python = ">=3.11"
# dependencies = ["pufferlib-core==3.0.23", "torch==2.13.0", "gymnasium==1.3.0", "numpy==2.4.6"]
#
# [tool.uv]  # the wheel of pufferlib-core needs CUDA and PyTorch 2.9, so build it here
# no-binary-package = ["pufferlib-core"]
# no-build-isolation-package = ["pufferlib-core"]
# override-dependencies = ["torch==2.13.0"]
# extra-build-variables = { pufferlib-core = { PUFFERLIB_DISABLE_CUDA = "1" } }
#
# [tool.uv.sources]  # CPU build: CUDA adds gigabytes
# torch = { index = "pytorch-cpu", marker = "sys_platform == 'linux'" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""Train PuffeRL, the PPO of PufferLib, with our hyperparameters.

    uv run studies/peers/ppo_pufferlib.py --env-id CartPole-v1 --seed 1
    uv run studies/peers/ppo_pufferlib.py --env-source c
    python race.py --study studies/peers

pufferlib-core is Metta AI's fork of PufferLib 3, without the environments. PufferLib 3 needs
downloads to build, and PufferLib 4 needs CUDA. --env-source c selects cartpole.c, which needs a C
compiler and uses PufferLib's native interface, for which PufferLib is optimized.

Differences from our script: a minibatch is four whole rollouts of single environments, drawn at
random, so an epoch may repeat some steps and miss others; advantages are recomputed for each
minibatch, with the latest values and importance weights; the last step of a rollout has advantage
0; a truncation is ignored, so the advantage continues into the next episode; the learning rate
follows a cosine and decays per iteration. With --env-source gymnasium, a reset takes an extra step.
PuffeRL also computes the advantages and weights of prioritized replay, which is off. Its dashboard
is off.
"""

import argparse
import ctypes
import subprocess
from itertools import pairwise
from pathlib import Path

import gymnasium
import numpy as np
import pufferlib
import pufferlib.emulation
import pufferlib.vector
import torch
from peer import BATCH_SIZE, RunLog, describe, fail, num_iterations, parse_args
from pufferlib import pufferl
from pufferlib.pytorch import layer_init


# === Environments ===============================================================================
class CartPoleInC(pufferlib.PufferEnv):
    """CartPole-v1 from cartpole.c, compiled into `folder`."""

    def __init__(self, num_envs: int, seed: int, folder: Path, buf=None) -> None:
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.num_agents = num_envs
        super().__init__(buf)  # creates the buffers below
        self.library = compile_cartpole(folder)
        self.envs = np.zeros((num_envs, 5))
        self.random_state = np.array([seed, 0, 0], np.uint16)
        self.lengths = np.zeros(num_envs, np.int32)
        buffers = (self.envs, self.random_state, self.actions, self.observations, self.rewards)
        buffers += (self.terminals, self.truncations, self.lengths)
        self.pointers = [ctypes.c_void_p(x.ctypes.data) for x in buffers]

    def reset(self, seed=None):
        envs, random_state, _, obs, *_ = self.pointers
        self.library.reset(self.num_agents, envs, random_state, obs)
        return self.observations, []

    def step(self, actions):
        self.actions[:] = actions
        ended = self.library.step(self.num_agents, *self.pointers)
        infos = [{"episode_return": self.lengths[:ended].tolist()}] if ended else []
        return self.observations, self.rewards, self.terminals, self.truncations, infos

    def close(self):
        pass


def compile_cartpole(folder: Path) -> ctypes.CDLL:
    library = folder / "cartpole.so"
    source = Path(__file__).with_name("cartpole.c")
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, str(source), "-o", str(library), "-lm"], check=True)
    return ctypes.CDLL(str(library))


def make_envs(args: argparse.Namespace, env_source: str, folder: Path):
    if env_source == "c":
        if args.env_id != "CartPole-v1":
            fail("cartpole.c is CartPole-v1: --env-id CartPole-v1")
        settings = {"num_envs": args.num_envs, "seed": args.seed, "folder": folder}
        return pufferlib.vector.make(CartPoleInC, env_kwargs=settings, backend=pufferlib.PufferEnv)

    def make_env(buf=None, seed=0):
        env = pufferlib.pufferlib.EpisodeStats(gymnasium.make(args.env_id))
        return pufferlib.emulation.GymnasiumPufferEnv(env=env, buf=buf)

    serial = pufferlib.vector.Serial  # steps the environments in sequence
    return pufferlib.vector.make(make_env, num_envs=args.num_envs, backend=serial, seed=args.seed)


# === Training ===================================================================================
class Policy(torch.nn.Module):
    def __init__(self, envs, hidden_sizes: list[int]) -> None:
        super().__init__()
        num_inputs = envs.single_observation_space.shape[0]
        self.actor = make_mlp([num_inputs, *hidden_sizes, envs.single_action_space.n], 0.01)
        self.critic = make_mlp([num_inputs, *hidden_sizes, 1], 1.0)

    def forward(self, obs, state=None):
        return self.actor(obs), self.critic(obs)

    def forward_eval(self, obs, state=None):
        return self(obs)


def make_mlp(sizes: list[int], output_scale: float) -> torch.nn.Sequential:
    *hidden, last = pairwise(sizes)
    layers: list[torch.nn.Module] = []
    for inputs, outputs in hidden:
        layers += [layer_init(torch.nn.Linear(inputs, outputs)), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, layer_init(torch.nn.Linear(*last), std=output_scale))


class Trainer(pufferl.PuffeRL):
    def print_dashboard(self, *args, **kwargs) -> None:
        pass


def main() -> None:
    args = parse_args("pufferlib", env_source=("gymnasium", "gymnasium, or c for cartpole.c"))
    env_source = vars(args).pop("env_source")
    log = RunLog(args, "eager")
    torch.manual_seed(args.seed)
    envs = make_envs(args, env_source, log.dir)
    config = {
        "env": args.env_id,
        "seed": args.seed,
        "torch_deterministic": True,
        "device": "cpu",
        "cpu_offload": False,
        "use_rnn": False,
        "precision": "float32",
        "compile": False,
        "optimizer": "adam",
        "learning_rate": args.learning_rate,
        "anneal_lr": args.anneal_lr,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": args.adam_eps,
        "total_timesteps": num_iterations(args) * BATCH_SIZE,
        "batch_size": BATCH_SIZE,
        "bptt_horizon": args.num_steps,
        "minibatch_size": BATCH_SIZE // args.num_minibatches,
        "max_minibatch_size": BATCH_SIZE,
        "update_epochs": args.update_epochs,
        "gamma": args.gamma,
        "gae_lambda": args.gae_lambda,
        "clip_coef": args.clip_coef,
        "vf_clip_coef": args.clip_coef,
        "vf_coef": args.vf_coef,
        "ent_coef": args.ent_coef,
        "max_grad_norm": args.max_grad_norm,
        "prio_alpha": 0.0,  # draw segments uniformly
        "prio_beta0": 1.0,
        "vtrace_rho_clip": 1.0,
        "vtrace_c_clip": 1.0,
        "checkpoint_interval": num_iterations(args),
        "data_dir": str(log.dir),
    }
    trainer = Trainer(config, envs, Policy(envs, args.hidden_sizes))
    log.begin()
    for _ in range(num_iterations(args)):
        returns = list(trainer.evaluate()["episode_return"])
        trainer.train()
        trainer.stats.clear()
        log.write(describe(returns, []))
    trainer.utilization.stop()  # the thread that measures the load
    envs.close()
    log.finish()


if __name__ == "__main__":
    main()

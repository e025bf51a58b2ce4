# /// script
# requires-python = ">=3.11"
# dependencies = ["skrl==2.1.1", "torch==2.13.0", "gymnasium[mujoco]==1.3.0", "mujoco==4.0.0",
#   "numpy==2.4.6"]
#
# [tool.uv.sources]  # CPU build: CUDA adds gigabytes
# torch = { index = "pytorch-cpu", marker = "sys_platform == 'linux'" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""Train skrl's PPO in PyTorch, set up as in its documentation, with the shared settings.

    uv run studies/control/peers/ppo_skrl_torch.py --total-timesteps 20480

Differences from our script: the value loss uses only the clipped error; advantages are normalized
over the batch; Adam's epsilon is 1e-8; the learning rate decays per epoch; a reset takes an extra
step; log-probabilities are computed from the clipped actions; values are standardized instead of
scaling rewards.
"""

import math

import flags
import gymnasium
import lines
import torch
from skrl import config
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed

EPOCHS = 10


def make_mlp(inputs: int, outputs: int, output_scale: float) -> torch.nn.Sequential:
    layers = [torch.nn.Linear(x, y) for x, y in ((inputs, 64), (64, 64), (64, outputs))]
    for layer, scale in zip(layers, (math.sqrt(2), math.sqrt(2), output_scale), strict=True):
        torch.nn.init.orthogonal_(layer.weight, scale)
        torch.nn.init.zeros_(layer.bias)
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])


class Policy(GaussianMixin, Model):
    def __init__(self, **spaces) -> None:
        Model.__init__(self, **spaces)
        GaussianMixin.__init__(self, clip_actions=True)
        self.net = make_mlp(self.num_observations, self.num_actions, 0.01)
        self.log_std = torch.nn.Parameter(torch.zeros(self.num_actions))

    def compute(self, inputs, role):
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Value(DeterministicMixin, Model):
    def __init__(self, **spaces) -> None:
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self.net = make_mlp(self.num_observations, 1, 1.0)

    def compute(self, inputs, role):
        return self.net(inputs["observations"]), {}


def main() -> None:
    args = flags.ppo().parse_args()
    torch.set_num_threads(1)
    config.torch.device = "cpu"
    set_seed(args.seed)
    envs = gymnasium.make_vec(args.env_id, args.num_envs, "sync")
    env = wrap_env(lines.VectorLines(envs, args.num_steps))
    spaces = {
        "observation_space": env.observation_space,
        "state_space": env.state_space,
        "action_space": env.action_space,
        "device": env.device,
    }
    steps = args.total_timesteps // args.num_envs  # per environment
    epochs = steps // args.num_steps * EPOCHS
    cfg = PPO_CFG(
        rollouts=args.num_steps,
        learning_epochs=EPOCHS,
        mini_batches=args.num_minibatches,
        discount_factor=0.99,
        gae_lambda=0.95,
        learning_rate=3e-4,
        learning_rate_scheduler=torch.optim.lr_scheduler.LinearLR,  # stepped once per epoch
        learning_rate_scheduler_kwargs={
            "start_factor": 1.0,
            "end_factor": 0.0,
            "total_iters": epochs,
        },
        observation_preprocessor=RunningStandardScaler,
        observation_preprocessor_kwargs={"size": env.observation_space, "device": env.device},
        value_preprocessor=RunningStandardScaler,
        value_preprocessor_kwargs={"size": 1, "device": env.device},
        grad_norm_clip=0.5,
        ratio_clip=0.2,
        value_clip=0.2,
        entropy_loss_scale=0.0,
        value_loss_scale=0.25,  # the value loss of skrl has no factor of 1/2
        time_limit_bootstrap=True,
        experiment={"write_interval": 0, "checkpoint_interval": 0},
    )
    agent = PPO(
        models={"policy": Policy(**spaces), "value": Value(**spaces)},
        memory=RandomMemory(memory_size=args.num_steps, num_envs=args.num_envs, device=env.device),
        cfg=cfg,
        **spaces,
    )
    trainer_cfg = {"timesteps": steps, "headless": True, "disable_progressbar": True}
    SequentialTrainer(env=env, agents=agent, cfg=trainer_cfg).train()


if __name__ == "__main__":
    main()

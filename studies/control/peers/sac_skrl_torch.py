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
"""Train skrl's SAC in PyTorch, set up as in its documentation, with the shared settings.

    uv run studies/control/peers/sac_skrl_torch.py --total-timesteps 1000

Differences from our script: skrl has no squashed Gaussian, so the mean is the tanh of the network
output, the standard deviation does not depend on the observation, and actions are clipped; the
replay buffer holds 10,000 transitions, because each batch is drawn without replacement from a
permutation of the buffer; the critic loss has a factor of 1/2.
"""

import flags
import gymnasium
import lines
import torch
from skrl import config
from skrl.agents.torch.sac import SAC, SAC_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed

CRITICS = ("critic_1", "critic_2", "target_critic_1", "target_critic_2")


def make_mlp(inputs: int, outputs: int) -> torch.nn.Sequential:
    hidden = (torch.nn.Linear(inputs, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    return torch.nn.Sequential(*hidden, torch.nn.ReLU(), torch.nn.Linear(256, outputs))


class Actor(GaussianMixin, Model):
    def __init__(self, **spaces) -> None:
        Model.__init__(self, **spaces)
        GaussianMixin.__init__(self, clip_actions=True)
        self.net = make_mlp(self.num_observations, self.num_actions)
        self.log_std = torch.nn.Parameter(torch.zeros(self.num_actions))

    def compute(self, inputs, role):
        return torch.tanh(self.net(inputs["observations"])), {"log_std": self.log_std}


class Critic(DeterministicMixin, Model):
    def __init__(self, **spaces) -> None:
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self.net = make_mlp(self.num_observations + self.num_actions, 1)

    def compute(self, inputs, role):
        return self.net(torch.cat([inputs["observations"], inputs["taken_actions"]], dim=1)), {}


def main() -> None:
    args = flags.sac().parse_args()
    torch.set_num_threads(1)
    config.torch.device = "cpu"
    set_seed(args.seed)
    env = wrap_env(lines.Lines(gymnasium.make(args.env_id)))
    spaces = {
        "observation_space": env.observation_space,
        "state_space": env.state_space,
        "action_space": env.action_space,
        "device": env.device,
    }
    cfg = SAC_CFG(
        gradient_steps=1,
        batch_size=256,
        discount_factor=0.99,
        polyak=0.005,
        learning_rate=3e-4,
        random_timesteps=args.learning_starts,
        learning_starts=args.learning_starts,
        initial_entropy_value=1.0,
        experiment={"write_interval": 0, "checkpoint_interval": 0},
    )
    agent = SAC(
        models={"policy": Actor(**spaces)} | {name: Critic(**spaces) for name in CRITICS},
        memory=RandomMemory(memory_size=10_000, device=env.device, replacement=False),
        cfg=cfg,
        **spaces,
    )
    steps = args.total_timesteps
    trainer_cfg = {"timesteps": steps, "headless": True, "disable_progressbar": True}
    SequentialTrainer(env=env, agents=agent, cfg=trainer_cfg).train()


if __name__ == "__main__":
    main()

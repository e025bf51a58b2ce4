# /// script
# requires-python = ">=3.11"
# dependencies = ["skrl==2.1.1", "torch==2.13.0", "gymnasium==1.3.0", "numpy==2.4.6"]
#
# [tool.uv.sources]  # CPU build: CUDA adds gigabytes
# torch = { index = "pytorch-cpu", marker = "sys_platform == 'linux'" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""Train skrl's PPO in PyTorch, set up as in its documentation, with our hyperparameters.

    uv run studies/peers/ppo_skrl_torch.py --env-id CartPole-v1 --seed 1
    ./benchmark.sh peers

Differences from our script: the value loss uses only the clipped error; advantages are normalized
over the batch; Adam's epsilon is 1e-8; the learning rate decays per epoch; a reset takes an extra
step.
"""

import math
from itertools import pairwise

import torch
from peer import RunLog, num_iterations, parse_args
from peer_skrl import Envs, settings, trainer_settings
from skrl import config
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed


def make_mlp(inputs: int, outputs: int, hidden_sizes: list[int], output_scale: float):
    sizes = [inputs, *hidden_sizes]
    layers = []
    for size, next_size in pairwise(sizes):
        layers += [make_layer(size, next_size, math.sqrt(2)), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, make_layer(sizes[-1], outputs, output_scale))


def make_layer(inputs: int, outputs: int, scale: float) -> torch.nn.Linear:
    layer = torch.nn.Linear(inputs, outputs)
    torch.nn.init.orthogonal_(layer.weight, scale)
    torch.nn.init.zeros_(layer.bias)
    return layer


class Policy(CategoricalMixin, Model):
    def __init__(self, hidden_sizes: list[int], **spaces) -> None:
        Model.__init__(self, **spaces)
        CategoricalMixin.__init__(self)
        self.net = make_mlp(self.num_observations, self.num_actions, hidden_sizes, 0.01)

    def compute(self, inputs, role):
        return self.net(inputs["observations"]), {}


class Value(DeterministicMixin, Model):
    def __init__(self, hidden_sizes: list[int], **spaces) -> None:
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self.net = make_mlp(self.num_observations, 1, hidden_sizes, 1.0)

    def compute(self, inputs, role):
        return self.net(inputs["observations"]), {}


def main() -> None:
    args = parse_args("skrl_torch")
    log = RunLog(args, "eager")
    config.torch.device = "cpu"
    set_seed(args.seed)
    envs = Envs(args, log)
    env = wrap_env(envs)
    spaces = {
        "observation_space": env.observation_space,
        "state_space": env.state_space,
        "action_space": env.action_space,
        "device": env.device,
    }
    epochs = num_iterations(args) * args.update_epochs
    decay = {"start_factor": 1.0, "end_factor": 0.0, "total_iters": epochs}
    cfg = PPO_CFG(
        **settings(args),
        entropy_loss_scale=args.ent_coef,
        learning_rate_scheduler=torch.optim.lr_scheduler.LinearLR,  # stepped once per epoch
        learning_rate_scheduler_kwargs=decay,
    )
    policy = Policy(args.hidden_sizes, **spaces)
    value = Value(args.hidden_sizes, **spaces)
    agent = PPO(
        models={"policy": policy, "value": value},
        memory=RandomMemory(memory_size=args.num_steps, num_envs=args.num_envs, device=env.device),
        cfg=cfg,
        **spaces,
    )
    SequentialTrainer(env=env, agents=agent, cfg=trainer_settings(args)).train()
    envs.write()
    log.finish()


if __name__ == "__main__":
    main()

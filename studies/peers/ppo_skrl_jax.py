# /// script
# requires-python = ">=3.11"
# dependencies = ["skrl==2.1.1", "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnasium==1.3.0",
#   "numpy==2.4.6"]
# ///
"""Train skrl's PPO in JAX, set up as in its documentation, with our hyperparameters.

    uv run studies/peers/ppo_skrl_jax.py --env-id CartPole-v1 --seed 1
    ./benchmark.sh peers

Differences from our script: the value loss uses only the clipped error; advantages are normalized
over the batch; Adam's epsilon is 1e-8; the learning rate decays per epoch; a reset takes an extra
step; there is no entropy bonus; the gradients of actor and critic are clipped separately.

In JAX, skrl computes the entropy of a policy from its standard deviation, which a categorical
policy does not have. Therefore entropy_loss_scale would have no effect and is not set. The GAE of
skrl unrolls the loop over steps, so the first iteration takes a long time to compile.
"""

import math
from collections.abc import Callable

import flax.linen as nn
from flax.linen.initializers import orthogonal
from peer import RunLog, num_iterations, parse_args
from peer_skrl import Envs, settings, trainer_settings
from skrl import config
from skrl.agents.jax.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.jax import wrap_env
from skrl.memories.jax import RandomMemory
from skrl.models.jax import CategoricalMixin, DeterministicMixin, Model
from skrl.trainers.jax import SequentialTrainer
from skrl.utils import set_seed


def mlp(x, outputs: int, hidden_sizes: tuple[int, ...], output_scale: float):
    """Apply an MLP, whose layers are created in the compact __call__ of the calling module."""
    for size in hidden_sizes:
        x = nn.tanh(nn.Dense(size, kernel_init=orthogonal(math.sqrt(2)))(x))
    return nn.Dense(outputs, kernel_init=orthogonal(output_scale))(x)


class Policy(CategoricalMixin, Model):
    hidden_sizes: tuple[int, ...] = ()

    def __init__(self, hidden_sizes: tuple[int, ...], **spaces) -> None:
        self.hidden_sizes = hidden_sizes
        Model.__init__(self, **spaces)
        CategoricalMixin.__init__(self)

    @nn.compact
    def __call__(self, inputs, role):
        return mlp(inputs["observations"], self.num_actions, self.hidden_sizes, 0.01), {}


class Value(DeterministicMixin, Model):
    hidden_sizes: tuple[int, ...] = ()

    def __init__(self, hidden_sizes: tuple[int, ...], **spaces) -> None:
        self.hidden_sizes = hidden_sizes
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)

    @nn.compact
    def __call__(self, inputs, role):
        return mlp(inputs["observations"], 1, self.hidden_sizes, 1.0), {}


def linear_decay(iterations: int, steps: int, epochs: int) -> Callable[[int], float]:
    """Return a function that maps a timestep to a learning-rate factor.

    skrl multiplies the learning rate by this factor after every epoch, so that it decays linearly
    to 0. The timestep is the index of the last step of the rollout, starting at 0.
    """

    def factor(timestep: int) -> float:
        left = iterations - (timestep + 1) // steps
        return (left / (left + 1)) ** (1 / epochs)

    return factor


def main() -> None:
    args = parse_args("skrl_jax")
    log = RunLog(args, "jit")
    config.jax.device = "cpu"
    set_seed(args.seed)
    envs = Envs(args, log)
    env = wrap_env(envs)
    spaces = {
        "observation_space": env.observation_space,
        "state_space": env.state_space,
        "action_space": env.action_space,
        "device": env.device,
    }
    cfg = PPO_CFG(
        **settings(args),
        learning_rate_scheduler=linear_decay,
        learning_rate_scheduler_kwargs={
            "iterations": num_iterations(args),
            "steps": args.num_steps,
            "epochs": args.update_epochs,
        },
    )
    models = {
        "policy": Policy(tuple(args.hidden_sizes), **spaces),
        "value": Value(tuple(args.hidden_sizes), **spaces),
    }
    for role, model in models.items():
        model.init_state_dict(role=role)
    agent = PPO(
        models=models,
        memory=RandomMemory(memory_size=args.num_steps, num_envs=args.num_envs, device=env.device),
        cfg=cfg,
        **spaces,
    )
    SequentialTrainer(env=env, agents=agent, cfg=trainer_settings(args)).train()
    envs.write()
    log.finish()


if __name__ == "__main__":
    main()

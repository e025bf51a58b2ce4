# /// script
# requires-python = ">=3.11"
# dependencies = ["skrl==2.1.1", "jax==0.10.2", "flax==0.12.8", "optax==0.2.8",
#   "gymnasium[mujoco]==1.3.0", "mujoco==4.0.0", "numpy==2.4.6"]
# ///
"""Train skrl's PPO in JAX, set up as in its documentation, with the shared settings.

    uv run studies/control/peers/ppo_skrl_jax.py --total-timesteps 20480

Differences from our script: the value loss uses only the clipped error; advantages are normalized
over the batch; Adam's epsilon is 1e-8; the learning rate is constant; a reset takes an extra step;
log-probabilities are computed from the clipped actions; values are standardized instead of scaling
rewards; the gradients of actor and critic are clipped separately.
"""

import math

import flags
import flax.linen as nn
import gymnasium
import jax.numpy as jnp
import lines
from flax.linen.initializers import orthogonal
from skrl import config
from skrl.agents.jax.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.jax import wrap_env
from skrl.memories.jax import RandomMemory
from skrl.models.jax import DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.jax import RunningStandardScaler
from skrl.trainers.jax import SequentialTrainer
from skrl.utils import set_seed


def mlp(x, outputs: int, output_scale: float):
    """Apply an MLP, whose layers are created in the compact __call__ of the calling module."""
    for _ in range(2):
        x = nn.tanh(nn.Dense(64, kernel_init=orthogonal(math.sqrt(2)))(x))
    return nn.Dense(outputs, kernel_init=orthogonal(output_scale))(x)


class Policy(GaussianMixin, Model):
    def __init__(self, **spaces) -> None:
        Model.__init__(self, **spaces)
        GaussianMixin.__init__(self, clip_actions=True)

    @nn.compact
    def __call__(self, inputs, role):
        log_std = self.param("log_std", lambda _: jnp.zeros(self.num_actions))
        return mlp(inputs["observations"], self.num_actions, 0.01), {"log_std": log_std}


class Value(DeterministicMixin, Model):
    def __init__(self, **spaces) -> None:
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)

    @nn.compact
    def __call__(self, inputs, role):
        return mlp(inputs["observations"], 1, 1.0), {}


def main() -> None:
    args = flags.ppo().parse_args()
    config.jax.device = "cpu"
    set_seed(args.seed)
    envs = gymnasium.make_vec(args.env_id, args.num_envs, "sync")
    env = wrap_env(lines.VectorLines(envs, args.num_steps))
    spaces = {
        "observation_space": env.observation_space,
        "state_space": env.state_space,
        "action_space": env.action_space,
        "device": env.device,
    }
    cfg = PPO_CFG(
        rollouts=args.num_steps,
        learning_epochs=10,
        mini_batches=args.num_minibatches,
        discount_factor=0.99,
        gae_lambda=0.95,
        learning_rate=3e-4,
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
    models = {"policy": Policy(**spaces), "value": Value(**spaces)}
    for role, model in models.items():
        model.init_state_dict(role=role)
    agent = PPO(
        models=models,
        memory=RandomMemory(memory_size=args.num_steps, num_envs=args.num_envs, device=env.device),
        cfg=cfg,
        **spaces,
    )
    steps = args.total_timesteps // args.num_envs  # per environment
    trainer_cfg = {"timesteps": steps, "headless": True, "disable_progressbar": True}
    SequentialTrainer(env=env, agents=agent, cfg=trainer_cfg).train()


if __name__ == "__main__":
    main()

# /// script
# requires-python = ">=3.11"
# dependencies = ["skrl==2.1.1", "jax==0.10.2", "flax==0.12.8", "optax==0.2.8",
#   "gymnasium[mujoco]==1.3.0", "mujoco==4.0.0", "numpy==2.4.6"]
# ///
"""Train skrl's SAC in JAX, set up as in its documentation, with the shared settings.

    uv run studies/control/peers/sac_skrl_jax.py --total-timesteps 1000

Differences from our script: skrl has no squashed Gaussian, so the mean is the tanh of the network
output, the standard deviation does not depend on the observation, and actions are clipped; the
replay buffer holds 10,000 transitions, because in JAX skrl copies the full buffer at each step.
"""

import flags
import flax.linen as nn
import gymnasium
import jax.numpy as jnp
import lines
from skrl import config
from skrl.agents.jax.sac import SAC, SAC_CFG
from skrl.envs.wrappers.jax import wrap_env
from skrl.memories.jax import RandomMemory
from skrl.models.jax import DeterministicMixin, GaussianMixin, Model
from skrl.trainers.jax import SequentialTrainer
from skrl.utils import set_seed

CRITICS = ("critic_1", "critic_2", "target_critic_1", "target_critic_2")


def mlp(x, outputs: int):
    """Apply an MLP, whose layers are created in the compact __call__ of the calling module."""
    for _ in range(2):
        x = nn.relu(nn.Dense(256)(x))
    return nn.Dense(outputs)(x)


class Actor(GaussianMixin, Model):
    def __init__(self, **spaces) -> None:
        Model.__init__(self, **spaces)
        GaussianMixin.__init__(self, clip_actions=True)

    @nn.compact
    def __call__(self, inputs, role):
        log_std = self.param("log_std", lambda _: jnp.zeros(self.num_actions))
        return nn.tanh(mlp(inputs["observations"], self.num_actions)), {"log_std": log_std}


class Critic(DeterministicMixin, Model):
    def __init__(self, **spaces) -> None:
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)

    @nn.compact
    def __call__(self, inputs, role):
        x = jnp.concatenate([inputs["observations"], inputs["taken_actions"]], axis=-1)
        return mlp(x, 1), {}


def main() -> None:
    args = flags.sac().parse_args()
    config.jax.device = "cpu"
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
    models = {"policy": Actor(**spaces)} | {name: Critic(**spaces) for name in CRITICS}
    for role, model in models.items():
        model.init_state_dict(role=role)
    agent = SAC(
        models=models,
        memory=RandomMemory(memory_size=10_000, device=env.device, replacement=False),
        cfg=cfg,
        **spaces,
    )
    steps = args.total_timesteps
    trainer_cfg = {"timesteps": steps, "headless": True, "disable_progressbar": True}
    SequentialTrainer(env=env, agents=agent, cfg=trainer_cfg).train()


if __name__ == "__main__":
    main()

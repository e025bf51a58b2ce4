# /// script
# requires-python = ">=3.11"
# dependencies = ["torchrl==0.14.1", "torch==2.13.0", "gymnasium==1.3.0", "numpy==2.4.6"]
#
# [tool.uv.sources]  # CPU build: CUDA adds gigabytes
# torch = { index = "pytorch-cpu", marker = "sys_platform == 'linux'" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""Train TorchRL's PPO, set up as in its tutorial and its ppo_mujoco.py, with our hyperparameters.

    uv run studies/peers/ppo_torchrl.py --env-id CartPole-v1 --seed 1
    ./benchmark.sh peers

With TorchRL, users write the training loop. Its examples recompute advantages in each epoch; here
they are computed once.
"""

import math

import gymnasium
import torch
from peer import BATCH_SIZE, RunLog, describe, num_iterations, parse_args
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import Compose, GymWrapper, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE


def make_env(args) -> TransformedEnv:
    manual = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}  # as TorchRL prefers
    envs = gymnasium.make_vec(args.env_id, args.num_envs, "sync", vector_kwargs=manual)
    env = GymWrapper(envs, categorical_action_encoding=True)
    return TransformedEnv(env, Compose(RewardSum(), StepCounter()))


def make_mlp(inputs: int, outputs: int, hidden_sizes: list[int], output_scale: float) -> MLP:
    mlp = MLP(inputs, outputs, num_cells=hidden_sizes, activation_class=torch.nn.Tanh)
    layers = [x for x in mlp if isinstance(x, torch.nn.Linear)]
    for layer in layers:
        scale = output_scale if layer is layers[-1] else math.sqrt(2)
        torch.nn.init.orthogonal_(layer.weight, scale)
        torch.nn.init.zeros_(layer.bias)
    return mlp


def main() -> None:
    args = parse_args("torchrl")
    log = RunLog(args, "eager")
    torch.manual_seed(args.seed)
    env = make_env(args)
    env.set_seed(args.seed)
    inputs = env.observation_spec["observation"].shape[-1]
    net = make_mlp(inputs, int(env.action_spec.space.n), args.hidden_sizes, 0.01)
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["logits"]),
        spec=env.action_spec,
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(make_mlp(inputs, 1, args.hidden_sizes, 1.0), ["observation"])
    total = num_iterations(args) * BATCH_SIZE
    collector = Collector(env, actor, frames_per_batch=BATCH_SIZE, total_frames=total)
    gae = GAE(gamma=args.gamma, lmbda=args.gae_lambda, value_network=critic, average_gae=False)
    loss_module = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=args.clip_coef,
        clip_value=args.clip_coef,
        entropy_coeff=args.ent_coef,
        critic_coeff=args.vf_coef / 2,  # TorchRL's value loss has no factor of 1/2
        loss_critic_type="l2",
        normalize_advantage=args.norm_adv,
    )
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(BATCH_SIZE),
        sampler=SamplerWithoutReplacement(),
        batch_size=BATCH_SIZE // args.num_minibatches,
    )
    optimizer = torch.optim.Adam(loss_module.parameters(), args.learning_rate, eps=args.adam_eps)
    updates = num_iterations(args) * args.update_epochs * args.num_minibatches
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, updates)

    log.begin()
    for data in collector:
        with torch.no_grad():
            gae(data)
        for _ in range(args.update_epochs):
            buffer.extend(data.reshape(-1))  # restarts the sampler
            for batch in buffer:
                losses = loss_module(batch)
                loss = losses["loss_objective"] + losses["loss_entropy"] + losses["loss_critic"]
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(loss_module.parameters(), args.max_grad_norm)
                optimizer.step()
                decay.step()
        last = data["next"][data["next", "done"].squeeze(-1)]  # the last steps of episodes
        returns = last["episode_reward"].flatten().tolist()
        log.write(describe(returns, last["step_count"].flatten().tolist()))
    collector.shutdown()
    log.finish()


if __name__ == "__main__":
    main()

"""Reference implementation of PPO in float64 NumPy, which shares no code with the scripts."""

from typing import Any

import numpy as np


def gae(reward, terminated, truncated, value, next_value, args: Any) -> np.ndarray:
    """Return advantages (T, N), computed for one environment and one step at a time."""
    num_steps, num_envs = reward.shape
    advantage = np.zeros((num_steps, num_envs))
    for n in range(num_envs):
        following = 0.0
        for t in reversed(range(num_steps)):
            ended = terminated[t, n] or truncated[t, n]
            has_future = not terminated[t, n] and (args.bootstrap_truncated or not truncated[t, n])
            target = reward[t, n] + (args.gamma * next_value[t, n] if has_future else 0.0)
            following = 0.0 if ended else following
            following = target - value[t, n] + args.gamma * args.gae_lambda * following
            advantage[t, n] = following
    return advantage


def forward(layers: list, x: np.ndarray) -> np.ndarray:
    for kernel, bias in layers[:-1]:
        x = np.tanh(x @ kernel + bias)
    return x @ layers[-1][0] + layers[-1][1]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def log_prob_and_entropy(weights: dict, obs, action) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probability of each action, and the entropy of its distribution.

    The distribution is Gaussian if weights has log_std, and categorical otherwise.
    """
    outputs = forward(weights["actor"], obs)
    if "log_std" not in weights:
        log_probs = log_softmax(outputs)
        chosen = np.take_along_axis(log_probs, action[..., None], -1)[..., 0]
        return chosen, -np.sum(np.exp(log_probs) * log_probs, -1)
    ((log_std,),) = weights["log_std"]
    variance = np.exp(log_std.astype(float)) ** 2
    density = np.exp(-((action - outputs) ** 2) / (2 * variance)) / np.sqrt(2 * np.pi * variance)
    return np.log(density.prod(-1)), np.sum(np.log(2 * np.pi * np.e * variance)) / 2


def ppo_loss(weights: dict, batch: tuple, args: Any) -> tuple[float, dict[str, float]]:
    obs, action, logprob, old_value, advantage, target = batch
    new_logprob, entropy = log_prob_and_entropy(weights, obs, action)
    value = forward(weights["critic"], obs)[:, 0]
    log_ratio = new_logprob - logprob
    ratio = np.exp(log_ratio)
    if args.norm_adv:
        advantage = (advantage - np.mean(advantage)) / (np.std(advantage) + 1e-8)
    low, high = 1 - args.clip_coef, 1 + args.clip_coef
    gains = np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage)
    errors = (value - target) ** 2
    if args.clip_vloss:
        near = old_value + np.clip(value - old_value, -args.clip_coef, args.clip_coef)
        errors = np.maximum(errors, (near - target) ** 2)
    policy_loss, value_loss = -np.mean(gains), 0.5 * np.mean(errors)
    entropy = np.mean(entropy)
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    return loss, {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": np.mean(ratio - 1 - log_ratio),
        "losses/clip_fraction": np.mean(np.abs(ratio - 1) > args.clip_coef),
    }


def flatten(weights: dict) -> np.ndarray:
    arrays = [x for layers in weights.values() for layer in layers for x in layer]
    return np.concatenate([np.ravel(x).astype(float) for x in arrays])


def unflatten(vector: np.ndarray, like: dict) -> dict:
    arrays = [x for layers in like.values() for layer in layers for x in layer]
    ends = np.cumsum([x.size for x in arrays])[:-1]
    parts = iter([x.reshape(y.shape) for x, y in zip(np.split(vector, ends), arrays, strict=True)])
    return {
        name: [tuple(next(parts) for _ in layer) for layer in layers]
        for name, layers in like.items()
    }


def gradient(weights: dict, batch: tuple, args: Any, loss_fn: Any = ppo_loss) -> np.ndarray:
    """Return the gradient of loss_fn as a flat array, computed by central differences."""
    step = 1e-6
    vector = flatten(weights)
    grads = np.zeros_like(vector)
    for i in range(len(vector)):
        bump = np.zeros_like(vector)
        bump[i] = step
        above, _ = loss_fn(unflatten(vector + bump, weights), batch, args)
        below, _ = loss_fn(unflatten(vector - bump, weights), batch, args)
        grads[i] = (above - below) / (2 * step)
    return grads


def episode_statistics(storage: tuple) -> dict[str, float]:
    terminated, truncated, _, episode_return, episode_length = storage[4:9]
    done = terminated | truncated
    metrics = {"charts/episodes": done.sum()}
    for name, x in (("return", episode_return[done]), ("length", episode_length[done])):
        metrics[f"charts/episodic_{name}"] = x.mean()
        metrics[f"charts/episodic_{name}_min"] = x.min()
        metrics[f"charts/episodic_{name}_max"] = x.max()
    return metrics


def normalized(storage: tuple, earlier: list[tuple], args: Any) -> tuple:
    """Return a rollout with normalized observations and rewards, as in update().

    Observations use the mean and variance of all earlier rollouts. Rewards use the variance of all
    discounted returns, including those of this rollout.
    """
    obs, action, logprob, reward, terminated, truncated, next_obs, *others = storage
    if args.norm_obs:
        mean, var = moments([x[0] for x in earlier])
        obs, next_obs = (
            np.clip((x - mean) / np.sqrt(var + 1e-8), -10, 10) for x in (obs, next_obs)
        )
    if args.norm_reward:
        _, var = moments([x[9] for x in (*earlier, storage)])
        reward = np.clip(reward / np.sqrt(var + 1e-8), -10, 10)
    return obs, action, logprob, reward, terminated, truncated, next_obs, *others


def moments(arrays: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and variance of arrays (T, N, ...) over all steps and environments."""
    rows = np.concatenate([x.reshape(-1, *x.shape[2:]) for x in arrays]).astype(float)
    return rows.mean(0), rows.var(0)


def update(weights: dict, storage: tuple, orders: list, args: Any) -> tuple[dict, dict]:
    """Train on storage for update_epochs with Adam. Return the weights and the metrics."""
    obs, action, logprob, reward, terminated, truncated, next_obs = storage[:7]
    value = forward(weights["critic"], obs)[..., 0]
    next_value = forward(weights["critic"], next_obs)[..., 0]
    advantage = gae(reward, terminated, truncated, value, next_value, args)
    rows = args.num_steps * args.num_envs
    batch = [obs, action, logprob, value, advantage, advantage + value]
    batch = [x.reshape(rows, *x.shape[2:]) for x in batch]
    weights, metrics = train(weights, batch, orders, args)
    metrics |= episode_statistics(storage)
    metrics["charts/learning_rate"] = args.learning_rate  # the rate of the first optimizer step
    metrics["losses/explained_variance"] = 1 - advantage.var() / (advantage + value).var()
    return weights, metrics


def train(weights: dict, batch: list, orders: list, args: Any, loss_fn: Any = ppo_loss) -> tuple:
    """Train for one epoch per permutation in orders. Return the weights and the metrics."""
    vector = flatten(weights)
    mean, square, count, losses = np.zeros_like(vector), np.zeros_like(vector), 0, []
    total = args.num_iterations * args.update_epochs * args.num_minibatches
    for order in orders:
        for rows_of_one in np.split(order, args.num_minibatches):
            minibatch = tuple(x[rows_of_one] for x in batch)
            current = unflatten(vector, weights)
            losses.append(loss_fn(current, minibatch, args)[1])
            grads = gradient(current, minibatch, args, loss_fn)
            grads *= min(1.0, args.max_grad_norm / np.linalg.norm(grads))
            rate = args.learning_rate * (1 - count / total if args.anneal_lr else 1)
            count += 1
            mean = 0.9 * mean + 0.1 * grads
            square = 0.999 * square + 0.001 * grads**2
            root = np.sqrt(square / (1 - 0.999**count)) + args.adam_eps
            vector = vector - rate * mean / (1 - 0.9**count) / root
    metrics = {name: np.mean([x[name] for x in losses]) for name in losses[0]}
    metrics["charts/param_norm"] = np.linalg.norm(vector)
    return unflatten(vector, weights), metrics

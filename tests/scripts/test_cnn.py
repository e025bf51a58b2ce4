"""PPO from images: networks, environments, invalid input, and learning."""

import importlib
import importlib.util
import math
import re
from functools import partial
from typing import Any

import gymnasium
import images
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from conftest import ROOT
from flax import nnx as flax_nnx
from flax.serialization import msgpack_restore
from frameworks import OTHER_FLAGS, make_env, make_learner
from running import info, main, rows, train
from sections import IMAGE_SCRIPTS, IMAGES_IN_TORCH

import ppo_cnn_linen_gymnasium as linen
import ppo_cnn_nnx_gymnasium as nnx
import ppo_cnn_torch_compile_gymnasium as compiled
import ppo_cnn_torch_gymnasium as pytorch

EACH = pytest.mark.parametrize("name", IMAGE_SCRIPTS)
SIZES: dict[str, Any] = {"conv_channels": (4, 8), "conv_kernels": (3, 2), "conv_strides": (2, 1)}
SIZES |= {"hidden_sizes": (16,), "matmul_precision": "highest"}
# Image shape, and whether the channels come first.
LAYOUTS = [((13, 10, 3), False), ((13, 10), False), ((3, 13, 10), True)]


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


def random_images(count, shape):
    return np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8)


def make_linen(shape, channels_first, **flags):
    args = linen.Args(**SIZES | flags)
    return linen.make_agent(args, shape, channels_first, 3, jax.random.key(0))


def make_nnx(shape, channels_first, params=None, **flags):
    """Create an agent, with the parameters of a Linen agent if given."""
    args = nnx.Args(**SIZES | flags)
    agent, _ = nnx.make_agent(args, shape, channels_first, 3, jax.random.key(0))
    if params:
        set_nnx(agent, params)
    return agent


def set_nnx(agent, params):
    """Copy parameters from Linen, whose order by name is the same."""
    structure = jax.tree.structure(flax_nnx.state(agent))
    flax_nnx.update(agent, jax.tree.unflatten(structure, jax.tree.leaves(params)))


def make_torch(shape, channels_first, script=pytorch, **flags):
    args = script.Args(**SIZES | flags)
    return script.make_agent(args, shape, channels_first, 3, torch.device("cpu"))[0]


def perturbed(x):
    """Return a perturbed parameter, so that no bias is 0 and outputs depend on the images."""
    return x + 0.3 * np.random.default_rng(x.size).normal(size=x.shape).astype("f")


def assert_equal(tree, other):
    """Assert that all arrays of two pytrees are exactly equal."""
    for x, y in zip(*map(jax.tree.leaves, (tree, other)), strict=True):
        np.testing.assert_array_equal(x, y)


# === Network ====================================================================================
def to_torch(params, size, permute=True):
    """Convert Linen parameters to a PyTorch state_dict, with the code in docs/extend.md."""
    text = (ROOT / "docs/extend.md").read_text().partition("## Export a policy")[2]
    of_hidden, of_convs = re.findall(r"`(kernel\.[^`]+)`", text)
    state = {}
    for name, layer in params["params"].items():
        kernel = np.array(layer["kernel"])
        places = dict(zip("HWC", size, strict=True)) | {"kernel": kernel}
        weight = kernel.T
        if "convs" in name:
            weight = eval(of_convs, places)
        elif name == "hidden_0" and permute:
            weight = eval(of_hidden, places)
        state[f"{name.replace('_', '.')}.weight"] = torch.tensor(weight.copy())
        state[f"{name.replace('_', '.')}.bias"] = torch.tensor(np.array(layer["bias"]))
    return state


@pytest.mark.parametrize(("shape", "channels_first"), LAYOUTS)
def test_linen_and_pytorch_agree_on_the_same_weights(shape, channels_first):
    """Without the permutation in docs/extend.md, loading succeeds but the outputs are wrong."""
    state = make_linen(shape, channels_first)
    params = jax.tree.map(perturbed, state.params)
    agent = make_torch(shape, channels_first)
    obs = random_images(16, shape)
    ours = state.apply_fn(params, obs)
    features = (5, 3, 8)  # height, width and channels after the convolutions
    errors = {}
    for permute in (True, False):
        agent.load_state_dict(to_torch(params, features, permute))
        with torch.no_grad():
            theirs = agent(torch.tensor(obs))
        pairs = zip(ours, theirs, strict=True)
        errors[permute] = max(abs(x - y.numpy()).max() for x, y in pairs)
    assert errors[True] < 1e-5 and errors[False] > 0.1
    np.testing.assert_allclose(state.apply_fn(params, obs, method="get_logits"), ours[0], atol=1e-6)
    np.testing.assert_allclose(state.apply_fn(params, obs, method="get_value"), ours[1], atol=1e-6)


@pytest.mark.parametrize(("shape", "channels_first"), LAYOUTS)
def test_linen_and_nnx_give_the_same_numbers_with_the_same_weights(shape, channels_first):
    state = make_linen(shape, channels_first)
    params = jax.tree.map(perturbed, state.params)
    agent = make_nnx(shape, channels_first, params)
    obs = random_images(16, shape)
    assert_equal(agent(obs), state.apply_fn(params, obs))
    assert_equal(agent.get_logits(obs), agent(obs)[0])
    assert_equal(agent.get_value(obs), agent(obs)[1])


@pytest.mark.parametrize(("shape", "channels_first"), LAYOUTS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_agents_in_both_pytorch_scripts_are_the_same(shape, channels_first, precision):
    agent = make_torch(shape, channels_first, precision=precision)
    other = make_torch(shape, channels_first, compiled, precision=precision)
    other.load_state_dict(agent.state_dict())
    obs = torch.tensor(random_images(16, shape))
    with torch.no_grad():
        pairs = [*zip(agent(obs), other(obs), strict=True)]
        pairs += [(agent.get_logits(obs), other.get_logits(obs))]
        pairs += [(agent.get_value(obs), other.get_value(obs))]
    for x, y in pairs:
        assert torch.equal(x, y)


def test_initial_weights_are_orthogonal():
    for name, layer in make_linen((13, 10, 3), False).params["params"].items():
        assert_orthogonal(np.array(layer["kernel"]).reshape(-1, layer["kernel"].shape[-1]), name)
        assert not layer["bias"].any()
    state = flax_nnx.state(make_nnx((13, 10, 3), False))
    for path, x in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        if "kernel" in name:
            assert_orthogonal(np.array(x).reshape(-1, x.shape[-1]), name)
        else:
            assert not x.any()
    for name, x in make_torch((13, 10, 3), False).state_dict().items():
        if "weight" in name:
            assert_orthogonal(x.flatten(1).numpy().T, name)
        else:
            assert not x.any()


def assert_orthogonal(kernel, name):
    (scale,) = {x for key, x in SCALES.items() if key in name}
    gram = kernel @ kernel.T if kernel.shape[0] < kernel.shape[1] else kernel.T @ kernel
    np.testing.assert_allclose(gram, scale**2 * np.eye(len(gram)), atol=1e-5)


SCALES = {"convs": math.sqrt(2), "hidden": math.sqrt(2), "actor": 0.01, "critic": 1}


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (4, 3), (2, 5)])
@pytest.mark.parametrize("strides", [(1, 1), (2, 2), (3, 2), (4, 3)])
def test_gradients_of_the_convolution_match_xla(kernel, strides):
    """Image sizes need not be multiples of the stride."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 13, 10, 3)).astype("f")
    w = rng.normal(size=(*kernel, 3, 4)).astype("f")

    def plain(x, w):
        return jax.lax.conv_general_dilated(
            x, w, strides, "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def ours(x, w):
        return linen.convolve(x, w, strides, "VALID", feature_group_count=1)

    def loss(x, w, convolve):
        return jnp.sin(convolve(x, w)).sum()

    grads = [jax.grad(loss, argnums=(0, 1))(x, w, convolve) for convolve in (ours, plain)]
    for our, their in zip(*grads, strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-4)


def test_the_convolution_rejects_padding():
    with pytest.raises(ValueError, match="padding='VALID'"):
        linen.convolve(np.ones((1, 5, 5, 1)), np.ones((3, 3, 1, 1)), (1, 1), "SAME")


@pytest.mark.parametrize("script", [linen, nnx])
def test_chunks_of_eight_images_give_the_same_features_and_gradients(script):
    state = make_linen((13, 10, 3), False)
    params = jax.tree.map(perturbed, state.params)
    get_features = partial(state.apply_fn, method="get_features")
    if script is nnx:
        params = make_nnx((13, 10, 3), False, params)  # in tree mode, an agent is a pytree
        get_features = nnx.Agent.get_features
    obs = random_images(24, (13, 10, 3))

    def loss(params, obs):
        return jnp.sin(get_features(params, obs)).sum()

    def has_loop(obs):
        return "scan" in str(jax.make_jaxpr(get_features)(params, obs))

    assert has_loop(obs) and not has_loop(obs[:8]) and not has_loop(obs[:20])
    parts = np.split(obs, 3)
    features = np.concatenate([get_features(params, x) for x in parts])
    np.testing.assert_allclose(get_features(params, obs), features, atol=1e-5)
    expected = jax.tree.map(lambda *x: sum(x), *[jax.grad(loss)(params, x) for x in parts])
    for x, y in zip(*map(jax.tree.leaves, (jax.grad(loss)(params, obs), expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_bfloat16_leaves_parameters_and_outputs_in_float32():
    """Convolutions and hidden layers use bfloat16, so the outputs differ by up to 3%."""
    obs = random_images(8, (13, 10, 3))
    state, exact = (make_linen((13, 10, 3), False, precision=x) for x in ("bfloat16", "float32"))
    outputs = [x.apply_fn(jax.tree.map(perturbed, x.params), obs) for x in (state, exact)]
    assert state.apply_fn(state.params, obs, method="get_features").dtype == np.float32
    kinds = {x.dtype for x in jax.tree.leaves((state.params, state.opt_state))}
    assert kinds == {np.dtype("f"), np.dtype("i")}
    params = jax.tree.map(perturbed, state.params)
    agent = make_nnx((13, 10, 3), False, params, precision="bfloat16")
    assert_equal(agent(obs), outputs[0])
    assert {x.dtype for x in jax.tree.leaves(agent)} == {np.dtype("f")}
    agents = []
    for precision in ("bfloat16", "float32"):
        torch.manual_seed(0)
        agents.append(make_torch((13, 10, 3), False, precision=precision))
    with torch.no_grad():
        outputs += [[x.numpy() for x in agent(torch.tensor(obs))] for agent in agents]
    assert {x.dtype for x in agents[0].parameters()} == {torch.float32}
    for low, high in (outputs[:2], outputs[2:]):
        for x, y in zip(low, high, strict=True):
            assert x.dtype == np.float32
            assert 0 < abs(x - y).max() < 0.03 * abs(y).max()


# === Environments ===============================================================================
def make(env_id, **flags):
    return pytorch.VecEnv(env_id, flags.pop("num_envs", 2), "sync", flags.pop("seed", 1), **flags)


@pytest.fixture
def arcade(monkeypatch):
    images.stand_in_for_ale_py(monkeypatch)

    def arcade(**flags):
        env = make("ALE/Arcade-v5", image_size=6, **flags)
        return env, images.Arcade.made

    return arcade


def game_and_step(obs):
    """Return the game number and the step for each observation."""
    return [tuple(x) for x in obs[:, 0, 0, :2].tolist()]


def test_every_transition_of_a_game(arcade):
    """A lost life ends an episode for learning only. Rewards are clipped, but returns are not."""
    env, games = arcade(sticky_actions=0.25)
    assert games.options["repeat_action_probability"] == 0.25
    assert not games.options["reward_clipping"] and "episodic_life" not in games.options
    assert env.channels_first and env.obs_shape == (4, 6, 6) and env.num_actions == 3
    assert game_and_step(env.reset()) == [(1, 0), (1, 0)]
    names = ("reward", "terminated", "truncated", "restart", "episode_return", "episode_length")
    # A row has a tuple per game: the values in names, then game_and_step() of next_obs and of obs.
    expected = [
        [(1, 0, 0, 0, 7, 1, (1, 1), (1, 1)), (1, 0, 0, 0, 1, 1, (1, 1), (1, 1))],
        [(0, 1, 0, 0, 7, 2, (1, 2), (1, 2)), (0, 0, 1, 1, 1, 2, (1, 2), (2, 0))],
        [(-1, 0, 0, 0, 4, 3, (1, 3), (1, 3)), (1, 0, 0, 0, 1, 1, (2, 1), (2, 1))],
        [(1, 1, 0, 1, 404, 4, (1, 4), (2, 0)), (0, 0, 1, 1, 1, 2, (2, 2), (3, 0))],
        [(1, 0, 0, 0, 7, 1, (2, 1), (2, 1)), (1, 0, 0, 0, 1, 1, (3, 1), (3, 1))],
    ]
    for step in expected:
        obs, results = env.step(np.zeros(2, np.int32))
        assert obs.dtype == results["next_obs"].dtype == np.uint8
        assert results["reward"].dtype == np.float32
        assert tuple(x for x in results if x != "next_obs") == pytorch.Storage._fields[5:]
        columns = [results[x].tolist() for x in names]
        columns += [game_and_step(results["next_obs"]), game_and_step(obs)]
        assert list(zip(*columns, strict=True)) == step


def test_a_lost_life_can_be_ignored(arcade):
    env, _ = arcade(terminal_on_life_loss=False)
    env.reset()
    ends = [env.step(np.zeros(2, np.int32))[1]["terminated"][0] for _ in range(5)]
    assert ends == [False, False, False, True, False]


def test_a_resumed_run_starts_new_games_with_new_seeds(arcade):
    env, games = arcade(num_envs=4)
    for iteration in (0, 7, 7, 8):
        env.reset(iteration)
    first, again, same, later = games.seeds
    np.testing.assert_array_equal(again, same)
    assert len(np.unique([first, again, later])) == 12


def test_statistics_cover_full_games_and_advantages_single_lives():
    shape = (3, 1)
    restart = np.array([[False], [False], [True]])
    terminated = np.array([[True], [False], [True]])
    zeros, ones = np.zeros(shape, "f"), np.ones(shape, "f")
    returns = np.array([[1], [2], [30]], "f")
    images_ = np.zeros((*shape, 2, 2), np.uint8)
    values = (zeros, 9 * ones)
    fields = (images_, zeros, zeros, *values, ones, terminated, terminated & False, restart)
    pairs: list[Any] = [(linen, jnp.array), (nnx, jnp.array)]
    pairs += [(pytorch, torch.tensor), (compiled, torch.tensor)]
    for script, converter in pairs:
        storage = script.Storage(*map(converter, (*fields, returns, returns)))
        statistics = {x: float(y) for x, y in script.episode_statistics(storage).items()}
        assert statistics["charts/episodes"] == 1
        assert statistics["charts/episodic_return"] == statistics["charts/episodic_length"] == 30
        assert statistics["charts/episodic_return_min"] == 30
        args = script.Args(num_envs=1, num_steps=4, total_timesteps=4)
        advantage = script.compute_gae(storage, storage.value, storage.next_value, args)
        assert float(advantage[0, 0]) == 1  # excludes the value of the next life


def test_every_transition_of_a_custom_environment():
    """When an episode ends, next_obs is its last observation, and obs starts the next one."""
    env_id = "envs.pixel_grid:PixelGrid-v0"
    env = make(env_id, num_envs=3)
    seeds = np.random.SeedSequence([1, 0]).generate_state(3) >> 1
    others = [gymnasium.make(env_id) for _ in seeds]
    starts = [x.reset(seed=int(seed))[0] for x, seed in zip(others, seeds, strict=True)]
    np.testing.assert_array_equal(env.reset(), starts)
    rng, total, kept, ends = np.random.default_rng(0), np.zeros(3), [], np.zeros(2, int)
    for _ in range(200):
        action = rng.integers(0, 4, 3)
        obs, results = env.step(action)
        kept += [(x, x.copy()) for x in (obs, results["next_obs"])]
        for i, other in enumerate(others):
            next_obs, reward, terminated, truncated, _ = other.step(action[i])
            total[i] += float(reward)
            ends += terminated, truncated
            expected = (reward, terminated, truncated, terminated or truncated, next_obs, total[i])
            for name, x in zip(list(results)[:6], expected, strict=True):
                np.testing.assert_array_equal(results[name][i], x, err_msg=name)
            if terminated or truncated:
                total[i], (next_obs, _) = 0, other.reset()
            np.testing.assert_array_equal(obs[i], next_obs)
    assert ends.all()
    for x, then in kept:  # later steps must not overwrite earlier results
        np.testing.assert_array_equal(x, then)


def test_rewards_of_a_custom_environment_are_not_clipped():
    env = make("ImageRewards-v0")
    env.reset()
    for action, reward in ((0, 0.3), (1, -2.5)):
        _, results = env.step(np.full(2, action))
        assert results["reward"].tolist() == [np.float32(reward)] * 2


def test_stripes_and_rewards_of_the_grid():
    env: Any = gymnasium.make("envs.pixel_grid:PixelGrid-v0").unwrapped
    seen = set()
    for seed in range(20):
        env.reset(seed=seed)
        goal, trap = env.cell(env.goal), env.cell(env.trap)
        assert (goal == goal[0]).all() and (trap == trap[:, :1]).all()
        assert goal.mean() == trap.mean() == 127.5 and (env.cell(env.player) == 255).all()
        seen.add((goal[0, 0], trap[0, 0]))
        for target, reward in ((env.goal, 1), (env.trap, -1)):
            for action, (down, right) in enumerate([(-1, 0), (0, 1), (1, 0), (0, -1)]):
                env.player = target - (down, right)
                if env.player.min() >= 0 and env.player.max() < 3:
                    assert env.step(action)[1:3] == (reward, True)
        env.player = np.array([0, 0])
        env.step(0)  # the wall stops the player
        assert env.player.tolist() == [0, 0]
    assert len(seen) == 4


@pytest.mark.skipif(not importlib.util.find_spec("ale_py"), reason="needs requirements-test.txt")
def test_atari():
    """Breakout continues after lost lives, and the same seed gives the same game."""
    flags = {"image_size": 36, "num_envs": 2}
    env, twin = make("ALE/Breakout-v5", **flags), make("ALE/Breakout-v5", **flags)
    sticky = make("ale_py:ALE/Breakout-v5", sticky_actions=0.9, **flags)
    assert env.obs_shape == (4, 36, 36) and env.channels_first and env.num_actions == 4
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(env.reset(), twin.reset())
    sticky.reset()
    lost, over, is_sticky, differ = 0, 0, False, False
    for _ in range(400):
        action = rng.integers(0, 4, 2)
        obs, results = env.step(action)
        other, same = twin.step(action)
        np.testing.assert_array_equal(obs, other)
        np.testing.assert_array_equal(results["next_obs"], same["next_obs"])
        is_sticky |= not np.array_equal(sticky.step(action)[0], obs)
        differ |= not np.array_equal(obs[0], obs[1])
        for i in range(2):
            is_same = np.array_equal(obs[i], results["next_obs"][i])
            assert is_same != results["restart"][i]
            lost += results["terminated"][i] & ~results["restart"][i]
            over += results["restart"][i]
    assert over >= 1 and lost >= 4 and is_sticky and differ


# === Rollout ====================================================================================
def linen_rollout(args, env):
    """Return the Storage of a rollout, and a function that computes the values of images."""
    state = linen.make_agent(args, env.obs_shape, False, env.num_actions, jax.random.key(0))
    params = jax.tree.map(perturbed, state.params)
    policy_fn = jax.jit(partial(linen.policy, apply_fn=state.apply_fn))
    value_fn = jax.jit(partial(state.apply_fn, method="get_value"))
    carry = params, env.reset(), jax.random.key(1)
    _, storage = linen.rollout(policy_fn, value_fn, *carry, env, args)
    return storage, partial(value_fn, params)


def nnx_rollout(args, env):
    agent, _ = nnx.make_agent(args, env.obs_shape, False, env.num_actions, jax.random.key(0))
    flax_nnx.update(agent, jax.tree.map(perturbed, flax_nnx.state(agent)))
    policy_fn = flax_nnx.jit_partial(nnx.policy, agent, graph=False)
    value_fn = flax_nnx.jit_partial(nnx.Agent.get_value, agent, graph=False)
    carry = env.reset(), jax.random.key(1)
    _, storage = nnx.rollout(policy_fn, value_fn, *carry, env, args)
    return storage, value_fn


def torch_rollout(script, args, env):
    agent, *_ = script.make_agent(args, env.obs_shape, False, env.num_actions, torch.device("cpu"))
    for x in agent.parameters():
        x.data = torch.from_numpy(perturbed(x.detach().numpy()))
    value_fn = torch.no_grad()(agent.get_value)
    obs = torch.from_numpy(env.reset())
    _, storage = script.rollout(partial(script.policy, agent), value_fn, obs, env, args)
    return storage, lambda x: value_fn(torch.from_numpy(x))


@EACH
def test_values_of_a_rollout(name, monkeypatch):
    """next_value is V(next_obs), even for truncated episodes and in the last step."""
    script = importlib.import_module(name)
    env_id = "envs.pixel_grid:PixelGrid-v0"
    args = script.Args(env_id=env_id, num_envs=8, num_steps=50, **SIZES)
    env, next_obs = make_env(script, args), []
    step = env.step

    def recording_step(action):
        obs, results = step(action)
        next_obs.append(results["next_obs"])
        return obs, results

    monkeypatch.setattr(env, "step", recording_step)
    if script is linen:
        storage, get_value = linen_rollout(args, env)
    elif script is nnx:
        storage, get_value = nnx_rollout(args, env)
    else:
        storage, get_value = torch_rollout(script, args, env)
    terminated, truncated = np.array(storage.terminated), np.array(storage.truncated)
    assert terminated.any() and truncated[:-1].any() and not terminated[-1].all()
    value = [np.array(get_value(x)) for x in np.array(storage.obs)]
    next_value = np.array([np.array(get_value(x)) for x in next_obs])
    np.testing.assert_allclose(storage.value, value, atol=1e-5)
    found = np.array(storage.next_value)
    np.testing.assert_allclose(found[~terminated], next_value[~terminated], atol=1e-5)


# === Update =====================================================================================
FLAGS: dict[str, dict[str, Any]] = {
    "small gradient": OTHER_FLAGS | {"max_grad_norm": 1e3},
    "large gradient": {"max_grad_norm": 0.1},
}
# The first step of Adam then subtracts the clipped gradient, so its size matters. Otherwise, Adam
# would change all parameters by about the learning rate.
PLAIN = {"adam_eps": 1e4, "learning_rate": 1e4, "update_epochs": 1, "num_minibatches": 1}


def random_storage(seed):
    rng = np.random.default_rng(seed)
    shape = (16, 4)
    return (
        rng.integers(0, 256, (*shape, 9, 8, 3), np.uint8),
        rng.integers(0, 2, shape).astype("i"),
        np.log(rng.uniform(0.2, 0.8, shape)).astype("f"),
        *rng.normal(size=(3, *shape)).astype("f"),
        *(rng.random((3, *shape)) < 0.15),
        rng.normal(size=shape).astype("f"),
        rng.integers(1, 9, shape).astype("f"),
    )


@pytest.mark.parametrize("flags", FLAGS)
def test_an_update_gives_the_same_parameters_and_metrics_in_all_scripts(flags):
    settings: dict[str, Any] = SIZES | FLAGS[flags] | PLAIN | {"env_id": "ImageConstant-v0"}
    ours = make_learner("ppo_cnn_linen_gymnasium", **settings)
    params = jax.tree.map(perturbed, ours.get_tree())
    ours.set_tree(params)
    expected = ours.update(random_storage(0), 0)
    changes = jax.tree.map(jnp.subtract, params, ours.get_tree())
    norm, limit = float(optax.global_norm(changes)), settings["max_grad_norm"]
    assert norm == pytest.approx(limit, 1e-3) if flags == "large gradient" else norm < 0.9 * limit

    in_nnx = make_learner("ppo_cnn_nnx_gymnasium", **settings)
    set_nnx(in_nnx.state, params)
    assert in_nnx.update(random_storage(0), 0) == expected
    assert_equal(in_nnx.get_tree(), ours.get_tree())

    features = (3, 2, 8)  # height, width and channels after the convolutions
    for name in IMAGES_IN_TORCH:
        learner = make_learner(name, **settings)
        learner.agent.load_state_dict(to_torch(params, features))
        assert learner.update(random_storage(0), 0) == pytest.approx(expected, rel=1e-4, abs=1e-5)
        state = learner.agent.state_dict()
        for place, x in to_torch(ours.get_tree(), features).items():
            np.testing.assert_allclose(state[place], x, rtol=1e-4, atol=1e-5, err_msg=place)


# === Invalid input ==============================================================================
BAD = [
    ("ImageFloats-v0", "", "must be uint8 images, not Box(0.0, 1.0, (9, 8, 3), float32); convert"),
    ("ImageNested-v0", "", "gymnasium.wrappers.TransformObs"),
    ("ImageStacked-v0", "", "gymnasium.wrappers.TransformObs"),
    ("CartPole-v1", "", "use more/ppo_linen_gymnasium.py"),
    ("ImageJoystick-v0", "", "must be Discrete with start=0, not Box"),
    ("ImageButtons-v0", "", "must be Discrete with start=0, not MultiDiscrete"),
    (
        "ImageConstant-v0",
        "--conv-kernels 8 4 3",
        "not 9 x 8; for small images, add --conv-channels",
    ),
    ("ImageFirst-v0", "", "not 3 x 9; for small images"),
    ("ImageConstant-v0", "--channels-first", "not 8 x 3; for small images"),
    ("ImageConstant-v0", "--conv-strides 1 1", "differ in length"),
    ("ImageConstant-v0", "--image-size 0", "--image-size must be at least 1"),
    ("ALE/Nothing-v5", "", "doesn't exist in namespace ALE"),
]


@pytest.mark.parametrize(("env_id", "flags", "sentence"), BAD)
def test_invalid_input_is_a_one_line_error(env_id, flags, sentence, tmp_path, monkeypatch, capfd):
    images.stand_in_for_ale_py(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    convs = "--conv-channels 4 4 4 --conv-kernels 3 3 1 --conv-strides 1 1 1"
    own = f"--env-id {env_id} {convs} --num-envs 2 {flags}"
    assert main("ppo_cnn_torch_gymnasium", *own.split()) == 2
    output, errors = capfd.readouterr()
    assert sentence in errors and "Traceback" not in errors
    assert errors.count("\n") == 1 or "--help" in errors
    assert output == "" and not list(tmp_path.iterdir())


def test_all_frameworks_reject_small_images_with_the_same_message(capsys):
    pairs: list[Any] = [(linen, jax.random.key(0)), (nnx, jax.random.key(0))]
    pairs += [(pytorch, torch.device("cpu"))]
    for script, key in pairs:
        with pytest.raises(SystemExit) as stopped:
            script.make_agent(script.Args(), (35, 84), False, 3, key)
        assert stopped.value.code == 2
        script.make_agent(script.Args(hidden_sizes=(4,)), (36, 36, 1), False, 3, key)
    first, *others = capsys.readouterr().err.splitlines()
    assert others == [first, first] and "need 36 x 36 pixels or more, not 35 x 84" in first


def test_without_ale_py_the_error_names_package_version_and_license(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        make("ALE/Pong-v5")
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1
    pin = re.search(r"^ale-py==\S+", (ROOT / "requirements-test.txt").read_text(), re.M)
    assert pin and f"pip install {pin[0]} (GPL-2.0" in error


# === Runs =======================================================================================
@pytest.mark.parametrize("name", IMAGE_SCRIPTS)
def test_load_policy_takes_raw_images_and_uses_the_weights_of_the_checkpoint(name, whole_run):
    """Greedy actions maximize the logits. Samples depend on the probabilities and the seed."""
    folder, script = whole_run(name).folder, importlib.import_module(name)
    _, args = script.load_info(folder)
    obs = random_images(64, (9, 8, 3))
    if "linen" in name:
        saved = msgpack_restore((folder / "checkpoint.msgpack").read_bytes())
        agent = linen.Agent(args.conv_layers, args.hidden_sizes, 2, False, "float32")
        logits, _ = agent.apply(saved["train_state"]["params"], obs)
    elif "nnx" in name:
        saved = msgpack_restore((folder / "checkpoint.msgpack").read_bytes())
        agent = nnx.Agent(args, (9, 8, 3), False, 2, flax_nnx.Rngs(0))
        set_nnx(agent, saved["train_state"]["agent"])
        logits, _ = agent(obs)
    else:
        agent = script.Agent(args, (9, 8, 3), False, 2)
        agent.load_state_dict(torch.load(folder / "checkpoint.pt", weights_only=True)["agent"])
        with torch.no_grad():
            logits = agent(torch.tensor(obs))[0].numpy()
    action = script.load_policy(folder)(obs)
    assert isinstance(action, np.ndarray)
    np.testing.assert_array_equal(action, np.argmax(logits, -1))
    many = obs[:1].repeat(5000, axis=0)
    draws = [script.load_policy(folder, seed=seed)(many, sample=True) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).any()
    chance = 1 / (1 + np.exp(logits[0, 0] - logits[0, 1]))
    assert abs(draws[0].mean() - chance) < 5 * np.sqrt(chance * (1 - chance) / 5000)


@pytest.mark.parametrize(
    ("env_id", "flags"),
    [
        ("ImageGray-v0", ""),
        ("ImageGray-v0", "--channels-first"),
        ("ImageFirst-v0", "--channels-first"),
    ],
)
@pytest.mark.parametrize("name", [linen.__name__, pytorch.__name__])
def test_other_layouts_train(name, env_id, flags, tmp_path):
    words = f"--env-id {env_id} {flags} {images.SMALL_CONVS}".split()
    folder = train(name, tmp_path, "run", *words, iterations=1)
    shape = tuple(info(folder)["obs_shape"])
    assert shape == gymnasium.make(env_id).observation_space.shape
    action = importlib.import_module(name).load_policy(folder)(random_images(5, shape))
    assert action.shape == (5,)
    change = "--no-channels-first" if flags else "--channels-first"
    assert main(name, "--resume", folder, change, "--total-timesteps", 10_000) == 2


GRID = "--env-id envs.pixel_grid:PixelGrid-v0 --num-envs 32 --num-steps 32 --num-minibatches 4 "
GRID += "--update-epochs 4 --hidden-sizes 64 --learning-rate 2e-3 --no-anneal-lr --gamma 0.9 "
GRID += "--clip-coef 0.2 --total-timesteps 24576 --conv-channels 16 32 --conv-strides 1 2 "
PIXELS = ("ppo_cnn_torch_gymnasium", "--conv-kernels 1 1", False)


@pytest.mark.parametrize(
    ("name", "flags", "learns"),
    [
        ("ppo_cnn_linen_gymnasium", "--conv-kernels 3 3", True),
        ("ppo_cnn_torch_gymnasium", "--conv-kernels 3 3", True),
        ("ppo_cnn_torch_gymnasium", "--conv-kernels 3 3 --precision bfloat16", True),
        PIXELS,
    ],
)
def test_convolutions_learn_what_single_pixels_do_not_reveal(name, flags, learns, tmp_path):
    """The best possible mean return is 1. Without recognizing stripes, an agent gets at most 0.

    test_nnx_gives_the_same_numbers_as_linen covers NNX.
    """
    logged = rows(train(name, tmp_path, "run", *GRID.split(), *flags.split()))
    final = np.mean([row["charts/episodic_return"] for row in logged[-4:]])
    assert final > 0.6 if learns else final < 0.2

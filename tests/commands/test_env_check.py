"""Custom environments: the commands in docs/environments.md, and envs/check.py."""

import importlib
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import images
import numpy as np
import pytest
import tyro
from conftest import ROOT, wait_for
from gymnasium.spaces import Box, MultiDiscrete
from running import main, stop
from sections import ROWS, path_of

import evaluate
import ppo_cnn_torch_gymnasium
from envs import check, speed

PAGE = (ROOT / "docs/environments.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
VERDICTS = re.findall(r"^```text\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
MODULES = ("lander", "lander_gymnasium", "flat", "windy")
SMALL = ["--num-envs=2", "--num-steps=32", "--num-minibatches=2", "--update-epochs=1"]
SMALL += ["--total-timesteps=128"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Write the modules in docs/environments.md to the current folder, and unload them later."""
    for name, text in zip(MODULES, EXAMPLES, strict=True):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    importlib.invalidate_caches()
    yield tmp_path
    for name in (*MODULES, "given", "broken"):
        sys.modules.pop(name, None)
    for name in ("Lander-v0", "LanderFlat-v0", "Breeze-v0", "Storm-v0", "MyEnv-v0"):
        gymnasium.registry.pop(name, None)


# === Commands on the page =======================================================================
def words_of(block):
    """Return the commands in a code block on the page, each as a list of Python arguments."""
    lines = COMMANDS[block].replace("~/ppo-rosetta", str(ROOT)).splitlines()
    return [shlex.split(line)[1:] for line in lines]


def output_of(*words):
    """Run Python, which must succeed without output on stderr, and return stdout."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def assert_evaluates(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", [*words, "--episodes=3", "--max-steps=30"])
    evaluate.main()
    assert Path(words[-1]).read_bytes().startswith(b"GIF")


def test_files_in_the_current_folder_do_not_hide_packages(here):
    """Neither random.py nor envs/ in the current folder shadows another module."""
    (here / "random.py").write_text("raise RuntimeError\n")
    (here / "envs").mkdir()
    (here / "envs/__init__.py").write_text("raise RuntimeError\n")
    (script, *_), *_ = words_of(1)
    output = output_of(script, "lander_gymnasium:Lander-v0", "--no-async-test")
    assert output.endswith(ok("lander_gymnasium:Lander-v0", "Gymnasium"))
    assert "async" not in output
    speed = check.measure_speed("lander_gymnasium:Lander-v0", "async", 1)
    assert isinstance(speed, float)


def ok(env_id, setting, words=(), flags=()):
    """Return the last lines of a successful check: one command per framework."""
    lines = [f"{env_id}: OK. Train with one of these:"]
    rows = [x for x in ROWS.items() if (x[1]["algorithm"], x[1]["setting"]) == ("ppo", setting)]
    for framework in ("linen", "nnx", "equinox", "torch"):
        scripts = [name for name, row in rows if row["framework"] == framework]
        if scripts:
            script = scripts[-1 if framework == "nnx" else 0]  # the last one uses tree mode
            command = shlex.join(["python", str(path_of(script)), *words, "--env-id", env_id])
            line = " ".join(["   ", command, *flags])
            lines.append(f"{line}  # {check.FRAMEWORKS[framework]}")
    return "\n".join([*lines, ""])


def test_the_commands_for_gymnax(here, monkeypatch, capsys):
    """Train, stop, resume, evaluate, and draw a GIF."""
    sys.path.remove(str(here))  # the script must add the folder
    _, (_, *train_it), evaluate_it = words_of(1)
    _, resume_it = words_of(8)
    # Import the script here, because other tests reload it.
    run_log = importlib.import_module("ppo_linen").RunLog
    write = run_log.write

    def write_and_stop(log, *args):
        stop(log)
        write(log, *args)

    with monkeypatch.context() as patch:
        patch.setattr(run_log, "write", write_and_stop)
        assert main("ppo_linen", *train_it, *SMALL) == 128 + signal.SIGTERM
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == f"Stopped. To continue, add --resume {resume_it[2]}"
    assert main("ppo_linen", *resume_it[1:]) == 0
    assert_evaluates(evaluate_it, monkeypatch)


def test_the_commands_for_gymnasium(monkeypatch):
    (_, env_id), train_it, evaluate_it = words_of(2)
    check.main(env_id)
    assert main(Path(train_it[0]).stem, *train_it[1:], *SMALL) == 0
    assert_evaluates(evaluate_it, monkeypatch)


def test_the_commands_for_arguments(capsys):
    """Each id passes different arguments to the environment."""
    for (_, _, env_id, *_), wind in zip(words_of(4), (0.001, 0.01), strict=True):
        check.main(env_id)
        assert f"{env_id}: OK" in capsys.readouterr().out
        env: Any = gymnasium.make(env_id).unwrapped
        assert env.wind == wind


def test_the_commands_for_one_simulator_per_process(here, monkeypatch):
    """Each worker process imports the module."""
    train_it, evaluate_it = words_of(7)
    small = [x for x in SMALL if "num-envs" not in x]
    output_of(*train_it, *small)
    # Four processes run two episodes each, and one process runs an episode for the GIF.
    monkeypatch.setattr(sys, "argv", [*evaluate_it, "--episodes=8", "--max-steps=30"])
    evaluate.main()
    assert (here / "third.gif").exists()


def without_numbers(text):
    return re.sub(r"[\d.,]+", "0", text)


def test_the_page_quotes_the_messages_of_the_check(monkeypatch, capsys):
    images.stand_in_for_ale_py(monkeypatch)
    monkeypatch.setattr(check, "PROGRESS_AFTER", 100.0)  # no progress lines on a busy machine
    speeds = {"sync": 100.0, "async": 10.0, "vector_entry_point": 1000.0}
    monkeypatch.setattr(check, "measure_speed", lambda env_id, name, num_envs: speeds[name])
    checks: list[Any] = [
        ("lander:Lander", False),
        ("lander_gymnasium:Lander-v0", True),
        ("envs.pixel_grid:PixelGrid-v0", False),
        ("ALE/Arcade-v5", True),
    ]
    for (env_id, async_test), verdict in zip(checks, VERDICTS, strict=True):
        check.main(env_id, async_test=async_test)
        output = capsys.readouterr().out.replace(f"{ROOT}/", "").replace("Arcade", "Breakout")
        verdict = verdict.replace("/home/me/ppo-rosetta/", "")
        assert without_numbers(output) == without_numbers(verdict)


# === Rules ======================================================================================
NAMES = {
    "": "give my_module:MyEnv, or my_module:MyEnv-v0 for Gymnasium, not ''",
    "no_such_module.sub:MyEnv": "there is no module no_such_module.sub in ",
    "lander:Nope": "lander has no class Nope and registers no such id",
    "lander_gymnasium:Lander": "a Gymnasium environment: give the id under which it is registered",
}
IN_50 = "observation_space = lambda *x: Box(-50, 50, (2,))"
IN_BYTES = "observation_space = Box(0, 255, (2,), np.uint8); "
IN_BYTES += "observe = lambda *x: np.zeros(2, np.uint8)"
BOX_ACTIONS = "action_space = lambda *x: Box(-1, 1, (1,))"
# Line to add to the class body of a gymnax environment -> part of the error message. In these
# lines, obs is an array of two zeros.
GYMNAX = {
    "action_space = environment.Environment.action_space": "MyEnv has no action_space, which gymn",
    "default_params = environment.Environment.default_params": "MyEnv has no default_params, whic",
    "default_params = (0,)": "default_params.max_steps_in_episode: define both, or override is_tr",
    "action_space = lambda *x: Dict({})": "action_space must be Discrete or a Box, not Dict({})",
    "action_space = lambda *x: Box(-1, np.inf, (1,))": "must have finite bounds, not Box(",
    "action_space = lambda *x: Box(1, -1, (1,))": "needs low <= high, not Box(low=1, hi",
    "action_space = lambda *x: Box(-1, 1, (2, 2))": "actions in a Box must be vectors, not Box(lo",
    "observation_space = lambda *x: Dict({})": "must be a gymnax Box, not Dict({})",
    "observation_space = lambda *x: Box(-1, 1, ())": "at least one axis: use the shape (1,)",
    "observe = lambda *x: jnp.zeros(3)": "the shape of observation_space, (2,), not ShapeDtype",
    "reset = lambda *x: (obs, jax.random.key(0))": "random keys in state must come from jax.random",
    "step = Lander.step_env": "step must return obs, state, reward, terminated, truncated, info\n",
    "reset = lambda *x: (obs, State(0, 0.0, 0))": "must not change state.height from int32 () to f",
    "step_env = lambda *x: (obs, x[2], (0, 0), False, {})": "reward must be one number, not (Shape",
    "step_env = lambda *x: (obs, x[2], 0.0, 0, {})": "terminated and truncated must be one boolean",
    "step = lambda *x, params: (*Lander.step(*x, params)[:5], {})": "must have final_observation",
    # The check finds these errors only by taking random steps.
    "step_env = lambda *x: ends_at(100, *Lander.step_env(*x))": "100, max_steps_in_episode, all",
    "observation_space = lambda *x: Box(-99, [99, 0], (2,))": "side observation_space (-99 to 0)",
    "observation_space = lambda *x: Box([-99, 0], 99, (2,))": "side observation_space (0 to 99)",
    f"{IN_50}; step = lambda *x, params: ends_far(*Lander.step(*x, params))": "obs[0] is 99.0, o",
    "observe = lambda *x: obs / 0": "obs must be finite numbers in float32, not [nan nan]",
    "step_env = lambda *x: (obs, x[2], jnp.nan, False, {})": "must be a finite number, not [nan]",
    f"{BOX_ACTIONS}; step_env = lambda *x: breaks_at_1(*x)": "finite after action [1.], a bound",
    "render = lambda *x: np.zeros((64, 64, 3))": "(height, width, 3), not float64 (64, 64, 3)",
    "step = lambda *x, params: continues(*Lander.step(*x, params))": "no episode ended within 2,0",
    "observe = lambda *x: obs + np.random.rand()": "numbers must come from jax.random and the key",
}
# The same for a Gymnasium environment.
GYMNASIUM = {
    "action_space = property()": "MyEnv-v0 has no action_space, which Gymnasium needs",
    "action_space = Discrete(2, start=1)": "actions must count from 0, not Discrete(2, st",
    "action_space = MultiDiscrete([2, 2])": "action_space must be Discrete or a Box, not MultiDis",
    "action_space = Box(-np.inf, 1, (1,))": "must have finite bounds, not Box(-inf, 1.0, (1",
    "action_space = Box(-9, 9, (1,), np.int8)": "in a Box must be floats, not int8 as in Box(",
    "step = lambda *x: (obs, 0.0, False, {})": "must return obs, reward, terminated, truncated, i",
    "observation_space = Box(-1, 1, ())": "at least one axis: use the shape (1,)",
    "observe = lambda *x: np.zeros(3)": "obs of reset must be float32 (2,), as observation_space",
    "step = lambda *x: (np.zeros((2, 1)), 0, 0, 0, {})": "obs of step must be float32 (2,), as obs",
    f"{IN_BYTES}; observe = lambda *x: obs": "obs of reset must be uint8 (2,), as observation",
    f"{IN_BYTES}; step = lambda *x: (obs, 0, 0, 0, {{}})": "obs of step must be uint8 (2,), as obs",
    "step = lambda *x: (obs, None, False, False, {})": "must be one number each, not array(None",
    "step = lambda *x: (obs, np.nan, 0, 0, {})": "reward must be a finite number in float32, not n",
    "step = lambda *x: (obs, 1e39, 0, 0, {})": "reward must be a finite number in float32, not 1e+",
    "observe = lambda *x: obs + 1e39": "obs must be finite numbers in float32, not [1.e+39 1.e+39]",
    "observation_space = Box(-9, np.float32([9, 0]))": "outside observation_space (-9.0 to 0.0)",
    "observation_space = Box(np.float32([-9, 0]), 9)": "outside observation_space (0.0 to 9.0)",
    "observe = lambda *x: np.float32([0, np.nan])": "finite numbers in float32, not [ 0. nan]",
    "observe = lambda *x: np.random.rand(2)": "the same seed must give the same obs and rewards",
    "observe = lambda self: np.copyto(obs, self.height) or obs": "self, or train with --vectorizat",
    "all = {}; height = property(lambda x: x.all[0], lambda x, y: x.all.update({0: y}))": "instanc",
    "observation_space = Dict({})": "a Box, not Dict(): docs/environments.md shows how to flatten",
    "__init__ = lambda self: None": "__init__ must take render_mode and set self.render_mode",
    "__init__ = lambda self, render_mode=None: None": "__init__ must take render_mode and set",
    "render = lambda *x: np.zeros((64, 64))": "uint8 (height, width, 3), not float64 (64, 64)",
}


def write_gymnax(change):
    """Write a module with MyEnv, which is Lander with one added line. Return the environment id."""
    text = "from gymnax.environments.spaces import Box, Dict, Discrete\nfrom lander import *\n"
    text += "obs = jnp.zeros(2)\ndef ends_at(limit, obs, state, reward, terminated, info):\n"
    text += "    return obs, state, reward, terminated | (state.time >= limit), info\n"
    text += "def continues(obs, state, reward, terminated, truncated, info):\n"
    text += "    return obs, state, reward, terminated & False, truncated & False, info\n"
    text += "def ends_far(*results):\n    return *results[:5], {'final_observation': obs + 99}\n"
    text += "def restarts_late(obs, *results):\n"
    text += "    return results[-1]['final_observation'], *results\n"
    text += "def breaks_at_1(*x):\n"
    text += "    return obs / (x[3][0] < 1), x[2], 0.0, x[3][0] > 0, {}\n"
    text += f"class MyEnv(Lander):\n    {change}\n"
    Path("given.py").write_text(text)
    return "given:MyEnv"


def write_gymnasium(change, limit=100):
    text = "import sys\nfrom gymnasium.spaces import *\nfrom lander_gymnasium import *\n"
    text += "obs = np.zeros(2)\n"
    text += "def counted(self):\n    self.time += 1\n"
    text += "    return obs, self.time, self.time >= 20, False, {}\n"
    text += f"class MyEnv(Lander):\n    {change}\n"
    text += f"gymnasium.register('MyEnv-v0', MyEnv, max_episode_steps={limit})\n"
    Path("given.py").write_text(text)
    return "given:MyEnv-v0"


def write_endless(change):
    return write_gymnasium(change, limit=None)


def write_limited(max_episode_steps):
    """Write a Gymnasium environment that terminates at step 20. Return its id."""
    text = """from lander_gymnasium import *
class MyEnv(Lander):
    def reset(self, **options):
        self.time = 0
        return super().reset(**options)
    def step(self, action):
        self.time += 1
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or self.time >= 20, truncated, info
"""
    text += f"gymnasium.register('MyEnv-v0', MyEnv, max_episode_steps={max_episode_steps})\n"
    Path("given.py").write_text(text)
    return "given:MyEnv-v0"


RULES: list[Any] = [(write_gymnax, *x) for x in GYMNAX.items()]
RULES += [(write_gymnasium, *x) for x in GYMNASIUM.items()]
RULES += [
    (write_limited, 20, "reached step 20 terminated there, but that is the time limit: do not")
]
RULES += [
    (write_endless, "step = lambda *x: (obs, 0, 0, 0, {})", "no episode ended within 5,000 ra")
]
RULES += [(str, *x) for x in NAMES.items()]


@pytest.mark.parametrize(("write", "change", "sentence"), RULES)
def test_a_broken_rule_is_a_one_line_error(write, change, sentence, capsys):
    env_id = write(change)
    with pytest.raises(SystemExit) as stopped:
        check.main(env_id)
    output, errors = capsys.readouterr()
    assert (stopped.value.code, errors.count("\n")) == (2, 1)
    assert sentence in errors and "OK" not in output


def test_the_module_that_flattens_observations(capsys):
    check.main("flat:LanderFlat-v0")
    assert "flat:LanderFlat-v0: OK" in capsys.readouterr().out
    env = gymnasium.make("flat:LanderFlat-v0", render_mode="rgb_array")
    assert env.observation_space.shape == (2,) and env.render_mode == "rgb_array"


TENTH = "action_space = Box(-0.1, 0.1, (1,), {}); step = lambda self, action: bounded(self, action)"
BOUNDED = """
def bounded(self, action):
    assert MyEnv.action_space.contains(action)
    assert EXTRA
    return Lander.step(self, action[0] > 0)
"""


@pytest.mark.parametrize("dtype", ["np.float32", "np.float64"])
@pytest.mark.parametrize("side", ["low", "high"])
def test_actions_at_both_bounds_are_tested(dtype, side):
    """The check sends both bounds. Rounding 0.1 to float32 must not move them out of the space."""
    env_id = write_gymnasium(TENTH.format(dtype))
    text = Path("given.py").read_text() + BOUNDED
    Path("given.py").write_text(text.replace("EXTRA", "True"))
    check.main(env_id)
    sys.modules.pop("given")
    gymnasium.registry.pop("MyEnv-v0")
    Path("given.py").write_text(text.replace("EXTRA", f"action[0] != MyEnv.action_space.{side}[0]"))
    with pytest.raises(AssertionError) as caught:
        check.main(env_id)
    assert f"action_space.{side}. Training sends it, too." in caught.value.__notes__[0]


# === Hints ======================================================================================
SAME_SEEDS = "Seeds 0 and 1 gave the same obs and rewards"
IMAGE = "observation_space = Box(0, 255, (9, 9), np.uint8); "
IMAGE += "observe = lambda *x: np.full((9, 9), {}, np.uint8)"
DARK_PIXELS = "All pixels are 0 or 1, but training divides them by 255"
HINTS: list[Any] = [
    (
        write_gymnax,
        "step_env = lambda *x: ends_at(20, *Lander.step_env(*x))",
        "random episodes that reached step 20 terminated there: if that is a time limit, return",
    ),
    (
        write_limited,
        None,
        "random episodes that reached step 20 terminated there: if that is a tim",
    ),
    (write_gymnasium, "metadata = {}", "a GIF will show the observations instead of an image"),
    (
        write_gymnasium,
        "render = lambda *x: 1 / 0",
        "A GIF cannot be drawn here: ZeroDivisionError:",
    ),
    (
        write_gymnasium,
        "observe = lambda self: np.float64([self.height, 0])",
        "obs are float64, but observation_space is float32: return obs.astype(np.float32), or",
    ),
    (
        write_gymnasium,
        "made = []; __init__ = lambda self, **options: 1 / (not self.made) and self.made.append(1)",
        "A second instance in the same process failed (ZeroDivisionError: division by zero), so",
    ),
    (
        write_gymnasium,
        "metadata = {}; made = []; close = lambda self: self.made.clear(); "
        "__init__ = lambda self, **options: 1 / (not self.made) and self.made.append(1)",
        "Using two instances at the same time failed (ZeroDivisionError: division by zero): use",
    ),
    (
        write_gymnasium,  # the second instance ends its process
        "metadata = {}; made = []; close = lambda self: self.made.clear(); "
        "__init__ = lambda self, **options: self.made and sys.exit() or self.made.append(1)",
        "Using two instances at the same time failed (the process ended without an error message)",
    ),
    (
        write_gymnasium,
        "time = 0; step = lambda self, action: counted(self)",
        "does reset set every variable?",
    ),
    (
        write_gymnasium,
        "reset = lambda self, **options: Lander.reset(self, seed=7)",
        SAME_SEEDS,
    ),
    (
        write_gymnasium,
        "step = lambda *x: (lambda obs, reward, end, _, info: (obs, reward, 0, end, info))"
        "(*Lander.step(*x))",
        "No episode terminated, but episodes of different lengths were truncated",
    ),
    (
        write_gymnasium,
        IMAGE.format(1) + "; step = lambda self, _: (self.observe(), 10, True, False, {})",
        DARK_PIXELS,
    ),
    (
        write_gymnasium,
        "observation_space = Box(0, 2**40, (2,), np.int64); observe = lambda *x: obs.astype(int)",
        "Training converts obs from int64 to float32, which rounds integers above 2**24.\n",
    ),
    (
        write_gymnasium,
        "observation_space = Box(-99, 99, (2,), np.float64)",
        "Training converts obs from float64 to float32.\n",
    ),
    (
        write_gymnasium,
        "__new__ = lambda *x, **y: gymnasium.wrappers.NormalizeObservation(Lander(**y))",
        "NormalizeObservation keeps running statistics, which checkpoints do not contain",
    ),
    (
        write_gymnax,
        "step = lambda *x, params: restarts_late(*Lander.step(*x, params))",
        "step must return the first obs of the next episode",
    ),
]


@pytest.mark.parametrize(("write", "change", "sentence"), HINTS)
def test_hints(write, change, sentence, capsys):
    env_id = write(change)
    check.main(env_id)
    output = capsys.readouterr().out
    assert sentence in output and f"{env_id}: OK. Train with one of these:" in output


def test_an_environment_that_is_too_slow_to_end_an_episode_is_accepted(monkeypatch, capsys):
    """The limit of SECONDS stops the random steps, so they cannot show whether episodes end."""
    monkeypatch.setattr(check, "SECONDS", 0.01)
    env_id = write_endless("step = lambda *x: (obs, 0, False, False, {})")
    check.main(env_id)
    assert f"{env_id}: OK. Train with one of these:" in capsys.readouterr().out


NO_HINTS = [
    ("step = lambda *x: (obs, 0, True, False, {})", SAME_SEEDS),  # only reset is random
    (IMAGE.format(0), DARK_PIXELS),
]


@pytest.mark.parametrize(("change", "sentence"), NO_HINTS)
def test_wrong_hints(change, sentence, capsys):
    check.main(write_gymnasium(change))
    assert sentence not in capsys.readouterr().out


def test_the_time_of_a_compiled_step(monkeypatch, capsys):
    """The clock says that the 2,000 random steps took 0.1 s."""
    clock = SimpleNamespace(perf_counter=iter([7.0, 7.1]).__next__)
    monkeypatch.setattr(check, "time", clock)
    check.main("lander:Lander")
    assert "\n50 µs per compiled step of 16 environments.\n" in capsys.readouterr().out


def test_the_compared_observations_are_limited(monkeypatch):
    """Repeating many steps with images would need gigabytes of memory."""
    monkeypatch.setattr(check, "REPEATED_NUMBERS", 30)
    env = gymnasium.make("lander_gymnasium:Lander-v0")
    played = check.play(env, 100, 50)
    assert (played.num_steps, played.numbers.size) == (50, 30)


U8 = np.uint8
IMAGES: list[Any] = [
    (Box(0, 255, (84, 80), U8), "Observations are images: (H, W) = (84, 80).\n", True),
    (Box(0, 255, (4, 84, 80), U8), "images: (C, H, W) = (4, 84, 80).\n", True),
    (Box(0, 255, (84, 80, 3), U8), "images: (H, W, C) = (84, 80, 3).\n", True),
    (Box(0, 255, (10, 10, 4), U8), "images: (H, W, C) = (10, 10, 4).\n", True),
    (
        Box(0, 1, (84, 80, 3)),
        "Images should be uint8 from 0 to 255, not float32: use gymnasium.wrappers."
        "TransformObservation to train a CNN.\n",
        False,
    ),
    (Box(0, 9, (84, 80, 3), U8), "uint8 images should be 0 and 255, not 0 to 9.\n", False),
    (Box(0, 255, (4, 10), U8), "", False),
    (Box(-1, 1, (376,)), "", False),
]


@pytest.mark.parametrize(("space", "sentence", "fits_cnn"), IMAGES)
def test_images(space, sentence, fits_cnn, capsys):
    assert check.check_images(space) == fits_cnn
    output = capsys.readouterr().out
    assert output.endswith(sentence) and bool(output) == bool(sentence)


def test_the_default_and_the_small_convolutions_fit_the_smallest_images():
    for size, flags in [(check.MIN_LARGE_IMAGE, []), (check.MIN_IMAGE, check.SMALL_CONVS)]:
        args = tyro.cli(ppo_cnn_torch_gymnasium.Args, args=flags)
        ppo_cnn_torch_gymnasium.check_image_size(args, (size, size), False)
        with pytest.raises(SystemExit):
            ppo_cnn_torch_gymnasium.check_image_size(args, (size - 1, size), False)


# === Correct environments =======================================================================
CONTINUOUS = "step_env = lambda *x: Lander.step_env(*x[:3], x[3][0] > 0, x[4])"
CUSTOM_STEP = "step = lambda self, *x, **y: Lander().step(*x, **y); "
CUSTOM_STEP += "step_env = environment.Environment.step_env"  # abstract, but never called
CORRECT: list[Any] = [
    (write_gymnax, "reset_env = lambda *x: (obs, State(1.0, 0.0, 0))"),  # weakly typed arrays
    (write_gymnax, CUSTOM_STEP),
    (write_gymnax, f"action_space = lambda *x: Box(-1, 1, (1,)); {CONTINUOUS}"),
    (write_gymnasium, "step = lambda *x: (obs, 1, np.bool_(x[1]), 0, {})"),
    (
        write_gymnasium,
        "action_space = Box(-1, 1); step = lambda *x: Lander.step(x[0], x[1][0] > 0)",
    ),
    (  # the bounds of the second action are equal
        write_gymnasium,
        "action_space = Box(np.float32([-1, 0]), np.float32([1, 0])); "
        "step = lambda *x: Lander.step(x[0], x[1][0] > 0)",
    ),
]


@pytest.mark.parametrize(("write", "change"), CORRECT)
def test_correct_environments(write, change, capsys):
    env_id = write(change)
    check.main(env_id)
    speed, played = capsys.readouterr().out.partition(f"\n{env_id}: OK")[0].splitlines()[-2:]
    assert re.match(r"[0-9.,]+ \N{MICRO SIGN}s per ", speed)
    assert played.endswith(" random steps.")


SETTINGS = [
    ((False, (), (4,)), False, "plain", []),
    ((True, (3,), (4,)), False, "continuous", []),
    ((False, (), (4,)), True, "Gymnasium", []),
    ((True, (1,), (3,)), True, "continuous, Gymnasium", []),
    ((True, (6,), (17,)), True, "continuous, Gymnasium", ["mujoco"]),
    ((False, (), (84, 84), True), True, "images", []),
    ((False, (), (3, 36, 84), True), True, "images", ["--channels-first"]),
    ((False, (), (1, 9, 8), True), True, "images", ["--channels-first", *check.SMALL_CONVS]),
    ((False, (), (12, 12, 1), True), True, "images", check.SMALL_CONVS),
    ((False, (), (84, 84, 3), False), True, "Gymnasium", []),
]


@pytest.mark.parametrize(("checked", "in_gymnasium", "setting", "words"), SETTINGS)
def test_the_recommended_scripts(checked, in_gymnasium, setting, words, capsys):
    """Every framework that has a script for this setting is named, with the same flags."""
    checked = check.Checked(*checked)
    assert check.setting_of(checked, in_gymnasium) == setting
    assert check.words_for(checked, setting) == words
    check.recommend("my:Env", setting, words, ["--num-envs", "8"])
    output = capsys.readouterr().out
    assert output == ok("my:Env", setting, words, ["--num-envs", "8"])
    assert "# JAX, " in output and "# PyTorch\n" in output


def test_the_mujoco_preset_is_explained(capsys):
    actions = "action_space = Box(-1, 1, (2,)); step = lambda *x: Lander.step(x[0], x[1][0] > 0)"
    check.main(write_gymnasium(actions))
    output = capsys.readouterr().out
    assert " mujoco --env-id given:MyEnv-v0 " in output and "docs/environments.md" in output


# === Atari ======================================================================================
def test_the_script_for_images_is_recommended_for_atari(monkeypatch, capsys):
    images.stand_in_for_ale_py(monkeypatch)
    measured = []
    monkeypatch.setattr(check, "measure_speed", lambda *words: measured.append(words) or 999.6)
    for env_id in ("ALE/Arcade-v5", "ale_py:ALE/Arcade-v5"):
        check.main(env_id, async_test=True)
        output = capsys.readouterr().out
        assert output.startswith("1,000 random steps per second in 8 games, in threads of ale-py.")
        assert output.endswith(ok(env_id, "images"))
    assert measured == [("ale_py:ALE/Arcade-v5", "vector_entry_point", 8)] * 2


def test_an_atari_game_that_does_not_exist(monkeypatch, capsys):
    images.stand_in_for_ale_py(monkeypatch)
    with pytest.raises(SystemExit) as stopped:
        check.main("ALE/Arkade-v5")
    assert stopped.value.code == 2 and "Did you mean: `Arcade`?" in capsys.readouterr().err


@pytest.mark.parametrize("env_id", ["MyEnv-v0", "ale_py:MyEnv-v0", "given:MyEnv-v0"])
def test_atari_under_another_id(env_id, monkeypatch, capsys):
    """Such an id would skip the preprocessing."""
    images.stand_in_for_ale_py(monkeypatch)
    line = (
        "import gymnasium\ngymnasium.register('MyEnv-v0', {!r}, kwargs={{'game': 'ms_pacman'}})\n"
    )
    Path("given.py").write_text(line.format("ale_py.env:AtariEnv"))
    importlib.import_module("given")
    with pytest.raises(SystemExit) as stopped:
        check.main(env_id)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith(": use --env-id ALE/MsPacman-v5\n")


def test_atari_games_need_ale_py(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        check.main("ALE/Arcade-v5")
    pin = re.search(r"^ale-py==\S+", (ROOT / "requirements-test.txt").read_text(), re.M)
    assert pin and capsys.readouterr().err.endswith(f" pip install {pin[0]}\n")


def test_the_speed_of_a_vector_environment(monkeypatch):
    images.stand_in_for_ale_py(monkeypatch)

    class Arcade(images.Arcade):
        action_space = MultiDiscrete([3, 3])

        def reset(self, *, seed=None, options=None):  # seed may be an int, as in ale-py
            seeds = None if seed is None else np.full(self.num_envs, seed)
            return super().reset(seed=seeds, options=options)

    entry_point = partial(Arcade, img_height=84, img_width=84, life_loss_info=True)
    gymnasium.register("MyEnv-v0", vector_entry_point=entry_point)
    assert speed.steps_per_second("MyEnv-v0", "vector_entry_point", 2, 0.1) > 0


# === sync or async ==============================================================================
SYNC = {("sync", 1): 100.0, ("sync", 2): 110.0}
SLOWER = {("sync", 1): 100.0, ("sync", 8): 80.0}  # with more environments
FAILED = {("sync", 1): 100.0, ("sync", 2): "RuntimeError"}
EIGHT = ["--vectorization", "async", "--num-envs", "8"]
SPEEDS: list[Any] = [
    (SYNC | {("async", 1): 90.0, ("async", 8): 330.0}, "async --num-envs 8: 3x as fast", EIGHT),
    (SYNC | {("async", 8): 320.0, ("async", 16): 330.0}, "async --num-envs 8: 2.9x", EIGHT),
    (SYNC | {("async", 8): 99.0}, "Use sync, the default: async is slower", []),
    (SYNC | {("async", 8): 121.0}, "Use sync, the default: async is only 1.1x as fast", []),
    (SLOWER | {("async", 8): 110.0}, "Use sync, the default: async is only 1.1x as fast", []),
    (SYNC | {("async", 1): "EOFError"}, "Use sync, the default: async did not work.", []),
    (FAILED | {("async", 8): 50.0}, "sync did not work with several environments", EIGHT),
    ({("sync", 1): "KeyError", ("async", 1): "KeyError"}, "Neither sync nor async worked", []),
]


@pytest.mark.parametrize(("speeds", "sentence", "flags"), SPEEDS)
def test_the_recommended_vectorization(speeds, sentence, flags):
    text, found = check.recommend_vectorization(speeds)
    assert sentence in text and found == flags


def test_the_async_test_adds_flags_to_the_command(monkeypatch, capsys):
    speeds = {"sync": 100.0, "async": 900.0}
    monkeypatch.setattr(check, "measure_speed", lambda env_id, name, num_envs: speeds[name])
    check.main("lander_gymnasium:Lander-v0", async_test=True)
    output = capsys.readouterr().out
    assert "  async --num-envs 8: 900\n" in output
    flags = ["--vectorization", "async", "--num-envs", "1"]
    assert output.endswith(ok("lander_gymnasium:Lander-v0", "Gymnasium", flags=flags))


BREAKS = """
import os
import subprocess


def broken_in_a_worker():
    if os.path.basename(sys.argv[0]) == "speed.py":
        raise RuntimeError("no license")


def hanging():
    if os.path.basename(sys.argv[0]) == "speed.py":
        process = subprocess.Popen(["sleep", "1000"])
        Path("pid").write_text(str(process.pid))
        process.wait()
"""


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_failed_measurement_reports_the_reason(vectorization):
    env_id = write_gymnasium("__init__ = lambda *x, **y: broken_in_a_worker()")
    text = Path("given.py").read_text()
    Path("given.py").write_text(f"import sys\n{BREAKS}\n{text}")
    assert check.measure_speed(env_id, vectorization, 1) == "RuntimeError: no license"


def test_a_hanging_measurement_is_killed_with_its_processes(monkeypatch):
    monkeypatch.setattr(check, "ASYNC_PATIENCE", 20.0)
    env_id = write_gymnasium("__init__ = lambda *x, **y: hanging()")
    text = Path("given.py").read_text()
    Path("given.py").write_text(f"import sys\nfrom pathlib import Path\n{BREAKS}\n{text}")
    assert check.measure_speed(env_id, "async", 1) == "not finished after 20 s"
    status = Path(f"/proc/{Path('pid').read_text()}/status")
    # Linux may need a moment to end a process after the signal.
    wait_for(lambda: not status.exists() or "zombie" in status.read_text())


HANG = "step = lambda *x: time.sleep(1000)"


def test_a_hanging_environment_ends_the_check():
    env_id = write_gymnasium(HANG)
    Path("given.py").write_text(f"import time\n{Path('given.py').read_text()}")
    program = "from envs import check; check.PATIENCE = check.PROGRESS_AFTER = 1.0; "
    program += f"check.main({env_id!r})"
    variables = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.getcwd()}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Timeout (0:00:01)!\n") and "given.py" in done.stderr


# === Exceptions =================================================================================
def test_an_exception_in_the_module_is_raised():
    Path("broken.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        check.main("broken:MyEnv")


# Line that needs a missing package, and the expected error message.
MISSING = [
    ("import no_such_package", "No module named 'no_such_package'"),
    (
        "def make(**options): raise gymnasium.error.DependencyNotInstalled('pip install mujoco')",
        "pip install mujoco",
    ),
]


@pytest.mark.parametrize(("line", "sentence"), MISSING)
def test_a_missing_package_is_a_one_line_error(line, sentence, capsys):
    Path("given.py").write_text(f"import gymnasium\n{line}\ngymnasium.register('MyEnv-v0', make)\n")
    with pytest.raises(SystemExit) as stopped:
        check.main("given:MyEnv-v0")
    assert (stopped.value.code, capsys.readouterr().err) == (2, f"{sentence}\n")

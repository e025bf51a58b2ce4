"""Environments of one's own: the page's words as a user types them, and what the check says."""

import importlib
import json
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from conftest import ROOT
from running import main
from sections import ROWS

import evaluate
import ppo_linen
from envs import check

PAGE = (ROOT / "docs/environments.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
SMALL = ["--num-envs=2", "--num-steps=32", "--num-minibatches=2", "--update-epochs=1"]
SMALL += ["--total-timesteps=128"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with the page's modules alone, where the user stands. What is imported is undone."""
    for name, text in zip(("lander", "lander_gymnasium"), EXAMPLES, strict=True):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    importlib.invalidate_caches()
    yield tmp_path
    for name in ("lander", "lander_gymnasium", "given", "broken", "evil"):
        sys.modules.pop(name, None)
    for name in ("Lander-v0", "MyEnv-v0"):
        gymnasium.registry.pop(name, None)


# === The page's words ===========================================================================
def words_of(block):
    """The commands of one of the page's blocks, each as words after "python"."""
    lines = COMMANDS[block].replace("~/ppo-rosetta", str(ROOT)).splitlines()
    return [shlex.split(line)[1:] for line in lines]


def output_of(*words):
    """Of a process, in which nothing is wrong."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def assert_evaluates(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", [*words, "--episodes=3", "--max-steps=30"])
    evaluate.main()
    assert Path(words[-1]).read_bytes().startswith(b"GIF")


def test_the_check_is_a_process_that_what_lies_there_does_not_disturb(here):
    """Neither a file random.py nor a package envs where the user stands."""
    (here / "random.py").write_text("raise RuntimeError\n")
    (here / "envs").mkdir()
    (here / "envs/__init__.py").write_text("raise RuntimeError\n")
    (script, env_id), *_ = words_of(1)
    *_, verdict = output_of(script, env_id).splitlines()
    assert verdict.startswith("lander:Lander is as these scripts need it: ppo_linen, ppo_nnx, ")


def test_the_pages_words_in_gymnax(here, monkeypatch, capsys):
    """Trained, stopped, gone on with, evaluated and drawn."""
    sys.path.remove(str(here))  # the script looks there itself
    _, (_, *train_it), evaluate_it = words_of(1)
    (resume_it,) = words_of(4)
    run_log = importlib.import_module("ppo_linen").RunLog  # that which main has: tests import anew
    write = run_log.write

    def write_and_stop(log, *args):
        signal.raise_signal(signal.SIGINT)
        write(log, *args)

    with monkeypatch.context() as patch:
        patch.setattr(run_log, "write", write_and_stop)
        assert main("ppo_linen", *train_it, *SMALL) == 128 + signal.SIGINT
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.endswith(f" To resume: {' '.join(resume_it[1:3])}")
    assert main("ppo_linen", *resume_it[1:]) == 0
    assert_evaluates(evaluate_it, monkeypatch)


def test_the_pages_words_in_gymnasium(here, monkeypatch):
    """Each process imports the module, and none the user's random.py."""
    (here / "random.py").write_text("raise RuntimeError\n")
    (_, env_id), train_it, evaluate_it = words_of(2)
    check.main(env_id)
    output_of(*train_it, *SMALL, "--vectorization=async")
    assert_evaluates(evaluate_it, monkeypatch)


@pytest.mark.parametrize("flags", [[], ["--env-id", "lander:Lander"]])
def test_a_strangers_run_alone_imports_nothing(flags, here, capsys):
    (here / "evil.py").write_text("import os\nos.mkdir('attacked')\n")
    args = asdict(ppo_linen.Args(env_id="evil:Lander"))
    (here / "run.json").write_text(json.dumps({"script": "ppo_linen", "args": args}))
    assert main("ppo_linen", "--resume", here, *flags) == 2
    assert capsys.readouterr().err.endswith(" to run it, add --env-id 'evil:Lander'\n")
    assert not (here / "attacked").exists()


# === What the check says ========================================================================
NAMES = {
    "": "name my_module:MyEnv, or in Gymnasium my_module:MyEnv-v0, not ''",
    "no_such_module.sub:MyEnv": "there is no module no_such_module.sub in ",
    "lander:Nope": "lander has no class Nope, and registers no such id",
    "lander_gymnasium:Lander": "give the id under which gymnasium.register has it",
}
IN_50 = "observation_space = lambda *x: Box(-50, 50, (2,))"
# What a class body in gymnax must not say; obs are two zeros.
GYMNAX = {
    "action_space = environment.Environment.action_space": "MyEnv has no action_space, which gymn",
    "default_params = environment.Environment.default_params": "MyEnv has no default_params, whic",
    "default_params = (0,)": "by state.time and default_params.max_steps_in_episode: have both",
    "action_space = lambda *x: Dict({})": "action_space must be Discrete or a Box, not Dict({})",
    "action_space = lambda *x: Box(-1, np.inf, (1,))": "must lie between finite bounds, not Box(",
    "action_space = lambda *x: Box(-1, 1, (2, 2))": "actions in a Box must be vectors, not Box(lo",
    "observation_space = lambda *x: Dict({})": "must be gymnax's Box, not Dict({})",
    "observe = lambda *x: jnp.zeros(3)": "array of observation_space's shape, (2,), not ShapeDtype",
    "reset = lambda *x: (obs, jax.random.key(0))": "must have no keys but jax.random.PRNGKey's",
    "step = Lander.step_env": "step must return obs, state, reward, terminated, truncated, info\n",
    "reset = lambda *x: (obs, State(0, 0.0, 0))": "state.height must stay int32 (), not become f",
    "step_env = lambda *x: (obs, x[2], (0, 0), False, {})": "reward must be one number, not (Shape",
    "step_env = lambda *x: (obs, x[2], 0.0, 0, {})": "terminated and truncated must be one boolean",
    "step = lambda *x, params: (*Lander.step(*x, params)[:5], {})": "must have final_observation",
    # What shows only in play.
    "step_env = lambda *x: ends_at(100, *Lander.step_env(*x))": "is max_steps_in_episode, all",
    "observation_space = lambda *x: Box(-99, [99, 0], (2,))": "from -99 to 0 at (1,), not at ",
    "observation_space = lambda *x: Box([-99, 0], 99, (2,))": "from 0 to 99 at (1,), not at -",
    f"{IN_50}; step = lambda *x, params: ends_far(*Lander.step(*x, params))": "at (0,), not at 99",
    "observe = lambda *x: obs / 0": "obs must be finite numbers, not [nan nan]",
    "step_env = lambda *x: (obs, x[2], jnp.nan, False, {})": "must be a finite number, not [nan]",
    "render = lambda *x: np.zeros((64, 64, 3))": "(height, width, 3) of uint8, not (64, 64, 3) of",
    "step = lambda *x, params: goes_on(*Lander.step(*x, params))": "no episode ended within 2,000",
}
GYMNASIUM = {
    "action_space = property()": "MyEnv-v0 has no action_space, which Gymnasium's environments h",
    "action_space = Discrete(2, start=1)": "the actions must begin with 0, not as Discrete(2, st",
    "action_space = MultiDiscrete([2, 2])": "action_space must be Discrete or a Box, not MultiDis",
    "action_space = Box(-np.inf, 1, (1,))": "must lie between finite bounds, not Box(-inf, 1.0, (1",
    "action_space = Box(-9, 9, (1,), np.int8)": "in a Box must be floats, and not int8 as in Box(",
    "observation_space = Discrete(9)": "must be a Box, as gymnasium's FlattenObservation makes",
    "step = lambda *x: (obs, 0.0, False, {})": "must return obs, reward, terminated, truncated, i",
    "observe = lambda *x: np.zeros(3)": "obs must be float32 (2,), as observation_space, not array",
    "step = lambda *x: (obs, None, False, False, {})": "must be one number each, not array(None",
    "step = lambda *x: (obs, np.nan, False, False, {})": "reward must be a finite number, not nan",
    "observation_space = Box(-9, np.float32([9, 0]))": "from -9.0 to 0.0 at (1,), not at 0.",
    "observation_space = Box(np.float32([-9, 0]), 9)": "from 0.0 to 9.0 at (1,), not at -",
    "observe = lambda *x: np.float32([0, np.nan])": "obs must be finite numbers, not [ 0. nan]",
    "observe = lambda *x: np.random.rand(2)": "a seed must lead to the same obs and rewards again",
    "__init__ = lambda self: None": "__init__ must take render_mode, and keep it as self.render_m",
    "__init__ = lambda self, render_mode=None: None": "__init__ must take render_mode, and keep it",
    "render = lambda *x: np.zeros((64, 64))": "(height, width, 3) of uint8, not (64, 64) of float",
}


def write_gymnax(change):
    """A module with MyEnv, which is Lander with another class body; its name."""
    text = "from gymnax.environments.spaces import Box, Dict, Discrete\nfrom lander import *\n"
    text += "obs = jnp.zeros(2)\ndef ends_at(limit, obs, state, reward, terminated, info):\n"
    text += "    return obs, state, reward, terminated | (state.time >= limit), info\n"
    text += "def goes_on(obs, state, reward, terminated, truncated, info):\n"
    text += "    return obs, state, reward, terminated & False, truncated & False, info\n"
    text += "def ends_far(*results):\n    return *results[:5], {'final_observation': obs + 99}\n"
    text += f"class MyEnv(Lander):\n    {change}\n"
    Path("given.py").write_text(text)
    return "given:MyEnv"


def write_gymnasium(change, limit=100):
    text = "from gymnasium.spaces import *\nfrom lander_gymnasium import *\nobs = np.zeros(2)\n"
    text += f"class MyEnv(Lander):\n    {change}\n"
    text += f"gymnasium.register('MyEnv-v0', MyEnv, max_episode_steps={limit})\n"
    Path("given.py").write_text(text)
    return "given:MyEnv-v0"


def write_endless(change):
    return write_gymnasium(change, limit=None)


def write_limited(max_episode_steps):
    """In Gymnasium, Lander that terminates at step 20 at the latest, registered with a limit."""
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
RULES += [(write_limited, 20, "to step 20 terminated there, which is also the time limit: return")]
RULES += [
    (write_endless, "step = lambda *x: (obs, 0, 0, 0, {})", "no episode ended within 5,000 ra")
]
RULES += [(str, *x) for x in NAMES.items()]


@pytest.mark.parametrize(("write", "change", "sentence"), RULES)
def test_a_mistake_is_a_sentence(write, change, sentence, capsys):
    env_id = write(change)
    with pytest.raises(SystemExit) as stopped:
        check.main(env_id)
    output, errors = capsys.readouterr()
    assert (stopped.value.code, errors.count("\n")) == (2, 1)
    assert sentence in errors and "is as these scripts need it" not in output


# What a sentence tells of, which may be as it was meant.
HINTS: list[Any] = [
    (
        write_gymnax,
        "step_env = lambda *x: ends_at(20, *Lander.step_env(*x))",
        "random episodes that came to step 20 terminated there: if that is a time limit, it must",
    ),
    (
        write_limited,
        None,
        "random episodes that came to step 20 terminated there: if that is a tim",
    ),
    (write_gymnasium, "metadata = {}", "a GIF would show obs, and no picture"),
    (
        write_gymnasium,
        "render = lambda *x: 1 / 0",
        "A GIF cannot be drawn here: ZeroDivisionError:",
    ),
]


@pytest.mark.parametrize(("write", "change", "sentence"), HINTS)
def test_what_may_be_a_mistake_is_a_sentence_too(write, change, sentence, capsys):
    env_id = write(change)
    check.main(env_id)
    *hints, verdict = capsys.readouterr().out.splitlines()
    assert sentence in hints[-1] or sentence in hints[0]
    assert verdict.startswith(f"{env_id} is as these scripts need it: ")


CONTINUOUS = "step_env = lambda *x: Lander.step_env(*x[:3], x[3][0] > 0, x[4])"
OWN_STEP = "step = lambda self, *x, **y: Lander().step(*x, **y); "
OWN_STEP += "step_env = environment.Environment.step_env"  # which is not called then
RIGHT: list[Any] = [
    (write_gymnax, "reset_env = lambda *x: (obs, State(1.0, 0.0, 0))"),  # weak types
    (write_gymnax, OWN_STEP),
    (write_gymnax, f"action_space = lambda *x: Box(-1, 1, (1,)); {CONTINUOUS}"),
    (write_gymnasium, "step = lambda *x: (obs, 1, np.bool_(x[1]), 0, {})"),
    (
        write_gymnasium,
        "action_space = Box(-1, 1); step = lambda *x: Lander.step(x[0], x[1][0] > 0)",
    ),
]


@pytest.mark.parametrize(("write", "change"), RIGHT)
def test_what_is_no_mistake(write, change, capsys):
    env_id = write(change)
    check.main(env_id)
    *_, speed, played, verdict = capsys.readouterr().out.splitlines()
    assert re.search(r"tep .*takes [0-9.,]+ \N{MICRO SIGN}s", speed)
    assert played.endswith(" episodes ended.")
    kind = "continuous" if "Box" in change else "discrete"
    names = check.scripts_for(kind, write == write_gymnasium)
    assert verdict == f"{env_id} is as these scripts need it: {names}"


def test_each_script_is_named_for_one_kind_of_environment():
    found = {}
    for kind in ("discrete", "continuous"):
        for in_gymnasium in (False, True):
            names = check.scripts_for(kind, in_gymnasium).split(", ")
            found |= {name: (kind, in_gymnasium) for name in names if name}
    assert found.keys() == ROWS.keys()
    assert found["dqn_linen"] == ("discrete", False)
    assert found["ppo_torch_gymnasium"] == ("discrete", True)
    continuous = {name for name, (kind, _) in found.items() if kind == "continuous"}
    assert continuous == {name for name in ROWS if "_continuous_" in name or "sac" in name}


def test_an_error_in_ones_own_code_is_shown_as_it_is():
    Path("broken.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        check.main("broken:MyEnv")


# A package that one's own code needs.
MISSING = [
    ("import no_such_package", "No module named 'no_such_package'"),
    (
        "def make(**options): raise gymnasium.error.DependencyNotInstalled('pip install mujoco')",
        "pip install mujoco",
    ),
]


@pytest.mark.parametrize(("line", "sentence"), MISSING)
def test_a_missing_package_is_a_sentence(line, sentence, capsys):
    Path("given.py").write_text(f"import gymnasium\n{line}\ngymnasium.register('MyEnv-v0', make)\n")
    with pytest.raises(SystemExit) as stopped:
        check.main("given:MyEnv-v0")
    assert (stopped.value.code, capsys.readouterr().err) == (2, f"{sentence}\n")

"""Environments of one's own: the page's examples from an empty folder, and mistakes as sentences.

As a user does it: the scripts lie elsewhere, and the module where the user stands.
"""

import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from frameworks import GYMNASIUM_SCRIPTS, SCRIPTS
from sections import DQN_GYMNASIUM_SCRIPTS, DQN_SCRIPTS
from test_evaluate import command, frames_of  # noqa: F401  (a fixture)
from test_resume import main, metrics, train

import evaluate
import ppo_linen

GYMNAX = [*SCRIPTS, "dqn_linen", "dqn_torch"]
GYMNASIUM = [*GYMNASIUM_SCRIPTS, *DQN_GYMNASIUM_SCRIPTS]
LANDER, LANDER_GYMNASIUM = "lander:Lander", "lander_gymnasium:Lander-v0"
EXAMPLES = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs/environments.md").read_text(), re.M | re.S
)
SMALL = "--num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 1 --hidden-sizes 8"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with the page's modules alone, where the user stands. What is imported is undone."""
    for name, text in zip(("lander", "lander_gymnasium"), EXAMPLES, strict=True):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    registered = set(gymnasium.registry)
    importlib.invalidate_caches()
    yield tmp_path
    files = {name: str(getattr(x, "__file__", "")) for name, x in [*sys.modules.items()]}
    for name in [name for name, file in files.items() if file.startswith(str(tmp_path))]:
        del sys.modules[name]
    for name in {*GYMNAX, *GYMNASIUM} & set(sys.modules):
        sys.modules[name].own_environment.cache_clear()
    for name in set(gymnasium.registry) - registered:
        del gymnasium.registry[name]


def start(*words):
    """Start Python in a process of its own; what it compiles is kept for the next."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(Path.cwd().parent / "jax_cache")}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *map(str, words)], env=os.environ | cache, **pipes)


def end(process, status=0):
    """Its output and errors, of which none is a traceback."""
    output, errors = process.communicate(timeout=300)
    assert process.returncode == status, output + errors
    assert "Traceback" not in output + errors
    return output, errors


def is_picture(path):
    """Whether a GIF has the lander in it: a black square on white, which moves."""
    panels = [frame[68:, 40:260] for frame in frames_of(path)]
    black = [(panel < 60).all(-1) for panel in panels]
    share, tops = np.mean(black[0]), [x.any(1).argmax() for x in black]
    return 0.001 < share < 0.02 and max(tops) - min(tops) > 20


# === The page ===================================================================================
def test_the_examples_are_short_and_the_same_game():
    assert len(EXAMPLES[0].splitlines()) <= 60 and len(EXAMPLES[1].splitlines()) <= 45
    env, params = ppo_linen.own_environment(LANDER)
    importlib.import_module("lander_gymnasium")
    other: Any = gymnasium.make("Lander-v0").unwrapped
    obs, state = env.reset(jax.random.PRNGKey(0))
    other.reset(seed=0)
    other.height, other.speed = float(state.height), float(state.speed)
    for action in [1, 0, 1, *[0] * 20]:
        obs, state, reward, terminated, *_ = env.step_env(None, state, action, params)
        np.testing.assert_array_equal(env.render(state, params).shape, (64, 64, 3))
        result = other.step(action)
        np.testing.assert_allclose(obs, result[0], atol=1e-5)
        assert reward == pytest.approx(result[1], abs=1e-4) and terminated == result[2]
        if terminated:
            break
    assert terminated and len(jax.tree.leaves(state)) == 3


def test_from_an_empty_folder(here):
    """Trained, stopped, resumed by the words that it prints, evaluated and drawn."""
    flags = [*SMALL.split(), "--env-id", LANDER, "--total-timesteps", 128 * 500]
    process = start(ROOT / "ppo_linen.py", *flags)
    while not process.stdout.readline().startswith("iteration"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, errors = end(process, 130)
    how = shlex.split(output.splitlines()[-1].partition(". To go on: ")[2])
    assert not errors and how[-2:] == ["--env-id", LANDER]
    end(start(*how[1:]))
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("lander-Lander__ppo_linen__1__")
    assert len(metrics(folder)) == 500 and json.loads((folder / "run.json").read_text())["resumed"]
    words = [ROOT / "evaluate.py", folder, "--env-id", LANDER, "--gif", "lander.gif"]
    output, errors = end(start(*words))
    assert LANDER in output and not errors and is_picture("lander.gif")


def test_gymnasium_in_processes_from_an_empty_folder(here, command):  # noqa: F811
    """They import the module too; and the agent is evaluated and drawn."""
    flags = [*SMALL.split(), "--env-id", LANDER_GYMNASIUM, "--vectorization", "async"]
    script = ROOT / "ppo_linen_gymnasium.py"
    assert not end(start(script, *flags, "--total-timesteps", 256, "--run-name", "first"))[1]
    words = ["--env-id", LANDER_GYMNASIUM, "runs/first", "--episodes", 5, "--gif", "first.gif"]
    assert command(*words)[0] == 0 and is_picture("first.gif")
    status, _, errors = command(*words, "--env-id", LANDER)
    assert (status, errors) == (2, f"--env-id {LANDER}: no run was trained in it\n")
    assert "lander" not in sys.modules


@pytest.mark.parametrize("name", [*GYMNAX, *GYMNASIUM])
def test_every_script_takes_it(name):
    """And names its folder without a colon, which Windows and scp would take for something else."""
    script = importlib.import_module(name)
    args = script.Args(env_id=LANDER if name in GYMNAX else LANDER_GYMNASIUM)
    assert args.run_name.startswith(f"{args.env_id.replace(':', '-')}__{name}__1__")


@pytest.mark.parametrize(
    ("name", "env_id"), [("ppo_torch", LANDER), ("ppo_torch_gymnasium", LANDER_GYMNASIUM)]
)
def test_goes_on_to_the_same_numbers(name, env_id, here, capfd):
    whole = train(name, here, "whole", "--env-id", env_id)
    stopped = train(name, here, "stopped", "--env-id", env_id, stops=3)
    assert shlex.split(capfd.readouterr().out.splitlines()[-1])[-2:] == ["--env-id", env_id]
    assert main(name, "--resume", stopped, f"--env_id={env_id}") == 0
    assert metrics(stopped) == metrics(whole)


# === Whose code runs ============================================================================
EVIL = "import os\nos.mkdir('attacked')\nfrom lander import *\nfrom lander_gymnasium import *\n"


@pytest.fixture
def stranger(here):
    """A checkpoint that names any environment; and a module that shows that it was imported."""

    def write(name, env_id, **changes):
        script = importlib.import_module(name)
        folder = here / "runs" / name
        folder.mkdir(parents=True)
        args = asdict(script.Args()) | {"env_id": env_id} | changes
        info = {"script": name, "args": args, "iteration": 1}
        np.savez(folder / "checkpoint.npz", info=json.dumps(info))
        (here / "evil.py").write_text(EVIL)
        return folder

    return write


@pytest.mark.parametrize("name", ["ppo_linen", "ppo_linen_gymnasium"])
def test_a_checkpoint_alone_imports_nothing(name, stranger, command, capsys):  # noqa: F811
    env_id = "evil:Lander" if name in GYMNAX else "evil:Lander-v0"
    lander = LANDER if name in GYMNAX else LANDER_GYMNASIUM
    folder = stranger(name, env_id)
    sentence = (
        f"{folder} was trained in {env_id}, which is code: to run it, add --env-id {env_id}\n"
    )
    for flags in ([], ["--env-id", lander], ["--env_id=CartPole-v1"]):
        assert main(name, "--resume", folder, *flags) == 2
        assert capsys.readouterr() == ("", sentence)
    assert command(folder) == command(folder, "--env-id", lander) == (2, "", sentence)
    assert not Path("attacked").exists() and "evil" not in sys.modules
    command(folder, "--env-id", env_id)
    assert Path("attacked").exists()  # as it would have, had one of them imported it


def test_what_to_add_can_be_pasted(stranger, capfd):
    """A stranger's name is one word to a shell, and nothing that a terminal obeys."""
    folder = stranger("ppo_linen", "a:b; touch attacked \x1b[31m")
    assert main("ppo_linen", "--resume", folder) == 2
    words = shlex.split(capfd.readouterr().err)
    assert words[-2:] == ["--env-id", "a:b; touch attacked  [31m"]


def test_flags_beside_resume(stranger, capfd):
    folder = stranger("ppo_linen", "CartPole-v1")
    for flags in (["--env-id", "CartPole-v1", "--seed=1"], ["--env_id=CartPole-v1", "--no-track"]):
        assert main("ppo_linen", "--resume", folder, *flags) == 2
        assert "no flag may stand beside it but --env-id" in capfd.readouterr().err
    assert main("ppo_linen", "--resume", folder, "--env-id", "Acrobot-v1") == 2
    assert "CartPole-v1, so it must be --env-id CartPole-v1\n" in capfd.readouterr().err


@pytest.mark.parametrize("name", [*GYMNAX, *GYMNASIUM])
def test_of_a_run_that_goes_on_its_own_arguments_are_checked(name):
    """Not those beside --resume, which has no run's name, as a checkpoint has."""
    script = importlib.import_module(name)
    script.Args(resume="runs/first", env_id="no_such_module:MyEnv", num_envs=0)
    with pytest.raises(ValueError, match="no_such_module"):
        script.Args(resume="runs/first", run_name="first", env_id="no_such_module:MyEnv")


def test_a_small_replay_of_large_observations_goes_on(here, stranger, capfd):
    """The default's would not fit into memory, and nobody asked for it."""
    (here / "large.py").write_text(
        "import jax.numpy as jnp\nfrom lander import *\nSHAPE = (10**8,)\n"
        "class Large(Lander):\n    def observe(self, *x): return jnp.zeros(SHAPE)\n"
        "    def observation_space(self, params): return spaces.Box(0, 1, SHAPE)\n"
    )
    folder = stranger("dqn_linen", "large:Large", num_envs=1, buffer_size=1)
    assert main("dqn_linen", "--resume", folder, "--env-id", "large:Large") == 2
    assert "is no checkpoint of dqn_linen.py: 'elapsed'\n" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["ppo_linen", "dqn_torch", "ppo_torch_gymnasium"])
def test_a_module_that_is_elsewhere(name, stranger, command, capsys, monkeypatch):  # noqa: F811
    """The checkpoint is a good one, so the sentence is about the module alone."""
    env_id = LANDER if name in GYMNAX else LANDER_GYMNASIUM
    folder, other = stranger(name, env_id), Path("other").resolve()
    other.mkdir()
    monkeypatch.chdir(other)
    error = f"ModuleNotFoundError: No module named '{env_id.partition(':')[0]}' in {other} or the"
    duty = "make a gymnax Environment" if name in GYMNAX else "register a Gymnasium environment"
    sentence = f"--env-id {env_id} must {duty}: {error} packages\n"
    assert main(name, "--resume", folder, "--env-id", env_id) == 2
    assert capsys.readouterr() == ("", sentence)
    assert command(folder, "--env-id", env_id) == (2, "", sentence)


def test_no_file_hides_a_package(here):
    for name in ("colorsys", "ensurepip"):  # a module and a package that nobody has imported yet
        sys.modules.pop(name, None)
        (here / f"{name}.py").write_text("raise RuntimeError\n")
    (here / "mine.py").write_text("import colorsys, ensurepip\nfrom lander import *\n")
    ppo_linen.VecEnv("mine:Lander", 1)
    assert str(here) not in str(sys.modules["colorsys"].__file__)


@pytest.mark.parametrize("own", ["envs/mine.py", "envs/__init__.py"])
def test_a_folder_envs_of_the_users(own, here):
    """Also where it is a package: the project's are found all the same, and so are the user's."""
    for name in ("envs/mine.py", own):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(EXAMPLES[0] if name == "envs/mine.py" else "")
    code = f"import sys\nsys.path[0] = {str(ROOT)!r}\nimport ppo_linen\n"
    code += "for env_id in sys.argv[1:]:\n    print(ppo_linen.VecEnv(env_id, 1).obs_dim)"
    output, _ = end(start("-c", code, "envs.doors:Doors", "envs.mine:Lander"))
    assert output.split() == ["45", "2"]


# === Mistakes ===================================================================================
MODULES = {
    "broken": "x = 1\nraise RuntimeError('first line\\nsecond line')\n",
    "needs": "\nimport no_such_package\n",
    "unclear": "x = = 1\n",
    "quits": "import sys\nsys.exit(1)\n",
}
GIVEN = """
import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments.spaces import Box, Dict
from lander import *

PI = 3.14
"""
MISTAKES = {  # a part of the environment, and the sentence
    "no_such_module:MyEnv": "ModuleNotFoundError: No module named 'no_such_module' in .* packages$",
    "lander.sub:MyEnv": "No module named 'lander.sub'",
    "lander:": "must be a module's name, a colon and a name in it, as my_module:MyEnv, not ",
    ":Lander": "as my_module:MyEnv, not :Lander$",
    "./lander.py:Lander": "as my_module:MyEnv, not ./lander.py:Lander$",
    "lander.py:Lander": "as my_module:MyEnv, not lander.py:Lander$",
    "lander:Nope": "must make a gymnax Environment: AttributeError: .*lander.* attribute 'Nope'$",
    "broken:MyEnv": r"RuntimeError: first line \(.*/broken.py, line 2\)$",
    "needs:MyEnv": r"No module named 'no_such_package' \(.*/needs.py, line 2\)$",
    "unclear:MyEnv": r"SyntaxError: invalid syntax \(unclear.py, line 1\)$",
    "quits:MyEnv": r"SystemExit: 1 \(.*/quits.py, line 2\)$",
    "given:PI": "must make a gymnax Environment: TypeError: 'float' object is not callable$",
    "given:State": "TypeError: .*missing 3 required positional arguments",
    "given:Params": "AttributeError: 'Params' object has no attribute 'default_params'$",
}
CHANGES = {  # what a method of the environment does instead
    "step(self, key, state, action, params): return self.step_env(key, state, action, params)": (
        "step must return obs, state, reward, terminated, truncated, info$"
    ),
    "step_env(self, *x): return *Lander.step_env(self, *x)[:4], False, {}": (
        "step_env must return obs, state, reward, terminated, info$"
    ),
    "reset(self, key): return jnp.zeros(2)": "TypeError: cannot unpack",
    "action_space(self, params): return Box(-1, 1, (1,))": r"actions must be Discrete\(n > 0\)$",
    "action_space(self, params): return spaces.Discrete(0)": r"actions must be Discrete\(n > 0\)$",
    "action_space(self, params): return spaces.Discrete(2.0)": "interpreted as an integer$",
    "observation_space(self, params): return Box(-1, 1, (3,))": (
        "obs must have observation_space's shape, .3,.$"
    ),
    "observe(self, *x): return {'a': jnp.zeros(2)}": "obs must be one array, not {'a': Shape.*}$",
    "observe(self, *x): return {'a': jnp.zeros(2)}\n"
    "    def observation_space(self, params): return Dict({'a': Box(-1, 1, (2,))})": (
        "obs must be one array, "
    ),
    "observe(self, key, state, action, params): return jnp.zeros(2 + (action is not None))": (
        r"TypeError: reset returns \['obs float32\[2\]'\], but step_env \['obs float32\[3\]'\]$"
    ),
    "observe(self, key, state, action, params): "
    "return jnp.zeros(2, int if action is None else float)": (
        r"reset returns \['obs int32\[2\]'\], but step_env \['obs float32\[2\]'\]$"
    ),
    "reset_env(self, *x): return jnp.zeros(2), State(0, 0.0, 0)": (
        r"returns \['state.height int32\[\]'\], but step_env \['state.height float32\[\]'\]$"
    ),
    "step_env(self, key, state, *x): return jnp.zeros(2), (state, 0), 0.0, False, {}\n"
    "    def is_truncated(self, *x): return False": (
        r"\['state.height .*'\], but step_env \['state.0.height .*, 'state.1 int32\[\]'\]$"
    ),
    "reset(self, key): return jnp.zeros(2), (1.0,)\n"
    "    def step(self, key, state, *x): return jnp.zeros(2), [1.0], 0.0, False, False, "
    "{'final_observation': jnp.zeros(2)}": "reset and step must build state alike$",
    "reset_env(self, *x): return jnp.zeros(2), 5": "has no attribute speed$",
    "reset_env(self, *x): "
    "return jnp.zeros(2), State(1.0, 0.0, jax.random.key(0))\n"
    "    def step_env(self, key, state, *x): return jnp.zeros(2), state, 0.0, False, {}\n"
    "    def is_truncated(self, *x): return False": "PRNGKey's$",
    "step_env(self, *x): return 1 / 0": r"ZeroDivisionError: .* \(.*/given.py, line \d+\)$",
    "step_env(self, key, state, action, params): return 1 if action else 2": (
        r"Attempted boolean conversion of traced array .* \(.*/given.py, line \d+\)$"
    ),
    "step_env(self, *x): o, s, r, *e = Lander.step_env(self, *x); return o, s, r[None], *e": (
        "reward must be one number$"
    ),
    "step_env(self, *x): o, s, r, *e = Lander.step_env(self, *x); return o, s, None, *e": (
        "reward must be one number$"
    ),
    "step_env(self, *x): o, s, r, d, i = Lander.step_env(self, *x); return o, s, r, d * 1, i": (
        "terminated, truncated must be one boolean each$"
    ),
    "step(self, key, state, action, params): "
    "return *Lander.step(self, key, state, action, params)[:5], {}": (
        "info must have final_observation, of obs's kind$"
    ),
    "__init__(self, size): pass": "missing 1 required positional argument: 'size'$",
}


def sentence_of(make):
    """That of a ValueError, which is what becomes exit status 2 on the command line."""
    with pytest.raises(ValueError) as error:
        make()
    text = str(error.value)
    assert text.isprintable() and text.startswith("--env-id ")
    return text


@pytest.mark.parametrize("env_id", MISTAKES)
def test_what_cannot_be_made(env_id, here):
    for name, text in (MODULES | {"given": GIVEN}).items():
        (here / f"{name}.py").write_text(text)
    assert re.search(MISTAKES[env_id], sentence_of(lambda: ppo_linen.VecEnv(env_id, 2)))


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_step_as_it_must(change, here):
    (here / "given.py").write_text(f"{GIVEN}class MyEnv(Lander):\n    def {change}\n")
    sentence = sentence_of(lambda: ppo_linen.VecEnv("given:MyEnv", 2))
    assert re.search(CHANGES[change], sentence), sentence
    assert sentence.startswith("--env-id given:MyEnv must make a gymnax Environment: ")


def test_on_the_command_line(here, stranger, command, capsys):  # noqa: F811
    """One sentence, status 2, no traceback, no folder; for a checkpoint's too."""
    (here / "given.py").write_text(f"{GIVEN}class MyEnv(Lander):\n    step = Lander.step_env\n")
    flags = "--env-id", "given:MyEnv"
    _, errors = end(start(ROOT / "ppo_linen.py", *flags), 2)
    assert "step must return obs, state, reward, terminated," in " ".join(errors.split())
    assert not Path("runs").exists()
    folder = stranger("ppo_linen", "given:MyEnv")
    assert main("ppo_linen", "--resume", folder, *flags) == 2
    output, errors = capsys.readouterr()
    assert errors.startswith("--env-id given:MyEnv must make a gymnax Environment: TypeError: step")
    assert errors.count("\n") == 1 and not output
    assert command(folder, *flags) == (2, "", errors)
    assert [path.name for path in folder.iterdir()] == ["checkpoint.npz"]


@pytest.mark.parametrize(
    "change",
    [
        "reset_env(self, *x): return jnp.ones(2), State(1.0, 0.0, 0)",  # weak types, as gymnax's
        "reset_env(self, *x): return jnp.ones(2), State(1.0, 0.0, 0)\n"
        "    def step_env(self, key, state, *x): return jnp.ones(2), "
        "state.replace(time=state.time + jnp.int16(1)), 0.0, state.time > 9, {}",
        "observe(self, *x): return jnp.full(2, 1.0)",
        "reset(self, key, params=None): return Lander.reset(self, key, params)",
        "reset(self, key): return Lander.reset(self, key)",
        "step(self, key, state, action, p): return Lander.step(self, key, state, action, p)",
        "step(self, *x): return [*Lander.step(self, *x)]",
        "observation_space(self, params): return Box(jnp.zeros(2), jnp.ones(2), (2,), jnp.uint8)",
    ],
)
def test_what_is_no_mistake(change, here):
    """It steps, in a compiled loop, too."""
    text = f"{GIVEN}class MyEnv(Lander):\n    def {change}\n\ndef make():\n    return MyEnv()\n"
    (here / "given.py").write_text(text)
    env = ppo_linen.VecEnv("given:make", 3)
    obs, state = env.reset(jax.random.PRNGKey(0))
    actions = jnp.zeros((150, 3), jnp.int32)
    _, result = jax.lax.scan(lambda state, x: env.step(state, x)[1:], state, actions)
    assert obs.shape == (3, 2) and result["next_obs"].shape == (150, 3, 2)
    assert (result["terminated"] | result["truncated"]).any()


# === Mistakes in Gymnasium ======================================================================
GYMNASIUM_MISTAKES = {
    "reset(self, **x): return np.zeros(3)": "ValueError: too many values to unpack",
    "step(self, action): return self.observe(), 0.0, False, {}": r"\(expected 5, got 4\)",
    "step(self, action): return self.observe(), None, False, False, {}": "TypeError: ",
    "step(self, action): return 1 / 0": r"ZeroDivisionError: .* \(.*/given.py, line \d+\)$",
    "step(self, action): return self.observe(), 0.0, np.zeros(2, bool), False, {}": "truth value",
    "step(self, action): return self.observe(), 0.0, False, np.zeros(2, bool), {}": "truth value",
    "observe(self): return np.zeros(3, np.float32)": r"fit observation_space, \(2,\) float32$",
    "observe(self): return np.zeros(2)\n    observation_space = Box(0, 9, (2,), np.uint8)": (
        r"obs must fit observation_space, \(2,\) uint8$"
    ),
    "observe(self): return np.zeros(3)\n    observation_space = Box(0, 9, ())": (
        r"obs must fit observation_space, \(\) float32$"
    ),
    "observe(self): return None\n    observation_space = Box(0, 9, ())": "TypeError: ",
    "observe(self): return np.array(['a', 'b'])": "TypeError: ",
    "__init__(self): raise OSError('no disk')": r"OSError: no disk \(.*/given.py, line \d+\)$",
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium's own checks
@pytest.mark.parametrize("change", GYMNASIUM_MISTAKES)
def test_what_gymnasium_cannot_step(change, here):
    text = (
        f"import gymnasium\nfrom lander_gymnasium import *\nclass MyEnv(Lander):\n    def {change}"
    )
    register = "gymnasium.register('MyEnv-v0', MyEnv, max_episode_steps=9)"
    (here / "given.py").write_text(f"{text}\n{register}\n")
    script = importlib.import_module("ppo_linen_gymnasium")
    sentence = sentence_of(lambda: script.VecEnv("given:MyEnv-v0", 2, "sync", 1))
    assert re.search(GYMNASIUM_MISTAKES[change], sentence), sentence
    assert sentence.startswith("--env-id given:MyEnv-v0 must register a Gymnasium environment: ")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "change",
    [
        "observe(self): return np.array([self.height, self.speed])",  # float64
        "observe(self): return [0, 1]",
        "observe(self): return np.float32(1)\n    observation_space = Box(0, 9, ())",
        "observe(self): return 1.0\n    observation_space = Box(0, 9, ())",
        "observe(self): return np.ones(2, bool)\n    observation_space = Box(0, 9, (2,), np.uint8)",
        "step(self, action): return self.observe(), 1, np.bool_(True), 0, {}",
    ],
)
def test_what_is_no_mistake_in_gymnasium(change, here):
    text = "from lander_gymnasium import *\nclass MyEnv(Lander):\n    def "
    register = "gymnasium.register('MyEnv-v0', MyEnv, max_episode_steps=9)"
    (here / "given.py").write_text(f"{text}{change}\n{register}\n")
    script = importlib.import_module("ppo_linen_gymnasium")
    env = script.VecEnv("given:MyEnv-v0", 2, "sync", 1)
    assert env.reset(5).shape == (2, env.obs_dim)
    for _ in range(5):
        obs, result = env.step(np.zeros(2, int))
        assert obs.dtype == np.float32 and result["terminated"].dtype == bool


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("no_such_module:CartPole-v1", "No module named 'no_such_module' in .* packages$"),
        ("lander_gymnasium:Nope-v0", "Environment `Nope` doesn't exist"),
        ("lander_gymnasium:", "as my_module:MyEnv, not lander_gymnasium:$"),
        (":CartPole-v1", "as my_module:MyEnv, not :CartPole-v1$"),
        ("./lander_gymnasium.py:Lander-v0", "as my_module:MyEnv, not ./lander_gymnasium.py:Lander"),
        ("lander_gymnasium:Pendulum-v1", "must have discrete actions from 0 on and see arrays"),
    ],
)
def test_what_gymnasium_does_not_know(env_id, message):
    script = importlib.import_module("ppo_linen_gymnasium")
    assert re.search(message, sentence_of(lambda: script.VecEnv(env_id, 2, "sync", 1)))


@pytest.mark.parametrize("name", GYMNASIUM)
def test_it_is_tried_once(name, here):
    """As gymnax's are traced once: a folder's name, training and evaluating ask for the same."""
    text = "import gymnasium\nfrom lander_gymnasium import Lander\nresets = []\n"
    text += "class MyEnv(Lander):\n    def reset(self, **x):\n        resets.append(x)\n"
    text += "        return super().reset(**x)\ngymnasium.register('MyEnv-v0', MyEnv)\n"
    (here / "given.py").write_text(text)
    script = importlib.import_module(name)
    for seed in (1, 2):
        script.VecEnv("given:MyEnv-v0", 2, "sync", seed)
    assert [x["seed"] for x in sys.modules["given"].resets] == [0]


# === DQN ========================================================================================
@pytest.mark.parametrize("name", ["dqn_linen", "dqn_torch"])
def test_options_of_dqn(name, here):
    script = importlib.import_module(name)
    env = script.VecEnv(LANDER, 2, sticky_actions=0.5, max_episode_steps=3)
    state, ends = env.reset(jax.random.PRNGKey(0))[1], []
    for _ in range(6):
        _, state, result = env.step(state, jnp.ones(2, jnp.int32))
        ends.append(bool(result["truncated"].all()))
    assert ends == [False, False, True] * 2
    (here / "given.py").write_text(
        f"{GIVEN}@struct.dataclass\nclass None_:\n    x: int = 0\n\n"
        "class MyEnv(Lander):\n    default_params = None_()\n"
        "    def is_truncated(self, state, params): return state.time > 9\n\n"
        "class Image(Lander):\n    def observe(self, *x): return jnp.zeros((2, 9, 3))\n"
        "    def observation_space(self, params): return Box(0, 1, (2, 9, 3))\n"
    )
    script.VecEnv("given:MyEnv", 2)
    for flags, message in [
        (
            {"env_id": "given:MyEnv", "max_episode_steps": 9},
            "--max-episode-steps needs a max_steps",
        ),
        (
            {"env_id": LANDER, "full_actions": True},
            "--full-actions is for MinAtar's games, not for",
        ),
        ({"env_id": "given:Image"}, "--env-id must have images .* of 3 x 3 or more, never "),
    ]:
        with pytest.raises(ValueError, match=message):
            script.Args(**flags)


GRIDS = [(5, 5, 6), (3, 3, 4), (9, 11, 83), (10, 10, 10), (210, 160, 3), (84, 84, 4)]
NO_GRIDS = [(4, 84, 84), (3, 64, 64), (2, 9, 3), (9, 2, 3)]


@pytest.mark.parametrize("name", DQN_SCRIPTS)
@pytest.mark.parametrize("shape", GRIDS + NO_GRIDS, ids=str)
def test_images_of_any_number_of_channels(name, shape, monkeypatch):
    """A small grid can have more kinds of things than squares in a row."""
    script = importlib.import_module(name)
    make = script.VecEnv.__init__

    def other(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.obs_shape = shape

    monkeypatch.setattr(script.VecEnv, "__init__", other)
    if shape in GRIDS:
        script.Args()
        return
    with pytest.raises(ValueError, match=r"of 3 x 3 or more, never .channels, n, n., not CartP"):
        script.Args()


@pytest.mark.parametrize("name", ["dqn_linen", "dqn_torch", "dqn_linen_gymnasium"])
def test_a_name_makes_no_booleans_of_observations(name, here):
    """MinAtar's own are kept as such, and one that is called like them may see any numbers."""
    if name.endswith("gymnasium"):
        text = "import gymnasium\nfrom lander_gymnasium import Lander\n"
        text += "gymnasium.register('MinAtarLike-v0', Lander)\n"
        env_ids = "like:MinAtarLike-v0", "MinAtar/Breakout-v0"
    else:
        text, env_ids = (
            "from lander import Lander as MinAtarLike\n",
            ("like:MinAtarLike", "Breakout-MinAtar"),
        )
    (here / "like.py").write_text(text)
    script = importlib.import_module(name)
    for env_id, kind in zip(env_ids, ("float32", "bool"), strict=True):
        args = script.Args(env_id=env_id, num_envs=1, buffer_size=10)
        options = getattr(args, "env_options", {"vectorization": "sync", "seed": 1})
        env = script.VecEnv(env_id, 1, **options)
        device = [script.torch.device("cpu")] if "torch" in name else []
        assert str(script.make_replay(args, env, *device)[0].dtype).endswith(kind)


# === Pictures ===================================================================================
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("return 1 / 0", "ZeroDivisionError: division by zero"),
        (
            "return np.zeros((9, 9))",
            "render must return uint8 .height, width, 3., not float64 .9, 9.",
        ),
        ("return None, None", "not object .2,."),
        ("return np.zeros((0, 9, 3), np.uint8)", "not uint8 .0, 9, 3."),
        ("return np.zeros((9, 0, 3), np.uint8)", "not uint8 .9, 0, 3."),
    ],
)
def test_a_picture_that_is_none(change, message, here, capsys):
    (here / "given.py").write_text(
        f"{GIVEN}class MyEnv(Lander):\n    def render(self, *x): {change}\n"
    )
    args = ppo_linen.Args(env_id="given:MyEnv")
    run = evaluate.Run(here, ppo_linen, args, 1, lambda obs: jnp.zeros((len(obs), 2)))
    with pytest.raises(SystemExit) as stopped:
        evaluate.draw([run], evaluate.Args(("",)))
    errors = capsys.readouterr().err
    assert stopped.value.code == 2 and errors.startswith("--gif: given:MyEnv: ")
    assert re.search(message, errors) and errors.count("\n") == 1


def frames_drawn(script, **flags):
    """Of an agent that never fires."""
    script = importlib.import_module(script)
    args = script.Args(**flags)
    run = evaluate.Run(Path(), script, args, 1, lambda obs: jnp.zeros((len(obs), 2)))
    Path("picture.gif").write_bytes(evaluate.draw([run], evaluate.Args(("",))))
    return frames_of("picture.gif")


@pytest.mark.parametrize("flags", [{}, {"sticky_actions": 0.5}])
def test_a_state_within_a_state(flags, here):
    """As wrappers have it: render gets the outer one, and never that of sticky actions."""
    (here / "given.py").write_text(
        f"{GIVEN}@struct.dataclass\nclass Outer:\n    env_state: State\n    time: jax.Array\n\n"
        "class MyEnv(Lander):\n    def reset_env(self, *x):\n"
        "        obs, state = Lander.reset_env(self, *x)\n"
        "        return obs, Outer(state, state.time)\n"
        "    def step_env(self, key, outer, *x):\n"
        "        obs, state, *rest = Lander.step_env(self, key, outer.env_state, *x)\n"
        "        return obs, Outer(state, state.time), *rest\n"
        "    def render(self, outer, params):\n"
        "        return Lander.render(self, outer.env_state, params)\n"
    )
    frames_drawn("dqn_linen", env_id="given:MyEnv", **flags)
    assert is_picture("picture.gif")


@pytest.mark.parametrize("shape", [(1, 4000, 3), (4000, 1, 3)])
def test_a_long_thin_picture(shape, here):
    (here / "given.py").write_text(
        f"{GIVEN}class MyEnv(Lander):\n"
        f"    def render(self, *x): return np.zeros({shape}, np.uint8)\n"
    )
    assert len(frames_drawn("ppo_linen", env_id="given:MyEnv")) > 0


def test_modes_that_a_class_only_inherits(here):
    """It cannot be made to draw, so what was observed is drawn."""
    (here / "given.py").write_text(
        "from lander_gymnasium import *\nclass MyEnv(Lander):\n"
        "    def __init__(self): super().__init__()\n"
        "gymnasium.register('MyEnv-v0', MyEnv, max_episode_steps=9)\n"
    )
    frames = frames_drawn("ppo_linen_gymnasium", env_id="given:MyEnv-v0")
    assert len(frames) > 5 and not is_picture("picture.gif")

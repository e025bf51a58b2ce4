"""Environments of one's own: the page's words as a user types them, and what the check says."""

import importlib
import json
import re
import shlex
import signal
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import gymnasium
import numpy as np
import pytest
from conftest import ROOT
from PIL import Image, ImageSequence

import evaluate
import ppo_linen
import ppo_linen_gymnasium
from envs import check

PAGE = (ROOT / "docs/environments.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
SMALL = ["--num-envs=4", "--num-steps=32", "--num-minibatches=2", "--update-epochs=1"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, compiled):
    """A folder with the page's modules alone, where the user stands. What is imported is undone."""
    for name, text in zip(("lander", "lander_gymnasium"), EXAMPLES, strict=True):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    importlib.invalidate_caches()
    yield tmp_path
    for name in ("lander", "lander_gymnasium", "given", "broken", "evil"):
        sys.modules.pop(name, None)
    for name in ("Lander-v0", "MyEnv-v0"):
        gymnasium.registry.pop(name, None)


def start(*words) -> Any:
    return Popen([sys.executable, *map(str, words)], stdout=PIPE, stderr=PIPE, text=True)


def end(process, status=0):
    output, errors = process.communicate(timeout=300)
    assert process.returncode == status, output + errors
    assert errors.count("\n") == (status == 2), errors  # one sentence
    return output


def words_of(block):
    """The commands of one of the page's blocks, each as words after "python"."""
    lines = COMMANDS[block].replace("~/ppo-rosetta", str(ROOT)).splitlines()
    return [shlex.split(line)[1:] for line in lines]


def assert_shows_the_lander(path):
    """A black square on white, at ever other heights."""
    pictures = [np.asarray(x.convert("L")) for x in ImageSequence.Iterator(Image.open(path))]
    black = np.stack(pictures)[:, 68:] < 60
    assert 0 < black.mean() < 0.02 and len(set(black.any(2).argmax(1))) > 5


def test_the_pages_words_in_gymnax(monkeypatch):
    """Checked, trained, stopped, gone on with, evaluated and drawn."""
    check_it, train_it, evaluate_it = words_of(1)
    (resume_it,) = words_of(3)
    assert end(start(*check_it)) == "lander:Lander is as the scripts need it\n"
    for words in ([*train_it, *SMALL, "--total-timesteps=640_000"], resume_it):
        process = start(*words)
        while "iteration " not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        last_line = end(process, 130).splitlines()[-1]
        assert shlex.split(last_line.partition("python ")[2]) == resume_it
    monkeypatch.setattr(sys, "argv", [*evaluate_it, "--episodes=3"])
    evaluate.main()
    assert_shows_the_lander("lander.gif")


def test_the_pages_words_in_gymnasium(here, monkeypatch):
    """Each process imports the module, and none the user's random.py."""
    (here / "random.py").write_text("raise RuntimeError\n")
    (_, env_id), train_it, evaluate_it = words_of(2)
    check.main(env_id)
    end(start(*train_it, *SMALL, "--total-timesteps=256", "--vectorization=async"))
    monkeypatch.setattr(sys, "argv", [*evaluate_it, "--episodes=3"])
    evaluate.main()
    assert_shows_the_lander("second.gif")


def test_the_check_from_the_projects_folder(here):
    """Where the module and a file random.py are, too."""
    (here / "envs").symlink_to(ROOT / "envs")
    (here / "random.py").write_text("raise RuntimeError\n")
    assert not end(start("-m", "envs.check", "lander:Nope"), 2)


def test_a_folder_envs_of_the_users(here):
    """Also where it is a package: the project's is found all the same, and what is in theirs."""
    (here / "envs").mkdir()
    (here / "envs/__init__.py").write_text("raise RuntimeError\n")
    (here / "envs/mine.py").write_text(EXAMPLES[0])
    assert "as the scripts need it" in end(start(ROOT / "envs/check.py", "envs.mine:Lander"))


def test_a_checkpoint_alone_imports_nothing(here, capsys):
    (here / "evil.py").write_text("import os\nos.mkdir('attacked')\nfrom lander import *\n")
    info = {"script": "ppo_linen", "args": {"env_id": "evil:Lander"}}
    np.savez(here / "checkpoint.npz", info=json.dumps(info))
    with pytest.raises(SystemExit):
        ppo_linen.args_of_run(ppo_linen.Args(resume=str(here), env_id="lander:Lander"))
    assert capsys.readouterr().err.endswith(" to run it, add --env-id evil:Lander\n")
    assert not Path("attacked").exists()
    ppo_linen.VecEnv("evil:Lander", 2)
    assert Path("attacked").exists()  # as it would have before


def said_of(env_id, capsys):
    with pytest.raises(SystemExit) as stopped:
        check.main(env_id)
    output, errors = capsys.readouterr()
    assert (stopped.value.code, output, errors.count("\n")) == (2, "", 1)
    return errors


NAMES = {
    "": "name my_module:MyEnv, or in Gymnasium my_module:MyEnv-v0, not ''",
    "lander:": "not 'lander:'",
    "./lander.py:Lander": "not './lander.py:Lander'",
    "lander.py:Lander": "there is no module lander.py in ",
    "no_such_module.sub:MyEnv": "there is no module no_such_module.sub in ",
    "lander:Nope": "lander has no class Nope, and registers no such id",
    "lander_gymnasium:Nope-v0": "has no class Nope-v0, and registers no such id",
    "lander_gymnasium:Lander": "of one in Gymnasium, use its registered id",
    "lander:dict": "it must be in gymnax, not {}",
}


@pytest.mark.parametrize("env_id", NAMES)
def test_what_is_no_environment(env_id, here, capsys):
    (here / "lander.py").write_text(EXAMPLES[0] + "\ndict = dict\n")
    assert NAMES[env_id] in said_of(env_id, capsys)


@pytest.mark.parametrize("text", ["raise KeyError", "import no_such_package", "MyEnv = 1 / 0"])
def test_an_error_in_ones_own_code_is_shown_as_it_is(text, here):
    (here / "broken.py").write_text(text)
    with pytest.raises((KeyError, ModuleNotFoundError, ZeroDivisionError)):
        check.main("broken:MyEnv")


def write_gymnax(folder, change):
    """A module with MyEnv, which is Lander with another class body."""
    text = "from gymnax.environments.spaces import Dict, Discrete\nfrom lander import *\n"
    text += f"obs = jnp.zeros(2)\n\n\nclass MyEnv(Lander):\n    {change}\n"
    (folder / "given.py").write_text(text)


GYMNAX = {
    "action_space = lambda *x: spaces.Box(-1, 1, (1,))": "must be gymnax's Discrete, not Box(",
    "observation_space = lambda *x: Dict({})": "must be gymnax's Box, not Dict({})",
    "reset = lambda *x: obs": "reset must return obs, state\n",
    "observe = lambda *x: jnp.zeros(3)": "array of observation_space's shape, (2,), not ShapeDtype",
    "observe = lambda *x: {'a': obs}": "array of observation_space's shape, (2,), not {'a': Shape",
    "reset = lambda *x: (obs, jax.random.key(0))": "must have no keys but jax.random.PRNGKey's",
    "step = Lander.step_env": "step must return obs, state, reward, terminated, truncated, info\n",
    "step_env = lambda *x: obs": "step_env must return obs, state, reward, terminated, info\n",
    "reset = lambda *x: (jnp.arange(2), State(0.0, 0.0, 0))": "obs must stay int32 (2,), not beco",
    "reset = lambda *x: (obs, State(0, 0.0, 0))": "state.height must stay int32 (), not become f",
    "step_env = lambda *x: (obs, (x[2], 0), 0.0, False, {})": "stay float32 (), not become None in",
    "step_env = lambda *x: (obs, vars(x[2]), 0.0, False, {})": "same classes, tuples and lists",
    "step_env = lambda *x: (obs, x[2], (0, 0), False, {})": "reward must be one number, not (Shape",
    "step_env = lambda *x: (obs, x[2], 0.0, 0, {})": "terminated and truncated must be one boolean",
    "step = lambda *x, params: (*Lander.step(*x, params)[:5], {})": "must have final_observation",
}


@pytest.mark.parametrize("change", GYMNAX)
def test_rules_of_gymnax(change, here, capsys):
    write_gymnax(here, change)
    assert GYMNAX[change] in said_of("given:MyEnv", capsys)


@pytest.mark.parametrize(
    "change",
    [
        "reset_env = lambda *x: (obs, State(1.0, 0.0, 0))",  # weak types, as gymnax's
        "reset = lambda self, key: Lander.reset(self, key)",
        "step = lambda *x, params: [*Lander.step(*x, params)]",
        "observe = lambda *x: jnp.int32(0); observation_space = lambda *x: Discrete(9)",
    ],
)
def test_what_is_no_mistake_in_gymnax(change, here, capsys):
    write_gymnax(here, change)
    check.main("given:MyEnv")
    *hints, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "given:MyEnv is as the scripts need it"
    assert ("one-hot" in str(hints)) == ("Discrete" in change)


def write_gymnasium(folder, change):
    text = "from gymnasium.spaces import *\nfrom lander_gymnasium import *\nobs = np.zeros(2)\n"
    text += f"\n\nclass MyEnv(Lander):\n    {change}\n\n\ngymnasium.register('MyEnv-v0', MyEnv)\n"
    (folder / "given.py").write_text(text)


GYMNASIUM = {
    "action_space = Discrete(2, start=1)": "action_space must be Discrete and begin with 0, not D",
    "observation_space = Discrete(9)": "must be a Box, as gymnasium's FlattenObservation makes",
    "reset = lambda *x, **y: obs": "reset must return obs, info\n",
    "step = lambda *x: (obs, 0.0, False, {})": "must return obs, reward, terminated, truncated, i",
    "observe = lambda *x: np.zeros(3)": "obs must be float32 (2,), as observation_space, not array",
    "observation_space = Box(0, 9, (2,), np.uint8)": "obs must be uint8 (2,), as observation_space",
    "step = lambda *x: (obs, None, False, False, {})": "must be one number each, not array(None",
    "step = lambda *x: (obs, 0.0, False, False, None)": "info must be a dict, not None",
    "observe = lambda *x: np.random.rand(2)": "a seed must lead to the same obs again",
}


@pytest.mark.parametrize("change", GYMNASIUM)
def test_rules_of_gymnasium(change, here, capsys):
    write_gymnasium(here, change)
    assert GYMNASIUM[change] in said_of("given:MyEnv-v0", capsys)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium's own, at the script's
@pytest.mark.parametrize(
    "change",
    [
        "observe = lambda *x: obs",  # float64
        "observe = lambda *x: 1.0; observation_space = Box(0, 9, ())",
        "step = lambda *x: (obs, 1, np.bool_(True), 0, {})",
    ],
)
def test_what_is_no_mistake_in_gymnasium(change, here, capsys):
    write_gymnasium(here, change)
    check.main("given:MyEnv-v0")
    assert capsys.readouterr() == ("given:MyEnv-v0 is as the scripts need it\n", "")
    env = ppo_linen_gymnasium.VecEnv("given:MyEnv-v0", 2, "sync", 1)
    env.reset(2)
    assert env.step(np.zeros(2, int))[0].shape == (2, env.obs_dim)

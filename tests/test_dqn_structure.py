"""The DQN scripts as texts: what must be the same is the same, and what differs stays small."""

import ast
import difflib
import importlib
import re
import sys
from typing import Any

import pytest
from dqn import LINEN_PAIR, TORCH_PAIR
from sections import DQN_SCRIPTS, SCRIPTS, read, sections
from test_structure import changed_lines

SECTIONS = ["Arguments", "Environment", "Agent", "Replay", "Act", "Loss", "Update", "Run log"]
SECTIONS += ["Training"]
EACH = pytest.mark.parametrize("name", DQN_SCRIPTS)
GYMNAX_PAIR, GYMNASIUM_PAIR = (LINEN_PAIR[0], TORCH_PAIR[0]), (LINEN_PAIR[1], TORCH_PAIR[1])


def function(name, wanted):
    """The lines of a function, a method or a class of script name."""
    for node in ast.walk(ast.parse(read(name))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == wanted:
            lines = read(name).splitlines(keepends=True)
            return "".join(lines[node.lineno - 1 : node.end_lineno])
    raise AssertionError(f"{name} has no {wanted}")


# === The same to the letter =====================================================================
@EACH
def test_sections_and_main(name):
    assert list(sections(read(name))) == SECTIONS
    *_, main = read(name).split('if __name__ == "__main__":\n')
    assert main == "    main(parse_args())\n"


@EACH
def test_the_run_log_is_ppos(name):
    assert sections(read(name))["Run log"] == sections(read("ppo_linen"))["Run log"]


@pytest.mark.parametrize("pair", [LINEN_PAIR, TORCH_PAIR])
@pytest.mark.parametrize("section", ["Agent", "Replay", "Act", "Loss", "Update"])
def test_a_frameworks_pair_shares_the_algorithm(pair, section):
    first, second = (sections(read(name))[section] for name in pair)
    assert first == second


@pytest.mark.parametrize("name", GYMNASIUM_PAIR)
def test_gymnasiums_environment_is_ppos(name):
    ppo = sections(read("ppo_linen_gymnasium"))["Environment"]
    assert sections(read(name))["Environment"] == ppo


@pytest.mark.parametrize("name", GYMNAX_PAIR)
def test_gymnaxs_environment_is_ppos_but_for_what_it_is_made_of(name):
    """VecEnv's __init__ has more options; PyTorch's hand-over is ppo_torch's."""
    ppo = name.replace("dqn", "ppo")
    ours, theirs = (sections(read(x))["Environment"] for x in (name, ppo))
    init, theirs_init = (function(x, "__init__") for x in (name, ppo))
    assert init != theirs_init and init in ours
    assert ours.replace(init, theirs_init) == theirs


SCHEDULES = ("Plan", "make_plan", "updates_after", "epsilon_after", "parse_args")


@pytest.mark.parametrize("shared", SCHEDULES)
def test_schedules_are_the_same_in_all(shared):
    assert len({function(name, shared) for name in DQN_SCRIPTS}) == 1
    metrics = [re.findall(r"^METRICS = .*?^\)$", read(x), re.M | re.S) for x in DQN_SCRIPTS]
    assert metrics[0] and all(x == metrics[0] for x in metrics)


def fields(name, kind):
    """A configuration's lines, by flag."""
    return {
        x.partition(":")[0]: x for x in re.findall(r"^    (\w+: .+)$", function(name, kind), re.M)
    }


OWN_FLAGS = {"compile", "vectorization", "sticky_actions", "full_actions", "max_episode_steps"}


@EACH
@pytest.mark.parametrize("kind", ["Args", "MinAtar"])
def test_flags_and_defaults_are_the_same_but_for_a_librarys_own(name, kind):
    ours, first = fields(name, kind), fields("dqn_linen", kind)
    assert ours.keys() ^ first.keys() <= OWN_FLAGS
    differ = {x for x in ours.keys() & first.keys() if ours[x] != first[x]}
    assert differ <= ({"env_id"} if "gymnasium" in name else set())
    shared = list(filter(first.__contains__, ours))
    assert shared == list(filter(ours.__contains__, first))  # in the same order
    assert ("compile" in ours) == (name in TORCH_PAIR)
    assert ("vectorization" in ours) <= (name in GYMNASIUM_PAIR)


@EACH
def test_minatars_settings_are_those_of_its_paper(name):
    """And of its example's code, where the paper's tables are wrong or silent."""
    args = importlib.import_module(name).MinAtar()
    settings: dict[str, Any] = {
        "learning_rate": 2.5e-4,
        "anneal_lr": False,
        "num_envs": 1,
        "gamma": 0.99,
    }
    settings |= {"buffer_size": 100_000, "batch_size": 32, "learning_starts": 5000}
    settings |= {"replay_ratio": 32, "target_network_frequency": 1000, "double_q": False}
    settings |= {"start_e": 1.0, "end_e": 0.1, "exploration_steps": 100_000, "loss": "huber"}
    settings |= {"optimizer": "rmsprop", "optimizer_eps": 0.01, "rmsprop_decay": 0.95}
    settings |= {"hidden_sizes": (128,), "total_timesteps": 5_000_000}
    if "gymnasium" in name:
        settings |= {"env_id": "MinAtar/Breakout-v0"}
    else:
        settings |= {"env_id": "Breakout-MinAtar", "sticky_actions": 0.1, "full_actions": True}
        settings |= {"max_episode_steps": 2**31 - 1}
    assert settings.items() <= vars(args).items()


# === Readable ===================================================================================
@EACH
def test_every_flag_is_read_and_explained(name):
    text = read(name)
    explained = re.findall(r"^    (\w+): [^=\n]+ = [^\n]*?  # (.+)$", function(name, "Args"), re.M)
    number = (30 if "gymnasium" in name else 32) + (name in TORCH_PAIR)
    assert len(explained) == len(fields(name, "Args")) == number
    training = text.replace(function(name, "__post_init__"), "")
    for field, _ in explained:
        names = rf"\b(args|self)\.{field}\b|^        names = .*\"{field}\""
        only_there = field in ("exp_name", "total_timesteps")
        assert re.search(names, text if only_there else training, re.M), field


def test_length():
    """Whoever adds lines takes others out."""
    ceilings = {"dqn_linen": 835, "dqn_torch": 908}
    ceilings |= {"dqn_linen_gymnasium": 860, "dqn_torch_gymnasium": 896}
    lengths = {name: len(read(name).splitlines()) for name in DQN_SCRIPTS}
    assert all(lengths[name] <= ceilings[name] for name in DQN_SCRIPTS), lengths


def test_own_environments_are_checked_alike_in_all_of_gymnaxs_scripts():
    """VecEnv's options set DQN's section apart from PPO's, and this part of it is the same."""
    texts = {
        re.findall(r"^@cache  # so.*?^class VecEnv:", read(name), re.M | re.S)[0]
        for name in (*SCRIPTS, "dqn_linen", "dqn_torch")
    }
    assert len(texts) == 1


# === Diff budgets ===============================================================================
def changed_by_section(first, second):
    ours, theirs = (sections(read(name)) for name in (first, second))
    pairs = {x: (ours[x].splitlines(), theirs[x].splitlines()) for x in SECTIONS}
    return {x: sum(y[0] in "+-" for y in difflib.ndiff(*pair)) for x, pair in pairs.items()}


LIBRARY = {"Arguments": 27, "Environment": 249, "Training": 66}
FRAMEWORK = {"Arguments": 9, "Environment": 16, "Agent": 74, "Replay": 40, "Act": 12, "Loss": 24}
FRAMEWORK |= {"Update": 76, "Training": 130}


@pytest.mark.parametrize(
    ("pair", "budget", "budgets"),
    [
        (LINEN_PAIR, 352, LIBRARY),  # from gymnax to Gymnasium: most of it is the environment
        (TORCH_PAIR, 370, LIBRARY),
        (GYMNAX_PAIR, 387, FRAMEWORK),  # from Linen to PyTorch
        (GYMNASIUM_PAIR, 348, FRAMEWORK | {"Environment": 0, "Training": 110}),
    ],
)
def test_diff_budgets(pair, budget, budgets):
    for section, changed in changed_by_section(*pair).items():
        assert changed <= budgets.get(section, 0), section
    assert changed_lines(*pair) <= budget


# === Help =======================================================================================
@EACH
@pytest.mark.parametrize("words", [[], ["cartpole"], ["minatar"], ["doors"]])
def test_help_shows_the_configurations(name, words, monkeypatch, capsys):
    script = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [script.__file__, *words, "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        script.parse_args()
    text = capsys.readouterr().out
    assert ended.value.code == 0
    (name,) = words or ["cartpole"]
    choice = "Before the flags: cartpole or minatar or doors"
    assert f"{choice}. Below are the settings of {name}." in text
    kinds = {"cartpole": script.Args, "minatar": script.MinAtar, "doors": script.Doors}
    kind = kinds[name]
    for flag in ("env_id", "buffer_size", "replay_ratio", "optimizer_eps", "hidden_sizes"):
        default = getattr(kind(), flag)
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
        (line,) = re.findall(rf"--{flag.replace('_', '-')} .*?\(default: (.*?)\)", text, re.S)
        assert line == shown, flag


@EACH
def test_a_configuration_is_a_word_before_the_flags(name, monkeypatch):
    script = importlib.import_module(name)
    for words, kind, seed in [
        ("", script.Args, 1),
        ("--seed 3", script.Args, 3),
        ("cartpole --seed 3", script.Args, 3),
        ("minatar --seed 3", script.MinAtar, 3),
        ("doors --num-envs 1024 --num-steps 5", script.Doors, 1),
    ]:
        monkeypatch.setattr(sys, "argv", [script.__file__, *words.split()])
        args = script.parse_args()
        assert type(args) is kind and args.seed == seed

"""The DQN scripts as texts, beyond test_structure.py; and their named configurations."""

import ast
import difflib
import importlib
import re
import sys

import pytest
from dqn import FIRST_OF_PAIRS, LINEN_PAIR, TORCH_PAIR
from sections import DQN_SCRIPTS, read, sections
from test_structure import changed_lines

SECTIONS = ["Arguments", "Environment", "Agent", "Replay", "Act", "Loss", "Update", "Training"]
SECTIONS += ["Run log"]
EACH = pytest.mark.parametrize("name", DQN_SCRIPTS)


def function(name, wanted):
    """The lines of a function, a method or a class of script name."""
    for node in ast.walk(ast.parse(read(name))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == wanted:
            lines = read(name).splitlines(keepends=True)
            return "".join(lines[node.lineno - 1 : node.end_lineno])
    raise AssertionError(f"{name} has no {wanted}")


# === The same to the letter =====================================================================
MAIN = """\
if __name__ == "__main__":
    args = parse_args()
    train(args_of_run(args) if args.resume else args)
"""


@EACH
def test_sections_and_main(name):
    assert list(sections(read(name))) == SECTIONS
    assert read(name).endswith(f"\n\n\n{MAIN}")


def test_the_run_log_is_ppos_but_for_a_few_lines():
    """The times of a rollout, the name of the loss, no replay for info, and MAIN."""
    ppos, ours = (sections(read(x))["Run log"].splitlines() for x in ("ppo_linen", "dqn_linen"))
    assert sum(line[0] in "+-" for line in difflib.ndiff(ppos, ours)) <= 16


@pytest.mark.parametrize("name", FIRST_OF_PAIRS)
def test_gymnaxs_environment_is_ppos_but_for_what_it_is_made_of(name):
    """VecEnv's __init__ has more options; PyTorch's hand-over is ppo_torch's."""
    ppo = name.replace("dqn", "ppo")
    ours, theirs = (sections(read(x))["Environment"] for x in (name, ppo))
    init, theirs_init = (function(x, "__init__") for x in (name, ppo))
    assert init != theirs_init and init in ours
    assert ours.replace(init, theirs_init) == theirs


@pytest.mark.parametrize(
    ("shared", "scripts"),
    [
        *((x, DQN_SCRIPTS) for x in ("__post_init__", "parse_args", "Plan", "make_plan")),
        *((x, DQN_SCRIPTS) for x in ("updates_after", "epsilon_after")),
        ("compile_graph", TORCH_PAIR),
    ],
)
def test_what_is_tested_in_one_is_the_same_in_all(shared, scripts):
    assert len({function(name, shared) for name in scripts}) == 1


# === Flags ======================================================================================
def fields(name, kind):
    """A configuration's lines, by flag."""
    lines = re.findall(r"^    (\w+): (.+)$", function(name, kind), re.M)
    return dict(lines)


@EACH
@pytest.mark.parametrize("kind", ["Args", "MinAtar", "Doors"])
def test_flags_and_defaults_are_the_same_but_for_a_librarys_own(name, kind):
    ours, first = fields(name, kind), fields("dqn_linen", kind)
    own = {"compile", "vectorization", "sticky_actions", "full_actions", "max_episode_steps"}
    assert ours.keys() ^ first.keys() <= own
    differ = {x for x in ours.keys() & first.keys() if ours[x] != first[x]}
    assert differ <= ({"env_id"} if "gymnasium" in name else set())
    assert [x for x in ours if x in first] == [x for x in first if x in ours]
    assert kind == "Doors" or ("compile" in ours) == (name in TORCH_PAIR)


@pytest.mark.parametrize("words", [[], ["cartpole"], ["minatar"], ["doors"]])
def test_a_configuration_is_a_word_before_the_flags_and_help_shows_it(words, monkeypatch, capsys):
    script = importlib.import_module("dqn_torch")
    kinds = {"cartpole": script.Args, "minatar": script.MinAtar, "doors": script.Doors}
    (name,) = words or ["cartpole"]
    monkeypatch.setattr(sys, "argv", [script.__file__, *words, "--seed", "3"])
    args = script.parse_args()
    assert type(args) is kinds[name] and args.seed == 3
    monkeypatch.setattr(sys, "argv", [script.__file__, *words, "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        script.parse_args()
    text = capsys.readouterr().out
    choice = "Before the flags: cartpole or minatar or doors"
    assert ended.value.code == 0 and f"{choice}. Below are the settings of {name}." in text
    (shown,) = re.findall(r"--buffer-size .*?\(default: (.*?)\)", text, re.S)
    assert shown == str(args.buffer_size)


@pytest.mark.parametrize(
    ("pair", "budget"),
    [
        (LINEN_PAIR, 316),  # from gymnax to Gymnasium: most of it is the environment
        (TORCH_PAIR, 333),
        (FIRST_OF_PAIRS, 414),  # from Linen to PyTorch
        ((LINEN_PAIR[1], TORCH_PAIR[1]), 368),
    ],
)
def test_diff_budgets(pair, budget):
    assert changed_lines(*pair) <= budget

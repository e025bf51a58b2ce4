"""The scripts of DQN and SAC as texts, beyond test_structure.py."""

import ast
import difflib
import re
from itertools import product

import pytest
from dqn import COMPILED, FIRST_OF_PAIRS, LINEN_PAIR
from sections import DQN_SCRIPTS, SAC_PAIRS, SAC_SCRIPTS, read, sections

SECTIONS = ["Arguments", "Environment", "Agent", "Replay", "Act", "Loss", "Update", "Training"]
SECTIONS += ["Run log"]
EACH = pytest.mark.parametrize("name", [*DQN_SCRIPTS, *SAC_SCRIPTS])


def function(name, wanted):
    """The text of a function, a method or a class of script name."""
    for node in ast.walk(ast.parse(read(name))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == wanted:
            return "\n".join(read(name).splitlines()[node.lineno - 1 : node.end_lineno])
    raise AssertionError(f"{name} has no {wanted}")


# === The same to the letter =====================================================================
@EACH
def test_sections_and_main(name):
    assert list(sections(read(name))) == SECTIONS
    main = "    args = parse_args()\n    train(args_to_resume(args) if args.resume else args)\n"
    assert read(name).endswith(f'\n\n\nif __name__ == "__main__":\n{main}')


def test_the_run_log_is_ppos_but_for_a_few_lines():
    """The times of a rollout, the name of the loss, no replay for info, and MAIN."""
    ppos, ours = (sections(read(x))["Run log"].splitlines() for x in ("ppo_linen", "dqn_linen"))
    assert sum(line[0] in "+-" for line in difflib.ndiff(ppos, ours)) <= 16


@pytest.mark.parametrize("name", [*FIRST_OF_PAIRS, COMPILED])
def test_gymnaxs_environment_is_ppos_but_for_what_it_is_made_of(name):
    """VecEnv's __init__ has more options; PyTorch's hand-over is ppo_torch's."""
    ppo = name.replace("dqn", "ppo")
    ours, theirs = (sections(read(x))["Environment"] for x in (name, ppo))
    own, ppos = (function(x, "__init__") for x in (name, ppo))
    assert own != ppos and ours.replace(own, ppos) == theirs


@pytest.mark.parametrize(("name", "count"), zip(SAC_PAIRS[0], (16, 11), strict=True))
def test_sacs_environment_is_continuous_ppos_but_for_a_few_lines(name, count):
    """No discounted returns and no gamma for them; and where gymnax's are for discrete actions."""
    ppo = name.replace("sac", "ppo_continuous")
    ours, theirs = (sections(read(x))["Environment"].splitlines() for x in (name, ppo))
    assert sum(line[0] in "+-" for line in difflib.ndiff(theirs, ours)) <= count


@pytest.mark.parametrize(
    ("scripts", "shared"),
    [
        *product([DQN_SCRIPTS, SAC_SCRIPTS], ["__post_init__", "parse_args", "updates_after"]),
        (DQN_SCRIPTS, "epsilon_after"),
        (SAC_SCRIPTS, "make_plan"),
    ],
)
def test_what_is_tested_in_one_is_the_same_in_all(scripts, shared):
    assert len({function(name, shared) for name in scripts}) == 1


@pytest.mark.parametrize(
    ("name", "count"), zip((*LINEN_PAIR, *SAC_PAIRS[0]), (4, 3, 4, 3), strict=True)
)
def test_the_replay_is_donated(name, count):
    """With the agent and what else changes in place: XLA would copy the replay otherwise."""
    assert f"donate_argnums=range({count}))" in sections(read(name))["Training"]


@EACH
def test_a_seed_draws_the_first_weights(name):
    seeded = "torch.manual_seed(args.seed)" if "torch" in name else "PRNGKey(args.seed)"
    assert seeded in sections(read(name))["Training"].partition(" make_agent(")[0]


# === Flags ======================================================================================
@pytest.mark.parametrize(
    ("name", "kind"),
    [*product(DQN_SCRIPTS, ["Args", "MinAtar"]), *product(SAC_SCRIPTS, ["Args", "MuJoCo"])],
)
def test_flags_and_defaults_are_the_same_but_for_a_librarys_own(name, kind):
    line = re.compile(r"^    (\w+): (.+)$", re.M)
    linen = f"{name[:3]}_linen"
    ours, first = (dict(line.findall(function(x, kind))) for x in (name, linen))
    own = {"vectorization", "sticky_actions", "full_actions", "max_episode_steps"}
    own |= {"env_id"} if kind == "MuJoCo" else set()  # gymnax has no robots
    assert ours.keys() ^ first.keys() <= own
    differ = {x for x in ours.keys() & first.keys() if ours[x] != first[x]}
    assert differ <= ({"env_id"} if "gymnasium" in name else set())
    assert [x for x in ours if x in first] == [x for x in first if x in ours]

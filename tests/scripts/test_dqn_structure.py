"""The source code of the DQN and SAC scripts, in addition to test_structure.py."""

import difflib
import re
from itertools import product

import pytest
from dqn import COMPILED, LINEN_PAIR, TORCH_PAIR
from running import parse
from sections import (
    DQN_SCRIPTS,
    SAC_PAIRS,
    SAC_SCRIPTS,
    but,
    function,
    read,
    sections,
    stand_ins,
)

SECTIONS = ["Arguments", "Environment", "Agent", "Replay", "Act", "Loss", "Update", "Training"]
SECTIONS += ["Checkpoint", "Run log"]
EACH = pytest.mark.parametrize("name", [*DQN_SCRIPTS, *SAC_SCRIPTS])


# === Identical sections and functions ===========================================================
@EACH
def test_every_script_has_the_same_sections(name):
    assert list(sections(read(name))) == SECTIONS


def changed_lines(name, other, section):
    ours, theirs = (sections(read(x))[section].splitlines() for x in (name, other))
    return sum(line[0] in "+-" for line in difflib.ndiff(ours, theirs))


@pytest.mark.parametrize("name", [LINEN_PAIR[0], TORCH_PAIR[0], COMPILED])
def test_vec_env_differs_from_ppo_only_in_its_options(name):
    """The differences are in __init__."""
    ppo = name.replace("dqn", "ppo")
    ours, theirs = (sections(read(x))["Environment"] for x in (name, ppo))
    own, ppos = (function(x, "__init__") for x in (name, ppo))
    assert own != ppos and ours.replace(own, ppos) == theirs


@pytest.mark.parametrize("name", [LINEN_PAIR[1], TORCH_PAIR[1]])
def test_gymnasium_vec_env_differs_from_ppo_only_in_minatar(name):
    """Four lines register MinAtar, and one line names the script for continuous actions."""
    assert changed_lines(name, name.replace("dqn", "ppo"), "Environment") == 6


@pytest.mark.parametrize(("name", "count"), zip(SAC_PAIRS[0], (22, 28), strict=True))
def test_sac_vec_env_differs_from_continuous_ppo_in_a_few_lines(name, count):
    """The SAC version has no discounted returns, and its messages name other scripts."""
    ppo = name.replace("sac", "ppo_continuous")
    assert changed_lines(name, ppo, "Environment") <= count


IN_GYMNASIUM = [x for x in (*DQN_SCRIPTS, *SAC_SCRIPTS) if "gymnasium" in x]


@pytest.mark.parametrize(
    ("wanted", "scripts"),
    [
        ("__post_init__", [x for x in DQN_SCRIPTS if "gymnasium" not in x]),
        ("epsilon_after", DQN_SCRIPTS),
        ("updates_after", but(DQN_SCRIPTS, "dqn_linen", "dqn_nnx")),
        ("updates_due", IN_GYMNASIUM),
        ("mean_losses", [x for x in DQN_SCRIPTS if "torch" in x]),
        ("episode_statistics", IN_GYMNASIUM),
    ],
)
def test_functions_that_are_tested_in_one_script_are_identical_in_all(wanted, scripts):
    assert len({function(name, wanted) for name in scripts}) == 1


@pytest.mark.parametrize("name", ["dqn_linen", "dqn_nnx", "sac_linen", "sac_nnx"])
def test_the_replay_is_donated(name):
    """Otherwise, XLA would copy the replay buffer in every iteration."""
    assert "donate_argnums=(0, 1, 2, 3))" in sections(read(name))["Training"]


@EACH
def test_the_seed_is_set_before_the_weights_are_initialized(name):
    seeded = "torch.manual_seed(args.seed)" if "torch" in name else "PRNGKey(args.seed)"
    assert seeded in sections(read(name))["Training"].partition(" make_agent(")[0]


# === Flags ======================================================================================
@pytest.mark.parametrize(
    ("name", "words"),
    [
        *product(stand_ins("Arguments", DQN_SCRIPTS), [[], ["minatar"]]),
        *product(stand_ins("Arguments", SAC_SCRIPTS), [[], ["mujoco"]]),
    ],
)
def test_flags_and_defaults_are_the_same_for_all_environments(name, words):
    """Only Gymnasium scripts make runs_dir absolute."""
    linen = f"{name[:3]}_linen"
    ours, first = (vars(parse(x, *words)) for x in (name, linen))
    own = {"vectorization", "sticky_actions", "full_actions", "max_episode_steps"}
    assert ours.keys() ^ first.keys() <= own
    differ = {x for x in ours.keys() & first.keys() if ours[x] != first[x]}
    assert differ <= ({"env_id", "runs_dir"} if "gymnasium" in name else set())
    assert [x for x in ours if x in first] == [x for x in first if x in ours]
    assert parse(name, *words, "--seed", 5).seed == 5  # flags override the preset


@pytest.mark.parametrize("name", stand_ins("Arguments", (*DQN_SCRIPTS, *SAC_SCRIPTS)))
def test_help_texts_of_flags_are_the_same_for_all_environments(name):
    """tyro takes help texts from the comments in Args."""
    linen = f"{name[:3]}_linen"
    line = re.compile(r"^    (\w+): (.+)$", re.M)
    ours, first = (dict(line.findall(function(x, "Args"))) for x in (name, linen))
    differ = {x for x in ours.keys() & first.keys() if ours[x] != first[x]}
    assert differ <= ({"env_id"} if "gymnasium" in name else set())

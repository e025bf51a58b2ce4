"""The sections that scripts share to the letter: show where they differ, or copy one to all.

    python tests/sections.py                        # show the differences; none is status 0
    python tests/sections.py ppo_linen "Run log"    # copy ppo_linen's to all that must have it

A section goes from its banner to the next. Parts of one that are a script's own stay as they are.
"""

import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = ("ppo_torch", "ppo_torch_compile", "ppo_linen", "ppo_nnx", "ppo_nnx_cached")
SCRIPTS += ("ppo_nnx_tree", "ppo_equinox")
JAX_SCRIPTS = SCRIPTS[2:]
TORCH_SCRIPTS = SCRIPTS[:2]
NNX_SCRIPTS = ("ppo_nnx", "ppo_nnx_cached", "ppo_nnx_vmap", "ppo_nnx_tree")
GYMNASIUM_SCRIPTS = ("ppo_torch_gymnasium", "ppo_linen_gymnasium")
VMAP_SCRIPTS = ("ppo_linen_vmap", "ppo_nnx_vmap", "ppo_torch_vmap")
RNN_SCRIPTS = ("ppo_rnn_linen", "ppo_rnn_nnx", "ppo_rnn_equinox", "ppo_rnn_torch")
ALL_SCRIPTS = (*SCRIPTS, *GYMNASIUM_SCRIPTS)
PPO_SCRIPTS = (*ALL_SCRIPTS, *VMAP_SCRIPTS, *RNN_SCRIPTS)
SECTIONS = ["Arguments", "Environment", "Agent", "Storage", "Rollout", "GAE", "Loss", "Update"]
SECTIONS += ["Training", "Run log"]
VMAP_SECTIONS = [*SECTIONS[:-1], "Run logs", "Run log"]
BANNER = re.compile(r"^# === ([\w ]+?) =+$", flags=re.MULTILINE)
TORCH_PAIR = ("ppo_torch", "ppo_torch_gymnasium")
LINEN_PAIR = ("ppo_linen", "ppo_linen_gymnasium")
LINEN_SCRIPTS = (*LINEN_PAIR, "ppo_linen_vmap")
DQN_PAIRS = [("dqn_linen", "dqn_linen_gymnasium"), ("dqn_torch", "dqn_torch_gymnasium")]
DQN_SCRIPTS = (*DQN_PAIRS[0], *DQN_PAIRS[1], "dqn_torch_compile")
DQN_GYMNASIUM_SCRIPTS = tuple(pair[1] for pair in DQN_PAIRS)
# By framework: both libraries of environments, and PyTorch compiled.
DQN_GROUPS = [DQN_PAIRS[0], (*DQN_PAIRS[1], "dqn_torch_compile")]
OTHERS = (*TORCH_SCRIPTS, *JAX_SCRIPTS[1:])  # that are like ppo_linen where frameworks are not seen
IN_TORCH = (*TORCH_SCRIPTS, TORCH_PAIR[1], VMAP_SCRIPTS[2])
IN_JAX = (*JAX_SCRIPTS, LINEN_PAIR[1], *VMAP_SCRIPTS[:2])

# Section -> groups of scripts in which it is the same; the first of a group stands for it.
SHARED = {
    "Arguments": [
        ("ppo_linen", *OTHERS),
        GYMNASIUM_SCRIPTS[::-1],
        VMAP_SCRIPTS,
        RNN_SCRIPTS,
        ("dqn_linen", "dqn_torch", "dqn_torch_compile"),
        DQN_GYMNASIUM_SCRIPTS,
    ],
    "Environment": [
        ("ppo_linen", *OTHERS, *VMAP_SCRIPTS),
        (*GYMNASIUM_SCRIPTS[::-1], *DQN_GYMNASIUM_SCRIPTS),
        RNN_SCRIPTS,
        ("dqn_linen", "dqn_torch", "dqn_torch_compile"),
    ],
    "Agent": [TORCH_PAIR, LINEN_SCRIPTS, NNX_SCRIPTS, *DQN_PAIRS],
    "Replay": DQN_GROUPS,
    "Act": DQN_GROUPS,
    "Storage": [IN_TORCH, IN_JAX, RNN_SCRIPTS[:3]],
    "Rollout": [TORCH_SCRIPTS, LINEN_SCRIPTS[::2], NNX_SCRIPTS],
    "GAE": [(*IN_TORCH, RNN_SCRIPTS[3]), (*IN_JAX, *RNN_SCRIPTS[:3])],
    "Loss": [
        IN_TORCH,
        LINEN_SCRIPTS,
        (*NNX_SCRIPTS, "ppo_equinox"),
        RNN_SCRIPTS[1:3],
        *DQN_GROUPS,
    ],
    "Update": [TORCH_PAIR, LINEN_SCRIPTS, NNX_SCRIPTS[:3], *DQN_PAIRS],
    "Run log": [
        ("ppo_linen", *OTHERS, *GYMNASIUM_SCRIPTS, *VMAP_SCRIPTS, *RNN_SCRIPTS),
        DQN_SCRIPTS,
    ],
    "Run logs": [VMAP_SCRIPTS],
}
# What a script may have of its own in a shared section: its flag for jit, and PyTorch's hand-over.
OWN = {
    "Arguments": re.compile(r"^    jit(_env)?: bool = .*\n", flags=re.MULTILINE),
    "Environment": re.compile(r"^def to_torch.*\Z", flags=re.MULTILINE | re.DOTALL),
}


def path_of(script: str) -> Path:
    """Of a script by its name: at the top level, or in more/."""
    path = ROOT / f"{script}.py"
    return path if path.exists() else ROOT / "more" / f"{script}.py"


def read(script: str) -> str:
    return path_of(script).read_text()


def sections(text: str) -> dict[str, str]:
    """Name -> text below the banner, up to the next."""
    parts = BANNER.split(text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def shared_part(script: str, section: str) -> str:
    """The section without what is the script's own; a blank line more or less does not count."""
    text = sections(read(script))[section]
    return OWN[section].sub("", text).rstrip() if section in OWN else text


def group_of(script: str, section: str) -> tuple[str, ...]:
    """The scripts that share the section with this one; none if it is its own."""
    return next((group for group in SHARED.get(section, []) if script in group), ())


def stand_ins(section: str, scripts: tuple[str, ...] = ALL_SCRIPTS) -> list[str]:
    """The scripts, but one only of those that share the section: to test it once."""
    firsts = [(group_of(name, section) or (name,))[0] for name in scripts]
    return list(dict.fromkeys(firsts))


def differences() -> list[str]:
    """Lines of unified diffs between each group's first script and the others."""
    lines = []
    for section, groups in SHARED.items():
        for first, *others in groups:
            for other in others:
                ours = shared_part(first, section).splitlines()
                theirs = shared_part(other, section).splitlines()
                titles = f"{first}.py: {section}", f"{other}.py: {section}"
                lines += difflib.unified_diff(ours, theirs, *titles, lineterm="", n=1)
    return lines


def copy(script: str, section: str) -> list[str]:
    """Copy a script's section to all that share it; return those that changed."""
    changed = []
    for other in group_of(script, section):
        text = read(other)
        old, new = sections(text)[section], sections(read(script))[section]
        own = OWN[section].search(old) if section in OWN else None
        kept = own[0] if own else ""
        if section == "Arguments":
            new = OWN[section].sub(lambda _, kept=kept: kept, new)
        if section == "Environment":
            new = OWN[section].sub("", new).rstrip() + "\n\n\n" + kept
        if new != old:
            path_of(other).write_text(text.replace(old, new))
            changed.append(other)
    return changed


def main(arguments: list[str]) -> int:
    if not arguments:
        lines = differences()
        print("\n".join(lines) or "Shared sections are the same in all scripts.")
        return bool(lines)
    if len(arguments) != 2 or not group_of(*arguments):
        shared = ", ".join(SHARED)
        usage = f"sections.py: name a script and one of its shared sections: {shared}"
        print(usage, file=sys.stderr)
        return 2
    print(f"changed: {', '.join(copy(*arguments)) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

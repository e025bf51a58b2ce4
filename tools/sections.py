"""Show differences between sections that scripts share, or copy a section to all of them.

    python -m tools.sections                     # show differences; status 0 if there are none
    python -m tools.sections ppo_linen "Run log" # copy from ppo_linen to the others

A section extends from its banner to the next one. Script-specific parts are neither compared nor
copied.
"""

import ast
import difflib
import re
import subprocess
import sys
from pathlib import Path

from analysis.catalog import SCRIPTS as ROWS
from analysis.catalog import file_of

ROOT = Path(__file__).parent.parent
SECTIONS = ["Arguments", "Environment", "Agent", "Storage", "Rollout", "GAE", "Loss", "Update"]
SECTIONS += ["Training", "Checkpoint", "Run log"]
VMAP_SECTIONS = [*SECTIONS[:-1], "Run logs", "Run log"]
CONTINUOUS_SECTIONS = [*SECTIONS[:2], "Statistics", *SECTIONS[2:]]
BANNER = re.compile(r"^# === ([\w ]+?) =+$", flags=re.MULTILINE)


def scripts(*words: str) -> tuple[str, ...]:
    """Return the scripts whose row in scripts.toml contains all words as values.

    The values are the algorithm, the framework and the setting.
    """
    return tuple(name for name, row in ROWS.items() if set(words) <= set(row.values()))


def but(group: tuple[str, ...], *others: str) -> tuple[str, ...]:
    return tuple(name for name in group if name not in others)


PPO_SCRIPTS, DQN_SCRIPTS, SAC_SCRIPTS = scripts("ppo"), scripts("dqn"), scripts("sac")
SCRIPTS = scripts("ppo", "plain")
TORCH_SCRIPTS = scripts("ppo", "plain", "torch")
JAX_SCRIPTS = but(SCRIPTS, *TORCH_SCRIPTS)
VMAP_SCRIPTS = scripts("ppo", "many agents")
DEVICES_SCRIPTS = scripts("ppo", "many devices")
RNN_SCRIPTS = scripts("ppo", "recurrent")
GYMNASIUM_SCRIPTS = scripts("ppo", "Gymnasium")
ALL_SCRIPTS = (*SCRIPTS, *GYMNASIUM_SCRIPTS)
CONTINUOUS_IN_GYMNAX = scripts("ppo", "continuous")
CONTINUOUS_IN_GYMNASIUM = scripts("ppo", "continuous, Gymnasium")
CONTINUOUS_SCRIPTS = (*CONTINUOUS_IN_GYMNAX, *CONTINUOUS_IN_GYMNASIUM)
IMAGE_SCRIPTS = scripts("ppo", "images")
IMAGES_IN_TORCH = scripts("ppo", "images", "torch")
IMAGES_IN_JAX = but(IMAGE_SCRIPTS, *IMAGES_IN_TORCH)
# Pairs of corresponding scripts, for environments in JAX and in Gymnasium.
CONTINUOUS_PAIRS = [(x, f"{x}_gymnasium") for x in CONTINUOUS_IN_GYMNAX if f"{x}_gymnasium" in ROWS]
DQN_PAIRS = [(x.removesuffix("_gymnasium"), x) for x in scripts("dqn", "Gymnasium")]
SAC_PAIRS = [(x, f"{x}_gymnasium") for x in scripts("sac", "plain")]
TORCH_PAIR = ("ppo_torch", "ppo_torch_gymnasium")
OFF_POLICY_SETTINGS = [(x, y) for x in ("dqn", "sac") for y in ("plain", "Gymnasium")]
# PPO scripts for discrete actions by framework, except those for recurrent policies or images.
OTHERS = (*RNN_SCRIPTS, *CONTINUOUS_SCRIPTS, *IMAGE_SCRIPTS)
IN_LINEN = but(scripts("ppo", "linen"), *OTHERS)
IN_NNX = but(scripts("ppo", "nnx"), *OTHERS)
GRAPH_MODE = ("ppo_nnx", "ppo_nnx_cached")  # all other NNX scripts use tree mode
IN_EQUINOX = but(scripts("ppo", "equinox"), *OTHERS)
IN_TORCH = but(scripts("ppo", "torch"), *OTHERS)
IN_JAX = (*IN_LINEN, *IN_NNX, *IN_EQUINOX)
RNN_IN_JAX = but(RNN_SCRIPTS, *scripts("torch"))
CONTINUOUS_IN_JAX = but(CONTINUOUS_SCRIPTS, *scripts("torch"))
CONTINUOUS_IN_TORCH = but(CONTINUOUS_SCRIPTS, *CONTINUOUS_IN_JAX)
# The eager and the compiled PyTorch script for continuous actions in Gymnasium.
ROBOTS_IN_TORCH = but(CONTINUOUS_IN_TORCH, *CONTINUOUS_IN_GYMNAX)

# Section -> groups of scripts with the same text; the first script represents its group.
SHARED = {
    "Arguments": [
        (*SCRIPTS, *DEVICES_SCRIPTS),
        GYMNASIUM_SCRIPTS,
        VMAP_SCRIPTS,
        RNN_SCRIPTS,
        CONTINUOUS_IN_GYMNAX,
        CONTINUOUS_IN_GYMNASIUM,
        IMAGE_SCRIPTS,
        scripts("dqn", "plain"),
        scripts("dqn", "Gymnasium"),
        scripts("sac", "plain"),
        scripts("sac", "Gymnasium"),
    ],
    "Environment": [
        (*SCRIPTS, *VMAP_SCRIPTS, *DEVICES_SCRIPTS),
        GYMNASIUM_SCRIPTS,
        RNN_SCRIPTS,
        CONTINUOUS_IN_GYMNAX,
        CONTINUOUS_IN_GYMNASIUM,
        IMAGE_SCRIPTS,
        scripts("dqn", "plain"),
        scripts("dqn", "Gymnasium"),
        scripts("sac", "plain"),
        scripts("sac", "Gymnasium"),
    ],
    "Statistics": [CONTINUOUS_IN_JAX, CONTINUOUS_IN_TORCH],
    "Agent": [
        (*TORCH_PAIR, "ppo_torch_ddp"),
        IN_LINEN,
        IN_NNX,
        *CONTINUOUS_PAIRS,
        DQN_PAIRS[-1],
        SAC_PAIRS[-1],
    ],
    "Replay": [
        *(but(scripts(*words), *scripts("torch")) for words in OFF_POLICY_SETTINGS),
        scripts("dqn", "torch"),
        scripts("sac", "torch"),
    ],
    "Act": [scripts("dqn", "plain", "torch"), scripts("sac", "torch")],
    "Storage": [
        but(IN_TORCH, "ppo_torch_vmap"),
        IN_JAX,
        RNN_IN_JAX,
        CONTINUOUS_IN_JAX,
        CONTINUOUS_IN_TORCH,
        IMAGES_IN_TORCH,
        IMAGES_IN_JAX,
    ],
    "Rollout": [
        (*TORCH_SCRIPTS, "ppo_torch_ddp"),
        but(IN_LINEN, *GYMNASIUM_SCRIPTS),
        but(IN_NNX, *GYMNASIUM_SCRIPTS),
        ROBOTS_IN_TORCH,
        IMAGES_IN_TORCH,
    ],
    "GAE": [
        scripts("ppo", "torch"),
        (*IN_JAX, *RNN_IN_JAX, *CONTINUOUS_IN_JAX, *IMAGES_IN_JAX),
    ],
    "Loss": [
        (*IN_TORCH, *IMAGES_IN_TORCH),
        (*IN_LINEN, "ppo_cnn_linen_gymnasium"),
        (*IN_NNX, *IN_EQUINOX, "ppo_cnn_nnx_gymnasium"),
        but(RNN_IN_JAX, "ppo_rnn_linen"),
        CONTINUOUS_PAIRS[0],
        CONTINUOUS_IN_TORCH,
        ("ppo_continuous_nnx", "ppo_continuous_nnx_gymnasium", "ppo_continuous_equinox"),
        scripts("dqn", "linen"),
        scripts("dqn", "nnx"),
        scripts("dqn", "torch"),
        scripts("sac", "linen"),
        scripts("sac", "nnx"),
        scripts("sac", "torch"),
    ],
    "Update": [
        TORCH_PAIR,
        but(IN_LINEN, "ppo_linen_sharded"),
        GRAPH_MODE,
        but(IN_NNX, *GRAPH_MODE, "ppo_nnx_sharded"),
        *CONTINUOUS_PAIRS,
    ],
    "Checkpoint": [
        ("ppo_linen", "ppo_linen_sharded"),
        (*scripts("ppo", "plain", "nnx"), "ppo_nnx_sharded"),
        TORCH_SCRIPTS,
        ROBOTS_IN_TORCH,
        IMAGES_IN_TORCH,
        scripts("dqn", "plain", "torch"),
    ],
    "Run log": [(*PPO_SCRIPTS, *DQN_SCRIPTS, *SAC_SCRIPTS)],
    "Run logs": [VMAP_SCRIPTS],
}
# Script-specific: the Environment section of PyTorch scripts ends with functions that share arrays
# with JAX.
HAND_OVER = re.compile(r"^def to_torch.*\Z", flags=re.MULTILINE | re.DOTALL)


def path_of(script: str) -> Path:
    return ROOT / file_of(script)


def read(script: str) -> str:
    return path_of(script).read_text(encoding="utf-8")


def sections(text: str) -> dict[str, str]:
    """Return the text below each banner, by section name."""
    parts = BANNER.split(text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def function(script: str, wanted: str) -> str:
    """Return the source of a function, method or class."""
    for node in ast.walk(ast.parse(read(script))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == wanted:
            return "\n".join(read(script).splitlines()[node.lineno - 1 : node.end_lineno])
    raise AssertionError(f"{script} has no {wanted}")


def shared_part(script: str, section: str) -> str:
    """Return the section without its script-specific part and trailing blank lines."""
    return HAND_OVER.sub("", sections(read(script))[section]).rstrip()


def group_of(script: str, section: str) -> tuple[str, ...]:
    """Return the scripts with the same section, including `script`, or () if it is not shared."""
    return next((group for group in SHARED.get(section, []) if script in group), ())


def stand_ins(section: str, scripts: tuple[str, ...] = ALL_SCRIPTS) -> list[str]:
    """Return one script per version of the section, so that each version is tested once."""
    firsts = [(group_of(name, section) or (name,))[0] for name in scripts]
    return list(dict.fromkeys(firsts))


def changed_lines(first: str, second: str) -> int:
    """Return the number of lines that differ between two scripts, as counted by `diff`."""
    lines = subprocess.run(
        ["diff", path_of(first), path_of(second)], capture_output=True, text=True
    )
    return sum(line[0] in "<>" for line in lines.stdout.splitlines())


def differences() -> list[str]:
    """Return unified diffs between the first script of each group and the others."""
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
    """Copy a section of a script to all scripts that share it; return those that changed."""
    changed = []
    new = shared_part(script, section)
    for other in group_of(script, section):
        text = read(other)
        old = shared_part(other, section)
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

"""Run more/ppo_nnx_gymnasium.py with another way to call its policy at every environment step.

    python studies/nnx_calls/policy.py nnx.jit --env-id CartPole-v1

The flags are those of the script. All ways give the same metrics, and share the update. races.toml
compares them with ppo_linen_gymnasium.py; race.py reads the metrics that RunLog writes.
"""

import runpy
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

SCRIPT = Path(__file__).parents[2] / "more/ppo_nnx_gymnasium.py"
MAKE = "    policy_fn = jit(policy, agent)\n"
CALL = "= rollout(policy_fn, obs, "
GRAPH_JIT = "nnx.jit(policy, graph=True, graph_updates=True)"
SPLIT = """\
    graphdef = nnx.graphdef(agent)

    @jax.jit
    def policy_fn(state, obs, noise):
        return policy(nnx.merge(graphdef, state), obs, noise)

"""
# Method -> replacements in the script, from old to new text.
WAYS = {
    "nnx.jit": {MAKE: f"    policy_fn = partial({GRAPH_JIT}, agent)\n"},
    "nnx.cached_partial": {MAKE: f"    policy_fn = nnx.cached_partial({GRAPH_JIT}, agent)\n"},
    "nnx.jit_partial": {},  # as in the script
    "split_and_merge": {MAKE: SPLIT, CALL: "= rollout(partial(policy_fn, nnx.state(agent)), obs, "},
}


def variant(way: str) -> str:
    """Return the text of the script with another way to call the policy."""
    text = SCRIPT.read_text(encoding="utf-8")
    for old, new in WAYS[way].items():
        if text.count(old) != 1:
            raise ValueError(f"{SCRIPT} no longer contains this text, so update WAYS: {old!r}")
        text = text.replace(old, new)
    return text


def main() -> None:
    way = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if way not in WAYS:
        sys.exit(f"policy.py: name one of {', '.join(WAYS)}, then the flags of the script")
    with TemporaryDirectory() as folder:
        path = Path(folder, SCRIPT.name)
        path.write_text(variant(way), encoding="utf-8")
        runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main()

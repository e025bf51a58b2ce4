"""Run more/ppo_continuous_nnx_gymnasium.py with the initial weights of the Linen script.

    python studies/nnx_calls/same_weights.py mujoco

From the same weights, both scripts log the same metrics, so their robots move identically. Step
times in MuJoCo depend on the motion. race.py reads the metrics that RunLog writes.
"""

import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "more"))

linen = importlib.import_module("ppo_continuous_linen_gymnasium")
script = importlib.import_module("ppo_continuous_nnx_gymnasium")
make_agent = script.make_agent


def make_same_agent(args, obs_shape, action_dim, key):
    """Return the agent and the optimizer of the NNX script, with the weights of the Linen agent."""
    agent, optimizer = make_agent(args, obs_shape, action_dim, key)
    params = linen.make_agent(args, obs_shape, action_dim, key).params["params"]
    for name in ("actor", "critic"):
        mlp = getattr(agent, name)
        for layer, weights in zip([*mlp.hidden, mlp.output], params[name].values(), strict=True):
            layer.kernel[...] = weights["kernel"]
            layer.bias[...] = weights["bias"]
    return agent, optimizer


if __name__ == "__main__":
    vars(script)["make_agent"] = make_same_agent
    script.train(script.parse_args())

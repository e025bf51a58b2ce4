"""MemoryChain from gymnax with 30 steps instead of 5.

    python more/ppo_rnn_linen.py --env-id envs.memory_chain:MemoryChain30

The first observation contains a bit. At the end of the episode, the action that equals this bit
earns a reward of 1, and the other action a reward of -1.
"""

from gymnax.environments import spaces
from gymnax.environments.bsuite.memory_chain import EnvParams, MemoryChain


class MemoryChain30(MemoryChain):
    @property
    def default_params(self) -> EnvParams:
        return EnvParams(memory_length=30)

    def observation_space(self, params: EnvParams) -> spaces.Box:
        return spaces.Box(-1, 1, (self.num_bits + 2,))  # the bit is -1 or 1; gymnax declares 0 to 1

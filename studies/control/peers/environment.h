// The environment that ppo_rltools.py compiles into the training loop: the pendulum of RLtools.
#include <rl_tools/rl/environments/pendulum/operations_cpu.h>

template <typename TYPE_POLICY, typename TI>
using ENVIRONMENT_FACTORY = rl_tools::rl::environments::Pendulum<
    rl_tools::rl::environments::pendulum::Specification<TYPE_POLICY, TI>>;

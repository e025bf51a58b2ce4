# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "tensordict==0.6.2", "torchrl==0.6.0",
#   "stable-baselines3==2.9.2", "gymnasium[mujoco]==0.29.1", "mujoco==4.0.0", "numpy==1.26.4",
#   "tyro==1.0.17", "tqdm==4.70.1", "wandb==0.31.0"]
#
# [tool.uv.sources]  # the build without CUDA's gigabytes
# torch = { index = "pytorch-cpu", marker = "sys_platform == 'linux'" }
#
# [[tool.uv.index]]
# name = "pytorch-cpu"
# url = "https://download.pytorch.org/whl/cpu"
# explicit = true
# ///
"""A peer: LeanRL's SAC itself, from your checkout, by the shared settings.

    git clone https://github.com/meta-pytorch/LeanRL ../leanrl
    git -C ../leanrl checkout 8dbb6336b7f6cc65cdbbeb2e86637c38867e2677
    uv run studies/control/peers/sac_leanrl.py --total-timesteps 1000 --compile

Without --compile it is sac_continuous_action.py, with it sac_continuous_action_torchcompile.py.
It differs in these: at every second step the actor is updated twice, and not once at each; learning
rates of critics and alpha are 1e-3. CUDA graphs are off, since there is no GPU, and W&B is
disabled. Both files take Gymnasium 0.29, which has HalfCheetah-v4 and not v5, the same robot. They
take the TensorDict and TorchRL of their time: with newer ones the file that compiles fails.
"""

import checkout
import flags

REPOSITORY = "meta-pytorch/LeanRL"
COMMIT = "8dbb6336b7f6cc65cdbbeb2e86637c38867e2677"
EAGER = "leanrl/sac_continuous_action.py"
COMPILED = "leanrl/sac_continuous_action_torchcompile.py"


def main() -> None:
    parser = flags.sac(env_id="HalfCheetah-v4")
    parser.add_argument("--checkout", default="../leanrl", help="of LeanRL at the commit")
    parser.add_argument("--compile", action="store_true", help="the file that compiles")
    args = parser.parse_args()
    compiled = vars(args).pop("compile")
    file = COMPILED if compiled else EAGER
    checkout.become(args, REPOSITORY, COMMIT, file, ["--compile"] if compiled else [])


if __name__ == "__main__":
    main()

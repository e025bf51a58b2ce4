#!/usr/bin/env bash
# Race PyTorch with matmul precision high and medium against Linen, on one core: 15 minutes
#
#   studies/mkl/race.sh    # appends to studies/mkl/races.jsonl; needs gymnasium[mujoco]==1.3.0
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "$0")")/../.."

race() { # [FLAGS] SCRIPTS: arguments of race.py
  python race.py --out studies/mkl/races.jsonl --cores 0 --turns 24 "$@"
}

medium="--matmul-precision medium"
robot="mujoco --num-steps 200 --learning-starts 1000"
race --warm-up 8 "more/sac_linen_gymnasium.py $robot" \
  "more/sac_torch_gymnasium.py $robot" "more/sac_torch_gymnasium.py $robot $medium" \
  "more/sac_torch_compile_gymnasium.py $robot" "more/sac_torch_compile_gymnasium.py $robot $medium"
race "more/ppo_continuous_linen_gymnasium.py mujoco" \
  "more/ppo_continuous_torch_gymnasium.py mujoco" \
  "more/ppo_continuous_torch_gymnasium.py mujoco $medium" \
  "more/ppo_continuous_torch_compile_gymnasium.py mujoco" \
  "more/ppo_continuous_torch_compile_gymnasium.py mujoco $medium"
for sizes in "64 64" "128 128"; do
  race "ppo_linen.py --hidden-sizes $sizes" \
    "ppo_torch.py --hidden-sizes $sizes" "ppo_torch.py --hidden-sizes $sizes $medium" \
    "ppo_torch_compile.py --hidden-sizes $sizes" "ppo_torch_compile.py --hidden-sizes $sizes $medium"
done

# A copy that computes tanh from sigmoid, which does not use MKL
copy=$(mktemp -d)
trap 'rm -r "$copy"' EXIT
sed 's/x = layer(x).tanh()/x = 2 * torch.sigmoid(2 * layer(x)) - 1/' \
  more/ppo_continuous_torch_gymnasium.py >"$copy/by_sigmoid.py"
race "more/ppo_continuous_torch_gymnasium.py mujoco" "$copy/by_sigmoid.py mujoco"

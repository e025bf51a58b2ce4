#!/usr/bin/env bash
# Race PyTorch with and without the line, beside Linen, on one core: a quarter of an hour
#
#   studies/mkl/race.sh    # adds to studies/mkl/races.jsonl; needs gymnasium[mujoco]==1.3.0
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "$0")")/../.."

race() { # FLAGS of race.py, and then each script and its own flags
  python race.py --out studies/mkl/races.jsonl --cores 0 --turns 24 "$@"
}

line="--matmul-precision medium"
robot="mujoco --num-steps 200 --learning-starts 1000"
race --warm-up 8 "more/sac_linen_gymnasium.py $robot" \
  "more/sac_torch_gymnasium.py $robot" "more/sac_torch_gymnasium.py $robot $line" \
  "more/sac_torch_compile_gymnasium.py $robot" "more/sac_torch_compile_gymnasium.py $robot $line"
race "more/ppo_continuous_linen_gymnasium.py mujoco" \
  "more/ppo_continuous_torch_gymnasium.py mujoco" \
  "more/ppo_continuous_torch_gymnasium.py mujoco $line" \
  "more/ppo_continuous_torch_compile_gymnasium.py mujoco" \
  "more/ppo_continuous_torch_compile_gymnasium.py mujoco $line"
for sizes in "64 64" "128 128"; do
  race "ppo_linen.py --hidden-sizes $sizes" \
    "ppo_torch.py --hidden-sizes $sizes" "ppo_torch.py --hidden-sizes $sizes $line" \
    "ppo_torch_compile.py --hidden-sizes $sizes" "ppo_torch_compile.py --hidden-sizes $sizes $line"
done

# tanh by sigmoid, which MKL does not take, in a copy
copy=$(mktemp -d)
trap 'rm -r "$copy"' EXIT
sed 's/x = layer(x).tanh()/x = 2 * torch.sigmoid(2 * layer(x)) - 1/' \
  more/ppo_continuous_torch_gymnasium.py >"$copy/by_sigmoid.py"
race "more/ppo_continuous_torch_gymnasium.py mujoco" "$copy/by_sigmoid.py mujoco"

#!/usr/bin/env bash
# Race copies of a script, and two different scripts, on an idle or a busy machine
#
#   studies/race/validate.sh quiet 4    # each race four times, 20 minutes on two cores
#   studies/race/validate.sh busy 4     # 40 minutes, beside two processes that multiply matrices
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "$0")")/../.."

loads=()
if [[ $1 == busy ]]; then
  trap 'kill "${loads[@]}"' EXIT
  for _ in 1 2; do
    OMP_NUM_THREADS=1 python -c '
import numpy as np
x = np.ones((500, 500))
while True:
    x = x @ x / 500' &
    loads+=("$!")
  done
fi

race() { # FILE ARGUMENTS
  python race.py --out "studies/race/$1.jsonl" "${@:2}"
}

copies=(ppo_linen.py ppo_linen.py ppo_linen.py ppo_linen.py)
pair=(ppo_linen.py ppo_torch.py)
for _ in $(seq "$2"); do
  race "$1" "${copies[@]}"
  race "$1_one_core" --cores 0 "${copies[@]}"
  race "pair_$1" "${pair[@]}"
  race "pair_$1_one_core" --cores 0 "${pair[@]}"
done

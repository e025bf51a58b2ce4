#!/usr/bin/env bash
# Race a script against copies of itself, and a pair with a known answer, quiet and beside other work.
#
#   studies/race/validate.sh 6    # six races of each kind: an hour on two cores that are idle before
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "$0")")"
root=../..
copies=("$root/ppo_linen.py" "$root/ppo_linen.py" "$root/ppo_linen.py" "$root/ppo_linen.py")

load() { # two processes that multiply matrices, until they are killed
  for _ in 1 2; do
    OMP_NUM_THREADS=1 python -c '
import numpy as np
x = np.ones((500, 500))
while True:
    x = x @ x / 500' &
    loads+=("$!")
  done
}

race() { # FILE ARGUMENTS
  python "$root/race.py" --out "$1.jsonl" "${@:2}"
}

for _ in $(seq "$1"); do
  race quiet "${copies[@]}"
  race quiet_one_core --cores 0 "${copies[@]}"
  race pair_quiet "$root/ppo_linen.py" "$root/ppo_torch.py"
  race pair_quiet_one_core --cores 0 "$root/ppo_linen.py" "$root/ppo_torch.py"
  loads=()
  trap 'kill "${loads[@]}"' EXIT
  load
  race busy "${copies[@]}"
  race busy_one_core --cores 0 "${copies[@]}"
  race pair_busy "$root/ppo_linen.py" "$root/ppo_torch.py"
  race pair_busy_one_core --cores 0 "$root/ppo_linen.py" "$root/ppo_torch.py"
  kill "${loads[@]}"
  trap - EXIT
done

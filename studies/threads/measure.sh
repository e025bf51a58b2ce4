#!/usr/bin/env bash
# Race each script with one and with two threads, on idle or on busy cores
#
#   studies/threads/measure.sh idle    # 30 races, 45 minutes on two cores
#   studies/threads/measure.sh busy    # 14 races, 35 minutes, beside two processes that multiply matrices
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "$0")")/../.."

if [[ ${1:-idle} == busy ]]; then
  loads=()
  trap 'kill "${loads[@]}"' EXIT
  for _ in 1 2; do
    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python -c '
import numpy as np
x = np.ones((500, 500))
while True:
    x = x @ x / 500' &
    loads+=("$!")
  done
  python race.py --study studies/threads/busy
else
  python race.py --study studies/threads
fi

#!/usr/bin/env bash
# Lints and tests everything. Arguments go to pytest: ./test.sh -k gae
# ./test.sh fast lints, and tests what an edit of a script breaks first, in under a minute.
set -euo pipefail
SETUP_WITH=tune # what tune.py needs, too
source "$(dirname "$(readlink -f "$0")")/setup.sh"

shopt -s nullglob globstar
scripts=(*.sh *.slurm .ci/run tests/**/*.sh)
ruff check --quiet .
ruff format --quiet --check .
ty check --quiet .
shellcheck -x "${scripts[@]}"
shfmt -i 2 -d "${scripts[@]}"
for file in Dockerfile*; do hadolint "$file"; done
jactionlint .github/workflows/*.yml

if [[ ${1:-} == fast ]]; then
  set -- tests/test_{structure,numerics,dqn_structure,dqn_numerics}.py "${@:2}"
fi
exec python -m pytest -n 2 --dist worksteal "$@"

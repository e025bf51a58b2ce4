#!/usr/bin/env bash
# Lints and tests everything. Arguments go to pytest: ./test.sh -k gae
set -euo pipefail
source "$(dirname "$0")/setup.sh"

shopt -s nullglob globstar
scripts=(*.sh *.slurm .ci/run tests/**/*.sh)
ruff check --quiet .
ruff format --quiet --check .
ty check --quiet .
shellcheck -x "${scripts[@]}"
shfmt -i 2 -d "${scripts[@]}"
for file in Dockerfile*; do hadolint "$file"; done

exec python -m pytest -n 2 "$@"

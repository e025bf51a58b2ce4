#!/usr/bin/env bash
# Lints and tests everything. Arguments go to pytest: ./test.sh -k gae
# ./test.sh lint only lints, as the pre-commit hook does.
# ./test.sh fast lints, and tests what an edit of a script breaks first, in under a minute.
# ./test.sh newest tests and runs the scripts on Python 3.13 with the newest packages, which it installs.
set -euo pipefail
SETUP_WITH="tune test" # what tune.py and the tests need, too

if [[ ${1:-} == newest && -z ${VENV:-} ]]; then
  if ! python3.13 -c '' 2>/dev/null; then
    echo "test: newest needs Python 3.13, as python3.13 on PATH." >&2
    exit 2
  fi
  project=$(dirname "$(readlink -f "$0")")
  VENV=$project/.venv-newest
  python3.13 -m venv "$VENV"
  pip=("$VENV/bin/python" -m pip --disable-pip-version-check install -qq --upgrade)
  # As setup.sh does it: a machine without a GPU has no use for the CUDA that comes with PyPI's torch.
  "${pip[@]}" --no-deps --retries 0 --timeout 15 --index-url https://download.pytorch.org/whl/cpu torch 2>/dev/null ||
    echo "test: PyTorch's CPU index does not answer, so torch comes from PyPI"
  # Names without versions: pip finds the newest that admit each other.
  "${pip[@]}" --requirement <(sed 's/==[^ ]*//' "$project/requirements.txt")
fi
source "$(dirname "$(readlink -f "$0")")/setup.sh"

if [[ ${1:-} == newest ]]; then
  python --version
  python -m pip list --format freeze | grep -E '^(torch|jax|flax|equinox|optax|gymnax|numpy)=='
  runs=$(mktemp -d)
  trap 'rm -r "$runs"' EXIT
  for script in ppo_*.py more/*.py; do
    python "$script" --total-timesteps 24576 --runs-dir "$runs"
  done
  files=(tests/test_*{numerics,structure,resume}.py tests/test_{vmap,dqn_training}.py)
  python -m pytest -n 2 --dist worksteal "${files[@]}" "${@:2}"
  exit
fi

shopt -s nullglob globstar
scripts=(*.sh *.slurm .ci/run tests/**/*.sh)
ruff check --quiet .
ruff format --quiet --check .
ty check --quiet .
shellcheck -x "${scripts[@]}"
shfmt -i 2 -d "${scripts[@]}"
for file in Dockerfile*; do hadolint "$file"; done
jactionlint .github/workflows/*.yml

if [[ ${1:-} == lint ]]; then exit; fi
if [[ ${1:-} == fast ]]; then
  set -- tests/test_{structure,numerics,dqn_structure,dqn_numerics}.py "${@:2}"
fi
exec python -m pytest -n 2 --dist worksteal "$@"

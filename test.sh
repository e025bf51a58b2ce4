#!/usr/bin/env bash
# Runs the linters and all tests. Arguments are passed on to pytest: ./test.sh -k gae
# ./test.sh lint      only the linters, as in the pre-commit hook
# ./test.sh fast      the linters, and the tests most likely to fail after a change to a script: one minute
# ./test.sh newest    installs the newest packages for Python 3.13, then runs all scripts and their tests
set -euo pipefail
SETUP_WITH="tune test" # requirements-tune.txt and requirements-test.txt

if [[ ${1:-} == newest && -z ${VENV:-} ]]; then
  if ! python3.13 -c '' 2>/dev/null; then
    echo "test: './test.sh newest' needs python3.13 on PATH." >&2
    exit 2
  fi
  project=$(dirname "$(readlink -f "$0")")
  VENV=$project/.venv-newest
  python3.13 -m venv "$VENV"
  pip=("$VENV/bin/python" -m pip --disable-pip-version-check install -qq --upgrade)
  # Prefer the CPU build of torch, like setup.sh: torch from PyPI includes CUDA, which only a GPU needs.
  "${pip[@]}" --no-deps --retries 0 --timeout 15 --index-url https://download.pytorch.org/whl/cpu torch 2>/dev/null ||
    echo "test: cannot download the CPU build of PyTorch, so torch is installed from PyPI"
  # Without version pins, pip installs the newest compatible packages.
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
  files=(tests/scripts/test_*{numerics,structure,resume}.py tests/scripts/test_{vmap,dqn_training}.py)
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
  set -- tests/scripts/test_{structure,numerics,dqn_structure,dqn_numerics}.py "${@:2}"
fi
exec python -m pytest -n 2 --dist worksteal "$@"

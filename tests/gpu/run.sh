#!/usr/bin/env bash
# Tests and measures on a GPU, the most valuable first, in pieces that end in time: --help
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "$0")")/../.."

usage() {
  cat <<'END'
Usage: tests/gpu/run.sh [SECONDS [FLAGS]]

Goes on with what is not done, and ends within SECONDS, default 540. FLAGS go to ./benchmark.sh gpu.
What is done lies in runs/gpu, and is packed into gpu.tar.gz in the folder $OUT, default runs. With
that file in runs, another machine goes on. A test is made again where its log is deleted.

  tests/gpu/run.sh steps      print the steps in their order; of runs, what their names begin with
  tests/gpu/run.sh wheels     download what a Python 3.12 with jax and torch lacks, for a machine
                              without a network whose python3 is such a one
  tests/gpu/run.sh rehearse   do it all on a CPU, with tiny sizes, in a copy of the project
END
}

work=runs/gpu
wheels=tests/gpu/wheels
# What the scripts and these tests import: flax and tensorboard declare more.
packages=(flax gymnax optax equinox tyro tensorboard "gymnasium<1.4" pytest)
packages+=(absl-py chex cloudpickle contourpy cycler docstring-parser farama-notifications fonttools)
packages+=(iniconfig jaxtyping kiwisolver markdown-it-py matplotlib mdurl msgpack packaging pandas pillow pluggy)
packages+=(protobuf pygments pyparsing python-dateutil pyyaml rich seaborn six toolz treescope typeguard)
packages+=(wadler-lindig)
packages+=(brax==0.14.2 etils glfw jaxopt mujoco==4.0.0 mujoco-core==4.0.0 mujoco-mjx trimesh) # for envs/brax.py

# === Steps ======================================================================================
steps() {
  once products 60 -m studies.gpu.products "$work/products.json"
  tests handover 200 tests/gpu/test_handover.py -k "not memory"
  runs "CartPole-v1__small"
  tests training 420 tests/test_training.py \
    -k "(nothing_compiles_twice or goes_on_from_its_checkpoint) and not gymnasium"
  runs "CartPole-v1__large"
  runs "agents"
  tests memory 300 tests/gpu/test_handover.py -k memory
  runs "CartPole-v1__medium"
  runs "Breakout-MinAtar__own"
  runs "Pendulum-v1"
  robots_in_jax
  tests robots 400 tests/test_continuous.py tests/test_sac.py \
    -k "best_actions or killed_run or nothing_compiles"
  runs "rnn"
  tests resume 300 tests/gpu/test_gpu.py -k goes_on
  runs "(Acrobot-v1|Breakout-MinAtar)__(small|medium|large)"
  tests streams 450 tests/gpu/test_gpu.py -k "not goes_on"
  JAX_DEFAULT_MATMUL_PRECISION=highest tests numerics 300 tests/test_numerics.py -k "not torch"
}

tests() { # NAME SECONDS ARGUMENTS of pytest
  once "$1" "$2" -m pytest -v --tb=short -p no:cacheprovider "${@:3}"
}

once() { # NAME SECONDS ARGUMENTS of python: if so many seconds are left; what it says is kept
  local log=$work/$1.log
  if [[ $listing ]]; then
    echo "$1: python ${*:3}"
  elif [[ ! -e $log ]] && begin "$1" "$2"; then
    timeout --kill-after=10 "$2" python "${@:3}" &>"$log.new" || echo "exit status $?" >>"$log.new"
    mv "$log.new" "$log"
    tail -n 2 "$log"
    pack
  fi
}

robots_in_jax() { # brax, which setup.sh does not install
  if [[ $listing ]] || python -c 'import brax' &>/dev/null; then
    once brax 500 -m studies.brax.measure 10 --many
  fi
}

runs() { # REGEX: those of studies/gpu/grid.toml whose names begin so
  if [[ $listing ]]; then
    echo "runs: $1"
  elif begin "$1" 20; then
    timeout --kill-after=20 $((end - SECONDS)) ./benchmark.sh gpu --runs-dir "$work" --no-report \
      --only "run-name $1" "${flags[@]}" || left+=("$1")
    pack
  fi
}

begin() { # NAME SECONDS: are so many left?
  if ((end - SECONDS >= $2)); then echo "[$SECONDS s] $1"; else left+=("$1") && false; fi
}

pack() { # what the analysis reads; of a program's agents the first alone
  find "$work" -type f -regex '.*\.\(json\|jsonl\|log\)' ! -path '*/partial/*' \
    \( ! -path '*/seed*/*' -o -path '*/seed1/*' -o -path '*/seed?001/*' \) -print0 |
    tar --null --files-from - -czf "$out/gpu.new"
  mv "$out/gpu.new" "$out/gpu.tar.gz"
}

# === Before all =================================================================================
make_environment() { # which has what python3 has, and from the wheels what that lacks
  export VENV=.venv-gpu
  if [[ -e $VENV/complete ]]; then return; fi
  python3 -m venv --clear --without-pip "$VENV"
  # Where python3 is an environment itself, --system-site-packages would give another Python's.
  python3 -c 'import site; print("import site; list(map(site.addsitedir,", site.getsitepackages(), "))")' \
    >"$(echo "$VENV"/lib/python*/site-packages)/base.pth"
  python3 -m pip --python "$VENV/bin/python" --disable-pip-version-check install -qq --no-index \
    --no-deps --find-links "$wheels" "${packages[@]}"
  touch "$VENV/complete"
}

rehearse() { # two runs of each step
  local copy
  copy=$(mktemp -d)
  git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$copy"
  if [[ -d $wheels ]]; then cp -r "$wheels" "$copy/tests/gpu"; fi
  sed -i -E -e 's/^iterations = .*/iterations = 10/' \
    -e 's/^(steps|num-steps|learning-starts) = 1000/\1 = 64/' \
    -e '1a steps = 64\nflags = { num-envs = 8, num-steps = 8 }' "$copy/studies/gpu/grid.toml"
  exec "$copy/tests/gpu/run.sh" 3600 --repeats 1 --to 2
}

listing="" left=() out=${OUT:-runs} flags=("${@:2}")
case ${1:-540} in
steps) listing=yes && steps && exit ;;
wheels) exec python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest "$wheels" "${packages[@]}" ;;
rehearse) rehearse ;;
*[!0-9]*) usage && exit ;;
esac
end=$((${1:-540} - 30)) # of the steps; then what runs is stopped, and all is packed
if [[ ! ${VENV:-} && -d $wheels ]]; then make_environment; fi
source ./setup.sh
if nvidia-smi -L &>/dev/null; then
  python -c 'import jax, torch; assert jax.default_backend() == "gpu" and torch.cuda.is_available()'
fi
ulimit -n "$(ulimit -Hn)" # each of 2,048 agents has two files open
export TEST_DEVICE=gpu    # or tests/conftest.py would hide it
mkdir -p "$work" "$out"
if [[ ! -e $work/products.json && -e runs/gpu.tar.gz ]]; then tar -xzf runs/gpu.tar.gz; fi
steps
echo "Left: ${left[*]:-nothing}; in $out/gpu.tar.gz is what is done."

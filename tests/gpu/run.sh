#!/usr/bin/env bash
# Run tests and measurements on a GPU within a time limit, the most valuable first. See --help.
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "$0")")/../.."

usage() {
  cat <<'END'
Usage: tests/gpu/run.sh [SECONDS [FLAGS]]

Runs the missing steps, and ends within SECONDS (default 540). FLAGS are passed to race.py: with
--turns 12 --seconds 0.05, a first pass shows in minutes whether everything works, and fills the
compiler caches if JAX_COMPILATION_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR are set.
Results are written to runs/gpu, and packed into gpu.tar.gz in the folder $OUT (default runs). To
continue on another machine, copy that file to runs. To repeat a step, delete its log.

  tests/gpu/run.sh steps      print the steps in order; for runs, a prefix of their names
  tests/gpu/run.sh wheels     download the packages that an image with Python 3.12, jax and torch
                              lacks, for a machine without a network
  tests/gpu/run.sh rehearse   run everything on a CPU, with tiny sizes, in a copy of the project
END
}

work=runs/gpu
wheels=tests/gpu/wheels
# Container images with jax and torch usually include matplotlib, pandas, scipy and tensorboard.
packages=(flax equinox optax chex jaxtyping treescope wadler-lindig)
packages+=(gymnax six gymnasium==1.3.0 farama-notifications cloudpickle)
packages+=(pydantic==2.14.4 pydantic-core==2.50.5 annotated-types typing-inspection)
packages+=(tyro docstring-parser typeguard pytest iniconfig pluggy)
packages+=(brax==0.14.2 etils glfw jaxopt mujoco==4.0.0 mujoco-core==4.0.0 mujoco-mjx trimesh) # for envs/brax.py

# === Steps ======================================================================================
steps() {
  tests handover 120 tests/gpu/test_handover.py -k "not memory"
  once products 60 -m studies.gpu.products "$work/products.json"
  race robots 160 --warm-up 8 "${robots[@]}"
  race large 210 --apart "${large[@]}"
  race small 200 "${small[@]}"
  race agents 110 "${agents[@]}"
  race brax 150 --warm-up 8 "${brax[@]}"
  race breakout 170 "${breakout[@]}"
  runs "CartPole-v1__small" # measures the startup time
  tests training 420 tests/scripts/test_training.py \
    -k "(nothing_compiles_twice or resuming_is_exact) and not gymnasium"
  tests resume 300 tests/gpu/test_gpu.py -k resuming
  tests memory 300 tests/gpu/test_handover.py -k memory
  tests robots 400 tests/scripts/test_continuous.py tests/scripts/test_sac.py \
    -k "best_actions or continues_exactly or nothing_compiles"
  tests streams 450 tests/gpu/test_gpu.py -k "not resuming"
  JAX_DEFAULT_MATMUL_PRECISION=highest tests numerics 300 tests/scripts/test_numerics.py -k "not torch"
  runs "CartPole-v1__(medium|large)"
  runs "(Acrobot-v1|Breakout-MinAtar)__(small|medium|large)"
  runs "(Breakout-MinAtar__default|rnn)" # DQN and recurrent PPO
}

scripts=(ppo_linen ppo_nnx ppo_nnx_cached ppo_nnx_tree ppo_equinox ppo_torch ppo_torch_compile)
some=(ppo_linen ppo_nnx ppo_equinox ppo_torch ppo_torch_compile)
large=() small=() breakout=()
for script in "${scripts[@]}"; do
  small+=("$script.py")
  small+=("$script.py --hidden-sizes 256 256 256")
  large+=("$script.py --hidden-sizes 1024 1024 1024 1024 1024 1024")
done
for script in "${some[@]}"; do
  breakout+=("$script.py --env-id Breakout-MinAtar")
  breakout+=("$script.py --env-id Breakout-MinAtar --hidden-sizes 256 256 256")
done
# Short iterations, so that learning starts within the warm-up.
sac="mujoco --num-steps 200 --learning-starts 1000"
robots=(
  "more/sac_linen_gymnasium.py $sac"
  "more/sac_torch_gymnasium.py $sac"
  "more/sac_torch_compile_gymnasium.py $sac"
  "more/ppo_continuous_linen_gymnasium.py mujoco"
  "more/ppo_continuous_torch_gymnasium.py mujoco"
  "more/ppo_continuous_torch_compile_gymnasium.py mujoco"
)
cheetah="--env-id envs.brax:HalfCheetah"
brax_sac="--num-envs 1 --num-steps 50 --learning-starts 200 --batch-size 256 --train-frequency 1 --hidden-sizes 256 256"
brax=(
  "more/ppo_continuous_linen.py $cheetah --num-envs 32 --num-steps 64 --num-minibatches 8"
  "more/ppo_continuous_torch.py $cheetah --num-envs 32 --num-steps 64 --num-minibatches 8"
  "more/sac_linen.py $cheetah $brax_sac"
  "more/sac_torch.py $cheetah $brax_sac"
)
agents=()
for script in more/ppo_linen_vmap.py more/ppo_torch_vmap.py; do
  for number in 1 8 64; do agents+=("$script --num-agents $number"); done
done

# Arguments: the name, a time limit in seconds (estimated for an H100), and arguments for race.py.
race() {
  once "race-$1" "$2" race.py --out "$work/$1.jsonl" --seconds 0.25 --turns 14 "${@:3}" "${flags[@]}"
}

# Arguments: the name, a time limit in seconds, and arguments for pytest.
tests() {
  once "$1" "$2" -m pytest -v --tb=short -p no:cacheprovider "${@:3}"
}

# Run Python and keep the output, if enough time is left and the step has not run before. Arguments:
# the name, a time limit in seconds, and arguments for Python.
once() {
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

# Start the missing runs of studies/gpu/grid.toml whose names start with the regular expression $1.
runs() {
  if [[ $listing ]]; then
    echo "runs: $1"
  elif begin "$1" 20; then
    timeout --kill-after=20 $((end - SECONDS)) ./benchmark.sh gpu --runs-dir "$work" --no-report \
      --only "run-name $1" "${grid[@]}" || left+=("$1")
    pack
  fi
}

# Print the name $1 of a step if $2 seconds are left. Otherwise, note it as left over and fail.
begin() {
  if ((end - SECONDS >= $2)); then echo "[$SECONDS s] $1"; else left+=("$1") && false; fi
}

# Pack the files that the analysis reads.
pack() {
  find "$work" -type f -regex '.*\.\(json\|jsonl\|log\)' ! -path '*/partial/*' -print0 |
    tar --null --files-from - -czf "$out/gpu.new"
  mv "$out/gpu.new" "$out/gpu.tar.gz"
}

# === Preparation ================================================================================
# Create an environment with the packages of python3 and the downloaded wheels.
make_environment() {
  export VENV=.venv-gpu
  if [[ -e $VENV/complete ]]; then return; fi
  python3 -m venv --clear --without-pip "$VENV"
  # If python3 is in an environment, --system-site-packages would add the wrong packages.
  python3 -c 'import site; print("import site; list(map(site.addsitedir,", site.getsitepackages(), "))")' \
    >"$(echo "$VENV"/lib/python*/site-packages)/base.pth"
  python3 -m pip --python "$VENV/bin/python" --disable-pip-version-check install -qq --no-index \
    --no-deps --find-links "$wheels" "${packages[@]}"
  touch "$VENV/complete"
}

# Run all steps in a copy of the project, but only two runs of the grid per step.
rehearse() {
  local copy
  copy=$(mktemp -d)
  git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$copy"
  if [[ -d $wheels ]]; then cp -r "$wheels" "$copy/tests/gpu"; fi
  sed -i -E -e 's/^iterations = .*/iterations = 10/' \
    -e '1a steps = 64\nflags = { num-envs = 8, num-steps = 8 }' "$copy/studies/gpu/grid.toml"
  GRID="--repeats 1 --to 2" exec "$copy/tests/gpu/run.sh" 3600 --turns 12 --seconds 0.05
}

listing="" left=() out=${OUT:-runs} flags=("${@:2}")
read -ra grid <<<"${GRID:-}" # flags for benchmark.sh that rehearse sets
case ${1:-540} in
steps) listing=yes && steps && exit ;;
wheels) exec python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest "$wheels" "${packages[@]}" ;;
rehearse) rehearse ;;
*[!0-9]*) usage && exit ;;
esac
end=$((${1:-540} - 30)) # reserve 30 s to stop the current step and pack the results
if [[ ! ${VENV:-} && -d $wheels ]]; then make_environment; fi
source ./setup.sh
if nvidia-smi -L &>/dev/null; then
  python -c 'import jax, torch; assert jax.default_backend() == "gpu" and torch.cuda.is_available()'
fi
export TEST_DEVICE=gpu # otherwise tests/conftest.py hides the GPU
mkdir -p "$work" "$out"
if [[ ! -e $work/products.json && -e runs/gpu.tar.gz ]]; then tar -xzf runs/gpu.tar.gz; fi
steps
echo "Steps left: ${left[*]:-none}. Results so far: $out/gpu.tar.gz"

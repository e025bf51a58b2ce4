#!/usr/bin/env bash
# Run tests and measurements on a GPU within a time limit, the most valuable first. See --help.
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "$0")")/../.."

usage() {
  cat <<'END'
Usage: tests/gpu/run.sh [SECONDS [FLAGS]]

Runs the missing steps, and ends within SECONDS (default 540). FLAGS are passed to race.py: with
--turns 12 --seconds 0.05, races are shorter, and flags after -- are passed on to all scripts.
Results are written to runs/gpu, and packed into gpu.tar.gz in the folder $OUT (default runs). To
continue on another machine, copy that file to runs. To repeat a step, delete its log.

  tests/gpu/run.sh steps      print the steps in order
  tests/gpu/run.sh wheels     download the packages that an image with Python 3.12, jax and torch
                              lacks, for a machine without a network
  tests/gpu/run.sh rehearse   run all steps on a CPU in a copy of the project: two programs per race, in
                              short iterations; tests are collected but not run
END
}

work=runs/gpu
wheels=tests/gpu/wheels
# Container images with jax and torch usually include matplotlib, pandas, scipy and tensorboard.
packages=(flax equinox optax chex jaxtyping treescope wadler-lindig)
packages+=(gymnax six gymnasium==1.3.0 farama-notifications cloudpickle)
packages+=(pydantic==2.14.4 pydantic-core==2.50.5 annotated-types typing-inspection)
packages+=(tyro docstring-parser typeguard pytest iniconfig pluggy)
packages+=(ale-py==0.12.1)
packages+=(brax==0.14.2 etils glfw jaxopt mujoco==4.0.0 mujoco-core==4.0.0 mujoco-mjx trimesh) # for envs/brax.py

# === Steps ======================================================================================
# Each step has a name and a time limit in seconds, estimated for an H100. The numbers are the
# questions: 1. Where does the time of an environment step go in ppo_torch_compile.py? 2. Is the GPU
# faster than the CPU? 3. How many steps per second with up to 16,384 environments? 4. Images in
# float32 and bfloat16? 5. NNX, with one policy call per environment step?
steps() {
  tests handover 90 tests/gpu/test_handover.py -k "not memory"
  once step_cost 90 -m studies.gpu.step_cost "$work/step_cost.json" # 1
  race ppo 130                                                      # 1 and 2
  race cartpole 140                                                 # 3
  race large 140 --apart                                            # 1 and 2
  race robots 150 --warm-up 8                                       # 2
  race images 170                                                   # 2 and 4
  race nnx_calls 90                                                 # 5
  race brax 180                                                     # 3
  race breakout 150                                                 # 3
  race large_robots 150 --warm-up 8                                 # 2
  startup
  XLA_FLAGS=--xla_gpu_enable_command_buffer= \
    once step_cost_without_buffers 90 -m studies.gpu.step_cost "$work/step_cost_without_buffers.json"
  tests resume 240 tests/gpu/test_gpu.py -k resuming
  tests streams 300 tests/gpu/test_gpu.py -k "not resuming"
  tests memory 200 tests/gpu/test_handover.py -k memory
  tests training 420 tests/scripts/test_training.py \
    -k "(nothing_compiles_twice or resuming_is_exact) and not gymnasium"
  tests robots 400 tests/scripts/test_continuous.py tests/scripts/test_sac.py \
    -k "best_actions or continues_exactly or nothing_compiles"
  JAX_DEFAULT_MATMUL_PRECISION=highest tests numerics 300 tests/scripts/test_numerics.py -k "not torch"
}

# The programs of each race. The first one is the reference of the ratios.
ppo=() large=() cartpole=() breakout=() brax=() robots=() large_robots=() images=() nnx_calls=()
on_cpu="env JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES= python" # runs a script on the CPU

# The large network has an eighth of the usual steps and minibatches, because the CPU is slow. These
# programs start one after the other, so that compilers time their kernels on an idle GPU.
for script in ppo_linen.py ppo_torch_compile.py; do
  for program in "$script --hidden-sizes 64 64" "$script --hidden-sizes 256 256 256"; do
    ppo+=("$program" "$on_cpu $program")
  done
  program="$script --hidden-sizes 1024 1024 1024 1024 1024 1024 --num-steps 32 --num-minibatches 1"
  large+=("$program" "$on_cpu $program")
done

for number in 32 256 2048 16384; do
  size="--num-envs $number --num-steps 64"
  for script in ppo_linen.py ppo_torch_compile.py ppo_nnx_tree.py; do
    cartpole+=("$script --env-id CartPole-v1 $size")
    breakout+=("$script --env-id Breakout-MinAtar $size")
  done
  size="--num-envs $number --num-steps 16 --num-minibatches 8"
  for framework in linen torch nnx; do
    brax+=("more/ppo_continuous_$framework.py --env-id envs.brax:HalfCheetah $size")
  done
done

# SAC has short iterations, so that learning starts within the warm-up.
for framework in linen torch_compile; do
  sac="more/sac_${framework}_gymnasium.py mujoco --num-steps 50 --learning-starts 200"
  for program in "$sac" "more/ppo_continuous_${framework}_gymnasium.py mujoco"; do
    robots+=("$program" "$on_cpu $program")
    program+=" --hidden-sizes 1024 1024"
    large_robots+=("$program" "$on_cpu $program")
  done
done

# A quarter of the usual steps and minibatches.
for precision in float32 bfloat16; do
  pong="--num-steps 32 --num-minibatches 1 --precision $precision"
  for framework in linen torch_compile; do
    program="more/ppo_cnn_${framework}_gymnasium.py $pong"
    images+=("$program" "$on_cpu $program")
  done
  images+=("more/ppo_cnn_torch_gymnasium.py $pong" "more/ppo_cnn_nnx_gymnasium.py $pong")
done

nnx_calls=(more/ppo_linen_gymnasium.py)
for way in nnx.jit nnx.jit_partial nnx.cached_partial split_and_merge; do
  nnx_calls+=("studies/nnx_calls/policy.py $way")
done

# Arguments: the name of an array of programs, a time limit, and arguments for race.py.
race() {
  local -n programs=$1
  once "race-$1" "$2" race.py --out "$work/$1.jsonl" --seconds 0.25 --turns 14 "${@:3}" \
    "${programs[@]:0:${PROGRAMS:-100}}" "${flags[@]}"
}

# Arguments: the name, a time limit, and arguments for pytest.
tests() {
  once "$1" "$2" -m pytest -v --tb=short -p no:cacheprovider "${@:3}"
}

# Run Python and keep the output, if enough time is left and the step has not run before. Arguments:
# the name, a time limit in seconds, and arguments for Python.
once() {
  local log=$work/$1.log limit=$(($2 * ${SLOWDOWN:-1})) words
  if [[ $listing ]]; then
    words=("${@:3}") && echo "$1: python ${words[*]@Q}"
  elif [[ ! -e $log ]] && begin "$1" "$limit"; then
    timeout --kill-after=10 "$limit" python "${@:3}" &>"$log.new" || echo "exit status $?" >>"$log.new"
    mv "$log.new" "$log"
    tail -n 2 "$log"
    pack
  fi
}

# Start the missing runs of studies/gpu/grid.toml, which measure the startup time.
startup() {
  if [[ $listing ]]; then
    echo "startup: ./benchmark.sh gpu"
  elif begin startup 20; then
    timeout --kill-after=20 $((end - SECONDS)) ./benchmark.sh gpu --runs-dir "$work" --no-report \
      "${grid[@]}" || left+=(startup)
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

# Run all steps in a copy of the project. Tests are only collected, because ./test.sh runs them.
rehearse() {
  local copy
  copy=$(mktemp -d)
  git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$copy"
  if [[ -d $wheels ]]; then cp -r "$wheels" "$copy/tests/gpu"; fi
  sed -i -E -e 's/^iterations = .*/iterations = 10/' \
    -e '1a steps = 64\nflags = { num-envs = 8, num-steps = 8 }' "$copy/studies/gpu/grid.toml"
  export GRID="--repeats 1 --to 2" PROGRAMS=2 PYTEST_ADDOPTS=--collect-only SLOWDOWN=5
  exec "$copy/tests/gpu/run.sh" 7200 --turns 12 --seconds 0.05 -- --num-steps 16 --hidden-sizes 8
}

listing="" left=() out=${OUT:-runs} flags=("${@:2}")
read -ra grid <<<"${GRID:-}" # flags for benchmark.sh; rehearse sets them
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
if [[ ! -e $work && -e runs/gpu.tar.gz ]]; then tar -xzf runs/gpu.tar.gz; fi
mkdir -p "$work" "$out"
steps
echo "Steps left: ${left[*]:-none}. Results so far: $out/gpu.tar.gz"

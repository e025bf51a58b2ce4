#!/usr/bin/env bash
# Races the PPO scripts, each run in a fresh process: ./benchmark.sh --help
# shellcheck disable=SC2329 # presets are called by name, and others by traps
set -euo pipefail
unset CDPATH # with it, cd may go to another folder of the same name

usage() {
  cat <<'END'
Usage: ./benchmark.sh [PRESET] [FLAGS]

Presets (runs for one repeat):
  quick   the five scripts on CartPole-v1, small, 25 iterations (5); the default, with 3 repeats
  async   12 environments x linen, nnx_cached, torch_compile x 3 sizes (108)
  sync    12 environments x 8 scripts and modes x small, then Acrobot-v1 x 8 x 3 sizes (96 + 24),
          all with --sync-for-timing
  full    3 discarded warm-ups, then async, then sync (231)
Or your own grid, each as LIST or one,two,...:
  --scripts LIST    torch-none torch torch_compile linen-none linen nnx-none nnx nnx_cached
  --envs LIST       default CartPole-v1
  --sizes LIST      small (64, 64), medium (3 x 256), large (6 x 1024); default small
  --sync            wait for the device after each rollout, to time both phases

  --iterations N    of 8192 steps each; default 100, quick 25
  --repeats N       the whole grid N times, at most 1000; repeat r uses seed r in every script;
                    default 1, quick 3
  --seed N          seed of the order inside each (environment, size) block; default 1
  --only REGEX      keep the commands that match (extended regular expression); folders and --track
                    do not count
  --from I, --to I  the first and last line of the list to run
  --list, --count   print the commands, or how many they are, on any machine, and run nothing
  --dry-run         check --runs-dir and --gpus; print which runs are done and which would run
  --runs-dir DIR    default runs; what is complete there is not run again
  --timeout S       seconds after which a run counts as hanging; default 86400, a day
  --gpus 0,1        spread the runs over these GPUs, one at a time on each: numbers or UUIDs
                    that nvidia-smi -L lists
  --track           log to Weights & Biases too, in a group for each repeat: offline unless a server
                    accepts your key
  --notes TEXT      kept in benchmark.jsonl, and with each run in W&B
  --no-report       leave out the report at the end

The same command again resumes. Exit status: 0 all runs complete, 1 some failed, 2 wrong usage.
END
}

# === The grid ===================================================================================
all_environments=(CartPole-v1 Acrobot-v1 MountainCar-v0 DiscountingChain-bsuite MemoryChain-bsuite
  UmbrellaChain-bsuite BernoulliBandit-misc GaussianBandit-misc Asterix-MinAtar Breakout-MinAtar
  Freeway-MinAtar SpaceInvaders-MinAtar)
all_scripts=(torch-none torch torch_compile linen-none linen nnx-none nnx nnx_cached)
all_sizes=(small medium large)
declare -A hidden_sizes=([small]="64 64" [medium]="256 256 256"
  [large]="1024 1024 1024 1024 1024 1024")

quick() { block "" CartPole-v1 small torch torch_compile linen nnx nnx_cached; }

async() {
  for env in "${all_environments[@]}"; do
    for size in "${all_sizes[@]}"; do
      block "" "$env" "$size" linen nnx_cached torch_compile
    done
  done
}

sync() {
  for env in "${all_environments[@]}"; do
    block sync "$env" small "${all_scripts[@]}"
  done
  for size in "${all_sizes[@]}"; do
    block sync-sizes Acrobot-v1 "$size" "${all_scripts[@]}"
  done
}

full() {
  if ((repeat == 1)); then block warmup CartPole-v1 small linen nnx_cached torch_compile; fi
  async
  sync
}

custom() {
  for env in "${environments[@]}"; do
    for size in "${sizes[@]}"; do
      block "$sync" "$env" "$size" "${scripts[@]}"
    done
  done
}

grid() {
  for ((repeat = 1; repeat <= repeats; repeat++)); do "$preset"; done
}

block() { # STUDY ENV SIZE SCRIPTS...: print a block's cells, in an order that the seed decides
  local salt="$seed $repeat $1 $2 $3" script
  for script in "${@:4}"; do cell "$1" "$2" "$3" "$script"; done |
    LC_ALL=C sort --field-separator=$'\t' --key=1,1R --random-source=<(md5sum <<<"$salt")
}

cell() { # STUDY ENV SIZE SCRIPT: print the run's name, what --only looks at and the command
  local study=$1 env=$2 size=$3 script=$4 name path words key
  name=${study:+${study}__}${env}__${size}__${script}__${iterations}it__seed$repeat
  read -ra words <<<"ppo_${script%-none}.py --env-id $env --hidden-sizes ${hidden_sizes[$size]}"
  words+=(--seed "$repeat" --total-timesteps $((iterations * 8192)))
  case $script in torch-none) words+=(--no-jit-env) ;; *-none) words+=(--no-jit) ;; esac
  case $study in sync*) words+=(--sync-for-timing) ;; esac
  key="${words[*]} --run-name $name"
  if [[ $track ]]; then words+=(--track); fi
  path=$(path_of "$name")
  words+=(--runs-dir "${path%/*}" --run-name "$name")
  printf '%s\t%s\t%s\n' "$name" "$key" "$(quoted "$python" "${words[@]}")"
}

quoted() { # WORDS...: one line that a shell reads as these words
  local word line=""
  for word in "$@"; do
    if [[ ! $word =~ ^[A-Za-z0-9_./,:=+-]+$ ]]; then printf -v word '%q' "$word"; fi
    line+=" $word"
  done
  echo "${line# }"
}

path_of() { # NAME: the run's folder; what is discarded is out of the report's way
  case $1 in warmup*) echo "$state/warmup/$1" ;; *) echo "$runs_dir/$1" ;; esac
}

# === Arguments ==================================================================================
fail() { # one sentence for what the user can mend
  echo "benchmark.sh: ${*//$'\n'/\\n}" >&2
  exit 2
}

choices() { # FLAG LIST ALLOWED...: set the array `chosen`, each item once
  local flag=$1 items item
  IFS=$', \t\n' read -rd '' -a items <<<"$2" || true # it misses the NUL that would end a list
  shift 2
  if ((${#items[@]} == 0)); then fail "$flag must name at least one of: $*."; fi
  chosen=()
  for item in "${items[@]}"; do
    if [[ " $* " != *" $item "* ]]; then fail "$flag must be of: $*; not '$item'."; fi
    if [[ " ${chosen[*]} " != *" $item "* ]]; then chosen+=("$item"); fi
  done
}

check_gpus() { # CUDA takes the beginning of a UUID too; where it sees no such GPU, runs go to the CPU
  local gpu listed line seen=""
  listed=$(nvidia-smi -L 2>/dev/null || true)
  for gpu in "${gpus[@]}"; do
    if [[ ! $gpu ]]; then return; fi # no --gpus
    line=$(grep -E "^GPU $gpu: |\(UUID: $gpu" <<<"$listed") || true
    if [[ ! $line || $line == *$'\n'* ]]; then
      fail "--gpus must be numbers or UUIDs of GPUs that 'nvidia-smi -L' lists, not '$gpu'."
    fi
    if [[ $seen == *"$line"* ]]; then fail "--gpus must name a GPU once, but '$gpu' is there twice."; fi
    seen+=$line
  done
}

check_runs_dir() { # the folders, or those that they would be made in, and what would be in the way
  local path name
  for path in "$runs_dir" "$state" "$state/partial" "$state/warmup"; do
    until [[ -e $path || -L $path ]]; do path=$(dirname -- "$path"); done
    if [[ ! -d $path || ! -w $path || ! -x $path ]]; then
      fail "--runs-dir needs a folder to write to, which '$path' is not."
    fi
  done
  for name in "${names[@]}"; do
    for path in "$log" "$state"/{started,room,"$name.log","$name.failed"}; do
      if [[ (-e $path || -L $path) && ! (-f $path && -w $path) ]]; then
        fail "--runs-dir needs a file to write to, which '$path' is not."
      fi
    done
  done
}

lock_of() { # GPU: the file that is locked while a run goes on there
  # Per machine, user and GPU; a Slurm job has GPUs of its own, whatever their numbers.
  echo "${TMPDIR:-/tmp}/ppo-benchmark.$UID.${SLURM_JOB_ID:-}.${1:-${CUDA_VISIBLE_DEVICES:-}}.lock"
}

check_locks() {
  local gpu
  for gpu in "${gpus[@]}"; do
    if ! { : >>"$(lock_of "$gpu")"; } 2>/dev/null; then
      fail "cannot write to '$(lock_of "$gpu")'; TMPDIR may name another folder."
    fi
  done
}

preset="" action=run iterations="" repeats="" seed=1 only="" from=1 to="" runs_dir=runs
timeout=86400 gpus=("") track="" notes="" report=yes sync="" own_grid=""
environments=(CartPole-v1) sizes=(small) scripts=(torch torch_compile linen nnx nnx_cached)
invocation=$(quoted "$0" "$@")
while (($# > 0)); do
  case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
  case $1 in
  -h | --help) usage && exit ;;
  quick | async | sync | full)
    if [[ $preset ]]; then fail "there is one preset, not both '$preset' and '$1'."; fi
    preset=$1
    ;;
  --sync) sync=sync own_grid=$1 ;;
  --track) track=yes ;;
  --no-report) report="" ;;
  --list | --count | --dry-run) action=${1#--} ;;
  --scripts | --envs | --sizes | --iterations | --repeats | --seed | --only | --from | --to | \
    --runs-dir | --timeout | --gpus | --notes)
    if (($# < 2)); then fail "$1 needs a value."; fi
    case $1 in
    --scripts)
      value=${2//ppo_/}
      choices "$1" "${value//.py/}" "${all_scripts[@]}"
      scripts=("${chosen[@]}") own_grid=$1
      ;;
    --envs) choices "$1" "$2" "${all_environments[@]}" && environments=("${chosen[@]}") own_grid=$1 ;;
    --sizes) choices "$1" "$2" "${all_sizes[@]}" && sizes=("${chosen[@]}") own_grid=$1 ;;
    --only) only=$2 ;;
    --notes) notes=$2 ;;
    --runs-dir)
      if [[ ! $2 || $2 == -* ]]; then fail "--runs-dir must name a folder, not '$2'."; fi
      runs_dir=$2
      ;;
    --gpus)
      if [[ ! $2 =~ ^[A-Za-z0-9-]+(,[A-Za-z0-9-]+)*$ ]]; then
        fail "--gpus must be numbers or names with commas between them, as in 0,1; not '$2'."
      fi
      IFS=, read -ra gpus <<<"$2"
      ;;
    *)
      if [[ ! $2 =~ ^[1-9][0-9]{0,8}$ ]]; then fail "$1 must be a positive whole number, not '$2'."; fi
      printf -v "${1#--}" %s "$2" # iterations, repeats, seed, from, to or timeout
      ;;
    esac
    shift
    ;;
  *) fail "unknown argument '$1'; see ./benchmark.sh --help." ;;
  esac
  shift
done
if [[ $own_grid && $preset ]]; then
  fail "$own_grid makes a grid of your own, so leave out the preset '$preset', or use --only."
fi
if ((from > ${to:-from})); then fail "--from is $from, which is after --to $to."; fi
preset=${preset:-${own_grid:+custom}}
preset=${preset:-quick}
if [[ $preset == quick ]]; then iterations=${iterations:-25} repeats=${repeats:-3}; fi
iterations=${iterations:-100} repeats=${repeats:-1}
if ((repeats > 1000)); then fail "--repeats must be at most 1000, not $repeats."; fi
here=$(readlink -f -- "$0")
here=${here%/*}/
if [[ ! . -ef $here ]]; then
  if [[ $runs_dir != /* ]]; then runs_dir=$PWD/$runs_dir; fi
  if [[ ${VENV:-/} != /* ]]; then VENV=$PWD/$VENV; fi
fi
cd -- "$here"
python=${VENV:-.venv}/bin/python
state=$runs_dir/.benchmark # outputs, locks, what is discarded or was left behind by a killed run
log=$runs_dir/benchmark.jsonl

names=() commands=() lines=() # of the selected cells; a cell's line is its place in the whole list
line=0 code=0
grep -Eq -e "$only" </dev/null 2>/dev/null || code=$?
if ((code == 2)); then fail "--only must be an extended regular expression, not '$only'."; fi
while IFS=$'\t' read -r name key command; do
  if [[ ! $key =~ $only ]]; then continue; fi
  line=$((line + 1))
  if ((line < from || line > ${to:-line})); then continue; fi
  names+=("$name") commands+=("$command") lines+=("$line")
done < <(grid)
total=${#names[@]}
if ((line == 0)); then fail "nothing to run: no command matches --only '$only'."; fi
if ((total == 0)); then fail "nothing to run: --from is $from, but the list ends at line $line."; fi

is_done() { # NAME: an empty file is what a machine may leave that lost its power
  local path
  path=$(path_of "$1")/run.json
  [[ -f $path && -s $path ]]
}

case $action in
list) printf '%s\n' "${commands[@]}" && exit ;;
count) echo "$total" && exit ;;
dry-run)
  check_gpus
  check_runs_dir
  missing=0
  for name in "${names[@]}"; do
    if is_done "$name"; then echo "done     $name"; else echo "missing  $name" && missing=$((missing + 1)); fi
  done
  echo "Runs missing: $missing of $total." && exit
  ;;
esac

# === One run ====================================================================================
log_event() ( # KEY=VALUE...: append a line to the log; the tail is that of a file
  trap '' INT TERM HUP # Python would print where it was interrupted
  exec python -IS - "$log" "$@" <<'END'
import fcntl, json, os, sys, time

event = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "load": os.getloadavg()}
for key, _, value in (word.partition("=") for word in sys.argv[2:]):
    if key == "tail":
        with open(value, "rb") as file:
            file.seek(-min(2000, file.seek(0, os.SEEK_END)), os.SEEK_END)
            value = file.read().decode(errors="replace")
    event[key] = int(value) if value.isdecimal() and key not in ("notes", "tail") else value
with open(sys.argv[1], "ab+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":  # half a line, from a process that was killed as it wrote
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
    file.write(json.dumps(event).encode() + b"\n")
END
)

check_room() { # end this worker where a run could not write its files
  # One name for all, so that what a killed process leaves there goes with the next.
  local probe=$state/room
  if ! { head -c 1000000 /dev/zero >"$probe"; } 2>/dev/null; then
    rm -f "$probe"
    echo "benchmark.sh: no room left in $runs_dir, so the grid stops; completed runs are kept." >&2
    exit 1
  fi
  rm -f "$probe"
}

take() { # LOCK WHAT: wait for a lock that others may hold, and say for what
  local holders
  if flock --nonblock "$1"; then return; fi
  holders=$(grep -ls "^lock:.* FLOCK .*:$(stat -Lc %i "/dev/fd/$1") " /proc/[0-9]*/fdinfo/* |
    cut -d/ -f3 | sort -un | paste -sd,) || true
  echo "Waiting for $2${holders:+ (process $holders)}."
  flock "$1" || exit 1 # it was killed, or the file system has no locks
}

kill_children() { # PID: kill its descendants, each stopped first so that it starts no others
  local child
  # shellcheck disable=SC2013 # the file holds one line of numbers
  for child in $(cat "/proc/$1/task/"*/children 2>/dev/null); do
    kill -STOP "$child" 2>/dev/null || continue
    kill_children "$child"
    kill -KILL "$child" 2>/dev/null || true
  done
}

kill_strays() { # REGEX: kill what runs left behind, whatever its parent or process group is by now
  local environ
  while read -r environ; do
    kill -KILL "$(basename "$(dirname "$environ")")" 2>/dev/null || true
  done < <(grep -lsxz "BENCHMARK_RUN=$$ $1" /proc/[0-9]*/environ)
}

wandb_mode() { # online if a server accepts the key, else offline; waits for nobody
  if timeout 30 python -c 'import sys, wandb; sys.exit(not wandb.login(verify=True))' &>/dev/null </dev/null; then
    echo online
  else
    echo offline
  fi
}

clock() { printf '%d:%02d:%02d' $(($1 / 3600)) $(($1 / 60 % 60)) $(($1 % 60)); }

progress() { # NAME GPU: say which run starts, and about how long the rest takes
  local name complete=0 left=""
  for name in "${names[@]}"; do if is_done "$name"; then complete=$((complete + 1)); fi; done
  if ((complete > complete_at_start)); then
    left=$((SECONDS * (total - complete) / (complete - complete_at_start)))
    left=", about $(clock "$left") left"
  fi
  echo "[$complete/$total done, $(clock $SECONDS)$left] $1${2:+ on GPU $2}${WANDB_MODE:+, W&B $WANDB_MODE}"
}

attempt() { # I GPU [WAIT]: do cell I unless it is done; status 1 if another process is at it
  local name=${names[$1]} gpu=$2 path output code=0 start seconds reason after words
  path=$(path_of "$name") output=$state/$name.log
  if is_done "$name" || [[ $state/$name.failed -nt /dev/fd/$started ]]; then return; fi
  check_room
  # The output file is the cell's lock too. A run inherits both locks, so they outlive a killed
  # driver for as long as its last run does.
  exec {cell_lock}>>"$output"
  if [[ ${3:-} ]]; then
    take "$cell_lock" "$name, which is running already or left a process behind"
  elif ! flock --nonblock "$cell_lock"; then
    exec {cell_lock}>&-
    return 1
  fi
  take "$gpu_lock" "another benchmark on this machine to finish its run"
  if ! is_done "$name" && [[ ! $state/$name.failed -nt /dev/fd/$started ]]; then
    if ! kill -0 $$ 2>/dev/null; then exit 1; fi # the driver was killed; its grid ends here
    if [[ -e $path || -L $path ]]; then mkdir -p "$state/partial" && mv "$path" "$state/partial/$name.$(date +%s%N)"; fi
    : >"$output"
    if [[ $track ]]; then
      local -x WANDB_MODE=${WANDB_MODE:-$(wandb_mode)} WANDB_RUN_GROUP=$preset-repeat${name##*seed}
    fi
    progress "$name" "$gpu"
    log_event event=start run="$name" line="${lines[$1]}" preset="$preset" order_seed="$seed" \
      gpu="$gpu" wandb="${WANDB_MODE:-}" command="${commands[$1]}" || check_room
    eval "words=(${commands[$1]})"
    start=$SECONDS
    # timeout leads a process group of its own, which a terminal's Ctrl-C does not reach.
    BENCHMARK_RUN="$$ $name" timeout --kill-after=10 "$timeout" "${words[@]}" \
      </dev/null >>"$output" 2>&1 &
    wait $! 2>/dev/null || code=$? # bash would announce a killed run there
    kill_strays "$name"
    seconds=$((SECONDS - start))
    if is_done "$name"; then
      rm -f "$state/$name.failed"
      log_event event=end run="$name" completed=yes exit_status="$code" seconds="$seconds" || check_room
    else
      reason="exit status $code" after=", after $seconds s"
      if ((code == 137)); then reason="killed, as the kernel does when memory runs out"; fi
      if ((code == 124 || seconds >= timeout)); then reason="no end after $timeout s" after=""; fi
      check_room
      log_event event=end run="$name" completed=no exit_status="$code" seconds="$seconds" \
        reason="$reason" tail="$output" || check_room
      echo "$reason$after" >"$state/$name.failed"
      echo "FAILED $name: $reason$after"
      tail -n 5 "$output" | cut -c 1-200 | sed 's/^/    /'
    fi
  fi
  # Unlocked, and not only closed: a process that outlived its run may hold them open.
  flock --unlock "$gpu_lock"
  flock --unlock "$cell_lock"
  exec {cell_lock}>&-
}

# === All runs ===================================================================================
work() { # GPU: go through the grid; what other workers or drivers are at comes last
  local gpu=$1 i busy=()
  trap 'kill_children $BASHPID; exit 1' INT TERM HUP
  # CUDA would number the fastest GPU first, and not as nvidia-smi does.
  if [[ $gpu ]]; then export CUDA_VISIBLE_DEVICES=$gpu CUDA_DEVICE_ORDER=PCI_BUS_ID; fi
  exec {gpu_lock}>>"$(lock_of "$gpu")"
  for i in "${!names[@]}"; do attempt "$i" "$gpu" || busy+=("$i"); done
  for i in "${busy[@]}"; do attempt "$i" "$gpu" wait || true; done
}

stop() { # EXIT STATUS
  trap '' INT TERM HUP
  disown -a # or bash would announce each job that is killed
  kill_children $$
  kill_strays ".*"
  echo "Stopped. Completed runs are kept; to go on: $invocation" >&2
  exit "$1"
}

main() {
  local gpu name reason failed=() offline
  SECONDS=0
  export WANDB_FINISH_TIMEOUT=${WANDB_FINISH_TIMEOUT:-60} # seconds for a server that went away
  # Every run compiles for itself, or the second would start faster than the first.
  export TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 JAX_ENABLE_COMPILATION_CACHE=false
  if [[ $notes ]]; then export WANDB_NOTES=$notes; fi

  for gpu in "${gpus[@]}"; do work "$gpu" & done
  wait || true

  for name in "${names[@]}"; do if ! is_done "$name"; then failed+=("$name"); fi; done

  if [[ $report ]]; then
    python -m analysis.report "$runs_dir" --out "$runs_dir/report" &
    wait $! || echo "The report could not be made; the runs are in $runs_dir."
  fi
  offline=("$runs_dir"/*/wandb/offline-run-*)
  if [[ $track && -e ${offline[0]} ]]; then
    printf 'To send the offline runs to W&B: %q sync %q/*/wandb/offline-run-*\n' \
      "${python%python}wandb" "$runs_dir"
  fi
  if ((${#failed[@]} > 0)); then
    echo "Runs not complete: ${#failed[@]} of $total:"
    for name in "${failed[@]}"; do
      reason=$(cat "$state/$name.failed" 2>/dev/null || echo "not run")
      echo "    $name: $reason; output in $state/$name.log"
    done
    echo "To run them again: $invocation"
    return 1
  fi
  echo "Runs complete: $total of $total, in $runs_dir."
}

for tool in flock timeout md5sum; do
  if ! command -v "$tool" >/dev/null; then fail "needs Linux (or WSL2) with '$tool' installed."; fi
done
check_gpus
check_runs_dir
check_locks
source ./setup.sh
mkdir -p "$state" || exit 2
# A file without a name, whose time is the start of this driver.
{ exec {started}>"$state/started"; } 2>/dev/null || check_room
rm -f "$state/started"
trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
complete_at_start=0
for name in "${names[@]}"; do
  if is_done "$name"; then complete_at_start=$((complete_at_start + 1)); fi
done
log_event event=grid preset="$preset" runs="$total" complete="$complete_at_start" repeats="$repeats" \
  order_seed="$seed" host="$(uname -n)" notes="$notes" invocation="$invocation" || check_room
{ # read as a whole by bash, so that this file may change while the grid runs
  main
  exit
}

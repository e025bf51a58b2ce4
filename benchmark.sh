#!/usr/bin/env bash
# Races the scripts, each run in a fresh process: ./benchmark.sh --help
# shellcheck disable=SC2329 # some functions are called by traps
set -euo pipefail

usage() { # and with ALL every flag, and what each study has
  local grid line names=(studies/*/grid.toml)
  names=("${names[@]#studies/}")
  cat <<END
Usage: ./benchmark.sh [STUDY] [FLAGS]

Studies (without one: quick, five scripts on CartPole-v1 in 3 minutes):
  $(fold -s -w 76 <<<"${names[*]%/grid.toml}" | sed '2,$s/^/  /')

A grid of your own, each LIST as one,two,...:
  --scripts LIST    linen nnx nnx_cached nnx_tree equinox torch torch_compile,
                    or path/to/mine.py
  --envs LIST       default CartPole-v1; my_module:MyEnv is your own
  --sizes LIST      default small; units of each hidden layer:
$(sed -nE 's/^(\w+) = \[(.+)\]$/                      \1 (\2)/p' analysis/sizes.toml)
                      own (as the script has them)

  --iterations N    of 8192 steps each; default 100, or what the study says
  --repeats N       each run with N seeds; default 1, or what the study says
  --only REGEX      keep the commands that match
  --list, --count   print the commands, or how many they are, and run nothing
  --dry-run         print which runs are missing, and how long they take
  --runs-dir DIR    default runs; what is complete there is not run again
  --help-all        the other flags, and what each study has

The same command again runs what is missing.
END
  if [[ ! ${1:-} ]]; then return; fi
  cat <<'END'

More flags:
  --scripts LIST    also what else scripts.toml has, PPO's without their ppo_; and torch-none,
                    linen-none, nnx-none and equinox-none, which compile less
  --iterations N    scripts.toml says how many steps an iteration of each has
  --devices N       each run on N devices; for linen_sharded and torch_ddp alone
  --sync            wait for the device after each rollout, to time both phases
  --seed N          seed of the order inside each (environment, size) block; default 1
  --from I, --to I  the first and last line of the list to run
  --timeout S       seconds after which a run counts as hanging; default 86400, a day
  --gpus 0,1        spread the runs over these GPUs, one at a time on each: numbers or UUIDs
                    that nvidia-smi -L lists
  --track           log to Weights & Biases too, in a group for each repeat: offline unless a server
                    accepts your key
  --notes TEXT      kept in benchmark.jsonl, and with each run in W&B
  --no-report       leave out the report, and what else the study does at its end

What was not complete starts anew, since durations must be those of one process.
Exit status: 0 all runs complete, 1 some failed, 2 wrong usage.

Studies, and how long they take on two cores; studies/NAME/grid.toml lists the runs:
END
  for grid in studies/*/grid.toml; do
    read -r line <"$grid"
    printf '  %-8s %s\n' "$(basename "${grid%/grid.toml}")" "${line#\# }"
  done
}

# === Arguments ==================================================================================
fail() { # one sentence for what the user can mend
  echo "benchmark.sh: ${*//$'\n'/\\n}" >&2
  exit 2
}

check_gpus() { # CUDA takes the beginning of a UUID too; where it sees no such GPU, runs go to the CPU
  local gpu listed line seen=""
  listed=$(nvidia-smi -L 2>/dev/null || true)
  for gpu in "${gpus[@]}"; do
    if [[ ! $gpu ]]; then return; fi # no --gpus
    line=$(grep -E "^GPU $gpu: |\(UUID: $gpu\)" <<<"$listed") ||
      fail "--gpus must be numbers or UUIDs of GPUs that 'nvidia-smi -L' lists, not '$gpu'."
    if [[ $seen == *"$line"* ]]; then fail "--gpus must name a GPU once, but '$gpu' is there twice."; fi
    seen+=$line
  done
}

check_runs_dir() { # or the folder that it would be made in
  local path=$state
  until [[ -e $path || -L $path ]]; do path=$(dirname -- "$path"); done
  if [[ ! -d $path || ! -w $path || ! -x $path ]]; then
    fail "--runs-dir needs a folder to write to, which '$path' is not."
  fi
}

quote() { # WORDS...: print them so that a shell reads them as they are
  local word line=""
  for word in "$@"; do
    if [[ ! $word =~ ^[A-Za-z0-9_./,:=+-]+$ ]]; then printf -v word '%q' "$word"; fi
    line+=" $word"
  done
  echo "${line# }"
}

action=run runs_dir=runs timeout=86400 gpus=("") devices="" track="" notes="" report=yes grid_flags=()
invocation=$(quote "$0" "$@")
here=$(readlink -f -- "$0")
here=${here%/*}/
called_from=$PWD
while (($# > 0)); do
  case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
  case $1 in
  -h | --help) cd -- "$here" && usage && exit ;;
  --help-all) cd -- "$here" && usage all && exit ;;
  --sync) grid_flags+=("$1") ;;
  --track) track=yes grid_flags+=("$1") ;;
  --no-report) report="" ;;
  --list | --count | --dry-run) action=${1#--} ;;
  --scripts | --envs | --sizes | --iterations | --repeats | --devices | --seed | --only | --from | --to | \
    --runs-dir | --timeout | --gpus | --notes)
    if (($# < 2)); then fail "$1 needs a value."; fi
    case $1 in
    --notes) notes=$2 ;;
    --runs-dir) runs_dir=$2 ;;
    --timeout) timeout=$2 ;;
    --gpus)
      if [[ ! $2 =~ ^[A-Za-z0-9-]+(,[A-Za-z0-9-]+)*$ ]]; then fail "--gpus must be as 0,1; not '$2'."; fi
      IFS=, read -ra gpus <<<"$2"
      ;;
    *) # studies/grid.py checks these
      if [[ $1 == --devices ]]; then devices=$2; fi
      grid_flags+=("$1=$2")
      ;;
    esac
    shift
    ;;
  -*) fail "unknown argument '$1'; see ./benchmark.sh --help." ;;
  *) grid_flags+=("$1") ;;
  esac
  shift
done
if [[ $devices && ${gpus[0]} ]]; then fail "--devices takes the GPUs of CUDA_VISIBLE_DEVICES, so leave out --gpus."; fi
if [[ ! $runs_dir || $runs_dir == -* ]]; then fail "--runs-dir must name a folder, not '$runs_dir'."; fi
if [[ ! $timeout =~ ^[1-9][0-9]{0,8}$ ]]; then fail "--timeout must be a positive whole number, not '$timeout'."; fi
for tool in flock timeout; do
  if ! command -v "$tool" >/dev/null; then fail "needs Linux (or WSL2) with '$tool' installed."; fi
done
for python3 in python3.14 python3.13 python3.12 python3.11 python3 ""; do # as setup.sh looks for it
  if "$python3" -c 'import tomllib' 2>/dev/null; then break; fi
done
if [[ ! $python3 ]]; then fail "needs Python 3.11 or later on PATH."; fi
python=${VENV:-.venv}/bin/python
if [[ ! . -ef $here ]]; then
  if [[ $runs_dir != /* ]]; then runs_dir=$called_from/$runs_dir; fi
  if [[ ${VENV:-/} != /* ]]; then VENV=$called_from/$VENV; fi
  python=${VENV:-$here.venv}/bin/python
fi
grid=$("$python3" -IS "${here}studies/grid.py" --runs-dir="$runs_dir" --python="$python" "${grid_flags[@]}") || exit
cd -- "$here"
state=$runs_dir/.benchmark # outputs, locks, what is discarded or was left behind by a killed run
log=$runs_dir/benchmark.jsonl

begin=() end=() # commands of the study
# Of each run; its number is its place in the whole list.
numbers=() repeats=() seconds=() names=() paths=() commands=()
while IFS=$'\t' read -r kind number repeat second name command; do
  case $kind in
  study) study=$number study_repeats=$repeat order_seed=$second ;;
  begin) begin+=("$number") ;;
  end) end+=("$number") ;;
  run)
    path=$runs_dir/$name
    if [[ $name == warmup__* ]]; then path=$state/warmup/$name; fi # out of the report's way
    numbers+=("$number") repeats+=("$repeat") seconds+=("$second") names+=("$name")
    paths+=("$path") commands+=("$command")
    ;;
  esac
done <<<"$grid"
total=${#names[@]}

is_done() { # PATH: run.json is there from the start on, and says in the end that the run is completed
  local text=""
  if [[ -f $1/run.json ]]; then IFS= read -rd '' text <"$1/run.json" || true; fi
  [[ $text == *'"status": "completed"'* ]]
}

is_stopped() { # I: it has a checkpoint to go on from, and is one of the long runs that do
  local file
  if [[ ${commands[$1]} != *" --save-every "* ]] || is_done "${paths[$1]}"; then return 1; fi
  for file in "${paths[$1]}"/checkpoint.*; do
    if [[ -s $file && $file != *.new ]]; then return; fi
  done
  return 1
}

count_missing() { # set `missing`, and `left`: about how many seconds they take on two cores
  local i
  missing=0 left=0
  for i in "${!names[@]}"; do
    if is_done "${paths[$i]}"; then continue; fi
    missing=$((missing + 1)) left=$((left + seconds[i]))
  done
}

about() { # SECONDS
  if (($1 > 7200)); then echo "about $((($1 + 1800) / 3600)) hours"; else echo "about $((($1 + 59) / 60)) minutes"; fi
}

case $action in
list) printf '%s\n' "${commands[@]}" && exit ;;
count) echo "$total" && exit ;;
dry-run)
  check_gpus
  check_runs_dir
  for i in "${!names[@]}"; do
    word=missing
    if is_stopped "$i"; then word=stopped; fi
    if is_done "${paths[$i]}"; then word="done   "; fi
    echo "$word  ${names[$i]}"
  done
  count_missing
  echo "Runs missing: $missing of $total, $(about "$left") on two cores." && exit
  ;;
esac

# === One run ====================================================================================
log_event() ( # KEY=VALUE...: append a line to the log; the tail is that of a file
  trap '' INT TERM HUP # Python would print where it was interrupted
  exec python -IS - "$log" "$@" <<'END'
import json, os, sys, time

event = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "load": os.getloadavg()}
for key, _, value in (word.partition("=") for word in sys.argv[2:]):
    if key == "tail":
        with open(value, "rb") as file:
            file.seek(-min(2000, file.seek(0, os.SEEK_END)), os.SEEK_END)
            value = file.read().decode(errors="replace")
    event[key] = int(value) if value.isdecimal() and key not in ("notes", "tail") else value
line = json.dumps(event).encode() + b"\n"
with open(sys.argv[1], "ab+", buffering=0) as file:  # in one piece, since other drivers write too
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if size and file.read(1) != b"\n":  # half a line, from when the disk was full
        line = b"\n" + line
    file.write(line)
END
)

check_disk_space() { # end this worker where a run could not write its files
  # One name for all, so that what a killed process leaves there goes with the next.
  if ! { head -c 1000000 /dev/zero >"$state/space"; } 2>/dev/null; then
    rm -f "$state/space"
    echo "benchmark.sh: no room left in $runs_dir, so the grid stops; completed runs are kept." >&2
    exit 1
  fi
  rm -f "$state/space"
}

wait_for_lock() { # LOCK WHAT: wait for a lock that others may hold, and say for what
  if flock --nonblock "$1"; then return; fi
  echo "Waiting for $2."
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

kill_leftovers() { # REGEX: kill what runs left behind, whatever its parent or process group is by now
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
  local missing left rest=""
  count_missing
  if ((missing < missing_at_start)); then
    rest=", about $(clock $((SECONDS * missing / (missing_at_start - missing)))) left"
  fi
  echo "[$((total - missing))/$total done, $(clock $SECONDS)$rest] $1${2:+ on GPU $2}${WANDB_MODE:+, W&B $WANDB_MODE}"
}

run() { # I GPU: run its command; set `code`
  local name=${names[$1]} path=${paths[$1]} words word script=benchmark.sh i=0
  eval "words=(${commands[$1]})"
  if is_stopped "$1"; then
    while [[ ${words[$i]} != *.py ]]; do i=$((i + 1)); done
    words=("${words[@]:0:i+1}" --resume "$path")
  elif [[ -e $path || -L $path ]]; then # what a killed run had measured
    mkdir -p "$state/partial"
    mv "$path" "$state/partial/$name.$(date +%s%N)"
  fi
  log_event event=start run="$name" line="${numbers[$1]}" study="$study" order_seed="$order_seed" gpu="$2" \
    wandb="${WANDB_MODE:-}" command="$(quote "${words[@]}")" || check_disk_space
  for word in "${words[@]}"; do
    if [[ $word == *.py ]]; then script=$word && break; fi
  done
  : >"$state/$name.log"
  code=0
  # timeout leads a process group of its own, which a terminal's Ctrl-C does not reach.
  RUN_INFO=$(python -IS studies/machine.py "$script") BENCHMARK_RUN="$$ $name" \
    timeout --kill-after=10 "$timeout" "${words[@]}" </dev/null >>"$state/$name.log" 2>&1 &
  wait $! 2>/dev/null || code=$? # bash would announce a killed run there
  kill_leftovers "$name"
}

tell_failure() { # NAME CODE SECONDS
  local reason="exit status $2" after=", after $3 s"
  if (($2 == 137)); then reason="killed, as the kernel does when memory runs out"; fi
  if (($2 == 124 || $3 >= timeout)); then reason="no end after $timeout s" after=""; fi
  check_disk_space
  log_event event=end run="$1" completed=no exit_status="$2" seconds="$3" reason="$reason" \
    tail="$state/$1.log" || check_disk_space
  echo "$reason$after" >"$state/$1.failed"
  echo "FAILED $1: $reason$after"
  tail -n 5 "$state/$1.log" | cut -c 1-200 | sed 's/^/    /'
}

is_finished() { # I: is it done, or did it fail since this driver began?
  is_done "${paths[$1]}" || [[ -e $state/${names[$1]}.failed ]]
}

attempt() { # I GPU [WAIT]: do run I unless it is finished; status 1 if another process is at it
  local name=${names[$1]} code start
  if is_finished "$1"; then return; fi
  check_disk_space
  # The output file is the run's lock too. A run inherits both locks, so they outlive a killed
  # driver for as long as its last run does.
  exec {run_lock}>>"$state/$name.log"
  if [[ ${3:-} ]]; then
    wait_for_lock "$run_lock" "$name, which is running already or left a process behind"
  elif ! flock --nonblock "$run_lock"; then
    exec {run_lock}>&-
    return 1
  fi
  wait_for_lock "$gpu_lock" "another benchmark on this machine to finish its run"
  if ! is_finished "$1"; then
    if ! kill -0 $$ 2>/dev/null; then exit 1; fi # the driver was killed; its grid ends here
    if [[ $track ]]; then
      local -x WANDB_MODE=${WANDB_MODE:-$(wandb_mode)} WANDB_RUN_GROUP=$study-repeat${repeats[$1]}
    fi
    progress "$name" "$2"
    start=$SECONDS
    run "$1" "$2"
    if is_done "${paths[$1]}"; then
      log_event event=end run="$name" completed=yes exit_status="$code" seconds=$((SECONDS - start)) || check_disk_space
    else
      tell_failure "$name" "$code" $((SECONDS - start))
    fi
  fi
  # Unlocked, and not only closed: a process that outlived its run may hold them open.
  flock --unlock "$gpu_lock"
  flock --unlock "$run_lock"
  exec {run_lock}>&-
}

# === All runs ===================================================================================
work() { # GPU: go through the grid; what other workers or drivers are at comes last
  local gpu=$1 i busy=()
  trap 'kill_children $BASHPID; exit 1' INT TERM HUP
  # CUDA would number the fastest GPU first, and not as nvidia-smi does.
  if [[ $gpu ]]; then export CUDA_VISIBLE_DEVICES=$gpu CUDA_DEVICE_ORDER=PCI_BUS_ID; fi
  # Per machine, user and GPU; a Slurm job has GPUs of its own, whatever their numbers.
  exec {gpu_lock}>>"${TMPDIR:-/tmp}/ppo-benchmark.$UID.${SLURM_JOB_ID:-}.${CUDA_VISIBLE_DEVICES:-}.lock"
  for i in "${!names[@]}"; do attempt "$i" "$gpu" || busy+=("$i"); done
  for i in "${busy[@]}"; do attempt "$i" "$gpu" wait || true; done
}

stop() { # EXIT STATUS
  trap '' INT TERM HUP
  disown -a # or bash would announce each job that is killed
  kill_children $$
  kill_leftovers ".*"
  echo "Stopped. Completed runs are kept; to go on: $invocation" >&2
  exit "$1"
}

finish() { # what the study does at its end, and the report
  local line words
  mkdir -p "$runs_dir/report"
  for line in "${end[@]}"; do
    read -ra words <<<"$line"
    python "${words[@]//RUNS/"$runs_dir"}" &
    wait $! || echo "This failed at the end: python $line"
  done
  python -m analysis report "$runs_dir" --out "$runs_dir/report" --only-runs /dev/stdin \
    < <(printf '%s\n' "${names[@]}") &
  wait $! || echo "The report could not be made; the runs are in $runs_dir."
}

main() {
  local gpu i failed=() offline missing_at_start missing left
  SECONDS=0
  export WANDB_FINISH_TIMEOUT=${WANDB_FINISH_TIMEOUT:-60} # seconds for a server that went away
  # Every run compiles for itself, or the second would start faster than the first.
  export TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 JAX_ENABLE_COMPILATION_CACHE=false
  if [[ $notes ]]; then export WANDB_NOTES=$notes; fi
  count_missing
  missing_at_start=$missing
  if ((left > 7200)); then
    echo "This takes $(about "$left") on two cores: $missing runs. --only chooses some; stopped, it can be gone on with."
  fi
  log_event event=grid study="$study" runs="$total" complete=$((total - missing)) order_seed="$order_seed" \
    repeats="$study_repeats" host="$(uname -n)" notes="$notes" invocation="$invocation" || check_disk_space
  for i in "${!names[@]}"; do rm -f "$state/${names[$i]}.failed"; done

  for gpu in "${gpus[@]}"; do work "$gpu" & done
  wait || true

  offline=("$runs_dir"/*/wandb/offline-run-*)
  if [[ $track && -e ${offline[0]} ]]; then
    printf 'To send the offline runs to W&B: %q sync %q/*/wandb/offline-run-*\n' "${python%python}wandb" "$runs_dir"
  fi
  for i in "${!names[@]}"; do if ! is_done "${paths[$i]}"; then failed+=("${names[$i]}"); fi; done
  if ((${#failed[@]} == 0)); then echo "Runs complete: $total of $total, in $runs_dir."; fi
  if [[ $report ]]; then finish; fi
  if ((${#failed[@]} == 0)); then return; fi
  echo "Runs not complete: ${#failed[@]} of $total:"
  for name in "${failed[@]}"; do
    echo "    $name: $(cat "$state/$name.failed" 2>/dev/null || echo "not run"); output in $state/$name.log"
  done
  echo "To run them again: $invocation"
  return 1
}

check_gpus
check_runs_dir
source ./setup.sh
for line in "${begin[@]}"; do
  read -ra words <<<"$line"
  python "${words[@]}" || exit 2
done
mkdir -p "$state" || exit 2
trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
{ # read as a whole by bash, so that this file may change while the grid runs
  main
  exit
}

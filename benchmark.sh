#!/usr/bin/env bash
# Races the scripts, each run in a fresh process: ./benchmark.sh --help
# studies/grid.py lists the runs, the loop in work() goes over them, and studies/one_run.py makes one.
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

runs_dir=runs gpus=("") report=yes listing="" track="" notes="" flags=()
invocation=$(printf ' %q' "$0" "$@")
invocation=${invocation//\\,/,} # commas need no quoting
invocation=${invocation# }
called_from=$PWD
project=$(dirname -- "$(readlink -f -- "$0")")
while (($# > 0)); do
  case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
  case $1 in
  -h | --help) cd -- "$project" && usage && exit ;;
  --help-all) cd -- "$project" && usage all && exit ;;
  --list | --count | --dry-run) listing=yes flags+=("$1") ;;
  --sync) flags+=("$1") ;;
  --track) track=yes flags+=("$1") ;;
  --no-report) report="" ;;
  --scripts | --envs | --sizes | --iterations | --repeats | --devices | --seed | --only | --from | --to | \
    --runs-dir | --timeout | --gpus | --notes)
    if (($# < 2)); then fail "$1 needs a value."; fi
    case $1 in
    --runs-dir) runs_dir=$2 ;;
    --gpus) IFS=, read -ra gpus <<<"$2" ;;
    --notes) notes=$2 ;;
    esac
    flags+=("$1=$2") # studies/grid.py checks it
    shift
    ;;
  -*) fail "unknown argument '$1'; see ./benchmark.sh --help." ;;
  *) flags+=("$1") ;;
  esac
  shift
done
if [[ ! $runs_dir || $runs_dir == -* ]]; then fail "--runs-dir must name a folder, not '$runs_dir'."; fi
for tool in flock timeout; do
  if ! command -v "$tool" >/dev/null; then fail "needs Linux (or WSL2) with '$tool' installed."; fi
done
source "$project/setup.sh" >&2 # it leads to the project's folder
python=$VENV/bin/python
if [[ ! . -ef $called_from ]]; then
  if [[ $runs_dir != /* ]]; then runs_dir=$called_from/$runs_dir; fi
  if [[ $python != /* ]]; then python=$project/$python; fi
fi
grid=$(python -m studies.grid --called-from="$called_from" --python="$python" \
  --invocation="$invocation" "${flags[@]}" --runs-dir="$runs_dir") || exit
if [[ $listing ]]; then printf '%s\n' "$grid" && exit; fi

# === The grid ===================================================================================
state=$runs_dir/.benchmark # outputs, locks, what is discarded or was left behind by a killed run
begin=() end=()            # commands of the study
# Of each run: its name, its run.json, and all that one_run.py needs to know.
names=() infos=() runs=()
while IFS=$'\t' read -r kind first second; do
  case $kind in
  study) missing_at_start=$first takes=$second ;;
  begin) begin+=("$first") ;;
  end) end+=("$first") ;;
  run) names+=("${first##*/}") infos+=("$runs_dir/$first/run.json") runs+=("$second") ;;
  esac
done <<<"$grid"
total=${#runs[@]}

is_done() { # INFO: it is there from the start on, and says in the end that the run is completed
  grep -qsF '"status": "completed"' "$1"
}

clock() { printf '%d:%02d:%02d' $(($1 / 3600)) $(($1 / 60 % 60)) $(($1 % 60)); }

progress() { # what is done, and about how long the rest takes
  local info missing=0 rest=""
  for info in "${infos[@]}"; do is_done "$info" || missing=$((missing + 1)); done
  if ((missing < missing_at_start)); then
    rest=", about $(clock $((SECONDS * missing / (missing_at_start - missing)))) left"
  fi
  echo "[$((total - missing))/$total done, $(clock $SECONDS)$rest]"
}

attempt() { # I GPU [wait]: make run I unless it is complete; status 1 if another process is at it
  local status=0
  if is_done "${infos[$1]}"; then return; fi
  python -m studies.one_run "${runs[$1]}" "$2" $$ "$(progress)" "${@:3}" &
  wait $! 2>/dev/null || status=$?
  if ((status == 74)); then exit 1; fi # the disk is full, or the driver was killed
  ((status != 75))
}

work() { # GPU: go through the grid; what other workers or drivers are at comes last
  local i busy=()
  trap 'end_jobs; exit 1' INT TERM HUP
  for i in "${!runs[@]}"; do attempt "$i" "$1" || busy+=("$i"); done
  for i in "${busy[@]}"; do attempt "$i" "$1" wait || true; done
}

end_jobs() { # of this shell, and all that they started
  trap '' INT TERM HUP
  # shellcheck disable=SC2046 # numbers
  { kill $(jobs -p) && wait; } 2>/dev/null || true
}

stop() { # EXIT STATUS
  end_jobs
  echo "Stopped. Completed runs are kept; to go on: $invocation" >&2
  exit "$1"
}

finish() { # what the study does at its end, and the report; timeout passes a stop on to all processes
  local line words
  mkdir -p "$runs_dir/report"
  for line in "${end[@]}"; do
    read -ra words <<<"$line"
    timeout 0 python "${words[@]//RUNS/"$runs_dir"}" &
    wait $! || echo "This failed at the end: python $line"
  done
  timeout 0 python -m analysis report "$runs_dir" --out "$runs_dir/report" \
    --names studies/*/names.toml --only-runs /dev/stdin \
    < <(printf '%s\n' "${names[@]}") &
  wait $! || echo "The report could not be made; the runs are in $runs_dir."
}

main() {
  local gpu i failed=() offline
  SECONDS=0
  export WANDB_FINISH_TIMEOUT=${WANDB_FINISH_TIMEOUT:-60} # seconds for a server that went away
  if [[ $notes ]]; then export WANDB_NOTES=$notes; fi
  # Every run compiles for itself, or the second would start faster than the first.
  export TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 JAX_ENABLE_COMPILATION_CACHE=false
  if [[ $takes == *hours ]]; then
    echo "This takes $takes on two cores: $missing_at_start runs. --only chooses some; stopped, it can be gone on with."
  fi

  for gpu in "${gpus[@]}"; do work "$gpu" & done
  wait || true

  offline=("$runs_dir"/*/wandb/offline-run-*)
  if [[ $track && -e ${offline[0]} ]]; then
    printf 'To send the offline runs to W&B: %q sync %q/*/wandb/offline-run-*\n' "${python%python}wandb" "$runs_dir"
  fi
  for i in "${!runs[@]}"; do is_done "${infos[$i]}" || failed+=("${names[$i]}"); done
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

for line in "${begin[@]}"; do
  read -ra words <<<"$line"
  python "${words[@]}" || exit 2
done
trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
{ # read as a whole by bash, so that this file may change while the grid runs
  main
  exit
}

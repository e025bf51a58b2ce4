#!/usr/bin/env bash
# Runs training scripts, each in a new process, and reports their durations and returns.
# ./benchmark.sh --help lists the flags.
#
# bench/plan.py lists the runs, bench/run.py executes one run, and bench/finish.py writes the report.
# shellcheck disable=SC2329 # some functions are called only by traps
set -euo pipefail

project=$(dirname -- "$(readlink -f -- "$0")")
called_from=$PWD
help() { # print the flags; this needs only Python, and installs nothing
  local python
  cd -- "$project"
  for python in "${VENV:-.venv}/bin/python" python3 python3.14 python3.13 python3.12 python3.11; do
    if "$python" -c 'import tomllib' 2>/dev/null; then exec "$python" -m bench.arguments --help; fi
  done
  echo "benchmark.sh: no Python 3.11 or later on PATH. Install one, then run this again." >&2
  exit 2
}
for word in "$@"; do
  case $word in -h | --help) help ;; esac
done
for tool in flock timeout; do
  if ! command -v "$tool" >/dev/null; then
    echo "benchmark.sh: the command '$tool' is missing. benchmark.sh needs Linux or WSL2." >&2
    exit 2
  fi
done
source "$project/setup.sh" >&2 # changes to the project folder and puts the environment's python on PATH

# attempt RUN GPU [wait]: execute a run, unless another process is executing it (exit status 75).
# With `wait`, wait for that process.
attempt() {
  python -m bench.run "$plan" "$1" "$2" $$ "${@:3}" &
  wait $!
}

# work GPU: execute all missing runs on a GPU. If another process is executing a run, try it last.
work() {
  local run busy=()
  trap 'end_jobs; exit 1' INT TERM HUP
  for ((run = 0; run < count; run++)); do
    attempt "$run" "$1" && continue
    case $? in
    74) exit 1 ;; # the disk is full, or this script was killed
    75) busy+=("$run") ;;
    esac
  done
  for run in "${busy[@]}"; do attempt "$run" "$1" wait || true; done
}

end_jobs() { # end the background jobs of this shell and all their child processes
  trap '' INT TERM HUP
  # shellcheck disable=SC2046 # process ids contain no spaces
  { kill $(jobs -p) && wait; } 2>/dev/null || true
}

stop() { # STATUS: end all jobs and exit with STATUS
  end_jobs
  echo "Stopped. Completed runs are kept. To continue: $invocation" >&2
  exit "$1"
}

main() {
  local gpu
  for gpu in ${gpus//,/ }; do work "$gpu" & done # one worker per GPU; without --gpus, one worker
  wait || true
  python -m bench.finish "$plan" &
  wait $!
}

plan=$(mktemp)
trap 'rm -f "$plan"' EXIT
python -m bench.plan "$0" "$called_from" "$plan" "$@"
if [[ ! -s $plan ]]; then exit; fi # with --list, --count or --dry-run there is nothing to run
{
  read -r count gpus
  read -r invocation
} <"$plan"

trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
{ # bash reads the complete block before it runs it, so this file may change during the runs
  main
  exit
}

#!/usr/bin/env bash
# Races the scripts, each run in a fresh process: ./benchmark.sh --help
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
  dqn     the four DQN scripts, and PPO in both libraries x both frameworks, on CartPole-v1, 25
          iterations (8); 3 repeats; --iterations 100 for whole trainings
  minatar Breakout by MinAtar's rules: dqn_linen against dqn_torch_gymnasium, 100,000 frames (5
          seeds each), 500,000 (10 and 5), 5,000,000 (3 and 1); evaluates the longer ones (29)
  doors   a gridworld: the four DQN scripts with 64 environments and with 1,024; a public study's
          settings; a slow target network; PyTorch compiled; judged on all layouts as they
          learn (14); 10 repeats
  agents  1, 2, 4, ... 64 agents on CartPole-v1: linen_vmap, nnx_vmap, torch_vmap and a whole training
          in one scan; linen, nnx and torch_compile alone (4 seeds) and as many at once as there are
          cores (twice) (46); 3 repeats, whose first seeds are 1, 1001, 2001
Or your own grid, each as LIST or one,two,...:
  --scripts LIST    torch-none torch torch_compile linen-none linen nnx-none nnx nnx_cached
                    equinox-none equinox
                    torch_gymnasium linen_gymnasium; linen_vmap nnx_vmap torch_vmap, which train
                    8 agents; with dqn_ before it: linen torch linen_gymnasium torch_gymnasium;
                    sb3 sb3-one-thread sbx, two libraries in environments that uv makes;
                    path/to/mine.py, your own, whose runs are named mine
  --envs LIST       default CartPole-v1; my_module:MyEnv, your own, where you call this from
  --sizes LIST      small (64, 64), medium (3 x 256), large (6 x 1024); default small
  --sync            wait for the device after each rollout, to time both phases

  --iterations N    of 8192 steps each, DQN's 5000, those in doors 5120; default 100, quick and
                    dqn 25, doors 125
  --frames LIST     minatar's lengths, in multiples of 5000
  --agents LIST     how many agents the programs of the preset agents train, of 1 to 1000 each
  --repeats N       the whole grid N times, at most 1000; repeat r uses seed r in every script;
                    default 1, quick, dqn and agents 3, doors 10; minatar: the most seeds, default 10
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
  --no-report       leave out the evaluation and the report at the end

The same command again resumes the grid: what was not complete starts anew, since durations must be
those of one process; minatar's longer runs go on from their last checkpoint. Exit status: 0 all runs complete, 1 some failed, 2 wrong usage.
END
}

# === The grid ===================================================================================
all_environments=(CartPole-v1 Acrobot-v1 MountainCar-v0 DiscountingChain-bsuite MemoryChain-bsuite
  UmbrellaChain-bsuite BernoulliBandit-misc GaussianBandit-misc Asterix-MinAtar Breakout-MinAtar
  Freeway-MinAtar SpaceInvaders-MinAtar)
all_scripts=(torch-none torch torch_compile linen-none linen nnx-none nnx nnx_cached)
gymnasium_scripts=(torch_gymnasium linen_gymnasium dqn_torch_gymnasium dqn_linen_gymnasium)
vmap_scripts=(linen_vmap nnx_vmap torch_vmap)
peers=(sb3 sb3-one-thread sbx)
dqn_scripts=(dqn_torch dqn_linen dqn_torch_gymnasium dqn_linen_gymnasium)
known_scripts=("${all_scripts[@]}" equinox-none equinox dqn_torch dqn_linen "${gymnasium_scripts[@]}" "${vmap_scripts[@]}" "${peers[@]}")
declare -A own_scripts=() # name -> path of a script that is not this project's
own_environment='^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z0-9_-]+$'
gymnasium_environments=(CartPole-v1 Acrobot-v1 MountainCar-v0)
all_sizes=(small medium large)
declare -A hidden_sizes=([small]="64 64" [medium]="256 256 256"
  [large]="1024 1024 1024 1024 1024 1024" [own]="") # the script's own

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

dqn() {
  block "" CartPole-v1 own "${dqn_scripts[@]}"
  block "" CartPole-v1 small torch linen torch_gymnasium linen_gymnasium
}

doors() { # all that one seed has is one block: nothing in it always comes first
  local script
  {
    for script in "${dqn_scripts[@]}"; do
      cell "" doors-64 own "$script"
      cell "" doors-1024 own "$script"
    done
    for script in dqn_torch_gymnasium dqn_linen_gymnasium dqn_linen; do
      cell "" doors-public-64 own "$script"
    done
    cell "" doors-public-1024 own dqn_linen
    cell "" doors-slow_target own dqn_linen
    cell "" doors-compiled-64 own dqn_torch_gymnasium
  } | shuffle " doors own"
}

agents() { # one block for each repeat, of which no two share the seed of an agent
  local script first=$((1000 * (repeat - 1) + 1))
  local repeat=$first
  {
    for count in "${counts[@]}"; do
      for script in "${vmap_scripts[@]}" one_scan; do cell "agents-$count" CartPole-v1 small "$script"; done
    done
    # A process stands for N of them, so its noise is N times as long: several have less of it.
    for script in linen nnx torch_compile; do
      for ((repeat = first; repeat < first + 4; repeat++)); do cell "" CartPole-v1 small "$script"; done
      for repeat in $((first + 4)) $((first + 24)); do cell side_by_side CartPole-v1 small "$script"; done
    done
  } | shuffle " agents small"
}

minatar() { # all repeats at once: the shortest runs of all seeds come first
  local most=$repeats length linen torch repeat iterations racers
  for length in "${frames[@]}"; do
    linen=5 torch=5
    if ((length > pace_frames)); then linen=10; fi
    if ((length > 500000)); then linen=3 torch=1; fi
    iterations=$((length / 5000))
    for ((repeat = 1; repeat <= linen && repeat <= most; repeat++)); do
      racers=(dqn_linen)
      if ((repeat <= torch)); then racers+=(dqn_torch_gymnasium); fi
      block "" minatar own "${racers[@]}"
    done
  done
}

custom() {
  for env in "${environments[@]}"; do
    for size in "${sizes[@]}"; do
      block "$sync" "$env" "$size" "${scripts[@]}"
    done
  done
}

grid() {
  if [[ $preset == minatar ]]; then
    minatar
    return
  fi
  for ((repeat = 1; repeat <= repeats; repeat++)); do "$preset"; done
}

block() { # STUDY ENV SIZE SCRIPTS...: print a block's cells, in an order that the seed decides
  local script
  for script in "${@:4}"; do cell "$1" "$2" "$3" "$script"; done | shuffle "$1 $2 $3"
}

shuffle() { # SALT
  local salt="$seed $repeat $1"
  LC_ALL=C sort --field-separator=$'\t' --key=1,1R --random-source=<(md5sum <<<"$salt")
}

cell() { # STUDY ENV SIZE SCRIPT: print the run's name, what --only looks at and the command
  local study=$1 env=$2 size=$3 script=$4 name path words widths key file=ppo_${4%-none}.py steps=8192
  local runner=("$python")
  # A dot for the colon of one's own: no other environment's name has one.
  name=${study:+${study}__}${env/:/.}__${size}__${script}__${iterations}it__seed$repeat
  case $script in
  dqn_*) file=$script.py steps=5000 ;;
  sb3 | sb3-one-thread | sbx) file=analysis/peers/ppo_${script%-one-thread}.py runner=(uv run --quiet --script) ;;
  esac
  file=${own_scripts[$script]:-$file}
  # A script looks for one's own environment in the folder that it runs in.
  if [[ $env == *:* && $called_from ]]; then
    runner=(env "--chdir=$called_from" "$python")
    if [[ $file != /* ]]; then file=$here$file; fi
  fi
  read -ra widths <<<"${hidden_sizes[$size]}"
  words=("$file" --env-id "$env" --hidden-sizes "${widths[@]}")
  if [[ $size == own ]]; then words=("$file" --env-id "$env"); fi
  if [[ $env == minatar ]]; then words=("$file" minatar); fi # a configuration of the script
  if [[ $env == doors-* ]]; then words=(-m analysis.doors_run "$file" doors) steps=5120; fi
  if [[ $script == one_scan ]]; then words=(-m analysis.one_scan "${words[@]:1}"); fi
  if [[ $study == side_by_side ]]; then words=(-m analysis.side_by_side "${words[@]}"); fi
  case $study in agents-*) words+=(--num-agents "${study#agents-}") ;; esac
  case $env in
  doors-compiled-*) words+=(--compile) ;;
  doors-slow_target) words+=(--gamma 0.99 --target-network-frequency 200) ;;
  doors-public-*) # as the public study had it: its network, loss and discount, few updates, no copies
    words+=(--hidden-sizes 64 32 --loss mse --no-double-q --gamma 0.99 --learning-rate 0.001
      --no-anneal-lr --batch-size 64 --replay-ratio 0.0625 --buffer-size 524288 --learning-starts 102400
      --exploration-steps 147600 --target-network-frequency 2147483647)
    ;;
  esac
  case $env:$script in
  doors-public-*:*_gymnasium) words+=(--env-id envs.doors_gymnasium:DoorsShort-v0) ;;
  doors-public-*) words+=(--max-episode-steps 15) ;;
  esac
  case $env in doors-1024 | doors-public-1024) words+=(--num-envs 1024 --num-steps 5) ;; esac
  words+=(--seed "$repeat" --total-timesteps $((iterations * steps)))
  case $script in
  torch-none) words+=(--no-jit-env) ;;
  *-none) words+=(--no-jit) ;;
  *-one-thread) words+=(--threads 1) ;;
  esac
  case $study in sync*) words+=(--sync-for-timing) ;; esac
  if [[ $env == minatar ]] && ((iterations * steps > pace_frames)); then words+=(--save-every 20); fi
  key="${words[*]##*/} --run-name $name"
  # W&B would not tell those side by side from runs that had the machine for themselves.
  if [[ $track && $study != side_by_side && ${runner[0]} != uv ]]; then words+=(--track); fi
  path=$(path_of "$name")
  words+=(--runs-dir "${path%/*}" --run-name "$name")
  printf '%s\t%s\t%s\n' "$name" "$key" "$(quoted "${runner[@]}" "${words[@]}")"
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
  case $1 in warmup__CartPole-v1__*) echo "$state/warmup/$1" ;; *) echo "$runs_dir/$1" ;; esac
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
    if [[ $flag == --envs && $item =~ $own_environment ]]; then
      : # whether there is one, its script says
    elif [[ " $* " != *" $item "* ]]; then
      fail "$flag must be of: $*; not '$item'."
    fi
    if [[ " ${chosen[*]} " != *" $item "* ]]; then chosen+=("$item"); fi
  done
}

choose_scripts() { # LIST: set the array `scripts`, each once, and own_scripts
  local items item name
  IFS=$', \t\n' read -rd '' -a items <<<"$1" || true
  if [[ -f $1 ]]; then items=("$1"); fi # a path may have spaces
  if ((${#items[@]} == 0)); then fail "--scripts must name at least one of: ${known_scripts[*]}."; fi
  scripts=()
  for item in "${items[@]}"; do
    name=${item##*/}
    name=${name%.py}
    if [[ " ${known_scripts[*]} one_scan " == *" ${name#ppo_} "* ]]; then
      if [[ $item == */* && ! $item -ef $here$name.py ]]; then
        fail "--scripts: '$item' has the name of a script of this project; give it another."
      fi
      name=${name#ppo_}
    else
      choose_own_script "$item" "$name"
    fi
    if [[ " ${scripts[*]} " != *" $name "* ]]; then scripts+=("$name"); fi
  done
}

choose_own_script() { # PATH NAME
  local path=$1
  if [[ $path != *.py ]]; then
    fail "--scripts must be of: ${known_scripts[*]}; or the path of a script; not '$path'."
  fi
  if [[ ! -f $path ]]; then fail "--scripts: there is no file '$path'."; fi
  if [[ ! $2 =~ ^[A-Za-z0-9_]+$ ]]; then
    fail "--scripts: a script's name must have letters, digits and _ only, since its runs are named after it; not '$2'."
  fi
  if [[ $path != /* ]]; then path=$PWD/$path; fi
  if [[ ! $path -ef ${own_scripts[$2]:-$path} ]]; then
    fail "--scripts: '$path' and '${own_scripts[$2]}' have one name; give one of them another."
  fi
  own_scripts[$2]=$path
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
timeout=86400 gpus=("") track="" notes="" report=yes sync="" own_grid="" own_frames="" own_counts=""
counts=(1 2 4 8 16 32 64)
pace_frames=100000 frames=("$((pace_frames))" 500000 5000000) # up to pace_frames for speed alone
environments=(CartPole-v1) sizes=(small) scripts=(torch torch_compile linen nnx nnx_cached)
invocation=$(quoted "$0" "$@")
here=$(readlink -f -- "$0")
here=${here%/*}/
called_from="" # a folder, if it is another
if [[ ! . -ef $here ]]; then called_from=$PWD; fi
while (($# > 0)); do
  case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
  case $1 in
  -h | --help) usage && exit ;;
  quick | async | sync | full | dqn | minatar | doors | agents)
    if [[ $preset ]]; then fail "there is one preset, not both '$preset' and '$1'."; fi
    preset=$1
    ;;
  --sync) sync=sync own_grid=$1 ;;
  --track) track=yes ;;
  --no-report) report="" ;;
  --list | --count | --dry-run) action=${1#--} ;;
  --scripts | --envs | --sizes | --iterations | --repeats | --seed | --only | --from | --to | \
    --runs-dir | --timeout | --gpus | --notes | --frames | --agents)
    if (($# < 2)); then fail "$1 needs a value."; fi
    case $1 in
    --scripts) choose_scripts "$2" && own_grid=$1 ;;
    --envs) choices "$1" "$2" "${all_environments[@]}" && environments=("${chosen[@]}") own_grid=$1 ;;
    --sizes) choices "$1" "$2" "${all_sizes[@]}" && sizes=("${chosen[@]}") own_grid=$1 ;;
    --frames)
      IFS=$', \t\n' read -rd '' -a frames <<<"$2" || true
      own_frames=yes
      for value in "${frames[@]:-none}"; do
        if [[ ! $value =~ ^[1-9][0-9]{0,8}$ ]] || ((value % 5000)); then
          fail "--frames must be multiples of 5000, as 500000,5000000; not '$value'."
        fi
      done
      mapfile -t frames < <(printf '%s\n' "${frames[@]}" | awk '!seen[$0]++')
      ;;
    --agents)
      IFS=$', \t\n' read -rd '' -a counts <<<"$2" || true
      own_counts=yes
      for value in "${counts[@]:-none}"; do
        if [[ ! $value =~ ^([1-9][0-9]{0,2}|1000)$ ]]; then
          fail "--agents must be whole numbers from 1 to 1000, as 1,2,4; not '$value'."
        fi
      done
      mapfile -t counts < <(printf '%s\n' "${counts[@]}" | awk '!seen[$0]++')
      ;;
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
if [[ $own_frames && $preset != minatar ]]; then fail "--frames is for the preset minatar."; fi
if [[ $own_counts && $preset != agents ]]; then fail "--agents is for the preset agents."; fi
if [[ $preset == agents ]] && ((${#gpus[@]} > 1)); then fail "The preset agents takes one GPU: what runs on another would share the cores with it."; fi
if [[ $iterations && $preset == minatar ]]; then fail "minatar has --frames, and not --iterations."; fi
case $preset in
quick | dqn) iterations=${iterations:-25} repeats=${repeats:-3} ;;
agents) repeats=${repeats:-3} ;;
minatar) repeats=${repeats:-10} ;;
doors) iterations=${iterations:-125} repeats=${repeats:-10} ;;
custom)
  for script in "${scripts[@]}"; do
    if [[ $sync && $script == dqn_* ]]; then fail "--sync is for PPO, not for $script."; fi
    if [[ $sync && " ${peers[*]} " == *" $script "* ]]; then
      fail "--sync is for the scripts of this repository, not for $script."
    fi
    for env in "${environments[@]}"; do
      if [[ $env == *:* && " ${peers[*]} " != *" $script "* ]]; then continue; fi
      if [[ " ${gymnasium_scripts[*]} ${peers[*]} " == *" $script "* &&
        " ${gymnasium_environments[*]} " != *" $env "* ]]; then
        fail "$script runs in ${gymnasium_environments[*]}, not in $env."
      fi
    done
  done
  ;;
esac
iterations=${iterations:-100} repeats=${repeats:-1}
if ((repeats > 1000)); then fail "--repeats must be at most 1000, not $repeats."; fi
if [[ $called_from ]]; then
  if [[ $runs_dir != /* ]]; then runs_dir=$called_from/$runs_dir; fi
  if [[ ${VENV:-/} != /* ]]; then VENV=$called_from/$VENV; fi
fi
cd -- "$here"
python=${VENV:-.venv}/bin/python
if [[ $called_from && $python != /* ]]; then python=$here$python; fi
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

is_stopped() { # NAME COMMAND: it has a checkpoint to go on from, and is one of the long runs that do
  [[ $2 == *" --save-every "* && -s $(path_of "$1")/checkpoint.npz ]] && ! is_done "$1"
}

case $action in
list) printf '%s\n' "${commands[@]}" && exit ;;
count) echo "$total" && exit ;;
dry-run)
  check_gpus
  check_runs_dir
  missing=0
  for i in "${!names[@]}"; do
    name=${names[$i]} word=missing
    if is_stopped "$name" "${commands[$i]}"; then word=stopped; fi
    if is_done "$name"; then word="done   "; else missing=$((missing + 1)); fi
    echo "$word  $name"
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

set_aside() { # NAME: keep what a killed run had measured, out of the way
  local path
  path=$(path_of "$1")
  if [[ -e $path || -L $path ]]; then
    mkdir -p "$state/partial" && mv "$path" "$state/partial/$1.$(date +%s%N)"
  fi
}

machine() { # WORDS...: what the run of a command should say of machine and script, as JSON
  local word script=benchmark.sh
  for word in "$@"; do
    if [[ $word == *.py ]]; then script=$word && break; fi
  done
  python -IS analysis/machine.py "$script"
}

run_once() { # NAME GPU LINE COMMAND: run a command; set code
  local words
  log_event event=start run="$1" line="$3" preset="$preset" order_seed="$seed" gpu="$2" \
    wandb="${WANDB_MODE:-}" command="$4" || check_room
  eval "words=($4)"
  code=0
  # timeout leads a process group of its own, which a terminal's Ctrl-C does not reach.
  RUN_INFO=$(machine "${words[@]}") BENCHMARK_RUN="$$ $1" timeout --kill-after=10 "$timeout" "${words[@]}" \
    </dev/null >>"$output" 2>&1 &
  wait $! 2>/dev/null || code=$? # bash would announce a killed run there
  kill_strays "$1"
}

is_of_no_use() { # OUTPUT: does a resumed run say that its checkpoint will never do?
  grep -qE "is damaged|in its checkpoint|does not repeat itself" "$1" && ! grep -q "MemoryError" "$1"
}

attempt() { # I GPU [WAIT]: do cell I unless it is done; status 1 if another process is at it
  local name=${names[$1]} gpu=$2 path output code=0 start seconds reason after words command
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
    command=${commands[$1]}
    if is_stopped "$name" "$command"; then
      eval "words=($command)"
      command=$(quoted "${words[@]:0:2}" --resume "$path")
    else
      set_aside "$name"
    fi
    : >"$output"
    if [[ $track ]]; then
      repeat=${name##*seed}
      if [[ $preset == agents ]]; then repeat=$(((repeat - 1) / 1000 + 1)); fi
      local -x WANDB_MODE=${WANDB_MODE:-$(wandb_mode)} WANDB_RUN_GROUP=$preset-repeat$repeat
    fi
    progress "$name" "$gpu"
    start=$SECONDS
    run_once "$name" "$gpu" "${lines[$1]}" "$command"
    if [[ $command != "${commands[$1]}" ]] && is_of_no_use "$output"; then
      check_room
      set_aside "$name"
      run_once "$name" "$gpu" "${lines[$1]}" "${commands[$1]}"
    fi
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

prepare_peers() { # install what their first lines name: a timed run must find it there
  local script file flags links link
  for script in sb3 sbx; do
    file=analysis/peers/ppo_$script.py
    if [[ " ${commands[*]} " != *" $file "* ]]; then continue; fi
    if ! command -v uv >/dev/null; then
      fail "sb3 and sbx need uv, which makes an environment for each: python -m pip install uv"
    fi
    export UV_PYTHON
    UV_PYTHON=$(command -v python)
    if uv run --quiet --offline --script "$file" --help &>/dev/null; then continue; fi
    echo "benchmark.sh: uv installs what $file names; the first time, this takes a minute and 1 GB"
    if ! UV_HTTP_RETRIES=0 uv sync --quiet --script "$file" 2>/dev/null; then
      flags=(--no-sources) links=${PIP_FIND_LINKS:-$(python -m pip config get global.find-links 2>/dev/null || true)}
      for link in $links; do flags+=(--find-links "$link"); done # uv does not read pip's settings
      echo "benchmark.sh: PyTorch's CPU index does not answer, so torch comes from PyPI"
      uv sync --quiet "${flags[@]}" --script "$file" || fail "uv could not install what $file names, as it says above."
    fi
    uv run --quiet --offline --script "$file" --help >/dev/null || fail "$file does not run, as it says above."
  done
  export UV_OFFLINE=1
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

is_judged() { # FILE: is it evaluate.py's, by the study's rules, and not of a quick look?
  grep -qsF '"episodes": 100,' "$1" && grep -qsF '"max_steps": 10000,' "$1"
}

evaluate() { # judge the trained agents: greedy, at epsilon 0.05, and for comparison all at random
  local i epsilon path flags file pending
  for epsilon in 0 0.05 1; do
    flags=() file=evaluation.json pending=()
    if [[ $epsilon != 0 ]]; then flags=(--epsilon "$epsilon") file=evaluation-epsilon-$epsilon.json; fi
    for i in "${!names[@]}"; do
      path=$(path_of "${names[$i]}")
      if [[ ${commands[$i]} == *" --save-every "* ]] && is_done "${names[$i]}" &&
        ! is_judged "$path/$file"; then
        pending+=("$path")
      fi
    done
    if ((${#pending[@]} == 0)); then continue; fi
    python evaluate.py "${pending[@]}" --episodes 100 "${flags[@]}" &
    if wait $!; then continue; fi
    for path in "${pending[@]}"; do # one of them is damaged: the others count
      python evaluate.py "$path" --episodes 100 "${flags[@]}" &
      wait $! || echo "This run could not be evaluated: $path"
    done
  done
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

  if [[ $report && $preset == minatar ]]; then evaluate; fi
  if [[ $report ]]; then
    python -m analysis.report "$runs_dir" --out "$runs_dir/report" &
    wait $! || echo "The report could not be made; the runs are in $runs_dir."
    if [[ $preset == doors ]]; then
      python -m analysis.doors "$runs_dir" "$runs_dir/report/layouts.csv" &
      wait $! || echo "The layouts could not be gathered; the runs are in $runs_dir."
    fi
    if [[ $preset == agents ]]; then
      python -m analysis.agents "$runs_dir" "$runs_dir/report/agents.csv" &
      wait $! || echo "What the agents cost could not be gathered; the runs are in $runs_dir."
    fi
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
prepare_peers
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

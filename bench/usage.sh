#!/usr/bin/env bash
# Prints the usage of benchmark.sh, without installing anything: bench/usage.sh [--help-all]
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "$0")")/.."

names=(studies/*/grid.toml)
names=("${names[@]#studies/}")
cat <<END
Usage: ./benchmark.sh [STUDY] [FLAGS]

Studies (default: quick, five scripts on CartPole-v1, 3 minutes on two idle cores):
  $(fold -s -w 76 <<<"${names[*]%/grid.toml}" | sed '2,$s/^/  /')

Instead of a study, choose the runs yourself. Each LIST is one,two,...:
  --scripts LIST    linen nnx nnx_cached nnx_tree equinox torch torch_compile,
                    or path/to/mine.py
  --envs LIST       default CartPole-v1; a custom environment is my_module:MyEnv
  --sizes LIST      default small; units per hidden layer:
$(sed -nE 's/^(\w+) = \[(.+)\]$/                      \1 (\2)/p' analysis/sizes.toml)
                      default (as in the script)

  --iterations N    iterations of 8192 steps; default 100, or as in the study
  --repeats N       repeat each run with N seeds; default 1, or as in the study
  --only REGEX      only the runs whose commands match
  --list, --count   print the commands, or their number, and run nothing
  --dry-run         print the missing runs and how long they will take
  --runs-dir DIR    folder for the runs, default runs; complete runs are not repeated
  --help-all        all flags, and what each study contains

If it is stopped or killed, run the same command again to continue.
END
if [[ ${1:-} != --help-all ]]; then exit; fi
cat <<'END'

More flags:
  --scripts LIST    also the other scripts in scripts.toml, without "ppo_"; and torch-none,
                    linen-none, nnx-none and equinox-none, which disable jax.jit
  --iterations N    scripts.toml lists the steps per iteration for each script
  --devices N       train on N devices; only for linen_sharded and torch_ddp
  --phases          wait for the device after each rollout, to time rollout and update
  --seed N          seed of the random order within a block (environment, size); default 1
  --from I, --to I  first and last line of --list to run
  --timeout S       end a run after S seconds; default 86400, a day
  --gpus 0,1        distribute the runs over these GPUs, one run at a time on each; GPUs are
                    numbers or UUIDs from nvidia-smi -L
  --track           also log to Weights & Biases, one group per repeat; logs offline unless a
                    server accepts your key
  --notes TEXT      stored in benchmark.jsonl, and with each run in W&B
  --no-report       skip the report and the end command of the study

A run that was interrupted starts over, because its durations must all come from one process.
Exit status: 0 if all runs are complete, 1 if some failed, 2 for wrong usage.

Studies, and how long they take on two idle cores; studies/NAME/grid.toml lists their runs:
END
for grid in studies/*/grid.toml; do
  read -r line <"$grid"
  printf '  %-10s %s\n' "$(basename "${grid%/grid.toml}")" "${line#\# }"
done

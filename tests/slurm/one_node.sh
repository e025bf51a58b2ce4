#!/usr/bin/env bash
# Run benchmark.slurm on a real Slurm cluster of one node, which this script starts and stops.
#
#     sudo apt-get install --no-install-recommends slurmctld slurmd slurm-client
#     sudo tests/slurm/one_node.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

for tool in slurmctld slurmd sbatch; do
  if ! command -v "$tool" >/dev/null || ((UID != 0)); then
    echo "one_node.sh needs root, and Debian's slurmctld, slurmd and slurm-client." >&2
    exit 2
  fi
done

folder=$(mktemp -d)
export SLURM_CONF=$folder/slurm.conf
host=$(uname -n)
cat >"$SLURM_CONF" <<END
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=$host Default=YES State=UP
END
echo "CgroupPlugin=cgroup/v1" >"$folder/cgroup.conf"
mkdir "$folder/state" "$folder/spool"

slurmctld -D >"$folder/slurmctld.out" 2>&1 &
slurmd -D >"$folder/slurmd.out" 2>&1 &
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$folder"' EXIT
for _ in {1..60}; do
  if sinfo -h -o %T 2>/dev/null | grep -q idle; then break; fi
  sleep 1
done
sinfo

runs=$folder/runs
grid=(--scripts "linen,nnx_cached" --iterations 1 --repeats 2 --runs-dir "$runs")
submit() {
  sbatch --wait --array="1-$(./benchmark.sh "${grid[@]}" --count)%2" --output="$folder/%a.out" \
    benchmark.slurm "${grid[@]}"
}
starts() { grep -c '"event": "start"' "$runs/benchmark.jsonl"; }
expect() { # WHAT SEEN WANTED
  if [[ $2 != "$3" ]]; then
    cat "$folder"/*.out
    echo "FAILED: $1: $2, not $3"
    exit 1
  fi
  echo "ok: $1: $2"
}

source ./setup.sh
submit
expect "complete runs after one submission" "$(find "$runs" -name run.json | wc -l)" 4
expect "runs started" "$(starts)" 4
submit
expect "runs started after the same submission again" "$(starts)" 4
rm -r "$runs"/*linen*seed2
submit
expect "runs started after one was lost" "$(starts)" 5
expect "complete runs at the end" "$(find "$runs" -name run.json | wc -l)" 4

# Train one agent in two tasks, and with benchmark.sh on two devices.
runs=$folder/devices
words=(--total-timesteps 16384 --runs-dir "$runs")
srun --ntasks=2 python more/ppo_linen_sharded.py "${words[@]}" --run-name sharded
srun --ntasks=2 python -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d \
  --rdzv-endpoint="$host:29400" more/ppo_torch_ddp.py "${words[@]}" --run-name ddp
expect "runs of two tasks" "$(cat "$runs"/*/run.json | grep -c '"devices": 2')" 2
runs=$folder/driver
grid=(--scripts "linen_sharded,torch_ddp" --devices 2 --iterations 2 --runs-dir "$runs")
submit
expect "runs of the driver on two devices" "$(cat "$runs"/*/run.json | grep -c '"devices": 2')" 2

# Stop training from outside: by hand, and by a scheduler that needs the node for other jobs.
runs=$folder/stopped
grid=(--scripts linen --iterations 300 --repeats 1 --runs-dir "$runs")
training() { pgrep -f "runs-dir $runs" -c || true; }
wait_for() { # WHAT WANTED COMMAND...
  for _ in {1..120}; do
    if [[ $("${@:3}") == "$2" ]]; then break; fi
    sleep 1
  done
  expect "$1" "$("${@:3}")" "$2"
}
job=$(sbatch --parsable --requeue --array=1 --output="$folder/stopped.out" benchmark.slurm "${grid[@]}")
lines() { find "$runs" -name metrics.jsonl -size +0 | wc -l; }
wait_for "runs that train" 1 lines
scontrol requeue "${job}_1"
wait_for "runs started after a requeue" 2 starts
wait_for "runs that train after it" 1 lines
scancel "$job"
wait_for "processes left after scancel" 0 training
expect "runs that look complete" "$(find "$runs" -name run.json | wc -l)" 0
grep -c "Completed runs are kept" "$folder/stopped.out"
submit
expect "complete runs after the same submission again" "$(find "$runs" -name run.json | wc -l)" 1

# The first job script in docs/devices.md, queued again while it trains, and after SIGTERM.
mkdir -p "$folder/job/runs"
ln -s "$VENV" "$folder/job/.venv"
ln -s "$PWD/ppo_linen.py" "$folder/job"
sed '1,/^## On Slurm/d' docs/devices.md | awk '/^```/ { n++; next } n == 1 && !/gpus/' |
  sed 's/--cpus-per-task=4/--cpus-per-task=1/' >"$folder/job/job.sh"
job=$(sbatch --parsable --array=3 --requeue --chdir="$folder/job" --output=job.out \
  "$folder/job/job.sh" --total-timesteps 81920000)_3
show() { # PROGRAM: run it for each run.json of the job, as info
  for file in "$folder"/job/runs/*/run.json; do python -c "
import json, sys
info = json.load(sys.stdin)
$1" <"$file"; done
}
resumes() { show 'print(sum(iteration > 0 for iteration in info["resumed"]))'; }
status() { show 'print(info["status"])'; }
trained() { find "$folder/job/runs" -name metrics.jsonl -size +0 | wc -l; }
wait_for "job scripts that train" 1 trained
scontrol requeue "$job"
wait_for "times that the run was resumed after a requeue" 1 resumes
sleep 5 # until the script handles signals
scancel --signal=TERM "$job"
wait_for "status after SIGTERM" stopped status
scontrol requeue "$job"
wait_for "times that it was resumed after the next requeue" 2 resumes
scancel "$job"

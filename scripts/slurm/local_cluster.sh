#!/usr/bin/env bash
# A Slurm cluster on this machine, for trying and testing job scripts; needs Debian's packages
# slurm-wlm and munge (apt-get install --no-install-recommends slurm-wlm munge). Everything it writes
# is under one folder; it runs as any user and does not touch an existing Slurm or munge.
#
#     bash scripts/slurm/local_cluster.sh start DIR      start controller, nodes and munge
#     source DIR/environment                             point sbatch, squeue, … at it
#     bash scripts/slurm/local_cluster.sh stop DIR       end every process of it
#
#   NUM_NODES        nodes, all of them this machine                       (default: 2)
#   CPUS_PER_NODE    CPUs that a node claims to have                       (default: 8)
#   GPUS_PER_NODE    GPUs that a node claims to have, none of them real    (default: 2)
#   BASE_PORT        first of NUM_NODES + 1 ports of the loopback          (default: 17800)
#
# If Debian's slurmd cannot run several nodes on one machine, use NUM_NODES=1.
set -euo pipefail

action="${1:-}"
folder="${2:-}"
if [[ $action != start && $action != stop ]] || [[ -z $folder ]]; then
    echo "error: this script takes an action and a folder but got '$*';" \
        "write local_cluster.sh start DIR, or stop DIR" >&2
    exit 2
fi

# Whether the process in a pid file runs and has the name of the program that wrote the file.
is_running() {
    local id
    [[ -s $1 ]] || return 1
    id="$(<"$1")"
    [[ -r /proc/$id/comm && $(</proc/"$id"/comm) == "$2"* ]]
}

# Ends the process in a pid file and waits for it, unless it is another program's.
end_process() {
    local id
    is_running "$1" "$2" || return 0
    id="$(<"$1")"
    kill -TERM "$id" 2>/dev/null || return 0
    for _ in {1..100}; do
        kill -0 "$id" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL "$id" 2>/dev/null || true
}

stop_cluster() {
    local file
    if is_running "$folder/run/slurmctld.pid" slurmctld; then
        # End jobs first, so that no step outlives its node.
        (
            # shellcheck disable=SC1091
            source "$folder/environment"
            timeout 10 scancel --user "$(id -un)" --quiet || true
            for _ in {1..50}; do
                [[ -n $(timeout 5 squeue --noheader 2>/dev/null) ]] || break
                sleep 0.2
            done
        ) 2>/dev/null || true
    fi
    for file in "$folder"/run/slurmd-*.pid; do
        end_process "$file" slurmd
    done
    end_process "$folder/run/slurmctld.pid" slurmctld
    end_process "$folder/run/munged.pid" munged
}

if [[ $action == stop ]]; then
    folder="$(cd "$folder" 2>/dev/null && pwd)" || exit 0
    stop_cluster
    exit 0
fi

export PATH="$PATH:/usr/sbin:/sbin"
for program in munged slurmctld slurmd sbatch; do
    if ! type -P "$program" >/dev/null; then
        echo "error: a local cluster needs munged, slurmctld, slurmd and sbatch but there is no" \
            "$program; run apt-get install --no-install-recommends slurm-wlm munge" >&2
        exit 2
    fi
done

num_nodes="${NUM_NODES:-2}"
cpus="${CPUS_PER_NODE:-8}"
gpus="${GPUS_PER_NODE:-2}"
port="${BASE_PORT:-17800}"
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
if ((${#folder} > 80)); then
    echo "error: the socket of munge needs a short path but '$folder' has ${#folder} characters;" \
        "choose a folder of at most 80" >&2
    exit 2
fi
stop_cluster
rm -rf "${folder:?}"/{run,state,spool}
mkdir -p "$folder"/{run,state,spool,log}

# munge and its socket must be reachable, its key must not.
chmod 755 "$folder" "$folder/run"
chmod 700 "$folder/state" "$folder/log"
head -c 1024 /dev/urandom >"$folder/state/munge.key"
chmod 600 "$folder/state/munge.key"
munged --force --socket "$folder/run/munge.socket" --key-file "$folder/state/munge.key" \
    --pid-file "$folder/run/munged.pid" --log-file "$folder/log/munged.log" \
    --seed-file "$folder/state/munge.seed" 2>>"$folder/log/munged.err"

user="$(id -un)"
host="$(hostname -s)"
{
    # A requeued job waits as long as a credential lives, 2 minutes by default: too long for tests.
    cat <<EOT
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$folder/run/munge.socket,cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
MpiDefault=none
GresTypes=gpu
JobRequeue=1
KillWait=20
ReturnToService=2
# What the nodes claim to have, independent of this machine.
SlurmdParameters=config_overrides
EOT
    names=()
    for ((node = 1; node <= num_nodes; node++)); do
        names+=("local$node")
        echo "NodeName=local$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + node))" \
            "CPUs=$cpus Gres=gpu:$gpus State=UNKNOWN"
    done
    echo "PartitionName=main Nodes=$(IFS=,; echo "${names[*]}") Default=YES MaxTime=INFINITE State=UP"
} >"$folder/slurm.conf"
# A GPU is a device file to Slurm; these are empty files, and nothing opens them.
for ((gpu = 0; gpu < gpus; gpu++)); do
    : >"$folder/spool/gpu$gpu"
    echo "Name=gpu File=$folder/spool/gpu$gpu"
done >"$folder/gres.conf"
printf 'export SLURM_CONF=%q\n' "$folder/slurm.conf" >"$folder/environment"
export SLURM_CONF="$folder/slurm.conf"

slurmctld -c >>"$folder/log/slurmctld.out" 2>&1
for name in "${names[@]}"; do
    slurmd -N "$name" >>"$folder/log/slurmd.out" 2>&1
done
for _ in {1..100}; do
    num_idle="$(sinfo --noheader --Node --states=idle 2>/dev/null | wc -l)"
    if ((num_idle == num_nodes)); then
        echo "$num_nodes nodes of $cpus CPUs and $gpus GPUs are up; source $folder/environment"
        exit 0
    fi
    sleep 0.2
done
echo "error: $num_nodes nodes were started but $num_idle are idle after 20 s; see $folder/log" >&2
tail -n 5 "$folder"/log/* >&2 || true
stop_cluster
exit 1

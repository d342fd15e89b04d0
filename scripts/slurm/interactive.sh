#!/usr/bin/env bash
# Trains on allocated nodes from a terminal, with the output on it:
#
#     bash scripts/slurm/interactive.sh --nodes 2 --gpus-per-node 8 --time 1:00:00 -- FLAGS
#
# Options before -- go to salloc, after --exclusive --mem=0: whole nodes, as pretrain_gpt.sbatch asks
# for. FLAGS go to pretrain_gpt.py. Inside an existing allocation the script uses it and accepts no
# options before --. The variables are those of pretrain_gpt.sbatch. Ctrl-C
# lets the ranks save and end; the job is not requeued. With --shell as FLAGS the script opens a
# shell in the allocation, from which it can be called repeatedly.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

options=()
while (($#)) && [[ $1 != -- ]]; do
    options+=("$1")
    shift
done
if (($# < 2)); then
    echo "error: -- and the flags of pretrain_gpt.py are missing; write" \
        "interactive.sh --nodes 2 -- FLAGS, or -- --shell" >&2
    exit 2
fi
shift

if [[ -z ${SLURM_JOB_ID:-} ]]; then
    allocate=(salloc --exclusive --mem=0)
    if [[ $1 == --shell ]]; then
        exec "${allocate[@]}" --job-name hydraulis-shell "${options[@]}" bash
    fi
    exec "${allocate[@]}" --job-name hydraulis "${options[@]}" bash "${BASH_SOURCE[0]}" -- "$@"
fi
if ((${#options[@]})); then
    echo "error: this shell is already in the allocation of job $SLURM_JOB_ID, so options of" \
        "salloc have no effect: ${options[*]}; remove them" >&2
    exit 2
fi
# A second run in the allocation must not connect to processes that the first has left.
MASTER_PORT="${MASTER_PORT:-$((20000 + ($$ % 10000)))}"
export MASTER_PORT HYDRAULIS_ROOT="${HYDRAULIS_ROOT:-$root}"
source "$root/scripts/slurm/job.sh"
run_job --interactive "$@"

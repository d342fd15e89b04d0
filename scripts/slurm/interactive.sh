#!/usr/bin/env bash
# Trains on nodes that one waits for at a terminal, and sees what happens:
#
#     bash scripts/slurm/interactive.sh --nodes 2 --gpus-per-node 8 --time 1:00:00 -- FLAGS
#
# What stands before -- goes to salloc, FLAGS to pretrain_gpt.py. Inside an allocation that one has
# already it is used, and nothing may stand before --. The variables are those of
# pretrain_gpt.sbatch. Ctrl-C lets the ranks save and end; nothing is queued again. FLAGS that are
# just --shell give a shell in the allocation, in which this script can be called again and again.
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
    if [[ $1 == --shell ]]; then
        exec salloc --job-name hydraulis-shell "${options[@]}" bash
    fi
    exec salloc --job-name hydraulis "${options[@]}" bash "${BASH_SOURCE[0]}" -- "$@"
fi
if ((${#options[@]})); then
    echo "error: this shell is in the allocation of job $SLURM_JOB_ID already, so that options of" \
        "salloc cannot apply: ${options[*]}; leave them out" >&2
    exit 2
fi
# A second run in one allocation must not meet what is left of the first.
MASTER_PORT="${MASTER_PORT:-$((20000 + ($$ % 10000)))}"
export MASTER_PORT HYDRAULIS_ROOT="${HYDRAULIS_ROOT:-$root}"
source "$root/scripts/slurm/job.sh"
run_job --interactive "$@"

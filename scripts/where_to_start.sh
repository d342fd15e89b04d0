# shellcheck shell=bash
# Sourced by rank.sh and slurm/job.sh: a run that has written checkpoints resumes from the latest,
# whatever it started from. Checked at every start of the ranks, because torchrun restarts them with
# the original flags.

# Whether a folder has a latest checkpoint.
holds_checkpoint() {
    [[ -n $1 && -f $1/latest_checkpointed_iteration.txt ]]
}

# `resume_from FOLDER COMMAND …` sets the array `resuming` to the command, changed such that it
# loads this folder and no other.
resume_from() {
    local folder="$1"
    shift
    resuming=()
    while (($#)); do
        case "$1" in
            --load | --ckpt-step) shift ;;
            --load=* | --ckpt-step=* | --finetune) ;;
            *) resuming+=("$1") ;;
        esac
        (($# == 0)) || shift
    done
    resuming+=(--load "$folder")
}

# shellcheck shell=bash
# Sourced by rank.sh and slurm/job.sh: a run that has checkpoints of its own goes on from the latest,
# whatever it once started from. Looked at whenever ranks start, as torchrun starts them again with
# the flags of the first time.

# Whether a folder names a latest checkpoint.
holds_checkpoint() {
    [[ -n $1 && -f $1/latest_checkpointed_iteration.txt ]]
}

# Puts a command into the array `going_on`, so that it loads the folder and nothing else:
# `go_on_from FOLDER COMMAND …`.
go_on_from() {
    local folder="$1"
    shift
    going_on=()
    while (($#)); do
        case "$1" in
            --load | --ckpt-step) shift ;;
            --load=* | --ckpt-step=* | --finetune) ;;
            *) going_on+=("$1") ;;
        esac
        (($# == 0)) || shift
    done
    going_on+=(--load "$folder")
}

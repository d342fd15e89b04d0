# shellcheck shell=bash
# Sourced by run_local.sh and slurm/job.sh: what follows from the flags of a run.

# The last value of an option among flags, as argparse reads them: `--name value` or `--name=value`.
flag_value() {
    local name="$1" value='' previous='' argument
    shift
    for argument in "$@"; do
        [[ $previous != "$name" ]] || value="$argument"
        [[ $argument != "$name="* ]] || value="${argument#*=}"
        previous="$argument"
    done
    printf '%s' "$value"
}

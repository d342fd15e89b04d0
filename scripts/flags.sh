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

# `set_hardware_queues FLAGS` exports CUDA_DEVICE_MAX_CONNECTIONS, the hardware queues of a GPU, unless
# it is set. With one queue upstream's linear layers overlap messages of tp with weight gradients
# (before Blackwell), but nothing except the update hides gathers; with 32 no stream need share one. So
# it is 1 if a strategy has tp or strategies are still to be proposed, else 32, as the cost model
# assumes (`Hiding.of_device`). docs/regrouping.md has the price of either.
set_hardware_queues() {
    local queues=32 pool text
    pool="$(flag_value --strategy-pool "$@")$(flag_value --pool "$@")"
    text="$(flag_value --strategy "$@") tp$(flag_value --tensor-model-parallel-size "$@")"
    [[ ! -f $pool ]] || text+=" $(<"$pool")"
    [[ $pool != auto && ! $text =~ tp([2-9]|1[0-9]) ]] || queues=1
    export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-$queues}"
}

#!/usr/bin/env bash
# Trains on ranks of this machine, with readable logs:
#
#     bash scripts/run_local.sh NUM_RANKS FLAGS
#     RUN_DIR=runs/first bash scripts/run_local.sh 4 --strategy 'tp2+2*tp1' --data-path data/corpus …
#
# FLAGS go to pretrain_gpt.py unchanged. Each line on the terminal begins with its rank; each rank
# also has a file, RUN_DIR/logs/rank-0000.log and so on. Ctrl-C lets all ranks finish the
# iteration, save if --save is given, and end; a second one kills them.
#
#   RUN_DIR            folder of the run                              (default: runs/local/<time>)
#   MAX_RESTARTS       how often ranks are restarted after one failed              (default: 0)
#   EXIT_GRACE_S       seconds that ranks get to end after Ctrl-C                  (default: 240)
#   HYDRAULIS_DEVICE   cpu, or cuda for one GPU per rank                           (default: cpu)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! [[ ${1:-} =~ ^[1-9][0-9]*$ ]]; then
    echo "error: the first argument must be the number of ranks, 1 or more, but is '${1:-}';" \
        "write bash scripts/run_local.sh 4 FLAGS" >&2
    exit 2
fi
num_ranks="$1"
shift
# shellcheck source=scripts/flags.sh
source scripts/flags.sh
case "${HYDRAULIS_DEVICE:-cpu}" in
    cpu)
        export CUDA_VISIBLE_DEVICES=
        # With more threads than cores the ranks only wait for each other.
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
        ;;
    cuda) ;;
    *)
        echo "error: HYDRAULIS_DEVICE must be cpu or cuda but is '$HYDRAULIS_DEVICE'; set one" >&2
        exit 2
        ;;
esac
source scripts/environment.sh

run_dir="$(flag_value --run-dir "$@")"
run_dir="${run_dir:-${RUN_DIR:-runs/local/$(date +%Y%m%d-%H%M%S)}}"

# environment.sh sets `python`. This shell becomes node.sh, which forwards signals.
PYTHON="$python" HYDRAULIS_LOG_DIR="$run_dir/logs" exec bash scripts/node.sh \
    --standalone --local-addr 127.0.0.1 --nproc-per-node "$num_ranks" --max-restarts "${MAX_RESTARTS:-0}" \
    -- pretrain_gpt.py --exit-signal-handler --run-dir "$run_dir" "$@"

#!/usr/bin/env bash
# One rank, as torchrun starts it: `rank.sh COMMAND …`. The command's output goes to the
# rank's file and, with the rank before each line, to torchrun's output.
#
#   HYDRAULIS_LOG_DIR        folder of rank-0000.log, rank-0001.log, …
#   HYDRAULIS_NODE_DIR       folder of the node, where node.sh finds process ids
#   HYDRAULIS_RESUME_FROM    folder of the run's checkpoints, used if it has any     (default: none)
set -euo pipefail
# shellcheck source=scripts/where_to_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/where_to_start.sh"
: "${RANK:?rank.sh is started by torchrun}" "${LOCAL_RANK:?rank.sh is started by torchrun}"
: "${HYDRAULIS_LOG_DIR:?node.sh sets it}" "${HYDRAULIS_NODE_DIR:?node.sh sets it}"

# Write the id first, then look for the stop mark: node.sh sets the mark before it signals, so no
# rank is missed.
echo "$$" >"$HYDRAULIS_NODE_DIR/rank-$LOCAL_RANK.pid"
if [[ -e $HYDRAULIS_NODE_DIR/stopping ]]; then
    exit 0
fi

log="$HYDRAULIS_LOG_DIR/$(printf 'rank-%04d.log' "$RANK")"
echo "--- $(date -Is) rank $RANK on $(hostname), process $$," \
    "restart ${TORCHELASTIC_RESTART_COUNT:-0}" >>"$log"

# In a separate session, as torchrun signals the rank's process group: the last output of a killed
# rank must still arrive.
copy() {
    trap '' HUP INT TERM USR1 USR2
    # shellcheck disable=SC2016  # the inner bash expands these
    exec setsid bash -c 'tee -a -- "$1" | sed -u "s/^/[rank $2] /"' copy "$log" "$RANK"
}

if holds_checkpoint "${HYDRAULIS_RESUME_FROM:-}"; then
    resume_from "$HYDRAULIS_RESUME_FROM" "$@"
    set -- "${resuming[@]}"
fi

export PYTHONUNBUFFERED=1
exec "$@" > >(copy) 2>&1

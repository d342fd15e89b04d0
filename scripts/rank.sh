#!/usr/bin/env bash
# One rank, as torchrun starts it: `rank.sh COMMAND …`. What the command prints goes to the rank's
# own file and, with the rank before each line, to where torchrun's output goes.
#
#   HYDRAULIS_LOG_DIR        folder of rank-0000.log, rank-0001.log, …
#   HYDRAULIS_NODE_DIR       folder of the node, where node.sh finds process ids
#   HYDRAULIS_GO_ON_FROM     the run's own checkpoints, which count if there are any  (default: none)
set -euo pipefail
# shellcheck source=scripts/where_to_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/where_to_start.sh"
: "${RANK:?rank.sh is started by torchrun}" "${LOCAL_RANK:?rank.sh is started by torchrun}"
: "${HYDRAULIS_LOG_DIR:?node.sh sets it}" "${HYDRAULIS_NODE_DIR:?node.sh sets it}"

# The id first, then the look: node.sh marks the stop before it signals, so none slips through.
echo "$$" >"$HYDRAULIS_NODE_DIR/rank-$LOCAL_RANK.pid"
if [[ -e $HYDRAULIS_NODE_DIR/stopping ]]; then
    exit 0
fi

log="$HYDRAULIS_LOG_DIR/$(printf 'rank-%04d.log' "$RANK")"
echo "--- $(date -Is) rank $RANK on $(hostname), process $$," \
    "restart ${TORCHELASTIC_RESTART_COUNT:-0}" >>"$log"

# In a session of its own, as torchrun signals the rank's whole process group: the last words of a
# rank that is killed must still arrive.
copy() {
    trap '' HUP INT TERM USR1 USR2
    # shellcheck disable=SC2016  # the inner bash expands these
    exec setsid bash -c 'tee -a -- "$1" | sed -u "s/^/[rank $2] /"' copy "$log" "$RANK"
}

if holds_checkpoint "${HYDRAULIS_GO_ON_FROM:-}"; then
    go_on_from "$HYDRAULIS_GO_ON_FROM" "$@"
    set -- "${going_on[@]}"
fi

export PYTHONUNBUFFERED=1
exec "$@" > >(copy) 2>&1

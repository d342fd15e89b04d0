#!/usr/bin/env bash
# The ranks of one node: `node.sh [OPTIONS OF TORCHRUN] -- PROGRAM FLAGS`, where the program is a
# Python file, or -m and a module. Started by scripts/run_local.sh, or by Slurm on every node.
#
# SIGUSR1, SIGTERM and the first SIGINT ask the ranks to stop: each gets SIGTERM, at which one with
# --exit-signal-handler finishes its iteration, saves and exits with 0. torchrun itself is not
# signalled: it would end with an error although all went well. It is after EXIT_GRACE_S, or at a
# second SIGINT, and then kills what is left.
#
#   PYTHON               interpreter
#   HYDRAULIS_LOG_DIR    folder of one file a rank
#   EXIT_GRACE_S         seconds from the first signal on until ranks are killed     (default: 240)
set -euo pipefail
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python3}"
exit_grace_s="${EXIT_GRACE_S:-240}"
: "${HYDRAULIS_LOG_DIR:?set it to a folder for one file a rank}"

launcher=()
while (($#)) && [[ $1 != -- ]]; do
    launcher+=("$1")
    shift
done
if (($# < 2)); then
    echo "error: node.sh needs a program but none follows '--'; write" \
        "node.sh [OPTIONS OF TORCHRUN] -- pretrain_gpt.py FLAGS" >&2
    exit 2
fi
shift

mkdir -p "$HYDRAULIS_LOG_DIR"
HYDRAULIS_NODE_DIR="$(mktemp -d "${TMPDIR:-/tmp}/hydraulis-node-XXXXXX")"
export HYDRAULIS_LOG_DIR HYDRAULIS_NODE_DIR

# Sends a signal to each rank that has started; one that has ended is no error.
# shellcheck disable=SC2329  # called by a function that traps call
signal_ranks() {
    local file
    for file in "$HYDRAULIS_NODE_DIR"/rank-*.pid; do
        if [[ -s $file ]]; then
            kill "-$1" "$(<"$file")" 2>/dev/null || true
        fi
    done
}

num_asked=0
# shellcheck disable=SC2329  # called by the traps below
ask_to_stop() {
    num_asked=$((num_asked + 1))
    if ((num_asked == 1)); then
        echo "$(date -Is) $1: asking the ranks of $(hostname) to save and end" >&2
        touch "$HYDRAULIS_NODE_DIR/stopping"
        signal_ranks TERM
        (
            # The signal goes to the whole process group again if it is repeated.
            trap '' INT TERM USR1
            deadline_s=$((SECONDS + exit_grace_s))
            while kill -0 "$launched" 2>/dev/null; do
                if ((SECONDS >= deadline_s)); then
                    echo "$(date -Is) error: ranks of $(hostname) still run $exit_grace_s s after" \
                        "the signal and are killed; raise EXIT_GRACE_S if saving takes longer" >&2
                    kill -TERM "$launched"
                    break
                fi
                sleep 1
            done
        ) &
    elif [[ $1 == SIGINT ]]; then
        echo "$(date -Is) SIGINT again: killing the ranks" >&2
        signal_ranks KILL
        kill -TERM "$launched" 2>/dev/null || true
    fi
}

trap 'rm -rf "$HYDRAULIS_NODE_DIR"' EXIT

# In a session of its own: a terminal's Ctrl-C and Slurm's signals go to a whole process group, but
# only this script is to act on them. Should this script be killed itself, torchrun is told by SIGHUP.
setsid setpriv --pdeathsig HUP "$python" -m torch.distributed.run "${launcher[@]}" \
    --no-python bash "$scripts/rank.sh" "$python" -u "$@" </dev/null &
launched=$!
trap 'ask_to_stop SIGUSR1' USR1
trap 'ask_to_stop SIGTERM' TERM
trap 'ask_to_stop SIGINT' INT

# `wait` returns early at a signal; the status is that of the last one.
status=0
while true; do
    status=0
    wait "$launched" || status=$?
    kill -0 "$launched" 2>/dev/null || break
done
exit "$status"

#!/usr/bin/env bash
# The ranks of one node: `node.sh [OPTIONS OF TORCHRUN] -- PROGRAM FLAGS`, where the program is a
# Python file, or -m and a module. Started by scripts/run_local.sh, or by Slurm on every node.
#
# SIGUSR1, SIGTERM and the first SIGINT ask the ranks to stop: each gets SIGTERM, at which one with
# --exit-signal-handler finishes its iteration, saves and exits with 0. torchrun itself is kept out
# of it: it would end with an error although all went well. After EXIT_GRACE_S, or at a second SIGINT,
# what is left is killed.
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
trap 'rm -rf "$HYDRAULIS_NODE_DIR"' EXIT

# Sends a signal to each rank that has started; one that has ended is no error.
signal_ranks() {
    local file
    for file in "$HYDRAULIS_NODE_DIR"/rank-*.pid; do
        if [[ -s $file ]]; then
            kill "-$1" "$(<"$file")" 2>/dev/null || true
        fi
    done
}

# Ends torchrun, and with it all ranks, unless it has ended by itself in time.
lose_patience() {
    local deadline_s=$((SECONDS + exit_grace_s))
    # The signal may come again, and then goes to this process too.
    trap '' INT TERM USR1
    while kill -0 "$launched" 2>/dev/null; do
        if ((SECONDS >= deadline_s)); then
            echo "$(date -Is) error: ranks of $(hostname) still run $exit_grace_s s after the" \
                "signal and are killed; raise EXIT_GRACE_S if saving takes longer" >&2
            signal_ranks KILL
            kill -HUP "$launched"
            break
        fi
        sleep 1
    done
}

# Slurm sends a signal to every process of a step, a terminal to every process in the foreground, but
# only this script is to act on it: torchrun ignores all but SIGHUP, which also tells it should this
# script be killed. Ranks heed SIGTERM as ever.
export TORCHELASTIC_SIGNALS_TO_HANDLE=SIGHUP
(
    trap '' INT TERM USR1
    exec setsid setpriv --pdeathsig HUP "$python" -m torch.distributed.run "${launcher[@]}" \
        --no-python env --default-signal=INT,TERM bash "$scripts/rank.sh" "$python" -u "$@"
) </dev/null &
launched=$!

# Traps only take notes: bash runs them in the middle of anything. `wait` returns early at a signal.
received=
trap 'received=SIGUSR1' USR1
trap 'received=SIGTERM' TERM
trap 'received=SIGINT' INT
is_asked=0
status=0
while true; do
    status=0
    wait "$launched" || status=$?
    if [[ -n $received ]]; then
        signal="$received"
        received=
        if ((!is_asked)); then
            is_asked=1
            echo "$(date -Is) $signal: asking the ranks of $(hostname) to save and end" >&2
            touch "$HYDRAULIS_NODE_DIR/stopping"
            signal_ranks TERM
            lose_patience &
        elif [[ $signal == SIGINT ]]; then
            echo "$(date -Is) SIGINT again: killing the ranks" >&2
            signal_ranks KILL
            kill -HUP "$launched" 2>/dev/null || true
        fi
    fi
    kill -0 "$launched" 2>/dev/null || break
done
exit "$status"

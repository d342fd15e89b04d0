#!/usr/bin/env bash
# shellcheck disable=SC2329  # traps call the functions
#
# The ranks of one node: `node.sh [OPTIONS OF TORCHRUN] -- PROGRAM FLAGS`, where the program is a
# Python file, or -m and a module. Started by scripts/run_local.sh, or by Slurm on every node.
#
# SIGUSR1, SIGTERM and the first SIGINT ask the ranks to stop: each gets SIGTERM, at which one with
# --exit-signal-handler finishes its iteration, saves and exits with 0. torchrun itself gets
# no signal: it would end with an error although all went well. After EXIT_GRACE_S, or at a second
# SIGINT, all remaining processes are killed.
#
#   PYTHON               interpreter
#   HYDRAULIS_LOG_DIR    folder with one file per rank
#   EXIT_GRACE_S         seconds from the first signal until ranks are killed        (default: 240)
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
# A container may lack the host's TMPDIR. InfiniBand needs memory that may be locked, and torchrun's
# store a connection to every rank.
[[ -d ${TMPDIR:-/tmp} && -w ${TMPDIR:-/tmp} ]] || export TMPDIR=/tmp
ulimit -l unlimited 2>/dev/null || true
ulimit -n "$(ulimit -Hn)" 2>/dev/null || true
HYDRAULIS_NODE_DIR="$(mktemp -d "${TMPDIR:-/tmp}/hydraulis-node-XXXXXX")"
export HYDRAULIS_LOG_DIR HYDRAULIS_NODE_DIR
trap 'rm -rf "$HYDRAULIS_NODE_DIR"' EXIT

# Sends a signal to each rank that has started; a rank that has already ended is no error.
signal_ranks() {
    local file
    for file in "$HYDRAULIS_NODE_DIR"/rank-*.pid; do
        if [[ -s $file ]]; then
            kill "-$1" "$(<"$file")" 2>/dev/null || true
        fi
    done
}

# Ends torchrun, and with it all ranks, unless it ends by itself in time.
lose_patience() {
    local deadline_s=$((SECONDS + exit_grace_s))
    # The signal may be sent again, and then also reaches this process.
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

# Traps act immediately: if one only set a variable between two commands of the loop at the end, it
# would have no effect before torchrun ends.
launched=
is_asked=0
ask() {
    if ((!is_asked)); then
        is_asked=1
        echo "$(date -Is) $1: asking the ranks of $(hostname) to save and end" >&2
        # Ranks that start after this see the file and end.
        touch "$HYDRAULIS_NODE_DIR/stopping"
        signal_ranks TERM
        [[ -z $launched ]] || lose_patience &
    elif [[ $1 == SIGINT ]]; then
        echo "$(date -Is) SIGINT again: killing the ranks" >&2
        signal_ranks KILL
        [[ -z $launched ]] || kill -HUP "$launched" 2>/dev/null || true
    fi
}
trap 'ask SIGUSR1' USR1
trap 'ask SIGTERM' TERM
trap 'ask SIGINT' INT

# Slurm sends a signal to every process of a step, a terminal to every process in the foreground, but
# only this script must act on it: torchrun ignores all but SIGHUP, which it also gets if this script
# is killed. Ranks handle SIGTERM as usual.
# Newer versions of torchrun read the first of these variables, older ones the second.
export PET_SIGNALS_TO_HANDLE=SIGHUP TORCHELASTIC_SIGNALS_TO_HANDLE=SIGHUP
(
    trap '' INT TERM USR1
    exec setsid setpriv --pdeathsig HUP "$python" -m torch.distributed.run "${launcher[@]}" \
        --no-python env --default-signal=INT,TERM bash "$scripts/rank.sh" "$python" -u "$@"
) </dev/null &
launched=$!
# A signal interrupts `wait`, not torchrun, whose status bash keeps.
while kill -0 "$launched" 2>/dev/null; do
    wait "$launched" || true
done
status=0
wait "$launched" || status=$?
exit "$status"

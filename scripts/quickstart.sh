#!/usr/bin/env bash
# Trains a small GPT on 4 ranks of this machine, from nothing but git, bash and Python 3.12:
#
#     bash scripts/quickstart.sh [FLAGS of pretrain_gpt.py]
#
# The corpus is the source of Python's standard library, one sequence per file; it is prepared once.
# Flags given here come after those below; if a flag is repeated, the last value wins. Examples:
#
#     bash scripts/quickstart.sh --train-iters 8 --run-dir runs/short --strategy pp2+tp2
#     bash scripts/quickstart.sh --strategy-pool examples/pool_4_ranks.json
#     HYDRAULIS_NUM_RANKS=2 bash scripts/quickstart.sh
#
# At the end it writes a page about the run, report.html in the run folder. Ctrl-C ends training after
# the iteration; a second one kills it.
#
# It trains on the CPU even if there are GPUs; HYDRAULIS_DEVICE=cuda gives every rank a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

num_ranks="${HYDRAULIS_NUM_RANKS:-4}"
if ! [[ $num_ranks =~ ^[1-9][0-9]*$ ]]; then
    echo "error: HYDRAULIS_NUM_RANKS must be a number of ranks but is '$num_ranks'; set it to 1 or more" >&2
    exit 2
fi
case "${HYDRAULIS_DEVICE:-cpu}" in
    cpu) export CUDA_VISIBLE_DEVICES= ;;
    cuda)
        if ! "$python" -W ignore -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
            echo "error: HYDRAULIS_DEVICE=cuda needs a GPU but torch finds none; remove it to train on the CPU" >&2
            exit 2
        fi
        ;;
    *)
        echo "error: HYDRAULIS_DEVICE must be cpu or cuda but is '$HYDRAULIS_DEVICE'; set one of them" >&2
        exit 2
        ;;
esac
strategy='tp2+2*tp1'
if ((num_ranks != 4)); then
    strategy="$num_ranks*tp1"
fi

corpus="$PWD/runs/quickstart/corpus"
"$python" scripts/stdlib_corpus.py --output-dir "$corpus"

# With more threads than cores the ranks only wait for each other.
export OMP_NUM_THREADS=1

# These flags exclude each other: the batch size in sequences or in tokens, and one strategy or a
# pool file.
batch_size=(--global-batch-size 12)
strategies=(--strategy "$strategy")
run_dir="runs/quickstart/$(date +%Y%m%d-%H%M%S)"
trace=
describes=0
previous=
for argument in "$@"; do
    case "$argument" in
        --global-batch-tokens*) batch_size=() ;;
        --strategy-pool*) strategies=() ;;
        --run-dir=*) run_dir="${argument#*=}" ;;
        --trace=*) trace="${argument#*=}" ;;
        --dry-run | --help | -h) describes=1 ;;
    esac
    case "$previous" in
        --run-dir) run_dir="$argument" ;;
        --trace) trace="$argument" ;;
    esac
    previous="$argument"
done

flags=(
    # Data: sequences longer than --seq-length are split.
    --data-path "$corpus/stdlib"
    --split "98,2,0"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$corpus/tokenizer"
    --seq-length 1024
    --long-sequences split
    # The model.
    --num-layers 4
    --hidden-size 128
    --ffn-hidden-size 256
    --num-attention-heads 8
    --group-query-attention
    --num-query-groups 4
    --swiglu
    --normalization RMSNorm
    --position-embedding-type rope
    --max-position-embeddings 1024
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    # Training.
    --train-iters 40
    --lr 3e-3
    --min-lr 3e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --weight-decay 0.1
    --clip-grad 1
    --seed 1234
    --eval-interval 20
    --eval-iters 1
    --log-interval 1
    # What this package adds. The first iterations are traced, for the report.
    --run-dir "$run_dir"
    --trace "${trace:-$run_dir/trace}"
)

if ((describes)); then
    exec "$python" pretrain_gpt.py "${flags[@]}" "${batch_size[@]}" "${strategies[@]}" \
        --num-ranks "$num_ranks" "$@"
fi

# In the background, so that this script can forward signals: with a foreground job, bash would wait
# for its end first. In a new session, so that a terminal's Ctrl-C does not arrive twice.
setsid env --default-signal=INT bash scripts/run_local.sh "$num_ranks" \
    "${flags[@]}" "${batch_size[@]}" "${strategies[@]}" "$@" <&0 &
training=$!
for signal in HUP INT TERM; do
    # shellcheck disable=SC2064  # this signal and this process
    trap "kill -$signal $training" "$signal"
done
status=0
wait "$training" || status=$?
# A signal interrupts `wait`, not the training.
while kill -0 "$training" 2>/dev/null; do
    status=0
    wait "$training" || status=$?
done
if ((status == 0)); then
    exec "$python" -m megatron.hydraulis report "$run_dir"
fi
exit "$status"

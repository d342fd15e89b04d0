#!/usr/bin/env bash
# Fine-tunes a small Qwen3 on conversations, on 4 ranks of this machine, from nothing but git, bash
# and Python 3.12:
#
#     bash scripts/finetune.sh [FLAGS of pretrain_gpt.py]
#
# The conversations are questions about Python's standard library, answered by its documentation. The
# model begins with random weights, so that nothing is downloaded: it learns to answer in the style of
# documentation, not facts. Flags given here come after those below; if a flag is repeated, the last
# value wins. With your model and data, the steps are the same:
#
#   preprocess --chat, train --hf, export-hf, load with transformers
#
# With --lora-rank 16 it trains adapters of a model that it has fine-tuned before, or does first, and
# exports them for peft.
# Everything is in runs/finetune; RUN_DIR names another folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_DISABLE_PROGRESS_BARS=1

data=runs/finetune/data
run_dir="${RUN_DIR:-runs/finetune/$(date +%Y%m%d-%H%M%S)}"
hydraulis=("$python" -m megatron.hydraulis)
mkdir -p "$run_dir"

model="$data/model" exported=model of_export=()
if [[ " $* " == *" --lora-rank"* ]]; then
    # Adapters of random weights would learn nothing.
    base=runs/finetune/base
    if [[ ! -f $base/model/config.json ]]; then
        echo "=== all weights first, into $base: adapters are of a model that can answer"
        rm -rf "$base"
        RUN_DIR="$base" bash scripts/finetune.sh
    fi
    model="$base/model" exported=adapter of_export=(--adapter)
fi

echo '=== a model and conversations'
"$python" scripts/stdlib_chat.py --output-dir "$data"

echo '=== preprocess --chat: tokens, and weights that train answers alone'
"${hydraulis[@]}" preprocess --chat --show 3 --input "$data/conversations.jsonl" \
    --output-prefix "$run_dir/conversations" --seq-length 1024 --long-sequences truncate \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$PWD/$model"

echo '=== train --hf: model, tokenizer and weights of the folder, the fastest strategy for each iteration'
RUN_DIR="$run_dir/train" bash scripts/run_local.sh 4 --hf "$model" \
    --save "$run_dir/checkpoints" --data-path "$run_dir/conversations" --split 98,2,0 \
    --seq-length 1024 --attention-dropout 0 --hidden-dropout 0 --strategy-pool examples/pool_4_ranks.json \
    --global-batch-size 24 --train-iters 150 --lr 5e-3 --lr-decay-style cosine --lr-warmup-fraction 0.1 \
    --clip-grad 1 --seed 1234 --eval-interval 75 --eval-iters 1 --log-interval 10 "$@"

echo "=== export-hf: the $exported, for transformers"
"${hydraulis[@]}" export-hf "$run_dir/checkpoints" "$run_dir/$exported" --like "$model" "${of_export[@]}"
"$python" scripts/stdlib_chat.py --ask "$run_dir/$exported" 'What is json.dumps?'

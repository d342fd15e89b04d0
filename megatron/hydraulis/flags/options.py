"""What this program does with each option of upstream's parser: one row says it, `row_of` finds it.

An option is *honoured*, *taken* (accepted without acting on it, because the update is the same) or
*refused* (it would change the model, the data or the update in a way that is not built). An option
in no row, such as one of a later upstream, is refused. Everything that users read about options is
made from these rows: --help, the log, docs/flags.md, docs/coming-from-megatron.md.
``tests/unit/flags/test_arguments_honoured.py`` has one test per honoured option.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from megatron.hydraulis.flags import expert_options
from megatron.hydraulis.flags.rows import Honoured, Need, Refused, Row, Taken
from megatron.hydraulis.model_shape import NO_DROPOUT

_TOPICS = {
    "Model": """
        --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --kv-channels
        --group-query-attention --num-query-groups --max-position-embeddings
        --position-embedding-type --use-rotary-position-embeddings --no-position-embedding
        --rotary-base --rotary-percent --rotary-interleaved
        --rotary-seq-len-interpolation-factor --use-rope-scaling --rope-scaling-factor
        --normalization --norm-epsilon --swiglu --disable-bias-linear --add-qkv-bias
        --qk-layernorm --apply-layernorm-1p --squared-relu --quick-geglu --glu-linear-offset
        --activation-func-clamp-value --window-size --window-attn-skip-freq --softmax-type
        --attention-output-gate --no-rope-freq --multi-latent-attention --q-lora-rank --kv-lora-rank
        --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --rope-type --rotary-scaling-factor
        --mscale --mscale-all-dim --untie-embeddings-and-output-weights
        --init-method-std --make-vocab-size-divisible-by --hidden-dropout --attention-dropout
        --recompute-granularity --recompute-activations --recompute-method
        --recompute-num-layers --recompute-modules --spec --transformer-impl --attention-backend
        --use-mcore-models --no-masked-softmax-fusion --no-bias-gelu-fusion
        --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
        --no-persist-layer-norm --no-gradient-accumulation-fusion --disable-jit-fuser""",
    "Experts": expert_options.TOPIC,
    "Batch and length of training": """
        --global-batch-size --rampup-batch-size --step-batch-size-schedule --seq-length
        --train-iters --train-samples --seed --deterministic-mode --calculate-per-token-loss
        --reset-position-ids --reset-attention-mask --exit-interval --exit-duration-in-mins
        --exit-signal-handler --exit-signal --eval-interval --eval-iters --start-eval-at-iter
        --eval-global-batch-size --manual-gc --manual-gc-interval --no-manual-gc-eval""",
    "Optimizer": """
        --optimizer --lr --min-lr --decoupled-lr --decoupled-min-lr --lr-decay-style
        --lr-decay-iters --lr-decay-samples --lr-warmup-iters --lr-warmup-samples
        --lr-warmup-fraction --lr-warmup-init --lr-wsd-decay-style --lr-wsd-decay-iters
        --lr-wsd-decay-samples
        --weight-decay --start-weight-decay --end-weight-decay --weight-decay-incr-style --clip-grad
        --apply-wd-to-qk-layernorm --no-weight-decay-cond-type --adam-beta1 --adam-beta2 --adam-eps
        --use-distributed-optimizer --bf16 --accumulate-allreduce-grads-in-fp32
        --grad-reduce-in-bf16""",
    "Checkpoints": """
        --save --save-interval --async-save --load --ckpt-step --finetune --no-load-optim
        --exit-on-missing-checkpoint --dist-ckpt-optim-fully-reshardable
        --override-opt_param-scheduler --use-checkpoint-opt_param-scheduler""",
    "Parallelism": """
        --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
        --cp-comm-type --sequence-parallel --distributed-backend --distributed-timeout-minutes""",
    "Data and tokenizer": """
        --data-path --split --train-data-path --valid-data-path --test-data-path
        --tokenizer-type --tokenizer-model --vocab-file --merge-file --vocab-size
        --padded-vocab-size --tokenizer-metadata --tokenizer-special-tokens --tiktoken-pattern
        --tiktoken-num-special-tokens --tokenizer-sentencepiece-legacy
        --no-tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-hf-no-use-fast
        --tokenizer-hf-no-include-special-tokens --trust-remote-code --null-tokenizer-eod-id
        --null-tokenizer-pad-id --sft --sft-tokenizer-prompt-format""",
    "Logging": """
        --log-interval --log-throughput --timing-log-level --timing-log-option --logging-level
        --tensorboard-dir --tensorboard-log-interval --tensorboard-queue-size
        --log-timers-to-tensorboard --no-log-loss-scale-to-tensorboard
        --log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard --wandb-project
        --wandb-exp-name --wandb-save-dir --wandb-entity --no-one-logger""",
}
"""Topic -> primary option strings that are honoured: as upstream's help says, except for those in
the tables below."""

_ALWAYS = {
    "--use-mcore-models": "models of megatron-core",
    "--no-persist-layer-norm": "no persistent norm kernel",
    "--calculate-per-token-loss": "loss is a mean over tokens",
    "--reset-position-ids": "positions restart in every sequence",
    "--reset-attention-mask": "attention stays inside a sequence",
    "--use-distributed-optimizer": "state sharded over all ranks",
    "--accumulate-allreduce-grads-in-fp32": "fp32 gradients",
    "--dist-ckpt-optim-fully-reshardable": "optimizer state in global coordinates",
    "--log-throughput": "TFLOP/s in the log line",
    "--no-one-logger": "no metrics to One Logger",
}
"""Options that ask for what this program does in any case."""

_DIFFERENT = {
    "--qk-layernorm": "norms of queries and keys or, with --multi-latent-attention, of latents: "
    "queries without --q-lora-rank have none",
    "--sft": "the data are JSON lines of conversations, each a sequence; answers are trained, with "
    "the formats default and identity every token; --long-sequences truncate trains one label more "
    "than Megatron at the cut",
    "--make-vocab-size-divisible-by": "the vocabulary is padded to a multiple of it under every "
    "strategy",
    "--recompute-modules": "modules of selective recompute: core_attn, and mlp without biases",
    "--no-rope-fusion": "three kernels rotate instead of Transformer Engine's one; always so with "
    "layers of megatron-core",
    "--no-gradient-accumulation-fusion": "a separate kernel adds each weight gradient; always so "
    "without apex",
    "--global-batch-size": "sequences of a global batch; packing makes micro-batches of them",
    "--deterministic-mode": "kernels and collectives that add in a fixed order, which may be "
    "slower: runs on equal ranks with equal plans are equal bit by bit",
    "--train-iters": "iterations of the whole run, those before --load included",
    "--eval-interval": "iterations between evaluations on the validation part",
    "--eval-iters": "global batches of an evaluation, 100 if only --eval-interval is given; "
    "without either, nothing is evaluated",
    "--train-samples": "samples of the whole run, instead of --train-iters: sequences or, with "
    "--global-batch-tokens, --seq-length tokens each",
    "--rampup-batch-size": "START INCREMENT SAMPLES: the global batch begins with START samples "
    "and grows by INCREMENT in equal stretches of SAMPLES samples; rates go by samples with "
    "--train-samples, else by iterations",
    "--step-batch-size-schedule": "'0:256 1M:512': samples of a global batch from a number of "
    "tokens on, of which --seq-length count as a sample; rates as for --rampup-batch-size",
    "--eval-global-batch-size": "samples of a global batch of evaluation",
    "--lr-warmup-fraction": "warmup, as a share of --lr-decay-iters or --lr-decay-samples",
    "--seq-length": "longest sequence in tokens; --long-sequences says what happens to longer ones",
    "--async-save": "a fork of each rank writes while training goes on",
    "--load": "folder of the checkpoint to continue from; a folder without one is an error, except "
    "at the first start of a run whose --save is the same folder",
    "--exit-on-missing-checkpoint": "a missing checkpoint is an error even in the folder of --save",
    "--no-load-optim": "continue at the checkpoint's iteration and place in the data with a new "
    "optimizer and learning-rate schedule",
    "--cp-comm-type": "one of auto, p2p, all_gather, a2a for all layers; auto, the default, takes "
    "the one that moves the fewest bytes; p2p is run as all_gather",
    "--window-size": "in windowed layers a token attends to this many tokens before it, and to "
    "itself, as in 128,0",
    "--window-attn-skip-freq": "every so many layers one attends to whole sequences; or a list "
    "with 1 for each windowed layer and 0 for the others, as in [1,0]*12",
    "--softmax-type": "off-by-one adds 1 to the denominator of the softmax, learnable a parameter "
    "per head; both take --core-attention sdpa",
    "--glu-linear-offset": "added to the linear half of a gated MLP",
    "--activation-func-clamp-value": "limit of both halves of a gated MLP",
    "--rope-scaling-factor": "factor of Llama 3's scaling, as in Hugging Face; Megatron 0.19.2 "
    "drops it and scales by 8",
    "--grad-reduce-in-bf16": "gradients travel in bf16, half the bytes, and are added in fp32, "
    "those of micro-batches too",
    "--sequence-parallel": "on wherever tp > 1, unless --no-sequence-parallel",
    "--use-rotary-position-embeddings": "--position-embedding-type rope",
    "--attention-backend": "chooses --core-attention where that is not given: local and unfused "
    "stand for sdpa, the others for auto",
    "--tensor-model-parallel-size": "tp of every replica, without --strategy and --strategy-pool",
    "--pipeline-model-parallel-size": "pp of every replica, without --strategy and --strategy-pool",
    "--context-parallel-size": "cp of every replica, without --strategy and --strategy-pool",
    "--expert-model-parallel-size": "times --expert-tensor-parallel-size, ep of every replica, "
    "without --strategy and --strategy-pool; replicas that share experts become one, as in cp8~ep8",
    "--expert-tensor-parallel-size": "a factor of ep; default: tp",
}
"""Options whose effect differs from upstream's help, although every value is accepted."""

_NO_DROPOUT = Honoured("dropout is not supported", only=(0.0,), otherwise=NO_DROPOUT)
_TOKENIZERS = (
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
    "SFTTokenizer",
)
_PROMPT_FORMATS = ("nemotron-h-aligned", "nemotron-nano-v2", "identity", "default")
_RESTRICTED = {
    "--position-embedding-type": Honoured(
        "positions restart in every sequence",
        only=("rope", "learned_absolute", "none"),
        otherwise="this position embedding was not shown to work on packed sequences; "
        "use rope, learned_absolute or none",
    ),
    "--hidden-dropout": _NO_DROPOUT,
    "--attention-dropout": _NO_DROPOUT,
    "--transformer-impl": Honoured(
        "layers of megatron-core, or with CUDA of Transformer Engine",
        only=("local", "transformer_engine"),
        otherwise="only layers for training are built; use local or transformer_engine",
    ),
    "--optimizer": Honoured(
        "AdamW on canonical shards",
        only=("adam",),
        otherwise="canonical shards are updated by AdamW; use adam",
    ),
    "--tokenizer-type": Honoured(
        "tokenizer of Megatron",
        only=_TOKENIZERS,
        otherwise="this tokenizer is not one for causal language models of text; "
        f"use {', '.join(_TOKENIZERS)}",
    ),
    "--sft-tokenizer-prompt-format": Honoured(
        "prompt format of the conversations",
        only=_PROMPT_FORMATS,
        otherwise="Megatron has no such prompt format; use hydraulis preprocess --chat",
    ),
}


def _tokenizer(*names: str) -> Need:
    *others, last = names
    listed = f"{', '.join(others)} or {last}" if others else last
    return Need("tokenizer_type", f"--tokenizer-type {listed}", values=names)


# Options of any of these tables that have an effect only with another one.
_NEEDS = {
    Need("position_embedding_type", "--position-embedding-type rope", values=("rope",)): """
        --rotary-interleaved --rotary-seq-len-interpolation-factor --use-rope-scaling
        --no-rope-freq""",
    Need(
        "position_embedding_type multi_latent_attention",
        "--position-embedding-type rope or --multi-latent-attention",
        values=("rope", True),
    ): "--rotary-base --rotary-percent",
    Need("window_size", "--window-size"): "--window-attn-skip-freq",
    Need("multi_latent_attention", "--multi-latent-attention"): """
        --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim
        --rotary-scaling-factor --mscale --mscale-all-dim --rope-type""",
    Need("bf16", "--bf16"): "--grad-reduce-in-bf16",
    Need("qk_layernorm", "--qk-layernorm"): (
        "--apply-wd-to-qk-layernorm --no-weight-decay-cond-type"
    ),
    Need("swiglu quick_geglu", "--swiglu or --quick-geglu"): (
        "--glu-linear-offset --activation-func-clamp-value"
    ),
    Need("use_rope_scaling", "--use-rope-scaling"): "--rope-scaling-factor",
    Need("group_query_attention", "--group-query-attention"): "--num-query-groups",
    Need("padded_vocab_size", "no --padded-vocab-size", absent=True): (
        "--make-vocab-size-divisible-by"
    ),
    Need("recompute_granularity", "--recompute-granularity full", values=("full",)): (
        "--recompute-method --recompute-num-layers"
    ),
    Need("exit_signal_handler", "--exit-signal-handler"): "--exit-signal",
    Need("eval_interval", "--eval-interval"): "--start-eval-at-iter --eval-global-batch-size",
    Need("decoupled_lr", "--decoupled-lr"): "--decoupled-min-lr",
    Need("manual_gc", "--manual-gc"): "--manual-gc-interval --no-manual-gc-eval",
    Need("lr_decay_style", "--lr-decay-style WSD", values=("WSD",)): (
        "--lr-wsd-decay-style --lr-wsd-decay-iters --lr-wsd-decay-samples"
    ),
    Need("save", "--save"): "--save-interval --async-save",
    Need("load", "--load"): """
        --ckpt-step --finetune --no-load-optim --exit-on-missing-checkpoint
        --override-opt_param-scheduler --use-checkpoint-opt_param-scheduler""",
    Need("data_path", "--data-path"): "--split",
    Need("sft", "--sft"): "--sft-tokenizer-prompt-format",
    _tokenizer("TikTokenizer"): "--tiktoken-pattern --tiktoken-num-special-tokens",
    _tokenizer("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"): """
        --tokenizer-sentencepiece-legacy --no-tokenizer-sentencepiece-ignore-extra-whitespaces""",
    _tokenizer("HuggingFaceTokenizer", "GPT2BPETokenizer"): """
        --tokenizer-hf-no-use-fast --tokenizer-hf-no-include-special-tokens --trust-remote-code""",
    _tokenizer("NullTokenizer"): "--null-tokenizer-eod-id --null-tokenizer-pad-id",
    Need("wandb_project", "--wandb-project"): "--wandb-exp-name --wandb-save-dir --wandb-entity",
}


def _honoured() -> dict[str, Honoured]:
    table = {option: Honoured() for options in _TOPICS.values() for option in options.split()}
    table |= {option: Honoured(f"{what}: always so") for option, what in _ALWAYS.items()}
    table |= {option: Honoured(what) for option, what in _DIFFERENT.items()}
    table |= _RESTRICTED | expert_options.RESTRICTED
    for need, options in (_NEEDS | expert_options.NEEDS).items():
        table |= {option: replace(table[option], need=need) for option in options.split()}
    return table


HONOURED: Mapping[str, Honoured] = MappingProxyType(_honoured())
"""Primary option string -> how it is honoured."""

HONOURED_BY_TOPIC: Mapping[str, Mapping[str, Honoured]] = MappingProxyType(
    {
        topic: {option: HONOURED[option] for option in options.split()}
        for topic, options in _TOPICS.items()
    }
)
"""Topic -> primary option string -> how it is honoured."""


_PROFILER = "Megatron's profiler does not run; --trace DIR records iterations"
_ONE_FORMAT = "checkpoints have the format torch_dist, which all ranks write and read in parallel"
_ALL_SAVED = "a checkpoint holds the whole training state, more than asked"
_INTERVAL_ONLY = "only --save-interval writes checkpoints"
_ONE_LOGGER = "no metrics go to One Logger"
_FP32_STATE = "optimizer state and gradients stay fp32, which is more precise"
_STAGES = "--strategy gives the layers of stages, as in 'pp2:5,3'; otherwise the split is even"

_TAKEN_FOR = {
    "packing decides how sequences share a micro-batch; --max-tokens-per-micro-batch limits it": """
        --micro-batch-size --eval-micro-batch-size""",
    "gradients and parameters move between shards and replicas during compute, without Megatron's "
    "data-parallel wrapper": """
        --overlap-grad-reduce --overlap-param-gather --overlap-param-gather-with-optimizer-step
        --no-align-grad-reduce --no-align-param-gather --ddp-num-buckets --ddp-bucket-size
        --ddp-pad-buckets-for-high-nccl-busbw --ddp-reduce-scatter-with-fp32-accumulation
        --ddp-param-name-patterns-for-fp32-local-accumulation --ddp-average-in-collective
        --no-use-layer-wise-param-layout --use-nccl-ub --disable-symmetric-registration
        --create-all-gather-group --no-gradient-reduce-div-fusion
        --suggested-communication-unit-size --num-distributed-optimizer-instances""",
    _FP32_STATE: """
        --use-precision-aware-optimizer --main-grads-dtype --main-params-dtype --exp-avg-dtype
        --exp-avg-sq-dtype""",
    "tensor-parallel layers run without this overlap of communication": """
        --tp-comm-overlap --tp-comm-overlap-cfg --no-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad
        --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad
        --no-tp-comm-split-ag --no-tp-comm-split-rs --tp-comm-bootstrap-backend
        --use-ring-exchange-p2p""",
    "pipelines run without interleaving": """
        --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank
        --microbatch-group-size-per-virtual-pipeline-stage --no-overlap-p2p-communication
        --overlap-p2p-communication-warmup-flush --defer-embedding-wgrad-compute
        --wgrad-deferral-limit""",
    _STAGES: """
        --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers
        --pipeline-model-parallel-layout --account-for-embedding-in-pipeline-split
        --account-for-loss-in-pipeline-split""",
    "process groups follow from the strategy": """
        --use-tp-pp-dp-mapping --disable-gloo-process-groups --use-sharp --sharp-enabled-group
        --high-priority-stream-groups --nccl-communicator-config-path --lazy-mpu-init
        --pipeline-model-parallel-comm-backend --hierarchical-context-parallel-sizes""",
    "--distributed-timeout-minutes holds for the whole run": (
        "--distributed-timeout-seconds-after-init"
    ),
    "torch's own variables configure its flight recorder": """
        --flight-recorder-dump-path --flight-recorder-trace-buffer-size
        --no-flight-recorder-dump-on-timeout --flight-recorder-include-stack-trace
        --no-flight-recorder-include-only-active --no-flight-recorder-extra-dump-on-exec""",
    "--core-attention chooses the kernel; each of them keeps sequences apart": """
        --use-flash-attn --flash-attention-version""",
    "every kernel computes the softmax in fp32": """
        --attention-softmax-in-fp32 --apply-query-key-layer-scaling""",
    "the loss is always computed in chunks of tokens (--loss-chunk-tokens), the same value": """
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl""",
    "an unfused kernel computes the same": """
        --fused-residual-rmsnorm --use-transformer-engine-op-fuser --use-te-activation-func
        --use-fused-weighted-squared-relu --no-clone-scatter-output-in-embedding
        --use-grouped-gemm-for-dense-mlp --mlp-chunks-for-training""",
    "each rank reads its sequences from memory-mapped files, without index caches or loader "
    "processes": """
        --num-workers --data-cache-path --no-mmap-bin-files --num-dataset-builder-threads
        --no-data-sharding --mid-level-dataset-surplus --dataloader-fast-cache-load
        --dataloader-defer-npy-index-mmap""",
    "attention stays inside a sequence: always so": """
        --no-create-attention-mask-in-dataloader --dataloader-inter-document-masking""",
    "the end of a document predicts nothing; what follows an end inside a document is predicted": (
        "--eod-mask-loss"
    ),
    "losses are not scaled, which neither fp32 nor bf16 needs": "--loss-scale",
    "initial weights depend on --seed and --init-method-std alone": """
        --use-cpu-initialization --init-model-with-meta-device --te-rng-tracker
        --inference-rng-tracker""",
    _ONE_FORMAT: """
        --ckpt-format --use-dist-ckpt --dist-ckpt-format --auto-detect-ckpt-format
        --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save --ckpt-fully-parallel-load
        --ckpt-fully-parallel-load-exchange-algo --ckpt-fully-parallel-save-process-group
        --ckpt-fully-parallel-load-process-group --ckpt-assume-constant-structure
        --no-ckpt-load-validate-sharding-integrity --no-strict-fsdp-dtensor-load
        --dist-ckpt-strictness --dist-ckpt-save-pre-mcore-014 --dist-ckpt-workers
        --distrib-optim-fully-reshardable-mem-efficient --async-strategy
        --use-persistent-ckpt-worker --async-ckpt-cpu-priority --async-ckpt-io-priority
        --async-ckpt-use-cpu-shm --verify-integrity --no-stream-ckpt-dequant
       """,
    _ALL_SAVED: "--no-save-optim --no-save-rng",
    "training draws no random numbers, and data continue where the checkpoint was made": (
        "--no-load-rng"
    ),
    "--keep-last says which checkpoints are kept; by default all": "--save-retain-interval",
    _INTERVAL_ONLY: """
        --non-persistent-save-interval --non-persistent-ckpt-type --non-persistent-global-ckpt-dir
        --non-persistent-local-ckpt-dir --non-persistent-local-ckpt-algo --replication
        --replication-jump --replication-factor""",
    "nothing is moved to host memory; limits on micro-batches keep the job in device memory": """
        --cpu-offloading-num-layers --cpu-offloading-retain-pinned-cpu-buffers
        --fine-grained-activation-offloading --offload-modules --min-offloaded-tensor-size
        --delay-offload-until-cuda-graph --delta-offload-bytes-across-pp-ranks
        --activation-offload-fraction --fine-grained-offloading-max-inflight-offloads
        --optimizer-cpu-offload --optimizer-offload-fraction --use-torch-optimizer-for-cpu-offload
        --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params""",
    "every rank keeps what its layers save": "--distribute-saved-activations",
    "kernels are launched one by one, as shapes differ between micro-batches": """
        --enable-cuda-graph --cuda-graph-impl --cuda-graph-warmup-steps --external-cuda-graph
        --optimizer-cuda-graph --cuda-graph-scope --cuda-graph-modules""",
    "a non-finite update stops the run; --skip-nan-iterations skips it": """
        --no-check-for-nan-in-loss-and-grad --check-for-spiky-loss --check-for-large-grads
        --rerun-mode --result-rejected-tracker-filename""",
    "the quantity is not computed; metrics.jsonl and TensorBoard hold what is": """
        --log-params-norm --log-progress --log-memory-to-tensorboard --log-memory-interval
        --log-device-memory-used --log-num-zeros-in-grad --log-max-attention-logit --log-energy
        --no-barrier-with-level-1-timing --check-weight-hash-across-dp-replicas-interval
        --config-logger-dir""",
    _PROFILER: """
        --profile --profile-step-start --profile-step-end --use-pytorch-profiler
        --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack
        --pytorch-profiler-collect-chakra --profile-ranks --record-memory-history
        --memory-snapshot-path --record-shapes --nvtx-ranges""",
    "--report-drift names slow ranks": """
        --log-straggler --straggler-ctrlr-port --straggler-minmax-count
        --disable-straggler-on-startup --gpu-sniff-test-interval --run-workload-inspector-server""",
    _ONE_LOGGER: """
        --one-logger-project --one-logger-run-name --one-logger-async --app-tag-run-name
        --app-tag-run-version""",
    "torchrun or Slurm restarts ranks": """
        --adlr-autoresume --adlr-autoresume-interval --inprocess-restart
        --inprocess-max-iterations --inprocess-monitor-thread-interval
        --inprocess-monitor-process-interval --inprocess-progress-watchdog-interval
        --inprocess-heartbeat-interval --inprocess-soft-timeout --inprocess-hard-timeout
        --inprocess-heartbeat-timeout --inprocess-barrier-timeout --inprocess-completion-timeout
        --inprocess-last-call-wait --inprocess-termination-grace-time --inprocess-granularity
        --inprocess-active-world-size --inprocess-empty-cuda-cache""",
    "the run detects ranks that hang by itself": """
        --enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters""",
    "paths are those of mounted file systems": "--disable-msc",
    "any number of ranks trains a global batch of any size": "--decrease-batch-size-if-needed",
    "memory is released when a micro-batch needs it": "--empty-unused-memory-level",
    "the host waits for the device once an iteration": "--train-sync-interval",
    "signals end the run; --exit-signal-handler saves first": """
        --exit-signal-handler-for-dataloader --exit-signal-handler-for-training""",
    "it enables nothing by itself": "--enable-experimental",
    "a matrix for each latent, with the same result": "--mla-down-proj-fusion",
    "data are prepared with their tokens": "--chat-template",
}
"""What happens instead -> primary option strings that are taken."""

_TAKEN_BY_VALUE = {
    "--dataloader-type": Taken(
        "the order of sequences comes from --seed, a new one in every epoch",
        only=("single", "cyclic"),
        otherwise="sequences come from --data-path; use single or cyclic",
    ),
    "--vocab-extra-ids": Taken(
        "no entries are added", only=(0,), otherwise="the vocabulary is the tokenizer's; use 0"
    ),
}

_ONLY_WITH = {
    "--fp8-format or --fp4-format": r"no-fp8-wgrad|(fp8|fp4)-(recipe|quantizer-factory|margin|"
    r"interval|amax-.*|output-proj|param-gather)|first-last-layers-bf16|"
    r"num-layers-at-(start|end)-in-bf16|reuse-grad-buf-for-mxfp8-param-ag|"
    r"keep-fp8-transpose-cache",
    "--fp16": r"(initial|min)-loss-scale|loss-scale-window|hysteresis|fp16-lm-cross-entropy",
    "--optimizer muon, lion or sgd": r"(muon|lion|sgd)-.*",
    "--mtp-num-layers": r"mtp-(?!num-layers|hybrid).*",
    "--hybrid-layer-pattern": r"mamba-(?!inference).*|disable-mamba-mem-eff-path",
    "--experimental-attention-variant": r"(no-)?dsa-.*|linear-(?!attention-freq).*",
    "--use-megatron-fsdp or --use-torch-fsdp2": r"(megatron-)?fsdp-.*|torch-fsdp2-.*|"
    r"no-torch-fsdp2-.*|(data-parallel|outer-dp)-sharding-strategy|enable-full-sharding-in-hsdp",
    "--position-embedding-type relative": r"relative-attention-.*",
    "--qk-clip": r"qk-clip-.*",
    "--use-kitchen-attention": r"kitchen-attention-backend",
    "--use-mup": r"mup-.*",
    "--fim-data": r"fim-(?!data).*",
    "--perform-rl-step": r"rl-.*|grpo-.*|langrl-.*|refit-method",
    "--use-checkpoint-args": r"use-mp-args-from-checkpoint-args|"
    r"no-use-tokenizer-model-from-checkpoint-args",
    "programs for inference": r"inference-.*|flash-decode|decode-only-cuda-graphs|.*-prefills?|"
    r"cache-mla-latents|max-tokens-to-oom|use-legacy-static-engine|num-speculative-tokens|"
    r"use-same-sampling-seed-across-dp-ranks|symmetric-ar-type|mamba-inference-.*",
    "programs for vision": r"img-.*|num-(classes|channels)|patch-dim|classes-fraction|"
    r"data-per-class-fraction|head-lr-mult|vision-(?!pretraining$).*|"
    r"swin-.*|mask-(type|factor)|iter-per-epoch|dino-.*",
    "programs for encoders": r"bert-.*|output-bert-embeddings|mask-prob|short-seq-prob|ict-.*|"
    r"biencoder-.*|titles-data-path|query-in-block-prob|use-one-sent-docs|evidence-data-path|"
    r"retriever-.*|block-data-path|embedding-path|indexer-.*",
}
"""What gives options an effect, which is refused itself or is another program -> regular expression
on these options without their dashes. They are taken."""

_REMOVE = "remove it"
_DECODER_ONLY = "the model here is a decoder"

EQUIVALENTS: Mapping[str, str] = MappingProxyType(
    {
        "--sliding-window": "--window-size",
        "--qk-nope-head-dim": "--qk-head-dim",
        "--qk-rope-head-dim": "--qk-pos-emb-head-dim",
        "--wandb-name": "--wandb-exp-name",
    }
)
"""Options of forks that upstream does not know -> those of upstream with the same meaning."""

FORMER_OPTIONS = (
    "--emulate-device",
    "--emulate-scale",
    "--long-sequence-window",
    "--refit-cost-profile",
    "--refit-drift",
)
"""Options of our own that earlier versions had."""

# The first row that covers an option words its refusal, so narrow ones stand before wide ones.
_REFUSED = (
    Refused(
        "emulation",
        "emulated devices are part of the benchmarks",
        "in a checkout of the repository give the same flags to torchrun -m "
        "benchmarks.emulated_training",
        r"emulate-.*",
    ),
    Refused(
        "long sequences that wait",
        "no sequence waits for another: the pool of the examples trained 0.93 × the tokens/s so",
        "remove it; a checkpoint written with it loads, and trains first what it held",
        r"long-sequence-window",
    ),
    Refused(
        "refitted cost profiles",
        "plans keep the cost profile during a run",
        "use --report-drift 0.1, which names drift and slow ranks, and measure again by "
        "hydraulis profile",
        r"refit-(cost-profile|drift)",
    ),
    Refused(
        "former names",
        "Megatron removed it",
        "use --global-batch-size, --lr-warmup-fraction, --tensor-model-parallel-size, "
        "--recompute-granularity, --num-layers or --seq-length, which replaced it",
        r"batch-size|warmup|model-parallel-size|checkpoint-activations|(encoder|decoder)-num-layers|"
        r"(encoder|decoder)-seq-length|onnx-safe",
    ),
    Refused(
        "skipped data",
        "every iteration trains on the sequences that follow, in one order for the whole run",
        _REMOVE,
        r"phase-transition-iterations|iterations-to-skip|sample-rate",
        changes_costs=False,
    ),
    Refused(
        "RL",
        "reinforcement learning is not part of this program",
        "remove it, or train with upstream's own entry point",
        r"perform-rl-step",
    ),
    Refused(
        "8- and 4-bit arithmetic",
        "fp8 and fp4 are not part of this program",
        "use --bf16",
        r".*(fp8|fp4).*|te-precision-config-file",
    ),
    Refused(
        "attention of Kitchen",
        "--core-attention chooses among kernels that keep sequences apart, without Kitchen's",
        _REMOVE,
        r"use-kitchen-attention",
    ),
    *expert_options.REFUSED,
    Refused(
        "other attention",
        "attention here is causal softmax over packed sequences",
        _REMOVE,
        r"experimental-attention-variant|linear-attention-freq|qk-(l2-norm|clip)",
    ),
    Refused(
        "state-space and hybrid models",
        f"{_DECODER_ONLY}, one kind of layer throughout",
        _REMOVE,
        r".*mamba.*|.*hybrid-(layer|override)-pattern|is-hybrid-model|heterogeneous-layers-.*",
    ),
    Refused(
        "multi-token prediction",
        f"{_DECODER_ONLY} that predicts one token",
        _REMOVE,
        r"mtp-.*",
    ),
    Refused("vision", "the model here is a decoder of text", _REMOVE, groups=("vision",)),
    Refused("vision positions", "the model here is a decoder of text", _REMOVE, r"mrope-.*"),
    Refused(
        "layout of the job",
        "how many ranks share a sequence or a weight belongs to a replica",
        "remove it; --strategy or --strategy-pool gives tp and cp, as in tp2cp4 or cp8~",
        r".*context-parallel.*|max-seqlen-per-dp-cp-rank|tensor-parallel-num-weight-shards",
    ),
    Refused(
        "checkpoints",
        "which weights and settings a run starts with, or what it dumps, is not chosen in this way",
        "use --load, with --finetune for weights alone, and give the options of the model",
        groups=("checkpointing",),
        changes_costs=False,
    ),
    Refused(
        "half precision with loss scaling",
        "parameters are fp32 or bf16, which need no loss scaling",
        "use --bf16",
        r"fp16|fp32-residual-connection",
    ),
    Refused(
        "other optimizers",
        "all parameters are updated by AdamW, and all but biases and norms decay",
        _REMOVE,
        r"freeze-all-layers|"
        r"dump-param-to-param-group-map",
    ),
    Refused(
        "fully sharded data parallelism",
        "parameters are sharded over all ranks between iterations, not between layers",
        "remove it; if memory is short, use a scheme with more tp or pp ranks",
        r"use-(megatron-fsdp|torch-fsdp2)",
    ),
    Refused(
        "process groups",
        "ranks come from the launcher",
        _REMOVE,
        groups=("distributed init",),
        changes_costs=False,
    ),
    Refused(
        "initialisation",
        "initial weights depend on --seed and --init-method-std alone, never on the strategy",
        _REMOVE,
        r"no-initialization|embedding-init-method-std|use-mup|init-method-xavier-uniform|"
        r"data-parallel-random-init",
        changes_costs=False,
    ),
    Refused(
        "other data",
        "a sequence is a whole document of a corpus",
        "name the corpus by --data-path, or --train-data-path with its companions",
        groups=("data and dataloader",),
        changes_costs=False,
    ),
    Refused(
        "tokenizer",
        "the vocabulary is padded so that every strategy can divide it",
        "use --make-vocab-size-divisible-by or --padded-vocab-size",
        groups=("tokenizer",),
    ),
    Refused(
        "distillation",
        "distillation is not part of this program",
        _REMOVE,
        groups=("Logits Distillation",),
    ),
    Refused(
        "evaluation",
        "evaluation runs --eval-iters global batches of the validation part",
        "use --eval-interval and --eval-iters; to evaluate a checkpoint without training, --load "
        "it with --no-load-optim, --eval-iters and --train-iters equal to its iteration",
        r"skip-train|test-mode",
        ("validation",),
        changes_costs=False,
    ),
    Refused(
        "injected faults",
        "it makes a healthy job fail",
        _REMOVE,
        r"error-injection-.*|fault-injector-.*",
        changes_costs=False,
    ),
    Refused(
        "determinism",
        "packed rows differ from batch to batch, and kernels are chosen for speed",
        "remove it; --deterministic-mode repeats a run",
        r"batch-invariant-mode",
    ),
    Refused(
        "model variants",
        "this variant of the model was not shown to be equal under every strategy",
        _REMOVE,
        groups=("transformer configuration", "network size"),
    ),
)
_IN_NO_ROW = Refused("others", "this program does not act on it", _REMOVE)


def _taken() -> dict[str, Taken]:
    by_reason = {
        option: Taken(instead)
        for instead, options in (_TAKEN_FOR | expert_options.TAKEN_FOR).items()
        for option in options.split()
    }
    return by_reason | _TAKEN_BY_VALUE


TAKEN: Mapping[str, Taken] = MappingProxyType(_taken())
"""Primary option string -> what happens instead, without those that go with a refused option."""


def refusals() -> tuple[Refused, ...]:
    """All rows of options that training refuses."""
    return (*_REFUSED, _IN_NO_ROW)


def row_of(option: str, group: str) -> Row:
    """The row of a primary option string that stands in the argument group of that title.

    An option that no row covers, such as one of a later upstream, is refused.
    """
    named = HONOURED.get(option) or TAKEN.get(option)
    if named is not None:
        return named
    for what, pattern in _ONLY_WITH.items():
        if re.fullmatch(pattern, option.removeprefix("--")):
            return Taken(f"it has an effect only with {what}")
    return next((row for row in _REFUSED if row.covers(option, group)), _IN_NO_ROW)


def refusal(option: str, row: Refused) -> str:
    """One line: the option by name, why it is refused, and what to do instead."""
    return f"{option} is not honoured: {row.why}; {row.fix}"

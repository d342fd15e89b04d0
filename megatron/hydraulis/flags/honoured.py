"""The options of upstream's parser that are honoured, and how.

``tests/unit/flags/test_arguments_honoured.py`` has one test per option.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from megatron.hydraulis.model_shape import NO_DROPOUT


@dataclass(frozen=True, slots=True)
class Need:
    """A setting without which an option has no effect; it is then taken."""

    dest: str
    """Attribute of the parsed arguments that has to be set, or several of which one has."""
    flag: str
    """Flag by which a user sets it."""
    values: tuple[object, ...] | None = None
    """Values of the attribute that count; None accepts all but None, False and empty."""
    absent: bool = False
    """Whether the attribute has to be unset instead."""


@dataclass(frozen=True, slots=True)
class Honoured:
    """An option that is honoured: by default as upstream's help says."""

    here: str = ""
    """Effect of the option here if upstream's help says something else, one phrase."""
    only: tuple[object, ...] | None = None
    """The values that are accepted; None accepts all that the parser does."""
    otherwise: str = ""
    """Reason why another value is refused and what to do instead: ``why; fix``."""
    need: Need | None = None

    @property
    def help_text(self) -> str:
        """Text of --help instead of upstream's; empty where upstream's is true."""
        if not self.here:
            return ""
        values = "" if self.only is None else f"; only {', '.join(map(str, self.only))}"
        return f"{self.here[0].upper()}{self.here[1:]}{values}."


_TOPICS = {
    "Model": """
        --num-layers --hybrid-layer-pattern --linear-conv-kernel-dim --linear-key-head-dim
        --linear-value-head-dim --linear-num-key-heads --linear-num-value-heads
        --hidden-size --ffn-hidden-size --num-attention-heads --kv-channels
        --group-query-attention --num-query-groups --max-position-embeddings
        --position-embedding-type --use-rotary-position-embeddings --no-position-embedding
        --rotary-base --rotary-percent --rotary-interleaved
        --rotary-seq-len-interpolation-factor --use-rope-scaling --rope-scaling-factor
        --yarn-original-max-position-embeddings --yarn-beta-fast --yarn-beta-slow
        --yarn-correction-range-round-to-int --no-yarn-correction-range-round-to-int
        --normalization --norm-epsilon --swiglu --disable-bias-linear --add-qkv-bias
        --qk-layernorm --apply-layernorm-1p --squared-relu --quick-geglu --glu-linear-offset
        --activation-func-clamp-value --window-size --window-attn-skip-freq --softmax-type
        --attention-output-gate --no-rope-freq --multi-latent-attention --q-lora-rank --kv-lora-rank
        --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --rope-type --rotary-scaling-factor
        --mscale --mscale-all-dim --untie-embeddings-and-output-weights
        --mtp-num-layers --mtp-loss-scaling-factor
        --init-method-std --make-vocab-size-divisible-by --hidden-dropout --attention-dropout
        --recompute-granularity --recompute-activations --recompute-method
        --recompute-num-layers --recompute-modules --spec --transformer-impl --attention-backend
        --use-mcore-models --no-masked-softmax-fusion --no-bias-gelu-fusion
        --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
        --no-persist-layer-norm --no-gradient-accumulation-fusion --disable-jit-fuser""",
    "Experts": """
        --num-experts --moe-layer-freq --moe-ffn-hidden-size --moe-router-topk
        --moe-router-score-function --moe-router-pre-softmax --moe-router-num-groups
        --moe-router-group-topk --moe-router-topk-scaling-factor --moe-router-dtype
        --moe-router-load-balancing-type --moe-aux-loss-coeff --moe-z-loss-coeff
        --moe-router-enable-expert-bias --moe-router-bias-update-rate
        --moe-shared-expert-intermediate-size
        --moe-shared-expert-gate --moe-token-dispatcher-type --moe-grouped-gemm --moe-permute-fusion
        --expert-model-parallel-size --expert-tensor-parallel-size""",
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
    "--hybrid-layer-pattern": "kinds of layers, as in G-*E: attention (latent +), MLP (-), experts "
    "(E), gated delta net (G); --strategy, not |, cuts stages",
    "--qk-layernorm": "norms of queries and keys or, with --multi-latent-attention, of latents: "
    "queries without --q-lora-rank have none",
    "--sft": "the data are JSON lines of conversations, each a sequence; answers are trained, with "
    "the formats default and identity every token; --long-sequences truncate trains one label more "
    "than Megatron at the cut",
    "--make-vocab-size-divisible-by": "the vocabulary is padded to a multiple of it under every "
    "strategy",
    "--recompute-modules": "modules of selective recompute: core_attn, mlp without biases, and "
    "with Transformer Engine layernorm and moe_act",
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
    "a ring that hides, else the fewest bytes; without te p2p is all_gather",
    "--window-size": "in windowed layers a token attends to this many tokens before it, and to "
    "itself, as in 128,0",
    "--window-attn-skip-freq": "every so many layers one attends to whole sequences; or a list "
    "with 1 for each windowed layer and 0 for the others, as in [1,0]*12",
    "--mtp-num-layers": "layers that predict further tokens, within a sequence",
    "--mtp-loss-scaling-factor": "sum of the factors of their mean losses over a global batch",
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
    "--moe-router-enable-expert-bias": "biases of routers follow the load of experts in all tokens "
    "of an update",
    "--moe-grouped-gemm": "one call for all experts in layers of Transformer Engine; elsewhere "
    "expert after expert, with the same result",
    "--moe-permute-fusion": "kernels of Transformer Engine, in its layers, sort tokens by expert; "
    "elsewhere torch's, with the same result",
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
        only=("rope", "yarn", "learned_absolute", "none"),
        otherwise="this position embedding was not shown to work on packed sequences; "
        "use rope, yarn, learned_absolute or none",
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
    "--moe-router-score-function": Honoured(
        "scores of a router",
        only=("softmax", "sigmoid"),
        otherwise="these scores were not shown to be equal under every strategy; "
        "use softmax or sigmoid",
    ),
    "--moe-router-load-balancing-type": Honoured(
        "aux_loss and seq_aux_loss add the loss of each sequence, weighted by its tokens",
        only=("aux_loss", "seq_aux_loss", "none"),
        otherwise="this way of balancing depends on packing, so the plan would change the update; "
        "use seq_aux_loss, which balances each sequence and is the nearest",
    ),
    "--moe-token-dispatcher-type": Honoured(
        "how tokens reach their experts; flex, and allgather in waves (cp4~ep4), run as alltoall",
        only=("allgather", "alltoall", "flex"),
        otherwise="this dispatcher is not built; use allgather or alltoall",
    ),
}


def _tokenizer(*names: str) -> Need:
    *others, last = names
    listed = f"{', '.join(others)} or {last}" if others else last
    return Need("tokenizer_type", f"--tokenizer-type {listed}", values=names)


# Options of any of these tables that have an effect only with another one.
_NEEDS = {
    Need("position_embedding_type", "--position-embedding-type rope", values=("rope",)): (
        "--rotary-interleaved --rotary-seq-len-interpolation-factor --use-rope-scaling"
    ),
    Need(
        "position_embedding_type",
        "--position-embedding-type rope or yarn",
        values=("rope", "yarn"),
    ): "--no-rope-freq",
    Need("position_embedding_type", "--position-embedding-type yarn", values=("yarn",)): """
        --yarn-original-max-position-embeddings --yarn-beta-fast --yarn-beta-slow
        --yarn-correction-range-round-to-int --no-yarn-correction-range-round-to-int""",
    Need(
        "position_embedding_type multi_latent_attention",
        "--position-embedding-type rope or yarn, or --multi-latent-attention",
        values=("rope", "yarn", True),
    ): "--rotary-base",
    Need(
        "position_embedding_type multi_latent_attention",
        "--position-embedding-type rope or --multi-latent-attention",
        values=("rope", True),
    ): "--rotary-percent",
    Need(
        "position_embedding_type multi_latent_attention",
        "--position-embedding-type yarn or --multi-latent-attention",
        values=("yarn", True),
    ): "--rotary-scaling-factor --mscale --mscale-all-dim",
    Need("window_size", "--window-size"): "--window-attn-skip-freq",
    Need("hybrid_layer_pattern", "--hybrid-layer-pattern"): """
        --linear-conv-kernel-dim --linear-key-head-dim --linear-value-head-dim
        --linear-num-key-heads --linear-num-value-heads""",
    Need("mtp_num_layers", "--mtp-num-layers"): "--mtp-loss-scaling-factor",
    Need("multi_latent_attention", "--multi-latent-attention"): """
        --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim
        --rope-type""",
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
    Need("num_experts", "--num-experts"): """
        --moe-layer-freq --moe-ffn-hidden-size --moe-router-topk --moe-router-score-function
        --moe-router-pre-softmax --moe-router-num-groups --moe-router-group-topk
        --moe-router-topk-scaling-factor --moe-router-dtype --moe-router-load-balancing-type
        --moe-aux-loss-coeff --moe-z-loss-coeff --moe-router-enable-expert-bias
        --moe-shared-expert-intermediate-size --moe-token-dispatcher-type --moe-grouped-gemm
        --moe-permute-fusion --expert-model-parallel-size --expert-tensor-parallel-size""",
    Need(
        "moe_shared_expert_intermediate_size", "--moe-shared-expert-intermediate-size"
    ): "--moe-shared-expert-gate",
    Need(
        "moe_router_enable_expert_bias", "--moe-router-enable-expert-bias"
    ): "--moe-router-bias-update-rate",
    Need("wandb_project", "--wandb-project"): "--wandb-exp-name --wandb-save-dir --wandb-entity",
}


def _honoured() -> dict[str, Honoured]:
    table = {option: Honoured() for options in _TOPICS.values() for option in options.split()}
    table |= {option: Honoured(f"{what}: always so") for option, what in _ALWAYS.items()}
    table |= {option: Honoured(what) for option, what in _DIFFERENT.items()}
    table |= _RESTRICTED
    for need, options in _NEEDS.items():
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

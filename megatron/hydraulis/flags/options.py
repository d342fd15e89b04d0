"""Upstream's options: those that this program honours, and why the others are refused.

Every option of upstream's parser that is not in ``HONOURED`` is refused by name when given. The
families of refused options only word the message: an option that none of them covers, such as one
of a later upstream, is refused too.
``tests/unit/test_arguments_honoured.py`` has one row per honoured option.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from megatron.hydraulis.model_shape import NO_DROPOUT

__all__ = [
    "FORMER_OPTIONS",
    "HONOURED",
    "HONOURED_BY_TOPIC",
    "Family",
    "Honoured",
    "Need",
    "families",
    "family_of",
    "refusal",
]


@dataclass(frozen=True, slots=True)
class Need:
    """A setting without which an option has no effect, so that giving it must be a mistake."""

    dest: str
    """Attribute of the parsed arguments that has to be set."""
    flag: str
    """How a user sets it."""
    values: tuple[object, ...] | None = None
    """Values of the attribute that count; None accepts all but None, False and empty."""
    absent: bool = False
    """Whether the attribute has to be unset instead."""


@dataclass(frozen=True, slots=True)
class Honoured:
    """How one option is honoured: by default as upstream's help says."""

    here: str = ""
    """What the option does here if upstream's help says something else, one phrase."""
    only: tuple[object, ...] | None = None
    """The values that are accepted; None accepts all that the parser does."""
    otherwise: str = ""
    """Why another value is refused and what to do instead: ``why; fix``."""
    need: Need | None = None

    @property
    def help_note(self) -> str:
        """What --help says after upstream's own words; empty where those are true."""
        if not self.here:
            return ""
        values = "" if self.only is None else f"; only {', '.join(map(str, self.only))}"
        return f"Here: {self.here}{values}."


_TOPICS = {
    "Model": """
        --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --kv-channels
        --group-query-attention --num-query-groups --max-position-embeddings
        --position-embedding-type --rotary-base --rotary-percent --rotary-interleaved
        --rotary-seq-len-interpolation-factor --use-rope-scaling --rope-scaling-factor
        --normalization --norm-epsilon --swiglu --disable-bias-linear --add-qkv-bias --qk-layernorm
        --untie-embeddings-and-output-weights --init-method-std --make-vocab-size-divisible-by
        --hidden-dropout --attention-dropout --recompute-granularity --recompute-activations
        --recompute-method --recompute-num-layers --recompute-modules --spec --transformer-impl
        --use-mcore-models --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
        --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
        --no-gradient-accumulation-fusion --disable-jit-fuser""",
    "Batch and length of training": """
        --global-batch-size --seq-length --train-iters --seed --calculate-per-token-loss
        --reset-position-ids --reset-attention-mask --exit-interval --exit-duration-in-mins
        --exit-signal-handler --exit-signal --eval-interval --eval-iters --start-eval-at-iter
        --manual-gc --manual-gc-interval --no-manual-gc-eval""",
    "Optimizer": """
        --optimizer --lr --min-lr --lr-decay-style --lr-decay-iters --lr-warmup-iters
        --lr-warmup-fraction --lr-warmup-init --lr-wsd-decay-style --lr-wsd-decay-iters
        --weight-decay --start-weight-decay --end-weight-decay --weight-decay-incr-style --clip-grad
        --adam-beta1 --adam-beta2 --adam-eps --use-distributed-optimizer --bf16
        --accumulate-allreduce-grads-in-fp32""",
    "Checkpoints": """
        --save --save-interval --async-save --load --ckpt-step --finetune
        --exit-on-missing-checkpoint --ckpt-format --dist-ckpt-optim-fully-reshardable
        --override-opt_param-scheduler --use-checkpoint-opt_param-scheduler""",
    "Parallelism": """
        --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
        --cp-comm-type --sequence-parallel --distributed-backend --distributed-timeout-minutes""",
    "Data and tokenizer": """
        --data-path --split --train-data-path --valid-data-path --test-data-path --num-workers
        --tokenizer-type --tokenizer-model --vocab-file --merge-file --vocab-size
        --padded-vocab-size --tokenizer-metadata --tokenizer-special-tokens --tiktoken-pattern
        --tiktoken-num-special-tokens --tokenizer-sentencepiece-legacy
        --no-tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-hf-no-use-fast
        --tokenizer-hf-no-include-special-tokens --trust-remote-code --null-tokenizer-eod-id
        --null-tokenizer-pad-id""",
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
    "--no-rope-fusion": "unfused rotation",
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
    "--make-vocab-size-divisible-by": "the vocabulary is padded to a multiple of it under every "
    "strategy",
    "--recompute-modules": "modules of selective recompute: core_attn, and mlp without biases",
    "--no-gradient-accumulation-fusion": "a separate kernel adds each weight gradient; always so "
    "without apex",
    "--seq-length": "longest sequence in tokens; --long-sequences says what happens to longer ones",
    "--async-save": "a fork of each rank writes while training goes on",
    "--load": "folder of the checkpoint to continue from; a folder without one is an error, except "
    "at the first start of a run whose --save is the same folder",
    "--exit-on-missing-checkpoint": "a missing checkpoint is an error even in the folder of --save",
    "--cp-comm-type": "one of auto, p2p, all_gather, a2a for all layers; auto, the default, takes "
    "the one that moves the fewest bytes; p2p is run as all_gather",
    "--sequence-parallel": "on wherever tp > 1, unless --no-sequence-parallel",
}
"""Options whose effect differs from upstream's help, although every value is accepted."""

_NO_DROPOUT = Honoured("no dropout", only=(0.0,), otherwise=NO_DROPOUT)
_TOKENIZERS = (
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
)
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
    "--ckpt-format": Honoured(
        "format of checkpoints",
        only=("torch_dist",),
        otherwise="this format cannot be read by other layouts of ranks; use torch_dist",
    ),
    "--context-parallel-size": Honoured(
        "the strategy names cp",
        only=(1,),
        otherwise="how many ranks share a sequence belongs to a replica, not to the job; use 1, "
        "and name cp in --strategy or --strategy-pool, for example cp2 or tp2cp4",
    ),
    "--num-workers": Honoured(
        "no loader processes",
        only=(0,),
        otherwise="each rank reads its sequences from memory-mapped files; use 0",
    ),
    "--tokenizer-type": Honoured(
        "upstream's tokenizer",
        only=_TOKENIZERS,
        otherwise="this tokenizer is not one for causal language models of text; "
        f"use {', '.join(_TOKENIZERS)}",
    ),
}


def _tokenizer(*names: str) -> Need:
    *others, last = names
    listed = f"{', '.join(others)} or {last}" if others else last
    return Need("tokenizer_type", f"--tokenizer-type {listed}", values=names)


# Options of any of these tables that have an effect only with another one.
_NEEDS = {
    Need("position_embedding_type", "--position-embedding-type rope", values=("rope",)): """
        --rotary-base --rotary-percent --rotary-interleaved
        --rotary-seq-len-interpolation-factor --use-rope-scaling""",
    Need("use_rope_scaling", "--use-rope-scaling"): "--rope-scaling-factor",
    Need("group_query_attention", "--group-query-attention"): "--num-query-groups",
    Need("padded_vocab_size", "no --padded-vocab-size", absent=True): (
        "--make-vocab-size-divisible-by"
    ),
    Need("recompute_granularity", "--recompute-granularity full", values=("full",)): (
        "--recompute-method --recompute-num-layers"
    ),
    Need("exit_signal_handler", "--exit-signal-handler"): "--exit-signal",
    Need("eval_interval", "--eval-interval"): "--start-eval-at-iter",
    Need("manual_gc", "--manual-gc"): "--manual-gc-interval --no-manual-gc-eval",
    Need("lr_decay_style", "--lr-decay-style WSD", values=("WSD",)): (
        "--lr-wsd-decay-style --lr-wsd-decay-iters"
    ),
    Need(
        "weight_decay_incr_style",
        "--weight-decay-incr-style linear or cosine",
        values=("linear", "cosine"),
    ): "--start-weight-decay --end-weight-decay",
    Need("save", "--save"): "--save-interval --async-save",
    Need("load", "--load"): """
        --ckpt-step --finetune --exit-on-missing-checkpoint --override-opt_param-scheduler
        --use-checkpoint-opt_param-scheduler""",
    Need("data_path", "--data-path"): "--split",
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


@dataclass(frozen=True, slots=True)
class Family:
    """Options that are refused for the same reason."""

    name: str
    why: str
    instead: str
    options: str = ""
    """Regular expression on the option without its dashes, matched from the start."""
    groups: tuple[str, ...] = ()
    """Titles of upstream's argument groups."""

    def covers(self, option: str, group: str) -> bool:
        """Whether the option, or the group it stands in, belongs to this family."""
        by_name = self.options and re.match(self.options, option.removeprefix("--"))
        return bool(by_name) or group in self.groups


_REMOVE = "remove it"
_DENSE_ONLY = "the model here is a dense decoder of attention and MLP layers"

FORMER_OPTIONS = ("--emulate-device", "--emulate-scale")
"""Options of our own that earlier versions had."""

# The first family that covers an option words its refusal, so narrow ones stand before wide ones.
_FAMILIES = (
    Family(
        "emulation",
        "emulated devices are part of the benchmarks",
        "in a checkout of the repository give the same flags to torchrun -m "
        "benchmarks.emulated_training",
        r"emulate-",
    ),
    Family(
        "checks for NaN",
        "an update that is not finite is never applied; --skip-nan-iterations continues without it",
        "use --skip-nan-iterations, or remove it to stop at such an update",
        r"no-check-for-nan-in-loss-and-grad$",
    ),
    Family(
        "micro-batches",
        "packing decides in every iteration how sequences share micro-batches",
        "set their size by --max-tokens-per-micro-batch",
        r"(eval-)?micro-batch-size$|batch-size$",
    ),
    Family(
        "changing batch size",
        "the global batch has one size for the whole run",
        "set it by --global-batch-size or --global-batch-tokens",
        r"rampup-batch-size|step-batch-size|decrease-batch-size|phase-transition|eval-global-batch",
    ),
    Family(
        "training by samples",
        "a run is counted in iterations, whose number of samples may vary",
        "use --train-iters, --lr-decay-iters, --lr-warmup-iters, --lr-wsd-decay-iters",
        r"(train|lr-\w[\w-]*)-samples$|iterations-to-skip|sample-rate",
    ),
    Family(
        "RL",
        "reinforcement learning is not part of this program",
        "remove it, or train with upstream's own entry point",
        r"rl-|grpo-|langrl-|perform-rl",
        ("rl",),
    ),
    Family(
        "inference",
        "this program trains",
        _REMOVE,
        r"inference-|flash-decode|symmetric-ar|nccl-all-reduce-for-prefill|mlp-chunks-for-prefill|"
        r"batch-invariant",
        ("inference",),
    ),
    Family(
        "recompute",
        "it is an older name of activation recompute, or needs the tensor parallelism of a single "
        "strategy",
        "use --recompute-granularity selective or full",
        r"moe-layer-recompute|checkpoint-activations|distribute-saved-activations",
    ),
    Family(
        "offloading",
        "moving activations or optimizer state to the host is not part of this program",
        "remove it; if memory is short, use a scheme with more tp or pp ranks",
        r".*offload|optimizer-cpu|no-pin-cpu|use-torch-optimizer-for-cpu|overlap-cpu-optimizer|"
        r"moe-paged-stash",
    ),
    Family(
        "CUDA graphs",
        "shapes differ between micro-batches and iterations, which a graph cannot replay",
        _REMOVE,
        r".*cuda-graph",
    ),
    Family(
        "8- and 4-bit arithmetic",
        "fp8 and fp4 are not part of this program",
        "use --bf16",
        r".*(fp8|fp4)|first-last-layers-bf16|num-layers-at-\w+-in-bf16|.*kitchen|te-precision",
        ("Transformer-Engine",),
    ),
    Family(
        "experts",
        f"{_DENSE_ONLY}, without experts",
        _REMOVE,
        r"num-experts|moe-|expert-|overlap-moe|ep-overlap|overlap-dispatch|.*shared-expert|"
        r"high-priority-a2a|delay-wgrad|save-tokens-per-expert",
        ("moe",),
    ),
    Family(
        "multi-latent attention",
        f"{_DENSE_ONLY}, without latent projections",
        _REMOVE,
        r"multi-latent|mla-",
        ("mla",),
    ),
    Family(
        "other attention",
        "attention here is causal softmax over packed sequences, by the backend of the device",
        _REMOVE,
        r"experimental-attention|dsa-|linear-|window-|softmax-type|attention-|use-flash-attn|"
        r"flash-attention|qk-|no-rope-freq|apply-query-key|relative-attention",
        ("experimental_attention_variant",),
    ),
    Family(
        "state-space and hybrid models",
        f"{_DENSE_ONLY}, one kind of layer throughout",
        _REMOVE,
        r".*mamba|.*hybrid-(layer|override)-pattern|is-hybrid|spec-hybrid",
        ("heterogeneous architecture",),
    ),
    Family(
        "older names",
        "it is an older name of another option",
        "use --position-embedding-type",
        r"use-rotary-position|no-position-embedding|rope-type",
    ),
    Family(
        "multi-token prediction",
        f"{_DENSE_ONLY} that predicts one token",
        _REMOVE,
        r"mtp-",
    ),
    Family(
        "encoders",
        "the model here is a decoder of text",
        "describe it by --num-layers and --seq-length",
        r"(encoder|decoder)-(num-layers|seq-length)|bert-|mask-prob|short-seq-prob",
        ("biencoder",),
    ),
    Family(
        "vision",
        "the model here is a decoder of text",
        _REMOVE,
        r"mrope-",
        ("vision",),
    ),
    Family(
        "virtual pipeline",
        "a rank holds one stage, consecutive layers, of a pipeline",
        "give the layers of each stage in --strategy, for example 'pp2:5,3'",
        r".*virtual|microbatch-group-size|.*overlap-p2p|defer-embedding|wgrad-deferral",
    ),
    Family(
        "pipeline layout",
        "the strategy says which layers a stage holds",
        "give the layers of each stage in --strategy, for example 'pp2:5,3'",
        r"decoder-(first|last)-pipeline|pipeline-model-parallel-(layout|comm)|account-for-",
    ),
    Family(
        "context parallelism",
        "how many ranks share a sequence belongs to a replica, not to the job, and may differ from "
        "one micro-batch to the next",
        "remove it; name cp in --strategy or --strategy-pool, for example cp2, or cp8~ where "
        "micro-batches may split it",
        r".*context-parallel|max-seqlen-per-dp-cp",
    ),
    Family(
        "checkpoints",
        "checkpoints have one format, are read and written by all ranks, and hold all that a run "
        "needs to continue",
        "use --save, --save-interval, --load, --async-save and --keep-last",
        r"override-ckpt|(override|use-checkpoint)-opt_?-?param|exit-on-missing|.*-ckpt-",
        ("checkpointing",),
    ),
    Family(
        "half precision with loss scaling",
        "parameters are fp32 or bf16, which need no loss scaling",
        "use --bf16",
        r"fp16|.*loss-scale|hysteresis|fp32-residual|grad-reduce-in-bf16",
        ("mixed precision",),
    ),
    Family(
        "other optimizers",
        "canonical shards are updated by AdamW with fp32 state",
        "use --optimizer adam and its flags",
        r"muon-|sgd-|lion-|use-precision-aware|main-(grads|params)-dtype|exp-avg|optimizer-|"
        r"decoupled-|freeze-all|apply-wd|no-weight-decay-cond|warmup$|dump-param",
    ),
    Family(
        "data-parallel wrappers",
        "gradients and parameters move between canonical shards and replicas, not through "
        "upstream's data-parallel wrappers",
        _REMOVE,
        r"ddp-|.*fsdp|overlap-(grad|param)|.*align-(grad|param)|.*gradient-reduce|.*sharding|"
        r"no-use-layer-wise|use-nccl-ub|disable-symmetric|create-all-gather|suggested-comm|"
        r"num-distributed-optimizer|keep-fp8|enable-full-sharding",
    ),
    Family(
        "tensor-parallel overlap",
        "replicas run upstream's tensor-parallel layers without communication overlap",
        _REMOVE,
        r".*tp-comm|tensor-parallel-num-weight|model-parallel-size|use-ring-exchange",
    ),
    Family(
        "process groups",
        "process groups follow from the strategy",
        "describe the layout by --strategy and --ranks-per-node",
        groups=("distributed init",),
    ),
    Family(
        "initialisation",
        "initial weights depend on --seed and --init-method-std alone, never on the strategy",
        _REMOVE,
        r".*init-method|init-model|use-cpu-init|no-initialization|(use-)?mup|embedding-init",
        ("RNG and initialization",),
    ),
    Family(
        "upstream's data sets",
        "a sequence is a whole document of the corpus, read without an index cache",
        "describe the corpus by --data-path or --train-data-path and the --*-data-path flags",
        groups=("data and dataloader",),
        options=r"dataloader-",
    ),
    Family(
        "tokenizer",
        "this setting of the tokenizer has no effect on training from prepared data",
        _REMOVE,
        groups=("tokenizer",),
    ),
    Family(
        "fine-tuning",
        "supervised fine-tuning and distillation are not part of this program",
        _REMOVE,
        groups=("sft", "Logits Distillation"),
    ),
    Family(
        "evaluation",
        "evaluation runs --eval-iters global batches of the validation part",
        "use --eval-interval and --eval-iters",
        groups=("validation",),
    ),
    Family(
        "fault tolerance",
        "upstream's restart, straggler and fault machinery is not wired to this program's step",
        _REMOVE,
        groups=(
            "autoresume",
            "straggler",
            "workload inspector",
            "In-process restart",
            "ft_package",
            "rerun engine",
            "fault injector",
            "one logger",
            "msc",
        ),
    ),
    Family(
        "profiling",
        "upstream's profiler switches are not wired to this program's step",
        "remove it, and run an external profiler around the job",
        groups=("profiling",),
    ),
    Family(
        "logging",
        "the quantity it reports is not computed by this program's step",
        "remove it; metrics.jsonl and TensorBoard hold what is computed",
        r"log-|no-barrier|check-",
        ("logging",),
    ),
    Family(
        "model variants",
        "this variant of the model was not shown to be equal under every strategy",
        _REMOVE,
        groups=("transformer configuration", "network size"),
    ),
)
_UNKNOWN_TO_FAMILIES = Family("others", "this program does not act on it", _REMOVE)


def families() -> tuple[Family, ...]:
    """All of them, as docs/configuration-errors.md lists them."""
    return (*_FAMILIES, _UNKNOWN_TO_FAMILIES)


def family_of(option: str, group: str) -> Family:
    """The family of an option that stands in the argument group of that title."""
    for family in _FAMILIES:
        if family.covers(option, group):
            return family
    return _UNKNOWN_TO_FAMILIES


def refusal(option: str, group: str) -> str:
    """One line: the option by name, why it is refused, and what to do instead."""
    family = family_of(option, group)
    return f"{option} is not honoured: {family.why}; {family.instead}"

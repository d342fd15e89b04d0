"""Upstream's options: those that this program honours, and why the others are refused.

Every option of upstream's parser that is not in ``HONOURED`` is refused by name when given. The
families of refused options only word the message: an option that none of them covers, such as one
of a later upstream, is refused all the same.
``tests/unit/test_arguments_honoured.py`` has one row per entry, and only for entries.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron.hydraulis.model_shape import NO_DROPOUT

__all__ = [
    "FORMER",
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
    """How one option is honoured."""

    effect: str
    """Where it takes effect, one phrase."""
    only: tuple[object, ...] | None = None
    """The values that are accepted; None accepts all that the parser does."""
    otherwise: str = ""
    """Why another value is refused and what to do instead: ``why; fix``."""
    need: Need | None = None
    differs: bool = False
    """Whether upstream's help says what is not true here, although every value is accepted."""

    @property
    def help_note(self) -> str:
        """What --help says after upstream's own words; empty where those are true."""
        if self.only is None and not self.differs:
            return ""
        values = "" if self.only is None else f"; only {', '.join(map(str, self.only))}"
        return f"Here: {self.effect}{values}."


def _always(effect: str) -> Honoured:
    """An option that asks for what is so without it as well."""
    return Honoured(f"{effect}: always so here", differs=True)


_ROPE = Need("position_embedding_type", "--position-embedding-type rope", values=("rope",))
_GROUPED = Need("group_query_attention", "--group-query-attention")
_DATA_PATH = Need("data_path", "--data-path")
_WSD = Need("lr_decay_style", "--lr-decay-style WSD", values=("WSD",))
_DECAY_CHANGES = Need(
    "weight_decay_incr_style",
    "--weight-decay-incr-style linear or cosine",
    values=("linear", "cosine"),
)
_NULL = Need("tokenizer_type", "--tokenizer-type NullTokenizer", values=("NullTokenizer",))
_TIK = Need("tokenizer_type", "--tokenizer-type TikTokenizer", values=("TikTokenizer",))
_SENTENCE_PIECE = Need(
    "tokenizer_type",
    "--tokenizer-type SentencePieceTokenizer, GPTSentencePieceTokenizer or Llama2Tokenizer",
    values=("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"),
)
_HUGGING_FACE = Need(
    "tokenizer_type",
    "--tokenizer-type HuggingFaceTokenizer or GPT2BPETokenizer",
    values=("HuggingFaceTokenizer", "GPT2BPETokenizer"),
)
_FULL = Need("recompute_granularity", "--recompute-granularity full", values=("full",))
_SAVE = Need("save", "--save")
_LOAD = Need("load", "--load")
_WANDB = Need("wandb_project", "--wandb-project")
_TOKENIZERS = (
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
)

_MODEL = {
    "--num-layers": Honoured("layers of the model, shared out over the stages of a replica"),
    "--hidden-size": Honoured("width of the model"),
    "--ffn-hidden-size": Honoured("width inside the MLP"),
    "--num-attention-heads": Honoured("query heads"),
    "--kv-channels": Honoured("size of one head"),
    "--group-query-attention": Honoured("query heads share key and value heads"),
    "--num-query-groups": Honoured("key and value heads", need=_GROUPED),
    "--max-position-embeddings": Honoured("rows of a learned position embedding"),
    "--position-embedding-type": Honoured(
        "how positions enter the model; they restart in every sequence",
        only=("rope", "learned_absolute", "none"),
        otherwise="this position embedding was not shown to work on packed sequences; "
        "use rope, learned_absolute or none",
    ),
    "--rotary-base": Honoured("base of the rotary frequencies", need=_ROPE),
    "--rotary-percent": Honoured("part of a head that is rotated", need=_ROPE),
    "--rotary-interleaved": Honoured("pairs neighbouring channels for rotation", need=_ROPE),
    "--rotary-seq-len-interpolation-factor": Honoured("stretches rotary positions", need=_ROPE),
    "--use-rope-scaling": Honoured("frequency scaling of Llama 3", need=_ROPE),
    "--rope-scaling-factor": Honoured(
        "factor of that scaling, by gpt_model_config",
        need=Need("use_rope_scaling", "--use-rope-scaling"),
    ),
    "--normalization": Honoured("LayerNorm or RMSNorm throughout the model"),
    "--norm-epsilon": Honoured("epsilon of every norm"),
    "--swiglu": Honoured("gated MLP with SiLU"),
    "--disable-bias-linear": Honoured("linear layers without bias"),
    "--add-qkv-bias": Honoured("bias of the query-key-value projection"),
    "--qk-layernorm": Honoured("norms of queries and keys"),
    "--untie-embeddings-and-output-weights": Honoured("output layer with weights of its own"),
    "--init-method-std": Honoured("standard deviation of initial weights"),
    "--make-vocab-size-divisible-by": Honoured(
        "the vocabulary is padded to a multiple of it, whatever the strategy",
        differs=True,
        need=Need("padded_vocab_size", "no --padded-vocab-size", absent=True),
    ),
    "--hidden-dropout": Honoured("no dropout", only=(0.0,), otherwise=NO_DROPOUT),
    "--attention-dropout": Honoured("no dropout", only=(0.0,), otherwise=NO_DROPOUT),
    "--recompute-granularity": Honoured("activations computed again in the backward"),
    "--recompute-activations": Honoured("selective recompute"),
    "--recompute-method": Honoured("which layers of a stage full recompute takes", need=_FULL),
    "--recompute-num-layers": Honoured(
        "layers of a chunk, or of a stage that full recompute takes", need=_FULL
    ),
    "--recompute-modules": Honoured(
        "modules of selective recompute: core_attn, and mlp without biases", differs=True
    ),
    "--spec": Honoured("layer spec of the user, as module and name"),
    "--transformer-impl": Honoured(
        "layers of megatron-core, or with CUDA of Transformer Engine",
        only=("local", "transformer_engine"),
        otherwise="only layers that train are built; use local or transformer_engine",
    ),
    "--use-mcore-models": _always("models of megatron-core"),
    "--no-masked-softmax-fusion": Honoured("unfused softmax of the model"),
    "--no-bias-gelu-fusion": Honoured("unfused bias and GELU"),
    "--no-bias-swiglu-fusion": Honoured("unfused bias and SwiGLU"),
    "--no-bias-dropout-fusion": Honoured("unfused bias, dropout and residual"),
    "--no-rope-fusion": _always("unfused rotation"),
    "--no-persist-layer-norm": _always("no persistent norm kernel"),
    "--no-gradient-accumulation-fusion": Honoured(
        "a separate kernel adds each weight gradient; always so without apex", differs=True
    ),
    "--disable-jit-fuser": Honoured("no compiled fusions"),
}

_BATCH = {
    "--global-batch-size": Honoured("sequences of a global batch"),
    "--seq-length": Honoured(
        "longest sequence in tokens; longer ones by --long-sequences", differs=True
    ),
    "--train-iters": Honoured("iterations of the whole run"),
    "--seed": Honoured("data order and initial weights"),
    "--calculate-per-token-loss": _always("loss is a mean over tokens"),
    "--reset-position-ids": _always("positions restart in every sequence"),
    "--reset-attention-mask": _always("attention stays inside a sequence"),
    "--exit-interval": Honoured("upstream's loop ends after a multiple of it"),
    "--exit-duration-in-mins": Honoured("upstream's loop ends after that time (minutes)"),
    "--exit-signal-handler": Honoured("upstream's loop saves, if --save says where, and ends"),
    "--exit-signal": Honoured(
        "which signal that is", need=Need("exit_signal_handler", "--exit-signal-handler")
    ),
    "--eval-interval": Honoured("iterations between two evaluations"),
    "--eval-iters": Honoured("global batches of one evaluation"),
    "--start-eval-at-iter": Honoured(
        "no evaluation before it", need=Need("eval_interval", "--eval-interval")
    ),
    "--manual-gc": Honoured("upstream's loop collects garbage itself"),
    "--manual-gc-interval": Honoured(
        "iterations between two collections", need=Need("manual_gc", "--manual-gc")
    ),
    "--no-manual-gc-eval": Honoured(
        "no collection around evaluation", need=Need("manual_gc", "--manual-gc")
    ),
}

_OPTIMIZER = {
    "--optimizer": Honoured(
        "AdamW on canonical shards",
        only=("adam",),
        otherwise="canonical shards are updated by AdamW; use adam",
    ),
    "--lr": Honoured("highest learning rate"),
    "--min-lr": Honoured("lowest learning rate"),
    "--lr-decay-style": Honoured("upstream's schedule"),
    "--lr-decay-iters": Honoured("iterations of the decay"),
    "--lr-warmup-iters": Honoured("iterations of the warm-up"),
    "--lr-warmup-fraction": Honoured("warm-up as a part of the decay"),
    "--lr-warmup-init": Honoured("learning rate at the start of the warm-up"),
    "--lr-wsd-decay-style": Honoured("annealing of the WSD schedule", need=_WSD),
    "--lr-wsd-decay-iters": Honoured("iterations of that annealing", need=_WSD),
    "--weight-decay": Honoured("decay of all weights but biases and norms"),
    "--start-weight-decay": Honoured("decay at the start", need=_DECAY_CHANGES),
    "--end-weight-decay": Honoured("decay at the end", need=_DECAY_CHANGES),
    "--weight-decay-incr-style": Honoured("how decay changes over the run"),
    "--clip-grad": Honoured("largest global gradient norm; 0 switches clipping off"),
    "--adam-beta1": Honoured("AdamW: first moment"),
    "--adam-beta2": Honoured("AdamW: second moment"),
    "--adam-eps": Honoured("AdamW: epsilon"),
    "--use-distributed-optimizer": _always("state sharded over all ranks"),
    "--bf16": Honoured("bf16 parameters with fp32 master weights"),
    "--accumulate-allreduce-grads-in-fp32": _always("fp32 gradients"),
}

_CHECKPOINTS = {
    "--save": Honoured("folder of the checkpoints"),
    "--save-interval": Honoured("iterations between two checkpoints", need=_SAVE),
    "--async-save": Honoured(
        "written beside training by a fork of each rank", need=_SAVE, differs=True
    ),
    "--load": Honoured(
        "folder of the checkpoint to go on from; without one only the first start of a run, with "
        "--save the same, begins with iteration 1",
        differs=True,
    ),
    "--ckpt-step": Honoured("iteration of that checkpoint, instead of the latest", need=_LOAD),
    "--finetune": Honoured("its weights alone, training begins with iteration 1", need=_LOAD),
    "--exit-on-missing-checkpoint": Honoured(
        "an error also where the folder is that of --save", need=_LOAD, differs=True
    ),
    "--ckpt-format": Honoured(
        "format of checkpoints",
        only=("torch_dist",),
        otherwise="this format cannot be read by other layouts of ranks; use torch_dist",
    ),
    "--dist-ckpt-optim-fully-reshardable": _always("optimizer state in global coordinates"),
    "--override-opt_param-scheduler": Honoured(
        "learning-rate schedule of the flags, not of the checkpoint", need=_LOAD
    ),
    "--use-checkpoint-opt_param-scheduler": Honoured(
        "learning-rate schedule of the checkpoint, not of the flags", need=_LOAD
    ),
}

_PARALLEL = {
    "--tensor-model-parallel-size": Honoured("tp of a strategy of equal replicas"),
    "--pipeline-model-parallel-size": Honoured("pp of a strategy of equal replicas"),
    "--context-parallel-size": Honoured(
        "cp stands in the strategy",
        only=(1,),
        otherwise="how many ranks share a sequence belongs to a replica, not to the job; use 1, "
        "and name cp in --strategy or --strategy-pool, for example cp2 or tp2cp4",
    ),
    "--cp-comm-type": Honoured(
        "one of auto, p2p, all_gather, a2a for all layers; auto, the default, takes the one that "
        "moves fewest bytes; p2p is run as all_gather",
        differs=True,
    ),
    "--sequence-parallel": Honoured(
        "on wherever tp > 1, unless --no-sequence-parallel", differs=True
    ),
    "--distributed-backend": Honoured("backend of torch.distributed"),
    "--distributed-timeout-minutes": Honoured("longest wait in a collective (minutes)"),
}

_DATA = {
    "--data-path": Honoured("prefixes of the corpus, with weights or without, cut by --split"),
    "--split": Honoured("parts for training, validation and test", need=_DATA_PATH),
    "--train-data-path": Honoured("prefixes of the training part"),
    "--valid-data-path": Honoured("prefixes of the validation part"),
    "--test-data-path": Honoured("prefixes of the test part"),
    "--num-workers": Honoured(
        "no loader processes",
        only=(0,),
        otherwise="a rank reads its own sequences itself, memory-mapped; use 0",
    ),
    "--tokenizer-type": Honoured(
        "upstream's tokenizer",
        only=_TOKENIZERS,
        otherwise="this tokenizer is not one for causal language models of text; "
        f"use {', '.join(_TOKENIZERS)}",
    ),
    "--tokenizer-model": Honoured("file or name of the tokenizer"),
    "--vocab-file": Honoured("vocabulary of a BPE tokenizer"),
    "--merge-file": Honoured("merges of a BPE tokenizer"),
    "--vocab-size": Honoured("vocabulary of the model before padding"),
    "--padded-vocab-size": Honoured("vocabulary of the model with padding"),
    "--tokenizer-metadata": Honoured("metadata of the tokenizer"),
    "--tokenizer-special-tokens": Honoured("additional special tokens of the tokenizer"),
    "--tiktoken-pattern": Honoured("pattern that splits words", need=_TIK),
    "--tiktoken-num-special-tokens": Honoured("special tokens of the vocabulary", need=_TIK),
    "--tokenizer-sentencepiece-legacy": Honoured("special tokens in text", need=_SENTENCE_PIECE),
    "--no-tokenizer-sentencepiece-ignore-extra-whitespaces": Honoured(
        "keeps repeated blanks", need=_SENTENCE_PIECE
    ),
    "--tokenizer-hf-no-use-fast": Honoured("the slow tokenizer", need=_HUGGING_FACE),
    "--tokenizer-hf-no-include-special-tokens": Honoured(
        "no special tokens around a text", need=_HUGGING_FACE
    ),
    "--trust-remote-code": Honoured("runs code that comes with a tokenizer", need=_HUGGING_FACE),
    "--null-tokenizer-eod-id": Honoured("end-of-document token", need=_NULL),
    "--null-tokenizer-pad-id": Honoured("padding token", need=_NULL),
}

_LOGGING = {
    "--log-interval": Honoured("iterations between two log lines"),
    "--log-throughput": _always("TFLOP/s in the log line"),
    "--timing-log-level": Honoured("which timers upstream's log reports"),
    "--timing-log-option": Honoured("how timers are reduced over ranks"),
    "--logging-level": Honoured("level of Python's loggers"),
    "--tensorboard-dir": Honoured("folder of the TensorBoard events"),
    "--tensorboard-log-interval": Honoured("iterations between two events"),
    "--tensorboard-queue-size": Honoured("events waiting to be written"),
    "--log-timers-to-tensorboard": Honoured("timers as TensorBoard events"),
    "--no-log-loss-scale-to-tensorboard": Honoured("no loss scale in TensorBoard"),
    "--log-validation-ppl-to-tensorboard": Honoured("perplexity in TensorBoard"),
    "--log-world-size-to-tensorboard": Honoured("number of ranks in TensorBoard"),
    "--wandb-project": Honoured("project in Weights & Biases"),
    "--wandb-exp-name": Honoured("name of the run there", need=_WANDB),
    "--wandb-save-dir": Honoured("folder of its files", need=_WANDB),
    "--wandb-entity": Honoured("owner of the project", need=_WANDB),
    "--no-one-logger": _always("no metrics to One Logger"),
}

HONOURED_BY_TOPIC: Mapping[str, Mapping[str, Honoured]] = MappingProxyType(
    {
        "Model": _MODEL,
        "Batch and length of training": _BATCH,
        "Optimizer": _OPTIMIZER,
        "Checkpoints": _CHECKPOINTS,
        "Parallelism": _PARALLEL,
        "Data and tokenizer": _DATA,
        "Logging": _LOGGING,
    }
)
"""Topic -> primary option string -> how it is honoured."""

HONOURED: Mapping[str, Honoured] = MappingProxyType(
    {option: how for topic in HONOURED_BY_TOPIC.values() for option, how in topic.items()}
)
"""Primary option string -> how it is honoured."""


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

FORMER = ("--emulate-device", "--emulate-scale")
"""Options of our own that earlier versions had."""

# The first family that covers an option words its refusal: narrow ones stand before wide ones.
_FAMILIES = (
    Family(
        "emulation",
        "emulated devices are part of the benchmarks",
        "give the same flags to torchrun -m benchmarks.emulated_training",
        r"emulate-",
    ),
    Family(
        "checks for NaN",
        "an update that is not finite is always left out, so that the run could only go on without "
        "it, which is what --skip-nan-iterations does",
        "use --skip-nan-iterations, or remove it to stop at such an update",
        r"no-check-for-nan-in-loss-and-grad$",
    ),
    Family(
        "micro-batches",
        "packing decides how sequences share micro-batches, anew in every iteration",
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
        "a run is measured in iterations, whose number of samples may vary",
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
        "it is an older name of a form of activation recompute, or one that needs the tensor "
        "parallelism of a single strategy",
        "use --recompute-granularity selective or full",
        r"moe-layer-recompute|checkpoint-activations|distribute-saved-activations",
    ),
    Family(
        "offloading",
        "moving activations or optimizer state to the host is not part of this program",
        "remove it; use a scheme of more tp or pp ranks if memory is short",
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
        "checkpoints have one format, are always read and written by all ranks, and hold whatever "
        "a run needs to go on",
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
        "remove it, and run an outside profiler around the job",
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
_UNKNOWN_TO_FAMILIES = Family(
    "others", "this program does not act on it and will not pretend to", _REMOVE
)


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

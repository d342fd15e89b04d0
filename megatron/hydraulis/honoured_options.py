"""Upstream's options that this program honours, and where each takes effect.

Every other option of upstream's parser is refused by name when given, see ``refused_options``.
``tests/unit/test_arguments_honoured.py`` has one row per entry, and only for entries.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["HONOURED", "Honoured", "Need"]


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
_NO_DROPOUT = (
    "dropout masks depend on the layout of the replicas, so the same batch would not give the same "
    "update; use 0"
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
    "--hidden-dropout": Honoured("no dropout", only=(0.0,), otherwise=_NO_DROPOUT),
    "--attention-dropout": Honoured("no dropout", only=(0.0,), otherwise=_NO_DROPOUT),
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

HONOURED: Mapping[str, Honoured] = MappingProxyType(
    _MODEL | _BATCH | _OPTIMIZER | _CHECKPOINTS | _PARALLEL | _DATA | _LOGGING
)
"""Primary option string -> how it is honoured."""

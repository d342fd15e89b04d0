"""Sizes of everything that is checked: on a device, and of the same steps as toys."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace

from benchmarks.inputs import llama_shape
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Pool, Strategy

Lengths = tuple[int, ...]

_RECOMPUTE = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
ROOMY_BYTES, TIGHT_BYTES = 70e9, 36e9
"""Memory of a GPU from which the whole model fits with its activations, and without them."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A Llama-like model in bf16."""

    shape: ModelShape
    seq_length: int
    """Tokens of the longest sequence."""
    recomputes: bool = False
    """Whether layers run their forward again instead of keeping activations."""

    def of_layers(self, num_layers: int) -> Model:
        """The same with another depth."""
        return replace(self, shape=replace(self.shape, num_layers=num_layers))

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of training."""
        shape = self.shape
        return (
            *("--num-layers", str(shape.num_layers), "--hidden-size", str(shape.hidden_size)),
            *("--ffn-hidden-size", str(shape.ffn_hidden_size)),
            *("--num-attention-heads", str(shape.num_attention_heads), "--group-query-attention"),
            *("--num-query-groups", str(shape.num_query_groups)),
            *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--bf16"),
            *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
            *("--attention-dropout", "0", "--hidden-dropout", "0"),
            *("--seq-length", str(self.seq_length), "--tokenizer-type", "NullTokenizer"),
            *("--vocab-size", str(shape.vocab_size)),
            *(_RECOMPUTE if self.recomputes else ()),
        )


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of models and batches, and numbers of repetitions."""

    model: Model
    """Trained on one GPU, profiled, and trained with a pool."""
    paired_model: Model
    """Two of these fit in the memory of one GPU: they take turns."""
    num_iterations: int
    """Of training on one GPU."""
    num_not_counted: int
    """Of them, at the beginning: kernels are chosen and memory settles."""
    batch_tokens: int
    """Of a global batch of this training."""
    num_documents: int
    median_tokens: int
    sigma: float
    """Of documents: log-normal, most short, some as long as the limit."""
    profile_flags: tuple[str, ...]
    num_pairs: int
    num_warm_ups: int
    """Of pairs of steps, and steps of each side before them."""
    paired_lengths: Lengths
    """Of the sequences of a micro-batch of paired steps."""
    micro_batches_per_rank: int
    num_pool_batches: int
    pool_batch_tokens_per_rank: int
    num_rounds: int
    """How often a job changes through its strategies."""
    kernel_lengths: dict[str, Lengths]
    """Of sequences whose attention is compared with fp64."""
    attention_heads: tuple[int, int, int]
    """Heads, query groups and size of a head, where attention is timed."""
    attention_packs: dict[str, Lengths]
    num_attention_repeats: int
    matrix_size: int
    """Rows and columns of the matrices by whose products GPUs are compared; 0 for none."""
    limit_factor: float = 1.0
    """On the time limits of steps."""
    options: tuple[str, ...] = ()
    """Of the programs of this folder, for these sizes."""


_REAL_TOKENS = 32_768
_MIXED = (16_384, 4096, 4096, 2048, 2048, 1024, *(512,) * 4, *(128,) * 8)
"""A long tail; padded, every sequence is as long as the longest."""
_MODEL = Model(
    shape=llama_shape(
        num_layers=24,
        hidden_size=2048,
        ffn_hidden_size=5632,
        num_attention_heads=16,
        num_query_groups=8,
        vocab_size=32_000,
    ),
    seq_length=16_384,
)

REAL = Sizes(
    model=_MODEL,
    paired_model=replace(_MODEL.of_layers(12), seq_length=8192),
    num_iterations=20,
    num_not_counted=4,
    batch_tokens=8 * 16_384,
    num_documents=4000,
    median_tokens=900,
    sigma=1.3,
    profile_flags=("--max-tokens", "16384", "--num-sizes", "4", "--num-repeats", "3"),
    num_pairs=12,
    num_warm_ups=3,
    paired_lengths=(4096, 2048, 1024, 512, 256, 128, 128),
    micro_batches_per_rank=4,
    num_pool_batches=8,
    pool_batch_tokens_per_rank=_REAL_TOKENS,
    num_rounds=10,
    kernel_lengths={
        "short": (17, 1, 64, 129, 1000),
        "mixed": (17, 4097, 128, 16_384, 333),
        "longest": (65_536, 17),
    },
    attention_heads=(16, 8, 128),
    attention_packs={
        f"{_REAL_TOKENS // length} x {length}": (length,) * (_REAL_TOKENS // length)
        for length in (128, 2048, _REAL_TOKENS)
    }
    | {"mixed": (*_MIXED, _REAL_TOKENS - sum(_MIXED))},
    num_attention_repeats=10,
    matrix_size=8192,
)

_TOY = Model(
    shape=llama_shape(
        num_layers=2, hidden_size=64, ffn_hidden_size=96, num_query_groups=8, vocab_size=512
    ),
    seq_length=64,
)

SMALL = Sizes(
    model=_TOY,
    paired_model=_TOY,
    num_iterations=4,
    num_not_counted=1,
    batch_tokens=128,
    num_documents=100,
    median_tokens=16,
    sigma=0.8,
    profile_flags=(
        *("--max-tokens", "64", "--num-sizes", "2", "--short-tokens", "8"),
        *("--num-warmup", "1", "--num-repeats", "1"),
    ),
    num_pairs=3,
    num_warm_ups=2,
    paired_lengths=(24, 6, 2),
    micro_batches_per_rank=2,
    num_pool_batches=2,
    pool_batch_tokens_per_rank=48,
    num_rounds=1,
    kernel_lengths={"short": (17, 1, 64)},
    attention_heads=(4, 2, 16),
    attention_packs={"2 x 32": (32, 32), "mixed": (40, 16, 8)},
    num_attention_repeats=2,
    matrix_size=0,
    limit_factor=10.0,
    options=("--small",),
)


def sizes_of(*, is_small: bool, memory_bytes: float = ROOMY_BYTES) -> Sizes:
    """Toys, or what fits in the memory of a GPU."""
    if is_small:
        return SMALL
    if memory_bytes >= ROOMY_BYTES:
        return REAL
    layers = REAL.model.shape.num_layers if memory_bytes >= TIGHT_BYTES else 8
    return replace(
        REAL,
        model=replace(REAL.model.of_layers(layers), recomputes=True),
        paired_model=REAL.paired_model.of_layers(4),
        options=("--memory-bytes", str(int(memory_bytes))),
    )


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Declare `Sizes.options`."""
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--memory-bytes", type=float, default=ROOMY_BYTES)


def chosen_sizes(options: argparse.Namespace) -> Sizes:
    """The sizes that the options ask for."""
    return sizes_of(is_small=options.small, memory_bytes=options.memory_bytes)


POOLS = {
    4: ("4*tp1", "2*tp2", "tp2+pp2", "tp4"),
    8: ("8*tp1", "4*tp2", "2*tp4", "tp8", "tp2+6*tp1", "tp4+4*tp1", "tp4+2*tp2"),
}
"""By number of GPUs; that of 4 is the quickstart's, examples/pool_4_ranks.json."""


def pool_of_checks(num_gpus: int) -> Pool:
    """The pool that is compared with its static strategies."""
    return Pool.of(*(Strategy.parse(text, num_gpus, name=text) for text in POOLS[num_gpus]))


def pool_text(num_gpus: int) -> str:
    """The same as a file."""
    return json.dumps(pool_of_checks(num_gpus).to_json(), indent=1)

"""Packs of equal tokens and different Σs², and the model that everything here is measured on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MODEL_FLAGS", "NUM_TOKENS", "PACKS", "SEQ_LENGTH", "Pack"]

NUM_TOKENS = 32_768
SEQ_LENGTH = 32_768
VOCAB_SIZE = 32_000

# 1.3 billion parameters: 24 layers of 2048, grouped queries, SwiGLU.
MODEL_FLAGS = (
    *("--num-layers", "24", "--hidden-size", "2048", "--ffn-hidden-size", "5632"),
    *("--num-attention-heads", "16", "--group-query-attention", "--num-query-groups", "8"),
    *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--bf16"),
    *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
    *("--seq-length", str(SEQ_LENGTH), "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", str(VOCAB_SIZE)),
)


@dataclass(frozen=True)
class Pack:
    """Sequences of one length that fill a row."""

    length: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of all sequences, in tokens."""
        return (self.length,) * (NUM_TOKENS // self.length)

    @property
    def sum_of_squares(self) -> int:
        """Σ s², in tokens²."""
        return NUM_TOKENS * self.length


PACKS = tuple(Pack(length) for length in (128, 512, 2048, 8192, 32_768))

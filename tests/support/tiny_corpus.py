"""A corpus of a few thousand tokens with a long tail, and the flags that train a tiny GPT on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.hydraulis.data.dataset import WeightsWriter, weights_path

VOCAB_SIZE = 61
PADDED_VOCAB_SIZE = 64
SEQ_LENGTH = 96
GLOBAL_BATCH_SIZE = 8
NUM_DOCUMENTS = 80
_LONG_LENGTHS = (96, 80, 64, 48)
"""Of every 20 documents four are long; the others have 3 to 16 tokens."""


def document_lengths(seed: int = 0) -> list[int]:
    """Tokens that each document predicts, the long ones spread over the corpus."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 17, size=NUM_DOCUMENTS).tolist()
    for position in range(0, NUM_DOCUMENTS, 20):
        for offset, length in enumerate(_LONG_LENGTHS):
            lengths[position + 5 * offset] = length
    return lengths


def write_corpus(
    prefix: Path, lengths: Sequence[int] | None = None, *, num_tokens: int = VOCAB_SIZE
) -> str:
    """Write documents that count upwards by steps of 1 to 3, so that there is something to learn.

    Args:
        prefix: of the .bin and .idx file.
        lengths: tokens that each document predicts, one less than its tokens.
        num_tokens: token ids lie below; all of them occur.

    Returns:
        The prefix.
    """
    lengths = document_lengths() if lengths is None else lengths
    rng = np.random.default_rng(1)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for index, length in enumerate(lengths):
        first = num_tokens - 1 if index == 0 else int(rng.integers(num_tokens))
        step = int(rng.integers(1, 4))
        tokens = (first + step * np.arange(length + 1)) % num_tokens
        builder.add_document(torch.from_numpy(tokens.astype(np.int64)), [length + 1])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def write_weights(prefix: str, weights: npt.ArrayLike) -> str:
    """Write the weights of a corpus's tokens, whatever their number and values."""
    writer = WeightsWriter(weights_path(prefix))
    writer.add(np.asarray(weights, dtype=np.float32))
    writer.finish()
    return prefix


_FLAGS: dict[str, str | None] = {
    "--num-layers": "2",
    "--hidden-size": "32",
    "--ffn-hidden-size": "64",
    "--num-attention-heads": "4",
    "--group-query-attention": None,
    "--num-query-groups": "2",
    "--swiglu": None,
    "--normalization": "RMSNorm",
    "--disable-bias-linear": None,
    "--position-embedding-type": "rope",
    "--untie-embeddings-and-output-weights": None,
    "--init-method-std": "0.1",
    "--seq-length": str(SEQ_LENGTH),
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": str(VOCAB_SIZE),
    "--make-vocab-size-divisible-by": str(PADDED_VOCAB_SIZE),
    "--global-batch-size": str(GLOBAL_BATCH_SIZE),
    "--max-tokens-per-micro-batch": "128",
    "--train-iters": "3",
    "--lr": "1e-2",
    "--min-lr": "1e-3",
    "--lr-decay-style": "cosine",
    # Rounding differs between strategies; a larger epsilon keeps AdamW from amplifying it.
    "--adam-eps": "1e-5",
    # A hanging test ends by its timeout, and stray ranks soon after.
    "--distributed-timeout-minutes": "1",
}


def tiny_command(prefix: str, run_dir: Path, *extra: str, without: Sequence[str] = ()) -> list[str]:
    """A command line of `pretrain_gpt.py`; of a repeated flag the last wins."""
    flags = _FLAGS | {"--data-path": prefix, "--run-dir": str(run_dir)}
    words: list[str] = []
    for flag, value in flags.items():
        if flag not in without:
            words += [flag] if value is None else [flag, value]
    return [*words, *extra]

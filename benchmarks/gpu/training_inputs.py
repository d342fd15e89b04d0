"""Writes the corpus of the check of training, and predicts its memory.

python -m benchmarks.gpu.training_inputs corpus FOLDER [--small]
python -m benchmarks.gpu.training_inputs memory FOLDER [--small] --tokens N
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from benchmarks.gpu.programs import training_flags
from benchmarks.gpu.sizes import Sizes, add_size_options, chosen_sizes
from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.flags.arguments import parse_arguments
from megatron.hydraulis.library.devices import constants_of_this_rank
from megatron.hydraulis.library.planning import Planning
from megatron.hydraulis.strategy import Scheme


def write_corpus(sizes: Sizes, prefix: Path) -> None:
    """Random tokens in documents of a long tail."""
    rng = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in document_lengths(sizes, rng, sizes.num_documents) + 1:
        tokens = rng.integers(0, sizes.model.shape.vocab_size, int(length))
        builder.add_document(torch.from_numpy(tokens), [int(length)])
    builder.finalize(f"{prefix}.idx")


def document_lengths(sizes: Sizes, rng: np.random.Generator, count: int) -> np.ndarray:
    """Trained tokens of documents."""
    lengths = np.exp(rng.normal(np.log(sizes.median_tokens), sizes.sigma, count))
    return np.clip(lengths, 1, sizes.model.seq_length).astype(int)


def predicted_memory(sizes: Sizes, folder: Path, num_tokens: int) -> dict[str, float]:
    """Bytes of tensors with a micro-batch of so many tokens on one GPU, and those kept free."""
    resolved = parse_arguments(training_flags(sizes, folder), num_ranks=1, rank=0)
    device = constants_of_this_rank(has_cuda=True, speaks=False)
    model = Planning.of(resolved, device, None).cost_model
    assert isinstance(model, AnalyticCostModel)
    return {
        "tensor_bytes": model.memory.peak_bytes(Scheme(), 0, num_tokens),
        "reserve_bytes": model.memory.reserve_bytes,
    }


def main() -> None:
    """Write the corpus, or print the predicted memory as JSON in the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("corpus", "memory"))
    parser.add_argument("folder", type=Path)
    add_size_options(parser)
    parser.add_argument("--tokens", type=int, default=1)
    options = parser.parse_args()
    sizes = chosen_sizes(options)
    if options.what == "corpus":
        write_corpus(sizes, options.folder / "corpus")
    else:
        print(json.dumps(predicted_memory(sizes, options.folder, options.tokens)))


if __name__ == "__main__":
    main()

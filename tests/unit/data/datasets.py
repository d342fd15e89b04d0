"""Datasets for tests, written by Megatron's own builder."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def write_dataset(
    prefix: Path,
    documents: Sequence[Sequence[Sequence[int]]],
    token_type: type[np.integer] = np.int32,
) -> str:
    """Write documents, each a list of stored sequences, each a list of token ids."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=token_type)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def numbered_documents(lengths: Sequence[int], *, first_token: int = 0) -> list[list[list[int]]]:
    """Documents of one sequence each whose tokens count upwards over the whole dataset."""
    documents = []
    for length in lengths:
        documents.append([list(range(first_token, first_token + length))])
        first_token += length
    return documents

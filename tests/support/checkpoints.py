"""Looking into checkpoints, without the code that wrote them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata, load


def whole_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a `torch_dist` checkpoint by key, read by torch alone."""
    reader = FileSystemReader(folder)
    wanted = {
        key: torch.full(tuple(entry.size), torch.nan, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(dict(wanted), storage_reader=reader, no_dist=True)
    return wanted

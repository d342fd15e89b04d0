"""Reading `torch_dist` checkpoints without unpickling anything but tensors and plain data.

Torch and upstream unpickle the metadata, and objects beside the tensors, as they come: whoever can
write the file could run code. Here both pass a list of what may be in them.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.safe_globals import SAFE_GLOBALS
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from megatron.hydraulis.errors import CheckpointError

__all__ = ["CheckedReader", "StoredTensor", "load_into", "read_object", "stored_tensors"]

METADATA_NAME = ".metadata"
MAX_METADATA_BYTES = 4 << 30
"""A line a rectangle: 10^7 of them, and something is wrong."""

_ALLOWED: Mapping[str, frozenset[str]] = {
    "builtins": frozenset({"dict", "list", "tuple", "set", "frozenset", "int", "float", "slice"}),
    "collections": frozenset({"OrderedDict"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath", "Path"}),
    "pathlib._local": frozenset({"PosixPath", "PurePosixPath", "Path"}),
    "torch": frozenset({"Size", "device"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch.distributed.checkpoint.planner": frozenset(
        {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"}
    ),
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_chunks: int


class CheckedReader(FileSystemReader):
    """Torch's reader, whose metadata are read with a list of allowed types."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises CheckpointError for a file that is damaged, or holds anything else."""
        path = Path(self.path) / METADATA_NAME
        try:
            if path.stat().st_size > MAX_METADATA_BYTES:
                raise CheckpointError(
                    f"{path}: metadata have at most {MAX_METADATA_BYTES} bytes but these have "
                    f"{path.stat().st_size}; load another checkpoint"
                )
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(
                f"{path}: must be the metadata of a torch_dist checkpoint but: "
                f"{' '.join(str(error).split()) or type(error).__name__}; load another checkpoint"
            ) from error
        self._check(path, metadata)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _check(self, path: Path, metadata: Any) -> None:
        """Types, and that no file outside the checkpoint is named."""
        fine = (
            isinstance(metadata, Metadata)
            and isinstance(metadata.state_dict_metadata, dict)
            and isinstance(metadata.storage_data, dict)
            and all(isinstance(key, str) for key in metadata.state_dict_metadata)
            and all(
                isinstance(value, TensorStorageMetadata | BytesStorageMetadata)
                for value in metadata.state_dict_metadata.values()
            )
            and all(
                isinstance(index, MetadataIndex)
                and isinstance(info, _StorageInfo)
                and isinstance(info.relative_path, str)
                and Path(info.relative_path).name == info.relative_path
                for index, info in metadata.storage_data.items()
            )
        )
        if not fine:
            raise CheckpointError(
                f"{path}: says something else than which tensors lie in which file of the folder; "
                "load another checkpoint"
            )


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED.get(module, frozenset()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in it")
        return super().find_class(module, name)


class _WeightsOnlyPlanner(MCoreLoadPlanner):
    """Upstream's, which would unpickle objects as they come."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        with torch.serialization.safe_globals([*SAFE_GLOBALS, *_numpy_dtypes()]):
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class CheckedLoadStrategy(TorchDistLoadShardedStrategy):
    """Upstream's way from `torch_dist` to sharded tensors, with the reader and planner of above."""

    def load(
        self, sharded_state_dict: Any, checkpoint_dir: Path, async_strategy: str = "mcore"
    ) -> dict[str, Any]:
        """Fill the sharded tensors' data in place.

        Returns:
            Objects by their unique key.
        """
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        tensors = [t for parts in by_key.values() for t in parts if isinstance(t, ShardedTensor)]
        wanted = mcore_to_pyt_state_dict(by_key, is_loading=True)
        checkpoint.load(
            wanted,
            CheckedReader(checkpoint_dir),
            planner=_WeightsOnlyPlanner(
                shapes_validation_sharded_tensors=tensors,
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
            ),
            no_dist=True,
        )
        return wanted


def load_into(state: Mapping[str, Any], folder: Path) -> None:
    """Fill sharded tensors with what a checkpoint has of them.

    Raises CheckpointError.
    """
    _load(dict(state), folder)


def read_object(folder: Path, key: str, num_axes: int = 1) -> Any:
    """An object of the checkpoint, not shared out along any axis; None where it has none.

    Raises CheckpointError.
    """
    wanted = ShardedObject(key, None, (1,) * num_axes, (0,) * num_axes)
    unique = wanted.unique_key
    if unique not in CheckedReader(folder).read_metadata().state_dict_metadata:
        return None
    return _load({key: wanted}, folder)[unique][0]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint by key, from its metadata.

    Raises CheckpointError.
    """
    metadata = CheckedReader(folder).read_metadata()
    found = {}
    for key, value in metadata.state_dict_metadata.items():
        if not isinstance(value, TensorStorageMetadata):
            continue
        # Torch leaves what no chunk holds as it was, without a word.
        num_elements = sum(math.prod(chunk.sizes) for chunk in value.chunks)
        if num_elements != math.prod(value.size):
            raise CheckpointError(
                f"{folder}: tensor {key} has {math.prod(value.size)} elements but its chunks hold "
                f"{num_elements}; load another checkpoint"
            )
        found[key] = StoredTensor(tuple(value.size), value.properties.dtype, len(value.chunks))
    return found


def _load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    try:
        return CheckedLoadStrategy().load(state, folder)
    except CheckpointError:
        raise
    except Exception as error:  # damaged files raise anything, from KeyError to AssertionError
        cause: BaseException = error
        if isinstance(error, checkpoint.CheckpointException) and error.failures:
            failure = next(iter(error.failures.values()))
            cause = failure[0] if isinstance(failure, tuple) else failure
        reason = f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
        raise CheckpointError(
            f"{folder}: cannot be read: {reason}; load another checkpoint"
        ) from error


def _numpy_dtypes() -> list[Any]:
    """Of arrays inside saved states of numpy's generator."""
    import numpy as np

    return [type(np.dtype(np.uint32)), type(np.dtype(np.uint64)), type(np.dtype(np.int64))]

"""Reading `torch_dist` checkpoints without unpickling anything but tensors and plain data.

Torch and upstream unpickle the metadata, and objects beside the tensors, as they come: whoever can
write the file could run code. Here both pass a list of what may be in them.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.safe_globals import SAFE_GLOBALS
from torch.distributed import checkpoint
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron.hydraulis.errors import CheckpointError

__all__ = [
    "CheckedReader",
    "StoredTensor",
    "load_into",
    "needed_bytes",
    "read_common_state",
    "read_object",
    "stored_tensors",
    "unique_key",
]

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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """What the plan says, in the order of the files.

        One item after the other: in a row torch would hold the last one while it reads the next.
        """

        def place(item: ReadItem) -> tuple[str, int]:
            info = self.storage_data[item.storage_index]
            return info.relative_path, info.offset

        for item in sorted(plan.items, key=place):
            super().read_data(LoadPlan([item]), planner).wait()
        done: Future[None] = Future()
        done.set_result(None)
        return done

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
                and isinstance(info.offset, int)
                and isinstance(info.length, int)
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


class _TensorsOnlyPlanner(MCoreLoadPlanner):
    """Upstream's, which would unpickle an object that stands where a tensor is wanted."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} must be a tensor but is an object")


class _ObjectPlanner(DefaultLoadPlanner):
    """Reads one object."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: Any = None

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.loaded = _plain_object(value)


class CheckedLoadStrategy(TorchDistLoadShardedStrategy):
    """Upstream's way from `torch_dist` to sharded tensors, with the reader and planner of above."""

    def load(
        self, sharded_state_dict: Any, checkpoint_dir: Path, async_strategy: str = "mcore"
    ) -> dict[str, Any]:
        """Fill the sharded tensors' data in place.

        Returns:
            What was asked for, as torch has it.
        """
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        tensors = [t for parts in by_key.values() for t in parts if isinstance(t, ShardedTensor)]
        wanted = mcore_to_pyt_state_dict(by_key, is_loading=True)
        checkpoint.load(
            wanted,
            CheckedReader(checkpoint_dir),
            planner=_TensorsOnlyPlanner(
                shapes_validation_sharded_tensors=tensors,
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
            ),
            no_dist=True,
        )
        return wanted


def load_into(state: Mapping[str, Any], folder: Path) -> None:
    """Fill sharded tensors with what a checkpoint has of them. Needs a process group.

    Raises CheckpointError.
    """
    with _reading(folder):
        CheckedLoadStrategy().load(dict(state), folder)


def read_object(folder: Path, key: str, num_axes: int = 1) -> Any:
    """An object of the checkpoint, not shared out along any axis; None where it has none.

    Needs no process group. Raises CheckpointError.
    """
    unique = unique_key(key, num_axes)
    reader = CheckedReader(folder)
    metadata = reader.read_metadata()
    if unique not in metadata.state_dict_metadata:
        return None
    index, nothing, planner = MetadataIndex(unique), torch.Size([0]), _ObjectPlanner()
    item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
    with _reading(folder):
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(LoadPlan([item]), planner).wait()
        return planner.loaded[0]


def read_common_state(folder: Path) -> Mapping[str, Any]:
    """Upstream's entries beside tensors, also as its earlier versions stored them.

    Needs no process group. Raises CheckpointError.
    """
    earlier = folder / COMMON_STATE_FNAME
    if earlier.is_file():
        with _reading(earlier), earlier.open("rb") as file:
            common = _plain_object(file)
    else:
        common = read_object(folder, "common_state")
    if not isinstance(common, dict):
        raise CheckpointError(
            f"{folder}: the state beside the tensors must be a dict but is "
            f"{type(common).__name__}; load another checkpoint"
        )
    return common


def unique_key(key: str, num_axes: int = 1) -> str:
    """How upstream calls an object in the checkpoint that is not shared out along any axis."""
    found: str = ShardedObject(key, None, (1,) * num_axes, (0,) * num_axes).unique_key
    return found


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


def needed_bytes(folder: Path) -> dict[str, int]:
    """Bytes that each file of a checkpoint must have at least, by its metadata.

    Raises CheckpointError.
    """
    needed: dict[str, int] = {}
    for info in CheckedReader(folder).read_metadata().storage_data.values():
        end = info.offset + info.length
        needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
    return needed


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Make CheckpointError of whatever damaged files raise, from KeyError to AssertionError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        cause: BaseException = error
        if isinstance(error, checkpoint.CheckpointException) and error.failures:
            failure = next(iter(error.failures.values()))
            cause = failure[0] if isinstance(failure, tuple) else failure
        reason = f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
        raise CheckpointError(
            f"{path}: cannot be read: {reason}; load another checkpoint"
        ) from error


def _plain_object(file: IO[bytes]) -> Any:
    """What was pickled of plain data and the few types that upstream stores."""
    with torch.serialization.safe_globals([*SAFE_GLOBALS, *_numpy_dtypes()]):
        return torch.load(file, weights_only=True, map_location="cpu")


def _numpy_dtypes() -> list[Any]:
    """Of arrays inside saved states of numpy's generator."""
    import numpy as np

    return [type(np.dtype(np.uint32)), type(np.dtype(np.uint64)), type(np.dtype(np.int64))]

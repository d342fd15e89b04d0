"""The `torch_dist` format, read without running code from its files and written piece by piece.

torch and Megatron unpickle metadata and objects as they are: whoever can write the files can run
code. Here both are restricted to a list of types. Their writers hold a copy of all they write; this
one holds one piece, and computes the checksum of the file on the way.
"""

from __future__ import annotations

import errno
import hashlib
import io
import math
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.safe_globals import SAFE_GLOBALS
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from megatron.hydraulis.checkpoint.manifest import METADATA_NAME, FileRecord
from megatron.hydraulis.errors import CheckpointError

LAYERS = "decoder.layers."
"""Start of the keys of tensors that have one more axis, for the layers."""
MODEL = ""
"""Prefix of a parameter's key."""
MASTER, EXP_AVG, EXP_AVG_SQ = (
    f"optimizer.state.{name}." for name in ("param", "exp_avg", "exp_avg_sq")
)
"""Prefixes of the keys of its fp32 master and moments, in Megatron's distributed optimizer."""
EXPERT_BIAS = ".router.expert_bias"
"""End of the names of routers' biases, which are no parameters."""
MAX_METADATA_BYTES = 4 << 30
"""Limit for the metadata, enough for about 10^7 pieces."""

_ALLOWED_TYPES: Mapping[str, str] = {
    "builtins": "dict list tuple set frozenset int float slice",
    "collections": "OrderedDict",
    "pathlib": "PosixPath PurePosixPath Path",
    "pathlib._local": "PosixPath PurePosixPath Path",
    "torch": "Size device",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
        "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint.planner": (
        "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData"
    ),
}
"""Types in the metadata of a checkpoint, by module; dtypes are allowed as well."""
_NUMPY_DTYPES = [type(np.dtype(kind)) for kind in (np.uint32, np.uint64, np.int64)]
"""Types of arrays in saved states of numpy's generator."""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A rectangle of a tensor in a checkpoint, and the memory that it is written from or read to.

    All shapes and offsets count every axis of the stored tensor, that of layers included.
    """

    key: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    data: Tensor
    dtype: torch.dtype
    """The dtype in the file."""
    same_as: str | None = None
    """Key of a tensor, written before, whose piece at this offset has the same bytes: they are
    stored once."""


def object_key(key: str, axes: tuple[int, ...] = (1,), index: tuple[int, ...] = (0,)) -> str:
    """Megatron's name, in the checkpoint, of an object at an index along axes of these sizes."""
    found: str = ShardedObject(key, None, axes, index).unique_key
    return found


def layer_key(key: str, layer: int | None, *, separate_layers: bool) -> str:
    """Key of the stored tensor that has a layer's tensor, given its key without a number.

    separate_layers: whether the checkpoint has a tensor for every layer.
    """
    if layer is None:
        return key
    return f"{LAYERS}{layer}.{key}" if separate_layers else f"{LAYERS}{key}"


COMMON_STATE = object_key("common_state")
"""Megatron's name of everything that is neither a tensor nor a separate object."""


_FUSED_WITH = {
    "pre_mlp_layernorm.": "mlp.linear_fc1.",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.",
}
"""Norms that Transformer Engine's layers fuse with a linear layer, if there is that."""
_OF_LATENTS = "self_attention.linear_kv_down_proj.weight"
"""Only layers with latent attention have it."""


def renamed_norms(keys: Set[str]) -> dict[str, str]:
    """Keys of norms as upstream's local layers call them, to those of Transformer Engine's.

    They differ in layers with experts or latent attention. Checkpoints have the latter.
    """
    found = {}
    for key in keys:
        for norm, linear in _FUSED_WITH.items():
            fused = f"{linear}layer_norm_"
            layer, is_fused, kind = key.partition(fused)
            if is_fused and f"{layer}{linear}weight" not in keys:
                found[key] = f"{layer}{norm}{kind}"
            layer, is_norm, kind = key.partition(norm)
            needed = {f"{layer}{linear}weight", f"{layer}{_OF_LATENTS}"}
            if is_norm and kind in ("weight", "bias") and needed <= keys:
                found[key] = f"{layer}{fused}{kind}"
    return found


# --- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_chunks: int


class StoredCheckpoint:
    """A checkpoint on disk, whichever ranks wrote it. Needs no process group.

    The constructor and every method raise CheckpointError for damaged files and for files with
    other types than expected.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata = _read_metadata(folder / METADATA_NAME)
        self.tensors: dict[str, StoredTensor] = {}
        """All tensors by key."""
        with _reading(self.folder):
            for key, entry in self._metadata.state_dict_metadata.items():
                if not isinstance(entry, TensorStorageMetadata):
                    continue
                shape, num_wanted = tuple(entry.size), math.prod(entry.size)
                num_found = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
                if num_found != num_wanted:
                    raise CheckpointError(
                        f"{folder}: tensor {key} has {num_wanted} elements but its chunks have "
                        f"{num_found}; load another checkpoint"
                    )
                self.tensors[key] = StoredTensor(shape, entry.properties.dtype, len(entry.chunks))

    @property
    def parameters(self) -> dict[str, StoredTensor]:
        """Tensors that are not the optimizer's."""
        return {k: t for k, t in self.tensors.items() if not k.startswith("optimizer.")}

    @property
    def frozen(self) -> dict[str, StoredTensor]:
        """Parameters that were not trained, which the state of the optimizer lacks."""
        if not self.has_resumable_optimizer:
            return {}
        return {
            key: tensor
            for key, tensor in self.parameters.items()
            if MASTER + key not in self.tensors and not key.endswith(EXPERT_BIAS)
        }

    @property
    def has_optimizer(self) -> bool:
        return len(self.parameters) < len(self.tensors)

    @property
    def has_resumable_optimizer(self) -> bool:
        """True if any layout of ranks can read the optimizer state."""
        return any(key.startswith(MASTER) for key in self.tensors)

    @property
    def has_separate_layers(self) -> bool:
        """True if every layer has its own tensors, instead of an axis in one tensor for all."""
        return any(key.startswith(f"{LAYERS}0.") for key in self.tensors)

    @property
    def needed_bytes(self) -> dict[str, int]:
        """Minimum number of bytes of each file."""
        needed: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            end = info.offset + info.length
            needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
        return needed

    def layer_key(self, key: str, layer: int | None) -> str:
        """Returns what the function `layer_key` returns for this checkpoint."""
        return layer_key(key, layer, separate_layers=self.has_separate_layers)

    def read(self, key: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        """A tensor, or that of one layer, whose key is given without a number, and one expert."""
        stored_key = self.layer_key(key, layer)
        stored = self.tensors[stored_key]
        of_layer = None if self.has_separate_layers else layer
        index = tuple(each for each in (of_layer, expert) if each is not None)
        size = stored.shape[len(index) :]
        data = torch.empty((*(1 for _ in index), *size), dtype=stored.dtype)
        offset = (*index, *(0 for _ in size))
        self.fill([FilePiece(stored_key, stored.shape, offset, data, stored.dtype)])
        return data.view(size)

    def fill(self, pieces: Iterable[FilePiece]) -> None:
        """Read into the memory of the pieces, in the order of the files.

        One stored chunk at a time is in memory.
        """
        pieces_of: dict[str, list[FilePiece]] = defaultdict(list)
        for piece in pieces:
            pieces_of[piece.key].append(piece)
        reads: list[tuple[_StorageInfo, Any, Tensor]] = []
        with _reading(self.folder):
            for key, wanted in pieces_of.items():
                entry = self._metadata.state_dict_metadata[key]
                chunks = [
                    ChunkStorageMetadata(torch.Size(piece.offset), piece.data.shape)
                    for piece in wanted
                ]
                items = create_read_items_for_chunk_list(
                    key, cast(TensorStorageMetadata, entry), chunks
                )
                num_found = sum(item.lengths.numel() for item in items)
                num_wanted = sum(piece.data.numel() for piece in wanted)
                if num_found != num_wanted:
                    raise CheckpointError(
                        f"{self.folder}: {num_wanted} elements of {key} are needed but its chunks "
                        f"have {num_found}; load another checkpoint"
                    )
                for item in items:
                    info = self._metadata.storage_data[item.storage_index]
                    reads.append((info, item, wanted[cast(int, item.dest_index.index)].data))
            reads.sort(key=lambda read: (read[0].relative_path, read[0].offset))
            for name, of_file in groupby(reads, key=lambda read: read[0].relative_path):
                with (self.folder / name).open("rb") as file:
                    for _, of_chunk in groupby(of_file, key=lambda read: read[0].offset):
                        self._read_chunk(file, list(of_chunk))

    def read_object(self, key: str, num_axes: int = 1) -> Any:
        """An object that is not cut along any axis; None if there is none."""
        with _reading(self.folder):
            full_key = object_key(key, (1,) * num_axes, (0,) * num_axes)
            info = self._metadata.storage_data.get(MetadataIndex(full_key))
            if info is None:
                return None
            with (self.folder / info.relative_path).open("rb") as file:
                return _load(_create_file_view(cast(Any, file), info.offset, info.length))[0]

    def common_state(self) -> Mapping[str, Any]:
        """Megatron's entries besides tensors, also as its earlier versions stored them."""
        earlier = self.folder / COMMON_STATE_FNAME
        if earlier.is_file():
            with _reading(earlier), earlier.open("rb") as file:
                common = _load(file)
        else:
            common = self.read_object("common_state")
        if not isinstance(common, dict):
            raise CheckpointError(
                f"{self.folder}: the state besides the tensors must be a dict but is "
                f"{type(common).__name__}; load another checkpoint"
            )
        return common

    def _read_chunk(self, file: IO[bytes], reads: list[tuple[_StorageInfo, Any, Tensor]]) -> None:
        """Copy parts of one stored chunk to where they belong."""
        info, item, _ = reads[0]
        chunk = _load(_create_file_view(cast(Any, file), info.offset, info.length))
        key, number = item.storage_index.fqn, item.storage_index.index
        entry = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[key])
        size = entry.chunks[number].sizes
        if not isinstance(chunk, Tensor) or chunk.shape != size:
            raise CheckpointError(
                f"{self.folder}: {key} must be a tensor with a chunk of {tuple(size)} at byte "
                f"{info.offset} of {info.relative_path} but is not; load another checkpoint"
            )
        for _, item, data in reads:
            _part(data, item.dest_offsets, item.lengths).copy_(
                _part(chunk, item.storage_offsets, item.lengths)
            )


def _part(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]


def _load(file: Any) -> Any:
    """A pickled tensor, or plain data and the few types that Megatron stores."""
    with torch.serialization.safe_globals([*SAFE_GLOBALS, *_NUMPY_DTYPES]):
        return torch.load(file, weights_only=True, map_location="cpu")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn whatever damaged files raise, from KeyError to AssertionError, into CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise CheckpointError(
            f"{path}: cannot be read: {reason}; load another checkpoint"
        ) from error


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED_TYPES.get(module, "").split():
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in it")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> Metadata:
    with _reading(path):
        num_bytes = path.stat().st_size
        if num_bytes > MAX_METADATA_BYTES:
            raise CheckpointError(
                f"{path}: metadata have at most {MAX_METADATA_BYTES} bytes but these have "
                f"{num_bytes}; load another checkpoint"
            )
        with path.open("rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        if not _is_valid(metadata):
            raise CheckpointError(
                f"{path}: must say which tensors are in which files of the folder but says "
                "something else; load another checkpoint"
            )
    return _with_renamed_norms(metadata)


def _with_renamed_norms(metadata: Metadata) -> Metadata:
    """Rename keys as `renamed_norms`, also of what was written by others or earlier.

    The optimizer's follow those of the model: frozen parameters are not among them.
    """
    of_model = {k for k in metadata.state_dict_metadata if not k.startswith("optimizer.")}
    prefixes = (MODEL, MASTER, EXP_AVG, EXP_AVG_SQ)
    renamed = renamed_norms(of_model).items()
    new = {prefix + old: prefix + name for prefix in prefixes for old, name in renamed}
    if not new:
        return metadata
    return replace(
        metadata,
        state_dict_metadata={
            new.get(key, key): entry for key, entry in metadata.state_dict_metadata.items()
        },
        storage_data={
            replace(index, fqn=new.get(index.fqn, index.fqn)): info
            for index, info in metadata.storage_data.items()
        },
    )


def _is_valid(metadata: Any) -> bool:
    """True if the types are right, and no file outside the checkpoint is named."""
    return (
        isinstance(metadata, Metadata)
        and all(
            isinstance(key, str) and isinstance(value, TensorStorageMetadata | BytesStorageMetadata)
            for key, value in metadata.state_dict_metadata.items()
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


# --- writing ------------------------------------------------------------------------------------

_Place = tuple[int, int]
"""First byte in a file, and number of bytes."""
_PieceRecord = tuple[tuple[int, ...], tuple[int, ...], _Place]
"""Offset and size in the tensor, and place in the file."""


@dataclass(frozen=True)
class WrittenFile:
    """A file that one rank has written; all ranks send it to rank 0, so it has plain tuples."""

    name: str
    record: FileRecord
    objects: Mapping[str, _Place]
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...], list[_PieceRecord]]]
    """Dtype and shape of each whole tensor by key, and its pieces."""


def write_file(
    folder: Path,
    rank: int,
    pieces: Iterable[FilePiece],
    objects: Mapping[str, Any],
    goes_on: Callable[[], bool] = lambda: True,
) -> WrittenFile:
    """Write a rank's file.

    Args:
        rank: number of the file.
        pieces: taken one at a time, so they may be made when they are asked for.
        objects: by their `object_key`.
        goes_on: asked before every piece.

    Raises OSError, also once ``goes_on`` returns False.
    """
    name = f"__{rank}_0.distcp"
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], list[_PieceRecord]]] = {}
    places: dict[tuple[str | None, tuple[int, ...]], _Place] = {}
    with (folder / name).open("wb") as file:
        stream = _HashingStream(file)
        object_places = {key: _appended([data], stream) for key, data in objects.items()}
        for piece in pieces:
            if not goes_on():
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            place = places.get((piece.same_as, piece.offset))
            if place is None:
                place = _appended(_own_storage(piece), stream)
            places[piece.key, piece.offset] = place
            _, _, records = tensors.setdefault(piece.key, (piece.dtype, piece.shape, []))
            records.append((piece.offset, tuple(piece.data.shape), place))
            del piece  # before the next one is made
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(name, FileRecord(stream.tell(), stream.sha256), object_places, tensors)


def write_metadata(folder: Path, files: Sequence[WrittenFile]) -> None:
    """Write torch's and Megatron's descriptions of the files of all ranks. Raises OSError."""
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for file in files:
        for key, (first, num_bytes) in file.objects.items():
            entries[key] = BytesStorageMetadata()
            storage[MetadataIndex(key)] = _StorageInfo(file.name, first, num_bytes)
        for key, (dtype, shape, records) in file.tensors.items():
            new = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [])
            chunks = entries.setdefault(key, new).chunks
            for offset, size, (first, num_bytes) in records:
                chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
                index = MetadataIndex(key, chunk.offsets, len(chunks))
                chunks.append(chunk)
                storage[index] = _StorageInfo(file.name, first, num_bytes)
    metadata = Metadata(entries, None, storage, StorageMeta(), CURRENT_DCP_VERSION)
    with (folder / METADATA_NAME).open("wb") as stream:
        pickle.dump(metadata, stream)
        stream.flush()
        os.fsync(stream.fileno())
    save_config(CheckpointingConfig("torch_dist"), str(folder))


class _HashingStream(io.RawIOBase):
    """Passes on what is written, and knows its length and SHA-256."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._file.write(view)
        self._digest.update(view)
        self._num_bytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._num_bytes

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def _own_storage(piece: FilePiece) -> Tensor:
    """The piece on the host, in the dtype of the file: torch.save writes the storage of a view."""
    tensor = piece.data.detach().to("cpu", piece.dtype)
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.itemsize:
        tensor = tensor.clone()
    return tensor


def _appended(content: Any, stream: _HashingStream) -> _Place:
    """Appends the content by torch.save and returns its place."""
    first = stream.tell()
    try:
        torch.save(content, cast(IO[bytes], stream))
    except RuntimeError as error:
        # After a failed write torch ends its archive all the same, and complains of its length.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    return first, stream.tell() - first

"""Parameters of a `torch_dist` checkpoint, read and written layer by layer on one process."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed import checkpoint
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron.hydraulis.checkpoint.reader import (
    CheckedReader,
    StoredTensor,
    stored_tensors,
    unique_key,
)
from megatron.hydraulis.checkpoint.tensor_file import save_tensor
from megatron.hydraulis.errors import CheckpointError

__all__ = ["LAYERS", "PieceToWrite", "StoredParameters", "write_parameters"]

LAYERS = "decoder.layers."
_FILE_NAME = "__0_0.distcp"
"""As torch calls the first file of rank 0."""
_COMMON_KEY = unique_key("common_state")
"""Upstream's, of what it stores beside tensors, in a list of one."""


class StoredParameters:
    """The parameters of a checkpoint, whichever ranks wrote it.

    Args:
        folder: of the checkpoint.

    Raises CheckpointError.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = CheckedReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.tensors: Mapping[str, StoredTensor] = {
            key: tensor
            for key, tensor in stored_tensors(folder).items()
            if not key.startswith("optimizer.")
        }
        """As they are stored, by key."""
        self.has_layers_apart = any(key.startswith(f"{LAYERS}0.") for key in self.tensors)
        """Whether every layer has tensors of its own, instead of an axis in one for all."""

    def key_of(self, key: str, layer: int | None) -> str:
        """Of the stored tensor that holds a layer's, which is called without its number."""
        if layer is None:
            return key
        return f"{LAYERS}{layer}.{key}" if self.has_layers_apart else f"{LAYERS}{key}"

    def read(self, key: str, layer: int | None) -> torch.Tensor:
        """A tensor, or one layer's. Raises CheckpointError."""
        stored_key = self.key_of(key, layer)
        shape = self.tensors[stored_key].shape
        has_axis = layer is not None and not self.has_layers_apart
        offsets = [layer if has_axis and axis == 0 else 0 for axis in range(len(shape))]
        sizes = [1 if has_axis and axis == 0 else size for axis, size in enumerate(shape)]
        destination = torch.empty(sizes, dtype=self.tensors[stored_key].dtype)
        wanted = ChunkStorageMetadata(torch.Size(cast(list[int], offsets)), torch.Size(sizes))
        entry = self._metadata.state_dict_metadata[stored_key]
        items = create_read_items_for_chunk_list(stored_key, cast(Any, entry), [wanted])
        num_read = sum(item.lengths.numel() for item in items)
        if num_read != destination.numel():
            raise CheckpointError(
                f"{self._folder}: {stored_key} has {destination.numel()} elements but its chunks "
                f"hold {num_read}; load another checkpoint"
            )
        try:
            self._reader.read_data(LoadPlan(items), _IntoTensor(destination)).wait()
        except Exception as error:  # damaged files raise anything
            raise CheckpointError(
                f"{self._folder}: {stored_key} cannot be read: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}; load another checkpoint"
            ) from error
        return destination[0] if has_axis else destination


@dataclass(frozen=True, slots=True)
class PieceToWrite:
    """A tensor, or a layer of one, that will be asked for when its turn comes."""

    key: str
    """Of the stored tensor."""
    shape: tuple[int, ...]
    """Of that tensor, an axis of layers included."""
    layer: int | None
    """None for a tensor without an axis of layers."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the piece begins."""
        first = 0 if self.layer is None else self.layer
        return (first, *(0 for _ in self.shape[1:]))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the piece, in as many dims."""
        return self.shape if self.layer is None else (1, *self.shape[1:])


def write_parameters(
    folder: Path,
    pieces: Sequence[PieceToWrite],
    dtype: torch.dtype,
    produce: Callable[[int], torch.Tensor],
    common: Mapping[str, Any],
    *,
    empty_objects: Sequence[str] = (),
) -> None:
    """Write a checkpoint of parameters alone, holding one piece at a time.

    Args:
        folder: that exists and is empty.
        pieces: all of them; those of a tensor make it whole.
        dtype: of all.
        produce: the piece of an index, without the axis of layers.
        common: upstream's entries beside tensors.
        empty_objects: keys of objects that upstream asks for, here None.

    Raises OSError.
    """
    objects: dict[str, Any] = {_COMMON_KEY: dict(common)} | dict.fromkeys(empty_objects)
    planner = _LazyPlanner(pieces, dtype, produce, objects)
    try:
        with warnings.catch_warnings():
            # That there is no process group is meant.
            warnings.simplefilter("ignore")
            checkpoint.save(
                {}, storage_writer=_OneByOneWriter(folder), planner=planner, no_dist=True
            )
    except checkpoint.CheckpointException as error:
        failures = list(error.failures.values())
        cause = failures[0][0] if failures else error
        raise cause from error
    save_config(CheckpointingConfig("torch_dist"), str(folder))


class _IntoTensor(DefaultLoadPlanner):
    """Whatever is read goes into one tensor."""

    def __init__(self, destination: torch.Tensor) -> None:
        super().__init__()
        self._destination = destination

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._destination


class _LazyPlanner(DefaultSavePlanner):
    """Knows shapes; the tensors are made when they are written."""

    def __init__(
        self,
        pieces: Sequence[PieceToWrite],
        dtype: torch.dtype,
        produce: Callable[[int], torch.Tensor],
        objects: Mapping[str, Any],
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces
        self._dtype = dtype
        self._produce = produce
        self._objects = objects
        self._number = {self._index(piece): i for i, piece in enumerate(pieces)}

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._objects]
        for piece in self._pieces:
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)),
                properties=TensorProperties(dtype=self._dtype),
                size=torch.Size(piece.shape),
            )
            items.append(WriteItem(self._index(piece), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save([self._objects[write_item.index.fqn]], stream)
            return stream
        i = self._number[MetadataIndex(write_item.index.fqn, write_item.index.offset)]
        tensor = self._produce(i).reshape(self._pieces[i].sizes)
        assert tensor.dtype == self._dtype, self._pieces[i].key
        return tensor

    def _index(self, piece: PieceToWrite) -> MetadataIndex:
        return MetadataIndex(piece.key, torch.Size(piece.offsets))


class _OneByOneWriter(FileSystemWriter):
    """Torch's writer, which holds on to the last piece of every tensor; this one does not."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        with (Path(self.path) / _FILE_NAME).open("wb") as file:
            for item in plan.items:
                start = file.tell()
                data = planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    file.write(data.getbuffer())
                else:
                    save_tensor(data, file)
                length = file.tell() - start
                results.append(
                    WriteResult(item.index, length, _StorageInfo(_FILE_NAME, start, length))
                )
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

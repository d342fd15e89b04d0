"""Writing a `torch_dist` checkpoint: one file a rank, one rectangle at a time.

Upstream's writer copies all that it is about to write, and starts a process to tell of the result
even where the write is not asynchronous. This one copies a rectangle, writes it and goes on, and
counts bytes and checksums on the way.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron.hydraulis.checkpoint.manifest import FileRecord
from megatron.hydraulis.checkpoint.tensor_file import save_tensor
from megatron.hydraulis.errors import CheckpointError

__all__ = ["ShardWriter", "StreamingSaveStrategy", "Written"]

OPTIMIZER_PREFIX = "optimizer."


@dataclass(frozen=True)
class Written:
    """What one rank wrote."""

    results: tuple[WriteResult, ...]
    files: dict[str, FileRecord]


class ModelDtypePlanner(MCoreSavePlanner):
    """Plans to store the model's parameters in the model's dtype; `ShardWriter` casts them."""

    def __init__(self, model_dtype: torch.dtype) -> None:
        super().__init__(
            dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
        )
        self._model_dtype = model_dtype

    def create_local_plan(self) -> SavePlan:
        """Upstream's, with the dtype that the parameters will have."""
        plan = super().create_local_plan()
        items = [self._in_model_dtype(item) for item in plan.items]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def _in_model_dtype(self, item: WriteItem) -> WriteItem:
        if item.tensor_data is None or item.index.fqn.startswith(OPTIMIZER_PREFIX):
            return item
        properties = dataclasses.replace(item.tensor_data.properties, dtype=self._model_dtype)
        return dataclasses.replace(
            item, tensor_data=dataclasses.replace(item.tensor_data, properties=properties)
        )


class ShardWriter(FileSystemWriter):
    """Torch's writer, whose writing is a step of its own that any process may take.

    Args:
        folder: that exists and is empty.
    """

    can_run_decentralized_global_plan = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._work: tuple[SavePlan, SavePlanner] | None = None

    def prepare_decentralized_global_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing that needs the other ranks' plans."""
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Remembers what `write` is to do."""
        self._work = (plan, planner)

    def write(self, goes_on: Callable[[], bool] = lambda: True) -> Written:
        """Write this rank's file. Raises OSError, also once ``goes_on`` says no."""
        assert self._work is not None
        plan, planner = self._work
        if not plan.items:
            return Written((), {})
        name = f"__{dist.get_rank()}_0.distcp"
        results = []
        at: dict[tuple[Any, ...], _StorageInfo] = {}
        with (self._folder / name).open("wb") as file:
            stream = _HashingStream(file)
            for item in plan.items:
                if not goes_on():
                    raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
                data = planner.resolve_data(item)
                identity = _identity(item, data)
                info = None if identity is None else at.get(identity)
                if info is None:
                    start = stream.tell()
                    _write(stream, item, data)
                    info = _StorageInfo(name, start, stream.tell() - start)
                    if identity is not None:
                        at[identity] = info
                results.append(WriteResult(item.index, info.length, info))
            file.flush()
            os.fsync(file.fileno())
        return Written(tuple(results), {name: FileRecord(stream.tell(), stream.sha256)})

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write upstream's ``.metadata``, on rank 0."""
        metadata = dataclasses.replace(metadata)  # the plan's own is used again
        # Upstream keeps all ranks' plans there to save itself planning; they would double it.
        metadata.__dict__.pop("all_local_plans", None)
        super().finish(metadata, results)


class StreamingSaveStrategy(TorchDistSaveShardedStrategy):
    """Upstream's way from sharded tensors to `torch_dist`, with `ShardWriter` at its end.

    `async_save` plans and writes nothing; `take` gives the writer. Ranks meet for the first plan
    only: later ones must be of the same tensors and objects.

    Args:
        model_dtype: of the parameters in the checkpoint.
    """

    def __init__(self, model_dtype: torch.dtype) -> None:
        super().__init__()
        self._model_dtype = model_dtype
        self._writer: ShardWriter | None = None
        self._plan: SavePlan | None = None
        self.planned: Metadata | None = None
        """On rank 0: what all ranks' plans come to."""

    @property
    def is_planned(self) -> bool:
        """Whether ranks have met."""
        return self._plan is not None

    def take(self) -> ShardWriter:
        """The writer that was planned last."""
        assert self._writer is not None
        writer, self._writer = self._writer, None
        return writer

    def async_save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: Path,
        async_strategy: str = "mcore",
    ) -> AsyncRequest:
        """Collective at first: all ranks' plans meet on rank 0."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        state = mcore_to_pyt_state_dict(by_key, is_loading=False)
        planner = ModelDtypePlanner(self._model_dtype)
        self._writer = ShardWriter(Path(checkpoint_dir))
        if self._plan is None:
            (_, self.planned, _), self._plan, *_ = save_state_dict_async_plan(
                state, self._writer, None, 0, planner=planner
            )
        else:
            planner.set_up_planner(state)
            if planner.create_local_plan().items != self._plan.items:
                raise CheckpointError(
                    "a save must be of the same tensors as the one before; report this together "
                    "with the flags of the run"
                )
            self._writer.prepare_write_data(self._plan, planner)
        return AsyncRequest(self._writer.write, (), [])


class _HashingStream(io.RawIOBase):
    """Passes on what is written and knows its length and SHA-256."""

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
        """Of what was written so far."""
        return self._digest.hexdigest()


def _write(stream: _HashingStream, item: WriteItem, data: Any) -> None:
    if item.type == WriteItemType.BYTE_IO:
        stream.write(data.getbuffer())
        return
    assert item.tensor_data is not None
    # In the dtype that the metadata tell: bf16 parameters come from the fp32 master, one by one.
    tensor = data.detach().to("cpu", item.tensor_data.properties.dtype)
    # torch.save writes the whole storage of a view, so a rectangle gets one of its own.
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.itemsize:
        tensor = tensor.clone()
    save_tensor(tensor, stream)


def _identity(item: WriteItem, data: Any) -> tuple[Any, ...] | None:
    """Equal for tensors of one content, memory and type: an fp32 parameter is its own master."""
    if item.tensor_data is None:
        return None
    return data.data_ptr(), tuple(data.shape), item.tensor_data.properties.dtype

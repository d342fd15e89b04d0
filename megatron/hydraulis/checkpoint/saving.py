"""Saving: plan, write on every rank, describe, and only then let it be a checkpoint."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron.hydraulis.checkpoint.background import BackgroundWrite
from megatron.hydraulis.checkpoint.folder import CheckpointFolder
from megatron.hydraulis.checkpoint.manifest import FileRecord, Manifest, files_of, sha256_of
from megatron.hydraulis.checkpoint.names import (
    StoredParameter,
    sharding_metadata,
    stored_objects,
)
from megatron.hydraulis.checkpoint.tensors import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MODEL,
    on_host,
    sharded_tensors,
)
from megatron.hydraulis.checkpoint.together import on_all_ranks
from megatron.hydraulis.checkpoint.writer import StreamingSaveStrategy, Written
from megatron.hydraulis.runtime.engine import Engine

__all__ = ["CheckpointSaver", "SavedState"]

_BYTES_PER_MB = 1e6


@dataclass(frozen=True)
class SavedState:
    """What a checkpoint holds beside parameters and moments."""

    iteration: int
    model: Mapping[str, Any]
    """See `Manifest.model`; plain values, as are the next two."""
    state: Mapping[str, Any]
    configuration: Mapping[str, Any]
    upstream: Mapping[str, Any]
    """Entries of upstream's state dict, for upstream to load: args, scheduler, RNG and so on."""


@dataclass
class _Save:
    """One that has begun."""

    saved: SavedState
    strategy: StreamingSaveStrategy
    finalize_fns: list[Callable[[], None]]
    background: BackgroundWrite | None
    start_s: float
    stall_s: float = 0.0


class CheckpointSaver:
    """Saves an engine's shards; one save at a time. All methods are collective over the job.

    Args:
        folder: where to.
        engine: whose shards and moments.
        stored: from `stored_parameters`.
        asynchronous: write beside training.
        keep_last: checkpoints kept; all where None.
        log: where news go, on rank 0.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        engine: Engine,
        stored: Mapping[str, StoredParameter],
        *,
        asynchronous: bool = False,
        keep_last: int | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        self._folder = folder
        self._engine = engine
        self._stored = stored
        self._objects = stored_objects(engine.definition)
        self._asynchronous = asynchronous
        self._keep_last = keep_last
        self._log = log if dist.get_rank() == 0 else _say_nothing
        self._current: _Save | None = None
        self._deletions: threading.Thread | None = None

    def save(self, saved: SavedState) -> None:
        """Save now; with ``asynchronous`` the rest happens until `poll` or `finish` sees its end.

        Raises:
            CheckpointError: what the checkpoint needs cannot be written; the same on every rank.
        """
        if self._current is not None:
            self._log("the checkpoint before is still being written: training waits for it")
            self.finish()
        start_s = time.perf_counter()
        what = self._what(saved.iteration)
        path = self._folder.path_while_saving(saved.iteration)

        def prepare() -> None:
            if dist.get_rank() == 0:
                self._folder.begin_saving(saved.iteration)

        on_all_ranks(prepare, what)
        strategy = StreamingSaveStrategy(self._engine.dtype)
        request = dist_checkpointing.save(
            self._state_dict(saved),
            str(path),
            strategy,
            validate_access_integrity=False,  # by torch, whose check knows uneven shards
            async_sharded_save=True,
            content_metadata=sharding_metadata(),
            async_strategy="mcore",
        )
        assert strategy.writer is not None
        background = BackgroundWrite(strategy.writer) if self._asynchronous else None
        self._current = _Save(saved, strategy, request.finalize_fns, background, start_s)
        if self._asynchronous:
            self._current.stall_s = time.perf_counter() - start_s
        else:
            self._complete(self._current)

    def poll(self) -> None:
        """Complete a save whose writing has ended on all ranks. Raises as `save`."""
        current = self._current
        if current is None or current.background is None:
            return
        num_done = torch.tensor([int(current.background.is_done)], device=self._engine.device)
        dist.all_reduce(num_done, op=dist.ReduceOp.MIN)
        if num_done.item():
            self._complete(current)

    def finish(self) -> None:
        """Complete what was begun, waiting for it. Raises as `save`."""
        if self._current is not None:
            self._complete(self._current)
        if self._deletions is not None:
            self._deletions.join()

    def abandon(self) -> None:
        """End a write that nobody waits for any more; not collective."""
        if self._current is not None and self._current.background is not None:
            self._current.background.abandon()
        self._current = None

    def _complete(self, current: _Save) -> None:
        self._current = None
        start_s = time.perf_counter()
        what = self._what(current.saved.iteration)
        writer = current.strategy.writer
        assert writer is not None
        write = writer.write if current.background is None else current.background.result
        try:
            written = on_all_ranks(write, what)
            self._describe(current, written)
        except Exception:
            if dist.get_rank() == 0:
                path = self._folder.path_while_saving(current.saved.iteration)
                shutil.rmtree(path, ignore_errors=True)
            raise
        end_s = time.perf_counter()
        current.stall_s = current.stall_s + end_s - start_s
        if current.background is None:
            current.stall_s = end_s - current.start_s
        self._tell(current, end_s - current.start_s)
        if self._keep_last is not None and dist.get_rank() == 0:
            self._delete_surplus(self._keep_last)

    def _describe(self, current: _Save, written: Written) -> None:
        """Rank 0 writes what says where everything lies, and the folder gets its name."""
        rank = dist.get_rank()
        everyone: list[Written] | None = [written] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(written, everyone)
        what = self._what(current.saved.iteration)
        strategy = current.strategy
        path = self._folder.path_while_saving(current.saved.iteration)

        def finish() -> None:
            if everyone is not None:
                assert strategy.writer is not None
                assert strategy.planned is not None
                strategy.writer.finish(strategy.planned, [list(each.results) for each in everyone])

        def publish() -> None:
            if everyone is not None:
                files = {name: record for each in everyone for name, record in each.files.items()}
                for name in files_of(path):
                    if name not in files:
                        files[name] = FileRecord(
                            (path / name).stat().st_size, sha256_of(path / name)
                        )
                saved = current.saved
                Manifest(
                    iteration=saved.iteration,
                    num_ranks=dist.get_world_size(),
                    model=saved.model,
                    state=saved.state,
                    configuration=saved.configuration,
                    files=files,
                ).write(path)
                self._folder.publish(saved.iteration)

        on_all_ranks(finish, what)
        for finalize in current.finalize_fns:  # upstream's metadata.json
            finalize()
        on_all_ranks(publish, what)

    def _state_dict(self, saved: SavedState) -> dict[str, Any]:
        """Upstream's form of state dict, whose tensors are views of the shards."""
        engine = self._engine
        moments = {
            MASTER: engine.shards.parameters,
            EXP_AVG: engine.optimizer.exp_avg,
            EXP_AVG_SQ: engine.optimizer.exp_avg_sq,
        }
        if self._asynchronous:
            # A fork cannot read a device.
            moments = {prefix: on_host(flat) for prefix, flat in moments.items()}
        state: dict[str, Any] = dict(saved.upstream)
        state["model"] = sharded_tensors(engine.shards, moments[MASTER], self._stored, MODEL)
        # Alike on all ranks; rank 0 writes them.
        state["model_objects"] = {
            each.unique_key: dataclasses.replace(each, replica_id=dist.get_rank())
            for each in self._objects
        }
        state["optimizer"] = dict(saved.upstream["optimizer"]) | {
            "param_state": {
                prefix: sharded_tensors(engine.shards, flat, self._stored, prefix)
                for prefix, flat in moments.items()
            }
        }
        return state

    def _what(self, iteration: int) -> str:
        return f"iteration {iteration} cannot be saved to {self._folder.root}"

    def _tell(self, current: _Save, save_s: float) -> None:
        if dist.get_rank() == 0:
            path = self._folder.path_of(current.saved.iteration)
            num_bytes = Manifest.read(path).num_bytes
            self._log(
                f"saved checkpoint {path}: {num_bytes / _BYTES_PER_MB:.1f} MB in {save_s:.2f} s, "
                f"for {current.stall_s:.2f} s of which training stood still"
            )

    def _delete_surplus(self, num_kept: int) -> None:
        """In a thread: deleting large files takes its time."""
        if self._deletions is not None:
            self._deletions.join()

        def delete() -> None:
            for iteration in self._folder.surplus(num_kept):
                try:
                    self._folder.delete(iteration)
                except OSError as error:
                    self._log(f"warning: checkpoint {iteration} cannot be deleted: {error}")

        self._deletions = threading.Thread(target=delete, name="hydraulis-delete-checkpoints")
        self._deletions.start()


def _say_nothing(message: str) -> None:
    """The log of ranks other than 0."""
